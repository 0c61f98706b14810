"""Latent attention (MLA) of one token, or some, a sequence over long caches, by CUDA-graph replay.

``pytest benchmarks/bench_mla.py --benchmark-json=benchmarks/results/NAME.json``; a minute.

Widths are DeepSeek-V3's: latents of 512 and 64 that are rotated, joined rows in pages of 64. Bytes
count the cache once, operations are those of the absorbed form: 2 · (576 + 512) for each head,
query and key. FlashMLA takes part over pages of 64 where it can be imported. FlashInfer 0.7.2 was
measured at 29.3 µs for 16 heads at 1×16384 on such a GPU, in another run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn

cupy = pytest.importorskip("cupy")

from benchmarks import checks, peers, timing  # noqa: E402
from benchmarks.bench_decoding import draw, show_left_out  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LATENT, ROPE = 512, 64
SCALE = 192**-0.5
#: Heads, batch, tokens in the cache, and new tokens of a sequence.
SHAPES = [
    (128, 64, 16384, 1),
    (128, 128, 16384, 1),
    (128, 1, 16384, 1),
    (16, 64, 16384, 1),
    (16, 128, 16384, 1),
    (16, 1, 16384, 1),
    (16, 1, 4096, 1),
    (16, 64, 16384, 4),
    (16, 64, 16384, 5),
]


def queries(*shape: int) -> tuple[Any, Any]:
    return draw(*shape, LATENT), draw(*shape, ROPE)


def report(
    benchmark: Any,
    run: timing.Contestant,
    ceilings: dict[str, float],
    *,
    calls: int,
    nbytes: int,
    flops: int,
    others: Iterable[timing.Contestant] = (),
) -> None:
    """Race, and write down microseconds a call, and what part of both ceilings that is."""
    benchmark.group = "mla"
    seconds = timing.race(benchmark, [run, *others], rounds=7, turn=10e-3)
    each = {name: s / calls for name, s in seconds.items()}
    benchmark.extra_info |= {
        "microseconds": {name: s * 1e6 for name, s in each.items()},
        "of_copy": {name: nbytes / s / ceilings["copy"] for name, s in each.items()},
        "tflops": {name: flops / s * 1e-12 for name, s in each.items()},
        "of_matmul": {name: flops / s / ceilings["bfloat16"] for name, s in each.items()},
        "copy_tb_per_s": ceilings["copy"] * 1e-12,
        "matmul_tflops": ceilings["bfloat16"] * 1e-12,
    }
    shown = ", ".join(
        f"{name} {s * 1e6:.1f} us, {nbytes / s / ceilings['copy']:.0%} of copy, "
        f"{flops / s * 1e-12:.0f} TFLOP/s"
        for name, s in each.items()
    )
    print(f"\n{benchmark.name}: {shown}")


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]} heads {s[1]}x{s[2]} by {s[3]}")
def bench_mla_decode(benchmark, ceilings, shape, page_size):
    """Uniform lengths, pages in random order."""
    heads, batch, length, tokens = shape
    nbytes = batch * length * (LATENT + ROPE) * 2
    count = timing.sets_past_l2(nbytes)
    pages = draw(count * batch * length // page_size, page_size, LATENT + ROPE)
    order = cupy.random.permutation(len(pages)).astype(np.int32).reshape(count, batch, -1)
    lens = cupy.full(batch, length, np.int32)
    both = pages[..., :LATENT], pages[..., LATENT:]
    calls, sets = [], []
    for table in order:
        whole = draw(batch, tokens, heads, LATENT + ROPE)
        q = whole[..., :LATENT], whole[..., LATENT:]
        out = cupy.empty(q[0].shape, q[0].dtype)
        sets.append((whole, pages, table))
        calls.append(
            lambda q=q, table=table, out=out: cuattn.mla_decode(
                *q, *both, table, lens, scale=SCALE, out=out
            )
        )
    run = timing.captured("cuattn", calls)
    left_out: dict[str, str] = {}
    others = []
    if page_size == 64:
        others = list(peers.mla_decode(sets, lens, scale=SCALE, left_out=left_out))
    flops = 2 * batch * length * tokens * heads * (2 * LATENT + ROPE)
    report(benchmark, run, ceilings, calls=count, nbytes=nbytes, flops=flops, others=others)
    show_left_out(benchmark, left_out)


@pytest.mark.parametrize("layout", ["joined", "flashmla"])
@pytest.mark.parametrize("heads", [16, 128])
def bench_mla_codes(benchmark, ceilings, heads, layout):
    """Latents of float8_e4m3: rows of 640 bytes and a scale of 2 for each token, or FlashMLA's 656
    bytes. 64 sequences of 16384 tokens; bytes are the cache's own."""
    batch, length, row = 64, 16384, 640 if layout == "joined" else 656
    count = batch * length // 64
    rows = cupy.random.randint(0, 0x70, (count, 64, 1, row), dtype=np.uint8)
    rows[..., -2 * ROPE :] = draw(count, 64, 1, ROPE).view(np.uint8)
    if layout == "joined":
        scale = cupy.full((count, 64, 1, 1), 0.01, np.float32).astype(BFLOAT16)
        codes = cuattn.QuantizedArray(rows[..., :LATENT], scale, dtype="float8_e4m3")
        both = codes, rows[..., LATENT:].view(BFLOAT16)
    else:
        rows[..., LATENT : -2 * ROPE] = cupy.full((count, 64, 1, 4), 0.01, np.float32).view(
            np.uint8
        )
        both = cuattn.flashmla_pages(rows)
    table = cupy.random.permutation(count).astype(np.int32).reshape(batch, -1)
    lens = cupy.full(batch, length, np.int32)
    q = queries(batch, 1, heads)
    out = cupy.empty_like(q[0])
    run = timing.captured(
        "cuattn", [lambda: cuattn.mla_decode(*q, *both, table, lens, scale=SCALE, out=out)]
    )
    nbytes = batch * length * (row + (2 if layout == "joined" else 0))
    flops = 2 * batch * length * heads * (2 * LATENT + ROPE)
    report(benchmark, run, ceilings, calls=1, nbytes=nbytes, flops=flops)


@pytest.mark.parametrize("heads", [16, 128])
def bench_mla_sparse(benchmark, ceilings, heads):
    """2048 chosen tokens of 65536 for each of 64 sequences; bytes and operations are theirs."""
    batch, length, chosen = 64, 65536, 2048
    pages = draw(batch * length // 64 // 8, 64, LATENT + ROPE)  # sequences share pages
    table = cupy.random.randint(0, len(pages), (batch, length // 64), dtype=np.int32)
    indices = cupy.argsort(cupy.random.random((batch, length), dtype=np.float32), axis=1)
    indices = cupy.ascontiguousarray(indices[:, :chosen]).astype(np.int32)
    lens = cupy.full(batch, length, np.int32)
    q = queries(batch, heads)
    out = cupy.empty_like(q[0])
    both = pages[..., :LATENT], pages[..., LATENT:]
    run = timing.captured(
        "cuattn",
        [lambda: cuattn.mla_decode(*q, *both, table, lens, scale=SCALE, indices=indices, out=out)],
    )
    nbytes = batch * chosen * (LATENT + ROPE) * 2
    flops = 2 * batch * chosen * heads * (2 * LATENT + ROPE)
    report(benchmark, run, ceilings, calls=1, nbytes=nbytes, flops=flops)


def bench_mla_prefill(benchmark, ceilings):
    """A prompt of 8192 tokens of 16 heads, causal, expanded to heads of 192 and 128."""
    heads, tokens = 16, 8192
    pages = draw(tokens // 64, 64, LATENT + ROPE)
    table = cupy.arange(len(pages), dtype=np.int32)[None]
    arrays = (
        draw(1, tokens, heads, 128),
        draw(1, tokens, heads, ROPE),
        pages[..., :LATENT],
        pages[..., LATENT:],
        table,
        cupy.full(1, tokens, np.int32),
        draw(heads, 128, LATENT),
        draw(heads, 128, LATENT),
    )
    run = timing.Contestant(
        "cuattn",
        lambda n: [cuattn.mla_prefill(*arrays, scale=SCALE, max_prefix=0) for _ in range(n)][-1],
    )
    flops = heads * tokens * tokens * (192 + 128)
    report(benchmark, run, ceilings, calls=1, nbytes=pages.nbytes, flops=flops)


def bench_prefill_attention(benchmark, ceilings):
    """The attention of such a prompt alone, heads of 192 and 128. FlashAttention-3 has one head_dim
    and takes values that are padded to 192; its rate counts what is asked for."""
    heads, tokens = 16, 8192
    sets = [
        (*(draw(1, tokens, heads, 192) for _ in "qk"), draw(1, tokens, heads, 128))
        for _ in range(2)
    ]
    padded = [(q, k, cupy.pad(v, [(0, 0)] * 3 + [(0, 64)])) for q, k, v in sets]
    run = timing.captured(
        "cuattn", [lambda s=s: cuattn.flash_attention(*s, causal=True) for s in sets]
    )
    out, left_out = run.run(1), {}
    rows = checks.rows_of_batch(np.random.default_rng(0), *sets[-1], causal=True)
    assert checks.largest_difference(out, rows) < checks.TOLERANCE
    as_they_are = peers.attention_forward_graphs(sets, causal=True, fa3=False, left_out=left_out)
    as_padded = peers.attention_forward_graphs(padded, causal=True, fa3=True, left_out={})
    others = [*as_they_are, *(peer for peer in as_padded if peer.name == "FA-3")]

    def unpadded(theirs: Any) -> Any:
        return peers.to_cupy(theirs)[..., : out.shape[-1]]

    agreeing = checks.agreeing(out.astype(np.float32), others, unpadded, left_out)
    nbytes = sum(array.nbytes for array in (*sets[0], out))
    flops = heads * tokens * tokens * (192 + 128)
    report(benchmark, run, ceilings, calls=len(sets), nbytes=nbytes, flops=flops, others=agreeing)
    show_left_out(benchmark, left_out)
