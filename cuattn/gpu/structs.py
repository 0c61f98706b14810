"""The argument structs of kernels, laid out and packed as C++ does it.

A struct is declared once, with the types and names that its CUDA declaration has; offsets, padding
and packing follow from that. :mod:`cuattn.gpu.params` declares all of them, and
``tests/test_params.py`` compares each with CUDA's.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Type(NamedTuple):
    """A C++ type: how :mod:`struct` packs it, and how C++ lays it out."""

    format: str
    size: int
    align: int
    values: int  # how many numbers (or byte strings) it is packed from

    def times(self, count: int) -> Type:
        """The type of an array of so many."""
        return Type(self.format * count, self.size * count, self.align, self.values * count)


WORD = 8  # bytes of what a launch fills in, unless it is a tensor map
MAP_BYTES = 128
POINTER = Type("Q", WORD, WORD, 1)
_SCALARS = {
    "bool": Type("?", 1, 1, 1),
    "unsigned char": Type("B", 1, 1, 1),
    "int": Type("i", 4, 4, 1),
    "unsigned": Type("I", 4, 4, 1),
    "long long": Type("q", 8, 8, 1),
    "unsigned long long": Type("Q", 8, 8, 1),
    "float": Type("f", 4, 4, 1),
    "double": Type("d", 8, 8, 1),
    "ptx::TensorMap": Type(f"{MAP_BYTES}s", MAP_BYTES, 64, 1),
}
#: Members of the structs that are fields of argument structs.
_RECORDS = {
    "Strides": ("long long",) * 3,
    "PageStrides": ("long long",) * 3,
    "ScoreStrides": ("long long",) * 4,
    "ScaleStrides": ("long long",) * 4,
    "tile::Divisor": ("unsigned",) * 2,
    "RowSeeds": ("const unsigned long long*", "unsigned long long"),
}


def _type(name: str) -> Type:
    if array := re.fullmatch(r"(.+)\[(\d+)\]", name):
        return _type(array[1]).times(int(array[2]))
    if name.endswith("*"):
        return POINTER
    if name in _SCALARS:
        return _SCALARS[name]
    if template := re.fullmatch(r"RowValue<(.+)>", name):
        return _record([POINTER, _type(template[1])])
    return _record([_type(member) for member in _RECORDS[name]])


def _record(members: list[Type]) -> Type:
    align = max(member.align for member in members)
    offsets, size = _offsets(members, align)
    return Type(
        _format(members, offsets, 0, size), size, align, sum(member.values for member in members)
    )


def _offsets(members: list[Type], align: int) -> tuple[list[int], int]:
    """Where each member begins, and the size of all, a multiple of `align`."""
    offsets, end = [], 0
    for member in members:
        offsets.append(-(-end // member.align) * member.align)
        end = offsets[-1] + member.size
    return offsets, -(-end // align) * align


def _format(members: list[Type], offsets: list[int], begin: int, end: int) -> str:
    """The format of the bytes from `begin` to `end`, with `members` at `offsets` between."""
    parts, position = [], begin
    for member, offset in zip(members, offsets, strict=True):
        parts += [_padding(offset - position), member.format]
        position = offset + member.size
    return "".join((*parts, _padding(end - position)))


def _padding(nbytes: int) -> str:
    return f"{nbytes}x" if nbytes else ""


class Field(NamedTuple):
    """A field of a struct."""

    type: Type
    offset: int
    argument: str | None  # what fills it at each launch, as in `Struct.arguments`; None: nothing


class Struct:
    """An argument struct.

    Parameters
    ----------
    name : str
        As in CUDA.
    *declarations : (str, str)
        A C++ type and the names, separated by spaces, of consecutive fields of that type.
    **renamed : str
        For fields that are filled at each launch: the argument's name, where it is not the field's.

    Attributes
    ----------
    size : int
        In bytes.
    fields : dict
        A `Field` by name, in order.
    pack : callable
        Packs all fields' values, in order, into bytes: the fast way for structs whose every field
        may differ between calls.
    """

    def __init__(self, name: str, *declarations: tuple[str, str], **renamed: str) -> None:
        self.name = name
        ctypes = {field: ctype for ctype, names in declarations for field in names.split()}
        types = [_type(ctype) for ctype in ctypes.values()]
        offsets, self.size = _offsets(types, max(t.align for t in types))
        self.fields: dict[str, Field] = {}
        for (field, ctype), t, offset in zip(ctypes.items(), types, offsets, strict=True):
            argument = None
            if ctype == "ptx::TensorMap":
                argument = f"{field}_map"
            elif t is POINTER or field in renamed:
                argument = renamed.get(field, field)
            self.fields[field] = Field(t, offset, argument)
        self._struct = struct.Struct("=" + _format(types, offsets, 0, self.size))
        self.pack: Callable[..., bytes] = self._struct.pack

    def unpack(self, data: bytes) -> dict[str, Any]:
        """The values of all fields: a number, or a tuple where a field has several."""
        numbers = list(self._struct.unpack(data))
        values = {}
        for name, field in self.fields.items():
            taken = tuple(numbers[: field.type.values])
            del numbers[: field.type.values]
            values[name] = taken[0] if field.type.values == 1 else taken
        return values

    def arguments(self, **constants: Any) -> Arguments:
        """Pack what stays the same between launches alike.

        Fields that are not named here are filled at each launch, from a mapping in which a pointer
        has its field's name (or what the declaration says instead) and a tensor map the field's
        name with ``_map``. So are numbers that are None, of a field that has several: the first
        from the field's name, another from that with ``_value``.

        Raises
        ------
        TypeError
            There is no such field, or one that nothing fills is missing.
        """
        unknown = constants.keys() - self.fields.keys()
        missing = [
            name
            for name, field in self.fields.items()
            if name not in constants and field.argument is None
        ]
        if unknown or missing:
            raise TypeError(f"{self.name}: no fields {sorted(unknown)}, missing {missing}")
        numbers: list[Any] = []
        fills = []
        for name, field in self.fields.items():
            if name not in constants:
                numbers.append(b"" if field.type.size == MAP_BYTES else 0)
                fills.append(Fill(field.offset, str(field.argument), field.type.size))
                continue
            given = [constants[name]] if field.type.values == 1 else constants[name]
            numbers += [0 if number is None else number for number in given]
            fills += [
                Fill(field.offset + WORD * i, f"{name}_value" if i else name, WORD)
                for i, number in enumerate(given)
                if number is None
            ]
        return Arguments(self, self.pack(*numbers), tuple(fills))


class Fill(NamedTuple):
    """What each launch fills in: a word of 64 bits, or a tensor map."""

    offset: int
    argument: str
    size: int  # WORD or MAP_BYTES


class Arguments:
    """A struct's bytes but for what each launch fills in: `Struct.arguments` makes it.

    Attributes
    ----------
    struct : Struct
        What is packed.
    constants : bytes
        The struct, with zeros where it is filled.
    fills : tuple of Fill
        What each launch fills in.
    """

    def __init__(self, of: Struct, constants: bytes, fills: tuple[Fill, ...]) -> None:
        self.struct = of
        self.constants = constants
        self.fills = fills

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The struct's bytes, with addresses, tensor maps and the launch's id from a mapping."""
        packed = bytearray(self.constants)
        for offset, argument, size in self.fills:
            value = values[argument]
            if size == WORD:
                value = value.to_bytes(WORD, "little")
            packed[offset : offset + len(value)] = value
        return bytes(packed)

    def followed_by(self, other: Arguments) -> Arguments:
        """The arguments of a struct that has these as its base and `other`'s as its one member."""
        size = len(self.constants)
        moved = tuple(fill._replace(offset=size + fill.offset) for fill in other.fills)
        return Arguments(self.struct, self.constants + other.constants, self.fills + moved)


_launch_ids = random.Random()  # a generator of its own: the program's is left alone


def launch_id() -> int:
    """A random number of a launch's own, by which it knows what it has written in its workspace."""
    return _launch_ids.getrandbits(64)
