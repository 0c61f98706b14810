"""Where the rows and the keys of each sequence lie, as `AttentionSpec.rows` and `keys` say: slices
of the call's arrays, or copies where a sequence's pages do not follow each other."""

from __future__ import annotations

import math

import numpy as np

from cuattn._quantized import QuantizedArray
from cuattn._spec import AttentionSpec
from cuattn.reference.quantization import CodedRows, dequantize


class Rows:
    """The rows of q, and with them those of out and lse.

    Parameters
    ----------
    spec : AttentionSpec
        The call.
    cu_seqlens_q : numpy.ndarray or None
        Where each sequence begins, if rows are ragged.
    """

    def __init__(self, spec: AttentionSpec, cu_seqlens_q: np.ndarray | None) -> None:
        self._bounds = cu_seqlens_q.tolist() if spec.rows == "ragged" else None
        self._seqlen = spec.seqlen_q

    def length(self, b: int) -> int:
        """Queries of a sequence."""
        return self._seqlen if self._bounds is None else self._bounds[b + 1] - self._bounds[b]

    def of(self, array: np.ndarray, b: int) -> np.ndarray:
        """A sequence's part of q or out: (seqlen_q, heads, head_dim)."""
        return array[b] if self._bounds is None else array[self._slice(b)]

    def of_lse(self, lse: np.ndarray, b: int) -> np.ndarray:
        """A sequence's part of lse: (heads, seqlen_q)."""
        return lse[b] if self._bounds is None else lse[:, self._slice(b)]

    def _slice(self, b: int) -> slice:
        return slice(self._bounds[b], self._bounds[b + 1])


class Keys:
    """The rows of k and v.

    Parameters
    ----------
    k, v : numpy.ndarray or QuantizedArray
        As `spec` says that they lie.
    spec : AttentionSpec
        The call.
    cu_seqlens_k, seq_lens, page_table : numpy.ndarray or None
        What says where they lie.
    prefix : tuple of numpy.ndarray or QuantizedArray, optional
        Keys and values that come before each sequence's own.
    """

    def __init__(
        self,
        k: np.ndarray,
        v: np.ndarray,
        spec: AttentionSpec,
        cu_seqlens_k: np.ndarray | None,
        seq_lens: np.ndarray | None,
        page_table: np.ndarray | None,
        prefix: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        self._arrays = (k, v)
        self._values = spec.acc_dtype  # of codes
        self._page_table = page_table
        self._page_size = spec.page_size
        self._prefix = prefix
        self._room: list[np.ndarray] = []  # for copies: the prefix, then pages of one sequence
        self._quantized = any(
            isinstance(array, QuantizedArray) for array in (k, v, *(prefix or ()))
        )
        #: Whether a sequence's keys may be copies, which hold until the next sequence's are asked.
        self.are_copied = spec.keys == "paged"
        if spec.keys == "ragged":
            self._begin = cu_seqlens_k.tolist()[:-1]
            self._own = np.diff(cu_seqlens_k).tolist()
        elif spec.keys == "batched":
            self._own = [spec.seqlen_k] * spec.batch
        else:
            self._own = np.clip(seq_lens, 0, spec.seqlen_k).tolist()
        self._layout = spec.keys

    def length(self, b: int) -> int:
        """Keys of a sequence."""
        return self._own[b] + (0 if self._prefix is None else len(self._prefix[0]))

    def of(self, b: int) -> list[np.ndarray | CodedRows]:
        """A sequence's keys and values: (heads_kv, seqlen_k, head_dim), (..., head_dim_v)."""
        parts = self._tokens_of(b)
        return [CodedRows(x) if isinstance(x, QuantizedArray) else x.swapaxes(0, 1) for x in parts]

    def _tokens_of(self, b: int) -> list[np.ndarray | QuantizedArray]:
        """The same as (seqlen_k, heads_kv, features)."""
        length = self._own[b]
        if self._layout == "ragged":
            begin = self._begin[b]
            return [array[begin : begin + length] for array in self._arrays]
        if self._quantized and self._prefix is not None:
            return [self._joined(array, i, b) for i, array in enumerate(self._arrays)]
        if self._layout != "paged":
            return [array[b, :length] for array in self._arrays]
        pages = self._page_table[b, : -(-length // self._page_size)]
        consecutive = self._prefix is None and (pages[1:] == pages[:-1] + 1).all()
        if not consecutive and not self._quantized:
            return self._copied(pages, self.length(b))
        first = pages[0] if length else 0
        chosen = slice(first, first + pages.size) if consecutive else pages
        return [_tokens(array[chosen])[:length] for array in self._arrays]

    def _joined(self, array: np.ndarray | QuantizedArray, part: int, b: int) -> np.ndarray:
        """The prefix and a sequence's own keys (`part` 0) or values (1), where some are codes, as
        numbers."""
        length = self._own[b]
        if self._layout == "paged":
            pages = self._page_table[b, : -(-length // self._page_size)]
            own = self._numbers(_tokens(array[pages])[:length])
        else:
            own = self._numbers(array[b, :length])
        return np.concatenate([self._numbers(self._prefix[part]), own])

    def _numbers(self, array: np.ndarray | QuantizedArray) -> np.ndarray:
        if isinstance(array, QuantizedArray):
            return dequantize(array, self._values)
        return array.astype(self._values)

    def _copied(self, pages: np.ndarray, length: int) -> list[np.ndarray]:
        """The prefix and a sequence's pages, one after the other."""
        before = 0 if self._prefix is None else len(self._prefix[0])
        if not self._room:
            self._make_room(before)
        tokens = slice(before, before + pages.size * self._page_size)
        for array, room in zip(self._arrays, self._room, strict=True):
            target = room[tokens].reshape(pages.size, *array.shape[1:])
            np.take(array, pages, axis=0, out=target, mode="clip")  # "raise" copies twice
        return [room[:length] for room in self._room]

    def _make_room(self, before: int) -> None:
        """Room for the longest sequence's copies, with the prefix in it.

        It is one array: of two, malloc gives the memory back to the system each time, and to get it
        again takes longer than to fill it.
        """
        k, v = self._arrays
        tokens = before + -(-max(self._own) // self._page_size) * self._page_size
        sizes = [tokens * math.prod(array.shape[2:]) for array in (k, v)]
        room = np.empty(sum(sizes), k.dtype)
        parts = room[: sizes[0]], room[sizes[0] :]
        self._room = [
            part.reshape(tokens, *array.shape[2:])
            for part, array in zip(parts, (k, v), strict=True)
        ]
        for part, array in zip(self._room, self._prefix or (), strict=False):
            part[:before] = array


def _tokens(pages: np.ndarray | QuantizedArray) -> np.ndarray | QuantizedArray:
    """Pages (pages, page_size, heads, ...) as tokens one after the other."""

    def joined(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, *array.shape[2:])

    if not isinstance(pages, QuantizedArray):
        return joined(pages)
    minimum = None if pages.minimum is None else joined(pages.minimum)
    return pages.of(joined(pages.data), joined(pages.scale), minimum)
