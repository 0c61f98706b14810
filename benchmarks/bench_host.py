"""What a call costs on the host: an ordinary one above a bare launch, and the first one, which compiles.

``pytest benchmarks/bench_host.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

import cuattn

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

LAUNCHES = 200


def _seconds_a_call(call) -> float:
    """Of the host, which must not wait for the device: fewer launches than its queue holds, of a tiny kernel."""
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        call()
    return (time.perf_counter() - start) / LAUNCHES


def bench_call(benchmark):
    """One small float16 call with `out`, beside the launch of an empty kernel with arguments of the same size."""
    q, k, v = (cupy.random.standard_normal((1, 64, 2, 64)).astype(np.float16) for _ in "qkv")
    out = cupy.empty_like(q)
    arguments = (np.zeros(1, "V312")[0],)
    code = """
    struct Arguments { char bytes[312]; };
    extern "C" __global__ void empty(const Arguments arguments) {}
    """
    empty = cupy.RawKernel(code, "empty")

    def call() -> None:
        cuattn.flash_attention(q, k, v, causal=True, out=out)

    def bare() -> None:
        empty((2,), (128,), arguments)

    call()
    bare()
    turns = [(_seconds_a_call(call), _seconds_a_call(bare)) for _ in range(50)]
    called, launched = (sorted(seconds)[len(turns) // 2] for seconds in zip(*turns, strict=True))
    benchmark.group = "host"
    benchmark.extra_info |= {"call_us": called * 1e6, "bare_launch_us": launched * 1e6}
    benchmark.pedantic(call, rounds=50, iterations=LAUNCHES)
    print(f"\na call {called * 1e6:.1f} µs, a bare launch {launched * 1e6:.1f} µs")


FIRST_CALL = """
import time
import cupy, numpy as np, cuattn
q = cupy.random.standard_normal((1, 512, 8, 128)).astype(np.float16)
cupy.cuda.runtime.deviceSynchronize()
start = time.perf_counter()
cuattn.flash_attention(q, q, q, causal=True)
cupy.cuda.runtime.deviceSynchronize()
print(time.perf_counter() - start)
"""


def bench_first_call(benchmark, tmp_path):
    """The first call of a process: with an empty kernel cache, which compiles, and with the cache it leaves behind."""
    environment = os.environ | {"CUPY_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_CALL]

    def first_call() -> float:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)

    compiling, cached = first_call(), min(first_call() for _ in range(3))
    benchmark.group = "host"
    benchmark.extra_info |= {"compiling_ms": compiling * 1e3, "cached_ms": cached * 1e3}
    benchmark.pedantic(first_call, rounds=1)
    print(f"\nfirst call: {compiling * 1e3:.0f} ms compiling, {cached * 1e3:.0f} ms from the cache")
