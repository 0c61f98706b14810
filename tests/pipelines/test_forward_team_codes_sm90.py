"""What thread blocks of a team of attention/forward_team_codes_sm90.cu wait for of each other: no
schedule stops, and no slot of the ring is written while somebody has yet to load what is in it.

A thread block has three processes: warps that expand its share of the blocks of keys into slots, a
warp that copies slots into shared memory, and consumers. What else they do is in forward_sm90.py.

Counts only grow, and whoever waits for one waits until it has reached a number. So a process does
the same operations in every schedule, and one run finds out whether all of them end. It follows
which events must have happened before each operation, as explorer.py does, and a read of a slot has
to be among those before the next write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest

from tests.pipelines.grid import Stuck, count_states

STAGES = 2  # of keys, and of values, in shared memory

Ends = tuple[int, ...]  # of a group of tiles: the blocks that each thread block's own tile sees


class Wait(NamedTuple):
    """For an event of the thread block, or the one that opens the team's memory."""

    event: tuple


class Happens(NamedTuple):
    event: tuple


class Say(NamedTuple):
    """Set the own count, `expanded` or `loaded`."""

    count: str
    value: int


class Reach(NamedTuple):
    """Wait until all counts of the team are as large."""

    count: str
    value: int


class Expand(NamedTuple):
    """Write a block's slot."""

    number: int


class Copy(NamedTuple):
    """Begin to copy keys or values of a block into a stage, which ends with `full` of this use."""

    what: str
    use: int
    number: int


def expand(rank: int, team: int, slots: int, tiles: Sequence[Ends]) -> Iterator[NamedTuple]:
    """`expand`: rotates the queries of a tile after the first block, or without one."""
    number, first = rank, 0
    for tile, ends in enumerate(tiles):
        rotates = ends[rank] > 0
        first += max(ends)
        while number < first:
            yield Reach("loaded", number - slots + 1)
            yield Expand(number)
            if number < team:
                yield Wait(("opened",))
            number += team
            yield Say("expanded", number)
            if rotates:
                yield Happens(("rotated", tile))
            rotates = False
        if rotates:
            yield Happens(("rotated", tile))
    if number < team:
        yield Wait(("opened",))


def load(rank: int, tiles: Sequence[Ends]) -> Iterator[NamedTuple]:
    """`load`: values of a block after the keys of the next."""
    used = {"k": 0, "v": 0}

    def begin(what: str, number: int) -> Iterator[NamedTuple]:
        yield Wait(("empty", what, used[what] - STAGES))
        yield Copy(what, used[what], number)
        used[what] += 1

    if rank == 0:
        yield Happens(("opened",))
    yield Wait(("opened",))
    first = 0
    for ends in tiles:
        begun, end = first + max(ends) - ends[rank], first + max(ends)
        if begun > first:
            yield Say("loaded", begun)
        for number in range(begun, end):
            yield Reach("expanded", number + 1)
            yield from begin("k", number)
            if number > begun + 1:
                yield Wait(("full", "v", used["v"] - 1))
                yield Say("loaded", number - 1)
            if number > begun:
                yield from begin("v", number - 1)
        first = end
        if begun < end:
            yield from begin("v", end - 1)
            for what, stage in itertools.product("kv", range(1, STAGES + 1)):
                yield Wait(("full", what, used[what] - stage))
        yield Say("loaded", first)


def consume(rank: int, tiles: Sequence[Ends]) -> Iterator[NamedTuple]:
    """Frees a stage of values after the keys of the next block, be it of the next tile."""
    blocks = [(tile, block) for tile, ends in enumerate(tiles) for block in range(ends[rank])]
    for use, (tile, block) in enumerate(blocks):
        if block == 0:
            yield Wait(("rotated", tile))
        yield Wait(("full", "k", use))
        if use > 0:
            yield Wait(("full", "v", use - 1))
        yield Happens(("empty", "k", use))
        if use > 0:
            yield Happens(("empty", "v", use - 1))
    if blocks:
        yield Wait(("full", "v", len(blocks) - 1))


Change = Callable[[list[NamedTuple]], Iterable[NamedTuple]]


class Run:
    """A team's run. An event is a bit; what a process knows has happened before in every
    schedule."""

    def __init__(self, team: int, slots: int, tiles: Sequence[Ends], change: Change = list):
        self.team, self.slots, self.events = team, slots, 0
        self.left = {}
        for rank in range(team):
            self.left["expand", rank] = list(expand(rank, team, slots, tiles))
            self.left["load", rank] = list(change(list(load(rank, tiles))))
            self.left["consume", rank] = list(consume(rank, tiles))
        self.knows = dict.fromkeys(self.left, 0)
        # What was known at each event, at each value of each count, and the reads of each slot.
        self.happened: dict[tuple, int] = {}
        self.said = {
            (count, rank): [(rank if count == "expanded" else 0, 0)]
            for count in ("expanded", "loaded")
            for rank in range(team)
        }
        self.expanded: dict[int, int] = {}
        self.reads: dict[int, int] = {}
        while any(self.go_on(*process) for process in self.left):
            pass
        assert not any(self.left.values()), "deadlock"

    def go_on(self, role: str, rank: int) -> bool:
        left, moved = self.left[role, rank], False
        while left and self.step((role, rank), left[0]):
            del left[0]
            moved = True
        return moved

    def event(self) -> int:
        self.events += 1
        return 1 << self.events

    def own(self, event: tuple, rank: int) -> tuple:
        return event if event == ("opened",) else (*event, rank)

    def step(self, process: tuple[str, int], op: NamedTuple) -> bool:
        rank = process[1]
        match op:
            case Wait(event):
                if isinstance(event[-1], int) and event[-1] < 0:  # a stage's first use
                    return True
                if self.own(event, rank) not in self.happened:
                    return False
                self.knows[process] |= self.happened[self.own(event, rank)]
            case Happens(event):
                self.knows[process] |= self.event()
                self.happened[self.own(event, rank)] = self.knows[process]
            case Say(count, value):
                self.asks_for_counts(process)
                self.said[count, rank].append((value, self.knows[process]))
            case Reach(count, value):
                for of in range(self.team) if value > 0 else ():
                    reached = [known for said, known in self.said[count, of] if said >= value]
                    if not reached:
                        return False
                    self.asks_for_counts(process)
                    self.knows[process] |= reached[0]
            case Expand(number):
                reads = self.reads.get(number - self.slots, 0)
                assert not reads & ~self.knows[process], f"slot of {number} is taken too early"
                self.knows[process] |= self.event()
                self.expanded[number] = self.knows[process]
            case Copy(what, use, number):
                known = self.expanded.get(number)
                assert known and not known & ~self.knows[process], f"{number} is not expanded"
                read = self.event()
                self.reads[number] = self.reads.get(number, 0) | read
                self.happened["full", what, use, rank] = self.knows[process] | read
        return True

    def asks_for_counts(self, process: tuple[str, int]) -> None:
        opened = self.happened.get(("opened",), 0)
        assert opened and not opened & ~self.knows[process], "counts before they are set"


def ring_slots(team: int) -> int:
    return 1 << (2 * team - 1).bit_length()


TILES = [
    [(2, 2), (9, 9)],
    [(9, 9), (9, 9), (9, 9)],
    [(5, 7), (0, 0), (0, 6), (4, 0), (12, 12)],
    [(1, 1), (1, 0), (2, 3), (0, 1), (8, 8)],
    [(6, 7, 8), (0, 0, 3), (20, 20, 20)],
    [(3, 0, 0), (2, 2, 2), (14, 15, 16)],
]


@pytest.mark.parametrize("tiles", TILES)
def test_every_schedule_ends(tiles):
    Run(len(tiles[0]), ring_slots(len(tiles[0])), tiles)


@pytest.mark.parametrize("team", [2, 3, 4, 8])
def test_random_tiles(team, rng):
    for _ in range(100):
        most = int(rng.choice([3, 6, 3 * ring_slots(team)]))
        tiles = rng.integers(0, most + 1, (rng.integers(1, 7), team))
        if rng.integers(2):
            tiles.sort(axis=1)  # as a causal mask has them
        Run(team, ring_slots(team), [tuple(map(int, ends)) for ends in tiles])


@pytest.mark.parametrize("team", [2, 3])
def test_short_tiles_of_every_length(team):
    """Behind any two of them, all slots are used again."""
    lengths = list(itertools.product(range(4 if team == 2 else 3), repeat=team))
    for two in itertools.product(lengths, repeat=2):
        Run(team, ring_slots(team), [*two, (2 * ring_slots(team),) * team])


def without(is_left_out: Callable[[NamedTuple], bool]) -> Change:
    return lambda ops: [op for op in ops if not is_left_out(op)]


def test_two_slots_are_too_few():
    """A loader has the keys of a block before it has done with the block before the last."""
    with pytest.raises(AssertionError, match="deadlock"):
        Run(2, 2, TILES[0])


def test_what_is_said_a_block_early_is_found():
    def early(ops: list[NamedTuple]) -> list[NamedTuple]:
        return [op._replace(value=op.value + 1) if isinstance(op, Say) else op for op in ops]

    with pytest.raises(AssertionError, match="taken too early"):
        Run(2, 4, TILES[1], early)


def test_blocks_that_are_passed_over_have_to_be_said():
    tiles = [(5, 7)]
    Run(2, 3, tiles)
    with pytest.raises(AssertionError, match="deadlock"):
        Run(2, 3, tiles, without(lambda op: op == Say("loaded", 2)))


def test_blocks_are_loaded_after_they_are_expanded():
    with pytest.raises(AssertionError, match="not expanded"):
        Run(2, 4, TILES[1], without(lambda op: isinstance(op, Reach)))


def test_counts_are_said_after_they_are_set():
    with pytest.raises(AssertionError, match="before they are set"):
        Run(2, 4, [(0, 1)], without(lambda op: op == Wait(("opened",))))


@pytest.mark.parametrize(("what", "tiles"), [("k", TILES[0]), ("v", TILES[0]), ("v", TILES[1])])
def test_the_last_copies_of_a_tile_come_in_any_order(what, tiles):
    """Keys and values of the block before the last may come after those of the last."""

    def waits_for_last(ops: list[NamedTuple]) -> Iterator[NamedTuple]:
        used = 0
        for op in ops:
            used = op.use + 1 if isinstance(op, Copy) and op.what == what else used
            if op != Wait(("full", what, used - STAGES)):
                yield op

    with pytest.raises(AssertionError, match="taken too early"):
        Run(2, 8, tiles, waits_for_last)


# ------------------------------------------------------------------------------ the team's memory


class Entering(NamedTuple):
    initialised: str  # "stale", "open" by this launch's launch_id, or "closed"
    entered: int
    warps: tuple[str, ...]  # "start", "wait", "count", "close" or "in"; the first opens the memory
    launch: int


def explore_entering(warps: int, last: int) -> int:
    """All orders in which so many warps enter, in two launches with one launch_id, as a CUDA graph
    replays it; the one that has counted `last` before takes `initialised` back. How many states."""
    start = Entering("stale", 12345, ("start",) + ("wait",) * (warps - 1), 0)

    def following(state: Entering) -> list[Entering]:
        found = []
        for number, what in enumerate(state.warps):
            initialised, entered = state.initialised, state.entered
            if what == "start":
                initialised, entered, after = "open", 0, "wait"
            elif what == "wait" and initialised == "open":
                if state.warps[0] == "start":
                    raise Stuck("a warp enters before counts are set")
                after = "count"
            elif what == "count":
                after, entered = "close" if entered == last else "in", entered + 1
            elif what == "close":
                after, initialised = "in", "closed"
            else:
                continue
            others = (*state.warps[:number], after, *state.warps[number + 1 :])
            found.append(Entering(initialised, entered, others, state.launch))
        if not found:
            if state.warps != ("in",) * warps or state.initialised != "closed":
                raise Stuck(f"nobody can go on: {state}")
            if state.launch == 0:
                return [start._replace(initialised="closed", entered=state.entered, launch=1)]
        return found

    return count_states(start, following)


@pytest.mark.parametrize("warps", [2, 3, 6])
def test_all_warps_enter_once(warps):
    explore_entering(warps, warps - 1)
    for last in (warps - 2, warps):
        with pytest.raises(Stuck):
            explore_entering(warps, last)
