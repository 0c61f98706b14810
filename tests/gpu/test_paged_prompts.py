"""Prompts over pages and over caches on Hopper's forward kernel: against the definition in float64,
and bit for bit against the same keys one after the other."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import _repeat
from cuattn.gpu import compiler, dispatch
from tests import formulas

cupy = pytest.importorskip("cupy")

from cuattn.gpu.dispatch import sm90  # noqa: E402
from cuattn.gpu.plan import attention_plan  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SLOPES = np.float32([0.7, 0.004, -0.02, 0.0])

#: What a call may ask for; the first two have the variants of a causal mask.
OPTIONS = {
    "causal": {},
    "sinks": {"sinks": np.float32([-3.0, 2.0, 0.5, 7.0])},
    "full": {"causal": False},
    "window": {"window": (150, 0)},
    "both sides": {"causal": False, "window": (40, 20)},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi_slopes": SLOPES},
}


@pytest.fixture(autouse=True)
def hopper():
    if compiler.device_arch(0) != "sm_90a":
        pytest.skip("not a Hopper GPU")
    with dispatch.use_tiers("forward_sm90"):
        yield


def normal(rng, *shape, dtype=BFLOAT16):
    return rng.standard_normal(shape).astype(dtype)


class Prompts:
    """Sequences, of 4 query heads over 2 of keys unless said, whose keys lie one after the other
    (`k`, `v`), in caches, or in pages in any order; what nobody wrote is NaN."""

    def __init__(
        self, rng, rows, keys, dims=(128, 128), page_size=16, dtype=BFLOAT16, heads=(4, 2)
    ):
        self.rng, self.page_size, self.dtype = rng, page_size, dtype
        self.rows, self.lens = np.asarray(rows), np.asarray(keys)
        self.q = normal(rng, int(self.rows.sum()), heads[0], dims[0], dtype=dtype)
        self.k, self.v = (
            normal(rng, int(self.lens.sum()), heads[1], dim, dtype=dtype) for dim in dims
        )
        self.cu_q, self.cu_k = (
            np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (self.rows, self.lens)
        )

    def caches(self, capacity):
        """k and v (batch, capacity, heads, head_dim)."""
        found = []
        for array in (self.k, self.v):
            cache = np.full((len(self.lens), capacity, *array.shape[1:]), np.nan, self.dtype)
            for b, n in enumerate(self.lens):
                cache[b, :n] = array[self.cu_k[b] : self.cu_k[b + 1]]
            found.append(cupy.asarray(cache))
        return found

    def pages(self):
        """k and v in pages, twice as many as are needed, and their table; entries past a sequence's
        last page name pages that do not exist."""
        size = self.page_size
        width = int(self.lens.max() + size - 1) // size + 3
        needed = [-(-int(n) // size) for n in self.lens]
        order = self.rng.permutation(2 * sum(needed) + 1)
        table = np.full((len(self.lens), width), 1 << 30, np.int32)
        first = 0
        for b, count in enumerate(needed):
            table[b, :count] = order[first : first + count]
            first += count
        found = []
        for array in (self.k, self.v):
            pages = np.full((len(order), size, *array.shape[1:]), np.nan, self.dtype)
            for b, n in enumerate(self.lens):
                for at in range(0, int(n), size):
                    part = array[self.cu_k[b] + at : self.cu_k[b] + min(at + size, int(n))]
                    pages[table[b, at // size], : len(part)] = part
            found.append(cupy.asarray(pages))
        return *found, cupy.asarray(table)

    def attend(self, **options):
        """Out and lse of ragged rows over pages."""
        k, v, table = self.pages()
        lens, cu_q = cupy.asarray(self.lens.astype(np.int32)), cupy.asarray(self.cu_q)
        return cuattn.paged_attention(
            cupy.asarray(self.q),
            k,
            v,
            table,
            lens,
            cu_seqlens_q=cu_q,
            **on_device(options),
            return_lse=True,
        )

    def contiguous(self, **options):
        """The same of ragged keys."""
        arrays = (self.q, self.k, self.v, self.cu_q, self.cu_k)
        return cuattn.flash_attention_varlen(
            *map(cupy.asarray, arrays), **on_device({"causal": True, **options}), return_lse=True
        )

    def check(self, result, **options):
        """Against the definition."""
        arrays = (self.q, self.k, self.v, self.cu_q, self.cu_k)
        options = {"causal": True, **options}
        exact = formulas.varlen_attention(*arrays, **options)
        plain = formulas.varlen_attention(*arrays, **options, precision=self.dtype)
        for got, want, usual in zip(result, exact, plain, strict=True):
            formulas.assert_accurate(got.get(), want, usual)


def on_device(options):
    return {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def same_bits(results, others):
    return all(
        np.array_equal(a.get().view(np.uint8), b.get().view(np.uint8))
        for a, b in zip(results, others, strict=True)
    )


LENGTHS = [(300, 700), (1, 1), (65, 65), (0, 5), (193, 1025), (7, 500), (640, 641), (129, 128)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_give_what_contiguous_keys_give(head_dim, page_size, option, rng):
    prompts = Prompts(rng, *zip(*LENGTHS, strict=True), (head_dim, head_dim), page_size)
    result = prompts.attend(**OPTIONS[option])
    prompts.check(result, **OPTIONS[option])
    if OPTIONS[option].get("causal", True):  # else the tile's variant is another
        assert same_bits(result, prompts.contiguous(**OPTIONS[option]))


@pytest.mark.parametrize("dims", [(40, 40), (96, 96), (128, 64), (192, 128), (192, 192), (64, 256)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_head_dim(dims, dtype, rng):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    prompts = Prompts(rng, *zip(*LENGTHS, strict=True), dims, 32, dtype)
    for options in ({}, {"window": (100, 0)}, {"softcap": 20.0, "alibi_slopes": SLOPES}):
        result = prompts.attend(**options)
        prompts.check(result, **options)
        assert same_bits(result, prompts.contiguous(**options))


@pytest.mark.parametrize(
    ("heads", "same"),
    [
        ((2, 2), True),
        ((3, 1), True),
        ((5, 1), False),
        ((8, 1), True),
        ((12, 1), False),
        ((48, 1), True),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_of_heads(head_dim, heads, same, rng):
    """Rows of a tile are those of all heads of a group, where few of them then idle; over pages a
    few more may."""
    prompts = Prompts(rng, *zip(*LENGTHS, strict=True), (head_dim, head_dim), 32, heads=heads)
    for options in ({}, {"window": (100, 0)}):
        result = prompts.attend(**options)
        prompts.check(result, **options)
        if same:
            assert same_bits(result, prompts.contiguous(**options))


def test_decoding_sequences_beside_prompts(rng):
    """A sequence's results do not depend on what else is in the batch."""
    rows, keys = np.array([1] * 9 + [300, 2, 700]), np.array([*range(300, 1200, 100), 300, 50, 900])
    prompts = Prompts(rng, rows, keys, page_size=64, heads=(8, 2))
    out, lse = prompts.attend()
    prompts.check((out, lse))
    k, v, table = prompts.pages()
    for b in (0, 8, 9, 10, 11):
        mine = slice(prompts.cu_q[b], prompts.cu_q[b + 1])
        alone = cuattn.paged_attention(
            cupy.asarray(prompts.q[mine]),
            k,
            v,
            table[b : b + 1],
            cupy.asarray(prompts.lens[b : b + 1].astype(np.int32)),
            cu_seqlens_q=cupy.asarray(np.int32([0, rows[b]])),
        )
        assert bool((alone == out[mine]).all())


@pytest.mark.parametrize("batch", [1, 3, 33, 256, 257])
@pytest.mark.parametrize("option", ["causal", "full", "window"])
def test_batches_of_any_size(batch, option, rng):
    """Tiles of up to 256 sequences are sorted."""
    rows = rng.integers(0, 300, batch)
    rows[0] = 400
    keys = rows + rng.integers(0, 400, batch)
    prompts = Prompts(rng, rows, keys, (64, 64))
    prompts.check(prompts.attend(**OPTIONS[option]), **OPTIONS[option])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rows", [100, 193, 500])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_batched_rows_over_caches_and_pages(head_dim, rows, option, rng):
    """Each sequence's last rows; caches of a capacity that no tile divides. In caches and pages a
    call has the same tiles."""
    options = OPTIONS[option]
    keys = rows + np.array([0, 1, 77, 300, 511])
    prompts = Prompts(rng, np.full(5, rows), keys, (head_dim, head_dim))
    q = cupy.asarray(prompts.q.reshape(5, rows, 4, head_dim))
    lens = cupy.asarray(keys.astype(np.int32))
    results = [
        (
            out.reshape(-1, 4, head_dim),
            cupy.ascontiguousarray(lse.transpose(1, 0, 2)).reshape(4, -1),
        )
        for out, lse in (
            cuattn.flash_decode(
                q, *prompts.caches(1111), lens, **on_device(options), return_lse=True
            ),
            cuattn.paged_attention(
                q, *prompts.pages(), lens, **on_device(options), return_lse=True
            ),
        )
    ]
    prompts.check(results[0], **options)
    assert same_bits(*results)


@pytest.mark.parametrize("rows", [64, 256, 700])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_batched_rows_give_what_contiguous_keys_give(page_size, rows, rng, monkeypatch):
    """Bit for bit, where both take tiles of as many keys."""
    tile = {64: (128, 1), 256: (128, 2), 700: (80, 3)}[rows]

    def same_tile(spec, configs, multiprocessors):
        return next(c for c in configs if (c.tile_n, c.warpgroups) == tile)

    monkeypatch.setattr(sm90, "_fastest", same_tile)
    attention_plan.cache_clear()
    _repeat.forget()
    keys = 900
    prompts = Prompts(rng, np.full(3, rows), np.full(3, keys), page_size=page_size or 16)
    q = cupy.asarray(prompts.q.reshape(3, rows, 4, 128))
    k, v = (cupy.asarray(a.reshape(3, keys, 2, 128)) for a in (prompts.k, prompts.v))
    want = cuattn.flash_attention(q, k, v, causal=True, return_lse=True)
    lens = cupy.full(3, keys, np.int32)
    if page_size is None:
        result = cuattn.flash_decode(q, *prompts.caches(keys), lens, return_lse=True)
    else:
        result = cuattn.paged_attention(q, *prompts.pages(), lens, return_lse=True)
    attention_plan.cache_clear()
    _repeat.forget()
    assert same_bits(result, want)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("page_size", [16, 128])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(page_size, poison, rng):
    prompts = Prompts(rng, [700, 300], [900, 1000], page_size=page_size)
    clean = prompts.attend()[0].get()
    prompts.v[450] = poison  # the first sequence's rows from 250 on see it
    out = prompts.attend()[0].get()
    sees = np.arange(1000) < 700
    sees &= np.arange(1000) >= 250
    assert np.array_equal(out[~sees], clean[~sees])
    assert not np.isfinite(out[sees].astype(np.float32)).any()


def test_lengths_are_read_when_the_kernel_runs(rng):
    """Also those that a table has no room for, and negative ones: no address is made of them."""
    prompts = Prompts(rng, [200, 300], [400, 300])
    k, v, table = prompts.pages()
    capacity = table.shape[1] * prompts.page_size
    table[...] = cupy.arange(table.size, dtype=np.int32).reshape(table.shape) % len(k)
    lens = cupy.asarray(np.int32([400, 300]))
    q, cu_q = cupy.asarray(prompts.q), cupy.asarray(prompts.cu_q)
    for changed in ([capacity + 5, 300], [400, -3], [0, 0]):
        lens[...] = cupy.asarray(np.int32(changed))
        out = cuattn.paged_attention(q, k, v, table, lens, cu_seqlens_q=cu_q)
        assert out.shape == q.shape
        if changed == [0, 0]:
            assert bool((out == 0).all())


def test_far_more_rows_than_keys_end(rng):
    """Dozens of tiles in a row without keys, of sequences and of a sequence."""
    rows, keys = np.full(300, 300), np.full(300, 3)
    rows[7], keys[150] = 20000, 200
    prompts = Prompts(rng, rows, keys, (64, 64))
    result = prompts.attend()
    prompts.check(result)
    assert same_bits(result, prompts.contiguous())
