"""Calls whose scores have a bias, masks, windows of any bounds or large heads, through every
function, against the formula sequence by sequence: run in NumPy by tests/test_scores.py and on
kernels by tests/gpu/test_scores.py."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np

import cuattn
from tests import formulas

HEADS_Q, HEADS_KV = 4, 2
#: Queries and keys of the sequences of ragged calls, and keys of sequences in caches.
LENGTHS_Q, LENGTHS_K = (1, 40, 0, 17), (35, 70, 9, 17)
CACHED = (33, 97, 0)
PAGE_SIZE = 16

OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": (1, HEADS_Q, "q", "k")},
    "bias of keys": {"bias": ("b", 1, 1, "k")},
    "mask": {"mask": ("b", 1, "q", "k")},
    "mask of one axis": {"mask": ("q", 1)},
    "key_mask": {"key_mask": ("b", "k")},
    "both masks": {"mask": (HEADS_Q, "q", "k"), "key_mask": ("b", "k"), "sinks": True},
    "keys before": {"window": (8, -1)},
    "keys behind": {"window": (-2, 20)},
    "none beside": {"window": (None, -3)},
    "only behind": {"window": (-40, None)},
    "causal and before": {"causal": True, "window": (30, -2)},
    "all": {
        **{"bias": ("b", HEADS_Q, "q", "k"), "mask": ("b", 1, "q", "k"), "key_mask": ("b", "k")},
        **{"window": (50, 9), "softcap": 5.0, "sinks": True, "alibi_slopes": True, "scale": 0.2},
    },
}
#: (head_dim, head_dim_v): of tensor cores, odd ones, and large ones.
DIMS = ((64, 64), (40, 72), (512, 512), (300, 96), (80, 270))


def random(rng: np.random.Generator, dtype: np.dtype, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def options_of(
    rng: np.random.Generator, dtype: np.dtype, name: str, sizes: dict[str, int]
) -> dict[str, Any]:
    """The named options, with arrays of random numbers; `sizes` has those of "b", "q" and "k"."""
    options = dict(OPTIONS[name])
    for key, shape in OPTIONS[name].items():
        if isinstance(shape, tuple) and key != "window":
            size = [sizes[n] if isinstance(n, str) else n for n in shape]
            options[key] = random(rng, dtype, *size) if key == "bias" else rng.random(size) > 0.4
    for key in ("sinks", "alibi_slopes"):
        if key in options:
            options[key] = rng.random(HEADS_Q).astype(
                np.float64 if dtype == np.float64 else np.float32
            )
    return options


def of_sequence(options: dict[str, Any], b: int, rows: int, keys: int) -> dict[str, Any]:
    """What the options say of the first `rows` queries and `keys` keys of a sequence."""
    own = {name: value for name, value in options.items() if name not in ("mask", "key_mask")}
    for name in ("bias", "mask"):
        if name in options:
            array = options[name]
            array = array.reshape((1,) * (4 - array.ndim) + array.shape)[:, :, :rows, :keys]
            own[name] = array[b : b + 1] if len(array) > 1 else array
    if "key_mask" in options:
        own["mask"] = own.get("mask", True) & options["key_mask"][b, None, None, None, :keys]
    return own


def judge(
    dtype: np.dtype, parts: list[tuple], sequences: list[tuple], options: dict[str, Any]
) -> None:
    """Judge each sequence's (out, lse) by the formula on its (q, k, v).

    In float32 four roundings of the largest number are allowed beside the formula's error: the
    largest error is that of a row in which two scores compete, each rounded to a unit of some 8.
    """
    wide = np.longdouble if dtype == np.float64 else np.float64
    outs, lses = [], []  # of each sequence: the result, the exact one, the plain ones
    for b, ((out, lse), (q, k, v)) in enumerate(zip(parts, sequences, strict=True)):
        own = of_sequence(options, b, len(q), len(k))
        of_formula = [formulas.attention(q[None], k[None], v[None], precision=wide, **own)]
        for order in formulas.orders(q.shape[-1]):
            arrays = q[None, ..., order], k[None, ..., order], v[None]
            of_formula.append(formulas.attention(*arrays, precision=dtype, **own))
        for collected, results in zip(
            (outs, lses), zip((out, lse), *of_formula, strict=True), strict=True
        ):
            collected.append([array.ravel() for array in results])
    for results in (outs, lses):
        actual, exact, *plain = map(np.concatenate, zip(*results, strict=True))
        finite = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
        slack = 4 * float(np.finfo(dtype).eps) * float(finite) if dtype == np.float32 else None
        formulas.assert_accurate(actual, exact, *plain, slack=slack)


def to_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def check_whole(rng, dtype, name, dims, to_device) -> None:
    """:func:`cuattn.flash_attention`."""
    rows, keys = 37, 90
    q, k, v = (
        random(rng, dtype, 2, n, heads, dim)
        for n, heads, dim in (
            (rows, HEADS_Q, dims[0]),
            (keys, HEADS_KV, dims[0]),
            (keys, HEADS_KV, dims[1]),
        )
    )
    options = options_of(rng, dtype, name, {"b": 2, "q": rows, "k": keys})
    out, lse = cuattn.flash_attention(
        *map(to_device, (q, k, v)), return_lse=True, **on_device(options, to_device)
    )
    out, lse = to_host(out), to_host(lse)
    judge(dtype, list(zip(out, lse, strict=True)), list(zip(q, k, v, strict=True)), options)


def on_device(options: dict[str, Any], to_device: Any) -> dict[str, Any]:
    return {
        name: to_device(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def check_varlen(rng, dtype, name, dims, to_device) -> None:
    """:func:`cuattn.flash_attention_varlen`, with more queries and keys in bias and mask than there
    are."""
    bounds_q, bounds_k = (np.cumsum([0, *n]).astype(np.int32) for n in (LENGTHS_Q, LENGTHS_K))
    q = random(rng, dtype, bounds_q[-1], HEADS_Q, dims[0])
    k = random(rng, dtype, bounds_k[-1], HEADS_KV, dims[0])
    v = random(rng, dtype, bounds_k[-1], HEADS_KV, dims[1])
    sizes = {"b": len(LENGTHS_Q), "q": max(LENGTHS_Q) + 3, "k": max(LENGTHS_K) + 5}
    options = options_of(rng, dtype, name, sizes)
    out, lse = cuattn.flash_attention_varlen(
        *map(to_device, (q, k, v, bounds_q, bounds_k)),
        return_lse=True,
        **on_device(options, to_device),
    )
    out, lse = to_host(out), to_host(lse)
    rows, keys = (
        [slice(*pair) for pair in itertools.pairwise(bounds)] for bounds in (bounds_q, bounds_k)
    )
    judge(
        dtype,
        [(out[r], lse[:, r]) for r in rows],
        [(q[r], k[c], v[c]) for r, c in zip(rows, keys, strict=True)],
        options,
    )


def check_decode(rng, dtype, name, dims, to_device, *, tokens=3, **more) -> None:
    """:func:`cuattn.flash_decode`, with NaN in the cache where no key is."""
    capacity = max(CACHED) + 3
    batch = len(CACHED)
    q = random(rng, dtype, batch, tokens, HEADS_Q, dims[0])
    k = random(rng, dtype, batch, capacity, HEADS_KV, dims[0])
    v = random(rng, dtype, batch, capacity, HEADS_KV, dims[1])
    for b, n in enumerate(CACHED):
        k[b, n:] = v[b, n:] = np.nan
    options = options_of(rng, dtype, name, {"b": batch, "q": tokens, "k": capacity - 1})
    options.setdefault("causal", False)
    arrays = map(to_device, (q, k, v, np.array(CACHED, np.int32)))
    out, lse = cuattn.flash_decode(
        *arrays, return_lse=True, **more, **on_device(options, to_device)
    )
    out, lse = to_host(out), to_host(lse)
    sequences = [(q[b], k[b, :n], v[b, :n]) for b, n in enumerate(CACHED)]
    judge(dtype, list(zip(out, lse, strict=True)), sequences, options)


def check_paged(rng, dtype, name, dims, to_device, *, prefix: int | None = None) -> None:
    """:func:`cuattn.paged_attention` of ragged queries."""
    pages = -(-max(LENGTHS_K) // PAGE_SIZE)
    batch = len(LENGTHS_K)
    table = rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    if prefix:
        table[:, : prefix // PAGE_SIZE] = table[0, : prefix // PAGE_SIZE]
    shape = (batch * pages, PAGE_SIZE, HEADS_KV)
    k, v = (random(rng, dtype, *shape, dim) for dim in dims)
    bounds = np.cumsum([0, *LENGTHS_Q]).astype(np.int32)
    lengths = np.array(LENGTHS_K, np.int32) + (prefix or 0)
    lengths = np.minimum(lengths, pages * PAGE_SIZE)
    q = random(rng, dtype, bounds[-1], HEADS_Q, dims[0])
    sizes = {"b": batch, "q": max(LENGTHS_Q), "k": pages * PAGE_SIZE}
    options = options_of(rng, dtype, name, sizes)
    options.setdefault("causal", False)
    out, lse = cuattn.paged_attention(
        *map(to_device, (q, k, v, table, lengths)),
        cu_seqlens_q=to_device(bounds),
        prefix=prefix,
        return_lse=True,
        **on_device(options, to_device),
    )
    out, lse = to_host(out), to_host(lse)
    rows = [slice(*pair) for pair in itertools.pairwise(bounds)]
    parts = [(out[r], lse[:, r]) for r in rows]
    sequences = []
    for b, n in enumerate(lengths):
        own_k, own_v = (a[table[b]].reshape(-1, *a.shape[2:])[:n] for a in (k, v))
        sequences.append((q[rows[b]], own_k, own_v))
    judge(dtype, parts, sequences, options)


def check_gradients(rng, dtype, name, to_device) -> None:
    """Backward of varlen: of each sequence the same as of the whole-sequence function."""
    bounds_q, bounds_k = (np.cumsum([0, *n]).astype(np.int32) for n in (LENGTHS_Q, LENGTHS_K))
    q, dout = (random(rng, dtype, bounds_q[-1], HEADS_Q, 64) for _ in range(2))
    k, v = (random(rng, dtype, bounds_k[-1], HEADS_KV, 64) for _ in range(2))
    sizes = {"b": len(LENGTHS_Q), "q": max(LENGTHS_Q) + 3, "k": max(LENGTHS_K) + 5}
    options = options_of(rng, dtype, name, sizes)
    given = on_device(options, to_device)
    q_, k_, v_, dout_, cu_q, cu_k = map(to_device, (q, k, v, dout, bounds_q, bounds_k))
    out, lse = cuattn.flash_attention_varlen(q_, k_, v_, cu_q, cu_k, return_lse=True, **given)
    grads = cuattn.flash_attention_varlen_backward(dout_, q_, k_, v_, out, lse, cu_q, cu_k, **given)
    wide = np.longdouble if dtype == np.float64 else np.float64
    for name_of, of_rows in (("dq", True), ("dk", False), ("dv", False)):
        exact, plain = [], []
        for b, (m, n) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
            rows = slice(bounds_q[b], bounds_q[b] + m)
            keys = slice(bounds_k[b], bounds_k[b] + n)
            own = of_sequence(options, b, m, n)
            arrays = [a[None] for a in (dout[rows], q[rows], k[keys], v[keys])]
            exact.append(formulas.attention_gradients(*arrays, precision=wide, **own)[name_of][0])
            plain.append(formulas.plain_gradients(*arrays, **own)[name_of])
        actual = to_host(getattr(grads, name_of))
        rows_of = bounds_q if of_rows else bounds_k
        assert rows_of[-1] == len(actual)
        expected = np.concatenate(exact)
        unit = 256 if dtype == np.float64 else 4  # roundings, since luck decides of so few numbers
        slack = unit * float(ml_dtypes.finfo(dtype).eps) * np.abs(expected).max()
        runs = [np.concatenate([run[0] for run in runs]) for runs in zip(*plain, strict=True)]
        formulas.assert_accurate(actual, expected, *runs, slack=slack)


def check_key_mask_gradients(rng, dtype, to_device) -> None:
    """Backward and derivative of whole sequences with a key_mask are those with the same mask."""
    q, k, v, dout = (to_device(random(rng, dtype, 2, 40, heads, 64)) for heads in (4, 2, 2, 4))
    key_mask = rng.random((2, 40)) > 0.3
    masks = {"key_mask": to_device(key_mask)}, {"mask": to_device(key_mask[:, None, None])}
    results = []
    for options in masks:
        out, pullback = cuattn.flash_attention_vjp(q, k, v, causal=True, **options)
        _, derivative = cuattn.flash_attention_jvp(q, k, v, dout, k, v, causal=True, **options)
        results.append((out, *pullback(dout)[:3], derivative))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(to_host(one), to_host(other))


def check_codes(rng, dtype, name, dims, to_device) -> None:
    """:func:`cuattn.flash_decode` over codes is that over the numbers that they stand for."""
    capacity = max(CACHED)
    q = random(rng, dtype, len(CACHED), 3, HEADS_Q, dims[0])
    k, v = (random(rng, dtype, len(CACHED), capacity, HEADS_KV, dim) for dim in dims)
    codes = [cuattn.quantize(to_device(a), "int8") for a in (k, v)]
    options = options_of(rng, dtype, name, {"b": len(CACHED), "q": 3, "k": capacity})
    lengths = to_device(np.array(CACHED, np.int32))
    out, lse = cuattn.flash_decode(
        to_device(q), *codes, lengths, return_lse=True, **on_device(options, to_device)
    )
    options.setdefault("causal", True)
    k, v = (to_host(cuattn.dequantize(a, np.float64)) for a in codes)
    sequences = [(q[b], k[b, :n], v[b, :n]) for b, n in enumerate(CACHED)]
    judge(dtype, list(zip(to_host(out), to_host(lse), strict=True)), sequences, options)
