"""Multi-head latent attention, as DeepSeek's models have it: the public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from cuattn._arrays import (
    as_arrays,
    check_bool,
    check_given,
    check_integer,
)
from cuattn._backend import backend, contiguous
from cuattn._backend import indices as as_indices
from cuattn._decoding_spec import (
    add_token,
    check_capacity,
    check_num_splits,
    check_page_table,
    check_rows,
    check_seq_lens,
    check_used_pages,
)
from cuattn._errors import explain_errors
from cuattn._mla_spec import (
    PAGES,
    check_indices,
    check_latent_pages,
    check_new_tokens,
    check_part_dtypes,
    check_queries,
    check_rotated,
    check_scale,
    check_weights,
    check_widths,
    latent_spec,
)
from cuattn._quantized import BFLOAT16, FLOAT32, QuantizedArray, as_stored, codes_of
from cuattn._spec import (
    attention_spec,
    check_cu_seqlens,
    check_rising,
    check_shared,
)
from cuattn._typing import Array, LatentOptions, NumPyArray
from cuattn.attention import flash_attention_varlen
from cuattn.decoding import merge_attention, paged_attention
from cuattn.quantization import dequantize

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["flashmla_pages", "mla_decode", "mla_prefill"]


@overload
def mla_decode(
    q_latent: NumPyArray,
    q_rope: Array,
    latent_pages: Array | QuantizedArray,
    rope_pages: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    return_lse: Literal[False] = False,
    **options: Unpack[LatentOptions],
) -> NumPyArray: ...


@overload
def mla_decode(
    q_latent: NumPyArray,
    q_rope: Array,
    latent_pages: Array | QuantizedArray,
    rope_pages: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    return_lse: Literal[True],
    **options: Unpack[LatentOptions],
) -> tuple[NumPyArray, NDArray[Any]]: ...


@overload
def mla_decode(
    q_latent: Array,
    q_rope: Array,
    latent_pages: Array | QuantizedArray,
    rope_pages: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    return_lse: Literal[True],
    **options: Unpack[LatentOptions],
) -> tuple[Any, Any]: ...


@overload
def mla_decode(
    q_latent: Array,
    q_rope: Array,
    latent_pages: Array | QuantizedArray,
    rope_pages: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    return_lse: bool = False,
    **options: Unpack[LatentOptions],
) -> Any: ...


@explain_errors
def mla_decode(
    q_latent: Any,
    q_rope: Any,
    latent_pages: Any,
    rope_pages: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    scale: float,
    cu_seqlens_q: Any = None,
    indices: Any = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    sinks: Any = None,
    num_splits: int | str | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Latent attention (MLA) of each sequence's newest tokens over a cache of latents in pages.

    All heads share one key a token, its latent ``c`` and its rotated part ``r``, and the latent is
    the value as well [1]_. With the key projection absorbed into the query, the score of head ``h``
    is ``scale * (q_latent[h] @ c + q_rope[h] @ r)``, and the result is the softmax-weighted sum of
    latents, to which the value projection is applied afterwards:

    >>> q_latent = np.einsum("bshd,hdc->bshc", q_nope, w_uk)  # doctest: +SKIP
    >>> out = mla_decode(q_latent, q_rope, *pages, table, lens, scale=scale)  # doctest: +SKIP
    >>> out = np.einsum("bshc,hdc->bshd", out, w_uv)  # doctest: +SKIP

    Parameters
    ----------
    q_latent : array (batch, seqlen_q, heads, latent) or (batch, heads, latent)
        Queries of the newest tokens, with the key projection absorbed; with `cu_seqlens_q` (total,
        heads, latent). float16, bfloat16, float32 or float64; NumPy or CuPy. latent from 1 to 512.
    q_rope : array of q_latent's shape with rope_dim in place of latent
        The rotated part of the queries. rope_dim from 0 to 64.
    latent_pages : array or QuantizedArray
        Latents (num_pages, page_size, latent) or (num_pages, page_size, 1, latent), of q_latent's
        dtype or quantised; page_size is a power of two up to 256. What lies past a sequence's
        length may be anything, NaN included, and does not count. Quantised latents count as what
        :func:`cuattn.dequantize` makes of them. On tensor cores they are of 8 bits with a scale
        for each token, or for each 128 or 256 features of one, and are rounded to q_latent's
        dtype; others take slower kernels.
    rope_pages : array (num_pages, page_size, rope_dim) or (num_pages, page_size, 1, rope_dim)
        The rotated parts of the keys, of q_latent's dtype. A token's latent and rotated part may
        lie side by side in one row of an array, of which `latent_pages` and `rope_pages` are views,
        or in two arrays.
    page_table : int32 array (batch, max_pages)
        Token ``j`` of sequence ``b`` is in slot ``j % page_size`` of page ``page_table[b, j //
        page_size]``. Entries past a sequence's last page may be anything.
    seq_lens : int32 array (batch,)
        How many tokens each sequence has, the queries' own included: query ``i`` sits at position
        ``seq_lens[b] - seqlen_q + i``.
    scale : float
        Of the scores. It has no default, since the arguments do not tell it: it belongs to the
        heads before absorption, whose keys have other widths than the latents. DeepSeek-V2 and V3
        have 128 + 64 features a head, so ``1 / sqrt(192)``, and not ``1 / sqrt(512 + 64)``; with
        YaRN it is multiplied by ``mscale**2``, ``mscale = 0.1 * mscale_all_dim * log(factor) + 1``.
    cu_seqlens_q : int32 array (batch + 1,), optional
        Sequence ``b`` has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``, as in
        :func:`cuattn.paged_attention`.
    indices : int32 array (batch, seqlen_q, k), (batch, k) or (total, k), optional
        Sparse attention: each query sees of its sequence the tokens of these positions alone, as
        far as `causal` and `window` let it; in any order, -1 (or any other position that the
        sequence does not have) for none. A position that is named twice counts twice.
    causal, window, sinks
        As in :func:`cuattn.flash_attention`, with ``seq_lens[b]`` as seqlen_k.
    num_splits, return_lse, out
        As in :func:`cuattn.flash_decode`.

    Returns
    -------
    out : array of q_latent's shape
        Weighted sums of latents, of q_latent's dtype. A query that may see no token gets 0; rows
        that belong to no sequence are undefined.
    lse : array (batch, heads, seqlen_q), or (heads, total)
        Only with `return_lse`; natural logarithms, float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError, IndexError
        An argument does not fit; the message names it, and nothing has been written.

    Notes
    -----
    The rotation of a :class:`cuattn.QuantizedArray` is undone with its scales. One that the caller
    applies to the cached latents rotates the result too: it has to be undone there, or folded into
    the value projection.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts
       Language Model", 2024.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> rng = np.random.default_rng(0)
    >>> latents = rng.standard_normal((8, 16, 512), dtype=np.float32)  # 8 pages of 16 tokens
    >>> rotated = rng.standard_normal((8, 16, 64), dtype=np.float32)
    >>> page_table = np.array([[5, 0], [3, 7]], np.int32)
    >>> seq_lens = np.array([10, 30], np.int32)
    >>> q_latent = rng.standard_normal((2, 16, 512), dtype=np.float32)
    >>> q_rope = rng.standard_normal((2, 16, 64), dtype=np.float32)
    >>> cuattn.mla_decode(
    ...     q_latent, q_rope, latents, rotated, page_table, seq_lens, scale=192**-0.5
    ... ).shape
    (2, 16, 512)
    """
    name = "mla_decode"
    check_given(
        name,
        q_latent=q_latent,
        q_rope=q_rope,
        latent_pages=latent_pages,
        rope_pages=rope_pages,
        page_table=page_table,
        seq_lens=seq_lens,
    )
    given_latents = latent_pages
    xp, arrays = as_arrays(
        name,
        q_latent=q_latent,
        q_rope=q_rope,
        latent_pages=codes_of(latent_pages),
        rope_pages=rope_pages,
        page_table=page_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        indices=indices,
        sinks=sinks,
        out=out,
    )
    q_latent, q_rope, latent_pages, rope_pages, page_table, seq_lens, *rest = arrays
    cu_seqlens_q, indices, sinks, out = rest
    given_out = out
    latent_pages, latent_dtype, format = as_stored(given_latents, latent_pages, q_latent.dtype)
    scale = check_scale(name, scale)
    ragged = cu_seqlens_q is not None
    single = q_latent.ndim == 3 and not ragged
    check_queries(name, q_latent, q_rope, ragged)
    latent_pages, rope_pages = check_latent_pages(
        name, latent_pages, rope_pages, q_latent.shape[-1], q_rope.shape[-1]
    )
    check_page_table(name, page_table)
    batch, max_pages = page_table.shape
    num_pages, page_size = latent_pages.shape[:2]
    check_rows(name, "q_latent", q_latent, cu_seqlens_q, batch)
    if single:
        q_latent, q_rope = q_latent[:, None], q_rope[:, None]
        out = None if out is None else add_token(name, out, "q_latent")
    spec = latent_spec(
        name,
        q_latent,
        q_rope,
        rope_pages,
        latents=(latent_dtype, format),
        page_size=page_size,
        capacity=max_pages * page_size,
        sequences=batch if ragged else None,
        causal=check_bool(name, "causal", causal),
        window=window,
        scale=scale,
    )
    check_shared(name, spec, alibi_slopes=None, sinks=sinks, out=out)
    check_capacity(name, spec)
    if ragged:
        check_rising(name, "cu_seqlens_q", cu_seqlens_q, q_latent.shape[0])
    check_seq_lens(name, seq_lens, batch)
    if indices is not None:
        indices = check_indices(name, indices, q_latent.shape[:-2], single)
    if xp is np:
        lens = np.clip(seq_lens, 0, spec.seqlen_k)
        check_used_pages(name, page_table, lens, num_pages, page_size)
    result, lse = backend(xp, "mla").forward(
        q_latent,
        q_rope,
        latent_pages,
        rope_pages,
        spec,
        page_table=as_indices(xp, page_table),
        seq_lens=as_indices(xp, seq_lens),
        cu_seqlens_q=as_indices(xp, cu_seqlens_q) if ragged else None,
        indices=None if indices is None else as_indices(xp, indices),
        sinks=sinks,
        num_splits=check_num_splits(name, num_splits),
        out=out,
        return_lse=check_bool(name, "return_lse", return_lse),
    )
    if given_out is not None:
        result = given_out
    elif single:
        result = result[:, 0]
    return (result, lse) if return_lse else result


@explain_errors
def mla_prefill(
    q_nope: Any,
    q_rope: Any,
    latent_pages: Any,
    rope_pages: Any,
    page_table: Any,
    seq_lens: Any,
    w_uk: Any,
    w_uv: Any,
    *,
    scale: float,
    cu_seqlens_q: Any = None,
    absorbed: bool | None = None,
    chunk: int = 16384,
    max_prefix: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Causal latent attention of prompts, or of chunks of them, by whichever way costs less.

    Queries are those of heads before absorption, and so is the result. Few new tokens a sequence
    are computed as :func:`mla_decode` does, with the projections absorbed into queries and result.
    For many it is cheaper to expand the latents to each head's keys and values: those of the new
    tokens, whose attention is causal, and of what comes before them `chunk` tokens at a time; the
    parts are merged by their lse. With DeepSeek-V3's widths that pays from 171 new tokens on.

    Parameters
    ----------
    q_nope : array (batch, seqlen_q, heads, head_dim), or with `cu_seqlens_q` (total, ...)
        The part of the queries that is not rotated. float16, bfloat16, float32 or float64.
    q_rope : array (batch, seqlen_q, heads, rope_dim), or (total, ...)
        The rotated part.
    latent_pages, rope_pages, page_table, seq_lens, scale, cu_seqlens_q
        As in :func:`mla_decode`. The new tokens have been written to the pages, and a sequence has
        at least as many tokens as queries.
    w_uk : array (heads, head_dim, latent)
        Projects latents to the keys of each head.
    w_uv : array (heads, head_dim_v, latent)
        Projects latents to the values of each head.
    absorbed : bool, optional
        Which way; by default the one of fewer operations.
    chunk : int
        How many tokens of all sequences are expanded at a time.
    max_prefix : int, optional
        The most tokens that a sequence has before its queries, if that is known: those that it
        cannot have are then not expanded. Default: the capacity of `page_table` on a GPU, whose
        lengths are not read by the host.
    return_lse : bool
        Also return the natural-log sum of exponentials of each row.

    Returns
    -------
    out : array of q_nope's shape with head_dim_v
        Of q_nope's dtype.
    lse : array (batch, heads, seqlen_q), or (heads, total)
        Only with `return_lse`; float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError, IndexError
        An argument does not fit; the message names it. Of NumPy arrays what they hold is checked
        too: `cu_seqlens_q`, the pages that are used, that sequences have as many tokens as queries,
        and `max_prefix`.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> rng = np.random.default_rng(0)
    >>> latents, rotated = rng.standard_normal((4, 16, 32)), rng.standard_normal((4, 16, 8))
    >>> w_uk, w_uv = rng.standard_normal((2, 3, 12, 32))[:, :2]
    >>> q_nope, q_rope = rng.standard_normal((1, 5, 2, 12)), rng.standard_normal((1, 5, 2, 8))
    >>> cuattn.mla_prefill(
    ...     q_nope, q_rope, latents, rotated, np.array([[2, 0]]), np.array([20]), w_uk, w_uv,
    ...     scale=20**-0.5,
    ... ).shape
    (1, 5, 2, 12)
    """
    name = "mla_prefill"
    given = {
        "q_nope": q_nope,
        "q_rope": q_rope,
        "latent_pages": latent_pages,
        "rope_pages": rope_pages,
        "page_table": page_table,
        "seq_lens": seq_lens,
        "w_uk": w_uk,
        "w_uv": w_uv,
    }
    check_given(name, **given)
    given_latents, given["latent_pages"] = latent_pages, codes_of(latent_pages)
    xp, arrays = as_arrays(name, **given, cu_seqlens_q=cu_seqlens_q)
    q_nope, q_rope, latent_pages, rope_pages, page_table, seq_lens, w_uk, w_uv, cu = arrays
    latent_pages, _, _ = as_stored(given_latents, latent_pages, q_nope.dtype)
    scale = check_scale(name, scale)
    check_weights(name, q_nope, w_uk, w_uv, latent_pages, ragged=cu is not None)
    check_rotated(name, q_rope, "q_nope", q_nope)
    latent, rope_dim = latent_pages.shape[-1], q_rope.shape[-1]
    latent_pages, rope_pages = check_latent_pages(name, latent_pages, rope_pages, latent, rope_dim)
    like_q = {"q_rope": q_rope, "rope_pages": rope_pages, "w_uk": w_uk, "w_uv": w_uv}
    if not isinstance(latent_pages, QuantizedArray):
        like_q["latent_pages"] = latent_pages
    check_part_dtypes(name, "q_nope", q_nope.dtype, **like_q)
    check_page_table(name, page_table)
    batch, capacity = page_table.shape[0], page_table.shape[1] * latent_pages.shape[1]
    check_rows(name, "q_nope", q_nope, cu, batch)
    if cu is not None:
        check_rising(name, "cu_seqlens_q", cu, q_nope.shape[0])
    check_seq_lens(name, seq_lens, batch)
    for label, number, least in (("chunk", chunk, 1), ("max_prefix", max_prefix, 0)):
        if number is not None and check_integer(name, label, number) < least:
            raise ValueError(f"{name}: {label} is {number}, must be at least {least}")
    if xp is np:
        check_used_pages(name, page_table, np.clip(seq_lens, 0, capacity), *latent_pages.shape[:2])
        counts = np.diff(cu) if cu is not None else q_nope.shape[1]
        check_new_tokens(name, seq_lens, counts, capacity, max_prefix)
    if absorbed is None:
        queries = q_nope.shape[0] / max(page_table.shape[0], 1) if cu is not None else None
        queries = q_nope.shape[1] if queries is None else queries
        dims = w_uk.shape[1] + w_uv.shape[1]
        saved = 2 * latent - dims  # products of a query and a key that expanding saves
        absorbed = queries * saved < latent * dims
    return_lse = check_bool(name, "return_lse", return_lse)
    multiply = backend(xp, "mla").multiply_heads
    if check_bool(name, "absorbed", absorbed):
        check_widths(name, "latent_pages", latent_pages, q_rope)
        result = mla_decode(
            multiply(q_nope, w_uk),
            q_rope,
            latent_pages,
            rope_pages,
            page_table,
            seq_lens,
            scale=scale,
            cu_seqlens_q=cu,
            return_lse=return_lse,
        )
        out, lse = result if return_lse else (result, None)
        out = multiply(out, w_uv.swapaxes(1, 2))
        return (out, lse) if return_lse else out
    shape = q_nope.shape
    if cu is None:
        cu = xp.arange(shape[0] + 1, dtype=np.int32) * shape[1]
        q_nope, q_rope = (x.reshape(shape[0] * shape[1], *x.shape[2:]) for x in (q_nope, q_rope))

    def project(latents: Any, rotated: Any) -> tuple[Any, Any, Any]:
        """What of each head's keys is not rotated, what is, and its values, of tokens, whose
        latents may be codes."""
        if isinstance(latents, QuantizedArray):
            latents = dequantize(latents, q_nope.dtype)
        latents = latents.reshape(-1, latent)
        rotated = rotated.reshape(len(latents), rope_dim)  # which may be 0
        return _project(xp, latents, w_uk), rotated, _project(xp, latents, w_uv)

    def with_rotated(nope: Any, rotated: Any) -> Any:
        """Keys (tokens, heads, both parts)."""
        k = xp.empty((*nope.shape[:-1], nope.shape[-1] + rope_dim), nope.dtype)
        k[..., : nope.shape[-1]] = nope
        k[..., nope.shape[-1] :] = rotated[:, None]
        return k

    page_size, num_pages = latent_pages.shape[1], latent_pages.shape[0]
    new = project(
        *_new_tokens(xp, latent_pages, rope_pages, page_table, seq_lens, cu, q_nope.shape[0])
    )
    q: Any = None  # with both parts, where it takes that
    own = None if xp is np else _prompt(name, xp, q_nope, q_rope, *new, cu, scale)
    if own is None:
        q = xp.concatenate([q_nope, q_rope], axis=-1)
        k = with_rotated(*new[:2])
        own = flash_attention_varlen(q, k, new[2], cu, causal=True, scale=scale, return_lse=True)
    parts = [own]
    before: Any = None
    if max_prefix != 0:
        before = _tokens_before(xp, page_table.shape[1] * page_size, seq_lens, cu)
    if max_prefix is None:
        max_prefix = int(before.max(initial=0)) if xp is np else page_table.shape[1] * page_size
    at_once = chunk // (page_size * max(page_table.shape[0], 1))
    columns = max(1, at_once)  # pages of a sequence at a time
    used = min(-(-max_prefix // page_size), page_table.shape[1])
    for first in range(0, used, columns):
        table = xp.clip(page_table[:, first : min(first + columns, used)], 0, num_pages - 1)
        *both, v = project(latent_pages[table], rope_pages[table])
        k = with_rotated(*both)
        q = xp.concatenate([q_nope, q_rope], axis=-1) if q is None else q
        in_chunk = xp.clip(before - first * page_size, 0, table.shape[1] * page_size)
        parts.append(
            paged_attention(
                q,
                k.reshape(-1, page_size, *k.shape[1:]),
                v.reshape(-1, page_size, *v.shape[1:]),
                xp.arange(table.size, dtype=np.int32).reshape(table.shape),
                in_chunk.astype(np.int32),
                cu_seqlens_q=cu,
                causal=False,
                scale=scale,
                return_lse=True,
            )
        )
    out, lse = parts[0] if len(parts) == 1 else merge_attention(*zip(*parts, strict=True))
    if len(shape) == 4:
        out = out.reshape(*shape[:3], w_uv.shape[1])
        lse = lse.reshape(shape[2], *shape[:2]).swapaxes(0, 1)
    return (out, lse) if return_lse else out


#: A token's row in FlashMLA's cache of 8 bits: codes of a latent of 512, scales of 128 of them
#: each, and 64 bfloat16 that are rotated.
FLASHMLA_LATENT, FLASHMLA_SCALES, FLASHMLA_BYTES = 512, 4, 656


def flashmla_pages(rows: Any) -> tuple[QuantizedArray, Any]:
    """FlashMLA's cache of 8 bits as latents and rotated parts, for :func:`mla_decode`.

    A token is 656 bytes there: 512 float8_e4m3 codes of its latent, four float32 scales, each of
    128 of them, and 64 bfloat16 numbers, its rotated part. Nothing is copied: both results are
    views.

    Parameters
    ----------
    rows : uint8 array (num_pages, page_size, 656) or (num_pages, page_size, 1, 656)
        The pages; NumPy or CuPy. The last axis is contiguous; on a GPU the address and the other
        strides are multiples of 4 bytes, as float32 scales lie in it.

    Returns
    -------
    latent_pages : QuantizedArray (num_pages, page_size, 1, 512)
    rope_pages : bfloat16 array (num_pages, page_size, 1, 64)

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> latents, rotated = cuattn.flashmla_pages(np.zeros((8, 64, 656), np.uint8))
    >>> latents.shape, latents.scale.shape, rotated.shape
    ((8, 64, 1, 512), (8, 64, 1, 4), (8, 64, 1, 64))
    """
    name = "flashmla_pages"
    check_given(name, rows=rows)
    xp, (rows,) = as_arrays(name, rows=rows)
    if rows.dtype != np.uint8:
        raise TypeError(f"{name}: rows has dtype {rows.dtype}, must be uint8")
    shape = rows.shape
    if rows.ndim == 3:
        rows = rows[:, :, None]
    if rows.ndim != 4 or rows.shape[2:] != (1, FLASHMLA_BYTES):
        raise ValueError(f"{name}: rows has shape {shape}, must be {PAGES.format(FLASHMLA_BYTES)}")
    if rows.strides[-1] != 1:
        raise ValueError(
            f"{name}: rows has a stride of {rows.strides[-1]} between bytes, must be contiguous "
            "there"
        )
    steps = [step for n, step in zip(rows.shape[:2], rows.strides[:2], strict=True) if n > 1]
    if xp is not np and any(n % 4 for n in (rows.data.ptr, *steps)):
        raise ValueError(
            f"{name}: rows is at address {rows.data.ptr:#x} with strides {rows.strides[:2]}, must "
            "be multiples of 4 on a GPU, as float32 scales lie in it"
        )
    rope_at = FLASHMLA_LATENT + 4 * FLASHMLA_SCALES
    latents = QuantizedArray(
        rows[..., :FLASHMLA_LATENT],
        rows[..., FLASHMLA_LATENT:rope_at].view(FLOAT32),
        dtype="float8_e4m3",
    )
    return latents, rows[..., rope_at:].view(BFLOAT16)


def _tokens_before(xp: Any, capacity: int, seq_lens: Any, cu_seqlens: Any) -> Any:
    """How many tokens each sequence has before its queries."""
    return xp.maximum(xp.clip(seq_lens, 0, capacity) - (cu_seqlens[1:] - cu_seqlens[:-1]), 0)


def _new_tokens(
    xp: Any,
    latent_pages: Any,
    rope_pages: Any,
    page_table: Any,
    seq_lens: Any,
    cu_seqlens: Any,
    total: int,
) -> tuple[Any, Any]:
    """The latents and rotated parts of the tokens that the queries are, one after the other."""
    plain = not isinstance(latent_pages, QuantizedArray)
    if xp is not np and plain and page_table.size and latent_pages.size:
        indices = [as_indices(xp, x) for x in (page_table, seq_lens, cu_seqlens)]
        take = backend(xp, "mla").take_tokens
        return take(latent_pages, *indices, total), take(rope_pages, *indices, total)
    page_size, num_pages = latent_pages.shape[1], latent_pages.shape[0]
    if not page_table.size or not num_pages:  # no sequence has a token
        return tuple(
            xp.zeros((total, a.shape[-1]), rope_pages.dtype) for a in (latent_pages, rope_pages)
        )
    capacity = page_table.shape[1] * page_size
    rows = xp.arange(total)
    sequence = xp.searchsorted(cu_seqlens[1:], rows, side="right")
    sequence = xp.minimum(sequence, len(cu_seqlens) - 2)
    before = _tokens_before(xp, capacity, seq_lens, cu_seqlens)
    positions = before[sequence] + rows - cu_seqlens[sequence]
    positions = xp.clip(positions, 0, max(capacity - 1, 0))
    pages = xp.clip(page_table[sequence, positions // page_size], 0, num_pages - 1)
    slots = positions % page_size
    return latent_pages[pages, slots], rope_pages[pages, slots]


def _prompt(
    function: str,
    xp: Any,
    q_nope: Any,
    q_rope: Any,
    k_nope: Any,
    rotated: Any,
    v: Any,
    cu_seqlens: Any,
    scale: float,
) -> Any:
    """Causal attention of new tokens with their rotated parts where they are, by a kernel that
    takes them so: out and lse; None if there is none."""
    width = q_nope.shape[-1] + q_rope.shape[-1]
    check_cu_seqlens(function, "cu_seqlens_q", cu_seqlens)
    spec = attention_spec(
        function,
        (*q_nope.shape[:-1], width),
        (*k_nope.shape[:-1], width),
        v.shape,
        q_nope.dtype,
        k_nope.dtype,
        v.dtype,
        causal=True,
        scale=scale,
        sequences=cu_seqlens.shape[0] - 1,
        keys="ragged",
        names=("q_nope", "w_uk", "w_uv"),
    )
    return backend(xp, "mla").prompt(
        q_nope, q_rope, k_nope, rotated, v, spec, as_indices(xp, cu_seqlens)
    )


def _project(xp: Any, latents: Any, weights: Any) -> Any:
    """Keys, or values, (tokens, heads, dims) of each head from latents (tokens, latent)."""
    heads, dims, latent = weights.shape
    flat = contiguous(xp, weights).reshape(heads * dims, latent).T
    return backend(xp, "multihead").project(latents, flat, None).reshape(-1, heads, dims)
