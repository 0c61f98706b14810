"""``cupy.cuda``."""

from __future__ import annotations

from cupy._memory import (
    BaseMemory,
    Memory,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    get_allocator,
    malloc_async,
    set_allocator,
    using_allocator,
)
from cupy._streams import (
    Device,
    Event,
    ExternalStream,
    Graph,
    Stream,
    get_current_stream,
    get_elapsed_time,
)
from cupy.cuda import compiler, driver, nvrtc, runtime

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "Graph",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "compiler",
    "driver",
    "get_allocator",
    "get_current_stream",
    "get_elapsed_time",
    "is_available",
    "malloc_async",
    "nvrtc",
    "runtime",
    "set_allocator",
    "using_allocator",
]


def is_available() -> bool:
    return True
