"""The samplers in NumPy: what each of them means, computed in float64.

A row is *bad* if it holds a NaN or +inf: its results are NaN and its token is -1. A row of nothing
but -inf is *empty*: its probabilities are 0 and its token is -1.

Rows are processed in chunks, whose float64 copies stay in the processor's cache, and only as many
tokens are sorted as the filters can keep.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cuattn._philox import uniform, uniform_at
from cuattn._sampling_types import Drafts, Filters, Penalties

#: The stream of the uniform numbers that accept or reject draft tokens; tokens are drawn from 0.
ACCEPT_STREAM = 1

_CHUNK_TOKENS = 1 << 17  # tokens of a chunk of rows: 1 MiB of float64
_FIRST_RANKS = 256  # how many ranks of a row top-p looks at first
_SORTED_VOCAB = 1024  # rows up to this long are sorted whole


def greedy(logits: np.ndarray) -> np.ndarray:
    """Index of the largest logit, the first of equals."""
    logits = logits.astype(np.float32, copy=False)
    best = np.argmax(logits, axis=-1)  # a NaN counts as the largest
    largest = np.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    return np.where(np.isfinite(largest), best, -1).astype(np.int32)


def softmax(logits: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """Probabilities (rows, vocab) as float32."""
    result = np.empty(logits.shape, np.float32)
    for rows in _chunks(logits):
        x, top = _shifted(logits[rows])
        cold = temperature[rows] == 0
        first = np.argmax(x[cold], axis=1)
        x /= np.where(cold, 1.0, temperature[rows].astype(np.float64))[:, None]
        np.exp(x, out=x)
        total = x.sum(axis=1, keepdims=True)
        x *= 1 / np.where(total == 0, 1, total)
        x[cold] = np.arange(x.shape[1]) == first[:, None]
        x[top == -np.inf] = 0
        x[~(top < np.inf)] = np.nan
        with np.errstate(under="ignore"):  # a float32 is 0 where the probability is smaller
            result[rows] = x
    return result


def top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest and where they are; a bad row gives NaN and -1."""
    order = _ranked(logits.astype(np.float32, copy=False), k)
    values = np.take_along_axis(logits, order, axis=1)
    bad = _bad(logits)
    values[bad] = np.nan
    order[bad] = -1
    return values, order.astype(np.int32)


def kept(logits: np.ndarray, filters: Filters) -> np.ndarray:
    """Which tokens the filters leave, (rows, vocab)."""
    vocab = logits.shape[1]
    cold = filters.temperature == 0
    scaled, top = _shifted(logits)
    scaled /= np.where(cold, 1.0, filters.temperature.astype(np.float64))[:, None]
    keep = np.isfinite(logits.astype(np.float32, copy=False)) & (top < np.inf)[:, None]
    if filters.min_p.any():
        with np.errstate(divide="ignore"):
            keep &= scaled >= np.log(filters.min_p.astype(np.float64))[:, None]
    count = np.where(cold, 1, filters.top_k)
    ranked = (count < vocab) | (filters.top_p < 1) | (filters.typical_p < 1)
    if ranked.any():
        some = Filters(*(values[ranked] for values in filters))._replace(top_k=count[ranked])
        wide = logits[ranked].astype(np.float32, copy=False)
        keep[ranked] = _kept_by_rank(wide, scaled[ranked], keep[ranked], some)
    return keep


def _kept_by_rank(
    logits: np.ndarray, scaled: np.ndarray, keep: np.ndarray, filters: Filters
) -> np.ndarray:
    """What top-k, top-p and typical-p leave of the tokens that min-p keeps.

    `scaled` are the logits less the row's largest, over temperature. Top-p counts the probability
    of what top-k leaves, whatever min-p keeps of it.
    """
    vocab = logits.shape[1]
    typical = filters.typical_p < 1
    ranks = min(vocab, max(_FIRST_RANKS, filters.top_k[filters.top_k < vocab].max(initial=0)))
    if vocab <= _SORTED_VOCAB or typical.any():
        ranks = vocab
    total = np.exp(scaled).sum(axis=1) if ranks < vocab else None
    while True:
        order = _ranked(logits, ranks)
        some = np.take_along_axis(scaled, order, axis=1)  # descending from 0
        within = np.isfinite(some) & (np.arange(ranks) < filters.top_k[:, None])
        p = np.where(within, np.exp(some), 0)
        sums = p.sum(axis=1)
        if total is not None:
            sums = np.where(filters.top_k > ranks, total, sums)
        within &= _shortest_run(p, filters.top_p, sums)
        # Where the last of these ranks is kept, the run may go on behind it.
        if ranks == vocab or not (within[:, -1] & (filters.top_k > ranks)).any():
            break
        ranks = min(vocab, 8 * ranks)
    within &= np.take_along_axis(keep, order, axis=1)

    if typical.any():
        left = p[typical] * within[typical]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.sum(np.where(left > 0, some[typical], 0) * left, axis=1) / left.sum(axis=1)
            distance = np.abs(some[typical] - mean[:, None])  # = |-log p - entropy|
        distance[~within[typical]] = np.inf
        nearest = np.argsort(distance, axis=1, kind="stable")
        left = np.take_along_axis(left, nearest, axis=1)
        chosen = _shortest_run(left, filters.typical_p[typical], left.sum(axis=1))
        among = np.zeros_like(chosen)
        np.put_along_axis(among, nearest, chosen, axis=1)
        within[typical] &= among

    result = np.zeros_like(keep)
    np.put_along_axis(result, order, within, axis=1)
    return result


def filter_logits(logits: np.ndarray, filters: Filters) -> np.ndarray:
    """Logits over temperature where kept, else -inf, as float32; a bad row is NaN."""
    result = np.empty(logits.shape, np.float32)
    for rows in _chunks(logits):
        some = Filters(*(values[rows] for values in filters))
        keep = kept(logits[rows], some)
        result[rows] = np.where(keep, _over_temperature(logits[rows], some.temperature), -np.inf)
    result[_bad(logits)] = np.nan
    return result


def sample(
    logits: np.ndarray,
    filters: Filters,
    seed: np.ndarray,
    offset: np.ndarray,
    penalties: Penalties | None = None,
) -> np.ndarray:
    """One token a row: the kept one with the largest logit / temperature + Gumbel noise."""
    if penalties is not None:
        logits = apply_penalties(logits, penalties)
    if not filters.temperature.any():
        return greedy(logits)
    tokens = np.empty(len(logits), np.int32)
    for rows in _chunks(logits):
        some = Filters(*(values[rows] for values in filters))
        keep = kept(logits[rows], some)
        scaled = np.where(keep, _over_temperature(logits[rows], some.temperature), -np.inf)
        tokens[rows] = _gumbel_max(scaled, seed[rows], offset[rows])
    tokens[_bad(logits)] = -1
    return tokens


def apply_penalties(logits: np.ndarray, penalties: Penalties) -> np.ndarray:
    """Logits after each row's penalties, of the dtype of `logits`."""
    tokens, repetition, frequency, presence, bias, allowed = penalties
    rows, vocab = logits.shape
    result = logits.astype(np.float64)
    row, place = np.nonzero((tokens >= 0) & (tokens < vocab))
    there, count = np.unique(row * vocab + tokens[row, place], return_counts=True)
    row, token = np.divmod(there, vocab)
    x = result[row, token]
    factor = repetition.astype(np.float64)[row]
    x = np.where(x > 0, x / factor, x * factor)
    result[row, token] = x - frequency.astype(np.float64)[row] * count - presence[row]
    if isinstance(bias, tuple):
        where, token, value = bias
        inside = (where >= 0) & (where < rows) & (token >= 0) & (token < vocab)
        np.add.at(result, (where[inside], token[inside]), value[inside].astype(np.float64))
    elif bias is not None:
        result += bias
    if allowed is not None:
        if allowed.dtype != bool:
            allowed = _unpack(allowed)[:, :vocab]
        result = np.where(allowed, result, -np.inf)
    with np.errstate(over="ignore"):  # beyond the dtype's range a logit is infinite
        return result.astype(logits.dtype)


def _unpack(words: np.ndarray) -> np.ndarray:
    """Bits of 32-bit words, the lowest first."""
    bits = words.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(len(words), 32 * words.shape[1]).astype(bool)


def speculative_sample(
    given: Drafts, seed: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Accept draft tokens along a path from the root and add one token of the target's own.

    `draft_probs` (rows, drafts, vocab) has, for each draft token, what it was drawn from, and
    `target_probs` (rows, drafts + 1, vocab) the target after the root and then after each draft
    token. In a chain the parent of a token is the one before it; `parents` (rows, drafts), -1 for
    the root, gives a tree.
    """
    draft_tokens, parents, draft_probs, target_probs = given
    rows, drafts = draft_tokens.shape
    vocab = target_probs.shape[2]
    accept = uniform(seed, offset, max(drafts, 1), ACCEPT_STREAM)
    tokens = np.full((rows, drafts + 1), -1, np.int32)
    accepted = np.zeros(rows, np.int32)
    if parents is None:
        parents = np.broadcast_to(np.arange(-1, drafts - 1), (rows, drafts))
    residuals = np.empty((rows, vocab))
    for row in range(rows):
        node = -1
        left = target_probs[row, 0].astype(np.float64)
        for draft in range(drafts):
            token = draft_tokens[row, draft]
            if parents[row, draft] != node or not 0 <= token < vocab:
                continue
            proposal = draft_probs[row, draft].astype(np.float64)
            if accept[row, draft] * proposal[token] < left[token]:
                tokens[row, accepted[row]] = token
                accepted[row] += 1
                node = draft
                left = target_probs[row, draft + 1].astype(np.float64)
                continue
            rest = np.maximum(left - proposal, 0)
            if rest.sum() > 0:
                left = rest / rest.sum()
        residuals[row] = left
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log(residuals)
    last = _gumbel_max(scaled, seed, offset)
    last[~np.isfinite(residuals).all(axis=1)] = -1
    tokens[np.arange(rows), accepted] = last
    return tokens, accepted


def logprobs(
    logits: np.ndarray, tokens: np.ndarray | None, top_n: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Log-probabilities of chosen tokens, and of the `top_n` likeliest with their indices."""
    log_sum = np.empty((len(logits), 1))
    for rows in _chunks(logits):
        log_sum[rows] = _log_sum(logits[rows])

    def at(indices: np.ndarray) -> np.ndarray:
        x = np.take_along_axis(logits, indices, axis=1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.where(log_sum == -np.inf, -np.inf, x - log_sum).astype(np.float32)

    chosen = None
    if tokens is not None:
        inside = (tokens >= 0) & (tokens < logits.shape[1])
        chosen = np.where(inside, at(np.where(inside, tokens, 0)), np.float32(np.nan))
    if not top_n:
        return chosen, None, None
    _, indices = top_k(logits, top_n)
    return chosen, at(np.maximum(indices, 0)), indices


def beam_step(logits: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best continuations of each row's beams: scores, tokens, parents, all (rows, beams)."""
    rows, beams, vocab = logits.shape
    flat = logits.reshape(rows * beams, vocab)
    with np.errstate(invalid="ignore"):
        total = flat - _log_sum(flat) + scores.astype(np.float64).reshape(-1, 1)
    total[np.isnan(total)] = -np.inf
    total = total.reshape(rows, beams * vocab)
    order = _ranked(total, beams)
    best = np.take_along_axis(total, order, axis=1)
    dead = best == -np.inf
    tokens = np.where(dead, -1, order % vocab).astype(np.int32)
    return best.astype(np.float32), tokens, np.where(dead, -1, order // vocab).astype(np.int32)


def _chunks(logits: np.ndarray) -> Iterator[slice]:
    """Chunks of rows, at least one row each."""
    step = max(1, _CHUNK_TOKENS // logits.shape[1])
    for begin in range(0, len(logits), step):
        yield slice(begin, begin + step)


def _bad(logits: np.ndarray) -> np.ndarray:
    return ~(logits.astype(np.float32, copy=False).max(axis=1) < np.inf)


def _shifted(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits less the largest of their row, which is 0 for this in an empty or a bad row; and the
    largest."""
    x = logits.astype(np.float64)
    top = x.max(axis=1)
    with np.errstate(invalid="ignore"):
        x -= np.where(np.isfinite(top), top, 0)[:, None]
    x[~(top < np.inf)] = -np.inf
    return x, top


def _over_temperature(logits: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    return logits / np.where(temperature == 0, 1.0, temperature.astype(np.float64))[:, None]


def _ranked(x: np.ndarray, count: int) -> np.ndarray:
    """Indices (rows, count) of the largest, descending, equals by index; any for a row with a
    NaN."""
    rows, vocab = x.shape
    if vocab <= _SORTED_VOCAB or count > vocab // 8:
        return np.argsort(-x, axis=1, kind="stable")[:, :count]
    order = np.zeros((rows, count), np.int64)
    for row in range(rows):
        least = np.partition(x[row], vocab - count)[vocab - count]
        above = np.flatnonzero(x[row] > least)
        chosen = np.concatenate([above, np.flatnonzero(x[row] == least)[: count - len(above)]])
        order[row, : len(chosen)] = chosen[np.argsort(-x[row, chosen], kind="stable")]
    return order


def _shortest_run(p: np.ndarray, share: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The shortest prefix of each row that holds `share` of `total`; all of it for a share of 1."""
    before = np.cumsum(p, axis=1) - p
    target = share.astype(np.float64) * total
    first = np.arange(p.shape[1]) == 0
    return (before < target[:, None]) | (share >= 1)[:, None] | first


def _gumbel_max(scaled: np.ndarray, seed: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """The token with the largest score plus Gumbel noise: a draw from the softmax of the scores; -1
    for a row of nothing but -inf."""
    there = scaled > -np.inf
    row, token = np.nonzero(there)
    if 8 * len(row) < scaled.size:  # few tokens may win: no others need noise
        u = uniform_at(seed[row], offset[row], token)
        keys = np.full(scaled.shape, -np.inf)
        keys[row, token] = scaled[row, token] - np.log(-np.log1p(-u.astype(np.float64)))
    else:
        u = uniform(seed, offset, scaled.shape[1]).astype(np.float64)
        keys = scaled - np.log(-np.log1p(-u))
    return np.where(there.any(axis=1), np.argmax(keys, axis=1), -1).astype(np.int32)


def _log_sum(logits: np.ndarray) -> np.ndarray:
    """The logarithm of the sum of exponentials, (rows, 1); -inf for an empty row, NaN for a bad
    one."""
    x, top = _shifted(logits)
    with np.errstate(divide="ignore"):
        result = np.log(np.exp(x, out=x).sum(axis=1)) + np.where(np.isfinite(top), top, 0)
    result[~(top < np.inf)] = np.nan
    return result[:, None]
