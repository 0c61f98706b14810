"""TMA descriptors: what Hopper's Tensor Memory Accelerator is told about an array."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import numpy as np

TENSOR_MAP_BYTES = 128
MAX_STRIDE = 1 << 34  # 2^40 for TMA; maps of ragged rows need room below it
_ALIGNMENT = 16  # of addresses and strides, in bytes
_TYPES = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32"}
_TYPES |= dict.fromkeys(("bool", "uint8"), "UINT8")


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def addressable(strides: tuple[int, ...]) -> bool:
    """Whether TMA can address an array with these byte strides, the innermost axis's
    being left out."""
    return all(0 < stride < MAX_STRIDE and stride % _ALIGNMENT == 0 for stride in strides)


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """An array as TMA sees it, but for its address. Coordinates outside of it read as 0 and are not
    written.

    Attributes
    ----------
    dtype : numpy.dtype
        float16, bfloat16, float32, bool or uint8.
    shape : tuple of int
        Lengths, innermost first.
    strides : tuple of int
        Byte strides of all axes but the innermost.
    box : tuple of int
        Lengths of what one copy moves; the innermost is at most 128 bytes where swizzled.
    swizzled : bool
        Whether copies lie in shared memory as `wgmma` takes them, with a swizzle, or as they come.
    swizzle_bytes : int
        128, 64 or 32: within how many bytes chunks of 16 are permuted.
    l2_bytes : int
        256, 128 or 64: how much L2 reads where a copy wants a part of it. With 256, decoding over
        short caches takes 5 to 17% longer than with 128 (docs/notes/decoding.md).
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True
    swizzle_bytes: int = 128
    l2_bytes: int = 128

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.strides, self.box))

    def __hash__(self) -> int:
        # At every launch, of a map that its plan keeps.
        return self._hash


@functools.lru_cache(maxsize=4096)
def encode(tensor_map: TensorMap, pointer: int) -> bytes:
    """The 128 bytes of a CUtensorMap of the array at an address, a multiple of 16.

    Raises
    ------
    RuntimeError
        The driver does not take it.
    """
    before, after = _described(tensor_map)
    driver = _driver()
    result, encoded = driver.cuTensorMapEncodeTiled(*before, pointer, *after)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {result}, {tensor_map}")
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)


def words(tensor_map: TensorMap, pointer: int) -> memoryview:
    """The same as 16 numbers of 64 bits."""
    return memoryview(encode(tensor_map, pointer)).cast("Q")


@functools.lru_cache(maxsize=4096)
def begins_with_address(tensor_map: TensorMap, pointer: int) -> bool:
    """Whether the first number of a CUtensorMap is the array's address, and no other depends on it,
    so that to write another address there makes the map of an array alike. NVIDIA does not say so:
    the driver is asked, which takes `pointer` and one that differs from it in many bits."""
    other = pointer ^ 0x1234567890
    try:
        maps = [words(tensor_map, address) for address in (pointer, other)]
    except RuntimeError:
        return False
    return [m[0] for m in maps] == [pointer, other] and maps[0][1:] == maps[1][1:]


@functools.lru_cache(maxsize=4096)
def _described(tensor_map: TensorMap) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of ``cuTensorMapEncodeTiled`` before and after the pointer: to make them takes
    the host several times what the call does, and new pointers are often to arrays alike."""
    driver = _driver()
    swizzle = f"{tensor_map.swizzle_bytes}B" if tensor_map.swizzled else "NONE"
    dtype = _TYPES[tensor_map.dtype.name]
    before = (
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"),
        len(tensor_map.shape),
    )
    after = (
        [driver.cuuint64_t(n) for n in tensor_map.shape],
        [driver.cuuint64_t(n) for n in tensor_map.strides],
        [driver.cuuint32_t(n) for n in tensor_map.box],
        [driver.cuuint32_t(1) for _ in tensor_map.box],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        getattr(
            driver.CUtensorMapL2promotion,
            f"CU_TENSOR_MAP_L2_PROMOTION_L2_{tensor_map.l2_bytes}B",
        ),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return before, after
