"""Types of the public functions' arguments, as type checkers and editors show them.

A call on NumPy arrays gives NumPy arrays, and a type checker knows it. What other arrays give, a
CuPy or a NumPy array, is known only when the call runs: there, results are Any. CuPy itself has no
type information, so a checker takes its arrays everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, TypeVar, Union

import numpy as np


class SupportsDLPack(Protocol):
    """An array of any library that exports DLPack, such as torch's and JAX's."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    """An array on a GPU of any library, such as Numba's."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


#: What the functions take as an array.
Array = Union["np.ndarray[Any, Any]", SupportsDLPack, SupportsCudaArrayInterface]
#: A NumPy array whose shape's and elements' types a result has as well.
NumPyArray = TypeVar("NumPyArray", bound="np.ndarray[Any, Any]")
#: A number, or one for each row of a batch.
Numbers = Union[float, "np.number[Any]", Sequence[float], Array]
Integers = Union[int, "np.integer[Any]", Sequence[int], Array]
Window = tuple[int | None, int | None]


class AttentionOptions(TypedDict, total=False):
    """Keywords of :func:`cuattn.flash_attention` and :func:`cuattn.flash_attention_varlen`, beside
    return_lse."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    bias: Array | None
    mask: Array | None
    key_mask: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    dropout: float
    seed: int
    out: Array | None


class MultiHeadOptions(AttentionOptions, total=False):
    """Keywords of :func:`cuattn.multi_head_attention`, beside heads and return_lse."""

    kv_heads: int | None
    context: Array | None
    rope: Mapping[str, Any] | None
    bq: Array | None
    bk: Array | None
    bv: Array | None
    bo: Array | None


class DecodeOptions(TypedDict, total=False):
    """Keywords of :func:`cuattn.flash_decode`, beside return_lse."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    bias: Array | None
    mask: Array | None
    key_mask: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    num_splits: int | str | None
    out: Array | None


class PagedOptions(DecodeOptions, total=False):
    """Keywords of :func:`cuattn.paged_attention`, beside return_lse."""

    cu_seqlens_q: Array | None
    prefix: int | tuple[Any, Any] | None  # arrays, or QuantizedArrays


class LatentOptions(TypedDict, total=False):
    """Keywords of :func:`cuattn.mla_decode`, beside scale and return_lse."""

    cu_seqlens_q: Array | None
    indices: Array | None
    causal: bool
    window: Window | None
    sinks: Array | None
    num_splits: int | str | None
    out: Array | None


class FilterOptions(TypedDict, total=False):
    """Keywords of :func:`cuattn.sampling.filter_logits`."""

    temperature: Numbers
    top_k: Integers | None
    top_p: Numbers | None
    min_p: Numbers | None
    typical_p: Numbers | None


class PenaltyOptions(TypedDict, total=False):
    """Keywords of :func:`cuattn.sampling.apply_penalties`, beside out."""

    repetition: Numbers
    frequency: Numbers
    presence: Numbers
    logit_bias: Array | tuple[Array, Array, Array] | None
    allowed: Array | None


class SampleOptions(FilterOptions, PenaltyOptions, total=False):
    """Keywords of :func:`cuattn.sampling.sample`."""

    seed: Integers | None
    offset: Integers
    tokens: Array | None


class _RopeType(TypedDict):
    rope_type: str


class RopeScaling(_RopeType, total=False):
    """`scaling` of :func:`cuattn.rope`, named as in a model's ``config.json``."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
