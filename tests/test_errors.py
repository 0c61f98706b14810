"""Bad input: each error names the function, the argument, what it was and what it may be."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cuattn


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


# A call that is right, and for each case what is different and what is said about it.

FLASH_ATTENTION = {"q": zeros(2, 5, 8, 16), "k": zeros(2, 7, 4, 16), "v": zeros(2, 7, 4, 24)}
SCORES = "(batch, heads_q, seqlen_q, seqlen_k) = (2, 8, 5, 7)"
LAYOUT = "(batch, seqlen, heads, head_dim)"
DTYPES = "float16, bfloat16, float32, float64"
ARRAY = "must be a NumPy or CuPy array (or have __cuda_array_interface__ or __dlpack__), got"
SWAPPED = "heads are the last axis but one: swapaxes(-3, -2) exchanges it with the length"
MADE = "numpy.asarray or cupy.asarray makes an array of it"

FLASH_ATTENTION_CASES = [
    # Arrays
    ({"q": [[0.0]]}, TypeError, f"q {ARRAY} list; {MADE}"),
    ({"k": None}, TypeError, "k must be a NumPy or CuPy array, got None"),
    (
        {"k": cuattn.quantize(np.ones((2, 7, 4, 16)), "int8")},
        TypeError,
        f"k {ARRAY} cuattn._quantized.QuantizedArray; flash_decode and paged_attention take it as "
        "keys or values, and dequantize makes an array of it",
    ),
    ({"mask": True}, TypeError, f"mask {ARRAY} bool"),
    ({"sinks": 1.0}, TypeError, f"sinks {ARRAY} float"),
    ({"out": "out"}, TypeError, f"out {ARRAY} str"),
    # Shapes
    ({"q": zeros(5, 16)}, ValueError, f"q has shape (5, 16), must be {LAYOUT}"),
    (
        {"q": zeros(1, 2, 5, 8, 16)},
        ValueError,
        "k has shape (2, 7, 4, 16), whose leading axes must be q's (1, 2)",
    ),
    (
        {name: zeros(3, 2, 4, 2, 8) for name in "qkv"} | {"bias": zeros(2, 3, 1, 1, 1, 4)},
        ValueError,
        "bias has shape (2, 3, 1, 1, 1, 4), whose leading axes must broadcast to q's (3, 2)",
    ),
    (
        {name: zeros(3, 2, 4, 2, 8) for name in "qkv"} | {"out": zeros(3, 2, 4, 2, 7)},
        ValueError,
        "out has shape (3, 2, 4, 2, 7), must be (3, 2, 4, 2, 8)",
    ),
    ({"k": zeros(7, 4, 16)}, ValueError, f"k has shape (7, 4, 16), must be {LAYOUT}"),
    (
        {"q": zeros(5, 8, 16)},
        ValueError,
        "k has shape (2, 7, 4, 16), must be (seqlen, heads, head_dim) as q is",
    ),
    ({"k": zeros(3, 7, 4, 16)}, ValueError, "k has batch 3, must be q's 2"),
    ({"v": zeros(3, 7, 4, 24)}, ValueError, "v has batch 3, must be q's 2"),
    ({"v": zeros(2, 6, 4, 24)}, ValueError, "v has length 6, must be k's 7"),
    ({"v": zeros(2, 7, 8, 24)}, ValueError, "v has 8 heads, must be k's 4"),
    ({"k": zeros(2, 7, 4, 8)}, ValueError, "k has head_dim 8, must be q's 16"),
    (
        {"k": zeros(2, 7, 6, 16), "v": zeros(2, 7, 6, 24)},
        ValueError,
        "k has 6 heads, which must divide q's 8",
    ),
    (
        {"k": zeros(2, 4, 7, 16), "v": zeros(2, 4, 7, 16)},
        ValueError,
        f"k has 7 heads, which must divide q's 8; {SWAPPED}",
    ),
    (
        {"q": zeros(2, 8, 1, 16), "k": zeros(2, 8, 7, 16), "v": zeros(2, 8, 7, 16)},
        ValueError,
        f"k has 7 heads, which must divide q's 1; {SWAPPED}",
    ),
    (
        {"k": zeros(2, 7, 0, 16), "v": zeros(2, 7, 0, 24)},
        ValueError,
        "k has 0 heads, which must divide q's 8",
    ),
    (
        {"q": zeros(2, 5, 8, 513), "k": zeros(2, 7, 4, 513)},
        ValueError,
        "q has head_dim 513, must be from 1 to 512",
    ),
    ({"v": zeros(2, 7, 4, 0)}, ValueError, "v has head_dim 0, must be from 1 to 512"),
    # Dtypes
    (
        {"q": zeros(2, 5, 8, 16, dtype=np.int32)},
        TypeError,
        f"q has dtype int32, must be one of {DTYPES}",
    ),
    (
        {"k": zeros(2, 7, 4, 16, dtype=np.float16)},
        TypeError,
        "k has dtype float16, must be q's float32",
    ),
    (
        {"v": zeros(2, 7, 4, 24, dtype=np.float64)},
        TypeError,
        "v has dtype float64, must be q's float32",
    ),
    # Numbers
    ({"scale": "1"}, TypeError, "scale must be a number, got str"),
    ({"scale": [1.0]}, TypeError, "scale must be a number, got list"),
    ({"scale": 1j}, TypeError, "scale must be a number, got complex"),
    ({"scale": True}, TypeError, "scale must be a number, got bool"),
    ({"scale": float("nan")}, ValueError, "scale is nan, must be finite"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0, must be positive, or 0 or None for no cap"),
    ({"softcap": zeros(1)}, TypeError, "softcap must be a number, got ndarray"),
    ({"softcap": float("inf")}, ValueError, "softcap is inf, must be finite"),
    ({"dropout": 1.0}, ValueError, "dropout is 1.0, must be at least 0 and less than 1"),
    ({"dropout": -0.1}, ValueError, "dropout is -0.1, must be at least 0 and less than 1"),
    ({"dropout": "0"}, TypeError, "dropout must be a number, got str"),
    ({"seed": None}, TypeError, "seed must be an integer, got None"),
    ({"seed": 2**64}, ValueError, "seed is 18446744073709551616, must be from 0 to 2**64 - 1"),
    # Window
    (
        {"window": 3},
        ValueError,
        "window is 3, must be a tuple (left, right) or None; (3, 0) sees the query's own key and 3 "
        "before it",
    ),
    ({"window": "all"}, ValueError, "window is 'all', must be a tuple (left, right) or None"),
    (
        {"window": (1, 2, 3)},
        ValueError,
        "window is (1, 2, 3), must be a tuple (left, right) or None",
    ),
    (
        {"window": (-1, 0)},
        ValueError,
        "window is (-1, 0), which leaves no key to any query; None, and not -1, stands for no "
        "limit",
    ),
    (
        {"window": (None, 0.5)},
        ValueError,
        "window is (None, 0.5); each side must be an integer, or None for no limit",
    ),
    # Bias and mask
    (
        {"bias": zeros(5, 8)},
        ValueError,
        f"bias has shape (5, 8), which must broadcast to {SCORES}",
    ),
    (
        {"bias": zeros(1, 2, 8, 5, 7)},
        ValueError,
        f"bias has shape (1, 2, 8, 5, 7), which must broadcast to {SCORES}",
    ),
    (
        {"bias": zeros(5, 7, dtype=np.int64)},
        TypeError,
        "bias has dtype int64, must be one of float16, bfloat16, float32, float64",
    ),
    (
        {"bias": zeros(5, 7, dtype=bool)},
        TypeError,
        "bias has dtype bool, must be one of float16, bfloat16, float32, float64"
        "; what keeps or removes scores is mask",
    ),
    (
        {"mask": zeros(3, 1, 5, 7, dtype=bool)},
        ValueError,
        f"mask has shape (3, 1, 5, 7), which must broadcast to {SCORES}",
    ),
    (
        {"mask": zeros(2, 7, dtype=bool)},
        ValueError,
        f"mask has shape (2, 7), which must broadcast to {SCORES}; key_mask is (batch, seqlen_k)",
    ),
    (
        {"mask": zeros(5, 7)},
        TypeError,
        "mask has dtype float32, must be bool (True keeps); what is added to scores is bias",
    ),
    (
        {"mask": zeros(5, 7, dtype=np.int64)},
        TypeError,
        "mask has dtype int64, must be bool (True keeps)",
    ),
    # One number a head
    (
        {"alibi_slopes": zeros(4)},
        ValueError,
        "alibi_slopes has shape (4,), must be (8,) or (2, 8)",
    ),
    (
        {"alibi_slopes": zeros(8, dtype=np.int32)},
        TypeError,
        "alibi_slopes has dtype int32, must be one of float16, bfloat16, float32, float64",
    ),
    ({"sinks": zeros(2, 8)}, ValueError, "sinks has shape (2, 8), must be (8,)"),
    (
        {"sinks": zeros(8, dtype=bool)},
        TypeError,
        "sinks has dtype bool, must be one of float16, bfloat16, float32, float64",
    ),
    # Out
    (
        {"out": zeros(2, 5, 8, 16)},
        ValueError,
        "out has shape (2, 5, 8, 16), must be (2, 5, 8, 24)",
    ),
    (
        {"out": zeros(2, 5, 8, 24, dtype=np.float64)},
        TypeError,
        "out has dtype float64, must be float32",
    ),
    (
        {"out": read_only(zeros(2, 5, 8, 24))},
        ValueError,
        "out is read-only, must be writable",
    ),
]

VARLEN = {
    "q": zeros(9, 8, 16),
    "k": zeros(12, 4, 16),
    "v": zeros(12, 4, 24),
    "cu_seqlens_q": np.int32([0, 4, 9]),
    "cu_seqlens_k": np.int32([0, 12, 12]),
}
CUMULATED = "it is a 0 and numpy.cumsum(lengths)"
RISE = "must start at 0, never fall, and end at"

VARLEN_CASES = [
    (
        {"q": zeros(1, 9, 8, 16)},
        ValueError,
        "q has shape (1, 9, 8, 16), must be (total, heads, head_dim)",
    ),
    (
        {"cu_seqlens_q": None},
        TypeError,
        "cu_seqlens_q must be a NumPy or CuPy array, got None",
    ),
    ({"cu_seqlens_q": [0, 4, 9]}, TypeError, f"cu_seqlens_q {ARRAY} list; {MADE}"),
    (
        {"cu_seqlens_q": np.float32([0, 4, 9])},
        TypeError,
        "cu_seqlens_q has dtype float32, must be int32 or int64",
    ),
    (
        {"cu_seqlens_k": np.int32([[0, 12, 12]])},
        ValueError,
        "cu_seqlens_k has shape (1, 3), must be (sequences + 1,)",
    ),
    (
        {"cu_seqlens_q": np.int32([])},
        ValueError,
        "cu_seqlens_q has shape (0,), must be (sequences + 1,)",
    ),
    (
        {"cu_seqlens_k": np.int32([0, 12])},
        ValueError,
        "cu_seqlens_k has shape (2,), must be cu_seqlens_q's (3,)",
    ),
    (
        {"cu_seqlens_q": np.int32([1, 4, 9])},
        ValueError,
        f"cu_seqlens_q is [1 4 9], {RISE} 9 at most; {CUMULATED}",
    ),
    (
        {"cu_seqlens_q": np.int32([0, 4, 10])},
        ValueError,
        f"cu_seqlens_q is [ 0  4 10], {RISE} 9 at most",
    ),
    (
        {"cu_seqlens_k": np.int32([0, 12, 5])},
        ValueError,
        f"cu_seqlens_k is [ 0 12  5], {RISE} 12 at most",
    ),
    (
        {"alibi_slopes": zeros(3, 8)},
        ValueError,
        "alibi_slopes has shape (3, 8), must be (8,) or (2, 8)",
    ),
    ({"out": zeros(9, 8, 16)}, ValueError, "out has shape (9, 8, 16), must be (9, 8, 24)"),
    # 2**32 + 16 is 16 in the lower half of its bits.
    (
        {"cu_seqlens_q": np.int64([0, 4, 2**32 + 9])},
        ValueError,
        f"cu_seqlens_q is {np.int64([0, 4, 2**32 + 9])}, {RISE} 9 at most",
    ),
    (
        {"cu_seqlens_k": np.int64([0, -(2**32), 12])},
        ValueError,
        f"cu_seqlens_k is {np.int64([0, -(2**32), 12])}, {RISE} 12 at most",
    ),
    ({"causal": "no"}, TypeError, "causal must be True or False, got 'no'"),
]

DECODE = {
    "q": zeros(2, 8, 16),
    "k_cache": zeros(2, 7, 4, 16),
    "v_cache": zeros(2, 7, 4, 24),
    "seq_lens": np.int32([7, 3]),
}

DECODE_CASES = [
    *(
        ({name: None}, TypeError, f"{name} must be a NumPy or CuPy array, got None")
        for name in DECODE
    ),
    ({"seq_lens": np.int32([7])}, ValueError, "seq_lens has shape (1,), must be (2,)"),
    (
        {"seq_lens": np.float32([7, 3])},
        TypeError,
        "seq_lens has dtype float32, must be int32 or int64",
    ),
    ({"sinks": zeros(2, 8)}, ValueError, "sinks has shape (2, 8), must be (8,)"),
    *(
        (
            {"seq_lens": np.int64([7, length])},
            ValueError,
            f"seq_lens has {length}, must be from -2147483648 to 2147483647",
        )
        for length in (2**31, 2**32 + 3, -(2**31) - 1)
    ),
    ({"causal": "no"}, TypeError, "causal must be True or False, got 'no'"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
    ({"num_splits": True}, TypeError, 'num_splits must be an integer or "fixed", got bool'),
    (
        {"num_splits": 0},
        ValueError,
        "num_splits is 0, must be from 1 to 1024, or None for the default",
    ),
    (
        {"k_cache": zeros(2, 7, 4, 16, dtype=np.int8)},
        TypeError,
        "k_cache has dtype int8, must be q's float32; codes of 8 or 4 bits come in a "
        "QuantizedArray",
    ),
]

PAGED = {
    "q": zeros(5, 8, 16),
    "k_pages": zeros(6, 4, 4, 16),
    "v_pages": zeros(6, 4, 4, 24),
    "page_table": np.int32([[5, 0, 1], [5, 2, 9]]),  # page 9 is not used
    "seq_lens": np.int32([12, 7]),
    "cu_seqlens_q": np.int32([0, 3, 5]),
}

PAGED_CASES = [
    *(
        ({"cu_seqlens_q": cu}, ValueError, f"cu_seqlens_q is {cu}, {RISE} 5 at most")
        for cu in np.int32([[0, 3, 6], [0, 4, 3]])
    ),
    (
        {"cu_seqlens_q": np.int32([2, 3, 5])},
        ValueError,
        f"cu_seqlens_q is [2 3 5], {RISE} 5 at most; {CUMULATED}",
    ),
    (
        {"cu_seqlens_q": None},
        ValueError,
        "q has batch 5, must be page_table's 2; queries end to end have cu_seqlens_q",
    ),
    (
        {"k_pages": cuattn.PagedKVCache(1, 4, 4, 16, dtype=np.float32)},
        TypeError,
        f"k_pages {ARRAY} cuattn.kvcache.cache.PagedKVCache; its arrays are pages(layer)",
    ),
    (
        {"cu_seqlens_q": np.int64([0, 3, 2**32 + 5])},
        ValueError,
        f"cu_seqlens_q is {np.int64([0, 3, 2**32 + 5])}, {RISE} 5 at most",
    ),
    (
        {
            "k_pages": zeros(1, 256, *PAGED["k_pages"].shape[2:]),
            "v_pages": zeros(1, 256, *PAGED["v_pages"].shape[2:]),
            "page_table": np.zeros((2, 1 << 22), np.int32),
        },
        ValueError,
        "page_table has room for 1073741824 keys of a sequence, must be 1073741823 at most",
    ),
    (
        {"seq_lens": np.int64([12, 2**31])},
        ValueError,
        "seq_lens has 2147483648, must be from -2147483648 to 2147483647",
    ),
    (
        {"seq_lens": np.int32([12, 9])},
        IndexError,
        "page_table has 9 for sequence 1, must be from 0 to 5",
    ),
    (
        {"page_table": np.int64([[5, 0, 1], [2**32, 2, 0]])},
        IndexError,
        "page_table has 4294967296 for sequence 1, must be from 0 to 5",
    ),
    (
        {"page_table": np.int64([[5, 0, -1], [5, 2, 0]])},
        IndexError,
        "page_table has -1 for sequence 0, must be from 0 to 5",
    ),
    (
        {"prefix": 8},
        ValueError,
        "prefix is 8, and page_table has [5 2] there for sequence 1, must have the first "
        "sequence's [5 0]",
    ),
    (
        {"prefix": 4, "seq_lens": np.int32([12, 5])},
        ValueError,
        "prefix is 4, and sequence 1 has 3 keys before its queries, must have at least as many",
    ),
    (
        {"prefix": (zeros(3, 4, 16), zeros(3, 4, 24)), "seq_lens": np.int32([12, 0])},
        ValueError,
        "prefix is a pair (k, v), and seq_lens has 0 for sequence 1, must be its number of "
        "queries, 2, at least",
    ),
    ({"prefix": True}, TypeError, "prefix must be an integer or a pair (k, v), got bool"),
    ({"causal": 0}, TypeError, "causal must be True or False, got 0"),
]

SDPA = {"query": zeros(2, 8, 5, 16), "key": zeros(2, 8, 7, 16), "value": zeros(2, 8, 7, 24)}

SDPA_CASES = [
    ({"is_causal": "no"}, TypeError, "is_causal must be True or False, got 'no'"),
    ({"enable_gqa": 1}, TypeError, "enable_gqa must be True or False, got 1"),
    ({"query": 1.0}, TypeError, f"query {ARRAY} float"),
    ({"query": zeros(16)}, ValueError, "query has shape (16,), must be (..., heads, L, E)"),
    (
        {"key": zeros(3, 8, 7, 16)},
        ValueError,
        "key has shape (3, 8, 7, 16), whose leading axes must be those of query (2, 8, 5, 16)",
    ),
    (
        {"value": zeros(8, 7, 24)},
        ValueError,
        "value has shape (8, 7, 24), whose leading axes must be those of query (2, 8, 5, 16)",
    ),
    (
        {"key": zeros(2, 4, 7, 16), "value": zeros(2, 4, 7, 24)},
        ValueError,
        "key has 4 heads, must be query's 8 (or divide them, with enable_gqa=True)",
    ),
    (
        {"key": zeros(2, 3, 7, 16), "value": zeros(2, 3, 7, 24), "enable_gqa": True},
        ValueError,
        "key has 3 heads, which must divide query's 8",
    ),
    (
        {"query": zeros(2, 5, 8, 16), "key": zeros(2, 7, 8, 16), "value": zeros(2, 7, 8, 16)},
        ValueError,
        "key has 7 heads, must be query's 5 (or divide them, with enable_gqa=True); heads come "
        "before the length, as in torch",
    ),
    ({"key": zeros(2, 8, 7, 8)}, ValueError, "key has head_dim 8, must be query's 16"),
    ({"value": zeros(2, 8, 6, 24)}, ValueError, "value has length 6, must be key's 7"),
    (
        {"key": zeros(2, 8, 7, 16, dtype=np.float64)},
        TypeError,
        "key has dtype float64, must be query's float32",
    ),
    (
        {"attn_mask": zeros(5, 8)},
        ValueError,
        "attn_mask has shape (5, 8), which must broadcast to (2, 8, 5, 7)",
    ),
    (
        {"attn_mask": zeros(5, 7, dtype=np.int64)},
        TypeError,
        "attn_mask has dtype int64, must be bool (True keeps) or a floating dtype",
    ),
    (
        {"attn_mask": zeros(5, 7), "is_causal": True},
        ValueError,
        "attn_mask must be None where is_causal=True, got an array",
    ),
    ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5, must be at least 0 and less than 1"),
    ({"seed": -1}, ValueError, "seed is -1, must be from 0 to 2**64 - 1"),
]


def cases(function: str, right: dict[str, Any], different: list) -> list:
    return [
        pytest.param(function, right | options, error, words, id=f"{function}: {words}")
        for options, error, words in different
    ]


@pytest.mark.parametrize(
    ("function", "arguments", "error", "words"),
    [
        *cases("flash_attention", FLASH_ATTENTION, FLASH_ATTENTION_CASES),
        *cases("flash_attention_varlen", VARLEN, VARLEN_CASES),
        *cases("flash_decode", DECODE, DECODE_CASES),
        *cases("paged_attention", PAGED, PAGED_CASES),
        *cases("scaled_dot_product_attention", SDPA, SDPA_CASES),
    ],
)
def test_message(function, arguments, error, words):
    with pytest.raises(error, match="^" + re.escape(f"{function}: {words}") + "$"):
        getattr(cuattn, function)(**arguments)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("flash_attention", FLASH_ATTENTION),
        ("flash_attention_varlen", VARLEN),
        ("flash_decode", DECODE),
        ("paged_attention", PAGED),
        ("scaled_dot_product_attention", SDPA),
    ],
)
def test_the_call_itself_is_right(function, arguments):
    getattr(cuattn, function)(**arguments)


def test_a_right_call_before_does_not_make_a_wrong_one_right():
    for right, wrong in (({"scale": 1}, {"scale": True}), ({"dropout": 0}, {"dropout": False})):
        cuattn.flash_attention(**FLASH_ATTENTION, **right)
        with pytest.raises(TypeError, match="must be a number, got bool"):
            cuattn.flash_attention(**FLASH_ATTENTION, **wrong)


def test_no_result_is_written_where_an_argument_is_wrong():
    out = np.full((2, 5, 8, 24), 7, np.float32)
    with pytest.raises(ValueError, match="sinks"):
        cuattn.flash_attention(**FLASH_ATTENTION, out=out, sinks=zeros(3))
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("function", "right", "different"),
    [
        ("flash_attention_varlen", VARLEN, VARLEN_CASES),
        ("flash_decode", DECODE, DECODE_CASES),
        ("paged_attention", PAGED, PAGED_CASES),
    ],
)
def test_nothing_is_written_where_anything_is_wrong(function, right, different):
    q, v = right["q"], right.get("v", right.get("v_cache", right.get("v_pages")))
    for options, error, _ in different:
        out = np.full((*q.shape[:-1], v.shape[-1]), 7, np.float32)
        with pytest.raises(error):
            getattr(cuattn, function)(**{**right, "out": out, **options})
        assert (out == 7).all()


@pytest.mark.parametrize(
    ("function", "right"),
    [
        ("flash_attention", FLASH_ATTENTION),
        ("flash_attention_varlen", VARLEN),
        ("flash_decode", DECODE),
        ("paged_attention", PAGED),
        ("scaled_dot_product_attention", SDPA),
    ],
)
def test_masked_arrays_are_refused(function, right):
    for name in right:
        masked = np.ma.masked_array(right[name], mask=True)
        with pytest.raises(TypeError, match=rf"^{function}: {name} is a masked array, whose mask"):
            getattr(cuattn, function)(**{**right, name: masked})


def test_masked_arrays_are_refused_in_parts():
    outs, lses = zeros(2, 1, 3, 4, 8), zeros(2, 1, 4, 3)
    for given in ((np.ma.array(outs), lses), (outs, np.ma.array(lses))):
        with pytest.raises(TypeError, match=r"merge_attention: (outs|lses)\[0\] is a masked array"):
            cuattn.merge_attention(*given)


def test_int64_lengths_that_fit_are_right():
    for function, right in (("paged_attention", PAGED), ("flash_attention_varlen", VARLEN)):
        wide = {
            name: array.astype(np.int64) if array.dtype == np.int32 else array
            for name, array in right.items()
        }
        call = getattr(cuattn, function)
        assert np.array_equal(call(**wide), call(**right))
    # What is not used may be anything.
    table = np.int64([[5, 0, 1], [5, 2, 2**40]])
    assert cuattn.paged_attention(**{**PAGED, "page_table": table}).shape == (5, 8, 24)
