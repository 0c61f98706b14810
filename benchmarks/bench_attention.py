"""Forward attention: 16384 tokens and 2048 features, cut into heads and sequences in every common
way.

``pytest benchmarks/bench_attention.py --benchmark-json=benchmarks/results/NAME.json``
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


@pytest.fixture(params=["fastest", "sm80", "simt"])
def tier(request):
    """The tier that serves the calls: the GPU's fastest one, the one for Ampere and newer, or the
    one that runs anywhere."""
    from cuattn.gpu import compiler, dispatch

    if request.param == "sm80" and compiler.device_arch(cupy.cuda.Device().id) != "sm_90a":
        pytest.skip("sm80 is this GPU's fastest tier")
    if request.param == "fastest":
        yield request.param
    else:
        with dispatch.use_tiers(f"forward_{request.param}"):
            yield request.param


@pytest.mark.parametrize("seqlen", [512, 2048, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bfloat16"])
def bench_forward(benchmark, ceilings, tier, dtype, causal, head_dim, seqlen):
    batch, heads = TOKENS // seqlen, FEATURES // head_dim
    shape = (batch, seqlen, heads, head_dim)
    nbytes = 3 * 2 * TOKENS * FEATURES
    sets = [
        tuple(
            cupy.random.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])
            for _ in range(3)
        )
        for _ in range(timing.sets_past_l2(nbytes))
    ]
    run = timing.rotate(lambda q, k, v: cuattn.flash_attention(q, k, v, causal=causal), sets)
    contestants = [
        timing.Contestant("cuattn", run),
        *peers.attention_forward(sets, causal=causal, portable=tier != "fastest"),
    ]

    ours = run(1).astype(np.float32)
    for peer in contestants[1:]:  # a figure next to a wrong result would be worth nothing
        theirs = peers.to_cupy(peer.run(1))
        difference = float(cupy.linalg.norm(ours - theirs) / cupy.linalg.norm(theirs))
        assert difference < 2e-2, f"cuattn and {peer.name} differ by {difference:.1e}"

    benchmark.group = "attention forward" + ("" if tier == "fastest" else f", {tier} tier")
    seconds = timing.race(benchmark, contestants)
    flops = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    benchmark.extra_info |= {
        "tflops": {name: flops / s * 1e-12 for name, s in seconds.items()},
        "matmul_tflops": ceilings[dtype] * 1e-12,
        "copy_tb_per_s": ceilings["copy"] * 1e-12,
    }
    shown = ", ".join(f"{n} {v:.0f}" for n, v in benchmark.extra_info["tflops"].items())
    print(f"\n{dtype} {benchmark.param}: {shown} TFLOP/s")
