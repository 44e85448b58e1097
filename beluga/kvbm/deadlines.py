# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Delayed calls, made by one thread for the whole process."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from beluga._shared import when_forked
from beluga.threads import Thread


class Deadlines:
    """Calls functions when they are due. The thread starts with the first call."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        when_forked(self)

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call ``call()`` after ``delay_s`` seconds."""
        with self._changed:
            heapq.heappush(self._calls, (time.monotonic() + delay_s, next(self._numbers), call))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="beluga-deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls or self._calls[0][0] > time.monotonic():
                    wait_s = self._calls[0][0] - time.monotonic() if self._calls else None
                    self._changed.wait(None if wait_s is None else max(wait_s, 0))
                call = heapq.heappop(self._calls)[2]
            call()
            del call

    def _after_fork(self) -> None:
        """Reset in a forked child, which does not have the thread."""
        self._calls = []
        self._changed = threading.Condition()
        self._thread = None


DEADLINES = Deadlines()
