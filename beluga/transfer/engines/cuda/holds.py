# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Holds keep windows registered while copies use them.

A transfer holds its windows until the events of its parts have ended, whether or not a thread waits
for them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from beluga.transfer.engines.cuda.driver import Driver, DriverError

WindowId = tuple[int, int]  # device, window on that device


class Hold:
    """The hold of one transfer. ``addresses`` has the GPU addresses of the windows that are ready.

    It is a context in which the transfer starts; :meth:`until` adds the events of its parts.
    """

    def __init__(self, holds: Holds, driver: Driver, addresses: Mapping[WindowId, int]) -> None:
        self.driver = driver  # the owner of the events
        self.addresses = addresses
        self.events: set[int] = set()
        self.starting = True
        self._holds = holds

    def until(self, event: int) -> None:
        """Keep the windows until the event has ended."""
        with self._holds.lock:
            self.events.add(event)

    def end(self, event: int) -> None:
        """Remove an event that has ended and is about to be freed."""
        with self._holds.lock:
            self.events.discard(event)
            self._holds.forget(self)

    def started(self) -> None:
        """Declare that no further events follow: the hold ends with the last of them."""
        with self._holds.lock:
            self.starting = False
            self._holds.forget(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.started()


class Holds:
    """All holds on a pool's windows. ``lock`` guards the holds and the windows."""

    def __init__(self, lock: threading.Condition) -> None:
        self.lock = lock
        self._all: set[Hold] = set()

    def make(self, driver: Driver, addresses: Mapping[WindowId, int]) -> Hold:
        """Make a hold on these windows, for events of ``driver``. The caller holds the lock."""
        hold = Hold(self, driver, addresses)
        self._all.add(hold)
        return hold

    def forget(self, hold: Hold) -> None:
        """Remove a hold without remaining events. The caller holds the lock."""
        if not hold.starting and not hold.events:
            self._all.discard(hold)

    def used(self) -> set[WindowId]:
        """Return the windows in use now. The caller holds the lock."""
        return {place for hold in self._all if self._busy(hold) for place in hold.addresses}

    def _busy(self, hold: Hold) -> bool:
        try:
            return hold.starting or not all(hold.driver.ended(event) for event in hold.events)
        except DriverError:  # the owner gets the error; work may still run
            return True
