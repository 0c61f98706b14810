"""Latent attention on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import cupy

from cuattn._quantized import QuantizedArray
from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, debug, dispatch
from cuattn.gpu.arguments import Scales
from cuattn.gpu.memory import (
    contiguous,
    contiguous_last_axis,
    copy_to_out,
    pointer,
    scratch,
    target,
    use_device,
)
from cuattn.gpu.params import TAKE_PARAMS
from cuattn.gpu.plan import Plan
from cuattn.gpu.quantization import operand, scale_addresses
from cuattn.gpu.structs import launch_id


def _check(
    function: str, q_latent: Any, _: Any, latent_pages: Any, rope_pages: Any, spec: Any, **more: Any
) -> None:
    debug.check_attention(function, q_latent, latent_pages, rope_pages, spec, **more)


def _check_taken(function: str, pages: Any, page_table: Any, seq_lens: Any, *_: Any) -> None:
    debug.check_table(function, page_table, seq_lens, *pages.shape[:2])


@debug.checks(_check)
def forward(
    q_latent: cupy.ndarray,
    q_rope: cupy.ndarray,
    latent_pages: cupy.ndarray | QuantizedArray,
    rope_pages: cupy.ndarray,
    spec: AttentionSpec,
    *,
    page_table: cupy.ndarray,
    seq_lens: cupy.ndarray,
    cu_seqlens_q: cupy.ndarray | None,
    indices: cupy.ndarray | None,
    sinks: cupy.ndarray | None,
    num_splits: int | str | None,
    out: cupy.ndarray | None,
    return_lse: bool,
) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Compute ``out`` and, where asked, ``lse`` on q_latent's device, on CuPy's current stream,
    without synchronising.

    Parameters and result as of :func:`cuattn.reference.mla.forward`.
    """
    with use_device(q_latent):
        q_latent, q_rope, rope_pages = map(contiguous_last_axis, (q_latent, q_rope, rope_pages))
        stored = operand(latent_pages)
        latents = stored.codes
        sinks = None if sinks is None else contiguous(sinks, spec.acc_dtype)
        inputs = q_latent, q_rope, latents, rope_pages, page_table, seq_lens, cu_seqlens_q
        result = target(out, spec.out_shape, spec.dtype, (*inputs, indices, sinks))
        sparse = indices is not None
        if sparse:  # each query is a sequence to the kernels: they have to lie evenly
            indices, q_latent, q_rope = (
                contiguous(indices),
                contiguous(q_latent),
                contiguous(q_rope),
            )
            if not result.flags.c_contiguous:
                result = contiguous(result)
        lse = lse_rows = None
        if return_lse:
            lse = lse_rows = cupy.empty(spec.lse_shape, spec.acc_dtype)
            if sparse:  # (queries, heads)
                lse_rows = cupy.empty((*spec.out_shape[:-1],), spec.acc_dtype)
                lse = lse_rows.swapaxes(-1, -2)
        if spec.batch and result.size:
            addresses = {
                "q": q_latent.data.ptr,
                "k": latents.data.ptr,
                "v": latents.data.ptr,
                "out": result.data.ptr,
                "lse": pointer(lse_rows),
                "alibi_slopes": 0,
                "sinks": pointer(sinks),
                "page_table": page_table.data.ptr,
                "seq_lens": 0 if sparse else seq_lens.data.ptr,
                "cu_seqlens_q": 0 if sparse else pointer(cu_seqlens_q),
                "latent": latents.data.ptr,
                # Where nothing is rotated, the maps of it are the latents'.
                "q_rope": (q_rope if spec.head_dim > spec.head_dim_v else q_latent).data.ptr,
                "rope": (rope_pages if spec.head_dim > spec.head_dim_v else latents).data.ptr,
                "indices": pointer(indices),
                "lengths": seq_lens.data.ptr,
                "cu_tokens": pointer(cu_seqlens_q),
                **scale_addresses(stored, stored),
            }
            anywhere = q_latent.data.ptr | latents.data.ptr | result.data.ptr
            if spec.head_dim > spec.head_dim_v:
                anywhere |= q_rope.data.ptr | rope_pages.data.ptr
            plans, part_bytes, task_bytes = _plans(
                spec,
                q_latent.data.device_id,
                dispatch.MLA.current(),
                q_latent.strides,
                q_rope.strides,
                latents.strides,
                rope_pages.strides,
                result.strides,
                anywhere % 16 == 0,
                latents.shape[0],
                page_table.strides[0] // page_table.itemsize,
                num_splits,
                indices.shape[-1] if sparse else None,
                stored.scales,
            )
            addresses |= {"parts": 0, "tasks": 0, "call_id": launch_id()}
            if task_bytes:
                # It goes back to the pool when this returns, for what comes next on the stream.
                tasks = scratch(part_bytes + task_bytes)
                addresses["tasks"], addresses["parts"] = tasks.ptr, tasks.ptr + task_bytes
            for plan in plans:
                plan.launch(addresses)
        return copy_to_out(result, out), lse


def prompt(
    q_nope: cupy.ndarray,
    q_rope: cupy.ndarray,
    k_nope: cupy.ndarray,
    rotated: cupy.ndarray,
    v: cupy.ndarray,
    spec: AttentionSpec,
    cu_seqlens: cupy.ndarray,
) -> tuple[cupy.ndarray, cupy.ndarray] | None:
    """Attention of ragged rows whose rotated parts are arrays of their own, (total, heads,
    rope_dim) of the queries and (total, rope_dim) of the keys: out and lse; or None where they have
    to be in q and k."""
    with use_device(q_nope):
        arrays = tuple(map(contiguous_last_axis, (q_nope, q_rope, k_nope, rotated, v)))
        result = cupy.empty(spec.out_shape, spec.dtype)
        plan = _prompt_plan(
            spec,
            q_nope.data.device_id,
            dispatch.current_tiers(),
            rotated.shape[-1],
            tuple(array.strides for array in arrays),
            result.strides,
            all(array.data.ptr % 16 == 0 for array in arrays),
        )
        if plan is None or not result.size:
            return None
        lse = cupy.empty(spec.lse_shape, spec.acc_dtype)
        names = ("q", "q_rope", "k", "k_rope", "v", "out", "lse")
        addresses = dict.fromkeys(
            ("bias", "mask", "alibi_slopes", "sinks", "seq_lens", "page_table"), 0
        )
        addresses |= {
            name: array.data.ptr for name, array in zip(names, (*arrays, result, lse), strict=True)
        }
        addresses |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens.data.ptr)
        plan.launch(addresses)
        return result, lse


@functools.lru_cache(maxsize=4096)
def _prompt_plan(
    spec: AttentionSpec,
    device: int,
    tiers: tuple[dispatch.Tier, ...],
    rope_dim: int,
    strides: tuple[tuple[int, ...], ...],
    out: tuple[int, ...],
    aligned: bool,
) -> Plan | None:
    """The plan of `prompt`; `strides` are those of q_nope, q_rope, k_nope, rotated and v."""
    if not any(isinstance(tier, dispatch.Sm90Forward) for tier in tiers):
        return None
    q, q_rope, k, k_rope, v = strides
    call = dispatch.Call(
        spec,
        compiler.device_arch(device),
        compiler.multiprocessors(device),
        dispatch.usable_strides(spec, dispatch.Strides(q, k, v, out)),
        aligned,
    )
    launch = dispatch.prompt(call, rope_dim, q_rope, k_rope)
    return None if launch is None else Plan(launch, device)


@debug.checks(_check_taken)
def take_tokens(
    pages: cupy.ndarray,
    page_table: cupy.ndarray,
    seq_lens: cupy.ndarray,
    cu_seqlens: cupy.ndarray,
    total: int,
) -> cupy.ndarray:
    """The rows that pages (num_pages, page_size, 1, width) have of each sequence's last tokens, as
    many as cu_seqlens says: (total, width). Indices are contiguous int32, but for the rows of
    page_table."""
    with use_device(pages):
        pages = contiguous_last_axis(pages)
        out = cupy.empty((total, pages.shape[-1]), pages.dtype)
        if out.size:
            plan = _take_plan(
                pages.data.device_id,
                pages.shape,
                pages.strides,
                pages.itemsize,
                (pages.data.ptr | out.data.ptr) % 16 == 0,
                page_table.shape,
                page_table.strides[0] // page_table.itemsize,
                total,
            )
            arrays = {
                "pages": pages,
                "out": out,
                "page_table": page_table,
                "seq_lens": seq_lens,
                "cu_seqlens_q": cu_seqlens,
            }
            plan.launch({name: array.data.ptr for name, array in arrays.items()})
        return out


@functools.lru_cache(maxsize=4096)
def _take_plan(
    device: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    aligned: bool,
    table: tuple[int, ...],
    table_stride: int,
    total: int,
) -> Plan:
    """The plan of `take_tokens`, with the strides of the pages in bytes."""
    num_pages, page_size, _, width = shape
    whole = aligned and all(n % 16 == 0 for n in (*strides[:2], width * itemsize))
    variant = dispatch.mla_prefill.take_variant(16 if whole else itemsize)
    arguments = TAKE_PARAMS.arguments(
        page_stride=strides[0],
        slot_stride=strides[1],
        table_stride=table_stride,
        total=total,
        batch=table[0],
        capacity=table[1] * page_size,
        page_shift=page_size.bit_length() - 1,
        num_pages=num_pages,
        vecs=width * itemsize // variant.config.vec_bytes,
    )
    warps = variant.config.threads // 32
    return Plan(dispatch.Launch(variant, (-(-total // warps),), (arguments,)), device)


def multiply_heads(x: cupy.ndarray, weights: cupy.ndarray) -> cupy.ndarray:
    """As :func:`cuattn.reference.mla.multiply_heads`, by cuBLAS."""
    with use_device(x):
        rows = x.reshape(-1, *x.shape[-2:])
        result = cupy.empty((*rows.shape[:2], weights.shape[2]), x.dtype)
        for head in range(rows.shape[1]):  # CuPy 14 has no batches of bfloat16 matrices
            result[:, head] = rows[:, head] @ weights[head]
        return result.reshape(*x.shape[:-1], weights.shape[2])


@functools.lru_cache(maxsize=4096)
def _plans(
    spec: AttentionSpec,
    device: int,
    tiers: tuple[dispatch.mla.MlaTier, ...],
    q_latent: tuple[int, ...],
    q_rope: tuple[int, ...],
    latent: tuple[int, ...],
    rope: tuple[int, ...],
    out: tuple[int, ...],
    aligned: bool,
    num_pages: int,
    table_stride: int,
    num_splits: int | str | None,
    top_k: int | None,
    scales: Scales | None,
) -> tuple[list[Plan], int, int]:
    """Choose and compile the kernels of a call on a device, which must be the current one; with the
    bytes of memory that they share.

    Parameters
    ----------
    tiers : tuple
        The kernels to choose from.
    q_latent, q_rope, latent, rope, out, aligned, num_pages, table_stride, num_splits, top_k, scales
        As in :class:`cuattn.gpu.dispatch.mla.MlaCall`.
    """
    call = dispatch.mla.MlaCall(
        spec,
        compiler.device_arch(device),
        compiler.multiprocessors(device),
        q_latent,
        q_rope,
        latent,
        rope,
        out,
        aligned,
        num_pages,
        table_stride,
        num_splits,
        top_k,
        scales,
    )
    chosen = dispatch.mla.choose_mla(call, tiers)
    launches = (chosen.main, chosen.combine)
    plans = [Plan(launch, device) for launch in launches if launch is not None]
    return plans, chosen.part_bytes, chosen.task_bytes
