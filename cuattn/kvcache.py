"""A cache of keys and values in pages: many sequences of any length, sharing what they have in
common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cuattn._arrays import FLOAT_DTYPES, acc_dtype, as_arrays, check_given
from cuattn._backend import backend, contiguous, contiguous_last_axis, reshaped
from cuattn._spec import MAX_HEAD_DIM
from cuattn.decoding import MAX_PAGE_SIZE

__all__ = ["PagedKVCache"]

MAX_CHANGES = 1024  # of the page table, noted for batches that are not up to date


class PagedKVCache:
    """Keys and values of many sequences, in pages that are handed out, shared and taken back.

    A step of generation is ``extend`` (room for the new tokens), ``write`` in each layer, and
    :func:`cuattn.paged_attention` over ``pages(layer)`` with ``page_table(ids)`` and
    ``seq_lens(ids)``. Sequences that begin with the same tokens share the pages that hold them
    [1]_ [2]_; a page is copied when a sequence is about to write into one that others read (copy on
    write). Bookkeeping is done on the host, in NumPy, and never waits for the device.

    Parameters
    ----------
    num_pages : int
        Pages of each layer.
    page_size : int
        Tokens in a page: a power of two up to 256.
    num_kv_heads, head_dim : int
        Of the keys.
    num_layers : int
        Layers; a page has a part in each.
    head_dim_v : int, optional
        Of the values; default `head_dim`.
    dtype : dtype
        float16, bfloat16, float32 or float64.
    quantization : None
        Must be None for now.
    max_seqlen : int, optional
        The most tokens a sequence may have: the page table then has its full width from the start,
        as a captured CUDA graph needs. Default: it is widened as sequences grow.
    xp : module
        ``numpy`` (the default) or ``cupy``: where the pages are. CuPy's current device.

    Attributes
    ----------
    hit_pages, missed_pages : int
        Of the full pages that ``add_sequence`` looked for, how many it found, and how many not.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for Large Language Model Serving with
       PagedAttention", 2023.
    .. [2] Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cache = cuattn.PagedKVCache(64, 16, num_kv_heads=2, head_dim=8, dtype=np.float32)
    >>> a = cache.add_sequence()
    >>> cache.extend([a], 20)
    >>> new = np.random.default_rng(0).standard_normal((20, 2, 8), dtype=np.float32)
    >>> cache.write(0, [a], new, new)
    >>> q = np.ones((1, 4, 8), np.float32)
    >>> out = cuattn.paged_attention(q, *cache.pages(0), cache.page_table([a]), cache.seq_lens([a]))
    >>> cache  # doctest: +NORMALIZE_WHITESPACE
    PagedKVCache(64 pages of 16 tokens: 2 in use, 0 kept for reuse, 62 free; 1 sequence; prefix hits
    0 of 0 pages)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        head_dim_v: int | None = None,
        dtype: Any,
        quantization: None = None,
        max_seqlen: int | None = None,
        xp: ModuleType | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        for name, value, largest in (
            ("num_pages", num_pages, 2**31 - 1),
            ("page_size", page_size, MAX_PAGE_SIZE),
            ("num_kv_heads", num_kv_heads, None),
            ("head_dim", head_dim, MAX_HEAD_DIM),
            ("head_dim_v", head_dim_v, MAX_HEAD_DIM),
            ("num_layers", num_layers, None),
            ("max_seqlen", 1 if max_seqlen is None else max_seqlen, None),
        ):
            if value < 1 or (largest is not None and value > largest):
                allowed = "at least 1" if largest is None else f"from 1 to {largest}"
                raise ValueError(f"PagedKVCache: {name} is {value}, must be {allowed}")
        if page_size & (page_size - 1):
            raise ValueError(f"PagedKVCache: page_size is {page_size}, must be a power of two")
        self.dtype = np.dtype(dtype)
        if self.dtype not in FLOAT_DTYPES:
            allowed = ", ".join(FLOAT_DTYPES.values())
            raise TypeError(f"PagedKVCache: dtype is {self.dtype}, must be one of {allowed}")
        if quantization is not None:
            raise NotImplementedError(
                f"PagedKVCache: quantization={quantization!r} is not implemented yet; use None"
            )
        self.num_pages, self.page_size, self.num_layers = num_pages, page_size, num_layers
        self.max_seqlen = max_seqlen
        self.hit_pages = self.missed_pages = 0
        self._shift = page_size.bit_length() - 1
        self._xp = np if xp is None else xp
        self._device = backend(self._xp, "kvcache")
        layout = (num_layers, num_pages, page_size, num_kv_heads)
        self._k = self._xp.empty((*layout, head_dim), self.dtype)
        self._v = self._xp.empty((*layout, head_dim_v), self.dtype)
        self._pages = list(zip(self._k, self._v, strict=True))  # a layer's: views

        # A page is free, in use (references > 0), or kept for reuse: findable by its content, and
        # referenced by nobody.
        self._references = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack, its top last
        self._num_free = num_pages
        self._kept: dict[int, None] = {}  # least recently used first
        self._page_of: dict[bytes, int] = {}  # by the digest of all tokens up to a page's end
        self._digest_of: dict[int, bytes] = {}
        self._findable = np.zeros(num_pages, bool)

        # A sequence is a row of these arrays.
        width = 16 if max_seqlen is None else -(-max_seqlen // page_size)
        self._table = np.zeros((8, width), np.int32)
        self._tokens = np.zeros((8, 0), np.int64)
        self._length = np.zeros(8, np.int64)  # tokens there is room for
        self._written = np.zeros(8, np.int64)  # of them, those that have been written
        self._known = np.zeros(8, np.int64)  # leading tokens whose identity is known
        self._held = np.zeros(8, np.int64)  # pages
        self._new = np.zeros(8, np.int64)  # tokens of the last extend
        self._hashed = np.zeros(8, np.int64)  # pages with a digest
        self._digests: dict[int, list[bytes]] = {}
        self._row_of: dict[int, int] = {}
        self._last_ids: list[int] | None = None  # that rows were asked for, until one is removed
        self._last_rows = np.zeros(0, np.intp)
        self._spare_rows = list(range(7, -1, -1))
        self._next_id = 0

        # What page_table, seq_lens and write give to kernels: one Batch for each number of
        # sequences, brought up to date by the changes since.
        self._version = 0
        self._changes: list[tuple[np.ndarray, np.ndarray]] = []  # rows and columns of the table
        self._batches: dict[int, _BatchState] = {}

    # ------------------------------------------------------------------------------------------
    # sequences

    def add_sequence(self, tokens: Any = None) -> int:
        """Start a sequence.

        Parameters
        ----------
        tokens : sequence of int, optional
            The tokens it will begin with. Full pages that some sequence has written for the same
            beginning are taken over: the new sequence then has that many tokens already
            (``seq_lens``), always fewer than `tokens`, since running the last one is what gives the
            next. Without it nothing is shared, now or later.

        Returns
        -------
        int
            The sequence's id.
        """
        known = np.zeros(0, np.int64) if tokens is None else _tokens("add_sequence", tokens)
        if self.max_seqlen is not None and known.size > self.max_seqlen:
            raise ValueError(
                f"PagedKVCache.add_sequence: tokens has {known.size} tokens, must be at most "
                f"max_seqlen={self.max_seqlen}"
            )
        self._hash_written_pages()
        usable = max(known.size - 1, 0) >> self._shift
        digests, pages = [], []
        digest = b""
        for i in range(usable):
            digest = _digest(digest, known[i << self._shift : (i + 1) << self._shift])
            page = self._page_of.get(digest)
            if page is None:
                break
            digests.append(digest)
            pages.append(page)
        self.hit_pages += len(pages)
        self.missed_pages += usable - len(pages)

        row = self._new_row()
        self._widen(len(pages), known.size)
        for page in pages:
            self._kept.pop(page, None)
        self._references[pages] += 1
        self._table[row, : len(pages)] = pages
        self._held[row] = self._hashed[row] = len(pages)
        self._length[row] = self._written[row] = len(pages) << self._shift
        self._tokens[row, : known.size] = known
        self._known[row] = known.size
        self._digests[row] = digests
        self._changed(np.full(len(pages), row), np.arange(len(pages)))
        return self._add_id(row)

    def extend(self, ids: Sequence[int], n: Any, *, tokens: Any = None) -> None:
        """Make room for `n` more tokens in each sequence, which ``write`` then fills.

        Pages that others read too are copied before they are written into.

        Parameters
        ----------
        ids : sequence of int
            Sequences, each once.
        n : int or sequence of int
            How many tokens, for all or for each.
        tokens : sequence of int, optional
            The new tokens, sequence by sequence, where ``add_sequence`` was not told of them: it
            makes their pages findable, as long as all tokens before them are known.

        Raises
        ------
        MemoryError
            Not enough pages are free or kept for reuse; nothing has changed.
        KeyError, ValueError
            Unknown ids, or arguments that do not fit; nothing has changed.
        """
        rows = self._rows("extend", ids)
        given = np.asarray(n)
        if given.shape not in ((), rows.shape) or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(
                f"PagedKVCache.extend: n is {n}, must be an integer or one for each of the "
                f"{rows.size} sequences"
            )
        counts = np.broadcast_to(given.astype(np.int64), rows.shape)
        if counts.size and counts.min() < 0:
            raise ValueError(f"PagedKVCache.extend: n is {n}, must be at least 0")
        start = self._length[rows]
        stop = start + counts
        if self.max_seqlen is not None and stop.size and stop.max() > self.max_seqlen:
            raise ValueError(
                f"PagedKVCache.extend: a sequence would have {stop.max()} tokens, must be at most "
                f"max_seqlen={self.max_seqlen}"
            )
        if tokens is not None:
            tokens = _tokens("extend", tokens)
            if tokens.size != counts.sum():
                raise ValueError(
                    f"PagedKVCache.extend: tokens has {tokens.size} tokens, must be n's "
                    f"{counts.sum()}"
                )
        held = self._held[rows]
        wanted = np.maximum(((stop + self.page_size - 1) >> self._shift) - held, 0)
        partial = np.flatnonzero((start & (self.page_size - 1) != 0) & (counts > 0))
        columns = start[partial] >> self._shift
        pages = self._table[rows[partial], columns]
        touched = (self._references[pages] > 1) | self._findable[pages]
        to_copy = _all_but_the_last_owner(pages[touched], self._references)
        needed = int(wanted.sum()) + int(to_copy.sum())
        if needed > self._num_free + len(self._kept):
            raise MemoryError(
                f"PagedKVCache.extend: {needed} more pages are needed, and {self._num_free} are "
                "free and "
                f"{len(self._kept)} kept for reuse, of {self.num_pages}"
            )

        self._widen(int((held + wanted).max(initial=0)))
        self._written[rows] = start
        if touched.any():
            self._copy_on_write(rows[partial][touched], columns[touched], to_copy)
        growing = np.flatnonzero(wanted)
        if growing.size:
            grow, have = wanted[growing], held[growing]
            new_rows = np.repeat(rows[growing], grow)
            first = np.repeat(np.cumsum(grow) - grow, grow)
            new_columns = np.repeat(have, grow) + np.arange(new_rows.size) - first
            self._table[new_rows, new_columns] = self._take_pages(new_rows.size)
            self._held[rows[growing]] = have + grow
            self._changed(new_rows, new_columns)
        self._length[rows] = stop
        self._new[rows] = counts
        if tokens is not None:
            self._learn(rows, start, counts, tokens)
        self._version += 1

    def write(
        self,
        layer: int,
        ids: Sequence[int],
        k: Any,
        v: Any,
        *,
        rope: tuple[Any, Any] | None = None,
        interleaved: bool = False,
    ) -> None:
        """Put one layer's keys and values of the tokens that the last ``extend`` made room for into
        their slots.

        On a GPU this is one kernel, which finds the slots from the arrays that ``page_table(ids)``
        and ``seq_lens(ids)`` return: captured in a CUDA graph, it writes wherever they point when
        the graph runs. They must be up to date when it is captured: after an ``extend``, call
        ``page_table(ids)`` first.

        Parameters
        ----------
        layer : int
            The layer.
        ids : sequence of int
            The sequences, in the order of k's tokens.
        k : array (total, num_kv_heads, head_dim) or (batch, n, num_kv_heads, head_dim)
            Keys of the new tokens, sequence by sequence; the second form where each sequence has n.
        v : array (total, num_kv_heads, head_dim_v) or (batch, n, num_kv_heads, head_dim_v)
            Values.
        rope : (cos, sin), optional
            Tables (max_position, rotary_dim // 2), float32 (float64 for a float64 cache): pairs of
            the first rotary_dim features of k are rotated by their token's position on the way
            [1]_.
        interleaved : bool
            The pairs are neighbours (2i, 2i + 1) and not (i, i + rotary_dim // 2).

        References
        ----------
        .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
        """
        name = "PagedKVCache.write"
        check_given(name, k=k, v=v)
        rows = self._rows("write", ids)
        cos, sin = (None, None) if rope is None else rope
        xp, (k, v, cos, sin) = as_arrays(name, k=k, v=v, cos=cos, sin=sin)
        if xp is not self._xp:
            raise ValueError(f"{name}: k is an array of {xp.__name__}, must be {self._xp.__name__}")
        counts = self._new[rows].tolist()
        total = sum(counts)
        for label, array, pages in (("k", k, self._k), ("v", v, self._v)):
            shape, token = array.shape, pages.shape[3:]
            if shape != (total, *token) and not (
                shape[2:] == token and [shape[1]] * shape[0] == counts
            ):
                raise ValueError(
                    f"{name}: {label} has shape {shape}, must hold the {total} new tokens of "
                    f"{len(rows)} "
                    f"sequences: {(total, *token)}"
                )
            if array.dtype != self.dtype:
                raise TypeError(f"{name}: {label} has dtype {array.dtype}, must be {self.dtype}")
        if rope is not None:
            self._check_rope(name, cos, sin, rows)
            rope = (contiguous(xp, cos), contiguous(xp, sin))
        if total:
            self._device.write(
                *(_flat(xp, array, total) for array in (k, v)),
                *self.pages(layer),
                self._batch(ids, rows),
                rope=rope,
                interleaved=bool(interleaved),
            )
        if layer == self.num_layers - 1:
            self._written[rows] = self._length[rows]

    def fork(self, id: int) -> int:
        """Start a sequence that has what another has; they share pages until one of them writes.

        Returns
        -------
        int
            The new sequence's id.
        """
        (old,) = self._rows("fork", [id])
        self._hash_written_pages()
        row = self._new_row()
        for array in (self._length, self._written, self._known, self._held, self._hashed):
            array[row] = array[old]
        self._new[row] = 0
        self._table[row], self._tokens[row] = self._table[old], self._tokens[old]
        self._digests[row] = list(self._digests[old])
        held = int(self._held[row])
        self._references[self._table[row, :held]] += 1
        self._changed(np.full(held, row), np.arange(held))
        return self._add_id(row)

    def truncate(self, id: int, n: int) -> None:
        """Forget all but a sequence's first `n` tokens, and give back the pages they do not
        need."""
        (row,) = self._rows("truncate", [id])
        if not 0 <= n <= self._length[row]:
            raise ValueError(
                f"PagedKVCache.truncate: n is {n}, must be from 0 to the sequence's "
                f"{self._length[row]} tokens"
            )
        self._hash_written_pages()
        self._release(row, -(-n // self.page_size))
        for array in (self._length, self._written, self._known):
            array[row] = min(array[row], n)
        self._new[row] = 0
        del self._digests[row][n >> self._shift :]
        self._hashed[row] = len(self._digests[row])
        self._version += 1

    def remove(self, id: int) -> None:
        """End a sequence. Its pages are free again; full ones of known tokens are kept for reuse as
        long as there is room.
        """
        (row,) = self._rows("remove", [id])
        self._hash_written_pages()
        self._release(row, 0)
        del self._digests[row], self._row_of[id]
        self._last_ids = None
        for array in (self._length, self._written, self._known, self._hashed, self._new):
            array[row] = 0
        self._spare_rows.append(int(row))
        self._version += 1

    # ------------------------------------------------------------------------------------------
    # what kernels read

    def page_table(self, ids: Sequence[int]) -> Any:
        """The page table of some sequences.

        Returns
        -------
        int32 array (len(ids), max_pages)
            On the cache's device, and the cache's own: the next call for as many sequences, of
            this, of ``seq_lens`` or of ``write``, updates it in place, so that a captured CUDA
            graph sees what has changed. It is a new array only after it had to be widened, which
            `max_seqlen` prevents.
        """
        return self._batch(ids, self._rows("page_table", ids)).page_table

    def seq_lens(self, ids: Sequence[int]) -> Any:
        """How many tokens each of some sequences has: int32 array (len(ids),), updated in place as
        ``page_table``'s.
        """
        return self._batch(ids, self._rows("seq_lens", ids)).seq_lens

    def pages(self, layer: int) -> tuple[Any, Any]:
        """One layer's pages of keys and of values: (num_pages, page_size, num_kv_heads, head_dim),
        views.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(
                f"PagedKVCache: layer is {layer}, must be from 0 to {self.num_layers - 1}"
            )
        return self._pages[layer]

    def __len__(self) -> int:
        return len(self._row_of)

    def __repr__(self) -> str:
        kept = len(self._kept)
        used = self.num_pages - self._num_free - kept
        looked = self.hit_pages + self.missed_pages
        sequences = f"{len(self)} sequence" + ("" if len(self) == 1 else "s")
        return (
            f"PagedKVCache({self.num_pages} pages of {self.page_size} tokens: {used} in use, "
            f"{kept} kept for reuse, "
            f"{self._num_free} free; {sequences}; prefix hits {self.hit_pages} of {looked} pages)"
        )

    # ------------------------------------------------------------------------------------------
    # pages

    def _take_pages(self, count: int) -> np.ndarray:
        """Free pages, from the stack's top down, then those kept for reuse, least recently used
        first. The caller has made sure there are enough.
        """
        for _ in range(count - self._num_free):
            page = next(iter(self._kept))
            del self._kept[page]
            self._forget(page)
            self._free[self._num_free] = page
            self._num_free += 1
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._references[pages] = 1
        return pages

    def _give_back(self, pages: np.ndarray) -> None:
        """Drop one reference to each of these pages, which are different ones, the most worth
        keeping last.
        """
        self._references[pages] -= 1
        unused = pages[self._references[pages] == 0]
        findable = self._findable[unused]
        self._kept.update(dict.fromkeys(unused[findable].tolist()))
        free = unused[~findable]
        self._free[self._num_free : self._num_free + free.size] = free
        self._num_free += free.size

    def _release(self, row: int, keep: int) -> None:
        """Give back a sequence's pages from number `keep` on: the last first, since a page is found
        only after those before it.
        """
        held = int(self._held[row])
        if keep < held:
            self._give_back(self._table[row, keep:held][::-1])
            self._held[row] = keep

    def _copy_on_write(self, rows: np.ndarray, columns: np.ndarray, to_copy: np.ndarray) -> None:
        """Make pages that are about to be written into their sequences' own."""
        old = self._table[rows, columns]
        for page in old[~to_copy].tolist():  # nobody else reads it, but its content will change
            if self._findable[page]:
                self._forget(page)
        if to_copy.any():
            rows, columns, old = rows[to_copy], columns[to_copy], old[to_copy]
            new = self._take_pages(old.size)
            self._device.copy_pages(self._k, self._v, old.tolist(), new.tolist())
            self._table[rows, columns] = new
            np.subtract.at(self._references, old, 1)
            self._changed(rows, columns)

    # ------------------------------------------------------------------------------------------
    # prefixes

    def _hash_written_pages(self) -> None:
        """Make full pages of known tokens findable once they have been written."""
        full = np.minimum(self._written, self._known) >> self._shift
        for row in np.flatnonzero(full > self._hashed).tolist():
            digests = self._digests[row]
            for i in range(len(digests), int(full[row])):
                part = self._tokens[row, i << self._shift : (i + 1) << self._shift]
                digest = _digest(digests[-1] if digests else b"", part)
                digests.append(digest)
                page = int(self._table[row, i])
                if digest not in self._page_of and not self._findable[page]:
                    self._page_of[digest] = page
                    self._digest_of[page] = digest
                    self._findable[page] = True
            self._hashed[row] = len(digests)

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
        self._findable[page] = False

    def _learn(
        self, rows: np.ndarray, start: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Note the identity of new tokens, where that of all before them is known."""
        follows = self._known[rows] == start
        each = np.repeat(np.arange(rows.size), counts)
        position = (
            start[each] + np.arange(tokens.size) - np.repeat(np.cumsum(counts) - counts, counts)
        )
        chosen = follows[each]
        self._widen(0, int(position.max(initial=-1)) + 1)
        self._tokens[rows[each[chosen]], position[chosen]] = tokens[chosen]
        self._known[rows[follows]] = (start + counts)[follows]

    # ------------------------------------------------------------------------------------------
    # rows and batches

    def _rows(self, function: str, ids: Sequence[int]) -> np.ndarray:
        """The rows of these sequences: not to be changed, since a step asks for the same ones again
        and again."""
        ids = list(ids)
        if ids == self._last_ids:
            return self._last_rows
        row_of = self._row_of
        try:
            rows = [row_of[id] for id in ids]
        except KeyError as error:
            raise KeyError(
                f"PagedKVCache.{function}: {error.args[0]!r} is not the id of a sequence in the "
                "cache"
            ) from None
        if len(set(rows)) != len(rows):
            raise ValueError(f"PagedKVCache.{function}: ids has a sequence more than once")
        self._last_ids, self._last_rows = ids, np.array(rows, np.intp)
        return self._last_rows

    def _new_row(self) -> int:
        if not self._spare_rows:
            rows = len(self._length)
            for name in ("table", "tokens", "length", "written", "known", "held", "new", "hashed"):
                array = getattr(self, f"_{name}")
                setattr(self, f"_{name}", np.concatenate([array, np.zeros_like(array)]))
            self._spare_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._spare_rows.pop()

    def _add_id(self, row: int) -> int:
        self._row_of[self._next_id] = row
        self._next_id += 1
        self._version += 1
        return self._next_id - 1

    def _widen(self, pages: int, tokens: int = 0) -> None:
        """Let the table hold so many pages a sequence, and so many tokens' identities."""
        if pages > self._table.shape[1]:
            self._table = _widened(self._table, pages)
        if tokens > self._tokens.shape[1]:
            self._tokens = _widened(self._tokens, tokens)

    def _changed(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Note entries of the table that batches must learn of; those that have not kept up start
        afresh.
        """
        self._changes.append((rows, columns))
        if len(self._changes) > MAX_CHANGES:
            old = MAX_CHANGES // 2
            del self._changes[:old]
            for state in self._batches.values():
                if state.seen < old:
                    state.rows = np.full(state.rows.size, -1, np.intp)
                state.seen = max(state.seen - old, 0)

    def _batch(self, ids: Sequence[int], rows: np.ndarray) -> Any:
        """The up-to-date Batch of these sequences, in this order."""
        state = self._batches.get(rows.size)
        width = self._table.shape[1]
        if state is None or state.batch.page_table.shape[1] != width:
            state = _BatchState(
                self._device.Batch(self._k, rows.size, width), np.full(rows.size, -1, np.intp)
            )
            self._batches[rows.size] = state
        if state.version == self._version and (state.rows is rows or (state.rows == rows).all()):
            return state.batch

        moved = np.flatnonzero(state.rows != rows)
        held = self._held[rows[moved]]
        positions = [np.repeat(moved, held)]
        columns = [np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)]
        position_of = np.full(len(self._length), -1, np.intp)
        position_of[rows] = np.arange(rows.size)
        position_of[rows[moved]] = -1
        for changed_rows, changed_columns in self._changes[state.seen :]:
            position = position_of[changed_rows]
            positions.append(position[position >= 0])
            columns.append(changed_columns[position >= 0])
        position, column = np.concatenate(positions), np.concatenate(columns)
        cu_new = np.zeros(rows.size + 1, np.int64)
        np.cumsum(self._new[rows], out=cu_new[1:])
        state.batch.update(
            position, column, self._table[rows[position], column], self._length[rows], cu_new
        )
        state.rows, state.version, state.seen = rows, self._version, len(self._changes)
        return state.batch

    def _check_rope(self, name: str, cos: Any, sin: Any, rows: np.ndarray) -> None:
        head_dim = self._k.shape[-1]
        dtype = acc_dtype(self.dtype)
        for label, table in (("rope[0]", cos), ("rope[1]", sin)):
            if table is None or table.ndim != 2 or table.shape[1] > head_dim // 2:
                got = "None" if table is None else f"shape {table.shape}"
                raise ValueError(
                    f"{name}: {label} has {got}, must be (max_position, up to {head_dim // 2})"
                )
            if table.dtype != dtype:
                raise TypeError(f"{name}: {label} has dtype {table.dtype}, must be {dtype}")
        if sin.shape != cos.shape:
            raise ValueError(
                f"{name}: rope[1] has shape {sin.shape}, must be rope[0]'s {cos.shape}"
            )
        longest = int(self._length[rows].max(initial=0))
        if longest > cos.shape[0]:
            raise ValueError(
                f"{name}: rope has {cos.shape[0]} positions, must have the sequences' {longest}"
            )


class _BatchState:
    """A Batch and how far it has kept up."""

    def __init__(self, batch: Any, rows: np.ndarray) -> None:
        self.batch = batch
        self.rows = rows
        self.version = -1
        self.seen = 0  # changes


def _tokens(function: str, tokens: Any) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(
            f"PagedKVCache.{function}: tokens has shape {tokens.shape} and dtype {tokens.dtype}, "
            "must be integers in one axis"
        )
    return tokens.astype(np.int64)


def _flat(xp: ModuleType, array: Any, total: int) -> Any:
    """New keys or values (total, heads, features) with contiguous features."""
    array = contiguous_last_axis(xp, array)
    return array if array.ndim == 3 else reshaped(xp, array, (total, *array.shape[2:]))


def _digest(parent: bytes, tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


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
