"""What one attention call means, checked once and used by both sides."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from cuattn._arrays import (
    FLOAT_DTYPES,
    acc_dtype,
    check_bool,
    check_index_dtype,
    check_integer,
    check_out,
)

MAX_HEAD_DIM = 512
FAR_KEYS = 1 << 62  # beyond all keys; sums with positions fit into int64


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The semantics of one attention call: every number that is known on the host.

    Query ``i`` sees keys ``j`` with ``i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k -
    seqlen_q + window_right``, lengths and positions being those of the sequence; ``None`` on a side
    means no limit there. ``causal`` is folded into `window_right`.

    `rows` says where the rows of q (and of out and lse) lie:

    - ``"batched"``: (batch, seqlen_q, heads_q, head_dim);
    - ``"ragged"``: (seqlen_q, heads_q, head_dim), the sequences end to end. `seqlen_q` is the total
      and ``cu_seqlens_q``, on the device, says where each of `batch` sequences begins.

    `keys` says where those of k and v lie:

    - ``"batched"``: (batch, seqlen_k, heads_kv, head_dim);
    - ``"ragged"``: (seqlen_k, heads_kv, head_dim) with ``cu_seqlens_k``; `seqlen_k` is the total;
    - ``"cached"``: (batch, seqlen_k, heads_kv, head_dim), of which a sequence has the first
      ``seq_lens[b]``, on the device; `seqlen_k` is the capacity;
    - ``"paged"``: pages (num_pages, page_size, heads_kv, head_dim) with ``page_table`` and
      ``seq_lens``; `seqlen_k` is the capacity of a row of the table.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    kv_dtype: np.dtype  # of k and v as they are stored
    scale: float
    softcap: float  # 0.0: none
    window_left: int | None
    window_right: int | None
    rows: str = "batched"
    keys: str = "batched"
    page_size: int = 0  # tokens in a page; 0 unless keys are paged
    dropout: float = 0.0  # the seed is not part of it, since each call has another
    k_format: str = ""  # of keys that are codes, as QuantizedArray.dtype; "": of kv_dtype
    v_format: str = ""

    @functools.cached_property
    def quantized(self) -> bool:
        """Whether keys or values are codes."""
        return bool(self.k_format or self.v_format)

    @functools.cached_property
    def k_itemsize(self) -> int:
        """Bytes of what strides of k are counted in: a key's element, or a byte of codes."""
        return 1 if self.k_format else self.kv_dtype.itemsize

    @functools.cached_property
    def v_itemsize(self) -> int:
        """As `k_itemsize`, of v."""
        return 1 if self.v_format else self.kv_dtype.itemsize

    @functools.cached_property
    def acc_dtype(self) -> np.dtype:
        """The dtype of accumulators, softmax and lse."""
        return acc_dtype(self.dtype)

    @functools.cached_property
    def out_shape(self) -> tuple[int, ...]:
        """(batch, seqlen_q, heads_q, head_dim_v), or (total, heads_q, head_dim_v) if ragged."""
        rows = (self.seqlen_q, self.heads_q, self.head_dim_v)
        return rows if self.rows == "ragged" else (self.batch, *rows)

    @functools.cached_property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads_q, seqlen_q), or (heads_q, total) if ragged."""
        rows = (self.heads_q, self.seqlen_q)
        return rows if self.rows == "ragged" else (self.batch, *rows)

    @functools.cached_property
    def dropout_threshold(self) -> int:
        """The probability of being dropped times 2**16: `dropout` to a multiple of 2**-16, and
        never 1."""
        return min(round(self.dropout * 65536), 65535)

    @functools.cached_property
    def dropout_scale(self) -> float:
        """What the other scores' probabilities are multiplied by."""
        return 65536 / (65536 - self.dropout_threshold)

    @functools.cached_property
    def _hash(self) -> int:
        # The fields that usually differ are enough.
        return hash((self.batch, self.seqlen_q, self.seqlen_k, self.heads_q, self.head_dim))

    def __hash__(self) -> int:
        return self._hash  # on every GPU call


def _cached(function: Callable[..., AttentionSpec]) -> Callable[..., AttentionSpec]:
    """Remember results by arguments, and their types, since True is 1 to a dictionary; one that
    cannot be hashed goes to the checks, which name it. A window may be a list."""
    cached = functools.lru_cache(maxsize=4096, typed=True)(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> AttentionSpec:
        if isinstance(options.get("window"), list):
            options["window"] = tuple(options["window"])
        try:
            return cached(*args, **options)
        except TypeError:
            pass
        return function(*args, **options)

    return call


@_cached
def attention_spec(
    function: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    q_dtype: np.dtype,
    k_dtype: np.dtype,
    v_dtype: np.dtype,
    *,
    causal: bool = False,
    top_left: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sequences: int | None = None,
    keys: str | None = None,
    page_size: int = 0,
    formats: tuple[str, str] = ("", ""),
    names: tuple[str, str, str] = ("q", "k", "v"),
    dropout_name: str = "dropout",
    max_head_dim: int = MAX_HEAD_DIM,
) -> AttentionSpec:
    """Check shapes and options of one call; the result is cached by its arguments.

    Parameters
    ----------
    function : str
        The public function, for error messages.
    q, k, v : tuple of int
        Shapes: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) where `sequences` is
        given.
    q_dtype, k_dtype, v_dtype : numpy.dtype
        Their dtypes.
    causal, window, scale, softcap, dropout
        As in :func:`cuattn.flash_attention`.
    top_left : bool
        Align the causal mask to the first key (torch's) instead of the last.
    sequences : int, optional
        How many sequences there are, where the rows of q are ragged.
    keys : str, optional
        Where keys lie, as in `AttentionSpec`; default ``"ragged"`` where `sequences` is given, else
        ``"batched"``. Shapes of paged keys are those of one sequence's pages end to end: ``(...,
        max_pages * page_size, heads, head_dim)``, with q's batch axis.
    page_size : int
        Tokens in a page of paged keys.
    formats : tuple of str
        Of k and v where they are codes, whose dtypes are then q's; "" where they are not.
    names : tuple of str
        What the function calls q, k, v and, where it has another name there, dropout.
    max_head_dim : int
        The largest head_dim that the function takes.
    """
    _check_shapes(function, names, q, k, v, sequences is not None, max_head_dim)
    _check_dtypes(function, names, q_dtype, k_dtype, v_dtype)
    dropout = check_number(function, dropout_name, dropout)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(
            f"{function}: {dropout_name} is {dropout}, must be at least 0 and less than 1"
        )
    if scale is None:
        scale = 1.0 / math.sqrt(q[-1])
    scale = check_number(function, "scale", scale)
    softcap = check_number(function, "softcap", 0.0 if softcap is None else softcap)
    if softcap < 0.0:
        raise ValueError(
            f"{function}: softcap is {softcap}, must be positive, or 0 or None for no cap"
        )
    seqlen_q, heads_q, head_dim = q[-3:]
    seqlen_k, heads_kv, _ = k[-3:]
    left, right = _check_window(function, window)
    if causal:
        diagonal = seqlen_q - seqlen_k if top_left else 0
        right = diagonal if right is None else min(right, diagonal)
    if left is not None and right is not None and left + right < 0:
        raise ValueError(
            f"{function}: window is {window!r}{' and causal is True' if causal else ''}, which "
            "leaves no key to any query; None, and not -1, stands for no limit"
        )
    return AttentionSpec(
        batch=q[0] if sequences is None else sequences,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=v[-1],
        dtype=q_dtype,
        kv_dtype=k_dtype,
        scale=scale,
        softcap=softcap,
        window_left=left,
        window_right=right,
        rows="batched" if sequences is None else "ragged",
        keys=keys or ("batched" if sequences is None else "ragged"),
        page_size=page_size,
        dropout=dropout,
        k_format=formats[0],
        v_format=formats[1],
    )


def check_seed(function: str, seed: Any) -> int:
    """Check the seed of a call's dropout, and return it as an int."""
    number = check_integer(function, "seed", seed)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{function}: seed is {number}, must be from 0 to 2**64 - 1")
    return number


@functools.lru_cache(maxsize=4096)
def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `full`."""
    return len(shape) <= len(full) and all(
        n in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)
    )


def check_scores(
    function: str, spec: AttentionSpec, *, bias: Any = None, mask: Any = None, key_mask: Any = None
) -> None:
    """Check the shapes and dtypes of what there is for each score or key of each sequence.

    `bias` and `mask` broadcast to (batch, heads_q, queries, keys), `key_mask` is (batch, keys).
    Where sequences have lengths of their own, which are on the device, arrays may have as many
    queries and keys as they like, all of them the same numbers or 1: :func:`check_reach` compares
    them with the lengths.
    """
    given = [
        (name, array)
        for name, array in (("bias", bias), ("mask", mask), ("key_mask", key_mask))
        if array is not None
    ]
    full = [spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_k]
    for axis, own in ((2, spec.rows == "ragged"), (3, spec.keys != "batched")):
        if own:
            lengths = [
                array.shape[axis - 4] for name, array in given if _has_axis(name, array, axis)
            ]
            full[axis] = next((n for n in lengths if n != 1), 1)
    for name, array in given:
        if name == "key_mask":
            if array.shape != (spec.batch, full[3]):
                raise ValueError(
                    f"{function}: key_mask has shape {array.shape}, must be (batch, seqlen_k) = "
                    f"{(spec.batch, full[3])}"
                )
        elif not broadcasts(array.shape, tuple(full)):
            of_keys = name == "mask" and array.shape == (spec.batch, full[3])
            raise ValueError(
                f"{function}: {name} has shape {array.shape}, which must broadcast to "
                f"(batch, heads_q, seqlen_q, seqlen_k) = {tuple(full)}"
                + ("; key_mask is (batch, seqlen_k)" if of_keys else "")
            )
        if name != "bias" and array.dtype != np.bool_:
            added = name == "mask" and array.dtype in FLOAT_DTYPES
            raise TypeError(
                f"{function}: {name} has dtype {array.dtype}, must be bool (True keeps)"
                + ("; what is added to scores is bias" if added else "")
            )
        if name == "bias" and array.dtype not in FLOAT_DTYPES:
            allowed = ", ".join(FLOAT_DTYPES.values())
            hint = "; what keeps or removes scores is mask" if array.dtype == np.bool_ else ""
            raise TypeError(
                f"{function}: bias has dtype {array.dtype}, must be one of {allowed}{hint}"
            )


def _has_axis(name: str, array: Any, axis: int) -> bool:
    return array.ndim >= (1 if name == "key_mask" and axis == 3 else 4 - axis)


def check_reach(
    function: str, queries: int, keys: int, *, bias: Any, mask: Any, key_mask: Any
) -> None:
    """Check, where lengths are on the host, that bias, mask and key_mask have numbers for the
    queries and keys of the longest sequences. On a GPU a kernel reads the last number for those
    beyond it."""
    for name, array in (("bias", bias), ("mask", mask), ("key_mask", key_mask)):
        if array is None:
            continue
        needed = [("keys", keys)] if name == "key_mask" else [("keys", keys), ("queries", queries)]
        for axis, (what, length) in enumerate(needed, 1):
            # A mask of keys does not broadcast along them.
            broadcast = name != "key_mask" and (array.ndim < axis or array.shape[-axis] == 1)
            if not broadcast and array.shape[-axis] < length:
                raise ValueError(
                    f"{function}: {name} has shape {array.shape}, which must have room for the "
                    f"longest sequence's {length} {what}"
                )


def checked_call(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any,
    bias: Any,
    mask: Any,
    key_mask: Any,
    **options: Any,
) -> AttentionSpec:
    """:func:`attention_spec` of arrays (batch, seqlen, heads, head_dim), with what changes their
    scores checked."""
    spec = attention_spec(
        function,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        causal=check_bool(function, "causal", causal),
        **options,
    )
    if not (bias is None and mask is None and key_mask is None):
        check_scores(function, spec, bias=bias, mask=mask, key_mask=key_mask)
    return spec


def checked_varlen(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    bias: Any,
    mask: Any,
    key_mask: Any,
    **options: Any,
) -> AttentionSpec:
    """:func:`checked_call` of arrays (total, heads, head_dim), with their cumulative lengths
    checked."""
    for label, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cu_seqlens(function, label, lengths)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"{function}: cu_seqlens_k has shape {cu_seqlens_k.shape}, must be "
            f"cu_seqlens_q's {cu_seqlens_q.shape}"
        )
    scores = {"bias": bias, "mask": mask, "key_mask": key_mask}
    spec = checked_call(function, q, k, v, sequences=cu_seqlens_q.shape[0] - 1, **scores, **options)
    check_rising(function, "cu_seqlens_q", cu_seqlens_q, spec.seqlen_q)
    check_rising(function, "cu_seqlens_k", cu_seqlens_k, spec.seqlen_k)
    if isinstance(cu_seqlens_q, np.ndarray):
        queries, keys = (
            int(np.diff(lengths).max(initial=0)) for lengths in (cu_seqlens_q, cu_seqlens_k)
        )
        check_reach(function, queries, keys, **scores)
    return spec


def check_shared(
    function: str, spec: AttentionSpec, *, alibi_slopes: Any, sinks: Any, out: Any
) -> None:
    """Check the arrays that every attention function takes beside q, k and v."""
    if alibi_slopes is not None:
        _check_head_array(function, "alibi_slopes", alibi_slopes, spec, batched=True)
    if sinks is not None:
        _check_head_array(function, "sinks", sinks, spec, batched=False)
    if out is not None:
        check_out(function, out, spec.out_shape, spec.dtype)


def _check_head_array(
    function: str, name: str, array: Any, spec: AttentionSpec, *, batched: bool
) -> None:
    """Check `alibi_slopes` (heads_q,) or (batch, heads_q), or `sinks` (heads_q,)."""
    allowed = [(spec.heads_q,)] + ([(spec.batch, spec.heads_q)] if batched else [])
    if array.shape not in allowed:
        shapes = " or ".join(map(str, allowed))
        raise ValueError(f"{function}: {name} has shape {array.shape}, must be {shapes}")
    if array.dtype not in FLOAT_DTYPES:
        dtypes = ", ".join(FLOAT_DTYPES.values())
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, must be one of {dtypes}")


def check_cu_seqlens(function: str, name: str, array: Any) -> None:
    """Check the shape and dtype of cumulative lengths (sequences + 1,)."""
    if array.ndim != 1 or array.shape[0] < 1:
        raise ValueError(f"{function}: {name} has shape {array.shape}, must be (sequences + 1,)")
    check_index_dtype(function, name, array)


def check_rising(function: str, name: str, array: Any, total: int) -> None:
    """Check that cumulative lengths on the host rise from 0 to at most `total`. Those on a GPU are
    not read: a kernel clamps them."""
    if not isinstance(array, np.ndarray):
        return
    if array[0] != 0 or array[-1] > total or (array[1:] < array[:-1]).any():
        raise ValueError(
            f"{function}: {name} is {array}, must start at 0, never fall, and end at {total} at "
            "most" + ("; it is a 0 and numpy.cumsum(lengths)" if array[0] != 0 else "")
        )


def check_fits(function: str, name: str, array: Any) -> None:
    """Check that integers on the host are what they are as int32, too. Those on a GPU are not read:
    where they become int32, the largest stands for all that are larger."""
    if not isinstance(array, np.ndarray) or array.itemsize <= 4 or not array.size:
        return
    limits = np.iinfo(np.int32)
    for value in (array.min(), array.max()):
        if not limits.min <= value <= limits.max:
            raise ValueError(
                f"{function}: {name} has {value}, must be from {limits.min} to {limits.max}"
            )


def _check_shapes(
    function: str,
    names: tuple[str, ...],
    q: tuple,
    k: tuple,
    v: tuple,
    ragged: bool,
    max_head_dim: int,
) -> None:
    layout = "(total, heads, head_dim)" if ragged else "(batch, seqlen, heads, head_dim)"
    ndim = 3 if ragged else 4
    for name, shape in zip(names, (q, k, v), strict=True):
        if len(shape) != ndim:
            raise ValueError(f"{function}: {name} has shape {shape}, must be {layout}")
    nq, nk, nv = names
    if not ragged:
        for name, shape in ((nk, k), (nv, v)):
            if shape[0] != q[0]:
                raise ValueError(f"{function}: {name} has batch {shape[0]}, must be {nq}'s {q[0]}")
    if v[-3] != k[-3]:
        raise ValueError(f"{function}: {nv} has length {v[-3]}, must be {nk}'s {k[-3]}")
    if v[-2] != k[-2]:
        raise ValueError(f"{function}: {nv} has {v[-2]} heads, must be {nk}'s {k[-2]}")
    if k[-1] != q[-1]:
        raise ValueError(f"{function}: {nk} has head_dim {k[-1]}, must be {nq}'s {q[-1]}")
    if k[-2] < 1 or q[-2] % k[-2]:
        # Whether k, or both, could have their heads before the length, as torch has them.
        more = k[-3] < k[-2] or q[-2] < k[-2]
        swapped = 0 < k[-3] and more and 0 in (q[-2] % k[-3], q[-3] % k[-3])
        hint = "; heads are the last axis but one: swapaxes(-3, -2) exchanges it with the length"
        raise ValueError(
            f"{function}: {nk} has {k[-2]} heads, which must divide {nq}'s {q[-2]}"
            + (hint if swapped else "")
        )
    for name, shape in ((nq, q), (nv, v)):
        if not 1 <= shape[-1] <= max_head_dim:
            raise ValueError(
                f"{function}: {name} has head_dim {shape[-1]}, must be from 1 to {max_head_dim}"
            )


def _check_dtypes(
    function: str, names: tuple[str, ...], q: np.dtype, k: np.dtype, v: np.dtype
) -> None:
    if q not in FLOAT_DTYPES:
        allowed = ", ".join(FLOAT_DTYPES.values())
        raise TypeError(f"{function}: {names[0]} has dtype {q}, must be one of {allowed}")
    for name, dtype in zip(names[1:], (k, v), strict=True):
        if dtype != q:
            codes = dtype.itemsize == 1 and name.endswith(("_cache", "_pages"))
            hint = "; codes of 8 or 4 bits come in a QuantizedArray" if codes else ""
            raise TypeError(f"{function}: {name} has dtype {dtype}, must be {names[0]}'s {q}{hint}")


def _check_window(function: str, window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple) or len(window) != 2:
        alone = isinstance(window, numbers.Integral) and not isinstance(window, bool)
        hint = f"; ({window}, 0) sees the query's own key and {window} before it" if alone else ""
        raise ValueError(
            f"{function}: window is {window!r}, must be a tuple (left, right) or None{hint}"
        )
    for side in window:
        if side is not None and not isinstance(side, numbers.Integral):
            raise ValueError(
                f"{function}: window is {window!r}; each side must be an integer, or None for no "
                "limit"
            )
    left, right = (
        None if side is None else max(-FAR_KEYS, min(int(side), FAR_KEYS)) for side in window
    )
    return left, right


def check_number(function: str, name: str, value: Any) -> float:
    """Check that an argument is a finite number, and no boolean, and return it as a float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a number, got {type(value).__qualname__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{function}: {name} is {number}, must be finite")
    return number
