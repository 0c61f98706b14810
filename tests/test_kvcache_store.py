"""The arrays of a PagedKVCache: what is written, and the page tables that calls are given."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import cuattn
from cuattn.decoding import paged_attention
from cuattn.kvcache import PagedKVCache
from cuattn.reference.kvcache import rotate
from tests.caches import (
    DIM,
    check_views_of_pages,
    content,
    filled,
    held_pages,
    new_cache,
)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_by_position(rng, interleaved):
    dim, page_size, rotary = 8, 4, 6
    cache = PagedKVCache(8, page_size, 1, dim, dtype=np.float64)
    angle = np.arange(20)[:, None] / 10.0 ** np.arange(rotary // 2)
    ids = [cache.add_sequence() for _ in range(2)]
    k = rng.standard_normal((2, 7, 1, dim))
    for new in (slice(0, 5), slice(5, 7)):
        cache.extend(ids, new.stop - new.start)
        cache.write(
            0,
            ids,
            k[:, new],
            k[:, new],
            rope=(np.cos(angle), np.sin(angle)),
            interleaved=interleaved,
        )
    pages, values = cache.pages(0)
    pairs = range(0, rotary, 2) if interleaved else range(rotary // 2)
    for b, row in enumerate(cache.page_table(ids)):
        got = pages[row[:2]].reshape(-1, dim)[:7]
        assert np.array_equal(values[row[:2]].reshape(-1, dim)[:7], k[b, :, 0])
        for i, first in enumerate(pairs):
            second = first + (1 if interleaved else rotary // 2)
            z = (k[b, :, 0, first] + 1j * k[b, :, 0, second]) * np.exp(1j * angle[:7, i])
            np.testing.assert_allclose(got[:, first] + 1j * got[:, second], z, atol=1e-14)
        assert np.array_equal(got[:, rotary:], k[b, :, 0, rotary:])


def test_rotate_in_half_precision_rounds_once(rng):
    x = rng.standard_normal((50, 1, 8)).astype(np.float16)
    angle = rng.random((50, 1, 4)).astype(np.float32)
    want = rotate(x.astype(np.float64), np.cos(angle), np.sin(angle), False)
    assert (
        abs(rotate(x, np.cos(angle), np.sin(angle), False) - want).max() <= 2**-11 * abs(want).max()
    )


def test_attention_over_the_cache_is_attention_over_the_arrays(rng):
    cache = new_cache(num_pages=64, num_layers=2)
    prompts = [rng.integers(0, 2, n).tolist() for n in (3, 17, 30)]
    ids = [filled(cache, tokens)[0] for tokens in prompts]
    for layer in range(2):
        q = rng.standard_normal((3, 4, DIM)).astype(np.float32)
        out = paged_attention(q, *cache.pages(layer), cache.page_table(ids), cache.seq_lens(ids))
        for b, tokens in enumerate(prompts):
            one = cuattn.flash_attention(q[b][None], *content(tokens, layer), causal=True)
            np.testing.assert_allclose(out[b], one[0], atol=1e-6)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_is_written_may_be_views_of_pages(quantization, rng):
    check_views_of_pages(rng, quantization, np)


def test_batch_arrays_are_updated_in_place():
    cache = new_cache(max_seqlen=40)
    ids = [filled(cache, range(i, i + 5))[0] for i in (0, 10, 20)]
    table, lens = cache.page_table(ids[:2]), cache.seq_lens(ids[:2])
    assert lens.tolist() == [5, 5]
    cache.extend(ids, [4, 1, 8])
    assert cache.page_table(ids[1:]) is table
    assert cache.seq_lens(ids[1:]) is lens
    assert lens.tolist() == [6, 13]
    cache.page_table(ids[:2])
    assert lens.tolist() == [9, 6]


def table_bytes(cache, *, held):
    tables = cache._store._tables.values()
    return sum(table.num_bytes for table in tables if table.is_held == held)


def test_page_tables_of_all_batch_sizes_are_not_kept():
    """At 32768 tokens, 512 sizes would be a gigabyte."""
    cache = new_cache(num_pages=520, page_size=16, max_seqlen=32768)
    ids = [cache.add_sequence() for _ in range(512)]
    cache.extend(ids, 1)
    mine = cache.page_table(ids[:300]), cache.seq_lens(ids[:300])
    for n in range(1, 513, 5):
        assert cache.seq_lens(ids[:n]).tolist() == [1] * n
        assert np.array_equal(cache.page_table(ids[-n:])[:, 0], cache.page_table(ids)[-n:, 0])
        assert table_bytes(cache, held=False) <= 64 << 20
    assert table_bytes(cache, held=True) == 300 * 2048 * 4
    cache.extend(ids[:300], 1)
    assert cache.page_table(ids[:300]) is mine[0]
    assert cache.seq_lens(ids[:300]) is mine[1]
    assert mine[1].tolist() == [2] * 300
    table = cache.page_table(ids)  # one that is used again and again stays
    address = table.ctypes.data
    del table
    for n in range(1, 513, 5):
        cache.page_table(ids[:n])
        assert cache.page_table(ids).ctypes.data == address


def test_reset_leaves_tables_where_they_are():
    cache = new_cache(max_seqlen=40)
    a, _ = filled(cache, [*range(9)])
    table, lens = cache.page_table([a]), cache.seq_lens([a])
    cache.reset()
    assert (len(cache), cache.num_free_pages, a in cache) == (0, 16, False)
    assert cache.match_prefix([*range(9)]) == 0
    b, _ = filled(cache, [*range(5)])
    assert b > a
    assert cache.page_table([b]) is table
    assert cache.seq_lens([b]) is lens
    assert lens.tolist() == [5]
    assert table[0, :2].tolist() == held_pages(cache, b)


def test_a_cache_is_freed_with_its_pages():
    cache = new_cache()
    filled(cache, [*range(9)])
    freed = weakref.ref(cache._store.arrays["k"])
    del cache
    gc.collect()
    assert freed() is None
