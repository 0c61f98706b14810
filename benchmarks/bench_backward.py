"""Gradients of attention: 16384 tokens and 2048 features, cut into heads and sequences in every
common way; and with options, beside the plain call.

``pytest benchmarks/bench_backward.py --benchmark-json=benchmarks/results/NAME.json``

A call that sees fewer keys, or whose sequences end within a tile, is judged by the products that it
computes: whole tiles of the 64 queries and 128 keys at which `backward_sm90` looks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from benchmarks import peers, timing

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

TOKENS, FEATURES = 16384, 2048
WINDOW = (1023, 0)
GROUP = 8  # query heads of a key head
SHORTEST, LONGEST = 128, 8192  # of varlen
TILE_M, TILE_N = 64, 128

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize("seqlen", [512, 2048, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bfloat16"])
def bench_backward(benchmark, ceilings, dtype, causal, head_dim, seqlen):
    batch, heads = TOKENS // seqlen, FEATURES // head_dim
    shape = (batch, seqlen, heads, head_dim)
    nbytes = 8 * 2 * TOKENS * FEATURES  # q, k, v, out and dout are read, three written
    sets = [
        tuple(
            cupy.random.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])
            for _ in range(4)
        )
        for _ in range(timing.sets_past_l2(nbytes))
    ]
    after_forward = []
    for q, k, v, dout in sets:
        out, lse = cuattn.flash_attention(q, k, v, causal=causal, return_lse=True)
        after_forward.append((dout, q, k, v, out, lse))
    run = timing.rotate(
        lambda *given: cuattn.flash_attention_backward(*given, causal=causal)[:3], after_forward
    )
    contestants = [
        timing.Contestant("cuattn", run),
        *peers.attention_backward(sets, causal=causal),
    ]

    ours = run(1)
    for peer in contestants[1:]:  # a figure next to a wrong result would be worth nothing
        for name, mine, other in zip(("dq", "dk", "dv"), ours, peer.run(1), strict=True):
            theirs, exact = peers.to_cupy(other), mine.astype(np.float32)
            difference = float(cupy.linalg.norm(exact - theirs) / cupy.linalg.norm(theirs))
            assert difference < 3e-2, f"{name} of cuattn and {peer.name}: {difference:.1e}"

    benchmark.group = "attention backward"
    seconds = timing.race(benchmark, contestants)
    flops = 10 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    benchmark.extra_info |= {
        "tflops": {name: flops / s * 1e-12 for name, s in seconds.items()},
        "matmul_tflops": ceilings[dtype] * 1e-12,
        "copy_tb_per_s": ceilings["copy"] * 1e-12,
    }
    shown = ", ".join(f"{n} {v:.0f}" for n, v in benchmark.extra_info["tflops"].items())
    print(f"\n{dtype} {benchmark.param}: {shown} TFLOP/s")


@dataclasses.dataclass(frozen=True)
class Call:
    """Gradients to be timed: of which arrays, with which options, in which sequences."""

    heads_kv: int
    seqlen: int
    head_dims: tuple[int, int] = (128, 128)
    lengths: tuple[int, ...] = ()  # of varlen
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of both passes
    deterministic: bool = False

    def arrays(self) -> Iterator[Any]:
        """Random q, k, v and dout."""
        dim, dim_v = self.head_dims
        heads = FEATURES // dim_v
        outer = (TOKENS,) if self.lengths else (TOKENS // self.seqlen, self.seqlen)
        for tail in ((heads, dim), (self.heads_kv, dim), (self.heads_kv, dim_v), (heads, dim_v)):
            array = cupy.random.standard_normal((*outer, *tail), dtype=np.float32)
            yield array.astype(DTYPES["bfloat16"])

    def backward(self, q: Any, k: Any, v: Any, dout: Any) -> Callable[[], Any]:
        """A call that computes (dq, dk, dv), once the forward pass is done."""
        gradients: Callable[..., Any] = cuattn.flash_attention_backward
        forward: Callable[..., Any] = cuattn.flash_attention
        starts: tuple = ()
        if self.lengths:
            starts = (cupy.asarray(np.cumsum([0, *self.lengths]), dtype=np.int32),)
            gradients = cuattn.flash_attention_varlen_backward
            forward = cuattn.flash_attention_varlen
        out, lse = forward(q, k, v, *starts, **self.options, return_lse=True)
        more = {**self.options, "deterministic": self.deterministic}
        return lambda: gradients(dout, q, k, v, out, lse, *starts, **more)[:3]

    def peers(self, sets: list[tuple]) -> Iterator[timing.Contestant]:
        """Every other implementation of the call."""
        causal = self.options.get("causal", False)
        if self.lengths:
            yield from peers.attention_backward_varlen(sets, list(self.lengths), causal=causal)
        elif not self.deterministic:
            window = self.options.get("window")
            yield from peers.attention_backward(sets, causal=causal, window=window)

    def flops(self) -> float:
        """Floating-point operations of five products in the tiles that see a key."""
        left, right = self.options.get("window", (None, None))
        right = 0 if self.options.get("causal") else right
        tiles = 0
        for seqlen in self.lengths or (self.seqlen,) * (TOKENS // self.seqlen):
            first = np.arange(0, seqlen, TILE_N)
            last = np.minimum(first + TILE_N, seqlen) - 1
            begin = np.zeros_like(first) if right is None else np.maximum(first - right, 0)
            end = np.full_like(last, seqlen)
            if left is not None:
                end = np.minimum(last + left + 1, seqlen)
            tiles += int(np.sum(-(-end // TILE_M) - begin // TILE_M))
        dim, dim_v = self.head_dims
        heads = FEATURES // dim_v
        return 2.0 * heads * tiles * TILE_M * TILE_N * (3 * dim + 2 * dim_v)


def mixed_lengths(rng: np.random.Generator) -> tuple[int, ...]:
    """Lengths from SHORTEST to LONGEST, evenly spread over their logarithms; TOKENS in all."""
    lengths: list[int] = []
    while sum(lengths) + LONGEST < TOKENS:
        lengths.append(int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST)))))
    return (*lengths, TOKENS - sum(lengths))


def with_option(option: str, head_dim: int, causal: bool) -> tuple[Call, Call]:
    """The plain call, and the one with an option."""
    heads = FEATURES // head_dim
    dims = head_dim, head_dim
    plain = Call(heads, 8192, dims, options={"causal": causal})
    if option == "GQA":
        return plain, dataclasses.replace(plain, heads_kv=heads // GROUP)
    if option == "varlen":
        lengths = mixed_lengths(np.random.default_rng(0))
        return plain, dataclasses.replace(plain, lengths=lengths)
    if option == "deterministic":
        return plain, dataclasses.replace(plain, deterministic=True)
    if option == "192/128":
        return plain, dataclasses.replace(plain, head_dims=(192, 128))
    plain = dataclasses.replace(plain, seqlen=16384)
    return plain, dataclasses.replace(plain, options={"window": WINDOW})


@pytest.mark.parametrize(
    ("option", "head_dim", "causal"),
    [
        *((o, d, c) for o in ("GQA", "varlen") for d in (64, 128) for c in (False, True)),
        *(("deterministic", d, c) for d in (64, 128, 256) for c in (False, True)),
        *(("192/128", 128, c) for c in (False, True)),
        *(("window", d, False) for d in (64, 128)),
    ],
)
def bench_backward_options(benchmark, ceilings, option, head_dim, causal):
    plain, call = with_option(option, head_dim, causal)
    plain_sets, sets = ([tuple(c.arrays()) for _ in range(2)] for c in (plain, call))
    contestants = []
    for name, c, given in (("plain", plain, plain_sets), ("cuattn", call, sets)):
        calls = [c.backward(*arrays) for arrays in given]
        run = timing.rotate(lambda each: each(), [(each,) for each in calls])
        contestants.append(timing.Contestant(name, run))
    theirs = list(call.peers(sets))
    ours = contestants[1].run(1)
    for peer in theirs:
        for name, mine, other in zip(("dq", "dk", "dv"), ours, peer.run(1), strict=True):
            expected = peers.to_cupy(other)
            difference = cupy.linalg.norm(mine.astype(np.float32) - expected)
            relative = float(difference / cupy.linalg.norm(expected))
            assert relative < 3e-2, f"{name} of cuattn and {peer.name}: {relative:.1e}"

    benchmark.group = "attention backward options"
    seconds = timing.race(benchmark, [*contestants[::-1], *theirs])
    tflops = {
        name: (plain if name == "plain" else call).flops() / s * 1e-12
        for name, s in seconds.items()
    }
    benchmark.extra_info |= {
        "milliseconds": {name: s * 1e3 for name, s in seconds.items()},
        "tflops_of_tiles": tflops,
        "of_plain": tflops["cuattn"] / tflops["plain"],
        "matmul_tflops": ceilings["bfloat16"] * 1e-12,
    }
    shown = ", ".join(f"{n} {v:.0f}" for n, v in tflops.items())
    print(f"\n{benchmark.param}: {shown} TFLOP/s, {benchmark.extra_info['of_plain']:.2f} of plain")
