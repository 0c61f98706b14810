"""Gradients of attention over whole sequences: the public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cuattn._arrays import FLOAT_DTYPES, as_arrays, check_bool, check_given
from cuattn._backend import backend, contiguous_last_axis, folded_mask, indices
from cuattn._errors import explain_errors, unknown_keyword
from cuattn._spec import (
    AttentionSpec,
    check_seed,
    check_shared,
    checked_call,
    checked_varlen,
)
from cuattn._typing import AttentionOptions
from cuattn.attention import as_batch, attend_for, fold, fold_terms

MAX_GRADIENT_DIM = 256  # of heads

__all__ = [
    "AttentionGrads",
    "flash_attention_backward",
    "flash_attention_jvp",
    "flash_attention_varlen_backward",
    "flash_attention_vjp",
]


class AttentionGrads(NamedTuple):
    """Gradients of one attention call, each of the shape and dtype of what it is the gradient of.

    Attributes
    ----------
    dq, dk, dv : array
        Of q, k and v. Of a query that sees no key, and of a key that no query sees, exactly 0.
    dbias : array or None
        Of `bias`, summed over the axes along which it was broadcast; None without `grad_bias`.
    dsinks : array or None
        Of `sinks`, float32 (float64 for float64 inputs); None without sinks.
    dalibi : array or None
        Of `alibi_slopes`; None without `grad_alibi`.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None
    dalibi: Any = None


@explain_errors
def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    dlse: Any = None,
    deterministic: bool = False,
    grad_bias: bool = False,
    grad_alibi: bool = False,
) -> AttentionGrads:
    """Gradients of :func:`flash_attention`, in memory linear in the sequence.

    The weights are computed again from `lse`, tile by tile [1]_.

    Parameters
    ----------
    dout : array (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the result, of q's dtype. As in :func:`flash_attention` there may be any number
        of axes in place of batch. In float16, whose largest number is 65504, scale the
        loss so that gradients stay in range.
    q, k, v : array
        As given to :func:`flash_attention`, of head_dims up to 256; without the batch axis, dout,
        out and lse have none either.
    out, lse : array
        What :func:`flash_attention` returned for them with ``return_lse=True``.
    causal, window, scale, softcap, bias, mask, key_mask, alibi_slopes, sinks, dropout, seed
        As given to :func:`flash_attention`.
    dlse : array (batch, heads_q, seqlen_q), optional
        Gradient of lse, where the loss depends on it, as after :func:`merge_attention`.
    deterministic : bool
        Bit for bit the same result in every run, whatever else is in the batch.
    grad_bias, grad_alibi : bool
        Also compute the gradient of `bias`, of `alibi_slopes`.

    Returns
    -------
    AttentionGrads
        dq, dk, dv, and where they are asked for dbias, dsinks and dalibi.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Dao, "FlashAttention-2", 2023, section 3.1.2.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((1, 128, 8, 64), dtype=np.float32)
    >>> out, lse = cuattn.flash_attention(q, q, q, causal=True, return_lse=True)
    >>> grads = cuattn.flash_attention_backward(2 * out, q, q, q, out, lse, causal=True)
    >>> grads.dq.shape  # of the sum of out ** 2
    (1, 128, 8, 64)
    """
    name = "flash_attention_backward"
    check_given(name, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    xp, arrays = as_arrays(
        name,
        dout=dout,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        dlse=dlse,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    dout, q, k, v, out, lse, dlse, bias, mask, key_mask, alibi_slopes, sinks = arrays
    single, lead = q.ndim == 3, q.shape[:-3]
    shapes = [() if a is None else a.shape for a in (bias, alibi_slopes)]
    dout, q, k, v, out = as_batch(name, xp, dout=dout, q=q, k=k, v=v, out=out)
    if single:
        lse, dlse = (a if a is None else a[None] for a in (lse, dlse))
    elif len(lead) > 1:
        lse, dlse = (
            a if a is None else fold(name, xp, n, a[..., None], lead)[..., 0]
            for n, a in (("lse", lse), ("dlse", dlse))
        )
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
    grads = _backward(
        name,
        xp,
        (dout, q, k, v, out, lse, dlse),
        spec,
        bias=bias,
        mask=folded_mask(xp, mask, key_mask),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        seed=seed,
        deterministic=deterministic,
        grad_bias=grad_bias,
        grad_alibi=grad_alibi,
    )
    dq, dk, dv, dbias, dsinks, dalibi = grads
    if single:
        dq, dk, dv = dq[0], dk[0], dv[0]
    elif len(lead) > 1:
        dq, dk, dv = (a.reshape(*lead, *a.shape[1:]) for a in (dq, dk, dv))
        dbias = None if dbias is None else _unfolded(dbias, shapes[0], lead)
        dalibi = None if dalibi is None else dalibi.reshape(shapes[1])
    return AttentionGrads(dq, dk, dv, dbias, dsinks, dalibi)


@explain_errors
def flash_attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    dlse: Any = None,
    deterministic: bool = False,
    grad_alibi: bool = False,
) -> AttentionGrads:
    """Gradients of :func:`flash_attention_varlen`.

    Parameters
    ----------
    dout : array (total_q, heads_q, head_dim_v)
        Gradient of the result, of q's dtype.
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As given to :func:`flash_attention_varlen`.
    out, lse : array
        What it returned for them with ``return_lse=True``.
    causal, window, scale, softcap, bias, mask, key_mask, alibi_slopes, sinks, dropout, seed
        As given to it. There is no gradient of `bias`.
    dlse : array (heads_q, total_q), optional
        Gradient of lse.
    deterministic, grad_alibi
        As in :func:`flash_attention_backward`.

    Returns
    -------
    AttentionGrads
        As of :func:`flash_attention_backward`; rows of dq, dk and dv that belong to no sequence
        are 0.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((100, 8, 64), dtype=np.float32)
    >>> cu_seqlens = np.array([0, 30, 100], np.int32)  # a sequence of 30 tokens, and one of 70
    >>> out, lse = cuattn.flash_attention_varlen(q, q, q, cu_seqlens, return_lse=True)
    >>> grads = cuattn.flash_attention_varlen_backward(out, q, q, q, out, lse, cu_seqlens)
    >>> grads.dk.shape
    (100, 8, 64)
    """
    name = "flash_attention_varlen_backward"
    check_given(name, dout=dout, q=q, k=k, v=v, out=out, lse=lse, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    xp, arrays = as_arrays(
        name,
        dout=dout,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        dlse=dlse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, *rest = arrays
    bias, mask, key_mask, alibi_slopes, sinks = rest
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
    return _backward(
        name,
        xp,
        (dout, q, k, v, out, lse, dlse),
        spec,
        bias=bias,
        mask=folded_mask(xp, mask, key_mask),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=indices(xp, cu_seqlens_q),
        cu_seqlens_k=indices(xp, cu_seqlens_k),
        seed=seed,
        deterministic=deterministic,
        grad_alibi=grad_alibi,
    )


@explain_errors
def flash_attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    grad_bias: bool = False,
    grad_alibi: bool = False,
    **options: Any,
) -> tuple[Any, Callable[..., AttentionGrads]]:
    """:func:`flash_attention`, and the function that takes its result's gradient back to the
    inputs (its vector-Jacobian product).

    Parameters
    ----------
    q, k, v : array
        As in :func:`flash_attention`.
    return_lse : bool
        The first result is the pair (out, lse).
    deterministic, grad_bias, grad_alibi
        As in :func:`flash_attention_backward`.
    **options
        The other arguments of :func:`flash_attention` but `out`.

    Returns
    -------
    out : array (batch, seqlen_q, heads_q, head_dim_v)
        The result.
    pullback : callable
        ``pullback(dout, dlse=None)`` gives :class:`AttentionGrads`, any number of times. It holds
        the arrays it was given, out and lse, which must not change until its last call, and
        nothing else.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((1, 128, 8, 64), dtype=np.float32)
    >>> out, pullback = cuattn.flash_attention_vjp(q, q, q, causal=True)
    >>> dq, dk, dv, *_ = pullback(np.ones_like(out))
    >>> dv.shape
    (1, 128, 8, 64)
    """
    name = "flash_attention_vjp"
    _check_options(name, options)
    return_lse = check_bool(name, "return_lse", return_lse)
    check_bool(name, "deterministic", deterministic)
    slopes = options.get("alibi_slopes")
    _check_wanted(name, grad_bias, options.get("bias"), grad_alibi, slopes)
    result, lse = attend_for(name, q, k, v, return_lse=True, **options)
    _check_head_dims(name, q, v)

    def pullback(dout: Any, dlse: Any = None) -> AttentionGrads:
        return flash_attention_backward(
            dout,
            q,
            k,
            v,
            result,
            lse,
            dlse=dlse,
            deterministic=deterministic,
            grad_bias=grad_bias,
            grad_alibi=grad_alibi,
            **options,
        )

    return ((result, lse) if return_lse else result), pullback


@explain_errors
def flash_attention_jvp(
    q: Any,
    k: Any,
    v: Any,
    dq: Any,
    dk: Any,
    dv: Any,
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
) -> tuple[Any, Any]:
    """:func:`flash_attention`, and its derivative in the direction (dq, dk, dv): its
    Jacobian-vector product, or forward-mode derivative.

    Parameters
    ----------
    q, k, v : array
        As in :func:`flash_attention`.
    dq, dk, dv : array
        The direction: of the shapes and dtypes of q, k and v.
    causal, window, scale, softcap, bias, mask, key_mask, alibi_slopes, sinks, dropout, seed
        As in :func:`flash_attention`.

    Returns
    -------
    out, dout : array (batch, seqlen_q, heads_q, head_dim_v)
        The result and its derivative, of q's dtype.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((1, 128, 8, 64), dtype=np.float32)
    >>> zero = np.zeros_like(q)
    >>> out, dout = cuattn.flash_attention_jvp(q, q, q, zero, zero, q)  # out is linear in v
    >>> bool(np.allclose(out, dout, atol=1e-6))
    True
    """
    name = "flash_attention_jvp"
    check_given(name, q=q, k=k, v=v, dq=dq, dk=dk, dv=dv)
    xp, (q, k, v, dq, dk, dv, bias, mask, key_mask, alibi_slopes, sinks) = as_arrays(
        name,
        q=q,
        k=k,
        v=v,
        dq=dq,
        dk=dk,
        dv=dv,
        bias=bias,
        mask=mask,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    single, lead = q.ndim == 3, q.shape[:-3]
    q, k, v, dq, dk, dv = as_batch(name, xp, q=q, k=k, v=v, dq=dq, dk=dk, dv=dv)
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
    _check_head_dims(name, q, v)
    check_shared(name, spec, alibi_slopes=alibi_slopes, sinks=sinks, out=None)
    for label, array, other in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        _check_like(name, label, array, other.shape, spec.dtype)
    out, dout = backend(xp, "gradients").jvp(
        *(contiguous_last_axis(xp, array) for array in (q, k, v, dq, dk, dv)),
        spec,
        bias=bias,
        mask=folded_mask(xp, mask, key_mask),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        seed=check_seed(name, seed),
    )
    if single:
        return out[0], dout[0]
    return out.reshape(*lead, *out.shape[1:]), dout.reshape(*lead, *dout.shape[1:])


def _unfolded(dbias: Any, shape: tuple[int, ...], lead: tuple[int, ...]) -> Any:
    """The gradient of a bias of `shape` from that of what :func:`fold_terms` made of it."""
    if len(shape) > 3 and dbias.shape[0] != 1:
        own = shape[:-3]
        own = (1,) * (len(lead) - len(own)) + own
        dbias = dbias.reshape(*lead, *dbias.shape[1:])
        dbias = dbias.sum(axis=tuple(i for i, n in enumerate(own) if n == 1), keepdims=True)
    return dbias.reshape(shape)


def _backward(
    function: str,
    xp: Any,
    arrays: tuple[Any, ...],
    spec: AttentionSpec,
    *,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seed: Any = 0,
    deterministic: bool = False,
    grad_bias: bool = False,
    grad_alibi: bool = False,
) -> AttentionGrads:
    """Check what the functions share and hand the call to the backend of its arrays."""
    dout, q, k, v, out, lse, dlse = arrays
    _check_head_dims(function, q, v)
    check_shared(function, spec, alibi_slopes=alibi_slopes, sinks=sinks, out=None)
    for label, array in (("dout", dout), ("out", out)):
        _check_like(function, label, array, spec.out_shape, spec.dtype)
    for label, array in (("lse", lse), ("dlse", dlse)):
        if array is not None:
            _check_like(function, label, array, spec.lse_shape, spec.acc_dtype)
    _check_wanted(function, grad_bias, bias, grad_alibi, alibi_slopes)
    results = backend(xp, "gradients").backward(
        *(contiguous_last_axis(xp, array) for array in (dout, q, k, v, out)),
        lse,
        spec,
        dlse=dlse,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seed=check_seed(function, seed),
        deterministic=check_bool(function, "deterministic", deterministic),
        grad_bias=grad_bias,
        grad_alibi=grad_alibi,
    )
    return AttentionGrads(*results)


def _check_wanted(
    function: str, grad_bias: Any, bias: Any, grad_alibi: Any, alibi_slopes: Any
) -> None:
    """Check that gradients are asked for of what there is."""
    for label, wanted, array, of in (
        ("grad_bias", grad_bias, bias, "bias"),
        ("grad_alibi", grad_alibi, alibi_slopes, "alibi_slopes"),
    ):
        if check_bool(function, label, wanted) and array is None:
            raise ValueError(f"{function}: {label} is True, but {of} is None")


def _check_head_dims(function: str, q: Any, v: Any) -> None:
    for label, array in (("q", q), ("v", v)):
        if array.shape[-1] > MAX_GRADIENT_DIM:
            raise ValueError(
                f"{function}: {label} has head_dim {array.shape[-1]}, must be at most "
                f"{MAX_GRADIENT_DIM} for gradients"
            )


def _check_like(
    function: str, name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    if array.shape != shape:
        raise ValueError(f"{function}: {name} has shape {array.shape}, must be {shape}")
    if array.dtype != dtype:
        raise TypeError(
            f"{function}: {name} has dtype {array.dtype}, must be {FLOAT_DTYPES[dtype]}"
        )


def _check_options(function: str, options: dict[str, Any]) -> None:
    allowed = AttentionOptions.__annotations__.keys() - {"out"}
    for name in options:
        if name not in allowed:
            own = inspect.signature(flash_attention_vjp).parameters.keys() - {"options"}
            raise TypeError(unknown_keyword(function, name, sorted(own | allowed)))
