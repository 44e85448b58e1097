# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests that wait for blocks: first in, first out, all of their blocks or none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from beluga.kvbm.handles import MutableBlock


class Reservation:
    """One call of ``reserve``. It has ended once its future is resolved, failed or cancelled."""

    __slots__ = ("__weakref__", "count", "ended", "future", "request", "since_s")

    def __init__(self, request: Hashable, count: int) -> None:
        self.request, self.count = request, count
        self.future: Future[list[MutableBlock]] = Future()
        self.since_s = time.perf_counter()
        self.ended = False


class Reservations:
    """The queue of reservations. A later one never overtakes, even if it needs fewer blocks.
    Guarded by the pool's lock.
    """

    def __init__(self) -> None:
        self._waiting: deque[Reservation] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, reservation: Reservation) -> None:
        """Append a reservation to the queue."""
        self._waiting.append(reservation)

    def of(self, request: Hashable) -> list[Reservation]:
        """Return the waiting reservations of a request."""
        return [one for one in self._waiting if one.request == request]

    def cancelled(self) -> list[Reservation]:
        """Return the reservations with a cancelled future."""
        return [one for one in self._waiting if one.future.cancelled()]

    def remove(self, reservation: Reservation) -> bool:
        """Remove a reservation. Returns True if its future must be resolved now: it had not ended
        and is not cancelled.
        """
        if reservation.ended:
            return False
        reservation.ended = True
        self._waiting.remove(reservation)
        return reservation.future.set_running_or_notify_cancel()

    def grant(self, has_room: Callable[[int], bool]) -> Reservation | None:
        """Remove and return the first reservation, if there is room for its blocks."""
        while self._waiting:
            head = self._waiting[0]
            if not (head.future.cancelled() or has_room(head.count)):
                return None
            if self.remove(head):
                return head
        return None

    def clear(self) -> list[Reservation]:
        """Remove all reservations, and return those whose futures must be resolved."""
        return [one for one in list(self._waiting) if self.remove(one)]
