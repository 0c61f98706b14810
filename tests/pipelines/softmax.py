"""How the blocks of a cluster exchange partial results in sampling/softmax.cu: every warp sends its
own to all blocks, and a block waits for as many bytes as all warps send it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from cuattn.gpu import dispatch
from tests.pipelines import source
from tests.pipelines.explorer import END, Advance, Arrive, Copy, Pipeline, Read, Wait, Write

KERNEL = "sampling/softmax.cu"
BLOCKS, WARPS = 2, 2  # that are modelled


def arrivals() -> int:
    """Of the barrier that counts what a block is sent."""
    text = source.text(KERNEL)
    config = next(v.config for v in dispatch.variants("sm_90a") if v.source == KERNEL)
    return source.arrivals(text, source.Constants(text, config))["arrived"]


def exchange(block: int, warp: int, announced: int, own, row) -> Iterator[NamedTuple]:
    """What a warp does about a row: a launch has one for each cluster."""
    if row == END:
        return
    number = block * WARPS + warp
    if warp == 0:
        yield Write(f"runs.{block}")  # and has initialised its barrier
    yield Arrive("cluster")
    yield Wait("cluster")
    yield Advance("cluster")
    if warp == 0:
        yield Arrive(f"arrived.{block}", copies=announced)
    for other in range(BLOCKS):
        yield Read(f"runs.{other}")
        yield Copy(f"arrived.{other}", f"partials.{other}.{number}")
    yield Wait(f"arrived.{block}")
    yield from (Read(f"partials.{block}.{other}") for other in range(BLOCKS * WARPS))
    if warp == 0:
        yield Write(f"runs.{block}")  # it may end: nobody sends it anything any more


def pipeline(count: int, announced: int = BLOCKS * WARPS) -> Pipeline:
    """The model of a launch, whose barriers were initialised with a count."""
    warps = list(itertools.product(range(BLOCKS), range(WARPS)))
    barriers = {f"arrived.{block}": ("once", count) for block in range(BLOCKS)}
    barriers |= {"cluster": ("cluster", len(warps))}
    memory = {f"runs.{block}": "once" for block in range(BLOCKS)}
    memory |= {f"partials.{b}.{n}": "once" for b in range(BLOCKS) for n in range(len(warps))}
    processes = {
        f"block {block} warp {warp}": functools.partial(exchange, block, warp, announced)
        for block, warp in warps
    }
    return Pipeline({"cluster": 1, "once": 1}, barriers, memory, processes, ("row",))
