# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prefiller: a router uses it to have a prompt prefilled before the decode engine gets the
request.

    decide --local--> nothing: the decode engine prefills
           --remote-> enqueue, wait until it is done; KV is in the pool then

No failure here fails a request. If the queue is full or unreachable, or a prefill takes too long,
the decode engine prefills what the pool does not have, as it would without this module. An
unreachable queue is not used for a while; a rejected task does not cause that. A prompt that no
worker has taken in the time of a local prefill is withdrawn, so it costs at most twice that time
and is not prefilled twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable

from beluga.disagg.queue import PrefillTask, QueueSize, TaskQueue, Ticket
from beluga.errors import QueueError, is_of_request
from beluga.limit import LogLimit, and_more, kind_of

logger = logging.getLogger(__name__)

_AWAY_S = 5.0  # the pause after a queue could not be reached
_SIZE_FRESH_S = 0.02  # the greatest age of the queue's size in a decision


class PrefillOutcome(enum.Enum):
    """The outcome of a request's prefill, which is a metric's label."""

    LOCAL = "local"  # the rule chose a local prefill
    REMOTE = "remote"  # a prefill worker has done it
    UNTAKEN = "untaken"  # no worker took it in the time of a local prefill
    LATE = "late"  # a worker took it, and it was not done in time
    UNQUEUED = "unqueued"  # the queue is full or unreachable, or rejected this task


Decide = Callable[[QueueSize, int], bool]
"""Decide whether to prefill remotely. The arguments are the queue's size, and the tokens of this
prefiller in it that are not done.
"""


class Prefiller:
    """Sends prompts to prefill workers. One event loop uses it."""

    def __init__(self, queue: TaskQueue, *, timeout_s: float = 60.0) -> None:
        """``timeout_s`` is the longest time that a request waits for a prefill that a worker has
        taken.
        """
        self._queue = queue
        self._timeout_s = timeout_s
        self._size = QueueSize(0, 0)
        self._size_at = -1.0
        self._limit = LogLimit()
        self._away_until = 0.0
        self._tokens = 0  # tokens in the queue that are not done

    async def prefill(
        self, task: Callable[[float], PrefillTask], decide: Decide, *, tokens: int, local_s: float
    ) -> PrefillOutcome:
        """Prefill a request remotely if ``decide`` returns True, and wait for it. Never raises.

        ``task`` makes the task from its deadline (seconds since 1970); it is called only for a
        remote prefill. ``tokens`` is how many tokens of the prompt must be computed, which takes
        the decode engine ``local_s`` seconds.
        """
        if time.monotonic() < self._away_until:
            return PrefillOutcome.UNQUEUED
        try:
            if not decide(await self._queue_size(), self._tokens):
                return PrefillOutcome.LOCAL
            self._tokens += tokens
            try:
                ticket = await self._queue.enqueue_task(task(time.time() + self._timeout_s))
                course = await self._wait(ticket, min(local_s, self._timeout_s))
            finally:
                self._tokens -= tokens
        except QueueError as error:
            if not is_of_request(error):
                self._away_until = time.monotonic() + _AWAY_S
            self._warn("prefilling locally: %s", error)
            return PrefillOutcome.UNQUEUED
        if course is PrefillOutcome.UNTAKEN:
            self._warn("no worker took a prefill in %.3g s; are prefill workers running?", local_s)
        elif course is PrefillOutcome.LATE:
            self._warn("a prefill worker was not done in %g s", self._timeout_s)
        return course

    async def _wait(self, ticket: Ticket, local_s: float) -> PrefillOutcome:
        """Wait for a prefill, and withdraw it if no worker takes it, or if the client
        disconnects."""
        try:
            if await ticket.done(local_s):
                return PrefillOutcome.REMOTE
            if await ticket.withdraw():
                return PrefillOutcome.UNTAKEN
            done = await ticket.done(self._timeout_s - local_s)
        except asyncio.CancelledError:
            with contextlib.suppress(QueueError):
                await ticket.withdraw()
            raise
        return PrefillOutcome.REMOTE if done else PrefillOutcome.LATE

    async def close(self) -> None:
        """Close the queue."""
        await self._queue.close()

    async def _queue_size(self) -> QueueSize:
        now = asyncio.get_running_loop().time()
        if now - self._size_at > _SIZE_FRESH_S:
            self._size = await self._queue.get_queue_size()
            self._size_at = now
        return self._size

    def _warn(self, text: str, value: object) -> None:
        kind = kind_of(value) if isinstance(value, BaseException) else ""
        suppressed = self._limit.passes(text, kind)
        if suppressed is not None:
            logger.warning(text + "%s", value, and_more(suppressed))
