"""Sequences for decoding beside prompts in one call, in a launch each on Hopper: against the
definition in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import formulas
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

from cuattn.gpu import compiler  # noqa: E402
from cuattn.gpu.dispatch import routing  # noqa: E402
from cuattn.gpu.plan import Plan, attention_plan  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def sources(monkeypatch):
    """The kernel files of the launches that were made, of which any batch that may be mixed has
    two."""
    if compiler.device_arch(0) != "sm_90a":
        pytest.skip("not a Hopper GPU")
    monkeypatch.setattr(routing, "TWO_LAUNCHES_US", 0.0)
    attention_plan.cache_clear()
    prepare, found = Plan._prepare, []

    def noted(plan, addresses):
        found.append(plan.chosen.variant.source)
        return prepare(plan, addresses)

    monkeypatch.setattr(Plan, "_prepare", noted)
    yield found
    attention_plan.cache_clear()


class Batch:
    """Sequences whose keys lie in pages; what is not to be read is NaN."""

    def __init__(self, rng, tokens, keys, heads, dim, page_size=16):
        self.tokens, self.keys = np.array(tokens), np.array(keys)
        self.cu_q = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        self.cu_k = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
        self.q = rng.standard_normal((self.cu_q[-1], heads[0], dim)).astype(BFLOAT16)
        self.k, self.v = (
            rng.standard_normal((self.cu_k[-1], heads[1], dim)).astype(BFLOAT16) for _ in "kv"
        )
        counts = -(-self.keys // page_size)
        order = rng.permutation(counts.sum() + 5).astype(np.int32)
        self.table = np.full((len(keys), counts.max() + 1), 1 << 30, np.int32)
        self.pages = [
            np.full((len(order), page_size, heads[1], dim), np.nan, BFLOAT16) for _ in "kv"
        ]
        first = 0
        for b, n in enumerate(self.keys):
            self.table[b, : counts[b]] = order[first : first + counts[b]]
            first += counts[b]
            slots = self.table[b, np.arange(n) // page_size], np.arange(n) % page_size
            for pages, rows in zip(self.pages, (self.k, self.v), strict=True):
                pages[slots] = rows[self.cu_k[b] : self.cu_k[b + 1]]

    def attend(self, **options):
        arrays = (self.q, *self.pages, self.table, self.keys.astype(np.int32))
        return cuattn.paged_attention(
            *map(cupy.asarray, arrays),
            cu_seqlens_q=cupy.asarray(self.cu_q),
            return_lse=True,
            **options,
        )

    def check(self, result, **options):
        arrays = (self.q, self.k, self.v, self.cu_q, self.cu_k)
        exact = formulas.varlen_attention(*arrays, causal=True, **options)
        plain = formulas.varlen_attention(*arrays, causal=True, **options, precision=BFLOAT16)
        for got, want, usual in zip(result, exact, plain, strict=True):
            formulas.assert_accurate(got.get(), want, usual)


BATCHES = {
    "mostly decoding": ([1] * 20 + [70], [*range(1, 2000, 100), 300]),
    "mostly prompts": ([300, 1, 2, 500, 0, 9], [500, 700, 2, 1000, 30, 900]),
    "prompts alone": ([100, 200, 300], [100, 250, 1000]),
    "drafts alone": ([4] * 9, [*range(50, 950, 100)]),
    "many": ([1] * 62 + [160, 150], [*range(3, 65), 200, 310]),
    "many drafts": ([6] * 64, [*range(6, 70)]),
    "forty": ([1] * 39 + [400], [64] * 39 + [800]),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (12, 1)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_sequence_is_computed_once(rng, sources, dim, heads, kind):
    batch = Batch(rng, *BATCHES[kind], heads, dim)
    batch.check(batch.attend())
    if "prompts" not in kind:  # else sequences may be so short that one launch has them all
        assert sorted(sources) == ["attention/forward_sm90.cu", "decoding/decode_sm80.cu"]


@pytest.mark.parametrize("options", [{"window": (100, 0)}, {"softcap": 20.0}])
def test_windows_and_scores(rng, sources, options):
    batch = Batch(rng, *BATCHES["mostly prompts"], (8, 2), 128)
    batch.check(batch.attend(**options), **options)
    assert len(sources) == 2


def test_a_graph_reads_lengths_when_it_is_replayed(rng):
    """What was a sequence for one kernel may be one for the other by then."""
    tokens, keys = [1] * 6 + [250, 44], [600] * 8
    batch = Batch(rng, tokens, keys, (8, 2), 128)
    q, k, v, table = map(cupy.asarray, (batch.q, *batch.pages, batch.table))
    lens, cu_q = cupy.asarray(batch.keys.astype(np.int32)), cupy.asarray(batch.cu_q)

    def call():
        return cuattn.paged_attention(q, k, v, table, lens, cu_seqlens_q=cu_q)

    replay, out = captured(call)
    for changed in (tokens, tokens[::-1], [37] * 8 + [4]):
        ends = np.concatenate([[0], np.cumsum(changed)])[:9]
        ends[-1] = sum(tokens)
        cu_q[...] = cupy.asarray(ends.astype(np.int32))
        want = call()
        replay()
        assert float(cupy.abs(out - want).max()) < 0.02
        assert bool(cupy.isfinite(out.astype(np.float32)).all())


def test_what_follows_on_the_stream_waits_for_both_launches(rng):
    """The call's own stream may overwrite the arguments, and read the result, right after it."""
    batch = Batch(rng, [1] * 20 + [700, 300], [900] * 22, (8, 2), 128)
    given = [cupy.asarray(a) for a in (batch.q, *batch.pages, batch.table)]
    given += [cupy.asarray(batch.keys.astype(np.int32)), cupy.asarray(batch.cu_q)]
    want = cuattn.paged_attention(*given[:5], cu_seqlens_q=given[5])
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    copies = [[a.copy() for a in given] for _ in streams]
    cupy.cuda.Device().synchronize()
    results = []
    for stream, arrays in zip(streams, copies, strict=True):
        with stream:
            out = cuattn.paged_attention(*arrays[:5], cu_seqlens_q=arrays[5])
            results.append(out.copy())
            for a in (*arrays[:3], out):
                a.view(np.uint16).fill(0x7FC0)
    for stream, result in zip(streams, results, strict=True):
        stream.synchronize()
        assert float(cupy.abs(result - want).max()) < 0.02


def test_calls_on_other_streams_while_one_is_captured(rng):
    """They have a second stream of their own, which is not captured."""
    batch = Batch(rng, [1] * 6 + [250], [600] * 7, (8, 2), 128)
    given = [cupy.asarray(a) for a in (batch.q, *batch.pages, batch.table)]
    given += [cupy.asarray(batch.keys.astype(np.int32)), cupy.asarray(batch.cu_q)]

    def call():
        return cuattn.paged_attention(*given[:5], cu_seqlens_q=given[5])

    want = call()
    first, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with other:
        call()  # what it allocates is there for the next
    with first:
        first.begin_capture()
        out = call()
        with other:
            beside = call()
        graph = first.end_capture()
    other.synchronize()
    assert float(cupy.abs(beside - want).max()) < 0.02
    out.view(np.uint16).fill(0x7FC0)
    cupy.cuda.Device().synchronize()
    graph.launch(first)
    first.synchronize()
    assert float(cupy.abs(out - want).max()) < 0.02
