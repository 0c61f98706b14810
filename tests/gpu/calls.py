"""Calls of attention on a GPU, drawn at random, and how their results are judged."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import formulas

cupy = pytest.importorskip("cupy")

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in formulas.DTYPES}
#: Where kernels change their minds: tile edges, padding, vector widths.
SEQLENS = [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 191, 193, 255, 257, 300]
HEAD_DIMS = [1, 2, 3, 7, 8, 16, 24, 31, 32, 40, 48, 63, 64, 65, 72, 80, 96, 112, 127, 128]
HEAD_DIMS += [129, 160, 192, 200, 224, 255, 256]
BORDER = -77.0  # what lies around every array


@dataclasses.dataclass
class Call:
    """Arguments of flash_attention on the host, and how the arrays lie in the device's memory."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    rng: np.random.Generator

    def expected(self, *cu_seqlens: np.ndarray) -> list[list[np.ndarray]]:
        """Out and lse of the definition: each exact, then in the precision of the inputs.

        The latter several times, with head_dim in different orders: the same formula, whose sums
        round differently. By the error of one a small result would be judged by luck.
        """
        exact, plain = precisions(self.q.dtype)
        backwards = slice(None, None, -1)
        odd_first = np.argsort(np.arange(self.q.shape[-1]) % 2 == 0, kind="stable")
        runs = [(exact, slice(None)), *((plain, o) for o in (slice(None), backwards, odd_first))]
        formula = formulas.varlen_attention if cu_seqlens else formulas.attention
        results = [
            formula(
                self.q[..., order],
                self.k[..., order],
                self.v,
                *cu_seqlens,
                precision=precision,
                **self.options,
            )
            for precision, order in runs
        ]
        return [list(result) for result in zip(*results, strict=True)]

    def on_device(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as CuPy arrays, surrounded by NaN."""
        arrays = [placed(a, self.rng) for a in (self.q, self.k, self.v)]
        options = {
            name: placed(value, self.rng) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        return arrays, options


def precisions(dtype: np.dtype) -> tuple[Any, Any]:
    """In which to compute the exact result and the plain one."""
    return np.longdouble if dtype == np.float64 else np.float64, dtype


def assert_accurate(actual: np.ndarray, exact: np.ndarray, *plain: np.ndarray) -> None:
    """The rule of two, with one rounding of slack for float64 too: its exact result is in a wider
    type."""
    finite = np.abs(exact[np.isfinite(exact)])
    slack = float(ml_dtypes.finfo(actual.dtype).eps) * float(finite.max(initial=0.0))
    formulas.assert_accurate(actual, exact, *plain, slack=slack)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def within(array: np.ndarray, rng: np.random.Generator, border: float) -> tuple[Any, Any]:
    """A view of `array`'s shape somewhere in a larger CuPy array full of `border`: both, the view
    unset.

    Its axes lie in any order but the last, with gaps or without, and start at any element.
    """
    if array.dtype == bool:
        border = True
    if array.ndim < 2:
        base = cupy.full(array.size + 24, border, array.dtype)
        start = int(rng.integers(1, 17))
        return base[start : start + array.size].reshape(array.shape), base
    axes = rng.permutation(array.ndim - 1) if rng.random() < 0.5 else np.arange(array.ndim - 1)
    axes = [*(int(axis) for axis in axes), array.ndim - 1]
    roomy = rng.random() < 0.5
    gap = 8 if rng.random() < 0.5 else int(rng.integers(1, 8))  # vector loads survive a gap of 8
    before = [gap if roomy and rng.random() < 0.5 else 0 for _ in axes]
    after = [gap if roomy and rng.random() < 0.5 else 0 for _ in axes]
    shape = [array.shape[axis] for axis in axes]
    base = cupy.full(
        [b + n + a for b, n, a in zip(before, shape, after, strict=True)], border, array.dtype
    )
    view = base[tuple(slice(b, b + n) for b, n in zip(before, shape, strict=True))]
    return view.transpose([axes.index(axis) for axis in range(array.ndim)]), base


def placed(array: np.ndarray, rng: np.random.Generator) -> Any:
    """`array` on the device, amid NaN."""
    view, _ = within(array, rng, np.nan)
    view[...] = cupy.asarray(array)
    return view


def draw_options(
    rng: np.random.Generator, heads_q: int, batch: int, dtype: np.dtype
) -> dict[str, Any]:
    """Some of the options that every attention call has."""

    def chance() -> bool:
        return rng.random() < 0.3

    options: dict[str, Any] = {}
    if chance():
        options["causal"] = True
    if chance():
        options["window"] = tuple(
            None if rng.random() < 0.3 else int(rng.integers(0, 150)) for _ in range(2)
        )
    if chance():
        options["scale"] = float(rng.uniform(-0.3, 0.3))
    if chance():
        options["softcap"] = float(rng.choice([1.0, 5.0, 30.0]))
    if chance():
        shape = (batch, heads_q) if rng.random() < 0.5 else (heads_q,)
        options["alibi_slopes"] = rng.uniform(0.0, 0.5, shape).astype(np.float32)
    if chance():
        options["sinks"] = normal(rng, (heads_q,), dtype)
    return options


def draw_call(rng: np.random.Generator, dtype: np.dtype) -> Call:
    """A flash_attention call of the whole contract."""
    batch, heads_kv, group = (int(rng.integers(1, high)) for high in (4, 3, 5))
    heads_q = heads_kv * group
    seqlen_q, seqlen_k = (int(rng.choice(SEQLENS)) for _ in "qk")
    head_dim = int(rng.choice(HEAD_DIMS))
    head_dim_v = head_dim if rng.random() < 0.5 else int(rng.choice(HEAD_DIMS))
    options = draw_options(rng, heads_q, batch, dtype)
    scores = (batch, heads_q, seqlen_q, seqlen_k)
    for name in ("bias", "mask"):
        if rng.random() < 0.3:
            shape = tuple(1 if rng.random() < 0.3 else n for n in scores)[int(rng.integers(0, 3)) :]
            if name == "bias":
                kind = dtype if rng.random() < 0.7 else DTYPES[str(rng.choice(list(DTYPES)))]
                options[name] = normal(rng, shape, kind)
            else:
                options[name] = rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
    return Call(
        normal(rng, (batch, seqlen_q, heads_q, head_dim), dtype),
        normal(rng, (batch, seqlen_k, heads_kv, head_dim), dtype),
        normal(rng, (batch, seqlen_k, heads_kv, head_dim_v), dtype),
        options,
        rng,
    )


def check(call: Call) -> None:
    """Run a call into an `out` amid a border; it must be accurate and leave the border alone."""
    expected, expected_lse = call.expected()
    arrays, options = call.on_device()
    out, base = within(expected[0].astype(call.q.dtype), call.rng, BORDER)
    out[...] = np.nan
    result, lse = cuattn.flash_attention(*arrays, **options, return_lse=True, out=out)
    assert result is out
    assert_accurate(out.get(), *expected)
    assert_accurate(lse.get(), *expected_lse)
    out[...] = BORDER
    assert bool((base == BORDER).all()), "memory around out was written to"
