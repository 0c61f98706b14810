"""Which tokens a new sequence of a PagedKVCache finds written already."""

from __future__ import annotations

import numpy as np
import pytest

from tests.caches import (
    LAYERS,
    assert_finds_only_what_was_written,
    bookkeeping,
    content,
    filled,
    held_pages,
    new_cache,
)


def test_prefixes_are_found_while_in_use_and_after():
    cache = new_cache()
    first, found = filled(cache, range(10))
    assert found == 0
    second, found = filled(cache, range(10))
    assert found == 8
    assert np.array_equal(cache.page_table([first])[0, :2], cache.page_table([second])[0, :2])
    cache.remove(first)
    cache.remove(second)
    _, found = filled(cache, [*range(6), 99, 99, 99])
    assert found == 4
    assert (cache.hit_pages, cache.missed_pages) == (2 + 1, 2 + 1)
    assert "prefix hits 3 of 6 pages" in repr(cache)


def test_the_last_token_is_always_left_to_run():
    cache = new_cache()
    filled(cache, range(8))
    assert filled(cache, range(8))[1] == 4


def test_generated_tokens_are_found_too():
    cache = new_cache()
    id, _ = filled(cache, [1, 2, 3])
    for token in range(4, 12):
        cache.extend([id], 1, tokens=[token])
        cache.write(0, [id], *(a[-1:] for a in content(range(1, token + 1), 0)))
    assert filled(cache, range(1, 12))[1] == 8


def test_pages_kept_for_reuse_go_least_recently_used_first():
    cache = new_cache(num_pages=4, page_size=2)
    for start in (0, 10):
        cache.remove(filled(cache, range(start, start + 4))[0])
    assert repr(cache).count("0 in use, 4 kept for reuse, 0 free") == 1
    cache.remove(
        filled(cache, [0, 1, 2])[0]
    )  # uses the first one's first page again, and evicts its last
    survivors = [filled(cache, [start, start + 1, start + 2])[1] for start in (10, 0)]
    assert survivors == [2, 2]


def test_a_step_that_failed_leaves_nothing_to_be_found():
    cache = new_cache(num_layers=LAYERS)
    a = cache.add_sequence(range(9))
    cache.extend([a], 9)
    k, v = content(range(9), 0)
    cache.write(0, [a], k, v)  # layer 1 never comes
    cache.extend([a], 1)
    assert cache.match_prefix(range(9)) == 0
    assert cache.num_tokens(cache.add_sequence(range(9))) == 0
    for layer in range(LAYERS):  # a gap stays one
        cache.write(layer, [a], k[:1], v[:1])
    assert cache.match_prefix(range(9)) == 0
    cache.truncate(a, 0)
    filled(cache, list(range(9)), id=a)
    assert cache.match_prefix(range(9)) == 0  # truncate has forgotten what they were
    cache.truncate(a, 0)
    cache.extend([a], 9, tokens=range(9))
    for layer in range(LAYERS):
        cache.write(layer, [a], *content(range(9), layer))
    assert cache.match_prefix(range(9)) == 8


def test_the_order_of_layers_and_batches_does_not_matter():
    cache = new_cache(num_layers=3)
    ids = [cache.add_sequence([b, *range(8)]) for b in range(3)]
    cache.extend(ids, 9)
    for layer, together in ((2, [[0, 1], [2]]), (0, [[0, 1, 2]]), (1, [[2, 0]])):
        for batch in together:
            parts = [content([b, *range(8)], layer) for b in batch]
            k, v = (np.concatenate([part[i] for part in parts]) for i in range(2))
            cache.write(layer, [ids[b] for b in batch], k, v)
    assert [cache.match_prefix([b, *range(8)]) for b in range(3)] == [8, 0, 8]
    for layer in (1, 1):  # once more changes nothing
        cache.write(layer, [ids[1]], *content([1, *range(8)], layer))
    assert cache.match_prefix([1, *range(8)]) == 8


def test_what_a_graph_has_written_is_said():
    cache = new_cache(num_layers=LAYERS)
    a = cache.add_sequence(range(9))
    cache.extend([a], 9)
    for layer in range(LAYERS):
        for pages, new in zip(cache.pages(layer), content(range(9), layer), strict=True):
            pages[held_pages(cache, a)].reshape(-1, *new.shape[1:])[:9] = new
    assert cache.match_prefix(range(9)) == 0
    cache.mark_written([a])
    assert cache.match_prefix(range(9)) == 8


def test_what_others_share_is_not_written_again():
    cache = new_cache(num_layers=LAYERS)
    a, _ = filled(cache, list(range(9)))
    k, v = content(range(9), 0)
    cache.write(0, [a], k, v)  # nobody shares it yet
    assert cache.match_prefix(range(9)) == 8
    before = bookkeeping(cache)
    with pytest.raises(ValueError, match=r"layer 0 has been written for these tokens before"):
        cache.write(0, [a], k + 1, v)
    assert bookkeeping(cache) == before


def test_what_goes_with_an_evicted_page():
    """Two sequences that wrote the same at the same time have pages of their own; one's are found,
    and when they are evicted, the other's."""
    cache = new_cache(num_pages=7, page_size=2)
    ids = [cache.add_sequence(range(5)) for _ in range(2)]
    for n in (2, 2):  # the second page of either is found behind the first of the first
        cache.extend(ids, n)
        start = cache.num_tokens(ids[0]) - n
        k, v = (np.concatenate([x[start:]] * 2) for x in content(range(start + n), 0))
        cache.write(0, ids, k, v)
        if n == 2 and start == 0:
            assert cache.match_prefix(range(5)) == 2
    assert cache.match_prefix(range(5)) == 4
    cache.remove(ids[0])
    filled(cache, [*range(50, 58)])  # takes three free pages, and evicts the last of the first's
    assert assert_finds_only_what_was_written(cache, [*range(5)]) == 4
    filled(cache, [9, 9])
    assert assert_finds_only_what_was_written(cache, [*range(5)]) == 4
    assert cache.num_free_pages == 0
    cache.remove(ids[1])
    assert assert_finds_only_what_was_written(cache, [*range(5)]) == 4
    filled(cache, [8, 8])
    assert assert_finds_only_what_was_written(cache, [*range(5)]) == 2
