"""Few or short sequences on Hopper: which calls decoding/decode_sm90.cu serves, in which
variants."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cuattn._quantized import code_columns, format_number
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.decoding import (
    CODE_TILE_KEYS,
    RING_BLOCK_BYTES,
    arguments_of,
    as_decoding,
    bits_of_two,
    code_groups,
    has_packed_scales,
)
from cuattn.gpu.dispatch.decoding_times import (
    ALONE,
    BESIDE,
    BESIDE_OF_MANY_KEYS,
    CLUSTERS,
    DECODE_HEAD_DIMS,
    LEAST_USED,
    ROWS_OF_TILE,
    Blocks,
    Clusters,
    clusters_of_pair,
    clusters_that_fit,
    clusters_us,
    decode_head_dim,
    key_scale,
    largest_that_fits,
    lone_blocks,
    row_tiles,
    rows_of_sequence,
    splits_us,
    whole_pairs,
)
from cuattn.gpu.dispatch.launch import MAX_DIM, Call, Launch, capability, shapes
from cuattn.gpu.dispatch.routing import reads_keys_again
from cuattn.gpu.params import DECODE_MAPS
from cuattn.gpu.tensormap import TensorMap, addressable

CLUSTER_TILE_KEYS = 16


class Tile(NamedTuple):
    """What a call needs of a config."""

    head_dim: int
    rows: int  # of a tile
    row_tiles: int
    whole_rows: bool
    pairs: int  # of a sequence's tile of rows and a key head


#: Rows of a tile that it comes with, and head_dims of codes.
CLUSTER_ROWS = (8, ROWS_OF_TILE)
CODE_HEAD_DIMS = (64, 128)

#: Over codes a pair has several of the largest clusters where three fit: each has so many keys at
#: least, and all pairs so many at most. And clusters of 4 instead, which leave fewer
#: multiprocessors idle, where each of their blocks has so many keys.
SPLIT_KEYS = 2048
MOST_SPLIT_KEYS = {8: 1 << 18, 16: 1 << 19}
SMALL_CLUSTERS_KEYS = 1024

#: How many keys a thread block has at most over codes: as far as expanding them takes less time
#: than the other kernels take to start. It is twice as many where those take longer: with more than
#: 8 rows, and where decode_sm80.cu would serve codes of 8 bits at head_dim 128, with more than 4
#: rows or several sequences. And how many it has at least where a pair has two of the largest
#: clusters, or as many of the smallest as fit: at head_dim 64, where expanding takes most of the
#: time.
MOST_CODES = 1024
LEAST_CODES = 512

#: The same in clusters of 2 over codes of 8 bits at head_dim 128, where they leave few
#: multiprocessors idle.
MOST_CODES_OF_HALF = 4096
CLUSTER_FORMATS = (
    ("int8", "int8"),
    ("float8_e4m3", "float8_e4m3"),
    ("int4", "int4"),
    ("int8", "int4"),
)


@dataclasses.dataclass(frozen=True)
class Sm90DecodeConfig(Config):
    """decoding/decode_sm90.cu."""

    dtype: str
    head_dim: int  # the next of 64 and 128, for both
    rows: int  # 8 or 16
    warp_keys: int  # of a warp's tile
    warps: int
    stages: int
    cluster: int  # blocks that share a sequence and key head
    k_format: int = 0  # as in Sm80DecodeConfig
    v_format: int = 0
    blocks_per_sm: int = 1  # that registers have to have room for
    whole_rows: bool = True  # both head_dims are exactly this one; else up to it
    row_tiles: bool = False  # there may be several tiles of rows
    packed_scales: bool = False  # those of a head's neighbouring keys lie side by side

    @property
    def threads(self) -> int:
        """A warp for each ring."""
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """The rings, then Q, then the cluster's parts of O, then what is small."""
        tile_bits = self.warp_keys * self.head_dim * bits_of_two(self.k_format, self.v_format)
        rings = self.warps * self.stages * tile_bits // 8
        rows = self.rows * (self.head_dim * 2 + 8 * (self.warps + 1))
        if self.cluster > 1:
            rows += self.rows * (self.head_dim * 4 + 8 * self.cluster)
        small = 8 * self.stages * self.warps + 8
        if self.k_format:  # what scores of a row need, and scales
            small += 32 * self.rows + 8 * self.warp_keys * self.stages * self.warps + 1024
        return -(-(rings + rows + small) // 1024) * 1024

    @property
    def part_bytes(self) -> int:
        """What a cluster leaves in global memory where it is one of several: each row's O, and each
        block's maximum and sum of it, and as many bytes of launch ids."""
        return 16 * self.rows * (self.head_dim // 2 + self.cluster)


class Sm90Decode:
    """So few sequences that each can have a cluster of thread blocks for every key head, or
    several, and these little to read."""

    name = "decode_sm90"
    decodes = True
    reads_codes = True

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None. Its grid is (blocks of all clusters of a pair, key heads,
        batch)."""
        if (taken := as_decoding(call)) is None:
            return None
        call, spec = taken, taken.spec
        rows, tiles = rows_of_sequence(spec), row_tiles(spec)
        if capability(call.arch) != 90 or spec.dtype.itemsize != 2:
            return None
        if not call.vectors or not all(addressable(array[:-1]) for array in call.strides[1:3]):
            return None
        if spec.rows == "ragged" or call.num_splits is not None or not spec.seqlen_k:
            return None
        if tiles > 1 and not reads_keys_again(call):
            return None
        if call.elementwise:
            return None
        dims = spec.head_dim, spec.head_dim_v
        if max(dims) > MAX_DIM or any(d % 8 for d in dims):
            return None
        head_dim = decode_head_dim(spec)
        whole_rows = dims == (head_dim, head_dim)
        if spec.quantized and not (whole_rows and head_dim in CODE_HEAD_DIMS):
            return None
        if spec.keys == "paged" and spec.page_size < CLUSTER_TILE_KEYS:
            return None
        if code_groups(call, head_dim) != (1, 1):
            return None
        tile_rows = next((n for n in CLUSTER_ROWS if rows <= n), ROWS_OF_TILE)
        pairs = spec.batch * spec.heads_kv * tiles
        tile = Tile(head_dim, tile_rows, tiles, whole_rows, pairs)
        shape = _lone_blocks(call, tile) or _clusters(call, tile)
        if shape is None:
            return None
        config, clusters = shape
        packed = spec.quantized and has_packed_scales(call)
        config = dataclasses.replace(
            config, whole_rows=whole_rows, row_tiles=tiles > 1, packed_scales=packed
        )
        small = spec.keys == "paged" and spec.page_size < config.warp_keys
        box_keys = CLUSTER_TILE_KEYS if small else config.warp_keys
        grid = (clusters * config.cluster, spec.heads_kv * tiles, spec.batch)
        slots = 0 if clusters == 1 else clusters * pairs
        return Launch(
            _sm90_variant(config),
            grid,
            (arguments_of(call), DECODE_MAPS.arguments()),
            {
                name: _tiles(call, strides, format, dim, box_keys, whole_rows)
                for name, strides, format, dim in (
                    ("k", call.strides.k, spec.k_format, spec.head_dim),
                    ("v", call.strides.v, spec.v_format, spec.head_dim_v),
                )
            },
            workspace_bytes=slots * config.part_bytes,
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if capability(arch) == 90:
            for dtype in ("float16", "bfloat16"):
                for dim, rows in itertools.product(DECODE_HEAD_DIMS, CLUSTER_ROWS):
                    whole = [_sm90_config(dtype, dim, rows, cluster) for cluster in CLUSTERS]
                    several = BESIDE_OF_MANY_KEYS.get(dim, BESIDE[dim])
                    for blocks in dict.fromkeys((ALONE[dim], BESIDE[dim], several)):
                        whole.append(_lone_config(dtype, dim, rows, blocks))
                    configs = [*whole, _sm90_config(dtype, dim, rows, 4, half=True)]
                    if rows == ROWS_OF_TILE:
                        configs += [dataclasses.replace(c, row_tiles=True) for c in whole]
                    for config, exact in itertools.product(configs, (True, False)):
                        yield _sm90_variant(dataclasses.replace(config, whole_rows=exact))
                for dim, rows, names, cluster in itertools.product(
                    CODE_HEAD_DIMS, CLUSTER_ROWS, CLUSTER_FORMATS, CLUSTERS
                ):
                    formats = format_number(names[0]), format_number(names[1])
                    config = _sm90_config(dtype, dim, rows, cluster, formats)
                    for packed in (False, True):
                        yield _sm90_variant(dataclasses.replace(config, packed_scales=packed))


def _tiles(
    call: Call,
    strides: tuple[int, ...],
    format: str,
    head_dim: int,
    box_keys: int,
    whole_rows: bool,
) -> TensorMap:
    """A cache (sequence or page, key, head, head_dim) as decode_sm90.cu reads it, some keys of a
    head at a time: (64 columns, key, their number, head, sequence or page), or with all bytes of a
    row of codes in place of columns; or, of rows that it reads panel by panel, (column, key, head,
    sequence or page)."""
    spec = call.spec
    outer, keys = shapes(spec, call.num_pages)[1][:2]
    page, key, head, column = strides
    if not whole_rows:
        return TensorMap(
            spec.dtype,
            (head_dim, keys, spec.heads_kv, outer),
            (key, head, page),
            (64, CLUSTER_TILE_KEYS, 1, 1),
            l2_bytes=64,  # what else lies in a line is another block's
        )
    dtype, columns, panels = spec.dtype, 64, head_dim // 64
    if format:
        dtype, columns, panels = np.dtype(np.uint8), code_columns(format, head_dim), 1
    return TensorMap(
        dtype,
        (columns, keys, panels, spec.heads_kv, outer),
        (key, columns * column, head, page),
        (columns, box_keys, panels, 1, 1),
        swizzle_bytes=columns * dtype.itemsize,
    )


def _lone_blocks(call: Call, tile: Tile) -> tuple[Sm90DecodeConfig, int] | None:
    """The config with a thread block for each pair, and that there is one cluster."""
    blocks = lone_blocks(call.spec, call.multiprocessors)
    if blocks is None:
        return None
    return _lone_config(call.spec.dtype.name, tile.head_dim, tile.rows, blocks), 1


def _clusters(call: Call, tile: Tile) -> tuple[Sm90DecodeConfig, int] | None:
    """The config with a cluster of thread blocks for each pair, where there are so few pairs that
    all run at a time; and how many clusters a pair has."""
    spec = call.spec
    clusters = _clusters_of_codes(call, tile) if spec.quantized else _clusters_of_keys(call, tile)
    if clusters is None:
        return None
    formats = format_number(spec.k_format), format_number(spec.v_format)
    half = clusters.size == 4 and tile.pairs * clusters.count > whole_pairs(call.multiprocessors)
    config = _sm90_config(
        spec.dtype.name, tile.head_dim, tile.rows, clusters.size, formats, half=half
    )
    return config, clusters.count


def _clusters_of_keys(call: Call, tile: Tile) -> Clusters | None:
    """Those of keys and values that are not codes, where decode_sm80.cu takes longer."""
    spec, multiprocessors = call.spec, call.multiprocessors
    slower = clusters_us(spec, multiprocessors) > splits_us(spec, multiprocessors)
    return None if slower and tile.row_tiles == 1 else clusters_of_pair(spec, multiprocessors)


def _several(call: Call, tile: Tile, fit: int) -> Clusters:
    """The clusters over codes of a pair that has as many of the largest as pay, of which so many
    fit, or of those of 4."""
    size, keys = max(CLUSTERS), call.spec.seqlen_k
    if fit < 3:  # twice the blocks do not pay for one more merge
        return Clusters(size, 1)
    small = Clusters(4, whole_pairs(call.multiprocessors) // tile.pairs)
    an_eighth_more = 8 * small.blocks >= 9 * size * fit
    if an_eighth_more and keys >= SMALL_CLUSTERS_KEYS * small.blocks:
        return small
    return Clusters(size, max(1, min(fit, keys // SPLIT_KEYS)))


def _clusters_of_codes(call: Call, tile: Tile) -> Clusters | None:
    """Those of codes, which are expanded in registers."""
    spec, fits = call.spec, clusters_that_fit(tile.pairs, call.multiprocessors, halves=False)
    keys, names = spec.seqlen_k, (spec.k_format, spec.v_format)
    size = largest_that_fits(fits)
    if size is None or names not in CLUSTER_FORMATS:
        return None
    clusters = _several(call, tile, fits[size]) if size == max(CLUSTERS) else Clusters(size, 1)
    if clusters.count > 1:
        return clusters if keys <= MOST_SPLIT_KEYS[tile.rows] // tile.pairs else None
    smallest = Clusters(min(CLUSTERS), fits[min(CLUSTERS)])
    if tile.head_dim == 64 and fits[max(CLUSTERS)] <= 1 and smallest.count >= 4:
        several = smallest
    else:
        several = Clusters(size, fits[size] if size == max(CLUSTERS) else 1)
    if several.count > 1 and LEAST_CODES * several.blocks <= keys:
        clusters = several
    wide = tile.head_dim == 128 and "int4" not in names
    slow_elsewhere = wide
    if size == max(CLUSTERS):
        slow_elsewhere = rows_of_sequence(spec) > (4 if wide else 8)
    most = MOST_CODES * (2 if slow_elsewhere and clusters.count == 1 else 1)
    if wide and size == 2 and tile.pairs * size >= LEAST_USED * call.multiprocessors:
        most = MOST_CODES_OF_HALF
    return clusters if keys <= most * clusters.blocks else None


def _sm90_config(
    dtype: str,
    head_dim: int,
    rows: int,
    cluster: int,
    formats: tuple[int, int] = (0, 0),
    *,
    half: bool = False,
) -> Sm90DecodeConfig:
    """A block has a multiprocessor, or `half` of one."""
    tiles = 12 if half else 24  # of head_dim 128 that fit
    warps = (4 if half and head_dim > 64 else 8) // key_scale(head_dim)
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
    most = (227 << 10) - RING_BLOCK_BYTES
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


def _lone_config(dtype: str, head_dim: int, rows: int, blocks: Blocks) -> Sm90DecodeConfig:
    """A pair has one thread block."""
    return Sm90DecodeConfig(
        dtype,
        head_dim,
        rows,
        warp_keys=CLUSTER_TILE_KEYS,
        warps=blocks.warps,
        stages=blocks.stages,
        cluster=1,
        blocks_per_sm=blocks.blocks_per_sm,
    )


def _sm90_variant(config: Sm90DecodeConfig) -> Variant:
    return Variant("decoding/decode_sm90.cu", "decode_sm90", config)
