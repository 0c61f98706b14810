"""What attention means, in NumPy: one query tile at a time against tiles of keys, so memory stays linear.

The algorithm is FlashAttention-2's online softmax (Dao, 2023, algorithm 1). Nearly all the time is spent in two matrix
products and one exp; query tiles are independent, so threads take them in turn and the result does not depend on them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cuattn._spec import AttentionSpec

# A query tile has up to kTileRows rows (those of the query heads that share a key head included) and its scores, the
# largest array, up to kTileScores entries: 256 KiB in float32, which stays in a core's own cache.
TILE_ROWS = 256
TILE_SCORES = 256 * 256
# OpenBLAS runs a product of at most this many multiplications on the calling thread. Worker threads stay below it, or
# they would wait for each other inside BLAS (measured: 2.5 times slower).
SERIAL_PRODUCT = 2**18
# Scores in a call below which starting threads does not pay.
SERIAL_SCORES = 2**19


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """One sequence of the batch: views of the call's arrays."""

    q: np.ndarray  # (seqlen_q, heads_q, head_dim)
    k: np.ndarray  # (heads_kv, head_dim, seqlen_k), of the accumulator's dtype
    v: np.ndarray  # (heads_kv, seqlen_k, head_dim_v), of the accumulator's dtype
    bias: np.ndarray | None  # (heads_q, seqlen_q, seqlen_k)
    mask: np.ndarray | None  # (heads_q, seqlen_q, seqlen_k)
    alibi_slopes: np.ndarray | None  # (heads_q, 1, 1)
    sinks: np.ndarray | None  # (heads_q, 1, 1)
    out: np.ndarray  # (seqlen_q, heads_q, head_dim_v)
    lse: np.ndarray | None  # (heads_q, seqlen_q)


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
    out: np.ndarray | None = None,
    return_lse: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Attention forward of NumPy arrays that :mod:`cuattn.attention` has checked.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        (batch, seqlen, heads, head_dim), or (total, heads, head_dim) for varlen.
    spec : AttentionSpec
        The call.
    bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, out, return_lse
        As in :func:`cuattn.flash_attention` and :func:`cuattn.flash_attention_varlen`.

    Returns
    -------
    out : numpy.ndarray
        Of ``spec.out_shape``.
    lse : numpy.ndarray or None
        Of ``spec.lse_shape``, where asked for.
    """
    result = np.empty(spec.out_shape, spec.dtype) if out is None else out
    lse = np.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None
    tiles = []
    for sequence in _sequences(
        q, k, v, spec, bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, result, lse
    ):
        tiles += _tiles(sequence)

    scores = sum(s.q.shape[0] * s.q.shape[1] * s.k.shape[2] for s, _, _ in tiles[:1]) * len(tiles)
    workers = min(os.cpu_count() or 1, len(tiles)) if scores >= SERIAL_SCORES else 1
    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda tile: _attend(*tile, spec, SERIAL_PRODUCT), tiles))
    else:
        for tile in tiles:
            _attend(*tile, spec, None)
    return result, lse


def _sequences(
    q, k, v, spec, bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, out, lse
) -> Iterator[_Sequence]:
    acc = spec.acc_dtype
    k = np.moveaxis(k, -3, -1).astype(acc, order="K", copy=False)
    v = np.moveaxis(v, -3, -2).astype(acc, order="K", copy=False)
    scores = (spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_k)
    bias = None if bias is None else np.broadcast_to(bias, scores)
    mask = None if mask is None else np.broadcast_to(mask, scores)
    if alibi_slopes is not None:
        alibi_slopes = np.broadcast_to(alibi_slopes.astype(acc), (spec.batch, spec.heads_q))
        alibi_slopes = alibi_slopes[:, :, None, None]
    if sinks is not None:
        sinks = sinks.astype(acc)[:, None, None]
    for b in range(spec.batch):
        if spec.varlen:
            queries = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
            keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
            arrays = q[queries], k[..., keys], v[:, keys], None, None
            results = out[queries], None if lse is None else lse[:, queries]
        else:
            score_arrays = (None if bias is None else bias[b], None if mask is None else mask[b])
            arrays = q[b], k[b], v[b], *score_arrays
            results = out[b], None if lse is None else lse[b]
        slopes = None if alibi_slopes is None else alibi_slopes[b]
        yield _Sequence(*arrays, slopes, sinks, *results)


def _tiles(sequence: _Sequence) -> Iterator[tuple[_Sequence, slice, slice]]:
    """Query tiles of a sequence: some key heads with all their query heads, and some query positions."""
    seqlen_q, heads_q, _ = sequence.q.shape
    heads_kv = sequence.k.shape[0]
    group = heads_q // heads_kv
    positions = max(1, min(seqlen_q, TILE_ROWS // group))
    heads = max(1, min(heads_kv, TILE_ROWS // (positions * group)))
    for i in reversed(range(0, seqlen_q, positions)):  # the long rows of a causal mask first
        for h in range(0, heads_kv, heads):
            yield (
                sequence,
                slice(h, min(h + heads, heads_kv)),
                slice(i, min(i + positions, seqlen_q)),
            )


@np.errstate(all="ignore")  # NaN and infinities of the inputs, and masked scores, are no surprise
def _attend(
    sequence: _Sequence,
    heads_kv: slice,
    rows: slice,
    spec: AttentionSpec,
    serial_product: int | None,
    finite_values: bool = True,
) -> None:
    """Attention of one query tile, written to the sequence's out and lse."""
    acc_dtype = spec.acc_dtype
    group = sequence.q.shape[1] // sequence.k.shape[0]
    heads = slice(heads_kv.start * group, heads_kv.stop * group)
    q = np.multiply(sequence.q[rows, heads].swapaxes(0, 1), spec.scale, dtype=acc_dtype)
    # Rows of a tile: the query heads of a group one after the other, so that K and V are read once for all.
    shape = num_heads, num_rows = q.shape[:2]
    q = q.reshape(num_heads // group, group * num_rows, -1)
    k, v = sequence.k[heads_kv], sequence.v[heads_kv]

    if sequence.sinks is None:
        row_max = np.full((*shape, 1), -np.inf, acc_dtype)
    else:  # the sink is a score that is there before the first key
        row_max = np.repeat(sequence.sinks[heads], num_rows, axis=1)
    row_sum = (row_max > -np.inf).astype(acc_dtype)
    out = np.zeros((*shape, v.shape[-1]), acc_dtype)
    product = np.empty_like(out)
    tile_scores = np.empty(TILE_SCORES, acc_dtype)
    step = max(1, TILE_SCORES // (num_heads * num_rows))
    for keys in _key_tiles(sequence, rows, spec, step):
        num_keys = keys.stop - keys.start
        s = tile_scores[: num_heads * num_rows * num_keys].reshape(*shape, num_keys)
        _matmul(q, k[:, :, keys], s.reshape(*q.shape[:2], num_keys), serial_product)
        _apply_score_terms(s, sequence, heads, rows, keys, spec)

        previous = row_max
        row_max = np.maximum(previous, np.max(s, axis=-1, keepdims=True))
        shift = np.where(row_max == -np.inf, 0, row_max)  # nothing kept so far: exp(-inf) is 0
        s -= shift
        np.exp(s, out=s)
        rescale = np.exp(previous - shift)
        row_sum *= rescale
        row_sum += np.add.reduce(s, axis=-1, keepdims=True)
        out *= rescale
        weights, values = s.reshape(*q.shape[:2], num_keys), v[:, keys]
        flat = product.reshape(*q.shape[:2], -1)
        if finite_values:
            _matmul(weights, values, flat, serial_product)
        else:
            _matmul_nonfinite(weights, values, flat)
        out += product

    out /= np.where(row_sum == 0, 1, row_sum)
    if finite_values and not np.isfinite(out).all():
        # 0 * NaN is NaN: a value no row may see has got in, or one that some rows see and others do not.
        return _attend(sequence, heads_kv, rows, spec, serial_product, finite_values=False)
    sequence.out[rows, heads] = out.swapaxes(0, 1)
    if sequence.lse is not None:
        row_sum = np.log(row_sum)
        row_sum += np.where(row_max == -np.inf, 0, row_max)
        sequence.lse[heads, rows] = row_sum[..., 0]


def _key_tiles(
    sequence: _Sequence, rows: slice, spec: AttentionSpec, step: int
) -> Iterator[slice]:
    """Tiles of the keys that the window leaves to these rows."""
    seqlen_k = sequence.k.shape[-1]
    diagonal = seqlen_k - sequence.q.shape[0]
    start, stop = 0, seqlen_k
    if spec.window_left is not None:
        start = max(start, rows.start + diagonal - spec.window_left)
    if spec.window_right is not None:
        stop = min(stop, rows.stop + diagonal + spec.window_right)
    for j in range(start, stop, step):
        yield slice(j, min(j + step, stop))


def _apply_score_terms(
    s: np.ndarray, sequence: _Sequence, heads: slice, rows: slice, keys: slice, spec: AttentionSpec
) -> None:
    """Turn scale * q.k of a tile (heads, rows, keys) into its scores, in place."""
    if spec.softcap:
        s /= spec.softcap
        np.tanh(s, out=s)
        s *= spec.softcap
    if sequence.bias is not None:
        s += sequence.bias[heads, rows, keys]
    diagonal = sequence.k.shape[-1] - sequence.q.shape[0]
    distance = None  # of key j from the diagonal of row i: (rows, keys)
    left, right = spec.window_left, spec.window_right
    cut_left = left is not None and keys.start < rows.stop - 1 + diagonal - left
    cut_right = right is not None and keys.stop - 1 > rows.start + diagonal + right
    if sequence.alibi_slopes is not None or cut_left or cut_right:
        i = np.arange(rows.start, rows.stop)[:, None]
        distance = np.arange(keys.start, keys.stop) - (i + diagonal)
    if sequence.alibi_slopes is not None:
        s -= sequence.alibi_slopes[heads] * abs(distance).astype(s.dtype)
    if cut_left:
        np.copyto(s, -np.inf, where=distance < -left)
    if cut_right:
        np.copyto(s, -np.inf, where=distance > right)
    if sequence.mask is not None:
        np.copyto(s, -np.inf, where=~sequence.mask[heads, rows, keys])


def _matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray, serial_product: int | None) -> None:
    """``a @ b`` of stacks of matrices, in pieces of at most `serial_product` multiplications."""
    if serial_product is None:
        np.matmul(a, b, out=out)
        return
    rows = max(1, serial_product // (b.shape[-2] * b.shape[-1]))
    whole = a.shape[-2] // rows * rows
    if whole:
        pieces = (a.shape[0], whole // rows, rows)
        np.matmul(
            a[:, :whole].reshape(*pieces, -1),
            b[:, None],
            out=out[:, :whole].reshape(*pieces, -1),
        )
    if whole < a.shape[-2]:
        np.matmul(a[:, whole:], b, out=out[:, whole:])


def _matmul_nonfinite(weights: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """``weights @ values`` where a weight of 0 leaves even NaN and infinity out."""
    np.matmul(weights, np.where(np.isfinite(values), values, 0), out=out)
    for special in (np.inf, -np.inf, np.nan):
        there = np.isnan(values) if np.isnan(special) else values == special
        out[weights @ there.astype(weights.dtype) > 0] += special
