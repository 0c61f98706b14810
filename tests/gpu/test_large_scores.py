"""Scores as large as floats are, and scales so small that float32 flushes them to 0: results are
NumPy's.

A bias of -1e9 or of the lowest float is how many programs say that a key is masked, also of rows
that then keep none. Such a row gets the mean of all values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cuattn
from tests import formulas
from tests.gpu.calls import normal

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_workspaces")]

DTYPES = [np.dtype(dtype) for dtype in formulas.DTYPES[:3]]
LOWEST = float(np.finfo(np.float32).min)


def arrays(rng, dtype, seqlen_q=70, seqlen_k=150):
    return [normal(rng, (1, n, 2, 64), dtype) for n in (seqlen_q, seqlen_k, seqlen_k)]


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


def assert_close(got: Any, wanted: Any, dtype: np.dtype, tolerance: float = 0.0) -> None:
    """By default as the rounding of `dtype` wants it."""
    wanted = np.asarray(wanted, np.float64)
    tolerance = tolerance or {2: 2.0**-5, 4: 1e-4}[dtype.itemsize]
    tolerance *= max(1.0, np.abs(wanted).max(initial=0.0))
    np.testing.assert_allclose(got.get().astype(np.float64), wanted, rtol=0, atol=tolerance)


def assert_same_lse(got: Any, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got.get(), wanted, rtol=1e-5, atol=2.0**-7)


def check(dtype: np.dtype, q: Any, k: Any, v: Any, **options: Any) -> None:
    wanted, wanted_lse = cuattn.flash_attention(q, k, v, return_lse=True, **options)
    given = map(cupy.asarray, (q, k, v))
    out, lse = cuattn.flash_attention(*given, return_lse=True, **on_device(options))
    assert_close(out, wanted, dtype)
    assert_same_lse(lse, wanted_lse)


def bias_for_mask(rng, low: float, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """That removes half of the keys, and of every third row all."""
    removed = rng.random((seqlen_q, seqlen_k)) < 0.5
    removed[::3] = True
    return np.where(removed, low, 0).astype(np.float32)


LOWS = pytest.mark.parametrize("low", [-65504.0, -1e9, -1e30, LOWEST, 1e9])


@LOWS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_bias_for_a_mask(tier, dtype, low, sinks, rng):
    q, k, v = arrays(rng, dtype)
    options: dict[str, Any] = {"bias": bias_for_mask(rng, low, 70, 150)}
    if sinks:
        options["sinks"] = rng.standard_normal(2).astype(np.float32)
    check(dtype, q, k, v, **options)


@LOWS
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_for_a_mask_while_decoding(decode_tier, dtype, low, rng):
    """Of lse this only asks for how large it is: kernels count in log2, which has less room."""
    q, k, v = arrays(rng, dtype, 4)
    bias, lengths = bias_for_mask(rng, low, 4, 150), np.array([150], np.int32)
    wanted, wanted_lse = cuattn.flash_decode(q, k, v, lengths, bias=bias, return_lse=True)
    given = map(cupy.asarray, (q, k, v, lengths))
    out, lse = cuattn.flash_decode(*given, bias=cupy.asarray(bias), return_lse=True)
    assert_close(out, wanted, dtype)
    beyond = wanted_lse < LOWEST * math.log(2)
    assert bool((lse[cupy.asarray(beyond)] < -2e38).all())
    np.testing.assert_allclose(lse.get()[~beyond], wanted_lse[~beyond], rtol=1e-5, atol=2.0**-7)


@LOWS
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_bias_for_a_mask(backward_tier, dtype, low, rng):
    q, k, v = arrays(rng, dtype)
    options = {"bias": bias_for_mask(rng, low, 70, 150)}
    out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **options)
    dout = normal(rng, out.shape, dtype)
    host = dout, q, k, v, out, lse
    wanted = cuattn.flash_attention_backward(*host, grad_bias=True, **options)
    grads = cuattn.flash_attention_backward(
        *map(cupy.asarray, host), grad_bias=True, **on_device(options)
    )
    for name in ("dq", "dk", "dv", "dbias"):
        # Scores of -65504 are rounded by 2^-9.
        assert_close(getattr(grads, name), getattr(wanted, name), dtype, 2.0**-5)


@pytest.mark.parametrize("low", [-1e9, -1e30, LOWEST, 1e9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_of_a_bias_for_a_mask(jvp_tier, dtype, low, rng):
    """Rows whose keys all have it are a mean, and so is what they derive: of such rows NumPy has
    an lse without the logarithm of how many keys they are."""
    q, k, v = arrays(rng, dtype)
    tangents = [dq, dk, dv] = arrays(rng, dtype)
    bias = bias_for_mask(rng, low, 70, 150)
    given = map(cupy.asarray, (q, k, v, *tangents))
    out, dout = cuattn.flash_attention_jvp(*given, bias=cupy.asarray(bias))

    means = bias.min(axis=1) == bias.max(axis=1)
    q, k, v, dq, dk, dv = (x[0].astype(np.float64) for x in (q, k, v, *tangents))
    q, dq = q[means], dq[means]
    scores = (np.einsum("ihd,jhd->ihj", dq, k) + np.einsum("ihd,jhd->ihj", q, dk)) / 8
    wanted = np.broadcast_to(v.mean(axis=0), q.shape)
    moved = scores - scores.mean(axis=2, keepdims=True)
    derived = dv.mean(axis=0) + np.einsum("ihj,jhd->ihd", moved, v) / len(k)
    assert_close(out[0][cupy.asarray(means)], wanted, dtype)
    assert_close(dout[0][cupy.asarray(means)], derived, dtype)
    assert bool(cupy.isfinite(dout).all())


@pytest.mark.parametrize("window", [(None, None), (None, 0), (None, -70)])
@pytest.mark.parametrize("slopes", [(1e5, 1e7), (1e9, 1e20), (-1e5, -1e8)])
@pytest.mark.parametrize("lengths", [(200, 300), (300, 200)])
def test_steep_alibi_slopes_leave_the_nearest_key(tier, lengths, slopes, window, rng):
    """Or the farthest: also where it is far."""
    dtype = DTYPES[rng.integers(3)]
    q, k, v = arrays(rng, dtype, *lengths)
    check(dtype, q, k, v, alibi_slopes=np.array(slopes, np.float32), window=window)


TINY = pytest.mark.parametrize("scale", [1e-37, 1e-40, 1e-60])


@TINY
@pytest.mark.parametrize("option", ["", "softcap", "alibi_slopes", "bias"])
def test_tiny_scales(tier, option, scale, rng):
    dtype = DTYPES[rng.integers(3)]
    q, k, v = arrays(rng, dtype)
    options = {
        "": {},
        "softcap": {"softcap": 2.0},
        "alibi_slopes": {"alibi_slopes": np.array([0.5, 0.1], np.float32)},
        "bias": {"bias": normal(rng, (150,), np.dtype(np.float32))},
    }[option]
    check(dtype, q, k, v, scale=scale, causal=True, **options)


@TINY
def test_gradients_of_tiny_scales(backward_tier, scale, rng):
    dtype = DTYPES[rng.integers(3)]
    q, k, v = arrays(rng, dtype)
    out, lse = cuattn.flash_attention(q, k, v, scale=scale, return_lse=True)
    dout = normal(rng, out.shape, dtype)
    host = dout, q, k, v, out, lse
    wanted = cuattn.flash_attention_backward(*host, scale=scale)
    grads = cuattn.flash_attention_backward(*map(cupy.asarray, host), scale=scale)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(grads, name), getattr(wanted, name), dtype)
