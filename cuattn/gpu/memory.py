"""Device memory of a launch: addresses of arrays, and scratch."""

from __future__ import annotations

import cupy


def pointer(array: cupy.ndarray | None) -> int:
    """Address of an array's first element; 0 for None."""
    return 0 if array is None else array.data.ptr


def scratch(nbytes: int) -> cupy.cuda.MemoryPointer:
    """Memory for one launch, in stream order.

    While a graph is captured it is the graph's own: CuPy's pool would give it away again before the
    graph runs.
    """
    if cupy.cuda.get_current_stream().is_capturing():
        return cupy.cuda.malloc_async(nbytes)
    return cupy.cuda.alloc(nbytes)
