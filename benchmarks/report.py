"""Recorded figures -> the README's table, the documentation's benchmarks page and the pictures.

``python -m benchmarks.report`` prints all tables; with ``--write`` they go into docs/benchmarks.md,
the one table of README.md between its ``benchmarks`` marks, and the pictures into docs/images/.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import plots
from benchmarks.peers import DISTRIBUTIONS
from benchmarks.plots import COLOURS

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = "docs/benchmarks.md"
IMAGES = "docs/images"
#: The pictures: a file's name, and what it shows.
PICTURES = {
    "attention.png": "TFLOP/s of causal attention, forward and backward, by sequence length",
    "random_shapes.png": "cuattn's speed over the best peer's, for shapes drawn at random",
    "attention_forward.png": "TFLOP/s of forward attention, full and causal, with all tiers",
    "attention_backward.png": "TFLOP/s of backward attention, full and causal",
    "quantized_caches.png": "The speed of decoding over quantised caches, of 16 bits'",
}
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

#: The head_dim of the README's table.
README_HEAD_DIM = 128


def load(files: Iterable[pathlib.Path], group: str) -> list[dict[str, Any]]:
    """A group's cases in files of recorded results: the last of each, with its machine and
    commit."""
    latest: dict[str, dict[str, Any]] = {}
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for run in sorted(runs, key=lambda run: run["datetime"]):
        for benchmark in run["benchmarks"]:
            if benchmark["group"] != group:
                continue
            latest[benchmark["fullname"]] = {
                **(benchmark["params"] or {}),
                **benchmark["extra_info"],
                "name": benchmark["fullname"].partition("::")[2],
                "group": group,
                "machine": run["machine_info"],
                "commit": run["commit_info"]["id"],
                "date": run["datetime"][:10],
            }
    return list(latest.values())


def beside(
    records: list[dict[str, Any]], tier: str, others: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Records of the fastest tier, with another tier's speed on the same shapes beside it."""

    def shape(record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(record[name] for name in ("dtype", "causal", "head_dim", "seqlen"))

    speeds = {shape(r): {f"cuattn {tier}": r["tflops"]["cuattn"]} for r in others}
    return [r | {"tflops": r["tflops"] | speeds.get(shape(r), {})} for r in records]


def table(records: list[dict[str, Any]]) -> str:
    """Attention in TFLOP/s as Markdown: a row for each shape and mask, the fastest in bold."""
    names = [name for name in COLOURS if any(name in r["tflops"] for r in records)]
    lines = [
        "| head_dim | mask | seqlen | " + " | ".join(names) + " |",
        "|" + " --- |" * (3 + len(names)),
    ]
    for r in sorted(records, key=lambda r: (r["head_dim"], r["causal"], r["seqlen"])):
        line = [str(r["head_dim"]), mask(r), str(r["seqlen"])]
        for name in names:
            speed = r["tflops"].get(name)
            bold = "**" if speed == max(r["tflops"].values()) else ""
            line.append("" if speed is None else f"{bold}{speed:.0f}{bold}")
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def mask(record: dict[str, Any]) -> str:
    """The name of a record's mask."""
    return "causal" if record["causal"] else "full"


def comparison(records: list[dict[str, Any]], what: str = "cuattn") -> list[str]:
    """One line for each peer: the geometric mean, the least and the most of cuattn's speed over the
    peer's."""
    lines = []
    for name in COLOURS:
        ratios = [r["tflops"]["cuattn"] / r["tflops"][name] for r in records if name in r["tflops"]]
        if not name.startswith("cuattn") and ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(
                f"- {what}'s speed over {name}'s: {mean:.2f}× in the geometric mean of "
                f"{len(ratios)} shapes, {min(ratios):.2f}× at least, {max(ratios):.2f}× at most."
            )
    return lines


def host(records: list[dict[str, Any]]) -> list[str]:
    """What a call costs beside its kernel, one line for each benchmark of it."""
    lines = []
    for r in records:
        when = f" ({r['date']}, commit {r['commit'][:10]})"
        if "microseconds" in r:
            call, bare = r["microseconds"]["call"], r["microseconds"]["bare launch"]
            lines.append(
                f"- A call takes the host {call:.1f} µs; "
                f"the bare launch of an empty kernel takes {bare:.1f} µs{when}."
            )
        if "seen_microseconds" in r:
            times = dict(r["seen_microseconds"])
            torch = times.pop("torch", None)
            calls = ", ".join(f"{n} {us:.1f}" for n, us in times.items())
            beside = "" if torch is None else f"; torch's scaled_dot_product_attention {torch:.1f}"
            lines.append(f"- Calls of seen shapes take the host, in µs: {calls}{beside}{when}.")
        if "sampler_microseconds" in r:
            calls = ", ".join(f"{n} {us:.0f}" for n, us in r["sampler_microseconds"].items())
            lines.append(
                f"- Of the sampling operations one call takes the host, in µs: {calls}{when}."
            )
        # In a process that did not take longer than the later ones, nothing was compiled.
        if r.get("compiling_ms", 0) > r.get("cached_ms", 0):
            lines.append(
                f"- The first call of a variant takes {r['compiling_ms']:.0f} ms, "
                f"with compiling it, and {r['cached_ms']:.0f} ms in later processes, "
                f"which find it in the kernel cache{when}."
            )
    return lines


def cpu(records: list[dict[str, Any]]) -> list[str]:
    """One line on the NumPy side, for each machine that it was measured on."""
    machines: dict[str, list[str]] = {}
    for r in sorted(records, key=lambda r: (r["causal"], r["seqlen"])):
        speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in r["gflops"].items())
        shape = f"{'causal' if r['causal'] else 'full'} {r['seqlen']}: {speeds}"
        machines.setdefault(f"{r['machine']['cpu']}; {r['date']}", []).append(shape)
    return [
        f"- With NumPy arrays, float32, 8 heads of 64, in GFLOP/s: {'; '.join(shapes)} ({machine})."
        for machine, shapes in machines.items()
    ]


def one_core(files: Iterable[pathlib.Path]) -> list[str]:
    """The NumPy side on one core: two lines for each machine that it was measured on."""
    groups = {
        "attention on one core of a CPU": "float32 forward beside torch, 8 heads of 64 unless said",
        "decoding on one core of a CPU": "a step of decoding over 8192 keys by the cache's dtype",
    }
    lines = []
    for group, title in groups.items():
        machines: dict[str, list[str]] = {}
        for r in load(files, group):
            times = ", ".join(f"{name} {ms:.3g}" for name, ms in r["ms"].items())
            shape = f"{r['heads_q']} heads" if "heads_q" in r else r["shape"]
            shape += " causal" if r.get("causal") else ""
            machines.setdefault(f"{r['machine']['cpu']}; {r['date']}", []).append(
                f"{shape}: {times}"
            )
        lines += [
            f"- With NumPy arrays, one core, in ms, {title}: {'; '.join(shapes)} ({at})."
            for at, shapes in machines.items()
        ]
    return lines


def decoding(records: list[dict[str, Any]], heads: Iterable[int] = (32, 8, 128)) -> str:
    """Decoding with these heads in µs (per cent of the copy ceiling) as Markdown: a row for each
    batch and length of the caches, a column for each contestant."""
    cells = {tuple(r["shape"]): r for r in records if tuple(r.get("heads") or ()) == tuple(heads)}
    names = list(dict.fromkeys(name for r in cells.values() for name in r["microseconds"]))
    lines = [
        "| sequences × keys | " + " | ".join(names) + " |",
        "|" + " --- |" * (1 + len(names)),
    ]
    for (batch, length), r in cells.items():
        line = [
            f"{r['microseconds'][name]:.1f} ({r['of_copy'][name]:.0%})"
            if name in r["of_copy"]
            else ""
            for name in names
        ]
        lines.append(f"| {batch} × {length} | " + " | ".join(line) + " |")
    return "\n".join(lines)


def sampling(records: list[dict[str, Any]], vocab: int = 128256) -> str:
    """Samplers on float32 logits in µs as Markdown, on peaked / flat rows: a row for each
    operation, a column for each batch and one for torch at the largest; the last row is what
    reading the logits once takes at the copy's rate."""
    chosen = [r for r in records if (r["vocab"], r["dtype"]) == (vocab, "float32")]
    batches = sorted({r["batch"] for r in chosen})
    columns = [*((batch, "cuattn") for batch in batches), (batches[-1], "torch")]
    cells: dict[str, dict[tuple[int, str], list[str]]] = {}
    for r in sorted(chosen, key=lambda r: r["rows"], reverse=True):
        row = cells.setdefault(r["operation"], {column: [] for column in columns})
        for name, time in r["microseconds"].items():
            if (r["batch"], name) in row:
                row[r["batch"], name].append(f"{time:.1f}" if time < 100 else f"{time:.0f}")
    reads = {r["batch"]: f"{r['read_microseconds']:.1f}" for r in chosen}
    heading = [f"{name}: {batch}" for batch, name in columns]
    return "\n".join(
        [
            "| rows | " + " | ".join(heading) + " |",
            "|" + " --- |" * (1 + len(columns)),
            *(
                f"| {operation} | " + " | ".join(map(" / ".join, row.values())) + " |"
                for operation, row in cells.items()
            ),
            "| one read | " + " | ".join(reads[batch] for batch in batches) + " |  |",
        ]
    )


def quantized(records: list[dict[str, Any]]) -> str:
    """Decoding over caches of codes as Markdown: a row for each shape, a column for each format."""
    formats = list(records[0]["microseconds"])
    lines = [
        "| heads, head_dim | sequences × keys | cache | " + " | ".join(formats) + " |",
        "|" + " --- |" * (3 + len(formats)),
    ]
    for r in records:
        heads_q, heads_kv, head_dim = r["heads"]
        where = f"pages of {r['page_size']}" if r["page_size"] else "contiguous"
        cells = [f"{us:.1f} ({r['of_copy'][name]:.0%})" for name, us in r["microseconds"].items()]
        shape = "×".join(map(str, r["shape"]))
        lines.append(
            f"| {heads_q}/{heads_kv}, {head_dim} | {shape} | {where} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def latents(records: list[dict[str, Any]]) -> str:
    """Latent attention as Markdown: a row for each call, two columns for each contestant."""
    names = list(dict.fromkeys(name for r in records for name in r["microseconds"]))
    heading = [f"{name}, {unit}" for name in names for unit in ("µs", "TFLOP/s")]
    lines = ["| call | " + " | ".join(heading) + " |", "|" + " --- |" * (1 + len(heading))]
    for r in records:
        cells = []
        for name in names:
            if name not in r["microseconds"]:
                cells += ["", ""]
                continue
            of_copy = "" if "prefill" in r["name"] else f" ({r['of_copy'][name]:.0%})"
            cells.append(f"{r['microseconds'][name]:.1f}{of_copy}")
            cells.append(f"{r['tflops'][name]:.0f}")
        lines.append(f"| {_latent_call(r)} | " + " | ".join(cells) + " |")
    if "FA-3" in names:
        lines += ["", "FA-3 takes values padded to 192 features; its rate counts 128."]
    return "\n".join(lines)


def _latent_call(record: dict[str, Any]) -> str:
    """What a benchmark of bench_mla.py calls."""
    kind = record["name"].partition("[")[0]
    if kind == "bench_mla_decode":
        heads, batch, length, tokens = record["shape"]
        several = f", {tokens} tokens each" if tokens > 1 else ""
        return f"{heads} heads, {batch} × {length}{several}, pages of {record['page_size']}"
    if kind == "bench_mla_codes":
        rows = {"joined": "float8_e4m3", "flashmla": "FlashMLA's rows of 656 bytes"}
        return f"{record['heads']} heads, 64 × 16384, {rows[record['layout']]}"
    if kind == "bench_mla_sparse":
        return f"{record['heads']} heads, 2048 chosen tokens of 65536 in 64 sequences"
    return {
        "bench_mla_prefill": "`mla_prefill` of 8192 tokens, 16 heads",
        "bench_prefill_attention": "… its attention alone, heads of 192 and 128, causal",
    }[kind]


def prompts(records: list[dict[str, Any]]) -> str:
    """Chunks of prompts over caches as Markdown: per cent of `flash_attention`'s speed on the same
    keys end to end; then batches that mix them with decoding, and short queries over long keys."""
    chunks = [r for r in records if "of_contiguous" in r and "chunk" in r]
    names = [name for name in chunks[0]["of_contiguous"] if name != "flash_attention"]
    lines = [
        "| tokens over keys | heads | " + " | ".join(names) + " |",
        "|" + " --- |" * (2 + len(names)),
    ]
    for r in chunks:
        (tokens, keys, batch), (heads_q, heads_kv, dim) = r["chunk"], r["heads"]
        cells = [f"{r['of_contiguous'][name]:.0%}" for name in names]
        lines.append(
            f"| {batch} × {tokens} over {keys} | {heads_q}/{heads_kv} of {dim} | "
            + " | ".join(cells)
            + " |"
        )
    lines.append("")
    for r in records:
        if "of_contiguous" in r and "chunk" not in r:
            share = r["of_contiguous"]["pages of 64"]
            lines.append(
                "- 16 sequences of 64 to 4096 tokens in one call, pages of 64: "
                f"{share:.0%} of `flash_attention_varlen` on the same keys end to end."
            )
    for r in records:
        if r["group"] == "mixed batches":
            few, few_keys, batch, tokens, keys = r["batch"]
            share = r["microseconds"]["cuattn"] / r["microseconds"]["in two calls"]
            lines.append(
                f"- {few} × 1 token over {few_keys} keys and {batch} × {tokens} over {keys} in one "
                f"call, pages of {r['page_size']}: {share:.2f} of the time of two calls."
            )
    short = [r for r in records if r["group"] == "short queries" and "FA-3" in r["tflops"]]
    what = "Of 64 to 512 queries over 8192 to 32768 keys, `flash_attention`"
    return "\n".join([*lines, *comparison(short, what)])


def prompts_over_codes(records: list[dict[str, Any]]) -> str:
    """Chunks of prompts over codes as Markdown: µs over pages of bfloat16, and for each kind of
    codes how many times as long."""
    names = [name for name in records[0]["microseconds"] if name != "bfloat16"]
    lines = [
        "| tokens over keys | heads | pages of | bfloat16 | " + " | ".join(names) + " |",
        "|" + " --- |" * (4 + len(names)),
    ]
    for r in records:
        (tokens, keys, batch), (heads_q, heads_kv) = r["chunk"], r["heads"]
        times = r["microseconds"]
        cells = [f"{times[name] / times['bfloat16']:.2f}" for name in names]
        lines.append(
            f"| {batch} × {tokens} over {keys} | {heads_q}/{heads_kv} | {r['page_size']} | "
            f"{times['bfloat16']:.0f} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def gradients(records: list[dict[str, Any]]) -> str:
    """Backward attention: the table of forward attention, and the comparison."""
    return "\n".join([table(records), "", *comparison(records)])


def provenance(records: list[dict[str, Any]], what: str) -> str:
    """On what, with what and when the figures were taken; one sentence for each run."""
    runs = {}
    for r in records:
        m = r["machine"]
        peers = "".join(f", {name} {m[name]}" for name in DISTRIBUTIONS if name in m)
        ceilings = [
            f"cuBLAS reached {r['matmul_tflops']:.0f} TFLOP/s (8192³)"
            if "matmul_tflops" in r
            else "",
            f"a copy {r['copy_tb_per_s']:.2f} TB/s" if "copy_tb_per_s" in r else "",
        ]
        measured = " and ".join(filter(None, ceilings))
        runs[(r["date"], r["commit"])] = (
            f"{what}; {m['gpu']}, driver {m['driver']}, NVRTC {m['nvrtc']}, CuPy {m['cupy']}"
            f"{peers}; {r['date']}, commit {r['commit'][:10]}."
            + (f" In the same process {measured}." if measured else "")
        )
    return " ".join(runs.values())


def options(records: list[dict[str, Any]]) -> str:
    """The speed of calls with options as Markdown: per cent of the plain call's FLOP rate in the
    same run, counted on the tiles that are computed."""
    columns = sorted({(r["head_dim"], r["seqlen"]) for r in records})
    cells: dict[str, dict[tuple[int, int], str]] = {}
    for r in records:
        cells.setdefault(r["option"], {})[r["head_dim"], r["seqlen"]] = f"{r['of_plain']:.0%}"
    heading = [f"head_dim {head_dim}, {seqlen} tokens" for head_dim, seqlen in columns]
    return _by_option(dict(zip(columns, heading, strict=True)), cells)


def _by_option(columns: dict[Any, str], cells: dict[str, dict[Any, str]]) -> str:
    """A Markdown table with a row for each option; `columns` gives the heading of each key of a
    row."""
    return "\n".join(
        [
            "| option | " + " | ".join(columns.values()) + " |",
            "|" + " --- |" * (1 + len(columns)),
            *(
                f"| {option} | " + " | ".join(row.get(column, "") for column in columns) + " |"
                for option, row in cells.items()
            ),
        ]
    )


def gradient_options(records: list[dict[str, Any]]) -> str:
    """The speed of gradients with options as Markdown: per cent of the plain call's FLOP rate in
    the same run, counted on the tiles that are computed, and in brackets the ratio to
    FlashAttention-3, where it has the option."""
    columns = sorted({(r["head_dim"], r["causal"]) for r in records})
    cells: dict[str, dict[tuple[int, bool], str]] = {}
    for r in records:
        rates = r["tflops_of_tiles"]
        peer = f" ({rates['cuattn'] / rates['FA-3']:.2f})" if "FA-3" in rates else ""
        row = cells.setdefault(r["option"], {})
        row[r["head_dim"], r["causal"]] = f"{r['of_plain']:.0%}{peer}"
    heading = [f"head_dim {head_dim}{', causal' * causal}" for head_dim, causal in columns]
    return _by_option(dict(zip(columns, heading, strict=True)), cells)


PROMPTS = ("prompts over pages", "mixed batches", "short queries")
RANDOM_SHAPES = {"forward": "forward attention", "decoding": "decoding", "latent": "latents"}


def random_shapes(records: list[dict[str, Any]]) -> str:
    """One line for each kind of calls on cuattn's speed over the best peer's, for shapes that were
    drawn at random."""
    lines = []
    for group, what in RANDOM_SHAPES.items():
        compared = [r for r in records if r["group"].split()[1] == group and r["of_best"]]
        if not compared:
            continue
        ratios = [r["of_best"] for r in compared]
        worst = min(compared, key=lambda r: r["of_best"])
        shape = ", ".join(f"{name} {value}" for name, value in worst["shape"].items())
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(
            f"- {what}, seed {worst['seed']}: {mean:.2f}× in the geometric mean of the "
            f"{len(ratios)} shapes that a peer serves, {min(ratios):.2f}× at least ({shape})."
        )
    return "\n".join(lines)


def section(
    title: str,
    introduction: str,
    draw: Callable[[list[dict[str, Any]]], str],
    records: list[dict[str, Any]],
    what: str,
    picture: str = "",
) -> list[str]:
    """A title, what is shown, a picture, a table and where its figures come from; nothing without
    records."""
    if not records:
        return []
    images = [] if not picture else [markdown(picture, PAGE), ""]
    lines = ["", f"## {title}", "", introduction, "", *images, draw(records)]
    return [*lines, "", provenance(records, what)]


def markdown(picture: str, page: str) -> str:
    """A picture as a page shows it."""
    place = pathlib.PurePosixPath(IMAGES).relative_to(pathlib.PurePosixPath(page).parent)
    return f"![{PICTURES[picture]}]({place / picture})"


def draw_pictures(files: list[pathlib.Path], folder: pathlib.Path) -> None:
    """Write the pictures of what is recorded."""

    def by_mask(records: list[dict[str, Any]], what: str) -> dict[str, list[dict[str, Any]]]:
        masks = sorted({mask(r) for r in records}, reverse=True)
        return {f"{what}, {name}": [r for r in records if mask(r) == name] for name in masks}

    forward, backward = (load(files, f"attention {what}") for what in ("forward", "backward"))
    rows = by_mask(forward, "forward") | by_mask(backward, "backward")
    causal = {name: records for name, records in rows.items() if name.endswith("causal")}
    plots.speeds(causal or rows, folder / "attention.png")
    for tier in ("sm80", "simt"):
        forward = beside(forward, tier, load(files, f"attention forward, {tier} tier"))
    plots.speeds(by_mask(forward, "forward"), folder / "attention_forward.png")
    if backward:
        plots.speeds(by_mask(backward, "backward"), folder / "attention_backward.png")
    random = [load(files, f"random {group} shapes") for group in RANDOM_SHAPES]
    if all(random[:2]):
        plots.random_shapes(*random, folder / "random_shapes.png")
    wanted = ([32, 8, 128], 0)
    quantized = load(files, "quantized")
    if caches := [r for r in quantized if (r.get("heads"), r.get("page_size")) == wanted]:
        plots.caches(caches, folder / "quantized_caches.png")


def main(argv: list[str] | None = None) -> None:
    """Print the table, or write it and the plot into the tree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument(
        "results", nargs="*", type=pathlib.Path, help="default: benchmarks/results/*.json"
    )
    parser.add_argument("--write", action="store_true", help="update README.md and docs/images/")
    arguments = parser.parse_args(argv)
    files = arguments.results or sorted(RESULTS.glob("*.json"))
    records = load(files, "attention forward")
    if not records:
        parser.error(
            "no recorded figures: run "
            "pytest benchmarks --benchmark-json=benchmarks/results/NAME.json"
        )
    what = "bfloat16, 16384 tokens, heads · head_dim = 2048"
    summary = "\n".join(
        [
            "TFLOP/s of forward attention:",
            "",
            table([r for r in records if r["head_dim"] == README_HEAD_DIM] or records),
            "",
            *comparison(records),
            "",
            provenance(records, what),
        ]
    )
    comparisons, sources = comparison(records), [provenance(records, what)]
    for tier in ("sm80", "simt"):
        others = load(files, f"attention forward, {tier} tier")
        records = beside(records, tier, others)
        comparisons += comparison(others, f"The {tier} tier")
        if others and (source := provenance(others, what)) != sources[0]:
            sources.append(f"cuattn {tier}: {source}")
    calls = [*host(load(files, "host")), *cpu(load(files, "attention forward on the CPU"))]
    calls += one_core(files)
    text = "\n".join(
        [
            "## Forward attention",
            "",
            "TFLOP/s, the fastest of a row in bold.",
            "",
            markdown("attention_forward.png", PAGE),
            "",
            table(records),
            "",
            *comparisons,
            "",
            *sources,
            *section(
                "Gradients",
                "TFLOP/s of the backward pass, as 2.5 forward passes, the fastest of a row in "
                "bold.",
                gradients,
                load(files, "attention backward"),
                what,
                "attention_backward.png",
            ),
            *section(
                "Options of the backward pass",
                "Per cent of the plain call's FLOP rate in the same run, counted on the tiles that "
                "are computed (in brackets: of FlashAttention-3's). The window has 1024 keys of "
                "16384, GQA 8 query heads a key head; ragged sequences have 128 to 8192 tokens.",
                gradient_options,
                load(files, "attention backward options"),
                what,
            ),
            *section(
                "Options",
                "Per cent of the plain call's FLOP rate in the same run, counted on the tiles that "
                "are computed. The window has 1024 keys, GQA 8 query heads a key head.",
                options,
                load(files, "attention options"),
                what,
            ),
            *section(
                "Decoding",
                "µs (per cent of a copy's rate, counting K and V once), one query token a sequence "
                "over contiguous caches and over pages, replays of a captured graph.",
                decoding,
                load(files, "decoding"),
                "bfloat16, 32 query heads over 8 of 128",
            ),
            *section(
                "Quantised caches",
                "µs of one query token a sequence (per cent of a copy's rate, counting each "
                "cache's own bytes, scales included).",
                quantized,
                [r for r in load(files, "quantized") if r.get("page_size") in (0, 16)],
                "scales by token and head",
                "quantized_caches.png",
            ),
            *section(
                "Prompts over caches",
                "Per cent of `flash_attention`'s speed on the same keys laid end to end: "
                "`paged_attention` over pages in random order, and `flash_decode` over a "
                "contiguous cache, causal.",
                prompts,
                [r for group in PROMPTS for r in load(files, group)],
                "bfloat16",
            ),
            *section(
                "Prompts over quantised caches",
                "`paged_attention` over pages of bfloat16 (µs), and over codes with a scale for "
                "each token and head (times as long); keys of int8 and int4 are rotated.",
                prompts_over_codes,
                load(files, "prompts over codes"),
                "bfloat16, head_dim 128",
            ),
            *section(
                "Latent attention",
                "µs (per cent of a copy's rate, counting the cache once) and TFLOP/s of the "
                "absorbed form, one token a sequence unless said, in pages of 64 unless said.",
                latents,
                load(files, "mla"),
                "bfloat16, latents of 512 + 64 features",
            ),
            *section(
                "Shapes drawn at random",
                "Users' shapes are in no table: the benchmark draws these, and compares each with "
                "the best of the peers that serve it.",
                random_shapes,
                [r for group in RANDOM_SHAPES for r in load(files, f"random {group} shapes")],
                "bfloat16",
                "random_shapes.png",
            ),
            *section(
                "Sampling",
                "µs from logits to tokens, by the number of rows, on peaked / flat ones (standard "
                "deviation 4 / 1), replays of a captured graph. `joint` is top-k of 50 and top-p "
                "of 0.9 together, `select` is `sampling.top_k` of 50, and one read is the logits' "
                "bytes at a copy's rate.",
                sampling,
                load(files, "sampling"),
                "float32, vocabulary of 128256",
            ),
            *(["", "## Calls, first calls and the CPU", "", *calls] if calls else []),
        ]
    )
    if not arguments.write:
        print(text)
        return
    draw_pictures(files, ROOT / IMAGES)
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{summary}\n{END}{after}", encoding="utf-8")
    page = ROOT / PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        "# Benchmarks\n\nWritten by `python -m benchmarks.report --write` from "
        "`benchmarks/results/`. [How they are run](notes/benchmarks.md) says what a figure "
        f"means.\n\n{text}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
