"""Latent attention over latents that are codes, tier by tier, against the definition in float64 on
the numbers that the codes stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._quantized import FORMATS
from cuattn.mla import flashmla_pages, mla_decode, mla_prefill
from tests import formulas

cupy = pytest.importorskip("cupy")

from cuattn.gpu import dispatch, mla  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
TIERS = ["mla_codes", "mla_simt"]
LARGE_TILES = "mla_codes, large tiles"
SCALE = 192**-0.5
LENS = [0, 1, 63, 64, 65, 200]


@pytest.fixture(params=[LARGE_TILES, *TIERS])
def tier(request, monkeypatch):
    """Each tier: calls reach it, and what it leaves goes to the tiers below it. The first one also
    as if there were so much work that tiles have all rows they may have."""
    name = request.param
    if name == LARGE_TILES:
        monkeypatch.setattr(dispatch.mla, "FEW_CODE_BLOCKS", 0)
        mla._plans.cache_clear()
        name = TIERS[0]
    with dispatch.use_tiers(*TIERS[TIERS.index(name) :]):
        yield request.param
    if request.param == LARGE_TILES:
        mla._plans.cache_clear()


class Cache:
    """Sequences in pages, their latents as codes, with what spoils a result wherever nothing is to
    be read: NaN scales and rotated parts, and NaN codes of formats that have them."""

    def __init__(self, rng, lens, dtype, format, page_size=64, *, latent=512, rope=64, **options):
        self.lens = np.array(lens, np.int32)
        width = max(1, -(-max(lens) // page_size))
        pages = len(lens) * width + 2
        numbers = rng.standard_normal((pages, page_size, 1, latent))
        # Tokens of different sizes, but not of scores so far apart that ties of a few keys decide.
        numbers *= np.exp(rng.standard_normal((pages, page_size, 1, 1)) / 4)
        self.codes = cuattn.quantize(numbers.astype(np.float32), format, **options)
        self.rotated = rng.standard_normal((pages, page_size, 1, rope)).astype(dtype)
        self.place(rng, lens, page_size, width)

    def place(self, rng, lens, page_size, width):
        """Deal the pages out, and spoil what is behind the sequences' ends."""
        values = cuattn.dequantize(self.codes, np.float32)
        pages = len(values)
        table = rng.permutation(pages)[: len(lens) * width].reshape(-1, width)
        self.rows, used = [], np.zeros((pages, page_size), bool)
        for b, n in enumerate(lens):
            page, slot = np.divmod(np.arange(n), page_size)
            at = table[b, page], slot
            used[at] = True
            self.rows.append((values[at], self.rotated[at]))
        self.table = table.astype(np.int32)
        for b, n in enumerate(lens):
            self.table[b, -(-n // page_size) :] = 1 << 30
        data, scale = self.codes.data.copy(), self.codes.scale.copy()
        data[~used] = 0x7F
        if scale.shape[:2] == data.shape[:2]:
            scale[~used] = np.nan
        self.codes = self.codes.of(data, scale, self.codes.minimum)
        self.rotated[~used] = np.nan

    def rescale(self, factors, dtype):
        """Multiply the scales of latents, which become of a dtype, with no other codes."""
        scale = (self.codes.scale.astype(np.float32) * factors).astype(dtype)
        self.codes = self.codes.of(self.codes.data, scale, None)
        values = cuattn.dequantize(self.codes, np.float32)
        for b, n in enumerate(self.lens):
            page, slot = np.divmod(np.arange(n), self.codes.shape[1])
            at = self.table[b, page], slot
            self.rows[b] = values[at], self.rotated[at]

    def on_device(self):
        """Latents and rotated parts."""
        codes = self.codes
        parts = (codes.data, codes.scale, codes.minimum, codes.offset)
        data, scale, minimum, offset = (None if x is None else cupy.asarray(x) for x in parts)
        codes = cuattn.QuantizedArray(
            data, scale, dtype=codes.dtype, minimum=minimum, offset=offset, rotation=codes.rotation
        )
        return codes, cupy.asarray(self.rotated)

    def check(self, rng, heads, *seqlen_q, dtype=BFLOAT16, pages=None, **options):
        """Judge out and lse by the definition on each sequence."""
        latent, rope = self.codes.shape[-1], self.rotated.shape[-1]
        q = rng.standard_normal((len(self.lens), *seqlen_q, heads, latent + rope)).astype(dtype)
        given = {"scale": SCALE} | options
        out, lse = mla_decode(
            *(cupy.asarray(np.ascontiguousarray(x)) for x in np.split(q, [latent], axis=-1)),
            *(self.on_device() if pages is None else pages),
            *map(cupy.asarray, (self.table, self.lens)),
            return_lse=True,
            **{k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in given.items()},
        )
        given.pop("num_splits", None)
        indices = given.pop("indices", None)
        q = q.reshape(len(self.lens), -1, heads, latent + rope)
        got = (out.get().reshape(*q.shape[:3], latent), lse.get())
        assert out.dtype == dtype
        parts: list[list[Any]] = [[], [], [], [], [], []]
        for b, (values, rotated) in enumerate(self.rows):
            mask = None
            if indices is not None:
                seen = indices[b].reshape(q.shape[1], -1)
                mask = (seen[:, :, None] == np.arange(len(values))).any(axis=1)[None, None]
            for into, precision in ((0, np.float64), (2, dtype)):
                # What a plain cache would hold is of the dtype.
                k = values if into == 0 else values.astype(dtype).astype(np.float32)
                k = np.concatenate([k, rotated.astype(np.float32)], -1)[None]
                of = {"causal": True, "mask": mask, "precision": precision} | given
                parts[into], parts[into + 1] = (
                    [*before, array.reshape(-1)]
                    for before, array in zip(
                        parts[into : into + 2],
                        formulas.attention(q[b : b + 1], k, k[..., :latent], **of),
                        strict=True,
                    )
                )
            for into, array in zip((4, 5), got, strict=True):
                parts[into].append(array[b].reshape(-1))
        exact, exact_lse, plain, plain_lse, out, lse = map(np.concatenate, parts)
        formulas.assert_accurate(out, exact, plain)
        formulas.assert_accurate(lse, exact_lse, plain_lse)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(rng, tier, format, dtype):
    Cache(rng, LENS, dtype, format).check(rng, 16, dtype=dtype)


@pytest.mark.parametrize("format", ["int8", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_every_code_in_every_column(rng, tier, format, dtype):
    """A sequence of one token gives its latent, to the bit."""
    codes = np.arange(256, dtype=np.uint8)
    one = cuattn.QuantizedArray(
        codes[:, None].view(FORMATS[format].storage), np.ones((1, 1), np.float32), dtype=format
    )
    codes = codes[np.isfinite(cuattn.dequantize(one, np.float32)[:, 0])]
    data = np.stack([np.roll(codes, i) for i in range(512)], -1)[:, None, None]  # one a page
    rows = cuattn.QuantizedArray(
        data.view(FORMATS[format].storage), np.full((1, 1, 1, 1), 0.25, np.float32), dtype=format
    )
    want = cuattn.dequantize(rows, dtype)[:, 0]
    on_gpu = rows.of(cupy.asarray(rows.data), cupy.asarray(rows.scale), None)
    n = len(codes)
    arrays = (cupy.zeros((n, 1, 512), dtype), cupy.zeros((n, 1, 64), dtype), on_gpu)
    table = cupy.arange(n, dtype=np.int32)[:, None]
    rotated = cupy.zeros((n, 1, 1, 64), dtype)
    out = mla_decode(*arrays, rotated, table, cupy.ones(n, np.int32), scale=1.0)
    assert np.array_equal(out.get(), want)


SCALES: dict[str, dict[str, Any]] = {
    "token": {},
    "tensor": {"granularity": "tensor"},
    "group of 128": {"granularity": "group", "group_size": 128},
    "group of 256": {"granularity": "group", "group_size": 256},
    "group of 64": {"granularity": "group", "group_size": 64},
    "channel": {"granularity": "channel"},
    "rotated": {"rotate": True},
    "offset": {"offset": True},
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("format", ["int8", "float8_e4m3"])
def test_scales(rng, tier, kind, format):
    options = dict(SCALES[kind])
    if "offset" in options:
        options["offset"] = rng.standard_normal((1, 512)).astype(np.float32)
    Cache(rng, [70, 3, 130], BFLOAT16, format, **options).check(rng, 16)


@pytest.mark.parametrize("factor", [1e-6, 1e4])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_extreme_scales(rng, tier, factor, dtype):
    """Of latents, beside rotated parts of the same size; and float32 scales."""
    cache = Cache(rng, [70, 130], BFLOAT16, "float8_e4m3")
    cache.rotated = (cache.rotated.astype(np.float32) * np.float32(factor)).astype(BFLOAT16)
    cache.rescale(np.float32(factor), dtype)
    cache.check(rng, 16, scale=SCALE / factor)


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_scales_of_tokens_that_are_far_apart(rng, tier, dtype, heads):
    """Of neighbours, and of zero."""
    cache = Cache(rng, [70, 130], dtype, "float8_e4m3")
    factors = 2.0 ** rng.integers(-14, 3, cache.codes.scale.shape)
    factors[rng.random(factors.shape) < 0.1] = 0
    cache.rescale(factors.astype(np.float32), BFLOAT16)
    cache.check(rng, heads, dtype=dtype)


@pytest.mark.parametrize("heads", [1, 17, 32, 40, 64, 65, 128])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_every_number_of_rows(rng, tier, heads, seqlen_q):
    lens = [150, 17, 64] * (8 if heads * seqlen_q < 8 else 1)  # an error of few rows is chance
    Cache(rng, lens, BFLOAT16, "float8_e4m3").check(rng, heads, seqlen_q)


@pytest.mark.parametrize("page_size", [1, 8, 64, 256])
@pytest.mark.parametrize("option", ["window", "sinks", "full"])
@pytest.mark.parametrize("heads", [16, 32])
def test_pages_and_options(rng, tier, page_size, option, heads):
    options = {
        "window": {"window": (37, 0)},
        "sinks": {"sinks": rng.standard_normal(heads).astype(np.float32)},
        "full": {"causal": False},
    }[option]
    Cache(rng, [300, 1, 64], BFLOAT16, "int8", page_size).check(rng, heads, 2, **options)


@pytest.mark.parametrize("num_splits", [1, 3, "fixed"])
@pytest.mark.parametrize("heads", [16, 24, 128])
def test_splits(rng, tier, heads, num_splits):
    cache = Cache(rng, [1300, 3, 0, 500], BFLOAT16, "float8_e4m3")
    cache.check(rng, heads, num_splits=num_splits)


@pytest.mark.parametrize("widths", [(256, 32), (512, 0), (192, 64), (320, 64), (40, 24), (511, 63)])
def test_every_width(rng, tier, widths):
    latent, rope = widths
    cache = Cache(rng, [100, 70], BFLOAT16, "float8_e4m3", latent=latent, rope=rope)
    cache.check(rng, 16)


@pytest.mark.parametrize("heads", [8, 32, 128])
def test_many_blocks(rng, tier, heads):
    """Blocks of keys one after the other in one split, of which the last is alone in its pair."""
    Cache(rng, [64 * 9 - 5], BFLOAT16, "int8").check(rng, heads, num_splits=1)


@pytest.mark.parametrize("heads", [16, 64])
def test_sparse(rng, tier, heads):
    lens, k = [0, 40, 300], 100
    cache = Cache(rng, lens, BFLOAT16, "float8_e4m3")
    indices = np.full((3, 2, k), -1, np.int32)
    for b, n in enumerate(lens):
        for i in range(2):
            some = rng.permutation(n)[: min(n, k - 7)]
            indices[b, i, : len(some)] = some
            indices[b, i, -1] = 1 << 29
            rng.shuffle(indices[b, i])
    cache.check(rng, heads, 2, indices=indices)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [16, 64])
def test_flashmla_pages(rng, tier, page_size, heads):
    """Rows of 656 bytes, read as they are."""
    cache = Cache(
        rng, [70, 3, 130], BFLOAT16, "float8_e4m3", page_size,
        granularity="group", group_size=128,
    )  # fmt: skip
    scale = cache.codes.scale.astype(np.float32)
    shape = cache.codes.data.shape[:-1]
    rows = np.concatenate(
        [
            cache.codes.data,
            np.ascontiguousarray(scale).view(np.uint8).reshape(*shape, 16),
            np.ascontiguousarray(cache.rotated).view(np.uint8).reshape(*shape, 128),
        ],
        axis=-1,
    )
    assert rows.shape[-1] == 656
    cache.check(rng, heads, 2, pages=flashmla_pages(cupy.asarray(rows)))


def test_flashmla_pages_at_an_odd_address():
    """Where float32 scales could not be read."""
    bytes_ = cupy.zeros(2 * 4 * 660 + 4, np.uint8)
    even = bytes_[4:].reshape(2, 4, 660)[..., :656]
    flashmla_pages(even)
    flashmla_pages(cupy.zeros(4 * 656 + 1, np.uint8)[:-1].reshape(4, 1, 656))
    for rows in (bytes_[1:-3].reshape(2, 4, 660)[..., :656], bytes_[: 8 * 658].reshape(2, 4, 658)):
        with pytest.raises(ValueError, match=r"flashmla_pages: rows is at address .* multiples of"):
            flashmla_pages(rows[..., :656])


def test_a_joined_cache(rng, tier):
    """Tokens that a cache quantises as they are written, over its pages."""
    lens = [70, 3]
    cache = cuattn.PagedKVCache(
        16, 16, 1, 64, head_dim_v=512, dtype=BFLOAT16, joined=True, quantization="float8_e4m3",
        xp=cupy,
    )  # fmt: skip
    ids = [cache.add_sequence() for _ in lens]
    cache.extend(ids, lens)
    rotated, latents = (rng.standard_normal((sum(lens), 1, n)).astype(BFLOAT16) for n in (64, 512))
    cache.write(0, ids, cupy.asarray(rotated), cupy.asarray(latents))
    rope_pages, latent_pages = cache.pages(0)
    assert latent_pages.data.strides[1] == rope_pages.strides[1] == 640
    stored = cuattn.quantize(latents, "float8_e4m3")
    mirror = Cache.__new__(Cache)
    mirror.lens, mirror.table = np.array(lens, np.int32), cache.page_table(ids).get()
    mirror.codes, mirror.rotated = stored, rotated
    values = cuattn.dequantize(stored, np.float32)
    mirror.rows = [(values[:70], rotated[:70]), (values[70:], rotated[70:])]
    mirror.check(rng, 16, pages=(latent_pages, rope_pages))


@pytest.mark.parametrize("absorbed", [True, False])
def test_prefill(rng, absorbed):
    heads, tokens = 2, 30
    cache = Cache(rng, [90, 31], BFLOAT16, "float8_e4m3", 16, latent=128)
    w_uk, w_uv = (rng.standard_normal((2, heads, 64, 128)) / 8).astype(BFLOAT16)
    q_nope, q_rope = rng.standard_normal((2, 2, tokens, heads, 64)).astype(BFLOAT16)
    latents, rotated = cache.on_device()
    out = mla_prefill(
        *map(cupy.asarray, (q_nope, q_rope)), latents, rotated,
        *map(cupy.asarray, (cache.table, cache.lens, w_uk, w_uv)),
        scale=0.1, absorbed=absorbed, chunk=64,
    )  # fmt: skip
    for b, (c, r) in enumerate(cache.rows):
        c, r = c[:, 0].astype(np.float64), r.astype(np.float64)
        k = np.einsum("hdc,nc->nhd", w_uk.astype(np.float64), c)
        v = np.einsum("hdc,nc->nhd", w_uv.astype(np.float64), c)
        k = np.concatenate([k, np.broadcast_to(r, (len(r), heads, 64))], -1)
        q = np.concatenate([q_nope, q_rope], -1)[b : b + 1].astype(np.float64)
        want, _ = formulas.attention(q, k[None], v[None], causal=True, scale=0.1)
        got = out[b].get().astype(np.float64)
        assert np.abs(got - want[0]).max() < 3e-2 * np.abs(want).max()
