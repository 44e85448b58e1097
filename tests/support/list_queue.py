# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A prefill queue in a list, for tests of its users; claims do not expire."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from beluga.disagg import PrefillTask, QueueSize


@dataclasses.dataclass
class ListTicket:
    queue: ListQueue
    event: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def done(self, timeout: float) -> bool:
        try:
            await asyncio.wait_for(self.event.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def withdraw(self) -> bool:
        others = [entry for entry in self.queue.waiting if entry[1] is not self]
        removed = len(others) < len(self.queue.waiting)
        self.queue.waiting[:] = others
        return removed


@dataclasses.dataclass
class ListClaim:
    queue: ListQueue
    task: PrefillTask
    ticket: ListTicket
    deliveries: int
    extended: int = 0

    async def ack(self) -> bool:
        self.queue.held.remove(self)
        self.queue.acked.append(self.task.request_id)
        self.ticket.event.set()
        return True

    async def extend(self) -> bool:
        self.extended += 1
        return True

    async def nack(self, delay: float = 0.0) -> None:
        self.queue.held.remove(self)
        if self.queue.gives_back:
            self.queue.waiting.insert(0, (self.task, self.ticket, self.deliveries))
        self.queue.given_back()


class ListQueue:
    def __init__(self) -> None:
        self.waiting: list[tuple[PrefillTask, ListTicket, int]] = []
        self.held: list[ListClaim] = []
        self.acked: list[str] = []
        self.fails: Exception | None = None
        self.gives_back = True  # a returned claim is delivered at once, not after its delay
        self.given_back: Callable[[], None] = lambda: None  # called when a claim is returned

    async def enqueue_task(self, task: PrefillTask) -> ListTicket:
        ticket = ListTicket(self)
        self.waiting.append((task, ticket, 0))
        return ticket

    async def dequeue_task(self, timeout: float = 1.0) -> ListClaim | None:
        if self.fails:
            raise self.fails
        if not self.waiting:
            await asyncio.sleep(min(timeout, 0.01))
            return None
        task, ticket, deliveries = self.waiting.pop(0)
        claim = ListClaim(self, task, ticket, deliveries + 1)
        self.held.append(claim)
        return claim

    async def get_queue_size(self) -> QueueSize:
        if self.fails:
            raise self.fails
        return QueueSize(len(self.waiting), len(self.held))

    async def close(self) -> None: ...
