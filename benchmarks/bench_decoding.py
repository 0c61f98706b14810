"""Decoding: one token a sequence over long caches, contiguous and in pages, by CUDA-graph replay.

``pytest benchmarks/bench_decoding.py --benchmark-json=benchmarks/results/NAME.json``; two minutes.

Bytes count K and V once. Caches take turns past L2; a captured call costs no host time, as in a
serving loop. FlashAttention-3, as a JAX call, cannot be captured here: it takes part where its
kernels take longer than its launches.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn

cupy = pytest.importorskip("cupy")

from benchmarks import peers, timing  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 8192), (128, 2048), (8, 65536)]
HEADS = [(32, 8, 128), (64, 8, 128), (64, 4, 128), (32, 32, 64)]  # of queries, of keys, head_dim
#: Sequences, keys, heads of queries and of keys, head_dim.
SHORT = [
    (512, 128, 64, 8, 64),
    (512, 200, 32, 8, 128),
    (256, 500, 8, 1, 128),
    (300, 400, 16, 4, 80),
    (256, 300, 64, 4, 128),
    (12, 100, 64, 4, 128),
    (128, 512, 8, 1, 128),
    (8, 1024, 32, 8, 128),
    (200, 300, 4, 4, 112),
]
MIXED = {
    "16 to 16384": np.linspace(16, 16384, 64).astype(np.int32),
    "one long": np.array([131072] + 31 * [1024], np.int32),
}


def draw(*shape: int) -> Any:
    """Random numbers, drawn in pieces that leave room for the result."""
    array = cupy.empty(shape, BFLOAT16)
    flat = array.reshape(-1)
    for part in (flat[i : i + (1 << 27)] for i in range(0, flat.size, 1 << 27)):
        part[...] = cupy.random.standard_normal(part.size, dtype=np.float32).astype(BFLOAT16)
    return array


def report(
    benchmark: Any,
    ours: list[timing.Contestant],
    others: list[timing.Contestant],
    *,
    calls: int,
    nbytes: int,
    copy: float,
) -> None:
    """Compare results, race, and write down microseconds a call and the part of the copy ceiling
    that `nbytes` a call are moved at.
    """
    if others:
        out = ours[0].run(1).astype(np.float32)
    for peer in others:  # a figure next to a wrong result would be worth nothing
        theirs = peers.to_cupy(peer.run(1)).reshape(out.shape)
        difference = float(cupy.linalg.norm(out - theirs) / cupy.linalg.norm(theirs))
        assert difference < 2e-2, f"cuattn and {peer.name} differ by {difference:.1e}"
    benchmark.group = "decoding"
    seconds = timing.race(benchmark, [*ours, *others], rounds=7, turn=10e-3)
    each = {name: s / calls for name, s in seconds.items()}
    benchmark.extra_info |= {
        "microseconds": {name: s * 1e6 for name, s in each.items()},
        "of_copy": {name: nbytes / s / copy for name, s in each.items()},
        "copy_tb_per_s": copy * 1e-12,
    }
    shown = (f"{name} {s * 1e6:.1f} us ({nbytes / s / copy:.0%})" for name, s in each.items())
    print(f"\n{benchmark.name}: {', '.join(shown)}")


def show_left_out(benchmark: Any, left_out: dict[str, str]) -> None:
    """Record and print which peers do not take part, and why."""
    benchmark.extra_info["left_out"] = left_out
    for name, why in left_out.items():
        print(f"\nleft out: {name}: {why}")


@pytest.mark.parametrize("case", SHORT, ids=lambda c: f"{c[0]}x{c[1]}, {c[2]}/{c[3]} of {c[4]}")
def bench_short_sequences(benchmark, ceilings, case):
    """Sequences of some hundred keys, few and many, and peers."""
    batch, length, heads_q, heads_kv, dim = case
    nbytes = 2 * batch * length * heads_kv * dim * 2
    count = timing.sets_past_l2(nbytes)
    sets = [
        (draw(batch, 1, heads_q, dim), *(draw(batch, length, heads_kv, dim) for _ in "kv"))
        for _ in range(count)
    ]
    lens = cupy.full(batch, length, np.int32)
    out = cupy.empty_like(sets[0][0])
    run = timing.captured(
        "cuattn", [lambda s=s: cuattn.flash_decode(*s, lens, out=out) for s in sets]
    )
    left_out: dict[str, str] = {}
    others = list(peers.decode(sets, left_out))
    show_left_out(benchmark, left_out)
    report(benchmark, [run], others, calls=count, nbytes=nbytes, copy=ceilings["copy"])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}/{h[1]} of {h[2]}")
def bench_decode(benchmark, ceilings, heads, shape):
    """Uniform lengths: a contiguous cache, pages of 16 and of 64, and peers on contiguous
    caches."""
    (heads_q, heads_kv, dim), (batch, length) = heads, shape
    nbytes = 2 * batch * length * heads_kv * dim * 2
    count = timing.sets_past_l2(nbytes)
    sets = [
        (draw(batch, 1, heads_q, dim), *(draw(batch, length, heads_kv, dim) for _ in "kv"))
        for _ in range(count)
    ]
    lens = cupy.full(batch, length, np.int32)
    out = cupy.empty_like(sets[0][0])
    ours = [
        timing.captured(
            "cuattn", [lambda s=s: cuattn.flash_decode(*s, lens, out=out) for s in sets]
        )
    ]
    for page_size in (16, 64):
        order = cupy.random.permutation(batch * length // page_size).astype(np.int32)
        table = order.reshape(batch, -1)

        def call(q, k, v, table=table, page_size=page_size):
            pages = (a.reshape(-1, page_size, heads_kv, dim) for a in (k, v))
            return cuattn.paged_attention(q, *pages, table, lens, out=out)

        ours.append(
            timing.captured(f"pages of {page_size}", [lambda s=s, f=call: f(*s) for s in sets])
        )
    left_out: dict[str, str] = {}
    others = list(peers.decode(sets, left_out))
    show_left_out(benchmark, left_out)
    report(benchmark, ours, others, calls=count, nbytes=nbytes, copy=ceilings["copy"])


@pytest.mark.parametrize("kind", MIXED)
def bench_mixed_lengths(benchmark, ceilings, kind):
    """Pages of 16, and peers on the same sequences one after the other."""
    lens, page_size, heads, dim = MIXED[kind], 16, 8, 128
    pages = -(-lens // page_size)
    table = np.zeros((len(lens), pages.max()), np.int32)
    shuffled = np.random.default_rng(0).permutation(pages.sum())
    table[np.arange(pages.max()) < pages[:, None]] = shuffled
    k, v = (draw(int(pages.sum()), page_size, heads, dim) for _ in "kv")
    q = draw(len(lens), 1, 4 * heads, dim)
    arrays = (q, k, v, cupy.asarray(table), cupy.asarray(lens))
    out = cupy.empty_like(q)
    run = timing.captured("cuattn", [lambda: cuattn.paged_attention(*arrays, out=out)])
    rows = np.concatenate(
        [
            (pages_of[: -(-n // page_size), None] * page_size + np.arange(page_size)).ravel()[:n]
            for pages_of, n in zip(table, lens, strict=True)
        ]
    )
    flat = [a.reshape(-1, heads, dim)[cupy.asarray(rows)] for a in (k, v)]
    others = list(peers.decode_varlen(q[:, 0], *flat, lens))
    nbytes = 4 * int(lens.sum()) * heads * dim
    report(benchmark, [run], others, calls=1, nbytes=nbytes, copy=ceilings["copy"])


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def bench_several_tokens(benchmark, ceilings, tokens):
    """Speculative verification: some tokens a sequence should cost what one does."""
    batch, length, heads, dim = 16, 8192, 8, 128
    q = draw(batch, tokens, 4 * heads, dim)
    k, v = (draw(batch, length, heads, dim) for _ in "kv")
    lens, out = cupy.full(batch, length, np.int32), cupy.empty_like(q)
    run = timing.captured("cuattn", [lambda: cuattn.flash_decode(q, k, v, lens, out=out)])
    report(benchmark, [run], [], calls=1, nbytes=2 * k.nbytes, copy=ceilings["copy"])


def bench_shared_prefix(benchmark, ceilings):
    """64 sequences that share 32768 tokens: with the prefix read once, from the pages and from an
    array, and with each reading it.
    """
    batch, shared, own, page_size, heads, dim = 64, 32768, 128, 16, 8, 128
    first, rest = shared // page_size, own // page_size
    table = np.concatenate(
        [
            np.tile(np.arange(first), (batch, 1)),
            first + np.arange(batch * rest).reshape(batch, rest),
        ],
        axis=1,
    ).astype(np.int32)
    k, v = (draw(int(table.max()) + 1, page_size, heads, dim) for _ in "kv")
    q = draw(batch, 1, 4 * heads, dim)
    whole = (cupy.asarray(table), cupy.full(batch, shared + own, np.int32))
    rest_alone = (cupy.asarray(table[:, first:]), cupy.full(batch, own, np.int32))
    arrays = tuple(a[:first].reshape(shared, heads, dim) for a in (k, v))
    results, ours = [], []
    for name, table_and_lens, prefix in (
        ("cuattn", whole, shared),
        ("prefix in an array", rest_alone, arrays),
        ("without prefix", whole, None),
    ):

        def call(table_and_lens=table_and_lens, prefix=prefix):
            return cuattn.paged_attention(q, k, v, *table_and_lens, prefix=prefix)

        results.append(call().astype(np.float32))
        ours.append(timing.captured(name, [call]))
    for result in results[:-1]:
        assert float(abs(result - results[-1]).max()) < 2e-2 * float(abs(result).max())
    report(benchmark, ours, [], calls=1, nbytes=2 * k.nbytes, copy=ceilings["copy"])


@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("shape", [(64, 1), (4, 2048)], ids=lambda s: f"{s[0]}x{s[1]}")
def bench_write(benchmark, ceilings, shape, rope):
    """New keys and values to their pages; bytes are counted as read and as written."""
    (batch, new), heads, dim, layers = shape, 8, 128, 8
    cache = cuattn.PagedKVCache(
        batch * (new // 16 + 1), 16, heads, dim, num_layers=layers, dtype=BFLOAT16, xp=cupy
    )
    ids = [cache.add_sequence() for _ in range(batch)]
    cache.extend(ids, new)
    cache.page_table(ids)
    tables = (cupy.random.random((new, dim // 2), dtype=np.float32),) * 2 if rope else None
    k, v = (draw(layers, batch * new, heads, dim) for _ in "kv")
    calls = [lambda i=i: cache.write(i, ids, k[i], v[i], rope=tables) for i in range(layers)]
    nbytes = 2 * (k[0].nbytes + v[0].nbytes)
    run = timing.captured("cuattn", calls)
    report(benchmark, [run], [], calls=layers, nbytes=nbytes, copy=ceilings["copy"])
