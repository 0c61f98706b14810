"""How a paged cache stores keys and values: the formats, and where their parts lie in a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cuattn._arrays import as_arrays, check_bool, check_integer
from cuattn._quantized import (
    BFLOAT16,
    FLOAT32,
    FORMATS,
    QuantizedArray,
    check_format,
    code_columns,
)

#: Sections of a page begin at multiples of this, and pages of the second, in bytes.
SECTION_ALIGNMENT = 16
PAGE_ALIGNMENT = 128


@dataclasses.dataclass(frozen=True, eq=False)
class KVQuantization:
    """How a :class:`cuattn.PagedKVCache` stores keys and values as codes.

    A token is quantised once, when it is written: with a scale of its own for each head (or for
    each group of its features), or with scales that are given here, which were found before.

    Parameters
    ----------
    k, v : str or None
        Formats as in :func:`cuattn.quantize`; ``"int4"`` has minima (asymmetric). None: as they
        are.
    group_size : int, optional
        Features that share a scale; default all of a head. Must divide head_dim and head_dim_v.
    rotate_k : bool, optional
        Rotate keys as :func:`cuattn.quantize` does; default True for ``"int8"`` and ``"int4"``,
        which it brings nearer to what was written, False for floats.
    k_offset : float32 array (num_kv_heads, head_dim), optional
        Subtracted from keys before, and part of every score again: what all keys of a head have in
        common. With num_layers before, one for each layer.
    k_scale : float32 or bfloat16 array (num_kv_heads, 1) or (num_kv_heads, head_dim), optional
        Scales of keys, above 0, the same for all tokens, by head or by channel; ``"int4"`` is then
        symmetric. With num_layers before, one for each layer.
    v_scale : float32 or bfloat16 array (num_kv_heads, 1) or (num_kv_heads, head_dim_v), optional
        Likewise of values.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cuattn.KVQuantization(k="int8", v="int4")
    KVQuantization(k='int8', v='int4')
    """

    k: str | None = "int8"
    v: str | None = "int8"
    _: dataclasses.KW_ONLY
    group_size: int | None = None
    rotate_k: bool | None = None
    k_offset: Any = None
    k_scale: Any = None
    v_scale: Any = None

    def __post_init__(self) -> None:
        name = "KVQuantization"
        checked: dict[str, Any] = {}
        for label, format in (("k", self.k), ("v", self.v)):
            if format is not None:
                check_format(name, format, label)
                checked[label] = str(format)
            elif getattr(self, f"{label}_scale") is not None:
                raise ValueError(f"{name}: {label} is None, so {label}_scale must be None")
        if self.k is None and (self.rotate_k or self.k_offset is not None):
            raise ValueError(f"{name}: k is None, so rotate_k and k_offset must be None")
        if self.group_size is not None:
            checked["group_size"] = check_integer(name, "group_size", self.group_size)
        if self.rotate_k is not None:
            checked["rotate_k"] = check_bool(name, "rotate_k", self.rotate_k)
        for label in ("k_offset", "k_scale", "v_scale"):
            if getattr(self, label) is not None:
                _, (array,) = as_arrays(name, **{label: getattr(self, label)})
                if label != "k_offset" and isinstance(array, np.ndarray) and (array <= 0).any():
                    raise ValueError(f"{name}: {label} has {array.min()}, must be above 0")
                checked[label] = array.copy()  # the caller's may change, and codes stay
        for label, value in checked.items():  # plain numbers and arrays, which can be saved
            object.__setattr__(self, label, value)

    def is_like(self, other: KVQuantization | None) -> bool:
        """Whether codes of one cache mean the same in another."""
        if other is None:
            return False
        for field in dataclasses.fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            if (a is None) != (b is None) or a is None:
                if a is not b:
                    return False
            elif not np.array_equal(np.asarray(on_host(a)), np.asarray(on_host(b))):
                return False
        return True

    def as_saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Its arguments as JSON and as arrays, which are float32 in a file."""
        numbers, arrays = {}, {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if hasattr(value, "shape"):
                arrays[field.name] = on_host(value).astype(np.float32)
            else:
                numbers[field.name] = value
        return numbers, arrays

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        shown = ", ".join(
            f"{name}={value!r}" if not hasattr(value, "shape") else f"{name}=array{value.shape}"
            for name, value in given
            if value is not None or name in "kv"
        )
        return f"KVQuantization({shown})"


def on_host(array: Any) -> Any:
    """The same on the host, if it is an array on a GPU."""
    return array.get() if hasattr(array, "get") else array


#: Formats by the names that a cache takes.
PRESETS = {format: KVQuantization(format, format) for format in FORMATS} | {
    "k8v4": KVQuantization("int8", "int4")
}


def as_quantization(function: str, given: Any, *, joined: bool) -> KVQuantization | None:
    """Check `quantization` of a cache. In one of `joined` rows keys stay as they are."""
    if isinstance(given, KVQuantization) and joined and given.k is not None:
        raise ValueError(
            f"{function}: quantization is {given!r}, must have k=None with joined=True: what is "
            "rotated stays as it is"
        )
    if given is None or isinstance(given, KVQuantization):
        return given
    if joined and isinstance(given, str) and given in FORMATS:
        return KVQuantization(None, given)
    preset = PRESETS.get(given) if isinstance(given, str) and not joined else None
    if preset is None:
        names = ", ".join(f'"{known}"' for known in (FORMATS if joined else PRESETS))
        raise ValueError(
            f"{function}: quantization is {given!r}, must be one of {names}, or a KVQuantization"
        )
    return preset


@dataclasses.dataclass(frozen=True)
class Side:
    """How keys, or values, of all layers lie in pages of bytes.

    Attributes
    ----------
    format : str
        "" where they are stored as they are, as `dtype`.
    groups : int
        Scales of a token and head; 0 where they are given.
    has_minimum, rotated : bool
        As of QuantizedArray.
    scale, offset : array or None
        What all tokens share: (num_layers, num_kv_heads, 1 or head_dim), (num_layers,
        num_kv_heads, head_dim).
    """

    format: str
    dtype: np.dtype
    heads: int
    head_dim: int
    groups: int = 0
    has_minimum: bool = False
    rotated: bool = False
    scale: Any = None
    offset: Any = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's codes, or numbers."""
        if not self.format:
            return self.heads * self.head_dim * self.dtype.itemsize
        return self.heads * code_columns(self.format, self.head_dim)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales and minima, which are bfloat16."""
        return self.heads * self.groups * 2 * (2 if self.has_minimum else 1)


def sides(
    function: str,
    xp: ModuleType,
    quantization: KVQuantization,
    dtype: np.dtype,
    layers: int,
    heads: int,
    head_dims: tuple[int, int],
) -> tuple[Side, Side]:
    """How keys and values lie, by what was asked for; arrays become those of `xp`."""
    made = []
    formats = quantization.k, quantization.v
    for label, format, head_dim in zip("kv", formats, head_dims, strict=True):
        if format is None:
            made.append(Side("", dtype, heads, head_dim))
            continue
        if format == "int4" and head_dim % 2:
            raise ValueError(
                f"{function}: head_dim of {label} is {head_dim}, must be even for int4, which has "
                "two in a byte"
            )
        group = head_dim if quantization.group_size is None else quantization.group_size
        if group < 1 or head_dim % group:
            raise ValueError(
                f"{function}: quantization has group_size {group}, must divide {label}'s head_dim "
                f"{head_dim}"
            )
        scale = _shared(
            function, xp, f"{label}_scale", getattr(quantization, f"{label}_scale"), layers, heads,
            (1, head_dim), (BFLOAT16, FLOAT32),
        )  # fmt: skip
        offset, rotated = None, False
        if label == "k":
            rotated = format in ("int8", "int4")
            if quantization.rotate_k is not None:
                rotated = quantization.rotate_k
            offset = _shared(
                function, xp, "k_offset", quantization.k_offset, layers, heads, (head_dim,),
                (FLOAT32,),
            )  # fmt: skip
        made.append(
            Side(
                format,
                dtype,
                heads,
                head_dim,
                groups=0 if scale is not None else head_dim // group,
                has_minimum=format == "int4" and scale is None,
                rotated=rotated,
                scale=scale,
                offset=offset,
            )
        )
    k, v = made
    return k, v


def _shared(
    function: str,
    xp: ModuleType,
    label: str,
    given: Any,
    layers: int,
    heads: int,
    columns: tuple[int, ...],
    dtypes: tuple[np.dtype, ...],
) -> Any:
    """What all tokens share, checked, as a contiguous array (layers, heads, columns) of `xp`."""
    if given is None:
        return None
    given_xp, (array,) = as_arrays(function, **{f"quantization.{label}": given})
    shapes = [(*lead, heads, n) for lead in ((), (layers,)) for n in columns]
    if array.shape not in shapes or array.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        allowed = " or ".join(map(str, shapes))
        raise ValueError(
            f"{function}: quantization.{label} has shape {array.shape} and dtype {array.dtype}, "
            f"must be {allowed} and {names}"
        )
    if given_xp is not xp:
        array = xp.asarray(array if given_xp is np else array.get())
    return xp.ascontiguousarray(xp.broadcast_to(array, (layers, *array.shape[-2:])))


class PageLayout:
    """Where the parts of a page lie: codes of keys, codes of values, their scales; or rows of a
    value and a key, then the scales.

    Parameters
    ----------
    k, v : Side
        What keys and values are.
    page_size : int
        Tokens in a page.
    joined : bool
        Whether a token's value and its key are one row.
    """

    def __init__(self, k: Side, v: Side, page_size: int, *, joined: bool) -> None:
        self.k, self.v = k, v
        self.page_size = page_size
        rows = [k.token_bytes, v.token_bytes]
        first = [0, _aligned(k.token_bytes * page_size)]
        end = first[1] + _aligned(v.token_bytes * page_size)
        if joined:
            first = [_aligned(v.token_bytes), 0]
            rows = [_aligned(first[0] + k.token_bytes)] * 2
            end = rows[0] * page_size
        self._rows, self._codes_at = rows, first
        self._scales_at = []
        for size in (k.scale_bytes, v.scale_bytes):
            self._scales_at.append(end)
            end += _aligned(size * page_size)
        self.page_bytes = -(-end // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    def layers(self, xp: ModuleType, memory: Any) -> list[tuple[Any, Any]]:
        """Each layer's keys and values, as views of `memory`: uint8 (num_layers, num_pages,
        page_bytes)."""
        pairs = (self._views(xp, memory, of, side) for side, of in enumerate((self.k, self.v)))
        return list(zip(*pairs, strict=True))

    def _views(self, xp: ModuleType, memory: Any, of: Side, side: int) -> list[Any]:
        """Each layer's keys (`side` 0), or values (1)."""
        heads, slots = of.heads, self.page_size
        storage, columns = of.dtype, of.head_dim
        if of.format:
            storage, columns = FORMATS[of.format].storage, code_columns(of.format, columns)
        codes = _view(
            xp, memory, self._codes_at[side], storage, (slots, heads, columns), self._rows[side]
        )
        if not of.format:
            return list(codes)
        scale, minimum = of.scale, None
        if scale is not None:
            scale = scale[:, None, None]
        else:
            parts = 2 if of.has_minimum else 1
            shape = (heads, slots, of.groups, parts)
            words = _view(xp, memory, self._scales_at[side], BFLOAT16, shape)
            words = words.swapaxes(2, 3)
            scale, minimum = words[..., 0], words[..., 1] if of.has_minimum else None
        return [
            QuantizedArray(
                codes[layer],
                scale[layer],
                dtype=of.format,
                minimum=None if minimum is None else minimum[layer],
                offset=None if of.offset is None else of.offset[layer],
                rotation="hadamard" if of.rotated else None,
                like=of.dtype,
            )
            for layer in range(len(memory))
        ]


def _aligned(size: int) -> int:
    """Bytes of what is followed by something else."""
    return -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


def _view(
    xp: ModuleType,
    memory: Any,
    at: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    row: int | None = None,
) -> Any:
    """A part of each page of `memory`, as an array (num_layers, num_pages, *shape), which begins
    `at` bytes from the page's beginning; `row` bytes from one to the next along its first axis, by
    default as many as it has."""
    strides = [dtype.itemsize]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * n)
    if row is not None:
        strides[-1] = row
    arguments: Mapping[str, Any] = {
        "shape": (*memory.shape[:2], *shape),
        "dtype": dtype,
        "strides": (*memory.strides[:2], *strides[::-1]),
    }
    if xp is np:
        return np.ndarray(buffer=memory, offset=at, **arguments)
    return xp.ndarray(memptr=memory[..., at:].data, **arguments)
