"""The pipeline of mla/decode_few_sm90.cu: two warpgroups, each of which asks for its own blocks of
keys, and adds its O to the other's; and thread blocks of a tile, which merge through global memory.

An input is a launch. Of `pipeline`, which is one thread block up to its copy of O: how many blocks
of keys each warpgroup has. A warp's products read its own rows of keys as keys, all of them as
values; zeros are written to keys of every block, though the kernel does that at ends only. Of
`merging`: how many thread blocks have keys, and which of them have not seen the last one begin,
which it does then when these have ended. Another launch with the same id must find no packets.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.pipelines import source
from tests.pipelines.explorer import END, Advance, Arrive, Copy, Pipeline, Read, Sync, Wait, Write

KERNEL = "mla/decode_few_sm90.cu"
WARPS = 4  # of a warpgroup
MOST_KEYS = 4  # blocks of keys that a warpgroup has
#: Groups of panels, each with an mbarrier, of the halves that become free together, in the order of
#: a warpgroup, which begins with its own columns. What is rotated is in the last one.
HALVES = ((0, 1), (2, 3))
GROUPS = range(4)

BLOCKS = 4  # of a tile: thread blocks that `merging` has
MERGING_WARPS = 2  # of each that are modelled
TASKS = 3

#: Meetings at a barrier, by what is done by then: a kind each, so that tests can leave out one.
PLACES = (
    *("queries", "maxima", "probabilities", "first half", "second half", "sums", "factors", "o"),
    *("part", "packets", "shares", "read"),
)
MEET = {place: type(place, (Sync,), {}) for place in PLACES}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of the source decides who waits for whom."""

    full: int  # arrivals
    own: int  # threads that meet where a warpgroup does
    all: int


def protocols() -> set[Protocol]:
    """Every protocol that some variant has."""
    text = source.text(KERNEL)
    (own,) = re.findall(r"bar_sync\(1 \+ number, (\w+)\)", text)
    return {
        Protocol(source.arrivals(text, constants)["full"], int(own), constants["kThreads"])
        for constants in source.constants_of_variants(KERNEL)
    }


class Warp:
    """A warp of a warpgroup; the first one asks for keys, the others for queries."""

    def __init__(self, number: int, warp: int) -> None:
        self.number, self.warp = number, warp

    def __call__(self, own, counts) -> Iterator[NamedTuple]:
        if counts == END:
            return
        n, w = self.number, self.warp
        if w == 0 and counts[n]:
            yield from (*self.load(0), *self.load(1))
        if w > 0:
            yield from (Write(f"q.{n}.{piece}") for piece in range(w - 1, WARPS, WARPS - 1))
        if n == w == 0:  # has the first threads, one for each row
            yield Write("visible")
        yield MEET["queries"]("all", 32)
        for left in reversed(range(counts[n])):
            yield from self.block(more=left > 0)
        yield from self.put(counts)

    def load(self, half: int) -> Iterator[NamedTuple]:
        """Asks for the keys of the block whose turn it is in that half."""
        for group in HALVES[half]:
            full = f"full.{self.number}.{group}"
            yield Arrive(full, copies=WARPS)
            yield from (Copy(full, f"keys.{self.number}.{group}.{warp}") for warp in range(WARPS))

    def block(self, *, more: bool) -> Iterator[NamedTuple]:
        n, w, own, ring = self.number, self.warp, f"own.{self.number}", f"block.{self.number}"
        for group in GROUPS:
            yield from (Wait(f"full.{n}.{group}"), Read(f"keys.{n}.{group}.{w}"))
        yield from (Read(f"q.{number}.{warp}") for number, warp in everybody())
        yield Read("visible")
        yield from (Write(f"keys.{n}.{group}.{w}") for group in GROUPS)  # zeros
        yield from (Write(f"max.{n}.{w}"), MEET["maxima"](own, 32))
        yield from (Read(f"max.{n}.{warp}") for warp in range(WARPS))
        yield from (Write(f"p.{n}.{w}"), MEET["probabilities"](own, 32))
        for half, place in enumerate(("first half", "second half")):
            yield from self.values(half)
            if more:
                yield MEET[place](own, 32)
                if w == 0:
                    yield from (Advance(ring), *self.load(half), Advance(ring, -1))
        yield Advance(ring)

    def values(self, half: int) -> Iterator[NamedTuple]:
        yield from (Read(f"p.{self.number}.{warp}") for warp in range(WARPS))
        for group, warp in itertools.product(HALVES[half], range(WARPS)):
            yield Read(f"keys.{self.number}.{group}.{warp}")

    def put(self, counts: tuple[int, int]) -> Iterator[NamedTuple]:
        """O for the other warpgroup is sent in the place of the left half of the panels."""
        n, w = self.number, self.warp
        yield Advance(f"block.{1 - n}", counts[1 - n])  # to where the other is
        yield from (Write(f"sum.{n}.{w}"), Write(f"max.{n}.{w}"), MEET["sums"]("all", 32))
        if n == w == 0:
            for number, warp in everybody():
                yield from (Read(f"sum.{number}.{warp}"), Read(f"max.{number}.{warp}"))
            yield Write("factors")
        yield from (Write(f"keys.{n}.{group}.{w}") for group in HALVES[n])
        yield MEET["factors"]("all", 32)
        yield Read("factors")
        yield from (Read(f"keys.{1 - n}.{group}.{w}") for group in HALVES[1 - n])
        yield from (Advance("q"), Write(f"q.{n}.{w}"), MEET["o"]("all", 32))
        yield from (Read(f"q.{number}.{warp}") for number, warp in everybody())
        yield Read("factors")  # or what else the first threads have written for each row


def everybody() -> Iterator[tuple[int, int]]:
    return itertools.product(range(2), range(WARPS))


def pipeline(p: Protocol) -> Pipeline:
    """The model of a protocol."""
    rings = {"once": 1, "q": 1, "block.0": 1, "block.1": 1}
    barriers = {"all": ("once", p.all), "own.0": ("once", p.own), "own.1": ("once", p.own)}
    memory = {"visible": "once", "factors": "once"}
    for n in range(2):
        barriers |= {f"full.{n}.{group}": (f"block.{n}", p.full) for group in GROUPS}
    for n, w in everybody():
        memory |= {f"q.{n}.{w}": "q", f"sum.{n}.{w}": "once"}
        memory |= {f"{name}.{n}.{w}": f"block.{n}" for name in ("max", "p")}
        memory |= {f"keys.{n}.{group}.{w}": f"block.{n}" for group in GROUPS}
    processes = {f"warpgroup {n} warp {w}": Warp(n, w) for n, w in everybody()}
    inputs = [(a, b) for a in range(MOST_KEYS + 1) for b in (a, a - 1) if b >= 0]
    return Pipeline(rings, barriers, memory, processes, tuple(inputs))


class MergingWarp:
    """A warp of a thread block of a tile."""

    def __init__(self, block: int, warp: int, heeds: bool) -> None:
        self.block, self.warp, self.heeds = block, warp, heeds

    def __call__(self, own, launch) -> Iterator[NamedTuple]:
        if launch == END:
            return
        blocks, left = launch
        if self.block < blocks:
            yield from self.merge(blocks, left)
        yield Sync("launch")
        if self.block == self.warp == 0:
            yield from (Advance("cleared"), Read("begun"))
            for task, sender in itertools.product(range(TASKS), range(blocks)):
                yield Read(f"packet.{task}.{sender}")

    def merge(self, blocks: int, left: tuple[int, ...]) -> Iterator[NamedTuple]:
        block, warp, last = self.block, self.warp, blocks - 1
        if block == last:
            yield from (Wait(f"ended.{other}") for other in left)
        if block == last and warp == 0:
            yield from (Write("begun"), Arrive("begun"))
        elif block not in left and warp == 0:
            yield from (Wait("begun"), Read("begun"))
        yield from (Write(f"part.{block}.{warp}"), MEET["part"](f"all.{block}"))
        for task in range(warp, TASKS, MERGING_WARPS):
            yield from (Write(f"packet.{task}.{block}"), Arrive(f"packet.{task}.{block}"))
        others = left if block == last else ()
        for owner in (block, *others) if block not in left or not self.heeds else ():
            yield from self.tasks_of(owner, blocks)
            if others:
                yield MEET["read"](f"all.{block}")
                yield from (Read(f"left.{block}.{w}") for w in range(MERGING_WARPS))
        if block in left:
            yield Arrive(f"ended.{block}")
        if block == last and warp == 0:
            yield from self.clear("begun")

    def tasks_of(self, owner: int, blocks: int) -> Iterator[NamedTuple]:
        block, warp, warps = self.block, self.warp, range(MERGING_WARPS)
        tasks = range(blocks - 1 - owner, TASKS, blocks)
        if not tasks:
            return
        packets = [f"packet.{task}.{sender}" for task in tasks for sender in range(blocks)]
        for packet in packets[warp::MERGING_WARPS]:
            yield from (Wait(packet), Read(packet))
        yield Write(f"max_sum.{block}.{warp}")
        if owner == blocks - 1:
            yield Write(f"left.{block}.{warp}")
        yield MEET["packets"](f"all.{block}")
        yield from (Read(f"max_sum.{block}.{w}") for w in warps)
        yield from (Read(f"part.{s}.{w}") for s, w in itertools.product(range(blocks), warps))
        if len(tasks) == 1:  # of which every thread has a share, and the first ones add them up
            yield from (Write(f"shares.{block}.{warp}"), MEET["shares"](f"all.{block}"))
            yield from (Read(f"shares.{block}.{w}") for w in warps if warp == 0)
        for packet in packets[warp::MERGING_WARPS]:
            yield from self.clear(packet)
        yield Advance(f"merged.{block}")

    def clear(self, what: str) -> Iterator[NamedTuple]:
        yield from (Advance("cleared"), Write(what), Advance("cleared", -1))


def merging(heeds: bool = True) -> Pipeline:
    """What thread blocks leave for each other; if not `heeds`, they merge their own tasks though
    the last one may not have begun."""
    warps = list(itertools.product(range(BLOCKS), range(MERGING_WARPS)))
    packets = [f"packet.{t}.{b}" for t, b in itertools.product(range(TASKS), range(BLOCKS))]
    rings = {"once": 1, "cleared": 1} | {f"merged.{block}": 1 for block in range(BLOCKS)}
    barriers = {"launch": ("once", len(warps))} | dict.fromkeys(("begun", *packets), ("once", 1))
    memory = dict.fromkeys(("begun", *packets), "cleared")
    barriers |= {f"all.{block}": ("once", MERGING_WARPS) for block in range(BLOCKS)}
    barriers |= {f"ended.{block}": ("once", MERGING_WARPS) for block in range(BLOCKS - 1)}
    for block, warp in warps:
        memory |= {f"{name}.{block}.{warp}": "once" for name in ("part", "left")}
        memory |= {f"{name}.{block}.{warp}": f"merged.{block}" for name in ("max_sum", "shares")}
    processes = {f"block {block} warp {w}": MergingWarp(block, w, heeds) for block, w in warps}
    inputs = [
        (blocks, left) for blocks in range(2, BLOCKS + 1) for size in range(blocks)
        for left in itertools.combinations(range(blocks - 1), size)
    ]  # fmt: skip
    return Pipeline(rings, barriers, memory, processes, tuple(inputs))
