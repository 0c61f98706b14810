"""Gradients of attention on a GPU."""

from __future__ import annotations

import functools
import operator
from typing import Any

import cupy
import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, debug, dispatch
from cuattn.gpu.memory import contiguous, pointer, scratch_array, use_device
from cuattn.gpu.plan import Plan, layout_key


def _check(
    function: str, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *spec: Any, **more: Any
) -> None:
    debug.check_attention(function, q, k, v, *spec, **more)


@debug.checks(_check)
def backward(
    dout: cupy.ndarray,
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    out: cupy.ndarray,
    lse: cupy.ndarray,
    spec: AttentionSpec,
    *,
    dlse: cupy.ndarray | None = None,
    bias: cupy.ndarray | None = None,
    mask: cupy.ndarray | None = None,
    alibi_slopes: cupy.ndarray | None = None,
    sinks: cupy.ndarray | None = None,
    cu_seqlens_q: cupy.ndarray | None = None,
    cu_seqlens_k: cupy.ndarray | None = None,
    seed: int = 0,
    deterministic: bool = False,
    grad_bias: bool = False,
    grad_alibi: bool = False,
) -> tuple[cupy.ndarray | None, ...]:
    """Compute dq, dk, dv, dbias, dsinks and dalibi on q's device, on CuPy's current stream, without
    synchronising.

    Parameters and result as of :func:`cuattn.reference.gradients.backward`; head_dims are
    contiguous in dout, q, k, v and out. dq may be summed in any order unless `deterministic`; every
    other result has one order of its sums.
    """
    with use_device(q):
        acc = spec.acc_dtype
        # Rows of no sequence have gradient 0, and with no queries, or no sequences, there is
        # nothing to launch.
        some = bool(q.size and spec.batch)
        new = cupy.zeros if spec.rows == "ragged" or not some else cupy.empty
        dq, dk, dv = (new(array.shape, spec.dtype) for array in (q, k, v))
        dbias = new(bias.shape, bias.dtype) if grad_bias and bias is not None else None
        dsinks = None if sinks is None else new(sinks.shape, acc)
        dalibi = None
        if grad_alibi and alibi_slopes is not None:
            dalibi = new(alibi_slopes.shape, alibi_slopes.dtype)
        results = dq, dk, dv, dbias, dsinks, dalibi
        if not some:
            return results

        if bias is not None and bias.dtype not in (spec.dtype, np.float32):
            bias = contiguous(bias, acc)
        alibi_slopes, sinks = contiguous(alibi_slopes, acc), contiguous(sinks, acc)
        lse, dlse = contiguous(lse), contiguous(dlse)
        anywhere = q.data.ptr | k.data.ptr | v.data.ptr | dout.data.ptr
        plans, alibi_slots, workspaces = _backward_plans(
            spec,
            q.data.device_id,
            dispatch.BACKWARD.current(),
            (q.strides, k.strides, v.strides, out.strides, dout.strides),
            layout_key(bias),
            layout_key(mask),
            layout_key(alibi_slopes),
            (
                *(grad_bias, grad_alibi, sinks is not None, anywhere % 16 == 0),
                *(deterministic, out.data.ptr % 16 == 0),
            ),
        )
        # What kernels write in the accumulators' type before it is rounded.
        sums = [
            array if array is None or array.dtype == acc else scratch_array(array.shape, acc)
            for array in (dbias, dalibi)
        ]
        delta = scratch_array(spec.lse_shape, acc)
        parts = None
        if grad_alibi:
            rows = spec.heads_q if spec.rows == "ragged" else spec.batch * spec.heads_q
            parts = scratch_array((rows, alibi_slots), np.dtype(np.float64))
        addresses: dict[str, Any] = {
            "q": q.data.ptr,
            "k": k.data.ptr,
            "v": v.data.ptr,
            "out": out.data.ptr,
            "lse": lse.data.ptr,
            "bias": pointer(bias),
            "mask": pointer(mask),
            "alibi_slopes": pointer(alibi_slopes),
            "sinks": pointer(sinks),
            "cu_seqlens_q": pointer(cu_seqlens_q),
            "cu_seqlens_k": pointer(cu_seqlens_k),
            "dout": dout.data.ptr,
            "dlse": pointer(dlse),
            "dq": dq.data.ptr,
            "dk": dk.data.ptr,
            "dv": dv.data.ptr,
            "delta": delta.data.ptr,
            "dbias": pointer(sums[0]),
            "dsinks": pointer(dsinks),
            "dalibi": pointer(sums[1]),
            "alibi_parts": pointer(parts),
            "seed": seed,
            "nonfinite": 0,
            "dq_sums": 0,
            "opened": 0,
        }
        shared = [scratch_array((n // 4,), np.dtype(np.float32)) for _, n in workspaces]
        addresses |= {name: a.data.ptr for (name, _), a in zip(workspaces, shared, strict=True)}
        for plan in plans:
            plan.launch(addresses)
        for array, total in zip((dbias, dalibi), sums, strict=True):
            if array is not total:
                array[...] = total
        return results


@functools.lru_cache(maxsize=4096)
def _backward_plans(
    spec: AttentionSpec,
    device: int,
    tiers: tuple[dispatch.backward.BackwardTier, ...],
    strides: tuple[tuple[int, ...], ...],
    bias: tuple | None,
    mask: tuple | None,
    alibi_slopes: tuple | None,
    options: tuple[bool, ...],
) -> tuple[tuple[Plan, ...], int, tuple[tuple[str, int], ...]]:
    """Choose and compile the kernels of a backward call, and pack what stays the same between calls
    like it; how many blocks leave a part of dalibi for each query head; and the names and bytes of
    what the kernels share."""
    *of_forward, dout = strides
    call = dispatch.BackwardCall(
        _call(spec, device, tuple(of_forward), bias, mask, alibi_slopes),
        dispatch.usable_strides(spec, dispatch.Strides(*of_forward[:3], dout)).out,
        *options,
    )
    chosen = dispatch.choose_backward(call, tiers)
    plans = tuple(Plan(launch, device) for launch in chosen.launches)
    return plans, chosen.alibi_slots, chosen.workspaces


def _call(
    spec: AttentionSpec,
    device: int,
    strides: tuple[tuple[int, ...], ...],
    bias: tuple | None,
    mask: tuple | None,
    alibi_slopes: tuple | None,
) -> dispatch.Call:
    return dispatch.Call(
        spec,
        compiler.device_arch(device),
        compiler.multiprocessors(device),
        dispatch.usable_strides(spec, dispatch.Strides(*strides)),
        bias=bias and dispatch.Layout(*bias),
        mask=mask and dispatch.Layout(*mask),
        alibi_slopes=alibi_slopes and dispatch.Layout(*alibi_slopes),
    )


def jvp(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    dq: cupy.ndarray,
    dk: cupy.ndarray,
    dv: cupy.ndarray,
    spec: AttentionSpec,
    *,
    bias: cupy.ndarray | None = None,
    mask: cupy.ndarray | None = None,
    alibi_slopes: cupy.ndarray | None = None,
    sinks: cupy.ndarray | None = None,
    seed: int = 0,
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Compute out and its derivative in the direction (dq, dk, dv), as :func:`backward`.

    Parameters and result as of :func:`cuattn.reference.gradients.jvp`; head_dims are contiguous.
    """
    with use_device(q):
        out, dout = (cupy.empty(spec.out_shape, spec.dtype) for _ in range(2))
        if not out.size:
            return out, dout
        if bias is not None and bias.dtype not in (spec.dtype, np.float32):
            bias = contiguous(bias, spec.acc_dtype)
        alibi_slopes = contiguous(alibi_slopes, spec.acc_dtype)
        sinks = contiguous(sinks, spec.acc_dtype)
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "bias": bias,
            "mask": mask,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "tangent_q": dq,
            "tangent_k": dk,
            "tangent_v": dv,
            "dout": dout,
        }
        addresses = {name: pointer(array) for name, array in arrays.items()}
        anywhere = functools.reduce(operator.or_, (a.data.ptr for a in (q, k, v, dq, dk, dv)))
        _jvp_plan(
            spec,
            q.data.device_id,
            dispatch.JVP.current(),
            (q.strides, k.strides, v.strides, out.strides),
            (dq.strides, dk.strides, dv.strides),
            layout_key(bias),
            layout_key(mask),
            layout_key(alibi_slopes),
            anywhere % 16 == 0,
        ).launch(addresses | {"lse": 0, "cu_seqlens_q": 0, "cu_seqlens_k": 0, "seed": seed})
        return out, dout


@functools.lru_cache(maxsize=4096)
def _jvp_plan(
    spec: AttentionSpec,
    device: int,
    tiers: tuple[dispatch.jvp.JvpTier, ...],
    strides: tuple[tuple[int, ...], ...],
    tangents: tuple[tuple[int, ...], ...],
    bias: tuple | None,
    mask: tuple | None,
    alibi_slopes: tuple | None,
    aligned: bool,
) -> Plan:
    """Choose and compile the kernel of a derivative in a direction, and pack what stays the same
    between calls like it."""
    call = _call(spec, device, strides, bias, mask, alibi_slopes)
    usable = dispatch.usable_strides(spec, dispatch.Strides(*tangents, strides[3]))
    chosen = dispatch.choose_jvp(dispatch.JvpCall(call, usable[:3], aligned), tiers)
    return Plan(chosen, device)
