"""Which variant of positions/rope.cu serves a call, and how its threads are laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu.compiler import Config, Variant

MAX_HEADS = 8  # that a thread rotates by the sines it has computed
#: Threads that keep every multiprocessor of the largest GPUs busy: below, a thread takes fewer
#: heads.
MANY_THREADS = 1 << 19


@dataclasses.dataclass(frozen=True)
class RopeConfig(Config):
    """positions/rope.cu."""

    dtype: str
    vec_bytes: int

    @property
    def threads(self) -> int:
        """Each rotates some pairs of a token, of some heads."""
        return 256


def rope(dtype: str, itemsize: int, *, aligned: bool) -> Variant:
    """Choose a variant: by 16 bytes, or one element at a time."""
    packed = aligned and itemsize < 8
    return Variant("positions/rope.cu", "rope", RopeConfig(dtype, 16 if packed else itemsize))


def rope_heads(tokens: int, lanes: int, heads: int) -> int:
    """How many heads a thread rotates: as many as leave many threads."""
    each = min(heads, MAX_HEADS)
    while each > 1 and tokens * lanes * -(-heads // each) < MANY_THREADS:
        each = -(-each // 2)
    return each


def position_variants() -> Iterator[Variant]:
    """Every variant of positions/rope.cu."""
    for dtype, name in FLOAT_DTYPES.items():
        yield rope(name, dtype.itemsize, aligned=False)
        if dtype.itemsize < 8:
            yield rope(name, dtype.itemsize, aligned=True)
