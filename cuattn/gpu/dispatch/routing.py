"""Whether a call goes to the decoding kernels or to the forward kernels, and a prefix that a batch
shares to a launch of its own.

Decoding kernels split the keys of a sequence over the device, and read them once for all rows of a
tile: they are bound by memory, and their tensor core rate is a fifth of the forward kernels'. A
forward kernel gives each tile of queries a thread block, which goes over all keys: few tiles leave
the device idle.

The estimates below need only be right where the choice is in doubt; they are fitted to calls of an
H200 (docs/notes/decoding.md). For keys in caches and pages the forward kernel has to be clearly
faster. Keys in plain arrays go to the decoding kernels only if these are clearly faster for one
sequence and no slower for many: the choice must not depend on the batch, because
:func:`cuattn.flash_attention` gives a sequence the same result, bit for bit, whatever the batch.
For the same reason keys are then split every `UNIT_KEYS` (num_splits="fixed").
"""

from __future__ import annotations

import dataclasses
import functools
import math

from cuattn._spec import AttentionSpec
from cuattn.gpu.dispatch.decoding_times import (
    ROWS_OF_TILE,
    bytes_of_keys,
    clusters_of_pair,
    clusters_us,
    decode_head_dim,
    even_us,
    key_bytes,
    lone_blocks,
    packed_us,
    row_tiles,
    rows_of_sequence,
    splits_us,
    tokens_of_sequence,
)
from cuattn.gpu.dispatch.launch import LEAST_SCALE, MAX_DIM, Call, capability
from cuattn.gpu.dispatch.parts_sm90 import (
    WARPGROUP_ROWS,
    Packing,
    best_parts,
    packed_tiles,
    packed_warpgroups,
    part_head_dim,
)
from cuattn.gpu.tensormap import addressable

UNIT_KEYS = 1024  # of num_splits="fixed"
#: Up to how many rows of a key head several of decode_sm90.cu's tiles serve (twice as many of a
#: group of heads too large for the forward kernel's packed tiles). Of thread blocks of their own,
#: and where no packed tiles could, by head_dim: how many tiles each multiprocessor has at most, and
#: how many bytes of keys and values all of them read, half as many of shorter rows.
MOST_ROWS_AGAIN = 64
TILES_AND_BYTES_AGAIN = {64: (5, 64 << 20), 128: (2, 40 << 20), 256: (2, 32 << 20)}
LEAST_SPLITS = 2  # of the keys of plain arrays
NEARLY = 1.03  # as fast as clusters: of packed tiles, whose estimate is the better one there
CLEARLY = 1.6  # how much faster decoding has to be for plain arrays
CLEARLY_FORWARD = 1.15  # and the forward kernel for caches
MIXED_ROWS = (8, 16, 32, 64)  # of a sequence that is for decoding, beside others that are not
TWO_LAUNCHES_US = 60.0  # that a second launch is made for, if one alone may lose as much
#: What decoding beside prompts loses on a half of the multiprocessors: a part of its time, and what
#: so many bytes of each sequence and key head take.
HALF_LOSS = 0.2
SEQUENCE_BYTES = 110e3
FORWARD_START_US = 4.0  # that `forward_us` leaves out
START_US = 6.0  # what decoding takes longer to begin, and to merge its splits
BLOCK_BYTES = 90e3  # that one thread block reads in a microsecond, where memory has no other work


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one multiprocessor does in a microsecond."""

    forward_flops: float
    forward_flops_per_column: (
        float  # at most, times head_dim + head_dim_v: rows cost more than that
    )
    forward_rows: int  # of a tile
    decoding_flops: float
    decoding_flops_of_block: float  # of one thread block that is alone
    decoding_rows: tuple[int, ...]  # of tiles
    bytes: float


#: Of an H200. With few rows a forward tile costs less than its size says.
HOPPER = Rates(6.5e6, 26e3, 128, 0.75e6, 0.75e6, (8, 32, 64), 32e3)
#: Of an A100, in proportion.
AMPERE = Rates(2.4e6, 10e3, 128, 0.5e6, 0.5e6, (8, 32, 64), 14e3)
#: Without tensor cores, by the size of an element.
SIMT = {
    2: Rates(0.3e6, 1e6, 64, 23e3, 14.5e3, (4,), 14e3),
    4: Rates(0.3e6, 1e6, 64, 23e3, 14.5e3, (4,), 14e3),
    8: Rates(0.15e6, 1e6, 32, 12e3, 7e3, (2,), 14e3),
}


def prefers_decoding(call: Call) -> bool:
    """Whether a call goes to the decoding kernels before the forward kernels, if both serve it."""
    spec, rates = call.spec, _rates(call)
    if call.partial is not None or call.num_splits is not None or spec.quantized:
        return True
    if reads_keys_again(call):
        return True
    cached = spec.keys in ("cached", "paged")
    rows = rows_of_sequence(spec)
    many_rows = rows > PARTS_FOR_ROWS
    if cached and rows <= ROWS_OF_TILE and _clusters_serve(call):
        return not _packs_few_rows(call)
    packs = rows > (ROWS_OF_TILE if cached else PARTS_FOR_ROWS) and can_split(call)
    if packs and ((cached and many_rows) or best_packing(call) is not None):
        return False
    if cached:
        if spec.rows == "ragged" and not many_rows:
            return True  # a long prompt among them has a launch beside: `queries_for_decoding`
        return not clearly_forward(call)
    if spec.seqlen_k < LEAST_SPLITS * UNIT_KEYS or rows > rates.decoding_rows[-1]:
        return False  # keys of several tiles of rows are not split at all
    whole = call.vectors and spec.head_dim % 8 == spec.head_dim_v % 8 == 0
    if rates is not SIMT[spec.dtype.itemsize] and not whole:
        return False  # only the decoding kernel without tensor cores would take it
    split = dataclasses.replace(spec, seqlen_k=UNIT_KEYS)
    split_us = max(
        UNIT_KEYS * key_bytes(spec) / BLOCK_BYTES,
        _flops(split, decoding_tile(rates, rows)) / rates.decoding_flops_of_block,
    )
    alone = START_US + max(split_us, decoding_us(spec, rates, 1, call.multiprocessors))
    many = 1 << 20  # sequences: no multiprocessor is idle
    return CLEARLY * alone <= forward_us(spec, rates, 1, call.multiprocessors) and decoding_us(
        spec, rates, many, call.multiprocessors
    ) <= forward_us(spec, rates, many, call.multiprocessors)


def clearly_forward(call: Call) -> bool:
    """Whether all sequences of a call over caches, with the mean of rows, are for the forward
    kernels by estimate."""
    spec, rates = call.spec, _rates(call)
    forward = CLEARLY_FORWARD * forward_us(spec, rates, spec.batch, call.multiprocessors)
    return forward < decoding_us(spec, rates, spec.batch, call.multiprocessors)


def reads_keys_again(call: Call) -> bool:
    """Whether decode_sm90.cu serves a call over caches in several tiles of rows. Each reads all
    keys of its sequence and key head, which are so few that L2 has them for the others."""
    spec = call.spec
    packed = spec.heads_q // spec.heads_kv <= WARPGROUP_ROWS
    most_rows = MOST_ROWS_AGAIN * (1 if packed else 2)
    if not ROWS_OF_TILE < rows_of_sequence(spec) <= most_rows or not _clusters_serve(call):
        return False
    if lone_blocks(spec, call.multiprocessors) is None:
        if clusters_of_pair(spec, call.multiprocessors) is None:
            return False
        packing = best_packing(call) if can_split(call) else None
        if packing is not None:
            return clusters_us(spec, call.multiprocessors) <= _us_of(call, packing)
    most_tiles, most_bytes = TILES_AND_BYTES_AGAIN[decode_head_dim(spec)]
    if spec.head_dim != spec.head_dim_v or spec.head_dim not in TILES_AND_BYTES_AGAIN:
        most_bytes //= 2
    tiles = spec.batch * spec.heads_kv * row_tiles(spec)
    few = tiles <= most_tiles * call.multiprocessors
    return few and row_tiles(spec) * bytes_of_keys(spec) <= most_bytes


def _clusters_serve(call: Call) -> bool:
    """Whether decode_sm90.cu could serve a call over caches, were its keys few."""
    spec = call.spec
    return (
        capability(call.arch) == 90
        and spec.rows == "batched"
        and (spec.keys == "cached" or (spec.keys == "paged" and spec.page_size >= 16))
        and spec.dtype.itemsize == 2
        and not spec.quantized
        and call.num_splits is None
        and not call.elementwise
        and call.vectors
        and all(addressable(array[:-1]) for array in call.strides[1:3])
        and max(spec.head_dim, spec.head_dim_v) <= MAX_DIM
        and spec.head_dim % 8 == spec.head_dim_v % 8 == 0
    )


def _packs_few_rows(call: Call) -> bool:
    """Whether the forward kernel's packed tiles are the fastest for a call over caches of no more
    rows than one tile of the decoding kernels has."""
    spec = call.spec
    packing = best_packing(call) if can_split(call) else None
    if packing is None or lone_blocks(spec, call.multiprocessors) is not None:
        return False
    clusters, splits = (us(spec, call.multiprocessors) for us in (clusters_us, splits_us))
    return _us_of(call, packing) < min(NEARLY * clusters, splits)


def _us_of(call: Call, packing: Packing) -> float:
    """What packed tiles take."""
    if packing.even:
        return even_us(call.spec, call.multiprocessors, packing.tile_n)
    return packed_us(
        call.spec, call.multiprocessors, packing.parts, packing.warpgroups, packing.tile_n
    )


def queries_for_decoding(call: Call) -> int:
    """Up to how many queries of a sequence are for decoding, where a batch of ragged rows may have
    sequences of more, which are for Hopper's forward kernel, in a launch beside; 0 where one launch
    serves all.

    How long the sequences are, only the device knows. Both launches are made where one of them
    alone may take much longer: the forward kernel gives a sequence of one token a tile for each key
    head, with all its keys, and a few at a time; the decoding kernel computes a long prompt at a
    fifth of the rate.

    Where the mean is of many rows a few prompts may have caused it, and most sequences have one
    query. Products limit a tile of 32 rows, so these would pay for it: decoding has tiles of few
    rows then, if the forward kernel is no slower at all sequences of the mean, and has a tile for
    every multiprocessor: where it has fewer it takes longer than its estimate (1.6 times as long as
    decoding for 16 drafts of 8 tokens over 8192 keys).
    """
    spec = call.spec
    group = spec.heads_q // spec.heads_kv
    longest = spec.seqlen_q - (spec.batch - 1)  # where the others have one query
    if (
        call.arch != "sm_90a"
        or spec.rows != "ragged"
        or spec.keys not in ("cached", "paged")
        or spec.batch < 2
        or call.partial is not None
        or call.num_splits is not None
        or call.elementwise
        or spec.quantized
        or spec.dtype.itemsize != 2
        or max(spec.head_dim, spec.head_dim_v) > MAX_DIM
    ):
        return 0
    decoding = prefers_decoding(call)
    rows = rows_of_sequence(spec) if decoding else group
    busy = spec.batch * spec.heads_kv >= call.multiprocessors
    if rows > MIXED_ROWS[1] >= group and busy and clearly_forward(call):
        rows = MIXED_ROWS[1]
    most = next((n for n in MIXED_ROWS if rows <= n), 0) // group
    if not 0 < most < longest:
        return 0
    if decoding:
        prompt = dataclasses.replace(spec, rows="batched", batch=1, seqlen_q=longest)
        lost_us = decoding_us(prompt, HOPPER, 1, call.multiprocessors)
    else:
        waves = -(-spec.batch * spec.heads_kv // call.multiprocessors)
        lost_us = waves * _flops(spec, 192) / HOPPER.forward_flops
    return most if lost_us >= TWO_LAUNCHES_US else 0


def multiprocessors_for_decoding(call: Call, queries: int) -> tuple[int, bool]:
    """How many multiprocessors a launch for sequences of up to so many queries should have beside
    one of the forward kernel for the others, and whether that one has the rest to itself and takes
    over these when all are free; else its blocks begin wherever there is room.

    Decoding on a half of them takes 1.17 to 1.85 times as long (H200), more where sequences are
    short. It has a half where prompts take as long as it loses by that, as far as one can tell: all
    sequences may have equally many keys. Which of the two launches begins first is chance. Where
    prompts are the shorter ones it decides: of the time of two calls, 16 sequences of 8192 keys
    beside 256 tokens over as many take 0.83, and 1.09 where either may begin first; 64 beside 4
    times 512 over 4096 0.90 and 0.99.
    Where prompts take longer waiting for all blocks costs them 1 to 2%.
    """
    spec = call.spec
    prompts = _flops(spec, (spec.seqlen_q - spec.batch) * (spec.heads_q // spec.heads_kv))
    prompts_us = prompts * spec.heads_kv / HOPPER.forward_flops / call.multiprocessors
    reading_us = _reading_us(spec, HOPPER, spec.batch, call.multiprocessors)
    few_rows = queries * (spec.heads_q // spec.heads_kv) <= MIXED_ROWS[1]
    loss = HALF_LOSS + SEQUENCE_BYTES / (spec.seqlen_k * key_bytes(spec))
    if few_rows and prompts_us >= min(1.0, loss) * reading_us:
        return max(1, call.multiprocessors // 2), prompts_us < reading_us
    return call.multiprocessors, False


def forward_us(spec: AttentionSpec, rates: Rates, batch: int, multiprocessors: int) -> float:
    """About what a forward kernel takes: tiles in waves over the device, or its bytes."""
    columns = spec.head_dim + spec.head_dim_v
    rows = rates.forward_rows
    heads, queries = spec.heads_q, tokens_of_sequence(spec)
    if spec.rows == "ragged" and rates is HOPPER:
        # Lengths are unknown here: the largest tile, of all heads that share a key head.
        rows = 192 if columns <= 256 else 128
        heads, queries = spec.heads_kv, rows_of_sequence(spec)
    tiles = batch * heads * -(-queries // rows)
    waves = -(-tiles // multiprocessors)
    rate = min(rates.forward_flops, rates.forward_flops_per_column * columns)
    return max(waves * _flops(spec, rows) / rate, _reading_us(spec, rates, batch, multiprocessors))


def decoding_us(spec: AttentionSpec, rates: Rates, batch: int, multiprocessors: int) -> float:
    """About what a decoding kernel takes: its products, evenly over the device, or its bytes."""
    rows = rows_of_sequence(spec)
    tile = decoding_tile(rates, rows)
    tiles = batch * spec.heads_kv * -(-rows // tile)
    products = tiles * _flops(spec, tile) / rates.decoding_flops / multiprocessors
    return max(products, _reading_us(spec, rates, batch, multiprocessors))


def decoding_tile(rates: Rates, rows: int) -> int:
    """The rows of the tile that so many rows get."""
    return next((n for n in rates.decoding_rows if rows <= n), rates.decoding_rows[-1])


def _reading_us(spec: AttentionSpec, rates: Rates, batch: int, multiprocessors: int) -> float:
    """What it takes to read all keys and values once."""
    nbytes = batch * spec.heads_kv * spec.seqlen_k * key_bytes(spec)
    return nbytes / rates.bytes / multiprocessors


#: Keys of a block in caches and pages, where the rows of a tile of attention/forward_sm90.cu are
#: those of all heads of a group, by head_dim.
SPLIT_TILE_KEYS = {64: 128, 96: 128, 128: 128, 192: 96, 256: 64}
#: Where keys are shared out evenly, in place of parts: with more features merging takes registers,
#: and 192 were 4% slower.
EVEN_PACKINGS = {
    head_dim: Packing(1, 1, SPLIT_TILE_KEYS[head_dim], even=True) for head_dim in (64, 96, 128)
}
#: How many thread blocks a tile has at most on average, whose results one warpgroup merges; how
#: many tiles a thread block has at most, of more of which parts are even enough (401 sequences of
#: up to 1510 keys, 12 tiles each, lost 5%), and how many blocks of keys at least (64 of 1000, 16
#: blocks each, lost 17%).
EVEN_PARTS = 8
EVEN_TILES = 2
EVEN_BLOCKS = 32
#: How much longer they may take than parts where caches are full, as they take less where lengths
#: differ.
AS_FAST_WHEN_FULL = 1.1
LINE_BYTES = 128  # that L2 fetches
MIN_PAGE = 8  # rows that TMA's swizzle permutes together
#: Beyond so many rows a key head that kernel is faster than decoding wherever it is faster with its
#: keys cut than with them whole: for 32768 keys, 32 heads on 8, 16 rows take decoding 39.6 µs and
#: that kernel 45.5, 64 rows 115 and 45.9; one query of 48 heads on one of 256 over 43369 keys 120
#: and 38.8. Over caches its tiles of all heads of a group are faster beyond 16 rows, too: 64
#: sequences of 1000 keys, 128 heads on 4, 59.3 and 38.6.
PARTS_FOR_ROWS = 32


def can_split(call: Call) -> bool:
    """Whether Hopper's forward kernel can cut the keys of a call into parts."""
    spec = call.spec
    return (
        call.arch == "sm_90a"
        and spec.rows == "batched"
        and spec.keys in ("batched", "cached", "paged")
        and spec.window_left is None
        and spec.window_right in (0, None)
        and spec.dropout == 0.0
        and spec.scale >= LEAST_SCALE
        and not call.has_score
        and not spec.quantized
        and spec.dtype.itemsize == 2
        and spec.kv_dtype == spec.dtype
        and call.aligned
        and call.num_splits is None
        and spec.head_dim_v % 8 == 0
        and max(spec.head_dim, spec.head_dim_v) <= MAX_DIM
        and spec.heads_q // spec.heads_kv <= 64
        and 0 < spec.seqlen_k < 1 << 29
        and not (spec.keys == "paged" and spec.page_size < MIN_PAGE)
    )


@functools.lru_cache(maxsize=4096)
def _best_packing_over_caches(spec: AttentionSpec, multiprocessors: int) -> Packing | None:
    tile_n = SPLIT_TILE_KEYS[part_head_dim(spec)]
    warpgroups = packed_warpgroups(spec)

    def us(parts: int) -> float:
        return packed_us(spec, multiprocessors, parts, warpgroups, tile_n)

    whole = spec.heads_q > spec.heads_kv  # one head's rows are as well served by tiles of their own
    counts = range(1 if whole else 2, min(-(-spec.seqlen_k // tile_n), multiprocessors) + 1)
    if not counts:
        return None
    parts = min(counts, key=us)
    whole_us = FORWARD_START_US + forward_us(spec, HOPPER, spec.batch, multiprocessors)
    if us(parts) > whole_us:
        return None
    if _shares_evenly(spec, multiprocessors, us(parts)):
        return EVEN_PACKINGS[part_head_dim(spec)]
    return Packing(parts, warpgroups, tile_n)


def even_section(spec: AttentionSpec, multiprocessors: int) -> int:
    """How many heads are read at the same time where keys are shared out evenly, by a thread block
    each on every multiprocessor."""
    return math.gcd(spec.heads_kv, multiprocessors)


def _shares_evenly(spec: AttentionSpec, multiprocessors: int, us_of_parts: float) -> bool:
    """Whether all keys of a call over caches are shared out evenly over the thread blocks, whatever
    the sequences' lengths, of which parts are as many for a short one as for a long one."""
    packing = EVEN_PACKINGS.get(part_head_dim(spec))
    pairs = spec.batch * spec.heads_kv
    if packing is None or packed_tiles(spec, 1) > 1:
        return False
    if not multiprocessors / EVEN_PARTS <= pairs <= EVEN_TILES * multiprocessors:
        return False
    blocks = pairs * -(-spec.seqlen_k // packing.tile_n)
    if not EVEN_BLOCKS * multiprocessors <= blocks < 1 << 31:
        return False
    whole_lines = not any(
        dim * spec.dtype.itemsize % LINE_BYTES for dim in (spec.head_dim, spec.head_dim_v)
    )
    if not whole_lines and even_section(spec, multiprocessors) < spec.heads_kv:
        return False  # lines would be fetched twice: 0.87 of the speed of parts
    even = even_us(spec, multiprocessors, packing.tile_n)
    return even <= AS_FAST_WHEN_FULL * us_of_parts


def best_packing(call: Call) -> Packing | None:
    """How a call that :func:`can_split` is best shared out by Hopper's forward kernel with tiles of
    all heads of a group; None where others are faster.

    Over a cache keys are also left whole, where sequences and key heads keep the device busy: 64
    sequences of 4096 keys with 64 queries of 32/8 heads take 469 µs, and 587 with two parts.
    """
    if call.spec.keys == "batched":
        return best_parts(call.spec, call.multiprocessors)
    return _best_packing_over_caches(call.spec, call.multiprocessors)


#: What a prefix that lies in the pages must be for it to be read once for all sequences: so many
#: bytes, when each sequence reads it (largely from L2), take as long as two more launches. With and
#: without a variant of `prefix`; measured on an H200 with 4 to 64 sequences.
CASCADE_BYTES = {True: 96 << 20, False: 256 << 20}


def cascade_pays(spec: AttentionSpec, length: int, arch: str) -> bool:
    """Whether the first `length` keys, which all sequences of a call share in their pages, should
    be read once for all of them."""
    row_bytes = spec.heads_kv * key_bytes(spec)
    fast = arch == "sm_90a" and spec.dtype.itemsize == 2
    return spec.batch * length * row_bytes >= CASCADE_BYTES[fast]


def _flops(spec: AttentionSpec, rows: int) -> float:
    """Floating-point operations of some rows over all keys."""
    return 2.0 * rows * spec.seqlen_k * (spec.head_dim + spec.head_dim_v)


def _rates(call: Call) -> Rates:
    spec = call.spec
    if (
        spec.dtype.itemsize != 2
        or capability(call.arch) < 80
        or max(spec.head_dim, spec.head_dim_v) > MAX_DIM
    ):
        return SIMT[spec.dtype.itemsize]
    # A bias or mask over a cache is for forward_sm80.cu on Hopper, too.
    wgmma = call.arch == "sm_90a" and not (call.elementwise and spec.keys in ("cached", "paged"))
    return HOPPER if wgmma else AMPERE
