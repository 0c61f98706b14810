"""How random derivatives, layers, merges and rotary embeddings are drawn and judged."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import formulas
from tests.gpu import random_calls as calls
from tests.gpu.random_arrays import draw_arrays, given_ints, heads_of, poisoned_keys
from tests.gpu.random_calls import (
    OPTIONS,
    Drawn,
    Generator,
    draw_kind,
    draw_options,
    draw_out,
    given,
    given_options,
    numbers,
)
from tests.gpu.random_gradients import tame
from tests.gpu.random_latents import by_numpy

cupy = pytest.importorskip("cupy")


def flash_attention_jvp(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    names = tuple(name for name in OPTIONS if name != "dropout")
    kind, q, k, v, options = draw_arrays(kind_rng, rng, most // 2, names, largest=256)
    tame(options)
    arrays = [q, k, v, *(numbers(rng, a.shape, kind.dtype) for a in (q, k, v))]
    # Of float64 nothing more exact is at hand: by how much NumPy is wrong is not known.
    units = 64 if kind.dtype == np.float64 else 16
    judge = by_numpy(cuattn.flash_attention_jvp, arrays, options, units)
    q, dq, *keys = (arrays[i] for i in (0, 3, 1, 2, 4, 5))
    k, v, dk, dv = poisoned_keys(rng, options, *keys)
    arrays = [given(rng, a) for a in (q, k, v, dq, dk, dv)]
    return Drawn(cuattn.flash_attention_jvp, arrays, given_options(rng, options), judge)


def multi_head_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    names = ("causal", "window", "mask", "key_mask", "sinks", "alibi_slopes")
    kind = draw_kind(kind_rng, names)
    dim = int(kind_rng.choice([16, 32, 64, 128]))
    heads, heads_kv = heads_of(rng, min(kind.group, 4))
    batch, seqlen, features = int(rng.integers(1, 3)), int(rng.integers(1, 90)), 64
    crossed = bool(kind_rng.random() < 0.4)
    seqlen_k = int(rng.integers(1, 90)) if crossed else seqlen
    x = numbers(rng, (batch, seqlen, features), kind.dtype)
    widths = [heads * dim, heads_kv * dim, heads_kv * dim]
    weights = [numbers(rng, (features, n), kind.dtype, features**-0.5) for n in widths]
    weights.append(numbers(rng, (heads * dim, features), kind.dtype, (heads * dim) ** -0.5))
    options = draw_options(rng, kind, batch, heads, seqlen, seqlen_k)
    options |= {"heads": heads, "kv_heads": heads_kv}
    if crossed:
        options["context"] = numbers(rng, (batch, seqlen_k, features), kind.dtype)
    for name, width in zip(("bq", "bk", "bv", "bo"), (*widths, features), strict=True):
        if kind_rng.random() < 0.3:
            options[name] = numbers(rng, (width,), kind.dtype)
    wide = {
        name: value.astype(np.float64)
        if isinstance(value, np.ndarray) and value.dtype == kind.dtype
        else value
        for name, value in options.items()
    }
    arrays = [x, *weights]
    exact = cuattn.multi_head_attention(*(a.astype(np.float64) for a in arrays), **wide)
    usual = cuattn.multi_head_attention(*arrays, **options)

    def judge(results: list[np.ndarray]) -> None:
        slack = 16 * float(ml_dtypes.finfo(kind.dtype).eps) * (1e-3 + calls.largest(exact))
        formulas.assert_accurate(results[0], exact, usual, slack=slack)

    given_arrays = [given(rng, a) for a in arrays]
    on_device = given_options(rng, options)
    return Drawn(cuattn.multi_head_attention, given_arrays, on_device, judge, captured=False)


def merge_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))]
    acc = np.float64 if dtype == np.float64 else np.float32
    parts, batch, seqlen, heads = (int(rng.integers(1, n)) for n in (9, 4, 40, 5))
    dim = int(kind_rng.choice([1, 3, 8, 40, 64, 128, 300]))
    outs = numbers(rng, (parts, batch, seqlen, heads, dim), dtype)
    lses = numbers(rng, (parts, batch, heads, seqlen), acc, float(rng.choice([1.0, 30.0, 1e4])))
    gone = rng.random(lses.shape) < rng.choice([0.0, 0.3, 0.9])
    lses[gone] = -np.inf
    results = []
    for wide in (np.longdouble, acc):
        each = lses.swapaxes(2, 3).astype(wide)
        top = np.where(np.isneginf(each.max(axis=0)), 0, each.max(axis=0))
        with np.errstate(divide="ignore"):
            merged = np.log(np.exp(each - top).sum(axis=0)) + top
        weights = np.exp(each - np.where(np.isneginf(merged), 0, merged))
        results.append(((weights[..., None] * outs.astype(wide)).sum(axis=0), merged))
    (exact, exact_lse), (plain, plain_lse) = results
    outs[gone.swapaxes(2, 3)] = np.nan

    def judge(results: list[np.ndarray]) -> None:
        out, lse = results
        unit = 4 * float(np.finfo(acc).eps) * (1 + calls.largest(lses))
        slack = unit * calls.largest(outs) + float(ml_dtypes.finfo(dtype).eps) * calls.largest(
            exact
        )
        formulas.assert_accurate(out, exact, plain.astype(dtype), slack=slack)
        formulas.assert_accurate(
            lse, exact_lse.swapaxes(1, 2), plain_lse.swapaxes(1, 2), slack=unit
        )

    if rng.random() < 0.5:
        arrays = [[given(rng, a) for a in outs], [given(rng, a) for a in lses]]
    else:
        arrays = [given(rng, outs), given(rng, lses)]
    return Drawn(cuattn.merge_attention, arrays, {}, judge)


def rope(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))]
    dim = 2 * int(kind_rng.choice([1, 2, 5, 16, 32, 40, 64, 128]))
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 90)), int(rng.integers(1, 9)), dim)
    x = numbers(rng, shape, dtype)
    positions = rng.integers(0, 5000, [(shape[1],), (1, shape[1]), shape[:2]][rng.integers(3)])
    options: dict[str, Any] = {"base": float(rng.choice([10000.0, 500000.0, 3.0]))}
    if kind_rng.random() < 0.5:
        options["rotary_dim"] = 2 * int(rng.integers(1, dim // 2 + 1))
    options["interleaved"] = bool(kind_rng.random() < 0.5)
    wide = cuattn.rope(x.astype(np.float64), positions, **options)
    usual = cuattn.rope(x, positions, **options)

    def judge(results: list[np.ndarray]) -> None:
        unit = 2.0**-22 if dtype != np.float64 else 2.0**-50
        slack = calls.largest(x) * (unit + float(ml_dtypes.finfo(dtype).eps))
        formulas.assert_accurate(results[0], wide, usual, slack=slack)

    out, border = draw_out(rng, shape, dtype)
    arrays = [given(rng, x), given_ints(rng, positions.astype(np.int32))]
    return Drawn(cuattn.rope, arrays, {**options, **out}, judge, border=border)
