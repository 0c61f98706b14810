"""PagedKVCache on a GPU: the same as on NumPy, in graphs too, and cheap."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings

import cuattn
from cuattn.decoding import paged_attention
from cuattn.kvcache import PagedKVCache
from tests.formulas import assert_accurate
from tests.test_kvcache import CacheMachine

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
    step()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        outs = step()
        graph = stream.end_capture()
    for _ in range(40):
        extend()
        assert cache.page_table(ids) is table
        assert cache.seq_lens(ids) is lens
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
    for layer in range(layers):
        for b in range(3):
            want = cuattn.flash_attention(q.get()[b], held[layer][b], held[layers + layer][b])
            np.testing.assert_allclose(outs[layer].get()[b], want, atol=2e-3)


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
