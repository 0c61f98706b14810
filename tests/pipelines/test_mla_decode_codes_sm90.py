"""A launch of mla/decode_codes_sm90.cu ends, whatever its splits are, and no memory is written
while it is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.mla_decode_codes_sm90 import Split, pipeline, protocols

PROTOCOLS = {
    "shared" if p.shares else f"{p.warpgroups} warpgroups, {p.turns} places": p for p in protocols()
}


@pytest.fixture(params=sorted(PROTOCOLS))
def protocol(request):
    return PROTOCOLS[request.param]


def test_every_sequence_of_splits_ends(protocol):
    model = pipeline(protocol)
    explorer.explore(model)
    explorer.run(model, explorer.windows(model, 2))
    # A stage is used again after so many splits that are short.
    short = tuple(Split(blocks, blocks == 1) for blocks in range(3))
    model = dataclasses.replace(model, inputs=short)
    explorer.run(model, explorer.windows(model, protocol.stages + 1))


@pytest.mark.parametrize("name", ["empty", "full"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_count_that_changes_alone_is_found(protocol, name, change):
    arrivals = tuple((n, c + change * (n == name)) for n, c in protocol.arrivals)
    with pytest.raises(explorer.Fault):
        explorer.explore(pipeline(dataclasses.replace(protocol, arrivals=arrivals)))


@pytest.mark.parametrize(
    ("kind", "barrier"),
    [
        (explorer.Wait, "full"),
        (explorer.Wait, "empty.0"),
        (explorer.Wait, "empty.1"),
        (explorer.Sync, "own.0"),
        (explorer.Sync, "own.1"),
        (explorer.Sync, "all"),
    ],
)
def test_every_barrier_is_needed(protocol, kind, barrier):
    with pytest.raises(explorer.Fault):
        explorer.explore(explorer.without(pipeline(protocol), kind, barrier))


@pytest.mark.parametrize("barrier", ["full_p.0", "full_p.1"])
def test_probabilities_of_the_other_are_waited_for(barrier):
    with pytest.raises(explorer.Fault):
        explorer.explore(explorer.without(pipeline(PROTOCOLS["shared"]), explorer.Wait, barrier))


def test_blocks_have_to_become_full_in_their_order():
    """Without the loading warps' wait for the block before."""
    model = pipeline(PROTOCOLS["3 warpgroups, 2 places"])
    out_of_order = {
        name: without_waits_for_the_block_before(role) if name.startswith("loader") else role
        for name, role in model.processes.items()
    }
    with pytest.raises(explorer.Fault):
        explorer.explore(dataclasses.replace(model, processes=out_of_order))


def without_waits_for_the_block_before(role):
    def other(own, split):
        return (operation for operation in role(own, split) if operation != explorer.Wait("full"))

    return other
