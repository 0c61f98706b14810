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

    @property
    def threads(self) -> int:
        """A warp has `warp_rows` rows."""
        return 32 * self.tile_m // self.warp_rows

    @property
    def smem_bytes(self) -> int:
        """The block's rows of two arrays, two stages of columns of two others, and two numbers for
        each column."""
        dims = self.head_dim + self.head_dim_v
        return 2 * self.tile_m * dims + 2 * self.tile_n * (2 * dims + 8)


#: (tile_n, blocks_per_sm) by (head_dim, head_dim_v), the first that is large enough, where a
#: multiprocessor has 228 KiB of shared memory, 164 and 100.
SM80_TILES = {
    (64, 64): ((64, 2), (64, 2), (64, 2)),
    (128, 128): ((32, 2), (32, 2), (32, 1)),
    (192, 128): ((32, 2), (32, 1), (16, 1)),
    (256, 256): ((32, 1), (32, 1), (16, 1)),
}

#: (tile_m, tile_n, blocks_per_sm, warp_rows) by (head_dim, head_dim_v), whether keys are stationary
#: and whether scores are general, where another tile than SM80_TILES's is faster. With 32 rows a
#: warp each fragment of columns serves two products, with 64 columns each step's bookkeeping twice
#: as many; and with 128 rows at head_dim 256 a multiprocessor has eight warps instead of four.
SM80_OTHER_TILES: dict[
    tuple[tuple[int, int], bool, bool], tuple[tuple[int, int, int, int], ...]
] = {
    ((64, 64), False, False): ((128, 64, 2, 32),) * 3,
    ((64, 64), True, False): ((128, 32, 2, 32),) * 3,
    ((128, 128), False, False): ((128, 32, 2, 32), (128, 32, 1, 32), (64, 32, 1, 16)),
    ((128, 128), True, False): ((64, 64, 2, 16), (64, 32, 2, 16), (64, 32, 1, 16)),
    **{
        ((256, 256), keys_stationary, general): (
            (128, 32, 1, 16),
            (64, 32, 1, 16),
            (64, 16, 1, 16),
        )
        for keys_stationary in (False, True)
        for general in (False, True)
    },
}


def sm80_passes(
    dtype: str, dims: tuple[int, int], general: bool, arch: str, *, repairs: bool = False
) -> Iterator[Variant]:
    """The passes of backward_sm80.cu: dq, then dk and dv, by one pass where registers suffice."""
    shared = (228, 164, 100).index(SHARED_KIB.get(capability(arch), 100))
    roles = [(False, True, False), (True, True, True)]
    if sum(dims) > 256:
        roles = [(False, True, False), (True, True, False), (True, False, True)]
    for keys_stationary, first, second in roles:
        tile_n, blocks = SM80_TILES[dims][shared]
        # General scores are many instructions each, and so is what unrolling makes of them.
        tile_n = min(tile_n, 32) if general else tile_n
        if repairs and dims[0] == 256:
            tile_n = 16  # 32 and the loop over blocks are more registers than there are
        config = Sm80BackwardConfig(
            dtype, keys_stationary, first, second, general, *dims, tile_n, blocks, repairs
        )
        other = SM80_OTHER_TILES.get((dims, keys_stationary, general))
        if other is not None and not repairs:
            tile_m, tile_n, blocks, warp_rows = other[shared]
            config = dataclasses.replace(
                config, tile_m=tile_m, tile_n=tile_n, blocks_per_sm=blocks, warp_rows=warp_rows
            )
        yield Variant("gradients/backward_sm80.cu", "backward_sm80", config)
