"""What a choice of gradient kernels is made from, a :class:`BackwardCall`, and what it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.launch import MOST_OF_GRID, Call, Launch


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """A call of the backward pass: the forward call, and what is asked for."""

    forward: Call
    dout: tuple[int, ...]  # strides in bytes
    grad_bias: bool = False
    grad_alibi: bool = False
    grad_sinks: bool = False
    addresses_aligned: bool = True  # those of q, k, v and dout are multiples of 16
    deterministic: bool = False
    out_aligned: bool = True  # so is that of out

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
    alibi_slots: int = 0  # blocks of a query head that leave their part of dalibi
    workspaces: tuple[tuple[str, int], ...] = ()  # of all launches: a pointer's name, and bytes


class BackwardTier(Protocol):
    """Kernels for some calls, as :class:`cuattn.gpu.dispatch.Tier`."""

    name: str

    def serves(self, call: BackwardCall) -> BackwardLaunches | None:
        """The launches for a call, or None for one that is left to other tiers."""

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""


def rows_grid(ragged: bool, batch: int, rows: int, tile_m: int, heads: int) -> tuple[int, ...]:
    """A block for each tile of rows of a head: slots and heads along x, the batch along y and z."""
    if ragged:
        return ((rows // tile_m + batch) * heads, 1, 1)
    along_y = min(batch, MOST_OF_GRID)
    return (-(-rows // tile_m) * heads, along_y, -(-batch // along_y))


@dataclasses.dataclass(frozen=True)
class SimtStatisticsConfig(Config):
    """gradients/statistics_simt.cu."""

    dtype: str

    @property
    def threads(self) -> int:
        """Eight warps."""
        return 256


def statistics_variant(entry: str, dtype: str) -> Variant:
    """A kernel of gradients/statistics_simt.cu."""
    return Variant("gradients/statistics_simt.cu", entry, SimtStatisticsConfig(dtype))
