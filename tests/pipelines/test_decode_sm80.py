"""The slices of a thread block of decoding/decode_sm80.cu meet at the same barriers, whatever each
of them has of a split, and nothing that they share is written while it is read; nor are the stages
of a ring."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.decode_sm80 import pipeline, query_buffers, ring, stages


@pytest.mark.parametrize("buffers", sorted(query_buffers()))
@pytest.mark.parametrize("ahead", [False, True])
def test_every_sequence_of_splits_ends(buffers, ahead):
    """decoding/ring.cuh loads queries ahead only where there is a second buffer."""
    model = pipeline(buffers, ahead)
    if ahead and buffers == 1:
        with pytest.raises(explorer.Fault, match="queries"):
            explorer.explore(model)
        return
    explorer.explore(model)
    explorer.run(model, explorer.windows(model, 2))


def test_every_barrier_is_needed():
    """Of the block's start, of a split's begin, and the two of each round of its end."""
    model = pipeline(2, True)
    splits = [split for split in model.inputs if split.rounds == 1][:3]

    def without(role, left_out):
        def other(own, split):
            ordinal = 0 if own.started else -1
            for operation in role(own, split):
                if operation[0] == "block":
                    ordinal += isinstance(operation, explorer.Arrive)
                    if ordinal == left_out:
                        continue
                yield operation

        return other

    explorer.run(model, splits)
    for left_out in (0, 1, 2, 3):  # with an end before it, a split's begin has the third
        roles = {name: without(role, left_out) for name, role in model.processes.items()}
        with pytest.raises(explorer.Fault, match=r"may (read|write)"):
            explorer.run(dataclasses.replace(model, processes=roles), splits)


@pytest.mark.parametrize("depth", sorted(stages()))
def test_a_stage_is_filled_again_when_all_its_warps_have_read_it(depth):
    """After any number of tiles."""
    model = ring(depth)
    explorer.explore(model, exact=True)
    explorer.run(model, ["tile"] * (3 * depth + 1))


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_slice_needs_both_of_its_barriers(left_out):
    """Before a tile is read, and after."""
    model = ring(3)

    def without(role):
        def other(own, tile):
            met = 0
            for operation in role(own, tile):
                if isinstance(operation, explorer.Sync):
                    met += 1
                    if (met - 1) % 2 == left_out:
                        continue
                yield operation

        return other

    roles = {name: without(role) for name, role in model.processes.items()}
    with pytest.raises(explorer.Fault, match=r"may (read|write) stage"):
        explorer.explore(dataclasses.replace(model, processes=roles))
