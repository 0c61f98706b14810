"""What attention and its gradients in NumPy are built from: scores of a tile of queries against a
tile of keys, products of stacks of matrices, threads."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from cuattn._spec import AttentionSpec

# A query tile meets this many keys at a time, with up to TILE_SCORES scores (256 rows of them, or
# more where there are fewer keys). They are the largest array at work: 512 KiB in float32, which a
# core's own cache holds.
TILE_KEYS = 512
TILE_SCORES = 256 * TILE_KEYS
# OpenBLAS multiplies on the calling thread where rows * columns * inner <= 2**18, and otherwise
# wakes threads of its own, for which the workers here would wait in turn. So products are done in
# blocks of that size: 2.5 times faster than large ones at (1, 2048, 8, 64) on two cores, and 1.4
# times faster than one worker with OpenBLAS's threads.
BLOCK_PRODUCT = 2**18
BLOCK_ROWS = 8  # fewer rows a block are slower; with fewer rows in all, columns or the sum are cut
BLOCK_LENGTH = 128  # of their pieces
# A call with fewer multiplications than this, some 0.3 ms, is not worth a second thread.
SERIAL_PRODUCTS = 2**24


_HALF_INFINITY = 0x7C00  # bits of float16
_SIGN_AND_HALF = np.int32(-0x70000001)  # bits 31 and 27 to 0


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
    return slice(start, max(start, stop))


def run_tiles(tiles: collections.deque[Any], work: Callable[[], None], products: int) -> None:
    """Let threads `work`, each until `tiles` is empty: as many as there are cores where `products`
    multiplications are worth it."""
    threads = min(os.cpu_count() or 1, len(tiles)) if products > SERIAL_PRODUCTS else 1
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
    # Of the window only the keys that some row does not see.
    if spec.window_left is not None:
        first_seen_by_all = rows.stop - 1 + terms.diagonal - spec.window_left
        cut = slice(keys.start, min(keys.stop, first_seen_by_all))
        if cut.start < cut.stop:
            hidden = _offsets(terms, rows, cut) < -spec.window_left
            np.copyto(s[:, :, : size_of(cut)], -np.inf, where=hidden)
    if spec.window_right is not None:
        last_seen_by_all = rows.start + terms.diagonal + spec.window_right
        cut = slice(max(keys.start, last_seen_by_all + 1), keys.stop)
        if cut.start < cut.stop:
            hidden = _offsets(terms, rows, cut) > spec.window_right
            np.copyto(s[:, :, -size_of(cut) :], -np.inf, where=hidden)
    if terms.mask is not None:
        np.copyto(s, -np.inf, where=~terms.mask[heads, rows, keys])


def alibi_distance(terms: ScoreTerms, rows: slice, keys: slice, dtype: np.dtype) -> np.ndarray:
    """How far each key lies from the one beside each row, whichever way: (rows, keys)."""
    return abs(_offsets(terms, rows, keys)).astype(dtype)


def _offsets(terms: ScoreTerms, rows: slice, keys: slice) -> np.ndarray:
    """How far each key lies behind the one beside each row: (rows, keys)."""
    i = np.arange(rows.start + terms.diagonal, rows.stop + terms.diagonal, dtype=np.int32)
    return np.arange(keys.start, keys.stop, dtype=np.int32) - i[:, None]


def widened(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in the accumulator's dtype.

    NumPy converts float16 one by one, at 1 ns each; by integer operations it takes half of that.
    A float16's bits, three places up from the top of a float32, are a number 2**112 times too
    small, subnormal ones included, unless it is infinite or NaN.
    """
    if array.dtype == dtype:
        return array
    if array.dtype != np.float16 or not array.size:
        return array.astype(dtype)
    if array.view(np.int16).max() >= _HALF_INFINITY or (
        array.view(np.uint16).max() >= _HALF_INFINITY + (1 << 15)
    ):
        return array.astype(dtype)
    bits = array.view(np.int16).astype(np.int32)  # the sign in the upper half
    bits <<= 13
    bits &= _SIGN_AND_HALF
    wide = bits.view(np.float32)
    wide *= np.float32(2.0**112)
    return wide


def block_columns(inner: int) -> int:
    """Columns of a block of `BLOCK_ROWS` rows."""
    return max(16, BLOCK_PRODUCT // (BLOCK_ROWS * max(inner, 1)) // 16 * 16)


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``a @ b`` of stacks of matrices, in blocks that BLAS multiplies on this thread."""
    stack, num_rows, inner = a.shape
    num_columns = b.shape[-1]
    if num_rows < BLOCK_ROWS and max(inner, num_columns) <= BLOCK_LENGTH:
        np.matmul(a, b, out=out)
    elif num_rows >= BLOCK_ROWS and (columns := block_columns(inner)) < num_columns >= inner:
        across, wide = _pieces(num_columns, columns)
        down, long = _pieces(num_rows, BLOCK_ROWS)
        left = a[:, :long].reshape(stack, down, 1, BLOCK_ROWS, inner)
        right = b[:, :, :wide].reshape(stack, inner, across, columns).transpose(0, 2, 1, 3)
        target = out[:, :long, :wide].reshape(stack, down, BLOCK_ROWS, across, columns)
        np.matmul(left, right[:, None], out=target.transpose(0, 1, 3, 2, 4))
        if wide < num_columns:
            matmul(a, b[:, :, wide:], out=out[:, :, wide:])
        if long < num_rows:
            np.matmul(a[:, long:], b[:, :, :wide], out=out[:, long:, :wide])
    elif num_rows >= BLOCK_ROWS:
        size = min(num_rows, max(1, BLOCK_PRODUCT // (inner * num_columns)))
        count, done = _pieces(num_rows, size)
        blocks = a[:, :done].reshape(stack, count, size, inner)
        target = out[:, :done].reshape(stack, count, size, num_columns)
        np.matmul(blocks, b[:, None], out=target)
        if done < num_rows:
            np.matmul(a[:, done:], b, out=out[:, done:])
    elif num_columns > inner:
        count, done = _pieces(num_columns, BLOCK_LENGTH)
        blocks = b[:, :, :done].reshape(stack, inner, count, BLOCK_LENGTH).transpose(2, 0, 1, 3)
        target = out[:, :, :done].reshape(stack, num_rows, count, BLOCK_LENGTH)
        np.matmul(a, blocks, out=target.transpose(2, 0, 1, 3))
        if done < num_columns:
            np.matmul(a, b[:, :, done:], out=out[:, :, done:])
    else:
        count, done = _pieces(inner, BLOCK_LENGTH)
        left = a[:, :, :done].reshape(stack, num_rows, count, BLOCK_LENGTH).transpose(2, 0, 1, 3)
        right = b[:, :done].reshape(stack, count, BLOCK_LENGTH, num_columns).swapaxes(0, 1)
        np.add.reduce(left @ right, axis=0, out=out)
        if done < inner:
            out += a[:, :, done:] @ b[:, done:]


def _pieces(length: int, size: int) -> tuple[int, int]:
    """How many whole pieces a length has, and where they end."""
    return length // size, length // size * size


def matmul_of_nonfinite(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``a @ b`` where a 0 in `a` leaves out even NaN and infinity in `b`."""
    np.matmul(a, np.where(np.isfinite(b), b, 0), out=out)
    for special, there in ((np.inf, b == np.inf), (-np.inf, b == -np.inf), (np.nan, np.isnan(b))):
        out[a @ there.astype(a.dtype) > 0] += special
