"""Small floats and codes as numbers: to the bit, and a part at a time."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.reference import tiles
from cuattn.reference.narrow import to_float32
from cuattn.reference.quantization import CodedRows, dequantize


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_every_small_float_is_widened_exactly(dtype):
    bits = 8 * np.dtype(dtype).itemsize
    every = np.arange(2**bits, dtype=f"u{bits // 8}").view(dtype)
    finite = every[np.isfinite(every.astype(np.float32))]
    for numbers in (finite, every, every.reshape(2, -1).T):
        wide = to_float32(numbers)
        np.testing.assert_array_equal(wide, numbers.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(wide[wide == 0]), np.signbit(numbers[wide == 0]))


@pytest.mark.parametrize("format", ["int8", "int4", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": "group", "group_size": 16},
        {"granularity": "channel"},
        {"rotate": True},
        {"offset": np.ones((3, 64), np.float32)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_parts_of_codes_are_parts_of_their_values(rng, format, options):
    codes = cuattn.quantize(rng.standard_normal((40, 3, 64), dtype=np.float32), format, **options)
    expected = dequantize(codes, np.dtype(np.float32)).swapaxes(0, 1)
    rows = CodedRows(codes)
    assert rows.shape == expected.shape and len(rows) == 3
    for heads, tokens in ((slice(0, 3), slice(0, 40)), (slice(1, 3), slice(7, 19))):
        part = rows[heads][:, tokens]
        assert part.shape == expected[heads, tokens].shape
        np.testing.assert_array_equal(part.values(np.dtype(np.float32)), expected[heads, tokens])


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_codes_become_numbers_a_part_at_a_time(rng, seqlen_q, monkeypatch):
    monkeypatch.setattr(tiles, "cores", lambda: 2)  # each has a part at a time
    shape = 1, 1 << 16, 2, 64
    codes = cuattn.quantize(rng.standard_normal(shape, dtype=np.float32), "int8")
    q = rng.standard_normal((1, seqlen_q, 2, 64), dtype=np.float32)
    tracemalloc.start()
    cuattn.flash_decode(q, codes, codes, np.array([shape[1]]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < codes.size * 4  # keys and values in float32 would take twice as much
