"""Partial results on a GPU: a prefix that a batch shares, read once for all of it (cascade), and
merging."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupy

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, dispatch
from cuattn.gpu.dispatch import Partial, current_tiers
from cuattn.gpu.memory import (
    contiguous,
    pointer,
    reshaped,
    scratch_array,
    temporaries,
    use_device,
)
from cuattn.gpu.params import MAX_PARTS, MERGE_PARAMS, divisor
from cuattn.gpu.plan import Plan, as_kernel_argument, attention_plan
from cuattn.gpu.quantization import (
    NO_SCALES,
    Operand,
    as_sequence,
    format_of,
    scale_addresses,
)

Prefix = int | tuple[Any, Any]  # arrays, or QuantizedArrays


def useful_prefix(
    prefix: Prefix,
    spec: AttentionSpec,
    alibi_slopes: cupy.ndarray | None,
    num_splits: int | str | None,
    device: int,
) -> Prefix | None:
    """The prefix of a call, if it is to be read apart from the rest.

    Where positions count it is not: its queries are at as many positions as sequences. Nor is it
    where to read it with the rest is faster, or where the batch must not matter: how its keys are
    split follows from the rows of all sequences.
    """
    if isinstance(prefix, int) and (
        spec.window_left is not None
        or alibi_slopes is not None
        or num_splits == "fixed"
        or (num_splits is None and not _cascade_pays(spec, prefix, device))
    ):
        return None
    return prefix


@functools.lru_cache(maxsize=4096)
def _cascade_pays(spec: AttentionSpec, length: int, device: int) -> bool:
    return dispatch.cascade_pays(spec, length, compiler.device_arch(device))


def cascade(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    out: cupy.ndarray,
    spec: AttentionSpec,
    *,
    seq_lens: cupy.ndarray,
    page_table: cupy.ndarray,
    cu_seqlens_q: cupy.ndarray | None,
    prefix: Prefix,
    quantized: tuple[Operand, Operand] | None,
    sinks: cupy.ndarray | None,
    num_splits: int | str | None,
    return_lse: bool,
) -> cupy.ndarray | None:
    """Attention to a prefix by all queries as if of one sequence, to the rest by each sequence's
    own, merged; returns lse. With splits that do not depend on the batch each sequence reads the
    prefix by itself.
    """
    together = num_splits != "fixed"
    total = spec.seqlen_q if spec.rows == "ragged" else spec.batch * spec.seqlen_q
    # A copy where sequences do not lie end to end.
    rows = reshaped(q, (1, -1, *q.shape[-2:])) if together else q
    own_scales = quantized or (NO_SCALES, NO_SCALES)
    formats = spec.k_format, spec.v_format
    if isinstance(prefix, int):
        first_key, length = prefix, prefix
        shared_k, shared_v, shared_table = k, v, page_table
        shared_scales = own_scales
    else:
        first_key, length = 0, prefix[0].shape[0]
        shared_scales = as_sequence(prefix[0]), as_sequence(prefix[1])
        shared_k, shared_v = shared_scales[0].codes, shared_scales[1].codes
        shared_table = None
        formats = format_of(prefix[0]), format_of(prefix[1])
    shared = dataclasses.replace(
        spec,
        seqlen_k=length,
        window_left=None,
        window_right=None,
        keys="cached",
        page_size=0,
        k_format=formats[0],
        v_format=formats[1],
    )
    if together:
        shared = dataclasses.replace(
            shared,
            batch=1,
            seqlen_q=total,
            rows="batched",
            keys="batched" if shared_table is None else "paged",
            page_size=0 if shared_table is None else spec.page_size,
        )
    part_shape = (total, *spec.out_shape[-2:])
    # The strides of one part's result, in scratch that is aligned.
    head = spec.head_dim_v * spec.acc_dtype.itemsize
    part_strides = (spec.heads_q * head, head, spec.acc_dtype.itemsize)
    if shared.rows == "batched":
        part_strides = (shared.seqlen_q * part_strides[0], *part_strides)
    own_lse = 0 if spec.rows == "ragged" else spec.seqlen_q, total
    device, tiers = q.data.device_id, current_tiers()
    plan = attention_plan(
        shared,
        device,
        tiers,
        rows.strides,
        *((a.strides if together else (0, *a.strides[1:])) for a in (shared_k, shared_v)),
        part_strides,
        (rows.data.ptr | shared_k.data.ptr | shared_v.data.ptr) % 16 == 0,
        num_pages=0 if shared_table is None else k.shape[0],
        num_splits=num_splits,
        partial=Partial(0, (0, total) if together else own_lse),
        k_scales=shared_scales[0].scales,
        v_scales=shared_scales[1].scales,
    )
    parts = plan.chosen.parts
    outs = scratch_array((parts + 1, *part_shape), spec.acc_dtype)
    lses = scratch_array((parts + 1, spec.heads_q, total), spec.acc_dtype)
    plan.launch(
        _addresses(
            q=rows,
            k=shared_k,
            v=shared_v,
            out=outs,
            lse=lses,
            page_table=shared_table,
            cu_seqlens_q=None if together else cu_seqlens_q,
        )
        | scale_addresses(*shared_scales)
    )
    own = attention_plan(
        spec,
        device,
        tiers,
        q.strides,
        k.strides,
        v.strides,
        outs[parts].reshape(spec.out_shape).strides,
        (q.data.ptr | k.data.ptr | v.data.ptr) % 16 == 0 and outs[parts].data.ptr % 16 == 0,
        num_pages=k.shape[0],
        table_stride=page_table.strides[0] // page_table.itemsize,
        num_splits=num_splits,
        partial=Partial(first_key, own_lse),
        k_scales=own_scales[0].scales,
        v_scales=own_scales[1].scales,
    )
    own.launch(
        _addresses(
            q=q,
            k=k,
            v=v,
            out=outs[parts],
            lse=lses[parts],
            page_table=page_table,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            sinks=sinks,
        )
        | scale_addresses(*own_scales)
    )
    allocate = cupy.empty if return_lse else scratch_array
    lse = allocate((spec.heads_q, total), spec.acc_dtype)
    merged = out if out.flags.c_contiguous else scratch_array(out.shape, out.dtype)
    _merge(list(outs), list(lses), merged.reshape(part_shape), lse, (1, 0))
    if merged is not out:
        out[...] = merged
    if not return_lse:
        return None
    if spec.rows == "ragged":
        return lse
    return lse.reshape(spec.heads_q, spec.batch, spec.seqlen_q).transpose(1, 0, 2)


#: Of partial results at a time: more sequences take turns.
MOST_PART_BYTES = 1 << 30


def launch_in_parts(
    plan_of: Callable[[AttentionSpec], Plan],
    addresses: dict[str, Any],
    steps: Mapping[str, int],
    spec: AttentionSpec,
    out: cupy.ndarray,
    lse: cupy.ndarray | None,
) -> None:
    """Launch a kernel that cuts the keys of batched rows into parts, with a result each, and merge
    these into `out` and, where it is wanted, `lse`.

    Parameters
    ----------
    plan_of : callable
        Gives the plan of the call, and of the same call of fewer sequences.
    addresses : dict
        As of `Plan.launch`.
    steps : dict
        How many bytes lie between two sequences in the arrays of `addresses` that have a batch.
    """
    parts = plan_of(spec).chosen.parts
    part_bytes = math.prod(spec.out_shape[1:]) * spec.acc_dtype.itemsize
    most = max(1, MOST_PART_BYTES // (parts * part_bytes))
    for begin in range(0, spec.batch, most):
        some = slice(begin, min(begin + most, spec.batch))
        piece = dataclasses.replace(spec, batch=some.stop - begin)
        plan = plan_of(piece)
        places = addresses | {name: addresses[name] + begin * step for name, step in steps.items()}
        result, result_lse = out[some], None if lse is None else lse[some]
        parts = plan.chosen.parts
        if parts == 1:
            plan.launch(places | {"out": result.data.ptr, "lse": pointer(result_lse)})
            continue
        outs = scratch_array((parts, *piece.out_shape), spec.acc_dtype)
        lses = scratch_array((parts, *piece.lse_shape), spec.acc_dtype)
        plan.launch(places | {"out": outs.data.ptr, "lse": lses.data.ptr})
        if result_lse is None:
            result_lse = scratch_array(piece.lse_shape, spec.acc_dtype)
        merged = result
        if not result.flags.c_contiguous:
            merged = scratch_array(result.shape, result.dtype)
        _merge(outs, lses, merged, result_lse, (0, 2, 1), cached=spec.keys != "batched")
        if merged is not result:
            result[...] = merged


#: The arrays of an attention call that may not be there.
_OPTIONAL = (
    *("lse", "bias", "mask", "alibi_slopes", "sinks"),
    *("cu_seqlens_q", "cu_seqlens_k", "seq_lens", "page_table"),
)


def _addresses(**arrays: cupy.ndarray | None) -> dict[str, int]:
    """Addresses of a launch's arrays; 0 for those that are not there."""
    return dict.fromkeys(_OPTIONAL, 0) | {name: pointer(array) for name, array in arrays.items()}


def merge(
    outs: Sequence[cupy.ndarray], lses: Sequence[cupy.ndarray], lse_axes: tuple[int, ...]
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Merge partial results. Parameters and result as of
    :func:`cuattn.reference.decoding.merge`."""
    with use_device(outs[0]):
        while len(outs) > MAX_PARTS:
            with temporaries():
                out, lse = merge(outs[:MAX_PARTS], lses[:MAX_PARTS], lse_axes)
            outs, lses = [out, *outs[MAX_PARTS:]], [lse, *lses[MAX_PARTS:]]
        outs = _same_strides(outs)
        lses = [contiguous(lse) for lse in lses]
        out = cupy.empty(outs[0].shape, outs[0].dtype)
        lse = cupy.empty(lses[0].shape, lses[0].dtype)
        if out.size:
            _merge(outs, lses, out, lse, lse_axes)
        return out, lse


def _same_strides(arrays: list[cupy.ndarray]) -> list[cupy.ndarray]:
    first = arrays[0].strides
    if first[-1] == arrays[0].itemsize and all(a.strides == first for a in arrays):
        return arrays
    return [contiguous(a) for a in arrays]


def _merge(
    outs: list[cupy.ndarray] | cupy.ndarray,
    lses: list[cupy.ndarray] | cupy.ndarray,
    out: cupy.ndarray,
    lse: cupy.ndarray,
    lse_axes: tuple[int, ...],
    *,
    cached: bool = False,
) -> None:
    """Launch the merge kernel: parts of the same strides, `MAX_PARTS` at most, or stacked on axis 0
    of contiguous arrays, of any number; `out` contiguous. `cached`: they are of keys in caches,
    whose results may depend on the batch."""
    if isinstance(outs, list):
        first, shape, strides = outs[0], outs[0].shape, outs[0].strides
        pointers, lse_pointers = [a.data.ptr for a in outs], [a.data.ptr for a in lses]
        between = lse_between = 0
    else:
        first, shape, strides = outs, outs.shape[1:], outs.strides[1:]
        pointers, lse_pointers = [outs.data.ptr], [lses.data.ptr]
        between, lse_between = (a.strides[0] // a.itemsize for a in (outs, lses))
    dim, size = shape[-1], first.itemsize
    lse_strides = [lse.strides[axis] // lse.itemsize for axis in lse_axes]
    row_strides = [stride // size for stride in strides[:-1]]
    packed = (
        dim % 4 == 0
        and all(stride % 4 == 0 for stride in row_strides)
        and all(pointer % 16 == 0 for pointer in (*pointers, out.data.ptr))
    )
    missing = 4 - len(shape)
    middle, inner = ((1,) * missing + shape[:-1])[1:]
    vecs = -(-dim // 4)
    rows = out.size // dim
    dtypes = first.dtype.name, out.dtype.name
    if cached and packed:
        variant = dispatch.merge_of_cut_keys(*dtypes, len(outs), rows * vecs)
    else:
        variant = dispatch.merge(*dtypes)
    blocks = min(-(-rows * vecs // variant.config.vecs), 1 << 16)
    nothing = [0] * (MAX_PARTS - len(pointers))
    params = MERGE_PARAMS.pack(
        *pointers,
        *nothing,
        *lse_pointers,
        *nothing,
        out.data.ptr,
        lse.data.ptr,
        *([0] * missing + row_strides),
        *([0] * missing + lse_strides),
        rows,
        middle,
        inner,
        dim,
        len(outs),
        packed,
        between,
        lse_between,
        *(number for n in (vecs, middle, inner) for number in divisor(n)),
    )
    kernel = compiler.kernel(variant, out.device.id)
    kernel((blocks,), (variant.config.threads,), (as_kernel_argument(params),))
