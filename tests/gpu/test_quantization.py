"""Codes and scales on a GPU: the bits of NumPy's, and attention over them."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._quantized import FORMATS
from cuattn.gpu import dispatch
from tests import formulas
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in formulas.DTYPES}


def on_gpu(array):
    """A QuantizedArray with the same strides on the GPU."""
    scale, minimum = array.scale, array.minimum
    if minimum is not None and minimum.ctypes.data == scale.ctypes.data + scale.itemsize:
        words = cupy.asarray(np.ascontiguousarray(scale.swapaxes(-3, -2)))
        words = cupy.stack([words, cupy.asarray(minimum.swapaxes(-3, -2))], axis=-1)
        scale, minimum = (words[..., i].swapaxes(-3, -2) for i in range(2))
    else:
        scale = cupy.asarray(scale.swapaxes(-3, -2)).swapaxes(-3, -2)
        minimum = None if minimum is None else cupy.asarray(minimum)
    return cuattn.QuantizedArray(
        cupy.asarray(array.data),
        scale,
        dtype=array.dtype,
        minimum=minimum,
        offset=None if array.offset is None else cupy.asarray(array.offset),
        rotation=array.rotation,
        like=array.like,
    )


def assert_same_bits(got, want):
    np.testing.assert_array_equal(got.data.get(), want.data)
    for a, b in ((got.scale, want.scale), (got.minimum, want.minimum)):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.get().astype(np.float32), b.astype(np.float32))


def awkward(rng, shape, dtype):
    """Numbers of many sizes, with zeros of both signs, subnormals, infinities and NaN."""
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))
    flat = x.reshape(-1, shape[-1])
    for row, value in enumerate((0.0, -0.0, 1e-40, 3e38, np.nan, np.inf, -np.inf, 1e-7, 6e-8)):
        flat[row, :: row + 1] = value
    flat[10] = np.arange(shape[-1]) - 3.5  # ties
    # So large that rounding their scale up makes the largest code's number overflow, or not.
    flat[11, ::2], flat[12, ::2], flat[13, ::2], flat[14] = 3.38e38, -2.84e38, 3.25e38, 3.385e38
    flat[12, 1::2] = 5.3e37
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 34])
def test_the_bits_of_numpy(rng, head_dim, dtype):
    given = awkward(rng, (3, 37, 3, head_dim), dtype)
    offset = rng.standard_normal((3, head_dim)).astype(np.float32)
    group = {"granularity": "group", "group_size": 2 if head_dim % 32 else 32}
    shared = [{"granularity": each} for each in ("tensor", "head", "channel")]
    for format, scales, rotate, symmetric in itertools.product(
        FORMATS, ({}, group, *shared), (False, True), (True, False)
    ):
        x = given if scales not in shared else np.nan_to_num(given, posinf=1, neginf=1)
        if not symmetric and format != "int4":
            continue
        options = {**scales, "rotate": rotate, "symmetric": symmetric}
        want = cuattn.quantize(x, format, offset=offset if rotate else None, **options)
        got = cuattn.quantize(
            cupy.asarray(x), format, offset=cupy.asarray(offset) if rotate else None, **options
        )
        assert_same_bits(got, want)
        values = cuattn.dequantize(got).get().astype(np.float64)
        wanted = cuattn.dequantize(want).astype(np.float64)
        # Conversions may take subnormal numbers for 0.
        np.testing.assert_allclose(values, wanted, rtol=0, atol=2.0**-126)


def rows_of_one_sign(rng, shape, dtype):
    """Rows of zeros with and without a sign, of one number, of one sign, of a subnormal number."""
    x = np.full(shape, -0.0, dtype)
    x[1, ..., :5] = 0
    x[2], x[3] = 3, -3
    x[4], x[5] = np.abs(rng.standard_normal((2, *shape[1:])))
    x[5] *= -1
    x[6:8], x[6, ..., 7], x[7, ..., 9] = 0, -1e-40, 1e-40
    x[8], x[8, ..., 1::2] = 0, 5
    return x


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("rotate", [False, True])
def test_rows_of_one_sign(rng, rotate, dtype):
    x = rows_of_one_sign(rng, (16, 2, 128), dtype)
    group = {"granularity": "group", "group_size": 32}
    for format, options in itertools.product(FORMATS, ({}, group)):
        options = {**options, "rotate": rotate, "symmetric": format != "int4"}
        got = cuattn.quantize(cupy.asarray(x), format, **options)
        assert_same_bits(got, cuattn.quantize(x, format, **options))


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_scales_of_subnormal_numbers(dtype, granularity):
    x = np.zeros((1, 6, 2, 64), DTYPES[dtype])
    x[:, 1:3, 0], x[:, ::2, 1] = 1e-40, -1e-40
    for format in FORMATS:
        want = cuattn.quantize(x, format, granularity=granularity)
        got = cuattn.quantize(cupy.asarray(x), format, granularity=granularity)
        assert_same_bits(got, want)


@pytest.mark.parametrize("way", ["int8", "float8_e4m3", "int4", "k8v4", "rotated floats"])
def test_the_writer_s_rows_of_one_sign(rng, way):
    x = rows_of_one_sign(rng, (16, 2, 128), BFLOAT16)
    formats = cuattn.KVQuantization("float8_e4m3", rotate_k=True) if " " in way else WAYS[way]
    caches = [
        cuattn.PagedKVCache(2, 16, 2, 128, dtype=BFLOAT16, quantization=formats, xp=xp)
        for xp in (np, cupy)
    ]
    for cache, to in zip(caches, (np.asarray, cupy.asarray), strict=True):
        cache._store.arrays["pages"][...] = 0
        ids = [cache.add_sequence()]
        cache.extend(ids, 16)
        cache.write(0, ids, to(x), to(x[::-1]))
    host, device = (cache._store.arrays["pages"] for cache in caches)
    np.testing.assert_array_equal(device.get(), host)


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_nothing_has_a_scale_of_one(granularity):
    for symmetric in (True, False):
        x = cupy.zeros((3, 0, 2, 16), np.float16)
        codes = cuattn.quantize(x, "int4", granularity=granularity, symmetric=symmetric)
        assert (codes.scale.get() == 1).all()
        assert symmetric or not codes.minimum.get().any()


@pytest.mark.parametrize("formats", list(itertools.product(("", *FORMATS), repeat=2)), ids="-".join)
def test_decode_simt(rng, formats):
    """Any format, at any granularity, in any dtype; what is past a sequence's length is NaN."""
    if formats == ("", ""):
        pytest.skip("no codes")
    scales = [
        {},
        {"granularity": "group", "group_size": 16},
        {"granularity": "channel"},
        {"granularity": "head", "rotate": True},
        {"granularity": "tensor", "offset": rng.standard_normal((2, 80)).astype(np.float32)},
    ]
    seq_lens = np.array([37, 150, 0, 1], np.int32)
    for options, dtype in zip(scales, itertools.cycle(DTYPES.values()), strict=False):
        q = rng.standard_normal((4, 3, 8, 80)).astype(dtype)
        cache = []
        for format in formats:
            x = rng.standard_normal((4, 150, 2, 80)).astype(dtype)
            more = {"symmetric": False} if format == "int4" and not options else {}
            cache.append(cuattn.quantize(x, format, **options, **more) if format else x)
        values = [
            cuattn.dequantize(x, np.float64) if isinstance(x, cuattn.QuantizedArray) else x
            for x in cache
        ]
        want = cuattn.flash_decode(
            q.astype(np.float64), *(x.astype(np.float64) for x in values), seq_lens
        )
        with dispatch.use_tiers("decode_simt"):
            arrays = [
                on_gpu(x) if isinstance(x, cuattn.QuantizedArray) else cupy.asarray(x)
                for x in cache
            ]
            got = cuattn.flash_decode(cupy.asarray(q), *arrays, cupy.asarray(seq_lens)).get()
        plain = cuattn.flash_decode(q, *cache, seq_lens)
        formulas.assert_accurate(got, want, plain)


WAYS = {
    "int8": "int8",
    "float8_e4m3": "float8_e4m3",
    "float8_e5m2": "float8_e5m2",
    "int4": "int4",
    "k8v4": "k8v4",
    "groups": cuattn.KVQuantization("int4", "int4", group_size=32),
    "values": cuattn.KVQuantization(None, "int4"),
    "offset": cuattn.KVQuantization(
        "int8", "int4", k_offset=np.linspace(-1, 1, 256, dtype=np.float32).reshape(2, 128)
    ),
    "static": cuattn.KVQuantization(
        "int8",
        "float8_e4m3",
        k_scale=np.full((2, 128), 0.03, np.float32),
        v_scale=np.full((2, 1), 0.01, BFLOAT16),
        k_offset=np.linspace(-1, 1, 256, dtype=np.float32).reshape(2, 128),
    ),
}


@pytest.mark.parametrize("rotary", [None, "halves", "some", "neighbours"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("way", WAYS)
def test_the_writer_s_bytes(rng, way, dtype, rotary):
    """Pages written on the GPU hold the bytes that NumPy writes, rotated or not."""
    assert_writers_agree(rng, way, dtype, rotary, heads=2, dim=128)


@pytest.mark.parametrize("rotary", [None, "halves", "some", "neighbours"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", ["int8", "float8_e4m3", "int4", "k8v4"])
def test_the_writer_s_bytes_of_short_rows(rng, way, dtype, rotary):
    """The same of 64 features, and of more heads than a warp has in turn."""
    assert_writers_agree(rng, way, DTYPES[dtype], rotary, heads=6, dim=64)


@pytest.mark.parametrize(
    ("rotary", "heads", "dim"),
    [
        (None, 8, 128),
        ("halves", 8, 128),
        ("neighbours", 8, 128),
        ("halves", 12, 128),
        ("halves", 8, 64),
        ("neighbours", 8, 64),
    ],
)
@pytest.mark.parametrize("way", ["int8", "float8_e4m3", "int4", "k8v4"])
def test_the_writer_s_heads_in_turn(rng, way, rotary, heads, dim, monkeypatch):
    """A warp has several, as where there are many tokens: eight or four."""
    monkeypatch.setattr("cuattn.gpu.dispatch.kvcache.ENOUGH_BLOCKS", 0)
    assert_writers_agree(rng, way, BFLOAT16, rotary, heads=heads, dim=dim)


def assert_writers_agree(rng, way, dtype, rotary, heads, dim):
    caches = [
        cuattn.PagedKVCache(
            40, 16, heads, dim, dtype=dtype, quantization=WAYS[way], num_layers=2, xp=xp
        )
        for xp in (np, cupy)
    ]
    k, v = awkward(rng, (57, heads, dim), dtype), awkward(rng, (57, heads, dim), dtype)
    acc = np.float64 if dtype == np.float64 else np.float32
    pairs = dim // 2 if rotary != "some" else 20
    if rotary:  # products with subnormal numbers may be 0
        k = np.where(np.abs(k) < 1e-30, 0, k).astype(dtype)
    angles = rng.standard_normal((2, 64, pairs)).astype(acc)
    options = {} if rotary is None else {"interleaved": rotary == "neighbours"}
    for cache, to in zip(caches, (np.asarray, cupy.asarray), strict=True):
        cache._store.arrays["pages"][...] = 0
        ids = [cache.add_sequence() for _ in range(3)]
        cache.extend(ids, [30, 1, 26])
        rope = None if rotary is None else tuple(to(a) for a in angles)
        cache.write(1, ids, to(k), to(v), rope=rope, **options)
    host, device = (cache._store.arrays["pages"] for cache in caches)
    for pages, other in zip(caches[0].pages(1), caches[1].pages(1), strict=True):
        if isinstance(pages, np.ndarray):
            np.testing.assert_array_equal(other.get().astype(float), pages.astype(float))
        else:
            assert_same_bits(other, pages)
    if way != "values":  # plain keys may be NaN of any pattern
        np.testing.assert_array_equal(device.get(), host)


def test_a_cache_goes_on_where_another_was(rng):
    """Written on the GPU, loaded on the host, attended to on both."""
    import io

    cache = cuattn.PagedKVCache(20, 16, 2, 64, dtype=np.float16, quantization="k8v4", xp=cupy)
    a = cache.add_sequence()
    cache.extend([a], 100)
    k, v = rng.standard_normal((2, 100, 2, 64)).astype(np.float16)
    cache.write(0, [a], cupy.asarray(k), cupy.asarray(v))
    b = cache.fork(a)
    cache.extend([b], 1)
    cache.write(0, [b], cupy.asarray(k[:1]), cupy.asarray(v[:1]))
    file = io.BytesIO()
    cache.save(file)
    file.seek(0)
    other = cuattn.PagedKVCache.load(file)
    q = rng.standard_normal((2, 1, 4, 64)).astype(np.float16)
    got, want = (
        cuattn.paged_attention(
            to(q), *each.pages(0), each.page_table([a, b]), each.seq_lens([a, b])
        )
        for each, to in ((cache, cupy.asarray), (other, np.asarray))
    )
    np.testing.assert_allclose(got.get().astype(float), want.astype(float), atol=2e-3)


class Prompts:
    """Calls of 40 query tokens a sequence over codes, in pages that are out of order, some of them
    of several sequences, or in caches; sequences end anywhere."""

    seq_lens = np.array([100, 43, 64], np.int32)
    bounds = np.array([0, 60, 90, 120], np.int32)

    def __init__(self, rng, way, *, paged, ragged=False, dim=64, dtype=BFLOAT16):
        formats = ("int8", "int4") if way == "k8v4" else (way, way)
        shape = (21, 16, 2, dim) if paged else (3, 112, 2, dim)
        arrays = []
        for name, format in zip("kv", formats, strict=True):
            x = rng.standard_normal(shape).astype(dtype)
            options = {"offset": x.mean(axis=(0, 1), dtype=np.float32)} if name == "k" else {}
            options |= {"symmetric": format != "int4", "rotate": name == "k"}
            arrays.append(cuattn.quantize(x, format, **options))
        self.k, self.v = arrays
        self.q = rng.standard_normal((3, 40, 4, dim)).astype(dtype)
        self.options = {"window": (50, None)}
        self.table = None
        if paged:
            self.table = rng.permutation(21).reshape(3, 7).astype(np.int32)
            self.table[1:, :2] = self.table[0, :2]
            for b, n in enumerate(self.seq_lens):
                self.table[b, -(-n // 16) :] = 1 << 30
        if ragged:
            self.q = self.q.reshape(-1, 4, dim)
            self.options["cu_seqlens_q"] = self.bounds

    def call(self, q, k, v, to, **more):
        """The call with arrays that `to` has made of NumPy's."""
        options = {
            name: to(value) if isinstance(value, np.ndarray) else value
            for name, value in (self.options | more).items()
        }
        if self.table is not None:
            return cuattn.paged_attention(q, k, v, to(self.table), to(self.seq_lens), **options)
        return cuattn.flash_decode(q, k, v, to(self.seq_lens), **options)

    def on_gpu(self, **more):
        return self.call(cupy.asarray(self.q), on_gpu(self.k), on_gpu(self.v), cupy.asarray, **more)

    def check(self, got, **more):
        """By the values, and by these in q's dtype: that is what kernels read."""
        numbers = [cuattn.dequantize(x, np.float64) for x in (self.k, self.v)]
        want = self.call(self.q.astype(np.float64), *numbers, np.asarray, **more)
        rounded = [cuattn.dequantize(x, self.q.dtype) for x in (self.k, self.v)]
        plain = self.call(self.q, *rounded, np.asarray, **more)
        slack = 4 * float(ml_dtypes.finfo(self.q.dtype).eps)
        formulas.assert_accurate(got.get(), want, plain, slack=slack)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("way", ["int8", "k8v4", "float8_e4m3"])
def test_prompts_over_pages(rng, way, ragged):
    """Of which the same numbers in 16 bits are made first."""
    prompts = Prompts(rng, way, paged=True, ragged=ragged)
    prompts.check(prompts.on_gpu())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prompts_over_caches(rng, dim):
    prompts = Prompts(rng, "int8", paged=False, dim=dim, dtype=np.dtype(np.float16))
    prompts.check(prompts.on_gpu())


@pytest.mark.parametrize("paged", [False, True])
def test_prompts_that_take_turns(rng, paged, monkeypatch):
    """Where the numbers of all sequences would take too much memory."""
    prompts = Prompts(rng, "int8", paged=paged)
    more = {"alibi_slopes": rng.random((3, 4)).astype(np.float32)}
    whole = prompts.on_gpu(return_lse=True, **more)
    monkeypatch.setattr("cuattn.gpu.dispatch.quantization.MOST_EXPANDED", 2 * 112 * 2 * 128 * 2)
    for one, other in zip(prompts.on_gpu(return_lse=True, **more), whole, strict=True):
        cupy.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), atol=2e-2, rtol=2e-2
        )
    prompts.check(whole[0], **more)


@pytest.mark.parametrize("tokens", [1, 40])
def test_masks_over_codes(rng, tokens):
    """For which there is no kernel of tensor cores that reads codes."""
    prompts = Prompts(rng, "int8", paged=True)
    prompts.q = prompts.q[:, :tokens]
    more = {"key_mask": rng.random((3, 112)) > 0.3}
    prompts.check(prompts.on_gpu(**more), **more)


def test_prompts_in_a_graph(rng):
    """A replay expands what codes, lengths and the page table then are."""
    prompts = Prompts(rng, "int8", paged=True)
    q, k, v = cupy.asarray(prompts.q), on_gpu(prompts.k), on_gpu(prompts.v)
    table, seq_lens = cupy.asarray(prompts.table), cupy.asarray(prompts.seq_lens)
    places = {prompts.table.ctypes.data: table, prompts.seq_lens.ctypes.data: seq_lens}

    def call():
        return prompts.call(q, k, v, lambda array: places[array.ctypes.data])

    replay, out = captured(call)
    for array in (k.data, v.data):
        array[:] = array[::-1].copy()
    seq_lens[:] = cupy.asarray(np.array([81, 100, 40], np.int32))
    table[:] = cupy.asarray(rng.permutation(21).reshape(3, 7).astype(np.int32))
    out[:] = np.nan
    replay()
    cupy.testing.assert_array_equal(out, call())
