"""A launch of mla/decode_few_sm90.cu ends, whatever each thread block has to read, and no memory is
written while it is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.mla_decode_few_sm90 import clusters, pipeline, protocols

(PROTOCOL,) = protocols()


def test_every_launch_ends():
    model = pipeline(PROTOCOL)
    for counts in model.inputs:
        explorer.run(model, [counts])


@pytest.mark.parametrize("name", [name for name, _ in PROTOCOL.arrivals])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_count_that_changes_alone_is_found(name, change):
    arrivals = tuple((n, c + change * (n == name)) for n, c in PROTOCOL.arrivals)
    model = pipeline(dataclasses.replace(PROTOCOL, arrivals=arrivals))
    with pytest.raises(explorer.Fault):
        explorer.run(model, model.inputs[-1:])


@pytest.mark.parametrize(
    ("kind", "barrier"),
    [
        (explorer.Wait, "0:empty_first.0"),
        (explorer.Wait, "0:empty_second.1"),
        (explorer.Wait, "0:full_left.0"),
        (explorer.Wait, "0:full_rotated.1"),
        (explorer.Sync, "0:both"),
        (explorer.Sync, "0:own"),
        (explorer.Wait, "0:received"),
        (explorer.Wait, "cluster"),
        (explorer.Sync, "0:requested"),
    ],
)
def test_every_barrier_is_needed(kind, barrier):
    model = pipeline(PROTOCOL)
    with pytest.raises(explorer.Fault):
        explorer.run(explorer.without(model, kind, barrier), model.inputs[-1:])


def test_every_cluster_ends():
    model = clusters()
    for count in model.inputs:
        explorer.run(model, [count])


@pytest.mark.parametrize(
    ("kind", "barrier"),
    [(explorer.Wait, "flag.0"), (explorer.Sync, "both.1"), (explorer.Arrive, "flag.1")],
)
def test_clusters_need_every_flag(kind, barrier):
    model = clusters()
    with pytest.raises(explorer.Fault):
        explorer.run(explorer.without(model, kind, barrier), model.inputs[-1:])
