"""Which kernel serves a call, in which variant: pure functions, tested without a GPU.

Each kernel has a Config, a function that chooses one for a call, and a function that enumerates every Config the choice
can give, so that `variants` knows all that may ever be compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn._spec import AttentionSpec
from cuattn.gpu.compiler import Config, Variant


@dataclasses.dataclass(frozen=True)
class Launch:
    """A variant and the grid that covers one call."""

    variant: Variant
    grid: tuple[int, ...]


def capability(arch: str) -> int:
    """``sm_90a`` -> 90."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def variants(arch: str) -> Iterator[Variant]:
    """Every variant that can be chosen on an architecture such as ``sm_90a``."""
    yield from simt_forward_variants(arch)


def forward(spec: AttentionSpec, arch: str, *, has_score: bool, aligned: bool) -> Launch:
    """Choose the kernel of a forward call.

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
    """
    # Tiers, fastest first; each falls to the next for what it does not serve.
    return simt_forward(spec, arch, has_score=has_score)


# ---------------------------------------------------------------------------------------------- forward, simt


@dataclasses.dataclass(frozen=True)
class SimtForwardConfig(Config):
    """attention/forward_simt.cu."""

    dtype: str


def simt_forward(spec: AttentionSpec, arch: str, *, has_score: bool) -> Launch:
    """Choose a variant of attention/forward_simt.cu: it serves every call."""
    raise NotImplementedError


def simt_forward_variants(arch: str) -> Iterator[Variant]:
    """Every variant of attention/forward_simt.cu."""
    return iter(())
