"""What goes wrong in the emulator, and what it cannot do."""

from __future__ import annotations


class NotEmulated(NotImplementedError):
    """The emulator has no such thing; pytest's hook skips a test that meets this."""


class EmulationError(RuntimeError):
    """A kernel did what a GPU does not allow: an access outside of all allocations, a trap, a
    deadlock, or an instruction that the emulator does not know. The message has the line of PTX."""
