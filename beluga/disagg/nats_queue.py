# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prefill queue on NATS JetStream, for prefill workers in other racks that share no memory.

Stream and names are Dynamo's: subjects ``<stream>.*``, published to ``<stream>.queue``, one durable
pull consumer ``worker-group``, tasks no older than 10 minutes. Unlike in Dynamo, a task is
acknowledged when it is done; ``ack_wait`` is the lifetime of a claim. The stream is stored in
files. A nats-server that is killed and restarted still has every task; it may also have some that
were acknowledged, because it writes acknowledgements a little later. (It does not wait for the
disk: the last tasks may be lost with a whole *host*, unless the stream has replicas.)

The sender of a task receives a message in an inbox when the task ends. That message may be lost, so
after a timeout the state of the task is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import nats.errors
from nats.aio.client import Client
from nats.js import api
from nats.js.errors import (
    APIError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)
from nats.js.errors import Error as JetStreamError

from beluga.disagg.queue import (
    MAX_AGE_S,
    TASKS_MAX,
    VISIBILITY_S,
    Claim,
    PrefillTask,
    QueueSize,
    Ticket,
    decode_task,
    encode_task,
    queue_name,
)
from beluga.errors import BadValueError, QueueError, QueueFullError, TaskError
from beluga.listening import shown_url

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONSUMER = "worker-group"
_DONE_HEADER = "Beluga-Done"  # the inbox for the end of the task
_STREAM_FULL = (10047, 10077)  # JetStream error codes: no space, too many messages
_TASK_TOO_LARGE = 10054  # larger than the stream's largest message
_STREAM_OTHER = 10058  # the name exists with another configuration
# The errors of a lost stream or consumer. A server without JetStream raises the same; recreating
# the stream distinguishes the two.
_LOST = (NotFoundError, NoStreamResponseError, ServiceUnavailableError)
_REFUSED = ("authorization", "authentication", "auth timeout", "user authentication")
_CONNECT_S = 5.0
_RECONNECT_S = 0.2


@contextlib.asynccontextmanager
async def _reaching(url: str) -> AsyncIterator[None]:
    """Convert NATS errors to a QueueError, which does not contain the URL's password."""
    try:
        yield
    except NoStreamResponseError as error:
        raise _no_jetstream(url) from error
    except APIError as error:
        if error.err_code in _STREAM_FULL:  # a ServiceUnavailableError, too
            raise QueueFullError(
                f"the prefill queue at {url} is full; start prefill workers, or prefill locally"
            ) from error
        if isinstance(error, ServiceUnavailableError):
            raise _no_jetstream(url) from error
        if error.err_code == _TASK_TOO_LARGE:
            raise _too_large(url) from error
        raise QueueError(f"NATS at {url} refused: {error.description}") from error
    except nats.errors.MaxPayloadError as error:
        raise _too_large(url) from error
    except (nats.errors.Error, JetStreamError, OSError, asyncio.TimeoutError) as error:
        raise QueueError(
            f"NATS at {url} does not answer ({error}); is nats-server running?"
        ) from error


def _no_jetstream(url: str) -> QueueError:
    return QueueError(f"NATS at {url} has no JetStream; start nats-server with -js")


def _too_large(url: str) -> TaskError:
    return TaskError(
        f"NATS at {url} rejects a task of this size; raise its max_payload, or the stream's "
        "max_msg_size, to 1 MiB"
    )


class NatsQueue:
    """A :class:`~beluga.disagg.TaskQueue` in a stream. One event loop uses it."""

    def __init__(
        self, url: str, client: Client, jetstream: JetStreamContext, stream: str, timeout_s: float
    ) -> None:
        """Callers use :meth:`open` instead."""
        self._url = url
        self._client = client
        self._jetstream = jetstream
        self._stream = stream
        self._timeout_s = timeout_s
        self._pull: JetStreamContext.PullSubscription | None = None
        self._inbox = client.new_inbox()
        self._configs: tuple[api.StreamConfig, api.ConsumerConfig] | None = None
        # Tickets hold the events. An event without a ticket has no waiter.
        self._waiting: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    @classmethod
    async def open(  # noqa: PLR0913  all but the first two named
        cls,
        url: str,
        name: str,
        *,
        visibility_s: float = VISIBILITY_S,
        tasks_max: int = TASKS_MAX,
        max_age_s: float = MAX_AGE_S,
        timeout_s: float = _CONNECT_S,
    ) -> NatsQueue:
        """Open the queue ``name`` at ``url``, or create it. The URL is ``nats://host:port``, or
        ``tls://host:port`` for TLS with a certificate that the system trusts, or that is signed by
        the CA in SSL_CERT_FILE. Both may have ``user:password@`` or ``token@`` before the host.

        The last caller sets visibility and limits for all. The connection is restored
        automatically. Raises QueueError, and BadValueError for another address.
        """
        stream, servers = queue_name(name), url.split(",")
        url = shown_url(url)
        if not all(map(_is_address, servers)):
            raise BadValueError(f"{url} is not a NATS address; use nats://HOST:PORT")

        client = await _connected(url, servers, timeout_s)
        client.options["max_reconnect_attempts"] = -1  # reconnect to a known server without limit
        try:
            async with _reaching(url):
                jetstream = client.jetstream(timeout=timeout_s)
                queue = cls(url, client, jetstream, stream, timeout_s)
                queue._configs = (
                    api.StreamConfig(
                        name=stream,
                        subjects=[f"{stream}.*"],
                        retention=api.RetentionPolicy.WORK_QUEUE,
                        storage=api.StorageType.FILE,
                        discard=api.DiscardPolicy.NEW,
                        max_msgs=tasks_max,
                        max_age=max_age_s,
                    ),
                    api.ConsumerConfig(
                        durable_name=CONSUMER,
                        ack_policy=api.AckPolicy.EXPLICIT,
                        ack_wait=visibility_s,
                        max_ack_pending=tasks_max,
                        filter_subject=f"{stream}.queue",
                    ),
                )
                await queue._make()
                await client.subscribe(f"{queue._inbox}.*", cb=queue._on_task_done)
                return queue
        except QueueError:
            await client.close()
            raise

    async def _make(self) -> None:
        """Make the stream and its consumer, or set their limits if they exist."""
        assert self._configs is not None  # noqa: S101  set by open()
        stream, consumer = self._configs
        await _make_stream(self._jetstream, stream)
        await self._jetstream.add_consumer(self._stream, consumer)

    async def _retrying(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work; if the stream is lost (the server lost its files, or an operator deleted
        it), recreate it and retry.
        """
        try:
            return await work()
        except _LOST as error:
            if getattr(error, "err_code", None) in _STREAM_FULL:
                raise
            self._pull = None
            await self._make()  # without JetStream this raises, too
            logger.warning("NATS at %s lost the queue (%s); recreating it", self._url, error)
            return await work()

    async def enqueue_task(self, task: PrefillTask) -> Ticket:
        """See :class:`~beluga.disagg.TaskQueue`. Two tasks with the same ``request_id`` within two
        minutes are one entry in the queue.
        """
        token = self._client._nuid.next().decode()
        data = encode_task(task)
        event = self._waiting[token] = asyncio.Event()
        async with _reaching(self._url):
            entry = await self._retrying(
                lambda: self._jetstream.publish(
                    f"{self._stream}.queue",
                    data,
                    stream=self._stream,
                    headers={
                        api.Header.MSG_ID: task.request_id,
                        _DONE_HEADER: f"{self._inbox}.{token}",
                    },
                )
            )
        return Ticket(partial(_happens, event), partial(self._withdraw, entry.seq))

    async def _withdraw(self, number: int) -> bool:
        """Delete the stream's entry with this number unless it was delivered. A worker may get it
        between the two requests; then the prompt is prefilled twice.
        """
        async with _reaching(self._url):
            info = await self._jetstream.consumer_info(self._stream, CONSUMER)
            if info.delivered is not None and info.delivered.stream_seq >= number:
                return False
            return bool(await self._jetstream.delete_msg(self._stream, number))

    async def dequeue_task(self, timeout: float = 1.0) -> Claim | None:
        """See :class:`~beluga.disagg.TaskQueue`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while (left := end - loop.time()) > 0:
            async with _reaching(self._url):
                try:
                    message = await self._retrying(partial(self._fetch, left))
                except nats.errors.TimeoutError:
                    return None
            try:
                return Claim(
                    task=decode_task(message.data),
                    deliveries=message.metadata.num_delivered or 1,
                    ack=partial(self._ack, message),
                    extend=partial(self._extend, message),
                    nack=partial(self._nack, message),
                )
            except QueueError as error:
                logger.warning("dropped from the prefill queue: %s", error)
                async with _reaching(self._url):
                    await message.term()
        return None

    async def _ack(self, message: Msg) -> bool:
        async with _reaching(self._url):
            if inbox := (message.headers or {}).get(_DONE_HEADER):
                await self._client.publish(inbox)
            await message.ack_sync(self._timeout_s)
        return True

    async def _extend(self, message: Msg) -> bool:
        async with _reaching(self._url):
            await message.in_progress()
        return True

    async def _nack(self, message: Msg, delay: float) -> None:
        async with _reaching(self._url):
            await message.nak(delay)
            await self._client.flush()

    async def _fetch(self, timeout_s: float) -> Msg:
        """Return the next message. Raises nats.errors.TimeoutError if there is none in time."""
        if self._pull is None:
            await self._jetstream.consumer_info(self._stream, CONSUMER)  # raises if it is lost
            self._pull = await self._jetstream.pull_subscribe_bind(CONSUMER, stream=self._stream)
        try:
            [message] = await self._pull.fetch(1, timeout=timeout_s)
        except nats.errors.TimeoutError:
            self._pull = None  # a lost consumer only times out, too: check before a fetch
            raise
        return message

    async def get_queue_size(self) -> QueueSize:
        """See :class:`~beluga.disagg.TaskQueue`. A task whose claim has expired counts as claimed
        until another worker gets it.
        """
        async with _reaching(self._url):
            info = await self._retrying(
                lambda: self._jetstream.consumer_info(self._stream, CONSUMER)
            )
        return QueueSize(info.num_pending or 0, info.num_ack_pending or 0)

    async def close(self) -> None:
        """See :class:`~beluga.disagg.TaskQueue`."""
        await self._client.close()

    async def _on_task_done(self, message: Msg) -> None:
        if event := self._waiting.get(message.subject.rpartition(".")[2]):
            event.set()


def _is_address(server: str) -> bool:
    try:
        parts = urlsplit(server)
        return parts.port != 0 and bool(parts.hostname)
    except ValueError:  # the text may contain the password
        return False


async def _happens(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return False
    return True


class _TlsClient(Client):  # type: ignore[misc]
    """A client that does not send its password if the server should support TLS and does not. The
    package starts TLS only if the server requests it, and an attacker in between can remove that
    request.
    """

    def _connect_command(self) -> bytes:
        server = self._current_server
        secure = server is None or server.uri.scheme != "tls"
        if not secure and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server does not support TLS")
        command: bytes = super()._connect_command()
        return command


async def _connected(url: str, servers: list[str], timeout_s: float) -> Client:
    """Connect. An authentication failure has its own error text. ``url`` appears in errors."""
    refused: list[str] = []

    async def note(error: Exception) -> None:
        logger.debug("NATS: %s", error)
        if any(word in str(error).lower() for word in _REFUSED):
            refused.append(str(error))

    try:
        async with _reaching(url):
            client = _TlsClient()
            await client.connect(
                servers,
                connect_timeout=timeout_s,
                max_reconnect_attempts=1,
                reconnect_time_wait=_RECONNECT_S,
                error_cb=note,
                disconnected_cb=_log_disconnect,
            )
    except QueueError as error:
        if not refused and not any(word in str(error).lower() for word in _REFUSED):
            raise
        raise QueueError(
            f"NATS at {url} refuses this user; give its password or token in the URL "
            "(nats://USER:PASSWORD@HOST:PORT)"
        ) from error
    return client


async def _make_stream(jetstream: JetStreamContext, config: api.StreamConfig) -> None:
    """Make the stream, or set its limits if it exists."""
    try:
        await jetstream.add_stream(config)
    except APIError as error:
        if error.err_code != _STREAM_OTHER:
            raise
        await jetstream.update_stream(config)


async def _log_disconnect() -> None:
    logger.warning("the connection to the NATS server is lost; reconnecting")
