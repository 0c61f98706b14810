"""Gradients of attention: 16384 tokens and 2048 features, cut into heads and sequences in every
common way.

``pytest benchmarks/bench_backward.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from benchmarks import peers, timing

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

TOKENS, FEATURES = 16384, 2048

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize("seqlen", [512, 2048, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bfloat16"])
def bench_backward(benchmark, ceilings, dtype, causal, head_dim, seqlen):
    batch, heads = TOKENS // seqlen, FEATURES // head_dim
    shape = (batch, seqlen, heads, head_dim)
    nbytes = 8 * 2 * TOKENS * FEATURES  # q, k, v, out and dout are read, three written
    sets = [
        tuple(
            cupy.random.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])
            for _ in range(4)
        )
        for _ in range(timing.sets_past_l2(nbytes))
    ]
    after_forward = []
    for q, k, v, dout in sets:
        out, lse = cuattn.flash_attention(q, k, v, causal=causal, return_lse=True)
        after_forward.append((dout, q, k, v, out, lse))
    run = timing.rotate(
        lambda *given: cuattn.flash_attention_backward(*given, causal=causal)[:3], after_forward
    )
    contestants = [
        timing.Contestant("cuattn", run),
        *peers.attention_backward(sets, causal=causal),
    ]

    ours = run(1)
    for peer in contestants[1:]:  # a figure next to a wrong result would be worth nothing
        for name, mine, other in zip(("dq", "dk", "dv"), ours, peer.run(1), strict=True):
            theirs, exact = peers.to_cupy(other), mine.astype(np.float32)
            difference = float(cupy.linalg.norm(exact - theirs) / cupy.linalg.norm(theirs))
            assert difference < 3e-2, f"{name} of cuattn and {peer.name}: {difference:.1e}"

    benchmark.group = "attention backward"
    seconds = timing.race(benchmark, contestants)
    flops = 10 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    benchmark.extra_info |= {
        "tflops": {name: flops / s * 1e-12 for name, s in seconds.items()},
        "matmul_tflops": ceilings[dtype] * 1e-12,
        "copy_tb_per_s": ceilings["copy"] * 1e-12,
    }
    shown = ", ".join(f"{n} {v:.0f}" for n, v in benchmark.extra_info["tflops"].items())
    print(f"\n{dtype} {benchmark.param}: {shown} TFLOP/s")
