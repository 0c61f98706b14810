"""What attention means, in NumPy: tiles of queries against tiles of keys, so that memory stays
linear.

The algorithm is the online softmax of FlashAttention-2 (Dao, 2023, algorithm 1). Query tiles do not
depend on each other: threads take them one after the other, and the result is the same whatever
their number.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

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


class _Sequence(NamedTuple):
    """One sequence of the batch: views of the call's arrays, k and v in the accumulator's dtype."""

    q: np.ndarray  # (seqlen_q, heads_q, head_dim)
    k: np.ndarray  # (heads_kv, head_dim, seqlen_k)
    v: np.ndarray  # (heads_kv, seqlen_k, head_dim_v)
    bias: np.ndarray | None  # (heads_q, seqlen_q, seqlen_k)
    mask: np.ndarray | None  # (heads_q, seqlen_q, seqlen_k)
    alibi_slopes: np.ndarray | None  # (heads_q, 1, 1)
    sinks: np.ndarray | None  # (heads_q, 1, 1)
    out: np.ndarray  # (seqlen_q, heads_q, head_dim_v)
    lse: np.ndarray | None  # (heads_q, seqlen_q)

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.q.shape[1] // self.k.shape[0]

    @property
    def diagonal(self) -> int:
        """The key beside query 0; the last query is beside the last key."""
        return self.k.shape[2] - self.q.shape[0]


class _Tile(NamedTuple):
    """Queries that a thread works on at a time: some positions of the query heads of some key
    heads."""

    sequence: _Sequence
    heads_kv: slice
    heads_q: slice
    rows: slice
    keys: slice  # those that the window leaves to the rows

    @property
    def scores(self) -> int:
        return _size(self.heads_q) * _size(self.rows) * _size(self.keys)


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spec: AttentionSpec,
    *,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seq_lens: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    prefix: int | tuple[np.ndarray, np.ndarray] | None = None,
    num_splits: int | str | None = None,
    out: np.ndarray | None = None,
    return_lse: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Attention of NumPy arrays that :mod:`cuattn.attention` or :mod:`cuattn.decoding` has checked.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        As `spec` says that they lie.
    spec : AttentionSpec
        The call.
    seq_lens, page_table, prefix, num_splits
        As in :func:`cuattn.paged_attention`. A prefix that is an integer promises what `page_table`
        says anyway, and `num_splits` says how a GPU shares the work out: here they mean nothing.
    bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, out, return_lse
        As in :func:`cuattn.flash_attention` and :func:`cuattn.flash_attention_varlen`; `out` may
        overlap the inputs.

    Returns
    -------
    out : numpy.ndarray
        Of ``spec.out_shape``.
    lse : numpy.ndarray or None
        Of ``spec.lse_shape``, where asked for.
    """
    if spec.keys in ("cached", "paged"):
        from cuattn.reference.decoding import decode

        return decode(
            q,
            k,
            v,
            spec,
            seq_lens=seq_lens,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            prefix=prefix,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            num_splits=num_splits,
            out=out,
            return_lse=return_lse,
        )
    dtype = spec.acc_dtype
    inputs = [array for array in (q, k, v, bias, mask) if array is not None]
    overlaps = out is not None and any(np.may_share_memory(out, array) for array in inputs)
    result = np.empty(spec.out_shape, spec.dtype) if out is None or overlaps else out
    lse = np.empty(spec.lse_shape, dtype) if return_lse else None
    if spec.rows == "ragged":
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()

    # Every query tile reads K and V: 16-bit ones are converted once. Q is converted as its tiles
    # come.
    k = k.astype(dtype, copy=False).swapaxes(-3, -2)
    v = v.astype(dtype, copy=False).swapaxes(-3, -2)
    few_rows = spec.seqlen_q * (spec.heads_q // spec.heads_kv) < BLOCK_ROWS
    k = k.swapaxes(-2, -1) if few_rows else _keys_last(k)
    scores = (spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_k)
    bias = None if bias is None else np.broadcast_to(bias, scores)
    mask = None if mask is None else np.broadcast_to(mask, scores)
    if alibi_slopes is not None:
        slopes = np.broadcast_to(alibi_slopes, scores[:2])
        alibi_slopes = slopes.astype(dtype)[:, :, None, None]
    if sinks is not None:
        sinks = sinks.astype(dtype)[:, None, None]

    tiles: collections.deque[_Tile] = collections.deque()
    for b in range(spec.batch if result.size else 0):
        if spec.rows == "ragged":
            queries = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
            keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
            inputs = q[queries], k[:, :, keys], v[:, keys]
            results = result[queries], None if lse is None else lse[:, queries]
        else:
            inputs = q[b], k[b], v[b]
            results = result[b], None if lse is None else lse[b]
        terms = [None if term is None else term[b] for term in (bias, mask, alibi_slopes)]
        tiles.extend(_tiles(_Sequence(*inputs, *terms, sinks, *results), spec))
    _run(tiles, spec)

    if overlaps:
        out[...] = result
    return result if out is None else out, lse


def _keys_last(k: np.ndarray) -> np.ndarray:
    """(..., seqlen_k, head_dim) -> (..., head_dim, seqlen_k), contiguous: BLAS likes it best."""
    *stack, seqlen_k, head_dim = k.shape
    keys_last = np.empty((*stack, head_dim, seqlen_k), k.dtype)
    for j in range(0, seqlen_k, 64):  # piece by piece, in cache: three times faster than at once
        piece = np.ascontiguousarray(k[..., j : j + 64, :])
        keys_last[..., j : j + 64] = piece.swapaxes(-2, -1)
    return keys_last


def _tiles(sequence: _Sequence, spec: AttentionSpec) -> Iterator[_Tile]:
    """Query tiles of a sequence, the longest rows of a causal mask first."""
    seqlen_q = sequence.q.shape[0]
    heads_kv, _, seqlen_k = sequence.k.shape
    group, diagonal = sequence.group, sequence.diagonal
    rows_of_heads = TILE_SCORES // max(1, min(seqlen_k, TILE_KEYS))
    positions = max(1, min(seqlen_q, rows_of_heads // group))
    heads = max(1, min(heads_kv, rows_of_heads // (positions * group)))
    for i in reversed(range(0, seqlen_q, positions)):
        rows = slice(i, min(i + positions, seqlen_q))
        start, stop = 0, seqlen_k
        if spec.window_left is not None:
            start = max(start, rows.start + diagonal - spec.window_left)
        if spec.window_right is not None:
            stop = min(stop, rows.stop + diagonal + spec.window_right)
        for h in range(0, heads_kv, heads):
            end = min(h + heads, heads_kv)
            yield _Tile(
                sequence,
                heads_kv=slice(h, end),
                heads_q=slice(h * group, end * group),
                rows=rows,
                keys=slice(start, max(start, stop)),
            )


def _size(part: slice) -> int:
    return part.stop - part.start


def _run(tiles: collections.deque[_Tile], spec: AttentionSpec) -> None:
    """Do all tiles, on as many threads as there are cores where that pays."""

    def work() -> None:
        buffer = np.empty(TILE_SCORES, spec.acc_dtype)
        # NaN and infinities of the inputs, and the -inf of masked scores, come as no surprise.
        with np.errstate(all="ignore"):
            while True:
                try:
                    tile = tiles.popleft()
                except IndexError:
                    return
                _attend(tile, spec, buffer)

    products = sum(tile.scores for tile in tiles) * (spec.head_dim + spec.head_dim_v)
    threads = min(os.cpu_count() or 1, len(tiles)) if products > SERIAL_PRODUCTS else 1
    if threads <= 1:
        work()
        return
    with ThreadPoolExecutor(threads) as pool:
        for worker in [pool.submit(work) for _ in range(threads)]:
            worker.result()


def _attend(tile: _Tile, spec: AttentionSpec, buffer: np.ndarray, finite: bool = True) -> None:
    """Attention of one tile of queries, written to its sequence's out and lse.

    Scores and results are (heads_q, rows, ...) arrays. BLAS sees them as (heads_kv, group * rows,
    ...), so that K and V serve all the query heads of a group at once.
    """
    sequence, rows = tile.sequence, tile.rows
    dtype = spec.acc_dtype
    q = sequence.q[rows, tile.heads_q].swapaxes(0, 1)
    q = np.multiply(q, spec.scale, dtype=dtype, order="C")
    k, v = sequence.k[tile.heads_kv], sequence.v[tile.heads_kv]
    heads_q, num_rows, head_dim = q.shape
    stacked = (len(k), sequence.group * num_rows)
    q = q.reshape(*stacked, head_dim)

    if sequence.sinks is None:
        row_max = np.full((heads_q, num_rows, 1), -np.inf, dtype)
        row_sum = np.zeros_like(row_max)
    else:  # the score of a key that comes before all others and has no value
        row_max = np.repeat(sequence.sinks[tile.heads_q], num_rows, axis=1)
        row_sum = (row_max > -np.inf).astype(dtype)
    out = np.zeros((heads_q, num_rows, v.shape[-1]), dtype)
    product = np.empty_like(out)
    step = TILE_SCORES // (heads_q * num_rows)
    if stacked[1] >= BLOCK_ROWS:
        widest = max(head_dim, v.shape[-1])
        step = max(1, min(step, TILE_KEYS, BLOCK_PRODUCT // (BLOCK_ROWS * widest)))
    ones = np.ones(min(step, _size(tile.keys)), dtype)
    for j in range(tile.keys.start, tile.keys.stop, step):
        keys = slice(j, min(j + step, tile.keys.stop))
        num_keys = _size(keys)
        s = buffer[: heads_q * num_rows * num_keys].reshape(*stacked, num_keys)
        _matmul(q, k[:, :, keys], out=s)
        s = s.reshape(heads_q, num_rows, num_keys)
        _finish_scores(s, tile, keys, spec)

        previous = row_max
        row_max = np.maximum(previous, s.max(axis=-1, keepdims=True))
        shift = np.where(row_max == -np.inf, 0, row_max)  # no key so far: exp(-inf - 0) is 0
        s -= shift
        np.exp(s, out=s)
        rescale = np.exp(previous - shift)
        row_sum *= rescale
        row_sum += np.vecdot(s, ones[:num_keys])[..., None]
        out *= rescale
        matmul = _matmul if finite else _matmul_of_nonfinite
        matmul(s.reshape(*stacked, num_keys), v[:, keys], out=product.reshape(*stacked, -1))
        out += product

    out /= np.where(row_sum == 0, 1, row_sum)
    if finite and not np.isfinite(out).all():
        # 0 * NaN is NaN: values may have got in that a row does not see. Once more, with care.
        return _attend(tile, spec, buffer, finite=False)
    sequence.out[rows, tile.heads_q] = out.swapaxes(0, 1)
    if sequence.lse is not None:
        lse = np.where(row_max == -np.inf, 0, row_max) + np.log(row_sum)
        sequence.lse[tile.heads_q, rows] = lse[..., 0]


def _finish_scores(s: np.ndarray, tile: _Tile, keys: slice, spec: AttentionSpec) -> None:
    """Turn ``scale * q.k`` of a tile, (heads_q, rows, keys), into its scores, in place."""
    sequence, heads, rows = tile.sequence, tile.heads_q, tile.rows
    if spec.softcap:
        s /= spec.softcap
        np.tanh(s, out=s)
        s *= spec.softcap
    if sequence.bias is not None:
        s += sequence.bias[heads, rows, keys]
    if sequence.alibi_slopes is not None:
        distance = abs(_distance(sequence, rows, keys)).astype(s.dtype)
        s -= sequence.alibi_slopes[heads] * distance
    # Of the window only the keys that some row does not see.
    if spec.window_left is not None:
        first_seen_by_all = rows.stop - 1 + sequence.diagonal - spec.window_left
        cut = slice(keys.start, min(keys.stop, first_seen_by_all))
        if cut.start < cut.stop:
            hidden = _distance(sequence, rows, cut) < -spec.window_left
            np.copyto(s[:, :, : _size(cut)], -np.inf, where=hidden)
    if spec.window_right is not None:
        last_seen_by_all = rows.start + sequence.diagonal + spec.window_right
        cut = slice(max(keys.start, last_seen_by_all + 1), keys.stop)
        if cut.start < cut.stop:
            hidden = _distance(sequence, rows, cut) > spec.window_right
            np.copyto(s[:, :, -_size(cut) :], -np.inf, where=hidden)
    if sequence.mask is not None:
        np.copyto(s, -np.inf, where=~sequence.mask[heads, rows, keys])


def _distance(sequence: _Sequence, rows: slice, keys: slice) -> np.ndarray:
    """How far each key lies behind the one beside each row: (rows, keys)."""
    i = np.arange(rows.start + sequence.diagonal, rows.stop + sequence.diagonal, dtype=np.int32)
    return np.arange(keys.start, keys.stop, dtype=np.int32) - i[:, None]


def _matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``a @ b`` of stacks of matrices, in blocks that BLAS multiplies on this thread."""
    stack, num_rows, inner = a.shape
    num_columns = b.shape[-1]
    if num_rows >= BLOCK_ROWS:
        size = min(num_rows, max(1, BLOCK_PRODUCT // (inner * num_columns)))
        count, done = _pieces(num_rows, size)
        blocks = a[:, :done].reshape(stack, count, size, inner)
        target = out[:, :done].reshape(stack, count, size, num_columns)
        np.matmul(blocks, b[:, None], out=target)
        if done < num_rows:
            np.matmul(a[:, done:], b, out=out[:, done:])
    elif max(inner, num_columns) <= BLOCK_LENGTH:
        np.matmul(a, b, out=out)
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


def _matmul_of_nonfinite(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``a @ b`` where a 0 in `a` leaves out even NaN and infinity in `b`."""
    np.matmul(a, np.where(np.isfinite(b), b, 0), out=out)
    for special, there in ((np.inf, b == np.inf), (-np.inf, b == -np.inf), (np.nan, np.isnan(b))):
        out[a @ there.astype(a.dtype) > 0] += special
