"""The slices of a thread block of decoding/decode_sm80.cu meet at the same barriers, whatever each
of them has of a split, and nothing that they share is written while it is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.decode_sm80 import pipeline, query_buffers


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
