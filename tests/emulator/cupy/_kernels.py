"""Kernels: modules, functions and launches, which the emulator runs from their PTX."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import itertools
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from cupy import _array, _build, _errors, _memory, _settings, _streams

MESSAGE_BYTES = 1 << 14
STATIC_SHARED_MEMORY = 48 << 10  # more has to be asked for
#: Most blocks of a grid and threads of a block, by axis.
GRID_LIMITS = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)
BLOCK_LIMITS = (1024, 1024, 64)
BLOCK_THREADS = 1024

#: CUDA's name of a dtype.
_CTYPES = {
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float32": "float",
    "float64": "double",
}


#: What CuPy makes of Python's numbers.
_SCALARS = {bool: np.bool_, int: np.int64, float: np.float64}


class CUDADriverError(RuntimeError):
    """An error of the CUDA driver."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def _invalid(message: str) -> CUDADriverError:
    return CUDADriverError(1, f"CUDA_ERROR_INVALID_VALUE: {message}")


@functools.cache
def emulator() -> ctypes.CDLL:
    """The emulator's functions, once it has been told of all device memory."""
    library = ctypes.CDLL(str(_build.shared_object()))
    library.emu_load.restype = ctypes.c_void_p
    library.emu_load.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    library.emu_launch.restype = ctypes.c_int
    library.emu_launch.argtypes = (
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_uint * 3,
        ctypes.c_uint * 3,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
    )
    library.emu_unload.restype = None
    library.emu_unload.argtypes = (ctypes.c_void_p,)
    library.emu_memory.restype = None
    library.emu_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _memory.watch(lambda address, nbytes, new: library.emu_memory(address, nbytes, int(new)))
    return library


@dataclasses.dataclass(frozen=True)
class _Handle:
    """A function as the driver knows it."""

    ptr: int


class Function:
    """A kernel of a module.

    Attributes
    ----------
    kernel : object
        Its `ptr` is what ``cupy.cuda.driver.launchKernel`` takes.
    max_dynamic_shared_size_bytes : int
        What a launch may ask for, beside static shared memory.
    """

    def __init__(self, module: _Module, entry: str) -> None:
        found = re.search(
            rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)(.*?)\n\{{(.*?)\n\}}", module.ptx, re.DOTALL
        )
        if found is None:
            raise CUDADriverError(500, f"CUDA_ERROR_NOT_FOUND: named symbol {entry} not found")
        self.name, self._module = entry, module
        self._parameters = [_param_bytes(text) for text in found[1].split(",") if text.strip()]
        self.kernel = _Handle(next(_numbers))
        self._dynamic_limit = STATIC_SHARED_MEMORY
        _functions[self.kernel.ptr] = self

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._dynamic_limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        limit = _settings.current().shared_memory
        if nbytes > limit:
            raise _invalid(f"{nbytes} bytes of dynamic shared memory, at most {limit}")
        self._dynamic_limit = nbytes

    def __getattr__(self, name: str) -> Any:
        if name in ("num_regs", "local_size_bytes", "shared_size_bytes", "attributes"):
            raise _errors.NotEmulated(f"{name} of kernels")
        raise AttributeError(name)

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: Any = None,
        **options: Any,
    ) -> None:
        """Launch with arrays, scalars and structs by value, as CuPy takes them."""
        if options:
            raise _errors.NotEmulated(f"launches with {', '.join(options)}")
        values = [_bytes_of(argument) for argument in args]
        if len(values) != len(self._parameters):
            raise _errors.EmulationError(
                f"{self.name} takes {len(self._parameters)} arguments, is given {len(values)}"
            )
        for i, (value, size) in enumerate(zip(values, self._parameters, strict=True)):
            if len(value) != size:
                raise _errors.EmulationError(
                    f"{self.name}: argument {i} has {len(value)} bytes, must have {size}"
                )
        _streams.keep(args)
        table = _Table(values)
        shape = [(*map(int, axes), 1, 1)[:3] for axes in (grid, block)]
        self.launch(*shape, int(shared_mem), table.address)

    def launch(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int, address: int
    ) -> None:
        """Launch with a table of the arguments' addresses.

        Raises
        ------
        CUDADriverError
            No GPU takes such a launch.
        EmulationError
            The kernel fails.
        """
        for axes, limits, what in ((grid, GRID_LIMITS, "grid"), (block, BLOCK_LIMITS, "block")):
            if not all(1 <= n <= limit for n, limit in zip(axes, limits, strict=True)):
                raise _invalid(f"{self.name}: {what} {axes}")
        if math.prod(block) > BLOCK_THREADS:
            raise _invalid(f"{self.name}: block {block}")
        if shared_mem > self._dynamic_limit:
            raise _invalid(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory, {self._dynamic_limit} "
                "were asked for"
            )
        if _streams.is_capturing():
            pointers = (ctypes.c_void_p * len(self._parameters)).from_address(address)
            table = _Table(
                [
                    ctypes.string_at(pointer, size)
                    for pointer, size in zip(pointers, self._parameters, strict=True)
                ]
            )
            _streams.enqueue(lambda: self._module.run(self, grid, block, shared_mem, table.address))
        else:
            self._module.run(self, grid, block, shared_mem, address)


def _param_bytes(declared: str) -> int:
    """Bytes of ``.param .align 64 .b8 name[n]``, or of ``.param .u64 name``."""
    kind = re.search(r"\.([busf])(8|16|32|64)\b", declared)
    count = re.search(r"\[(\d+)\]", declared)
    return int(kind[2]) // 8 * (int(count[1]) if count else 1)


def _bytes_of(argument: Any) -> bytes:
    if type(argument) is _array.ndarray:
        return argument.data.ptr.to_bytes(8, "little")
    if isinstance(argument, _memory.MemoryPointer):
        return argument.ptr.to_bytes(8, "little")
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if type(argument) in _SCALARS:
        return _SCALARS[type(argument)](argument).tobytes()
    raise TypeError(f"unsupported type of a kernel's argument: {type(argument)}")


class _Table:
    """Arguments in memory, and the table of their addresses."""

    def __init__(self, values: list[bytes]) -> None:
        offsets = list(itertools.accumulate((-(-len(v) // 64) * 64 for v in values), initial=64))
        memory = np.zeros(offsets[-1] + 64, np.uint8)
        begin = -memory.ctypes.data % 64
        self._memory = memory
        places = [memory.ctypes.data + begin + offset for offset in offsets]
        for value, place in zip(values, places, strict=False):
            ctypes.memmove(place, value, len(value))
        self._pointers = (ctypes.c_void_p * max(1, len(values)))(*places[: len(values)])
        self.address = ctypes.addressof(self._pointers)


class _Module:
    """PTX that the emulator has loaded; it loads it at the first launch."""

    def __init__(self, text: str) -> None:
        self.ptx = text
        self._loaded: int | None = None

    def run(
        self,
        function: Function,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_mem: int,
        arguments: int,
    ) -> None:
        library, settings = emulator(), _settings.current()
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        with _lock:
            if self._loaded is None:
                self._loaded = library.emu_load(self.ptx.encode(), message, MESSAGE_BYTES)
                if not self._loaded:
                    raise _errors.EmulationError(f"{function.name}: {_text(message)}")
            failed = library.emu_launch(
                self._loaded,
                function.name.encode(),
                (ctypes.c_uint * 3)(*grid),
                (ctypes.c_uint * 3)(*block),
                shared_mem,
                arguments,
                settings.multiprocessors,
                settings.options.encode(),
                message,
                MESSAGE_BYTES,
            )
        launches[function.name] += 1
        if failed:
            raise _errors.EmulationError(
                f"{function.name}, grid {grid}, block {block}, {shared_mem} bytes of dynamic "
                f"shared memory: {_text(message)}"
            )
        _memory.check_ends()


def _text(message: Any) -> str:
    return message.value.decode(errors="replace")


_lock = threading.Lock()
#: How often each kernel was launched, by its name.
launches: collections.Counter[str] = collections.Counter()
_numbers = itertools.count(1 << 24, 64)
_functions: dict[int, Function] = {}


@functools.lru_cache(maxsize=256)
def _module(code: str, options: tuple[str, ...]) -> _Module:
    return _Module(_build.ptx(code, options))


class RawModule:
    """CUDA C++ with kernels, compiled when a kernel of it is asked for."""

    def __init__(self, *, code: str, options: tuple[str, ...] = (), **others: Any) -> None:
        from cuattn.gpu import compiler  # which imports CuPy, when it needs it

        if others.pop("backend", "nvrtc") != "nvrtc" or any(others.values()):
            raise _errors.NotEmulated(f"modules with {', '.join(others)}")
        if not any("-arch" in option for option in options):
            options = (*options, "-arch=sm_{}{}".format(*_settings.current().capability))
        if any(word in _settings.current().options for word in ("races", "initcheck")):
            options = (*options, "-lineinfo")  # reports name lines of the source
        self.code, self.options = code, (*options, *compiler.CUPY_OPTIONS)

    def compile(self, log_stream: Any = None) -> None:
        _module(self.code, self.options)

    def get_function(self, name: str) -> Function:
        return Function(_module(self.code, self.options), name)


def RawKernel(code: str, name: str, options: tuple[str, ...] = (), **others: Any) -> Function:
    """A kernel of CUDA C++."""
    return RawModule(code=code, options=options, **others).get_function(name)


class ElementwiseKernel:
    """An expression of arrays of one shape, for all their elements."""

    def __init__(
        self, in_params: str, out_params: str, operation: str, name: str = "kernel", **others: Any
    ) -> None:
        if others:
            raise _errors.NotEmulated(f"elementwise kernels with {', '.join(others)}")
        self.name = name
        self._inputs, self._outputs = (
            [param.split() for param in params.split(",")] for params in (in_params, out_params)
        )
        self._operation = operation

    def __call__(self, *args: Any) -> Any:
        params = self._inputs + self._outputs
        arrays = np.broadcast_shapes(*(a.shape for a in args))
        inputs = [
            _array.forward(np.ascontiguousarray)(_array.forward(np.broadcast_to)(a, arrays))
            for a in args[: len(self._inputs)]
        ]
        outputs = list(args[len(self._inputs) :])
        for _, (kind, _name) in zip(outputs, self._outputs, strict=True):
            np.dtype(kind)
        given = [*inputs, *outputs]
        typedefs = "".join(
            f"typedef {_CTYPES[array.dtype.name]} {kind};\n"
            for array, (kind, _) in zip(given, params, strict=True)
            if kind not in _CTYPES
        )
        places = ", ".join(
            f"{_CTYPES[array.dtype.name]}* {name}_"
            for array, (_, name) in zip(given, params, strict=True)
        )
        elements = "".join(f"auto& {name} = {name}_[i]; " for _, name in params)
        function = RawKernel(
            f'{typedefs}extern "C" __global__ void {self.name}({places}, long long n) {{\n'
            "  const long long i = blockIdx.x * 128ll + threadIdx.x;\n"
            f"  if (i < n) {{ {elements}{self._operation}; }}\n}}\n",
            self.name,
            ("-std=c++17",),
        )
        if not all(array.flags.c_contiguous for array in outputs):
            raise _errors.NotEmulated("elementwise kernels with results of any strides")
        if given[0].size:
            blocks = -(-given[0].size // 128)
            function((blocks,), (128,), (*given, np.int64(given[0].size)))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def launch_kernel(
    handle: int,
    grid_x: int,
    grid_y: int,
    grid_z: int,
    block_x: int,
    block_y: int,
    block_z: int,
    shared_mem: int,
    stream: int,
    arguments: int,
    extra: int,
) -> None:
    """As of ``cuLaunchKernel``."""
    grid, block = (grid_x, grid_y, grid_z), (block_x, block_y, block_z)
    _functions[handle].launch(grid, block, shared_mem, arguments)
