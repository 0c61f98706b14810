"""CuPy as cuattn uses it, made of NumPy, with kernels run by the emulator.

It stands in for CuPy where tests run with ``--emulate``. Functions that are not here are NumPy's:
they compute on the host, at once, and their results become device arrays. What CuPy has and this
has not raises :class:`NotEmulated`.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
from cupy import _array, _tensormap, cuda
from cupy._array import (
    array,
    asarray,
    asnumpy,
    empty,
    forward,
    from_dlpack,
    full,
    ndarray,
    ones,
    zeros,
)
from cupy._errors import EmulationError, NotEmulated
from cupy._kernels import ElementwiseKernel, RawKernel, RawModule
from cupy._memory import get_default_memory_pool

__version__ = "14.0.0"
__all__ = [
    "ElementwiseKernel",
    "EmulationError",
    "NotEmulated",
    "RawKernel",
    "RawModule",
    "array",
    "asarray",
    "asnumpy",
    "cuda",
    "empty",
    "from_dlpack",
    "full",
    "get_array_module",
    "get_default_memory_pool",
    "matmul",
    "ndarray",
    "ones",
    "random",
    "testing",
    "zeros",
]


class _Functions(types.ModuleType):
    """A module of NumPy's, whose functions take and give device arrays."""

    def __getattr__(self, name: str) -> Any:
        return _function(getattr(importlib.import_module(f"numpy.{self.__name__}"), name))


def _function(found: Any) -> Any:
    if isinstance(found, types.ModuleType):
        return _Functions(found.__name__.removeprefix("numpy."))
    if isinstance(found, type) or not callable(found):
        return found
    return forward(found)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return _function(getattr(np, name))


class _Generator:
    """A generator of random numbers, as device arrays."""

    def __init__(self, seed: Any = None) -> None:
        self._generator = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return forward(getattr(self._generator, name))


matmul = forward(_array.matmul)
random, linalg = _Functions("random"), _Functions("linalg")
random.default_rng = _Generator


def get_array_module(*arrays: Any) -> types.ModuleType:
    return importlib.import_module("cupy" if any(type(a) is ndarray for a in arrays) else "numpy")


class testing:
    """``cupy.testing``: on copies on the host."""

    @staticmethod
    def assert_array_equal(a: Any, b: Any, **options: Any) -> None:
        np.testing.assert_array_equal(asnumpy(a), asnumpy(b), **options)

    @staticmethod
    def assert_allclose(
        a: Any, b: Any, rtol: float = 1e-7, atol: float = 0, **options: Any
    ) -> None:
        np.testing.assert_allclose(asnumpy(a), asnumpy(b), rtol, atol, **options)


_tensormap.install()
