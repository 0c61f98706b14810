"""Which calls over codes have numbers made of them first: pure functions of a call's shapes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.dispatch import codes_sm90
from cuattn.gpu.dispatch.quantization import FORMAT_PAIRS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.mark.parametrize(
    ("change", "sequences"),
    [
        ({}, 4),
        ({"tokens": 17}, 4),  # 68 rows of a key head
        ({"tokens": 16}, 0),  # 64
        ({"tokens": 1, "elementwise": True}, 4),
        ({"formats": ("int4", "float8_e5m2")}, 4),
        ({"formats": ("int8", "")}, 0),
        ({"formats": ("", "")}, 0),
        ({"likes": (FLOAT32, FLOAT32)}, 4),
        ({"dtype": FLOAT16, "likes": (FLOAT16, FLOAT16)}, 4),
        ({"dtype": FLOAT16, "likes": (FLOAT16, FLOAT32)}, 0),
        ({"dtype": FLOAT32, "likes": (FLOAT32, FLOAT32)}, 0),
        ({"arch": "sm_80"}, 4),
        ({"arch": "sm_75"}, 0),
        ({"dim": 256}, 4),
        ({"dim": 264}, 0),
        ({"dim": 60}, 0),
        ({"capacity": 1 << 17}, 2),  # half a GiB each
        ({"capacity": 1 << 19}, 0),
        ({"ragged": True}, 4),
        ({"ragged": True, "capacity": 1 << 17}, 0),
        ({"capacity": 0}, 0),
    ],
)
def test_codes_of_prompts_are_expanded(change, sequences):
    call = {"tokens": 100, "capacity": 4096, "dim": 128, "formats": ("int8", "int8")}
    call |= {"dtype": BFLOAT16, "likes": (BFLOAT16, BFLOAT16), "arch": "sm_90a"}
    call |= {"elementwise": False, "ragged": False} | change
    batch, ragged = 4, call["ragged"]
    lead = () if ragged else (batch,)
    rows = (batch * call["tokens"],) if ragged else (batch, call["tokens"])
    cache = (*lead, call["capacity"], 8, call["dim"])
    spec = attention_spec(
        "paged_attention",
        (*rows, 32, call["dim"]),
        *(cache, cache),
        *[call["dtype"]] * 3,
        causal=True,
        sequences=batch if ragged else None,
        keys="paged",
        page_size=16,
        formats=call["formats"],
    )
    expanded = dispatch.sequences_to_expand(
        spec, call["likes"], call["arch"], elementwise=call["elementwise"]
    )
    assert expanded == sequences


def test_numbers_of_ragged_prompts_are_a_cache_of_each_sequence():
    """Which is how the calls that were over pages go on."""
    cache = (1024, 8, 128)
    spec = attention_spec(
        "paged_attention",
        (400, 32, 128),
        *(cache, cache),
        *[BFLOAT16] * 3,
        causal=True,
        sequences=4,
        keys="cached",
    )
    launch = dispatch.choose(dispatch.Call.contiguous(spec, "sm_90a"))
    names = {launch.variant.entry, launch.beside and launch.beside.variant.entry}
    assert "forward_sm90" in names
    assert dispatch.choose(dispatch.Call.contiguous(spec, "sm_80")).variant.entry == "forward_sm80"


INT8, E4M3, INT4, K8V4 = FORMAT_PAIRS


def _over_codes(formats, heads, batch, tokens, keys, total=None):
    """A call of so many tokens a sequence, or of `total` ragged ones, over pages of codes."""
    lead, rows = ((batch,), (batch, tokens)) if total is None else ((), (total,))
    cache = (*lead, keys, heads[1], 128)
    return attention_spec(
        "paged_attention",
        (*rows, heads[0], 128),
        *(cache, cache),
        *[BFLOAT16] * 3,
        causal=True,
        sequences=None if total is None else batch,
        keys="paged",
        page_size=16,
        formats=formats,
    )


@pytest.mark.parametrize(
    ("formats", "heads", "batch", "tokens", "keys", "team"),
    [
        (INT8, (32, 32), 4, 128, 8192, 1),  # a tile of each key head, in one wave
        (INT4, (32, 32), 4, 128, 8192, 1),
        (INT8, (32, 8), 16, 32, 8192, 1),  # of four query heads
        (INT8, (32, 8), 16, 17, 8192, 1),
        (INT8, (32, 8), 16, 16, 8192, 1),  # by decoding 311 us, 162
        (INT8, (32, 8), 16, 12, 8192, 1),  # 226, 155
        (INT8, (32, 8), 16, 8, 8192, 0),  # 152, 151
        (K8V4, (32, 8), 16, 16, 8192, 1),  # 236, 188
        (K8V4, (32, 8), 16, 12, 8192, 0),  # 169, 175
        (INT4, (32, 8), 16, 16, 8192, 1),  # 199, 165
        (INT4, (32, 8), 16, 12, 8192, 0),  # 152, 165
        (INT4, (32, 8), 16, 64, 8192, 1),  # two tiles: by numbers 401, 358
        (INT4, (32, 32), 2, 256, 8192, 1),  # 209, 182
        (K8V4, (32, 32), 2, 256, 8192, 1),
        (INT8, (32, 32), 8, 48, 8192, 1),  # 410, 300
        (INT8, (32, 8), 5, 16, 8192, 0),  # 40 tiles: 88, 151
        (INT8, (32, 8), 1, 16, 32768, 0),  # 8 tiles: 86, 545
        (INT8, (32, 32), 4, 384, 8192, 3),  # by numbers 492 us, by teams 398
        (E4M3, (32, 32), 4, 384, 8192, 3),  # 530, 405
        (INT8, (32, 32), 1, 384, 32768, 4),  # 611, 451; 465 by teams of 3
        (INT8, (32, 32), 1, 512, 8192, 4),  # 163, 131
        (E4M3, (32, 32), 1, 512, 8192, 4),
        (K8V4, (32, 32), 1, 512, 8192, 4),
        (INT4, (32, 32), 1, 512, 8192, 4),
        (INT8, (32, 32), 4, 512, 8192, 4),  # 683, 538
        (INT4, (32, 32), 4, 512, 8192, 4),
        (INT8, (32, 32), 1, 512, 2048, 4),  # 49, 42
        (INT8, (32, 32), 1, 1024, 8192, 8),  # 280, 241
        (INT8, (32, 32), 1, 2048, 8192, 8),  # 475, 461
        (INT8, (16, 16), 1, 1024, 16384, 8),  # 277, 243
        (INT8, (32, 8), 1, 512, 8192, 8),  # 131, 124
        (INT8, (32, 8), 4, 512, 8192, 8),  # 514, 485
        (INT8, (32, 8), 4, 256, 8192, 8),  # 265, 225
        (INT8, (32, 8), 1, 2048, 8192, 0),  # 399, 433
        (INT8, (32, 32), 1, 640, 8192, 0),  # 204, 240
        (INT8, (64, 16), 1, 768, 8192, 0),  # 329, 361
        (INT8, (16, 16), 1, 512, 8192, 0),  # 64 tiles in all
        (INT8, (8, 8), 1, 512, 8192, 0),  # 32 tiles
        (INT8, (8, 1), 32, 16, 8192, 0),  # again
        (INT8, (130, 2), 16, 128, 8192, 0),  # more heads than a warpgroup has rows
        (("int4", "int8"), (32, 32), 4, 128, 8192, 0),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_how_many_thread_blocks_expand_codes_together(
    formats, heads, batch, tokens, keys, team, ragged
):
    """0 where codes become numbers first, or are decoded over."""
    spec = _over_codes(formats, heads, batch, tokens, keys, batch * tokens if ragged else None)
    expands = codes_sm90.expands_each_tile(spec, 132)
    # Of ragged rows more tiles are counted than of batched ones.
    if not ragged or (64 < tokens * heads[0] // heads[1] <= 128 and tokens < 128):
        assert expands == (team > 0)
        assert not expands or codes_sm90.team_of(spec, 132) == team
    else:
        assert expands <= (team > 0)


def test_teams_have_no_more_thread_blocks_than_run():
    spec = _over_codes(INT8, (32, 32), 1, 1024, 8192)
    assert [codes_sm90.team_of(spec, n) for n in (2, 3, 132)] == [1, 3, 8]


@pytest.mark.parametrize(
    ("formats", "batch", "total"),
    [(INT4, 24, 490), (INT4, 16, 416), (K8V4, 24, 490)],  # 551 us and 314, 340 and 169, 582 and 322
)
def test_codes_of_short_ragged_prompts_are_expanded_for_each_tile(formats, batch, total):
    spec = _over_codes(formats, (32, 8), batch, 0, 8192, total)
    assert codes_sm90.expands_each_tile(spec, 132)


@pytest.mark.parametrize(
    ("call", "tokens", "entry"),
    [
        (("bfloat16", 4, ("int8", "int8")), 8, "write_codes"),
        (("bfloat16", 4, ("int8", "int8")), 7, "write_quantized"),  # fewer than a warp has
        (("bfloat16", 4, ("int8", "int8")), 0, "write_quantized"),  # groups, an offset, ...
        (("float16", 2, ("int8", "int4")), 16, "write_codes"),
        (("float16", 2, ("int8", "int4")), 15, "write_quantized"),
        (("bfloat16", 8, ("int8", "int8")), 100, "write_quantized"),  # 256 features
        (("float32", 4, ("int8", "int8")), 100, "write_quantized"),
        (("bfloat16", 4, ("int4", "int8")), 100, "write_quantized"),
        (("bfloat16", 4, ("", "")), 100, "write_quantized"),
    ],
)
def test_writers_of_codes(call, tokens, entry):
    assert dispatch.quantized_cache_write(*call, tokens=tokens).entry == entry


@pytest.mark.parametrize(
    ("tokens", "heads", "grid", "with_rope"),
    [
        (32768, 8, (1024, 2), (1024, 1)),
        (12289, 8, (385, 2), (385, 1)),
        (12256, 8, (383, 2), (383, 2)),
        (8192, 8, (256, 2), (256, 2)),
        (4096, 8, (128, 4), (128, 4)),
        (64, 8, (2, 8), (2, 8)),
        (32768, 12, (1024, 3), (1024, 3)),
        (32768, 4, (1024, 1), (1024, 1)),
        (8192, 16, (256, 4), (256, 2)),
        (8192, 6, (256, 2), (256, 2)),
        (8192, 7, (256, 7), (256, 7)),
        (33, 1024, (2, 256), (2, 256)),
    ],
)
def test_warps_have_fewer_heads_in_turn_where_tokens_are_few(tokens, heads, grid, with_rope):
    variant = dispatch.quantized_cache_write("bfloat16", 4, INT8, tokens=tokens)
    assert variant.config.grid(tokens, heads, rotary=False) == grid
    assert variant.config.grid(tokens, heads, rotary=True) == with_rope


@pytest.mark.parametrize(("formats", "shares"), [(INT8, 2), (E4M3, 2), (K8V4, 2), (INT4, 1)])
def test_warps_have_more_short_rows_in_turn_of_int4_only(formats, shares):
    variant = dispatch.quantized_cache_write("bfloat16", 2, formats, tokens=32768)
    assert variant.config.grid(32768, 8, rotary=True) == (512, shares)
    assert variant.config.grid(32768, 8, rotary=False) == (512, 2)


@pytest.mark.parametrize(
    ("change", "in_blocks"),
    [
        ({}, True),
        ({"format": "int4", "symmetric": False}, True),
        ({"format": "int4"}, False),
        ({"tokens": 7}, False),
        ({"dim": 64, "tokens": 15}, False),
        ({"rotate": True}, False),
        ({"granularity": "group", "group_size": 32}, False),
        ({"offset": np.zeros((2, 128), np.float32)}, False),
        ({"dtype": FLOAT32}, False),
    ],
)
def test_quantize_by_neighbouring_tokens(change, in_blocks):
    call = {"tokens": 8, "dim": 128, "format": "int8", "dtype": BFLOAT16} | change
    shape = (3, call.pop("tokens"), 2, call.pop("dim"))
    x = np.zeros(shape, call.pop("dtype"))
    array = cuattn.quantize(x, call.pop("format"), **call)
    lanes = dispatch.row_lanes(x.dtype.name, shape[-1], array.group_size, aligned=True)
    variant = dispatch.quantize(x.dtype.name, lanes, array, is_static=False, tokens=shape[1])
    assert variant.config.in_blocks == in_blocks


def spec_of(tokens, keys, heads, batch=1):
    cache = (batch, keys, heads[1], 128)
    return attention_spec(
        "flash_decode",
        (batch, tokens, heads[0], 128),
        *(cache, cache),
        *[BFLOAT16] * 3,
        causal=True,
        keys="cached",
    )


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "rotates"),
    [
        (512, 8192, (32, 32), True),
        (1024, 8192, (32, 32), True),
        (2048, 8192, (32, 32), False),
        (512, 2048, (32, 32), False),
        (512, 8192, (32, 8), False),
        (128, 8192, (32, 8), True),
    ],
)
def test_queries_are_rotated_where_keys_are_many_more(tokens, keys, heads, rotates):
    assert dispatch.rotates_queries(spec_of(tokens, keys, heads)) == rotates
