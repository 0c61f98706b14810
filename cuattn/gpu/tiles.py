"""Which kernel serves a call, in which variant: pure functions, tested without a GPU.

Each kernel has a Config, a function that chooses one for a call, and a function that enumerates every Config the choice
can give, so that `variants` knows all that may ever be compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn._arrays import FLOAT_DTYPES
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
    """Choose the kernel of a forward call: the fastest tier of `FORWARD_TIERS` that serves it.

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

    Raises
    ------
    LookupError
        No tier serves the call: only where `FORWARD_TIERS` was cut down, as tests do to reach one tier.
    """
    for choose in FORWARD_TIERS.values():
        launch = choose(spec, arch, has_score=has_score, aligned=aligned)
        if launch is not None:
            return launch
    raise LookupError(f"none of the tiers {', '.join(FORWARD_TIERS)} serves {spec} on {arch}")


# ---------------------------------------------------------------------------------------------- forward, simt


@dataclasses.dataclass(frozen=True)
class SimtForwardConfig(Config):
    """attention/forward_simt.cu."""

    dtype: str
    head_dim_v: int  # the next of 64, 128 and 256
    has_score: bool  # softcap, bias, mask or alibi_slopes
    tile_m: int
    tile_n: int
    thread_cols: int  # threads that share a row of scores and of O
    thread_rows: int

    @property
    def threads(self) -> int:
        return self.thread_rows * self.thread_cols


#: (tile_m, tile_n, thread_cols, thread_rows) by the size of the accumulator and head_dim_v: as many scores and columns
#: of O for a thread as registers hold, since what a thread reads from shared memory it should use often.
SIMT_TILES = {
    4: {64: (128, 64, 8, 16), 128: (64, 128, 16, 8), 256: (32, 128, 16, 8)},
    8: {64: (64, 64, 16, 8), 128: (64, 64, 16, 16), 256: (32, 64, 16, 16)},
}
GRID_Y = 65535  # the most blocks along a grid's second axis


def simt_forward(
    spec: AttentionSpec, arch: str, *, has_score: bool, aligned: bool
) -> Launch | None:
    """Choose a variant of attention/forward_simt.cu, which serves every call."""
    config = _simt_config(
        dtype=spec.dtype.name,
        head_dim_v=next(n for n in (64, 128, 256) if spec.head_dim_v <= n),
        has_score=has_score or spec.softcap != 0.0,
    )
    if spec.varlen:
        tiles, batch = spec.seqlen_q // config.tile_m + spec.batch, 1
    else:
        tiles, batch = -(-spec.seqlen_q // config.tile_m), spec.batch
    rows = min(batch, GRID_Y)
    return Launch(_simt_variant(config), (tiles * spec.heads_q, rows, -(-batch // rows)))


def simt_forward_variants(arch: str) -> Iterator[Variant]:
    """Every variant of attention/forward_simt.cu."""
    for dtype in FLOAT_DTYPES.values():
        for head_dim_v in (64, 128, 256):
            for has_score in (False, True):
                yield _simt_variant(_simt_config(dtype, head_dim_v, has_score))


def _simt_config(dtype: str, head_dim_v: int, has_score: bool) -> SimtForwardConfig:
    tile = SIMT_TILES[8 if dtype == "float64" else 4][head_dim_v]
    return SimtForwardConfig(dtype, head_dim_v, has_score, *tile)


def _simt_variant(config: SimtForwardConfig) -> Variant:
    return Variant("attention/forward_simt.cu", "forward_simt", config)


#: The tiers of the forward pass, fastest first: each chooses a launch, or None for a call that it leaves to the next.
FORWARD_TIERS = {"simt": simt_forward}
