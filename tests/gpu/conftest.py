"""Every result in GPU tests starts as NaN, and kernels can be tried tier by tier."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu import dispatch


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch):
    """What ``cupy.empty`` gives holds NaN: a place that no kernel wrote shows."""
    cupy = pytest.importorskip("cupy")
    empty = cupy.empty

    def poisoned(shape, dtype=float, order="C"):
        array = empty(shape, dtype, order)
        if array.dtype in FLOAT_DTYPES:
            array[...] = np.nan
        return array

    monkeypatch.setattr(cupy, "empty", poisoned)


@pytest.fixture(params=list(dispatch.attention.FORWARD_TIERS))
def tier(request, monkeypatch):
    """Each tier of the forward pass: calls reach it, and what it leaves goes to the tiers below
    it."""
    from cuattn.gpu import attention

    names = list(dispatch.attention.FORWARD_TIERS)
    below = {
        name: dispatch.attention.FORWARD_TIERS[name] for name in names[names.index(request.param) :]
    }
    attention._plan.cache_clear()
    monkeypatch.setattr(dispatch.attention, "FORWARD_TIERS", below)
    yield request.param
    attention._plan.cache_clear()
