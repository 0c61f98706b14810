"""Decoding over quantised caches, beside bfloat16 in the same run, and the kernels that make codes.

``pytest benchmarks/bench_quantized.py --benchmark-json=benchmarks/results/NAME.json``; two minutes.

Bytes are the cache's own: codes, scales and minima, once each.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn

cupy = pytest.importorskip("cupy")

from benchmarks import ceilings as limits  # noqa: E402
from benchmarks import timing  # noqa: E402
from benchmarks.bench_decoding import draw  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(1, 8192), (1, 131072), (16, 8192), (64, 8192), (128, 2048), (8, 65536)]
HEADS = [(32, 8, 128), (64, 8, 128), (32, 4, 128), (32, 8, 64)]  # of queries, of keys, head_dim
#: Formats of keys and of values.
CACHES = {
    "int8": ("int8", "int8"),
    "fp8": ("float8_e4m3", "float8_e4m3"),
    "k8v4": ("int8", "int4"),
    "int4": ("int4", "int4"),
}


def stored(x, format, rotate=False):
    """Keys or values as a cache of that format has them."""
    return cuattn.quantize(x, format, symmetric=format != "int4", rotate=rotate)


def nbytes(*arrays):
    """Bytes that are read."""
    return sum(array.nbytes for array in arrays)


def report(benchmark, contestants, sizes, calls, copy):
    """Race, and write down microseconds a call, the part of the copy ceiling at which each one's
    own bytes are moved, and how many times as fast as the first it is. "copy of NAME" may be among
    them, which copies as many bytes as NAME reads."""
    benchmark.group = "quantized"
    seconds = timing.race(benchmark, contestants, rounds=7, turn=10e-3)
    each = {name: s / calls for name, s in seconds.items()}
    # A copy of as many bytes has a launch, and a first and a last byte, as the call has.
    same_bytes = {n: each.pop(f"copy of {n}") / each[n] for n in sizes if f"copy of {n}" in each}
    of_copy = {name: sizes[name] / s / copy for name, s in each.items()}
    benchmark.extra_info |= {
        "microseconds": {name: s * 1e6 for name, s in each.items()},
        "of_copy": of_copy,
        "of_copy_of_as_many_bytes": same_bytes,
        "copy_tb_per_s": copy * 1e-12,
    }
    first = next(iter(each.values()))
    shown = (
        f"{name} {s * 1e6:.1f} us ({of_copy[name]:.0%}, x{first / s:.2f})"
        for name, s in each.items()
    )
    beside = "".join(f", {ratio:.0%} of a copy of {name}'s" for name, ratio in same_bytes.items())
    print(f"\n{benchmark.name}: {', '.join(shown)}{beside}")


@pytest.mark.parametrize("page_size", [0, 16, 64], ids=["contiguous", "pages of 16", "pages of 64"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}/{h[1]} of {h[2]}")
def bench_decode(benchmark, ceilings, heads, shape, page_size):
    """One token a sequence: bfloat16, then each kind of codes."""
    (heads_q, heads_kv, dim), (batch, length) = heads, shape
    pages = batch * length // page_size if page_size else batch
    k, v = (draw(pages, page_size or length, heads_kv, dim) for _ in "kv")
    caches = {"bfloat16": (k, v)}
    for name, (k_format, v_format) in CACHES.items():
        caches[name] = stored(k, k_format), stored(v, v_format)
    count = min(8, timing.sets_past_l2(nbytes(*caches["int4"])))
    q, lens = draw(batch, 1, heads_q, dim), cupy.full(batch, length, np.int32)
    out = cupy.empty_like(q)
    copies = {
        name: [cache, *(tuple(part.copy() for part in cache) for _ in range(count - 1))]
        if name == "bfloat16"
        else [cache, *(tuple(copied(part) for part in cache) for _ in range(count - 1))]
        for name, cache in caches.items()
    }
    if page_size:
        table = cupy.random.permutation(pages).astype(np.int32).reshape(batch, -1)

    def call(cache):
        if page_size:
            return cuattn.paged_attention(q, *cache, table, lens, out=out)
        return cuattn.flash_decode(q, *cache, lens, out=out)

    contestants = [
        timing.captured(name, [lambda cache=cache: call(cache) for cache in sets])
        for name, sets in copies.items()
    ]
    sizes = {name: nbytes(*cache) for name, cache in caches.items()}
    for name in ("int8", "int4"):
        half = sizes[name] // 32 * 16  # is read, and half is written
        copies = [cupy.random.randint(0, 256, half, dtype=np.uint8) for _ in range(count)]
        calls = [lambda source=source: limits.copied(source) for source in copies]
        contestants.append(timing.captured(f"copy of {name}", calls))
    report(benchmark, contestants, sizes, count, ceilings["copy"])


def copied(array):
    """The same codes and scales elsewhere."""
    scale, minimum = array.scale, array.minimum
    if minimum is None:
        scale = scale.swapaxes(1, 2).copy().swapaxes(1, 2)
    else:  # a minimum stays beside its scale
        words = cupy.stack([scale.swapaxes(1, 2), minimum.swapaxes(1, 2)], axis=-1)
        scale, minimum = (words[..., i].swapaxes(1, 2) for i in range(2))
    return cuattn.QuantizedArray(
        array.data.copy(),
        scale,
        dtype=array.dtype,
        minimum=minimum,
        rotation=array.rotation,
        like=array.like,
    )


@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("kind", [None, "int8", "float8_e4m3", "k8v4", "int4"])
@pytest.mark.parametrize("tokens", [8192, 32768])
def bench_write(benchmark, ceilings, tokens, kind, rope):
    """New keys and values to their pages; bytes are counted as read and as written."""
    heads, dim, layers, batch = 8, 128, 4, 4
    cache = cuattn.PagedKVCache(
        tokens // 16 + batch,
        16,
        heads,
        dim,
        num_layers=layers,
        dtype=BFLOAT16,
        quantization=kind,
        xp=cupy,
    )
    ids = [cache.add_sequence() for _ in range(batch)]
    cache.extend(ids, tokens // batch)
    cache.page_table(ids)
    tables = (cupy.random.random((tokens, dim // 2), dtype=np.float32),) * 2 if rope else None
    k, v = (draw(layers, tokens, heads, dim) for _ in "kv")
    calls = [lambda i=i: cache.write(i, ids, k[i], v[i], rope=tables) for i in range(layers)]
    written = cache.nbytes // layers * tokens // (cache.num_pages * 16)
    sizes = {"cuattn": k[0].nbytes + v[0].nbytes + written}
    report(benchmark, [timing.captured("cuattn", calls)], sizes, layers, ceilings["copy"])


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3", "int4"])
def bench_quantize(benchmark, ceilings, kind):
    """quantize and dequantize of 32768 tokens of 8 heads of 128."""
    layers = 4
    x = draw(layers, 32768, 8, 128)
    codes = [stored(x[i], kind) for i in range(layers)]
    calls = {
        "quantize": [lambda i=i: stored(x[i], kind) for i in range(layers)],
        "dequantize": [lambda i=i: cuattn.dequantize(codes[i]) for i in range(layers)],
    }
    contestants = [timing.captured(name, each) for name, each in calls.items()]
    sizes = dict.fromkeys(calls, x[0].nbytes + codes[0].nbytes)
    report(benchmark, contestants, sizes, layers, ceilings["copy"])
