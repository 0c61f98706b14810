"""Estimates, in microseconds, of what each kernel takes for a call over caches on Hopper.

Three ways are compared: clusters of thread blocks for each pair of a sequence and a key head
(decoding/decode_sm90.cu), keys that all multiprocessors share evenly (decoding/decode_sm80.cu), and
attention/forward_sm90.cu's tiles of all rows of a group, packed, whose keys are cut into parts.
Each is the fastest of them somewhere. Short sequences have one thread block for each pair, by
bounds, and longer ones where all pairs run at a time, by an estimate: `lone_blocks`.

The constants are fitted to some 1200 times that one H200 took for 429 calls at random and at the
bounds of earlier rules. Half of the estimates are within 3.1% of the time, and the way with the
least is 0.7% slower than the fastest on average (docs/notes/decoding.md has the measurements).

There are two other models. The one in parts_sm90.py is of the same packed tiles over plain arrays,
where the choice must not depend on the batch, so it compares few sequences with many. Those in
routing.py (`forward_us`, `decoding_us`) serve every architecture, and only tell a decoding kernel
from a forward kernel where these differ much.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from cuattn._quantized import code_columns
from cuattn._spec import AttentionSpec
from cuattn.gpu.dispatch.launch import MOST_OF_GRID
from cuattn.gpu.dispatch.parts_sm90 import WARPGROUP_ROWS, packed_tiles, part_head_dim

#: Sizes of clusters that decode_sm90.cu comes with, and for how many pairs of a sequence and a key
#: head: as many as run at a time on an H200's 132 multiprocessors. A block has one of these, or in
#: clusters of 4 half of one, where there are more pairs than `WHOLE_PAIRS`.
CLUSTERS = {8: 14, 4: 33, 2: 66}
WHOLE_PAIRS = 30
ROWS_OF_TILE = 16  # of decode_sm90.cu, at most
DECODE_HEAD_DIMS = (64, 128, 256)  # of both decoding kernels

#: decode_sm90.cu's clusters: what the launch takes without keys; what a thread block takes for a
#: key with 8 rows of a head_dim, and how many times as long with half a multiprocessor, with 16
#: rows, and where a row of a key is shorter than the variant's; how many bytes memory brings to a
#: multiprocessor in a microsecond, and L2, if several tiles of rows read them.
CLUSTERS_START_US = 4.2
KEY_US = {64: 4.0e-3, 128: 4.6e-3, 256: 10.3e-3}
HALF, MANY_ROWS, SHORT_ROWS = 1.1, 1.17, 1.31
BLOCK_BYTES = 32e3
L2_BYTES = 45e3
#: How much longer memory takes where rows of several key heads end within 64 bytes, which it reads
#: twice then.
SPLIT_SECTORS = 1.06
#: Computing, memory and L2 take as long together as this norm of their times says.
CLUSTERS_POWER = 5
#: What blocks of a cluster send each other in a microsecond; what a second merge takes, of several
#: clusters, and for each of these, row and column.
INBOX_BYTES = 85e3
SECOND_MERGE_US = 0.8
CLUSTER_PART_US = 7e-5
#: Of several numbers of clusters the largest is chosen whose estimate is at most this times the
#: least: with more blocks memory is read no slower.
AS_FAST = 1.03

#: decode_sm80.cu: what the launch takes without keys; how many bytes a multiprocessor reads in a
#: microsecond; and what each sequence and key head takes that a block has after its first, with up
#: to 8 rows and with more.
SPLITS_START_US = 6.9
SPLIT_BYTES = 35.4e3
NEXT_SPLIT_US = 1.6
NEXT_SPLIT_OF_MANY_ROWS_US = 3.0
#: What merging takes for each column, and that to which power of the rows, where blocks do not have
#: whole sequences; and how many times as long with more parts than are merged in one step.
MERGE_US = 6.8e-3
MERGE_POWER = 0.83
PARTS_OF_STEP, TWO_STEPS = 16, 1.12
LEAST_USED = 0.95  # of the device's blocks: with as few, memory is read as fast

#: forward_sm90.cu's packed tiles: what the launch takes without keys; what a multiprocessor
#: computes in a microsecond, at most so much for each column, and how much of that where a tile has
#: one warpgroup; how many bytes memory brings to it; the norm of both times; and what a tile takes
#: beside its blocks of keys, in these.
PACKED_START_US = 6.3
PACKED_FLOPS = 4.8e6
PACKED_FLOPS_OF_COLUMN = 40e3
ONE_WARPGROUP = 0.85
PACKED_BYTES = 31.2e3
PACKED_POWER = 7
TILE_BLOCKS = 0.1
#: The same with keys shared out evenly: what it takes to merge what several thread blocks have of a
#: tile, and each of these. Not fitted yet.
EVEN_MERGE_US = 1.5
EVEN_PART_US = 0.8
#: The launch that merges parts: what it takes, and what each part takes; bytes of the parts that it
#: reads in a microsecond, after they were written.
PARTS_START_US = 1.7
PART_US = 0.01
PART_BYTES = 3.3e6


class Blocks(NamedTuple):
    """How decode_sm90.cu shares out a multiprocessor where a pair has one thread block."""

    warps: int
    stages: int
    blocks_per_sm: int


#: By head_dim: where a multiprocessor has one such block, and where it has several, so that one
#: begins while another ends. Those of several are as fast or faster with fewer pairs than
#: multiprocessors, too, if a pair has at most `MOST_BYTES_BESIDE`, but not at head_dim 256, where
#: they have two warps.
ALONE = {64: Blocks(8, 6, 1), 128: Blocks(8, 3, 1), 256: Blocks(4, 3, 1)}
BESIDE = {64: Blocks(4, 3, 4), 128: Blocks(4, 2, 3), 256: Blocks(2, 2, 3)}
MOST_BYTES_BESIDE = 64 << 10

#: Where a multiprocessor has many pairs with more than `MANY_LONE_BYTES` each, whose keys take
#: longer than beginning and end: fewer at a time, with deeper rings. By head_dim.
BESIDE_OF_MANY_KEYS = {64: Blocks(8, 3, 2)}
MANY_LONE_PAIRS = 3  # of a multiprocessor
MANY_LONE_BYTES = 256 << 10

#: How many keys a pair with a block of its own has at most where it might have a cluster of these
#: sizes: so few that to merge takes longer than to read them.
LONE_KEYS = {8: 128, 4: 256, 2: 384}

#: How many bytes of keys and values it has at most where there are more pairs than that, where rows
#: are of a variant's head_dim and where they are shorter: twice as many if all pairs together have
#: no more than `FEW_BYTES`. What decode_sm80.cu does at the beginning and end of a split takes
#: longer, but it reads long sequences faster, and evenly. Where lengths differ (the host does not
#: know them) blocks of their own gain the more.
LONE_BYTES = {True: 512 << 10, False: 384 << 10}
FEW_BYTES = 160 << 20


class Clusters(NamedTuple):
    """The clusters of a pair of a sequence's tile of rows and a key head."""

    size: int
    count: int

    @property
    def blocks(self) -> int:
        """Of the pair."""
        return self.size * self.count


def tokens_of_sequence(spec: AttentionSpec) -> int:
    """Queries of a sequence; the mean, rounded up, where rows are ragged."""
    return -(-spec.seqlen_q // max(spec.batch, 1)) if spec.rows == "ragged" else spec.seqlen_q


def rows_of_sequence(spec: AttentionSpec) -> int:
    """Rows of queries that meet a key head in a sequence; the mean where they are ragged."""
    return tokens_of_sequence(spec) * (spec.heads_q // spec.heads_kv)


def key_bytes(spec: AttentionSpec) -> int:
    """Bytes of a key and its value."""
    return sum(
        code_columns(format, head_dim) if format else head_dim * spec.kv_dtype.itemsize
        for format, head_dim in (
            (spec.k_format, spec.head_dim),
            (spec.v_format, spec.head_dim_v),
        )
    )


def bytes_of_keys(spec: AttentionSpec) -> float:
    """Of all sequences, if all are as long as they may be."""
    return float(spec.batch * spec.heads_kv * spec.seqlen_k * key_bytes(spec))


def decode_head_dim(spec: AttentionSpec) -> int:
    """The padded head_dim of the decoding kernels."""
    return next(n for n in DECODE_HEAD_DIMS if max(spec.head_dim, spec.head_dim_v) <= n)


def row_tiles(spec: AttentionSpec) -> int:
    """Tiles of rows that a sequence and key head have in decode_sm90.cu."""
    return -(-rows_of_sequence(spec) // ROWS_OF_TILE)


def clusters_that_fit(pairs: int, multiprocessors: int, *, halves: bool) -> dict[int, int]:
    """How many clusters of each size, the largest first, every pair can have at the same time."""
    most = CLUSTERS if halves else CLUSTERS | {4: WHOLE_PAIRS}
    return {n: most[n] * multiprocessors // 132 // pairs for n in CLUSTERS}


def whole_pairs(multiprocessors: int) -> int:
    """How many clusters of 4 run at a time whose blocks have a multiprocessor each."""
    return WHOLE_PAIRS * multiprocessors // 132


def largest_that_fits(fits: dict[int, int]) -> int | None:
    """The size of the largest clusters of which every pair can have one."""
    return next((size for size, fit in fits.items() if fit), None)


def key_scale(head_dim: int) -> int:
    """How many times fewer keys than of head_dim 128 take as long."""
    return max(1, head_dim // 128)


def lone_blocks(spec: AttentionSpec, multiprocessors: int) -> Blocks | None:
    """The thread blocks, one for each pair, where keys are so few that beginning and end are what
    takes time, or where all pairs run at a time and even splits take longer: these merge partial
    results at the very end, when nothing is read any more."""
    tiles, head_dim = row_tiles(spec), decode_head_dim(spec)
    pairs = spec.batch * spec.heads_kv * tiles
    size = largest_that_fits(clusters_that_fit(pairs, multiprocessors, halves=tiles == 1))
    if spec.quantized or max(spec.batch, spec.heads_kv * tiles) > MOST_OF_GRID:
        return None
    if size is not None:
        return ALONE[head_dim] if spec.seqlen_k <= LONE_KEYS[size] // key_scale(head_dim) else None
    nbytes = spec.seqlen_k * key_bytes(spec)
    few_pairs = pairs <= multiprocessors
    alone = few_pairs and (head_dim == 256 or nbytes > MOST_BYTES_BESIDE)
    blocks = (ALONE if alone else BESIDE)[head_dim]
    if nbytes > MANY_LONE_BYTES and pairs >= MANY_LONE_PAIRS * multiprocessors:
        blocks = BESIDE_OF_MANY_KEYS.get(head_dim, blocks)
    few = pairs * nbytes <= FEW_BYTES
    whole_rows = spec.head_dim == spec.head_dim_v == head_dim
    if nbytes <= LONE_BYTES[whole_rows] * (1 + few):
        return blocks
    at_a_time = (ALONE if few_pairs else BESIDE)[head_dim]
    if tiles > 1 or not whole_rows or head_dim > 128:
        return None
    if pairs > at_a_time.blocks_per_sm * multiprocessors:
        return None
    faster = _lone_us(spec, multiprocessors, at_a_time) < splits_us(spec, multiprocessors)
    return at_a_time if faster else None


@functools.lru_cache(maxsize=4096)
def clusters_of_pair(spec: AttentionSpec, multiprocessors: int) -> Clusters | None:
    """The clusters that each pair is best given; None where there are too many pairs.

    They are the largest of which each can have one, or several of these, or of those of 4, which
    leave fewer multiprocessors idle: as many as take the least. (A row of several
    clusters' partial results is for one warp: up to head_dim 128.)
    """
    tiles = row_tiles(spec)
    pairs = spec.batch * spec.heads_kv * tiles
    fits = clusters_that_fit(pairs, multiprocessors, halves=tiles == 1 and not spec.quantized)
    size = largest_that_fits(fits)
    if size is None or size < max(CLUSTERS) or decode_head_dim(spec) > 128:
        return size and Clusters(size, 1)
    choices = [Clusters(size, count + 1) for count in range(fits[size])]
    if tiles == 1 and fits[size] > 1:
        choices.append(Clusters(4, whole_pairs(multiprocessors) // pairs))
    us = {clusters: _clusters_us(spec, multiprocessors, clusters) for clusters in choices}
    as_fast = [clusters for clusters in choices if us[clusters] <= AS_FAST * min(us.values())]
    return max(as_fast, key=lambda clusters: clusters.blocks)


def _overlapped(power: float, *us: float) -> float:
    """What several take together that run at the same time: the norm of their times, which is the
    longest, and more where others are close."""
    longest = max(us)
    return longest * sum((x / longest) ** power for x in us) ** (1 / power) if longest else 0.0


def clusters_us(spec: AttentionSpec, multiprocessors: int) -> float:
    """What decode_sm90.cu takes with the clusters of :func:`clusters_of_pair`."""
    clusters = clusters_of_pair(spec, multiprocessors)
    return math.inf if clusters is None else _clusters_us(spec, multiprocessors, clusters)


def _clusters_us(spec: AttentionSpec, multiprocessors: int, clusters: Clusters) -> float:
    head_dim, tiles = decode_head_dim(spec), row_tiles(spec)
    rows = 8 if rows_of_sequence(spec) <= 8 else ROWS_OF_TILE
    pairs = spec.batch * spec.heads_kv * tiles
    short_rows = not spec.head_dim == spec.head_dim_v == head_dim
    block_us = KEY_US[head_dim] * spec.seqlen_k / clusters.blocks
    block_us *= (MANY_ROWS if rows > 8 else 1) * (SHORT_ROWS if short_rows else 1)
    memory_us = bytes_of_keys(spec) / BLOCK_BYTES / multiprocessors
    memory_us *= SPLIT_SECTORS if spec.head_dim % 32 and spec.heads_kv > 1 else 1
    l2_us = tiles * bytes_of_keys(spec) / L2_BYTES / multiprocessors
    us = CLUSTERS_START_US + _overlapped(CLUSTERS_POWER, block_us, memory_us, l2_us)
    if clusters.count > 1:
        us += SECOND_MERGE_US + CLUSTER_PART_US * clusters.count * rows * head_dim
    if clusters.size == 4 and pairs * clusters.count > whole_pairs(multiprocessors):
        us *= HALF
    return us + clusters.size * rows * head_dim * 4 / INBOX_BYTES


def _lone_us(spec: AttentionSpec, multiprocessors: int, blocks: Blocks) -> float:
    """What decode_sm90.cu takes with one thread block for each pair, of whole rows, where all run
    at a time."""
    head_dim = decode_head_dim(spec)
    block_us = KEY_US[head_dim] * spec.seqlen_k * ALONE[head_dim].warps / blocks.warps
    block_us *= 1 if rows_of_sequence(spec) <= 8 else MANY_ROWS
    memory_us = bytes_of_keys(spec) / BLOCK_BYTES / multiprocessors
    return CLUSTERS_START_US + _overlapped(CLUSTERS_POWER, block_us, memory_us)


def splits_us(spec: AttentionSpec, multiprocessors: int) -> float:
    """What decode_sm80.cu takes with up to 16 rows."""
    head_dim = decode_head_dim(spec)
    # Two neighbouring heads are read together, as decoding_sm80.py says.
    heads = 2 if 64 < spec.head_dim < 128 and spec.heads_kv % 2 == 0 else 1
    pairs = spec.batch * spec.heads_kv // heads
    used = range(multiprocessors, math.ceil(LEAST_USED * multiprocessors) - 1, -1)
    us = SPLITS_START_US + bytes_of_keys(spec) / SPLIT_BYTES / multiprocessors
    few_rows = rows_of_sequence(spec) <= 8
    next_us = NEXT_SPLIT_US if few_rows else NEXT_SPLIT_OF_MANY_ROWS_US
    us += next_us * max(0.0, pairs / multiprocessors - 1)
    if any(pairs % n == 0 for n in used):
        return us
    us_of_merge = MERGE_US * head_dim * (rows_of_sequence(spec) * heads) ** MERGE_POWER
    return us + us_of_merge * (TWO_STEPS if PARTS_OF_STEP * pairs < multiprocessors else 1)


def packed_us(
    spec: AttentionSpec, multiprocessors: int, parts: int, warpgroups: int, tile_n: int
) -> float:
    """What packed tiles of forward_sm90.cu take with blocks of `tile_n` keys."""
    block_us = _packed_block_us(spec, warpgroups, tile_n)
    tiles = spec.heads_kv * packed_tiles(spec, warpgroups) * spec.batch * parts
    blocks_of_keys = -(-spec.seqlen_k // tile_n)
    tile_us = (-(-blocks_of_keys // parts) + TILE_BLOCKS) * block_us
    # Of each tile of a full wave; those of the last one share what memory brings to all.
    reading_us = bytes_of_keys(spec) / max(tiles, 1) / PACKED_BYTES
    waves, rest = divmod(tiles, multiprocessors)
    us = PACKED_START_US + waves * _overlapped(PACKED_POWER, tile_us, reading_us)
    if rest:
        us += _overlapped(PACKED_POWER, tile_us, reading_us * rest / multiprocessors)
    if parts == 1:
        return us
    columns = spec.batch * spec.seqlen_q * spec.heads_q * spec.head_dim_v
    return us + PARTS_START_US + parts * (PART_US + columns * 8 / PART_BYTES)


def even_us(spec: AttentionSpec, multiprocessors: int, tile_n: int) -> float:
    """What packed tiles of one warpgroup take whose keys are shared out evenly."""
    pairs = spec.batch * spec.heads_kv
    blocks = pairs * -(-spec.seqlen_k // tile_n) / multiprocessors
    tiles = pairs / multiprocessors + 1
    computing_us = (blocks + TILE_BLOCKS * tiles) * _packed_block_us(spec, 1, tile_n)
    reading_us = bytes_of_keys(spec) / PACKED_BYTES / multiprocessors
    merging_us = EVEN_MERGE_US + EVEN_PART_US * (1 + multiprocessors / pairs)
    return PACKED_START_US + _overlapped(PACKED_POWER, computing_us, reading_us) + merging_us


def _packed_block_us(spec: AttentionSpec, warpgroups: int, tile_n: int) -> float:
    """What a packed tile takes for a block of keys."""
    head_dim = part_head_dim(spec)
    rate = min(PACKED_FLOPS, PACKED_FLOPS_OF_COLUMN * head_dim)
    if warpgroups == 1:
        rate *= ONE_WARPGROUP
    return 2.0 * WARPGROUP_ROWS * warpgroups * tile_n * 2 * head_dim / rate
