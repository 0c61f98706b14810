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
    shares: bool  # each warpgroup has half of O's columns, not all of it for its own blocks
    turns: int  # places of a warpgroup's probabilities


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
            bool(constants["kSharesValues"]),
            constants["kTurns"],
        )
        for constants in source.constants_of_variants(KERNEL)
    }


class Loader:
    """A warp that loads. Where warpgroups wait for their own blocks only, and stages are not dealt
    out to them evenly, blocks become full in their order: a warpgroup waits for one by a parity,
    and has not waited for the one before in its stage, which was another's."""

    def __init__(self, warp: int, in_order: bool) -> None:
        self.warp, self.in_order = warp, in_order

    def __call__(self, own, split) -> Iterator[NamedTuple]:
        if split == END:
            return
        for _ in range(split.blocks):
            yield Wait(f"empty.{self.warp}", before=True)
            yield Write(f"keys.{self.warp}")
            yield Arrive("full", EACH * 32)  # by its lanes' copies, when they, and TMA's, are done
            if self.in_order:
                yield from (Advance("block", -1), Wait("full"), Advance("block"))
            yield Arrive("full", EACH * 32)
            yield Advance("block")


class Warp:
    """A warp of a warpgroup."""

    def __init__(self, warpgroups: int, number: int, warp: int, turns: int = 1) -> None:
        self.warpgroups, self.number, self.warp, self.turns = warpgroups, number, warp, turns
        self.first = number == warp == 0  # has the first threads, one for each row

    def __call__(self, own, split) -> Iterator[NamedTuple]:
        yield from self.all_meet()
        if self.first:
            yield Write("split")
        yield from self.all_meet()
        yield Read("split")
        if split == END:
            return
        yield Write(f"q.{self.number}.{self.warp}")
        if self.first:
            yield Write("visible")
        yield from self.all_meet()
        yield from self.blocks(split)
        yield from self.merge_sums()
        yield from self.put_values()
        yield Advance("split")

    def blocks(self, split: Split) -> Iterator[NamedTuple]:
        """What it does about the blocks of a split, at whose end it is then."""
        n = self.number
        yield Advance("block", n)
        own_blocks = len(range(n, split.blocks, self.warpgroups))
        for _ in range(own_blocks):
            yield from self.block(split.raises)
            yield Advance("block", self.warpgroups)
        yield Advance("block", split.blocks - n - own_blocks * self.warpgroups)

    def all_meet(self) -> Iterator[NamedTuple]:
        yield Sync("all", EACH * 32)

    def own_meet(self) -> Iterator[NamedTuple]:
        yield Sync(f"own.{self.number}", EACH * 32)

    def everybody(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self.warpgroups), range(WARPS))

    def block(self, raises: bool) -> Iterator[NamedTuple]:
        """Probabilities, and what says that a maximum moves, have two places each, which a
        warpgroup's blocks take in turn; or probabilities have one."""
        n, w = self.number, self.warp
        yield Wait("full")
        yield Read(f"keys.{w}")
        yield from (Read(f"q.{number}.{warp}") for number, warp in self.everybody())
        yield Read("visible")
        yield Write(f"keys.{w}")  # zeros, for values that are not the split's
        if self.turns == 1:
            yield from self.own_meet()
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
        yield Advance(f"raised.{n}")
        yield Advance(f"own.{n}")

    def merge_sums(self) -> Iterator[NamedTuple]:
        yield Write(f"sums.{self.number}.{self.warp}")
        yield from self.all_meet()
        if self.first:
            yield from (Read(f"sums.{number}.{warp}") for number, warp in self.everybody())
            yield Write("factors")
        yield from self.all_meet()
        yield Read("factors")

    def put_values(self) -> Iterator[NamedTuple]:
        """O is sent to the first warpgroup in the queries' place."""
        n, w = self.number, self.warp
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


class Sharing(Warp):
    """A warp of two warpgroups that share O's columns: each uses the other's probabilities, too."""

    def __init__(self, number: int, warp: int) -> None:
        super().__init__(2, number, warp)

    def blocks(self, split: Split) -> Iterator[NamedTuple]:
        yield Read("visible")
        for block in range(self.number, split.blocks + 2, 2):  # its next one
            yield from self.round(block, split)
        yield Advance("block", split.blocks)

    def put_values(self) -> Iterator[NamedTuple]:
        yield from (Read("split"), Read("factors"))

    def round(self, block: int, split: Split) -> Iterator[NamedTuple]:
        """The values of its last block, the scores of its next one, and the other's values."""
        n = self.number
        has_next, has_last = block < split.blocks, block >= 2
        if has_next:
            yield from self.at(block, iter([Wait("full")]))
        if has_last:
            yield from self.at(block - 2, self.values())
        if has_next:
            yield from self.at(block, self.scores())
        if 0 <= block - 1 < split.blocks:
            yield Wait(f"full_p.{1 - n}")
            yield from (Read(f"raised.{1 - n}.{warp}") for warp in range(WARPS))
        if has_last:
            yield from self.probabilities(n)
        if 0 <= block - 1 < split.blocks:
            if split.raises:
                yield from self.follow(1 - n)
                yield from self.all_meet()
            yield from self.at(block - 1, self.values())
            yield from self.probabilities(1 - n)
        if has_next:
            yield from self.at(block, self.soften(split.raises))

    def at(self, block: int, operations: Iterator[NamedTuple]) -> Iterator[NamedTuple]:
        """What is done about a block of the split."""
        yield Advance("block", block)
        yield from operations
        yield Advance("block", -block)

    def scores(self) -> Iterator[NamedTuple]:
        yield Read(f"keys.{self.warp}")
        yield from (Read(f"q.{number}.{warp}") for number, warp in self.everybody())

    def values(self) -> Iterator[NamedTuple]:
        """Codes to registers. The other's block is full: who has given its probabilities knows."""
        for half in range(WARPS):
            yield Read(f"keys.{half}")
            yield Arrive(f"empty.{half}", EACH)

    def probabilities(self, owner: int) -> Iterator[NamedTuple]:
        """Those of one block have been multiplied."""
        yield from (Read(f"p.{owner}.{warp}") for warp in range(WARPS))
        yield Advance(f"p.{owner}")

    def soften(self, raises: bool) -> Iterator[NamedTuple]:
        n, w = self.number, self.warp
        yield from (Read("visible"), Write(f"keys.{w}"))  # zeros, as above
        yield from self.own_meet()
        yield from (Write(f"p.{n}.{w}"), Write(f"raised.{n}.{w}"))
        yield Arrive(f"full_p.{n}", EACH)
        yield from self.own_meet()
        yield from (Read(f"raised.{n}.{warp}") for warp in range(WARPS))
        if raises:
            yield Write(f"largest.{n}.{w}")
            yield from self.follow(n)
            yield Write(f"p.{n}.{w}")
            yield from self.all_meet()

    def follow(self, owner: int) -> Iterator[NamedTuple]:
        yield from self.all_meet()
        if self.first:
            yield from (Read(f"largest.{owner}.{warp}") for warp in range(WARPS))
            yield Write("maxima")
        yield from self.all_meet()
        yield Read("maxima")
        yield Advance("maxima")


def pipeline(p: Protocol) -> Pipeline:
    """The model of a protocol."""
    arrivals = dict(p.arrivals)
    rings = {"block": p.stages, "split": 1, "once": 1, "sent": SENT, "maxima": 1}
    barriers = {"full": ("block", arrivals["full"]), "all": ("once", p.computing)}
    memory = dict.fromkeys(("split", "visible", "factors"), "split")
    processes: dict[str, Role] = {}
    for warp in range(WARPS):
        memory[f"keys.{warp}"] = "block"
        barriers[f"empty.{warp}"] = "block", arrivals["empty"]
        in_order = not p.shares and p.stages % p.warpgroups != 0
        processes[f"loader {warp}"] = Loader(warp, in_order)
    for n in range(p.warpgroups):
        rings |= {f"own.{n}": 1, f"p.{n}": p.turns, f"raised.{n}": 2}
        barriers[f"own.{n}"] = "once", 128
        memory[f"maxima.{n}"] = f"own.{n}"
        if p.shares:
            barriers[f"full_p.{n}"] = f"p.{n}", arrivals["full_p"]
            memory["maxima"] = "maxima"
        for warp in range(WARPS):
            memory[f"p.{n}.{warp}"] = f"p.{n}"
            memory[f"raised.{n}.{warp}"] = f"p.{n}" if p.shares else f"raised.{n}"
            memory |= {f"{name}.{n}.{warp}": "split" for name in ("q", "sums")}
            memory[f"largest.{n}.{warp}"] = "maxima" if p.shares else f"own.{n}"
            memory[f"sent.{n}.{warp}"] = "sent"
            process = Sharing(n, warp) if p.shares else Warp(p.warpgroups, n, warp, p.turns)
            processes[f"warpgroup {n} warp {warp}"] = process
    inputs = tuple(itertools.starmap(Split, itertools.product(range(6), (False, True))))
    return Pipeline(rings, barriers, memory, processes, inputs)
