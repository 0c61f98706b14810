"""Projections of multi-head attention in NumPy."""

from __future__ import annotations

import numpy as np

from cuattn._arrays import acc_dtype


def project(x: np.ndarray, weights: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Multiply rows (tokens, features) by weights (features, columns) and add bias (columns,), in
    the accumulator's dtype; one rounding."""
    acc = acc_dtype(x.dtype)
    result = x.astype(acc, copy=False) @ weights.astype(acc, copy=False)
    if bias is not None:
        result += bias
    return result.astype(x.dtype, copy=False)
