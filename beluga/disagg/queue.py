# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The one interface of all prefill queues: Dynamo's calls, with claims that run out.

Dynamo acknowledges a task before it is worked on, so a prefill worker that dies loses it. Here a
task that is taken is *claimed*: it stays in the queue, hidden from others, and leaves it when the
work is acknowledged. A claim that is neither acknowledged nor extended in time runs out, and
another worker gets the task: at-least-once. Prefill is idempotent (blocks have the prompt's own
keys), so that is also enough.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from beluga.disagg.task import PrefillTask

VISIBILITY_S = 30.0  # how long a claim hides its task; workers extend it at a third of that
TASKS_MAX = 1024  # outstanding tasks of a queue; beyond, enqueueing raises QueueFullError


class QueueSize(NamedTuple):
    """Tasks in the queue, none of which is done."""

    waiting: int  # nobody has them: Dynamo's num_pending, what its decision compares
    claimed: int  # a worker has, or had and has not been missed yet

    @property
    def total(self) -> int:
        """All that would be lost with the queue."""
        return self.waiting + self.claimed


class Ticket(Protocol):
    """What the sender of a task holds."""

    async def done(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds at most: whether the task has left the queue, done. False is
        no failure of it: it may still be worked on.
        """
        ...


class Claim(Protocol):
    """A task that this worker is to do, until the claim runs out."""

    @property
    def task(self) -> PrefillTask: ...

    @property
    def deliveries(self) -> int:
        """How often it was given out, this time included: above 1, somebody else may have begun.

        In the pool counted since the server's start: a takeover makes all claims void.
        """
        ...

    async def ack(self) -> bool:
        """It is done, and leaves the queue. False: it had left already. Raises QueueError."""
        ...

    async def extend(self) -> bool:
        """Hide it for another VISIBILITY_S from now. False: the claim has run out; go on or stop,
        either is right. Raises QueueError.
        """
        ...

    async def nack(self, delay: float = 0.0) -> None:
        """Give it back, for others to have in ``delay`` seconds. Raises QueueError."""
        ...


class TaskQueue(Protocol):
    """Tasks in the order in which they came, each to one worker at a time."""

    async def enqueue_task(self, task: PrefillTask) -> Ticket:
        """Once this returns, the task outlives the death of any process.

        Raises QueueFullError, and QueueError if the queue cannot be reached: it is then unknown
        whether the task is in it.
        """
        ...

    async def dequeue_task(self, timeout: float = 1.0) -> Claim | None:
        """Claim the oldest task that waits; None if there was none for ``timeout`` seconds.

        Raises QueueError. What is in the queue but is no task is dropped, with a warning.
        """
        ...

    async def get_queue_size(self) -> QueueSize:
        """Raises QueueError."""
        ...

    async def close(self) -> None:
        """Let go of it. Claims that are held run out."""
        ...


def queue_name(name: str) -> str:
    """A name as a queue may have it: ``/`` and ``\\`` become ``_`` (Dynamo's rule, so that a
    model's name is a queue's), and so does what NATS gives a meaning: blanks, ``.``, ``*``, ``>``.
    """
    return re.sub(r"[/\\\s.*>]", "_", name)
