"""What a paged cache's operations do to its pages, in NumPy."""

from __future__ import annotations

import numpy as np

from cuattn._quantized import QuantizedArray, codes_of
from cuattn.reference.positions import rotate
from cuattn.reference.quantization import quantize_into


class Batch:
    """The page table, lengths and new tokens of some sequences, where the pages are; updated in
    place.

    Attributes
    ----------
    page_table : int32 (batch, width)
    seq_lens : int32 (batch,)
    cu_new : int32 (batch + 1,)
        Cumulative numbers of the tokens that the last ``extend`` made room for.
    new_sequence, new_position : integers (cu_new[-1],)
        To which sequence each of those tokens belongs, and where in it.
    """

    def __init__(self, pages: np.ndarray, batch: int, width: int) -> None:
        self.page_table = np.zeros((batch, width), np.int32)
        self.seq_lens = np.zeros(batch, np.int32)
        self.cu_new = np.zeros(batch + 1, np.int32)

    def update(
        self,
        positions: np.ndarray,
        columns: np.ndarray,
        pages: np.ndarray,
        seq_lens: np.ndarray,
        new: np.ndarray,
    ) -> None:
        """Set some entries of the page table, all lengths, and how many tokens are new."""
        self.page_table[positions, columns] = pages
        self.seq_lens[:] = seq_lens
        np.cumsum(new, out=self.cu_new[1:])
        self.new_sequence = np.repeat(np.arange(new.size), new)
        first = self.seq_lens - self.cu_new[1:]  # as if all new tokens were of this sequence
        self.new_position = np.arange(self.cu_new[-1]) + first[self.new_sequence]
        self._slots: tuple[np.ndarray, np.ndarray] | None = None

    def slots(self, page_size: int) -> tuple[np.ndarray, np.ndarray]:
        """The page of each new token and its place there, found once for all layers."""
        if self._slots is None:
            column, slot = np.divmod(self.new_position, page_size)
            self._slots = self.page_table[self.new_sequence, column], slot
        return self._slots


def capturing() -> bool:
    """Whether what is launched now runs later, as part of a CUDA graph."""
    return False


def copy_pages(array: np.ndarray, source: list[int], target: list[int]) -> None:
    """Copy pages of every layer: (num_layers, num_pages, ...)."""
    array[:, target] = array[:, source]


def read_pages(array: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Copy pages of every layer to a new array."""
    return array[:, pages]


def write_pages(array: np.ndarray, pages: np.ndarray, content: np.ndarray) -> None:
    """Overwrite pages of every layer."""
    array[:, pages] = content


def append(
    k: np.ndarray,
    v: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    batch: int,
    *,
    seq_lens: np.ndarray | None,
    page_table: np.ndarray | None,
    slots: np.ndarray | None,
    cu_seqlens: np.ndarray | None,
    left_padding: np.ndarray | None,
    rope: tuple[np.ndarray, np.ndarray] | None,
    interleaved: bool,
) -> None:
    """Put new keys, rotated where asked, and values into a cache or pages.

    Parameters
    ----------
    k, v : numpy.ndarray (total, heads, head_dim), (total, heads, head_dim_v)
        Of the new tokens.
    batch : int
        Sequences.
    k_cache, v_cache, seq_lens, page_table, slots, cu_seqlens, left_padding, rope, interleaved
        As in :func:`cuattn.append_kv`.

    Raises
    ------
    IndexError
        A token's place or position does not exist; nothing has been written.
    """
    name = "append_kv"
    tokens = np.arange(len(k) if cu_seqlens is None else cu_seqlens[-1])
    positions = None
    if seq_lens is not None:
        if cu_seqlens is None:
            cu_seqlens = np.arange(batch + 1) * (len(k) // batch)
        sequence = np.repeat(np.arange(batch), np.diff(cu_seqlens))
        at = tokens + (seq_lens.astype(np.int64) - cu_seqlens[1:])[sequence]
        begin = np.zeros(len(at), np.int64) if left_padding is None else left_padding[sequence]
        positions = at - begin
        _check_places(name, "seq_lens", "position", at, 1 << 31)
    if slots is not None:
        page, slot = np.divmod(slots[tokens], k_cache.shape[1])
        _check_places(name, "slots", "page", np.maximum(page, 0), len(k_cache))
        there = page >= 0
    elif page_table is not None:
        column, slot = np.divmod(at, k_cache.shape[1])
        _check_places(name, "page_table", "column", column, page_table.shape[1])
        page = page_table[sequence, column]
        there = np.full(len(page), True)
    else:
        page, slot, there = sequence, at, np.full(len(at), True)
        _check_places(name, "seq_lens", "slot", slot, k_cache.shape[1])
    if positions is not None:
        there &= positions >= 0
        tokens, page, slot, positions = (a[there] for a in (tokens, page, slot, positions))
    else:
        tokens, page, slot = (a[there] for a in (tokens, page, slot))
    _check_places(name, "page_table", "page", page, len(k_cache))
    keys, values = k[tokens], v[tokens]  # copies: they may be parts of either cache
    if rope is not None:
        _check_places(name, "rope", "position", positions, len(rope[0]))
        keys = rotate(keys, *(table[positions][:, None] for table in rope), interleaved)
    _store(k_cache, (page, slot), keys)
    _store(v_cache, (page, slot), values)


def _store(
    cache: np.ndarray | QuantizedArray, slots: tuple[np.ndarray, np.ndarray], new: np.ndarray
) -> None:
    """Put rows (tokens, heads, head_dim) into pages, at a page and a place there for each."""
    if isinstance(cache, QuantizedArray):
        quantize_into(cache, slots, new)
    else:
        cache[slots] = new


def _check_places(function: str, name: str, what: str, places: np.ndarray, end: int) -> None:
    """Check that what an argument leads to is there."""
    wrong = (places < 0) | (places >= end)
    if wrong.any():
        raise IndexError(
            f"{function}: {name} leads to {what} {places[wrong.argmax()]}, must be from 0 to "
            f"{end - 1}"
        )


def write(
    k: np.ndarray,
    v: np.ndarray,
    k_pages: np.ndarray | QuantizedArray,
    v_pages: np.ndarray | QuantizedArray,
    batch: Batch,
    *,
    rope: tuple[np.ndarray, np.ndarray] | None = None,
    interleaved: bool = False,
) -> None:
    """Put new keys, rotated where asked, and values into their slots.

    Parameters
    ----------
    k, v : numpy.ndarray (total, heads, head_dim), (total, heads, head_dim_v)
        Of the batch's new tokens, sequence by sequence; they may be views of pages.
    k_pages, v_pages : numpy.ndarray or QuantizedArray (num_pages, page_size, heads, head_dim)
        One layer's pages.
    batch : Batch
        Where they go: the last ``cu_new[b + 1] - cu_new[b]`` positions of sequence b.
    rope, interleaved
        As in :meth:`cuattn.PagedKVCache.write`.
    """
    if rope is not None:
        k = rotate(k, *(table[batch.new_position][:, None] for table in rope), interleaved)
    slots = batch.slots(k_pages.shape[1])
    if np.may_share_memory(v, codes_of(k_pages)):
        v = v.copy()  # before keys are written there
    _store(k_pages, slots, k)
    _store(v_pages, slots, v)
