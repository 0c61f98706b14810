"""Skips the tests that need a GPU where there is none, and gives every test fresh random numbers
that can be had again."""

from __future__ import annotations

import functools
import os
import secrets
import zlib

# Before NumPy is loaded, here and in the programs that tests start: OpenBLAS's threads wait for
# each other by spinning, which takes ten times as long where something else has a core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest

from tests import watchdog
from tests.emulator import plugin as emulator

# A first example may compile a kernel or load a library: time is no sign of a fault.
hypothesis.settings.register_profile("cuattn", deadline=None, print_blob=True)
hypothesis.settings.load_profile("cuattn")


@functools.cache
def missing_gpu() -> str:
    """Why `gpu`-marked tests cannot run here; empty where they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not available: {error}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return ""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.is_registered(emulator):
        pluginmanager.register(emulator)
    parser.addoption(
        "--random-seed",
        type=int,
        # In the environment, which pytest-xdist's workers share.
        default=int(os.environ.setdefault("CUATTN_RANDOM_SEED", str(secrets.randbits(32)))),
        help="seed of the rng fixture: repeats the inputs of an earlier run (default: new ones)",
    )
    parser.addoption(
        "--time-limit",
        type=float,
        default=watchdog.LIMIT_S,
        help="seconds without a launch after which the process of a GPU test is killed; 0: never",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    reason = missing_gpu()
    if reason:
        gpu = f"skipping the tests that need a GPU ({reason})"
    else:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"]
        gpu = f"on {name.decode()}, with CuPy {cupy.__version__}"
    seed = config.getoption("random_seed")
    return [
        f"cuattn: {gpu}",
        f"inputs: NumPy {np.__version__}, --random-seed={seed} repeats them",
    ]


class FailuresAtOnce:
    """Names each failed test as it fails: a run that is cut off has no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            last = report.longreprtext.strip().splitlines()[-1:]
            self.reporter.write_line(" ".join([f"\nfailed: {report.nodeid}", *last]))


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(FailuresAtOnce(reporter))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What repeats a failure, also where -q left out the header."""
    if terminalreporter.stats.get("failed"):
        seed = config.getoption("random_seed")
        terminalreporter.write_line(f"--random-seed={seed} repeats the inputs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of this test's own: new in each run, the same for the same test and
    --random-seed."""
    seed = request.config.getoption("random_seed")
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest):
    """Print a line at once, past pytest's capture: what a test is doing that takes a while."""
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(f"  {line}")

    return write
