# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which windows are in use: a window is unregistered only when nothing of it is under way.

A transfer holds the windows that it touches while it is put on its stream, and after that until the
events of its parts have ended; whether anybody has waited for them does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from beluga.transfer.engines.cuda.driver import Driver, DriverError

Place = tuple[int, int]  # device, window on that device


class Hold:
    """One transfer's. ``addresses``: where the windows that are ready lie for the GPU.

    A context: events of what is started in it are added with :meth:`until`.
    """

    def __init__(self, holds: Holds, driver: Driver, addresses: Mapping[Place, int]) -> None:
        self.driver = driver  # whose the events are
        self.addresses = addresses
        self.events: set[int] = set()
        self.starting = True
        self._holds = holds

    def until(self, event: int) -> None:
        """The windows are in use until it has ended."""
        with self._holds.lock:
            self.events.add(event)

    def end(self, event: int) -> None:
        """It has ended, and is about to be freed."""
        with self._holds.lock:
            self.events.discard(event)
            self._holds.forget(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._holds.lock:
            self.starting = False
            self._holds.forget(self)


class Holds:
    """All that are there. ``lock`` guards them, and the windows that they are of."""

    def __init__(self, lock: threading.Condition) -> None:
        self.lock = lock
        self._all: set[Hold] = set()

    def make(self, driver: Driver, addresses: Mapping[Place, int]) -> Hold:
        """A hold on these windows, until events of the driver's. The lock is held."""
        hold = Hold(self, driver, addresses)
        self._all.add(hold)
        return hold

    def forget(self, hold: Hold) -> None:
        """If nothing of it is left. The lock is held."""
        if not hold.starting and not hold.events:
            self._all.discard(hold)

    def used(self) -> set[Place]:
        """Windows in use now. The lock is held."""
        return {place for hold in self._all if self._busy(hold) for place in hold.addresses}

    def _busy(self, hold: Hold) -> bool:
        try:
            return hold.starting or not all(hold.driver.ended(event) for event in hold.events)
        except DriverError:  # its owner is told; who knows what still runs
            return True
