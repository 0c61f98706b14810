"""Projections of multi-head attention on a GPU, by cuBLAS."""

from __future__ import annotations

import cupy

__all__ = ["project"]


def project(x: cupy.ndarray, weights: cupy.ndarray, bias: cupy.ndarray | None) -> cupy.ndarray:
    """As :func:`cuattn.reference.multihead.project`, save that the product is rounded before the
    bias is added."""
    result = x @ weights  # of two axes: CuPy 14 has no batches of bfloat16 matrices
    if bias is not None:
        result += bias
    return result
