"""flash_attention on NumPy arrays, against the formula."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from tests.calls import FEATURES, SHAPES, arrays, calls, check, feature, judge, small_tiles
from tests.formulas import DTYPES, assert_accurate

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula(rng, shape, dtype):
    check(*arrays(rng, shape, dtype))


@pytest.mark.parametrize("tiles", ["usual", "small"])
@pytest.mark.parametrize("name", FEATURES)
def test_one_feature(rng, name, tiles):
    with small_tiles() if tiles == "small" else contextlib.nullcontext():
        for shape in SHAPES if tiles == "usual" else SHAPES[:2]:
            check(*arrays(rng, shape), **feature(rng, name, shape))


@settings(max_examples=200)
@given(calls(), st.booleans())
def test_features_together(call, small):
    inputs, options = call
    with small_tiles() if small else contextlib.nullcontext():
        check(*inputs, **options)


@pytest.mark.parametrize("seqlen_k", [511, 512, 513, 1025])
@pytest.mark.parametrize("seqlen_q", [255, 256, 257])
def test_lengths_around_a_tile(rng, seqlen_q, seqlen_k):
    shape = (1, seqlen_q, seqlen_k, 1, 1, 64, 64)
    check(*arrays(rng, shape), causal=True)
    check(*arrays(rng, shape), window=(100, 30))


@pytest.mark.parametrize("head_dims", [(1, 1), (1, 256), (256, 1), (255, 129), (256, 256)], ids=str)
def test_head_dims(rng, head_dims):
    check(*arrays(rng, (1, 70, 90, 2, 1, *head_dims)), causal=True)


@pytest.mark.parametrize(
    "shape",
    [(0, 4, 4, 2, 1, 8, 8), (2, 0, 4, 2, 1, 8, 8), (2, 4, 0, 2, 1, 8, 8), (2, 3, 3, 0, 1, 8, 8)],
    ids=["batch", "seqlen_q", "seqlen_k", "heads_q"],
)
def test_empty(rng, shape):
    out, lse = cuattn.flash_attention(*arrays(rng, shape), return_lse=True)
    assert out.shape == (*shape[:2], shape[3], shape[6])
    assert lse.shape == (shape[0], shape[3], shape[1])
    assert (out == 0).all()
    assert (lse == -np.inf).all()


# Rows that keep no key


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (None, 0)},
        {"window": (0, 0)},
        {"mask": np.zeros((6, 4), bool)},
        {"mask": np.array([True, False] * 3)[:, None]},
        {"bias": np.full((6, 4), -np.inf, np.float32)},
    ],
    ids=["causal", "window right", "window", "mask", "mask of rows", "bias"],
)
@pytest.mark.parametrize("sinks", [None, np.float32([0.5, -80.0])], ids=["", "sinks"])
def test_rows_without_keys(rng, options, sinks):
    shape = (1, 6, 4, 2, 2, 8, 8)
    out, lse = check(*arrays(rng, shape), sinks=sinks, **options)
    empty = slice(0, 2) if "mask" not in options and "bias" not in options else slice(1, 2)
    expected = np.full(2, -np.inf, np.float32) if sinks is None else sinks
    assert (out[:, empty] == 0).all()
    np.testing.assert_array_equal(
        lse[:, :, empty], np.broadcast_to(expected[:, None], lse[:, :, empty].shape)
    )


def test_sink_of_minus_infinity_is_none(rng):
    shape = (1, 5, 6, 2, 2, 8, 8)
    q, k, v = arrays(rng, shape)
    sinks = np.full(2, -np.inf, np.float32)
    for options in ({}, {"mask": np.zeros((5, 6), bool)}):
        with_sinks = cuattn.flash_attention(q, k, v, sinks=sinks, return_lse=True, **options)
        without = cuattn.flash_attention(q, k, v, return_lse=True, **options)
        for a, b in zip(with_sinks, without, strict=True):
            np.testing.assert_array_equal(a, b)


# NaN and infinity


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("small", [False, True], ids=["usual tiles", "small tiles"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (2, 3)},
        {"window": (None, 1), "sinks": np.float32([0.1, 0.2, 0.3, 0.4])},
        {"mask": "random"},
        {"mask": "random", "causal": True, "softcap": 3.0},
        {"mask": "random", "alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4])},
    ],
    ids=lambda o: " ".join(o),
)
def test_hidden_keys_may_hold_anything(rng, options, small, poison):
    """A key is poisoned, and the rows that do not see it must not change; those that do must."""
    shape = (1, 12, 15, 4, 2, 8, 8)
    q, k, v = arrays(rng, shape)
    mask = options.get("mask")
    if mask is not None:
        mask = rng.random((12, 15)) < 0.5
        mask[3] = False
        options = options | {"mask": mask}
    clean = q, k.copy(), v.copy()
    beside = np.arange(12)[:, None] + 3
    j = np.arange(15)
    seen = np.ones((12, 15), bool) if mask is None else mask.copy()
    if options.get("causal"):
        seen &= j <= beside
    left, right = options.get("window", (None, None))
    seen &= (left is None) | (j >= beside - (left or 0))
    seen &= (right is None) | (j <= beside + (right or 0))
    with small_tiles() if small else contextlib.nullcontext():
        for key in (0, 7, 14):
            blind = (slice(None), ~seen[:, key])
            for poisoned in (k, v):
                before = poisoned[0, key].copy()
                poisoned[0, key] = poison
                out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **options)
                poisoned[0, key] = before
                judge(out, lse, *clean, rows=blind, **options)
                if poisoned is v:
                    assert not np.isfinite(out[:, seen[:, key]]).any()


def test_poison_in_hidden_bias(rng):
    shape = (1, 9, 9, 2, 2, 8, 8)
    q, k, v = arrays(rng, shape)
    bias = rng.standard_normal((9, 9), dtype=np.float32)
    exact = cuattn.flash_attention(q, k, v, bias=bias, causal=True)
    bias[np.triu_indices(9, 1)] = np.nan
    np.testing.assert_array_equal(cuattn.flash_attention(q, k, v, bias=bias, causal=True), exact)


def test_nan_in_a_query_stays_in_its_row(rng):
    q, k, v = arrays(rng, (1, 9, 9, 2, 1, 8, 8))
    exact = cuattn.flash_attention(q, k, v)
    q[0, 4, 1] = np.nan
    out = cuattn.flash_attention(q, k, v)
    assert np.isnan(out[0, 4, 1]).all()
    exact[0, 4, 1] = out[0, 4, 1] = 0
    assert_accurate(out, exact, exact)


def test_infinities_of_both_signs_in_values_make_nan(rng):
    q, k, v = arrays(rng, (1, 3, 4, 1, 1, 8, 8))
    v[0, 1, 0, :3], v[0, 2, 0, 2:] = np.inf, -np.inf
    out = cuattn.flash_attention(q, k, v)[0, :, 0]
    assert (out[:, :2] == np.inf).all()
    assert np.isnan(out[:, 2]).all()
    assert (out[:, 3:] == -np.inf).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_scores_do_not_overflow(rng, dtype):
    """Whole numbers, so that the scores are exact and only the softmax is judged."""
    q, k, v = (rng.integers(-4, 5, n).astype(dtype) for n in ((1, 20, 2, 8), *2 * [(1, 30, 2, 8)]))
    rising = 256 * np.arange(-15, 15).astype(dtype)
    with small_tiles():
        check(q, k, v, scale=128.0)
        check(q, k, v, scale=0.125, bias=rising)
        check(q, k, v, scale=0.125, bias=-rising)


@pytest.mark.parametrize("size", [1, 5, 20])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "random"}], ids=str)
def test_small_and_large_scores(rng, options, size):
    """Rows whose scores are known to be small, and others, in one call."""
    q, k, v = arrays(rng, (2, 70, 90, 4, 2, 16, 16))
    if "mask" in options:
        options = {"mask": rng.random((70, 90)) < 0.5}
    q[:, 35:] *= size
    check(q, k, v, **options)


@pytest.mark.parametrize("seqlen_q", [1, 100])
def test_a_sink_that_is_no_number_makes_its_head_none(rng, seqlen_q):
    q, k = rng.standard_normal((2, seqlen_q, 3, 8)), rng.standard_normal((2, 300, 3, 8))
    sinks = np.array([0.5, np.nan, -np.inf])
    out, lse = cuattn.flash_attention(q, k, k, sinks=sinks, return_lse=True)
    assert np.isnan(out[:, :, 1]).all() and np.isnan(lse[:, 1]).all()
    assert np.isfinite(out[:, :, [0, 2]]).all() and np.isfinite(lse[:, [0, 2]]).all()
