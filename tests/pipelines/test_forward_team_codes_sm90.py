"""What thread blocks of a team of attention/forward_team_codes_sm90.cu wait for of each other: in
every order they end, and no slot is written that somebody has yet to load.

A thread block has two processes: one expands every so many blocks of keys, over all tiles, and
counts them; the other loads those blocks that its own tiles see. What each does within its thread
block is in forward_sm90.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest


class Op(NamedTuple):
    """A step of a process: it waits until `needs` of the counts is reached, and then says `count`,
    if it is not None. `loads` is the block whose keys and values have all come by then."""

    needs: int = 0
    count: int | None = None
    writes: int | None = None
    loaded: int | None = None


class Tile(NamedTuple):
    """A group of tiles: the end of the blocks that each thread block's own tile sees; 0 for one
    that does not exist or sees none."""

    ends: tuple[int, ...]


def expander(rank: int, team: int, slots: int, tiles: Sequence[Tile]) -> Iterator[Op]:
    """`expand`: it needs a count of blocks that all have loaded."""
    total = sum(max(tile.ends) for tile in tiles)
    for number in range(rank, total, team):
        yield Op(needs=number - slots + 1, count=number + team, writes=number)


def loader(rank: int, tiles: Sequence[Tile]) -> Iterator[Op]:
    """`load`: it needs the least of the expanders' next blocks."""
    first = 0
    for tile in tiles:
        begin, end = first + max(tile.ends) - tile.ends[rank], first + max(tile.ends)
        if begin > first:
            yield Op(count=begin, loaded=begin - 1)
        for number in range(begin, end):
            yield Op(needs=number + 1)  # keys
            if number > begin + 1:  # the values of the block before the last have come
                yield Op(count=number - 1, loaded=number - 2)
        first = end
        yield Op(count=first, loaded=first - 1)


def explore(team: int, slots: int, tiles: Sequence[Tile], change=lambda op: op) -> None:
    """Go through all orders; raises where one does not end, or a slot is taken too early.

    Which order counts have changed in does not matter, so that a state is how far each process is.
    """
    expanders = [list(expander(rank, team, slots, tiles)) for rank in range(team)]
    loaders = [[change(op) for op in loader(rank, tiles)] for rank in range(team)]
    seen_by = [
        [number for tile, first in zip(tiles, firsts(tiles), strict=True)
         for number in range(first + max(tile.ends) - tile.ends[rank], first + max(tile.ends))]
        for rank in range(team)
    ]  # fmt: skip
    start = (0,) * 2 * team
    reached, left = {start}, [start]
    while left:
        state = left.pop()
        said = [
            next(
                (op.count for op in loaders[r][: state[team + r]][::-1] if op.count is not None), 0
            )
            for r in range(team)
        ]
        have = [
            max((op.loaded for op in loaders[r][: state[team + r]] if op.loaded is not None),
                default=-1)
            for r in range(team)
        ]  # fmt: skip
        following = [expanders[r][state[r] - 1].count if state[r] else r for r in range(team)]
        moved = False
        for process in range(2 * team):
            rank = process % team
            ops = (expanders if process < team else loaders)[rank]
            if state[process] == len(ops):
                continue
            op = ops[state[process]]
            if op.needs > min(said if process < team else following):
                continue
            if op.writes is not None:
                old = op.writes - slots
                assert all(old not in seen_by[r] or have[r] >= old for r in range(team)), "taken"
            moved = True
            after = (*state[:process], state[process] + 1, *state[process + 1 :])
            if after not in reached:
                reached.add(after)
                left.append(after)
        if not moved:
            ends = [len(ops) for ops in (*expanders, *loaders)]
            assert list(state) == ends, "deadlock"


def firsts(tiles: Sequence[Tile]) -> Iterator[int]:
    return itertools.accumulate((max(tile.ends) for tile in tiles[:-1]), initial=0)


TILES = [
    (Tile((9, 9)),),
    (Tile((5, 7)), Tile((0, 0)), Tile((0, 6)), Tile((4, 0))),
    (Tile((1, 1)), Tile((1, 0)), Tile((2, 3)), Tile((0, 1)), Tile((8, 8))),
    (Tile((6, 7, 8)), Tile((0, 0, 3))),
    (Tile((3, 0, 0)), Tile((2, 2, 2)), Tile((4, 5, 6))),
]


@pytest.mark.parametrize("tiles", TILES)
def test_every_order_ends(tiles):
    team = len(tiles[0].ends)
    for slots in {3, 4, 1 << (2 * team - 1).bit_length()}:
        explore(team, slots, tiles)


def test_two_slots_are_too_few():
    """A loader has the keys of a block before it has done with the block before the last."""
    with pytest.raises(AssertionError, match="deadlock"):
        explore(2, 2, TILES[0])


def test_what_is_said_a_block_early_is_found():
    def early(op: Op) -> Op:
        return op if op.count is None else op._replace(count=op.count + 1)

    with pytest.raises(AssertionError, match="taken"):
        explore(2, 4, TILES[0], early)


def test_blocks_that_are_passed_over_have_to_be_said():
    def silent(op: Op) -> Op:
        return op._replace(count=None) if op.count == 2 else op

    tiles = (Tile((5, 7)),)
    explore(2, 3, tiles)
    with pytest.raises(AssertionError, match="deadlock"):
        explore(2, 3, tiles, silent)
