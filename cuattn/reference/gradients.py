"""What the gradients of attention mean, in NumPy: tiles of queries against tiles of keys, so that
memory stays linear.

With ``p = exp(score - lse)``, ``out = (p * z) @ v`` (z: what dropout multiplies by) and ``delta =
sum(dout * out) - dlse``:

``dv = (p * z).T @ dout``, ``dx = p * (z * (dout @ v.T) - delta)``, ``ds = dx * (1 - tanh**2)`` with
a softcap and else ``dx``, ``dq = scale * ds @ k``, ``dk = scale * ds.T @ q``. ``dbias`` is dx
summed over the axes along which bias was broadcast, ``dalibi`` the sum of ``-distance * dx`` and
``dsinks`` that of ``-exp(sink - lse) * delta`` (Dao, "FlashAttention-2", 2023, algorithm 2).

A key that a query does not see, and a row that sees no key, has p = 0 and passes nothing on,
whatever lies there. Every sum has one order, whatever the number of threads.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any, NamedTuple

import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.reference import attention, dropout, tiles
from cuattn.reference.products import matmul, matmul_of_nonfinite
from cuattn.reference.tiles import ScoreTerms, size_of


class _Sequence(NamedTuple):
    """One sequence of the batch: its number, its lengths and score terms, and where its queries
    and its keys lie in arrays (seqlen, heads, head_dim)."""

    index: int
    terms: ScoreTerms
    queries: Any  # index of (seqlen_q, heads, head_dim) in an array such as q
    keys: Any  # … of (seqlen_k, heads, head_dim) in one such as k
    rows: Any  # … of (heads_q, seqlen_q) in lse

    def tile_of(self, array: np.ndarray, rows: slice, heads: slice) -> np.ndarray:
        """(heads, rows, head_dim) of an array such as q."""
        return array[self.queries][rows, heads].swapaxes(0, 1)


class _Unit(NamedTuple):
    """Some key heads of a sequence with all their query heads: no other unit adds to the gradients
    of their queries, keys and values."""

    sequence: _Sequence
    heads_kv: slice
    heads_q: slice
    positions: int  # queries of a tile


def _sequences(
    spec: AttentionSpec,
    bias: np.ndarray | None,
    mask: np.ndarray | None,
    alibi_slopes: np.ndarray | None,
    cu_seqlens_q: np.ndarray | None,
    cu_seqlens_k: np.ndarray | None,
) -> list[_Sequence]:
    places: list[tuple[Any, Any, Any]]
    if spec.rows == "ragged":
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        ranges = [[slice(*pair) for pair in itertools.pairwise(b)] for b in bounds]
        places = [(q, k, (slice(None), q)) for q, k in zip(*ranges, strict=True)]
        lengths = [(size_of(q), size_of(k)) for q, k, _ in places]
    else:
        places = [(b, b, b) for b in range(spec.batch)]
        lengths = [(spec.seqlen_q, spec.seqlen_k)] * spec.batch
    terms = tiles.score_terms(spec, lengths, bias, mask, alibi_slopes)
    return [_Sequence(b, terms[b], *places[b]) for b in range(spec.batch)]


def _units(sequence: _Sequence, spec: AttentionSpec) -> list[_Unit]:
    terms = sequence.terms
    group = spec.heads_q // spec.heads_kv
    rows_of_heads = tiles.TILE_SCORES // max(1, min(terms.seqlen_k, tiles.TILE_KEYS))
    positions = max(1, min(terms.seqlen_q, rows_of_heads // max(1, group)))
    heads = max(1, min(spec.heads_kv, rows_of_heads // (positions * max(1, group))))
    return [
        _Unit(sequence, slice(h, end), slice(h * group, end * group), positions)
        for h in range(0, spec.heads_kv, heads)
        for end in [min(h + heads, spec.heads_kv)]
    ]


def _tiles(unit: _Unit, spec: AttentionSpec) -> list[tuple[slice, list[slice]]]:
    """The query tiles of a unit, and the key tiles of each."""
    seqlen_q = unit.sequence.terms.seqlen_q
    found = []
    for i in range(0, seqlen_q, unit.positions):
        rows = slice(i, min(i + unit.positions, seqlen_q))
        step = tiles.TILE_SCORES // (size_of(unit.heads_q) * size_of(rows))
        step = max(1, min(step, tiles.TILE_KEYS))
        seen = tiles.visible_keys(unit.sequence.terms, rows, spec)
        found.append(
            (rows, [slice(j, min(j + step, seen.stop)) for j in range(seen.start, seen.stop, step)])
        )
    return found


def _products(units: list[_Unit], spec: AttentionSpec) -> int:
    """Multiplications of one product with all of their scores."""
    dims = spec.head_dim + spec.head_dim_v
    return dims * sum(
        size_of(unit.heads_q) * size_of(rows) * sum(map(size_of, keys))
        for unit in units
        for rows, keys in _tiles(unit, spec)
    )


def _heads_first(array: np.ndarray, heads: slice, dtype: np.dtype) -> np.ndarray:
    """(seqlen, heads, head_dim) -> (heads, seqlen, head_dim), contiguous."""
    return np.ascontiguousarray(array[:, heads].swapaxes(0, 1), dtype)


def _finite(*arrays: np.ndarray) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _probabilities(
    s: np.ndarray,
    unit: _Unit,
    rows: slice,
    keys: slice,
    spec: AttentionSpec,
    lse: np.ndarray,
) -> np.ndarray | None:
    """Turn ``scale * q.k`` of a tile, (heads_q, rows, keys), into ``exp(score - lse)``, in place.
    Return the softcap's derivative, if there is one."""
    derivative = None
    if spec.softcap:
        s /= spec.softcap
        np.tanh(s, out=s)
        derivative = 1 - s * s
        s *= spec.softcap
    tiles.modify_scores(s, unit.sequence.terms, unit.heads_q, rows, keys, spec)
    s -= np.where(lse == -np.inf, np.inf, lse)  # a row that sees no key has p = 0
    np.exp(s, out=s)
    return derivative


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    spec: AttentionSpec,
    *,
    dlse: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seed: int = 0,
    deterministic: bool = False,
    grad_bias: bool = False,
    grad_alibi: bool = False,
) -> tuple[np.ndarray | None, ...]:
    """Gradients of NumPy arrays that :mod:`cuattn.gradients` has checked.

    Parameters
    ----------
    dout, q, k, v, out, lse : numpy.ndarray
        (batch, seqlen, heads, head_dim), or (total, heads, head_dim) for varlen; lse of
        ``spec.lse_shape``.
    spec : AttentionSpec
        The forward call.
    dlse, bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seed, grad_bias, grad_alibi
        As in :func:`cuattn.flash_attention_backward`.
    deterministic : bool
        Every result is, whatever is asked for.

    Returns
    -------
    tuple of numpy.ndarray or None
        dq, dk, dv, dbias, dsinks, dalibi.
    """
    dtype = spec.acc_dtype
    grads = _Gradients(
        dq=np.zeros(q.shape, spec.dtype),
        dk=np.zeros(k.shape, spec.dtype),
        dv=np.zeros(v.shape, spec.dtype),
        dbias=None,
        dsinks=None if sinks is None else np.zeros((spec.batch, spec.heads_q), dtype),
        dalibi=np.zeros((spec.batch, spec.heads_q), dtype) if grad_alibi else None,
    )
    if grad_bias:
        assert bias is not None
        grads = grads._replace(dbias=np.zeros((1,) * (4 - bias.ndim) + bias.shape, dtype))
    sequences = _sequences(spec, bias, mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    units = [unit for sequence in sequences for unit in _units(sequence, spec)] if q.size else []
    # Units that add to the same gradient of bias take turns, in order.
    batches: dict[Any, list[_Unit]] = collections.defaultdict(list)
    for unit in units:
        key: tuple[int, int] = unit.sequence.index, unit.heads_kv.start
        if grads.dbias is not None:
            key = tuple(i if n > 1 else 0 for i, n in zip(key, grads.dbias.shape, strict=False))
        batches[key].append(unit)
    queue = collections.deque(batches.values())
    finite = _finite(q, k, v, dout)
    sinks = None if sinks is None else sinks.astype(dtype)
    lse = lse.astype(dtype, copy=False)

    def work() -> None:
        buffers = np.empty((2, tiles.TILE_SCORES), dtype)
        with np.errstate(all="ignore"):
            while True:
                try:
                    shared = queue.popleft()
                except IndexError:
                    return
                for unit in shared:
                    _differentiate(
                        unit, spec, (dout, q, k, v, out, lse, dlse, sinks), grads, buffers, seed,
                        finite=finite,
                    )  # fmt: skip

    tiles.run(work, min(tiles.threads_for(2 * _products(units, spec)), len(queue)))

    dbias, dsinks, dalibi = grads.dbias, grads.dsinks, grads.dalibi
    if dbias is not None and bias is not None:
        dbias = dbias.reshape(bias.shape).astype(bias.dtype, copy=False)
    if dsinks is not None:
        dsinks = dsinks.sum(axis=0)
    if dalibi is not None and alibi_slopes is not None:
        dalibi = dalibi.sum(axis=0) if alibi_slopes.ndim == 1 else dalibi
        dalibi = dalibi.astype(alibi_slopes.dtype, copy=False)
    return grads.dq, grads.dk, grads.dv, dbias, dsinks, dalibi


class _Gradients(NamedTuple):
    """What units write to: dbias with four axes, dsinks and dalibi (batch, heads_q)."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None
    dalibi: np.ndarray | None


def _differentiate(
    unit: _Unit,
    spec: AttentionSpec,
    inputs: tuple,
    grads: _Gradients,
    buffers: np.ndarray,
    seed: int,
    *,
    finite: bool,
) -> None:
    """All gradients of one unit.

    Scores are (heads_q, rows, keys) arrays. BLAS sees them as (heads_kv, group * rows, ...), so
    that K and V serve all the query heads of a group at once.
    """
    dout, q, k, v, out, lse, dlse, sinks = inputs
    sequence, heads = unit.sequence, unit.heads_q
    dtype = spec.acc_dtype
    k, v = (_heads_first(array[sequence.keys], unit.heads_kv, dtype) for array in (k, v))
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    # What is 0 where p is 0 must not meet NaN or infinity; where p is not 0, ds passes them on.
    k_seen = k if finite else np.where(np.isfinite(k), k, 0)
    stack, num_heads = len(k), size_of(heads)

    for rows, key_tiles in _tiles(unit, spec):
        num_rows = size_of(rows)
        stacked = stack, num_heads // stack * num_rows
        q_tile = np.multiply(sequence.tile_of(q, rows, heads), spec.scale, dtype=dtype, order="C")
        dout_tile = np.ascontiguousarray(sequence.tile_of(dout, rows, heads), dtype)
        lse_tile = lse[sequence.rows][heads, rows, None]
        delta = np.vecdot(sequence.tile_of(out, rows, heads).astype(dtype), dout_tile)[..., None]
        if dlse is not None:
            delta -= dlse[sequence.rows][heads, rows, None]
        if grads.dsinks is not None:
            p = np.exp(sinks[heads, None, None] - np.where(lse_tile == -np.inf, np.inf, lse_tile))
            grads.dsinks[sequence.index, heads] -= np.where(p == 0, 0, p * delta).sum(axis=(1, 2))
        q_tile = q_tile.reshape(*stacked, -1)
        dout_tile = dout_tile.reshape(*stacked, -1)
        q_seen = q_tile if finite else np.where(np.isfinite(q_tile), q_tile, 0)
        dq_tile = np.zeros_like(q_tile)
        for keys in key_tiles:
            shape = num_heads, num_rows, size_of(keys)
            p, dx = (buffer[: np.prod(shape)].reshape(shape) for buffer in buffers)
            flat_p, flat_dx = (array.reshape(*stacked, -1) for array in (p, dx))
            matmul(q_tile, k[:, keys].swapaxes(1, 2), out=flat_p)
            derivative = _probabilities(p, unit, rows, keys, spec, lse_tile)
            matmul(dout_tile, v[:, keys].swapaxes(1, 2), out=flat_dx)
            if spec.dropout:
                z = dropout.factors(spec, seed, sequence.index, heads, rows, keys)
                dx *= z
            dx -= delta
            dx *= p
            if not finite:
                dx[p == 0] = 0
            if grads.dbias is not None:
                _add_summed(grads.dbias, sequence.index, (heads, rows, keys), dx)
            if grads.dalibi is not None:
                distance = tiles.alibi_distance(sequence.terms, rows, keys, dtype)
                grads.dalibi[sequence.index, heads] -= (dx * distance).sum(axis=(1, 2))
            if derivative is not None:
                dx *= derivative
                if not finite:
                    dx[p == 0] = 0
            if spec.dropout:
                p *= z
            product = np.empty((stack, size_of(keys), v.shape[-1]), dtype)
            multiply = matmul if finite else matmul_of_nonfinite
            multiply(flat_p.swapaxes(1, 2), dout_tile, out=product)
            dv[:, keys] += product
            product = np.empty((stack, size_of(keys), k.shape[-1]), dtype)
            matmul(flat_dx.swapaxes(1, 2), q_seen, out=product)
            dk[:, keys] += product
            product = np.empty_like(dq_tile)
            matmul(flat_dx, k_seen[:, keys], out=product)
            dq_tile += product
        dq_tile *= spec.scale
        dq = grads.dq[sequence.queries]
        dq[rows, heads] = dq_tile.reshape(num_heads, num_rows, -1).swapaxes(0, 1)
    grads.dk[sequence.keys][:, unit.heads_kv] = dk.swapaxes(0, 1)
    grads.dv[sequence.keys][:, unit.heads_kv] = dv.swapaxes(0, 1)


def _add_summed(total: np.ndarray, index: int, part: tuple[slice, ...], values: np.ndarray) -> None:
    """Add `values`, (heads, rows, keys) of sequence `index`, to a sum in which axes of length 1
    stand for all of them."""
    places = (slice(index, index + 1), *part)
    broadcast = [axis for axis, n in enumerate(total.shape) if n == 1]
    target = tuple(slice(None) if axis in broadcast else at for axis, at in enumerate(places))
    summed = tuple(axis - 1 for axis in broadcast if axis > 0)
    total[target] += values.sum(axis=summed, keepdims=True)


def jvp(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    spec: AttentionSpec,
    *,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The result, and its derivative in the direction (dq, dk, dv).

    With ``s' = scale * (q'.k + q.k') * (1 - tanh**2)`` and ``mu = sum(p * s')`` of each row,
    ``out' = (p * z) @ v' + (p * z * s') @ v - mu * out``.

    Parameters as in :func:`backward`; returns out and dout.
    """
    dtype = spec.acc_dtype
    terms = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes}
    out, lse = attention.forward(q, k, v, spec, **terms, sinks=sinks, seed=seed, return_lse=True)
    dout = np.zeros(spec.out_shape, spec.dtype)
    assert lse is not None
    sequences = _sequences(spec, **terms, cu_seqlens_q=None, cu_seqlens_k=None)
    units = [unit for sequence in sequences for unit in _units(sequence, spec)] if q.size else []
    queue = collections.deque(units)
    finite = _finite(q, k, v, dq, dk, dv)

    def work() -> None:
        buffers = np.empty((3, tiles.TILE_SCORES), dtype)
        with np.errstate(all="ignore"):
            while True:
                try:
                    unit = queue.popleft()
                except IndexError:
                    return
                inputs = (q, k, v, dq, dk, dv, out, lse)
                _push_forward(unit, spec, inputs, dout, buffers, seed, finite=finite)

    tiles.run(work, min(tiles.threads_for(2 * _products(units, spec)), len(queue)))
    return out, dout


def _push_forward(
    unit: _Unit,
    spec: AttentionSpec,
    inputs: tuple,
    result: np.ndarray,
    buffers: np.ndarray,
    seed: int,
    *,
    finite: bool,
) -> None:
    """The derivative of one unit's rows of out."""
    q, k, v, dq, dk, dv, out, lse = inputs
    sequence, heads = unit.sequence, unit.heads_q
    dtype = spec.acc_dtype
    k, dk, v, dv = (
        _heads_first(array[sequence.keys], unit.heads_kv, dtype) for array in (k, dk, v, dv)
    )
    v_seen = v if finite else np.where(np.isfinite(v), v, 0)
    stack, num_heads = len(k), size_of(heads)
    for rows, key_tiles in _tiles(unit, spec):
        num_rows = size_of(rows)
        stacked = stack, num_heads // stack * num_rows
        q_tile, dq_tile = (
            np.multiply(
                sequence.tile_of(array, rows, heads), spec.scale, dtype=dtype, order="C"
            ).reshape(*stacked, -1)
            for array in (q, dq)
        )
        lse_tile = lse[sequence.rows][heads, rows, None]
        total = np.zeros((*stacked, v.shape[-1]), dtype)
        product = np.empty_like(total)
        mean = np.zeros((num_heads, num_rows, 1), dtype)
        for keys in key_tiles:
            shape = num_heads, num_rows, size_of(keys)
            p, ds, more = (buffer[: np.prod(shape)].reshape(shape) for buffer in buffers)
            flat_p, flat_ds, flat_more = (a.reshape(*stacked, -1) for a in (p, ds, more))
            matmul(q_tile, k[:, keys].swapaxes(1, 2), out=flat_p)
            derivative = _probabilities(p, unit, rows, keys, spec, lse_tile)
            matmul(dq_tile, k[:, keys].swapaxes(1, 2), out=flat_ds)
            matmul(q_tile, dk[:, keys].swapaxes(1, 2), out=flat_more)
            ds += more
            if derivative is not None:
                ds *= derivative
            ds *= p
            if not finite:
                ds[p == 0] = 0
            mean += ds.sum(axis=-1, keepdims=True)
            if spec.dropout:
                z = dropout.factors(spec, seed, sequence.index, heads, rows, keys)
                p *= z
                ds *= z
            multiply = matmul if finite else matmul_of_nonfinite
            multiply(flat_p, dv[:, keys], out=product)
            total += product
            matmul(flat_ds, v_seen[:, keys], out=product)
            total += product
        total = total.reshape(num_heads, num_rows, -1)
        total -= mean * sequence.tile_of(out, rows, heads).astype(dtype)
        result[sequence.queries][rows, heads] = total.swapaxes(0, 1)
