"""The variants of gradients/backward_sm80.cu."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.launch import SHARED_KIB, capability


@dataclasses.dataclass(frozen=True)
class Sm80BackwardConfig(Config):
    """gradients/backward_sm80.cu."""

    dtype: str
    keys_stationary: bool  # rows are keys: the pass for dk and dv
    first: bool  # dq or dk is computed
    second: bool  # dv is
    general: bool  # scores are more than scaled by a positive number, or there is dropout
    head_dim: int  # padded
    head_dim_v: int
    tile_n: int
    blocks_per_sm: int
    repairs: bool = False  # computes nothing unless a faster kernel's results are not finite
    tile_m: int = 64
    warp_rows: int = 16
    adds_dq: bool = False  # beside dk, to sums in memory

    @property
    def threads(self) -> int:
        """A warp has `warp_rows` rows."""
        return 32 * self.tile_m // self.warp_rows

    @property
    def smem_bytes(self) -> int:
        """The block's rows of two arrays, two stages of columns of two others, two numbers for
        each column, and for dq a tile of dS."""
        dims = self.head_dim + self.head_dim_v
        ds = 2 * self.tile_m * self.tile_n if self.adds_dq else 0
        return 2 * self.tile_m * dims + 2 * self.tile_n * (2 * dims + 8) + ds


#: What (head_dim, head_dim_v) are padded to: the first that is large enough.
SM80_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))

#: (tile_m, tile_n, blocks_per_sm, warp_rows) by padded (head_dim, head_dim_v), whether keys are
#: stationary and whether scores are general, where a multiprocessor has 228 KiB of shared memory,
#: 164 and 100. With 32 rows a warp each fragment of columns serves two products, with 64 columns
#: each step's bookkeeping twice as many; but general scores are many instructions each, and so is
#: what unrolling makes of them. With 128 rows at head_dim 256 a multiprocessor has eight warps
#: instead of four.
SM80_TILES = {
    ((64, 64), False, False): ((128, 64, 2, 32), (128, 64, 2, 32), (128, 64, 2, 32)),
    ((64, 64), True, False): ((128, 32, 2, 32), (128, 32, 2, 32), (128, 32, 2, 32)),
    ((64, 64), False, True): ((64, 32, 3, 16), (64, 32, 3, 16), (64, 32, 2, 16)),
    ((64, 64), True, True): ((64, 32, 3, 16), (64, 32, 3, 16), (64, 32, 2, 16)),
    ((128, 128), False, False): ((128, 32, 2, 32), (128, 32, 1, 32), (64, 32, 1, 16)),
    ((128, 128), True, False): ((64, 64, 2, 16), (64, 32, 2, 16), (64, 32, 1, 16)),
    ((128, 128), False, True): ((64, 64, 2, 16), (64, 32, 2, 16), (64, 32, 1, 16)),
    ((128, 128), True, True): ((64, 32, 2, 16), (64, 32, 2, 16), (64, 32, 1, 16)),
    ((192, 128), False, False): ((64, 32, 2, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((192, 128), True, False): ((64, 32, 2, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((192, 128), False, True): ((64, 32, 2, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((192, 128), True, True): ((64, 32, 2, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((256, 256), False, False): ((128, 32, 1, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((256, 256), True, False): ((128, 32, 1, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((256, 256), False, True): ((128, 32, 1, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((256, 256), True, True): ((128, 32, 1, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
}

#: The same of passes that repair, whatever is stationary, by padded dims and whether scores are
#: general. At head_dim 256 32 columns and the loop over blocks are more registers than there are.
SM80_REPAIR_TILES = {
    ((64, 64), False): ((64, 64, 2, 16), (64, 64, 2, 16), (64, 64, 2, 16)),
    ((64, 64), True): ((64, 32, 2, 16), (64, 32, 2, 16), (64, 32, 2, 16)),
    ((128, 128), False): ((64, 32, 2, 16), (64, 32, 2, 16), (64, 32, 1, 16)),
    ((128, 128), True): ((64, 32, 2, 16), (64, 32, 2, 16), (64, 32, 1, 16)),
    ((192, 128), False): ((64, 32, 2, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((192, 128), True): ((64, 32, 2, 16), (64, 32, 1, 16), (64, 16, 1, 16)),
    ((256, 256), False): ((64, 16, 1, 16), (64, 16, 1, 16), (64, 16, 1, 16)),
    ((256, 256), True): ((64, 16, 1, 16), (64, 16, 1, 16), (64, 16, 1, 16)),
}


def sm80_passes(
    dtype: str,
    dims: tuple[int, int],
    general: bool,
    arch: str,
    *,
    adds_dq: bool = False,
    repairs: bool = False,
) -> Iterator[Variant]:
    """The passes of backward_sm80.cu: dq, unless the pass for dk adds it up, then dk and dv, by one
    pass where registers suffice."""
    shared = (228, 164, 100).index(SHARED_KIB.get(capability(arch), 100))
    roles = [(False, True, False), (True, True, True)]
    if sum(dims) > 256:
        roles = [(False, True, False), (True, True, False), (True, False, True)]
    for keys_stationary, first, second in roles[1:] if adds_dq else roles:
        if repairs:
            tiles = SM80_REPAIR_TILES[dims, general]
        else:
            tiles = SM80_TILES[dims, keys_stationary, general]
        tile_m, tile_n, blocks, warp_rows = tiles[shared]
        config = Sm80BackwardConfig(
            dtype,
            keys_stationary,
            first,
            second,
            general,
            *dims,
            tile_n,
            blocks,
            repairs=repairs,
            tile_m=tile_m,
            warp_rows=warp_rows,
            adds_dq=adds_dq and first,
        )
        yield Variant("gradients/backward_sm80.cu", "backward_sm80", config)


@dataclasses.dataclass(frozen=True)
class Sm80FusedConfig(Sm80BackwardConfig):
    """gradients/backward_fused_sm80.cu."""

    @property
    def threads(self) -> int:
        """Eight warps."""
        return 256

    @property
    def smem_bytes(self) -> int:
        """As of the pass for dk, and tiles of P and of dS twice."""
        return super().smem_bytes + 4 * self.tile_m * self.tile_n


#: (tile_m, tile_n), keys and queries, of gradients/backward_fused_sm80.cu by padded head_dims.
SM80_FUSED_TILES = {
    (64, 64): (128, 128),
    (128, 128): (128, 64),
    (192, 128): (64, 64),
    (256, 256): (64, 64),
}


def sm80_fused(dtype: str, dims: tuple[int, int], arch: str) -> Variant | None:
    """The kernel that computes all gradients of plain scores in one pass, if there is one."""
    if dims not in SM80_FUSED_TILES or SHARED_KIB.get(capability(arch)) != 228:
        return None
    tile_m, tile_n = SM80_FUSED_TILES[dims]
    config = Sm80FusedConfig(
        dtype, True, True, True, False, *dims, tile_n, 1, False, tile_m, 32, adds_dq=True
    )
    return Variant("gradients/backward_fused_sm80.cu", "backward_fused_sm80", config)


def sm80_adds_dq(dims: tuple[int, int], general: bool) -> bool:
    """Whether the pass for dk adds up dq, where any order will do: what it saves is a pass of three
    products, and of scores that are many instructions each where they are general. (Of plain scores
    at head_dim 128 it saves less than it takes, 201 TFLOP/s instead of 238.)"""
    return dims in ((64, 64), (256, 256)) or (general and dims == (128, 128))


SUMS_THREADS = 256  # of a block of gradients/sums_sm80.cu, each of eight elements


@dataclasses.dataclass(frozen=True)
class Sm80SumsConfig(Config):
    """gradients/sums_sm80.cu."""

    dtype: str

    @property
    def threads(self) -> int:
        """Eight warps."""
        return SUMS_THREADS


def sums_variant(entry: str, dtype: str) -> Variant:
    """A kernel of gradients/sums_sm80.cu."""
    return Variant("gradients/sums_sm80.cu", entry, Sm80SumsConfig(dtype))
