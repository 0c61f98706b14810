"""Which kernel serves a forward call, in which variant."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from cuattn._arrays import FLOAT_DTYPES
from cuattn._spec import AttentionSpec
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.launch import SHARED_KIB, Launch, capability


def forward(
    spec: AttentionSpec,
    arch: str,
    *,
    has_score: bool,
    aligned: bool,
    elementwise: bool | None = None,
) -> Launch:
    """Choose the kernel of a forward call: the fastest tier of `FORWARD_TIERS` that serves it.

    Parameters
    ----------
    spec : AttentionSpec
        The call.
    arch : str
        The device's architecture.
    has_score : bool
        Whether bias, mask or alibi_slopes are given.
    aligned : bool
        Whether every pointer and stride of q, k, v and out is a multiple of 16 bytes.
    elementwise : bool, optional
        Whether bias or mask are given; if not said, `has_score`.

    Raises
    ------
    LookupError
        No tier serves the call: only where `FORWARD_TIERS` was cut down, as tests do to reach one
        tier.
    """
    if elementwise is None:
        elementwise = has_score
    for choose in FORWARD_TIERS.values():
        launch = choose(spec, arch, has_score=has_score, elementwise=elementwise, aligned=aligned)
        if launch is not None:
            return launch
    raise LookupError(f"none of the tiers {', '.join(FORWARD_TIERS)} serves {spec} on {arch}")


# ------------------------------------------------------------------------------------ forward, simt


@dataclasses.dataclass(frozen=True)
class SimtForwardConfig(Config):
    """attention/forward_simt.cu."""

    dtype: str
    head_dim_v: int  # the next of 64, 128 and 256
    # softcap, bias, mask or alibi_slopes can be there; for 16-bit, which falls here rarely, always
    has_score: bool
    tile_m: int
    tile_n: int
    thread_rows: int
    blocks_per_sm: int  # that registers must suffice for, as shared memory does

    @property
    def threads(self) -> int:
        """16 share a row of scores and of O."""
        return 16 * self.thread_rows


#: (tile_m, tile_n, thread_rows, blocks_per_sm) by the size of the accumulator and head_dim_v: as
#: many scores and columns of O for a thread as registers hold beside their chains, since it should
#: use often what it reads from shared memory.
SIMT_TILES = {
    4: {64: (64, 64, 8, 3), 128: (32, 128, 8, 3), 256: (32, 128, 8, 2)},
    8: {64: (32, 64, 8, 3), 128: (32, 64, 8, 2), 256: (16, 64, 8, 2)},
}
SIMT_KIB = 44  # of shared memory, at most, for a block
GRID_Y = 65535  # the most blocks along a grid's second axis


def simt_forward(
    spec: AttentionSpec, arch: str, *, has_score: bool, elementwise: bool, aligned: bool
) -> Launch | None:
    """Choose a variant of attention/forward_simt.cu, which serves every call."""
    config = _simt_config(
        dtype=spec.dtype.name,
        head_dim_v=next(n for n in (64, 128, 256) if spec.head_dim_v <= n),
        has_score=has_score or spec.softcap != 0.0 or spec.dtype.itemsize == 2,
        arch=arch,
    )
    if spec.rows == "ragged":
        tiles, batch = spec.seqlen_q // config.tile_m + spec.batch, 1
    else:
        tiles, batch = -(-spec.seqlen_q // config.tile_m), spec.batch
    rows = min(batch, GRID_Y)
    return Launch(_simt_variant(config), (tiles * spec.heads_q, rows, -(-batch // rows)))


def simt_forward_variants(arch: str) -> Iterator[Variant]:
    """Every variant of attention/forward_simt.cu."""
    for dtype, name in FLOAT_DTYPES.items():
        for head_dim_v in (64, 128, 256):
            for has_score in (True,) if dtype.itemsize == 2 else (False, True):
                yield _simt_variant(_simt_config(name, head_dim_v, has_score, arch))


def _simt_config(dtype: str, head_dim_v: int, has_score: bool, arch: str) -> SimtForwardConfig:
    *tile, blocks = SIMT_TILES[8 if dtype == "float64" else 4][head_dim_v]
    blocks = min(blocks, SHARED_KIB.get(capability(arch), 100) // SIMT_KIB)
    return SimtForwardConfig(dtype, head_dim_v, has_score, *tile, blocks)


def _simt_variant(config: SimtForwardConfig) -> Variant:
    return Variant("attention/forward_simt.cu", "forward_simt", config)


# ------------------------------------------------------------------------------------ forward, sm90


@dataclasses.dataclass(frozen=True)
class Sm90ForwardConfig(Config):
    """attention/forward_sm90.cu."""

    dtype: str
    head_dim: int  # padded
    head_dim_v: int
    tile_n: int
    warpgroups: int  # of 64 queries each
    q_slots: int
    bound_left: bool
    bound_right: bool
    varlen: bool
    score: bool  # softcap, alibi_slopes or what is elementwise
    elementwise: bool  # bias or mask
    prefix: bool = False  # of all queries: rows pack query heads, keys lie in pages, in parts
    stages: int = 2

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return 64 * self.warpgroups

    @property
    def bias_pitch(self) -> int:
        """Elements of a row of bias in shared memory: kBiasPitch of attention/layout_sm90.cuh."""
        return self.tile_n + 8

    @property
    def threads(self) -> int:
        """A warpgroup that loads, beside those that compute."""
        return 128 * (self.warpgroups + 1)

    @property
    def smem_bytes(self) -> int:
        """Panels of 64 columns, a KiB of barriers, and rows of bias and mask."""
        panels, panels_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        queries = self.q_slots * self.tile_m * panels * 128
        keys = self.stages * self.tile_n * (panels + panels_v) * 128
        rows = self.tile_m * (self.bias_pitch * 4 + self.tile_n) + 1024 if self.elementwise else 0
        return queries + keys + 1024 + rows


@dataclasses.dataclass(frozen=True)
class Sm90Tile:
    """A tile of attention/forward_sm90.cu, and how fast it is beside the others of its head_dims
    where both fit evenly."""

    tile_n: int
    warpgroups: int
    q_slots: int = 2  # of queries: with two, one tile's products run into the next's
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
    (192, 128): (Sm90Tile(128, 2, q_slots=1),),
    (192, 192): (Sm90Tile(112, 2, q_slots=1),),
    (256, 256): (Sm90Tile(80, 2, q_slots=1),),
}
#: The tile of calls with softcap or alibi_slopes: registers are what these take.
SM90_SCORE_TILES = {
    (64, 64): Sm90Tile(128, 3),
    (96, 96): Sm90Tile(96, 3),
    (128, 128): Sm90Tile(80, 3),
    (64, 256): Sm90Tile(80, 2),
    (192, 128): Sm90Tile(112, 2, q_slots=1),
    (192, 192): Sm90Tile(96, 2, q_slots=1),
    (256, 256): Sm90Tile(80, 2, q_slots=1),
}
#: The tile of calls with bias or mask, which take their share of shared memory.
SM90_ELEMENTWISE_TILES = {
    (64, 64): Sm90Tile(112, 3),
    (96, 96): Sm90Tile(80, 3, q_slots=1),
    (128, 128): Sm90Tile(80, 3, q_slots=1),
    (64, 256): Sm90Tile(80, 2),
    (192, 128): Sm90Tile(80, 2, q_slots=1),
    (192, 192): Sm90Tile(80, 2, q_slots=1),
    (256, 256): Sm90Tile(48, 2, q_slots=1),
}

#: (bound_left, bound_right) of the variants; what is not bounded is bounded far away in one that
#: bounds more.
SM90_BOUNDS = ((False, False), (False, True), (True, True))


def sm90_forward(
    spec: AttentionSpec, arch: str, *, has_score: bool, elementwise: bool, aligned: bool
) -> Launch | None:
    """Choose a variant of attention/forward_sm90.cu: what the copy engine can address, with scores
    that scaling keeps in order."""
    dims = spec.head_dim, spec.head_dim_v
    if (
        arch != "sm_90a"
        or spec.dtype.itemsize != 2
        or not aligned
        or spec.head_dim_v % 8
        or not (0 < spec.seqlen_k < 1 << 29 and spec.seqlen_q < 1 << 29)
        or spec.scale <= 0.0
    ):
        return None
    # Varlen calls have neither bias nor mask.
    score = (has_score or spec.softcap != 0.0, elementwise and spec.rows == "batched")
    bounded = spec.window_left is not None, spec.window_right is not None
    padded = next(tile for tile in SM90_TILES if dims[0] <= tile[0] and dims[1] <= tile[1])
    configs = [
        config
        for config in _sm90_configs(spec.dtype.name, padded, spec.rows == "ragged", *score)
        if (config.bound_left, config.bound_right) >= bounded
    ]
    config = min(configs, key=functools.partial(_sm90_time, spec))
    if spec.rows == "ragged":
        tiles = (spec.seqlen_q // config.tile_m + spec.batch) * spec.heads_q
    else:
        tiles = -(-spec.seqlen_q // config.tile_m) * spec.batch * spec.heads_q
    if tiles >= 1 << 31:
        return None
    return Launch(_sm90_variant(config), (tiles,))


def sm90_forward_variants(arch: str) -> Iterator[Variant]:
    """Every variant of attention/forward_sm90.cu."""
    if arch != "sm_90a":
        return
    for dtype, dims in itertools.product(("float16", "bfloat16"), SM90_TILES):
        for varlen in (False, True):
            for score in ((False, False), (True, False), (True, True))[: 2 if varlen else 3]:
                yield from map(_sm90_variant, _sm90_configs(dtype, dims, varlen, *score))


def sm90_section(spec: AttentionSpec, config: Sm90ForwardConfig, blocks: int) -> int:
    """How many heads' tiles are dealt out to the blocks at a time, the last rows' first; 0 where
    the tiles of all heads cost the same.

    The keys and values that their tiles see at the same time should stay in L2; among the counts
    for which they do, the best is the one that keeps the busiest block's sum of tiles lowest. For
    sequences of unknown lengths, of which some may be a few times as long as the mean, it is the
    most: the more tiles of a length there are, the less the last ones leave blocks idle.
    """
    heads = spec.heads_q if spec.rows == "ragged" else spec.heads_q * spec.batch
    seqlen_k = spec.seqlen_k
    if spec.rows == "ragged":
        seqlen_k = min(seqlen_k, LONG * -(-seqlen_k // max(1, spec.batch)))
    group = spec.heads_q // spec.heads_kv
    key_bytes = (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize / group
    window = sum(
        seqlen_k if side is None else side for side in (spec.window_left, spec.window_right)
    )

    def seen_bytes(section: int) -> float:
        rows = -(-blocks // section) * config.tile_m  # of a head, at the same time
        return section * min(seqlen_k, rows + window) * key_bytes

    if spec.rows == "ragged":
        most = max((n for n in range(1, heads + 1) if seen_bytes(n) <= SECTION_BYTES), default=1)
        return -(-heads // -(-heads // most))
    cost = _sm90_costs(spec, config)
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
    stay = [section for section in range(1, most + 1) if seen_bytes(section) <= SECTION_BYTES]
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
    right = spec.seqlen_k if spec.window_right is None else spec.window_right
    left = spec.seqlen_k + spec.seqlen_q if spec.window_left is None else spec.window_left
    end = np.clip(last_row + diagonal + right + 1, 0, spec.seqlen_k)
    begin = np.clip(first_row + diagonal - left, 0, end)
    return begin // config.tile_n, -(-end // config.tile_n)


def _sm90_costs(spec: AttentionSpec, config: Sm90ForwardConfig) -> np.ndarray:
    """What each tile of a head costs, in blocks of keys: those it sees, and about one more."""
    return 1.0 + blocks_of_keys(spec, config)


#: A little more than L2 holds: not all of a section is needed at a time, and a block that has less
#: to do than others costs more. 70 MiB instead of 40: causal at head_dim 128, seqlen 8192 and 16384
#: 1.01 and 1.03 times as fast, 140 again slower (H200).
SECTION_BYTES = 70 << 20
SECTION_TILES = 4096
LONG = 4  # times the mean length, of a varlen call
SECTIONS_SEEN = 64  # by the search: after these it is the same again and again


def _sm90_configs(
    dtype: str, dims: tuple[int, int], varlen: bool, score: bool, elementwise: bool
) -> Iterator[Sm90ForwardConfig]:
    """Every Config for these; those that bound fewer keys come first."""
    tiles = SM90_TILES[dims][: 1 if varlen else None]
    if score:
        tiles = ((SM90_ELEMENTWISE_TILES if elementwise else SM90_SCORE_TILES)[dims],)
    for bounds in SM90_BOUNDS[-1:] if score else SM90_BOUNDS:
        for tile in tiles:
            yield Sm90ForwardConfig(
                dtype,
                *dims,
                tile_n=tile.tile_n,
                warpgroups=tile.warpgroups,
                q_slots=tile.q_slots,
                bound_left=bounds[0],
                bound_right=bounds[1],
                varlen=varlen,
                score=score,
                elementwise=elementwise,
            )


def _sm90_time(spec: AttentionSpec, config: Sm90ForwardConfig) -> float:
    """What a head costs, in an unnamed unit: a choice that the batch has no say in."""
    speed = {
        (tile.tile_n, tile.warpgroups): tile.speed
        for tile in SM90_TILES[config.head_dim, config.head_dim_v]
    }.get((config.tile_n, config.warpgroups), 1.0)
    return _sm90_costs(spec, config).sum() * config.tile_m * config.tile_n / speed


def _sm90_variant(config: Sm90ForwardConfig) -> Variant:
    return Variant("attention/forward_sm90.cu", "forward_sm90", config)


# ------------------------------------------------------------------------------------ forward, sm80


@dataclasses.dataclass(frozen=True)
class Sm80ForwardConfig(Config):
    """attention/forward_sm80.cu."""

    dtype: str
    head_dim: int  # padded
    head_dim_v: int
    # anything but whole chunks of 16 bytes and scores that are only scaled, by a positive number
    general: bool
    tile_m: int
    tile_n: int
    warps: int

    @property
    def threads(self) -> int:
        """Four or eight warps; either way 256 threads of 255 registers fill a multiprocessor."""
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """A tile each of Q, K and V."""
        keys = self.tile_n * (self.head_dim + self.head_dim_v)
        return 2 * (self.tile_m * self.head_dim + keys)


#: (tile_m, tile_n, warps) by (head_dim, head_dim_v), the first that is large enough, for plain
#: calls and for general ones: where a multiprocessor has 228 KiB of shared memory, 164 and 100. A
#: warp has 32 rows as long as their O fits its registers, since each fragment of K and V then
#: serves two products; two blocks of four warps hide each other's waits. General calls of head_dim
#: 256 take what NVRTC 13.0 and 13.5 both keep in registers.
SM80_TILES = {
    (64, 64): (((128, 128, 4),) * 3, ((128, 32, 4),) * 3),
    (96, 96): (((128, 64, 4),) * 3, ((128, 32, 4),) * 3),
    (128, 128): (((128, 64, 4), (128, 64, 4), (128, 32, 4)), ((64, 64, 4),) * 3),
    (192, 128): (((64, 64, 4), (64, 64, 4), (64, 32, 4)), ((64, 32, 4),) * 3),
    (192, 192): (((64, 64, 4), (64, 64, 4), (64, 32, 4)), ((64, 32, 4),) * 3),
    (256, 256): (
        ((64, 64, 4), (128, 64, 8), (64, 64, 4)),
        ((64, 32, 4), (128, 32, 8), (64, 32, 4)),
    ),
}

#: Of keys and values that blocks work on at the same time: they should stay in L2.
SM80_GROUP_BYTES = 16 << 20


def sm80_forward(
    spec: AttentionSpec, arch: str, *, has_score: bool, elementwise: bool, aligned: bool
) -> Launch | None:
    """Choose a variant of attention/forward_sm80.cu: 16-bit calls of any kind."""
    heads = spec.batch * spec.heads_q
    if (
        capability(arch) < 80
        or spec.dtype.itemsize != 2
        or spec.heads_q > GRID_Y
        or heads > 1 << 30
    ):
        return None
    dims = spec.head_dim, spec.head_dim_v
    general = (
        has_score
        or not aligned
        or any(d % 8 for d in dims)
        or spec.softcap != 0.0
        or spec.scale <= 0.0
    )
    config = _sm80_config(
        spec.dtype.name,
        next(tile for tile in SM80_TILES if dims[0] <= tile[0] and dims[1] <= tile[1]),
        general,
        arch,
    )
    if spec.rows == "ragged":
        grid = spec.seqlen_q // config.tile_m + spec.batch, spec.heads_q
    else:
        # Blocks of a group of heads run side by side, their longest tiles first.
        group = 1
        if spec.window_left is not None or spec.window_right is not None:
            shared = spec.heads_q // spec.heads_kv
            group = min(heads, SM80_GROUP_BYTES * shared // (spec.seqlen_k * sum(dims) * 2 + 1))
        group = max(group, -(-heads // GRID_Y), 1)
        grid = -(-spec.seqlen_q // config.tile_m) * group, -(-heads // group)
    return Launch(_sm80_variant(config), grid) if grid[0] < 1 << 31 else None


def sm80_forward_variants(arch: str) -> Iterator[Variant]:
    """Every variant of attention/forward_sm80.cu."""
    if capability(arch) < 80:
        return
    for dtype, dims in itertools.product(("float16", "bfloat16"), SM80_TILES):
        for general in (False, True):
            yield _sm80_variant(_sm80_config(dtype, dims, general, arch))


def _sm80_config(dtype: str, dims: tuple[int, int], general: bool, arch: str) -> Sm80ForwardConfig:
    shared = (228, 164, 100).index(SHARED_KIB.get(capability(arch), 100))
    return Sm80ForwardConfig(dtype, *dims, general, *SM80_TILES[dims][general][shared])


def _sm80_variant(config: Sm80ForwardConfig) -> Variant:
    return Variant("attention/forward_sm80.cu", "forward_sm80", config)


#: The tiers of the forward pass, fastest first: each chooses a launch, or None for a call that it
#: leaves to the next.
FORWARD_TIERS = {"sm90": sm90_forward, "sm80": sm80_forward, "simt": simt_forward}


def forward_variants(arch: str) -> Iterator[Variant]:
    """Every variant of the kernels in attention/."""
    yield from simt_forward_variants(arch)
    yield from sm90_forward_variants(arch)
    yield from sm80_forward_variants(arch)
