"""What a call of latent attention asks for: checks of queries, pages of latents and weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn._arrays import FLOAT_DTYPES, check_index_dtype
from cuattn._decoding_spec import check_page_size
from cuattn._quantized import QuantizedArray
from cuattn._spec import AttentionSpec, attention_spec, check_fits, check_number

MAX_LATENT = 512
MAX_ROPE = 64
PAGES = "(num_pages, page_size, {0}) or (num_pages, page_size, 1, {0})"


def check_scale(function: str, scale: Any) -> float:
    """Check the factor of the scores, which has to be given."""
    if scale is None:
        raise TypeError(
            f"{function}: scale must be a number, got None: it has no default, since it belongs to "
            "the heads before absorption (1 / sqrt(192) for DeepSeek-V3)"
        )
    return check_number(function, "scale", scale)


def check_weights(
    function: str, q_nope: Any, w_uk: Any, w_uv: Any, latent_pages: Any, *, ragged: bool
) -> None:
    """Check queries of heads before absorption, and the projections of latents for them."""
    if q_nope.ndim != (3 if ragged else 4):
        layout = "(total, heads, head_dim)" if ragged else "(batch, seqlen_q, heads, head_dim)"
        raise ValueError(f"{function}: q_nope has shape {q_nope.shape}, must be {layout}")
    heads, dims = q_nope.shape[-2:]
    if q_nope.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(FLOAT_DTYPES.values())
        raise TypeError(f"{function}: q_nope has dtype {q_nope.dtype}, must be one of {allowed}")
    if not heads or not dims:
        raise ValueError(
            f"{function}: q_nope has shape {q_nope.shape}, must have at least 1 head and 1 feature"
        )
    latent = latent_pages.shape[-1] if latent_pages.ndim else 0
    for label, weights, want in (
        ("w_uk", w_uk, f"({heads}, {dims}, {latent})"),
        ("w_uv", w_uv, f"({heads}, head_dim_v, {latent})"),
    ):
        fits = weights.ndim == 3 and (weights.shape[0], weights.shape[2]) == (heads, latent)
        if not fits or (label == "w_uk" and weights.shape[1] != dims):
            raise ValueError(f"{function}: {label} has shape {weights.shape}, must be {want}")
        if not weights.shape[1]:
            raise ValueError(
                f"{function}: {label} has shape {weights.shape}, must have at least 1 feature"
            )


def latent_spec(
    function: str,
    q_latent: Any,
    q_rope: Any,
    rope_pages: Any,
    *,
    latents: tuple[np.dtype, str],
    page_size: int,
    capacity: int,
    sequences: int | None,
    causal: bool,
    window: Any,
    scale: float,
) -> AttentionSpec:
    """The call as attention of one key head whose rows are a latent and what is rotated, and whose
    values are the latents: head_dim - head_dim_v is what is rotated. `latents` are the cached ones'
    dtype, which codes have not, and their format."""
    check_part_dtypes(function, "q_latent", q_latent.dtype, q_rope=q_rope, rope_pages=rope_pages)
    dtype, format = latents
    latent = q_latent.shape[-1]
    width = latent + q_rope.shape[-1]
    lengths = (capacity, 1) if sequences is not None else (q_latent.shape[0], capacity, 1)
    return attention_spec(
        function,
        (*q_latent.shape[:-1], width),
        (*lengths, width),
        (*lengths, latent),
        q_latent.dtype,
        dtype,
        dtype,
        causal=causal,
        window=window,
        scale=scale,
        sequences=sequences,
        keys="paged",
        page_size=page_size,
        formats=(format, format),
        names=("q_latent", "latent_pages", "latent_pages"),
        max_head_dim=MAX_LATENT + MAX_ROPE,
    )


def check_queries(function: str, q_latent: Any, q_rope: Any, ragged: bool) -> None:
    if q_latent.ndim not in ((3,) if ragged else (3, 4)):
        layout = "(total, heads, latent)"
        if not ragged:
            layout = "(batch, seqlen_q, heads, latent) or (batch, heads, latent)"
        raise ValueError(f"{function}: q_latent has shape {q_latent.shape}, must be {layout}")
    check_rotated(function, q_rope, "q_latent", q_latent)
    check_widths(function, "q_latent", q_latent, q_rope)
    if q_latent.shape[-2] < 1:
        raise ValueError(f"{function}: q_latent has 0 heads, must have at least 1")


def check_rotated(function: str, q_rope: Any, name: str, q: Any) -> None:
    """Check the rotated part of the queries against the other, which the function calls `name`."""
    if q_rope.ndim != q.ndim or q_rope.shape[:-1] != q.shape[:-1]:
        want = (*map(str, q.shape[:-1]), "rope_dim")
        raise ValueError(
            f"{function}: q_rope has shape {q_rope.shape}, must be {name}'s but for the last axis, "
            f"({', '.join(want)})"
        )


def check_widths(function: str, name: str, latents: Any, q_rope: Any) -> None:
    """Check the widths of latents, or of queries for them, of that name, and of rotated parts."""
    for label, array, least, most in (
        (name, latents, 1, MAX_LATENT),
        ("q_rope", q_rope, 0, MAX_ROPE),
    ):
        width = array.shape[-1]
        if not least <= width <= most:
            raise ValueError(
                f"{function}: {label} has width {width}, must be from {least} to {most}"
            )


def check_part_dtypes(function: str, name: str, dtype: np.dtype, **arrays: Any) -> None:
    """Check that arrays have the dtype of the queries, which the function calls `name`."""
    for label, array in arrays.items():
        if array.dtype != dtype:
            raise TypeError(
                f"{function}: {label} has dtype {array.dtype}, must be {name}'s {dtype}"
            )


def check_new_tokens(
    function: str, seq_lens: Any, counts: Any, capacity: int, max_prefix: int | None
) -> None:
    """Check, on the host, that sequences have the tokens which the queries are, and no more before
    them than `max_prefix`."""
    before = np.clip(seq_lens, 0, capacity) - counts
    if (before < 0).any():
        b = int((before < 0).argmax())
        raise ValueError(
            f"{function}: seq_lens has {seq_lens[b]} for sequence {b}, must be its number of "
            f"queries at least, and page_table has room for {capacity}"
        )
    if max_prefix is not None and (before > max_prefix).any():
        b = int((before > max_prefix).argmax())
        raise ValueError(
            f"{function}: max_prefix is {max_prefix}, and sequence {b} has {before[b]} tokens "
            "before its queries, must have no more"
        )


def check_latent_pages(
    function: str, latent_pages: Any, rope_pages: Any, latent: int, rope_dim: int
) -> tuple[Any, Any]:
    """Check both arrays of pages, and return them with an axis of one head."""
    checked = []
    for label, pages, width, of in (
        ("latent_pages", latent_pages, latent, "q_latent"),
        ("rope_pages", rope_pages, rope_dim, "q_rope"),
    ):
        if pages.ndim == 3:
            pages = _with_head(function, label, pages)
        if pages.ndim != 4 or pages.shape[2] != 1:
            raise ValueError(
                f"{function}: {label} has shape {pages.shape}, must be {PAGES.format(width)}"
            )
        if pages.shape[3] != width:
            raise ValueError(
                f"{function}: {label} has width {pages.shape[3]}, must be {of}'s {width}"
            )
        checked.append(pages)
    if checked[1].shape[:2] != checked[0].shape[:2]:
        raise ValueError(
            f"{function}: rope_pages has shape {rope_pages.shape}, must begin with latent_pages' "
            f"(num_pages, page_size) = {checked[0].shape[:2]}"
        )
    check_page_size(function, "latent_pages", checked[0].shape[1])
    return checked[0], checked[1]


def _with_head(function: str, label: str, pages: Any) -> Any:
    """Pages (num_pages, page_size, width) with an axis of one head."""
    if not isinstance(pages, QuantizedArray):
        return pages[:, :, None]
    if pages.offset is not None:
        raise ValueError(
            f"{function}: {label} has shape {pages.shape}, must have an axis of one head, "
            "(num_pages, page_size, 1, latent), since it has an offset"
        )
    parts = (pages.data, pages.scale, pages.minimum)
    return pages.of(*(None if part is None else part[:, :, None] for part in parts))


def check_indices(function: str, indices: Any, rows: tuple[int, ...], single: bool) -> Any:
    """Check positions of tokens, and return them as (batch, seqlen_q, k) or (total, k)."""
    given = indices.shape
    if single and indices.ndim == 2:
        indices = indices[:, None]
    if indices.ndim != len(rows) + 1 or indices.shape[:-1] != rows:
        want = ", ".join([*map(str, rows[:1] if single else rows), "k"])
        raise ValueError(f"{function}: indices has shape {given}, must be ({want})")
    check_index_dtype(function, "indices", indices)
    check_fits(function, "indices", indices)
    return indices
