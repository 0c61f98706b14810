"""What attention on NumPy arrays has to do with itself: parts, masks, terms of scores."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.reference import tiles
from tests.calls import arrays, calls, judge, small_tiles
from tests.formulas import DTYPES, assert_accurate

pytestmark = pytest.mark.filterwarnings("error")


def test_threads_do_not_change_a_bit(rng, monkeypatch):
    q, k, v = arrays(rng, (2, 300, 300, 4, 2, 32, 32))
    results = []
    monkeypatch.setattr(tiles, "SERIAL_PRODUCTS", 0)
    for threads in (1, 2, 7):
        monkeypatch.setattr(tiles, "cores", lambda threads=threads: threads)
        results.append(cuattn.flash_attention(q, k, v, causal=True, return_lse=True))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(1, 40), st.booleans())
def test_permuting_the_batch_permutes_the_output(seed, dtype, seqlen_q, small):
    rng = np.random.default_rng(seed)
    shape = (5, seqlen_q, 33, 4, 2, 16, 16)
    q, k, v = arrays(rng, shape, dtype)
    bias = rng.standard_normal((5, 1, seqlen_q, 33)).astype(dtype)
    slopes = rng.uniform(0, 1, (5, 4)).astype(np.float32)
    order = rng.permutation(5)
    with small_tiles() if small else contextlib.nullcontext():
        whole = cuattn.flash_attention(
            q, k, v, bias=bias, alibi_slopes=slopes, causal=True, return_lse=True
        )
        q, k, v, bias, slopes = (a[order] for a in (q, k, v, bias, slopes))
        permuted = cuattn.flash_attention(
            q, k, v, bias=bias, alibi_slopes=slopes, causal=True, return_lse=True
        )
    for a, b in zip(whole, permuted, strict=True):
        np.testing.assert_array_equal(a[order], b)


@given(calls(), st.data())
def test_split_keys_merge_to_the_whole(call, data):
    """Two calls on two parts of the keys, weighted by their lse, are one call on all keys."""
    (q, k, v), options = call
    for name in ("causal", "window", "alibi_slopes", "sinks"):  # those of the whole sequence
        options.pop(name, None)
    seqlen_k = k.shape[1]
    cut = data.draw(st.integers(0, seqlen_k))
    out, lse = 0.0, np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    parts = []
    for keys in (slice(0, cut), slice(cut, seqlen_k)):
        part = dict(options)
        for name in {"bias", "mask"} & set(part):
            if part[name].shape[-1] != 1:
                part[name] = part[name][..., keys]
        parts.append(cuattn.flash_attention(q, k[:, keys], v[:, keys], return_lse=True, **part))
        lse = np.logaddexp(lse, parts[-1][1])
    for part, part_lse in parts:
        weight = np.exp(part_lse - np.where(lse == -np.inf, 0, lse)).swapaxes(1, 2)[..., None]
        out = out + weight * part.astype(np.float64)
    rounded = [part for part, _ in parts]
    judge(out.astype(q.dtype), lse.astype(parts[0][1].dtype), q, k, v, rounded=rounded, **options)


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 30), st.data())
def test_window_is_a_mask(seed, seqlen_q, seqlen_k, data):
    side = st.none() | st.integers(0, 32)
    window = data.draw(st.tuples(side, side))
    causal = data.draw(st.booleans())
    mask = np.zeros((seqlen_q, seqlen_k), bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            ahead = j - (i + seqlen_k - seqlen_q)
            mask[i, j] = (
                (window[0] is None or ahead >= -window[0])
                and (window[1] is None or ahead <= window[1])
                and (not causal or ahead <= 0)
            )
    q, k, v = arrays(np.random.default_rng(seed), (1, seqlen_q, seqlen_k, 2, 1, 8, 8))
    with small_tiles():
        by_window = cuattn.flash_attention(q, k, v, window=window, causal=causal, return_lse=True)
        by_mask = cuattn.flash_attention(q, k, v, mask=mask, return_lse=True)
    for result in (by_window, by_mask):
        judge(*result, q, k, v, mask=mask)


@given(st.integers(0, 2**32), st.integers(0, 20))
def test_sink_is_a_key_without_value(seed, seqlen_k):
    rng = np.random.default_rng(seed)
    q, k, v = arrays(rng, (2, 9, seqlen_k, 4, 2, 8, 8), np.float64)
    sinks = 3 * rng.standard_normal(4)
    zeros = np.zeros((2, 1, 2, 8))
    bias = np.zeros((4, 1, seqlen_k + 1))
    bias[:, 0, -1] = sinks
    expected = cuattn.flash_attention(
        q, np.append(k, zeros, 1), np.append(v, zeros, 1), bias=bias, return_lse=True
    )
    result = cuattn.flash_attention(q, k, v, sinks=sinks, return_lse=True)
    for a, b in zip(result, expected, strict=True):
        assert_accurate(a, b, b)


def test_alibi_is_a_bias(rng):
    q, k, v = arrays(rng, (1, 9, 14, 4, 2, 8, 8), np.float64)
    slopes = 2.0 ** -np.arange(4)
    distance = [[abs(i + 5 - j) for j in range(14)] for i in range(9)]
    bias = -slopes[:, None, None] * np.array(distance)
    out = cuattn.flash_attention(q, k, v, alibi_slopes=slopes, causal=True)
    expected = cuattn.flash_attention(q, k, v, bias=bias, causal=True)
    assert_accurate(out, expected, expected)


def test_softcap_bounds_scores_and_comes_before_the_bias():
    """One query, two keys: the weights by hand."""
    q, k = np.ones((1, 1, 1)), np.array([[[100.0]], [[-100.0]]])
    v = np.array([[[1.0]], [[0.0]]])
    out, lse = cuattn.flash_attention(q, k, v, scale=1.0, softcap=0.5, return_lse=True)
    assert_accurate(out[0, 0], *2 * [np.array([1 / (1 + np.exp(-1.0))])])
    bias = np.array([0.0, 2.0])
    out, lse = cuattn.flash_attention(q, k, v, scale=1.0, softcap=0.5, bias=bias, return_lse=True)
    assert_accurate(out[0, 0], *2 * [np.array([1 / (1 + np.exp(1.0))])])
    assert_accurate(lse[0], *2 * [np.array([np.logaddexp(0.5, 1.5)])])


def test_memory_is_linear(rng):
    def peak(seqlen):
        q, k, v = arrays(rng, (1, seqlen, seqlen, 1, 1, 16, 16))
        out = np.empty_like(q)
        tracemalloc.start()
        cuattn.flash_attention(q, k, v, out=out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    short, long = peak(4096), peak(8192)
    working = 2**21 * tiles.cores()  # what threads work in, whatever the length
    assert long < working + 2 * 8192 * 16 * 4  # one score matrix would take 268 MB
    assert long < 2.2 * short
