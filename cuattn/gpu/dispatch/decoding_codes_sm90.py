"""Decoding over codes on Hopper: which calls decoding/decode_codes_sm90.cu serves, in which
variants."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from cuattn._quantized import code_columns, format_number
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.decoding import (
    CODE_FORMATS,
    CODE_TILE_KEYS,
    INT4,
    as_decoding,
    bits_of_two,
    code_groups,
    part_bytes,
    partitioned,
)
from cuattn.gpu.dispatch.decoding_sm80 import CODE_ROWS
from cuattn.gpu.dispatch.decoding_sm90 import CLUSTER_HEAD_DIMS
from cuattn.gpu.dispatch.launch import Call, Launch, capability, shapes
from cuattn.gpu.dispatch.routing import rows_of_sequence
from cuattn.gpu.params import DECODE_MAPS
from cuattn.gpu.tensormap import TensorMap, addressable

SMALL_PAGE_KEYS = 16  # of the smallest pages
SCALE_BYTES = {INT4: 4}  # of a token and head, by format, where they are not 2

#: How many pairs of a sequence and a key head each multiprocessor must have for codes of 8 bits at
#: head_dim 128, in pages of fewer keys than a warp's tile or not: fewer have few splits, whose
#: beginnings and ends decode_sm80.cu passes sooner. Otherwise this kernel is the faster one.
LEAST_PAIRS = {True: 6, False: 2}


@dataclasses.dataclass(frozen=True)
class Sm90CodesConfig(Config):
    """decoding/decode_codes_sm90.cu."""

    dtype: str
    head_dim: int  # of both
    rows: int
    warp_keys: int  # of a warp's tile
    warps: int  # that compute
    stages: int
    k_format: int  # as in Sm80DecodeConfig
    v_format: int
    tile_keys: int = 256  # by which work is shared out

    @property
    def blocks_per_sm(self) -> int:
        """Which one block fills."""
        return 1

    @property
    def threads(self) -> int:
        """A warp for each ring, and a warpgroup of which one loads."""
        return 32 * (self.warps + 4)

    @property
    def smem_bytes(self) -> int:
        """The rings, queries, four rows of O for each warp, then what is small."""
        row_bits = self.head_dim * bits_of_two(self.k_format, self.v_format)
        row = row_bits // 8 + sum(SCALE_BYTES.get(n, 2) for n in (self.k_format, self.v_format))
        rings = self.warps * self.stages * (self.warp_keys * row + 16)
        rows = 2 * self.rows * self.head_dim * 2 + self.warps * 4 * (self.head_dim * 4 + 8)
        small = self.rows * 40 + 512
        return -(-(rings + rows + small) // 1024) * 1024

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result."""
        return part_bytes(self.rows, self.head_dim, 4)


class Sm90CodesDecode:
    """16-bit queries of any number of sequences, over codes."""

    name = "decode_codes_sm90"
    decodes = True
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None. Its grid is that of `Sm80Decode`."""
        if (taken := as_decoding(call)) is None or not call.spec.quantized:
            return None
        call, spec = taken, taken.spec
        if capability(call.arch) != 90 or spec.dtype.itemsize != 2 or not call.vectors:
            return None
        if not all(addressable(array[:-1]) for array in call.strides[1:3]) or call.elementwise:
            return None
        if spec.head_dim != spec.head_dim_v or spec.head_dim not in CLUSTER_HEAD_DIMS:
            return None
        if spec.keys == "paged" and spec.page_size < SMALL_PAGE_KEYS:
            return None
        if code_groups(call, spec.head_dim) != (1, 1) or not _has_packed_scales(call):
            return None
        tiles = CODE_ROWS[spec.head_dim]
        tile_rows = next((n for n in tiles if rows_of_sequence(spec) <= n), tiles[-1])
        # As box_shift in the kernel.
        small = spec.keys == "paged" and spec.page_size < CODE_TILE_KEYS
        if not _pays(call, small_pages=small):
            return None
        formats = spec.k_format, spec.v_format
        launch = partitioned(
            call, _sm90_codes_variant(spec.dtype.name, spec.head_dim, tile_rows, formats)
        )
        box_keys = SMALL_PAGE_KEYS if small else CODE_TILE_KEYS
        return dataclasses.replace(
            launch,
            arguments=(*launch.arguments, DECODE_MAPS.arguments()),
            tensor_maps={
                name: _map(call, strides, format, box_keys)
                for name, strides, format in zip("kv", call.strides[1:3], formats, strict=True)
            },
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) != 90:
            return
        for dtype, head_dim, formats in itertools.product(
            ("float16", "bfloat16"), CLUSTER_HEAD_DIMS, CODE_FORMATS
        ):
            for rows in CODE_ROWS[head_dim]:
                yield _sm90_codes_variant(dtype, head_dim, rows, formats)


def _map(call: Call, strides: tuple[int, ...], format: str, box_keys: int) -> TensorMap:
    """Codes (sequence or page, key, head, bytes) as the kernel reads them, `box_keys` keys of a
    head at a time: (bytes of a row, key, 1, head, sequence or page)."""
    spec = call.spec
    outer, keys = shapes(spec, call.num_pages)[1][:2]
    page, key, head, _ = strides
    columns = code_columns(format, spec.head_dim)
    return TensorMap(
        np.dtype(np.uint8),
        (columns, keys, 1, spec.heads_kv, outer),
        (key, columns, head, page),
        (columns, box_keys, 1, 1, 1),
        swizzle_bytes=columns,
        l2_bytes=128,  # of int4, in half of a line is the next head's row
    )


def _pays(call: Call, *, small_pages: bool) -> bool:
    """Whether this kernel is the faster one; with splits that do not depend on the batch, nor does
    the answer."""
    spec = call.spec
    if spec.head_dim == 64 or "int4" in (spec.k_format, spec.v_format):
        return True
    least = LEAST_PAIRS[small_pages] * call.multiprocessors
    return least == 0 or (call.num_splits is None and spec.batch * spec.heads_kv >= least)


def _has_packed_scales(call: Call) -> bool:
    """Whether 16 bytes of a head's scales are those of neighbouring tokens, with their minima where
    codes have 4 bits, wherever they begin with one whose number is a multiple of as many."""
    formats = call.spec.k_format, call.spec.v_format
    for scales, format in zip((call.k_scales, call.v_scales), formats, strict=True):
        assert scales is not None
        size = SCALE_BYTES.get(format_number(format), 2)
        page, seq, head, _ = scales.strides
        if scales.is_float32 or not scales.aligned or seq * 2 != size or page % 8 or head % 8:
            return False
        if scales.has_minimum != (format == "int4") or call.spec.seqlen_k % (16 // size):
            return False
    return True


def _sm90_codes_variant(dtype: str, head_dim: int, rows: int, formats: tuple[str, str]) -> Variant:
    """With the deepest rings that shared memory has room for."""
    numbers = format_number(formats[0]), format_number(formats[1])
    # Expanding 4 bits takes as long as 8, and there are twice as many.
    warps = 12 if rows == 8 and INT4 in numbers else 8
    for stages in (6, 5, 4, 3, 2):
        config = Sm90CodesConfig(dtype, head_dim, rows, CODE_TILE_KEYS, warps, stages, *numbers)
        if config.smem_bytes <= 227 << 10:
            return Variant("decoding/decode_codes_sm90.cu", "decode_codes_sm90", config)
    raise AssertionError(f"no rings fit for {head_dim=}, {rows=}, {formats=}")
