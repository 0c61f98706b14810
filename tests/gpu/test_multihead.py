"""multi_head_attention and leading axes of flash_attention on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests.formulas import DTYPES, assert_accurate
from tests.test_multihead import CASES, case, formula

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def on_gpu(options):
    return {
        key: cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for key, value in options.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_formula(rng, name, dtype):
    x, options = case(rng, name, dtype)
    out, lse = cuattn.multi_head_attention(cupy.asarray(x), **on_gpu(options), return_lse=True)
    assert isinstance(out, cupy.ndarray)
    assert out.dtype == dtype
    exact, exact_lse = formula(x, **options, precision=np.longdouble)
    plain, plain_lse = formula(x, **options, precision=dtype)
    assert_accurate(out.get(), exact, plain)
    assert_accurate(lse.get(), exact_lse, plain_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_leading_axes(rng, dtype):
    q, k, v = (cupy.asarray(rng.standard_normal((2, 3, 20, 4, 64)).astype(dtype)) for _ in "qkv")
    mask = cupy.asarray(rng.random((3, 1, 20, 20)) < 0.8)
    expected, expected_lse = cuattn.flash_attention(
        *(array.reshape(6, 20, 4, 64) for array in (q, k, v)),
        mask=cupy.tile(mask, (2, 1, 1, 1)),
        return_lse=True,
    )
    swapped = [array.swapaxes(0, 1).copy().swapaxes(0, 1) for array in (q, k, v)]
    around = cupy.full((2, 3, 20, 4, 66), np.nan, dtype)
    for target in (None, cupy.empty_like(q), around[..., 1:65]):
        out, lse = cuattn.flash_attention(*swapped, mask=mask, return_lse=True, out=target)
        assert target is None or out is target
        assert (out.reshape(expected.shape) == expected).all()
        assert (lse.reshape(expected_lse.shape) == expected_lse).all()
