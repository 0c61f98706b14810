"""Derivatives in a direction (forward mode) against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuattn
from tests import formulas
from tests.gpu.calls import DTYPES, Call, draw_call, normal, placed
from tests.gpu.gradient_calls import drop

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_workspaces")]


def check_jvp(call: Call) -> None:
    """Against NumPy's in float64, by the error of NumPy's in the precision of the inputs."""
    rng = call.rng
    directions = [normal(rng, a.shape, a.dtype) for a in (call.q, call.k, call.v)]
    arrays, options = call.on_device()
    out, tangent = cuattn.flash_attention_jvp(
        *arrays, *(placed(d, rng) for d in directions), **options
    )
    wide = [a.astype(np.float64) for a in (call.q, call.k, call.v, *directions)]
    exact_out, exact = cuattn.flash_attention_jvp(*wide, **call.options)
    plain_out, plain = cuattn.flash_attention_jvp(
        call.q, call.k, call.v, *directions, **call.options
    )
    assert np.isfinite(out.get()).all()
    assert np.isfinite(tangent.get()).all()
    formulas.assert_gradients_accurate(out.get(), exact_out, plain_out)
    formulas.assert_gradients_accurate(tangent.get(), exact, plain)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
def test_jvp(dtype, number, rng, jvp_tier):
    call = draw_call(rng, DTYPES[dtype])
    if rng.random() < 0.3:
        drop(call, rng)
    check_jvp(call)


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 160)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_jvp_of_common_calls(dtype, causal, head_dims, rng, jvp_tier):
    """More queries and keys than one tile of any kernel has."""
    q = normal(rng, (2, 133, 4, head_dims[0]), DTYPES[dtype])
    k, v = (normal(rng, (2, 150, 2, d), DTYPES[dtype]) for d in head_dims)
    check_jvp(Call(q, k, v, {"causal": causal}, rng))


def test_jvp_and_vjp_agree(rng):
    shapes = (2, 190, 6, 40), (2, 170, 3, 40), (2, 170, 3, 24)
    arrays = [cupy.asarray(normal(rng, s, np.dtype(np.float64))) for s in (*shapes, *shapes)]
    options = {"causal": True, "softcap": 5.0, "dropout": 0.2, "seed": 3}
    out, pullback = cuattn.flash_attention_vjp(*arrays[:3], **options)
    _, tangent = cuattn.flash_attention_jvp(*arrays, **options)
    dout = cupy.asarray(normal(rng, out.shape, np.dtype(np.float64)))
    back = sum(float((g * d).sum()) for g, d in zip(pullback(dout)[:3], arrays[3:], strict=True))
    assert abs(back - float((tangent * dout).sum())) <= 1e-9 * float(abs(tangent * dout).sum())


def on_device(arrays: list[np.ndarray]) -> list[Any]:
    return [cupy.asarray(a) for a in arrays]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jvp_ignores_hidden_values(dtype, rng, jvp_tier):
    """NaN and inf of keys that a mask hides change nothing, bit for bit."""
    shape = (1, 90, 2, 64)
    arrays = [normal(rng, shape, DTYPES[dtype]) for _ in range(6)]
    mask = cupy.asarray(np.arange(90) < np.array([70, 90])[:, None, None])  # of each head
    expected = cuattn.flash_attention_jvp(*on_device(arrays), mask=mask)
    for n in (1, 2, 4, 5):
        arrays[n][:, 70:, 0] = np.nan
    arrays[5][0, 75, 0, 3] = np.inf
    actual = cuattn.flash_attention_jvp(*on_device(arrays), mask=mask)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.get(), b.get())


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of_direction", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jvp_passes_on_visible_values(dtype, of_direction, poison, rng, jvp_tier):
    """What is not finite in a value reaches the results of the queries that see it, in its column
    and in no other."""
    arrays = [normal(rng, (1, 90, 2, 64), DTYPES[dtype]) for _ in range(6)]

    def computed() -> list[np.ndarray]:
        results = cuattn.flash_attention_jvp(*on_device(arrays), causal=True)
        return [a.get().astype(np.float32) for a in results]

    expected = computed()
    arrays[5 if of_direction else 2][0, 40, 1, 3] = poison
    actual = computed()
    reached = np.zeros(expected[0].shape, bool)
    reached[:, 40:, 1, 3] = True
    for n, (a, b) in enumerate(zip(actual, expected, strict=True)):
        here = reached & (n == 1 or not of_direction)
        np.testing.assert_array_equal(a[~here], b[~here])
        assert not np.isfinite(a[here]).any()
        if n == of_direction:  # the value is in the sum as it is
            np.testing.assert_array_equal(a[here], poison)
