"""The pipeline of mla/decode_80_sm90.cu: warps that load keys, what is rotated of them, and
queries, and two warpgroups, each with the scores of every second block of keys and half of O.

An input is a split: what is done about each of its blocks of keys, whose numbers go on from one
split to the next. Two warps stand for a warpgroup's four: all of them do the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

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

KERNEL = "mla/decode_80_sm90.cu"
WARPS = 2  # of a warpgroup, that are modelled; each stands for so many
EACH = 2
EVERYBODY = tuple(itertools.product(range(2), range(WARPS)))  # warpgroups' warps
ROPE, QUERIES = 2, 3  # the warps that load these; the others have half of the columns each
MOST_KEYS = 5  # blocks of keys that a split has

#: Meetings at a barrier, by what is done by then: a kind each, so that tests can leave out one.
OWN_PLACES = ("scores", "maxima", "offsets", "zeros")
BOTH_PLACES = ("work", "rows", "sums", "factors", "o")
MEET = {place: type(place, (Sync,), {}) for place in (*OWN_PLACES, *BOTH_PLACES)}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of the source decides who waits for whom."""

    queue: int
    places: int
    panels: int  # of a block, in each half of the columns
    arrivals: tuple[tuple[str, int], ...]
    threads: tuple[tuple[str, int], ...]  # of each named barrier


class Block(NamedTuple):
    """Whether maxima are raised for a block of keys, and whether some keys are not the split's."""

    raises: bool
    clears: bool


def protocols() -> set[Protocol]:
    """Every protocol that some variant has."""
    text = source.text(KERNEL)
    (queue,) = set(re.findall(r"\b(?:full|empty)_work\[(\d+)\]", text))
    named = re.findall(r"bar_(?:sync|arrive|sync_or)\(k(\w+)(?: \+ [^,]+)?, (\w+)", text)
    found = set()
    for constants in source.constants_of_variants(KERNEL):
        threads = {(name.lower(), constants.value(count)) for name, count in named}
        assert len(threads) == len(dict(threads)), "those who arrive and who wait do not agree"
        protocol = Protocol(
            int(queue),
            constants["kPlaces"],
            constants["kHalfPanels"],
            tuple(sorted(source.arrivals(text, constants).items())),
            tuple(sorted(threads)),
        )
        found.add(protocol)
    return found


def pieces(name: str) -> Iterator[str]:
    """Of what a warpgroup's warps write a piece each."""
    return (f"{name}.{warp}" for warp in range(WARPS))


def pieces_of_both(name: str) -> Iterator[str]:
    return (f"{name}.{number}.{warp}" for number, warp in EVERYBODY)


def queries() -> Iterator[str]:
    """Those that TMA loads, by what takes their place; rows of zeros are not among them."""
    return itertools.chain(pieces_of_both("o"), pieces_of_both("sums"), pieces("factors"))


class Producer:
    """A warp that loads."""

    def __init__(self, warp: int, panels: int) -> None:
        self.warp, self.panels = warp, panels

    def __call__(self, own, blocks) -> Iterator[NamedTuple]:
        yield from (Wait("full_work"), Read("work"))
        if blocks == END:
            return
        if self.warp == QUERIES:
            yield from self.load("q", queries())
            yield from (Advance("q"), Advance("queries", 2))
        else:
            for number in range(own.number, own.number + len(blocks)):
                yield from self.load_block(number % 2)
        own.number = (own.number + len(blocks)) % 2
        yield from (Arrive("empty_work"), Advance("work"))

    def load_block(self, owner: int) -> Iterator[NamedTuple]:
        if self.warp == ROPE:
            yield from self.load(f"rope.{owner}", pieces(f"rotated.{owner}"))
            yield from (Advance(f"rope.{owner}"), Advance(f"rotated.{owner}", 2))
        else:
            for _ in range(self.panels):
                yield from self.load(f"k.{self.warp}", pieces(f"k.{self.warp}"))
                yield Advance(f"k.{self.warp}")

    def load(self, what: str, memory: Iterator[str]) -> Iterator[NamedTuple]:
        yield Wait(f"empty_{what}", before=True)
        copies = [Copy(f"full_{what}", name) for name in memory]
        yield from (Arrive(f"full_{what}", copies=len(copies)), *copies)


class Warp:
    """A warp of a warpgroup. The first one finds splits, each before it works on the one before; in
    the model the others, too, work on a split when there is another input. Products read memory
    from their issue to their wait: both are reads.

    Of rows, each warp of a warpgroup has a piece; the first one's have those of both warpgroups.
    """

    def __init__(self, number: int, warp: int, panels: int) -> None:
        self.number, self.warp, self.panels = number, warp, panels

    def __call__(self, own, blocks) -> Iterator[NamedTuple]:
        if self.number == self.warp == 0:
            yield Wait("empty_work", before=True)
            yield from (Write("work"), Arrive("full_work"))
        if own.blocks is not None:
            yield from (Advance("work", -1), *self.work(own.number, own.blocks), Advance("work"))
            own.number = (own.number + len(own.blocks)) % 2
        own.blocks = blocks
        yield from (self.both_meet("work"), Read("work"), Advance("work"))

    def work(self, first: int, blocks: tuple[Block, ...]) -> Iterator[NamedTuple]:
        yield from self.prepare_rows()
        yield Wait("full_q")
        yield self.both_meet("rows")
        for number, block in enumerate(blocks, first):
            yield from self.block(number % 2, block)
        yield from self.finish()

    def prepare_rows(self) -> Iterator[NamedTuple]:
        yield Advance("maxima")
        yield Write(f"zeros.{self.number}.{self.warp}")
        if self.number == 0:
            yield from (Write(f"{name}.{self.warp}") for name in ("visible", "row_max", "offset"))

    def block(self, owner: int, block: Block) -> Iterator[NamedTuple]:
        if owner == self.number:
            yield from self.multiply_keys()
            yield from self.soften(block)
        yield Wait(f"full_k.{self.number}")
        yield from self.read_values(0)
        yield Arrive(f"empty_k.{self.number}", EACH)
        if owner != self.number:
            yield from self.probabilities_are_there(owner, block)
        if block.raises:
            if owner != self.number:
                yield Advance("maxima")
            yield from map(Read, pieces(f"correction.{owner}"))
        yield from self.add_values(owner, block)
        yield from (Advance(f"k.{half}", self.panels) for half in range(2))
        yield from (Advance(f"rope.{owner}"), Advance(f"rotated.{owner}", 2))

    def multiply_keys(self) -> Iterator[NamedTuple]:
        n = self.number
        others = [*queries(), *pieces_of_both("zeros"), *pieces(f"rotated.{n}")]
        panels = list(itertools.product(range(self.panels), (n, 1 - n)))
        yield from (Wait(f"full_rope.{n}"), *map(Read, others))
        for panel, half in panels:
            keys = map(Read, pieces(f"k.{half}"))
            yield from self.at(half, panel, Wait(f"full_k.{half}"), *keys)
        yield from map(Read, others)
        for panel, half in panels:
            keys = map(Read, pieces(f"k.{half}"))
            yield from self.at(half, panel, *keys, Arrive(f"empty_k.{half}", EACH))

    def at(self, half: int, panel: int, *operations: NamedTuple) -> Iterator[NamedTuple]:
        """What is done about a panel of the block."""
        yield from (Advance(f"k.{half}", panel), *operations, Advance(f"k.{half}", -panel))

    def soften(self, block: Block) -> Iterator[NamedTuple]:
        """Probabilities are put again where maxima have been raised."""
        n = self.number
        yield from map(Read, (*pieces("visible"), *pieces("offset")))
        yield self.own_meet("scores")
        yield from self.put_probabilities()
        if block.raises:
            yield Sync(f"probabilities.{n}", EACH * 32)
            yield from self.raise_maxima()
            yield from map(Read, pieces("offset"))
            yield from self.put_probabilities()
        yield Sync(f"probabilities.{n}", EACH * 32)

    def probabilities_are_there(self, owner: int, block: Block) -> Iterator[NamedTuple]:
        """The barrier also tells whether maxima are raised, and probabilities put again."""
        for _ in range(1 + block.raises):
            yield Sync(f"probabilities.{owner}", EACH * 32)

    def put_probabilities(self) -> Iterator[NamedTuple]:
        """In the place of what is rotated: another use of that memory."""
        n = self.number
        yield from self.at_probabilities(n, Write(f"rotated.{n}.{self.warp}"))

    def at_probabilities(self, owner: int, *operations: NamedTuple) -> Iterator[NamedTuple]:
        yield from (Advance(f"rotated.{owner}"), *operations, Advance(f"rotated.{owner}", -1))

    def raise_maxima(self) -> Iterator[NamedTuple]:
        """Maxima, and what goes with them, are another use of their memory."""
        n, w = self.number, self.warp
        yield from (Read(f"row_max.{w}"), Read(f"offset.{w}"), Advance("maxima"))
        yield from (Write(f"warp_max.{w}"), self.own_meet("maxima"))
        yield from map(Read, pieces("warp_max"))
        yield from (Write(f"{name}.{w}") for name in (f"correction.{n}", "row_max", "offset"))
        yield self.own_meet("offsets")

    def read_values(self, *panels: int) -> Iterator[NamedTuple]:
        for panel in panels:
            yield from self.at(self.number, panel, *map(Read, pieces(f"k.{self.number}")))

    def add_values(self, owner: int, block: Block) -> Iterator[NamedTuple]:
        """Who has the scores adds up the probabilities, too."""
        n, panels = self.number, range(1, self.panels)
        if block.clears:
            for panel in panels:
                yield from self.at(n, panel, Write(f"k.{n}.{self.warp}"))
            yield self.own_meet("zeros")
        probabilities = list(map(Read, pieces(f"rotated.{owner}")))
        yield from self.at_probabilities(owner, *probabilities)
        yield from self.read_values(*panels)
        for panel in panels:
            yield from self.read_values(panel)
            yield from self.at(n, panel, Arrive(f"empty_k.{n}", EACH))
        yield from self.at_probabilities(owner, *probabilities)
        yield Arrive(f"empty_rope.{owner}", EACH)

    def finish(self) -> Iterator[NamedTuple]:
        """O and what there is for its rows, in the queries' place: another use of that memory."""
        n, w = self.number, self.warp
        yield from (Advance("queries"), Write(f"sums.{n}.{w}"), self.both_meet("sums"))
        if n == 0:
            yield from (*map(Read, pieces_of_both("sums")), Read(f"row_max.{w}"))
            yield Write(f"factors.{w}")
        yield self.both_meet("factors")
        yield from map(Read, pieces("factors"))
        yield from (Write(f"o.{n}.{w}"), Write(f"zeros.{n}.{w}"), self.both_meet("o"))
        yield from map(Read, (*pieces_of_both("o"), *pieces_of_both("zeros"), *pieces("factors")))
        yield from (Advance("queries"), Arrive("empty_q", EACH))
        yield from (Read("work"), Advance("q"))

    def own_meet(self, place: str) -> NamedTuple:
        return MEET[place](f"own.{self.number}", EACH * 32)

    def both_meet(self, place: str) -> NamedTuple:
        return MEET[place]("both", EACH * 32)


KINDS = tuple(itertools.starmap(Block, itertools.product((False, True), repeat=2)))
#: Splits of blocks that are all alike, and short ones of any.
ALIKE = ((), *((kind,) * n for n in range(1, MOST_KEYS + 1) for kind in (KINDS[0], KINDS[-1])))
SHORT = tuple(blocks for n in range(4) for blocks in itertools.product(KINDS, repeat=n))


def pipeline(p: Protocol, splits: tuple[tuple[Block, ...], ...] = ALIKE) -> Pipeline:
    """The model of a protocol."""
    arrivals, threads = dict(p.arrivals), dict(p.threads)
    rings = {"once": 1, "work": p.queue, "q": 1, "queries": 1, "maxima": 1}
    barriers = {"both": ("once", threads["both"])}
    memory = {"work": "work"} | dict.fromkeys(queries(), "queries")
    processes: dict[str, Role] = {}
    for n in range(2):
        rings |= {f"k.{n}": p.places, f"rope.{n}": 1, f"rotated.{n}": 1}
        barriers |= {f"{name}.{n}": ("once", threads[name]) for name in ("own", "probabilities")}
    for at, what in itertools.product(("full", "empty"), ("work", "q", "k", "rope")):
        count = arrivals[at if what == "k" else f"{at}_{what}"]  # as the source names them
        of = (what,) if what in ("work", "q") else (f"{what}.0", f"{what}.1")
        barriers |= {f"{at}_{ring}": (ring, count) for ring in of}
    for n, w in EVERYBODY:
        memory |= {f"{name}.{n}.{w}": f"{name}.{n}" for name in ("k", "rotated")}
        memory |= {f"zeros.{n}.{w}": "queries", f"visible.{w}": "q"}
        names = (f"correction.{n}", "row_max", "offset", "warp_max")
        memory |= {f"{name}.{w}": "maxima" for name in names}
        processes[f"warpgroup {n} warp {w}"] = Warp(n, w, p.panels)
    processes |= {f"producer {warp}": Producer(warp, p.panels) for warp in range(4)}
    return Pipeline(rings, barriers, memory, processes, splits, keeps={"number": 0, "blocks": None})
