"""Sampling on a GPU: the same tokens as NumPy draws, and the degenerate rows, shapes and graphs of
its own."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np
import pytest

from cuattn import sampling
from cuattn._philox import row_seeds, uniform
from cuattn.gpu.dispatch import sampling as dispatch_sampling

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
VOCABS = [2, 31, 128, 129, 1000, 4097, 32768, 50257, 128256, 151936, 300000]
FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"min_p": 0.05},
    {"typical_p": 0.8},
    {"top_k": 300, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 700, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
]


def logits_of(rng, rows, vocab, dtype="float32", std=4.0):
    return (std * rng.standard_normal((rows, vocab), dtype=np.float32)).astype(DTYPES[dtype])


def name_of(parameters):
    return "-".join(f"{name}{value}" for name, value in parameters.items()) or "plain"


@pytest.mark.parametrize("parameters", FILTERS, ids=name_of)
@pytest.mark.parametrize("std", [1.0, 4.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_are_those_of_numpy(rng, vocab, std, parameters):
    parameters = dict(parameters)
    if "top_k" in parameters:
        parameters["top_k"] = min(parameters["top_k"], vocab)
    logits = logits_of(rng, 3, vocab, std=std)
    seed, offset = rng.integers(0, 2**62, 3), rng.integers(0, 2**62, 3)
    expected = sampling.sample(logits, seed=seed, offset=offset, **parameters)
    tokens = sampling.sample(cupy.asarray(logits), seed=seed, offset=offset, **parameters)
    assert np.array_equal(tokens.get(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 127, 128, 400])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"top_k": 50}, {"top_k": 400}, {"top_p": 0.8}, {"typical_p": 0.7}],
    ids=name_of,
)
def test_any_batch_and_dtype_gives_the_same_tokens(rng, dtype, rows, parameters):
    logits = logits_of(rng, rows, 3001, dtype)
    seed = rng.integers(0, 2**62, rows)
    expected = sampling.sample(logits, seed=seed, offset=7, **parameters)
    on_gpu = cupy.asarray(logits)
    tokens = sampling.sample(on_gpu, seed=seed, offset=7, **parameters)
    assert np.array_equal(tokens.get(), expected)
    one = sampling.sample(on_gpu[rows // 2], seed=int(seed[rows // 2]), offset=7, **parameters)
    assert int(one) == expected[rows // 2]


def ties_at_the_crossing(logits, expected, found):
    """Whether the tokens of a row that one side keeps alone are as typical as the least typical one
    that is kept, to float32: their order is not the same everywhere, and one may be much more
    probable than the next."""
    log_p = logits - np.logaddexp.reduce(logits.astype(np.float64))
    distance = abs(-log_p + (np.exp(log_p) * log_p).sum())
    crossing = distance[expected > -np.inf].max()
    return np.all(abs(distance - crossing)[found != expected] < 1e-5)


@pytest.mark.parametrize("parameters", FILTERS[1:], ids=name_of)
@pytest.mark.parametrize("vocab", [129, 32768, 128256])
def test_filters_keep_what_numpy_keeps(rng, vocab, parameters):
    parameters = dict(parameters)
    if "top_k" in parameters:
        parameters["top_k"] = min(parameters["top_k"], vocab)
    logits = logits_of(rng, 2, vocab, std=2.0)
    expected = sampling.filter_logits(logits, **parameters)
    found = sampling.filter_logits(cupy.asarray(logits), **parameters).get()
    by_probability = parameters.get("top_p", 1) < 1 or parameters.get("typical_p", 1) < 1
    differ = (found != expected).sum()
    if not by_probability:
        assert differ == 0
    elif differ:  # sums of float32 exponentials: the token at the crossing may fall on either side
        assert differ <= 4
        there, here = (np.exp(x.astype(np.float64)).sum(axis=1) for x in (expected, found))
        assert np.allclose(here, there, rtol=1e-5) or (
            "typical_p" in parameters
            and all(ties_at_the_crossing(*row) for row in zip(logits, expected, found, strict=True))
        )
    same = (found > -np.inf) & (expected > -np.inf)
    assert np.array_equal(found[same], expected[same])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(3, 9001), (20, 4096), (140, 257)])
def test_filters_of_a_short_top_k(rng, dtype, rows, vocab):
    """Rows of any alignment, with parameters of their own, and some that have little to keep."""
    wide = logits_of(rng, rows, vocab + 3, dtype)
    wide[0, ::2], wide[1], wide[2, 5] = -np.inf, -np.inf, np.nan
    logits, there = wide[:, 1:-2], cupy.asarray(wide)[:, 1:-2]
    each = {"temperature": np.linspace(0, 2, rows), "top_p": np.linspace(0.01, 1, rows)}
    for options in (
        {"top_k": 1},
        {"top_k": 256},
        {"top_k": 40, "temperature": 0.7, "top_p": 0.9},
        {"top_k": 20, "min_p": 0.05},
        {"top_k": 7, "temperature": 0.0},
        {"top_k": 30, "top_p": 0.0},
        {"top_k": 60, "min_p": 1.0},
        {"top_k": 4, **each},
    ):
        expected = sampling.filter_logits(logits, **options)
        given = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        found = sampling.filter_logits(there, **given).get()
        if "top_p" not in options:
            np.testing.assert_array_equal(found, expected)
            continue
        # The token at the crossing may fall on either side: sums are of float32 exponentials.
        differ = ~((found == expected) | np.isnan(found) & np.isnan(expected))
        assert differ.sum() <= 2
        assert (np.maximum(found, expected)[differ] > -np.inf).all()


def test_ties_rank_by_index():
    logits = cupy.zeros((2, 200_000), np.float32)
    logits[1, 150_000:] = 1
    for top_k in (1, 3, 1000, 60_000):
        found = sampling.filter_logits(logits, top_k=top_k).get() > -np.inf
        expected = sampling.filter_logits(logits.get(), top_k=top_k) > -np.inf
        assert np.array_equal(found, expected)
    found = sampling.filter_logits(logits[:1, :1024], top_p=0.5).get() > -np.inf
    assert np.array_equal(np.flatnonzero(found[0]), np.arange(512))
    values, indices = sampling.top_k(logits, 300)
    assert np.array_equal(indices.get()[0], np.arange(300))
    assert np.array_equal(indices.get()[1], 150_000 + np.arange(300))
    assert (values.get() == [[0], [1]]).all()
    signed = cupy.asarray([[0.0, -0.0, 0.0, -0.0]], np.float32)
    assert sampling.top_k(signed, 4)[1].get().tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("parameters", FILTERS, ids=name_of)
@pytest.mark.parametrize("rows", [5, 200])
def test_degenerate_rows_harm_no_other(rng, rows, parameters):
    logits = logits_of(rng, rows, 5000)
    logits[0, 4000] = np.nan
    logits[1] = -np.inf
    logits[2] = -np.inf
    logits[2, 4999] = -50
    logits[3, 0] = np.inf
    expected = sampling.sample(logits, seed=3, **parameters)
    assert expected[:4].tolist() == [-1, -1, 4999, -1]
    tokens = sampling.sample(cupy.asarray(logits), seed=3, **parameters)
    assert np.array_equal(tokens.get(), expected)
    found = sampling.filter_logits(cupy.asarray(logits), **parameters).get()
    assert np.isnan(found[[0, 3]]).all() and (found[1] == -np.inf).all()


def odd_rows(rng, vocab):
    """Rows of which a pilot sample says little about the rest."""
    ramp = np.linspace(-20, 20, vocab, dtype=np.float32)
    noise = rng.standard_normal(vocab, dtype=np.float32)
    spikes = noise.copy()
    spikes[rng.permutation(vocab)[:30]] = 1e4
    few, masked, hidden = (noise.copy() for _ in range(3))
    few[: vocab - 20], masked[: vocab - 90] = -1e4, -np.inf
    hidden[:] = -np.inf
    hidden[130:135] = 1
    late = 0.1 * noise
    late[-vocab // 20 :] += 30
    rows = [
        ramp,
        ramp[::-1],
        np.full(vocab, -3.0),
        rng.integers(0, 3, vocab),
        4 * noise.astype(ml_dtypes.bfloat16),
        spikes,
        few,
        masked,
        hidden,
        late,
        np.where(noise > 0, 0.0, -0.0),
    ]
    return np.stack([np.asarray(row, np.float32) for row in rows])


def distances_from_entropy(logits):
    """``abs(-log p - entropy)`` of each token, in float64; infinite for one that is hidden."""
    logits = logits.astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    seen = np.where(p > 0, logits, 0)
    mean = np.sum(p * seen, axis=1, keepdims=True) / p.sum(axis=1, keepdims=True)
    return np.abs(logits - mean)


@pytest.mark.parametrize("vocab", [1000, 5000, 128256])
@pytest.mark.parametrize("copies", [1, 12])
def test_rows_in_any_order(rng, vocab, copies):
    logits = odd_rows(rng, vocab)
    seed = np.arange(len(logits))
    on_gpu, seeds = cupy.asarray(np.tile(logits, (copies, 1))), np.tile(seed, copies)
    for parameters in [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 256, "temperature": 3.0},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 200, "top_p": 0.4, "min_p": 0.01},
        {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 9.0},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"min_p": 1e-9, "top_p": 0.999},
        {"top_k": 300},
        {"top_k": 700, "temperature": 9.0},
        {"top_k": 300, "min_p": 0.05},
        {"typical_p": 0.9},
        {"typical_p": 0.2, "temperature": 9.0},
    ]:
        expected = sampling.sample(logits, seed=seed, **parameters)
        tokens = sampling.sample(on_gpu, seed=seeds, **parameters).get()
        assert np.array_equal(tokens, np.tile(expected, copies)), parameters
    expected = np.tile(sampling.sample(logits, seed=seed, typical_p=1e-6), copies)
    tokens = sampling.sample(on_gpu, seed=seeds, typical_p=1e-6).get()
    distance = np.tile(distances_from_entropy(logits), (copies, 1))
    for row in np.flatnonzero(tokens != expected):  # rounding may decide which of two is nearest
        ours, its = distance[row, [tokens[row], expected[row]]]
        finite = np.isfinite(distance[row])
        largest = np.abs(logits[row % len(logits), finite]).max()
        assert 0 < abs(ours - its) <= 2 * np.finfo(np.float32).eps * largest
    for k in (1, 50, 256):
        values, indices = sampling.top_k(on_gpu, k)
        expected = sampling.top_k(logits, k)
        assert np.array_equal(indices.get(), np.tile(expected[1], (copies, 1)))
        assert np.array_equal(values.get(), np.tile(expected[0], (copies, 1)))


def test_more_candidates_than_a_block_has_places_for():
    """Tokens that may win are neighbours, all in one block of the cluster: 264 of them came in each
    reading, where there were places for 256, and the kernel read the row for ever."""
    vocab, nodeid = 128256, "tests/gpu/test_sampling.py::test_rows_in_any_order[1-128256]"
    logits = odd_rows(np.random.default_rng([2412020251, zlib.crc32(nodeid.encode())]), vocab)[9:10]
    expected = sampling.sample(logits, seed=[9], top_p=1e-6)
    tokens = sampling.sample(cupy.asarray(logits), seed=[9], top_p=1e-6)
    assert np.array_equal(tokens.get(), expected)


@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.9}, {"top_k": 700}])
@pytest.mark.parametrize("gap", [1e-3, 3.0, 8.0, 5e3])
def test_tokens_just_below_min_p(gap, parameters):
    """All tokens but one are below min-p's limit by less than float32 resolves. They outweigh that
    one, so that candidates were taken from them alone, for ever."""
    logits = np.full((6, 40000), -gap, np.float32)
    logits[:, 777] = 0
    for temperature in (1.0, max(gap / 3, 1.0)):
        min_p = np.float32(np.exp(logits[0, 0] / np.float64(temperature)))
        min_p = float(np.nextafter(min_p, np.float32(1)))
        filters = {"temperature": temperature, "min_p": min_p, **parameters}
        expected = sampling.sample(logits, seed=5, **filters)
        tokens = sampling.sample(cupy.asarray(logits), seed=5, **filters)
        assert np.array_equal(tokens.get(), expected), filters


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_raised_token_among_equals_counts_once(monkeypatch, dtype):
    """The threshold of the largest 200 lies among equal logits, by index. A token behind it that a
    penalty raised was listed twice, and the last of the 200 was not drawn."""
    monkeypatch.setattr(dispatch_sampling, "MIN_TABLE_LOGITS", 1)  # penalties come in a table
    logits, tokens = np.zeros((1, 4096), DTYPES[dtype]), np.array([[4000, 4001, 4050]])
    filters = {"top_k": 200, "tokens": tokens, "presence": -1.0}
    seeds = np.arange(4000)
    drawn = sampling.sample(
        np.tile(logits, (4000, 1)), seed=seeds, **(filters | {"tokens": np.tile(tokens, (4000, 1))})
    )
    last = [int(seeds[drawn == token][0]) for token in (194, 195, 196)]  # of 0 to 196
    for seed in (*last, 0, 1):
        expected = sampling.sample(logits, seed=[seed], **filters)
        there = filters | {"tokens": cupy.asarray(tokens)}
        found = sampling.sample(cupy.asarray(logits), seed=[seed], **there)
        assert np.array_equal(found.get(), expected)


@pytest.mark.parametrize("temperature", [1e33, 1e36, 1e37, 3e38])
def test_temperatures_past_what_float32_averages_end(rng, temperature):
    """Of such rows the mean logit may be infinite, and no token was typical, for ever."""
    logits = logits_of(rng, 4, 4097)
    logits[1, 5::2] = -np.inf
    logits[2] *= np.float32(1e33)
    logits[3, 7:] = -3e38
    for filters in ({"typical_p": 0.9}, {"typical_p": 1e-6}, {"top_p": 0.5}, {"min_p": 0.5}):
        there = {"temperature": cupy.full(4, temperature, np.float32), **filters}
        tokens = sampling.sample(cupy.asarray(logits), seed=1, **there)
        assert (tokens.get() >= -1).all() and (tokens.get() < 4097).all()


@pytest.mark.parametrize("temperature", [1e37, 3e38, 10**60])
@pytest.mark.parametrize("filters", [{"typical_p": 0.5}, {"min_p": 1.0}, {"top_p": 0.5}, {}])
def test_temperatures_of_the_host_have_a_largest_one(rng, temperature, filters):
    """Beyond it typical-p found no token, and softmax gave NaN."""
    logits = rng.standard_normal((3, 1000), np.float32)
    options = {"temperature": temperature, "seed": 5, **filters}
    expected = sampling.sample(logits, **options)
    assert np.array_equal(sampling.sample(cupy.asarray(logits), **options).get(), expected)
    probabilities = sampling.softmax(cupy.asarray(logits), temperature=temperature).get()
    np.testing.assert_allclose(probabilities, np.full((3, 1000), 1e-3), rtol=1e-5)


@pytest.mark.not_emulated("a row of 134 million tokens takes hours")
def test_more_tokens_than_candidates_can_be_told_apart_of():
    """One in 2^16 tokens passes as a candidate whatever its logit: of 2^27 there were more than
    places, in each reading."""
    logits = cupy.zeros((1, 1 << 27), np.float16)
    logits[0, 1 << 26 :] = -1
    for filters in ({"top_p": 0.5}, {"min_p": 0.5}, {"top_p": 0.5, "top_k": cupy.asarray([300])}):
        token = int(sampling.sample(logits, seed=1, **filters)[0])
        assert 0 <= token < 1 << 26, filters


@pytest.mark.parametrize("scale", [1e-30, 1e6, 1e37])
def test_logits_of_any_size(rng, scale):
    logits = logits_of(rng, 4, 9001, std=1.0) * np.float32(scale)
    logits[1, 5] = -3e38
    logits[2, 5:7] = -3e38, 3e38  # their difference is past float32
    for parameters in FILTERS[:12]:
        expected = sampling.sample(logits, seed=1, **parameters)
        tokens = sampling.sample(cupy.asarray(logits), seed=1, **parameters)
        assert np.array_equal(tokens.get(), expected), parameters


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "k"), [(2, 1), (50, 50), (300, 256), (128256, 50), (32768, 512), (5000, 2000)]
)
def test_top_k_values_and_indices(rng, dtype, vocab, k):
    logits = logits_of(rng, 5, vocab, dtype)
    logits[1, vocab // 2] = np.nan
    logits[2] = -np.inf
    values, indices = sampling.top_k(cupy.asarray(logits), k)
    expected = sampling.top_k(logits, k)
    assert np.array_equal(indices.get(), expected[1])
    assert np.array_equal(values.get().astype(float), expected[0].astype(float), equal_nan=True)


def test_a_long_top_k_sorts_some_rows_at_a_time(rng, monkeypatch):
    logits = logits_of(rng, 7, 1000)
    logits[4, 3] = np.nan
    expected = sampling.top_k(logits, 300)
    for at_once in (1, 2000, 3999, 1 << 24):
        monkeypatch.setattr("cuattn.gpu.sampling._SORTED_AT_ONCE", at_once)
        for found, wanted in zip(sampling.top_k(cupy.asarray(logits), 300), expected, strict=True):
            assert np.array_equal(found.get(), wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [2, 129, 128256])
def test_softmax(rng, dtype, vocab):
    logits = logits_of(rng, 4, vocab, dtype)
    logits[1] = -np.inf
    logits[2, 1] = np.nan
    temperatures = np.array([1.0, 1.0, 1.0, 0.0])
    expected = sampling.softmax(logits, temperature=temperatures)
    found = sampling.softmax(cupy.asarray(logits), temperature=temperatures).get()
    assert np.allclose(found, expected, rtol=2e-5, atol=1e-12, equal_nan=True)


def test_parameters_on_the_device_are_clamped():
    logits = np.random.default_rng(3).standard_normal((6, 500)).astype(np.float32)
    given = {
        "temperature": [-1.0, np.nan, 1.0, 1.0, 1.0, 1.0],
        "top_k": [500, 500, -3, 10_000, 500, 500],
        "top_p": [1.0, 1.0, 1.0, 7.0, -1.0, np.nan],
    }
    valid = {
        "temperature": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        "top_k": [500, 500, 1, 500, 500, 500],
        "top_p": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
    }
    tokens = sampling.sample(
        cupy.asarray(logits), seed=2, **{name: cupy.asarray(value) for name, value in given.items()}
    )
    arrays = {name: np.array(value) for name, value in valid.items()}
    assert np.array_equal(tokens.get(), sampling.sample(logits, seed=2, **arrays))


def test_parameters_of_another_kind_on_the_device_are_named():
    logits, ones = cupy.zeros((3, 50), np.float32), cupy.ones(3, np.float32)
    for parameter, values, words in [
        ("top_k", ones, "top_k must be integers, has dtype float32"),
        ("seed", ones, "seed must be integers, has dtype float32"),
        ("offset", ones > 0, "offset must be integers, has dtype bool"),
        ("top_p", ones > 0, "top_p must be real numbers, has dtype bool"),
        ("logit_bias", cupy.ones(50, np.complex64), "logit_bias must be real numbers"),
    ]:
        with pytest.raises(TypeError, match=words):
            sampling.sample(logits, **({"seed": 0} | {parameter: values}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 40_000])
def test_each_row_has_its_own_filters(rng, dtype, vocab):
    """Rows of one call may need different kernels."""
    logits = logits_of(rng, 60, vocab, dtype)
    by_row = {
        "temperature": rng.choice([0.0, 0.7, 1.5], 60),
        "top_k": rng.choice([1, 40, 256, 257, 700, vocab], 60),
        "top_p": rng.choice([0.0, 0.5, 0.95, 1.0], 60),
        "min_p": rng.choice([0.0, 0.05], 60),
        "typical_p": rng.choice([0.8, 1.0], 60),
    }
    expected = sampling.sample(logits, seed=5, **by_row)
    there = {name: cupy.asarray(value) for name, value in by_row.items()}
    tokens = sampling.sample(cupy.asarray(logits), seed=5, **there)
    assert np.array_equal(tokens.get(), expected)
    for some in [("top_k", "temperature"), ("top_p",), ("min_p",), ("typical_p",)]:
        expected = sampling.sample(logits, seed=6, **{name: by_row[name] for name in some})
        tokens = sampling.sample(
            cupy.asarray(logits), seed=6, **{name: there[name] for name in some}
        )
        assert np.array_equal(tokens.get(), expected)


@pytest.mark.parametrize("seed", [0, 5, -7, 2**64 - 1])
@pytest.mark.parametrize("rows", [1, 30, 200])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 900}, {"typical_p": 0.9}],
    ids=name_of,
)
def test_a_scalar_seed_gives_each_row_the_stream_that_numpy_gives(rng, seed, rows, parameters):
    row = logits_of(rng, 1, 3000, std=1.0)
    logits = np.ascontiguousarray(np.broadcast_to(row, (rows, 3000)))
    expected = sampling.sample(logits, seed=seed, offset=2, **parameters)
    tokens = sampling.sample(cupy.asarray(logits), seed=seed, offset=2, **parameters)
    assert np.array_equal(tokens.get(), expected)
    assert rows == 1 or len(np.unique(expected)) > min(rows, 50) // 3
    streams = cupy.asarray(row_seeds(seed % 2**64, rows))
    tokens = sampling.sample(cupy.asarray(logits), seed=streams, offset=2, **parameters)
    assert np.array_equal(tokens.get(), expected)


def test_no_seed_draws_anew_at_each_call():
    logits = cupy.zeros((40, 1000), np.float32)
    for parameters in ({}, {"top_k": 200}, {"top_p": 0.9}, {"typical_p": 0.9}):
        first, second = (sampling.sample(logits, **parameters).get() for _ in range(2))
        assert len(np.unique(first)) > 20 and (first != second).sum() > 20


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_integers_that_do_not_fit_are_clamped(rng, dtype):
    """Those that would wrap to a token or a row of the call are no token and no row."""
    wide = np.dtype(dtype).itemsize == 8
    high = [2**32, 2**32 + 5, 2**63 - 1] if wide else [2**31, 2**32 - 1, 2**31 + 5]
    huge = np.array([*high, *([-(2**32), -(2**63), -1] if dtype == np.int64 else high)], dtype)
    rows = len(huge)
    logits = logits_of(rng, rows, 300)
    there, tokens = cupy.asarray(logits), cupy.asarray(huge)
    assert np.isnan(sampling.logprobs(there, tokens)[0].get()).all()
    options = {"repetition": 2.0, "frequency": 1.0, "presence": 1.0}
    same = sampling.apply_penalties(there, tokens[:, None], **options)
    assert np.array_equal(same.get(), logits)
    zeros, ones = cupy.zeros(rows, dtype), cupy.ones(rows, np.float32)
    for triples in ((tokens, zeros, ones), (zeros, tokens, ones)):
        none = cupy.full((rows, 1), -1, np.int32)
        same = sampling.apply_penalties(there, none, logit_bias=triples)
        assert np.array_equal(same.get(), logits)
    expected = sampling.sample(logits, seed=1)
    for found in (
        sampling.sample(there, seed=1, tokens=tokens[:, None], **options),
        sampling.sample(there, seed=1, logit_bias=(tokens, zeros, ones)),
        sampling.sample(there, seed=1, logit_bias=(zeros, tokens, ones)),
    ):
        assert np.array_equal(found.get(), expected)
    top_k = np.where(huge.astype(np.float64) > 0, 300, 1)
    found = sampling.sample(there, seed=1, top_k=tokens)
    assert np.array_equal(found.get(), sampling.sample(logits, seed=1, top_k=top_k))


def test_drafts_that_cannot_be_are_never_accepted(rng):
    target = rng.dirichlet(np.full(50, 0.3), (60, 4)).astype(np.float32)
    draft, drawn = target[:, :3].copy(), rng.integers(0, 50, (60, 3))
    negative = np.where(draft < 0.02, -draft, draft)
    there = [cupy.asarray(array) for array in (negative, target)]
    expected = sampling.speculative_sample(drawn, np.maximum(negative, 0), target, seed=4)
    found = sampling.speculative_sample(cupy.asarray(drawn), *there, seed=4)
    for got, want in zip(found, expected, strict=True):
        assert np.array_equal(got.get(), want)
    there = [cupy.asarray(array) for array in (draft, target)]
    for wrong in ([-1, 2, 1], [2**32 - 1, 1, 2], [2**32, 2**33, -(2**32)]):
        parents = cupy.asarray(np.tile(np.array(wrong), (60, 1)))
        valid = [-1 if p == -1 else 7 for p in wrong]
        none = np.where(np.array(valid) == 7, -1, drawn)  # a token of -1 is none
        tree = np.full((60, 3), -1)
        expected = sampling.speculative_sample_tree(none, tree, draft, target, seed=4)
        found = sampling.speculative_sample_tree(cupy.asarray(drawn), parents, *there, seed=4)
        for got, want in zip(found, expected, strict=True):
            assert np.array_equal(got.get(), want)


class OfAnotherLibrary:
    """An array on the device that has `__cuda_array_interface__` and nothing else."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


def test_arrays_of_other_libraries(rng):
    logits, seed = logits_of(rng, 3, 2000), rng.integers(0, 1 << 40, 3)
    parameters = {"temperature": rng.random(3, np.float32), "seed": seed, "offset": seed[::-1]}
    there = {name: OfAnotherLibrary(cupy.asarray(value)) for name, value in parameters.items()}
    tokens = sampling.sample(OfAnotherLibrary(cupy.asarray(logits)), **there)
    assert np.array_equal(tokens.get(), sampling.sample(logits, **parameters))


@pytest.mark.parametrize("parameters", [{}, {"top_k": 20, "top_p": 0.9}], ids=name_of)
def test_offsets_advance_on_the_device_between_replays(rng, parameters):
    logits = logits_of(rng, 4, 3000, std=1.0)
    on_gpu, offset = cupy.asarray(logits), cupy.zeros(4, np.uint64)
    sampling.sample(on_gpu, seed=9, offset=offset, **parameters)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        tokens = sampling.sample(on_gpu, seed=9, offset=offset, **parameters)
        offset += np.uint64(1)
        graph = stream.end_capture()
        for step in range(4):
            graph.launch(stream)
            stream.synchronize()
            expected = sampling.sample(logits, seed=9, offset=step, **parameters)
            assert np.array_equal(tokens.get(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_are_those_of_numpy(rng, dtype):
    logits = logits_of(rng, 4, 9000, dtype)
    tokens = rng.integers(-1, 9000, (4, 300))
    tokens[:, ::3] = 17
    bias, mask = rng.standard_normal((4, 9000), dtype=np.float32), rng.random(9000) < 0.5
    words = np.packbits(np.pad(mask, (0, 9024 - 9000)), bitorder="little").view(np.uint32)
    triples = (np.array([0, 1, 1]), np.array([5, 17, 8999]), np.array([1.5, -2.0, 3.0]))
    cases = [
        {},
        {"repetition": 1.3, "frequency": np.array([0.1, 0.2, 0.0, -0.1]), "presence": 0.5},
        {"logit_bias": bias, "allowed": mask, "repetition": 1.2},
        {"logit_bias": triples, "allowed": words},
    ]
    for options in cases:
        expected = sampling.apply_penalties(logits, tokens, **options).astype(np.float64)
        there = {
            name: tuple(map(cupy.asarray, value))
            if isinstance(value, tuple)
            else cupy.asarray(value)
            if name in ("logit_bias", "allowed")
            else value
            for name, value in options.items()
        }
        found = sampling.apply_penalties(cupy.asarray(logits), cupy.asarray(tokens), **there)
        step = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
        assert found.dtype == DTYPES[dtype]
        found = found.get().astype(np.float64)
        assert np.array_equal(np.isneginf(found), np.isneginf(expected))
        assert np.allclose(found, expected, rtol=step, atol=4e-6)


@pytest.mark.parametrize("parents", [None, [-1, -1, 0, 0, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("vocab", [40, 5000])
def test_speculation_is_that_of_numpy(rng, vocab, parents):
    rows, drafts = 50, 5
    target = rng.dirichlet(np.full(vocab, 0.1), (rows, drafts + 1)).astype(np.float32)
    draft = (0.5 * target[:, :drafts] + 0.5 / vocab).astype(np.float32)
    drawn = np.array(
        [[rng.choice(vocab, p=p / p.sum()) for p in row.astype(float)] for row in draft]
    )
    drawn[0, 2:] = -1
    target[1, :, 3] = np.nan
    options = {"seed": rng.integers(0, 2**62, rows), "offset": 5}
    there = [cupy.asarray(a) for a in (drawn, draft, target)]
    if parents is None:
        expected = sampling.speculative_sample(drawn, draft, target, **options)
        found = sampling.speculative_sample(*there, **options)
    else:
        tree = np.broadcast_to(np.array(parents), (rows, drafts)).copy()
        expected = sampling.speculative_sample_tree(drawn, tree, draft, target, **options)
        found = sampling.speculative_sample_tree(
            there[0], cupy.asarray(tree), *there[1:], **options
        )
    assert np.array_equal(found[1].get(), expected[1])
    assert np.array_equal(found[0].get(), expected[0])
    assert expected[1].max() > 0 and expected[1].min() == 0


def rounding_of_log_probabilities(logits, scores=0.0):
    """How much float32 may change a logit, less the largest of its row, less the logarithm of the
    sum of exponentials, plus a score.

    The terms may cancel, so the bound is absolute: each addition rounds by at most eps / 2 of its
    terms, and the sum of exponentials has a relative error of a few eps, which its logarithm turns
    into an absolute one.
    """
    terms = np.ptp(logits[np.isfinite(logits)]), np.log(logits.shape[-1]), np.max(np.abs(scores))
    return float(np.finfo(np.float32).eps) * (8 + sum(terms))


def test_logprobs_and_beams_are_those_of_numpy(rng):
    logits = logits_of(rng, 12, 3000)
    bound = rounding_of_log_probabilities(logits)
    logits[11] = -np.inf
    tokens = rng.integers(0, 3000, (12, 3))
    expected = sampling.logprobs(logits, tokens, top_n=7)
    found = sampling.logprobs(cupy.asarray(logits), cupy.asarray(tokens), top_n=7)
    assert np.array_equal(found[2].get(), expected[2])
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert np.allclose(a.get(), b, rtol=0, atol=bound)
    beams, scores = logits.reshape(3, 4, 3000), rng.standard_normal((3, 4)).astype(np.float32)
    bound = rounding_of_log_probabilities(beams, scores)
    scores[0, 1:] = -np.inf
    expected = sampling.beam_step(beams, scores)
    found = sampling.beam_step(cupy.asarray(beams), cupy.asarray(scores))
    assert np.allclose(found[0].get(), expected[0], rtol=0, atol=bound)
    assert np.array_equal(found[1].get(), expected[1]) and np.array_equal(
        found[2].get(), expected[2]
    )


def test_rows_any_stride_apart_and_far_apart(rng):
    wide = cupy.asarray(logits_of(rng, 6, 700))
    part = wide[::2, 5:618]
    assert np.array_equal(
        sampling.sample(part, seed=4, top_k=9).get(), sampling.sample(part.get(), seed=4, top_k=9)
    )
    row = logits_of(rng, 1, 1000, "bfloat16")
    far = cupy.zeros((2_200_000_000,), np.uint8).view(DTYPES["bfloat16"])
    rows = cupy.lib.stride_tricks.as_strided(far, (2, 1000), (2_199_990_000 // 2 * 2, 2))
    rows[1] = cupy.asarray(row[0])
    tokens = sampling.sample(rows, seed=np.ones(2, int))
    assert int(tokens[1]) == sampling.sample(row, seed=1)[0]


def test_uniform_numbers_are_numpys_bit_for_bit():
    """Of two tokens whose logits differ by d, the first wins iff E1 / E0 > exp(-d): bisection reads
    the ratio's bits."""
    seeds = np.arange(4000)
    pair = np.zeros((4000, 2), np.float32)
    u = uniform(seeds.astype(np.uint64), np.zeros(4000, np.uint64), 2).astype(np.float64)
    gap = np.log(np.log1p(-u[:, 0]) / np.log1p(-u[:, 1]))
    for shift in (-1e-6, 1e-6):
        pair[:, 0] = (gap * (1 + shift)).astype(np.float32)
        tokens = sampling.sample(cupy.asarray(pair), seed=seeds).get()
        assert np.array_equal(tokens, sampling.sample(pair, seed=seeds))
