"""Estimates of what kernels take over caches on Hopper (cuattn/gpu/dispatch/decoding_times.py)."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.dispatch import decoding_times, parts_sm90, routing
from cuattn.gpu.dispatch.launch import Call


def over_cache(heads, dim, batch, keys, tokens=1):
    dtype = np.dtype(ml_dtypes.bfloat16)
    cache = (batch, keys, heads[1], dim)
    shape = (batch, tokens, heads[0], dim)
    return attention_spec(
        "flash_decode", shape, cache, cache, dtype, dtype, dtype, causal=True, keys="cached"
    )


def packed_us(spec, parts):
    tile_n = routing.SPLIT_TILE_KEYS[parts_sm90.part_head_dim(spec)]
    warpgroups = parts_sm90.packed_warpgroups(spec)
    return decoding_times.packed_us(spec, 132, parts, warpgroups, tile_n)


# Microseconds of an H200: heads, head_dim, sequences, keys.
CLUSTERS = [
    ((8, 1), 128, 1, 100000, 18.1),
    ((16, 4), 64, 1, 32768, 13.8),
    ((32, 8), 128, 1, 32768, 36.8),
    ((32, 8), 256, 1, 16384, 37.1),
    ((56, 8), 192, 2, 8350, 33.7),
    ((16, 1), 128, 1, 500000, 69.5),
]
SPLITS = [
    ((32, 8), 128, 1, 65536, 67.0),
    ((64, 8), 64, 1, 49152, 30.5),
    ((12, 12), 128, 28, 2942, 120.4),
    ((6, 1), 80, 6, 132277, 69.4),
]
PACKED = [
    ((32, 2), 96, 1, 177664, 64, 41.5),
    ((12, 2), 256, 1, 15131, 48, 15.5),
    ((48, 1), 112, 117, 15875, 1, 207.4),
    ((48, 2), 96, 65, 19961, 2, 264.7),
]


@pytest.mark.parametrize(("heads", "dim", "batch", "keys", "us"), CLUSTERS)
def test_clusters_take_as_long_as_measured(heads, dim, batch, keys, us):
    spec = over_cache(heads, dim, batch, keys)
    assert decoding_times.clusters_us(spec, 132) == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(("heads", "dim", "batch", "keys", "us"), SPLITS)
def test_splits_take_as_long_as_measured(heads, dim, batch, keys, us):
    spec = over_cache(heads, dim, batch, keys)
    assert decoding_times.splits_us(spec, 132) == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(("heads", "dim", "batch", "keys", "parts", "us"), PACKED)
def test_packed_tiles_take_as_long_as_measured(heads, dim, batch, keys, parts, us):
    assert packed_us(over_cache(heads, dim, batch, keys), parts) == pytest.approx(us, rel=0.1)


@given(
    st.integers(1, 8),
    st.integers(1, 16),
    st.sampled_from([64, 80, 96, 128, 192, 256]),
    st.integers(1, 300),
    st.integers(1, 1 << 18),
    st.integers(1, 132),
)
def test_twice_the_keys_take_no_less(heads, group, dim, batch, keys, parts):
    few, many = (over_cache((heads * group, heads), dim, batch, n) for n in (keys, 2 * keys))
    us = [decoding_times.splits_us(spec, 132) for spec in (few, many)]
    assert 0 < us[0] <= us[1]
    us = [packed_us(spec, parts) for spec in (few, many)]
    assert 0 < us[0] <= us[1]
    us = [decoding_times.clusters_us(spec, 132) for spec in (few, many)]
    assert 0 < us[0] <= us[1] * decoding_times.AS_FAST


@given(
    st.integers(1, 14),
    st.sampled_from([64, 80, 128, 192, 256]),
    st.integers(1, 70),
    st.integers(1, 1 << 18),
)
def test_clusters_fit_on_the_device_at_a_time(heads, dim, batch, keys):
    clusters = decoding_times.clusters_of_pair(over_cache((heads, heads), dim, batch, keys), 132)
    pairs = heads * batch
    assert (clusters is None) == (pairs > decoding_times.CLUSTERS[2])
    if clusters is not None:
        assert pairs * clusters.count <= decoding_times.CLUSTERS[clusters.size]


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(8, 1), (16, 2), (32, 8), (8, 8)])
@pytest.mark.parametrize("keys", [2000, 20000, 200000])
def test_the_least_estimate_is_chosen(dim, heads, keys):
    spec = over_cache(heads, dim, 1, keys)
    call = Call.contiguous(spec, "sm_90a", 132)
    us = {
        "decode_sm90": decoding_times.clusters_us(spec, 132),
        "decode_sm80": decoding_times.splits_us(spec, 132),
    }
    packing = routing.best_packing(call) if routing.can_split(call) else None
    if packing is not None:
        us["forward_sm90"] = packed_us(spec, packing.parts)
    assert dispatch.choose(call).variant.entry == min(us, key=us.get)


def test_many_parts_are_merged_by_a_variant_where_columns_are_few():
    few, many = dispatch.decoding.MOST_VECS_OF_MANY_PARTS, dispatch.decoding.MANY_PARTS

    def chosen(dtype, parts, vecs):
        return dispatch.merge_of_cut_keys(dtype, "bfloat16", parts, vecs).config.many_parts

    assert chosen("float32", many, few)
    assert not chosen("float32", many - 1, few)
    assert not chosen("float32", many, few + 1)
    assert not chosen("bfloat16", many, few)
    assert dispatch.merge_of_cut_keys("float32", "bfloat16", many, few) in dispatch.variants(
        "sm_90a"
    )
