"""The pass over a prefix that a batch shares, by the forward kernel of Hopper: what it is given,
and when. No GPU is asked."""

from __future__ import annotations

import collections
import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._spec import attention_spec
from cuattn.gpu import dispatch, tensormap
from cuattn.gpu.dispatch import Call, Partial
from cuattn.gpu.params import SM90_PARAMS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def spec_of(
    tokens, length, *, heads=8, group=4, dims=(128, 128), dtype=BFLOAT16, page_size=16, **options
):
    """One sequence of all queries, and of the prefix's keys; page_size None: these contiguous."""
    return attention_spec(
        "paged_attention",
        (1, tokens, heads * group, dims[0]),
        (1, length, heads, dims[0]),
        (1, length, heads, dims[1]),
        *[np.dtype(dtype)] * 3,
        keys="paged" if page_size else "batched",
        page_size=page_size or 0,
        **options,
    )


def choose(spec, arch="sm_90a", multiprocessors=132):
    """The launch of the forward kernel over a prefix in 200 pages, or contiguous, with rows of
    whole 16 bytes; None if it is left to the decoding kernel."""
    padded = dataclasses.replace(spec, head_dim=-(-spec.head_dim // 8) * 8)
    call = Call.contiguous(padded, arch, multiprocessors, num_pages=200)
    partial = Partial(first_key=0, lse_strides=(0, spec.seqlen_q))
    launch = dispatch.choose(dataclasses.replace(call, spec=spec, partial=partial))
    return launch if "attention" in launch.variant.source else None


def test_64_sequences_fill_the_device_once():
    """Two tiles of 128 rows for each of 8 key heads: in 8 parts 128 tiles for 132
    multiprocessors."""
    spec = spec_of(64, 32768)
    launch = choose(spec)
    assert dispatch.split_sm90.prefix_tiles(spec, launch.variant.config, 132) == (16, 8)
    assert launch.grid == (128,)
    assert launch.parts == 8
    config = launch.variant.config
    assert (config.pack_gqa, config.paged_kv, config.split_kv, config.seq_lens) == (
        *(True,) * 3,
        False,
    )
    assert config.out_dtype == "float32"
    assert launch.variant.config.tile_m == 128


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"dtype": np.float16}, True),
        ({"dims": (192, 128)}, True),
        ({"page_size": None}, True),
        ({"page_size": 256}, True),
        ({"arch": "sm_80"}, False),
        ({"arch": "sm_100"}, False),
        ({"dtype": np.float32}, False),
        ({"dims": (128, 4)}, False),
        ({"softcap": 3.0}, False),
        ({"scale": -1.0}, False),
        ({"scale": 0.0}, False),
        ({"page_size": 4}, False),
        ({"group": 65}, False),
        ({"tokens": 2}, False),  # 8 rows
        ({"tokens": 3}, True),
    ],
)
def test_what_it_serves(change, served):
    options = {"tokens": 64, "length": 32768} | change
    arch = options.pop("arch", "sm_90a")
    assert (choose(spec_of(**options), arch) is not None) == served


@pytest.mark.parametrize(
    ("batch", "length", "hopper", "elsewhere"),
    [
        (4, 4096, False, False),  # 24.0 µs with, 21.7 without; elsewhere 29.0
        (4, 8192, True, False),  # 28.4, 31.5; 33.3
        (16, 1024, False, False),  # 20.6, 17.0; 37.8
        (16, 2048, True, False),  # 22.2, 26.1; 39.4
        (16, 4096, True, True),  # 24.9, 43.9; 42.8
        (64, 512, True, False),  # 35.4, 38.2; 56.9
        (64, 2048, True, True),  # 44.9, 92.6; 75.4
    ],
)
def test_where_a_cascade_pays(batch, length, hopper, elsewhere):
    """As measured on an H200, 32 query heads on 8 of 128: "elsewhere" is its decoding kernel."""
    spec = attention_spec(
        "paged_attention",
        (batch, 1, 32, 128),
        (batch, length + 128, 8, 128),
        (batch, length + 128, 8, 128),
        *[BFLOAT16] * 3,
    )
    assert dispatch.cascade_pays(spec, length, "sm_90a") == hopper
    assert dispatch.cascade_pays(spec, length, "sm_80") == elsewhere


@given(
    tokens=st.integers(1, 3000),
    length=st.integers(1, 1 << 17),
    heads=st.integers(1, 130),
    group=st.integers(1, 64),
    dims=st.tuples(st.integers(1, 256), st.integers(1, 32).map(lambda n: 8 * n)),
    page_size=st.none() | st.sampled_from([8, 16, 32, 64, 128, 256]),
    multiprocessors=st.integers(1, 200),
)
def test_every_choice_is_listed_and_covers(
    tokens, length, heads, group, dims, page_size, multiprocessors
):
    spec = spec_of(tokens, length, heads=heads, group=group, dims=dims, page_size=page_size)
    launch = choose(spec, multiprocessors=multiprocessors)
    assert (launch is None) == (tokens * group < 9)
    if launch is None:
        return
    config = launch.variant.config
    assert launch.variant in set(dispatch.variants("sm_90a"))
    assert max(dims) <= config.head_dim == config.head_dim_v
    assert config.smem_bytes <= 227 * 1024
    tiles_of_part, parts = dispatch.split_sm90.prefix_tiles(spec, config, multiprocessors)
    assert launch.parts == parts
    assert launch.grid == (min(tiles_of_part * parts, multiprocessors),)
    assert tiles_of_part >= heads * -(-tokens // (config.tile_m // 64 * (64 // group)))
    assert 1 <= parts <= min(31, -(-length // config.tile_n))  # every part has keys
    if page_size is not None:
        box = math.gcd(page_size, config.tile_n)
        assert box == config.tile_n or box & (box - 1) == 0  # whole blocks, or powers of two
        assert config.tile_n // box <= 32  # a lane brings one box


def sm90_params(launch):
    """The fields of Sm90Params as they are launched, with addresses of 0."""
    names = ("q", "k", "v", "bias", "mask", "k_pair", "v_pair", "q_rope", "k_rope")
    maps = {f"{array}_map": b"" for array in names}
    return SM90_PARAMS.unpack(launch.arguments[1].pack(collections.defaultdict(int, maps)))


@given(
    group=st.integers(1, 64),
    heads=st.integers(1, 5),
    row=st.integers(0, 500),
    data=st.data(),
)
def test_copies_bring_the_rows_that_are_written_out(group, heads, row, data):
    """A row's token and head as Tile::packed of attention/tile_sm90.cuh has them, and the element
    that TMA puts there.
    """
    strides = np.empty((1, 100, heads * group, 128), BFLOAT16).strides
    spec = spec_of(100, 512, heads=heads, group=group, page_size=None)
    queries = choose(spec).tensor_maps["q"]
    assert tensormap.addressable(queries.strides)
    head_kv = data.draw(st.integers(0, heads - 1))
    tokens, index = 64 // group, row % 64
    if index >= tokens * group:  # an idle row
        return
    box = (index % group, index // group)  # (head of the group, token): the first runs fastest
    assert box < (queries.box[1], queries.box[2] + 1)
    coordinates = (head_kv * group + box[0], row // 64 * tokens + box[1], 0)
    offset = sum(c * s for c, s in zip(coordinates, queries.strides, strict=True))
    token, head = row // 64 * tokens + index // group, head_kv * group + index % group
    assert offset == token * strides[1] + head * strides[2]
    assert (coordinates[1] < queries.shape[2]) == (token < 100)
    assert np.prod(queries.box[1:]) <= 64


@pytest.mark.parametrize("page_size", [8, 32, 128, 256, None])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_are_found_in_their_pages(head_dim, page_size):
    """As page_of_lane and load_pages of attention/produce_sm90.cuh find them."""
    spec = spec_of(64, 1024, heads=2, dims=(head_dim, head_dim), page_size=page_size)
    launch = choose(spec)
    config, keys = launch.variant.config, launch.tensor_maps["k"]
    plan = sm90_params(launch)
    assert keys == launch.tensor_maps["v"]
    assert tensormap.addressable(keys.strides)
    assert keys.box == (64, 1 << plan["box_shift"], 1, 1)
    assert plan["num_splits"] == launch.parts
    for block in (0, 3):
        for lane in range(config.tile_n >> plan["box_shift"]):
            key = block * config.tile_n + (lane << plan["box_shift"])
            page, slot = key >> plan["page_shift"], key & (1 << plan["page_shift"]) - 1
            assert slot + keys.box[1] <= keys.shape[1]
            assert page < keys.shape[3]
            offset = sum(c * s for c, s in zip((slot, 1, page), keys.strides, strict=True))
            row = key if page_size is None else page * page_size + slot
            assert offset == np.ravel_multi_index((row, 1, 0), (1 << 15, 2, head_dim)) * 2
