"""Device memory: host memory whose bounds the emulator checks."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from cupy import _errors, _streams

ALIGNMENT = 512  # of all allocations, as of CuPy's pool
GUARD = 4096  # bytes before and after an allocation that are nobody's
POISON = 0xFF  # what new memory holds: NaN as floats, -1 as integers
#: Kernels may read whole vectors of so many bytes, of which an allocation has the first ones.
VECTOR = 16

#: Told of each range of device memory: ``(address, bytes, whether it is new)``.
Watch = Callable[[int, int, bool], None]
_lock = threading.RLock()
_live: dict[int, int] = {}  # sizes by address, up to whole vectors
_ends: dict[int, np.ndarray] = {}  # bytes between an allocation's end and the last vector's
_watch: Watch | None = None


def watch(watcher: Watch) -> None:
    """Tell of all memory there is, and of all changes from now on."""
    global _watch
    with _lock:
        _watch = watcher
        for address, nbytes in _live.items():
            watcher(address, nbytes, True)


def live_bytes() -> int:
    """Of all allocations."""
    with _lock:
        return sum(_live.values())


def check_ends() -> None:
    """Check that nothing was written behind an allocation.

    Raises
    ------
    EmulationError
        Something was.
    """
    with _lock:
        for address, end in _ends.items():
            if (end != POISON).any():
                size = _live[address] - end.size
                raise _errors.EmulationError(f"written behind the end of {size} bytes")


def _add(address: int, nbytes: int, end: np.ndarray) -> None:
    with _lock:
        _live[address] = nbytes
        if end.size:
            _ends[address] = end
        if _watch is not None:
            _watch(address, nbytes, True)


def _remove(address: int, nbytes: int, _whole: np.ndarray) -> None:
    """The last argument keeps the bytes alive until now."""
    with _lock:
        del _live[address]
        _ends.pop(address, None)
        if _watch is not None:
            _watch(address, nbytes, False)


class BaseMemory:
    """An allocation.

    Attributes
    ----------
    ptr, size, device_id : int
        Its address, bytes and device.
    block : numpy.ndarray
        Its bytes.
    """

    def __init__(self, ptr: int, size: int, device_id: int, block: np.ndarray | None) -> None:
        self.ptr, self.size, self.device_id = ptr, size, device_id
        if block is None:
            block = np.frombuffer((ctypes.c_uint8 * size).from_address(ptr), np.uint8)
        self.block = block

    @property
    def device(self) -> _streams.Device:
        return _streams.Device(self.device_id)

    def __contains__(self, address: int) -> bool:
        return self.ptr <= address < self.ptr + self.size


class Memory(BaseMemory):
    """A new allocation on the current device."""

    def __init__(self, size: int) -> None:
        if size == 0:
            super().__init__(0, 0, _streams.current_device(), np.empty(0, np.uint8))
            return
        whole = np.empty(size + 2 * GUARD + ALIGNMENT, np.uint8)
        begin = GUARD + -(whole.ctypes.data + GUARD) % ALIGNMENT
        vectors = -(-size // VECTOR) * VECTOR
        whole[begin : begin + vectors] = POISON
        block = whole[begin : begin + size]
        super().__init__(block.ctypes.data, size, _streams.current_device(), block)
        _add(self.ptr, vectors, whole[begin + size : begin + vectors])
        weakref.finalize(self, _remove, self.ptr, vectors, whole)


class UnownedMemory(BaseMemory):
    """Memory of somebody else, whom it keeps alive."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        device_id = _streams.current_device() if device_id < 0 else device_id
        super().__init__(ptr, size, device_id, None)
        self._owner = owner


class MemoryPointer:
    """An address in an allocation, which it keeps alive."""

    __slots__ = ("device_id", "mem", "ptr")

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    @property
    def device(self) -> _streams.Device:
        return self.mem.device

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def memset(self, value: int, size: int) -> None:
        begin = self.ptr - self.mem.ptr
        part = self.mem.block[begin : begin + size]
        _streams.enqueue(lambda: part.fill(value))

    memset_async = memset


class MemoryPool:
    """Counts what is allocated; nothing that is free is kept for later."""

    def malloc(self, size: int) -> MemoryPointer:
        return MemoryPointer(Memory(size), 0)

    def total_bytes(self) -> int:
        return live_bytes()

    used_bytes = total_bytes

    def free_bytes(self) -> int:
        return 0

    def n_free_blocks(self) -> int:
        return 0

    def free_all_blocks(self, stream: Any = None) -> None:
        """There are none."""

    def get_limit(self) -> int:
        return 0

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        raise _errors.NotEmulated("limits of memory pools")


_pool = MemoryPool()
_thread = threading.local()
_default: Callable[[int], MemoryPointer] = _pool.malloc


def get_default_memory_pool() -> MemoryPool:
    return _pool


def set_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> None:
    """Let all threads allocate with `allocator`, which is ``MemoryPool.malloc`` at first."""
    global _default
    _default = allocator or _pool.malloc


def get_allocator() -> Callable[[int], MemoryPointer]:
    return getattr(_thread, "allocator", None) or _default


class using_allocator:
    """A context in which this thread allocates with `allocator`."""

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator or _pool.malloc
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(getattr(_thread, "allocator", None))
        _thread.allocator = self._allocator

    def __exit__(self, *_: Any) -> None:
        _thread.allocator = self._before.pop()


def alloc(size: int) -> MemoryPointer:
    """Memory from the current allocator."""
    return get_allocator()(size)


def malloc_async(size: int) -> MemoryPointer:
    """Memory in the current stream's order; a graph that is being captured keeps it."""
    pointer = MemoryPointer(Memory(size), 0)
    _streams.keep(pointer)
    return pointer
