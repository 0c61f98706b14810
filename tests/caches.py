"""Caches whose content is known, and what always holds of them."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cuattn
from cuattn.kvcache import KVQuantization, PagedKVCache

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


def check_views_of_pages(rng, quantization, xp):
    """Tokens that are moved within a page of keys, to both sides: all are read before one is
    written."""
    quantization = quantization and KVQuantization(None, quantization)
    cache = PagedKVCache(2, 64, 2, 64, dtype=np.float16, quantization=quantization, xp=xp)
    id = cache.add_sequence()
    cache.extend([id], 64)
    k = xp.asarray(rng.standard_normal((64, 2, 64)).astype(np.float16))
    cache.write(0, [id], k, k)
    cache.truncate(id, 1)
    cache.extend([id], 63)
    page = int(cache.page_table([id])[0, 0])
    keys = cache.pages(0)[0][page]
    cache.write(0, [id], keys[:63], keys[:63])
    right = PagedKVCache(2, 64, 2, 64, dtype=np.float16, quantization=quantization, xp=xp)
    right.extend([right.add_sequence()], 64)
    moved = xp.concatenate([k[:1], k[:63]])
    right.write(0, [0], moved, moved)
    for got, want in zip(cache.pages(0), right.pages(0), strict=True):
        got, want = (
            to_numpy(a[p]) if isinstance(a, xp.ndarray) else to_numpy(a[p].data)
            for a, p in ((got, page), (want, int(right.page_table([0])[0, 0])))
        )
        assert np.array_equal(got[1:], want[1:])


class CacheMachine(RuleBasedStateMachine):
    """Random calls, mirrored in a dict from id to tokens."""

    xp = np

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        num_pages=st.integers(4, 40),
        quantization=st.sampled_from([None, None, "int8", "float8_e4m3"]),
    )
    def start(self, page_size, num_pages, quantization):
        self.page_size, self.num_pages, self.quantization = page_size, num_pages, quantization
        self.cache = PagedKVCache(
            num_pages,
            page_size,
            HEADS,
            DIM,
            num_layers=LAYERS,
            head_dim_v=DIM_V,
            dtype=np.float32,
            quantization=quantization,
            joined=page_size > 2,
            xp=self.xp,
        )
        self.tokens: dict[int, list[int]] = {}
        self.copied: dict[int, list[int]] = {}  # what was there when a copy was made

    def stored(self, tokens, layer):
        """What the cache makes of the keys and values of tokens."""
        k, v = content(tokens, layer)
        if self.quantization is None:
            return k, v
        v = cuattn.dequantize(cuattn.quantize(v, self.quantization))
        if self.page_size > 2:  # of joined rows keys stay as they are
            return k, v
        codes = cuattn.quantize(k, self.quantization, rotate=self.quantization == "int8")
        return cuattn.dequantize(codes), v

    def extend_and_write(self, ids, counts, tokens_of, tell, between=lambda: None):
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
            between()
            self.cache.write(layer, ids, self.xp.asarray(k), self.xp.asarray(v))
        for id, tokens in zip(ids, new, strict=True):
            self.tokens[id] += tokens
        return True

    def another_acts(self, data, busy):
        """In the middle of a step of some sequences, another one changes, leaves or comes."""
        others = sorted(set(self.tokens) - set(busy))
        if not others or data.draw(st.booleans()):
            return
        id = data.draw(st.sampled_from(others))
        act = data.draw(st.sampled_from(["fork", "remove", "truncate", "swap", "step"]))
        if act == "fork":
            self.tokens[self.cache.fork(id)] = list(self.tokens[id])
        elif act == "remove":
            self.cache.remove(id)
            del self.tokens[id]
        elif act == "truncate":
            n = data.draw(st.integers(0, len(self.tokens[id])))
            self.cache.truncate(id, n)
            del self.tokens[id][n:]
        elif act == "swap":
            swapped, tokens = self.cache.swap_out(id), self.tokens.pop(id)
            with contextlib.suppress(MemoryError):  # pages that it shared are still others'
                self.tokens[self.cache.swap_in(swapped)] = tokens
        else:
            n = data.draw(st.integers(0, 5))
            self.extend_and_write([id], [n], lambda *_: [1] * n, tell=data.draw(st.booleans()))

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
            between=lambda: self.another_acts(data, ids),
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

    @precondition(lambda self: self.tokens != self.copied)  # a copy of a copy shows nothing
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
        self.copied = {id: list(tokens) for id, tokens in self.tokens.items()}
        self.holds_what_the_dict_holds()
        for array in before._store.arrays.values():
            array[...] = 99
        for id in list(before):
            before.remove(id)

    @invariant()
    def holds_what_the_dict_holds(self):
        ids = sorted(self.tokens)
        table, lens = to_numpy(self.cache.page_table(ids)), to_numpy(self.cache.seq_lens(ids))
        assert lens.tolist() == [len(self.tokens[id]) for id in ids]
        for layer in range(LAYERS):
            pages = [
                to_numpy(cuattn.dequantize(p) if isinstance(p, cuattn.QuantizedArray) else p)
                for p in self.cache.pages(layer)
            ]
            for row, id in zip(table, ids, strict=True):
                n = len(self.tokens[id])
                slots = row[: -(-n // self.page_size)]
                for got, want in zip(pages, self.stored(self.tokens[id], layer), strict=True):
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
    asked = ("_last_ids", "_last_rows", "_last_key")
    state = {k: v for k, v in vars(manager).items() if k not in asked}
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
