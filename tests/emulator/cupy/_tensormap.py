"""TMA descriptors: ``cuTensorMapEncodeTiled`` with the driver's rules, in the layout of
``tensor_map.h``."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

ALIGNMENT = 16
MAX_BOX = 256
MAX_LENGTH = 1 << 32
MAX_STRIDE = 1 << 40
_LAYOUT = struct.Struct("<QI4B5Q4Q5I5BB14x")
_MAGIC = 0x50414D54
_AXES = 5
#: By the name of a CUtensorMapDataType.
_ITEM_BYTES = {
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "INT32": 4,
    "UINT64": 8,
    "INT64": 8,
    "FLOAT16": 2,
    "FLOAT32": 4,
    "FLOAT64": 8,
    "BFLOAT16": 2,
}
#: Most bytes of a box's innermost axis, by the name of a CUtensorMapSwizzle.
_SWIZZLE_BYTES = {"NONE": 1 << 30, "32B": 32, "64B": 64, "128B": 128}


class TensorMap:
    """What stands for a ``CUtensorMap``."""

    def __init__(self, encoded: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(encoded, len(encoded))

    def getPtr(self) -> int:
        return ctypes.addressof(self._buffer)


def encode_tiled(
    dtype: Any,
    rank: int,
    address: Any,
    shape: Sequence[Any],
    strides: Sequence[Any],
    box: Sequence[Any],
    element_strides: Sequence[Any],
    interleave: Any,
    swizzle: Any,
    l2_promotion: Any,
    fill: Any,
) -> tuple[Any, TensorMap | None]:
    """As of ``cuda.bindings.driver``."""
    from cuda.bindings import driver

    address = int(address)
    shape, strides, box, element_strides = (
        [int(n) for n in numbers] for numbers in (shape, strides, box, element_strides)
    )
    item_bytes = _ITEM_BYTES.get(_short_name(dtype), 0)
    inner_bytes = box[0] * item_bytes if box else 0
    good = (
        item_bytes
        and 1 <= rank <= _AXES
        and (len(shape), len(strides), len(box)) == (rank, rank - 1, rank)
        and element_strides == [1] * rank
        and address
        and address % ALIGNMENT == 0
        and all(1 <= n <= MAX_LENGTH for n in shape)
        and all(0 < n < MAX_STRIDE and n % ALIGNMENT == 0 for n in strides)
        and all(1 <= n <= MAX_BOX for n in box)
        and inner_bytes % ALIGNMENT == 0
        and inner_bytes <= _SWIZZLE_BYTES.get(_short_name(swizzle), 0)
        and int(interleave) == 0
    )
    if not good:
        return driver.CUresult.CUDA_ERROR_INVALID_VALUE, None
    encoded = _LAYOUT.pack(
        address,
        _MAGIC,
        *(int(dtype), rank, int(swizzle), int(interleave)),
        *_padded(shape, _AXES, 1),
        *_padded(strides, _AXES - 1, 0),
        *_padded(box, _AXES, 1),
        *_padded(element_strides, _AXES, 1),
        int(fill),
    )
    return driver.CUresult.CUDA_SUCCESS, TensorMap(encoded)


def _short_name(member: Any) -> str:
    """``FLOAT16`` of ``CU_TENSOR_MAP_DATA_TYPE_FLOAT16``."""
    return member.name.rpartition("_")[2]


def _padded(numbers: list[int], count: int, filler: int) -> list[int]:
    return numbers + [filler] * (count - len(numbers))


def install() -> None:
    """Let ``cuda.bindings.driver``, where it is installed, encode maps of the emulator's."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return
    driver.cuTensorMapEncodeTiled = encode_tiled
