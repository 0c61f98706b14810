"""A launch of mla/decode_sm90.cu ends, whatever its splits are, and no memory is written while it
is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.mla_decode_sm90 import pipeline, protocols

PROTOCOLS = sorted(protocols(), key=str)
COUNTS = [(p, name) for p in PROTOCOLS for name, _ in p.arrivals]


@pytest.mark.parametrize("p", PROTOCOLS, ids=str)
def test_every_sequence_of_splits_ends(p):
    explorer.explore(pipeline(p))


@pytest.mark.parametrize(("p", "name"), COUNTS, ids=str)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_count_that_changes_alone_is_found(p, name, change):
    arrivals = tuple((n, c + change * (n == name)) for n, c in p.arrivals)
    with pytest.raises(explorer.Fault):
        explorer.explore(pipeline(dataclasses.replace(p, arrivals=arrivals)))


@pytest.mark.parametrize(
    ("kind", "barrier"),
    [
        (explorer.Wait, "empty_first.0"),
        (explorer.Wait, "empty_second.0"),
        (explorer.Wait, "empty_first.1"),
        (explorer.Wait, "empty_second.1"),
        (explorer.Wait, "full_left.0"),
        (explorer.Wait, "full_right.1"),
        (explorer.Wait, "full_rotated.1"),
        (explorer.Wait, "full_work"),
        (explorer.Wait, "full_q"),
        (explorer.Wait, "empty_q"),
        (explorer.Sync, "own"),
        (explorer.Sync, "both"),
        (explorer.Sync, "probabilities_even"),
        (explorer.Sync, "probabilities_odd"),
    ],
)
@pytest.mark.parametrize("p", PROTOCOLS, ids=str)
def test_every_barrier_is_needed(p, kind, barrier):
    model = pipeline(p)
    if barrier not in model.barriers:
        pytest.skip("another barrier says so")
    with pytest.raises(explorer.Fault):
        explorer.explore(explorer.without(model, kind, barrier))
