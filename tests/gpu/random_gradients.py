"""How random calls of gradients are drawn and judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuattn
from tests.gpu.calls import Call
from tests.gpu.gradient_calls import judge as judge_gradients
from tests.gpu.gradient_calls import judge_varlen
from tests.gpu.random_arrays import (
    draw_arrays,
    given_ints,
    of_formula,
    poisoned_keys,
    ragged,
    sequences_of,
    slices,
)
from tests.gpu.random_caches import same_values
from tests.gpu.random_calls import (
    OPTIONS,
    Drawn,
    Generator,
    given,
    given_options,
    numbers,
    results_of,
)

cupy = pytest.importorskip("cupy")


def flash_attention_backward(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind, q, k, v, options = draw_arrays(kind_rng, rng, most // 2, largest=256)
    tame(options)
    meaning = of_formula(options, q, k, v)
    if "key_mask" in meaning:
        own = meaning.pop("key_mask")[:, None, None]
        meaning["mask"] = meaning.get("mask", True) & own
    on_device = given_options(rng, options)
    arrays = [given(rng, a) for a in (q, *poisoned_keys(rng, options, k, v))]
    out, lse = cuattn.flash_attention(*arrays, **on_device, return_lse=True)
    dout = numbers(rng, out.shape, kind.dtype)
    acc = np.float64 if kind.dtype == np.float64 else np.float32
    dlse = numbers(rng, lse.shape, acc) if rng.random() < 0.3 else None
    host_out, host_lse = out.get(), lse.get()
    call = Call(q, k, v, options, rng)

    def judge(results: list[Any]) -> None:
        grads = cuattn.AttentionGrads(*(None if x is None else OnHost(x) for x in results))
        judge_gradients(grads, host_out, dout, call, lse=host_lse, dlse=dlse, **meaning)

    deterministic = bool(kind_rng.random() < 0.4)
    if dlse is not None:
        on_device["dlse"] = given(rng, dlse)
    on_device |= {
        "deterministic": deterministic,
        "grad_bias": "bias" in options,
        "grad_alibi": "alibi_slopes" in options,
    }
    arrays = [given(rng, dout), *arrays, given(rng, host_out), given(rng, host_lse)]
    drawn = Drawn(cuattn.flash_attention_backward, arrays, on_device, judge, deterministic)
    # What sums over the batch, or belongs to a place in it, is left out.
    of_batch = {"bias", "mask", "key_mask", "alibi_slopes", "sinks", "dropout"}
    if deterministic and not of_batch & set(options):
        drawn.also = lambda results: check_batch_of_gradients(drawn, rng)
    return drawn


def check_batch_of_gradients(drawn: Drawn, rng: Generator) -> None:
    """Some of the sequences, in any order and often: deterministic calls give each the same bits.
    Arrays are contiguous in both calls."""
    options = dict(drawn.options)
    count = len(drawn.arrays[0])
    order = rng.integers(0, count, int(rng.integers(1, 3 * count + 1)))
    parts = []
    for which in map(cupy.asarray, (np.arange(count), order)):
        if "dlse" in options:
            options["dlse"] = drawn.options["dlse"][which]
        grads = drawn.function(*(a[which] for a in drawn.arrays), **options)
        parts.append(results_of(grads)[:3])
    whole, some = parts
    for name, a, b in zip(("dq", "dk", "dv"), whole, some, strict=True):
        assert same_values(a[order], b), f"{name} of sequences {order.tolist()}: other bits"


def tame(options: dict[str, Any]) -> None:
    """Of gradients luck decides where a softmax has a single key."""
    if abs(options.get("scale", 0.0)) > 1:
        options["scale"] = 0.3
    if "bias" in options:
        options["bias"][np.isneginf(options["bias"])] = -2


class OnHost:
    """An array on the host, for functions that fetch it from a device."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def get(self) -> np.ndarray:
        return self.array


def flash_attention_varlen_backward(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind, q, k, v, ends, same, options = ragged(kind_rng, rng, most // 2, OPTIONS, largest=256)
    tame(options)
    sequences = sequences_of(q, k, v, ends, options)
    dout = numbers(rng, (*q.shape[:-1], v.shape[-1]), kind.dtype)
    for array, end in ((q, ends[0]), (k, ends[1]), (v, ends[1]), (dout, ends[0])):
        array[end[-1] :] = np.nan
    arrays = [given(rng, a) for a in (q, k, v)]
    cu = [given_ints(rng, e) for e in (ends[:1] if same and rng.random() < 0.7 else ends)]
    on_device = given_options(rng, options)
    out, lse = cuattn.flash_attention_varlen(*arrays, *cu, **on_device, return_lse=True)
    acc = np.float64 if kind.dtype == np.float64 else np.float32
    dlse = numbers(rng, lse.shape, acc) if rng.random() < 0.3 else None
    host_out, host_lse = out.get(), lse.get()
    own_slopes = np.ndim(options.get("alibi_slopes")) == 2
    of_sequences = []
    for s, rows, keys in zip(sequences, *map(slices, ends), strict=True):
        own = dict(s.options)
        if own_slopes:
            own["alibi_slopes"] = own["alibi_slopes"][0]
        of_sequences.append((rows, keys, s.q, s.k, s.v, own))

    def judge(results: list[Any]) -> None:
        for array, end in zip(results[:3], (ends[0], ends[1], ends[1]), strict=True):
            assert not array[end[-1] :].any()
        judge_varlen(results, host_out, host_lse, dout, dlse, of_sequences, own_slopes)

    deterministic = bool(kind_rng.random() < 0.4)
    arrays = [given(rng, dout), *arrays, given(rng, host_out), given(rng, host_lse), *cu]
    if dlse is not None:
        on_device["dlse"] = given(rng, dlse)
    on_device |= {"deterministic": deterministic, "grad_alibi": "alibi_slopes" in options}
    return Drawn(cuattn.flash_attention_varlen_backward, arrays, on_device, judge, deterministic)
