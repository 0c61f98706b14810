"""Rotary position embeddings: the public function."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping
from typing import Any, overload

import numpy as np

from cuattn._arrays import (
    FLOAT_DTYPES,
    as_arrays,
    check_bool,
    check_given,
    check_index_dtype,
    check_integer,
    check_out,
    is_contiguous_last_axis,
)
from cuattn._backend import backend, contiguous_last_axis, reshaped
from cuattn._errors import explain_errors
from cuattn._typing import Array, NumPyArray, RopeScaling

__all__ = ["rope"]

_PI = np.longdouble("3.14159265358979323846264338327950288")
MAX_ROTARY_DIM = 512  # twice kMaxPairs of rawkernels/positions/rope.cu


@overload
def rope(
    x: NumPyArray,
    positions: Array,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    out: Array | None = None,
) -> NumPyArray: ...


@overload
def rope(
    x: Array,
    positions: Array,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    out: Array | None = None,
) -> Any: ...


@explain_errors
def rope(
    x: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Any = None,
    out: Any = None,
) -> Any:
    """Rotate queries or keys by the positions of their tokens (RoPE) [1]_.

    Pair ``i`` of a token at position ``p`` turns by the angle ``p * f_i`` with ``f_i = base ** (-2
    i / rotary_dim)``: ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``. Scores of rotated
    queries and keys depend on the distance of their positions alone. Angles are computed in units
    of 2**-64 of a turn, which wrap around without rounding, and are rounded once: up to position
    2**31 they are within 1e-9 of exact ones, whatever the dtype.

    Parameters
    ----------
    x : array (..., seqlen, heads, head_dim)
        Queries or keys: float16, bfloat16, float32 or float64; any leading axes, or none.
    positions : int32 or int64 array
        Of the tokens; broadcasts to (..., seqlen). May be negative, which turns back.
    base : float
        Positive.
    rotary_dim : int, optional
        How many of the first features are rotated: even, from 2 to head_dim and to 512; default
        head_dim. The others are copied.
    interleaved : bool
        Pairs are neighbours, features ``2 i`` and ``2 i + 1`` (GPT-J's), and not ``i`` and ``i +
        rotary_dim / 2`` (GPT-NeoX's, Llama's in Hugging Face's layout).
    scaling : dict, optional
        For contexts longer than the model was trained on, named as in a model's ``config.json``:
        ``rope_type`` and the numbers that it needs, with ``L =
        original_max_position_embeddings``. Other entries are an error.

        - ``"linear"``: ``factor``. ``f_i / factor`` [2]_.
        - ``"ntk"``: ``factor``. `base` becomes ``base * factor ** (rotary_dim / (rotary_dim -
          2))`` [3]_, so that the last pair turns as with ``"linear"`` and the first as without.
        - ``"yarn"``: ``factor``, ``original_max_position_embeddings``, and optionally
          ``beta_fast`` (32), ``beta_slow`` (1), ``attention_factor`` and ``truncate`` (True).
          ``f_i`` where a pair makes more than beta_fast turns in L tokens, ``f_i / factor`` where
          it makes fewer than beta_slow, and between them a mean that is linear in i: from pair
          ``low = d(beta_fast)`` to ``high = d(beta_slow)`` with ``d(n) = rotary_dim ln(L / (2 pi
          n)) / (2 ln base)``, rounded down and up where `truncate` is True. Sines and cosines
          are multiplied by attention_factor, by default ``0.1 ln(factor) + 1`` [4]_.
        - ``"llama3"``: ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
          ``original_max_position_embeddings``. With ``n = L f_i / (2 pi)`` turns in L tokens:
          ``f_i`` where n is above high_freq_factor, ``f_i / factor`` where it is below
          low_freq_factor, and between them ``(1 - t) f_i / factor + t f_i`` with ``t = (n -
          low_freq_factor) / (high_freq_factor - low_freq_factor)`` [5]_.

    out : array of x's shape and dtype, optional
        Written to and returned; it may be x.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    .. [2] Chen et al., "Extending Context Window of Large Language Models via Positional
       Interpolation", 2023.
    .. [3] bloc97, "NTK-Aware Scaled RoPE", 2023; Peng et al. [4]_, section 3.1.
    .. [4] Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023,
       sections 3.2 to 3.4.
    .. [5] Grattafiori et al., "The Llama 3 Herd of Models", 2024; the formula is that of Meta's
       reference code for Llama 3.1.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.random.default_rng(0).standard_normal((2, 16, 8, 64), dtype=np.float32)
    >>> turned = cuattn.rope(q, np.arange(16))
    >>> bool(np.allclose(cuattn.rope(turned, -np.arange(16)), q, atol=1e-6))
    True
    """
    name = "rope"
    check_given(name, x=x, positions=positions)
    xp, (x, positions, out) = as_arrays(name, x=x, positions=positions, out=out)
    if x.ndim < 3:
        raise ValueError(f"{name}: x has shape {x.shape}, must be (..., seqlen, heads, head_dim)")
    if x.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(FLOAT_DTYPES.values())
        raise TypeError(f"{name}: x has dtype {x.dtype}, must be one of {allowed}")
    check_index_dtype(name, "positions", positions)
    *_, seqlen, heads, head_dim = x.shape
    tokens = x.shape[:-2]
    try:
        positions = xp.broadcast_to(positions, tokens)
    except ValueError:
        raise ValueError(
            f"{name}: positions has shape {positions.shape}, which must broadcast to "
            f"(..., seqlen) = {tokens}; x is (..., seqlen, heads, head_dim)"
        ) from None
    largest = min(head_dim, MAX_ROTARY_DIM)
    rotary_dim = head_dim if rotary_dim is None else check_integer(name, "rotary_dim", rotary_dim)
    if rotary_dim % 2 or not 2 <= rotary_dim <= largest:
        raise ValueError(
            f"{name}: rotary_dim is {rotary_dim}, must be even and from 2 to {largest}"
        )
    turns, scale = _turns(rotary_dim, _positive(name, "base", base), _scaling_items(name, scaling))
    interleaved = check_bool(name, "interleaved", interleaved)
    batch = math.prod(tokens[:-1])
    target = None
    if out is not None:
        check_out(name, out, x.shape, x.dtype)
        if out.flags.c_contiguous or (out.ndim == 4 and is_contiguous_last_axis(out)):
            target = out.reshape(batch, seqlen, heads, head_dim)
    result = (
        backend(xp, "positions")
        .rope(
            reshaped(xp, contiguous_last_axis(xp, x), (batch, seqlen, heads, head_dim)),
            reshaped(xp, positions, (batch, seqlen)),
            turns,
            scale,
            interleaved,
            target,
        )
        .reshape(x.shape)
    )
    if out is None:
        return result
    if target is None:
        out[...] = result
    return out


#: What each kind of scaling needs, and what it may be given.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}


def _scaling_items(function: str, scaling: Any) -> tuple[tuple[str, Any], ...]:
    """Check `scaling`; its entries in order, which can be hashed."""
    if scaling is None:
        return ()
    if not isinstance(scaling, Mapping):
        raise TypeError(f"{function}: scaling is {scaling!r}, must be a dict or None")
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        given = "rope_type" in scaling
        wrong = f"rope_type {kind!r}, must be" if given else "no rope_type, must have"
        raise ValueError(f"{function}: scaling has {wrong} one of {', '.join(_KINDS)}")
    needed, possible = _KINDS[kind]
    if missing := [key for key in needed if key not in scaling]:
        raise ValueError(f"{function}: scaling of rope_type {kind} must have {', '.join(missing)}")
    items: dict[str, Any] = {"rope_type": kind}
    for key, value in scaling.items():
        if key == "rope_type":
            continue
        if key not in needed + possible:
            raise ValueError(
                f"{function}: scaling has {key!r}, which rope_type {kind} does not; it has "
                f"{', '.join(needed + possible)}"
            )
        label = f"scaling's {key}"
        items[key] = (
            check_bool(function, label, value)
            if key == "truncate"
            else _positive(function, label, value)
        )
    if kind == "llama3" and not items["low_freq_factor"] < items["high_freq_factor"]:
        raise ValueError(
            f"{function}: scaling's low_freq_factor is {items['low_freq_factor']}, must be below "
            f"high_freq_factor, {items['high_freq_factor']}"
        )
    return tuple(sorted(items.items()))


def _positive(function: str, name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a number, got {value!r}")
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{function}: {name} is {number}, must be positive and finite")
    return number


@functools.lru_cache(maxsize=256)
def _turns(
    rotary_dim: int, base: float, scaling: tuple[tuple[str, Any], ...]
) -> tuple[tuple[int, ...], float]:
    """The part of a turn that each pair makes from one position to the next, in units of 2**-64,
    and the factor of sines and cosines."""
    options = dict(scaling)
    kind, factor = options.get("rope_type"), options.get("factor", 1.0)
    # In more than float64 where there is more: a frequency's error grows with the position.
    pairs = np.arange(rotary_dim // 2, dtype=np.longdouble)
    wide_base: Any = np.longdouble(base)
    if kind == "ntk" and rotary_dim > 2:
        wide_base *= np.longdouble(factor) ** (np.longdouble(rotary_dim) / (rotary_dim - 2))
    frequencies = wide_base ** (-2 * pairs / rotary_dim)
    scale = 1.0
    if kind == "linear":
        frequencies = frequencies / factor
    elif kind in ("yarn", "llama3"):
        length = options["original_max_position_embeddings"]
        if kind == "yarn":
            unchanged = 1 - _yarn_ramp(pairs, rotary_dim, base, length, options)
            scale = options.get("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0)
        else:
            low, high = options["low_freq_factor"], options["high_freq_factor"]
            unchanged = np.clip((length * frequencies / (2 * _PI) - low) / (high - low), 0, 1)
        frequencies = unchanged * frequencies + (1 - unchanged) * frequencies / factor
    fractions = (frequencies / (2 * _PI)) % 1
    return tuple(int(fraction * 2**64) for fraction in fractions), float(scale)


def _yarn_ramp(
    pairs: np.ndarray, rotary_dim: int, base: float, length: float, options: dict[str, Any]
) -> np.ndarray:
    """How far each pair is from turning as without scaling (0) to turning as with "linear" (1)."""

    def pair_of(turns: float) -> Any:
        """The pair, not rounded, that makes so many turns in `length` tokens."""
        return rotary_dim * np.log(length / (2 * _PI * turns)) / (2 * np.log(np.longdouble(base)))

    low, high = pair_of(options.get("beta_fast", 32.0)), pair_of(options.get("beta_slow", 1.0))
    if options.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
