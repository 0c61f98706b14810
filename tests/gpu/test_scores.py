"""Bias, masks, windows of any bounds and large heads in every function (tests/scores.py), on the
kernels that serve them."""

from __future__ import annotations

import numpy as np
import pytest

from tests import formulas, scores

cupy = pytest.importorskip("cupy")

from cuattn.gpu import dispatch  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype(dtype) for dtype in formulas.DTYPES]
CHECKS = scores.check_whole, scores.check_varlen, scores.check_decode, scores.check_paged


@pytest.mark.parametrize("name", scores.OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS)
def test_every_function_has_every_option(check, dtype, name, rng):
    check(rng, dtype, name, scores.DIMS[rng.integers(2)], cupy.asarray)


@pytest.mark.parametrize("dims", scores.DIMS[2:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS)
def test_large_heads(check, dtype, dims, rng):
    check(rng, dtype, "all", dims, cupy.asarray)
    check(rng, dtype, "keys before", dims, cupy.asarray)


@pytest.mark.parametrize("name", scores.OPTIONS)
@pytest.mark.parametrize("check", [scores.check_whole, scores.check_varlen])
def test_plain_kernels(check, name, rng):
    with dispatch.use_tiers("forward_simt"):
        check(rng, DTYPES[rng.integers(4)], name, (64, 40), cupy.asarray)


@pytest.mark.parametrize("num_splits", ["fixed", 3])
@pytest.mark.parametrize("name", scores.OPTIONS)
def test_splits(name, num_splits, rng):
    dtype = DTYPES[rng.integers(4)]
    scores.check_decode(rng, dtype, name, (64, 40), cupy.asarray, num_splits=num_splits)


@pytest.mark.parametrize("name", scores.OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_varlen(dtype, name, rng):
    scores.check_gradients(rng, dtype, name, cupy.asarray)


@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (512, 512)])
@pytest.mark.parametrize("name", ["bias", "both masks", "all", "keys before"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes(dtype, name, dims, rng):
    scores.check_codes(rng, dtype, name, dims, cupy.asarray)


@pytest.mark.parametrize("name", ["bias", "bias of keys", "mask", "key_mask", "both masks", "all"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dims", [(64, 40), (128, 128), (256, 192)])
def test_tensor_cores_while_decoding(dims, tokens, name, rng):
    """Tiles of every number of rows; in caches, and of ragged rows in pages."""
    dtype = DTYPES[rng.integers(2)]
    assert dtype.itemsize == 2
    with dispatch.use_tiers("decode_sm80"):
        scores.check_decode(rng, dtype, name, dims, cupy.asarray, tokens=tokens)
        if tokens == 5:
            scores.check_paged(rng, dtype, name, dims, cupy.asarray)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_elements_that_begin_anywhere(first, rng):
    """Rows of bias and mask need not begin at a word, nor lie at equal distances modulo four."""
    from cuattn import flash_decode

    dtype = DTYPES[rng.integers(2)]
    q, k, v = (cupy.asarray(scores.random(rng, dtype, 2, n, 4, 64)) for n in (3, 333, 333))
    lengths = cupy.asarray(np.array([333, 130], np.int32))
    bias = cupy.asarray(scores.random(rng, dtype, 2, 4, 3, 333 + first))[..., first:]
    mask = cupy.asarray(rng.random((2, 1, 3, 336 + first)) > 0.4)[..., first : first + 333]
    options = {"bias": bias, "mask": mask}
    with dispatch.use_tiers("decode_sm80"):
        out = flash_decode(q, k, v, lengths, **options)
        same = flash_decode(q, k, v, lengths, **{n: a.copy() for n, a in options.items()})
    cupy.testing.assert_array_equal(out, same)
    with dispatch.use_tiers("decode_simt"):
        other = flash_decode(q, k, v, lengths, **options)
    np.testing.assert_allclose(
        out.get().astype(float), other.get().astype(float), atol=2.0**-6, rtol=2.0**-6
    )


@pytest.mark.parametrize("how", ["key_mask", "mask", "bias"])
def test_what_no_query_sees_may_be_anything(how, rng):
    """Padding before a sequence's first token, which holds NaN."""
    from cuattn import flash_decode

    dtype = DTYPES[rng.integers(2)]
    q, k, v = (scores.random(rng, dtype, 2, n, 4, 64) for n in (3, 200, 200))
    padding = np.array([70, 0])
    seen = np.arange(200) >= padding[:, None]
    rows = np.broadcast_to(seen[:, None, None], (2, 4, 3, 200))
    options = {
        "key_mask": {"key_mask": seen},
        "mask": {"mask": rows},
        "bias": {"bias": np.where(rows, 0.25, -np.inf).astype(dtype)},
    }[how]
    lengths = np.array([200, 150], np.int32)
    wanted = [
        flash_decode(
            *(a[b : b + 1].astype(np.float64) for a in (q,)),
            *(a[b : b + 1, first:].astype(np.float64) for a in (k, v)),
            lengths[b : b + 1] - np.int32(first),
        )
        for b, first in enumerate(padding)
    ]
    v[0, :70] = np.nan
    if how != "bias":  # which is added
        k[0, :70] = np.nan
    with dispatch.use_tiers("decode_sm80"):
        out = flash_decode(
            *map(cupy.asarray, (q, k, v, lengths)), **scores.on_device(options, cupy.asarray)
        )
    np.testing.assert_allclose(out.get().astype(float), np.concatenate(wanted), atol=2.0**-6)


def test_gradients_with_a_key_mask(rng):
    scores.check_key_mask_gradients(rng, DTYPES[rng.integers(4)], cupy.asarray)


def test_a_prefix_that_the_pages_have_changes_nothing(rng):
    scores.check_paged(rng, DTYPES[0], "all", (64, 64), cupy.asarray, prefix=16)


def test_lengths_beyond_bias_and_mask_read_their_last_element(rng):
    """What the host cannot check leads to no address outside of the arrays."""
    from cuattn import flash_decode

    q, k = (cupy.asarray(scores.random(rng, DTYPES[2], 2, n, 4, 64)) for n in (1, 40))
    bias = cupy.asarray(scores.random(rng, DTYPES[2], 2, 1, 1, 9))
    lengths = cupy.asarray(np.array([40, 7], np.int32))
    whole = cupy.concatenate([bias, cupy.repeat(bias[..., -1:], 31, axis=3)], axis=3)
    out, same = (flash_decode(q, k, k, lengths, bias=b) for b in (bias, whole))
    cupy.testing.assert_array_equal(out, same)
