"""Forward attention on the CPU: cuattn's NumPy side beside torch, where it is installed; both on
all cores.

``pytest benchmarks/bench_reference.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from benchmarks import peers, timing


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
