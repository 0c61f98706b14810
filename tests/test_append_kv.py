"""append_kv in NumPy (tests/appending.py), and what its arguments must be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import appending

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = map(
    np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
)


@pytest.mark.parametrize("rope", [None, "halves", "interleaved"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", appending.KINDS[:3])
def test_every_way(kind, ragged, padded, rope, rng):
    appending.check(rng, FLOAT32, kind, np.asarray, ragged=ragged, padded=padded, rope=rope)


@pytest.mark.parametrize("kind", appending.KINDS)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT64])
def test_dtypes(dtype, kind, rng):
    rope = None if kind == "slots alone" else "halves"
    appending.check(rng, dtype, kind, np.asarray, rope=rope, strided=True)


def test_slots_alone(rng):
    appending.check(rng, FLOAT32, "slots alone", np.asarray, ragged=False)


def test_decoding_sees_what_was_appended(rng):
    """The same tokens one by one through append_kv, and all at once."""
    k_cache, v_cache = np.zeros((2, 2, 10, 1, 8), np.float32)
    k, v, q = rng.standard_normal((3, 2, 6, 1, 8), dtype=np.float32)
    for i in range(6):
        lens = np.full(2, i + 1, np.int32)
        cuattn.append_kv(k_cache, v_cache, k[:, i : i + 1], v[:, i : i + 1], lens)
        out = cuattn.flash_decode(q[:, i], k_cache, v_cache, lens)
        whole = cuattn.flash_attention(q[:, : i + 1], k[:, : i + 1], v[:, : i + 1], causal=True)
        np.testing.assert_allclose(out, whole[:, -1], atol=1e-6)


def test_a_paged_cache_writes_the_same(rng):
    cache = cuattn.PagedKVCache(8, 4, 2, 8, dtype=np.float32)
    ids = [cache.add_sequence() for _ in range(2)]
    cache.extend(ids, [5, 3])
    k, v = rng.standard_normal((2, 8, 2, 8), dtype=np.float32)
    angles = rng.random((5, 4))
    rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k_pages, v_pages = (pages.copy() for pages in cache.pages(0))
    cache.write(0, ids, k, v, rope=rope)
    table, lens = cache.page_table(ids), cache.seq_lens(ids)
    cu_seqlens = np.array([0, 5, 8], np.int32)
    cuattn.append_kv(
        k_pages, v_pages, k, v, lens, page_table=table, cu_seqlens=cu_seqlens, rope=rope
    )
    for b, n in enumerate((5, 3)):
        for own, written in zip((k_pages, v_pages), cache.pages(0), strict=True):
            rows = [a[table[b]].reshape(-1, 2, 8)[:n] for a in (own, written)]
            np.testing.assert_array_equal(*rows)


def test_tokens_may_be_moved_from_one_cache_to_both(rng):
    """All are read before one is written."""
    k_cache = rng.standard_normal((1, 20, 2, 4))
    v_cache, new = np.zeros_like(k_cache), k_cache[:, 3:8]
    right = new.copy()
    cuattn.append_kv(k_cache, v_cache, new, new, np.array([7], np.int32))
    np.testing.assert_array_equal(k_cache[:, 2:7], right)
    np.testing.assert_array_equal(v_cache[:, 2:7], right)


def test_nothing_to_append():
    cache = np.zeros((2, 4, 1, 8), np.float32)
    new = np.zeros((2, 0, 1, 8), np.float32)
    cuattn.append_kv(cache, cache.copy(), new, new, np.array([3, 0], np.int32))
    empty = np.zeros((0, 4, 1, 8), np.float32)
    cuattn.append_kv(empty, empty.copy(), empty, empty, np.zeros(0, np.int32))


# ------------------------------------------------------------------------------------------------
# errors


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def append(**changes):
    arguments = {
        **{"k_cache": zeros(2, 8, 3, 16), "v_cache": zeros(2, 8, 3, 4)},
        **{"k": zeros(2, 2, 3, 16), "v": zeros(2, 2, 3, 4)},
        **{"seq_lens": np.array([5, 8], np.int32), **changes},
    }
    cuattn.append_kv(**arguments)


TABLES = zeros(8, 4), zeros(8, 4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_cache": None}, TypeError, "k_cache"),
        ({"v_cache": zeros(2, 8, 3, 0)}, ValueError, "v_cache .* must have a head and a feature"),
        ({"k_cache": zeros(8, 3, 16)}, ValueError, r"k_cache has shape \(8, 3, 16\), must be"),
        ({"v_cache": zeros(2, 9, 3, 4)}, ValueError, r"must begin with k_cache's \(2, 8, 3\)"),
        ({"v_cache": zeros(2, 8, 3, 4, dtype=np.float64)}, TypeError, "must be k_cache's float32"),
        ({"k_cache": zeros(2, 8, 3, 16, dtype=np.int8)}, TypeError, "k_cache has dtype int8"),
        ({"k_cache": zeros(2, 8, 3, 32)[..., ::2]}, ValueError, "contiguous last axis"),
        ({"k_cache": np.broadcast_to(zeros(16), (2, 8, 3, 16))}, ValueError, "read-only"),
        ({"k": zeros(4, 3, 16)}, ValueError, r"must be \(batch, n, 3, 16\)"),
        ({"k": zeros(2, 2, 3, 8)}, ValueError, r"k has shape \(2, 2, 3, 8\), must be"),
        ({"v": zeros(2, 1, 3, 4)}, ValueError, r"must begin with k's \(2, 2, 3\)"),
        ({"v": zeros(2, 2, 3, 4, dtype=np.float16)}, TypeError, "must be the cache's float32"),
        ({"seq_lens": np.array([5], np.int32)}, ValueError, r"seq_lens has shape \(1,\)"),
        ({"seq_lens": np.array([5.0, 8.0])}, TypeError, "seq_lens has dtype float64"),
        ({"seq_lens": None}, ValueError, "seq_lens is None, must be an array unless slots"),
        (
            {"seq_lens": np.array([5, 9])},
            IndexError,
            "seq_lens leads to slot 8, must be from 0 to 7",
        ),
        ({"seq_lens": np.array([1, 8])}, IndexError, "seq_lens leads to position -1"),
        ({"cu_seqlens": np.array([0, 4])}, ValueError, r"k has shape .* must be \(total, 3, 16\)"),
        ({"page_table": np.array([[0], [2]])}, IndexError, "page_table leads to page 2"),
        ({"page_table": np.array([[0]])}, ValueError, "page_table has 1 rows, must have one for"),
        ({"page_table": np.array([0, 1])}, ValueError, r"page_table has shape \(2,\), must be"),
        ({"slots": np.array([0, 1, 2])}, ValueError, r"slots has shape \(3,\), must be \(4,\)"),
        ({"slots": np.array([0, 1, 2, 16])}, IndexError, "slots leads to page 2, must be"),
        (
            {"slots": np.arange(4), "page_table": np.array([[0], [1]])},
            ValueError,
            "page_table must be None where slots are given",
        ),
        (
            {"slots": np.arange(4), "page_table": np.array([[0], [1]]), "seq_lens": None},
            ValueError,
            "page_table must be None where slots are given",
        ),
        ({"left_padding": np.zeros(3, np.int32)}, ValueError, r"left_padding has shape \(3,\)"),
        ({"left_padding": np.array([0, -1])}, ValueError, "left_padding has -1, must be at least"),
        ({"left_padding": zeros(2)}, TypeError, "left_padding has dtype float32"),
        ({"rope": 5}, TypeError, r"rope must be a pair \(cos, sin\) or None, got int"),
        ({"rope": (zeros(8, 4), 1)}, TypeError, r"rope\[1\] must be a NumPy or CuPy array"),
        ({"rope": (zeros(8, 9), zeros(8, 9))}, ValueError, r"rope\[0\] has shape \(8, 9\)"),
        ({"rope": (zeros(7, 4), zeros(7, 4))}, IndexError, "rope leads to position 7"),
        ({"rope": TABLES, "interleaved": 1}, TypeError, "interleaved must be True or False"),
    ],
)
def test_errors(changes, error, message):
    with pytest.raises(error, match=f"append_kv: .*{message}"):
        append(**changes)


def test_a_refused_call_writes_nothing():
    cache = zeros(2, 8, 3, 16)
    with pytest.raises(IndexError):
        append(k_cache=cache, k=zeros(2, 2, 3, 16) + 1, seq_lens=np.array([5, 9]))
    assert not cache.any()
