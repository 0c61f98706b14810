"""Merging partial results of attention, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def merge(
    outs: Sequence[np.ndarray], lses: Sequence[np.ndarray], lse_axes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Merge partial results that :mod:`cuattn.decoding` has checked.

    Parameters
    ----------
    outs, lses
        Partial results over disjoint keys, and the log of each one's denominator.
    lse_axes
        The order of an lse's axes that brings it to the rows of an out: ``lse.transpose(lse_axes)``
        has shape ``out.shape[:-1]``.
    """
    stacked = np.stack(lses)
    acc = np.zeros(outs[0].shape, stacked.dtype)
    # Rows of no sequence may hold anything: no warnings of what comes of it.
    with np.errstate(all="ignore"):
        peak = np.max(stacked, axis=0)
        shift = np.where(peak == -np.inf, 0, peak)
        weights = np.exp(stacked - shift)
        total = weights.sum(axis=0)
        weights /= np.where(total == 0, 1, total)
        for out, weight in zip(outs, weights, strict=True):
            weight = weight.transpose(lse_axes)[..., None]
            acc += np.where(weight == 0, 0, weight * out.astype(acc.dtype))
        lse = np.log(total) + shift
        return acc.astype(outs[0].dtype), lse
