"""Forward kernels, tier by tier, against the definition in float64: what they compute, and what
they leave alone."""

from __future__ import annotations

import concurrent.futures
import contextvars
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.gpu import compiler, dispatch
from tests import formulas

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in formulas.DTYPES}
#: Where kernels change their minds: tile edges, padding, vector widths.
SEQLENS = [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 191, 193, 255, 257, 300]
HEAD_DIMS = [1, 2, 3, 7, 8, 16, 24, 31, 32, 40, 48, 63, 64, 65, 72, 80, 96, 112, 127, 128]
HEAD_DIMS += [129, 160, 192, 200, 224, 255, 256]
BORDER = -77.0  # what lies around every array


# --------------------------------------------------------------------------------------------------
# calls, drawn at random


@dataclasses.dataclass
class Call:
    """Arguments of flash_attention on the host, and how the arrays lie in the device's memory."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    rng: np.random.Generator

    def expected(self, *cu_seqlens: np.ndarray) -> list[list[np.ndarray]]:
        """Out and lse of the definition: each exact, then in the precision of the inputs.

        The latter several times, with head_dim in different orders: the same formula, whose sums
        round differently. By the error of one a small result would be judged by luck.
        """
        exact, plain = precisions(self.q.dtype)
        backwards = slice(None, None, -1)
        odd_first = np.argsort(np.arange(self.q.shape[-1]) % 2 == 0, kind="stable")
        runs = [(exact, slice(None)), *((plain, o) for o in (slice(None), backwards, odd_first))]
        formula = formulas.varlen_attention if cu_seqlens else formulas.attention
        results = [
            formula(
                self.q[..., order],
                self.k[..., order],
                self.v,
                *cu_seqlens,
                precision=precision,
                **self.options,
            )
            for precision, order in runs
        ]
        return [list(result) for result in zip(*results, strict=True)]

    def on_device(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as CuPy arrays, surrounded by NaN."""
        arrays = [placed(a, self.rng) for a in (self.q, self.k, self.v)]
        options = {
            name: placed(value, self.rng) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        return arrays, options


def precisions(dtype: np.dtype) -> tuple[Any, Any]:
    """In which to compute the exact result and the plain one."""
    return np.longdouble if dtype == np.float64 else np.float64, dtype


def assert_accurate(actual: np.ndarray, exact: np.ndarray, *plain: np.ndarray) -> None:
    """The rule of two, with one rounding of slack for float64 too: its exact result is in a wider
    type."""
    finite = np.abs(exact[np.isfinite(exact)])
    slack = float(ml_dtypes.finfo(actual.dtype).eps) * float(finite.max(initial=0.0))
    formulas.assert_accurate(actual, exact, *plain, slack=slack)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def within(array: np.ndarray, rng: np.random.Generator, border: float) -> tuple[Any, Any]:
    """A view of `array`'s shape somewhere in a larger CuPy array full of `border`: both, the view
    unset.

    Its axes lie in any order but the last, with gaps or without, and start at any element.
    """
    if array.dtype == bool:
        border = True
    if array.ndim < 2:
        base = cupy.full(array.size + 24, border, array.dtype)
        start = int(rng.integers(1, 17))
        return base[start : start + array.size].reshape(array.shape), base
    axes = rng.permutation(array.ndim - 1) if rng.random() < 0.5 else np.arange(array.ndim - 1)
    axes = [*(int(axis) for axis in axes), array.ndim - 1]
    roomy = rng.random() < 0.5
    gap = 8 if rng.random() < 0.5 else int(rng.integers(1, 8))  # vector loads survive a gap of 8
    before = [gap if roomy and rng.random() < 0.5 else 0 for _ in axes]
    after = [gap if roomy and rng.random() < 0.5 else 0 for _ in axes]
    shape = [array.shape[axis] for axis in axes]
    base = cupy.full(
        [b + n + a for b, n, a in zip(before, shape, after, strict=True)], border, array.dtype
    )
    view = base[tuple(slice(b, b + n) for b, n in zip(before, shape, strict=True))]
    return view.transpose([axes.index(axis) for axis in range(array.ndim)]), base


def placed(array: np.ndarray, rng: np.random.Generator) -> Any:
    """`array` on the device, amid NaN."""
    view, _ = within(array, rng, np.nan)
    view[...] = cupy.asarray(array)
    return view


def draw_options(
    rng: np.random.Generator, heads_q: int, batch: int, dtype: np.dtype
) -> dict[str, Any]:
    """Some of the options that every attention call has."""

    def chance() -> bool:
        return rng.random() < 0.3

    options: dict[str, Any] = {}
    if chance():
        options["causal"] = True
    if chance():
        options["window"] = tuple(
            None if rng.random() < 0.3 else int(rng.integers(0, 150)) for _ in range(2)
        )
    if chance():
        options["scale"] = float(rng.uniform(-0.3, 0.3))
    if chance():
        options["softcap"] = float(rng.choice([1.0, 5.0, 30.0]))
    if chance():
        shape = (batch, heads_q) if rng.random() < 0.5 else (heads_q,)
        options["alibi_slopes"] = rng.uniform(0.0, 0.5, shape).astype(np.float32)
    if chance():
        options["sinks"] = normal(rng, (heads_q,), dtype)
    return options


def draw_call(rng: np.random.Generator, dtype: np.dtype) -> Call:
    """A flash_attention call of the whole contract."""
    batch, heads_kv, group = (int(rng.integers(1, high)) for high in (4, 3, 5))
    heads_q = heads_kv * group
    seqlen_q, seqlen_k = (int(rng.choice(SEQLENS)) for _ in "qk")
    head_dim = int(rng.choice(HEAD_DIMS))
    head_dim_v = head_dim if rng.random() < 0.5 else int(rng.choice(HEAD_DIMS))
    options = draw_options(rng, heads_q, batch, dtype)
    scores = (batch, heads_q, seqlen_q, seqlen_k)
    for name in ("bias", "mask"):
        if rng.random() < 0.3:
            shape = tuple(1 if rng.random() < 0.3 else n for n in scores)[int(rng.integers(0, 3)) :]
            if name == "bias":
                kind = dtype if rng.random() < 0.7 else DTYPES[str(rng.choice(list(DTYPES)))]
                options[name] = normal(rng, shape, kind)
            else:
                options[name] = rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
    return Call(
        normal(rng, (batch, seqlen_q, heads_q, head_dim), dtype),
        normal(rng, (batch, seqlen_k, heads_kv, head_dim), dtype),
        normal(rng, (batch, seqlen_k, heads_kv, head_dim_v), dtype),
        options,
        rng,
    )


def check(call: Call) -> None:
    """Run a call into an `out` amid a border; it must be accurate and leave the border alone."""
    expected, expected_lse = call.expected()
    arrays, options = call.on_device()
    out, base = within(expected[0].astype(call.q.dtype), call.rng, BORDER)
    out[...] = np.nan
    result, lse = cuattn.flash_attention(*arrays, **options, return_lse=True, out=out)
    assert result is out
    assert_accurate(out.get(), *expected)
    assert_accurate(lse.get(), *expected_lse)
    out[...] = BORDER
    assert bool((base == BORDER).all()), "memory around out was written to"


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


# ---------------------------------------------------------------------------------------------
# inputs and other functions


def test_no_batch_axis(tier, rng):
    """The same kernel serves it, whatever the strides of the other axes, and writes to `out` in
    place."""
    rows = [normal(rng, (90, 2, 64), np.dtype(np.float16)) for _ in "qkv"]
    dense = [cupy.asarray(a) for a in rows]
    expected, expected_lse = cuattn.flash_attention(*(a[None] for a in dense), return_lse=True)
    out = cupy.empty_like(dense[0])
    result, lse = cuattn.flash_attention(*dense, return_lse=True, out=out)
    assert result.shape == out.shape
    assert bool((out == expected[0]).all())
    assert bool((lse == expected_lse[0]).all())

    exact, plain = (
        formulas.attention(*(a[None] for a in rows), precision=precision)[0][0]
        for precision in precisions(rows[0].dtype)
    )
    out, base = within(rows[0], rng, BORDER)
    cuattn.flash_attention(*(placed(a, rng) for a in rows), out=out)
    assert_accurate(out.get(), exact, plain)
    out[...] = BORDER
    assert bool((base == BORDER).all())


def test_last_axis_with_a_stride(tier, rng):
    """Arrays whose head_dim is not contiguous are copied; such an `out` is still written."""
    arrays = [normal(rng, (2, 50, 2, 32), np.dtype(np.float32)) for _ in "qkv"]
    expected = cuattn.flash_attention(*map(cupy.asarray, arrays))
    strided = [cupy.repeat(cupy.asarray(a), 2, axis=-1)[..., ::2] for a in arrays]
    base = cupy.full((2, 50, 2, 64), BORDER, np.float32)
    out = base[..., ::2]
    assert cuattn.flash_attention(*strided, out=out) is out
    assert bool((out == expected).all())
    assert bool((base[..., 1::2] == BORDER).all())


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("kind", ["causal", "bool", "float", "plain"])
def test_scaled_dot_product_attention(tier, kind, leading, rng):
    """torch's layout, and its causal mask that begins at the first key."""
    dtype = np.dtype(np.float32)
    heads = (4,) if leading else ()
    query, key, value = (normal(rng, (*leading, *heads, n, 32), dtype) for n in (60, 90, 90))
    scores = (60, 90)
    keep = np.tril(np.ones(scores, bool))
    options: dict[str, Any] = {}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "bool":
        keep = rng.random(scores) < 0.5
        options["attn_mask"] = cupy.asarray(keep)
    elif kind == "float":
        options["attn_mask"] = cupy.asarray(normal(rng, scores, dtype))

    def flat(array):
        return array.reshape(-1, 4 if heads else 1, *array.shape[-2:]).swapaxes(1, 2)

    meaning = {
        "causal": {"mask": keep},
        "bool": {"mask": keep},
        "float": {"bias": options["attn_mask"].get() if kind == "float" else None},
        "plain": {},
    }[kind]
    exact, plain = (
        formulas.attention(flat(query), flat(key), flat(value), precision=precision, **meaning)[0]
        for precision in (np.float64, dtype)
    )
    out = cuattn.scaled_dot_product_attention(*map(cupy.asarray, (query, key, value)), **options)
    assert out.shape == query.shape
    assert_accurate(flat(out.get()), exact, plain)


class CudaArrayInterface:
    """An array of some other library."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class DLPack:
    """An array of yet another one."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("wrap", [CudaArrayInterface, DLPack])
def test_arrays_of_other_libraries(wrap, rng):
    arrays = [cupy.asarray(normal(rng, (1, 40, 2, 32), np.dtype(np.float32))) for _ in "qkv"]
    out = cuattn.flash_attention(*map(wrap, arrays))
    assert isinstance(out, cupy.ndarray)
    assert bool((out == cuattn.flash_attention(*arrays)).all())


def test_both_sides_at_once_is_an_error(rng):
    q = normal(rng, (1, 4, 1, 8), np.dtype(np.float32))
    with pytest.raises(ValueError, match="k on GPU 0"):
        cuattn.flash_attention(q, cupy.asarray(q), cupy.asarray(q))


# ------------------------------------------------------------------------------- streams, graphs,
# threads, devices, tiers


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_graph_capture_and_replay(tier, dtype, varlen, rng):
    """A captured call computes from what its arrays hold when it is replayed, the lengths
    included."""
    q, k, v = (cupy.asarray(normal(rng, (200, 2, 64), DTYPES[dtype])) for _ in "qkv")
    cu = cupy.asarray(np.array([0, 50, 200], np.int32))
    out = cupy.empty_like(q)

    def call(out=None):
        if varlen:
            return cuattn.flash_attention_varlen(q, k, v, cu, causal=True, out=out)
        return cuattn.flash_attention(q, k, v, causal=True, out=out)

    call(out)  # compiled before the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        call(out)
        graph = stream.end_capture()
    for _ in range(3):
        for array in (q, k, v):
            array[...] = cupy.asarray(normal(rng, array.shape, DTYPES[dtype]))
        cu[1] = int(rng.integers(0, 201))
        out[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bool((out == call()).all())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_current_stream(tier, dtype, rng):
    """A call waits for the work before it on the current stream, whichever that is."""
    q, k, v = (cupy.asarray(normal(rng, (1, 200, 2, 64), DTYPES[dtype])) for _ in "qkv")
    expected = cuattn.flash_attention(q, k, v)
    late = cupy.full_like(q, np.nan)
    busy = cupy.ones((4096, 4096), np.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            busy = busy @ busy * (1 / 4096)
        late[...] = q
        out = cuattn.flash_attention(late, k, v)
        stream.synchronize()
    assert bool((out == expected).all())


def test_several_threads(tier, rng):
    """Calls from threads, each with a stream of its own, that compile and launch the same and
    different variants."""
    calls = []
    for number in range(24):
        dtype = list(DTYPES.values())[number % 4]
        shape = (1, int(rng.choice(SEQLENS)), 2, [64, 128, 40][number % 3])
        calls.append([cupy.asarray(normal(rng, shape, dtype)) for _ in "qkv"])
    cupy.cuda.Device().synchronize()

    def run(arrays):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            out = [cuattn.flash_attention(*arrays, causal=True) for _ in range(5)]
            stream.synchronize()
        return out

    # A thread has a context of its own, and with it tiers of its own.
    contexts = [contextvars.copy_context() for _ in calls]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda context, call: context.run(run, call), contexts, calls))
    for arrays, results_of_call in zip(calls, results, strict=True):
        expected = cuattn.flash_attention(*arrays, causal=True)
        for out in results_of_call:
            assert bool((out == expected).all())


def test_other_device_than_the_current(tier, rng):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    arrays = [normal(rng, (1, 100, 2, 64), np.dtype(np.float16)) for _ in "qkv"]
    expected = cuattn.flash_attention(*map(cupy.asarray, arrays))
    with cupy.cuda.Device(1):
        there = [cupy.asarray(a) for a in arrays]
    out = cuattn.flash_attention(*there)
    assert cupy.cuda.runtime.getDevice() == 0
    assert out.device.id == 1
    np.testing.assert_array_equal(out.get(), expected.get())
    with pytest.raises(ValueError, match="GPU 1"):
        cuattn.flash_attention(there[0], *map(cupy.asarray, arrays[1:]))


def test_tier_serves_what_it_is_for(tier):
    """A plain 16-bit call goes to the fastest tier: else every other test here would have tried
    another one."""
    spec = cuattn._spec.attention_spec(
        "flash_attention", *[(2, 512, 8, 64)] * 3, *[np.dtype(ml_dtypes.bfloat16)] * 3
    )
    call = dispatch.Call.contiguous(spec, compiler.device_arch(0))
    launch = dispatch.choose(call, dispatch.current_tiers())
    capability = dispatch.capability(compiler.device_arch(0))
    if tier != "simt" and capability < int(tier.removeprefix("sm")):
        pytest.skip(f"compute capability {capability}")
    if tier == "sm90" and compiler.device_arch(0) != "sm_90a":
        pytest.skip("not a Hopper GPU")  # later ones have no wgmma
    assert tier in launch.variant.source
