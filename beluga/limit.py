# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Rate-limits log messages: the first of each kind at once, then one per minute.

One limit for all kinds would hide the second kind of problem::

    _limit = LogLimit()
    if (suppressed := _limit.passes("load", kind_of(error))) is not None:
        log.warning("a load failed: %s%s", error, and_more(suppressed))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

PERIOD_S = 60.0
_KINDS_MAX = 256  # kinds that are tracked; clients can create any number of kinds


class LogLimit:
    """Decides for each kind of message whether it may be logged now. Any thread may call it."""

    def __init__(
        self, period_s: float = PERIOD_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._period_s, self._clock = period_s, clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[Hashable, ...], tuple[float, int]] = {}  # logged at; since left out

    def passes(self, *kind: Hashable) -> int | None:
        """Return how many messages of this kind were suppressed since the last logged one, if this
        one may be logged; else None.
        """
        now = self._clock()
        with self._lock:
            logged_s, suppressed = self._kinds.get(kind, (now - self._period_s, 0))
            if now - logged_s < self._period_s:
                self._kinds[kind] = logged_s, suppressed + 1
                return None
            self._kinds.pop(kind, None)  # the kind that was logged last is the last one
            self._kinds[kind] = now, 0
            if len(self._kinds) > _KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            return suppressed


def kind_of(error: BaseException) -> str:
    """Return the kind of an error: its class, and the errno of an OSError."""
    number = getattr(error, "errno", None)
    return type(error).__name__ + (f" {number}" if number is not None else "")


def and_more(suppressed: int) -> str:
    """Return a message's suffix that counts those suppressed before it."""
    return f" ({suppressed} more of this kind since it was last logged)" if suppressed else ""
