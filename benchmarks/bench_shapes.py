"""Shapes drawn at random, beside every peer that computes them: what is tuned to a table should
serve the space around it. Forward calls are self-attention, batches of queries over keys of another
length, and ragged batches; decoding is of one token over caches, and of latents (MLA).

``CUATTN_SHAPES_SEED=7 pytest benchmarks/bench_shapes.py --benchmark-json=…``

The seed is new in each run unless it is given, and is printed and recorded. ``CUATTN_SHAPES`` says
how many calls of each of the five kinds are drawn (default 40, about ten minutes).

A peer that fails, for want of memory or otherwise, is left out of a case and named. Each case
begins with empty pools of memory. An error after which the device takes no work ends the run, and
what was measured until then is recorded.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import cuattn
from benchmarks import checks, peers, timing
from benchmarks.bench_decoding import draw, show_left_out

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

COUNT = int(os.environ.get("CUATTN_SHAPES", "40"))
SEED = int(os.environ.get("CUATTN_SHAPES_SEED") or secrets.randbits(32))
MOST_FLOPS = 5e12  # of a forward call
MOST_BYTES = 8 << 30  # of a call's arrays
FORWARD = "random forward shapes"  # the group, which is to be set before the race
LEAST_FLOPS = 2e10  # below, a peer that is timed from the host shows its launch


@pytest.fixture(autouse=True)
def room():
    """A device that takes work, and the memory of earlier cases given back."""
    try:
        peers.free_memory()
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.exit(f"seed {SEED}: the device is lost: {error}", returncode=1)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    """A whole number whose logarithm is evenly distributed."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))


def draw_heads(rng: np.random.Generator) -> tuple[int, int, int, bool]:
    """Heads of queries and of keys, head_dim, and whether a forward call is causal."""
    dim = int(rng.choice([32, 64, 80, 96, 128, 160, 192, 256]))
    group = int(rng.choice([1, 1, 2, 4, 8]))
    heads_kv = int(rng.choice([1, 2, 4, 8, 16]))
    return group * heads_kv, heads_kv, dim, bool(rng.random() < 0.5)


def race(
    benchmark: Any,
    ours: list[timing.Contestant],
    others: list[timing.Contestant],
    rows: Iterable[checks.Row],
    left_out: dict[str, str],
) -> dict:
    """Check the result, race, and give seconds by name.

    A figure next to a wrong result would be worth nothing. Some rows of ours are compared with the
    definition; a peer that then differs from ours is left out. `left_out` has the names of peers
    that do not take part, and why.
    """
    out = ours[0].run(1)
    difference = checks.largest_difference(out, rows)
    assert difference < checks.TOLERANCE, f"cuattn and the definition differ by {difference:.1e}"
    agreeing = checks.agreeing(out.astype(np.float32), others, peers.to_cupy, left_out)
    seconds = timing.race(benchmark, [*ours, *agreeing], rounds=5, turn=8e-3, left_out=left_out)
    show_left_out(benchmark, left_out)
    benchmark.extra_info["seed"] = SEED
    return seconds


def report_forward(
    benchmark: Any,
    ceilings: dict[str, float],
    number: int,
    shape: dict[str, Any],
    flops: float,
    calls: int,
    seconds: dict[str, float],
) -> None:
    """Record and print the rates of a forward call, of which a launch has several."""
    best = min((s for name, s in seconds.items() if name != "cuattn"), default=None)
    ratio = best and best / seconds["cuattn"]
    tflops = {name: flops * calls / s * 1e-12 for name, s in seconds.items()}
    benchmark.extra_info |= {
        "shape": shape,
        "flops": flops,
        "tflops": tflops,
        "of_best": ratio,
        "matmul_tflops": ceilings["bfloat16"] * 1e-12,
    }
    shown = ", ".join(f"{name} {value:.0f}" for name, value in tflops.items())
    relative = "" if ratio is None else f"{ratio:.3f} "
    print(f"\nseed {SEED}, {number}: {relative}{shape}: {shown} TFLOP/s")


def race_forward(
    benchmark: Any, rng: np.random.Generator, sets: list[tuple], causal: bool, flops: float
) -> dict:
    """Seconds by name of forward attention on all sets."""
    benchmark.group = FORWARD
    calls = [lambda s=s: cuattn.flash_attention(*s, causal=causal) for s in sets]
    ours, left_out = [timing.captured("cuattn", calls)], {}
    others = list(
        peers.attention_forward_graphs(
            sets, causal=causal, fa3=flops > LEAST_FLOPS, left_out=left_out
        )
    )
    rows = checks.rows_of_batch(rng, *sets[-1], causal=causal)
    return race(benchmark, ours, others, rows, left_out)


@pytest.mark.parametrize("number", range(COUNT))
def bench_random_forward(benchmark, ceilings, number):
    """Self-attention: batch, length, heads and head_dim at random, causal or not."""
    rng = np.random.default_rng([SEED, 0, number])
    heads, heads_kv, dim, causal = draw_heads(rng)
    seqlen = log_uniform(rng, 32, 65536)
    most = MOST_FLOPS / (4 * seqlen**2 * heads * dim)
    if most < 1:
        seqlen = int(seqlen * most**0.5)
    batch = log_uniform(rng, 1, max(1.5, min(512, most)))
    flops = 4.0 * batch * heads * seqlen**2 * dim * (0.5 if causal else 1)
    shape = {"batch": batch, "seqlen": seqlen, "heads": [heads, heads_kv], "head_dim": dim}
    sets = [
        (draw(batch, seqlen, heads, dim), *(draw(batch, seqlen, heads_kv, dim) for _ in "kv"))
        for _ in range(min(8, timing.sets_past_l2(4 * batch * seqlen * (heads + heads_kv) * dim)))
    ]
    seconds = race_forward(benchmark, rng, sets, causal, flops)
    report_forward(
        benchmark, ceilings, number, shape | {"causal": causal}, flops, len(sets), seconds
    )


@pytest.mark.parametrize("number", range(COUNT))
def bench_random_cross(benchmark, ceilings, number):
    """As many queries in each sequence, over as many keys, but not as many queries as keys; causal
    where there are fewer: the last query sees all keys."""
    rng = np.random.default_rng([SEED, 2, number])
    heads, heads_kv, dim, causal = draw_heads(rng)
    lengths = np.array([log_uniform(rng, 32, 65536) for _ in "qk"])
    if causal:  # every query sees a key
        lengths.sort()
    most = MOST_FLOPS / (4.0 * lengths.prod() * heads * dim)
    seqlen_q, seqlen_k = (int(n * min(1.0, most) ** 0.5) for n in lengths)
    most = min(most, MOST_BYTES / (4 * (seqlen_q * heads + seqlen_k * heads_kv) * dim))
    batch = log_uniform(rng, 1, max(1.5, min(512, most)))
    seen = seqlen_k - (seqlen_q - 1) / 2 if causal else seqlen_k
    flops = 4.0 * batch * heads * seqlen_q * seen * dim
    nbytes = 4 * batch * (seqlen_q * heads + seqlen_k * heads_kv) * dim
    sets = [
        (
            draw(batch, seqlen_q, heads, dim),
            *(draw(batch, seqlen_k, heads_kv, dim) for _ in "kv"),
        )
        for _ in range(min(8, timing.sets_past_l2(nbytes)))
    ]
    seconds = race_forward(benchmark, rng, sets, causal, flops)
    shape = {"batch": batch, "seqlens": [seqlen_q, seqlen_k], "heads": [heads, heads_kv]}
    shape |= {"head_dim": dim, "causal": causal}
    report_forward(benchmark, ceilings, number, shape, flops, len(sets), seconds)


@pytest.mark.parametrize("number", range(COUNT))
def bench_random_varlen(benchmark, ceilings, number):
    """Sequences of lengths at random, one after the other; in half of the calls they have as many
    queries as keys, in the others some keys before them."""
    rng = np.random.default_rng([SEED, 3, number])
    heads, heads_kv, dim, causal = draw_heads(rng)
    batch, longest = log_uniform(rng, 1, 200), log_uniform(rng, 64, 32768)
    lengths_q = np.array([log_uniform(rng, 16, longest) for _ in range(batch)])
    lengths_k = lengths_q.copy()
    if rng.random() < 0.5:
        lengths_k += rng.integers(0, longest, batch)
    pairs = lengths_q * (lengths_k - (lengths_q - 1) / 2 if causal else lengths_k)
    kept = max(1, int((np.cumsum(4.0 * heads * dim * pairs) <= MOST_FLOPS).sum()))
    lengths_q, lengths_k = lengths_q[:kept], lengths_k[:kept]
    flops = 4.0 * heads * dim * float(pairs[:kept].sum())
    total_q, total_k = int(lengths_q.sum()), int(lengths_k.sum())
    nbytes = 4 * (total_q * heads + total_k * heads_kv) * dim
    sets = [
        (draw(total_q, heads, dim), *(draw(total_k, heads_kv, dim) for _ in "kv"))
        for _ in range(min(8, timing.sets_past_l2(nbytes)))
    ]
    starts = [
        cupy.asarray(np.concatenate([[0], np.cumsum(n)]), np.int32) for n in (lengths_q, lengths_k)
    ]
    benchmark.group = FORWARD
    calls = [lambda s=s: cuattn.flash_attention_varlen(*s, *starts, causal=causal) for s in sets]
    ours, left_out = [timing.captured("cuattn", calls)], {}
    others = list(
        peers.attention_forward_varlen(
            sets,
            lengths_q,
            lengths_k,
            causal=causal,
            fa3=flops > LEAST_FLOPS,
            left_out=left_out,
        )
    )
    rows = checks.rows_of_varlen(rng, *sets[-1], lengths_q, lengths_k, causal=causal)
    seconds = race(benchmark, ours, others, rows, left_out)
    shape = {"sequences": kept, "queries": total_q, "keys": total_k, "heads": [heads, heads_kv]}
    shape |= {"head_dim": dim, "causal": causal}
    report_forward(benchmark, ceilings, number, shape, flops, len(sets), seconds)


@pytest.mark.parametrize("number", range(COUNT))
def bench_random_decode(benchmark, ceilings, number):
    """One token a sequence: batch, lengths, heads and head_dim at random, contiguous or in
    pages."""
    rng = np.random.default_rng([SEED, 1, number])
    dim = int(rng.choice([64, 80, 96, 112, 128, 192, 256]))
    heads_kv, group = int(rng.choice([1, 2, 4, 8, 16])), int(rng.choice([1, 2, 4, 5, 8, 16, 48]))
    heads = group * heads_kv
    length = log_uniform(rng, 100, 500_000)
    row = 4 * heads_kv * dim  # bytes of a token's keys and values
    if length * row > MOST_BYTES:
        length = MOST_BYTES // row
    batch = log_uniform(rng, 1, max(1.5, min(512, MOST_BYTES / (length * row))))
    mixed = bool(rng.random() < 0.5)
    page_size = [None, 16, 64][rng.integers(3)]
    lens = rng.integers(1, length + 1, batch) if mixed else np.full(batch, length)
    nbytes = int(lens.sum()) * row
    shape = {"batch": batch, "length": length, "mixed": mixed, "heads": [heads, heads_kv]}
    shape |= {"head_dim": dim, "page_size": page_size}
    sets = [
        (draw(batch, 1, heads, dim), *(draw(batch, length, heads_kv, dim) for _ in "kv"))
        for _ in range(min(32, timing.sets_past_l2(batch * length * row)))
    ]
    seq_lens = cupy.asarray(lens, np.int32)
    if page_size is None:
        calls = [lambda s=s: cuattn.flash_decode(*s, seq_lens) for s in sets]
    else:
        width = -(-length // page_size)
        table = np.random.default_rng(0).permutation(batch * width).astype(np.int32)
        page_table = cupy.asarray(table.reshape(batch, width))
        slots = page_table * page_size  # of each page's first token
        slots = (slots[:, :, None] + cupy.arange(page_size)).reshape(batch, -1)[:, :length].ravel()
        calls = []
        for q, *caches in sets:
            pages = []
            for cache in caches:
                scattered = cupy.zeros((batch * width * page_size, heads_kv, dim), cache.dtype)
                scattered[slots] = cache.reshape(-1, heads_kv, dim)
                pages.append(scattered.reshape(-1, page_size, heads_kv, dim))
            calls.append(lambda q=q, p=pages: cuattn.paged_attention(q, *p, page_table, seq_lens))
    ours, left_out = [timing.captured("cuattn", calls)], {}
    others = [] if mixed else list(peers.decode(sets, left_out))
    benchmark.group = "random decoding shapes"
    rows = checks.rows_of_batch(rng, *sets[-1], causal=True, lengths=lens)
    seconds = race(benchmark, ours, others, rows, left_out)
    report_decode(benchmark, ceilings, number, shape, nbytes, len(sets), seconds)


@pytest.mark.parametrize("number", range(COUNT))
def bench_random_mla(benchmark, ceilings, number):
    """Latent attention to joined rows of 512 + 64 in pages of 64: batch, lengths, heads and new
    tokens at random."""
    rng = np.random.default_rng([SEED, 4, number])
    heads, tokens = int(rng.choice([8, 16, 32, 64, 128])), int(rng.choice([1, 1, 1, 2, 4]))
    length, width = log_uniform(rng, 100, 130_000), 512 + 64
    batch = log_uniform(rng, 1, max(1.5, min(256, MOST_BYTES / 4 / (length * width * 2))))
    mixed = bool(rng.random() < 0.5)
    lens = rng.integers(tokens, length + 1, batch) if mixed else np.full(batch, length)
    pages = -(-length // 64)
    tables = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
    table, seq_lens = cupy.asarray(tables.reshape(batch, pages)), cupy.asarray(lens, np.int32)
    sets = [
        (draw(batch, tokens, heads, width), draw(batch * pages, 64, width), table)
        for _ in range(min(32, timing.sets_past_l2(batch * length * width * 2)))
    ]
    # Not DeepSeek's scale, but that of the definition that results are checked by.
    scale = width**-0.5
    calls = [
        lambda q=q, rows=rows: cuattn.mla_decode(
            *(q[..., :512], q[..., 512:], rows[..., :512], rows[..., 512:]),
            *(table, seq_lens),
            scale=scale,
        )
        for q, rows, _ in sets
    ]
    ours, left_out = [timing.captured("cuattn", calls)], {}
    others = list(peers.mla_decode(sets, seq_lens, scale=scale, left_out=left_out))
    benchmark.group = "random latent shapes"
    q, rows, _ = sets[-1]
    keys = rows[table].reshape(batch, pages * 64, 1, width)
    checked = checks.rows_of_batch(rng, q, keys, keys[..., :512], causal=True, lengths=lens)
    seconds = race(benchmark, ours, others, checked, left_out)
    shape = {"batch": batch, "length": length, "mixed": mixed, "heads": heads, "tokens": tokens}
    nbytes = int(lens.sum()) * width * 2
    report_decode(benchmark, ceilings, number, shape, nbytes, len(sets), seconds)


def report_decode(
    benchmark: Any,
    ceilings: dict[str, float],
    number: int,
    shape: dict[str, Any],
    nbytes: int,
    calls: int,
    seconds: dict[str, float],
) -> None:
    """Record and print the times of a decoding call, of which a launch has several."""
    best = min((s for name, s in seconds.items() if name != "cuattn"), default=None)
    of_copy = nbytes * calls / seconds["cuattn"] / ceilings["copy"]
    benchmark.extra_info |= {
        "shape": shape,
        "microseconds": {name: s / calls * 1e6 for name, s in seconds.items()},
        "of_best": best and best / seconds["cuattn"],
        "of_copy": of_copy,
        "megabytes": nbytes / 2**20,
    }
    shown = ", ".join(f"{n} {v:.1f}" for n, v in benchmark.extra_info["microseconds"].items())
    relative = "" if best is None else f"{best / seconds['cuattn']:.3f} "
    print(f"\nseed {SEED}, {number}: {relative}{of_copy:.0%} of copy {shape}: {shown} us")
