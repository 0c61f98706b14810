"""Samplers on a GPU: choose a kernel, pack its arguments, launch it.

Arguments and results are those of :mod:`cuattn.reference.sampling`, save that a parameter that is
the same for all rows is a Python number, which travels as a kernel argument. Nothing is read back.
Arrays are on the current device: the public functions see to that.
"""

from __future__ import annotations

import dataclasses
import functools
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
from cuattn.gpu.plan import Plan, as_kernel_argument
from cuattn.gpu.structs import Arguments

_NO_PENALTIES = Arguments(PENALTY_PARAMS, bytes(PENALTY_PARAMS.size), ())

#: Logits that a long top-k sorts at a time, so that its temporaries, some 40 bytes a logit, do not
#: grow with the batch.
_SORTED_AT_ONCE = 1 << 24
_KINDS = ("float32", "float16", "bfloat16")  # as SampleParams counts them
_NO_FILTERS = Filters(1.0, 1 << 30, 1.0, 0.0, 1.0)
_GREEDY = _NO_FILTERS._replace(temperature=0.0)


def greedy(logits: cupy.ndarray) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.greedy`."""
    return _sample_unfiltered(logits, _GREEDY, 0, 0, None)


def softmax(logits: cupy.ndarray, temperature: Any) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.softmax`."""
    out = cupy.empty(logits.shape, np.float32)
    _softmax(logits, temperature, probabilities=out)
    return out


def filter_logits(logits: cupy.ndarray, filters: Filters) -> cupy.ndarray:
    """As :func:`cuattn.reference.sampling.filter_logits`."""
    out = cupy.empty(logits.shape, np.float32)
    rows, vocab = logits.shape
    k = filters.top_k
    if (
        isinstance(k, int)
        and k <= min(dispatch.MAX_TOP_K, vocab)
        and _is_number(filters.typical_p, 1)
    ):
        top = scratch_array((rows, k), logits.dtype), scratch_array((rows, k), np.dtype(np.int32))
        _top_k(logits, *top)
        _launch_sampler("filter_topk", logits, filters, filtered=out, top=top)
    else:
        _launch_sampler("filter", logits, filters, filtered=out)
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
    vocab = logits.shape[1]
    all_tokens = isinstance(top_k, int) and top_k >= vocab
    if all_tokens and _is_number(top_p, 1) and _is_number(min_p, 0) and _is_number(typical_p, 1):
        return _sample_unfiltered(logits, filters, seed, offset, penalties)
    short = isinstance(top_k, int) and top_k <= dispatch.MAX_TOP_K
    table = None
    if penalties is not None:
        if short and _is_number(typical_p, 1):
            table = _penalty_table(logits, penalties)
        if table is None:
            with temporaries():
                logits = apply_penalties(logits, penalties)
    # Typical-p and a long top-k need several passes, unless they are all that ranks the tokens.
    # Whether values on the device ask for them, sample_filtered.cu finds out, and leaves such rows
    # to filter.cu. It also serves rows of very many tokens.
    long = isinstance(top_k, int) and dispatch.MAX_TOP_K < top_k < vocab
    typical = isinstance(typical_p, float) and typical_p < 1
    known = isinstance(top_k, int) and isinstance(typical_p, float)
    several = long or typical or (vocab > dispatch.MAX_NUCLEUS and not short)
    tokens = cupy.empty(len(logits), np.int32)
    alone = _is_number(top_p, 1) and long != typical and vocab <= dispatch.MAX_NUCLEUS
    if alone and (_is_number(typical_p, 1) or (all_tokens and _is_number(min_p, 0))):
        _launch_sampler("ranked", logits, filters, seed, offset, tokens=tokens)
        return tokens
    if not several:
        _launch_sampler("filtered", logits, filters, seed, offset, tokens=tokens, table=table)
    if several or not known:
        _launch_sampler(
            "filter", logits, filters, seed, offset, tokens=tokens, only_fallback=not several
        )
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
        lengths = _penalty_lengths(penalties)
        vocab = logits.shape[1]
        launch, segment = dispatch.penalize(FLOAT_DTYPES[logits.dtype], *logits.shape, *lengths)
        params = PENALIZE_PARAMS.pack(
            logits.data.ptr, out.data.ptr, 0, _row_stride(logits), vocab, segment, 0
        )
        nbytes = dispatch.penalty_bytes(min(vocab, segment), *lengths)
        _launch(launch, nbytes, params, _penalty_params(penalties))
    return out


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
        _launch(dispatch.speculate(rows, _arch()), 0, params)
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
    _softmax(logits, 1.0, tokens=wanted, log_probabilities=found)
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


def _sample_unfiltered(
    logits: cupy.ndarray, filters: Filters, seed: Any, offset: Any, penalties: Penalties | None
) -> cupy.ndarray:
    """A draw by temperature alone, or temperature 0, by sample_unfiltered.cu."""
    tokens = cupy.empty(len(logits), np.int32)
    if penalties is None:
        _launch_sampler("unfiltered", logits, filters, seed, offset, tokens=tokens)
    elif len(logits):
        launch = dispatch.sample_unfiltered(
            FLOAT_DTYPES[logits.dtype], len(logits), _arch(), penalized=True
        )
        segment = dispatch.segment(logits.shape[1], launch.variant.config.cluster)
        nbytes = dispatch.penalty_bytes(segment, *_penalty_lengths(penalties))
        if nbytes > launch.variant.config.smem_bytes:  # very many earlier tokens
            with temporaries():
                logits = apply_penalties(logits, penalties)
            return _sample_unfiltered(logits, filters, seed, offset, None)
        addresses, constants = _sampler_inputs(logits, filters, seed, offset, tokens=tokens)
        params = _sample_arguments(*constants).pack(addresses)
        _launch(launch, nbytes, params, _penalty_params(penalties))
    return tokens


def _top_k(logits: cupy.ndarray, values: cupy.ndarray, indices: cupy.ndarray) -> None:
    k = indices.shape[1]
    if k <= dispatch.MAX_TOP_K:
        return _launch_sampler("filtered", logits, _NO_FILTERS, top=(values, indices))
    step = max(1, _SORTED_AT_ONCE // logits.shape[1])
    with temporaries():
        for begin in range(0, len(logits), step):
            rows = slice(begin, begin + step)
            _sort_rows(logits[rows], values[rows], indices[rows])


def _sort_rows(logits: cupy.ndarray, values: cupy.ndarray, indices: cupy.ndarray) -> None:
    """Write the first of each row's sorted logits, as many as there is room for, and where they
    are."""
    wide = logits.astype(np.float32)
    order = cupy.argsort(-wide, axis=1, kind="stable")[:, : indices.shape[1]]
    bad = ~(wide < np.inf).all(axis=1, keepdims=True)
    largest = cupy.take_along_axis(wide, order, axis=1)
    values[...] = cupy.where(bad, cupy.float32(np.nan), largest)
    indices[...] = cupy.where(bad, -1, order)


def _softmax(
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
    _launch(launch, 0, params)


def _penalty_table(logits: cupy.ndarray, penalties: Penalties) -> cupy.ndarray | None:
    """A hash table of the penalized logits of each row; None where a penalized copy of all logits
    is the better way."""
    if isinstance(penalties.bias, cupy.ndarray) or penalties.allowed is not None:
        return None
    choice = dispatch.penalty_table(
        FLOAT_DTYPES[logits.dtype], *logits.shape, *_penalty_lengths(penalties)
    )
    if choice is None or not logits.size:
        return None
    launch, bits, nbytes = choice
    table = scratch_array((len(logits), 1 << bits, 2), np.dtype(np.int32))
    params = PENALIZE_PARAMS.pack(
        logits.data.ptr, 0, table.data.ptr, _row_stride(logits), logits.shape[1], 0, bits
    )
    _launch(launch, nbytes, params, _penalty_params(penalties))
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


def _penalty_lengths(penalties: Penalties) -> tuple[int, int]:
    """How many earlier tokens a row has, and how many triples there are."""
    bias = penalties.bias
    return penalties.tokens.shape[1], len(bias[0]) if isinstance(bias, tuple) else 0


def _launch_sampler(kernel: str, logits: cupy.ndarray, *given: Any, **arrays: Any) -> None:
    """Launch a kernel that takes a SampleParams, if there are rows: "unfiltered", "filtered",
    "ranked", "filter" or "filter_topk" for sampling/sample_unfiltered.cu, sample_filtered.cu in its
    two variants, filter.cu, and filter_topk.cu."""
    if len(logits):
        addresses, constants = _sampler_inputs(logits, *given, **arrays)
        device = cupy.cuda.runtime.getDevice()
        _sampler_plan(kernel, device, len(logits), *constants).launch(addresses)


def _sampler_inputs(
    logits: cupy.ndarray,
    filters: Filters,
    seed: Any = 0,
    offset: Any = 0,
    *,
    tokens: cupy.ndarray | None = None,
    filtered: cupy.ndarray | None = None,
    top: tuple | None = None,
    table: cupy.ndarray | None = None,
    only_fallback: bool = False,
) -> tuple[dict[str, int], tuple]:
    """What each launch fills into a SampleParams, and the arguments of `_sample_arguments`."""
    values, indices = top or (None, None)
    addresses = {
        "logits": logits.data.ptr,
        "tokens": pointer(tokens),
        "filtered": pointer(filtered),
        "top_values": pointer(values),
        "top_indices": pointer(indices),
        "penalty_table": pointer(table),
    }
    addresses["seed"], addresses["seed_value"] = _row_value(seed)
    addresses["offset"], addresses["offset_value"] = _row_value(offset)
    scalars = []
    for name, value in filters._asdict().items():
        addresses[name], scalar = _row_value(value)
        scalars.append(scalar)
    return addresses, (
        logits.dtype,
        logits.shape[1],
        _row_stride(logits),
        tuple(scalars),
        0 if indices is None else indices.shape[1],
        only_fallback,
        0 if table is None else (table.shape[1] - 1).bit_length(),
    )


def _sample_arguments(
    dtype: np.dtype,
    vocab: int,
    row_stride: int,
    filters: tuple,
    top_count: int,
    only_fallback: bool,
    table_bits: int,
) -> Arguments:
    """Pack what stays the same between launches for calls alike; `filters` are the numbers that
    hold for all rows, in the order of `Filters`."""
    temperature, top_k, top_p, min_p, typical_p = ((None, number) for number in filters)
    return SAMPLE_PARAMS.arguments(
        row_stride=row_stride,
        seed=(None, None),
        offset=(None, None),
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        top_k=top_k,
        vocab=vocab,
        top_count=top_count,
        only_fallback=only_fallback,
        kind=_KINDS.index(FLOAT_DTYPES[dtype]),
        table_bits=table_bits,
    )


@functools.lru_cache(maxsize=4096)
def _sampler_plan(
    kernel: str, device: int, rows: int, dtype: np.dtype, vocab: int, *constants: Any
) -> Plan:
    """Choose and compile the kernel of a draw or of filters on a device, which must be the current
    one."""
    arch = compiler.device_arch(device)
    arguments: tuple[Arguments, ...] = (_sample_arguments(dtype, vocab, *constants),)
    smem_bytes = None
    if kernel == "filter":
        launch, smem_bytes = dispatch.filter_rows(rows, vocab, arch)
    elif kernel == "filter_topk":
        launch = dispatch.filter_topk(FLOAT_DTYPES[dtype], rows, vocab)
    elif kernel in ("filtered", "ranked"):
        ranked = kernel == "ranked"
        launch = dispatch.sample_filtered(FLOAT_DTYPES[dtype], rows, arch, ranked=ranked)
    else:
        launch = dispatch.sample_unfiltered(FLOAT_DTYPES[dtype], rows, arch)
        smem_bytes, arguments = 0, (*arguments, _NO_PENALTIES)
    return Plan(dataclasses.replace(launch, arguments=arguments), device, smem_bytes)


def _is_number(value: Any, number: float) -> bool:
    """Whether a parameter is known to be `number` in all rows: arrays are never read back."""
    return isinstance(value, float) and value == number


def _row_value(value: Any) -> tuple:
    """A RowValue or RowSeeds: pointer and value."""
    return (value.data.ptr, 0) if isinstance(value, cupy.ndarray) else (0, value)


def _row_stride(array: cupy.ndarray | None) -> int:
    return 0 if array is None else array.strides[0] // array.itemsize


def _arch() -> str:
    return compiler.device_arch(cupy.cuda.runtime.getDevice())


def _launch(launch: dispatch.Launch, smem_bytes: int, *structs: bytes) -> None:
    """Launch on the current device and stream; structs are passed by value."""
    kernel = compiler.kernel(launch.variant, cupy.cuda.runtime.getDevice())
    arguments = [as_kernel_argument(packed) for packed in structs]
    kernel(launch.grid, (launch.variant.config.threads,), arguments, shared_mem=smem_bytes)
