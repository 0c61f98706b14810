"""How random calls of samplers are drawn and judged."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuattn import sampling
from tests.gpu import random_calls as calls
from tests.gpu.random_calls import (
    Drawn,
    Generator,
    given,
    numbers,
    pick,
)

cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def draw_logits(kind_rng: Generator, rng: Generator) -> np.ndarray:
    vocab = int(rng.choice([1, 2, 31, 128, 129, 257, 1000, 4097, 32768, 50257, 128256]))
    rows = int(rng.integers(1, 6)) if vocab > 5000 else int(rng.choice([1, 3, 20, 127, 200]))
    dtype = [np.float16, BFLOAT16, np.float32][int(kind_rng.integers(3))]
    logits = numbers(rng, (rows, vocab), np.float32, float(rng.choice([0.0, 1.0, 4.0, 30.0])))
    logits = logits.astype(dtype)
    for row in range(rows):
        chance = rng.random()
        if chance < 0.03:
            logits[row] = -np.inf
        elif chance < 0.05:
            logits[row, int(rng.integers(vocab))] = rng.choice([np.nan, np.inf])
        elif chance < 0.1:
            left = logits[row, int(rng.integers(vocab))]
            logits[row] = -np.inf
            logits[row, int(rng.integers(vocab))] = left
        elif chance < 0.2:
            logits[row, rng.random(vocab) < 0.7] = -np.inf
        elif chance < 0.25:
            logits[row] = np.round(logits[row].astype(np.float32)).astype(dtype)  # ties
        elif chance < 0.28:
            logits[row] = rng.choice([0.0, -0.0], vocab).astype(dtype)
    return logits


def draw_filters(kind_rng: Generator, rng: Generator, rows: int, vocab: int) -> dict[str, Any]:
    """Parameters of sampling, numbers or one a row."""
    choices = {
        "temperature": lambda: rng.choice([0.0, 0.3, 1.0, 1.7, 1e-3, 50.0]),
        "top_k": lambda: rng.choice([1, 2, 7, 50, 256, 257, 700, vocab, vocab + 10, 1 << 20]),
        "top_p": lambda: rng.choice([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": lambda: rng.choice([0.0, 0.01, 0.3, 1.0]),
        "typical_p": lambda: rng.choice([0.1, 0.5, 0.9, 1.0]),
    }
    options: dict[str, Any] = {}
    for name, draw in choices.items():
        if kind_rng.random() < 0.3:
            dtype = np.int32 if name == "top_k" else np.float32
            if rng.random() < 0.4:
                options[name] = np.array([draw() for _ in range(rows)], dtype)
            else:
                options[name] = int(draw()) if name == "top_k" else float(draw())
    return options


def kept_alike(
    logits: np.ndarray, options: dict[str, Any], on_device: dict[str, Any]
) -> np.ndarray:
    """Rows of which both sides keep the same tokens: at the crossing of a sum of float32
    exponentials they may differ."""
    here = sampling.filter_logits(logits, **options)
    there = sampling.filter_logits(cupy.asarray(logits), **on_device).get()
    with np.errstate(invalid="ignore"):
        differ = ((here > -np.inf) != (there > -np.inf)) & ~(np.isnan(here) & np.isnan(there))
    return ~differ.any(axis=-1)


def sample(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    rows, vocab = logits.shape
    filters = draw_filters(kind_rng, rng, rows, vocab)
    options = dict(filters)
    if rng.random() < 0.5:
        options["seed"] = rng.integers(0, 2**62, rows)
    else:
        options["seed"] = pick(rng, [0, 2**64 - 1, int(rng.integers(2**62))])
    if rng.random() < 0.5:
        options["offset"] = rng.integers(0, 2**62, rows)
    elif rng.random() < 0.5:
        options["offset"] = pick(rng, [0, 2**64 - 1, int(rng.integers(2**62))])
    if kind_rng.random() < 0.3:
        options |= draw_penalties(kind_rng, rng, rows, vocab)
    want = sampling.sample(logits, **options)
    place = functools.partial(given_parameters, rng)
    on_device = place(options)
    crossing = {"top_p", "typical_p"} & set(filters)

    def judge(results: list[np.ndarray]) -> None:
        same = results[0] == want
        if crossing and not same.all():
            of = logits
            if "tokens" in options or "logit_bias" in options or "allowed" in options:
                names = set(options) - set(filters) - {"seed", "offset"}
                of = sampling.apply_penalties(
                    logits, options.get("tokens", np.full((rows, 0), -1, np.int32)),
                    **{name: options[name] for name in names if name != "tokens"},
                )  # fmt: skip
            same |= ~kept_alike(of, filters, place(filters))
        assert same.all(), (
            f"rows {np.flatnonzero(~same)[:5]}: {results[0][~same][:5]}, {want[~same][:5]}"
        )

    return Drawn(sampling.sample, [given(rng, logits)], on_device, judge)


def given_parameters(rng: Generator, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def draw_penalties(kind_rng: Generator, rng: Generator, rows: int, vocab: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    length = int(rng.choice([0, 1, 30, 300]))
    tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    if rng.random() < 0.5:
        tokens[rng.random(tokens.shape) < 0.3] = -1
    options["tokens"] = tokens
    for name, low, high in (
        ("repetition", 0.5, 2.0), ("frequency", -1.0, 1.0), ("presence", -1.0, 1.0)
    ):  # fmt: skip
        if kind_rng.random() < 0.6:
            each = rng.uniform(low, high, rows).astype(np.float32)
            options[name] = each if rng.random() < 0.4 else float(each[0])
    if kind_rng.random() < 0.3:
        options["allowed"] = rng.random((rows, vocab)) < 0.7
    if kind_rng.random() < 0.3:
        options["logit_bias"] = numbers(rng, (rows, vocab), np.float32)
    return options


def apply_penalties(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    options = draw_penalties(kind_rng, rng, *logits.shape)
    tokens = options.pop("tokens")
    want = sampling.apply_penalties(logits, tokens, **options)

    def judge(results: list[np.ndarray]) -> None:
        unit = float(ml_dtypes.finfo(logits.dtype).eps)  # sums of terms may be fused
        np.testing.assert_allclose(results[0], want, rtol=max(unit, 3e-7), atol=1e-6)

    arrays = [given(rng, logits), cupy.asarray(tokens)]
    return Drawn(sampling.apply_penalties, arrays, given_parameters(rng, options), judge)


def filter_logits(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    options = draw_filters(kind_rng, rng, *logits.shape)
    want = sampling.filter_logits(logits, **options)

    def judge(results: list[np.ndarray]) -> None:
        found = results[0]
        differ = ~((found == want) | np.isnan(found) & np.isnan(want))
        if {"top_p", "typical_p"} & set(options):
            # A token at the crossing may fall on either side; what both keep is the same.
            kept = (found > -np.inf) & (want > -np.inf)
            assert not differ[kept].any()
            assert (differ.sum(axis=-1) <= 2 + found.shape[-1] // 10000).all()
        else:
            assert not differ.any(), f"{differ.sum()} of {differ.size} differ"

    on_device = given_parameters(rng, options)
    return Drawn(sampling.filter_logits, [given(rng, logits)], on_device, judge)


def top_k(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    k = int(min(logits.shape[1], rng.choice([1, 2, 50, 256, 257, 1000])))
    want = sampling.top_k(logits, k)

    def judge(results: list[np.ndarray]) -> None:
        for got, wanted in zip(results, want, strict=True):
            np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64))

    return Drawn(sampling.top_k, [given(rng, logits), k], {}, judge)


def softmax(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    rows = len(logits)
    temperature = [1.0, 0.3, 0.0, rng.choice([0.0, 0.5, 2.0], rows).astype(np.float32)]
    options = {"temperature": temperature[int(rng.integers(4))]}
    want = sampling.softmax(logits, **options)

    def judge(results: list[np.ndarray]) -> None:
        size = calls.largest(logits) * 4e-7 / 0.3
        np.testing.assert_allclose(results[0], want, rtol=1e-5 + size, atol=1e-37)

    return Drawn(sampling.softmax, [given(rng, logits)], given_parameters(rng, options), judge)


def speculative_sample(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    rows, tokens = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    vocab = int(rng.choice([1, 2, 40, 1000, 32000]))

    def probabilities(*shape: int) -> np.ndarray:
        p = np.exp(rng.standard_normal(shape) * rng.choice([0.0, 1.0, 5.0]))
        p[rng.random(shape) < rng.choice([0.0, 0.5])] = 0
        p[..., 0] += 1e-3
        return (p / p.sum(axis=-1, keepdims=True)).astype(np.float32)

    draft, target = probabilities(rows, tokens, vocab), probabilities(rows, tokens + 1, vocab)
    if rng.random() < 0.3:
        target[:, :-1] = draft
    drafted = rng.integers(0, vocab, (rows, tokens)).astype(np.int32)
    options = {
        "seed": rng.integers(0, 2**62, rows) if rng.random() < 0.5 else int(rng.integers(2**62)),
        "offset": rng.integers(0, 2**62, rows) if rng.random() < 0.5 else int(rng.integers(2**62)),
    }
    want = sampling.speculative_sample(drafted, draft, target, **options)

    def judge(results: list[np.ndarray]) -> None:
        for got, wanted in zip(results, want, strict=True):
            np.testing.assert_array_equal(got, wanted)

    arrays = [cupy.asarray(drafted), given(rng, draft), given(rng, target)]
    on_device = given_parameters(rng, options)
    return Drawn(sampling.speculative_sample, arrays, on_device, judge)
