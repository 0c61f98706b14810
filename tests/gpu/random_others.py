"""How random calls are drawn and judged of functions beside those of random_families.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import cuattn
from cuattn import sampling
from tests.gpu import random_calls as calls
from tests.gpu.random_arrays import fitting, heads_of, judge_outs, limit, nothing
from tests.gpu.random_calls import (
    Drawn,
    Generator,
    Sequence_,
    broadcast,
    draw_kind,
    given,
    lengths,
    numbers,
    pick,
)
from tests.gpu.random_sampling import draw_logits, given_parameters

cupy = pytest.importorskip("cupy")


def scaled_dot_product_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    """With any leading axes; seen from the first key, where it is causal."""
    kind = draw_kind(kind_rng, ("causal", "scale", "bias", "mask"))
    heads_q, heads_kv = heads_of(rng, kind.group)
    lead = tuple(map(int, rng.integers(1, 4, pick(rng, [0, 1, 1, 2, 3]))))
    batch = int(np.prod(lead))
    rows, keys = fitting(
        rng,
        lambda: tuple(map(int, lengths(rng, 2, 400))),
        lambda shape: batch * shape[0] * shape[1] * heads_q,
        limit(most, kind.dtype),
    )
    q = numbers(rng, (batch, heads_q, rows, kind.head_dim), kind.dtype)
    k, v = (
        numbers(rng, (batch, heads_kv, keys, dim), kind.dtype)
        for dim in (kind.head_dim, kind.head_dim_v)
    )
    options, meaning = {}, {"causal": False}
    if "scale" in kind.options:
        options["scale"] = meaning["scale"] = float(rng.uniform(-0.3, 0.3))
    if "causal" in kind.options:
        options["is_causal"] = True
        meaning["mask"] = np.tril(np.ones((rows, keys), bool))[None, None]
    elif {"bias", "mask"} & kind.options:
        shape = broadcast(rng, (batch, heads_q, rows, keys))
        if "mask" in kind.options:
            array = rng.random(shape) < 0.7
        else:
            array = numbers(rng, shape, kind.dtype)
        whole = array.reshape((1,) * (4 - array.ndim) + array.shape)
        meaning["mask" if array.dtype == bool else "bias"] = whole
        if array.ndim == 4:
            array = array.reshape(*(lead if array.shape[0] == batch else (1,) * len(lead)),
                                  *array.shape[1:])  # fmt: skip
        options["attn_mask"] = array
    options["enable_gqa"] = True

    def judge(results: list[np.ndarray]) -> None:
        out = results[0].reshape(batch, heads_q, rows, kind.head_dim_v).swapaxes(1, 2)
        sequences = [
            Sequence_(
                *(a[b].swapaxes(0, 1) for a in (q, k, v)),
                {
                    name: value[b : b + 1]
                    if isinstance(value, np.ndarray) and len(value) > 1
                    else value
                    for name, value in meaning.items()
                },
            )
            for b in range(batch)
        ]
        judge_outs(kind.dtype, list(zip(out, nothing(out), strict=True)), sequences, False)

    arrays = [given(rng, a.reshape(*lead, *a.shape[1:])) for a in (q, k, v)]
    if "attn_mask" in options:
        options["attn_mask"] = given(rng, options["attn_mask"])
    return Drawn(cuattn.scaled_dot_product_attention, arrays, options, judge)


def finite(logits: np.ndarray) -> np.ndarray:
    return np.nan_to_num(logits.astype(np.float32), nan=0.0, posinf=5.0, neginf=-np.inf).astype(
        logits.dtype
    )


def logprobs(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    rows, vocab = logits.shape
    options = {"top_n": int(min(vocab, pick(rng, [0, 1, 5, 20, 300])))}
    if rng.random() < 0.8:
        shape = (rows,) if rng.random() < 0.5 else (rows, int(rng.integers(1, 9)))
        options["tokens"] = rng.integers(-1, vocab + 1, shape).astype(np.int32)
    want = sampling.logprobs(logits, **options)

    def judge(results: list[np.ndarray | None]) -> None:
        close = {"rtol": 1e-5, "atol": 1e-5 * (1 + calls.largest(logits))}
        for got, wanted in zip(results[:2], want[:2], strict=True):
            assert (got is None) == (wanted is None)
            if got is not None:
                np.testing.assert_allclose(got, wanted, **close)
        if want[2] is not None:
            np.testing.assert_array_equal(results[2], want[2])

    return Drawn(sampling.logprobs, [given(rng, logits)], given_parameters(rng, options), judge)


def beam_step(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    """Tokens of scores that nearly are equal may come in another order."""
    logits = finite(draw_logits(kind_rng, rng))
    beams = int(pick(rng, [n for n in (1, 2, 4, 5) if len(logits) % n == 0]))
    logits = logits.reshape(-1, beams, logits.shape[-1])
    scores = np.where(
        rng.random(logits.shape[:2]) < 0.2, -np.inf, -np.abs(numbers(rng, logits.shape[:2], "f4"))
    ).astype(np.float32)
    want = sampling.beam_step(logits, scores)

    def judge(results: list[np.ndarray]) -> None:
        slack = 1e-5 * (1 + calls.largest(logits))
        np.testing.assert_allclose(results[0], want[0], rtol=1e-5, atol=slack)
        with np.errstate(invalid="ignore"):
            gaps = np.abs(np.diff(want[0], axis=1, append=-np.inf, prepend=np.inf))
            apart = (gaps[:, 1:] > 2 * slack) & (gaps[:, :-1] > 2 * slack)
        # The last one's neighbour is not among the results.
        apart[:, -1] = False
        for got, wanted in zip(results[1:], want[1:], strict=True):
            np.testing.assert_array_equal(got[apart], wanted[apart])

    return Drawn(sampling.beam_step, [given(rng, logits), cupy.asarray(scores)], {}, judge)


FAMILIES: dict[str, Callable[[Generator, Generator, int], Drawn | None]] = {
    function.__name__: function for function in (scaled_dot_product_attention, logprobs, beam_step)
}
