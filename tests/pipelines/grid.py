"""What thread blocks of a launch wait for from each other, where the device runs as few of them at
a time as it likes.

Blocks start in the order of their index, as others end: all that a kernel may count on. `run` has
the fewest run together: one. A block that waits for one that has not started stops it all; whoever
waits only for what earlier blocks have left, or itself, ends with any number of others beside it,
since others only add to what has been left.

- `decode_blocks`: decoding/schedule.cuh and combine.cuh (of decode_sm80.cu and decode_simt.cu), by
  which blocks leave partial results of work tiles that they share, and the last merges them.
- `cluster_blocks`: decode_sm90.cu with several clusters for a sequence and key head.
- `explore_sums_in_order`: blocks of backward_sm90.cu that add their tiles' parts of dq to the sums
  in memory in the order of keys. All orders are tried, as blocks take tiles by a counter.
- `VarlenTiles`: the counter that blocks of forward_sm90.cu take tiles of varlen calls from. There
  it matters who comes first, so all orders are tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class Put(NamedTuple):
    """Leave a partial result in a slot."""

    slot: int
    result: Hashable  # what it is of


class Take(NamedTuple):
    """Wait for the partial results in these slots, and merge them."""

    slots: tuple[int, ...]


class Finish(NamedTuple):
    """Write the result of a work tile, of all its blocks of keys."""

    work_tile: int
    keys: frozenset


class Stuck(AssertionError):
    """A block waits for what no block before it leaves."""


def count_states(start: Hashable, following: Callable[[Any], Iterable[Hashable]]) -> int:
    """How many states can be reached from one, where `following` gives those after each."""
    known, todo = {start}, [start]
    while todo:
        for other in following(todo.pop()):
            if other not in known:
                known.add(other)
                todo.append(other)
    return len(known)


def run(blocks: Iterable[Iterator]) -> dict[int, frozenset]:
    """Run blocks one after the other; the blocks of keys that went into each
    work tile's result.

    A block is a generator of `Put`, `Take` and `Finish`; it is sent what it takes: a frozenset of
    the blocks of keys that have gone into the partial results.
    """
    slots: dict[int, frozenset] = {}
    finished: dict[int, frozenset] = {}
    for number, block in enumerate(blocks):
        answer = None
        while True:
            try:
                operation = block.send(answer)
            except StopIteration:
                break
            answer = None
            match operation:
                case Put(slot, keys):
                    assert slot not in slots, f"block {number} overwrites slot {slot}"
                    slots[slot] = keys
                case Take(wanted):
                    missing = [slot for slot in wanted if slot not in slots]
                    if missing:
                        raise Stuck(f"block {number} waits for slots {missing}")
                    assert len(set(wanted)) == len(wanted)
                    parts = [slots.pop(slot) for slot in wanted]  # a ticket is cleared
                    answer = frozenset().union(*parts)
                    assert len(answer) == sum(map(len, parts)), "keys are merged twice"
                case Finish(tile, keys):
                    assert tile not in finished, f"work tile {tile} is written twice"
                    finished[tile] = keys
    assert not slots, f"slots {sorted(slots)} are never merged"
    return finished


# --------------------------------------------------------------------------- decoding's schedule


@dataclasses.dataclass
class SplitPlace:
    """A split's place among those of its work tile: decoding::SplitPlace, of one key head, where
    gridDim.x is 1."""

    index: int
    count: int
    alone: bool
    balanced: bool
    first_slot: int = 0

    @property
    def shift(self) -> int:
        if not self.balanced or self.count <= 16:
            return 30
        return 4 if self.count > 72 else 3

    @property
    def merges_for_later(self) -> bool:
        return self.index + 1 < self.count

    @property
    def merges(self) -> bool:
        if self.merges_for_later:
            return (self.index + 1) & ((1 << self.shift) - 1) == 0
        return self.count > 1

    def slot(self, i: int) -> int:
        return self.first_slot + (2 * i + (i == 0) if self.balanced else i)

    def merged_slot(self, i: int) -> int:
        return self.slot(i) + 1

    def merge_list(self) -> tuple[int, ...]:
        """The slots that the split's thread block merges."""
        radix, stride = 1 << self.shift, 2 if self.balanced else 1
        merged = 0 if self.merges_for_later else (self.count - 1) >> self.shift
        first = self.index + 1 - radix if self.merges_for_later else merged * radix
        length = radix if self.merges_for_later else merged + self.count - first
        if merged > 0:
            few, few_slot, few_stride = merged, self.merged_slot(radix - 1), radix * stride
            slot = self.slot(first) - merged * stride
        else:
            few, few_slot, few_stride = 1, self.slot(first), 0
            slot = self.slot(first + 1) - stride
        return tuple(
            few_slot + i * few_stride if i < few else slot + i * stride for i in range(length)
        )


@dataclasses.dataclass
class Schedule:
    """decoding::Schedule: work tiles are shared by groups of thread blocks.

    Parameters
    ----------
    blocks
        Of keys: how many each work tile has, in order.
    groups
        Of thread blocks: gridDim.y.
    fixed_splits
        Whether each block of keys is a split (num_splits was given).
    single_tile
        Whether one work tile is all there is.
    tile_steps
        Of kTileSteps: what a work tile costs beside its blocks of keys.
    spread
        kSpread: whether groups that have one step more lie evenly among the others.
    """

    blocks: Sequence[int]
    groups: int
    fixed_splits: bool
    single_tile: bool
    tile_steps: int
    spread: bool = False

    def __post_init__(self) -> None:
        self.extra = 0 if self.fixed_splits or self.single_tile else self.tile_steps
        total = sum(self.blocks) + self.extra * len(self.blocks)
        self.share, self.larger = divmod(total, self.groups)

    def first_step(self, group: int) -> int:
        more = min(group, self.larger)
        if self.spread and self.share > 0:
            more = -(-group * self.larger // self.groups)
        return group * self.share + more

    def group_of(self, step: int) -> int:
        if self.spread and self.share > 0:
            return step * self.groups // (self.share * self.groups + self.larger)
        in_larger = self.larger * (self.share + 1)
        if step < in_larger:
            return step // (self.share + 1)
        return (step - in_larger) // self.share + self.larger

    def splits(self, group: int) -> Iterator[tuple[int, range, SplitPlace]]:
        """A group's splits: the work tile, its blocks of keys, and their place."""
        begin, end = self.first_step(group), self.first_step(group + 1)
        tile_step = 0
        for tile, count in enumerate(self.blocks):
            first_block = tile_step + self.extra
            first, last = max(begin, first_block), min(end, first_block + count)
            keys = range(first - first_block, last - first_block)
            for own in [range(n, n + 1) for n in keys] if self.fixed_splits else [keys]:
                if len(own):
                    yield tile, own, self._place(group, tile_step, count, own, begin)
            tile_step = first_block + count

    def _place(self, group: int, tile: int, count: int, keys: range, begin: int) -> SplitPlace:
        if self.single_tile:
            return SplitPlace(group, min(self.groups, count), False, True)
        if len(keys) == count:
            return SplitPlace(0, 1, tile >= begin, not self.fixed_splits)
        if self.fixed_splits:
            return SplitPlace(keys.start, count, tile >= begin, False, tile)
        first = self.group_of(tile + self.tile_steps)
        last = self.group_of(tile + self.tile_steps + count - 1)
        return SplitPlace(group - first, last - first + 1, tile >= begin, True, 2 * first)


def decode_blocks(schedule: Schedule) -> Iterator[Iterator]:
    """The blocks of decode_sm80.cu: one for each group."""
    for group in range(schedule.groups):
        yield _decode_block(list(schedule.splits(group)))


def _decode_block(splits: list[tuple[int, range, SplitPlace]]) -> Iterator:
    deferred = None
    for number, (tile, own, place) in enumerate(splits):
        keys = frozenset((tile, block) for block in own)
        if place.count == 1:
            yield Finish(tile, keys)
            continue
        yield Put(place.slot(place.index), keys)
        if not place.merges:
            continue
        if place.alone or number + 1 == len(splits):
            yield from _merge(tile, place)
        else:
            assert deferred is None, "a block's first work tile alone was begun by others"
            deferred = tile, place
    if deferred is not None:
        yield from _merge(*deferred)


def _merge(tile: int, place: SplitPlace) -> Iterator:
    keys = yield Take(place.merge_list())
    if place.merges_for_later:
        yield Put(place.merged_slot(place.index), keys)
    else:
        yield Finish(tile, keys)


def cluster_blocks(clusters: int, cluster: int, pairs: int) -> Iterator[Iterator]:
    """The blocks of decode_sm90.cu, in the order of their index: those of a pair's clusters one
    after the other. A work tile stands for the columns that a block merges."""
    for pair in range(pairs):
        for block in range(clusters * cluster):
            yield _cluster_block(pair, block, clusters, cluster)


def _cluster_block(pair: int, block: int, clusters: int, cluster: int) -> Iterator:
    index, rank = divmod(block, cluster)
    tile = pair * cluster + rank
    slot = (pair * clusters + index) * cluster + rank  # part_at
    keys = frozenset([(tile, index)])
    if clusters > 1:
        yield Put(slot, keys)
        if block + cluster < clusters * cluster:
            return
        keys = yield Take(tuple((pair * clusters + i) * cluster + rank for i in range(clusters)))
    yield Finish(tile, keys)


# ----------------------------------------------------------------------------- sums in order


def order_of_tiles(heads: int, slots: int, section: int, late: int) -> list[tuple[int, int]]:
    """(head, slot) of each tile by its number: SlotOfHead of gradients/layout_sm90.cuh."""
    order = []
    for first in range(0, heads, section):
        together = range(first, min(first + section, heads))
        order += [(head, slot) for slot in range(late) for head in together]
    return order + [(head, slot) for slot in range(late, slots) for head in range(heads)]


class Adding(NamedTuple):
    """What a block is at: a tile, how many of its parts it has added, and whether others are still
    to see the last of them; and the tile that it has taken beside that."""

    tile: int | None = None
    added: int = 0
    holds: bool = False
    following: int | None = None


def explore_sums_in_order(
    order: Sequence[tuple[int, int]], seen: Sequence[range], blocks: int
) -> int:
    """Try all orders in which so many resident blocks can take tiles and add; how many states
    there are.

    Parameters
    ----------
    order
        (head, slot) of each tile, as the counter numbers them.
    seen
        The blocks of queries that a tile of each slot walks over, from the last to the first.
    blocks
        How many run. One looks for its next tile before it has added all of one, and others see
        a part some time after it has been added, before the next one.

    Raises
    ------
    Stuck
        Some order stops, or parts are added in another order than that of their slots.
    """
    before = {(slot, q): sum(q in other for other in seen[:slot])
              for slot, of in enumerate(seen) for q in of}  # fmt: skip
    queries = 1 + max((q for of in seen for q in of), default=0)
    heads = 1 + max(head for head, _ in order)

    def place(tile: int, added: int) -> tuple[int, int]:
        head, slot = order[tile]
        query = seen[slot][-1 - added]
        return head * queries + query, before[slot, query]

    def steps(taken: int, sums: tuple, own: Adding) -> Iterator[tuple[int, tuple, Adding]]:
        if own.tile is None:
            if own.following is not None:
                yield taken, sums, Adding(own.following)
            elif taken < len(order):
                yield taken + 1, sums, Adding(taken)
            return
        if own.following is None and taken < len(order):
            yield taken + 1, sums, own._replace(following=taken)
        if own.holds:
            at, _ = place(own.tile, own.added - 1)
            told = (*sums[:at], sums[at] + 1, *sums[at + 1 :])
            yield taken, told, own._replace(holds=False)
        elif own.added == len(seen[order[own.tile][1]]):
            yield taken, sums, Adding(following=own.following)
        else:
            at, count = place(own.tile, own.added)
            if sums[at] > count:
                raise Stuck(f"tile {own.tile} comes too late to its part {own.added}")
            if sums[at] == count:
                yield taken, sums, own._replace(added=own.added + 1, holds=True)

    # How many tiles are taken, how many have added to each sum, and what each block is at.
    start = (0, (0,) * (heads * queries), (Adding(),) * blocks)

    def following(at: tuple) -> list[tuple]:
        taken, sums, state = at
        found = []
        for block, own in enumerate(state):
            for now, told, after in steps(taken, sums, own):
                others = (*state[:block], after, *state[block + 1 :])
                found.append((now, told, tuple(sorted(others, key=str))))
        done = taken == len(order) and all(own == Adding() for own in state)
        if not found and not done:
            raise Stuck(f"nobody can go on: {state}")
        return found

    return count_states(start, following)


# ------------------------------------------------------------------------------ tiles by a counter


@dataclasses.dataclass(frozen=True)
class VarlenTiles:
    """The state of blocks that take tiles, one launch after the other with the same launch_id, as a
    CUDA graph replays it."""

    counter_is: str  # "closed"; "opening": a block is about to set it; "open"
    counter: int
    blocks: tuple[tuple[str, int], ...]  # of this launch: what each does next, and its tile
    done: tuple[int, ...]  # how often each tile has been worked on
    launch: int


def explore_varlen_tiles(
    blocks: int, tiles: int, resident: int, late: int = 0, mistake: str = ""
) -> int:
    """Try all orders in which blocks can take tiles in two launches; how many states there are.

    Parameters
    ----------
    blocks, tiles
        How many there are.
    resident
        How many blocks run at a time.
    late
        The last blocks are a launch of their own, of which nobody knows when it begins: as many of
        these run beside the others, or before them, as multiprocessors are free.
    mistake
        "opens first": the first block opens the counter before it sets it. "first block opens":
        where there are two launches, too.

    Raises
    ------
    Stuck
        Some order stops, or a tile is worked on twice or never.
    """
    start = VarlenTiles("closed", 12345, (("start", 0),) * blocks, (0,) * tiles, 0)

    def following(state: VarlenTiles) -> list[VarlenTiles]:
        found = list(_next_states(state, tiles, resident, late, mistake))
        if all(block[0] == "end" for block in state.blocks):
            if state.done != (1,) * tiles:
                raise Stuck(f"launch {state.launch}: tiles were worked on {state.done} times")
            if state.launch == 1:
                return []
            again = (("start", 0),) * blocks
            return [dataclasses.replace(state, blocks=again, done=(0,) * tiles, launch=1)]
        if not found:
            raise Stuck(f"nobody can go on: {state}")
        return found

    return count_states(start, following)


def _resident(state: VarlenTiles, resident: int, late: int) -> set[int]:
    """The blocks that may do the next step: those of each launch start in order, and what has
    started keeps its multiprocessor until it ends."""
    first = len(state.blocks) - late
    launches = range(first), range(first, len(state.blocks))
    started = {n for n, (what, _) in enumerate(state.blocks) if what not in ("start", "end")}
    free = len(started) < resident
    beginning = (
        next((n for n in launch if state.blocks[n][0] == "start"), None) for launch in launches
    )
    return started | {n for n in beginning if n is not None and free}


def _next_states(
    state: VarlenTiles, tiles: int, resident: int, late: int, mistake: str
) -> Iterator[VarlenTiles]:
    """What can happen next: one step of one block that runs."""
    anyone_opens = late > 0 and mistake != "first block opens"
    opens_first = mistake == "opens first"
    for number in _resident(state, resident, late):
        what, tile = state.blocks[number]
        counter_is, counter, done = state.counter_is, state.counter, state.done
        if what == "start":  # TileCounter's constructor
            begins = ("wait", 0) if late else ("work", number)
            if anyone_opens:
                # The compare and swap; that it is not tried where it would fail changes nothing.
                after = ("store", 0) if counter_is == "closed" else begins
                counter_is = "opening" if counter_is == "closed" else counter_is
            else:
                after = ("open" if opens_first else "store", 0) if number == 0 else begins
        elif what == "store":
            counter = 0 if late else len(state.blocks)
            after = (("wait", 0) if late else ("work", 0)) if opens_first else ("open", 0)
        elif what == "open":
            counter_is = "open"
            after = ("store", 0) if opens_first else (("wait", 0) if late else ("work", 0))
        elif what == "work":
            if tile >= tiles:
                after = ("end", 0)
            else:
                done = (*done[:tile], done[tile] + 1, *done[tile + 1 :])
                after = ("wait", 0)
        elif what == "wait":
            if counter_is != "open":
                continue
            after = ("take", 0)
        elif what == "take":
            after, counter = ("took", counter), counter + 1
        else:
            if tile == tiles + len(state.blocks) - 1:
                counter_is = "closed"  # the last: a replay must not find it open
            after = ("work", tile)
        if max(done, default=0) > 1:
            raise Stuck(f"a tile is worked on twice: {state}")
        every = (*state.blocks[:number], after, *state.blocks[number + 1 :])
        yield VarlenTiles(counter_is, counter, every, done, state.launch)
