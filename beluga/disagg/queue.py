# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of all prefill queues: Dynamo's calls, with claims that expire.

Dynamo acknowledges a task before the work on it, so it is lost if the prefill worker dies. Here a
worker *claims* a task: the task stays in the queue, hidden from other workers, and leaves the queue
when the work is acknowledged. A claim that is neither acknowledged nor extended in time expires,
and another worker gets the task. So each task is done at least once. That suffices, because prefill
is idempotent (the keys of blocks depend on the prompt only).
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
    claimed: int  # tasks of workers, which may have died

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
        """Remove the task from the queue unless a worker has claimed it. Returns False if it is
        claimed or done. Raises QueueError.
        """
        ...


class Claim(Protocol):
    """A task of this worker until the claim expires."""

    @property
    def task(self) -> PrefillTask: ...

    @property
    def deliveries(self) -> int:
        """How often the task was delivered, including this time. Above 1, another worker may have
        begun it. A queue in the pool counts since the server's start, because a takeover ends all
        claims.
        """
        ...

    async def ack(self) -> bool:
        """Report that the task is done. Returns False if the task had already left the queue.
        Raises QueueError.
        """
        ...

    async def extend(self) -> bool:
        """Hide the task for another VISIBILITY_S from now. Returns False if the claim has expired;
        then the worker may continue or stop. Raises QueueError.
        """
        ...

    async def nack(self, delay: float = 0.0) -> None:
        """Return the task to the queue. Other workers can claim it after ``delay`` seconds. Raises
        QueueError."""
        ...


class TaskQueue(Protocol):
    """A queue that delivers tasks in order of arrival, each to one worker at a time."""

    async def enqueue_task(self, task: PrefillTask) -> Ticket:
        """Enqueue a task. Once this returns, the task survives the death of any process.

        Raises QueueFullError, TaskError if the queue rejects this task, and QueueError if the queue
        is unreachable; then it is unknown whether the task is in it.
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
        """Close the queue. Open claims expire."""
        ...


def queue_name(name: str) -> str:
    """Convert a name to a valid queue name. ``/`` and ``\\`` become ``_`` (Dynamo's rule, so that a
    model's name is valid for its queue), and so do special characters of NATS: blanks, ``.``,
    ``*``, ``>``.
    """
    return re.sub(r"[/\\\s.*>]", "_", name)
