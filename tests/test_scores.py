"""Bias, masks, windows of any bounds and large heads in every function (tests/scores.py), in
NumPy; and what their arguments must be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import scores

BFLOAT16, FLOAT32, FLOAT64 = map(np.dtype, (ml_dtypes.bfloat16, np.float32, np.float64))
CHECKS = scores.check_whole, scores.check_varlen, scores.check_decode, scores.check_paged


@pytest.mark.parametrize("name", scores.OPTIONS)
@pytest.mark.parametrize("check", CHECKS)
def test_every_function_has_every_option(check, name, rng):
    check(rng, FLOAT32, name, (64, 40), np.asarray)


@pytest.mark.parametrize("dims", scores.DIMS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, FLOAT64])
@pytest.mark.parametrize("check", CHECKS)
def test_head_dims(check, dtype, dims, rng):
    check(rng, dtype, "all", dims, np.asarray)


@pytest.mark.parametrize("name", scores.OPTIONS)
def test_gradients_of_varlen(name, rng):
    scores.check_gradients(rng, FLOAT32, name, np.asarray)


@pytest.mark.parametrize("name", ["bias", "both masks", "all"])
def test_codes(name, rng):
    scores.check_codes(rng, FLOAT32, name, (64, 64), np.asarray)


def test_gradients_with_a_key_mask(rng):
    scores.check_key_mask_gradients(rng, FLOAT32, np.asarray)


def test_a_prefix_that_the_pages_have_changes_nothing(rng):
    scores.check_paged(rng, FLOAT32, "all", (64, 64), np.asarray, prefix=16)


def test_leading_axes_of_a_key_mask(rng):
    q, k, v = (rng.standard_normal((2, 3, 9, 2, 8), dtype=np.float32) for _ in range(3))
    key_mask = rng.random((2, 3, 9)) > 0.3
    out = cuattn.flash_attention(q, k, v, key_mask=key_mask)
    for i in np.ndindex(2, 3):
        one = cuattn.flash_attention(q[i], k[i], v[i], key_mask=key_mask[i])
        np.testing.assert_array_equal(out[i], one)


def test_multi_head_attention_takes_a_key_mask(rng):
    x = rng.standard_normal((2, 9, 16), dtype=np.float32)
    weights = rng.standard_normal((4, 16, 16), dtype=np.float32) / 4
    key_mask = rng.random((2, 9)) > 0.3
    out, same = (
        cuattn.multi_head_attention(x, *weights, heads=2, **options)
        for options in ({"key_mask": key_mask}, {"mask": key_mask[:, None, None]})
    )
    np.testing.assert_array_equal(out, same)


# ------------------------------------------------------------------------------------------------
# errors

Q = np.zeros((2, 5, 4, 8), np.float32)
CU = np.array([0, 2, 10], np.int32)
KEEP = np.ones((2, 5), bool)


def whole(**options):
    return cuattn.flash_attention(Q, Q, Q, **options)


def varlen(**options):
    rows = Q.reshape(10, 4, 8)
    return cuattn.flash_attention_varlen(rows, rows, rows, CU, **options)


def decode(**options):
    return cuattn.flash_decode(Q, Q, Q, np.array([5, 3], np.int32), **options)


def paged(**options):
    pages = np.zeros((2, 8, 4, 8), np.float32)
    table, lengths = np.array([[0], [1]], np.int32), np.array([5, 3], np.int32)
    return cuattn.paged_attention(Q, pages, pages, table, lengths, **options)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (whole, {"key_mask": KEEP[0]}, ValueError, r"key_mask has shape \(5,\), must be \(batch, "),
        (whole, {"key_mask": KEEP[:, :4]}, ValueError, r"\(2, 4\), must be .* \(2, 5\)"),
        (whole, {"key_mask": KEEP * 1}, TypeError, "key_mask has dtype int64, must be bool"),
        (varlen, {"mask": KEEP[:, None, None]}, ValueError, "room for the longest .* 8 keys"),
        (varlen, {"bias": np.zeros((4, 8, 7))}, ValueError, "room for the longest .* 8 keys"),
        (varlen, {"bias": np.zeros((4, 7, 8))}, ValueError, "room for the longest .* 8 queries"),
        (varlen, {"mask": np.ones((3, 1, 8, 8), bool)}, ValueError, "mask has shape .* broadcast"),
        (
            varlen,
            {"mask": np.ones((2, 1, 1, 9), bool), "bias": np.zeros((1, 10))},
            ValueError,
            r"mask has shape \(2, 1, 1, 9\), which must broadcast to .* \(2, 4, 1, 10\)",
        ),
        (decode, {"key_mask": KEEP[:, :4]}, ValueError, "key_mask has .* 5 keys"),
        (decode, {"mask": np.ones((2, 1, 4, 5), bool)}, ValueError, "mask has shape .* broadcast"),
        (paged, {"bias": KEEP[:1]}, TypeError, "bias has dtype bool, must be one of float16"),
        (paged, {"key_mask": KEEP[:1]}, ValueError, r"key_mask has shape \(1, 5\)"),
        (whole, {"window": (-1, -1)}, ValueError, "leaves no key .* None, and not -1"),
        (whole, {"window": (-1, 0)}, ValueError, "leaves no key to any query"),
        (whole, {"window": (-1, 5), "causal": True}, ValueError, "and causal is True, which"),
        (decode, {"window": (-1, None)}, ValueError, "and causal is True, which leaves no key"),
        (whole, {"window": (1.5, 0)}, ValueError, "each side must be an integer, or None"),
    ],
)
def test_errors(function, options, error, message):
    with pytest.raises(error, match=message):
        function(**options)


def test_a_prefix_of_arrays_has_no_scores_of_its_own():
    part = np.zeros((3, 4, 8), np.float32)
    for options in (
        {"key_mask": KEEP},
        {"mask": np.ones((5, 5), bool)},
        {"bias": np.zeros((5, 5))},
    ):
        with pytest.raises(ValueError, match=f"prefix is a pair .* so {next(iter(options))} must"):
            paged(prefix=(part, part), **options)


@pytest.mark.parametrize("head_dims", [(257, 64), (64, 300)])
def test_gradients_of_large_heads_are_refused(head_dims):
    q, v = (np.zeros((1, 4, 1, dim), np.float32) for dim in head_dims)
    label = "q" if head_dims[0] > 256 else "v"
    message = f"{label} has head_dim {max(head_dims)}, must be at most 256 for gradients"
    out, lse = cuattn.flash_attention(q, q, v, return_lse=True)
    with pytest.raises(ValueError, match=message):
        cuattn.flash_attention_backward(out, q, q, v, out, lse)
    with pytest.raises(ValueError, match=message):
        cuattn.flash_attention_vjp(q, q, v)
    with pytest.raises(ValueError, match=message):
        cuattn.flash_attention_jvp(q, q, v, q, q, v)
