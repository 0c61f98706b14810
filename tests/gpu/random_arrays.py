"""How random calls of attention to arrays are drawn and judged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn._spec import attention_spec
from cuattn.reference import dropout
from tests import formulas
from tests.gpu.calls import precisions
from tests.gpu.random_calls import (
    OPTIONS,
    Drawn,
    Generator,
    Sequence_,
    draw_kind,
    draw_options,
    draw_out,
    ends_of,
    given,
    given_options,
    judge_attention,
    lengths,
    numbers,
    of_sequence,
    pick,
)
from tests.gpu.test_dropout import factors

cupy = pytest.importorskip("cupy")


def heads_of(rng: Generator, group: int) -> tuple[int, int]:
    heads_kv = int(rng.integers(1, 4)) if group < 16 else 1
    return heads_kv * group, heads_kv


def fitting(rng: Generator, draw: Callable[[], Any], size: Callable[[Any], int], most: int) -> Any:
    """What is drawn, and small enough: of forty the smallest, unless an earlier one is. Now and
    then it may be of no size at all."""
    least = 0 if rng.random() < 0.05 else 1
    drawn = []
    for _ in range(40):
        drawn.append(draw())
        if least <= size(drawn[-1]) <= most:
            return drawn[-1]
    return min(drawn, key=lambda each: size(each) or 1 << 60)


def limit(most: int, dtype: np.dtype) -> int:
    """The wider type that judges float64 is slow."""
    return most // 6 if dtype == np.float64 else most


def peaked(rng: Generator) -> float:
    """The size of queries: of large ones a single key decides a row, and a wrong one shows."""
    return pick(rng, [1.0, 1.0, 3.0])


def draw_arrays(kind_rng: Generator, rng: Generator, most: int, names=OPTIONS, largest=512):
    """The kind, and q, k, v and options of whole sequences."""
    kind = draw_kind(kind_rng, names, largest=largest)
    heads_q, heads_kv = heads_of(rng, kind.group)
    batch, seqlen_q, seqlen_k = fitting(
        rng,
        lambda: (int(rng.integers(1, 4)), *map(int, lengths(rng, 2, 700))),
        lambda shape: int(np.prod(shape)) * heads_q,
        limit(most, kind.dtype),
    )
    q = numbers(rng, (batch, seqlen_q, heads_q, kind.head_dim), kind.dtype, peaked(rng))
    k = numbers(rng, (batch, seqlen_k, heads_kv, kind.head_dim), kind.dtype)
    v = numbers(rng, (batch, seqlen_k, heads_kv, kind.head_dim_v), kind.dtype)
    return kind, q, k, v, draw_options(rng, kind, batch, heads_q, seqlen_q, seqlen_k)


def of_formula(options: dict[str, Any], *arrays: np.ndarray) -> dict[str, Any]:
    """Options as the formula has them: dropout's factors in place of its seed."""
    own = {name: value for name, value in options.items() if name not in ("dropout", "seed")}
    if options.get("dropout") and all(a.size for a in arrays):
        own["z"] = factors(*arrays, options)
    return own


def with_z(options: dict[str, Any], b: int, rows: int, keys: int) -> dict[str, Any]:
    own = of_sequence(options, b, rows, keys)
    if "z" in own:
        own["z"] = own["z"][b : b + 1, :, :rows, :keys]
    return own


def poisoned_keys(rng: Generator, options: dict[str, Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Keys and values with NaN and infinities where key_mask hides them."""
    if "key_mask" not in options or rng.random() < 0.5:
        return list(arrays)
    poison = rng.choice([np.nan, np.inf, -np.inf])
    result = []
    for array in arrays:
        array = array.copy()
        array[:, : options["key_mask"].shape[1]][~options["key_mask"]] = poison
        result.append(array)
    return result


def flash_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind, q, k, v, options = draw_arrays(kind_rng, rng, most)
    meaning = of_formula(options, q, k, v)

    def judge(results: list[np.ndarray]) -> None:
        out, *lse = results
        parts = list(zip(out, lse[0] if lse else nothing(out), strict=True))
        sequences = [
            Sequence_(q[b], k[b], v[b], with_z(meaning, b, q.shape[1], k.shape[1]))
            for b in range(len(q))
        ]
        judge_outs(kind.dtype, parts, sequences, bool(lse))

    out, border = draw_out(rng, (*q.shape[:-1], v.shape[-1]), kind.dtype)
    more = {**out, "return_lse": bool(rng.random() < 0.7)}
    arrays = [given(rng, a) for a in (q, *poisoned_keys(rng, options, k, v))]
    return Drawn(
        cuattn.flash_attention,
        arrays,
        {**given_options(rng, options), **more},
        judge,
        border=border,
    )


def nothing(out: np.ndarray) -> list[np.ndarray]:
    return [np.empty(0)] * len(out)


def judge_outs(dtype, parts, sequences, with_lse: bool) -> None:
    if not with_lse:  # the exact one in its place
        wide, _ = precisions(dtype)
        acc = np.float64 if dtype == np.float64 else np.float32
        parts = [
            (
                out,
                formulas.attention(s.q[None], s.k[None], s.v[None], precision=wide, **s.options)[1][
                    0
                ].astype(acc),
            )
            for (out, _), s in zip(parts, sequences, strict=True)
        ]
    judge_attention(dtype, parts, sequences)


def ragged(kind_rng: Generator, rng: Generator, most: int, names, largest=512):
    """The same of sequences end to end, with their ends, and rows of no sequence behind."""
    kind = draw_kind(kind_rng, names, largest=largest)
    heads_q, heads_kv = heads_of(rng, kind.group)
    counts = fitting(
        rng,
        lambda: lengths(rng, 2 * int(rng.integers(1, 7)), 400).reshape(2, -1),
        lambda n: int((n[0] * n[1]).sum()) * heads_q,
        limit(most, kind.dtype),
    )
    same = rng.random() < 0.2
    if same:
        counts = counts[[0, 0]]
    ends = [ends_of(n) for n in counts]
    spare = int(rng.choice([0, 0, 1, 40]))
    q = numbers(rng, (ends[0][-1] + spare, heads_q, kind.head_dim), kind.dtype, peaked(rng))
    k, v = (
        numbers(rng, (ends[1][-1] + spare, heads_kv, dim), kind.dtype)
        for dim in (kind.head_dim, kind.head_dim_v)
    )
    sizes = [int(n.max()) + int(rng.integers(0, 4)) for n in counts]
    options = draw_options(rng, kind, counts.shape[1], heads_q, *sizes)
    return kind, q, k, v, ends, same, options


def sequences_of(q, k, v, ends, options) -> list[Sequence_]:
    sequences = []
    for b, (rows, keys) in enumerate(zip(*map(slices, ends), strict=True)):
        part = q[rows], k[keys], v[keys]
        own = of_sequence(options, b, len(part[0]), len(part[1]))
        drops, seed = own.pop("dropout", 0.0), own.pop("seed", 0)
        if drops and all(a.size for a in part):
            shapes, dtypes = [a.shape for a in (q, k, v)], [a.dtype for a in (q, k, v)]
            spec = attention_spec("", *shapes, *dtypes, dropout=drops, sequences=len(ends[0]) - 1)
            tile = slice(0, q.shape[1]), slice(0, len(part[0])), slice(0, len(part[1]))
            own["z"] = dropout.factors(spec, seed, b, *tile)[None]
        sequences.append(Sequence_(*part, own))
    return sequences


def slices(ends: np.ndarray) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(ends.tolist())]


def flash_attention_varlen(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind, q, k, v, ends, same, options = ragged(kind_rng, rng, most, OPTIONS)
    sequences = sequences_of(q, k, v, ends, options)

    def judge(results: list[np.ndarray]) -> None:
        out, lse = results
        parts = [(out[rows], lse[:, rows]) for rows in slices(ends[0])]
        judge_attention(kind.dtype, parts, sequences)

    for array, end in ((q, ends[0]), (k, ends[1]), (v, ends[1])):
        array[end[-1] :] = np.nan
    out, border = draw_out(rng, (*q.shape[:-1], v.shape[-1]), kind.dtype)
    arrays = [given(rng, a) for a in (q, k, v)]
    arrays += [given_ints(rng, e) for e in (ends[:1] if same and rng.random() < 0.7 else ends)]
    options = given_options(rng, options)
    return Drawn(
        cuattn.flash_attention_varlen, arrays, {**options, **out, "return_lse": True}, judge,
        border=border,
    )  # fmt: skip


def given_ints(rng: Generator, array: np.ndarray) -> Any:
    if rng.random() < 0.1:
        array = array.astype(np.int64)
    return given(rng, array) if rng.random() < 0.3 else cupy.asarray(array)
