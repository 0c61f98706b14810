"""What a type checker makes of a user's program, and that it is told of every argument."""

from __future__ import annotations

import inspect
import pathlib
import re
import runpy
import subprocess
import sys
import typing
from collections.abc import Sequence
from typing import Any

import pytest

import cuattn
from cuattn import _typing

ROOT = pathlib.Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "typing"
#: As strict as it is, and silent about all but the programs.
OPTIONS = (
    "--config-file=",
    "--strict",
    "--follow-imports=silent",
    "--ignore-missing-imports",
    "--no-error-summary",
    "--no-pretty",
)


@pytest.fixture(scope="module")
def mypys_errors(say) -> set[tuple[str, int, str]]:
    """File, line and code of each error of mypy's in the programs."""
    pytest.importorskip("mypy")
    say("checking the types of a user's program")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *OPTIONS, str(PROGRAMS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert not done.stderr
    found = re.findall(r"(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    return {(file, int(line), code) for file, line, code in found}


def test_right_calls_are_accepted(mypys_errors):
    assert not {error for error in mypys_errors if error[0] == "right_calls.py"}


def test_right_calls_run():
    runpy.run_path(str(PROGRAMS / "right_calls.py"), run_name="__main__")


def test_wrong_calls_are_caught(mypys_errors):
    lines = (PROGRAMS / "wrong_calls.py").read_text(encoding="utf-8").splitlines()
    wanted = {
        ("wrong_calls.py", number, match[1])
        for number, line in enumerate(lines, 1)
        if (match := re.search(r"# error: ([\w-]+)$", line))
    }
    assert wanted
    assert {error for error in mypys_errors if error[0] == "wrong_calls.py"} == wanted


def overloads(function: Any) -> Sequence[Any]:
    """The overloads of a function, as Python remembers them from 3.11 on."""
    get_overloads = getattr(typing, "get_overloads", lambda _: ())
    return get_overloads(inspect.unwrap(function))


FUNCTIONS = [
    function
    for module in (cuattn, cuattn.sampling)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name)) and overloads(function)
]


@pytest.mark.skipif(not FUNCTIONS, reason="overloads are remembered from Python 3.11 on")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_overloads_have_every_argument(function):
    for overload in overloads(function):
        parameters = dict(inspect.signature(overload).parameters)
        names = set(parameters)
        if options := parameters.get("options"):
            names.remove("options")
            kind = re.fullmatch(r"Unpack\[(\w+)\]", options.annotation)[1]
            assert not names & getattr(_typing, kind).__annotations__.keys()
            names |= getattr(_typing, kind).__annotations__.keys()
        assert names == set(inspect.signature(function).parameters)
