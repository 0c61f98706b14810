"""Estimates of decoding kernels' times, and the choice by them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.dispatch import decoding_times


def spec_of(batch, heads, heads_kv, head_dim, keys, *, tokens=1):
    cache = (batch, keys, heads_kv, head_dim)
    return attention_spec(
        "flash_decode",
        (batch, tokens, heads, head_dim),
        *(cache, cache),
        *[np.dtype(np.float16)] * 3,
        causal=True,
        keys="cached",
    )


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (32, 2)])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_more_keys_take_longer(batch, heads, head_dim):
    """But for what another number of blocks changes."""
    for keys in (500, 5000, 50000):
        fewer, more = (spec_of(batch, *heads, head_dim, n) for n in (keys, 2 * keys))
        assert decoding_times.splits_us(fewer, 132) < decoding_times.splits_us(more, 132)
        us = [decoding_times.clusters_us(spec, 132) for spec in (fewer, more)]
        assert us[0] < us[1] or np.isinf(us).all()
        for parts in (1, 4):
            us = [decoding_times.packed_us(spec, 132, parts, 1, 128) for spec in (fewer, more)]
            assert us[0] < us[1]


def test_the_least_estimate_is_chosen():
    chosen = set()
    for batch, heads, head_dim, keys in itertools.product(
        (1, 2, 8, 30), ((8, 1), (32, 2), (32, 8), (12, 12)), (64, 96, 128, 256), (3000, 9000, 70000)
    ):
        call = dispatch.Call.contiguous(spec_of(batch, *heads, head_dim, keys), "sm_90a", 132)
        if decoding_times.lone_blocks(call.spec, 132) is not None:
            continue
        launch = dispatch.choose(call, dispatch.current_tiers())
        us = {
            "decode_sm90": decoding_times.clusters_us(call.spec, 132),
            "decode_sm80": decoding_times.splits_us(call.spec, 132),
        }
        packing = dispatch.routing.best_packing(call) if heads[0] > heads[1] else None
        if packing is not None:
            us["forward_sm90"] = decoding_times.packed_us(
                call.spec, 132, packing.parts, packing.warpgroups, packing.tile_n
            )
        assert us[launch.variant.entry] == min(us.values()), (call.spec, us)
        chosen.add(launch.variant.entry)
    assert chosen == {"decode_sm90", "decode_sm80", "forward_sm90"}


def test_many_parts_of_few_rows_are_merged_by_several_warps():
    merged = dispatch.merge_of_cut_keys
    assert merged("float32", "float16", 9, 1 << 14).config.many_parts
    assert not merged("float32", "float16", 8, 1 << 14).config.many_parts
    assert not merged("float32", "float16", 9, (1 << 14) + 1).config.many_parts
    assert not merged("float64", "float64", 9, 100).config.many_parts
    listed = set(dispatch.variants("sm_90a"))
    for parts, out in itertools.product((2, 100), ("float16", "bfloat16")):
        assert merged("float32", out, parts, 100) in listed
