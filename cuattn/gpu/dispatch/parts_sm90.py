"""Into how many parts attention/forward_sm90.cu cuts the keys of plain arrays, where few queries
over many keys would leave multiprocessors idle, and in what tiles.

The number must not depend on the batch, nor must the tiles' keys: :func:`cuattn.flash_attention`
gives a sequence the same result, bit for bit, whatever the batch. So the choice is what is best for
a few sequences, among those that take many of them little longer than whole keys, and one so much
less that it is worth that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from cuattn._spec import AttentionSpec
from cuattn.gpu.dispatch.config_sm90 import (
    SM90_MANY_KEYS,
    SM90_TILES,
    Sm90ForwardConfig,
    configs_of,
)
from cuattn.gpu.dispatch.order_sm90 import blocks_of_keys, time_of_call, unit_of_time

WARPGROUP_ROWS = 64
MAX_PARTS = 128
#: Keys of a block in plain arrays, where the rows of a tile are those of all heads of a group, by
#: head_dim.
PART_TILE_KEYS = {64: (128,), 96: (128,), 128: (128, 176), 192: (112,), 256: (80,)}
#: Where they are 192 queries of one head, of which three warpgroups hide more.
PART_TILE_KEYS_OF_ONE_HEAD = {64: 128, 96: 112, 128: 80}
#: What one multiprocessor computes in a microsecond with the fastest tile, by the larger of the
#: padded head_dims (H200).
PART_FLOPS = {64: 3.9e6, 96: 4.8e6, 128: 5.3e6, 192: 6.0e6, 256: 5.6e6}
READ_BYTES = 4.2e6  # of keys and values in a microsecond
MERGE_US = 4.0  # what a second launch takes, which merges the parts
PART_US = 0.2  # that merging a part takes at least
MERGE_BYTES = 2.5e6  # of the parts that are read in a microsecond
#: Blocks of keys which a tile's beginning and end take as long as, by padded head_dim.
TILE_STEPS = {64: 1.0, 96: 2.0, 128: 0.7, 192: 2.0, 256: 3.0}
ALONE_SPEED = 0.65  # of a warpgroup's products, of one of two: as SM90_TILES of config_sm90.py say
FASTER_FOR_ONE = 1.2  # at least
#: How much longer than with whole keys many sequences take at most, and at which power of that one
#: sequence has to gain: below `HEADS_OF_MANY` key heads, and from there on, where a few sequences
#: fill the device already. By the model; as measured they take up to 5% longer than that.
HEADS_OF_MANY = 8
SLOWER_FOR_MANY = (1.13, 6), (1.045, 12)
FEW = (1, 2, 3, 4, 6, 8)  # sequences


class Packing(NamedTuple):
    """How Hopper's forward kernel shares out a call some of whose keys may be in parts."""

    parts: int  # that the keys are cut into
    warpgroups: int  # of 64 rows each
    tile_n: int  # keys of a block
    pack_gqa: bool = True  # else the rows of a tile are queries of one head
    even: bool = False  # all keys are shared out evenly over the thread blocks, in place of parts


def packed_warpgroups(spec: AttentionSpec) -> int:
    """How many warpgroups, of 64 rows each, a tile of packed rows has.

    One where it has all queries: a second would multiply as many rows of zeros. Else two, as the
    parts of a tile's keys are counted from the first key that one of its rows sees: under a causal
    mask other tiles have other parts, and other bits.
    """
    return 1 if packed_tiles(spec, 1) == 1 else 2


def packed_tiles(spec: AttentionSpec, warpgroups: int) -> int:
    """How many tiles of packed rows a sequence and key head have."""
    queries = WARPGROUP_ROWS // (spec.heads_q // spec.heads_kv) * warpgroups
    return -(-spec.seqlen_q // queries)


def part_head_dim(spec: AttentionSpec) -> int:
    """The padded head_dim of the tiles that a call whose keys are cut into parts has."""
    return next(n for n in PART_TILE_KEYS if max(spec.head_dim, spec.head_dim_v) <= n)


def part_config(
    dtype: str,
    head_dim: int,
    packing: Packing,
    *,
    bounded: bool = True,
    paged: bool = False,
    lens: bool = False,
    split: bool = True,
) -> Sm90ForwardConfig:
    """The Config for keys in parts, or of whole keys whose results are merged with others."""
    return Sm90ForwardConfig(
        dtype,
        head_dim,
        head_dim,
        tile_n=packing.tile_n,
        warpgroups=packing.warpgroups,
        q_stages=1 if head_dim > 128 or packing.tile_n > 128 else 2,
        bound_left=False,
        bound_right=bounded,
        varlen=False,
        score=False,
        elementwise=False,
        pack_gqa=packing.pack_gqa,
        paged_kv=paged,
        seq_lens=lens,
        split_kv=split,
        out_dtype="float32" if split else "",
        even_keys=packing.even,
    )


def plain_packings(head_dim: int) -> Iterator[Packing]:
    """The tiles of calls over plain arrays whose keys are cut into parts, by padded head_dim."""
    for tile_n in PART_TILE_KEYS[head_dim]:
        for warpgroups in (1, 2):
            yield Packing(2, warpgroups, tile_n)
    if head_dim in PART_TILE_KEYS_OF_ONE_HEAD:
        yield Packing(2, 3, PART_TILE_KEYS_OF_ONE_HEAD[head_dim], pack_gqa=False)


@functools.lru_cache(maxsize=4096)
def best_parts(spec: AttentionSpec, multiprocessors: int) -> Packing | None:
    """How a call over plain arrays is best shared out with its keys in parts; None where whole keys
    are as fast."""
    one = dataclasses.replace(spec, batch=1)
    wholes = list(_configs_of_whole_keys(one))
    alone = min(time_of_call(one, config, multiprocessors) * _flop_us(config) for config in wholes)
    alone = max(alone, _reading_us(one))
    many = min(_Tile(one, config, multiprocessors).us_of_many(1) for config in wholes)
    most, power = SLOWER_FOR_MANY[one.heads_kv >= HEADS_OF_MANY]
    best, least = None, math.inf
    head_dim, warpgroups = part_head_dim(one), packed_warpgroups(one)
    for packing in plain_packings(head_dim):
        if packing.pack_gqa and packing.warpgroups != warpgroups:
            continue
        tile = _Tile(one, part_config(one.dtype.name, head_dim, packing), multiprocessors)
        for parts in range(2, min(tile.blocks, MAX_PARTS) + 1):
            slower = tile.us_of_many(parts) / many
            if slower > most:
                break
            faster = max(FASTER_FOR_ONE, slower**power)
            if faster * tile.us(parts, 1) > alone:
                continue
            mean = sum(math.log(tile.us(parts, batch)) for batch in FEW)
            if mean < least:
                best, least = packing._replace(parts=parts), mean
    return best


class _Tile:
    """What a sequence takes in tiles of a kind, in microseconds."""

    def __init__(
        self, spec: AttentionSpec, config: Sm90ForwardConfig, multiprocessors: int
    ) -> None:
        self.config = config
        blocks = blocks_of_keys(spec, config)
        heads = config.heads_of_tiles(spec)
        self.tiles = len(blocks) * heads  # of whole keys
        self.blocks = int(blocks.max())
        self._all_blocks = int(blocks.sum()) * heads
        self._block_us = unit_of_time(config) * _flop_us(config)
        self._multiprocessors = multiprocessors
        self._reading_us = _reading_us(spec)
        self._steps = TILE_STEPS[part_head_dim(spec)]
        self._part_us = spec.seqlen_q * spec.heads_q * 4 * spec.head_dim_v / MERGE_BYTES

    def us(self, parts: int, batch: int) -> float:
        """Of some sequences."""
        block_us = self._block_us
        if self.config.warpgroups == 1:  # by its own speed calls would come that decoding serves
            block_us *= 2 * ALONE_SPEED  # faster: 4 x 12 queries over 32768 keys in 0.88 (H200)
        waves = -(-self.tiles * batch * parts // self._multiprocessors)
        products = waves * (-(-self.blocks // parts) + self._steps) * block_us
        merging = parts * max(PART_US, batch * self._part_us)
        return max(products, batch * self._reading_us) + MERGE_US + merging

    def us_of_many(self, parts: int) -> float:
        """Of each of so many sequences that no multiprocessor is idle."""
        steps = self._all_blocks + self._steps * self.tiles * parts
        # Nor does memory bring keys while a tile begins and ends.
        step_us = max(self._block_us / self._multiprocessors, self._reading_us / self._all_blocks)
        merging = parts * self._part_us if parts > 1 else 0.0
        return steps * step_us + merging


def _configs_of_whole_keys(spec: AttentionSpec) -> Iterator[Sm90ForwardConfig]:
    """The variants of a plain call for the same bounds."""
    dims = spec.head_dim, spec.head_dim_v
    padded = next(tile for tile in SM90_TILES if dims[0] <= tile[0] and dims[1] <= tile[1])
    many_keys = spec.seqlen_k >= SM90_MANY_KEYS
    for config in configs_of(
        spec.dtype.name, padded, False, False, varlen=False, cached=False, many_keys=many_keys
    ):
        bounds = config.bound_left, config.bound_right
        if bounds == (False, spec.window_right is not None):
            yield config


def _flop_us(config: Sm90ForwardConfig) -> float:
    """What a score takes of the microseconds that `unit_of_time` counts in scores."""
    dims = config.head_dim, config.head_dim_v
    return 2.0 * sum(dims) / PART_FLOPS[max(dims)]


def _reading_us(spec: AttentionSpec) -> float:
    """What it takes to read all keys and values once."""
    columns = spec.head_dim + spec.head_dim_v
    return spec.batch * spec.heads_kv * spec.seqlen_k * columns * spec.dtype.itemsize / READ_BYTES
