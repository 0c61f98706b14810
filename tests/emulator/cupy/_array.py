"""``cupy.ndarray``: an array in device memory, on which NumPy computes."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from cupy import _memory, _streams

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_ARITHMETIC += ("and_", "or_", "xor", "lshift", "rshift")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
#: Methods that write into their array.
_IN_PLACE = frozenset({"fill", "sort", "partition"})
#: DLDataTypeCode of a dtype that NumPy's DLPack does not know: kDLBfloat.
_DLPACK_BFLOAT = 4


class Flags:
    """What CuPy says of an array's memory."""

    def __init__(self, array: ndarray) -> None:
        flags = array._host.flags
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.forc, self.owndata = flags.forc, array.base is None

    def __getitem__(self, name: str) -> bool:
        return getattr(self, name.lower())


class ndarray:
    """An array of a shape in new memory, or at `memptr`.

    Attributes
    ----------
    base : ndarray or None
        The array whose memory this one views.
    """

    __slots__ = ("__weakref__", "_host", "_mem", "base")
    __hash__ = None

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: _memory.MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        shape = tuple(map(int, shape)) if hasattr(shape, "__iter__") else (int(shape),)
        dtype = np.dtype(dtype)
        if memptr is None:
            memptr = _memory.alloc(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        self._mem, self.base = memptr.mem, None
        self._host = np.ndarray(
            shape, dtype, memptr.mem.block, memptr.ptr - memptr.mem.ptr, strides, order or "C"
        )

    @classmethod
    def _of(cls, host: np.ndarray, mem: _memory.BaseMemory, base: ndarray | None) -> ndarray:
        array = cls.__new__(cls)
        array._host, array._mem, array.base = host, mem, base
        return array

    # Memory

    @property
    def data(self) -> _memory.MemoryPointer:
        if not self._host.size and self.base is None:
            return _memory.MemoryPointer(self._mem, 0)
        return _memory.MemoryPointer(
            self._mem, self._host.__array_interface__["data"][0] - self._mem.ptr
        )

    @property
    def device(self) -> _streams.Device:
        return _streams.Device(self._mem.device_id)

    @property
    def flags(self) -> Flags:
        return Flags(self)

    @property
    def cstruct(self) -> Any:
        raise AttributeError("cstruct")

    def get(
        self,
        stream: Any = None,
        order: str = "C",
        out: np.ndarray | None = None,
        blocking: bool = True,
    ) -> np.ndarray:
        """Copy to the host."""
        _streams.check_readable()
        if out is None:
            return self._host.copy(order)
        np.copyto(out, self._host)
        return out

    def set(self, array: np.ndarray, stream: Any = None) -> None:
        """Copy from the host."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(f"{array.dtype}{array.shape} is set to {self.dtype}{self.shape}")
        array = array.copy()
        _streams.enqueue(lambda: np.copyto(self._host, array))

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        host = self._host.__array_interface__
        contiguous = self._host.flags.c_contiguous
        return {
            "shape": self.shape,
            "typestr": host["typestr"],
            "descr": host["descr"],
            "stream": 1,
            "version": 3,
            "strides": None if contiguous else self.strides,
            "data": (self.data.ptr, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._mem.device_id)  # kDLCUDA

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        _streams.check_readable()
        options = {name: value for name, value in options.items() if name == "max_version"}
        bfloat16 = self.dtype == ml_dtypes.bfloat16
        capsule = (self._host.view(np.uint16) if bfloat16 else self._host).__dlpack__(**options)
        if bfloat16:
            name = _capsule_name(capsule)
            offset = {b"dltensor": 20, b"dltensor_versioned": 52}[name]
            code = ctypes.c_uint8.from_address(_capsule_pointer(capsule, name) + offset)
            code.value = _DLPACK_BFLOAT
        return capsule

    # What NumPy's functions do with such arrays

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return forward(getattr(ufunc, method))(*inputs, **options)

    def __array_function__(self, function: Callable, types: Any, args: Any, options: Any) -> Any:
        return forward(function)(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "ctypes":
            raise AttributeError(name)
        found = getattr(self._host, name)
        if not callable(found):
            return wrap(found, (self,))
        if name in _IN_PLACE:
            return functools.partial(_in_place, functools.partial(_method, name), self)
        return functools.partial(forward(functools.partial(_method, name)), self)

    def __getitem__(self, index: Any) -> Any:
        return forward(_getitem)(self, _index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        index, value = unwrap(_index(index)), unwrap(value)

        def action() -> None:
            self._host[index] = value

        _streams.enqueue(action)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self._host)))

    def __len__(self) -> int:
        return len(self._host)

    def __repr__(self) -> str:
        return repr(self.get())

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.get()[()], spec)

    def item(self, *index: Any) -> Any:
        return self.get().item(*index)

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes(order)

    def __reduce__(self) -> Any:
        return asarray, (self.get(),)

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get()[()])

    def __float__(self) -> float:
        return float(self.get()[()])

    def __index__(self) -> int:
        return operator.index(self.get())


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """As cuBLAS: sums of 16-bit numbers in float32, and of bfloat16 too, which NumPy has not."""
    dtype = np.result_type(a, b)
    if dtype.itemsize != 2 or dtype.kind in "iu":
        return a @ b
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(dtype)


def _address(host: np.ndarray) -> int:
    return host.__array_interface__["data"][0]


def _method(name: str, host: np.ndarray, *args: Any, **options: Any) -> Any:
    return getattr(host, name)(*args, **options)


def _getitem(host: np.ndarray, index: Any) -> Any:
    # With an ellipsis a single element is a view, too.
    index = index if isinstance(index, tuple) else (index,)
    if not any(i is Ellipsis for i in index):
        index = (*index, Ellipsis)
    return host[index]


def _index(index: Any) -> Any:
    """An index in which arrays on the host are on the device."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return array(index) if isinstance(index, np.ndarray) else index


def _in_place(function: Callable, target: ndarray, *args: Any, **options: Any) -> ndarray:
    args = unwrap(args)
    _streams.enqueue(lambda: function(target._host, *args, **options))
    return target


def unwrap(value: Any) -> Any:
    """Replace device arrays by the host arrays on the same memory, also within tuples, lists,
    dicts and slices."""
    kind = type(value)
    if kind is ndarray:
        return value._host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {kind}")
    if kind in (tuple, list):
        return kind(unwrap(item) for item in value)
    if kind is dict:
        return {name: unwrap(item) for name, item in value.items()}
    if kind is slice:
        return slice(*(unwrap(part) for part in (value.start, value.stop, value.step)))
    return value


def _arrays(values: Any) -> Iterator[ndarray]:
    for value in values:
        if type(value) is ndarray:
            yield value
        elif type(value) in (tuple, list):
            yield from _arrays(value)


def wrap(value: Any, parents: tuple[ndarray, ...] = ()) -> Any:
    """Turn NumPy's results into device arrays: views of `parents`, or copies in new memory."""
    if isinstance(value, (tuple, list)):
        items = [wrap(item, parents) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (bool, np.generic)):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    for parent in parents:
        if value is parent._host:
            return parent
    if value.base is not None:
        address = value.__array_interface__["data"][0]
        for parent in parents:
            if address in parent._mem:
                return ndarray._of(
                    value, parent._mem, parent if parent.base is None else parent.base
                )
    strides = None if value.flags.c_contiguous else np.empty_like(value, order="K").strides
    new = ndarray(value.shape, value.dtype, None, strides)
    new._host[...] = value
    return new


@functools.lru_cache(maxsize=4096)
def forward(function: Callable) -> Callable:
    """A function of NumPy's, for device arrays."""

    @functools.wraps(function, updated=())
    def forwarded(*args: Any, **options: Any) -> Any:
        out = options.get("out")
        host, host_options = unwrap(args), unwrap(options)
        if out is not None:
            _streams.enqueue(lambda: function(*host, **host_options))
            return out[0] if isinstance(out, tuple) and len(out) == 1 else out
        result = function(*host, **host_options)
        parents = tuple(_arrays((args, tuple(options.values()))))
        wrapped = wrap(result, parents)
        if _streams.is_capturing():
            _repeat(function, host, host_options, result, wrapped)
        return wrapped

    return forwarded


def _repeat(function: Callable, args: Any, options: Any, result: Any, wrapped: Any) -> None:
    """Let a graph compute again what is no view."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    arrays = wrapped if isinstance(result, (tuple, list)) else (wrapped,)
    new = [
        (i, array)
        for i, (item, array) in enumerate(zip(results, arrays, strict=True))
        if type(array) is ndarray and not np.may_share_memory(item, array._host)
    ]
    if not new:
        return

    def action() -> None:
        again = function(*args, **options)
        again = again if isinstance(again, (tuple, list)) else (again,)
        for i, array in new:
            array._host[...] = again[i]

    _streams.enqueue(action)


def _operators() -> None:
    def binary(name: str) -> None:
        forwarded = forward(matmul if name == "matmul" else getattr(operator, name))

        def apply(self: ndarray, other: Any) -> Any:
            if not _known(other):
                return NotImplemented
            return forwarded(self, other)

        def reflected(self: ndarray, other: Any) -> Any:
            if not _known(other):
                return NotImplemented
            return forwarded(other, self)

        bare = name.rstrip("_")
        setattr(ndarray, f"__{bare}__", apply)
        if name in _ARITHMETIC:
            setattr(ndarray, f"__r{bare}__", reflected)
            in_place_function = getattr(operator, f"i{bare}", None)
            if in_place_function is not None:
                setattr(
                    ndarray,
                    f"__i{bare}__",
                    lambda self, other, f=in_place_function: _in_place(f, self, other),
                )

    for name in (*_ARITHMETIC, *_COMPARISONS):
        binary(name)
    for name in ("neg", "pos", "invert", "abs"):
        forwarded = forward(getattr(operator, name))
        setattr(ndarray, f"__{name}__", lambda self, f=forwarded: f(self))


def _known(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or not value.ndim


_operators()


def array(
    obj: Any, dtype: Any = None, copy: bool | None = True, order: str = "K", ndmin: int = 0
) -> ndarray:
    """As CuPy's: of what is on the host or on the device."""
    if type(obj) is not ndarray and hasattr(obj, "__cuda_array_interface__"):
        obj = _imported(obj)
    if type(obj) is ndarray:
        if not copy and (dtype is None or obj.dtype == dtype) and obj.ndim >= ndmin:
            return obj
        return forward(np.array)(obj, dtype=dtype, copy=True, order=order, ndmin=ndmin)
    if isinstance(obj, (list, tuple)) and any(True for _ in _arrays(obj)):
        return forward(np.array)(obj, dtype=dtype, order=order, ndmin=ndmin)
    host = np.array(obj, dtype=dtype, order=order, ndmin=ndmin)
    fortran = host.flags.f_contiguous and not host.flags.c_contiguous
    new = ndarray(host.shape, host.dtype, order="F" if fortran else "C")
    new.set(host)
    return new


def asarray(obj: Any, dtype: Any = None, order: str = "K", *, copy: Any = None) -> ndarray:
    return array(obj, dtype, copy=bool(copy), order=order)


def asnumpy(obj: Any, *_: Any, **__: Any) -> np.ndarray:
    return obj.get() if type(obj) is ndarray else np.asarray(obj)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    dtype = np.asarray(unwrap(fill_value)).dtype if dtype is None else dtype
    new = ndarray(shape, dtype, order=order)
    new[...] = fill_value
    return new


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def _imported(obj: Any) -> ndarray:
    """An array at the memory of an object with ``__cuda_array_interface__``."""
    described = obj.__cuda_array_interface__
    shape, dtype = described["shape"], np.dtype(described["typestr"])
    strides = described.get("strides")
    extent = _extent(shape, strides, dtype.itemsize)
    memory = _memory.UnownedMemory(described["data"][0], extent, obj)
    return ndarray(shape, dtype, _memory.MemoryPointer(memory, 0), strides)


def _extent(shape: Any, strides: Any, itemsize: int) -> int:
    if 0 in shape:
        return 0
    if strides is None:
        return int(np.prod(shape, dtype=object)) * itemsize
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + itemsize


class _OnTheHost:
    """What NumPy's importer takes for an array on the host."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if name == "max_version"}
        try:
            return self._array.__dlpack__(**options)
        except TypeError:
            return self._array.__dlpack__()


def from_dlpack(array: Any) -> ndarray:
    """An array at the memory of an object with ``__dlpack__``, of a device.

    Raises
    ------
    TypeError
        It is not on a device.
    """
    if array.__dlpack_device__()[0] != 2:
        raise TypeError("CPU arrays are not supported")
    host = np.from_dlpack(_OnTheHost(array))
    extent = _extent(host.shape, host.strides, host.itemsize)
    device = array.__dlpack_device__()[1]
    memory = _memory.UnownedMemory(host.ctypes.data, extent, (array, host), device)
    return ndarray(host.shape, host.dtype, _memory.MemoryPointer(memory, 0), host.strides)
