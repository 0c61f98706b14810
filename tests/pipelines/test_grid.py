"""Thread blocks wait for earlier ones alone, and nothing is lost between them."""

from __future__ import annotations

import itertools

import pytest

from cuattn.gpu import dispatch
from tests.pipelines import grid


def check(blocks, groups, **options):
    options = {"fixed_splits": False, "single_tile": False, "tile_steps": 1} | options
    schedule = grid.Schedule(blocks, groups, **options)
    finished = grid.run(grid.decode_blocks(schedule))
    wanted = {n: frozenset((n, i) for i in range(count)) for n, count in enumerate(blocks)}
    assert finished == wanted
    return schedule


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("fixed_splits", [False, True])
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_every_small_schedule_ends(tiles, fixed_splits, spread):
    for blocks in itertools.product(range(1, 6), repeat=tiles):
        for groups in range(1, 10):
            check(blocks, groups, fixed_splits=fixed_splits, spread=spread)
            check(blocks, groups, fixed_splits=fixed_splits, spread=spread, tile_steps=2)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("fixed_splits", [False, True])
def test_any_schedule_ends(fixed_splits, spread, rng):
    """One long sequence beside many, more groups than blocks of keys and fewer, more splits than
    a thread block merges at once."""
    for _ in range(150):
        blocks = rng.integers(1, 4, rng.integers(1, 80))
        blocks[rng.integers(len(blocks))] = rng.integers(1, 400)
        groups = int(rng.integers(1, 150))
        tile_steps = int(rng.integers(1, 4))
        check(
            blocks.tolist(), groups, fixed_splits=fixed_splits, spread=spread, tile_steps=tile_steps
        )


@pytest.mark.parametrize("spread", [False, True])
def test_a_single_work_tile_ends(spread):
    for groups, blocks in itertools.product(
        (1, 2, 7, 16, 17, 72, 73, 132), (1, 2, 16, 17, 131, 500)
    ):
        check([blocks], groups, single_tile=True, spread=spread)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [8, 16, 40, 256])
def test_groups_that_divide_work_tiles_have_equal_splits(count, parts):
    """Where steps are spread; else the first groups' ends drift from those of the work tiles."""
    schedule = check([count] * 16, 16 * parts, spread=True)
    for group in range(16 * parts):
        ((tile, keys, _),) = schedule.splits(group)
        assert (tile, len(keys)) == (group // parts, count // parts)


@pytest.mark.parametrize("spread", [False, True])
def test_slots_stay_within_the_workspace(rng, spread):
    """A group has two: dispatch counts on it."""
    for _ in range(50):
        blocks = rng.integers(1, 40, rng.integers(1, 20)).tolist()
        groups = int(rng.integers(1, 100))
        schedule = check(blocks, groups, spread=spread, tile_steps=int(rng.integers(1, 4)))
        for group in range(groups):
            for _, _, place in schedule.splits(group):
                if place.count > 1:
                    assert 0 <= place.slot(place.index) < 2 * groups
                    if place.merges and place.merges_for_later:
                        assert place.merged_slot(place.index) < 2 * groups


def test_a_block_that_waits_for_a_later_one_is_found():
    schedule = grid.Schedule([5, 9], 4, False, False, 1)
    with pytest.raises(grid.Stuck, match=r"block 0 waits for slots"):
        grid.run(reversed(list(grid.decode_blocks(schedule))))


def test_clusters_end():
    sizes = {v.config.cluster for v in dispatch.variants("sm_90a") if v.entry == "decode_sm90"}
    for cluster, clusters, pairs in itertools.product(sizes, (1, 2, 3, 14), (1, 3)):
        finished = grid.run(grid.cluster_blocks(clusters, cluster, pairs))
        assert finished == {
            item: frozenset((item, index) for index in range(clusters))
            for item in range(pairs * cluster)
        }


SEEN = {
    "full": [range(3)] * 3,
    "causal": [range(slot, 4) for slot in range(3)],
    "window": [range(slot, slot + 2) for slot in range(3)],
    "none": [range(0), range(2), range(2)],
}


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize(("section", "late"), [(1, 3), (2, 3), (1, 2)])
@pytest.mark.parametrize("seen", SEEN)
def test_sums_in_the_order_of_keys_end(seen, section, late, blocks):
    order = grid.order_of_tiles(2, 3, section, late)
    assert sorted(order) == [(head, slot) for head in range(2) for slot in range(3)]
    grid.explore_sums_in_order(order, SEEN[seen], blocks)


def test_sums_whose_first_keys_come_last_are_found():
    order = grid.order_of_tiles(1, 3, 1, 3)[::-1]
    with pytest.raises(grid.Stuck, match="nobody can go on"):
        grid.explore_sums_in_order(order, SEEN["causal"], 2)


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("tiles", [0, 1, 2, 4])
def test_tiles_are_taken_once_each_in_every_order(blocks, tiles, resident):
    grid.explore_varlen_tiles(blocks, tiles, resident)


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize(("blocks", "late"), [(2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("tiles", [0, 1, 2, 4])
def test_tiles_are_taken_once_each_whichever_launch_begins(blocks, late, tiles, resident):
    grid.explore_varlen_tiles(blocks, tiles, resident, late)


def test_a_counter_that_opens_before_it_is_set_is_found():
    with pytest.raises(grid.Stuck):
        grid.explore_varlen_tiles(2, 4, 2, mistake="opens first")


def test_blocks_that_wait_for_another_launch_are_found():
    with pytest.raises(grid.Stuck):
        grid.explore_varlen_tiles(3, 4, 2, late=2, mistake="first block opens")
