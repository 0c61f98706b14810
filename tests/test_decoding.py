"""flash_decode, paged_attention and merge_attention on NumPy arrays, against flash_attention and
formulas written out here.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.decoding import flash_decode, merge_attention, paged_attention

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def softmax_attention(
    q, k, v, *, causal, window=(None, None), softcap=0.0, slopes=None, sinks=None
):
    """The contract's formula, one (query, head) at a time, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    seqlen_q, heads, dim = q.shape
    length, group = k.shape[0], heads // k.shape[1]
    out, lse = np.zeros((seqlen_q, heads, v.shape[2])), np.full((heads, seqlen_q), -np.inf)
    for i in range(seqlen_q):
        position = length - seqlen_q + i
        for h in range(heads):
            s = k[:, h // group] @ q[i, h] / np.sqrt(dim)
            if softcap:
                s = softcap * np.tanh(s / softcap)
            j = np.arange(length)
            if slopes is not None:
                s = s - slopes[h] * abs(position - j)
            keep = (j <= position) if causal else np.ones(length, bool)
            if window[0] is not None:
                keep &= j >= position - window[0]
            if window[1] is not None:
                keep &= j <= position + window[1]
            s = s[keep]
            extra = [] if sinks is None else [sinks[h]]
            both = np.concatenate([s, extra])
            if both.size:
                lse[h, i] = np.log(np.exp(both - both.max()).sum()) + both.max()
                out[i, h] = np.exp(s - lse[h, i]) @ v[keep, h // group]
    return out, lse


def caches(rng, lens, capacity, heads, dim, dim_v, dtype):
    """K and V with NaN past each sequence's length."""
    k = rng.standard_normal((len(lens), capacity, heads, dim)).astype(dtype)
    v = rng.standard_normal((len(lens), capacity, heads, dim_v)).astype(dtype)
    for b, n in enumerate(lens):
        k[b, n:] = v[b, n:] = np.nan
    return k, v


def paged(rng, cache, page_size, table):
    """Pages that hold a contiguous cache where `table` says."""
    batch, capacity = cache.shape[:2]
    pages = np.full((table.max() + 1, page_size, *cache.shape[2:]), np.nan, cache.dtype)
    pages[table] = cache.reshape(batch, capacity // page_size, page_size, *cache.shape[2:])
    return pages


OPTIONS = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (5, 0)},
    "softcap": {"softcap": 2.0},
    "alibi": {"slopes": True},
    "sinks": {"sinks": True},
    "all": {"window": (9, 3), "softcap": 3.0, "slopes": True, "sinks": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_flash_decode_is_the_formula(rng, option, seqlen_q):
    options = dict(OPTIONS[option])
    lens, heads_q, heads_kv = [0, 1, 2, 17, 40], 6, 2
    q = rng.standard_normal((len(lens), seqlen_q, heads_q, 24))
    k, v = caches(rng, lens, 40, heads_kv, 24, 16, np.float64)
    given_slopes = rng.random(heads_q) if options.pop("slopes", False) else None
    given_sinks = rng.standard_normal(heads_q) if options.pop("sinks", False) else None
    out, lse = flash_decode(
        q,
        k,
        v,
        np.array(lens, np.int32),
        alibi_slopes=given_slopes,
        sinks=given_sinks,
        return_lse=True,
        **options,
    )
    options.setdefault("causal", True)
    for b, n in enumerate(lens):
        want, want_lse = softmax_attention(
            q[b], k[b, :n], v[b, :n], slopes=given_slopes, sinks=given_sinks, **options
        )
        np.testing.assert_allclose(out[b], want, atol=1e-13)
        np.testing.assert_allclose(lse[b], want_lse, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_is_flash_attention_on_each_sequence(rng, dtype):
    lens = [3, 64, 50]
    q = rng.standard_normal((3, 2, 4, 32)).astype(dtype)
    k, v = caches(rng, lens, 64, 2, 32, 32, dtype)
    out = flash_decode(q, k, v, np.array(lens, np.int32))
    assert out.dtype == dtype
    for b, n in enumerate(lens):
        one = cuattn.flash_attention(q[b], k[b, :n], v[b, :n], causal=True)
        assert np.array_equal(out[b], one)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pages_hold_what_a_contiguous_cache_holds(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    page_size = 1 << data.draw(st.integers(0, 6))
    max_pages = data.draw(st.integers(1, 5))
    capacity = page_size * max_pages
    lens = data.draw(st.lists(st.integers(0, capacity), min_size=1, max_size=4))
    seqlen_q, batch = data.draw(st.integers(1, 4)), len(lens)
    k, v = caches(rng, lens, capacity, 2, 8, 4, np.float32)
    table = rng.permutation(batch * max_pages + 3)[: batch * max_pages]
    if data.draw(st.booleans()):  # pages that follow each other are read where they lie
        table.sort()
    table = table.reshape(batch, max_pages)
    k_pages, v_pages = (paged(rng, a, page_size, table) for a in (k, v))
    table = table.astype(np.int32)
    for b, n in enumerate(lens):  # what lies past a sequence's last page is nobody's business
        table[b, -(-n // page_size) :] = -(2**31)
    q = rng.standard_normal((batch, seqlen_q, 4, 8)).astype(np.float32)
    lens = np.array(lens, np.int32)
    for options in ({}, {"window": (3, 0), "softcap": 1.5}):
        want = flash_decode(q, k, v, lens, return_lse=True, **options)
        got = paged_attention(q, k_pages, v_pages, table, lens, return_lse=True, **options)
        assert all(map(np.array_equal, want, got))


@pytest.mark.parametrize("table", [[0, 1, 6], [6, 7, 8], [-1, 0, 1], [2, 1, -3]])
def test_pages_that_are_not_there(rng, table):
    pages = rng.standard_normal((6, 4, 2, 8))
    q, lens = rng.standard_normal((1, 4, 8)), np.array([12], np.int32)
    with pytest.raises(IndexError, match=r"page_table has .*, must be from 0 to 5"):
        paged_attention(q, pages, pages, np.array([table], np.int32), lens)


def test_mixed_decode_and_prefill(rng):
    lens, counts, page_size = [9, 30, 12, 5], [1, 7, 0, 5], 4
    table = rng.permutation(40).reshape(4, 10)[:, :8]
    k, v = caches(rng, lens, 32, 2, 8, 8, np.float64)
    k_pages, v_pages = (paged(rng, a, page_size, table) for a in (k, v))
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = rng.standard_normal((cu[-1], 4, 8))
    out, lse = paged_attention(
        q, k_pages, v_pages, table, np.array(lens, np.int32), cu_seqlens_q=cu, return_lse=True
    )
    for b, n in enumerate(lens):
        rows = slice(cu[b], cu[b + 1])
        want, want_lse = softmax_attention(q[rows], k[b, :n], v[b, :n], causal=True)
        np.testing.assert_allclose(out[rows], want, atol=1e-13)
        np.testing.assert_allclose(lse[:, rows], want_lse, atol=1e-12)


def test_a_shared_prefix_changes_nothing(rng):
    page_size, shared = 4, 12
    lens = np.array([15, 20, 14], np.int32)
    table = rng.permutation(15).reshape(3, 5)
    table[:, :3] = table[0, :3]
    k_pages, v_pages = rng.standard_normal((2, 15, page_size, 2, 8))
    q = rng.standard_normal((3, 2, 4, 8))
    want = paged_attention(q, k_pages, v_pages, table, lens, return_lse=True)
    promised = paged_attention(q, k_pages, v_pages, table, lens, prefix=shared, return_lse=True)
    first = tuple(pages[table[0, :3]].reshape(shared, 2, 8) for pages in (k_pages, v_pages))
    apart = paged_attention(
        q, k_pages, v_pages, table[:, 3:], lens - shared, prefix=first, return_lse=True
    )
    for got in (promised, apart):
        assert all(np.allclose(a, b, atol=1e-13) for a, b in zip(got, want, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_split_keys_merge_to_the_whole(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    length = data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    q, (k, v) = rng.standard_normal((2, 3, 4, 8)), rng.standard_normal((2, 2, length, 2, 8))
    want = cuattn.flash_attention(q, k, v, return_lse=True)
    pieces = zip([0, *cuts], [*cuts, length], strict=True)
    outs, lses = zip(
        *(cuattn.flash_attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in pieces),
        strict=True,
    )
    for given_outs, given_lses in ((outs, lses), (np.stack(outs), np.stack(lses))):
        got = merge_attention(given_outs, given_lses)
        assert all(np.allclose(a, b, atol=1e-13) for a, b in zip(got, want, strict=True))


def test_merge_of_nothing_seen_is_zero():
    outs, lses = np.full((2, 1, 1, 1, 4), np.nan), np.full((2, 1, 1, 1), -np.inf)
    out, lse = merge_attention(outs, lses)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_merge_takes_anything_without_a_warning():
    """Rows of no sequence are undefined."""
    outs = np.array([np.inf, np.nan, 0, 1]).reshape(2, 1, 2, 1, 1) * np.ones(8)
    lses = np.array([np.inf, np.nan, -np.inf, 800]).reshape(2, 1, 1, 2)
    with np.errstate(all="raise"):
        out, lse = merge_attention(outs, lses)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1])


def test_merge_takes_every_layout(rng):
    outs = rng.standard_normal((2, 5, 3, 8))
    lses = rng.standard_normal((2, 3, 5))
    out, lse = merge_attention(outs, lses)
    one, one_lse = merge_attention(outs, lses.transpose(0, 2, 1)[..., None])  # (batch, heads, 1)
    assert np.array_equal(out, one)
    assert np.array_equal(lse, one_lse[..., 0].T)


def test_q_without_a_token_axis_and_out(rng):
    q, (k, v) = rng.standard_normal((2, 4, 8)), rng.standard_normal((2, 2, 6, 2, 8))
    lens = np.array([6, 2], np.int32)
    want, want_lse = flash_decode(q[:, None], k, v, lens, return_lse=True)
    out = np.full_like(q, np.nan)
    got, lse = flash_decode(q, k, v, lens, out=out, return_lse=True)
    assert got.base is out or got is out
    assert np.array_equal(out, want[:, 0])
    assert np.array_equal(lse, want_lse)


def test_permuting_the_batch_permutes_the_output(rng):
    lens = np.array([5, 0, 30, 12], np.int32)
    q, (k, v) = rng.standard_normal((4, 1, 4, 8)), rng.standard_normal((2, 4, 30, 2, 8))
    order = rng.permutation(4)
    out = flash_decode(q, k, v, lens)
    assert np.array_equal(out[order], flash_decode(q[order], k[order], v[order], lens[order]))


def shapes(**changes):
    arrays = {
        "q": np.zeros((2, 1, 4, 8), np.float32),
        "k_pages": np.zeros((6, 4, 2, 8), np.float32),
        "v_pages": np.zeros((6, 4, 2, 8), np.float32),
        "page_table": np.zeros((2, 3), np.int32),
        "seq_lens": np.array([3, 4], np.int32),
    }
    return arrays | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "k_pages": np.zeros((6, 3, 2, 8), np.float32),
                "v_pages": np.zeros((6, 3, 2, 8), np.float32),
            },
            "page size 3",
        ),
        ({"v_pages": np.zeros((6, 8, 2, 8), np.float32)}, "v_pages has shape"),
        ({"page_table": np.zeros((3, 3), np.int32)}, "q has batch 2, must be page_table's 3"),
        ({"page_table": np.zeros((2, 3))}, "page_table has dtype float64"),
        ({"seq_lens": np.zeros(3, np.int32)}, "seq_lens has shape"),
        ({"seq_lens": np.zeros(2)}, "seq_lens has dtype"),
        (
            {
                "k_pages": np.zeros((6, 4, 3, 8), np.float32),
                "v_pages": np.zeros((6, 4, 3, 8), np.float32),
            },
            "k_pages has 3 heads",
        ),
        ({"prefix": 2}, "prefix is 2, must be a multiple"),
        ({"prefix": 1.5}, "prefix must be an integer"),
        ({"prefix": (np.zeros((4, 2, 7), np.float32),) * 2}, r"prefix\[0\] has shape"),
        (
            {"prefix": (np.zeros((4, 2, 8), np.float32),) * 2, "window": (1, 0)},
            "so window must be None",
        ),
        ({"num_splits": "few"}, "num_splits is 'few'"),
        ({"num_splits": 0}, "num_splits is 0"),
        (
            {"cu_seqlens_q": np.zeros(2, np.int32), "q": np.zeros((2, 4, 8), np.float32)},
            "cu_seqlens_q has shape",
        ),
        ({"out": np.zeros((2, 1, 4, 7), np.float32)}, "out has shape"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises((TypeError, ValueError), match=f"paged_attention: .*{message}"):
        paged_attention(**shapes(**changes))


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (np.zeros((2, 1, 3, 4, 8)), np.zeros((3, 1, 4, 3)), "lses has 3 parts"),
        (np.zeros((2, 1, 3, 4, 8)), np.zeros((2, 1, 3, 4)), r"lses\[0\] has shape"),
        (np.zeros((2, 1, 3, 4, 8)), np.zeros((2, 1, 4, 3), np.float32), r"lses\[0\] has dtype"),
        (np.zeros((2, 8)), np.zeros((2, 1)), r"outs\[0\] has shape"),
        ([], [], "outs has 0 parts, must have at least 1"),
    ],
)
def test_merge_errors_name_the_argument(outs, lses, message):
    with pytest.raises((TypeError, ValueError), match=f"merge_attention: .*{message}"):
        merge_attention(outs, lses)


@pytest.mark.parametrize("quantized", [False, True])
def test_out_may_overlap_the_prefix(quantized, rng):
    q = rng.standard_normal((4, 1, 2, 8), dtype=np.float32)
    pages = [rng.standard_normal((8, 4, 2, 8), dtype=np.float32) for _ in "kv"]
    if quantized:
        codes = [cuattn.quantize(part, "int8") for part in pages]
        pages = [
            cuattn.QuantizedArray(part.data, part.scale, dtype="int8", like=np.float32)
            for part in codes
        ]
    table, lens = np.arange(8, dtype=np.int32).reshape(4, 2), np.array([3, 8, 5, 1], np.int32)
    prefix = [rng.standard_normal((6, 2, 8), dtype=np.float32) for _ in "kv"]
    for overlapped in range(2):
        own = [part.copy() for part in prefix]
        out = own[overlapped][:4].reshape(q.shape)
        right = cuattn.paged_attention(q, *pages, table, lens, prefix=tuple(prefix))
        cuattn.paged_attention(q, *pages, table, lens, prefix=tuple(own), out=out)
        np.testing.assert_array_equal(out, right)


def test_out_may_overlap_the_page_table(rng):
    q, pages = rng.standard_normal((3, 1, 2, 8)), rng.standard_normal((6, 4, 2, 8))
    lens = np.array([8, 5, 7], np.int32)
    out = np.zeros_like(q)
    table = out.reshape(-1).view(np.int32)[2:8].reshape(3, 2)
    table[...] = rng.permutation(6).reshape(3, 2)
    right = paged_attention(q, pages, pages, table.copy(), lens)
    assert paged_attention(q, pages, pages, table, lens, out=out) is out
    np.testing.assert_array_equal(out, right)


def test_a_prefix_before_no_pages_at_all(rng):
    q, (k, v) = rng.standard_normal((2, 1, 4, 8)), rng.standard_normal((2, 5, 2, 8))
    pages, table = np.zeros((0, 4, 2, 8)), np.zeros((2, 3), np.int32)
    lens = np.zeros(2, np.int32)
    out = paged_attention(q, pages, pages, table, lens, prefix=(k, v), causal=False)
    want = cuattn.flash_attention(q, *(np.stack([part] * 2) for part in (k, v)))
    np.testing.assert_allclose(out, want, atol=1e-13)
