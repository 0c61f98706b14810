"""mla_decode on NumPy arrays, against the formula before absorption, written out here."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn import mla
from cuattn.mla import mla_decode, mla_prefill
from tests import formulas


class Layer:
    """A layer of latent attention with random weights, and sequences of cached tokens in pages,
    with NaN in all slots that hold no token."""

    def __init__(
        self, rng, lens, heads, page_size=16, *, latent=96, rope=16, nope=24, dim_v=20, joined=False
    ):
        self.lens = np.array(lens, np.int32)
        self.w_uk = rng.standard_normal((heads, nope, latent)) / np.sqrt(nope)
        self.w_uv = rng.standard_normal((heads, dim_v, latent)) / np.sqrt(latent)
        self.latents = [rng.standard_normal((n, latent)) for n in lens]
        self.rotated = [rng.standard_normal((n, rope)) for n in lens]
        self.nope, self.rope, self.latent = nope, rope, latent
        self.scale = (nope + rope) ** -0.5
        max_pages = max(1, -(-max(lens) // page_size))
        num_pages = len(lens) * max_pages + 3
        self.table = rng.permutation(num_pages)[: len(lens) * max_pages].reshape(-1, max_pages)
        rows = np.full((num_pages, page_size, latent + rope), np.nan)
        self.latent_pages, self.rope_pages = rows[..., :latent], rows[..., latent:]
        if not joined:
            self.latent_pages, self.rope_pages = self.latent_pages.copy(), self.rope_pages.copy()
        for b, n in enumerate(lens):
            page, slot = np.divmod(np.arange(n), page_size)
            self.latent_pages[self.table[b, page], slot] = self.latents[b]
            self.rope_pages[self.table[b, page], slot] = self.rotated[b]
        self.table = self.table.astype(np.int32)
        for b, n in enumerate(lens):
            self.table[b, -(-n // page_size) :] = -(2**31)

    def queries(self, rng, *shape):
        """Queries of heads before absorption: what is not rotated, and what is."""
        heads = len(self.w_uk)
        return rng.standard_normal((*shape, heads, self.nope)), rng.standard_normal(
            (*shape, heads, self.rope)
        )

    def absorbed(self, q_nope):
        return (q_nope[..., None, :] @ self.w_uk)[..., 0, :]

    def decode(self, q_latent, q_rope, dtype=np.float64, **options):
        arrays = (q_latent, q_rope, self.latent_pages, self.rope_pages)
        arrays = (np.asarray(a).astype(dtype) for a in arrays)
        options = {"scale": self.scale} | options
        return mla_decode(*arrays, self.table, self.lens, return_lse=True, **options)

    def unabsorbed(self, b, q_nope, q_rope, keep=None, **options):
        """Attention of a sequence's heads by the formula of the paper: (seqlen_q, heads, dim_v) and
        (heads, seqlen_q)."""
        c, r = self.latents[b], self.rotated[b]
        k, v = (
            (c @ weights.reshape(-1, self.latent).T).reshape(len(c), *weights.shape[:2])
            for weights in (self.w_uk, self.w_uv)
        )
        k = np.concatenate([k, np.broadcast_to(r[:, None], (*k.shape[:2], r.shape[-1]))], -1)
        q = np.concatenate([q_nope, q_rope], -1)
        options = {"scale": self.scale, "causal": True} | options
        out, lse = formulas.attention(q[None], k[None], v[None], mask=keep, **options)
        return out[0], lse[0]

    def values(self, out):
        """Heads' results from weighted sums of latents."""
        return (self.w_uv @ out.astype(np.float64)[..., None])[..., 0]


OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (7, 0)},
    "two-sided": {"causal": False, "window": (5, 2)},
    "scale": {"scale": 0.1},
    "sinks": {"sinks": True},
}


def drawn(options, rng, heads):
    return options | ({"sinks": rng.standard_normal(heads)} if "sinks" in options else {})


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("seqlen_q", [1, 2, 5])
def test_absorbed_is_unabsorbed(rng, seqlen_q, option):
    heads = int(rng.choice([1, 3, 8]))
    layer = Layer(rng, [0, 1, 5, 16, 17, 40], heads, joined=bool(seqlen_q % 2))
    options = drawn(OPTIONS[option], rng, heads)
    q_nope, q_rope = layer.queries(rng, 6, seqlen_q)
    out, lse = layer.decode(layer.absorbed(q_nope), q_rope, **options)
    for b in range(6):
        want, want_lse = layer.unabsorbed(b, q_nope[b], q_rope[b], **options)
        np.testing.assert_allclose(layer.values(out[b]), want, atol=1e-12)
        np.testing.assert_allclose(lse[b], want_lse, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 8, 16, 40, 64, 65, 128])
def test_deepseeks_widths(rng, heads):
    layer = Layer(rng, [63, 64, 65], heads, 64, latent=512, rope=64, nope=128, dim_v=128)
    q_nope, q_rope = layer.queries(rng, 3, 1)
    out, _ = layer.decode(layer.absorbed(q_nope), q_rope)
    for b in range(3):
        want, _ = layer.unabsorbed(b, q_nope[b], q_rope[b])
        np.testing.assert_allclose(layer.values(out[b]), want, atol=1e-11)


@pytest.mark.parametrize("dtype", formulas.DTYPES)
def test_every_dtype_is_as_exact_as_the_formula(rng, dtype):
    layer = Layer(rng, [50, 3], 4)
    layer.latents, layer.rotated = (
        [a.astype(dtype) for a in arrays] for arrays in (layer.latents, layer.rotated)
    )
    q_latent, q_rope = rng.standard_normal((2, 1, 4, 96)), rng.standard_normal((2, 1, 4, 16))
    q_latent, q_rope = q_latent.astype(dtype), q_rope.astype(dtype)
    out, lse = layer.decode(q_latent, q_rope, dtype)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)

    def formula(q, k, order, precision, heads_as_queries=False):
        q = q[..., order].swapaxes(1, 2) if heads_as_queries else q[..., order]
        call = q, k[..., order], k[..., :96]
        result = formulas.attention(*call, scale=layer.scale, precision=precision)
        return [a.swapaxes(1, 2) if heads_as_queries else a for a in result]

    # In several orders, since luck decides how exact one is; and all heads in one product, as
    # mla_decode has them: BLAS sums a product of one row in several parts, which is more exact.
    orders = list(formulas.orders(112))
    for b in range(2):
        k = np.concatenate([layer.latents[b], layer.rotated[b]], -1)[None, :, None]
        q = np.concatenate([q_latent, q_rope], -1)[b : b + 1]
        exact = formula(q, k, slice(None), np.longdouble)
        plain = [formula(q, k, i, dtype, together) for i in orders for together in (False, True)]
        formulas.assert_accurate(out[b : b + 1], exact[0], *(result for result, _ in plain))
        formulas.assert_accurate(lse[b : b + 1], exact[1], *(result for _, result in plain))


def test_the_scale_of_yarn(rng):
    layer = Layer(rng, [30], 2)
    mscale = 0.1 * np.log(40) + 1
    q_nope, q_rope = layer.queries(rng, 1, 1)
    out, lse = layer.decode(layer.absorbed(q_nope), q_rope, scale=layer.scale * mscale**2)
    want, want_lse = layer.unabsorbed(0, mscale**2 * q_nope[0], mscale**2 * q_rope[0])
    assert abs(mscale**2 - 1.874) < 1e-3
    np.testing.assert_allclose(layer.values(out[0]), want, atol=1e-12)
    np.testing.assert_allclose(lse[0], want_lse, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pages_of_every_size_hold_the_same(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    page_size = 1 << data.draw(st.integers(0, 8))
    whole = Layer(rng, lens, 2, 256)
    other = Layer(rng, lens, 2, page_size, joined=data.draw(st.booleans()))
    q_latent, q_rope = (
        rng.standard_normal((len(lens), 3, 2, 96)),
        rng.standard_normal((len(lens), 3, 2, 16)),
    )
    for b, n in enumerate(lens):
        page, slot = np.divmod(np.arange(n), page_size)
        other.latent_pages[other.table[b, page], slot] = whole.latents[b]
        other.rope_pages[other.table[b, page], slot] = whole.rotated[b]
    want = whole.decode(q_latent, q_rope)
    got = other.decode(q_latent, q_rope, scale=whole.scale)
    assert all(map(np.array_equal, want, got))


def test_ragged_rows(rng):
    counts = [1, 4, 0, 3]
    layer = Layer(rng, [9, 30, 12, 3], 4)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q_nope, q_rope = layer.queries(rng, cu[-1])
    out, lse = layer.decode(layer.absorbed(q_nope), q_rope, cu_seqlens_q=cu)
    for b in range(4):
        rows = slice(cu[b], cu[b + 1])
        want, want_lse = layer.unabsorbed(b, q_nope[rows], q_rope[rows])
        np.testing.assert_allclose(layer.values(out[rows]), want, atol=1e-12)
        np.testing.assert_allclose(lse[:, rows], want_lse, atol=1e-12)


@pytest.mark.parametrize("option", ["causal", "full", "window", "sinks"])
def test_sparse_is_a_mask(rng, option):
    lens, seqlen_q, k = [0, 6, 40], 3, 12
    layer = Layer(rng, lens, 2)
    options = drawn(OPTIONS[option], rng, 2)
    indices = np.full((3, seqlen_q, k), -1, np.int64)
    for b, n in enumerate(lens):
        for i in range(seqlen_q):
            some = rng.permutation(n)[: min(n, k - 2)]
            indices[b, i, : len(some)] = some
            indices[b, i, -1] = n + 100  # no such token
            rng.shuffle(indices[b, i])
    q_nope, q_rope = layer.queries(rng, 3, seqlen_q)
    out, lse = layer.decode(layer.absorbed(q_nope), q_rope, indices=indices, **options)
    for b, n in enumerate(lens):
        keep = (indices[b][:, :, None] == np.arange(n)).any(axis=1)
        want, want_lse = layer.unabsorbed(b, q_nope[b], q_rope[b], keep[None, None], **options)
        np.testing.assert_allclose(layer.values(out[b]), want, atol=1e-12)
        np.testing.assert_allclose(lse[b], want_lse, atol=1e-12)


def test_all_tokens_by_index_are_all_tokens(rng):
    layer = Layer(rng, [40, 7], 2)
    q_latent, q_rope = rng.standard_normal((2, 2, 96)), rng.standard_normal((2, 2, 16))
    want = layer.decode(q_latent, q_rope)
    indices = np.tile(np.arange(40, dtype=np.int32), (2, 1))
    got = layer.decode(q_latent, q_rope, indices=indices)
    assert all(np.allclose(a, b, atol=1e-13) for a, b in zip(got, want, strict=True))


def test_a_token_that_is_named_twice_counts_twice(rng):
    layer = Layer(rng, [8], 1)
    q_latent, q_rope = rng.standard_normal((1, 1, 96)), rng.standard_normal((1, 1, 16))
    once = layer.decode(q_latent, q_rope, indices=np.array([[3, -1]]))
    twice = layer.decode(q_latent, q_rope, indices=np.array([[3, 3]]))
    np.testing.assert_allclose(once[0], twice[0])
    np.testing.assert_allclose(once[1] + np.log(2), twice[1])


def test_chunks_of_a_prefix_merge_to_the_whole(rng):
    """A chunk without keys weighs nothing, and lse is a natural logarithm."""
    layer = Layer(rng, [64], 3, 16)
    q_latent, q_rope = rng.standard_normal((1, 1, 3, 96)), rng.standard_normal((1, 1, 3, 16))
    whole = layer.decode(q_latent, q_rope)
    outs, lses = [], []
    for first, count in ((0, 2), (2, 0), (2, 2)):
        part = mla_decode(
            q_latent, q_rope, layer.latent_pages, layer.rope_pages,
            layer.table[:, first : first + 2], np.array([16 * count], np.int32),
            scale=layer.scale, return_lse=True,
        )  # fmt: skip
        outs.append(part[0])
        lses.append(part[1])
    assert np.isneginf(lses[1]).all()
    merged = cuattn.merge_attention(outs, lses)
    assert all(np.allclose(a, b, atol=1e-13) for a, b in zip(merged, whole, strict=True))


def test_scores_that_rise_far(rng):
    layer = Layer(rng, [200], 2)
    q_nope, q_rope = layer.queries(rng, 1, 1)
    q_nope *= 1e4
    out, lse = layer.decode(layer.absorbed(q_nope), q_rope)
    want, want_lse = layer.unabsorbed(0, q_nope[0], q_rope[0])
    np.testing.assert_allclose(layer.values(out[0]), want, atol=1e-8)
    np.testing.assert_allclose(lse[0], want_lse, rtol=1e-12)


def test_q_without_a_token_axis_and_out(rng):
    layer = Layer(rng, [20, 4], 2)
    q_latent, q_rope = rng.standard_normal((2, 2, 96)), rng.standard_normal((2, 2, 16))
    want, want_lse = layer.decode(q_latent[:, None], q_rope[:, None])
    out = np.full_like(q_latent, np.nan)
    got, lse = layer.decode(q_latent, q_rope, out=out)
    assert got is out
    assert np.array_equal(out, want[:, 0])
    assert np.array_equal(lse, want_lse)


def test_out_may_overlap_sinks_and_page_table(rng):
    layer = Layer(rng, [9, 30], 3)
    q_latent, q_rope = (rng.standard_normal((2, 1, 3, n)) for n in (layer.latent, layer.rope))
    arguments = q_latent, q_rope, layer.latent_pages, layer.rope_pages
    sinks, table = rng.standard_normal(3), layer.table
    right = mla_decode(*arguments, table, layer.lens, scale=0.3, sinks=sinks)
    for overlapped in (sinks, table):
        out = np.zeros_like(q_latent)
        place = out.reshape(-1).view(overlapped.dtype)[: overlapped.size].reshape(overlapped.shape)
        place[...] = overlapped
        own = (place, table) if overlapped is sinks else (sinks, place)
        mla_decode(*arguments, own[1], layer.lens, scale=0.3, sinks=own[0], out=out)
        np.testing.assert_array_equal(out, right)


def test_permuting_the_batch_permutes_the_output(rng):
    layer = Layer(rng, [5, 0, 30, 12], 2)
    q_latent, q_rope = rng.standard_normal((4, 1, 2, 96)), rng.standard_normal((4, 1, 2, 16))
    out, _ = layer.decode(q_latent, q_rope)
    order = rng.permutation(4)
    layer.table, layer.lens = layer.table[order], layer.lens[order]
    again, _ = layer.decode(q_latent[order], q_rope[order])
    assert np.array_equal(out[order], again)


def test_nothing_is_rotated(rng):
    layer = Layer(rng, [20], 2, rope=0)
    q_nope, q_rope = layer.queries(rng, 1, 1)
    out, _ = layer.decode(layer.absorbed(q_nope), q_rope)
    want, _ = layer.unabsorbed(0, q_nope[0], q_rope[0])
    np.testing.assert_allclose(layer.values(out[0]), want, atol=1e-12)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


RIGHT = {
    "q_latent": zeros(2, 1, 4, 32),
    "q_rope": zeros(2, 1, 4, 8),
    "latent_pages": zeros(6, 4, 32),
    "rope_pages": zeros(6, 4, 1, 8),
    "page_table": zeros(2, 3, dtype=np.int32),
    "seq_lens": np.array([3, 4], np.int32),
    "scale": 0.5,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "scale must be a number, got None: it has no default"),
        ({"scale": "1"}, "scale must be a number, got str"),
        ({"scale": float("nan")}, "scale is nan, must be finite"),
        ({"q_latent": zeros(4, 32)}, r"q_latent has shape \(4, 32\), must be \(batch, seqlen_q"),
        ({"q_latent": zeros(3, 1, 4, 32)}, "q_rope has shape"),
        (
            {"q_latent": zeros(3, 1, 4, 32), "q_rope": zeros(3, 1, 4, 8)},
            "q_latent has batch 3, must be page_table's 2",
        ),
        ({"q_rope": zeros(2, 1, 3, 8)}, r"q_rope has shape .*\(2, 1, 4, rope_dim\)"),
        ({"q_latent": zeros(2, 1, 4, 513)}, "q_latent has width 513, must be from 1 to 512"),
        ({"q_rope": zeros(2, 1, 4, 65)}, "q_rope has width 65, must be from 0 to 64"),
        ({"q_latent": zeros(2, 1, 0, 32), "q_rope": zeros(2, 1, 0, 8)}, "q_latent has 0 heads"),
        ({"latent_pages": zeros(6, 4, 2, 32)}, r"latent_pages has shape \(6, 4, 2, 32\), must be"),
        ({"latent_pages": zeros(6, 4, 31)}, "latent_pages has width 31, must be q_latent's 32"),
        ({"rope_pages": zeros(6, 4, 9)}, "rope_pages has width 9, must be q_rope's 8"),
        ({"rope_pages": zeros(5, 4, 8)}, r"rope_pages has shape .*\(num_pages, page_size\)"),
        (
            {"latent_pages": zeros(6, 3, 32), "rope_pages": zeros(6, 3, 8)},
            "latent_pages has page size 3",
        ),
        ({"rope_pages": zeros(6, 4, 8, dtype=np.float64)}, "rope_pages has dtype float64"),
        ({"q_rope": zeros(2, 1, 4, 8, dtype=np.float64)}, "q_rope has dtype float64"),
        ({"latent_pages": zeros(6, 4, 32, dtype=np.float16)}, "latent_pages has dtype float16"),
        ({"q_latent": zeros(2, 1, 4, 32, dtype=np.int32)}, "q_.* has dtype"),
        ({"page_table": zeros(6, dtype=np.int32)}, "page_table has shape"),
        ({"page_table": zeros(2, 3)}, "page_table has dtype float32"),
        ({"page_table": np.full((2, 3), 6, np.int32)}, r"page_table has .*6.* for sequence 0"),
        ({"seq_lens": zeros(3, dtype=np.int32)}, "seq_lens has shape"),
        ({"cu_seqlens_q": zeros(2, dtype=np.int32)}, "q_latent has shape"),
        ({"sinks": zeros(5)}, "sinks has shape"),
        ({"window": 3}, "window is 3"),
        ({"num_splits": "few"}, "num_splits is 'few'"),
        ({"indices": zeros(2, 2, 5, dtype=np.int32)}, r"indices has shape .* \(2, 1, k\)"),
        ({"indices": zeros(2, 1, 5)}, "indices has dtype float32"),
        ({"out": zeros(2, 1, 4, 31)}, "out has shape"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises((TypeError, ValueError, IndexError), match=f"mla_decode: .*{message}"):
        mla_decode(**(RIGHT | changes))


def test_indices_of_queries_without_a_token_axis():
    call = RIGHT | {"q_latent": zeros(2, 4, 32), "q_rope": zeros(2, 4, 8)}
    with pytest.raises(ValueError, match=r"indices has shape \(3, 5\), must be \(2, k\)"):
        mla_decode(**call, indices=zeros(3, 5, dtype=np.int32))
    assert mla_decode(**call, indices=zeros(2, 5, dtype=np.int32)).shape == (2, 4, 32)


def test_bfloat16_pages_of_joined_rows(rng):
    layer = Layer(rng, [20], 2, joined=True)
    rows = np.concatenate([layer.latent_pages, layer.rope_pages], -1).astype(ml_dtypes.bfloat16)
    q_latent, q_rope = rng.standard_normal((1, 2, 96)), rng.standard_normal((1, 2, 16))
    q_latent, q_rope = q_latent.astype(rows.dtype), q_rope.astype(rows.dtype)
    out = mla_decode(
        q_latent, q_rope, rows[..., :96], rows[..., 96:], layer.table, layer.lens, scale=0.2
    )
    again, _ = layer.decode(q_latent, q_rope, rows.dtype, scale=0.2)
    assert np.array_equal(out, again)


@pytest.fixture
def joined_cache(rng):
    """A cache of joined rows with two sequences of 10 and 3 tokens, and what was written."""
    cache = cuattn.PagedKVCache(
        12, 4, 1, 16, head_dim_v=32, num_layers=2, joined=True, dtype=np.float64
    )
    ids = [cache.add_sequence(range(10)), cache.add_sequence([7, 8, 9])]
    cache.extend(ids, [10, 3], tokens=[*range(10), 7, 8, 9])
    angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(8) / 8))
    written = []
    for layer in range(2):
        rotated, latents = rng.standard_normal((13, 1, 16)), rng.standard_normal((13, 1, 32))
        tables = np.cos(angles), np.sin(angles)
        cache.write(layer, ids, rotated, latents, rope=tables, interleaved=True)
        written.append((rotated, latents))
    return cache, ids, written


def test_a_cache_of_joined_rows(joined_cache, rng):
    cache, ids, written = joined_cache
    table, lens = cache.page_table(ids), cache.seq_lens(ids)
    for layer, (rotated, latents) in enumerate(written):
        rope_pages, latent_pages = cache.pages(layer)
        assert np.shares_memory(latent_pages.base, rope_pages.base)
        assert latent_pages.strides[:3] == rope_pages.strides[:3] == (4 * 48 * 8, 48 * 8, 48 * 8)
        q_latent, q_rope = rng.standard_normal((2, 3, 32)), rng.standard_normal((2, 3, 16))
        out = mla_decode(q_latent, q_rope, latent_pages, rope_pages, table, lens, scale=0.2)
        for b, rows in enumerate((slice(0, 10), slice(10, 13))):
            positions = np.arange(rows.stop - rows.start)
            turned = cuattn.rope(rotated[rows], positions, interleaved=True)
            k = np.concatenate([latents[rows], turned], -1)
            q = np.concatenate([q_latent, q_rope], -1)[b : b + 1]
            want, _ = formulas.attention(q[None], k[None], k[None, :, :, :32], scale=0.2)
            np.testing.assert_allclose(out[b], want[0, 0], atol=1e-9)


def test_joined_rows_are_shared_and_copied_on_write(joined_cache):
    cache, ids, _ = joined_cache
    fork = cache.fork(ids[0])
    before = cache.seq_lens([fork]).item()
    cache.extend([fork], 1, tokens=[99])
    for layer in range(2):
        cache.write(layer, [fork], np.ones((1, 1, 16)), np.ones((1, 1, 32)))
    rows = [cache.page_table([id])[0, :3].copy() for id in (ids[0], fork)]
    assert (rows[0] == rows[1]).tolist() == [True, True, False]
    for pages in cache.pages(1):
        mine, theirs = (pages[row].reshape(12, -1) for row in rows)
        assert np.array_equal(mine[:before], theirs[:before])
        assert (theirs[before] == 1).all()


@pytest.mark.parametrize("kind", ["copy", "file", "swap"])
def test_joined_rows_are_kept(joined_cache, kind, tmp_path):
    cache, ids, _ = joined_cache
    if kind == "copy":
        other = copy.deepcopy(cache)
    elif kind == "file":
        cache.save(tmp_path / "cache")
        other = cuattn.PagedKVCache.load(tmp_path / "cache")
    else:
        other = copy.deepcopy(cache)
        ids = [ids[0], other.swap_in(other.swap_out(ids[1]))]
    for layer in range(2):
        for mine, theirs in zip(cache.pages(layer), other.pages(layer), strict=True):
            assert theirs.strides == mine.strides
            for b, id in enumerate(joined_cache[1]):
                used = -(-cache.num_tokens(id) // 4)
                wanted = mine[cache.page_table([id])[0, :used]].reshape(used * 4, -1)
                got = theirs[other.page_table([ids[b]])[0, :used]].reshape(used * 4, -1)
                length = cache.num_tokens(id)
                assert np.array_equal(got[:length], wanted[:length])


@pytest.fixture(params=[np.float32, ml_dtypes.bfloat16])
def quantised_cache(request, rng):
    """A joined cache whose latents are codes, with what was written."""
    cache = cuattn.PagedKVCache(
        12, 4, 1, 16, head_dim_v=64, joined=True, quantization="float8_e4m3", dtype=request.param
    )
    ids = [cache.add_sequence(), cache.add_sequence()]
    cache.extend(ids, [10, 3])
    rotated, latents = (rng.standard_normal((13, 1, n)).astype(request.param) for n in (16, 64))
    cache.write(0, ids, rotated, latents)
    return cache, ids, rotated, latents


def test_a_cache_of_joined_rows_of_codes(quantised_cache, rng):
    cache, ids, rotated, latents = quantised_cache
    rope_pages, latent_pages = cache.pages(0)
    row = 64 + 16 * cache.dtype.itemsize
    assert latent_pages.data.strides[1] == rope_pages.strides[1] == row
    table, lens = cache.page_table(ids), cache.seq_lens(ids)
    q_latent, q_rope = (rng.standard_normal((2, 3, n)).astype(cache.dtype) for n in (64, 16))
    out = mla_decode(q_latent, q_rope, latent_pages, rope_pages, table, lens, scale=0.2)
    codes = cuattn.quantize(latents, "float8_e4m3")
    for b, rows in enumerate((slice(0, 10), slice(10, 13))):
        c, r = cuattn.dequantize(codes[rows], np.float32), rotated[rows].astype(np.float32)
        k = np.concatenate([c, r], -1)[None]
        q = np.concatenate([q_latent, q_rope], -1)[None, b : b + 1]
        v = k[..., :64]
        exact, _ = formulas.attention(q, k, v, scale=0.2)
        plain = (
            formulas.attention(q[..., i], k[..., i], v, scale=0.2, precision=cache.dtype)[0]
            for i in formulas.orders(80)
        )
        formulas.assert_accurate(out[b], exact[0, 0], *(result[0, 0] for result in plain))


def test_codes_of_joined_rows_are_copied_and_saved(quantised_cache, tmp_path):
    cache, ids, _, _ = quantised_cache
    fork = cache.fork(ids[0])
    cache.extend([fork], 1)
    cache.write(0, [fork], np.ones((1, 1, 16), cache.dtype), np.ones((1, 1, 64), cache.dtype))
    cache.save(tmp_path / "cache")
    other = cuattn.PagedKVCache.load(tmp_path / "cache")
    for pages in (cache.pages(0), other.pages(0)):
        values = [np.asarray(part, np.float32) for part in pages]
        for part in values:
            mine, theirs = (part[cache.page_table([id])[0, :3]].reshape(12, -1)
                            for id in (ids[0], fork))  # fmt: skip
            assert np.array_equal(mine[:10], theirs[:10])
            assert (np.abs(theirs[10] - 1) < 0.01).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": "group", "group_size": 16},
        {"granularity": "channel"},
        {"rotate": True},
        {"offset": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("format", ["int8", "float8_e4m3", "int4"])
def test_codes_count_as_their_values(rng, format, options):
    layer = Layer(rng, [50, 3], 4)
    pages = np.nan_to_num(layer.latent_pages)[:, :, None].astype(np.float32)
    if "offset" in options:
        options = {"offset": rng.standard_normal((1, 96)).astype(np.float32)}
    codes = cuattn.quantize(pages, format, **options)
    q_latent, q_rope = (rng.standard_normal((2, 1, 4, n)).astype(np.float32) for n in (96, 16))
    rest = (layer.rope_pages.astype(np.float32), layer.table, layer.lens)
    indices = rng.integers(-1, 50, (2, 1, 20)).astype(np.int32)
    for more in ({}, {"window": (7, 0)}, {"indices": indices}):
        got, want = (
            mla_decode(q_latent, q_rope, latents, *rest, scale=0.1, return_lse=True, **more)
            for latents in (codes, cuattn.dequantize(codes))
        )
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_codes_without_an_axis_of_heads(rng):
    layer = Layer(rng, [20], 2)
    pages = np.nan_to_num(layer.latent_pages).astype(np.float32)
    q_latent, q_rope = (rng.standard_normal((1, 2, n)).astype(np.float32) for n in (96, 16))
    rest = (layer.rope_pages.astype(np.float32), layer.table, layer.lens)
    got, want = (
        mla_decode(q_latent, q_rope, cuattn.quantize(x, "int8"), *rest, scale=0.1)
        for x in (pages, pages[:, :, None])
    )
    assert np.array_equal(got, want)
    wide = cuattn.quantize(pages, "int8", offset=np.zeros(pages.shape[-2:], np.float32))
    with pytest.raises(ValueError, match=r"mla_decode: latent_pages .* since it has an offset"):
        mla_decode(q_latent, q_rope, wide, *rest, scale=0.1)


def test_flashmla_pages_are_views(rng):
    latents = cuattn.quantize(
        rng.standard_normal((3, 4, 1, 512)).astype(np.float32), "float8_e4m3",
        granularity="group", group_size=128,
    )  # fmt: skip
    rotated = rng.standard_normal((3, 4, 1, 64)).astype(ml_dtypes.bfloat16)
    scale = np.ascontiguousarray(latents.scale.astype(np.float32))
    parts = (latents.data, scale.view(np.uint8), rotated.view(np.uint8))
    rows = np.concatenate(parts, -1)
    for pages in (rows, rows[:, :, 0]):
        codes, rope_pages = cuattn.flashmla_pages(pages)
        assert all(np.shares_memory(x, rows) for x in (codes.data, codes.scale, rope_pages))
        assert np.array_equal(*(cuattn.dequantize(x, np.float32) for x in (codes, latents)))
        assert np.array_equal(rope_pages, rotated)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 4, 656), np.int8), "rows has dtype int8, must be uint8"),
        (np.zeros((2, 4, 640), np.uint8), r"rows has shape \(2, 4, 640\), must be \(num_pages, "),
        (np.zeros((2, 4, 2, 656), np.uint8), r"rows has shape \(2, 4, 2, 656\)"),
        (np.zeros((2, 4, 1312), np.uint8)[:, :, ::2], "rows has a stride of 2 between bytes"),
    ],
)
def test_errors_of_flashmla_pages(rows, message):
    with pytest.raises((TypeError, ValueError), match=f"flashmla_pages: {message}"):
        cuattn.flashmla_pages(rows)


@pytest.mark.parametrize("absorbed", [True, False, None])
@pytest.mark.parametrize("chunk", [16, 48, 10000])
def test_prefill_by_either_way(rng, absorbed, chunk):
    """Chunks of prompts behind prefixes of other lengths: some parts of some have no keys."""
    layer = Layer(rng, [9, 70, 33, 8], 3, 8)
    q_nope, q_rope = layer.queries(rng, 4, 8)
    out, lse = mla_prefill(
        q_nope, q_rope, layer.latent_pages, layer.rope_pages, layer.table, layer.lens,
        layer.w_uk, layer.w_uv, scale=layer.scale, absorbed=absorbed, chunk=chunk, return_lse=True,
    )  # fmt: skip
    for b in range(4):
        want, want_lse = layer.unabsorbed(b, q_nope[b], q_rope[b])
        np.testing.assert_allclose(out[b], want, atol=1e-12)
        np.testing.assert_allclose(lse[b], want_lse, atol=1e-12)


@pytest.mark.parametrize("absorbed", [True, False])
def test_prefill_over_codes(rng, absorbed):
    """As over what the codes stand for, but for the order of sums."""
    layer = Layer(rng, [9, 70], 3, 8)
    q_nope, q_rope = layer.queries(rng, 2, 7)
    codes = cuattn.quantize(np.nan_to_num(layer.latent_pages)[:, :, None], "int8")
    rest = (np.nan_to_num(layer.rope_pages), layer.table, layer.lens, layer.w_uk, layer.w_uv)
    got, want = (
        mla_prefill(q_nope, q_rope, latents, *rest, scale=0.1, absorbed=absorbed, chunk=16)
        for latents in (codes, cuattn.dequantize(codes, np.float64))
    )
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("absorbed", [True, False])
def test_prefill_of_ragged_rows(rng, absorbed):
    counts = [4, 0, 30, 1]
    layer = Layer(rng, [20, 5, 30, 41], 2, 4, joined=True)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q_nope, q_rope = layer.queries(rng, cu[-1])
    out, lse = mla_prefill(
        q_nope, q_rope, layer.latent_pages, layer.rope_pages, layer.table, layer.lens,
        layer.w_uk, layer.w_uv, scale=layer.scale, absorbed=absorbed, cu_seqlens_q=cu, chunk=32,
        max_prefix=40, return_lse=True,
    )  # fmt: skip
    for b in range(4):
        rows = slice(cu[b], cu[b + 1])
        want, want_lse = layer.unabsorbed(b, q_nope[rows], q_rope[rows])
        np.testing.assert_allclose(out[rows], want, atol=1e-12)
        np.testing.assert_allclose(lse[:, rows], want_lse, atol=1e-12)


@pytest.mark.parametrize("absorbed", [True, False])
def test_rows_of_no_sequence_may_hold_anything(rng, absorbed):
    layer = Layer(rng, [20, 5], 2, 4, joined=True)
    cu = np.array([0, 4, 5], np.int32)
    q_nope, q_rope = layer.queries(rng, 9)
    arguments = [
        *(q_nope, q_rope, layer.latent_pages, layer.rope_pages, layer.table, layer.lens),
        *(layer.w_uk, layer.w_uv),
    ]
    options = {"scale": 0.1, "cu_seqlens_q": cu, "absorbed": absorbed, "chunk": 8}
    want = mla_prefill(*arguments, **options)[:5]
    q_nope[5:], q_rope[5:] = np.inf, np.nan
    with np.errstate(all="raise"):
        got = mla_prefill(*arguments, **options)[:5]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("absorbed", [True, False])
def test_prefill_where_nothing_is_rotated(rng, absorbed):
    layer = Layer(rng, [20, 7], 2, 4, rope=0)
    q_nope, q_rope = layer.queries(rng, 2, 5)
    out = mla_prefill(
        q_nope, q_rope, layer.latent_pages, layer.rope_pages, layer.table, layer.lens,
        layer.w_uk, layer.w_uv, scale=layer.scale, absorbed=absorbed,
    )  # fmt: skip
    for b in range(2):
        want, _ = layer.unabsorbed(b, q_nope[b], q_rope[b])
        np.testing.assert_allclose(out[b], want, atol=1e-12)


@pytest.mark.parametrize("absorbed", [True, False, None])
@pytest.mark.parametrize("rope", [0, 8])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "max_pages"), [(0, 3, 2), (2, 0, 2), (2, 0, 0), (0, 0, 0)]
)
def test_prefill_of_nothing(rng, absorbed, rope, batch, seqlen_q, max_pages):
    pages = rng.standard_normal((4, 16, 32)), rng.standard_normal((4, 16, rope))
    table, lens = zeros(batch, max_pages, dtype=np.int32), zeros(batch, dtype=np.int32)
    weights = rng.standard_normal((2, 12, 32)), rng.standard_normal((2, 20, 32))
    rows = (batch, seqlen_q, 2)
    out, lse = mla_prefill(
        np.zeros((*rows, 12)), np.zeros((*rows, rope)), *pages, table, lens, *weights,
        scale=0.1, absorbed=absorbed, return_lse=True,
    )  # fmt: skip
    assert out.shape == (*rows, 20)
    assert lse.shape == (batch, 2, seqlen_q)
    flat = batch * seqlen_q + 1  # a row of no sequence
    out = mla_prefill(
        np.zeros((flat, 2, 12)), np.zeros((flat, 2, rope)), *pages, table, lens, *weights,
        scale=0.1, absorbed=absorbed, cu_seqlens_q=zeros(batch + 1, dtype=np.int32),
    )  # fmt: skip
    assert out.shape == (flat, 2, 20)


def test_the_cheaper_way(monkeypatch, rng):
    """171 new tokens are where it changes for DeepSeek-V3's widths."""
    called = []
    monkeypatch.setattr(mla, "mla_decode", lambda *args, **options: called.append(1) or args[0])
    for tokens, wanted in ((170, 1), (171, 0)):
        called.clear()
        mla_prefill(
            zeros(1, tokens, 1, 128), zeros(1, tokens, 1, 64), zeros(6, 64, 512), zeros(6, 64, 64),
            np.arange(6)[None], np.array([tokens]), zeros(1, 128, 512), zeros(1, 128, 512),
            scale=0.1,
        )  # fmt: skip
        assert len(called) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_nope": zeros(4, 12)}, "q_nope has shape"),
        ({"q_nope": zeros(1, 5, 2, 0), "w_uk": zeros(2, 0, 32)}, "q_nope has shape .* 1 feature"),
        ({"w_uv": zeros(2, 0, 32)}, "w_uv has shape .* 1 feature"),
        ({"w_uk": zeros(2, 11, 32)}, r"w_uk has shape \(2, 11, 32\), must be \(2, 12, 32\)"),
        ({"w_uv": zeros(3, 12, 32)}, r"w_uv has shape .*, must be \(2, head_dim_v, 32\)"),
        ({"w_uv": zeros(2, 12, 32, dtype=np.float64)}, "w_uv has dtype float64"),
        ({"chunk": 0}, "chunk is 0"),
        ({"max_prefix": -1}, "max_prefix is -1, must be at least 0"),
        ({"max_prefix": 14}, "max_prefix is 14, and sequence 0 has 15 tokens before its queries"),
        ({"seq_lens": np.array([4])}, "seq_lens has 4 for sequence 0, must be its number of"),
        ({"q_rope": zeros(1, 4, 2, 8)}, "q_rope has shape .* must be q_nope's"),
        ({"q_rope": zeros(1, 5, 2, 8, dtype=np.float64)}, "q_rope has dtype float64, .* q_nope's"),
        ({"latent_pages": zeros(4, 16, 32, dtype=np.float64)}, "latent_pages has dtype float64"),
        ({"scale": None}, "scale must be a number, got None: it has no default"),
        ({"page_table": np.array([[2, 7]])}, "page_table has 7 for sequence 0"),
        ({"w_uk": None}, "w_uk must be"),
        ({"absorbed": "yes"}, "absorbed must be True or False"),
    ],
)
@pytest.mark.parametrize("absorbed", [True, False])
def test_errors_of_prefill(changes, message, absorbed):
    call = {
        "q_nope": zeros(1, 5, 2, 12),
        "q_rope": zeros(1, 5, 2, 8),
        "latent_pages": zeros(4, 16, 32),
        "rope_pages": zeros(4, 16, 8),
        "page_table": np.array([[2, 0]]),
        "seq_lens": np.array([20]),
        "w_uk": zeros(2, 12, 32),
        "w_uv": zeros(2, 12, 32),
        "scale": 0.5,
        "absorbed": absorbed,
    }
    error = IndexError if "page_table" in changes else (TypeError, ValueError)
    with pytest.raises(error, match=f"mla_prefill: .*{message}"):
        mla_prefill(**(call | changes))
