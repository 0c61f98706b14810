"""``num_splits="fixed"``: the bits of a sequence's results are the same whatever the batch."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import formulas

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

PAGE = 64
FORMATS = ("", "int8", "int4")


class Batch:
    """Sequences in pages of their own, but for the first `shared` keys, and their new tokens."""

    def __init__(self, rng, counts, lens, *widths, heads=2, format="", shared=0):
        self.counts, self.lens = counts, np.array(lens, np.int32)
        first, pages = shared // PAGE, -(-self.lens // PAGE)
        self.table = np.zeros((len(lens), pages.max()), np.int32)
        self.table[:, :first] = np.arange(first)
        used = first
        for row, n in zip(self.table, pages, strict=True):
            row[first:n] = np.arange(used, used + n - first)
            used += n - first
        self.pages = [rng.standard_normal((used, PAGE, heads, width)) for width in widths]
        self.shared = (
            shared,
            [
                p[:first].reshape(-1, heads, width)
                for p, width in zip(self.pages, widths, strict=True)
            ],
        )
        self.format = format

    def stored(self, x, format=None):
        format = self.format if format is None else format
        if not format:
            return cupy.asarray(x.astype(np.float16))
        return cuattn.quantize(cupy.asarray(x.astype(np.float16)), format, granularity="token")

    def check(self, attend, queries):
        """Compare what attend(queries, table, lens, ends) gives each sequence alone, the first few
        sequences, and all of them."""
        ends = np.cumsum([0, *self.counts])

        def part(begin, end):
            own = slice(begin, end)
            ints = self.table[own], self.lens[own], ends[begin : end + 1] - ends[begin]
            q = [cupy.asarray(x[ends[begin] : ends[end]]) for x in queries]
            out, lse = attend(*q, *(cupy.asarray(x.astype(np.int32)) for x in ints))
            return out.get(), lse.get()

        out, lse = part(0, len(self.counts))
        for begin, end in {(0, 1), (0, 2), (len(self.counts) - 1, len(self.counts))}:
            rows = slice(ends[begin], ends[end])
            own_out, own_lse = part(begin, end)
            np.testing.assert_array_equal(own_out.view(np.uint16), out[rows].view(np.uint16))
            np.testing.assert_array_equal(own_lse, lse[:, rows])


@pytest.mark.parametrize("counts", [(1, 1, 60), (4, 60), (3, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_ragged_rows(rng, format, counts):
    """A sequence's keys are split, or not, whatever the mean of rows is."""
    batch = Batch(rng, counts, [2100, *(n + 10 for n in counts[1:])], 128, 128, format=format)
    k, v = map(batch.stored, batch.pages)

    def attend(q, table, lens, ends):
        return cuattn.paged_attention(
            q, k, v, table, lens, cu_seqlens_q=ends, num_splits="fixed", return_lse=True
        )

    batch.check(attend, [rng.standard_normal((sum(counts), 8, 128)).astype(np.float16)])


@pytest.mark.parametrize("form", ["pages", "arrays", "int8 arrays"])
@pytest.mark.parametrize("ragged", [False, True])
def test_prefix(rng, form, ragged):
    """So are those of a prefix, whatever rows all sequences have."""
    counts = [1] * 20 if not ragged else [2, 1, 5, *[1] * 12]
    batch = Batch(rng, counts, [2048 + 64 * (1 + i % 3) for i in range(len(counts))], 64, 64,
                  shared=2048)  # fmt: skip
    k, v = map(batch.stored, batch.pages)
    length, arrays = batch.shared
    prefix = length
    if form != "pages":
        format = "" if form == "arrays" else "int8"
        prefix = tuple(batch.stored(x, format) for x in arrays)

    def attend(q, table, lens, ends):
        if form != "pages":
            table, lens = table[:, length // PAGE :], lens - length
        more = {"cu_seqlens_q": ends} if ragged else {}
        out, lse = cuattn.paged_attention(
            q, k, v, table, lens, prefix=prefix, num_splits="fixed", return_lse=True, **more
        )
        return out, lse if ragged else lse[..., 0].T

    queries = rng.standard_normal((sum(counts), 8, 64)).astype(np.float16)
    batch.check(attend, [queries])
    ends = np.cumsum([0, *counts])
    ints = (cupy.asarray(x.astype(np.int32)) for x in (batch.table, batch.lens, ends))
    out, lse = attend(cupy.asarray(queries), *ints)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        n = batch.lens[i]
        pages = batch.table[i, : n // PAGE]
        keys = [x[pages].reshape(1, n, 2, 64).astype(np.float16) for x in batch.pages]
        exact, exact_lse = formulas.attention(queries[None, begin:end], *keys, causal=True)
        close = {"atol": 0.03 if form == "int8 arrays" else 2e-3, "rtol": 0}
        np.testing.assert_allclose(out[begin:end].get().astype(float), exact[0], **close)
        np.testing.assert_allclose(lse[:, begin:end].get(), exact_lse[0], **close)


@pytest.mark.parametrize("length", [5000, 7500, 9700, 40000])
def test_latents_in_many_parts(rng, length):
    """Both variants of mla_combine, for few rows and for many, add in the same order."""
    count = 20
    batch = Batch(rng, [1] * count, [length, *[64] * (count - 1)], 512, 64, heads=1)
    pages = [cupy.asarray(x.astype(ml_dtypes.bfloat16)) for x in batch.pages]

    def attend(q_latent, q_rope, table, lens, ends):
        out, lse = cuattn.mla_decode(
            q_latent, q_rope, *pages, table, lens, scale=0.07, num_splits="fixed", return_lse=True
        )
        return out, lse[..., 0].T

    q = rng.standard_normal((count, 16, 576)).astype(ml_dtypes.bfloat16)
    batch.check(attend, np.split(q, [512], axis=-1))


@pytest.mark.parametrize("format", ["", "int8", "float8_e4m3"])
def test_ragged_rows_over_latents(rng, format):
    counts = [1, 3, 40]
    batch = Batch(rng, counts, [2100, 30, 50], 512, 64, heads=1, format=format)
    latents, rotated = batch.stored(batch.pages[0]), batch.stored(batch.pages[1], "")

    def attend(q_latent, q_rope, table, lens, ends):
        return cuattn.mla_decode(
            q_latent, q_rope, latents, rotated, table, lens, cu_seqlens_q=ends, scale=0.07,
            num_splits="fixed", return_lse=True,
        )  # fmt: skip

    q = rng.standard_normal((sum(counts), 8, 576)).astype(np.float16)
    batch.check(attend, np.split(q, [512], axis=-1))
