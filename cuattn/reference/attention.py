"""What attention means, in NumPy: tiles of queries against tiles of keys, so that memory stays
linear.

The algorithm is the online softmax of FlashAttention-2 (Dao, 2023, algorithm 1). Query tiles do not
depend on each other: threads take them one after the other, and the result is the same whatever
their number.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cuattn._quantized import codes_of
from cuattn._spec import AttentionSpec
from cuattn.reference import dropout, products, tiles
from cuattn.reference.layouts import Keys, Rows
from cuattn.reference.products import matmul, matmul_of_nonfinite, widened
from cuattn.reference.quantization import CodedRows
from cuattn.reference.tiles import ScoreTerms, size_of

MOST_SUM = 2.0**14  # of a tile's exponentials of a row: far from what a float32 holds
SMALL_SCORE = 40.0  # exp(±40) is far from what a float32 cannot hold
BLOCK_ROWS = 256  # of the query heads that share a key head; under a window half as many
UNIT = 2**19  # elements of keys and values that a thread packs at a time
PACKED_ROWS = 64  # so many rows for a key head are worth bringing its keys and values together
WIDENED = 2**17  # elements of 16-bit keys or values that become float32 at a time, in cache


class _Sequence(NamedTuple):
    """One sequence of the batch: views of the call's arrays."""

    q: np.ndarray  # (seqlen_q, heads_q, head_dim)
    k: np.ndarray | CodedRows  # (heads_kv, seqlen_k, head_dim)
    v: np.ndarray | CodedRows  # (heads_kv, seqlen_k, head_dim_v)
    index: int  # in the batch
    terms: ScoreTerms
    sinks: np.ndarray | None  # (heads_q, 1, 1)
    out: np.ndarray  # (seqlen_q, heads_q, head_dim_v)
    lse: np.ndarray | None  # (heads_q, seqlen_q)

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.q.shape[1] // self.k.shape[0]

    def scores_are_products(self, spec: AttentionSpec) -> bool:
        """Whether scores are those of queries and keys, and no more than masks change them."""
        more = self.terms.bias is not None or self.terms.alibi_slopes is not None
        return not (spec.softcap or more)


class _Block(NamedTuple):
    """Some rows of a sequence, and the keys that the window leaves to them."""

    rows: slice
    keys: slice


class _Unit(NamedTuple):
    """Some heads of a sequence, with blocks of their rows: what a thread does at a time."""

    sequence: _Sequence
    heads_q: slice
    k: np.ndarray | CodedRows  # (heads_kv, seqlen_k, head_dim), or packed as products.pack does
    v: np.ndarray | CodedRows  # (heads_kv, seqlen_k, head_dim_v)
    packed: bool
    k_norm: np.ndarray | None  # (heads_kv,): of the longest key, where they are packed
    blocks: list[_Block]
    heads_of_tile: int  # key heads whose scores a tile holds

    @property
    def scores(self) -> int:
        return size_of(self.heads_q) * sum(size_of(b.rows) * size_of(b.keys) for b in self.blocks)

    def of_heads(self, begin: int, end: int) -> _Unit:
        """The unit with these of its key heads only."""
        group, first = self.sequence.group, self.heads_q.start
        return self._replace(
            heads_q=slice(first + begin * group, first + end * group),
            k=self.k[begin:end],
            v=self.v[begin:end],
            k_norm=None if self.k_norm is None else self.k_norm[begin:end],
        )

    def tiles(self) -> Iterator[_Unit]:
        """The unit with the heads of one tile at a time."""
        heads = len(self.k)
        for h in range(0, heads, self.heads_of_tile):
            yield self.of_heads(h, min(h + self.heads_of_tile, heads))

    def shares(self, count: int) -> list[_Unit]:
        """The unit as about `count`, of fewer heads or, where it has too few tiles of them, of
        fewer blocks."""
        heads = len(self.k)
        step = -(-heads // (count * self.heads_of_tile)) * self.heads_of_tile
        by_heads = [self.of_heads(h, min(h + step, heads)) for h in range(0, heads, step)]
        each = min(-(-count // len(by_heads)), len(self.blocks))
        return [u._replace(blocks=u.blocks[i::each]) for u in by_heads for i in range(each)]


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
    own_prefix = prefix if isinstance(prefix, tuple) else None
    inputs = [q, k, v, bias, mask, page_table, *(own_prefix or ())]
    overlaps = out is not None and any(
        np.may_share_memory(out, codes_of(array)) for array in inputs if array is not None
    )
    result = np.empty(spec.out_shape, spec.dtype) if out is None or overlaps else out
    lse = np.empty(spec.lse_shape, dtype) if return_lse else None

    rows = Rows(spec, cu_seqlens_q)
    keys = Keys(k, v, spec, cu_seqlens_k, seq_lens, page_table, own_prefix)
    lengths = [(rows.length(b), keys.length(b)) for b in range(spec.batch)]
    terms = tiles.score_terms(spec, lengths, bias, mask, alibi_slopes)
    if sinks is not None:
        sinks = sinks.astype(dtype)[:, None, None]
    units: list[_Unit] = []
    for b in range(spec.batch if result.size else 0):
        sequence = _Sequence(
            rows.of(q, b),
            *keys.of(b),
            b,
            terms[b],
            sinks,
            rows.of(result, b),
            None if lse is None else rows.of_lse(lse, b),
        )
        units += _units(sequence, spec)
        if keys.are_copied:
            _run(units, spec, seed)
            units = []
    _run(units, spec, seed)

    if overlaps:
        out[...] = result
    return result if out is None else out, lse


def _units(sequence: _Sequence, spec: AttentionSpec) -> Iterator[_Unit]:
    """The work of a sequence, the longest rows of a causal mask first.

    Where there are rows enough, keys and values are packed, as products like them best. For few
    rows they are read where they are.
    """
    seqlen_q, heads_kv, group = len(sequence.q), len(sequence.k), sequence.group
    seqlen_k = sequence.terms.seqlen_k
    packed = seqlen_q * group >= PACKED_ROWS
    most = BLOCK_ROWS // (1 if spec.window_left is spec.window_right is None else 2)
    num_rows = max(1, min(seqlen_q, most // group))
    starts = reversed(range(0, seqlen_q, num_rows))
    blocks = [slice(i, min(i + num_rows, seqlen_q)) for i in starts]
    tile_keys = max(1, min(seqlen_k, tiles.TILE_KEYS))
    heads_of_tile = max(1, tiles.TILE_SCORES // (group * num_rows * tile_keys))
    step = heads_kv
    if packed:
        most = UNIT // max(1, seqlen_k * (spec.head_dim + spec.head_dim_v))
        step = max(1, most // heads_of_tile) * heads_of_tile
    for h in range(0, heads_kv, step):
        end = min(h + step, heads_kv)
        yield _Unit(
            sequence,
            heads_q=slice(h * group, end * group),
            k=sequence.k[h:end],
            v=sequence.v[h:end],
            packed=packed,
            k_norm=None,
            blocks=[_Block(i, tiles.visible_keys(sequence.terms, i, spec)) for i in blocks],
            heads_of_tile=heads_of_tile,
        )


def _run(units: list[_Unit], spec: AttentionSpec, seed: int) -> None:
    """Do all units, on several threads where that pays."""
    multiplications = sum(unit.scores for unit in units) * (spec.head_dim + spec.head_dim_v)
    threads = tiles.threads_for(multiplications)
    if threads > 1:
        count = -(-2 * threads // len(units))
        units = [share for unit in units for share in unit.shares(count)]
    queue = collections.deque(units)
    scores = max(tiles.TILE_SCORES, products.PANEL * (spec.heads_q // spec.heads_kv))
    size = scores + max((products.packed_size(u.k, u.v) for u in units if u.packed), default=0)

    def work() -> None:
        room = products.Room(size, spec.acc_dtype)
        # NaN and infinities of the inputs, and the -inf of masked scores, come as no surprise.
        with np.errstate(all="ignore"):
            while True:
                try:
                    unit = queue.popleft()
                except IndexError:
                    return
                room.clear()
                buffer = room.array(scores)
                if unit.packed:
                    k, v, k_norm = products.pack(unit.k, unit.v, room)
                    unit = unit._replace(k=k, v=v, k_norm=k_norm)
                for block in unit.blocks:
                    _attend(block, unit, spec, buffer, seed)

    tiles.run(work, min(threads, len(units)))


def _attend(block: _Block, unit: _Unit, spec: AttentionSpec, buffer: np.ndarray, seed: int) -> None:
    """Attention of one block of rows, written to its sequence's out and lse.

    Arrays of rows are read and written for all heads of the unit, as they lie in memory; between
    that, tiles are of some heads.
    """
    sequence, heads, rows = unit.sequence, unit.heads_q, block.rows
    shape = size_of(heads), size_of(rows)
    q = np.empty((*shape, spec.head_dim), spec.acc_dtype)
    q.swapaxes(0, 1)[...] = widened(sequence.q[rows, heads], spec.acc_dtype)
    out = np.empty((*shape, spec.head_dim_v), spec.acc_dtype)
    row_sum, shift = np.empty((2, *shape, 1), spec.acc_dtype)
    for tile in unit.tiles():
        part = slice(tile.heads_q.start - heads.start, tile.heads_q.stop - heads.start)
        softmax = _plain if _scores_are_small(q[part], tile, spec) else _online
        call = q[part], out[part], tile, block, spec, buffer, seed
        row_sum[part], shift[part] = softmax(*call)
        if not np.isfinite(out[part]).all():
            # 0 * NaN is NaN: values may have got in that a row does not see. Once more, with care.
            row_sum[part], shift[part] = _online(*call, multiply=matmul_of_nonfinite)
    divisor = np.where(row_sum == 0, 1, row_sum)
    result = sequence.out[rows, heads]
    np.divide(out.swapaxes(0, 1), divisor.swapaxes(0, 1), out=result, casting="same_kind")
    if sequence.lse is not None:
        sequence.lse[heads, rows] = (np.log(row_sum) + shift)[..., 0]


def _scores_are_small(q: np.ndarray, tile: _Unit, spec: AttentionSpec) -> bool:
    """Whether no score of a tile is beyond `SMALL_SCORE`, since ``|q.k| <= |q| |k|``."""
    if tile.k_norm is None or tile.sequence.sinks is not None:
        return False
    if not tile.sequence.scores_are_products(spec):
        return False
    q_norm = math.sqrt(np.vecdot(q, q).max())
    return abs(spec.scale) * q_norm * float(tile.k_norm.max()) <= SMALL_SCORE


def _plain(
    q: np.ndarray,
    out: np.ndarray,
    tile: _Unit,
    block: _Block,
    spec: AttentionSpec,
    buffer: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, float]:
    """Softmax of small scores, which needs no maxima: their exponentials are taken as they are.

    Scores and results are (heads_q, rows, ...) arrays. BLAS sees them as (heads_kv, group * rows,
    ...), so that K and V serve all the query heads of a group at once.

    Parameters
    ----------
    q : numpy.ndarray (heads_q, rows, head_dim)
    out : numpy.ndarray (heads_q, rows, head_dim_v)
        Becomes the sum of values times exponentials.
    tile : _Unit
        The heads.
    buffer : numpy.ndarray
        Room for scores.

    Returns
    -------
    row_sum : numpy.ndarray (heads_q, rows, 1)
        Sums of exponentials.
    shift : numpy.ndarray (heads_q, rows, 1) or float
        What was subtracted from scores.
    """
    sequence, heads, rows = tile.sequence, tile.heads_q, block.rows
    shape, dtype = q.shape[:2], spec.acc_dtype
    stacked = len(tile.k), sequence.group * shape[1]
    q = (q * dtype.type(spec.scale)).reshape(*stacked, -1)
    out[...] = 0
    product = np.empty_like(out)
    row_sum = np.zeros((*shape, 1), dtype)
    for keys in _key_tiles(tile, block, spec):
        s = buffer[: math.prod(shape) * size_of(keys)].reshape(*stacked, -1)
        products.matmul_panels(q, tile.k[:, keys.start // products.PANEL :, :-1], out=s)
        s = s.reshape(*shape, -1)
        np.exp(s, out=s)
        tiles.mask_weights(s, sequence.terms, heads, rows, keys, spec)
        row_sum += np.vecdot(s, np.ones(size_of(keys), dtype))[..., None]
        if spec.dropout:
            s *= dropout.factors(spec, seed, sequence.index, heads, rows, keys)
        s = s.reshape(*stacked, -1)
        matmul(s, tile.v[:, keys], out=product.reshape(*stacked, -1))
        out += product
    return row_sum, 0.0


def _online(
    q: np.ndarray,
    out: np.ndarray,
    tile: _Unit,
    block: _Block,
    spec: AttentionSpec,
    buffer: np.ndarray,
    seed: int,
    multiply: Callable[..., None] = matmul,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of any scores, with the arguments and results of `_plain`.

    From scores a number of their row's is subtracted before they are exponentiated: its maximum
    when it was last looked for. That is good as long as sums stay below `MOST_SUM`, so most key
    tiles need no maxima; and where K has a row of ones, the product with Q subtracts.
    """
    sequence, heads, rows, packed = tile.sequence, tile.heads_q, block.rows, tile.packed
    k, v, dtype, terms = tile.k, tile.v, spec.acc_dtype, sequence.terms
    shape = q.shape[:2]
    stacked = len(k), sequence.group * shape[1]
    # Where more than q·k makes a score, the difference would be rounded at another size.
    in_product = packed and sequence.scores_are_products(spec)
    extended = np.zeros((*shape, spec.head_dim + packed), dtype)
    np.multiply(q, spec.scale, out=extended[..., : spec.head_dim])
    subtrahend = extended[..., spec.head_dim :]
    extended = extended.reshape(*stacked, -1)

    first = sequence.sinks is None  # no row has seen anything
    if first:
        shift = np.zeros((*shape, 1), dtype)
        row_sum = np.zeros_like(shift)
    else:  # the score of a key that comes before all others and has no value
        sinks = np.repeat(sequence.sinks[heads], size_of(rows), axis=1)
        row_sum = (sinks != -np.inf).astype(dtype)
        shift = np.where(sinks == -np.inf, 0, sinks)
    out[...] = 0
    product = out if first else np.empty_like(out)

    def weights(keys: slice, look: bool) -> tuple[np.ndarray, np.ndarray]:
        """Exponentials of scores, and their sums; `look` for maxima first."""
        nonlocal shift, row_sum
        s = buffer[: math.prod(shape) * size_of(keys)].reshape(*stacked, -1)
        if in_product:
            np.multiply(shift, 0 if look else -1, out=subtrahend)
        if packed:
            products.matmul_panels(extended, k[:, keys.start // products.PANEL :], out=s)
        else:
            matmul(extended, widened(k[:, keys], dtype).swapaxes(1, 2), out=s)
        s = s.reshape(*shape, -1)
        if spec.softcap:
            tiles.cap_scores(s, spec.softcap)
        tiles.modify_scores(s, terms, heads, rows, keys, spec)
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
        return s, np.vecdot(s, np.ones(size_of(keys), dtype))[..., None]

    settled = False  # whether each row has seen a key
    for keys in _key_tiles(tile, block, spec, few_first=True):
        s, added = weights(keys, look=not settled)
        if settled and not (added <= MOST_SUM).all():
            s, added = weights(keys, look=True)
        row_sum = added if first else row_sum + added
        if not settled and keys.stop < block.keys.stop:
            settled = bool((row_sum > 0).all())
        if spec.dropout:
            s *= dropout.factors(spec, seed, sequence.index, heads, rows, keys)
        s = s.reshape(*stacked, -1)
        multiply(s, widened(v[:, keys], dtype), out=product.reshape(*stacked, -1))
        if first:
            first, product = False, np.empty_like(out) if keys.stop < block.keys.stop else out
        else:
            out += product
    return row_sum, shift


def _key_tiles(
    tile: _Unit, block: _Block, spec: AttentionSpec, *, few_first: bool = False
) -> Iterator[slice]:
    """The keys of a block, some at a time: `few_first` of many, which tell how large scores are."""
    step = tiles.TILE_SCORES // (size_of(tile.heads_q) * size_of(block.rows))
    begin, end = block.keys.start, block.keys.stop
    if begin == end:
        return
    if tile.packed:  # whole panels
        panel = products.PANEL
        begin = begin // panel * panel
        step = max(1, step // panel) * panel
        if few_first and end - begin > 4 * panel:
            yield slice(begin, begin + panel)
            begin += panel
    elif not tile.k.dtype == tile.v.dtype == spec.acc_dtype:
        features = len(tile.k) * max(spec.head_dim, spec.head_dim_v)
        step = max(1, min(step, WIDENED // features))
    for j in range(begin, end, step):
        yield slice(j, min(j + step, end))
