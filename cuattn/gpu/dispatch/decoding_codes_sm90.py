"""Decoding over codes on Hopper: which calls decoding/decode_codes_sm90.cu serves, in which
variants."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from cuattn._quantized import code_columns, format_number
from cuattn._spec import AttentionSpec
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.decoding import (
    CODE_FORMATS,
    CODE_TILE_KEYS,
    INT4,
    MOST_SPREAD_STEPS,
    SCALE_BYTES,
    as_decoding,
    bits_of_two,
    code_groups,
    has_packed_scales,
    part_bytes,
    partitioned,
    rows_for_tile,
)
from cuattn.gpu.dispatch.decoding_sm80 import CODE_ROWS
from cuattn.gpu.dispatch.decoding_sm90 import CODE_HEAD_DIMS
from cuattn.gpu.dispatch.launch import Call, Launch, capability, shapes
from cuattn.gpu.params import DECODE_MAPS
from cuattn.gpu.tensormap import TensorMap, addressable

SMALL_PAGE_KEYS = 16  # of the smallest pages

#: For codes of 8 bits at head_dim 128 each multiprocessor must have so many pairs of a sequence and
#: a key head, or all pairs so many keys: fewer have few splits, or short ones, whose beginnings and
#: ends decode_sm80.cu passes sooner. Otherwise this kernel is the faster one. Fewer keys do where
#: decode_sm80.cu's blocks share sequences unevenly, if each multiprocessor has so many pairs.
LEAST_PAIRS = 2
LEAST_KEYS = 1 << 19
LEAST_UNEVEN_PAIRS = 0.24
LEAST_UNEVEN_KEYS = 15 << 14

#: Rows of a warp where they are so few that their scores are shared out to twice as many lanes.
FOLDED_ROWS = 4

#: Pairs of each multiprocessor, or keys of all pairs, from which on so many are read that it does
#: not matter how many splits are merged.
MANY_PAIRS = 1.8
MANY_KEYS = 1 << 22


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
    heads: int  # of keys, whose codes lie side by side, and which a block has at the same time
    warp_rows: int  # of a tile of rows, those that a warp computes
    tile_keys: int = 256  # by which work is shared out
    merged_rows: int = 4  # of each warp, at a time

    @property
    def blocks_per_sm(self) -> int:
        """Which one block fills."""
        return 1

    @property
    def threads(self) -> int:
        """Those that compute, and a warpgroup of which some warps load."""
        return 32 * (self.warps + 4)

    @property
    def smem_bytes(self) -> int:
        """The rings, queries, some rows of O for each warp, then what is small."""
        row_bits = self.head_dim * bits_of_two(self.k_format, self.v_format)
        row = row_bits // 8 + sum(SCALE_BYTES.get(n, 2) for n in (self.k_format, self.v_format))
        rings = self.warps * self.stages * (self.warp_keys * row + 16)
        rows = 2 * self.rows * self.head_dim * 2
        rows += self.warps * self.merged_rows * (self.head_dim * 4 + 8)
        small = self.rows * 56 + 768
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
        if spec.head_dim != spec.head_dim_v or spec.head_dim not in CODE_HEAD_DIMS:
            return None
        if spec.keys == "paged" and spec.page_size < SMALL_PAGE_KEYS:
            return None
        # A prefix that each sequence reads by itself: several with the same keys have no map.
        if call.partial is not None and call.num_splits == "fixed":
            return None
        if code_groups(call, spec.head_dim) != (1, 1) or not has_packed_scales(call):
            return None
        heads, head_rows = _heads(call), rows_for_tile(call)
        if heads > 1:
            call = dataclasses.replace(
                call, spec=dataclasses.replace(spec, heads_kv=spec.heads_kv // heads)
            )
        # As key_shift in the kernel.
        small = spec.keys == "paged" and spec.page_size < CODE_TILE_KEYS
        if not _pays(call):
            return None
        formats = spec.k_format, spec.v_format
        rows, warp_rows = _rows(head_rows, heads, spec.head_dim)
        variant = _sm90_codes_variant(
            spec.dtype.name, spec.head_dim, formats, heads, rows, warp_rows
        )
        launch = partitioned(call, variant, most_steps=MOST_SPREAD_STEPS)
        lanes, groups = launch.grid
        launch = dataclasses.replace(launch, grid=(lanes, _even(groups, max(spec.batch, 1))))
        box_keys = SMALL_PAGE_KEYS if small else CODE_TILE_KEYS
        return dataclasses.replace(
            launch,
            arguments=(*launch.arguments, DECODE_MAPS.arguments()),
            tensor_maps={
                name: _map(spec, call.num_pages, strides, format, heads, box_keys)
                for name, strides, format in zip("kv", call.strides[1:3], formats, strict=True)
            },
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) != 90:
            return
        for dtype, head_dim, formats in itertools.product(
            ("float16", "bfloat16"), CODE_HEAD_DIMS, CODE_FORMATS
        ):
            for heads in _head_counts(head_dim, formats):
                rows = CODE_ROWS[head_dim] if heads == 1 else (1, 2, 3, 8)
                for tile in dict.fromkeys(_rows(n, heads, head_dim) for n in (FOLDED_ROWS, *rows)):
                    yield _sm90_codes_variant(dtype, head_dim, formats, heads, *tile)


def _even(groups: int, batch: int) -> int:
    """As many groups of blocks, or few less, with which sequences of one length have equal numbers
    of whole splits, or groups equal numbers of sequences: what lies across sequences is merged."""
    even = groups // batch * batch if groups >= batch else batch // -(-batch // groups)
    return even if even >= 0.95 * groups and (groups >= batch or batch % even == 0) else groups


def _map(
    spec: AttentionSpec,
    num_pages: int,
    strides: tuple[int, ...],
    format: str,
    heads: int,
    box_keys: int,
) -> TensorMap:
    """Codes (sequence or page, key, head, bytes) as the kernel reads them, `box_keys` keys of some
    heads at a time: (bytes of a panel, key, panel, sequence or page), where a panel is a head's
    row, or those of as many of the block's `heads` as make 128 bytes."""
    outer, keys = shapes(spec, num_pages)[1][:2]
    page, key, head, _ = strides
    columns = code_columns(format, spec.head_dim)
    panel = min(heads * columns, 128)
    return TensorMap(
        np.dtype(np.uint8),
        (panel, keys, spec.heads_kv * columns // panel, outer),
        (key, head * (panel // columns), page),
        (panel, box_keys, 1, 1),
        swizzle_bytes=panel,
    )


def _head_counts(head_dim: int, formats: tuple[str, str]) -> tuple[int, ...]:
    """Numbers of key heads that a block may have side by side: those whose rows make 128 bytes
    together, or half of it."""
    if formats == ("int4", "int4") and head_dim == 64:
        return 1, 2, 4
    return (1, 2) if head_dim == 64 or "int4" in formats else (1,)


def _heads(call: Call) -> int:
    """How many key heads a block has side by side. With as many as can be, tiles take fewer
    instructions, and a block has fewer splits to begin and to end; with less, sequences that are
    few have fewer splits to merge. With splits that do not depend on the batch, nor does this."""
    spec = call.spec
    formats = spec.k_format, spec.v_format
    assert call.k_scales is not None
    if spec.rows != "batched" or spec.seqlen_q != 1 or call.k_scales.has_offset:
        return 1
    if any(
        strides[2] != code_columns(format, spec.head_dim)
        for strides, format in zip(call.strides[1:3], formats, strict=True)
    ):
        return 1
    pairs = spec.batch * spec.heads_kv
    many = call.num_splits is None and (
        pairs >= MANY_PAIRS * call.multiprocessors or pairs * spec.seqlen_k >= MANY_KEYS
    )
    *fewer, most = _head_counts(spec.head_dim, formats)
    # Rows of 64 bytes are too short to be read one by one where they are of 4 bits.
    if not many and fewer and (spec.head_dim == 128 or most == 4 or "int4" not in formats):
        most = fewer.pop()
    rows = spec.heads_q // spec.heads_kv
    for heads in (most, *fewer[::-1]):
        if spec.heads_kv % heads == 0 and (rows <= FOLDED_ROWS or rows == 8):
            return heads
    return 1


def _rows(head_rows: int, heads: int, head_dim: int) -> tuple[int, int]:
    """Rows of a tile, and of a warp, where a head has so many."""
    if heads == 1:
        tiles = CODE_ROWS[head_dim]
        rows = next((n for n in tiles if head_rows <= n), tiles[-1])
        return rows, FOLDED_ROWS if head_rows <= FOLDED_ROWS else rows
    return -(-heads * head_rows // 8) * 8, FOLDED_ROWS if head_rows <= FOLDED_ROWS else 8


def _pays(call: Call) -> bool:
    """Whether this kernel is the faster one; with splits that do not depend on the batch, nor does
    the answer."""
    spec = call.spec
    if spec.head_dim == 64 or "int4" in (spec.k_format, spec.v_format):
        return True
    pairs, multiprocessors = spec.batch * spec.heads_kv, call.multiprocessors
    if multiprocessors == 0:
        return True
    if call.num_splits is not None:
        return False
    if pairs >= LEAST_PAIRS * multiprocessors:
        return True
    blocks = multiprocessors // spec.heads_kv  # of decode_sm80.cu, for each key head
    if blocks == spec.batch:
        return False  # each of them has one sequence, and merges nothing
    uneven = pairs >= LEAST_UNEVEN_PAIRS * multiprocessors and blocks % spec.batch != 0
    return pairs * spec.seqlen_k >= (LEAST_UNEVEN_KEYS if uneven else LEAST_KEYS)


def _sm90_codes_variant(
    dtype: str, head_dim: int, formats: tuple[str, str], heads: int, rows: int, warp_rows: int
) -> Variant:
    """With the deepest rings that shared memory has room for, and then with eight rows merged at a
    time, if they are as deep."""
    numbers = format_number(formats[0]), format_number(formats[1])
    # What a tile takes besides its products is more where rows are short.
    warp_keys = 64 if head_dim == 64 and warp_rows == FOLDED_ROWS else CODE_TILE_KEYS
    # Expanding 4 bits takes as long as 8, and there are twice as many.
    warps = 12 if warp_rows <= 8 and INT4 in numbers else 8
    if warp_keys == 64 and numbers[0] != INT4:
        warps = 8  # registers are for the tiles
    for stages, merged_rows in itertools.product((6, 5, 4, 3, 2), (8, 4)):
        config = Sm90CodesConfig(
            dtype,
            head_dim,
            rows,
            warp_keys,
            warps,
            stages,
            *numbers,
            heads,
            warp_rows,
            merged_rows=merged_rows,
        )
        if config.smem_bytes <= 227 << 10 and warp_rows % merged_rows == 0:
            return Variant("decoding/decode_codes_sm90.cu", "decode_codes_sm90", config)
    raise AssertionError(f"no rings fit for {head_dim=}, {rows=}, {formats=}")
