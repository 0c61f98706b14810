"""Every result in GPU tests starts as NaN, kernels can be tried tier by tier, and what hangs is
killed and named."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn._arrays import FLOAT_DTYPES
from cuattn._repeat import forget
from cuattn.gpu import compiler, dispatch
from tests.watchdog import limited, recording, watchdog  # noqa: F401, two of them fixtures


@pytest.fixture(scope="session", autouse=True)
def launches_are_told(watchdog):  # noqa: F811
    """The watchdog is told of each launch."""
    compiler.kernel = recording(compiler.kernel, watchdog.launch)


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch):
    """What ``cupy.empty`` gives holds NaN: a place that no kernel wrote shows. Calls like one of
    another test are not repeated, since a test may have changed what they do."""
    poison_results(monkeypatch)
    forget()


def poison_results(monkeypatch):
    cupy = pytest.importorskip("cupy")
    from cuattn.gpu import repeat

    empty = cupy.empty

    def poisoned(shape, dtype=float, order="C"):
        array = empty(shape, dtype, order)
        if array.dtype in FLOAT_DTYPES:
            array[...] = np.nan
        return array

    monkeypatch.setattr(cupy, "empty", poisoned)
    monkeypatch.setattr(repeat, "_new", poisoned)


#: The tiers, fastest first.
TIERS = ("sm90", "sm80", "simt")


@pytest.fixture(params=TIERS)
def tier(request):
    """Each tier of the forward pass: calls reach it, and what it leaves goes to the tiers below
    it."""
    below = TIERS[TIERS.index(request.param) :]
    with dispatch.use_tiers(*(f"forward_{name}" for name in below)):
        yield request.param


@pytest.fixture(params=TIERS)
def decode_tier(request):
    """Each tier of decoding: calls reach it, and what it leaves goes to the tiers below it."""
    below = TIERS[TIERS.index(request.param) :]
    with dispatch.use_tiers(*(f"decode_{name}" for name in below)):
        yield request.param


@pytest.fixture(params=TIERS)
def backward_tier(request):
    """Each tier of the backward pass: calls reach it, and what it leaves goes to those below it."""
    below = TIERS[TIERS.index(request.param) :]
    with dispatch.use_tiers(*(f"backward_{name}" for name in below)):
        yield request.param


@pytest.fixture(params=TIERS[1:])
def jvp_tier(request):
    """Each tier of the derivative in a direction, and those below it."""
    with dispatch.use_tiers(*(f"jvp_{name}" for name in TIERS[TIERS.index(request.param) :])):
        yield request.param


@pytest.fixture
def poisoned_workspaces(monkeypatch):
    """What kernels write for each other begins as NaN."""
    from cuattn.gpu import gradients

    allocate = gradients.scratch_array

    def poisoned(shape, dtype):
        array = allocate(shape, dtype)
        array[...] = np.nan
        return array

    monkeypatch.setattr(gradients, "scratch_array", poisoned)
