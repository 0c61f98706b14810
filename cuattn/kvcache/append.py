"""New keys and values into caches and pages that the caller owns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuattn._arrays import (
    FLOAT_DTYPES,
    acc_dtype,
    as_arrays,
    check_bool,
    check_given,
    check_index_dtype,
    is_contiguous_last_axis,
)
from cuattn._backend import backend, contiguous, contiguous_last_axis, indices, reshaped
from cuattn._decoding_spec import check_page_table, check_pages, check_seq_lens
from cuattn._errors import explain_errors
from cuattn._quantized import QuantizedArray, codes_of
from cuattn._spec import check_cu_seqlens, check_rising
from cuattn._typing import Array


@explain_errors
def append_kv(
    k_cache: Array | QuantizedArray,
    v_cache: Array | QuantizedArray,
    k: Array,
    v: Array,
    seq_lens: Array | None,
    *,
    page_table: Array | None = None,
    slots: Array | None = None,
    cu_seqlens: Array | None = None,
    left_padding: Array | None = None,
    rope: tuple[Array, Array] | None = None,
    interleaved: bool = False,
) -> None:
    """Write new tokens' keys, rotated where asked, and values into caches that the caller owns.

    Sequence ``b`` has ``seq_lens[b]`` tokens with the new ones, which are its last. On a GPU it is
    one kernel, which reads lengths, page table and slots on the device: no synchronisation.
    :class:`cuattn.PagedKVCache` does the same for pages of its own, and keeps the books.

    Parameters
    ----------
    k_cache : array (batch, capacity, heads_kv, head_dim) or (num_pages, page_size, heads_kv, \
head_dim)
        Keys, written to: of sequences one by one, or with `page_table` or `slots` of pages. A
        :class:`cuattn.QuantizedArray` gets codes, and where each head of each token has scales of
        its own, those; scales that are shared, of any shape, stay as they are. Its `like` is then
        the dtype of `k`.
    v_cache : array (batch, capacity, heads_kv, head_dim_v) or (num_pages, page_size, heads_kv, \
head_dim_v)
        Values, likewise.
    k : array (total, heads_kv, head_dim) or (batch, n, heads_kv, head_dim)
        Keys of the new tokens, of the cache's dtype: sequence by sequence as `cu_seqlens` says, or
        ``n`` of each.
    v : array (total, heads_kv, head_dim_v) or (batch, n, heads_kv, head_dim_v)
        Values.
    seq_lens : int32 array (batch,)
        Tokens of each sequence, the new ones included: what :func:`cuattn.flash_decode` takes next.
        None is allowed with `slots` and without `rope` and `left_padding`.
    page_table : int32 array (batch, max_pages), optional
        As in :func:`cuattn.paged_attention`; page_size is a power of two up to 256.
    slots : int32 array (total,), optional
        In place of `page_table`, the slot of each new token, counted through all pages: token ``t``
        goes to slot ``slots[t] % page_size`` of page ``slots[t] // page_size``. Negative: it is
        not written.
    cu_seqlens : int32 array (batch + 1,), optional
        With k (total, ...): sequence ``b`` has the new tokens ``cu_seqlens[b]`` to ``cu_seqlens[b +
        1]``. Starts at 0, never falls; rows of k past its end are not written.
    left_padding : int32 array (batch,), optional
        The first so many slots of each sequence, 0 or more, are padding: new tokens there are not
        written, and positions of `rope` are counted from the first slot after it.
    rope : (cos, sin), optional
        Tables (max_position, rotary_dim // 2), float32 (float64 for float64 caches): pairs of the
        first rotary_dim features of k are rotated by their token's position on the way [1]_.
    interleaved : bool
        The pairs are neighbours (2i, 2i + 1) and not (i, i + rotary_dim // 2).

    Raises
    ------
    TypeError, ValueError, IndexError
        An argument does not fit; the message names it, and nothing has been written. Of NumPy
        arrays that includes positions beyond a cache, a page table or the tables of `rope`; on a
        GPU tokens at such positions are not written.

    References
    ----------
    .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> k_cache, v_cache = np.zeros((2, 1, 8, 2, 4), np.float32)  # one sequence of up to 8 tokens
    >>> new = np.ones((1, 3, 2, 4), np.float32)
    >>> cuattn.append_kv(k_cache, v_cache, new, 2 * new, np.array([5], np.int32))
    >>> v_cache[0, :, 0, 0]  # two tokens were there before, and three are new
    array([0., 0., 2., 2., 2., 0., 0., 0.], dtype=float32)
    """
    name = "append_kv"
    check_given(name, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    cos, sin = pair(name, rope)
    xp, arrays = as_arrays(
        name,
        k_cache=codes_of(k_cache),
        v_cache=codes_of(v_cache),
        k=k,
        v=v,
        seq_lens=seq_lens,
        page_table=page_table,
        slots=slots,
        cu_seqlens=cu_seqlens,
        left_padding=left_padding,
        **{"rope[0]": cos, "rope[1]": sin},
    )
    keys, values, new_k, new_v, *numbers, cos, sin = arrays
    lens, table, places, bounds, padding = numbers
    keys = k_cache if isinstance(k_cache, QuantizedArray) else keys
    values = v_cache if isinstance(v_cache, QuantizedArray) else values
    _check_caches(name, keys, values, table, places)
    if lens is None and (places is None or rope is not None or padding is not None):
        raise ValueError(
            f"{name}: seq_lens is None, must be an array unless slots are given, and neither rope "
            "nor left_padding"
        )
    if places is not None and table is not None:
        raise ValueError(f"{name}: page_table must be None where slots are given, got an array")
    batch = _check_new(name, keys, values, new_k, new_v, lens, table, places, bounds)
    total = math.prod(new_k.shape[:-2])
    if places is not None:
        if places.shape != (total,):
            raise ValueError(f"{name}: slots has shape {places.shape}, must be ({total},)")
        check_index_dtype(name, "slots", places)
    if padding is not None:
        if padding.shape != (batch,):
            raise ValueError(f"{name}: left_padding has shape {padding.shape}, must be ({batch},)")
        check_index_dtype(name, "left_padding", padding)
        if isinstance(padding, np.ndarray) and (padding < 0).any():
            raise ValueError(f"{name}: left_padding has {padding.min()}, must be at least 0")
    interleaved = check_bool(name, "interleaved", interleaved)
    if rope is not None:
        check_rope(name, cos, sin, keys.shape[-1], _dtype(keys))
        rope = contiguous(xp, cos), contiguous(xp, sin)
    if not total or (lens is not None and not batch):
        return
    backend(xp, "kvcache").append(
        flat(xp, new_k, total),
        flat(xp, new_v, total),
        keys,
        values,
        batch,
        **{
            label: None if array is None else indices(xp, array)
            for label, array in (
                ("seq_lens", lens),
                ("page_table", table),
                ("slots", places),
                ("cu_seqlens", bounds),
                ("left_padding", padding),
            )
        },
        rope=rope,
        interleaved=interleaved,
    )


def pair(function: str, rope: Any) -> tuple[Any, Any]:
    """The tables (cos, sin), or twice None."""
    try:
        cos, sin = (None, None) if rope is None else rope
    except (TypeError, ValueError):
        raise TypeError(
            f"{function}: rope must be a pair (cos, sin) or None, got {type(rope).__qualname__}"
        ) from None
    return cos, sin


def check_rope(function: str, cos: Any, sin: Any, head_dim: int, dtype: np.dtype) -> None:
    """Check the tables by which keys are rotated on their way into a cache of `dtype`."""
    acc = acc_dtype(dtype)
    for label, table in (("rope[0]", cos), ("rope[1]", sin)):
        if table is None or table.ndim != 2 or table.shape[1] > head_dim // 2:
            got = "None" if table is None else f"shape {table.shape}"
            raise ValueError(
                f"{function}: {label} has {got}, must be (max_position, up to {head_dim // 2})"
            )
        if table.dtype != acc:
            raise TypeError(f"{function}: {label} has dtype {table.dtype}, must be {acc}")
    if sin.shape != cos.shape:
        raise ValueError(
            f"{function}: rope[1] has shape {sin.shape}, must be rope[0]'s {cos.shape}"
        )


def _check_caches(function: str, keys: Any, values: Any, table: Any, places: Any) -> None:
    for label, cache in (("k_cache", keys), ("v_cache", values)):
        if cache.ndim != 4:
            raise ValueError(
                f"{function}: {label} has shape {cache.shape}, must be (batch, capacity, heads_kv, "
                "head_dim) or (num_pages, page_size, heads_kv, head_dim)"
            )
        if not all(cache.shape[2:]):
            raise ValueError(
                f"{function}: {label} has shape {cache.shape}, must have a head and a feature"
            )
        if _dtype(cache) not in FLOAT_DTYPES:
            allowed = ", ".join(FLOAT_DTYPES.values())
            raise TypeError(
                f"{function}: {label} has dtype {cache.dtype}, must be one of {allowed}"
            )
        stored = codes_of(cache)
        if cache.size and not is_contiguous_last_axis(stored):
            raise ValueError(
                f"{function}: {label} has strides {stored.strides}, must have a contiguous last "
                "axis"
            )
        written = [stored]
        if isinstance(cache, QuantizedArray) and cache.has_scale_of_tokens:
            written += [cache.scale, cache.minimum]
        if any(isinstance(array, np.ndarray) and not array.flags.writeable for array in written):
            raise ValueError(f"{function}: {label} is read-only, must be writable")
    if _dtype(values) != _dtype(keys):
        raise TypeError(
            f"{function}: v_cache has dtype {_dtype(values)}, must be k_cache's {_dtype(keys)}"
        )
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"{function}: v_cache has shape {values.shape}, must begin with k_cache's "
            f"{keys.shape[:3]}"
        )
    if table is not None:
        check_pages(function, keys, values, names=("k_cache", "v_cache"))
        check_page_table(function, table)
    if places is not None and keys.shape[0] * keys.shape[1] >= 1 << 31:
        raise ValueError(
            f"{function}: k_cache has shape {keys.shape}, must have fewer than 2**31 slots"
        )


def _check_new(
    function: str,
    keys: Any,
    values: Any,
    new_k: Any,
    new_v: Any,
    lens: Any,
    table: Any,
    places: Any,
    bounds: Any,
) -> int:
    """Check the new tokens and how they are divided; return the number of sequences."""
    ndim = 3 if bounds is not None or lens is None else 4
    lead = "(total, " if ndim == 3 else "(batch, n, "
    for label, array, cache in (("k", new_k, keys), ("v", new_v, values)):
        token = cache.shape[2:]
        if array.ndim != ndim or array.shape[-2:] != token:
            raise ValueError(
                f"{function}: {label} has shape {array.shape}, must be "
                f"{lead}{', '.join(map(str, token))})"
            )
        if array.dtype != _dtype(cache):
            raise TypeError(
                f"{function}: {label} has dtype {array.dtype}, must be the cache's {_dtype(cache)}"
            )
    if new_v.shape[:-1] != new_k.shape[:-1]:
        raise ValueError(
            f"{function}: v has shape {new_v.shape}, must begin with k's {new_k.shape[:-1]}"
        )
    if bounds is not None:
        check_cu_seqlens(function, "cu_seqlens", bounds)
        check_rising(function, "cu_seqlens", bounds, new_k.shape[0])
        batch = bounds.shape[0] - 1
    else:
        batch = new_k.shape[0] if ndim == 4 else 0
    if lens is not None:
        check_seq_lens(function, lens, batch)
    if table is not None and table.shape[0] != batch:
        raise ValueError(
            f"{function}: page_table has {table.shape[0]} rows, must have one for each of the "
            f"{batch} sequences"
        )
    if table is None and places is None and keys.shape[0] != batch:
        raise ValueError(
            f"{function}: k_cache has batch {keys.shape[0]}, must have that of the {batch} "
            "sequences, or be pages with page_table or slots"
        )
    return batch


def _dtype(cache: Any) -> np.dtype:
    """The dtype of what is written into a cache."""
    return cache.like if isinstance(cache, QuantizedArray) else cache.dtype


def flat(xp: Any, array: Any, total: int) -> Any:
    """New keys or values (total, heads, features) with contiguous features."""
    array = contiguous_last_axis(xp, array)
    return array if array.ndim == 3 else reshaped(xp, array, (total, *array.shape[2:]))
