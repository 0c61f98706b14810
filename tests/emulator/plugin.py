"""``pytest -m gpu --emulate``: GPU tests whose kernels run on the CPU."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate",
        nargs="?",
        const="sm_90",
        metavar="ARCH",
        help="run GPU tests with kernels emulated on the CPU, as of sm_80, sm_90 (the default) or "
        "sm_120",
    )
    parser.addoption(
        "--emulate-options",
        default="",
        metavar="WORDS",
        help="words for the emulator: multiprocessors=132 devices=2 seed=0 late=1; see "
        "tests/emulator/README.md",
    )


def pytest_configure(config: pytest.Config) -> None:
    arch = config.getoption("emulate")
    if arch is None:
        return
    if "cupy" in sys.modules:
        raise pytest.UsageError("--emulate: CuPy is imported already")
    # In the environment, for processes that tests start.
    os.environ["CUATTN_EMULATE"] = f"{arch} {config.getoption('emulate_options')}"
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(FOLDER))


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("emulate") is not None and str(FOLDER) in sys.path:
        sys.path.remove(str(FOLDER))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> pytest.TestReport:
    """What the emulator does not have skips a test."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    while error is not None:
        if type(error).__name__ == "NotEmulated":
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1], f"not emulated: {error}")
            break
        error = error.__cause__ or error.__context__
    return report
