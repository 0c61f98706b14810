"""append_kv on a GPU (tests/appending.py); places that do not exist; graphs."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests import appending, formulas
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype(dtype) for dtype in formulas.DTYPES]


@pytest.mark.parametrize("rope", [None, "halves", "interleaved"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", appending.KINDS[:3])
def test_every_way(kind, ragged, padded, rope, rng):
    dtype = DTYPES[rng.integers(4)]
    dims = [(64, 40), (128, 128), (33, 7)][rng.integers(3)]
    options = {"ragged": ragged, "padded": padded, "rope": rope, "dims": dims}
    appending.check(rng, dtype, kind, cupy.asarray, **options)


@pytest.mark.parametrize("kind", appending.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, kind, rng):
    appending.check(rng, dtype, kind, cupy.asarray, strided=True)


def test_places_that_do_not_exist_are_not_written(rng):
    """Neither lengths, pages, slots nor positions lead out of the caches."""
    around = cupy.full((6, 16, 1, 8), 7, np.float32)
    k_pages, v_pages = around[1:4], around[1:4].copy()
    new = cupy.ones((3, 4, 1, 8), np.float32)
    lens = cupy.asarray(np.array([3, 50, 1 << 30], np.int32))
    table = cupy.asarray(np.array([[0, 1], [3, -1], [2, 9]], np.int32))
    cos = cupy.ones((2, 2), np.float32)
    cuattn.append_kv(k_pages, v_pages, new, new, lens, page_table=table, rope=(cos, cos))
    assert (around[:1] == 7).all()
    assert (around[4:] == 7).all()
    written = (v_pages.get() == 1).any(axis=(2, 3))
    assert written.sum() == 2, "of four tokens one is at -1, and one beyond the tables"
    slots = cupy.asarray(np.array([-5, 48, 1 << 30, 3] * 3, np.int32))
    cuattn.append_kv(
        k_pages, v_pages, new.reshape(12, 1, 8), new.reshape(12, 1, 8), None, slots=slots
    )
    assert (around[:1] == 7).all()
    assert (around[4:] == 7).all()


@pytest.mark.parametrize("quantized", [False, True])
def test_tokens_may_be_moved_within_a_cache(quantized, rng):
    """All are read before one is written."""
    cache = rng.standard_normal((2, 600, 4, 64)).astype(np.float16)
    of_values = cuattn.quantize(cache, "int8") if quantized else cache.copy()
    lens = np.array([560, 520], np.int32)
    on_device = cupy.asarray(cache)
    codes = cupy.asarray(of_values) if not quantized else of_values.of(
        *(None if x is None else cupy.asarray(x)
          for x in (of_values.data, of_values.scale, of_values.minimum))
    )  # fmt: skip
    for keys, values, lengths in (
        (cache, of_values, lens), (on_device, codes, cupy.asarray(lens))
    ):  # fmt: skip
        cuattn.append_kv(keys, values, keys[:, :500], keys[:, 50:550], lengths)
    assert np.array_equal(on_device.get(), cache)
    written, right = (x.data if quantized else x for x in (codes, of_values))
    assert np.array_equal(written.get(), right)


@pytest.mark.parametrize("lead", [(), (1, 1), (2, 1), "of heads together"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_shared_scales_stay_as_they_are(format, lead, rng):
    """The codes, and nothing else, are those of NumPy."""
    new = rng.standard_normal((2, 5, 2, 64)).astype(np.float16)
    shape = (2, 16, 1, 1) if lead == "of heads together" else (*lead, 2, 1)
    scale = rng.uniform(0.1, 0.2, shape).astype(np.float32)
    minimum = np.full_like(scale, -1.5) if format == "int4" else None
    lens = np.array([7, 12], np.int32)
    results = []
    for xp in (np, cupy):
        data = np.zeros((2, 16, 2, 64), np.int8)
        if format == "int4":
            data = np.zeros((2, 16, 2, 32), np.uint8)
        parts = (None if part is None else xp.asarray(part) for part in (scale, minimum))
        own_scale, own_minimum = parts
        options = {"dtype": format, "minimum": own_minimum, "like": np.float16}
        codes = [cuattn.QuantizedArray(xp.asarray(data), own_scale, **options) for _ in "kv"]
        codes[1] = codes[1].of(xp.asarray(data.copy()), codes[1].scale, codes[1].minimum)
        cuattn.append_kv(*codes, xp.asarray(new), xp.asarray(-new), xp.asarray(lens))
        results.append([part if xp is np else part.get() for part in (
            codes[0].data, codes[1].data, codes[0].scale)])  # fmt: skip
    for of_numpy, of_gpu in zip(*results, strict=True):
        np.testing.assert_array_equal(of_gpu, of_numpy)
    np.testing.assert_array_equal(results[1][2], np.broadcast_to(scale, results[1][2].shape))


def test_a_graph_writes_where_lengths_point_when_it_runs():
    k_cache, v_cache = cupy.zeros((2, 2, 8, 1, 8), np.float32)
    new = cupy.ones((2, 1, 1, 8), np.float32)
    lens = cupy.asarray(np.array([1, 4], np.int32))
    replay, _ = captured(lambda: cuattn.append_kv(k_cache, v_cache, new, new, lens))
    lens += 2
    replay()
    expected = np.zeros((2, 8), bool)
    expected[0, [0, 2]] = expected[1, [3, 5]] = True
    np.testing.assert_array_equal(k_cache.get()[..., 0, 0] == 1, expected)
