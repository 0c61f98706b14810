"""Axes that are longer than kernels can count: the error names the argument. Windows may be of any
size."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cuattn

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

LONG = 1 << 31


def some(*shape: int, dtype: Any = np.float16) -> Any:
    return cupy.zeros(shape, dtype)


def repeated(*shape: int, dtype: Any = np.float16) -> Any:
    """An array of any shape, in the memory of its last axis."""
    return cupy.broadcast_to(some(shape[-1], dtype=dtype), shape)


def attention(dtype: Any) -> Any:
    k = repeated(1, LONG, 2, 64, dtype=dtype)
    return cuattn.flash_attention(some(1, 4, 2, 64, dtype=dtype), k, k)


def tangents() -> Any:
    q, k = some(1, 4, 2, 64), repeated(1, LONG, 2, 64)
    return cuattn.flash_attention_jvp(q, k, k, q, k, k)


def pages() -> Any:
    k, table = repeated(LONG, 16, 2, 64), some(1, 4, dtype=np.int32)
    return cuattn.paged_attention(some(1, 2, 64), k, k, table, table[0, :1])


def latents() -> Any:
    keys = [repeated(LONG, 64, 1, n) for n in (512, 64)]
    table = some(1, 4, dtype=np.int32)
    queries = some(1, 16, 512), some(1, 16, 64)
    return cuattn.mla_decode(*queries, *keys, table, table[0, :1], scale=0.1)


def cache() -> Any:
    slots, new = repeated(1, LONG, 2, 64), some(1, 1, 2, 64)
    return cuattn.append_kv(slots, slots, new, new, some(1, dtype=np.int32))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attention(np.float16), f"flash_attention: k has shape (1, {LONG}, 2, 64), of whi"),
        (lambda: attention(np.float32), f"flash_attention: k has shape (1, {LONG}, 2, 64), of whi"),
        (tangents, "flash_attention_jvp: k has shape"),
        (pages, f"paged_attention: k_pages has shape ({LONG}, 16, 2, 64), of which no axis may be"),
        (latents, "mla_decode: latent_pages has shape"),
        (cache, "append_kv: k_cache has shape"),
    ],
    ids=["float16", "float32", "tangents", "pages", "latents", "cache"],
)
def test_an_axis_of_2_to_the_31_is_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


@pytest.mark.parametrize(
    ("window", "meaning"),
    [
        ((1 << 40, 1 << 70), None),
        ((None, 1 << 63), None),
        ((1 << 80, 3), (None, 3)),
        ((-(1 << 70), None), (-100, None)),
    ],
)
def test_windows_of_any_size(rng, window, meaning):
    arrays = [rng.standard_normal((1, n, 2, 64)).astype(np.float16) for n in (40, 70, 70)]
    for given in (arrays, [cupy.asarray(a) for a in arrays]):
        found = cuattn.flash_attention(*given, window=window)
        assert bool((found == cuattn.flash_attention(*given, window=meaning)).all())
