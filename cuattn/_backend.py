"""The two backends, NumPy's (:mod:`cuattn.reference`) and CuPy's (:mod:`cuattn.gpu`): which one
computes a call, and copies of arguments that either of them makes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from cuattn._arrays import is_contiguous_last_axis, on_gpu

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def backend(xp: ModuleType, module: str) -> Any:
    """The `module` of cuattn.reference or cuattn.gpu that computes on arrays of `xp`.

    It is imported at the first call, since CuPy may not be installed.
    """
    return importlib.import_module(f"cuattn.{'reference' if xp is np else 'gpu'}.{module}")


def on_their_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Let a public function run with the GPU of its first array as the current device, where it
    then allocates its results."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in itertools.chain(args, kwargs.values()):
            if (array := on_gpu(given)) is not None:
                with backend(sys.modules["cupy"], "memory").use_device(array):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def contiguous(xp: ModuleType, array: Any, dtype: Any = None) -> Any:
    """Return `array`, or a copy of it where it is not C-contiguous or not of `dtype`: for the
    call's own use, and on a GPU in memory that :mod:`cuattn.gpu.memory` describes."""
    if xp is np:
        return np.ascontiguousarray(array, dtype)
    return backend(xp, "memory").contiguous(array, dtype)


def contiguous_last_axis(xp: ModuleType, array: Any, dtype: Any = None) -> Any:
    """Return `array`, or a copy as of :func:`contiguous` where its last axis is not contiguous, or
    it is not of `dtype`."""
    return array if is_contiguous_last_axis(array, dtype) else contiguous(xp, array, dtype)


def indices(xp: ModuleType, array: Any) -> Any:
    """Integers as int32, the last axis contiguous: `array`, or a copy as of :func:`contiguous` in
    which integers that do not fit are the nearest that do."""
    if is_contiguous_last_axis(array, np.int32):
        return array
    if xp is np:
        limits = np.iinfo(np.int32)
        return np.clip(array, limits.min, limits.max).astype(np.int32)
    return backend(xp, "memory").contiguous_int32(array)


def reshaped(xp: ModuleType, array: Any, shape: tuple[int, ...]) -> Any:
    """View `array` in another shape, or a copy as of :func:`contiguous` where no view has it."""
    return array.reshape(shape) if xp is np else backend(xp, "memory").reshaped(array, shape)


def folded_mask(xp: ModuleType, mask: Any, key_mask: Any) -> Any:
    """`mask`, which broadcasts to (batch, heads, seqlen_q, seqlen_k), and `key_mask` (batch,
    seqlen_k) as one mask; None where there is neither."""
    if key_mask is None:
        return mask
    key_mask = key_mask[:, None, None, :]
    if mask is None:
        return key_mask
    return mask & key_mask if xp is np else backend(xp, "memory").both(mask, key_mask)


def temporaries(xp: ModuleType) -> contextlib.AbstractContextManager:
    """A context for arrays of the call's own, as of :func:`cuattn.gpu.memory.temporaries`."""
    return contextlib.nullcontext() if xp is np else backend(xp, "memory").temporaries()
