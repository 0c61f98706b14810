"""How random calls of latent attention are drawn and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._quantized import FORMATS
from cuattn.reference.quantization import rotated
from tests import formulas
from tests.gpu import random_calls as calls
from tests.gpu.random_arrays import given_ints, limit, peaked, slices
from tests.gpu.random_caches import (
    Rows,
    cached_call,
    draw_lengths,
    draw_pages,
    slots_of,
    told_lengths,
    within_sequences,
)
from tests.gpu.random_calls import (
    Drawn,
    Generator,
    Sequence_,
    draw_kind,
    draw_options,
    ends_of,
    given,
    numbers,
    pick,
)
from tests.gpu.random_sampling import given_parameters

cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def mla_decode(kind_rng: Generator, rng: Generator, most: int, *, flashmla: bool = False) -> Drawn:
    kind = draw_kind(kind_rng, ("causal", "window", "sinks"))
    if flashmla:
        kind = dataclasses.replace(kind, dtype=BFLOAT16)
    common = kind_rng.random() < 0.6 or flashmla
    latent = 512 if common else int(kind_rng.choice([1, 40, 64, 128, 192, 256, 448, 511, 512]))
    rope = 64 if common else int(kind_rng.choice([0, 1, 24, 32, 63, 64]))
    format = str(kind_rng.choice(["", *FORMATS], p=[0.45, 0.2, 0.1, 0.2, 0.05]))
    if format == "int4" and latent % 2:
        format = "int8"
    format = "float8_e4m3" if flashmla else format
    sparse = kind_rng.random() < 0.25
    heads = int(rng.choice([1, 3, 8, 16, 32, 40, 64, 128]))
    most = limit(most // 4, kind.dtype)
    lens, counts = draw_lengths(rng, heads, most)
    batch = len(lens)
    page_size = int(2 ** rng.integers(0, 9))
    table, used = draw_pages(rng, lens, page_size)
    shape = (len(used), page_size, 1)
    rotary = numbers(rng, (*shape, rope), kind.dtype)
    if flashmla:
        c, latent_given, rope_given = flashmla_rows(rng, rotary, used)
    elif format:
        c = Rows(kind_rng, rng, (*shape, latent), kind.dtype, format, used)
        spoilt = rotary.copy()
        spoilt[~used] = np.nan
        latent_given, rope_given = c.given, given(rng, spoilt)
    elif rng.random() < 0.6:
        joined = numbers(rng, (*shape, latent + rope), kind.dtype)
        rotary = joined[..., latent:]
        spoilt = joined.copy()
        spoilt[~used] = np.nan
        whole = given(rng, spoilt)
        latent_given, rope_given = whole[..., :latent], whole[..., latent:]
        c = Rows.__new__(Rows)
        c.values, c.codes = joined[..., :latent], None
    else:
        c = Rows(kind_rng, rng, (*shape, latent), kind.dtype, "", used)
        spoilt = rotary.copy()
        spoilt[~used] = np.nan
        latent_given, rope_given = c.given, given(rng, spoilt)
    if not format and rng.random() < 0.3:
        latent_given, rope_given = latent_given[:, :, 0], rope_given[:, :, 0]
    ragged = bool((counts != counts[0]).any()) or rng.random() < 0.3
    ends = ends_of(counts)
    total = int(ends[-1])
    q = numbers(rng, (total, heads, latent + rope), kind.dtype, peaked(rng))
    options = draw_options(rng, kind, batch, heads, 1, 1)
    options.setdefault("causal", bool(rng.random() < 0.8))
    options["scale"] = float(rng.choice([192**-0.5, 0.02, -0.05, 0.2]))
    indices = None
    if sparse:
        most_indices = int(rng.choice([1, 7, 64, 100, 300]))
        indices = np.full((total, most_indices), -1, np.int32)
        for b, rows in enumerate(slices(ends)):
            for row in range(rows.start, rows.stop):
                if lens[b]:
                    indices[row] = rng.integers(0, lens[b], most_indices)
        gone = rng.random(indices.shape) < 0.2
        indices[gone] = rng.choice([-1, 1 << 29, -5], indices.shape)[gone]
    slots = slots_of(table, lens, page_size)
    sequences = []
    for b, rows in enumerate(slices(ends)):
        values, own = c.values[slots[b]], dict(options)
        # What codes stand for is float32, and the rotated part may be wider.
        turned = rotary[slots[b]]
        n = len(values)
        if indices is not None:
            counted = np.zeros((rows.stop - rows.start, n))
            for i, row in enumerate(indices[rows]):
                np.add.at(counted[i], row[(row >= 0) & (row < n)], 1)
            own["mask"] = (counted > 0)[None, None]
            own["bias"] = np.log(np.maximum(counted, 1))[None, None]
        others = []
        if format:
            rounded = values.astype(kind.dtype).astype(np.float32)
            others.append((q[rows], np.concatenate([rounded, turned], -1), rounded))
            if c.codes.rotation is not None:
                offset = 0 if c.codes.offset is None else c.codes.offset
                queries = rotated(q[rows][..., :latent].astype(np.float32)).astype(kind.dtype)
                keys = rotated(values - offset)
                by_offset = np.broadcast_to(np.float32(offset), values.shape)
                others.append((
                    np.concatenate([queries, q[rows]], -1),
                    np.concatenate([keys, by_offset, turned], -1),
                    values,
                ))  # fmt: skip
        sequences.append(
            Sequence_(q[rows], np.concatenate([values, turned], -1), values, own, tuple(others))
        )
    extra: dict[str, Any] = {}
    if ragged:
        extra["cu_seqlens_q"] = given_ints(rng, ends)
    else:
        q = q.reshape(batch, -1, heads, latent + rope)
        if indices is not None:
            indices = indices.reshape(batch, -1, indices.shape[-1])
        if q.shape[1] == 1 and rng.random() < 0.6:
            q = q[:, 0]
            indices = None if indices is None else indices[:, 0]
    if indices is not None:
        extra["indices"] = given_ints(rng, indices)

    def parts_of(out, lse):
        if not ragged:
            lse = lse.swapaxes(0, 1).reshape(heads, -1)
            out = out.reshape(-1, heads, latent)
        return [(out[rows], lse[:, rows]) for rows in slices(ends)]

    if rng.random() < 0.5:
        both = given(rng, q)
        queries = [both[..., :latent], both[..., latent:]]
    else:
        queries = [given(rng, np.ascontiguousarray(x)) for x in np.split(q, [latent], axis=-1)]
    drawn = cached_call(
        rng,
        cuattn.mla_decode,
        kind,
        [*queries, latent_given, rope_given],
        [given_ints(rng, table), told_lengths(rng, lens, table.shape[1] * page_size)],
        options,
        sequences,
        (*q.shape[:-1], latent),
        parts_of,
    )
    drawn.options |= extra
    if ragged:
        drawn.defined = lambda results: within_sequences(results, int(ends[-1]))
    return drawn


def flashmla_pages(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    """Rows of 656 bytes, read as they are."""
    return mla_decode(kind_rng, rng, most, flashmla=True)


def flashmla_rows(rng: Generator, rotary: np.ndarray, used: np.ndarray) -> tuple[Rows, Any, Any]:
    """Random latents, what is given of them and of the rotated parts, in one array of bytes."""
    shape = rotary.shape[:3]
    codes = cuattn.quantize(
        numbers(rng, (*shape, 512), np.float32), "float8_e4m3", granularity="group", group_size=128
    )
    scale = (codes.scale * rng.uniform(0.5, 2.0, codes.scale.shape)).astype(np.float32)
    latents = Rows.__new__(Rows)
    latents.codes = codes.of(codes.data, scale, None)
    latents.values = cuattn.dequantize(latents.codes, np.float32)
    parts = (codes.data, scale, np.ascontiguousarray(rotary))
    rows = np.concatenate([part.view(np.uint8) for part in parts], axis=-1)
    rows[~used] = 0xFF  # NaN in each part
    bytes_ = given(rng, rows)
    if bytes_.strides[-1] != 1 or any(n % 4 for n in (bytes_.data.ptr, *bytes_.strides[:2])):
        bytes_ = bytes_.copy("C")
    if rng.random() < 0.5:
        bytes_ = bytes_[:, :, 0]
    return latents, *cuattn.flashmla_pages(bytes_)


def by_numpy(
    function: Callable, arrays: list[np.ndarray], options: dict[str, Any], units: float
) -> Callable[[list[np.ndarray]], None]:
    """Judge by what the function makes of float64 arrays, and of its own: NumPy rounds less than a
    kernel does, which may be wrong by so many units of the largest number besides. For float64 both
    are the same, for want of a wider type, and sums in another order count alone."""
    dtype = arrays[0].dtype
    if dtype == np.float64:
        units = max(units, 256.0)
    wide = [a.astype(np.float64) if a.dtype == dtype else a for a in arrays]
    exact, usual = (function(*each, **options) for each in (wide, arrays))
    if not isinstance(exact, tuple):
        exact, usual = (exact,), (usual,)

    def judge(results: list[np.ndarray]) -> None:
        for got, right, plain in zip(results, exact, usual, strict=True):
            unit = max(float(ml_dtypes.finfo(dtype).eps), 2.0**-52)
            slack = units * unit * (1e-3 + calls.largest(right))
            formulas.assert_accurate(got, right, plain, slack=slack)

    return judge


def mla_prefill(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES], p=[0.3, 0.4, 0.2, 0.1]))]
    common = kind_rng.random() < 0.5
    latent, rope_dim = (512, 64) if common else (int(kind_rng.choice([40, 64, 128, 256])), 32)
    dim = int(kind_rng.choice([32, 64, 128]))
    heads = int(kind_rng.choice([1, 2, 5, 16]))
    batch, page_size = int(rng.integers(1, 4)), int(2 ** rng.integers(0, 9))
    counts = rng.choice([0, 1, 3, 17, 64, 130], batch)
    if rng.random() < 0.4:
        counts[:] = max(1, counts[0])
    lens = counts + rng.choice([0, 1, 60, 200], batch)
    table, used = draw_pages(rng, lens, page_size)
    shape = (len(used), page_size, latent + rope_dim)
    pages = numbers(rng, shape, dtype)
    pages[~used] = 0.0
    ends = ends_of(counts)
    ragged = bool((counts != counts[0]).any()) or rng.random() < 0.3
    lead = (int(ends[-1]),) if ragged else (batch, int(counts[0]))
    q = numbers(rng, (*lead, heads, dim + rope_dim), dtype)
    w_uk, w_uv = (numbers(rng, (heads, dim, latent), dtype, latent**-0.5) for _ in "kv")
    options: dict[str, Any] = {"scale": (dim + rope_dim) ** -0.5, "return_lse": True}
    options["absorbed"] = pick(kind_rng, [None, False, True])
    options["chunk"] = pick(rng, [16384, 100, 64, 1000])
    if ragged:
        options["cu_seqlens_q"] = ends
    parts = [q[..., :dim], q[..., dim:], pages[..., :latent], pages[..., latent:]]
    rest = [table, lens.astype(np.int32), w_uk, w_uv]
    judge = by_numpy(cuattn.mla_prefill, [*parts, *rest], options, 16)
    spoilt = pages.copy()
    spoilt[~used] = np.nan
    whole, queries = given(rng, spoilt), given(rng, q)
    arrays = [queries[..., :dim], queries[..., dim:], whole[..., :latent], whole[..., latent:]]
    arrays += [given_ints(rng, table), given_ints(rng, rest[1]), given(rng, w_uk), given(rng, w_uv)]
    on_device = given_parameters(rng, options)
    return Drawn(cuattn.mla_prefill, arrays, on_device, judge, captured=False)
