"""What the tiers of decoding share, and those that any GPU has: decode_simt.cu and merge.cu."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from cuattn._arrays import FLOAT_DTYPES
from cuattn._quantized import FORMATS, code_columns, format_number
from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import Scales, decode_arguments, score_arguments
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.decoding_times import LEAST_USED, rows_of_sequence
from cuattn.gpu.dispatch.launch import Call, Launch
from cuattn.gpu.dispatch.routing import UNIT_KEYS
from cuattn.gpu.structs import Arguments

#: Rows that a tile has room for in ragged calls with splits that do not depend on the batch: a
#: token of a large group of heads, or a few of a small one. More would cost single tokens time.
FIXED_ROWS = 16
MOST_STEPS = 1 << 30  # of the kernels' partition of the work, which counts in int
MOST_SPREAD_STEPS = 1 << 24  # where they are multiplied by the number of groups of blocks
RING_BLOCK_BYTES = 1024  # of a block's shared memory, kept by the system
INT4 = FORMATS["int4"].number
CODE_TILE_KEYS = 32  # of a warp, over codes
SCALE_BYTES = {INT4: 4}  # of a token and head, by format, where they are not 2

#: Formats of keys and values that tensor cores decode; groups of features that have scales of their
#: own, where there are several, by formats and head_dim.
CODE_FORMATS = (
    ("int8", "int8"),
    ("float8_e4m3", "float8_e4m3"),
    ("float8_e5m2", "float8_e5m2"),
    ("int4", "int4"),
    ("int8", "int4"),
)
CODE_GROUPS = {("int4", "int4", 64): ((2, 2),), ("int4", "int4", 128): ((2, 2), (4, 4))}

#: From how many parts in float32 the warps of a block of merge.cu take some each, and up to how
#: many fours of columns: threads that have all parts keep the device busy if there are more.
MANY_PARTS = 9
MOST_VECS_OF_MANY_PARTS = 1 << 14

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


def bits_of_two(k_format: int, v_format: int) -> int:
    """Of an element of K and one of V."""
    return sum({0: 16, INT4: 4}.get(format, 8) for format in (k_format, v_format))


def part_bytes(rows: int, head_dim: int, acc_bytes: int) -> int:
    """O, with maximum and sum for every 64 columns, and as many bytes of launch ids: kSlotPackets
    of decoding/combine.cuh."""
    return rows * head_dim * 33 // 16 * acc_bytes


def as_decoding(call: Call) -> Call | None:
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


def rows_for_tile(call: Call) -> int:
    """How many rows a tile should have room for: those of a sequence, of ragged rows their mean. A
    sequence of more rows than its tile is not split, so with splits that do not depend on the batch
    the others' rows do not count."""
    spec = call.spec
    if call.num_splits == "fixed" and spec.rows == "ragged":
        return max(FIXED_ROWS, spec.heads_q // spec.heads_kv)
    return rows_of_sequence(spec)


def code_groups(call: Call, head_dim: int) -> tuple[int, int] | None:
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


def has_packed_scales(call: Call) -> bool:
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


class SimtDecode:
    """Every call that decoding kernels are for."""

    name = "decode_simt"
    decodes = True
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None. Its grid is that of :func:`partitioned`."""
        if (taken := as_decoding(call)) is None:
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


def partitioned(
    call: Call,
    variant: Variant,
    heads: int = 1,
    *,
    evenly: bool = False,
    most_steps: int = MOST_STEPS,
) -> Launch:
    """The launch of a kernel whose blocks share all sequences' keys by decoding/schedule.cuh; a
    tile has so many neighbouring key heads. `evenly` where memory alone is the limit, so that a few
    blocks less cost nothing."""
    spec, config = call.spec, variant.config
    blocks = call.multiprocessors * config.blocks_per_sm
    lanes = decode_head_lanes(spec.heads_kv // heads, blocks)
    rows = config.rows // heads
    groups = blocks // lanes
    if evenly and spec.rows == "batched" and call.num_splits is None:
        groups = even_groups(groups, _row_tiles(spec, rows) * (spec.heads_kv // heads // lanes))
    grid = (lanes, groups)
    return Launch(
        variant,
        grid,
        (
            arguments_of(
                call,
                heads_per_block=spec.heads_kv // heads // lanes,
                kv_block_shift=_kv_block_shift(call, lanes, rows, config.tile_keys, most_steps),
                single_tile=_has_single_tile(call, lanes * heads, rows),
            ),
        ),
        workspace_bytes=_slots(call, grid, rows) * config.part_bytes,
    )


def arguments_of(
    call: Call, *, heads_per_block: int = 1, kv_block_shift: int = 0, single_tile: bool = False
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
        heads_per_block=heads_per_block,
        single_tile=single_tile,
        max_queries=call.max_queries,
        k_scales=call.k_scales,
        v_scales=call.v_scales,
    )


def decode_head_lanes(heads_kv: int, blocks: int) -> int:
    """How many heads a group of blocks works on at the same time: the most that leave few of the
    device's blocks without work."""
    lanes = [n for n in range(1, min(heads_kv, blocks) + 1) if heads_kv % n == 0]
    used = {n: blocks // n * n for n in lanes}
    return max(n for n in lanes if used[n] >= LEAST_USED * max(used.values()))


def even_groups(most: int, tiles: int) -> int:
    """How many groups of blocks, `most` or few less, share so many work tiles, which may all be as
    long: where possible so that each has whole tiles, and there are no partial results."""
    counts = range(most, math.ceil(LEAST_USED * most) - 1, -1)
    return next((n for n in counts if tiles and tiles % n == 0), most)


def _kv_block_shift(call: Call, head_lanes: int, rows: int, tile_keys: int, most_steps: int) -> int:
    """kv_block_shift of DecodeParams. Blocks of keys are as long as a tile, longer only where the
    steps of the partition, if all sequences were as long as they may be, could not be counted."""
    if call.num_splits is not None:
        return UNIT_KEYS.bit_length() - 1
    spec = call.spec
    heads_per_block = spec.heads_kv // head_lanes
    shift = tile_keys.bit_length() - 1
    tiles = _row_tiles(spec, rows) * heads_per_block
    while shift < 29 and tiles * ((spec.seqlen_k >> shift) + 3) > most_steps:
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
    many_parts: bool = False  # at equal distances, of which a block's warps take some each

    @property
    def threads(self) -> int:
        """Each has four columns of a row at a time, or a warp's lanes do."""
        return 256

    @property
    def vecs(self) -> int:
        """Fours of columns that a block has at a time."""
        return 32 if self.many_parts else self.threads


def merge(dtype: str, out_dtype: str, *, many_parts: bool = False) -> Variant:
    """Choose a variant of decoding/merge.cu."""
    return Variant("decoding/merge.cu", "merge", MergeConfig(dtype, out_dtype, many_parts))


def merge_of_cut_keys(dtype: str, out_dtype: str, parts: int, vecs: int) -> Variant:
    """That for so many parts, at equal distances, of a call over caches, whose results have so many
    fours of columns."""
    few = vecs <= MOST_VECS_OF_MANY_PARTS
    return merge(dtype, out_dtype, many_parts=dtype == "float32" and parts >= MANY_PARTS and few)


def merge_variants() -> Iterator[Variant]:
    """Every variant of decoding/merge.cu."""
    for dtype, name in FLOAT_DTYPES.items():
        yield merge(name, name)
        if dtype.itemsize == 2:
            yield merge("float32", name)
            yield merge("float32", name, many_parts=True)
