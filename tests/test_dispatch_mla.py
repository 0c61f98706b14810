"""Which kernel serves a call of mla_decode."""

from __future__ import annotations

import collections
import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from cuattn._quantized import FORMATS
from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.arguments import Scales
from cuattn.gpu.dispatch.mla import MLA, MlaCall, choose_mla
from cuattn.gpu.params import DECODE_PARAMS, MLA_PARAMS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def described(
    *, heads=16, seqlen_q=1, batch=3, dtype=BFLOAT16, latent=512, rope=64, page_size=64,
    max_pages=8, joined=True, arch="sm_90a", window=None, format="", **options,
):  # fmt: skip
    width = latent + rope
    spec = attention_spec(
        "mla_decode",
        (batch, seqlen_q, heads, width),
        (batch, max_pages * page_size, 1, width),
        (batch, max_pages * page_size, 1, latent),
        *(np.dtype(dtype),) * 3,
        causal=True, window=window, scale=0.1, keys="paged", page_size=page_size, max_head_dim=576,
        formats=(format, format),
    )  # fmt: skip
    size = spec.dtype.itemsize

    def strides(*shape):
        found = [size]
        for n in shape[:0:-1]:
            found.append(found[-1] * n)
        return tuple(found[::-1])

    row = width if joined else latent
    pages = (page_size * row * size, row * size, 0, size)  # the head's axis is a new one
    latent_pages = pages
    if format:
        row_bytes = latent + rope * size
        latent_pages = (page_size * row_bytes, row_bytes, 0, 1)
        pages = (*latent_pages[:3], size)
        options.setdefault("scales", scales_of())
    return MlaCall(
        spec,
        arch,
        132,
        q_latent=strides(batch, seqlen_q, heads, latent),
        q_rope=strides(batch, seqlen_q, heads, rope),
        latent=latent_pages,
        rope=pages if joined else (page_size * rope * size, rope * size, 0, size),
        out=strides(batch, seqlen_q, heads, latent),
        num_pages=50,
        table_stride=max_pages,
        **options,
    )


def scales_of(groups=1, **changes):
    scales = Scales(
        (64, 1, 0, 0), (0, 0, 0, 0), groups, is_float32=False, has_minimum=False, paired=False,
        has_offset=False, rotated=False, aligned=True,
    )  # fmt: skip
    return scales._replace(**changes)


def packed(launch, struct):
    (arguments,) = (each for each in launch.arguments if each.struct is struct)
    return struct.unpack(arguments.pack(collections.defaultdict(int)))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_call_is_served_by_a_variant_that_is_compiled(arch, dtype):
    for call in (
        described(arch=arch, dtype=dtype),
        described(arch=arch, dtype=dtype, heads=128, latent=100, rope=0, page_size=1),
        described(arch=arch, dtype=dtype, top_k=100, num_splits="fixed"),
    ):
        assert choose_mla(call).main.variant in set(dispatch.variants(arch))


def test_rows_of_both_parts():
    launch = choose_mla(described(heads=16, seqlen_q=2), MLA.all[-1:]).main
    both = packed(launch, DECODE_PARAMS)
    own = packed(launch, MLA_PARAMS)
    assert (both["head_dim"], both["head_dim_v"], both["heads_kv"]) == (576, 512, 1)
    assert both["k_stride"] == both["v_stride"] == (64 * 576, 576, 0)
    assert both["q_stride"] == (2 * 16 * 512, 16 * 512, 512)
    assert own["q_rope_stride"] == (2 * 16 * 64, 16 * 64, 64)
    assert both["seqlen_q"] == own["tokens"] == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_hopper_has_a_kernel_of_its_own(heads, dtype):
    call = described(heads=heads, dtype=dtype if dtype == "float16" else BFLOAT16, window=(9, 0))
    launches = choose_mla(dataclasses.replace(call, num_splits=3))  # several launches alike
    assert launches.main.variant.source == "mla/decode_sm90.cu"
    assert launches.combine.variant.source == "mla/combine.cu"
    tiles = -(-heads // 64)
    assert launches.main.grid == (tiles, 132 // tiles)
    config = launches.combine.variant.config
    assert (config.columns, config.shared_rows) == (128, heads < 128)
    rows = min(heads, 64)
    assert launches.combine.grid == (3 * tiles, rows if config.shared_rows else rows // 8, 4)
    assert launches.task_bytes == 48 * 3 * tiles
    assert packed(launches.main, DECODE_PARAMS)["heads_kv"] == tiles
    assert launches.main.tensor_maps["latent"].strides == (1152, 128, 64 * 1152)
    assert launches.main.tensor_maps["latent"].l2_bytes == 128


@pytest.mark.parametrize(
    ("changes", "grid", "columns", "shared"),
    [
        ({"batch": 1, "max_pages": 256}, (1, 16, 4), 128, True),
        ({"batch": 4, "max_pages": 128}, (4, 16, 4), 128, True),
        ({"batch": 1, "heads": 128}, (2, 64, 2), 256, True),
        ({"batch": 8, "max_pages": 99}, (8, 16, 2), 256, True),
        ({"batch": 12, "max_pages": 99}, (12, 2, 4), 128, False),
        ({"batch": 16, "max_pages": 99}, (16, 2, 4), 128, False),
        ({"batch": 17}, (17, 2, 1), 512, False),  # eight partial results each, or less
        ({"batch": 33, "heads": 8}, (33, 1, 4), 128, False),
        ({"batch": 34, "heads": 8}, (34, 1, 1), 512, False),
        ({"batch": 4, "heads": 128}, (8, 8, 4), 128, False),
        ({"batch": 5, "heads": 128}, (10, 8, 1), 512, False),
        ({"batch": 12, "num_splits": "fixed"}, (12, 16, 4), 128, True),
        ({"batch": 100, "heads": 1}, (100, 1, 2), 256, True),
    ],
)
def test_what_merges_is_resident_at_a_time(changes, grid, columns, shared):
    combine = choose_mla(described(**({"page_size": 4, "max_pages": 128} | changes))).combine
    config = combine.variant.config
    assert (combine.grid, config.columns, config.shared_rows) == (grid, columns, shared)
    assert combine.variant in set(dispatch.variants("sm_90a"))


@pytest.mark.parametrize(
    ("changes", "merges"),
    [
        ({"batch": 66}, False),
        ({"batch": 67}, True),
        ({"batch": 66, "max_pages": 5}, True),
        ({"batch": 66, "num_splits": "fixed"}, True),
        ({"batch": 2, "heads": 64, "top_k": 256, "max_pages": 99}, False),
    ],
)
def test_two_pairs_are_not_split_where_each_tile_has_a_block(changes, merges):
    launches = choose_mla(described(**({"heads": 128, "max_pages": 4} | changes)))
    assert launches.main.variant.source == "mla/decode_sm90.cu"
    in_launch = launches.main.workspace_bytes > 0
    assert (launches.combine is not None or in_launch) is merges


def test_thread_blocks_merge_where_tiles_are_many():
    """With four partial results a tile or less, on average; a word for each."""
    for batch, splits, in_launch in ((16, None, 0), (17, None, 1), (67, None, 1), (67, "fixed", 0)):
        launches = choose_mla(described(heads=128, batch=batch, num_splits=splits))
        assert packed(launches.main, MLA_PARAMS)["merges_parts"] == in_launch
        assert (launches.combine is None) == bool(in_launch)
        part_bytes = launches.main.variant.config.part_bytes
        assert launches.main.workspace_bytes == in_launch * 2 * 132 * (part_bytes + 8)
        assert bool(launches.part_bytes) == bool(launches.task_bytes) == (not in_launch)


@pytest.mark.parametrize("format", ["", "int8"])
def test_rows_that_lie_too_far_apart_are_left_to_others(format):
    call = described(format=format, top_k=None if format else 100)
    assert "_sm90" in (near := choose_mla(call).main.variant.source) or "codes" in near
    page, slot = call.latent[:2]
    for strides in ((-page, slot), (page, -slot), ((16 << 32) // 49 & -16, slot)):
        far = choose_mla(dataclasses.replace(call, latent=(*strides, *call.latent[2:])))
        assert far.main.variant.source in ("mla/decode_sm80.cu", "mla/decode_simt.cu")
    far = choose_mla(dataclasses.replace(call, latent=((15 << 32) // 49 & -16, *call.latent[1:])))
    assert far.main.variant.source == near


@pytest.mark.parametrize(
    ("changes", "blocks", "tiles"),
    [
        ({"batch": 1}, 8, 1),  # one for each block of keys
        ({"batch": 1, "max_pages": 2}, 1, 1),  # one for each warpgroup
        ({"batch": 1, "heads": 32, "max_pages": 5}, 5, 1),
        ({"batch": 1, "heads": 32, "max_pages": 4}, 4, 1),
        ({"batch": 1, "heads": 32, "max_pages": 3}, 1, 1),
        ({"batch": 1, "max_pages": 9999}, 132, 1),
        ({"batch": 1, "heads": 3, "window": (9, 0), "page_size": 256}, 32, 1),
        ({"batch": 2, "heads": 8, "seqlen_q": 2, "max_pages": 99}, 66, 1),
        ({"batch": 64, "max_pages": 6}, 1, 1),
        ({"batch": 64, "max_pages": 7}, 2, 1),
        ({"batch": 500, "max_pages": 16}, 1, 1),
        ({"batch": 65535, "max_pages": 1}, 1, 1),
        ({"batch": 1, "heads": 128, "max_pages": 66}, 33, 4),
        ({"batch": 33, "heads": 128, "max_pages": 6}, 1, 4),
    ],
)
def test_thread_blocks_of_few_rows(changes, blocks, tiles):
    launches = choose_mla(described(**changes))
    launch = launches.main
    assert launch.variant.source == "mla/decode_few_sm90.cu"
    assert launch.variant in set(dispatch.variants("sm_90a"))
    assert launch.grid == (blocks, tiles, changes["batch"])
    each = launch.variant.config.workspace_bytes(blocks) if blocks > 1 else 0
    assert launch.workspace_bytes == tiles * changes["batch"] * each
    assert (launches.combine, launches.part_bytes, launches.task_bytes) == (None, 0, 0)


@pytest.mark.parametrize(("heads", "rows"), [(1, 16), (16, 16), (17, 32), (32, 32), (34, 32)])
def test_tiles_of_few_rows(heads, rows):
    assert choose_mla(described(heads=heads)).main.variant.config.rows == rows


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 33},
        {"heads": 128, "max_pages": 67},  # each tile reads all keys
        {"heads": 128, "batch": 34, "max_pages": 6},
        {"batch": 2, "max_pages": 8 * 132 + 1},  # lengths may differ
        {"batch": 500, "max_pages": 17},
        {"batch": 65536, "max_pages": 1},  # more than a grid's third axis has
        {"num_splits": 4},
        {"num_splits": "fixed"},
        {"page_size": 4},
        {"top_k": 10},
        {"heads": 17, "format": "int8"},
        {"arch": "sm_80"},
    ],
)
def test_what_few_rows_leave(changes):
    launch = choose_mla(described(**({"batch": 1} | changes))).main
    assert launch.variant.source != "mla/decode_few_sm90.cu"


@pytest.mark.parametrize(
    ("changes", "tier"),
    [
        ({"arch": "sm_80"}, "sm80"),
        ({"latent": 200}, "sm80"),
        ({"rope": 8, "arch": "sm_80", "top_k": 10}, "sm80"),
        ({"latent": 500}, "simt"),
        ({"rope": 4}, "simt"),
        ({"dtype": np.float32}, "simt"),
        ({"arch": "sm_86"}, "simt"),
    ],
)
def test_what_the_hopper_kernel_leaves(changes, tier):
    assert choose_mla(described(**changes)).main.variant.source == f"mla/decode_{tier}.cu"


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "tiles"), [(16, 8, 2), (48, 3, 3), (81, 1, 1), (128, 2, 4), (16, 4, 1)]
)
def test_heads_are_dealt_out_where_that_takes_no_more_tiles(heads, seqlen_q, tiles):
    launch = choose_mla(described(heads=heads, seqlen_q=seqlen_q, max_pages=999)).main
    assert packed(launch, DECODE_PARAMS)["heads_kv"] == tiles


@pytest.mark.parametrize(
    ("changes", "merges"),
    [
        ({}, True),
        ({"max_pages": 2}, False),  # a pair of blocks
        ({"max_pages": 4}, False),  # two, for which each tile has a thread block
        ({"max_pages": 5}, True),
        ({"num_splits": 1}, False),
        ({"num_splits": 2}, True),
        ({"top_k": 128}, False),
        ({"top_k": 257}, True),
        ({"top_k": 65, "num_splits": 2}, True),  # which cuts a pair in two
        ({"max_pages": 2, "num_splits": 3}, True),
        ({"max_pages": 1, "num_splits": 3}, False),
        ({"format": "int8", "max_pages": 1}, False),
    ],
)
def test_nothing_is_merged_where_nothing_can_be_split(changes, merges):
    launches = choose_mla(described(**({"heads": 128, "batch": 34} | changes)))
    by_launch = [launches.combine, launches.part_bytes, launches.task_bytes]
    in_launch = launches.main.workspace_bytes > 0
    assert [bool(n) for n in by_launch] == [merges and not in_launch] * 3
    assert merges or not in_launch


@pytest.mark.parametrize(
    ("changes", "box"),
    [
        ({"heads": 128}, (64, 64, 1, 1)),
        ({"heads": 16, "seqlen_q": 3, "batch": 20}, (64, 16, 3, 1)),
        ({"heads": 16, "seqlen_q": 4, "num_splits": 2}, (64, 16, 4, 1)),
        ({"heads": 16, "seqlen_q": 5}, (64, 16, 5, 1)),  # a tile of 80 rows
        ({"heads": 16, "seqlen_q": 8}, (64, 8, 8, 1)),  # two tiles of heads
        ({"heads": 128, "seqlen_q": 2}, (64, 32, 2, 1)),
        ({"heads": 128, "seqlen_q": 9, "top_k": 10}, (64, 64, 1, 1)),  # each query by itself
        ({"heads": 1, "seqlen_q": 100}, (64, 1, 64, 1)),  # two tiles of tokens
        ({"heads": 81}, None),
        ({"heads": 128, "format": "int8"}, None),
    ],
)
def test_queries_are_loaded_as_boxes(changes, box):
    launch = choose_mla(described(**({"max_pages": 999} | changes))).main
    maps = launch.tensor_maps
    rows = packed(launch, MLA_PARAMS)["query_rows"]
    if box is None:
        assert rows == 0
        assert "q" not in maps
        return
    assert rows == math.prod(box[1:])
    assert maps["q"].box == maps["q_rope"].box == box
    heads, tokens = changes["heads"], changes.get("seqlen_q", 1)
    by_query = "top_k" in changes
    assert maps["q"].shape == (512, heads, 1 if by_query else tokens, maps["q"].shape[3])
    assert maps["q_rope"].strides == tuple(stride // 8 for stride in maps["q"].strides)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 80),
        ({"heads": 40, "seqlen_q": 2}, 80),
        ({"heads": 65, "seqlen_q": 1}, 80),
        ({"seqlen_q": 10}, 80),  # two tiles, where three of 64 rows would not have equal heads
        ({"heads": 48, "seqlen_q": 3}, 64),  # which three have here
        ({"seqlen_q": 4}, 64),
        ({"seqlen_q": 6}, 64),
        ({"heads": 27, "seqlen_q": 5}, 64),  # rows of a tile are no box
        ({"batch": 1, "max_pages": 131 * 3}, 64),  # few keys
        ({"batch": 1, "max_pages": 132 * 3}, 80),
        ({"num_splits": 2}, 64),
        ({"num_splits": "fixed"}, 64),
        ({"page_size": 4}, 64),
    ],
)
def test_tiles_of_80_rows(changes, rows):
    call = described(**({"heads": 16, "seqlen_q": 5, "max_pages": 999} | changes))
    launches = choose_mla(call)
    assert launches.main.variant.config.rows == rows
    assert launches.combine.variant.config.rows == rows
    assert {launches.main.variant, launches.combine.variant} <= set(dispatch.variants("sm_90a"))
    if rows == 80:
        assert launches.main.variant.source == "mla/decode_80_sm90.cu"
        assert launches.part_bytes >= 2 * 132 * launches.main.variant.config.part_bytes


@pytest.mark.parametrize("changes", [{"page_size": 4}, {"top_k": 10}])
def test_keys_that_lie_apart_are_gathered(changes):
    calls = described(heads=128, max_pages=99), described(**changes)
    for call, gathers in zip(calls, (False, True), strict=True):
        launch = choose_mla(call).main
        assert launch.variant.config.gather is gathers
        assert (launch.tensor_maps["latent"] is None) is gathers


@pytest.mark.parametrize("format", ["int8", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize(
    ("arch", "heads", "latent", "tier"),
    [
        ("sm_90a", 33, 512, "codes_sm90"),
        ("sm_90a", 32, 512, "codes_sm90"),
        ("sm_90a", 16, 512, "codes_sm90"),
        ("sm_90a", 33, 496, "codes_sm90"),
        ("sm_80", 128, 512, "codes"),
    ],
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_codes_of_8_bits_have_kernels_of_their_own(format, arch, heads, latent, tier, groups):
    if latent != 512 and groups > 1:
        pytest.skip("other groups are the general kernel's")
    call = described(format=format, arch=arch, heads=heads, latent=latent, scales=scales_of(groups))
    launch = choose_mla(call).main
    assert launch.variant.source == f"mla/decode_{tier}.cu"
    assert launch.variant.config.latent_format == FORMATS[format].number
    assert launch.variant in set(dispatch.variants(arch))
    both = packed(launch, DECODE_PARAMS)
    row = latent + 128
    assert both["k_stride"] == (64 * row, row, 0)
    assert both["v_group"] == latent // groups
    assert packed(launch, MLA_PARAMS)["rope_stride"] == (32 * row, row // 2, 0)


def ragged(call, total):
    """The call with the queries of its sequences end to end."""
    spec = dataclasses.replace(call.spec, rows="ragged", seqlen_q=total)
    strides = {name: getattr(call, name)[1:] for name in ("q_latent", "q_rope", "out")}
    return dataclasses.replace(call, spec=spec, **strides)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        # A multiprocessor has eight blocks of keys of tiles of 64 rows, or more.
        ({"heads": 128, "batch": 66}, 32),
        ({"heads": 128, "batch": 67}, 64),
        ({"heads": 128, "batch": 1, "max_pages": 528}, 32),
        ({"heads": 128, "batch": 1, "max_pages": 529}, 64),
        ({"heads": 33, "batch": 132}, 32),
        ({"heads": 33, "batch": 133}, 64),
        ({"heads": 16, "seqlen_q": 4, "batch": 133}, 64),
        ({"heads": 128, "batch": 67, "top_k": 448}, 32),
        ({"heads": 128, "batch": 67, "top_k": 512}, 64),
        # Where rows are few, their number decides alone.
        ({"heads": 16, "batch": 1}, 16),
        ({"heads": 16, "batch": 999}, 16),
        ({"heads": 17, "batch": 1}, 32),
        ({"heads": 32, "batch": 999}, 32),
    ],
)
def test_codes_have_large_tiles_where_there_is_enough_work(changes, rows):
    launch = choose_mla(described(format="int8", **changes)).main
    assert launch.variant.source == "mla/decode_codes_sm90.cu"
    assert launch.variant.config.rows == rows


@pytest.mark.parametrize(("total", "rows"), [(66, 32), (67, 64)])
def test_tiles_of_ragged_queries_over_codes(total, rows):
    """There may be a tile for each sequence, and one for all their rows that fill one."""
    call = ragged(described(format="int8", heads=64, batch=66), total)
    assert choose_mla(call).main.variant.config.rows == rows


@pytest.mark.parametrize(("heads", "rows"), [(16, 16), (17, 32), (32, 32), (33, 64), (128, 64)])
@pytest.mark.parametrize(("batch", "max_pages"), [(1, 1), (999, 99)])
def test_fixed_splits_of_codes_have_tiles_by_rows_alone(heads, rows, batch, max_pages):
    call = described(
        format="int8", heads=heads, batch=batch, max_pages=max_pages, num_splits="fixed"
    )
    for each in (call, ragged(call, 10 * batch)):
        assert choose_mla(each).main.variant.config.rows == rows


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("changes", "key_rows"),
    [
        ({}, 16),
        ({"page_size": 16}, 16),
        ({"page_size": 8}, 8),
        ({"rope": 0}, 16),
        ({"page_size": 4}, 0),
        ({"top_k": 10}, 0),
    ],
)
def test_codes_are_loaded_as_boxes(changes, key_rows, heads):
    call = described(format="int8", heads=heads, **changes)
    launch = choose_mla(call).main
    assert packed(launch, MLA_PARAMS)["key_rows"] == key_rows
    maps = launch.tensor_maps
    if key_rows == 0:
        assert maps == {}
        return
    assert maps["latent"].shape == (512, call.spec.page_size, 1, 50)
    assert maps["latent"].strides == (call.latent[1], call.latent[0], call.latent[0])
    assert maps["latent"].box == (128, key_rows, 1, 1)
    if call.rope_dim == 0:
        assert maps["rope"] == maps["latent"]
        return
    assert maps["rope"].shape == (64, *maps["latent"].shape[1:])
    assert maps["rope"].strides == maps["latent"].strides
    assert maps["rope"].box == (64, key_rows, 1, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "int4"},
        {"scales": scales_of(8)},
        {"scales": scales_of(512)},
        {"scales": scales_of(rotated=True)},
        {"scales": scales_of(has_offset=True)},
        {"scales": scales_of(has_minimum=True)},
        {"dtype": np.float32},
        {"latent": 500},
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_other_codes_take_the_kernel_for_all(changes, arch):
    launch = choose_mla(described(**({"format": "int8", "arch": arch} | changes))).main
    assert launch.variant.source == "mla/decode_simt.cu"
    assert launch.variant.config.quantized
    assert launch.variant in set(dispatch.variants(arch))


def test_queries_with_indices_are_sequences_of_their_own():
    call = described(heads=16, seqlen_q=2, top_k=100, window=(7, 0))
    launch = choose_mla(call, MLA.all[-1:]).main
    both, own = packed(launch, DECODE_PARAMS), packed(launch, MLA_PARAMS)
    assert (both["batch"], both["seqlen_q"], both["capacity"]) == (6, 1, 100)
    assert both["q_stride"][0] == 16 * 512
    assert own["q_rope_stride"][0] == 16 * 64
    assert both["window_left"] == both["window_right"] == 1 << 30
    assert (own["tokens"], own["sequences"], own["index_stride"]) == (2, 3, 100)
    assert (own["window_left"], own["window_right"]) == (7, 0)


def test_a_call_of_no_pages_has_no_keys():
    launch = choose_mla(dataclasses.replace(described(), num_pages=0), MLA.all[-1:]).main
    assert packed(launch, DECODE_PARAMS)["capacity"] == 0
