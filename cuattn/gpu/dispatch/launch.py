"""What a choice of kernel is made from, a :class:`Call`, and what it gives, a :class:`Launch`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from cuattn._quantized import code_columns
from cuattn._spec import AttentionSpec
from cuattn.gpu.arguments import Scales
from cuattn.gpu.compiler import CONTRACT_SCORES, Variant
from cuattn.gpu.params import UNBOUNDED
from cuattn.gpu.structs import Arguments
from cuattn.gpu.tensormap import TensorMap, addressable

#: Shared memory of a multiprocessor in KiB, by compute capability; others have at least 100. A
#: block can have 1 less.
SHARED_KIB = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228}
#: The largest head_dim of kernels with tensor cores, and of what a block of forward_simt.cu keeps
#: of values.
MAX_DIM = 256
#: The smallest scale of kernels that keep scores in other units than their own: their factors, and
#: one over them, have to be floats that are not flushed to 0.
LEAST_SCALE = 2.0**-100
#: The most blocks along a grid's second axis, and along its third.
MOST_OF_GRID = 65535


def capability(arch: str) -> int:
    """``sm_90a`` -> 90."""
    return int(arch.removeprefix("sm_").rstrip("af"))


class Layout(NamedTuple):
    """How an array lies in memory; strides are in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


class Strides(NamedTuple):
    """Byte strides of the arrays of a call."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]


class Partial(NamedTuple):
    """What a launch computes where it is one of several, whose results are then merged.

    `out` and `lse` are of the accumulators' dtype, and keys before `first_key` are left out.
    """

    first_key: int
    lse_strides: tuple[int, int]  # of lse's batch and heads, in elements


def shapes(spec: AttentionSpec, num_pages: int = 0) -> tuple[tuple[int, ...], ...]:
    """The shapes of q, k, v and out."""
    q = (spec.seqlen_q, spec.heads_q, spec.head_dim)
    if spec.rows == "batched":
        q = (spec.batch, *q)
    lengths: tuple[int, ...] = (spec.batch, spec.seqlen_k)
    if spec.keys == "ragged":
        lengths = (spec.seqlen_k,)
    elif spec.keys == "paged":
        lengths = (num_pages, spec.page_size)
    k, v = ((*lengths, spec.heads_kv, dim) for dim in (spec.head_dim, spec.head_dim_v))
    return q, k, v, spec.out_shape


def usable_strides(spec: AttentionSpec, strides: Strides, num_pages: int = 0) -> Strides:
    """The strides of a call's arrays, in which those of axes of length 1, which may be anything,
    are such as any kernel can use."""
    used = []
    for array, shape in zip(strides, shapes(spec, num_pages), strict=True):
        span = 16 * max([1, *(abs(n) // 16 for n in array)])
        axes = zip(shape[:-1], array[:-1], strict=True)
        used.append((*(span if n == 1 else stride for n, stride in axes), array[-1]))
    return Strides(*used)


def contiguous_strides(spec: AttentionSpec, num_pages: int = 0) -> Strides:
    """The strides of arrays that are contiguous."""
    used = []
    formats = ("", spec.k_format, spec.v_format, "")
    for shape, format in zip(shapes(spec, num_pages), formats, strict=True):
        strides = [1 if format else spec.dtype.itemsize]
        *axes, columns = shape[1:]
        for n in (code_columns(format, columns) if format else columns, *axes[::-1]):
            strides.append(strides[-1] * n)
        used.append(tuple(strides[::-1]))
    return Strides(*used)


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call and the device it is for: all that a choice of kernel depends on."""

    spec: AttentionSpec
    arch: str
    multiprocessors: int
    strides: Strides
    aligned: bool = True  # the addresses of q, k, v and out are multiples of 16
    bias: Layout | None = None
    mask: Layout | None = None
    score_aligned: bool = True  # those of bias and mask are
    alibi_slopes: Layout | None = None
    num_pages: int = 0  # of paged keys
    table_stride: int = 0  # elements from row to row of their table
    num_splits: int | str | None = None  # as in `cuattn.flash_decode`
    partial: Partial | None = None
    score_mod: str = CONTRACT_SCORES  # the text of the score functor, as a Variant has it
    k_scales: Scales | None = None  # where the spec says that keys are codes
    v_scales: Scales | None = None
    # Of a sequence whose rows are ragged: others are left to another launch.
    min_queries: int = 0
    max_queries: int = UNBOUNDED
    blocks_beside: int = 0  # of that launch: each has a multiprocessor to itself

    @classmethod
    def contiguous(
        cls, spec: AttentionSpec, arch: str, multiprocessors: int = 132, **options: Any
    ) -> Call:
        """The call of arrays that are contiguous; `options` are other fields."""
        strides = contiguous_strides(spec, options.get("num_pages", 0))
        return cls(spec, arch, multiprocessors, strides, **options)

    @functools.cached_property
    def vectors(self) -> bool:
        """Whether q, k, v and out can be read and written 16 bytes at a time."""
        return self.aligned and all(
            stride % 16 == 0 for array in self.strides for stride in array[:-1]
        )

    @functools.cached_property
    def addressable(self) -> bool:
        """Whether TMA can address q, k, v and out."""
        return self.aligned and all(addressable(array[:-1]) for array in self.strides)

    @property
    def elementwise(self) -> bool:
        """Whether there is a number for each score: a bias or a mask."""
        return self.bias is not None or self.mask is not None

    @property
    def has_own_scores(self) -> bool:
        """Whether its score functor is another than that of :func:`cuattn.flash_attention`."""
        return self.score_mod != CONTRACT_SCORES

    @property
    def has_score(self) -> bool:
        """Whether scores depend on more than q·k and the window."""
        return (
            self.elementwise
            or self.alibi_slopes is not None
            or self.spec.softcap != 0.0
            or self.has_own_scores
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's variant, the grid that covers a call, and what the kernel is given."""

    variant: Variant
    grid: tuple[int, ...]
    arguments: tuple[Arguments, ...] = ()
    tensor_maps: Mapping[str, TensorMap | None] = dataclasses.field(default_factory=dict)
    workspace_bytes: int = 0
    parts: int = 1  # of the keys, each with a result of its own
    beside: Launch | None = None  # computes the sequences that this one leaves out
    late_blocks: int = 0  # of the same kernel, that begin when the launch beside has ended

    def with_scores(self, score_mod: str) -> Launch:
        """The same launch of the kernel's variant with another score functor."""
        return dataclasses.replace(
            self, variant=dataclasses.replace(self.variant, score_mod=score_mod)
        )


class Tier(Protocol):
    """A kernel for some calls: faster tiers come before slower ones that serve more."""

    name: str
    decodes: bool  # as in `cuattn.gpu.dispatch.routing`
    reads_codes: bool  # whether it serves calls whose keys or values are quantised

    def serves(self, call: Call) -> Launch | None:
        """The launch for a call, or None for one that is left to other tiers."""

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that `serves` can choose."""
