"""Attention of a few new tokens over a cache of keys and values: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from cuattn._arrays import (
    FLOAT_DTYPES,
    acc_dtype,
    as_arrays,
    check_bool,
    check_given,
)
from cuattn._backend import backend, folded_mask, indices
from cuattn._decoding_spec import (
    add_token,
    check_after_prefix,
    check_capacity,
    check_num_splits,
    check_page_table,
    check_pages,
    check_prefix_arrays,
    check_rows,
    check_seq_lens,
    check_shared_pages,
    check_used_pages,
    pages_of_prefix,
    pair_of_prefix,
)
from cuattn._errors import explain_errors
from cuattn._quantized import QuantizedArray, as_stored, codes_of
from cuattn._repeat import repeated
from cuattn._spec import (
    attention_spec,
    check_reach,
    check_rising,
    check_scores,
    check_shared,
)
from cuattn._typing import Array, DecodeOptions, NumPyArray, PagedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["flash_decode", "merge_attention", "paged_attention"]


@overload
def flash_decode(
    q: NumPyArray,
    k_cache: Array | QuantizedArray,
    v_cache: Array | QuantizedArray,
    seq_lens: Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> NumPyArray: ...


@overload
def flash_decode(
    q: NumPyArray,
    k_cache: Array | QuantizedArray,
    v_cache: Array | QuantizedArray,
    seq_lens: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[NumPyArray, NDArray[Any]]: ...


@overload
def flash_decode(
    q: Array,
    k_cache: Array | QuantizedArray,
    v_cache: Array | QuantizedArray,
    seq_lens: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Any, Any]: ...


@overload
def flash_decode(
    q: Array,
    k_cache: Array | QuantizedArray,
    v_cache: Array | QuantizedArray,
    seq_lens: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Any: ...


@repeated(k="k_cache", v="v_cache")
@explain_errors
def flash_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seq_lens: Any,
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    num_splits: int | str | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Attention of each sequence's newest tokens over its cache.

    The result is that of :func:`cuattn.flash_attention` on each sequence's first ``seq_lens[b]``
    keys. On a GPU the keys of a sequence are shared out to as many multiprocessors as it takes to
    keep them all busy [1]_, by the lengths found on the device, in one launch without
    synchronisation: a captured CUDA graph may be replayed after `seq_lens` has changed in place.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim) or (batch, heads_q, head_dim)
        Queries of the newest tokens: query ``i`` sits at position ``seq_lens[b] - seqlen_q + i``.
        float16, bfloat16, float32 or float64; NumPy or CuPy. head_dim from 1 to 512.
    k_cache : array or QuantizedArray (batch, capacity, heads_kv, head_dim)
        Keys, of q's dtype or quantised, the new tokens' included. heads_kv must divide heads_q.
        What lies past a sequence's length may be anything, NaN included, and is not read.
    v_cache : array or QuantizedArray (batch, capacity, heads_kv, head_dim_v)
        Values, likewise; their format may be another.
    seq_lens : int32 array (batch,)
        How many keys of each sequence are valid; values below 0 mean 0, and those beyond the
        capacity mean the capacity. int64 is taken too: on a GPU values beyond int32 mean the
        capacity likewise, and on the host they are an error.
    causal, window, scale, softcap, bias, mask, key_mask, alibi_slopes, sinks
        As in :func:`cuattn.flash_attention`, with ``seq_lens[b]`` as seqlen_k. Keys outside the
        window are not read. Element ``[b, h, i, j]`` of `bias` and `mask`, ``[b, j]`` of
        `key_mask`, belongs to the key in slot ``j`` of sequence ``b``; all have as many keys as
        each other, and as the longest sequence at least (with fewer, NumPy raises, and a GPU takes
        the last one's element for those beyond it).
    num_splits : int or "fixed", optional
        How a GPU splits a sequence's keys. None: as evenly as possible over the device; results may
        then differ in their last bits with the batch around a sequence. "fixed": every 1024 keys,
        so that a row's result is the same, bit for bit, whatever the batch (but not whatever the
        strides: arrays that cannot be read 16 bytes at a time have other kernels). An integer from
        1 to 1024: in so many equal parts at most.
    return_lse : bool
        Also return the natural-log sum of exponentials of each row, sinks included.
    out : array of q's shape with head_dim_v, optional
        Written to and returned.

    Returns
    -------
    out : array (batch, seqlen_q, heads_q, head_dim_v), or (batch, heads_q, head_dim_v)
        Of q's dtype. A query that may see no key gets 0.
    lse : array (batch, heads_q, seqlen_q)
        Only with `return_lse`; float32 (float64 for float64 inputs). seqlen_q is 1 where q has no
        such axis.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Notes
    -----
    Of several queries of a sequence an earlier one does not see the last keys. If their values are
    infinite or NaN, the float16 and bfloat16 kernels give it NaN; NumPy, float32 and float64 leave
    them out.

    References
    ----------
    .. [1] Dao et al., "Flash-Decoding for long-context inference", 2023.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 8, 64), dtype=np.float32)
    >>> cache = rng.standard_normal((2, 100, 2, 64), dtype=np.float32)
    >>> cuattn.flash_decode(q, cache, cache, np.array([37, 100], np.int32)).shape
    (2, 8, 64)
    """
    name = "flash_decode"
    check_given(name, q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    given_k, given_v = k_cache, v_cache
    xp, (q, k_cache, v_cache, seq_lens, bias, mask, key_mask, *rest) = as_arrays(
        name,
        q=q,
        k_cache=codes_of(k_cache),
        v_cache=codes_of(v_cache),
        seq_lens=seq_lens,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        out=out,
    )
    alibi_slopes, sinks, out = rest
    k_cache, k_dtype, k_format = as_stored(given_k, k_cache, q.dtype)
    v_cache, v_dtype, v_format = as_stored(given_v, v_cache, q.dtype)
    given_out = out
    single = q.ndim == 3
    if single:
        q = q[:, None]
        out = None if out is None else add_token(name, out)
    spec = attention_spec(
        name,
        q.shape,
        k_cache.shape,
        v_cache.shape,
        q.dtype,
        k_dtype,
        v_dtype,
        causal=check_bool(name, "causal", causal),
        window=window,
        scale=scale,
        softcap=softcap,
        keys="cached",
        formats=(k_format, v_format),
        names=("q", "k_cache", "v_cache"),
    )
    check_seq_lens(name, seq_lens, spec.batch)
    result, lse = _decode(
        name,
        xp,
        q,
        k_cache,
        v_cache,
        spec,
        seq_lens=seq_lens,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        num_splits=num_splits,
        out=out,
        return_lse=return_lse,
    )
    if given_out is not None:
        result = given_out
    elif single:
        result = result[:, 0]
    return (result, lse) if return_lse else result


@overload
def paged_attention(
    q: NumPyArray,
    k_pages: Array | QuantizedArray,
    v_pages: Array | QuantizedArray,
    page_table: Array,
    seq_lens: Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> NumPyArray: ...


@overload
def paged_attention(
    q: NumPyArray,
    k_pages: Array | QuantizedArray,
    v_pages: Array | QuantizedArray,
    page_table: Array,
    seq_lens: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[NumPyArray, NDArray[Any]]: ...


@overload
def paged_attention(
    q: Array,
    k_pages: Array | QuantizedArray,
    v_pages: Array | QuantizedArray,
    page_table: Array,
    seq_lens: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Any, Any]: ...


@overload
def paged_attention(
    q: Array,
    k_pages: Array | QuantizedArray,
    v_pages: Array | QuantizedArray,
    page_table: Array,
    seq_lens: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[PagedOptions],
) -> Any: ...


@repeated(k="k_pages", v="v_pages")
@explain_errors
def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    prefix: Any = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    num_splits: int | str | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Attention of each sequence's newest tokens over a cache that lies in pages.

    As :func:`flash_decode`, with token ``j`` of sequence ``b`` in slot ``j % page_size`` of page
    ``page_table[b, j // page_size]`` [1]_. With `cu_seqlens_q` sequences may have different numbers
    of queries: decoding and chunks of prompts in one call.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim) or (batch, heads_q, head_dim)
        Queries of the newest tokens; with `cu_seqlens_q` (total, heads_q, head_dim).
    k_pages : array or QuantizedArray (num_pages, page_size, heads_kv, head_dim)
        Keys, of q's dtype or quantised. page_size is a power of two up to 256.
    v_pages : array or QuantizedArray (num_pages, page_size, heads_kv, head_dim_v)
        Values, likewise.
    page_table : int32 array (batch, max_pages)
        Entries past a sequence's last page may be anything. One before it that names no page is an
        error on the CPU; on a GPU the sequence's results are undefined.
    seq_lens : int32 array (batch,)
        How many keys each sequence has, the queries' own included; clamped as in
        :func:`flash_decode`.
    cu_seqlens_q : int32 array (batch + 1,), optional
        Sequence ``b`` has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``: they are the
        newest of its tokens. Starts at 0, never falls, ends at total at most; rows past its end are
        not computed.
    prefix : int or (k, v), optional
        What the whole batch shares, read once for all of it (cascade [2]_). An integer, a multiple
        of page_size, promises that the first so many keys of every sequence are in the same pages
        and come before all its queries; the result is what it is without. A pair of arrays
        (prefix_len, heads_kv, head_dim) and (..., head_dim_v) are keys and values before every
        sequence's own, which alone `page_table` and `seq_lens` then count, the queries' among them;
        not with `window`, `alibi_slopes`, `bias`, `mask` or `key_mask`. With ``num_splits="fixed"``
        each sequence reads it by itself.
    bias, mask, key_mask : array, optional
        As in :func:`flash_decode`: keys are counted from the first of each sequence, whatever pages
        they lie in; with `cu_seqlens_q` queries likewise.
    causal, window, scale, softcap, alibi_slopes, sinks, num_splits, return_lse, out
        As in :func:`flash_decode`.

    Returns
    -------
    out : array of q's shape with head_dim_v
        Of q's dtype. A query that may see no key gets 0; rows that belong to no sequence are
        undefined.
    lse : array (batch, heads_q, seqlen_q), or (heads_q, total)
        Only with `return_lse`; float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError, IndexError
        An argument does not fit; the message names it, and nothing has been written. Of NumPy
        arrays what they hold is checked too: `cu_seqlens_q`, the pages that are used, and that
        `prefix` is shared.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for Large Language Model Serving with
       PagedAttention", 2023.
    .. [2] Juravsky et al., "Hydragen", 2024.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> rng = np.random.default_rng(0)
    >>> pages = rng.standard_normal((8, 16, 2, 64), dtype=np.float32)  # 8 pages of 16 tokens
    >>> page_table = np.array([[5, 0], [3, 7]], np.int32)
    >>> seq_lens = np.array([10, 30], np.int32)  # entry [0, 1] of the table is not used
    >>> q = rng.standard_normal((4, 8, 64), dtype=np.float32)
    >>> cu_seqlens_q = np.array([0, 1, 4], np.int32)  # one new token, and three
    >>> cuattn.paged_attention(
    ...     q, pages, pages, page_table, seq_lens, cu_seqlens_q=cu_seqlens_q
    ... ).shape
    (4, 8, 64)
    """
    name = "paged_attention"
    check_given(
        name, q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table, seq_lens=seq_lens
    )
    prefix_k, prefix_v = given_prefix = pair_of_prefix(name, prefix)
    given_k, given_v = k_pages, v_pages
    arrays = as_arrays(
        name,
        q=q,
        k_pages=codes_of(k_pages),
        v_pages=codes_of(v_pages),
        page_table=page_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        prefix_k=codes_of(prefix_k),
        prefix_v=codes_of(prefix_v),
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        out=out,
    )
    xp, (q, k_pages, v_pages, page_table, seq_lens, cu_seqlens_q, *rest) = arrays
    prefix_k, prefix_v, bias, mask, key_mask, alibi_slopes, sinks, out = rest
    k_pages, k_dtype, k_format = as_stored(given_k, k_pages, q.dtype)
    v_pages, v_dtype, v_format = as_stored(given_v, v_pages, q.dtype)
    check_pages(name, k_pages, v_pages)
    check_page_table(name, page_table)
    batch, max_pages = page_table.shape
    page_size = k_pages.shape[1]
    capacity = (max_pages * page_size, *k_pages.shape[2:])
    capacity_v = (max_pages * page_size, *v_pages.shape[2:])
    ragged = cu_seqlens_q is not None
    given_out = out
    single = q.ndim == 3 and not ragged
    check_rows(name, "q", q, cu_seqlens_q, batch)
    if not ragged:
        capacity, capacity_v = (batch, *capacity), (batch, *capacity_v)
    if single:
        q = q[:, None]
        out = None if out is None else add_token(name, out)
    spec = attention_spec(
        name,
        q.shape,
        capacity,
        capacity_v,
        q.dtype,
        k_dtype,
        v_dtype,
        causal=check_bool(name, "causal", causal),
        window=window,
        scale=scale,
        softcap=softcap,
        sequences=batch if ragged else None,
        keys="paged",
        page_size=page_size,
        formats=(k_format, v_format),
        names=("q", "k_pages", "v_pages"),
    )
    if isinstance(prefix, tuple):
        stored = [
            as_stored(given, array, q.dtype)
            for given, array in zip(given_prefix, (prefix_k, prefix_v), strict=True)
        ]
        check_prefix_arrays(name, stored, spec)
        unfit = {"window": window, "alibi_slopes": alibi_slopes, "bias": bias, "mask": mask}
        for label, given in (*unfit.items(), ("key_mask", key_mask)):
            if given is not None:
                raise ValueError(f"{name}: prefix is a pair (k, v), so {label} must be None")
        prefix = None if prefix_k.shape[0] == 0 else (stored[0][0], stored[1][0])
    elif prefix is not None:
        prefix = pages_of_prefix(name, prefix, page_size, max_pages)
    if ragged:
        check_rising(name, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_seq_lens(name, seq_lens, batch)
    if xp is np:
        lens = np.clip(seq_lens, 0, max_pages * page_size)
        check_used_pages(name, page_table, lens, k_pages.shape[0], page_size)
        counts = np.diff(cu_seqlens_q) if ragged else q.shape[1]
        if isinstance(prefix, int):
            check_shared_pages(name, page_table, lens - counts, prefix, page_size)
        elif prefix is not None and causal:
            check_after_prefix(name, lens, counts)
    result, lse = _decode(
        name,
        xp,
        q,
        k_pages,
        v_pages,
        spec,
        seq_lens=seq_lens,
        page_table=indices(xp, page_table),
        cu_seqlens_q=indices(xp, cu_seqlens_q) if ragged else None,
        prefix=prefix,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        num_splits=num_splits,
        out=out,
        return_lse=return_lse,
    )
    if given_out is not None:
        result = given_out
    elif single:
        result = result[:, 0]
    return (result, lse) if return_lse else result


@overload
def merge_attention(
    outs: NDArray[Any] | Sequence[NDArray[Any]], lses: NDArray[Any] | Sequence[NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[Any]]: ...


@overload
def merge_attention(
    outs: Array | Sequence[Array], lses: Array | Sequence[Array]
) -> tuple[Any, Any]: ...


@explain_errors
def merge_attention(outs: Any, lses: Any) -> tuple[Any, Any]:
    """Merge attention results over disjoint sets of keys into the result over all of them.

    ``out = sum_i w_i out_i / sum_i w_i`` with ``w_i = exp(lse_i - max lse)``, and ``lse = max lse +
    log(sum_i w_i)``. A partial result with lse -inf has seen no key and weighs nothing.

    Parameters
    ----------
    outs : array, or sequence of arrays
        Partial results, stacked on axis 0: each (batch, seqlen, heads, head_dim), (total, heads,
        head_dim), or (batch, heads, head_dim).
    lses : array, or sequence of arrays
        Their lse, stacked likewise: each (batch, heads, seqlen), (heads, total), or (batch, heads,
        1). float32, or float64 for float64 outs.

    Returns
    -------
    out : array
        Of one partial result's shape and dtype.
    lse : array
        Of one lse's shape.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q, k = np.ones((1, 1, 2, 8)), np.random.default_rng(0).standard_normal((1, 6, 2, 8))
    >>> parts = [cuattn.flash_attention(q, x, x, return_lse=True) for x in (k[:, :4], k[:, 4:])]
    >>> out, lse = cuattn.merge_attention(*zip(*parts))
    >>> bool(np.allclose(out, cuattn.flash_attention(q, k, k)))
    True
    """
    name = "merge_attention"
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if not outs:
        raise ValueError(f"{name}: outs has 0 parts, must have at least 1")
    if len(outs) != len(lses):
        raise ValueError(f"{name}: lses has {len(lses)} parts, must have outs' {len(outs)}")
    labelled = {f"outs[{i}]": out for i, out in enumerate(outs)}
    labelled |= {f"lses[{i}]": lse for i, lse in enumerate(lses)}
    xp, arrays = as_arrays(name, **labelled)
    outs, lses = arrays[: len(outs)], arrays[len(outs) :]
    first, first_lse = outs[0], lses[0]
    if first.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name}: outs has dtype {first.dtype}, must be one of "
            f"{', '.join(FLOAT_DTYPES.values())}"
        )
    axes: tuple[int, ...]
    if first.ndim == 4:
        axes, lse_shape = (0, 2, 1), (first.shape[0], first.shape[2], first.shape[1])
    elif first.ndim == 3 and first_lse.ndim == 2:
        axes, lse_shape = (1, 0), first.shape[1::-1]
    elif first.ndim == 3:
        axes, lse_shape = (0, 1, 2), (*first.shape[:2], 1)
    else:
        raise ValueError(
            f"{name}: outs[0] has shape {first.shape}, must be (batch, seqlen, heads, head_dim), "
            "(total, heads, head_dim) or (batch, heads, head_dim)"
        )
    for kind, parts, shape, dtype in (
        ("outs", outs, first.shape, first.dtype),
        ("lses", lses, lse_shape, acc_dtype(first.dtype)),
    ):
        for i, part in enumerate(parts):
            if part.shape != shape:
                raise ValueError(f"{name}: {kind}[{i}] has shape {part.shape}, must be {shape}")
            if part.dtype != dtype:
                raise TypeError(f"{name}: {kind}[{i}] has dtype {part.dtype}, must be {dtype}")
    if first.ndim == 3 and first_lse.ndim == 3:  # one token a sequence
        outs, axes = [out[:, None] for out in outs], (0, 2, 1)
    out, lse = backend(xp, "decoding").merge(outs, lses, axes)
    return out.reshape(first.shape), lse


def _decode(
    function: str,
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    spec: Any,
    *,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    bias: Any,
    mask: Any,
    key_mask: Any,
    alibi_slopes: Any,
    sinks: Any,
    num_splits: int | str | None,
    out: Any,
    return_lse: bool,
    **options: Any,
) -> tuple[Any, Any]:
    """Check what both kinds of cache have, and hand the call to the backend of their library."""
    if not (bias is None and mask is None and key_mask is None):
        scores = {"bias": bias, "mask": mask, "key_mask": key_mask}
        check_scores(function, spec, **scores)
        if xp is np:
            counts = spec.seqlen_q if cu_seqlens_q is None else np.diff(cu_seqlens_q)
            longest = min(int(seq_lens.max(initial=0)), spec.seqlen_k)
            check_reach(function, int(np.max(counts, initial=0)), longest, **scores)
    check_shared(function, spec, alibi_slopes=alibi_slopes, sinks=sinks, out=out)
    check_capacity(function, spec)
    return backend(xp, "attention").forward(
        q,
        k,
        v,
        spec,
        seq_lens=indices(xp, seq_lens),
        cu_seqlens_q=cu_seqlens_q,
        bias=bias,
        mask=folded_mask(xp, mask, key_mask),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        num_splits=check_num_splits(function, num_splits),
        out=out,
        return_lse=check_bool(function, "return_lse", return_lse),
        **options,
    )


def _parts(name: str, arrays: Any) -> list[Any]:
    """Partial results as a list: of a sequence of arrays its items, of a stacked array views."""
    check_given("merge_attention", **{name: arrays})
    if hasattr(arrays, "shape") and not arrays.shape:
        raise ValueError(f"merge_attention: {name} has shape (), must be stacked on axis 0")
    try:
        parts = list(arrays)
    except TypeError:
        raise TypeError(
            f"merge_attention: {name} must be an array, or a sequence of arrays, got "
            f"{type(arrays).__qualname__}"
        ) from None
    check_given("merge_attention", **{f"{name}[{i}]": part for i, part in enumerate(parts)})
    return parts
