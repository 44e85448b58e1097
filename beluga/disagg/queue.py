# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill queues: the task, the interface of all queues, and how one is opened by its address.

A task is a typed message, MessagePack on the wire, never pickled. It carries the fields of Dynamo's
RemotePrefillRequest, except the addresses of a decode engine's blocks: KV goes through the pool,
where the decode engine finds it by the prompt's own hashes.

A queue has Dynamo's calls, with claims that expire. Dynamo acknowledges a task before the work on
it, so it is lost if the prefill worker dies. Here a worker *claims* a task: the task stays in the
queue, hidden from other workers, and leaves the queue when the work is acknowledged. A claim that
is neither acknowledged nor extended in time expires, and another worker gets the task. So each task
is done at least once. That suffices, because prefill is idempotent (the keys of blocks depend on
the prompt only).
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import msgspec

from beluga.errors import BadValueError, QueueError, TaskError
from beluga.listening import shown_url

# This fits a prompt of 128 k tokens, packed in at most 5 bytes each, with its sampling parameters.
# Together with a queue's own header a message has at most 1 MiB.
TASK_SIZE_MAX = (1 << 20) - 64

PATHS = ("/v1/completions", "/v1/chat/completions")
"""The paths of an engine that a task may contain. A client with access to the queue reaches
engines, whose other paths load adapters, put the engine to sleep, or call any method.
"""

MAX_AGE_S = 600.0  # Dynamo's JetStream streams: 10 minutes (lib/runtime/src/transports/nats.rs)


class PrefillTask(msgspec.Struct, frozen=True, kw_only=True, tag="prefill-1"):
    """A prompt to be prefilled into the pool.

    ``request_id`` identifies the request. Two tasks of one id are the same work, so a worker may
    repeat or skip the second. The prompt is exactly one of ``tokens`` (token ids), ``text``, and
    ``body``, which is an OpenAI request as its client sent it to ``path``. ``body`` is for prompts
    that only the engine can build (from a chat's template, tools, a cache salt).
    """

    request_id: str
    model: str
    tokens: list[int] | None = None
    text: str | None = None
    body: bytes | None = None
    path: str = "/v1/completions"
    sampling: dict[str, float | int | str | bool] = {}
    block_keys: list[bytes] = []  # the keys of blocks that the pool lacks, if known
    deadline: float = 0.0  # seconds since 1970, after which no client waits; 0 means MAX_AGE_S

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed. Hosts' clocks are assumed to agree to a second."""
        return self.deadline != 0 and time.time() > self.deadline + 1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PrefillTask)


def _check(task: PrefillTask) -> None:
    prompts = sum(prompt is not None for prompt in (task.tokens, task.text, task.body))
    if not task.request_id:
        raise TaskError("a task has no request_id; give each request a name of its own")
    if task.path not in PATHS:
        raise TaskError(f"a task's path is {task.path[:40]!r}; give one of {', '.join(PATHS)}")
    if prompts != 1:
        raise TaskError(f"a task has {prompts} prompts; give one of tokens, text and body")


def encode_task(task: PrefillTask) -> bytes:
    """Encode a task. Raises TaskError unless it has a request_id, one prompt, and at most
    TASK_SIZE_MAX bytes.
    """
    _check(task)
    data = _encoder.encode(task)
    if len(data) > TASK_SIZE_MAX:
        raise TaskError(
            f"a task has {len(data)} bytes, more than {TASK_SIZE_MAX}; prefill that prompt locally"
        )
    return data


def decode_task(data: bytes | memoryview) -> PrefillTask:
    """Decode a task. Raises TaskError for other bytes, because a queue's content is foreign
    input.
    """
    try:
        task = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(
            f"not a prefill task: {error}; does another program use the queue?"
        ) from error
    _check(task)
    return task


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


class Ticket(NamedTuple):
    """The sender's handle of a task."""

    done: Callable[[float], Awaitable[bool]]
    """Wait at most this many seconds. Returns whether the task is done and has left the queue.
    False is not a failure: a worker may still work on it. It may be called again.
    """

    withdraw: Callable[[], Awaitable[bool]]
    """Remove the task from the queue unless a worker has claimed it. Returns False if it is claimed
    or done. Raises QueueError.
    """


class Claim(NamedTuple):
    """A task of this worker until the claim expires. Its calls raise QueueError."""

    task: PrefillTask

    deliveries: int
    """How often the task was delivered, including this time. Above 1, another worker may have begun
    it. A queue in the pool counts since the server's start, because a takeover ends all claims.
    """

    ack: Callable[[], Awaitable[bool]]
    """Report that the task is done. Returns False if the task had already left the queue, which
    JetStream does not report.
    """

    extend: Callable[[], Awaitable[bool]]
    """Hide the task for another VISIBILITY_S from now. Returns False if the claim has expired,
    which JetStream does not report; then the worker may continue or stop.
    """

    nack: Callable[[float], Awaitable[object]]
    """Return the task to the queue. Other workers can claim it after this many seconds."""


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


async def open_queue(url: str, name: str, *, visibility_s: float = VISIBILITY_S) -> TaskQueue:
    """Open the queue ``name`` at ``nats://host:port`` (with TLS at ``tls://host:port``), or in a
    pool: ``pool`` (the default pool), or ``pool:/dev/shm/a:/dev/shm/b`` (its devices). The queue is
    made if it does not exist.

    Raises BadValueError for any other address, and QueueError if no server answers, or if a package
    is missing.
    """
    scheme = url.partition(":")[0]
    if scheme in ("nats", "tls"):
        try:
            from beluga.disagg.nats_queue import NatsQueue
        except ImportError as error:
            raise QueueError(
                f"{error.name} is missing; install it with: pip install 'beluga-kv[router]'"
            ) from error
        return await NatsQueue.open(url, name, visibility_s=visibility_s)
    if scheme == "pool":
        from beluga.disagg.pool_queue import PoolQueue

        paths = url.partition(":")[2]
        return await PoolQueue.open(paths, name, visibility_s=visibility_s)
    raise BadValueError(
        f"'{shown_url(url)}' is not a prefill queue; give nats://HOST:PORT, tls://HOST:PORT, pool, "
        "or pool:PATH:PATH"
    )
