"""TMA descriptors: what the copy engine of Hopper is told about an array."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

#: A 128-byte kernel parameter, passed by value.
TENSOR_MAP = np.dtype((np.void, 128))

_ALIGNMENT = 64  # of the descriptor that the driver fills


@functools.cache
def _driver():
    """The driver's encoder and the constants of every map here: 128-byte swizzle, 256-byte L2 promotion, zero fill."""
    from cuda.bindings import driver

    return driver


def encode(
    pointer: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> bytes:
    """Describe an array to the copy engine.

    Parameters
    ----------
    pointer : int
        Address of the first element, a multiple of 16.
    dtype : numpy.dtype
        float16 or bfloat16.
    shape : tuple of int
        Lengths, innermost first. Coordinates outside of them read as 0 and are not written.
    strides : tuple of int
        Byte strides of all axes but the innermost, multiples of 16.
    box : tuple of int
        Lengths of what one copy moves; the innermost is at most 128 bytes.

    Returns
    -------
    bytes
        The 128 bytes of a CUtensorMap.
    """
    driver = _driver()
    types = driver.CUtensorMapDataType
    result, tensor_map = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        if dtype == np.float16
        else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(shape),
        pointer,
        [driver.cuuint64_t(n) for n in shape],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1) for _ in box],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {result}, {shape=} {strides=} {box=}")
    return ctypes.string_at(tensor_map.getPtr(), TENSOR_MAP.itemsize)
