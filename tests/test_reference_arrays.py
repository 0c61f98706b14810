"""flash_attention on NumPy arrays as they come: strides, dtypes, leading axes, out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests.calls import arrays, check, feature, small_tiles
from tests.formulas import DTYPES

pytestmark = pytest.mark.filterwarnings("error")


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
        check(*map(view, dense), causal=True)


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


def test_matrices_are_arrays_of_two_axes(rng):
    q, bias = rng.standard_normal((2, 6, 4, 8)), rng.standard_normal((6, 6))
    logits = rng.standard_normal((3, 50), np.float32)
    with pytest.warns(PendingDeprecationWarning, match="the matrix subclass"):
        matrices = np.matrix(bias), np.matrix(logits)
    want = cuattn.flash_attention(q, q, q, bias=bias)
    assert np.array_equal(cuattn.flash_attention(q, q, q, bias=matrices[0]), want)
    want = cuattn.sampling.filter_logits(logits, top_p=0.5)
    got = cuattn.sampling.filter_logits(matrices[1], top_p=0.5)
    assert type(got) is np.ndarray
    assert np.array_equal(got, want)


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
