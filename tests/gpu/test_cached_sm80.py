"""Prompts over pages and caches on the forward kernel for Ampere and newer: against the definition
in float64, and bit for bit against the same keys one after the other where tiles are the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import scores

cupy = pytest.importorskip("cupy")

from cuattn.gpu import dispatch  # noqa: E402
from tests.gpu.test_paged_prompts import OPTIONS, Prompts, on_device, same_bits  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTHS = [(150, 300), (1, 1), (65, 65), (0, 5), (7, 200), (129, 128), (20, 0)]
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture(autouse=True)
def sm80():
    with dispatch.use_tiers("forward_sm80"):
        yield


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_ragged_rows_over_pages(page_size, option, rng):
    prompts = Prompts(rng, *zip(*LENGTHS, strict=True), (64, 64), page_size)
    result = prompts.attend(**OPTIONS[option])
    prompts.check(result, **OPTIONS[option])
    if option in ("softcap", "alibi"):  # of the same tile
        assert same_bits(result, prompts.contiguous(**OPTIONS[option]))


@pytest.mark.parametrize(
    "dims", [(40, 48), (96, 96), (128, 64), (192, 128), (192, 192), (256, 256), (63, 100)]
)
def test_every_head_dim(dims, rng):
    dtype = DTYPES[rng.integers(2)]
    prompts = Prompts(rng, *zip(*LENGTHS[:3], strict=True), dims, 32, dtype)
    for options in ({}, {"window": (100, 0), "softcap": 20.0}):
        prompts.check(prompts.attend(**options), **options)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rows", [30, 193])
def test_batched_rows_over_caches_and_pages(rows, option, rng):
    options = OPTIONS[option]
    keys = rows + np.array([0, 1, 77, 200])
    prompts = Prompts(rng, np.full(4, rows), keys, (128, 128))
    q = cupy.asarray(prompts.q.reshape(4, rows, 4, 128))
    lens = cupy.asarray(keys.astype(np.int32))
    options = on_device(options) | {"return_lse": True}
    results = [
        (
            out.reshape(-1, 4, 128),
            cupy.ascontiguousarray(lse.transpose(1, 0, 2)).reshape(4, -1),
        )
        for out, lse in (
            cuattn.flash_decode(q, *prompts.caches(511), lens, **options),
            cuattn.paged_attention(q, *prompts.pages(), lens, **options),
        )
    ]
    prompts.check(results[0], **OPTIONS[option])
    assert same_bits(*results)


@pytest.mark.parametrize(
    "name", [n for n in scores.OPTIONS if "mask" in n or "bias" in n or n == "all"]
)
def test_bias_and_masks(name, rng):
    scores.check_decode(rng, DTYPES[rng.integers(2)], name, (64, 40), cupy.asarray, tokens=40)
    scores.check_paged(rng, DTYPES[rng.integers(2)], name, (128, 128), cupy.asarray)


def test_values_that_are_not_finite_reach_the_rows_that_see_them(rng):
    prompts = Prompts(rng, [200, 100], [300, 250])
    clean = prompts.attend()[0].get()
    prompts.v[250] = np.nan  # the first sequence's rows from 150 on see it
    out = prompts.attend()[0].get()
    sees = np.arange(300) < 200
    sees &= np.arange(300) >= 150
    assert np.array_equal(out[~sees], clean[~sees])
    assert np.isnan(out[sees].astype(np.float32)).all()


def test_lengths_are_read_when_the_kernel_runs(rng):
    """Also those that a table has no room for, and negative ones: no address is made of them."""
    prompts = Prompts(rng, [100, 60], [200, 100])
    k, v, table = prompts.pages()
    capacity = table.shape[1] * prompts.page_size
    lens = cupy.asarray(np.int32([200, 100]))
    q, cu_q = cupy.asarray(prompts.q), cupy.asarray(prompts.cu_q)
    for changed in ([capacity + 5, 100], [200, -3], [0, 0]):
        lens[...] = cupy.asarray(np.int32(changed))
        out = cuattn.paged_attention(q, k, v, table, lens, cu_seqlens_q=cu_q)
        assert out.shape == q.shape
        if changed == [0, 0]:
            assert bool((out == 0).all())
