"""Attention over whole sequences on a GPU: tier, launch."""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any

import cupy
import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, tiles

UNBOUNDED = 1 << 30  # kUnbounded of rawkernels/attention/params.cuh

#: ForwardParams of rawkernels/attention/params.cuh, field by field: the pointers, then what a plan can hold.
_POINTERS = struct.Struct("11Q")
_SHAPE = struct.Struct("12q 8q q 2d 7i 2i i")
_PARAMS_BYTES = -(-(_POINTERS.size + _SHAPE.size) // 8) * 8
_PARAMS_DTYPE = np.dtype((np.void, _PARAMS_BYTES))


@dataclasses.dataclass(frozen=True)
class Plan:
    """All of a launch but the pointers."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int
    shape: bytes  # ForwardParams after its pointers


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
    """Compute ``out`` and, where asked, ``lse`` on q's device, on CuPy's current stream, without synchronising.

    Parameters and result as in :func:`cuattn.flash_attention`; q, k, v have a batch axis unless `spec` is varlen, and
    contiguous head_dims.
    """
    device = q.device.id
    if device != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device):
            return forward(
                q,
                k,
                v,
                spec,
                bias=bias,
                mask=mask,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                out=out,
                return_lse=return_lse,
            )
    if bias is not None and bias.dtype not in (spec.dtype, np.float32):
        bias = bias.astype(spec.acc_dtype)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.astype(spec.acc_dtype, copy=False)
    if sinks is not None:
        sinks = cupy.ascontiguousarray(sinks, dtype=spec.acc_dtype)

    target = out
    if out is None or out.strides[-1] != out.itemsize:
        target = cupy.empty(spec.out_shape, spec.dtype)
    lse = cupy.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None
    if spec.batch and target.size:  # varlen of no sequences: nothing to compute
        plan = _plan(
            spec,
            device,
            q.strides,
            k.strides,
            v.strides,
            target.strides,
            _layout(bias),
            _layout(mask),
            _layout(alibi_slopes),
            (q.data.ptr | k.data.ptr | v.data.ptr | target.data.ptr) % 16 == 0,
        )
        pointers = _POINTERS.pack(
            q.data.ptr,
            k.data.ptr,
            v.data.ptr,
            target.data.ptr,
            _pointer(lse),
            _pointer(bias),
            _pointer(mask),
            _pointer(alibi_slopes),
            _pointer(sinks),
            _pointer(cu_seqlens_q),
            _pointer(cu_seqlens_k),
        )
        params = np.frombuffer(pointers + plan.shape, _PARAMS_DTYPE)[0]
        plan.kernel(plan.grid, plan.block, (params,), shared_mem=plan.smem_bytes)
    if out is not None and target is not out:
        out[...] = target
        target = out
    return target, lse


def _pointer(array: cupy.ndarray | None) -> int:
    return 0 if array is None else array.data.ptr


def _layout(array: cupy.ndarray | None) -> tuple | None:
    return None if array is None else (array.shape, array.strides, array.dtype)


@functools.lru_cache(maxsize=4096)
def _plan(
    spec: AttentionSpec,
    device: int,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    bias: tuple | None,
    mask: tuple | None,
    alibi_slopes: tuple | None,
    aligned: bool,
) -> Plan:
    """Choose and compile the kernel of a call, and pack what stays the same between calls like it."""
    itemsize = spec.dtype.itemsize

    def strides(array: tuple[int, ...]) -> list[int]:  # batch, seq, head
        elements = [stride // itemsize for stride in array[:-1]]
        return [0, *elements] if spec.varlen else elements

    slopes_batch = 0
    if alibi_slopes is not None and len(alibi_slopes[0]) == 2:
        slopes_batch = alibi_slopes[1][0] // alibi_slopes[2].itemsize
    shape = _SHAPE.pack(
        *strides(q_strides),
        *strides(k_strides),
        *strides(v_strides),
        *strides(out_strides),
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
        int(bias is not None and bias[2] == np.float32),
    )
    every_stride = (*q_strides[:-1], *k_strides[:-1], *v_strides[:-1], *out_strides[:-1])
    launch = tiles.forward(
        spec,
        compiler.device_arch(device),
        has_score=not (bias is None and mask is None and alibi_slopes is None),
        aligned=aligned and all(stride % 16 == 0 for stride in every_stride),
    )
    config = launch.variant.config
    return Plan(
        kernel=compiler.kernel(launch.variant, device),
        grid=launch.grid,
        block=(config.threads,),
        smem_bytes=config.smem_bytes,
        shape=shape,
    )


def _bounded(side: int | None) -> int:
    return UNBOUNDED if side is None else max(-UNBOUNDED, min(side, UNBOUNDED))


def _broadcast_strides(layout: tuple | None) -> list[int]:
    """Element strides over (batch, head, row, column); 0 along an axis that is missing or of length 1."""
    if layout is None:
        return [0, 0, 0, 0]
    shape, strides, dtype = layout
    own = [
        0 if n == 1 else stride // dtype.itemsize for n, stride in zip(shape, strides, strict=True)
    ]
    return [0] * (4 - len(own)) + own
