"""What decoding means, in NumPy: each sequence's keys are brought together, and attended to as by
flash_attention.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.reference.attention import forward


def decode(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spec: AttentionSpec,
    *,
    seq_lens: np.ndarray,
    page_table: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    prefix: int | tuple[np.ndarray, np.ndarray] | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    num_splits: int | str | None = None,
    out: np.ndarray | None = None,
    return_lse: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Attention of a few queries a sequence over a cache, of arrays that :mod:`cuattn.decoding` has
    checked.

    Parameters
    ----------
    q : numpy.ndarray
        (batch, seqlen_q, heads_q, head_dim), or (total, heads_q, head_dim) with `cu_seqlens_q`.
    k, v : numpy.ndarray
        Caches (batch, capacity, heads_kv, head_dim), or pages (num_pages, page_size, heads_kv,
        head_dim) with `page_table`.
    spec : AttentionSpec
        The call, with the capacity as ``seqlen_k``.
    prefix
        An integer promises what `page_table` says anyway; (k, v) are keys before each sequence's
        own.
    num_splits
        How a GPU shares the work out; it means nothing here.
    seq_lens, page_table, cu_seqlens_q, alibi_slopes, sinks, out, return_lse
        As in :func:`cuattn.paged_attention`.
    """
    result = np.empty(spec.out_shape, spec.dtype) if out is None else out
    lse = np.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None
    slopes = alibi_slopes
    room = None
    for b in range(spec.batch):
        length = min(max(int(seq_lens[b]), 0), spec.seqlen_k)
        if page_table is None:
            keys, values = k[b, :length], v[b, :length]
        else:
            pages = page_table[b, : -(-length // k.shape[1])]
            if (pages[1:] == pages[:-1] + 1).all():  # they need not be copied together
                first = pages[0] if length else 0
                parts = [array[first : first + pages.size] for array in (k, v)]
            else:
                if room is None:
                    longest = min(int(seq_lens.max()), spec.seqlen_k)
                    room = _room(k, v, -(-longest // k.shape[1]))
                parts = [part[: pages.size] for part in room]
                for part, array in zip(parts, (k, v), strict=True):
                    np.take(array, pages, axis=0, out=part, mode="clip")  # "raise" copies twice
            keys, values = (part.reshape(-1, *part.shape[2:])[:length] for part in parts)
        if isinstance(prefix, tuple):
            keys, values = (
                np.concatenate(pair) for pair in zip(prefix, (keys, values), strict=True)
            )
        if cu_seqlens_q is None:
            queries, rows = (b, slice(None)), (b, slice(None), slice(None))
        else:
            tokens = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
            queries, rows = (tokens,), (slice(None), tokens)
        if alibi_slopes is not None and alibi_slopes.ndim == 2:
            slopes = alibi_slopes[b]
        target = result[queries]
        _, sequence_lse = forward(
            q[queries][None],
            keys[None],
            values[None],
            _of_one(spec, len(target), len(keys)),
            alibi_slopes=slopes,
            sinks=sinks,
            out=target[None],
            return_lse=return_lse,
        )
        if lse is not None:
            lse[rows] = sequence_lse[0]
    return result, lse


@functools.lru_cache(maxsize=4096)
def _of_one(spec: AttentionSpec, seqlen_q: int, seqlen_k: int) -> AttentionSpec:
    """The call of one sequence."""
    return dataclasses.replace(
        spec,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        rows="batched",
        keys="batched",
        page_size=0,
    )


def _room(k: np.ndarray, v: np.ndarray, count: int) -> list[np.ndarray]:
    """Room for copies of so many pages of keys and of values.

    It is one array, for all sequences: of two, malloc gives the memory back to the system each
    time, and to get it again takes longer than to fill it.
    """
    sizes = [count * array[0].size for array in (k, v)]
    room = np.empty(sum(sizes), k.dtype)
    parts = room[: sizes[0]], room[sizes[0] :]
    return [part.reshape(count, *a.shape[1:]) for part, a in zip(parts, (k, v), strict=True)]


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
    peak = np.max(stacked, axis=0)
    shift = np.where(peak == -np.inf, 0, peak)
    weights = np.exp(stacked - shift)
    total = weights.sum(axis=0)
    weights /= np.where(total == 0, 1, total)
    acc = np.zeros(outs[0].shape, stacked.dtype)
    for out, weight in zip(outs, weights, strict=True):
        weight = weight.transpose(lse_axes)[..., None]
        acc += np.where(weight == 0, 0, weight * out.astype(acc.dtype))
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    return acc.astype(outs[0].dtype), lse
