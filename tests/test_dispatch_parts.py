"""Into how many parts Hopper's forward kernel cuts the keys of plain arrays, and in what tiles."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from cuattn._spec import AttentionSpec, attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.dispatch import Call, parts_sm90
from cuattn.gpu.dispatch.parts_sm90 import Packing, best_parts

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SMS = 132


def attend(tokens, keys, heads, dim, causal=True, batch=1) -> AttentionSpec:
    q = batch, tokens, heads[0], dim
    k = batch, keys, heads[1], dim
    return attention_spec("flash_attention", q, k, k, *[BFLOAT16] * 3, causal=causal)


def drawn(count: int) -> list[AttentionSpec]:
    """Some calls of few queries over many keys."""
    rng = np.random.default_rng(3)
    specs = []
    for _ in range(count):
        tokens, keys = np.exp(rng.uniform(np.log([16, 2048]), np.log([2048, 65536]))).astype(int)
        heads_kv, group = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2, 4, 8]))
        dim = int(rng.choice([32, 64, 80, 128, 160, 256]))
        causal = bool(rng.random() < 0.5)
        specs.append(attend(int(tokens), int(keys), (heads_kv * group, heads_kv), dim, causal))
    return specs


@pytest.fixture
def whole_us():
    """What whole keys take one sequence, and each of many."""

    def of(spec):
        configs = list(parts_sm90._configs_of_whole_keys(spec))
        tiles = [parts_sm90._Tile(spec, config, SMS) for config in configs]
        alone = min(
            parts_sm90.time_of_call(spec, config, SMS) * parts_sm90._flop_us(config)
            for config in configs
        )
        return max(alone, parts_sm90._reading_us(spec)), min(t.us_of_many(1) for t in tiles)

    return of


def test_parts_are_worth_what_many_sequences_pay(whole_us):
    cut = 0
    for spec in drawn(150):
        packing = best_parts(spec, SMS)
        if packing is None:
            continue
        cut += 1
        head_dim = parts_sm90.part_head_dim(spec)
        assert packing._replace(parts=2) in parts_sm90.plain_packings(head_dim)
        tile = parts_sm90._Tile(spec, parts_sm90.part_config("bfloat16", head_dim, packing), SMS)
        alone, many = whole_us(spec)
        slower = tile.us_of_many(packing.parts) / many
        most, power = parts_sm90.SLOWER_FOR_MANY[spec.heads_kv >= parts_sm90.HEADS_OF_MANY]
        assert slower <= most
        faster = alone / tile.us(packing.parts, 1)
        assert faster >= max(parts_sm90.FASTER_FOR_ONE, slower**power)
    assert cut > 30


def test_the_batch_has_no_say():
    for spec in drawn(60):
        many = dataclasses.replace(spec, batch=37)
        assert best_parts(spec, SMS) == best_parts(many, SMS)


@pytest.mark.parametrize(
    ("call", "packing"),
    [
        ((562, 26284, (1, 1), 160), Packing(8, 2, 112)),
        ((875, 38587, (4, 4), 128), Packing(9, 2, 176)),
        ((183, 41402, (2, 2), 64), Packing(16, 3, 128, pack_gqa=False)),  # 256 rows would be slower
        ((517, 40038, (1, 1), 96), Packing(11, 3, 112, pack_gqa=False)),
        ((162, 7333, (8, 1), 128), Packing(4, 2, 128)),
        ((128, 8192, (32, 8), 128), None),  # one sequence would gain less than many lose
        ((128, 16384, (32, 8), 128), Packing(2, 2, 176)),
        ((256, 16384, (32, 8), 128), None),
        ((60, 15936, (4, 4), 192), Packing(7, 1, 112)),  # what many pay is memory's time
        ((280, 5474, (1, 1), 96), None),  # two parts would cost many sequences too much
    ],
)
def test_parts_of_some_calls(call, packing):
    spec = attend(*call)
    assert best_parts(spec, SMS) == packing
    launch = dispatch.choose(Call.contiguous(spec, "sm_90a"))
    config = launch.variant.config
    assert launch.parts == (packing.parts if packing else 1)
    if packing:
        assert (config.warpgroups, config.tile_n, config.pack_gqa) == packing[1:4]


def test_tiles_of_one_head_are_as_many_as_its_queries_fill():
    spec = attend(517, 40038, (2, 1), 96, batch=3)
    call = Call.contiguous(spec, "sm_90a")
    launch = dispatch.choose(call)
    assert not launch.variant.config.pack_gqa
    assert launch.grid[0] == min(SMS, 2 * 3 * 3 * launch.parts)
