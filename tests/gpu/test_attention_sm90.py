"""What only the Hopper kernel can get wrong: blocks that work on many tiles, and TMA's
maps."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import _repeat
from cuattn.gpu import compiler
from tests import formulas

cupy = pytest.importorskip("cupy")

from cuattn.gpu.dispatch import sm90  # noqa: E402
from cuattn.gpu.plan import attention_plan  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def hopper():
    if compiler.device_arch(0) != "sm_90a":
        pytest.skip("not a Hopper GPU")


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(BFLOAT16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("option", ["full", "causal", "alibi", "softcap"])
def test_a_sequence_is_the_same_in_any_company(head_dim, option, rng):
    """Bit for bit: alone, in a batch of more tiles than blocks, and again."""
    options = {
        "full": {},
        "causal": {"causal": True},
        "alibi": {"alibi_slopes": cupy.asarray(np.float32([0.5, 0.1, 0.01, 0.0]))},
        "softcap": {"softcap": 20.0},
    }[option]
    q, k, v = (cupy.asarray(normal(rng, 60, 700, 4, head_dim)) for _ in "qkv")
    out, lse = cuattn.flash_attention(q, k, v, **options, return_lse=True)
    again = cuattn.flash_attention(q, k, v, **options)
    assert bool((out == again).all())
    for b in (0, 17, 59):
        one = slice(b, b + 1)
        alone, alone_lse = cuattn.flash_attention(
            q[one], k[one], v[one], **options, return_lse=True
        )
        assert bool((alone == out[one]).all())
        assert bool((alone_lse == lse[one]).all())


@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("option", ["full", "causal", "window"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(44, 44), (700, 700), (700, 1000), (900, 700)])
def test_the_rows_of_a_tile_change_no_bit(dims, option, seqlen_q, seqlen_k, rng, monkeypatch):
    """What a row's result is follows from the keys of a block; values of keys that some rows do not
    see may be anything."""
    options = {"full": {}, "causal": {"causal": True}, "window": {"window": (130, 20)}}[option]
    q = cupy.asarray(normal(rng, 2, seqlen_q, 4, dims[0]))
    k, v = (cupy.asarray(normal(rng, 2, seqlen_k, 4, dim)) for dim in dims)
    v[1, seqlen_k // 3] = np.inf
    fastest, results, chosen = sm90._fastest, {}, []

    def with_rows(spec, configs, multiprocessors):
        tile_n = fastest(spec, configs, multiprocessors).tile_n
        of_tile = [c for c in configs if (c.warpgroups, c.tile_n) == (warpgroups, tile_n)]
        chosen.extend(of_tile[:1])
        return (of_tile or configs)[0]

    monkeypatch.setattr(sm90, "_fastest", with_rows)
    for warpgroups in (1, 2, 3):
        attention_plan.cache_clear()
        _repeat.forget()
        before = len(chosen)
        out, lse = cuattn.flash_attention(q, k, v, **options, return_lse=True)
        if len(chosen) > before:
            results[warpgroups] = out.view(np.uint16), lse.view(np.uint32)
    monkeypatch.undo()
    attention_plan.cache_clear()
    _repeat.forget()
    assert len(results) > 1 or seqlen_q == 44  # a tile of 64 rows alone
    first = next(iter(results.values()))
    for result in results.values():
        assert all(bool((a == b).all()) for a, b in zip(result, first, strict=True))


@pytest.mark.parametrize("seqlens", [(128, 600), (200, 400), (40, 176), (300, 177)])
def test_blocks_of_176_keys(seqlens, rng, monkeypatch):
    """For one or two consumers; values of keys that some rows do not see may be anything."""
    q = normal(rng, 2, seqlens[0], 4, 128)
    k, v = (normal(rng, 2, seqlens[1], 2, 128) for _ in "kv")
    exact = formulas.attention(q, k, v, causal=True)
    plain = formulas.attention(q, k, v, causal=True, precision=BFLOAT16.type)
    v[1, -9] = np.nan  # the last rows of the last sequence see it
    results = []
    monkeypatch.setattr(sm90, "SM90_MANY_KEYS", 1)
    for warpgroups in (1, 2):

        def of_large_blocks(spec, configs, multiprocessors, warpgroups=warpgroups):
            return next(c for c in configs if (c.tile_n, c.warpgroups) == (176, warpgroups))

        monkeypatch.setattr(sm90, "_fastest", of_large_blocks)
        attention_plan.cache_clear()
        _repeat.forget()
        out, lse = cuattn.flash_attention(
            *map(cupy.asarray, (q, k, v)), causal=True, return_lse=True
        )
        out, lse = out.get(), lse.get()
        seen = np.s_[1, -9:]
        assert np.isnan(out[seen].astype(np.float32)).all()
        results.append((out.copy(), lse))
        out[seen] = exact[0][seen]
        formulas.assert_accurate(out, exact[0], plain[0])
        formulas.assert_accurate(lse, exact[1], plain[1])
    attention_plan.cache_clear()
    _repeat.forget()
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_is_the_same_in_any_varlen_company(head_dim, rng):
    lengths = rng.integers(0, 900, 50)
    lengths[[3, 30]] = 700, 1
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v = (cupy.asarray(normal(rng, int(cu[-1]), 4, head_dim)) for _ in "qkv")
    out = cuattn.flash_attention_varlen(q, k, v, cupy.asarray(cu), causal=True)
    for b in (3, 30):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        ends = cupy.asarray(np.array([0, lengths[b]], np.int32))
        alone = cuattn.flash_attention_varlen(q[rows], k[rows], v[rows], ends, causal=True)
        assert bool((alone == out[rows]).all())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_see_nothing_amid_others(head_dim, rng):
    """A block meets tiles without any key while the output of the tile before is in its
    registers."""
    q, k, v = (normal(rng, 3, n, 9, head_dim) for n in (610, 286, 286))
    exact, exact_lse = formulas.attention(q, k, v, causal=True)
    plain, plain_lse = formulas.attention(q, k, v, causal=True, precision=BFLOAT16)
    out, lse = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), causal=True, return_lse=True)
    formulas.assert_accurate(out.get(), exact, plain)
    formulas.assert_accurate(lse.get(), exact_lse, plain_lse)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_special_values_stay_with_their_tiles(head_dim, poison, rng):
    """A block works on many tiles, of which some hide infinities or NaN from some queries."""
    q, k, v = (normal(rng, 40, 700, 4, head_dim) for _ in "qkv")
    arrays = [cupy.asarray(a) for a in (q, k, v)]
    clean = cuattn.flash_attention(*arrays, causal=True)
    first = rng.integers(0, 1400, 40)  # the key that is poisoned: none in half of the sequences
    for sequence in np.flatnonzero(first < 700):
        arrays[2][sequence, first[sequence]] = poison
    out = cuattn.flash_attention(*arrays, causal=True)
    sees = cupy.asarray(np.arange(700) >= first[:, None])
    assert bool((out == clean)[~sees].all())
    assert not bool(cupy.isfinite(out[sees].astype(np.float32)).any())


#: How bias and mask may lie in memory: (shape of the array, what of it is given). Rows of 336
#: elements start at multiples of 16 bytes in any type, rows of 324 at multiples of 4.
SCORE_LAYOUTS = {
    "aligned": ((2, 3, 201, 336), np.s_[:]),
    "words": ((2, 3, 201, 324), np.s_[:]),
    "odd": ((2, 3, 201, 323), np.s_[:]),
    "part of a row": ((2, 3, 201, 336), np.s_[..., :331]),
    "from a key on": ((2, 3, 201, 336), np.s_[..., 5:]),
    "every other key": ((2, 3, 201, 660), np.s_[..., ::2]),
    "backward": ((2, 3, 201, 336), np.s_[:, :, ::-1, ::-1]),
    "one for all heads": ((2, 1, 201, 336), np.s_[:]),
    "one for all queries": ((3, 1, 336), np.s_[:]),
    "one for all keys": ((2, 1, 201, 1), np.s_[:]),
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("layout", SCORE_LAYOUTS)
@pytest.mark.parametrize("given", ["bias", "float32 bias", "mask", "bias and mask"])
def test_bias_and_mask_may_lie_anyhow(head_dim, layout, given, rng):
    shape, part = SCORE_LAYOUTS[layout]
    whole = {}
    if "bias" in given:
        bias = rng.standard_normal(shape) * 3
        whole["bias"] = bias.astype(np.float32 if "float32" in given else BFLOAT16)
    if "mask" in given:
        whole["mask"] = rng.random(shape) < 0.7
    host = {name: array[part] for name, array in whole.items()}
    device = {name: cupy.asarray(array)[part] for name, array in whole.items()}
    keys = next(iter(host.values())).shape[-1]
    keys = 336 if keys == 1 else keys
    q, k, v = (normal(rng, 2, n, 3, head_dim) for n in (201, keys, keys))
    arrays = [cupy.asarray(a) for a in (q, k, v)]
    for options in ({}, {"causal": True, "softcap": 20.0}):
        exact, exact_lse = formulas.attention(q, k, v, **host, **options)
        plain, plain_lse = formulas.attention(q, k, v, **host, **options, precision=BFLOAT16)
        out, lse = cuattn.flash_attention(*arrays, **device, **options, return_lse=True)
        formulas.assert_accurate(out.get(), exact, plain)
        formulas.assert_accurate(lse.get(), exact_lse, plain_lse)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [1.0, 30.0, 50.0, 60.0])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)])
def test_softcap_of_scores_anywhere(head_dim, softcap, dtype, rng):
    """Rows whose scores are all near the cap, near its negative, or between: maxima are kept for
    some caps and types, and spared for others."""
    axis = rng.standard_normal(head_dim)
    height = np.linspace(-3.0, 3.0, 600) * softcap * head_dim**0.5 / (axis @ axis)
    q, k, v = (rng.standard_normal((1, n, 2, head_dim)) for n in (600, 500, 500))
    q, k, v = (a.astype(dtype) for a in (q + height[:, None, None] * axis, k + axis, v))
    sinks = np.array([-80.0, 2.0], np.float32)
    arrays = [cupy.asarray(a) for a in (q, k, v)]
    for options in ({}, {"causal": True}, {"window": (150, 20)}):
        exact, exact_lse = formulas.attention(q, k, v, softcap=softcap, sinks=sinks, **options)
        plain, plain_lse = formulas.attention(
            q, k, v, softcap=softcap, sinks=sinks, **options, precision=dtype
        )
        out, lse = cuattn.flash_attention(
            *arrays, softcap=softcap, sinks=cupy.asarray(sinks), **options, return_lse=True
        )
        formulas.assert_accurate(out.get(), exact, plain)
        formulas.assert_accurate(lse.get(), exact_lse, plain_lse)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(500, 1000), (1000, 500)])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_alibi_before_and_after_the_queries(head_dim, seqlen_q, seqlen_k, softcap, rng):
    """Blocks of keys on one side of all queries of a tile, and those that the diagonal crosses."""
    q, k, v = (normal(rng, 1, n, 4, head_dim) for n in (seqlen_q, seqlen_k, seqlen_k))
    slopes = np.array([0.7, 0.004, -0.02, 0.0], np.float32)
    arrays = [cupy.asarray(a) for a in (q, k, v)]
    for options in ({}, {"causal": True}, {"window": (300, 200)}):
        more = options if softcap is None else {**options, "softcap": softcap}
        exact, exact_lse = formulas.attention(q, k, v, alibi_slopes=slopes, **more)
        plain, plain_lse = formulas.attention(
            q, k, v, alibi_slopes=slopes, **more, precision=BFLOAT16
        )
        out, lse = cuattn.flash_attention(
            *arrays, alibi_slopes=cupy.asarray(slopes), **more, return_lse=True
        )
        formulas.assert_accurate(out.get(), exact, plain)
        formulas.assert_accurate(lse.get(), exact_lse, plain_lse)


@pytest.mark.parametrize("batch", [1, 2, 33, 256, 257])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_batches_of_any_size(batch, causal, rng):
    """Tiles of up to 256 sequences are sorted; queries and keys differ in number, some are 0."""
    lengths = rng.integers(0, 300, (2, batch)) * (rng.random((2, batch)) < 0.8)
    lengths[:, 0] = 400, 700
    ends = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in lengths]
    host = [normal(rng, int(ends[i][-1]), 1, 128) for i in (0, 1, 1)]
    out = cuattn.flash_attention_varlen(
        *map(cupy.asarray, host), *map(cupy.asarray, ends), causal=causal
    )
    exact, _ = formulas.varlen_attention(*host, *ends, causal=causal)
    plain, _ = formulas.varlen_attention(*host, *ends, causal=causal, precision=BFLOAT16)
    formulas.assert_accurate(out.get(), exact, plain)


def test_varlen_maps_stay_within_small_allocations(rng):
    """Arrays with nothing mapped before or after them, which a map must not touch."""
    for total in (1, 60, 500, 5000):
        cut = total // 3
        cu = cupy.asarray(np.array([0, cut, cut, total], np.int32))
        host = [normal(rng, total, 2, 128) for _ in "qkv"]
        with cupy.cuda.using_allocator(None):  # no pool: each array is an allocation
            arrays = [cupy.asarray(a) for a in host]
            out = cuattn.flash_attention_varlen(*arrays, cu)
        ends = cu.get()
        exact, _ = formulas.varlen_attention(*host, ends, ends)
        plain, _ = formulas.varlen_attention(*host, ends, ends, precision=BFLOAT16)
        formulas.assert_accurate(out.get(), exact, plain)


#: Far more queries than keys: blocks meet dozens of tiles in a row of which no query sees a key.
TILES_WITHOUT_KEYS = {
    "causal": {"causal": True},
    "window": {"window": (5, 0)},
    "softcap": {"window": (None, 0), "softcap": 20.0},
    "alibi": {"causal": True, "alibi_slopes": np.linspace(0.01, 1.0, 12, dtype=np.float32)},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("option", TILES_WITHOUT_KEYS)
@pytest.mark.parametrize("seqlen_k", [1, 16, 300])
def test_many_more_queries_than_keys_end(head_dim, option, seqlen_k, rng):
    """The warp that loads keys and values must not keep any back for a tile that has keys: there
    may be none for longer than the queue of tiles."""
    options = TILES_WITHOUT_KEYS[option]
    device = {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    q, k, v = (normal(rng, 1, n, 12, head_dim) for n in (20000, seqlen_k, seqlen_k))
    out, lse = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), **device, return_lse=True)
    # The queries before see nothing: the rest is a call of its own.
    last = seqlen_k + 40
    assert bool((out[:, :-last] == 0).all())
    assert bool((lse[..., :-last] == -np.inf).all())
    rest = q[:, -last:]
    exact, exact_lse = formulas.attention(rest, k, v, **options)
    plain, plain_lse = formulas.attention(rest, k, v, **options, precision=BFLOAT16)
    formulas.assert_accurate(out.get()[:, -last:], exact, plain)
    formulas.assert_accurate(lse.get()[..., -last:], exact_lse, plain_lse)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("count", "queries", "keys"),
    [(2000, 300, 3), (100, 3000, 10), (2000, 300, 0), (1, 30000, 1), (3000, 1, 0)],
)
@pytest.mark.parametrize("option", ["full", "causal", "window"])
def test_many_varlen_sequences_of_few_keys_end(head_dim, count, queries, keys, option, rng):
    options = {"full": {}, "causal": {"causal": True}, "window": {"window": (1, 1)}}[option]
    lengths_k = np.full(count, keys)
    lengths_k[count // 2] += 1  # one sequence that differs
    cu_q, cu_k = (
        np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
        for n in (np.full(count, queries), lengths_k)
    )
    q, k, v = (normal(rng, int(cu[-1]), 1, head_dim) for cu in (cu_q, cu_k, cu_k))
    out = cuattn.flash_attention_varlen(*map(cupy.asarray, (q, k, v, cu_q, cu_k)), **options).get()
    checked = np.unique([0, count // 2, count - 1])
    sees = np.zeros(len(q), bool)
    for b in checked:
        rows, own = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        exact, _ = formulas.attention(q[None, rows], k[None, own], v[None, own], **options)
        plain, _ = formulas.attention(
            q[None, rows], k[None, own], v[None, own], **options, precision=BFLOAT16
        )
        formulas.assert_accurate(out[None, rows], exact, plain)
    # Every row was written: zeros where no key is seen, else numbers.
    for b in range(count):
        seen = min(queries, cu_k[b + 1] - cu_k[b] + options.get("window", (0, 0))[1])
        sees[cu_q[b + 1] - (seen if options else queries * bool(lengths_k[b])) : cu_q[b + 1]] = True
    assert np.isfinite(out.astype(np.float32)).all()
    assert not out[~sees].any()
