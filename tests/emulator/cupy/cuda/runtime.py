"""``cupy.cuda.runtime``."""

from __future__ import annotations

from typing import Any

from cupy import _errors, _settings
from cupy._streams import CUDARuntimeError, current_device, set_device

__all__ = [
    "CUDARuntimeError",
    "deviceGetAttribute",
    "deviceSynchronize",
    "driverGetVersion",
    "free",
    "getDevice",
    "getDeviceCount",
    "getDeviceProperties",
    "memGetInfo",
    "runtimeGetVersion",
    "setDevice",
    "streamQuery",
]

cudaDevAttrMultiProcessorCount = 16
cudaDevAttrMaxSharedMemoryPerBlockOptin = 97

getDevice, setDevice = current_device, set_device


def getDeviceCount() -> int:
    return _settings.current().devices


def getDeviceProperties(device: int) -> dict[str, Any]:
    settings = _settings.current()
    major, minor = settings.capability
    return {
        "name": f"emulated GPU of compute capability {major}.{minor}".encode(),
        "major": major,
        "minor": minor,
        "multiProcessorCount": settings.multiprocessors,
        "totalGlobalMem": _settings.TOTAL_MEMORY,
        "sharedMemPerBlockOptin": settings.shared_memory,
        "warpSize": 32,
    }


def deviceGetAttribute(attribute: int, device: int) -> int:
    settings = _settings.current()
    values = {
        cudaDevAttrMultiProcessorCount: settings.multiprocessors,
        cudaDevAttrMaxSharedMemoryPerBlockOptin: settings.shared_memory,
    }
    if attribute not in values:
        raise _errors.NotEmulated(f"device attribute {attribute}")
    return values[attribute]


def memGetInfo() -> tuple[int, int]:
    return _settings.FREE_MEMORY, _settings.TOTAL_MEMORY


def deviceSynchronize() -> None:
    """All is done already."""


def streamQuery(stream: int) -> int:
    return 0


def free(pointer: int) -> None:
    if pointer:
        raise _errors.NotEmulated("cudaFree")


def runtimeGetVersion() -> int:
    return 13000


def driverGetVersion() -> int:
    return 13000
