"""Which kernels compute gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.attention import GRID_Y
from cuattn.gpu.dispatch.launch import SHARED_KIB, Call, Launch, capability
from cuattn.gpu.params import (
    backward_arguments,
    dropout_arguments,
    forward_arguments,
    jvp_arguments,
)
from cuattn.gpu.structs import Arguments


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """A call of the backward pass: the forward call, and what is asked for."""

    forward: Call
    dout: tuple[int, ...]  # strides in bytes
    grad_bias: bool = False
    grad_alibi: bool = False
    grad_sinks: bool = False
    addresses_aligned: bool = True  # those of q, k, v and dout are multiples of 16

    @property
    def aligned(self) -> bool:
        """Whether rows of q, k, v and dout can be read 16 bytes at a time."""
        q, k, v, _ = self.forward.strides
        return self.addresses_aligned and all(
            stride % 16 == 0 for array in (q, k, v, self.dout) for stride in array[:-1]
        )


class BackwardLaunches(NamedTuple):
    """The launches of a backward call, in order."""

    launches: tuple[Launch, ...]
    alibi_slots: int  # blocks of a query head that leave their part of dalibi


class BackwardTier(Protocol):
    """Kernels for some calls, as :class:`cuattn.gpu.dispatch.Tier`."""

    name: str

    def serves(self, call: BackwardCall) -> BackwardLaunches | None:
        """The launches for a call, or None for one that is left to other tiers."""

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""


@dataclasses.dataclass(frozen=True)
class SimtGradientConfig(Config):
    """gradients/backward_simt.cu, bias_simt.cu and jvp_simt.cu."""

    dtype: str
    keys_stationary: bool  # rows of a tile are keys: the pass for dk and dv
    head_dim: int  # padded: of a row of the result
    tile_m: int
    tile_n: int
    thread_rows: int
    blocks_per_sm: int  # that registers must suffice for

    @property
    def threads(self) -> int:
        """16 share a row of scores and of the result."""
        return 16 * self.thread_rows


@dataclasses.dataclass(frozen=True)
class SimtStatisticsConfig(Config):
    """gradients/statistics_simt.cu."""

    dtype: str

    @property
    def threads(self) -> int:
        """Eight warps."""
        return 256


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
    tile_m: int = 64

    @property
    def threads(self) -> int:
        """A warp has 16 rows."""
        return 2 * self.tile_m

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


#: (tile_m, tile_n, thread_rows, blocks_per_sm) by the size of the accumulator and the padded
#: head_dim: as the forward pass's, with as many scores less as a second result takes registers.
SIMT_TILES = {
    4: {64: (64, 32, 8, 3), 128: (32, 64, 8, 3), 256: (32, 64, 8, 2)},
    8: {64: (32, 32, 8, 3), 128: (32, 32, 8, 2), 256: (16, 32, 8, 2)},
}
SIMT_BIAS_TILE = (32, 32, 8, 3)  # no results but in shared memory, whatever head_dim


def _config(dtype: str, head_dim: int, *, keys_stationary: bool) -> SimtGradientConfig:
    *tile, blocks = SIMT_TILES[8 if dtype == "float64" else 4][head_dim]
    if keys_stationary and head_dim == 128:
        blocks = 2  # three leave 168 registers, of which sm_120 spills four
    return SimtGradientConfig(dtype, keys_stationary, head_dim, *tile, blocks)


def _padded(head_dim: int) -> int:
    return next(n for n in SIMT_TILES[4] if head_dim <= n)


def _pass_variant(dtype: str, head_dim: int, *, keys_stationary: bool) -> Variant:
    config = _config(dtype, head_dim, keys_stationary=keys_stationary)
    return Variant("gradients/backward_simt.cu", "backward_simt", config)


def _bias_variant(dtype: str) -> Variant:
    config = SimtGradientConfig(dtype, False, 0, *SIMT_BIAS_TILE)
    return Variant("gradients/bias_simt.cu", "bias_simt", config)


def _statistics_variant(entry: str, dtype: str) -> Variant:
    return Variant("gradients/statistics_simt.cu", entry, SimtStatisticsConfig(dtype))


def _jvp_variant(dtype: str, head_dim: int) -> Variant:
    config = _config(dtype, head_dim, keys_stationary=False)
    return Variant("gradients/jvp_simt.cu", "jvp_simt", config)


def _rows_grid(ragged: bool, batch: int, rows: int, tile_m: int, heads: int) -> tuple[int, ...]:
    """A block for each tile of rows of a head: slots and heads along x, the batch along y and z."""
    if ragged:
        return ((rows // tile_m + batch) * heads, 1, 1)
    along_y = min(batch, GRID_Y)
    return (-(-rows // tile_m) * heads, along_y, -(-batch // along_y))


def _launches(call: BackwardCall, dq: Variant, *dkv: Variant) -> BackwardLaunches:
    """The launches of a call, whose passes are `dq` and `dkv`."""
    spec, forward = call.forward.spec, call.forward
    dtype, ragged = spec.dtype.name, spec.rows == "ragged"
    tile_q, tile_k = (variant.config.tile_m for variant in (dq, dkv[0]))  # type: ignore[attr-defined]
    grid_q = _rows_grid(ragged, spec.batch, spec.seqlen_q, tile_q, spec.heads_q)
    grid_k = _rows_grid(ragged, spec.batch, spec.seqlen_k, tile_k, spec.heads_kv)
    slots = grid_q[0] // spec.heads_q

    layouts = forward.bias, forward.mask, forward.alibi_slopes
    bias_shape = (0, 0, 0, 0)
    if forward.bias is not None:
        bias_shape = (1,) * (4 - len(forward.bias.shape)) + forward.bias.shape
    slopes = forward.alibi_slopes
    batched = slopes is not None and len(slopes.shape) == 2
    given: tuple[Arguments, ...] = (
        forward_arguments(spec, forward.strides, *layouts),
        backward_arguments(
            spec,
            call.dout,
            bias_shape,
            alibi_batched=batched,
            alibi_slots=slots,
            alibi_tile=tile_q,
        ),
    )
    all_given = (*given, dropout_arguments(spec))

    rows = spec.seqlen_q * spec.heads_q * (1 if ragged else spec.batch)
    launches = [Launch(_statistics_variant("delta_simt", dtype), (-(-rows // 8),), given)]
    if call.grad_sinks:
        launches.append(Launch(_statistics_variant("sinks_simt", dtype), (spec.heads_q,), given))
    launches.append(Launch(dq, grid_q, all_given))
    if spec.seqlen_k:
        launches += [Launch(variant, grid_k, all_given) for variant in dkv]
    if call.grad_bias:
        tile_m, tile_n, *_ = SIMT_BIAS_TILE
        batch, heads, bias_rows, bias_cols = bias_shape
        blocks = batch * heads * -(-bias_rows // tile_m) * -(-bias_cols // tile_n)
        if blocks:
            launches.append(Launch(_bias_variant(dtype), (blocks,), all_given))
    if call.grad_alibi:
        count = spec.heads_q * (spec.batch if batched else 1)
        launches.append(Launch(_statistics_variant("alibi_simt", dtype), (count,), given))
    return BackwardLaunches(tuple(launches), slots)


class Sm80Backward:
    """16-bit calls whose rows are whole chunks of 16 bytes."""

    name = "backward_sm80"

    def serves(self, call: BackwardCall) -> BackwardLaunches | None:
        """The launches for a call, or None."""
        spec = call.forward.spec
        dims = spec.head_dim, spec.head_dim_v
        if (
            capability(call.forward.arch) < 80
            or spec.dtype.itemsize != 2
            or not call.aligned
            or any(d % 8 for d in dims)
        ):
            return None
        general = call.forward.has_score or spec.dropout != 0.0 or spec.scale <= 0.0
        padded = next(tile for tile in SM80_TILES if dims[0] <= tile[0] and dims[1] <= tile[1])
        passes = _sm80_passes(spec.dtype.name, padded, general, call.forward.arch)
        return _launches(call, *passes)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) < 80:
            return
        for dtype, dims in itertools.product(("float16", "bfloat16"), SM80_TILES):
            for general in (False, True):
                yield from _sm80_passes(dtype, dims, general, arch)


def _sm80_passes(dtype: str, dims: tuple[int, int], general: bool, arch: str) -> Iterator[Variant]:
    """The passes of backward_sm80.cu: dq, then dk and dv, by one pass where registers suffice."""
    shared = (228, 164, 100).index(SHARED_KIB.get(capability(arch), 100))
    roles = [(False, True, False), (True, True, True)]
    if sum(dims) > 256:
        roles = [(False, True, False), (True, True, False), (True, False, True)]
    for keys_stationary, first, second in roles:
        tile_n, blocks = SM80_TILES[dims][shared]
        # General scores are many instructions each, and so is what unrolling makes of them.
        tile_n = min(tile_n, 32) if general else tile_n
        config = Sm80BackwardConfig(
            dtype, keys_stationary, first, second, general, *dims, tile_n, blocks
        )
        yield Variant("gradients/backward_sm80.cu", "backward_sm80", config)


class SimtBackward:
    """Every call."""

    name = "backward_simt"

    def serves(self, call: BackwardCall) -> BackwardLaunches | None:
        """The launches for a call."""
        spec = call.forward.spec
        dims = _padded(spec.head_dim), _padded(max(spec.head_dim, spec.head_dim_v))
        return _launches(
            call,
            *(
                _pass_variant(spec.dtype.name, dim, keys_stationary=keys)
                for dim, keys in zip(dims, (False, True), strict=True)
            ),
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        for dtype in FLOAT_DTYPES.values():
            for entry in ("delta_simt", "sinks_simt", "alibi_simt"):
                yield _statistics_variant(entry, dtype)
            yield _bias_variant(dtype)
            for head_dim in SIMT_TILES[4]:
                for keys_stationary in (False, True):
                    yield _pass_variant(dtype, head_dim, keys_stationary=keys_stationary)


class SimtJvp:
    """Every derivative in a direction, after the forward pass."""

    name = "jvp_simt"

    def serves(self, call: Call, tangents: tuple[tuple[int, ...], ...]) -> Launch:
        """The launch for a call; `tangents` are the byte strides of the direction's q, k and v."""
        spec = call.spec
        variant = _jvp_variant(spec.dtype.name, _padded(spec.head_dim_v))
        tile_m = variant.config.tile_m  # type: ignore[attr-defined]
        grid = _rows_grid(False, spec.batch, spec.seqlen_q, tile_m, spec.heads_q)
        arguments = (
            forward_arguments(spec, call.strides, call.bias, call.mask, call.alibi_slopes),
            jvp_arguments(spec, tangents),
            dropout_arguments(spec),
        )
        return Launch(variant, grid, arguments)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        for dtype in FLOAT_DTYPES.values():
            for head_dim in SIMT_TILES[4]:
                yield _jvp_variant(dtype, head_dim)


#: The kernels of the backward pass; a call goes to the first that serves it.
BACKWARD_TIERS: tuple[BackwardTier, ...] = (Sm80Backward(), SimtBackward())
JVP = SimtJvp()


def choose_backward(call: BackwardCall) -> BackwardLaunches:
    """Choose the kernels of a backward call: the first of `BACKWARD_TIERS` that serves it."""
    chosen = (tier.serves(call) for tier in BACKWARD_TIERS)
    return next(launches for launches in chosen if launches is not None)


def gradient_variants(arch: str) -> Iterator[Variant]:
    """Every variant of the kernels in gradients/."""
    for tier in (*BACKWARD_TIERS, JVP):
        yield from tier.variants(arch)
