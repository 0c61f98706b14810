"""Forward kernels, tier by tier, against the definition in float64: what they compute, and what
they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuattn
from tests import formulas
from tests.gpu.calls import (
    BORDER,
    DTYPES,
    HEAD_DIMS,
    SEQLENS,
    Call,
    assert_accurate,
    check,
    draw_call,
    draw_options,
    normal,
    placed,
    within,
)

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_contract(tier, dtype, number, rng):
    check(draw_call(rng, DTYPES[dtype]))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_calls(tier, dtype, causal, head_dim, rng):
    """The plain calls that a tier is made for, with more keys than one tile of any kernel has."""
    q = normal(rng, (2, 333, 4, head_dim), DTYPES[dtype])
    k, v = (normal(rng, (2, 450, 2, head_dim), DTYPES[dtype]) for _ in "kv")
    check(Call(q, k, v, {"causal": causal}, rng))


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
def test_varlen(tier, dtype, number, rng):
    """Sequences end to end, some empty, with rows of no sequence after the last: those are not
    touched."""
    dtype = DTYPES[dtype]
    sequences, heads_kv, group = (int(rng.integers(1, high)) for high in (7, 3, 4))
    heads_q = heads_kv * group
    head_dim, head_dim_v = (int(rng.choice(HEAD_DIMS)) for _ in "kv")
    lengths = [rng.choice([0, *SEQLENS], sequences) for _ in "qk"]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in lengths)
    spare = int(rng.integers(0, 40))
    q = normal(rng, (cu_q[-1] + spare, heads_q, head_dim), dtype)
    k = normal(rng, (cu_k[-1] + spare, heads_kv, head_dim), dtype)
    v = normal(rng, (cu_k[-1] + spare, heads_kv, head_dim_v), dtype)
    q[cu_q[-1] :], k[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan, np.inf
    options = draw_options(rng, heads_q, sequences, dtype)
    call = Call(q, k, v, options, rng)
    expected, expected_lse = call.expected(cu_q, cu_k)
    arrays, options = call.on_device()
    out, base = within(expected[0].astype(dtype), rng, BORDER)
    out[: cu_q[-1]] = np.nan
    result, lse = cuattn.flash_attention_varlen(
        *arrays, cupy.asarray(cu_q), cupy.asarray(cu_k), **options, return_lse=True, out=out
    )
    assert result is out
    rows = slice(int(cu_q[-1]))
    assert_accurate(out[rows].get(), *(result[rows] for result in expected))
    assert_accurate(lse[:, rows].get(), *(result[:, rows] for result in expected_lse))
    out[rows] = BORDER
    assert bool((base == BORDER).all()), (
        "rows of no sequence, or memory around out, were written to"
    )


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_varlen_same_lengths_and_many_sequences(tier, kind, rng):
    """More sequences than a warp looks at in one step; keys as long as queries; lengths with a
    stride."""
    lengths = rng.integers(0, 9, 3000)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    q, k, v = (normal(rng, (int(cu[-1]), 1, 16), np.dtype(np.float16)) for _ in "qkv")
    exact, _ = formulas.varlen_attention(q, k, v, cu, cu, causal=True)
    plain, _ = formulas.varlen_attention(q, k, v, cu, cu, causal=True, precision=np.float16)
    strided = cupy.asarray(np.repeat(cu, 2).astype(kind))[::2]
    out = cuattn.flash_attention_varlen(*map(cupy.asarray, (q, k, v)), strided, causal=True)
    assert_accurate(out.get(), exact, plain)


@pytest.mark.parametrize(
    "lengths",
    [
        [0, 2**31 - 1, -(2**31), 50],
        [0, 60, 20, 100],
        [-5, 40, 70, 100],
        [40, 50, 99, 1000],
        [2**30] * 4,
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bad_lengths_stay_within_the_arrays(tier, dtype, lengths, rng):
    """Lengths are device data that no one checks: whatever they are, only the result may be
    wrong."""
    dtype = DTYPES[dtype]
    bad = cupy.asarray(np.array(lengths, np.int32))
    good = cupy.asarray(np.array([0, 30, 60, 100], np.int32))
    arrays = [placed(normal(rng, (100, 2, 64), dtype), rng) for _ in "qkv"]
    for cu_seqlens in ((bad, good), (good, bad), (bad, bad)):
        out, base = within(np.empty((100, 2, 64), dtype), rng, BORDER)
        cuattn.flash_attention_varlen(*arrays, *cu_seqlens, causal=True, out=out)
        cupy.cuda.Device().synchronize()
        out[...] = BORDER
        assert bool((base == BORDER).all())


# --------------------------------------------------------------------------------------------------
# NaN and infinity


def hidden_case(name: str, seqlen: int) -> tuple[dict[str, Any], np.ndarray]:
    """Options of a call that hides some of `seqlen` keys from every query, and which."""
    keys = np.arange(seqlen)
    if name == "mask":
        hidden = keys % 3 == 1
        return {"mask": ~hidden[None]}, hidden
    if (
        name == "causal"
    ):  # fewer queries than keys would see every key: see test_later_keys_do_not_matter
        return {"causal": True, "window": (0, 0)}, keys < seqlen - 40
    return {"window": (20, 10)}, (keys < seqlen - 40 - 20)


@pytest.mark.parametrize("case", ["mask", "causal", "window"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_keys_may_hold_anything(tier, dtype, poison, case, rng):
    dtype = DTYPES[dtype]
    options, hidden = hidden_case(case, 200)
    q = normal(rng, (1, 40, 2, 64), dtype)
    k, v = (normal(rng, (1, 200, 1, 64), dtype) for _ in "kv")
    clean = [cupy.asarray(a) for a in (q, k, v)]
    options = {n: cupy.asarray(o) if n == "mask" else o for n, o in options.items()}
    expected = cuattn.flash_attention(*clean, **options)
    k[:, hidden], v[:, hidden] = poison, poison
    out, lse = cuattn.flash_attention(
        clean[0], cupy.asarray(k), cupy.asarray(v), **options, return_lse=True
    )
    assert bool((out == expected).all())
    assert bool(cupy.isfinite(lse).all())


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_later_keys_do_not_matter(tier, dtype, head_dim, poison, rng):
    """Under a causal mask a row is the same whatever later keys and values hold, in its own tile
    too."""
    dtype = DTYPES[dtype]
    q, k, v = (normal(rng, (1, 150, 2, head_dim), dtype) for _ in "qkv")
    expected, expected_lse = cuattn.flash_attention(
        *map(cupy.asarray, (q, k, v)), causal=True, return_lse=True
    )
    later = int(rng.integers(1, 150))
    k[:, later:], v[:, later:] = poison, poison
    out, lse = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), causal=True, return_lse=True)
    assert bool((out[:, :later] == expected[:, :later]).all())
    assert bool((lse[..., :later] == expected_lse[..., :later]).all())
    assert bool(cupy.isnan(out[:, later:]).any())


@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_reach_what_depends_on_them(tier, dtype, value, where, rng):
    """One NaN or infinity among the inputs: results have theirs where the definition has."""
    arrays = {name: normal(rng, (1, 70, 2, 32), DTYPES[dtype]) for name in "qkv"}
    bias = normal(rng, (2, 70, 70), DTYPES[dtype])
    target = bias if where == "bias" else arrays[where][0].swapaxes(0, 1)
    target[1, 33, 5] = value
    call = Call(*arrays.values(), {"bias": bias}, rng)
    with np.errstate(all="ignore"):
        expected, expected_lse = call.expected()
    arrays, options = call.on_device()
    out, lse = cuattn.flash_attention(*arrays, **options, return_lse=True)
    assert_accurate(out.get(), *expected)
    assert_accurate(lse.get(), *expected_lse)


@pytest.mark.parametrize("sinks", [None, (0.5, -1.5), (-1e4, -np.inf)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(tier, dtype, sinks, rng):
    """Output 0 and lse -inf, or the sink: hidden by causality, by the mask, or by a bias of
    -inf."""
    dtype = DTYPES[dtype]
    q, k, v = (normal(rng, (1, n, 2, 64), dtype) for n in (130, 50, 50))
    mask = np.ones((130, 50), bool)
    mask[100] = False
    bias = np.zeros((130, 1), dtype)
    bias[110] = -np.inf
    nothing = np.r_[0:80, 100, 110]
    out, lse = cuattn.flash_attention(
        *map(cupy.asarray, (q, k, v)),
        causal=True,
        mask=cupy.asarray(mask),
        bias=cupy.asarray(bias),
        sinks=None if sinks is None else cupy.asarray(np.array(sinks, dtype)),
        return_lse=True,
    )
    seen = np.setdiff1d(np.arange(130), nothing)
    assert bool((out[:, nothing] == 0).all())
    sinks = [-np.inf] * 2 if sinks is None else np.array(sinks, dtype).astype(np.float64)
    expected = np.tile(sinks, (len(nothing), 1))
    np.testing.assert_allclose(lse.get()[0, :, nothing], expected, rtol=1e-6)  # two roundings
    assert bool(cupy.isfinite(lse[..., seen]).all())
    assert bool((out[:, seen] != 0).any(axis=-1).all())


# --------------------------------------------------------------------------------------------------
# shapes


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_shapes(tier, dtype):
    def zeros(*shape):
        return cupy.zeros(shape, DTYPES[dtype])

    q, k = zeros(2, 3, 4, 16), zeros(2, 0, 2, 16)
    out, lse = cuattn.flash_attention(q, k, k, return_lse=True)  # no keys
    assert bool((out == 0).all())
    assert bool((lse == -np.inf).all())
    for shape_q, shape_k in [((0, 3, 4, 16), (0, 5, 2, 16)), ((2, 0, 4, 16), (2, 5, 2, 16))]:
        out, lse = cuattn.flash_attention(
            zeros(*shape_q), zeros(*shape_k), zeros(*shape_k), return_lse=True
        )
        assert out.shape == shape_q
        assert lse.shape == (shape_q[0], 4, shape_q[1])

    none, several = cupy.zeros(1, np.int32), cupy.zeros(4, np.int32)
    for q, cu_seqlens in [(zeros(0, 4, 16), several), (zeros(5, 4, 16), none)]:
        out = cuattn.flash_attention_varlen(q, q, q, cu_seqlens)
        assert out.shape == q.shape
    keys = zeros(0, 2, 16)
    cu_q = cupy.asarray(np.array([0, 2, 2, 5], np.int32))
    out, lse = cuattn.flash_attention_varlen(
        zeros(5, 4, 16), keys, keys, cu_q, several, return_lse=True
    )
    assert bool((out == 0).all())
    assert bool((lse == -np.inf).all())


def test_more_batches_than_a_grid_axis_holds(tier, rng):
    q, k, v = (normal(rng, (70000, n, 1, 8), np.dtype(np.float16)) for n in (1, 2, 2))
    exact, _ = formulas.attention(q, k, v)
    plain, _ = formulas.attention(q, k, v, precision=np.float16)
    out = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)))
    assert_accurate(out.get(), exact, plain)


@pytest.mark.parametrize("axis", ["batch", "seq", "head"])
def test_more_than_2_to_31_elements(tier, axis, rng):
    """Rows so far apart that no 32-bit index reaches the last of them."""
    if cupy.cuda.runtime.memGetInfo()[0] < 30 << 30:
        pytest.skip("needs 30 GB of device memory")
    q, k, v = (normal(rng, (3, 3, 3, 64), np.dtype(np.float16)) for _ in "qkv")
    bias = normal(rng, (3, 3, 3, 3), np.dtype(np.float16))
    exact, _ = formulas.attention(q, k, v, bias=bias)
    plain, _ = formulas.attention(q, k, v, bias=bias, precision=np.float16)
    place = ["batch", "seq", "head"].index(axis)
    far = 2**30 + 64

    def spread(array, place, near):
        strides = [near[0] * array.itemsize, near[1] * array.itemsize, near[2] * array.itemsize]
        strides[place] = far * array.itemsize
        base = cupy.ndarray(2 * far + 3 * sum(near) + 64, array.dtype)  # not written: 4 GB each
        view = cupy.lib.stride_tricks.as_strided(base, array.shape, (*strides, array.itemsize))
        view[...] = cupy.asarray(array)
        return view

    near = (1024, 256, 64)
    arrays = [spread(a, place, near) for a in (q, k, v)]
    far_bias = spread(bias, [0, 2, 1][place], (64, 16, 4))
    out = spread(np.full_like(q, np.nan), place, near)
    cuattn.flash_attention(*arrays, bias=far_bias, out=out)
    assert_accurate(out.get(), exact, plain)
    far_mask = cupy.lib.stride_tricks.as_strided(
        cupy.ndarray(2 * far + 64, bool),
        (3, 3, 3, 3),
        [(far, 9, 3), (9, 3, far), (9, far, 3)][place] + (1,),
    )
    mask = rng.random((3, 3, 3, 3)) < 0.5
    far_mask[...] = cupy.asarray(mask)
    exact, _ = formulas.attention(q, k, v, mask=mask)
    plain, _ = formulas.attention(q, k, v, mask=mask, precision=np.float16)
    cuattn.flash_attention(*arrays, mask=far_mask, out=out)
    assert_accurate(out.get(), exact, plain)


def test_batches_do_not_meet(tier, rng):
    """Permuting the batch permutes the result, bit for bit."""
    for dtype in DTYPES.values():
        q, k, v = (cupy.asarray(normal(rng, (5, 200, 2, 64), dtype)) for _ in "qkv")
        order = rng.permutation(5)
        out = cuattn.flash_attention(q, k, v, causal=True)
        permuted = cuattn.flash_attention(q[order], k[order], v[order], causal=True)
        assert bool((permuted == out[order]).all())
