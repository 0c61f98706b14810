"""Codes and scales: what NumPy makes of numbers and back, and attention over them."""

from __future__ import annotations

import copy
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn._quantized import FORMATS, ROTATION_SIGNS
from cuattn.gpu import compiler
from cuattn.reference import quantization as reference

BFLOAT16 = ml_dtypes.bfloat16
GRANULARITIES = {
    "tensor": {"granularity": "tensor"},
    "head": {"granularity": "head"},
    "token": {},
    "channel": {"granularity": "channel"},
    "group": {"granularity": "group", "group_size": 32},
}
#: What `quantize` can do beside the choice of a scale.
OPTIONS = {
    "": {},
    "rotated": {"rotate": True},
    "offset": {"offset": np.linspace(-2, 2, 128, dtype=np.float32).reshape(2, 64)},
}


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def relative_error(format, symmetric=True):
    """The error of one value in units of the largest one of its group."""
    if format == "int4":
        return 0.51 / 7 if symmetric else 1.02 / 15
    return {"int8": 0.504 / 127, "float8_e4m3": 1 / 16, "float8_e5m2": 1 / 8}[format]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
def test_values_are_near(format, granularity, options):
    x = random(3, 40, 2, 64) + options.get("offset", 0)
    codes = cuattn.quantize(x, format, **GRANULARITIES[granularity], **options)
    back = cuattn.dequantize(codes)
    assert back.dtype == np.float32 and back.shape == codes.shape == x.shape
    inner = x - options.get("offset", 0)
    error = np.abs(back - x)
    if "rotate" in options:
        inner, error = reference.rotated(inner), np.abs(reference.rotated(back - x))
    assert error.max() <= relative_error(format) * np.abs(inner).max() + 1e-6


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        ("tensor", (1, 1, 1, 1)),
        ("head", (1, 1, 2, 1)),
        ("token", (3, 40, 2, 1)),
        ("channel", (1, 1, 2, 64)),
        ("group", (3, 40, 2, 2)),
    ],
)
def test_shapes_of_scales(format, granularity, shape):
    codes = cuattn.quantize(random(3, 40, 2, 64), format, **GRANULARITIES[granularity])
    assert codes.scale.shape == shape and codes.scale.dtype == BFLOAT16


def test_a_head_s_scales_are_neighbours():
    codes = cuattn.quantize(random(3, 40, 2, 64), "int4", symmetric=False)
    size = codes.scale.itemsize
    assert codes.scale.strides[:3] == codes.minimum.strides[:3] == (160 * size, 2 * size, 80 * size)
    scale, minimum = (
        array.__array_interface__["data"][0] for array in (codes.scale, codes.minimum)
    )
    assert minimum == scale + 2


LARGEST = float(np.finfo(np.float32).max)


@given(
    st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=8),
    st.booleans(),
)
def test_scales_saturate_nothing(numbers, symmetric):
    x = np.array(numbers * 2, np.float32)[None]
    codes = cuattn.quantize(x, "int4", symmetric=symmetric)
    scale = codes.scale.astype(np.float32)
    if np.isnan(scale).any():  # rounded up, or down for the least value, something overflows
        exact = x.astype(np.float64)
        extent = max(np.abs(exact).max(), 0 if symmetric else np.ptp(exact))
        assert extent * (1 + 2.0**-6) > LARGEST
        assert np.isnan(cuattn.dequantize(codes)).all()
        return
    error = np.abs(cuattn.dequantize(codes).astype(np.float64) - x)
    assert (error <= 0.5 * scale * (1 + 2**-6) + np.abs(x) * 2**-22).all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_group_with_a_nan_or_infinity_is_nan(format):
    x = random(5, 1, 64)
    x[1, 0, 3], x[2, 0, 7], x[3, 0, 8] = np.nan, np.inf, -np.inf
    for options in ({}, {"symmetric": False}) if format == "int4" else ({},):
        codes = cuattn.quantize(x, format, **options)
        back = cuattn.dequantize(codes)
        assert np.isnan(back[1:4]).all() and np.isfinite(back[[0, 4]]).all()
        assert np.isfinite(codes.data[1:4].astype(np.float32)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_extremes(format):
    x = np.zeros((6, 64), np.float32)
    x[1], x[2], x[3] = 3e38, 1e-40, -0.0
    x[4, ::2], x[5, ::2] = 1e-40, 3e38
    codes = cuattn.quantize(x, format)
    scale = codes.scale[:, 0].astype(np.float64)
    assert scale[0] == scale[3] == 1 and scale[2] == scale[4] == 2.0**-126
    back = cuattn.dequantize(codes).astype(np.float64)
    assert (np.abs(back - x)[[0, 2, 3, 4]] <= 2.0**-126 / 2).all()
    assert (np.abs(back - x)[[1, 5]] <= 3e38 * relative_error(format)).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "channel"])
@pytest.mark.parametrize("shape", [(0, 2, 16), (3, 0, 2, 16), (0, 4, 2, 16)])
def test_nothing_has_a_scale_of_one(format, granularity, shape):
    codes = cuattn.quantize(np.zeros(shape, np.float32), format, granularity=granularity)
    assert cuattn.dequantize(codes).shape == shape
    assert (codes.scale == 1).all()
    if format == "int4":
        codes = cuattn.quantize(
            np.zeros(shape, np.float32), format, granularity=granularity, symmetric=False
        )
        assert (codes.scale == 1).all()
        assert (codes.minimum == 0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_and_codes_of_any_strides(format):
    x = random(5, 2, 16)
    want = cuattn.dequantize(cuattn.quantize(x, format))
    for order in ((2, 1, 0), (1, 2, 0), (2, 0, 1)):
        strided = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        codes = cuattn.quantize(strided, format)
        assert np.array_equal(cuattn.dequantize(codes), want)
        data = np.ascontiguousarray(codes.data.transpose(order)).transpose(np.argsort(order))
        codes = cuattn.QuantizedArray(data, codes.scale, dtype=format, like=np.float32)
        assert np.array_equal(cuattn.dequantize(codes), want)


def test_ties_go_to_even():
    scale = np.full((1, 1), 1, np.float32)
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5]], np.float32)
    want = [0, 2, 2, 0, -2, -2, 126, -126]
    assert cuattn.quantize(x, "int8", scale=scale).data.tolist() == [want]
    # Of e4m3, between neighbours of an even and an odd mantissa.
    x = np.array([[17, 19, 1.0625, 1.1875, 2**-10, 3 * 2**-10]], np.float32)
    back = cuattn.dequantize(cuattn.quantize(x, "float8_e4m3", scale=scale))
    assert back.tolist() == [[16, 20, 1, 1.25, 0, 2**-8]]


def test_a_given_scale_saturates():
    x = np.array([[1000.0, -1000.0, np.inf, np.nan, 3.0, -0.0]], np.float32)
    for format, largest in (("int8", 127), ("int4", 7), ("float8_e4m3", 448)):
        back = cuattn.dequantize(cuattn.quantize(x, format, scale=1.0))
        assert back.tolist() == [[largest, -largest, largest, 0, 3, 0]]
    codes = cuattn.quantize(x, "int4", scale=(2.0, -4.0), symmetric=False)
    assert cuattn.dequantize(codes).tolist() == [[26, -4, 26, -4, 4, 0]]


def test_every_code():
    """Values of all codes, against ml_dtypes and the integers."""
    data = np.arange(256, dtype=np.uint8)[None]
    one = np.full((1, 1), 1, np.float32)
    for format, dtype in reference.FLOAT8.items():
        back = cuattn.dequantize(cuattn.QuantizedArray(data, one, dtype=format), np.float32)
        np.testing.assert_array_equal(back[0], data[0].view(dtype).astype(np.float32))
    back = cuattn.dequantize(cuattn.QuantizedArray(data.view(np.int8), one, dtype="int8"))
    assert back[0].tolist() == [*range(128), *range(-128, 0)]
    for minimum, first in ((None, -8), (np.zeros_like(one), 0)):
        back = cuattn.dequantize(cuattn.QuantizedArray(data, one, dtype="int4", minimum=minimum))
        assert back[0, ::2].tolist() == [first + n % 16 for n in range(256)]
        assert back[0, 1::2].tolist() == [first + n // 16 for n in range(256)]


@pytest.mark.parametrize("head_dim", [1, 2, 40, 64, 80, 96, 128, 256])
def test_rotation(head_dim):
    """It is orthogonal, in blocks, and is undone."""
    matrix = reference.rotated(np.eye(head_dim, dtype=np.float32)).astype(np.float64).T
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    block = head_dim & -head_dim
    rows, columns = np.nonzero(matrix)
    assert (rows // block == columns // block).all() and np.ptp(np.abs(matrix[matrix != 0])) < 1e-7
    x = random(7, head_dim)
    np.testing.assert_allclose(reference.unrotated(reference.rotated(x)), x, atol=2e-6)


def test_kernels_rotate_by_the_same_signs():
    text = (compiler.source_root() / "tile/quantized.cuh").read_text(encoding="utf-8")
    assert all(f"0x{word:08x}" in text for word in ROTATION_SIGNS)
    named = {"int8": "kInt8", "int4": "kInt4", "float8_e4m3": "kE4m3", "float8_e5m2": "kE5m2"}
    order = ["kPlain", *sorted(named.values(), key=text.index)]
    assert {name: FORMATS[format].number for format, name in named.items()} == {
        name: order.index(name) for name in order[1:]
    }


def test_parts():
    x = random(4, 16, 2, 64)
    for options in GRANULARITIES.values():
        codes = cuattn.quantize(x, "int4", symmetric=False, **options)
        for index in (0, slice(1, 3), np.array([3, 0]), (2, slice(3, 9))):
            np.testing.assert_array_equal(
                cuattn.dequantize(codes[index]), cuattn.dequantize(codes)[index]
            )
    with pytest.raises(IndexError, match="the 2 axes before heads"):
        codes[0, 0, 0]
    np.testing.assert_array_equal(np.asarray(codes), cuattn.dequantize(codes))


# ------------------------------------------------------------------------------------------
# attention


def quantized(x, format, **options):
    if format == "":
        return x, x
    codes = cuattn.quantize(x, format, **options)
    return codes, cuattn.dequantize(codes)


@pytest.mark.parametrize(
    "formats", list(itertools.product(("", *FORMATS), repeat=2))[1:], ids=lambda f: "/".join(f)
)
def test_attention_is_that_of_the_values(formats):
    q = random(2, 3, 8, 64)
    k, k_values = quantized(random(2, 50, 2, 64, seed=1), formats[0], rotate=True)
    v, v_values = quantized(random(2, 50, 2, 32, seed=2), formats[1])
    seq_lens = np.array([37, 50], np.int32)
    options = {"softcap": 20.0, "sinks": np.zeros(8, np.float32), "return_lse": True}
    got = cuattn.flash_decode(q, k, v, seq_lens, **options)
    want = cuattn.flash_decode(q, k_values, v_values, seq_lens, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_pages(granularity):
    """Paging, ragged rows and shared prefixes, given as pages or as codes of their own."""
    options = GRANULARITIES[granularity]
    k, k_values = quantized(random(9, 16, 2, 64, seed=1), "int4", symmetric=False, **options)
    v, v_values = quantized(random(9, 16, 2, 64, seed=2), "int8", **options)
    table = np.array([[3, 7, 1], [3, 2, 99]], np.int32)
    seq_lens, cu = np.array([40, 20], np.int32), np.array([0, 5, 6], np.int32)
    q = random(6, 4, 64)
    keys = {"cu_seqlens_q": cu}
    got = cuattn.paged_attention(q, k, v, table, seq_lens, **keys)
    want = cuattn.paged_attention(q, k_values, v_values, table, seq_lens, **keys)
    np.testing.assert_array_equal(got, want)
    shared = cuattn.paged_attention(q, k, v, table, seq_lens, prefix=16, **keys)
    np.testing.assert_allclose(shared, want, atol=1e-6)
    seq_lens -= 16
    for before in ((k[3], v[3]), (k_values[3], v[3])):
        got = cuattn.paged_attention(q, k, v, table[:, 1:], seq_lens, prefix=before, **keys)
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_extreme_scales():
    """1e-30 and 1e30, 0 and negative ones; those of tokens that are not there are NaN."""
    codes = np.random.default_rng(0).integers(-127, 128, (1, 40, 1, 64), dtype=np.int8)
    scale = np.ones((1, 40, 1, 1), np.float32)
    scale[0, :30, 0, 0] = np.resize([1e-30, 1e30, 0, -1e-3, 1.0], 30)
    scale[0, 30:] = np.nan
    q = random(1, 4, 64) * 1e-30
    k = cuattn.QuantizedArray(codes, scale, dtype="int8")
    for seq_len in (30, 0):
        seq_lens = np.array([seq_len], np.int32)
        out = cuattn.flash_decode(q, k, k, seq_lens)
        values = cuattn.dequantize(k, np.float32)
        np.testing.assert_array_equal(out, cuattn.flash_decode(q, values, values, seq_lens))
        assert np.isfinite(out).all()


# ------------------------------------------------------------------------------------------
# errors


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("x", "fp8"), {}, 'dtype is \'fp8\', must be one of "int8", "int4"'),
        (("x", "int8"), {"granularity": "row"}, "granularity is 'row', must be one of \"tensor\""),
        (("x", "int8"), {"granularity": "group"}, "group_size is None, must be given"),
        (("x", "int8"), {"group_size": 32}, "group_size is 32, must be given for"),
        (("x", "int8"), {"granularity": "group", "group_size": 48}, "must divide x's head_dim 64"),
        (("x", "int8"), {"symmetric": False}, 'symmetric is False, which is for "int4"'),
        (("x", "int4"), {"symmetric": False, "scale": 1.0}, r"must be a pair \(scale, minimum\)"),
        (("x", "int8"), {"offset": np.zeros(64)}, r"offset has shape \(64,\) and dtype float64"),
        (("x", "int8"), {"scale": np.ones((3, 1), np.float32)}, r"shape \(3, 1\), which must"),
        (("x", "int8"), {"scale": np.ones(48, np.float32)}, "its last axis must divide 64"),
        (("x", "int8"), {"scale": 0}, "scale has 0.0, must be above 0"),
        (("x", "int8"), {"scale": True}, "scale must be a NumPy or CuPy array"),
        (("x", "int8"), {"scale": np.float32([1, -1] * 32)}, "scale has -1.0, must be above 0"),
        (("x", "int8"), {"scale": np.ones(1)}, "scale has dtype float64, must be bfloat16 or"),
        (("odd", "int4"), {}, "x has head_dim 7, must be even for int4"),
        (("integers", "int8"), {}, "x has dtype int64, must be one of float16"),
    ],
)
def test_wrong_arguments_of_quantize(arguments, options, message):
    arrays = {"x": random(5, 2, 64), "odd": random(5, 2, 7), "integers": np.ones((5, 2, 64), int)}
    with pytest.raises((TypeError, ValueError), match=f"quantize: .*{message}"):
        cuattn.quantize(arrays[arguments[0]], arguments[1], **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((4, 2, 8), np.uint8)}, "data has dtype uint8, must be int8 for int8"),
        ({"scale": np.ones((3, 1, 1), np.float32)}, r"scale has shape \(3, 1, 1\), which must"),
        ({"scale": np.ones((4, 1, 1))}, "scale has dtype float64, must be bfloat16 or float32"),
        ({"minimum": np.ones((4, 1, 1), BFLOAT16)}, "must have scale's"),
        ({"offset": np.ones(8, np.float32)}, r"must be \(heads, head_dim\) = \(2, 8\)"),
        ({"rotation": "random"}, "rotation is 'random', must be None or \"hadamard\""),
        ({"like": np.int32}, "like is int32, must be one of"),
        ({"like": "nonsense"}, "like is nonsense, must be one of"),
    ],
)
def test_wrong_arguments_of_arrays(changes, message):
    arguments = {"data": np.zeros((4, 2, 8), np.int8), "scale": np.ones((4, 1, 1), np.float32)}
    with pytest.raises((TypeError, ValueError), match=f"QuantizedArray: .*{message}"):
        cuattn.QuantizedArray(**{"dtype": "int8", **arguments, **changes})


def test_wrong_arguments_of_attention():
    codes = cuattn.quantize(random(2, 50, 2, 64), "int8")
    lens = np.array([1, 2], np.int32)
    with pytest.raises(ValueError, match="flash_decode: k_cache has head_dim 64, must be q's 32"):
        cuattn.flash_decode(random(2, 4, 32), codes, codes, lens)
    with pytest.raises(TypeError, match="flash_decode: v_cache has dtype float64, must be q's"):
        cuattn.flash_decode(random(2, 4, 64), codes, np.ones((2, 50, 2, 64)), lens)
    with pytest.raises(TypeError, match="dequantize: qx must be a QuantizedArray, got ndarray"):
        cuattn.dequantize(random(2, 2))
    with pytest.raises(AttributeError, match="scale cannot be set"):
        codes.scale = None


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies(copied, rng):
    x = rng.standard_normal((5, 2, 16)).astype(np.float16)
    offset = rng.standard_normal((2, 16), dtype=np.float32)
    quantized = cuattn.quantize(x, "int4", symmetric=False, offset=offset, rotate=True)
    other = copied(quantized)
    assert (other.dtype, other.like, other.rotation) == ("int4", quantized.like, "hadamard")
    assert np.shares_memory(other.data, quantized.data) == (copied is copy.copy)
    np.testing.assert_array_equal(cuattn.dequantize(other), cuattn.dequantize(quantized))
