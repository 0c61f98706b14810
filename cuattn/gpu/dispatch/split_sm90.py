"""Calls of attention/forward_sm90.cu whose rows pack the query heads of a group, and whose keys may
be cut into parts, with a result each: few queries, and a prefix that a batch shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import forward_arguments
from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.arguments_sm90 import kernel_arguments, maps_of, score_scales
from cuattn.gpu.dispatch.config_sm90 import Sm90ForwardConfig, variant_of
from cuattn.gpu.dispatch.launch import Call, Launch
from cuattn.gpu.dispatch.parts_sm90 import (
    PART_TILE_KEYS,
    Packing,
    packed_warpgroups,
    part_config,
    part_head_dim,
    plain_packings,
)
from cuattn.gpu.dispatch.routing import (
    EVEN_PACKINGS,
    SPLIT_TILE_KEYS,
    best_packing,
    can_split,
    even_section,
)
from cuattn.gpu.dispatch.sm90 import SCHEDULER_BYTES
from cuattn.gpu.tensormap import TensorMap, addressable

MIN_PREFIX_ROWS = 9  # packed
ARRIVED_BYTES = 4 * 8  # PartsOfTiles::arrived of a thread block
MAX_PREFIX_PARTS = 31  # with what follows the prefix, as many as merge.cu takes at a time


class Sm90Split:
    """Few queries whose heads fill a tile together. Of many keys, where tiles would leave
    multiprocessors idle, the results of parts are merged.

    For keys in plain arrays the number of parts does not depend on the batch, nor does a sequence's
    result, bit for bit.
    """

    name = "split_sm90"
    decodes = False
    reads_codes = False

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None."""
        if call.partial is not None or not can_split(call) or not call.addressable:
            return None
        packing = best_packing(call)
        if packing is None:
            return None
        config = split_config(call.spec, packing)
        return _launch(call, config, packing.parts)

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if arch != "sm_90a":
            return
        for dtype, head_dim in itertools.product(("float16", "bfloat16"), PART_TILE_KEYS):
            for packing in plain_packings(head_dim):
                yield variant_of(part_config(dtype, head_dim, packing))
        for dtype, head_dim, packing in _packings_over_caches():
            for split in (False, True):
                yield variant_of(
                    part_config(dtype, head_dim, packing, paged=True, lens=True, split=split)
                )
        for dtype, (head_dim, packing) in itertools.product(
            ("float16", "bfloat16"), EVEN_PACKINGS.items()
        ):
            yield variant_of(
                part_config(dtype, head_dim, packing, paged=True, lens=True, split=False)
            )


class Sm90Prefix:
    """Keys that all queries of a batch share, as of one sequence.

    It is faster than the decoding kernel for many rows: on an H200, 32 query heads on 8, head_dim
    128, 32768 keys, 55 µs beside 50 for 2 sequences, 52 beside 49 for 4, 52 beside 65 for 5, 92
    beside 253 for 64.
    """

    name = "prefix_sm90"
    decodes = True
    reads_codes = False

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None."""
        spec, partial = call.spec, call.partial
        if (
            partial is None
            or partial.first_key
            or not can_split(call)
            or spec.batch != 1
            or spec.keys not in ("batched", "paged")
            or spec.window_right is not None
            or spec.seqlen_q * (spec.heads_q // spec.heads_kv) < MIN_PREFIX_ROWS
        ):
            return None
        config = prefix_config(spec)
        return _launch(call, config, prefix_tiles(spec, config, call.multiprocessors)[1])

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if arch == "sm_90a":
            for dtype, head_dim, packing in _packings_over_caches():
                yield variant_of(part_config(dtype, head_dim, packing, bounded=False, paged=True))


def _packings_over_caches() -> Iterator[tuple[str, int, Packing]]:
    """Of each dtype and padded head_dim: tiles of one warpgroup of 64 rows, and of two."""
    dtypes = "float16", "bfloat16"
    for dtype, head_dim, warpgroups in itertools.product(dtypes, SPLIT_TILE_KEYS, (1, 2)):
        yield dtype, head_dim, Packing(1, warpgroups, SPLIT_TILE_KEYS[head_dim])


def prefix_tiles(
    spec: AttentionSpec, config: Sm90ForwardConfig, multiprocessors: int
) -> tuple[int, int]:
    """How many tiles of queries and key heads there are, and into how many parts the keys are
    best cut."""
    tiles = spec.heads_kv * -(-spec.seqlen_q // config.queries_of_tile(spec))
    blocks = -(-spec.seqlen_k // config.tile_n)

    def time(parts: int) -> float:
        """In what a tile's block of keys takes: about two more for each tile, and what writing and
        merging a part costs, at 5 TFLOP/s a multiprocessor and 3 TB/s."""
        waves = -(-tiles * parts // multiprocessors)
        return waves * (-(-blocks // parts) + 2) + 3.4 / config.tile_n * tiles * parts

    return tiles, min(range(1, min(blocks, MAX_PREFIX_PARTS) + 1), key=time)


def _launch(call: Call, config: Sm90ForwardConfig, parts: int) -> Launch | None:
    """The launch for `parts` parts, or None where TMA cannot address q with its heads packed. The
    out of several parts is (parts, batch, seqlen_q, heads_q, head_dim_v), contiguous."""
    spec = call.spec
    tensor_maps: dict[str, TensorMap | None] = maps_of(call, config)
    if not all(m is None or addressable(m.strides) for m in tensor_maps.values()):
        return None
    tiles = config.most_tiles(spec) * parts
    if tiles >= 1 << 31:
        return None
    strides = call.strides
    if config.split_kv:
        row = spec.heads_q * spec.head_dim_v
        out = [n * spec.dtype.itemsize for n in (spec.seqlen_q * row, row, spec.head_dim_v, 1)]
        strides = strides._replace(out=tuple(out))
    blocks = min(tiles, call.multiprocessors)
    workspace_bytes = SCHEDULER_BYTES if config.seq_lens else 0
    section = spec.heads_kv * parts if config.seq_lens else 0
    if config.even_keys:
        blocks = call.multiprocessors
        section = even_section(spec, blocks)
        counts = -(-blocks // 8) * 8 * ARRIVED_BYTES
        workspace_bytes = counts + 2 * blocks * config.part_bytes
    return Launch(
        variant_of(config),
        (blocks,),
        (
            forward_arguments(spec, strides),
            kernel_arguments(
                spec,
                config,
                tensor_maps,
                scales=score_scales(call),
                section=section,
                table_stride=call.table_stride,
                num_pages=call.num_pages,
                num_splits=parts,
            ),
        ),
        tensor_maps,
        workspace_bytes=workspace_bytes,
        parts=parts,
    )


def split_config(spec: AttentionSpec, packing: Packing) -> Sm90ForwardConfig:
    """The Config for a call some of whose queries may not see some keys."""
    cached = spec.keys in ("cached", "paged")
    return part_config(
        spec.dtype.name,
        part_head_dim(spec),
        packing,
        paged=cached,
        lens=cached,
        split=packing.parts > 1,
    )


def prefix_config(spec: AttentionSpec) -> Sm90ForwardConfig:
    """The Config for keys that all queries see."""
    head_dim = part_head_dim(spec)
    packing = Packing(1, packed_warpgroups(spec), SPLIT_TILE_KEYS[head_dim])
    return part_config(spec.dtype.name, head_dim, packing, bounded=False, paged=True)
