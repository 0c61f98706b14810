"""PagedKVCache: what the user sees of pages.py, which keeps the books, and store.py, which has the
arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from cuattn._arrays import (
    as_arrays,
    check_bool,
    check_float_dtype,
    check_given,
    check_integer,
    check_unmasked,
    on_gpu,
)
from cuattn._backend import contiguous
from cuattn._decoding_spec import MAX_PAGE_SIZE
from cuattn._errors import explain_errors
from cuattn._spec import MAX_HEAD_DIM
from cuattn._typing import Array, Integers
from cuattn.kvcache import files, snapshot
from cuattn.kvcache.append import check_rope, flat, pair
from cuattn.kvcache.exclusive import Exclusive, exclusive
from cuattn.kvcache.layout import KVQuantization, as_quantization, sides
from cuattn.kvcache.pages import MAX_TOKENS, PageManager
from cuattn.kvcache.store import PageStore


@dataclasses.dataclass(frozen=True, eq=False)  # each is one of its own, in lists and sets
class SwappedSequence:
    """A sequence on the host: what :meth:`PagedKVCache.swap_out` returns.

    Attributes
    ----------
    tokens : int64 array (known,)
        Its leading tokens, as far as they are known.
    num_tokens : int
        Its length.
    num_written : int
        Leading tokens that have been written in every layer.
    k, v : array (num_layers, pages, page_size, num_kv_heads, head_dim), (..., head_dim_v)
        Its pages, where the cache is not quantised.
    pages : uint8 array (num_layers, pages, page_bytes), optional
        Its pages with codes and scales, where the cache is.
    quantization : KVQuantization, optional
        The cache's.
    layout : dict, optional
        What the bytes of `pages` depend on besides: the cache's page_size, num_kv_heads, head_dim,
        head_dim_v, joined and dtype.
    """

    tokens: np.ndarray
    num_tokens: int
    num_written: int
    k: np.ndarray | None = None
    v: np.ndarray | None = None
    pages: np.ndarray | None = None
    quantization: KVQuantization | None = None
    layout: dict[str, Any] | None = None


class PagedKVCache(Exclusive):
    """Keys and values of many sequences, in pages that are handed out, shared and taken back.

    A step of generation is ``extend`` (room for the new tokens), ``write`` in each layer, and
    :func:`cuattn.paged_attention` over ``pages(layer)`` with ``page_table(ids)`` and
    ``seq_lens(ids)``. Sequences that begin with the same tokens share the pages that hold them
    [1]_ [2]_; a page is copied when a sequence is about to write into one that others read (copy on
    write). Bookkeeping is done on the host, in NumPy, and never waits for the device.
    ``len(cache)`` is the number of sequences; iteration gives their ids.

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
        float16, bfloat16, float32 or float64: of what is written, and of queries.
    quantization : str or KVQuantization, optional
        Store codes of 8 or 4 bits: ``"int8"``, ``"float8_e4m3"``, ``"float8_e5m2"`` or ``"int4"``,
        each with a scale for each token and head (``"int4"`` with a minimum), or ``"k8v4"``, int8
        keys and int4 values; keys of int8 and int4 are rotated. ``pages`` then gives two
        :class:`cuattn.QuantizedArray`. A token is quantised once, when it is written: pages are
        copied, shared, saved and swapped as the bytes that they are.
    max_seqlen : int, optional
        The most tokens a sequence may have: the page table then has its full width from the start,
        as a captured CUDA graph needs. Default: it is widened as sequences grow.
    joined : bool
        Whether a token is one row, its value and then its key, of which ``pages`` gives two views:
        for :func:`cuattn.mla_decode`, whose values are latents and whose keys are what is rotated.
        A row is then read in one piece. With `quantization`, which is then a format, or a
        KVQuantization with ``k=None``, values are codes and keys stay as they are.
    xp : module
        ``numpy`` (the default) or ``cupy``, on its current device: where the pages are.

    Attributes
    ----------
    quantization : KVQuantization or None
        How keys and values are stored.
    nbytes : int
        Bytes of all pages.
    hit_pages, missed_pages : int
        Of the full pages that ``add_sequence`` looked for, how many it found, and how many not.

    Notes
    -----
    **Prefixes.** A page is found by all tokens up to its end, in a radix tree that compares every
    one of them. It is found once it is full, its tokens are known, and every layer has been
    written: a step that fails before its last ``write`` leaves nothing to be found; ``rollback``
    takes back what it made room for. Pages that no sequence holds any more are evicted when no page
    is free: the one released longest ago first. A sequence releases its last page first, so that
    its beginning is evicted last; pages that were found behind an evicted one are free too, or if a
    sequence holds them, no longer found.

    **Failure.** A call that refuses its arguments, or finds too few pages, leaves the cache as it
    was; one that fails on the device leaves all sequences as they were. KeyboardInterrupt may come
    in the middle of a call: it can lose pages, which ``reset`` brings back, but no page is ever
    given to two sequences or found without having been written.

    **Threads** may use a cache at the same time, each its own sequences; calls take turns. On a GPU
    they must use the same stream, or order theirs, since pages pass from one to the other. The
    arrays of ``page_table`` and ``seq_lens`` are those of the calling thread.

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

    @explain_errors
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        head_dim_v: int | None = None,
        dtype: DTypeLike,
        quantization: str | KVQuantization | None = None,
        max_seqlen: int | None = None,
        joined: bool = False,
        xp: ModuleType | None = None,
    ) -> None:
        name = "PagedKVCache"
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {}
        for label, value, largest in (
            ("num_pages", num_pages, 2**31 - 1),
            ("page_size", page_size, MAX_PAGE_SIZE),
            ("num_kv_heads", num_kv_heads, None),
            ("head_dim", head_dim, MAX_HEAD_DIM),
            ("head_dim_v", head_dim_v, MAX_HEAD_DIM),
            ("num_layers", num_layers, None),
            ("max_seqlen", 1 if max_seqlen is None else max_seqlen, MAX_TOKENS),
        ):
            sizes[label] = size = check_integer(name, label, value)
            if size < 1 or (largest is not None and size > largest):
                allowed = "at least 1" if largest is None else f"from 1 to {largest}"
                raise ValueError(f"{name}: {label} is {size}, must be {allowed}")
        self.num_pages, self.page_size = sizes["num_pages"], sizes["page_size"]
        self.num_layers = sizes["num_layers"]
        self.max_seqlen = None if max_seqlen is None else sizes["max_seqlen"]
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"{name}: page_size is {page_size}, must be a power of two")
        self.dtype = check_float_dtype(name, "dtype", dtype)
        joined = check_bool(name, "joined", joined)
        self.quantization = as_quantization(name, quantization, joined=joined)
        xp = _library(name, xp)
        heads, head_dims = sizes["num_kv_heads"], (sizes["head_dim"], sizes["head_dim_v"])
        self._store = PageStore(
            xp,
            (self.num_layers, self.num_pages, self.page_size, heads),
            head_dims,
            self.dtype,
            None
            if self.quantization is None
            else sides(name, xp, self.quantization, self.dtype, self.num_layers, heads, head_dims),
            joined=joined,
        )
        self._manager = PageManager(
            self.num_pages, self.page_size, self.num_layers, self.max_seqlen
        )
        # What `write` checked last: new tokens, and what arrays of this type have to be like.
        self._checked: tuple[Any, ...] | None = None
        self._quick_type = None if self._store.xp is np else self._store.xp.ndarray
        super().__init__()

    # ------------------------------------------------------------------------------------------
    # sequences

    @exclusive
    def add_sequence(self, tokens: Array | Sequence[int] | None = None) -> int:
        """Start a sequence.

        Parameters
        ----------
        tokens : sequence of int, optional
            The tokens it will begin with. Full pages that some sequence has written for the same
            beginning are taken over: the new sequence then has that many tokens already
            (``seq_lens``), always fewer than `tokens`, since running the last one is what gives the
            next. Without it nothing is shared, now or later. On the host, here and below.

        Returns
        -------
        int
            The sequence's id.
        """
        known = np.zeros(0, np.int64) if tokens is None else _tokens("add_sequence", tokens)
        limit = MAX_TOKENS if self.max_seqlen is None else self.max_seqlen
        if known.size > limit:
            what = limit if self.max_seqlen is None else f"max_seqlen={limit}"
            raise ValueError(
                f"PagedKVCache.add_sequence: tokens has {known.size} tokens, must be at most {what}"
            )
        return self._manager.add(known)

    @exclusive
    def extend(
        self, ids: Sequence[int], n: Integers, *, tokens: Array | Sequence[int] | None = None
    ) -> None:
        """Make room for `n` more tokens in each sequence, which ``write`` then fills.

        Pages that others read too are copied before they are written into.

        Parameters
        ----------
        ids : sequence of int
            Sequences, each once.
        n : int or sequence of int
            How many tokens, for all or for each.
        tokens : sequence of int, optional
            The new tokens, sequence by sequence, where they were not given to ``add_sequence``:
            later sequences then find their pages, as long as all tokens before them are known.
            Those that were given before must be the same.

        Raises
        ------
        MemoryError
            Not enough pages are free or kept for reuse; nothing has changed.
        KeyError, ValueError
            Unknown ids, or arguments that do not fit; nothing has changed.
        """
        rows = self._manager.rows("extend", ids)
        counts = _counts("extend", n, rows.size)
        if tokens is not None:
            tokens = _tokens("extend", tokens)
            if tokens.size != counts.sum():
                raise ValueError(
                    f"PagedKVCache.extend: tokens has {tokens.size} tokens, must be n's "
                    f"{counts.sum()}"
                )
        growth = self._manager.plan_extend(rows, counts, tokens)
        if growth.source.size:
            self._store.copy_pages(growth.source, self._manager.targets(growth))
        self._manager.extend(growth, n if type(n) is int else None)

    @exclusive
    def write(
        self,
        layer: int,
        ids: Sequence[int],
        k: Array,
        v: Array,
        *,
        rope: tuple[Array, Array] | None = None,
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

        Raises
        ------
        TypeError, ValueError, IndexError, KeyError
            An argument does not fit, or the cache has no such layer or sequence; nothing has been
            written.

        References
        ----------
        .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
        """
        name = "PagedKVCache.write"
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            layer = self._layer(name, layer)
        rows = self._manager.rows("write", ids)
        keys: Any = k
        values: Any = v
        # The layers of a step are alike, and so are most steps: what holds for one write is not
        # checked for the others.
        like = None
        if rope is None and interleaved is False and type(k) is type(v) is self._quick_type:
            like = (
                *(self._manager.step_key(rows), keys.data.device_id, values.data.device_id),
                *(keys.shape, keys.strides, keys.dtype.num),
                *(values.shape, values.strides, values.dtype.num),
            )
        if like is None or like != self._checked:
            interleaved = check_bool(name, "interleaved", interleaved)
            keys, values, rope = self._new_tokens(name, rows, k, v, rope)
            self._checked = like if keys is k and values is v else None
        capturing = self._store.device.capturing()
        if not capturing:
            self._manager.check_rewritable(rows, layer)
        if keys.shape[0]:
            self._store.write(
                self._manager,
                layer,
                rows,
                keys,
                values,
                rope=rope,
                interleaved=interleaved,
                capturing=capturing,
            )
        if not capturing:
            self._manager.mark_written(rows, (layer,))

    @exclusive
    def mark_written(self, ids: Sequence[int]) -> None:
        """Say that the tokens which the last ``extend`` made room for have been written in every
        layer, by something else than a call of ``write``: a CUDA graph, or a kernel of one's own.

        Pages can be found by other sequences once all that is in them has been written. Calls of
        ``write`` are counted; the cache does not see a captured graph run.

        Parameters
        ----------
        ids : sequence of int
            The sequences.
        """
        self._manager.mark_written(self._manager.rows("mark_written", ids), range(self.num_layers))

    @exclusive
    def fork(self, id: int) -> int:
        """Start a sequence that has what another has; they share pages until one of them writes.

        Returns
        -------
        int
            The new sequence's id.
        """
        return self._manager.fork(self._manager.row("fork", id))

    @exclusive
    def truncate(self, id: int, n: int) -> None:
        """Forget all but a sequence's first `n` tokens, and give back the pages they do not
        need."""
        name = "PagedKVCache.truncate"
        row = self._manager.row("truncate", id)
        n = check_integer(name, "n", n)
        length = int(self._manager.length[row])
        if not 0 <= n <= length:
            raise ValueError(f"{name}: n is {n}, must be from 0 to the sequence's {length} tokens")
        self._manager.truncate(row, n)

    @exclusive
    def rollback(self, ids: Sequence[int]) -> None:
        """Undo the last ``extend`` of each of some sequences, as after a step that failed: they
        have the tokens, and the cache knows of those to come, what it was before.

        Parameters
        ----------
        ids : sequence of int
            The sequences; those that have been truncated or rolled back since, or that ``fork``,
            ``swap_in`` or ``add_sequence`` made since, stay as they are.
        """
        self._manager.rollback(self._manager.rows("rollback", ids))

    @exclusive
    def remove(self, id: int) -> None:
        """End a sequence. Its pages are free again; full ones of known tokens are kept for reuse as
        long as there is room.
        """
        self._manager.remove(id, self._manager.row("remove", id))

    @exclusive
    def reset(self) -> None:
        """End all sequences and forget all prefixes: every page is free. Ids are not given again,
        and arrays that ``page_table`` and ``seq_lens`` returned stay the cache's."""
        self._manager.reset()

    # ------------------------------------------------------------------------------------------
    # on the host, in files and in copies

    @exclusive
    def swap_out(self, id: int) -> SwappedSequence:
        """End a sequence and keep its tokens, keys and values on the host, until ``swap_in``.

        Waits for the device. Its pages are free, or kept for reuse, as after ``remove``.

        Returns
        -------
        SwappedSequence
            What ``swap_in`` takes, of this cache or of another of the same layout. It can be
            pickled.
        """
        manager = self._manager
        row = manager.row("swap_out", id)
        manager.settle()
        content = self._store.read_pages(manager.table[row, : manager.held[row]].copy())
        swapped = SwappedSequence(
            tokens=manager.tokens[row, : manager.known[row]].copy(),
            num_tokens=int(manager.length[row]),
            num_written=int(manager.written[row]),
            quantization=self.quantization,
            layout=self._page_layout(),
            **content,
        )
        manager.remove(id, row)
        return swapped

    @exclusive
    def swap_in(self, swapped: SwappedSequence) -> int:
        """Start a sequence that has what ``swap_out`` has kept: pages that can be found in the
        cache are shared, the others are copied to the device.

        Parameters
        ----------
        swapped : SwappedSequence
            What ``swap_out`` returned. It may be used again.

        Returns
        -------
        int
            The sequence's id, a new one.

        Raises
        ------
        TypeError, ValueError
            It is no swapped sequence, or that of a cache of another layout; nothing has changed.
        MemoryError
            Not enough pages are free or kept for reuse; nothing has changed.
        """
        name = "PagedKVCache.swap_in"
        if not isinstance(swapped, SwappedSequence):
            raise TypeError(
                f"{name}: swapped must be what swap_out returned, got {type(swapped).__qualname__}"
            )
        manager, length = self._manager, swapped.num_tokens
        num_pages = -(-length // self.page_size)
        ours, theirs = self.quantization, swapped.quantization
        if ours is not theirs and (ours is None or not ours.is_like(theirs)):
            raise ValueError(
                f"{name}: swapped.quantization is {theirs}, must be this cache's {ours}"
            )
        if swapped.layout != (layout := self._page_layout()):
            raise ValueError(
                f"{name}: swapped.layout is {swapped.layout}, must be this cache's {layout}"
            )
        content = {}
        for label, pages in self._store.arrays.items():
            array = content[label] = getattr(swapped, label)
            shape = (self.num_layers, num_pages, *pages.shape[2:])
            if array.shape != shape or array.dtype != pages.dtype:
                raise ValueError(
                    f"{name}: swapped.{label} has shape {array.shape} and dtype {array.dtype}, "
                    f"must have this cache's {shape} and {pages.dtype}"
                )
        tokens = swapped.tokens[: swapped.num_written]
        manager.check_room("swap_in", tokens, length)
        id = manager.add(tokens)
        row = manager.row_of[id]
        rows, found = np.array([row]), int(manager.held[row])
        manager.extend(manager.plan_extend(rows, length - manager.length[rows], None))
        try:
            new = manager.table[row, found : manager.held[row]].copy()
            rest = {label: array[:, found:] for label, array in content.items()}
            self._store.write_pages(new, rest)
        except BaseException:
            manager.remove(id, row)
            raise
        manager.restore_row(row, swapped.tokens, swapped.num_written)
        return id

    def save(self, file: str | os.PathLike | BinaryIO) -> None:
        """Save sequences, prefixes and the pages that hold them. Waits for the device.

        Parameters
        ----------
        file : path or binary file
            Where to. A file of that name is replaced once all has been written.
        """
        _check_file("save", file, "write")
        files.write(file, files.Saved(self._config(), *self._snapshot()))

    @classmethod
    def load(
        cls, file: str | os.PathLike | BinaryIO, *, xp: ModuleType | None = None
    ) -> PagedKVCache:
        """Load what ``save`` has saved: the same sequences, ids and prefixes.

        Parameters
        ----------
        file : path or binary file
            Where from. Nothing in it is executed.
        xp : module
            ``numpy`` (the default) or ``cupy``: where the pages shall be, wherever they were.

        Raises
        ------
        ValueError
            The file is not one that ``save`` has written.
        MemoryError
            The pages do not fit.
        """
        xp = _library("PagedKVCache.load", xp)
        _check_file("load", file, "read")
        try:
            saved = files.read(file)
            cache = cls(**saved.config, xp=xp)
            content = {
                name: saved.content[name].view(array.dtype)
                for name, array in cache._store.arrays.items()
            }
            snapshot.restore(cache._manager, saved.state)
            cache._store.write_pages(saved.in_use, content)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"PagedKVCache.load: {file!r} is not what PagedKVCache.save writes: {error}"
            ) from error
        return cache

    @exclusive
    def _snapshot(self) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
        """The books, the pages that hold something, and what they hold."""
        manager = self._manager
        state = snapshot.take(manager)
        pages = np.flatnonzero((manager.references > 0) | manager.index.contains)
        return state, pages, self._store.read_pages(pages)

    def _config(self) -> dict[str, Any]:
        """The arguments that make such a cache, but xp."""
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "num_kv_heads": self._store.tokens[0][0],
            "head_dim": self._store.tokens[0][1],
            "head_dim_v": self._store.tokens[1][1],
            "num_layers": self.num_layers,
            "max_seqlen": self.max_seqlen,
            "joined": self._store.joined,
            "dtype": self.dtype,
            "quantization": self.quantization,
        }

    def _page_layout(self) -> dict[str, Any] | None:
        """What bytes of pages mean, beside `quantization`; None where they are arrays of numbers,
        whose shapes say so."""
        if self.quantization is None:
            return None
        names = ("page_size", "num_kv_heads", "head_dim", "head_dim_v", "joined")
        config = self._config()
        return {name: config[name] for name in names} | {"dtype": self.dtype.name}

    def __copy__(self) -> PagedKVCache:
        raise TypeError(
            "PagedKVCache: a shallow copy would share pages that each cache takes for its own; "
            "copy.deepcopy makes an independent cache, fork another sequence with the same tokens"
        )

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        xp = self._store.xp
        with contextlib.nullcontext() if xp is np else self._store.memory_device:
            cache = PagedKVCache(**self._config(), xp=xp)
            snapshot.restore(cache._manager, snapshot.take(self._manager))
            for name, array in self._store.arrays.items():
                cache._store.arrays[name][...] = array
        return cache

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        self.save(file)
        return _loaded, (file.getvalue(), self._store.xp.__name__)

    # ------------------------------------------------------------------------------------------
    # what the host knows: none of this waits for a device

    @exclusive
    def num_tokens(self, id: int) -> int:
        """How many tokens a sequence has, those included that the last ``extend`` made room for."""
        return int(self._manager.length[self._manager.row("num_tokens", id)])

    @property
    def num_free_pages(self) -> int:
        """How many pages can be had: free ones, and those kept for reuse."""
        return self._manager.available

    @exclusive
    def can_extend(self, ids: Sequence[int], n: Integers) -> bool:
        """Whether there is room for `n` more tokens in each sequence: whether ``extend`` would make
        it, and not raise MemoryError or go beyond `max_seqlen`.

        Parameters
        ----------
        ids, n
            As in ``extend``.
        """
        rows = self._manager.rows("can_extend", ids)
        counts = _counts("can_extend", n, rows.size)
        try:
            self._manager.plan_extend(rows, counts, None)
        except (MemoryError, ValueError):
            return False
        return True

    @exclusive
    def match_prefix(self, tokens: Array | Sequence[int]) -> int:
        """How many leading tokens ``add_sequence(tokens)`` would find in the cache; nothing is
        taken over, and the order in which pages are evicted stays as it is.

        Parameters
        ----------
        tokens : sequence of int
            The tokens a sequence would begin with.
        """
        return len(self._manager.find(_tokens("match_prefix", tokens))) * self.page_size

    def __iter__(self) -> Iterator[int]:
        """The ids of all sequences, oldest first: a cache stands for them where a method takes
        ids."""
        return iter(list(self._manager.row_of))  # at once, and so without the lock

    def __contains__(self, id: object) -> bool:
        return id in self._manager.row_of

    def __len__(self) -> int:
        return len(self._manager.row_of)

    # ------------------------------------------------------------------------------------------
    # what kernels read

    @exclusive
    def page_table(self, ids: Sequence[int]) -> Any:
        """The page table of some sequences.

        Returns
        -------
        int32 array (len(ids), max_pages)
            On the cache's device, and the cache's own: this thread's next call for as many
            sequences, of this, of ``seq_lens`` or of ``write``, updates it in place, so that a
            captured CUDA graph sees what has changed; once ``write`` was captured, any thread's
            call. Hold on to it: as long as you do, it is a new array only after it had to be
            widened, which `max_seqlen` prevents. The cache itself keeps the tables of the numbers
            of sequences that were last asked for, 64 MB of them, and those of captured graphs.
        """
        return self._store.page_table(self._manager, self._manager.rows("page_table", ids))

    @exclusive
    def seq_lens(self, ids: Sequence[int]) -> Any:
        """How many tokens each of some sequences has: int32 array (len(ids),), updated in place as
        ``page_table``'s.
        """
        return self._store.seq_lens(self._manager, self._manager.rows("seq_lens", ids))

    def pages(self, layer: int) -> tuple[Any, Any]:
        """One layer's pages of keys and of values: (num_pages, page_size, num_kv_heads, head_dim),
        views; two QuantizedArrays where they are quantised.
        """
        return self._store.layers[self._layer("PagedKVCache.pages", layer)]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, in all layers."""
        return self._store.nbytes

    @property
    def hit_pages(self) -> int:
        """Of the full pages that ``add_sequence`` looked for, how many it found."""
        return self._manager.hit_pages

    @property
    def missed_pages(self) -> int:
        """Of the full pages that ``add_sequence`` looked for, how many it did not find."""
        return self._manager.missed_pages

    def __repr__(self) -> str:
        manager = self._manager
        kept = len(manager.kept)
        used = self.num_pages - manager.num_free - kept
        looked = self.hit_pages + self.missed_pages
        sequences = f"{len(self)} sequence" + ("" if len(self) == 1 else "s")
        return (
            f"PagedKVCache({self.num_pages} pages of {self.page_size} tokens: {used} in use, "
            f"{kept} kept for reuse, {manager.num_free} free; {sequences}; "
            f"prefix hits {self.hit_pages} of {looked} pages)"
        )

    def _layer(self, function: str, layer: int) -> int:
        layer = check_integer(function, "layer", layer)
        if not 0 <= layer < self.num_layers:
            raise IndexError(
                f"{function}: layer is {layer}, must be from 0 to {self.num_layers - 1}"
            )
        return layer

    def _new_tokens(
        self, name: str, rows: np.ndarray, k: Any, v: Any, rope: Any
    ) -> tuple[Any, Any, tuple[Any, Any] | None]:
        """Check the new tokens of some sequences: keys and values (total, heads, features) with
        contiguous features, and the tables of `rope`."""
        check_given(name, k=k, v=v)
        cos, sin = pair(name, rope)
        xp, (keys, values, cos, sin) = as_arrays(name, k=k, v=v, **{"rope[0]": cos, "rope[1]": sin})
        if xp is not self._store.xp:
            raise ValueError(
                f"{name}: k is an array of {xp.__name__}, must be {self._store.xp.__name__}"
            )
        if xp is not np and keys.device != self._store.memory_device:
            raise ValueError(
                f"{name}: k is on GPU {keys.device.id}, must be on the cache's "
                f"{self._store.memory_device.id}"
            )
        counts = self._manager.new[rows].tolist()
        total = sum(counts)
        for label, array, token in zip("kv", (keys, values), self._store.tokens, strict=True):
            shape = array.shape
            if shape != (total, *token) and not (
                shape[2:] == token and [shape[1]] * shape[0] == counts
            ):
                raise ValueError(
                    f"{name}: {label} has shape {shape}, must hold the {total} new tokens of "
                    f"{len(rows)} sequences: {(total, *token)}"
                    + ("" if total else "; extend makes room for new tokens first")
                )
            if array.dtype != self.dtype:
                raise TypeError(f"{name}: {label} has dtype {array.dtype}, must be {self.dtype}")
        if rope is not None:
            check_rope(name, cos, sin, self._store.tokens[0][1], self.dtype)
            longest = int(self._manager.length[rows].max(initial=0))
            if longest > cos.shape[0]:
                raise ValueError(
                    f"{name}: rope has {cos.shape[0]} positions, must have the sequences' {longest}"
                )
            rope = (contiguous(xp, cos), contiguous(xp, sin))
        return flat(xp, keys, total), flat(xp, values, total), rope


def _loaded(saved: bytes, xp: str) -> PagedKVCache:
    return PagedKVCache.load(io.BytesIO(saved), xp=importlib.import_module(xp))


def _check_file(function: str, file: Any, method: str) -> None:
    if not isinstance(file, (str, os.PathLike)) and not hasattr(file, method):
        raise TypeError(
            f"PagedKVCache.{function}: file must be a path or a binary file, got "
            f"{type(file).__qualname__}"
        )


def _library(function: str, xp: Any) -> ModuleType:
    """The library whose arrays a cache has: NumPy where none is named."""
    xp = np if xp is None else xp
    if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
        raise TypeError(f"{function}: xp is {xp!r}, must be numpy or cupy")
    return xp


def _counts(function: str, n: Any, sequences: int) -> np.ndarray:
    """Numbers of new tokens, one for each sequence."""
    if type(n) is int and 0 <= n <= MAX_TOKENS:
        return np.full(sequences, n)
    check_unmasked(f"PagedKVCache.{function}", "n", n)
    try:
        given = np.asarray(n)
    except ValueError:  # lists of different lengths
        given = np.asarray(None)
    if given.shape not in ((), (sequences,)) or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"PagedKVCache.{function}: n is {n!r}, must be an integer or one for each of the "
            f"{sequences} sequences"
        )
    if given.size and not (given.min() >= 0 and given.max() <= MAX_TOKENS):
        raise ValueError(f"PagedKVCache.{function}: n is {n}, must be from 0 to {MAX_TOKENS}")
    return np.broadcast_to(given.astype(np.int64), (sequences,))


def _tokens(function: str, tokens: Any) -> np.ndarray:
    check_unmasked(f"PagedKVCache.{function}", "tokens", tokens)
    if on_gpu(tokens) is not None:
        raise TypeError(
            f"PagedKVCache.{function}: tokens is on a GPU, must be on the host; pass tokens.get()"
        )
    try:
        array = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"PagedKVCache.{function}: tokens has shape {array.shape} and dtype {array.dtype}, "
            "must be integers in one axis"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"PagedKVCache.{function}: tokens has {array.max()}, must be below 2**63")
    return array.astype(np.int64)
