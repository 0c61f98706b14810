"""``pytest -m gpu --emulate``: GPU tests whose kernels run on the CPU."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from tests.watchdog import LIMIT_S

#: How many times as long as on a GPU a test may go without a launch.
SLOWER = 20
FOLDER = pathlib.Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate",
        action="store_true",
        help="run GPU tests with kernels emulated on the CPU",
    )
    parser.addoption(
        "--emulate-options",
        default="",
        metavar="WORDS",
        help="what is emulated, such as 'sm_80 multiprocessors=4 seed=1 late=1'; see "
        "tests/emulator/README.md",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("emulate"):
        return
    if "cupy" in sys.modules:
        raise pytest.UsageError("--emulate: CuPy is imported already")
    if config.option.time_limit == LIMIT_S:
        config.option.time_limit *= SLOWER
    # In the environment, for processes that tests start.
    os.environ["CUATTN_EMULATE"] = config.getoption("emulate_options")
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(FOLDER))
    from cupy._build import shared_object
    from cupy._errors import EmulationError

    try:
        shared_object()  # now, since a test would be over its time limit
    except EmulationError as error:
        raise pytest.UsageError(f"--emulate: {error}") from error


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("emulate") and str(FOLDER) in sys.path:
        sys.path.remove(str(FOLDER))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("emulate"):
        for item in items:
            if (mark := item.get_closest_marker("not_emulated")) is not None:
                item.add_marker(pytest.mark.skip(reason=f"not emulated: {mark.args[0]}"))


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


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Which kernels ran, by this process."""
    if config.getoption("emulate"):
        from cupy._kernels import launches

        counts = ", ".join(f"{name} {count}" for name, count in sorted(launches.items()))
        terminalreporter.write_line(f"emulated launches: {counts or 'none'}")
