"""From logits to tokens on a GPU: kernel, arguments, launch.

Arguments and results are those of :mod:`cuattn.reference.sampling`, save that a parameter that is
the same for all rows is a Python number, which travels as a kernel argument. Nothing is read back.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import cupy
import numpy as np

from cuattn.gpu import compiler, tiles
from cuattn.gpu.memory import pointer

#: SampleParams of rawkernels/sampling/params.cuh, field by field.
SAMPLE_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in ("logits", "tokens", "filtered")),
        *((name, np.uint64) for name in ("top_values", "top_indices")),
        ("row_stride", np.int64),
        *((name, [("per_row", np.uint64), ("value", np.uint64)]) for name in ("seed", "offset")),
        *(
            (name, np.dtype([("per_row", np.uint64), ("value", np.float32)], align=True))
            for name in ("temperature", "top_p", "min_p", "typical_p")
        ),
        ("top_k", np.dtype([("per_row", np.uint64), ("value", np.int32)], align=True)),
        *((name, np.int32) for name in ("vocab", "top_count", "normalise")),
    ],
    align=True,
)
_WORD, _FLOAT, _INT = "QQ", "Qf4x", "Qi4x"  # RowValue of each type
_PACK_SAMPLE = struct.Struct("5Qq" + 2 * _WORD + 4 * _FLOAT + _INT + "3i4x").pack
#: SpeculateParams of rawkernels/sampling/speculate.cu, and PenaltyParams of
#: rawkernels/sampling/penalize.cu.
_PACK_SPECULATE = struct.Struct("6Q" + 2 * _WORD + "2i").pack
_PACK_PENALTY = struct.Struct("8Q3q" + 3 * _FLOAT + "4i").pack

_OFF = (1.0, 1 << 30, 1.0, 0.0, 1.0)  # filters that leave every token


def greedy(logits: cupy.ndarray) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.greedy`."""
    return _draw(logits, (0.0, *_OFF[1:]), 0, 0)


def softmax(logits: cupy.ndarray, temperature: Any) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.softmax`."""
    out = cupy.empty(logits.shape, np.float32)
    _filter(logits, (temperature, *_OFF[1:]), filtered=out, normalise=True)
    return out


def filter_logits(logits: cupy.ndarray, filters: tuple) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.filter_logits`."""
    out = cupy.empty(logits.shape, np.float32)
    _filter(logits, filters, filtered=out)
    return out


def sample(logits: cupy.ndarray, filters: tuple, seed: Any, offset: Any) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.sample`."""
    _, top_k, top_p, min_p, typical_p = filters
    if (
        isinstance(top_k, int)
        and top_k >= logits.shape[1]
        and (top_p, min_p, typical_p) == (1, 0, 1)
    ):
        return _draw(logits, filters, seed, offset)
    tokens = cupy.empty(len(logits), np.int32)
    few_or_all = isinstance(top_k, int) and (top_k <= tiles.MAX_RANKED or top_k >= logits.shape[1])
    one_pass = few_or_all and isinstance(typical_p, float) and typical_p == 1
    (_stream if one_pass else _filter)(logits, filters, seed, offset, tokens=tokens)
    return tokens


def top_k(logits: cupy.ndarray, k: int) -> tuple[cupy.ndarray, cupy.ndarray]:
    """As :func:`cuattn.reference.sampling.top_k`."""
    if k > tiles.MAX_LISTED:
        return _sorted_top_k(logits, k)
    values = cupy.empty((len(logits), k), logits.dtype)
    indices = cupy.empty((len(logits), k), np.int32)
    (_stream if k <= tiles.MAX_RANKED else _filter)(logits, _OFF, top=(values, indices))
    return values, indices


def apply_penalties(
    logits: cupy.ndarray,
    tokens: cupy.ndarray,
    repetition: Any,
    frequency: Any,
    presence: Any,
    bias: cupy.ndarray | tuple | None,
    allowed: cupy.ndarray | None,
) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.apply_penalties`."""
    out = cupy.empty(logits.shape, logits.dtype)
    if not out.size:
        return out
    triples = tuple(map(cupy.ascontiguousarray, bias)) if isinstance(bias, tuple) else ()
    dense = None if triples else bias
    packed = allowed is not None and allowed.dtype != np.bool_
    with logits.device:
        launch = tiles.penalize(logits.dtype.name, *logits.shape)
        params = _PACK_PENALTY(
            logits.data.ptr,
            out.data.ptr,
            tokens.data.ptr,
            pointer(dense),
            *([array.data.ptr for array in triples] or (0, 0, 0)),
            pointer(allowed),
            _row_stride(logits),
            _row_stride(dense),
            _row_stride(allowed),
            *(word for value in (repetition, frequency, presence) for word in _row_value(value)),
            logits.shape[1],
            tokens.shape[1],
            len(triples[0]) if triples else 0,
            packed,
        )
        _launch(launch, params)
    return out


def speculative_sample(
    draft_tokens: cupy.ndarray,
    draft_probs: cupy.ndarray,
    target_probs: cupy.ndarray,
    parents: cupy.ndarray | None,
    seed: Any,
    offset: Any,
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """As :func:`cuattn.reference.sampling.speculative_sample`."""
    rows, nodes, vocab = target_probs.shape
    tokens, accepted = cupy.empty((rows, nodes), np.int32), cupy.empty(rows, np.int32)
    if rows:
        params = _PACK_SPECULATE(
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
        with target_probs.device:
            _launch(tiles.speculate(rows, _arch()), params)
    return tokens, accepted


def logprobs(
    logits: cupy.ndarray, tokens: cupy.ndarray | None, top_n: int
) -> tuple[cupy.ndarray | None, cupy.ndarray | None, cupy.ndarray | None]:
    """As :func:`cuattn.reference.sampling.logprobs`."""
    norm = _log_norm(logits)
    chosen = None
    if tokens is not None:
        inside = (tokens >= 0) & (tokens < logits.shape[1])
        picked = cupy.take_along_axis(logits, cupy.where(inside, tokens, 0), axis=1)
        chosen = _log_p(picked, norm)
        chosen[~inside] = np.nan
    if not top_n:
        return chosen, None, None
    values, indices = top_k(logits, top_n)
    return chosen, _log_p(values, norm), indices


def beam_step(
    logits: cupy.ndarray, scores: cupy.ndarray
) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
    """As :func:`cuattn.reference.sampling.beam_step`: the best of each beam, then the best of
    those."""
    rows, beams, vocab = logits.shape
    flat = logits.reshape(rows * beams, vocab)
    width = min(beams, vocab)
    _, values, tokens = logprobs(flat, None, width)
    total = values.reshape(rows, beams, width) + scores[:, :, None]
    total[cupy.isnan(total)] = -np.inf
    best, places = top_k(total.reshape(rows, beams * width), beams)
    dead = best == -np.inf
    picked = cupy.take_along_axis(tokens.reshape(rows, beams * width), places, axis=1)
    return (
        best,
        cupy.where(dead, -1, picked),
        cupy.where(dead, -1, places // width).astype(np.int32),
    )


def _log_norm(logits: cupy.ndarray) -> cupy.ndarray:
    """Log of the sum of exponentials, (rows, 1) of float64; NaN for a bad row."""
    wide = logits.astype(np.float32)
    top = wide.max(axis=1, keepdims=True)
    top = cupy.where(top == -np.inf, 0, top)
    mass = cupy.exp(wide - top).sum(axis=1, keepdims=True, dtype=np.float64)
    return top + cupy.log(mass)


def _log_p(logits: cupy.ndarray, norm: cupy.ndarray) -> cupy.ndarray:
    """Log-probabilities as float32; -inf in a row of nothing but -inf."""
    return cupy.where(norm == -np.inf, -np.inf, logits.astype(np.float64) - norm).astype(np.float32)


def _sorted_top_k(logits: cupy.ndarray, k: int) -> tuple[cupy.ndarray, cupy.ndarray]:
    """The k largest by sorting whole rows: for more than a block can list."""
    wide = logits.astype(np.float32)
    indices = cupy.argsort(-wide, axis=1, kind="stable")[:, :k]
    values = cupy.take_along_axis(logits, indices, axis=1)
    bad = ~(wide < np.inf).all(axis=1, keepdims=True)
    values = cupy.where(bad, cupy.asarray(np.nan, logits.dtype), values)
    return values, cupy.where(bad, -1, indices).astype(np.int32)


def _draw(logits: cupy.ndarray, filters: tuple, seed: Any, offset: Any) -> cupy.ndarray:
    tokens = cupy.empty(len(logits), np.int32)
    if len(logits):
        with logits.device:
            launch = tiles.sample(logits.dtype.name, len(logits), _arch())
            _launch(launch, _sample_params(logits, filters, seed, offset, tokens=tokens))
    return tokens


def _stream(
    logits: cupy.ndarray, filters: tuple, seed: Any = 0, offset: Any = 0, **outputs: Any
) -> None:
    if not len(logits):
        return
    with logits.device:
        launch = tiles.stream(logits.dtype.name, len(logits), _arch())
        _launch(launch, _sample_params(logits, filters, seed, offset, **outputs))


def _filter(
    logits: cupy.ndarray, filters: tuple, seed: Any = 0, offset: Any = 0, **outputs: Any
) -> None:
    if not len(logits):
        return
    with logits.device:
        launch, smem_bytes = tiles.filter_rows(logits.dtype.name, *logits.shape, _arch())
        _launch(launch, _sample_params(logits, filters, seed, offset, **outputs), smem_bytes)


def _sample_params(
    logits: cupy.ndarray,
    filters: tuple,
    seed: Any,
    offset: Any,
    *,
    tokens: cupy.ndarray | None = None,
    filtered: cupy.ndarray | None = None,
    top: tuple | None = None,
    normalise: bool = False,
) -> bytes:
    temperature, top_k, top_p, min_p, typical_p = filters
    values, indices = top or (None, None)
    return _PACK_SAMPLE(
        logits.data.ptr,
        pointer(tokens),
        pointer(filtered),
        pointer(values),
        pointer(indices),
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
        normalise,
    )


def _row_value(value: Any) -> tuple:
    """A RowValue: pointer and value."""
    return (value.data.ptr, 0) if isinstance(value, cupy.ndarray) else (0, value)


def _row_stride(array: cupy.ndarray | None) -> int:
    return 0 if array is None else array.strides[0] // array.itemsize


def _arch() -> str:
    return compiler.device_arch(cupy.cuda.runtime.getDevice())


def _launch(launch: tiles.Launch, params: bytes, smem_bytes: int = 0) -> None:
    """Launch on the current device and stream."""
    kernel = compiler.kernel(launch.variant, cupy.cuda.runtime.getDevice())
    argument = np.frombuffer(params, _argument(len(params)))[0]
    kernel(launch.grid, (launch.variant.config.threads,), (argument,), shared_mem=smem_bytes)


@functools.cache
def _argument(size: int) -> np.dtype:
    """The dtype of a struct passed by value."""
    return np.dtype((np.void, size))
