"""Which kernel serves a call of the samplers, in which variant. Choices are remembered, since
choosing takes as long as a launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.launch import SHARED_KIB, Launch, capability

LOGIT_DTYPES = ("float16", "bfloat16", "float32")
CLUSTER = 8  # blocks that share a row; the most that every Hopper GPU can schedule
FEW_ROWS = 24  # up to so many rows, CLUSTER blocks share a row; from there on, two blocks do
WHOLE_ROWS = 128  # from so many rows on, the unfiltered draw gives each row to one block
RESERVED_KIB = 28  # of a multiprocessor's shared memory, that filter.cu leaves to other uses
PENALTY_BYTES = 56 * 1024  # of shared memory, at most, for the penalties of a block's segment
MIN_TABLE_LOGITS = 1 << 22  # from so many on, a table of penalized logits is faster than a copy
MAX_TABLE_BYTES = 64 * 1024  # of shared memory, at most, for making the table of a row
PENALIZE_SEGMENT = 2048  # tokens of a row that a block of penalize.cu takes, at least
MAX_TOP_K = 256  # of sampling/sample_filtered.cu: kMaxTopK of topk.cuh
# Tokens of a row, at most, of sampling/nucleus_gumbel.cuh: it counts them in float32, and has
# places for the 2^-16 of them that pass as candidates by the upper half of their number alone.
MAX_NUCLEUS = 1 << 24
FILTER_THREADS = 448  # 512 would spill
FILTERED_SEGMENT = 4096  # tokens of a row that a block of filter_topk.cu takes: kSegment


@dataclasses.dataclass(frozen=True)
class RowConfig(Config):
    """The kernels that read each row once."""

    dtype: str
    cluster: int
    blocks_per_sm: int
    unroll: int  # groups of 256 tokens that a warp has in flight
    threads_per_block: int

    @property
    def threads(self) -> int:
        return self.threads_per_block


@dataclasses.dataclass(frozen=True)
class UnfilteredConfig(RowConfig):
    """sampling/sample_unfiltered.cu."""

    penalized: bool = False  # whether it serves calls with penalties, and has memory for them

    @property
    def smem_bytes(self) -> int:
        """At most: a launch asks for what its penalties take."""
        return PENALTY_BYTES if self.penalized else 0


@dataclasses.dataclass(frozen=True)
class FilteredConfig(RowConfig):
    """sampling/sample_filtered.cu."""

    histogram_bins: int
    ranked: bool  # whether it serves a long top-k or typical-p, instead of all the others

    @property
    def smem_bytes(self) -> int:
        """The histogram's bins, a column for each thread; or tokens that wait for their draw."""
        return 4 * self.histogram_bins * self.threads


@dataclasses.dataclass(frozen=True)
class FilterTopKConfig(Config):
    """sampling/filter_topk.cu."""

    dtype: str
    cluster: int = 1

    @property
    def threads(self) -> int:
        """One for each of the largest."""
        return MAX_TOP_K


@dataclasses.dataclass(frozen=True)
class FilterConfig(Config):
    """sampling/filter.cu."""

    cluster: int
    resident: bool
    row_bytes: int  # of a row in a block's shared memory, at most
    blocks_per_sm: int = 2

    @property
    def threads(self) -> int:
        return FILTER_THREADS

    @property
    def smem_bytes(self) -> int:
        """At most: a launch asks for what its rows take."""
        return self.row_bytes


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig(Config):
    """sampling/softmax.cu."""

    dtype: str
    cluster: int
    values: int  # tokens of the row in a thread's registers
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        return 256

    @property
    def row(self) -> int:
        """Tokens of the longest row that a cluster holds."""
        return self.cluster * self.values * self.threads


@dataclasses.dataclass(frozen=True)
class SpeculateConfig(Config):
    """sampling/speculate.cu."""

    cluster: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        return 256


@dataclasses.dataclass(frozen=True)
class PenalizeConfig(Config):
    """sampling/penalize.cu."""

    dtype: str
    cluster: int = 1

    @property
    def threads(self) -> int:
        return 256

    @property
    def smem_bytes(self) -> int:
        """At most: a launch asks for what its penalties take."""
        return MAX_TABLE_BYTES


@functools.lru_cache(maxsize=4096)
def sample_unfiltered(dtype: str, rows: int, arch: str, *, penalized: bool = False) -> Launch:
    """Choose the kernel of a draw by temperature alone."""
    cluster = _cluster(rows, arch, together=penalized)
    if capability(arch) == 90 and FEW_ROWS < rows < WHOLE_ROWS and not penalized:
        cluster = 2
    return Launch(_unfiltered_variant(dtype, cluster, arch), (rows * cluster,))


@functools.lru_cache(maxsize=4096)
def sample_filtered(dtype: str, rows: int, arch: str, *, ranked: bool = False) -> Launch:
    """Choose the kernel of top-k, and of a draw after filters that need each row only once; with
    `ranked`, after a long top-k or typical-p alone."""
    cluster = _cluster(rows, arch)
    if capability(arch) == 90 and FEW_ROWS < rows < 2 * WHOLE_ROWS:
        cluster = 2
    return Launch(_filtered_variant(dtype, cluster, arch, ranked=ranked), (rows * cluster,))


def segment(vocab: int, cluster: int) -> int:
    """Tokens of a row that a block takes, at most: own_segment() of sampling/row.cuh."""
    return -(-vocab // (256 * cluster)) * 256


def penalty_bytes(segment: int, length: int, triples: int) -> int:
    """Shared memory for the penalties of a segment: sampling/penalties.cuh."""
    listed = min(length + triples, segment)
    return 12 * -(-segment // 32) + (8 + 8 * bool(triples)) * listed


@functools.lru_cache(maxsize=4096)
def filter_rows(rows: int, vocab: int, arch: str) -> tuple[Launch, int]:
    """Choose the kernel of filters that need several passes; also its dynamic shared memory."""
    part = 4 * segment(vocab, CLUSTER)
    resident = part <= _row_bytes(arch)
    variant = _filter_variant(arch, resident=resident)
    return Launch(variant, (rows * variant.config.cluster,)), part if resident else 0


@functools.lru_cache(maxsize=4096)
def filter_topk(dtype: str, rows: int, vocab: int) -> Launch:
    """Choose the kernel of filters whose rows' largest tokens are known."""
    variant = Variant("sampling/filter_topk.cu", "filter_topk", FilterTopKConfig(dtype))
    return Launch(variant, (rows * -(-vocab // FILTERED_SEGMENT),))


@functools.lru_cache(maxsize=4096)
def softmax(dtype: str, rows: int, vocab: int, arch: str) -> Launch:
    """Choose the kernel of the probabilities."""
    variants = _softmax_variants(dtype, arch)
    variant = next((v for v in variants if vocab <= v.config.row), variants[-1])
    return Launch(variant, (rows * variant.config.cluster,))


@functools.lru_cache(maxsize=4096)
def speculate(rows: int, arch: str) -> Launch:
    """Choose the kernel of speculative sampling."""
    variant = _speculate_variant(arch)
    return Launch(variant, (rows * variant.config.cluster,))


def penalize(dtype: str, rows: int, vocab: int, length: int, triples: int) -> tuple[Launch, int]:
    """Choose the kernel of the penalties; also how many tokens of a row a block takes."""
    variant = Variant("sampling/penalize.cu", "penalize", PenalizeConfig(dtype))
    size = PENALIZE_SEGMENT
    many = rows * vocab >= 1 << 22  # then fewer blocks need to look for the earlier tokens
    if many and penalty_bytes(8 * size, length, triples) <= penalty_bytes(size, size, 1):
        size *= 8
    return Launch(variant, (rows, -(-vocab // size))), size


def penalty_table(
    dtype: str, rows: int, vocab: int, length: int, triples: int
) -> tuple[Launch, int, int] | None:
    """Choose the kernel that makes tables of the penalized logits; also the bits of a slot's
    number, and dynamic shared memory. None if a penalized copy is faster, or a table too large.
    """
    variant = Variant("sampling/penalize.cu", "penalize", PenalizeConfig(dtype))
    bits = (2 * max(length + triples, 8) - 1).bit_length()  # at most half of the slots are taken
    nbytes = (8 + 8 * bool(triples)) << bits
    if rows * vocab < MIN_TABLE_LOGITS or nbytes > variant.config.smem_bytes:
        return None
    return Launch(variant, (rows,)), bits, nbytes


def sampling_variants(arch: str) -> Iterator[Variant]:
    """Every variant of the kernels in sampling/."""
    hopper = capability(arch) >= 90
    for dtype in LOGIT_DTYPES:
        for cluster in (1, 2, CLUSTER) if capability(arch) == 90 else _clusters(arch):
            yield _unfiltered_variant(dtype, cluster, arch)
            for ranked in (False, True):
                yield _filtered_variant(dtype, cluster, arch, ranked=ranked)
        yield from _softmax_variants(dtype, arch)
        yield filter_topk(dtype, 1, 1).variant
        yield penalize(dtype, 1, 1, 0, 0)[0].variant
    for resident in (False, True) if hopper else (False,):
        yield _filter_variant(arch, resident=resident)
    yield _speculate_variant(arch)


def _clusters(arch: str) -> tuple[int, ...]:
    """How many blocks share a row where there are many rows, and where there are few."""
    if capability(arch) == 90:
        return (1, CLUSTER)
    return (CLUSTER,) if capability(arch) > 90 else (1,)


def _cluster(rows: int, arch: str, *, together: bool = False) -> int:
    clusters = _clusters(arch)
    return clusters[0] if rows >= WHOLE_ROWS and not together else clusters[-1]


def _unfiltered_variant(dtype: str, cluster: int, arch: str) -> Variant:
    few = 5 if capability(arch) == 90 else 2  # newer ones need more registers
    shape = {1: (4, 2, 256), 2: (2, 2, 512), CLUSTER: (few, 1, 256)}[cluster]
    config = UnfilteredConfig(dtype, cluster, *shape, penalized=cluster == CLUSTER)
    return Variant("sampling/sample_unfiltered.cu", "sample_unfiltered", config)


@functools.cache
def _softmax_variants(dtype: str, arch: str) -> tuple[Variant, ...]:
    """In ascending order of the vocabulary that fits."""
    if capability(arch) == 90:
        configs = [
            (4, 16, 6),
            (CLUSTER, 16, 6),
            (CLUSTER, 32, 4),
            (CLUSTER, 48, 3),
            (CLUSTER, 80, 2),
        ]
    else:
        configs = [(CLUSTER if capability(arch) > 90 else 1, 64, 2)]
    return tuple(
        Variant("sampling/softmax.cu", "softmax", SoftmaxConfig(dtype, *config))
        for config in configs
    )


def _filtered_variant(dtype: str, cluster: int, arch: str, *, ranked: bool) -> Variant:
    # 25 bins take as much memory as the tokens that wait (Waiting of nucleus_gumbel.cuh) where a
    # tile has up to four groups of four; with eight groups none wait.
    # Four blocks have 512 rows on an H200 at a time. Older GPUs' shared memory has room for three.
    few = 3 if ranked and capability(arch) < 90 else 4
    shape = {1: (few, 2, 256, 25), 2: (1, 2, 512, 25), CLUSTER: (2, 4, 256, 24)}[cluster]
    config = FilteredConfig(dtype, cluster, *shape, ranked)
    return Variant("sampling/sample_filtered.cu", "sample_filtered", config)


def _row_bytes(arch: str) -> int:
    """How much of a row a block can hold in shared memory; 0 without clusters to share a row."""
    if capability(arch) < 90:
        return 0
    return (SHARED_KIB.get(capability(arch), 100) - RESERVED_KIB) * 1024


def _filter_variant(arch: str, *, resident: bool) -> Variant:
    row_bytes = _row_bytes(arch) if resident else 0
    config = FilterConfig(CLUSTER if resident else 1, resident, row_bytes)
    return Variant("sampling/filter.cu", "filter", config)


def _speculate_variant(arch: str) -> Variant:
    cluster = CLUSTER if capability(arch) >= 90 else 1
    blocks = 3 if capability(arch) <= 90 else 2  # newer ones need more registers
    return Variant("sampling/speculate.cu", "speculate", SpeculateConfig(cluster, blocks))
