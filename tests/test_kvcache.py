"""PagedKVCache on NumPy: its bookkeeping against a plain dict of arrays, and what must not change
when a call fails.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings

from cuattn.kvcache import PagedKVCache
from cuattn.kvcache.pages import PageManager
from tests.caches import (
    DIM,
    HEADS,
    LAYERS,
    CacheMachine,
    bookkeeping,
    busy_cache,
    check_books,
    content,
    filled,
    new_cache,
)

TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_running_out_of_pages_changes_nothing():
    cache = new_cache(num_pages=3)
    a, _ = filled(cache, range(8))
    b = cache.fork(a)
    before = bookkeeping(cache)
    with pytest.raises(MemoryError, match=r"2 more pages are needed, and 1 are free and 0 kept"):
        cache.extend([a, b], 1)
    assert bookkeeping(cache) == before
    cache.extend([a], 4)


def test_forks_write_their_own_pages():
    cache = new_cache()
    a, _ = filled(cache, [1, 2, 3, 4, 5])
    b = cache.fork(a)
    cache.extend([a, b], 1)
    ends = [content([1, 2, 3, 4, 5, token], 0) for token in (6, 7)]
    cache.write(0, [a, b], *(np.concatenate([end[i][-1:] for end in ends]) for i in range(2)))
    table = cache.page_table([a, b])
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]
    for row, (keys, _) in zip(table, ends, strict=True):
        assert np.array_equal(cache.pages(0)[0][row[1], :2], keys[4:])
    assert repr(cache).startswith("PagedKVCache(16 pages of 4 tokens: 3 in use")


def test_ids_may_change_between_calls():
    """A cache remembers the ids that it was asked for last."""
    cache = new_cache()
    a, b, c = (filled(cache, range(i, i + 5))[0] for i in (0, 10, 20))
    ids = [a, b]
    cache.extend(ids, [1, 2])
    assert cache.seq_lens(ids).tolist() == [6, 7]
    ids[1] = c
    assert cache.seq_lens(ids).tolist() == [6, 5]
    assert cache.seq_lens((a, c)).tolist() == [6, 5]
    cache.remove(c)
    with pytest.raises(KeyError, match=f"{c} is not the id"):
        cache.seq_lens(ids)
    d = cache.add_sequence()  # where c was
    assert cache.seq_lens([a, d]).tolist() == [6, 0]


def test_a_step_is_taken_back():
    cache = new_cache(num_layers=LAYERS)
    a, b, c = (cache.add_sequence([i, *range(8)]) for i in range(3))
    cache.extend([a], 6)
    for layer in range(LAYERS):
        cache.write(layer, [a], *(array[:6] for array in content([0, *range(8)], layer)))
    cache.fork(a)
    before = cache.num_free_pages
    cache.extend([a, b], [5, 9], tokens=[*range(5, 8), 77, 78, 1, *range(8)])
    cache.write(1, [b], *content([1, *range(8)], 1))
    cache.rollback([a, b, c])
    assert [cache.num_tokens(id) for id in (a, b, c)] == [6, 0, 0]
    assert cache.num_free_pages == before - 1  # the copy of the page that a shared
    check_books(cache, {id: cache.num_tokens(id) for id in cache})
    cache.rollback([a, b])
    assert cache.num_tokens(a) == 6
    with pytest.raises(ValueError, match=r"extend: tokens has 99 at position 6 .* with 5 there"):
        cache.extend([a], 2, tokens=[99, 6])
    cache.extend([a, b], [3, 9])  # what they were added with is still known, and no more
    for layer in range(LAYERS):
        new = [content([i, *range(8)], layer) for i in range(2)]
        cache.write(layer, [a, b], *(np.concatenate([new[0][i][6:], new[1][i]]) for i in range(2)))
    assert [cache.match_prefix([i, *range(8), 0]) for i in range(2)] == [8, 8]
    cache.extend([a], 3, tokens=[90, 91, 92])
    for layer in range(LAYERS):
        cache.write(layer, [a], *(x[9:] for x in content([0, *range(8), 90, 91, 92], layer)))
    assert cache.match_prefix([0, *range(8), 90, 91, 92, 0]) == 12


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, a: c.extend([a, a], 1), ValueError, "extend: ids has a sequence more than once"),
        (lambda c, a: c.extend([99], 1), KeyError, "extend: 99 is not the id"),
        (lambda c, a: c.extend([a], -1), ValueError, "extend: n is -1"),
        (lambda c, a: c.extend([a], 1.5), ValueError, "extend: n is 1.5, must be an integer or"),
        (lambda c, a: c.extend([a], [1, 2]), ValueError, r"n is \[1, 2\], .* the 1 sequences"),
        (lambda c, a: c.extend([a], 100), ValueError, "at most max_seqlen=40"),
        (
            lambda c, a: c.extend([a], 2, tokens=[1]),
            ValueError,
            "tokens has 1 tokens, must be n's 2",
        ),
        (lambda c, a: c.truncate(a, 6), ValueError, "truncate: n is 6, must be from 0 to"),
        (lambda c, a: c.add_sequence([0.5]), ValueError, "add_sequence: tokens has"),
        (
            lambda c, a: c.write(0, [a], *np.zeros((2, 2, HEADS, DIM), np.float32)),
            ValueError,
            "write: k has shape",
        ),
        (
            lambda c, a: c.write(0, [], *np.zeros((2, 1, HEADS, DIM), np.float32)),
            ValueError,
            "must hold the 0 new tokens of 0 sequences: .*; extend makes room",
        ),
        (lambda c, a: c.pages(1), IndexError, "layer is 1"),
        (lambda c, a: new_cache(page_size=3), ValueError, "page_size is 3"),
        (lambda c, a: new_cache(dtype=np.int8), TypeError, "dtype is int8"),
        (lambda c, a: new_cache(head_dim_v=513), ValueError, "head_dim_v is 513"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(call, error, message):
    cache = new_cache(max_seqlen=40)
    id, _ = filled(cache, range(5))
    before = bookkeeping(cache)
    with pytest.raises(error, match=message):
        call(cache, id)
    assert bookkeeping(cache) == before


def test_many_sequences_cost_little_a_step(record_property):
    """256 sequences of 32768 tokens: the median step's bookkeeping. The bound leaves a slow machine
    room; the figure is recorded.
    """
    batch, length, page_size = 256, 32768, 16
    cache = PagedKVCache(batch * length // page_size + batch * 8, page_size, 1, 1, dtype=np.float16)
    ids = [cache.add_sequence() for _ in range(batch)]
    cache.extend(ids, [length - i % page_size for i in range(batch)])
    cache.page_table(ids)
    steps = []
    for _ in range(60):
        start = time.perf_counter()
        cache.extend(ids, 1)
        cache.page_table(ids)
        lens = cache.seq_lens(ids)
        steps.append(time.perf_counter() - start)
    record_property("microseconds", 1e6 * sorted(steps)[30])
    assert lens[0] == length + 60
    assert sorted(steps)[30] < 1e-3


NOT_IDS = [99, -1, "a", None, 0.5, True, [0], np.ma.masked]
NOT_ID_LISTS = [*([x] for x in NOT_IDS), [0, 0], [0, 1, 99], 3, None, np.zeros((2, 2), int), "ab"]
NOT_COUNTS = [-1, 1.5, "3", None, [1], [1, 2, 3], [1, -1], [[1, 1]], 2**63 - 1, 2**64, [2**40, 1]]
NOT_COUNTS += [True, np.float32(2), np.ma.array([1, 1], mask=[0, 1]), [1, None], 1000, 30]
NOT_TOKENS = [1, "ab", [0.5, 1], [[1], [2]], [1, [2]], None, [2**64, 1], np.uint64([2**63, 1])]
NOT_TOKENS += [np.ma.array([1, 1], mask=[0, 1]), [True, False]]
NOT_LAYERS = [-1, 2, 0.0, "0", None, True]


def bad_calls():
    for ids in NOT_ID_LISTS:
        for name in ("extend", "can_extend"):
            yield name, (ids, 1), {}
        for name in ("mark_written", "rollback", "page_table", "seq_lens"):
            yield name, (ids,), {}
        yield "write", (0, ids, "k", "v"), {}
    for id in NOT_IDS:
        for name in ("fork", "remove", "swap_out", "num_tokens"):
            yield name, (id,), {}
        yield "truncate", (id, 0), {}
    for n in NOT_COUNTS:
        yield "extend", ([0, 1], n), {}
    for n in (9.5, -1, 13, "1", None, True, 2**63):
        yield "truncate", (0, n), {}
    for tokens in NOT_TOKENS:
        if tokens is not None:
            yield "extend", ([0, 1], 1), {"tokens": tokens}
            yield "add_sequence", (tokens,), {}
        yield "match_prefix", (tokens,), {}
    yield "extend", ([0], 2), {"tokens": [1]}
    yield "extend", ([3], 2), {"tokens": [77, 9]}
    yield "add_sequence", ([1] * 41,), {}
    for layer in NOT_LAYERS:
        yield "write", (layer, [0, 1], "k", "v"), {}
        yield "pages", (layer,), {}
    wrong = [np.ones((4, HEADS, DIM)), np.ones((5, HEADS, DIM), np.float32), 1.0, None]
    wrong += [np.ma.ones((4, HEADS, DIM), np.float32), np.ones(4, np.float32)]
    for array in wrong:
        yield "write", (0, [0, 1], array, "v"), {}
        yield "write", (0, [0, 1], "k", array), {}
    table = np.ones((40, 1), np.float32)
    for rope in (table, 1, (table,), (table, None), (table[:9], table[:9]), (table, table[:, :0])):
        yield "write", (0, [0, 1], "k", "v"), {"rope": rope}
    yield "write", (0, [0, 1], "k", "v"), {"rope": (table, table), "interleaved": "no"}
    for swapped in (None, 0, b"swapped"):
        yield "swap_in", (swapped,), {}


def test_a_call_that_fails_changes_nothing():
    cache, _, new = busy_cache()
    given = dict(zip("kv", new, strict=True))
    before = bookkeeping(cache)
    count = 0
    for name, args, options in bad_calls():
        args = [given.get(arg, arg) if type(arg) is str else arg for arg in args]
        with pytest.raises((TypeError, ValueError, KeyError, IndexError, MemoryError)) as caught:
            getattr(cache, name)(*args, **options)
        assert re.match(rf"['\"]?PagedKVCache.{name}: ", str(caught.value)), (name, args, options)
        assert bookkeeping(cache) == before, (name, args, options)
        count += 1
    assert count > 150


def test_threads_lose_nothing(monkeypatch):
    """Each has sequences of its own, and a table of its own; pages and prefixes they share. Others
    have their turn where two threads would take the same pages, or the same row."""
    for name in ("_next_free", "_double_rows"):
        method = getattr(PageManager, name)
        monkeypatch.setattr(
            PageManager, name, lambda *args, m=method: (m(*args), time.sleep(1e-4))[0]
        )
    cache = new_cache(num_pages=150, num_layers=LAYERS)
    start = threading.Barrier(4)
    interval = sys.getswitchinterval()

    def generate(thread):
        rng = np.random.default_rng(thread)
        start.wait()
        for _ in range(12):
            tokens = rng.integers(0, 2, rng.integers(5, 20)).tolist()
            id = cache.add_sequence(tokens)
            done = cache.num_tokens(id)
            for new in (tokens[done:], [thread], [1, 0]):
                tokens = tokens[:done] + new
                cache.extend([id], len(new), tokens=new)
                table, lens = cache.page_table([id]), cache.seq_lens([id])
                for layer in range(LAYERS):
                    k, v = (array[done:] for array in content(tokens, layer))
                    cache.write(layer, [id], k, v)
                done = len(tokens)
                time.sleep(0)
                assert lens.tolist() == [done]
                for layer in range(LAYERS):
                    for pages, want in zip(cache.pages(layer), content(tokens, layer), strict=True):
                        got = pages[table[0, : -(-done // 4)]].reshape(-1, *want.shape[1:])[:done]
                        assert np.array_equal(got, want)
            fork = cache.fork(id)
            cache.truncate(fork, done // 2)
            cache.remove(id)
            if rng.integers(2):
                cache.remove(fork)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(generate, thread) for thread in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert cache.hit_pages
    check_books(cache, {id: cache.num_tokens(id) for id in cache})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_finds_no_other_thread_in_the_middle_of_a_call(monkeypatch):
    """Of the child, where that thread is not: it would wait for ever, or find half of a step."""
    cache = new_cache()
    id = cache.add_sequence()
    cache.extend([id], [5])
    begun, row = threading.Event(), PageManager.row

    def slow(*args):
        begun.set()
        time.sleep(0.2)
        return row(*args)

    monkeypatch.setattr(PageManager, "row", slow)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(cache.num_tokens, id)
        begun.wait()
        child = os.fork()
        if child == 0:
            os._exit(0 if cache._lock.acquire(timeout=5) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert answer.result() == 5
    assert cache.num_tokens(id) == 5


def test_a_cache_stands_for_its_sequences():
    cache = new_cache()
    ids = [cache.add_sequence() for _ in range(3)]
    cache.extend(cache, 2)
    assert [cache.num_tokens(id) for id in ids] == [2, 2, 2]
    assert np.array_equal(cache.seq_lens(cache), [2, 2, 2])
    cache.rollback(id for id in cache if id != ids[1])
    assert [cache.num_tokens(id) for id in cache] == [0, 2, 0]


def test_a_call_within_a_call_is_an_error():
    """It would wait for ever for the lock that its own thread has."""
    cache = new_cache()
    a, _ = filled(cache, [*range(5)])
    before = bookkeeping(cache)

    class Tokens:
        def __array__(self, dtype=None, copy=None):
            cache.remove(a)

    with pytest.raises(RuntimeError, match=r"remove: called in the middle of another call"):
        cache.match_prefix(Tokens())
    assert bookkeeping(cache) == before
    cache.remove(a)


def test_no_step_has_more_tokens_than_kernels_count():
    cache = new_cache()
    ids = [cache.add_sequence(), cache.add_sequence()]
    cache._manager.num_pages = 2**30  # as if: their arrays would take gigabytes
    with pytest.raises(ValueError, match=r"extend: n is 2147483648 in all, .* at most 2147483647"):
        cache.extend(ids, 2**30)
    cache.extend(ids, 1)
    with pytest.raises(ValueError, match=r"for a sequence of 2147483648 tokens; both must be"):
        cache.extend(ids[:1], 2**31 - 1)
