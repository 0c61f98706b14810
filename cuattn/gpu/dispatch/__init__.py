"""Which kernel serves a call, in which variant: pure functions, tested without a GPU.

Each kernel has a Config, a function that chooses one for a call, and a function that enumerates
every Config the choice can give, so that `variants` knows all that may ever be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

from cuattn.gpu.compiler import Variant
from cuattn.gpu.dispatch.attention import (
    Sm90ForwardConfig,
    forward,
    forward_variants,
    products_of_tiles,
    sm90_section,
)
from cuattn.gpu.dispatch.decoding import (
    CACHE_UPDATE,
    Sm90DecodeConfig,
    cache_write,
    cascade_pays,
    decode,
    decode_head_lanes,
    decode_one_item,
    decode_slots,
    decode_variants,
    merge,
    prefix,
)
from cuattn.gpu.dispatch.launch import SHARED_KIB, Launch, capability
from cuattn.gpu.dispatch.sampling import (
    MAX_RANKED,
    amend,
    filter_rows,
    penalize,
    penalty_bytes,
    sample,
    sampling_variants,
    segment,
    softmax,
    speculate,
    stream,
)

__all__ = [
    "CACHE_UPDATE",
    "MAX_RANKED",
    "SHARED_KIB",
    "Launch",
    "Sm90DecodeConfig",
    "Sm90ForwardConfig",
    "amend",
    "cache_write",
    "capability",
    "cascade_pays",
    "decode",
    "decode_head_lanes",
    "decode_one_item",
    "decode_slots",
    "decode_variants",
    "filter_rows",
    "forward",
    "forward_variants",
    "merge",
    "penalize",
    "penalty_bytes",
    "prefix",
    "products_of_tiles",
    "sample",
    "sampling_variants",
    "segment",
    "sm90_section",
    "softmax",
    "speculate",
    "stream",
    "variants",
]


def variants(arch: str) -> Iterator[Variant]:
    """Every variant that can be chosen on an architecture such as ``sm_90a``."""
    yield from forward_variants(arch)
    yield from decode_variants(arch)
    yield from sampling_variants(arch)
