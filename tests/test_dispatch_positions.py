"""Which variant of positions/rope.cu serves a call, and what it is told; no GPU needed."""

from __future__ import annotations

import pytest

from cuattn.gpu import dispatch
from cuattn.gpu.arguments import rope_arguments
from cuattn.gpu.params import ROPE_PARAMS


@pytest.mark.parametrize(
    ("dtype", "itemsize", "aligned", "vec_bytes"),
    [("bfloat16", 2, True, 16), ("bfloat16", 2, False, 2), ("float64", 8, True, 8)],
)
def test_vectors_where_aligned(dtype, itemsize, aligned, vec_bytes):
    variant = dispatch.rope(dtype, itemsize, aligned=aligned)
    assert variant.config.vec_bytes == vec_bytes
    assert variant in set(dispatch.variants("sm_90a"))


def test_threads_share_sines_where_there_are_many():
    assert dispatch.rope_heads(1, 8, 32) == 1
    assert dispatch.rope_heads(1 << 17, 8, 32) == 8
    assert dispatch.rope_heads(1 << 17, 8, 3) == 3
    assert dispatch.rope_heads(1 << 12, 8, 32) == 2


def test_what_the_kernel_is_told():
    arguments = rope_arguments(
        (2, 5, 3, 64),
        ((8000, 400, 130, 2), (1920, 384, 128, 2), (0, 8)),
        itemsize=2,
        wide=True,
        turns=(7, 9),
        scale=1.5,
        interleaved=True,
        heads_per_block=2,
        lanes_shift=4,
    )
    packed = arguments.pack({"x": 11, "out": 12, "positions": 13})
    told = ROPE_PARAMS.unpack(packed)
    turns = told.pop("turns")
    assert turns[:3] == (7, 9, 0)
    assert told == {
        **{"x": 11, "out": 12, "positions": 13},
        **{"x_batch": 4000, "x_seq": 200, "x_head": 65},
        **{"out_batch": 960, "out_seq": 192, "out_head": 64},
        **{"position_batch": 0, "position_seq": 1, "scale": 1.5},
        **{"tokens": 10, "seqlen": 5, "heads": 3, "head_dim": 64, "pairs": 2},
        **{"heads_per_block": 2, "lanes_shift": 4, "interleaved": 1, "wide": 1},
    }
