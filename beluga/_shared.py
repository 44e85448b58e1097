# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Hold C memory that several threads use, and that a thread or a forked child may find closed.

C functions run without the interpreter's lock, so one thread may close what another has just given
to C. A forked child has the parent's objects, but none of the threads that hold their locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Generic, NoReturn, Protocol, TypeVar

from beluga.errors import BadTypeError

_Handle = TypeVar("_Handle")


class SharedHandle(Generic[_Handle]):
    """A pointer to C memory, freed when its owner has closed it and the last thread has left it::

        with shared as handle:
            lib.bl_call(handle)

    Entering raises ValueError (``what`` is closed) after :meth:`close`.
    """

    def __init__(self, what: str, handle: _Handle, end: Callable[[], None]) -> None:
        self._what, self._handle, self._end = what, handle, end
        self._lock = threading.Lock()
        self._users, self._closed = 0, False
        self.foreign = False
        """Whether this process was forked from the one that made this."""
        when_forked(self)

    def __enter__(self) -> _Handle:
        with self._lock:
            if self._closed:
                raise ValueError(f"the {self._what} is closed")
            self._users += 1
        return self._handle

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and self._users == 0
        if last:
            self._end()

    def close(self) -> None:
        """Let no more threads enter. A second call does nothing."""
        with self._lock:
            last = not self._closed and self._users == 0
            self._closed = True
        if last:
            self._end()

    @property
    def closed(self) -> bool:
        """Whether the owner has closed it; threads may still be in it."""
        return self._closed

    def _after_fork(self) -> None:
        """Replace the lock in a forked child: its holder may be a thread of the parent."""
        self._lock = threading.Lock()
        self.foreign = True


class OfThisProcess:
    """An object that cannot be copied or sent to another process: it has mappings and sessions."""

    def __reduce__(self) -> NoReturn:
        raise BadTypeError(
            f"a {type(self).__name__} belongs to the process that made it; open the pool by its "
            "paths and make one where it is used"
        )


class ForkAware(Protocol):
    """An object that belongs to the process that made it."""

    def _after_fork(self) -> None:
        """Drop the parent's state in a forked child, where no thread holds the locks."""


_owners: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def when_forked(owner: ForkAware) -> None:
    """Call ``owner._after_fork()`` in every child that is forked during the owner's lifetime."""
    _owners.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_owners):
        owner._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
