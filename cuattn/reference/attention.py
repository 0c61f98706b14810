"""What attention means, in NumPy: tiles of queries against tiles of keys, so that memory stays
linear.

The algorithm is the online softmax of FlashAttention-2 (Dao, 2023, algorithm 1). Query tiles do not
depend on each other: threads take them one after the other, and the result is the same whatever
their number.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cuattn._quantized import codes_of
from cuattn._spec import AttentionSpec
from cuattn.reference import dropout, tiles
from cuattn.reference.layouts import Keys, Rows
from cuattn.reference.tiles import ScoreTerms, matmul, matmul_of_nonfinite, size_of, widened

MOST_SUM = 2.0**14  # of a tile's exponentials of a row: far from what a float32 holds
FIRST_KEYS = 64  # of a tile, where more of them are to come
WIDENED = 2**17  # elements of 16-bit keys or values that become float32 at a time, in cache


class _Sequence(NamedTuple):
    """One sequence of the batch: views of the call's arrays, but where k and v are rearranged."""

    q: np.ndarray  # (seqlen_q, heads_q, head_dim)
    k: np.ndarray  # (heads_kv, head_dim, seqlen_k), or with a row of ones behind its features
    v: np.ndarray  # (heads_kv, seqlen_k, head_dim_v)
    index: int  # in the batch
    terms: ScoreTerms
    sinks: np.ndarray | None  # (heads_q, 1, 1)
    out: np.ndarray  # (seqlen_q, heads_q, head_dim_v)
    lse: np.ndarray | None  # (heads_q, seqlen_q)

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.q.shape[1] // self.k.shape[0]


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
        return size_of(self.heads_q) * size_of(self.rows) * size_of(self.keys)


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
    seed: int = 0,
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
    bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seed, out, return_lse
        As in :func:`cuattn.flash_attention` and :func:`cuattn.flash_attention_varlen`; `out` may
        overlap the inputs.

    Returns
    -------
    out : numpy.ndarray
        Of ``spec.out_shape``.
    lse : numpy.ndarray or None
        Of ``spec.lse_shape``, where asked for.
    """
    dtype = spec.acc_dtype
    inputs = [codes_of(array) for array in (q, k, v, bias, mask) if array is not None]
    overlaps = out is not None and any(np.may_share_memory(out, array) for array in inputs)
    result = np.empty(spec.out_shape, spec.dtype) if out is None or overlaps else out
    lse = np.empty(spec.lse_shape, dtype) if return_lse else None

    rows = Rows(spec, cu_seqlens_q)
    own_prefix = prefix if isinstance(prefix, tuple) else None
    keys = Keys(k, v, spec, cu_seqlens_k, seq_lens, page_table, own_prefix)
    lengths = [(rows.length(b), keys.length(b)) for b in range(spec.batch)]
    terms = tiles.score_terms(spec, lengths, bias, mask, alibi_slopes)
    if sinks is not None:
        sinks = sinks.astype(dtype)[:, None, None]
    queue: collections.deque[_Tile] = collections.deque()
    for b in range(spec.batch if result.size else 0):
        sequence = _Sequence(
            rows.of(q, b),
            *_as_operands(*keys.of(b), rows.length(b), spec),
            b,
            terms[b],
            sinks,
            rows.of(result, b),
            None if lse is None else rows.of_lse(lse, b),
        )
        queue.extend(_tiles(sequence, spec))
        if keys.are_copied:
            _run(queue, spec, seed)
    _run(queue, spec, seed)

    if overlaps:
        out[...] = result
    return result if out is None else out, lse


def _as_operands(
    k: np.ndarray, v: np.ndarray, seqlen_q: int, spec: AttentionSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (seqlen_k, heads_kv, features) as products take them: (heads_kv, head_dim,
    seqlen_k) and (heads_kv, seqlen_k, head_dim_v).

    Where there are many query tiles, which all read them, 16-bit ones are converted once, and all
    are brought together. For few rows they stay where they are. Q is converted as its tiles come.
    """
    k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    if seqlen_q * (spec.heads_q // spec.heads_kv) < tiles.BLOCK_ROWS:
        return k.swapaxes(1, 2), v
    k, v = widened(k, spec.acc_dtype), widened(v, spec.acc_dtype)
    return _keys_last(k), np.ascontiguousarray(v)


def _run(queue: collections.deque[_Tile], spec: AttentionSpec, seed: int) -> None:
    """Do all tiles of the queue, on several threads where that pays."""

    def work() -> None:
        buffer = np.empty(tiles.TILE_SCORES, spec.acc_dtype)
        # NaN and infinities of the inputs, and the -inf of masked scores, come as no surprise.
        with np.errstate(all="ignore"):
            while True:
                try:
                    tile = queue.popleft()
                except IndexError:
                    return
                _attend(tile, spec, buffer, seed)

    products = sum(tile.scores for tile in queue) * (spec.head_dim + spec.head_dim_v)
    tiles.run_tiles(queue, work, products)


def _keys_last(k: np.ndarray) -> np.ndarray:
    """(heads, seqlen_k, head_dim) -> (heads, head_dim + 1, seqlen_k), which BLAS likes best: with a
    row of ones, and rows an odd number of cache lines apart, or many would be in each other's
    place."""
    heads, seqlen_k, head_dim = k.shape
    line = 64 // k.itemsize
    pitch = (-(-seqlen_k // line) | 1) * line
    keys_last = np.empty((heads, head_dim + 1, pitch), k.dtype)[..., :seqlen_k]
    keys_last[:, head_dim] = 1
    for j in range(0, seqlen_k, 64):  # piece by piece, in cache: three times faster than at once
        piece = np.ascontiguousarray(k[:, j : j + 64])
        keys_last[:, :head_dim, j : j + 64] = piece.swapaxes(1, 2)
    return keys_last


def _tiles(sequence: _Sequence, spec: AttentionSpec) -> Iterator[_Tile]:
    """Query tiles of a sequence, the longest rows of a causal mask first."""
    seqlen_q = sequence.q.shape[0]
    heads_kv, _, seqlen_k = sequence.k.shape
    group = sequence.group
    rows_of_heads = tiles.TILE_SCORES // max(1, min(seqlen_k, tiles.TILE_KEYS))
    positions = max(1, min(seqlen_q, rows_of_heads // group))
    heads = max(1, min(heads_kv, rows_of_heads // (positions * group)))
    for i in reversed(range(0, seqlen_q, positions)):
        rows = slice(i, min(i + positions, seqlen_q))
        for h in range(0, heads_kv, heads):
            end = min(h + heads, heads_kv)
            yield _Tile(
                sequence,
                heads_kv=slice(h, end),
                heads_q=slice(h * group, end * group),
                rows=rows,
                keys=tiles.visible_keys(sequence.terms, rows, spec),
            )


def _attend(
    tile: _Tile, spec: AttentionSpec, buffer: np.ndarray, seed: int, finite: bool = True
) -> None:
    """Attention of one tile of queries, written to its sequence's out and lse.

    Scores and results are (heads_q, rows, ...) arrays. BLAS sees them as (heads_kv, group * rows,
    ...), so that K and V serve all the query heads of a group at once.

    From scores a number of their row's is subtracted before they are exponentiated: its maximum
    when it was last looked for. That is good as long as sums stay below `MOST_SUM`, so most key
    tiles need no maxima; and where K has a row of ones, the product with Q subtracts.
    """
    sequence, rows = tile.sequence, tile.rows
    dtype = spec.acc_dtype
    k, v = sequence.k[tile.heads_kv], sequence.v[tile.heads_kv]
    heads_q, num_rows = size_of(tile.heads_q), size_of(rows)
    stacked = (len(k), sequence.group * num_rows)
    given = sequence.q[rows, tile.heads_q].swapaxes(0, 1)
    # Where more than q·k makes a score, the difference would be rounded at another size.
    terms = sequence.terms
    in_product = k.shape[1] > spec.head_dim and not (
        spec.softcap or terms.bias is not None or terms.alibi_slopes is not None
    )
    if k.shape[1] == spec.head_dim:
        q = np.multiply(given, spec.scale, dtype=dtype, order="C")
    else:
        q = np.zeros((heads_q, num_rows, k.shape[1]), dtype)
        np.multiply(given, spec.scale, dtype=dtype, out=q[..., : spec.head_dim])
    subtrahend = q[..., spec.head_dim :]
    q = q.reshape(*stacked, -1)

    first = sequence.sinks is None  # no row has seen anything
    if first:
        shift = np.zeros((heads_q, num_rows, 1), dtype)
        row_sum = np.zeros_like(shift)
    else:  # the score of a key that comes before all others and has no value
        sinks = np.repeat(sequence.sinks[tile.heads_q], num_rows, axis=1)
        row_sum = (sinks > -np.inf).astype(dtype)
        shift = np.where(sinks == -np.inf, 0, sinks)
    out = np.zeros((heads_q, num_rows, v.shape[-1]), dtype)
    product = out if first else np.empty_like(out)
    ones = np.ones(min(tiles.TILE_SCORES, size_of(tile.keys)), dtype)

    def weights(keys: slice, look: bool) -> tuple[np.ndarray, np.ndarray]:
        """Exponentials of scores, and their sums; `look` for maxima first."""
        nonlocal shift, row_sum
        num_keys = size_of(keys)
        s = buffer[: heads_q * num_rows * num_keys].reshape(*stacked, num_keys)
        if in_product:
            np.multiply(shift, 0 if look else -1, out=subtrahend)
        matmul(q, widened(k[:, :, keys], dtype), out=s)
        s = s.reshape(heads_q, num_rows, num_keys)
        if spec.softcap:
            tiles.cap_scores(s, spec.softcap)
        tiles.modify_scores(s, terms, tile.heads_q, rows, keys, spec)
        if look:
            row_max = s.max(axis=-1, keepdims=True)
            if not first:
                seen = row_sum != 0
                row_max = np.where(seen, np.maximum(row_max, shift), row_max)
            row_max = np.where(row_max == -np.inf, 0, row_max)  # exp(-inf - 0) is 0
            if not first:
                rescale = np.where(seen, np.exp(shift - row_max), 0)
                row_sum = row_sum * rescale
                np.multiply(out, rescale, out=out)
            shift = row_max
        if look or not in_product:
            np.subtract(s, shift, out=s)
        np.exp(s, out=s)
        return s, np.vecdot(s, ones[:num_keys])[..., None]

    settled = False  # whether each row has seen a key
    for keys in _key_tiles(tile, spec):
        s, added = weights(keys, look=not settled)
        if settled and not (added <= MOST_SUM).all():
            s, added = weights(keys, look=True)
        row_sum = added if first else row_sum + added
        if not settled and keys.stop < tile.keys.stop:
            settled = bool((row_sum > 0).all())
        if spec.dropout:
            s *= dropout.factors(spec, seed, sequence.index, tile.heads_q, rows, keys)
        multiply = matmul if finite else matmul_of_nonfinite
        s = s.reshape(*stacked, -1)
        multiply(s, widened(v[:, keys], dtype), out=product.reshape(*stacked, -1))
        if first:
            first, product = False, np.empty_like(out) if keys.stop < tile.keys.stop else out
        else:
            out += product

    out /= np.where(row_sum == 0, 1, row_sum)
    if finite and not np.isfinite(out).all():
        # 0 * NaN is NaN: values may have got in that a row does not see. Once more, with care.
        return _attend(tile, spec, buffer, seed, finite=False)
    sequence.out[rows, tile.heads_q] = out.swapaxes(0, 1)
    if sequence.lse is not None:
        sequence.lse[tile.heads_q, rows] = (shift + np.log(row_sum))[..., 0]


def _key_tiles(tile: _Tile, spec: AttentionSpec) -> Iterator[slice]:
    """The keys of a tile, some at a time: of many first a few, which tell how large scores are."""
    k = tile.sequence.k
    rows = size_of(tile.heads_q) * size_of(tile.rows)
    step = tiles.TILE_SCORES // rows
    begin, end = tile.keys.start, tile.keys.stop
    if k.shape[1] == spec.head_dim:  # few rows, which read K and V as they are
        if k.dtype != spec.acc_dtype:
            features = size_of(tile.heads_kv) * max(spec.head_dim, spec.head_dim_v)
            step = max(1, min(step, WIDENED // features))
    else:
        columns = tiles.block_columns(k.shape[1])
        step = max(step // columns * columns, min(step, columns))
        if end - begin > 4 * FIRST_KEYS:
            yield slice(begin, begin + FIRST_KEYS)
            begin += FIRST_KEYS
    for j in range(begin, end, step):
        yield slice(j, min(j + step, end))
