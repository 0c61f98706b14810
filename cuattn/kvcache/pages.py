"""Bookkeeping of a paged cache: which pages are free, which sequence holds which, how far each has
been written, and which can be found by the tokens in them. Python and NumPy on the host; the keys
and values themselves are in store.py.

A page is free, in use (some sequence holds it), or kept for reuse: no sequence holds it, but it
can still be found by its tokens. Pages kept for reuse are evicted when no page is free: the one
released longest ago first. A sequence releases its last page first, so that a page goes before
those it follows; where one goes whose followers another sequence holds, they can no longer be
found either.

Everything that can fail is done before anything is changed. An exception that may come anywhere
(KeyboardInterrupt) is not rolled back, but statements are in such an order that it can only lose
pages: none is ever given to two sequences, and none can be found that was not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cuattn.kvcache.prefixes import Node, PrefixIndex

MAX_CHANGES = 1024  # of the page table, noted for batches that are not up to date
MAX_TOKENS = 2**31 - 1  # of a sequence, and new ones of a step: kernels count in int32


class Growth(NamedTuple):
    """What an extend is about to do."""

    rows: np.ndarray
    counts: np.ndarray  # new tokens of each row
    stop: np.ndarray  # tokens of each row afterwards
    grown: np.ndarray  # how many pages each row gets
    copies: tuple[np.ndarray, np.ndarray]  # rows and columns of pages that others read too
    source: np.ndarray  # those pages
    overwritten: list[int]  # pages that nobody else holds, but that can be found
    learned: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # rows, positions and new tokens
    num_pages: int  # that are taken


class PageManager:
    """Pages and sequences of a cache. A sequence is a row of the arrays below.

    Attributes
    ----------
    table : int32 (rows, width)
        The page table.
    length : int64 (rows,)
        Tokens there is room for.
    written : int64 (rows,)
        Leading tokens that have been written in every layer. A step that was never completed
        leaves a gap, which this does not pass.
    known, known_before : int64 (rows,)
        Leading tokens whose identity is known, and was before the last extend.
    held : int64 (rows,)
        Pages.
    new : int64 (rows,)
        Tokens of the last extend.
    indexed : int64 (rows,)
        Leading pages that have a place in the prefix index.
    layers_written : bool (num_layers, rows)
        Which layers' part of the new tokens has been written, of steps that were not written as a
        whole.
    marked : bool (rows,)
        Which rows of `layers_written` are in use.
    references : int32 (num_pages,)
        How many sequences hold a page.
    """

    COUNTS = ("length", "written", "known", "known_before", "held", "new", "indexed")

    def __init__(
        self, num_pages: int, page_size: int, num_layers: int, max_seqlen: int | None
    ) -> None:
        self.num_pages, self.page_size, self.max_seqlen = num_pages, page_size, max_seqlen
        self.hit_pages = self.missed_pages = 0
        self._shift = page_size.bit_length() - 1

        self.references = np.zeros(num_pages, np.int32)
        self.free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack, its top last
        self.num_free = num_pages
        self.kept: dict[int, None] = {}  # released longest ago first
        self.index = PrefixIndex(num_pages)

        width = 16 if max_seqlen is None else -(-max_seqlen // page_size)
        self.table = np.zeros((8, width), np.int32)
        self.tokens = np.zeros((8, 0), np.int64)
        self.length, self.written, self.known, self.known_before = np.zeros((4, 8), np.int64)
        self.held, self.new, self.indexed = np.zeros((3, 8), np.int64)
        self.layers_written = np.zeros((num_layers, 8), bool)
        self.marked = np.zeros(8, bool)
        self._any_marked = False
        # Most steps write the very sequences that were extended, a layer at a time: those rows, and
        # the layers that have not been written. This is quicker than a look at each sequence.
        self._step_rows: np.ndarray | None = None
        self._step_left: set[int] = set()
        self._step_count: int | None = None  # new tokens of each of them, where that is known
        # Each row's pages in the prefix index; where others hold the same tokens, theirs. Those may
        # be evicted, and then the row's own are found.
        self.paths: dict[int, list[Node]] = {}
        self._paths_may_end = False
        self.row_of: dict[int, int] = {}
        self.next_id = 0
        self._last_ids: list[int] | None = None  # that rows were asked for, until one is removed
        self._last_rows = np.zeros(0, np.intp)
        self._last_key = object()  # equal to no other rows'
        self._spare_rows = list(range(7, -1, -1))

        self.version = 0  # rises with every change of a length or of the table
        self._changes: list[tuple[np.ndarray, np.ndarray]] = []  # rows and columns of the table
        self._forgotten = 0  # how many changes before those are no longer noted

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and those kept for reuse."""
        return self.num_free + len(self.kept)

    def rows(self, function: str, ids: Sequence[int]) -> np.ndarray:
        """The rows of these sequences: not to be changed, since a step asks for the same ones again
        and again."""
        try:
            ids = list(ids)
            if ids == self._last_ids:
                return self._last_rows
        except (TypeError, ValueError):  # no sequence, or of arrays
            raise TypeError(
                f"PagedKVCache.{function}: ids is {ids!r}, must be a sequence of ids"
            ) from None
        rows = [self.row(function, id) for id in ids]
        if len(set(rows)) != len(rows):
            raise ValueError(f"PagedKVCache.{function}: ids has a sequence more than once")
        self._last_ids = None  # while the two do not belong together
        self._last_rows = np.array(rows, np.intp)
        self._last_key = object()
        self._last_ids = ids
        return self._last_rows

    def row(self, function: str, id: int) -> int:
        """The row of a sequence."""
        if isinstance(id, (int, np.integer)) and not isinstance(id, bool):
            row = self.row_of.get(id)
            if row is not None:
                return row
        raise KeyError(f"PagedKVCache.{function}: {id!r} is not the id of a sequence in the cache")

    def step_key(self, rows: np.ndarray) -> tuple[object, int]:
        """What tells the new tokens of the sequences that rows were last asked for: the same again
        only where each of as many sequences has as many."""
        if rows is self._step_rows and self._step_count is not None:
            return rows.size, self._step_count
        return self._last_key, self.version

    # ------------------------------------------------------------------------------------------
    # sequences

    def find(self, tokens: np.ndarray) -> list[Node]:
        """The pages that a sequence of these tokens can take over: they hold fewer tokens than it
        has, since the last one has to be run to know what comes next."""
        self.publish()
        usable = max(tokens.size - 1, 0) >> self._shift
        return self.index.find(tokens[: usable << self._shift], self.page_size)

    def add(self, tokens: np.ndarray) -> int:
        """Start a sequence; returns its id."""
        path = self.find(tokens)
        pages = np.array([node.page for node in path], np.int32)
        count = pages.size
        row = self._new_row()
        self._widen(count, tokens.size)
        for page in pages.tolist():
            self.kept.pop(page, None)
        self.references[pages] += 1
        self.table[row, :count] = pages
        self.paths[row] = path
        self.held[row] = self.indexed[row] = count
        self.length[row] = self.written[row] = count << self._shift
        self.tokens[row, : tokens.size] = tokens
        self.known[row] = tokens.size
        self._changed(np.full(count, row), np.arange(count))
        self.hit_pages += count
        self.missed_pages += (max(tokens.size - 1, 0) >> self._shift) - count
        return self._add_id(row)

    def plan_extend(
        self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray | None
    ) -> Growth:
        """What an extend has to do; raises what stands against it."""
        start = self.length[rows]
        stop = start + counts
        if self.max_seqlen is not None and stop.max(initial=0) > self.max_seqlen:
            raise ValueError(
                f"PagedKVCache.extend: a sequence would have {stop.max()} tokens, must be at most "
                f"max_seqlen={self.max_seqlen}"
            )
        if self.num_pages * self.page_size > MAX_TOKENS and (
            stop.max(initial=0) > MAX_TOKENS or counts.sum() > MAX_TOKENS
        ):
            raise ValueError(
                f"PagedKVCache.extend: n is {counts.sum()} in all, for a sequence of {stop.max()} "
                f"tokens; both must be at most {MAX_TOKENS}"
            )
        learned = None if tokens is None else self._learned(rows, start, counts, tokens)
        grown = np.maximum(((stop + self.page_size - 1) >> self._shift) - self.held[rows], 0)
        partial = np.flatnonzero((start & (self.page_size - 1) != 0) & (counts > 0))
        columns = start[partial] >> self._shift
        pages = self.table[rows[partial], columns]
        findable = self.index.contains[pages]
        copied = (self.references[pages] > 1) | findable
        if copied.any():
            copied[copied] = _all_but_the_last_owner(pages[copied], self.references)
            copies, source = (rows[partial][copied], columns[copied]), pages[copied]
            overwritten = pages[findable & ~copied].tolist()
        else:
            copies, source, overwritten = (rows[:0], rows[:0]), rows[:0], []
        needed = int(grown.sum()) + source.size
        if needed > self.available:
            raise MemoryError(
                f"PagedKVCache.extend: {needed} more pages are needed, and {self.num_free} are "
                f"free and {len(self.kept)} kept for reuse, of {self.num_pages}"
            )
        return Growth(rows, counts, stop, grown, copies, source, overwritten, learned, needed)

    def targets(self, growth: Growth) -> np.ndarray:
        """Where the pages that others read too are to be copied, before :meth:`extend`."""
        self._evict(growth.num_pages)
        return self._next_free(growth.source.size)

    def extend(self, growth: Growth, each: int | None = None) -> None:
        """Make room for new tokens, as planned; `each` for every sequence, where that is known."""
        rows, counts, grown, learned = growth.rows, growth.counts, growth.grown, growth.learned
        if growth.num_pages:
            self._widen(int((self.held[rows] + grown).max()))
        if learned is not None:
            self._widen(0, int(learned[1].max(initial=-1)) + 1)
        self.settle()
        if growth.num_pages:
            pages = self._take(growth.num_pages)
            own, pages = pages[: growth.source.size], pages[growth.source.size :]
            if own.size:
                self.table[growth.copies] = own
                np.subtract.at(self.references, growth.source, 1)
                self._changed(*growth.copies)
            if pages.size:
                new_rows = np.repeat(rows, grown)
                first = np.repeat(np.cumsum(grown) - grown, grown)
                new_columns = np.repeat(self.held[rows], grown) + np.arange(pages.size) - first
                self.table[new_rows, new_columns] = pages
                self.held[rows] += grown
                self._changed(new_rows, new_columns)
        for page in growth.overwritten:
            self._unpublish(page)
        start = self.length[rows]
        if self._any_marked:
            self.layers_written[:, rows] = False
            self.marked[rows] = False
        self.new[rows] = counts
        self.length[rows] = growth.stop
        self.known_before[rows] = self.known[rows]
        self.version += 1
        if learned is not None:
            self.tokens[learned[0], learned[1]] = learned[2]
            follows = self.known[rows] >= start
            self.known[rows[follows]] = np.maximum(self.known[rows], growth.stop)[follows]
        self._step_left = set(range(len(self.layers_written)))
        self._step_count = each
        self._step_rows = rows

    def check_room(self, function: str, tokens: np.ndarray, length: int) -> None:
        """Check that a sequence could be added with these tokens, and then extended to `length`."""
        if self.max_seqlen is not None and length > self.max_seqlen:
            raise ValueError(
                f"PagedKVCache.{function}: the sequence has {length} tokens, must be at most "
                f"max_seqlen={self.max_seqlen}"
            )
        path = self.find(tokens)
        needed = -(-length // self.page_size) - len(path)
        available = self.available - sum(node.page in self.kept for node in path)
        if needed > available:
            raise MemoryError(
                f"PagedKVCache.{function}: {needed} more pages are needed, and {available} are "
                f"free or kept for reuse, of {self.num_pages}"
            )

    def fork(self, old: int) -> int:
        """Start a sequence that holds what another does; returns its id."""
        self.publish()
        row = self._new_row()
        held = int(self.held[old])
        self.references[self.table[old, :held]] += 1
        self.table[row], self.tokens[row] = self.table[old], self.tokens[old]
        self.paths[row] = list(self.paths[old])
        for array in (self.length, self.written, self.known, self.held, self.indexed):
            array[row] = array[old]
        self._changed(np.full(held, row), np.arange(held))
        return self._add_id(row)

    def truncate(self, row: int, n: int) -> None:
        """Forget all but a sequence's first `n` tokens."""
        self.publish()
        del self.paths[row][n >> self._shift :]
        self.indexed[row] = len(self.paths[row])
        self.new[row] = 0
        for array in (self.known, self.written, self.length):
            array[row] = min(array[row], n)
        self.version += 1
        self._release(row, -(-n // self.page_size))

    def restore_row(self, row: int, tokens: np.ndarray, written: int) -> None:
        """Note that a sequence's pages have been filled, with which tokens and how far."""
        self._widen(0, tokens.size)
        self.new[row] = 0
        self.written[row] = written
        self.tokens[row, : tokens.size] = tokens
        self.known[row] = tokens.size
        self.version += 1

    def rollback(self, rows: np.ndarray) -> None:
        """Undo each sequence's last extend."""
        for row in rows[self.new[rows] > 0].tolist():
            known = self.known_before[row]
            self.truncate(row, int(self.length[row] - self.new[row]))
            self.known[row] = known

    def remove(self, id: int, row: int) -> None:
        """End a sequence."""
        self.publish()
        self._last_ids = None
        del self.row_of[id]
        self.version += 1
        self._release(row, 0)
        for name in self.COUNTS:
            getattr(self, name)[row] = 0
        del self.paths[row]
        self._spare_rows.append(row)

    def reset(self) -> None:
        """End all sequences and forget all prefixes; ids are not given again."""
        new = PageManager(self.num_pages, self.page_size, len(self.layers_written), self.max_seqlen)
        new.table = np.zeros((8, self.table.shape[1]), np.int32)
        new.next_id, new.version = self.next_id, self.version + 1
        new._forgotten = self.num_changes + 1
        self.__dict__ = new.__dict__

    # ------------------------------------------------------------------------------------------
    # what has been written

    def mark_written(self, rows: np.ndarray, layers: Iterable[int]) -> None:
        """Note that some layers' part of the new tokens has been written."""
        if rows is self._step_rows:
            self._step_left.difference_update(layers)
        else:
            self._mark(rows, list(layers))

    def check_rewritable(self, rows: np.ndarray, layer: int) -> None:
        """Check that new tokens which a layer has written before are in pages of their sequence
        alone."""
        if rows is self._step_rows and layer in self._step_left and not self._any_marked:
            return
        self.settle()
        again = self.layers_written[layer, rows] | (self.written[rows] == self.length[rows])
        for row in rows[again & (self.new[rows] > 0)].tolist():
            first = int(self.length[row] - self.new[row]) >> self._shift
            pages = self.table[row, first : int(self.held[row])]
            if (self.index.contains[pages] | (self.references[pages] > 1)).any():
                raise ValueError(
                    f"PagedKVCache.write: layer {layer} has been written for these tokens before, "
                    "and other sequences may share them since; truncate and extend to replace them"
                )

    def _mark(self, rows: np.ndarray, layers: list[int]) -> None:
        self._any_marked = True
        self.marked[rows] = True
        for layer in layers:
            self.layers_written[layer, rows] = True

    def settle(self) -> None:
        """Let `written` include the new tokens of sequences that every layer has written."""
        if self._step_rows is not None:
            rows, left = self._step_rows, self._step_left
            self._step_rows = None
            if not left:
                self._complete(rows)
            elif len(left) < len(self.layers_written):
                self._mark(rows, [i for i in range(len(self.layers_written)) if i not in left])
        if self._any_marked:
            rows = np.flatnonzero(self.marked)
            done = self.layers_written[:, rows].all(axis=0)
            self._complete(rows[done])
            done |= self.new[rows] == 0
            self.layers_written[:, rows[done]] = False
            self.marked[rows[done]] = False
            self._any_marked = not done.all()

    def _complete(self, rows: np.ndarray) -> None:
        """Let `written` include all tokens, where it included all but the new ones."""
        length, written = self.length[rows], self.written[rows]
        self.written[rows] = np.where(written == length - self.new[rows], length, written)

    def publish(self) -> None:
        """Let full pages of known tokens be found, as far as they have been written."""
        self.settle()
        if self._paths_may_end:
            for row, path in self.paths.items():
                while path and path[-1].page < 0:
                    path.pop()
                self.indexed[row] = len(path)
            self._paths_may_end = False
        full = np.minimum(self.written, self.known) >> self._shift
        for row in np.flatnonzero(full > self.indexed).tolist():
            path = self.paths[row]
            for i in range(len(path), int(full[row])):
                tokens = self.tokens[row, i << self._shift : (i + 1) << self._shift]
                parent = path[-1] if path else self.index.root
                page = int(self.table[row, i])
                node = self.index.insert(parent, tokens, page)
                path.append(node)
                if node.page in self.kept:  # the same tokens in a page that nobody holds
                    former = self.index.replace(node, page)
                    del self.kept[former]
                    self._add_free(np.array([former], np.int32))
            self.indexed[row] = len(path)

    def _unpublish(self, page: int) -> None:
        """Let a page be found no more; what was found behind it and nobody holds is free."""
        self._paths_may_end = True
        for removed in self.index.remove(page):
            if removed in self.kept:
                del self.kept[removed]
                self._add_free(np.array([removed], np.int32))

    def _learned(
        self, rows: np.ndarray, start: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What new tokens say of sequences whose tokens before them are known: rows, positions and
        tokens. Checks that they are those that were given to add_sequence."""
        known = self.known[rows]
        each = np.repeat(np.arange(rows.size), counts)
        position = (
            start[each] + np.arange(tokens.size) - np.repeat(np.cumsum(counts) - counts, counts)
        )
        told = np.flatnonzero(position < known[each])
        if told.size:
            before = self.tokens[rows[each[told]], position[told]]
            different = np.flatnonzero(before != tokens[told])
            if different.size:
                i = told[different[0]]
                raise ValueError(
                    f"PagedKVCache.extend: tokens has {tokens[i]} at position {position[i]} of a "
                    f"sequence that was added with {before[different[0]]} there, which must be the "
                    "same; truncate(id, num_tokens(id)) forgets what it was added with"
                )
        chosen = (known >= start)[each]
        return rows[each[chosen]], position[chosen], tokens[chosen]

    # ------------------------------------------------------------------------------------------
    # pages

    def _evict(self, count: int) -> None:
        """Let so many pages be free, of those that are available."""
        while self.num_free < count:
            self._unpublish(next(iter(self.kept)))

    def _next_free(self, count: int) -> np.ndarray:
        """The pages that :meth:`_take` takes next."""
        return self.free[self.num_free - count : self.num_free][::-1].copy()

    def _take(self, count: int) -> np.ndarray:
        """Take pages that are available: they have one reference."""
        self._evict(count)
        pages = self._next_free(count)
        self.num_free -= count
        self.references[pages] = 1
        return pages

    def _add_free(self, pages: np.ndarray) -> None:
        self.free[self.num_free : self.num_free + pages.size] = pages
        self.num_free += pages.size

    def _release(self, row: int, keep: int) -> None:
        """Drop a sequence's references to its pages from number `keep` on: the last first, since a
        page is found only behind those before it."""
        held = int(self.held[row])
        if keep >= held:
            return
        self.held[row] = keep
        pages = self.table[row, keep:held][::-1]
        self.references[pages] -= 1
        unused = pages[self.references[pages] == 0]
        findable = self.index.contains[unused]
        self.kept.update(dict.fromkeys(unused[findable].tolist()))
        self._add_free(unused[~findable])

    # ------------------------------------------------------------------------------------------
    # rows, and what batches read

    def reserve(self, rows: int, pages: int, tokens: int) -> None:
        """Let a manager without sequences have so many, in the first rows, with so many pages and
        tokens each."""
        while self.length.size < rows:
            self._double_rows()
        self._spare_rows = list(range(self.length.size - 1, rows - 1, -1))
        self._widen(pages, tokens)

    def _new_row(self) -> int:
        if not self._spare_rows:
            self._double_rows()
        return self._spare_rows.pop()

    def _double_rows(self) -> None:
        arrays = {name: getattr(self, name) for name in (*self.COUNTS, "table", "tokens")}
        grown = {name: np.concatenate([a, np.zeros_like(a)]) for name, a in arrays.items()}
        layers = self.layers_written
        grown["marked"] = np.concatenate([self.marked, np.zeros_like(self.marked)])
        grown["layers_written"] = np.concatenate([layers, np.zeros_like(layers)], axis=1)
        rows = self.length.size
        self.__dict__.update(grown, _spare_rows=list(range(2 * rows - 1, rows - 1, -1)))

    def _add_id(self, row: int) -> int:
        id = self.next_id
        self.next_id += 1
        self.version += 1
        self.row_of[id] = row
        return id

    def _widen(self, pages: int, tokens: int = 0) -> None:
        """Let the table hold so many pages a sequence, and so many tokens' identities."""
        if pages > self.table.shape[1]:
            self.table = _widened(self.table, pages)
        if tokens > self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, tokens)

    @property
    def num_changes(self) -> int:
        """How many changes of the table there have been."""
        return self._forgotten + len(self._changes)

    def _changed(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Note entries of the table that batches must learn of."""
        self._changes.append((rows, columns))
        if len(self._changes) > MAX_CHANGES:
            old = MAX_CHANGES // 2
            self._forgotten += old
            del self._changes[:old]

    def changed_entries(
        self, rows: np.ndarray, before: np.ndarray | None, seen: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a batch of `rows` has to learn.

        Parameters
        ----------
        rows : intp (batch,)
            The sequences it shall have.
        before : intp (batch,) or None
            Those it had after the first `seen` changes; None if none of its entries are right.

        Returns
        -------
        positions, columns : integers (entries,)
            Places in the batch, and columns of the table.
        """
        if before is None or seen < self._forgotten:
            before = np.full(rows.size, -1, np.intp)
            seen = self.num_changes
        if before is rows and seen == self.num_changes:
            return rows[:0], rows[:0]
        moved = rows[:0] if before is rows else np.flatnonzero(before != rows)
        held = self.held[rows[moved]]
        positions = [np.repeat(moved, held)]
        columns = [np.arange(positions[0].size) - np.repeat(held.cumsum() - held, held)]
        changes = self._changes[seen - self._forgotten :]
        if changes:
            position_of = np.full(self.length.size, -1, np.intp)
            position_of[rows] = np.arange(rows.size)
            position_of[rows[moved]] = -1
            for changed_rows, changed_columns in changes:
                position = position_of[changed_rows]
                positions.append(position[position >= 0])
                columns.append(changed_columns[position >= 0])
        return np.concatenate(positions), np.concatenate(columns)


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    wider = np.zeros((array.shape[0], max(width, 2 * array.shape[1])), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


def _all_but_the_last_owner(pages: np.ndarray, references: np.ndarray) -> np.ndarray:
    """Which of these owners of pages must copy: where all owners of a page are here, the last one
    may keep it.
    """
    to_copy = np.ones(pages.size, bool)
    left: dict[int, int] = {}
    for i, page in enumerate(pages.tolist()):
        owners = left.get(page, int(references[page]))
        to_copy[i] = owners > 1
        left[page] = owners - 1
    return to_copy
