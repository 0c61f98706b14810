"""Calls of degenerate shapes on NumPy (tests/degenerate.py)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests import degenerate, formulas

DTYPES = [np.dtype(dtype) for dtype in formulas.DTYPES]


def a_dtype(rng):
    return DTYPES[rng.integers(len(DTYPES))]


@pytest.mark.parametrize("kind", degenerate.ATTENTION)
def test_attention(kind, rng):
    degenerate.check_attention(rng, kind, a_dtype(rng), np.asarray)


@pytest.mark.parametrize("kind", degenerate.RAGGED)
def test_varlen(kind, rng):
    degenerate.check_varlen(rng, kind, a_dtype(rng), np.asarray)


@pytest.mark.parametrize("kind", degenerate.CACHED)
def test_decode(kind, rng):
    degenerate.check_decode(rng, kind, a_dtype(rng), np.asarray)


@pytest.mark.parametrize("kind", degenerate.CACHED)
def test_paged(kind, rng):
    degenerate.check_paged(rng, kind, a_dtype(rng), np.asarray)


@pytest.mark.parametrize("kind", degenerate.MERGED)
def test_merge(kind, rng):
    degenerate.check_merge(rng, kind, a_dtype(rng), np.asarray)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_cache(dtype, rng):
    degenerate.check_cache(rng, np.dtype(dtype), np)


@pytest.mark.parametrize("kind", degenerate.SAMPLED)
def test_sampling(kind, rng):
    degenerate.check_sampling(rng, kind, np.asarray)
