"""PagedKVCache on NumPy: its bookkeeping against a plain dict of arrays, and what must not change
when a call fails.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pathlib
import pickle
import re
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cuattn
from cuattn.decoding import paged_attention
from cuattn.kvcache import PagedKVCache
from cuattn.kvcache.pages import PageManager
from cuattn.reference.kvcache import rotate

HEADS, DIM, DIM_V, LAYERS = 2, 4, 3, 2


def content(tokens, layer):
    """The keys and values of tokens: a function of all tokens so far, as a model's are, so that
    wrong sharing shows.
    """
    history = np.zeros(HEADS * (DIM + DIM_V))
    rows = []
    for token in tokens:
        history = np.sin(history * 1.7 + token + np.arange(history.size) + layer)
        rows.append(history.astype(np.float32))
    both = np.array(rows, np.float32).reshape(len(tokens), HEADS, DIM + DIM_V)
    return both[..., :DIM], both[..., DIM:]


class CacheMachine(RuleBasedStateMachine):
    """Random calls, mirrored in a dict from id to tokens."""

    xp = np

    @initialize(page_size=st.sampled_from([1, 2, 4, 8]), num_pages=st.integers(4, 40))
    def start(self, page_size, num_pages):
        self.page_size, self.num_pages = page_size, num_pages
        self.cache = PagedKVCache(
            num_pages,
            page_size,
            HEADS,
            DIM,
            num_layers=LAYERS,
            head_dim_v=DIM_V,
            dtype=np.float32,
            joined=page_size > 2,
            xp=self.xp,
        )
        self.tokens: dict[int, list[int]] = {}

    def extend_and_write(self, ids, counts, tokens_of, tell):
        new = [list(tokens_of(id, n)) for id, n in zip(ids, counts, strict=True)]
        flat = [token for tokens in new for token in tokens]
        before = bookkeeping(self.cache)
        try:
            self.cache.extend(ids, counts, tokens=flat if tell else None)
        except MemoryError:
            assert bookkeeping(self.cache) == before
            return False
        for layer in range(LAYERS):
            parts = [
                content(self.tokens[id] + tokens, layer)
                for id, tokens in zip(ids, new, strict=True)
            ]
            k, v = (
                np.concatenate([p[i][len(p[i]) - n :] for p, n in zip(parts, counts, strict=True)])
                for i in range(2)
            )
            self.cache.write(layer, ids, self.xp.asarray(k), self.xp.asarray(v))
        for id, tokens in zip(ids, new, strict=True):
            self.tokens[id] += tokens
        return True

    @rule(tokens=st.lists(st.integers(0, 1), max_size=24), known=st.booleans())
    def add(self, tokens, known):
        id = self.cache.add_sequence(tokens if known else None)
        start = int(self.cache.seq_lens([id])[0])
        assert start % self.page_size == 0
        assert start < max(len(tokens), 1)
        assert known or start == 0
        self.tokens[id] = tokens[:start]
        rest = tokens[start:]
        if not self.extend_and_write([id], [len(rest)], lambda *_: rest, tell=False):
            self.cache.remove(id)
            del self.tokens[id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def generate(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1))
        counts = [data.draw(st.integers(0, 5)) for _ in ids]
        draw = st.integers(0, 1)
        self.extend_and_write(
            ids,
            counts,
            lambda _, n: [data.draw(draw) for _ in range(n)],
            tell=data.draw(st.booleans()),
        )

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def interrupted_step(self, data):
        """A step that writes some of the layers, is looked into from all sides, and given up."""
        id = data.draw(st.sampled_from(sorted(self.tokens)))
        before = self.tokens[id]
        new = data.draw(st.lists(st.integers(0, 1), max_size=9))
        try:
            self.cache.extend([id], len(new), tokens=new)
        except MemoryError:
            return
        written = data.draw(st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1))
        for layer in written:
            k, v = (self.xp.asarray(a[len(before) :]) for a in content(before + new, layer))
            self.cache.write(layer, [id], k, v)
        # The tokens of a gap are in nobody's pages, whatever is written after them.
        if data.draw(st.booleans()) and self.cache.can_extend([id], 2):
            self.cache.extend([id], 2, tokens=[0, 0])
            for layer in range(LAYERS):
                k, v = (self.xp.asarray(a[-2:]) for a in content([*before, *new, 0, 0], layer))
                self.cache.write(layer, [id], k, v)
        probe = self.cache.add_sequence([*before, *new, 0, 0, 0])
        found = self.cache.num_tokens(probe)
        self.cache.truncate(probe, found)  # it need not go on as it was added
        self.tokens[probe] = [*before, *new, 0, 0][:found]
        if data.draw(st.booleans()):
            self.cache.truncate(id, len(before))
        else:
            self.cache.remove(id)
            del self.tokens[id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.tokens[self.cache.fork(id)] = list(self.tokens[id])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data):
        id = data.draw(st.sampled_from(sorted(self.tokens)))
        n = data.draw(st.integers(0, len(self.tokens[id])))
        self.cache.truncate(id, n)
        del self.tokens[id][n:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def remove(self, data):
        id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.remove(id)
        del self.tokens[id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def swap(self, data):
        """A sequence leaves for the host, others may take its place, and it comes back."""
        id = data.draw(st.sampled_from(sorted(self.tokens)))
        swapped = self.cache.swap_out(id)
        tokens = self.tokens.pop(id)
        self.add(data.draw(st.lists(st.integers(0, 1), max_size=24)), data.draw(st.booleans()))
        try:
            self.tokens[self.cache.swap_in(swapped)] = tokens
        except MemoryError:
            assert -(-len(tokens) // self.page_size) > self.cache.num_free_pages - len(
                self.cache._manager.kept
            )

    @rule(way=st.sampled_from(["save", "deepcopy", "pickle"]))
    def go_on_with_a_copy(self, way):
        before = self.cache
        if way == "save":
            file = io.BytesIO()
            self.cache.save(file)
            file.seek(0)
            self.cache = PagedKVCache.load(file, xp=self.xp)
        elif way == "pickle":
            self.cache = pickle.loads(pickle.dumps(self.cache))
        else:
            self.cache = copy.deepcopy(self.cache)
        self.holds_what_the_dict_holds()
        for array in before._store.arrays.values():
            array[...] = -1
        for id in list(before):
            before.remove(id)

    @invariant()
    def holds_what_the_dict_holds(self):
        ids = sorted(self.tokens)
        table, lens = to_numpy(self.cache.page_table(ids)), to_numpy(self.cache.seq_lens(ids))
        assert lens.tolist() == [len(self.tokens[id]) for id in ids]
        for layer in range(LAYERS):
            pages = [to_numpy(p) for p in self.cache.pages(layer)]
            for row, id in zip(table, ids, strict=True):
                n = len(self.tokens[id])
                slots = row[: -(-n // self.page_size)]
                for got, want in zip(pages, content(self.tokens[id], layer), strict=True):
                    assert np.array_equal(got[slots].reshape(-1, *want.shape[1:])[:n], want)

    @invariant()
    def the_host_knows(self):
        assert list(self.cache) == sorted(self.tokens)
        assert [self.cache.num_tokens(id) for id in self.cache] == [
            len(self.tokens[id]) for id in sorted(self.tokens)
        ]
        held = {page for id in self.tokens for page in held_pages(self.cache, id)}
        assert self.cache.num_free_pages == self.num_pages - len(held)

    @invariant()
    def every_page_has_one_place(self):
        check_books(self.cache, {id: len(tokens) for id, tokens in self.tokens.items()})


def held_pages(cache, id):
    row = cache._manager.row_of[id]
    return cache._manager.table[row, : cache._manager.held[row]].tolist()


def check_books(cache, lengths):
    """What always holds between the parts of a cache's bookkeeping."""
    manager = cache._manager
    references = np.zeros(cache.num_pages, int)
    for id, length in lengths.items():
        row = manager.row_of[id]
        held = manager.table[row, : manager.held[row]]
        assert len(held) == -(-length // cache.page_size)
        assert length == manager.length[row] >= manager.written[row]
        np.add.at(references, held, 1)
    assert np.array_equal(references, manager.references)
    free = manager.free[: manager.num_free].tolist()
    assert sorted([*free, *manager.kept, *np.flatnonzero(references)]) == [*range(cache.num_pages)]
    found, nodes = set(), [manager.index.root]
    while nodes:
        node = nodes.pop()
        for child in node.children.values():
            assert child.parent is node
            assert child.page not in found
            found.add(child.page)
            nodes.append(child)
    assert np.array_equal(np.flatnonzero(manager.index.contains), sorted(found))
    assert manager.kept.keys() <= found


def to_numpy(array):
    return array.get() if hasattr(array, "get") else array


def bookkeeping(cache):
    """All that a cache knows, and its pages bit for bit: what a call that fails leaves alone."""
    manager = cache._manager
    # Beside state: which ids were asked for last.
    state = {k: v for k, v in vars(manager).items() if k not in ("_last_ids", "_last_rows")}
    tree, nodes = [], [((), manager.index.root)]
    while nodes:
        path, node = nodes.pop()
        tree.append((path, node.page))
        nodes += [((*path, key), child) for key, child in node.children.items()]
    state["index"] = sorted(tree)
    state["paths"] = {row: [node.page for node in path] for row, path in manager.paths.items()}
    state["pages"] = [to_numpy(array) for array in cache._store.arrays.values()]
    return frozen(state)


def frozen(value):
    """A copy that can be compared; dicts in their order."""
    if isinstance(value, dict):
        return [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return value.tobytes() if isinstance(value, np.ndarray) else copy.copy(value)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def filled(cache, tokens, *, id=None):
    """A sequence of `tokens`, written; returns its id and how many it found."""
    id = cache.add_sequence(tokens) if id is None else id
    found = int(cache.seq_lens([id])[0])
    cache.extend([id], len(tokens) - found)
    for layer in range(cache.num_layers):
        k, v = content(tokens, layer)
        cache.write(layer, [id], k[found:], v[found:])
    return id, found


def new_cache(num_pages=16, page_size=4, **options):
    options = {"head_dim_v": DIM_V, "dtype": np.float32} | options
    return PagedKVCache(num_pages, page_size, HEADS, DIM, **options)


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


def assert_finds_only_what_was_written(cache, tokens):
    """What the prefix look-up serves to a sequence of these tokens is what they mean."""
    id = cache.add_sequence([*tokens, -1])
    found = cache.num_tokens(id)
    slots = held_pages(cache, id)
    for layer in range(cache.num_layers):
        for pages, want in zip(cache.pages(layer), content(tokens, layer), strict=True):
            got = to_numpy(pages)[slots].reshape(-1, *want.shape[1:])
            assert np.array_equal(got[:found], want[:found])
    cache.remove(id)
    return found


class Killed(BaseException):
    """As KeyboardInterrupt: nothing catches it."""


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


def steps(cache):
    """Calls that meet every branch of the bookkeeping, each as a function; pages are few."""
    texts = {}

    def add(tokens):
        id = cache.add_sequence(tokens)
        texts[id] = list(tokens[: cache.num_tokens(id)])
        return id

    def extend(batch):
        flat = [token for tokens in batch.values() for token in tokens]
        cache.extend(list(batch), [len(tokens) for tokens in batch.values()], tokens=flat)

    def write(layer, batch):
        parts = [content(texts[id] + new, layer) for id, new in batch.items()]
        counts = [len(new) for new in batch.values()]
        arrays = (
            np.concatenate(
                [part[i][len(part[i]) - n :] for part, n in zip(parts, counts, strict=True)]
            )
            for i in range(2)
        )
        cache.write(layer, list(batch), *arrays)

    def step(batch):
        yield lambda: extend(batch)
        for layer in range(cache.num_layers):
            yield lambda layer=layer: write(layer, batch)
        for id, new in batch.items():
            texts[id] = texts[id] + new

    yield lambda: add([*range(9)])
    yield from step({0: [*range(9)]})
    yield lambda: texts.update({cache.fork(0): list(texts[0])})
    yield from step({0: [9, 10, 11], 1: [9, 12]})
    yield lambda: add([*range(12)])
    yield from step({2: [*range(texts[2][-1] + 1, 12)]})
    yield lambda: (cache.truncate(2, 7), texts.update({2: texts[2][:7]}))
    yield from step({2: [7, 8, 9, 10, 11, 12]})
    yield lambda: (cache.remove(0), texts.pop(0))
    for start in (100, 200, 300):  # evicts
        yield lambda start=start: add([*range(start, start + 14)])
        yield from step({max(texts): [*range(start, start + 14)]})
        yield lambda: (cache.remove(max(texts)), texts.pop(max(texts)))
    for _ in range(8):  # more rows than there are
        yield lambda: add([*range(9)])
    yield from step({2: [13], max(texts): [8]})


TEXTS = [[*range(9), *range(9, 13)], [*range(9), 9, 12], *([*range(s, s + 14)] for s in (100, 300))]


def run(calls):
    for call in calls:
        call()


def test_a_step_killed_between_any_two_calls():
    calls = 0
    while True:
        cache = new_cache(num_pages=12, num_layers=LAYERS)
        done = [call() for call in itertools.islice(steps(cache), calls)]
        found = [assert_finds_only_what_was_written(cache, text) for text in TEXTS]
        if len(done) < calls:
            break
        calls += 1
    assert found == [12, 8, 0, 12]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("function", "least"), [("write", 16), ("copy_pages", 2)])
def test_a_step_killed_within_the_device(monkeypatch, function, least, when):
    device = new_cache()._store.device
    original = getattr(device, function)
    for kill_at in itertools.count():
        cache = new_cache(num_pages=12, num_layers=LAYERS)
        calls = itertools.count()

        def killed(*args, calls=calls, kill_at=kill_at, **options):
            fatal = next(calls) == kill_at
            if not (fatal and when == "before"):
                original(*args, **options)
            if fatal:
                raise Killed

        monkeypatch.setattr(device, function, killed)
        survived = False
        with contextlib.suppress(Killed):
            run(steps(cache))
            survived = True
        monkeypatch.setattr(device, function, original)
        for text in TEXTS:
            assert_finds_only_what_was_written(cache, text)
        check_books(cache, {id: cache.num_tokens(id) for id in cache})
        if survived:
            break
    assert kill_at >= least


def test_a_step_killed_at_any_line(rng):
    """As Ctrl-C kills: pages may be lost, but none is found that was not written, none has two
    owners, and the cache goes on."""
    lines = run_until(new_cache(num_pages=12, num_layers=LAYERS), None)
    for kill_at in rng.choice(lines, 40, replace=False):
        cache = new_cache(num_pages=12, num_layers=LAYERS)
        run_until(cache, kill_at)
        check_after_kill(cache)


def run_until(cache, kill_at):
    """Run the steps, killed at that line of cuattn.kvcache; the number of lines that were run."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        code = frame.f_code
        if "cuattn/kvcache" not in pathlib.Path(code.co_filename).as_posix():
            return None
        # A signal is not handled while a lock is released, as a trace function is called there.
        if event == "line" and code.co_name != "call":
            lines += 1
            if lines == kill_at:
                raise Killed
        return trace

    before = sys.gettrace()
    calls = steps(cache)
    with contextlib.suppress(Killed):
        while True:
            sys.settrace(None)
            call = next(calls, None)
            if call is None:
                break
            sys.settrace(trace)
            call()
    sys.settrace(before)
    return lines


def check_after_kill(cache):
    manager = cache._manager
    owners = np.zeros(cache.num_pages, int)
    free = manager.free[: manager.num_free]
    owners[free] += 1
    owners[list(manager.kept)] += 1
    assert len({*free.tolist(), *manager.kept}) == len(free) + len(manager.kept)
    held = np.zeros(cache.num_pages, int)
    for id in cache:
        np.add.at(held, held_pages(cache, id), 1)
    assert (held <= manager.references).all()
    assert not (owners[held > 0]).any()
    for text in TEXTS:
        assert_finds_only_what_was_written(cache, text)
    for id in list(cache):
        cache.remove(id)
    filled(cache, [*range(4)])
    for text in TEXTS:
        assert_finds_only_what_was_written(cache, text)
    cache.reset()
    assert (len(cache), cache.num_free_pages) == (0, cache.num_pages)
    filled(cache, [*range(4 * cache.num_pages)])
    assert assert_finds_only_what_was_written(cache, [*range(20)]) == 20


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


# --------------------------------------------------------------------------------------------
# Bad arguments: of every method, whatever the cache holds


def busy_cache():
    """A cache with all kinds of pages and sequences, a step in the middle of which it is."""
    cache = new_cache(num_pages=24, num_layers=LAYERS, max_seqlen=40)
    a, _ = filled(cache, [*range(9)])
    b = cache.fork(a)
    filled(cache, [*range(50, 63)])
    cache.remove(2)
    c = cache.add_sequence([*range(9)])
    cache.extend([a, b], [3, 1], tokens=[9, 10, 11, 12])
    k, v = (np.ones((4, HEADS, d), np.float32) for d in (DIM, DIM_V))
    cache.write(1, [a, b], k, v)
    return cache, (a, b, c), (k, v)


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


# --------------------------------------------------------------------------------------------
# Page tables, threads, copies, files


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


def test_copies():
    cache, ids, new = busy_cache()
    with pytest.raises(TypeError, match=r"shallow copy .* copy.deepcopy makes an independent"):
        copy.copy(cache)
    file = io.BytesIO()
    cache.save(file)
    file.seek(0)
    loaded = PagedKVCache.load(file)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), loaded):
        assert repr(other) == repr(cache)
        assert list(other) == list(cache)
        assert np.array_equal(other.page_table(ids), cache.page_table(ids))
        other.write(0, ids[:2], *new)  # the step goes on where it was
        for id in ids:
            other.remove(id)
        assert other.match_prefix([*range(13)]) == 12
        assert cache.match_prefix([*range(13)]) == 8
        assert other.add_sequence() == cache._manager.next_id


def test_files(tmp_path):
    cache = PagedKVCache(9, 4, HEADS, DIM, dtype=ml_dtypes.bfloat16, num_layers=LAYERS)
    path = tmp_path / "cache"
    a = cache.add_sequence(range(9))
    cache.extend([a], 9)
    k = np.arange(9 * HEADS * DIM).reshape(9, HEADS, DIM).astype(ml_dtypes.bfloat16)
    for layer in range(LAYERS):
        cache.write(layer, [a], k, -k)
    cache.save(path)
    cache.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    loaded = PagedKVCache.load(path)
    assert loaded.dtype == cache.dtype
    found = loaded.add_sequence(range(9))
    assert loaded.num_tokens(found) == 8
    assert np.array_equal(
        loaded.pages(1)[0][held_pages(loaded, found)].reshape(8, HEADS, DIM), k[:8]
    )
    with pytest.raises(FileNotFoundError):
        PagedKVCache.load(tmp_path / "another")
    whole = path.read_bytes()
    for broken in (b"", b"no zip file", whole[:-200], pickle.dumps({"config": 1})):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"load: .* is not what PagedKVCache.save writes"):
            PagedKVCache.load(path)
    path.write_bytes(whole)
    with np.load(path) as saved:
        arrays = dict(saved)
    for name, value in (
        ("state_free", arrays["state_free"][1:]),
        ("state_paths", np.array([7, 8])),
    ):
        np.savez(tmp_path / "broken.npz", **{**arrays, name: value})
        with pytest.raises(ValueError, match=r"is not what PagedKVCache.save writes"):
            PagedKVCache.load(tmp_path / "broken.npz")


def test_a_swap_makes_room_and_shares_again():
    cache = new_cache(num_pages=5, num_layers=LAYERS)
    a, _ = filled(cache, [*range(9)])
    swapped = pickle.loads(pickle.dumps(cache.swap_out(a)))
    assert cache.num_free_pages == 5
    with pytest.raises(KeyError, match=r"num_tokens: 0 is not the id"):
        cache.num_tokens(a)
    b = cache.swap_in(swapped)  # its pages are still there
    assert cache.hit_pages == 2
    assert cache.swap_in(swapped) != b
    assert cache.num_free_pages == 5 - 2 - 2
    cache.swap_in(swapped)
    cache.match_prefix([])  # what was written is noted
    before = bookkeeping(cache)
    with pytest.raises(MemoryError, match=r"swap_in: 1 more pages are needed, and 0 are free"):
        cache.swap_in(swapped)
    assert bookkeeping(cache) == before
    cache.reset()
    filled(cache, [*range(50, 55)])
    other = new_cache(num_pages=5, num_layers=LAYERS)
    for target in (cache, other):  # nothing of it is there any more, or ever was
        id = target.swap_in(swapped)
        assert target.match_prefix([*range(9)]) == 8
        assert_finds_only_what_was_written(target, [*range(8)])
        assert target.num_tokens(id) == 9
        target.extend([id], 1, tokens=[9])
    for wrong in (new_cache(num_layers=1), new_cache(num_layers=LAYERS, page_size=8)):
        with pytest.raises(ValueError, match=r"swap_in: swapped.k has shape .* this cache's"):
            wrong.swap_in(swapped)
    with pytest.raises(ValueError, match=r"swap_in: the sequence has 9 tokens, .* max_seqlen=8"):
        new_cache(num_layers=LAYERS, max_seqlen=8).swap_in(swapped)


def test_what_is_not_written_is_not_found_after_a_swap():
    cache = new_cache(num_layers=LAYERS)
    a = cache.add_sequence(range(9))
    cache.extend([a], 9)
    cache.write(0, [a], *content(range(9), 0))
    b = cache.swap_in(cache.swap_out(a))
    cache.mark_written([b])
    assert (cache.num_tokens(b), cache.match_prefix(range(9))) == (9, 0)
    file = io.BytesIO()
    cache.save(file)
    file.seek(0)
    assert PagedKVCache.load(file).match_prefix(range(9)) == 0


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


def test_no_step_has_more_tokens_than_kernels_count():
    cache = new_cache()
    ids = [cache.add_sequence(), cache.add_sequence()]
    cache._manager.num_pages = 2**30  # as if: their arrays would take gigabytes
    with pytest.raises(ValueError, match=r"extend: n is 2147483648 in all, .* at most 2147483647"):
        cache.extend(ids, 2**30)
    cache.extend(ids, 1)
    with pytest.raises(ValueError, match=r"for a sequence of 2147483648 tokens; both must be"):
        cache.extend(ids[:1], 2**31 - 1)
