"""Kills a test process in which nothing happens any more, and says what it was doing.

A kernel that never ends blocks the process in a CUDA call, from which no exception and no signal
handler of Python's leads out. So another process watches: it is told of each test and of each
launch, and when none has come for a while it names them, has the stacks of all threads printed
(faulthandler's handler is C), and kills. Each pytest process, of pytest-xdist too, has its own.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

LIMIT_S = 60.0  # a first launch waits for a compiler
LAUNCHES = 5  # that are named

#: Another process's whole program: nothing of it needs what the watched one has loaded.
WATCHER = """
import json, os, select, signal, sys, time
pid, launches = int(sys.argv[1]), int(sys.argv[2])
test, limit, last, count, since = None, 0.0, [], 0, 0.0
data = b""
while True:
    left = None if test is None else max(0.0, since + limit - time.monotonic())
    if select.select([0], [], [], left)[0]:
        received = os.read(0, 1 << 16)
        if not received:
            break
        *lines, data = (data + received).split(b"\\n")
        for kind, *content in map(json.loads, lines):
            since = time.monotonic()
            if kind == "test":
                test, limit, seed = content
                last, count = [], 0
            elif kind == "launch":
                last, count = (last + content)[-launches:], count + 1
            else:
                test = None
        continue
    told = [f"{test}: nothing for {limit:g} s, process {pid} is killed"]
    told += [f"  launch {count - len(last) + n + 1}: {name}" for n, name in enumerate(last)]
    told += [f"  --random-seed={seed} repeats the inputs", ""]
    os.write(2, "\\n".join(["", *told]).encode())
    if hasattr(signal, "SIGUSR2"):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0)
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
    break
"""


class Watchdog:
    """Watches this process.

    Parameters
    ----------
    stderr : int
        The file descriptor that a report is written to.
    """

    def __init__(self, stderr: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", WATCHER, str(os.getpid()), str(LAUNCHES)],
            stdin=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
        )
        if hasattr(signal, "SIGUSR2"):
            faulthandler.register(signal.SIGUSR2, file=stderr, all_threads=True)

    def begin(self, test: str, seed: int, limit_s: float = LIMIT_S) -> None:
        """From now on nothing may take longer than `limit_s`."""
        self._tell("test", test, limit_s, seed)

    def launch(self, name: str) -> None:
        """Something happens: the limit counts from here."""
        self._tell("launch", name[:2000])  # less than a pipe takes at once, from any thread

    def end(self) -> None:
        """From now on anything may take as long as it likes."""
        self._tell("end")

    def close(self) -> None:
        """Watch no more."""
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, *message: Any) -> None:
        self._process.stdin.write(json.dumps(message).encode() + b"\n")


def describe_call() -> str:
    """The function of cuattn that was called, the outermost one on the stack that has arrays, and
    its arguments: shapes and dtypes of arrays, and numbers that are not 0 or None."""
    frame, name, values = sys._getframe(1), "", {}
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "cuattn":
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount
            given = {arg: frame.f_locals.get(arg) for arg in code.co_varnames[:count]}
            if any(hasattr(value, "dtype") for value in given.values()):
                name, values = code.co_name, given
        frame = frame.f_back
    parts = []
    for arg, value in values.items():
        if hasattr(value, "dtype"):
            parts.append(f"{arg} {_described(value)}")
        elif isinstance(value, (int, float, str, tuple, list)) and value:
            parts.append(f"{arg}={_described(value)}")
    return f"{name}({', '.join(parts)})"


def _described(value: Any) -> str:
    """Without an array's numbers: these would be waited for, and may not be while a CUDA graph is
    captured."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value[:8]))})"
    return str(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def recording(kernel: Callable, tell: Callable[[str], None]) -> Callable:
    """``compiler.kernel``, whose kernels tell of each launch before it is made."""

    @functools.wraps(kernel)
    def recorded(variant: Any, device: int) -> Callable:
        function = kernel(variant, device)

        def launch(grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
            tell(f"{describe_call()}: {variant.source} ({variant.config}), grid {grid}")
            function(grid, *args, **kwargs)

        return launch

    recorded.cache_clear = kernel.cache_clear
    return recorded


@pytest.fixture(scope="session")
def watchdog(request: pytest.FixtureRequest) -> Iterator[Watchdog]:
    """This process's watchdog, which writes past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        stderr = os.dup(2)
    dog = Watchdog(stderr)
    yield dog
    dog.close()


@pytest.fixture(autouse=True)
def limited(request: pytest.FixtureRequest, watchdog: Watchdog) -> Iterator[None]:
    """Each test's limit: ``--time-limit``, or what its mark ``time_limit`` says."""
    mark = request.node.get_closest_marker("time_limit")
    limit_s = request.config.getoption("time_limit")
    if not limit_s:
        yield
        return
    if mark is not None:
        limit_s = max(limit_s, mark.args[0])
    watchdog.begin(request.node.nodeid, request.config.getoption("random_seed"), limit_s)
    yield
    watchdog.end()
