"""Which GPU is emulated, and how: the environment variable ``CUATTN_EMULATE``, words such as
``sm_90 seed=1 late=1``.

A word ``sm_…`` is the architecture, ``multiprocessors=…`` and ``devices=…`` are counts; the others
go to the emulator as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import os

TOTAL_MEMORY = 80 << 30
#: Less than any test of huge arrays asks for.
FREE_MEMORY = 4 << 30
#: Most shared memory of a block, in bytes, by compute capability.
SHARED_MEMORY = {(8, 0): 163 << 10, (9, 0): 227 << 10, (12, 0): 99 << 10}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of the emulated devices, which are all alike.

    Attributes
    ----------
    capability : tuple of int
        The compute capability.
    multiprocessors, devices : int
        How many there are.
    options : str
        Of the emulator, as of ``emu_launch``.
    """

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    devices: int = 2
    options: str = ""

    @property
    def shared_memory(self) -> int:
        """The most that a block may have, in bytes."""
        return SHARED_MEMORY.get(self.capability, 48 << 10)


@functools.cache
def parse(words: str) -> Settings:
    """The settings that are written as in the environment variable."""
    settings, options = Settings(), []
    for word in words.split():
        name, _, value = word.partition("=")
        if word.startswith("sm_"):
            number = int(word[3:].rstrip("a"))
            settings = dataclasses.replace(settings, capability=divmod(number, 10))
        elif name in ("multiprocessors", "devices"):
            settings = dataclasses.replace(settings, **{name: int(value)})
        else:
            options.append(word)
    return dataclasses.replace(settings, options=" ".join(options))


def current() -> Settings:
    return parse(os.environ.get("CUATTN_EMULATE", ""))
