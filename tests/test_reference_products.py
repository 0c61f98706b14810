"""Products of stacks of matrices, and what they are packed into."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from cuattn.reference import products

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_any_shape(rng, dtype):
    for rows, inner, columns in itertools.product(
        (1, 7, 8, 33, 70), (1, 65, 600), (1, 63, 64, 200)
    ):
        a = rng.integers(-3, 4, (2, rows, inner)).astype(dtype)
        b = rng.integers(-3, 4, (2, inner, columns)).astype(dtype)
        out = np.full((2, rows, columns), np.nan, dtype)
        products.matmul(a, b, out=out)
        np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("given", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_packed_keys_and_values(rng, dtype, given):
    for heads, seqlen, head_dim, head_dim_v in ((1, 1, 1, 1), (3, 64, 16, 7), (2, 700, 65, 40)):
        k, v = (
            rng.standard_normal((heads, seqlen, d)).astype(given) for d in (head_dim, head_dim_v)
        )
        room = products.Room(products.packed_size(k, v), np.dtype(dtype))
        panels, values, norms = products.pack(k, v, room)
        assert panels.ctypes.data % 64 == values.ctypes.data % 64 == 0
        np.testing.assert_array_equal(values, v.astype(dtype))
        wide = k.astype(dtype)
        np.testing.assert_allclose(norms, np.sqrt((wide**2).sum(axis=2).max(axis=1)), rtol=1e-6)
        a = np.eye(head_dim + 1, dtype=dtype)[None].repeat(heads, axis=0)
        out = np.empty((heads, head_dim + 1, seqlen), dtype)
        products.matmul_panels(a, panels, out=out)
        np.testing.assert_array_equal(out[:, :-1], wide.swapaxes(1, 2))
        assert (out[:, -1] == 1).all()
