"""What the fields of kernels' argument structs are for a call.

What differs between launches of calls alike (addresses, tensor maps, a launch's id) is filled in at
each launch; the functions here pack the rest once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuattn._quantized import format_number
from cuattn._spec import AttentionSpec
from cuattn.gpu.params import (
    BACKWARD_PARAMS,
    CACHE_PARAMS,
    CACHE_WRITE_PARAMS,
    DECODE_PARAMS,
    DROPOUT_PARAMS,
    FORWARD_PARAMS,
    JVP_PARAMS,
    MAX_PAIRS,
    MLA_PARAMS,
    QUANTIZED_WRITE_PARAMS,
    ROPE_PARAMS,
    SCORE_PARAMS,
    UNBOUNDED,
    divisor,
)
from cuattn.gpu.structs import Arguments

CONTIGUOUS_PAGE_SHIFT = 30  # a contiguous cache is one page a sequence


class Scales(NamedTuple):
    """How the scales of a call's keys or values lie. Strides are of page (or sequence), token, head
    and group, in elements; 0 along an axis on which all share a scale."""

    strides: tuple[int, int, int, int]
    minimum_strides: tuple[int, int, int, int]  # zeros where there are no minima
    groups: int  # of features, each with a scale
    is_float32: bool  # else bfloat16
    has_minimum: bool
    paired: bool  # a minimum is in the two bytes behind its scale, both in an aligned word
    has_offset: bool
    rotated: bool
    aligned: bool  # the address of the scales is a multiple of 16


def forward_arguments(
    spec: AttentionSpec,
    strides: tuple[tuple[int, ...], ...],
    bias: tuple | None = None,
    mask: tuple | None = None,
    alibi_slopes: tuple | None = None,
) -> Arguments:
    """Pack FORWARD_PARAMS but for what each launch fills in.

    Parameters
    ----------
    spec : AttentionSpec
        The call.
    strides : tuple
        Of q, k, v and out, in bytes.
    bias, mask, alibi_slopes : tuple, optional
        Their (shape, strides in bytes, dtype).
    """
    q, k, v, out = strides
    group = max(1, spec.heads_q // spec.heads_kv)  # gradients may be of no query heads
    return FORWARD_PARAMS.arguments(
        q_stride=_row_strides(spec, q),
        k_stride=_row_strides(spec, k),
        v_stride=_row_strides(spec, v),
        out_stride=_row_strides(spec, out),
        alibi_batch_stride=_batch_stride(alibi_slopes),
        scale=spec.scale,
        softcap=spec.softcap,
        batch=spec.batch,
        seqlen_q=spec.seqlen_q,
        seqlen_k=spec.seqlen_k,
        heads_q=spec.heads_q,
        heads_kv=spec.heads_kv,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        window_left=_bounded(spec.window_left),
        window_right=_bounded(spec.window_right),
        **_score_fields(bias, mask),
        group=group,
        queries_of_64_rows=64 // group,
        group_magic=-(-(1 << 16) // group),
    )


def cache_arguments(spec: AttentionSpec, *, table_stride: int, num_pages: int) -> Arguments:
    """Pack CACHE_PARAMS but for what each launch fills in; `table_stride` in elements, `num_pages`
    of paged keys."""
    return CACHE_PARAMS.arguments(
        table_stride=table_stride,
        page_shift=spec.page_size.bit_length() - 1 if spec.page_size else CONTIGUOUS_PAGE_SHIFT,
        num_pages=num_pages if spec.page_size else spec.batch,
    )


def score_arguments(bias: tuple | None, mask: tuple | None) -> Arguments:
    """Pack SCORE_PARAMS but for what each launch fills in; bias and mask as in
    :func:`forward_arguments`."""
    return SCORE_PARAMS.arguments(**_score_fields(bias, mask))


def dropout_arguments(spec: AttentionSpec) -> Arguments:
    """Pack DROPOUT_PARAMS but for the seed, which each launch fills in."""
    return DROPOUT_PARAMS.arguments(
        scale=spec.dropout_scale,
        threshold=spec.dropout_threshold,
    )


def backward_arguments(
    spec: AttentionSpec,
    dout: tuple[int, ...],
    bias_shape: tuple[int, ...],
    *,
    alibi_batched: bool,
    alibi_slots: int,
    alibi_tile: int,
) -> Arguments:
    """Pack BACKWARD_PARAMS but for what each launch fills in.

    Parameters
    ----------
    spec : AttentionSpec
        The forward call.
    dout : tuple
        Its strides, in bytes.
    bias_shape : tuple of 4 int
        Of the bias, with axes of length 1 before its own.
    alibi_batched, alibi_slots, alibi_tile
        As in BackwardParams.
    """
    batch, heads, rows, cols = bias_shape
    return BACKWARD_PARAMS.arguments(
        dout_stride=_row_strides(spec, dout),
        bias_batch=batch,
        bias_heads=heads,
        bias_rows=rows,
        bias_cols=cols,
        alibi_batched=alibi_batched,
        alibi_slots=alibi_slots,
        alibi_tile=alibi_tile,
    )


def jvp_arguments(spec: AttentionSpec, tangents: tuple[tuple[int, ...], ...]) -> Arguments:
    """Pack JVP_PARAMS but for what each launch fills in; `tangents` are the byte strides of the
    direction's q, k and v."""
    q, k, v = (_row_strides(spec, strides) for strides in tangents)
    return JVP_PARAMS.arguments(tangent_q_stride=q, tangent_k_stride=k, tangent_v_stride=v)


def quantized_write_arguments(
    formats: tuple[str, str],
    head_dims: tuple[int, int],
    scales: tuple[Scales | None, Scales | None],
    is_static: tuple[bool, bool],
    heads: int,
) -> Arguments:
    """Pack QUANTIZED_WRITE_PARAMS but for what each launch fills in.

    Parameters
    ----------
    formats, head_dims, scales, is_static : tuple
        Of keys and of values; scales that are given are static.
    heads : int
        Key heads.
    """
    fields: dict[str, Any] = {"by_heads": divisor(heads)}
    for each in zip("kv", formats, head_dims, scales, is_static, strict=True):
        operand, format, head_dim, of, static = each
        fields |= _scale_fields(operand, format, head_dim, of)
        group = fields[f"{operand}_group"]
        fields[f"{operand}_group_shift"] = group.bit_length() - 1
        fields[f"{operand}_is_static"] = static
    return QUANTIZED_WRITE_PARAMS.arguments(**fields)


def cache_write_arguments(
    shape: tuple[int, int, int, int],
    strides: tuple[tuple[int, ...], ...],
    table_shape: tuple[int, int],
    *,
    itemsizes: tuple[int, ...],
    page_slots: int,
    num_pages: int,
    uniform: int,
    vec_bytes: int,
    lanes_shift: int,
    pairs: int,
    interleaved: bool,
    table_stride: int,
    max_position: int,
) -> Arguments:
    """Pack CACHE_WRITE_PARAMS but for what each launch fills in.

    Parameters
    ----------
    shape : tuple
        Tokens, heads, head_dim and head_dim_v.
    strides : tuple
        Of k, v (token, head, feature) and their pages (page, slot, head, feature), in bytes.
    table_shape : (int, int)
        Sequences, and pages of each.
    itemsizes : tuple of int
        Bytes of an element of each of them; 1 for codes.
    vec_bytes : int
        Bytes of a vector that a thread copies.
    page_slots, num_pages : int
        Tokens of a page, a power of two; of a contiguous cache a sequence's.
    uniform, lanes_shift, pairs, interleaved, table_stride, max_position
        As in WriteParams.
    """
    total, heads, head_dim, head_dim_v = shape
    batch, width = table_shape
    k, v, k_pages, v_pages = (
        [n // itemsize for n in array[:-1]]
        for array, itemsize in zip(strides, itemsizes, strict=True)
    )
    return CACHE_WRITE_PARAMS.arguments(
        k_token=k[0],
        k_head=k[1],
        v_token=v[0],
        v_head=v[1],
        k_page=k_pages,
        v_page=v_pages,
        table_stride=table_stride,
        total=total,
        batch=batch,
        heads=heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_shift=page_slots.bit_length() - 1,
        num_pages=num_pages,
        capacity=min(width * page_slots, (1 << 31) - 1),
        uniform=uniform,
        lanes_shift=lanes_shift,
        pairs=pairs,
        interleaved=interleaved,
        by_uniform=divisor(max(uniform, 1)),
        by_k_vecs=divisor(head_dim * itemsizes[0] // vec_bytes),
        by_v_vecs=divisor(head_dim_v * itemsizes[1] // vec_bytes),
        page_slots=page_slots,
        max_position=max_position,
    )


def rope_arguments(
    shape: tuple[int, int, int, int],
    strides: tuple[tuple[int, ...], ...],
    *,
    itemsize: int,
    wide: bool,
    turns: tuple[int, ...],
    scale: float,
    interleaved: bool,
    heads_per_block: int,
    lanes_shift: int,
) -> Arguments:
    """Pack ROPE_PARAMS but for what each launch fills in.

    Parameters
    ----------
    shape : tuple
        Of x: batch, seqlen, heads and head_dim.
    strides : tuple
        Of x, out and positions, in bytes.
    itemsize : int
        Bytes of an element of x.
    wide : bool
        Whether positions have 8 bytes, not 4.
    turns, scale, interleaved, heads_per_block, lanes_shift
        As in RopeParams.
    """
    batch, seqlen, heads, head_dim = shape
    x, out = ([stride // itemsize for stride in array[:-1]] for array in strides[:2])
    position_batch, position_seq = (stride // (8 if wide else 4) for stride in strides[2])
    return ROPE_PARAMS.arguments(
        **dict(zip(("x_batch", "x_seq", "x_head"), x, strict=True)),
        **dict(zip(("out_batch", "out_seq", "out_head"), out, strict=True)),
        position_batch=position_batch,
        position_seq=position_seq,
        scale=scale,
        tokens=batch * seqlen,
        seqlen=seqlen,
        heads=heads,
        head_dim=head_dim,
        pairs=len(turns),
        heads_per_block=heads_per_block,
        lanes_shift=lanes_shift,
        interleaved=interleaved,
        wide=wide,
        turns=[*turns, *[0] * (MAX_PAIRS - len(turns))],
    )


def decode_arguments(
    spec: AttentionSpec,
    strides: tuple[tuple[int, ...], ...],
    alibi_slopes: tuple | None,
    *,
    out_itemsize: int,
    table_stride: int,
    lse_strides: tuple[int, int],
    first_key: int,
    num_pages: int,
    kv_block_shift: int,
    num_splits: int | str | None,
    heads_per_block: int,
    single_tile: bool,
    max_queries: int = UNBOUNDED,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> Arguments:
    """Pack DECODE_PARAMS but for what each launch fills in.

    Parameters
    ----------
    spec : AttentionSpec
        The call, with the cache's capacity as seqlen_k.
    strides : tuple
        Of q, k, v and out, in bytes; k and v have those of pages, or of a contiguous cache.
    alibi_slopes : tuple, optional
        (shape, strides in bytes, dtype).
    out_itemsize : int
        Of the array that is written to.
    table_stride, lse_strides : int, (int, int)
        In elements: of the page table's rows; of lse's batch and heads.
    first_key : int
        As in DecodeParams.
    num_pages : int
        Of paged keys.
    kv_block_shift : int
        As in DecodeParams.
    num_splits
        As in :func:`cuattn.flash_decode`.
    heads_per_block : int
        As in DecodeParams.
    single_tile : bool
        As in DecodeParams.
    max_queries : int, optional
        As in DecodeParams.
    k_scales, v_scales : Scales, optional
        Of keys and values that are codes.
    """
    q, k, v, out = strides
    itemsize = spec.dtype.itemsize
    group = spec.heads_q // spec.heads_kv
    group_magic, group_shift = divisor(group)
    return DECODE_PARAMS.arguments(
        q_stride=_row_strides(spec, q),
        out_stride=[
            *([0] if spec.rows == "ragged" else []),
            *(stride // out_itemsize for stride in out[:-1]),
        ],
        k_stride=[stride // spec.k_itemsize for stride in k[:-1]],
        v_stride=[stride // spec.v_itemsize for stride in v[:-1]],
        table_stride=table_stride,
        alibi_batch_stride=_batch_stride(alibi_slopes),
        lse_batch_stride=lse_strides[0],
        lse_head_stride=lse_strides[1],
        scale=spec.scale,
        softcap=spec.softcap,
        batch=spec.batch,
        seqlen_q=spec.seqlen_q,
        capacity=spec.seqlen_k if num_pages or spec.keys != "paged" else 0,
        heads_q=spec.heads_q,
        heads_kv=spec.heads_kv,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        window_left=_bounded(spec.window_left),
        window_right=_bounded(spec.window_right),
        page_shift=spec.page_size.bit_length() - 1 if spec.page_size else CONTIGUOUS_PAGE_SHIFT,
        num_pages=num_pages if spec.page_size else spec.batch,
        first_key=first_key,
        fixed_splits=num_splits is not None,
        kv_block_shift=kv_block_shift,
        num_splits=num_splits if isinstance(num_splits, int) else 0,
        heads_per_block=heads_per_block,
        group=group,
        group_shift=group_shift,
        group_magic=group_magic,
        out_is_acc=out_itemsize != itemsize,
        single_tile=single_tile,
        max_queries=max_queries,
        **_scale_fields("k", spec.k_format, spec.head_dim, k_scales),
        **_scale_fields("v", spec.v_format, spec.head_dim_v, v_scales),
    )


def mla_arguments(
    spec: AttentionSpec,
    q_rope: tuple[int, ...],
    rope: tuple[int, ...],
    *,
    index_stride: int,
    row_tiles: int,
    query_rows: int = 0,
    key_rows: int = 0,
    merges_parts: bool = False,
) -> Arguments:
    """Pack MLA_PARAMS but for what each launch fills in.

    Parameters
    ----------
    spec : AttentionSpec
        The call, as :mod:`cuattn.mla` has it.
    q_rope, rope : tuple
        Strides of the queries' and the pages' rotated parts, in bytes.
    index_stride : int
        Elements from row to row of the indices; 0 without.
    row_tiles, query_rows, key_rows, merges_parts : int
        As in MlaParams.
    """
    itemsize = spec.dtype.itemsize
    return MLA_PARAMS.arguments(
        q_rope_stride=_row_strides(spec, q_rope),
        rope_stride=[stride // itemsize for stride in rope[:-1]],
        index_stride=index_stride,
        tokens=spec.seqlen_q,
        sequences=spec.batch,
        row_tiles=row_tiles,
        window_left=_bounded(spec.window_left),
        window_right=_bounded(spec.window_right),
        capacity=spec.seqlen_k,
        query_rows=query_rows,
        key_rows=key_rows,
        merges_parts=merges_parts,
    )


def _scale_fields(
    operand: str, format: str, head_dim: int, scales: Scales | None
) -> dict[str, Any]:
    """The fields of DecodeParams for the scales of keys ("k") or of values ("v"); pointers are
    filled at each launch, but where there can be none."""
    fields: dict[str, Any] = {
        "format": format_number(format),
        "group": head_dim if scales is None else head_dim // scales.groups,
        "scale_is_float": scales is not None and scales.is_float32,
        "rotated": scales is not None and scales.rotated,
        "scale_stride": (0, 0, 0, 0) if scales is None else scales.strides,
        "minimum_stride": (0, 0, 0, 0) if scales is None else scales.minimum_strides,
    }
    if scales is None:
        fields |= {"scale": 0, "minimum": 0, "offset": 0}
    return {f"{operand}_{name}": value for name, value in fields.items()}


def _row_strides(spec: AttentionSpec, strides: tuple[int, ...]) -> list[int]:
    """Element strides of batch (or page), seq and head; 0 for a batch that ragged arrays have
    not."""
    elements = [stride // spec.dtype.itemsize for stride in strides[:-1]]
    return [0] * (3 - len(elements)) + elements


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


def _score_fields(bias: tuple | None, mask: tuple | None) -> dict[str, Any]:
    """What kernels are told of bias and mask beside their addresses."""
    given = [layout[0] for layout in (bias, mask) if layout is not None]
    rows, cols = (max((shape[-n] for shape in given if len(shape) >= n), default=1) for n in (2, 1))
    return {
        "bias_stride": _broadcast_strides(bias),
        "mask_stride": _broadcast_strides(mask),
        "bias_is_float32": bias is not None and bias[2] == np.float32,
        "score_rows": rows,
        "score_cols": cols,
    }


def _bounded(side: int | None) -> int:
    return UNBOUNDED if side is None else max(-UNBOUNDED, min(side, UNBOUNDED))
