"""Which kernel computes attention's derivative in a direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu.arguments import dropout_arguments, forward_arguments, jvp_arguments
from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.backward import rows_grid
from cuattn.gpu.dispatch.gradients import SIMT_TILES, padded_dim, simt_config
from cuattn.gpu.dispatch.launch import Call, Launch
from cuattn.gpu.dispatch.tiers import TierList, first_serving


@dataclasses.dataclass(frozen=True)
class JvpCall:
    """A derivative in a direction: the forward call, and how the direction lies in memory."""

    forward: Call
    tangents: tuple[tuple[int, ...], ...]  # strides in bytes of the direction's q, k and v


class JvpTier(Protocol):
    """A kernel for some calls, as :class:`cuattn.gpu.dispatch.Tier`."""

    name: str

    def serves(self, call: JvpCall) -> Launch | None:
        """The launch for a call, or None for one that is left to other tiers."""

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""


class SimtJvp:
    """Every call, after the forward pass."""

    name = "jvp_simt"

    def serves(self, call: JvpCall) -> Launch:
        """The launch for a call."""
        forward, spec = call.forward, call.forward.spec
        variant = _simt_variant(spec.dtype.name, padded_dim(spec.head_dim_v))
        tile_m = variant.config.tile_m  # type: ignore[attr-defined]
        grid = rows_grid(False, spec.batch, spec.seqlen_q, tile_m, spec.heads_q)
        layouts = forward.bias, forward.mask, forward.alibi_slopes
        arguments = (
            forward_arguments(spec, forward.strides, *layouts),
            jvp_arguments(spec, call.tangents),
            dropout_arguments(spec),
        )
        return Launch(variant, grid, arguments)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        for dtype in FLOAT_DTYPES.values():
            for head_dim in SIMT_TILES[4]:
                yield _simt_variant(dtype, head_dim)


def _simt_variant(dtype: str, head_dim: int) -> Variant:
    config = simt_config(dtype, head_dim, keys_stationary=False)
    return Variant("gradients/jvp_simt.cu", "jvp_simt", config)


#: The kernels, the fastest first.
JVP: TierList[JvpTier] = TierList(SimtJvp())


def choose_jvp(call: JvpCall, tiers: tuple[JvpTier, ...] = JVP.all) -> Launch:
    """Choose the kernel of a derivative in a direction: the first of `tiers` that serves it.

    Raises
    ------
    LookupError
        None does, which all of them together never leave.
    """
    return first_serving(tiers, call, call.forward.spec, call.forward.arch)
