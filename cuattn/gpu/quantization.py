"""Keys and values that are codes, on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy

from cuattn._quantized import FLOAT32, QuantizedArray
from cuattn.gpu.memory import contiguous_last_axis, pointer
from cuattn.gpu.params import Scales


class Operand(NamedTuple):
    """Keys or values as a launch wants them."""

    codes: cupy.ndarray | None  # (page or sequence, token, head, columns), the last axis contiguous
    scales: Scales | None  # None: they are no codes
    addresses: tuple[int, int, int]  # of scales, minima and offset; 0 for what is not there


#: Beside keys or values whose strides and address are known otherwise.
NO_SCALES = Operand(None, None, (0, 0, 0))


def format_of(array: Any) -> str:
    """The format of codes, "" for plain numbers."""
    return array.dtype if isinstance(array, QuantizedArray) else ""


def as_sequence(array: Any) -> Operand:
    """Keys or values (token, head, features) as those of one sequence."""
    if not isinstance(array, QuantizedArray):
        return operand(array[None])
    minimum = None if array.minimum is None else array.minimum[None]
    return operand(array.of(array.data[None], array.scale[None], minimum))


def operand(array: Any) -> Operand:
    """Keys or values, plain or quantised, of four axes."""
    if not isinstance(array, QuantizedArray):
        return Operand(contiguous_last_axis(array), None, (0, 0, 0))
    scale, minimum, offset = array.scale, array.minimum, array.offset
    if offset is not None and not offset.flags.c_contiguous:
        offset = cupy.ascontiguousarray(offset)
    addresses = pointer(scale), pointer(minimum), pointer(offset)
    strides = _strides(scale)
    minimum_strides = (0, 0, 0, 0) if minimum is None else _strides(minimum)
    scales = Scales(
        strides,
        minimum_strides,
        scale.shape[-1],
        is_float32=scale.dtype == FLOAT32,
        has_minimum=minimum is not None,
        paired=scale.dtype.itemsize == 2
        and addresses[1] == addresses[0] + 2
        and addresses[0] % 4 == 0
        and minimum_strides == strides
        and all(stride % 2 == 0 for stride in strides),
        has_offset=offset is not None,
        rotated=array.rotation is not None,
        aligned=addresses[0] % 16 == 0,
    )
    return Operand(contiguous_last_axis(array.data), scales, addresses)


def scale_addresses(k: Operand, v: Operand) -> dict[str, int]:
    """What DecodeParams calls the addresses of scales, minima and offsets."""
    names = ("scale", "minimum", "offset")
    return {
        f"{label}_{name}": address
        for label, each in (("k", k), ("v", v))
        for name, address in zip(names, each.addresses, strict=True)
    }


def _strides(scale: cupy.ndarray) -> tuple[int, ...]:
    """Element strides, 0 along axes of length 1."""
    return tuple(
        0 if n == 1 else stride // scale.itemsize
        for n, stride in zip(scale.shape, scale.strides, strict=True)
    )
