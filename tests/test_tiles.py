"""Which kernel serves a call: every choice, for any call, is one that was enumerated and that fits the GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._arrays import FLOAT_DTYPES
from cuattn._spec import MAX_HEAD_DIM, attention_spec
from cuattn.gpu import tiles
from cuattn.gpu.report import DEFAULT_ARCHS

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
def specs(draw):
    """Any AttentionSpec, small or huge."""
    dtype = draw(st.sampled_from(list(FLOAT_DTYPES)))
    batch = draw(st.integers(1, 1 << 17))
    heads_kv = draw(st.integers(1, 16))
    heads_q = heads_kv * draw(st.integers(1, 16))
    seqlen_q, seqlen_k = (draw(st.integers(1, 1 << 18)) for _ in "qk")
    head_dim, head_dim_v = (draw(st.integers(1, MAX_HEAD_DIM)) for _ in "qv")
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
    variants = list(tiles.variants(arch))
    assert variants
    assert len(set(variants)) == len(variants), "a variant is listed twice"
    for variant in variants:
        assert variant.config.smem_bytes <= SMEM_LIMITS[arch] * 1024, variant
        assert variant.config.threads % 32 == 0, variant
        assert 32 <= variant.config.threads <= 1024, variant


def test_the_report_stays_short():
    assert sum(1 for arch in DEFAULT_ARCHS for _ in tiles.variants(arch)) <= 400


@pytest.mark.parametrize("arch", SMEM_LIMITS)
@given(spec=specs(), has_score=st.booleans(), aligned=st.booleans())
def test_every_choice_is_a_listed_variant(arch, spec, has_score, aligned):
    launch = tiles.forward(spec, arch, has_score=has_score, aligned=aligned)
    assert launch.variant in set(tiles.variants(arch))
    assert all(1 <= n <= limit for n, limit in zip(launch.grid, MAX_GRID, strict=False))
    if spec.dtype in (np.float32, np.float64):
        assert "simt" in launch.variant.source, "tensor cores would round it"
