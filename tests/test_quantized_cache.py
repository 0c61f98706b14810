"""Paged caches of codes: what is written is quantised once, and moves as bytes after that."""

from __future__ import annotations

import copy
import io
import pickle

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import KVQuantization, PagedKVCache
from cuattn.kvcache.layout import PRESETS

BFLOAT16 = ml_dtypes.bfloat16
HEADS, DIM, LAYERS = 2, 64, 2
STATIC = KVQuantization(
    "int8",
    "float8_e4m3",
    k_scale=np.full((HEADS, DIM), 0.03, np.float32),
    v_scale=np.full((LAYERS, HEADS, 1), 0.01, np.float32),
    k_offset=np.linspace(-1, 1, HEADS * DIM, dtype=np.float32).reshape(HEADS, DIM),
)
WAYS = {
    **PRESETS,
    "static": STATIC,
    "groups": KVQuantization("int4", "int4", group_size=32),
    "rotated": KVQuantization("float8_e4m3", "float8_e5m2", rotate_k=True),
    "not rotated": KVQuantization("int8", "int8", rotate_k=False),
    "values": KVQuantization(None, "int4"),
    "keys": KVQuantization("float8_e4m3", None),
}


class Exported:
    """An array of another library, which has DLPack and little more."""

    def __init__(self, array):
        self.shape, self._array = array.shape, array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


def new_cache(quantization, **options):
    arguments = {"num_pages": 24, "page_size": 4, "num_kv_heads": HEADS, "head_dim": DIM}
    arguments |= {"num_layers": LAYERS, "dtype": np.float32}
    return PagedKVCache(**{**arguments, "quantization": quantization, **options})


def content(tokens, layer):
    """Keys and values that follow from the token and its place."""
    rng = np.random.default_rng(layer)
    table = rng.standard_normal((2, 100, HEADS, DIM), dtype=np.float32)
    place = np.arange(len(tokens))[:, None, None] / 64
    return tuple(part[np.asarray(tokens)] + place.astype(np.float32) for part in table)


def fill(cache, tokens, known=True):
    tokens = np.asarray(tokens)
    id = cache.add_sequence(tokens if known else None)
    found = cache.num_tokens(id)
    cache.extend([id], len(tokens) - found)
    for layer in range(LAYERS):
        cache.write(layer, [id], *(part[found:] for part in content(tokens, layer)))
    return id


def held(cache, id, layer=0):
    """The bytes that a sequence has: codes, scales and minima of its tokens."""
    length = cache.num_tokens(id)
    table = cache.page_table([id])[0, : -(-length // cache.page_size)]
    parts = []
    for pages in cache.pages(layer):
        stored = pages[table]
        arrays = (
            (stored.data, stored.scale, stored.minimum)
            if isinstance(stored, cuattn.QuantizedArray)
            else (stored,)
        )
        for array in arrays:
            if array is not None:
                tokens = array.reshape(-1, *array.shape[2:])[:length]
                parts.append(np.ascontiguousarray(tokens).view(np.uint8).tobytes())
    return parts


def of_one_write(quantization, tokens, layer=0):
    """What `quantize` makes of a whole sequence at once."""
    cache = new_cache(quantization)
    return held(cache, fill(cache, tokens, known=False), layer)


@pytest.mark.parametrize("way", WAYS)
def test_a_token_is_quantised_by_itself(way):
    """Token by token, in one go, and with `quantize`: the same bytes."""
    cache, tokens = new_cache(WAYS[way]), [*range(10)]
    id = cache.add_sequence()
    keys, values = content(tokens, 0)
    for i in range(10):
        cache.extend([id], 1)
        for layer in range(LAYERS):
            cache.write(layer, [id], keys[i : i + 1], values[i : i + 1])
    assert held(cache, id) == of_one_write(WAYS[way], tokens)
    quantization = PRESETS.get(way, WAYS[way])
    for x, pages, format in zip(
        (keys, values), cache.pages(0), (quantization.k, quantization.v), strict=True
    ):
        stored = pages[cache.page_table([id])[0, :3]]
        if format is None:
            assert (stored.reshape(-1, HEADS, DIM)[:10] == x).all()
            continue
        group = quantization.group_size
        given = None if pages.has_scale_of_tokens else pages.scale[0]
        codes = cuattn.quantize(
            x,
            format,
            granularity="token" if group is None else "group",
            group_size=group,
            symmetric=stored.minimum is None,
            offset=stored.offset,
            rotate=stored.rotation is not None,
            scale=given,
        )
        np.testing.assert_array_equal(
            cuattn.dequantize(stored).reshape(-1, HEADS, DIM)[:10], cuattn.dequantize(codes)
        )


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_quantised_twice(way):
    """Shared prefixes, forks, copies on write, truncation within a page, files, copies and swaps
    leave every byte as the first write made it."""
    cache, text = new_cache(WAYS[way]), [*range(30, 48)]
    a = fill(cache, text)
    first = held(cache, a)
    b = fill(cache, [*text[:14], 1, 2])  # shares three pages
    assert held(cache, b) == of_one_write(WAYS[way], [*text[:14], 1, 2])
    c = cache.fork(a)
    cache.truncate(c, 13)
    cache.extend([c], 3)
    for layer in range(LAYERS):
        cache.write(layer, [c], *(part[13:] for part in content([*text[:13], 7, 8, 9], layer)))
    want = of_one_write(WAYS[way], [*text[:13], 7, 8, 9])
    assert held(cache, c) == want and held(cache, a) == first
    file = io.BytesIO()
    cache.save(file)
    file.seek(0)
    for other in (
        PagedKVCache.load(file),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
    ):
        assert held(other, a) == first and held(other, c) == want
        assert repr(other.quantization) == repr(cache.quantization)
        assert other.add_sequence(text) not in (a, b, c)
    swapped = pickle.loads(pickle.dumps(cache.swap_out(a)))
    cache.remove(b)
    cache.reset()
    again = cache.swap_in(swapped)
    assert held(cache, again) == first and held(cache, again, 1) == of_one_write(WAYS[way], text, 1)


@pytest.mark.parametrize("way", WAYS)
def test_attention_over_it(way):
    """That of the values, which are near what was written."""
    cache = new_cache(WAYS[way])
    ids = [fill(cache, [*range(n)], known=False) for n in (9, 17)]
    q = np.random.default_rng(0).standard_normal((2, 2, 4, DIM), dtype=np.float32)
    arguments = cache.page_table(ids), cache.seq_lens(ids)
    got = cuattn.paged_attention(q, *cache.pages(1), *arguments)
    values = [np.array(pages, np.float32) for pages in cache.pages(1)]
    np.testing.assert_array_equal(got, cuattn.paged_attention(q, *values, *arguments))
    plain = new_cache(None)
    ids = [fill(plain, [*range(n)], known=False) for n in (9, 17)]
    want = cuattn.paged_attention(q, *plain.pages(1), plain.page_table(ids), plain.seq_lens(ids))
    assert np.abs(got - want).max() < (0.6 if "4" in repr(WAYS[way]) else 0.2)


def test_rope_comes_first():
    """The cache holds codes of the keys that a plain cache would hold."""
    plain, cache = (new_cache(way, dtype=np.float16) for way in (None, "int8"))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((10, HEADS, DIM)).astype(np.float16) for _ in "kv")
    rope = tuple(rng.standard_normal((16, DIM // 2), dtype=np.float32) for _ in "cs")
    for each in (plain, cache):
        id = each.add_sequence()
        each.extend([id], 10)
        each.write(0, [id], k, v, rope=rope)
    for stored, codes in zip(plain.pages(0), cache.pages(0), strict=True):
        of_keys = codes.rotation is not None
        pages = plain.page_table([id])[0, :3]
        want = cuattn.quantize(stored[pages], "int8", rotate=of_keys)
        np.testing.assert_array_equal(codes[cache.page_table([id])[0, :2]].data, want.data[:2])


def test_bytes():
    """Codes, scales and the padding of pages, as docs/notes/quantization.md has them."""
    options = {"page_size": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": BFLOAT16}
    sizes = {way: new_cache(way, **options).nbytes // (24 * LAYERS) for way in (None, *PRESETS)}
    assert sizes == {
        None: 65536,
        "int8": 33280,
        "float8_e4m3": 33280,
        "float8_e5m2": 33280,
        "int4": 17408,
        "k8v4": 25344,
    }


def test_what_is_static_stays():
    cache = new_cache(STATIC, num_pages=1, page_size=1, num_layers=LAYERS)
    fill(cache, [5], known=False)
    k, v = cache.pages(1)
    np.testing.assert_array_equal(k.scale[0, 0], STATIC.k_scale)
    np.testing.assert_array_equal(v.scale[0, 0], STATIC.v_scale[1])


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("fp8", 'quantization is \'fp8\', must be one of "int8", "int4"'),
        (KVQuantization(group_size=48), "group_size 48, must divide k's head_dim 64"),
        (KVQuantization(group_size=0), "group_size 0, must divide k's head_dim 64"),
        (
            KVQuantization(k_offset=np.zeros((3, DIM), np.float32)),
            r"quantization.k_offset has shape \(3, 64\)",
        ),
        (
            KVQuantization(v_scale=np.ones((HEADS, 1))),
            r"quantization.v_scale has shape \(2, 1\) and dtype float64",
        ),
    ],
)
def test_wrong_quantization(quantization, message):
    with pytest.raises(ValueError, match=f"PagedKVCache: .*{message}"):
        new_cache(quantization)


def test_keys_of_joined_pages_are_not_quantised():
    for given in ("k8v4", KVQuantization("int8", "int8")):
        with pytest.raises(ValueError, match="PagedKVCache: quantization is "):
            new_cache(given, joined=True)
    for given in ("int8", KVQuantization(None, "int8")):
        cache = new_cache(given, joined=True)
        assert (cache.quantization.k, cache.quantization.v) == (None, "int8")


def test_wrong_arguments_of_kvquantization():
    with pytest.raises(ValueError, match="KVQuantization: k is 'int9', must be one of"):
        KVQuantization("int9")
    with pytest.raises(ValueError, match="k is None, so rotate_k and k_offset must be None"):
        KVQuantization(None, "int8", rotate_k=True)
    with pytest.raises(ValueError, match="v is None, so v_scale must be None"):
        KVQuantization("int8", None, v_scale=np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match=r"KVQuantization: k_scale has 0.0, must be above 0"):
        KVQuantization(k_scale=np.array([[0.5], [0]], np.float32))


@pytest.mark.parametrize(
    "quantization",
    [
        KVQuantization(np.str_("int8"), group_size=np.int64(32), rotate_k=np.bool_(False)),
        KVQuantization(k_scale=Exported(STATIC.k_scale)),
    ],
)
def test_numbers_and_arrays_of_any_type_are_saved(quantization):
    cache = new_cache(quantization)
    id = fill(cache, range(5))
    loaded = pickle.loads(pickle.dumps(cache))
    assert loaded.quantization.is_like(quantization)
    assert held(loaded, id) == held(cache, id)


def test_scales_that_change_later_are_not_the_caches():
    scale = np.full((LAYERS, HEADS, 1), 0.03, np.float32)
    cache = new_cache(KVQuantization(k_scale=scale))
    id = fill(cache, range(5))
    before = held(cache, id)
    scale[...] = 100
    assert held(cache, id) == before


def test_a_swapped_sequence_goes_to_a_cache_like_its_own():
    cache = new_cache("int8")
    swapped = cache.swap_out(fill(cache, range(5)))
    for other in (None, "float8_e4m3", STATIC):
        with pytest.raises(ValueError, match=r"swap_in: swapped.quantization is KVQ.*, must be"):
            new_cache(other).swap_in(swapped)
    new_cache("int8").swap_in(swapped)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"joined": True}, {"joined": False}),
        ({"num_kv_heads": 2, "head_dim": 32}, {"num_kv_heads": 1, "head_dim": 64}),
        ({"head_dim": 32, "head_dim_v": 64}, {"head_dim": 64, "head_dim_v": 32}),
        ({"dtype": np.float16}, {"dtype": BFLOAT16}),
    ],
)
def test_a_swapped_sequence_does_not_go_where_bytes_mean_something_else(own, other):
    """The pages of both caches have as many bytes."""
    quantization = KVQuantization(None, "int8") if "head_dim" not in own else "int8"
    options = {"page_size": 16, "num_kv_heads": 2, "head_dim": 32, "dtype": np.float32}
    caches = [
        cuattn.PagedKVCache(4, quantization=quantization, **{**options, **changes})
        for changes in (own, other)
    ]
    assert caches[0].nbytes == caches[1].nbytes
    id = caches[0].add_sequence()
    caches[0].extend([id], 3)
    swapped = caches[0].swap_out(id)
    with pytest.raises(ValueError, match=r"swap_in: swapped.layout is \{.*must be this cache's"):
        caches[1].swap_in(swapped)
    assert len(caches[1]) == 0
    caches[0].swap_in(pickle.loads(pickle.dumps(swapped)))


@pytest.mark.parametrize("how", ["cache", "pages", "slots"])
def test_append_kv(how):
    """New tokens in caches of codes that the caller owns, in every way to name their places."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 5, HEADS, DIM), dtype=np.float32)
    rope = tuple(rng.standard_normal((16, DIM // 2), dtype=np.float32) for _ in "cs")
    lens = np.array([7, 12], np.int32)
    empty = np.zeros((2, 16, HEADS, DIM) if how == "cache" else (8, 4, HEADS, DIM), np.float32)
    plain = [empty.copy(), empty.copy()]
    codes = [cuattn.quantize(empty, "int8"), cuattn.quantize(empty, "int4", symmetric=False)]
    options = {"rope": rope}
    if how == "pages":
        options["page_table"] = np.array([[3, 1, 0, 0], [2, 4, 6, 7]], np.int32)
    if how == "slots":
        options["slots"] = np.array([3, 9, 1, -1, 20, 31, 2, 0, 5, 6], np.int32)
    for caches in (plain, codes):
        cuattn.append_kv(*caches, k, v, lens, **options)
    for numbers, stored, (format, symmetric) in zip(
        plain, codes, (("int8", True), ("int4", False)), strict=True
    ):
        want = cuattn.quantize(numbers, format, symmetric=symmetric)
        np.testing.assert_array_equal(cuattn.dequantize(stored), cuattn.dequantize(want))
    with pytest.raises(TypeError, match="append_kv: k has dtype float16, must be the cache's"):
        cuattn.append_kv(*codes, k.astype(np.float16), v, lens, **options)


@pytest.mark.parametrize("lead", [(), (1, 1), (2, 1), (16,), "broadcast", "of heads together"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_append_kv_leaves_shared_scales_as_they_are(format, lead):
    """New tokens get codes of the scales, and minima, that others share with them."""
    rng = np.random.default_rng(0)
    new = rng.standard_normal((2, 5, HEADS, DIM), dtype=np.float32)
    shape = {"broadcast": (1, 1, HEADS, 1), "of heads together": (2, 16, 1, 1)}.get(lead)
    shape = shape or (*lead, HEADS, 1)
    scale = rng.uniform(0.1, 0.2, shape).astype(np.float32)
    if lead == "broadcast":
        scale = np.broadcast_to(scale, (2, 16, HEADS, 1))
    minimum = np.full_like(scale, -1.5) if format == "int4" else None
    of_codes = {"dtype": format, "minimum": minimum, "like": np.float32}
    caches = []
    for _ in "kv":
        empty = np.zeros((2, 16, HEADS, DIM if format == "int8" else DIM // 2))
        data = empty.astype(np.int8 if format == "int8" else np.uint8)
        caches.append(cuattn.QuantizedArray(data, scale, **of_codes))
    lens = np.array([7, 12], np.int32)
    cuattn.append_kv(*caches, new, -new, lens)
    right = [(b, slice(n - 5, n)) for b, n in enumerate(lens)]
    for cache, rows in zip(caches, (new, -new), strict=True):
        np.testing.assert_array_equal(cache.scale, np.broadcast_to(scale, cache.scale.shape))
        values = cuattn.dequantize(cache)
        for (b, at), row in zip(right, rows, strict=True):
            own = np.broadcast_to(scale, (2, 16, *scale.shape[-2:]))[b, at]
            least, most = (
                (-1.5, -1.5 + 15 * own) if minimum is not None else (-127 * own, 127 * own)
            )
            wrong = abs(values[b, at] - np.clip(row, least, most))
            assert (wrong <= 0.51 * own).all()
        assert (cache.data[0, 7:] == 0).all()


def test_append_kv_refuses_scales_that_it_cannot_write():
    caches = [cuattn.quantize(np.zeros((1, 8, HEADS, DIM), np.float32), "int8") for _ in "kv"]
    caches[1].scale.flags.writeable = False
    new = np.ones((1, 2, HEADS, DIM), np.float32)
    with pytest.raises(ValueError, match="append_kv: v_cache is read-only, must be writable"):
        cuattn.append_kv(*caches, new, new, np.array([3], np.int32))
    assert (caches[0].data == 0).all()
