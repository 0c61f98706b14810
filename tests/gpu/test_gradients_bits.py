"""Deterministic gradients: the same bits in every run, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests.gpu.calls import DTYPES, normal

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_workspaces")]


@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_every_run_and_any_batch(backward_tier, dtype, head_dim, heads, rng):
    """Hopper has two ways, by the number of heads."""
    heads_q, heads_kv = heads
    dtype = DTYPES[dtype]
    arrays = [
        cupy.asarray(normal(rng, (3, n, h, head_dim), dtype))
        for n, h in ((300, heads_q), (300, heads_q), (280, heads_kv), (280, heads_kv))
    ]
    dout, q, k, v = arrays
    out, lse = cuattn.flash_attention(q, k, v, causal=True, return_lse=True)

    def gradients(batch):
        given = [a[batch] for a in (dout, q, k, v, out, lse)]
        return cuattn.flash_attention_backward(*given, causal=True, deterministic=True)[:3]

    first = gradients(slice(0, 3))
    for _ in range(5):
        for a, b in zip(first, gradients(slice(0, 3)), strict=True):
            assert bool((a == b).all())
    for a, b in zip(first, gradients(slice(1, 2)), strict=True):
        assert bool((a[1:2] == b).all())


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (90, 20)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("heads_kv", [8, 4, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_same_bits_whatever_other_sequences_there_are(options, head_dim, heads_kv, rng):
    """Also where a block finds a sequence's tiles among those of others, of any length."""
    lengths = [300, 0, 5, 700, 129]
    ends = np.cumsum([0, *lengths])
    q, k, v, dout = (
        cupy.asarray(normal(rng, (ends[-1], heads, head_dim), DTYPES["bfloat16"]))
        for heads in (8, heads_kv, heads_kv, 8)
    )

    def forward(rows, lengths):
        cu_seqlens = cupy.asarray(np.cumsum([0, *lengths]), np.int32)
        arrays = q[rows], k[rows], v[rows], cu_seqlens
        return arrays, cuattn.flash_attention_varlen(*arrays, **options, return_lse=True)

    def gradients(rows, lengths, out, lse):
        arrays, _ = forward(rows, lengths)
        given = dout[rows], *arrays[:3], out[rows], lse[:, rows], arrays[3]
        return cuattn.flash_attention_varlen_backward(*given, deterministic=True, **options)[:3]

    everything = slice(0, int(ends[-1]))
    _, (out, lse) = forward(everything, lengths)
    together = gradients(everything, lengths, out, lse)
    for length, end in zip(lengths, ends[1:], strict=True):
        if length:
            rows = slice(int(end) - length, int(end))
            for a, b in zip(together, gradients(rows, [length], out, lse), strict=True):
                assert bool((a[rows] == b).all())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_with_every_multiprocessor_at_work(causal, head_dim, rng):
    """Small calls have the same bits most of the time, even where the order is left to chance."""
    shape = (1, 4096, 8, head_dim)
    q, k, v, dout = (cupy.asarray(normal(rng, shape, DTYPES["bfloat16"])) for _ in "qkvd")
    _, pullback = cuattn.flash_attention_vjp(q, k, v, causal=causal, deterministic=True)
    first = pullback(dout)
    for _ in range(5):
        for name, a, b in zip("qkv", first[:3], pullback(dout)[:3], strict=True):
            assert bool((a == b).all()), f"d{name}"
