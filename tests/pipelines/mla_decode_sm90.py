"""The pipeline of mla/decode_sm90.cu: a producing warp that finds splits and loads blocks of keys,
and two consumers that share probabilities and maxima.

An input is a split: how many blocks of keys it has; one of an odd number leaves a partial result.
Two warps stand for a consumer's four: all of them do the same.
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

KERNEL = "mla/decode_sm90.cu"
WARPS = 2  # of a consumer, that are modelled; each stands for so many
EACH = 2
#: The panels of both buffers, in the halves in which they become free: left and right values, and
#: what is rotated or, later, the probabilities.
PARTS = ("left", "right", "rotated")
FIRST = (("left",), ("left", "rotated"))
SIDE = ("left", "right")  # of O, that each consumer has
MOST_KEYS = 4  # blocks of keys that a split has


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of the source decides who waits for whom."""

    queue: int
    arrivals: tuple[tuple[str, int], ...]
    threads: tuple[int, ...]  # of each named barrier
    producers: int  # that share each block's keys; 0: four, each asks TMA for half of a buffer
    tells: int  # which of them tells the consumers of splits
    full: tuple[str, ...]  # parts with a barrier, which is that of those that follow too
    asks: bool  # a producing warp asks TMA for queries; else the consumers copy them


def protocols() -> set[Protocol]:
    """Every protocol that some variant has."""
    text = source.text(KERNEL)
    named = re.findall(r"bar_(?:sync|arrive)\(\w+(?: \+ \w+)?, (\w+)\)", text)
    found = set()
    for constants in source.constants_of_variants(KERNEL):
        arrivals = source.arrivals(text, constants)
        copied = {name: n for name, n in arrivals.items() if not name.endswith("_q")}
        protocol = Protocol(
            constants["kQueue"],
            tuple(sorted(copied.items())),
            tuple(sorted({constants.value(n) for n in named if n != "kReadyThreads"})),
            constants["kProducers"] if constants.config.gather else 0,
            constants["kTellingWarp"],
            PARTS[: 3 - constants.config.gather],
            asks=False,
        )
        asking = tuple(sorted(arrivals.items()))
        found |= {protocol, dataclasses.replace(protocol, arrivals=asking, asks=True)}
    return found


def second(buffer: int) -> tuple[str, ...]:
    """The parts of a buffer that become free after its first half."""
    return tuple(part for part in PARTS if part not in FIRST[buffer])


class Producer:
    """A producing warp: it has half of a buffer, or some keys of both buffers, which it copies half
    by half, of an odd block the right values first. One tells consumers of splits, the last one
    asks for queries: before it loads keys, or, where it has keys of both buffers, behind the first
    ones of all splits but the first."""

    def __init__(self, warp: int, producers: int, *, tells: bool, asks: bool) -> None:
        self.warp = warp
        self.tells = tells
        self.asks = asks
        #: Of a warp with its keys, where it has some: each lane's copies and it.
        self.arrivals = producers // WARPS * 33
        self.halves = (0, 1) if producers else (warp % 2,)
        self.buffers = (0, 1) if producers else (warp // 2,)

    def __call__(self, own, blocks) -> Iterator[NamedTuple]:
        if self.tells:
            yield Wait("empty_work", before=True)
            yield Write("work")
            yield Arrive("full_work")
            yield Advance("work")
        if blocks == END:
            return
        behind = len(self.buffers) == 2 and own.begun and blocks > 0
        own.begun = True
        if self.asks and not behind:
            yield from self.ask()
        for first in range(0, blocks, 2):
            for buffer in self.buffers:
                if first + buffer == blocks:
                    break
                for half in self.halves[:: -1 if buffer else 1]:
                    yield Wait(f"empty_{('first', 'second')[half]}.{buffer}", before=True)
                    for part in (FIRST[buffer], second(buffer))[half]:
                        yield from self.load(buffer, part)
                    if self.arrivals:
                        yield Arrive(f"full_{SIDE[half]}.{buffer}", self.arrivals)
                yield Advance(f"k.{buffer}")
                yield Advance(f"rotated.{buffer}", 2)
                if self.asks and behind and first + buffer == 0:
                    yield from self.ask()

    def ask(self) -> Iterator[NamedTuple]:
        """Asks TMA for the queries."""
        yield Wait("empty_q", before=True)
        yield Arrive("full_q", copies=2 * WARPS)
        for odd, warp in itertools.product(range(2), range(WARPS)):
            yield Copy("full_q", f"q.{odd}.{warp}")
        yield Advance("q")

    def load(self, buffer: int, part: str) -> Iterator[NamedTuple]:
        """By TMA all of a part; else this warp's rows."""
        if self.arrivals:
            yield Write(f"{part}.{buffer}.{self.warp}")
        else:
            full = f"full_{part}.{buffer}"
            yield Arrive(full, copies=WARPS)
            yield from (Copy(full, f"{part}.{buffer}.{warp}") for warp in range(WARPS))


class Warp:
    """A warp of a consumer. Products read memory from their issue to their wait: both are reads."""

    def __init__(
        self,
        odd: int,
        warp: int,
        *,
        full: tuple[str, ...] = PARTS,
        by_tma: bool = False,
    ) -> None:
        self.odd, self.warp = odd, warp
        self.by_tma = by_tma
        self.full = full

    def __call__(self, own, blocks) -> Iterator[NamedTuple]:
        odd, warp = self.odd, self.warp
        yield Wait("full_work")
        yield Read("work")
        if blocks == END:
            return
        for name in ("max",) if self.by_tma else ("q", "max"):
            yield Write(f"{name}.{odd}.{warp}")
        yield Advance("rounds")
        if self.by_tma:
            yield Wait("full_q")
        yield Sync("both", EACH * 32)
        rounds = self.odd_rounds if odd else self.even_rounds
        leave = [Arrive("empty_q", EACH)] if self.by_tma else []
        yield from after_queries(rounds((blocks + 1) // 2, blocks % 2 == 1), leave)
        yield Advance("q")
        yield Write(f"sum.{odd}.{warp}")
        yield Sync("both", EACH * 32)
        yield Read(f"sum.{1 - odd}.{warp}")
        if blocks % 2 == 1:
            yield from self.merge_parts()
        yield Advance("sums")
        yield Arrive("empty_work", EACH)
        yield Advance("work")

    def merge_parts(self) -> Iterator[NamedTuple]:
        """A partial result may be a tile's last one, which the first warp finds out."""
        yield Write(f"part.{self.odd}.{self.warp}")
        yield Sync("both", EACH * 32)
        if self.odd == self.warp == 0:
            yield from (Read(f"part.{odd}.{warp}") for odd in range(2) for warp in range(WARPS))
            yield Write("merges")
        yield Sync("both", EACH * 32)
        yield from (Read("merges"), Read("work"))

    def even_rounds(self, pairs: int, ends_even: bool = False) -> Iterator[NamedTuple]:
        """The scores of its next block are issued before the odd block's values are."""
        for pair in range(pairs + (not ends_even)):
            if pair < pairs:
                yield from self.issue_scores(0)
            if pair > 0:
                yield from self.other_block(1)
                yield Advance("rounds")
            if pair < pairs:
                yield from self.read_keys(0)
                yield from self.soften(0)
            if pair > 0:
                yield from self.values(1)
                yield from self.probabilities(1)
                yield Arrive("empty_first.1", EACH)
                yield Advance("k.1")
                yield Advance("rotated.1", 2)
            if pair < pairs:
                for _ in range(2):
                    yield from self.values(0)
                yield Arrive("empty_first.0", EACH)
                yield Advance("k.0")

    def odd_rounds(self, pairs: int, ends_even: bool = False) -> Iterator[NamedTuple]:
        for pair in range(pairs):
            yield from self.other_block(0)
            yield from self.values(0)
            yield from self.probabilities(0)
            yield Arrive("empty_second.0", EACH)
            yield Advance("k.0")
            yield Advance("rotated.0", 2)
            if ends_even and pair + 1 == pairs:
                break
            yield from self.issue_scores(1)
            yield from self.read_keys(1)
            yield from self.soften(1)
            yield Advance("rounds")
            for _ in range(2):
                yield from self.values(1)
            yield Arrive("empty_second.1", EACH)
            yield Advance("k.1")

    def soften(self, buffer: int) -> Iterator[NamedTuple]:
        """Maxima, then probabilities, of this consumer's block."""
        yield from self.raise_maxima()
        yield Sync("own", EACH * 32)
        yield from self.put_probabilities(buffer)
        yield Arrive(f"probabilities_{('even', 'odd')[buffer]}", EACH * 32)

    def other_block(self, buffer: int) -> Iterator[NamedTuple]:
        """What the other consumer has made of its block; the products that read it are issued."""
        yield Sync(f"probabilities_{('even', 'odd')[buffer]}", EACH * 32)
        yield Read(f"max.{buffer}.{self.warp}")
        yield from self.values(buffer)
        yield from self.probabilities(buffer)

    def issue_scores(self, buffer: int) -> Iterator[NamedTuple]:
        for part in (*FIRST[buffer], *second(buffer)):
            if part in self.full:
                yield Wait(f"full_{part}.{buffer}")
        yield from self.read_keys(buffer)

    def read_keys(self, buffer: int) -> Iterator[NamedTuple]:
        yield from (Read(f"q.{odd}.{warp}") for odd in range(2) for warp in range(WARPS))
        for part in PARTS:
            yield from (Read(f"{part}.{buffer}.{warp}") for warp in range(WARPS))

    def values(self, buffer: int) -> Iterator[NamedTuple]:
        yield from (Read(f"{SIDE[self.odd]}.{buffer}.{warp}") for warp in range(WARPS))

    def put_probabilities(self, buffer: int) -> Iterator[NamedTuple]:
        """In the place of what is rotated: another use of that memory."""
        yield Advance(f"rotated.{buffer}")
        yield Write(f"rotated.{buffer}.{self.warp}")
        yield Advance(f"rotated.{buffer}")

    def probabilities(self, buffer: int) -> Iterator[NamedTuple]:
        yield Advance(f"rotated.{buffer}")
        yield from (Read(f"rotated.{buffer}.{warp}") for warp in range(WARPS))
        yield Advance(f"rotated.{buffer}", -1)

    def raise_maxima(self) -> Iterator[NamedTuple]:
        """Seldom, and always in the model."""
        yield Write(f"max.{self.odd}.{self.warp}")


def after_queries(
    operations: Iterator[NamedTuple], leave: list[NamedTuple]
) -> Iterator[NamedTuple]:
    """Operations, and what follows the last read of Q."""
    listed = list(operations)
    reads = [i for i, o in enumerate(listed) if isinstance(o, Read) and o[0].startswith("q.")]
    last = reads[-1] + 1 if reads else 0
    yield from (*listed[:last], *leave, *listed[last:])


def pipeline(p: Protocol) -> Pipeline:
    """The model of a protocol."""
    arrivals = dict(p.arrivals)
    (named,) = (threads for threads in p.threads if threads > 128)
    rings = {"work": p.queue, "rounds": 1, "q": 1, "sums": 1, "once": 1}
    barriers = {
        "full_work": ("work", arrivals["full_work"]),
        "empty_work": ("work", arrivals["empty_work"]),
        "both": ("once", named),
        "own": ("once", 128),
        **{f"probabilities_{which}": ("once", named) for which in ("even", "odd")},
    }
    memory = {"work": "work", "merges": "sums"}
    if p.asks:
        barriers |= {f"{which}_q": ("q", arrivals[f"{which}_q"]) for which in ("full", "empty")}
    producers = WARPS if p.producers else 2 * WARPS
    processes: dict[str, Role] = {
        f"producer {warp}": Producer(
            warp, p.producers, tells=warp == p.tells, asks=p.asks and warp == producers - 1
        )
        for warp in range(producers)
    }
    for buffer in range(2):
        rings |= {f"k.{buffer}": 1, f"rotated.{buffer}": 1}
        for half in ("first", "second"):
            barriers[f"empty_{half}.{buffer}"] = f"k.{buffer}", arrivals[f"empty_{half}"]
        for part in p.full:
            barriers[f"full_{part}.{buffer}"] = f"k.{buffer}", arrivals["full_k"]
        for warp in range(WARPS):
            memory |= {f"{part}.{buffer}.{warp}": f"k.{buffer}" for part in PARTS[:2]}
            memory |= {
                f"rotated.{buffer}.{warp}": f"rotated.{buffer}",
                f"q.{buffer}.{warp}": "q",
                f"max.{buffer}.{warp}": "rounds",
                f"sum.{buffer}.{warp}": "sums",
                f"part.{buffer}.{warp}": "sums",
            }
            processes[f"consumer {buffer} warp {warp}"] = Warp(
                buffer, warp, full=p.full, by_tma=p.asks
            )
    splits = tuple(range(MOST_KEYS + 1))
    return Pipeline(rings, barriers, memory, processes, splits, keeps={"begun": False})
