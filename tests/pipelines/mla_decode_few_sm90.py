"""The pipeline of mla/decode_few_sm90.cu: thread blocks of a cluster, each with the producing and
consuming warps of mla/decode_sm90.cu for blocks of keys of its own, and what they send each other;
and clusters, which leave their results to the last one.

An input is a launch: how many blocks of keys each thread block of the cluster has. Two thread
blocks stand for a cluster's. Of `clusters`, an input is how many of them have keys.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.pipelines import mla_decode_sm90, source
from tests.pipelines.explorer import END, Advance, Arrive, Copy, Pipeline, Read, Sync, Wait, Write
from tests.pipelines.mla_decode_sm90 import (
    EACH,
    FIRST,
    PARTS,
    SIDE,
    WARPS,
    after_queries,
    second,
)

KERNEL = "mla/decode_few_sm90.cu"
BLOCKS = 2  # that are modelled
MOST_KEYS = 5  # blocks of keys that a thread block has
CLUSTERS = 3


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of the source decides who waits for whom."""

    arrivals: tuple[tuple[str, int], ...]


def protocols() -> set[Protocol]:
    """Every protocol that some variant has."""
    text = source.text(KERNEL)
    found = set()
    for constants in source.constants_of_variants(KERNEL):
        arrivals = source.arrivals(text, constants)
        used = {name: n for name, n in arrivals.items() if not name.endswith(("_work", "_q"))}
        found.add(Protocol(tuple(sorted(used.items()))))
    return found


def of_block(block: int, operations: Iterator[NamedTuple]) -> Iterator[NamedTuple]:
    """Operations of one thread block, whose barriers and memory are its own. Each piece of Q gives
    place to what every thread block sends."""
    for operation in operations:
        names = {
            field: f"{block}:{value}" for field, value in operation._asdict().items()
            if isinstance(value, str) and value != "cluster"
        }  # fmt: skip
        named = operation._replace(**names)
        if isinstance(operation, Read | Write) and operation.memory.startswith("q."):
            for sender in range(BLOCKS):
                yield named._replace(memory=f"{named.memory}.{sender}")
        else:
            yield named


def produce(block: int, warp: int, own, counts) -> Iterator[NamedTuple]:
    """A producing warp, which has half of a buffer."""
    if counts != END:
        yield from of_block(block, _produce(warp, counts[block]))


def _produce(warp: int, count: int) -> Iterator[NamedTuple]:
    if warp == 0:
        yield Write("runs")
    yield Sync("loaders", 32)
    yield Arrive("requested", 32)
    buffer, half = warp // 2, warp % 2
    for _ in range(buffer, count, 2):
        yield Wait(f"empty_{('first', 'second')[half]}.{buffer}", before=True)
        for part in (FIRST[buffer], second(buffer))[half]:
            full = f"full_{part}.{buffer}"
            yield Arrive(full, copies=WARPS)
            yield from (Copy(full, f"{part}.{buffer}.{copy}") for copy in range(WARPS))
        yield Advance(f"k.{buffer}")
        yield Advance(f"rotated.{buffer}", 2)


class Warp(mla_decode_sm90.Warp):
    """A warp of a consumer."""

    def __init__(self, block: int, odd: int, warp: int) -> None:
        super().__init__(odd, warp)
        self.block = block

    def __call__(self, own, counts) -> Iterator[NamedTuple]:
        if counts == END:
            return
        block, odd, warp = self.block, self.odd, self.warp
        count = counts[block]
        yield from of_block(block, self.compute(count, sum(map(bool, counts))))
        yield from of_block(block, self.stage(count))
        yield Wait("cluster")
        for owner in range(BLOCKS) if count else ():
            yield Read(f"{owner}:runs")
            if owner != block:
                yield Advance(f"{owner}:q")
            yield Copy(f"{owner}:received", f"{owner}:q.{odd}.{warp}.{block}")
        yield Wait(f"{block}:received")
        for o, w, sender in itertools.product(range(2), range(WARPS), range(BLOCKS)):
            if counts[sender]:
                yield Read(f"{block}:q.{o}.{w}.{sender}")
        if odd + warp == 0:
            yield Write(f"{block}:runs")  # it may end: no other block is at its memory any more

    def compute(self, count: int, senders: int) -> Iterator[NamedTuple]:
        yield Write(f"q.{self.odd}.{self.warp}")
        yield Sync("requested", EACH * 32)
        yield Read("runs")
        if self.odd + self.warp == 0:  # what the cluster will send is known
            yield Arrive("received", copies=senders * 2 * WARPS)
        yield Sync("both", EACH * 32)
        operations: list[NamedTuple] = []
        if count:
            operations += [Write(f"max.{self.odd}.{self.warp}"), Advance("rounds")]
            operations.append(Sync("both", EACH * 32))
            rounds = self.odd_rounds if self.odd else self.even_rounds
            operations += rounds((count + 1) // 2, count % 2 == 1)
        yield from after_queries(iter(operations), [Arrive("cluster")])
        yield Advance("q")

    def odd_rounds(self, pairs: int, ends_even: bool = False) -> Iterator[NamedTuple]:
        """Scores are issued before the even block's values are."""
        for pair in range(pairs):
            has_block = not (ends_even and pair + 1 == pairs)
            if has_block:
                yield from self.issue_scores(1)
            yield from self.other_block(0)
            if has_block:
                yield from self.read_keys(1)
                yield from self.soften(1)
            yield from self.values(0)
            yield from self.probabilities(0)
            yield Arrive("empty_second.0", EACH)
            yield Advance("k.0")
            yield Advance("rotated.0", 2)
            if has_block:
                yield Advance("rounds")
                for _ in range(2):
                    yield from self.values(1)
                yield Arrive("empty_second.1", EACH)
                yield Advance("k.1")

    def stage(self, count: int) -> Iterator[NamedTuple]:
        """This warp's rows to the place of odd blocks of keys."""
        if count:
            yield Write(f"sum.{self.odd}.{self.warp}")
            yield Sync("both", EACH * 32)
            yield Write(f"{SIDE[self.odd]}.1.{self.warp}")
            yield Sync("both", EACH * 32)
            for odd, warp in itertools.product(range(2), range(WARPS)):
                yield Read(f"sum.{odd}.{warp}")
                yield Read(f"{SIDE[odd]}.1.{warp}")


def pipeline(p: Protocol) -> Pipeline:
    """The model of a protocol. A launch is one input."""
    arrivals = dict(p.arrivals)
    rings, barriers, memory = {"cluster": 1}, {"cluster": ("cluster", BLOCKS * 2 * WARPS)}, {}
    processes = {}
    for block in range(BLOCKS):
        own_rings = ["once", "rounds", "q", *(f"{k}.{n}" for k in ("k", "rotated") for n in (0, 1))]
        rings |= {f"{block}:{ring}": 1 for ring in own_rings}
        own = {
            "loaders": ("once", 128),
            "requested": ("once", 384),
            "both": ("once", 256),
            "own": ("once", 128),
            "received": ("once", arrivals["received"]),
            **{f"probabilities_{which}": ("once", 256) for which in ("even", "odd")},
        }
        pieces = {"runs": "once"}
        for n in range(2):
            for half in ("first", "second"):
                own[f"empty_{half}.{n}"] = f"k.{n}", arrivals[f"empty_{half}"]
            for part in PARTS:
                own[f"full_{part}.{n}"] = f"k.{n}", arrivals["full_k"]
            for warp in range(WARPS):
                pieces |= {f"{part}.{n}.{warp}": f"k.{n}" for part in PARTS[:2]}
                pieces |= {f"rotated.{n}.{warp}": f"rotated.{n}", f"max.{n}.{warp}": "rounds"}
                pieces |= {f"q.{n}.{warp}.{sender}": "q" for sender in range(BLOCKS)}
                pieces[f"sum.{n}.{warp}"] = "once"
        barriers |= {f"{block}:{name}": (f"{block}:{r}", n) for name, (r, n) in own.items()}
        memory |= {f"{block}:{name}": f"{block}:{ring}" for name, ring in pieces.items()}
        for warp in range(4):
            processes[f"block {block} producer {warp}"] = functools.partial(produce, block, warp)
        for odd, warp in itertools.product(range(2), range(WARPS)):
            processes[f"block {block} consumer {odd} warp {warp}"] = Warp(block, odd, warp)
    inputs = [(a, b) for a in range(MOST_KEYS + 1) for b in (a, a - 1) if b >= 0]
    return Pipeline(rings, barriers, memory, processes, tuple(inputs))


def clusters() -> Pipeline:
    """What clusters leave for the last one that has keys, each with a flag in global memory; of a
    launch, which begins when the one before has ended."""
    processes = {
        f"cluster {cluster} warp {warp}": functools.partial(merge, cluster, warp)
        for cluster, warp in itertools.product(range(CLUSTERS), range(WARPS))
    }
    barriers = {f"both.{cluster}": ("once", WARPS) for cluster in range(CLUSTERS)}
    barriers |= {f"flag.{cluster}": ("once", 1) for cluster in range(CLUSTERS)}
    memory = {
        f"partial.{cluster}.{warp}": "once"
        for cluster, warp in itertools.product(range(CLUSTERS), range(WARPS))
    }
    return Pipeline({"once": 1}, barriers, memory, processes, tuple(range(1, CLUSTERS + 1)))


def merge(cluster: int, warp: int, own, count) -> Iterator[NamedTuple]:
    """A warp of a thread block that merges its columns of all clusters."""
    if count == END or cluster >= count:
        return
    before = range(count - 1)
    if cluster < count - 1:
        yield Write(f"partial.{cluster}.{warp}")
    else:
        yield from (Wait(f"flag.{other}") for other in before)
        yield from (Read(f"partial.{o}.{w}") for o, w in itertools.product(before, range(WARPS)))
    yield Sync(f"both.{cluster}")
    if cluster < count - 1 and warp == 0:
        yield Arrive(f"flag.{cluster}")
