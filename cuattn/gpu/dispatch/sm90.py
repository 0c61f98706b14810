"""Which calls attention/forward_sm90.cu, Hopper's forward kernel, serves, in which variant."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import dropout_arguments, forward_arguments
from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.arguments_sm90 import (
    has_key_groups,
    has_scales,
    kernel_arguments,
    maps_of,
    page_heads,
    score_scales,
)
from cuattn.gpu.dispatch.config_sm90 import (
    KEY_GROUP_DIMS,
    SM90_MANY_KEYS,
    SM90_TILES,
    Sm90ForwardConfig,
    configs_of,
    variant_of,
)
from cuattn.gpu.dispatch.launch import MAX_DIM, Call, Launch
from cuattn.gpu.dispatch.order_sm90 import sm90_section, time_of_call, time_of_head
from cuattn.gpu.dispatch.routing import MIN_PAGE

SCHEDULER_BYTES = 16  # Sm90Params::Scheduler


class Sm90Forward:
    """16-bit calls that TMA can address, with scores that scaling keeps in order.

    Keys may lie in pages, or in caches of which the device knows how much is used: such a cache is
    one page a sequence. A tile has rows of one sequence alone, so a ragged sequence's results are
    bit for bit those of the call with the same keys one after the other.
    """

    name = "forward_sm90"
    decodes = False
    reads_codes = False

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None."""
        spec = call.spec
        dims = spec.head_dim, spec.head_dim_v
        cached = spec.keys in ("cached", "paged")
        ragged = spec.rows == "ragged"
        if (
            call.arch != "sm_90a"
            or call.partial is not None
            or (call.elementwise and (ragged or cached))
            or max(dims) > MAX_DIM
            or spec.kv_dtype != spec.dtype
            or (spec.keys == "paged" and spec.page_size < MIN_PAGE)
            or spec.dtype.itemsize != 2
            or (spec.dropout != 0.0 and (call.has_score or cached))
            or not call.addressable
            or spec.head_dim_v % 8
            or not (0 < spec.seqlen_k < 1 << 29 and spec.seqlen_q < 1 << 29)
            or (not call.has_own_scores and not has_scales(call))
        ):
            return None
        bounded = spec.window_left is not None, spec.window_right is not None
        padded = next(tile for tile in SM90_TILES if dims[0] <= tile[0] and dims[1] <= tile[1])
        configs = [
            config
            for config in configs_of(
                spec.dtype.name,
                padded,
                call.has_score,
                call.elementwise and not call.has_own_scores,
                varlen=ragged,
                cached=cached,
                pack_gqa=packs_gqa(call),
                dropout=spec.dropout != 0.0,
                many_keys=spec.seqlen_k >= SM90_MANY_KEYS,
                key_groups=has_key_groups(call),
            )
            if (config.bound_left, config.bound_right) >= bounded
        ]
        if call.min_queries:
            # Half of the multiprocessors, as another launch leaves, are slower at more tiles.
            configs = configs[:1]
        config = _fastest(spec, configs, call.multiprocessors)
        tiles = config.most_tiles(spec)
        if tiles >= 1 << 31:
            return None
        blocks = min(tiles, call.multiprocessors)
        late = blocks - max(1, min(blocks, call.multiprocessors - call.blocks_beside))
        tensor_maps = maps_of(call, config)
        arguments = forward_arguments(spec, call.strides, call.bias, call.mask, call.alibi_slopes)
        if config.dropout:
            arguments = arguments.followed_by(dropout_arguments(spec))
        return Launch(
            variant_of(config),
            (blocks - late,),
            (
                arguments,
                kernel_arguments(
                    spec,
                    config,
                    tensor_maps,
                    scales=score_scales(call),
                    section=sm90_section(spec, config, blocks),
                    table_stride=call.table_stride,
                    num_pages=call.num_pages,
                    min_queries=call.min_queries,
                    blocks=blocks if late else 0,
                    page_heads=page_heads(call) if config.key_groups else 0,
                ),
            ),
            tensor_maps,
            workspace_bytes=SCHEDULER_BYTES if ragged or cached else 0,
            late_blocks=late,
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if arch != "sm_90a":
            return
        for dtype, dims in itertools.product(("float16", "bfloat16"), SM90_TILES):
            for varlen, cached in itertools.product((False, True), repeat=2):
                # Bias and mask come with batched rows and keys alone.
                scores = ((False, False), (True, False), (True, True))
                for score in scores[: 2 if varlen or cached else 3]:
                    for pack_gqa in (False, True)[: 2 if varlen and not score[0] else 1]:
                        in_groups = cached and dims == KEY_GROUP_DIMS
                        for key_groups in (False, True)[: 2 if in_groups else 1]:
                            configs = configs_of(
                                dtype,
                                dims,
                                *score,
                                varlen=varlen,
                                cached=cached,
                                pack_gqa=pack_gqa,
                                key_groups=key_groups,
                            )
                            yield from map(variant_of, configs)
                if not cached:
                    configs = configs_of(
                        dtype, dims, False, False, varlen=varlen, cached=False, dropout=True
                    )
                    yield from map(variant_of, configs)


def packs_gqa(call: Call) -> bool:
    """Whether the rows of a tile are those of all query heads that share a key head: where lengths
    of sequences are unknown, so that those of a few tokens fill tiles best."""
    spec = call.spec
    group = spec.heads_q // spec.heads_kv
    idle = 64 % group if group <= 64 else 64  # of 64 rows
    most = 1 if spec.keys == "ragged" else 4
    plain = not call.has_score and spec.dropout == 0.0
    return spec.rows == "ragged" and group > 1 and idle <= most and plain


def _fastest(
    spec: AttentionSpec, configs: list[Sm90ForwardConfig], multiprocessors: int
) -> Sm90ForwardConfig:
    """The variant with the best tile, of those that bound the fewest keys, which come first.

    What a sequence's results are, bit for bit, depends on the keys of a block alone, and where keys
    lie in plain arrays the batch has no say in these; in how many rows share them it has.
    """
    bounds = configs[0].bound_left, configs[0].bound_right
    tiles = [config for config in configs if (config.bound_left, config.bound_right) == bounds]
    if len(tiles) == 1:
        return tiles[0]
    if spec.keys == "batched":
        tile_n = min(tiles, key=functools.partial(time_of_head, spec)).tile_n
        tiles = [config for config in tiles if config.tile_n == tile_n]
    return min(tiles, key=lambda config: time_of_call(spec, config, multiprocessors))
