"""The shared prefix of a batch on the forward kernel of Hopper, against the definition in
float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuattn.decoding import paged_attention
from tests import formulas

cupy = pytest.importorskip("cupy")

from cuattn.gpu import compiler, decoding  # noqa: E402
from cuattn.gpu.plan import Plan  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def passes(monkeypatch):
    """The launches of the forward kernel over prefixes."""
    if compiler.device_arch(cupy.cuda.Device().id) != "sm_90a":
        pytest.skip("a kernel of Hopper")
    monkeypatch.setattr(decoding, "_cascade_pays", lambda *call: True)
    scratch_array, launch, launches = decoding.scratch_array, Plan.launch, []

    def dirty(shape, dtype):
        array = scratch_array(shape, dtype)
        array[...] = np.nan
        return array

    def noted(plan, addresses):
        if "attention" in plan.chosen.variant.source:
            launches.append(plan.chosen)
        launch(plan, addresses)

    monkeypatch.setattr(decoding, "scratch_array", dirty)
    monkeypatch.setattr(Plan, "launch", noted)
    return launches


class Batch:
    """Sequences that begin with the same keys, in pages, and their newest tokens' queries. What is
    not to be read is NaN.
    """

    def __init__(self, rng, shared, own, heads, group, dims, dtype, *, page_size=16, tokens=1):
        self.shared, self.own = shared, np.array(own)
        longest, count = shared + max(own), len(own)
        first, rest = shared // page_size, -(-max(own) // page_size)
        order = rng.permutation(first + count * rest + 3).astype(np.int32)
        self.table = np.empty((count, first + rest), np.int32)
        self.table[:, :first] = order[:first]
        self.table[:, first:] = order[first : first + count * rest].reshape(count, rest)
        self.q = rng.standard_normal((count, tokens, heads * group, dims[0])).astype(dtype)
        self.rows = [rng.standard_normal((count, longest, heads, d)).astype(dtype) for d in dims]
        self.pages = [np.full((order.size, page_size, heads, d), np.nan, dtype) for d in dims]
        for rows, pages in zip(self.rows, self.pages, strict=True):
            rows[:, :shared] = rows[0, :shared]
            for b, n in enumerate(shared + self.own):
                slots = self.table[b, np.arange(n) // page_size], np.arange(n) % page_size
                pages[slots] = rows[b, :n]
        for b, n in enumerate(shared + self.own):
            self.table[b, -(-n // page_size) :] = 1 << 30

    def attend(self, kind, **options):
        table, lens, prefix = self.table, self.shared + self.own, self.shared
        if kind == "arrays":
            first = self.shared // self.pages[0].shape[1]
            table, lens = table[:, first:], self.own
            prefix = tuple(cupy.asarray(rows[0, : self.shared]) for rows in self.rows)
        arrays = (self.q, *self.pages, table, lens.astype(np.int32))
        return paged_attention(*map(cupy.asarray, arrays), prefix=prefix, **options)

    def check(self, result, **options):
        """Judge out and lse by the definition, sequence by sequence."""
        out, lse = (array.get() for array in result)
        for b, n in enumerate(self.shared + self.own):
            (exact, exact_lse), (plain, plain_lse) = (
                formulas.attention(
                    *(a[b : b + 1, : n if a is not self.q else None] for a in (self.q, *self.rows)),
                    precision=precision,
                    causal=True,
                    **options,
                )
                for precision in (np.float64, self.q.dtype)
            )
            formulas.assert_accurate(out[b : b + 1], exact, plain)
            formulas.assert_accurate(lse[b : b + 1], exact_lse, plain_lse)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "arrays"), ("bfloat16", "pages")])
@pytest.mark.parametrize(
    ("dims", "group"),
    [
        *(((128, 128), group) for group in (1, 2, 3, 4, 5, 7, 8, 12, 40, 64)),
        *(((64, 64), group) for group in (1, 4, 7)),
        *(((256, 256), group) for group in (1, 6, 16)),
        *((dims, 4) for dims in ((72, 40), (192, 128), (8, 8), (96, 96), (128, 64))),
    ],
)
def test_every_group_and_head_dim(rng, passes, dims, group, dtype, kind):
    """Also of fewer tokens than fit 64 rows, and of a few more."""
    for count in (1, 3, 37):
        batch = Batch(
            rng,
            304,
            rng.integers(1, 40, count),
            2,
            group,
            dims,
            np.dtype(getattr(ml_dtypes, dtype, dtype)),
        )
        batch.check(batch.attend(kind, return_lse=True))
    assert len(passes) == sum(count * group > 8 for count in (1, 3, 37))


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_page_size(rng, passes, page_size, head_dim):
    for pages in (1, 5):
        own = rng.integers(1, 300, 40)
        batch = Batch(
            rng, pages * page_size, own, 1, 4, (head_dim, head_dim), BFLOAT16, page_size=page_size
        )
        batch.check(batch.attend("pages", return_lse=True))
    assert len(passes) == 2


@pytest.mark.parametrize("length", [1, 127, 128, 129, 4000, 5000])
def test_every_length(rng, passes, length):
    """With as many parts as keys and multiprocessors allow."""
    longest = 5008
    batch = Batch(rng, longest, rng.integers(1, 5, 64), 2, 4, (128, 128), BFLOAT16)
    batch.shared = length
    batch.rows = [
        np.concatenate([rows[:, :length], rows[:, longest:]], axis=1) for rows in batch.rows
    ]
    table = batch.table[:, longest // 16 :]
    prefix = tuple(cupy.asarray(rows[0, :length]) for rows in batch.rows)
    arrays = (batch.q, *batch.pages, table, batch.own.astype(np.int32))
    batch.check(paged_attention(*map(cupy.asarray, arrays), prefix=prefix, return_lse=True))
    assert [launch.parts > 1 for launch in passes] == [length > 128]


def test_options(rng, passes):
    """Sinks count once; tokens of a sequence follow each other; scores that the kernel does not
    know go another way.
    """
    sinks = rng.standard_normal(8).astype(np.float32)
    batch = Batch(rng, 256, rng.integers(9, 40, 30), 2, 4, (128, 128), BFLOAT16, tokens=3)
    options = {"return_lse": True, "sinks": cupy.asarray(sinks)}
    batch.check(batch.attend("pages", **options), sinks=sinks)
    batch.check(batch.attend("pages", scale=0.3, **options), sinks=sinks, scale=0.3)
    assert len(passes) == 2
    batch.check(batch.attend("pages", softcap=3.0, **options), sinks=sinks, softcap=3.0)
    batch.check(batch.attend("pages", window=(200, 0), **options), sinks=sinks, window=(200, 0))
    batch.check(batch.attend("pages", num_splits="fixed", **options), sinks=sinks)
    assert len(passes) == 2


def test_strides_of_a_fused_projection(rng, passes):
    """Queries, and the prefix's keys and values, that are columns of one array."""
    batch = Batch(rng, 512, rng.integers(1, 40, 50), 2, 4, (128, 128), BFLOAT16)
    want = batch.attend("arrays", return_lse=True)
    q = cupy.asarray(np.concatenate([batch.q, batch.q], axis=2))[:, :, 8:]
    both = cupy.asarray(np.concatenate([rows[0, :512] for rows in batch.rows], axis=1))
    table = cupy.asarray(batch.table[:, 32:])
    pages = map(cupy.asarray, batch.pages)
    wide = cupy.full((50, 1, 8, 136), np.nan, BFLOAT16)
    out, lse = paged_attention(
        q,
        *pages,
        table,
        cupy.asarray(batch.own.astype(np.int32)),
        prefix=(both[:, :2], both[:, 2:]),
        out=wide[..., :128],
        return_lse=True,
    )
    assert len(passes) == 2
    assert np.array_equal(out.get(), want[0].get())
    assert np.array_equal(lse.get(), want[1].get())
    assert bool(cupy.isnan(wide[..., 128:]).all())


def test_a_graph_replays_with_other_pages(rng, monkeypatch):
    """Lengths, queries and the table are read when the graph runs; nothing lies in memory that
    others may be given.
    """
    monkeypatch.undo()
    monkeypatch.setattr(decoding, "_cascade_pays", lambda *call: True)
    cupy.get_default_memory_pool().free_all_blocks()
    batches = [
        Batch(rng, 1024, rng.integers(1, 40, 40), 2, 4, (128, 128), BFLOAT16) for _ in range(2)
    ]
    width = max(batch.table.shape[1] for batch in batches)
    pages = max(batch.pages[0].shape[0] for batch in batches)
    q, k, v, table, lens = (
        cupy.zeros((40, 1, 8, 128), BFLOAT16),
        cupy.zeros((pages, 16, 2, 128), BFLOAT16),
        cupy.zeros((pages, 16, 2, 128), BFLOAT16),
        cupy.zeros((40, width), np.int32),
        cupy.zeros(40, np.int32),
    )
    out = paged_attention(q, k, v, table, lens, prefix=1024)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        paged_attention(q, k, v, table, lens, prefix=1024, out=out)
        graph = stream.end_capture()
    for batch in (*batches, *batches):
        q[...] = cupy.asarray(batch.q)
        for array, content in zip((k, v), batch.pages, strict=True):
            array[: len(content)] = cupy.asarray(content)
        table[:, : batch.table.shape[1]] = cupy.asarray(batch.table)
        lens[...] = cupy.asarray((batch.shared + batch.own).astype(np.int32))
        want = batch.attend("pages", return_lse=True)
        clutter = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(8)]
        out[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert all(bool(cupy.isnan(array).all()) for array in clutter)
        assert np.array_equal(out.get(), want[0].get())
        batch.check(want)


def test_runs_repeat_bit_for_bit(rng, passes):
    batch = Batch(rng, 8192, rng.integers(1, 40, 64), 2, 4, (128, 128), BFLOAT16)
    first = batch.attend("pages").get()
    for _ in range(10):
        assert np.array_equal(batch.attend("pages").get(), first)
    assert passes
