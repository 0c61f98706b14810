"""Launches: what is worked out once for calls alike, and what each of them adds."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cuattn._spec import AttentionSpec
from cuattn.gpu import compiler, dispatch, tensormap
from cuattn.gpu.arguments import Scales
from cuattn.gpu.fork import side_by_side
from cuattn.gpu.memory import scratch
from cuattn.gpu.structs import MAP_BYTES, WORD, launch_id

_ALIGNMENT = 64  # of a struct that holds tensor maps
MAP_WORDS = MAP_BYTES // WORD

#: The launches of the call that :mod:`cuattn.gpu.repeat` records: each plan, and its addresses.
recorded: contextvars.ContextVar[list[tuple[Plan, dict[str, Any]]] | None] = contextvars.ContextVar(
    "recorded", default=None
)


class Slot:
    """The arguments of one launch in memory, as the driver reads them.

    Attributes
    ----------
    words : memoryview
        All of the memory, as numbers of 64 bits.
    address : int
        Of the table of the arguments' addresses, which the memory begins with.
    """

    def __init__(self, template: bytes, structs: tuple[int, ...]) -> None:
        memory = np.zeros(len(template) + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        used = memory[begin : begin + len(template)]
        used[:] = np.frombuffer(template, np.uint8)
        self.address = used.ctypes.data
        self.words = memoryview(used).cast("Q")
        for i, offset in enumerate(structs):
            self.words[i] = self.address + offset


#: Launches a plan's kernel with arguments that stay the same but for these numbers.
Filled = Callable[..., None]


class Plan:
    """A kernel of a device, and all that its launches for calls alike have in common.

    Attributes
    ----------
    chosen : dispatch.Launch
        The kernel and its arguments.
    device : int
        The device.
    words : tuple of (int, str)
        The numbers that a launch fills in: the place in `Slot.words`, and their name.
    maps : tuple of (int, str, TensorMap)
        Its tensor maps: the place of each one's first word, the array, and what it is like.
    has_state : bool
        Whether a launch has a workspace or an id of its own.
    issue : callable
        Launches with the arguments at a slot's address. The driver copies them.
    """

    def __init__(self, chosen: dispatch.Launch, device: int, smem_bytes: int | None = None) -> None:
        """Compile the kernel of a launch for a device, which must be the current one; `smem_bytes`
        of dynamic shared memory, by default the most that the variant asks for."""
        config = chosen.variant.config
        self.chosen = chosen
        self.device = device
        kernel = compiler.kernel(chosen.variant, device)
        grid, block = (*chosen.grid, 1, 1)[:3], (config.threads, 1, 1)
        shared_mem = config.smem_bytes if smem_bytes is None else smem_bytes
        self.issue = functools.partial(kernel, grid, block, shared_mem=shared_mem)
        late = functools.partial(kernel, (chosen.late_blocks, 1, 1), block, shared_mem=shared_mem)
        self._issue_late = late if chosen.late_blocks else lambda address: None
        words, maps, structs = [], [], []
        template = bytes(WORD * len(chosen.arguments))
        for arguments in chosen.arguments:
            template = template.ljust(-(-len(template) // _ALIGNMENT) * _ALIGNMENT, b"\0")
            structs.append(len(template))
            for offset, argument, size in arguments.fills:
                place = (len(template) + offset) // WORD
                if size == WORD:
                    words.append((place, argument))
                elif tensor_map := chosen.tensor_maps.get(array := argument[: -len("_map")]):
                    maps.append((place, array.removesuffix("_pair"), tensor_map))
            template += arguments.constants
        # As long as C++ has a struct that is aligned.
        self._template = template.ljust(-(-len(template) // _ALIGNMENT) * _ALIGNMENT, b"\0")
        self._structs = tuple(structs)
        self.words, self.maps = tuple(words), tuple(maps)
        self.has_state = any(argument in ("workspace", "launch_id") for _, argument in words)
        self._slots: list[Slot] = []  # that no thread uses just now
        self._beside = None if chosen.beside is None else Plan(chosen.beside, device)

    def new_slot(self) -> Slot:
        """Arguments that are filled with zeros where a launch fills them."""
        return Slot(self._template, self._structs)

    def launch(self, addresses: dict[str, Any]) -> None:
        """Launch on the current device and stream; where something was chosen beside, that, and
        this on a second stream, for which the current one waits. What is beside has blocks of its
        own from the start and, when this has ended, `chosen.late_blocks` more: it need not be
        known which of the two begins first.

        Parameters
        ----------
        addresses : dict
            Addresses of the call's arrays by the names that the argument structs have for them; 0
            for an array that is not there. It is added to.
        """
        beside = self._beside
        if beside is None:
            self._launch(addresses)
        else:
            slot, _kept = beside._prepare(dict(addresses))
            side_by_side(
                lambda: self._launch(addresses),
                lambda: beside.issue(slot.address),
                lambda: beside._issue_late(slot.address),
            )
            beside._slots.append(slot)

    def _launch(self, addresses: dict[str, Any]) -> None:
        slot, _kept = self._prepare(addresses)
        self.issue(slot.address)
        self._slots.append(slot)

    def _prepare(self, addresses: dict[str, Any]) -> tuple[Slot, Any]:
        """The arguments of a launch, and the workspace, which must be kept until it is issued."""
        workspace = None
        if self.has_state:
            # The workspace goes back to the pool once all is issued: the next call on the stream
            # may have it.
            workspace = self.workspace()
            addresses["workspace"] = 0 if workspace is None else workspace.ptr
            addresses["launch_id"] = launch_id()
        try:
            slot = self._slots.pop()
        except IndexError:  # not asked before: another thread may take the last one in between
            slot = self.new_slot()
        self.fill(slot, addresses)
        if (launches := recorded.get()) is not None:
            launches.append((self, addresses))
        return slot, workspace

    def filled(self, addresses: dict[str, Any], later: tuple[str, ...]) -> Filled:
        """A launch with arguments of its own, most of which stay the same: of a kernel that has no
        tensor maps and no state.

        Parameters
        ----------
        addresses : dict
            As of :meth:`launch`, those that stay.
        later : tuple of str
            Names of the others, which each launch gives in this order.

        Returns
        -------
        callable
            Launches on the current device and stream; by one thread at a time.
        """
        assert not self.maps and not self.has_state and self._beside is None
        slot = self.new_slot()
        self.fill(slot, dict.fromkeys(later, 0) | addresses)
        words, address, issue = slot.words, slot.address, self.issue
        place_of = {name: place for place, name in self.words}
        places = [place_of[name] for name in later]

        def launch(*numbers: int) -> None:
            for place, number in zip(places, numbers, strict=True):
                words[place] = number
            issue(address)

        return launch

    def workspace(self) -> Any:
        """Memory for the kernel's own use in one launch; None if it needs none."""
        nbytes = self.chosen.workspace_bytes
        return scratch(nbytes) if nbytes else None

    def fill(self, slot: Slot, addresses: dict[str, Any]) -> None:
        """Write into a slot all that a launch fills in."""
        words = slot.words
        for place, name in self.words:
            words[place] = addresses[name]
        for place, array, tensor_map in self.maps:
            words[place : place + MAP_WORDS] = tensormap.words(tensor_map, addresses[array])


class Scores(NamedTuple):
    """What changes a call's scores: arrays, as of :func:`layout_key`, and the score functor."""

    bias: tuple | None
    mask: tuple | None
    alibi_slopes: tuple | None
    aligned: bool  # the addresses of bias and mask are multiples of 16
    score_mod: str = compiler.CONTRACT_SCORES


@functools.lru_cache(maxsize=4096)
def attention_plan(
    spec: AttentionSpec,
    device: int,
    tiers: tuple[dispatch.Tier, ...],
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    out: tuple[int, ...],
    aligned: bool,
    scores: Scores | None = None,
    num_pages: int = 0,
    table_stride: int = 0,
    num_splits: int | str | None = None,
    partial: dispatch.Partial | None = None,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> Plan:
    """Choose and compile the kernel of an attention call on a device, which must be the current
    one, and pack what stays the same between calls like it.

    Parameters
    ----------
    tiers : tuple
        The kernels to choose from.
    q, k, v, out : tuple of int
        Strides in bytes.
    scores : Scores, optional
        What changes scores, if anything does.
    aligned, num_pages, table_stride, num_splits, partial, k_scales, v_scales
        As in :class:`cuattn.gpu.dispatch.Call`.
    """
    bias, mask, alibi_slopes, score_aligned, score_mod = scores or Scores(None, None, None, True)
    call = dispatch.Call(
        spec,
        compiler.device_arch(device),
        compiler.multiprocessors(device),
        dispatch.usable_strides(spec, dispatch.Strides(q, k, v, out), num_pages),
        aligned,
        bias and dispatch.Layout(*bias),
        mask and dispatch.Layout(*mask),
        score_aligned,
        alibi_slopes and dispatch.Layout(*alibi_slopes),
        num_pages,
        table_stride,
        num_splits,
        partial,
        score_mod,
        k_scales,
        v_scales,
    )
    return Plan(dispatch.choose(call, tiers), device)


def layout_key(array: Any) -> tuple | None:
    """What of an array a plan depends on."""
    return None if array is None else (array.shape, array.strides, array.dtype)


def as_kernel_argument(packed: bytes) -> np.void:
    """A struct as CuPy passes it by value: a scalar of as many bytes."""
    return np.void(packed)
