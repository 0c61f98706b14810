"""What a call of the samplers asks for: every argument checked, once for NumPy and for the GPU.

Checks read the values of what is on the host, and only shapes and dtypes of what is on the device:
there, kernels clamp. All checks come before anything is computed or written.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuattn._arrays import as_arrays, check_given, check_unmasked, on_gpu
from cuattn._backend import backend, contiguous, contiguous_last_axis, reshaped
from cuattn._philox import row_seeds
from cuattn._sampling_types import Drafts, Filters, Penalties

LOGIT_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
MAX_VOCAB = (1 << 30) - 1
MAX_TREE_DRAFTS = 256  # kMaxDrafts of rawkernels/sampling/speculate.cu
_INT32 = np.iinfo(np.int32)
_MAX_FLOAT = float(np.finfo(np.float32).max)


class Range(NamedTuple):
    """The values that a parameter may have."""

    low: float
    high: float
    closed: bool  # whether `low` itself is valid
    dtype: type
    most: float = _MAX_FLOAT  # what stands for larger ones


RANGES = {
    # Kernels multiply differences of logits by log2(e) / temperature, in float32: products that
    # count must not be flushed to 0.
    "temperature": Range(0.0, np.inf, True, np.float32, most=2.0**100),
    "top_k": Range(1, np.inf, True, np.int32),
    "top_p": Range(0.0, 1.0, True, np.float32),
    "min_p": Range(0.0, 1.0, True, np.float32),
    "typical_p": Range(0.0, 1.0, True, np.float32),
    "repetition": Range(0.0, np.inf, False, np.float32),
    "frequency": Range(-np.inf, np.inf, False, np.float32),
    "presence": Range(-np.inf, np.inf, False, np.float32),
}


def given_logits(
    name: str, logits: Any, **others: Any
) -> tuple[ModuleType, Any, tuple[int, ...], list[Any]]:
    """Bring logits, and arrays that belong to them, to one side.

    Returns
    -------
    xp : module
        ``numpy`` or ``cupy``.
    rows : array (batch, vocab)
        The logits with a contiguous vocabulary.
    shape : tuple of int
        Their shape as given.
    others : list
        The other arrays, in order.
    """
    check_given(name, logits=logits)
    xp, (logits, *brought) = as_arrays(name, logits=logits, **others)
    _check_logit_dtype(name, logits)
    if logits.ndim not in (1, 2) or not 1 <= logits.shape[-1] <= MAX_VOCAB:
        raise ValueError(
            f"{name}: logits must be (batch, vocab) or (vocab,) with vocab from 1 to {MAX_VOCAB}, "
            f"has shape {logits.shape}"
        )
    rows = logits[None] if logits.ndim == 1 else logits
    return xp, contiguous_last_axis(xp, rows), logits.shape, brought


def given_beams(name: str, logits: Any, scores: Any) -> tuple[ModuleType, Any, Any]:
    """Logits (batch, beams, vocab) and scores (batch, beams) as float32, both contiguous."""
    check_given(name, logits=logits, scores=scores)
    xp, (logits, scores) = as_arrays(name, logits=logits, scores=scores)
    _check_logit_dtype(name, logits)
    if logits.ndim != 3 or not logits.shape[1] or not 1 <= logits.shape[2] <= MAX_VOCAB:
        raise ValueError(
            f"{name}: logits must be (batch, beams, vocab) with at least one beam and a vocab from "
            f"1 to {MAX_VOCAB}, has shape {logits.shape}"
        )
    if scores.shape != logits.shape[:2]:
        raise ValueError(
            f"{name}: scores must be {logits.shape[:2]} as logits are, has shape {scores.shape}"
        )
    _check_numbers(name, "scores", scores)
    rows = reshaped(xp, contiguous_last_axis(xp, logits), (-1, logits.shape[2]))
    return xp, rows.reshape(logits.shape), contiguous(xp, scores, np.float32)


def filters(
    name: str,
    xp: ModuleType,
    shape: tuple[int, int],
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    typical_p: Any,
) -> Filters:
    """Check the filters of logits of `shape`."""
    batch, vocab = shape

    def values(parameter: str, given: Any, off: float) -> Any:
        return row_values(name, xp, parameter, off if given is None else given, batch, vocab)

    return Filters(
        values("temperature", temperature, 1.0),
        values("top_k", top_k, vocab),
        values("top_p", top_p, 1.0),
        values("min_p", min_p, 0.0),
        values("typical_p", typical_p, 1.0),
    )


def penalty_arrays(name: str, tokens: Any, logit_bias: Any, allowed: Any) -> dict[str, Any]:
    """The arrays among the penalties by name, in the order in which :func:`penalties` takes
    them."""
    triple = isinstance(logit_bias, (tuple, list))
    if triple and (len(logit_bias) != 3 or any(item is None for item in logit_bias)):
        got = ", ".join(type(item).__name__ for item in logit_bias)
        raise ValueError(
            f"{name}: logit_bias must be an array or three, (row, token, value), got ({got})"
        )
    row, token, value = logit_bias if triple else (None, None, logit_bias)
    return {
        "tokens": tokens,
        "logit_bias row": row,
        "logit_bias token": token,
        "logit_bias": value,
        "allowed": allowed,
    }


def penalties(
    name: str,
    xp: ModuleType,
    shape: tuple[int, int],
    arrays: list[Any],
    repetition: Any,
    frequency: Any,
    presence: Any,
) -> Penalties:
    """Check the penalties of logits of `shape`; `arrays` are those of :func:`penalty_arrays`."""
    batch, vocab = shape
    tokens, row, token, bias, allowed = arrays
    if tokens is None:
        check_no_penalty(name, repetition, frequency, presence)
        tokens = xp.empty((batch, 0), np.int32)
    if bias is not None:
        _check_numbers(name, "logit_bias", bias)
        if row is not None:
            bias = _triples(name, xp, row, token, bias)
        else:
            bias = _broadcast_rows(name, "logit_bias", bias, batch, vocab, xp, np.float32)
    if allowed is not None:
        packed = allowed.dtype in (np.dtype(np.int32), np.dtype(np.uint32))
        if not packed and allowed.dtype != np.bool_:
            raise TypeError(
                f"{name}: allowed has dtype {allowed.dtype}, must be bool, int32 or uint32"
            )
        width = -(-vocab // 32) if packed else vocab
        label = f"allowed of {allowed.dtype}, 32 tokens a word," if packed else "allowed"
        allowed = _broadcast_rows(name, label, allowed, batch, width, xp)
    return Penalties(
        token_rows(name, xp, tokens, batch),
        row_values(name, xp, "repetition", repetition, batch),
        row_values(name, xp, "frequency", frequency, batch),
        row_values(name, xp, "presence", presence, batch),
        bias,
        allowed,
    )


def check_no_penalty(name: str, repetition: Any, frequency: Any, presence: Any) -> None:
    """Check that nothing is asked for that needs a row's earlier tokens."""
    for parameter, given, off in (
        ("repetition", repetition, 1),
        ("frequency", frequency, 0),
        ("presence", presence, 0),
    ):
        if type(given) not in (int, float) or given != off:
            raise ValueError(f"{name}: {parameter} is given, and tokens are not")


def _triples(name: str, xp: ModuleType, row: Any, token: Any, value: Any) -> tuple:
    shapes = [array.shape for array in (row, token, value)]
    if len(set(shapes)) != 1 or row.ndim != 1:
        raise ValueError(
            f"{name}: logit_bias's row, token and value must be (n,) each, have shapes {shapes}"
        )
    return (
        _int32(name, xp, "logit_bias's row", row),
        _int32(name, xp, "logit_bias's token", token),
        contiguous(xp, value, np.float32),
    )


def token_rows(name: str, xp: ModuleType, tokens: Any, batch: int) -> Any:
    """Tokens as contiguous int32 (batch, length)."""
    rows = tokens[None] if tokens.ndim == 1 else tokens
    if rows.ndim != 2 or len(rows) != batch:
        raise ValueError(
            f"{name}: tokens must be ({batch}, length) as logits are, has shape {tokens.shape}"
        )
    return _int32(name, xp, "tokens", rows)


def drafts(
    name: str, draft_tokens: Any, draft_probs: Any, target_probs: Any, parents: Any
) -> tuple[ModuleType, Drafts]:
    """Check what speculative sampling is given; `parents` is None for a chain."""
    check_given(name, draft_tokens=draft_tokens, draft_probs=draft_probs, target_probs=target_probs)
    xp, (draft_tokens, draft_probs, target_probs, parents) = as_arrays(
        name,
        draft_tokens=draft_tokens,
        draft_probs=draft_probs,
        target_probs=target_probs,
        parents=parents,
    )
    if target_probs.ndim != 3 or not target_probs.shape[1] or not target_probs.shape[2]:
        raise ValueError(
            f"{name}: target_probs must be (batch, drafts + 1, vocab) with a vocab of at least 1, "
            f"has shape {target_probs.shape}"
        )
    batch, nodes, vocab = target_probs.shape
    count = nodes - 1
    if draft_probs.shape != (batch, count, vocab):
        raise ValueError(
            f"{name}: draft_probs must be ({batch}, {count}, {vocab}) with target_probs "
            f"{target_probs.shape}, has shape {draft_probs.shape}"
        )
    if parents is not None and count > MAX_TREE_DRAFTS:
        raise ValueError(
            f"{name}: draft_tokens must be at most {MAX_TREE_DRAFTS} in a row, are {count}"
        )
    for parameter, array in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        if array.dtype != np.float32:
            raise TypeError(f"{name}: {parameter} has dtype {array.dtype}, must be float32")
        if xp is np and (negative := array < 0).any():
            raise ValueError(
                f"{name}: {parameter} must not be negative, holds {array[negative][0]}"
            )
    integers = {"draft_tokens": draft_tokens, "parents": parents}
    for parameter, array in integers.items():
        if array is None:
            continue
        if array.shape != (batch, count):
            raise ValueError(
                f"{name}: {parameter} must be ({batch}, {count}), has shape {array.shape}"
            )
        integers[parameter] = _int32(name, xp, parameter, array)
    tokens, parents = integers.values()
    if xp is np and parents is not None:
        later = (tokens >= 0) & ((parents >= np.arange(count)) | (parents < -1))
        if later.any():
            row, draft = np.argwhere(later)[0]
            raise ValueError(
                f"{name}: parents must be -1 or the index of an earlier draft token, but is "
                f"{parents[row, draft]} for draft token {draft} of row {row}"
            )
    return xp, Drafts(tokens, parents, contiguous(xp, draft_probs), contiguous(xp, target_probs))


def seeds(name: str, xp: ModuleType, given: Any, batch: int) -> Any:
    """What decides the draws of each row: an array (batch,) of uint64, or on the GPU an int, from
    which each row has a stream of its own by :func:`cuattn._philox.row_seeds`."""
    if given is None:
        if xp is not np and backend(xp, "memory").capturing():
            raise ValueError(
                f"{name}: seed must be an integer or an array on the device while a graph is "
                "captured, got None: every replay would draw the same numbers"
            )
        given = int.from_bytes(os.urandom(8), "little")
    words = _words(name, xp, "seed", given, batch)
    return row_seeds(words, batch) if xp is np and isinstance(words, int) else words


def offsets(name: str, xp: ModuleType, given: Any, batch: int) -> Any:
    """Offsets of the rows' draws: an array (batch,) of uint64, or on the GPU an int for all
    rows."""
    words = _words(name, xp, "offset", given, batch)
    return np.full(batch, words, np.uint64) if xp is np and isinstance(words, int) else words


def _words(name: str, xp: ModuleType, parameter: str, given: Any, batch: int) -> Any:
    """64 bits for each row, or for all rows, as uint64 or int."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        if not -(2**63) <= given < 2**64:
            raise ValueError(f"{name}: {parameter} must be of 64 bits, got {given}")
        return int(given) & 0xFFFFFFFFFFFFFFFF
    if (array := _on_their_device(name, xp, parameter, given)) is not None:
        _check_integers(name, parameter, array)
        rows = _per_row(name, parameter, array, batch)
        return contiguous(xp, rows, None if rows.itemsize == 8 else np.uint64).view(np.uint64)
    if isinstance(given, (list, tuple)) and all(type(item) is int for item in given):
        # NumPy would make floats of those that do not fit in one type of integers.
        given = np.array([_words(name, np, parameter, item, 1) for item in given], np.uint64)
    values = _host_array(name, parameter, given)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name}: {parameter} must be an integer or integers, got {given!r}")
    if values.ndim == 0:
        return _words(name, xp, parameter, int(values), batch)
    rows = _per_row(name, parameter, values, batch).astype(np.uint64)
    return rows if xp is np else _uploaded(name, xp, parameter, rows)


def integer(name: str, parameter: str, given: Any, low: int, high: int) -> int:
    """Check an int."""
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise TypeError(f"{name}: {parameter} must be an int, got {given!r}")
    if not low <= given <= high:
        raise ValueError(f"{name}: {parameter} must be from {low} to {high}, got {given}")
    return int(given)


def row_values(
    name: str, xp: ModuleType, parameter: str, given: Any, batch: int, vocab: int = 0
) -> Any:
    """A parameter as an array (batch,) on the side of the logits; for the GPU, a scalar stays a
    Python number."""
    if isinstance(given, (int, float, np.number)):
        number = _number(name, parameter, given, vocab)
        return np.full(batch, number, RANGES[parameter].dtype) if xp is np else number
    if (array := _on_their_device(name, xp, parameter, given)) is not None:
        rows = _per_row(name, parameter, array, batch)
        if RANGES[parameter].dtype is np.int32:
            return _int32(name, xp, parameter, rows)
        _check_numbers(name, parameter, rows)
        return contiguous(xp, rows, np.float32)
    values = _in_range(name, parameter, given, vocab)
    if values.ndim == 0:
        return row_values(name, xp, parameter, values[()], batch, vocab)
    rows = _per_row(name, parameter, values, batch)
    return rows if xp is np else _uploaded(name, xp, parameter, rows)


@functools.lru_cache(maxsize=4096, typed=True)  # checking takes as long as a launch
def _number(name: str, parameter: str, given: Any, vocab: int) -> Any:
    """A scalar, checked, as a Python number."""
    return _in_range(name, parameter, given, vocab).item()


def _in_range(name: str, parameter: str, given: Any, vocab: int) -> np.ndarray:
    """A scalar or an array on the host, checked, in the parameter's dtype."""
    low, high, closed, dtype, most = RANGES[parameter]
    values = _host_array(name, parameter, given)
    if values.dtype in LOGIT_DTYPES:  # bfloat16 is no float to NumPy
        values = values.astype(np.float32)
    integral = dtype is np.int32
    if values.size and values.dtype.kind not in ("iu" if integral else "iuf"):
        wanted = "an integer or integers" if integral else "a number or numbers"
        raise TypeError(f"{name}: {parameter} must be {wanted}, got {given!r}")
    inside = (values >= low if closed else values > low) & (values <= high)
    if high == np.inf and values.dtype.kind == "f":
        inside &= np.isfinite(values)
    if not inside.all():
        left, right = "[" if closed else "(", ")" if high == np.inf else "]"
        hint = "; None keeps all" if parameter == "top_k" else ""
        raise ValueError(
            f"{name}: {parameter} must be in {left}{low}, {high}{right}, got {given!r}{hint}"
        )
    if integral:
        return np.minimum(values.astype(np.uint64), np.uint64(vocab)).astype(dtype)
    return np.clip(values.astype(np.float64), -_MAX_FLOAT, most).astype(dtype)


def _host_array(name: str, parameter: str, given: Any) -> np.ndarray:
    """A scalar or an array on the host as a NumPy array."""
    check_unmasked(name, parameter, given)
    if type(given) is int:  # of any length
        given = min(max(given, -(2**63)), 2**63 - 1)
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {parameter} is no array: {error}") from error


def _on_their_device(name: str, xp: ModuleType, parameter: str, given: Any) -> Any:
    """A parameter that is on the logits' GPU; None for one on the host."""
    array = on_gpu(given)
    if array is None:
        return None
    if xp is np:
        raise ValueError(f"{name}: {parameter} is on a GPU, and logits are not")
    if array.device.id != (current := xp.cuda.runtime.getDevice()):
        raise ValueError(
            f"{name}: {parameter} is on GPU {array.device.id}, and logits are on GPU {current}"
        )
    return array


def _per_row(name: str, parameter: str, values: Any, batch: int) -> Any:
    if values.shape != (batch,):
        raise ValueError(
            f"{name}: {parameter} must be a scalar or of shape ({batch},), has shape {values.shape}"
        )
    return values


def _uploaded(name: str, xp: ModuleType, parameter: str, values: np.ndarray) -> Any:
    """A copy of a host array on the device. A graph would copy from the host's memory again at each
    replay, whatever is there by then, so a capture refuses it."""
    if backend(xp, "memory").capturing():
        raise ValueError(
            f"{name}: {parameter} is an array on the host, must be on the device (or a scalar) "
            "while a graph is captured"
        )
    return xp.asarray(values)


def _int32(name: str, xp: ModuleType, parameter: str, array: Any) -> Any:
    """Integers as contiguous int32: on the host they must fit, on the device they are clamped."""
    _check_integers(name, parameter, array)
    if xp is not np:
        return backend(xp, "memory").contiguous_int32(array)
    if array.size and not np.can_cast(array.dtype, np.int32):
        for extreme in (array.min(), array.max()):
            if not _INT32.min <= extreme <= _INT32.max:
                raise ValueError(f"{name}: {parameter} must fit in int32, holds {extreme}")
    return contiguous(xp, array, np.int32)


def _check_logit_dtype(name: str, logits: Any) -> None:
    if logits.dtype not in LOGIT_DTYPES:
        raise TypeError(
            f"{name}: logits has dtype {logits.dtype}, must be float16, bfloat16 or float32"
        )


def _check_integers(name: str, parameter: str, array: Any) -> None:
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: {parameter} must be integers, has dtype {array.dtype}")


def _check_numbers(name: str, parameter: str, array: Any) -> None:
    if array.dtype.kind not in "iuf" and array.dtype not in LOGIT_DTYPES:
        raise TypeError(f"{name}: {parameter} must be real numbers, has dtype {array.dtype}")


def _broadcast_rows(
    name: str,
    parameter: str,
    values: Any,
    batch: int,
    width: int,
    xp: ModuleType,
    dtype: Any = None,
) -> Any:
    if values.shape not in ((width,), (1, width), (batch, width)):
        raise ValueError(
            f"{name}: {parameter} must be ({width},) or ({batch}, {width}), has shape "
            f"{values.shape}"
        )
    return xp.broadcast_to(contiguous_last_axis(xp, values, dtype), (batch, width))
