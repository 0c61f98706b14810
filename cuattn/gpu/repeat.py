"""Launches that are made again: what one call did, for the next ones like it.

A call can be repeated if it made a single launch, of a :class:`~cuattn.gpu.plan.Plan`, all of whose
addresses are those of the call's own arguments, of results that are returned as they are, or of the
launch's workspace. A copy that was made of an argument, or of a result, has another address: such a
call takes the ordinary way each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import cupy

from cuattn.gpu import tensormap
from cuattn.gpu.dispatch import TIERS, current_tiers
from cuattn.gpu.memory import overlapping
from cuattn.gpu.plan import MAP_WORDS, Plan, Slot, recorded
from cuattn.gpu.structs import launch_id

#: Makes a call like an earlier one, from its addresses and seeds and its keyword arguments, and
#: returns the result; or does nothing and returns None: the call has to take the ordinary way.
Repeat = Callable[[list[int], Mapping[str, Any]], Any]

_get_device = cupy.cuda.runtime.getDevice
_new = cupy.ndarray
_allocate = cupy.cuda.alloc


def record(
    call: Callable[[], Any],
    given: Mapping[str, Any],
    sources: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Any],
) -> tuple[Any, Repeat]:
    """Make a call, and find out how to repeat it.

    Parameters
    ----------
    call : callable
        Makes it.
    given : dict
        Its arrays, and its seeds, by parameter, in their order.
    sources : dict
        As of :func:`cuattn._repeat.repeated`.
    options : dict
        Its keyword arguments.

    Returns
    -------
    result
        Of the call.
    repeat : Repeat
        For calls alike.
    """
    launches: list[tuple[Plan, dict[str, Any]]] = []
    token = recorded.set(launches)
    try:
        result = call()
    finally:
        recorded.reset(token)
    if len(launches) != 1 or current_tiers() is not TIERS:
        return result, _never
    return result, _repeat(*launches[0], result, given, sources, options) or _never


def _never(numbers: list[int], options: Mapping[str, Any]) -> None:
    """Of a call that cannot be repeated."""


def _repeat(
    plan: Plan,
    addresses: dict[str, Any],
    result: Any,
    arguments: Mapping[str, Any],
    sources: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Any],
) -> Repeat | None:
    """How to make the launch again; None if the call did more than that."""
    given = {
        name: value if type(value) is int else value.data.ptr for name, value in arguments.items()
    }
    items = result if type(result) is tuple else (result,)
    # What is returned: a keyword argument, or one of the arrays that are new.
    returned: list[str | int] = []
    new: list[tuple[Any, ...]] = []
    new_addresses: list[int] = []
    for item in items:
        named = [name for name, value in options.items() if value is item]
        if named:
            returned.append(named[0])
        elif (layout := _layout(item)) is not None:
            returned.append(len(new))
            new.append(layout)
            new_addresses.append(item.data.ptr)
        else:
            return None

    order = list(given)

    def source(name: str) -> int | None:
        """The number from which a launch fills in what has a name: its place among the given ones,
        then the new arrays' addresses. -1 for 0, None for a number of unknown origin."""
        number = addresses[name]
        for parameter in sources.get(name, (name,)):
            if parameter in given and given[parameter] == number:
                return order.index(parameter)
        if number in new_addresses:
            return len(order) + new_addresses.index(number)
        return None if number else -1

    own = ("workspace", "launch_id")
    places = dict(plan.words)
    words = [(place, source(name)) for place, name in plan.words if name not in own]
    encoded = []
    for place, array, tensor_map in plan.maps:
        if tensormap.begins_with_address(tensor_map, addresses[array]):
            words.append((place, source(array)))
        else:
            encoded.append((place, source(array), tensor_map))
    used = {origin for _, origin, *_ in (*words, *encoded)}
    if None in used or not used.issuperset(range(len(order), len(order) + len(new))):
        return None
    words = [(place, origin) for place, origin in words if origin != -1]
    workspaces, launch_ids = (
        [place for place, name in places.items() if name == wanted] for wanted in own
    )
    slots: list[Slot] = []  # that no thread uses just now
    device, issue = plan.device, plan.issue
    alone = returned[0] if result is items[0] else None
    out_at, read = 0, []  # where the addresses of `out` and of what is read are, and `overlapping`
    if (out := arguments.get("out")) is not None:
        out_at = order.index("out")
        read = [
            (order.index(name), *overlapping(out, value))
            for name, value in arguments.items()
            if name != "out" and type(value) is not int
        ]

    def repeat(numbers: list[int], options: Mapping[str, Any]) -> Any:
        if _get_device() != device or current_tiers() is not TIERS:
            return None
        for origin, least, most in read:  # `out` may overlap what others did not
            if least < numbers[origin] - numbers[out_at] < most:
                return None
        arrays = []
        for layout in new:
            array = _new(*layout) if len(layout) == 2 else _strided(*layout)
            arrays.append(array)
            numbers.append(array.data.ptr)
        try:
            slot = slots.pop()
        except IndexError:
            slot = plan.new_slot()
            plan.fill(slot, addresses)
        filled = slot.words
        for place, origin in words:
            filled[place] = numbers[origin]
        for place, origin, tensor_map in encoded:
            filled[place : place + MAP_WORDS] = tensormap.words(tensor_map, numbers[origin])
        if workspaces:
            workspace = plan.workspace()
            for place in workspaces:
                filled[place] = 0 if workspace is None else workspace.ptr
        for place in launch_ids:
            filled[place] = launch_id()
        issue(slot.address)
        slots.append(slot)
        if alone is not None:
            return arrays[alone] if type(alone) is int else options[alone]
        return tuple(arrays[i] if type(i) is int else options[i] for i in returned)

    return repeat


def _layout(array: Any) -> tuple[Any, ...] | None:
    """Shape and dtype of a result that fills an allocation, and its strides where it is not
    contiguous; None for any other."""
    if type(array) is not cupy.ndarray or not array.size:
        return None
    if array.base is not None and array.base.nbytes != array.nbytes:  # a part of what was allocated
        return None
    if array.flags.c_contiguous:
        return array.shape, array.dtype
    axes = zip(array.strides, array.shape, strict=True)
    expected = array.itemsize
    for stride, n in sorted(axes):
        if n > 1 and stride != expected:
            return None
        expected *= n
    return array.shape, array.dtype, array.strides


def _strided(shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> cupy.ndarray:
    return cupy.ndarray(shape, dtype, _allocate(math.prod(shape) * dtype.itemsize), strides)
