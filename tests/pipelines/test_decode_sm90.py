"""A launch of decoding/decode_sm90.cu ends, whatever each warp has to read, and no memory is
written while it is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.decode_sm90 import pipeline, protocols

PROTOCOLS = sorted(protocols(), key=str)


@pytest.mark.parametrize("p", PROTOCOLS, ids=str)
def test_every_launch_ends(p):
    model = pipeline(p)
    for counts in model.inputs:
        explorer.run(model, [counts])


@pytest.mark.parametrize("arrivals", [0, 2])
@pytest.mark.parametrize("barrier", ["full", "received"])
def test_a_count_that_changes_alone_is_found(barrier, arrivals):
    model = pipeline(dataclasses.replace(PROTOCOLS[0], **{barrier: arrivals}))
    with pytest.raises(explorer.Fault):
        explorer.run(model, model.inputs[-1:])


def without(model, barrier, nth, kinds=(explorer.Arrive, explorer.Wait, explorer.Advance)):
    """The model without its nth use of a barrier."""

    def left_out(role):
        def other(own, counts):
            seen = dict.fromkeys(kinds, 0)
            for operation in role(own, counts):
                if operation[0] == barrier and isinstance(operation, kinds):
                    seen[type(operation)] += 1
                    if seen[type(operation)] == nth:
                        continue
                yield operation

        return other

    roles = {name: left_out(role) for name, role in model.processes.items()}
    return dataclasses.replace(model, processes=roles)


@pytest.mark.parametrize(
    ("barrier", "nth", "fault"),
    [
        ("block.0", 1, "read q"),
        ("block.0", 2, "read staged"),
        ("cluster", 1, "read runs|received|write runs"),
        ("received.0", 1, "read parts|received|write runs"),
    ],
)
def test_every_barrier_is_needed(barrier, nth, fault):
    model = without(pipeline(PROTOCOLS[0]), barrier, nth)
    with pytest.raises(explorer.Fault, match=fault):
        explorer.run(model, model.inputs[-1:])
