"""Softmax, unfiltered draws and penalties on a GPU: what their own kernels do beyond
test_sampling.py."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuattn import sampling
from cuattn.gpu import dispatch

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


def logits_of(rng, rows, vocab, dtype="float32", std=4.0):
    return (std * rng.standard_normal((rows, vocab), dtype=np.float32)).astype(DTYPES[dtype])


def on_gpu(options):
    """The same options with their arrays on the device."""
    return {
        name: tuple(map(cupy.asarray, value))
        if isinstance(value, tuple)
        else cupy.asarray(value)
        if isinstance(value, np.ndarray)
        else value
        for name, value in options.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(1, 1), (300, 7), (70, 4100), (9, 32768), (5, 128256), (2, 163_844), (2, 300_001)],
)
def test_probabilities_of_rows_at_any_place(rng, dtype, rows, vocab):
    """Whole vectors of four and not, aligned and not, in registers and too long for them."""
    wide = logits_of(rng, rows, vocab + 8, dtype)
    for part in (wide[:, :vocab], wide[:, 3 : vocab + 3], wide[::2, 4 : vocab + 4]):
        expected = sampling.softmax(part)
        there = cupy.asarray(wide)[:: 2 if len(part) < rows else 1]
        start = next(n for n in (0, 3, 4) if np.array_equal(wide[:1, n : n + vocab], part[:1]))
        found = sampling.softmax(there[:, start : start + vocab]).get()
        assert np.allclose(found, expected, rtol=2e-5, atol=1e-12)
        assert np.allclose(found.sum(axis=1, dtype=np.float64), 1, atol=1e-5)


@pytest.mark.parametrize("vocab", [37, 5000, 140_000])
def test_probabilities_of_degenerate_rows_and_temperatures(rng, vocab):
    logits = logits_of(rng, 9, vocab)
    logits[0, vocab // 2] = np.nan
    logits[1] = -np.inf
    logits[2] = -np.inf
    logits[2, vocab - 1] = -50
    logits[3, 0] = np.inf
    logits[4] = 0
    logits[5, 1::2] = -np.inf
    logits[6] *= 1e37
    temperatures = np.array([1, 1, 1, 1, 0, 0.3, 1e-30, 1e30, 0], np.float32)
    expected = sampling.softmax(logits, temperature=temperatures)
    found = sampling.softmax(cupy.asarray(logits), temperature=cupy.asarray(temperatures)).get()
    assert np.allclose(found, expected, rtol=2e-5, atol=1e-12, equal_nan=True)
    for n, temperature in enumerate(temperatures):
        alone = sampling.softmax(cupy.asarray(logits[n]), temperature=temperature).get()
        assert np.array_equal(alone, found[n], equal_nan=True)


@settings(max_examples=15)
@given(rows=st.integers(1, 300), vocab=st.integers(1, 12000), data=st.data())
def test_rows_do_not_depend_on_the_batch(rows, vocab, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    logits = cupy.asarray(logits_of(rng, rows, vocab, dtype))
    seed = cupy.asarray(rng.integers(0, 2**62, rows))
    order = cupy.asarray(rng.permutation(rows))
    n = data.draw(st.integers(0, rows - 1))
    probabilities, tokens = sampling.softmax(logits), sampling.sample(logits, seed=seed)
    assert cupy.array_equal(sampling.softmax(logits[order]), probabilities[order])
    assert cupy.array_equal(sampling.softmax(logits[n]), probabilities[n])
    assert cupy.array_equal(sampling.sample(logits[order], seed=seed[order]), tokens[order])
    assert sampling.sample(logits[n], seed=seed[n : n + 1]) == tokens[n]


@pytest.mark.parametrize(("rows", "vocab"), [(3, 33), (130, 2001), (3, 128256)])
def test_draws_of_unusual_rows(rng, rows, vocab):
    """Rows whose best tokens only float64 tells apart, or in which every token is a contender."""
    logits = logits_of(rng, rows, vocab)
    logits[0] = np.sort(logits[0]) * 10
    logits[1] = 0
    logits[2] = -3e38
    for temperature in (1e-30, 0.01, 1.0, 100.0, 1e30):
        options = {"temperature": temperature, "seed": rng.integers(0, 2**62, rows)}
        expected = sampling.sample(logits, **options)
        found = sampling.sample(cupy.asarray(logits), **options)
        assert np.array_equal(found.get(), expected), temperature


def penalties_of(rng, rows, vocab, length):
    """Several sets of penalties, from none that matters to all at once."""
    tokens = rng.integers(-1, vocab + 2, (rows, length)).astype(np.int32)
    tokens[:, ::3] = vocab // 2
    dense = rng.standard_normal((rows, vocab), dtype=np.float32)
    mask = rng.random((rows, vocab)) < 0.5
    width = -(-vocab // 32)
    padded = np.zeros((rows, 32 * width), bool)
    padded[:, :vocab] = mask
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    where, which = rng.integers(-1, rows + 1, 50), rng.integers(-1, vocab + 1, 50)
    triples = (where, which, rng.standard_normal(50).astype(np.float32))
    per_row = rng.uniform(0.5, 2, rows).astype(np.float32)
    return [
        {"tokens": tokens, "repetition": per_row, "frequency": -0.3, "presence": per_row},
        {"tokens": tokens, "repetition": 1.2, "logit_bias": dense[0], "allowed": mask[0]},
        {"tokens": tokens, "frequency": per_row, "logit_bias": triples, "allowed": words},
        {"logit_bias": triples},
        {"allowed": words[:1]},
        {"logit_bias": dense},
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (130, 1003), (4, 128256)])
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}, {"top_k": 200}], ids=str
)
def test_penalized_draws_are_those_of_penalized_logits(
    rng, monkeypatch, dtype, rows, vocab, filters
):
    monkeypatch.setattr(
        dispatch.sampling, "MIN_TABLE_LOGITS", 0
    )  # where a copy would be faster, too
    logits = logits_of(rng, rows, vocab, dtype)
    if vocab > 10:
        logits[0, 3] = np.nan
        filters = dict(filters)
    else:
        filters = {name: value for name, value in filters.items() if name != "top_k"}
    there, seed = cupy.asarray(logits), rng.integers(0, 2**62, rows)
    for options in penalties_of(rng, rows, vocab, 300):
        device = on_gpu(options)
        found = sampling.sample(there, seed=seed, **filters, **device)
        tokens = device.pop("tokens", cupy.full((rows, 1), -1))
        penalized = sampling.apply_penalties(there, tokens, **device)
        assert cupy.array_equal(found, sampling.sample(penalized, seed=seed, **filters))
        expected = sampling.sample(logits, seed=seed, **filters, **options)
        assert np.array_equal(found.get(), expected)


@pytest.mark.parametrize("length", [0, 1, 5000, 40_000])
def test_penalties_of_rows_of_any_length(rng, length):
    """More earlier tokens than a block has memory for are penalized in a launch of their own."""
    logits = logits_of(rng, 3, 140_000)
    tokens = rng.integers(0, 140_000, (3, length)).astype(np.int32)
    options = {"repetition": 1.5, "frequency": 0.1, "presence": 0.2}
    found = sampling.sample(cupy.asarray(logits), seed=4, tokens=cupy.asarray(tokens), **options)
    assert np.array_equal(found.get(), sampling.sample(logits, seed=4, tokens=tokens, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalized_logits_are_numpys_to_the_last_bit(rng, dtype):
    logits = logits_of(rng, 5, 9001, dtype)
    for options in penalties_of(rng, 5, 9001, 400):
        if "tokens" not in options or ("logit_bias" in options and dtype != "float32"):
            continue  # a bias alone is added in float32, and rounded once more for 16 bits
        expected = sampling.apply_penalties(logits, **options)
        found = sampling.apply_penalties(cupy.asarray(logits), **on_gpu(options))
        assert np.array_equal(found.get().astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 10), ("bfloat16", 7)])
def test_penalized_logits_between_two_numbers(monkeypatch, dtype, bits):
    """Just above the middle between two, where float32 has it exactly there: float16 is rounded
    once, from float64, and so the next larger one. ml_dtypes rounds bfloat16 twice."""
    monkeypatch.setattr(dispatch.sampling, "MIN_TABLE_LOGITS", 0)
    logits = np.full((2, 1003), -1, DTYPES[dtype])
    logits[:, 3], logits[:, 500] = 1, 1 + 2.0**-bits
    tokens, frequency = np.full((2, 1), 500, np.int32), 2.0 ** -(bits + 1) - 2.0**-30
    expected = sampling.apply_penalties(logits, tokens, frequency=frequency)
    assert np.all(expected[:, 500] == (logits[:, 500] if dtype == "float16" else 1))
    there, tokens = cupy.asarray(logits), cupy.asarray(tokens)
    found = sampling.apply_penalties(there, tokens, frequency=frequency)
    assert np.array_equal(found.get().astype(np.float64), expected.astype(np.float64))
    for filters in ({}, {"top_k": 20}):
        options = {"tokens": tokens, "frequency": frequency, "temperature": 0, **filters}
        token = sampling.sample(there, **options).get()
        assert np.array_equal(token, [500 if dtype == "float16" else 3] * 2)
