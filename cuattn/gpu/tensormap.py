"""TMA descriptors: what the copy engine of Hopper is told about an array."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

TENSOR_MAP_BYTES = 128
MAX_STRIDE = 1 << 34  # 2^40 for the copy engine; varlen maps need room below it
_ALIGNMENT = 16  # of addresses and strides, in bytes
_TYPES = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32", "bool": "UINT8"}


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def addressable(strides: tuple[int, ...]) -> bool:
    """Whether the copy engine can address an array with these byte strides, the innermost axis's
    being left out."""
    return all(0 < stride < MAX_STRIDE and stride % _ALIGNMENT == 0 for stride in strides)


@functools.lru_cache(maxsize=4096)
def encode(
    pointer: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool = True,
) -> bytes:
    """Describe an array to the copy engine, with zeros outside of the array.

    Parameters
    ----------
    pointer : int
        Address of the first element, a multiple of 16.
    dtype : numpy.dtype
        float16, bfloat16, float32 or bool.
    shape : tuple of int
        Lengths, innermost first. Coordinates outside of them read as 0 and are not written.
    strides : tuple of int
        Byte strides of all axes but the innermost.
    box : tuple of int
        Lengths of what one copy moves; the innermost is at most 128 bytes where swizzled.
    swizzled : bool
        Whether copies lie in shared memory as `wgmma` takes them, with the 128-byte swizzle, or as
        they come.

    Returns
    -------
    bytes
        The 128 bytes of a CUtensorMap.
    """
    before, after = _described(dtype, shape, strides, box, swizzled)
    driver = _driver()
    result, tensor_map = driver.cuTensorMapEncodeTiled(*before, pointer, *after)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {result}, {shape=} {strides=} {box=}")
    return ctypes.string_at(tensor_map.getPtr(), TENSOR_MAP_BYTES)


@functools.lru_cache(maxsize=4096)
def _described(
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of ``cuTensorMapEncodeTiled`` before and after the pointer: to make them takes
    the host several times what the call does, and new pointers are often to arrays alike."""
    driver = _driver()
    swizzle = "128B" if swizzled else "NONE"
    before = (
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype.name]}"),
        len(shape),
    )
    after = (
        [driver.cuuint64_t(n) for n in shape],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1) for _ in box],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return before, after
