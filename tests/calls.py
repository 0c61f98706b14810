"""Calls of attention on NumPy arrays, drawn at random, and how their results are judged."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import cuattn
from cuattn.reference import attention as attention_of_tiles
from cuattn.reference import products, tiles
from tests.formulas import DTYPES, assert_accurate, attention, orders

SHAPES = [
    # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
    (2, 37, 53, 6, 2, 16, 16),
    (1, 53, 37, 4, 4, 8, 24),
    (1, 1, 1100, 9, 3, 64, 64),
    (2, 300, 300, 2, 1, 32, 32),
    (1, 5, 600, 4, 1, 7, 3),
    (1, 2, 550, 300, 1, 8, 8),
]


@contextlib.contextmanager
def small_tiles():
    """Make tiles, blocks and threads of a small call what they are in one of thousands of
    tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_KEYS", 5)
        patch.setattr(tiles, "TILE_SCORES", 40)
        patch.setattr(attention_of_tiles, "BLOCK_ROWS", 6)
        patch.setattr(attention_of_tiles, "UNIT", 400)
        patch.setattr(attention_of_tiles, "PACKED_ROWS", 7)
        patch.setattr(products, "BLOCK_PRODUCT", 96)
        patch.setattr(products, "BLOCK_ROWS", 3)
        patch.setattr(products, "BLOCK_LENGTH", 2)
        patch.setattr(products, "PANEL", 2)
        patch.setattr(products, "PANEL_ROWS", 4)
        patch.setattr(products, "PACKED", 20)
        patch.setattr(tiles, "SERIAL_PRODUCTS", 0)
        patch.setattr(tiles, "cores", lambda: 3)
        yield


def arrays(rng, shape, dtype=np.float32):
    """Random q, k and v."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v = shape
    return tuple(
        rng.standard_normal(s).astype(dtype)
        for s in (
            (batch, seqlen_q, heads_q, head_dim),
            (batch, seqlen_k, heads_kv, head_dim),
            (batch, seqlen_k, heads_kv, head_dim_v),
        )
    )


def feature(rng, name: str, shape) -> dict[str, Any]:
    """Options of one feature of the contract, for a call of `shape`."""
    batch, seqlen_q, seqlen_k, heads_q, *_ = shape
    scores = (batch, heads_q, seqlen_q, seqlen_k)

    def some_axes(full):
        axes = full[rng.integers(0, 4) :]
        return tuple(n if rng.random() < 0.6 else 1 for n in axes)

    def side():
        return None if rng.random() < 0.3 else int(rng.integers(0, seqlen_k + 2))

    return {
        "causal": lambda: {"causal": True},
        "window": lambda: {"window": (side(), side())},
        "scale": lambda: {"scale": float(rng.uniform(-0.5, 1.0))},
        "softcap": lambda: {"softcap": float(rng.uniform(0.5, 5.0))},
        "bias": lambda: {"bias": rng.standard_normal(some_axes(scores), dtype=np.float32)},
        "mask": lambda: {"mask": rng.random(some_axes(scores)) < rng.uniform(0.1, 0.9)},
        "alibi_slopes": lambda: {
            "alibi_slopes": rng.uniform(
                0, 0.5, (heads_q,) if rng.random() < 0.5 else (batch, heads_q)
            ).astype(np.float32)
        },
        "sinks": lambda: {"sinks": rng.standard_normal(heads_q).astype(np.float32)},
    }[name]()


FEATURES = ["causal", "window", "scale", "softcap", "bias", "mask", "alibi_slopes", "sinks"]


def plain_results(q, k, v, formula=attention, **options):
    """The formula's (out, lse) in the precision we compute in, with several orders of features."""
    acc = np.float64 if q.dtype == np.float64 else np.float32
    return [
        formula(q[..., order], k[..., order], v, precision=acc, **options)
        for order in orders(q.shape[-1])
    ]


def judge(out, lse, q, k, v, formula=attention, rows=..., rounded=(), **options):
    """Compare `rows` of a result with the formula, in float64 and in the precision we compute in.

    Few rows are allowed the rounding of a term of q.k. `rounded` are results that were rounded to
    q's dtype on the way to this one.
    """
    acc = np.float64 if q.dtype == np.float64 else np.float32
    assert out.dtype == q.dtype
    assert lse.dtype == acc
    exact, exact_lse = formula(q, k, v, **options)
    outs, lses = zip(*plain_results(q, k, v, formula, **options), strict=True)

    def largest(a):
        return np.abs(a[np.isfinite(a)].astype(np.float64)).max(initial=0.0)

    unit = (256 if acc == np.float64 else 1) * np.finfo(acc).eps
    if lse.size < 2000:
        scale = options.get("scale", 1 / np.sqrt(q.shape[-1]))
        unit *= max(1.0, largest(q) * largest(k) * abs(scale))
    last = float(ml_dtypes.finfo(q.dtype).eps) * max(map(largest, (exact, *rounded)))
    assert_accurate(
        out[rows], exact[rows], *(a[rows] for a in outs), slack=unit * largest(v) + last
    )
    lse, exact_lse, *lses = (a.swapaxes(-1, -2)[rows] for a in (lse, exact_lse, *lses))
    assert_accurate(lse, exact_lse, *lses, slack=unit * (1 + largest(exact_lse)))


def check(q, k, v, **options):
    """Compare a call with the formula, and return its result."""
    out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **options)
    judge(out, lse, q, k, v, **options)
    return out, lse


@st.composite
def calls(draw):
    """Shape, dtype and options of any call of the contract."""
    length = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 17, 33])
    heads_kv = draw(st.integers(1, 3))
    shape = (
        draw(st.integers(0, 3)),
        draw(length),
        draw(length),
        heads_kv * draw(st.integers(1, 4)),
        heads_kv,
        draw(st.sampled_from([1, 2, 5, 8, 16])),
        draw(st.sampled_from([1, 3, 8, 16])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    options: dict[str, Any] = {}
    for name in draw(st.sets(st.sampled_from(FEATURES))):
        options |= feature(rng, name, shape)
    return arrays(rng, shape, draw(st.sampled_from(DTYPES))), options
