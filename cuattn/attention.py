"""Attention over whole sequences: the public functions."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from cuattn._arrays import FLOAT_DTYPES, as_arrays, check_bool, check_given, check_out
from cuattn._backend import backend, contiguous, folded_mask, indices, reshaped
from cuattn._errors import explain_errors
from cuattn._repeat import repeated
from cuattn._spec import (
    AttentionSpec,
    attention_spec,
    broadcasts,
    check_seed,
    check_shared,
    checked_call,
    checked_varlen,
)
from cuattn._typing import Array, AttentionOptions, NumPyArray

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["flash_attention", "flash_attention_varlen", "scaled_dot_product_attention"]


@overload
def flash_attention(
    q: NumPyArray,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> NumPyArray: ...


@overload
def flash_attention(
    q: NumPyArray,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[NumPyArray, NDArray[Any]]: ...


@overload
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Any]: ...


@overload
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any: ...


@repeated(seeds=("seed",), seed="seed_value")
@explain_errors
def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int = 0,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Attention of queries over keys and values, exact, in memory linear in the sequence.

    ``out = softmax(score) @ v`` with, for query ``i`` and key ``j`` and in this order, ``s = scale
    * q_i.k_j``, ``s = softcap * tanh(s / softcap)``, ``s += bias``, ``s -= alibi_slope * abs(i +
    seqlen_k - seqlen_q - j)``, then the masks. A query that may see no key gets output 0 and lse
    -inf. The algorithm is FlashAttention-2's [1]_; on Hopper the kernels overlap as [2]_.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim) or (seqlen_q, heads_q, head_dim)
        Queries: float16, bfloat16, float32 or float64; NumPy or CuPy. head_dim from 1 to 512. In
        place of batch there may be any number of axes, here and below; where their strides do not
        let them be one axis, the array is copied.
    k : array (batch, seqlen_k, heads_kv, head_dim)
        Keys, of q's dtype. heads_kv must divide heads_q: consecutive query heads share a key head
        (GQA, MQA).
    v : array (batch, seqlen_k, heads_kv, head_dim_v)
        Values, of q's dtype.
    causal : bool
        Query ``i`` sees keys ``j <= i + seqlen_k - seqlen_q`` (aligned to the last key).
    window : (left, right), optional
        Query ``i`` sees keys from ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q +
        right``, both included; None on a side for no limit there. A negative side leaves out keys
        on its own side too: ``(8, -1)`` is the eight keys before the query's own position.
    scale : float, optional
        Factor of q.k; default ``1 / sqrt(head_dim)``.
    softcap : float, optional
        Scores are squashed to ``(-softcap, softcap)`` by tanh; 0 is None, as in flash-attn.
    bias : array, optional
        Added to the scores; floating, broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
    mask : array of bool, optional
        True keeps a score; broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
    key_mask : array of bool (batch, seqlen_k), optional
        True keeps a key, for all queries of its sequence: the mask of a padded batch. Together with
        `mask` it makes a mask that has their common shape.
    alibi_slopes : array (heads_q,) or (batch, heads_q), optional
        Slopes of the linear distance penalty [3]_.
    sinks : array (heads_q,), optional
        ``exp(sink)`` joins each row's denominator, and no value [4]_.
    dropout : float
        Probability, from 0 to below 1, with which each softmax weight is dropped; the others are
        divided by what is left. It is rounded to a multiple of 2**-16. `lse` is that of all
        weights.
    seed : int
        From 0 to 2**64 - 1. Together with head, query and key it decides what is dropped: the same
        in NumPy and on every GPU, and in :func:`flash_attention_backward`. Calls that are given
        none drop the same weights: give each step and each layer one of its own.
    return_lse : bool
        Also return the natural-log sum of exponentials of each row, sinks included.
    out : array (batch, seqlen_q, heads_q, head_dim_v), optional
        Written to and returned.

    Returns
    -------
    out : array (batch, seqlen_q, heads_q, head_dim_v)
        Of q's dtype, and without the batch axis where q has none.
    lse : array (batch, heads_q, seqlen_q)
        Only with `return_lse`; float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Dao, "FlashAttention-2", 2023, section 3.1.
    .. [2] Shah et al., "FlashAttention-3", 2024.
    .. [3] Press et al., "Train Short, Test Long", 2021 (ALiBi).
    .. [4] Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((1, 128, 8, 64), dtype=np.float32)
    >>> cuattn.flash_attention(q, q, q, causal=True).shape
    (1, 128, 8, 64)
    """
    name = "flash_attention"
    check_given(name, q=q, k=k, v=v)
    xp, (q, k, v, bias, mask, key_mask, alibi_slopes, sinks, out) = as_arrays(
        name,
        q=q,
        k=k,
        v=v,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        out=out,
    )
    given_out = out
    single, lead = q.ndim == 3, q.shape[:-3]
    if len(lead) > 1 and out is not None:
        check_out(name, out, (*q.shape[:-1], *v.shape[-1:]), q.dtype)
        out = contiguous(xp, out).reshape(math.prod(lead), *out.shape[len(lead) :])
    q, k, v = as_batch(name, xp, q=q, k=k, v=v)
    if single and out is not None:
        out = add_batch(name, "out", out)
    bias, mask, key_mask, alibi_slopes = fold_terms(
        name, xp, lead, bias, mask, key_mask, alibi_slopes
    )
    spec = checked_call(
        name,
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
    )
    result, lse = _forward(
        name,
        xp,
        q,
        k,
        v,
        spec,
        bias=bias,
        mask=folded_mask(xp, mask, key_mask),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        seed=check_seed(name, seed),
        out=out,
        return_lse=return_lse,
    )
    if single:
        result = result[0]
        lse = None if lse is None else lse[0]
    elif len(lead) > 1:
        result = result.reshape(*lead, *result.shape[1:])
        lse = None if lse is None else lse.reshape(*lead, *lse.shape[1:])
        if given_out is not None and not given_out.flags.c_contiguous:
            given_out[...] = result
    if given_out is not None:
        result = given_out
    return (result, lse) if return_lse else result


@overload
def flash_attention_varlen(
    q: NumPyArray,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> NumPyArray: ...


@overload
def flash_attention_varlen(
    q: NumPyArray,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[NumPyArray, NDArray[Any]]: ...


@overload
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Any]: ...


@overload
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any: ...


@repeated(seeds=("seed",), seed="seed_value", cu_seqlens_k=("cu_seqlens_k", "cu_seqlens_q"))
@explain_errors
def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int = 0,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Attention within each of several sequences laid end to end, without padding.

    Parameters
    ----------
    q : array (total_q, heads_q, head_dim)
        Queries of all sequences, one after the other.
    k, v : array (total_k, heads_kv, head_dim), (total_k, heads_kv, head_dim_v)
        Keys and values, likewise.
    cu_seqlens_q : int32 array (sequences + 1,)
        Sequence ``b`` has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``. Starts at 0,
        never falls, ends at total_q at most; rows past its end are not computed. On a GPU it is
        read by the kernel only: no synchronisation.
    cu_seqlens_k : int32 array (sequences + 1,), optional
        The same of the keys; default cu_seqlens_q.
    bias, mask : array, optional
        As in :func:`flash_attention`: element ``[b, h, i, j]`` belongs to query ``i`` and key ``j``
        of sequence ``b``. There may be more queries and keys than the longest sequences have; with
        fewer, NumPy raises, and a GPU takes the last one's element for those beyond it.
    key_mask : array of bool (sequences, seqlen_k), optional
        True keeps key ``j`` of sequence ``b``; of the same seqlen_k as `bias` and `mask`.
    causal, window, scale, softcap, alibi_slopes, sinks, dropout, seed, return_lse, out
        As in :func:`flash_attention`, with positions and lengths of each sequence; alibi_slopes
        (heads_q,) or (sequences, heads_q).

    Returns
    -------
    out : array (total_q, heads_q, head_dim_v)
        Of q's dtype. Rows that belong to no sequence are left as they were (`out=`) or undefined.
    lse : array (heads_q, total_q)
        Only with `return_lse`; float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((100, 8, 64), dtype=np.float32)
    >>> cu_seqlens = np.array([0, 30, 100], np.int32)  # a sequence of 30 tokens, and one of 70
    >>> out = cuattn.flash_attention_varlen(q, q, q, cu_seqlens, causal=True)
    >>> second = cuattn.flash_attention(q[30:], q[30:], q[30:], causal=True)
    >>> bool(np.allclose(out[30:], second, atol=1e-6))
    True
    """
    name = "flash_attention_varlen"
    check_given(name, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    xp, arrays = as_arrays(
        name,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        out=out,
    )
    q, k, v, cu_seqlens_q, cu_seqlens_k, bias, mask, key_mask, alibi_slopes, sinks, out = arrays
    spec = checked_varlen(
        name,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
    )
    result, lse = _forward(
        name,
        xp,
        q,
        k,
        v,
        spec,
        bias=bias,
        mask=folded_mask(xp, mask, key_mask),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=indices(xp, cu_seqlens_q),
        cu_seqlens_k=indices(xp, cu_seqlens_k),
        seed=check_seed(name, seed),
        out=out,
        return_lse=return_lse,
    )
    return (result, lse) if return_lse else result


@overload
def scaled_dot_product_attention(
    query: NumPyArray,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
) -> NumPyArray: ...


@overload
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
) -> Any: ...


@repeated(
    seeds=("seed",),
    seed="seed_value",
    q="query",
    k="key",
    v="value",
    bias="attn_mask",
    mask="attn_mask",
)
@explain_errors
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
) -> Any:
    """Attention with the signature, layout and masks of
    ``torch.nn.functional.scaled_dot_product_attention``.

    Parameters
    ----------
    query : array (..., heads_q, L, E)
        Queries; any leading axes, or none beside (L, E). Its strides are free: views of other
        layouts are not copied.
    key, value : array (..., heads_kv, S, E), (..., heads_kv, S, Ev)
        Keys and values.
    attn_mask : array, optional
        Boolean (True keeps) or floating (added to the scores); broadcasts to (..., heads_q, L, S).
    dropout_p : float
        As `dropout` of :func:`flash_attention`.
    is_causal : bool
        Query ``i`` sees keys ``j <= i``: aligned to the first key, unlike :func:`flash_attention`'s
        ``causal``.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Allow fewer key heads than query heads.
    seed : int, optional
        Of the dropout, which is a new one in each call where it is not given.

    Returns
    -------
    array (..., heads_q, L, Ev)
        Of query's dtype. A query that may see no key gets 0.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((1, 8, 128, 64), dtype=np.float32)
    >>> cuattn.scaled_dot_product_attention(q, q, q, is_causal=True).shape
    (1, 8, 128, 64)
    """
    name = "scaled_dot_product_attention"
    check_given(name, query=query, key=key, value=value)
    xp, (query, key, value, attn_mask) = as_arrays(
        name, query=query, key=key, value=value, attn_mask=attn_mask
    )
    is_causal = check_bool(name, "is_causal", is_causal)
    enable_gqa = check_bool(name, "enable_gqa", enable_gqa)
    for label, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 2:
            raise ValueError(f"{name}: {label} has shape {array.shape}, must be (..., heads, L, E)")
        if array.ndim != query.ndim or array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name}: {label} has shape {array.shape}, whose leading axes must be "
                f"those of query {query.shape}"
            )
    if query.ndim > 2 and key.shape[-3] != query.shape[-3] and not enable_gqa:
        divides = 0 < key.shape[-3] and query.shape[-3] % key.shape[-3] == 0
        raise ValueError(
            f"{name}: key has {key.shape[-3]} heads, must be query's {query.shape[-3]} "
            "(or divide them, with enable_gqa=True)"
            + ("" if divides else "; heads come before the length, as in torch")
        )
    if attn_mask is not None and is_causal:
        raise ValueError(f"{name}: attn_mask must be None where is_causal=True, got an array")
    q, k, v = (_batch_seq_heads_dim(xp, a) for a in (query, key, value))
    spec = attention_spec(
        name,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        causal=is_causal,
        top_left=True,
        scale=scale,
        dropout=dropout_p,
        names=("query", "key", "value"),
        dropout_name="dropout_p",
    )
    bias = mask = None
    if attn_mask is not None:
        if attn_mask.dtype != np.bool_ and attn_mask.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{name}: attn_mask has dtype {attn_mask.dtype}, must be bool (True keeps) or a "
                "floating dtype"
            )
        full = (*query.shape[:-1], key.shape[-2])
        if not broadcasts(attn_mask.shape, full):
            raise ValueError(
                f"{name}: attn_mask has shape {attn_mask.shape}, which must broadcast to {full}"
            )
        scores = attn_mask
        if query.ndim != 4:
            scores = xp.broadcast_to(attn_mask, full)
            scores = reshaped(xp, scores, (spec.batch, spec.heads_q, *full[-2:]))
        bias, mask = (None, scores) if attn_mask.dtype == np.bool_ else (scores, None)
    if seed is None:
        seed = secrets.randbits(64) if spec.dropout else 0
    seed = check_seed(name, seed)
    result, _ = _forward(name, xp, q, k, v, spec, bias=bias, mask=mask, seed=seed)
    result = result.swapaxes(1, 2)
    return result if query.ndim == 4 else result.reshape(*query.shape[:-1], value.shape[-1])


def attend_for(function: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """:func:`flash_attention` on behalf of another public function, which is what errors name."""
    try:
        return flash_attention(q, k, v, **options)
    except (TypeError, ValueError) as error:
        own, _, message = str(error).partition(": ")
        if own != "flash_attention":
            raise
        raise type(error)(f"{function}: {message}") from None


def _forward(
    function: str,
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    spec: AttentionSpec,
    *,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seed: int = 0,
    out: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    """Check what the functions share and hand the call to the backend of their library."""
    check_shared(function, spec, alibi_slopes=alibi_slopes, sinks=sinks, out=out)
    return_lse = check_bool(function, "return_lse", return_lse)
    return backend(xp, "attention").forward(
        q,
        k,
        v,
        spec,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seed=seed,
        out=out,
        return_lse=return_lse,
    )


def add_batch(function: str, name: str, array: Any) -> Any:
    """View an array of one sequence, (seqlen, heads, head_dim), as a batch of one."""
    if array.ndim != 3:
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, must be (seqlen, heads, head_dim) as q is"
        )
    return array.reshape(1, *array.shape)


def fold(function: str, xp: Any, name: str, array: Any, lead: tuple[int, ...]) -> Any:
    """(..., seqlen, heads, head_dim) -> (batch, seqlen, heads, head_dim), a view wherever the
    leading axes merge."""
    if array.shape[:-3] != lead:
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, whose leading axes must be q's {lead}"
        )
    return reshaped(xp, array, (math.prod(lead), *array.shape[-3:]))


def as_batch(function: str, xp: Any, **arrays: Any) -> list[Any]:
    """q and the arrays beside it, all (..., seqlen, heads, head_dim), with one batch axis in place
    of q's leading axes, be they none, one or several."""
    q = arrays["q"]
    lead = q.shape[:-3]
    if q.ndim == 3:
        return [add_batch(function, name, array) for name, array in arrays.items()]
    if len(lead) > 1:
        return [fold(function, xp, name, array, lead) for name, array in arrays.items()]
    return list(arrays.values())


def fold_scores(function: str, xp: Any, name: str, array: Any, lead: tuple[int, ...]) -> Any:
    """The leading axes of bias or mask as one; those of length 1 are not expanded but where others
    are longer."""
    if array is None or array.ndim <= 3:
        return array
    own = array.shape[:-3]
    if not broadcasts(own, lead):
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, whose leading axes must broadcast to "
            f"q's {lead}"
        )
    if math.prod(own) == 1:
        return array.reshape(1, *array.shape[-3:])
    array = xp.broadcast_to(array, (*lead, *array.shape[-3:]))
    return reshaped(xp, array, (math.prod(lead), *array.shape[-3:]))


def fold_terms(
    function: str,
    xp: Any,
    lead: tuple[int, ...],
    bias: Any,
    mask: Any,
    key_mask: Any,
    alibi_slopes: Any,
) -> tuple[Any, Any, Any, Any]:
    """What changes scores, with one batch axis in place of q's leading axes."""
    if not lead:
        key_mask = None if key_mask is None else key_mask[None]
    if len(lead) < 2:
        return bias, mask, key_mask, alibi_slopes
    bias, mask = (
        fold_scores(function, xp, n, a, lead) for n, a in (("bias", bias), ("mask", mask))
    )
    if key_mask is not None and key_mask.shape[:-1] == lead:
        key_mask = reshaped(xp, key_mask, (math.prod(lead), key_mask.shape[-1]))
    if alibi_slopes is not None and alibi_slopes.shape[:-1] == lead:
        alibi_slopes = reshaped(xp, alibi_slopes, (-1, alibi_slopes.shape[-1]))
    return bias, mask, key_mask, alibi_slopes


def _batch_seq_heads_dim(xp: Any, array: Any) -> Any:
    """(..., heads, L, E) -> (batch, L, heads, E), a view wherever the leading axes merge."""
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 4:
        array = reshaped(xp, array, (math.prod(array.shape[:-3]), *array.shape[-3:]))
    return array.swapaxes(1, 2)
