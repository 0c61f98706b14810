"""Devices, streams, events and graphs.

All work is done at once, in the order in which it is issued: one of the orders that streams allow.
While a graph is captured work is kept instead, and done at each launch of the graph.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from cupy import _errors, _settings

_thread = threading.local()


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def current_device() -> int:
    return getattr(_thread, "device", 0)


def set_device(device: int) -> None:
    if not 0 <= device < _settings.current().devices:
        raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")
    _thread.device = device


class Device:
    """A device, and a context in which it is the current one."""

    def __init__(self, device: Any = None) -> None:
        self.id = current_device() if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        self._before.append(current_device())
        set_device(self.id)
        return self

    def __exit__(self, *_: Any) -> None:
        set_device(self._before.pop())

    def use(self) -> None:
        set_device(self.id)

    def synchronize(self) -> None:
        """All is done already; but while a graph is captured, nothing may be waited for."""
        for stream in list(_capturing):
            raise _unsupported(stream)

    @property
    def compute_capability(self) -> str:
        major, minor = _settings.current().capability
        return f"{major}{minor}"

    @property
    def mem_info(self) -> tuple[int, int]:
        return _settings.FREE_MEMORY, _settings.TOTAL_MEMORY

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": _settings.current().multiprocessors}


class Graph:
    """Work that was captured, done in order at each launch."""

    def __init__(self, actions: list[Callable[[], Any]], kept: list[Any]) -> None:
        self._actions, self._kept = actions, kept

    def launch(self, stream: Any = None) -> None:
        for action in self._actions:
            action()

    def upload(self, stream: Any = None) -> None:
        """There is nowhere to upload it to."""


_numbers = itertools.count(1 << 20, 16)
_capturing: dict[Any, tuple[list[Callable[[], Any]], list[Any]]] = {}
_by_address: dict[int, Any] = {}


def _unsupported(stream: Any) -> CUDARuntimeError:
    return CUDARuntimeError(
        900,
        "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    )


class Stream:
    """A stream, and a context in which it is this thread's current one."""

    null: Stream
    ptds: Stream

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: Any = None,
    ) -> None:
        self.ptr = 0 if null else 2 if ptds else next(_numbers)
        self.device_id = current_device()
        self._before: list[Any] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __enter__(self) -> Stream:
        self._before.append(get_current_stream())
        _thread.stream = self
        return self

    def __exit__(self, *_: Any) -> None:
        _thread.stream = self._before.pop()

    def use(self) -> Stream:
        _thread.stream = self
        return self

    @property
    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self in _capturing:
            raise _unsupported(self)

    def record(self, event: Any = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """What the event follows is done already, or part of a capture, which this stream joins."""
        if any(event.captured is captured for captured in _capturing.values()):
            _capturing[self] = event.captured

    def add_callback(self, callback: Callable, arg: Any) -> None:
        raise _errors.NotEmulated("callbacks of streams")

    launch_host_func = add_callback

    def is_capturing(self) -> bool:
        return self in _capturing

    def begin_capture(self, mode: Any = None) -> None:
        if self.ptr == 0 or self in _capturing:
            raise _unsupported(self)
        _capturing[self] = ([], [])

    def end_capture(self) -> Graph:
        if self not in _capturing:
            raise CUDARuntimeError(901, "cudaErrorStreamCaptureInvalidated")
        captured = _capturing[self]
        for stream in [s for s, shared in _capturing.items() if shared is captured]:
            del _capturing[stream]
        return Graph(*captured)


class ExternalStream(Stream):
    """A stream of somebody else."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__()
        self.ptr = ptr


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


class Event:
    """A point in a stream's work. All work before it is done by the time it is recorded."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.ptr = next(_numbers)
        self.captured: Any = None  # what was being captured from the stream that it was recorded on

    done = True

    def record(self, stream: Any = None) -> None:
        """Nothing has to be remembered but a capture."""
        self.captured = _capturing.get(get_current_stream() if stream is None else stream)

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def get_elapsed_time(start: Event, end: Event) -> float:
    raise _errors.NotEmulated("times of events")


def get_current_stream(device_id: int = -1) -> Stream:
    return getattr(_thread, "stream", Stream.null)


def is_capturing() -> bool:
    return bool(_capturing) and get_current_stream() in _capturing


def enqueue(action: Callable[[], Any]) -> None:
    """Do work of the current stream, or keep it for the graph."""
    stream = get_current_stream()
    if stream in _capturing:
        _capturing[stream][0].append(action)
    else:
        action()


def keep(thing: Any) -> None:
    """Keep a thing alive as long as the graph that is being captured, if one is."""
    stream = get_current_stream()
    if stream in _capturing:
        _capturing[stream][1].append(thing)


def check_readable() -> None:
    """Check that the host may wait for what is on the device.

    Raises
    ------
    CUDARuntimeError
        A graph is being captured from the current stream.
    """
    if is_capturing():
        raise _unsupported(get_current_stream())
