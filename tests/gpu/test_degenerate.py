"""Calls of degenerate shapes (tests/degenerate.py), tier by tier: each ends, and is right."""

from __future__ import annotations

import numpy as np
import pytest

from tests import degenerate, formulas

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype(dtype) for dtype in formulas.DTYPES]


def a_dtype(rng, tier):
    """One that the tier serves."""
    return DTYPES[rng.integers(4 if tier == "simt" else 2)]


@pytest.mark.parametrize("kind", degenerate.ATTENTION)
def test_attention(kind, rng, tier):
    degenerate.check_attention(rng, kind, a_dtype(rng, tier), cupy.asarray)


@pytest.mark.parametrize("kind", degenerate.RAGGED)
def test_varlen(kind, rng, tier):
    degenerate.check_varlen(rng, kind, a_dtype(rng, tier), cupy.asarray)


@pytest.mark.parametrize("kind", degenerate.CACHED)
def test_decode(kind, rng, decode_tier):
    degenerate.check_decode(rng, kind, a_dtype(rng, decode_tier), cupy.asarray)


@pytest.mark.parametrize("kind", degenerate.CACHED)
def test_paged(kind, rng, decode_tier):
    degenerate.check_paged(rng, kind, a_dtype(rng, decode_tier), cupy.asarray)


@pytest.mark.parametrize("kind", degenerate.MERGED)
def test_merge(kind, rng):
    degenerate.check_merge(rng, kind, a_dtype(rng, "simt"), cupy.asarray)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_cache(dtype, rng):
    degenerate.check_cache(rng, dtype, cupy)


@pytest.mark.parametrize("kind", degenerate.SAMPLED)
def test_sampling(kind, rng):
    degenerate.check_sampling(rng, kind, cupy.asarray)
