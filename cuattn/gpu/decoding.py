"""Decoding on a GPU: tier, scratch, launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import cupy
import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, dispatch, shared_prefix, tensormap
from cuattn.gpu.memory import (
    contiguous,
    copy_to_out,
    pointer,
    reshaped,
    scratch,
    scratch_array,
    target,
    temporaries,
    use_device,
)
from cuattn.gpu.params import MERGE_PARAMS, decode_pointers, decode_shape
from cuattn.gpu.plan import Plan, as_kernel_argument, launch_id, layout_key

UNIT_KEYS = 1024  # of num_splits="fixed"
MAX_PARTS = 32  # kMaxParts of rawkernels/decoding/merge.cu


@dataclasses.dataclass(frozen=True)
class DecodePlan(Plan):
    """A plan of the decoding kernels."""

    partials: int  # bytes of scratch
    map_rows: int  # keys in a box of the tensor maps; 0: no maps are wanted


def decode(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    spec: AttentionSpec,
    *,
    seq_lens: cupy.ndarray,
    page_table: cupy.ndarray | None = None,
    cu_seqlens_q: cupy.ndarray | None = None,
    prefix: int | tuple[cupy.ndarray, cupy.ndarray] | None = None,
    alibi_slopes: cupy.ndarray | None = None,
    sinks: cupy.ndarray | None = None,
    num_splits: int | str | None = None,
    out: cupy.ndarray | None = None,
    return_lse: bool = False,
) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Attention of a few queries a sequence over a cache, on CuPy's current stream, without
    synchronising.

    Parameters and result as of :func:`cuattn.reference.decoding.decode`.
    """
    with use_device(q):
        alibi_slopes = contiguous(alibi_slopes, spec.acc_dtype)
        sinks = contiguous(sinks, spec.acc_dtype)
        # Where positions count, a shared prefix is read with the rest: its queries are at as many
        # positions as sequences. So it is where that is faster, unless the batch must not matter.
        if isinstance(prefix, int) and (
            spec.window_left is not None
            or alibi_slopes is not None
            or (num_splits is None and not _cascade_pays(spec, prefix, q.device.id))
        ):
            prefix = None

        result = target(out, spec.out_shape, spec.dtype)
        some = bool(spec.batch and result.size)
        if prefix is not None and some:
            lse = _cascade(
                q,
                k,
                v,
                result,
                spec,
                seq_lens=seq_lens,
                page_table=page_table,
                cu_seqlens_q=cu_seqlens_q,
                prefix=prefix,
                sinks=sinks,
                num_splits=num_splits,
                return_lse=return_lse,
            )
        else:
            lse = cupy.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None
            if some:
                _launch(
                    q,
                    k,
                    v,
                    result,
                    lse,
                    spec,
                    seq_lens=seq_lens,
                    page_table=page_table,
                    cu_seqlens_q=cu_seqlens_q,
                    alibi_slopes=alibi_slopes,
                    sinks=sinks,
                    num_splits=num_splits,
                )
        return copy_to_out(result, out), lse


@functools.lru_cache(maxsize=4096)
def _cascade_pays(spec: AttentionSpec, length: int, device: int) -> bool:
    return dispatch.cascade_pays(spec, length, compiler.device_arch(device))


def _cascade(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    out: cupy.ndarray,
    spec: AttentionSpec,
    *,
    seq_lens: cupy.ndarray,
    page_table: cupy.ndarray,
    cu_seqlens_q: cupy.ndarray | None,
    prefix: int | tuple[cupy.ndarray, cupy.ndarray],
    sinks: cupy.ndarray | None,
    num_splits: int | str | None,
    return_lse: bool,
) -> cupy.ndarray | None:
    """Attention to a prefix by all queries as if of one sequence, to the rest by each sequence's
    own, merged; returns lse.
    """
    rows = reshaped(q, (-1, *q.shape[-2:]))  # a copy where sequences do not lie end to end
    total = rows.shape[0]
    if isinstance(prefix, int):
        first_key, length, pages = prefix, prefix, k.shape[:2]
        shared_k, shared_v, shared_table = k, v, page_table[:1]
    else:
        first_key, length, pages = 0, prefix[0].shape[0], None
        (shared_k, shared_v), shared_table = prefix, None
    shared = dataclasses.replace(
        spec,
        batch=1,
        seqlen_q=total,
        seqlen_k=length,
        window_left=None,
        window_right=None,
        rows="batched",
        keys="paged" if pages else "batched",
        page_size=pages[1] if pages else 0,
    )
    plan = None
    if num_splits is None:
        plan = shared_prefix.plan(
            shared,
            q.device.id,
            (rows.strides, shared_k.strides, shared_v.strides),
            pages,
            (rows.data.ptr | shared_k.data.ptr | shared_v.data.ptr) % 16 == 0,
        )
    parts = 1 if plan is None else plan.parts
    outs = scratch_array((parts + 1, total, *spec.out_shape[-2:]), spec.acc_dtype)
    lses = scratch_array((parts + 1, spec.heads_q, total), spec.acc_dtype)
    if plan is not None:
        shared_prefix.launch(plan, rows, shared_k, shared_v, shared_table, outs, lses)
    else:
        _launch(
            rows[None],
            shared_k if pages else shared_k[None],
            shared_v if pages else shared_v[None],
            outs[:1],
            lses[0],
            shared,
            page_table=shared_table,
            num_splits=num_splits,
        )
    _launch(
        q,
        k,
        v,
        outs[parts].reshape(spec.out_shape),
        lses[parts],
        spec,
        seq_lens=seq_lens,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        sinks=sinks,
        num_splits=num_splits,
        first_key=first_key,
        lse_strides=(0 if spec.rows == "ragged" else spec.seqlen_q, total),
    )
    allocate = cupy.empty if return_lse else scratch_array
    lse = allocate((spec.heads_q, total), spec.acc_dtype)
    merged = out if out.flags.c_contiguous else scratch_array(out.shape, out.dtype)
    _merge(list(outs), list(lses), merged.reshape(total, *spec.out_shape[-2:]), lse, (1, 0))
    if merged is not out:
        out[...] = merged
    if not return_lse:
        return None
    if spec.rows == "ragged":
        return lse
    return lse.reshape(spec.heads_q, spec.batch, spec.seqlen_q).transpose(1, 0, 2)


def _launch(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    out: cupy.ndarray,
    lse: cupy.ndarray | None,
    spec: AttentionSpec,
    *,
    seq_lens: cupy.ndarray | None = None,
    page_table: cupy.ndarray | None = None,
    cu_seqlens_q: cupy.ndarray | None = None,
    alibi_slopes: cupy.ndarray | None = None,
    sinks: cupy.ndarray | None = None,
    num_splits: int | str | None = None,
    first_key: int = 0,
    lse_strides: tuple[int, int] | None = None,
) -> None:
    """Launch the decoding kernel. `out` is of q's dtype, or of the accumulators'; without
    `seq_lens` the cache is full.
    """
    pointers = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr)
    if lse_strides is None:
        lse_strides = (0 if spec.rows == "ragged" else spec.heads_q * spec.seqlen_q, spec.seqlen_q)
    plan = _plan(
        spec,
        q.device.id,
        (q.strides, out.strides, k.strides, v.strides),
        out.itemsize,
        layout_key(alibi_slopes),
        None if page_table is None else k.shape[1],
        0 if page_table is None else page_table.strides[0] // page_table.itemsize,
        lse_strides,
        first_key,
        num_splits,
        (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % 16 == 0,
    )
    partials = scratch(plan.partials) if plan.partials else None
    params = decode_pointers(
        *pointers,
        pointer(lse),
        pointer(alibi_slopes),
        pointer(sinks),
        pointer(page_table),
        pointer(seq_lens),
        pointer(cu_seqlens_q),
        0 if partials is None else partials.ptr,
        launch_id(),
    )
    if plan.map_rows:
        plan.launch(params, _tensor_map(k, plan.map_rows) + _tensor_map(v, plan.map_rows))
    else:
        plan.launch(params)


def _tensor_map(cache: cupy.ndarray, rows: int) -> bytes:
    """A cache (sequence or page, key, head, head_dim) as decode_sm90.cu reads it: (64 columns, key,
    their number, head, sequence or page), `rows` keys of a head at a time.
    """
    outer, keys, heads, dim = cache.shape
    page, key, head, column = cache.strides
    panels = dim // 64
    return tensormap.encode(
        cache.data.ptr,
        cache.dtype,
        (64, keys, panels, heads, outer),
        (key, 64 * column, head, page),
        (64, rows, panels, 1, 1),
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    spec: AttentionSpec,
    device: int,
    strides: tuple[tuple[int, ...], ...],
    out_itemsize: int,
    alibi_slopes: tuple | None,
    page_size: int | None,
    table_stride: int,
    lse_strides: tuple[int, int],
    first_key: int,
    num_splits: int | str | None,
    aligned: bool,
) -> DecodePlan:
    """Choose and compile the kernel of a call, and pack what stays the same between calls like
    it."""
    launch = dispatch.decode(
        spec,
        compiler.device_arch(device),
        multiprocessors=compiler.multiprocessors(device),
        aligned=aligned and all(n % 16 == 0 for array in strides for n in array[:-1]),
        addressable=all(tensormap.addressable(array[:-1]) for array in strides[2:]),
        page_size=page_size,
        num_splits=num_splits,
    )
    config = launch.variant.config
    slots = dispatch.decode_slots(spec, launch, num_splits, UNIT_KEYS)
    return DecodePlan(
        kernel=compiler.kernel(launch.variant, device),
        grid=launch.grid,
        block=(config.threads,),
        smem_bytes=config.smem_bytes,
        map_rows=config.warp_keys if isinstance(config, dispatch.Sm90DecodeConfig) else 0,
        shape=decode_shape(
            spec,
            strides,
            alibi_slopes,
            out_itemsize=out_itemsize,
            table_stride=table_stride,
            lse_strides=lse_strides,
            page_size=page_size,
            first_key=first_key,
            unit_keys=UNIT_KEYS,
            num_splits=num_splits,
            head_lanes=launch.grid[0],
            one_item=dispatch.decode_one_item(spec, launch, num_splits),
        ),
        partials=slots * config.part_bytes,
    )


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
    outs: list[cupy.ndarray],
    lses: list[cupy.ndarray],
    out: cupy.ndarray,
    lse: cupy.ndarray,
    lse_axes: tuple[int, ...],
) -> None:
    """Launch the merge kernel: parts of the same strides, `out` contiguous."""
    part, device = outs[0], out.device.id
    kernel = compiler.kernel(dispatch.merge(part.dtype.name, out.dtype.name), device)
    rows, dim = part.shape[:-1], part.shape[-1]
    lse_strides = [lse.strides[axis] // lse.itemsize for axis in lse_axes]
    strides = [stride // part.itemsize for stride in part.strides[:-1]]
    packed = dim % 4 == 0 and all(
        stride % 4 == 0 and a.data.ptr % 16 == 0 for a in (*outs, out) for stride in strides
    )
    params = np.zeros((), MERGE_PARAMS)
    params["outs"][: len(outs)] = [a.data.ptr for a in outs]
    params["lses"][: len(lses)] = [a.data.ptr for a in lses]
    params["out"], params["lse"] = out.data.ptr, lse.data.ptr
    missing = 3 - len(rows)
    params["out_stride"], params["lse_stride"] = (
        [0] * missing + strides,
        [0] * missing + lse_strides,
    )
    params["rows"] = out.size // dim
    _, params["middle"], params["inner"] = (1,) * missing + rows
    params["head_dim_v"], params["parts"], params["packed"] = dim, len(outs), packed
    threads = 256
    blocks = min(-(-int(params["rows"]) * -(-dim // 4) // threads), 1 << 16)
    kernel((blocks,), (threads,), (as_kernel_argument(params.tobytes()),))
