"""rope on a GPU: the plain formula, at any alignment, strides and positions."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests.formulas import DTYPES, assert_accurate
from tests.gpu.graphs import captured
from tests.test_positions import LLAMA3, SCALINGS, formula

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def check(x, positions, **options):
    out = cuattn.rope(x, positions, **options)
    assert isinstance(out, cupy.ndarray)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    x, positions = x.get(), positions.get()
    exact = formula(x, positions, **options, precision=np.longdouble)
    plain = formula(x, positions, **options, precision=x.dtype.type)
    assert_accurate(out.get(), exact, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        ((2, 33, 8, 128), None),
        ((1, 100, 9, 128), 64),
        ((3, 5, 1, 80), 80),
        ((2, 7, 5, 7), 6),
        ((4, 1, 32, 64), None),
        ((2, 3, 5, 2, 96), 32),
        ((9, 2, 256), None),
        ((2, 3, 1, 1024), 512),
        ((2, 0, 3, 64), None),
    ],
    ids=str,
)
def test_the_formula(rng, dtype, interleaved, shape, rotary_dim):
    for integers in (np.int32, np.int64):
        x = cupy.asarray(rng.standard_normal(shape).astype(dtype))
        positions = cupy.asarray(rng.integers(0, 30000, shape[:-2]).astype(integers))
        check(x, positions, rotary_dim=rotary_dim, interleaved=interleaved)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_scalings(rng, scaling):
    x = cupy.asarray(rng.standard_normal((2, 50, 4, 128), dtype=np.float32))
    positions = cupy.arange(50) * 600
    check(x, positions, base=500000.0, scaling=scaling)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(rng, dtype):
    wide = cupy.asarray(rng.standard_normal((3, 2, 10, 6, 70)).astype(dtype))
    positions = cupy.asarray(rng.integers(0, 999, (2, 20)))[:, ::2]
    check(wide[1, :, :, 1:5, 3:67], positions)  # not aligned
    check(wide[1, :, ::-1, ::2, :64], positions)
    check(wide[:, :, 0].swapaxes(1, 2)[..., :64], positions[0, :6])
    check(wide[..., ::2][..., :32], positions[0])
    check(cupy.broadcast_to(wide[0, 0, :1, :1, :64], (2, 5, 3, 64)), positions[0, :5])


def test_far_and_negative_positions(rng):
    x = cupy.asarray(rng.standard_normal((1, 4, 3, 64), dtype=np.float32))
    there = cuattn.rope(x, cupy.arange(4) + 2**40 + 1)
    back = cuattn.rope(there, -(cupy.arange(4) + 2**40 + 1))
    assert abs(back - x).max() < 5e-6


@pytest.mark.parametrize("distance", [-200, 200])
def test_out_may_overlap_x(distance, rng):
    memory = cupy.zeros((1500, 4, 64), np.float32)
    x, out = memory[300:1300], memory[300 + distance : 1300 + distance]
    x[...] = cupy.asarray(rng.standard_normal(x.shape).astype(np.float32))
    positions = cupy.arange(1000, dtype=np.int32)
    expected = cuattn.rope(x, positions)
    assert cuattn.rope(x, positions, out=out) is out
    assert cupy.array_equal(out, expected)


def test_graph_replays_with_other_positions(rng):
    x = cupy.asarray(rng.standard_normal((8, 4, 64), dtype=np.float32))
    positions = cupy.zeros(8, np.int32)
    replay, out = captured(lambda: cuattn.rope(x, positions, scaling=LLAMA3))
    for start in (5, 77):
        positions[:] = cupy.arange(start, start + 8)
        replay()
        assert (out == cuattn.rope(x, positions, scaling=LLAMA3)).all()


@pytest.mark.parametrize("rotary_dim", [2, 24, 40, 72])
def test_out_may_be_x_or_any_strides(rng, rotary_dim):
    x = cupy.asarray(rng.standard_normal((2, 10, 6, 72), dtype=np.float32))
    expected = cuattn.rope(x, cupy.arange(10), rotary_dim=rotary_dim)
    for out in (
        cupy.empty_like(x),
        cupy.empty((2, 10, 6, 80), np.float32)[..., 8:],
        cupy.empty((2, 10, 6, 144), np.float32)[..., ::2],
        x,
    ):
        result = cuattn.rope(x, cupy.arange(10), rotary_dim=rotary_dim, out=out)
        assert result is out
        assert (out == expected).all()
