"""Prompts over codes on Hopper: which calls attention/forward_codes_sm90.cu serves, in which
variants, and where that is faster than attention over numbers that were made of the codes before.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cuattn._quantized import BFLOAT16, code_columns, format_number
from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import Scales, forward_arguments
from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.arguments_sm90 import box_keys, kernel_arguments, queries_map, score_scales
from cuattn.gpu.dispatch.config_sm90 import Sm90ForwardConfig
from cuattn.gpu.dispatch.decoding_times import rows_of_sequence, tokens_of_sequence
from cuattn.gpu.dispatch.launch import LEAST_SCALE, Call, Launch, shapes
from cuattn.gpu.dispatch.order_sm90 import sm90_section
from cuattn.gpu.dispatch.parts_sm90 import WARPGROUP_ROWS
from cuattn.gpu.dispatch.quantization import EXPAND_ROWS
from cuattn.gpu.dispatch.routing import MIN_PAGE
from cuattn.gpu.dispatch.sm90 import SCHEDULER_BYTES
from cuattn.gpu.params import CODE_SCALES
from cuattn.gpu.tensormap import TensorMap, addressable

HEAD_DIM = 128


class Times(NamedTuple):
    """What codes of a format cost on an H200, in microseconds."""

    tile_us: float  # of a tile whose thread block expands all of its codes, each key
    scratch_us: float  # of expanding a key of a head, and its value, to numbers in scratch
    decode_us: float  # of decoding over a key of a head, for every 16 rows of queries


#: By formats of keys and of values (docs/notes/quantization.md has the measurements).
TIMES = {
    ("int8", "int8"): Times(18.4e-3, 2.07e-4, 6.7e-5),
    ("float8_e4m3", "float8_e4m3"): Times(19.4e-3, 1.84e-4, 6.6e-5),
    ("int4", "int4"): Times(19.7e-3, 1.56e-4, 4.8e-5),
    ("int8", "int4"): Times(20.7e-3, 1.96e-4, 5.4e-5),
}
START_US = 9.1
TEAM_START_US = 11.0
TEAM_WAVE_US = 6.0  # of each further wave of teams
#: Of a tile for each key, where so many thread blocks expand codes together; about the same in all
#: formats.
TEAM_TILE_US = {3: 14.8e-3, 4: 13.8e-3, 5: 13.6e-3, 6: 13.4e-3, 7: 13.3e-3, 8: 13.2e-3}
#: Over numbers: of both launches, of a tile for each key, and how many bytes of keys and values are
#: read in a microsecond.
SCRATCH_START_US = 14.2
NUMBERS_TILE_US = 12.5e-3
NUMBERS_BYTES = 4.0e6
CLEARLY = 1.02  # how much faster this kernel has to be, by estimate
DECODE_ROWS = 32  # up to so many rows of a key head, decoding is no slower


@dataclasses.dataclass(frozen=True)
class Sm90CodesForwardConfig(Sm90ForwardConfig):
    """attention/forward_codes_sm90.cu."""

    k_format: int = 0  # tile::Format
    v_format: int = 0
    k_row_bytes: int = 0  # of codes
    v_row_bytes: int = 0
    expand_warps: int = 4  # that make numbers of codes
    expand_registers: int = 56  # of their threads
    code_stages: int = 4  # of a block's codes, of keys or of values
    shares: bool = False  # thread blocks expand codes for each other: with teams of several
    rotates_queries: bool = False  # as keys are that become codes

    @property
    def threads(self) -> int:
        """Those of forward_sm90.cu, and the warps that expand."""
        return 128 * (self.warpgroups + 1) + 32 * self.expand_warps

    @property
    def loaded_keys(self) -> int:
        """The same, and with a team those of the codes that a warp expands."""
        return self.tile_n // self.expand_warps if self.shares else self.tile_n

    @property
    def sorts_by_place(self) -> bool:
        """The same, but teams have an order of their own."""
        return not self.shares and Sm90ForwardConfig.sorts_by_place.fget(self)

    @property
    def smem_bytes(self) -> int:
        """The same with the codes of some blocks, or those that a thread block of a team expands,
        and their scales, rounded up to whole KiB."""
        row_bytes = self.code_stages * max(self.k_row_bytes, self.v_row_bytes)
        if self.shares:
            row_bytes = self.k_row_bytes + self.v_row_bytes + 16
        return Sm90ForwardConfig.smem_bytes.fget(self) + self.tile_n * row_bytes


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
            or not serves_codes(spec, call.k_scales, call.v_scales, call.multiprocessors)
            or (call.k_scales.rotated and not rotates_in_kernel(spec, call.multiprocessors))
        ):
            return None
        team = team_of(spec, call.multiprocessors)
        config = _config_of(spec, team, call.k_scales.rotated)
        groups = min(config.most_tiles(spec, team), call.multiprocessors // team)
        blocks = groups * team
        tensor_maps: dict[str, TensorMap | None] = {
            "q": queries_map(call, config),
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
            k_scale_stride=call.k_scales.strides,
            v_scale_stride=call.v_scales.strides,
            team=team,
            ring_slots=_ring_slots(team),
        )
        return Launch(
            _variant(config),
            (blocks,),
            (forward_arguments(spec, call.strides), arguments.followed_by(strides)),
            tensor_maps,
            workspace_bytes=groups * _team_bytes(team) if team > 1 else SCHEDULER_BYTES,
        )

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
        if arch == "sm_90a":
            options = (False, False), (True, False), (True, True)
            flags = (False, True)
            for formats, varlen, pack_gqa, of_team in itertools.product(
                TIMES, flags, flags, options
            ):
                yield _variant(_config(*formats, varlen, pack_gqa, *of_team))


def serves_codes(
    spec: AttentionSpec, k_scales: Scales, v_scales: Scales, multiprocessors: int
) -> bool:
    """Whether calls over such codes are for the kernel, once queries are rotated as keys are."""
    return (
        expands_each_tile(spec, multiprocessors)
        and spec.dtype == BFLOAT16  # float16 ends early: what was of another type may lie beyond
        and spec.keys in ("cached", "paged")
        and (spec.keys == "cached" or spec.page_size >= MIN_PAGE)
        and spec.head_dim == spec.head_dim_v == HEAD_DIM
        and spec.window_left is None
        and spec.softcap == 0.0
        and spec.scale >= LEAST_SCALE
        and spec.dropout == 0.0
        and 0 < spec.seqlen_k < 1 << 29
        and spec.seqlen_q < 1 << 29
        and _config_of(spec, 1).most_tiles(spec) < 1 << 31
        and _has_scale_of_row(spec.k_format, k_scales)
        and _has_scale_of_row(spec.v_format, v_scales)
        and not v_scales.rotated
    )


def rotates_in_kernel(spec: AttentionSpec, multiprocessors: int) -> bool:
    """Whether the kernel that serves a call rotates its queries."""
    return team_of(spec, multiprocessors) > 1


@functools.lru_cache(maxsize=4096)
def expands_each_tile(spec: AttentionSpec, multiprocessors: int) -> bool:
    """Whether a call is clearly faster with the codes expanded for each tile of queries, or for
    each group of a team's tiles, than otherwise: by numbers made of them first, or, with few rows
    of a key head, by decoding.

    Numbers are made once for all tiles of a key head, and attention over them may cut keys into
    parts, so that its tiles need not be whole waves of the device. Decoding reads and expands codes
    for every 16 rows.
    """
    times = TIMES.get((spec.k_format, spec.v_format))
    fits = spec.heads_q // spec.heads_kv <= WARPGROUP_ROWS
    rows = rows_of_sequence(spec)
    if times is None or not fits or rows <= DECODE_ROWS:
        return False
    each_us = _expanding_us(spec, multiprocessors, team_of(spec, multiprocessors))
    pairs = spec.batch * spec.heads_kv
    if rows <= EXPAND_ROWS:
        return CLEARLY * each_us <= -(-rows // 16) * pairs * spec.seqlen_k * times.decode_us
    nbytes = pairs * spec.seqlen_k * 2 * HEAD_DIM * spec.dtype.itemsize
    once_us = SCRATCH_START_US + pairs * spec.seqlen_k * times.scratch_us
    waves = _config_of(spec, 1).most_tiles(spec) / multiprocessors
    waves = math.ceil(waves) if waves > 2 else waves  # fewer tiles have their keys cut into parts
    once_us += max(waves * _mean_keys(spec) * NUMBERS_TILE_US, nbytes / NUMBERS_BYTES)
    return CLEARLY * each_us <= once_us


def _mean_keys(spec: AttentionSpec) -> float:
    """How many keys a query sees."""
    return spec.seqlen_k - min(tokens_of_sequence(spec), spec.seqlen_k) / 2


def _expanding_us(spec: AttentionSpec, multiprocessors: int, team: int) -> float:
    """About how long the kernel takes with so many thread blocks that expand codes together."""
    times = TIMES[spec.k_format, spec.v_format]
    waves = math.ceil(_likely_groups(spec, team) / (multiprocessors // team))
    start_us = TEAM_START_US + (waves - 1) * TEAM_WAVE_US if team > 1 else START_US
    return start_us + waves * _mean_keys(spec) * TEAM_TILE_US.get(team, times.tile_us)


@functools.lru_cache(maxsize=4096)
def team_of(spec: AttentionSpec, multiprocessors: int) -> int:
    """How many thread blocks expand codes together, so that the call is fastest."""
    teams = [1, *(team for team in TEAM_TILE_US if team <= multiprocessors)]
    return min(teams, key=lambda team: _expanding_us(spec, multiprocessors, team))


def _likely_groups(spec: AttentionSpec, team: int) -> float:
    """How many groups of so many tiles there are; of ragged rows the mean of the most and the
    fewest."""
    config = _config_of(spec, team)
    most = config.most_tiles(spec, team)
    if not config.varlen:
        return most
    fewest = max(spec.batch, -(-spec.seqlen_q // (config.queries_of_tile(spec) * team)))
    return (most + fewest * config.heads_of_tiles(spec)) / 2


def _ring_slots(team: int) -> int:
    """Slots of a team's ring: a block in the making by each thread block, and as many that are
    read. With fewer than three, or than thread blocks, the team would stop."""
    return 1 << (2 * team - 1).bit_length() if team > 1 else 0


def _team_bytes(team: int) -> int:
    """A TeamMemory of attention/expand_team_sm90.cuh, and its slots of keys and values."""
    return 256 + _ring_slots(team) * 2 * 128 * HEAD_DIM * 2


def addressable_codes(strides: tuple[int, ...], address: int) -> bool:
    """Whether TMA can address codes."""
    return address % 16 == 0 and addressable(strides[:-1])


def _has_scale_of_row(format: str, scales: Scales) -> bool:
    minimum = scales.has_minimum and scales.paired if format == "int4" else not scales.has_minimum
    return scales.groups == 1 and not scales.is_float32 and not scales.has_offset and minimum


def _config_of(spec: AttentionSpec, team: int, rotated: bool = False) -> Sm90CodesForwardConfig:
    packs, shares = spec.heads_q > spec.heads_kv, team > 1
    return _config(
        spec.k_format, spec.v_format, spec.rows == "ragged", packs, shares, rotated and shares
    )


@functools.cache
def _config(
    k_format: str,
    v_format: str,
    varlen: bool,
    pack_gqa: bool,
    shares: bool,
    rotates_queries: bool = False,
) -> Sm90CodesForwardConfig:
    return Sm90CodesForwardConfig(
        "bfloat16",
        HEAD_DIM,
        HEAD_DIM,
        tile_n=128,
        warpgroups=2,
        q_stages=2 if shares else 1,
        bound_left=False,
        bound_right=True,
        varlen=varlen,
        score=False,
        elementwise=False,
        pack_gqa=pack_gqa,
        paged_kv=True,
        seq_lens=True,
        k_format=format_number(k_format),
        v_format=format_number(v_format),
        k_row_bytes=code_columns(k_format, HEAD_DIM),
        v_row_bytes=code_columns(v_format, HEAD_DIM),
        expand_registers=64 if shares else 56,
        shares=shares,
        rotates_queries=rotates_queries,
    )


def _variant(config: Sm90CodesForwardConfig) -> Variant:
    team = "_team" if config.shares else ""
    return Variant(f"attention/forward{team}_codes_sm90.cu", "forward_sm90", config)


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
    )
