"""Attention on a GPU: one way in for all of it, whatever its rows and keys lie in."""

from __future__ import annotations

import dataclasses
from typing import Any

import cupy
import numpy as np

from cuattn._quantized import codes_of
from cuattn._spec import AttentionSpec
from cuattn.gpu import debug, decoding, quantization
from cuattn.gpu.compiler import CONTRACT_SCORES
from cuattn.gpu.dispatch import MAX_DIM, current_tiers
from cuattn.gpu.memory import (
    contiguous,
    contiguous_last_axis,
    copy_to_out,
    target,
    temporaries,
    use_device,
)
from cuattn.gpu.plan import Scores, attention_plan, layout_key


@debug.checks(debug.check_attention)
def forward(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    spec: AttentionSpec,
    *,
    bias: cupy.ndarray | None = None,
    mask: cupy.ndarray | None = None,
    alibi_slopes: cupy.ndarray | None = None,
    sinks: cupy.ndarray | None = None,
    cu_seqlens_q: cupy.ndarray | None = None,
    cu_seqlens_k: cupy.ndarray | None = None,
    seq_lens: cupy.ndarray | None = None,
    page_table: cupy.ndarray | None = None,
    prefix: int | tuple[cupy.ndarray, cupy.ndarray] | None = None,
    num_splits: int | str | None = None,
    seed: int = 0,
    out: cupy.ndarray | None = None,
    return_lse: bool = False,
    score_mod: str = CONTRACT_SCORES,
) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Compute ``out`` and, where asked, ``lse`` on q's device, on CuPy's current stream, without
    synchronising.

    Parameters and result as of :func:`cuattn.reference.attention.forward`, but `score_mod`: the
    text of a score functor, as rawkernels/tile/score_mod.cuh describes it, in the place of scale,
    softcap, bias, ALiBi and mask. With one of its own a call has no prefix.
    """
    with use_device(q):
        quantized = None
        if spec.quantized and prefix is None and num_splits is None:
            elementwise = bias is not None or mask is not None
            has_score = elementwise or alibi_slopes is not None or score_mod is not CONTRACT_SCORES
            in_kernel = not has_score and quantization.expands_in_kernel(k, v, spec)
            most = 0
            if not in_kernel:
                most = quantization.sequences_to_expand(k, v, spec, elementwise=elementwise)
            if in_kernel:
                rotates = k.rotation is not None and not quantization.rotates_in_kernel(spec)
            else:
                rotates = most > 0 and quantization.rotates_queries(k, spec)
            if rotates:
                q, k = quantization.rotated(q), quantization.unrotated(k)
            if 0 < most < spec.batch:
                return _forward_in_turns(
                    q,
                    k,
                    v,
                    spec,
                    most,
                    out,
                    bias=bias,
                    mask=mask,
                    alibi_slopes=alibi_slopes,
                    seq_lens=seq_lens,
                    page_table=page_table,
                    sinks=sinks,
                    return_lse=return_lse,
                    score_mod=score_mod,
                )
            if most:
                k, v, spec = quantization.expanded(k, v, spec, seq_lens, page_table)
                page_table = None
        if spec.quantized:
            quantized = quantization.operand(k), quantization.operand(v)
            k, v = quantized[0].codes, quantized[1].codes
        q_strides, k_strides, v_strides = q.strides, k.strides, v.strides
        if (
            q_strides[-1] != spec.dtype.itemsize
            or k_strides[-1] != spec.k_itemsize
            or v_strides[-1] != spec.v_itemsize
        ):
            q, k, v = map(contiguous_last_axis, (q, k, v))
            q_strides, k_strides, v_strides = q.strides, k.strides, v.strides
        if bias is not None and bias.dtype not in (spec.dtype, np.float32):
            bias = contiguous(bias, spec.acc_dtype)
        if alibi_slopes is not None:
            alibi_slopes = contiguous(alibi_slopes, spec.acc_dtype)
        if sinks is not None:
            sinks = contiguous(sinks, spec.acc_dtype)
        pieces = spec.head_dim_v > MAX_DIM and spec.keys in ("batched", "ragged")
        inputs = q, k, v, bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seq_lens
        shared = map(codes_of, prefix) if isinstance(prefix, tuple) else ()
        result = target(out, spec.out_shape, spec.dtype, (*inputs, page_table, *shared))
        # A ragged call of no sequences has nothing to compute.
        some = bool(spec.batch and result.size)
        if some and pieces:
            lse = _forward_in_pieces(
                q,
                k,
                v,
                spec,
                result,
                bias=bias,
                mask=mask,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                seed=seed,
                return_lse=return_lse,
                score_mod=score_mod,
            )
            return copy_to_out(result, out), lse
        if not (bias is None and mask is None) and isinstance(prefix, int):
            prefix = None  # what it promises is in the pages anyway
        if prefix is not None and some:
            prefix = decoding.useful_prefix(prefix, spec, alibi_slopes, num_splits, q.device.id)
        if prefix is not None and some:
            lse = decoding.cascade(
                q,
                k,
                v,
                result,
                spec,
                seq_lens=seq_lens,
                page_table=page_table,
                cu_seqlens_q=cu_seqlens_q,
                prefix=prefix,
                quantized=quantized,
                sinks=sinks,
                num_splits=num_splits,
                return_lse=return_lse,
            )
            return copy_to_out(result, out), lse

        lse = cupy.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None
        if some:
            addresses = {
                "q": q.data.ptr,
                "k": k.data.ptr,
                "v": v.data.ptr,
                "out": result.data.ptr,
                "lse": 0 if lse is None else lse.data.ptr,
                "bias": 0 if bias is None else bias.data.ptr,
                "mask": 0 if mask is None else mask.data.ptr,
                "alibi_slopes": 0 if alibi_slopes is None else alibi_slopes.data.ptr,
                "sinks": 0 if sinks is None else sinks.data.ptr,
                "cu_seqlens_q": 0 if cu_seqlens_q is None else cu_seqlens_q.data.ptr,
                "cu_seqlens_k": 0 if cu_seqlens_k is None else cu_seqlens_k.data.ptr,
                "seq_lens": 0 if seq_lens is None else seq_lens.data.ptr,
                "page_table": 0 if page_table is None else page_table.data.ptr,
                "seed": seed,
            }
            scores = None
            arrays = bias is not None or mask is not None or alibi_slopes is not None
            if arrays or score_mod is not CONTRACT_SCORES:
                scores = Scores(
                    layout_key(bias),
                    layout_key(mask),
                    layout_key(alibi_slopes),
                    (addresses["bias"] | addresses["mask"]) % 16 == 0,
                    score_mod,
                )
            k_scales = v_scales = None
            if quantized is not None:
                addresses |= quantization.scale_addresses(*quantized)
                k_scales, v_scales = quantized[0].scales, quantized[1].scales
            anywhere = addresses["q"] | addresses["k"] | addresses["v"] | addresses["out"]
            described = (
                q.data.device_id,
                current_tiers(),
                q_strides,
                k_strides,
                v_strides,
                result.strides,
                anywhere % 16 == 0,
                scores,
                0 if page_table is None else k.shape[0],
                0 if page_table is None else page_table.strides[0] // page_table.itemsize,
                num_splits,
                None,
                k_scales,
                v_scales,
            )
            plan = attention_plan(spec, *described)
            if plan.chosen.parts == 1:
                plan.launch(addresses)
            else:
                steps = {"q": q_strides[0]}
                if page_table is None:
                    steps |= {"k": k_strides[0], "v": v_strides[0]}
                else:
                    steps["page_table"] = page_table.strides[0]
                if seq_lens is not None:
                    steps["seq_lens"] = seq_lens.strides[0]
                decoding.launch_in_parts(
                    lambda piece: attention_plan(piece, *described),
                    addresses,
                    steps,
                    spec,
                    result,
                    lse,
                )
        return copy_to_out(result, out), lse


def _forward_in_turns(
    q: cupy.ndarray,
    k: Any,
    v: Any,
    spec: AttentionSpec,
    most: int,
    out: cupy.ndarray | None,
    *,
    bias: cupy.ndarray | None,
    mask: cupy.ndarray | None,
    alibi_slopes: cupy.ndarray | None,
    seq_lens: cupy.ndarray | None,
    page_table: cupy.ndarray | None,
    return_lse: bool,
    **options: Any,
) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Compute the results of at most `most` sequences at a time, of batched rows."""
    inputs = q, codes_of(k), codes_of(v), bias, mask, alibi_slopes, seq_lens, page_table
    result = target(out, spec.out_shape, spec.dtype, (*inputs, options["sinks"]))
    lse = cupy.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None

    def own(array: Any, axes: int = 4) -> Any:
        """What some sequences have of an array with a batch as the first of its `axes`."""
        shared = array is None or array.ndim < axes or len(array) == 1
        return array if shared else array[some]

    for begin in range(0, spec.batch, most):
        some = slice(begin, min(begin + most, spec.batch))
        with temporaries():
            _, own_lse = forward(
                q[some],
                *((k, v) if page_table is not None else (k[some], v[some])),
                dataclasses.replace(spec, batch=some.stop - begin),
                bias=own(bias),
                mask=own(mask),
                alibi_slopes=own(alibi_slopes, 2),
                seq_lens=own(seq_lens, 1),
                page_table=own(page_table, 2),
                out=result[some],
                return_lse=return_lse,
                **options,
            )
        if lse is not None:
            lse[some] = own_lse
    return copy_to_out(result, out), lse


def _forward_in_pieces(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    spec: AttentionSpec,
    result: cupy.ndarray,
    **options: Any,
) -> cupy.ndarray | None:
    """Compute `result` for `MAX_DIM` features of the values at a time, as many as a kernel keeps
    for each query; return lse. Each piece computes all scores."""
    lse = None
    for begin in range(0, spec.head_dim_v, MAX_DIM):
        columns = slice(begin, min(begin + MAX_DIM, spec.head_dim_v))
        piece = dataclasses.replace(spec, head_dim_v=columns.stop - columns.start)
        _, piece_lse = forward(q, k, v[..., columns], piece, out=result[..., columns], **options)
        lse = piece_lse if lse is None else lse
    return lse
