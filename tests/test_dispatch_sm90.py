"""What Hopper's forward kernel and TMA are told: no GPU is asked."""

from __future__ import annotations

import collections
import dataclasses
import random
import sys

import ml_dtypes
import numpy as np
import pytest

from cuattn._spec import attention_spec
from cuattn.gpu import compiler, dispatch, structs, tensormap
from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch import Call, Layout, arguments_sm90, order_sm90, sm90
from cuattn.gpu.params import FORWARD_PARAMS, SM90_PARAMS
from cuattn.gpu.tensormap import TensorMap

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MAPS = tuple(
    f"{array}_map"
    for array in ("q", "k", "v", "bias", "mask", "k_pair", "v_pair", "q_rope", "k_rope")
)


def choose(*shapes, scores=None, **options):
    """The launch of contiguous arrays, of the shapes of q, k and v."""
    spec = attention_spec("flash_attention", *shapes, *[BFLOAT16] * 3, **options)
    launch = dispatch.choose(Call.contiguous(spec, "sm_90a", **(scores or {})))
    assert launch.variant.source == "attention/forward_sm90.cu"
    return launch


def test_maps_of_fixed_lengths():
    launch = choose((2, 300, 8, 128), (2, 500, 4, 128), (2, 500, 4, 64))
    maps, tile_n = launch.tensor_maps, launch.variant.config.tile_n
    assert maps["bias"] is maps["mask"] is None
    assert maps["q"] == TensorMap(BFLOAT16, (128, 300, 8, 2), (2048, 256, 614400), (64, 64, 1, 1))
    k = TensorMap(BFLOAT16, (128, 500, 4, 2), (1024, 256, 512000), (64, tile_n, 1, 1))
    assert maps["k"] == k
    v = TensorMap(BFLOAT16, (64, 500, 4, 2), (512, 128, 256000), (64, tile_n, 1, 1))
    assert maps["v"] == v
    assert launch.workspace_bytes == 0


@pytest.mark.parametrize("heads", [4, 8])
def test_maps_of_varlen_calls_end_where_sequences_do(heads):
    """The address of a coordinate, as tile/ragged.cuh gives it: within a sequence, and of
    its rows alone."""
    launch = choose((700, 8, 128), (900, heads, 128), (900, heads, 64), sequences=3)
    assert launch.workspace_bytes > 0
    assert launch.variant.config.pack_gqa == (heads == 4)
    far = arguments_sm90.FAR_ROWS
    for array in "qkv":
        m = launch.tensor_maps[array]
        if array == "q" and heads == 4:  # packed: heads come before rows
            assert m.box == (64, 2, 32, 1, 1)
            (columns, heads_q, rows, *shape), (head, row, *strides) = m.shape, m.strides
            m = TensorMap(m.dtype, (columns, rows, heads_q, *shape), (row, head, *strides), m.box)
        assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in m.strides)
        begin, length = 123, 456
        for row in (0, 1, length - 1, length, length + 63):
            coordinates = (0, far - length + row, 1, begin + length, far)
            inside = all(0 <= c < n for c, n in zip(coordinates, m.shape, strict=True))
            assert inside == (row < length)
            offset = sum(c * s for c, s in zip(coordinates[1:], m.strides, strict=True)) % 2**64
            if inside:
                assert offset == (begin + row) * m.strides[0] + m.strides[1]


def caches(rows, keys, *, page_size=16, head_dim=128, **options):
    """The launch of prompts over 3 caches of 1000 keys, or over 200 pages: ragged of 700 rows in
    all, or of 300 each."""
    q, batch = ((3, 300, 8, head_dim), (3,)) if rows == "batched" else ((700, 8, head_dim), ())
    spec = attention_spec(
        "paged_attention",
        q,
        *[(*batch, 1008, 2, head_dim)] * 2,
        *[BFLOAT16] * 3,
        keys=keys,
        page_size=page_size if keys == "paged" else 0,
        **{"sequences": 3} if rows == "ragged" else {},
        **{"causal": True, **options},
    )
    call = Call.contiguous(spec, "sm_90a", num_pages=200, table_stride=70)
    return dispatch.choose(call, (sm90.Sm90Forward(),))


def test_pages_whose_heads_have_no_common_stride_have_no_key_groups():
    spec = attention_spec(
        "paged_attention",
        (1, 300, 8, 128),
        *[(1, 1024, 2, 128)] * 2,
        *[BFLOAT16] * 3,
        keys="paged",
        page_size=16,
        causal=True,
    )
    call = Call.contiguous(spec, "sm_90a", num_pages=200, table_stride=64)
    k = call.strides.k
    heads_first = (2 * 4096, 256, 4096, 2)  # (page, head, slot, column)
    for layout, groups in (
        ((k, k), True),
        ((heads_first, heads_first), True),
        (((2 * k[0], *k[1:]), (2 * k[0], *k[1:])), True),  # keys and values in one array
        ((k, heads_first), False),
        (((k[0], k[1], 384, k[3]), k), False),
        (((k[2], k[1], k[0], k[3]),) * 2, False),
    ):
        strides = call.strides._replace(k=layout[0], v=layout[1])
        launch = sm90.Sm90Forward().serves(dataclasses.replace(call, strides=strides))
        assert launch.variant.config.key_groups == groups, layout


@pytest.mark.parametrize("rows", ["batched", "ragged"])
@pytest.mark.parametrize("page_size", [None, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_keys_of_caches_are_found_in_their_pages(rows, page_size, head_dim):
    """As page_of_lane and load_pages of attention/produce_sm90.cuh find them."""
    launch = caches(
        rows,
        "cached" if page_size is None else "paged",
        page_size=page_size or 0,
        head_dim=head_dim,
    )
    config, keys = launch.variant.config, launch.tensor_maps["k"]
    assert (config.paged_kv, config.seq_lens, config.varlen) == (True, True, rows == "ragged")
    assert launch.workspace_bytes > 0
    packed = launch.arguments[1].pack(collections.defaultdict(int, dict.fromkeys(MAPS, b"")))
    fields = SM90_PARAMS.unpack(packed)
    assert fields["table_stride"] == 70
    assert fields["section"] >= 1
    slots = page_size or 1008
    box = keys.box[1]
    if config.key_groups:  # as for pages at head_dim 128
        assert (head_dim, page_size) == (128, slots)
        assert fields["page_heads"] == 2 * slots  # heads of 128 elements follow each other
        assert keys.shape == (64, 8, 2, slots // 8, 199 * 2 * slots + 2)
        assert keys.strides == (512, 128, 8 * 512, 256)
        box *= keys.box[3]
        assert keys.box == (64, 8, 2, box // 8, 1)
    else:
        assert head_dim != 128 or page_size is None
        assert keys.shape == (head_dim, slots, 2, 200 if page_size else 3)
        assert keys.box == (64, box, 1, 1)
    boxes = [lane << fields["box_shift"] for lane in range(32)]
    assert boxes[-1] >= config.tile_n  # 32 lanes are enough
    for block in (0, 3):
        covered = []
        for key in (block * config.tile_n + first for first in boxes if first < config.tile_n):
            page, slot = key >> fields["page_shift"], key & (1 << fields["page_shift"]) - 1
            assert page == (key // page_size if page_size else 0)
            assert page_size is None or slot + box <= page_size
            assert key == page * slots + slot
            covered += range(key, key + box)
        assert covered == list(range(block * config.tile_n, (block + 1) * config.tile_n))
    pairs = page_size is not None and page_size >= 2 * box and config.tile_n // box % 2 == 1
    assert fields["pairs_of_boxes"] == pairs
    if pairs:
        pair = launch.tensor_maps["k_pair"]
        twice = (64, 8, 2, box // 4, 1) if config.key_groups else (64, 2 * box, 1, 1)
        assert pair == dataclasses.replace(keys, box=twice)
        for block in range(4):
            boxes = config.tile_n // box
            odd = block * boxes % 2
            copies = [(boxes - 1 if not odd else 0, 1)]
            copies += [(odd + 2 * i, 2) for i in range(boxes // 2)]
            covered = []
            for first, count in copies:
                key = block * config.tile_n + first * box
                assert key % page_size + count * box <= page_size
                covered += range(key, key + count * box)
            assert sorted(covered) == list(
                range(block * config.tile_n, (block + 1) * config.tile_n)
            )


def test_a_cache_takes_the_tile_of_ragged_keys():
    """So that results are the same bit for bit."""
    for options in ({}, {"window": (100, 0)}, {"softcap": 20.0}):
        config = caches("ragged", "paged", **options).variant.config
        plain = choose(
            (700, 8, 128), *[(900, 2, 128)] * 2, sequences=3, **{"causal": True, **options}
        ).variant.config
        assert config == dataclasses.replace(plain, paged_kv=True, seq_lens=True, key_groups=True)


def test_caches_that_are_left_to_others():
    for options in ({"page_size": 4}, {"scale": -1.0}):
        with pytest.raises(LookupError):
            caches("batched", "paged", **options)


@pytest.mark.parametrize(
    ("heads", "contiguous", "pages"),
    [
        ((8, 8), False, False),
        ((8, 4), True, True),
        ((32, 8), True, True),
        ((28, 4), True, True),  # 63 of 64 rows
        ((40, 8), False, True),  # 60
        ((48, 1), False, False),
        ((64, 1), True, True),
        ((130, 1), False, False),
    ],
)
def test_ragged_rows_are_packed_where_few_idle(heads, contiguous, pages):
    for keys, packs in (("ragged", contiguous), ("paged", pages)):
        cache = (900,) if keys == "ragged" else (1024,)
        spec = attention_spec(
            "paged_attention",
            (700, heads[0], 64),
            *[(*cache, heads[1], 64)] * 2,
            *[BFLOAT16] * 3,
            sequences=3,
            keys=keys,
            page_size=16 if keys == "paged" else 0,
            causal=True,
        )
        call = Call.contiguous(spec, "sm_90a", num_pages=200, table_stride=64)
        launch = sm90.Sm90Forward().serves(call)
        config = launch.variant.config
        assert config.pack_gqa == packs
        group = heads[0] // heads[1]
        queries = (64 // group if packs else 64) * config.warpgroups
        tiles = (700 // queries + 3) * heads[packs]
        assert launch.grid == (min(tiles, 132),)
        fields = SM90_PARAMS.unpack(
            launch.arguments[1].pack(collections.defaultdict(int, dict.fromkeys(MAPS, b"")))
        )
        magic, shift = fields["by_queries_of_tile"]
        assert all(n * magic >> shift == n // queries for n in (0, 1, 191, 192, 5000, 2**31 - 1))
        forward = FORWARD_PARAMS.unpack(launch.arguments[0].pack(collections.defaultdict(int)))
        assert forward["group"] == group
        assert all(n * forward["group_magic"] >> 16 == n // group for n in range(64))


@pytest.mark.parametrize(
    ("batch", "tokens", "keys", "heads", "dim", "tile"),
    [
        (2, 2048, 16384, (32, 8), 128, (128, 2)),  # 704 tiles of 192 rows: five waves and a third
        (1, 4096, 16384, (32, 8), 128, (128, 2)),
        (1, 4096, 8192, (32, 8), 128, (128, 2)),
        (1, 4096, 4096, (32, 8), 128, (128, 2)),
        (2, 2048, 2048, (32, 8), 128, (128, 2)),
        (1, 2311, 25344, (32, 32), 128, (128, 2)),
        (2, 143, 5248, (32, 32), 128, (128, 2)),
        (1, 1576, 1920, (16, 4), 128, (128, 2)),
        (2, 3622, 3648, (4, 4), 128, (128, 2)),
        (1, 6583, 6592, (8, 2), 128, (128, 2)),
        (1, 1586, 1600, (2, 2), 128, (128, 1)),
        (4, 949, 960, (16, 4), 128, (80, 3)),
        (1, 6000, 6016, (32, 8), 128, (80, 3)),
        (1, 7106, 8000, (32, 8), 128, (80, 3)),
        (2, 4096, 16384, (32, 8), 128, (80, 3)),
        (4, 2048, 8192, (32, 8), 128, (80, 3)),
        (1, 8192, 8192, (32, 8), 128, (80, 3)),
        (1, 8192, 131072, (32, 8), 128, (80, 3)),
        (2, 862, 1984, (32, 32), 96, (128, 2)),
        (1, 3462, 3520, (8, 2), 96, (128, 2)),
        (1, 1586, 1600, (32, 8), 96, (112, 3)),
        (2, 2048, 2048, (32, 8), 64, (128, 3)),
        # One wave: of tiles of fewer rows some block has two that cost much.
        (1, 891, 1216, (16, 2), 128, (128, 2)),
        (2, 1000, 1024, (8, 2), 64, (128, 2)),
        (2, 1000, 1024, (8, 2), 256, (80, 2)),
        (1, 2048, 2048, (8, 2), 256, (80, 2)),
    ],
)
@pytest.mark.parametrize("kind", ["cached", "paged"])
def test_tiles_over_caches_suit_the_batch(kind, batch, tokens, keys, heads, dim, tile):
    """The fastest of those that were timed."""
    call = few_queries(tokens, keys, batch, heads, dim, kind)
    config = sm90.Sm90Forward().serves(call).variant.config
    assert (config.tile_n, config.warpgroups) == tile


def test_blocks_take_tiles_when_they_begin_or_end_one():
    costs = np.array([4.0, 3.0, 2.0, 2.0, 1.0, 1.0])
    assert order_sm90._busiest(costs, 2, ahead=False) == 7.0  # 4 + 2 + 1, 3 + 2 + 1
    assert order_sm90._busiest(costs[:4], 2, ahead=False) == 6.0
    costs = np.array([4.0, 3.0, 3.0, 1.0])
    assert order_sm90._busiest(costs, 2, ahead=False) == 6.0  # 4 + 1, 3 + 3
    assert order_sm90._busiest(costs, 2, ahead=True) == 7.0  # 4 + 3, 3 + 1
    assert order_sm90._busiest(np.ones(5), 2, ahead=True) == 3.0


@pytest.mark.parametrize(
    ("tokens", "batch", "beside", "rows"),
    [
        (256, 1, False, 64),
        (1024, 1, False, 128),
        (4096, 1, False, 192),
        (16 * 500, 16, False, 192),
        (256, 1, True, 192),
    ],
)
@pytest.mark.parametrize("keys", ["ragged", "paged"])
def test_few_ragged_rows_have_small_tiles(keys, tokens, batch, beside, rows):
    """But for those beside another launch; always with blocks of as many keys."""
    spec = attention_spec(
        "paged_attention",
        (tokens, 32, 128),
        *[(8192, 8, 128)] * 2,
        *[BFLOAT16] * 3,
        sequences=batch,
        keys=keys,
        page_size=16 if keys == "paged" else 0,
        causal=True,
    )
    call = Call.contiguous(
        spec, "sm_90a", num_pages=600, table_stride=512, min_queries=3 if beside else 0
    )
    config = sm90.Sm90Forward().serves(call).variant.config
    assert (config.tile_m, config.tile_n) == (rows, 80)


def few_queries(tokens, keys, batch=1, heads=(32, 8), dim=128, kind="batched", **options):
    """The call of some queries of each sequence over all keys of plain arrays, caches or pages."""
    spec = attention_spec(
        "flash_attention" if kind == "batched" else "flash_decode",
        (batch, tokens, heads[0], dim),
        *[(batch, keys, heads[1], dim)] * 2,
        *[BFLOAT16] * 3,
        **{} if kind == "batched" else {"keys": kind},
        **{"page_size": 64} if kind == "paged" else {},
        **{"causal": True, **options},
    )
    return Call.contiguous(spec, "sm_90a", num_pages=batch * keys // 64 if kind == "paged" else 0)


@pytest.mark.parametrize("kind", ["batched", "cached", "paged"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_of_few_queries_are_cut_into_parts(kind, dim):
    call = few_queries(64, 32768, dim=dim, kind=kind)
    launch = dispatch.split_sm90.Sm90Split().serves(call)
    config = launch.variant.config
    assert (config.pack_gqa, config.split_kv, config.out_dtype) == (True, True, "float32")
    assert config.paged_kv == config.seq_lens == (kind != "batched")
    assert launch.variant in dispatch.variants("sm_90a")
    assert 1 < launch.parts <= call.multiprocessors
    assert launch.grid[0] <= min(132, 8 * 2 * launch.parts)
    assert (launch.workspace_bytes > 0) == (kind != "batched")
    forward = FORWARD_PARAMS.unpack(launch.arguments[0].pack(collections.defaultdict(int)))
    assert forward["out_stride"] == (64 * 32 * dim, 32 * dim, dim)  # of a part, one after the other
    fields = SM90_PARAMS.unpack(
        launch.arguments[1].pack(collections.defaultdict(int, dict.fromkeys(MAPS, b"")))
    )
    assert fields["num_splits"] == launch.parts


@pytest.mark.parametrize("kind", ["batched", "cached", "paged"])
@pytest.mark.parametrize(
    ("tokens", "heads", "consumers"),
    [(16, (32, 8), 1), (17, (32, 8), 2), (60, (4, 4), 1), (65, (4, 4), 2), (12, (40, 8), 1)],
)
def test_queries_that_fit_into_64_rows_have_a_tile_of_these(kind, tokens, heads, consumers):
    call = few_queries(tokens, 32768, heads=heads, dim=192, kind=kind)
    launch = dispatch.split_sm90.Sm90Split().serves(call)
    assert launch.variant.config.warpgroups == consumers
    assert launch.variant in dispatch.variants("sm_90a")


@pytest.mark.parametrize("tokens", [16, 64, 100, 300])
@pytest.mark.parametrize("keys", [4096, 32768, 131072])
def test_the_batch_has_no_say_in_the_parts_of_plain_arrays(tokens, keys):
    launches = [
        dispatch.split_sm90.Sm90Split().serves(few_queries(tokens, keys, batch=batch))
        for batch in (1, 3, 200)
    ]
    assert (
        len({launch and (launch.parts, launch.variant.config.tile_n) for launch in launches}) == 1
    )


@pytest.mark.parametrize(
    ("call", "tile", "parts"),
    [
        ({"tokens": 256, "keys": 8192}, (176, 1), 1),
        ({"tokens": 256, "keys": 8192, "batch": 8}, (176, 2), 1),
        ({"tokens": 512, "keys": 32768, "batch": 8}, (176, 2), 1),
        ({"tokens": 128, "keys": 32768}, (176, 2), 4),
        ({"tokens": 64, "keys": 8192}, (128, 2), 8),  # of 12 blocks a part would leave more idle
        ({"tokens": 256, "keys": 2048, "batch": 16}, (128, 2), 1),
        ({"tokens": 8192, "keys": 8192}, (80, 3), 1),
        ({"tokens": 512, "keys": 8192, "batch": 8, "kind": "paged"}, (128, 2), 1),
        ({"tokens": 512, "keys": 8192, "batch": 8, "causal": False}, (128, 2), 1),
        ({"tokens": 100, "keys": 170, "batch": 100}, (80, 2), 1),
    ],
)
def test_few_queries_over_many_keys_have_large_blocks(call, tile, parts):
    launch = dispatch.choose(few_queries(**call))
    config = launch.variant.config
    assert (config.tile_n, config.warpgroups, launch.parts) == (*tile, parts)
    source = f"attention/forward_{'176_' if tile[0] == 176 else ''}sm90.cu"
    assert launch.variant.source == source
    assert launch.variant in dispatch.variants("sm_90a")


@pytest.mark.parametrize(
    ("call", "warpgroups", "parts"),
    [
        ({"tokens": 1, "keys": 418, "batch": 49, "heads": (768, 16), "dim": 96}, 1, 1),
        ({"tokens": 1, "keys": 1391, "batch": 342, "heads": (48, 1), "dim": 256}, 1, 1),
        ({"tokens": 1, "keys": 13312, "batch": 104, "heads": (384, 8), "dim": 64}, 1, 3),
        ({"tokens": 1, "keys": 1000, "batch": 64, "heads": (128, 4)}, 1, 1),
        ({"tokens": 8, "keys": 8192}, 1, 11),  # 32 rows
        ({"tokens": 8, "keys": 8192, "batch": 16}, 1, 1),
        ({"tokens": 16, "keys": 8192, "batch": 16}, 1, 1),
        ({"tokens": 32, "keys": 8192, "batch": 16}, 2, 1),
        ({"tokens": 12, "keys": 65536, "heads": (32, 8)}, 1, 14),
        ({"tokens": 64, "keys": 32768, "batch": 16}, 2, 1),  # two tiles
    ],
)
@pytest.mark.parametrize("kind", ["cached", "paged"])
def test_few_queries_over_caches_fill_a_tile_together(call, kind, warpgroups, parts):
    launch = dispatch.choose(few_queries(**call, kind=kind))
    config = launch.variant.config
    assert (config.pack_gqa, config.seq_lens, config.warpgroups) == (True, True, warpgroups)
    assert (launch.parts, config.split_kv) == (parts, parts > 1)
    assert config.out_dtype == ("float32" if parts > 1 else "bfloat16")
    assert launch.variant in dispatch.variants("sm_90a")
    forward = FORWARD_PARAMS.unpack(launch.arguments[0].pack(collections.defaultdict(int)))
    heads, dim = call.get("heads", (32, 8))[0], call.get("dim", 128)
    assert forward["out_stride"] == (call["tokens"] * heads * dim, heads * dim, dim)


@pytest.mark.parametrize(
    ("call", "even"),
    [
        ({"tokens": 1, "keys": 25592, "batch": 64, "heads": (96, 2), "dim": 64}, True),
        ({"tokens": 1, "keys": 65536, "batch": 16, "heads": (96, 2), "dim": 80}, True),
        ({"tokens": 1, "keys": 171636, "batch": 3, "heads": (768, 16), "dim": 80}, False),  # lines
        ({"tokens": 1, "keys": 171636, "batch": 3, "heads": (768, 16), "dim": 64}, True),
        ({"tokens": 1, "keys": 22011, "batch": 3, "heads": (384, 8), "dim": 192}, False),
        ({"tokens": 1, "keys": 1510, "batch": 401, "heads": (192, 4)}, False),  # many tiles
        ({"tokens": 1, "keys": 8192, "batch": 16, "heads": (96, 2)}, False),  # few blocks of keys
        ({"tokens": 1, "keys": 685, "batch": 76, "heads": (768, 16), "dim": 256}, False),
        ({"tokens": 1, "keys": 131072, "batch": 1, "heads": (48, 1)}, False),  # 132 parts of a tile
    ],
)
def test_keys_of_sequences_that_may_differ_are_shared_out_evenly(call, even):
    launch = dispatch.choose(few_queries(**call, kind="cached"))
    assert launch.variant.config.even_keys == even
    assert launch.variant in dispatch.variants("sm_90a")
    if even:
        assert launch.grid == (132,)
        assert launch.workspace_bytes >= 2 * 132 * launch.variant.config.part_bytes


@pytest.mark.parametrize(
    "call",
    [
        {"tokens": 1, "keys": 8192, "batch": 16},
        {"tokens": 4, "keys": 8192, "batch": 16},  # 16 rows
        {"tokens": 1, "keys": 300, "heads": (48, 1)},  # a tile on one multiprocessor
        {"tokens": 40, "keys": 300, "heads": (8, 8)},  # nothing to pack
    ],
)
def test_caches_that_are_left_to_others_than_packed_rows(call):
    launch = dispatch.choose(few_queries(**call, kind="cached"))
    assert not getattr(launch.variant.config, "pack_gqa", False)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},
        {"softcap": 20.0},
        {"scale": -1.0},
        {"heads": (130, 1)},
        {"dim": 192, "kind": "batched", "tokens": 2000},  # tiles enough
        {"tokens": 4000},
    ],
)
def test_calls_whose_keys_are_left_whole(options):
    call = few_queries(**{"tokens": 64, "keys": 32768, **options})
    assert dispatch.split_sm90.Sm90Split().serves(call) is None


#: Features that combine freely, though no call asks for these combinations yet.
COMBINATIONS = [
    {"pack_gqa": True},
    {"pack_gqa": True, "varlen": True, "bound_right": True},
    {"pack_gqa": True, "paged_kv": True, "seq_lens": True, "varlen": True, "bound_left": True},
    {"pack_gqa": True, "score": True, "bound_left": True, "bound_right": True},
    {"split_kv": True, "out_dtype": "float32"},
    {"split_kv": True, "out_dtype": "float32", "varlen": True, "bound_right": True},
    {"split_kv": True, "paged_kv": True, "seq_lens": True, "out_dtype": "float32"},
    {"seq_lens": True},
    {"out_dtype": "float32", "elementwise": True, "score": True, "tile_n": 80, "q_stages": 1},
    {"paged_kv": True, "elementwise": True, "score": True, "tile_n": 80, "q_stages": 1},
]


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA's compiler does not exist for macOS")
@pytest.mark.parametrize("features", COMBINATIONS, ids=lambda features: "+".join(features))
def test_features_combine(features):
    plain = dispatch.Sm90ForwardConfig(
        "bfloat16", 128, 128, tile_n=128, warpgroups=2, q_stages=2, bound_left=False,
        bound_right=False, varlen=False, score=False, elementwise=False,
    )  # fmt: skip
    config = dataclasses.replace(plain, **features)
    variant = Variant("attention/forward_sm90.cu", "forward_sm90", config)
    assert compiler.report(variant, "sm_90a").warnings == ()


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32), np.dtype(bool)])
def test_maps_of_bias_and_mask(dtype):
    """What TMA can address has a map; the rest is left to the kernel."""
    shape = (2, 304, 8, 128)

    def mapped(array, **options):
        scores = {"mask": Layout(array.shape, array.strides, array.dtype), **options}
        launch = choose(*[shape] * 3, scores=scores)
        packed = launch.arguments[1].pack(collections.defaultdict(int, dict.fromkeys(MAPS, b"")))
        fields = SM90_PARAMS.unpack(packed)
        assert fields["mask_mapped"] == (launch.tensor_maps["mask"] is not None)
        assert fields["bias_mapped"] == 0
        assert launch.variant.config == config
        return launch.tensor_maps["mask"]

    size, n = dtype.itemsize, 304
    whole = np.empty((2, 8, n, n), dtype)
    config = choose(
        *[shape] * 3, scores={"bias": Layout(whole.shape, whole.strides, dtype)}
    ).variant.config
    box = (config.tile_n, 64, 1, 1)
    rows, heads, batch = size * n, size * n * n, size * n * n * 8
    assert mapped(whole) == TensorMap(dtype, (n, n, 8, 2), (rows, heads, batch), box, False)
    assert mapped(whole[:1, 0]) == TensorMap(dtype, (n, n, 1, 1), (rows, 16, 16), box, False)
    assert mapped(whole[..., :301]).shape == (301, n, 8, 2)
    assert mapped(whole, score_aligned=False) is None
    assert mapped(whole[:, :, :1]) is None  # all queries share a row
    assert mapped(whole[..., :1]) is None
    assert mapped(whole[..., ::2]) is None
    assert mapped(whole[..., ::-1, :]) is None
    assert mapped(np.empty((2, 8, n, n - 1), dtype)) is None
    assert mapped(whole[0, 0, 0]) is None
    assert mapped(np.empty((), dtype)) is None


def test_scales_of_scores():
    """Their product is what the contract says, with a tanh in between or not."""
    shapes = [(2, 300, 8, 64)] * 3

    def scales(**options):
        spec = attention_spec("flash_attention", *shapes, *[BFLOAT16] * 3, **options)
        call = Call.contiguous(spec, "sm_90a")
        bias = Layout((300, 300), (600, 2), BFLOAT16)
        calls = call, dataclasses.replace(call, bias=bias)
        plain, with_bias = map(arguments_sm90.score_scales, calls)
        assert with_bias[:2] == plain[:2]
        assert with_bias[2] == pytest.approx(np.log2(np.e))
        return plain

    assert scales() == pytest.approx((0.0, 0.125, 0.125 * np.log2(np.e)))
    assert scales(scale=0.5, softcap=20.0) == pytest.approx((0.025, 20.0, 20.0 * np.log2(np.e)))


def test_addressable():
    assert tensormap.addressable((4096, 256, 128))
    assert not tensormap.addressable((4096, 256, 136))
    assert not tensormap.addressable((4096, 0, 128))
    assert not tensormap.addressable((4096, -256, 128))
    assert not tensormap.addressable((1 << 40, 256, 128))


def test_new_pointers_change_nothing_but_the_pointer(monkeypatch):
    bindings = pytest.importorskip("cuda.bindings.driver")
    calls = []

    class Driver:
        """The driver's types, and a call that needs no driver."""

        def __getattr__(self, name):
            return getattr(bindings, name)

        def cuTensorMapEncodeTiled(self, *arguments):
            calls.append(arguments)
            return bindings.CUresult.CUDA_SUCCESS, bindings.CUtensorMap()

    monkeypatch.setattr(tensormap, "_driver", Driver)
    shape, strides, box = (128, 64, 2, 1), (256, 512, 1024), (64, 64, 1, 1)
    tensor_map = TensorMap(np.dtype(np.float16), shape, strides, box)
    for pointer in (16, 32):
        encoded = tensormap.encode.__wrapped__(tensor_map, pointer)
        assert len(encoded) == tensormap.TENSOR_MAP_BYTES
    for pointer, (kind, rank, address, *after) in zip((16, 32), calls, strict=True):
        assert kind == bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        assert (rank, address) == (4, pointer)
        assert [[int(n) for n in numbers] for numbers in after[:4]] == [
            [*shape],
            [*strides],
            [*box],
            [1, 1, 1, 1],
        ]


def test_launch_ids_leave_the_programs_random_numbers_alone():
    random.seed(1)
    state = random.getstate()
    assert structs.launch_id() != structs.launch_id()
    assert random.getstate() == state


def test_every_tile_sees_all_keys_where_nothing_is_bounded(rng):
    """However many more queries there are than keys."""
    lengths = [(20000, 16), (300, 300), (16, 20000), *rng.integers(1, 5000, (20, 2)).tolist()]
    for seqlen_q, seqlen_k in lengths:
        shapes = [(1, n, 2, 64) for n in (seqlen_q, seqlen_k, seqlen_k)]
        spec = attention_spec("flash_attention", *shapes, *[BFLOAT16] * 3)
        for config in {v.config for v in dispatch.variants("sm_90a") if v.entry == "forward_sm90"}:
            counts = order_sm90.blocks_of_keys(spec, config)
            assert (counts == -(-seqlen_k // config.tile_n)).all()
