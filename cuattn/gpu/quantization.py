"""Keys and values that are codes, on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cupy
import numpy as np

from cuattn._quantized import BFLOAT16, FLOAT32, FORMATS, QuantizedArray, code_columns
from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, dispatch
from cuattn.gpu.arguments import Scales
from cuattn.gpu.memory import contiguous_last_axis, pointer, scratch_array, use_device
from cuattn.gpu.params import QUANTIZE_PARAMS, divisor
from cuattn.gpu.plan import as_kernel_argument


class Operand(NamedTuple):
    """Keys or values as a launch wants them."""

    codes: cupy.ndarray | None  # (page or sequence, token, head, columns), the last axis contiguous
    scales: Scales | None  # None: they are no codes
    addresses: tuple[int, int, int]  # of scales, minima and offset; 0 for what is not there


#: Beside keys or values whose strides and address are known otherwise.
NO_SCALES = Operand(None, None, (0, 0, 0))


def format_of(array: Any) -> str:
    """The format of codes, "" for plain numbers."""
    return array.dtype if isinstance(array, QuantizedArray) else ""


def as_sequence(array: Any) -> Operand:
    """Keys or values (token, head, features) as those of one sequence."""
    if not isinstance(array, QuantizedArray):
        return operand(array[None])
    minimum = None if array.minimum is None else array.minimum[None]
    return operand(array.of(array.data[None], array.scale[None], minimum))


def operand(array: Any) -> Operand:
    """Keys or values, plain or quantised, of four axes."""
    if not isinstance(array, QuantizedArray):
        return Operand(contiguous_last_axis(array), None, (0, 0, 0))
    if array.on_device is not None:
        return array.on_device
    scale, minimum, offset = array.scale, array.minimum, array.offset
    addresses = pointer(scale), pointer(minimum), pointer(offset)
    strides = _strides(scale)
    minimum_strides = (0, 0, 0, 0) if minimum is None else _strides(minimum)
    scales = Scales(
        strides,
        minimum_strides,
        scale.shape[-1],
        is_float32=scale.dtype == FLOAT32,
        has_minimum=minimum is not None,
        paired=scale.dtype.itemsize == 2
        and addresses[1] == addresses[0] + 2
        and addresses[0] % 4 == 0
        and minimum_strides == strides
        and all(stride % 2 == 0 for stride in strides),
        has_offset=offset is not None,
        rotated=array.rotation is not None,
        aligned=addresses[0] % 16 == 0,
    )
    made = Operand(contiguous_last_axis(array.data), scales, addresses)
    if made.codes is array.data:  # else it is a copy of this call's
        object.__setattr__(array, "on_device", made)
    return made


def sequences_to_expand(k: Any, v: Any, spec: AttentionSpec, *, elementwise: bool) -> int:
    """As of :mod:`cuattn.gpu.dispatch.quantization`, on the current device."""
    if not (spec.k_format and spec.v_format):
        return 0
    arch = compiler.device_arch(cupy.cuda.runtime.getDevice())
    return dispatch.sequences_to_expand(spec, (k.like, v.like), arch, elementwise=elementwise)


def expands_in_kernel(k: Any, v: Any, spec: AttentionSpec) -> bool:
    """Whether the forward kernel reads codes of prompts, and expands them itself: scores are no
    more than scaled."""
    device = cupy.cuda.runtime.getDevice()
    if not (spec.k_format and spec.v_format):
        return False
    if compiler.device_arch(device) != "sm_90a":
        return False
    tiers = dispatch.current_tiers()
    own_k, own_v = operand(k), operand(v)
    return (
        any(tier.name == dispatch.Sm90CodesForward.name for tier in tiers)
        and dispatch.serves_codes(
            spec, own_k.scales, own_v.scales, compiler.multiprocessors(device)
        )
        and all(
            dispatch.addressable_codes(of.codes.strides, of.codes.data.ptr) for of in (own_k, own_v)
        )
        and (k.rotation is None or k.offset is None)
    )


def rotates_in_kernel(spec: AttentionSpec) -> bool:
    """Whether the forward kernel that reads codes rotates queries as keys are."""
    device = cupy.cuda.runtime.getDevice()
    return dispatch.rotates_in_kernel(spec, compiler.multiprocessors(device))


def rotates_queries(k: QuantizedArray, spec: AttentionSpec) -> bool:
    """Whether queries are to be rotated instead of the keys that codes are expanded to."""
    return k.rotation is not None and k.offset is None and dispatch.rotates_queries(spec)


def unrotated(k: QuantizedArray) -> QuantizedArray:
    """The same codes, of the features that were rotated."""
    return QuantizedArray(k.data, k.scale, dtype=k.dtype, minimum=k.minimum, like=k.like)


def rotated(q: cupy.ndarray) -> cupy.ndarray:
    """Queries with the rotation of the keys, in scratch memory."""
    out = scratch_array(q.shape, q.dtype)
    x, codes = _four_axes(contiguous_last_axis(q)), _four_axes(out)
    variant = dispatch.rotate(q.dtype.name, q.shape[-1])
    pages, tokens, heads, head_dim = x.shape
    params = QUANTIZE_PARAMS.pack(
        x.data.ptr,
        codes.data.ptr,
        *(0,) * 5,
        *(stride // x.itemsize for stride in x.strides[:-1]),
        *codes.strides[:-1],
        *(0,) * 9,
        pages * tokens * heads,
        tokens,
        heads,
        head_dim,
        *(0,) * 8,
        *divisor(heads),
        *divisor(tokens),
    )
    kernel = compiler.kernel(variant, x.device.id)
    blocks = -(-pages * tokens * heads // variant.config.rows)
    kernel((blocks,), (variant.config.threads,), (as_kernel_argument(params),))
    return out


def expanded(
    k: QuantizedArray,
    v: QuantizedArray,
    spec: AttentionSpec,
    seq_lens: cupy.ndarray | None,
    page_table: cupy.ndarray | None,
) -> tuple[cupy.ndarray, cupy.ndarray, AttentionSpec]:
    """Keys and values as numbers of q's dtype, in a cache of each, and the call over these. Tokens
    beyond a sequence's length are left as they are."""
    dims = spec.head_dim, spec.head_dim_v
    caches = [
        scratch_array((spec.batch, spec.seqlen_k, spec.heads_kv, dim), spec.dtype) for dim in dims
    ]
    pairs = list(zip(caches, (k, v), strict=True))
    where = {"page_table": page_table, "seq_lens": seq_lens}
    # Half of the launches' beginnings and ends, where one kernel serves both.
    for part in [pairs] if dims[0] == dims[1] else [pairs[:1], pairs[1:]]:
        _dequantize(part, **where)
    plain = dataclasses.replace(spec, k_format="", v_format="", keys="cached", page_size=0)
    return caches[0], caches[1], plain


def scale_addresses(k: Operand, v: Operand) -> dict[str, int]:
    """What DecodeParams calls the addresses of scales, minima and offsets."""
    names = ("scale", "minimum", "offset")
    return {
        f"{label}_{name}": address
        for label, each in (("k", k), ("v", v))
        for name, address in zip(names, each.addresses, strict=True)
    }


def _strides(scale: cupy.ndarray) -> tuple[int, ...]:
    """Element strides, 0 along axes of length 1."""
    return tuple(
        0 if n == 1 else stride // scale.itemsize
        for n, stride in zip(scale.shape, scale.strides, strict=True)
    )


class Codes(NamedTuple):
    """Codes of some rows, and what gives their values."""

    data: cupy.ndarray
    scale: cupy.ndarray
    minimum: cupy.ndarray | None


def quantize(
    x: cupy.ndarray,
    format: str,
    axes: tuple[int, ...],
    group_size: int,
    *,
    symmetric: bool,
    offset: cupy.ndarray | None,
    rotate: bool,
    scale: cupy.ndarray | None,
    minimum: cupy.ndarray | None,
) -> Codes:
    """Quantise an array; parameters and result as of
    :func:`cuattn.reference.quantization.quantize`."""
    with use_device(x):
        is_static = bool(axes) or scale is not None
        finds_first = scale is None and is_static  # a scale of many rows, before any has codes
        if scale is None:
            shape = [1 if axis in axes else n for axis, n in enumerate(x.shape[:-1])]
            groups = x.shape[-1] // group_size
            scale, minimum = _empty_scales((*shape, groups), pair=not symmetric)
        columns = code_columns(format, x.shape[-1])
        array = QuantizedArray(
            cupy.empty((*x.shape[:-1], columns), FORMATS[format].storage),
            scale,
            dtype=format,
            minimum=minimum,
            offset=offset,
            rotation="hadamard" if rotate else None,
        )
        if x.size:
            x = contiguous_last_axis(x)
            if finds_first:
                _find_scales(x, array)
            _quantize(x, array, is_static=is_static)
        elif finds_first:
            scale.fill(1)
            if minimum is not None:
                minimum.fill(0)
        return Codes(array.data, scale, minimum)


def dequantize(array: QuantizedArray, dtype: np.dtype) -> cupy.ndarray:
    """The values of codes; `dtype` is what float32 is rounded to."""
    with use_device(array.data):
        x = cupy.empty(array.shape, dtype)
        if x.size:
            _dequantize([(x, array)])
        return x


def _empty_scales(
    shape: tuple[int, ...], *, pair: bool
) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Room for scales, and minima, as kernels read them: a head's of all tokens one after the
    other, a minimum beside its scale."""
    parts = 2 if pair else 1
    *before, tokens, heads, groups = (1, *shape) if len(shape) == 2 else shape
    memory = cupy.empty((*before, heads, tokens, groups, parts), BFLOAT16)
    seen = memory.swapaxes(-4, -3)
    seen = seen.reshape(*shape, parts) if len(shape) == 2 else seen
    return seen[..., 0], seen[..., 1] if pair else None


def _quantize(x: cupy.ndarray, array: QuantizedArray, *, is_static: bool) -> None:
    """Launch the kernel that makes codes of x."""
    x, codes, lanes = _operands(x, array)
    variant = dispatch.quantize(x.dtype.name, lanes, array, is_static=is_static, tokens=x.shape[1])
    config = variant.config
    params = _params(x, codes, array, is_static=is_static, block_tokens=config.block_tokens)
    kernel = compiler.kernel(variant, x.device.id)
    pages, tokens, heads = x.shape[:-1]
    blocks = -(-pages * -(-tokens // config.block_tokens) * heads // config.rows)
    if config.blocks_per_sm:
        blocks = min(blocks, config.blocks_per_sm * compiler.multiprocessors(x.device.id))
    kernel((blocks,), (config.threads,), (as_kernel_argument(params),))


def _dequantize(
    pairs: list[tuple[cupy.ndarray, QuantizedArray]], **where: cupy.ndarray | None
) -> None:
    """Make numbers of codes, of one array or of two of the same shape, dtype and order, which have
    a launch together where one kernel serves both; `where` as of `_params`."""
    operands = [_operands(*pair) for pair in pairs]
    page_size = 0 if where.get("page_table") is None else operands[0][1].shape[1]
    variants = [
        dispatch.dequantize(x.dtype.name, lanes, array, page_size)
        for (x, _, lanes), (_, array) in zip(operands, pairs, strict=True)
    ]
    for variant in dict.fromkeys(variants):
        config = variant.config
        block_tokens = max(config.tokens, 1)
        packed = [
            _params(x, codes, array, is_static=True, block_tokens=block_tokens, **where)
            for (x, codes, _), (_, array), its in zip(operands, pairs, variants, strict=True)
            if its == variant
        ]
        x = operands[0][0]
        kernel = compiler.kernel(variant, x.device.id)
        pages, tokens, heads = x.shape[:-1]
        blocks = -(-pages * -(-tokens // block_tokens) * heads // config.rows)
        arguments = (as_kernel_argument(packed[0] + packed[-1]),)
        kernel((blocks, len(packed)), (config.threads,), arguments)


def _operands(x: cupy.ndarray, array: QuantizedArray) -> tuple[cupy.ndarray, cupy.ndarray, int]:
    """Numbers and codes of four axes, and how many lanes share a row of them."""
    x, codes = (_four_axes(part) for part in (x, contiguous_last_axis(array.data)))
    aligned = (
        x.data.ptr % 16 == 0
        and codes.data.ptr % 16 == 0
        and all(stride % 16 == 0 for stride in (*x.strides[:-1], *codes.strides[:-1]))
    )
    lanes = dispatch.row_lanes(x.dtype.name, x.shape[-1], array.group_size, aligned=aligned)
    return x, codes, lanes


def _find_scales(x: cupy.ndarray, array: QuantizedArray) -> None:
    """Fill in scales, and minima, that many rows share."""
    x = _four_axes(x)
    found = scratch_array((2, *x.shape[-2:]), np.dtype(np.uint32))
    found[0], found[1] = 0xFFFFFFFF, 0
    params = as_kernel_argument(_params(x, _four_axes(array.data), array, is_static=True))
    extents, scales = (
        compiler.kernel(variant, x.device.id)
        for variant in dispatch.extent(x.dtype.name, x.shape[-1])
    )
    rows, heads = x.shape[0] * x.shape[1], x.shape[2]
    blocks = max(1, min(-(-rows // 8), 16 * compiler.multiprocessors(x.device.id) // heads))
    extents((blocks, heads), (256,), (params, found))
    scales((-(-array.scale.size // 256),), (256,), (params, found))


def _params(
    x: cupy.ndarray,
    codes: cupy.ndarray,
    array: QuantizedArray,
    *,
    is_static: bool,
    block_tokens: int = 1,
    page_table: cupy.ndarray | None = None,
    seq_lens: cupy.ndarray | None = None,
) -> bytes:
    """QuantizeParams of four axes, for a kernel that takes tokens of a head in blocks. With a page
    table x has sequences where `codes` has pages; of each of x's, the tokens are wanted that
    `seq_lens` counts."""
    scale = _four_axes(array.scale)
    minimum = None if array.minimum is None else _four_axes(array.minimum)
    pages, tokens, heads, head_dim = x.shape
    group = array.group_size
    token_blocks = -(-tokens // block_tokens)
    return QUANTIZE_PARAMS.pack(
        x.data.ptr,
        codes.data.ptr,
        scale.data.ptr,
        pointer(minimum),
        pointer(array.offset),
        pointer(page_table),
        pointer(seq_lens),
        *(stride // x.itemsize for stride in x.strides[:-1]),
        *codes.strides[:-1],
        *_strides(scale),
        *((0, 0, 0, 0) if minimum is None else _strides(minimum)),
        0 if page_table is None else page_table.strides[0] // page_table.itemsize,
        pages * token_blocks * heads,
        tokens,
        heads,
        head_dim,
        codes.shape[1].bit_length() - 1,
        codes.shape[0],
        FORMATS[array.dtype].number,
        group,
        group.bit_length() - 1,
        scale.dtype == FLOAT32,
        array.rotation is not None,
        is_static,
        *divisor(heads),
        *divisor(token_blocks),
    )


def _four_axes(array: cupy.ndarray) -> cupy.ndarray:
    """A view (pages, tokens, heads, features); a copy where the axes before tokens do not follow
    each other."""
    if array.ndim > 4:
        return array.reshape(-1, *array.shape[-3:])
    return array[(None,) * (4 - array.ndim)]
