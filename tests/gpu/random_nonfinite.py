"""Random calls whose inputs have a few NaN and infinities: which results have them, too."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests.gpu import random_calls as calls
from tests.gpu.random_arrays import draw_arrays, given_ints, ragged
from tests.gpu.random_caches import draw_pages
from tests.gpu.random_calls import OPTIONS, Drawn, Generator, given, given_options, numbers, pick

cupy = pytest.importorskip("cupy")


def spoil(rng: Generator, arrays: list[np.ndarray]) -> None:
    """Put NaN into some rows, and infinities into values: queries are made small enough that no
    weight of an infinity is 0 in float16."""
    q = arrays[0]
    q /= max(q.dtype.type(1), q.std(dtype=np.float32).astype(q.dtype)) if q.size else 1
    for _ in range(int(rng.integers(1, 4))):
        which = int(rng.integers(len(arrays)))
        array = arrays[which]
        if array.size:
            at = tuple(int(rng.integers(n)) for n in array.shape)
            values = [np.nan, np.nan, np.inf, -np.inf] if which == 2 else [np.nan]
            array[at] = pick(rng, values)


def by_pattern(want: tuple, dtype: Any, size: float) -> Any:
    """Judge by NumPy's results of the same arrays: the same infinities and NaN in the same places,
    and beside them numbers that are about the same."""

    def judge(results: list[np.ndarray]) -> None:
        for got, right in zip(results, want, strict=True):
            got, right = (a.astype(np.float64) for a in (got, right))
            for kind in (np.isnan, np.isposinf, np.isneginf):
                differ = kind(got) != kind(right)
                assert not differ.any(), (
                    f"{kind.__name__}: {differ.sum()} of {differ.size} places differ, the first "
                    f"{np.argwhere(differ)[0]}: {got[differ][0]}, in NumPy {right[differ][0]}"
                )
            finite = np.isfinite(right)
            error = np.abs(got[finite] - right[finite]).max(initial=0.0)
            slack = 20 * size * max(float(ml_dtypes.finfo(dtype).eps), 1e-6)
            assert error <= slack, f"error {error:.3g} where NumPy's result is finite"

    return judge


#: Options that leave scores of a size at which no weight is too small for its type.
TAME = tuple(name for name in OPTIONS if name not in ("scale", "bias", "alibi_slopes"))


def with_nonfinite(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    """Of attention to arrays."""
    kind, q, k, v, options = draw_arrays(kind_rng, rng, most, TAME)
    spoil(rng, [q, k, v])
    options["return_lse"] = True
    with np.errstate(all="ignore"):
        want = cuattn.flash_attention(q, k, v, **options)
    judge = by_pattern(want, kind.dtype, 4 + calls.largest(v))
    arrays = [given(rng, a) for a in (q, k, v)]
    return Drawn(cuattn.flash_attention, arrays, given_options(rng, options), judge)


def with_nonfinite_ragged(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    """Of sequences end to end, which leave each other alone."""
    kind, q, k, v, ends, _, options = ragged(kind_rng, rng, most, TAME)
    q, k, v = q[: ends[0][-1]], k[: ends[1][-1]], v[: ends[1][-1]]
    spoil(rng, [q, k, v])
    options["return_lse"] = True
    with np.errstate(all="ignore"):
        want = cuattn.flash_attention_varlen(q, k, v, *ends, **options)
    judge = by_pattern(want, kind.dtype, 4 + calls.largest(v))
    arrays = [given(rng, a) for a in (q, k, v)] + [given_ints(rng, e) for e in ends]
    return Drawn(cuattn.flash_attention_varlen, arrays, given_options(rng, options), judge)


def with_nonfinite_pages(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    """Of one query of each sequence over pages, some of which several have: all keys that a
    sequence has are seen, unless a window hides them."""
    kind = calls.draw_kind(kind_rng, ("window", "softcap", "sinks"), largest=256)
    heads_kv = int(rng.integers(1, 4))
    heads = heads_kv * min(kind.group, 16)
    lens = rng.choice([0, 1, 17, 64, 130, 300, 900], int(rng.integers(1, 6)))
    page_size = int(2 ** rng.integers(0, 9))
    table, used = draw_pages(rng, lens, page_size)
    shape = len(used), page_size, heads_kv
    q = numbers(rng, (len(lens), heads, kind.head_dim), kind.dtype)
    k, v = (numbers(rng, (*shape, d), kind.dtype) for d in (kind.head_dim, kind.head_dim_v))
    spoil(rng, [q, k, v])
    options: dict[str, Any] = calls.draw_options(rng, kind, len(lens), heads, 1, 1)
    options |= {"return_lse": True, "num_splits": pick(rng, [None, "fixed", 3])}
    with np.errstate(all="ignore"):
        want = cuattn.paged_attention(q, k, v, table, lens.astype(np.int32), **options)
    judge = by_pattern(want, kind.dtype, 4 + calls.largest(v))
    for array in (k, v):
        array[~used] = np.nan
    arrays = [given(rng, a) for a in (q, k, v)]
    arrays += [given_ints(rng, a.astype(np.int32)) for a in (table, lens)]
    return Drawn(cuattn.paged_attention, arrays, given_options(rng, options), judge)
