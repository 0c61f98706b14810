"""Forward attention with every option, beside the plain call of the same length.

``pytest benchmarks/bench_options.py --benchmark-json=benchmarks/results/NAME.json``

A call that sees fewer keys, or whose sequences end within a tile, is judged by the products that it
computes, as ``dispatch.products_of_tiles`` counts them: 64 queries times whole blocks of keys,
without the blocks that a consumer skips. Each option takes turns with the plain call alone, since a
kernel at full power leaves a lower clock to the one that follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from benchmarks import timing
from cuattn._spec import attention_spec

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

TOKENS, FEATURES = 16384, 2048
DTYPE = np.dtype(ml_dtypes.bfloat16)
WINDOW = (1023, 0)
GROUP = 8  # query heads of a key head
SHORTEST, LONGEST = 128, 8192  # of varlen


def normal(*shape: int, dtype: np.dtype = DTYPE) -> Any:
    """Random numbers; a slice of the first axis at a time, as float32 takes twice the room."""
    array = cupy.empty(shape, dtype)
    for part in array:
        part[...] = cupy.random.standard_normal(shape[1:], dtype=np.float32)
    return array


def mixed_lengths(rng: np.random.Generator) -> list[int]:
    """Lengths from SHORTEST to LONGEST, evenly spread over their logarithms; 2 * TOKENS in all."""
    lengths: list[int] = []
    while sum(lengths) + LONGEST < 2 * TOKENS:
        lengths.append(int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST)))))
    return [*lengths, 2 * TOKENS - sum(lengths)]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call to be timed, and the floating-point operations of the tiles that it computes."""

    name: str
    run: Callable[[], Any]
    flops: float


def fixed(name: str, q: Any, k: Any, v: Any, **options: Any) -> Call:
    """A call of :func:`cuattn.flash_attention`."""
    spec = attention_spec(
        "flash_attention",
        *(array.shape for array in (q, k, v)),
        *[q.dtype] * 3,
        **{key: options[key] for key in options.keys() & {"causal", "window", "softcap"}},
    )
    arrays = {key: options[key] for key in options.keys() & {"bias", "mask", "alibi_slopes"}}
    flops = q.shape[0] * computed(spec, arrays)
    return Call(name, lambda: cuattn.flash_attention(q, k, v, **options), flops)


def varlen(name: str, lengths: list[int], heads: int, head_dim: int, **options: Any) -> Call:
    """A call of :func:`cuattn.flash_attention_varlen`."""
    total = sum(lengths)
    q, k, v = (normal(total, heads, head_dim) for _ in "qkv")
    ends = cupy.asarray(np.cumsum([0, *lengths]), dtype=np.int32)
    spec = attention_spec(
        "flash_attention_varlen", *[q.shape] * 3, *[DTYPE] * 3, sequences=len(lengths), **options
    )
    flops = sum(computed(spec, {}, seqlen) for seqlen in lengths)
    run = lambda: cuattn.flash_attention_varlen(q, k, v, ends, **options)  # noqa: E731
    return Call(name, run, flops)


def computed(spec: Any, arrays: dict[str, Any], seqlen: int | None = None) -> float:
    """Floating-point operations of one sequence, of `seqlen` where the call is varlen; `arrays` are
    those that change its scores."""
    from cuattn.gpu import compiler, dispatch

    layouts = {
        name: dispatch.Layout(array.shape, array.strides, array.dtype)
        for name, array in arrays.items()
    }
    arch = compiler.device_arch(cupy.cuda.Device().id)
    launch = dispatch.choose(dispatch.Call.contiguous(spec, arch, **layouts))
    config = launch.variant.config
    if seqlen is not None:
        spec = dataclasses.replace(spec, seqlen_q=seqlen, seqlen_k=seqlen)
    scores = dispatch.products_of_tiles(spec, config).sum() * 64 * config.tile_n
    return 2.0 * spec.heads_q * scores * (spec.head_dim + spec.head_dim_v)


def plain_and(option: str, seqlen: int, head_dim: int) -> tuple[Call, Call]:
    """The plain call, and the one with an option."""
    batch, heads = TOKENS // seqlen, FEATURES // head_dim
    q, k, v = (normal(batch, seqlen, heads, head_dim) for _ in "qkv")
    plain = fixed("plain", q, k, v)
    if option == "GQA":
        return plain, fixed(
            option, q, *(normal(batch, seqlen, heads // GROUP, head_dim) for _ in "kv")
        )
    if option.startswith("varlen"):
        lengths = mixed_lengths(np.random.default_rng(0))
        return plain, varlen(option, lengths, heads, head_dim, causal="causal" in option)
    return plain, fixed(option, q, k, v, **OPTIONS[option](batch, heads, seqlen))


#: Arguments of flash_attention by (batch, heads, seqlen).
OPTIONS: dict[str, Callable[[int, int, int], dict]] = {
    "causal": lambda *_: {"causal": True},
    "window": lambda *_: {"window": WINDOW},
    "softcap": lambda *_: {"softcap": 30.0},
    "ALiBi": lambda _, heads, __: {
        "alibi_slopes": cupy.exp2(-8.0 * cupy.arange(1, heads + 1, dtype=np.float32) / heads)
    },
    "mask": lambda batch, _, n: {
        "mask": cupy.random.random((batch, 1, n, n), dtype=np.float32) < 0.9
    },
    "bias": lambda _, heads, n: {"bias": normal(heads, n, n)},
    "bias float32": lambda _, __, n: {"bias": normal(1, n, n, dtype=np.float32)},
}


@pytest.mark.parametrize("option", [*OPTIONS, "GQA", "varlen", "varlen causal"])
@pytest.mark.parametrize("seqlen", [8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128])
def bench_options(benchmark, head_dim, seqlen, option):
    both = plain_and(option, seqlen, head_dim)
    benchmark.group = "attention options"
    contestants = [timing.Contestant(c.name, timing.rotate(c.run, [()])) for c in both]
    seconds = timing.race(benchmark, contestants)
    tflops = {call.name: call.flops / seconds[call.name] * 1e-12 for call in both}
    relative = tflops[option] / tflops["plain"]
    benchmark.extra_info |= {
        "milliseconds": {name: s * 1e3 for name, s in seconds.items()},
        "tflops_of_tiles": tflops,
        "of_plain": relative,
    }
    print(f"\n{benchmark.param}: {tflops[option]:.0f}, {relative:.2f} of the plain call's TFLOP/s")
