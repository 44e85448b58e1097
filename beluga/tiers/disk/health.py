# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A disk that fails: failures are counted and logged once a minute, and a disk that fails
repeatedly is not used for a while.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from beluga.limit import LogLimit, and_more
from beluga.metrics import REGISTRY

_LOG = logging.getLogger(__name__)
_FAILURES = REGISTRY.counter("beluga_tier_failures_total", "Failures of a tier's medium, by kind.")
_KINDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read-only",
    errno.EPERM: "read-only",
    errno.EACCES: "read-only",
    errno.EBADMSG: "checksum",
    errno.ENODATA: "short",
    errno.ETIMEDOUT: "timeout",
    errno.ENOENT: "vanished",
    errno.ENODEV: "vanished",
    errno.ENXIO: "vanished",
    errno.ESTALE: "vanished",
}

_PATIENCE = 3
# Attempts in a row with damaged blocks that count as one failure of the disk
_DAMAGED_PATIENCE = 16
_PAUSE_S = 0.5
_PAUSE_MAX_S = 30.0


class DirectionHealth:
    """The health of one direction of a disk: its loads, or its saves. Thread-safe.

    After ``_PATIENCE`` failures in a row the disk is not used for ``_PAUSE_S``, then tried again;
    each further failure doubles the pause, up to ``_PAUSE_MAX_S``. A disk that hangs is paused at
    once. A damaged block is dropped when it is read, so a few of them do not cause a pause.
    """

    def __init__(
        self, tier: str, operation: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tier, self._operation, self._clock = tier, operation, clock
        self._limit = LogLimit(clock=clock)
        self._failures, self._until = 0, float("-inf")
        self._damaged = 0
        self._lock = threading.Lock()

    @property
    def failing(self) -> bool:
        """Whether the last attempts failed often enough for a pause."""
        return self._failures >= _PATIENCE

    def allows(self) -> bool:
        """Return whether the disk may be used now."""
        return self._clock() >= self._until

    def succeeded(self) -> None:
        """Count a successful operation."""
        self._failures, self._until = 0, float("-inf")
        self._damaged = 0

    def failed(self, code: int, count: int = 1) -> None:
        """Count ``count`` failures with this errno, in one attempt."""
        kind = _KINDS.get(code, "io")
        _FAILURES.add(count, tier=self._tier, operation=self._operation, kind=kind)
        now = self._clock()
        with self._lock:
            weight = self._weight(code)
            self._failures += weight
            over = self._failures - _PATIENCE
            if over >= 0 and weight:
                self._until = now + min(_PAUSE_MAX_S, _PAUSE_S * 2 ** min(over, 20))
        if (suppressed := self._limit.passes(kind)) is not None:
            _LOG.warning(
                "%s: a %s failed: %s (%s); its blocks count as %s%s",
                self._tier,
                self._operation,
                kind,
                errno.errorcode.get(code, code),
                "misses" if self._operation == "load" else "not saved",
                and_more(suppressed),
            )

    def _weight(self, code: int) -> int:
        """Return the number of disk failures that an attempt counts for. The lock is held."""
        if code == errno.ETIMEDOUT:
            return _PATIENCE
        if code != errno.EBADMSG:
            return 1
        self._damaged += 1
        return int(self._damaged % _DAMAGED_PATIENCE == 0)
