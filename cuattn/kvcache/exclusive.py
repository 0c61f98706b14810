"""One thread at a time in the methods of an object; a fork waits until none is in one."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Concatenate, ParamSpec, TypeVar

from cuattn._errors import explain_errors

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Exclusive")


class Exclusive:
    """An object whose methods that are :func:`exclusive` one thread at a time may be in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that has the lock
        _OBJECTS.add(self)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let one thread at a time into a method, and explain its errors."""
    explained = explain_errors(method)

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        me = get_ident()
        if self._owner == me and self._lock.locked():  # to wait for it would be for ever
            raise RuntimeError(
                f"{method.__qualname__}: called in the middle of another call of this thread on "
                "the same cache, by an argument's iterator, a finalizer or a signal handler; call "
                "it before or afterwards"
            )
        with self._lock:
            self._owner = me
            try:
                return explained(self, *args, **kwargs)
            finally:
                self._owner = None

    return call


#: A fork waits until no other thread is in the middle of a call, since the child has nobody who
#: would end it.
_OBJECTS: weakref.WeakSet[Exclusive] = weakref.WeakSet()
_forking = threading.local()  # the locks that a thread which forks holds meanwhile


def _before_fork() -> None:
    _forking.locks = []
    for one in list(_OBJECTS):
        if one._owner != get_ident():
            one._lock.acquire()
            _forking.locks.append(one._lock)


def _after_fork() -> None:
    for lock in _forking.locks:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
