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

#: Packs the 11 pointers that FORWARD_PARAMS begins with; all that differs between calls that are
#: otherwise alike.
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
    return _SHAPE.pack(
        *(n for array in strides for n in _row_strides(spec, array)),
        *_broadcast_strides(bias),
        *_broadcast_strides(mask),
        _batch_stride(alibi_slopes),
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


#: DecodeParams of rawkernels/decoding/params.cuh, field by field.
DECODE_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in ("q", "k", "v", "out", "lse", "alibi_slopes", "sinks")),
        *((name, np.uint64) for name in ("page_table", "seq_lens", "cu_seqlens_q")),
        *((name, np.uint64) for name in ("partials", "ticket")),
        *((f"{name}_stride", np.int64, 3) for name in ("q", "out", "k", "v")),
        *((name, np.int64) for name in ("table_stride", "alibi_batch_stride")),
        *((name, np.int64) for name in ("lse_batch_stride", "lse_head_stride")),
        ("scale", np.float64),
        ("softcap", np.float64),
        *((name, np.int32) for name in ("batch", "seqlen_q", "capacity", "heads_q", "heads_kv")),
        *((name, np.int32) for name in ("head_dim", "head_dim_v", "window_left", "window_right")),
        *((name, np.int32) for name in ("page_shift", "first_key", "split_units", "unit_shift")),
        *((name, np.int32) for name in ("num_splits", "heads_of_block", "group", "group_shift")),
        ("group_magic", np.uint32),
        ("out_is_acc", np.int32),
        ("one_item", np.int32),
    ],
    align=True,
)

#: Packs the 11 pointers and the ticket that DECODE_PARAMS begins with.
decode_pointers = struct.Struct("12Q").pack
_DECODE_SHAPE = struct.Struct("12q 4q 2d 17i I 2i")
#: MergeParams of rawkernels/decoding/merge.cu.
MERGE_PARAMS = np.dtype(
    [
        ("outs", np.uint64, 32),
        ("lses", np.uint64, 32),
        ("out", np.uint64),
        ("lse", np.uint64),
        ("out_stride", np.int64, 3),
        ("lse_stride", np.int64, 3),
        ("rows", np.int64),
        *((name, np.int32) for name in ("middle", "inner", "head_dim_v", "parts", "packed")),
    ],
    align=True,
)

#: WriteParams of rawkernels/kvcache/write.cu.
CACHE_WRITE_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in ("k", "v", "k_pages", "v_pages", "page_table", "seq_lens")),
        *((name, np.uint64) for name in ("cu_new", "cos", "sin")),
        *((name, np.int64) for name in ("k_token", "k_head", "v_token", "v_head")),
        ("k_page", np.int64, 3),
        ("v_page", np.int64, 3),
        ("table_stride", np.int64),
        *((name, np.int32) for name in ("total", "batch", "heads", "head_dim", "head_dim_v")),
        *((name, np.int32) for name in ("page_shift", "uniform", "lanes_shift", "pairs")),
        ("interleaved", np.int32),
        *((name, np.uint32, 2) for name in ("by_uniform", "by_k_vecs", "by_v_vecs")),
    ],
    align=True,
)

#: Packs the 9 pointers that CACHE_WRITE_PARAMS begins with.
cache_write_pointers = struct.Struct("9Q").pack
_CACHE_WRITE_SHAPE = struct.Struct("11q 10i 6I")


def divisor(d: int) -> tuple[int, int]:
    """(magic, shift) with ``n // d == n * magic >> shift`` for all n < 2**31 (Granlund &
    Montgomery, 1994)."""
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def cache_write_shape(
    shape: tuple[int, int, int, int],
    strides: tuple[tuple[int, ...], ...],
    table_shape: tuple[int, int],
    *,
    itemsize: int,
    page_size: int,
    uniform: int,
    vec_bytes: int,
    lanes_shift: int,
    pairs: int,
    interleaved: bool,
) -> bytes:
    """Pack CACHE_WRITE_PARAMS after its pointers.

    Parameters
    ----------
    shape : tuple
        Tokens, heads, head_dim and head_dim_v.
    strides : tuple
        Of k, v (token, head, feature) and their pages (page, slot, head, feature), in bytes.
    table_shape : (int, int)
        Sequences, and pages of each.
    itemsize, vec_bytes : int
        Bytes of an element, and of a piece that a thread copies.
    page_size : int
        A power of two.
    uniform, lanes_shift, pairs, interleaved
        As in WriteParams.
    """
    total, heads, head_dim, head_dim_v = shape
    batch, width = table_shape
    return _CACHE_WRITE_SHAPE.pack(
        *(stride // itemsize for array in strides for stride in array[:-1]),
        width,
        total,
        batch,
        heads,
        head_dim,
        head_dim_v,
        page_size.bit_length() - 1,
        uniform,
        lanes_shift,
        pairs,
        interleaved,
        *divisor(max(uniform, 1)),
        *divisor(head_dim * itemsize // vec_bytes),
        *divisor(head_dim_v * itemsize // vec_bytes),
    )


CONTIGUOUS_PAGE_SHIFT = 30  # a contiguous cache is one page a sequence


def decode_shape(
    spec: AttentionSpec,
    strides: tuple[tuple[int, ...], ...],
    alibi_slopes: tuple | None,
    *,
    out_itemsize: int,
    table_stride: int,
    lse_strides: tuple[int, int],
    page_size: int | None,
    first_key: int,
    unit_keys: int,
    num_splits: int | str | None,
    head_lanes: int,
    one_item: bool,
) -> bytes:
    """Pack DECODE_PARAMS after its pointers.

    Parameters
    ----------
    spec : AttentionSpec
        The call, with the cache's capacity as seqlen_k.
    strides : tuple
        Of q, out, k and v, in bytes; k and v have those of pages, or of a contiguous cache.
    alibi_slopes : tuple, optional
        (shape, strides in bytes, dtype).
    out_itemsize : int
        Of the array that is written to.
    table_stride, lse_strides : int, (int, int)
        In elements: of the page table's rows; of lse's batch and heads.
    page_size : int, optional
        None for a contiguous cache.
    first_key : int
        As in DecodeParams.
    unit_keys : int
        Of num_splits="fixed": a power of two.
    num_splits
        As in :func:`cuattn.flash_decode`.
    head_lanes : int
        Blocks that share out the key heads.
    one_item : bool
        As in DecodeParams.
    """
    q, out, k, v = strides
    itemsize = spec.dtype.itemsize
    group = spec.heads_q // spec.heads_kv
    group_magic, group_shift = divisor(group)
    return _DECODE_SHAPE.pack(
        *_row_strides(spec, q),
        *([0] if spec.rows == "ragged" else []),
        *(stride // out_itemsize for stride in out[:-1]),
        *(stride // itemsize for stride in k[:-1]),
        *(stride // itemsize for stride in v[:-1]),
        table_stride,
        _batch_stride(alibi_slopes),
        *lse_strides,
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
        CONTIGUOUS_PAGE_SHIFT if page_size is None else page_size.bit_length() - 1,
        first_key,
        num_splits is not None,
        unit_keys.bit_length() - 1,
        num_splits if isinstance(num_splits, int) else 0,
        spec.heads_kv // head_lanes,
        group,
        group_shift,
        group_magic,
        out_itemsize != itemsize,
        one_item,
    )


def _row_strides(spec: AttentionSpec, strides: tuple[int, ...]) -> list[int]:
    """Element strides of batch, seq and head."""
    elements = [stride // spec.dtype.itemsize for stride in strides[:-1]]
    return [0, *elements] if spec.rows == "ragged" else elements


def _batch_stride(slopes: tuple | None) -> int:
    """Element stride of alibi_slopes' batch; 0 where all sequences have the same."""
    if slopes is None or len(slopes[0]) == 1:
        return 0
    return slopes[1][0] // slopes[2].itemsize


def _broadcast_strides(layout: tuple | None) -> list[int]:
    """Element strides of batch, head, row and column; 0 along an axis that is missing or of length
    1."""
    if layout is None:
        return [0, 0, 0, 0]
    shape, strides, dtype = layout
    own = [
        0 if n == 1 else stride // dtype.itemsize for n, stride in zip(shape, strides, strict=True)
    ]
    return [0] * (4 - len(own)) + own


def _bounded(side: int | None) -> int:
    return UNBOUNDED if side is None else max(-UNBOUNDED, min(side, UNBOUNDED))
