"""The order in which the thread blocks of attention/forward_sm90.cu take tiles."""

from __future__ import annotations

import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu.dispatch.config_sm90 import SM90_LARGE_BLOCKS, SM90_TILES, Sm90ForwardConfig

#: A little more than L2 holds: not all of a section is needed at a time, and a block that has less
#: to do than others costs more. 70 MiB instead of 40: causal at head_dim 128, seqlen 8192 and 16384
#: 1.01 and 1.03 times as fast, 140 again slower (H200).
SECTION_BYTES = 70 << 20
SECTION_TILES = 4096
SEQUENCES_IN_TURN = 32  # of a batch of caches: up to so many are worked on at a time
LONG = 4  # times the mean length, of a varlen call
WAVES_SEEN = 8  # the last ones, of tiles over caches: those before are shared out well
SECTIONS_SEEN = 64  # by the search: after these it is the same again and again
#: Where tiles are taken while a kernel runs, between 0, when a block takes its next tile as it ends
#: one, and 1, when it does as it begins one: what fits 101 timings over caches and pages (H200).
TAKEN_AHEAD = 0.65


def sm90_section(spec: AttentionSpec, config: Sm90ForwardConfig, blocks: int) -> int:
    """How many heads' tiles are dealt out to the blocks at a time, the last rows' first; 0 where
    the tiles of all heads cost the same.

    The keys and values that their tiles see at the same time should stay in L2; among the counts
    for which they do, the best is the one that keeps the busiest block's sum of tiles lowest. For
    sequences of unknown lengths, of which some may be a few times as long as the mean, it is the
    most: the more tiles of a length there are, the less the last ones leave blocks idle. Under a
    causal mask tiles of all sequences take turns there (TilesByPlace of scheduler_sm90.cuh), so
    that of caches all sequences' keys should stay.
    """
    dynamic = config.varlen or config.seq_lens
    shared = 1 if config.pack_gqa else spec.heads_q // spec.heads_kv  # keys, by so many heads
    heads = spec.heads_kv * shared * (1 if dynamic else spec.batch)
    seqlen_k = spec.seqlen_k
    if spec.keys == "ragged":
        seqlen_k = min(seqlen_k, LONG * -(-seqlen_k // max(1, spec.batch)))
    key_bytes = (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize / shared
    window = sum(
        seqlen_k if side is None else side for side in (spec.window_left, spec.window_right)
    )

    def seen_bytes(section: int) -> float:
        rows = -(-blocks // section) * config.queries_of_tile(spec)  # of a head, at a time
        return section * min(seqlen_k, rows + window) * key_bytes

    if dynamic:
        in_turn = 1
        if spec.rows == "batched" and not config.bound_left and spec.batch <= SEQUENCES_IN_TURN:
            in_turn = spec.batch
        in_l2 = (n for n in range(1, heads + 1) if in_turn * seen_bytes(n) <= SECTION_BYTES)
        most = max(in_l2, default=1)
        return -(-heads // -(-heads // most))
    cost = costs_of_tiles(spec, config)
    if cost.min() == cost.max():
        return 0

    def busiest(section: int) -> float:
        load = np.zeros(blocks)
        for number, first in enumerate(range(0, heads, section)):
            tiles = np.repeat(cost[::-1], min(section, heads - first))
            place, block = np.divmod(np.arange(len(tiles)), blocks)
            backward = (place + number) % 2 == 1
            np.add.at(load, np.where(backward, blocks - 1 - block, block), tiles)
            if number == SECTIONS_SEEN:
                break
        return load.max() / load.sum()

    most = min(heads, max(1, SECTION_TILES // len(cost)))
    # Tiles that all blocks together have at the same time are read at the same time anyway: fewer
    # would leave blocks idle.
    stay = [
        section
        for section in range(1, most + 1)
        if seen_bytes(section) <= SECTION_BYTES or section * len(cost) <= blocks
    ]
    return min(stay or [1], key=busiest)


def blocks_of_keys(spec: AttentionSpec, config: Sm90ForwardConfig) -> np.ndarray:
    """Count the blocks of keys that some query of each tile of one head sees."""
    queries = config.queries_of_tile(spec)
    first_row = np.arange(0, spec.seqlen_q, queries)
    begin, end = _blocks_seen(spec, config, first_row, queries)
    return end - begin


def products_of_tiles(spec: AttentionSpec, config: Sm90ForwardConfig) -> np.ndarray:
    """Count the products of 64 queries with a block of keys that each tile of one head computes:
    of all its blocks, but for those that kSkipsBlocks in attention/layout_sm90.cuh leaves out."""
    first_row = np.arange(0, spec.seqlen_q, config.tile_m)
    begin, end = _blocks_seen(spec, config, first_row, config.tile_m)
    count = config.warpgroups * (end - begin)
    if config.elementwise or not (config.bound_left or config.bound_right):
        return count
    for row in range(0, config.tile_m, 64):
        own_begin, own_end = _blocks_seen(spec, config, first_row + row, 64)
        hidden = own_end < end if row < config.tile_m - 64 else own_begin > begin
        count = count - (hidden & (end - begin > 1))
    return count


def _blocks_seen(
    spec: AttentionSpec, config: Sm90ForwardConfig, first_row: np.ndarray, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first block of keys of which some of `rows` queries from each of `first_row` on see some,
    and the one after the last."""
    last_row = np.minimum(first_row + rows, spec.seqlen_q) - 1
    diagonal = spec.seqlen_k - spec.seqlen_q
    right = spec.seqlen_k + spec.seqlen_q if spec.window_right is None else spec.window_right
    left = spec.seqlen_k + spec.seqlen_q if spec.window_left is None else spec.window_left
    end = np.clip(last_row + diagonal + right + 1, 0, spec.seqlen_k)
    begin = np.clip(first_row + diagonal - left, 0, end)
    return begin // config.tile_n, -(-end // config.tile_n)


def costs_of_tiles(spec: AttentionSpec, config: Sm90ForwardConfig) -> np.ndarray:
    """What each tile of a head costs, in blocks of keys: those it sees, and about one more."""
    return 1.0 + blocks_of_keys(spec, config)


def time_of_head(spec: AttentionSpec, config: Sm90ForwardConfig) -> float:
    """About what all tiles of a head take one thread block, in an unnamed unit."""
    return float(costs_of_tiles(spec, config).sum()) * unit_of_time(config)


def time_of_call(spec: AttentionSpec, config: Sm90ForwardConfig, multiprocessors: int) -> float:
    """What the busiest thread block takes, in the same unit: of tiles that are dealt out at least,
    which is about that, as tiles of different costs are dealt out well; of tiles that blocks take
    in order that, as if caches were full. Of sequences of unknown lengths all but one may have a
    tile that is all but empty."""
    if spec.rows == "ragged":
        heads = config.heads_of_tiles(spec)
        tiles = -(-spec.seqlen_q // config.queries_of_tile(spec)) + spec.batch - 1
        return -(-heads * tiles // multiprocessors) * unit_of_time(config)
    costs = np.sort(costs_of_tiles(spec, config))[::-1]
    heads = spec.batch * config.heads_of_tiles(spec)
    tiles = len(costs) * heads
    if config.seq_lens:
        waves_before = max(0, -(-tiles // multiprocessors) - WAVES_SEEN)
        seen = costs[np.arange(waves_before * multiprocessors, tiles) // heads]
        before = (costs.sum() * heads - seen.sum()) / multiprocessors
        ahead = _busiest(seen, multiprocessors, ahead=True)
        free = _busiest(seen, multiprocessors, ahead=False)
        return float(before + TAKEN_AHEAD * ahead + (1 - TAKEN_AHEAD) * free) * unit_of_time(config)
    # Of n blocks' first kn + 1 tiles in order of their costs some block has k + 1.
    further = np.arange(0, tiles, multiprocessors)
    busiest = ((1 + np.arange(len(further))) * costs[further // heads]).max()
    return float(max(busiest, costs.sum() * heads / multiprocessors)) * unit_of_time(config)


def _busiest(costs: np.ndarray, blocks: int, *, ahead: bool) -> float:
    """When the last of some blocks is done, each of which takes a tile of each wave: in the order
    in which they end their last tiles or, `ahead`, in which they begin these."""
    begin = done = np.zeros(blocks)
    for first in range(0, len(costs), blocks):
        wave = costs[first : first + blocks]
        turn = np.argsort(begin if ahead else done, kind="stable")[: len(wave)]
        begin, done = done, done.copy()
        done[turn] += wave
    return float(done.max())


def unit_of_time(config: Sm90ForwardConfig) -> float:
    """What a block of keys takes, in scores of the fastest tile of its head_dims."""
    dims = config.head_dim, config.head_dim_v
    tiles = SM90_TILES[dims] + SM90_LARGE_BLOCKS.get(dims, ())
    speeds = {(tile.tile_n, tile.warpgroups): tile.speed for tile in tiles}
    speed = speeds.get((config.tile_n, config.warpgroups), 1.0)
    return config.tile_m * config.tile_n / speed
