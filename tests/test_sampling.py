"""Sampling on NumPy: each function against its definition, token by token, and draws against their
distribution."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from cuattn import sampling
from cuattn._philox import philox4x32, row_seeds, uniform, uniform_at
from cuattn.gpu import dispatch
from cuattn.reference import sampling as reference

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
WORD = np.uint64


def define_kept(row, temperature, top_k, top_p, min_p, typical_p):
    """The tokens that are left of one row, by the definitions, one token at a time."""
    row = [float(x) for x in row]
    if temperature == 0:
        top_k, temperature = 1, 1.0
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    left = [i for i in order if row[i] > -math.inf][:top_k]
    if not left:
        return set()
    weight = {i: math.exp((row[i] - row[left[0]]) / temperature) for i in left}
    if top_p < 1:
        total, reached, run = math.fsum(weight[i] for i in left), 0.0, []
        for i in left:
            if run and reached >= top_p * total:
                break
            run.append(i)
            reached += weight[i]
        left = run
    left = [i for i in left if weight[i] >= min_p * weight[left[0]]]
    if typical_p < 1:
        total = math.fsum(weight[i] for i in left)
        surprise = {i: math.log(total) - math.log(weight[i]) for i in left if weight[i] > 0}
        entropy = math.fsum(weight[i] / total * surprise[i] for i in surprise)
        ranked = sorted(surprise, key=lambda i: abs(surprise[i] - entropy))
        reached, run = 0.0, []
        for i in ranked:
            if run and reached >= typical_p * total:
                break
            run.append(i)
            reached += weight[i]
        left = run
    return set(left)


def kept(filtered):
    return [set(np.flatnonzero(row > -np.inf)) for row in filtered]


def test_philox_gives_the_published_vectors():
    cases = [
        (7, [0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            7,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
        (10, [0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            10,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for rounds, counter, key, words in cases:
        found = philox4x32(tuple(map(WORD, counter)), tuple(map(WORD, key)), rounds)
        assert " ".join(f"{int(word):08x}" for word in found) == words


def test_uniform_numbers_depend_on_their_place_alone():
    seed, offset = np.array([1, 1, 2**63 + 5], WORD), np.array([0, 2**40, 0], WORD)
    numbers = uniform(seed, offset, 1000)
    assert numbers.dtype == np.float32 and 0 < numbers.min() and numbers.max() < 1
    assert np.array_equal(numbers[2:, :129], uniform(seed[2:], offset[2:], 129))
    assert len(np.unique(numbers)) > 2990
    assert not np.array_equal(numbers, uniform(seed, offset, 1000, stream=1))
    assert scipy.stats.kstest(uniform(seed[:1], offset[:1], 100_000)[0], "uniform").pvalue > 1e-3


def test_some_uniform_numbers_are_those_of_all(rng):
    seed, offset = rng.integers(0, 2**63, (2, 4)).astype(WORD)
    row, index = rng.integers(0, 4, 900), rng.integers(0, 5000, 900)
    for stream in (0, 1):
        found = uniform_at(seed[row], offset[row], index, stream)
        assert np.array_equal(found, uniform(seed, offset, 5000, stream)[row, index])


@given(seed=st.integers(0, 2**32))
def test_long_rows_are_filtered_as_short_ones(seed):
    """Whether a row is sorted whole or only as far as needed."""
    rng = np.random.default_rng(seed)
    logits = (rng.choice([0.1, 1, 5]) * rng.standard_normal((6, 400))).astype(DTYPES[seed % 3])
    logits[0] = np.round(logits[0])  # equal ones
    logits[1, 200:], logits[2], logits[3, 7] = -np.inf, -np.inf, np.nan
    options = {
        "temperature": rng.choice([0, 0.3, 1, 3], 6),
        "top_k": rng.choice([1, 5, 40, 400], 6),
        "top_p": rng.choice([0, 0.2, 0.9, 0.999, 1], 6),
        "min_p": rng.choice([0, 0.1], 6),
    }
    calls = [
        lambda: sampling.filter_logits(logits, **options),
        lambda: sampling.sample(logits, seed=seed, **options),
        lambda: sampling.softmax(logits, temperature=options["temperature"]),
        *(
            functools.partial(lambda k, n: sampling.top_k(logits, k)[n], k, n)
            for k in (3, 60)
            for n in (0, 1)
        ),
        *(functools.partial(lambda n: sampling.logprobs(logits, top_n=9)[n], n) for n in (1, 2)),
    ]
    expected = [call() for call in calls]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_SORTED_VOCAB", 4)
        patch.setattr(reference, "_FIRST_RANKS", 2)
        patch.setattr(reference, "_CHUNK_TOKENS", 800)
        for call, want in zip(calls, expected, strict=True):
            assert np.array_equal(call().astype(float), want.astype(float), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"temperature": 0.5, "top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
        {"temperature": 0.0, "typical_p": 0.5},
        {"top_p": 0.0},
    ],
    ids=lambda parameters: "-".join(parameters),
)
def test_filters_keep_what_their_definition_keeps(rng, dtype, parameters):
    logits = (2 * rng.standard_normal((5, 97))).astype(dtype)
    filtered = sampling.filter_logits(logits, **parameters)
    defaults = {"temperature": 1.0, "top_k": 97, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    values = {**defaults, **parameters}
    single = {name: float(np.float32(value)) for name, value in values.items() if name != "top_k"}
    expected = [define_kept(row, top_k=values["top_k"], **single) for row in logits]
    assert kept(filtered) == expected
    temperature = values["temperature"] or 1.0
    scaled = (logits.astype(np.float64) / temperature).astype(np.float32)
    assert np.array_equal(filtered, np.where(filtered > -np.inf, scaled, -np.inf))


def test_equal_logits_rank_by_index():
    logits = np.zeros((1, 10), np.float32)
    logits[0, 4] = 1
    assert kept(sampling.filter_logits(logits, top_k=3)) == [{4, 0, 1}]
    assert kept(sampling.filter_logits(np.zeros((1, 8), np.float32), top_p=0.5)) == [{0, 1, 2, 3}]
    assert kept(sampling.filter_logits(np.zeros((1, 8), np.float32), typical_p=0.6)) == [
        {0, 1, 2, 3, 4}
    ]
    values, indices = sampling.top_k(logits, 4)
    assert indices.tolist() == [[4, 0, 1, 2]] and values.tolist() == [[1, 0, 0, 0]]


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]])).astype(np.float32)
    assert kept(sampling.filter_logits(logits, top_p=0.6)) == [{0, 1}]
    assert kept(sampling.filter_logits(logits, top_p=0.45)) == [{0}]


@pytest.mark.parametrize(
    "greedily", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"min_p": 1.0}]
)
def test_limits_are_greedy(rng, greedily):
    logits = rng.standard_normal((20, 50)).astype(np.float32)
    expected = logits.argmax(axis=1)
    assert np.array_equal(sampling.greedy(logits), expected)
    assert np.array_equal(sampling.sample(logits, seed=3, **greedily), expected)


def degenerate(vocab=300):
    """Rows that hold, in turn: a NaN; only -inf; -inf but one; +inf; plain numbers."""
    logits = np.random.default_rng(5).standard_normal((5, vocab)).astype(np.float32)
    logits[0, vocab // 3] = np.nan
    logits[1] = -np.inf
    logits[2] = -np.inf
    logits[2, vocab - 1] = -50
    logits[3, 0] = np.inf
    return logits


FILTERS = [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5}]


@pytest.mark.parametrize("parameters", FILTERS)
def test_degenerate_rows_harm_no_other(parameters):
    logits = degenerate()
    tokens = sampling.sample(logits, seed=np.ones(5, int), **parameters)
    alone = sampling.sample(logits[4], seed=1, **parameters)
    assert tokens.tolist() == [-1, -1, 299, -1, int(alone)]
    filtered = sampling.filter_logits(logits, **parameters)
    assert np.isnan(filtered[[0, 3]]).all() and (filtered[1] == -np.inf).all()
    assert kept(filtered[2:3]) == [{299}]


def test_degenerate_rows_of_the_other_functions():
    logits = degenerate()
    assert sampling.greedy(logits).tolist() == [-1, -1, 299, -1, logits[4].argmax()]
    probabilities = sampling.softmax(logits)
    assert np.isnan(probabilities[[0, 3]]).all() and (probabilities[1] == 0).all()
    assert np.allclose(probabilities[[2, 4]].sum(axis=1), 1)
    assert (sampling.top_k(logits, 3)[1][[0, 3]] == -1).all()
    chosen, values, _ = sampling.logprobs(logits, np.array([0, 0, 299, 0, -1]), top_n=1)
    assert np.isnan(chosen[[0, 3, 4]]).all() and chosen[1] == -np.inf and chosen[2] == 0
    assert values[2] == 0


@given(batch=st.integers(1, 12), seed=st.integers(-(2**63), 2**63 - 1), data=st.data())
def test_a_row_is_drawn_the_same_in_any_batch(batch, seed, data):
    rng = np.random.default_rng(abs(seed))
    logits = rng.standard_normal((batch, 200)).astype(np.float32)
    seeds = rng.integers(0, 2**62, batch)
    offsets = rng.integers(0, 2**62, batch)
    temperatures = rng.uniform(0, 2, batch).astype(np.float32)
    tokens = sampling.sample(
        logits, temperature=temperatures, top_p=0.9, seed=seeds, offset=offsets
    )
    order = np.array(data.draw(st.permutations(range(batch))))
    moved = sampling.sample(
        logits[order],
        temperature=temperatures[order],
        top_p=0.9,
        seed=seeds[order],
        offset=offsets[order],
    )
    assert np.array_equal(moved, tokens[order])
    alone = sampling.sample(
        logits[0],
        temperature=temperatures[:1],
        top_p=0.9,
        seed=int(seeds[0]),
        offset=int(offsets[0]),
    )
    assert alone == tokens[0]


@pytest.mark.parametrize("varied", ["seed", "offset", "row"])
@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.7, "top_k": 6}, {"top_p": 0.9}])
def test_draws_follow_the_filtered_distribution(varied, parameters):
    row = np.random.default_rng(1).standard_normal(12).astype(np.float32) * 2
    draws = 20_000
    numbers, none = np.arange(draws), np.zeros(draws, int)
    seeds = {
        "seed": {"seed": numbers},
        "offset": {"seed": none, "offset": numbers},
        "row": {"seed": 3},
    }
    tokens = sampling.sample(np.broadcast_to(row, (draws, 12)), **seeds[varied], **parameters)
    expected = (
        sampling.softmax(sampling.filter_logits(row, **parameters)).astype(np.float64) * draws
    )
    counts = np.bincount(tokens, minlength=12)
    assert (counts[expected == 0] == 0).all()
    there = expected > 0
    expected = expected[there] * draws / expected[there].sum()
    assert scipy.stats.chisquare(counts[there], expected).pvalue > 1e-3


def test_a_scalar_seed_gives_each_row_a_stream_of_its_own():
    logits = np.zeros((500, 1000), np.float32)
    tokens = sampling.sample(logits, seed=5)
    assert len(np.unique(tokens)) > 350
    assert np.array_equal(sampling.sample(logits, seed=5), tokens)
    assert not np.array_equal(sampling.sample(logits, seed=5, offset=1), tokens)
    assert sampling.sample(logits[0], seed=5) == tokens[0]
    streams = [(5 + row * 0x9E3779B97F4A7C15) % 2**64 for row in range(500)]
    assert np.array_equal(sampling.sample(logits, seed=np.array(streams, WORD)), tokens)
    assert np.array_equal(sampling.sample(logits, seed=np.array(5)), tokens)
    assert np.array_equal(sampling.sample(logits, seed=-1), sampling.sample(logits, seed=2**64 - 1))


@pytest.mark.parametrize("parameter", ["seed", "offset"])
def test_a_list_may_have_any_words_of_64_bits(parameter):
    """Some of which NumPy would bring to float64, for want of one type of integers."""
    logits, words = np.zeros((3, 1000), np.float32), [2**64 - 1, 7, -(2**63)]
    given = np.array([word % 2**64 for word in words], WORD)
    right = sampling.sample(logits, **{"seed": 5, parameter: given})
    for some in (words, tuple(words)):
        assert np.array_equal(sampling.sample(logits, **{"seed": 5, parameter: some}), right)
    for wrong in ([2**64, 0, 1], [0, 1, -(2**63) - 1]):
        with pytest.raises(ValueError, match=f"{parameter} must be of 64 bits, got"):
            sampling.sample(logits, **{"seed": 5, parameter: wrong})
    for wrong in ([1.0, 2, 3], [True, False, True]):
        with pytest.raises(TypeError, match=f"{parameter} must be an integer or integers"):
            sampling.sample(logits, **{"seed": 5, parameter: wrong})


def test_rows_of_small_seeds_never_draw_alike():
    streams = np.stack([row_seeds(seed, 4096) for seed in range(64)])
    assert len(np.unique(streams)) == streams.size
    # Multiples of a number near the golden ratio come closest to 0 at the Fibonacci numbers.
    rows, after = 1, 2
    while rows < 2**31:
        apart = rows * 0x9E3779B97F4A7C15 % 2**64
        assert min(apart, 2**64 - apart) > 2**31
        rows, after = after, rows + after


def test_no_seed_draws_anew_at_each_call(rng):
    logits = np.zeros((40, 1000), np.float32)
    first, second = sampling.sample(logits), sampling.sample(logits)
    assert len(np.unique(first)) > 30 and (first != second).sum() > 30
    assert (sampling.sample(logits, seed=None) != first).sum() > 30
    target = probabilities(rng, 200, 3, 50)
    draft, drawn = np.full((200, 2, 50), 1 / 50, np.float32), rng.integers(0, 50, (200, 2))
    for call in (
        lambda: sampling.speculative_sample(drawn, draft, target),
        lambda: sampling.speculative_sample_tree(drawn, np.full((200, 2), -1), draft, target),
    ):
        assert not np.array_equal(call()[0], call()[0])


def test_penalties_by_their_definition(rng):
    logits = rng.standard_normal((3, 40)).astype(np.float32)
    tokens = np.array([[1, 1, 5, -1], [39, 0, 40, 7], [-1, -1, -1, -1]])
    repetition, frequency = np.array([1.5, 2.0, 3.0]), np.array([0.1, 0.2, 0.3])
    dense = rng.standard_normal(40).astype(np.float32)
    allowed = rng.random((3, 40)) < 0.7
    expected = logits.astype(np.float64)
    for row in range(3):
        for token in range(40):
            count = list(tokens[row]).count(token)
            if count:
                x = expected[row, token]
                x = x / repetition[row] if x > 0 else x * repetition[row]
                expected[row, token] = x - np.float32(frequency[row]) * count - 0.5
    got = sampling.apply_penalties(
        logits, tokens, repetition=repetition, frequency=frequency, presence=0.5
    )
    assert np.allclose(got, expected, atol=1e-6)
    got = sampling.apply_penalties(
        logits,
        tokens,
        repetition=repetition,
        frequency=frequency,
        presence=0.5,
        logit_bias=dense,
        allowed=allowed,
    )
    assert np.allclose(got, np.where(allowed, expected + dense, -np.inf), atol=1e-6)

    words = np.zeros((3, 64), bool)
    words[:, :40] = allowed
    packed = np.packbits(words, axis=1, bitorder="little").view(np.uint32)
    triples = (np.array([0, 0, 2, 9]), np.array([3, 3, 8, 0]), np.array([1.0, 2.0, -1.0, 5.0]))
    got = sampling.apply_penalties(logits, tokens, logit_bias=triples, allowed=packed)
    biased = logits.copy()
    biased[0, 3] += 3
    biased[2, 8] -= 1
    assert np.allclose(got, np.where(allowed, biased, -np.inf), atol=1e-6)
    out = logits.copy()
    assert sampling.apply_penalties(out, tokens, presence=1.0, out=out) is out
    assert out[0, 1] == np.float32(logits[0, 1] - 1)


@given(batch=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_a_draw_takes_penalties_along(batch, seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((batch, 70)).astype(DTYPES[seed % 3])
    tokens = rng.integers(-1, 70, (batch, 9))
    penalties = {"repetition": rng.uniform(0.5, 2, batch), "frequency": 0.2, "presence": -0.1}
    penalties["allowed"] = rng.random((batch, 70)) < 0.8
    draw = {"temperature": rng.uniform(0, 2, batch), "seed": rng.integers(0, 2**62, batch)}
    penalized = sampling.apply_penalties(logits, tokens, **penalties)
    expected = sampling.sample(penalized, **draw)
    assert np.array_equal(sampling.sample(logits, tokens=tokens, **draw, **penalties), expected)
    order = rng.permutation(batch)
    moved = {k: v[order] if isinstance(v, np.ndarray) else v for k, v in (draw | penalties).items()}
    found = sampling.sample(logits[order], tokens=tokens[order], **moved)
    assert np.array_equal(found, expected[order])
    bias = np.zeros(70, np.float32)
    bias[7] = 1e4
    assert (sampling.sample(logits, logit_bias=bias) == 7).all()


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100", "sm_120"])
@given(rows=st.integers(1, 4096), vocab=st.integers(1, 400_000), length=st.integers(0, 9000))
def test_every_choice_of_a_kernel_is_a_listed_variant(arch, rows, vocab, length):
    listed = set(dispatch.sampling_variants(arch))
    for dtype in dispatch.sampling.LOGIT_DTYPES:
        softmax = dispatch.softmax(dtype, rows, vocab, arch)
        assert softmax.variant in listed
        assert softmax.grid == (rows * softmax.variant.config.cluster,)
        for penalized in (False, True):
            launch = dispatch.sample_unfiltered(dtype, rows, arch, penalized=penalized)
            assert launch.variant in listed
            assert launch.grid == (rows * launch.variant.config.cluster,)
            part = dispatch.segment(vocab, launch.variant.config.cluster)
            assert part * launch.variant.config.cluster >= vocab and part % 128 == 0
        launch, part = dispatch.penalize(dtype, rows, vocab, length, 3)
        assert launch.variant in listed
        assert launch.grid[0] == rows and launch.grid[1] * part >= vocab
        assert dispatch.penalty_bytes(part, length, 3) <= launch.variant.config.smem_bytes


def probabilities(rng, *shape):
    return rng.dirichlet(np.full(shape[-1], 0.7), size=shape[:-1]).astype(np.float32)


@pytest.mark.parametrize("parents", [None, [-1, -1, 0]], ids=["chain", "tree"])
def test_speculative_tokens_follow_the_target(parents):
    rng = np.random.default_rng(2)
    drafts, vocab, draws = (2, 5, 40_000) if parents is None else (3, 5, 40_000)
    draft, target = probabilities(rng, drafts, vocab), probabilities(rng, drafts + 1, vocab)
    drawn = np.stack([rng.choice(vocab, draws, p=p / p.sum()) for p in draft.astype(float)], axis=1)
    many = [np.broadcast_to(p, (draws, *p.shape)) for p in (draft, target)]
    if parents is None:
        tokens, accepted = sampling.speculative_sample(drawn, *many, seed=np.arange(draws))
    else:
        tree = np.broadcast_to(np.array(parents), (draws, drafts))
        tokens, accepted = sampling.speculative_sample_tree(
            drawn, tree, *many, seed=np.arange(draws)
        )
    counts = np.bincount(tokens[:, 0], minlength=vocab)
    expected = target[0].astype(np.float64) / target[0].sum(dtype=np.float64) * draws
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3
    second = tokens[(accepted >= 1) & (tokens[:, 0] == drawn[:, 0]), 1]
    expected = target[1].astype(np.float64) / target[1].sum(dtype=np.float64) * len(second)
    if parents is None:  # in the tree, an equal sibling may have been the one accepted
        assert scipy.stats.chisquare(np.bincount(second, minlength=vocab), expected).pvalue > 1e-3
    assert accepted.max() == 2 and accepted.min() == 0
    assert all(
        (row[: n + 1] >= 0).all() and (row[n + 1 :] == -1).all()
        for row, n in zip(tokens, accepted, strict=True)
    )


def test_speculation_with_the_target_itself_accepts_all(rng):
    target = probabilities(rng, 6, 4, 50)
    drawn = target[:, :3].argmax(axis=2)
    tokens, accepted = sampling.speculative_sample(drawn, target[:, :3], target)
    assert (accepted == 3).all() and np.array_equal(tokens[:, :3], drawn)
    drawn[:, 1] = -1
    assert (sampling.speculative_sample(drawn, target[:, :3], target)[1] == 1).all()


def test_logprobs_and_beams_by_their_definition(rng):
    logits = rng.standard_normal((2, 3, 20)).astype(np.float32)
    log_p = logits.astype(np.float64)
    log_p -= np.log(np.exp(log_p).sum(axis=2, keepdims=True))
    tokens = rng.integers(0, 20, (2, 4))
    chosen, values, indices = sampling.logprobs(logits[:, 0], tokens, top_n=5)
    assert np.allclose(chosen, np.take_along_axis(log_p[:, 0], tokens, axis=1), atol=1e-6)
    assert np.allclose(values, np.sort(log_p[:, 0], axis=1)[:, :-6:-1], atol=1e-6)
    assert np.array_equal(indices, np.argsort(-log_p[:, 0], axis=1)[:, :5])

    scores = rng.standard_normal((2, 3)).astype(np.float32)
    scores[1, 1] = -np.inf
    best, added, parents = sampling.beam_step(logits, scores)
    for row in range(2):
        options = sorted(
            (-(scores[row, b] + log_p[row, b, t]), b, t) for b in range(3) for t in range(20)
        )[:3]
        assert np.allclose(best[row], [-o[0] for o in options], atol=1e-5)
        assert [(b, t) for _, b, t in options] == list(zip(parents[row], added[row], strict=True))


HUGE = np.array([[2**32], [0]])
ROWS, TOKENS, VALUES = np.array([0]), np.array([1]), np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: sampling.logprobs(x, HUGE), "tokens must fit in int32, holds 4294967296"),
        (lambda x: sampling.logprobs(x, -HUGE), "tokens must fit in int32, holds -4294967296"),
        (lambda x: sampling.logprobs(x, HUGE.astype(np.uint64)), "tokens must fit in int32"),
        (lambda x: sampling.apply_penalties(x, HUGE, presence=1.0), "tokens must fit in int32"),
        (lambda x: sampling.sample(x, tokens=HUGE, presence=1.0), "tokens must fit in int32"),
        (
            lambda x: sampling.apply_penalties(
                x, TOKENS[None].repeat(2, 0), logit_bias=(ROWS, TOKENS + 2**32, VALUES)
            ),
            "logit_bias's token must fit in int32",
        ),
        (
            lambda x: sampling.sample(x, logit_bias=(ROWS - 2**32, TOKENS, VALUES)),
            "logit_bias's row must fit in int32",
        ),
    ],
)
def test_integers_are_never_wrapped(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.zeros((2, 8), np.float32))


def test_integers_of_any_size_are_clamped_where_they_count():
    logits = np.zeros((2, 8), np.float32)
    for k in (2**32 + 1, 10**30, np.array([2**32 + 1, 2**63 - 1]), np.array([8, 9], np.uint8)):
        assert (sampling.filter_logits(logits, top_k=k) == 0).all()
    assert (sampling.filter_logits(logits, temperature=1e300) == 0).all()
    assert np.allclose(sampling.softmax(np.float32([[1, 2, 3, 4] * 2]), temperature=1e300), 0.125)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: sampling.sample(x, temperature=-1.0), "temperature"),
        (lambda x: sampling.sample(x, seed=2**64), "seed must be of 64 bits"),
        (lambda x: sampling.sample(x, offset=-(2**63) - 1), "offset must be of 64 bits"),
        (
            lambda x: sampling.sample(x, repetition=1.2, allowed=np.ones(8, bool)),
            "repetition is given, and tokens are not",
        ),
        (lambda x: sampling.sample(x, temperature=float("nan")), "temperature"),
        (lambda x: sampling.sample(x, top_k=0), "top_k"),
        (lambda x: sampling.sample(x, top_p=1.5), "top_p"),
        (lambda x: sampling.sample(x, min_p=-0.1), "min_p"),
        (lambda x: sampling.sample(x, typical_p=2), "typical_p"),
        (lambda x: sampling.sample(x, top_p=np.ones(3)), "top_p"),
        (lambda x: sampling.sample(x, seed=np.zeros(5, int)), "seed"),
        (lambda x: sampling.sample(x, repetition=1.2), "repetition is given, and tokens are not"),
        (lambda x: sampling.sample(x, tokens=np.zeros((3, 1), int)), "tokens"),
        (lambda x: sampling.sample(x, allowed=np.ones(7, bool)), "allowed"),
        (
            lambda x: sampling.sample(x, allowed=np.ones(8, np.int32)),
            r"allowed of int32, 32 tokens a word, must be \(1,\) or",
        ),
        (lambda x: sampling.top_k(x, 9), "k must be from 1 to 8"),
        (lambda x: sampling.sample(x, top_k=0), "top_k must be in .*, got 0; None keeps all"),
        (
            lambda x: sampling.apply_penalties(x, np.zeros((2, 1), int), repetition=0.0),
            "repetition",
        ),
        (lambda x: sampling.apply_penalties(x, np.zeros((3, 1), int)), "tokens"),
        (lambda x: sampling.greedy(x[None]), "shape"),
        (lambda x: sampling.logprobs(x, top_n=9), "top_n"),
        (lambda x: sampling.beam_step(x, x), "batch, beams, vocab"),
        (lambda x: sampling.logprobs(x, np.zeros(3, int)), "tokens must be .* has shape"),
        (lambda x: sampling.sample(x, logit_bias=(x, x)), r"logit_bias .* got \(ndarray, ndarray"),
        (lambda x: sampling.sample(x, logit_bias=(x, x, x)), "logit_bias's row, .* have shapes"),
        (lambda x: sampling.speculative_sample(x, x, x), "target_probs .* has shape"),
    ],
)
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.zeros((2, 8), np.float32))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: sampling.greedy(None), "logits must be .* got None"),
        (lambda x: sampling.beam_step(x, None), "scores must be .* got None"),
        (lambda x: sampling.apply_penalties(x, None), "tokens must be .* got None"),
        (lambda x: sampling.apply_penalties(x, x), "tokens must be integers, has dtype float32"),
        (lambda x: sampling.speculative_sample(x, x, None), "target_probs must be .* got None"),
        (lambda x: sampling.speculative_sample_tree(x, None, x, x), "parents must be .* got None"),
        (lambda x: sampling.sample(x, top_k=5.0), "top_k must be an integer or integers, got 5.0"),
        (lambda x: sampling.sample(x, top_p=True), "top_p must be a number or numbers, got True"),
        (lambda x: sampling.sample(x, seed=1.5), "seed must be an integer or integers, got 1.5"),
        (lambda x: sampling.sample(x, seed="abc"), "seed must be an integer or integers, got 'abc"),
        (lambda x: sampling.sample(x, seed=True), "seed must be an integer or integers, got True"),
        (lambda x: sampling.sample(x, seed=[1, None]), "seed must be an integer or integers"),
        (lambda x: sampling.sample(x, offset=None), "offset must be an integer or integers"),
        (lambda x: sampling.sample(x, offset=[1.0, 2.0]), "offset must be an integer or integers"),
        (lambda x: sampling.sample(x, temperature=[[1], [1, 2]]), "temperature is no array"),
        (lambda x: sampling.sample(x, temperature="warm"), "temperature must be a number"),
        (lambda x: sampling.sample(x, top_k=True), "top_k must be an integer or integers"),
        (lambda x: sampling.sample(x, top_k=np.ma.array([1, 2])), "top_k is a masked array"),
        (lambda x: sampling.sample(x, logit_bias=np.full(8, "1")), "logit_bias must be real"),
        (lambda x: sampling.top_k(x, True), "k must be an int, got True"),
        (lambda x: sampling.top_k(x, 2.0), "k must be an int, got 2.0"),
        (lambda x: sampling.logprobs(x, top_n=True), "top_n must be an int, got True"),
        (lambda x: sampling.beam_step(x[None], x[:1, :2] > 0), "scores must be real numbers"),
        (lambda x: sampling.greedy(x.astype(np.float64)), "logits has dtype float64"),
        (lambda x: sampling.greedy(np.ma.array(x)), "logits is a masked array"),
        (lambda x: sampling.sample(x, allowed=x), "allowed has dtype float32"),
        (
            lambda x: sampling.apply_penalties(x, np.zeros((2, 1), int), out=np.zeros((2, 8))),
            "out has dtype float64",
        ),
    ],
)
def test_what_is_of_another_kind_is_named(call, words):
    with pytest.raises(TypeError, match=words):
        call(np.zeros((2, 8), np.float32))


@pytest.mark.parametrize("seed", [None, 3])
def test_what_a_draft_cannot_be_is_named(rng, seed):
    target, drawn = probabilities(rng, 2, 4, 5), np.zeros((2, 3), int)
    draft = target[:, :3].copy()
    for parents in ([0, 0, 1], [-1, 2, 1], [-1, 0, 2], [-2, 0, 1]):
        with pytest.raises(ValueError, match=r"parents must be -1 or the index of an earlier"):
            sampling.speculative_sample_tree(drawn, np.tile(parents, (2, 1)), draft, target)
    padded = np.array([[0, 1, -1], [0, 1, -1]])
    sampling.speculative_sample_tree(padded, np.tile([-1, 0, 9], (2, 1)), draft, target, seed=seed)
    with pytest.raises(ValueError, match="draft_tokens must fit in int32"):
        sampling.speculative_sample(drawn + 2**32, draft, target, seed=seed)
    with pytest.raises(ValueError, match="parents must fit in int32"):
        sampling.speculative_sample_tree(drawn, drawn + 2**32 - 1, draft, target, seed=seed)
    many = [np.zeros(shape, np.float32) for shape in ((1, 257, 2), (1, 258, 2))]
    with pytest.raises(ValueError, match="draft_tokens must be at most 256 in a row, are 257"):
        sampling.speculative_sample_tree(np.zeros((1, 257), int), -np.ones((1, 257), int), *many)
    draft[1, 2, 3] = -0.25
    with pytest.raises(ValueError, match=r"draft_probs must not be negative, holds -0.25"):
        sampling.speculative_sample(drawn, draft, target, seed=seed)
    with pytest.raises(ValueError, match="target_probs must not be negative"):
        sampling.speculative_sample(drawn, target[:, :3], -target, seed=seed)


def test_nothing_is_written_before_all_is_checked(rng):
    logits = rng.standard_normal((2, 8)).astype(np.float32)
    before, tokens = logits.copy(), np.zeros((2, 1), int)
    triples = (ROWS, TOKENS + 2**32, VALUES)
    for wrong in ({"repetition": 0}, {"presence": "x"}, {"logit_bias": triples}):
        with pytest.raises((TypeError, ValueError)):
            sampling.apply_penalties(logits, tokens, out=logits, **({"frequency": 1.0} | wrong))
    assert np.array_equal(logits, before)


def test_a_scalar_is_checked_for_each_type():
    """Checks are remembered by value and type: 1 is valid where 1.0 or True is not."""
    logits = np.zeros((2, 8), np.float32)
    for right, wrong in (({"top_k": 1}, {"top_k": 1.0}), ({"top_p": 1.0}, {"top_p": True})):
        sampling.sample(logits, **right)
        with pytest.raises(TypeError):
            sampling.sample(logits, **wrong)


def test_parameters_may_be_bfloat16():
    logits = np.log(np.array([[0.5, 0.3, 0.2]] * 2, np.float32))
    for bfloat16 in (ml_dtypes.bfloat16(0.5), np.array([0.5, 0.5], ml_dtypes.bfloat16)):
        for name in ("temperature", "top_p", "min_p"):
            right = sampling.filter_logits(logits, **{name: 0.5})
            assert np.array_equal(sampling.filter_logits(logits, **{name: bfloat16}), right)
    with pytest.raises(ValueError, match=r"temperature must be in \[0.0, inf\), got"):
        sampling.sample(logits, temperature=np.array([1, np.inf], ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="top_k must be an integer or integers, got"):
        sampling.sample(logits, top_k=np.array([1, 1], ml_dtypes.bfloat16))


def test_rows_may_be_any_stride_apart(rng):
    wide = rng.standard_normal((6, 64)).astype(np.float32)
    assert np.array_equal(
        sampling.sample(wide[::2, 3:40], seed=4), sampling.sample(wide[::2, 3:40].copy(), seed=4)
    )
    across = rng.standard_normal((64, 6)).astype(np.float32).T
    assert np.array_equal(sampling.greedy(across), across.argmax(axis=1))


def test_numbers_too_small_for_float32_are_no_fault():
    """With NumPy's errors raised, probabilities that come to 0 are as they are without."""
    with np.errstate(all="raise"):
        probabilities = sampling.softmax(np.array([[0, -90, -200, -np.inf]], np.float32))
    assert probabilities[0, 0] == 1 and (probabilities[0, 2:] == 0).all()


@pytest.mark.parametrize("parameter", ["temperature", "top_k", "top_p", "min_p", "typical_p"])
def test_parameters_of_an_empty_batch_may_be_an_empty_list(parameter):
    logits = np.zeros((0, 40), np.float32)
    assert sampling.sample(logits, seed=[], offset=[], **{parameter: []}).shape == (0,)


def test_an_empty_batch():
    logits, rows = np.zeros((0, 40), np.float32), np.zeros(0, np.int32)
    tokens, words = np.zeros((0, 3), np.int32), np.zeros((0, 2), np.int32)
    assert sampling.greedy(logits).shape == (0,)
    assert sampling.softmax(logits).shape == (0, 40)
    assert sampling.top_k(logits, 3)[1].shape == (0, 3)
    filters = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}
    assert sampling.filter_logits(logits, **filters).shape == (0, 40)
    assert sampling.sample(logits, seed=1, **filters).shape == (0,)
    assert sampling.sample(logits, seed=rows, allowed=words).shape == (0,)
    penalized = sampling.apply_penalties(logits, tokens, repetition=2, allowed=words)
    assert penalized.shape == (0, 40)
    assert [a.shape for a in sampling.logprobs(logits, rows, top_n=2)] == [(0,), (0, 2), (0, 2)]
    assert sampling.logprobs(logits, tokens)[0].shape == (0, 3)
    probs = np.zeros((0, 4, 40), np.float32)
    for drawn, counts in (
        sampling.speculative_sample(tokens, probs[:, :3], probs),
        sampling.speculative_sample_tree(tokens, tokens, probs[:, :3], probs),
    ):
        assert drawn.shape == (0, 4)
        assert counts.shape == (0,)
    beams = sampling.beam_step(np.zeros((0, 3, 40), np.float32), np.zeros((0, 3), np.float32))
    assert [a.shape for a in beams] == [(0, 3)] * 3


def test_penalties_beyond_the_range_of_the_dtype_are_infinite_in_silence(recwarn):
    logits = np.array([[60000.0, -60000.0, 1.0]], np.float16)
    tokens = np.array([[0, 1]], np.int32)
    result = sampling.apply_penalties(logits, tokens, repetition=0.25)
    np.testing.assert_array_equal(result, np.array([[np.inf, -15000.0, 1.0]], np.float16))
    assert not recwarn
