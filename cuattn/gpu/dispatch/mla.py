"""Which kernels serve latent attention over a cache, and what they are launched with."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from cuattn._arrays import FLOAT_DTYPES
from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import Scales, mla_arguments
from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.decoding import partitioned
from cuattn.gpu.dispatch.launch import (
    LEAST_SCALE,
    MOST_OF_GRID,
    SHARED_KIB,
    Call,
    Launch,
    Strides,
    capability,
)
from cuattn.gpu.dispatch.mla_config import (
    CODE_KEYS,
    CODE_ROWS,
    FEW_ROWS,
    LATENT,
    LATENT_FORMATS,
    SCALE_COLUMNS,
    Sm90MlaConfig,
    Sm90Rows80MlaConfig,
    codes_sm90_variant,
    codes_variant,
    combine_variant,
    combine_variants,
    few_variant,
    rows_80_variant,
    simt_variant,
    sm80_variant,
    sm90_variant,
)
from cuattn.gpu.dispatch.tiers import TierList, first_serving
from cuattn.gpu.params import MLA_MAPS
from cuattn.gpu.structs import WORD
from cuattn.gpu.tensormap import TensorMap, addressable

TASK_BYTES = 48  # CombineTask of rawkernels/mla/params.cuh
#: How many blocks of keys a warpgroup of mla/decode_few_sm90.cu has at most, where there are
#: several sequences: their lengths may differ, but each has as many thread blocks. And where a
#: token's heads are several tiles, each of which reads all keys.
FEW_TURNS, FEW_TURNS_OF_TILES = 8, 1
#: Blocks of keys that one thread block takes less time for than several that merge, by the rows of
#: its tile; and where a tile cannot have more than two thread blocks.
FEW_UNSPLIT, FEW_UNSPLIT_OF_TWO = {16: 2, 32: 3}, 6
#: Rows of a tile of mla/decode_80_sm90.cu, and how many blocks of keys each multiprocessor has to
#: have: with fewer, two tiles of 64 rows, on two of them, take less time.
ROWS_80, ROWS_80_BLOCKS = Sm90Rows80MlaConfig.rows, 3
#: Kernels for more rows over plain latents.
PLAIN_SM90 = (Sm90MlaConfig, Sm90Rows80MlaConfig)
#: How many keys are one split in these: the second half takes less time than a launch that merges
#: both. And where that leaves no thread block more than a tile.
UNSPLIT_KEYS, UNSPLIT_KEYS_OF_ONE = 128, 256
#: Blocks of keys of each multiprocessor up to which mla/decode_codes_sm90.cu has tiles of 32 rows
#: at most: it takes less time to begin and to end one than a tile of 64.
FEW_CODE_BLOCKS = 8
#: How many partial results a tile of rows has at most, on average, if thread blocks merge them:
#: with more, a launch in which all multiprocessors do takes less time.
MOST_PARTS = 4
#: Thread blocks of mla/combine.cu that a multiprocessor runs at a time, where warps or blocks have
#: pieces of rows.
COMBINE_PIECES = 2


@dataclasses.dataclass(frozen=True)
class MlaCall:
    """One call of :func:`cuattn.mla_decode` and the device it is for: all that a choice of kernel
    depends on. Strides are in bytes."""

    spec: AttentionSpec  # as cuattn.mla has it
    arch: str
    multiprocessors: int
    q_latent: tuple[int, ...]
    q_rope: tuple[int, ...]
    latent: tuple[int, ...]  # of pages, (page, slot, head, column)
    rope: tuple[int, ...]
    out: tuple[int, ...]
    aligned: bool = True  # the addresses of all of them are multiples of 16
    num_pages: int = 0
    table_stride: int = 0  # elements from row to row of the page table
    num_splits: int | str | None = None
    top_k: int | None = None  # tokens of a query, where they are given by their positions
    scales: Scales | None = None  # where the spec says that latents are codes

    @property
    def rope_dim(self) -> int:
        """Width of what is rotated."""
        return self.spec.head_dim - self.spec.head_dim_v

    @property
    def queries(self) -> int:
        """Query tokens of all sequences."""
        spec = self.spec
        return spec.seqlen_q if spec.rows == "ragged" else spec.batch * spec.seqlen_q

    @property
    def vectors(self) -> bool:
        """Whether all arrays can be read and written 16 bytes at a time."""
        arrays = (self.q_latent, self.q_rope, self.latent, self.rope, self.out)
        return self.aligned and all(stride % 16 == 0 for array in arrays for stride in array[:-1])

    @property
    def within_places(self) -> bool:
        """Whether where a token's rows begin are numbers of 32 bits, in 16 bytes: what kernels that
        copy keys one by one count in."""
        axes = (self.num_pages, self.spec.page_size)
        for pages in (self.latent, self.rope):
            ends = [(n - 1) * stride for n, stride in zip(axes, pages[:2], strict=True)]
            if min(ends) < 0 or sum(ends) >= (16 << 32) - 1024:  # where the last row begins
                return False
        return True

    @property
    def has_boxes(self) -> bool:
        """Whether TMA can copy keys that lie side by side in a page at a time."""
        strides = (*self.latent[:2], *self.rope[:2])
        whole_pages = self.top_k is None and self.spec.page_size >= 8 and self.num_pages > 0
        return whole_pages and addressable(strides)

    @property
    def has_expandable_codes(self) -> bool:
        """Whether latents are codes of which kernels with tensor cores make operands."""
        spec, scales = self.spec, self.scales
        if scales is None:
            return False
        width = spec.head_dim_v // scales.groups
        return (
            spec.k_format in LATENT_FORMATS
            and not (scales.has_minimum or scales.has_offset or scales.rotated)
            and (scales.groups == 1 or width in (SCALE_COLUMNS, 2 * SCALE_COLUMNS))
        )

    def by_query(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of an array of contiguous rows in which each query is a sequence of its own. An
        axis of one token has any stride."""
        of_sequences = self.spec.rows == "batched" and self.spec.seqlen_q == 1
        return (strides[0 if of_sequences else -3], *strides[-3:])

    def as_call(self, head_tiles: int = 1) -> Call:
        """The call as decoding of one key head, or of so many that have the same keys: with its
        latents as keys and as values. Where tokens are given by position, each query is a sequence
        of its own, with so many keys."""
        spec, q, out = self.spec, self.q_latent, self.out
        spec = dataclasses.replace(spec, heads_kv=head_tiles)
        latent = (*self.latent[:2], 0, self.latent[3])
        if self.top_k is not None:
            spec = dataclasses.replace(
                spec,
                batch=self.queries,
                seqlen_q=1,
                seqlen_k=self.top_k,
                rows="batched",
                window_left=None,
                window_right=None,
            )
            q, out = map(self.by_query, (q, out))
        return Call(
            spec,
            self.arch,
            self.multiprocessors,
            Strides(q, latent, latent, out),
            self.aligned,
            num_pages=self.num_pages,
            table_stride=self.table_stride,
            num_splits=self.num_splits,
            k_scales=self.scales,
            v_scales=self.scales,
        )


@dataclasses.dataclass(frozen=True)
class MlaLaunches:
    """The launches of a call, and the memory that they share."""

    main: Launch
    combine: Launch | None = None  # merges partial results
    part_bytes: int = 0  # for these
    task_bytes: int = 0  # for what says where they are


class MlaTier(Protocol):
    """A kernel for some calls, as :class:`cuattn.gpu.dispatch.Tier`."""

    name: str

    def serves(self, call: MlaCall) -> MlaLaunches | None:
        """The launches for a call, or None for one that is left to other tiers."""

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""


class Sm90Mla:
    """16-bit calls over plain latents."""

    name = "mla_sm90"

    def serves(self, call: MlaCall) -> MlaLaunches | None:
        """The launches for a call, or None."""
        spec = call.spec
        if capability(call.arch) != 90 or spec.dtype.itemsize != 2 or not call.vectors:
            return None
        if call.scales is not None:
            return None
        if spec.head_dim_v % 64 or call.rope_dim % 8 or spec.scale < LEAST_SCALE:
            return None
        gather = not call.has_boxes
        if gather and not call.within_places:
            return None
        latent = rope = None
        if not gather:
            latent = _panels(call, call.latent, spec.head_dim_v)
            rope = _panels(call, call.rope, call.rope_dim) if call.rope_dim else latent
        if not gather and (few := _few(call, {"latent": latent, "rope": rope})) is not None:
            return few
        queries = _query_maps(call, ROWS_80) if not gather and _fills_80(call) else {}
        if queries:
            variant = rows_80_variant(spec.dtype.name)
        else:
            variant = sm90_variant(spec.dtype.name, gather=gather)
            queries = _query_maps(call, variant.config.rows)
        query_rows = math.prod(queries["q"].box[1:]) if queries else 0
        launches = _merged(call, variant, query_rows=query_rows)
        return _with_maps(launches, {"latent": latent, "rope": rope} | queries)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) == 90:
            for dtype in ("float16", "bfloat16"):
                for gather in (False, True):
                    yield sm90_variant(dtype, gather=gather)
                    yield from combine_variants(dtype, 64, half_parts=not gather)
                for rows in FEW_ROWS:
                    yield few_variant(dtype, rows)
                yield rows_80_variant(dtype)
                yield from combine_variants(dtype, ROWS_80, half_parts=True)


def _fills_80(call: MlaCall) -> bool:
    """Whether mla/decode_80_sm90.cu takes less time for a call: where its tiles of 80 rows are
    fewer than those of 64, one, or of equal heads where those of 64 are not; and where they are not
    over with their first keys."""
    spec = call.spec
    rows = spec.heads_q * spec.seqlen_q
    tiles, tiles_of_64 = -(-rows // ROWS_80), -(-rows // 64)
    blocks = tiles * spec.batch * -(-spec.seqlen_k // Sm90Rows80MlaConfig.tile_keys)
    return (
        spec.rows != "ragged"
        and call.num_splits is None
        and tiles < tiles_of_64
        and (tiles == 1 or (spec.heads_q % tiles == 0 and spec.heads_q % tiles_of_64 != 0))
        and blocks >= ROWS_80_BLOCKS * call.multiprocessors
    )


def _few(call: MlaCall, maps: dict[str, TensorMap | None]) -> MlaLaunches | None:
    """The launch of a call of so few rows and blocks of keys that all thread blocks of a tile merge
    its result; None for others. Its grid is (thread blocks of a tile, tiles of heads, batch)."""
    spec = call.spec
    if spec.rows == "ragged" or call.num_splits is not None or spec.batch > MOST_OF_GRID:
        return None
    head_tiles = _head_tiles(call.as_call().spec, FEW_ROWS[-1])
    rows = spec.heads_q // head_tiles * spec.seqlen_q
    tiles = head_tiles * spec.batch
    if rows > FEW_ROWS[-1] or (head_tiles > 1 and tiles > call.multiprocessors):
        return None
    variant = few_variant(spec.dtype.name, min(size for size in FEW_ROWS if rows <= size))
    # A thread of what merges waits for each thread block of a tile.
    blocks = max(min(call.multiprocessors, variant.config.threads) // tiles, 1)
    blocks_of_keys = -(-spec.seqlen_k // variant.config.tile_keys)
    unsplit = FEW_UNSPLIT[variant.config.rows] if blocks > 2 else FEW_UNSPLIT_OF_TWO
    if blocks_of_keys <= unsplit:
        blocks = 1
    else:
        blocks = min(blocks, blocks_of_keys)
        turns = -(-blocks_of_keys // (variant.config.warpgroups * blocks))
        if tiles > 1 and turns > (FEW_TURNS if head_tiles == 1 else FEW_TURNS_OF_TILES):
            return None
    launch = _partitioned(call, variant, head_tiles)
    main = dataclasses.replace(
        launch,
        grid=(blocks, head_tiles, spec.batch),
        arguments=(*launch.arguments, MLA_MAPS.arguments()),
        tensor_maps=maps,
        workspace_bytes=0 if blocks == 1 else tiles * variant.config.workspace_bytes(blocks),
    )
    return MlaLaunches(main)


def _with_maps(launches: MlaLaunches, maps: dict[str, TensorMap | None]) -> MlaLaunches:
    """The launches, of which the first is told of MLA_MAPS, too."""
    arguments = (*launches.main.arguments, MLA_MAPS.arguments())
    main = dataclasses.replace(launches.main, arguments=arguments, tensor_maps=maps)
    return dataclasses.replace(launches, main=main)


def _code_maps(call: MlaCall) -> dict[str, TensorMap | None]:
    """Pages of codes as mla/decode_codes_sm90.cu reads them: (columns, key, 1, page), of which TMA
    copies 128 bytes of a page's keys at a time, or of 16; none where it cannot."""
    spec = call.spec
    if not call.has_boxes:
        return {}

    def of(dtype: Any, width: int, strides: tuple[int, ...]) -> TensorMap:
        page, key = strides[:2]
        shape = width, spec.page_size, 1, call.num_pages
        box = 128 // np.dtype(dtype).itemsize, min(spec.page_size, 16), 1, 1
        return TensorMap(np.dtype(dtype), shape, (key, page, page), box)

    latent = of(np.uint8, spec.head_dim_v, call.latent)
    return {
        "latent": latent,
        "rope": of(spec.dtype, call.rope_dim, call.rope) if call.rope_dim else latent,
    }


def _panels(call: MlaCall, strides: tuple[int, ...], width: int) -> TensorMap:
    """Pages as mla/decode_sm90.cu reads them: (64 columns, key, their number, page), of which TMA
    copies a page's keys at a time, or 64."""
    spec = call.spec
    page, key, _, column = strides
    columns = min(width, 64)
    return TensorMap(
        spec.dtype,
        (columns, spec.page_size, -(-width // 64), call.num_pages),
        (key, 64 * column, page),
        (64, min(spec.page_size, 64), 1, 1),
    )


def _query_maps(call: MlaCall, rows: int) -> dict[str, TensorMap]:
    """Queries as mla/decode_sm90.cu reads them, where a tile of so many rows is one box of (64
    columns, heads, tokens) of a sequence; none where it is not."""
    of_call = call.as_call()
    spec, q, q_rope = of_call.spec, of_call.strides.q, _q_rope_strides(call)
    heads, tokens = spec.heads_q // _head_tiles(spec, rows), spec.seqlen_q
    ragged = spec.rows == "ragged"
    if not addressable((*q[:-1], *q_rope[:-1])):
        return {}
    if heads % rows == 0:
        box = rows, 1
    elif rows % heads == 0:
        box = heads, min(rows // heads, tokens)
    elif heads * tokens <= rows and not ragged:
        box = heads, tokens
    else:
        return {}

    def of(width: int, strides: tuple[int, ...]) -> TensorMap:
        token, head = strides[-3:-1]
        shape = width, spec.heads_q, tokens, 1 if ragged else spec.batch
        outer = token if ragged else strides[0]
        return TensorMap(spec.dtype, shape, (head, token, outer), (64, *box, 1))

    latent = of(spec.head_dim_v, q)
    return {"q": latent, "q_rope": of(call.rope_dim, q_rope) if call.rope_dim else latent}


def _head_tiles(spec: AttentionSpec, rows: int) -> int:
    """How many tiles the heads of a sequence are dealt out to, evenly, as many as it takes: thread
    blocks work on them side by side. 1 where that is not possible."""
    if spec.rows == "ragged":
        return 1
    tiles = -(-spec.heads_q * spec.seqlen_q // rows)
    return tiles if spec.heads_q % tiles == 0 else 1


def _code_rows(call: MlaCall) -> int:
    """Rows of a tile of mla/decode_codes_sm90.cu."""
    spec = call.as_call().spec
    # Where splits do not depend on the batch, nor do tiles: ragged rows count as single tokens, and
    # how many keys there are does not count.
    fixed, ragged = call.num_splits == "fixed", spec.rows == "ragged"
    rows = spec.heads_q * (1 if fixed and ragged else spec.seqlen_q)
    tiles = rows // CODE_ROWS[-1] + spec.batch if ragged else -(-rows // CODE_ROWS[-1]) * spec.batch
    blocks = tiles * -(-spec.seqlen_k // CODE_KEYS)
    few = not fixed and blocks <= FEW_CODE_BLOCKS * call.multiprocessors
    sizes = CODE_ROWS[:-1] if few else CODE_ROWS
    return min([size for size in sizes if rows <= size], default=sizes[-1])


class CodesMla:
    """Calls over codes where a multiprocessor has shared memory for them."""

    name = "mla_codes"

    def serves(self, call: MlaCall) -> MlaLaunches | None:
        """The launch for a call, or None."""
        spec = call.spec
        if not call.vectors or not call.has_expandable_codes:
            return None
        if (
            spec.head_dim_v % 16
            or call.rope_dim % 8
            or spec.scale < LEAST_SCALE
            or not call.within_places
        ):
            return None
        variant = self._variant(call)
        if variant is None:
            return None
        if capability(call.arch) != 90:
            return _merged(call, variant)
        maps = _code_maps(call)
        key_rows = maps["rope"].box[1] if maps else 0
        return _with_maps(_merged(call, variant, key_rows=key_rows), maps)

    def _variant(self, call: MlaCall) -> Variant | None:
        dtype, format = call.spec.dtype.name, call.spec.k_format
        if capability(call.arch) != 90:
            return codes_variant(dtype, format, call.arch)
        if call.spec.dtype.itemsize != 2:
            return None
        several = call.scales is not None and call.scales.groups > 1
        return codes_sm90_variant(dtype, format, _code_rows(call), several_scales=several)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        hopper = capability(arch) == 90
        for dtype in ("float16", "bfloat16"):
            for format in LATENT_FORMATS:
                if hopper:
                    for rows, several in itertools.product(CODE_ROWS, (False, True)):
                        yield codes_sm90_variant(dtype, format, rows, several_scales=several)
                elif (variant := codes_variant(dtype, format, arch)) is not None:
                    yield variant
                else:
                    return
            for rows in CODE_ROWS if hopper else CODE_ROWS[:1]:
                yield from combine_variants(dtype, rows)


class Sm80Mla:
    """16-bit calls where a multiprocessor has shared memory for Q and three tiles of keys."""

    name = "mla_sm80"

    def serves(self, call: MlaCall) -> MlaLaunches | None:
        """The launch for a call, or None."""
        spec = call.spec
        if capability(call.arch) not in SHARED_KIB or spec.dtype.itemsize != 2:
            return None
        if not call.vectors or spec.head_dim_v % 8 or call.rope_dim % 8 or spec.quantized:
            return None
        variant = sm80_variant(spec.dtype.name, call.arch)
        head_tiles = _head_tiles(call.as_call().spec, variant.config.rows)
        return MlaLaunches(_partitioned(call, variant, head_tiles))

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) in SHARED_KIB:
            for dtype in ("float16", "bfloat16"):
                yield sm80_variant(dtype, arch)


class SimtMla:
    """Every call."""

    name = "mla_simt"

    def serves(self, call: MlaCall) -> MlaLaunches:
        """The launch for a call."""
        spec = call.spec
        variant = simt_variant(spec.dtype.name, quantized=spec.quantized)
        return MlaLaunches(_partitioned(call, variant))

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        for dtype in FLOAT_DTYPES.values():
            for quantized in (False, True):
                yield simt_variant(dtype, quantized=quantized)


def _partitioned(
    call: MlaCall,
    variant: Variant,
    head_tiles: int = 1,
    **more: int,
) -> Launch:
    """The launch of a kernel whose blocks share all sequences' keys by decoding/schedule.cuh, which
    takes tiles of heads as key heads that have the same keys. `more` is as in mla_arguments."""
    launch = partitioned(call.as_call(head_tiles), variant)
    spec = call.as_call().spec
    rows = spec.heads_q // head_tiles * spec.seqlen_q
    own = mla_arguments(
        call.spec,
        _q_rope_strides(call),
        call.rope,
        index_stride=call.top_k or 0,
        row_tiles=-(-rows // variant.config.rows),
        **more,
    )
    return dataclasses.replace(launch, arguments=(*launch.arguments, own))


def _merged(call: MlaCall, variant: Variant, **more: int) -> MlaLaunches:
    """The launch of a kernel whose partial results, where it may split keys, are merged by its own
    thread blocks if tiles of rows are many, else by a second launch. The grid is (tiles of heads,
    groups of blocks), and of the second (tiles, pieces of a tile's rows, pieces of O's columns)."""
    spec, config = call.as_call().spec, variant.config
    head_tiles = _head_tiles(spec, config.rows)
    rows = spec.heads_q // head_tiles * spec.seqlen_q
    if spec.rows == "ragged":
        tiles = rows // config.rows + spec.batch
    else:
        tiles = spec.batch * -(-rows // config.rows)
    tiles *= head_tiles
    if _is_unsplit(call, config, tiles):
        call = dataclasses.replace(call, num_splits=1)
    if call.num_splits == 1 or spec.seqlen_k <= config.tile_keys:
        launch = _partitioned(call, variant, head_tiles, **more)
        return MlaLaunches(dataclasses.replace(launch, workspace_bytes=0))
    merges_parts = (
        isinstance(config, Sm90MlaConfig)
        and config.half_parts
        and call.num_splits is None
        and MOST_PARTS * tiles >= call.multiprocessors * config.blocks_per_sm
    )
    launch = _partitioned(call, variant, head_tiles, merges_parts=merges_parts, **more)
    part_bytes = launch.workspace_bytes
    if merges_parts:  # with a word for each
        words = part_bytes // config.part_bytes * WORD
        return MlaLaunches(dataclasses.replace(launch, workspace_bytes=part_bytes + words))
    main = dataclasses.replace(launch, workspace_bytes=0)
    combine = _combine(call, variant, tiles, min(rows, config.rows))
    combine = dataclasses.replace(combine, arguments=launch.arguments)
    return MlaLaunches(main, combine, part_bytes, tiles * TASK_BYTES)


def _is_unsplit(call: MlaCall, config: Any, tiles: int) -> bool:
    """Whether there are so few keys that it takes longer to split them."""
    alone = tiles <= call.multiprocessors * config.blocks_per_sm
    return (
        isinstance(config, PLAIN_SM90)
        and call.num_splits is None
        and call.as_call().spec.seqlen_k <= (UNSPLIT_KEYS_OF_ONE if alone else UNSPLIT_KEYS)
    )


def _combine(call: MlaCall, variant: Variant, tiles: int, tile_rows: int) -> Launch:
    """The launch of mla/combine.cu, without arguments, for so many tiles and rows of each. All its
    thread blocks are resident at a time where that is possible: in waves they took 9 µs for 12
    tiles of 16 rows."""
    eights = -(-tile_rows // 8)
    resident = COMBINE_PIECES * call.multiprocessors
    all_rows = tiles * tile_rows
    small = all_rows <= 2 * call.multiprocessors
    many_parts = 8 * tiles <= call.multiprocessors  # of a tile; a warp with whole rows reads four
    # Given numbers of splits may leave many partial results of many tiles.
    if small and (call.num_splits is not None or 4 * all_rows <= resident):
        columns, shared = LATENT // 4, True
    elif 2 * all_rows <= resident:
        columns, shared = LATENT // 2, True
    elif (small or many_parts) and 4 * eights * tiles <= resident:
        columns, shared = LATENT // 4, False
    else:
        columns, shared = LATENT, False
    half_parts = isinstance(variant.config, PLAIN_SM90) and variant.config.half_parts
    return Launch(
        combine_variant(
            *(call.spec.dtype.name, variant.config.rows, columns),
            shared_rows=shared,
            half_parts=half_parts,
        ),
        (tiles, tile_rows if shared else eights, LATENT // columns),
        (),
    )


def _q_rope_strides(call: MlaCall) -> tuple[int, ...]:
    """Strides of the rotated parts as the kernel's sequences have them."""
    if call.top_k is None:
        return call.q_rope
    return call.by_query(call.q_rope)


#: The kernels, the fastest first.
MLA: TierList[MlaTier] = TierList(CodesMla(), Sm90Mla(), Sm80Mla(), SimtMla())


def choose_mla(call: MlaCall, tiers: tuple[MlaTier, ...] = MLA.all) -> MlaLaunches:
    """Choose the kernel of a call: the first of `tiers` that serves it."""
    return first_serving(tiers, call, call.spec, call.arch)
