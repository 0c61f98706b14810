"""Calls of shapes that nobody benchmarks: ten thousand times more queries than keys or the other
way round, lengths 0 and 1 in numbers, rows that see nothing, one long sequence beside thousands.

Each kind of call is drawn anew from a generator, made on NumPy or CuPy (`asarray` says which), and
judged by the plain formula (tests/formulas.py). A call and its formula take about a second.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import cuattn
from cuattn import sampling
from tests import formulas

ATTENTION = (
    "many queries",
    "many keys",
    "none or one",
    "nothing kept",
    "windows off the keys",
    "many small",
    "one tile",
)
RAGGED = (
    "thousands",
    "one beside thousands",
    "many queries",
    "many keys",
    "no keys",
    "no queries",
    "nothing",
)
CACHED = (
    "thousands",
    "one beside thousands",
    "more queries than keys",
    "long and empty",
    "empty",
)
MERGED = ("many parts", "many rows", "nothing seen", "one number")
SAMPLED = ("one token", "few tokens", "many rows", "many tokens", "one left", "all alike")


def to_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


def heads_and_dims(rng: np.random.Generator) -> tuple[int, int, int]:
    """Query heads, key heads and head_dim."""
    heads_kv, group = rng.choice([1, 2]), rng.choice([1, 2, 5])
    return int(heads_kv * group), int(heads_kv), int(rng.choice([64, 128]))


def scores_options(rng: np.random.Generator, heads: int) -> dict[str, Any]:
    """What changes scores, each of it now and then."""
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["softcap"] = 20.0
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.random(heads).astype(np.float32)
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    return options


def of_accumulators(options: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """float64 calls take their slopes and sinks in float64."""
    return {
        name: value.astype(np.float64)
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and dtype == np.float64
        else value
        for name, value in options.items()
    }


def normal(rng: np.random.Generator, dtype: np.dtype, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def on(asarray: Callable, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def judge(
    out: Any, lse: Any, formula: Callable, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> None:
    """Judge a result by ``formula(q, k, v, precision=...)``."""
    exact, exact_lse = formula(
        q, k, v, precision=np.longdouble if q.dtype == np.float64 else np.float64
    )
    dim = q.shape[-1]
    plain, plain_lse = zip(
        *(
            formula(q[..., order], k[..., order], v, precision=q.dtype)
            for order in formulas.orders(dim, 8 if exact_lse.size < 20_000 else 1)
        ),
        strict=True,
    )

    def largest(array: np.ndarray) -> float:
        return float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0))

    lse = to_host(lse)
    unit = (256 if lse.dtype == np.float64 else 1) * float(np.finfo(lse.dtype).eps)
    if lse.size < 2000:
        unit *= max(1.0, largest(q) * largest(k) / dim**0.5)
    last = float(ml_dtypes.finfo(q.dtype).eps) * largest(exact)
    slack = unit * largest(v) + last
    formulas.assert_accurate(to_host(out), exact, *plain, slack=slack)
    slack = unit * (1 + largest(exact_lse))
    formulas.assert_accurate(lse, exact_lse, *plain_lse, slack=slack)


# --------------------------------------------------------------------------------------- attention


def check_attention(
    rng: np.random.Generator, kind: str, dtype: np.dtype, asarray: Callable
) -> None:
    heads, heads_kv, dim = heads_and_dims(rng)
    options = scores_options(rng, heads)
    options["causal"] = bool(rng.random() < 0.7)
    batch, seqlen_q, seqlen_k = 1, 1, 1
    match kind:
        case "many queries":
            seqlen_q, seqlen_k = int(rng.integers(10_000, 20_000)), int(rng.integers(1, 3))
        case "many keys":
            seqlen_q, seqlen_k = int(rng.integers(1, 3)), int(rng.integers(10_000, 20_000))
        case "none or one":
            batch = int(rng.integers(64, 300))
            seqlen_q, seqlen_k = map(int, rng.integers(0, 2, 2))
        case "nothing kept":
            batch, seqlen_q, seqlen_k = 2, int(rng.integers(1, 300)), int(rng.integers(1, 300))
            mask = rng.random((batch, 1, seqlen_q, seqlen_k)) < 0.5
            mask[0] = False
            mask[1, :, rng.random(seqlen_q) < 0.7] = False
            options["mask"] = mask
        case "windows off the keys":
            seqlen_q, seqlen_k = int(rng.integers(2000, 5000)), int(rng.integers(1, 50))
            options["window"] = tuple(map(int, rng.integers(0, 4, 2)))
        case "many small":
            batch = int(rng.integers(1000, 3000))
            seqlen_q, seqlen_k = map(int, rng.integers(1, 4, 2))
        case "one tile":
            heads = heads_kv = 1
            options = {"causal": options["causal"]}
            seqlen_q, seqlen_k = map(int, rng.integers(1, 65, 2))
    q = normal(rng, dtype, batch, seqlen_q, heads, dim)
    k, v = (normal(rng, dtype, batch, seqlen_k, heads_kv, dim) for _ in "kv")
    options = of_accumulators(options, dtype)
    out, lse = cuattn.flash_attention(
        *map(asarray, (q, k, v)), **on(asarray, options), return_lse=True
    )
    judge(out, lse, functools.partial(formulas.attention, **options), q, k, v)


# -------------------------------------------------------------------- sequences of unlike lengths


def ragged_formula(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    rows: Sequence[np.ndarray],
    keys: Sequence[np.ndarray],
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The plain formula of sequences that have these rows of q and of k and v: out (rows, heads,
    head_dim) and lse (heads, rows). Sequences of the same lengths at a time."""
    out = np.full((*q.shape[:2], v.shape[2]), np.nan, np.longdouble)
    lse = np.full((q.shape[1], q.shape[0]), np.nan, np.longdouble)
    alike: dict[tuple[int, int], list[int]] = {}
    for b, (own_rows, own_keys) in enumerate(zip(rows, keys, strict=True)):
        alike.setdefault((len(own_rows), len(own_keys)), []).append(b)
    for lengths, members in alike.items():
        if lengths[0]:
            at = np.stack([rows[b] for b in members])
            seen = np.stack([keys[b] for b in members])
            out[at], part = formulas.attention(q[at], k[seen], v[seen], **options)
            lse[:, at] = part.swapaxes(0, 1)
    return out, lse


def ends_of(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def spans(ends: np.ndarray) -> list[np.ndarray]:
    return [np.arange(a, b) for a, b in itertools.pairwise(ends.tolist())]


def check_varlen(rng: np.random.Generator, kind: str, dtype: np.dtype, asarray: Callable) -> None:
    heads, heads_kv, dim = heads_and_dims(rng)
    count = int(rng.integers(1500, 3000))
    lengths = rng.integers(0, 3, (2, count))
    match kind:
        case "one beside thousands":
            lengths[:, rng.integers(count)] = rng.integers(600, 1200, 2)
        case "many queries":
            lengths = np.array([np.full(60, 100), rng.integers(0, 4, 60)])
            lengths[0, 7] = 10_000
        case "many keys":
            lengths = np.array([rng.integers(0, 2, 50), np.full(50, 300)])
            lengths[1, 7] = 10_000
        case "no keys":
            lengths[1] = 0
        case "no queries":
            lengths[0] = 0
        case "nothing":
            lengths[...] = 0
    cu_q, cu_k = map(ends_of, lengths)
    q = normal(rng, dtype, int(cu_q[-1]), heads, dim)
    k, v = (normal(rng, dtype, int(cu_k[-1]), heads_kv, dim) for _ in "kv")
    options = scores_options(rng, heads)
    options["causal"] = bool(rng.random() < 0.5)
    if rng.random() < 0.3:
        options["window"] = tuple(map(int, rng.integers(0, 4, 2)))
    options = of_accumulators(options, dtype)
    out, lse = cuattn.flash_attention_varlen(
        *map(asarray, (q, k, v, cu_q, cu_k)), **on(asarray, options), return_lse=True
    )
    sequences = {"rows": spans(cu_q), "keys": spans(cu_k)}
    judge(out, lse, functools.partial(ragged_formula, **sequences, **options), q, k, v)


def cached_lengths(rng: np.random.Generator, kind: str) -> tuple[np.ndarray, int]:
    """The keys of each sequence, and the queries of all."""
    seqlen_q = int(rng.integers(1, 4))
    match kind:
        case "thousands":
            return rng.integers(0, 3, 2000), seqlen_q
        case "one beside thousands":
            lengths = rng.integers(0, 3, 1500)
            lengths[rng.integers(1500)] = rng.integers(10_000, 12_000)
            return lengths, seqlen_q
        case "more queries than keys":
            return rng.integers(0, 5, 40), int(rng.integers(60, 200))
        case "long and empty":
            return np.array([int(rng.integers(10_000, 12_000)), 0]), seqlen_q
    return np.zeros(int(rng.choice([1, 300])), int), seqlen_q


def cached_options(rng: np.random.Generator, heads: int, dtype: np.dtype) -> dict[str, Any]:
    options = scores_options(rng, heads)
    options["causal"] = bool(rng.random() < 0.7)
    if rng.random() < 0.3:
        options["window"] = (int(rng.integers(0, 4)), 0)
    return of_accumulators(options, dtype)


def check_decode(rng: np.random.Generator, kind: str, dtype: np.dtype, asarray: Callable) -> None:
    """Of contiguous caches: thousands of sequences have short ones."""
    heads, heads_kv, dim = heads_and_dims(rng)
    lengths, seqlen_q = cached_lengths(rng, kind)
    if kind == "one beside thousands":
        lengths = np.minimum(lengths, 40)
    batch, capacity = len(lengths), int(lengths.max()) + int(rng.integers(1, 5))
    q = normal(rng, dtype, batch, seqlen_q, heads, dim)
    k, v = (normal(rng, dtype, batch, capacity, heads_kv, dim) for _ in "kv")
    beyond = np.arange(capacity) >= lengths[:, None]
    k[beyond] = v[beyond] = np.nan
    options = cached_options(rng, heads, dtype)
    num_splits = [None, "fixed", 1, 7][rng.integers(4)]
    out, lse = cuattn.flash_decode(
        *map(asarray, (q, k, v, lengths.astype(np.int32))),
        **on(asarray, options),
        num_splits=num_splits,
        return_lse=True,
    )
    rows = np.arange(batch * seqlen_q).reshape(batch, seqlen_q)
    keys = [b * capacity + np.arange(n) for b, n in enumerate(lengths)]
    out = to_host(out).reshape(-1, heads, dim)
    lse = to_host(lse).swapaxes(0, 1).reshape(heads, -1)
    q, k, v = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    sequences = {"rows": list(rows), "keys": keys}
    judge(out, lse, functools.partial(ragged_formula, **sequences, **options), q, k, v)


def check_paged(rng: np.random.Generator, kind: str, dtype: np.dtype, asarray: Callable) -> None:
    """Whole batches, or ragged queries, of which many sequences have none."""
    heads, heads_kv, dim = heads_and_dims(rng)
    lengths, seqlen_q = cached_lengths(rng, kind)
    batch, ragged = len(lengths), bool(rng.random() < 0.5)
    page_size = (
        int(2 ** rng.integers(3, 9)) if kind.startswith("one") else int(2 ** rng.integers(9))
    )
    counts = -(-lengths // page_size)
    order = rng.permutation(int(counts.sum()) + 3)
    table = np.full((batch, int(counts.max()) + 1), 1 << 30, np.int32)
    for b, first in enumerate(ends_of(counts)[:-1]):
        table[b, : counts[b]] = order[first : first + counts[b]]
    slots = [
        table[b, np.arange(n) // page_size].astype(np.int64) * page_size + np.arange(n) % page_size
        for b, n in enumerate(lengths)
    ]
    k, v = (np.full((len(order) * page_size, heads_kv, dim), np.nan, dtype) for _ in "kv")
    used = np.concatenate(slots)
    k[used], v[used] = (normal(rng, dtype, len(used), heads_kv, dim) for _ in "kv")
    if ragged:
        new = rng.integers(0, seqlen_q + 1, batch)
        rows = spans(ends_of(new))
        q = normal(rng, dtype, int(new.sum()), heads, dim)
        options: dict[str, Any] = {"cu_seqlens_q": asarray(ends_of(new))}
    else:
        rows = list(np.arange(batch * seqlen_q).reshape(batch, seqlen_q))
        q = normal(rng, dtype, batch, seqlen_q, heads, dim)
        options = {}
    features = cached_options(rng, heads, dtype)
    pages = (a.reshape(-1, page_size, heads_kv, dim) for a in (k, v))
    out, lse = cuattn.paged_attention(
        *map(asarray, (q, *pages, table, lengths.astype(np.int32))),
        **options,
        **on(asarray, features),
        return_lse=True,
    )
    out, lse = to_host(out).reshape(-1, heads, dim), to_host(lse)
    if not ragged:
        lse = lse.swapaxes(0, 1).reshape(heads, -1)
    formula = functools.partial(ragged_formula, rows=rows, keys=slots, **features)
    judge(out, lse, formula, q.reshape(-1, heads, dim), k, v)


# --------------------------------------------------------------------------- merge, cache, samplers


def check_merge(rng: np.random.Generator, kind: str, dtype: np.dtype, asarray: Callable) -> None:
    parts, batch, seqlen, heads, dim = {
        "many parts": (int(rng.integers(100, 200)), 1, 2, 3, 64),
        "many rows": (2, int(rng.integers(2000, 4000)), 1, 3, 8),
        "nothing seen": (5, 3, 100, 2, 64),
        "one number": (1, 1, 1, 1, 1),
    }[kind]
    outs = normal(rng, dtype, parts, batch, seqlen, heads, dim)
    lses = 3 * rng.standard_normal((parts, batch, heads, seqlen))
    lses = lses.astype(np.float64 if dtype == np.float64 else np.float32)
    lses[rng.random(lses.shape) < (1.0 if kind == "nothing seen" else 0.2)] = -np.inf
    outs[np.isneginf(lses.swapaxes(2, 3))] = np.nan
    out, lse = cuattn.merge_attention(asarray(outs), asarray(lses))
    results = []
    for wide in (np.longdouble if dtype == np.float64 else np.float64, lses.dtype):
        each = lses.swapaxes(2, 3).astype(wide)
        top = np.where(np.isneginf(each.max(axis=0)), 0, each.max(axis=0))
        with np.errstate(divide="ignore"):
            merged_lse = np.log(np.exp(each - top).sum(axis=0)) + top
        weights = np.exp(each - np.where(np.isneginf(merged_lse), 0, merged_lse))
        values = np.where(weights[..., None] == 0, 0, outs.astype(wide))
        results.append(((weights[..., None] * values).sum(axis=0), merged_lse.swapaxes(1, 2)))
    (exact, exact_lse), (plain, plain_lse) = results
    formulas.assert_accurate(to_host(out), exact, plain.astype(dtype))
    formulas.assert_accurate(to_host(lse), exact_lse, plain_lse)


def check_cache(rng: np.random.Generator, dtype: np.dtype, xp: Any) -> None:
    """Thousands of sequences that get none or one token, beside one that gets thousands: the pages
    hold what was written, in order."""
    count, page_size = int(rng.integers(1000, 2000)), int(2 ** rng.integers(1, 7))
    steps = rng.integers(0, 2, (2, count))
    steps[0, rng.integers(count)] = 3000
    pages = int((-(-steps.sum(axis=0) // page_size)).sum()) + count
    cache = cuattn.PagedKVCache(pages, page_size, 1, 8, dtype=dtype, xp=xp)
    ids = [cache.add_sequence() for _ in range(count)]
    held = [[] for _ in ids]
    for new in steps:
        cache.extend(ids, new.tolist())
        k = normal(rng, dtype, int(new.sum()), 1, 8)
        cache.write(0, ids, xp.asarray(k), xp.asarray(-k))
        for own, rows in zip(held, spans(ends_of(new)), strict=True):
            own.append(k[rows])
    lengths, table = (to_host(a) for a in (cache.seq_lens(ids), cache.page_table(ids)))
    assert np.array_equal(lengths, steps.sum(axis=0))
    k_pages, v_pages = (to_host(a) for a in cache.pages(0))
    for b, n in enumerate(lengths):
        at = table[b, np.arange(n) // page_size], np.arange(n) % page_size
        assert np.array_equal(k_pages[at], np.concatenate(held[b]))
        assert np.array_equal(v_pages[at], -np.concatenate(held[b]))


def logits_of(rng: np.random.Generator, kind: str) -> np.ndarray:
    rows, vocab = {
        "one token": (int(rng.integers(1, 3000)), 1),
        "few tokens": (int(rng.integers(1, 3000)), int(rng.integers(2, 9))),
        "many rows": (int(rng.integers(2000, 4000)), 40),
        "many tokens": (1, int(rng.integers(300_000, 600_000))),
        "one left": (int(rng.integers(1, 300)), 3000),
        "all alike": (int(rng.integers(1, 300)), 3000),
    }[kind]
    logits = 3 * rng.standard_normal((rows, vocab), dtype=np.float32)
    if kind == "one left":
        left = logits[:, 0].copy()
        logits[...] = -np.inf
        logits[np.arange(rows), rng.integers(0, vocab, rows)] = left
    if kind == "all alike":
        logits[...] = logits[:, :1]
    return logits


def check_sampling(rng: np.random.Generator, kind: str, asarray: Callable) -> None:
    """Against the definitions, and each draw against NumPy's, which has the same random numbers."""
    logits = logits_of(rng, kind)
    rows, vocab = logits.shape
    given = asarray(logits)
    order = np.argsort(-logits, axis=1, kind="stable")
    assert np.array_equal(to_host(sampling.greedy(given)), order[:, 0])
    k = int(rng.integers(1, min(vocab, 100) + 1))
    values, indices = map(to_host, sampling.top_k(given, k))
    finite = np.isfinite(np.take_along_axis(logits, order[:, :k], axis=1))
    assert np.array_equal(indices[finite], order[:, :k][finite])
    assert np.array_equal(values, np.take_along_axis(logits, order[:, :k], axis=1))
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    plain = np.exp(logits - logits.max(axis=1, keepdims=True))
    formulas.assert_accurate(
        to_host(sampling.softmax(given)),
        weights / weights.sum(axis=1, keepdims=True),
        plain / plain.sum(axis=1, keepdims=True),
    )
    seed, offset = rng.integers(0, 2**62, rows), int(rng.integers(0, 2**40))
    kept = np.zeros((rows, vocab), bool)
    np.put_along_axis(kept, order[:, :k], True, axis=1)
    kept &= logits > -np.inf
    for options, support in (({}, logits > -np.inf), ({"top_k": k}, kept)):
        filtered = to_host(sampling.filter_logits(given, **options))
        assert np.array_equal(filtered, np.where(support, logits, -np.inf))
        tokens = to_host(sampling.sample(given, seed=seed, offset=offset, **options))
        assert support[np.arange(rows), tokens].all()
        expected = sampling.sample(logits, seed=seed, offset=offset, **options)
        assert np.array_equal(tokens, expected)
