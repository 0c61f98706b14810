"""Which kernel serves a call, in which variant: pure functions, tested without a GPU.

A kernel of attention is a tier: an object that gives the launch for a :class:`Call`, or None for
one that it leaves to other tiers, and that enumerates every variant it can choose, so that
`variants` knows all that may ever be compiled. :func:`choose` is the one way in, whichever public
function was called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.attention import SimtForward, Sm80Forward
from cuattn.gpu.dispatch.codes_sm90 import (
    Sm90CodesForward,
    addressable_codes,
    rotates_in_kernel,
    serves_codes,
)
from cuattn.gpu.dispatch.config_sm90 import Sm90ForwardConfig
from cuattn.gpu.dispatch.decoding import (
    SimtDecode,
    decode_head_lanes,
    merge,
    merge_of_cut_keys,
    merge_variants,
)
from cuattn.gpu.dispatch.decoding_codes_sm90 import Sm90CodesDecode
from cuattn.gpu.dispatch.decoding_sm80 import Sm80Decode
from cuattn.gpu.dispatch.decoding_sm90 import Sm90Decode
from cuattn.gpu.dispatch.gradients import (
    BACKWARD,
    BackwardCall,
    BackwardLaunches,
    choose_backward,
)
from cuattn.gpu.dispatch.jvp import JVP, JvpCall, choose_jvp
from cuattn.gpu.dispatch.kvcache import (
    cache_update,
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
from cuattn.gpu.dispatch.mla import MLA
from cuattn.gpu.dispatch.mla_prefill import prompt, prompt_variants, take_variants
from cuattn.gpu.dispatch.order_sm90 import products_of_tiles, sm90_section
from cuattn.gpu.dispatch.positions import position_variants, rope, rope_heads
from cuattn.gpu.dispatch.quantization import (
    dequantize,
    extent,
    quantization_variants,
    quantize,
    rotate,
    rotates_queries,
    row_lanes,
    sequences_to_expand,
)
from cuattn.gpu.dispatch.routing import (
    cascade_pays,
    multiprocessors_for_decoding,
    prefers_decoding,
    queries_for_decoding,
)
from cuattn.gpu.dispatch.sampling import (
    MAX_NUCLEUS,
    MAX_TOP_K,
    filter_rows,
    filter_topk,
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
from cuattn.gpu.dispatch.sm90 import Sm90Forward
from cuattn.gpu.dispatch.split_sm90 import Sm90Prefix, Sm90Split
from cuattn.gpu.dispatch.tiers import TierList, nobody_serves, restricted

__all__ = [
    "ATTENTION",
    "BACKWARD",
    "JVP",
    "MAX_DIM",
    "MAX_NUCLEUS",
    "MAX_TOP_K",
    "MLA",
    "SHARED_KIB",
    "TIERS",
    "BackwardCall",
    "BackwardLaunches",
    "Call",
    "JvpCall",
    "Launch",
    "Layout",
    "Partial",
    "Sm90CodesForward",
    "Sm90ForwardConfig",
    "Strides",
    "Tier",
    "addressable_codes",
    "cache_update",
    "cache_write",
    "capability",
    "cascade_pays",
    "choose",
    "choose_backward",
    "choose_jvp",
    "current_tiers",
    "decode_head_lanes",
    "dequantize",
    "extent",
    "filter_rows",
    "filter_topk",
    "merge",
    "merge_of_cut_keys",
    "penalize",
    "penalty_bytes",
    "penalty_table",
    "prefers_decoding",
    "products_of_tiles",
    "prompt",
    "quantize",
    "quantized_cache_write",
    "rope",
    "rope_heads",
    "rotate",
    "rotates_in_kernel",
    "rotates_queries",
    "row_lanes",
    "sample_filtered",
    "sample_unfiltered",
    "sampling_variants",
    "segment",
    "sequences_to_expand",
    "serves_codes",
    "sm90_section",
    "softmax",
    "speculate",
    "usable_strides",
    "use_tiers",
    "variants",
]

#: The kernels of attention, among those that decode and among those that do not the fastest first.
ATTENTION: TierList[Tier] = TierList(
    Sm90Prefix(),
    Sm90Decode(),
    Sm90CodesDecode(),
    Sm80Decode(),
    SimtDecode(),
    Sm90Split(),
    Sm90CodesForward(),
    Sm90Forward(),
    Sm80Forward(),
    SimtForward(),
)
TIERS = ATTENTION.all
current_tiers = ATTENTION.current


def use_tiers(*names: str) -> contextlib.AbstractContextManager[None]:
    """A context whose calls are served by the named tiers alone, as tests and benchmarks reach each
    kernel: of attention, of its backward pass, of its derivative in a direction and of latent
    attention. Calls of a kind of which no tier is named go to all of theirs.

    Raises
    ------
    ValueError
        A name is not that of a tier.
    LookupError
        From a call that none of them serves.
    """
    return restricted((ATTENTION, BACKWARD, JVP, MLA), names)


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
        multiprocessors, waits = multiprocessors_for_decoding(call, most)
        few = dataclasses.replace(call, max_queries=most, multiprocessors=multiprocessors)
        decoding = _first(tiers, "decode_sm80", few)
        if decoding is not None:
            blocks = math.prod(decoding.grid) if waits else 0
            many = dataclasses.replace(call, min_queries=most + 1, blocks_beside=blocks)
            forward = _first(tiers, "forward_sm90", many)
            if forward is not None:
                beside = forward.with_scores(call.score_mod)
                return dataclasses.replace(decoding.with_scores(call.score_mod), beside=beside)
    if call.spec.quantized:
        launch = _first(tiers, Sm90CodesForward.name, call)
        if launch is not None:
            return launch
    decodes = prefers_decoding(call)
    for tier in sorted(tiers, key=lambda tier: tier.decodes is not decodes):
        if call.spec.quantized and not tier.reads_codes:
            continue
        launch = tier.serves(call)
        if launch is not None:
            return launch.with_scores(call.score_mod)
    raise nobody_serves(tiers, call.spec, call.arch)


def _first(tiers: tuple[Tier, ...], name: str, call: Call) -> Launch | None:
    """The launch that the tier of a name, if it is among `tiers`, gives for a call."""
    return next(filter(None, (tier.serves(call) for tier in tiers if tier.name == name)), None)


def variants(arch: str) -> Iterator[Variant]:
    """Every variant that can be chosen on an architecture such as ``sm_90a``."""
    for tiers in (ATTENTION, BACKWARD, JVP, MLA):
        yield from tiers.variants(arch)
    yield from prompt_variants(arch)
    yield from take_variants()
    yield from merge_variants()
    yield from cache_variants()
    yield from position_variants()
    yield from quantization_variants()
    yield from sampling_variants(arch)
