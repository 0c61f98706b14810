"""The second argument of attention/forward_sm90.cu, the tensor maps of q, k and v among it."""

from __future__ import annotations

import math

from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import CONTIGUOUS_PAGE_SHIFT
from cuattn.gpu.dispatch.config_sm90 import KEY_GROUP_DIMS, Sm90ForwardConfig
from cuattn.gpu.dispatch.launch import LEAST_SCALE, Call, Layout, shapes
from cuattn.gpu.params import SM90_PARAMS, divisor
from cuattn.gpu.structs import Arguments
from cuattn.gpu.tensormap import TensorMap, addressable

FAR_ROWS = 1 << 30  # kFarRows of tile/ragged.cuh
ROUND = 1 << 64  # bytes, once round the address space
_PANEL_COLUMNS = 64  # 128 bytes
_WARPGROUP_ROWS = 64
_GROUP_KEYS = 8  # kGroupKeys of attention/layout_sm90.cuh
_ANY_STRIDE = 16  # of an axis of length 1


def kernel_arguments(
    spec: AttentionSpec,
    config: Sm90ForwardConfig,
    tensor_maps: dict[str, TensorMap | None],
    *,
    scales: tuple[float, float, float],
    section: int = 0,
    table_stride: int = 0,
    num_pages: int = 0,
    num_splits: int = 1,
    min_queries: int = 0,
    blocks: int = 0,
    page_heads: int = 0,
) -> Arguments:
    """Pack SM90_PARAMS but for what each launch fills in."""
    cap_scale, score_scale, scale_log2 = scales
    return SM90_PARAMS.arguments(
        section=section,
        cap_scale=cap_scale,
        score_scale=score_scale,
        scale_log2=scale_log2,
        # A key's page, and the box of a block that a lane loads: shifts of a key's number.
        page_shift=spec.page_size.bit_length() - 1 if spec.page_size else CONTIGUOUS_PAGE_SHIFT,
        box_shift=(box_keys(spec, config) - 1).bit_length(),
        bias_mapped=tensor_maps["bias"] is not None,
        mask_mapped=tensor_maps["mask"] is not None,
        pairs_of_boxes="k_pair" in tensor_maps,
        num_splits=num_splits,
        table_stride=table_stride,
        num_pages=num_pages,
        min_queries=min_queries,
        blocks=blocks,
        page_heads=page_heads,
        by_queries_of_tile=divisor(config.queries_of_tile(spec)),
    )


def score_scales(call: Call) -> tuple[float, float, float]:
    """What scores are multiplied by: before a tanh, after it, and before exp2."""
    spec = call.spec
    cap_scale = spec.scale / spec.softcap if spec.softcap else 0.0
    score_scale = spec.softcap or spec.scale
    natural = call.bias is not None or call.has_own_scores
    return cap_scale, score_scale, (1.0 if natural else score_scale) / math.log(2.0)


def has_scales(call: Call) -> bool:
    """Whether these are positive floats that are not flushed to 0, and finite."""
    if call.spec.scale <= 0.0:
        return False
    cap_scale, *others = score_scales(call)
    scales = [cap_scale, *others] if call.spec.softcap else others
    return all(LEAST_SCALE <= scale <= 1 / LEAST_SCALE for scale in scales)


def maps_of(call: Call, config: Sm90ForwardConfig) -> dict[str, TensorMap | None]:
    """The maps of q, k, v, bias and mask; None for one that is not there, or out of TMA's reach."""
    spec, strides = call.spec, call.strides
    keys = _pages if config.paged_kv else _keys
    mapped = config.elementwise and call.score_aligned
    return {
        "q": queries_map(call, config),
        "k": keys(call, config, spec.head_dim, strides.k),
        "v": keys(call, config, spec.head_dim_v, strides.v),
        **_pairs(call, config),
        "bias": _scores(call.bias if mapped else None, config.bias_pitch),
        "mask": _scores(call.mask if mapped else None, config.tile_n),
    }


def queries_map(call: Call, config: Sm90ForwardConfig) -> TensorMap:
    """The map of q."""
    spec, strides = call.spec, call.strides.q
    if config.pack_gqa:
        return _packed_rows(spec, strides)
    return rows_map(spec, (spec.seqlen_q, spec.heads_q, spec.head_dim), strides, _WARPGROUP_ROWS)


def rows_map(
    spec: AttentionSpec, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> TensorMap:
    """The axes (head_dim, row, head, outer) of an array (batch, row, head, head_dim), or (total,
    head, head_dim).

    Outer is the batch. For varlen it counts rows once more, and there is another axis, which leads
    back by FAR_ROWS: tile/ragged.cuh says why.
    """
    length, heads, head_dim = shape
    row, head = strides[-3:-1]
    box = (_PANEL_COLUMNS, box_rows, 1, 1)
    dtype = spec.dtype
    if spec.rows == "ragged":
        far = (head_dim, FAR_ROWS, heads, length + 1, FAR_ROWS + 1)
        return TensorMap(dtype, far, (row, head, row, ROUND // FAR_ROWS - row), (*box, 1))
    return TensorMap(dtype, (head_dim, length, heads, spec.batch), (row, head, strides[0]), box)


def _packed_rows(spec: AttentionSpec, strides: tuple[int, ...]) -> TensorMap:
    """The axes (head_dim, head, row, outer) of q, as `rows_map` has them: a box has all heads that
    share a key head."""
    group = spec.heads_q // spec.heads_kv
    rows = rows_map(
        spec, (spec.seqlen_q, spec.heads_q, spec.head_dim), strides, _WARPGROUP_ROWS // group
    )
    head_dim, length, heads, *outer = rows.shape
    row, head, *steps = rows.strides
    column, box_rows, _, *box = rows.box
    return TensorMap(
        spec.dtype,
        (head_dim, heads, length, *outer),
        (head, row, *steps),
        (column, group, box_rows, *box),
    )


def _keys(
    call: Call, config: Sm90ForwardConfig, head_dim: int, strides: tuple[int, ...]
) -> TensorMap:
    """The axes of k or v whose rows are batched or ragged."""
    spec = call.spec
    return rows_map(spec, (spec.seqlen_k, spec.heads_kv, head_dim), strides, config.tile_n)


def _pages(
    call: Call,
    config: Sm90ForwardConfig,
    head_dim: int,
    strides: tuple[int, ...],
    boxes: int = 1,
) -> TensorMap:
    """The axes (head_dim, slot, head, page) of k or v in pages; a cache is one page a sequence.
    With key groups (column of a panel, slot of a group, panel, group, head and page)."""
    spec = call.spec
    pages, slots = shapes(spec, call.num_pages)[1][:2]
    page, slot, head = strides[:3]
    keys = boxes * box_keys(spec, config)
    if config.key_groups:
        panels, panel = head_dim // _PANEL_COLUMNS, _PANEL_COLUMNS * spec.dtype.itemsize
        heads = (pages - 1) * (page // head) + spec.heads_kv
        return TensorMap(
            spec.dtype,
            (_PANEL_COLUMNS, _GROUP_KEYS, panels, slots // _GROUP_KEYS, heads),
            (slot, panel, _GROUP_KEYS * slot, head),
            (_PANEL_COLUMNS, _GROUP_KEYS, panels, keys // _GROUP_KEYS, 1),
        )
    return TensorMap(
        spec.dtype,
        (head_dim, slots, spec.heads_kv, pages),
        (slot, head, page),
        (_PANEL_COLUMNS, keys, 1, 1),
    )


def has_key_groups(call: Call) -> bool:
    """Whether one copy can bring all columns of keys, and of values, in pages: as a tensor map has
    five axes, heads and pages are one, which counts heads."""
    spec = call.spec
    if spec.keys != "paged" or (spec.head_dim, spec.head_dim_v) != KEY_GROUP_DIMS:
        return False
    (page, _, head, _), (page_v, _, head_v, _) = call.strides.k, call.strides.v
    heads = page_heads(call)
    return (
        page == heads * head
        and page_v == heads * head_v
        and heads >= spec.heads_kv
        and call.num_pages * heads < 1 << 31
    )


def page_heads(call: Call) -> int:
    """The stride of a page of keys in those of a head."""
    return call.strides.k[0] // call.strides.k[2]


def _pairs(call: Call, config: Sm90ForwardConfig) -> dict[str, TensorMap | None]:
    """The maps of k and v in boxes of twice as many keys, where a block consists of an odd number
    of boxes and pages have room for two."""
    spec = call.spec
    box = box_keys(spec, config)
    if spec.keys != "paged" or config.tile_n % (2 * box) == 0 or spec.page_size < 2 * box:
        return {}
    return {
        f"{name}_pair": _pages(call, config, head_dim, strides, boxes=2)
        for name, head_dim, strides in (
            ("k", spec.head_dim, call.strides.k),
            ("v", spec.head_dim_v, call.strides.v),
        )
    }


def box_keys(spec: AttentionSpec, config: Sm90ForwardConfig) -> int:
    """Keys in a box: all that are loaded together, or the largest power of two that divides both
    these and a page."""
    keys = config.loaded_keys
    return keys if spec.keys != "paged" else min(spec.page_size, keys & -keys)


def _scores(layout: Layout | None, pitch: int) -> TensorMap | None:
    """The axes (key, query, head, batch) of a bias or mask, where TMA can address it
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
    contiguous = lengths[-1] > 1 and lengths[-2] > 1 and strides[-1] == dtype.itemsize
    if not (contiguous and addressable(steps[:3])):
        return None
    box = (pitch, _WARPGROUP_ROWS, 1, 1)
    return TensorMap(dtype, lengths[::-1], steps[2::-1], box, swizzled=False)
