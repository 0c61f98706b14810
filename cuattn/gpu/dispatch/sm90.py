"""Calls of attention/forward_sm90.cu, Hopper's forward kernel: the variant, the order in which
thread blocks take tiles, and its second argument, the tensor maps of q, k and v among it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import (
    CONTIGUOUS_PAGE_SHIFT,
    divisor,
    dropout_arguments,
    forward_arguments,
)
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.launch import MAX_DIM, Call, Launch, Layout
from cuattn.gpu.dispatch.routing import MIN_PAGE
from cuattn.gpu.params import SM90_PARAMS
from cuattn.gpu.structs import Arguments
from cuattn.gpu.tensormap import TensorMap, addressable

SCHEDULER_BYTES = 16  # Sm90Params::Scheduler
FAR_ROWS = 1 << 30  # kFarRows of tile/ragged.cuh
ROUND = 1 << 64  # bytes, once round the address space
_PANEL_COLUMNS = 64  # 128 bytes
_WARPGROUP_ROWS = 64
_ANY_STRIDE = 16  # of an axis of length 1


@dataclasses.dataclass(frozen=True)
class Sm90ForwardConfig(Config):
    """attention/forward_sm90.cu."""

    dtype: str
    head_dim: int  # padded
    head_dim_v: int
    tile_n: int
    warpgroups: int  # of 64 queries each
    q_stages: int
    bound_left: bool
    bound_right: bool
    varlen: bool  # rows of q are ragged; those of k and v too, unless paged_kv or seq_lens
    score: bool  # softcap, alibi_slopes or what is elementwise
    elementwise: bool  # bias or mask
    pack_gqa: bool = False  # rows of a tile are those of all query heads that share a key head
    paged_kv: bool = False  # k and v lie in pages
    seq_lens: bool = False  # the device knows how many keys there are; slots beyond hold anything
    split_kv: bool = False  # the keys of a tile are cut into parts, with a result each
    out_dtype: str = ""  # of what is written: dtype where not said, or float32
    dropout: bool = False
    stages: int = 2

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)

    @property
    def tile_m(self) -> int:
        """Rows of a tile: queries, or with pack_gqa queries and heads."""
        return 64 * self.warpgroups

    def queries_of_tile(self, spec: AttentionSpec) -> int:
        """How many queries a tile has, of one head or of all that share a key head."""
        if self.pack_gqa:
            return 64 // (spec.heads_q // spec.heads_kv) * self.warpgroups
        return self.tile_m

    @property
    def bias_pitch(self) -> int:
        """Elements of a row of bias in shared memory: kBiasPitch of attention/layout_sm90.cuh."""
        return self.tile_n + 8

    @property
    def threads(self) -> int:
        """A warpgroup that loads, beside those that compute, and one for dropout."""
        return 128 * (self.warpgroups + 1 + self.dropout)

    @property
    def smem_bytes(self) -> int:
        """Panels of 64 columns, a KiB of barriers, and rows of bias and mask, or masks of dropout
        with as many bytes as P."""
        panels, panels_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        queries = self.q_stages * self.tile_m * panels * 128
        keys = self.stages * self.tile_n * (panels + panels_v) * 128
        rows = self.tile_m * (self.bias_pitch * 4 + self.tile_n) + 1024 if self.elementwise else 0
        masks = self.tile_m * self.tile_n * 2 + 256 * self.warpgroups if self.dropout else 0
        return queries + keys + 1024 + rows + masks


@dataclasses.dataclass(frozen=True)
class Sm90Tile:
    """A tile of attention/forward_sm90.cu, and how fast it is beside the others of its head_dims
    where both fit evenly."""

    tile_n: int
    warpgroups: int
    q_stages: int = 2  # of queries: with two, one tile's products run into the next's
    speed: float = 1.0


#: Tiles by (head_dim, head_dim_v), of which the first that are large enough serve. Three warpgroups
#: hide each other's exponentials best, two waste fewer rows of short sequences; varlen calls, whose
#: lengths are unknown here, get the first. Where keys, values and queries fill shared memory,
#: tile_n comes first.
SM90_TILES = {
    (64, 64): (Sm90Tile(128, 3), Sm90Tile(128, 2, speed=0.85)),
    (96, 96): (Sm90Tile(112, 3), Sm90Tile(128, 2, speed=0.9)),
    (128, 128): (Sm90Tile(80, 3), Sm90Tile(128, 2, speed=0.95)),
    (64, 256): (Sm90Tile(96, 2),),
    (192, 128): (Sm90Tile(128, 2, q_stages=1),),
    (192, 192): (Sm90Tile(112, 2, q_stages=1),),
    (256, 256): (Sm90Tile(80, 2, q_stages=1),),
}
#: The tile of calls with softcap or alibi_slopes: registers are what these take.
SM90_SCORE_TILES = {
    (64, 64): Sm90Tile(128, 3),
    (96, 96): Sm90Tile(96, 3),
    (128, 128): Sm90Tile(80, 3),
    (64, 256): Sm90Tile(80, 2),
    (192, 128): Sm90Tile(112, 2, q_stages=1),
    (192, 192): Sm90Tile(96, 2, q_stages=1),
    (256, 256): Sm90Tile(80, 2, q_stages=1),
}
#: The tile of calls with bias or mask, which take their share of shared memory.
SM90_ELEMENTWISE_TILES = {
    (64, 64): Sm90Tile(112, 3),
    (96, 96): Sm90Tile(80, 3, q_stages=1),
    (128, 128): Sm90Tile(80, 3, q_stages=1),
    (64, 256): Sm90Tile(80, 2),
    (192, 128): Sm90Tile(80, 2, q_stages=1),
    (192, 192): Sm90Tile(80, 2, q_stages=1),
    (256, 256): Sm90Tile(48, 2, q_stages=1),
}
#: The tile of calls with dropout: their mask takes a share of shared memory, and the warps that
#: compute it one of registers. (With 512 threads ptxas takes no product of 256 columns.)
SM90_DROPOUT_TILES = {
    (64, 64): Sm90Tile(128, 2),
    (96, 96): Sm90Tile(128, 2),
    (128, 128): Sm90Tile(128, 2),
    (192, 128): Sm90Tile(96, 2, q_stages=1),
    (192, 192): Sm90Tile(64, 2, q_stages=1),
}

#: (bound_left, bound_right) of the variants; what is not bounded is bounded far away in one that
#: bounds more. Prompts over a cache are causal, and no variant is for those that are not.
SM90_BOUNDS = ((False, False), (False, True), (True, True))
SM90_CACHE_BOUNDS = SM90_BOUNDS[1:]


class Sm90Forward:
    """16-bit calls that TMA can address, with scores that scaling keeps in order.

    Keys may lie in pages, or in caches of which the device knows how much is used: such a cache is
    one page a sequence. A tile has rows of one sequence alone, so a sequence's results are bit for
    bit those of the ragged call with the same keys one after the other.
    """

    name = "forward_sm90"
    decodes = False
    reads_codes = False

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None."""
        spec = call.spec
        dims = spec.head_dim, spec.head_dim_v
        cached = spec.keys in ("cached", "paged")
        ragged = spec.rows == "ragged"
        if (
            call.arch != "sm_90a"
            or call.partial is not None
            or (call.elementwise and (ragged or cached))
            or max(dims) > MAX_DIM
            or spec.kv_dtype != spec.dtype
            or (spec.keys == "paged" and spec.page_size < MIN_PAGE)
            or spec.dtype.itemsize != 2
            or (spec.dropout != 0.0 and (call.has_score or cached))
            or not call.addressable
            or spec.head_dim_v % 8
            or not (0 < spec.seqlen_k < 1 << 29 and spec.seqlen_q < 1 << 29)
            or (spec.scale <= 0.0 and not call.has_own_scores)
        ):
            return None
        bounded = spec.window_left is not None, spec.window_right is not None
        padded = next(tile for tile in SM90_TILES if dims[0] <= tile[0] and dims[1] <= tile[1])
        if spec.dropout != 0.0 and padded not in SM90_DROPOUT_TILES:
            return None
        configs = [
            config
            for config in _configs(
                spec.dtype.name,
                padded,
                call.has_score,
                call.elementwise and not call.has_own_scores,
                varlen=ragged,
                cached=cached,
                pack_gqa=packs_gqa(call),
                dropout=spec.dropout != 0.0,
            )
            if (config.bound_left, config.bound_right) >= bounded
        ]
        config = min(configs, key=functools.partial(_time, spec))
        heads = spec.heads_kv if config.pack_gqa else spec.heads_q
        queries = config.queries_of_tile(spec)
        if ragged:
            tiles = (spec.seqlen_q // queries + spec.batch) * heads
        else:
            tiles = -(-spec.seqlen_q // queries) * spec.batch * heads
        if tiles >= 1 << 31:
            return None
        blocks = min(tiles, call.multiprocessors)
        tensor_maps = maps_of(call, config)
        arguments = forward_arguments(spec, call.strides, call.bias, call.mask, call.alibi_slopes)
        if config.dropout:
            arguments = arguments.followed_by(dropout_arguments(spec))
        return Launch(
            variant_of(config),
            (blocks,),
            (
                arguments,
                kernel_arguments(
                    spec,
                    config,
                    tensor_maps,
                    scales=score_scales(call),
                    section=sm90_section(spec, config, blocks),
                    table_stride=call.table_stride,
                    num_pages=call.num_pages,
                    min_queries=call.min_queries,
                ),
            ),
            tensor_maps,
            workspace_bytes=SCHEDULER_BYTES if ragged or cached else 0,
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if arch != "sm_90a":
            return
        for dtype, dims in itertools.product(("float16", "bfloat16"), SM90_TILES):
            for varlen, cached in itertools.product((False, True), repeat=2):
                # Bias and mask come with batched rows and keys alone.
                scores = ((False, False), (True, False), (True, True))
                for score in scores[: 2 if varlen or cached else 3]:
                    for pack_gqa in (False, True)[: 2 if varlen and not score[0] else 1]:
                        configs = _configs(
                            dtype, dims, *score, varlen=varlen, cached=cached, pack_gqa=pack_gqa
                        )
                        yield from map(variant_of, configs)
                if not cached and dims in SM90_DROPOUT_TILES:
                    configs = _configs(
                        dtype, dims, False, False, varlen=varlen, cached=False, dropout=True
                    )
                    yield from map(variant_of, configs)


def packs_gqa(call: Call) -> bool:
    """Whether the rows of a tile are those of all query heads that share a key head: where lengths
    of sequences are unknown, so that those of a few tokens fill tiles best."""
    spec = call.spec
    group = spec.heads_q // spec.heads_kv
    idle = 64 % group if group <= 64 else 64  # of 64 rows
    most = 1 if spec.keys == "ragged" else 4
    plain = not call.has_score and spec.dropout == 0.0
    return spec.rows == "ragged" and group > 1 and idle <= most and plain


def sm90_section(spec: AttentionSpec, config: Sm90ForwardConfig, blocks: int) -> int:
    """How many heads' tiles are dealt out to the blocks at a time, the last rows' first; 0 where
    the tiles of all heads cost the same.

    The keys and values that their tiles see at the same time should stay in L2; among the counts
    for which they do, the best is the one that keeps the busiest block's sum of tiles lowest. For
    sequences of unknown lengths, of which some may be a few times as long as the mean, it is the
    most: the more tiles of a length there are, the less the last ones leave blocks idle.
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
        most = max((n for n in range(1, heads + 1) if seen_bytes(n) <= SECTION_BYTES), default=1)
        return -(-heads // -(-heads // most))
    cost = _costs(spec, config)
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
    first_row = np.arange(0, spec.seqlen_q, config.tile_m)
    begin, end = _blocks_seen(spec, config, first_row, config.tile_m)
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


def _costs(spec: AttentionSpec, config: Sm90ForwardConfig) -> np.ndarray:
    """What each tile of a head costs, in blocks of keys: those it sees, and about one more."""
    return 1.0 + blocks_of_keys(spec, config)


#: A little more than L2 holds: not all of a section is needed at a time, and a block that has less
#: to do than others costs more. 70 MiB instead of 40: causal at head_dim 128, seqlen 8192 and 16384
#: 1.01 and 1.03 times as fast, 140 again slower (H200).
SECTION_BYTES = 70 << 20
SECTION_TILES = 4096
LONG = 4  # times the mean length, of a varlen call
SECTIONS_SEEN = 64  # by the search: after these it is the same again and again


def _configs(
    dtype: str,
    dims: tuple[int, int],
    score: bool,
    elementwise: bool,
    *,
    varlen: bool,
    cached: bool,
    pack_gqa: bool = False,
    dropout: bool = False,
) -> Iterator[Sm90ForwardConfig]:
    """Every Config for these; those that bound fewer keys come first."""
    tiles = SM90_TILES[dims][: 1 if varlen else None]
    if score:
        tiles = ((SM90_ELEMENTWISE_TILES if elementwise else SM90_SCORE_TILES)[dims],)
    elif dropout:
        tiles = (SM90_DROPOUT_TILES[dims],)
    all_bounds = SM90_CACHE_BOUNDS if cached else SM90_BOUNDS
    for bounds in all_bounds[-1:] if score or dropout else all_bounds:
        for tile in tiles:
            yield Sm90ForwardConfig(
                dtype,
                *dims,
                tile_n=tile.tile_n,
                warpgroups=tile.warpgroups,
                q_stages=tile.q_stages,
                bound_left=bounds[0],
                bound_right=bounds[1],
                varlen=varlen,
                score=score,
                elementwise=elementwise,
                pack_gqa=pack_gqa,
                paged_kv=cached,
                seq_lens=cached,
                dropout=dropout,
            )


def _time(spec: AttentionSpec, config: Sm90ForwardConfig) -> float:
    """What a head costs, in an unnamed unit: a choice that the batch has no say in, and the
    capacity of a cache neither."""
    speed = {
        (tile.tile_n, tile.warpgroups): tile.speed
        for tile in SM90_TILES[config.head_dim, config.head_dim_v]
    }.get((config.tile_n, config.warpgroups), 1.0)
    if config.seq_lens:
        return -(-spec.seqlen_q // config.tile_m) * config.tile_m / speed
    return _costs(spec, config).sum() * config.tile_m * config.tile_n / speed


def variant_of(config: Sm90ForwardConfig) -> Variant:
    return Variant("attention/forward_sm90.cu", "forward_sm90", config)


# ------------------------------------------------------------------- the kernel's second argument


def kernel_arguments(
    spec: AttentionSpec,
    config: Sm90ForwardConfig,
    tensor_maps: dict[str, TensorMap | None],
    *,
    scales: tuple[float, float, float],
    section: int = 0,
    table_stride: int = 0,
    num_pages: int = 0,
    num_splits: int = 1,
    min_queries: int = 0,
) -> Arguments:
    """Pack SM90_PARAMS but for what each launch fills in."""
    cap_scale, score_scale, scale_log2 = scales
    return SM90_PARAMS.arguments(
        section=section,
        cap_scale=cap_scale,
        score_scale=score_scale,
        scale_log2=scale_log2,
        # A key's page, and the box of a block that a lane loads: shifts of a key's number.
        page_shift=spec.page_size.bit_length() - 1 if spec.page_size else CONTIGUOUS_PAGE_SHIFT,
        box_shift=(_box_keys(spec, config) - 1).bit_length(),
        bias_mapped=tensor_maps["bias"] is not None,
        mask_mapped=tensor_maps["mask"] is not None,
        pairs_of_boxes="k_pair" in tensor_maps,
        num_splits=num_splits,
        table_stride=table_stride,
        num_pages=num_pages,
        min_queries=min_queries,
        by_queries_of_tile=divisor(config.queries_of_tile(spec)),
    )


def score_scales(call: Call) -> tuple[float, float, float]:
    """What scores are multiplied by: before a tanh, after it, and before exp2."""
    spec = call.spec
    cap_scale = spec.scale / spec.softcap if spec.softcap else 0.0
    score_scale = spec.softcap or spec.scale
    natural = call.bias is not None or call.has_own_scores
    return cap_scale, score_scale, (1.0 if natural else score_scale) / math.log(2.0)


def maps_of(call: Call, config: Sm90ForwardConfig) -> dict[str, TensorMap | None]:
    """The maps of q, k, v, bias and mask; None for one that is not there, or out of TMA's reach."""
    spec, strides = call.spec, call.strides
    if config.pack_gqa:
        q = _packed_rows(spec, strides.q)
    else:
        q = rows_map(spec, (spec.seqlen_q, spec.heads_q, spec.head_dim), strides.q, _WARPGROUP_ROWS)
    keys = _pages if config.paged_kv else _keys
    mapped = config.elementwise and call.score_aligned
    return {
        "q": q,
        "k": keys(call, config, spec.head_dim, strides.k),
        "v": keys(call, config, spec.head_dim_v, strides.v),
        **_pairs(call, config),
        "bias": _scores(call.bias if mapped else None, config.bias_pitch),
        "mask": _scores(call.mask if mapped else None, config.tile_n),
    }


def rows_map(
    spec: AttentionSpec, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> TensorMap:
    """The axes (head_dim, row, head, outer) of an array (batch, row, head, head_dim), or (total,
    head, head_dim).

    Outer is the batch. For varlen it counts rows once more, and there is another axis, which leads
    back by FAR_ROWS: tile/ragged.cuh says why.
    """
    length, heads, head_dim = shape
    row, head = strides[-3:-1]
    box = (_PANEL_COLUMNS, box_rows, 1, 1)
    dtype = spec.dtype
    if spec.rows == "ragged":
        far = (head_dim, FAR_ROWS, heads, length + 1, FAR_ROWS + 1)
        return TensorMap(dtype, far, (row, head, row, ROUND // FAR_ROWS - row), (*box, 1))
    return TensorMap(dtype, (head_dim, length, heads, spec.batch), (row, head, strides[0]), box)


def _packed_rows(spec: AttentionSpec, strides: tuple[int, ...]) -> TensorMap:
    """The axes (head_dim, head, row, outer) of q, as `rows_map` has them: a box has all heads that
    share a key head."""
    group = spec.heads_q // spec.heads_kv
    rows = rows_map(
        spec, (spec.seqlen_q, spec.heads_q, spec.head_dim), strides, _WARPGROUP_ROWS // group
    )
    head_dim, length, heads, *outer = rows.shape
    row, head, *steps = rows.strides
    column, box_rows, _, *box = rows.box
    return TensorMap(
        spec.dtype,
        (head_dim, heads, length, *outer),
        (head, row, *steps),
        (column, group, box_rows, *box),
    )


def _keys(
    call: Call, config: Sm90ForwardConfig, head_dim: int, strides: tuple[int, ...]
) -> TensorMap:
    """The axes of k or v whose rows are batched or ragged."""
    spec = call.spec
    return rows_map(spec, (spec.seqlen_k, spec.heads_kv, head_dim), strides, config.tile_n)


def _pages(
    call: Call,
    config: Sm90ForwardConfig,
    head_dim: int,
    strides: tuple[int, ...],
    boxes: int = 1,
) -> TensorMap:
    """The axes (head_dim, slot, head, page) of k or v in pages; a cache is one page a sequence."""
    spec = call.spec
    pages, slots = spec.batch, spec.seqlen_k
    if spec.keys == "paged":
        pages, slots = call.num_pages, spec.page_size
    page, slot, head = strides[:3]
    return TensorMap(
        spec.dtype,
        (head_dim, slots, spec.heads_kv, pages),
        (slot, head, page),
        (_PANEL_COLUMNS, boxes * _box_keys(spec, config), 1, 1),
    )


def _pairs(call: Call, config: Sm90ForwardConfig) -> dict[str, TensorMap | None]:
    """The maps of k and v in boxes of twice as many keys, where a block consists of an odd number
    of boxes and pages have room for two."""
    spec = call.spec
    box = _box_keys(spec, config)
    if spec.keys != "paged" or config.tile_n % (2 * box) == 0 or spec.page_size < 2 * box:
        return {}
    return {
        f"{name}_pair": _pages(call, config, head_dim, strides, boxes=2)
        for name, head_dim, strides in (
            ("k", spec.head_dim, call.strides.k),
            ("v", spec.head_dim_v, call.strides.v),
        )
    }


def _box_keys(spec: AttentionSpec, config: Sm90ForwardConfig) -> int:
    """Keys in a box: a whole block, or the largest power of two that divides both a block and a
    page."""
    if spec.keys != "paged":
        return config.tile_n
    return min(spec.page_size, config.tile_n & -config.tile_n)


def _scores(layout: Layout | None, pitch: int) -> TensorMap | None:
    """The axes (key, query, head, batch) of a bias or mask, where TMA can address it
    and each query has a row of its own."""
    if layout is None:
        return None
    shape, strides, dtype = layout
    missing = 4 - len(shape)
    lengths = (1,) * missing + shape
    steps = tuple(
        _ANY_STRIDE if n == 1 else stride
        for n, stride in zip(lengths, (0,) * missing + strides, strict=True)
    )
    contiguous = strides[-1] == dtype.itemsize and shape[-1] > 1 and lengths[-2] > 1
    if not (contiguous and addressable(steps[:3])):
        return None
    box = (pitch, _WARPGROUP_ROWS, 1, 1)
    return TensorMap(dtype, lengths[::-1], steps[2::-1], box, swizzled=False)
