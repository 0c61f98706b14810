"""Arrays of low-precision codes with their scales: the formats, and the class that holds both."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuattn._arrays import as_arrays, check_float_dtype, check_given

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


class Format(NamedTuple):
    """How a number is stored as a code."""

    number: int  # tile::Format of rawkernels/tile/quantized.cuh
    bits: int
    largest: float  # code without a minimum
    storage: np.dtype  # of QuantizedArray.data


#: By name.
FORMATS = {
    "int8": Format(1, 8, 127.0, np.dtype(np.int8)),
    "int4": Format(2, 4, 7.0, np.dtype(np.uint8)),
    "float8_e4m3": Format(3, 8, 448.0, np.dtype(np.uint8)),
    "float8_e5m2": Format(4, 8, 57344.0, np.dtype(np.uint8)),
}

#: Signs of the rotation, a bit a channel (1: minus), repeated every 256: the first bits of pi's
#: fraction, which have no structure that keys could share. kRotationSigns of tile/quantized.cuh.
ROTATION_SIGNS = (
    *(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
    *(0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89),
)


def format_number(format: str) -> int:
    """The number that kernels know a format by; 0 for "", which is no format."""
    return FORMATS[format].number if format else 0


def code_columns(format: str, head_dim: int) -> int:
    """Elements of `QuantizedArray.data` that hold `head_dim` codes."""
    return head_dim * FORMATS[format].bits // 8


class QuantizedArray:
    """An array of low-precision codes with what gives their values.

    Its values are ``x = unrotate(scale * codes + minimum) + offset``, computed in float32, one
    rounding an operation; `scale` and `minimum` broadcast against the array's shape, but that
    their last axis may divide its: then as many neighbouring features share a scale.
    :func:`cuattn.quantize` makes one, :func:`cuattn.dequantize` gives the values back, and
    :func:`cuattn.flash_decode` and :func:`cuattn.paged_attention` take them as keys and values.

    Parameters
    ----------
    data : array (..., seqlen, heads, head_dim)
        Codes: int8 for ``"int8"``; uint8 for the bits of ``"float8_e4m3"`` (OCP's, without
        infinities) and ``"float8_e5m2"``; uint8 of (..., head_dim // 2) for ``"int4"``, two codes
        in a byte, the even feature's in the low half: 0 to 15 with a minimum, the code plus 8
        without one.
    scale : array
        bfloat16 or float32.
    dtype : str
        The format of `data`.
    minimum : array of scale's shape and dtype, optional
        What a code of 0 stands for; default 0.
    offset : array (heads, head_dim), optional
        Added to all; float32.
    rotation : None or "hadamard"
        Whether codes are of features that :func:`cuattn.quantize` has rotated.
    like : dtype
        What :func:`cuattn.dequantize` returns by default; bfloat16 where it is not given.

    Attributes
    ----------
    data, scale, minimum, offset, rotation, dtype, like
        As given. `scale` and `minimum` have as many axes as the array.
    shape : tuple of int
        Of the values.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> codes = np.array([[[1, -2, 3, 4]]], np.int8)  # one token, one head
    >>> cuattn.QuantizedArray(codes, np.full((1, 1, 1), 0.5, np.float32), dtype="int8")
    QuantizedArray(shape=(1, 1, 4), dtype=int8, scale=(1, 1, 1) float32, 8 bytes)
    """

    __slots__ = (
        *("data", "dtype", "like", "minimum", "offset", "rotation", "scale", "shape", "xp"),
        "on_device",
    )

    data: Any
    scale: Any
    minimum: Any
    offset: Any
    rotation: str | None
    dtype: str
    like: np.dtype
    shape: tuple[int, ...]
    xp: ModuleType
    on_device: Any  # what cuattn.gpu.quantization.operand has made of it, for later calls

    def __init__(
        self,
        data: Any,
        scale: Any,
        *,
        dtype: str,
        minimum: Any = None,
        offset: Any = None,
        rotation: str | None = None,
        like: Any = BFLOAT16,
    ) -> None:
        name = "QuantizedArray"
        format = check_format(name, dtype)
        check_given(name, data=data, scale=scale)
        xp, (data, scale, minimum, offset) = as_arrays(
            name, data=data, scale=scale, minimum=minimum, offset=offset
        )
        if data.dtype != format.storage:
            raise TypeError(
                f"{name}: data has dtype {data.dtype}, must be {format.storage} for {dtype}"
            )
        if data.ndim < 2:
            raise ValueError(f"{name}: data has shape {data.shape}, must be (..., heads, head_dim)")
        shape = (*data.shape[:-1], data.shape[-1] * 8 // format.bits)
        if scale.dtype not in (BFLOAT16, FLOAT32):
            raise TypeError(f"{name}: scale has dtype {scale.dtype}, must be bfloat16 or float32")
        check_scale_shape(name, "scale", scale.shape, shape)
        if minimum is not None and (minimum.shape, minimum.dtype) != (scale.shape, scale.dtype):
            raise ValueError(
                f"{name}: minimum has shape {minimum.shape} and dtype {minimum.dtype}, must have "
                f"scale's {scale.shape} and {scale.dtype}"
            )
        if offset is not None and (offset.shape != shape[-2:] or offset.dtype != FLOAT32):
            raise ValueError(
                f"{name}: offset has shape {offset.shape} and dtype {offset.dtype}, must be "
                f"(heads, head_dim) = {shape[-2:]} and float32"
            )
        if rotation not in (None, "hadamard"):
            raise ValueError(f'{name}: rotation is {rotation!r}, must be None or "hadamard"')
        like = check_float_dtype(name, "like", like)
        missing = (None,) * (len(shape) - scale.ndim)
        fields = {
            "data": data,
            "scale": scale[missing] if missing else scale,
            "minimum": minimum[missing] if missing and minimum is not None else minimum,
            "offset": None if offset is None else xp.ascontiguousarray(offset),
            "rotation": rotation,
            "dtype": dtype,
            "like": like,
            "shape": shape,
            "xp": xp,
            "on_device": None,
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"QuantizedArray: {name} cannot be set; make a new array")

    __delattr__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"dtype": self.dtype, "rotation": self.rotation, "like": self.like}
        return _of_parts, (self.data, self.scale, self.minimum, self.offset, options)

    @property
    def ndim(self) -> int:
        """Axes of the values."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many values there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, minima and the offset."""
        parts = (self.data, self.scale, self.minimum, self.offset)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def group_size(self) -> int:
        """How many neighbouring features share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def has_scale_of_tokens(self) -> bool:
        """Whether each head of each token has scales of its own. An axis that was broadcast, and
        None as an index, have a stride of 0."""
        scale = self.scale
        axes = zip(scale.shape[:-1], self.shape[:-1], scale.strides[:-1], strict=True)
        return scale.strides[-3] != 0 and all(
            n == m and (stride or n <= 1) for n, m, stride in axes
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> QuantizedArray:
        """A part along the axes before heads, as of an array of that shape."""
        leading = self.shape[:-2]
        given = index if isinstance(index, tuple) else (index,)
        used = sum(1 for item in given if item is not None and item is not Ellipsis)
        if used > len(leading) or any(item is None or item is Ellipsis for item in given):
            raise IndexError(
                f"QuantizedArray: index {index!r} must be of the {len(leading)} axes before heads"
            )
        return self.of(self.data[index], *self.scales_at(index))

    def scales_at(self, index: Any) -> tuple[Any, Any]:
        """Scales, and minima where there are any, broadcast along the axes before heads, at an
        index of these."""
        before = self.shape[:-2]
        scale, minimum = (
            None if part is None else self.xp.broadcast_to(part, (*before, *part.shape[-2:]))[index]
            for part in (self.scale, self.minimum)
        )
        return scale, minimum

    def of(self, data: Any, scale: Any, minimum: Any) -> QuantizedArray:
        """The same kind of array with other codes and scales."""
        return QuantizedArray(
            data,
            scale,
            dtype=self.dtype,
            minimum=minimum,
            offset=self.offset,
            rotation=self.rotation,
            like=self.like,
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.xp is not np:
            raise TypeError(
                "QuantizedArray: it is on a GPU; cuattn.dequantize gives a CuPy array, whose get "
                "gives a NumPy array"
            )
        if copy is False:
            raise ValueError(
                "QuantizedArray: its values are computed, so that copy=False cannot be"
            )
        reference = importlib.import_module("cuattn.reference.quantization")  # of a layer above
        values = reference.dequantize(self, self.like)
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        more = "".join(
            f", {what}"
            for what, present in (
                ("minimum", self.minimum is not None),
                ("offset", self.offset is not None),
                (f"rotation={self.rotation}", self.rotation is not None),
            )
            if present
        )
        return (
            f"QuantizedArray(shape={self.shape}, dtype={self.dtype}, scale={self.scale.shape} "
            f"{self.scale.dtype}{more}, {self.nbytes} bytes)"
        )


def _of_parts(
    data: Any, scale: Any, minimum: Any, offset: Any, options: dict[str, Any]
) -> QuantizedArray:
    return QuantizedArray(data, scale, minimum=minimum, offset=offset, **options)


def codes_of(given: Any) -> Any:
    """What stands for a quantised argument where arrays are checked: its codes."""
    return given.data if isinstance(given, QuantizedArray) else given


def as_stored(given: Any, array: Any, dtype: np.dtype) -> tuple[Any, Any, str]:
    """Keys or values as they were given where they are quantised, else as the array that was made
    of them; with the dtype that they count as, which is then the queries' `dtype`, and the
    format."""
    if isinstance(given, QuantizedArray):
        return given, dtype, given.dtype
    return array, None if array is None else array.dtype, ""


def check_format(function: str, dtype: Any, name: str = "dtype") -> Format:
    """Check a format's name."""
    format = FORMATS.get(dtype) if isinstance(dtype, str) else None
    if format is None:
        names = ", ".join(f'"{known}"' for known in FORMATS)
        raise ValueError(f"{function}: {name} is {dtype!r}, must be one of {names}")
    return format


def check_scale_shape(
    function: str, name: str, scale: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Check that scales broadcast against values of `shape`, the last axis in equal groups."""
    fits = len(scale) <= len(shape) and all(
        n in (1, m) for n, m in zip(scale[-2::-1], shape[-2::-1], strict=False)
    )
    if not fits or (scale and (scale[-1] == 0 or shape[-1] % scale[-1])):
        raise ValueError(
            f"{function}: {name} has shape {scale}, which must broadcast against {shape}, or its "
            f"last axis must divide {shape[-1]}"
        )
