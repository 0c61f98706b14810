"""From logits to tokens on a GPU: kernel, arguments, launch.

Arguments and results are those of :mod:`cuattn.reference.sampling`, save that a parameter that is
the same for all rows is a Python number, which travels as a kernel argument. Nothing is read back.
Arrays are on the current device: the public functions see to that.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cuattn._arrays import FLOAT_DTYPES
from cuattn._sampling_types import Drafts, Filters, Penalties
from cuattn.gpu import compiler, dispatch
from cuattn.gpu.memory import pointer, scratch_array, temporaries
from cuattn.gpu.params import (
    PENALIZE_PARAMS,
    PENALTY_PARAMS,
    SAMPLE_PARAMS,
    SOFTMAX_PARAMS,
    SPECULATE_PARAMS,
)
from cuattn.gpu.plan import as_kernel_argument

_NO_PENALTIES = PENALTY_PARAMS.pack(*[0] * 18)

_KINDS = ("float32", "float16", "bfloat16")  # as in SampleParams
_OFF = Filters(1.0, 1 << 30, 1.0, 0.0, 1.0)  # leaves every token
_GREEDY = _OFF._replace(temperature=0.0)


def greedy(logits: cupy.ndarray) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.greedy`."""
    return _draw(logits, _GREEDY, 0, 0)


def softmax(logits: cupy.ndarray, temperature: Any) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.softmax`."""
    out = cupy.empty(logits.shape, np.float32)
    _normalise(logits, temperature, probabilities=out)
    return out


def filter_logits(logits: cupy.ndarray, filters: Filters) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.filter_logits`."""
    out = cupy.empty(logits.shape, np.float32)
    _filter(logits, filters, filtered=out)
    return out


def sample(
    logits: cupy.ndarray,
    filters: Filters,
    seed: Any,
    offset: Any,
    penalties: Penalties | None = None,
) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.sample`."""
    _, top_k, top_p, min_p, typical_p = filters
    unfiltered = isinstance(top_k, int) and top_k >= logits.shape[1]
    if unfiltered and _all_rows(top_p, 1) and _all_rows(min_p, 0) and _all_rows(typical_p, 1):
        return _draw(logits, filters, seed, offset, penalties)
    amended = None
    if penalties is not None:
        # The k largest can be told by a table of what is penalised.
        ranked = isinstance(top_k, int) and top_k <= dispatch.MAX_RANKED
        if ranked and _all_rows(typical_p, 1):
            amended = _amend(logits, penalties)
        if amended is None:
            with temporaries():
                logits = apply_penalties(logits, penalties)
    tokens = cupy.empty(len(logits), np.int32)
    # Typical-p and a long top-k take several passes; values on the device may ask for them.
    several = isinstance(top_k, int) and dispatch.MAX_RANKED < top_k < logits.shape[1]
    several |= isinstance(typical_p, float) and typical_p < 1
    known = isinstance(top_k, int) and isinstance(typical_p, float)
    if not several:
        _stream(logits, filters, seed, offset, tokens=tokens, amended=amended)
    if several or not known:
        _filter(logits, filters, seed, offset, tokens=tokens, rest=not several)
    return tokens


def top_k(logits: cupy.ndarray, k: int) -> tuple[cupy.ndarray, cupy.ndarray]:
    """As :func:`cuattn.reference.sampling.top_k`."""
    values = cupy.empty((len(logits), k), logits.dtype)
    indices = cupy.empty((len(logits), k), np.int32)
    _top_k(logits, values, indices)
    return values, indices


def apply_penalties(logits: cupy.ndarray, penalties: Penalties) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.apply_penalties`."""
    out = cupy.empty(logits.shape, logits.dtype)
    if out.size:
        shape = logits.shape
        launch, segment = dispatch.penalize(FLOAT_DTYPES[logits.dtype], *shape, *_listed(penalties))
        params = PENALIZE_PARAMS.pack(
            logits.data.ptr, out.data.ptr, 0, _row_stride(logits), shape[1], segment, 0
        )
        nbytes = dispatch.penalty_bytes(min(shape[1], segment), *_listed(penalties))
        _launch(launch, params, _penalty_params(penalties), smem_bytes=nbytes)
    return out


def _amend(logits: cupy.ndarray, penalties: Penalties) -> cupy.ndarray | None:
    """For each row, a table of the tokens that are penalised and of what their logits become; None
    where :func:`apply_penalties` is better."""
    dense = isinstance(penalties.bias, cupy.ndarray) or penalties.allowed is not None
    listed = _listed(penalties)
    choice = None if dense else dispatch.amend(FLOAT_DTYPES[logits.dtype], *logits.shape, *listed)
    if choice is None or not logits.size:
        return None
    launch, bits, nbytes = choice
    table = scratch_array((len(logits), 1 << bits, 2), np.dtype(np.int32))
    params = PENALIZE_PARAMS.pack(
        logits.data.ptr, 0, table.data.ptr, _row_stride(logits), logits.shape[1], 0, bits
    )
    _launch(launch, params, _penalty_params(penalties), smem_bytes=nbytes)
    return table


def _penalty_params(penalties: Penalties) -> bytes:
    tokens, repetition, frequency, presence, bias, allowed = penalties
    triples = bias if isinstance(bias, tuple) else ()
    dense = None if triples else bias
    return PENALTY_PARAMS.pack(
        tokens.data.ptr,
        pointer(dense),
        *([array.data.ptr for array in triples] or (0, 0, 0)),
        pointer(allowed),
        _row_stride(dense),
        _row_stride(allowed),
        *(word for value in (repetition, frequency, presence) for word in _row_value(value)),
        tokens.shape[1],
        len(triples[0]) if triples else 0,
        allowed is not None and allowed.dtype != np.bool_,
        True,
    )


def _listed(penalties: Penalties) -> tuple[int, int]:
    """How many earlier tokens of a row there are, and how many triples."""
    bias = penalties.bias
    return penalties.tokens.shape[1], len(bias[0]) if isinstance(bias, tuple) else 0


def speculative_sample(drafts: Drafts, seed: Any, offset: Any) -> tuple[cupy.ndarray, cupy.ndarray]:
    """As :func:`cuattn.reference.sampling.speculative_sample`."""
    draft_tokens, parents, draft_probs, target_probs = drafts
    rows, nodes, vocab = target_probs.shape
    tokens, accepted = cupy.empty((rows, nodes), np.int32), cupy.empty(rows, np.int32)
    if rows:
        params = SPECULATE_PARAMS.pack(
            draft_tokens.data.ptr,
            pointer(parents),
            draft_probs.data.ptr,
            target_probs.data.ptr,
            tokens.data.ptr,
            accepted.data.ptr,
            *_row_value(seed),
            *_row_value(offset),
            nodes - 1,
            vocab,
        )
        _launch(dispatch.speculate(rows, _arch()), params)
    return tokens, accepted


def logprobs(
    logits: cupy.ndarray, tokens: cupy.ndarray | None, top_n: int
) -> tuple[cupy.ndarray | None, cupy.ndarray | None, cupy.ndarray | None]:
    """As :func:`cuattn.reference.sampling.logprobs`."""
    best = None
    if top_n:
        best = cupy.empty((len(logits), top_n), np.int32)
        _top_k(logits, scratch_array(best.shape, logits.dtype), best)
    wanted = best if tokens is None else tokens
    if wanted is None:
        return None, None, None
    if tokens is not None and best is not None:
        wanted = scratch_array((len(logits), tokens.shape[1] + top_n), best.dtype)
        wanted[:, : tokens.shape[1]], wanted[:, tokens.shape[1] :] = tokens, best
    found = cupy.empty(wanted.shape, np.float32)
    _normalise(logits, 1.0, tokens=wanted, log_probabilities=found)
    chosen = None if tokens is None else found[:, : tokens.shape[1]]
    return chosen, None if best is None else found[:, wanted.shape[1] - top_n :], best


def beam_step(
    logits: cupy.ndarray, scores: cupy.ndarray
) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
    """As :func:`cuattn.reference.sampling.beam_step`: the best of each beam, then the best of
    those."""
    rows, beams, vocab = logits.shape
    width = min(beams, vocab)
    best = cupy.empty((rows, beams), np.float32)
    added, parents = (cupy.empty((rows, beams), np.int32) for _ in range(2))
    with temporaries():
        flat = logits.reshape(rows * beams, vocab)
        _, values, tokens = logprobs(flat, None, width)
        total = values.reshape(rows, beams, width) + scores[:, :, None]
        total = cupy.where(cupy.isnan(total), cupy.float32(-np.inf), total)
        places = cupy.empty((rows, beams), np.int32)
        _top_k(total.reshape(rows, beams * width), best, places)
        dead = best == -np.inf
        picked = cupy.take_along_axis(tokens.reshape(rows, beams * width), places, axis=1)
        added[...] = cupy.where(dead, -1, picked)
        parents[...] = cupy.where(dead, -1, places // width)
    return best, added, parents


def _top_k(logits: cupy.ndarray, values: cupy.ndarray, indices: cupy.ndarray) -> None:
    k = indices.shape[1]
    if k <= dispatch.MAX_RANKED:
        return _stream(logits, _OFF, top=(values, indices))
    # More than a block can list: whole rows are sorted.
    with temporaries():
        wide = logits.astype(np.float32)
        order = cupy.argsort(-wide, axis=1, kind="stable")[:, :k]
        bad = ~(wide < np.inf).all(axis=1, keepdims=True)
        largest = cupy.take_along_axis(wide, order, axis=1)
        values[...] = cupy.where(bad, cupy.float32(np.nan), largest)
        indices[...] = cupy.where(bad, -1, order)


def _draw(
    logits: cupy.ndarray,
    filters: Filters,
    seed: Any,
    offset: Any,
    penalties: Penalties | None = None,
) -> cupy.ndarray:
    tokens = cupy.empty(len(logits), np.int32)
    if not len(logits):
        return tokens
    launch = dispatch.sample(
        FLOAT_DTYPES[logits.dtype], len(logits), _arch(), penalised=bool(penalties)
    )
    arguments, nbytes = _NO_PENALTIES, 0
    if penalties is not None:
        segment = dispatch.segment(logits.shape[1], launch.variant.config.cluster)
        nbytes = dispatch.penalty_bytes(segment, *_listed(penalties))
        if nbytes > launch.variant.config.smem_bytes:  # very many earlier tokens
            with temporaries():
                logits = apply_penalties(logits, penalties)
            return _draw(logits, filters, seed, offset)
        arguments = _penalty_params(penalties)
    params = _sample_params(logits, filters, seed, offset, tokens=tokens)
    _launch(launch, params, arguments, smem_bytes=nbytes)
    return tokens


def _normalise(
    logits: cupy.ndarray,
    temperature: Any,
    *,
    probabilities: cupy.ndarray | None = None,
    tokens: cupy.ndarray | None = None,
    log_probabilities: cupy.ndarray | None = None,
) -> None:
    if not len(logits):
        return
    launch = dispatch.softmax(FLOAT_DTYPES[logits.dtype], *logits.shape, _arch())
    params = SOFTMAX_PARAMS.pack(
        logits.data.ptr,
        pointer(probabilities),
        pointer(tokens),
        pointer(log_probabilities),
        _row_stride(logits),
        *_row_value(temperature),
        *logits.shape,
        0 if tokens is None else tokens.shape[1],
    )
    _launch(launch, params)


def _stream(
    logits: cupy.ndarray, filters: Filters, seed: Any = 0, offset: Any = 0, **outputs: Any
) -> None:
    if not len(logits):
        return
    launch = dispatch.stream(FLOAT_DTYPES[logits.dtype], len(logits), _arch())
    params = _sample_params(logits, filters, seed, offset, **outputs)
    _launch(launch, params, smem_bytes=launch.variant.config.smem_bytes)


def _filter(
    logits: cupy.ndarray, filters: Filters, seed: Any = 0, offset: Any = 0, **outputs: Any
) -> None:
    if not len(logits):
        return
    launch, smem_bytes = dispatch.filter_rows(*logits.shape, _arch())
    params = _sample_params(logits, filters, seed, offset, **outputs)
    _launch(launch, params, smem_bytes=smem_bytes)


def _sample_params(
    logits: cupy.ndarray,
    filters: Filters,
    seed: Any,
    offset: Any,
    *,
    tokens: cupy.ndarray | None = None,
    filtered: cupy.ndarray | None = None,
    top: tuple | None = None,
    amended: cupy.ndarray | None = None,
    rest: bool = False,
) -> bytes:
    temperature, top_k, top_p, min_p, typical_p = filters
    values, indices = top or (None, None)
    return SAMPLE_PARAMS.pack(
        logits.data.ptr,
        pointer(tokens),
        pointer(filtered),
        pointer(values),
        pointer(indices),
        pointer(amended),
        _row_stride(logits),
        *_row_value(seed),
        *_row_value(offset),
        *_row_value(temperature),
        *_row_value(top_p),
        *_row_value(min_p),
        *_row_value(typical_p),
        *_row_value(top_k),
        logits.shape[1],
        0 if indices is None else indices.shape[1],
        rest,
        _KINDS.index(FLOAT_DTYPES[logits.dtype]),
        0 if amended is None else (amended.shape[1] - 1).bit_length(),
    )


def _all_rows(value: Any, number: float) -> bool:
    """Whether a parameter is known to be this number in all rows: arrays are never read back."""
    return isinstance(value, float) and value == number


def _row_value(value: Any) -> tuple:
    """A RowValue: pointer and value."""
    return (value.data.ptr, 0) if isinstance(value, cupy.ndarray) else (0, value)


def _row_stride(array: cupy.ndarray | None) -> int:
    return 0 if array is None else array.strides[0] // array.itemsize


def _arch() -> str:
    return compiler.device_arch(cupy.cuda.runtime.getDevice())


def _launch(launch: dispatch.Launch, *arguments: bytes, smem_bytes: int = 0) -> None:
    """Launch on the current device and stream; structs are passed by value."""
    kernel = compiler.kernel(launch.variant, cupy.cuda.runtime.getDevice())
    structs = [as_kernel_argument(packed) for packed in arguments]
    kernel(launch.grid, (launch.variant.config.threads,), structs, shared_mem=smem_bytes)
