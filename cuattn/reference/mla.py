"""What multi-head latent attention means, in NumPy: attention of one key head, whose rows are a
token's latent and its rotated part side by side, and whose values are the latents."""

from __future__ import annotations

import dataclasses

import numpy as np

from cuattn._arrays import acc_dtype
from cuattn._quantized import QuantizedArray, codes_of
from cuattn._spec import AttentionSpec
from cuattn.reference import attention
from cuattn.reference.layouts import Rows
from cuattn.reference.quantization import dequantize


def forward(
    q_latent: np.ndarray,
    q_rope: np.ndarray,
    latent_pages: np.ndarray | QuantizedArray,
    rope_pages: np.ndarray,
    spec: AttentionSpec,
    *,
    page_table: np.ndarray,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray | None,
    indices: np.ndarray | None,
    sinks: np.ndarray | None,
    num_splits: int | str | None,
    out: np.ndarray | None,
    return_lse: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Latent attention of NumPy arrays that :mod:`cuattn.mla` has checked.

    Parameters
    ----------
    q_latent, q_rope : numpy.ndarray
        As ``spec.rows`` says that they lie.
    latent_pages, rope_pages : numpy.ndarray (num_pages, page_size, 1, width)
        The pages; latents may be codes, whose values are then taken in the accumulator's dtype.
    spec : AttentionSpec
        The call, with the widths of both parts together as head_dim.
    indices : numpy.ndarray, optional
        (batch, seqlen_q, k) or (total, k).
    page_table, seq_lens, cu_seqlens_q, sinks, num_splits, out, return_lse
        As in :func:`cuattn.mla_decode`. `num_splits` says how a GPU shares the work out: here it
        means nothing.

    Returns
    -------
    out : numpy.ndarray
        Of ``spec.out_shape``.
    lse : numpy.ndarray or None
        Of ``spec.lse_shape``, where asked for.
    """
    inputs = [q_latent, q_rope, codes_of(latent_pages), rope_pages, page_table, indices, sinks]
    overlaps = out is not None and any(
        np.may_share_memory(out, array) for array in inputs if array is not None
    )
    result = np.empty(spec.out_shape, spec.dtype) if out is None or overlaps else out
    lse = np.empty(spec.lse_shape, spec.acc_dtype) if return_lse else None
    rows = Rows(spec, cu_seqlens_q)
    lens = np.clip(seq_lens, 0, spec.seqlen_k).tolist()
    for b, length in enumerate(lens):
        q = np.concatenate([rows.of(q_latent, b), rows.of(q_rope, b)], axis=-1)
        page, slot = np.divmod(np.arange(length), spec.page_size)
        at = page_table[b, page], slot
        latents, rotated = latent_pages[at], rope_pages[at]
        if isinstance(latents, QuantizedArray):
            latents = dequantize(latents, spec.acc_dtype)
            rotated = rotated.astype(spec.acc_dtype)
        keys = np.concatenate([latents, rotated], axis=-1)
        of_sequence = dataclasses.replace(
            spec,
            batch=1,
            seqlen_q=len(q),
            seqlen_k=length,
            rows="batched",
            keys="batched",
            page_size=0,
            k_format="",
            v_format="",
        )
        parts = [(slice(None), keys, of_sequence)]
        if indices is not None:
            parts = _sparse_parts(rows.of(indices, b), keys, of_sequence)
        for part, part_keys, part_spec in parts:
            got, got_lse = attention.forward(
                q[None, part],
                part_keys[None],
                part_keys[None, :, :, : spec.head_dim_v],
                part_spec,
                sinks=sinks,
                return_lse=return_lse,
            )
            rows.of(result, b)[part] = got[0]
            if lse is not None:
                rows.of_lse(lse, b)[:, part] = got_lse[0]
    if overlaps:
        out[...] = result
    return result if out is None else out, lse


def multiply_heads(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Multiply the rows of each head (..., heads, features) by its weights (heads, features,
    columns), in the accumulator's dtype; one rounding."""
    acc = acc_dtype(x.dtype)
    rows = x.reshape(-1, *x.shape[-2:]).swapaxes(0, 1).astype(acc)
    with np.errstate(all="ignore"):  # rows of no sequence may hold anything
        product = (rows @ weights.astype(acc)).swapaxes(0, 1)
        return product.reshape(*x.shape[:-1], weights.shape[2]).astype(x.dtype)


def _sparse_parts(
    indices: np.ndarray, keys: np.ndarray, spec: AttentionSpec
) -> list[tuple[slice, np.ndarray, AttentionSpec]]:
    """Each query of a sequence with the keys that it sees, and the call that it is."""
    parts = []
    for i, positions in enumerate(indices):
        beside = i + spec.seqlen_k - spec.seqlen_q
        seen = (positions >= 0) & (positions < spec.seqlen_k)
        if spec.window_left is not None:
            seen &= positions >= beside - spec.window_left
        if spec.window_right is not None:
            seen &= positions <= beside + spec.window_right
        own = keys[positions[seen]]
        whole = dataclasses.replace(
            spec, seqlen_q=1, seqlen_k=len(own), window_left=None, window_right=None
        )
        parts.append((slice(i, i + 1), own, whole))
    return parts
