"""What the samplers are given, once :mod:`cuattn._sampling_spec` has checked it: one form for NumPy
and for the GPU."""

from __future__ import annotations

from typing import Any, NamedTuple


class Filters(NamedTuple):
    """Parameters of the filters: arrays (rows,), or on the GPU numbers that hold for all rows."""

    temperature: Any  # float32; 0 is greedy
    top_k: Any  # int32, from 1 to vocab
    top_p: Any  # float32, as are the rest
    min_p: Any
    typical_p: Any


class Penalties(NamedTuple):
    """Changes to the logits that come before the filters."""

    tokens: Any  # (rows, length) int32, padded with -1
    repetition: Any  # (rows,) float32, or on the GPU a number, as are the next two
    frequency: Any
    presence: Any
    bias: Any  # (rows, vocab) float32, or a tuple of rows, tokens and values, or None
    allowed: Any  # bool (rows, vocab), or 32-bit words of 32 tokens each, or None


class Drafts(NamedTuple):
    """Draft tokens of speculative sampling, and the probabilities that judge them."""

    tokens: Any  # (rows, drafts) int32
    parents: Any  # (rows, drafts) int32, or None for a chain
    draft_probs: Any  # (rows, drafts, vocab) float32
    target_probs: Any  # (rows, drafts + 1, vocab) float32
