"""Which kernels serve the samplers, in which variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.tiles.launch import SHARED_KIB, Launch, capability

LOGIT_DTYPES = ("float16", "bfloat16", "float32")
CLUSTER = 8  # blocks that share a row; the most that every Hopper GPU can schedule
WHOLE_ROWS = 128  # from so many rows on, the unfiltered draw gives each row to one block
ROW_KIB_LESS = 28  # of a multiprocessor's shared memory, not for a block's part of a row
MAX_RANKED = 256  # the k of the largest that sampling/stream.cu finds
MAX_LISTED = 448  # kList of rawkernels/sampling/select.cuh; 512 threads would spill


@dataclasses.dataclass(frozen=True)
class SampleConfig(Config):
    """sampling/sample.cu, sampling/stream.cu and sampling/speculate.cu."""

    dtype: str
    cluster: int
    blocks_per_sm: int
    unroll: int  # groups of 128 tokens that a warp has in flight
    threads_per_block: int

    @property
    def threads(self) -> int:
        return self.threads_per_block


@dataclasses.dataclass(frozen=True)
class FilterConfig(Config):
    """sampling/filter.cu."""

    dtype: str
    cluster: int
    resident: bool
    row_bytes: int  # of a row, at most, in a block's shared memory
    blocks_per_sm: int = 2
    unroll: int = 1

    @property
    def threads(self) -> int:
        return MAX_LISTED

    @property
    def smem_bytes(self) -> int:
        """At most: a launch asks for what its rows take."""
        return self.row_bytes


@dataclasses.dataclass(frozen=True)
class PenalizeConfig(Config):
    """sampling/penalize.cu."""

    dtype: str

    @property
    def threads(self) -> int:
        return 256


def sample(dtype: str, rows: int, arch: str) -> Launch:
    """Choose the kernel of a draw that no filter precedes."""
    cluster = CLUSTER if rows < WHOLE_ROWS and capability(arch) >= 90 else 1
    return Launch(_sample_variant(dtype, cluster, arch), (rows * cluster,))


def stream(dtype: str, rows: int, arch: str) -> Launch:
    """Choose the kernel of what one reading of the rows tells."""
    cluster = CLUSTER if rows < WHOLE_ROWS and capability(arch) >= 90 else 1
    return Launch(_stream_variant(dtype, cluster), (rows * cluster,))


def filter_rows(dtype: str, rows: int, vocab: int, arch: str) -> tuple[Launch, int]:
    """Choose the kernel of what needs whole rows; also its dynamic shared memory."""
    groups = (vocab + 127) // 128
    part = -(-groups // CLUSTER) * 128 * 4
    resident = part <= _row_bytes(arch)
    variant = _filter_variant(dtype, arch, resident=resident)
    return Launch(variant, (rows * variant.config.cluster,)), part if resident else 0


def speculate(rows: int, arch: str) -> Launch:
    """Choose the kernel of speculative sampling."""
    variant = _speculate_variant(arch)
    return Launch(variant, (rows * variant.config.cluster,))


def penalize(dtype: str, rows: int, vocab: int) -> Launch:
    """Choose the kernel of the penalties."""
    variant = Variant("sampling/penalize.cu", "penalize", PenalizeConfig(dtype))
    return Launch(variant, (-(-vocab // 4096), rows))


def sampling_variants(arch: str) -> Iterator[Variant]:
    """Every variant of the kernels in sampling/."""
    hopper = capability(arch) >= 90
    for dtype in LOGIT_DTYPES:
        for cluster in (1, CLUSTER) if hopper else (1,):
            yield _sample_variant(dtype, cluster, arch)
            yield _stream_variant(dtype, cluster)
        for resident in (False, True) if hopper else (False,):
            yield _filter_variant(dtype, arch, resident=resident)
        yield penalize(dtype, 1, 1).variant
    yield _speculate_variant(arch)


def _sample_variant(dtype: str, cluster: int, arch: str) -> Variant:
    blocks = 4 if capability(arch) <= 90 else 3  # newer ones would spill with four
    config = SampleConfig(dtype, cluster, blocks, unroll=4, threads_per_block=256)
    return Variant("sampling/sample.cu", "sample", config)


def _stream_variant(dtype: str, cluster: int) -> Variant:
    config = SampleConfig(dtype, cluster, blocks_per_sm=4, unroll=4, threads_per_block=MAX_RANKED)
    return Variant("sampling/stream.cu", "stream", config)


def _row_bytes(arch: str) -> int:
    """Of a row, what a block can hold in shared memory; 0 without clusters to share a row."""
    if capability(arch) < 90:
        return 0
    return (SHARED_KIB.get(capability(arch), 100) - ROW_KIB_LESS) * 1024


def _filter_variant(dtype: str, arch: str, *, resident: bool) -> Variant:
    row_bytes = _row_bytes(arch) if resident else 0
    config = FilterConfig(dtype, CLUSTER if resident else 1, resident, row_bytes)
    return Variant("sampling/filter.cu", "filter", config)


def _speculate_variant(arch: str) -> Variant:
    cluster = CLUSTER if capability(arch) >= 90 else 1
    config = SampleConfig("float32", cluster, blocks_per_sm=1, unroll=1, threads_per_block=512)
    return Variant("sampling/speculate.cu", "speculate", config)
