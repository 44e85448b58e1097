# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lock whose holder also does the work of finalizers and resolves futures after the release.

Python may finalize a handle at any moment, even while its own thread holds the pool's lock. Such
work is queued, and whichever thread holds the lock does it. Futures are resolved without the lock,
because their callbacks may use the pool.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from beluga._shared import when_forked

Work = Callable[[], None]


class Exclusive:
    """Guards a pool: ``with exclusive:`` holds the lock. It is not reentrant."""

    def __init__(self) -> None:
        self.answers: list[Work] = []
        """Calls to make after the lock is released."""
        self._lock = threading.Lock()
        self._left: deque[Work] = deque()
        when_forked(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._do_left()

    def __exit__(self, *_: object) -> None:
        while True:
            self._do_left()
            answers, self.answers = self.answers, []
            self._lock.release()
            for answer in answers:
                answer()
            # Work that was queued after _do_left() found the lock held.
            if not self._left or not self._lock.acquire(blocking=False):
                return

    def later(self, work: Work) -> None:
        """Run work under the lock: now if it is free, otherwise by its holder. Never blocks."""
        self._left.append(work)
        if self._lock.acquire(blocking=False):
            self.__exit__()

    def _do_left(self) -> None:
        while self._left:
            self._left.popleft()()

    def _after_fork(self) -> None:
        """Replace the lock in a forked child, where a thread of the parent may hold it forever."""
        self._lock = threading.Lock()
