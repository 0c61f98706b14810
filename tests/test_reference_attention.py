"""flash_attention, flash_attention_varlen and scaled_dot_product_attention on NumPy arrays, against
the formula."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.reference import attention as attention_of_tiles
from cuattn.reference import products, tiles
from tests.formulas import DTYPES, assert_accurate, attention, varlen_attention

pytestmark = pytest.mark.filterwarnings("error")

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


def judge(out, lse, q, k, v, formula=attention, rows=..., rounded=(), **options):
    """Compare `rows` of a result with the formula, in float64 and in the precision we compute in.

    A score's rounding decides the error of a whole row, and the formula may be lucky: q.k is summed
    in three orders, and few rows are allowed the rounding of a term of q.k. `rounded` are results
    that were rounded to q's dtype on the way to this one.
    """
    acc = np.float64 if q.dtype == np.float64 else np.float32
    assert out.dtype == q.dtype
    assert lse.dtype == acc
    head_dim = q.shape[-1]
    orders = (np.arange(head_dim) * factor % head_dim for factor in (1, -1, head_dim // 2 + 1))
    exact, exact_lse = formula(q, k, v, **options)
    plain = [formula(q[..., order], k[..., order], v, precision=acc, **options) for order in orders]
    outs, lses = zip(*plain, strict=True)

    def largest(a):
        return np.abs(a[np.isfinite(a)].astype(np.float64)).max(initial=0.0)

    unit = (256 if acc == np.float64 else 1) * np.finfo(acc).eps
    if lse.size < 200:
        unit *= max(1.0, largest(q) * largest(k) * abs(options.get("scale", 1 / np.sqrt(head_dim))))
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


# Products


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_any_shape(rng, dtype):
    for rows, inner, columns in itertools.product(
        (1, 7, 8, 33, 70), (1, 65, 600), (1, 63, 64, 200)
    ):
        a = rng.integers(-3, 4, (2, rows, inner)).astype(dtype)
        b = rng.integers(-3, 4, (2, inner, columns)).astype(dtype)
        out = np.full((2, rows, columns), np.nan, dtype)
        products.matmul(a, b, out=out)
        np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("given", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_packed_keys_and_values(rng, dtype, given):
    for heads, seqlen, head_dim, head_dim_v in ((1, 1, 1, 1), (3, 64, 16, 7), (2, 700, 65, 40)):
        k, v = (
            rng.standard_normal((heads, seqlen, d)).astype(given) for d in (head_dim, head_dim_v)
        )
        room = products.Room(products.packed_size(k, v), np.dtype(dtype))
        panels, values, norms = products.pack(k, v, room)
        assert panels.ctypes.data % 64 == values.ctypes.data % 64 == 0
        np.testing.assert_array_equal(values, v.astype(dtype))
        wide = k.astype(dtype)
        np.testing.assert_allclose(norms, np.sqrt((wide**2).sum(axis=2).max(axis=1)), rtol=1e-6)
        a = np.eye(head_dim + 1, dtype=dtype)[None].repeat(heads, axis=0)
        out = np.empty((heads, head_dim + 1, seqlen), dtype)
        products.matmul_panels(a, panels, out=out)
        np.testing.assert_array_equal(out[:, :-1], wide.swapaxes(1, 2))
        assert (out[:, -1] == 1).all()


# Arrays as they come


def test_three_axes_are_one_sequence(rng):
    q, k, v = arrays(rng, (1, 9, 12, 4, 2, 8, 6))
    options = {"causal": True, "mask": rng.random((4, 9, 12)) < 0.8}
    out, lse = check(q, k, v, **options)
    single, single_lse = cuattn.flash_attention(q[0], k[0], v[0], return_lse=True, **options)
    np.testing.assert_array_equal(single, out[0])
    np.testing.assert_array_equal(single_lse, lse[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_strides(rng, dtype, seqlen_q):
    """Views give what their copies give."""
    shape = (2, seqlen_q, 30, 4, 4, 8, 8)
    dense = arrays(rng, shape, dtype)
    expected = cuattn.flash_attention(*dense, causal=True)

    def heads_first(a):
        return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)

    def dims_first(a):
        return np.ascontiguousarray(a.swapaxes(1, 3)).swapaxes(1, 3)

    def reversed_in_memory(a):
        return np.ascontiguousarray(a[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]

    def between_others(a):
        wide = np.full((*a.shape[:2], 3 * a.shape[2], a.shape[3]), np.nan, a.dtype)
        wide[:, :, 1::3] = a
        return wide[:, :, 1::3]

    for view in (heads_first, dims_first, reversed_in_memory, between_others):
        views = [view(a) for a in dense]
        out = cuattn.flash_attention(*views, causal=True)
        exact, _ = attention(*dense, causal=True)
        assert_accurate(out, exact, expected)


def test_broadcast_keys(rng):
    q, k, v = arrays(rng, (3, 20, 30, 4, 1, 8, 8))
    k, v = (np.broadcast_to(a[:1, :, :1], (3, 30, 2, 8)) for a in (k, v))
    check(q, k, v)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_bias_of_another_dtype(rng, dtype):
    q, k, v = arrays(rng, (1, 9, 12, 2, 2, 8, 8))
    check(q, k, v, bias=rng.standard_normal((9, 12)).astype(dtype))


def test_inputs_are_left_alone(rng):
    shape = (1, 20, 20, 2, 2, 8, 8)
    inputs = dict(zip("qkv", arrays(rng, shape), strict=True))
    for name in ("bias", "mask", "alibi_slopes", "sinks"):
        inputs |= feature(rng, name, shape)
    for array in inputs.values():
        array.flags.writeable = False
    cuattn.flash_attention(**inputs, softcap=2.0, causal=True)


class OnlyDLPack:
    """An array of another library."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(rng):
    q, k, v = arrays(rng, (1, 9, 12, 2, 2, 8, 8))
    out = cuattn.flash_attention(OnlyDLPack(q), OnlyDLPack(k), v)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, cuattn.flash_attention(q, k, v))


# Leading axes


def test_any_number_of_leading_axes(rng):
    q, k, v = arrays(rng, (6, 5, 7, 4, 2, 8, 6))
    bias = rng.standard_normal((3, 1, 5, 7), dtype=np.float32)  # of one of two leading axes
    mask = rng.random((4, 5, 7)) < 0.8
    slopes = rng.random((2, 3, 4), dtype=np.float32)
    options = {"causal": True, "softcap": 3.0, "return_lse": True}
    expected, expected_lse = cuattn.flash_attention(
        *(q, k, v),
        bias=np.tile(bias, (2, 1, 1, 1)),
        mask=mask,
        alibi_slopes=slopes.reshape(6, 4),
        **options,
    )
    folded = [array.reshape(2, 3, *array.shape[1:]) for array in (q, k, v)]
    options |= {"bias": bias, "mask": mask, "alibi_slopes": slopes}
    out, lse = cuattn.flash_attention(*folded, **options)
    np.testing.assert_array_equal(out.reshape(expected.shape), expected)
    np.testing.assert_array_equal(lse.reshape(expected_lse.shape), expected_lse)
    swapped = [array.swapaxes(0, 1).copy().swapaxes(0, 1) for array in folded]
    around = np.full((2, 3, 5, 4, 8), np.nan, np.float32)
    for target in (np.empty_like(out), around[..., 1:7]):
        given, _ = cuattn.flash_attention(*swapped, **options, out=target)
        assert given is target
        np.testing.assert_array_equal(target, out)
    assert np.isnan(around[..., [0, 7]]).all()


# out=


def test_out_is_written_and_returned(rng):
    """Into a part of an array, whose rest stays as it was."""
    q, k, v = arrays(rng, (2, 20, 30, 4, 2, 8, 6))
    around = np.full((4, 24, 4, 10), 7.0, np.float32)
    out = around[1:3, 2:22, :, 2:8]
    expected = cuattn.flash_attention(q, k, v)
    assert cuattn.flash_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    out[...] = 7.0
    assert (around == 7.0).all()
    returned, lse = cuattn.flash_attention(q[0], k[0], v[0], out=out[0], return_lse=True)
    assert np.shares_memory(returned, out)
    assert returned.shape == out[0].shape
    np.testing.assert_array_equal(out[0], expected[0])
    assert lse.shape == (4, 20)


def test_out_may_overlap_the_inputs(rng):
    with small_tiles():
        for position in range(3):
            inputs = list(arrays(rng, (1, 20, 20, 2, 2, 8, 8)))
            expected = cuattn.flash_attention(*inputs)
            out = inputs[position]
            assert cuattn.flash_attention(*inputs, out=out) is out
            np.testing.assert_array_equal(out, expected)


# Properties


def test_threads_do_not_change_a_bit(rng, monkeypatch):
    q, k, v = arrays(rng, (2, 300, 300, 4, 2, 32, 32))
    results = []
    monkeypatch.setattr(tiles, "SERIAL_PRODUCTS", 0)
    for threads in (1, 2, 7):
        monkeypatch.setattr(tiles, "cores", lambda threads=threads: threads)
        results.append(cuattn.flash_attention(q, k, v, causal=True, return_lse=True))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(1, 40), st.booleans())
def test_permuting_the_batch_permutes_the_output(seed, dtype, seqlen_q, small):
    rng = np.random.default_rng(seed)
    shape = (5, seqlen_q, 33, 4, 2, 16, 16)
    q, k, v = arrays(rng, shape, dtype)
    bias = rng.standard_normal((5, 1, seqlen_q, 33)).astype(dtype)
    slopes = rng.uniform(0, 1, (5, 4)).astype(np.float32)
    order = rng.permutation(5)
    with small_tiles() if small else contextlib.nullcontext():
        whole = cuattn.flash_attention(
            q, k, v, bias=bias, alibi_slopes=slopes, causal=True, return_lse=True
        )
        q, k, v, bias, slopes = (a[order] for a in (q, k, v, bias, slopes))
        permuted = cuattn.flash_attention(
            q, k, v, bias=bias, alibi_slopes=slopes, causal=True, return_lse=True
        )
    for a, b in zip(whole, permuted, strict=True):
        np.testing.assert_array_equal(a[order], b)


@given(calls(), st.data())
def test_split_keys_merge_to_the_whole(call, data):
    """Two calls on two parts of the keys, weighted by their lse, are one call on all keys."""
    (q, k, v), options = call
    for name in ("causal", "window", "alibi_slopes", "sinks"):  # those of the whole sequence
        options.pop(name, None)
    seqlen_k = k.shape[1]
    cut = data.draw(st.integers(0, seqlen_k))
    out, lse = 0.0, np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    parts = []
    for keys in (slice(0, cut), slice(cut, seqlen_k)):
        part = dict(options)
        for name in {"bias", "mask"} & set(part):
            if part[name].shape[-1] != 1:
                part[name] = part[name][..., keys]
        parts.append(cuattn.flash_attention(q, k[:, keys], v[:, keys], return_lse=True, **part))
        lse = np.logaddexp(lse, parts[-1][1])
    for part, part_lse in parts:
        weight = np.exp(part_lse - np.where(lse == -np.inf, 0, lse)).swapaxes(1, 2)[..., None]
        out = out + weight * part.astype(np.float64)
    rounded = [part for part, _ in parts]
    judge(out.astype(q.dtype), lse.astype(parts[0][1].dtype), q, k, v, rounded=rounded, **options)


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 30), st.data())
def test_window_is_a_mask(seed, seqlen_q, seqlen_k, data):
    side = st.none() | st.integers(0, 32)
    window = data.draw(st.tuples(side, side))
    causal = data.draw(st.booleans())
    mask = np.zeros((seqlen_q, seqlen_k), bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            ahead = j - (i + seqlen_k - seqlen_q)
            mask[i, j] = (
                (window[0] is None or ahead >= -window[0])
                and (window[1] is None or ahead <= window[1])
                and (not causal or ahead <= 0)
            )
    q, k, v = arrays(np.random.default_rng(seed), (1, seqlen_q, seqlen_k, 2, 1, 8, 8))
    with small_tiles():
        by_window = cuattn.flash_attention(q, k, v, window=window, causal=causal, return_lse=True)
        by_mask = cuattn.flash_attention(q, k, v, mask=mask, return_lse=True)
    for result in (by_window, by_mask):
        judge(*result, q, k, v, mask=mask)


@given(st.integers(0, 2**32), st.integers(0, 20))
def test_sink_is_a_key_without_value(seed, seqlen_k):
    rng = np.random.default_rng(seed)
    q, k, v = arrays(rng, (2, 9, seqlen_k, 4, 2, 8, 8), np.float64)
    sinks = 3 * rng.standard_normal(4)
    zeros = np.zeros((2, 1, 2, 8))
    bias = np.zeros((4, 1, seqlen_k + 1))
    bias[:, 0, -1] = sinks
    expected = cuattn.flash_attention(
        q, np.append(k, zeros, 1), np.append(v, zeros, 1), bias=bias, return_lse=True
    )
    result = cuattn.flash_attention(q, k, v, sinks=sinks, return_lse=True)
    for a, b in zip(result, expected, strict=True):
        assert_accurate(a, b, b)


def test_alibi_is_a_bias(rng):
    q, k, v = arrays(rng, (1, 9, 14, 4, 2, 8, 8), np.float64)
    slopes = 2.0 ** -np.arange(4)
    distance = [[abs(i + 5 - j) for j in range(14)] for i in range(9)]
    bias = -slopes[:, None, None] * np.array(distance)
    out = cuattn.flash_attention(q, k, v, alibi_slopes=slopes, causal=True)
    expected = cuattn.flash_attention(q, k, v, bias=bias, causal=True)
    assert_accurate(out, expected, expected)


def test_softcap_bounds_scores_and_comes_before_the_bias():
    """One query, two keys: the weights by hand."""
    q, k = np.ones((1, 1, 1)), np.array([[[100.0]], [[-100.0]]])
    v = np.array([[[1.0]], [[0.0]]])
    out, lse = cuattn.flash_attention(q, k, v, scale=1.0, softcap=0.5, return_lse=True)
    assert_accurate(out[0, 0], *2 * [np.array([1 / (1 + np.exp(-1.0))])])
    bias = np.array([0.0, 2.0])
    out, lse = cuattn.flash_attention(q, k, v, scale=1.0, softcap=0.5, bias=bias, return_lse=True)
    assert_accurate(out[0, 0], *2 * [np.array([1 / (1 + np.exp(1.0))])])
    assert_accurate(lse[0], *2 * [np.array([np.logaddexp(0.5, 1.5)])])


def test_memory_is_linear(rng):
    def peak(seqlen):
        q, k, v = arrays(rng, (1, seqlen, seqlen, 1, 1, 16, 16))
        out = np.empty_like(q)
        tracemalloc.start()
        cuattn.flash_attention(q, k, v, out=out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    short, long = peak(4096), peak(8192)
    working = 2**21 * tiles.cores()  # what threads work in, whatever the length
    assert long < working + 2 * 8192 * 16 * 4  # one score matrix would take 268 MB
    assert long < 2.2 * short


# Varlen


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
    exact, _ = attention(*(a.swapaxes(1, 2) for a in (q, k, v)))
    plain, _ = attention(*(a.swapaxes(1, 2) for a in (q, k, v)), precision=np.float32)
    exact, plain = exact.swapaxes(1, 2), plain.swapaxes(1, 2)
    out = cuattn.scaled_dot_product_attention(q, k, v)
    assert_accurate(out, exact, plain)
    for lead in ((6, 4), (2, 3, 4), (1, 6, 4)):
        shaped = [a.reshape(*lead, *a.shape[-2:]) for a in (q, k, v)]
        result = cuattn.scaled_dot_product_attention(*shaped)
        assert result.shape == (*lead, 9, 5)
        assert_accurate(result.reshape(out.shape), exact, plain)
    assert_accurate(cuattn.scaled_dot_product_attention(q[0], k[0], v[0]), exact[0], plain[0])
    assert_accurate(
        cuattn.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0]), exact[0, 0], plain[0, 0]
    )


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
