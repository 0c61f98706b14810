"""Checks of array arguments: which device they are on, their shapes and dtypes, and the messages of
every error about them.

Checks read only metadata, so they cost no device work and no synchronisation.
"""

from __future__ import annotations

import numbers
import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cuattn._dlpack import import_array

#: The dtypes attention computes in.
FLOAT_DTYPES = {
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.float32): "float32",
    np.dtype(np.float64): "float64",
}
#: The dtypes that lengths and page tables may have.
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
#: What to do with objects of ours that are no arrays, by the names of their types.
_OWN = {
    "QuantizedArray": "; flash_decode and paged_attention take it as keys or values, and "
    "dequantize makes an array of it",
    "PagedKVCache": "; its arrays are pages(layer)",
}


def acc_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of accumulators, softmax and lse."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_given(function: str, **arrays: Any) -> None:
    """Check that arguments which are not optional are not None."""
    for name, array in arrays.items():
        if array is None:
            raise TypeError(f"{function}: {name} must be a NumPy or CuPy array, got None")


def as_arrays(function: str, **named: Any) -> tuple[ModuleType, list[Any]]:
    """Bring arguments to arrays of one library, on one device.

    Parameters
    ----------
    function : str
        The public function, for error messages.
    **named
        Arguments by name. ``None`` stays ``None``. NumPy and CuPy arrays are taken as they are;
        objects with ``__cuda_array_interface__`` or ``__dlpack__`` are wrapped without a copy.

    Returns
    -------
    xp : module
        ``numpy`` or ``cupy``.
    arrays : list
        The arguments in order, as arrays of ``xp``.

    Raises
    ------
    TypeError
        An argument is not an array.
    ValueError
        Arguments are on different devices.
    """
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        ndarray = cupy.ndarray
        device = None
        for array in named.values():
            if array is None:
                continue
            if type(array) is not ndarray:
                break
            if device is None:
                device = array.data.device_id
            elif array.data.device_id != device:
                break
        else:
            if device is not None:
                return cupy, list(named.values())

    if {type(array) for array in named.values()} <= {np.ndarray, type(None)}:
        return np, list(named.values())

    arrays = {name: _as_array(function, name, array) for name, array in named.items()}
    devices = {
        name: "CPU" if isinstance(array, np.ndarray) else f"GPU {array.device.id}"
        for name, array in arrays.items()
        if array is not None
    }
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        hint = "; cupy.asarray takes one to the GPU" if "CPU" in devices.values() else ""
        raise ValueError(f"{function}: all arrays must be on one device, got {where}{hint}")
    xp = np if set(devices.values()) == {"CPU"} else sys.modules["cupy"]
    return xp, list(arrays.values())


def _as_array(function: str, name: str, array: Any) -> Any:
    check_unmasked(function, name, array)
    if isinstance(array, getattr(np, "matrix", ())):  # its operators and parts mean something else
        return np.asarray(array)
    if array is None or isinstance(array, np.ndarray):
        return array
    loaded: Any = sys.modules.get("cupy")
    if loaded is not None and isinstance(array, loaded.ndarray):
        return array
    _check_concrete(function, name, array)
    if _has_cuda_array_interface(array):
        import cupy

        # What has no name there is void, such as bfloat16; DLPack names it.
        kind = array.__cuda_array_interface__["typestr"][1]
        if kind != "V" or not hasattr(array, "__dlpack__"):
            return cupy.asarray(array)
    if hasattr(array, "__dlpack__"):
        try:
            xp: Any = np
            if array.__dlpack_device__()[0] in (2, 13):  # kDLCUDA, kDLCUDAManaged
                import cupy as xp
            return import_array(xp, array)
        except Exception as error:
            dtype = f" of dtype {array.dtype}" if hasattr(array, "dtype") else ""
            raise TypeError(
                f"{function}: {name} is a {type(array).__module__}.{type(array).__qualname__}"
                f"{dtype}, which {xp.__name__} cannot take through DLPack ({error}); pass a NumPy "
                "or CuPy array"
            ) from error
    kind = type(array).__qualname__
    if isinstance(array, (list, tuple)):
        kind += "; numpy.asarray or cupy.asarray makes an array of it"
    elif type(array).__module__ != "builtins":
        kind = f"{type(array).__module__}.{kind}{_OWN.get(kind, '')}"
    raise TypeError(
        f"{function}: {name} must be a NumPy or CuPy array (or have __cuda_array_interface__ or "
        f"__dlpack__), got {kind}"
    )


def _check_concrete(function: str, name: str, array: Any) -> None:
    """Check that an array of torch's or JAX's is not part of a computation that they record."""
    if getattr(array, "requires_grad", False) is True:
        raise TypeError(
            f"{function}: {name} requires a gradient, and torch's do not flow through cuattn; pass "
            f"{name}.detach()"
        )
    if any(
        base.__name__ == "Tracer" and base.__module__.partition(".")[0] == "jax"
        for base in type(array).__mro__
    ):
        raise TypeError(
            f"{function}: {name} is traced by JAX (jit, grad, vmap or scan) and has no values yet; "
            "call cuattn through jax.pure_callback"
        )


def _has_cuda_array_interface(array: Any) -> bool:
    try:
        return hasattr(array, "__cuda_array_interface__")
    except RuntimeError:  # torch's way to say that a tensor requires a gradient
        return False


def on_gpu(given: Any) -> Any:
    """An array that is on a GPU, as CuPy's; None if it is not on one, or no array."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(given, cupy.ndarray):
        return given
    if _has_cuda_array_interface(given):
        return _as_array("", "", given)
    return None


def is_contiguous_last_axis(array: Any, dtype: Any = None) -> bool:
    """Whether a kernel can read the last axis of `array` as it is: its elements are neighbours,
    and of `dtype` if one is given."""
    return (array.strides[-1] == array.itemsize or array.shape[-1] <= 1) and (
        dtype is None or array.dtype == dtype
    )


def check_index_dtype(function: str, name: str, array: Any) -> None:
    """Check that an array of lengths or of pages has integers that kernels can be given."""
    if array.dtype not in INDEX_DTYPES:
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, must be int32 or int64")


def check_bool(function: str, name: str, value: Any) -> bool:
    """Check that a flag is True or False: any other value, such as the string "no", has a truth
    that is easily not the one that is meant."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{function}: {name} must be True or False, got {value!r}")


def check_integer(function: str, name: str, value: Any) -> int:
    """Check that a number is an integer, and neither a boolean nor a float."""
    if type(value) is int:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise TypeError(f"{function}: {name} must be an integer, got {value!r}")


def check_float_dtype(function: str, name: str, dtype: Any) -> np.dtype:
    """Check that `dtype` is one that attention computes in, and return it as NumPy's."""
    try:
        given = None if dtype is None else np.dtype(dtype)  # which takes None for float64
    except TypeError:
        given = None
    if given is None or given not in FLOAT_DTYPES:
        allowed = ", ".join(FLOAT_DTYPES.values())
        shown = dtype if given is None else given
        raise TypeError(f"{function}: {name} is {shown}, must be one of {allowed}")
    return given


def check_unmasked(function: str, name: str, array: Any) -> None:
    """Check that an argument is no masked array, whose mask would be lost."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{function}: {name} is a masked array, whose mask would be ignored; pass "
            f"{name}.filled(value), and say with the function's own arguments what is to be left "
            "out"
        )


def check_out(function: str, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Check that a result of `shape` and `dtype` can be written to `out`."""
    if out.shape != shape:
        raise ValueError(f"{function}: out has shape {out.shape}, must be {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{function}: out has dtype {out.dtype}, must be {dtype}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"{function}: out is read-only, must be writable")
