"""The pipeline of mla/decode_codes_sm90.cu: warps that load tiles of all splits to one ring, and
three groups that compute, each every third tile, and add up what they have.

An input is a split: how many tiles it has, and whether they move maxima. Two warps stand for four,
of those that load and of each group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.pipelines import source
from tests.pipelines.explorer import END, Advance, Arrive, Pipeline, Read, Role, Sync, Wait, Write

KERNEL = "mla/decode_codes_sm90.cu"
WARPS = 2  # of those that load, and of a group, that are modelled; each stands for so many
EACH = 2


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of the source decides who waits for whom."""

    stages: int
    groups: int
    arrivals: tuple[tuple[str, int], ...]
    computing: int  # threads that meet where all groups do
    group: int  # … and where one does


class Split(NamedTuple):
    tiles: int
    raises: bool


def protocols() -> set[Protocol]:
    """Every protocol that some variant has."""
    text = source.text(KERNEL)
    return {
        Protocol(
            constants["kStages"],
            constants["kGroups"],
            tuple(sorted(source.arrivals(text, constants).items())),
            constants["kComputing"],
            constants["kGroupThreads"],
        )
        for constants in source.constants_of_variants(KERNEL)
    }


class Loader:
    """A warp that loads. Tiles become full in their order: a group waits for one by a parity, and
    has not waited for the one before in its stage, which was another group's."""

    def __init__(self, warp: int) -> None:
        self.warp = warp

    def __call__(self, own, split) -> Iterator[NamedTuple]:
        if split == END:
            return
        for _ in range(split.tiles):
            yield Wait("empty", before=True)
            yield Write(f"keys.{self.warp}")
            yield Arrive("full", EACH * 32)  # by its lanes' copies, when they are done
            yield from (Advance("tile", -1), Wait("full"), Advance("tile"))
            yield Arrive("full", EACH)
            yield Advance("tile")


class Warp:
    """A warp of a group. Probabilities and O share memory."""

    def __init__(self, groups: int, group: int, warp: int) -> None:
        self.groups, self.group, self.warp = groups, group, warp
        self.first = group == warp == 0  # has the first thread

    def __call__(self, own, split) -> Iterator[NamedTuple]:
        g, w, first = self.group, self.warp, self.first
        if first and not own.started:
            yield Write("tiles")
        own.started = True
        yield from self.all_meet()
        if first:
            yield Write("split")
        yield from self.all_meet()
        yield Read("split")
        if split == END:
            return
        yield Write(f"q.{g}.{w}")
        if first:
            yield Write("common")
        yield from self.all_meet()
        yield Read("tiles")
        yield Advance("tile", g)
        own_tiles = len(range(g, split.tiles, self.groups))
        for _ in range(own_tiles):
            yield from self.tile(split.raises)
            yield Advance("tile", self.groups)
        yield Advance("tile", split.tiles - g - own_tiles * self.groups)
        yield from self.all_meet()
        yield from self.merge(split)
        yield Advance("split")
        if first:
            yield Write("tiles")

    def all_meet(self) -> Iterator[NamedTuple]:
        yield Sync("groups", EACH * 32)

    def group_meets(self) -> Iterator[NamedTuple]:
        yield Sync(f"group.{self.group}", EACH * 32)

    def tile(self, raises: bool) -> Iterator[NamedTuple]:
        g, w = self.group, self.warp
        yield Wait("full")
        yield from (Read(f"q.{group}.{warp}") for group, warp in self.everybody())
        yield from (Read("common"), Read("split"))
        yield from self.keys()
        yield from self.group_meets()
        yield Advance(f"group.{g}")
        yield Write(f"raised.{g}.{w}")  # one flag, to which all that write write the same
        yield Write(f"shared.{g}.{w}")
        yield from self.group_meets()
        yield from (Read(f"raised.{g}.{warp}") for warp in range(WARPS))
        if raises:
            yield Write(f"max.{g}.{w}")
            yield from self.group_meets()
            yield from (Read(f"max.{g}.{warp}") for warp in range(WARPS))
            yield Write(f"shared.{g}.{w}")
            yield from self.group_meets()
        yield from (Read(f"shared.{g}.{warp}") for warp in range(WARPS))
        yield from self.keys()
        yield Arrive("empty", EACH)

    def keys(self) -> Iterator[NamedTuple]:
        yield from (Read(f"keys.{warp}") for warp in range(WARPS))

    def everybody(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self.groups), range(WARPS))

    def merge(self, split: Split) -> Iterator[NamedTuple]:
        """O, of which a warp has the same columns in every group, takes the probabilities' place:
        another use of that memory."""
        for group in range(self.groups):
            tiles = len(range(group, split.tiles, self.groups))
            yield Advance(f"group.{group}", 1 + (tiles if group != self.group else 0))
        yield Write(f"sums.{self.group}.{self.warp}")
        yield from self.all_meet()
        for turn in range(self.groups):
            if turn == self.group:
                yield from (Read(f"sums.{group}.{warp}") for group, warp in self.everybody())
                for group in range(self.groups):
                    if turn > 0:
                        yield Read(f"shared.{group}.{self.warp}")
                    yield Write(f"shared.{group}.{self.warp}")
            yield from self.all_meet()
        for group, warp in self.everybody():
            yield from (Read(f"shared.{group}.{warp}"), Read(f"sums.{group}.{warp}"))
        yield Read("split")


def pipeline(p: Protocol) -> Pipeline:
    """The model of a protocol."""
    arrivals = dict(p.arrivals)
    rings = {"tile": p.stages, "split": 1, "once": 1}
    barriers = {
        "full": ("tile", arrivals["full"]),
        "empty": ("tile", arrivals["empty"]),
        "groups": ("once", p.computing),
    }
    memory = {"split": "split", "common": "split", "tiles": "split"}
    processes: dict[str, Role] = {}
    for warp in range(WARPS):
        memory[f"keys.{warp}"] = "tile"
        processes[f"loader {warp}"] = Loader(warp)
    for group in range(p.groups):
        rings[f"group.{group}"] = 1
        barriers[f"group.{group}"] = "once", p.group
        for warp in range(WARPS):
            for name in ("raised", "shared", "max"):
                memory[f"{name}.{group}.{warp}"] = f"group.{group}"
            memory |= {f"{name}.{group}.{warp}": "split" for name in ("q", "sums")}
            processes[f"group {group} warp {warp}"] = Warp(p.groups, group, warp)
    inputs = tuple(itertools.starmap(Split, itertools.product(range(6), (False, True))))
    return Pipeline(rings, barriers, memory, processes, inputs, keeps={"started": False})
