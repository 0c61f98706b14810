"""Which kernels serve decoding, in which variants."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cuattn._arrays import FLOAT_DTYPES
from cuattn._quantized import FORMATS, code_columns, format_number
from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import Scales, decode_arguments, score_arguments
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.launch import MAX_DIM, SHARED_KIB, Call, Launch, capability
from cuattn.gpu.dispatch.routing import UNIT_KEYS, key_bytes, rows_of_sequence
from cuattn.gpu.params import DECODE_MAPS, UNBOUNDED
from cuattn.gpu.structs import Arguments
from cuattn.gpu.tensormap import TensorMap, addressable

MOST_STEPS = 1 << 30  # of the kernels' partition of the work, which counts in int
RING_BLOCK_BYTES = 1024  # of a block's shared memory, kept by the system


#: Sizes of clusters that decode_sm90.cu comes with, and for how many pairs of a sequence and a key
#: head: as many as run at a time on an H200's 132 multiprocessors.
CLUSTERS = {8: 14, 4: 33}
CLUSTER_TILE_KEYS = 16
#: Rows of a tile, and head_dims, that it comes with.
CLUSTER_ROWS = (8, 16)
CLUSTER_HEAD_DIMS = (64, 128)
#: How many keys a pair has at most, and all pairs together, by rows of a tile, head_dim and size of
#: a cluster: beyond, decode_sm80.cu starts later but reads faster, though less so in its tile for
#: more than 8 rows.
MOST_KEYS = {
    (8, 64, 8): (1 << 14, 1 << 17),
    (8, 64, 4): (1 << 12, 1 << 16),
    (8, 128, 8): (1 << 15, 3 << 16),
    (8, 128, 4): (1 << 14, 3 << 16),
    (16, 64, 8): (1 << 15, 1 << 19),
    (16, 64, 4): (1 << 14, 1 << 18),
    (16, 128, 8): (1 << 16, 1 << 19),
    (16, 128, 4): (1 << 14, 1 << 19),
}
#: A pair has several of the largest clusters where they fit: each has so many keys at least, and
#: all pairs so many at most.
SPLIT_KEYS = 2048
MOST_SPLIT_KEYS = {8: 1 << 18, 16: 1 << 19}

#: The same of a pair that has one cluster, over codes, by rows of a tile: as far as expanding them
#: on a half of the device's multiprocessors takes less time than decode_sm80.cu takes to start. So
#: only the largest clusters come over codes, and for these formats.
MOST_CODES = {8: 1 << 13, 16: 1 << 14}
CLUSTER_FORMATS = (
    ("int8", "int8"),
    ("float8_e4m3", "float8_e4m3"),
    ("int4", "int4"),
    ("int8", "int4"),
)

INT4 = FORMATS["int4"].number

#: Entries of a single sequence's page table that decode_sm80.cu keeps, where there is room.
TABLE = 2048
#: The same over codes, and the keys of a warp's tile.
CODE_TABLE = 1024
CODE_TILE_KEYS = 32
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
#: The same over codes, and formats of keys and values, with groups of features that have scales of
#: their own, where it is for more than one.
CODE_ROWS = {64: (8, 16), 128: (8, 16), 256: (8,)}
CODE_FORMATS = (
    ("int8", "int8"),
    ("float8_e4m3", "float8_e4m3"),
    ("float8_e5m2", "float8_e5m2"),
    ("int4", "int4"),
    ("int8", "int4"),
)
CODE_GROUPS = {("int4", "int4", 64): ((2, 2),), ("int4", "int4", 128): ((2, 2), (4, 4))}


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
            small += self.rows * (8 + 8 * self.k_groups)
        return -(-(rings + rows + pages + small) // 128) * 128

    @property
    def stage_bytes(self) -> int:
        """Of a slice's tile of K and V, with scales, or bias and mask."""
        if not self.k_format:
            words = self.warp_keys // 4 + 1 if self.mask else 0
            words += self.warp_keys + 4 if self.bias else 0
            elements = 4 * self.rows * words + (4 if self.mask and not self.bias else 0)
            return self.warp_keys * self.head_dim * 2 * 2 + -(-elements // 128) * 128
        bits = _bits_of_two(self.k_format, self.v_format)
        row = self.head_dim * bits // 8 + 4 * (self.k_groups + self.v_groups)
        return -(-(self.warp_keys * row) // 128) * 128

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result."""
        return part_bytes(self.rows, self.head_dim, 4)


@dataclasses.dataclass(frozen=True)
class Sm90DecodeConfig(Config):
    """decoding/decode_sm90.cu."""

    dtype: str
    head_dim: int  # of both
    rows: int  # 8 or 16
    warp_keys: int  # of a warp's tile
    warps: int
    stages: int
    cluster: int  # blocks that share a sequence and key head
    k_format: int = 0  # as in Sm80DecodeConfig
    v_format: int = 0

    @property
    def threads(self) -> int:
        """A warp for each ring."""
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """The rings, then Q, then the cluster's parts of O, then what is small."""
        tile_bits = self.warp_keys * self.head_dim * _bits_of_two(self.k_format, self.v_format)
        rings = self.warps * self.stages * tile_bits // 8
        rows = self.rows * (self.head_dim * (2 + 4) + 8 * (self.cluster + self.warps + 1))
        small = 8 * self.stages * self.warps
        if self.k_format:  # what scores of a row need, and scales
            small += 16 * self.rows + 8 * self.warp_keys * self.stages * self.warps + 1024
        return -(-(rings + rows + small) // 1024) * 1024

    @property
    def part_bytes(self) -> int:
        """What a cluster leaves in global memory where it is one of several: each row's O, and each
        block's maximum and sum of it, and as many bytes of launch ids."""
        return 16 * self.rows * (self.head_dim // 2 + self.cluster)


#: head_dims that decode_simt.cu comes with; the smallest where no faster kernel serves a call.
SIMT_HEAD_DIMS = (128, 256, 512)


@dataclasses.dataclass(frozen=True)
class SimtDecodeConfig(Config):
    """decoding/decode_simt.cu."""

    dtype: str
    head_dim: int  # the next of SIMT_HEAD_DIMS for both
    elementwise: bool  # bias or mask
    rows: int
    blocks_per_sm: int
    tile_keys: int
    quantized: bool  # K or V are codes, of formats that are known at run time

    @property
    def threads(self) -> int:
        """Four warps, which take keys in turn."""
        return 128

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result."""
        return part_bytes(self.rows, self.head_dim, 8 if self.dtype == "float64" else 4)


def _bits_of_two(k_format: int, v_format: int) -> int:
    """Of an element of K and one of V."""
    return sum({0: 16, INT4: 4}.get(format, 8) for format in (k_format, v_format))


def part_bytes(rows: int, head_dim: int, acc_bytes: int) -> int:
    """O, with maximum and sum for every 64 columns, and as many bytes of launch ids: kSlotPackets
    of decoding/combine.cuh."""
    return rows * head_dim * 33 // 16 * acc_bytes


# ------------------------------------------------------------------------------------------ tiers


def _as_decoding(call: Call) -> Call | None:
    """A call as the decoding kernels take it; None if they cannot.

    They have no dropout, and bias or mask only for keys in caches. Plain arrays of keys they read
    as caches that are full, in splits that do not depend on the batch. An infinite or NaN value
    that only some rows of a tile see would reach the others, so all rows have to see the same keys:
    in caches that is what :func:`cuattn.flash_decode` says, in plain arrays it must not be.
    """
    spec = call.spec
    if spec.dropout != 0.0 or spec.keys == "ragged":
        return None
    if spec.keys in ("cached", "paged") or call.partial is not None:
        return call
    if call.elementwise:
        return None
    unbounded = spec.window_left is None and spec.window_right is None
    last = spec.seqlen_q == 1 and (spec.window_right is None or spec.window_right >= 0)
    if spec.rows == "ragged" or not (unbounded or last) or spec.seqlen_k >= 1 << 30:
        return None
    return dataclasses.replace(call, num_splits="fixed")


class Sm90Decode:
    """So few sequences that each can have a cluster of thread blocks for every key head, or
    several, and these little to read."""

    name = "decode_sm90"
    decodes = True
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None. Its grid is (blocks of all clusters of a pair, key heads,
        batch)."""
        if (taken := _as_decoding(call)) is None:
            return None
        call, spec, multiprocessors = taken, taken.spec, taken.multiprocessors
        rows = spec.seqlen_q * (spec.heads_q // spec.heads_kv)
        if capability(call.arch) != 90 or spec.dtype.itemsize != 2:
            return None
        if not call.vectors or not all(addressable(array[:-1]) for array in call.strides[1:3]):
            return None
        if spec.rows == "ragged" or rows > CLUSTER_ROWS[-1] or call.num_splits is not None:
            return None
        if call.elementwise:
            return None
        if spec.head_dim != spec.head_dim_v or spec.head_dim not in CLUSTER_HEAD_DIMS:
            return None
        pairs = spec.batch * spec.heads_kv
        sizes = (n for n, most in CLUSTERS.items() if pairs <= most * multiprocessors / 132)
        cluster = next(sizes, None)
        if cluster is None or (spec.keys == "paged" and spec.page_size < CLUSTER_TILE_KEYS):
            return None
        names = spec.k_format, spec.v_format
        if spec.quantized and (cluster < max(CLUSTERS) or names not in CLUSTER_FORMATS):
            return None
        if _code_groups(call, spec.head_dim) != (1, 1):
            return None
        formats = format_number(names[0]), format_number(names[1])
        tile_rows = next(n for n in CLUSTER_ROWS if rows <= n)
        clusters = decode_clusters(spec, cluster, multiprocessors)
        if clusters == 1 and spec.quantized:
            most = MOST_CODES[tile_rows]
        elif clusters == 1:
            most, most_of_all = MOST_KEYS[tile_rows, spec.head_dim, cluster]
            most = min(most, most_of_all // pairs)
        else:
            most = MOST_SPLIT_KEYS[tile_rows] // pairs
        if spec.seqlen_k > most:
            return None
        config = _sm90_config(spec.dtype.name, spec.head_dim, tile_rows, cluster, formats)
        grid = (clusters * cluster, spec.heads_kv, spec.batch)
        slots = 0 if clusters == 1 else clusters * spec.heads_kv * spec.batch
        return Launch(
            _sm90_variant(config),
            grid,
            (_arguments(call, head_lanes=grid[0]), DECODE_MAPS.arguments()),
            {
                "k": _panels(call, call.strides.k, spec.k_format),
                "v": _panels(call, call.strides.v, spec.v_format),
            },
            workspace_bytes=slots * config.part_bytes,
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) == 90:
            for dtype in ("float16", "bfloat16"):
                for shape in itertools.product(CLUSTER_HEAD_DIMS, CLUSTER_ROWS, CLUSTERS):
                    yield _sm90_variant(_sm90_config(dtype, *shape))
                for *shape, names in itertools.product(
                    CLUSTER_HEAD_DIMS, CLUSTER_ROWS, [max(CLUSTERS)], CLUSTER_FORMATS
                ):
                    formats = format_number(names[0]), format_number(names[1])
                    yield _sm90_variant(_sm90_config(dtype, *shape, formats))


class Sm80Decode:
    """16-bit queries of any number of sequences, over 16-bit keys and values or codes."""

    name = "decode_sm80"
    decodes = True
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None. Its grid is (blocks that share out the key heads, groups
        of them)."""
        if (taken := _as_decoding(call)) is None:
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
        groups = _code_groups(call, head_dim)
        if groups is None or (spec.quantized and head_dim not in CODE_ROWS):
            return None
        # Ragged rows may be of prompts; where there is about one a sequence it is decoding, and a
        # small tile wastes least.
        rows = rows_of_sequence(spec)
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
        elif tile_rows == 8 and _has_split_lines(call):
            config = dataclasses.replace(config, whole_lines=False)
        return partitioned(call, Variant("decoding/decode_sm80.cu", "decode_sm80", config))

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) < 80:
            return
        for dtype, head_dim in itertools.product(("float16", "bfloat16"), (64, 128, 256)):
            for rows in DECODE_ROWS[head_dim]:
                usual = _sm80_variant(dtype, head_dim, rows, arch)
                yield usual
                changes: list[dict[str, Any]] = []
                if capability(arch) == 90:
                    short = SHORT_RINGS.get((head_dim, rows), ())
                    changes += [{**rings._asdict(), "table": 0} for _, rings in short]
                    changes += [{"whole_lines": False}] if rows == 8 else []
                for change in changes:
                    config = dataclasses.replace(usual.config, **change)
                    yield dataclasses.replace(usual, config=config)
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


def _code_groups(call: Call, head_dim: int) -> tuple[int, int] | None:
    """Groups of features of keys and values that have scales of their own, as a variant of
    decode_sm80.cu with this head_dim has them; None where there is none."""
    spec = call.spec
    if not spec.quantized:
        return 1, 1
    formats = spec.k_format, spec.v_format
    if formats not in CODE_FORMATS or call.k_scales is None or call.v_scales is None:
        return None
    rows = zip(formats, (spec.head_dim, spec.head_dim_v), strict=True)
    if any(code_columns(*row) % 16 for row in rows):
        return None
    if call.v_scales.has_offset or call.v_scales.rotated:
        return None
    for scales, format in zip((call.k_scales, call.v_scales), formats, strict=True):
        if scales.has_minimum and format != "int4":
            return None
    keys_by_channel = call.k_scales.groups == spec.head_dim and call.k_scales.strides[:2] == (0, 0)
    if not (keys_by_channel or _in_words(call.k_scales)) or not _in_words(call.v_scales):
        return None
    groups = 1 if keys_by_channel else call.k_scales.groups, call.v_scales.groups
    if groups == (1, 1):
        return groups
    whole = spec.head_dim == spec.head_dim_v == head_dim
    return groups if whole and groups in CODE_GROUPS.get((*formats, head_dim), ()) else None


def _in_words(scales: Scales) -> bool:
    """Whether each scale, with its minimum if there is one, can be read as an aligned word, which
    of two neighbouring tokens or groups may be the same."""
    if not scales.aligned or scales.has_minimum:
        return scales.aligned and scales.paired
    return scales.is_float32 or scales.strides[0] % 2 == 0


class SimtDecode:
    """Every call that decoding kernels are for."""

    name = "decode_simt"
    decodes = True
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None. Its grid is that of `Sm80Decode`."""
        if (taken := _as_decoding(call)) is None:
            return None
        call, spec = taken, taken.spec
        kinds = {"elementwise": call.elementwise, "quantized": spec.quantized}
        dims = _simt_head_dims(spec.dtype.name, **kinds)
        head_dim = next(n for n in dims if max(spec.head_dim, spec.head_dim_v) <= n)
        launch = partitioned(call, _simt_variant(spec.dtype.name, head_dim, **kinds))
        scores = score_arguments(call.bias, call.mask)
        return dataclasses.replace(launch, arguments=(*launch.arguments, scores))

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        booleans = False, True
        for elementwise, quantized in itertools.product(booleans, booleans):
            kinds = {"elementwise": elementwise, "quantized": quantized}
            for dtype in FLOAT_DTYPES.values():
                for head_dim in _simt_head_dims(dtype, **kinds):
                    yield _simt_variant(dtype, head_dim, **kinds)


def partitioned(call: Call, variant: Variant) -> Launch:
    """The launch of a kernel whose blocks share all sequences' keys by decoding/schedule.cuh."""
    spec, config = call.spec, variant.config
    blocks = call.multiprocessors * config.blocks_per_sm
    lanes = decode_head_lanes(spec.heads_kv, blocks)
    grid = (lanes, blocks // lanes)
    return Launch(
        variant,
        grid,
        (
            _arguments(
                call,
                head_lanes=lanes,
                kv_block_shift=_kv_block_shift(call, lanes, config),
                single_tile=_has_single_tile(call, lanes, config.rows),
            ),
        ),
        workspace_bytes=_slots(call, grid, config.rows) * config.part_bytes,
    )


def _arguments(
    call: Call, *, head_lanes: int, kv_block_shift: int = 0, single_tile: bool = False
) -> Arguments:
    spec, partial = call.spec, call.partial
    lse_strides = (0 if spec.rows == "ragged" else spec.heads_q * spec.seqlen_q, spec.seqlen_q)
    return decode_arguments(
        spec,
        call.strides,
        call.alibi_slopes,
        out_itemsize=(spec.dtype if partial is None else spec.acc_dtype).itemsize,
        table_stride=call.table_stride,
        lse_strides=lse_strides if partial is None else partial.lse_strides,
        first_key=0 if partial is None else partial.first_key,
        num_pages=call.num_pages,
        kv_block_shift=kv_block_shift,
        num_splits=call.num_splits,
        head_lanes=head_lanes,
        single_tile=single_tile,
        max_queries=call.max_queries,
        k_scales=call.k_scales,
        v_scales=call.v_scales,
    )


def _panels(call: Call, strides: tuple[int, ...], format: str) -> TensorMap:
    """A cache (sequence or page, key, head, head_dim) as decode_sm90.cu reads it, some keys of a
    head at a time: (64 columns, key, their number, head, sequence or page), or with all bytes of a
    row of codes in place of columns."""
    spec = call.spec
    outer, keys = spec.batch, spec.seqlen_k
    if spec.keys == "paged":
        outer, keys = call.num_pages, spec.page_size
    page, key, head, column = strides
    dtype, columns, panels = spec.dtype, 64, spec.head_dim // 64
    if format:
        dtype, columns, panels = np.dtype(np.uint8), code_columns(format, spec.head_dim), 1
    return TensorMap(
        dtype,
        (columns, keys, panels, spec.heads_kv, outer),
        (key, columns * column, head, page),
        (columns, CLUSTER_TILE_KEYS, panels, 1, 1),
        swizzle_bytes=columns * dtype.itemsize,
    )


def decode_head_lanes(heads_kv: int, blocks: int) -> int:
    """How many heads a group of blocks works on at the same time: the most that leave few of the
    device's blocks without work."""
    lanes = [n for n in range(1, min(heads_kv, blocks) + 1) if heads_kv % n == 0]
    used = {n: blocks // n * n for n in lanes}
    return max(n for n in lanes if used[n] >= 0.95 * max(used.values()))


def _kv_block_shift(
    call: Call, head_lanes: int, config: Sm80DecodeConfig | SimtDecodeConfig
) -> int:
    """kv_block_shift of DecodeParams. Blocks of keys are as long as a tile, longer only where the
    steps of the partition, if all sequences were as long as they may be, could not be counted."""
    if call.num_splits is not None:
        return UNIT_KEYS.bit_length() - 1
    spec = call.spec
    heads_per_block = spec.heads_kv // head_lanes
    shift = config.tile_keys.bit_length() - 1
    tiles = _row_tiles(spec, config.rows) * heads_per_block
    while shift < 29 and tiles * ((spec.seqlen_k >> shift) + 3) > MOST_STEPS:
        shift += 1
    return shift


def _row_tiles(spec: AttentionSpec, tile_rows: int) -> int:
    """Tiles of rows that all sequences have at most."""
    rows = spec.seqlen_q * (spec.heads_q // spec.heads_kv)
    if spec.rows == "ragged":
        return rows // tile_rows + spec.batch
    return spec.batch * -(-rows // tile_rows)


def _has_single_tile(call: Call, head_lanes: int, tile_rows: int) -> bool:
    """Whether there is one tile of rows of one sequence for each head, and a head for each block:
    all that has to be found out is how long the sequence is."""
    spec = call.spec
    return (
        call.num_splits is None
        and spec.rows == "batched"
        and spec.batch == 1
        and head_lanes == spec.heads_kv
        and rows_of_sequence(spec) <= tile_rows
    )


def _slots(call: Call, grid: tuple[int, int], tile_rows: int) -> int:
    """How many partial results the blocks may have to keep at most."""
    spec, num_splits = call.spec, call.num_splits
    if num_splits is None:
        return 2 * grid[0] * grid[1]  # a block leaves at most two work tiles incomplete
    # A sequence of several row tiles is not split.
    splits = num_splits if isinstance(num_splits, int) else -(-spec.seqlen_k // UNIT_KEYS)
    return spec.heads_kv * (_row_tiles(spec, tile_rows) + spec.batch * max(splits, 1))


def decode_clusters(spec: AttentionSpec, cluster: int, multiprocessors: int) -> int:
    """How many clusters of `cluster` blocks a sequence and key head have."""
    if cluster != max(CLUSTERS):
        return 1
    most = CLUSTERS[cluster] * multiprocessors // 132
    fit = most // (spec.batch * spec.heads_kv)
    if fit < 3:  # twice the blocks do not pay for one more merge
        return 1
    return max(1, min(fit, spec.seqlen_k // SPLIT_KEYS))


def _sm90_config(
    dtype: str, head_dim: int, rows: int, cluster: int, formats: tuple[int, int] = (0, 0)
) -> Sm90DecodeConfig:
    """A block has a multiprocessor in clusters of 8, half of one in clusters of 4."""
    tiles = 24 if cluster == 8 else 12  # of head_dim 128 that fit
    warps = 8 if cluster == 8 or head_dim == 64 else 4
    plain = Sm90DecodeConfig(
        dtype,
        head_dim,
        rows,
        warp_keys=CLUSTER_TILE_KEYS,
        warps=warps,
        stages=tiles * 128 // head_dim // warps,
        cluster=cluster,
    )
    if formats == (0, 0):
        return plain
    most = (227 << 10) // (1 if cluster == 8 else 2) - RING_BLOCK_BYTES
    for stages in (6, 5, 4, 3, 2):
        config = dataclasses.replace(
            plain,
            warp_keys=CODE_TILE_KEYS,
            stages=stages,
            k_format=formats[0],
            v_format=formats[1],
        )
        if config.smem_bytes <= most:
            return config
    raise AssertionError(f"no rings fit into {most} bytes for {plain} with {formats=}")


def _sm90_variant(config: Sm90DecodeConfig) -> Variant:
    return Variant("decoding/decode_sm90.cu", "decode_sm90", config)


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
    spec = call.spec
    row_bytes = spec.head_dim * spec.dtype.itemsize
    return (
        capability(call.arch) == 90
        and spec.heads_kv > 1
        and spec.head_dim == spec.head_dim_v
        and call.strides.k[-2] == call.strides.v[-2] == row_bytes
        and row_bytes % 128 not in (0, 32)
    )


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


def _simt_head_dims(dtype: str, *, elementwise: bool, quantized: bool) -> tuple[int, ...]:
    """The head_dims of a dtype, smallest first."""
    return SIMT_HEAD_DIMS[0 if dtype == "float32" or (elementwise and not quantized) else 1 :]


def _simt_variant(dtype: str, head_dim: int, *, elementwise: bool, quantized: bool) -> Variant:
    rows = 2 if dtype == "float64" else 4
    if head_dim == 512 or (elementwise and head_dim == 256):
        rows //= 2  # registers are for a row's features
    if head_dim == 512 and elementwise and quantized:
        rows = 1
    config = SimtDecodeConfig(
        dtype,
        head_dim,
        elementwise,
        rows,
        blocks_per_sm=2 if head_dim == 512 else 4,
        tile_keys=64,
        quantized=quantized,
    )
    return Variant("decoding/decode_simt.cu", "decode_simt", config)


@dataclasses.dataclass(frozen=True)
class MergeConfig(Config):
    """decoding/merge.cu."""

    dtype: str
    out_dtype: str

    @property
    def threads(self) -> int:
        """Each has four columns of a row at a time."""
        return 256


def merge(dtype: str, out_dtype: str) -> Variant:
    """Choose a variant of decoding/merge.cu."""
    return Variant("decoding/merge.cu", "merge", MergeConfig(dtype, out_dtype))


def merge_variants() -> Iterator[Variant]:
    """Every variant of decoding/merge.cu."""
    for dtype, name in FLOAT_DTYPES.items():
        yield merge(name, name)
        if dtype.itemsize == 2:
            yield merge("float32", name)
