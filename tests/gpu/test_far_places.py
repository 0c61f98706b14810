"""Arrays whose elements lie more than 2^32 elements apart, and results of more than 2^32: no
product of a number and a stride is cut off. In the emulator they are as small as usual.

What a call reads lies in memory full of NaN, at distances for which a lost upper half leads to
somewhere else. Results that are as large come from inputs that repeat, and must repeat likewise:
bit for bit, but for decoding, where the splits of a sequence's keys depend on its place in the
batch unless they are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import sampling
from tests.gpu.calls import BORDER, Call, assert_accurate

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FREE_BYTES = 60 << 30  # that large results ask for, with what kernels add up beside them


class Memory:
    """Memory in which arrays lie far apart along one of their axes: in units, each of which has a
    place for every array."""

    UNITS = 960

    def __init__(self, nbytes: int) -> None:
        self.unit = nbytes // self.UNITS // 256 * 256
        self.base = cupy.full(nbytes, 0xFF, np.uint8)
        self.used = 0

    def place(self, array: np.ndarray, axis: int) -> Any:
        """An array on the device whose first and last element along `axis` are as far apart as
        there is memory, nearly."""
        steps = max(array.shape[axis] - 1, 1)
        strides, size = [0] * array.ndim, array.dtype.itemsize
        for other in (n for n in reversed(range(array.ndim)) if n != axis):
            strides[other], size = size, size * array.shape[other]
        strides[axis] = self.unit * ((self.UNITS - 1) // steps)
        memory = self.base.data + self.used
        self.used += -(-size // 256) * 256
        assert self.used <= self.unit
        view = cupy.ndarray(array.shape, array.dtype, memory, tuple(strides))
        view[...] = cupy.asarray(array)
        return view

    def codes(self, array: cuattn.QuantizedArray, axis: int) -> cuattn.QuantizedArray:
        """Likewise codes, and scales where they have as many."""
        parts = [array.data, array.scale, array.minimum]
        for i, part in enumerate(parts):
            if part is not None:
                far = part.shape[axis] == array.data.shape[axis]
                parts[i] = self.place(part, axis) if far else cupy.asarray(part)
        return array.of(*parts)


@pytest.fixture(scope="module")
def emulated(request):
    return request.config.getoption("emulate")


@pytest.fixture(scope="module")
def whole_memory(emulated):
    if emulated:
        yield Memory(1 << 29)
        return
    try:
        if cupy.cuda.runtime.memGetInfo()[0] < 24 << 30:  # also for tests in other processes
            pytest.skip("needs 24 GiB of free device memory")
        memory = Memory(10 << 30)
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("other processes have the device's memory")
    yield memory
    del memory
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def memory(whole_memory):
    whole_memory.used = 0
    return whole_memory


def normal(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def same(results: Any, expected: Any, atol: float = 0.02) -> None:
    """A wrong place gives NaN or another number altogether."""
    results, expected = (x if isinstance(x, tuple) else (x,) for x in (results, expected))
    for got, want in zip(results, expected, strict=True):
        if got is None or want is None:
            assert got is want
            continue
        got, want = (np.asarray(a.get() if hasattr(a, "get") else a) for a in (got, want))
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=0.02, atol=atol)


def check(
    memory: Memory, function: Callable, arrays: list[np.ndarray], axes: list[int | None], out: Any,
    *rest: Any, **options: Any,
) -> None:  # fmt: skip
    """Compare a call of arrays that lie far along `axes`, None for as usual, with NumPy's; `out`:
    the shape and the axis of where it is written."""
    want = function(*arrays, *rest, **options)
    placed = [
        cupy.asarray(a) if axis is None else memory.place(a, axis)
        for a, axis in zip(arrays, axes, strict=True)
    ]
    others = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in rest]
    if out is not None:
        options["out"] = memory.place(np.full(out[0], BORDER, arrays[0].dtype), out[1])
    same(function(*placed, *others, **options), want)


ATTENTION = [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (1, 0, 2, None), (None, 2, 1, 0)]


@pytest.mark.parametrize("axes", ATTENTION, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_attention(memory, dtype, axes, rng):
    q = normal(rng, dtype, 2, 70, 4, 64)
    k, v = (normal(rng, dtype, 2, 130, 2, 64) for _ in "kv")
    out = None if axes[3] is None else (q.shape, axes[3])
    check(memory, cuattn.flash_attention, [q, k, v], list(axes[:3]), out, causal=True,
          return_lse=True)  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_ragged(memory, dtype, axis, rng):
    cu = np.array([0, 30, 30, 163], np.int32)
    q, k, v = (normal(rng, dtype, 163, heads, 64) for heads in (4, 2, 2))
    check(memory, cuattn.flash_attention_varlen, [q, k, v], [axis] * 3, (q.shape, axis), cu)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gradients(memory, dtype, options, axis, rng):
    q, dout = (normal(rng, dtype, 2, 70, 4, 64) for _ in "qo")
    k, v = (normal(rng, dtype, 2, 130, 2, 64) for _ in "kv")
    of_forward = {n: o for n, o in options.items() if n != "deterministic"}
    out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **of_forward)
    axes = [axis] * 5 + [None]
    arrays = [dout, q, k, v, out, lse]
    check(memory, cuattn.flash_attention_backward, arrays, axes, None, **options)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_jvp(memory, axis, rng):
    q, dq = (normal(rng, np.float16, 2, 70, 4, 64) for _ in "qd")
    k, v, dk, dv = (normal(rng, np.float16, 2, 130, 2, 64) for _ in range(4))
    check(memory, cuattn.flash_attention_jvp, [q, k, v, dq, dk, dv], [axis] * 6, None)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_decode(memory, dtype, tokens, axis, rng):
    q = normal(rng, dtype, 3, tokens, 8, 64)
    k, v = (normal(rng, dtype, 3, 200, 2, 64) for _ in "kv")
    lens = np.array([200, 77, 150], np.int32)
    check(memory, cuattn.flash_decode, [q, k, v], [axis] * 3, (q.shape, axis), lens,
          return_lse=True)  # fmt: skip


def paged(rng: np.random.Generator, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages of three sequences among them the first and the last, and lengths."""
    lens = np.array([200, 77, 150], np.int32)
    counts = -(-lens // page_size)
    order = rng.permutation(int(counts.sum()))
    table = np.full((3, counts.max()), 1 << 30, np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = order
    return table, lens


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("format", ["", "int8", "int4", "float8_e4m3"])
def test_pages(memory, format, tokens, page_size, rng):
    table, lens = paged(rng, page_size)
    pages = int(np.max(np.where(table < 1 << 30, table, 0))) + 1
    q = normal(rng, BFLOAT16, 3, tokens, 8, 128)
    dtype = np.float32 if format else BFLOAT16
    k, v = (normal(rng, dtype, pages, page_size, 2, 128) for _ in "kv")
    if format:
        k, v = (cuattn.quantize(x, format, symmetric=format != "int4") for x in (k, v))
    want = cuattn.paged_attention(q, k, v, table, lens)
    place = memory.codes if format else memory.place
    arrays = [cupy.asarray(q), *(place(x, 0) for x in (k, v)), *map(cupy.asarray, (table, lens))]
    same(cuattn.paged_attention(*arrays), want, atol=0.04)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("format", ["", "int8"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)])
def test_latents(memory, dtype, format, top_k, page_size, rng):
    table, lens = paged(rng, page_size)
    pages = int(np.max(np.where(table < 1 << 30, table, 0))) + 1
    q_latent, q_rope = (normal(rng, dtype, 3, 2, 16, n) for n in (512, 64))
    latents = normal(rng, np.float32 if format else dtype, pages, page_size, 1, 512)
    rope = normal(rng, dtype, pages, page_size, 1, 64)
    if format:
        latents = cuattn.quantize(latents, format)
    options: dict[str, Any] = {"scale": 0.05}
    if top_k:
        indices = rng.integers(0, lens[:, None, None] - 1, (3, 2, top_k)).astype(np.int32)
        options["indices"] = indices
    want = cuattn.mla_decode(q_latent, q_rope, latents, rope, table, lens, **options)
    place = memory.codes if format else memory.place
    arrays = [cupy.asarray(q_latent), cupy.asarray(q_rope), place(latents, 0)]
    arrays += [memory.place(rope, 0), cupy.asarray(table), cupy.asarray(lens)]
    if top_k:
        options["indices"] = cupy.asarray(indices)
    same(cuattn.mla_decode(*arrays, **options), want, atol=0.04)


@pytest.mark.parametrize("format", ["", "int8", "int4"])
@pytest.mark.parametrize("by", ["table", "slots"])
def test_append(memory, by, format, rng):
    table, lens = paged(rng, 16)
    pages = int(np.max(np.where(table < 1 << 30, table, 0))) + 1
    new = [normal(rng, np.float16, 3, 20, 2, 64) for _ in "kv"]
    empty = [np.zeros((pages, 16, 2, 64), np.float16) for _ in "kv"]
    if format:
        empty = [cuattn.quantize(x, format, symmetric=False) if format == "int4" else
                 cuattn.quantize(x, format) for x in empty]  # fmt: skip
    place = memory.codes if format else memory.place
    caches = [place(x, 0) for x in empty]
    if by == "table":
        where: list[Any] = [lens]
        options = {"page_table": table}
    else:
        where = [None]
        options = {"slots": rng.permutation(pages * 16)[:60].astype(np.int32)}
        new = [x.reshape(60, 2, 64) for x in new]
    cuattn.append_kv(*empty, *new, *where, **options)
    on_device = [None if x is None else cupy.asarray(x) for x in (*new, *where)]
    options = {name: cupy.asarray(x) for name, x in options.items()}
    cuattn.append_kv(*caches, *on_device, **options)
    for got, want in zip(caches, empty, strict=True):
        parts = [(got, want)]
        if format:
            names = ("data", "scale", "minimum")
            parts = [(getattr(got, name), getattr(want, name)) for name in names]
        for a, b in parts:
            if b is not None:
                assert np.array_equal(a.get(), b)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dim", [64, 128, 34])
def test_numbers_and_codes(memory, dim, axis, rng):
    x = normal(rng, np.float16, 3, 40, 2, dim)
    check(memory, cuattn.rope, [x], [axis], (x.shape, axis), np.arange(40, dtype=np.int32))
    for format in ("int8", "int4"):
        memory.used = 0
        want = cuattn.quantize(x, format)
        codes = cuattn.quantize(memory.place(x, axis), format)
        assert np.array_equal(codes.data.get(), want.data)
        values = cuattn.dequantize(memory.codes(want, axis), np.float16)
        same(values, cuattn.dequantize(want, np.float16))


@pytest.mark.parametrize("axis", [0, 1])
def test_merge(memory, axis, rng):
    outs, lses = normal(rng, np.float16, 3, 2, 40, 4, 64), normal(rng, np.float32, 3, 2, 4, 40)
    check(memory, cuattn.merge_attention, [outs, lses], [axis, None], None)


SAMPLED: list[tuple[Callable, dict[str, Any]]] = [
    (sampling.softmax, {}),
    (sampling.filter_logits, {"top_p": 0.9}),
    (sampling.filter_logits, {"top_k": 40, "top_p": 0.9}),
    (sampling.top_k, {"k": 20}),
    (sampling.greedy, {}),
    (sampling.sample, {"seed": 3}),
    (sampling.sample, {"seed": 3, "top_k": 40}),
    (sampling.sample, {"seed": 3, "top_p": 0.9}),
    (sampling.sample, {"seed": 3, "repetition": 1.5, "tokens": None}),
    (sampling.apply_penalties, {"repetition": 1.5, "tokens": None}),
    (sampling.logprobs, {"top_n": 5, "tokens": None}),
]


@pytest.mark.parametrize("number", range(len(SAMPLED)))
@pytest.mark.parametrize("vocab", [1000, 40000])
def test_sampling(memory, vocab, number, rng):
    function, options = SAMPLED[number]
    logits = normal(rng, np.float32, 5, vocab) * 3
    if "tokens" in options:
        options = options | {"tokens": rng.integers(0, vocab, (5, 30)).astype(np.int32)}
    want = function(logits, **options)
    on_device = {
        name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    same(function(memory.place(logits, 0), **on_device), want, atol=1e-3)


# ------------------------------------------------------------------------------------ large results


def repeated(array: np.ndarray, count: int) -> Any:
    """The same numbers, so many times along a new first axis."""
    return cupy.broadcast_to(cupy.asarray(array), (count, *array.shape))


def check_repeats(result: Any, want: np.ndarray | None = None, atol: float = 0.0) -> None:
    """The first of a result's first axis is right, and all others are the same."""
    if want is not None:
        same(result[0], want)
    part = max(1, (1 << 28) // max(1, result[0].nbytes))
    for begin in range(0, len(result), part):
        some = result[begin : begin + part]
        alike = some == result[:1] if not atol else abs(some - result[:1]) <= atol
        assert bool(alike.all()), f"others from {begin} on"


def check_each_accurate(result: Any, exact: np.ndarray, *plain: np.ndarray) -> None:
    """Each of a result's first axis obeys the rule of two, since their largest and their smallest
    numbers do; NaN is both."""
    part = max(1, (1 << 28) // result[0].nbytes)
    extremes = []
    for begin in range(0, len(result), part):
        some = result[begin : begin + part].astype(np.float32)
        extremes += [some.max(axis=0), some.min(axis=0)]
    for extreme in extremes:
        assert_accurate(extreme.get().astype(result.dtype), exact, *plain)


@pytest.fixture
def count_of(emulated):
    """How often results of so many numbers are to repeat, for more than 2^32 in all."""
    if not emulated:
        cupy.get_default_memory_pool().free_all_blocks()
        if cupy.cuda.runtime.memGetInfo()[0] < FREE_BYTES:
            pytest.skip("needs 60 GiB of device memory")
    yield lambda numbers: 3 if emulated else (1 << 32) // numbers + 3
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_large_attention(count_of, dtype, rng):
    q, k, v = (normal(rng, dtype, n, 16, 64) for n in (128, 20, 20))
    count = count_of(q.size)
    out, lse = cuattn.flash_attention(*(repeated(a, count) for a in (q, k, v)), return_lse=True)
    want, want_lse = cuattn.flash_attention(q, k, v, return_lse=True)
    check_repeats(out, want)
    check_repeats(lse, want_lse)


def test_large_ragged(count_of, rng):
    rows, count = 128, count_of(128 * 16 * 64)
    q, k, v = (normal(rng, np.float16, 1, 16, 64) for _ in "qkv")
    total = rows * count
    arrays = [cupy.broadcast_to(cupy.asarray(a), (total, *a.shape[1:])) for a in (q, k, v)]
    cu = cupy.arange(0, total + 1, rows, dtype=np.int32)
    check_repeats(cuattn.flash_attention_varlen(*arrays, cu), v[0])


@pytest.mark.parametrize("large", ["queries", "keys"])
@pytest.mark.parametrize("options", [{"deterministic": True}, {}, {"softcap": 5.0}], ids=str)
def test_large_gradients(count_of, options, large, rng):
    few, many = (20, 128) if large == "keys" else (128, 20)
    q, k, v, dout = (normal(rng, np.float16, n, 16, 64) for n in (few, many, many, few))
    count = count_of(128 * 16 * 64)
    of_forward = {n: o for n, o in options.items() if n != "deterministic"}
    out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **of_forward)
    arrays = [repeated(a, count) for a in (dout, q, k, v, out, lse)]
    grads = cuattn.flash_attention_backward(*arrays, **options)
    want = cuattn.flash_attention_backward(dout, q, k, v, out, lse, **options)
    for got, expected in zip(grads[:3], want[:3], strict=True):
        check_repeats(got, expected, atol=0.0 if "deterministic" in options else 0.02)


def test_large_jvp(count_of, rng):
    q, dq, k, dk, v, dv = (normal(rng, np.float16, n, 16, 64) for n in (128, 128, 20, 20, 20, 20))
    count = count_of(q.size)
    arrays = [repeated(a, count) for a in (q, k, v, dq, dk, dv)]
    results = cuattn.flash_attention_jvp(*arrays)
    for got, want in zip(results, cuattn.flash_attention_jvp(q, k, v, dq, dk, dv), strict=True):
        check_repeats(got, want)


@pytest.mark.parametrize("pages", [False, True])
def test_large_decode(count_of, pages, rng):
    q, k, v = (normal(rng, np.float16, n, h, 128) for n, h in ((1, 32), (64, 8), (64, 8)))
    (exact, *plain), _ = Call(q[None], k[None, :33], v[None, :33], {}, rng).expected()
    count = count_of(q.size)
    lens = cupy.full(count, 33, np.int32)
    if pages:
        table = cupy.zeros((count, 1), np.int32)
        rest = [*(cupy.asarray(a)[None] for a in (k, v)), table, lens]
        out = cuattn.paged_attention(repeated(q, count), *rest)
    else:
        arrays = [repeated(a, count) for a in (q, k, v)]
        out = cuattn.flash_decode(*arrays, lens)
    check_each_accurate(out, exact[0], *(a[0] for a in plain))


@pytest.mark.parametrize("num_splits", [None, "fixed"])
def test_large_latents(count_of, num_splits, rng):
    q_latent, q_rope = (normal(rng, BFLOAT16, 64, n) for n in (512, 64))
    latents, rope = (normal(rng, BFLOAT16, 1, 64, 1, n) for n in (512, 64))
    q, k = (np.concatenate(parts, axis=-1) for parts in ((q_latent, q_rope), (latents, rope)))
    call = Call(q[None, None], k[:, :33], latents[:, :33], {"scale": 0.05}, rng)
    (exact, *plain), _ = call.expected()
    count = count_of(q_latent.size)
    lens, table = cupy.full(count, 33, np.int32), cupy.zeros((count, 1), np.int32)
    queries = [repeated(a, count) for a in (q_latent, q_rope)]
    rest = [cupy.asarray(latents), cupy.asarray(rope), table, lens]
    out = cuattn.mla_decode(*queries, *rest, scale=0.05, num_splits=num_splits)
    check_each_accurate(out, exact[0, 0], *(a[0, 0] for a in plain))
    if num_splits == "fixed":
        check_repeats(out)


def test_large_numbers_and_codes(count_of, rng):
    x = normal(rng, np.float16, 40, 8, 128)
    count = count_of(x.size)
    positions = np.arange(40, dtype=np.int32)
    turned = cuattn.rope(repeated(x, count), cupy.asarray(positions))
    check_repeats(turned, cuattn.rope(x, positions))
    del turned
    for format in ("int8", "int4"):
        want = cuattn.quantize(x[None], format)
        codes = cuattn.quantize(repeated(x, count), format)
        assert np.array_equal(codes.data[0].get(), want.data[0])
        check_repeats(codes.data)
        check_repeats(codes.scale)
        values = cuattn.dequantize(codes, np.float16)
        check_repeats(values, cuattn.dequantize(want, np.float16)[0])
        del codes, values


def test_large_merge(count_of, rng):
    outs, lses = normal(rng, np.float16, 3, 40, 4, 128), normal(rng, np.float32, 3, 4, 40)
    count = count_of(outs[0].size)
    parts = [repeated(a, count) for a in outs], [repeated(a, count) for a in lses]
    want = cuattn.merge_attention(outs, lses)
    for got, expected in zip(cuattn.merge_attention(*parts), want, strict=True):
        check_repeats(got, expected)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 9])
def test_large_sampling(count_of, number, rng):
    function, options = SAMPLED[number]
    logits = normal(rng, np.float16, 128, 4096) * 3
    count = count_of(4096)
    if function is sampling.top_k:
        options = {"k": 1024}
    rows = cupy.broadcast_to(cupy.asarray(logits[0]), (count, 4096))
    if "tokens" in options:
        tokens = rng.integers(0, 4096, 30).astype(np.int32)
        options = options | {"tokens": tokens[None]}
        want = function(logits[:1], **options)
        options["tokens"] = repeated(tokens, count)
    else:
        want = function(logits[:1], **options)
    results = function(rows, **options)
    results, want = (x if isinstance(x, tuple) else (x,) for x in (results, want))
    for got, expected in zip(results, want, strict=True):
        check_repeats(got)
        same(got[:1], expected, atol=1e-3)
