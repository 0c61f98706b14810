"""The snippets of the README and of the documentation run, and print what the pages say; the API
pages name everything that is public."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import pathlib
import re

import pytest

import cuattn
from cuattn import sampling

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "guides").glob("*.md"))]

#: A fenced block, with the HTML comment on the line before it that says why it is not run.
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


def snippets(page: str) -> list[tuple[str, str | None, str | None, int]]:
    """(code, what it prints, why it is not run, line) of each Python block: what it prints is the
    ``text`` block right behind it."""
    blocks = list(BLOCK.finditer(page))
    found = []
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block["language"] != "python":
            continue
        printed = None
        if (
            following is not None
            and following["language"] == "text"
            and not page[block.end() : following.start()].strip()
        ):
            printed = following["text"]
        line = page.count("\n", 0, block.start("text")) + 1
        found.append((block["text"], printed, block["note"], line))
    return found


def run(page: pathlib.Path, notes: set[str | None], xp: str = "numpy") -> None:
    """Run a page's snippets whose note is one of these, in one namespace; compile all others."""
    namespace: dict = {"__name__": "snippet"}
    text = page.read_text(encoding="utf-8").replace("import numpy as np", f"import {xp} as np")
    for code, printed, note, line in snippets(text):
        # Blank lines in front, so that a traceback shows the line of the page.
        compiled = compile("\n" * (line - 1) + code, str(page), "exec")
        if note not in notes:
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compiled, namespace)
        if printed is not None:
            assert out.getvalue() == printed, f"{page.name}, line {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_snippets_run_and_print_what_the_page_says(page):
    run(page, {None})


def test_calls_beside_other_libraries_fit_ours():
    """They have no arrays to run on: each must have arguments that its function takes."""
    calls = 0
    for code, _, note, _ in snippets((DOCS / "guides" / "coming_from.md").read_text("utf-8")):
        assert note == "other libraries"
        for call in ast.walk(ast.parse(code)):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("cuattn.")):
                continue
            function = getattr(cuattn, ast.unparse(call.func).removeprefix("cuattn."))
            keywords = {str(given.arg): given.value for given in call.keywords}
            inspect.signature(function).bind(*call.args, **keywords)
            calls += 1
    assert calls >= 7


@pytest.mark.gpu
def test_snippets_that_need_a_gpu():
    for page in PAGES:
        run(page, {"needs a GPU"})


@pytest.mark.gpu
@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/tutorial.md"])
def test_pages_run_on_a_gpu_as_they_say(page):
    run(ROOT / page, {None}, "cupy")


def test_the_readme_has_the_figures_of_the_benchmarks_page():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    over_fa3, over_cudnn = (
        re.findall(rf"^- cuattn's speed over {peer}'s: ([\d.]+)× ", page, re.M)
        for peer in ("FA-3", "cuDNN")
    )
    (forward, backward), (forward_cudnn, backward_cudnn) = over_fa3, over_cudnn
    assert (
        f"{forward} times FlashAttention-3's speed and {forward_cudnn} times cuDNN's forward, "
        f"{backward} and {backward_cudnn} times backward"
    ) in readme
    drawn = re.findall(r"seed \d+: ([\d.]+)× in the geometric mean.*?, ([\d.]+)× at least", page)
    (attention, least), (decoding, least_decoding), (latents, least_latents) = drawn
    assert (
        f"Forward attention is {attention} times as fast as the fastest in the geometric mean "
        f"({least} at least), decoding {decoding} times ({least_decoding}), latent attention "
        f"{latents} times ({least_latents})"
    ) in readme


def test_there_are_snippets():
    assert sum(len(snippets(page.read_text(encoding="utf-8"))) for page in PAGES) > 20


def test_the_api_pages_name_everything_public():
    text = (DOCS / "api" / "index.rst").read_text(encoding="utf-8")
    listed = set(re.findall(r"^   (\w+)$", text, re.M))
    assert listed == {*cuattn.__all__, *sampling.__all__} - {"sampling"}


def anchors(page: pathlib.Path) -> set[str]:
    """What links may have behind ``#``: a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, *(DOCS / "notes").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
            if "://" in target or target.startswith("gallery/"):  # the gallery is built
                continue
            where = f"{page.relative_to(ROOT)}: {target}#{anchor}"
            there = page.parent / target if target else page
            assert there.exists(), where
            assert not anchor or anchor in anchors(there), where
