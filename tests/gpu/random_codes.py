"""How random codes of numbers are drawn and judged."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._quantized import FORMATS
from tests.gpu import random_calls as calls
from tests.gpu.random_caches import code_options
from tests.gpu.random_calls import (
    Drawn,
    Generator,
    given,
    numbers,
    pick,
    results_of,
)

cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def awkward(rng: Generator, x: np.ndarray) -> np.ndarray:
    """With rows of zeros of both signs, of subnormal, huge and tiny numbers, NaN and infinities."""
    flat = x.reshape(-1, x.shape[-1])
    kinds: list[Any] = [
        0.0, -0.0, 1e-40, -1e-40, 3e38, 3.4e38, -3.38e38, np.nan, np.inf, -np.inf, 1e-7, 65504.0,
        2.0**-126, 2.0**-133, 5.0,
    ]  # fmt: skip
    with np.errstate(over="ignore"):
        for _ in range(min(len(flat), 12)):
            row, value = int(rng.integers(len(flat))), kinds[int(rng.integers(len(kinds)))]
            part = slice(int(rng.integers(x.shape[-1])), None, int(rng.integers(1, 5)))
            if rng.random() < 0.3:
                flat[row] = 0.0
            flat[row, part] = value
    return x


def quantize(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))]
    dim = int(kind_rng.choice([2, 6, 32, 34, 64, 80, 96, 128, 192, 256, 320, 512]))
    shape = (*map(int, rng.integers(1, [4, 70, 5])), dim)[int(rng.integers(0, 2)) :]
    x = numbers(rng, shape, dtype)
    if rng.random() < 0.5:
        x = (x.astype(np.float64) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))).astype(dtype)
    if rng.random() < 0.6:
        x = awkward(rng, x)
    format = str(kind_rng.choice([*FORMATS]))
    options = code_options(kind_rng, rng, format, shape)
    if rng.random() < 0.15:
        options.pop("group_size", None)
        options.pop("granularity", None)
        wide = [1] * len(shape)
        wide[int(rng.integers(len(shape)))] = -1
        wide = [n if side == -1 else 1 for n, side in zip(shape, wide, strict=True)]
        scale = pick(rng, [np.float32, BFLOAT16.type])
        options["scale"] = np.abs(numbers(rng, wide, np.float32)).astype(scale) + scale(1e-3)
        if not options.get("symmetric", True):
            options["scale"] = options["scale"], numbers(rng, wide, scale)
    want = cuattn.quantize(x, format, **options)

    def judge(results: list[np.ndarray]) -> None:
        parts = [part for part in (want.data, want.scale, want.minimum) if part is not None]
        assert len(parts) == len(results)
        for got, wanted in zip(results, parts, strict=True):
            if wanted.dtype.kind in "iu":
                np.testing.assert_array_equal(got, wanted)
            else:
                np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))

    def also(results: list[np.ndarray]) -> None:
        """The numbers that the codes stand for."""
        to = calls.DTYPES[str(rng.choice([*calls.DTYPES]))]
        codes = drawn.function(*drawn.arrays, **drawn.options)
        values = results_of(cuattn.dequantize(codes, to))[0].astype(np.float64)
        wanted = cuattn.dequantize(want, to).astype(np.float64)
        np.testing.assert_allclose(values, wanted, rtol=0, atol=2.0**-126)

    on_device = {
        name: tuple(map(cupy.asarray, value))
        if isinstance(value, tuple)
        else cupy.asarray(value)
        if isinstance(value, np.ndarray)
        else value
        for name, value in options.items()
    }
    drawn = Drawn(cuattn.quantize, [given(rng, x), format], on_device, judge, also=also)
    return drawn
