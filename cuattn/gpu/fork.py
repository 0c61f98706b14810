"""Kernels of one call that need not wait for each other: one of them on a second stream.

That stream is one of the thread's own for each stream that it makes such calls on, so that a
capture of one stream never meets work of another. While a CUDA graph is captured from the current
stream the second one is captured with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import cupy

#: The highest there is; less is taken where there is less.
PRIORITY = -5


class _Streams(threading.local):
    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], cupy.cuda.Stream] = {}


_streams = _Streams()


def side_by_side(
    first: Callable[[], None], second: Callable[[], None], late: Callable[[], None]
) -> None:
    """Launch `first` on a second stream, `second` on the current one, and `late` on the second
    stream, after both have been issued; the current stream then waits for all."""
    main = cupy.cuda.get_current_stream()
    key = cupy.cuda.runtime.getDevice(), main.ptr
    side = _streams.by_stream.get(key)
    if side is None:
        side = _streams.by_stream[key] = cupy.cuda.Stream(non_blocking=True, priority=PRIORITY)
    side.wait_event(main.record(_event()))
    try:
        with side:
            first()
        second()
        with side:
            late()
    finally:
        main.wait_event(side.record(_event()))


def _event() -> cupy.cuda.Event:
    return cupy.cuda.Event(disable_timing=True)
