"""Lists of tiers, and contexts in which calls go to some of them alone."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from cuattn._spec import AttentionSpec
from cuattn.gpu.compiler import Variant


class Named(Protocol):
    """What every tier has, whatever its calls are."""

    name: str

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that it can choose."""


AnyTier = TypeVar("AnyTier", bound=Named)


class TierList(Generic[AnyTier]):
    """The kernels of one kind of call, the fastest first.

    Attributes
    ----------
    all : tuple
        Every tier.
    current : callable
        The tiers that calls go to in this context: all of them, the same tuple each time, but
        within :func:`restricted`.
    """

    def __init__(self, *tiers: AnyTier) -> None:
        self.all: tuple[AnyTier, ...] = tiers
        self._current = contextvars.ContextVar("tiers", default=tiers)
        self.current = self._current.get

    def variants(self, arch: str) -> Iterator[Variant]:
        """Every variant that a tier can choose, once."""
        yield from dict.fromkeys(v for tier in self.all for v in tier.variants(arch))

    @contextlib.contextmanager
    def only(self, names: Sequence[str]) -> Iterator[None]:
        """A context in which the tiers are those named, if any is."""
        named = tuple(tier for tier in self.all if tier.name in names)
        token = self._current.set(named or self._current.get())
        try:
            yield
        finally:
            self._current.reset(token)


@contextlib.contextmanager
def restricted(lists: Sequence[TierList[Any]], names: Sequence[str]) -> Iterator[None]:
    """A context in which each list that has named tiers has these alone.

    Raises
    ------
    ValueError
        A name is not that of a tier.
    """
    known = [tier.name for tiers in lists for tier in tiers.all]
    if not set(names) <= set(known):
        names = tuple(names)
        raise ValueError(f"use_tiers: names are {names}, must be among {', '.join(known)}")
    with contextlib.ExitStack() as stack:
        for tiers in lists:
            stack.enter_context(tiers.only(names))
        yield


def first_serving(tiers: Sequence[Any], call: Any, spec: AttentionSpec, arch: str) -> Any:
    """What the first of `tiers` that serves a call gives for it.

    Raises
    ------
    LookupError
        None does, which all of a list together never leave.
    """
    for tier in tiers:
        launch = tier.serves(call)
        if launch is not None:
            return launch
    raise nobody_serves(tiers, spec, arch)


def nobody_serves(tiers: Sequence[Any], spec: AttentionSpec, arch: str) -> LookupError:
    """What to raise where no tier serves a call."""
    names = ", ".join(tier.name for tier in tiers)
    return LookupError(f"none of the tiers {names} serves {spec} on {arch}")
