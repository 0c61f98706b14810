"""The variants of attention/forward_sm90.cu, Hopper's forward kernel: their tiles and speeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn._spec import AttentionSpec
from cuattn.gpu.compiler import Config, Variant


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
    mask_blocks: int = 1  # of keys whose masks of dropout are computed together
    rope_panel: bool = False  # the last panels of q and k are arrays of their own; k's has no heads
    stages: int = 2
    key_groups: bool = False  # of pages: one copy brings all columns of some keys
    even_keys: bool = False  # every thread block has as many blocks of keys, of any tiles

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)

    @property
    def loaded_keys(self) -> int:
        """Of a block, those that a warp loads."""
        return self.tile_n

    @property
    def tile_m(self) -> int:
        """Rows of a tile: queries, or with pack_gqa queries and heads."""
        return 64 * self.warpgroups

    def queries_of_tile(self, spec: AttentionSpec) -> int:
        """How many queries a tile has, of one head or of all that share a key head."""
        if self.pack_gqa:
            return 64 // (spec.heads_q // spec.heads_kv) * self.warpgroups
        return self.tile_m

    def heads_of_tiles(self, spec: AttentionSpec) -> int:
        """How many heads have tiles of their own: the query heads, or with pack_gqa key heads."""
        return spec.heads_kv if self.pack_gqa else spec.heads_q

    def most_tiles(self, spec: AttentionSpec, together: int = 1) -> int:
        """How many tiles a call has, at most, or groups of so many together: where rows are ragged,
        each sequence may end within one."""
        queries, heads = self.queries_of_tile(spec) * together, self.heads_of_tiles(spec)
        if self.varlen:
            return (spec.seqlen_q // queries + spec.batch) * heads
        return -(-spec.seqlen_q // queries) * spec.batch * heads

    @property
    def part_bytes(self) -> int:
        """What a thread block leaves of a tile with even_keys: PartOfTile of
        attention/even_merge_sm90.cuh."""
        return 4 * (32 * (self.head_dim_v // 8 + 1) + 1) * 16

    @property
    def sorts_by_place(self) -> bool:
        """kSortsByPlace of attention/scheduler_sm90.cuh: tiles of a causal call whose lengths the
        device knows."""
        whole_tiles = not (self.split_kv or self.even_keys)
        causal = self.bound_right and not self.bound_left
        return causal and whole_tiles and (self.varlen or self.seq_lens)

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
        """Panels of 64 columns, a KiB of barriers, rows of bias and mask, and masks of dropout."""
        panels, panels_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        queries = self.q_stages * self.tile_m * panels * 128
        keys = self.stages * self.tile_n * (panels + panels_v) * 128
        rows = self.tile_m * (self.bias_pitch * 4 + self.tile_n) + 1024 if self.elementwise else 0
        table = 2048 if self.sorts_by_place else 0  # TilesByPlace
        masks = self.tile_m * self.mask_blocks * self.tile_n // 8 if self.dropout else 0  # bits
        return queries + keys + 1024 + rows + table + masks


@dataclasses.dataclass(frozen=True)
class Sm90Tile:
    """A tile of attention/forward_sm90.cu, and how fast it is beside the others of its head_dims
    where both fit evenly."""

    tile_n: int
    warpgroups: int
    q_stages: int = 2  # of queries: with two, one tile's products run into the next's
    speed: float = 1.0
    mask_blocks: int = 1  # of keys, whose masks of dropout are computed together


SHORT_KEYS = 64  # of a block that is for sequences of no more
#: Tiles by (head_dim, head_dim_v), of which the first that are large enough serve. Three warpgroups
#: hide each other's exponentials best, two waste fewer rows of short sequences, and one, which
#: nothing hides, shares out few rows over the most multiprocessors. Varlen calls, whose lengths are
#: unknown here, get those with the first's keys. Where keys, values and queries fill shared memory,
#: tile_n comes first.
SM90_TILES = {
    (64, 64): (
        Sm90Tile(128, 3),
        Sm90Tile(128, 2, speed=0.85),
        Sm90Tile(128, 1, speed=0.58),
        Sm90Tile(64, 1, speed=0.47),
    ),
    (96, 96): (
        Sm90Tile(112, 3),
        Sm90Tile(112, 2, speed=0.85),
        Sm90Tile(112, 1, speed=0.55),
        Sm90Tile(128, 2, speed=0.9),
        Sm90Tile(128, 1, speed=0.58),
        Sm90Tile(64, 1, speed=0.47),
    ),
    (128, 128): (
        Sm90Tile(80, 3),
        Sm90Tile(80, 2, speed=0.81),
        Sm90Tile(80, 1, speed=0.52),
        Sm90Tile(128, 2, speed=0.95),
        Sm90Tile(128, 1, speed=0.61),
        Sm90Tile(64, 1, speed=0.5),
    ),
    (64, 256): (Sm90Tile(96, 2),),
    (192, 128): (Sm90Tile(128, 2, q_stages=1), Sm90Tile(128, 1, q_stages=1, speed=0.6)),
    (192, 192): (Sm90Tile(112, 2, q_stages=1), Sm90Tile(112, 1, q_stages=1, speed=0.6)),
    (256, 256): (Sm90Tile(80, 2, q_stages=1), Sm90Tile(80, 1, q_stages=1, speed=0.67)),
}
#: More of them, for causal calls over `SM90_MANY_KEYS` and more in plain arrays: blocks of 176 keys
#: make few queries over 8192 to 32768 keys 1.01 to 1.03 times as fast (H200). They leave room for
#: one stage of queries.
SM90_LARGE_BLOCKS = {
    (128, 128): (
        Sm90Tile(176, 2, q_stages=1, speed=0.97),
        Sm90Tile(176, 1, q_stages=1, speed=0.62),
    ),
}
SM90_MANY_KEYS = 4096
#: Where the kernel for blocks of some number of keys is not attention/forward_sm90.cu itself.
SM90_SOURCES = {176: "attention/forward_176_sm90.cu"}
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
#: The tile of calls with dropout, whose masks take registers, and shared memory a block of keys.
SM90_DROPOUT_TILES = {
    (64, 64): Sm90Tile(128, 3, mask_blocks=32),
    (96, 96): Sm90Tile(96, 3, mask_blocks=12),
    (128, 128): Sm90Tile(128, 2, mask_blocks=16),
    (64, 256): Sm90Tile(64, 2, mask_blocks=32),
    (192, 128): Sm90Tile(128, 2, q_stages=1, mask_blocks=8),
    (192, 192): Sm90Tile(96, 2, q_stages=1, mask_blocks=20),
    (256, 256): Sm90Tile(64, 2, q_stages=1, mask_blocks=32),
}
#: The (head_dim, head_dim_v) at which a copy that brings all columns of keys in pages is faster.
KEY_GROUP_DIMS = (128, 128)
#: (bound_left, bound_right) of the variants; what is not bounded is bounded far away in one that
#: bounds more. Prompts over a cache are causal, and no variant is for those that are not.
SM90_BOUNDS = ((False, False), (False, True), (True, True))
SM90_CACHE_BOUNDS = SM90_BOUNDS[1:]


def configs_of(
    dtype: str,
    dims: tuple[int, int],
    score: bool,
    elementwise: bool,
    *,
    varlen: bool,
    cached: bool,
    pack_gqa: bool = False,
    dropout: bool = False,
    many_keys: bool = True,
    key_groups: bool = False,
) -> Iterator[Sm90ForwardConfig]:
    """Every Config for these; those that bound fewer keys come first."""
    tiles = SM90_TILES[dims]
    if varlen:
        tiles = tuple(tile for tile in tiles if tile.tile_n == tiles[0].tile_n)
    if score:
        tiles = ((SM90_ELEMENTWISE_TILES if elementwise else SM90_SCORE_TILES)[dims],)
    elif dropout:
        tiles = (SM90_DROPOUT_TILES[dims],)
    elif cached:  # of unknown lengths
        tiles = tuple(tile for tile in tiles if tile.tile_n > SHORT_KEYS)
    plain = not (score or dropout or varlen or cached)
    large = SM90_LARGE_BLOCKS.get(dims, ()) if plain and many_keys else ()
    all_bounds = SM90_CACHE_BOUNDS if cached else SM90_BOUNDS
    for bounds in all_bounds[-1:] if score else all_bounds:
        for tile in tiles + large if bounds == (False, True) else tiles:
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
                mask_blocks=tile.mask_blocks,
                key_groups=key_groups,
            )


def variant_of(config: Sm90ForwardConfig) -> Variant:
    source = SM90_SOURCES.get(config.tile_n, "attention/forward_sm90.cu")
    return Variant(source, "forward_sm90", config)
