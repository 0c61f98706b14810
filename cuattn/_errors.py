"""Errors that say more than Python's own: what a misspelt keyword, or another library's, is called
here, and which argument is too large for a GPU's kernels."""

from __future__ import annotations

import difflib
import functools
import inspect
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

LONGEST_AXIS = (1 << 31) - 1  # kernels count in int
LARGEST_NUMBER = (2 - 2**-23) * 2.0**127  # a finite float32

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
    "k": Counterpart("flash-attn", ("k_cache", "k_pages"), "append_kv writes new tokens first"),
    "v": Counterpart("flash-attn", ("v_cache", "v_pages"), "append_kv writes new tokens first"),
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
    "num_blocks": Counterpart("vLLM", ("num_pages",)),
    "block_size": Counterpart("vLLM", ("page_size",)),
    "head_size": Counterpart("vLLM", ("head_dim",)),
    "append_indptr": Counterpart("FlashInfer", ("cu_seqlens",)),
    "block_tables": Counterpart("vLLM", ("page_table",)),
    "s_aux": Counterpart("vLLM", ("sinks",)),
    "repetition_penalty": Counterpart("vLLM", ("repetition",)),
    "frequency_penalty": Counterpart("vLLM", ("frequency",)),
    "presence_penalty": Counterpart("vLLM", ("presence",)),
    "theta": Counterpart("Llama's code", ("base",)),
    "do_sample": Counterpart("transformers", (), "temperature=0 takes the likeliest token"),
}

#: What to say where an argument is missing whose value is not plain from its name.
MISSING = {
    "scale": "that of the heads before absorption, such as 1 / sqrt(192) for DeepSeek-V3",
}

_functions: list[Callable[..., Any]] = []


def explain_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Let a public function say what to use in place of a keyword that it does not have, which
    argument is missing, and which does not fit into the arguments of a kernel. Calls that are right
    only pass through."""
    _functions.append(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if (message := _explanation(function, args, kwargs)) is None:
                raise
            raise TypeError(message) from None
        except struct.error as error:  # of a kernel's arguments
            raise ValueError(_too_long(function, args, kwargs)) from error
        except OverflowError as error:
            if (message := _too_large(function, args, kwargs)) is None:
                raise
            raise ValueError(message) from error

    return call


def _too_long(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """What to say where a length, or a product of lengths, does not fit into 32 bits."""
    shapes = dict(_shapes(inspect.signature(function).bind(*args, **kwargs).arguments))
    for name, shape in shapes.items():
        if max(shape, default=0) > LONGEST_AXIS:
            return (
                f"{_name(function)}: {name} has shape {shape}, of which no axis may be longer than "
                f"{LONGEST_AXIS} on a GPU"
            )
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return (
        f"{_name(function)}: arrays of these shapes have more rows, tokens or pages than the "
        f"{LONGEST_AXIS} that a GPU's kernels count to: {listed}"
    )


def _too_large(function: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """What to say about the first number that does not fit into float32."""
    for name, value in inspect.signature(function).bind(*args, **kwargs).arguments.items():
        if isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
            return f"{_name(function)}: {name} is {value}, must fit into float32 on a GPU"
    return None


def _shapes(arguments: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of a call's arrays, and of those in lists, by name."""
    for name, value in arguments.items():
        if isinstance(value, list | tuple):
            yield from _shapes({f"{name}[{i}]": item for i, item in enumerate(value)})
        elif isinstance(value, dict):
            yield from _shapes(value)
        elif isinstance(shape := getattr(value, "shape", None), tuple):
            yield name, tuple(map(int, shape))


def _explanation(function: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """What to say about a call that does not fit the function's parameters; None where it does."""
    parameters = dict(inspect.signature(function).parameters)
    if parameters.pop("self", None):
        args = args[1:]
    others = [name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD]
    for name in others:
        del parameters[name]
    for keyword in kwargs:
        if keyword not in parameters and not others:
            return unknown_keyword(_name(function), keyword, parameters)
    by_position = [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY]
    if len(args) > len(by_position):
        by_name = ", ".join(name for name in parameters if name not in by_position)
        return (
            f"{_name(function)}: {len(args)} arguments are given by position, may be "
            f"{', '.join(by_position) or 'none'}" + (f"; by name: {by_name}" if by_name else "")
        )
    given = {*by_position[: len(args)], *kwargs}
    for name, one in parameters.items():
        if one.default is one.empty and name not in given:
            hint = f": {MISSING[name]}" if name in MISSING else ""
            return f"{_name(function)}: {name} must be given{hint}"
    return None


def unknown_keyword(function: str, keyword: str, names: Iterable[str]) -> str:
    """What to say about a keyword that is none of a function's `names`."""
    names = list(names)
    if keyword not in COUNTERPARTS:
        close = difflib.get_close_matches(keyword, names, n=1, cutoff=0.55)
        use = f"did you mean {close[0]}?" if close else f"they are {', '.join(names)}"
        return f"{function}: {keyword} is not one of its keywords; {use}"
    library, ours, note = COUNTERPARTS[keyword]
    here = [name for name in ours if name in names]
    if here:
        use = f"use {' or '.join(here)}"
    elif elsewhere := _with_parameters(ours):
        has = "has" if len(elsewhere) == 1 else "have"
        use = f"{_listed(elsewhere, 'and')} {has} {_listed(ours, 'or')}"
    else:
        use = ""
    said = ": ".join(part for part in (use, note) if part)
    return f"{function}: {keyword} is a keyword of {library}; {said}"


def _with_parameters(names: tuple[str, ...]) -> list[str]:
    """The public functions that have a parameter of one of the names."""
    return [
        _name(function)
        for function in _functions
        if not inspect.signature(function).parameters.keys().isdisjoint(names)
    ]


def _name(function: Callable[..., Any]) -> str:
    prefix = "sampling." if function.__module__ == "cuattn.sampling" else ""
    return prefix + function.__qualname__.removesuffix(".__init__")


def _listed(names: Iterable[str], word: str) -> str:
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
