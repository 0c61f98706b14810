"""Kernel arguments: structs of rawkernels/, packed on the host."""

from __future__ import annotations

import struct

import numpy as np

from cuattn._spec import AttentionSpec

UNBOUNDED = 1 << 30  # kUnbounded of rawkernels/attention/params.cuh

#: ForwardParams of rawkernels/attention/params.cuh, field by field.
FORWARD_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in ("q", "k", "v", "out", "lse", "bias", "mask")),
        *((name, np.uint64) for name in ("alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")),
        *((f"{name}_stride", np.int64, 3) for name in ("q", "k", "v", "out")),
        *((f"{name}_stride", np.int64, 4) for name in ("bias", "mask")),
        ("alibi_batch_stride", np.int64),
        ("scale", np.float64),
        ("softcap", np.float64),
        *((name, np.int32) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv")),
        *((name, np.int32) for name in ("head_dim", "head_dim_v", "window_left", "window_right")),
        ("bias_is_float32", np.int32),
    ],
    align=True,
)
#: The same bytes as CuPy passes them: one scalar of this dtype is one argument.
FORWARD_ARGUMENT = np.dtype((np.void, FORWARD_PARAMS.itemsize))

#: Packs the 11 pointers that FORWARD_PARAMS begins with; all that differs between calls that are otherwise alike.
forward_pointers = struct.Struct("11Q").pack
_SHAPE = struct.Struct("12q 8q q 2d 10i")


def forward_shape(
    spec: AttentionSpec,
    strides: tuple[tuple[int, ...], ...],
    bias: tuple | None,
    mask: tuple | None,
    alibi_slopes: tuple | None,
) -> bytes:
    """Pack FORWARD_PARAMS after its pointers.

    Parameters
    ----------
    spec : AttentionSpec
        The call.
    strides : tuple
        Of q, k, v and out, in bytes.
    bias, mask, alibi_slopes : tuple, optional
        Their (shape, strides in bytes, dtype).
    """
    slopes_batch = 0
    if alibi_slopes is not None and len(alibi_slopes[0]) == 2:
        slopes_batch = alibi_slopes[1][0] // alibi_slopes[2].itemsize
    return _SHAPE.pack(
        *(n for array in strides for n in _row_strides(spec, array)),
        *_broadcast_strides(bias),
        *_broadcast_strides(mask),
        slopes_batch,
        spec.scale,
        spec.softcap,
        spec.batch,
        spec.seqlen_q,
        spec.seqlen_k,
        spec.heads_q,
        spec.heads_kv,
        spec.head_dim,
        spec.head_dim_v,
        _bounded(spec.window_left),
        _bounded(spec.window_right),
        bias is not None and bias[2] == np.float32,
    )


def _row_strides(spec: AttentionSpec, strides: tuple[int, ...]) -> list[int]:
    """Element strides of batch, seq and head."""
    elements = [stride // spec.dtype.itemsize for stride in strides[:-1]]
    return [0, *elements] if spec.varlen else elements


def _broadcast_strides(layout: tuple | None) -> list[int]:
    """Element strides of batch, head, row and column; 0 along an axis that is missing or of length 1."""
    if layout is None:
        return [0, 0, 0, 0]
    shape, strides, dtype = layout
    own = [
        0 if n == 1 else stride // dtype.itemsize for n, stride in zip(shape, strides, strict=True)
    ]
    return [0] * (4 - len(own)) + own


def _bounded(side: int | None) -> int:
    return UNBOUNDED if side is None else max(-UNBOUNDED, min(side, UNBOUNDED))
