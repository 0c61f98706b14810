"""A launch of mla/decode_80_sm90.cu ends, whatever its splits are, and no memory is written while
it is read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipelines import explorer
from tests.pipelines.mla_decode_80_sm90 import (
    ALIKE,
    BOTH_PLACES,
    MEET,
    OWN_PLACES,
    SHORT,
    pipeline,
    protocols,
)

(PROTOCOL,) = protocols()


def test_every_sequence_of_splits_ends():
    explorer.explore(pipeline(PROTOCOL))
    explorer.explore(pipeline(PROTOCOL, ALIKE[:5]), exact=True)
    # Every split of SHORT, and every sequence of so many of others.
    for splits, length in ((SHORT, 1), (ALIKE, 2), (ALIKE[:3], PROTOCOL.queue + 2)):
        model = pipeline(PROTOCOL, splits)
        explorer.run(model, explorer.windows(model, length))


@pytest.mark.parametrize("of", ["arrivals", "threads"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_count_that_changes_alone_is_found(of, change):
    counts = getattr(PROTOCOL, of)
    for name, _ in counts:
        changed = tuple((n, count + change * (n == name)) for n, count in counts)
        with pytest.raises(explorer.Fault):
            explorer.explore(pipeline(dataclasses.replace(PROTOCOL, **{of: changed})))


@pytest.mark.parametrize(
    ("kinds", "barrier"),
    [
        *(([explorer.Wait], f"{at}_{what}") for at in ("full", "empty") for what in ("work", "q")),
        *(
            ([explorer.Wait], f"{at}_{what}.{n}")
            for at in ("full", "empty")
            for what in ("k", "rope")
            for n in range(2)
        ),
        *(([explorer.Arrive, explorer.Sync], f"probabilities.{n}") for n in range(2)),
        *(([MEET[place]], f"own.{n}") for place in OWN_PLACES for n in range(2)),
        *(([MEET[place]], "both") for place in BOTH_PLACES),
    ],
)
def test_every_barrier_is_needed(kinds, barrier):
    model = pipeline(PROTOCOL)
    for kind in kinds:
        model = explorer.without(model, kind, barrier)
    with pytest.raises(explorer.Fault):
        explorer.run(model, SHORT)
