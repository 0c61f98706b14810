"""RoPE on a GPU: one launch that reads x once and writes the result once."""

from __future__ import annotations

import functools

import cupy
import numpy as np

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu import dispatch
from cuattn.gpu.arguments import rope_arguments
from cuattn.gpu.memory import apart, use_device
from cuattn.gpu.plan import Plan

__all__ = ["rope"]


def rope(
    x: cupy.ndarray,
    positions: cupy.ndarray,
    turns: tuple[int, ...],
    scale: float,
    interleaved: bool,
    out: cupy.ndarray | None = None,
) -> cupy.ndarray:
    """As :func:`cuattn.reference.positions.rope`; x is (batch, seqlen, heads, head_dim) with
    contiguous features, `out` too, positions (batch, seqlen) are int32 or int64."""
    with use_device(x):
        if out is None:
            out = cupy.empty(x.shape, x.dtype)
        elif (out.data.ptr, out.strides) != (x.data.ptr, x.strides):
            x = apart(x, out)
        if out.size:
            plan = _plan(
                x.device.id,
                x.dtype,
                x.shape,
                (x.strides, out.strides, positions.strides),
                positions.dtype.itemsize == 8,
                turns,
                scale,
                interleaved,
                (x.data.ptr | out.data.ptr) % 16 == 0,
            )
            plan.launch({"x": x.data.ptr, "out": out.data.ptr, "positions": positions.data.ptr})
    return out


@functools.lru_cache(maxsize=4096)
def _plan(
    device: int,
    dtype: np.dtype,
    shape: tuple[int, int, int, int],
    strides: tuple[tuple[int, ...], ...],
    wide: bool,
    turns: tuple[int, ...],
    scale: float,
    interleaved: bool,
    aligned: bool,
) -> Plan:
    """Choose and compile the kernel, and pack what stays the same between calls alike."""
    batch, seqlen, heads, head_dim = shape
    itemsize = dtype.itemsize
    between = [
        stride
        for array in strides[:2]
        for stride, length in zip(array[:-1], shape, strict=False)
        if length > 1
    ]
    whole = (len(turns) * itemsize, head_dim * itemsize, *between)
    variant = dispatch.rope(
        FLOAT_DTYPES[dtype], itemsize, aligned=aligned and all(n % 16 == 0 for n in whole)
    )
    config = variant.config
    vec = config.vec_bytes // itemsize
    copied = (head_dim - 2 * len(turns)) // vec
    units = len(turns) // vec + (copied + 1) // 2
    lanes_shift = min((units - 1).bit_length(), config.threads.bit_length() - 1)
    tokens = batch * seqlen
    each = dispatch.rope_heads(tokens, 1 << lanes_shift, heads)
    arguments = rope_arguments(
        shape,
        strides,
        itemsize=itemsize,
        wide=wide,
        turns=turns,
        scale=scale,
        interleaved=interleaved,
        heads_per_block=each,
        lanes_shift=lanes_shift,
    )
    rows = config.threads >> lanes_shift
    grid = (-(-tokens // rows), -(-heads // each))
    return Plan(dispatch.Launch(variant, grid, (arguments,)), device)
