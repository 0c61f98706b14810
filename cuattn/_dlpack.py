"""DLPack of dtypes that NumPy's and CuPy's importers refuse: bfloat16 and the 8-bit floats."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

#: By DLDataTypeCode and bits, as of dlpack.h 1.1.
DTYPES = {
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (7, 8): np.dtype(ml_dtypes.float8_e3m4),
    (8, 8): np.dtype(ml_dtypes.float8_e4m3),
    (9, 8): np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (11, 8): np.dtype(ml_dtypes.float8_e4m3fnuz),
    (12, 8): np.dtype(ml_dtypes.float8_e5m2),
    (13, 8): np.dtype(ml_dtypes.float8_e5m2fnuz),
    (14, 8): np.dtype(ml_dtypes.float8_e8m0fnu),
}
_UINT = 1  # kDLUInt
#: Where the dtype is in what a capsule points to: in DLManagedTensor, whose DLTensor comes first,
#: and in DLManagedTensorVersioned, whose DLTensor begins at byte 32.
_DTYPE_OFFSETS = {b"dltensor": 20, b"dltensor_versioned": 52}


class Integers:
    """An array whose elements are exported as unsigned integers of the same size.

    Each export has a description of its own, in which the dtype is changed; importers own the
    capsule, so that memory lives and dies as DLPack has it.

    Attributes
    ----------
    dtype : numpy.dtype or None
        Of the elements as they were when last exported; None for one that needs no such help.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype: np.dtype | None = None

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        name = _capsule_name(capsule)
        described = _capsule_pointer(capsule, name) + _DTYPE_OFFSETS[name]
        code, bits = (ctypes.c_uint8 * 2).from_address(described)
        self.dtype = DTYPES.get((code, bits))
        if self.dtype is not None:
            ctypes.c_uint8.from_address(described).value = _UINT
        return capsule


def import_array(xp: Any, array: Any) -> Any:
    """Give an array of another library as one of `xp`, NumPy or CuPy, without a copy.

    Raises
    ------
    Exception
        Whatever either library says of an array that cannot be given.
    """
    try:
        return xp.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError):
        integers = Integers(array)
        imported = xp.from_dlpack(integers)
        return imported if integers.dtype is None else imported.view(integers.dtype)


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
