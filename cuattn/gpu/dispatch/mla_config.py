"""The variants of the kernels of latent attention: a `Config` for each, and how it is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cuattn._quantized import format_number
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.decoding import part_bytes
from cuattn.gpu.dispatch.launch import SHARED_KIB, capability

LATENT = 512  # width that kernels pad latents to
ROPE = 64  # … and what is rotated
#: Formats of codes that kernels with tensor cores take; others go to `simt`.
LATENT_FORMATS = ("int8", "float8_e4m3", "float8_e5m2")
#: Columns of a latent that share a scale in these kernels, or twice as many, or all: kScaleColumns
#: of mla/codes.cuh.
SCALE_COLUMNS = 128
#: Rows of a tile of mla/decode_codes_sm90.cu; mla/decode_codes.cu has the first. And its keys.
CODE_ROWS = (16, 32, 64)
CODE_KEYS = 64
FEW_ROWS = (16, 32)  # of a tile of mla/decode_few_sm90.cu


@dataclasses.dataclass(frozen=True)
class SimtMlaConfig(Config):
    """mla/decode_simt.cu."""

    dtype: str
    latent: int
    rope: int
    rows: int
    batch_keys: int
    blocks_per_sm: int
    tile_keys: int
    quantized: bool  # latents are codes, of a format that is known at run time

    @property
    def threads(self) -> int:
        """Four warps, which take keys in turn."""
        return 128

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result."""
        return part_bytes(self.rows, self.latent, 8 if self.dtype == "float64" else 4)


def simt_variant(dtype: str, *, quantized: bool) -> Variant:
    """Of mla/decode_simt.cu, for a dtype."""
    wide = dtype == "float64"
    config = SimtMlaConfig(
        dtype,
        LATENT,
        ROPE,
        rows=1 if wide else 2,
        batch_keys=1 if wide else 2,
        blocks_per_sm=2,
        tile_keys=64,
        quantized=quantized,
    )
    return Variant("mla/decode_simt.cu", "mla_decode_simt", config)


@dataclasses.dataclass(frozen=True)
class Sm80MlaConfig(Config):
    """mla/decode_sm80.cu."""

    dtype: str
    latent: int
    rows: int
    tile_keys: int
    stages: int
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        """Eight warps, each with 64 columns of O."""
        return 256

    @property
    def smem_bytes(self) -> int:
        """Q, the ring, the warps' parts of the scores, then what is small."""
        row = (LATENT + ROPE) * 2
        ring = -(-self.stages * self.tile_keys * row // 1024) * 1024
        scores = 4 * self.rows * (self.tile_keys + 4) * 4
        return self.rows * row + ring + scores + 2048

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result."""
        return part_bytes(self.rows, LATENT, 4)


def sm80_variant(dtype: str, arch: str) -> Variant:
    """Of mla/decode_sm80.cu."""
    stages = 5 if SHARED_KIB[capability(arch)] > 164 else 3
    config = Sm80MlaConfig(dtype, LATENT, rows=16, tile_keys=32, stages=stages)
    return Variant("mla/decode_sm80.cu", "mla_decode_sm80", config)


@dataclasses.dataclass(frozen=True)
class Sm90MlaConfig(Config):
    """mla/decode_sm90.cu."""

    dtype: str
    gather: bool  # keys are read one by one: chosen tokens, small pages
    consumer_registers: int
    producer_registers: int
    blocks_per_sm: int = 1

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64

    @property
    def tile_keys(self) -> int:
        """Keys of a block, which is what the work is cut into."""
        return 64

    @property
    def threads(self) -> int:
        """Two consuming warpgroups, and one that produces."""
        return 384

    @property
    def smem_bytes(self) -> int:
        """Q, two blocks of keys, then what is small."""
        return 3 * self.rows * (LATENT + ROPE) * 2 + 3072

    @property
    def half_parts(self) -> bool:
        """Whether O of partial results is float16: there are no registers for it beside keys that
        are gathered."""
        return not self.gather

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result: O, maxima and sums."""
        return self.rows * (LATENT * (2 if self.half_parts else 4) + 8)


def sm90_variant(dtype: str, *, gather: bool) -> Variant:
    """Of mla/decode_sm90.cu."""
    registers = (208, 88) if gather else (216, 72)
    config = Sm90MlaConfig(dtype, gather, *registers)
    return Variant("mla/decode_sm90.cu", "mla_decode_sm90", config)


@dataclasses.dataclass(frozen=True)
class Sm90Rows80MlaConfig(Config):
    """mla/decode_80_sm90.cu."""

    dtype: str
    rows: int = 80
    consumer_registers: int = 240
    producer_registers: int = 24
    tile_keys: int = 64
    blocks_per_sm: int = 1

    @property
    def half_parts(self) -> bool:
        """O of partial results is float16."""
        return True

    @property
    def threads(self) -> int:
        """Two consuming warpgroups, each with half of O's columns, and one that produces."""
        return 384

    @property
    def smem_bytes(self) -> int:
        """Q, seven places for panels of keys of each half of the columns, two for what is rotated
        and for probabilities, then what is small."""
        places = 2 * 7 * self.tile_keys * 128 + 2 * self.rows * 128
        return self.rows * (LATENT + ROPE) * 2 + places + 4096

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result: O as float16, maxima and sums."""
        return self.rows * (LATENT * 2 + 8)


def rows_80_variant(dtype: str) -> Variant:
    """Of mla/decode_80_sm90.cu."""
    return Variant("mla/decode_80_sm90.cu", "mla_decode_80_sm90", Sm90Rows80MlaConfig(dtype))


@dataclasses.dataclass(frozen=True)
class Sm90FewMlaConfig(Config):
    """mla/decode_few_sm90.cu."""

    dtype: str
    rows: int
    warpgroups: int = 2  # each with all of O
    tile_keys: int = 64
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        """All of them compute."""
        return 128 * self.warpgroups

    @property
    def smem_bytes(self) -> int:
        """Q, a block of keys for each warpgroup, probabilities, then what is small."""
        row = (LATENT + ROPE) * 2
        of_warpgroups = self.warpgroups * (self.tile_keys * row + self.rows * 128)
        return self.rows * row + of_warpgroups + 5120 + self.rows * 128

    @property
    def part_bytes(self) -> int:
        """Scratch of a thread block's partial result: O as float16."""
        return self.rows * LATENT * 2

    def workspace_bytes(self, blocks: int) -> int:
        """Scratch of a tile of rows of so many thread blocks: their partial results, and packets of
        16 bytes from each of them for each task."""
        return blocks * (self.part_bytes + 16 * max(blocks, self.rows)) + 16


def few_variant(dtype: str, rows: int) -> Variant:
    """Of mla/decode_few_sm90.cu, for tiles of up to so many rows."""
    config = Sm90FewMlaConfig(dtype, rows)
    return Variant("mla/decode_few_sm90.cu", "mla_decode_few_sm90", config)


@dataclasses.dataclass(frozen=True)
class CodesMlaConfig(Config):
    """mla/decode_codes.cu."""

    dtype: str
    latent: int
    rows: int
    tile_keys: int
    stages: int  # of a group's ring
    groups: int  # of four warps
    latent_format: int  # of codes, as in cuattn/_quantized.py
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        """Groups of four warps."""
        return 128 * self.groups

    @property
    def smem_bytes(self) -> int:
        """The groups' rings, or O in their place; queries, probabilities, then what is small."""
        stage = self.tile_keys * (LATENT + ROPE * 2) + 2048
        queries = self.rows * (LATENT + ROPE) * 2
        probabilities = LATENT // SCALE_COLUMNS * self.rows * self.tile_keys * 2
        return self.groups * (self.stages * stage + probabilities + 1024) + queries + 2048

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result: O, maxima and sums."""
        return self.rows * (LATENT + 2) * 4


@dataclasses.dataclass(frozen=True)
class Sm90CodesMlaConfig(Config):
    """mla/decode_codes_sm90.cu."""

    dtype: str
    latent: int
    rows: int
    stages: int
    latent_format: int  # of codes, as in cuattn/_quantized.py
    several_scales: bool  # of a token
    warpgroups: int  # that compute
    operand_buffers: int
    computing_registers: int
    loading_registers: int
    tile_keys: int = CODE_KEYS
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        """What computes, and four warps that load."""
        return 128 * (self.warpgroups + 1)

    @property
    def smem_bytes(self) -> int:
        """Queries, probabilities, the ring, then what is small."""
        scales = LATENT // SCALE_COLUMNS if self.several_scales else 1
        small = self.tile_keys * 6 * (1 + scales) + 16
        stage = -(-(self.tile_keys * (LATENT + ROPE * 2) + small) // 1024) * 1024
        queries = self.rows * (LATENT + ROPE) * 2
        places = 1 if self.rows == 64 else 4 if self.rows == 16 and self.several_scales else 2
        probabilities = self.warpgroups * self.rows * 128 * places
        small = self.rows * (44 * self.warpgroups + 40) + 2048
        return queries + probabilities + self.stages * stage + small

    @property
    def part_bytes(self) -> int:
        """Scratch of a partial result: O, maxima and sums."""
        return self.rows * (LATENT + 2) * 4


def codes_sm90_variant(dtype: str, format: str, rows: int, *, several_scales: bool) -> Variant:
    """Of mla/decode_codes_sm90.cu, for tiles of so many rows."""
    warpgroups, *registers = (3, 152, 56) if rows == 16 else (2, 224, 56)
    config = Sm90CodesMlaConfig(
        *(dtype, LATENT, rows, 3 if rows == 64 else 4, format_number(format), several_scales),
        *(warpgroups, 2, *registers),
    )
    return Variant("mla/decode_codes_sm90.cu", "mla_decode_codes_sm90", config)


def codes_variant(dtype: str, format: str, arch: str) -> Variant | None:
    """Of mla/decode_codes.cu; None where it does not fit."""
    shared = SHARED_KIB.get(capability(arch), 0)
    if dtype not in ("float16", "bfloat16") or shared < 160:
        return None
    stages, groups = (2, 2) if shared > 164 else (3, 1)
    config = CodesMlaConfig(
        dtype, LATENT, 16, 64, stages, groups, latent_format=format_number(format)
    )
    return Variant("mla/decode_codes.cu", "mla_decode_codes", config)


@dataclasses.dataclass(frozen=True)
class CombineConfig(Config):
    """mla/combine.cu."""

    dtype: str
    rows: int  # of a tile
    latent: int
    columns: int  # of a row of O that a warp or a block merges
    shared_rows: bool  # by a block's warps, each of which has a share of the partial results
    half_parts: bool  # partial results are float16

    @property
    def threads(self) -> int:
        """Eight warps."""
        return 256


def combine_variant(
    dtype: str, rows: int, columns: int, *, shared_rows: bool, half_parts: bool
) -> Variant:
    """Of mla/combine.cu, for tiles of so many rows."""
    config = CombineConfig(dtype, rows, LATENT, columns, shared_rows, half_parts)
    return Variant("mla/combine.cu", "mla_combine", config)


#: Columns and shared_rows of its variants.
COMBINED = ((LATENT // 4, True), (LATENT // 2, True), (LATENT // 4, False), (LATENT, False))


def combine_variants(dtype: str, rows: int, *, half_parts: bool = False) -> Iterator[Variant]:
    """Every variant of it for them."""
    for columns, shared_rows in COMBINED:
        yield combine_variant(dtype, rows, columns, shared_rows=shared_rows, half_parts=half_parts)
