"""Copies, files and swapped sequences of a PagedKVCache."""

from __future__ import annotations

import copy
import io
import pickle

import ml_dtypes
import numpy as np
import pytest

from cuattn.kvcache import PagedKVCache
from tests.caches import (
    DIM,
    HEADS,
    LAYERS,
    assert_finds_only_what_was_written,
    bookkeeping,
    busy_cache,
    content,
    filled,
    held_pages,
    new_cache,
)


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
        with pytest.raises(ValueError, match=r"load: .* what PagedKVCache.save writes: it is no"):
            PagedKVCache.load(path)
    path.write_bytes(b"before" + whole)
    with open(path, "rb") as file:
        file.seek(6)
        assert list(PagedKVCache.load(file)) == [a]
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


def test_what_is_no_file_is_named():
    for call in (new_cache().save, PagedKVCache.load):
        with pytest.raises(TypeError, match=rf"^PagedKVCache.{call.__name__}: file must be a path"):
            call(None)


def test_what_is_not_the_files_fault_is_not_said_of_it(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    new_cache(num_layers=LAYERS).save(path)
    with pytest.raises(TypeError, match=r"PagedKVCache.load: xp is 'cupy', must be numpy or cupy"):
        PagedKVCache.load(path, xp="cupy")

    def full(*_, **__):
        raise MemoryError("no room for pages")

    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(MemoryError, match="no room for pages"):
        PagedKVCache.load(path)


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


def test_swapped_sequences_may_be_in_lists_and_sets():
    cache = new_cache(num_layers=LAYERS)
    swapped = []
    for _ in range(3):
        id, _ = filled(cache, [1, 2, 3])
        swapped.append(cache.swap_out(id))
    assert len(set(swapped)) == 3
    swapped.remove(swapped[2])
    assert len(swapped) == 2


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
