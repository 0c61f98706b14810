"""Floats of 8 and 16 bits as float32, by integer operations: NumPy converts them one by one."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np


class _Layout(NamedTuple):
    """How the bits of a small float lie behind its sign."""

    exponent: int  # bits
    mantissa: int
    beyond: int  # the bits of the first number that is none: infinity or NaN


_LAYOUTS = {
    np.dtype(np.float16): _Layout(5, 10, 0x7C00),
    np.dtype(ml_dtypes.float8_e5m2): _Layout(5, 2, 0x7C),
    np.dtype(ml_dtypes.float8_e4m3fn): _Layout(4, 3, 0x7F),
}


def to_float32(array: np.ndarray) -> np.ndarray:
    """A new float32 array of the same numbers.

    The bits of a small float, exponents on top of each other, are those of a float32 that is too
    small by a power of two, subnormal ones included, unless it is infinite or NaN.
    """
    layout = _LAYOUTS.get(array.dtype)
    if layout is None or not array.size:
        return array.astype(np.float32)
    exponent, mantissa, beyond = layout
    size = array.itemsize
    signed, unsigned = array.view(f"i{size}"), array.view(f"u{size}")
    if signed.max() >= beyond or unsigned.max() >= beyond + (1 << 8 * size - 1):
        return array.astype(np.float32)
    bits = signed.astype(np.int32)  # the sign in all bits above
    bits <<= 23 - mantissa
    bits &= np.int32((1 << 23 + exponent) - 1 - (1 << 31))
    wide = bits.view(np.float32)
    wide *= np.float32(2.0 ** (128 - (1 << exponent - 1)))
    return wide
