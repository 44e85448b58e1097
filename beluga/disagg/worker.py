# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prefill worker: it claims prompts, has its engine compute them, and acknowledges them.

It requests one token from the engine and discards it. The useful result is the prompt's KV, which
the engine's connector saves into the pool before the engine answers. So the worker may die at any
point, and another worker's engine finds what is already done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from beluga.disagg.queue import VISIBILITY_S
from beluga.errors import QueueError, WorkerError, is_of_request
from beluga.listening import shown_url

if TYPE_CHECKING:
    import aiohttp

    from beluga.disagg.queue import Claim, PrefillTask, TaskQueue

logger = logging.getLogger(__name__)

_BACK_OFF_S = 1.0  # the pause after a failure
_DEQUEUE_S = 5.0
_CLIENT_ERROR, _SERVER_ERROR = 400, 500
# A request that is invalid, or nested too deeply, in a part that no router has decoded.
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
_SHOWN_SIZE = 200  # bytes of an engine's error
_BUSY = (429, 502, 503, 504)  # statuses of an engine, or a proxy before it, that affect every task

# Fields that request more than one output of one token, or contradict it.
_DROPPED = ("stream_options", "min_tokens", "best_of", "max_completion_tokens", "logprobs")


@dataclasses.dataclass(slots=True)
class WorkerStat:
    """Counts of the claimed tasks by outcome."""

    done: int = 0
    expired: int = 0  # their deadline had passed
    # the engine rejected an invalid request, and the decode engine will reject it, too
    refused: int = 0
    given_back: int = 0  # the engine failed, and another worker gets the task
    dropped: int = 0  # delivered too often


def prefill_request(task: PrefillTask) -> tuple[str, bytes]:
    """Return the path and JSON body of the request that makes an OpenAI engine prefill a task.

    Raises WorkerError if the client's request cannot be read.
    """
    if task.body is None:
        prompt = task.text if task.tokens is None else task.tokens
        body: dict[str, Any] = {**task.sampling, "model": task.model, "prompt": prompt}
    else:
        try:
            body = msgspec.json.decode(task.body, type=dict[str, Any])
        except _UNREADABLE as error:
            raise WorkerError(f"request {task.request_id} is not a JSON object: {error}") from error
    for name in _DROPPED:
        body.pop(name, None)
    body |= {"max_tokens": 1, "n": 1, "stream": False}
    try:
        return task.path, msgspec.json.encode(body)
    except _UNREADABLE as error:
        raise WorkerError(f"request {task.request_id} cannot be sent: {error}") from error


class _TaskFailedError(WorkerError):
    """The engine failed on this task; other tasks may succeed."""

    of_request = True


class PrefillWorker:
    """Feeds one engine from a queue, with ``concurrency`` prompts at a time."""

    def __init__(  # noqa: PLR0913  all but the first two named
        self,
        queue: TaskQueue,
        engine_url: str,
        *,
        visibility_s: float = VISIBILITY_S,
        concurrency: int = 2,
        deliveries_max: int = 5,
        timeout_s: float = 120.0,
    ) -> None:
        """``visibility_s`` is that of the queue. A task that was delivered more than
        ``deliveries_max`` times is dropped, because it may crash engines. ``timeout_s`` limits a
        prefill.
        """
        self.stat = WorkerStat()
        self._queue = queue
        self._engine_url = engine_url.rstrip("/")
        self._visibility_s = visibility_s
        self._concurrency = concurrency
        self._deliveries_max = deliveries_max
        self._timeout_s = timeout_s
        self._stopping = asyncio.Event()
        self._works = False  # whether the engine has completed a task since its last failure

    def stop(self) -> None:
        """Stop claiming tasks. :meth:`run` returns when the claimed ones are done."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until :meth:`stop`. An unreachable queue or engine is retried."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._work(session) for _ in range(self._concurrency)))

    async def _work(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set():
            try:
                claim = await self._next()
                if claim is not None and not await self._handle(session, claim):
                    await self._pause()
            except QueueError as error:
                logger.warning("%s", error)
                await self._pause()
            except Exception:  # only this task: its claim expires, and at its limit it is dropped
                logger.exception("a prefill has failed")
                await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _BACK_OFF_S)

    async def _next(self) -> Claim | None:
        """Claim a task. Returns None after _DEQUEUE_S seconds without one, or when the worker
        stops.
        """
        dequeue = asyncio.ensure_future(self._queue.dequeue_task(_DEQUEUE_S))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({dequeue, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if dequeue.done():
            return dequeue.result()
        dequeue.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if claim := await dequeue:
                await claim.nack(0.0)
        return None

    async def _handle(self, session: aiohttp.ClientSession, claim: Claim) -> bool:
        """Do a task. Returns False if the engine failed, which causes a pause, unless only this
        task fails.
        """
        task = claim.task
        if task.expired:
            self.stat.expired += 1
        elif claim.deliveries > self._deliveries_max:
            logger.warning("dropped %s: delivered %d times", task.request_id, claim.deliveries)
            self.stat.dropped += 1
        else:
            keeper = asyncio.create_task(self._extend_claim(claim))
            try:
                refusal = await self._prefill(session, task)
            except WorkerError as error:
                logger.warning("%s", error)
                self.stat.given_back += 1
                await claim.nack(_BACK_OFF_S)
                worked, self._works = self._works, False
                return worked and is_of_request(error)
            finally:
                keeper.cancel()
            self._works = True
            if refusal is None:
                self.stat.done += 1
            else:
                logger.info("the engine refused %s: %s", task.request_id, refusal)
                self.stat.refused += 1
        await claim.ack()
        return True

    async def _extend_claim(self, claim: Claim) -> None:
        """Extend a claim during the work."""
        while True:
            await asyncio.sleep(self._visibility_s / 3)
            # after a failure the claim expires, and the task is done twice
            with contextlib.suppress(QueueError):
                await claim.extend()

    async def _prefill(self, session: aiohttp.ClientSession, task: PrefillTask) -> str | None:
        """Prefill a prompt. Returns None, or the reason of a permanent rejection by the engine.

        Raises WorkerError if the engine is down or busy, or fails.
        """
        import aiohttp

        try:
            path, body = prefill_request(task)
        except WorkerError as error:
            return str(error)
        headers = {"Content-Type": "application/json"}
        url = self._engine_url + path
        try:
            async with session.post(url, data=body, headers=headers) as answer:
                text = (await _beginning(answer)).decode(errors="replace")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            why = error or type(error).__name__
            raise WorkerError(f"{shown_url(url)} does not answer: {why}") from error
        if answer.status >= _SERVER_ERROR or answer.status in _BUSY:
            kind = WorkerError if answer.status in _BUSY else _TaskFailedError
            raise kind(f"{shown_url(url)} answers {answer.status}: {text}")
        return text if answer.status >= _CLIENT_ERROR else None


async def _beginning(answer: aiohttp.ClientResponse) -> bytes:
    """Read a response to its end, and return its beginning. The rest does not matter, however long
    it is.
    """
    begin = b""
    async for piece in answer.content.iter_any():
        if len(begin) < _SHOWN_SIZE:
            begin += piece[:_SHOWN_SIZE]
    return begin[:_SHOWN_SIZE]
