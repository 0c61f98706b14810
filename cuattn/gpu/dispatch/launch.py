"""A chosen kernel, and what choices need to know of an architecture."""

from __future__ import annotations

import dataclasses

from cuattn.gpu.compiler import Variant

#: Shared memory of a multiprocessor in KiB, by compute capability; others have at least 100. A
#: block can have 1 less.
SHARED_KIB = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A variant and the grid that covers one call."""

    variant: Variant
    grid: tuple[int, ...]


def capability(arch: str) -> int:
    """``sm_90a`` -> 90."""
    return int(arch.removeprefix("sm_").rstrip("af"))
