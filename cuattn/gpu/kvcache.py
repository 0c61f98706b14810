"""What a paged cache's operations do to its pages, on a GPU. Host arrays go over in stream order;
nothing synchronises.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cupy
import numpy as np

from cuattn._quantized import QuantizedArray, codes_of
from cuattn.gpu import compiler, dispatch
from cuattn.gpu.arguments import Scales, cache_write_arguments, quantized_write_arguments
from cuattn.gpu.memory import apart, capturing, pointer, temporaries, use_device
from cuattn.gpu.plan import Filled, Plan
from cuattn.gpu.quantization import format_of, operand, scale_addresses

MOST_PLANS = 256  # whose launches a batch remembers

__all__ = ["Batch", "append", "capturing", "copy_pages", "read_pages", "write", "write_pages"]


class Batch:
    """The page table, lengths and new tokens of some sequences, as
    :class:`cuattn.reference.kvcache.Batch`.
    """

    def __init__(self, pages: cupy.ndarray, batch: int, width: int) -> None:
        _refuse_capture("the page table")
        if batch * width >= 2**31:  # entries are counted in int32
            raise ValueError(
                f"PagedKVCache.page_table: ids has {batch} sequences of up to {width} pages, whose "
                f"table must have fewer than {2**31} entries; a lower max_seqlen makes it narrower"
            )
        with use_device(pages):
            self.page_table = cupy.zeros((batch, width), np.int32)
            self.seq_lens = cupy.zeros(batch, np.int32)
            self.cu_new = cupy.zeros(batch + 1, np.int32)
        arrays = (self.page_table, self.seq_lens, self.cu_new)
        self.pointers = tuple(array.data.ptr for array in arrays)
        self.uniform = 0  # new tokens of each sequence, where all have as many
        self.writes: dict[tuple, Filled] = {}  # launches, by what else they depend on
        self._updates: dict[int, _Update] = {}  # by how many numbers come with the launch

    def update(
        self,
        positions: np.ndarray,
        columns: np.ndarray,
        pages: np.ndarray,
        seq_lens: np.ndarray,
        new: np.ndarray,
    ) -> None:
        """Set some entries of the page table, and all lengths: one kernel, with which the numbers
        come, or after one copy where they are many."""
        _refuse_capture("the page table")
        batch, width = self.page_table.shape
        header = 2 * batch + 1
        count = header + 2 * pages.size
        variant = dispatch.cache_update(count)
        given = variant.config.numbers
        with use_device(self.page_table):
            update = self._updates.get(given)
            if update is None:
                update = self._updates[given] = _Update(variant, self)
            numbers = update.numbers if given else np.empty(count, np.int32)
            numbers[:batch] = seq_lens
            numbers[batch] = 0
            np.cumsum(new, out=numbers[batch + 1 : header])
            if pages.size:
                numbers[header:count:2] = positions * width + columns
                numbers[header + 1 : count : 2] = pages
            update.launch(numbers, count - header >> 1)
        counts = new.tolist()
        self.uniform = counts[0] if counts and counts.count(counts[0]) == batch else 0


class _Update:
    """Launches kvcache/update.cu for a batch.

    Attributes
    ----------
    numbers : int32 array
        Those that come with the launch.
    """

    def __init__(self, variant: dispatch.Variant, batch: Batch) -> None:
        page_table = batch.page_table
        self._kernel = compiler.kernel(variant, page_table.device.id)
        self._threads = variant.config.threads
        self._header = 2 * page_table.shape[0] + 1
        # Addresses of the six arguments, then the last five, then the first.
        self._words = np.zeros(11 + max(1, variant.config.numbers // 2), np.uint64)
        self._address = self._words.ctypes.data
        self._words[:6] = self._address + 8 * np.array([11, 6, 7, 8, 9, 10], np.uint64)
        self._words[6:10] = *batch.pointers, page_table.shape[0]
        self._first = self._words[11:]
        self._given = variant.config.numbers > 0
        self.numbers = self._first.view(np.int32)

    def launch(self, numbers: np.ndarray, changes: int) -> None:
        """Set what `numbers` say, among it `changes` entries."""
        copied = None if self._given else cupy.asarray(numbers)
        if copied is not None:
            self._first[0] = copied.data.ptr
        self._words[10] = changes
        blocks = -(-(self._header + changes) // self._threads)
        self._kernel((blocks, 1, 1), (self._threads, 1, 1), self._address)


def _refuse_capture(what: str) -> None:
    if capturing():
        raise RuntimeError(
            f"PagedKVCache: {what} would change while a CUDA graph is captured, and again in each "
            "replay; call extend and page_table before the capture"
        )


def copy_pages(array: cupy.ndarray, source: list[int], target: list[int]) -> None:
    """Copy pages of every layer: (num_layers, num_pages, ...)."""
    _refuse_capture("pages")
    with use_device(array):
        array[:, target] = array[:, source]


def read_pages(array: cupy.ndarray, pages: np.ndarray) -> np.ndarray:
    """Copy pages of every layer to the host, when what came before on the
    current stream has been done."""
    _refuse_capture("pages")
    with use_device(array):
        return array[:, cupy.asarray(pages)].get()


def write_pages(array: cupy.ndarray, pages: np.ndarray, content: np.ndarray) -> None:
    """Overwrite pages of every layer, with what the host has."""
    _refuse_capture("pages")
    with use_device(array):
        array[:, cupy.asarray(pages)] = cupy.asarray(content)


def write(
    k: cupy.ndarray,
    v: cupy.ndarray,
    k_pages: cupy.ndarray | QuantizedArray,
    v_pages: cupy.ndarray | QuantizedArray,
    batch: Batch,
    *,
    rope: tuple[cupy.ndarray, cupy.ndarray] | None = None,
    interleaved: bool = False,
) -> None:
    """Put new keys, rotated where asked, and values into their slots.

    Parameters as of :func:`cuattn.reference.kvcache.write`.
    """
    cos, sin = (None, None) if rope is None else map(_aligned, rope)
    pages = codes_of(k_pages), codes_of(v_pages)
    memory = [array.data.mem for array in pages]
    if k.data.mem in memory or v.data.mem in memory:  # views of pages, which takes less to find out
        k, v = (apart(new, *pages) for new in (k, v))
    if isinstance(k_pages, QuantizedArray) or isinstance(v_pages, QuantizedArray):
        page_table, seq_lens, cu_new = batch.pointers
        _launch_quantized(
            k,
            v,
            k_pages,
            v_pages,
            batch.page_table.shape,
            batch.uniform,
            AnyCache(batch.page_table.shape[1], 0 if cos is None else cos.shape[0]),
            0 if cos is None else cos.shape[1],
            interleaved,
            {
                "page_table": page_table,
                "seq_lens": seq_lens,
                "cu_new": cu_new,
                "cos": pointer(cos),
                "sin": pointer(sin),
                "slots": 0,
                "left_padding": 0,
            },
        )
        return
    k_address, v_address = k.data.ptr, v.data.ptr
    k_pages_address, v_pages_address = k_pages.data.ptr, v_pages.data.ptr
    aligned = (k_address | v_address | k_pages_address | v_pages_address) % 16 == 0
    pairs = 0 if cos is None else cos.shape[1]
    like = k.shape, k.strides, v.strides, batch.uniform, pairs, interleaved, aligned
    with use_device(k):
        launch = batch.writes.get(like)
        if launch is None:
            if len(batch.writes) >= MOST_PLANS:
                batch.writes.clear()
            plan = _plan(
                k.device.id,
                k.dtype,
                (*k.shape, v.shape[2]),
                (k.strides, v.strides, k_pages.strides, v_pages.strides),
                batch.page_table.shape,
                batch.uniform,
                k_pages.shape[1],
                k_pages.shape[0],
                pairs,
                interleaved,
                aligned,
            )
            page_table, seq_lens, cu_new = batch.pointers
            launch = batch.writes[like] = plan.filled(
                {
                    "page_table": page_table,
                    "seq_lens": seq_lens,
                    "cu_new": cu_new,
                    "slots": 0,
                    "left_padding": 0,
                },
                ("k", "v", "k_pages", "v_pages", "cos", "sin"),
            )
        launch(k_address, v_address, k_pages_address, v_pages_address, pointer(cos), pointer(sin))


def append(
    k: cupy.ndarray,
    v: cupy.ndarray,
    k_cache: cupy.ndarray | QuantizedArray,
    v_cache: cupy.ndarray | QuantizedArray,
    batch: int,
    *,
    seq_lens: cupy.ndarray | None,
    page_table: cupy.ndarray | None,
    slots: cupy.ndarray | None,
    cu_seqlens: cupy.ndarray | None,
    left_padding: cupy.ndarray | None,
    rope: tuple[cupy.ndarray, cupy.ndarray] | None,
    interleaved: bool,
) -> None:
    """Put new keys, rotated where asked, and values into a cache or pages.

    Parameters as of :func:`cuattn.reference.kvcache.append`; tokens whose place or position does
    not exist are not written.
    """
    cos, sin = (None, None) if rope is None else map(_aligned, rope)
    caches = codes_of(k_cache), codes_of(v_cache)
    # Tokens that are moved within a cache: all are read before one is written.
    k, v = (apart(new, *caches) for new in (k, v))
    num_pages, page_slots = k_cache.shape[:2]
    table_shape = (batch, 1) if page_table is None else page_table.shape
    uniform = len(k) // batch if cu_seqlens is None and batch else 0
    any_cache = AnyCache(
        0 if page_table is None else page_table.strides[0] // page_table.itemsize,
        0 if cos is None else cos.shape[0],
    )
    addresses = {
        "page_table": pointer(page_table),
        "seq_lens": pointer(seq_lens),
        "cu_new": pointer(cu_seqlens),
        "cos": pointer(cos),
        "sin": pointer(sin),
        "slots": pointer(slots),
        "left_padding": pointer(left_padding),
    }
    pairs = 0 if cos is None else cos.shape[1]
    if isinstance(k_cache, QuantizedArray) or isinstance(v_cache, QuantizedArray):
        _launch_quantized(
            k,
            v,
            k_cache,
            v_cache,
            table_shape,
            uniform,
            any_cache,
            pairs,
            interleaved,
            addresses,
        )
        return
    addresses |= {
        "k": k.data.ptr,
        "v": v.data.ptr,
        "k_pages": k_cache.data.ptr,
        "v_pages": v_cache.data.ptr,
    }
    whole = addresses["k"] | addresses["v"] | addresses["k_pages"] | addresses["v_pages"]
    with use_device(k):
        _plan(
            k.device.id,
            k.dtype,
            (*k.shape, v.shape[2]),
            (k.strides, v.strides, k_cache.strides, v_cache.strides),
            table_shape,
            uniform,
            page_slots,
            num_pages,
            pairs,
            interleaved,
            whole % 16 == 0,
            any_cache,
        ).launch(addresses)


class AnyCache(NamedTuple):
    """What a write into a cache of the caller's own is told besides."""

    table_stride: int  # in elements
    max_position: int  # rows of the tables of rope


@functools.lru_cache(maxsize=4096)
def _plan(
    device: int,
    dtype: np.dtype,
    shape: tuple[int, int, int, int],
    strides: tuple[tuple[int, ...], ...],
    table_shape: tuple[int, int],
    uniform: int,
    page_slots: int,
    num_pages: int,
    pairs: int,
    interleaved: bool,
    aligned: bool,
    any_cache: AnyCache | None = None,
) -> Plan:
    """Choose and compile the kernel of a write, and pack what stays the same between calls like
    it."""
    total, heads, *dims = shape
    itemsize = dtype.itemsize
    bytes_between = (n for array in strides for n in array[:-1])
    variant = dispatch.cache_write(
        dtype.name,
        itemsize,
        aligned=aligned
        and all(n % 16 == 0 for n in (*bytes_between, *(d * itemsize for d in dims))),
        any_cache=any_cache is not None,
    )
    config = variant.config
    vectors = heads * max(dims) * itemsize // config.vec_bytes
    lanes_shift = min((vectors - 1).bit_length(), config.threads.bit_length() - 1)
    tokens = config.threads >> lanes_shift
    arguments = cache_write_arguments(
        shape,
        strides,
        table_shape,
        itemsizes=(itemsize,) * 4,
        page_slots=page_slots,
        num_pages=num_pages,
        uniform=uniform,
        vec_bytes=config.vec_bytes,
        lanes_shift=lanes_shift,
        pairs=pairs,
        interleaved=interleaved,
        table_stride=table_shape[1] if any_cache is None else any_cache.table_stride,
        max_position=0 if any_cache is None else any_cache.max_position,
    )
    grid = (-(-total // tokens), -(-vectors >> lanes_shift))
    return Plan(dispatch.Launch(variant, grid, (arguments,)), device)


def _launch_quantized(
    k: cupy.ndarray,
    v: cupy.ndarray,
    k_pages: cupy.ndarray | QuantizedArray,
    v_pages: cupy.ndarray | QuantizedArray,
    table_shape: tuple[int, int],
    uniform: int,
    any_cache: AnyCache,
    pairs: int,
    interleaved: bool,
    addresses: dict[str, Any],
) -> None:
    """Quantise new keys and values into their slots; `addresses` has those of all arrays but k, v
    and the cache."""
    k_stored, v_stored = operand(k_pages), operand(v_pages)
    k_codes, v_codes = k_stored.codes, v_stored.codes
    addresses |= {
        "k": k.data.ptr,
        "v": v.data.ptr,
        "k_pages": k_codes.data.ptr,
        "v_pages": v_codes.data.ptr,
        **scale_addresses(k_stored, v_stored),
    }
    with use_device(k):
        _quantized_plan(
            k.device.id,
            k.dtype,
            (*k.shape, v.shape[2]),
            (k.strides, v.strides, k_codes.strides, v_codes.strides),
            (format_of(k_pages), format_of(v_pages)),
            (k_stored.scales, v_stored.scales),
            (_has_given_scales(k_pages), _has_given_scales(v_pages)),
            table_shape,
            uniform,
            k_pages.shape[1],
            k_pages.shape[0],
            pairs,
            interleaved,
            (addresses["k"] | addresses["v"]) % 16 == 0
            and (addresses["k_pages"] | addresses["v_pages"]) % 16 == 0,
            any_cache,
        ).launch(addresses)


def _has_given_scales(pages: cupy.ndarray | QuantizedArray) -> bool:
    return isinstance(pages, QuantizedArray) and not pages.has_scale_of_tokens


@functools.lru_cache(maxsize=4096)
def _quantized_plan(
    device: int,
    dtype: np.dtype,
    shape: tuple[int, int, int, int],
    strides: tuple[tuple[int, ...], ...],
    formats: tuple[str, str],
    scales: tuple[Scales | None, Scales | None],
    is_static: tuple[bool, bool],
    table_shape: tuple[int, int],
    uniform: int,
    page_slots: int,
    num_pages: int,
    pairs: int,
    interleaved: bool,
    aligned: bool,
    any_cache: AnyCache,
) -> Plan:
    """As `_plan`, of a cache that holds codes."""
    total, heads, *dims = shape
    aligned = aligned and all(stride % 16 == 0 for of in strides for stride in of[:-1])
    lanes = {
        dispatch.row_lanes(
            dtype.name,
            dim,
            dim if of is None else dim // of.groups,
            aligned=aligned,
        )
        for dim, of in zip(dims, scales, strict=True)
    }
    usual = not any(is_static) and all(
        of is not None and (of.paired if format == "int4" else not of.has_minimum)
        for of, format in zip(scales, formats, strict=True)
    )
    # What kvcache/write_codes.cu takes, where tokens are enough; it has angles at 32-bit places.
    whole = usual and all(of.groups == 1 and not of.has_offset for of in scales if of is not None)
    whole &= scales[1] is not None and not scales[1].rotated
    whole &= pairs == 0 or (pairs == dims[0] // 2 and 0 < any_cache.max_position < 2**32 // pairs)
    variant = dispatch.quantized_cache_write(
        dtype.name,
        lanes.pop() if len(lanes) == 1 else 0,
        formats if usual else ("", ""),
        tokens=total if whole else 0,
    )
    arguments = cache_write_arguments(
        shape,
        strides,
        table_shape,
        itemsizes=(
            *(dtype.itemsize, dtype.itemsize),
            *(1 if format else dtype.itemsize for format in formats),
        ),
        page_slots=page_slots,
        num_pages=num_pages,
        uniform=uniform,
        vec_bytes=dtype.itemsize,
        lanes_shift=0,
        pairs=pairs,
        interleaved=interleaved,
        **any_cache._asdict(),
    )
    k_dim, v_dim = dims
    codes = quantized_write_arguments(formats, (k_dim, v_dim), scales, is_static, heads)
    grid = variant.config.grid(total, heads, rotary=pairs > 0)
    return Plan(dispatch.Launch(variant, grid, (arguments, codes)), device)


def _aligned(table: cupy.ndarray) -> cupy.ndarray:
    if table.data.ptr % 16 == 0:
        return table
    with use_device(table), temporaries():
        return table.copy()
