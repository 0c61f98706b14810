"""Launches: what is worked out once for calls alike, and what each of them adds."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, dispatch, tensormap
from cuattn.gpu.memory import scratch
from cuattn.gpu.params import Scales
from cuattn.gpu.structs import launch_id
from cuattn.gpu.tensormap import NO_MAP


class Plan:
    """A kernel of a device, and all that its launches for calls alike have in common."""

    def __init__(self, chosen: dispatch.Launch, device: int) -> None:
        """Compile the kernel of a launch for a device, which must be the current one."""
        config = chosen.variant.config
        self.chosen = chosen
        self._kernel = compiler.kernel(chosen.variant, device)
        self._block = (config.threads,)
        self._smem_bytes = config.smem_bytes
        wanted = frozenset().union(*(each.wanted for each in chosen.arguments))
        self._has_state = not wanted.isdisjoint(("workspace", "launch_id"))
        self._maps = [
            (f"{array}_map", array, tensor_map) for array, tensor_map in chosen.tensor_maps.items()
        ]

    def launch(self, addresses: dict[str, Any]) -> None:
        """Launch on the current device and stream.

        Parameters
        ----------
        addresses : dict
            Addresses of the call's arrays by the names that the argument structs have for them; 0
            for an array that is not there. It is added to.
        """
        chosen = self.chosen
        if self._has_state:
            # The workspace goes back to the pool when this returns: the next call on the stream may
            # have it.
            workspace = scratch(chosen.workspace_bytes) if chosen.workspace_bytes else None
            addresses["workspace"] = 0 if workspace is None else workspace.ptr
            addresses["launch_id"] = launch_id()
        for key, array, tensor_map in self._maps:
            addresses[key] = (
                NO_MAP if tensor_map is None else tensormap.encode(tensor_map, addresses[array])
            )
        self._kernel(
            chosen.grid,
            self._block,
            [np.void(arguments.pack(addresses)) for arguments in chosen.arguments],
            shared_mem=self._smem_bytes,
        )


class Scores(NamedTuple):
    """What changes a call's scores: arrays, as of :func:`layout_key`, and the score functor."""

    bias: tuple | None
    mask: tuple | None
    alibi_slopes: tuple | None
    aligned: bool  # the addresses of bias and mask are multiples of 16
    score_mod: str = compiler.CONTRACT_SCORES


@functools.lru_cache(maxsize=4096)
def attention_plan(
    spec: AttentionSpec,
    device: int,
    tiers: tuple[dispatch.Tier, ...],
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    out: tuple[int, ...],
    aligned: bool,
    scores: Scores | None = None,
    num_pages: int = 0,
    table_stride: int = 0,
    num_splits: int | str | None = None,
    partial: dispatch.Partial | None = None,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> Plan:
    """Choose and compile the kernel of an attention call on a device, which must be the current
    one, and pack what stays the same between calls like it.

    Parameters
    ----------
    tiers : tuple
        The kernels to choose from.
    q, k, v, out : tuple of int
        Strides in bytes.
    scores : Scores, optional
        What changes scores, if anything does.
    aligned, num_pages, table_stride, num_splits, partial, k_scales, v_scales
        As in :class:`cuattn.gpu.dispatch.Call`.
    """
    bias, mask, alibi_slopes, score_aligned, score_mod = scores or Scores(None, None, None, True)
    call = dispatch.Call(
        spec,
        compiler.device_arch(device),
        compiler.multiprocessors(device),
        dispatch.usable_strides(spec, dispatch.Strides(q, k, v, out), num_pages),
        aligned,
        bias and dispatch.Layout(*bias),
        mask and dispatch.Layout(*mask),
        score_aligned,
        alibi_slopes and dispatch.Layout(*alibi_slopes),
        num_pages,
        table_stride,
        num_splits,
        partial,
        score_mod,
        k_scales,
        v_scales,
    )
    return Plan(dispatch.choose(call, tiers), device)


def layout_key(array: Any) -> tuple | None:
    """What of an array a plan depends on."""
    return None if array is None else (array.shape, array.strides, array.dtype)


def as_kernel_argument(packed: bytes) -> np.void:
    """A struct as CuPy passes it by value: a scalar of as many bytes."""
    return np.void(packed)
