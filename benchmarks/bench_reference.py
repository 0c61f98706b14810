"""Attention on the CPU: cuattn's NumPy side beside torch, where it is installed; both on all
cores, or on one.

``pytest benchmarks/bench_reference.py --benchmark-json=benchmarks/results/NAME.json``, and before
it ``OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 taskset -c 0`` for one core. There CPU time is
measured, and the least of many turns counts: other programs do no harm.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from benchmarks import peers, timing
from cuattn.reference import tiles

SHAPES = {  # batch, queries, keys, heads_q, heads_kv, head_dim
    "1024": (1, 1024, 1024, 8, 8, 64),
    "4 x 512": (4, 512, 512, 8, 8, 64),
    "4096": (1, 4096, 4096, 8, 8, 64),
    "2048, 16 heads of 128": (1, 2048, 2048, 16, 16, 128),
    "1024, 2 key heads": (1, 1024, 1024, 8, 2, 64),
    "1000, 2 heads of 80": (1, 1000, 1000, 2, 2, 80),
    "4 x 128": (4, 128, 128, 8, 8, 64),
    "1 over 8192, 8 heads of 128": (1, 1, 8192, 8, 8, 128),
    "1 over 8192, 32 heads of 128, 8 key heads": (1, 1, 8192, 32, 8, 128),
}


@pytest.mark.benchmark(timer=timing.clock)
@pytest.mark.parametrize("seqlen", [2048, 8192])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def bench_forward_cpu(benchmark, causal, seqlen):
    heads, head_dim = 8, 64
    rng = np.random.default_rng()
    q, k, v = (rng.standard_normal((1, seqlen, heads, head_dim), dtype=np.float32) for _ in "qkv")
    run = timing.rotate(lambda *arrays: cuattn.flash_attention(*arrays, causal=causal), [(q, k, v)])
    contestants = [
        timing.Contestant("cuattn", run, timing.by_wall),
        *peers.attention_forward_cpu(q, k, v, causal=causal),
    ]
    for peer in contestants[1:]:
        np.testing.assert_allclose(run(1), peer.run(1), rtol=0, atol=1e-4)

    benchmark.group = "attention forward on the CPU"
    seconds = timing.race(benchmark, contestants, rounds=5, turn=0.1)
    flops = 4 * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    benchmark.extra_info["gflops"] = {name: flops / s * 1e-9 for name, s in seconds.items()}
    shown = ", ".join(f"{n} {v:.0f}" for n, v in benchmark.extra_info["gflops"].items())
    print(f"\nfloat32 {benchmark.param}: {shown} GFLOP/s")


@pytest.mark.benchmark(timer=timing.clock)
@pytest.mark.skipif(tiles.cores() > 1, reason="for one core")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def bench_one_core(benchmark, shape, causal):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = SHAPES[shape]
    if causal and seqlen_q == 1:
        pytest.skip("one query sees all keys")
    rng = np.random.default_rng()
    sizes = ((seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    q, k, v = (rng.standard_normal((batch, *size, head_dim), dtype=np.float32) for size in sizes)
    run = timing.rotate(lambda *arrays: cuattn.flash_attention(*arrays, causal=causal), [(q, k, v)])
    contestants = [
        timing.Contestant("cuattn", run, timing.by_cpu),
        *peers.attention_forward_cpu(q, k, v, causal=causal, timer=timing.by_cpu),
    ]
    for peer in contestants[1:]:
        np.testing.assert_allclose(run(1), peer.run(1), rtol=0, atol=1e-4)

    benchmark.group = "attention on one core of a CPU"
    seconds = timing.race(benchmark, contestants, rounds=11, turn=0.02, judge=min)
    benchmark.extra_info["ms"] = {name: 1e3 * s for name, s in seconds.items()}
    shown = ", ".join(f"{n} {1e3 * s:.2f}" for n, s in seconds.items())
    print(f"\nfloat32 {shape} {'causal' if causal else 'full'}: {shown} ms")


@pytest.mark.benchmark(timer=timing.clock)
@pytest.mark.skipif(tiles.cores() > 1, reason="for one core")
@pytest.mark.parametrize("heads_q", [8, 32])
def bench_cache_dtypes(benchmark, heads_q):
    """A step of decoding over 8192 keys in 8 heads of 128, by the dtype of the cache."""
    rng = np.random.default_rng()
    arrays = [rng.standard_normal((1, n, h, 128)) for n, h in ((1, heads_q), (8192, 8), (8192, 8))]
    seq_lens = np.array([8192], np.int32)
    contestants = [
        timing.Contestant(
            np.dtype(dtype).name,
            timing.rotate(cuattn.flash_decode, [(*(a.astype(dtype) for a in arrays), seq_lens)]),
            timing.by_cpu,
        )
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
    ]
    benchmark.group = "decoding on one core of a CPU"
    seconds = timing.race(benchmark, contestants, rounds=11, turn=0.02, judge=min)
    benchmark.extra_info["ms"] = {name: 1e3 * s for name, s in seconds.items()}
    print(f"\n{heads_q} heads: {', '.join(f'{n} {1e3 * s:.2f}' for n, s in seconds.items())} ms")
