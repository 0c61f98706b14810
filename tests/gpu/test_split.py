"""Packed rows on the forward kernel of Hopper, and keys cut into parts whose results are merged:
against the definition in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import formulas
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

from cuattn._repeat import forget  # noqa: E402
from cuattn.gpu import compiler, decoding, dispatch, plan  # noqa: E402
from cuattn.gpu.dispatch import split_sm90  # noqa: E402
from cuattn.gpu.dispatch.parts_sm90 import (  # noqa: E402
    PART_TILE_KEYS,
    Packing,
    packed_warpgroups,
    part_head_dim,
    plain_packings,
)
from cuattn.gpu.dispatch.routing import SPLIT_TILE_KEYS  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """A function that fixes the number of parts, and the tiles."""
    if compiler.device_arch(0) != "sm_90a":
        pytest.skip("not a Hopper GPU")
    scratch_array = decoding.scratch_array

    def dirty(shape, dtype):
        array = scratch_array(shape, dtype)
        array[...] = np.nan
        return array

    def fix(count, tile_n=None, warpgroups=None, pack_gqa=True, **options):
        def packing(call):
            head_dim = part_head_dim(call.spec)
            plain = call.spec.keys == "batched"
            keys = PART_TILE_KEYS[head_dim][0] if plain else SPLIT_TILE_KEYS[head_dim]
            rows = warpgroups or packed_warpgroups(call.spec)
            return Packing(count, rows, tile_n or keys, pack_gqa, **options)

        plan.attention_plan.cache_clear()
        forget()
        monkeypatch.setattr(split_sm90, "best_packing", packing)

    monkeypatch.setattr(decoding, "scratch_array", dirty)
    with dispatch.use_tiers("split_sm90"):
        yield fix
    plan.attention_plan.cache_clear()


def arrays(rng, batch, tokens, keys, heads, dims, dtype=BFLOAT16):
    shapes = (
        (batch, tokens, heads[0], dims[0]),
        (batch, keys, heads[1], dims[0]),
        (batch, keys, heads[1], dims[1]),
    )
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(result, q, k, v, **options):
    """Out and lse against the definition."""
    exact = formulas.attention(q, k, v, **options)
    plain = formulas.attention(q, k, v, **options, precision=q.dtype.type)
    for got, want, usual in zip(result, exact, plain, strict=True):
        formulas.assert_accurate(got.get(), want, usual)


@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (256, 256), (80, 80), (160, 160), (128, 64), (72, 200)]
)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1), (6, 2)])
@pytest.mark.parametrize("count", [2, 7])
def test_parts_are_the_whole(rng, parts, dims, heads, count):
    parts(count)
    for number, (tokens, keys) in enumerate([(1, 700), (65, 515), (150, 300), (40, 20)]):
        dtype = (BFLOAT16, np.dtype(np.float16))[number % 2]
        q, k, v = arrays(rng, 2, tokens, keys, heads, dims, dtype)
        for causal in (False, True):
            sinks = rng.standard_normal(heads[0]).astype(np.float32) if number < 2 else None
            result = cuattn.flash_attention(
                *map(cupy.asarray, (q, k, v)),
                causal=causal,
                sinks=None if sinks is None else cupy.asarray(sinks),
                return_lse=True,
            )
            check(result, q, k, v, causal=causal, sinks=sinks)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "tile_n"), [(64, 128), (96, 128), (128, 128), (128, 176), (192, 112)]
)
def test_a_second_consumer_changes_no_bit(rng, parts, dim, tile_n, causal):
    """Queries that fit into the 64 rows of one consumer."""
    q, k, v = map(cupy.asarray, arrays(rng, 2, 40, 530, (2, 2), (dim, dim)))
    results = []
    for warpgroups in (1, 2):
        parts(3, tile_n, warpgroups)
        results.append(cuattn.flash_attention(q, k, v, causal=causal, return_lse=True))
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one.get(), two.get())


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_blocks_of_176_keys(rng, parts, heads, count):
    parts(count, 176)
    for tokens, keys in ((65, 515), (150, 1000), (40, 180)):
        q, k, v = arrays(rng, 2, tokens, keys, heads, (128, 128))
        result = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), causal=True, return_lse=True)
        check(result, q, k, v, causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_parts_of_tiles_of_one_head(rng, parts, heads, dim, causal):
    packing = next(p for p in plain_packings(96 if dim == 80 else dim) if not p.pack_gqa)
    parts(3, packing.tile_n, packing.warpgroups, pack_gqa=False)
    for tokens, keys in ((150, 515), (200, 1000), (193, 300)):
        q, k, v = arrays(rng, 2, tokens, keys, heads, (dim, dim))
        result = cuattn.flash_attention(
            *map(cupy.asarray, (q, k, v)), causal=causal, return_lse=True
        )
        check(result, q, k, v, causal=causal)


@pytest.mark.parametrize("page_size", [None, 8, 16, 64, 256])
@pytest.mark.parametrize("dim", [64, 80, 128, 160, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_caches_and_pages(rng, parts, page_size, dim, causal):
    parts(3)
    lens = np.int32([1024, 33, 100, 700, 5])
    check_caches(rng, lens, 33, 1024, (8, 2), (dim, dim), page_size, causal=causal)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 80)])
@pytest.mark.parametrize(("tokens", "heads"), [(1, (48, 1)), (7, (10, 2))])
@pytest.mark.parametrize(("count", "warpgroups"), [(1, 1), (1, 2), (3, 1), (13, 1), (70, 1)])
def test_rows_of_one_tile(rng, parts, page_size, dims, tokens, heads, count, warpgroups):
    """Keys that are left whole, and tiles of one warpgroup."""
    parts(count, warpgroups=warpgroups)
    lens = np.int32([320, 0, tokens, 129, 64])
    sinks = rng.standard_normal(heads[0]).astype(np.float32)
    check_caches(rng, lens, tokens, 320, heads, dims, page_size, causal=True, sinks=sinks)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 104)])
@pytest.mark.parametrize(("tokens", "heads"), [(1, (48, 1)), (7, (10, 2)), (1, (192, 4))])
@pytest.mark.parametrize("multiprocessors", [1, 3, 6, 7, 132])
def test_keys_that_are_shared_out_evenly(
    rng, parts, monkeypatch, page_size, dims, tokens, heads, multiprocessors
):
    """Tiles that are whole, cut once and cut often, also in equal parts, and sequences without
    keys; heads of which all, some or none are read at the same time."""
    monkeypatch.setattr(compiler, "multiprocessors", lambda device: multiprocessors)
    parts(1, even=True)
    sinks = rng.standard_normal(heads[0]).astype(np.float32)
    for lens in (
        [640, 0, tokens, 129, 64],
        [0, 1, 300, 0],
        [0, 0],
        [640, 640],
        rng.integers(0, 300, 40),
    ):
        lens = np.int32(lens)
        check_caches(rng, lens, tokens, 640, heads, dims, page_size, causal=True, sinks=sinks)


def test_values_that_are_not_finite_and_keys_that_are_shared_out_evenly(rng, parts, monkeypatch):
    """The rows that see such a value have it, and no others; whichever part is the last."""
    monkeypatch.setattr(compiler, "multiprocessors", lambda device: 5)
    parts(1, even=True)
    q, k, v = arrays(rng, 2, 8, 900, (8, 2), (64, 64))
    v[:, 897] = np.inf  # rows from 5 on see it
    lens = cupy.full(2, 900, np.int32)
    out = cuattn.flash_decode(*map(cupy.asarray, (q, k, v)), lens).get().astype(np.float32)
    assert np.isfinite(out[:, :5]).all()
    assert not np.isfinite(out[:, 5:]).any()


def test_a_captured_call_counts_the_parts_of_each_replay(rng, parts):
    parts(1, even=True)
    q, k, v = map(cupy.asarray, arrays(rng, 3, 1, 1500, (48, 1), (64, 64)))
    lens = cupy.asarray(np.int32([1500, 700, 1]))
    replay, out = captured(lambda: cuattn.flash_decode(q, k, v, lens))
    for _ in range(3):
        for array in (q, k, v):
            array[...] = cupy.asarray(rng.standard_normal(array.shape).astype(BFLOAT16))
        lens[...] = cupy.asarray(rng.integers(0, 1501, 3).astype(np.int32))
        want = cuattn.flash_decode(q, k, v, lens)
        replay()
        assert bool((out == want).all())


def check_caches(rng, lens, tokens, capacity, heads, dims, page_size, *, causal, sinks=None):
    """Lengths that the device knows; what is not to be read is NaN."""
    q, k, v = arrays(rng, len(lens), tokens, capacity, heads, dims)
    k_cache, v_cache = k.copy(), v.copy()
    for b, n in enumerate(lens):
        k_cache[b, n:] = v_cache[b, n:] = np.nan
    on_device = cupy.asarray(lens)
    options = {"causal": causal, "return_lse": True}
    options["sinks"] = None if sinks is None else cupy.asarray(sinks)
    if page_size is None:
        out, lse = cuattn.flash_decode(
            *map(cupy.asarray, (q, k_cache, v_cache)), on_device, **options
        )
    else:
        order = rng.permutation(len(lens) * capacity // page_size)
        table = order.reshape(len(lens), -1).astype(np.int32)
        pages = [
            cache.reshape(-1, page_size, *cache.shape[2:])[np.argsort(order)]
            for cache in (k_cache, v_cache)
        ]
        for b, n in enumerate(lens):
            table[b, -(-n // page_size) :] = 1 << 30
        out, lse = cuattn.paged_attention(
            *map(cupy.asarray, (q, *pages, table)), on_device, **options
        )
    for b, n in enumerate(lens):
        one = (slice(b, b + 1), slice(0, n))
        result = out[b : b + 1], lse[b : b + 1]
        check(result, q[b : b + 1], k[one], v[one], causal=causal, sinks=sinks)


def test_values_that_are_not_finite_reach_the_rows_that_see_them(rng, parts):
    parts(4)
    q, k, v = arrays(rng, 1, 60, 900, (4, 2), (128, 128))
    clean = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), causal=True).get()
    v[0, 870] = np.inf  # rows from 30 on see it
    out = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), causal=True).get()
    assert np.array_equal(out[:, :30], clean[:, :30])
    assert not np.isfinite(out[:, 30:].astype(np.float32)).any()


@pytest.mark.parametrize("kind", ["batched", "cached", "paged"])
def test_sequences_take_turns_where_partial_results_are_large(rng, parts, kind, monkeypatch):
    parts(3)
    q, k, v = map(cupy.asarray, arrays(rng, 5, 40, 512, (4, 2), (64, 64)))
    lens, table = cupy.full(5, 500, np.int32), cupy.arange(40, dtype=np.int32).reshape(5, 8)
    pages = [array.reshape(40, 64, 2, 64) for array in (k, v)]

    def call():
        if kind == "batched":
            return cuattn.flash_attention(q, k, v, return_lse=True)
        if kind == "cached":
            return cuattn.flash_decode(q, k, v, lens, return_lse=True)
        return cuattn.paged_attention(q, *pages, table, lens, return_lse=True)

    together = call()
    monkeypatch.setattr(decoding, "MOST_PART_BYTES", 2 * 3 * 40 * 4 * 64 * 4)  # two sequences
    forget()
    for want, result in zip(together, call(), strict=True):
        assert bool((want == result).all())


def test_into_an_array_of_any_strides(rng, parts):
    parts(3)
    q, k, v = map(cupy.asarray, arrays(rng, 2, 40, 500, (4, 2), (64, 64)))
    want = cuattn.flash_attention(q, k, v)
    whole = cupy.full((2, 40, 8, 64), 7, BFLOAT16)
    out = whole[:, :, ::2]
    assert cuattn.flash_attention(q, k, v, out=out) is out
    assert bool((out == want).all())
    assert bool((whole[:, :, 1::2] == 7).all())


def test_a_captured_call_reads_what_the_arrays_hold_by_then(rng, parts):
    parts(5)
    q, k, v = map(cupy.asarray, arrays(rng, 1, 70, 1500, (8, 2), (128, 128)))
    replay, out = captured(lambda: cuattn.flash_attention(q, k, v, causal=True))
    for _ in range(3):
        for array in (q, k, v):
            array[...] = cupy.asarray(rng.standard_normal(array.shape).astype(BFLOAT16))
        want = cuattn.flash_attention(q, k, v, causal=True)
        replay()
        assert bool((out == want).all())


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "dim"),
    [(64, 16384, (8, 2), 128), (140, 9000, (1, 1), 160), (190, 20000, (2, 1), 80)],
)
def test_short_queries_over_long_keys_are_split_for_any_batch(rng, tokens, keys, heads, dim):
    """The number of parts does not depend on the batch, so that no bit does."""
    q, k, v = map(cupy.asarray, arrays(rng, 3, tokens, keys, heads, (dim, dim)))
    together = cuattn.flash_attention(q, k, v, causal=True)
    for b in range(3):
        one = slice(b, b + 1)
        alone = cuattn.flash_attention(q[one], k[one], v[one], causal=True)
        assert bool((alone[0] == together[b]).all())
