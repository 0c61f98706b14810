"""The pipeline of attention/forward_sm90.cu: the roles of its warps, as its source has them.

A tile of work is its number of blocks of keys and the consumers that skip one of them, which is all
that the warps' waits depend on. Counts, sizes and the switches between variants come from the
source and from `Config`; forward_sm90.txt shows what the roles below were written after, and
forward_codes_sm90.txt those of attention/forward_codes_sm90.cu, which adds some, and
forward_team_codes_sm90.txt those of attention/forward_team_codes_sm90.cu, whose thread blocks wait
for each other as test_forward_team_codes_sm90.py has it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from cuattn.gpu import dispatch
from tests.pipelines import source
from tests.pipelines.explorer import (
    END,
    Advance,
    Arrive,
    Copy,
    Pipeline,
    Read,
    Role,
    Sync,
    Wait,
    Write,
)

KERNEL = "attention/forward_sm90.cu"
CODES_KERNEL = "attention/forward_codes_sm90.cu"
TEAM_KERNEL = "attention/forward_team_codes_sm90.cu"
WARPS = 4  # of a warpgroup


class Tile(NamedTuple):
    """A tile of queries: how many blocks of keys it sees, and which consumers skip one of them (the
    last consumer the last that is worked on, the others the first)."""

    blocks: int
    skip: tuple[bool, ...] = ()

    def __str__(self) -> str:
        skips = "".join(f", skipped by {i}" for i, skip in enumerate(self.skip) if skip)
        return f"[{self.blocks} blocks{skips}]"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of a Config decides who waits for whom."""

    consumers: int
    stages: int
    q_stages: int
    queue: int
    filter_warps: int
    elementwise: bool
    skips_blocks: bool
    keeps_turn: bool
    releases_late: bool
    first_turn: bool
    takes_late: bool
    value_warps: int  # beside the warp that loads keys, or keys and values
    expand_warps: int  # that make numbers of codes
    code_stages: int
    shares_codes: bool  # thread blocks expand codes for each other
    rotates_queries: bool
    turn_threads: int
    arrivals: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        flags = (
            *("elementwise", "skips_blocks", "keeps_turn", "releases_late", "takes_late"),
            *("shares_codes", "rotates_queries"),
        )
        names = [flag for flag in flags if getattr(self, flag)]
        counted = (
            (self.consumers, "consumers"),
            (self.q_stages, "q_stages"),
            (self.filter_warps, "filter_warps"),
            (self.value_warps, "value_warps"),
            (self.expand_warps, "expand_warps"),
            (self.code_stages, "code_stages"),
        )
        return "-".join([*(f"{count}{what}" for count, what in counted if count), *names])


def protocols() -> dict[str, Protocol]:
    """Every protocol that some variant has, by name."""
    found = {protocol(variant.config) for variant in dispatch.variants("sm_90a")
             if variant.entry == "forward_sm90"}  # fmt: skip
    named = {str(p): p for p in sorted(found, key=str)}
    assert len(named) == len(found), "a name for each"
    return named


def kernel_of(config: dispatch.Sm90ForwardConfig) -> str:
    """The source of a variant."""
    if not hasattr(config, "expand_warps"):
        return KERNEL
    return TEAM_KERNEL if config.shares else CODES_KERNEL


@functools.cache
def protocol(config: dispatch.Sm90ForwardConfig) -> Protocol:
    """The protocol of a variant."""
    text = source.text(kernel_of(config))
    constants = source.Constants(text, config)
    return Protocol(
        consumers=constants["kWarpgroups"],
        stages=constants["kStages"],
        q_stages=constants["kStagesQ"],
        queue=constants["kSize"],
        filter_warps=constants["kFilterWarps"],
        elementwise=config.elementwise,
        skips_blocks=bool(constants["kSkipsBlocks"]),
        keeps_turn=bool(constants["kKeepsTurn"]),
        releases_late=bool(constants["kReleasesLate"]),
        first_turn=bool(constants["kFirstTurn"]),
        takes_late=bool(constants["kTakesLate"]),
        value_warps=constants["kValueWarps"],
        expand_warps=constants["kExpandWarps"],
        code_stages=constants["kOwnCodeStages"],
        shares_codes=bool(constants["kSharesCodes"]),
        rotates_queries=bool(constants["kRotatesQueries"]),
        turn_threads=constants.value(re.search(r"bar_sync\(1 \+ consumer, (.*?)\)", text)[1]),
        arrivals=tuple(sorted(source.arrivals(text, constants).items())),
    )


def tiles(p: Protocol, most_blocks: int = 3) -> Iterator[Tile]:
    """Every tile that makes a difference."""
    if p.filter_warps:
        yield Tile(0, (False,) * p.consumers)
    for blocks in range(1, most_blocks + 1):
        may_skip = p.skips_blocks and blocks > 1
        for skip in itertools.product((False, True) if may_skip else (False,), repeat=p.consumers):
            yield Tile(blocks, skip)


# ------------------------------------------------------------------------------------------ roles


def read_tile(warps: int = 1) -> Iterator[NamedTuple]:
    yield Wait("queue.full")
    yield Read("tiles")
    yield Arrive("queue.empty", warps)
    yield Advance("queue")


def load(p: Protocol, what: str, *parts: str) -> Iterator[NamedTuple]:
    yield Wait(f"empty_{what}", before=True)
    parts = parts or (what,)
    yield Arrive(f"full_{what}", copies=len(parts))
    for part in parts:
        yield Copy(f"full_{what}", part)


def value_parts(p: Protocol) -> tuple[str, ...]:
    """The values that each filter warp may change; all of them where there are none."""
    return tuple(f"v.{number}" for number in range(p.filter_warps)) or ("v",)


def load_values(p: Protocol, own) -> Iterator[NamedTuple]:
    yield from load(p, "v", *value_parts(p))
    yield Advance("v")
    own.pending = False


def load_keys_and_values(p: Protocol, own, tile) -> Iterator[NamedTuple]:
    yield from read_tile()
    if tile == END:
        if own.pending:
            yield from load_values(p, own)
        return
    if p.filter_warps and tile.blocks == 0:
        if own.pending:
            yield from load_values(p, own)
        return
    for _ in range(tile.blocks):
        yield from load(p, "k")
        yield Advance("k")
        if own.pending:
            yield from load_values(p, own)
        own.pending = True


def load_keys_and_values_of_e77b6e5(p: Protocol, own, tile) -> Iterator[NamedTuple]:
    """What hung: the values of a tile's last block wait for the next tile that has keys."""
    yield from read_tile()
    if tile == END:
        if own.pending:
            yield from load_values(p, own)
        return
    for _ in range(tile.blocks):
        yield from load(p, "k")
        yield Advance("k")
        if own.pending:
            yield from load_values(p, own)
        own.pending = True


def load_one_of_both(what: str, p: Protocol, own, tile) -> Iterator[NamedTuple]:
    yield from read_tile()
    for _ in range(0 if tile == END else tile.blocks):
        yield from load(p, what, *(value_parts(p) if what == "v" else ()))
        yield Advance(what)


def blocks_in_turn(tile: Tile) -> Iterator[str]:
    """Keys of each block, and the values of the block before: how codes are loaded and expanded."""
    for block in range(tile.blocks):
        yield "k"
        if block > 0:
            yield "v"
    if tile.blocks:
        yield "v"


def load_codes(p: Protocol, own, tile) -> Iterator[NamedTuple]:
    yield from read_tile()
    for _ in blocks_in_turn(tile) if tile != END else ():
        yield from load(p, "codes")
        yield Advance("codes")


def expand(p: Protocol, own, tile) -> Iterator[NamedTuple]:
    """All warps that expand codes, as one process."""
    yield from read_tile(p.expand_warps)
    for what in blocks_in_turn(tile) if tile != END else ():
        yield Wait("full_codes")
        yield Wait(f"empty_{what}", before=True)
        yield Read("codes")
        for part in value_parts(p) if what == "v" else ("k",):
            yield Write(part)
        yield Arrive(f"full_{what}", p.expand_warps)
        yield Arrive("empty_codes", p.expand_warps)
        yield Advance("codes")
        yield Advance(what)


def load_numbers(p: Protocol, own, tile) -> Iterator[NamedTuple]:
    """Copies what the team has expanded, and waits for the copies before it says so."""
    yield from read_tile()
    if tile == END or tile.blocks == 0:
        return
    for block in range(tile.blocks):
        yield from load(p, "k")
        yield Advance("k")
        if block > 1:
            yield Advance("v", -1)
            yield Wait("full_v")
            yield Advance("v")
        if block > 0:
            yield from load(p, "v", *value_parts(p))
            yield Advance("v")
    yield from load(p, "v", *value_parts(p))
    yield Advance("v")
    for what in "kv":
        yield Advance(what, -p.stages)
        for _ in range(p.stages):
            yield Wait(f"full_{what}")
            yield Advance(what)


def expand_for_team(p: Protocol, own, tile) -> Iterator[NamedTuple]:
    """All warps that expand codes, as one process: of as many blocks as the tile has, which need
    not be the tile's. Their codes concern nobody else."""
    yield from read_tile(p.expand_warps)
    if tile == END:
        return
    for block in range(tile.blocks):
        for what in "kv":
            yield Arrive(f"of_warp.full_{what}", copies=1)
            yield Copy(f"of_warp.full_{what}", f"codes.{what}")
        for what in "kv":
            yield Wait(f"of_warp.full_{what}")
            yield Read(f"codes.{what}")
        yield Advance("codes")
        if block == 0 and p.rotates_queries:
            for consumer in range(p.consumers):
                yield Wait(f"full_q.{consumer}")
                yield Write(f"q.{consumer}")
                yield Arrive(f"rotated_q.{consumer}", p.expand_warps // p.consumers)
            yield Advance("q")


def schedule_tiles(p: Protocol, own, tile) -> Iterator[NamedTuple]:
    """Finds tiles, too: it is the one that takes the inputs."""
    for consumer in range(p.consumers if p.takes_late else 0):
        yield Wait(f"empty_q.{consumer}", before=True)
    yield Wait("queue.empty", before=True)
    yield Write("tiles")
    yield Arrive("queue.full")
    yield Advance("queue")
    if tile == END or (p.filter_warps and tile.blocks == 0):
        return
    for consumer in range(p.consumers):
        yield from load(p, f"q.{consumer}")
    yield Advance("q")


def filter_values(number: int, p: Protocol, own, tile) -> Iterator[NamedTuple]:
    yield from read_tile()
    if tile == END or tile.blocks == 0:
        return
    for _ in range(tile.blocks):
        if p.elementwise:
            for consumer in range(number, p.consumers, p.filter_warps):
                yield Wait(f"rows.empty.{consumer}", before=True)
                yield Copy(f"rows.full.{consumer}", f"rows.{consumer}")
                yield Arrive(f"rows.full.{consumer}", 32, copies=1)
                yield Advance(f"rows.{consumer}")
        yield Wait("full_v")
        yield Write(f"v.{number}")
        yield Write(f"replaced.{number}")
        yield Arrive("filtered_v")
        yield Arrive("empty_v")
        yield Advance("v")
    yield Advance("number")


def consume(consumer: int, warps: int, p: Protocol, own, tile) -> Iterator[NamedTuple]:
    """Some warps of a consumer, as one process. What it does about a tile begins with the end of
    the tile before, whose last values it multiplies beside the first scores of this one."""
    q = f"q.{consumer}"
    queries = f"rotated_{q}" if p.rotates_queries else f"full_{q}"

    def wait_turn() -> Iterator[NamedTuple]:
        if p.consumers > 1:
            yield Sync(f"turn.{consumer}", 32 * warps)

    def pass_turn() -> Iterator[NamedTuple]:
        if p.consumers > 1:
            yield Arrive(f"turn.{(consumer + 1) % p.consumers}", 32 * warps)

    def await_values() -> Iterator[NamedTuple]:
        yield Wait("filtered_v" if p.filter_warps else "full_v")

    def release_values() -> Iterator[NamedTuple]:
        yield Arrive("empty_v", warps)
        yield Advance("v")

    def release_queries() -> Iterator[NamedTuple]:
        yield Arrive(f"empty_{q}", warps)
        yield Advance("q")

    def read(*what: str) -> Iterator[NamedTuple]:
        for memory in what:
            yield from (map(Read, value_parts(p)) if memory == "v" else [Read(memory)])

    def skip_keys() -> Iterator[NamedTuple]:
        if own.skips:
            yield Wait("full_k")
            yield Arrive("empty_k", warps)
            yield Advance("k")
            yield from wait_turn()
            yield from pass_turn()

    def skip_values() -> Iterator[NamedTuple]:
        if own.skips:
            yield from await_values()
            yield from release_values()
            own.skips = False

    def was_filtered() -> Iterator[NamedTuple]:
        if p.filter_warps:
            yield from (Read(f"replaced.{number}") for number in range(p.filter_warps))
            yield Advance("number")

    def receive_scores(last: bool) -> Iterator[NamedTuple]:
        yield from read(q, "k")  # until wgmma_wait_group
        yield Arrive("empty_k", warps)
        yield Advance("k")
        if not p.releases_late and last:
            yield from release_queries()
        if p.elementwise:
            yield Wait(f"rows.full.{consumer}")
            yield Read(f"rows.{consumer}")
            yield Arrive(f"rows.empty.{consumer}", warps)
            yield Advance(f"rows.{consumer}")

    def first_scores(last: bool) -> Iterator[NamedTuple]:
        yield from skip_keys()
        yield from skip_values()
        yield Wait(queries)
        yield Wait("full_k")
        if p.first_turn:
            yield from wait_turn()
        yield from read(q, "k")
        if p.first_turn:
            yield from pass_turn()
        yield from receive_scores(last)

    def step(fresh: bool, last: bool) -> Iterator[NamedTuple]:
        yield Wait("full_k")
        yield from await_values()
        yield from wait_turn()
        yield from read(q, "k", "v")
        if not p.keeps_turn:
            yield from pass_turn()
        # wgmma_wait_group<1>
        if p.keeps_turn:
            yield from pass_turn()
        yield from receive_scores(last)
        yield from read("v")  # until wgmma_wait_group<0>
        if fresh:
            yield from was_filtered()
        yield from release_values()
        if fresh:
            yield from skip_values()

    if not own.started:
        own.started = True
        if consumer == p.consumers - 1:
            yield from pass_turn()
    yield from read_tile(warps)
    if tile == END:
        if own.computing:
            yield from skip_keys()
            yield from await_values()
            yield from read("v")
            yield from was_filtered()
            yield from release_values()
        return
    if p.filter_warps and tile.blocks == 0:
        return
    skips_first = tile.skip[consumer] and consumer < p.consumers - 1
    skips_last = tile.skip[consumer] and consumer == p.consumers - 1
    own.skips = own.skips or skips_first
    blocks = tile.blocks - skips_first - skips_last
    if own.computing:
        yield from skip_keys()
        yield Wait(queries)
        yield from step(fresh=True, last=blocks == 1)
    else:
        yield from first_scores(last=blocks == 1)
        own.computing = True
    for block in range(1, blocks):
        yield from step(fresh=False, last=block == blocks - 1)
    if p.releases_late:
        yield from release_queries()
    own.skips = skips_last


# --------------------------------------------------------------------------------------- pipeline


def pipeline(p: Protocol, loader=load_keys_and_values, warps: int = WARPS) -> Pipeline:
    """The model of a protocol.

    Parameters
    ----------
    loader
        The role of the warp that loads keys and values.
    warps
        How many warps of a consumer one process stands for: all run the same operations.
    """
    count = dict(p.arrivals)
    consumers, filter_warps = range(p.consumers), range(p.filter_warps)
    rings = {
        "queue": p.queue,
        "k": p.stages,
        "v": p.stages,
        "q": p.q_stages,
        "number": 2,
        "turn": 1,
    }
    barriers = {f"{end}_{what}": (what, count[f"{end}_{what}"])
                for end in ("full", "empty") for what in "kv"}  # fmt: skip
    barriers |= {f"queue.{end}": ("queue", count[f"queue.{end}"]) for end in ("full", "empty")}
    memory = {"tiles": "queue", "k": "k"} | dict.fromkeys(value_parts(p), "v")
    for consumer in consumers:
        for end in ("full", "empty"):
            barriers[f"{end}_q.{consumer}"] = "q", count[f"{end}_q"]
        barriers[f"turn.{consumer}"] = "turn", p.turn_threads
        memory[f"q.{consumer}"] = "q"
    if p.filter_warps:
        barriers["filtered_v"] = "v", count["filtered_v"]
        memory |= {f"replaced.{number}": "number" for number in filter_warps}
    if p.shares_codes:
        rings["codes"] = 1
        memory |= {f"codes.{what}": "codes" for what in "kv"}
        for what in "kv":
            barriers[f"of_warp.full_{what}"] = "codes", count[f"of_warp.full_{what}"]
        for consumer in consumers if p.rotates_queries else ():
            barriers[f"rotated_q.{consumer}"] = "q", count["rotated_q"]
    elif p.expand_warps:
        rings["codes"] = p.code_stages
        memory["codes"] = "codes"
        barriers |= {f"{end}_codes": ("codes", count[f"{end}_codes"]) for end in ("full", "empty")}
    if p.elementwise:
        for consumer in consumers:
            rings[f"rows.{consumer}"] = 1
            memory[f"rows.{consumer}"] = f"rows.{consumer}"
            for end in ("full", "empty"):
                barriers[f"rows.{end}.{consumer}"] = f"rows.{consumer}", count[f"rows.{end}"]

    def role(function, *number: int | str) -> Role:
        return functools.partial(function, *number, p)

    processes = {"finder": role(schedule_tiles)}
    if p.shares_codes:
        processes |= {"loader": role(load_numbers), "expander": role(expand_for_team)}
    elif p.expand_warps:
        processes |= {"loader": role(load_codes), "expander": role(expand)}
    elif p.value_warps:
        processes |= {f"loader of {what}": role(load_one_of_both, what) for what in "kv"}
    else:
        processes["loader"] = role(loader)
    processes |= {f"filter warp {number}": role(filter_values, number) for number in filter_warps}
    processes |= {
        f"consumer {consumer}" + f", warps from {warp}" * (warps < WARPS): role(
            consume, consumer, warps
        )
        for consumer in consumers
        for warp in range(0, WARPS, warps)
    }
    return Pipeline(
        rings,
        barriers,
        memory,
        processes,
        tuple(tiles(p)),
        again=frozenset(f"replaced.{number}" for number in filter_warps),
        keeps={"pending": False, "started": False, "computing": False, "skips": False},
    )
