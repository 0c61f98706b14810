"""Gradients with dropout against the formula in float64: forward and backward passes drop the same
entries as NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cuattn
from cuattn._spec import attention_spec
from cuattn.reference import dropout as reference_dropout
from tests import formulas
from tests.gpu.calls import DTYPES, Call, draw_call, normal, placed, precisions
from tests.gpu.gradient_calls import HALF, assert_alike, check_aligned, drop, judge
from tests.gpu.test_dropout import factors

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_workspaces")]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_dropout(dtype, number, rng):
    """Forward and backward drop the same entries, whatever else a call has."""
    call = draw_call(rng, DTYPES[dtype])
    z = drop(call, rng)
    of_formula = {n: o for n, o in call.options.items() if n not in ("dropout", "seed")}
    arrays, options = call.on_device()
    out, lse = cuattn.flash_attention(*arrays, **options, return_lse=True)
    exact_type, _ = precisions(call.q.dtype)
    exact, _ = formulas.attention(call.q, call.k, call.v, z=z, precision=exact_type, **of_formula)
    plain, _ = formulas.attention(call.q, call.k, call.v, z=z, precision=call.q.dtype, **of_formula)
    formulas.assert_gradients_accurate(out.get(), exact, plain)
    dout = normal(rng, out.shape, call.q.dtype)
    on_device = placed(dout, rng)
    grads = cuattn.flash_attention_backward(on_device, *arrays, out, lse, **options)
    wanted = {n: o for n, o in of_formula.items() if n not in ("bias", "alibi_slopes")}
    if wanted.keys() == of_formula.keys():
        judge(grads, out.get(), dout, call, z=z, **of_formula)
    else:  # with what was not asked for left out
        asked = cuattn.flash_attention_backward(
            on_device, *arrays, out, lse, grad_bias="bias" in options,
            grad_alibi="alibi_slopes" in options, **options,
        )  # fmt: skip
        judge(asked, out.get(), dout, call, z=z, **of_formula)
        for name in ("dq", "dk", "dv"):  # dq may be summed in any order
            a, b = (getattr(given, name) for given in (grads, asked))
            assert_alike(a, b, bits=name != "dq")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 20)}], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_common_gradients_with_dropout(backward_tier, dtype, options, head_dim, rng):
    """The calls that a tier is made for, with more than one tile of queries and of keys."""
    q = normal(rng, (2, 333, 4, head_dim), DTYPES[dtype])
    k, v = (normal(rng, (2, 450, 2, head_dim), DTYPES[dtype]) for _ in "kv")
    call = Call(q, k, v, dict(options), rng)
    check_aligned(call, drop(call, rng))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlens", [(1, 1), (130, 250), (200, 65)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_drop_what_numpy_drops(backward_tier, dtype, seqlens, head_dim, rng):
    """Scores and statistics of 0, with which p is 1, and rows that show what is left of it: the
    mask, bit for bit."""
    dtype = DTYPES[dtype]
    seqlen_q, seqlen_k = seqlens
    shape_q, shape_k = (2, seqlen_q, 6, head_dim), (2, seqlen_k, 3, head_dim)
    zeros_q, zeros_k = np.zeros(shape_q, dtype), np.zeros(shape_k, dtype)
    options = {"dropout": float(rng.uniform(0.05, 0.8)), "seed": int(rng.integers(2**63))}
    z = factors(zeros_q, zeros_k, zeros_k, options)
    statistics = zeros_q, np.zeros((2, 6, seqlen_q), np.float64 if dtype.itemsize == 8 else "f4")

    def gradients(*arrays):
        given = [cupy.asarray(a) for a in (*arrays, *statistics)]
        return cuattn.flash_attention_backward(*given, scale=1.0, **options)

    for first in range(0, seqlen_q, head_dim):  # queries, of which each has a feature of its own
        queries = np.arange(first, min(first + head_dim, seqlen_q))
        q = zeros_q.copy()
        q[:, queries, :, queries - first] = 1
        grads = gradients(q, q, zeros_k, np.ones_like(zeros_k))
        kept = (z != 0)[:, :, queries].reshape(2, 3, 2, len(queries), seqlen_k).sum(2)
        for grad in (grads.dk, grads.dv):
            counts = np.rint(grad.get().astype(np.float32) * (1 - options["dropout"]))
            np.testing.assert_array_equal(counts[..., : len(queries)], kept.transpose(0, 3, 1, 2))
    ones = np.zeros_like(zeros_q), np.zeros_like(zeros_k)
    for array in ones:
        array[..., 0] = 1
    for first in range(0, seqlen_k, head_dim):
        keys = np.arange(first, min(first + head_dim, seqlen_k))
        k = zeros_k.copy()
        k[:, keys, :, keys - first] = 1
        dq = gradients(ones[0], zeros_q, k, ones[1]).dq.get()
        expected = z.swapaxes(1, 2)[..., keys] != 0
        np.testing.assert_array_equal(dq[..., : len(keys)] != 0, expected)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", HALF)
def test_ragged_gradients_with_dropout(backward_tier, dtype, head_dim, rng):
    """Positions count within sequences, and heads over all of them."""
    cu = np.array([0, 30, 30, 230, 329], np.int32)
    q, dout = (normal(rng, (329, 4, head_dim), DTYPES[dtype]) for _ in "qo")
    k, v = (normal(rng, (329, 2, head_dim), DTYPES[dtype]) for _ in "kv")
    options = {"dropout": 0.5, "seed": int(rng.integers(2**63))}
    arrays = [cupy.asarray(a) for a in (q, k, v)]
    ends = cupy.asarray(cu)
    out, lse = cuattn.flash_attention_varlen(*arrays, ends, causal=True, return_lse=True, **options)
    grads = cuattn.flash_attention_varlen_backward(
        cupy.asarray(dout), *arrays, out, lse, ends, causal=True, **options
    )
    spec = attention_spec(
        "flash_attention_varlen",
        *(a.shape for a in (q, k, v)),
        *[DTYPES[dtype]] * 3,
        dropout=options["dropout"],
        sequences=len(cu) - 1,
    )
    for b, (first, end) in enumerate(itertools.pairwise(cu)):
        if first == end:
            continue
        rows, count = slice(first, end), int(end - first)
        z = reference_dropout.factors(
            spec, options["seed"], b, *(slice(0, n) for n in (4, count, count))
        )
        one = Call(*(a[None, rows] for a in (q, k, v)), {"causal": True}, rng)
        mine = cuattn.AttentionGrads(*(g[None, rows] for g in grads[:3]))
        given = {"lse": lse[None, :, rows].get(), "z": z[None]}
        judge(mine, out[None, rows].get(), dout[None, rows], one, causal=True, **given)
