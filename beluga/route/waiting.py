# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Where requests wait while every worker that may have them is full: a line for each model.

Whoever is next in a line is tried whenever something has ended, come up or cooled down; nobody
overtakes it, so a request that many could take does not keep out one that few can.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

from beluga.route.answers import Refusal

PlacedT = TypeVar("PlacedT")


@dataclasses.dataclass(slots=True)
class _Waiter(Generic[PlacedT]):
    attempt: Callable[[], PlacedT | None]
    placed: asyncio.Future[PlacedT]


class Room(Generic[PlacedT]):
    """Requests that wait, bounded in number. All of it runs on one event loop."""

    def __init__(self, queued_max: int, *, give_back: Callable[[PlacedT], None]) -> None:
        """``give_back`` takes what was found for a request that has gone meanwhile."""
        self._queued_max = queued_max
        self._give_back = give_back
        self._lines: dict[str | None, list[_Waiter[PlacedT]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self, model: str | None) -> bool:
        """Whether anybody stands in a model's line."""
        return model in self._lines

    async def wait(
        self,
        model: str | None,
        attempt: Callable[[], PlacedT | None],
        *,
        patience_s: float,
    ) -> PlacedT:
        """What ``attempt`` gives, once it gives something. Raises what it raises, and Refusal if
        that takes too long or too many wait.
        """
        if len(self) >= self._queued_max:
            text = f"every worker is busy, and {self._queued_max} requests wait already"
            raise Refusal(503, text, retry_after_s=1)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(attempt, loop.create_future())
        line = self._lines.setdefault(model, [])
        line.append(waiter)
        timer = loop.call_later(patience_s, self._give_up, waiter, patience_s)
        try:
            placed: PlacedT = await waiter.placed
        except asyncio.CancelledError:
            found = waiter.placed.done() and not waiter.placed.cancelled()
            if found and waiter.placed.exception() is None:
                self._give_back(waiter.placed.result())
            raise
        finally:
            timer.cancel()
            if waiter in line:
                line.remove(waiter)
            if not line and self._lines.get(model) is line:
                del self._lines[model]
        return placed

    def _give_up(self, waiter: _Waiter[PlacedT], patience_s: float) -> None:
        if not waiter.placed.done():
            text = f"every worker is busy, or asked to be left alone, for {patience_s:g} s"
            waiter.placed.set_exception(Refusal(503, text, retry_after_s=1))

    def look(self) -> None:
        """Something has changed: try those who are next."""
        for line in list(self._lines.values()):
            while line and self._try(line[0]):
                del line[0]

    def look_in(self, seconds: float) -> None:
        """Look again after so long, or sooner."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        if self._timer is None or self._timer.cancelled() or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.look()

    def _try(self, waiter: _Waiter[PlacedT]) -> bool:
        """Whether it need not wait any longer."""
        if waiter.placed.done():
            return True
        try:
            placed = waiter.attempt()
        except Exception as error:
            waiter.placed.set_exception(error)
            return True
        if placed is None:
            return False
        waiter.placed.set_result(placed)
        return True
