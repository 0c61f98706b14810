"""rope on NumPy arrays: the plain formula, each scaling by its own, and what positions mean."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from tests.formulas import DTYPES, assert_accurate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "ntk", "factor": 4},
    YARN,
    {**YARN, "beta_fast": 24, "beta_slow": 2.0, "attention_factor": 1.25, "truncate": False},
    LLAMA3,
]


PI = np.longdouble("3.14159265358979323846264338")


def frequencies(
    dim: int, base: float, scaling: dict | None
) -> tuple[list[np.longdouble], np.longdouble]:
    """Angles from one position to the next, pair by pair, and the factor of sines and cosines."""
    scaling = {
        key: np.longdouble(value) if isinstance(value, (int, float)) else value
        for key, value in (scaling or {"rope_type": None}).items()
    }
    kind, factor = scaling["rope_type"], scaling.get("factor", 1)
    found, scale, base = [], np.longdouble(1), np.longdouble(base)
    for i in np.arange(dim // 2, dtype=np.longdouble):
        f = base ** (-2 * i / dim)
        if kind == "linear":
            f /= factor
        elif kind == "ntk":
            f = (base * factor ** (np.longdouble(dim) / (dim - 2))) ** (-2 * i / dim)
        elif kind == "yarn":
            length = scaling["original_max_position_embeddings"]
            ends = [
                dim * np.log(length / (2 * PI * n)) / (2 * np.log(base))
                for n in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
            ]
            if scaling.get("truncate", True):
                ends = [np.floor(ends[0]), np.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], dim - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            f = f * (1 - ramp) + f / factor * ramp
            scale = scaling.get("attention_factor", np.log(factor) / 10 + 1)
        elif kind == "llama3":
            wavelength = 2 * PI / f
            length = scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wavelength > length / low:
                f /= factor
            elif wavelength > length / high:
                smooth = (length / wavelength - low) / (high - low)
                f = (1 - smooth) * f / factor + smooth * f
        found.append(f)
    return found, scale


def formula(
    x: np.ndarray,
    positions: np.ndarray,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: dict | None = None,
    precision: Any = np.float64,
) -> np.ndarray:
    """x rotated as in the papers, each step rounded to `precision` (float32 for what is less)."""
    dtype = np.float32 if np.dtype(precision).itemsize < 4 else precision
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    f, scale = frequencies(dim, base, scaling)
    angles = np.broadcast_to(positions, x.shape[:-2]).astype(dtype)[..., None, None]
    angles = angles * np.array(f, dtype)
    cos, sin = dtype(scale) * np.cos(angles), dtype(scale) * np.sin(angles)
    out = x.astype(dtype)
    pairs = np.arange(dim // 2)
    first, second = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + dim // 2)
    a, b = out[..., first], out[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out.astype(precision)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_the_formula(rng, dtype, interleaved, scaling):
    for shape, options in (
        ((2, 7, 3, 64), {}),
        ((5, 1, 128), {"rotary_dim": 96, "base": 500000.0}),
        ((2, 1, 3, 4, 2, 7), {"rotary_dim": 6}),
    ):
        x = rng.standard_normal(shape).astype(dtype)
        positions = rng.integers(0, 40000, shape[:-2])
        options = options | {"interleaved": interleaved, "scaling": scaling}
        out = cuattn.rope(x, positions, **options)
        assert out.dtype == dtype
        exact = formula(x, positions, **options, precision=np.longdouble)
        plain = formula(x, positions, **options, precision=dtype)
        assert_accurate(out, exact, plain)


def test_far_positions_are_as_exact_as_near_ones(rng):
    """float32 of position 2**30 + 1 would be 2**30."""
    x = rng.standard_normal((1, 4, 1, 8), dtype=np.float32)
    near = np.arange(4)
    once = cuattn.rope(x, near)
    twice = cuattn.rope(cuattn.rope(x, near + 2**30), np.full(4, -(2**30), np.int32))
    np.testing.assert_allclose(twice, once, atol=5e-6)


def test_positions_broadcast_and_any_leading_axes(rng):
    x = rng.standard_normal((2, 3, 4, 2, 8), dtype=np.float32)
    out = cuattn.rope(x, np.arange(4))
    np.testing.assert_array_equal(out[1, 2], cuattn.rope(x[1, 2], np.arange(4, dtype=np.int32)))
    rows = rng.integers(0, 99, (3, 1))
    np.testing.assert_array_equal(
        cuattn.rope(x, rows)[:, 1], cuattn.rope(x[:, 1], np.full(4, rows[1, 0]))
    )
    view = x.swapaxes(2, 3).copy().swapaxes(2, 3)
    np.testing.assert_array_equal(cuattn.rope(view, np.arange(4)), out)
    assert cuattn.rope(x[:, :0], np.arange(4)).shape == (2, 0, 4, 2, 8)


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_scores_depend_on_the_distance_alone(m, n):
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 16))
    score = (cuattn.rope(q, [m] * np.ones(1, int)) * cuattn.rope(k, [n] * np.ones(1, int))).sum()
    same = (cuattn.rope(q, np.array([m - n])) * k).sum()
    assert score == pytest.approx(same, abs=1e-9)


def test_the_caches_rotation_is_the_same(rng):
    """PagedKVCache.write with tables of the plain angles."""
    k = rng.standard_normal((9, 2, 16)).astype(ml_dtypes.bfloat16)
    angles = np.arange(9)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    for interleaved in (False, True):
        cache = cuattn.PagedKVCache(1, 16, 2, 16, dtype=k.dtype)
        sequence = cache.add_sequence()
        cache.extend([sequence], 9)
        cache.write(0, [sequence], k, k, rope=tables, interleaved=interleaved)
        written = cache.pages(0)[0][0, :9].astype(np.float32)
        out = cuattn.rope(k, np.arange(9), interleaved=interleaved).astype(np.float32)
        np.testing.assert_allclose(out, written, rtol=2**-7, atol=1e-6)


X = np.zeros((2, 5, 3, 8), np.float32)
ERRORS = [
    ({"x": None}, TypeError, "x must be a NumPy or CuPy array, got None"),
    ({"x": X[0, 0]}, ValueError, "x has shape (3, 8), must be (..., seqlen, heads, head_dim)"),
    ({"x": X.astype(int)}, TypeError, "x has dtype int64, must be one of float16, bfloat16, f"),
    ({"positions": np.arange(5.0)}, TypeError, "positions has dtype float64, must be int32 or int"),
    (
        {"positions": np.arange(4)},
        ValueError,
        "positions has shape (4,), which must broadcast to (..., seqlen) = (2, 5); x is "
        "(..., seqlen, heads, head_dim)",
    ),
    ({"base": 0}, ValueError, "base is 0.0, must be positive and finite"),
    ({"base": "10000"}, TypeError, "base must be a number, got '10000'"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim is 3, must be even and from 2 to 8"),
    ({"rotary_dim": 10}, ValueError, "rotary_dim is 10, must be even and from 2 to 8"),
    ({"interleaved": 1}, TypeError, "interleaved must be True or False, got 1"),
    ({"scaling": 8.0}, TypeError, "scaling is 8.0, must be a dict or None"),
    (
        {"scaling": {"type": "linear", "factor": 2.0}},
        ValueError,
        "scaling has no rope_type, must have one of linear, ntk, yarn, llama3",
    ),
    (
        {"scaling": {"rope_type": "dynamic"}},
        ValueError,
        "scaling has rope_type 'dynamic', must be one of linear, ntk, yarn, llama3",
    ),
    (
        {"scaling": {"rope_type": ["yarn"]}},
        ValueError,
        "scaling has rope_type ['yarn'], must be one of linear, ntk, yarn, llama3",
    ),
    (
        {"scaling": {"rope_type": "yarn", "factor": 2.0}},
        ValueError,
        "scaling of rope_type yarn must have original_max_position_embeddings",
    ),
    (
        {"scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}},
        ValueError,
        "scaling has 'beta_fast', which rope_type linear does not; it has factor",
    ),
    (
        {"scaling": {**LLAMA3, "factor": -1}},
        ValueError,
        "scaling's factor is -1.0, must be positive and finite",
    ),
    (
        {"scaling": {**LLAMA3, "low_freq_factor": 4}},
        ValueError,
        "scaling's low_freq_factor is 4.0, must be below high_freq_factor, 4.0",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), ERRORS, ids=lambda value: str(value)[:50])
def test_errors(change, kind, message):
    call = {"x": X, "positions": np.arange(5)} | change
    with pytest.raises(kind, match="^" + re.escape(f"rope: {message}")):
        cuattn.rope(**call)


def test_out_may_be_x_or_any_strides(rng):
    x = rng.standard_normal((2, 3, 10, 6, 8), dtype=np.float32)
    expected = cuattn.rope(x, np.arange(10))
    for out in (np.empty_like(x), np.empty((2, 3, 10, 6, 16), np.float32)[..., ::2], x):
        assert cuattn.rope(x, np.arange(10), out=out) is out
        np.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError, match=r"rope: out has shape \(2, 3\), must be"):
        cuattn.rope(x, np.arange(10), out=np.zeros((2, 3), np.float32))
    with pytest.raises(TypeError, match="rope: out has dtype float64, must be float32"):
        cuattn.rope(x, np.arange(10), out=x.astype(np.float64))
