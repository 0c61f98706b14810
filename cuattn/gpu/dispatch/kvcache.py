"""Which kernels write to caches, in which variants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from cuattn._arrays import FLOAT_DTYPES
from cuattn._quantized import FORMATS
from cuattn.gpu.compiler import Config, Variant
from cuattn.gpu.dispatch.quantization import ANY_FORMAT, FORMAT_PAIRS, has_formats, lanes_of


@dataclasses.dataclass(frozen=True)
class CacheWriteConfig(Config):
    """kvcache/write.cu."""

    dtype: str
    vec_bytes: int
    any_cache: bool  # contiguous ones too, with slots and left_padding

    @property
    def threads(self) -> int:
        """Each copies a piece of a token's keys and one of its values."""
        return 256


def cache_write(dtype: str, itemsize: int, *, aligned: bool, any_cache: bool = False) -> Variant:
    """Choose a variant of kvcache/write.cu: by 16 bytes, or one element at a time."""
    packed = aligned and itemsize < 8
    config = CacheWriteConfig(dtype, 16 if packed else itemsize, any_cache)
    return Variant("kvcache/write.cu", "write", config)


HEADS_IN_TURN = (4, 3, 2, 1)  # of a warp that writes codes, the most that divide all
MORE_HEADS_IN_TURN = (8, *HEADS_IN_TURN)  # likewise, where heads share more than their slots
#: Thread blocks that keep a device busy: with fewer, warps have fewer heads in turn.
ENOUGH_BLOCKS = 384


@dataclasses.dataclass(frozen=True)
class QuantizedWriteConfig(Config):
    """kvcache/write_quantized.cu."""

    dtype: str
    lanes: int  # of a row, as in `QuantizeConfig`
    k_format: int  # likewise; both are known, or none
    v_format: int
    any_cache: bool  # as in `CacheWriteConfig`

    @property
    def threads(self) -> int:
        """Several rows' lanes."""
        return 256 if self.k_format == ANY_FORMAT else 128

    def grid(self, tokens: int, heads: int, *, rotary: bool) -> tuple[int, int]:
        """Rows and sides, keys or values; or tokens and shares of the heads."""
        rows = self.threads // (self.lanes or 32)
        if self.k_format == ANY_FORMAT:
            return -(-tokens * heads // rows), 2
        # A warp looks up its tokens' slots once, but more warps have more on their way.
        each = next(n for n in HEADS_IN_TURN if heads % n == 0)
        return -(-tokens // rows), heads // each


@dataclasses.dataclass(frozen=True)
class CodesWriteConfig(QuantizedWriteConfig):
    """kvcache/write_codes.cu: formats are known."""

    def heads_in_turn(self, *, rotary: bool) -> tuple[int, ...]:
        """How many heads a warp may have: it reads RoPE's angles once for all of them. With 64
        features, whose thread blocks are half as many, that pays for int4 only."""
        shares_enough = self.lanes == 4 or self.k_format == FORMATS["int4"].number
        return MORE_HEADS_IN_TURN if rotary and shares_enough else HEADS_IN_TURN

    def grid(self, tokens: int, heads: int, *, rotary: bool) -> tuple[int, int]:
        """Tokens and shares of the heads."""
        blocks = -(-tokens // (self.threads // self.lanes))
        shares = [heads // n for n in self.heads_in_turn(rotary=rotary) if heads % n == 0]
        return blocks, next((n for n in shares if blocks * n >= ENOUGH_BLOCKS), heads)


def quantized_cache_write(
    dtype: str, lanes: int, formats: tuple[str, str], *, tokens: int = 0
) -> Variant:
    """Choose the kernel that writes codes, and its variant.

    Parameters
    ----------
    dtype : str
        Of the numbers.
    lanes : int
        That share a row, of keys and of values.
    formats : (str, str)
        Of scales that are found, or two empty strings.
    tokens : int, optional
        How many there are, in a call that kvcache/write_codes.cu serves where a warp has enough.
    """
    if formats not in FORMAT_PAIRS or not has_formats(dtype, lanes):
        config = QuantizedWriteConfig(dtype, lanes, ANY_FORMAT, ANY_FORMAT, any_cache=True)
        return Variant("kvcache/write_quantized.cu", "write_quantized", config)
    numbers = (FORMATS[format].number for format in formats)
    if tokens >= 32 // lanes:
        whole = CodesWriteConfig(dtype, lanes, *numbers, any_cache=True)
        return Variant("kvcache/write_codes.cu", "write_codes", whole)
    config = QuantizedWriteConfig(dtype, lanes, *numbers, any_cache=True)
    return Variant("kvcache/write_quantized.cu", "write_quantized", config)


#: How many numbers of an update come with the launch: arguments have 4096 bytes in all.
GIVEN_NUMBERS = (96, 960)


@dataclasses.dataclass(frozen=True)
class CacheUpdateConfig(Config):
    """kvcache/update.cu."""

    numbers: int  # that come with the launch; 0: they are in memory

    @property
    def threads(self) -> int:
        """Each sets some numbers."""
        return 256


@functools.lru_cache(maxsize=4096)
def cache_update(numbers: int) -> Variant:
    """Choose a variant of kvcache/update.cu for so many numbers."""
    given = next((most for most in GIVEN_NUMBERS if numbers <= most), 0)
    return Variant("kvcache/update.cu", "update", CacheUpdateConfig(given))


def cache_variants() -> Iterator[Variant]:
    """Every variant of the kernels in kvcache/."""
    for dtype, name in FLOAT_DTYPES.items():
        for any_cache in (False, True):
            for aligned in (False, True) if dtype.itemsize < 8 else (False,):
                yield cache_write(name, dtype.itemsize, aligned=aligned, any_cache=any_cache)
        for lanes in lanes_of(name):
            for formats in (("", ""), *(FORMAT_PAIRS if has_formats(name, lanes) else ())):
                yield quantized_cache_write(name, lanes, formats)
                if formats[0]:
                    yield quantized_cache_write(name, lanes, formats, tokens=32)
    for numbers in (*GIVEN_NUMBERS, GIVEN_NUMBERS[-1] + 1):
        yield cache_update(numbers)
