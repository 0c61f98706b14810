"""Decoding on tensor cores: which calls decoding/decode_sm80.cu serves, in which variants."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from cuattn._quantized import format_number
from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import score_arguments
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.decoding import (
    CODE_FORMATS,
    CODE_GROUPS,
    CODE_TILE_KEYS,
    RING_BLOCK_BYTES,
    as_decoding,
    bits_of_two,
    code_groups,
    part_bytes,
    partitioned,
    rows_for_tile,
)
from cuattn.gpu.dispatch.decoding_times import key_bytes, rows_of_sequence
from cuattn.gpu.dispatch.launch import MAX_DIM, SHARED_KIB, Call, Launch, capability
from cuattn.gpu.params import UNBOUNDED

#: Entries of a single sequence's page table that decode_sm80.cu keeps, where there is room.
TABLE = 2048

#: The same over codes.
CODE_TABLE = 1024

#: Rows of a tile that decode_sm80.cu comes with, by head_dim, and with a bias or mask.
DECODE_ROWS = {64: (8, 16, 32, 64), 128: (8, 16, 32, 64), 256: (8, 16, 64)}
SCORED_ROWS = {64: (8, 16, 64), 128: (8, 16, 64), 256: (8, 16)}


class Rings(NamedTuple):
    """How decode_sm80.cu shares out a multiprocessor."""

    warp_keys: int
    warps_k: int
    stages: int
    blocks_per_sm: int
    query_buffers: int


#: For many short sequences on Hopper: what a block has to do at the beginning and the end of each
#: takes longer than its keys, and several blocks do it side by side. By head_dim and rows of a
#: tile; with each, how many KiB the keys and values of a sequence and key head may have.
SHORT_RINGS = {
    (64, 8): ((96, Rings(32, 2, 3, 4, 2)), (320, Rings(32, 4, 3, 2, 2))),
    (64, 16): ((96, Rings(32, 2, 3, 4, 2)), (320, Rings(32, 4, 3, 2, 2))),
    (128, 8): ((96, Rings(16, 2, 3, 4, 1)), (320, Rings(16, 4, 3, 2, 2))),
    (128, 16): ((320, Rings(16, 4, 3, 2, 1)),),
    (256, 8): ((192, Rings(16, 2, 3, 2, 2)),),
}

#: So many of the blocks must have a pair of a sequence and a key head of their own.
LEAST_PAIRS = 0.95

#: What differs in tiles of two key heads, by the rows of each.
HEAD_PAIRS: dict[int, dict[str, Any]] = {
    8: {"warps_q": 2, "warps_k": 4, "table": 0, "heads": 2},
    16: {"warps_q": 2, "warps_k": 4, "query_buffers": 1, "heads": 2},
}

#: How many columns are computed where the rows of two heads are shorter than a tile's: of shorter
#: ones the next of these, of others all. Two stages are faster then than three.
COLUMNS = (80, 96, 112)
STAGES_OF_COLUMNS = 2

#: Rows of a tile over codes, by head_dim.
CODE_ROWS = {64: (8, 16), 128: (8, 16), 256: (8,)}


@dataclasses.dataclass(frozen=True)
class Sm80DecodeConfig(Config):
    """decoding/decode_sm80.cu."""

    dtype: str
    head_dim: int  # the next of 64, 128 and 256, for both
    warp_rows: int  # of a row tile, a warp's
    warp_keys: int  # of a key tile, a slice's
    warps_q: int  # that share a slice of the keys
    warps_k: int  # slices
    stages: int
    blocks_per_sm: int
    query_buffers: int  # 2: the queries of the next split are loaded before it begins
    table: int  # entries of a single sequence's page table that shared memory has room for
    k_format: int = 0  # of codes, as in cuattn/_quantized.py; 0: elements of `dtype`
    v_format: int = 0
    k_groups: int = 1  # of a key's features, each with a scale
    v_groups: int = 1
    whole_lines: bool = True  # as of Stage in decoding/ring.cuh
    heads: int = 1  # neighbouring key heads of a tile, of which each has as many rows
    columns: int = 0  # of a head that are computed; 0: head_dim
    mask: bool = False  # there may be a mask
    bias: bool = False  # and a bias

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warp_rows * self.warps_q

    @property
    def tile_keys(self) -> int:
        """Keys of a tile."""
        return self.warp_keys * self.warps_k

    @property
    def threads(self) -> int:
        """One warp for each slice of the keys and part of the rows."""
        return 32 * self.warps_q * self.warps_k

    @property
    def smem_bytes(self) -> int:
        """The rings, Q, four rows of O for each warp, then what is small."""
        warps = self.warps_k * self.warps_q
        rings = self.warps_k * self.stages * self.stage_bytes
        pages = self.stages * warps * self.warp_keys * 4
        rows = self.query_buffers * self.rows * self.head_dim * 2 + warps * 4 * self.head_dim * 4
        small = 32 * warps + 8 * self.rows + 64 * (warps + 1) + 172 + 4 * max(self.table, 1)
        if self.mask:
            small += 4 * self.rows
        if self.k_format:
            small += self.rows * 16 * (1 + self.k_groups)
        return -(-(rings + rows + pages + small) // 128) * 128

    @property
    def stage_bytes(self) -> int:
        """Of a slice's tile of K and V, with scales, or bias and mask."""
        if not self.k_format:
            words = self.warp_keys // 4 + 1 if self.mask else 0
            words += self.warp_keys + 4 if self.bias else 0
            elements = 4 * self.rows * words + (4 if self.mask and not self.bias else 0)
            row_bytes = self.heads * self.head_dim * 2
            return self.warp_keys * row_bytes * 2 + -(-elements // 128) * 128
        bits = bits_of_two(self.k_format, self.v_format)
        row = self.head_dim * bits // 8 + 4 * (self.k_groups + self.v_groups)
        return -(-(self.warp_keys * row) // 128) * 128

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result."""
        return part_bytes(self.rows, self.head_dim, 4)


class Sm80Decode:
    """16-bit queries of any number of sequences, over 16-bit keys and values or codes."""

    name = "decode_sm80"
    decodes = True
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None. Its grid is (blocks that share out the key heads, groups
        of them)."""
        if (taken := as_decoding(call)) is None:
            return None
        call, spec = taken, taken.spec
        dims = spec.head_dim, spec.head_dim_v
        if capability(call.arch) < 80 or spec.dtype.itemsize != 2:
            return None
        if not call.vectors or any(d % 8 for d in dims):
            return None
        if max(dims) > MAX_DIM or (call.elementwise and not _reads_elements(call)):
            return None
        head_dim = next(n for n in (64, 128, 256) if max(dims) <= n)
        groups = code_groups(call, head_dim)
        if groups is None or (spec.quantized and head_dim not in CODE_ROWS):
            return None
        # Ragged rows may be of prompts; where there is about one a sequence it is decoding, and a
        # small tile wastes least.
        rows = rows_for_tile(call)
        if call.max_queries < UNBOUNDED:
            rows = call.max_queries * (spec.heads_q // spec.heads_kv)
        tiles = (SCORED_ROWS if call.elementwise else DECODE_ROWS)[head_dim]
        if spec.quantized:
            tiles = CODE_ROWS[head_dim] if groups == (1, 1) else CODE_ROWS[head_dim][:1]
        tile_rows = next((n for n in tiles if rows <= n), tiles[-1])
        if spec.quantized:
            formats = spec.k_format, spec.v_format
            variant = _sm80_variant(
                spec.dtype.name, head_dim, tile_rows, call.arch, formats, groups
            )
            return partitioned(call, variant)
        if call.elementwise:
            launch = partitioned(
                call,
                _scored_variant(
                    spec.dtype.name, head_dim, tile_rows, call.arch, bias=call.bias is not None
                ),
            )
            arguments = launch.arguments[0].followed_by(score_arguments(call.bias, call.mask))
            return dataclasses.replace(launch, arguments=(arguments,))
        config = _sm80_config(spec.dtype.name, head_dim, tile_rows, call.arch)
        rings = _short_rings(call, head_dim, tile_rows)
        if rings is not None:
            config = dataclasses.replace(config, **rings._asdict(), table=0)
        elif _pairs_heads(call, config):
            # As measured on an H200: what else of a line is read is soon needed, by another block.
            whole_lines = spec.head_dim <= 96 or spec.heads_kv <= 4
            config = dataclasses.replace(config, **HEAD_PAIRS[tile_rows], whole_lines=whole_lines)
            if columns := _columns(spec):
                config = dataclasses.replace(config, columns=columns, stages=STAGES_OF_COLUMNS)
        elif tile_rows == 8 and _has_split_lines(call):
            config = dataclasses.replace(config, whole_lines=False)
        variant = Variant("decoding/decode_sm80.cu", "decode_sm80", config)
        return partitioned(call, variant, config.heads, evenly=tile_rows <= 16)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) < 80:
            return
        for dtype, head_dim in itertools.product(("float16", "bfloat16"), (64, 128, 256)):
            for rows in DECODE_ROWS[head_dim]:
                usual = _sm80_config(dtype, head_dim, rows, arch)
                configs = [usual]
                if capability(arch) == 90:
                    short = SHORT_RINGS.get((head_dim, rows), ())
                    changes: list[dict[str, Any]] = [
                        {**rings._asdict(), "table": 0} for _, rings in short
                    ]
                    changes += [{"whole_lines": False}] if rows == 8 else []
                    if head_dim == 128 and (pairs := HEAD_PAIRS.get(rows)) is not None:
                        whole = [pairs | {"whole_lines": whole} for whole in (True, False)]
                        changes += whole
                        changes += [
                            change | {"columns": columns, "stages": STAGES_OF_COLUMNS}
                            for change, columns in itertools.product(whole, COLUMNS)
                        ]
                    configs += [dataclasses.replace(usual, **change) for change in changes]
                for config in configs:
                    yield Variant("decoding/decode_sm80.cu", "decode_sm80", config)
            for rows, bias in itertools.product(SCORED_ROWS[head_dim], (False, True)):
                yield _scored_variant(dtype, head_dim, rows, arch, bias=bias)
            for formats in CODE_FORMATS if head_dim in CODE_ROWS else ():
                for rows in CODE_ROWS[head_dim]:
                    yield _sm80_variant(dtype, head_dim, rows, arch, formats)
                for groups in CODE_GROUPS.get((*formats, head_dim), ()):
                    rows = CODE_ROWS[head_dim][0]
                    yield _sm80_variant(dtype, head_dim, rows, arch, formats, groups)


def _reads_elements(call: Call) -> bool:
    """Whether decode_sm80.cu serves a call with a bias or mask: in both, elements of neighbouring
    keys lie side by side. (It has no such variants over codes.)"""
    return not call.spec.quantized and all(
        layout.shape[-1] > 1 and layout.strides[-1] == layout.dtype.itemsize
        for layout in (call.bias, call.mask)
        if layout is not None
    )


def _sm80_variant(
    dtype: str,
    head_dim: int,
    rows: int,
    arch: str,
    formats: tuple[str, str] = ("", ""),
    groups: tuple[int, int] = (1, 1),
) -> Variant:
    if formats == ("", ""):
        config = _sm80_config(dtype, head_dim, rows, arch)
    else:
        config = _codes_config(dtype, head_dim, rows, arch, formats, groups)
    return Variant("decoding/decode_sm80.cu", "decode_sm80", config)


def _codes_config(
    dtype: str,
    head_dim: int,
    rows: int,
    arch: str,
    formats: tuple[str, str],
    groups: tuple[int, int],
) -> Sm80DecodeConfig:
    """The config over codes with the deepest rings that shared memory has room for."""
    shared = SHARED_KIB.get(capability(arch), 100) * 1024
    warp_rows = min(rows, 16, 2048 // head_dim)  # that registers have room for, with 32 keys
    # A stage takes registers, too.
    most_stages = 3 if groups != (1, 1) else 4 if warp_rows * head_dim == 2048 else 5
    for warps_k, stages in itertools.product((8, 4, 2, 1), range(most_stages, 1, -1)):
        config = Sm80DecodeConfig(
            dtype,
            head_dim,
            warp_rows,
            CODE_TILE_KEYS,
            rows // warp_rows,
            warps_k,
            stages,
            1,
            query_buffers=2,
            table=CODE_TABLE if shared >= 227 << 10 and rows == 8 and head_dim < 256 else 0,
            k_format=format_number(formats[0]),
            v_format=format_number(formats[1]),
            k_groups=groups[0],
            v_groups=groups[1],
        )
        fits = config.smem_bytes + RING_BLOCK_BYTES <= shared and config.threads <= 256
        if fits and (stages > 2 or warps_k == 1):
            return config
    raise AssertionError(f"no rings fit into {shared} bytes for {head_dim=}, {rows=}, {formats=}")


def _short_rings(call: Call, head_dim: int, rows: int) -> Rings | None:
    """Small blocks for a call of many short sequences; None for the usual ones."""
    spec = call.spec
    if capability(call.arch) != 90 or call.num_splits is not None:
        return None
    pairs = spec.batch * spec.heads_kv
    for kib, rings in SHORT_RINGS.get((head_dim, rows), ()):
        enough = pairs >= LEAST_PAIRS * rings.blocks_per_sm * call.multiprocessors
        if enough and spec.seqlen_k * key_bytes(spec) <= kib << 10:
            return rings
    return None


def _has_split_lines(call: Call) -> bool:
    """Whether rows of several key heads lie side by side in a way in which L2 had better not read
    whole lines of 128 bytes, as measured on an H200: not so that they fill lines, nor with only 32
    bytes more."""
    return _lies_side_by_side(call) and call.strides.k[-2] % 128 not in (0, 32)


def _lies_side_by_side(call: Call) -> bool:
    """Whether Hopper reads rows of several key heads that follow each other in memory."""
    spec = call.spec
    row_bytes = spec.head_dim * spec.dtype.itemsize
    return (
        capability(call.arch) == 90
        and spec.heads_kv > 1
        and spec.head_dim == spec.head_dim_v
        and call.strides.k[-2] == call.strides.v[-2] == row_bytes
    )


def _pairs_heads(call: Call, config: Sm80DecodeConfig) -> bool:
    """Whether a thread block reads two neighbouring key heads together: rows that do not fill lines
    of 128 bytes, whose pieces are then twice as long."""
    spec = call.spec
    return (
        _lies_side_by_side(call)
        and config.head_dim == 128
        and spec.head_dim < 128
        and config.rows in HEAD_PAIRS
        and spec.heads_kv % 2 == 0
        and spec.rows == "batched"
        and rows_of_sequence(spec) <= config.rows
        and call.num_splits is None
    )


def _columns(spec: AttentionSpec) -> int:
    """How many columns of a head are computed; 0 where it is all."""
    longest = max(spec.head_dim, spec.head_dim_v)
    return next((n for n in COLUMNS if longest <= n), 0)


def _scored_variant(dtype: str, head_dim: int, rows: int, arch: str, *, bias: bool) -> Variant:
    """That with a mask, and with a bias too where there is one."""
    config = _sm80_config(dtype, head_dim, rows, arch, mask=True, bias=bias)
    return Variant("decoding/decode_sm80.cu", "decode_sm80", config)


def _sm80_config(
    dtype: str, head_dim: int, rows: int, arch: str, *, mask: bool = False, bias: bool = False
) -> Sm80DecodeConfig:
    """The config with the deepest rings that leave an architecture's shared memory and registers
    room."""
    shared = SHARED_KIB.get(capability(arch), 100) * 1024
    warp_rows = min(rows, 2048 // head_dim)  # O takes 64 registers
    warp_keys = 32 if head_dim == 64 else 16
    wide = warp_rows * head_dim >= 2048  # a thread needs up to 255 registers
    for warps_k, stages, blocks in (
        (8, 3, 1),
        (4, 4, 1),
        (4, 3, 2),
        (4, 2, 2),
        (2, 4, 2),
        (4, 3, 1),
        (4, 2, 1),
        (2, 3, 1),
        (2, 2, 1),
        (1, 6, 1),
        (1, 3, 1),
        (1, 2, 1),
    ):
        config = Sm80DecodeConfig(
            dtype,
            head_dim,
            warp_rows,
            warp_keys,
            rows // warp_rows,
            warps_k,
            stages,
            blocks,
            query_buffers=1 if rows == 64 else 2,  # the rings need the room more
            table=TABLE if shared >= 227 << 10 and rows == 8 and head_dim < 256 and not mask else 0,
            mask=mask,
            bias=bias,
        )
        fits = blocks * (config.smem_bytes + RING_BLOCK_BYTES) <= shared
        if fits and blocks * config.threads <= (256 if wide else 512):
            return config
    raise AssertionError(f"no rings fit into {shared} bytes for {head_dim=}, {rows=}")
