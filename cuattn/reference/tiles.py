"""What attention and its gradients in NumPy are built from: scores of a tile of queries against a
tile of keys, products of stacks of matrices, threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from cuattn._spec import AttentionSpec

# A query tile meets this many keys at a time, with up to TILE_SCORES scores (256 rows of them, or
# more where there are fewer keys). They are the largest array at work: 512 KiB in float32, which a
# core's own cache holds.
TILE_KEYS = 512
TILE_SCORES = 256 * TILE_KEYS
# A call with fewer multiplications than this, some 0.3 ms, is not worth a second thread.
SERIAL_PRODUCTS = 2**24


class ScoreTerms(NamedTuple):
    """What decides the scores of one sequence beside its queries and keys."""

    seqlen_q: int
    seqlen_k: int
    bias: np.ndarray | None  # (heads_q, seqlen_q, seqlen_k), or more of them
    mask: np.ndarray | None  # likewise
    alibi_slopes: np.ndarray | None  # (heads_q, 1, 1)

    @property
    def diagonal(self) -> int:
        """The key beside query 0; the last query is beside the last key."""
        return self.seqlen_k - self.seqlen_q


def score_terms(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],
    bias: np.ndarray | None,
    mask: np.ndarray | None,
    alibi_slopes: np.ndarray | None,
) -> list[ScoreTerms]:
    """The terms of every sequence of a call, from its arrays and the lengths (seqlen_q, seqlen_k)
    of its sequences."""

    def of_scores(array: np.ndarray | None) -> np.ndarray | None:
        """(batch, heads_q, queries, keys), without what is beyond the longest sequences."""
        if array is None:
            return None
        queries, keys = map(max, zip(*lengths, strict=True)) if lengths else (0, 0)
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)[:, :, :queries, :keys]
        return np.broadcast_to(array, (spec.batch, spec.heads_q, queries, keys))

    bias, mask = of_scores(bias), of_scores(mask)
    if alibi_slopes is not None:
        slopes = np.broadcast_to(alibi_slopes, (spec.batch, spec.heads_q))
        alibi_slopes = slopes.astype(spec.acc_dtype)[:, :, None, None]
    arrays = bias, mask, alibi_slopes
    return [
        ScoreTerms(*lengths[b], *(None if array is None else array[b] for array in arrays))
        for b in range(spec.batch)
    ]


def size_of(part: slice) -> int:
    """How many indices a slice has."""
    return part.stop - part.start


def visible_keys(terms: ScoreTerms, rows: slice, spec: AttentionSpec) -> slice:
    """The keys that the window leaves to some of these rows."""
    start, stop = 0, terms.seqlen_k
    if spec.window_left is not None:
        start = max(start, rows.start + terms.diagonal - spec.window_left)
    if spec.window_right is not None:
        stop = min(stop, rows.stop + terms.diagonal + spec.window_right)
    start = min(start, terms.seqlen_k)
    return slice(start, max(start, stop))


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_for(products: int) -> int:
    """How many threads so many multiplications are worth: one, or as many as there are cores."""
    return cores() if products > SERIAL_PRODUCTS else 1


def run(work: Callable[[], None], threads: int) -> None:
    """Let threads `work`, each until nothing is left to do."""
    if threads <= 1:
        work()
        return
    with ThreadPoolExecutor(threads) as pool:
        for worker in [pool.submit(work) for _ in range(threads)]:
            worker.result()


def cap_scores(s: np.ndarray, softcap: float) -> None:
    """``softcap * tanh(s / softcap)``, in place."""
    s /= softcap
    np.tanh(s, out=s)
    s *= softcap


def modify_scores(
    s: np.ndarray, terms: ScoreTerms, heads: slice, rows: slice, keys: slice, spec: AttentionSpec
) -> None:
    """Add bias and ALiBi to the scores of a tile, (heads, rows, keys), and put -inf where a mask
    removes one, in place."""
    if terms.bias is not None:
        s += terms.bias[heads, rows, keys]
    if terms.alibi_slopes is not None:
        s -= terms.alibi_slopes[heads] * alibi_distance(terms, rows, keys, s.dtype)
    for columns, seen in _cuts(terms, rows, keys, spec):
        np.copyto(s[:, :, columns], -np.inf, where=~seen)
    if terms.mask is not None:
        np.copyto(s, -np.inf, where=~terms.mask[heads, rows, keys])


def mask_weights(
    s: np.ndarray, terms: ScoreTerms, heads: slice, rows: slice, keys: slice, spec: AttentionSpec
) -> None:
    """Put 0 where a mask removes one of a tile's exponentials, (heads, rows, keys), in place; all
    are finite. That is some times faster than to put -inf into scores."""
    for columns, seen in _cuts(terms, rows, keys, spec):
        s[:, :, columns] *= seen.astype(s.dtype)
    if terms.mask is not None:
        s *= terms.mask[heads, rows, keys]


def _cuts(
    terms: ScoreTerms, rows: slice, keys: slice, spec: AttentionSpec
) -> Iterator[tuple[slice, np.ndarray]]:
    """The keys of a tile that the window hides from some row, and which it leaves to which row:
    bool (rows, keys)."""
    if spec.window_left is not None:
        first_seen_by_all = rows.stop - 1 + terms.diagonal - spec.window_left
        cut = size_of(slice(keys.start, min(keys.stop, first_seen_by_all)))
        if cut > 0:
            hidden = rows.start + terms.diagonal - keys.start - spec.window_left - 1
            yield slice(0, cut), ~np.tri(size_of(rows), cut, hidden, dtype=bool)
    if spec.window_right is not None:
        last_seen_by_all = rows.start + terms.diagonal + spec.window_right
        start = max(keys.start, last_seen_by_all + 1)
        if start < keys.stop:
            seen = last_seen_by_all - start
            columns = slice(start - keys.start, size_of(keys))
            yield columns, np.tri(size_of(rows), keys.stop - start, seen, dtype=bool)


def alibi_distance(terms: ScoreTerms, rows: slice, keys: slice, dtype: np.dtype) -> np.ndarray:
    """How far each key lies from the one beside each row, whichever way: (rows, keys)."""
    beside = np.arange(rows.start + terms.diagonal, rows.stop + terms.diagonal, dtype=np.int32)
    return abs(np.arange(keys.start, keys.stop, dtype=np.int32) - beside[:, None]).astype(dtype)
