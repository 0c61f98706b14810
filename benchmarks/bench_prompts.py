"""Prompts over a paged cache, beside the same attention over contiguous keys; over codes of a
quantised cache, beside pages of bfloat16; and a few queries over many keys.

``pytest benchmarks/bench_prompts.py --benchmark-json=benchmarks/results/NAME.json``; five minutes.

A chunk of new tokens attends to itself and to what the cache holds of its sequence, as in an
engine that writes long prompts in chunks. The contiguous call computes the same tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuattn
from benchmarks import peers, timing
from benchmarks.bench_decoding import draw
from benchmarks.bench_quantized import CACHES, stored

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

#: (new tokens of a sequence, keys with them, sequences)
CHUNKS = [
    (256, 2048, 16),
    (256, 131072, 1),
    (1024, 8192, 4),
    (2048, 16384, 2),
    (8192, 8192, 1),
    (8192, 131072, 1),
]
HEADS = [(32, 8, 128), (32, 32, 128), (32, 8, 64), (16, 4, 256)]  # of queries, of keys, head_dim


def paged(rng: np.random.Generator, arrays: list[Any], page_size: int) -> tuple[Any, ...]:
    """Contiguous caches (batch, keys, heads, head_dim) cut into pages in random order, and their
    page table."""
    batch, keys, heads, dim = arrays[0].shape
    order = rng.permutation(batch * keys // page_size)
    pages = [a.reshape(-1, page_size, heads, dim)[cupy.asarray(np.argsort(order))] for a in arrays]
    table = cupy.asarray(order.reshape(batch, -1).astype(np.int32))
    return (*pages, table)


def report(benchmark: Any, contestants: list[timing.Contestant], flops: float) -> None:
    """Race, and write down TFLOP/s and each contestant's speed over the last one's."""
    seconds = timing.race(benchmark, contestants, rounds=7, turn=10e-3)
    tflops = {name: flops / s * 1e-12 for name, s in seconds.items()}
    base = tflops[contestants[-1].name]
    benchmark.extra_info |= {
        "tflops": tflops,
        "of_contiguous": {name: value / base for name, value in tflops.items()},
    }
    shown = (f"{name} {value:.0f} ({value / base:.2f})" for name, value in tflops.items())
    print(f"\n{benchmark.name}: {', '.join(shown)} TFLOP/s")


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}/{h[1]} of {h[2]}")
@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda c: f"{c[2]}x{c[0]} over {c[1]}")
def bench_chunk(benchmark, chunk, heads):
    """Chunks of the same length: pages of 16 and of 64, a cache in one piece, and
    `flash_attention`."""
    (tokens, keys, batch), (heads_q, heads_kv, dim) = chunk, heads
    q = draw(batch, tokens, heads_q, dim)
    k, v = (draw(batch, keys, heads_kv, dim) for _ in "kv")
    lens = cupy.full(batch, keys, np.int32)
    calls = {}
    for page_size in (16, 64):
        pages = paged(np.random.default_rng(0), [k, v], page_size)
        calls[f"pages of {page_size}"] = lambda p=pages: cuattn.paged_attention(q, *p, lens)
    calls["flash_decode"] = lambda: cuattn.flash_decode(q, k, v, lens)
    calls["flash_attention"] = lambda: cuattn.flash_attention(q, k, v, causal=True)
    exact = calls["flash_attention"]().astype(np.float32)
    for name, call in calls.items():
        difference = float(cupy.linalg.norm(call().astype(np.float32) - exact))
        assert difference < 1e-2 * float(cupy.linalg.norm(exact)), name
    benchmark.group = "prompts over pages"
    seen = batch * tokens * (keys - (tokens - 1) / 2)  # pairs of a query and a key it sees
    contestants = [timing.captured(name, [call]) for name, call in calls.items()]
    report(benchmark, contestants, 4.0 * seen * heads_q * dim)


#: ((new tokens of a sequence, keys with them, sequences), (heads of queries, of keys)), of 128
#: features.
CODES = [
    ((512, 8192, 1), (32, 32)),
    ((512, 32768, 1), (32, 32)),
    ((512, 8192, 4), (32, 32)),
    ((384, 8192, 4), (32, 32)),
    ((128, 8192, 4), (32, 32)),
    ((1024, 8192, 1), (32, 32)),
    ((2048, 8192, 1), (32, 32)),
    ((512, 8192, 1), (32, 8)),
    ((512, 32768, 1), (32, 8)),
    ((512, 8192, 4), (32, 8)),
    ((2048, 8192, 1), (32, 8)),
    ((768, 8192, 1), (64, 16)),
    ((8192, 8192, 1), (32, 8)),
]


@pytest.mark.parametrize("page_size", [16, 64], ids="pages of {}".format)
@pytest.mark.parametrize(
    ("chunk", "heads"),
    CODES,
    ids=[f"{h[0]}/{h[1]}-{c[2]}x{c[0]} over {c[1]}" for c, h in CODES],
)
def bench_codes(benchmark, chunk, heads, page_size):
    """Chunks over codes: bfloat16, then the kinds of codes that `PagedKVCache` has, which rotates
    integer keys."""
    (tokens, keys, batch), (heads_q, heads_kv) = chunk, heads
    q = draw(batch, tokens, heads_q, 128)
    lens = cupy.full(batch, keys, np.int32)
    k, v, table = paged(
        np.random.default_rng(0), [draw(batch, keys, heads_kv, 128) for _ in "kv"], page_size
    )
    calls = {"bfloat16": lambda: cuattn.paged_attention(q, k, v, table, lens)}
    for name, (k_format, v_format) in CACHES.items():
        codes = stored(k, k_format, rotate=k_format != "float8_e4m3"), stored(v, v_format)
        calls[name] = lambda codes=codes: cuattn.paged_attention(q, *codes, table, lens)
    exact = calls["bfloat16"]().astype(np.float32)
    for name, call in calls.items():
        difference = float(cupy.linalg.norm(call().astype(np.float32) - exact))
        assert difference < 0.3 * float(cupy.linalg.norm(exact)), name  # int4 has 4 bits
    contestants = [timing.captured(name, [call]) for name, call in calls.items()]
    benchmark.group = "prompts over codes"
    seconds = timing.race(benchmark, contestants, rounds=7, turn=10e-3)
    benchmark.extra_info |= {"microseconds": {name: s * 1e6 for name, s in seconds.items()}}
    base = seconds["bfloat16"]
    shown = ", ".join(f"{name} {s * 1e6:.0f} us ({s / base:.2f})" for name, s in seconds.items())
    print(f"\n{benchmark.name}: {shown}")


def bench_ragged_chunks(benchmark):
    """Chunks of 64 to 4096 tokens of 16 sequences in one call, beside the same keys end to end."""
    rng = np.random.default_rng(0)
    heads_q, heads_kv, dim, page_size = 32, 8, 128, 64
    tokens = np.exp(rng.uniform(np.log(64), np.log(4096), 16)).astype(int)
    keys = tokens + page_size * rng.integers(0, 128, 16)
    ends = [cupy.asarray(np.concatenate([[0], np.cumsum(n)]), np.int32) for n in (tokens, keys)]
    q = draw(int(tokens.sum()), heads_q, dim)
    k, v = (draw(int(keys.sum()), heads_kv, dim) for _ in "kv")
    counts = -(-keys // page_size)
    order = rng.permutation(int(counts.sum())).astype(np.int32)
    table = np.zeros((16, counts.max()), np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = order
    slots = np.concatenate(
        [
            (row[: -(-n // page_size), None] * page_size + np.arange(page_size)).ravel()[:n]
            for row, n in zip(table, keys, strict=True)
        ]
    )
    pages = []
    for array in (k, v):
        scattered = draw(int(counts.sum()) * page_size, heads_kv, dim)
        scattered[cupy.asarray(slots)] = array
        pages.append(scattered.reshape(-1, page_size, heads_kv, dim))
    page_table, lens = cupy.asarray(table), cupy.asarray(keys, np.int32)
    calls = {
        "pages of 64": lambda: cuattn.paged_attention(
            q, *pages, page_table, lens, cu_seqlens_q=ends[0]
        ),
        "varlen": lambda: cuattn.flash_attention_varlen(q, k, v, *ends, causal=True),
    }
    first, second = (call().astype(np.float32) for call in calls.values())
    assert float(cupy.linalg.norm(first - second)) < 1e-2 * float(cupy.linalg.norm(second))
    benchmark.group = "prompts over pages"
    seen = float((tokens * (keys - (tokens - 1) / 2)).sum())
    contestants = [timing.captured(name, [call]) for name, call in calls.items()]
    report(benchmark, contestants, 4.0 * seen * heads_q * dim)


#: Sequences of one token, their keys, chunks, their tokens, and their keys.
MIXED = [
    (64, 8192, 2, 2048, 16384),
    (1, 131072, 2, 2048, 16384),
    (256, 4096, 1, 512, 8192),
]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("batch", MIXED, ids=lambda b: f"{b[0]}x{b[1]} + {b[2]}x{b[3]} over {b[4]}")
def bench_mixed_batch(benchmark, batch, page_size):
    """Decoding sequences beside chunks, in one call and in two."""
    heads_q, heads_kv, dim = 32, 8, 128
    few, few_keys, chunks, length, chunk_keys = batch
    tokens = np.array([1] * few + [length] * chunks)
    keys = np.array([few_keys] * few + [chunk_keys] * chunks)
    counts = keys // page_size
    table = np.zeros((few + chunks, counts.max()), np.int32)
    order = np.random.default_rng(0).permutation(int(counts.sum()))
    table[np.arange(counts.max()) < counts[:, None]] = order
    table = cupy.asarray(table)
    k, v = (draw(int(counts.sum()), page_size, heads_kv, dim) for _ in "kv")
    q = draw(int(tokens.sum()), heads_q, dim)
    lens = cupy.asarray(keys, np.int32)
    ends = cupy.asarray(np.concatenate([[0], np.cumsum(tokens)]), np.int32)
    one = timing.captured(
        "cuattn",
        [lambda: cuattn.paged_attention(q, k, v, table, lens, cu_seqlens_q=ends)],
    )
    parts = timing.captured(
        "in two calls",
        [
            lambda: cuattn.paged_attention(q[:few, None], k, v, table[:few], lens[:few]),
            lambda: cuattn.paged_attention(
                q[few:].reshape(chunks, length, heads_q, dim), k, v, table[few:], lens[few:]
            ),
        ],
    )
    benchmark.group = "mixed batches"
    seconds = timing.race(benchmark, [one, parts], rounds=7, turn=10e-3)
    benchmark.extra_info |= {"microseconds": {name: s * 1e6 for name, s in seconds.items()}}
    shown = ", ".join(f"{name} {s * 1e6:.0f} us" for name, s in seconds.items())
    print(f"\n{benchmark.name}: {shown}")


#: (queries of a sequence, keys with them, sequences) of plain arrays.
SHORT = [
    (tokens, keys, batch)
    for keys in (8192, 16384, 32768)
    for tokens in (64, 128, 256, 512)
    for batch in (1, 8)
]


@pytest.mark.parametrize("shape", SHORT, ids=lambda s: f"{s[2]}x{s[0]} over {s[1]}")
def bench_short_queries(benchmark, shape):
    """`flash_attention` of a few queries over many keys, 4 query heads a key head, beside
    FlashAttention-3."""
    (tokens, keys, batch), (heads_q, heads_kv, dim) = shape, (32, 8, 128)
    queries = [draw(batch, tokens, heads_q, dim) for _ in range(6)]
    k, v = (draw(batch, keys, heads_kv, dim) for _ in "kv")
    contestants = [
        timing.captured(
            "cuattn", [lambda q=q: cuattn.flash_attention(q, k, v, causal=True) for q in queries]
        ),
        *peers.flash_attention_3(queries, k, v),
    ]
    out = contestants[0].run(1).astype(np.float32)
    for peer in contestants[1:]:
        theirs = peers.to_cupy(peer.run(1)).reshape(out.shape)
        assert float(cupy.linalg.norm(out - theirs)) < 1e-2 * float(cupy.linalg.norm(theirs))
    benchmark.group = "short queries"
    seconds = timing.race(benchmark, contestants, rounds=7, turn=10e-3)
    seen = batch * tokens * (keys - (tokens - 1) / 2) * len(queries)
    tflops = {name: 4.0 * seen * heads_q * dim / s * 1e-12 for name, s in seconds.items()}
    benchmark.extra_info |= {"tflops": tflops}
    shown = ", ".join(f"{name} {value:.0f}" for name, value in tflops.items())
    print(f"\n{benchmark.name}: {shown} TFLOP/s")
