"""The second argument of attention/forward_sm90.cu: where the copy engine finds q, k and v, and how
tiles are dealt out."""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu import dispatch, tensormap
from cuattn.gpu.plan import launch_id

MAPS = 5  # of q, k, v, bias, mask
#: Sm90Params of rawkernels/attention/work_sm90.cuh after its maps.
_REST = struct.Struct("2Q i 3f Q 4i 8x")

TAKEN_BYTES = 16  # Sm90Params::Taken
FAR_ROWS = 1 << 30  # kFarRows
ROUND = 1 << 64  # bytes, once round the address space
_PANEL_COLUMNS = 64  # 128 bytes
_WARPGROUP_ROWS = 64
_UNPAGED_SHIFT = 30  # all keys lie in one page
_ANY_STRIDE = 16  # of an axis of length 1
_NO_MAP = bytes(tensormap.TENSOR_MAP_BYTES)


@dataclasses.dataclass(frozen=True)
class Map:
    """An array as :func:`tensormap.encode` takes it, but for the pointer."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True


@dataclasses.dataclass(frozen=True)
class Plan:
    """All of the argument but pointers."""

    maps: tuple[Map | None, ...]  # of q, k, v, bias, mask; None: not there, or out of reach
    section: int
    scales: tuple[float, float, float]  # cap_scale, score_scale, scale_log2
    scratch_bytes: int
    page_shift: int = 0  # of a prefix, as in Sm90Params
    box_shift: int = 0

    def argument(self, pointers: tuple[int, ...], scratch: int, page_table: int = 0) -> bytes:
        """Pack the argument of one launch; `pointers` are those of q, k, v and, if given, of bias
        and mask, `scratch` is the address of `scratch_bytes`, for the launch's duration."""
        encoded = [
            _NO_MAP
            if m is None
            else tensormap.encode(pointer, m.dtype, m.shape, m.strides, m.box, m.swizzled)
            for pointer, m in zip((*pointers, 0, 0), self.maps, strict=False)
        ]
        mapped = [m is not None for m in self.maps[3:]]
        rest = _REST.pack(
            scratch,
            launch_id(),
            self.section,
            *self.scales,
            page_table,
            self.page_shift,
            self.box_shift,
            *mapped,
        )
        return b"".join((*encoded, rest))


def plan(
    spec: AttentionSpec,
    config: dispatch.Sm90ForwardConfig,
    blocks: int,
    strides: tuple[tuple[int, ...], ...],
    bias: tuple | None = None,
    mask: tuple | None = None,
    *,
    score_aligned: bool = True,
) -> Plan:
    """Plan launches on `blocks` blocks.

    Parameters
    ----------
    spec, config
        The call, and its kernel's variant.
    blocks : int
        As many as there are multiprocessors for.
    strides : tuple
        Of q, k and v, in bytes.
    bias, mask : tuple, optional
        Their (shape, strides in bytes, dtype).
    score_aligned : bool
        Whether their addresses are multiples of 16.
    """
    shapes = (
        (spec.seqlen_q, spec.heads_q, spec.head_dim),
        (spec.seqlen_k, spec.heads_kv, spec.head_dim),
        (spec.seqlen_k, spec.heads_kv, spec.head_dim_v),
    )
    rows = (_WARPGROUP_ROWS, config.tile_n, config.tile_n)
    return Plan(
        maps=(
            *map(_map, [spec] * 3, shapes, strides, rows),
            _score_map(bias if score_aligned else None, config.bias_pitch),
            _score_map(mask if score_aligned else None, config.tile_n),
        ),
        section=dispatch.sm90_section(spec, config, blocks),
        scales=_scales(spec, has_bias=bias is not None),
        scratch_bytes=TAKEN_BYTES if spec.rows == "ragged" else 0,
    )


def _scales(spec: AttentionSpec, *, has_bias: bool) -> tuple[float, float, float]:
    """What scores are multiplied by: before a tanh, after it, and before exp2."""
    cap_scale = spec.scale / spec.softcap if spec.softcap else 0.0
    score_scale = spec.softcap or spec.scale
    return cap_scale, score_scale, (1.0 if has_bias else score_scale) / math.log(2.0)


def prefix_plan(
    spec: AttentionSpec,
    config: dispatch.Sm90ForwardConfig,
    strides: tuple[tuple[int, ...], ...],
    pages: tuple[int, int] | None,
) -> Plan:
    """Plan launches of a variant with `prefix`.

    Parameters
    ----------
    spec : AttentionSpec
        One sequence of all queries, and of the prefix's keys.
    config : Sm90ForwardConfig
        The variant.
    strides : tuple
        Of q (token, head, head_dim) and of k and v, (page, slot, head, head_dim) or without the
        pages' axis, in bytes.
    pages : (int, int), optional
        How many pages k and v have, and their size; None where keys lie one after the other.
    """
    count, size = pages or (1, spec.seqlen_k)
    group = spec.heads_q // spec.heads_kv
    token, head = strides[0][:2]
    queries = Map(
        spec.dtype,
        (spec.head_dim, group, spec.seqlen_q, spec.heads_kv),
        (head, token, group * head),
        (_PANEL_COLUMNS, group, _WARPGROUP_ROWS // group, 1),
    )
    box_rows = config.tile_n if pages is None else min(size, config.tile_n)
    keys_and_values = (
        Map(
            spec.dtype,
            (head_dim, size, spec.heads_kv, count),
            (*array[-3:-1], array[0] if pages else size * array[-3]),
            (_PANEL_COLUMNS, box_rows, 1, 1),
        )
        for head_dim, array in zip((spec.head_dim, spec.head_dim_v), strides[1:], strict=True)
    )
    return Plan(
        maps=(queries, *keys_and_values, None, None),
        section=0,
        scales=_scales(spec, has_bias=False),
        scratch_bytes=0,
        page_shift=_UNPAGED_SHIFT if pages is None else size.bit_length() - 1,
        box_shift=box_rows.bit_length() - 1,
    )


def _map(
    spec: AttentionSpec, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> Map:
    """The axes (head_dim, row, head, outer) of an array (batch, row, head, head_dim), or (total,
    head, head_dim).

    Outer is the batch. For varlen it counts rows once more, and there is another axis, which leads
    back by FAR_ROWS: Sequence in attention/work_sm90.cuh says what for.
    """
    length, heads, head_dim = shape
    row, head = strides[-3:-1]
    box = (_PANEL_COLUMNS, box_rows, 1, 1)
    dtype = spec.dtype
    if spec.rows == "ragged":
        far = (head_dim, FAR_ROWS, heads, length + 1, FAR_ROWS + 1)
        return Map(dtype, far, (row, head, row, ROUND // FAR_ROWS - row), (*box, 1))
    return Map(dtype, (head_dim, length, heads, spec.batch), (row, head, strides[0]), box)


def _score_map(layout: tuple | None, pitch: int) -> Map | None:
    """The axes (key, query, head, batch) of a bias or mask, where the copy engine can address it
    and each query has a row of its own."""
    if layout is None:
        return None
    shape, strides, dtype = layout
    missing = 4 - len(shape)
    lengths = (1,) * missing + shape
    steps = tuple(
        _ANY_STRIDE if n == 1 else stride
        for n, stride in zip(lengths, (0,) * missing + strides, strict=True)
    )
    contiguous = strides[-1] == dtype.itemsize and shape[-1] > 1 and lengths[-2] > 1
    if not (contiguous and tensormap.addressable(steps[:3])):
        return None
    box = (pitch, _WARPGROUP_ROWS, 1, 1)
    return Map(dtype, lengths[::-1], steps[2::-1], box, swizzled=False)
