"""How random writing to caches is drawn and judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn._quantized import FORMATS
from tests import appending
from tests.gpu import random_calls as calls
from tests.gpu.random_calls import (
    Generator,
    given,
    numbers,
)

cupy = pytest.importorskip("cupy")


def append_kv(kind_rng: Generator, rng: Generator, most: int) -> None:
    where = str(kind_rng.choice(appending.KINDS))
    rotation = [None, "halves", "interleaved"][int(kind_rng.integers(3))]
    appending.check(
        rng,
        calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))],
        where,
        cupy.asarray,
        dims=tuple(int(kind_rng.choice([4, 16, 40, 64, 80, 128])) for _ in "kv"),
        ragged=bool(kind_rng.random() < 0.5),
        padded=bool(kind_rng.random() < 0.3),
        rope=None if where == "slots alone" else rotation,
        strided=bool(kind_rng.random() < 0.3),
    )


def paged_kv_cache(kind_rng: Generator, rng: Generator, most: int) -> None:
    """Writing, forking, truncating: pages on both sides have the same bits."""
    dtype = calls.DTYPES[str(kind_rng.choice(["float16", "bfloat16", "float32"]))]
    dim = int(kind_rng.choice([32, 64, 96, 128, 256]))
    dim_v = dim if kind_rng.random() < 0.7 else int(kind_rng.choice([32, 64, 128]))
    heads, page_size = int(rng.integers(1, 4)), int(2 ** rng.integers(0, 7))
    names = [None, "int8", "float8_e4m3", "float8_e5m2", "int4", "k8v4", "other"]
    quantization: Any = names[int(kind_rng.integers(len(names)))]
    if quantization == "other":
        each = [[None, *FORMATS][int(kind_rng.integers(5))] for _ in "kv"]
        if each == [None, None]:
            each[0] = "int8"
        more: dict[str, Any] = {}
        if kind_rng.random() < 0.3 and "int4" in each:
            more["group_size"] = 32
        if kind_rng.random() < 0.3 and each[0]:
            more["rotate_k"] = bool(kind_rng.random() < 0.5)
        if kind_rng.random() < 0.3 and each[0]:
            more["k_offset"] = rng.standard_normal((heads, dim)).astype(np.float32)
        quantization = cuattn.KVQuantization(*each, **more)
    pages = 40 + 600 // page_size
    caches = [
        cuattn.PagedKVCache(
            pages, page_size, heads, dim, head_dim_v=dim_v, dtype=dtype, quantization=quantization,
            xp=xp,
        )
        for xp in (np, cupy)
    ]  # fmt: skip
    for cache in caches:
        for array in cache._store.arrays.values():
            array[...] = 0
    ids: list[int] = []
    rotary = 2 * int(rng.integers(1, min(dim, 64) // 2 + 1)) if kind_rng.random() < 0.4 else 0
    interleaved = bool(kind_rng.random() < 0.5)
    angles = rng.random((700, rotary // 2)) * 6
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    for _ in range(6):
        chance = rng.random()
        if not ids or chance < 0.3:
            for cache in caches:
                id = cache.add_sequence()
            ids.append(id)
        elif chance < 0.45:
            which = ids[int(rng.integers(len(ids)))]
            for cache in caches:
                id = cache.fork(which)
            ids.append(id)
        elif chance < 0.6:
            which = ids[int(rng.integers(len(ids)))]
            n = int(rng.integers(0, caches[0].num_tokens(which) + 1))
            for cache in caches:
                cache.truncate(which, n)
        counts = rng.choice([0, 1, 1, 3, 8, 17, 40], len(ids))
        if not all(cache.can_extend(ids, counts.tolist()) for cache in caches):
            continue
        if max(caches[0].num_tokens(id) for id in ids) + 40 > 700:
            continue
        total = int(counts.sum())
        k, v = (numbers(rng, (total, heads, d), dtype) for d in (dim, dim_v))
        if rng.random() < 0.3 and total:
            k[int(rng.integers(total))] = 0
            v[int(rng.integers(total))] = -0.0
        options: dict[str, Any] = {}
        exact = True
        for cache, place in zip(caches, (np.asarray, lambda a: given(rng, a)), strict=True):
            cache.extend(ids, counts.tolist())
            if rotary:
                options = {"rope": tuple(cache.xp.asarray(t) for t in tables)} if hasattr(
                    cache, "xp"
                ) else {"rope": tuple(
                    (np if cache is caches[0] else cupy).asarray(t) for t in tables
                )}  # fmt: skip
                options["interleaved"] = interleaved
            cache.write(0, ids, place(k), place(v), **options)
        for name, host in caches[0]._store.arrays.items():
            device = caches[1]._store.arrays[name].get()
            if rotary and not exact:
                continue
            if not np.array_equal(
                np.ascontiguousarray(device).view(np.uint8),
                np.ascontiguousarray(host).view(np.uint8),
            ):
                differ = (device != host) & ~(np.isnan(_f(device)) & np.isnan(_f(host)))
                if rotary and quantization is None:
                    np.testing.assert_allclose(_f(device), _f(host), rtol=0.01, atol=0.02)
                    continue
                assert not differ.any(), f"{name}: {differ.sum()} of {differ.size} differ"


def _f(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)
