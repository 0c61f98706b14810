"""Calls of the backward pass on a GPU, and how their gradients are judged by the formula in
float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuattn
from tests import formulas
from tests.gpu.calls import HEAD_DIMS, SEQLENS, Call, draw_options, normal, placed, precisions
from tests.gpu.test_dropout import factors

cupy = pytest.importorskip("cupy")

HALF = ["float16", "bfloat16"]


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
    roundings = formulas.Roundings(
        exact, *inputs, out=out, lse=lse, precision=exact_type, **options
    )
    for name, expected in exact.items():
        actual = getattr(grads, name).get()
        assert actual.shape == expected.shape, name
        assert np.isfinite(actual).all(), name
        try:
            roundings.assert_accurate(
                name, actual, *plain[name], inputs=call.q.dtype, lse=lse,
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
        roundings = formulas.Roundings(
            exact, *inputs, out=out[None, rows], lse=given, precision=exact_type, **more
        )
        for name, actual in (("dq", dq[rows]), ("dk", dk[keys]), ("dv", dv[keys])):
            roundings.assert_accurate(
                name, actual[None], *plain[name], inputs=dtype, lse=given,
                cancelled=cancelled.get(name, 0.0),
            )  # fmt: skip
        for name in ("dsinks", "dalibi"):
            if name not in exact:
                continue
            if name == "dalibi" and own_slopes:
                roundings.assert_accurate(
                    name, dalibi[b], *plain[name], inputs=dtype,
                    cancelled=cancelled.get(name, 0.0),
                )  # fmt: skip
            else:
                parts = exact[name], plain[name], roundings[name], cancelled.get(name, 0.0)
                summed.setdefault(name, []).append(parts)
    for name, parts in summed.items():
        exacts, plains, of_roundings, sizes = zip(*parts, strict=True)
        actual = dsinks if name == "dsinks" else dalibi
        actual = (actual - sum(of_roundings)).astype(actual.dtype)
        # Of a long sequence there are fewer orders; the last of all is as a backward pass does.
        fewest = min(map(len, plains))
        orders = [sum(p[n] for p in plains) for n in range(-fewest, 0)]
        formulas.assert_gradients_accurate(
            actual, sum(exacts), *orders, inputs=dtype, cancelled=float(np.linalg.norm(sizes))
        )


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


def assert_alike(a, b, *, bits: bool) -> None:
    """Where one kernel repairs what another has summed in another order, they are close."""
    if bits:
        assert bool((a == b).all())
    else:
        a, b = (x.astype(np.float32).get() for x in (a, b))
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(a)
