"""The kernels that `mla_prefill` launches beside those of decoding: the new tokens' latents from
their pages, and attention over keys that were expanded from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn._arrays import FLOAT_DTYPES
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.arguments_sm90 import rows_map
from cuattn.gpu.dispatch.config_sm90 import configs_of, variant_of
from cuattn.gpu.dispatch.launch import Call, Launch
from cuattn.gpu.dispatch.sm90 import Sm90Forward
from cuattn.gpu.tensormap import addressable


@dataclasses.dataclass(frozen=True)
class TakeConfig(Config):
    """mla/take_tokens.cu."""

    vec_bytes: int

    @property
    def threads(self) -> int:
        """Eight warps, a token each."""
        return 256


def take_variant(vec_bytes: int) -> Variant:
    """The variant of mla/take_tokens.cu that copies so many bytes at a time."""
    return Variant("mla/take_tokens.cu", "mla_take_tokens", TakeConfig(vec_bytes))


def take_variants() -> Iterator[Variant]:
    """Every variant of it: by 16 bytes, or an element at a time."""
    for vec_bytes in (16, *sorted({dtype.itemsize for dtype in FLOAT_DTYPES})):
        yield take_variant(vec_bytes)


#: head_dim and head_dim_v, padded, of prompts whose rotated parts are arrays of their own; what is
#: not rotated has all panels of 64 columns but the last.
PROMPT_DIMS = (192, 128)


def prompt(
    call: Call, rope_dim: int, q_rope: tuple[int, ...], k_rope: tuple[int, ...]
) -> Launch | None:
    """The launch of attention/forward_sm90.cu for a causal prompt of ragged rows whose rotated
    parts are arrays of their own, that of the keys without heads; None where it must have them in
    q and k.

    Parameters
    ----------
    call : Call
        With the widths of both parts together as head_dim, and q and k as what is not rotated.
    rope_dim : int
        Width of what is.
    q_rope, k_rope : tuple of int
        Byte strides of the rotated parts, (row, head, column) and (row, column).
    """
    spec = call.spec
    launch = Sm90Forward().serves(call)
    if launch is None or not addressable((*q_rope[:-1], *k_rope[:-1])):
        return None
    config = dataclasses.replace(launch.variant.config, rope_panel=True)
    variant = variant_of(config)
    nope = spec.head_dim - rope_dim
    if variant not in prompt_variants(call.arch) or not 0 < rope_dim <= 64 or nope > 128:
        return None
    q, k, row = call.strides.q, call.strides.k, k_rope[0]
    lengths = {"q": (spec.seqlen_q, spec.heads_q), "k": (spec.seqlen_k, spec.heads_kv)}
    maps = {
        "q": rows_map(spec, (*lengths["q"], nope), q, 64),
        "q_rope": rows_map(spec, (*lengths["q"], rope_dim), q_rope, 64),
        "k": rows_map(spec, (*lengths["k"], nope), k, config.tile_n),
        "k_rope": rows_map(
            spec, (spec.seqlen_k, 1, rope_dim), (row, row, spec.dtype.itemsize), config.tile_n
        ),
    }
    return dataclasses.replace(launch, variant=variant, tensor_maps={**launch.tensor_maps, **maps})


def prompt_variants(arch: str) -> Iterator[Variant]:
    """Every variant that `prompt` can choose."""
    if arch == "sm_90a":
        for dtype in ("float16", "bfloat16"):
            configs = configs_of(dtype, PROMPT_DIMS, False, False, varlen=True, cached=False)
            for config in configs:
                if (config.bound_left, config.bound_right) == (False, True):
                    yield variant_of(dataclasses.replace(config, rope_panel=True))
