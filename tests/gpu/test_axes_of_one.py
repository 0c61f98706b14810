"""An axis of one element may have any stride, which means nothing: that of ``q[:, None]`` is 0."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import cuattn

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: In elements.
STRIDES = (0, 1, -24, 7, 1 << 40)


@pytest.fixture(params=STRIDES)
def other(request):
    """A function: the same array, whose axes of one element have another stride."""

    def view(array):
        strides = [
            request.param * array.itemsize if n == 1 else stride
            for n, stride in zip(array.shape, array.strides, strict=True)
        ]
        return cupy.lib.stride_tricks.as_strided(array, array.shape, strides)

    return view


def draw(rng, dtype, *shape):
    return cupy.asarray(rng.standard_normal(shape).astype(np.float32).astype(dtype))


def assert_close(got, wanted):
    """Another kernel may serve other strides."""
    got, wanted = (array.get().astype(np.float64) for array in (got, wanted))
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize(
    "dims",
    [(1, 1, 40, 1, 1, 64), (1, 40, 1, 2, 1, 64), (2, 1, 40, 4, 1, 128), (1, 70, 70, 2, 2, 1)],
    ids=str,
)
def test_attention(rng, other, dims, dtype):
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim = dims
    q, dout = (draw(rng, dtype, batch, seqlen_q, heads, head_dim) for _ in range(2))
    k, v = (draw(rng, dtype, batch, seqlen_k, heads_kv, head_dim) for _ in range(2))
    wanted, lse = cuattn.flash_attention(q, k, v, causal=True, return_lse=True)
    out = other(cupy.full_like(q, np.nan))
    cuattn.flash_attention(*map(other, (q, k, v)), causal=True, out=out)
    assert_close(out, wanted)
    arrays = (dout, q, k, v, wanted, lse)
    wanted = cuattn.flash_attention_backward(*arrays, causal=True)
    got = cuattn.flash_attention_backward(*map(other, arrays), causal=True)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(got, name), getattr(wanted, name))
    lengths = cupy.full(batch, seqlen_k, np.int32)
    wanted = cuattn.flash_decode(q, k, v, lengths)
    assert_close(cuattn.flash_decode(*map(other, (q, k, v, lengths))), wanted)


@pytest.mark.parametrize("format", ["", "int8", "int4"])
@pytest.mark.parametrize(
    "dims", [(1, 1, 1, 1, 64, 16), (1, 5, 1, 1, 64, 1), (2, 70, 4, 1, 128, 16)], ids=str
)
def test_pages(rng, other, dims, format):
    batch, tokens, heads, heads_kv, head_dim, page_size = dims
    q = draw(rng, BFLOAT16, batch, tokens, heads, head_dim)
    pages = [draw(rng, BFLOAT16, batch * 8, page_size, heads_kv, head_dim) for _ in range(2)]
    table = cupy.arange(batch * 8, dtype=np.int32).reshape(batch, 8)
    lengths = cupy.full(batch, max(1, 8 * page_size - 3), np.int32)
    others = [other(each) for each in pages]
    if format:
        pages = [cuattn.quantize(each, format) for each in pages]
        others = [cuattn.quantize(each, format) for each in others]
    wanted = cuattn.paged_attention(q, *pages, table, lengths)
    got = cuattn.paged_attention(other(q), *others, other(table), other(lengths))
    assert_close(got, wanted)


def test_latents(rng, other):
    for (batch, tokens, heads), sparse in itertools.product(
        [(1, 1, 1), (2, 1, 16), (1, 3, 1)], (False, True)
    ):
        q = [draw(rng, BFLOAT16, batch, tokens, heads, n) for n in (512, 64)]
        pages = [draw(rng, BFLOAT16, batch * 4, 16, n) for n in (512, 64)]
        table = cupy.arange(batch * 4, dtype=np.int32).reshape(batch, 4)
        lengths = cupy.full(batch, 50, np.int32)
        arrays, options = (*q, *pages, table, lengths), {"scale": 0.1}
        if sparse:
            options["indices"] = cupy.tile(cupy.arange(40, dtype=np.int32), (batch, tokens, 1))
        wanted = cuattn.mla_decode(*arrays, **options)
        if sparse:
            options["indices"] = other(options["indices"])
        assert_close(cuattn.mla_decode(*map(other, arrays), **options), wanted)


def test_logits(rng, other):
    for shape in ((1, 1000), (3, 1)):
        logits = draw(rng, np.float32, *shape)
        for options in ({}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9}):
            wanted = cuattn.sampling.sample(logits, seed=3, **options)
            got = cuattn.sampling.sample(other(logits), seed=3, **options)
            np.testing.assert_array_equal(got.get(), wanted.get())
