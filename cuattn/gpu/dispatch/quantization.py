"""Which variants of the kernels that make codes of numbers, and numbers of codes, serve a call; and
which calls of attention want numbers made of their codes first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from cuattn._arrays import FLOAT_DTYPES
from cuattn._quantized import BFLOAT16, FORMATS, QuantizedArray
from cuattn._spec import AttentionSpec
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.decoding_times import rows_of_sequence
from cuattn.gpu.dispatch.launch import MAX_DIM, capability

#: Lanes of a row in kernels that read and write 8 features at a time, by head_dim.
ROW_LANES = {64: 2, 128: 4, 256: 8}
ANY_FORMAT = -1  # kAnyFormat of rawkernels/tile/code_row.cuh
#: Formats of keys and of values with variants of their own, in 16-bit calls of the first two
#: head_dims whose scales are found; "int4" then has minima.
FORMAT_PAIRS = (
    ("int8", "int8"),
    ("float8_e4m3", "float8_e4m3"),
    ("int4", "int4"),
    ("int8", "int4"),
)

#: Neighbouring tokens of a head that a thread of dequantize.cu has at a time, where it can.
DEQUANTIZED_TOKENS = 4

#: Rows of queries that meet a key head in a sequence, beyond which codes become 16-bit numbers
#: before attention reads them. A decoding kernel reads and expands the codes once for every 16
#: rows; to expand them apart, to write the numbers and to read those takes the time of four or five
#: such turns: over 32768 keys on an H200, 64 rows take 95 and 126 us, 256 rows 305 and 140.
EXPAND_ROWS = 64
MOST_EXPANDED = 1 << 30  # bytes of those numbers


@dataclasses.dataclass(frozen=True)
class QuantizeConfig(Config):
    """quantization/quantize.cu and dequantize.cu."""

    dtype: str
    lanes: int  # of a row; 0: a warp, one feature at a time
    format: int  # tile::Format, of scales that are found; ANY_FORMAT: whatever the call says
    in_blocks: bool = False  # a warp has neighbouring tokens of a head

    @property
    def threads(self) -> int:
        """Several rows' lanes."""
        return 256

    @property
    def block_tokens(self) -> int:
        """Tokens of a head that a warp has at a time."""
        return 32 // self.lanes if self.in_blocks else 1

    @property
    def rows(self) -> int:
        """Rows of a thread block, or blocks of tokens, at a time."""
        return self.threads // (self.lanes * self.block_tokens or 32)

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks of quantize.cu whose rows come in turn; 0: each has rows once."""
        return 0 if self.in_blocks or self.format == ANY_FORMAT else 2


@dataclasses.dataclass(frozen=True)
class DequantizeConfig(Config):
    """quantization/dequantize.cu."""

    dtype: str
    lanes: int  # as in `QuantizeConfig`
    tokens: int  # of a head that a thread has eight features of; 0: rows as in quantize.cu

    @property
    def threads(self) -> int:
        """Several rows' lanes, or eight features each."""
        return 256

    @property
    def rows(self) -> int:
        """Rows of a thread block, or blocks of neighbouring tokens."""
        row_threads = 4 * self.lanes if self.tokens else self.lanes or 32
        return self.threads // row_threads


@dataclasses.dataclass(frozen=True)
class ExtentConfig(Config):
    """quantization/extent.cu."""

    dtype: str
    columns: int  # of a lane: a 32nd of head_dim, rounded up

    @property
    def threads(self) -> int:
        """A warp a row."""
        return 256


@dataclasses.dataclass(frozen=True)
class RotateConfig(Config):
    """quantization/rotate.cu."""

    dtype: str
    columns: int  # of a lane: a 32nd of head_dim

    @property
    def threads(self) -> int:
        """A warp a row."""
        return 256

    @property
    def rows(self) -> int:
        """Of a thread block."""
        return self.threads // 32


def rotate(dtype: str, head_dim: int) -> Variant:
    """Choose a variant of quantization/rotate.cu."""
    return Variant("quantization/rotate.cu", "rotate_rows", RotateConfig(dtype, head_dim // 32))


def extent(dtype: str, head_dim: int) -> tuple[Variant, Variant]:
    """Choose variants of both kernels of quantization/extent.cu."""
    config = ExtentConfig(dtype, 8 if head_dim <= 256 else 16)
    source = "quantization/extent.cu"
    return Variant(source, "extents", config), Variant(source, "scales", config)


def row_lanes(dtype: str, head_dim: int, group: int, *, aligned: bool) -> int:
    """How many lanes share a row; 0 where features must be read one at a time.

    Parameters
    ----------
    dtype : str
        Of the numbers.
    head_dim : int
    group : int
        Features that share a scale.
    aligned : bool
        Whether all addresses and strides let 8 features be read or written at once.
    """
    power_of_two = group & (group - 1) == 0
    if not aligned or not power_of_two or group < 8:
        return 0
    lanes = ROW_LANES.get(head_dim, 0)
    return lanes if lanes in lanes_of(dtype) else 0


def quantize(
    dtype: str, lanes: int, array: QuantizedArray, *, is_static: bool, tokens: int
) -> Variant:
    """Choose a variant of quantization/quantize.cu; `tokens` are those of a page."""
    usual = (array.dtype, array.dtype) in FORMAT_PAIRS and not is_static
    usual &= (array.minimum is not None) == (array.dtype == "int4")
    number = ANY_FORMAT
    if usual and has_formats(dtype, lanes):
        number = FORMATS[array.dtype].number
    config = QuantizeConfig(dtype, lanes, number)
    whole = number != ANY_FORMAT and array.group_size == array.shape[-1] and tokens * lanes >= 32
    if whole and array.rotation is None and array.offset is None:
        config = dataclasses.replace(config, in_blocks=True)
    return Variant("quantization/quantize.cu", "quantize_rows", config)


def dequantize(
    dtype: str, lanes: int, array: QuantizedArray | None = None, page_size: int = 0
) -> Variant:
    """Choose a variant of quantization/dequantize.cu.

    Parameters
    ----------
    dtype : str
        Of the numbers.
    lanes : int
        That share a row.
    array : QuantizedArray, optional
        The codes; without them, the variant that serves all.
    page_size : int
        Tokens of a page of the codes where a table says which pages are whose; 0 where none does.
    """
    tokens = 0
    if array is not None and lanes and dtype in ("float16", "bfloat16"):
        plain = array.rotation is None and array.offset is None
        plain &= array.minimum is None or array.dtype == "int4"
        tokens = DEQUANTIZED_TOKENS if plain and page_size % DEQUANTIZED_TOKENS == 0 else 0
    return _dequantize_variant(dtype, lanes, tokens)


def _dequantize_variant(dtype: str, lanes: int, tokens: int) -> Variant:
    config = DequantizeConfig(dtype, lanes, tokens)
    return Variant("quantization/dequantize.cu", "dequantize_rows", config)


def has_formats(dtype: str, lanes: int) -> bool:
    """Whether there are variants for `FORMAT_PAIRS`."""
    return dtype in ("float16", "bfloat16") and lanes in (2, 4)


def lanes_of(dtype: str) -> tuple[int, ...]:
    """Lanes of a row that there are variants for."""
    return (0,) if dtype == "float64" else (0, *ROW_LANES.values())


def sequences_to_expand(
    spec: AttentionSpec, likes: tuple[np.dtype, np.dtype], arch: str, *, elementwise: bool
) -> int:
    """How many sequences at a time have their codes expanded to numbers, over which their attention
    then is; 0 where kernels of attention read the codes.

    Those of prompts are expanded: once, and not for every tile of queries. So are those of calls
    with a bias or mask, since over codes these are for `decode_simt` alone.

    Parameters
    ----------
    spec : AttentionSpec
        The call.
    likes : (dtype, dtype)
        What the codes' numbers were before: `QuantizedArray.like` of keys and of values.
    arch : str
        As ``sm_90a``.
    elementwise : bool
        Whether there is a bias or mask.
    """
    dims = spec.head_dim, spec.head_dim_v
    elements = spec.seqlen_k * spec.heads_kv * sum(dims)
    if (
        not (spec.k_format and spec.v_format)
        or spec.keys not in ("cached", "paged")
        or spec.dtype.itemsize != 2
        # float16 ends early: what was of another type may lie beyond.
        or (spec.dtype != BFLOAT16 and any(like != spec.dtype for like in likes))
        or not (elementwise or rows_of_sequence(spec) > EXPAND_ROWS)
        or max(dims) > MAX_DIM
        or any(dim % 8 for dim in dims)
        or capability(arch) < 80
        or elements == 0
    ):
        return 0
    most = min(spec.batch, MOST_EXPANDED // (spec.dtype.itemsize * elements))
    # Which of ragged rows are whose, only the device knows.
    return most if most == spec.batch or spec.rows == "batched" else 0


def rotates_queries(spec: AttentionSpec) -> bool:
    """Whether a launch that rotates queries is faster than to rotate the keys of all codes as they
    are expanded."""
    queries = spec.seqlen_q * (1 if spec.rows == "ragged" else spec.batch) * spec.heads_q
    keys = spec.seqlen_k * spec.batch * spec.heads_kv
    return spec.head_dim in ROW_LANES and keys >= 8 * queries


def quantization_variants() -> Iterator[Variant]:
    """Every variant of the kernels in quantization/."""
    for name, head_dim in itertools.product(("float16", "bfloat16"), ROW_LANES):
        yield rotate(name, head_dim)
    for name in FLOAT_DTYPES.values():
        for lanes in lanes_of(name):
            formats = [ANY_FORMAT]
            if has_formats(name, lanes):
                formats += [FORMATS[k].number for k, v in FORMAT_PAIRS if k == v]
            for number in formats:
                for in_blocks in (False, True):
                    if in_blocks and number == ANY_FORMAT:
                        continue
                    config = QuantizeConfig(name, lanes, number, in_blocks)
                    yield Variant("quantization/quantize.cu", "quantize_rows", config)
            yield dequantize(name, lanes)
            if lanes and name in ("float16", "bfloat16"):
                yield _dequantize_variant(name, lanes, DEQUANTIZED_TOKENS)
        for head_dim in (256, 512):
            yield from extent(name, head_dim)
