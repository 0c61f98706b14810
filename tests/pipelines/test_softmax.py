"""A cluster of sampling/softmax.cu hears of all its warps, and no block leaves too early."""

from __future__ import annotations

import pytest

from tests.pipelines import explorer
from tests.pipelines.softmax import BLOCKS, WARPS, arrivals, pipeline


def test_a_launch_ends():
    explorer.run(pipeline(arrivals()), ["row"])


@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_that_do_not_add_up_are_found(change):
    with pytest.raises(explorer.Fault):
        explorer.run(pipeline(arrivals(), BLOCKS * WARPS + change), ["row"])


def test_a_count_that_changes_alone_is_found():
    with pytest.raises(explorer.Fault):
        explorer.run(pipeline(arrivals() + 1), ["row"])
