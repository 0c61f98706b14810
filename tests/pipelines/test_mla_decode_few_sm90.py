"""A launch of mla/decode_few_sm90.cu ends, whatever warpgroups and thread blocks have to do, and no
memory is written while it is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.mla_decode_few_sm90 import BLOCKS, MEET, merging, pipeline, protocols

(PROTOCOL,) = protocols()


def run_launches(model):
    for launch in model.inputs:
        explorer.run(model, [launch])


@pytest.mark.parametrize("model", [pipeline(PROTOCOL), merging()], ids=["block", "merging"])
def test_every_launch_ends(model):
    run_launches(model)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PROTOCOL)])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_count_that_changes_alone_is_found(name, change):
    changed = dataclasses.replace(PROTOCOL, **{name: getattr(PROTOCOL, name) + change})
    with pytest.raises(explorer.Fault):
        explorer.run(pipeline(changed), [(2, 1)])


@pytest.mark.parametrize("barrier", merging().barriers)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_count_of_merging_that_changes_alone_is_found(barrier, change):
    model = merging()
    ring, count = model.barriers[barrier]
    barriers = {**model.barriers, barrier: (ring, count + change)}
    with pytest.raises(explorer.Fault):
        run_launches(dataclasses.replace(model, barriers=barriers))


@pytest.mark.parametrize(
    ("kind", "barrier"),
    [
        *((explorer.Wait, f"full.{n}.{group}") for n in range(2) for group in range(4)),
        *(
            (MEET[place], f"own.{n}")
            for place in ("maxima", "probabilities", "first half", "second half")
            for n in range(2)
        ),
        *((MEET[place], "all") for place in ("queries", "sums", "factors", "o")),
    ],
)
def test_every_barrier_is_needed(kind, barrier):
    model = pipeline(PROTOCOL)
    with pytest.raises(explorer.Fault):
        explorer.run(explorer.without(model, kind, barrier), [(2, 2)])


@pytest.mark.parametrize(
    ("kind", "barrier"),
    [
        *((explorer.Wait, b) for b in merging().barriers if b.startswith(("packet", "begun"))),
        *(
            (MEET[place], f"all.{block}")
            for place in ("part", "packets", "shares")
            for block in range(BLOCKS)
        ),
        (MEET["read"], "all.1"),  # others that may be last have one task, and so meet at its shares
    ],
)
def test_merging_needs_every_barrier(kind, barrier):
    with pytest.raises(explorer.Fault):
        run_launches(explorer.without(merging(), kind, barrier))


def test_who_has_not_seen_the_last_one_begin_must_not_wait():
    model = merging(heeds=False)
    with pytest.raises(explorer.Fault, match="deadlock"):
        run_launches(model)
