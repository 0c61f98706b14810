"""Attention by its definition, the whole score matrix at once, to judge every implementation by.

With float64 it is what a result should be. With the dtype of the inputs it is what a program
without special care would get in that precision, and so how large an error may be
(`assert_accurate`).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    precision: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """Return out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q).

    Every step is rounded to `precision`; the softmax of 16-bit scores is in float32, as everybody
    has it. What float64 is to be judged by needs np.longdouble.
    """
    precision = np.dtype(precision)
    dtype = precision.type if precision.itemsize >= 8 else np.float32

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(precision).astype(dtype)

    q, k, v = (a.astype(dtype) for a in (q, k, v))
    _, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    k, v = (np.repeat(a, heads_q // heads_kv, axis=1) for a in (k, v))
    scale = 1 / np.sqrt(head_dim) if scale is None else scale

    s = rounded(dtype(scale) * (q @ k.swapaxes(2, 3)))
    if softcap is not None:
        s = rounded(dtype(softcap) * np.tanh(s / dtype(softcap)))
    if bias is not None:
        s = rounded(s + bias.astype(dtype))
    beside = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = np.arange(seqlen_k)
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(dtype).reshape(-1, heads_q, 1, 1)
        s = rounded(s - slopes * np.abs(beside - j).astype(dtype))
    keep = np.ones(s.shape, bool)
    if causal:
        keep &= j <= beside
    left, right = (None, None) if window is None else window
    if left is not None:
        keep &= j >= beside - left
    if right is not None:
        keep &= j <= beside + right
    if mask is not None:
        keep &= mask
    s[~keep] = -np.inf

    if sinks is not None:
        column = sinks.astype(dtype)[None, :, None, None]
        s = np.concatenate([s, np.broadcast_to(column, (*s.shape[:3], 1))], axis=3)
    row_max = s.max(axis=3, keepdims=True, initial=-np.inf)
    row_max[row_max == -np.inf] = 0
    p = np.exp(s - row_max)
    row_sum = p.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (row_max + np.log(row_sum))[..., 0]
    p = rounded(p / np.where(row_sum == 0, 1, row_sum))[..., :seqlen_k]
    return rounded(p @ v).swapaxes(1, 2), lse


def varlen_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    *,
    alibi_slopes: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return out (total, heads_q, head_dim_v) and lse (heads_q, total), NaN in rows of no
    sequence."""
    out = np.full((*q.shape[:2], v.shape[2]), np.nan, np.longdouble)
    lse = np.full((q.shape[1], q.shape[0]), np.nan, np.longdouble)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b]
        out_b, lse_b = attention(
            q[None, rows], k[None, keys], v[None, keys], alibi_slopes=slopes, **options
        )
        out[rows], lse[:, rows] = out_b[0], lse_b[0]
    return out, lse


def assert_accurate(
    actual: np.ndarray, exact: np.ndarray, *plain: np.ndarray, slack: float | None = None
) -> None:
    """Assert ``max|actual - exact| <= 2 max|plain - exact| + slack``; infinities have to be the
    same.

    Of several plain results the worst counts. `slack`, what luck may spare the plain formula, is
    one rounding of a number of exact's size unless given; 256 of them for float64, where `plain`
    may have to be `exact` for want of a wider type.
    """
    actual, exact = np.asarray(actual), np.asarray(exact)
    assert actual.shape == exact.shape
    if not exact.size:
        return
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite].astype(np.float64), exact[~finite])

    def error(result: np.ndarray) -> float:
        return np.abs(result.astype(exact.dtype) - exact)[finite].max(initial=0.0)

    if slack is None:
        roundings = 256 if actual.dtype == np.float64 else 1
        slack = roundings * float(ml_dtypes.finfo(actual.dtype).eps)
        slack *= np.abs(exact[finite]).max(initial=0.0)
    with np.errstate(invalid="ignore"):  # inf - inf, where finite is False
        ours, usual = error(actual), max(error(np.asarray(p)) for p in plain)
    assert ours <= 2 * usual + slack, f"error {ours:.3g}, the formula's {usual:.3g}"
