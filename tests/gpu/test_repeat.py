"""Calls like an earlier one, on a GPU: their results are those of the ordinary way, bit for bit,
on any stream and thread, and in a captured graph."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._repeat import forget

cupy = pytest.importorskip("cupy")

from cuattn.gpu import repeat  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def ordinary(monkeypatch):
    """The calls that took the ordinary way."""
    record, calls = repeat.record, []

    def counted(*args):
        calls.append(args)
        return record(*args)

    cuattn.flash_attention(*[cupy.ones((1, 1, 1, 8), np.float32)] * 3)  # CuPy is then known
    forget()
    monkeypatch.setattr(repeat, "record", counted)
    return calls


def normal(rng, *shape, dtype=BFLOAT16):
    return cupy.asarray(rng.standard_normal(shape).astype(dtype))


def whole(rng, **options):
    q, k, v = (normal(rng, 2, 300, heads, 128) for heads in (8, 2, 2))
    return lambda: cuattn.flash_attention(q, k, v, causal=True, return_lse=True, **options)


def biased(rng):
    q, k, v = (normal(rng, 2, 300, heads, 64, dtype=np.float32) for heads in (8, 2, 2))
    bias = normal(rng, 8, 1, 300, dtype=np.float32)
    return lambda: cuattn.flash_attention(q, k, v, bias=bias)


def ragged(rng):
    q, k, v = (normal(rng, 900, heads, 128) for heads in (8, 2, 2))
    cu = cupy.asarray(np.array([0, *sorted(rng.integers(0, 900, 2)), 900], np.int32))
    return lambda: cuattn.flash_attention_varlen(q, k, v, cu, causal=True)


def decode(rng, batch=3, capacity=3000):
    q = normal(rng, batch, 8, 128)
    k, v = (normal(rng, batch, capacity, 2, 128) for _ in range(2))
    lens = cupy.asarray(rng.integers(1, capacity, batch).astype(np.int32))
    return lambda: cuattn.flash_decode(q, k, v, lens, return_lse=True)


def many(rng):
    return decode(rng, 100, 300)


def paged(rng):
    q = normal(rng, 3, 1, 8, 64)
    k, v = (normal(rng, 120, 16, 2, 64) for _ in range(2))
    table = cupy.asarray(rng.permutation(120).reshape(3, 40).astype(np.int32))
    lens = cupy.asarray(rng.integers(1, 640, 3).astype(np.int32))
    return lambda: cuattn.paged_attention(q, k, v, table, lens)


def torch_like(rng):
    q, k, v = (normal(rng, 2, 8, 200, 64) for _ in range(3))
    return lambda: cuattn.scaled_dot_product_attention(q, k, v, is_causal=True)


def sampled(rng, **options):
    logits = normal(rng, 40, 5000, dtype=np.float32)
    offset = int(rng.integers(1000))
    return lambda: cuattn.sampling.sample(logits, seed=5, offset=offset, **options)


def filtered(rng):
    return sampled(rng, top_k=50, top_p=0.9)


def typical(rng):
    return sampled(rng, typical_p=0.7)


def dropped(rng):
    return whole(rng, dropout=0.2, seed=int(rng.integers(2**62)))


CALLS = (whole, biased, ragged, decode, many, paged, torch_like, sampled, filtered, typical)


def arrays(result):
    return [a.get() for a in (result if isinstance(result, tuple) else (result,))]


def same(results, expected):
    pairs = zip(results, expected, strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.parametrize("make", [*CALLS, dropped], ids=lambda make: make.__name__)
def test_results_are_those_of_the_ordinary_way(rng, ordinary, make):
    calls = [make(rng) for _ in range(3)]
    expected = []
    for call in calls:
        forget()
        expected.append(arrays(call()))
    forget()
    del ordinary[:]
    for _ in range(3):
        for call, result in zip(calls, expected, strict=True):
            assert same(arrays(call()), result)
    assert len(ordinary) == 1


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_graphs(rng, make):
    """A repeated call is captured as an ordinary one is."""
    call = make(rng)
    expected = arrays(call())
    with cupy.cuda.Stream(non_blocking=True) as stream:
        call()
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        kept = result if isinstance(result, tuple) else (result,)
        for _ in range(3):
            for array in kept:
                array.view(np.uint8)[...] = 0x7F
            graph.launch(stream)
            stream.synchronize()
            assert same(arrays(result), expected)


def test_threads_do_not_share_arguments(rng):
    """Threads on streams of their own, which make calls alike on different arrays."""
    calls = [decode(rng) for _ in range(8)]
    expected = [arrays(call()) for call in calls]
    cupy.cuda.Device().synchronize()
    wrong = []

    def run(call, result):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(200):
                got = call()
                stream.synchronize()
                if not same(arrays(got), result):
                    wrong.append(result)

    threads = [
        threading.Thread(target=run, args=pair) for pair in zip(calls, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_new_thread_can_begin_with_a_repeated_call(rng):
    """Its first call of CUDA may be the launch."""
    out = cupy.empty((1, 300, 4, 64), np.float32)
    q, k, v = (normal(rng, 1, 300, 4, 64, dtype=np.float32) for _ in range(3))
    for _ in range(2):
        cuattn.flash_attention(q, k, v, out=out)
    expected = out.get()
    out[...] = np.nan
    cupy.cuda.Device().synchronize()
    failures = []

    def run():
        try:
            cuattn.flash_attention(q, k, v, out=out)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
    assert np.array_equal(out.get(), expected)


def test_seeds_are_new_at_each_call(rng):
    logits = cupy.zeros((64, 1000), np.float32)
    draws = [cuattn.sampling.sample(logits).get() for _ in range(4)]
    assert len({draw.tobytes() for draw in draws}) == 4
