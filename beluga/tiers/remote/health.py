# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A store that hangs or fails: a circuit breaker for calls to it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from beluga.tiers.remote.store import RemoteSettings

CLOSED, HALF_OPEN, OPEN = 0, 1, 2


class Breaker:
    """While closed, calls are allowed. While open, they are not, except for a trial from time to
    time.

    ``failures`` failures in a row open the breaker. After ``open_s`` one trial may start
    (half-open). If it succeeds, the breaker closes, but then a single failure opens it again, for
    twice as long as before, until an operation other than a trial succeeds. Example with open_s
    0.5, for a store that replies to each trial but to no load: open 0.5 s, trial, one load fails,
    open 1 s, trial, one load fails, open 2 s. Pauses vary by a quarter, so that clients do not
    retry in step.

    Any thread may call any method.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings, self._clock, self._chance = settings, clock, chance
        self._lock = threading.Lock()
        self._state, self._failed = CLOSED, 0
        self._pause_s, self._until = settings.open_s, 0.0
        self._closed_at = float("-inf")
        self.openings = 0

    @property
    def state(self) -> int:
        """The state: CLOSED (0), HALF_OPEN (1) or OPEN (2)."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether calls are allowed."""
        return self._state == CLOSED

    def begin_trial(self) -> bool:
        """Return whether the caller should make a trial now. Only one caller gets True."""
        with self._lock:
            if self._state != OPEN or self._clock() < self._until:
                return False
            self._state = HALF_OPEN
            return True

    def end_trial(self, succeeded: bool) -> None:
        """Report the result of a trial. Does nothing if no trial is running."""
        with self._lock:
            if self._state != HALF_OPEN:
                return
            if succeeded:
                self._state, self._failed = CLOSED, self._settings.failures - 1
                self._closed_at = self._clock()
            else:
                self._open()

    def succeeded(self) -> None:
        """Report a successful operation. One that started before the breaker opened does not close
        it.
        """
        with self._lock:
            if self._state == CLOSED:
                self._failed, self._pause_s = 0, self._settings.open_s

    def failed(self, begun: float) -> bool:
        """Report a failed operation that started at ``begun`` (of the clock), and return whether
        this opened the breaker. A failure of an operation that started before the last trial is
        outdated and ignored.
        """
        with self._lock:
            if self._state != CLOSED or begun < self._closed_at:
                return False
            self._failed += 1
            if self._failed < self._settings.failures:
                return False
            self._open()
            self.openings += 1
            return True

    def _open(self) -> None:
        self._state = OPEN
        self._until = self._clock() + self._pause_s * (0.75 + 0.5 * self._chance())
        self._pause_s = min(2 * self._pause_s, self._settings.open_limit_s)
