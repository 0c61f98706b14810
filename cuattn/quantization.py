"""Codes of a few bits and their scales for keys and values: the public functions."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from cuattn._arrays import (
    FLOAT_DTYPES,
    as_arrays,
    check_bool,
    check_float_dtype,
    check_given,
    check_integer,
)
from cuattn._backend import backend
from cuattn._errors import explain_errors
from cuattn._quantized import (
    BFLOAT16,
    FLOAT32,
    QuantizedArray,
    check_format,
    check_scale_shape,
)

__all__ = ["QuantizedArray", "dequantize", "quantize"]

GRANULARITIES = ("tensor", "head", "token", "channel", "group")


@explain_errors
def quantize(
    x: Any,
    dtype: str,
    *,
    granularity: str = "token",
    group_size: int | None = None,
    symmetric: bool = True,
    offset: Any = None,
    rotate: bool = False,
    scale: Any = None,
) -> QuantizedArray:
    """Store keys or values as codes of 8 or 4 bits, with scales.

    Parameters
    ----------
    x : array (..., seqlen, heads, head_dim)
        float16, bfloat16, float32 or float64; NumPy or CuPy.
    dtype : str
        ``"int8"``, ``"int4"``, ``"float8_e4m3"`` or ``"float8_e5m2"``.
    granularity : str
        What shares a scale: ``"token"`` the features of a token and head; ``"group"`` so many
        neighbouring ones of them; ``"head"`` all tokens of a head, ``"channel"`` all tokens of one
        of its features; ``"tensor"`` everything.
    group_size : int, optional
        How many features a group has; must divide head_dim. For ``"group"`` it must be given, and
        for no other.
    symmetric : bool
        Whether codes are of both signs, and 0 is 0. False, for ``"int4"`` only: codes are 0 to 15
        above a minimum, which is stored beside each scale.
    offset : float32 array (heads, head_dim), optional
        Subtracted before, and added again by whoever reads the codes: what all keys of a head have
        in common, which would take up their range.
    rotate : bool
        Rotate features by a Hadamard matrix with fixed random signs [1]_, in blocks of the largest
        power of two that divides head_dim, which spreads outliers over all of them. Whoever reads
        the codes rotates back.
    scale : number or array, optional
        A scale that was found before, above 0, bfloat16 or float32: its shape, which broadcasts
        against x's, takes the place of `granularity`. Values beyond it saturate, and NaN becomes 0.
        With ``symmetric=False`` a pair (scale, minimum).

    Returns
    -------
    QuantizedArray
        With scales in bfloat16, as far as they are found here: ``max|x| / largest code`` rounded
        up, at least 2**-126, and 1 where all is 0 or there is nothing. An infinity or NaN makes the
        scale NaN, and all that shares it, and so does what is so large that the value of the
        largest code would overflow float32. A `scale` and an `offset` that are given become part
        of it without a copy: codes mean something else where they are changed later.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Notes
    -----
    All is computed in float32, and NumPy and the GPU give the same bits. An int8 value is off by
    half a scale at most, max|x| / 252; a float8_e4m3 one by 1/16 of itself, or by scale / 1024.

    References
    ----------
    .. [1] Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> k = np.random.default_rng(0).standard_normal((100, 2, 64), dtype=np.float32)
    >>> codes = cuattn.quantize(k, "int8")
    >>> codes.scale.shape, codes.nbytes / k.nbytes
    ((100, 2, 1), 0.2578125)
    >>> bool(np.abs(cuattn.dequantize(codes) - k).max() <= np.abs(k).max() / 252)
    True
    """
    name = "quantize"
    check_given(name, x=x)
    check_format(name, dtype)
    symmetric = check_bool(name, "symmetric", symmetric)
    rotate = check_bool(name, "rotate", rotate)
    minimum = None
    if scale is not None and not symmetric:
        if not isinstance(scale, tuple) or len(scale) != 2:
            raise TypeError(
                f"{name}: scale must be a pair (scale, minimum) with symmetric=False, got "
                f"{type(scale).__qualname__}"
            )
        scale, minimum = scale
    arrays: dict[str, Any] = {"x": x, "offset": offset}
    arrays |= {
        label: given
        for label, given in (("scale", scale), ("minimum", minimum))
        if not isinstance(given, numbers.Real) or isinstance(given, bool)
    }
    xp, checked = as_arrays(name, **arrays)
    arrays = dict(zip(arrays, checked, strict=True))
    x, offset = arrays["x"], arrays["offset"]
    scale, minimum = (
        arrays[label] if label in arrays else xp.full((), number, np.float32)
        for label, number in (("scale", scale), ("minimum", minimum))
    )
    shape = x.shape
    if x.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(FLOAT_DTYPES.values())
        raise TypeError(f"{name}: x has dtype {x.dtype}, must be one of {allowed}")
    if x.ndim < 2 or not shape[-1]:
        raise ValueError(
            f"{name}: x has shape {shape}, must be (..., heads, head_dim) with a head_dim of at "
            "least 1"
        )
    if dtype == "int4" and shape[-1] % 2:
        raise ValueError(
            f"{name}: x has head_dim {shape[-1]}, must be even for int4, which has two in a byte"
        )
    if not symmetric and dtype != "int4":
        raise ValueError(f'{name}: symmetric is False, which is for "int4"; dtype is "{dtype}"')
    if offset is not None and (offset.shape != shape[-2:] or offset.dtype != FLOAT32):
        raise ValueError(
            f"{name}: offset has shape {offset.shape} and dtype {offset.dtype}, must be (heads, "
            f"head_dim) = {shape[-2:]} and float32"
        )
    axes, group_size = _shared(name, granularity, group_size, x.ndim, shape[-1])
    for label, given in (("scale", scale), ("minimum", minimum)):
        if given is None:
            continue
        if given.dtype not in (BFLOAT16, FLOAT32) or (
            label == "minimum" and given.dtype != scale.dtype
        ):
            raise TypeError(
                f"{name}: {label} has dtype {given.dtype}, must be bfloat16 or float32, scale and "
                "minimum the same"
            )
        check_scale_shape(name, label, given.shape, shape)
    if isinstance(scale, np.ndarray) and (scale <= 0).any():
        raise ValueError(f"{name}: scale has {scale.min()}, must be above 0")
    if scale is not None:
        missing = (None,) * (x.ndim - scale.ndim)
        scale = scale[missing]
        minimum = None if minimum is None else xp.broadcast_to(minimum, scale.shape)
    codes = backend(xp, "quantization").quantize(
        x,
        dtype,
        axes,
        group_size,
        symmetric=symmetric,
        offset=offset,
        rotate=rotate,
        scale=scale,
        minimum=minimum,
    )
    return QuantizedArray(
        codes.data,
        codes.scale,
        dtype=dtype,
        minimum=codes.minimum,
        offset=offset,
        rotation="hadamard" if rotate else None,
        like=x.dtype,
    )


@explain_errors
def dequantize(qx: QuantizedArray, dtype: Any = None) -> Any:
    """The values of codes.

    Parameters
    ----------
    qx : QuantizedArray
        As :func:`quantize` makes it.
    dtype : dtype, optional
        float16, bfloat16, float32 or float64, to which the float32 values are rounded; default
        ``qx.like``, which is what was quantised.

    Returns
    -------
    array of qx's shape
        NumPy or CuPy, as the codes are.

    Raises
    ------
    TypeError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> codes = cuattn.quantize(np.array([[0.5, -1.0]], np.float32), "float8_e4m3")
    >>> cuattn.dequantize(codes)
    array([[ 0.5024414, -1.0048828]], dtype=float32)
    """
    name = "dequantize"
    if not isinstance(qx, QuantizedArray):
        raise TypeError(f"{name}: qx must be a QuantizedArray, got {type(qx).__qualname__}")
    dtype = qx.like if dtype is None else check_float_dtype(name, "dtype", dtype)
    return backend(qx.xp, "quantization").dequantize(qx, dtype)


def _shared(
    function: str, granularity: str, group_size: int | None, ndim: int, head_dim: int
) -> tuple[tuple[int, ...], int]:
    """Which axes share a scale, and how many neighbouring features."""
    if not isinstance(granularity, str) or granularity not in GRANULARITIES:
        names = ", ".join(f'"{known}"' for known in GRANULARITIES)
        raise ValueError(f"{function}: granularity is {granularity!r}, must be one of {names}")
    if (group_size is not None) != (granularity == "group"):
        raise ValueError(
            f'{function}: group_size is {group_size}, must be given for granularity="group", and '
            "for no other"
        )
    if group_size is not None:
        size = check_integer(function, "group_size", group_size)
        if size < 1 or head_dim % size:
            raise ValueError(
                f"{function}: group_size is {size}, must divide x's head_dim {head_dim}"
            )
        return (), size
    before = tuple(range(ndim - 2))
    if granularity == "channel":
        return before, 1
    axes = {"token": (), "head": before, "tensor": (*before, ndim - 2)}[granularity]
    return axes, head_dim
