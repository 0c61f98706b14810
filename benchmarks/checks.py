"""What attention gives by its definition, for some rows of a call that is too large to compute all
of it twice. Arrays are NumPy's or CuPy's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import timing

ROWS = 16  # of a call
TOLERANCE = 2e-2  # of a difference, in norms of the result


class Row(NamedTuple):
    """A query and the keys that it sees."""

    index: tuple[int, ...]  # of its result in out
    q: Any  # (head_dim,)
    k: Any  # (keys, head_dim)
    v: Any  # (keys, head_dim)


def attend(row: Row) -> Any:
    """The result of one row, in float32."""
    q, k, v = (array.astype(np.float32) for array in row[1:])
    scores = k @ q / np.float32(np.sqrt(len(q)))
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


def largest_difference(out: Any, rows: Iterable[Row]) -> float:
    """The largest difference of a row of `out` from its definition, in norms of the latter; NaN is
    infinite."""
    largest = 0.0
    for row in rows:
        wanted = attend(row)
        difference = out[row.index].astype(np.float32) - wanted
        relative = float(np.sqrt((difference**2).sum() / (wanted**2).sum()))
        largest = max(largest, relative if relative == relative else float("inf"))
    return largest


def agreeing(
    out: Any,
    others: Iterable[timing.Contestant],
    of_peer: Callable[[Any], Any],
    left_out: dict[str, str],
) -> list[timing.Contestant]:
    """Those whose result, by ``of_peer(result)`` a float32 array of as many numbers, is `out`. The
    names of the others go into `left_out`, and why: a wrong result, or an error."""
    found = []
    for peer in others:
        try:
            theirs = of_peer(peer.run(1)).reshape(out.shape)
            difference = float((((out - theirs) ** 2).sum() / (out**2).sum()) ** 0.5)
        except Exception as error:
            left_out[peer.name] = timing.reason(error)
            continue
        if difference < TOLERANCE:
            found.append(peer)
        else:
            left_out[peer.name] = f"differs by {difference:.1e}"
    return found


def rows_of_batch(
    rng: np.random.Generator,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    lengths: np.ndarray | None = None,
) -> Iterator[Row]:
    """Some rows of q (batch, queries, heads, head_dim), over the first `lengths` keys of each
    sequence or all; under a causal mask the last query sees all of these."""
    batch, queries, heads, _ = q.shape
    group = heads // k.shape[2]
    for _ in range(ROWS):
        b, i, h = (int(rng.integers(n)) for n in (batch, queries, heads))
        keys = k.shape[1] if lengths is None else int(lengths[b])
        seen = max(0, keys - (queries - 1 - i)) if causal else keys
        if seen:
            yield Row((b, i, h), q[b, i, h], k[b, :seen, h // group], v[b, :seen, h // group])


def rows_of_varlen(
    rng: np.random.Generator,
    q: Any,
    k: Any,
    v: Any,
    lengths_q: np.ndarray,
    lengths_k: np.ndarray,
    *,
    causal: bool,
) -> Iterator[Row]:
    """Some rows of q (total, heads, head_dim) whose sequences have these lengths."""
    heads = q.shape[1]
    group = heads // k.shape[1]
    begin_q, begin_k = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths_q, lengths_k))
    for _ in range(ROWS):
        b, h = int(rng.integers(len(lengths_q))), int(rng.integers(heads))
        if lengths_q[b] == 0:
            continue
        i = int(rng.integers(lengths_q[b]))
        seen = int(lengths_k[b])
        if causal:
            seen = max(0, seen - (int(lengths_q[b]) - 1 - i))
        keys = slice(int(begin_k[b]), int(begin_k[b]) + seen)
        if seen:
            row = int(begin_q[b]) + i
            yield Row((row, h), q[row, h], k[keys, h // group], v[keys, h // group])
