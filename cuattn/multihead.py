"""Multi-head attention with its projections: the public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from cuattn._arrays import (
    FLOAT_DTYPES,
    as_arrays,
    check_bool,
    check_given,
    check_integer,
    check_out,
)
from cuattn._backend import backend, contiguous_last_axis, on_their_gpu, reshaped, temporaries
from cuattn._errors import explain_errors
from cuattn._typing import Array, MultiHeadOptions, NumPyArray
from cuattn.attention import attend_for
from cuattn.positions import rope as rotate

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["multi_head_attention"]

#: What `rope` may have: what rope takes beside the array.
ROPE_KEYS = ("positions", "base", "rotary_dim", "interleaved", "scaling")


@overload
def multi_head_attention(
    x: NumPyArray,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    *,
    heads: int,
    return_lse: Literal[False] = False,
    **options: Unpack[MultiHeadOptions],
) -> NumPyArray: ...


@overload
def multi_head_attention(
    x: NumPyArray,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    *,
    heads: int,
    return_lse: Literal[True],
    **options: Unpack[MultiHeadOptions],
) -> tuple[NumPyArray, NDArray[Any]]: ...


@overload
def multi_head_attention(
    x: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    *,
    heads: int,
    return_lse: bool = False,
    **options: Unpack[MultiHeadOptions],
) -> Any: ...


@explain_errors
@on_their_gpu
def multi_head_attention(
    x: Any,
    wq: Any,
    wk: Any,
    wv: Any,
    wo: Any,
    *,
    heads: int,
    kv_heads: int | None = None,
    context: Any = None,
    rope: Any = None,
    bq: Any = None,
    bk: Any = None,
    bv: Any = None,
    bo: Any = None,
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
    """Multi-head attention [1]_: project to queries, keys and values, attend, project back.

    ``q, k, v = x @ wq + bq, context @ wk + bk, context @ wv + bv``, cut into heads; then
    ``flash_attention(q, k, v, ...)``, heads side by side again, ``@ wo + bo``.

    Parameters
    ----------
    x : array (..., seqlen_q, features)
        float16, bfloat16, float32 or float64; any leading axes, or none.
    wq : array (features, heads * head_dim)
        Weights of the queries, of x's dtype. Layers of torch have theirs as (out, in): pass
        ``weight.T``.
    wk, wv : array (context_features, kv_heads * head_dim), (..., kv_heads * head_dim_v)
        Weights of the keys and of the values.
    wo : array (heads * head_dim_v, out_features)
        Weights of the result.
    heads : int
        Query heads.
    kv_heads : int, optional
        Key heads, which divide heads (GQA, MQA); default heads.
    context : array (..., seqlen_k, context_features), optional
        What keys and values are made from (cross-attention), with x's leading axes; default x.
    rope : dict, optional
        Rotate queries and keys by :func:`cuattn.rope` with these keywords, and ``positions`` if
        they are not 0, 1, ...: ``{}`` for its defaults. Not with `context`.
    bq, bk, bv, bo : array, optional
        Added to the projections: as long as the last axis of their weights.
    causal, window, scale, softcap, bias, mask, key_mask
        As in :func:`cuattn.flash_attention`.
    alibi_slopes, sinks, dropout, seed, return_lse
        As in :func:`cuattn.flash_attention`.
    out : array (..., seqlen_q, out_features), optional
        Written to and returned.

    Returns
    -------
    out : array (..., seqlen_q, out_features)
        Of x's dtype.
    lse : array (..., heads, seqlen_q)
        Only with `return_lse`; float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((2, 16, 64), dtype=np.float32)
    >>> wq, wo = rng.standard_normal((2, 64, 64), dtype=np.float32) / 8
    >>> wk, wv = rng.standard_normal((2, 64, 16), dtype=np.float32) / 8  # one key head for all
    >>> cuattn.multi_head_attention(
    ...     x, wq, wk, wv, wo, heads=4, kv_heads=1, rope={}, causal=True
    ... ).shape
    (2, 16, 64)
    """
    name = "multi_head_attention"
    check_given(name, x=x, wq=wq, wk=wk, wv=wv, wo=wo)
    xp, arrays = as_arrays(
        name,
        **{"x": x, "wq": wq, "wk": wk, "wv": wv, "wo": wo, "context": context},
        **{"bq": bq, "bk": bk, "bv": bv, "bo": bo, "bias": bias, "mask": mask},
        **{"key_mask": key_mask, "alibi_slopes": alibi_slopes, "sinks": sinks, "out": out},
    )
    x, wq, wk, wv, wo, context, bq, bk, bv, bo, bias, mask, *rest = arrays
    key_mask, alibi_slopes, sinks, out = rest
    heads = _count(name, "heads", heads)
    kv_heads = heads if kv_heads is None else _count(name, "kv_heads", kv_heads)
    if heads % kv_heads:
        raise ValueError(f"{name}: kv_heads is {kv_heads}, which must divide heads, {heads}")
    if context is not None and rope is not None:
        raise ValueError(f"{name}: rope must be None where context is given, got {rope!r}")
    if rope is not None and not isinstance(rope, Mapping):
        raise TypeError(f"{name}: rope must be a dict of rope's keywords or None, got {rope!r}")
    for key in rope or ():
        if key not in ROPE_KEYS:
            raise TypeError(f"{name}: rope has {key!r}, may have {', '.join(ROPE_KEYS)}")
    _check_tokens(name, "x", x, x)
    source = x if context is None else context
    _check_tokens(name, "context", source, x)
    head_dim = _check_weights(name, "wq", wq, bq, x, "heads", heads)
    if _check_weights(name, "wk", wk, bk, source, "kv_heads", kv_heads) != head_dim:
        raise ValueError(
            f"{name}: wk has shape {wk.shape}, must have kv_heads * head_dim = {kv_heads} * "
            f"{head_dim} columns"
        )
    head_dim_v = _check_weights(name, "wv", wv, bv, source, "kv_heads", kv_heads)
    _check_weights(name, "wo", wo, bo, x, "", 1, rows=heads * head_dim_v)
    result_shape = (*x.shape[:-1], wo.shape[1])
    if out is not None:
        check_out(name, out, result_shape, x.dtype)
    return_lse = check_bool(name, "return_lse", return_lse)

    project = backend(xp, "multihead").project
    with temporaries(xp):
        rows = _rows(xp, x)
        keys = rows if context is None else _rows(xp, context)
        q = project(rows, wq, bq).reshape(*x.shape[:-1], heads, head_dim)
        k = project(keys, wk, bk).reshape(*source.shape[:-1], kv_heads, head_dim)
        v = project(keys, wv, bv).reshape(*source.shape[:-1], kv_heads, head_dim_v)
        if rope is not None:
            rope = dict(rope)
            positions = rope.pop("positions", None)
            if positions is None:
                positions = xp.arange(x.shape[-2], dtype=np.int32)
            q, k = rotate(q, positions, out=q, **rope), rotate(k, positions, out=k, **rope)
        options = {
            **{"causal": causal, "window": window, "scale": scale, "softcap": softcap},
            **{"bias": bias, "mask": mask, "key_mask": key_mask, "alibi_slopes": alibi_slopes},
            **{"sinks": sinks, "dropout": dropout, "seed": seed},
        }
        attended: Any = None if return_lse else attend_for(name, q, k, v, **options)
    lse = None
    if return_lse:  # lse is a result, which is not to be in memory of the call's own
        attended, lse = attend_for(name, q, k, v, return_lse=True, **options)
    attended = attended.reshape(-1, wo.shape[0])
    if out is None:
        out = project(attended, wo, bo).reshape(result_shape)
    else:
        with temporaries(xp):
            out[...] = project(attended, wo, bo).reshape(result_shape)
    return (out, lse) if return_lse else out


def _rows(xp: Any, x: Any) -> Any:
    """(..., seqlen, features) -> (tokens, features), a view wherever the axes merge."""
    x = contiguous_last_axis(xp, x)
    return reshaped(xp, x, (x.size // max(x.shape[-1], 1), x.shape[-1]))


def _count(function: str, name: str, value: Any) -> int:
    value = check_integer(function, name, value)
    if value < 1:
        raise ValueError(f"{function}: {name} is {value}, must be at least 1")
    return value


def _check_tokens(function: str, name: str, array: Any, x: Any) -> None:
    if array.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(FLOAT_DTYPES.values())
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, must be one of {allowed}")
    if array.dtype != x.dtype:
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, must be x's {x.dtype}")
    if array.ndim < 2:
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, must be (..., seqlen, features)"
        )
    if not array.shape[-1]:
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, must have at least 1 feature"
        )
    if array.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, whose leading axes must be x's "
            f"{x.shape[:-2]}"
        )


def _check_weights(
    function: str,
    name: str,
    weights: Any,
    added: Any,
    source: Any,
    count_name: str,
    count: int,
    rows: int | None = None,
) -> int:
    """Check weights and what is added to their product; return the columns of each head."""
    rows = source.shape[-1] if rows is None else rows
    columns = (
        f"{count_name} * head_dim) for {count} {count_name}" if count_name else "out_features)"
    )
    fits = weights.ndim == 2 and weights.shape[0] == rows
    if not fits or weights.shape[1] % count or (count_name and not weights.shape[1]):
        transposed = weights.ndim == 2 and weights.shape[1] == rows and not fits
        raise ValueError(
            f"{function}: {name} has shape {weights.shape}, must be ({rows}, {columns}"
            + (f"; {name}.T where weights are torch's" if transposed else "")
        )
    label = f"b{name[1:]}"
    if added is not None and added.shape != weights.shape[1:]:
        raise ValueError(
            f"{function}: {label} has shape {added.shape}, must be {weights.shape[1:]}"
        )
    for which, array in ((name, weights), (label, added)):
        if array is not None and array.dtype != source.dtype:
            raise TypeError(
                f"{function}: {which} has dtype {array.dtype}, must be x's {source.dtype}"
            )
    return weights.shape[1] // count
