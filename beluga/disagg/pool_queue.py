# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prefill queue in the pool itself, within a rack. It needs only the pool's server.

A task is a block that is kept until the task is done (``csrc/index/task_call.c``). It is in the
pool before :meth:`PoolQueue.enqueue_task` returns, and the pool's next server finds it there.
Claims end with their server, or with the claimant's session as soon as the server detects its end.
Tasks of one ``request_id`` are one task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from beluga.disagg.queue import (
    VISIBILITY_S,
    Claim,
    PrefillTask,
    QueueSize,
    Ticket,
    decode_task,
    encode_task,
    queue_name,
)
from beluga.errors import BelugaError, QueueError, TaskError, is_of_request
from beluga.index import BlockState, IndexClient, TaskClient, TaskRecord
from beluga.kvcache import KVCache, Namespace, hash_keys
from beluga.pool import Pool, default_specs

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SIZE_BYTES = 4  # the task's length, before its bytes
_BLOCK_SIZE_MIN = 4096  # sizes are powers of two from here on, because a pool has few block classes
_CHUNK_SIZE = 2 << 20  # one checksum for each task, which takes no space after the bytes
_POLL_S = (0.001, 0.02)  # the pause between two polls for a task: the first and the longest
_WATCH_S = 0.003  # the pause between two checks whether tasks are done
_READS_MAX = 3  # a task that cannot be read this many times is damaged


def _packed(data: bytes) -> NDArray[np.uint8]:
    size = _SIZE_BYTES + len(data)
    block = np.zeros(max(_BLOCK_SIZE_MIN, 1 << (size - 1).bit_length()), np.uint8)
    block[:size] = np.frombuffer(len(data).to_bytes(_SIZE_BYTES, "little") + data, np.uint8)
    return block


def _unpacked(block: NDArray[np.uint8]) -> bytes:
    size = int.from_bytes(block[:_SIZE_BYTES].tobytes(), "little")
    return block[_SIZE_BYTES : _SIZE_BYTES + size].tobytes()


@contextlib.asynccontextmanager
async def _reaching() -> AsyncIterator[None]:
    """Convert the pool's errors to a QueueError. A QueueFullError of the server passes
    unchanged."""
    try:
        yield
    except QueueError:
        raise
    except BelugaError as error:
        if is_of_request(error):
            raise TaskError(
                f"the prefill queue in the pool rejects this request: {error}"
            ) from error
        raise QueueError(f"the prefill queue in the pool: {error}") from error


class PoolQueue:
    """A :class:`~beluga.disagg.TaskQueue` in a pool. It takes one lane."""

    def __init__(self, pool: Pool, name: str, visibility_s: float, timeout_s: float) -> None:
        """Callers use :meth:`open` instead. Raises the errors of attaching to a pool's server."""
        self._pool = pool
        self._visibility_s = visibility_s
        self._timeout_s = timeout_s
        self._cache = KVCache(
            pool,
            namespace=Namespace({"prefill queue": queue_name(name)}),
            timeout_s=timeout_s,
            chunk_size=_CHUNK_SIZE,
            kept=True,
            engine="cpu",  # tasks are small
        )
        self._tasks = TaskClient(self._cache.client)
        self._index = IndexClient(self._cache.client)
        # one thread, because the calls of a session wait for each other in any case
        self._thread = ThreadPoolExecutor(1, "beluga-queue")
        self._awaited: dict[bytes, asyncio.Event] = {}
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        paths: str,
        name: str,
        *,
        visibility_s: float = VISIBILITY_S,
        timeout_s: float = 5.0,
    ) -> PoolQueue:
        """Open the queue ``name`` in the pool on ``paths`` (joined by ``:``; "" is the default
        pool).

        Raises QueueError.
        """

        def attach() -> PoolQueue:
            pool = Pool.open(paths.split(":") if paths else default_specs())
            try:
                return cls(pool, name, visibility_s, timeout_s)
            except BaseException:
                pool.close()
                raise

        async with _reaching():
            return await asyncio.to_thread(attach)

    async def enqueue_task(self, task: PrefillTask) -> Ticket:
        """See :class:`~beluga.disagg.TaskQueue`."""
        block = _packed(encode_task(task))
        key = self._cache.keys(hash_keys([task.request_id]))
        end = time.monotonic() + self._timeout_s

        def put() -> bool:
            """Put the task. Returns False if another session is writing it."""
            result = self._cache.put(key, [block])
            result.raise_for_refused()
            return result.pending == 0

        while not await self._call(put):  # another session is writing the task and may have died
            if time.monotonic() > end:
                raise TaskError(
                    "another session is enqueuing a task of this request and does not finish; "
                    "try again"
                )
            await asyncio.sleep(_POLL_S[1])
        return Ticket(
            done=partial(self._wait_until_removed, key),
            withdraw=partial(self._call, partial(self._tasks.withdraw, key)),
        )

    async def dequeue_task(self, timeout: float = 1.0) -> Claim | None:
        """See :class:`~beluga.disagg.TaskQueue`."""
        end = time.monotonic() + timeout
        pause = _POLL_S[0]
        while True:
            record = await self._call(
                lambda: self._tasks.claim(self._cache.fingerprint, visible_s=self._visibility_s)
            )
            if record is None:
                wait_until_removed = end - time.monotonic()
                if wait_until_removed <= 0:
                    return None
                await asyncio.sleep(min(pause, wait_until_removed))
                pause = min(2 * pause, _POLL_S[1])
            elif claim := await self._read(record):
                return claim

    async def get_queue_size(self) -> QueueSize:
        """See :class:`~beluga.disagg.TaskQueue`."""
        return QueueSize(*await self._call(lambda: self._tasks.count(self._cache.fingerprint)))

    async def close(self) -> None:
        """See :class:`~beluga.disagg.TaskQueue`. Claims end at once."""
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.shutdown()
        self._cache.close()
        self._pool.close()

    async def _remove(self, key: NDArray[np.uint64]) -> bool:
        """Remove a task that is done. Returns whether it was in the queue."""
        return await self._call(lambda: self._cache.remove(key)) > 0

    async def _extend(self, record: TaskRecord, visible_s: float | None = None) -> bool:
        """Extend a claim by ``visible_s`` seconds, or by the queue's visibility."""
        seconds = self._visibility_s if visible_s is None else visible_s
        return await self._call(lambda: self._tasks.extend(record, visible_s=seconds))

    async def _wait_until_removed(self, key: NDArray[np.uint64], timeout: float) -> bool:
        """Wait until a task has left the queue. Returns whether it has, within ``timeout``
        seconds.
        """
        event = self._awaited.setdefault(key.tobytes(), asyncio.Event())
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        finally:
            self._awaited.pop(key.tobytes(), None)
        return True

    async def _watch(self) -> None:
        """Poll for all waiting senders together, as long as there are any."""
        while self._awaited:
            awaited = dict(self._awaited)
            try:
                removed = await self._call(partial(self._removed_of, tuple(awaited)))
            except QueueError as error:
                logger.debug("%s", error)
                removed = []
            for key in removed:
                awaited[key].set()
            await asyncio.sleep(_WATCH_S)

    def _removed_of(self, keys: tuple[bytes, ...]) -> list[bytes]:
        """Return the tasks that have left the queue, by one call for all, and one per task that
        remains: claims and new tasks wait for this thread.
        """
        removed = []
        while keys:
            words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
            lookup = self._index.lookup(words)
            keys = keys[lookup.count :]
            if keys and lookup.state is BlockState.MISS:
                removed.append(keys[0])
            keys = keys[1:]
        return removed

    async def _read(self, record: TaskRecord) -> Claim | None:
        """Read a claimed task. Returns None if it is already done or cannot be read."""
        block = np.empty(record.length, np.uint8)
        result = await self._call(lambda: self._cache.get(record.key, [block]))
        why = "it cannot be read"
        if result.hits:
            try:
                return Claim(
                    task=decode_task(_unpacked(block)),
                    deliveries=record.deliveries,
                    ack=partial(self._remove, record.key),
                    extend=partial(self._extend, record),
                    nack=partial(self._extend, record),
                )
            except QueueError as error:
                why = str(error)
        if result.hits or record.deliveries >= _READS_MAX:
            logger.warning("dropped from the prefill queue: %s", why)
            await self._remove(record.key)
        else:
            await self._extend(record, 0)
        return None

    async def _call(self, call: Callable[[], T]) -> T:
        """Call the pool's server on this queue's thread. Raises QueueError."""
        async with _reaching():
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
