"""Rotary embeddings of queries, beside a kernel that only copies as many bytes.

``pytest benchmarks/bench_rope.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from benchmarks import timing

cupy = pytest.importorskip("cupy")

from benchmarks import ceilings  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HEADS, HEAD_DIM = 32, 128


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
@pytest.mark.parametrize("shape", [(4, 8192), (64, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
def bench_rope(benchmark, shape, rotary_dim, interleaved, dtype):
    """`shape` is batch and new tokens; bytes are counted as read and as written."""
    batch, new = shape
    nbytes = batch * new * HEADS * HEAD_DIM * dtype.itemsize
    sets = min(timing.sets_past_l2(nbytes), 32)
    arrays = [
        cupy.random.standard_normal((batch, new, HEADS, HEAD_DIM), dtype=np.float32).astype(dtype)
        for _ in range(sets)
    ]
    positions = cupy.arange(new, dtype=np.int32)
    out = cupy.empty_like(arrays[0])
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "out": out}
    contestants = [
        timing.captured(name, [lambda x=x, call=call: call(x) for x in arrays])
        for name, call in (
            ("cuattn", lambda x: cuattn.rope(x, positions, **options)),
            ("copy", ceilings.copied),
        )
    ]
    benchmark.group = "rotary embeddings"
    seconds = timing.race(benchmark, contestants)
    each = {name: s / sets for name, s in seconds.items()}
    speed = {name: 2 * nbytes / s * 1e-12 for name, s in each.items()}
    benchmark.extra_info["microseconds"] = {name: s * 1e6 for name, s in each.items()}
    benchmark.extra_info["of_copy"] = each["copy"] / each["cuattn"]
    shown = ", ".join(f"{n} {each[n] * 1e6:.1f} µs = {v:.2f} TB/s" for n, v in speed.items())
    print(f"\n{benchmark.param}: {shown}; {each['copy'] / each['cuattn']:.2f} of the copy's speed")
