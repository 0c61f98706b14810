"""Prompts over codes on Hopper: which calls attention/forward_codes_sm90.cu serves, in which
variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from cuattn._quantized import BFLOAT16, code_columns, format_number
from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import Scales, forward_arguments
from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.arguments_sm90 import (
    WARPGROUP_ROWS,
    box_keys,
    kernel_arguments,
    rows_map,
    score_scales,
)
from cuattn.gpu.dispatch.config_sm90 import Sm90ForwardConfig
from cuattn.gpu.dispatch.decoding_times import rows_of_sequence
from cuattn.gpu.dispatch.launch import Call, Launch, shapes
from cuattn.gpu.dispatch.order_sm90 import sm90_section
from cuattn.gpu.dispatch.quantization import EXPAND_ROWS, FORMAT_PAIRS
from cuattn.gpu.dispatch.routing import MIN_PAGE
from cuattn.gpu.dispatch.sm90 import SCHEDULER_BYTES
from cuattn.gpu.params import CODE_SCALES
from cuattn.gpu.tensormap import TensorMap, addressable

HEAD_DIM = 128
EXPAND_WARPS = 4
EXPAND_REGISTERS = 56


@dataclasses.dataclass(frozen=True)
class Sm90CodesForwardConfig(Sm90ForwardConfig):
    """attention/forward_codes_sm90.cu."""

    k_format: int = 0  # tile::Format
    v_format: int = 0
    k_row_bytes: int = 0  # of codes
    v_row_bytes: int = 0
    expand_warps: int = EXPAND_WARPS  # that make numbers of codes
    expand_registers: int = EXPAND_REGISTERS  # of their threads
    code_stages: int = 4  # of a block's codes, of keys or of values

    @property
    def threads(self) -> int:
        """Those of forward_sm90.cu, and the warps that expand."""
        return 128 * (self.warpgroups + 1) + 32 * self.expand_warps

    @property
    def smem_bytes(self) -> int:
        """The same with the codes of some blocks."""
        codes = self.code_stages * self.tile_n * max(self.k_row_bytes, self.v_row_bytes)
        return Sm90ForwardConfig.smem_bytes.fget(self) + codes


class Sm90CodesForward:
    """16-bit queries of more rows than decoding kernels are for, over codes with a scale a row."""

    name = "forward_codes_sm90"
    decodes = False
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None."""
        spec = call.spec
        if (
            call.arch != "sm_90a"
            or call.partial is not None
            or call.num_splits is not None
            or call.has_score
            or not call.addressable
            or call.k_scales is None
            or call.v_scales is None
            or call.k_scales.rotated
            or not serves_codes(spec, call.k_scales, call.v_scales)
        ):
            return None
        config = _config(spec.k_format, spec.v_format)
        tiles = -(-spec.seqlen_q // config.tile_m) * spec.batch * spec.heads_q
        if tiles >= 1 << 31:
            return None
        blocks = min(tiles, call.multiprocessors)
        tensor_maps: dict[str, TensorMap | None] = {
            "q": rows_map(
                spec,
                (spec.seqlen_q, spec.heads_q, spec.head_dim),
                call.strides.q,
                WARPGROUP_ROWS,
            ),
            "k": _map(call, config, spec.k_format, call.strides.k),
            "v": _map(call, config, spec.v_format, call.strides.v),
            "bias": None,
            "mask": None,
        }
        arguments = kernel_arguments(
            spec,
            config,
            tensor_maps,
            scales=score_scales(call),
            section=sm90_section(spec, config, blocks),
            table_stride=call.table_stride,
            num_pages=call.num_pages,
        )
        strides = CODE_SCALES.arguments(
            k_scale_stride=call.k_scales.strides, v_scale_stride=call.v_scales.strides
        )
        return Launch(
            _variant(config),
            (blocks,),
            (forward_arguments(spec, call.strides), arguments.followed_by(strides)),
            tensor_maps,
            workspace_bytes=SCHEDULER_BYTES,
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if arch == "sm_90a":
            for formats in FORMAT_PAIRS:
                yield _variant(_config(*formats))


def serves_codes(spec: AttentionSpec, k_scales: Scales, v_scales: Scales) -> bool:
    """Whether the kernel serves calls over such codes, once queries are rotated as keys are."""
    return (
        spec.dtype == BFLOAT16  # float16 ends early: what was of another type may lie beyond
        and spec.rows == "batched"
        and spec.keys in ("cached", "paged")
        and (spec.keys == "cached" or spec.page_size >= MIN_PAGE)
        and spec.head_dim == spec.head_dim_v == HEAD_DIM
        and (spec.k_format, spec.v_format) in FORMAT_PAIRS
        and spec.window_left is None
        and spec.softcap == 0.0
        and spec.scale > 0.0
        and spec.dropout == 0.0
        and 0 < spec.seqlen_k < 1 << 29
        and spec.seqlen_q < 1 << 29
        and rows_of_sequence(spec) > EXPAND_ROWS
        and _has_scale_of_row(spec.k_format, k_scales)
        and _has_scale_of_row(spec.v_format, v_scales)
        and not v_scales.rotated
    )


def addressable_codes(strides: tuple[int, ...], address: int) -> bool:
    """Whether TMA can address codes."""
    return address % 16 == 0 and addressable(strides[:-1])


def _has_scale_of_row(format: str, scales: Scales) -> bool:
    minimum = scales.has_minimum and scales.paired if format == "int4" else not scales.has_minimum
    return scales.groups == 1 and not scales.is_float32 and not scales.has_offset and minimum


def _config(k_format: str, v_format: str) -> Sm90CodesForwardConfig:
    return Sm90CodesForwardConfig(
        "bfloat16",
        HEAD_DIM,
        HEAD_DIM,
        tile_n=128,
        warpgroups=2,
        q_stages=1,
        bound_left=False,
        bound_right=True,
        varlen=False,
        score=False,
        elementwise=False,
        paged_kv=True,
        seq_lens=True,
        k_format=format_number(k_format),
        v_format=format_number(v_format),
        k_row_bytes=code_columns(k_format, HEAD_DIM),
        v_row_bytes=code_columns(v_format, HEAD_DIM),
        expand_warps=EXPAND_WARPS,
        expand_registers=EXPAND_REGISTERS,
    )


def _variant(config: Sm90CodesForwardConfig) -> Variant:
    return Variant("attention/forward_codes_sm90.cu", "forward_sm90", config)


def _map(
    call: Call, config: Sm90CodesForwardConfig, format: str, strides: tuple[int, ...]
) -> TensorMap:
    """The axes (byte of a row, slot, head, page) of codes; a cache is one page a sequence."""
    spec = call.spec
    pages, slots = shapes(spec, call.num_pages)[1][:2]
    page, slot, head = strides[:3]
    columns = code_columns(format, spec.head_dim)
    return TensorMap(
        np.dtype(np.uint8),
        (columns, slots, spec.heads_kv, pages),
        (slot, head, page),
        (columns, box_keys(spec, config), 1, 1),
        swizzled=False,
        l2_bytes=128,  # in half of a line may be the next head's row
    )
