"""multi_head_attention on NumPy arrays: projections, heads and options by the plain formula."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests.formulas import DTYPES, assert_accurate, attention
from tests.test_positions import formula as rotate


def weights(
    rng: np.random.Generator,
    features: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dim_v: int,
    context: int | None = None,
) -> dict[str, np.ndarray]:
    """Random weights and biases, which keep numbers near 1."""
    context = features if context is None else context
    shapes = {
        "q": (features, heads * dim),
        "k": (context, kv_heads * dim),
        "v": (context, kv_heads * dim_v),
        "o": (heads * dim_v, features),
    }
    made = {}
    for name, (rows, columns) in shapes.items():
        made[f"w{name}"] = rng.standard_normal((rows, columns)) / np.sqrt(rows)
        made[f"b{name}"] = rng.standard_normal(columns) / 4
    return made


def formula(
    x: np.ndarray,
    *,
    heads: int,
    kv_heads: int,
    context: np.ndarray | None = None,
    rope: dict[str, Any] | None = None,
    precision: Any = np.float64,
    **rest: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, (batch, seqlen, features) and (batch, heads, seqlen); each step rounded to
    `precision`."""
    precision = np.dtype(precision)
    dtype = np.float32 if precision.itemsize < 4 else precision.type
    w = {n: rest.pop(n).astype(dtype) for n in list(rest) if re.fullmatch("[wb][qkvo]", n)}

    def project(array: np.ndarray, name: str) -> np.ndarray:
        product = (array.astype(dtype) @ w[f"w{name}"]).astype(precision).astype(dtype)
        return (product + w[f"b{name}"]).astype(precision)

    source = x if context is None else context
    q, k, v = (
        project(array, name).reshape(*array.shape[:2], count, -1)
        for array, name, count in (
            (x, "q", heads),
            (source, "k", kv_heads),
            (source, "v", kv_heads),
        )
    )
    if rope is not None:
        rope = {"positions": np.arange(x.shape[1]), **rope}
        q, k = (rotate(array, **rope, precision=precision.type) for array in (q, k))
    out, lse = attention(q, k, v, **rest, precision=precision)
    return project(out.reshape(*x.shape[:2], -1), "o"), lse


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"kv_heads": 2, "window": (3, None), "softcap": 5.0},
    "rope": {"rope": {}, "causal": True},
    "scaled": {"rope": {"base": 500.0, "scaling": {"rope_type": "linear", "factor": 2.0}}},
    "cross": {"context": (2, 11, 24), "kv_heads": 1},
}


def case(
    rng: np.random.Generator, name: str, dtype: Any, tokens: int = 9
) -> tuple[np.ndarray, dict[str, Any]]:
    """x and keywords of a case, in `dtype`."""
    options = {"heads": 4, "kv_heads": 4, **CASES[name]}
    x = rng.standard_normal((2, tokens, 32)).astype(dtype)
    context = options.pop("context", None)
    if context is not None:
        options["context"] = rng.standard_normal(context).astype(dtype)
    made = weights(rng, 32, 4, options["kv_heads"], 16, 8, context[2] if context else None)
    return x, options | {key: array.astype(dtype) for key, array in made.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_formula(rng, name, dtype):
    x, options = case(rng, name, dtype, tokens=48)
    out, lse = cuattn.multi_head_attention(x, **options, return_lse=True)
    assert out.dtype == dtype
    exact, exact_lse = formula(x, **options, precision=np.longdouble)
    plain, plain_lse = formula(x, **options, precision=dtype)
    assert_accurate(out, exact, plain)
    # The largest error is that of one score, the product of a rounded query and a rounded key:
    # luck decides how exact it is in the plain formula. Of all rows together it does not.
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert_accurate(lse, exact_lse, plain_lse, slack=4 * unit * np.abs(exact_lse).max())
    ours, usual = (np.linalg.norm(np.float64(x - exact_lse)) for x in (lse, plain_lse))
    few_units = 4 * float(np.finfo(lse.dtype).eps) * np.linalg.norm(np.float64(exact_lse))
    assert ours <= 1.2 * usual + few_units


def test_any_leading_axes_and_out(rng):
    x, options = case(rng, "rope", np.float32)
    expected = cuattn.multi_head_attention(x, **options)
    np.testing.assert_allclose(cuattn.multi_head_attention(x[1], **options), expected[1], atol=1e-5)
    deep = np.stack([x, x[::-1]])
    out = np.empty_like(deep)
    assert cuattn.multi_head_attention(deep, **options, out=out) is out
    np.testing.assert_allclose(out[1], expected[::-1], atol=1e-5)
    positions = np.arange(9) + 50  # scores depend on distances alone
    moved = cuattn.multi_head_attention(x, **options | {"rope": {"positions": positions}})
    np.testing.assert_allclose(moved, expected, atol=1e-5)


def test_torchs(rng):
    torch = pytest.importorskip("torch")
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        layer.in_proj_bias.uniform_()
        expected, _ = layer(x, x, x, need_weights=False)
    wq, wk, wv = layer.in_proj_weight.detach().T.split(32, dim=1)
    bq, bk, bv = layer.in_proj_bias.detach().split(32)
    wo, bo = layer.out_proj.weight.detach().T, layer.out_proj.bias.detach()
    out = cuattn.multi_head_attention(x, wq, wk, wv, wo, heads=4, bq=bq, bk=bk, bv=bv, bo=bo)
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-5)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


RIGHT = {
    **{"x": zeros(2, 5, 6), "wq": zeros(6, 8), "wk": zeros(6, 4), "wv": zeros(6, 2)},
    **{"wo": zeros(4, 3), "heads": 4, "kv_heads": 2},
}
ERRORS = [
    ({"x": None}, TypeError, "x must be a NumPy or CuPy array, got None"),
    ({"x": zeros(6)}, ValueError, "x has shape (6,), must be (..., seqlen, features)"),
    ({"x": zeros(2, 5, 6, dtype=int)}, TypeError, "x has dtype int64, must be one of float16"),
    ({"heads": 0}, ValueError, "heads is 0, must be at least 1"),
    ({"heads": 4.0}, TypeError, "heads must be an integer, got 4.0"),
    ({"x": zeros(2, 5, 0)}, ValueError, "x has shape (2, 5, 0), must have at least 1 feature"),
    ({"kv_heads": 3}, ValueError, "kv_heads is 3, which must divide heads, 4"),
    (
        {"wq": zeros(5, 8)},
        ValueError,
        "wq has shape (5, 8), must be (6, heads * head_dim) for 4 heads",
    ),
    (
        {"wq": zeros(8, 6)},
        ValueError,
        "wq has shape (8, 6), must be (6, heads * head_dim) for 4 heads; wq.T where weights are "
        "torch's",
    ),
    (
        {"wq": zeros(6, 9)},
        ValueError,
        "wq has shape (6, 9), must be (6, heads * head_dim) for 4 heads",
    ),
    # Turned round it would be no better.
    (
        {"wq": zeros(6, 6)},
        ValueError,
        "wq has shape (6, 6), must be (6, heads * head_dim) for 4 heads$",
    ),
    (
        {"wq": zeros(6, 0), "wk": zeros(6, 0)},
        ValueError,
        "wq has shape (6, 0), must be (6, heads * head_dim) for 4 heads",
    ),
    ({"wk": zeros(6, 6)}, ValueError, "wk has shape (6, 6), must have kv_heads * head_dim = 2 * 2"),
    ({"wv": zeros(6, 2, dtype=float)}, TypeError, "wv has dtype float64, must be x's float32"),
    ({"wo": zeros(5, 3)}, ValueError, "wo has shape (5, 3), must be (4, out_features)"),
    ({"bv": zeros(4)}, ValueError, "bv has shape (4,), must be (2,)"),
    ({"bo": zeros(3, dtype=float)}, TypeError, "bo has dtype float64, must be x's float32"),
    (
        {"context": zeros(3, 7, 6)},
        ValueError,
        "context has shape (3, 7, 6), whose leading axes must be x's (2,)",
    ),
    ({"context": zeros(2, 7, 6), "rope": {}}, ValueError, "rope must be None where context is"),
    ({"rope": True}, TypeError, "rope must be a dict of rope's keywords or None, got True"),
    ({"rope": {"theta": 1e4}}, TypeError, "rope has 'theta', may have positions, base, rotary_dim"),
    ({"out": zeros(2, 5, 6)}, ValueError, "out has shape (2, 5, 6), must be (2, 5, 3)"),
    ({"return_lse": "no"}, TypeError, "return_lse must be True or False, got 'no'"),
]


@pytest.mark.parametrize(("change", "kind", "message"), ERRORS, ids=lambda value: str(value)[:50])
def test_errors(change, kind, message):
    cuattn.multi_head_attention(**RIGHT)
    words = re.escape(f"multi_head_attention: {message}").replace(r"\$", "$")
    with pytest.raises(kind, match="^" + words):
        cuattn.multi_head_attention(**(RIGHT | change))
