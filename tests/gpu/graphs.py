"""Calls that are captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

cupy = pytest.importorskip("cupy")


def captured(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A function that replays a call, after all work that was given to the device before, and waits
    for it; and the result that each replay fills. The call is made once before it is captured, so
    that all kernels are compiled.
    """
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()

    def replay() -> None:
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()

    return replay, result
