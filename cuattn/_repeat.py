"""Calls like an earlier one, which need no checks and no choice of a kernel: they go straight to
the launch that the earlier one made.

What a call on a GPU does follows from its options and from its arrays' shapes, strides, dtypes,
devices and addresses modulo 16, never from what arrays hold. These are the key of a dictionary of
launches. A call whose key is not there takes the ordinary way, with all its checks, and is recorded
by :mod:`cuattn.gpu.repeat`; there what cannot be repeated is told from what can.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

MOST_CALLS = 4096  # that are remembered of each function
END_OF_SEEDS = 1 << 64

_PLAIN = frozenset({bool, int, float, str, type(None)})
_known: list[dict[tuple, Callable[..., Any]]] = []
_ndarray: Any = None  # cupy.ndarray, once a call has gone to a GPU
_memory: Any = None  # and cuattn.gpu.memory


def repeated(
    *, seeds: tuple[str, ...] = (), fresh: str = "", **sources: str | tuple[str, ...]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a public function remember its launches.

    Parameters
    ----------
    seeds : tuple of str
        Keywords of 64-bit numbers that kernels take as they are, by the keyword's name with
        ``_value``: calls that differ in these numbers alone share a launch.
    fresh : str
        The one of these that is drawn anew at each call where it is None.
    **sources : str or tuple of str
        The parameter from which a kernel has an array or a number, by the kernel's name for it,
        where that is another; of several the first that is given.
    """
    parameters_of = {
        name: (given,) if isinstance(given, str) else given for name, given in sources.items()
    }

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = tuple(inspect.signature(function).parameters)
        known: dict[tuple, Callable[..., Any]] = {}
        _known.append(known)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            ndarray = _ndarray
            if ndarray is None:
                result = function(*args, **kwargs)
                _connect()
                return result
            if fresh and args and type(args[0]) is ndarray and kwargs.get(fresh) is None:
                if _memory.capturing():  # where it must be given
                    return function(*args, **kwargs)
                kwargs[fresh] = int.from_bytes(os.urandom(8), "little")
            key: list[Any] = []
            numbers: list[int] = []  # addresses and seeds, in the order of the arguments
            low = 0  # bits of any address
            for value in args:
                kind = type(value)
                if kind is ndarray:
                    data = value.data
                    address = data.ptr
                    numbers.append(address)
                    low |= address
                    key += (value.shape, value.strides, value.dtype.num, data.device_id)
                elif kind in _PLAIN:
                    key += (kind, value)
                else:
                    return function(*args, **kwargs)
            for name, value in kwargs.items():
                kind = type(value)
                if kind is ndarray:
                    data = value.data
                    address = data.ptr
                    numbers.append(address)
                    low |= address
                    key += (name, value.shape, value.strides, value.dtype.num, data.device_id)
                elif name in seeds and kind is int:
                    if not 0 <= value < END_OF_SEEDS:
                        return function(*args, **kwargs)
                    numbers.append(value)
                    key.append(name)
                elif kind in _PLAIN:
                    key += (name, kind, value)
                elif kind is tuple and _PLAIN.issuperset(kinds := tuple(map(type, value))):
                    key += (name, kinds, value)
                else:
                    return function(*args, **kwargs)
            if low & 15:
                arrays = (a for a in (*args, *kwargs.values()) if type(a) is ndarray)
                key += [array.data.ptr & 15 for array in arrays]
            whole = tuple(key)
            repeat = known.get(whole)
            if repeat is not None:
                result = repeat(numbers, kwargs)
                return function(*args, **kwargs) if result is None else result
            if len(known) >= MOST_CALLS:
                known.clear()
            given = {
                name if type(value) is ndarray else f"{name}_value": value
                for name, value in (*zip(parameters, args, strict=False), *kwargs.items())
                if type(value) is ndarray or (name in seeds and type(value) is int)
            }
            result, known[whole] = importlib.import_module("cuattn.gpu.repeat").record(
                lambda: function(*args, **kwargs), given, parameters_of, kwargs
            )
            return result

        return cast("Callable[P, R]", call)

    return decorate


def forget() -> None:
    """Let all calls take the ordinary way once more."""
    for known in _known:
        known.clear()


def _connect() -> None:
    """Begin to remember calls, once there has been one on a GPU."""
    global _ndarray, _memory
    if "cuattn.gpu.plan" in sys.modules and not sys.modules["cuattn.gpu.debug"].ENABLED:
        _memory = sys.modules["cuattn.gpu.memory"]
        _ndarray = sys.modules["cupy"].ndarray
