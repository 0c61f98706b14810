"""Which kernel computes attention's derivative in a direction."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Protocol

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu.arguments import dropout_arguments, forward_arguments, jvp_arguments
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.backward import rows_grid
from cuattn.gpu.dispatch.gradients import SIMT_TILES, padded_dim, simt_config
from cuattn.gpu.dispatch.launch import LEAST_SCALE, SHARED_KIB, Call, Launch, capability
from cuattn.gpu.dispatch.tiers import TierList, first_serving
from cuattn.gpu.structs import Arguments


@dataclasses.dataclass(frozen=True)
class JvpCall:
    """A derivative in a direction: the forward call, and how the direction lies in memory."""

    forward: Call
    tangents: tuple[tuple[int, ...], ...]  # strides in bytes of the direction's q, k and v
    addresses_aligned: bool = True  # those of q, k, v and the direction are multiples of 16

    @property
    def aligned(self) -> bool:
        """Whether rows of q, k, v and the direction can be read 16 bytes at a time."""
        arrays = (*self.forward.strides[:3], *self.tangents)
        return self.addresses_aligned and all(
            stride % 16 == 0 for array in arrays for stride in array[:-1]
        )


class JvpTier(Protocol):
    """A kernel for some calls, as :class:`cuattn.gpu.dispatch.Tier`."""

    name: str

    def serves(self, call: JvpCall) -> Launch | None:
        """The launch for a call, or None for one that is left to other tiers."""

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""


@dataclasses.dataclass(frozen=True)
class Sm80JvpConfig(Config):
    """gradients/jvp_sm80.cu."""

    dtype: str
    general: bool  # as of Sm80ForwardConfig; or there is dropout
    head_dim: int  # padded
    head_dim_v: int  # columns of v that a block computes
    tile_m: int
    tile_n: int
    stages: int  # of keys and values
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        """A warp has 16 rows."""
        return 2 * self.tile_m

    @property
    def smem_bytes(self) -> int:
        """The block's rows of q and of its direction, and the stages of k, v and theirs."""
        columns = self.head_dim + self.head_dim_v
        return 4 * (self.tile_m * self.head_dim + self.stages * self.tile_n * columns)


#: (tile_m, tile_n, stages, blocks_per_sm) by (head_dim, columns of v of a block), the first that is
#: large enough, where a multiprocessor has 228 KiB of shared memory, 164 and 100.
SM80_TILES = {
    (64, 64): ((64, 64, 2, 2), (64, 64, 2, 2), (64, 32, 2, 2)),
    (128, 128): ((64, 32, 2, 2), (64, 32, 2, 1), (64, 32, 1, 1)),
    (192, 128): ((64, 32, 1, 2), (64, 32, 2, 1), (64, 32, 1, 1)),
    (256, 128): ((64, 32, 1, 2), (64, 32, 2, 1), (32, 32, 1, 1)),
}
SM80_COLUMNS = max(columns for _, columns in SM80_TILES)  # of v; more are shared between blocks


class Sm80Jvp:
    """16-bit calls of any kind."""

    name = "jvp_sm80"

    def serves(self, call: JvpCall) -> Launch | None:
        """The launch for a call, or None. The grid is (blocks that share values, tiles, heads)
        along x, and the batch."""
        forward, spec = call.forward, call.forward.spec
        if capability(forward.arch) < 80 or spec.dtype.itemsize != 2:
            return None
        dims = spec.head_dim, min(spec.head_dim_v, SM80_COLUMNS)
        config = _sm80_config(
            spec.dtype.name,
            next(tile for tile in SM80_TILES if dims[0] <= tile[0] and dims[1] <= tile[1]),
            forward.has_score
            or spec.dropout != 0.0
            or spec.scale < LEAST_SCALE
            or not call.aligned
            or spec.head_dim % 8 != 0
            or spec.head_dim_v % 8 != 0,
            forward.arch,
        )
        parts = -(-spec.head_dim_v // config.head_dim_v)
        grid = rows_grid(False, spec.batch, spec.seqlen_q, config.tile_m, spec.heads_q * parts)
        if grid[0] >= 1 << 31:
            return None
        return Launch(_sm80_variant(config), grid, _arguments(call))

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) < 80:
            return
        for dtype, dims in itertools.product(("float16", "bfloat16"), SM80_TILES):
            for general in (False, True):
                yield _sm80_variant(_sm80_config(dtype, dims, general, arch))


def _sm80_config(dtype: str, dims: tuple[int, int], general: bool, arch: str) -> Sm80JvpConfig:
    shared = (228, 164, 100).index(SHARED_KIB.get(capability(arch), 100))
    tile_m, tile_n, stages, blocks = SM80_TILES[dims][shared]
    # General scores are many instructions each, and so is what unrolling makes of them.
    tile_n = min(tile_n, 32) if general else tile_n
    return Sm80JvpConfig(dtype, general, *dims, tile_m, tile_n, stages, blocks)


def _sm80_variant(config: Sm80JvpConfig) -> Variant:
    return Variant("gradients/jvp_sm80.cu", "jvp_sm80", config)


class SimtJvp:
    """Every call."""

    name = "jvp_simt"

    def serves(self, call: JvpCall) -> Launch:
        """The launch for a call."""
        spec, arch = call.forward.spec, call.forward.arch
        variant = _simt_variant(spec.dtype.name, padded_dim(spec.head_dim_v), arch)
        tile_m = variant.config.tile_m  # type: ignore[attr-defined]
        grid = rows_grid(False, spec.batch, spec.seqlen_q, tile_m, spec.heads_q)
        return Launch(variant, grid, _arguments(call))

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        for dtype in FLOAT_DTYPES.values():
            for head_dim in SIMT_TILES[4]:
                yield _simt_variant(dtype, head_dim, arch)


def _simt_variant(dtype: str, head_dim: int, arch: str) -> Variant:
    config = simt_config(dtype, head_dim, arch, keys_stationary=False)
    return Variant("gradients/jvp_simt.cu", "jvp_simt", config)


def _arguments(call: JvpCall) -> tuple[Arguments, ...]:
    forward, spec = call.forward, call.forward.spec
    layouts = forward.bias, forward.mask, forward.alibi_slopes
    return (
        forward_arguments(spec, forward.strides, *layouts),
        jvp_arguments(spec, call.tangents),
        dropout_arguments(spec),
    )


#: The kernels, the fastest first.
JVP: TierList[JvpTier] = TierList(Sm80Jvp(), SimtJvp())


def choose_jvp(call: JvpCall, tiers: tuple[JvpTier, ...] = JVP.all) -> Launch:
    """Choose the kernel of a derivative in a direction: the first of `tiers` that serves it.

    Raises
    ------
    LookupError
        None does, which all of them together never leave.
    """
    return first_serving(tiers, call, call.forward.spec, call.forward.arch)
