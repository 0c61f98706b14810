"""append_kv against loops over its tokens: run in NumPy by tests/test_append_kv.py and on a GPU by
tests/gpu/test_append_kv.py."""

from __future__ import annotations

from typing import Any

import numpy as np

import cuattn
from cuattn._arrays import acc_dtype
from tests import formulas

HEADS = 3
LENGTHS = (20, 7, 64, 5)  # of sequences, with their new tokens
COUNTS = (4, 7, 1, 0)  # new tokens
CAPACITY, PAGE_SIZE = 70, 16

#: What a call is given, by name: where tokens go, and how they are divided.
KINDS = ("contiguous", "paged", "slots", "slots alone")


def check(
    rng: np.random.Generator,
    dtype: np.dtype,
    kind: str,
    to_device: Any,
    *,
    dims: tuple[int, int] = (64, 40),
    ragged: bool = True,
    padded: bool = False,
    rope: str | None = None,
    strided: bool = False,
) -> None:
    """Append to a random cache, and compare all of it with what a loop over the tokens makes."""
    counts = np.array(COUNTS if ragged else [5] * len(LENGTHS))
    batch, total = len(LENGTHS), int(counts.sum())
    lens = np.array(LENGTHS, np.int32)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    k, v = (rng.standard_normal((total, HEADS, dim)).astype(dtype) for dim in dims)
    paged = kind != "contiguous"
    pages = -(-CAPACITY // PAGE_SIZE)
    shape = (batch * pages + 2, PAGE_SIZE) if paged else (batch, CAPACITY)
    caches = [rng.standard_normal((*shape, HEADS, 2 * dim)).astype(dtype) for dim in dims]
    if strided:
        caches = [cache[..., : cache.shape[-1] // 2] for cache in caches]
    else:
        caches = [np.ascontiguousarray(cache[..., ::2]) for cache in caches]
    table = rng.permutation(batch * pages + 2)[: batch * pages].reshape(batch, pages)
    padding = np.array([2, 3, 0, 1], np.int32) if padded else np.zeros(batch, np.int32)
    pairs = dims[0] // 4
    acc = acc_dtype(dtype)
    angles = rng.random((max(LENGTHS), pairs)) * 6
    tables = np.cos(angles).astype(acc), np.sin(angles).astype(acc)

    exact = [cache.astype(np.float64) for cache in caches]
    plain = [cache.copy() for cache in caches]
    places = np.full(total, -1, np.int32)
    for b, n in enumerate(counts):
        for i in range(n):
            t, at = bounds[b] + i, LENGTHS[b] - n + i
            if kind.startswith("slots") and rng.random() < 0.2:
                continue  # places[t] stays -1
            page, slot = (table[b, at // PAGE_SIZE], at % PAGE_SIZE) if paged else (b, at)
            places[t] = page * shape[1] + slot
            if at < padding[b] and kind != "slots alone":
                continue
            for result, precision in ((exact, np.float64), (plain, acc)):
                key = k[t].astype(precision)
                if rope is not None:
                    cos, sin = (a[at - padding[b]].astype(precision) for a in tables)
                    key = rotated(key, cos, sin, rope == "interleaved")
                result[0][page, slot], result[1][page, slot] = key, v[t]

    options: dict[str, Any] = {}
    if kind == "paged":
        options["page_table"] = table.astype(np.int32)
    elif paged:
        options["slots"] = places
    if padded and kind != "slots alone":
        options["left_padding"] = padding
    if rope is not None:
        options["rope"] = tuple(map(to_device, tables))
        options["interleaved"] = rope == "interleaved"
    new = [k, v]
    if ragged:
        options["cu_seqlens"] = bounds
    elif kind != "slots alone":
        new = [a.reshape(batch, -1, *a.shape[1:]) for a in new]
    given = [to_device(cache) for cache in caches]
    if strided:  # a copy on a device has no gaps
        whole = [to_device(np.repeat(cache, 2, axis=-1)) for cache in caches]
        for wide, cache in zip(whole, given, strict=True):
            wide[..., : cache.shape[-1]] = cache
        given = [wide[..., : wide.shape[-1] // 2] for wide in whole]
    cuattn.append_kv(
        *given,
        *map(to_device, new),
        None if kind == "slots alone" else to_device(lens),
        **{
            name: to_device(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        },
    )
    for which, (cache, right, usual) in enumerate(zip(given, exact, plain, strict=True)):
        actual = cache.get() if hasattr(cache, "get") else cache
        if rope is None or which == 1:
            np.testing.assert_array_equal(actual, usual)
        else:
            formulas.assert_accurate(actual, right, usual)


def rotated(key: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """A key (heads, head_dim) with its first pairs rotated."""
    n = len(cos)
    first = slice(0, 2 * n, 2) if interleaved else slice(0, n)
    second = slice(1, 2 * n, 2) if interleaved else slice(n, 2 * n)
    a, b = key[:, first], key[:, second]
    out = key.copy()
    out[:, first], out[:, second] = a * cos - b * sin, b * cos + a * sin
    return out
