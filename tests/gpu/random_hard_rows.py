"""Random calls of samplers with rows of which few tokens, or very many alike, are at a limit: what
sends kernels through their second looks, and what loops without end have come from.

A row is drawn together with its filters, and a draw is judged by what float64 says of each token:
that it is kept, that it is not, or that the rounding of float32's sums decides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuattn import sampling
from cuattn._philox import row_seeds, uniform
from tests.gpu import random_calls as calls
from tests.gpu.random_calls import Drawn, Generator, given, pick
from tests.gpu.random_sampling import given_parameters

cupy = pytest.importorskip("cupy")

DTYPES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
FEW_TOKENS = 3000  # an emulated call's vocabulary, at most
VOCABS = (
    *(1, 2, 3, 31, 255, 256, 257, 511, 513, 1000, 2047, 2049, 3000),
    *(4096, 4097, 8191, 32000, 50257, 81921, 128256, 163841, 262144),
)
MOST_LOGITS = 10_000_000  # of a call
MOST_KEYS = 1_000_000  # of draws, that a judge computes
COUNTS = (1, 2, 30, 255, 256, 257, 264, 511, 512, 513, 1023, 2047, 2048, 2049, 2300)


@dataclasses.dataclass
class Shape:
    """Of a call: rows that differ, and how often each comes."""

    rows: int
    copies: int
    vocab: int
    dtype: np.dtype

    def tiled(self, array: np.ndarray) -> np.ndarray:
        return np.tile(array, (self.copies, *(1,) * (array.ndim - 1)))


def draw_shape(kind_rng: Generator, rng: Generator, most: int) -> Shape:
    vocab = int(pick(rng, [v for v in VOCABS if v <= FEW_TOKENS or most > FEW_TOKENS]))
    rows = int(rng.integers(1, 4))
    # 24 | 25, 127 | 128 and 255 | 256 rows are launched in other ways.
    wanted = int(rng.choice([1, 24, 25, 127, 128, 255, 256], p=[0.4, *[0.1] * 6]))
    emulated = most <= FEW_TOKENS
    if emulated and wanted > 1:
        vocab = min(vocab, 257 if wanted > 25 else 513)
    if wanted * vocab > MOST_LOGITS:
        vocab = int(pick(rng, [v for v in VOCABS if wanted * v <= MOST_LOGITS]))
    copies = -(-wanted // rows)
    return Shape(rows, copies, vocab, DTYPES[int(kind_rng.integers(3))])


# --------------------------------------------------------------------------------------------- rows


def some_places(rng: Generator, vocab: int, count: int) -> np.ndarray:
    """So many places: neighbours, evenly spread, any, or outside of a pilot sample's groups."""
    count = min(max(count, 1), vocab)
    way = rng.random()
    if way < 0.45:
        begin = pick(rng, [0, vocab - count, int(rng.integers(vocab - count + 1)), 256])
        return np.arange(count) + min(begin, vocab - count)
    if way < 0.6:
        return np.arange(count) * vocab // count
    return rng.permutation(vocab)[:count]


def draw_count(rng: Generator, vocab: int) -> int:
    """Of tokens alike: some few, or a share of all."""
    return int(pick(rng, COUNTS if rng.random() < 0.7 else [vocab // 20, vocab // 8, vocab // 3]))


def draw_row(rng: Generator, vocab: int) -> np.ndarray:
    """One of many kinds of rows, as float32."""
    noise = rng.standard_normal(vocab).astype(np.float32)
    scale = float(pick(rng, [1e-3, 0.1, 1.0, 4.0, 8.0, 30.0, 1e3]))
    base = float(pick(rng, [0.0, 0.0, 1.0, -3.0, 17.5, -40.0, 1000.0]))
    way = int(rng.integers(10))
    if way == 0:  # equal logits, and a few others
        row = np.full(vocab, base, np.float32)
        for _ in range(int(rng.integers(0, 4))):
            places = some_places(rng, vocab, int(pick(rng, [1, 1, 3, 30])))
            row[places] = base + scale * pick(rng, [1, -1, 0.5])
    elif way <= 3:  # two or three levels
        row = np.full(vocab, base, np.float32)
        level = base
        for _ in range(int(rng.integers(1, 3))):
            level += pick(rng, [scale, -scale, 3.0, 8.0, 30.0])
            row[some_places(rng, vocab, draw_count(rng, vocab))] = level
    elif way == 4:  # a geometric tail, in any order or in one
        rate = pick(rng, [1e-4, 1e-3, 0.01, 0.1, 0.7, 5.0])
        row = (base - rate * np.arange(vocab)).astype(np.float32)
        row = row[:: pick(rng, [1, -1])] if rng.random() < 0.5 else row[rng.permutation(vocab)]
    elif way == 5:  # few that are not -inf
        row = np.full(vocab, -np.inf, np.float32)
        places = some_places(rng, vocab, draw_count(rng, vocab))
        row[places] = base + scale * noise[places]
    elif way == 6:  # neighbours far above all others
        row = noise * 0.1
        places = some_places(rng, vocab, draw_count(rng, vocab))
        row[places] = 30 + scale * noise[places] * pick(rng, [0, 0.01, 1])
    elif way == 7:
        row = np.round(scale * noise) + np.float32(base)
    elif way == 8:  # very far apart
        row = scale * noise
        row[some_places(rng, vocab, draw_count(rng, vocab))] -= pick(rng, [1e4, 1e30, 3e38])
    else:
        row = base + scale * noise
    if rng.random() < 0.15:
        row[rng.random(vocab) < pick(rng, [0.1, 0.9, 0.999])] = -np.inf
    return row.astype(np.float32)


def draw_logits(rng: Generator, shape: Shape) -> np.ndarray:
    rows = [draw_row(rng, shape.vocab) for _ in range(shape.rows)]
    if shape.rows > 1 and rng.random() < 0.3:  # permuted: one parameter is at the limit of each
        rows = [rng.permutation(rows[0]) for _ in rows]
    with np.errstate(over="ignore"):
        logits = np.stack(rows).astype(shape.dtype)
    largest = np.array(ml_dtypes.finfo(shape.dtype).max).astype(shape.dtype)
    logits = np.where(logits == -np.inf, logits, np.clip(logits, -largest, largest))
    logits = logits.astype(shape.dtype)
    if rng.random() < 0.1:
        bad = int(rng.integers(shape.rows))
        logits[bad, int(rng.integers(shape.vocab))] = pick(rng, [np.nan, np.inf, -np.inf])
    if rng.random() < 0.05:
        logits[int(rng.integers(shape.rows))] = -np.inf
    return logits


# ------------------------------------------------------------------------------------------ filters


def ulps_from(x: float, rng: Generator) -> np.float32:
    """The float32 number nearest to x, or one that is few units away."""
    steps = int(pick(rng, [0, 0, 1, -1, 2, -2, 10, -10]))
    y = np.float32(x)
    for _ in range(abs(steps)):
        y = np.nextafter(y, np.float32(np.copysign(np.inf, steps)))
    return y


def at_limits(rng: Generator, row: np.ndarray, temperature: float) -> dict[str, Any]:
    """Filters that end near one of a row's tokens."""
    x = np.sort(row.astype(np.float64))[::-1]
    x = x[np.isfinite(x)]
    if not len(x):
        return {}
    s = (x - x[0]) / (float(np.float32(temperature)) or 1.0)
    p = np.exp(s)
    edges = np.flatnonzero(np.diff(s)) + 1  # ranks at which another level begins
    rank = int(pick(rng, [0, len(x) - 1, int(rng.integers(len(x)))]))
    if len(edges) and rng.random() < 0.6:
        rank = int(pick(rng, edges)) - int(rng.integers(2))
    mean = (p * s).sum() / p.sum()
    nearest = np.argsort(np.abs(s - mean), kind="stable")
    return {
        "top_k": max(rank + int(rng.integers(-1, 3)), 1),
        "top_p": float(np.clip(ulps_from(p[: rank + 1].sum() / p.sum(), rng), 0, 1)),
        # Kernels take a subnormal number for 0.
        "min_p": float(np.clip(ulps_from(max(np.exp(s[rank]), 1.2e-38), rng), 0, 1)),
        "typical_p": float(np.clip(ulps_from(p[nearest[: rank + 1]].sum() / p.sum(), rng), 0, 1)),
    }


def draw_filters(kind_rng: Generator, rng: Generator, logits: np.ndarray) -> dict[str, Any]:
    """Filters, numbers or one a row, at a limit of a row where they can be."""
    vocab = logits.shape[1]
    others = {
        "top_k": [1, 2, 50, 128, 129, 255, 256, 257, 300, 700, 2048, vocab],
        "top_p": [0.0, 1e-30, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0],
        "min_p": [0.0, 1e-30, 1e-6, 0.01, 0.3, 1.0],
        "typical_p": [0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0],
    }
    temperature = float(pick(rng, [0.0, 1.0, 1.0, 1.0, 0.3, 1.7, 1e-3, 50.0, 1e-6, 1e6]))
    filters: dict[str, Any] = {"temperature": temperature} if temperature != 1 else {}
    for name, chance in (("top_k", 0.4), ("top_p", 0.4), ("min_p", 0.35), ("typical_p", 0.25)):
        if kind_rng.random() >= chance:
            continue

        def draw(row: int, name: str = name) -> Any:
            value = at_limits(rng, logits[row], temperature).get(name)
            return pick(rng, others[name]) if value is None or rng.random() < 0.3 else value

        if rng.random() < 0.3:
            dtype = np.int32 if name == "top_k" else np.float32
            filters[name] = np.array([draw(row) for row in range(len(logits))], dtype)
        else:
            filters[name] = draw(0)
    if rng.random() < 0.05:
        each = rng.choice([0.0, 1.0, 1e-6, 1e6], len(logits))
        filters["temperature"] = each.astype(np.float32)
    return filters


# ------------------------------------------------------------------------------------------ judging


def rows_of(filters: dict[str, Any], rows: int, vocab: int) -> list[dict[str, Any]]:
    """Each row's filters, all of them, rounded as kernels have them."""
    off = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    values = {name: np.broadcast_to(filters.get(name, x), rows) for name, x in off.items()}
    return [
        {
            name: int(value[row]) if name == "top_k" else float(np.float32(value[row]))
            for name, value in values.items()
        }
        for row in range(rows)
    ]


def limits(row: np.ndarray, filters: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a row filters keep for sure, and which perhaps: shares of float32's sums of
    float32 exponentials, and of fixed point, are as exact as `share`, distances as `near`."""
    x = row.astype(np.float64)
    order = np.argsort(-x, kind="stable")
    ranks = np.arange(len(x))
    with np.errstate(invalid="ignore"):  # a row of nothing but -inf
        s = (x[order] - x[order[0]]) / (filters["temperature"] or 1.0)
    p = np.exp(s)
    top_k = filters["top_k"] if filters["temperature"] else 1
    there = np.isfinite(x[order]) & (ranks < top_k)
    p = np.where(there, p, 0)

    def share(of: float) -> float:
        return 1e-5 * of + 1.3e-10 * len(x)

    sure, perhaps = there.copy(), there.copy()
    if (top_p := filters["top_p"]) < 1:
        before, total = np.cumsum(p) - p, p.sum()
        sure &= (before < (top_p - share(top_p)) * total) | (ranks == 0)
        perhaps &= (before < (top_p + share(top_p)) * total) | (ranks == 0)
    if filters["min_p"] > 0:
        within = s >= np.log(filters["min_p"])
        sure &= within
        perhaps &= within
    if (typical := filters["typical_p"]) < 1 and perhaps.sum() > 1:
        if (sure != perhaps).any():  # which tokens are typical may depend on a single one
            sure[:] = False
        else:
            left = p[sure]
            mean = (left * s[sure]).sum() / left.sum()
            distance = np.abs(s[sure] - mean)
            high = abs(x[order[0]]) / (filters["temperature"] or 1.0)
            near = 4e-6 * (high + distance + 1)
            by_distance = np.argsort(distance)
            sums = np.concatenate([[0], np.cumsum(left[by_distance])]) / left.sum()
            nearest = distance[by_distance]
            most = sums[np.searchsorted(nearest, distance + near, "right")] - left / left.sum()
            least = sums[np.searchsorted(nearest, distance - near, "left")]
            perhaps[sure] = (least < typical + share(typical)) | (least == 0)
            sure[sure] = (most < typical - share(typical)) | (most <= 0)
    result = np.zeros((2, len(x)), bool)
    result[:, order] = sure, perhaps
    return result[0], result[1]


class Judge:
    """What a row may draw."""

    def __init__(self, row: np.ndarray, filters: dict[str, Any]):
        self.x, self.temperature = row.astype(np.float64), filters["temperature"] or 1.0
        top = self.x.max()
        self.nothing = not top < np.inf or top == -np.inf
        if not self.nothing:
            self.sure, self.perhaps = limits(row, filters)

    def keys(self, seeds: np.ndarray, offset: int) -> np.ndarray:
        u = uniform(seeds.astype(np.uint64), np.full(len(seeds), offset, np.uint64), len(self.x))
        return self.x / self.temperature - np.log(-np.log1p(-u.astype(np.float64)))

    def seeds(self, rng: Generator, count: int, offset: int) -> np.ndarray:
        """Seeds, preferably those by which tokens win that are the last within the limits, or would
        if they were not just outside."""
        most = max(MOST_KEYS // len(self.x), 1)
        seeds = rng.integers(0, 2**62, min(max(count, 64), most))
        if self.nothing:
            return np.resize(seeds, count)
        order = np.argsort(-self.x, kind="stable")
        ends = np.flatnonzero(np.diff(self.perhaps[order], prepend=False, append=False))
        near = np.unique(np.clip(ends[:, None] + np.arange(-2, 2), 0, len(order) - 1))
        edge = np.zeros(len(order), bool)
        edge[order[near]] = True
        winner = np.where(self.perhaps | edge, self.keys(seeds, offset), -np.inf).argmax(axis=1)
        return np.resize(seeds[np.argsort(~edge[winner], kind="stable")][:count], count)

    def check(self, tokens: np.ndarray, seeds: np.ndarray, offset: int) -> None:
        """That tokens are those to draw, or such as rounding may have kept or left out."""
        if self.nothing:
            assert (tokens == -1).all(), f"a bad row gives {tokens[tokens != -1]}"
            return
        seeds = seeds.astype(np.uint64).view(np.int64)
        found, seeds = np.unique(np.stack([tokens, seeds]), axis=1)  # copies once
        assert ((found >= 0) & (found < len(self.x))).all(), f"tokens {found}"
        assert self.perhaps[found].all(), f"{found[~self.perhaps[found]]} are not kept"
        keys = self.keys(seeds, offset)
        best = np.where(self.sure, keys, -np.inf).argmax(axis=1)
        every = np.arange(len(found))
        wrong = self.sure[best] & (keys[every, found] < keys[every, best])
        assert not wrong.any(), (
            f"{found[wrong][:3]} for {best[wrong][:3]}, seeds {seeds[wrong][:3]}"
        )


# ----------------------------------------------------------------------------------------- families


def hard_sample(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    shape = draw_shape(kind_rng, rng, most)
    logits = draw_logits(rng, shape)
    penalties = draw_penalties(rng, logits) if kind_rng.random() < 0.3 else {}
    left = logits
    if penalties:
        left = sampling.apply_penalties(logits, penalties.get("tokens"), **without(penalties))
    filters = draw_filters(kind_rng, rng, left)
    judges = [Judge(*each) for each in zip(left, rows_of(filters, *logits.shape), strict=True)]
    offset = int(rng.integers(2**62))
    if shape.copies == 1 and rng.random() < 0.2:
        seed: Any = int(rng.integers(2**62))
        seeds = row_seeds(seed, shape.rows)[:, None]
    else:
        seeds = np.array([each.seeds(rng, shape.copies, offset) for each in judges])
        seed = np.ascontiguousarray(seeds.T).ravel()

    def judge(results: list[np.ndarray]) -> None:
        for row, tokens in enumerate(results[0].reshape(shape.copies, shape.rows).T):
            try:
                judges[row].check(tokens, seeds[row], offset)
            except AssertionError as error:
                raise AssertionError(f"row {row}: {error}") from error

    call = on_device(rng, sampling.sample, shape, logits, filters | penalties, judge)
    there = given_parameters(rng, {"seed": seed, "offset": offset})
    return dataclasses.replace(call, options=call.options | there)


def on_device(
    rng: Generator, function: Any, shape: Shape, logits: np.ndarray, options: dict, judge: Any
) -> Drawn:
    """The call with copies of its rows, and of what belongs to them."""
    tiled = {
        name: shape.tiled(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return Drawn(function, [given(rng, shape.tiled(logits))], given_parameters(rng, tiled), judge)


def without(penalties: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in penalties.items() if name != "tokens"}


def draw_penalties(rng: Generator, logits: np.ndarray) -> dict[str, Any]:
    """Penalties that round as in NumPy, of which some raise tokens among their equals."""
    rows, vocab = logits.shape
    length = int(pick(rng, [1, 30, 300]))
    tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    if rng.random() < 0.5:  # the last ones of equals
        tokens = np.tile(vocab - 1 - np.arange(length, dtype=np.int32) % vocab, (rows, 1))
    return {
        "tokens": tokens,
        "repetition": float(pick(rng, [1.0, 0.5, 2.0])),
        "frequency": float(pick(rng, [0.0, 0.25, -0.25, -4.0])),
        "presence": float(pick(rng, [0.0, 0.5, -0.5, -0.125])),
    }


def hard_filter_logits(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    shape = draw_shape(kind_rng, rng, most)
    logits = draw_logits(rng, shape)
    filters = draw_filters(kind_rng, rng, logits)
    of_row = rows_of(filters, *logits.shape)

    def judge(results: list[np.ndarray]) -> None:
        assert calls.same_bits([shape.tiled(results[0][: shape.rows])], results), "copies differ"
        for row, found in enumerate(results[0][: shape.rows]):
            wide = logits[row].astype(np.float32)
            if not wide.max() < np.inf:
                assert np.isnan(found).all(), f"row {row}: not NaN"
                continue
            sure, perhaps = limits(logits[row], of_row[row])
            if wide.max() == -np.inf:
                sure[:] = perhaps[:] = False
            want = wide.astype(np.float64) / (of_row[row]["temperature"] or 1.0)
            with np.errstate(over="ignore"):
                want = want.astype(np.float32)
            kept, sure = found > -np.inf, sure & (want > -np.inf)
            few = np.flatnonzero(sure & ~kept), np.flatnonzero(kept & ~perhaps)
            assert not len(few[0]) and not len(few[1]), (
                f"row {row}, {of_row[row]}: {len(few[0])} left out, {len(few[1])} kept: "
                f"{few[0][:3]}, {few[1][:3]}"
            )
            assert np.array_equal(found[kept], want[kept]), f"row {row}: other logits"

    return on_device(rng, sampling.filter_logits, shape, logits, filters, judge)


def hard_top_k(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    shape = draw_shape(kind_rng, rng, most)
    logits = draw_logits(rng, shape)
    k = min(shape.vocab, int(pick(rng, [1, 2, 50, 64, 127, 128, 129, 255, 256, 256, 257])))
    want = sampling.top_k(logits, k)

    def judge(results: list[np.ndarray]) -> None:
        for got, wanted in zip(results, want, strict=True):
            wide = shape.tiled(wanted).astype(np.float64)
            np.testing.assert_array_equal(got.astype(np.float64), wide)

    call = on_device(rng, sampling.top_k, shape, logits, {}, judge)
    return dataclasses.replace(call, arrays=[*call.arrays, k])


def hard_softmax(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    shape = draw_shape(kind_rng, rng, most)
    logits = draw_logits(rng, shape)
    temperature = float(pick(rng, [0.0, 1.0, 1.0, 0.3, 1e-3, 50.0, 1e6]))
    want = sampling.softmax(logits, temperature=temperature)
    # Differences of logits are rounded, relative to their size.
    top = np.where(np.isfinite(logits), logits, -np.inf).astype(np.float64).max(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        distance = np.abs(logits.astype(np.float64) - top) / (temperature or 1.0)
    error = 1e-5 + 4e-7 * np.where(distance < 1e3, distance, 0)

    def judge(results: list[np.ndarray]) -> None:
        got, wanted = results[0], shape.tiled(want)
        assert np.array_equal(np.isnan(got), np.isnan(wanted)), "NaN elsewhere"
        wrong = np.abs(got - wanted) > shape.tiled(error) * np.abs(wanted) + 2e-37
        assert not wrong.any(), f"{wrong.sum()} differ, first at {np.argwhere(wrong)[0]}"

    return on_device(rng, sampling.softmax, shape, logits, {"temperature": temperature}, judge)


def hard_logprobs(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    shape = draw_shape(kind_rng, rng, most)
    logits = draw_logits(rng, shape)
    options = {"top_n": min(shape.vocab, int(pick(rng, [1, 5, 64, 256])))}
    tokens = rng.integers(-1, shape.vocab + 1, (shape.rows, 3)).astype(np.int32)
    want = sampling.logprobs(logits, tokens, **options)
    near = 1e-5 * (1 + calls.largest(logits))

    def judge(results: list[np.ndarray]) -> None:
        for got, wanted in zip(results[:2], want[:2], strict=True):
            np.testing.assert_allclose(got, shape.tiled(wanted), rtol=1e-5, atol=near)
        np.testing.assert_array_equal(results[2], shape.tiled(want[2]))

    options["tokens"] = tokens
    return on_device(rng, sampling.logprobs, shape, logits, options, judge)


def hard_speculation(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    """Chains and trees of few levels of probability: nothing may be left, or one token."""
    rows, drafts = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    vocab = int(pick(rng, [1, 2, 3, 31, 256, 257, 1000, *([32000] if most > FEW_TOKENS else [])]))
    tree = kind_rng.random() < 0.5

    def probabilities(*shape: int) -> np.ndarray:
        """Multiples of 2^-20 of which each row has 1 in all: differences are exact."""
        units = np.zeros(shape, np.int64)
        for row in units.reshape(-1, vocab):
            count = min(vocab, int(pick(rng, [1, 1, 2, 8, 257, vocab])))
            places = some_places(rng, vocab, count)
            row[places] = (1 << 20) // count
            row[places[0]] += (1 << 20) - row.sum()
        return (units * 2.0**-20).astype(np.float32)

    target = probabilities(rows, drafts + 1, vocab)
    draft = probabilities(rows, drafts, vocab)
    same = rng.random((rows, drafts)) < pick(rng, [0.0, 0.5, 1.0])
    draft[same] = target[:, :-1][same]
    drafted = rng.integers(0, vocab, (rows, drafts)).astype(np.int32)
    for row in np.ndindex(rows, drafts):
        if rng.random() < 0.7:
            drafted[row] = pick(rng, np.flatnonzero(draft[row]))
    if rng.random() < 0.1:
        target[0, int(rng.integers(drafts + 1)), int(rng.integers(vocab))] = np.nan
    options = {"seed": rng.integers(0, 2**62, rows), "offset": int(rng.integers(2**62))}
    function, between = sampling.speculative_sample, ()
    if tree:
        # Two children at most: sums of a third one's residual round, and nothing may be left of it.
        parents = np.full((rows, drafts), -1, np.int32)
        for row in parents:
            places = rng.permutation(np.repeat(np.arange(-1, drafts), 2))
            for n in range(drafts):
                at = int(np.flatnonzero(places < n)[0])
                row[n], places = places[at], np.delete(places, at)
        function, between = sampling.speculative_sample_tree, (parents,)
    want = function(drafted, *between, draft, target, **options)

    def judge(results: list[np.ndarray]) -> None:
        for got, wanted in zip(results, want, strict=True):
            np.testing.assert_array_equal(got, wanted)

    arrays = [*map(cupy.asarray, (drafted, *between)), given(rng, draft), given(rng, target)]
    return Drawn(function, arrays, given_parameters(rng, options), judge)


FAMILIES = {
    function.__name__: function
    for function in (
        hard_sample,
        hard_filter_logits,
        hard_top_k,
        hard_softmax,
        hard_logprobs,
        hard_speculation,
    )
}
