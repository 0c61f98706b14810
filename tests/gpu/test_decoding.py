"""Decoding kernels, tier by tier, against the definition in float64, however their work is split,
paged, merged and replayed.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuattn.decoding import flash_decode, merge_attention, paged_attention
from tests import formulas

cupy = pytest.importorskip("cupy")

from cuattn.gpu import decoding, plan  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in formulas.DTYPES}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def dirty_scratch(monkeypatch, rng):
    """Scratch memory is never what a kernel might hope for."""
    scratch = plan.scratch

    def dirty(nbytes):
        memory = scratch(nbytes)
        if not cupy.cuda.get_current_stream().is_capturing():
            whole = cupy.ndarray(nbytes, np.uint8, memory)
            whole[...] = cupy.random.randint(0, 256, nbytes, dtype=np.uint8)
        return memory

    monkeypatch.setattr(plan, "scratch", dirty)


class Caches:
    """Sequences of a batch on the host, and on the device as a contiguous cache and as pages, with
    NaN where nothing is to be read.
    """

    def __init__(self, rng, lens, capacity, heads, dim, dim_v, dtype, page_size=16):
        self.lens = np.array(lens, np.int32)
        self.k = rng.standard_normal((len(lens), capacity, heads, dim)).astype(dtype)
        self.v = rng.standard_normal((len(lens), capacity, heads, dim_v)).astype(dtype)
        for b, n in enumerate(lens):
            self.k[b, n:] = self.v[b, n:] = np.nan
        pages = -(-capacity // page_size)
        table = rng.permutation(len(lens) * pages + 5)[: len(lens) * pages].reshape(-1, pages)
        self.k_pages, self.v_pages = (
            self._paged(a, table, page_size, pages * page_size - capacity) for a in (self.k, self.v)
        )
        self.table = table.astype(np.int32)
        for b, n in enumerate(lens):
            self.table[b, -(-n // page_size) :] = 1 << 30

    @staticmethod
    def _paged(cache, table, page_size, short):
        rest = np.full((len(cache), short, *cache.shape[2:]), np.nan, cache.dtype)
        padded = np.concatenate([cache, rest], axis=1)
        pages = np.full((table.size + 5, page_size, *cache.shape[2:]), np.nan, cache.dtype)
        pages[table] = padded.reshape(*table.shape, page_size, *cache.shape[2:])
        return pages

    def contiguous(self, q, **options):
        return flash_decode(*(cupy.asarray(a) for a in (q, self.k, self.v, self.lens)), **options)

    def paged(self, q, **options):
        arrays = (q, self.k_pages, self.v_pages, self.table, self.lens)
        return paged_attention(*(cupy.asarray(a) for a in arrays), **options)


def check(result, q, caches, cu=None, **options):
    """Judge out and lse by the definition on each sequence."""
    out, lse = (a.get() for a in result)
    counts = [q.shape[1]] * len(q) if cu is None else np.diff(cu)
    rows = np.concatenate([[0], np.cumsum(counts)])
    q = q.reshape(-1, *q.shape[-2:])
    if cu is None:
        out, lse = out.reshape(-1, *out.shape[-2:]), lse.swapaxes(0, 1).reshape(lse.shape[1], -1)
    results = []
    for precision in [np.longdouble if q.dtype == np.float64 else np.float64, q.dtype]:
        parts = []
        for b, n in enumerate(caches.lens):
            slopes = options.get("alibi_slopes")
            if slopes is not None and slopes.ndim == 2:
                slopes = slopes[b]
            parts.append(
                formulas.attention(
                    q[None, rows[b] : rows[b + 1]],
                    caches.k[b : b + 1, :n],
                    caches.v[b : b + 1, :n],
                    precision=precision,
                    **(options | {"alibi_slopes": slopes}),
                )
            )
        outs, lses = zip(*parts, strict=True)
        results.append((np.concatenate(outs, 1)[0], np.concatenate(lses, 2)[0]))
    (exact, exact_lse), (plain, plain_lse) = results
    formulas.assert_accurate(out, exact, plain)
    formulas.assert_accurate(lse, exact_lse, plain_lse)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (37, 0)},
    "two-sided": {"causal": False, "window": (20, 3)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": 1},
    "alibi-batch": {"alibi_slopes": 2},
    "sinks": {"sinks": True},
    "all": {"window": (100, 5), "softcap": 5.0, "alibi_slopes": 1, "sinks": True, "scale": 0.3},
}


def drawn(options, rng, batch, heads):
    options = {"causal": True} | dict(options)
    if "alibi_slopes" in options:
        shape = (heads,) if options["alibi_slopes"] == 1 else (batch, heads)
        options["alibi_slopes"] = rng.random(shape).astype(np.float32)
    if "sinks" in options:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    return options


def on_device(options):
    return {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option(rng, decode_tier, dtype, option):
    lens, heads = [0, 1, 5, 63, 64, 65, 200, 517], 8
    caches = Caches(rng, lens, 517, 2, 64, 64, DTYPES[dtype])
    options = drawn(OPTIONS[option], rng, len(lens), heads)
    for seqlen_q in (1, 3):
        q = rng.standard_normal((len(lens), seqlen_q, heads, 64)).astype(DTYPES[dtype])
        for call in (caches.contiguous, caches.paged):
            check(call(q, return_lse=True, **on_device(options)), q, caches, **options)


@pytest.mark.parametrize(
    "dims", [(128, 128), (256, 256), (192, 128), (72, 40), (80, 8), (33, 65), (1, 1), (64, 256)]
)
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_every_head_dim_and_group(rng, decode_tier, dims, group):
    lens = [300, 17]
    heads = 2 if dims[1] > 1 else 32  # of a few numbers the formula's error may be small by luck
    for dtype in (BFLOAT16, np.dtype(np.float32)):
        caches = Caches(rng, lens, 300, heads, *dims, dtype)
        for seqlen_q in (1, 2, 5):
            q = rng.standard_normal((2, seqlen_q, heads * group, dims[0])).astype(dtype)
            check(caches.paged(q, return_lse=True), q, caches, causal=True)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_size(rng, decode_tier, page_size):
    caches = Caches(rng, [515, 1, 64], 520, 2, 128, 128, np.float16, page_size)
    for seqlen_q in (1, 3):
        q = rng.standard_normal((3, seqlen_q, 8, 128)).astype(np.float16)
        for options in ({}, {"window": (9, 0)}):
            check(caches.paged(q, return_lse=True, **options), q, caches, causal=True, **options)


@pytest.mark.parametrize("dim", [72, 80, 96, 112])
@pytest.mark.parametrize(("heads", "group"), [(2, 1), (4, 4), (2, 8), (6, 5), (2, 13)])
def test_pairs_of_key_heads(rng, decode_tier, dim, heads, group):
    """Of rows that split lines of 128 bytes: two share a tile, where their number is even."""
    for lens, page_size in (([700, 0, 1, 130], 16), ([1200], 4)):
        caches = Caches(rng, lens, lens[0], heads, dim, dim, BFLOAT16, page_size)
        options = drawn(OPTIONS["all"], rng, len(lens), heads * group)
        for seqlen_q, more in ((1, {"causal": True}), (2, options)):
            q = rng.standard_normal((len(lens), seqlen_q, heads * group, dim)).astype(BFLOAT16)
            for call in (caches.contiguous, caches.paged):
                check(call(q, return_lse=True, **on_device(more)), q, caches, **more)


def test_heads_of_a_pair_do_not_disturb_each_other(rng, decode_tier):
    caches = Caches(rng, [300, 40], 300, 4, 96, 96, BFLOAT16)
    q = rng.standard_normal((2, 1, 16, 96)).astype(BFLOAT16)
    before = caches.contiguous(q).get().reshape(2, 4, 4, 96)
    caches.k[:, 5, 1], caches.v[:, 7, 2] = np.inf, np.nan
    after = caches.contiguous(q).get().reshape(2, 4, 4, 96)
    assert np.array_equal(after[:, [0, 3]], before[:, [0, 3]])
    assert np.isnan(after[:, 2].astype(np.float32)).all()


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64, "fixed"])
def test_every_split(rng, decode_tier, num_splits):
    caches = Caches(rng, [5000, 3, 0, 1025], 5000, 2, 64, 64, BFLOAT16)
    for seqlen_q in (1, 40):
        q = rng.standard_normal((4, seqlen_q, 8, 64)).astype(BFLOAT16)
        result = caches.paged(q, return_lse=True, num_splits=num_splits)
        check(result, q, caches, causal=True)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_option_of_few_sequences(rng, decode_tier, dtype, option):
    """Each with a cluster of blocks for every key head, where there are clusters."""
    lens, heads = [0, 517, 70], 8
    caches = Caches(rng, lens, 517, 2, 128, 128, DTYPES[dtype])
    options = drawn(OPTIONS[option], rng, len(lens), heads)
    for seqlen_q in (1, 2, 3, 4):
        q = rng.standard_normal((len(lens), seqlen_q, heads, 128)).astype(DTYPES[dtype])
        for call in (caches.contiguous, caches.paged):
            check(call(q, return_lse=True, **on_device(options)), q, caches, **options)


@pytest.mark.parametrize("dim", [64, 104, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 5, 10, 20])
def test_clusters_of_every_size(rng, decode_tier, dim, heads):
    """The more sequences and key heads, the smaller they are."""
    caches = Caches(rng, [700, 1, 130], 700, heads, dim, dim, BFLOAT16)
    options = drawn(OPTIONS["all"], rng, 3, 3 * heads)
    for seqlen_q in (2, 5):
        q = rng.standard_normal((3, seqlen_q, 3 * heads, dim)).astype(BFLOAT16)
        for more in ({"causal": True}, options):
            for call in (caches.contiguous, caches.paged):
                check(call(q, return_lse=True, **on_device(more)), q, caches, **more)


@pytest.mark.parametrize("dim", [64, 104, 128, 256])
@pytest.mark.parametrize(
    ("lens", "heads", "tokens", "group"),
    [
        ([300], 1, 1, 48),  # clusters of 8
        ([260, 0, 70], 2, 3, 11),  # of 4
        ([400, 0, 1, 130], 3, 2, 20),  # of 2
        ([70], 1, 2, 32),  # a block each
        ([*range(0, 90, 3)], 2, 5, 7),  # several of a multiprocessor
        ([9000], 1, 1, 20),  # several clusters
    ],
)
def test_several_tiles_of_rows(rng, decode_tier, dim, lens, heads, tokens, group):
    """Each reads the keys of its sequence for itself."""
    caches = Caches(rng, lens, max(lens), heads, dim, dim, BFLOAT16)
    q = rng.standard_normal((len(lens), tokens, heads * group, dim)).astype(BFLOAT16)
    options = drawn(OPTIONS["all"], rng, len(lens), heads * group)
    for more in ({"causal": True}, options):
        for call in (caches.contiguous, caches.paged):
            check(call(q, return_lse=True, **on_device(more)), q, caches, **more)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 16), (80, 128), (104, 40), (256, 192)])
@pytest.mark.parametrize(("sequences", "capacity"), [(3, 100), (9, 128), (180, 190), (3, 300)])
def test_short_sequences(rng, decode_tier, dims, sequences, capacity):
    """Each with a block for every key head: one of a multiprocessor, or one of several."""
    lens = [capacity, 0, 1, *rng.integers(0, capacity, sequences - 3, endpoint=True)]
    caches = Caches(rng, lens, capacity, 3, *dims, BFLOAT16, page_size=32)
    for tokens, group in ((1, 3), (2, 7)):
        q = rng.standard_normal((sequences, tokens, 3 * group, dims[0])).astype(BFLOAT16)
        options = drawn(OPTIONS["all"], rng, sequences, 3 * group)
        for more in ({"causal": True}, options):
            for call in (caches.contiguous, caches.paged):
                check(call(q, return_lse=True, **on_device(more)), q, caches, **more)


@pytest.mark.parametrize(
    ("lens", "heads", "page_size"),
    [
        ([10000], 1, 16),
        ([10000], 1, 2),  # a longer page table than a block keeps
        ([4000], 3, 16),
        ([5000, 0, 70], 1, 16),
        ([2100, 4200], 2, 16),
    ],
)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_few_key_heads(rng, decode_tier, lens, heads, page_size, dim):
    """Many blocks share out the keys of each: their parts are merged in two steps."""
    caches = Caches(rng, lens, max(lens) + 100, heads, dim, dim, BFLOAT16, page_size)
    for seqlen_q in (1, 3, 4):
        q = rng.standard_normal((len(lens), seqlen_q, 4 * heads, dim)).astype(BFLOAT16)
        for options in ({}, {"window": (3000, 0)}):
            for call in (caches.contiguous, caches.paged):
                check(call(q, return_lse=True, **options), q, caches, causal=True, **options)


@pytest.mark.parametrize("length", [0, 1, 128, 129, 2100, 5000])
def test_one_sequence(rng, decode_tier, length):
    """A sequence alone is dealt out without a search."""
    caches = Caches(rng, [length], 5000, 8, 128, 128, BFLOAT16)
    for seqlen_q in (1, 3):
        q = rng.standard_normal((1, seqlen_q, 32, 128)).astype(BFLOAT16)
        for options in ({}, {"window": (300, 0)}):
            for call in (caches.contiguous, caches.paged):
                check(call(q, return_lse=True, **options), q, caches, causal=True, **options)


def test_mixed_decode_and_prefill(rng, decode_tier):
    counts = [1, 0, 130, 1, 7, 64, 1]
    lens = [900, 50, 200, 1, 300, 64, 2]
    caches = Caches(rng, lens, 900, 2, 128, 128, BFLOAT16)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = rng.standard_normal((cu[-1], 8, 128)).astype(BFLOAT16)
    for options in ({}, {"window": (50, 0)}):
        result = caches.paged(q, cu_seqlens_q=cupy.asarray(cu), return_lse=True, **options)
        check(result, q, caches, cu, causal=True, **options)


def test_many_sequences(rng, decode_tier):
    """More sequences than a warp looks at in one step, so that the schedule descends twice."""
    lens = rng.integers(0, 90, 1500)
    lens[rng.integers(0, 1500, 40)] = 0
    lens[7] = 400
    caches = Caches(rng, lens, 400, 1, 64, 64, BFLOAT16)
    q = rng.standard_normal((1500, 1, 4, 64)).astype(BFLOAT16)
    check(caches.paged(q, return_lse=True), q, caches, causal=True)


@pytest.mark.parametrize(
    ("capacity", "dim"), [(120, 64), (350, 64), (120, 128), (300, 112), (120, 256)]
)
@pytest.mark.parametrize("group", [4, 12])
def test_many_short_sequences(rng, decode_tier, capacity, dim, group):
    """Several small blocks share a multiprocessor."""
    batch = 280
    lens = rng.integers(0, capacity + 1, batch)
    caches = Caches(rng, lens, capacity, 2, dim, dim, BFLOAT16)
    q = rng.standard_normal((batch, 1, 2 * group, dim)).astype(BFLOAT16)
    for call in (caches.contiguous, caches.paged):
        check(call(q, return_lse=True), q, caches, causal=True)


@pytest.mark.parametrize(("queries", "keys"), [(20_000, 3), (3, 20_000), (700, 0), (1, 1)])
@pytest.mark.parametrize("window", [None, (0, 0), (5, 0)])
def test_many_queries_of_few_keys_and_few_of_many(rng, decode_tier, queries, keys, window):
    """Most rows see no key, or most keys no row: every block and every split may be empty."""
    lens, counts = [keys, 0, keys], [queries, 1, 2]
    caches = Caches(rng, lens, max(keys, 1), 1, 64, 64, BFLOAT16)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = rng.standard_normal((cu[-1], 2, 64)).astype(BFLOAT16)
    for num_splits in (None, "fixed", 7):
        result = caches.paged(
            q,
            cu_seqlens_q=cupy.asarray(cu),
            return_lse=True,
            window=window,
            num_splits=num_splits,
        )
        check(result, q, caches, cu, causal=True, window=window)


def test_lengths_that_cannot_be_are_the_nearest_that_can(rng, decode_tier):
    caches = Caches(rng, [304, 0, 7, 304, 304, 0], 304, 2, 64, 64, BFLOAT16)
    caches.table[:] = np.arange(caches.table.size).reshape(caches.table.shape)  # all there
    caches.k_pages, caches.v_pages = (
        caches._paged(a, caches.table, 16, 0) for a in (caches.k, caches.v)
    )
    q = rng.standard_normal((6, 1, 8, 64)).astype(BFLOAT16)
    right = caches.lens
    for lens in (
        np.array([2**40, -5, 7, 2**31, 2**31 - 1, -(2**33)], np.int64),
        np.array([305, -5, 7, 2**31 - 1, 1000, -(2**31)], np.int32),
    ):
        caches.lens = lens
        results = caches.contiguous(q, return_lse=True), caches.paged(q, return_lse=True)
        caches.lens = right
        for result in results:
            check(result, q, caches, causal=True)


def test_rows_that_cannot_be_are_the_nearest_that_can(rng, decode_tier):
    caches = Caches(rng, [60, 40, 30], 64, 2, 64, 64, BFLOAT16)
    q = rng.standard_normal((30, 8, 64)).astype(BFLOAT16)
    for given in ([0, 5, 2**32 + 16, 2**40], [-(2**35), 5, 30, 7], [0, 5, 31, 2**31 - 1]):
        result = caches.paged(
            q, cu_seqlens_q=cupy.asarray(np.array(given, np.int64)), return_lse=True
        )
        check(result, q, caches, np.array([0, 5, 30, 30]), causal=True)


def test_a_page_that_does_not_exist_disturbs_nobody_else(rng, decode_tier):
    caches = Caches(rng, [300, 300, 300], 300, 2, 64, 64, BFLOAT16)
    q = rng.standard_normal((3, 1, 8, 64)).astype(BFLOAT16)
    right = [a.get() for a in caches.paged(q, return_lse=True)]
    bad = np.array([-1, len(caches.k_pages), 2**31 - 1, 2**40, -(2**40)], np.int64)
    caches.table = caches.table.astype(np.int64)
    caches.table[1, :5] = bad
    wrong = [a.get() for a in caches.paged(q, return_lse=True)]
    for before, after in zip(right, wrong, strict=True):
        np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])


def test_fixed_splits_do_not_depend_on_the_batch(rng, decode_tier):
    lens = [4000, 100, 2500, 1024, 1]
    caches = Caches(rng, lens, 4000, 2, 128, 128, BFLOAT16)
    q = rng.standard_normal((5, 1, 8, 128)).astype(BFLOAT16)
    whole = caches.contiguous(q, num_splits="fixed").get()
    for b in range(5):
        one = slice(b, b + 1)
        arrays = (q[one], caches.k[one], caches.v[one], caches.lens[one])
        alone = flash_decode(*map(cupy.asarray, arrays), num_splits="fixed").get()
        assert np.array_equal(alone[0], whole[b])


def test_runs_repeat_bit_for_bit(rng, decode_tier):
    caches = Caches(rng, [3000, 10, 800], 3000, 2, 128, 128, BFLOAT16)
    q = rng.standard_normal((3, 1, 8, 128)).astype(BFLOAT16)
    first = caches.paged(q).get()
    for _ in range(20):
        assert np.array_equal(caches.paged(q).get(), first)


@pytest.mark.parametrize("kind", ["pages", "arrays"])
@pytest.mark.parametrize("varlen", [False, True])
def test_shared_prefix(rng, monkeypatch, decode_tier, kind, varlen):
    """By the decoding kernels: tests/gpu/test_shared_prefix.py is about the other."""
    monkeypatch.setattr(decoding, "_cascade_pays", lambda *call: True)
    shared, page_size = 128, 16
    caches = Caches(rng, [150, 129, 300], 300, 2, 128, 128, BFLOAT16, page_size)
    pages = shared // page_size
    caches.table[:, :pages] = caches.table[0, :pages]
    caches.k[:, :shared], caches.v[:, :shared] = caches.k[0, :shared], caches.v[0, :shared]
    sinks = rng.standard_normal(8).astype(np.float32)
    cu = np.array([0, 1, 2, 7], np.int32) if varlen else None
    q = rng.standard_normal((7, 8, 128) if varlen else (3, 1, 8, 128)).astype(BFLOAT16)
    table, lens, prefix = caches.table, caches.lens, shared
    if kind == "arrays":
        table, lens = table[:, pages:], lens - shared
        prefix = tuple(cupy.asarray(a[0, :shared]) for a in (caches.k, caches.v))
    arrays = [cupy.asarray(a) for a in (q, caches.k_pages, caches.v_pages, table, lens)]
    options = {
        "cu_seqlens_q": None if cu is None else cupy.asarray(cu),
        "prefix": prefix,
        "sinks": cupy.asarray(sinks),
    }
    result = paged_attention(*arrays, **options, return_lse=True)
    check(result, q, caches, cu, causal=True, sinks=sinks)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out, lse = paged_attention(*arrays, **options, return_lse=True)
        graph = stream.end_capture()
    clutter = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(8)]
    cupy.cuda.Device().synchronize()
    for _ in range(2):
        graph.launch(stream)
    stream.synchronize()
    del clutter
    assert np.array_equal(out.get(), result[0].get())
    assert np.array_equal(lse.get(), result[1].get())


@pytest.mark.parametrize(("capacity", "seqlen_q"), [(1000, 1), (5000, 1), (5000, 4)])
def test_graph_replays_with_new_lengths_and_pages(rng, decode_tier, capacity, seqlen_q):
    """With one cluster for each sequence and key head, and with several."""
    caches = Caches(rng, [700, 300], capacity, 2, 128, 128, BFLOAT16)
    other = Caches(rng, [40, capacity - 1], capacity, 2, 128, 128, BFLOAT16)
    q = rng.standard_normal((2, seqlen_q, 8, 128)).astype(BFLOAT16)
    q_, table, lens = (cupy.asarray(a) for a in (q, caches.table, caches.lens))
    k_pages, v_pages = cupy.asarray(caches.k_pages), cupy.asarray(caches.v_pages)
    out, lse = paged_attention(q_, k_pages, v_pages, table, lens, return_lse=True)  # compiled
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(3):
            out, lse = paged_attention(q_, k_pages, v_pages, table, lens, out=out, return_lse=True)
        graph = stream.end_capture()
    for now in (caches, other, caches):
        for array, content in (
            (table, now.table),
            (lens, now.lens),
            (k_pages, now.k_pages),
            (v_pages, now.v_pages),
        ):
            array.set(content)
        out[...] = np.nan
        for _ in range(5):
            clutter = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(4)]
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            del clutter
        check((out, lse), q, now, causal=True)


def test_strides_and_out(rng, decode_tier):
    caches = Caches(rng, [100, 30], 100, 2, 64, 64, np.float16)
    q = rng.standard_normal((2, 2, 8, 64)).astype(np.float16)
    wide = cupy.full((2, 2, 8, 130), np.nan, np.float16)
    k = cupy.asarray(caches.k).transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)  # heads first
    for out in (wide[..., :64], wide[..., 1:65], wide[..., :128:2]):
        wide[...] = np.nan
        got, lse = flash_decode(
            cupy.asarray(q),
            k,
            cupy.asarray(caches.v),
            cupy.asarray(caches.lens),
            out=out,
            return_lse=True,
        )
        assert got is out
        check((out, lse), q, caches, causal=True)
        assert int(cupy.isnan(wide).sum()) == wide.size - out.size


def test_more_than_2_31_elements(rng):
    page_size, heads, dim = 256, 2, 128
    num_pages = (1 << 31) // (page_size * heads * dim) + 100
    pages = cupy.empty((num_pages, page_size, heads, dim), np.float16)
    caches = Caches(rng, [500, 900], 1024, heads, dim, dim, np.float16, page_size)
    where = num_pages - caches.k_pages.shape[0]
    k_pages, v_pages = pages, cupy.empty_like(pages)
    k_pages[where:], v_pages[where:] = cupy.asarray(caches.k_pages), cupy.asarray(caches.v_pages)
    table = np.where(caches.table < 1 << 30, caches.table + where, caches.table)
    q = rng.standard_normal((2, 1, 8, dim)).astype(np.float16)
    result = paged_attention(
        *map(cupy.asarray, (q, k_pages, v_pages, table.astype(np.int32), caches.lens)),
        return_lse=True,
    )
    check(result, q, caches, causal=True)


def test_streams_do_not_disturb_each_other(rng):
    caches = [Caches(rng, [3000, 100], 3000, 2, 128, 128, BFLOAT16) for _ in range(3)]
    q = rng.standard_normal((2, 1, 8, 128)).astype(BFLOAT16)
    arrays = [[cupy.asarray(a) for a in (q, c.k, c.v, c.lens)] for c in caches]
    want = [flash_decode(*a).get() for a in arrays]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in caches]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(20):
        for stream, a in zip(streams, arrays, strict=True):
            with stream:
                results.append(flash_decode(*a))
    cupy.cuda.Device().synchronize()
    for i, result in enumerate(results):
        assert np.array_equal(result.get(), want[i % 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_merge(rng, dtype, parts):
    dtype = DTYPES[dtype]
    acc = np.float64 if dtype == np.float64 else np.float32
    for dim in (64, 7):
        outs = rng.standard_normal((parts, 3, 15, 4, dim)).astype(dtype)
        lses = (3 * rng.standard_normal((parts, 3, 4, 15))).astype(acc)
        lses[rng.random(lses.shape) < 0.2] = -np.inf
        lses[:, 0, 0] = -np.inf
        outs[np.isneginf(lses.transpose(0, 1, 3, 2))] = np.nan
        out, lse = merge_attention(cupy.asarray(outs), cupy.asarray(lses))
        exact, exact_lse = merge_attention(outs.astype(np.float64), lses.astype(np.float64))
        # Sums in two orders: one alone may be right by luck.
        plain, plain_lse = merge_attention(outs, lses)
        backwards, backwards_lse = merge_attention(outs[::-1], lses[::-1])
        formulas.assert_accurate(out.get(), exact, plain, backwards)
        formulas.assert_accurate(lse.get(), exact_lse, plain_lse, backwards_lse)
        listed, _ = merge_attention(
            [cupy.asarray(o) for o in outs], [cupy.asarray(x) for x in lses]
        )
        assert np.array_equal(listed.get(), out.get())


def test_int64_lengths_and_pages_saturate(rng, decode_tier):
    """What does not fit in int32 is never taken for its lower half."""
    q = cupy.asarray(rng.standard_normal((3, 4, 64)).astype(np.float16))
    k, v = (cupy.asarray(rng.standard_normal((3, 40, 2, 64)).astype(np.float16)) for _ in "kv")
    lens = np.array([2**31, 2**32 + 3, 17], np.int64)
    small = np.array([40, 40, 17], np.int32)  # beyond the capacity means the capacity
    want = flash_decode(q, k, v, cupy.asarray(small))
    assert cupy.array_equal(flash_decode(q, k, v, cupy.asarray(lens)), want)
    nothing = flash_decode(q, k, v, cupy.asarray(np.array([-(2**32) + 9, 40, 17], np.int64)))
    assert not nothing[0].any()
    assert cupy.array_equal(nothing[1:], want[1:])

    pages = [array.reshape(12, 10, 2, 64)[:, :8].copy() for array in (k, v)]
    table = cupy.arange(12, dtype=np.int64).reshape(3, 4)
    lens = cupy.asarray(np.array([2**31 + 1, 2**33, 17], np.int64))
    small = cupy.asarray(np.array([32, 32, 17], np.int32))
    unused = table.copy()
    unused[2, 3] = 2**32  # is not used
    want = paged_attention(q, *pages, table.astype(np.int32), small)
    assert cupy.array_equal(paged_attention(q, *pages, unused, lens), want)
    cu = cupy.asarray(np.array([0, 1, 2, 3], np.int64))
    ragged = paged_attention(q, *pages, unused, lens, cu_seqlens_q=cu)
    assert float(abs(ragged.astype(np.float32) - want.astype(np.float32)).max()) < 4e-3
