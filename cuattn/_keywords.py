"""Keywords of other libraries, which users try first: an error says what they are called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Counterpart(NamedTuple):
    """What stands here for a keyword of another library."""

    library: str
    ours: tuple[str, ...]  # keywords of ours, of which a function has one or more; () for none
    note: str = ""  # how values translate, or what to do where there is no keyword


_LENGTHS_ON_DEVICE = "leave it out: lengths are read on the device"
_ROTATE = "rotate q and k first, with rope; PagedKVCache.write rotates keys that it stores"
_TOP_LEFT = (
    "theirs is aligned to the first key, ours to the last (the same for as many queries as keys); "
    "scaled_dot_product_attention aligns as they do"
)

COUNTERPARTS = {
    # flash-attn
    "softmax_scale": Counterpart("flash-attn", ("scale",)),
    "window_size": Counterpart(
        "flash-attn", ("window",), "a pair (left, right), None and not -1 for no limit on a side"
    ),
    "return_attn_probs": Counterpart("flash-attn", ("return_lse",)),
    "return_softmax_lse": Counterpart("flash-attn", ("return_lse",)),
    "cache_seqlens": Counterpart("flash-attn", ("seq_lens",), "with the new tokens counted"),
    "block_table": Counterpart("flash-attn", ("page_table",)),
    "cache_leftpad": Counterpart("flash-attn", ("left_padding",), "and key_mask in the attention"),
    "cu_seqlens": Counterpart("flash-attn", ("cu_seqlens_q",)),
    "max_seqlen": Counterpart("flash-attn", (), _LENGTHS_ON_DEVICE),
    "max_seqlen_q": Counterpart("flash-attn", (), _LENGTHS_ON_DEVICE),
    "max_seqlen_k": Counterpart("flash-attn", (), _LENGTHS_ON_DEVICE),
    "rotary_cos": Counterpart("flash-attn", (), _ROTATE),
    "rotary_sin": Counterpart("flash-attn", (), _ROTATE),
    "rotary_interleaved": Counterpart("flash-attn", ("interleaved",), _ROTATE),
    "learnable_sink": Counterpart("flash-attn", ("sinks",)),
    # FlashInfer
    "sm_scale": Counterpart("FlashInfer", ("scale",)),
    "window_left": Counterpart(
        "FlashInfer", ("window",), "a pair (left, right), None and not -1 for no limit on a side"
    ),
    "rope_theta": Counterpart("FlashInfer", ("base",)),
    "logits_soft_cap": Counterpart("FlashInfer", ("softcap",), "None for no cap"),
    "custom_mask": Counterpart("FlashInfer", ("mask",), "boolean, True keeps"),
    "pos_encoding_mode": Counterpart("FlashInfer", (), _ROTATE),
    "kv_layout": Counterpart(
        "FlashInfer", (), "leave it out: arrays are (..., seqlen, heads, head_dim), which is NHD"
    ),
    "probs": Counterpart("FlashInfer", ("logits",), "of probabilities, their logarithms"),
    "generator": Counterpart("FlashInfer", ("seed",), "an integer, with offset for each draw"),
    # torch
    "is_causal": Counterpart("torch", ("causal",), _TOP_LEFT),
    "attn_mask": Counterpart(
        "torch",
        ("mask", "bias"),
        "mask where it is boolean (True keeps, as in torch), bias where it is added to the scores",
    ),
    "key_padding_mask": Counterpart(
        "torch", ("key_mask",), "True keeps, where theirs leaves the key out"
    ),
    "dropout_p": Counterpart("torch", ("dropout",)),
    "num_heads": Counterpart("torch", ("heads",)),
    "enable_gqa": Counterpart(
        "torch", (), "leave it out: query heads share key heads wherever k has fewer"
    ),
    "query": Counterpart("torch", ("q",), "with the heads after the length, not before it"),
    "key": Counterpart("torch", ("k", "k_cache", "k_pages"), "with the heads after the length"),
    "value": Counterpart("torch", ("v", "v_cache", "v_pages"), "with the heads after the length"),
    "dim": Counterpart("torch", (), "leave it out: the vocabulary is the last axis"),
    # JAX
    "local_window_size": Counterpart(
        "JAX", ("window",), "a pair (left, right), aligned to the last key and not to the first"
    ),
    "key_value_seq_lengths": Counterpart("JAX", ("seq_lens",)),
    "query_seq_lengths": Counterpart("JAX", ("cu_seqlens_q",), "cumulative, from 0"),
    "return_residual": Counterpart("JAX", ("return_lse",)),
    "implementation": Counterpart("JAX", (), "leave it out: the arrays' device decides"),
    # Others
    "attn_bias": Counterpart("xFormers", ("bias",)),
    "slot_mapping": Counterpart("vLLM", ("slots",)),
    "append_indptr": Counterpart("FlashInfer", ("cu_seqlens",)),
    "block_tables": Counterpart("vLLM", ("page_table",)),
    "s_aux": Counterpart("vLLM", ("sinks",)),
    "repetition_penalty": Counterpart("vLLM", ("repetition",)),
    "frequency_penalty": Counterpart("vLLM", ("frequency",)),
    "presence_penalty": Counterpart("vLLM", ("presence",)),
    "do_sample": Counterpart("transformers", (), "temperature=0 takes the likeliest token"),
}

_functions: list[Callable[..., Any]] = []


def explain_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let a public function that is given a keyword of another library say what to use in its
    place. Calls that are right only pass through."""
    _functions.append(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if (message := _explanation(function, kwargs)) is None:
                raise
            raise TypeError(message) from None

    return call


def _explanation(function: Callable[..., Any], keywords: Iterable[str]) -> str | None:
    """What to say about the first keyword that is another library's."""
    parameters = inspect.signature(function).parameters
    for keyword in keywords:
        if keyword in parameters or keyword not in COUNTERPARTS:
            continue
        library, ours, note = COUNTERPARTS[keyword]
        here = [name for name in ours if name in parameters]
        if here:
            use = f"use {' or '.join(here)}"
        elif elsewhere := _with_parameters(ours):
            use = f"{_listed(elsewhere, 'and')} {'has' if len(elsewhere) == 1 else 'have'} " + (
                _listed(ours, "or")
            )
        else:
            use = ""
        said = ": ".join(part for part in (use, note) if part)
        return f"{_name(function)}: {keyword} is a keyword of {library}; {said}"
    return None


def _with_parameters(names: tuple[str, ...]) -> list[str]:
    """The public functions that have a parameter of one of the names."""
    return [
        _name(function)
        for function in _functions
        if not inspect.signature(function).parameters.keys().isdisjoint(names)
    ]


def _name(function: Callable[..., Any]) -> str:
    prefix = "sampling." if function.__module__ == "cuattn.sampling" else ""
    return prefix + function.__name__


def _listed(names: Iterable[str], word: str) -> str:
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
