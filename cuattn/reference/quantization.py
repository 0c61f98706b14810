"""What codes and scales stand for, in NumPy: every operation is in float32 with one rounding, so
that kernels can do the same to the bit."""

from __future__ import annotations

import copy
from typing import NamedTuple

import ml_dtypes
import numpy as np

from cuattn._quantized import BFLOAT16, FORMATS, ROTATION_SIGNS, QuantizedArray
from cuattn.reference.narrow import to_float32

FLOAT8 = {
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
#: The least scale of a group: its inverse has to be finite.
LEAST_SCALE = np.float32(2.0**-126)


class Codes(NamedTuple):
    """Codes of some rows, and what gives their values."""

    data: np.ndarray  # (..., head_dim), or half as many bytes of 4-bit codes
    scale: np.ndarray  # (..., groups)
    minimum: np.ndarray | None


def quantize(
    x: np.ndarray,
    format: str,
    axes: tuple[int, ...],
    group_size: int,
    *,
    symmetric: bool,
    offset: np.ndarray | None,
    rotate: bool,
    scale: np.ndarray | None,
    minimum: np.ndarray | None,
) -> Codes:
    """Quantise an array that :mod:`cuattn.quantization` has checked.

    Parameters
    ----------
    x : numpy.ndarray (..., heads, head_dim)
    format : str
        As :attr:`cuattn.QuantizedArray.dtype`.
    axes : tuple of int
        Axes that share a scale, beside groups of features.
    group_size : int
        Neighbouring features that share a scale.
    symmetric, offset, rotate
        As in :func:`cuattn.quantize`.
    scale, minimum : numpy.ndarray, optional
        Given ones, as many axes as x has; `axes`, `group_size` and `symmetric` then mean nothing.
    """
    with np.errstate(over="ignore"):
        y = x.astype(np.float32, order="C")
    if offset is not None:
        y -= offset
    if rotate:
        y = rotated(y)
    if scale is None:
        grouped = _grouped(y, y.shape[-1] // group_size)
        if not grouped.size:  # no number is as if all were 0
            shape = (1 if i in axes else n for i, n in enumerate(grouped.shape))
            grouped = np.zeros((*shape,), np.float32)
        if symmetric:
            scale = symmetric_scale(np.abs(grouped), (*axes, -1), FORMATS[format].largest)
        else:
            scale, minimum = asymmetric_scale(grouped, (*axes, -1))
        scale = scale[..., 0]
        minimum = None if minimum is None else minimum[..., 0]
        return Codes(codes(y, format, scale, minimum), *_by_head(scale, minimum))
    return Codes(codes(y, format, scale, minimum), scale, minimum)


def _by_head(scale: np.ndarray, minimum: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """The same scales and minima, as kernels read them: a head's of all tokens one after the other,
    a minimum beside its scale."""
    parts = [scale] if minimum is None else [scale, minimum]
    *before, tokens, heads, groups = (1, *scale.shape) if scale.ndim == 2 else scale.shape
    memory = np.empty((*before, heads, tokens, groups, len(parts)), scale.dtype)
    seen = memory.swapaxes(-4, -3).reshape(*scale.shape, len(parts))
    for i, part in enumerate(parts):
        seen[..., i] = part
    return seen[..., 0], None if minimum is None else seen[..., 1]


def _grouped(x: np.ndarray, groups: int) -> np.ndarray:
    """The last axis cut into so many equal parts."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def round_up(x: np.ndarray) -> np.ndarray:
    """Positive float32 to the nearest bfloat16 that is not less, infinity and NaN to NaN."""
    bits = (x.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    up = bits.astype(np.uint16).view(BFLOAT16)
    return np.where(np.isfinite(x), up, BFLOAT16.type(np.nan))


def round_down(x: np.ndarray) -> np.ndarray:
    """Float32 to the nearest bfloat16 that is not more; NaN to NaN."""
    bits = x.view(np.uint32)
    away = np.where(x < 0, np.uint32(0xFFFF), np.uint32(0))
    down = ((bits + away) >> np.uint32(16)).astype(np.uint16).view(BFLOAT16)
    return np.where(np.isnan(x), BFLOAT16.type(np.nan), down)


def symmetric_scale(magnitudes: np.ndarray, axes: tuple[int, ...], largest: float) -> np.ndarray:
    """``max / largest``, rounded up so that no code saturates; 1 where all is 0, NaN where anything
    is not finite, or the largest code's value would not be."""
    peak = magnitudes.max(axis=axes, keepdims=True)
    return _usable(round_up(peak / np.float32(largest)), peak, largest, np.float32(0))


def asymmetric_scale(y: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """``(max - min) / 15`` and the minimum, which is 0 where the scale is NaN."""
    least = round_down(y.min(axis=axes, keepdims=True) + np.float32(0))  # no -0
    with np.errstate(over="ignore", invalid="ignore"):
        extent = y.max(axis=axes, keepdims=True) - least.astype(np.float32)
    scale = _usable(round_up(extent / np.float32(15)), extent, 15, least)
    return scale, np.where(np.isnan(scale), BFLOAT16.type(0), least)


def _usable(
    scale: np.ndarray, extent: np.ndarray, largest: float, minimum: np.ndarray
) -> np.ndarray:
    scale = np.where(scale < LEAST_SCALE, BFLOAT16.type(LEAST_SCALE), scale)
    with np.errstate(over="ignore", invalid="ignore"):
        most = scale.astype(np.float32) * np.float32(largest) + minimum.astype(np.float32)
    scale = np.where(np.isfinite(most), scale, BFLOAT16.type(np.nan))
    return np.where(extent == 0, BFLOAT16.type(1), scale)


def codes(y: np.ndarray, format: str, scale: np.ndarray, minimum: np.ndarray | None) -> np.ndarray:
    """The codes of float32 values; where a scale or a value is NaN, those of 0.

    Parameters
    ----------
    y : numpy.ndarray (..., head_dim)
    scale, minimum : numpy.ndarray (..., groups)
        Broadcast against y's other axes.
    """
    grouped = _grouped(y, scale.shape[-1])
    scale = scale.astype(np.float32)[..., None]
    with np.errstate(all="ignore"):
        if minimum is not None:
            grouped = grouped - minimum.astype(np.float32)[..., None]
        scaled = grouped * (np.float32(1) / scale)
    largest = np.float32(FORMATS[format].largest)
    if format == "int4" and minimum is not None:
        scaled = np.clip(np.rint(scaled), 0, 15)
    else:
        scaled = np.clip(scaled, -largest, largest)
    scaled = np.where(np.isnan(scaled), np.float32(0), scaled).reshape(y.shape)
    if format in FLOAT8:
        return scaled.astype(FLOAT8[format]).view(np.uint8)
    whole = np.rint(scaled).astype(np.int8)
    if format == "int8":
        return whole
    nibbles = whole.view(np.uint8) + np.uint8(0 if minimum is not None else 8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << np.uint8(4)


def values(
    data: np.ndarray, format: str, scale: np.ndarray, minimum: np.ndarray | None
) -> np.ndarray:
    """``scale * code + minimum`` in float32."""
    if format in FLOAT8:
        numbers = to_float32(data.view(FLOAT8[format]))
    elif format == "int8":
        numbers = data.astype(np.float32)
    else:
        pairs = data.astype("<u2", order="C")  # each byte's halves become bytes
        pairs |= pairs << 4
        pairs &= 0x0F0F
        nibbles = pairs.view(np.int8)
        if minimum is None:
            nibbles -= 8
        numbers = nibbles.astype(np.float32)
    grouped = _grouped(numbers, scale.shape[-1])
    with np.errstate(all="ignore"):
        grouped *= scale.astype(np.float32)[..., None]
        if minimum is not None:
            grouped += minimum.astype(np.float32)[..., None]
    return numbers


def rotation_signs(head_dim: int) -> np.ndarray:
    """float32 (head_dim,): 1 and -1."""
    channel = np.arange(head_dim)
    words = np.array(ROTATION_SIGNS, np.uint32)[channel // 32 % 8]
    return 1 - 2 * (words >> (channel % 32).astype(np.uint32) & 1).astype(np.float32)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Hadamard transform of the last axis in blocks of the largest power of two that divides it,
    which is its own inverse but for rounding."""
    block = x.shape[-1] & -x.shape[-1]
    shape, distance = x.shape, 1
    with np.errstate(all="ignore"):
        while distance < block:
            pairs = x.reshape(*shape[:-1], shape[-1] // (2 * distance), 2, distance)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            x = np.stack((a + b, a - b), axis=-2)
            distance *= 2
        return x.reshape(shape) * np.float32(2.0 ** (-(block.bit_length() - 1) / 2))


def rotated(x: np.ndarray) -> np.ndarray:
    """R x: signs, then the Hadamard transform; float32."""
    with np.errstate(invalid="ignore"):
        return hadamard(x * rotation_signs(x.shape[-1]))


def unrotated(x: np.ndarray) -> np.ndarray:
    """Rᵀ x."""
    with np.errstate(invalid="ignore"):
        return hadamard(x) * rotation_signs(x.shape[-1])


def quantize_into(
    pages: QuantizedArray, slots: tuple[np.ndarray, np.ndarray], x: np.ndarray
) -> None:
    """Quantise rows (tokens, heads, head_dim) into pages, at a page and a place there for each;
    scales and minima that each token has of its own are found and written too, others are taken as
    they are."""
    found = pages.has_scale_of_tokens
    scale, minimum = (None, None) if found else pages.scales_at(slots)
    new = quantize(
        x,
        pages.dtype,
        (),
        pages.group_size,
        symmetric=pages.minimum is None,
        offset=pages.offset,
        rotate=pages.rotation is not None,
        scale=scale,
        minimum=minimum,
    )
    pages.data[slots] = new.data
    if found:
        pages.scale[slots] = new.scale
        if pages.minimum is not None:
            pages.minimum[slots] = new.minimum


def dequantize(array: QuantizedArray, dtype: np.dtype) -> np.ndarray:
    """The values of codes; `dtype` is what float32 is rounded to."""
    x = values(array.data, array.dtype, array.scale, array.minimum)
    return _restored(x, array.rotation, array.offset, dtype)


def _restored(
    x: np.ndarray, rotation: str | None, offset: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """What was quantised, from the values of codes."""
    if rotation is not None:
        x = unrotated(x)
    if offset is not None:
        x += offset
    with np.errstate(all="ignore"):
        return x.astype(dtype, copy=False)


class CodedRows:
    """Codes of a sequence, in the place of an array of its values (heads, tokens, head_dim), which
    become numbers a part at a time: where a part is used, it is in cache.

    Parameters
    ----------
    array : QuantizedArray (tokens, heads, head_dim)
    """

    def __init__(self, array: QuantizedArray) -> None:
        tokens, heads, head_dim = array.shape
        self.shape = heads, tokens, head_dim
        self.dtype = array.data.dtype  # that of no result
        self._array = array
        self._data = array.data.swapaxes(0, 1)
        self._scale, self._minimum = (
            None if part is None else self._in_order(part, array)
            for part in (array.scale, array.minimum)
        )
        self._offset = None if array.offset is None else array.offset[:, None]

    @staticmethod
    def _in_order(part: np.ndarray, array: QuantizedArray) -> np.ndarray:
        """Scales or minima of each head and token, in memory as codes are: NumPy's products with
        them take three times as long if a head's lie together and the codes of a token do."""
        if array.has_scale_of_tokens:
            part = np.ascontiguousarray(part)
        return np.broadcast_to(part, (*array.shape[:2], part.shape[-1])).swapaxes(0, 1)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | tuple[slice, slice]) -> CodedRows:
        """A part of the heads and of the tokens."""
        heads = index[0] if isinstance(index, tuple) else index
        part = copy.copy(self)
        part._data, part._scale = self._data[index], self._scale[index]
        part._minimum = None if self._minimum is None else self._minimum[index]
        part._offset = None if self._offset is None else self._offset[heads]
        part.shape = *part._data.shape[:2], self.shape[-1]
        return part

    def values(self, dtype: np.dtype) -> np.ndarray:
        """What the codes stand for; `dtype` is what float32 is rounded to."""
        x = values(self._data, self._array.dtype, self._scale, self._minimum)
        return _restored(x, self._array.rotation, self._offset, dtype)
