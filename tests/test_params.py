"""Kernel arguments: Python and C++ agree on every byte, and every value is in the field it belongs
to. No GPU needed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._spec import attention_spec
from cuattn.gpu import compiler, dispatch, params

STRUCTS = {
    "ForwardParams": (params.FORWARD_PARAMS, "attention/forward_simt.cu"),
    "DecodeParams": (params.DECODE_PARAMS, "decoding/decode_simt.cu"),
    "MergeParams": (params.MERGE_PARAMS, "decoding/merge.cu"),
    "WriteParams": (params.CACHE_WRITE_PARAMS, "kvcache/write.cu"),
}


def assertions(struct: str, dtype: np.dtype, shift: int = 0) -> str:
    """C++ that compiles if `struct` has the size and the offsets of `dtype`, these moved by
    `shift`."""
    lines = [f'static_assert(sizeof({struct}) == {dtype.itemsize}, "size of {struct}");']
    for name, (_, offset, *_) in dtype.fields.items():
        # NVRTC has no offsetof without a header; this is what the header makes of it.
        member = f"__INTADDR__(&static_cast<{struct}*>(nullptr)->{name})"
        lines.append(f'static_assert({member} == {offset + shift}, "offset of {struct}::{name}");')
    return "\n" + "\n".join(lines)


@pytest.fixture
def compile_with(monkeypatch):
    """Compile a kernel file with more text after it."""
    full_source = compiler.full_source

    def compile_file(source: str, text: str) -> None:
        variant = next(v for v in dispatch.variants("sm_90a") if v.source == source)
        monkeypatch.setattr(compiler, "full_source", lambda v: full_source(v) + text)
        compiler.compile_variant(variant, "sm_90a")

    return compile_file


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA's compiler does not exist for macOS")
@pytest.mark.parametrize("struct", STRUCTS)
def test_same_bytes_in_cuda(struct, compile_with):
    dtype, source = STRUCTS[struct]
    compile_with(source, assertions(struct, dtype))
    with pytest.raises(compiler.CompileError, match=f"offset of {struct}::{dtype.names[0]}"):
        compile_with(source, assertions(struct, dtype, shift=8))


def spec(**options):
    shapes = [(3, 20, 6, 40), (3, 30, 2, 40), (3, 30, 2, 24)]
    return attention_spec("flash_attention", *shapes, *[np.dtype(np.float16)] * 3, **options)


STRIDES = tuple((2 * n, 4 * n, 6 * n, 2) for n in (100, 200, 300, 400))  # bytes


def forward_params(spec, strides=STRIDES, bias=None, mask=None, alibi_slopes=None):
    """One FORWARD_PARAMS as it would be passed, with the pointers 1 to 11."""
    data = params.forward_pointers(*range(1, 12))
    data += params.forward_shape(spec, strides, bias, mask, alibi_slopes)
    return np.frombuffer(data, params.FORWARD_PARAMS)[0]


def test_forward_shape():
    p = forward_params(spec(causal=True, window=(7, 9), scale=0.5, softcap=30.0))
    assert [int(p[name]) for name in params.FORWARD_PARAMS.names[:11]] == list(range(1, 12))
    for n, name in zip((100, 200, 300, 400), ("q", "k", "v", "out"), strict=True):
        assert p[f"{name}_stride"].tolist() == [n, 2 * n, 3 * n]  # elements
    assert (p["scale"], p["softcap"]) == (0.5, 30.0)
    sizes = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")
    assert [int(p[name]) for name in sizes] == [3, 20, 30, 6, 2, 40, 24]
    assert (p["window_left"], p["window_right"]) == (7, 0)  # causal is narrower than 9


def test_no_window_is_unbounded():
    p = forward_params(spec())
    assert p["window_left"] == p["window_right"] == params.UNBOUNDED
    p = forward_params(spec(window=(2**40, 0)))
    assert (p["window_left"], p["window_right"]) == (params.UNBOUNDED, 0)


def test_score_arrays_broadcast_by_strides_of_0():
    half, single, boolean = np.dtype(np.float16), np.dtype(np.float32), np.dtype(bool)
    p = forward_params(
        spec(),
        bias=((6, 1, 30), (480, 80, 4), single),
        mask=((3, 1, 20, 30), (600, 600, 30, 1), boolean),
        alibi_slopes=((3, 6), (24, 4), single),
    )
    assert p["bias_stride"].tolist() == [0, 120, 0, 1]
    assert p["mask_stride"].tolist() == [600, 0, 30, 1]
    assert p["alibi_batch_stride"] == 6
    assert p["bias_is_float32"] == 1
    p = forward_params(spec(), bias=((30,), (2,), half), alibi_slopes=((6,), (4,), single))
    assert p["bias_stride"].tolist() == [0, 0, 0, 1]
    assert p["bias_is_float32"] == 0
    assert p["alibi_batch_stride"] == 0


def test_varlen_has_no_batch_stride():
    shapes = [(50, 6, 40), (60, 2, 40), (60, 2, 40)]
    varlen = attention_spec(
        "flash_attention_varlen", *shapes, *[np.dtype(np.float16)] * 3, sequences=4
    )
    p = forward_params(varlen, tuple(strides[1:] for strides in STRIDES))
    assert p["q_stride"].tolist() == [0, 200, 300]
    assert (p["batch"], p["seqlen_q"], p["seqlen_k"]) == (4, 50, 60)


def test_cache_write_shape():
    data = params.cache_write_pointers(*range(1, 10))
    data += params.cache_write_shape(
        (50, 3, 40, 24),
        ((480, 160, 4), (960, 320, 4), (8000, 500, 100, 4), (4800, 300, 60, 4)),
        (7, 11),
        itemsize=4,
        page_size=16,
        uniform=5,
        vec_bytes=16,
        lanes_shift=6,
        pairs=12,
        interleaved=True,
    )
    p = np.frombuffer(data, params.CACHE_WRITE_PARAMS)[0]
    names = params.CACHE_WRITE_PARAMS.names
    assert [int(p[name]) for name in names[:9]] == list(range(1, 10))
    strides = {"k_token": 120, "k_head": 40, "v_token": 240, "v_head": 80, "table_stride": 11}
    strides |= {"k_page": [2000, 125, 25], "v_page": [1200, 75, 15]}
    sizes = {"total": 50, "batch": 7, "heads": 3, "head_dim": 40, "head_dim_v": 24}
    sizes |= {"page_shift": 4, "uniform": 5, "lanes_shift": 6, "pairs": 12, "interleaved": 1}
    divisors = {"by_uniform": 5, "by_k_vecs": 10, "by_v_vecs": 6}
    divisors = {name: list(params.divisor(d)) for name, d in divisors.items()}
    assert {name: p[name].tolist() for name in names[9:]} == strides | sizes | divisors


@given(d=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1))
def test_division_by_a_product_and_a_shift_is_exact(d, n):
    magic, shift = params.divisor(d)
    assert magic < 2**32
    assert n * magic < 2**64
    for dividend in (n, n // d * d, max(n // d * d - 1, 0), 2**31 - 1):
        assert dividend * magic >> shift == dividend // d
