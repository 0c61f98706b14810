"""The choice of decoding kernels: pure functions of a call's shapes and the GPU."""

from __future__ import annotations

import collections
import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._spec import MAX_HEAD_DIM, attention_spec
from cuattn.gpu import dispatch, params
from cuattn.gpu.arguments import Scales
from cuattn.gpu.dispatch import Call, Layout

ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"]


@st.composite
def specs(draw):
    dtype = np.dtype(
        draw(st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]))
    )
    heads_kv, group = draw(st.integers(1, 130)), draw(st.integers(1, 40))
    batch, seqlen_q = draw(st.integers(1, 300)), draw(st.integers(1, 600))
    dims = [draw(st.integers(1, MAX_HEAD_DIM)) for _ in "qv"]
    if draw(st.booleans()):
        dims = [-(-d // 8) * 8 for d in dims]
    ragged = draw(st.booleans())
    lead = [] if ragged else [batch]
    capacity = draw(st.integers(1, 1 << 20))
    return attention_spec(
        "flash_decode",
        (*lead, seqlen_q, heads_kv * group, dims[0]),
        (*lead, capacity, heads_kv, dims[0]),
        (*lead, capacity, heads_kv, dims[1]),
        *(dtype, dtype, dtype),
        causal=True,
        sequences=batch if ragged else None,
        keys="paged" if ragged else "cached",
        page_size=16 if ragged else 0,
    )


#: The kernels of decoding, whatever is cheaper.
TIERS = tuple(tier for tier in dispatch.TIERS if tier.name.startswith("decode"))


def choose(spec, arch="sm_90a", multiprocessors=132, tiers=TIERS, **options):
    """The launch of contiguous arrays, or of pages that are all there."""
    num_pages = spec.batch * spec.seqlen_k // spec.page_size if spec.page_size else 0
    call = Call.contiguous(spec, arch, multiprocessors, num_pages=num_pages, **options)
    return dispatch.choose(call, tiers)


def decode_params(launch):
    """The fields of DecodeParams as they are launched, with addresses of 0."""
    addresses = collections.defaultdict(int)
    return params.DECODE_PARAMS.unpack(launch.arguments[0].pack(addresses))


@pytest.mark.parametrize("arch", ARCHS)
@given(spec=specs(), multiprocessors=st.integers(1, 200), aligned=st.booleans())
def test_every_choice_is_listed_and_serves(arch, spec, multiprocessors, aligned):
    launch = choose(spec, arch, multiprocessors, aligned=aligned)
    config = launch.variant.config
    assert launch.variant in set(dispatch.variants(arch))
    assert max(spec.head_dim, spec.head_dim_v) <= config.head_dim
    if "sm90" in launch.variant.source:
        assert aligned
        blocks = launch.grid[0]
        rows = spec.seqlen_q * spec.heads_q // spec.heads_kv
        row_tiles = -(-rows // 16)
        pairs = spec.batch * spec.heads_kv * row_tiles
        assert launch.grid == (blocks, spec.heads_kv * row_tiles, spec.batch)
        assert blocks % config.cluster == 0
        assert config.rows == (8 if rows <= 8 else 16)
        assert config.row_tiles == (row_tiles > 1)
        assert rows <= (64 if spec.heads_q <= 64 * spec.heads_kv else 128)
        half = config.cluster == 4 and pairs * blocks > 120 * multiprocessors // 132
        shared = 113 if half else 227  # KiB
        assert config.blocks_per_sm * (config.smem_bytes + 1024) <= shared * 1024
        if config.cluster == 1:
            assert blocks == 1
            assert max(launch.grid) < 65536
        else:
            assert pairs * blocks <= multiprocessors
            assert (
                not spec.quantized
                or blocks == config.cluster
                or blocks * 2048 <= config.cluster * spec.seqlen_k
            )
        return
    lanes, groups = launch.grid
    assert spec.heads_kv % lanes == 0
    assert 0.8 * multiprocessors * config.blocks_per_sm <= lanes * groups or multiprocessors < 10
    assert lanes * groups <= multiprocessors * config.blocks_per_sm
    if "sm80" in launch.variant.source:
        assert aligned
        assert spec.dtype.itemsize == 2
        shared = dispatch.SHARED_KIB.get(dispatch.capability(arch), 100) * 1024
        assert config.blocks_per_sm * (config.smem_bytes + 1024) <= shared


@pytest.mark.parametrize(
    ("change", "clusters"),
    [
        ({}, 8),
        ({"page_size": 16}, 8),
        ({"page_size": 8}, None),  # smaller than a tile
        ({"num_splits": "fixed"}, None),
        ({"num_splits": 2}, None),
        ({"arch": "sm_80"}, None),
        ({"aligned": False}, None),
        ({"contiguous": False}, None),  # a stride that TMA does not take
        ({"batch": 2}, 4),  # 16 clusters of 8 do not run at the same time
        ({"batch": 4, "capacity": 1024}, 4),
        ({"batch": 4}, None),  # too many keys
        ({"batch": 5, "capacity": 1024}, 2),
        ({"batch": 5}, 2),
        ({"batch": 5, "capacity": 9000}, None),
        ({"batch": 9, "capacity": 1024}, 1),
        ({"batch": 9}, None),  # too many pairs for clusters
        ({"dim": 80}, 8),
        ({"dim": 80, "capacity": 16384}, 8),
        ({"dim": 60}, None),  # rows of no multiple of 16 bytes
        ({"heads": 2}, (8, 7)),
        ({"heads": 2, "capacity": 65536}, (4, 15)),
        ({"heads": 1, "capacity": 65536}, (8, 14)),
        ({"heads": 4, "capacity": 28671}, (4, 7)),  # on more multiprocessors than (8, 3)
        ({"heads": 4, "capacity": 65536}, (4, 7)),
        ({"heads": 3, "capacity": 65536}, (4, 10)),
        ({"heads": 5, "capacity": 16384}, (4, 6)),
        ({"heads": 4, "capacity": 131072}, None),  # others read them faster
        ({"heads": 1, "dim": 64}, (8, 14)),
        (
            {"batch": 3, "heads": 2, "capacity": 3000},
            (8, 1),
        ),  # a second one costs more than it gains
        ({"dim": 64, "capacity": 2048}, 8),
        ({"dim": 64, "capacity": 16384}, 8),
        ({"dim": 64, "capacity": 65536}, None),
        ({"dim": 64, "heads": 16, "capacity": 4096}, 4),
        ({"dim": 64, "heads": 32, "capacity": 2048}, 4),
        ({"dim": 64, "heads": 32, "capacity": 4096}, 4),
        ({"dim": 256}, 8),
        ({"dim": 256, "capacity": 16384}, 8),
        ({"dim": 256, "capacity": 65536}, None),
        ({"dim": 256, "heads": 1}, None),  # packed tiles have more blocks
        ({"dim": 192, "capacity": 4096}, 8),
        ({"tokens": 3}, 8),  # 12 rows
        ({"tokens": 4, "capacity": 65536}, 8),
        ({"tokens": 4, "heads": 6, "capacity": 65537}, (4, 5)),
        ({"tokens": 4, "batch": 4, "capacity": 16384}, None),
        ({"tokens": 4, "heads": 4, "capacity": 131072}, (4, 7)),
        ({"tokens": 4, "dim": 64, "capacity": 32768}, 8),
        ({"tokens": 4, "dim": 64, "heads": 16, "capacity": 16384}, 4),
        ({"tokens": 4, "dim": 64, "heads": 16, "capacity": 32768}, None),
        ({"tokens": 5}, None),  # 20 rows, whose two tiles would read too much
        ({"tokens": 5, "capacity": 4096}, 4),
        ({"tokens": 5, "capacity": 4096, "page_size": 16}, 4),
        ({"tokens": 5, "capacity": 4096, "page_size": 8}, None),
        ({"tokens": 5, "capacity": 4096, "num_splits": "fixed"}, None),
        ({"tokens": 5, "capacity": 8192, "dim": 64}, None),
        ({"tokens": 5, "capacity": 3072, "dim": 80}, 4),
        ({"tokens": 5, "capacity": 4096, "dim": 80}, None),
        ({"tokens": 5, "heads": 1}, (8, 6)),
        ({"tokens": 5, "heads": 1, "capacity": 2048}, 8),
        ({"tokens": 5, "heads": 1, "capacity": 16384}, (8, 7)),
        ({"tokens": 5, "heads": 1, "capacity": 131072}, None),
        ({"tokens": 5, "heads": 1, "capacity": 65536, "dim": 64}, (8, 7)),
        ({"tokens": 5, "heads": 1, "capacity": 131072, "dim": 64}, None),
        ({"tokens": 16, "heads": 1, "capacity": 65536}, None),
        ({"tokens": 5, "heads": 16, "capacity": 1024}, 2),  # not of half multiprocessors
        ({"tokens": 16, "heads": 1}, (8, 3)),  # four tiles
        ({"tokens": 17, "heads": 1}, None),  # 68 rows
        ({"tokens": 12, "heads": 1, "batch": 64, "capacity": 300}, 1),  # two for a multiprocessor
        ({"tokens": 12, "heads": 1, "batch": 89, "capacity": 200}, None),
    ],
)
def test_few_sequences_have_clusters(change, clusters):
    call = {"batch": 1, "tokens": 1, "heads": 8, "capacity": 8192, "dim": 128, "arch": "sm_90a"}
    call |= {"aligned": True, "contiguous": True, "page_size": 0, "num_splits": None} | change
    cache = (call["batch"], call["capacity"], call["heads"], call["dim"])
    spec = attention_spec(
        "flash_decode",
        (call["batch"], call["tokens"], 4 * call["heads"], call["dim"]),
        *(cache, cache),
        *[np.dtype(np.float16)] * 3,
        causal=True,
        keys="paged" if call["page_size"] else "cached",
        page_size=call["page_size"],
    )
    options = {name: call[name] for name in ("aligned", "num_splits")}
    described = Call.contiguous(spec, call["arch"], num_pages=1000, **options)
    if not call["contiguous"]:
        strides = described.strides._replace(k=(0, *described.strides.k[1:]))
        described = dataclasses.replace(described, strides=strides)
    launch = dispatch.choose(described, TIERS)
    assert (launch.variant.entry == "decode_sm90") == (clusters is not None)
    if clusters is not None:
        size, count = clusters if isinstance(clusters, tuple) else (clusters, 1)
        assert launch.variant.config.cluster == size
        assert launch.grid[0] == size * count


@pytest.mark.parametrize(
    ("change", "blocks_per_sm"),
    [
        ({}, 3),
        ({"dim": 64}, 4),
        ({"tokens": 4}, 3),
        ({"page_size": 16}, 3),
        ({"page_size": 8}, None),  # smaller than a tile
        ({"dim": 80}, 3),
        ({"dim": 192}, 3),
        ({"batch": 12, "capacity": 100}, 1),
        ({"batch": 12}, 1),
        ({"batch": 12, "capacity": 385}, None),  # a cluster
        ({"batch": 8, "capacity": 257}, None),
        ({"batch": 3, "capacity": 129}, None),
        ({"batch": 17, "capacity": 120}, 3),
        ({"batch": 17, "capacity": 512}, 1),  # each has a multiprocessor
        ({"batch": 17, "capacity": 2048}, 1),
        ({"batch": 33, "capacity": 241, "dim": 192}, 1),  # each has a multiprocessor
        ({"batch": 34, "capacity": 241, "dim": 192}, 3),
        ({"batch": 33, "capacity": 512, "dim": 256}, 1),
        ({"batch": 34, "capacity": 512, "dim": 256}, 3),
        ({"batch": 2, "capacity": 200, "tokens": 5}, 1),  # 16 tiles of rows
        ({"batch": 10, "tokens": 5}, 1),
        ({"batch": 33, "tokens": 5, "capacity": 200}, 3),
        ({"batch": 300, "capacity": 1024, "dim": 64, "tokens": 4}, 4),
        ({"batch": 300, "capacity": 2048, "dim": 64, "tokens": 4}, 2),  # with deeper rings
        ({"batch": 98, "capacity": 1536, "dim": 64, "tokens": 4}, 4),  # fewer than three each
        ({"batch": 300, "capacity": 2049, "dim": 64, "tokens": 4}, None),
        ({"batch": 300, "capacity": 1536, "dim": 64}, 2),
        ({"batch": 17, "capacity": 2049}, 1),  # long, but all run at a time
        ({"batch": 90, "capacity": 1300}, 3),
        ({"batch": 98, "capacity": 1300}, 3),
        ({"batch": 99, "capacity": 1300}, None),  # decode_sm80.cu's blocks have whole sequences
        ({"batch": 100, "capacity": 1300}, None),  # they do not
        ({"batch": 118, "capacity": 2983, "dim": 64, "tokens": 4}, 4),
        ({"batch": 32, "capacity": 16384}, None),  # decode_sm80.cu reads them faster
        ({"batch": 90, "capacity": 1300, "dim": 192}, None),
        ({"batch": 400, "capacity": 400}, 3),
        ({"batch": 400, "capacity": 1024}, 3),
        ({"batch": 400, "capacity": 1025}, None),
        ({"batch": 500, "capacity": 1200, "dim": 80}, 3),
        ({"batch": 500, "capacity": 1250, "dim": 80}, None),  # rows that are shorter
        ({"batch": 1, "heads": 1, "capacity": 128}, 1),
        ({"num_splits": "fixed"}, None),
        ({"batch": 65536, "capacity": 16}, None),  # more than a grid has along its third axis
    ],
)
def test_short_sequences_have_blocks_of_their_own(change, blocks_per_sm):
    call = {"batch": 256, "tokens": 1, "heads": 4, "capacity": 300, "dim": 128}
    call |= {"page_size": 0, "num_splits": None} | change
    cache = (call["batch"], call["capacity"], call["heads"], call["dim"])
    spec = attention_spec(
        "flash_decode",
        (call["batch"], call["tokens"], 4 * call["heads"], call["dim"]),
        *(cache, cache),
        *[np.dtype(np.float16)] * 3,
        causal=True,
        keys="paged" if call["page_size"] else "cached",
        page_size=call["page_size"],
    )
    launch = choose(spec, num_splits=call["num_splits"])
    config = launch.variant.config
    alone = launch.variant.entry == "decode_sm90" and config.cluster == 1
    assert (config.blocks_per_sm if alone else None) == blocks_per_sm
    if alone:
        row_tiles = -(-4 * call["tokens"] // 16)
        assert launch.grid == (1, call["heads"] * row_tiles, call["batch"])
        assert launch.workspace_bytes == 0


@given(heads=st.integers(1, 300), blocks=st.integers(1, 600))
def test_head_lanes_leave_few_blocks_idle(heads, blocks):
    lanes = dispatch.decode_head_lanes(heads, blocks)
    assert heads % lanes == 0
    assert blocks // lanes * lanes >= 0.95 * max(
        blocks // n * n for n in range(1, min(heads, blocks) + 1) if heads % n == 0
    )


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "grid"),
    [
        (128, (64, 4), 2048, (4, 32)),  # of 33 groups 32, with four sequences each
        (8, (64, 4), 65536, (4, 33)),  # a sequence has several groups in any case
        (130, (64, 4), 2048, (4, 33)),
        (128, (32, 8), 2048, (8, 16)),
        (128, (80, 4), 2048, (4, 33)),  # 20 rows: products are the limit
    ],
)
def test_groups_of_blocks_have_whole_sequences(batch, heads, keys, grid):
    spec = attention_spec(
        "flash_decode",
        (batch, 1, heads[0], 128),
        *[(batch, keys, heads[1], 128)] * 2,
        *[np.dtype(np.float16)] * 3,
        keys="cached",
        causal=True,
    )
    launch = choose(spec)
    assert (launch.variant.entry, launch.grid) == ("decode_sm80", grid)


@given(most=st.integers(1, 600), tiles=st.integers(0, 2000))
def test_even_groups_are_few_less(most, tiles):
    groups = dispatch.decoding.even_groups(most, tiles)
    assert 0.95 * most <= groups <= most
    if groups < most:
        assert tiles % groups == 0


@given(spec=specs(), splits=st.none() | st.just("fixed") | st.integers(1, 1024))
def test_there_is_a_slot_for_every_partial_result(spec, splits):
    launch = choose(spec, num_splits=splits)
    slots, rest = divmod(launch.workspace_bytes, launch.variant.config.part_bytes)
    assert rest == 0
    if "sm90" in launch.variant.source:
        parts = launch.grid[0] // launch.variant.config.cluster
        assert slots == (0 if parts == 1 else parts * launch.grid[1] * launch.grid[2])
    elif splits is None:
        assert slots == 2 * launch.grid[0] * launch.grid[1]
    elif spec.rows == "batched":
        tiles_of_rows = -(
            -spec.seqlen_q * spec.heads_q // spec.heads_kv // launch.variant.config.rows
        )
        of_a_tile = -(-spec.seqlen_k // 1024) if splits == "fixed" else splits
        of_a_sequence = tiles_of_rows if tiles_of_rows > 1 else of_a_tile
        assert slots >= spec.batch * spec.heads_kv * of_a_sequence


@given(spec=specs(), splits=st.none() | st.just("fixed") | st.integers(1, 1024))
def test_a_single_tile_is_one_for_each_block(spec, splits):
    launch = choose(spec, num_splits=splits)
    rows = spec.seqlen_q * spec.heads_q // spec.heads_kv
    work_tiles = spec.batch * spec.heads_kv * -(-rows // launch.variant.config.rows)
    one = bool(decode_params(launch)["single_tile"])
    lanes = launch.grid[0] if "sm90" not in launch.variant.source else 0
    assert one == (work_tiles == lanes and splits is None and spec.rows == "batched")


@given(
    spec=specs(),
    batch=st.integers(1, 1 << 20),
    seqlen_q=st.integers(1, 1 << 22),
    capacity=st.integers(1, 1 << 29),
)
def test_the_partition_of_the_work_can_be_counted(spec, batch, seqlen_q, capacity):
    """Steps of decoding/schedule.cuh are counted in int."""
    spec = dataclasses.replace(spec, batch=batch, seqlen_q=seqlen_q, seqlen_k=capacity)
    launch = dispatch.choose(Call.contiguous(spec, "sm_90a", num_pages=1000))
    if launch.variant.entry not in ("decode_sm80", "decode_simt"):
        return
    fields, config = decode_params(launch), launch.variant.config
    tiles = -(-seqlen_q * spec.heads_q // spec.heads_kv // config.rows)
    tiles = tiles + batch if spec.rows == "ragged" else tiles * batch
    blocks = -(-capacity >> fields["kv_block_shift"]) + 2
    steps = tiles * fields["heads_per_block"] * blocks
    assert steps < 1 << 31 or fields["kv_block_shift"] == 29
    if steps < 1 << 29:
        assert 1 << fields["kv_block_shift"] == config.tile_keys


@given(group=st.integers(1, 1 << 16), n=st.integers(0, 2**31 - 1))
def test_division_by_the_group_is_exact(group, n):
    """n // group by a product and a shift of 64 bits."""
    spec = attention_spec(
        "flash_decode",
        *((1, 1, group, 8), (1, 8, 1, 8), (1, 8, 1, 8)),
        *[np.dtype(np.float32)] * 3,
        keys="cached",
    )
    fields = decode_params(choose(spec))
    assert fields["group"] == group
    assert n * fields["group_magic"] >> fields["group_shift"] == n // group
    assert n * fields["group_magic"] < 2**64


@pytest.mark.parametrize(
    ("batch", "heads", "capacity", "dim", "blocks", "change"),
    [
        (512, (64, 8), 128, 64, 4, {}),  # µs on an H200: 51, with one block 134
        (256, (64, 8), 512, 64, 2, {}),  # 75, 88
        (512, (32, 8), 200, 128, 2, {}),  # 112, 152
        (300, (16, 4), 400, 80, 2, {}),  # 52, 68
        (256, (64, 4), 300, 128, 2, {}),  # 63, 78
        (512, (16, 4), 128, 256, 2, {}),  # 80, 88
        (256, (16, 4), 300, 256, 1, {}),  # 88 with two, 86
        (128, (8, 1), 512, 128, 1, {}),  # 20 with two, 18
        (32, (32, 8), 1024, 128, 1, {}),  # 38 with two, 35
        (128, (32, 8), 2048, 128, 1, {}),
        (512, (32, 8), 200, 128, 1, {"num_splits": "fixed"}),
        (512, (32, 8), 200, 128, 1, {"arch": "sm_80"}),
    ],
)
def test_many_short_sequences_have_small_blocks(batch, heads, capacity, dim, blocks, change):
    """In decode_sm80.cu, where decode_sm90.cu does not serve them: in pages of 8, say."""
    spec = cached(batch, heads, capacity, dim)
    below = tuple(tier for tier in TIERS if tier.name != "decode_sm90")
    assert choose(spec, tiers=below, **change).variant.config.blocks_per_sm == blocks


@pytest.mark.parametrize(
    ("heads", "dim", "whole_lines", "change"),
    [
        ((40, 5), 112, False, {}),
        ((32, 8), 48, False, {}),  # µs on an H200: 151, with whole lines 170
        ((16, 4), 224, False, {}),
        ((24, 3), 80, True, {}),
        ((32, 4), 128, True, {}),
        ((8, 1), 112, True, {}),  # 117, without 130
        ((32, 4), 112, True, {"arch": "sm_80"}),
    ],
)
def test_whole_lines_are_read_where_the_next_copies_need_them(heads, dim, whole_lines, change):
    spec = cached(64, heads, 4096, dim)
    below = tuple(tier for tier in TIERS if tier.name != "decode_sm90")
    assert choose(spec, tiers=below, **change).variant.config.whole_lines == whole_lines


@pytest.mark.parametrize(
    ("heads", "dim", "together", "change"),
    [
        ((32, 4), 96, 2, {}),
        ((32, 8), 80, 2, {}),
        ((64, 4), 112, 2, {}),
        ((24, 3), 96, 1, {}),  # one would be left
        ((8, 1), 96, 1, {}),
        ((128, 4), 96, 1, {}),  # more than 16 rows
        ((32, 4), 128, 1, {}),
        ((32, 4), 96, 1, {"arch": "sm_80"}),
        ((32, 4), 96, 1, {"num_splits": 3}),
    ],
)
def test_rows_that_split_lines_are_read_two_heads_at_a_time(heads, dim, together, change):
    spec = cached(64, heads, 4096, dim)
    below = tuple(tier for tier in TIERS if tier.name != "decode_sm90")
    launch = choose(spec, tiers=below, **change)
    assert launch.variant.config.heads == together
    lanes, groups = launch.grid
    assert heads[1] // together % lanes == 0
    assert lanes * groups > 120 or change


@pytest.mark.parametrize(
    ("heads", "dim", "columns", "change"),
    [
        ((256, 16), 80, 80, {}),
        ((32, 4), 72, 80, {}),
        ((32, 8), 96, 96, {}),
        ((20, 4), 104, 112, {}),
        ((20, 4), 120, 0, {}),
        ((24, 3), 80, 0, {}),  # one head at a time
        ((64, 4), 128, 0, {}),
        ((256, 16), 192, 0, {}),
        ((32, 4), 96, 0, {"arch": "sm_80"}),
    ],
)
def test_rows_that_are_shorter_than_a_tile_are_computed_as_far_as_they_go(
    heads, dim, columns, change
):
    spec = cached(71, heads, 2530, dim)
    splits = tuple(tier for tier in TIERS if tier.name == "decode_sm80")
    assert choose(spec, tiers=splits, **change).variant.config.columns == columns


def layout(shape, dtype, strides=None):
    """Of a bias or mask; contiguous, and broadcast along axes of length 1, if nothing is said."""
    dtype = np.dtype(dtype)
    contiguous = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Layout(shape, tuple(strides or contiguous), dtype)


KEY_MASK = layout((4, 1, 1, 1000), bool)


@pytest.mark.parametrize(
    ("change", "rows", "has_bias"),
    [
        ({"mask": KEY_MASK}, 8, False),
        ({"mask": layout((999,), bool)}, 8, False),
        ({"mask": KEY_MASK, "tokens": 3}, 16, False),
        ({"mask": KEY_MASK, "tokens": 5}, 64, False),
        ({"mask": KEY_MASK, "tokens": 400}, 64, False),
        ({"mask": KEY_MASK, "tokens": 5, "dim": 256}, 16, False),
        ({"bias": layout((1, 32, 1, 1000), np.float16)}, 8, True),
        ({"bias": layout((1000,), np.float32), "mask": KEY_MASK}, 8, True),
        ({"mask": KEY_MASK, "arch": "sm_120"}, 8, False),
        ({"mask": KEY_MASK, "arch": "sm_75"}, None, False),
        ({"mask": layout((1, 32, 1, 1), bool)}, None, False),  # a column for all keys
        ({"bias": layout((1000, 32), np.float16, (2, 2000))}, None, False),  # transposed
        ({"mask": KEY_MASK, "dtype": np.float32}, None, False),
        ({"mask": KEY_MASK, "formats": ("int8", "int8")}, None, False),
        ({"mask": KEY_MASK, "dim": 60}, None, False),
        ({"mask": KEY_MASK, "dim": 264}, None, False),
    ],
)
def test_bias_and_mask_are_read_by_tensor_core_kernels(change, rows, has_bias):
    """Where elements of neighbouring keys lie side by side."""
    call = {"arch": "sm_90a", "tokens": 1, "dim": 128, "dtype": np.float16, "formats": ("", "")}
    call |= change
    cache = (4, 1000, 8, call["dim"])
    spec = attention_spec(
        "flash_decode",
        (4, call["tokens"], 32, call["dim"]),
        *(cache, cache),
        *[np.dtype(call["dtype"])] * 3,
        causal=True,
        keys="cached",
        formats=call["formats"],
    )
    given = {name: call[name] for name in ("bias", "mask") if name in call}
    launch = dispatch.choose(Call.contiguous(spec, call["arch"], **given), TIERS)
    assert launch.variant in set(dispatch.variants(call["arch"]))
    if rows is None:
        assert launch.variant.entry == "decode_simt"
        return
    config = launch.variant.config
    assert launch.variant.entry == "decode_sm80"
    assert (config.rows, config.mask, config.bias) == (rows, True, has_bias)
    (arguments,) = launch.arguments
    addresses = collections.defaultdict(int, mask=1 << 20, bias=1 << 30)
    packed = arguments.pack(addresses)
    scores = params.SCORE_PARAMS.unpack(packed[params.DECODE_PARAMS.size :])
    assert scores["mask"] == 1 << 20
    assert scores["score_cols"] in (999, 1000)


@pytest.mark.parametrize(
    ("arch", "mask", "keys", "entry"),
    [
        ("sm_90a", KEY_MASK, "cached", "forward_sm80"),
        ("sm_90a", None, "cached", "forward_sm90"),
        ("sm_80", None, "paged", "forward_sm80"),
        ("sm_120", None, "cached", "forward_sm80"),
        ("sm_120", layout((1, 1, 1, 1), bool), "paged", "forward_sm80"),
        ("sm_75", None, "cached", "decode_simt"),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_prompts_over_caches_are_for_forward_kernels(arch, mask, keys, entry, ragged):
    lead, rows = ((), (2400,)) if ragged else ((4,), (4, 600))
    cache = (*lead, 1024, 8, 128)
    spec = attention_spec(
        "paged_attention",
        (*rows, 32, 128),
        *(cache, cache),
        *[np.dtype(np.float16)] * 3,
        causal=True,
        sequences=4 if ragged else None,
        keys=keys,
        page_size=16 if keys == "paged" else 0,
    )
    call = Call.contiguous(spec, arch, num_pages=256 if keys == "paged" else 0, mask=mask)
    launch = dispatch.choose(call)
    assert launch.variant in set(dispatch.variants(arch))
    beside = launch.beside and launch.beside.variant.entry
    assert entry in (launch.variant.entry, beside)
    if entry == "forward_sm80":
        assert launch.variant.config.cached
        (arguments,) = launch.arguments
        packed = arguments.pack(collections.defaultdict(int, seq_lens=1 << 20))
        fields = params.CACHE_PARAMS.unpack(packed[params.FORWARD_PARAMS.size :])
        assert fields["seq_lens"] == 1 << 20
        shift, pages = (4, 256) if keys == "paged" else (30, 4)
        assert (fields["page_shift"], fields["num_pages"]) == (shift, pages)


SCALES = Scales(
    *((0, 1, 1000, 1), (0, 0, 0, 0), 1),
    is_float32=False,
    has_minimum=False,
    paired=False,
    has_offset=False,
    rotated=False,
    aligned=True,
)


@pytest.mark.parametrize(
    ("dim", "tokens", "rows"),
    [(64, 1, 8), (128, 4, 16), (128, 40, 16), (256, 1, 8), (256, 3, 8), (208, 9, 8)],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_codes_are_for_tensor_cores(arch, dim, tokens, rows):
    """Of any number of rows, in as many tiles as it takes."""
    launch = dispatch.choose(over_codes(arch, dim, tokens))
    entry = "decode_codes_sm90" if arch == "sm_90a" and dim in (64, 128) else "decode_sm80"
    assert (launch.variant.entry, launch.variant.config.rows) == (entry, rows)
    assert launch.variant in set(dispatch.variants(arch))


def over_codes(
    arch, dim, tokens=1, batch=40, capacity=1000, format="int8", heads=(32, 8), **scales
):
    """A call of `flash_decode` over codes, with scales as `scales` say."""
    cache = (batch, capacity, heads[1], dim)
    spec = attention_spec(
        *("flash_decode", (batch, tokens, heads[0], dim), cache, cache),
        *[np.dtype(np.float16)] * 3,
        causal=True,
        keys="cached",
        formats=(format, format),
    )
    given = SCALES._replace(**scales)
    v_scales = given._replace(has_offset=False)
    call = Call.contiguous(spec, arch, k_scales=given, v_scales=v_scales)
    columns = dim // 2 if format == "int4" else dim
    row = heads[1] * columns
    assert call.strides[1] == (row * capacity, row, columns, 1)
    return call


INT4 = {
    "format": "int4",
    "strides": (16000, 2, 2000, 2),
    "minimum_strides": (16000, 2, 2000, 2),
    "has_minimum": True,
    "paired": True,
}


@pytest.mark.parametrize(
    ("dim", "heads", "options", "expected"),
    [
        (128, (32, 8), {}, (1, 8, 4)),
        (64, (32, 8), {}, (2, 8, 4)),
        (64, (32, 8), {"batch": 4}, (1, 8, 4)),
        (128, (32, 8), INT4, (2, 8, 4)),
        (128, (32, 8), INT4 | {"batch": 30}, (2, 8, 4)),
        (128, (32, 8), INT4 | {"batch": 29}, (1, 8, 4)),
        (128, (32, 8), INT4 | {"batch": 4}, (1, 8, 4)),
        (128, (32, 8), INT4 | {"batch": 4, "capacity": 1 << 20}, (2, 8, 4)),
        (64, (32, 8), INT4, (4, 16, 4)),
        (64, (32, 8), INT4 | {"batch": 4}, (2, 8, 4)),
        (64, (12, 6), INT4 | {"batch": 80}, (2, 8, 4)),
        (64, (24, 8), INT4, (4, 16, 4)),
        (64, (40, 8), INT4, (1, 8, 8)),
        (64, (64, 8), {}, (2, 16, 8)),
        (64, (32, 4), INT4 | {"batch": 80}, (4, 32, 8)),
        (64, (8, 1), {}, (1, 8, 8)),
        (64, (64, 4), {}, (1, 16, 16)),
        (64, (32, 8), {"tokens": 2}, (1, 8, 8)),
        (64, (16, 8), {"tokens": 2}, (1, 8, 4)),
        (64, (32, 8), {"has_offset": True}, (1, 8, 4)),
    ],
)
def test_neighbouring_key_heads_share_a_block(dim, heads, options, expected):
    """So many as have rows of 128 bytes together, if each one's queries are in one warp's tile;
    fewer where sequences are few."""
    below = tuple(tier for tier in TIERS if tier.name != "decode_sm90")
    launch = dispatch.choose(over_codes("sm_90a", dim, heads=heads, **options), below)
    config = launch.variant.config
    assert (config.heads, config.rows, config.warp_rows) == expected
    assert config.warp_keys == (64 if dim == 64 and config.warp_rows == 4 else 32)
    assert launch.variant in set(dispatch.variants("sm_90a"))
    row = heads[1] * dim // (2 if "format" in options else 1)
    panel = launch.tensor_maps["k"].shape[0]
    assert panel == min(128, config.heads * row // heads[1])
    assert launch.tensor_maps["k"].shape[2] * panel == row


@pytest.mark.parametrize(
    ("dim", "heads", "options", "clusters"),
    [
        (128, (32, 8), {"capacity": 8192}, (8, 1)),  # of int8
        (128, (32, 8), {"capacity": 8193}, None),  # four rows that decode_sm80.cu merges
        (128, (40, 8), {"capacity": 16384}, (8, 1)),
        (128, (40, 8), {"capacity": 16385}, None),
        (128, (24, 6), {"capacity": 8191}, (8, 1)),
        (128, (24, 6), {"capacity": 8192}, (8, 2)),
        (128, (24, 6), {"capacity": 16385}, None),
        (128, (32, 4), {"capacity": 8192}, (8, 3)),
        (128, (32, 4), {"capacity": 32768}, (4, 7)),
        (128, (32, 8), {"capacity": 8192, "batch": 2}, (4, 1)),
        (128, (32, 8), {"capacity": 4096, "batch": 4}, (2, 1)),
        (128, (32, 8), {"capacity": 4097, "batch": 4}, None),
        (128, (32, 8), {"capacity": 8192, "batch": 8}, (2, 1)),
        (128, (32, 8), {"capacity": 8193, "batch": 8}, None),
        (128, (32, 8), {"capacity": 8192, "batch": 7}, None),  # leaves multiprocessors idle
        (128, (32, 8), INT4 | {"capacity": 8192, "batch": 8}, None),
        (128, (32, 8), {"capacity": 1024, "batch": 9}, None),
        (128, (32, 8), INT4 | {"capacity": 8192}, (8, 1)),
        (128, (64, 8), INT4 | {"capacity": 8193}, None),
        (128, (72, 8), INT4 | {"capacity": 16384}, (8, 1)),
        (128, (32, 8), INT4 | {"capacity": 4096, "batch": 2}, (4, 1)),
        (128, (32, 8), INT4 | {"capacity": 4097, "batch": 2}, None),
        (64, (32, 8), {"capacity": 8191}, (8, 1)),
        (64, (32, 8), {"capacity": 8192}, (2, 8)),
        (64, (32, 8), {"capacity": 16384}, (2, 8)),
        (64, (32, 8), {"capacity": 16385}, None),
        (64, (32, 8), INT4 | {"capacity": 8192, "batch": 2}, (2, 4)),
        (64, (32, 8), {"capacity": 2048, "batch": 3}, (4, 1)),
        (64, (32, 8), {"capacity": 4097, "batch": 3}, None),
    ],
)
def test_clusters_over_codes(dim, heads, options, clusters):
    call = over_codes("sm_90a", dim, heads=heads, **({"batch": 1} | options))
    launch = dispatch.choose(call)
    assert launch.variant in set(dispatch.variants("sm_90a"))
    assert (launch.variant.entry == "decode_sm90") == (clusters is not None)
    if clusters is not None:
        cluster = launch.variant.config.cluster
        assert (cluster, launch.grid[0] // cluster) == clusters


def test_scales_that_lie_side_by_side_are_for_the_kernel_that_loads_apart():
    """Of int4, with minima between them."""

    def entry(*args, **options):
        launch = dispatch.choose(over_codes("sm_90a", *args, **options))
        assert launch.variant in set(dispatch.variants("sm_90a"))
        return launch.variant.entry

    assert entry(64) == entry(64, **INT4) == entry(128, **INT4) == "decode_codes_sm90"
    for strides in ((8000, 8, 1, 1), (8000, 1, 1004, 1), (8004, 1, 1000, 1), (0, 0, 1, 1)):
        assert entry(64, strides=strides) == "decode_sm80"
    assert entry(64, capacity=1004) == "decode_sm80"
    assert entry(64, is_float32=True) == "decode_sm80"
    assert entry(64, format="int4") == "decode_sm80"
    # Of 8 bits, where there are many pairs of a sequence and a key head, or many keys.
    assert entry(128) == entry(128, batch=32, capacity=2048) == "decode_codes_sm90"
    assert entry(128, batch=30) == "decode_sm80"
    # Fewer keys do where decode_sm80.cu's blocks share sequences unevenly, not of few pairs.
    four = {"heads": (32, 4), "capacity": 8192}
    assert entry(128, **four, batch=13) == entry(128, **four, batch=8) == "decode_codes_sm90"
    assert entry(128, heads=(32, 4), capacity=40000, batch=2) == "decode_sm80"
    # Those that have a sequence each need not merge.
    assert entry(128, batch=16, capacity=8200) == "decode_sm80"
    assert entry(128, batch=8, capacity=16384) == "decode_codes_sm90"


def test_clusters_copy_scales_that_lie_side_by_side_many_at_a_time():
    for options, packed in (({}, True), ({"is_float32": True}, False), ({"capacity": 1004}, False)):
        config = dispatch.choose(over_codes("sm_90a", 128, batch=1, **options)).variant.config
        assert config.cluster == 8
        assert config.packed_scales == packed


def cached(batch, heads, capacity, dim):
    cache = (batch, capacity, heads[1], dim)
    dtypes = [np.dtype(np.float16)] * 3
    q = (batch, 1, heads[0], dim)
    return attention_spec("flash_decode", q, cache, cache, *dtypes, keys="cached")
