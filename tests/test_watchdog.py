"""A process in which nothing happens any more is killed, and what it did is named."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

import cuattn
from cuattn.reference import attention
from tests import watchdog

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals that Windows has not")

ROOT = pathlib.Path(__file__).parents[1]


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize(
    "stuck", ["threading.Event().wait()", "max(range(10**15))"], ids=["in a wait", "with the GIL"]
)
def test_a_process_that_is_stuck_is_killed(stuck):
    done = run(
        "-c",
        textwrap.dedent(f"""
        import threading
        from tests.watchdog import Watchdog
        dog = Watchdog(2)
        dog.begin("test_before", 1, 0.5)
        dog.end()
        dog.begin("test_that_hangs[64]", 1234, 0.5)
        for n in range(20):
            dog.launch(f"kernel {{n}}")
        def function_that_hangs():
            {stuck}
        function_that_hangs()
        """),
    )
    assert done.returncode == -9, done
    assert "test_that_hangs[64]: nothing for 0.5 s, process" in done.stderr
    assert "launch 20: kernel 19" in done.stderr
    assert "kernel 14" not in done.stderr
    assert "--random-seed=1234 repeats the inputs" in done.stderr
    assert "in function_that_hangs" in done.stderr  # the stacks
    assert "test_before" not in done.stderr


def test_a_process_that_goes_on_lives():
    done = run(
        "-c",
        textwrap.dedent("""
        import time
        from tests.watchdog import Watchdog
        dog = Watchdog(2)
        dog.begin("test_of_many_launches", 1, 2.0)
        for n in range(30):
            time.sleep(0.1)
            dog.launch("kernel")
        dog.end()
        time.sleep(2.5)
        dog.close()
        print("done")
        """),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


HANGS = """
import threading
import pytest
from tests.watchdog import limited, watchdog

def test_before(): pass

@pytest.mark.time_limit(1.0)
def test_that_hangs(watchdog):
    watchdog.launch("flash_attention(q float16[1, 8, 2, 64])")
    threading.Event().wait()

def test_after(): pass
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_test_that_hangs_is_named(workers, tmp_path):
    """Past pytest's capture, and in a worker of pytest-xdist, which goes on with the next test."""
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "setup.cfg").write_text((ROOT / "setup.cfg").read_text())
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption")
    arguments = ["-n", "1"] if workers else []
    options = ["--random-seed=77", "--time-limit=0.5", "-p", "no:cacheprovider"]
    done = run("-m", "pytest", *arguments, *options, "test_hangs.py", cwd=tmp_path)
    assert "test_hangs.py::test_that_hangs: nothing for 1 s, process" in done.stderr, done
    assert "launch 1: flash_attention(q float16[1, 8, 2, 64])" in done.stderr
    assert "--random-seed=77 repeats the inputs" in done.stderr
    assert "in test_that_hangs" in done.stderr
    if workers:
        assert done.returncode == 1
        assert "crashed while running 'test_hangs.py::test_that_hangs'" in done.stdout
        assert "2 passed" in done.stdout
    else:
        assert done.returncode == -9


def test_a_launch_is_described_by_its_call(monkeypatch):
    """With the shapes that the user gave."""
    described = []
    forward = attention.forward

    def launch(*args, **kwargs):
        described.append(watchdog.describe_call())
        return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", launch)
    q, k = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 7, 2, 8), np.float32)
    cuattn.flash_attention(q, k, k, causal=True, window=(3, None))
    (call,) = described
    assert call.startswith("flash_attention(q float32[2, 5, 4, 8], k float32[2, 7, 2, 8], ")
    assert "causal=True, window=(3, None)" in call


def test_no_array_is_read_for_a_description():
    """As CuPy's may not be while a CUDA graph is captured."""

    class Array:
        dtype, shape = np.dtype(np.float32), (2, 3)

        def __repr__(self):
            raise RuntimeError("D2H transfers are disallowed")

    def call(q, prefix, page_table, seed):
        return watchdog.describe_call()

    call = types.FunctionType(call.__code__, {"__name__": "cuattn.some", "watchdog": watchdog})
    assert call(Array(), (Array(), Array()), [Array()], 7) == (
        "call(q float32[2, 3], prefix=(float32[2, 3], float32[2, 3]), page_table=(float32[2, 3]), "
        "seed=7)"
    )
