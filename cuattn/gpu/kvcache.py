"""What a paged cache's operations do to its pages, on a GPU. Host arrays go over in stream order;
nothing synchronises.
"""

from __future__ import annotations

import cupy
import numpy as np

from cuattn.gpu import compiler, tiles
from cuattn.gpu.params import CACHE_WRITE_PARAMS, divisor


class Batch:
    """The page table, lengths and new tokens of some sequences, as
    :class:`cuattn.reference.kvcache.Batch`.
    """

    def __init__(self, batch: int, width: int) -> None:
        self.page_table = cupy.zeros((batch, width), np.int32)
        self.seq_lens = cupy.zeros(batch, np.int32)
        self.cu_new = cupy.zeros(batch + 1, np.int32)
        self.uniform = 0  # new tokens of each sequence, where all have as many

    def update(
        self,
        positions: np.ndarray,
        columns: np.ndarray,
        pages: np.ndarray,
        seq_lens: np.ndarray,
        cu_new: np.ndarray,
    ) -> None:
        """Set some entries of the page table, and all lengths: one copy, one kernel."""
        batch, width = self.page_table.shape
        header = 2 * batch + 1
        numbers = np.empty(header + 2 * pages.size, np.int32)
        numbers[:batch] = seq_lens
        numbers[batch:header] = cu_new
        numbers[header::2] = positions * width + columns
        numbers[header + 1 :: 2] = pages
        with cupy.cuda.Device(self.page_table.device.id) as device:
            kernel = compiler.kernel(tiles.CACHE_UPDATE, device.id)
            threads = tiles.CACHE_UPDATE.config.threads
            kernel(
                (-(-(header + pages.size) // threads),),
                (threads,),
                (
                    cupy.asarray(numbers),
                    self.page_table,
                    self.seq_lens,
                    self.cu_new,
                    np.int32(batch),
                    np.int32(pages.size),
                ),
            )
        same = batch > 0 and bool((np.diff(cu_new) == cu_new[1]).all())
        self.uniform = int(cu_new[1]) if same else 0


def copy_pages(
    k_pages: cupy.ndarray, v_pages: cupy.ndarray, source: list[int], target: list[int]
) -> None:
    """Copy pages of every layer: (num_layers, num_pages, page_size, heads, head_dim)."""
    with cupy.cuda.Device(k_pages.device.id):
        for pages in (k_pages, v_pages):
            pages[:, target] = pages[:, source]


def write(
    k: cupy.ndarray,
    v: cupy.ndarray,
    k_pages: cupy.ndarray,
    v_pages: cupy.ndarray,
    batch: Batch,
    *,
    rope: tuple[cupy.ndarray, cupy.ndarray] | None = None,
    interleaved: bool = False,
) -> None:
    """Put new keys, rotated where asked, and values into their slots.

    Parameters as of :func:`cuattn.reference.kvcache.write`.
    """
    arrays = (k, v, k_pages, v_pages)
    aligned = all(
        a.data.ptr % 16 == 0
        and all(n % 16 == 0 for n in a.strides[:-1])
        and a.shape[-1] * a.itemsize % 16 == 0
        for a in arrays
    )
    variant = tiles.cache_write(k.dtype.name, k.itemsize, aligned=aligned)
    config = variant.config
    strides = [[n // a.itemsize for n in a.strides[:-1]] for a in arrays]
    cos, sin = (None, None) if rope is None else map(_aligned, rope)
    params = np.zeros((), CACHE_WRITE_PARAMS)
    for name, array in zip(("k", "v", "k_pages", "v_pages"), arrays, strict=True):
        params[name] = array.data.ptr
    params["page_table"], params["seq_lens"] = batch.page_table.data.ptr, batch.seq_lens.data.ptr
    params["cu_new"], params["uniform"] = batch.cu_new.data.ptr, batch.uniform
    if rope is not None:
        params["cos"], params["sin"], params["pairs"] = cos.data.ptr, sin.data.ptr, cos.shape[1]
    (params["k_token"], params["k_head"]), (params["v_token"], params["v_head"]) = strides[:2]
    params["k_page"], params["v_page"] = strides[2:]
    params["batch"], params["table_stride"] = batch.page_table.shape
    params["total"], params["heads"], params["head_dim"] = k.shape
    params["head_dim_v"], params["interleaved"] = v.shape[-1], interleaved
    params["page_shift"] = k_pages.shape[1].bit_length() - 1
    params["by_uniform"] = divisor(max(batch.uniform, 1))
    for name, array in (("by_k_vecs", k), ("by_v_vecs", v)):
        params[name] = divisor(array.shape[-1] * array.itemsize // config.vec_bytes)
    pieces = k.shape[1] * max(k.shape[2], v.shape[2]) * k.itemsize // config.vec_bytes
    lanes_shift = min((pieces - 1).bit_length(), config.threads.bit_length() - 1)
    params["lanes_shift"] = lanes_shift
    tokens = config.threads >> lanes_shift
    with cupy.cuda.Device(k.device.id) as device:
        compiler.kernel(variant, device.id)(
            (-(-k.shape[0] // tokens), -(-pieces >> lanes_shift)),
            (config.threads,),
            (params.view((np.void, CACHE_WRITE_PARAMS.itemsize))[()],),
        )


def _aligned(table: cupy.ndarray) -> cupy.ndarray:
    return table if table.data.ptr % 16 == 0 else table.copy()
