"""What a call costs on the host: calls of seen shapes beside torch's and a bare launch, one of each
sampler, and the first one, which compiles.

``pytest benchmarks/bench_host.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import cuattn
from benchmarks import timing
from benchmarks.bench_sampling import OPERATIONS

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


@pytest.mark.benchmark(timer=timing.clock)
def bench_call(benchmark):
    """One small float16 call with `out`, on the same arrays and on others each time, beside the
    launch of an empty kernel with arguments of the same size."""
    # More arrays than there are remembered pointers.
    q, k, v, out = cupy.random.standard_normal((4, 2000, 1, 64, 2, 64)).astype(np.float16)
    sets = list(zip(q, k, v, out, strict=True))
    others = itertools.cycle(sets)
    code = """
    struct Arguments { char bytes[312]; };
    extern "C" __global__ void empty(const Arguments arguments) {}
    """
    empty = cupy.RawKernel(code, "empty")

    def call(q, k, v, out) -> None:
        cuattn.flash_attention(q, k, v, causal=True, out=out)

    def call_others(launches: int) -> None:
        for arrays in itertools.islice(others, launches):
            call(*arrays)

    def launch(arguments) -> None:
        empty((2,), (128,), (arguments,))

    benchmark.group = "host"
    contestants = [
        timing.Contestant("call", timing.rotate(call, sets[:1]), timing.by_issue),
        timing.Contestant("new pointers", call_others, timing.by_issue),
        timing.Contestant(
            "bare launch", timing.rotate(launch, [(np.zeros(1, "V312")[0],)]), timing.by_issue
        ),
    ]
    seconds = timing.race(benchmark, contestants, rounds=50)
    benchmark.extra_info["microseconds"] = {name: s * 1e6 for name, s in seconds.items()}
    shown = ", ".join(f"{name} {s * 1e6:.1f} µs" for name, s in seconds.items())
    print(f"\n{shown}")


@pytest.mark.benchmark(timer=timing.clock)
def bench_seen_shapes(benchmark):
    """Small bfloat16 calls whose shapes have been seen, which allocate their results, beside
    ``torch.nn.functional.scaled_dot_product_attention``."""
    bfloat16, tokens = np.dtype(ml_dtypes.bfloat16), 64

    def zeros(*shape):
        return cupy.zeros(shape, bfloat16)

    q, k = zeros(2, tokens, 16, 128), zeros(2, tokens, 4, 128)
    last, pages = zeros(8, 16, 128), zeros(256, 16, 4, 128)
    table = cupy.arange(8 * 32, dtype=np.int32).reshape(8, 32)
    lens = cupy.full(8, 300, np.int32)
    logits = cupy.random.standard_normal((8, 2000), dtype=np.float32)
    caches = pages.reshape(8, 512, 4, 128)
    others = itertools.cycle([zeros(3, 2, tokens, 16, 128) for _ in range(500)])

    def call_others(launches: int) -> None:
        for a, b, c in itertools.islice(others, launches):
            cuattn.flash_attention(a, b, c, causal=True)

    calls = {
        "flash_attention": lambda: cuattn.flash_attention(q, k, k, causal=True),
        "flash_decode": lambda: cuattn.flash_decode(last, caches, caches, lens),
        "paged_attention": lambda: cuattn.paged_attention(last, pages, pages, table, lens),
        "sample": lambda: cuattn.sampling.sample(logits, top_k=50, top_p=0.9),
    }
    contestants = [
        timing.Contestant(name, timing.rotate(call, [()]), timing.by_issue)
        for name, call in calls.items()
    ]
    contestants.append(timing.Contestant("new pointers", call_others, timing.by_issue))
    contestants.append(timing.Contestant("PagedKVCache.write", _writes(), timing.by_issue))
    if importlib.util.find_spec("torch"):
        import torch

        attention = torch.nn.functional.scaled_dot_product_attention
        qkv = [torch.zeros(2, 16, tokens, 128, dtype=torch.bfloat16, device="cuda")] * 3
        run = timing.rotate(lambda: attention(*qkv, is_causal=True), [()])
        contestants.append(timing.Contestant("torch", run, timing.by_issue))
    benchmark.group = "host"
    seconds = timing.race(benchmark, contestants, rounds=50, turn=2e-3)
    benchmark.extra_info["seen_microseconds"] = {name: s * 1e6 for name, s in seconds.items()}
    print("\n" + ", ".join(f"{name} {s * 1e6:.1f} µs" for name, s in seconds.items()))


def _writes() -> Callable[[int], None]:
    """``run(n)`` that writes n layers of new tokens of 8 sequences; a step has 32 layers, and an
    ``extend`` before them, which they pay for."""
    layers, heads, dim, most = 32, 4, 128, 4096
    cache = cuattn.PagedKVCache(
        8 * most // 16,
        16,
        heads,
        dim,
        num_layers=layers,
        dtype=ml_dtypes.bfloat16,
        max_seqlen=most,
        xp=cupy,
    )
    new = cupy.zeros((8, heads, dim), ml_dtypes.bfloat16)
    ids = [cache.add_sequence() for _ in range(8)]
    written = 0

    def run(launches: int) -> None:
        nonlocal written
        for _ in range(launches):
            layer = written % layers
            if layer == 0:
                if cache.num_tokens(ids[0]) == most:
                    for sequence in ids:
                        cache.truncate(sequence, 0)
                cache.extend(ids, 1)
            cache.write(layer, ids, new, new)
            written += 1

    return run


@pytest.mark.benchmark(timer=timing.clock)
def bench_sampler_calls(benchmark):
    """One small float32 call of each sampling operation, the next token's draw first."""
    logits = cupy.random.standard_normal((4, 1000), dtype=np.float32)
    names = sorted(OPERATIONS, key=lambda name: name != "joint")
    calls = {name: timing.rotate(OPERATIONS[name], [(logits,)]) for name in names}
    contestants = [timing.Contestant(name, call, timing.by_issue) for name, call in calls.items()]
    benchmark.group = "host"
    seconds = timing.race(benchmark, contestants, rounds=50, turn=5e-3)
    benchmark.extra_info["sampler_microseconds"] = {name: s * 1e6 for name, s in seconds.items()}
    print("\n" + ", ".join(f"{name} {s * 1e6:.1f} µs" for name, s in seconds.items()))


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
    """The first call of a process: with empty kernel caches, which compiles, and with the caches
    that it leaves behind. NVRTC has one of its own since CUDA 12.9, beside CuPy's."""
    folders = {"CUPY_CACHE_DIR": "cupy", "CUDA_CACHE_PATH": "cuda"}
    environment = os.environ | {name: str(tmp_path / f) for name, f in folders.items()}
    command = [sys.executable, "-c", FIRST_CALL]

    def first_call() -> float:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return float(done.stdout)

    compiling, cached = first_call(), min(first_call() for _ in range(3))
    benchmark.group = "host"
    benchmark.extra_info |= {"compiling_ms": compiling * 1e3, "cached_ms": cached * 1e3}
    benchmark.pedantic(first_call, rounds=1)
    print(f"\nfirst call: {compiling * 1e3:.0f} ms compiling, {cached * 1e3:.0f} ms from the cache")
