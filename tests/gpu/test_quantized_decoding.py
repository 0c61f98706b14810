"""Decoding over quantised caches: every code is itself, and attention is that of the values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._quantized import FORMATS
from cuattn.gpu import compiler, dispatch
from cuattn.gpu.dispatch import decoding_codes_sm90
from cuattn.gpu.dispatch.decoding import CODE_FORMATS
from cuattn.reference.quantization import rotated
from tests import formulas

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: What takes a call: those before the last leave some to it.
TIERS = {
    "clusters": ("decode_sm90", "decode_sm80"),
    "codes_sm90": ("decode_codes_sm90", "decode_sm80"),
    "sm80": ("decode_sm80",),
}
PAIRS = pytest.mark.parametrize("formats", CODE_FORMATS, ids="/".join)
LENS = [0, 1, 5, 31, 32, 33, 200, 517]


@pytest.fixture(params=TIERS)
def tiers(request, monkeypatch):
    # However few sequences there are.
    monkeypatch.setattr(decoding_codes_sm90, "LEAST_PAIRS", 0)
    with dispatch.use_tiers(*TIERS[request.param]):
        yield


def on_device(x: Any) -> Any:
    """An array, or codes with scales that lie as caches have them: (page, head, token, group), and
    a minimum behind each scale."""
    if not isinstance(x, cuattn.QuantizedArray):
        return cupy.asarray(x)
    scale, minimum = x.scale, None
    if x.minimum is not None:
        pair = np.stack([x.scale, x.minimum], axis=-1).swapaxes(1, 2)
        pair = cupy.asarray(np.ascontiguousarray(pair)).swapaxes(1, 2)
        scale, minimum = pair[..., 0], pair[..., 1]
    else:
        scale = cupy.asarray(np.ascontiguousarray(scale.swapaxes(1, 2))).swapaxes(1, 2)
    offset = None if x.offset is None else cupy.asarray(x.offset)
    return cuattn.QuantizedArray(
        cupy.asarray(x.data),
        scale,
        dtype=x.dtype,
        minimum=minimum,
        offset=offset,
        rotation=x.rotation,
        like=x.like,
    )


class Cache:
    """Keys or values of some sequences as codes, contiguous and in pages, with what is to spoil a
    result wherever nothing is to be read."""

    def __init__(self, rng, lens, heads, dim, format, page_size=16, **options):
        capacity = -(-max(lens) // page_size) * page_size
        x = rng.standard_normal((len(lens), capacity, heads, dim)).astype(np.float32)
        x *= np.exp(rng.standard_normal((len(lens), capacity, heads, 1)))
        x = x.astype(BFLOAT16)
        if format == "int4" and "symmetric" not in options:
            options["symmetric"] = False
        codes = cuattn.quantize(x, format, **options)
        self.values = cuattn.dequantize(codes, np.float32)
        self.codes = self.spoiled(codes, lens)
        pages = capacity // page_size
        self.table = np.arange(len(lens) * pages)[::-1].reshape(len(lens), pages)
        self.pages = self.codes.of(
            self.paged(self.codes.data, page_size),
            self.paged(self.codes.scale, page_size),
            None if codes.minimum is None else self.paged(self.codes.minimum, page_size),
        )

    @staticmethod
    def spoiled(codes, lens):
        """NaN scales, and NaN codes where there are any, behind each sequence."""
        arrays = [codes.data, codes.scale, codes.minimum]
        for i, array in enumerate(arrays):
            if array is None or array.shape[:2] != codes.data.shape[:2]:
                continue
            arrays[i] = array = array.copy()
            for b, n in enumerate(lens):
                array[b, n:] = np.nan if i else 0x7F
        return codes.of(*arrays)

    def paged(self, array, page_size):
        if array.shape[:2] == (1, 1):
            return array
        pages = array.reshape(-1, page_size, *array.shape[2:])
        result = np.empty_like(pages)
        result[self.table.ravel()] = pages
        return result


def decode(q, k, v, lens, paged, **options):
    """Out and lse."""
    lens = cupy.asarray(np.array(lens, np.int32))
    if not paged:
        arrays = (on_device(q), on_device(k.codes), on_device(v.codes), lens)
        return cuattn.flash_decode(*arrays, return_lse=True, **options)
    table = k.table.astype(np.int32)
    arrays = (on_device(q), on_device(k.pages), on_device(v.pages), on_device(table), lens)
    return cuattn.paged_attention(*arrays, return_lse=True, **options)


def check(result, q, k, v, lens, others=(), **options):
    """Judge out and lse by the definition on each sequence's values; its errors are also those with
    other queries and keys that have the same products."""
    out, lse = (a.get() for a in result)
    options.setdefault("scale", q.shape[-1] ** -0.5)
    results = []
    for queries, keys, precision in (
        (q, k, np.float64),
        (q, k, q.dtype),
        *((*other, q.dtype) for other in others),
    ):
        parts = [
            formulas.attention(
                *(queries[b : b + 1], keys[b : b + 1, :n], v[b : b + 1, :n]),
                precision=precision,
                **options,
            )
            for b, n in enumerate(lens)
        ]
        results.append([np.concatenate(part) for part in zip(*parts, strict=True)])
    (exact, exact_lse), *plain = results
    formulas.assert_accurate(out, exact, *(out for out, _ in plain))
    formulas.assert_accurate(lse, exact_lse, *(lse for _, lse in plain))


def scales_in_queries(q, k):
    """Queries and keys with the same products, where each channel's scale is in the queries, which
    are rounded to their dtype, and not in the keys: where kernels have it."""
    codes, group = k.codes, q.shape[2] // k.values.shape[2]
    scale = codes.scale.astype(np.float32)
    least = np.zeros_like(scale) if codes.minimum is None else codes.minimum.astype(np.float32)
    middle = least + (0 if codes.minimum is None else 8) * scale
    queries = (q.astype(np.float32) * np.repeat(scale, group, axis=2)).astype(q.dtype)
    keys = (k.values - middle) / scale
    added = np.broadcast_to(middle, keys.shape)
    return np.concatenate([queries, q], axis=-1), np.concatenate([keys, added], axis=-1)


def rotated_queries(q, k):
    """Queries that are rotated and then rounded, and the keys as their codes have them."""
    codes = k.codes
    plain = cuattn.QuantizedArray(
        codes.data, codes.scale, dtype=codes.dtype, minimum=codes.minimum, offset=codes.offset
    )
    queries = rotated(q.astype(np.float32)).astype(q.dtype)
    return queries, cuattn.dequantize(plain, np.float32)


@PAIRS
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_code_at_every_channel(tiers, formats, dim):
    """One key a sequence, and queries that each ask for one channel."""
    heads, group = dim // 8, 8
    drawn = []
    for step, format in zip((7, 1), formats, strict=True):
        count = 256 if FORMATS[format].bits == 8 else 16
        codes = (np.arange(256)[:, None] + step * np.arange(dim)) % count
        if format == "float8_e4m3":
            codes[codes % 128 == 127] = 0
        if format == "float8_e5m2":
            codes[codes % 128 >= 124] = 0
        codes = codes.astype(np.uint8)
        if format == "int4":
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        data = np.repeat(codes[:, None, None].view(FORMATS[format].storage), heads, axis=2)
        drawn.append(cuattn.QuantizedArray(data, np.ones((1, 1, 1, 1), np.float32), dtype=format))
    k_values, v_values = (cuattn.dequantize(x, np.float32)[:, 0] for x in drawn)
    q = np.zeros((256, heads * group, dim), np.float16)
    q[:, np.arange(dim), np.arange(dim)] = 1
    k, v = map(on_device, drawn)
    out, lse = cuattn.flash_decode(
        cupy.asarray(q), k, v, cupy.ones(256, np.int32), scale=1.0, return_lse=True
    )
    channel = np.arange(dim)
    np.testing.assert_array_equal(out.get(), np.repeat(v_values, group, axis=1))
    np.testing.assert_allclose(
        lse.get()[:, :, 0], k_values[:, channel // group, channel], rtol=1e-6, atol=1e-6
    )


@PAIRS
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("heads_q", "tokens"), [(8, 1), (2, 3), (8, 3), (16, 3), (8, 16)])
def test_rows(rng, tiers, formats, paged, dim, heads_q, tokens):
    k, v = (Cache(rng, LENS, 2, dim, format) for format in formats)
    q = rng.standard_normal((len(LENS), tokens, heads_q, dim)).astype(BFLOAT16)
    result = decode(q, k, v, LENS, paged)
    check(result, q, k.values, v.values, LENS, causal=True)


@PAIRS
@pytest.mark.parametrize("lens", [[0, 33, 200], [517], [4200]], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_few_sequences(rng, tiers, formats, lens, dim):
    """Each with a cluster of blocks for every key head, or several, where there are clusters."""
    k, v = (Cache(rng, lens, 2, dim, format) for format in formats)
    for tokens, paged in ((1, False), (2, True)):
        q = rng.standard_normal((len(lens), tokens, 16, dim)).astype(BFLOAT16)
        result = decode(q, k, v, lens, paged)
        check(result, q, k.values, v.values, lens, causal=True)


@PAIRS
@pytest.mark.parametrize("group", [1, 9])
def test_several_small_clusters(rng, tiers, formats, group):
    """Of two blocks, four for each key head, where there are clusters."""
    k, v = (Cache(rng, [4100], 16, 64, format) for format in formats)
    q = rng.standard_normal((1, 1, 16 * group, 64)).astype(BFLOAT16)
    check(decode(q, k, v, [4100], True), q, k.values, v.values, [4100], causal=True)


@PAIRS
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (18, 6), (16, 8), (16, 4), (32, 4), (24, 12)], ids=str)
def test_neighbouring_heads(rng, tiers, formats, dim, heads):
    """Of keys, which a block of decode_codes_sm90 has side by side where their rows are short."""
    lens = [0, 33, 200]
    k, v = (Cache(rng, lens, heads[1], dim, format) for format in formats)
    q = rng.standard_normal((len(lens), 1, heads[0], dim)).astype(BFLOAT16)
    options = {
        "alibi_slopes": rng.random(heads[0]).astype(np.float32),
        "sinks": rng.standard_normal(heads[0]).astype(np.float32),
    }
    given = {name: cupy.asarray(array) for name, array in options.items()}
    for paged in (False, True):
        result = decode(q, k, v, lens, paged, **given)
        check(result, q, k.values, v.values, lens, causal=True, **options)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_four_heads_of_a_block_with_several_splits(rng, monkeypatch, group):
    """A warp multiplies four rows, or eight, of which a head has fewer: none past the tile's, where
    the next split's are on their way."""
    monkeypatch.setattr(decoding_codes_sm90, "MANY_KEYS", 0)
    monkeypatch.setattr(compiler, "multiprocessors", lambda device: 2)
    lens = [300, 33, 70]
    k, v = (Cache(rng, lens, 8, 64, "int4") for _ in "kv")
    q = rng.standard_normal((len(lens), 1, 8 * group, 64)).astype(np.float16)
    with dispatch.use_tiers(*TIERS["codes_sm90"]):
        result = decode(q, k, v, lens, True)
    check(result, q, k.values, v.values, lens, causal=True)


SCALES: dict[str, dict[str, Any]] = {
    "tensor": {"granularity": "tensor"},
    "head": {"granularity": "head"},
    "symmetric": {"symmetric": True},
    "rotated": {"rotate": True},
    "group of 64": {"granularity": "group", "group_size": 64},
    "group of 32": {"granularity": "group", "group_size": 32},
    "channel": {"granularity": "channel"},
    "offset": {"offset": True},
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("format", ["int8", "int4", "float8_e4m3"])
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=["float16", "bfloat16"])
def test_scales(rng, tiers, kind, format, dtype):
    """Scales of other granularity; of keys alone where decode_sm80 has values' by token."""
    options = dict(SCALES[kind])
    if kind.startswith("group") and format != "int4":
        pytest.skip("decode_sm80 has groups for int4")
    if "offset" in options:
        options["offset"] = rng.standard_normal((2, 128)).astype(np.float32)
    k = Cache(rng, LENS, 2, 128, format, **options)
    if kind in ("rotated", "channel", "offset"):
        options = {}
    v = Cache(rng, LENS, 2, 128, format, **options)
    q = rng.standard_normal((len(LENS), 2, 8, 128)).astype(dtype)
    others = {"channel": [scales_in_queries], "rotated": [rotated_queries]}.get(kind, [])
    others = [other(q, k) for other in others]
    for paged in (False, True):
        result = decode(q, k, v, LENS, paged)
        check(result, q, k.values, v.values, LENS, others, causal=True)


@pytest.mark.parametrize("page_size", [1, 2, 8, 64])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_page_sizes_and_options(rng, tiers, page_size, format):
    k, v = (Cache(rng, LENS, 2, 96, format, page_size) for _ in "kv")
    q = rng.standard_normal((len(LENS), 2, 8, 96)).astype(BFLOAT16)
    options = {
        "causal": True,
        "window": (100, 5),
        "softcap": 5.0,
        "alibi_slopes": rng.random(8).astype(np.float32),
        "sinks": rng.standard_normal(8).astype(np.float32),
    }
    given = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    for num_splits in (None, "fixed", 3):
        result = decode(q, k, v, LENS, True, num_splits=num_splits, **given)
        check(result, q, k.values, v.values, LENS, **options)


@pytest.mark.parametrize("factor", [1e-30, 1e30, -1.0])
def test_extreme_scales(rng, tiers, factor):
    """Weights times scales fit float16 whatever the scales are; a scale of 0 is no harm."""
    lens = [517]
    x = rng.standard_normal((1, 528, 2, 128)).astype(np.float32)
    codes = cuattn.quantize(x, "int8")
    scale = codes.scale.astype(np.float32) * np.float32(factor)
    scale[0, 7] = 0
    scale[0, 3::5] *= np.float32(1e-4)
    v = codes.of(codes.data, scale, None)
    values = cuattn.dequantize(v, np.float32)
    q = rng.standard_normal((1, 1, 8, 128)).astype(BFLOAT16)
    k_values = cuattn.dequantize(codes, np.float32)
    seq_lens = cupy.asarray(np.array(lens, np.int32))
    arrays = (on_device(q), on_device(codes), on_device(v), seq_lens)
    result = cuattn.flash_decode(*arrays, return_lse=True)
    check(result, q, k_values, values, lens, causal=True)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_uniform_attention_to_many_keys(rng, tiers, format):
    """What products round off does not add up to a bias of the values."""
    count = 1 << 17
    codes = rng.integers(0, 256, (1, count, 1, 128 if format == "int8" else 64), dtype=np.uint8)
    codes = codes.view(FORMATS[format].storage)
    one = np.ones((1, 1, 1, 1), np.float32)
    x = cuattn.QuantizedArray(codes, one, dtype=format)
    q = np.zeros((1, 8, 128), np.float16)
    arrays = (cupy.asarray(q), on_device(x), on_device(x), cupy.full(1, count, np.int32))
    out = cuattn.flash_decode(*arrays)
    values = cuattn.dequantize(x, np.float32)
    exact = values.astype(np.float64).mean(axis=1)[0, 0]
    assert np.abs(out.get() - exact).max() < 2e-3 * values.std()


def test_a_batch_does_not_matter(rng, tiers):
    """Neither where a sequence stands nor what stands around it, with fixed splits."""
    lens = [1500, 77, 2048]
    k, v = (Cache(rng, lens, 2, 128, format) for format in ("int8", "int4"))
    q = rng.standard_normal((3, 1, 8, 128)).astype(BFLOAT16)
    out, lse = (a.get() for a in decode(q, k, v, lens, True, num_splits="fixed"))
    order = np.array([2, 0, 1])
    k.table = k.table[order]
    turned = decode(q[order], k, v, [lens[i] for i in order], True, num_splits="fixed")
    np.testing.assert_array_equal(turned[0].get(), out[order])
    np.testing.assert_array_equal(turned[1].get(), lse[order])


@pytest.mark.parametrize("k_format", ["int8", "int4"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prompts_rotate_queries_instead_of_keys(rng, monkeypatch, dim, k_format):
    monkeypatch.setattr(dispatch, "rotates_queries", lambda spec: True)
    lens = [300, 0, 77]
    k = Cache(rng, lens, 2, dim, k_format, rotate=True)
    v = Cache(rng, lens, 2, dim, "int8")
    q = rng.standard_normal((3, 70, 4, dim)).astype(BFLOAT16)
    result = decode(q, k, v, lens, True)
    check(result, q, k.values, v.values, lens, [rotated_queries(q, k)], causal=True)
