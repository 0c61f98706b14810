"""Calls of the forward kernels that any GPU has, and those of Ampere and newer. Hopper's own is in
:mod:`cuattn.gpu.dispatch.sm90`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu.arguments import cache_arguments, dropout_arguments, forward_arguments
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.launch import (
    LEAST_SCALE,
    MAX_DIM,
    MOST_OF_GRID,
    SHARED_KIB,
    Call,
    Launch,
    capability,
)
from cuattn.gpu.structs import Arguments

# ------------------------------------------------------------------------------------ forward, simt


@dataclasses.dataclass(frozen=True)
class SimtForwardConfig(Config):
    """attention/forward_simt.cu."""

    dtype: str
    head_dim_v: int  # the next of 64, 128 and 256
    # softcap, bias, mask, alibi_slopes or dropout may be there; for 16-bit, which is rare, always
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


class SimtForward:
    """Every call of whole sequences; values of more than `MAX_DIM` features come in pieces."""

    name = "forward_simt"
    decodes = False
    reads_codes = False

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None."""
        spec = call.spec
        if spec.keys not in ("batched", "ragged") or spec.head_dim_v > MAX_DIM:
            return None
        config = _simt_config(
            dtype=spec.dtype.name,
            head_dim_v=next(n for n in (64, 128, 256) if spec.head_dim_v <= n),
            has_score=call.has_score or spec.dtype.itemsize == 2 or spec.dropout != 0.0,
            arch=call.arch,
        )
        if spec.rows == "ragged":
            tiles, batch = spec.seqlen_q // config.tile_m + spec.batch, 1
        else:
            tiles, batch = -(-spec.seqlen_q // config.tile_m), spec.batch
        rows = min(batch, MOST_OF_GRID)
        grid = (tiles * spec.heads_q, rows, -(-batch // rows))
        arguments = _arguments(call), dropout_arguments(spec)
        return Launch(_simt_variant(config), grid, arguments)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
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
    dropout: bool = False
    cached: bool = False  # keys and values lie in caches or pages

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
#: Those of calls with dropout, which takes registers, where they are others.
SM80_DROPOUT_TILES = SM80_TILES | {
    (64, 64): (((128, 32, 4), (128, 64, 4), (128, 64, 4)), ((128, 32, 4),) * 3),
    (128, 128): (
        ((128, 32, 4),) * 3,
        ((64, 64, 4), (64, 64, 4), (64, 32, 4)),
    ),
}

#: Those of calls over caches, of fewer sizes; page numbers take registers.
SM80_CACHE_TILES = {
    (64, 64): (((128, 64, 4),) * 3, ((128, 32, 4),) * 3),
    (128, 128): (((128, 32, 4),) * 3, ((64, 64, 4),) * 3),
    (256, 256): SM80_TILES[256, 256],
}

#: Of keys and values that blocks work on at the same time: they should stay in L2.
SM80_GROUP_BYTES = 16 << 20


class Sm80Forward:
    """16-bit calls of any kind, whose keys lie in arrays, caches or pages."""

    name = "forward_sm80"
    decodes = False
    reads_codes = False

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None."""
        spec = call.spec
        heads = spec.batch * spec.heads_q
        cached = spec.keys in ("cached", "paged")
        if (
            capability(call.arch) < 80
            or (cached and (spec.dropout != 0.0 or call.partial is not None or spec.quantized))
            or spec.dtype.itemsize != 2
            or max(spec.head_dim, spec.head_dim_v) > MAX_DIM
            or spec.heads_q > MOST_OF_GRID
            or heads > 1 << 30
        ):
            return None
        dims = spec.head_dim, spec.head_dim_v
        tiles = SM80_CACHE_TILES if cached else SM80_TILES
        general = (
            call.has_score
            or not call.addressable
            or any(d % 8 for d in dims)
            or spec.scale < LEAST_SCALE
        )
        config = _sm80_config(
            spec.dtype.name,
            next(tile for tile in tiles if dims[0] <= tile[0] and dims[1] <= tile[1]),
            general,
            spec.dropout != 0.0,
            call.arch,
            cached=cached,
        )
        if spec.rows == "ragged":
            grid = spec.seqlen_q // config.tile_m + spec.batch, spec.heads_q
        else:
            # Blocks of a group of heads run side by side, their longest tiles first.
            group = 1
            if spec.window_left is not None or spec.window_right is not None:
                shared = spec.heads_q // spec.heads_kv
                key_bytes = spec.seqlen_k * sum(dims) * 2 + 1
                group = min(heads, SM80_GROUP_BYTES * shared // key_bytes)
            group = max(group, -(-heads // MOST_OF_GRID), 1)
            grid = -(-spec.seqlen_q // config.tile_m) * group, -(-heads // group)
        if grid[0] >= 1 << 31:
            return None
        arguments = _arguments(call)
        if config.dropout:
            arguments = arguments.followed_by(dropout_arguments(spec))
        if cached:
            table = {"table_stride": call.table_stride, "num_pages": call.num_pages}
            arguments = arguments.followed_by(cache_arguments(spec, **table))
        return Launch(_sm80_variant(config), grid, (arguments,))

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) < 80:
            return
        for dtype, dims in itertools.product(("float16", "bfloat16"), SM80_TILES):
            for general, dropout in itertools.product((False, True), repeat=2):
                yield _sm80_variant(_sm80_config(dtype, dims, general, dropout, arch))
            for general in (False, True)[: 2 if dims in SM80_CACHE_TILES else 0]:
                yield _sm80_variant(_sm80_config(dtype, dims, general, False, arch, cached=True))


def _sm80_config(
    dtype: str,
    dims: tuple[int, int],
    general: bool,
    dropout: bool,
    arch: str,
    *,
    cached: bool = False,
) -> Sm80ForwardConfig:
    shared = (228, 164, 100).index(SHARED_KIB.get(capability(arch), 100))
    tiles = SM80_CACHE_TILES if cached else SM80_DROPOUT_TILES if dropout else SM80_TILES
    tile = tiles[dims][general][shared]
    return Sm80ForwardConfig(dtype, *dims, general, *tile, dropout=dropout, cached=cached)


def _sm80_variant(config: Sm80ForwardConfig) -> Variant:
    return Variant("attention/forward_sm80.cu", "forward_sm80", config)


def _arguments(call: Call) -> Arguments:
    return forward_arguments(call.spec, call.strides, call.bias, call.mask, call.alibi_slopes)
