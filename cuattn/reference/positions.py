"""RoPE in NumPy: rotations of pairs of features by a token's position."""

from __future__ import annotations

import numpy as np

from cuattn._arrays import acc_dtype


def rope(
    x: np.ndarray,
    positions: np.ndarray,
    turns: tuple[int, ...],
    scale: float,
    interleaved: bool,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Rotate features by positions.

    Parameters
    ----------
    x : numpy.ndarray (batch, seqlen, heads, head_dim)
    positions : integers (batch, seqlen)
    turns : tuple of int
        Of each pair: the part of a full turn that a position adds, in units of 2**-64. Products
        with positions wrap around as angles do, so that angles are exact at any position.
    scale : float
        Multiplies sines and cosines.
    interleaved, out
        As in :func:`cuattn.rope`.
    """
    steps = positions.astype(np.int64).view(np.uint64)[..., None] * np.array(turns, np.uint64)
    angles = steps.view(np.int64) * (np.pi * 2.0**-63)  # from -pi to pi
    acc = acc_dtype(x.dtype)
    cos, sin = ((scale * of(angles))[..., None, :].astype(acc) for of in (np.cos, np.sin))
    result = rotate(x, cos, sin, interleaved)
    if out is None:
        return result
    out[...] = result
    return out


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate pairs of x's first ``2 * cos.shape[-1]`` features (Su et al., 2021), the halves' or
    neighbours.
    """
    half = cos.shape[-1]
    acc = acc_dtype(x.dtype)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first].astype(acc), x[..., second].astype(acc)
    out = x.copy()
    out[..., first] = (a * cos - b * sin).astype(x.dtype)
    out[..., second] = (b * cos + a * sin).astype(x.dtype)
    return out
