"""Device memory of a call, and the device it is on.

Results come from CuPy's allocator. What a call needs beside them (scratch of kernels, copies of
arrays that a kernel cannot read as they are) is in use until the call's last kernel has run, and
where it comes from depends on the current stream:

- as a rule from CuPy's allocator too, which gives it to the next call on that stream;
- while a CUDA graph is captured, from the graph. CuPy's pool would give it away before the graph
  has run once, and every replay would write into what is somebody else's by then. Allocation and
  release become nodes of the graph: each replay has the memory at the same address while it runs,
  as long as there is the graph, and nobody has to keep anything alive but the call's arguments and
  results. Copies are nodes as well: a replay copies what the arrays then hold.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import cupy
import numpy as np

from cuattn._arrays import is_contiguous_last_axis

_AS_IT_IS = contextlib.nullcontext()
_saturate = cupy.ElementwiseKernel(
    "T x",
    "int32 y",
    "y = x > T(2147483647) ? 2147483647"
    " : static_cast<long long>(x) < -2147483648ll ? -2147483647 - 1 : static_cast<int>(x)",
    "cuattn_saturate",
)


def pointer(array: cupy.ndarray | None) -> int:
    """Address of an array's first element; 0 for None."""
    return 0 if array is None else array.data.ptr


def use_device(array: cupy.ndarray) -> contextlib.AbstractContextManager:
    """A context in which an array's device is the current one."""
    current = cupy.cuda.runtime.getDevice()
    return _AS_IT_IS if array.data.device_id == current else array.device


def capturing() -> bool:
    """Whether a graph is being captured from the current stream."""
    return cupy.cuda.get_current_stream().is_capturing()


def scratch(nbytes: int) -> cupy.cuda.MemoryPointer:
    """Memory for the duration of a call, or a graph's own."""
    return cupy.cuda.malloc_async(nbytes) if capturing() else cupy.cuda.alloc(nbytes)


def scratch_array(shape: tuple[int, ...], dtype: np.dtype) -> cupy.ndarray:
    """An array, not initialised, in :func:`scratch`."""
    return cupy.ndarray(shape, dtype, scratch(math.prod(shape) * dtype.itemsize))


def temporaries() -> contextlib.AbstractContextManager:
    """A context in which all that CuPy allocates is :func:`scratch`: for its own functions, whose
    results must be released within the call."""
    return cupy.cuda.using_allocator(cupy.cuda.malloc_async) if capturing() else _AS_IT_IS


def contiguous(array: Any, dtype: Any = None) -> Any:
    """Copy an array, as one of `dtype`, into :func:`scratch`; where it is that already, or None,
    return it."""
    if array is None or ((dtype is None or array.dtype == dtype) and array.flags.c_contiguous):
        return array
    with use_device(array), temporaries():
        return cupy.ascontiguousarray(array, dtype)


def contiguous_last_axis(array: cupy.ndarray) -> cupy.ndarray:
    """Return an array, or a copy in :func:`scratch` where its last axis is not contiguous."""
    return array if is_contiguous_last_axis(array) else contiguous(array)


def reshaped(array: cupy.ndarray, shape: tuple[int, ...]) -> cupy.ndarray:
    """View an array in another shape; where no view has it, copy it into :func:`scratch`."""
    if array.flags.c_contiguous:
        return array.reshape(shape)
    with use_device(array), temporaries():
        return array.reshape(shape)


def both(a: cupy.ndarray, b: cupy.ndarray) -> cupy.ndarray:
    """``a & b``, in :func:`scratch`."""
    with use_device(a), temporaries():
        return a & b


def contiguous_int32(array: Any) -> Any:
    """Integers as contiguous int32: `array` itself, or a copy as of :func:`contiguous` in which
    integers that do not fit are the nearest that do."""
    if array.dtype.itemsize < 4 or array.dtype == np.int32:
        return contiguous(array, np.int32)
    with use_device(array):
        return _saturate(array, scratch_array(array.shape, np.dtype(np.int32)))


@functools.lru_cache(maxsize=4096)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Where the bytes of an array begin and end, from its address; the same where it has none."""
    if 0 in shape:
        return 0, 0
    ends = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    return sum(n for n in ends if n < 0), sum(n for n in ends if n > 0) + itemsize


def overlapping(out: cupy.ndarray, array: cupy.ndarray) -> tuple[int, int]:
    """Two distances from the address of `out` to that of another array: between them, and at
    neither, there may be a byte of the one among those of the other."""
    begin, end = _extent(out.shape, out.strides, out.itemsize)
    first, last = _extent(array.shape, array.strides, array.itemsize)
    return (begin - last, end - first) if begin < end and first < last else (0, 0)


def overlaps(out: cupy.ndarray, *arrays: cupy.ndarray | None) -> bool:
    """Whether between the first and the last byte of `out` there may be one of another array."""
    place = out.data.ptr
    for array in arrays:
        if array is not None:
            least, most = overlapping(out, array)
            if least < array.data.ptr - place < most:
                return True
    return False


def apart(array: cupy.ndarray, *others: cupy.ndarray | None) -> cupy.ndarray:
    """An array, or a copy of it where it may have a byte of another one."""
    if not overlaps(array, *others):
        return array
    with use_device(array), temporaries():
        return array.copy()


def target(
    out: cupy.ndarray | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    inputs: tuple[cupy.ndarray | None, ...],
) -> cupy.ndarray:
    """Where a kernel writes a result: `out`, or a new array. It is a copy of `out` (what the kernel
    does not write stays as it is) where the last axis of that is not contiguous, or where it
    overlaps one of the inputs, which some thread blocks read after others have written."""
    if out is None:
        return cupy.empty(shape, dtype)
    return contiguous_last_axis(apart(out, *inputs))


def copy_to_out(target: cupy.ndarray, out: cupy.ndarray | None) -> cupy.ndarray:
    """The result of a call, in `out` if one was given."""
    if out is None or target is out:
        return target
    out[...] = target
    return out
