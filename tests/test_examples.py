"""The examples, run as a user runs them; those of generate.py are in test_generate.py, those of
train_chars.py in test_train_chars.py."""

from __future__ import annotations

import re

import pytest

from tests.programs import ROOT, run_example

for needed in ("gguf", "jinja2", "tokenizers"):
    pytest.importorskip(needed, reason="needs the extra 'examples'")


def test_quickstart():
    run = run_example("examples/quickstart.py")
    assert run.returncode == 0, run.stderr
    assert "(2, 512, 8, 64)" in run.stdout


def test_mla():
    run = run_example("examples/mla.py", "--heads", 3, "--prompt", 40, "--tokens", 5)
    assert run.returncode == 0, run.stderr
    assert "absorbed and by the paper's formulas" in run.stdout
    assert "where heads would take 240" in run.stdout
    run = run_example("examples/mla.py", "--heads", 1, "--layers", 1, "--prompt", 1100)
    assert run.returncode == 0, run.stderr
    run = run_example("examples/mla.py", "--prompt", 0)
    assert run.returncode == 2 and "--prompt is 0, must be at least 1" in run.stderr


#: Imported by programs, which are named, and not run themselves.
MODULES = {
    "cublas_matmul": "train_chars.py or generate",
    "engine": "generate",
    "graphs": "generate",
    "llama": "generate",
}
PROGRAMS = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "examples").rglob("*.py"))
    if path.stem not in MODULES
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_have_help(program):
    library = re.fullmatch(r"examples/with_(\w+).py", program)
    if library:
        pytest.importorskip(library[1])
    run = run_example(program, "--help")
    assert run.returncode == 0, run.stderr
    assert "usage:" in run.stdout


@pytest.mark.parametrize("module", MODULES)
def test_modules_say_what_to_run(module):
    run = run_example(f"examples/{module}.py")
    assert run.returncode == 1
    assert f"Run {MODULES[module]}.py instead" in run.stderr
    assert "Traceback" not in run.stderr


# ---------------------------------------------------------------------- a small random model
