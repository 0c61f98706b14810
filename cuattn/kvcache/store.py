"""The arrays of a paged cache: keys and values in pages, and the page tables that kernels read."""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from types import ModuleType
from typing import Any

import numpy as np

from cuattn._backend import backend
from cuattn.kvcache.layout import PageLayout, Side
from cuattn.kvcache.pages import PageManager

MAX_TABLE_BYTES = 64 << 20  # of page tables that nobody but the cache holds


@dataclasses.dataclass
class _Table:
    """The page table and lengths of so many sequences, and how far they have kept up."""

    batch: Any
    rows: np.ndarray | None = None  # None: no entry is right
    version: int = -1
    seen: int = 0  # changes
    # What the cache's user was given, as long as it is held: views, so that the cache's own arrays
    # do not count.
    page_table: Any = lambda: None
    seq_lens: Any = lambda: None

    @property
    def num_bytes(self) -> int:
        return self.batch.page_table.nbytes

    @property
    def is_held(self) -> bool:
        return self.page_table() is not None or self.seq_lens() is not None


class PageStore:
    """Pages of all layers, and a page table for each number of sequences that was asked for.

    A thread has tables of its own, since it reads them after the call that returned them. A table
    that a CUDA graph was captured with is every thread's, since its replays read no other; it stays
    for good. Of the others the least recently used go where they take more than MAX_TABLE_BYTES,
    but none that the caller still holds.

    Attributes
    ----------
    arrays : dict
        What is stored, with a page's part in each layer: ``"k"`` (num_layers, num_pages, page_size,
        num_kv_heads, head_dim) and ``"v"`` (..., head_dim_v), or where they are quantised
        ``"pages"``, bytes (num_layers, num_pages, page_bytes).
    joined : bool
        Whether keys and values are views of one array, whose rows are a value and a key.
    layers : list of (array, array)
        Each layer's keys and values: views.
    tokens : ((int, int), (int, int))
        Shapes of a token's keys and values.
    """

    def __init__(
        self,
        xp: ModuleType,
        layout: tuple[int, int, int, int],
        head_dims: tuple[int, int],
        dtype: np.dtype,
        quantized: tuple[Side, Side] | None,
        *,
        joined: bool,
    ) -> None:
        self.xp = xp
        self.device = backend(xp, "kvcache")
        self.joined = joined
        *pages, page_size, heads = layout
        self.tokens = (heads, head_dims[0]), (heads, head_dims[1])
        self.layers: list[tuple[Any, Any]]
        if quantized is None:
            if joined:
                head_dim, head_dim_v = head_dims
                rows = xp.empty((*layout, head_dim_v + head_dim), dtype)
                k, v = rows[..., head_dim_v:], rows[..., :head_dim_v]
            else:
                k, v = (xp.empty((*layout, head_dim), dtype) for head_dim in head_dims)
            self.arrays = {"k": k, "v": v}
            self.layers = list(zip(k, v, strict=True))
        else:
            of_page = PageLayout(*quantized, page_size, joined=joined)
            memory = xp.empty((*pages, of_page.page_bytes), np.uint8)
            self.arrays = {"pages": memory}
            self.layers = of_page.layers(xp, memory)
        self._any = next(iter(self.arrays.values()))
        self._tables: collections.OrderedDict[tuple[int | None, int], _Table] = (
            collections.OrderedDict()
        )
        self._recent: tuple[int, _Table | None] = 0, None  # the last one, and the thread it was for

    def copy_pages(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy pages of every layer."""
        for array in self.arrays.values():
            self.device.copy_pages(array, source.tolist(), target.tolist())

    def read_pages(self, pages: np.ndarray) -> dict[str, np.ndarray]:
        """Copies on the host of some pages of every layer, by the names of `arrays`. Waits for the
        device."""
        return {name: self.device.read_pages(array, pages) for name, array in self.arrays.items()}

    def write_pages(self, pages: np.ndarray, content: dict[str, np.ndarray]) -> None:
        """Overwrite some pages of every layer with such copies."""
        for name, array in self.arrays.items():
            self.device.write_pages(array, pages, content[name])

    @property
    def memory_device(self) -> Any:
        """The device that the pages are on."""
        return self._any.device

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(array.nbytes for array in self.arrays.values())

    def page_table(self, manager: PageManager, rows: np.ndarray) -> Any:
        """The page table of some sequences, up to date."""
        table = self._table(manager, rows, self.device.capturing())
        array = table.page_table()
        if array is None:
            array = table.batch.page_table.view()
            table.page_table = weakref.ref(array)
        return array

    def seq_lens(self, manager: PageManager, rows: np.ndarray) -> Any:
        """The lengths of some sequences, up to date."""
        table = self._table(manager, rows, self.device.capturing())
        array = table.seq_lens()
        if array is None:
            array = table.batch.seq_lens.view()
            table.seq_lens = weakref.ref(array)
        return array

    def write(
        self,
        manager: PageManager,
        layer: int,
        rows: np.ndarray,
        k: Any,
        v: Any,
        *,
        rope: tuple[Any, Any] | None,
        interleaved: bool,
        capturing: bool,
    ) -> None:
        """Put one layer's new keys and values into their slots."""
        batch = self._table(manager, rows, capturing).batch
        self.device.write(k, v, *self.layers[layer], batch, rope=rope, interleaved=interleaved)

    def _table(self, manager: PageManager, rows: np.ndarray, capturing: bool) -> _Table:
        """The up-to-date table of these sequences, in this order."""
        thread, table = self._recent
        me = threading.get_ident()
        if (
            table is not None
            and table.rows is rows
            and table.version == manager.version
            and thread == me
            and not capturing
        ):
            return table
        width = manager.table.shape[1]
        keys = (None, rows.size), (me, rows.size)
        key = keys[keys[0] not in self._tables]
        table = self._tables.get(key)
        if table is None or table.batch.page_table.shape[1] != width:
            table = _Table(self.device.Batch(self._any, rows.size, width))
            self._tables[key] = table
            self._tables.move_to_end(key)
            self._drop_tables(key)
        else:
            self._tables.move_to_end(key)
        if table.version != manager.version or not (
            table.rows is rows or (table.rows is not None and (table.rows == rows).all())
        ):
            positions, columns = manager.changed_entries(rows, table.rows, table.seen)
            table.rows = None  # as long as the entries are being set
            table.batch.update(
                positions,
                columns,
                manager.table[rows[positions], columns],
                manager.length[rows],
                manager.new[rows],
            )
            table.rows, table.version, table.seen = rows, manager.version, manager.num_changes
        if key[0] is not None and capturing:
            self._tables[keys[0]] = self._tables.pop(key)
        self._recent = me, table
        return table

    def _drop_tables(self, needed: tuple[int | None, int]) -> None:
        """Drop what is least recently used of the tables that nobody holds."""
        unheld = [
            key for key, table in self._tables.items() if key[0] is not None and not table.is_held
        ]
        size = sum(self._tables[key].num_bytes for key in unheld)
        for key in unheld:
            if size <= MAX_TABLE_BYTES or key == needed:
                break
            size -= self._tables.pop(key).num_bytes
