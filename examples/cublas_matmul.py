"""Products of matrices by cuBLAS that may be captured in a CUDA graph.

CuPy makes the same calls, but refuses to have them captured. The library and its handle are those
that CuPy has loaded. A module of train_chars.py and generate.py, which use it on a GPU.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit(
        f"{__doc__}\nRun train_chars.py or generate.py instead; --help lists its options."
    )

import ctypes

import cupy
from cupy.cuda import cublas, device

_LIBRARY = ctypes.CDLL(cublas.__file__)  # an extension that is linked with cuBLAS
_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)


def matmul(a: cupy.ndarray, b: cupy.ndarray, *, add_to: cupy.ndarray | None = None) -> cupy.ndarray:
    """``a @ b`` of two matrices of one dtype, summed in float32. Each is contiguous, or the
    transpose of a contiguous one. It is added to `add_to`, a contiguous matrix, where one is given.

    Raises
    ------
    RuntimeError
        cuBLAS refuses the call.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    out = cupy.empty((rows, columns), a.dtype) if add_to is None else add_to
    beta = _ZERO if add_to is None else _ONE
    kind = _DATA_TYPES[a.dtype.name]
    handle = ctypes.c_void_p(device.get_cublas_handle())
    stream = ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)
    status = _LIBRARY.cublasSetStream_v2(handle, stream) or _LIBRARY.cublasGemmEx(
        # cuBLAS counts along columns first: its matrices are the transposes of ours.
        handle, not b.flags.c_contiguous, not a.flags.c_contiguous, columns, rows, inner,
        ctypes.byref(_ONE), *_operand(b, kind), *_operand(a, kind),
        ctypes.byref(beta), *_operand(out, kind), _COMPUTE_32F, _DEFAULT_ALGORITHM,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cublasGemmEx of {a.shape} and {b.shape} {a.dtype}: status {status}")
    return out


def _operand(x: cupy.ndarray, kind: int) -> tuple[ctypes.c_void_p, int, int]:
    """Address, type, and elements from a row, or column, to the next."""
    return ctypes.c_void_p(x.data.ptr), kind, x.shape[1 if x.flags.c_contiguous else 0]
