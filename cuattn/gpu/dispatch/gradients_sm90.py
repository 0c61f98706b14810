"""Calls of gradients/backward_sm90.cu, Hopper's backward kernel, and of the kernels around it."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import backward_arguments, dropout_arguments, forward_arguments
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.arguments_sm90 import rows_map
from cuattn.gpu.dispatch.backward import (
    BackwardCall,
    BackwardLaunches,
    rows_grid,
    statistics_variant,
)
from cuattn.gpu.dispatch.gradients_sm80 import sm80_passes
from cuattn.gpu.dispatch.launch import LEAST_SCALE, Launch
from cuattn.gpu.params import SM90_BACKWARD_PARAMS
from cuattn.gpu.structs import Arguments
from cuattn.gpu.tensormap import TensorMap, addressable

_STATISTICS_PAD = 128  # rows: kStatisticsPad of rawkernels/gradients/layout_sm90.cuh
_PART_ROWS = 64  # of a thread block of around_sm90.cu
_BLOCK_ROWS = 64  # of queries: kQueries


@dataclasses.dataclass(frozen=True)
class Sm90BackwardConfig(Config):
    """gradients/backward_sm90.cu, or with 192 features backward_192_sm90.cu."""

    dtype: str
    head_dim: int  # padded
    head_dim_v: int
    varlen: bool
    computes_dq: bool  # beside dk and dv
    stores_by_tma: bool  # dk and dv, beside the next tile; else they are written from registers
    tile_n: int  # keys of a block: 64 a consumer
    tile_m: int = 64  # queries
    dropout: bool = False
    in_order: bool = False  # sums of dq are added up in the order of keys
    heads_inside: bool = False  # a block of queries of all heads comes before the next, as in_order

    @property
    def threads(self) -> int:
        """A warpgroup that loads, and one that computes for every 64 keys."""
        return 128 + 2 * self.tile_n

    @property
    def smem_bytes(self) -> int:
        """Keys, values, the stages of queries and dout, two of dS and four of parts of dq (three
        where three warpgroups compute; with 192 features one of dS and two of larger parts), and
        three KiB for statistics, tiles and barriers; of these dropout's masks take the last, or,
        with four stages of statistics, another."""
        stages = 4 if self.head_dim == 64 else 2
        rows = self.tile_n + stages * self.tile_m
        ds = (1 if self.head_dim > 128 else 2) * 2 * self.tile_m * self.tile_n
        parts = 3 if self.tile_n == 192 or self.head_dim > 128 else 4  # of 64 columns
        rest = 4 if self.dropout and stages == 4 else 3
        return 2 * rows * (self.head_dim + self.head_dim_v) + ds + (16 * parts + rest) * 1024


@dataclasses.dataclass(frozen=True)
class Sm90KeysConfig(Config):
    """gradients/backward_keys_sm90.cu."""

    dtype: str
    head_dim: int  # padded
    head_dim_v: int
    varlen: bool
    stages: int  # of queries, dout and P
    tile_m: int = 64
    tile_n: int = 64

    @property
    def threads(self) -> int:
        """A warpgroup that loads, and two that compute."""
        return 384

    @property
    def smem_bytes(self) -> int:
        """Keys, values, the stages of queries, dout, P and statistics, and a KiB of barriers."""
        rows = self.tile_n + self.stages * self.tile_m
        p = 2 * self.stages * self.tile_m * (self.tile_n + 4)
        return 2 * rows * (self.head_dim + self.head_dim_v) + p + 2048


@dataclasses.dataclass(frozen=True)
class Sm90QueriesConfig(Config):
    """gradients/backward_queries_sm90.cu."""

    dtype: str
    head_dim: int  # padded
    head_dim_v: int
    varlen: bool
    tile_n: int  # keys of a block
    v_stages: int
    tile_m: int = 128

    @property
    def threads(self) -> int:
        """A warpgroup that loads, and two that compute."""
        return 384

    @property
    def smem_bytes(self) -> int:
        """Queries, dout, two stages of keys, those of values, and a KiB of barriers."""
        rows = self.tile_m + 2 * self.tile_n
        rows_v = self.tile_m + self.v_stages * self.tile_n
        return 2 * (rows * self.head_dim + rows_v * self.head_dim_v) + 1024


@dataclasses.dataclass(frozen=True)
class Sm90AroundConfig(Config):
    """gradients/around_sm90.cu."""

    dtype: str
    head_dim: int  # padded, of out and dout
    varlen: bool
    sums: int  # columns of dq where it is added up in memory, or 0
    tile_m: int = 64
    tile_n: int = 64
    dropout: bool = False

    @property
    def threads(self) -> int:
        """A warpgroup for every 64 columns, up to two."""
        return min(2 * self.head_dim, 256)


#: (tile_n, v_stages) of the pass for dq, by the padded (head_dim, head_dim_v).
SM90_QUERIES_TILES = {
    (64, 64): (128, 2),
    (128, 128): (96, 2),
    (192, 128): (80, 2),
    (256, 256): (64, 1),
}
#: Stages of the pass for dk and dv where one warpgroup computes each.
SM90_KEYS_STAGES = {(192, 128): 3, (256, 256): 2}
SECTION_BYTES = 24 << 20  # half of Hopper's L2
#: Keys of a block of the kernel that computes dk and dv, and also dq, by the padded head_dim: at 64
#: registers suffice for three consumers of 64 each.
SM90_FUSED_KEYS = {64: (128, 192), 128: (128,), 192: (128,)}
#: The most with which there are kernels of that kind with dropout, with sums of dq in an order, and
#: for dk and dv alone.
SM90_NARROW_HEAD_DIM = 128
#: From how many query heads of a key head on these are walked inside a block of queries.
SM90_HEADS_INSIDE = {128: 8, 192: 2}
#: Keys of a block of the kernel that computes dk and dv alone, for every call: what a call's
#: results are does not depend on what else is in it.
SM90_SPLIT_KEYS = {64: 192}
SM90_SHORT_KEYS = 512  # of sequences for which 192 are too many
#: Time of a block of 192 keys in those of 128, a key: 513 TFLOP/s at 8192 queries instead of 463.
SM90_TIME_OF_192 = 0.91
SM90_FEW_TILES = 4  # a multiprocessor
#: Tiles of a head that begin together where sums have an order: each waits for the one before it.
#: 2 and 8 take the same time.
SM90_ORDERED_TILES = 4
#: Tiles a multiprocessor, from which on all are taken to be as busy.
SM90_MANY_TILES = 8
#: Keys that a query sees on average, up to which sums of dq do not begin as zeros: writing these
#: takes as long however much there is to compute. At head_dim 128 a call with a causal mask takes
#: 9% less at 512 queries and 5% less at 2048, one with a window of 1024 4% less; without a mask
#: 2048 queries take 1% more.
SM90_OPENED_KEYS = 1024


class Sm90Backward:
    """16-bit calls that TMA can address, of products that are scaled and no more.

    One pass computes all gradients, and adds up dq in memory in any order; where it may not, or
    registers do not suffice, dq has a pass of its own. Only the one pass has dropout.
    """

    name = "backward_sm90"

    def serves(self, call: BackwardCall) -> BackwardLaunches | None:
        """The launches for a call, or None."""
        spec, forward = call.forward.spec, call.forward
        arrays = (*forward.strides[:3], call.dout)
        dims = spec.head_dim, spec.head_dim_v
        if (
            forward.arch != "sm_90a"
            or spec.dtype.itemsize != 2
            or forward.has_score
            or spec.scale < LEAST_SCALE
            or not (call.aligned and call.out_aligned)
            or any(stride % 16 for stride in forward.strides.out[:-1])
            or not all(addressable(strides[:-1]) for strides in arrays)
            or any(d % 8 for d in dims)
            or max(dims) > 256
            or not (0 < spec.seqlen_k < 1 << 29 and spec.seqlen_q < 1 << 29)
        ):
            return None
        padded = next(n for n in SM90_QUERIES_TILES if dims[0] <= n[0] and dims[1] <= n[1])
        head_dim = padded[0]
        ragged = spec.rows == "ragged"
        dropout = spec.dropout != 0.0
        wide = head_dim > SM90_NARROW_HEAD_DIM
        in_order = call.deterministic and not wide and _adds_in_order(spec)
        fused = head_dim in SM90_FUSED_KEYS and (in_order or not call.deterministic)
        if dropout and (wide or not fused):
            return None
        tile_n = SM90_SPLIT_KEYS.get(head_dim, 128)
        if fused and not in_order:
            tile_n = _keys_of_a_block(spec, head_dim, forward.multiprocessors)
        windowed = spec.window_left is not None
        heads_inside = fused and not in_order and _walks_heads_inside(spec, head_dim)
        prepare, *passes = _variants(
            *(spec.dtype.name, padded, ragged, fused, tile_n),
            dropout=dropout,
            windowed=windowed,
            in_order=in_order,
            heads_inside=heads_inside,
        )

        slots = spec.seqlen_q // _STATISTICS_PAD + spec.batch
        if not ragged:
            slots = -(-spec.seqlen_q // _STATISTICS_PAD)
        padded_q = slots * _STATISTICS_PAD
        grid_q = rows_grid(ragged, spec.batch, spec.seqlen_q, _STATISTICS_PAD, spec.heads_q)
        grid_parts = (grid_q[0] * (_STATISTICS_PAD // _PART_ROWS), *grid_q[1:])
        of_forward = forward_arguments(spec, forward.strides)
        of_backward = backward_arguments(
            spec, call.dout, (0, 0, 0, 0), alibi_batched=False, alibi_slots=0, alibi_tile=0
        )
        given: tuple[Arguments, ...] = of_forward, of_backward
        if dropout:
            # All is over the scale of what dropout leaves, but what is written.
            scaled = dataclasses.replace(spec, scale=spec.scale * spec.dropout_scale)
            given = (
                forward_arguments(scaled, forward.strides),
                of_backward.followed_by(dropout_arguments(spec)),
            )

        def launch(variant: Variant) -> Launch:
            tile_n = variant.config.tile_n  # type: ignore[attr-defined]
            tile_m = variant.config.tile_m  # type: ignore[attr-defined]
            maps = _tensor_maps(spec, arrays, tile_m, tile_n)
            if getattr(variant.config, "stores_by_tma", False):
                maps |= _result_maps(spec)
            sequences = spec.batch if ragged else 1
            slots = rows_grid(ragged, sequences, spec.seqlen_k, tile_n, 1)[0]
            tiles = slots * spec.heads_kv * (1 if ragged else spec.batch)
            section, late = _order(spec, head_dim, slots, forward.multiprocessors, in_order)
            own = SM90_BACKWARD_PARAMS.arguments(
                padded_q=padded_q,
                slots=slots,
                tiles=tiles,
                section=section,
                late=late,
                group=spec.heads_q // spec.heads_kv,
                scale_log2=spec.scale / math.log(2.0),
            )
            grid: tuple[int, ...] = (min(tiles, forward.multiprocessors),)
            if variant.entry == "backward_queries_sm90":
                grid = grid_q
            elif variant.entry in ("prepare_sm90", "finish_sm90"):
                grid = grid_parts
            return Launch(variant, grid, (*given, own), maps)

        launches = [launch(prepare), *map(launch, passes)]
        repairs = (of_forward, of_backward, dropout_arguments(spec))
        for variant in _repairs(spec.dtype.name, padded, dropout):
            launches.append(Launch(variant, (forward.multiprocessors,), repairs))
        if call.grad_sinks:
            sinks = statistics_variant("sinks_simt", spec.dtype.name)
            launches.insert(1, Launch(sinks, (spec.heads_q,), (of_forward, of_backward)))
        if any(launch.grid[0] >= 1 << 31 for launch in launches) or padded_q >= 1 << 31:
            return None
        rows = padded_q * spec.heads_q * (1 if ragged else spec.batch)
        workspaces: tuple[tuple[str, int], ...] = (
            ("score_start", 4 * rows),
            ("dp_start", 4 * rows),
            ("dq_sums", 4 * rows * head_dim if fused else 0),
            ("next_tile", 4),
            ("nonfinite", 4),
        )
        if fused and (in_order or _opens_sums(spec, head_dim)):
            parts = 2 if head_dim == 192 else head_dim // 64
            workspaces += (("opened", 8 * (rows // _PART_ROWS) * parts),)
        return BackwardLaunches(tuple(launches), workspaces=workspaces)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if arch != "sm_90a":
            return
        for dtype, dims, varlen, fused in itertools.product(
            ("float16", "bfloat16"), SM90_QUERIES_TILES, (False, True), (False, True)
        ):
            split = (SM90_SPLIT_KEYS.get(dims[0], 128),)
            for tile_n, windowed in itertools.product(
                SM90_FUSED_KEYS.get(dims[0], ()) if fused else split, (False, True)
            ):
                yield from _variants(dtype, dims, varlen, fused, tile_n, windowed=windowed)
            if fused and dims[0] <= SM90_NARROW_HEAD_DIM:
                yield from _variants(dtype, dims, varlen, fused, 128, dropout=True)
                yield from _variants(dtype, dims, varlen, fused, *split, in_order=True)
            if fused and dims[0] in SM90_HEADS_INSIDE:
                yield from _variants(dtype, dims, varlen, fused, *split, heads_inside=True)
        for dtype, dims in itertools.product(("float16", "bfloat16"), SM90_QUERIES_TILES):
            yield from _repairs(dtype, dims)
            if dims[0] <= SM90_NARROW_HEAD_DIM:
                yield from _repairs(dtype, dims, dropout=True)


def _keys_of_a_block(spec: AttentionSpec, head_dim: int, multiprocessors: int) -> int:
    """Of the kernel that computes dq, dk and dv together: by how long the busiest multiprocessor
    is at its tiles. It has whole ones where all cost the same, and where keys are bounded and
    nobody has more than two, but not in ragged calls without a mask, which take up to 16% longer
    so; those of a causal mask, where they are few, are dealt out to see it."""
    if head_dim != 64 or spec.dropout != 0.0:  # masks take more registers than three leave
        return 128
    ragged = spec.rows == "ragged"
    if spec.seqlen_k <= SM90_SHORT_KEYS * (max(spec.batch, 1) if ragged else 1):
        return 128
    heads = spec.heads_kv * (1 if ragged else spec.batch)
    is_full = spec.window_left is None and spec.window_right is None
    few = -(-spec.seqlen_k // 192) * heads < SM90_MANY_TILES * multiprocessors
    is_dealt = few and not ragged and _is_causal(spec)

    def time(keys: int) -> float:
        if is_dealt:
            return _dealt_time(spec, head_dim, keys, multiprocessors) * keys
        tiles = -(-spec.seqlen_k // keys) * heads / multiprocessors
        has_whole = not ragged if is_full else tiles <= 2
        return (math.ceil(tiles) if has_whole else max(tiles, 1.0)) * keys

    return 192 if time(192) * SM90_TIME_OF_192 <= time(128) else 128


def _is_causal(spec: AttentionSpec) -> bool:
    """Whether keys are bounded on the right alone."""
    return spec.window_left is None and spec.window_right is not None


def _walks_heads_inside(spec: AttentionSpec, head_dim: int) -> bool:
    """Whether all heads of a block of queries come before the next block: for grouped heads, whose
    tiles come to a head at different times with a causal mask, so that L2 keeps none of it. With a
    window on the left they do not; with few heads of 128 features L2 keeps enough, and tiles that
    begin together add to the same sums."""
    if spec.window_left is not None or spec.dropout != 0.0:
        return False
    group = spec.heads_q // spec.heads_kv
    causal_or_wide = head_dim == 192 or _is_causal(spec)
    return causal_or_wide and group >= SM90_HEADS_INSIDE.get(head_dim, group + 1)


def _dealt_time(spec: AttentionSpec, head_dim: int, keys: int, multiprocessors: int) -> int:
    """When the last multiprocessor is done, in blocks of queries, where each takes the next tile of
    `_order` when it is done with one: sequences are of one length and have a causal mask."""
    slots, heads = -(-spec.seqlen_k // keys), spec.heads_kv * spec.batch
    section, late = _order(spec, head_dim, slots, multiprocessors)
    seen_by_all = spec.seqlen_k - spec.seqlen_q + (spec.window_right or 0)  # keys: by every row
    first_rows = (max(slot * keys - seen_by_all, 0) for slot in range(slots))
    blocks, group = -(-spec.seqlen_q // _BLOCK_ROWS), spec.heads_q // spec.heads_kv
    costs = [group * max(blocks - row // _BLOCK_ROWS, 0) for row in first_rows]
    busy = [0] * multiprocessors
    for head in range(0, heads, section):
        for cost in costs[:late]:
            for _ in range(min(section, heads - head)):
                heapq.heapreplace(busy, busy[0] + cost)
    for cost in costs[late:]:
        for _ in range(heads):
            heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)


def _seen_keys(spec: AttentionSpec) -> int:
    """Keys that a query sees on average; in a ragged call, of sequences that are all as long."""
    sequences = max(spec.batch, 1) if spec.rows == "ragged" else 1
    queries, keys = spec.seqlen_q // sequences, spec.seqlen_k // sequences
    if spec.window_left is not None and spec.window_right is not None:
        return min(keys, spec.window_left + spec.window_right + 1)
    if spec.window_left is None and spec.window_right is None:
        return keys
    return keys - min(queries, keys) // 2


def _adds_in_order(spec: AttentionSpec) -> bool:
    """Whether sums of dq that must be the same in every run are added up in the order of keys, by
    the one pass: by what does not change with the batch, as two passes have other bits. Not where
    tiles are so few that they wait for each other: those of a single key head that many share."""
    return spec.dropout == 0.0 and (spec.heads_q == spec.heads_kv or spec.heads_kv > 1)


def _opens_sums(spec: AttentionSpec, head_dim: int) -> bool:
    """Whether sums of dq begin with the part that comes first. Under a causal mask every tile is
    the first at the queries of its own keys, so that many open sums at once, if slowly; the tiles
    of grouped heads all follow one of them from their second head on."""
    alone = _is_causal(spec) and spec.heads_q == spec.heads_kv
    if alone and (spec.rows == "ragged" or head_dim >= 128):
        return True
    return _seen_keys(spec) <= SM90_OPENED_KEYS


def _order(
    spec: AttentionSpec, head_dim: int, slots: int, multiprocessors: int, in_order: bool = False
) -> tuple[int, int]:
    """Of how many heads tiles are dealt out at a time, and from which slot on they wait until those
    of all heads have been: where tiles cost the same, of one head, whose rows then stay in L2; else
    of as many as fit there, the longest tiles first. With a causal mask the last quarter of a
    head's tiles is a sixteenth of its work, and in a ragged call those of the shortest sequences
    are: dealt out in the end, they fill the time for which other blocks are at longer tiles. Where
    a block has few tiles, the longest of all heads come first."""
    ragged = spec.rows == "ragged"
    is_full = spec.window_left is None and spec.window_right is None and not ragged
    if is_full and not in_order:
        return 1, slots
    group = spec.heads_q // spec.heads_kv
    nbytes = 8 * spec.seqlen_q * head_dim * group  # of q, dout and sums
    heads = spec.heads_kv * (1 if ragged else spec.batch)
    section = max(1, min(heads, SECTION_BYTES // max(nbytes, 1)))
    if in_order:
        section = min(heads, max(section, -(-multiprocessors // SM90_ORDERED_TILES)))
    if is_full:
        return section, slots
    if spec.window_left is not None:
        return section, slots
    if slots * heads < SM90_FEW_TILES * multiprocessors:
        return heads, slots
    return section, slots - slots // 4


def _repairs(dtype: str, dims: tuple[int, int], dropout: bool = False) -> Iterator[Variant]:
    """What computes all gradients anew where some are not finite: a NaN that is masked or dropped
    is multiplied by 0 here, which must not be."""
    return sm80_passes(dtype, dims, dropout, "sm_90a", repairs=True)


def _variants(
    dtype: str,
    dims: tuple[int, int],
    varlen: bool,
    fused: bool,
    tile_n: int,
    *,
    dropout: bool = False,
    windowed: bool = False,
    in_order: bool = False,
    heads_inside: bool = False,
) -> Iterator[Variant]:
    """The kernels of a call, in order; tile_n: keys of a thread block of the one that computes dk
    and dv together; windowed: keys are bounded on the left; heads_inside: see
    `_walks_heads_inside`."""
    head_dim = dims[0]
    around = Sm90AroundConfig(dtype, dims[1], varlen, head_dim if fused else 0)
    prepare = dataclasses.replace(around, dropout=dropout)
    yield Variant("gradients/around_sm90.cu", "prepare_sm90", prepare)
    if not fused:
        queries = Sm90QueriesConfig(dtype, *dims, varlen, *SM90_QUERIES_TILES[dims])
        yield Variant("gradients/backward_queries_sm90.cu", "backward_queries_sm90", queries)
    if fused or head_dim <= SM90_NARROW_HEAD_DIM:
        # With a window of 1024 in 16384 TMA saves 3%; without a mask it loses as much at 8192
        # queries and more, and 1% with a causal mask.
        wide = head_dim > SM90_NARROW_HEAD_DIM
        stores_by_tma = fused and windowed and not (dropout or in_order or wide)
        both = Sm90BackwardConfig(
            *(dtype, *dims, varlen, fused, stores_by_tma, tile_n),
            dropout=dropout,
            in_order=in_order,
            heads_inside=heads_inside,
        )
        kernel = "backward_192_sm90" if wide else "backward_sm90"
        yield Variant(f"gradients/{kernel}.cu", kernel, both)
    else:
        keys = Sm90KeysConfig(dtype, *dims, varlen, SM90_KEYS_STAGES[dims])
        yield Variant("gradients/backward_keys_sm90.cu", "backward_keys_sm90", keys)
    if fused:
        yield Variant("gradients/around_sm90.cu", "finish_sm90", around)


def _tensor_maps(
    spec: AttentionSpec, strides: tuple[tuple[int, ...], ...], tile_m: int, tile_n: int
) -> dict[str, TensorMap | None]:
    """The maps of q, k, v and dout, whose strides are given."""
    shapes = {
        "q": (spec.seqlen_q, spec.heads_q, spec.head_dim),
        "k": (spec.seqlen_k, spec.heads_kv, spec.head_dim),
        "v": (spec.seqlen_k, spec.heads_kv, spec.head_dim_v),
        "dout": (spec.seqlen_q, spec.heads_q, spec.head_dim_v),
    }
    return {
        name: rows_map(spec, shape, array, tile_n if name in "kv" else tile_m)
        for (name, shape), array in zip(shapes.items(), strides, strict=True)
    }


def _result_maps(spec: AttentionSpec) -> dict[str, TensorMap | None]:
    """The maps of dk and dv, which are contiguous."""
    maps: dict[str, TensorMap | None] = {}
    for name, head_dim in (("dk", spec.head_dim), ("dv", spec.head_dim_v)):
        row = spec.heads_kv * head_dim * spec.dtype.itemsize
        strides = row * spec.seqlen_k, row, row // spec.heads_kv, spec.dtype.itemsize
        shape = spec.seqlen_k, spec.heads_kv, head_dim
        maps[name] = rows_map(spec, shape, strides, _PART_ROWS)
    return maps
