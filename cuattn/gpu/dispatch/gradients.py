"""Which kernels compute gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu.arguments import backward_arguments, dropout_arguments, forward_arguments
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.attention import SIMT_KIB
from cuattn.gpu.dispatch.backward import (
    BackwardCall,
    BackwardLaunches,
    BackwardTier,
    rows_grid,
    statistics_variant,
)
from cuattn.gpu.dispatch.gradients_sm80 import (
    SM80_DIMS,
    SUMS_THREADS,
    sm80_adds_dq,
    sm80_fused,
    sm80_passes,
    sums_variant,
)
from cuattn.gpu.dispatch.gradients_sm90 import Sm90Backward
from cuattn.gpu.dispatch.launch import LEAST_SCALE, SHARED_KIB, Launch, capability
from cuattn.gpu.dispatch.tiers import TierList, first_serving
from cuattn.gpu.structs import Arguments


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


#: (tile_m, tile_n, thread_rows, blocks_per_sm) by the size of the accumulator and the padded
#: head_dim: as the forward pass's, with as many scores less as a second result takes registers.
SIMT_TILES = {
    4: {64: (64, 32, 8, 3), 128: (32, 64, 8, 3), 256: (32, 64, 8, 2)},
    8: {64: (32, 32, 8, 3), 128: (32, 32, 8, 2), 256: (16, 32, 8, 2)},
}
SIMT_BIAS_TILE = (32, 32, 8, 3)  # no results but in shared memory, whatever head_dim


@dataclasses.dataclass(frozen=True)
class SimtFusedConfig(SimtGradientConfig):
    """gradients/backward_fused_simt.cu."""

    general: bool = False  # scores are more than scaled

    @property
    def smem_bytes(self) -> int:
        """Tiles of k, v, q and dout, whose rows have a vector more, and of P and dS."""
        itemsize = 8 if self.dtype == "float64" else 4
        pitch = self.head_dim + 16 // itemsize
        scores = self.tile_m * (self.tile_n + (2 if itemsize == 8 else 16))
        return 2 * itemsize * ((self.tile_m + self.tile_n) * pitch + scores)


#: (tile_m, tile_n, thread_rows, blocks_per_sm) of gradients/backward_fused_simt.cu, by dtype and
#: padded head_dim: tiles that a multiprocessor with 228 KiB of shared memory holds.
SIMT_FUSED_TILES = {
    ("float32", 64): (64, 64, 8, 2),
    ("float32", 128): (64, 64, 16, 1),
    ("float32", 256): (64, 32, 16, 1),
    ("float64", 64): (64, 64, 16, 1),
    ("float64", 128): (48, 32, 16, 1),
}


def simt_config(
    dtype: str, head_dim: int, arch: str, *, keys_stationary: bool
) -> SimtGradientConfig:
    """The simt pass for rows of a padded head_dim."""
    *tile, blocks = SIMT_TILES[8 if dtype == "float64" else 4][head_dim]
    # No more blocks than shared memory holds of the largest: registers then suffice everywhere.
    blocks = min(blocks, SHARED_KIB.get(capability(arch), 100) // SIMT_KIB)
    if keys_stationary and head_dim == 128:
        blocks = 2  # three leave 168 registers, of which sm_120 spills four
    return SimtGradientConfig(dtype, keys_stationary, head_dim, *tile, blocks)


def padded_dim(head_dim: int) -> int:
    """The head_dim that the simt kernels are compiled for."""
    return next(n for n in SIMT_TILES[4] if head_dim <= n)


def _pass_variant(dtype: str, head_dim: int, arch: str, *, keys_stationary: bool) -> Variant:
    config = simt_config(dtype, head_dim, arch, keys_stationary=keys_stationary)
    return Variant("gradients/backward_simt.cu", "backward_simt", config)


def _fused_variant(dtype: str, head_dim: int, general: bool, arch: str) -> Variant | None:
    """The kernel that computes all gradients in one pass, if there is one."""
    tile = SIMT_FUSED_TILES.get((dtype, head_dim))
    if general and (dtype, head_dim) == ("float64", 128):
        return None  # registers do not suffice
    if tile is None or SHARED_KIB.get(capability(arch)) != 228:
        return None
    config = SimtFusedConfig(dtype, True, head_dim, *tile, general)
    return Variant("gradients/backward_fused_simt.cu", "backward_fused_simt", config)


def _bias_variant(dtype: str) -> Variant:
    config = SimtGradientConfig(dtype, False, 0, *SIMT_BIAS_TILE)
    return Variant("gradients/bias_simt.cu", "bias_simt", config)


def _launches(
    call: BackwardCall,
    dq: Variant | None,
    *dkv: Variant,
    adds_dq: bool = False,
    repairs: tuple[Variant, ...] = (),
) -> BackwardLaunches:
    """The launches of a call, whose passes are `dq` and `dkv`. Where the latter add up dq, it has
    sums, and `dq` and `repairs` compute everything anew where some are not finite; without `dq`
    they add it up in place."""
    spec, forward = call.forward.spec, call.forward
    dtype, ragged = spec.dtype.name, spec.rows == "ragged"
    tile_q, tile_k = (variant.config.tile_m for variant in (dq or dkv[0], dkv[0]))  # type: ignore[attr-defined]
    grid_q = rows_grid(ragged, spec.batch, spec.seqlen_q, tile_q, spec.heads_q)
    grid_k = rows_grid(ragged, spec.batch, spec.seqlen_k, tile_k, spec.heads_kv)
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
    launches = [Launch(statistics_variant("delta_simt", dtype), (-(-rows // 32),), given)]
    if call.grad_sinks:
        launches.append(Launch(statistics_variant("sinks_simt", dtype), (spec.heads_q,), given))
    workspaces: tuple[tuple[str, int], ...] = ()
    if dq is None:
        zeros = statistics_variant("clear_dq_simt", dtype)
        launches.append(Launch(zeros, (-(-rows * spec.head_dim // 256),), given))
        launches += [Launch(variant, grid_k, given) for variant in dkv]
    elif adds_dq:
        elements = rows * spec.head_dim
        clear, finish = (
            Launch(sums_variant(entry, dtype), (-(-elements // (8 * SUMS_THREADS)),), given)
            for entry in ("clear_sums_sm80", "finish_sums_sm80")
        )
        after = [Launch(v, (forward.multiprocessors,), all_given) for v in (dq, *repairs)]
        launches += [clear, *(Launch(variant, grid_k, all_given) for variant in dkv)]
        launches += [finish, *after]
        workspaces = (("dq_sums", 4 * elements), ("nonfinite", 4))
    else:
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
        launches.append(Launch(statistics_variant("alibi_simt", dtype), (count,), given))
    return BackwardLaunches(tuple(launches), slots, workspaces)


class Sm80Backward:
    """16-bit calls whose rows are whole chunks of 16 bytes. Where dq may be summed in any order,
    and that is faster, the pass for dk adds it up in memory."""

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
        general = call.forward.has_score or spec.dropout != 0.0 or spec.scale < LEAST_SCALE
        padded = next(tile for tile in SM80_DIMS if dims[0] <= tile[0] and dims[1] <= tile[1])
        arguments = spec.dtype.name, padded, general, call.forward.arch
        fused = None if general else sm80_fused(spec.dtype.name, padded, call.forward.arch)
        if fused is not None and spec.seqlen_k and not (call.deterministic or call.grad_alibi):
            repair, *repairs = sm80_passes(*arguments, repairs=True)
            return _launches(call, repair, fused, adds_dq=True, repairs=tuple(repairs))
        adds_dq = sm80_adds_dq(padded, general) and not call.deterministic
        if not adds_dq or call.grad_alibi or not spec.seqlen_k:
            return _launches(call, *sm80_passes(*arguments))
        repair, *_ = sm80_passes(*arguments, repairs=True)
        return _launches(call, repair, *sm80_passes(*arguments, adds_dq=True), adds_dq=True)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) < 80:
            return
        for dtype, dims in itertools.product(("float16", "bfloat16"), SM80_DIMS):
            for general in (False, True):
                arguments = dtype, dims, general, arch
                yield from sm80_passes(*arguments)
                fused = None if general else sm80_fused(dtype, dims, arch)
                if fused is not None:
                    yield fused
                    yield from sm80_passes(*arguments, repairs=True)
                if sm80_adds_dq(dims, general):
                    yield from sm80_passes(*arguments, adds_dq=True)
                    if fused is None:
                        yield next(sm80_passes(*arguments, repairs=True))
        for dtype, entry in itertools.product(
            ("float16", "bfloat16"), ("clear_sums_sm80", "finish_sums_sm80")
        ):
            yield sums_variant(entry, dtype)


class SimtBackward:
    """Every call."""

    name = "backward_simt"

    def serves(self, call: BackwardCall) -> BackwardLaunches | None:
        """The launches for a call."""
        spec = call.forward.spec
        dims = padded_dim(spec.head_dim), padded_dim(max(spec.head_dim, spec.head_dim_v))
        two_passes = call.deterministic or call.grad_alibi or spec.dropout != 0.0
        if spec.seqlen_k and not two_passes:
            general, arch = call.forward.has_score, call.forward.arch
            fused = _fused_variant(spec.dtype.name, dims[1], general, arch)
            if fused is not None:
                return _launches(call, None, fused)
        return _launches(
            call,
            *(
                _pass_variant(spec.dtype.name, dim, call.forward.arch, keys_stationary=keys)
                for dim, keys in zip(dims, (False, True), strict=True)
            ),
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        for dtype in FLOAT_DTYPES.values():
            for entry in ("delta_simt", "clear_dq_simt", "sinks_simt", "alibi_simt"):
                yield statistics_variant(entry, dtype)
            yield _bias_variant(dtype)
            for head_dim in SIMT_TILES[4]:
                for keys_stationary in (False, True):
                    yield _pass_variant(dtype, head_dim, arch, keys_stationary=keys_stationary)
                for general in (False, True):
                    fused = _fused_variant(dtype, head_dim, general, arch)
                    if fused is not None:
                        yield fused


#: The kernels of the backward pass, the fastest first.
BACKWARD: TierList[BackwardTier] = TierList(Sm90Backward(), Sm80Backward(), SimtBackward())


def choose_backward(
    call: BackwardCall, tiers: tuple[BackwardTier, ...] = BACKWARD.all
) -> BackwardLaunches:
    """Choose the kernels of a backward call: the first of `tiers` that serves it.

    Raises
    ------
    LookupError
        None does, which all of them together never leave.
    """
    return first_serving(tiers, call, call.forward.spec, call.forward.arch)
