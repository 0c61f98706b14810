"""flash_attention_varlen and scaled_dot_product_attention on NumPy arrays."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest

import cuattn
from tests.calls import arrays, feature, judge, plain_results, small_tiles
from tests.formulas import DTYPES, assert_accurate, attention, varlen_attention

pytestmark = pytest.mark.filterwarnings("error")


def lengths(rng, sequences: int, most: int) -> np.ndarray:
    drawn = rng.integers(0, most, sequences) * (rng.random(sequences) < 0.8)
    return np.append(0, np.cumsum(drawn)).astype(np.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    "names",
    [
        [],
        ["causal"],
        ["window", "softcap"],
        ["alibi_slopes", "sinks"],
        ["causal", "window", "scale", "softcap", "alibi_slopes", "sinks"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("small", [False, True], ids=["usual tiles", "small tiles"])
def test_varlen(rng, names, dtype, small):
    cu_q, cu_k = lengths(rng, 6, 25), lengths(rng, 6, 40)
    total_q, total_k = int(cu_q[-1]), int(cu_k[-1])
    q, k, v = (a[0] for a in arrays(rng, (1, total_q + 3, total_k + 5, 4, 2, 16, 8), dtype))
    k[total_k:] = v[total_k:] = q[total_q:] = np.nan
    options: dict[str, Any] = {}
    for name in names:
        options |= feature(rng, name, (6, 25, 40, 4))
    out = np.full((total_q + 3, 4, 8), 7).astype(dtype)
    with small_tiles() if small else contextlib.nullcontext():
        returned, lse = cuattn.flash_attention_varlen(
            q, k, v, cu_q, cu_k, out=out, return_lse=True, **options
        )
    assert returned is out
    judge(
        out,
        lse,
        q,
        k,
        v,
        formula=functools.partial(varlen_attention, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k),
        rows=slice(0, total_q),
        **options,
    )
    assert (out[total_q:] == 7).all()


def test_varlen_keys_default_to_queries(rng):
    q, k, v = (a[0] for a in arrays(rng, (1, 20, 20, 2, 1, 8, 8)))
    cu = np.array([0, 7, 7, 20])
    np.testing.assert_array_equal(
        cuattn.flash_attention_varlen(q, k, v, cu, causal=True),
        cuattn.flash_attention_varlen(q, k, v, cu.astype(np.int32), cu, causal=True),
    )


def test_varlen_of_nothing(rng):
    q, k, v = (a[0] for a in arrays(rng, (1, 0, 0, 2, 1, 8, 8)))
    for cu in ([0], [0, 0, 0]):
        out, lse = cuattn.flash_attention_varlen(q, k, v, np.int32(cu), return_lse=True)
        assert out.shape == (0, 2, 8)
        assert lse.shape == (2, 0)


# scaled_dot_product_attention


def test_sdpa_layout(rng):
    """(..., heads, L, E) with any leading axes, or none."""
    q, k, v = (a.swapaxes(1, 2) for a in arrays(rng, (6, 9, 12, 4, 4, 8, 5)))
    by_axes = [a.swapaxes(1, 2) for a in (q, k, v)]
    exact, *plain = (
        out.swapaxes(1, 2) for out, _ in (attention(*by_axes), *plain_results(*by_axes))
    )
    out = cuattn.scaled_dot_product_attention(q, k, v)
    assert_accurate(out, exact, *plain)
    for lead in ((6, 4), (2, 3, 4), (1, 6, 4)):
        shaped = [a.reshape(*lead, *a.shape[-2:]) for a in (q, k, v)]
        result = cuattn.scaled_dot_product_attention(*shaped)
        assert result.shape == (*lead, 9, 5)
        assert_accurate(result.reshape(out.shape), exact, *plain)
    for first in (0, (0, 0)):
        one = cuattn.scaled_dot_product_attention(q[first], k[first], v[first])
        assert_accurate(one, exact[first], *(a[first] for a in plain))


def test_sdpa_causal_is_top_left():
    """Query i averages the first i + 1 values, whatever the lengths."""
    for length_q, length_k in ((3, 5), (5, 3), (4, 4)):
        query, key = np.zeros((1, length_q, 2)), np.zeros((1, length_k, 2))
        value = np.arange(1.0, length_k + 1)[None, :, None]
        out = cuattn.scaled_dot_product_attention(query, key, value, is_causal=True)
        means = [np.mean(value[0, : i + 1, 0]) for i in range(length_q)]
        np.testing.assert_allclose(out[0, :, 0], means, rtol=1e-15)


def test_sdpa_masks():
    """True keeps a key; a floating mask is added; both broadcast. Query 1 of the last keeps none
    and gets 0."""
    query, key = np.zeros((2, 1, 2, 4)), np.zeros((2, 1, 3, 4))
    value = np.broadcast_to(np.array([1.0, 2.0, 6.0])[:, None], (2, 1, 3, 1))

    def out(attn_mask):
        return cuattn.scaled_dot_product_attention(query, key, value, attn_mask)[:, 0, :, 0]

    np.testing.assert_allclose(out(np.array([True, False, True])), np.full((2, 2), 3.5))
    np.testing.assert_allclose(
        out(np.array([[False, True, True], [True, True, True]])), [[4, 3]] * 2
    )
    by_batch = np.array([[True, True, False], [False, False, True]])[:, None, None]
    np.testing.assert_allclose(out(by_batch), [[1.5, 1.5], [6, 6]])
    np.testing.assert_allclose(out(np.array([[0, 1, 0], [0, 0, 0]], bool)), [[2, 0]] * 2)
    added = np.log(np.array([[1.0, 2.0, 1.0], [1.0, 1.0, 4.0]]))
    np.testing.assert_allclose(out(added), [[11 / 4, 27 / 6]] * 2)


def test_sdpa_scale_and_groups(rng):
    query, key, value = (a.swapaxes(1, 2) for a in arrays(rng, (2, 7, 9, 6, 2, 8, 8), np.float64))
    out = cuattn.scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True)
    for head in range(6):
        scores = 0.3 * query[:, head] @ key[:, head // 3].swapaxes(1, 2)
        weights = np.exp(scores)
        expected = weights @ value[:, head // 3] / weights.sum(-1, keepdims=True)
        assert_accurate(out[:, head], expected, expected)
