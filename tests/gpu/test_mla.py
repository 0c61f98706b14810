"""Latent attention's kernels, tier by tier, against the definition in float64, however their work
is split, paged and replayed."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuattn.mla import mla_decode, mla_prefill
from tests import formulas
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

from cuattn.gpu import dispatch, mla, plan  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in formulas.DTYPES}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TIERS = [tier.name for tier in dispatch.MLA.all]
SCALE = 192**-0.5


@pytest.fixture(params=TIERS)
def tier(request):
    """Each tier: calls reach it, and what it leaves goes to the tiers below it."""
    with dispatch.use_tiers(*TIERS[TIERS.index(request.param) :]):
        yield request.param


@pytest.fixture(autouse=True)
def dirty_scratch(monkeypatch):
    """Scratch memory is never what a kernel might hope for."""
    scratch = plan.scratch

    def dirty(nbytes):
        memory = scratch(nbytes)
        if not cupy.cuda.get_current_stream().is_capturing():
            whole = cupy.ndarray(nbytes, np.uint8, memory)
            whole[...] = cupy.random.randint(0, 256, nbytes, dtype=np.uint8)
        return memory

    for module in (plan, mla):
        monkeypatch.setattr(module, "scratch", dirty)


@pytest.fixture
def tiles_of_80(monkeypatch):
    """Tiles have 80 rows where they may, however few the keys are."""
    monkeypatch.setattr(dispatch.mla, "ROWS_80_BLOCKS", 0)
    mla._plans.cache_clear()
    yield
    mla._plans.cache_clear()


class Cache:
    """Sequences of a batch on the host, and in pages on the device, with NaN where nothing is to
    be read."""

    def __init__(
        self, rng, lens, dtype, page_size=64, *, latent=512, rope=64, joined=True, sizes=1.0
    ):
        self.lens = np.array(lens, np.int32)
        self.latent, self.dtype = latent, np.dtype(dtype)
        self.rows = [(rng.standard_normal((n, latent + rope)) * sizes).astype(dtype) for n in lens]
        width = max(1, -(-max(lens) // page_size))
        pages = np.full((len(lens) * width + 3, page_size, latent + rope), np.nan, dtype)
        table = rng.permutation(len(pages))[: len(lens) * width].reshape(-1, width)
        for b, n in enumerate(lens):
            page, slot = np.divmod(np.arange(n), page_size)
            pages[table[b, page], slot] = self.rows[b]
        self.table = table.astype(np.int32)
        for b, n in enumerate(lens):
            self.table[b, -(-n // page_size) :] = 1 << 30
        pages = cupy.asarray(pages)
        self.pages = [pages[..., :latent], pages[..., latent:]]
        if not joined:
            self.pages = [cupy.ascontiguousarray(part) for part in self.pages]

    def queries(self, rng, *shape, size=1.0):
        width = self.rows[0].shape[1]
        return (rng.standard_normal((*shape, width)) * size).astype(self.dtype)

    def decode(self, q, **options):
        q = cupy.asarray(q)
        arrays = (q[..., : self.latent], q[..., self.latent :], *self.pages)
        options = {"scale": SCALE, "return_lse": True} | options
        return mla_decode(
            *arrays, *map(cupy.asarray, (self.table, self.lens)), **on_device(options)
        )

    def check(self, q, cu=None, indices=None, num_splits=None, **options):
        """Judge out and lse by the definition on each sequence."""
        more = {"num_splits": num_splits} | ({} if cu is None else {"cu_seqlens_q": cu})
        more |= {} if indices is None else {"indices": indices}
        out, lse = (a.get() for a in self.decode(q, **more, **options))
        assert out.dtype == self.dtype
        if cu is None:
            rows = [slice(b, b + 1) for b in range(len(q))]
            parts = [(q[r], out[r], lse[r]) for r in rows]
        else:
            rows = [slice(a, b) for a, b in itertools.pairwise(cu)]
            parts = [(q[None, r], out[None, r], lse[None, :, r]) for r in rows]
        wanted: list[list[Any]] = [[], [], [], [], [], []]
        for b, (q_b, out_b, lse_b) in enumerate(parts):
            k = self.rows[b][None, :, None]
            mask = None
            if indices is not None:
                of = indices[rows[b]].reshape(q_b.shape[1], indices.shape[-1])
                mask = (of[:, :, None] == np.arange(len(self.rows[b]))).any(axis=1)[None, None]
            exact, plain = (
                formulas.attention(
                    q_b, k, k[..., : self.latent], mask=mask, precision=precision,
                    **({"causal": True, "scale": SCALE} | options),
                )
                for precision in (
                    np.longdouble if self.dtype == np.float64 else np.float64, self.dtype
                )
            )  # fmt: skip
            for into, array in zip(wanted, (out_b, *exact, lse_b, *plain), strict=True):
                into.append(array.reshape(-1))
        out, exact, exact_lse, lse, plain, plain_lse = map(np.concatenate, wanted)
        formulas.assert_accurate(out, exact, plain)
        formulas.assert_accurate(lse, exact_lse, plain_lse)


def on_device(options):
    return {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (37, 0)},
    "two-sided": {"causal": False, "window": (20, 3)},
    "sinks": {"sinks": True},
    "all": {"window": (100, 5), "sinks": True, "scale": 0.03},
}


def drawn(options, rng, heads):
    options = {"causal": True} | options
    if "sinks" in options:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    return options


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option(rng, tier, dtype, option):
    cache = Cache(rng, [0, 1, 5, 63, 64, 65, 129, 517], DTYPES[dtype])
    options = drawn(OPTIONS[option], rng, 16)
    for seqlen_q in (1, 3):
        cache.check(cache.queries(rng, 8, seqlen_q, 16), **options)


@pytest.mark.parametrize("heads", [1, 8, 16, 40, 64, 65, 128])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5])
def test_every_number_of_rows(rng, tier, heads, seqlen_q):
    cache = Cache(rng, [300, 17, 64], BFLOAT16)
    cache.check(cache.queries(rng, 3, seqlen_q, heads), causal=True)


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e6, 1e30])
def test_values_of_every_size(rng, tiles_of_80, size):
    """Partial results are float16 where latents are plain."""
    cache = Cache(rng, [1500, 300], BFLOAT16, sizes=size)
    for heads, seqlen_q in ((128, 1), (16, 5)):
        q = cache.queries(rng, 2, seqlen_q, heads, size=1 / size)
        cache.check(q)
        out = cache.decode(q)[0].get().astype(np.float64)
        assert np.abs(out).max() > size / 100


def test_many_tokens(rng, tier):
    cache = Cache(rng, [300, 70], np.float16)
    cache.check(cache.queries(rng, 2, 64, 16), causal=True)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_size(rng, tier, page_size, joined):
    cache = Cache(rng, [515, 1, 64], BFLOAT16, page_size, joined=joined)
    for options in ({}, {"window": (9, 0)}):
        cache.check(cache.queries(rng, 3, 1, 32), **options)


@pytest.mark.parametrize("widths", [(256, 32), (512, 0), (192, 64), (40, 24), (1, 1), (511, 63)])
def test_every_width(rng, tier, widths):
    latent, rope = widths
    for dtype in (BFLOAT16, np.dtype(np.float32)):
        heads = 16 if latent > 1 else 128
        cache = Cache(rng, [200, 70], dtype, latent=latent, rope=rope, joined=latent % 2 == 0)
        cache.check(cache.queries(rng, 2, 1, heads))


def test_pages_in_reverse(rng, tier):
    """Strides of pages and slots are negative."""
    cache = Cache(rng, [100, 70], BFLOAT16)
    cache.pages = [
        cupy.ascontiguousarray(part[::-1, ::-1])[::-1, ::-1] for part in cache.pages
    ]  # fmt: skip
    cache.check(cache.queries(rng, 2, 1, 16))


@pytest.mark.parametrize("num_splits", [None, 2, 64, "fixed"])
@pytest.mark.parametrize("tokens", [64, 65, 128, 129])
def test_splits_of_few_tokens(rng, tier, tokens, num_splits):
    """The memory for partial results is there where there are some."""
    cache = Cache(rng, [tokens, 3], BFLOAT16, page_size=1)
    cache.check(cache.queries(rng, 2, 1, 64), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 64, "fixed"])
@pytest.mark.parametrize("heads", [16, 128])
def test_every_split(rng, tier, num_splits, heads):
    cache = Cache(rng, [5000, 3, 0, 1025], BFLOAT16)
    cache.check(cache.queries(rng, 4, 1, heads), num_splits=num_splits)


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "lens"),
    [
        (16, 1, [0]),  # nobody has keys
        (16, 1, [200]),
        (3, 2, [64, 1]),
        (11, 1, [129]),
        (1, 1, [1100]),
        (64, 1, [70, 300]),  # several tiles of heads
        (24, 1, [129] * 70),  # a thread block for each sequence
        (16, 1, [20000]),  # more blocks of keys than warpgroups
        (16, 1, [4096, 3, 4095]),  # one block of keys each, or two
        (8, 2, [4000] * 10),  # several
        (16, 2, [4096]),
        (16, 1, [8000]),
        (5, 3, [2000, 1]),
    ],
)
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_few_sequences(rng, heads, seqlen_q, lens, window):
    """So few rows that the thread blocks of a tile merge its result themselves."""
    cache = Cache(rng, lens, BFLOAT16)
    cache.check(cache.queries(rng, len(lens), seqlen_q, heads), window=window)


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "lens"),
    [
        (16, 5, [0]),  # nobody has keys
        (16, 5, [3]),  # nor have some of the queries
        (16, 5, [256]),  # a thread block has them all
        (16, 5, [2000, 5, 64, 129, 0]),
        (16, 5, [700] * 140),  # more than thread blocks: some have several, and parts of others
        (24, 3, [1000, 300]),  # not all rows exist
        (8, 9, [513, 70]),
        (40, 2, [900]),
        (65, 1, [640, 3]),
        (16, 10, [700, 1]),  # two tiles of rows
        (16, 9, [450, 64]),  # the second is not full
        (160, 1, [640, 3]),  # two of heads
    ],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_tiles_of_80_rows(rng, tiles_of_80, heads, seqlen_q, lens, option):
    cache = Cache(rng, lens, BFLOAT16 if seqlen_q % 2 else np.float16)
    q = cache.queries(rng, len(lens), seqlen_q, heads)
    cache.check(q, **drawn(OPTIONS[option], rng, heads))


@pytest.mark.parametrize("page_size", [8, 16, 128])
@pytest.mark.parametrize("widths", [(512, 64), (512, 0), (192, 64), (256, 32)])
def test_pages_and_widths_of_80_rows(rng, tiles_of_80, page_size, widths):
    latent, rope = widths
    cache = Cache(rng, [515, 1, 64], BFLOAT16, page_size, latent=latent, rope=rope)
    cache.check(cache.queries(rng, 3, 5, 16))


def test_few_rows_beside_other_work(rng):
    """Thread blocks of a tile need not run at the same time: here matrix products, and the other
    stream's call, have multiprocessors."""
    cache = Cache(rng, [9000], BFLOAT16)
    q = cupy.asarray(cache.queries(rng, 1, 1, 16))
    alone = [result.get().tobytes() for result in cache.decode(q)]
    matrix = cupy.ones((2048, 2048), np.float32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(100):
        with streams[0]:
            matrix @ matrix
        for stream in streams[1:]:
            with stream:
                results.append(cache.decode(q))
    cupy.cuda.Device().synchronize()
    for result in results:
        assert [part.get().tobytes() for part in result] == alone


@pytest.mark.parametrize("length", [0, 1, 300, 2000, 20000])
@pytest.mark.parametrize("page_size", [8, 64, 128])
def test_pages_beyond_the_length_are_not_looked_at(rng, length, page_size):
    """Where a table has room for more pages, their numbers may be anything."""
    cache = Cache(rng, [length], BFLOAT16, page_size)
    none = rng.integers(-(1 << 31), 1 << 31, (1, 300 * 64 // page_size)).astype(np.int32)
    cache.table = np.concatenate([cache.table, none], axis=1)
    for heads, seqlen_q, window in ((128, 1, None), (40, 1, (700, 0)), (16, 3, None)):
        cache.check(cache.queries(rng, 1, seqlen_q, heads), window=window)


@pytest.mark.parametrize(
    ("count", "longest"),
    [
        (3, 100),  # one to a thread block, though others have none
        (60, 260),
        (120, 150),  # more than there are groups of thread blocks
        (150, 128),  # … and not to be split
        (23, 700),  # in pieces, one for each group
        (47, 400),
    ],
)
def test_whole_sequences(rng, count, longest):
    """Sequences of nearly equal lengths, whose keys are not split on Hopper."""
    lens = rng.integers(longest - 60, longest, count)
    lens[rng.integers(count)] = 0
    cache = Cache(rng, list(lens), BFLOAT16)
    cache.check(cache.queries(rng, count, 1, 128))
    # The same with two tiles of rows a sequence, some of which have no query.
    tokens = np.minimum(rng.integers(0, 3, count), lens)
    cu = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
    cache.check(cache.queries(rng, cu[-1], 40), cu, window=(70, 0))


@pytest.mark.parametrize(
    ("count", "heads", "seqlen_q"),
    [(40, 128, 1), (150, 4, 1), (70, 128, 1), (40, 16, 5), (150, 16, 5)],
)
def test_a_graph_replays_whole_sequences_and_pieces(rng, tier, count, heads, seqlen_q):
    """Also with more tiles of rows than thread blocks, which merge some of their partial results
    themselves where these are there: the bits do not depend on it."""
    each = np.arange(count)
    lengths = [np.full(count, 900), np.where(each == 7, 900, 3), each * 22 % 900]
    if count > 40:
        lengths[0][20:] = 130
    cache = Cache(rng, list(np.maximum.reduce(lengths)), BFLOAT16)
    on_gpu = cupy.asarray(cache.queries(rng, count, seqlen_q, heads))
    lens, table = cupy.asarray(cache.lens), cupy.asarray(cache.table)

    def call():
        arrays = on_gpu[..., :512], on_gpu[..., 512:], *cache.pages
        return mla_decode(*arrays, table, lens, scale=SCALE)

    replay, out = captured(call)
    for now in (*lengths, lengths[0]):
        lens[...] = cupy.asarray(now, np.int32)
        out[...] = np.nan
        replay()
        assert np.array_equal(out.get().view(np.uint16), call().get().view(np.uint16))


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "page_size"), [(128, 1, 64), (16, 1, 64), (64, 1, 4), (16, 5, 64)]
)
def test_a_long_sequence_among_short_ones(rng, tier, heads, seqlen_q, page_size):
    """Its many partial results are merged in two steps on Hopper, by the thread blocks that leave
    the last ones, and in a replay anew."""
    lens = np.full(40, 60)
    lens[13] = 9000
    cache = Cache(rng, list(lens), BFLOAT16, page_size)
    q = cache.queries(rng, 40, seqlen_q, heads)
    cache.check(q)
    on_gpu, table = cupy.asarray(q), cupy.asarray(cache.table)
    arrays = on_gpu[..., :512], on_gpu[..., 512:], *cache.pages
    lengths = cupy.asarray(cache.lens)
    replay, out = captured(lambda: mla_decode(*arrays, table, lengths, scale=SCALE))
    expected = mla_decode(*arrays, table, lengths, scale=SCALE).get().view(np.uint16)
    for _ in range(3):
        out[...] = np.nan
        replay()
        assert np.array_equal(out.get().view(np.uint16), expected)


def test_ragged_rows(rng, tier):
    counts = [1, 4, 0, 9]
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    cache = Cache(rng, [90, 300, 12, 70], BFLOAT16)
    cache.check(cache.queries(rng, cu[-1], 16), cu)


@pytest.mark.parametrize(("heads", "seqlen_q"), [(40, 1), (16, 5)])
@pytest.mark.parametrize("rise", ["first", "last", "every", "even", "odd"])
def test_maxima_that_rise(rng, tiles_of_80, tier, rise, heads, seqlen_q):
    """Scores that leave the lagging maximum far behind, in some blocks of 64 keys or in all."""
    n = 64 * 7 + 5
    cache = Cache(rng, [n, n - 64], BFLOAT16)
    block = np.arange(n) // 64
    steps = {
        "first": block == 1, "last": block == 7, "every": block, "even": block // 2 * 2,
        "odd": (block + 1) // 2 * 2,
    }[rise]  # fmt: skip
    q = cache.queries(rng, 2, seqlen_q, heads, size=0.1)
    q[..., 0] = 30.0
    page, slot = np.divmod(np.arange(n), 64)
    for b, rows in enumerate(cache.rows):
        rows[:, 0] = (steps[: len(rows)] * 20.0).astype(BFLOAT16)
        at = cupy.asarray(cache.table[b, page[: len(rows)]]), cupy.asarray(slot[: len(rows)])
        cache.pages[0][at] = cupy.asarray(rows[:, :512])
    cache.check(q)


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("heads", [16, 128])
def test_sparse(rng, tier, heads, seqlen_q):
    lens, k = [0, 40, 700], 100
    cache = Cache(rng, lens, BFLOAT16)
    indices = np.full((3, seqlen_q, k), -1, np.int32)
    for b, n in enumerate(lens):
        for i in range(seqlen_q):
            some = rng.permutation(n)[: min(n, k - 7)]
            indices[b, i, : len(some)] = some
            indices[b, i, -1] = 1 << 29
            rng.shuffle(indices[b, i])
    q = cache.queries(rng, 3, seqlen_q, heads)
    for options in ({}, {"causal": False}, {"window": (300, 0)}):
        cache.check(q, indices=indices, **options)


def test_sparse_without_an_axis_of_tokens(rng, tier):
    """One query a sequence: kernels are told of an axis in its place, whose stride is 0."""
    cache = Cache(rng, [300, 200, 90], BFLOAT16)
    indices = np.stack([rng.permutation(300)[:100] for _ in range(3)]).astype(np.int32)
    q = cache.queries(rng, 3, 1, 16)
    wanted = cache.decode(q, indices=indices[:, None])
    out = cupy.full_like(wanted[0][:, 0], np.nan)
    for options in ({}, {"out": out}):
        got = cache.decode(q[:, 0], indices=indices, **options)
        for array, same in zip(got, (wanted[0][:, 0], wanted[1]), strict=True):
            np.testing.assert_array_equal(array.get(), same.get())
    assert got[0] is out


def test_sparse_ragged_rows(rng, tier):
    cu = np.array([0, 1, 1, 4], np.int32)
    cache = Cache(rng, [100, 30, 300], BFLOAT16)
    indices = np.stack([rng.permutation(30) for _ in range(4)]).astype(np.int32)
    cache.check(cache.queries(rng, 4, 16), cu, indices)


@pytest.mark.parametrize("stride", ["none", "wide"])
def test_sparse_over_a_page_table_of_other_strides(rng, tier, stride):
    cache = Cache(rng, [300, 300], BFLOAT16)
    for sequences in (cache.rows, cache.table):
        sequences[1] = sequences[0]
    width = cache.table.shape[1]
    tables = {
        "none": cupy.broadcast_to(cupy.asarray(cache.table[0]), cache.table.shape),
        "wide": cupy.asarray(np.pad(cache.table, ((0, 0), (1, 9))))[:, 1 : 1 + width],
    }
    cache.table = tables[stride]
    indices = np.stack([rng.permutation(300)[:100] for _ in range(2)])[:, None].astype(np.int32)
    cache.check(cache.queries(rng, 2, 1, 16), indices=indices)


@pytest.mark.parametrize("heads", [16, 128])
def test_fixed_splits_do_not_depend_on_the_batch(rng, tier, heads):
    """With 128 heads a row is merged by a block's warps, or in the whole batch by one of them."""
    cache = Cache(rng, [3000, 1100, 5, 2500], BFLOAT16)
    q = cache.queries(rng, 4, 1, heads)
    whole = cache.decode(q, num_splits="fixed")
    for b in range(4):
        alone = Cache.__new__(Cache)
        alone.__dict__ = cache.__dict__ | {
            "table": cache.table[b : b + 1], "lens": cache.lens[b : b + 1]
        }  # fmt: skip
        got = alone.decode(q[b : b + 1], num_splits="fixed")
        assert all(
            np.array_equal(x.get()[0].view(np.uint8), y.get()[b].view(np.uint8))
            for x, y in zip(got, whole, strict=True)
        )


@pytest.mark.parametrize(("heads", "seqlen_q"), [(128, 1), (16, 5)])
@pytest.mark.parametrize("lens", [[900, 64, 300], [1100]])
def test_a_graph_replays_after_lengths_changed(rng, tiles_of_80, tier, lens, heads, seqlen_q):
    cache = Cache(rng, lens, BFLOAT16)
    q = cache.queries(rng, len(lens), seqlen_q, heads)
    on_gpu = cupy.asarray(q)
    lens, table = cupy.asarray(cache.lens), cupy.asarray(cache.table)

    def call():
        arrays = on_gpu[..., :512], on_gpu[..., 512:], *cache.pages
        return mla_decode(*arrays, table, lens, scale=SCALE)

    replay, out = captured(call)
    for shorter in (0, 1, 37):
        lens[...] = cupy.asarray(np.maximum(cache.lens - shorter, 0))
        out[...] = np.nan
        replay()
        assert np.array_equal(out.get().view(np.uint16), call().get().view(np.uint16))


def test_out_of_other_strides(rng, tier):
    cache = Cache(rng, [100, 30], BFLOAT16)
    q = cache.queries(rng, 2, 1, 16)
    want, _ = cache.decode(q)
    room = cupy.full((2, 1, 32, 512), np.nan, BFLOAT16)
    got, _ = cache.decode(q, out=room[:, :, ::2])
    assert np.array_equal(got.get().view(np.uint16), want.get().view(np.uint16))
    assert np.isnan(room[:, :, 1::2].get().astype(np.float32)).all()


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_prefill(rng, absorbed, dtype):
    """Both ways, over a prefix in chunks of which some have no keys for some sequences."""
    heads, tokens = 4, 70
    cache = Cache(rng, [300, 71, 200], DTYPES[dtype], 16, latent=128, rope=64)
    w_uk, w_uv = (rng.standard_normal((2, heads, 64, 128)) / 8).astype(dtype)
    q_nope, q_rope = rng.standard_normal((2, 3, tokens, heads, 64)).astype(dtype)
    out, lse = mla_prefill(
        *map(cupy.asarray, (q_nope, q_rope)), *cache.pages,
        *map(cupy.asarray, (cache.table, cache.lens, w_uk, w_uv)),
        scale=0.1, absorbed=absorbed, chunk=200, return_lse=True,
    )  # fmt: skip
    for b, rows in enumerate(cache.rows):
        c, r = (part.astype(np.float64) for part in (rows[:, :128], rows[:, 128:]))
        k = np.einsum("hdc,nc->nhd", w_uk.astype(np.float64), c)
        v = np.einsum("hdc,nc->nhd", w_uv.astype(np.float64), c)
        k = np.concatenate([k, np.broadcast_to(r[:, None], (len(r), heads, 64))], -1)
        q = np.concatenate([q_nope, q_rope], -1)[b : b + 1].astype(np.float64)
        want, want_lse = formulas.attention(q, k[None], v[None], causal=True, scale=0.1)
        room = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}[dtype]
        assert np.abs(out[b].get().astype(np.float64) - want[0]).max() < room * np.abs(want).max()
        assert np.abs(lse[b].get() - want_lse[0]).max() < room * 4


@pytest.mark.parametrize("rope", [64, 32])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ragged", [False, True])
def test_prompts_with_rotated_parts_of_their_own(rng, dtype, rope, ragged):
    """Heads of 128 features beside what is rotated, which on Hopper are not put together."""
    heads, lens = 3, [150, 70]
    cache = Cache(rng, lens, DTYPES[dtype], 16, latent=128, rope=rope)
    w_uk, w_uv = (rng.standard_normal((2, heads, 128, 128)) / 11).astype(dtype)
    counts = [150, 1] if ragged else [70, 70]
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = rng.standard_normal((cu[-1], heads, 128 + rope)).astype(dtype)
    shape = () if ragged else (2, 70)
    q_nope, q_rope = (
        cupy.asarray(x.reshape(*(shape or x.shape[:1]), *x.shape[1:]))
        for x in np.split(q, [128], axis=-1)
    )
    out, lse = mla_prefill(
        q_nope, q_rope, *cache.pages, *map(cupy.asarray, (cache.table, cache.lens, w_uk, w_uv)),
        scale=0.08, cu_seqlens_q=cupy.asarray(cu) if ragged else None, absorbed=False, chunk=64,
        return_lse=True,
    )  # fmt: skip
    out = out.get().reshape(cu[-1], heads, 128).astype(np.float64)
    lse = lse.get() if ragged else lse.get().swapaxes(0, 1).reshape(heads, -1)
    room = {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for b, rows in enumerate(cache.rows):
        c, r = (part.astype(np.float64) for part in (rows[:, :128], rows[:, 128:]))
        k = np.einsum("hdc,nc->nhd", w_uk.astype(np.float64), c)
        v = np.einsum("hdc,nc->nhd", w_uv.astype(np.float64), c)
        k = np.concatenate([k, np.broadcast_to(r[:, None], (len(r), heads, rope))], -1)
        own = slice(cu[b], cu[b + 1])
        want, want_lse = formulas.attention(
            q[None, own].astype(np.float64), k[None], v[None], causal=True, scale=0.08
        )
        assert np.abs(out[own] - want[0]).max() < room * np.abs(want).max()
        assert np.abs(lse[:, own] - want_lse[0]).max() < room * 4
