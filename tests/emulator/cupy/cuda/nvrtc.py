"""``cupy.cuda.nvrtc``."""

from __future__ import annotations


def getVersion() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    return nvrtc.nvrtcVersion()[1:]
