"""Dropout of the forward kernels, tier by tier: the mask, bit for bit, and results."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.reference import dropout
from tests import formulas
from tests.gpu.calls import (
    DTYPES,
    Call,
    assert_accurate,
    check,
    draw_call,
    normal,
    precisions,
)

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

TIERS = ["forward_sm90", "forward_sm80", "forward_simt"]


@pytest.fixture(params=TIERS)
def tier(request):
    """Each tier, which leaves what it does not serve to those below it."""
    with dispatch.use_tiers(*TIERS[TIERS.index(request.param) :]):
        yield request.param


def factors(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """What dropout multiplies the probabilities of a call by."""
    spec = attention_spec(
        "flash_attention",
        *(a.shape for a in (q, k, v)),
        *(a.dtype for a in (q, k, v)),
        dropout=options["dropout"],
    )
    everything = [slice(0, n) for n in (spec.heads_q, spec.seqlen_q, spec.seqlen_k)]
    return np.stack(
        [dropout.factors(spec, options["seed"], b, *everything) for b in range(spec.batch)]
    )


def draw_seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**63)) * 2 + 1


class DropoutCall(Call):
    """A call whose probabilities are multiplied as `factors` says."""

    def expected(self, *cu_seqlens: np.ndarray) -> list[list[np.ndarray]]:
        exact, plain = precisions(self.q.dtype)
        options = {n: o for n, o in self.options.items() if n not in ("dropout", "seed")}
        z = factors(self.q, self.k, self.v, self.options)
        results = [
            formulas.attention(self.q, self.k, self.v, z=z, precision=precision, **options)
            for precision in (exact, plain)
        ]
        return [list(result) for result in zip(*results, strict=True)]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlens", [(1, 1), (130, 250), (333, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_drops_what_numpy_drops(tier, dtype, seqlens, head_dim, rng):
    """Values that show which keys are left: the mask, bit for bit."""
    dtype = DTYPES[dtype]
    seqlen_q, seqlen_k = seqlens
    q = np.zeros((2, seqlen_q, 6, head_dim), dtype)
    k = np.zeros((2, seqlen_k, 3, head_dim), dtype)
    options = {"dropout": float(rng.uniform(0.05, 0.95)), "seed": draw_seed(rng)}
    for first in range(0, seqlen_k, head_dim):  # keys that have a value
        v = np.zeros((2, seqlen_k, 3, head_dim), dtype)
        keys = np.arange(first, min(first + head_dim, seqlen_k))
        v[:, keys, :, keys - first] = 1
        out = cuattn.flash_attention(*(cupy.asarray(a) for a in (q, k, v)), **options)
        expected = factors(q, k, v, options).swapaxes(1, 2)[..., keys] != 0
        np.testing.assert_array_equal(out.get()[..., : len(keys)] != 0, expected)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (100, 20)}, {"softcap": 5.0, "causal": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_calls_with_dropout(tier, dtype, options, head_dim, rng):
    """The calls that a tier is made for, with more keys than one tile of any kernel has, and more
    tiles than a device has multiprocessors (but for float64, whose formula in longdouble is slow).
    """
    batch, group = (1, 1) if dtype == "float64" else (3, 4)
    q = normal(rng, (batch, 333, 4 * group, head_dim), DTYPES[dtype])
    k, v = (normal(rng, (batch, 450, 4, head_dim), DTYPES[dtype]) for _ in "kv")
    check(DropoutCall(q, k, v, {**options, "dropout": 0.3, "seed": draw_seed(rng)}, rng))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3000, 20)}], ids=str)
def test_dropout_of_many_keys(options, head_dim, rng):
    """More keys than those whose masks forward_sm90 computes together."""
    q = normal(rng, (1, 200, 2, head_dim), DTYPES["bfloat16"])
    k, v = (normal(rng, (1, 4500, 1, head_dim), DTYPES["bfloat16"]) for _ in "kv")
    check(DropoutCall(q, k, v, {**options, "dropout": 0.3, "seed": draw_seed(rng)}, rng))


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_contract_with_dropout(tier, dtype, number, rng):
    call = draw_call(rng, DTYPES[dtype])
    call.options |= {"dropout": float(rng.uniform(0.05, 0.8)), "seed": draw_seed(rng)}
    check(DropoutCall(call.q, call.k, call.v, call.options, rng))


@pytest.mark.parametrize("head_dim", [32, 64, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_of_ragged_sequences(tier, dtype, head_dim, rng):
    """Positions count within sequences, and heads over all of them."""
    cu = np.array([0, 30, 30, 330, 459], np.int32)
    dtype = DTYPES[dtype]
    q, k, v = (normal(rng, (459, heads, head_dim), dtype) for heads in (4, 2, 2))
    options = {"dropout": 0.5, "seed": draw_seed(rng), "causal": True}
    out, lse = cuattn.flash_attention_varlen(
        *(cupy.asarray(a) for a in (q, k, v)), cupy.asarray(cu), **options, return_lse=True
    )
    spec = attention_spec(
        "flash_attention_varlen",
        *(a.shape for a in (q, k, v)),
        *[dtype] * 3,
        dropout=0.5,
        sequences=len(cu) - 1,
    )
    for b, (first, end) in enumerate(itertools.pairwise(cu)):
        if first == end:
            continue
        rows, count = slice(first, end), int(end - first)
        everything = slice(0, 4), slice(0, count), slice(0, count)
        z = dropout.factors(spec, options["seed"], b, *everything)[None]
        wanted = [
            formulas.attention(
                *(a[None, rows] for a in (q, k, v)), z=z, precision=precision, causal=True
            )
            for precision in precisions(dtype)
        ]
        results, lses = zip(*wanted, strict=True)
        assert_accurate(out[rows].get(), *(result[0] for result in results))
        assert_accurate(lse[:, rows].get(), *(each[0] for each in lses))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_dropped_value_is_not_seen(tier, causal, head_dim, rng):
    """Neither NaN nor an infinity reaches a query for which it is dropped."""
    q, k, v = (normal(rng, (2, n, 2, head_dim), DTYPES["float16"]) for n in (200, 300, 300))
    for value in (np.nan, np.inf, -np.inf, np.nan):
        v[rng.integers(2), rng.integers(300), rng.integers(2), rng.integers(head_dim)] = value
    options = {"dropout": 0.5, "seed": draw_seed(rng), "causal": causal}
    out = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), **options).get()
    expected = cuattn.flash_attention(q, k, v, **options)
    finite = np.isfinite(expected)
    assert not finite.all()
    np.testing.assert_array_equal(out[~finite], expected[~finite])
    np.testing.assert_allclose(out[finite], expected[finite], atol=4e-3)
