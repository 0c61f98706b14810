"""The pipeline of mla/decode_codes_sm90.cu: warps that load blocks of all splits to one ring, and
two or three warpgroups that compute, each every second or third block, and add up what they have.

An input is a split: how many blocks it has, and whether they move maxima. Two warps stand for four,
of those that load and of each warpgroup. Each of those that load has half of the keys of a block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.pipelines import source
from tests.pipelines.explorer import END, Advance, Arrive, Pipeline, Read, Role, Sync, Wait, Write

KERNEL = "mla/decode_codes_sm90.cu"
WARPS = 2  # of those that load, and of a warpgroup, that are modelled; each stands for so many
EACH = 2
SENT = 2  # places for O that warpgroups send to the first, one after the other
PRODUCTS = 3  # that are sent so; there are eight


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of the source decides who waits for whom."""

    stages: int
    warpgroups: int
    arrivals: tuple[tuple[str, int], ...]
    computing: int  # threads that meet where all warpgroups do


class Split(NamedTuple):
    blocks: int
    raises: bool


def protocols() -> set[Protocol]:
    """Every protocol that some variant has."""
    text = source.text(KERNEL)
    return {
        Protocol(
            constants["kStages"],
            constants["kWarpgroups"],
            tuple(sorted(source.arrivals(text, constants).items())),
            constants["kComputing"],
        )
        for constants in source.constants_of_variants(KERNEL)
    }


class Loader:
    """A warp that loads. Where stages are not dealt out to warpgroups evenly blocks become full in
    their order: a warpgroup waits for one by a parity, and has not waited for the one before in its
    stage, which was another's."""

    def __init__(self, warp: int, in_order: bool) -> None:
        self.warp, self.in_order = warp, in_order

    def __call__(self, own, split) -> Iterator[NamedTuple]:
        if split == END:
            return
        for _ in range(split.blocks):
            yield Wait(f"empty.{self.warp}", before=True)
            yield Write(f"keys.{self.warp}")
            yield Arrive("full", EACH * 32)  # by its lanes' copies, when they are done
            if self.in_order:
                yield from (Advance("block", -1), Wait("full"), Advance("block"))
            yield Arrive("full", EACH * 32)
            yield Advance("block")


class Warp:
    """A warp of a warpgroup."""

    def __init__(self, warpgroups: int, number: int, warp: int) -> None:
        self.warpgroups, self.number, self.warp = warpgroups, number, warp
        self.first = number == warp == 0  # has the first threads, one for each row

    def __call__(self, own, split) -> Iterator[NamedTuple]:
        n, w, first = self.number, self.warp, self.first
        yield from self.all_meet()
        if first:
            yield Write("split")
        yield from self.all_meet()
        yield Read("split")
        if split == END:
            return
        yield Write(f"q.{n}.{w}")
        if first:
            yield Write("visible")
        yield from self.all_meet()
        yield Advance("block", n)
        own_blocks = len(range(n, split.blocks, self.warpgroups))
        for _ in range(own_blocks):
            yield from self.block(split.raises)
            yield Advance("block", self.warpgroups)
        yield Advance("block", split.blocks - n - own_blocks * self.warpgroups)
        yield from self.merge()
        yield Advance("split")

    def all_meet(self) -> Iterator[NamedTuple]:
        yield Sync("all", EACH * 32)

    def own_meet(self) -> Iterator[NamedTuple]:
        yield Sync(f"own.{self.number}", EACH * 32)

    def everybody(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self.warpgroups), range(WARPS))

    def block(self, raises: bool) -> Iterator[NamedTuple]:
        """Probabilities, and what says that a maximum moves, have two places each, which a
        warpgroup's blocks take in turn."""
        n, w = self.number, self.warp
        yield Wait("full")
        yield Read(f"keys.{w}")
        yield from (Read(f"q.{number}.{warp}") for number, warp in self.everybody())
        yield Read("visible")
        yield Write(f"p.{n}.{w}")
        yield Write(f"raised.{n}.{w}")  # one flag, to which all that write write the same
        yield from self.own_meet()
        yield from (Read(f"raised.{n}.{warp}") for warp in range(WARPS))
        if raises:
            yield Write(f"largest.{n}.{w}")
            yield from self.own_meet()
            if w == 0:  # a thread for each row
                yield from (Read(f"largest.{n}.{warp}") for warp in range(WARPS))
                yield Write(f"maxima.{n}")
            yield from self.own_meet()
            yield Read(f"maxima.{n}")
            yield Write(f"p.{n}.{w}")
            yield from self.own_meet()
        yield from (Read(f"p.{n}.{warp}") for warp in range(WARPS))
        for half in range(WARPS):
            yield Read(f"keys.{half}")
            yield Arrive(f"empty.{half}", EACH)
        yield Advance(f"p.{n}")
        yield Advance(f"own.{n}")

    def merge(self) -> Iterator[NamedTuple]:
        """O is sent to the first warpgroup in the queries' place."""
        n, w = self.number, self.warp
        yield Write(f"sums.{n}.{w}")
        yield from self.all_meet()
        if self.first:
            yield from (Read(f"sums.{number}.{warp}") for number, warp in self.everybody())
            yield Write("factors")
        yield from self.all_meet()
        yield Read("factors")
        for _ in range(PRODUCTS):
            if n > 0:
                yield Write(f"sent.{n}.{w}")
            yield from self.all_meet()
            if n == 0:
                yield from (Read(f"sent.{number}.{w}") for number in range(1, self.warpgroups))
            yield Advance("sent")
        if n == 0:
            yield Read("split")
            yield Read("factors")


def pipeline(p: Protocol) -> Pipeline:
    """The model of a protocol."""
    arrivals = dict(p.arrivals)
    rings = {"block": p.stages, "split": 1, "once": 1, "sent": SENT}
    barriers = {"full": ("block", arrivals["full"]), "all": ("once", p.computing)}
    memory = dict.fromkeys(("split", "visible", "factors"), "split")
    processes: dict[str, Role] = {}
    for warp in range(WARPS):
        memory[f"keys.{warp}"] = "block"
        barriers[f"empty.{warp}"] = "block", arrivals["empty"]
        processes[f"loader {warp}"] = Loader(warp, p.stages % p.warpgroups != 0)
    for n in range(p.warpgroups):
        rings |= {f"own.{n}": 1, f"p.{n}": 2}
        barriers[f"own.{n}"] = "once", 128
        memory[f"maxima.{n}"] = f"own.{n}"
        for warp in range(WARPS):
            memory |= {f"{name}.{n}.{warp}": f"p.{n}" for name in ("p", "raised")}
            memory |= {f"{name}.{n}.{warp}": "split" for name in ("q", "sums")}
            memory |= {f"largest.{n}.{warp}": f"own.{n}", f"sent.{n}.{warp}": "sent"}
            processes[f"warpgroup {n} warp {warp}"] = Warp(p.warpgroups, n, warp)
    inputs = tuple(itertools.starmap(Split, itertools.product(range(6), (False, True))))
    return Pipeline(rings, barriers, memory, processes, inputs)
