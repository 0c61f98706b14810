"""Which kernel serves a call, in which variant: pure functions, tested without a GPU.

A kernel of attention is a tier: an object that gives the launch for a :class:`Call`, or None for
one that it leaves to other tiers, and that enumerates every variant it can choose, so that
`variants` knows all that may ever be compiled. :func:`choose` is the one way in, whichever public
function was called.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.attention import SimtForward, Sm80Forward
from cuattn.gpu.dispatch.decoding import (
    SimtDecode,
    Sm80Decode,
    Sm90Decode,
    decode_head_lanes,
    merge,
    merge_variants,
)
from cuattn.gpu.dispatch.gradients import (
    JVP,
    BackwardCall,
    BackwardLaunches,
    choose_backward,
    gradient_variants,
)
from cuattn.gpu.dispatch.kvcache import (
    CACHE_UPDATE,
    cache_variants,
    cache_write,
    quantized_cache_write,
)
from cuattn.gpu.dispatch.launch import (
    MAX_DIM,
    SHARED_KIB,
    Call,
    Launch,
    Layout,
    Partial,
    Strides,
    Tier,
    capability,
    usable_strides,
)
from cuattn.gpu.dispatch.mla import mla_variants
from cuattn.gpu.dispatch.positions import position_variants, rope, rope_heads
from cuattn.gpu.dispatch.quantization import (
    dequantize,
    extent,
    quantization_variants,
    quantize,
    row_lanes,
)
from cuattn.gpu.dispatch.routing import cascade_pays, prefers_decoding, queries_for_decoding
from cuattn.gpu.dispatch.sampling import (
    MAX_TOP_K,
    filter_rows,
    penalize,
    penalty_bytes,
    penalty_table,
    sample_filtered,
    sample_unfiltered,
    sampling_variants,
    segment,
    softmax,
    speculate,
)
from cuattn.gpu.dispatch.sm90 import (
    Sm90Forward,
    Sm90ForwardConfig,
    products_of_tiles,
    sm90_section,
)
from cuattn.gpu.dispatch.split_sm90 import Sm90Prefix, Sm90Split

__all__ = [
    "CACHE_UPDATE",
    "JVP",
    "MAX_DIM",
    "MAX_TOP_K",
    "SHARED_KIB",
    "TIERS",
    "BackwardCall",
    "BackwardLaunches",
    "Call",
    "Launch",
    "Layout",
    "Partial",
    "Sm90ForwardConfig",
    "Strides",
    "Tier",
    "cache_write",
    "capability",
    "cascade_pays",
    "choose",
    "choose_backward",
    "current_tiers",
    "decode_head_lanes",
    "dequantize",
    "extent",
    "filter_rows",
    "gradient_variants",
    "merge",
    "mla_variants",
    "penalize",
    "penalty_bytes",
    "penalty_table",
    "prefers_decoding",
    "products_of_tiles",
    "quantize",
    "quantized_cache_write",
    "rope",
    "rope_heads",
    "row_lanes",
    "sample_filtered",
    "sample_unfiltered",
    "sampling_variants",
    "segment",
    "sm90_section",
    "softmax",
    "speculate",
    "usable_strides",
    "use_tiers",
    "variants",
]

#: The kernels of attention, among those that decode and among those that do not the fastest first.
TIERS: tuple[Tier, ...] = (
    Sm90Prefix(),
    Sm90Decode(),
    Sm80Decode(),
    SimtDecode(),
    Sm90Split(),
    Sm90Forward(),
    Sm80Forward(),
    SimtForward(),
)

_tiers = contextvars.ContextVar("tiers", default=TIERS)
#: The tiers that calls go to in this context: all of them, but within `use_tiers`.
current_tiers = _tiers.get


@contextlib.contextmanager
def use_tiers(*names: str) -> Iterator[None]:
    """A context whose calls are served by the named tiers alone, as tests and benchmarks reach each
    kernel.

    Raises
    ------
    ValueError
        A name is not that of a tier.
    LookupError
        From a call that none of them serves.
    """
    known = [tier.name for tier in TIERS]
    if not set(names) <= set(known):
        raise ValueError(f"use_tiers: names are {names}, must be among {', '.join(known)}")
    token = _tiers.set(tuple(tier for tier in TIERS if tier.name in names))
    try:
        yield
    finally:
        _tiers.reset(token)


def choose(call: Call, tiers: tuple[Tier, ...] = TIERS) -> Launch:
    """Choose the kernel of an attention call: of the tiers that decode or of those that do not,
    whichever are faster for it, the first that serves it, else of the others. A batch of some
    sequences for the one and some for the other has a launch of each.

    Raises
    ------
    LookupError
        None does, which all of them together never leave.
    """
    if most := queries_for_decoding(call):
        few = dataclasses.replace(call, max_queries=most)
        many = dataclasses.replace(call, min_queries=most + 1)
        decoding, forward = (
            next(filter(None, (tier.serves(part) for tier in tiers if tier.name == name)), None)
            for part, name in ((few, "decode_sm80"), (many, "forward_sm90"))
        )
        if decoding is not None and forward is not None:
            beside = forward.with_scores(call.score_mod)
            return dataclasses.replace(decoding.with_scores(call.score_mod), beside=beside)
    decoding = prefers_decoding(call)
    for tier in sorted(tiers, key=lambda tier: tier.decodes is not decoding):
        if call.spec.quantized and not tier.reads_codes:
            continue
        launch = tier.serves(call)
        if launch is not None:
            return launch.with_scores(call.score_mod)
    names = ", ".join(tier.name for tier in tiers)
    raise LookupError(f"none of the tiers {names} serves {call.spec} on {call.arch}")


def variants(arch: str) -> Iterator[Variant]:
    """Every variant that can be chosen on an architecture such as ``sm_90a``."""
    for tier in TIERS:
        yield from tier.variants(arch)
    yield from gradient_variants(arch)
    yield from mla_variants(arch)
    yield from merge_variants()
    yield from cache_variants()
    yield from position_variants()
    yield from quantization_variants()
    yield from sampling_variants(arch)
