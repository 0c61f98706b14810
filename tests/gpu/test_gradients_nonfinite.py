"""Gradients where inputs or scores are not finite: what is hidden may hold anything, and a row that
sees no key has no gradient."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests.gpu.calls import DTYPES, normal
from tests.gpu.gradient_calls import assert_alike

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_workspaces")]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_keys_may_hold_anything(backward_tier, dtype, softcap, poison, deterministic, rng):
    dtype = DTYPES[dtype]
    q, dout = (normal(rng, (1, 140, 2, 64), dtype) for _ in "qo")
    k, v = (normal(rng, (1, 200, 1, 64), dtype) for _ in "kv")
    mask = np.arange(200) % 3 != 1
    options = {"mask": cupy.asarray(mask), "causal": True, "softcap": softcap}
    q, dout = cupy.asarray(q), cupy.asarray(dout)
    results = []
    for _ in range(2):
        arrays = q, cupy.asarray(k), cupy.asarray(v)
        _, pullback = cuattn.flash_attention_vjp(*arrays, deterministic=deterministic, **options)
        results.append(pullback(dout))
        k[:, ~mask], v[:, ~mask] = poison, poison
    for name, clean, poisoned in zip(("dq", "dk", "dv"), *results, strict=False):
        in_order = name != "dq" or deterministic
        assert_alike(clean, poisoned, bits=in_order)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_queries_may_hold_anything(backward_tier, dtype, rng):
    """A query that is NaN leaves alone what only other queries see."""
    dtype = DTYPES[dtype]
    q, k, v, dout = (cupy.asarray(normal(rng, (1, 100, 1, 64), dtype)) for _ in "qkvo")
    window = (3, 0)
    _, pullback = cuattn.flash_attention_vjp(q, k, v, window=window)
    clean = pullback(dout)
    q[:, 90:] = np.nan
    _, pullback = cuattn.flash_attention_vjp(q, k, v, window=window)
    spoilt = pullback(dout)
    for name, end in (("dq", 90), ("dk", 87), ("dv", 87)):
        c, s = (getattr(gradients, name) for gradients in (clean, spoilt))
        assert_alike(c[:, :end], s[:, :end], bits=backward_tier == "simt" and name != "dq")
        assert np.isnan(s[:, 92:].get()).all()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_key_may_hold_anything(backward_tier, dtype, dropout, rng):
    """A key that is NaN leaves alone the queries that do not see it."""
    dtype = DTYPES[dtype]
    q, k, v, dout = (cupy.asarray(normal(rng, (1, 100, 1, 64), dtype)) for _ in "qkvo")
    options = {"window": (20, 0), "dropout": dropout, "seed": 5}
    clean = cuattn.flash_attention_vjp(q, k, v, **options)[1](dout)
    k[:, -1] = np.nan
    spoilt = cuattn.flash_attention_vjp(q, k, v, **options)[1](dout)
    for name, end in (("dq", 99), ("dk", 79), ("dv", 79)):
        c, s = (getattr(gradients, name) for gradients in (clean, spoilt))
        assert_alike(c[:, :end], s[:, :end], bits=False)
        # Of dv the only query that sees the key may be dropped.
        assert np.isnan(s[:, 99:].get()).all() or (name == "dv" and dropout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_no_key_have_no_gradient(backward_tier, dtype, rng):
    dtype = DTYPES[dtype]
    q, dout = (cupy.asarray(normal(rng, (1, 150, 2, 32), dtype)) for _ in "qo")
    k, v = (cupy.asarray(normal(rng, (1, 50, 1, 32), dtype)) for _ in "kv")
    _, pullback = cuattn.flash_attention_vjp(q, k, v, causal=True)
    grads = pullback(dout)
    assert bool((grads.dq[:, :100] == 0).all())
    assert bool((grads.dq[:, 100:] != 0).any())
    mask = cupy.zeros((1, 1, 1, 1), bool)
    _, pullback = cuattn.flash_attention_vjp(q, k, v, mask=mask)
    assert all(bool((g == 0).all()) for g in pullback(dout)[:3])


def test_very_low_scores(rng):
    """exp(0 - lse) of keys past the last one would be infinite."""
    q, dout = (cupy.asarray(normal(rng, (1, 1, 1, 64), np.dtype(np.float32))) for _ in "qo")
    k, v = (cupy.asarray(normal(rng, (1, 192, 1, 64), np.dtype(np.float32))) for _ in "kv")
    bias = cupy.full((1,), -120, np.float32)
    _, pullback = cuattn.flash_attention_vjp(q, k, v, bias=bias, mask=cupy.ones(192, bool))
    assert all(bool(cupy.isfinite(g).all()) for g in pullback(dout)[:3])
