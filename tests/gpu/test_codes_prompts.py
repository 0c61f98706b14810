"""Prompts over codes that the forward kernel expands: the same bits as over their numbers."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from cuattn.gpu import compiler, dispatch
from cuattn.gpu.dispatch import codes_sm90, config_sm90
from cuattn.gpu.dispatch.quantization import FORMAT_PAIRS
from tests import formulas
from tests.gpu.test_quantized_decoding import Cache, check, decode, rotated_queries

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LENS = [300, 0, 1, 128, 513]
QUERIES = [70, 3, 0, 130, 200]  # of ragged rows


@pytest.fixture(params=[1, 3, 8], ids="{} blocks".format)
def both_ways(request, monkeypatch):
    """Makes a call in the kernel that reads codes, which so many thread blocks expand together, and
    in the one over their numbers, with tiles of as many keys."""
    monkeypatch.setattr(codes_sm90, "team_of", lambda spec, multiprocessors: request.param)
    tiles = tuple(tile for tile in config_sm90.SM90_TILES[128, 128] if tile.tile_n == 128)
    monkeypatch.setitem(config_sm90.SM90_TILES, (128, 128), tiles)
    monkeypatch.setattr(dispatch, "rotates_queries", lambda spec: True)
    monkeypatch.setattr(codes_sm90, "expands_each_tile", lambda spec, multiprocessors: True)

    def call(*arguments, **options):
        results = []
        for name in ("forward_codes_sm90", "forward_sm90"):
            with dispatch.use_tiers(name):
                results.append(decode(*arguments, **options))
        return results

    return call


def in_bfloat16(values):
    """Keys as the kernel multiplies them: dequantised, and rounded to the dtype of queries."""
    return values.astype(BFLOAT16).astype(np.float32)


def assert_same_bits(results):
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got.get().view(np.uint8), want.get().view(np.uint8))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids="/".join)
def test_numbers_are_the_same(rng, both_ways, formats, paged):
    k, v = (Cache(rng, LENS, 2, 128, format) for format in formats)
    q = rng.standard_normal((len(LENS), 140, 4, 128)).astype(BFLOAT16)
    results = both_ways(q, k, v, LENS, paged)
    check(results[0], q, k.values, v.values, LENS, [(q, in_bfloat16(k.values))], causal=True)
    assert_same_bits(results)


@pytest.mark.parametrize("page_size", [8, 64, 256])
@pytest.mark.parametrize("formats", FORMAT_PAIRS[:3:2], ids="/".join)
def test_rotated_keys_and_pages(rng, both_ways, formats, page_size):
    k = Cache(rng, LENS, 2, 128, formats[0], page_size, rotate=True)
    v = Cache(rng, LENS, 2, 128, formats[1], page_size)
    q = rng.standard_normal((len(LENS), 70, 2, 128)).astype(BFLOAT16)
    results = both_ways(q, k, v, LENS, True)
    queries, keys = rotated_queries(q, k)
    others = [(queries, keys), (queries, in_bfloat16(keys))]
    check(results[0], q, k.values, v.values, LENS, others, causal=True)
    assert_same_bits(results)


@pytest.mark.parametrize("group", [1, 7, 8])
@pytest.mark.parametrize("formats", FORMAT_PAIRS[:3:2], ids="/".join)
def test_ragged_rows(rng, both_ways, formats, group):
    k, v = (Cache(rng, LENS, 2, 128, format) for format in formats)
    cu_seqlens = np.cumsum([0, *QUERIES]).astype(np.int32)
    q = rng.standard_normal((cu_seqlens[-1], 2 * group, 128)).astype(BFLOAT16)
    results = both_ways(q, k, v, LENS, True, cu_seqlens_q=cupy.asarray(cu_seqlens))
    assert_same_bits(results)

    def formula(precision, rounded=lambda keys: keys):
        parts = []
        for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
            keys, values = (x.values[b : b + 1, : LENS[b]] for x in (k, v))
            keys = rounded(keys)
            options = {"precision": precision, "scale": 128**-0.5, "causal": True}
            parts.append(formulas.attention(q[None, begin:end], keys, values, **options)[0][0])
        return np.concatenate(parts)

    plain = formula(BFLOAT16), formula(BFLOAT16, in_bfloat16)
    formulas.assert_accurate(results[0][0].get(), formula(np.float64), *plain)


def test_few_queries_of_a_group_that_does_not_fill_its_rows(rng, both_ways):
    k, v = (Cache(rng, LENS, 2, 128, "int8") for _ in "kv")
    q = rng.standard_normal((len(LENS), 22, 6, 128)).astype(BFLOAT16)
    assert_same_bits(both_ways(q, k, v, LENS, True))


def test_several_tiles_of_a_block(rng, both_ways, monkeypatch):
    monkeypatch.setattr(compiler, "multiprocessors", lambda device: 8)
    k, v = (Cache(rng, LENS, 2, 128, "int8") for _ in "kv")
    q = rng.standard_normal((len(LENS), 140, 2, 128)).astype(BFLOAT16)
    assert_same_bits(both_ways(q, k, v, LENS, True))


def test_slots_are_used_again(rng, both_ways):
    """More blocks of keys than a team's ring has slots, and tiles that see fewer of them."""
    lens = [2800, 900, 0, 2177]
    k, v = (Cache(rng, lens, 1, 128, "int8", 64, rotate=rotate) for rotate in (True, False))
    q = rng.standard_normal((len(lens), 700, 1, 128)).astype(BFLOAT16)
    assert_same_bits(both_ways(q, k, v, lens, True))


@pytest.mark.parametrize("blocks", [2, 3, 10])
def test_slots_of_the_tile_before_are_used_again(rng, both_ways, monkeypatch, blocks):
    """One team, whose expanding warps are at the next tile while keys and values of the last blocks
    of a tile are loaded."""
    team = codes_sm90.team_of(None, 0)
    monkeypatch.setattr(compiler, "multiprocessors", lambda device: team)
    lens = [128 * blocks, 128 * (codes_sm90._ring_slots(team) + 1)]
    k, v = (Cache(rng, lens, 1, 128, "int8") for _ in "kv")
    q = rng.standard_normal((2, 257, 1, 128)).astype(BFLOAT16)
    assert_same_bits(both_ways(q, k, v, lens, True))


def test_minima_of_any_size(rng, both_ways):
    """Codes of 4 bits whose minimum is far from the scale, in some rows: their sum is rounded to
    float32 and then to bfloat16."""
    k, v = (Cache(rng, LENS, 2, 128, "int4") for _ in "kv")
    for codes in (k.codes, v.codes):
        rows = codes.minimum.shape[1]
        shifts = np.where(rng.random(rows) < 0.1, rng.integers(-30, 30, rows), 0)
        shifts[rows // 2 :] = rng.integers(-13, 17, rows - rows // 2)
        factor = np.exp2(-shifts.astype(np.float32))[None, :, None, None]
        codes.scale[...] = (codes.scale.astype(np.float32) * factor).astype(BFLOAT16)
    codes.minimum[:, ::5] = 0
    q = rng.standard_normal((len(LENS), 140, 2, 128)).astype(BFLOAT16)
    assert_same_bits(both_ways(q, k, v, LENS, False))
