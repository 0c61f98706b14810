"""The pipelines of decoding/decode_sm80.cu within a thread block.

`pipeline`: slices of warps that have different numbers of tiles of a split, and meet at barriers of
the whole block between splits. Inputs are splits: how many tiles each slice has of one, and how
many times the slices combine rows of it. What is shared is written by the first thread, in turns of
two, or by all.

`ring`: the warps of one slice, which have the same tiles, one after the other over the ends of
splits, and meet at a barrier of their own. Inputs are tiles. The barriers of the whole block, of
which every warp passes the same ones, are left out: they could only order more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from cuattn.gpu import dispatch
from tests.pipelines.explorer import END, Advance, Arrive, Copy, Pipeline, Read, Sync, Wait, Write

KERNEL = "decoding/decode_sm80.cu"
SLICES = 3  # that are modelled
WARPS = 2  # of a slice, likewise


class Split(NamedTuple):
    """How many tiles each slice has, and how many times rows are combined; whether the thread block
    merges the split's work tile at once."""

    tiles: tuple[int, ...]
    rounds: int
    merges: bool


def query_buffers() -> set[int]:
    """How many splits' queries there is room for, in some variant or other."""
    return {
        variant.config.query_buffers
        for arch in ("sm_80", "sm_90a")
        for variant in dispatch.variants(arch)
        if variant.source == KERNEL
    }


def stages() -> set[int]:
    """How many stages a ring has, in some variant or other."""
    return {
        variant.config.stages
        for arch in ("sm_80", "sm_90a", "sm_120")
        for variant in dispatch.variants(arch)
        if variant.source == KERNEL
    }


def splits() -> tuple[Split, ...]:
    """Every split that makes a difference: tiles are dealt out in turn."""
    shares = [
        tuple((total + SLICES - 1 - s) // SLICES for s in range(SLICES)) for total in (0, 2, 4)
    ]
    return tuple(itertools.starmap(Split, itertools.product(shares, (1, 2), (False, True))))


def syncthreads() -> Iterator[NamedTuple]:
    yield Arrive("block")
    yield Wait("block")
    yield Advance("block")


def attend(slice_: int, ahead: bool, own, split) -> Iterator[NamedTuple]:
    """A slice. What it does about a split begins with the end of the one before. Its share of the
    queries is loaded when the split begins, or `ahead`, while the one before is computed."""
    first, every = slice_ == 0, range(SLICES)
    if not own.started:
        own.started = True
        if first:
            yield Write("splits")
            yield Write("exists")
        # The ring is filled, for different times; then all know the first split.
        yield from syncthreads()
    if own.rounds:  # end_split
        for _ in range(own.rounds):
            yield from syncthreads()
            yield Advance("o")
            yield Write(f"o.{slice_}")
            yield from syncthreads()
            yield from (Read(f"o.{other}") for other in every)
            yield Read("place")
        yield from (Advance("turns"), Read("exists"), Advance("turns", -1))
        if own.merges:
            yield Read("splits")
            yield Read("place")
        elif first:
            yield Write("last")
        yield from (Advance("turns"), Advance("queries"), Advance("place"))
    # begin_split
    yield Read("exists")
    if split != END:
        if first:
            yield Write("rows")
        yield Read("splits")
        if not ahead or not own.ahead:
            yield Write(f"queries.{slice_}")
    yield from syncthreads()
    if split == END:
        yield from (Read("exists"), Read("last") if own.deferred else Read("exists"))
        return
    if first:
        yield Write("place")
        yield from (Advance("turns"), Write("splits"), Write("exists"), Advance("turns", -1))
    if ahead:
        own.ahead = True
        yield from (Advance("queries"), Write(f"queries.{slice_}"), Advance("queries", -1))
    yield from (Read("splits"), Read("rows"))
    for _ in range(split.tiles[slice_]):
        yield from (Read(f"queries.{other}") for other in every)
        yield Read("rows")
    own.rounds, own.merges = split.rounds, split.merges
    own.deferred = own.deferred or not split.merges


def pipeline(buffers: int, ahead: bool) -> Pipeline:
    """The model of a variant with so many query buffers, of which queries may be loaded `ahead`."""
    rings = {"block": 1, "turns": 2, "queries": buffers, "place": 1, "o": 1, "once": 1}
    memory = {"splits": "turns", "exists": "turns", "place": "place", "rows": "place"}
    memory |= {"last": "once"}
    for slice_ in range(SLICES):
        memory |= {f"o.{slice_}": "o", f"queries.{slice_}": "queries"}
    processes = {
        f"slice {slice_}": functools.partial(attend, slice_, ahead) for slice_ in range(SLICES)
    }
    keeps = {"started": False, "rounds": 0, "merges": False, "deferred": False, "ahead": False}
    return Pipeline(rings, {"block": ("block", SLICES)}, memory, processes, splits(), keeps=keeps)


def share_ring(warp: int, depth: int, own, tile) -> Iterator[NamedTuple]:
    """A warp of a slice: it copies its part of each tile to a stage, after computing with all of
    the tile that was there before. At the end it computes what is left."""
    every = range(WARPS)
    for _ in range(own.filled if tile == END else own.filled == depth):
        yield Advance("ring", -own.filled)
        yield Wait(f"group.{warp}")
        yield Sync("slice")
        yield from (Read(f"stage.{other}") for other in every)
        yield Sync("slice")
        yield Advance("ring", own.filled)
        own.filled -= 1
    if tile != END:
        yield Arrive(f"group.{warp}", copies=1)
        yield Copy(f"group.{warp}", f"stage.{warp}")
        yield Advance("ring")
        own.filled += 1


def ring(depth: int) -> Pipeline:
    """The model of a slice's ring of so many stages."""
    barriers = {"slice": ("block", WARPS)}
    barriers |= {f"group.{warp}": ("ring", 1) for warp in range(WARPS)}
    memory = {f"stage.{warp}": "ring" for warp in range(WARPS)}
    processes = {
        f"warp {warp}": functools.partial(share_ring, warp, depth) for warp in range(WARPS)
    }
    rings = {"block": 1, "ring": depth}
    return Pipeline(rings, barriers, memory, processes, ("tile",), keeps={"filled": 0})
