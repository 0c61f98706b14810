"""Gradient kernels and dropout against the formula in float64: what they compute, and what they
leave alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.reference import dropout as reference_dropout
from tests import formulas
from tests.gpu.calls import (
    DTYPES,
    HEAD_DIMS,
    SEQLENS,
    Call,
    draw_call,
    draw_options,
    normal,
    placed,
    precisions,
)
from tests.gpu.test_dropout import factors

cupy = pytest.importorskip("cupy")

HALF = ["float16", "bfloat16"]
TIERS = ("sm90", "sm80", "simt")  # fastest first

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned_workspaces(monkeypatch):
    """What kernels write for each other begins as NaN."""
    from cuattn.gpu import gradients

    allocate = gradients.scratch_array

    def poisoned(shape, dtype):
        array = allocate(shape, dtype)
        array[...] = np.nan
        return array

    monkeypatch.setattr(gradients, "scratch_array", poisoned)


@pytest.fixture(params=TIERS)
def tier(request):
    """Each tier of the backward pass: calls reach it, and what it leaves goes to those below it."""
    below = TIERS[TIERS.index(request.param) :]
    with dispatch.use_tiers(*(f"backward_{name}" for name in below)):
        yield request.param


def drop(call: Call, rng: np.random.Generator) -> np.ndarray:
    """Give a call dropout; what it multiplies the probabilities by."""
    call.options |= {"dropout": float(rng.uniform(0.05, 0.8)), "seed": int(rng.integers(2**63))}
    return factors(call.q, call.k, call.v, call.options)


def check(call: Call) -> None:
    """Compare every gradient of a call with the formula's."""
    rng, dtype = call.rng, call.q.dtype
    z = drop(call, rng) if rng.random() < 0.3 and call.q.size and call.k.size else None
    of_formula = {n: o for n, o in call.options.items() if n not in ("dropout", "seed")}
    of_formula["z"] = z
    arrays, options = call.on_device()
    out, lse = cuattn.flash_attention(*arrays, **options, return_lse=True)
    dout = normal(rng, out.shape, dtype)
    dlse = normal(rng, lse.shape, np.dtype(lse.dtype)) if rng.random() < 0.5 else None
    out = placed(out.get(), rng)
    grads = cuattn.flash_attention_backward(
        placed(dout, rng),
        *arrays,
        out,
        lse,
        dlse=None if dlse is None else cupy.asarray(dlse),
        grad_bias="bias" in options,
        grad_alibi="alibi_slopes" in options,
        **options,
    )
    judge(grads, out.get(), dout, call, lse=lse.get(), dlse=dlse, **of_formula)


def judge(
    grads: cuattn.AttentionGrads,
    out: np.ndarray,
    dout: np.ndarray,
    call: Call,
    lse: np.ndarray | None = None,
    **options: Any,
) -> None:
    exact_type, _ = precisions(call.q.dtype)
    inputs = dout, call.q, call.k, call.v
    cancelled: dict[str, float] = {}
    exact = formulas.attention_gradients(
        *inputs, precision=exact_type, cancelled=cancelled, **options
    )
    plain = formulas.plain_gradients(*inputs, lse=lse, **options)
    by_roundings = formulas.sums_by_roundings(
        exact, *inputs, out=out, lse=lse, precision=exact_type, **options
    )
    for name, expected in exact.items():
        actual = getattr(grads, name).get()
        assert actual.shape == expected.shape, name
        assert np.isfinite(actual).all(), name
        if name in by_roundings:
            actual = (actual - by_roundings[name]).astype(actual.dtype)
        try:
            formulas.assert_gradients_accurate(
                actual, expected, *plain[name], inputs=call.q.dtype, lse=lse,
                cancelled=cancelled.get(name, 0.0),
            )  # fmt: skip
        except AssertionError as error:
            shapes = [a.shape for a in (call.q, call.k, call.v)]
            raise AssertionError(f"{name}: {error}; {shapes}, {sorted(call.options)}") from None


def judge_varlen(
    grads: list[np.ndarray | None],
    out: np.ndarray,
    lse: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None,
    sequences: list[tuple],
    own_slopes: bool,
) -> None:
    """Judge gradients of sequences end to end: each has its rows, its keys, q, k, v and options of
    the formula. Sums over all of them are judged by the sums of the formula's, and dalibi so unless
    each has `own_slopes`."""
    dq, dk, dv, _, dsinks, dalibi = grads
    dtype = dout.dtype
    exact_type, _ = precisions(dtype)
    summed: dict[str, list] = {}
    for b, (rows, keys, q, k, v, options) in enumerate(sequences):
        inputs = dout[None, rows], q[None], k[None], v[None]
        more = {"dlse": None if dlse is None else dlse[None, :, rows], **options}
        cancelled: dict[str, float] = {}
        exact = formulas.attention_gradients(
            *inputs, precision=exact_type, cancelled=cancelled, **more
        )
        given = lse[None, :, rows]
        plain = formulas.plain_gradients(*inputs, lse=given, **more)
        by_roundings = formulas.sums_by_roundings(
            exact, *inputs, out=out[None, rows], lse=given, precision=exact_type, **more
        )
        for name, actual in (("dq", dq[rows]), ("dk", dk[keys]), ("dv", dv[keys])):
            formulas.assert_gradients_accurate(
                actual[None], exact[name], *plain[name], inputs=dtype, lse=given,
                cancelled=cancelled.get(name, 0.0),
            )  # fmt: skip
        for name in ("dsinks", "dalibi"):
            if name not in exact:
                continue
            if name == "dalibi" and own_slopes:
                actual = (dalibi[b] - by_roundings[name]).astype(dalibi.dtype)
                formulas.assert_gradients_accurate(
                    actual, exact[name], *plain[name], inputs=dtype,
                    cancelled=cancelled.get(name, 0.0),
                )  # fmt: skip
            else:
                parts = exact[name], plain[name], by_roundings[name], cancelled.get(name, 0.0)
                summed.setdefault(name, []).append(parts)
    for name, parts in summed.items():
        exacts, plains, roundings, sizes = zip(*parts, strict=True)
        actual = dsinks if name == "dsinks" else dalibi
        actual = (actual - sum(roundings)).astype(actual.dtype)
        # Of a long sequence there are fewer orders; the last of all is as a backward pass does.
        fewest = min(map(len, plains))
        orders = [sum(p[n] for p in plains) for n in range(-fewest, 0)]
        formulas.assert_gradients_accurate(
            actual, sum(exacts), *orders, inputs=dtype, cancelled=float(np.linalg.norm(sizes))
        )


@pytest.mark.parametrize("number", range(16))
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_contract(dtype, number, rng):
    check(draw_call(rng, DTYPES[dtype]))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 160)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_calls(dtype, causal, head_dims, rng):
    """More queries and keys than one tile of any kernel has."""
    q = normal(rng, (2, 233, 4, head_dims[0]), DTYPES[dtype])
    k, v = (normal(rng, (2, 250, 2, d), DTYPES[dtype]) for d in head_dims)
    check(Call(q, k, v, {"causal": causal}, rng))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 5)}])
@pytest.mark.parametrize("head_dim", [40, 100, 200])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_plain_scores_without_tensor_cores(dtype, head_dim, options, rng):
    q = normal(rng, (2, 150, 4, head_dim), DTYPES[dtype])
    k, v = (normal(rng, (2, 170, 2, d), DTYPES[dtype]) for d in (head_dim, head_dim - 7))
    check_aligned(Call(q, k, v, dict(options), rng))


def draw_aligned(rng: np.random.Generator, dtype: np.dtype, **options: Any) -> Call:
    """A call whose rows are whole chunks of 16 bytes, as tensor core kernels want them."""
    batch, heads_kv, group = (int(rng.integers(1, high)) for high in (3, 3, 5))
    seqlen_q, seqlen_k = (int(rng.choice(SEQLENS)) for _ in "qk")
    head_dim = int(rng.choice([n for n in HEAD_DIMS if n % 8 == 0]))
    head_dim_v = head_dim if rng.random() < 0.5 else int(rng.choice([64, 128, 256]))
    return Call(
        normal(rng, (batch, seqlen_q, heads_kv * group, head_dim), dtype),
        normal(rng, (batch, seqlen_k, heads_kv, head_dim), dtype),
        normal(rng, (batch, seqlen_k, heads_kv, head_dim_v), dtype),
        options or draw_options(rng, heads_kv * group, batch, dtype),
        rng,
    )


def check_aligned(call: Call, z: np.ndarray | None = None, *, deterministic: bool = False) -> None:
    """Compare every gradient of a call on contiguous arrays with the formula's."""
    of_formula = {n: o for n, o in call.options.items() if n not in ("dropout", "seed")}
    options = {
        n: cupy.asarray(o) if isinstance(o, np.ndarray) else o for n, o in call.options.items()
    }
    arrays = [cupy.asarray(a) for a in (call.q, call.k, call.v)]
    out, pullback = cuattn.flash_attention_vjp(
        *arrays,
        deterministic=deterministic,
        grad_bias="bias" in options,
        grad_alibi="alibi_slopes" in options,
        **options,
    )
    dout = normal(call.rng, out.shape, call.q.dtype)
    judge(pullback(cupy.asarray(dout)), out.get(), dout, call, z=z, **of_formula)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("dtype", HALF)
def test_aligned(tier, dtype, number, rng):
    call = draw_aligned(rng, DTYPES[dtype])
    check_aligned(call, drop(call, rng) if number % 3 == 2 else None)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (100, 20)}],
    ids=["full", "causal", "window"],
)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", HALF)
def test_aligned_common_calls(tier, dtype, head_dims, options, rng):
    q = normal(rng, (2, 333, 4, head_dims[0]), DTYPES[dtype])
    k, v = (normal(rng, (2, 450, 2, d), DTYPES[dtype]) for d in head_dims)
    check_aligned(Call(q, k, v, dict(options), rng))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (100, 20)}, {"window": (None, -70)}],
    ids=["full", "causal", "window", "far"],
)
@pytest.mark.parametrize("seqlens", [(333, 450), (450, 333), (700, 700)])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (2, 2), (4, 1), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_aligned_deterministic_calls(tier, head_dim, heads, seqlens, options, rng):
    """Sums of dq in the order of keys, and a pass of its own for dq."""
    q = normal(rng, (1, seqlens[0], heads[0], head_dim), DTYPES["bfloat16"])
    k, v = (normal(rng, (1, seqlens[1], heads[1], head_dim), DTYPES["bfloat16"]) for _ in "kv")
    check_aligned(Call(q, k, v, dict(options), rng), deterministic=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_aligned_deterministic_calls_with_sinks(tier, head_dim, options, rng):
    """With sinks, and a gradient of lse."""
    q, dout = (normal(rng, (2, 300, 8, head_dim), DTYPES["bfloat16"]) for _ in "qo")
    k, v = (normal(rng, (2, 450, 8, head_dim), DTYPES["bfloat16"]) for _ in "kv")
    sinks, dlse = (normal(rng, shape, DTYPES["float32"]) for shape in ((8,), (2, 8, 300)))
    call = Call(q, k, v, {**options, "sinks": sinks}, rng)
    arrays, more = call.on_device()
    out, lse = cuattn.flash_attention(*arrays, **more, return_lse=True)
    given = cupy.asarray(dout), *arrays, out, lse
    grads = cuattn.flash_attention_backward(
        *given, dlse=cupy.asarray(dlse), deterministic=True, **more
    )
    judge(grads, out.get(), dout, call, lse=lse.get(), dlse=dlse, z=None, **call.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (100, 20)}, {"window": (None, -70)}],
    ids=["full", "causal", "window", "far"],
)
@pytest.mark.parametrize("seqlens", [(333, 450), (450, 333)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=str)
def test_aligned_wide_calls(heads, seqlens, options, rng):
    """Of 192 features with values of 128, alone and grouped: blocks of queries come in other orders
    then."""
    q = normal(rng, (2, seqlens[0], heads[0], 192), DTYPES["bfloat16"])
    k, v = (normal(rng, (2, seqlens[1], heads[1], d), DTYPES["bfloat16"]) for d in (192, 128))
    check_aligned(Call(q, k, v, dict(options), rng))


@pytest.mark.parametrize("dtype", HALF)
def test_aligned_bias_and_mask(tier, dtype, rng):
    q = normal(rng, (2, 130, 4, 64), DTYPES[dtype])
    k, v = (normal(rng, (2, 150, 2, 64), DTYPES[dtype]) for _ in "kv")
    options = {"bias": normal(rng, (4, 1, 150), DTYPES[dtype]), "causal": True}
    options["mask"] = rng.random((2, 1, 130, 150)) < 0.7
    check_aligned(Call(q, k, v, options, rng))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
def test_varlen(tier, dtype, number, rng):
    """Each sequence has its own gradients; rows of no sequence hold anything, and get 0."""
    if tier != "simt" and dtype not in HALF:
        pytest.skip("16-bit inputs only")
    place = placed if tier == "simt" else lambda array, rng: cupy.asarray(array)
    dtype = DTYPES[dtype]
    sequences, heads_kv, group = (int(rng.integers(1, high)) for high in (7, 3, 4))
    heads_q = heads_kv * group
    dims = HEAD_DIMS if tier == "simt" else [n for n in HEAD_DIMS if n % 8 == 0]
    head_dim, head_dim_v = (int(rng.choice(dims)) for _ in "kv")
    lengths = [rng.choice([0, *SEQLENS], sequences) for _ in "qk"]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in lengths)
    spare = int(rng.integers(0, 40))
    q = normal(rng, (cu_q[-1] + spare, heads_q, head_dim), dtype)
    k = normal(rng, (cu_k[-1] + spare, heads_kv, head_dim), dtype)
    v = normal(rng, (cu_k[-1] + spare, heads_kv, head_dim_v), dtype)
    dout = normal(rng, (cu_q[-1] + spare, heads_q, head_dim_v), dtype)
    for array, end in ((q, cu_q[-1]), (k, cu_k[-1]), (v, cu_k[-1]), (dout, cu_q[-1])):
        array[end:] = np.nan
    options = draw_options(rng, heads_q, sequences, dtype)
    call = Call(q, k, v, options, rng)
    arrays = [place(a, rng) for a in (q, k, v)]
    options = {n: cupy.asarray(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    ends = cupy.asarray(cu_q), cupy.asarray(cu_k)
    out, lse = cuattn.flash_attention_varlen(*arrays, *ends, **options, return_lse=True)
    dlse = normal(rng, lse.shape, np.dtype(lse.dtype))
    grads = cuattn.flash_attention_varlen_backward(
        place(dout, rng), *arrays, out, lse, *ends, dlse=cupy.asarray(dlse),
        grad_alibi="alibi_slopes" in options, **options,
    )  # fmt: skip
    assert bool((grads.dq[cu_q[-1] :] == 0).all())
    assert bool((grads.dk[cu_k[-1] :] == 0).all())
    assert bool((grads.dv[cu_k[-1] :] == 0).all())
    of_sequences = []
    for b in range(sequences):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        mine = dict(call.options)
        slopes = mine.get("alibi_slopes")
        if slopes is not None and slopes.ndim == 2:
            mine["alibi_slopes"] = slopes[b]
        of_sequences.append((rows, keys, q[rows], k[keys], v[keys], mine))
    own_slopes = np.ndim(call.options.get("alibi_slopes")) == 2
    on_host = [None if g is None else g.get() for g in grads]
    judge_varlen(on_host, out.get(), lse.get(), dout, dlse, of_sequences, own_slopes)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (90, 0)}], ids=str)
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("dtype", HALF)
def test_wide_sequences_alone_and_in_a_batch(dtype, heads_kv, options, rng):
    """Of 192 features with values of 128: dk and dv have the same bits, as only sums of dq depend
    on which blocks come first."""
    lengths = np.array([[0, 260, 1, 130, 65], [200, 300, 129, 0, 64]])
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in lengths)
    q, dout = (cupy.asarray(normal(rng, (456, 4, d), DTYPES[dtype])) for d in (192, 128))
    k, v = (cupy.asarray(normal(rng, (693, heads_kv, d), DTYPES[dtype])) for d in (192, 128))
    ends = cupy.asarray(cu_q), cupy.asarray(cu_k)
    out, lse = cuattn.flash_attention_varlen(q, k, v, *ends, **options, return_lse=True)
    grads = cuattn.flash_attention_varlen_backward(dout, q, k, v, out, lse, *ends, **options)
    for b in range(lengths.shape[1]):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        arrays = q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows]
        alone = cuattn.flash_attention_backward(dout[None, rows], *arrays, **options)
        assert grads.dk[keys].tobytes() == alone.dk.tobytes()
        assert grads.dv[keys].tobytes() == alone.dv.tobytes()
        mine, other = (np.asarray(x.get(), np.float32) for x in (grads.dq[rows], alone.dq[0]))
        np.testing.assert_allclose(mine, other, atol=2e-2, rtol=2e-2)


def test_many_sequences(rng):
    """More than a warp looks at in one step, of 1 to 130 tokens and of none."""
    lengths = rng.integers(0, 131, 200) * (rng.random(200) < 0.9)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v, dout = (normal(rng, (int(cu[-1]), 2, 32), np.dtype(np.float64)) for _ in "qkvo")
    out, lse = cuattn.flash_attention_varlen(q, k, v, cu, causal=True, return_lse=True)
    expected = cuattn.flash_attention_varlen_backward(dout, q, k, v, out, lse, cu, causal=True)
    arrays = [cupy.asarray(a) for a in (dout, q, k, v, out, lse, cu)]
    actual = cuattn.flash_attention_varlen_backward(*arrays, causal=True)
    for a, e in zip(actual[:3], expected[:3], strict=True):
        np.testing.assert_allclose(a.get(), e, atol=1e-11)


@pytest.mark.parametrize(
    "bias_shape",
    [(2, 4, 70, 90), (1, 4, 70, 90), (2, 1, 70, 90), (4, 1, 90), (70, 1), (90,), (1,), ()],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_bias_gradient_of_every_broadcast(dtype, bias_shape, rng):
    dtype = DTYPES[dtype]
    q = normal(rng, (2, 70, 4, 40), dtype)
    k, v = (normal(rng, (2, 90, 2, 40), dtype) for _ in "kv")
    check(Call(q, k, v, {"bias": normal(rng, bias_shape, dtype), "causal": True}, rng))


def test_empty(rng):
    for shape in [(0, 4, 4, 2, 1), (2, 0, 4, 2, 1), (2, 4, 0, 2, 1), (2, 3, 3, 0, 1)]:
        batch, seqlen_q, seqlen_k, heads_q, heads_kv = shape
        q = cupy.ones((batch, seqlen_q, heads_q, 8), np.float32)
        k = v = cupy.ones((batch, seqlen_k, heads_kv, 8), np.float32)
        sinks = cupy.ones(heads_q, np.float32)
        (out, lse), pullback = cuattn.flash_attention_vjp(q, k, v, sinks=sinks, return_lse=True)
        dlse = cupy.full(lse.shape, 3, np.float32)
        grads = pullback(out, dlse)
        assert all(bool((g == 0).all()) for g in grads[:3])
        assert [g.shape for g in grads[:3]] == [a.shape for a in (q, k, v)]
        expected = 3 * batch * seqlen_q if seqlen_k == 0 else 0  # all of lse is the sink's
        if not seqlen_k or not out.size:
            assert bool((grads.dsinks == expected).all())


def assert_alike(a, b, *, bits: bool) -> None:
    """Where one kernel repairs what another has summed in another order, they are close."""
    if bits:
        assert bool((a == b).all())
    else:
        a, b = (x.astype(np.float32).get() for x in (a, b))
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(a)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_keys_may_hold_anything(tier, dtype, softcap, poison, deterministic, rng):
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
def test_the_last_queries_may_hold_anything(tier, dtype, rng):
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
        assert_alike(c[:, :end], s[:, :end], bits=tier == "simt" and name != "dq")
        assert np.isnan(s[:, 92:].get()).all()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_key_may_hold_anything(tier, dtype, dropout, rng):
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
def test_rows_that_see_no_key_have_no_gradient(tier, dtype, rng):
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


@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_every_run_and_any_batch(tier, dtype, head_dim, heads, rng):
    """Hopper has two ways, by the number of heads."""
    heads_q, heads_kv = heads
    dtype = DTYPES[dtype]
    arrays = [
        cupy.asarray(normal(rng, (3, n, h, head_dim), dtype))
        for n, h in ((300, heads_q), (300, heads_q), (280, heads_kv), (280, heads_kv))
    ]
    dout, q, k, v = arrays
    out, lse = cuattn.flash_attention(q, k, v, causal=True, return_lse=True)

    def gradients(batch):
        given = [a[batch] for a in (dout, q, k, v, out, lse)]
        return cuattn.flash_attention_backward(*given, causal=True, deterministic=True)[:3]

    first = gradients(slice(0, 3))
    for _ in range(5):
        for a, b in zip(first, gradients(slice(0, 3)), strict=True):
            assert bool((a == b).all())
    for a, b in zip(first, gradients(slice(1, 2)), strict=True):
        assert bool((a[1:2] == b).all())


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (90, 20)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("heads_kv", [8, 4, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_same_bits_whatever_other_sequences_there_are(options, head_dim, heads_kv, rng):
    """Also where a block finds a sequence's tiles among those of others, of any length."""
    lengths = [300, 0, 5, 700, 129]
    ends = np.cumsum([0, *lengths])
    q, k, v, dout = (
        cupy.asarray(normal(rng, (ends[-1], heads, head_dim), DTYPES["bfloat16"]))
        for heads in (8, heads_kv, heads_kv, 8)
    )

    def forward(rows, lengths):
        cu_seqlens = cupy.asarray(np.cumsum([0, *lengths]), np.int32)
        arrays = q[rows], k[rows], v[rows], cu_seqlens
        return arrays, cuattn.flash_attention_varlen(*arrays, **options, return_lse=True)

    def gradients(rows, lengths, out, lse):
        arrays, _ = forward(rows, lengths)
        given = dout[rows], *arrays[:3], out[rows], lse[:, rows], arrays[3]
        return cuattn.flash_attention_varlen_backward(*given, deterministic=True, **options)[:3]

    everything = slice(0, int(ends[-1]))
    _, (out, lse) = forward(everything, lengths)
    together = gradients(everything, lengths, out, lse)
    for length, end in zip(lengths, ends[1:], strict=True):
        if length:
            rows = slice(int(end) - length, int(end))
            for a, b in zip(together, gradients(rows, [length], out, lse), strict=True):
                assert bool((a[rows] == b).all())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_lengths_that_cannot_be_do_not_stop_a_call(head_dim, deterministic, rng):
    """Tiles of such sequences overlap or are missing: who waited for them would wait for ever. So
    would who waited for sums that nobody has marked as unopened."""
    rows, head_dim_v = 1500, min(head_dim, 128)
    q, k = (cupy.asarray(normal(rng, (rows, 8, head_dim), DTYPES["bfloat16"])) for _ in "qk")
    v, dout = (cupy.asarray(normal(rng, (rows, 8, head_dim_v), DTYPES["bfloat16"])) for _ in "vo")
    lse = cupy.zeros((8, rows), np.float32)
    for ends in ([0, 1400, 100, 1500], [700, 0, 1500, 1500], [0, 2**31 - 1, -(2**31), 50]):
        for more in (0, 40):  # many sequences are found in another way
            cu_seqlens = cupy.asarray(np.array([*ends, *[800] * more], np.int32))
            cuattn.flash_attention_varlen_backward(
                dout, q, k, v, dout, lse, cu_seqlens, causal=True, deterministic=deterministic
            )
    assert bool((cupy.ones(1) == 1).all())  # waits for the device


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_with_every_multiprocessor_at_work(causal, head_dim, rng):
    """Small calls have the same bits most of the time, even where the order is left to chance."""
    shape = (1, 4096, 8, head_dim)
    q, k, v, dout = (cupy.asarray(normal(rng, shape, DTYPES["bfloat16"])) for _ in "qkvd")
    _, pullback = cuattn.flash_attention_vjp(q, k, v, causal=causal, deterministic=True)
    first = pullback(dout)
    for _ in range(5):
        for name, a, b in zip("qkv", first[:3], pullback(dout)[:3], strict=True):
            assert bool((a == b).all()), f"d{name}"


def test_broadcast_dout(rng):
    q, k, v = (cupy.asarray(normal(rng, (2, 70, 4, 32), np.dtype(np.float32))) for _ in "qkv")
    out, pullback = cuattn.flash_attention_vjp(q, k, v)
    one = cupy.asarray(normal(rng, (1, 70, 1, 32), np.dtype(np.float32)))
    spread = cupy.broadcast_to(one, out.shape)
    for a, b in zip(pullback(spread)[:3], pullback(spread.copy())[:3], strict=True):
        assert bool((a == b).all())


def test_memory_is_linear(rng):
    q = cupy.asarray(normal(rng, (1, 16384, 1, 64), np.dtype(np.float32)))
    out, pullback = cuattn.flash_attention_vjp(q, q, q, causal=True)
    pullback(out)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    grads = pullback(out)
    assert pool.total_bytes() - before <= 4 * q.nbytes  # of 256 for all scores
    assert bool(cupy.isfinite(grads.dq).all())


def test_captured_in_a_graph(rng):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [cupy.asarray(normal(rng, (2, 90, 4, 64), DTYPES["bfloat16"])) for _ in "qkvo"]
        q, k, v, dout = arrays
        slopes = cupy.full((2, 4), 0.1, np.float64)
        bias = cupy.asarray(normal(rng, (4, 1, 90), DTYPES["float16"]))

        def step():
            _, pullback = cuattn.flash_attention_vjp(
                q, k, v, alibi_slopes=slopes, bias=bias, grad_alibi=True, grad_bias=True
            )
            return pullback(dout)

        step()
        stream.begin_capture()
        captured = step()
        graph = stream.end_capture()
        for _ in range(2):
            for a in arrays:
                a[...] = cupy.asarray(normal(rng, a.shape, DTYPES["bfloat16"]))
            graph.launch(stream)
            expected = step()
            for name, a, e in zip(expected._fields, captured, expected, strict=True):
                assert (a is None) == (e is None)
                assert a is None or bool((a == e).all()), name


# --------------------------------------------------------------------------------------- dropout


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
def test_common_gradients_with_dropout(tier, dtype, options, head_dim, rng):
    """The calls that a tier is made for, with more than one tile of queries and of keys."""
    q = normal(rng, (2, 333, 4, head_dim), DTYPES[dtype])
    k, v = (normal(rng, (2, 450, 2, head_dim), DTYPES[dtype]) for _ in "kv")
    call = Call(q, k, v, dict(options), rng)
    check_aligned(call, drop(call, rng))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlens", [(1, 1), (130, 250), (200, 65)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_drop_what_numpy_drops(tier, dtype, seqlens, head_dim, rng):
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
def test_ragged_gradients_with_dropout(tier, dtype, head_dim, rng):
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


# ------------------------------------------------------------------------------------------- jvp


@pytest.fixture(params=TIERS[1:])
def jvp_tier(request):
    """Each tier of the derivative in a direction, and those below it."""
    with dispatch.use_tiers(*(f"jvp_{name}" for name in TIERS[TIERS.index(request.param) :])):
        yield request.param


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
