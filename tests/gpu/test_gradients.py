"""Gradient kernels against the formula in float64: what they compute, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests.gpu.calls import (
    DTYPES,
    HEAD_DIMS,
    SEQLENS,
    Call,
    draw_call,
    draw_options,
    normal,
    placed,
)
from tests.gpu.gradient_calls import (
    HALF,
    check,
    check_aligned,
    draw_aligned,
    drop,
    judge,
    judge_varlen,
)

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_workspaces")]


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


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("dtype", HALF)
def test_aligned(backward_tier, dtype, number, rng):
    call = draw_aligned(rng, DTYPES[dtype])
    check_aligned(call, drop(call, rng) if number % 3 == 2 else None)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (100, 20)}],
    ids=["full", "causal", "window"],
)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", HALF)
def test_aligned_common_calls(backward_tier, dtype, head_dims, options, rng):
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
def test_aligned_deterministic_calls(backward_tier, head_dim, heads, seqlens, options, rng):
    """Sums of dq in the order of keys, and a pass of its own for dq."""
    q = normal(rng, (1, seqlens[0], heads[0], head_dim), DTYPES["bfloat16"])
    k, v = (normal(rng, (1, seqlens[1], heads[1], head_dim), DTYPES["bfloat16"]) for _ in "kv")
    check_aligned(Call(q, k, v, dict(options), rng), deterministic=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_aligned_deterministic_calls_with_sinks(backward_tier, head_dim, options, rng):
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
def test_aligned_bias_and_mask(backward_tier, dtype, rng):
    q = normal(rng, (2, 130, 4, 64), DTYPES[dtype])
    k, v = (normal(rng, (2, 150, 2, 64), DTYPES[dtype]) for _ in "kv")
    options = {"bias": normal(rng, (4, 1, 150), DTYPES[dtype]), "causal": True}
    options["mask"] = rng.random((2, 1, 130, 150)) < 0.7
    check_aligned(Call(q, k, v, options, rng))


@pytest.mark.parametrize("options", [{}, {"softcap": 0.1}, {"mask": ...}], ids=str)
def test_aligned_small_scale(backward_tier, options, rng):
    """dS times a small scale is less than float16 can tell from others: dq and dk are not."""
    q, k, v = (normal(rng, (1, 70, 2, 64), DTYPES["float16"]) for _ in "qkv")
    options = {"scale": 1e-6, **options}
    if "mask" in options:
        options["mask"] = rng.random((70, 70)) < 0.5
    check_aligned(Call(q, k, v, options, rng))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
def test_varlen(backward_tier, dtype, number, rng):
    """Each sequence has its own gradients; rows of no sequence hold anything, and get 0."""
    if backward_tier != "simt" and dtype not in HALF:
        pytest.skip("16-bit inputs only")
    place = placed if backward_tier == "simt" else lambda array, rng: cupy.asarray(array)
    dtype = DTYPES[dtype]
    sequences, heads_kv, group = (int(rng.integers(1, high)) for high in (7, 3, 4))
    heads_q = heads_kv * group
    dims = HEAD_DIMS if backward_tier == "simt" else [n for n in HEAD_DIMS if n % 8 == 0]
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
