"""What launches of calls alike have in common."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import numpy as np

_launch_ids = random.Random()  # a generator of its own: the program's is left alone


@dataclasses.dataclass(frozen=True)
class Plan:
    """All of a launch but the pointers."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int
    shape: bytes  # the first argument after its pointers

    def launch(self, pointers: bytes, *more: bytes) -> None:
        """Launch on the current device and stream; `more` are the arguments after the first."""
        arguments = [as_kernel_argument(packed) for packed in (pointers + self.shape, *more)]
        self.kernel(self.grid, self.block, arguments, shared_mem=self.smem_bytes)


def layout_key(array: Any) -> tuple | None:
    """What of an array a plan depends on."""
    return None if array is None else (array.shape, array.strides, array.dtype)


def launch_id() -> int:
    """A random number of a launch's own, by which it knows what it has written in its scratch."""
    return _launch_ids.getrandbits(64)


def as_kernel_argument(packed: bytes) -> np.void:
    """A struct as CuPy passes it by value: a scalar of as many bytes."""
    return np.frombuffer(packed, _opaque(len(packed)))[0]


@functools.cache
def _opaque(size: int) -> np.dtype:
    return np.dtype((np.void, size))
