"""PagedKVCache on a GPU: the same as on NumPy, in graphs too, and cheap."""

from __future__ import annotations

import copy
import io
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings

import cuattn
from cuattn.decoding import paged_attention
from cuattn.kvcache import PagedKVCache
from tests.caches import CacheMachine, check_views_of_pages
from tests.formulas import assert_accurate
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


class GpuCacheMachine(CacheMachine):
    xp = cupy


TestCache = GpuCacheMachine.TestCase
TestCache.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("dim", "dim_v", "pairs"), [(128, 64, 64), (80, 80, 20), (7, 3, 3)])
@pytest.mark.parametrize("counts", [[5, 5, 5], [1, 1, 1], [0, 9, 300]])
@pytest.mark.parametrize("rope", ["none", "halves", "interleaved"])
def test_write_is_numpys(rng, dtype, dim, dim_v, pairs, counts, rope):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    caches = [
        PagedKVCache(40, 16, 3, dim, head_dim_v=dim_v, num_layers=2, dtype=dtype, xp=xp)
        for xp in (np, cupy)
    ]
    angle = rng.random((400, pairs)).astype(np.float64 if dtype == np.float64 else np.float32)

    options = (
        {}
        if rope == "none"
        else {"rope": (np.cos(angle), np.sin(angle)), "interleaved": rope == "interleaved"}
    )
    pages = []
    for cache, xp in zip(caches, (np, cupy), strict=True):
        draws = np.random.default_rng(counts)
        for array in cache.pages(1):
            array[...] = 0
        ids = [cache.add_sequence() for _ in counts]
        for new in ([3, 0, 14], counts):
            cache.extend(ids, new)
            total = sum(new)
            k, v = (draws.standard_normal((total, 3, d)).astype(dtype) for d in (dim, dim_v))
            given = {
                key: tuple(map(xp.asarray, value)) if key == "rope" else value
                for key, value in options.items()
            }
            cache.write(1, ids, xp.asarray(k), xp.asarray(v), **given)
        pages.append([array if xp is np else array.get() for array in cache.pages(1)])
    for want, got in zip(*pages, strict=True):
        if rope == "none":
            assert np.array_equal(got, want)
        else:
            assert_accurate(
                got, want.astype(np.float64), want, slack=4 * float(ml_dtypes.finfo(dtype).eps)
            )


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_is_written_may_be_views_of_pages(quantization, rng):
    check_views_of_pages(rng, quantization, cupy)


def test_a_step_is_captured_once_and_replayed(rng):
    layers, heads, dim, page_size = 2, 2, 64, 16
    cache = PagedKVCache(
        64, page_size, heads, dim, num_layers=layers, dtype=np.float16, max_seqlen=200, xp=cupy
    )
    ids = [cache.add_sequence() for _ in range(3)]
    held = [[np.zeros((0, heads, dim), np.float16)] * 3 for _ in range(2 * layers)]
    k, v = cupy.empty((2, layers, 3, heads, dim), np.float16)
    q = cupy.asarray(rng.standard_normal((3, 1, 8, dim)).astype(np.float16))

    def step():
        outs = []
        for layer in range(layers):
            cache.write(layer, ids, k[layer], v[layer])
            outs.append(paged_attention(q, *cache.pages(layer), table, lens))
        return outs

    def extend():
        cache.extend(ids, 1)
        new = rng.standard_normal((2 * layers, 3, heads, dim)).astype(np.float16)
        k.set(new[:layers])
        v.set(new[layers:])
        for kind in range(2 * layers):
            held[kind] = [
                np.concatenate([old, row[None]])
                for old, row in zip(held[kind], new[kind], strict=True)
            ]

    extend()
    table, lens = cache.page_table(ids), cache.seq_lens(ids)
    replay, outs = captured(step)
    for _ in range(40):
        extend()
        assert cache.page_table(ids) is table
        assert cache.seq_lens(ids) is lens
        replay()
    for layer in range(layers):
        for b in range(3):
            want = cuattn.flash_attention(q.get()[b], held[layer][b], held[layers + layer][b])
            np.testing.assert_allclose(outs[layer].get()[b], want, atol=2e-3)


def steps_in_a_graph(cache, ids, k, v):
    """A function that writes one new token of each sequence, which a graph does when it is called
    again."""
    table, lens = cache.page_table(ids), cache.seq_lens(ids)
    stream = cupy.cuda.Stream(non_blocking=True)
    for layer in range(cache.num_layers):  # compiles
        cache.write(layer, ids, k[layer], v[layer])
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for layer in range(cache.num_layers):
            cache.write(layer, ids, k[layer], v[layer])
        graph = stream.end_capture()

    def launch():
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()

    return launch, table, lens


def test_a_graph_writes_and_says_so():
    """Calls that are captured write nothing: until the graph has run, nothing is found."""
    cache = PagedKVCache(9, 4, 2, 8, num_layers=2, dtype=np.float32, max_seqlen=16, xp=cupy)
    a = cache.add_sequence([0, 1, 2, 3, 4])
    k, v = cupy.zeros((2, 2, 1, 2, 8), np.float32)
    cache.extend([a], 1)
    launch, *_ = steps_in_a_graph(cache, [a], k, v)
    for token in range(1, 4):
        cache.extend([a], 1)
        cache.page_table([a])
        k[...], v[...] = token, -token
        assert cache.match_prefix([0, 1, 2, 3, 4]) == 0
        launch()
        cache.mark_written([a])
    assert cache.match_prefix([0, 1, 2, 3, 4]) == 4
    page = int(cache.page_table([a])[0, 0])
    for layer in range(2):
        keys, values = cache.pages(layer)
        assert keys[page, :, 1, 3].tolist() == [0, 1, 2, 3]
        assert values[page, :, 1, 3].tolist() == [0, -1, -2, -3]
    cache.extend([a], 4, tokens=[4, 5, 6, 7])
    launch()  # and is not told
    assert cache.match_prefix([0, 1, 2, 3, 4, 5, 6, 7, 8]) == 4


def test_tables_of_graphs_stay_for_all_threads():
    cache = PagedKVCache(600, 4, 1, 8, dtype=np.float32, max_seqlen=32768, xp=cupy)
    ids = [cache.add_sequence() for _ in range(256)]
    cache.extend(ids, 1)
    k, v = cupy.zeros((2, 1, 3, 1, 8), np.float32)
    launch, table, lens = steps_in_a_graph(cache, ids[:3], k, v)
    addresses = table.data.ptr, lens.data.ptr
    del table, lens
    for n in range(4, 256, 9):  # of these most go
        cache.page_table(ids[:n])
    cache.extend(ids[:3], 5)
    with ThreadPoolExecutor(1) as pool:  # another thread goes on
        table = pool.submit(cache.page_table, ids[:3]).result()
        lens = pool.submit(cache.seq_lens, ids[:3]).result()
    assert (table.data.ptr, lens.data.ptr) == addresses
    k[...] = 7
    cupy.cuda.Device().synchronize()
    cache.extend(ids[:3], 1)
    cache.page_table(ids[:3])
    launch()
    keys, _ = cache.pages(0)
    pages = table[:, 1].get()
    assert keys[pages, 2, 0, 0].tolist() == [7, 7, 7]
    assert len(cache._store._tables) < 256 / 9


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_host_memory_and_files(rng, dtype):
    """What a device's cache holds, a host's can take over, and the other way round."""
    here, there = (PagedKVCache(12, 4, 2, 8, num_layers=2, dtype=dtype, xp=xp) for xp in (np, cupy))
    a = there.add_sequence(range(10))
    there.extend([a], 10)
    k, v = (rng.standard_normal((2, 10, 2, 8)).astype(dtype) for _ in "kv")
    for layer in range(2):
        there.write(layer, [a], cupy.asarray(k[layer]), cupy.asarray(v[layer]))
    file = io.BytesIO()
    there.save(file)
    file.seek(0)
    loaded = PagedKVCache.load(file), copy.deepcopy(there), pickle.loads(pickle.dumps(there))
    swapped = there.swap_out(a)
    moved = here, here.swap_in(swapped)
    moved_back = there, there.swap_in(here.swap_out(here.fork(moved[1])))
    for cache, id in (moved, moved_back, *((cache, a) for cache in loaded)):
        assert cache.match_prefix(range(10)) == 8
        slots = cache.page_table([id])[0, :3]
        for layer in range(2):
            for pages, want in zip(cache.pages(layer), (k[layer], v[layer]), strict=True):
                got = pages[slots].reshape(12, 2, 8)[:10]
                got = got if isinstance(got, np.ndarray) else got.get()
                assert np.array_equal(got, want)


def test_threads_lose_nothing():
    """As on NumPy, all on one stream."""
    cache = PagedKVCache(150, 4, 2, 8, num_layers=2, dtype=np.float32, xp=cupy)

    def generate(thread):
        for turn in range(10):
            id = cache.add_sequence()
            for new in (9, 1, 3):
                cache.extend([id], new)
                table, lens = cache.page_table([id]), cache.seq_lens([id])
                length = cache.num_tokens(id)
                for layer in range(2):
                    content = cupy.full((new, 2, 8), 100 * turn + 10 * thread + layer, np.float32)
                    cache.write(layer, [id], content, -content)
                assert lens.tolist() == [length]
                for layer in range(2):
                    for pages, sign in zip(cache.pages(layer), (1, -1), strict=True):
                        got = pages[table[0, : -(-length // 4)]].reshape(-1, 2, 8)[:length]
                        assert bool((got == sign * (100 * turn + 10 * thread + layer)).all())
            cache.remove(id)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(generate, thread) for thread in range(4)]:
            done.result()
    assert cache.num_free_pages == 150


def test_keys_of_another_device_are_refused():
    cache = PagedKVCache(9, 4, 2, 8, dtype=np.float32, xp=cupy)
    a = cache.add_sequence()
    cache.extend([a], 1)
    new = np.zeros((1, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"write: k is an array of numpy, must be cupy"):
        cache.write(0, [a], new, new)
    with pytest.raises(TypeError, match=r"extend: tokens is on a GPU, .*; pass tokens.get\(\)"):
        cache.extend([a], 1, tokens=cupy.arange(1))


def test_many_sequences_cost_little_a_step(record_property):
    """256 sequences of 32768 tokens: the median step's bookkeeping. The bound leaves a slow machine
    room; the figure is recorded.
    """
    batch, length, page_size = 256, 32768, 16
    cache = PagedKVCache(
        batch * length // page_size + batch * 16, page_size, 1, 1, dtype=np.float16, xp=cupy
    )
    ids = [cache.add_sequence() for _ in range(batch)]
    cache.extend(ids, [length - i % page_size for i in range(batch)])
    cache.page_table(ids)
    steps = []
    for _ in range(200):
        start = time.perf_counter()
        cache.extend(ids, 1)
        cache.page_table(ids)
        lens = cache.seq_lens(ids)
        steps.append(time.perf_counter() - start)
    median = sorted(steps)[100]
    record_property("microseconds", 1e6 * median)
    print(f"host bookkeeping of a step: {1e6 * median:.0f} us")
    assert int(lens[0]) == length + 200
    assert median < 1e-3
