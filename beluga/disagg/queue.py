# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface that all prefill queues share: Dynamo's calls, with claims that run out.

Dynamo acknowledges a task before the work on it, so a prefill worker that dies loses it. Here a
worker *claims* a task: it stays in the queue, hidden from others, and leaves the queue when the
work is acknowledged. A claim that is neither acknowledged nor extended in time runs out, and
another worker gets the task. So each task is done at least once. That suffices, because prefill is
idempotent (blocks have the prompt's own keys).
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from beluga.disagg.task import PrefillTask

VISIBILITY_S = 30.0  # how long a claim hides its task; workers extend it after a third of that
TASKS_MAX = 1024  # tasks in a queue; enqueueing more raises QueueFullError


class QueueSize(NamedTuple):
    """The tasks in the queue that are not done."""

    waiting: int  # unclaimed tasks: Dynamo's num_pending, which its decision compares
    claimed: int  # tasks of a worker, which may have died since

    @property
    def total(self) -> int:
        """All tasks that would be lost with the queue."""
        return self.waiting + self.claimed


class Ticket(Protocol):
    """The sender's handle of a task."""

    async def done(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds. Returns whether the task is done and has left the
        queue. False is not a failure: a worker may still work on it. It may be called again.
        """
        ...

    async def withdraw(self) -> bool:
        """Remove the task from the queue unless a worker has it. Returns False if one has it, or
        has done it. Raises QueueError.
        """
        ...


class Claim(Protocol):
    """A task that this worker does until the claim runs out."""

    @property
    def task(self) -> PrefillTask: ...

    @property
    def deliveries(self) -> int:
        """How often the task was given out, with this time. Above 1 another worker may have begun
        it. A queue in the pool counts since the server's start, because a takeover ends all claims.
        """
        ...

    async def ack(self) -> bool:
        """Report that the task is done. Returns False if it had already left the queue. Raises
        QueueError.
        """
        ...

    async def extend(self) -> bool:
        """Hide the task for another VISIBILITY_S from now. Returns False if the claim has run out;
        then the worker may go on or stop. Raises QueueError.
        """
        ...

    async def nack(self, delay: float = 0.0) -> None:
        """Give the task back. Others can claim it in ``delay`` seconds. Raises QueueError."""
        ...


class TaskQueue(Protocol):
    """A queue that gives out tasks in the order of their arrival, each to one worker at a time."""

    async def enqueue_task(self, task: PrefillTask) -> Ticket:
        """Enqueue a task. Once this returns, the task survives the death of any process.

        Raises QueueFullError, TaskError if the queue does not take this task, and QueueError if the
        queue cannot be reached; then it is unknown whether the task is in it.
        """
        ...

    async def dequeue_task(self, timeout: float = 1.0) -> Claim | None:
        """Claim the oldest waiting task. Returns None if there was none for ``timeout`` seconds.

        Raises QueueError. An entry of the queue that is not a task is dropped with a warning.
        """
        ...

    async def get_queue_size(self) -> QueueSize:
        """Return how many tasks are waiting and claimed. Raises QueueError."""
        ...

    async def close(self) -> None:
        """Close the queue. Claims that are still held run out."""
        ...


def queue_name(name: str) -> str:
    """Convert a name to a valid queue name. ``/`` and ``\\`` become ``_`` (Dynamo's rule, so that a
    model's name names its queue), and so do characters with a meaning in NATS: blanks, ``.``,
    ``*``, ``>``.
    """
    return re.sub(r"[/\\\s.*>]", "_", name)
