"""From logits to tokens, in NumPy and float64.

A row is *bad* if it holds a NaN or +inf: its results are NaN and its token is -1. A row of nothing
but -inf is *empty*: its probabilities are 0 and its token is -1.
"""

from __future__ import annotations

import numpy as np

from cuattn._philox import uniform
from cuattn._sampling_types import Drafts, Filters, Penalties

#: Of the uniform numbers that accept or reject draft tokens; tokens are drawn from stream 0.
ACCEPT_STREAM = 1


def greedy(logits: np.ndarray) -> np.ndarray:
    """Index of the largest logit, the first of equals."""
    logits = logits.astype(np.float32, copy=False)
    best = np.argmax(logits, axis=-1)  # a NaN counts as the largest
    largest = np.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    return np.where(np.isfinite(largest), best, -1).astype(np.int32)


def softmax(logits: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """Probabilities (rows, vocab) as float32."""
    logits = logits.astype(np.float64)
    keep = np.isfinite(logits)
    cold = temperature == 0
    keep[cold] &= np.arange(logits.shape[1]) == np.argmax(logits[cold], axis=1)[:, None]
    return _probabilities(logits, keep, temperature).astype(np.float32)


def top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest and where they are; a bad row gives NaN and -1."""
    order = _descending(logits.astype(np.float64))[:, :k]
    values = np.take_along_axis(logits, order, axis=1)
    bad = _bad(logits)
    values[bad] = np.nan
    order[bad] = -1
    return values, order.astype(np.int32)


def kept(logits: np.ndarray, filters: Filters) -> np.ndarray:
    """Which tokens the filters leave, (rows, vocab)."""
    logits = logits.astype(np.float64)
    finite = np.isfinite(logits) & ~_bad(logits)[:, None]
    temperature = np.where(filters.temperature == 0, 1.0, filters.temperature.astype(np.float64))
    scaled = np.where(finite, logits, -np.inf)
    with np.errstate(invalid="ignore"):  # an empty row: -inf - -inf
        scaled = (scaled - scaled.max(axis=1, keepdims=True)) / temperature[:, None]
    with np.errstate(divide="ignore"):
        likely = scaled >= np.log(filters.min_p.astype(np.float64))[:, None]
    count = np.where(filters.temperature == 0, 1, filters.top_k)
    if min(*filters.top_p, *filters.typical_p) >= 1 and count.min() >= logits.shape[1]:
        return finite & likely  # no filter goes by rank, and ranking is most of the work

    order = _descending(logits)
    scaled = np.take_along_axis(scaled, order, axis=1)  # descending from 0
    mass = np.exp(scaled)
    mass[~np.isfinite(scaled)] = 0
    keep = np.isfinite(scaled) & (np.arange(logits.shape[1]) < count[:, None])
    keep &= _first_mass(mass * keep, filters.top_p)
    keep &= np.take_along_axis(likely, order, axis=1)

    typical = filters.typical_p < 1
    if typical.any():
        left = mass[typical] * keep[typical]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.sum(np.where(left > 0, scaled[typical], 0) * left, axis=1) / left.sum(axis=1)
            distance = np.abs(scaled[typical] - mean[:, None])  # = |-log p - entropy|
        distance[~keep[typical]] = np.inf
        nearest = np.argsort(distance, axis=1, kind="stable")
        chosen = _first_mass(np.take_along_axis(left, nearest, axis=1), filters.typical_p[typical])
        within = np.zeros_like(chosen)
        np.put_along_axis(within, nearest, chosen, axis=1)
        keep[typical] &= within

    result = np.zeros_like(keep)
    np.put_along_axis(result, order, keep, axis=1)
    return result


def filter_logits(logits: np.ndarray, filters: Filters) -> np.ndarray:
    """Logits over temperature where kept, else -inf, as float32; a bad row is NaN."""
    temperature = np.where(filters.temperature == 0, 1.0, filters.temperature.astype(np.float64))
    scaled = logits.astype(np.float64) / temperature[:, None]
    result = np.where(kept(logits, filters), scaled, -np.inf).astype(np.float32)
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
    keep = kept(logits, filters)
    temperature = np.where(filters.temperature == 0, 1.0, filters.temperature.astype(np.float64))
    scaled = np.where(keep, logits.astype(np.float64) / temperature[:, None], -np.inf)
    return _tokens(_race(scaled, seed, offset), np.where(_bad(logits)[:, None], np.nan, scaled))


def apply_penalties(logits: np.ndarray, penalties: Penalties) -> np.ndarray:
    """Logits after each row's penalties, of the dtype of `logits`."""
    tokens, repetition, frequency, presence, bias, allowed = penalties
    rows, vocab = logits.shape
    result = logits.astype(np.float64)
    counts = np.zeros((rows, vocab))
    row, _ = np.nonzero((tokens >= 0) & (tokens < vocab))
    np.add.at(counts, (row, tokens[(tokens >= 0) & (tokens < vocab)]), 1)
    seen = counts > 0
    factor = repetition.astype(np.float64)[:, None]
    result = np.where(seen, np.where(result > 0, result / factor, result * factor), result)
    result -= frequency.astype(np.float64)[:, None] * counts
    result -= presence.astype(np.float64)[:, None] * seen
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
    return result.astype(logits.dtype)


def _unpack(words: np.ndarray) -> np.ndarray:
    """Bits of 32-bit words, the lowest first."""
    bits = words.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(len(words), -1).astype(bool)


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
    bad = ~np.isfinite(residuals).all(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log(residuals)
    last = _tokens(_race(scaled, seed, offset), np.where(bad[:, None], np.nan, scaled))
    tokens[np.arange(rows), accepted] = last
    return tokens, accepted


def logprobs(
    logits: np.ndarray, tokens: np.ndarray | None, top_n: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Log-probabilities of chosen tokens, and of the `top_n` likeliest with their indices."""
    scores = _log_softmax(logits)
    chosen = None
    if tokens is not None:
        inside = (tokens >= 0) & (tokens < logits.shape[1])
        chosen = np.take_along_axis(scores, np.where(inside, tokens, 0), axis=1)
        chosen = np.where(inside, chosen, np.nan).astype(np.float32)
    if not top_n:
        return chosen, None, None
    _, indices = top_k(logits, top_n)
    best = np.take_along_axis(scores, np.maximum(indices, 0), axis=1).astype(np.float32)
    return chosen, best, indices


def beam_step(logits: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best continuations of each row's beams: scores, tokens, parents, all (rows, beams)."""
    rows, beams, vocab = logits.shape
    total = _log_softmax(logits.reshape(rows * beams, vocab)).reshape(rows, beams, vocab)
    total += scores.astype(np.float64)[:, :, None]
    total[np.isnan(total)] = -np.inf
    flat = total.reshape(rows, beams * vocab)
    order = _descending(flat)[:, :beams]
    best = np.take_along_axis(flat, order, axis=1)
    dead = best == -np.inf
    tokens = np.where(dead, -1, order % vocab).astype(np.int32)
    return best.astype(np.float32), tokens, np.where(dead, -1, order // vocab).astype(np.int32)


def _race(scaled: np.ndarray, seed: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Argmax of scores with Gumbel noise: a draw from their softmax."""
    u = uniform(seed, offset, scaled.shape[1]).astype(np.float64)
    return np.argmax(scaled - np.log(-np.log1p(-u)), axis=1)


def _tokens(best: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """-1 for rows that have no finite logit, or a NaN or +inf."""
    row = _bad(logits) | ~np.isfinite(logits).any(axis=-1)
    return np.where(row, -1, best).astype(np.int32)


def _bad(logits: np.ndarray) -> np.ndarray:
    return ~(logits < np.inf).all(axis=-1)


def _descending(logits: np.ndarray) -> np.ndarray:
    return np.argsort(-logits, axis=1, kind="stable")


def _first_mass(mass: np.ndarray, share: np.ndarray) -> np.ndarray:
    """The shortest prefix of each row that holds `share` of its mass; all of it for a share of
    1."""
    before = np.cumsum(mass, axis=1) - mass
    target = share.astype(np.float64) * mass.sum(axis=1)
    first = np.arange(mass.shape[1]) == 0
    return (before < target[:, None]) | (share >= 1)[:, None] | first


def _probabilities(logits: np.ndarray, keep: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    bad = _bad(logits)
    temperature = np.where(temperature == 0, 1.0, temperature.astype(np.float64))[:, None]
    left = np.where(keep, logits, -np.inf)
    top = np.max(left, axis=1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        mass = np.where(keep, np.exp((left - top) / temperature), 0)
        result = mass / np.maximum(mass.sum(axis=1, keepdims=True), 1e-300)
    result[bad] = np.nan
    return result


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    top = np.max(logits, axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        result = logits - top - np.log(np.sum(np.exp(logits - top), axis=1, keepdims=True))
    result[np.isneginf(top[:, 0])] = -np.inf
    result[_bad(logits)] = np.nan
    return result
