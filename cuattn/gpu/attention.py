"""Attention over whole sequences on a GPU: tier, launch."""

from __future__ import annotations

import dataclasses
import functools

import cupy
import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, dispatch, sm90, tensormap
from cuattn.gpu.memory import contiguous, copy_to_out, pointer, scratch, target, use_device
from cuattn.gpu.params import forward_pointers, forward_shape
from cuattn.gpu.plan import Plan, layout_key


@dataclasses.dataclass(frozen=True)
class ForwardPlan(Plan):
    """A plan of the forward kernels."""

    sm90: sm90.Plan | None  # where the kernel is attention/forward_sm90.cu


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
    out: cupy.ndarray | None = None,
    return_lse: bool = False,
) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Compute ``out`` and, where asked, ``lse`` on q's device, on CuPy's current stream, without
    synchronising.

    Parameters and result as in :func:`cuattn.flash_attention`; q, k, v have a batch axis unless
    `spec` is varlen, and contiguous head_dims.
    """
    with use_device(q):
        if bias is not None and bias.dtype not in (spec.dtype, np.float32):
            bias = contiguous(bias, spec.acc_dtype)
        alibi_slopes = contiguous(alibi_slopes, spec.acc_dtype)
        sinks = contiguous(sinks, spec.acc_dtype)
        result = target(out, spec.out_shape, spec.dtype)
        lse = cupy.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None
        if spec.batch and result.size:  # varlen of no sequences: nothing to compute
            pointers = (q.data.ptr, k.data.ptr, v.data.ptr, result.data.ptr)
            plan = _plan(
                spec,
                q.device.id,
                (q.strides, k.strides, v.strides, result.strides),
                layout_key(bias),
                layout_key(mask),
                layout_key(alibi_slopes),
                (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % 16 == 0,
                (pointer(bias) | pointer(mask)) % 16 == 0,
            )
            params = forward_pointers(
                *pointers,
                pointer(lse),
                pointer(bias),
                pointer(mask),
                pointer(alibi_slopes),
                pointer(sinks),
                pointer(cu_seqlens_q),
                pointer(cu_seqlens_k),
            )
            if plan.sm90 is None:
                plan.launch(params)
            else:
                workspace = scratch(plan.sm90.scratch_bytes)
                mapped = (*pointers[:3], pointer(bias), pointer(mask))
                plan.launch(params, plan.sm90.argument(mapped, workspace.ptr))
        return copy_to_out(result, out), lse


def _meaningful(
    spec: AttentionSpec, strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Strides of q, k, v and out. That of an axis of length 1 may be anything: here it is such as
    any kernel can use."""
    batch = () if spec.rows == "ragged" else (spec.batch,)
    rows_q, rows_k = (*batch, spec.seqlen_q, spec.heads_q), (*batch, spec.seqlen_k, spec.heads_kv)
    used = []
    for array, lengths in zip(strides, (rows_q, rows_k, rows_k, rows_q), strict=True):
        span = 16 * max([1, *(abs(n) // 16 for n in array)])
        used.append(
            (*(span if n == 1 else s for n, s in zip(lengths, array[:-1], strict=True)), array[-1])
        )
    return tuple(used)


@functools.lru_cache(maxsize=4096)
def _plan(
    spec: AttentionSpec,
    device: int,
    strides: tuple[tuple[int, ...], ...],
    bias: tuple | None,
    mask: tuple | None,
    alibi_slopes: tuple | None,
    aligned: bool,
    score_aligned: bool,
) -> ForwardPlan:
    """Choose and compile the kernel of a call, and pack what stays the same between calls like
    it."""
    strides = _meaningful(spec, strides)
    launch = dispatch.forward(
        spec,
        compiler.device_arch(device),
        has_score=not (bias is None and mask is None and alibi_slopes is None),
        elementwise=not (bias is None and mask is None),
        aligned=aligned and all(tensormap.addressable(array[:-1]) for array in strides),
    )
    config, grid, plan = launch.variant.config, launch.grid, None
    if isinstance(config, dispatch.Sm90ForwardConfig):
        blocks = min(grid[0], compiler.multiprocessors(device))
        grid = (blocks,)
        plan = sm90.plan(spec, config, blocks, strides, bias, mask, score_aligned=score_aligned)
    return ForwardPlan(
        kernel=compiler.kernel(launch.variant, device),
        grid=grid,
        block=(config.threads,),
        smem_bytes=config.smem_bytes,
        shape=forward_shape(spec, strides, bias, mask, alibi_slopes),
        sm90=plan,
    )
