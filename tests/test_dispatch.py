"""Which kernel serves a call: every choice, for any call, is one that was enumerated and that fits
the GPU."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._arrays import FLOAT_DTYPES
from cuattn._spec import MAX_HEAD_DIM, attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.dispatch import Call, sampling

#: Every architecture of CUDA 12 and 13 wheels, and the shared memory a block of it may have.
SMEM_LIMITS = {
    "sm_70": 96,
    "sm_75": 64,
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_110": 227,
    "sm_120": 99,
    "sm_121": 99,
}

MAX_GRID = (2**31 - 1, 65535, 65535)


@st.composite
def specs(draw, max_head_dim=MAX_HEAD_DIM):
    """Any AttentionSpec, small or huge. (Values of more than MAX_DIM features come in pieces.)"""
    dtype = draw(st.sampled_from(list(FLOAT_DTYPES)))
    batch = draw(st.integers(1, 1 << 17))
    heads_kv = draw(st.integers(1, 16))
    heads_q = heads_kv * draw(st.integers(1, 16))
    seqlen_q, seqlen_k = (draw(st.integers(1, 1 << 18)) for _ in "qk")
    head_dim, head_dim_v = (draw(st.integers(1, n)) for n in (max_head_dim, dispatch.MAX_DIM))
    varlen = draw(st.booleans())
    sizes = st.none() | st.integers(0, 1 << 20)
    return attention_spec(
        "flash_attention",
        (*([] if varlen else [batch]), seqlen_q, heads_q, head_dim),
        (*([] if varlen else [batch]), seqlen_k, heads_kv, head_dim),
        (*([] if varlen else [batch]), seqlen_k, heads_kv, head_dim_v),
        *(dtype, dtype, dtype),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(sizes, sizes)),
        softcap=draw(st.none() | st.floats(1.0, 100.0)),
        sequences=batch if varlen else None,
    )


@pytest.mark.parametrize("arch", SMEM_LIMITS)
def test_variants_fit_the_gpu(arch):
    variants = list(dispatch.variants(arch))
    assert variants
    assert len(set(variants)) == len(variants), "a variant is listed twice"
    for variant in variants:
        assert variant.config.smem_bytes <= SMEM_LIMITS[arch] * 1024, variant
        assert variant.config.threads % 32 == 0, variant
        assert 32 <= variant.config.threads <= 1024, variant


@pytest.mark.parametrize("arch", SMEM_LIMITS)
@given(spec=specs(), has_score=st.booleans(), aligned=st.booleans())
def test_every_choice_is_a_listed_variant(arch, spec, has_score, aligned):
    slopes = dispatch.Layout((spec.heads_q,), (4,), np.dtype(np.float32)) if has_score else None
    launch = dispatch.choose(Call.contiguous(spec, arch, aligned=aligned, alibi_slopes=slopes))
    assert launch.variant in set(dispatch.variants(arch))
    assert all(1 <= n <= limit for n, limit in zip(launch.grid, MAX_GRID, strict=False))
    if spec.dtype in (np.float32, np.float64):
        assert "simt" in launch.variant.source, "tensor cores would round it"


# ------------------------------------------------------------------------------------------------
# Hopper


def forward_spec(seqlen, head_dim, *, batch=None, heads=None, head_dim_v=None, **options):
    """A bfloat16 call of 16384 tokens and 2048 features, unless something else is said."""
    batch, heads = batch or 16384 // seqlen, heads or 2048 // head_dim
    shape = (batch, seqlen, heads)
    q, v = (*shape, head_dim), (*shape, head_dim_v or head_dim)
    dtype = np.dtype(ml_dtypes.bfloat16)
    return attention_spec("flash_attention", q, q, v, dtype, dtype, dtype, **options)


def hopper_config(spec, **options):
    launch = dispatch.choose(Call.contiguous(spec, "sm_90a", **options))
    assert launch.variant.source == "attention/forward_sm90.cu"
    return launch.variant.config


@pytest.mark.parametrize(
    ("head_dim", "causal", "seqlen", "tile"),
    [
        (64, False, 512, (192, 128)),
        (64, True, 512, (128, 128)),  # 192 rows would compute twice what the mask leaves
        (64, True, 2048, (192, 128)),
        (128, False, 512, (128, 128)),  # 512 is not a multiple of 192
        (128, True, 2048, (128, 128)),
        (128, False, 2048, (192, 80)),
        (128, True, 8192, (192, 80)),
        (256, True, 512, (128, 80)),
        (256, False, 16384, (128, 80)),
    ],
)
def test_hopper_tiles_follow_the_length(head_dim, causal, seqlen, tile):
    config = hopper_config(forward_spec(seqlen, head_dim, causal=causal))
    assert (config.tile_m, config.tile_n) == tile


@given(
    batch=st.integers(1, 300),
    seqlen=st.integers(1, 20000),
    head_dim=st.sampled_from([64, 96, 128, 192, 256]),
    causal=st.booleans(),
)
def test_the_batch_has_no_say_in_the_keys_of_hopper_tiles(batch, seqlen, head_dim, causal):
    """Only in their rows, by which no bit of a result changes."""
    alone, together = (
        hopper_config(forward_spec(seqlen, head_dim, batch=n, heads=4, causal=causal))
        for n in (1, batch)
    )
    assert alone == dataclasses.replace(
        together, warpgroups=alone.warpgroups, q_stages=alone.q_stages
    )


@pytest.mark.parametrize(
    ("shape", "head_dim", "causal", "tile"),
    [
        ((24, 44, 1), 80, True, (64, 64)),  # a block of keys is all there is
        ((1, 1824, 4), 32, True, (64, 128)),  # 40 tiles of 192 rows, 116 of 64
        ((1, 512, 8), 64, True, (64, 128)),
        ((1, 1024, 16), 128, True, (64, 128)),
        ((2, 2048, 8), 64, True, (128, 128)),  # 512 of 64 rows would be 4 for each block
        ((16, 2048, 8), 64, True, (192, 128)),
        ((1, 700, 2), 256, False, (64, 80)),
        ((59, 312, 4), 256, True, (128, 80)),
        ((3, 10469, 1), 96, True, (128, 112)),  # the longest of 165 tiles of 192 rows
    ],
)
def test_few_rows_are_shared_out_over_the_device(shape, head_dim, causal, tile):
    batch, seqlen, heads = shape
    config = hopper_config(forward_spec(seqlen, head_dim, batch=batch, heads=heads, causal=causal))
    assert (config.tile_m, config.tile_n) == tile


def test_what_the_copy_engine_cannot_do_goes_to_another_tier():
    def source(arch="sm_90a", *, aligned=True, **options):
        spec = forward_spec(512, 64, **options)
        return dispatch.choose(Call.contiguous(spec, arch, aligned=aligned)).variant.source

    assert source() == "attention/forward_sm90.cu"
    assert source(aligned=False) == "attention/forward_sm80.cu"
    assert source(head_dim_v=36) == "attention/forward_sm80.cu"
    assert source(scale=-1.0) == "attention/forward_sm80.cu"
    assert source("sm_80") == "attention/forward_sm80.cu"


def test_broadcast_keys_go_to_another_tier():
    """A stride of 0 is none that TMA takes."""
    call = Call.contiguous(forward_spec(512, 64), "sm_90a")
    strides = call.strides._replace(k=(0, *call.strides.k[1:]))
    launch = dispatch.choose(dataclasses.replace(call, strides=strides))
    assert launch.variant.source == "attention/forward_sm80.cu"


def test_tiers_are_chosen_by_context():
    def source():
        call = Call.contiguous(forward_spec(512, 64), "sm_90a")
        return dispatch.choose(call, dispatch.current_tiers()).variant.source

    with dispatch.use_tiers("forward_sm80", "forward_simt"):
        assert source() == "attention/forward_sm80.cu"
        with dispatch.use_tiers("forward_simt"):
            assert source() == "attention/forward_simt.cu"
        assert source() == "attention/forward_sm80.cu"
        with dispatch.use_tiers("prefix_sm90"), pytest.raises(LookupError, match="prefix_sm90"):
            source()
    assert source() == "attention/forward_sm90.cu"
    with pytest.raises(ValueError, match="forward_sm100"), dispatch.use_tiers("forward_sm100"):
        pass


@pytest.mark.parametrize("rows", ["batched", "ragged"])
@pytest.mark.parametrize("keys", ["batched", "ragged", "cached", "paged"])
def test_strides_of_axes_of_length_1_do_not_count(rows, keys):
    spec = dataclasses.replace(
        forward_spec(1, 64, batch=1, heads=1), rows=rows, keys=keys, page_size=1
    )
    call = Call.contiguous(spec, "sm_90a", num_pages=1)
    odd = dispatch.Strides(*((*(3 for _ in a[:-1]), a[-1]) for a in call.strides))
    used = dispatch.usable_strides(spec, odd, num_pages=1)
    assert dataclasses.replace(call, strides=used).addressable
    assert not dataclasses.replace(call, strides=odd).addressable


def walk(spec, config, section, blocks):
    """The tiles (head of the batch, tile of rows) of each block: FixedWalk in
    attention/scheduler_sm90.cuh."""
    heads, tiles_m = spec.heads_q * spec.batch, -(-spec.seqlen_q // config.tile_m)
    found = [[] for _ in range(blocks)]
    step = section or heads
    for number, first in enumerate(range(0, heads, step)):
        size = min(step, heads - first)
        for item in range(size * tiles_m):
            place, block = divmod(item, blocks)
            if section == 0:
                found[block].append((first + item // tiles_m, item % tiles_m))
                continue
            if (place + number) % 2:
                block = blocks - 1 - block
            found[block].append((first + item % size, tiles_m - 1 - item // size))
    return found


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [512, 2048, 8192, 16384])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1023, 0)}])
def test_hopper_blocks_have_the_same_to_do(head_dim, seqlen, options):
    """The busiest of 132 blocks has little more than the average, or one tile more where all cost
    the same."""
    spec = forward_spec(seqlen, head_dim, **options)
    config = hopper_config(spec)
    section = dispatch.sm90_section(spec, config, 132)
    assert (section > 0) == bool(options)
    found = walk(spec, config, section, 132)
    rows = -(-seqlen // config.tile_m)
    every = sorted(tile for block in found for tile in block)
    assert every == [(head, m) for head in range(spec.batch * spec.heads_q) for m in range(rows)]

    def cost(m):
        last = min((m + 1) * config.tile_m, seqlen) if options else seqlen
        first = max(m * config.tile_m - 1023, 0) if "window" in options else 0
        return 1 + -(-last // config.tile_n) - first // config.tile_n

    load = [sum(cost(m) for _, m in block) for block in found]
    mean = sum(load) / len(load)
    most = 1.07 if "window" in options else 1.04  # a block has eight tiles of head_dim 256
    assert max(load) <= (most * mean if options else mean + cost(0))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (300, 0)}, {"window": (99, 77)}])
def test_hopper_computes_what_queries_see_and_little_more(head_dim, options):
    """All products with keys that some of 64 queries sees, and one more at most for each consumer
    of a tile: whole tiles would be up to five more."""
    spec = forward_spec(2048, head_dim, **options)
    config = hopper_config(spec)
    i, j = np.ogrid[:2048, :2048]
    left = 2048 if spec.window_left is None else spec.window_left
    sees = (i - left <= j) & (j <= i + spec.window_right)
    blocks = np.add.reduceat(sees, np.arange(0, 2048, config.tile_n), axis=1) > 0
    needed = (np.add.reduceat(blocks, np.arange(0, 2048, 64), axis=0) > 0).sum()
    computed = dispatch.products_of_tiles(spec, config)
    assert needed <= computed.sum() <= needed + config.warpgroups * len(computed)


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "heads", "section"),
    [
        (16, 256, 2048, (32, 32), 4),  # of all sequences' keys 64 MiB
        (4, 1024, 8192, (32, 32), 4),
        (2, 2048, 16384, (32, 32), 4),
        (33, 256, 2048, (32, 32), 32),  # one sequence after the other
        (1, 8192, 8192, (32, 32), 16),
    ],
)
def test_hopper_takes_heads_of_all_caches_at_a_time(batch, seqlen_q, seqlen_k, heads, section):
    shapes = (batch, seqlen_q, heads[0], 128), *[(batch, seqlen_k, heads[1], 128)] * 2
    dtypes = [np.dtype(ml_dtypes.bfloat16)] * 3
    spec = attention_spec("flash_decode", *shapes, *dtypes, keys="cached", causal=True)
    config = hopper_config(spec)
    assert dispatch.sm90_section(spec, config, 132) == section


def test_hopper_takes_varlen_tiles_of_several_heads_at_a_time():
    """As many as L2 holds the keys of, were a sequence a few times as long as the mean."""

    def section(total, sequences, **options):
        shape = (total, 16, 128)
        dtypes = [np.dtype(ml_dtypes.bfloat16)] * 3
        spec = attention_spec(
            "flash_attention_varlen", *[shape] * 3, *dtypes, sequences=sequences, **options
        )
        return dispatch.sm90_section(spec, hopper_config(spec), 132)

    assert section(32768, 64, causal=True) == 16
    assert 1 < section(32768, 10, causal=True) < 16
    assert section(1 << 20, 2, causal=True) == 1
    assert section(1 << 20, 2, window=(1023, 0)) > 1


def test_penalties_of_any_number_of_rows():
    """The second axis of a grid has 65535 blocks at most."""
    launch, _ = sampling.penalize("float32", 1 << 20, 4096, 30, 0)
    assert launch.grid[0] == 1 << 20
    launch, *_ = sampling.penalty_table("float32", 1 << 20, 4096, 30, 0)
    assert launch.grid == (1 << 20,)
