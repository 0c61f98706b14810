"""A launch of mla/decode_codes_sm90.cu ends, whatever its splits are, and no memory is written
while it is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.mla_decode_codes_sm90 import Split, pipeline, protocols

(PROTOCOL,) = protocols()


def test_every_sequence_of_splits_ends():
    model = pipeline(PROTOCOL)
    explorer.explore(model)
    explorer.run(model, explorer.windows(model, 2))
    # A stage is used again after so many splits that are short.
    short = tuple(Split(tiles, tiles == 1) for tiles in range(3))
    model = dataclasses.replace(model, inputs=short)
    explorer.run(model, explorer.windows(model, PROTOCOL.stages + 1))


@pytest.mark.parametrize("name", [name for name, _ in PROTOCOL.arrivals])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_count_that_changes_alone_is_found(name, change):
    arrivals = tuple((n, c + change * (n == name)) for n, c in PROTOCOL.arrivals)
    with pytest.raises(explorer.Fault):
        explorer.explore(pipeline(dataclasses.replace(PROTOCOL, arrivals=arrivals)))


@pytest.mark.parametrize(
    ("kind", "barrier"),
    [
        (explorer.Wait, "full"),
        (explorer.Wait, "empty"),
        (explorer.Sync, "group.0"),
        (explorer.Sync, "group.2"),
        (explorer.Sync, "groups"),
    ],
)
def test_every_barrier_is_needed(kind, barrier):
    with pytest.raises(explorer.Fault):
        explorer.explore(explorer.without(pipeline(PROTOCOL), kind, barrier))


def test_tiles_have_to_become_full_in_their_order():
    """Without the loading warps' wait for the tile before."""
    model = pipeline(PROTOCOL)
    out_of_order = {
        name: role if name.startswith("group") else without_waits_for_the_tile_before(role)
        for name, role in model.processes.items()
    }
    with pytest.raises(explorer.Fault):
        explorer.explore(dataclasses.replace(model, processes=out_of_order))


def without_waits_for_the_tile_before(role):
    def other(own, split):
        return (operation for operation in role(own, split) if operation != explorer.Wait("full"))

    return other
