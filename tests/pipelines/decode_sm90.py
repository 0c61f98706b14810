"""The pipeline of decoding/decode_sm90.cu: the warps of a cluster, each with a ring of stages of
its own, and what the blocks of the cluster tell each other.

What the waits depend on is how many tiles of keys each warp has. Two warps stand for a block's, two
blocks for a cluster's: all warps do the same, and so do all blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.pipelines import source
from tests.pipelines.explorer import END, Advance, Arrive, Copy, Pipeline, Read, Wait, Write

KERNEL = "decoding/decode_sm90.cu"
BLOCKS, WARPS = 2, 2  # that are modelled


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What of a Config decides who waits for whom."""

    stages: int
    full: int  # arrivals
    received: int


def protocols() -> set[Protocol]:
    """Every protocol that some variant has."""
    text = source.text(KERNEL)
    found = set()
    for constants in source.constants_of_variants(KERNEL):
        arrivals = source.arrivals(text, constants)
        found.add(Protocol(constants["kStages"], arrivals["full"], arrivals["received"]))
    return found


def tiles(p: Protocol) -> Iterator[tuple[int, ...]]:
    """How many tiles each warp has, which are dealt out in turn: up to two laps of a ring and one
    more."""
    warps = BLOCKS * WARPS
    for total in range(warps * (2 * p.stages + 1) + 1):
        yield tuple((total - first + warps - 1) // warps for first in range(warps))


def barrier(name: str) -> Iterator[NamedTuple]:
    """``__syncthreads``."""
    yield Arrive(name)
    yield from wait(name)


def wait(name: str) -> Iterator[NamedTuple]:
    yield Wait(name)
    yield Advance(name)


def attend(block: int, warp: int, p: Protocol, own, counts) -> Iterator[NamedTuple]:
    """All that a warp does in a launch."""
    if counts == END:
        return
    number = block * WARPS + warp
    count, ring, full = counts[number], f"ring.{number}", f"full.{number}"
    others = [block * WARPS + other for other in range(WARPS)]

    def load(tile: int, at: int) -> Iterator[NamedTuple]:
        """A tile of keys and values, by a warp that is at tile `at` of its ring."""
        if tile < count:
            yield Advance(ring, tile - at)
            yield Arrive(full, copies=1)
            yield Copy(full, ring)
            yield Advance(ring, at - tile)

    if warp == 0:
        yield Write(f"runs.{block}")
        yield Arrive(f"received.{block}", copies=BLOCKS * WARPS)  # Inbox::open
    yield Arrive("cluster")  # cluster_arrive_relaxed
    yield Write(f"q.{number}")
    for tile in range(p.stages):
        yield from load(tile, at=0)
    yield from barrier(f"block.{block}")
    yield from (Read(f"q.{other}") for other in others)
    for tile in range(count):
        yield Wait(full)
        yield Read(ring)
        yield from load(tile + p.stages, at=tile)
        yield Advance(ring)
    for _ in range(p.stages):  # O takes the place of the ring
        yield Write(ring)
        yield Advance(ring)
    yield Write(f"staged.{number}")
    yield from barrier(f"block.{block}")
    yield from (Read(f"staged.{other}") for other in others)
    yield from wait("cluster")  # cluster_wait
    for owner in range(BLOCKS):  # Inbox::send
        yield Read(f"runs.{owner}")
        yield Copy(f"received.{owner}", f"parts.{owner}.{number}")
    yield Wait(f"received.{block}")
    yield from (Read(f"parts.{block}.{other}") for other in range(BLOCKS * WARPS))
    if warp == 0:
        yield Write(f"runs.{block}")  # it may end: no other block is at its memory any more


def pipeline(p: Protocol) -> Pipeline:
    """The model of a protocol. A launch is one input."""
    warps = list(itertools.product(range(BLOCKS), range(WARPS)))
    rings = {f"block.{block}": 1 for block in range(BLOCKS)} | {"cluster": 1, "once": 1}
    rings |= {f"ring.{number}": p.stages for number in range(len(warps))}
    barriers = {f"block.{block}": (f"block.{block}", WARPS) for block in range(BLOCKS)}
    barriers |= {"cluster": ("cluster", len(warps))}
    barriers |= {f"received.{block}": ("once", p.received) for block in range(BLOCKS)}
    memory = {f"runs.{block}": "once" for block in range(BLOCKS)}
    for number in range(len(warps)):
        barriers[f"full.{number}"] = f"ring.{number}", p.full
        memory[f"ring.{number}"] = f"ring.{number}"
        memory |= dict.fromkeys([f"q.{number}", f"staged.{number}"], "once")
        memory |= {f"parts.{block}.{number}": "once" for block in range(BLOCKS)}
    processes = {
        f"block {block} warp {warp}": functools.partial(attend, block, warp, p)
        for block, warp in warps
    }
    return Pipeline(rings, barriers, memory, processes, tuple(tiles(p)))
