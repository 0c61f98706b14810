"""Gradients of attention on NumPy arrays: against central differences in float64, and against the
formula in the precision of the inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn._spec import attention_spec
from cuattn.reference import dropout
from tests import formulas
from tests.calls import FEATURES, arrays, feature, small_tiles

pytestmark = pytest.mark.filterwarnings("error")

SHAPES = [
    # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
    (2, 3, 5, 4, 2, 3, 3),
    (1, 5, 3, 3, 3, 2, 4),
    (2, 1, 6, 4, 1, 3, 2),
    (1, 20, 20, 2, 1, 8, 8),
]
#: Shapes that bias and mask may have in a call of (2, 5, 9, 4, ...).
BIAS_SHAPES = [(2, 4, 5, 9), (1, 4, 5, 9), (2, 1, 5, 9), (4, 1, 9), (5, 9), (9,), (5, 1), (1,), ()]


def differences(function, dresult, arguments: list[np.ndarray], eps: float = 1e-4):
    """Gradients of ``sum(dresult * function(*arguments))`` by central differences of fourth order,
    one entry at a time."""
    gradients = []
    for argument in arguments:
        gradient = np.zeros_like(argument)
        for place in np.ndindex(argument.shape):
            value = argument[place]
            moved = []
            for step in (-2, -1, 1, 2):
                argument[place] = value + step * eps
                moved.append((dresult * function(*arguments)).sum())
            argument[place] = value
            gradient[place] = (moved[0] - 8 * moved[1] + 8 * moved[2] - moved[3]) / (12 * eps)
        gradients.append(gradient)
    return gradients


def draw(rng, shape, features, dtype=np.float64):
    """q, k, v and options of one call, floating arrays of `dtype`."""
    options: dict[str, Any] = {}
    for name in features:
        options |= feature(rng, name, shape)
    for name, value in options.items():
        if isinstance(value, np.ndarray) and value.dtype != bool:
            options[name] = value.astype(dtype)
    return arrays(rng, shape, dtype), options


def check_differences(rng, shape, features, **more):
    """Compare all gradients of a call with central differences, at 1e-7 of the largest."""
    inputs, options = draw(rng, shape, features)
    options |= more
    arrays_of_options = [n for n in ("bias", "sinks", "alibi_slopes") if n in options]
    out, lse = cuattn.flash_attention(*inputs, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    seen = lse > -np.inf

    def loss(q, k, v, *values):
        given = options | dict(zip(arrays_of_options, values, strict=True))
        out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **given)
        return np.concatenate([(out * dout).ravel(), lse[seen] * dlse[seen]])

    grads = cuattn.flash_attention_backward(
        dout,
        *inputs,
        out,
        lse,
        dlse=dlse,
        grad_bias="bias" in options,
        grad_alibi="alibi_slopes" in options,
        **options,
    )
    expected = differences(loss, 1.0, [*inputs, *(options[n] for n in arrays_of_options)])
    names = {"bias": "dbias", "sinks": "dsinks", "alibi_slopes": "dalibi"}
    actual = [grads.dq, grads.dk, grads.dv]
    actual += [getattr(grads, names[n]) for n in arrays_of_options]
    largest = max(np.abs(e).max(initial=1.0) for e in expected)
    for name, a, e in zip(["q", "k", "v", *arrays_of_options], actual, expected, strict=True):
        assert a.shape == e.shape, name
        assert a.dtype == e.dtype, name
        assert np.abs(a - e).max(initial=0.0) <= 1e-7 * largest, name
    for name in set(names) - set(arrays_of_options):
        assert getattr(grads, names[name]) is None


@pytest.mark.parametrize("size", ["usual", "small"])
@pytest.mark.parametrize("name", [*FEATURES, "dropout"])
def test_one_feature_by_differences(rng, name, size):
    more = {"dropout": 0.3, "seed": int(rng.integers(2**63))} if name == "dropout" else {}
    with small_tiles() if size == "small" else contextlib.nullcontext():
        for shape in SHAPES[:3]:
            check_differences(rng, shape, [name] if name in FEATURES else [], **more)


@pytest.mark.parametrize("number", range(10))
def test_features_together_by_differences(rng, number):
    some = [name for name in FEATURES if rng.random() < 0.5]
    more = {"dropout": 0.2, "seed": 7} if number % 2 else {}
    with small_tiles() if number % 3 else contextlib.nullcontext():
        check_differences(rng, SHAPES[number % 2], some, **more)


@pytest.mark.parametrize("size", ["usual", "small"])
@pytest.mark.parametrize("bias_shape", BIAS_SHAPES, ids=str)
def test_bias_gradient_is_summed_over_what_it_was_broadcast_along(rng, bias_shape, size):
    inputs = arrays(rng, (2, 5, 9, 4, 2, 6, 6), np.float64)
    bias = rng.standard_normal(bias_shape)
    full = np.broadcast_to(bias, (2, 4, 5, 9)).copy()
    out, lse = cuattn.flash_attention(*inputs, bias=bias, return_lse=True)
    dout = rng.standard_normal(out.shape)
    with small_tiles() if size == "small" else contextlib.nullcontext():
        one, whole = (
            cuattn.flash_attention_backward(dout, *inputs, out, lse, bias=b, grad_bias=True).dbias
            for b in (bias, full)
        )
    missing = tuple(range(4 - bias.ndim))
    expected = whole.sum(axis=missing)
    broadcast = tuple(axis for axis, n in enumerate(bias_shape) if n == 1)
    expected = expected.sum(axis=broadcast, keepdims=True)
    assert one.shape == bias_shape
    np.testing.assert_allclose(one, expected, rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------ other precisions


@pytest.mark.parametrize("dtype", formulas.DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", ["nothing", "causal", "window", "softcap", "mask", "sinks"])
def test_precision(rng, name, dtype):
    shape = (2, 70, 90, 4, 2, 24, 40)
    inputs, options = draw(rng, shape, [] if name == "nothing" else [name], np.float32)
    inputs = [a.astype(dtype) for a in inputs]
    out, lse = cuattn.flash_attention(*inputs, return_lse=True, **options)
    dout = rng.standard_normal(out.shape).astype(dtype)
    grads = cuattn.flash_attention_backward(dout, *inputs, out, lse, **options)
    exact_type = np.longdouble if dtype == np.float64 else np.float64
    cancelled: dict[str, float] = {}
    exact = formulas.attention_gradients(
        dout, *inputs, precision=exact_type, cancelled=cancelled, **options
    )
    plain = formulas.plain_gradients(dout, *inputs, lse=lse, **options)
    for name, actual in zip(grads._fields, grads[:3], strict=False):
        assert actual.dtype == dtype
        formulas.assert_gradients_accurate(
            actual, exact[name], *plain[name], lse=lse, cancelled=cancelled.get(name, 0.0)
        )


# --------------------------------------------------------------------------------- what must hold


def test_rows_that_see_no_key_have_no_gradient(rng):
    inputs = arrays(rng, (1, 8, 5, 2, 1, 4, 4), np.float32)  # causal: three rows see none
    out, lse = cuattn.flash_attention(*inputs, causal=True, return_lse=True)
    dout = rng.standard_normal(out.shape, np.float32)
    grads = cuattn.flash_attention_backward(dout, *inputs, out, lse, causal=True)
    assert (grads.dq[:, :3] == 0).all()
    mask = np.zeros((1, 1, 8, 5), bool)
    out, lse = cuattn.flash_attention(*inputs, mask=mask, return_lse=True)
    grads = cuattn.flash_attention_backward(dout, *inputs, out, lse, mask=mask)
    assert all((g == 0).all() for g in grads[:3])


def test_very_low_lse_and_hidden_keys(rng):
    q, k, v = arrays(rng, (1, 1, 64, 1, 1, 8, 8), np.float32)
    bias = np.full((1, 1, 1, 64), -120, np.float32)
    out, lse = cuattn.flash_attention(q, k, v, bias=bias, window=(10, 0), return_lse=True)
    grads = cuattn.flash_attention_backward(
        np.ones_like(out), q, k, v, out, lse, bias=bias, window=(10, 0)
    )
    assert all(np.isfinite(g).all() for g in grads[:3])
    assert (grads.dv[:, :53] == 0).all()
    assert (grads.dk[:, :53] == 0).all()


@pytest.mark.parametrize("size", ["usual", "small"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_nan_in_hidden_keys_stays_out(rng, size, softcap):
    q, k, v = arrays(rng, (2, 9, 12, 4, 2, 6, 6), np.float32)
    mask = np.ones((2, 1, 1, 12), bool)
    mask[..., 3:6] = False
    options = {"mask": mask, "causal": True, "softcap": softcap}
    with small_tiles() if size == "small" else contextlib.nullcontext():
        out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **options)
        dout = rng.standard_normal(out.shape, np.float32)
        expected = cuattn.flash_attention_backward(dout, q, k, v, out, lse, **options)
        for value in (np.nan, np.inf, -np.inf):
            k[:, 3:6] = value
            v[:, 3:6] = value
            actual = cuattn.flash_attention_backward(dout, q, k, v, out, lse, **options)
            for a, e in zip(actual[:3], expected[:3], strict=True):
                np.testing.assert_allclose(a, e, atol=1e-5)


def test_nan_in_a_row_of_dout_reaches_what_the_row_sees(rng):
    q, k, v = arrays(rng, (1, 9, 9, 2, 1, 6, 6), np.float32)
    out, lse = cuattn.flash_attention(q, k, v, causal=True, return_lse=True)
    dout = rng.standard_normal(out.shape, np.float32)
    dout[0, 4, 0] = np.nan
    grads = cuattn.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    assert np.isnan(grads.dv[0, :5]).all()
    assert np.isnan(grads.dk[0, :5]).all()
    assert np.isfinite(grads.dv[0, 5:]).all()
    assert np.isfinite(grads.dk[0, 5:]).all()
    assert np.isnan(grads.dq[0, 4, 0]).all()
    assert np.isfinite(grads.dq[0, 4, 1]).all()
    assert np.isfinite(np.delete(grads.dq[0], 4, axis=0)).all()


def test_linear_in_dout_and_dlse(rng):
    inputs = arrays(rng, (1, 30, 40, 2, 2, 8, 8), np.float64)
    out, lse = cuattn.flash_attention(*inputs, causal=True, return_lse=True)
    douts = rng.standard_normal((2, *out.shape))
    dlses = rng.standard_normal((2, *lse.shape))

    def gradients(dout, dlse):
        grads = cuattn.flash_attention_backward(dout, *inputs, out, lse, dlse=dlse, causal=True)
        return grads[:3]

    both = gradients(douts[0] - 3 * douts[1], dlses[0] - 3 * dlses[1])
    first, second = (gradients(*pair) for pair in zip(douts, dlses, strict=True))
    for b, f, s in zip(both, first, second, strict=True):
        np.testing.assert_allclose(b, f - 3 * s, atol=1e-12)


def test_merged_parts_have_the_gradients_of_the_whole(rng):
    """Keys in two parts, merged: dlse of each part is what the merge passes back."""
    q, k, v = arrays(rng, (1, 13, 40, 4, 2, 8, 8), np.float64)
    whole, lse = cuattn.flash_attention(q, k, v, return_lse=True)
    dout = rng.standard_normal(whole.shape)
    expected = cuattn.flash_attention_backward(dout, q, k, v, whole, lse)
    dq, dks, dvs = 0, [], []
    for part in (slice(0, 15), slice(15, 40)):
        out_p, lse_p = cuattn.flash_attention(q, k[:, part], v[:, part], return_lse=True)
        weight = np.exp(lse_p - lse).swapaxes(1, 2)[..., None]
        dlse_p = (weight * dout * (out_p - whole)).sum(axis=-1).swapaxes(1, 2)
        grads = cuattn.flash_attention_backward(
            weight * dout, q, k[:, part], v[:, part], out_p, lse_p, dlse=dlse_p
        )
        dq = dq + grads.dq
        dks.append(grads.dk)
        dvs.append(grads.dv)
    np.testing.assert_allclose(dq, expected.dq, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(dks, axis=1), expected.dk, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(dvs, axis=1), expected.dv, atol=1e-12)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_grouped_heads_equal_repeated_ones_summed(rng, group):
    q, k, v = arrays(rng, (2, 11, 17, 2 * group, 2, 8, 5), np.float64)
    k_all, v_all = (np.repeat(a, group, axis=2) for a in (k, v))
    out, lse = cuattn.flash_attention(q, k, v, return_lse=True)
    dout = rng.standard_normal(out.shape)
    grads = cuattn.flash_attention_backward(dout, q, k, v, out, lse)
    repeated = cuattn.flash_attention_backward(dout, q, k_all, v_all, out, lse)
    np.testing.assert_allclose(grads.dq, repeated.dq, atol=1e-12)
    for a, e in ((grads.dk, repeated.dk), (grads.dv, repeated.dv)):
        summed = e.reshape(*e.shape[:2], 2, group, -1).sum(axis=3)
        np.testing.assert_allclose(a, summed, atol=1e-12)


def test_a_sequence_alone_is_a_batch_of_one(rng):
    inputs = arrays(rng, (1, 11, 17, 4, 2, 8, 5), np.float32)
    out, lse = cuattn.flash_attention(*inputs, return_lse=True)
    dlse = rng.standard_normal(lse.shape, np.float32)
    expected = cuattn.flash_attention_backward(out, *inputs, out, lse, dlse=dlse)
    single = [a[0] for a in (out, *inputs, out, lse)]
    actual = cuattn.flash_attention_backward(*single, dlse=dlse[0])
    for a, e in zip(actual[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(a, e[0])


@pytest.mark.parametrize("bias_shape", [(2, 3, 4, 5, 6), (3, 4, 5, 6), (2, 1, 4, 1, 6), (5, 6)])
def test_any_number_of_leading_axes(rng, bias_shape):
    """As many batches, one for each of the leading axes' places."""
    q, dout = (rng.standard_normal((2, 3, 5, 4, 8)) for _ in "qo")
    k, v = (rng.standard_normal((2, 3, 6, 2, 8)) for _ in "kv")
    bias, slopes = rng.standard_normal(bias_shape), rng.uniform(0, 0.5, (2, 3, 4))
    full = np.broadcast_to(bias, (2, 3, 4, 5, 6)).copy()
    options = {"grad_bias": True, "grad_alibi": True}
    (out, lse), pullback = cuattn.flash_attention_vjp(
        q, k, v, bias=bias, alibi_slopes=slopes, return_lse=True, **options
    )
    dlse = rng.standard_normal(lse.shape)
    grads = pullback(dout, dlse)
    one, pullback = cuattn.flash_attention_vjp(
        *(a.reshape(6, *a.shape[2:]) for a in (q, k, v)),
        bias=full.reshape(6, 4, 5, 6), alibi_slopes=slopes.reshape(6, 4), **options,
    )  # fmt: skip
    expected = pullback(dout.reshape(one.shape), dlse.reshape(6, 4, 5))
    for name in ("dq", "dk", "dv", "dalibi"):
        actual = getattr(grads, name)
        np.testing.assert_array_equal(actual.reshape(6, *actual.shape[2:]), getattr(expected, name))
    whole = expected.dbias.reshape(full.shape)
    missing = 5 - len(bias_shape)
    whole = whole.sum(axis=tuple(range(missing)))
    whole = whole.sum(axis=tuple(i for i, n in enumerate(bias_shape) if n == 1), keepdims=True)
    assert grads.dbias.shape == bias_shape
    np.testing.assert_allclose(grads.dbias, whole, atol=1e-12)
    _, tangent = cuattn.flash_attention_jvp(q, k, v, q, k, v, bias=bias, alibi_slopes=slopes)
    assert tangent.shape == out.shape


def test_a_leading_axis_of_length_0():
    q, k = np.zeros((0, 2, 5, 4, 8)), np.zeros((0, 2, 6, 2, 8))
    bias = np.zeros((2, 4, 1, 6))
    out, pullback = cuattn.flash_attention_vjp(q, k, k, bias=bias, grad_bias=True)
    grads = pullback(out)
    assert grads.dk.shape == k.shape
    assert grads.dbias.shape == bias.shape
    assert not grads.dbias.any()


def test_strides_do_not_matter(rng):
    inputs = arrays(rng, (2, 11, 17, 4, 2, 8, 5), np.float32)
    out, lse = cuattn.flash_attention(*inputs, return_lse=True)
    dout = np.broadcast_to(rng.standard_normal((1, 11, 1, 5), np.float32), out.shape)
    expected = cuattn.flash_attention_backward(dout.copy(), *inputs, out, lse)
    odd = [np.asfortranarray(a) for a in (dout, *inputs, out, lse)]
    for arguments in ([dout, *inputs, out, lse], odd):
        actual = cuattn.flash_attention_backward(*arguments)
        for a, e in zip(actual[:3], expected[:3], strict=True):
            np.testing.assert_allclose(a, e, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [(0, 4, 4, 2, 1, 8, 8), (2, 0, 4, 2, 1, 8, 8), (2, 4, 0, 2, 1, 8, 8), (2, 3, 3, 0, 1, 8, 8)],
    ids=["batch", "seqlen_q", "seqlen_k", "heads_q"],
)
def test_empty(rng, shape):
    inputs = arrays(rng, shape)
    sinks = rng.standard_normal(shape[3], np.float32)
    out, lse = cuattn.flash_attention(*inputs, sinks=sinks, return_lse=True)
    grads = cuattn.flash_attention_backward(out, *inputs, out, lse, sinks=sinks)
    for g, a in zip(grads[:3], inputs, strict=True):
        assert g.shape == a.shape
        assert (g == 0).all()
    assert (grads.dsinks == 0).all()


def test_the_number_of_threads_changes_nothing(rng, monkeypatch):
    inputs = arrays(rng, (3, 70, 70, 4, 4, 16, 16), np.float32)
    bias = rng.standard_normal((1, 1, 70, 70), np.float32)
    out, lse = cuattn.flash_attention(*inputs, bias=bias, return_lse=True)
    dout = rng.standard_normal(out.shape, np.float32)
    results = []
    for count in (1, 3):
        monkeypatch.setattr("cuattn.reference.tiles.cores", lambda count=count: count)
        with monkeypatch.context() as patch:
            patch.setattr("cuattn.reference.tiles.SERIAL_PRODUCTS", 0)
            patch.setattr("cuattn.reference.tiles.TILE_SCORES", 5000)
            results.append(
                cuattn.flash_attention_backward(dout, *inputs, out, lse, bias=bias, grad_bias=True)
            )
    for one, three in zip(*results, strict=True):
        assert one is three is None or (one == three).all()


def test_memory_is_linear(rng):
    inputs = arrays(rng, (1, 4096, 4096, 1, 1, 16, 16), np.float32)
    out, lse = cuattn.flash_attention(*inputs, return_lse=True)
    tracemalloc.start()
    cuattn.flash_attention_backward(out, *inputs, out, lse)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20  # of 64 MiB for all scores


# --------------------------------------------------------------------------------------- varlen


@settings(max_examples=50)
@given(st.data())
def test_varlen_equals_each_sequence(data):
    lengths = st.sampled_from([0, 1, 3, 8, 17])
    count = data.draw(st.integers(0, 4))
    lengths_q, lengths_k = (
        data.draw(st.lists(lengths, min_size=count, max_size=count)) for _ in "qk"
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    beyond = data.draw(st.integers(0, 2))
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (lengths_q, lengths_k))
    q = rng.standard_normal((cu_q[-1] + beyond, 4, 6))
    k, v = (rng.standard_normal((cu_k[-1] + beyond, 2, d)) for d in (6, 5))
    slopes = rng.uniform(0, 0.5, (count, 4)) if data.draw(st.booleans()) else None
    options: dict[str, Any] = {"causal": data.draw(st.booleans()), "sinks": rng.standard_normal(4)}
    out, lse = cuattn.flash_attention_varlen(
        q, k, v, cu_q, cu_k, alibi_slopes=slopes, return_lse=True, **options
    )
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    # Rows of no sequence hold anything.
    out[cu_q[-1] :], lse[:, cu_q[-1] :], dout[cu_q[-1] :] = np.nan, np.nan, np.nan
    grads = cuattn.flash_attention_varlen_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, alibi_slopes=slopes,
        grad_alibi=slopes is not None, **options,
    )  # fmt: skip
    assert (grads.dq[cu_q[-1] :] == 0).all()
    assert (grads.dk[cu_k[-1] :] == 0).all()
    dsinks = np.zeros(4)
    for b in range(count):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = cuattn.flash_attention_backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], dlse=dlse[:, rows],
            alibi_slopes=None if slopes is None else slopes[b],
            grad_alibi=slopes is not None, **options,
        )  # fmt: skip
        np.testing.assert_allclose(grads.dq[rows], one.dq, atol=1e-12)
        np.testing.assert_allclose(grads.dk[keys], one.dk, atol=1e-12)
        np.testing.assert_allclose(grads.dv[keys], one.dv, atol=1e-12)
        if slopes is not None:
            np.testing.assert_allclose(grads.dalibi[b], one.dalibi, atol=1e-11)
        dsinks += one.dsinks
    np.testing.assert_allclose(grads.dsinks, dsinks, atol=1e-12)


# --------------------------------------------------------------------------------------- vjp, jvp


def test_pullback_is_backward_any_number_of_times(rng):
    inputs = arrays(rng, (2, 11, 17, 4, 2, 8, 5), np.float32)
    options = {"causal": True, "sinks": rng.standard_normal(4, np.float32)}
    (out, lse), pullback = cuattn.flash_attention_vjp(*inputs, return_lse=True, **options)
    plain, _ = cuattn.flash_attention_vjp(*inputs, **options)
    np.testing.assert_array_equal(out, plain)
    dlse = rng.standard_normal(lse.shape, np.float32)
    for _ in range(2):
        actual = pullback(out, dlse)
        expected = cuattn.flash_attention_backward(out, *inputs, out, lse, dlse=dlse, **options)
        for a, e in zip(actual, expected, strict=True):
            assert a is e is None or (a == e).all()


@pytest.mark.parametrize("size", ["usual", "small"])
@pytest.mark.parametrize("name", [*FEATURES, "dropout"])
def test_jvp_and_vjp_agree(rng, name, size):
    """The product with a direction on one side and with a gradient on the other is one number."""
    more = {"dropout": 0.3, "seed": int(rng.integers(2**63))} if name == "dropout" else {}
    with small_tiles() if size == "small" else contextlib.nullcontext():
        for shape in SHAPES:
            inputs, options = draw(rng, shape, [name] if name in FEATURES else [])
            options |= more
            directions = [rng.standard_normal(a.shape) for a in inputs]
            expected, pullback = cuattn.flash_attention_vjp(*inputs, **options)
            out, tangent = cuattn.flash_attention_jvp(*inputs, *directions, **options)
            np.testing.assert_allclose(out, expected, atol=1e-13)
            dout = rng.standard_normal(out.shape)
            forward = (tangent * dout).sum()
            back = sum((g * d).sum() for g, d in zip(pullback(dout)[:3], directions, strict=True))
            assert abs(forward - back) <= 1e-11 * max(1.0, np.abs(tangent * dout).sum())


def test_jvp_of_one_sequence_and_of_hidden_nan(rng):
    inputs = arrays(rng, (1, 9, 12, 4, 2, 6, 6), np.float32)
    directions = [rng.standard_normal(a.shape, np.float32) for a in inputs]
    _, expected = cuattn.flash_attention_jvp(*inputs, *directions, window=(3, 0))
    _, single = cuattn.flash_attention_jvp(*(a[0] for a in (*inputs, *directions)), window=(3, 0))
    np.testing.assert_array_equal(single, expected[0])
    mask = np.arange(12) != 5
    _, expected = cuattn.flash_attention_jvp(*inputs, *directions, mask=mask)
    for a in (*inputs[1:], *directions[1:]):
        a[:, 5] = np.nan
    _, actual = cuattn.flash_attention_jvp(*inputs, *directions, mask=mask)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


# --------------------------------------------------------------------------------------- dropout


def spec_of(shape, **options):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v = shape
    return attention_spec(
        "flash_attention",
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
        *[np.dtype(np.float64)] * 3,
        **options,
    )


def test_dropout_bits_are_those_of_their_definition():
    """Entry by entry, as the module says it."""
    from cuattn._philox import philox4x32

    spec = spec_of((3, 40, 50, 2, 1, 8, 8), dropout=0.4)
    seed = 0x123456789ABCDEF
    rows, keys = slice(5, 37), slice(18, 50)
    actual = dropout.kept(spec, seed, 2, slice(0, 2), rows, keys)
    for head, query, key in [(0, 5, 18), (1, 36, 49), (1, 16, 31), (0, 23, 33), (1, 8, 32)]:
        i, j = query % 16, key % 32
        counter = (query // 16, key // 32, 4 * (i % 8) + j % 8 // 2, 2 * 2 + head)
        arguments = (
            tuple(np.array([c], np.uint64) for c in counter),
            (np.array([seed & 0xFFFFFFFF], np.uint64), np.array([seed >> 32], np.uint64)),
        )
        bits = int(philox4x32(*arguments, 7)[j // 8][0]) >> 8 * (2 * (i // 8) + key % 2) & 127
        weyl = int(philox4x32(*arguments, 3)[3][0]) + 0x9E3779B9 * (key // 32) & 0xFFFFFFFF
        threshold = math.floor(128 * round(0.4 * 65536) / 65536 + weyl // 256 / 2**24)
        assert actual[head, query - 5, key - 18] == (bits >= threshold)


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share(probability):
    spec = spec_of((1, 400, 400, 4, 4, 8, 8), dropout=probability)
    share = 1 - dropout.kept(spec, 3, 0, slice(0, 4), slice(0, 400), slice(0, 400)).mean()
    assert abs(share - probability) < 5 * np.sqrt(probability * (1 - probability) / 640000)


@pytest.mark.parametrize("size", ["usual", "small"])
def test_dropout_forward_is_the_formula_with_its_mask(rng, size):
    shape = (2, 37, 45, 4, 2, 8, 6)
    q, k, v = arrays(rng, shape, np.float64)
    spec = spec_of(shape, dropout=0.3)
    with small_tiles() if size == "small" else contextlib.nullcontext():
        out, lse = cuattn.flash_attention(
            q, k, v, causal=True, dropout=0.3, seed=11, return_lse=True
        )
    _, plain_lse = formulas.attention(q, k, v, causal=True)
    np.testing.assert_allclose(lse, plain_lse, atol=1e-12)
    s = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, 2, axis=2)) / np.sqrt(8)
    s[:, :, ~(np.arange(45) <= np.arange(37)[:, None] + 8)] = -np.inf
    p = np.exp(s - plain_lse[..., None])
    everything = slice(0, 4), slice(0, 37), slice(0, 45)
    z = np.stack([dropout.factors(spec, 11, b, *everything) for b in range(2)])
    expected = np.einsum("bhij,bjhd->bihd", p * z, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_dropout_depends_on_the_seed_alone(rng):
    inputs = arrays(rng, (2, 20, 20, 2, 2, 8, 8), np.float32)
    call = functools.partial(cuattn.flash_attention, *inputs, dropout=0.5)
    np.testing.assert_array_equal(call(seed=2**64 - 1), call(seed=2**64 - 1))
    assert (call(seed=1) != call(seed=2)).any()
    assert (call(seed=1) != call(seed=1 + 2**32)).any()
    other = cuattn.scaled_dot_product_attention(
        *(a.swapaxes(1, 2) for a in inputs), dropout_p=0.5, seed=1
    )
    np.testing.assert_array_equal(other.swapaxes(1, 2), call(seed=1))
    fresh = [
        cuattn.scaled_dot_product_attention(*(a.swapaxes(1, 2) for a in inputs), dropout_p=0.5)
        for _ in range(2)
    ]
    assert (fresh[0] != fresh[1]).any()


def test_dropout_of_nearly_1_keeps_something():
    spec = dataclasses.replace(spec_of(SHAPES[0]), dropout=1 - 1e-9)
    assert (spec.dropout_threshold, spec.dropout_scale) == (65535, 65536)


# ---------------------------------------------------------------------------------------- errors


def right_call():
    zeros = functools.partial(np.zeros, dtype=np.float32)
    return {
        "dout": zeros((2, 5, 8, 24)),
        "q": zeros((2, 5, 8, 16)),
        "k": zeros((2, 7, 4, 16)),
        "v": zeros((2, 7, 4, 24)),
        "out": zeros((2, 5, 8, 24)),
        "lse": zeros((2, 8, 5)),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dout": None}, TypeError, "dout must be a NumPy or CuPy array, got None"),
        ({"dout": np.zeros((2, 5, 8, 16), np.float32)}, ValueError,
         "dout has shape (2, 5, 8, 16), must be (2, 5, 8, 24)"),
        ({"dout": np.zeros((2, 5, 8, 24))}, TypeError, "dout has dtype float64, must be float32"),
        ({"lse": np.zeros((2, 5, 8), np.float32)}, ValueError,
         "lse has shape (2, 5, 8), must be (2, 8, 5)"),
        ({"dlse": np.zeros((2, 8, 5))}, TypeError, "dlse has dtype float64, must be float32"),
        ({"grad_bias": True}, ValueError, "grad_bias is True, but bias is None"),
        ({"grad_alibi": True}, ValueError, "grad_alibi is True, but alibi_slopes is None"),
        ({"dropout": 1.0}, ValueError, "dropout is 1.0, must be at least 0 and less than 1"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"seed": -1}, ValueError, "seed is -1, must be from 0 to 2**64 - 1"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=re.escape(f"flash_attention_backward: {message}")):
        cuattn.flash_attention_backward(**right_call() | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad_bias": True}, ValueError, "grad_bias is True, but bias is None"),
        ({"grad_alibi": 1}, TypeError, "grad_alibi must be True or False, got 1"),
        ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1"),
    ],
)
def test_vjp_says_at_once_what_its_pullback_cannot_do(change, error, message):
    call = right_call()
    with pytest.raises(error, match=re.escape(f"flash_attention_vjp: {message}")):
        cuattn.flash_attention_vjp(call["q"], call["k"], call["v"], **change)


def test_vjp_takes_no_out():
    call = right_call()
    with pytest.raises(TypeError, match="flash_attention_vjp: out is not one of its keywords"):
        cuattn.flash_attention_vjp(call["q"], call["k"], call["v"], out=call["out"])
