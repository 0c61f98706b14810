"""What a call over a cache asks for: checks that contiguous caches, pages and latents share.

Checks read the values of what is on the host, and only shapes and dtypes of what is on the device:
there, kernels clamp.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from cuattn._arrays import check_index_dtype
from cuattn._spec import check_cu_seqlens, check_fits

MAX_PAGE_SIZE = 256
MAX_CAPACITY = (1 << 30) - 1  # positions of kernels, and their limits without a window, are below


def check_capacity(function: str, spec: Any) -> None:
    """Check that the keys of a sequence can be counted."""
    if spec.seqlen_k > MAX_CAPACITY:
        name = "page_table" if spec.keys == "paged" else "k_cache"
        raise ValueError(
            f"{function}: {name} has room for {spec.seqlen_k} keys of a sequence, must be "
            f"{MAX_CAPACITY} at most"
        )


def check_num_splits(function: str, num_splits: Any) -> int | str | None:
    """Check how a GPU is to split a sequence's keys, and return it with a number as an int."""
    if isinstance(num_splits, str) and num_splits != "fixed":
        raise ValueError(f'{function}: num_splits is {num_splits!r}, must be an integer or "fixed"')
    if num_splits is None or isinstance(num_splits, str):
        return num_splits
    if not isinstance(num_splits, numbers.Integral) or isinstance(num_splits, bool):
        raise TypeError(
            f'{function}: num_splits must be an integer or "fixed", got '
            f"{type(num_splits).__qualname__}"
        )
    if not 1 <= int(num_splits) <= 1024:
        raise ValueError(
            f"{function}: num_splits is {num_splits}, must be from 1 to 1024, or None for the "
            "default"
        )
    return int(num_splits)


def check_seq_lens(function: str, seq_lens: Any, batch: int) -> None:
    """Check the lengths of a batch's sequences."""
    if seq_lens.shape != (batch,):
        raise ValueError(f"{function}: seq_lens has shape {seq_lens.shape}, must be ({batch},)")
    check_index_dtype(function, "seq_lens", seq_lens)
    check_fits(function, "seq_lens", seq_lens)


def check_used_pages(
    function: str, page_table: np.ndarray, lens: np.ndarray, num_pages: int, page_size: int
) -> None:
    """Check, on the host, that each page with a valid key is one of those there are."""
    used = np.arange(page_table.shape[1]) < -(-lens[:, None] // page_size)
    wrong = used & ((page_table < 0) | (page_table >= num_pages))
    if wrong.any():
        b = int(wrong.any(axis=1).argmax())
        raise IndexError(
            f"{function}: page_table has {page_table[b, wrong[b]][0]} for sequence {b}, must be "
            f"from 0 to {num_pages - 1}"
        )


def check_shared_pages(
    function: str, page_table: np.ndarray, before: np.ndarray, prefix: int, page_size: int
) -> None:
    """Check, on the host, what an integer `prefix` promises; `before` are the keys that come before
    each sequence's queries."""
    pages = page_table[:, : prefix // page_size]
    different = (pages != pages[:1]).any(axis=1)
    if different.any():
        b = int(different.argmax())
        raise ValueError(
            f"{function}: prefix is {prefix}, and page_table has {pages[b]} there for sequence "
            f"{b}, must have the first sequence's {pages[0]}"
        )
    if (before < prefix).any():
        b = int((before < prefix).argmax())
        raise ValueError(
            f"{function}: prefix is {prefix}, and sequence {b} has {max(before[b], 0)} keys before "
            "its queries, must have at least as many"
        )


def check_after_prefix(function: str, own: np.ndarray, counts: Any) -> None:
    """Check, on the host, that all queries under a causal mask come after a prefix that is a pair
    of arrays: a kernel lets them see all of it. `own` are the keys of each sequence beside the
    prefix, `counts` its queries."""
    counts = np.broadcast_to(counts, own.shape)
    # One before the first own key still sees the whole prefix: the one query of padding, say.
    early = own < counts - 1
    if early.any():
        b = int(early.argmax())
        raise ValueError(
            f"{function}: prefix is a pair (k, v), and seq_lens has {own[b]} for sequence {b}, "
            f"must be its number of queries, {counts[b]}, at least"
        )


def check_page_size(function: str, name: str, page_size: int) -> None:
    """Check how many tokens a page has."""
    if page_size & (page_size - 1) or not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(
            f"{function}: {name} has page size {page_size}, must be a power of two up to "
            f"{MAX_PAGE_SIZE}"
        )


def check_pages(
    function: str, k_pages: Any, v_pages: Any, names: tuple[str, str] = ("k_pages", "v_pages")
) -> None:
    """Check pages of keys and values, which the function calls `names`."""
    for label, pages in zip(names, (k_pages, v_pages), strict=True):
        if pages.ndim != 4:
            raise ValueError(
                f"{function}: {label} has shape {pages.shape}, must be "
                "(num_pages, page_size, heads_kv, head_dim)"
            )
    if v_pages.shape[:2] != k_pages.shape[:2]:
        raise ValueError(
            f"{function}: {names[1]} has shape {v_pages.shape}, must begin with {names[0]}' "
            f"(num_pages, page_size) = {k_pages.shape[:2]}"
        )
    check_page_size(function, names[0], k_pages.shape[1])


def check_page_table(function: str, page_table: Any) -> None:
    """Check the table of a batch's pages."""
    if page_table.ndim != 2:
        raise ValueError(
            f"{function}: page_table has shape {page_table.shape}, must be (batch, max_pages)"
        )
    check_index_dtype(function, "page_table", page_table)


def check_rows(function: str, name: str, q: Any, cu_seqlens_q: Any, batch: int) -> None:
    """Check that q, of that name, has queries of as many sequences as page_table has rows."""
    if cu_seqlens_q is None:
        if q.ndim and q.shape[0] != batch:  # q without axes is for attention_spec
            hint = "; queries end to end have cu_seqlens_q" if q.ndim == 3 else ""
            raise ValueError(
                f"{function}: {name} has batch {q.shape[0]}, must be page_table's {batch}{hint}"
            )
        return
    check_cu_seqlens(function, "cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_q.shape[0] != batch + 1:
        raise ValueError(
            f"{function}: cu_seqlens_q has shape {cu_seqlens_q.shape}, must be page_table's "
            f"{batch} sequences + 1"
        )


def pages_of_prefix(function: str, prefix: Any, page_size: int, max_pages: int) -> int | None:
    """Check a prefix that is a number of keys in pages which all sequences share; None for 0."""
    if not isinstance(prefix, numbers.Integral) or isinstance(prefix, bool):
        raise TypeError(
            f"{function}: prefix must be an integer or a pair (k, v), got "
            f"{type(prefix).__qualname__}"
        )
    prefix = int(prefix)
    if prefix < 0 or prefix % page_size or prefix > max_pages * page_size:
        raise ValueError(
            f"{function}: prefix is {prefix}, must be a multiple of the page size {page_size} from "
            f"0 to {max_pages * page_size}"
        )
    return prefix or None


def pair_of_prefix(function: str, prefix: Any) -> tuple[Any, Any]:
    """A prefix that is a pair (k, v); of another a pair of None."""
    if not isinstance(prefix, tuple):
        return None, None
    if len(prefix) != 2:
        raise ValueError(
            f"{function}: prefix is a tuple of {len(prefix)}, must be an integer or a pair (k, v)"
        )
    return prefix


def check_prefix_arrays(function: str, stored: list[tuple[Any, Any, str]], spec: Any) -> None:
    """Check a prefix that is a pair of arrays: of each the array, its dtype and its format."""
    (k, *_), (v, *_) = stored
    for label, (array, dtype, _), head_dim in zip(
        ("prefix[0]", "prefix[1]"), stored, (spec.head_dim, spec.head_dim_v), strict=True
    ):
        token = spec.heads_kv, head_dim
        if array is None or array.ndim != 3 or array.shape[1:] != token:
            got = "None" if array is None else f"shape {array.shape}"
            want = ", ".join(map(str, ("prefix_len", *token)))
            raise ValueError(f"{function}: {label} has {got}, must be ({want})")
        if dtype != spec.dtype:
            raise TypeError(f"{function}: {label} has dtype {dtype}, must be {spec.dtype}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            f"{function}: prefix[1] has length {v.shape[0]}, must be prefix[0]'s {k.shape[0]}"
        )


def add_token(function: str, out: Any, name: str = "q") -> Any:
    """View `out` with an axis of one token, which q, of that name, has not."""
    if out.ndim != 3:
        raise ValueError(f"{function}: out has shape {out.shape}, must have {name}'s three axes")
    return out[:, None]
