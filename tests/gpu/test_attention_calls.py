"""How the forward kernels are called: inputs of any kind, graphs, streams, threads, devices."""

from __future__ import annotations

import concurrent.futures
import contextvars
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.gpu import compiler, dispatch
from tests import formulas
from tests.gpu.calls import (
    BORDER,
    DTYPES,
    SEQLENS,
    assert_accurate,
    normal,
    placed,
    precisions,
    within,
)
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("across", range(3))
def test_out_across_an_input(tier, across, rng):
    """An input is read as it was, though results are written where it is: in a call, in one like an
    earlier call, and in a graph."""
    inputs = [normal(rng, (2, 300, 2, 64), np.dtype(np.float16)) for _ in "qkv"]
    shape, size = inputs[0].shape, inputs[0].size
    memory = cupy.zeros(2 * size, np.float16)
    array, out = memory[:size].reshape(shape), memory[size // 2 : -(size // 2)].reshape(shape)
    arrays = [cupy.asarray(x) for x in inputs]
    expected = cuattn.flash_attention(*arrays, out=cupy.empty_like(out)).get()
    arrays[across] = array

    def call() -> Any:
        array[...] = source
        return cuattn.flash_attention(*arrays, out=out)

    source = cupy.asarray(inputs[across])
    for _ in range(2):
        assert call() is out
        assert np.array_equal(out.get(), expected)
    replay, _ = captured(call)
    out[...] = np.nan
    replay()
    assert np.array_equal(out.get(), expected)


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

    replay, _ = captured(lambda: call(out))
    for _ in range(3):
        for array in (q, k, v):
            array[...] = cupy.asarray(normal(rng, array.shape, DTYPES[dtype]))
        cu[1] = int(rng.integers(0, 201))
        out[...] = np.nan
        replay()
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
