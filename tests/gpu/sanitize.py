"""Small calls of every kernel, to be run under compute-sanitizer.

``compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python -m
tests.gpu.sanitize``, and the same with ``--tool racecheck``. (cuda-bindings asks the driver for
functions that it may not have: those are the API errors.) CuPy's memory pool is off, so that every
array is an allocation of its own and a step beyond its end is seen.
"""

from __future__ import annotations

import itertools
import sys

import cupy
import numpy as np

import cuattn
from cuattn.gpu import attention, compiler, tiles


def arrays(rng: np.random.Generator, dtype: np.dtype, *shapes: tuple[int, ...]) -> list:
    return [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def forward(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Ragged tiles, padded head_dims, every option, lengths that are not what they must be."""
    for head_dim, head_dim_v in [(64, 64), (40, 72), (33, 1), (128, 128), (192, 256)]:
        q, k, v = arrays(
            rng, dtype, (1, 70, 2, head_dim), (1, 150, 1, head_dim), (1, 150, 1, head_dim_v)
        )
        slopes, sinks = arrays(rng, np.dtype(np.float32), (2,), (2,))
        (bias,) = arrays(rng, dtype, (2, 70, 150))
        mask = cupy.asarray(rng.random((1, 1, 70, 150)) < 0.5)
        options = [
            {},
            {"causal": True, "sinks": sinks},
            {"window": (30, 5), "softcap": 5.0, "alibi_slopes": slopes},
            {"bias": bias, "mask": mask, "causal": True},
        ]
        for more in options:
            cuattn.flash_attention(q, k, v, **more, return_lse=True)
        for lengths in [(0, 1, 1, 70), (0, 2**31 - 1, -(2**31), 50)]:
            cu_seqlens = cupy.asarray(np.array(lengths, np.int32))
            cuattn.flash_attention_varlen(q[0], k[0], v[0], cu_seqlens, causal=True)
    # More tiles than a block of forward_sm90 has places for, on any GPU.
    q, k, v = arrays(rng, dtype, (1, 70, 900, 64), (1, 70, 1, 64), (1, 70, 1, 64))
    cuattn.flash_attention(q, k, v, causal=True)


def main() -> None:
    """Run everything, tier by tier, and name what ran."""
    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(0)
    every_tier = dict(tiles.attention.FORWARD_TIERS)
    for tier, dtype in itertools.product(every_tier, (np.float16, np.float32, np.float64)):
        if tier != "simt" and dtype != np.float16:
            continue
        names = list(every_tier)
        tiles.attention.FORWARD_TIERS.clear()
        tiles.attention.FORWARD_TIERS.update((n, every_tier[n]) for n in names[names.index(tier) :])
        attention._plan.cache_clear()
        forward(rng, np.dtype(dtype))
        cupy.cuda.Device().synchronize()
        print(f"forward, {tier}, {np.dtype(dtype)}, {compiler.device_arch(0)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
