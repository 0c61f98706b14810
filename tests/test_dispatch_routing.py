"""Whether calls go to decoding kernels or to forward kernels: by rows, keys and predicted cost."""

from __future__ import annotations

import collections
import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.dispatch import Call, Layout
from cuattn.gpu.params import SM90_PARAMS
from tests.test_dispatch_decoding import decode_params

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def attend(
    tokens=1, keys=100_000, *, batch=1, heads=(8, 2), dims=(128, 128), dtype=BFLOAT16, **options
):
    """A call of :func:`cuattn.flash_attention` on contiguous arrays."""
    described = {name: options.pop(name) for name in ("arch", "aligned", "mask") if name in options}
    spec = attention_spec(
        "flash_attention",
        (batch, tokens, heads[0], dims[0]),
        (batch, keys, heads[1], dims[0]),
        (batch, keys, heads[1], dims[1]),
        *[np.dtype(dtype)] * 3,
        **options,
    )
    arch = described.pop("arch", "sm_90a")
    return dispatch.choose(Call.contiguous(spec, arch, **described))


def is_decoding(launch):
    return launch.variant.source.startswith("decoding/")


MASK = Layout((1, 1, 1, 100_000), (0, 0, 0, 1), np.dtype(bool))


@pytest.mark.parametrize(
    ("call", "decodes"),
    [
        ({}, True),
        ({"causal": True}, True),  # the one query sees every key
        ({"window": (5000, 0)}, True),
        ({"softcap": 30.0}, True),
        ({"arch": "sm_80"}, True),
        ({"arch": "sm_120"}, True),
        ({"dtype": np.float32}, True),
        ({"dtype": np.float64, "heads": (4, 2)}, True),
        ({"dims": (192, 128)}, True),
        ({"batch": 64, "heads": (32, 8)}, True),  # forward would take four times as long
        ({"tokens": 4}, True),
        ({"keys": 2048}, True),
        ({"keys": 2047}, False),  # one split
        ({"keys": 512}, False),
        ({"keys": 0}, False),
        ({"tokens": 4, "causal": True}, False),  # rows see different keys
        ({"tokens": 4, "window": (1000, None)}, False),
        ({"tokens": 16}, False),  # 64 rows: a full device is faster by forward
        ({"tokens": 17}, False),  # two tiles of rows: their keys would not be split
        ({"tokens": 64, "heads": (8, 8)}, False),
        ({"tokens": 2048}, False),
        ({"mask": MASK}, False),
        ({"aligned": False}, False),  # decode_simt.cu beside forward_sm80.cu
        ({"aligned": False, "dtype": np.float32}, True),
        ({"dims": (100, 100)}, False),
        ({"dtype": np.float32, "heads": (16, 2)}, False),  # 8 rows: two tiles of decode_simt.cu
    ],
)
def test_few_queries_over_long_keys_are_split(call, decodes):
    assert is_decoding(attend(**call)) == decodes


@pytest.mark.parametrize(
    ("batch", "tokens", "keys", "heads", "dim", "forward", "decoding", "decodes"),
    [
        (1, 1, 2048, (8, 8), 128, 25, 14, True),
        (1, 1, 4096, (64, 64), 64, 39, 20, True),
        (8, 1, 4096, (32, 32), 128, 133, 126, True),
        (64, 1, 4096, (32, 8), 128, 700, 256, True),
        (16, 1, 16384, (16, 16), 128, 514, 494, True),
        (1, 1, 100_000, (8, 8), 128, 1049, 108, True),
        (1, 4, 8192, (8, 8), 128, 90, 15, True),
        (32, 4, 8192, (8, 8), 128, 260, 255, True),
        (1, 16, 8192, (8, 2), 128, 93, 62, False),  # since the batch has no say
        (32, 16, 8192, (8, 2), 128, 178, 194, False),
        (16, 16, 8192, (8, 8), 128, 135, 173, False),
        (8, 1, 8192, (16, 4), 256, 153, 72, True),
    ],
)
def test_plain_arrays_as_measured(batch, tokens, keys, heads, dim, forward, decoding, decodes):
    """µs of both kernels on an H200, 2026-11-22, bfloat16: what decodes is faster so."""
    assert decoding < forward or not decodes
    call = {"batch": batch, "heads": heads, "dims": (dim, dim)}
    assert is_decoding(attend(tokens, keys, **call)) == decodes


@pytest.mark.parametrize(
    ("batch", "tokens", "keys", "heads", "dim", "forward"),
    [
        (16, 1, 8192, (32, 32), 64, False),  # 245 µs by decoding, 378 by forward
        (64, 1, 8192, (32, 32), 64, False),  # 980, 1531
        (16, 64, 8192, (32, 8), 128, True),  # 1161, 510
    ],
)
def test_caches_as_measured(batch, tokens, keys, heads, dim, forward):
    """On an H200, 2026-11-22, bfloat16."""
    spec = attention_spec(
        "flash_decode",
        (batch, tokens, heads[0], dim),
        *[(batch, keys, heads[1], dim)] * 2,
        *[BFLOAT16] * 3,
        causal=True,
        keys="cached",
    )
    launch = dispatch.choose(Call.contiguous(spec, "sm_90a"))
    assert is_decoding(launch) != forward


def test_top_left_causal_masks_are_for_forward():
    """torch's: the one query sees the first key alone."""
    assert not is_decoding(attend(causal=True, top_left=True))


@given(
    tokens=st.integers(1, 64),
    keys=st.integers(1, 1 << 18),
    batch=st.integers(2, 300),
    heads=st.sampled_from([(1, 1), (8, 8), (32, 8), (48, 1)]),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    dtype=st.sampled_from([np.dtype(np.float16), np.dtype(np.float32)]),
)
def test_the_batch_has_no_say_for_plain_arrays(tokens, keys, batch, heads, head_dim, dtype):
    """So that a sequence's result does not depend on the batch: neither the kernel nor how it
    splits keys."""
    alone, together = (
        attend(tokens, keys, batch=n, heads=heads, dims=(head_dim, head_dim), dtype=dtype)
        for n in (1, batch)
    )
    assert is_decoding(alone) == is_decoding(together)
    if is_decoding(alone):
        assert alone.variant == together.variant
        for launch in (alone, together):
            fields = decode_params(launch)
            assert (fields["fixed_splits"], fields["num_splits"]) == (1, 0)
            assert 1 << fields["kv_block_shift"] == 1024
            assert fields["capacity"] == keys
            assert fields["page_shift"] == 30


def paged(tokens, keys=16384, *, batch=1, ragged=False, heads=(32, 8), num_splits=None):
    """Whether :func:`cuattn.paged_attention` would go to a forward kernel that reads pages."""
    shape = (batch * tokens,) if ragged else (batch, tokens)
    cache = (keys,) if ragged else (batch, keys)
    spec = attention_spec(
        "paged_attention",
        (*shape, heads[0], 128),
        *[(*cache, heads[1], 128)] * 2,
        *[BFLOAT16] * 3,
        causal=True,
        sequences=batch if ragged else None,
        keys="paged",
        page_size=64,
    )
    pages = batch * keys // 64
    call = Call.contiguous(spec, "sm_90a", num_pages=pages, num_splits=num_splits)
    return not dispatch.prefers_decoding(call)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_prompts_over_pages_go_forward(batch, ragged):
    assert not paged(1, batch=batch, ragged=ragged)
    assert not paged(4, batch=batch, ragged=ragged)
    assert paged(256, batch=batch, ragged=ragged)
    assert paged(2000, batch=batch, ragged=ragged)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_tokens_over_pages_go_forward_from_a_few_dozen_rows_on(batch):
    """Tiles of which have 128 rows, of parts of the keys where they do not fill the device."""
    assert paged(64, batch=batch)
    assert paged(16, batch=batch)
    assert paged(5, batch=batch)  # 20 rows
    assert not paged(4, batch=batch)
    assert not paged(2, batch=batch)


@pytest.mark.parametrize(
    ("tokens", "keys", "batch", "decodes"),
    [
        (16, 1024, 1, True),  # 64 rows: 32 tiles of 16
        (16, 4096, 1, False),  # which would read the keys from L2 for too long
        (4, 4096, 4, True),  # a tile
        (17, 512, 1, False),  # more than 64 rows
        (16, 128, 8, True),  # 256 tiles
        (16, 128, 9, False),
    ],
)
def test_several_small_tiles_of_rows_read_few_keys(tokens, keys, batch, decodes):
    assert paged(tokens, keys, batch=batch) is not decodes


@pytest.mark.parametrize(("heads", "tiles"), [(64, 4), (65, 5), (128, 8), (129, None)])
def test_groups_too_large_to_pack_have_more_small_tiles(heads, tiles):
    cache = (1, 1024, 1, 128)
    dtypes = [BFLOAT16] * 3
    spec = attention_spec("flash_decode", (1, 1, heads, 128), cache, cache, *dtypes, keys="cached")
    launch = dispatch.choose(Call.contiguous(spec, "sm_90a"))
    assert (launch.variant.entry == "decode_sm90") == (tiles is not None)
    if tiles:
        assert launch.grid == (8, tiles, 1)


def test_how_to_split_is_what_decoding_does():
    assert paged(2000)
    assert not paged(2000, num_splits="fixed")
    assert not paged(2000, num_splits=3)


def ragged(
    total, batch, capacity, *, heads=(32, 8), dim=128, dtype=BFLOAT16, page_size=64, **described
):
    """A call of :func:`cuattn.paged_attention` on ragged rows."""
    spec = attention_spec(
        "paged_attention",
        (total, heads[0], dim),
        *[(capacity, heads[1], dim)] * 2,
        *[np.dtype(dtype)] * 3,
        causal=True,
        sequences=batch,
        keys="paged",
        page_size=page_size,
    )
    arch = described.pop("arch", "sm_90a")
    return Call.contiguous(spec, arch, num_pages=5000, table_stride=256, **described)


@pytest.mark.parametrize(
    ("total", "batch", "capacity", "options", "most"),
    [
        (64 + 2 * 2048, 66, 16384, {}, 2),  # decoding beside prompts: 8 rows of 4 heads
        (64 + 2 * 2048, 66, 16384, {"heads": (32, 32)}, 8),
        (256 + 512, 257, 8192, {}, 4),  # 3 tokens in the mean, for decoding
        (211 + 2 * 514, 213, 1088, {}, 4),  # 6 in the mean, for one or for the forward kernel
        (211 + 2 * 514, 213, 1088, {"dim": 256}, 4),
        (211 + 2 * 514, 213, 1088, {"dim": 64}, 8),  # which reads these at half of the rate
        (64 * 8, 64, 4096, {}, 4),
        (20 * 8, 20, 4096, {}, 8),  # which would take two waves of tiles
        (16 * 8, 16, 8192, {}, 8),  # one wave, which has multiprocessors left over
        (64, 64, 8192, {}, 0),  # one token each
        (1, 1, 8192, {}, 0),
        (4096, 1, 8192, {}, 0),
        (16 * 256, 16, 2048, {}, 0),  # short keys: a thread block is through with them soon
        (128 + 2 * 1024, 130, 2048, {}, 2),  # not with those of as many sequences
        (8 * 4, 8, 1024, {}, 0),
        (64 + 2 * 2048, 66, 16384, {"arch": "sm_80"}, 0),
        (64 + 2 * 2048, 66, 16384, {"dtype": np.float32}, 0),
        (64 + 2 * 2048, 66, 16384, {"num_splits": "fixed"}, 0),
        (64 + 2 * 2048, 66, 16384, {"heads": (128, 1)}, 0),
    ],
)
def test_batches_that_may_be_mixed_have_two_launches(total, batch, capacity, options, most):
    call = ragged(total, batch, capacity, **options)
    assert dispatch.routing.queries_for_decoding(call) == most
    launch = dispatch.choose(call)
    assert (launch.beside is not None) == (most > 0)
    if most:
        assert launch.variant.source == "decoding/decode_sm80.cu"
        assert launch.beside.variant.source == "attention/forward_sm90.cu"
        assert decode_params(launch)["max_queries"] == most
        maps = {
            f"{array}_map": b""
            for array in ("q", "k", "v", "bias", "mask", "k_pair", "v_pair", "q_rope", "k_rope")
        }
        packed = launch.beside.arguments[1].pack(collections.defaultdict(int, maps))
        assert SM90_PARAMS.unpack(packed)["min_queries"] == most + 1
        assert launch.variant.config.rows >= most * call.spec.heads_q // call.spec.heads_kv


@pytest.mark.parametrize(
    ("tokens", "batch", "keys", "options", "share", "waits"),
    [
        (4160, 66, 16384, {}, 2, False),
        (4097, 3, 131072, {}, 2, False),
        (2112, 68, 8192, {}, 2, True),  # decoding takes longer than prompts
        (272, 17, 8192, {}, 2, True),
        (2176, 130, 2048, {}, 2, True),
        (768, 257, 8192, {}, 1, False),  # far longer
        # Short sequences, and of few bytes, which a half takes longer to read.
        (1145, 17, 1600, {"heads": (32, 32)}, 1, False),
        (1795, 221, 1664, {"heads": (64, 8), "dim": 64}, 1, False),
        (4117, 221, 16384, {"heads": (64, 8), "dim": 64}, 2, True),
    ],
)
def test_prompts_begin_beside_decoding(tokens, batch, keys, options, share, waits):
    launch = dispatch.choose(ragged(tokens, batch, keys, **options))
    prompts = launch.beside
    assert prompts is not None
    assert launch.variant.config.blocks_per_sm == 1
    blocks = launch.grid[0] * launch.grid[1]
    assert 0.95 * (132 // share) <= blocks <= 132 // share
    late = blocks if waits else 0
    assert (prompts.grid, prompts.late_blocks) == ((132 - late,), late)


@pytest.mark.parametrize("beside", [1, 66, 131, 132])
def test_some_blocks_are_not_late(beside):
    """And all have a multiprocessor, also where not all multiprocessors have a tile."""
    for tokens in (200, 700, 2000):
        call = dataclasses.replace(ragged(tokens, 2, 8192), min_queries=2, blocks_beside=beside)
        prompts = dispatch.sm90.Sm90Forward().serves(call)
        assert prompts.grid[0] >= 1
        assert prompts.grid[0] + prompts.late_blocks <= 132


def test_tiers_that_cannot_share_a_batch_serve_it_whole():
    """As where tests reach one kernel alone."""
    call = ragged(64 + 2 * 2048, 66, 16384)
    for tier in ("forward_sm90", "decode_sm80", "decode_simt"):
        tiers = tuple(t for t in dispatch.TIERS if t.name == tier)
        assert dispatch.choose(call, tiers).beside is None
