"""Kernel arguments: every value of a call is in the field it belongs to. No GPU needed."""

from __future__ import annotations

import numpy as np

from cuattn._spec import attention_spec
from cuattn.gpu import params
from cuattn.gpu.arguments import cache_write_arguments, forward_arguments


def spec(**options):
    shapes = [(3, 20, 6, 40), (3, 30, 2, 40), (3, 30, 2, 24)]
    return attention_spec("flash_attention", *shapes, *[np.dtype(np.float16)] * 3, **options)


STRIDES = tuple((2 * n, 4 * n, 6 * n, 2) for n in (100, 200, 300, 400))  # bytes


def forward_params(spec, strides=STRIDES, bias=None, mask=None, alibi_slopes=None):
    """The fields of ForwardParams as they would be passed, with the addresses 1 to 11."""
    arguments = forward_arguments(spec, strides, bias, mask, alibi_slopes)
    return params.FORWARD_PARAMS.unpack(arguments.pack(addresses(params.FORWARD_PARAMS)))


def addresses(struct):
    """1, 2, … for the pointers that it has."""
    names = [name for name, field in struct.fields.items() if field.argument]
    return {name: address for address, name in enumerate(names, start=1)}


def test_forward_arguments():
    p = forward_params(spec(causal=True, window=(7, 9), scale=0.5, softcap=30.0))
    assert list(p.values())[:11] == list(range(1, 12))
    for n, name in zip((100, 200, 300, 400), ("q", "k", "v", "out"), strict=True):
        assert p[f"{name}_stride"] == (n, 2 * n, 3 * n)  # elements
    assert (p["scale"], p["softcap"]) == (0.5, 30.0)
    sizes = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")
    assert [p[name] for name in sizes] == [3, 20, 30, 6, 2, 40, 24]
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
    assert p["bias_stride"] == (0, 120, 0, 1)
    assert p["mask_stride"] == (600, 0, 30, 1)
    assert p["alibi_batch_stride"] == 6
    assert p["bias_is_float32"] == 1
    p = forward_params(spec(), bias=((30,), (2,), half), alibi_slopes=((6,), (4,), single))
    assert p["bias_stride"] == (0, 0, 0, 1)
    assert p["bias_is_float32"] == 0
    assert p["alibi_batch_stride"] == 0


def test_ragged_rows_have_no_batch_stride():
    shapes = [(50, 6, 40), (60, 2, 40), (60, 2, 40)]
    varlen = attention_spec(
        "flash_attention_varlen", *shapes, *[np.dtype(np.float16)] * 3, sequences=4
    )
    p = forward_params(varlen, tuple(strides[1:] for strides in STRIDES))
    assert p["q_stride"] == (0, 200, 300)
    assert (p["batch"], p["seqlen_q"], p["seqlen_k"]) == (4, 50, 60)


def test_cache_write_arguments():
    arguments = cache_write_arguments(
        (50, 3, 40, 24),
        ((480, 160, 4), (960, 320, 4), (8000, 500, 100, 4), (4800, 300, 60, 4)),
        (7, 11),
        itemsizes=(4,) * 4,
        page_slots=16,
        num_pages=90,
        uniform=5,
        vec_bytes=16,
        lanes_shift=6,
        pairs=12,
        interleaved=True,
        table_stride=11,
        max_position=13,
    )
    struct = params.CACHE_WRITE_PARAMS
    p = struct.unpack(arguments.pack(addresses(struct)))
    assert list(p.values())[:9] == list(range(1, 10))
    strides = {"k_token": 120, "k_head": 40, "v_token": 240, "v_head": 80, "table_stride": 11}
    strides |= {"k_page": (2000, 125, 25), "v_page": (1200, 75, 15)}
    sizes = {"total": 50, "batch": 7, "heads": 3, "head_dim": 40, "head_dim_v": 24}
    sizes |= {"page_shift": 4, "num_pages": 90, "capacity": 176, "uniform": 5}
    sizes |= {"lanes_shift": 6, "pairs": 12, "interleaved": 1}
    divisors = {"by_uniform": 5, "by_k_vecs": 10, "by_v_vecs": 6}
    divisors = {name: params.divisor(d) for name, d in divisors.items()}
    others = {"slots": 10, "left_padding": 11, "page_slots": 16, "max_position": 13}
    assert dict(list(p.items())[9:]) == strides | sizes | divisors | others
