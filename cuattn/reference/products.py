"""Products of stacks of matrices, in pieces of the size and at the addresses that OpenBLAS
multiplies fastest."""

from __future__ import annotations

import math

import numpy as np

from cuattn.reference.narrow import to_float32
from cuattn.reference.quantization import CodedRows

# OpenBLAS multiplies on the calling thread where rows * columns * inner <= 2**18, and otherwise
# wakes threads of its own, for which the workers of a call would wait in turn. On AVX-512 such
# products are also read where they lie, without being rearranged first: 180 GFLOP/s of a core that
# makes 140 of large ones.
BLOCK_PRODUCT = 2**18
BLOCK_ROWS = 8  # fewer rows a block are slower; with fewer rows in all, columns or the sum are cut
BLOCK_LENGTH = 128  # of their pieces
PANEL = 64  # columns of a right operand that lie together: 32 KiB of head_dim 128
PANEL_ROWS = 32  # of a block that meets a panel
LONGEST_SUM = 320  # terms: two sums of half the length round off less, as in BLAS's large products
PACKED = 2**15  # elements of keys that are packed at a time
CACHE_LINE = 64  # bytes
ARRAYS = 8  # at most, that share a block


class Room:
    """Memory for the arrays of a thread, which take it up again and again.

    Each array begins where a cache line does. NumPy's own begin 16 bytes after one, so that each of
    AVX-512's loads reads two lines: products take 1.3 times as long. And it is one block: of
    several, malloc gives the memory back to the system each time, and to get it again takes longer
    than to fill it.

    Parameters
    ----------
    size : int
        Elements of the arrays that there are at a time.
    dtype : numpy.dtype
        The accumulator's.
    """

    def __init__(self, size: int, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._line = CACHE_LINE // dtype.itemsize
        block = np.empty(size + ARRAYS * self._line, dtype)
        self._begin = -block.ctypes.data % CACHE_LINE // dtype.itemsize
        self._block = block[self._begin :]
        self._used = 0

    def clear(self) -> None:
        """Forget all arrays."""
        self._used = 0

    def array(self, *shape: int) -> np.ndarray:
        """An array of any values."""
        size = math.prod(shape)
        array = self._block[self._used : self._used + size].reshape(shape)
        self._used += -(-size // self._line) * self._line
        return array


def packed_shapes(k: np.ndarray | CodedRows, v: np.ndarray | CodedRows) -> list[tuple[int, ...]]:
    """The shapes that keys and values (heads, seqlen_k, features) have when they are packed."""
    heads, seqlen_k, head_dim = k.shape
    panels = -(-seqlen_k // PANEL)
    row = -(-v.shape[-1] // 16) * 16  # numbers of a cache line
    return [(heads, panels, head_dim + 1, PANEL), (heads, seqlen_k, row)]


def packed_size(k: np.ndarray | CodedRows, v: np.ndarray | CodedRows) -> int:
    """The elements of both together."""
    return sum(math.prod(shape) for shape in packed_shapes(k, v))


def pack(
    k: np.ndarray | CodedRows, v: np.ndarray | CodedRows, room: Room
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values (heads, seqlen_k, features) as products like them best.

    Returns
    -------
    panels : numpy.ndarray (heads, panels, head_dim + 1, PANEL)
        The keys, with a row of ones behind their features: a query's number there is added to its
        scores. Behind the last key is anything.
    values : numpy.ndarray (heads, seqlen_k, head_dim_v)
        The values, brought together.
    norms : numpy.ndarray (heads,)
        Of the longest key of each head.
    """
    panels, values = (room.array(*shape) for shape in packed_shapes(k, v))
    values = values[..., : v.shape[-1]]
    panels[:, :, -1] = 1
    longest = np.zeros(len(k), room.dtype)
    heads, seqlen_k, head_dim = k.shape
    step = PANEL * max(1, PACKED // (PANEL * heads * head_dim))
    for j in range(0, seqlen_k, step):  # some keys at a time, in cache
        part = k[:, j : j + step]
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part)
        keys = np.ascontiguousarray(widened(part, room.dtype))
        values[:, j : j + step] = widened(v[:, j : j + step], room.dtype)
        longest = np.maximum(longest, np.vecdot(keys, keys).max(axis=1))
        full, whole = _pieces(keys.shape[1], PANEL)
        i = j // PANEL
        pieces = keys[:, :whole].reshape(heads, full, PANEL, head_dim)
        panels[:, i : i + full, :-1] = pieces.swapaxes(2, 3)
        if whole < keys.shape[1]:
            panels[:, i + full, :-1, : keys.shape[1] - whole] = keys[:, whole:].swapaxes(1, 2)
    return panels, values, np.sqrt(longest)


def widened(array: np.ndarray | CodedRows, dtype: np.dtype) -> np.ndarray:
    """`array` in the accumulator's dtype."""
    if isinstance(array, CodedRows):
        return array.values(dtype)
    if array.dtype == dtype:
        return array
    return array.astype(dtype) if dtype != np.float32 else to_float32(array)


def matmul_panels(a: np.ndarray, panels: np.ndarray, out: np.ndarray) -> None:
    """``a @ b`` of stacks of matrices, where the columns of b, as many as out has, lie in panels
    (stack, panels, inner, PANEL)."""
    stack, num_rows, inner = a.shape
    if inner > LONGEST_SUM:
        half, rest = inner // 2, np.empty_like(out)
        matmul_panels(a[:, :, :half], panels[:, :, :half], out)
        matmul_panels(a[:, :, half:], panels[:, :, half:], rest)
        out += rest
        return
    full, wide = _pieces(out.shape[-1], PANEL)
    size = _block_rows(inner, PANEL, min(PANEL_ROWS, num_rows))
    down, long = _pieces(num_rows, size)
    left = a[:, :long].reshape(stack, down, 1, size, inner)
    target = out[:, :long, :wide].reshape(stack, down, size, full, PANEL)
    np.matmul(left, panels[:, None, :full], out=target.swapaxes(2, 3))
    if long < num_rows:
        target = out[:, long:, :wide].reshape(stack, num_rows - long, full, PANEL)
        np.matmul(a[:, None, long:], panels[:, :full], out=target.swapaxes(1, 2))
    if wide < out.shape[-1]:
        matmul(a, panels[:, full, :, : out.shape[-1] - wide], out=out[:, :, wide:])


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``a @ b`` of stacks of matrices, in blocks that BLAS multiplies on this thread."""
    stack, num_rows, inner = a.shape
    num_columns = b.shape[-1]
    if num_rows < BLOCK_ROWS and max(inner, num_columns) <= BLOCK_LENGTH:
        np.matmul(a, b, out=out)
    elif num_rows >= BLOCK_ROWS and num_columns >= max(inner, PANEL):
        full, wide = _pieces(num_columns, PANEL)
        panels = b[:, :, :wide].reshape(stack, inner, full, PANEL).swapaxes(1, 2)
        matmul_panels(a, panels, out=out[:, :, :wide])
        if wide < num_columns:
            matmul(a, b[:, :, wide:], out=out[:, :, wide:])
    elif num_rows >= BLOCK_ROWS:
        size = _block_rows(inner, num_columns, num_rows)
        count, done = _pieces(num_rows, size)
        blocks = a[:, :done].reshape(stack, count, size, inner)
        target = out[:, :done].reshape(stack, count, size, num_columns)
        np.matmul(blocks, b[:, None], out=target)
        if done < num_rows:
            np.matmul(a[:, done:], b, out=out[:, done:])
    elif num_columns > inner:
        count, done = _pieces(num_columns, BLOCK_LENGTH)
        blocks = b[:, :, :done].reshape(stack, inner, count, BLOCK_LENGTH).transpose(2, 0, 1, 3)
        target = out[:, :, :done].reshape(stack, num_rows, count, BLOCK_LENGTH)
        np.matmul(a, blocks, out=target.transpose(2, 0, 1, 3))
        if done < num_columns:
            np.matmul(a, b[:, :, done:], out=out[:, :, done:])
    else:
        count, done = _pieces(inner, BLOCK_LENGTH)
        left = a[:, :, :done].reshape(stack, num_rows, count, BLOCK_LENGTH).transpose(2, 0, 1, 3)
        right = b[:, :done].reshape(stack, count, BLOCK_LENGTH, num_columns).swapaxes(0, 1)
        np.add.reduce(left @ right, axis=0, out=out)
        if done < inner:
            out += a[:, :, done:] @ b[:, done:]


def _pieces(length: int, size: int) -> tuple[int, int]:
    """How many whole pieces a length has, and where they end."""
    return length // size, length // size * size


def matmul_of_nonfinite(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``a @ b`` where a 0 in `a` leaves out even NaN and infinity in `b`."""
    np.matmul(a, np.where(np.isfinite(b), b, 0), out=out)
    for special, there in ((np.inf, b == np.inf), (-np.inf, b == -np.inf), (np.nan, np.isnan(b))):
        out[a @ there.astype(a.dtype) > 0] += special


def _block_rows(inner: int, columns: int, most: int) -> int:
    """Rows of a block: BLAS likes even numbers, and from 8 on multiples of 4."""
    rows = max(1, min(most, BLOCK_PRODUCT // max(1, inner * columns)))
    return rows // 4 * 4 if rows >= 8 else max(1, rows // 2 * 2)
