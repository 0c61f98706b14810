"""Attention of all queries of a batch to a prefix that they share, by the forward kernel of
Hopper."""

from __future__ import annotations

import dataclasses
import functools

import cupy

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, dispatch, sm90, tensormap
from cuattn.gpu.memory import pointer
from cuattn.gpu.params import forward_pointers, forward_shape
from cuattn.gpu.plan import Plan


@dataclasses.dataclass(frozen=True)
class PrefixPlan(Plan):
    """A plan of the pass over a prefix."""

    parts: int  # of the keys, with a result each
    sm90: sm90.Plan


@functools.lru_cache(maxsize=4096)
def plan(
    spec: AttentionSpec,
    device: int,
    strides: tuple[tuple[int, ...], ...],
    pages: tuple[int, int] | None,
    aligned: bool,
) -> PrefixPlan | None:
    """Plan the pass over a prefix, or leave it to the decoding kernel: None.

    Parameters
    ----------
    spec : AttentionSpec
        One sequence of all queries, and of the prefix's keys.
    device : int
        The device, which must be the current one.
    strides : tuple
        In bytes, of q (total, heads_q, head_dim) and of k and v: pages, or (prefix_len, heads_kv,
        head_dim).
    pages : (int, int), optional
        How many pages k and v have, and their size.
    aligned : bool
        Whether every pointer is a multiple of 16.
    """
    multiprocessors = compiler.multiprocessors(device)
    launch = dispatch.prefix(
        spec,
        compiler.device_arch(device),
        multiprocessors=multiprocessors,
        page_size=None if pages is None else pages[1],
    )
    if launch is None or not aligned:
        return None
    config, (tiles_of_part, parts) = launch.variant.config, launch.grid
    maps = sm90.prefix_plan(spec, config, strides, pages)
    if not all(tensormap.addressable(m.strides) for m in maps.maps[:3]):
        return None
    row = spec.heads_q * spec.head_dim_v
    out_strides = [n * spec.dtype.itemsize for n in (spec.seqlen_q * row, row, spec.head_dim_v, 1)]
    q, k, v = ((0, *array[-3:]) for array in strides)
    return PrefixPlan(
        parts=parts,
        kernel=compiler.kernel(launch.variant, device),
        grid=(min(tiles_of_part * parts, multiprocessors),),
        block=(config.threads,),
        smem_bytes=config.smem_bytes,
        shape=forward_shape(
            dataclasses.replace(spec, batch=parts), (q, k, v, tuple(out_strides)), None, None, None
        ),
        sm90=maps,
    )


def launch(
    plan: PrefixPlan,
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    page_table: cupy.ndarray | None,
    outs: cupy.ndarray,
    lses: cupy.ndarray,
) -> None:
    """Compute the parts' results: outs (parts, total, heads_q, head_dim_v) and lses (parts,
    heads_q, total), both float32."""
    inputs = (q.data.ptr, k.data.ptr, v.data.ptr)
    plan.launch(
        forward_pointers(*inputs, outs.data.ptr, lses.data.ptr, *[0] * 6),
        plan.sm90.argument(inputs, 0, pointer(page_table)),
    )
