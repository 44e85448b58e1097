# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service that publishes the events of a pool, in the server's process and outside of its loop.

Messages are vLLM's: a topic, a number, and a batch of events in one of the forms (``forms``). The
number has the server's epoch in the high bits and a counter below, so every server's messages come
after those of its predecessors, and missed messages are a gap for any server. A router requests all
messages from a number on at the replay endpoint. It gets the messages if all of them are still
stored, or else one message with AllBlocksCleared and the whole table, with the number of the last
message. So a router that joins late gets the table first.

Foreign routers cannot request a table. For them the stream repeats it: everything is cleared and
stored again, every :data:`REPEAT_S` and after lost changes, and sooner if a router has requested
messages that are no longer stored. For llm-d the numbers then begin at 0: its readers drop
everything of a publisher whose numbers decrease, and replay a stream from message 0 on or not at
all. A reader that comes back to a new server between two repetitions may keep a removed block until
the next one.

When changes come faster than the service takes them, it skips a number, so that every router
detects a gap, and reads the table of names from the pool.

libzmq bounds the handshake, the size of a frame, and the messages that wait for a router, and it
disconnects routers that do not answer its heartbeats. docs/operate/listeners.md states what a
router can still do.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga.conventions import EVENTS_USER
from beluga.errors import BelugaError, RouterError, RpcError
from beluga.events.forms import EventSource, Form, Message, form_named
from beluga.events.table import NameTable
from beluga.index import read_names
from beluga.listening import Token, check_endpoint, is_loopback
from beluga.open_files import require_zmq_files
from beluga.router import (
    TOKENS_FRAME_MAX,
    TOKENS_TAG,
    Cleared,
    PoolEvent,
    Removed,
    ReplayBuffer,
    TokenStore,
)
from beluga.rpc import Client
from beluga.threads import Thread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from beluga.index import IndexServer
    from beluga.pool import Pool

log = logging.getLogger(__name__)

EPOCH_SHIFT = 40  # of a message's number: the epoch above, a counter below
JOURNAL_ROOM = 1 << 16  # changes that wait for the service: 4 MiB
BATCH_CHANGES = 4096  # per message
PERIOD_S = 0.02  # between two polls of the changes: a poll costs as much as many changes
IDLE_S = 1.0  # an empty message after this time reveals missed messages
BATCHES_MAX = 10_000  # messages that a replay can repeat,
BATCHES_SIZE_MAX = 16 << 20  # and their bytes; a replay of the whole table replaces older ones
REPEAT_S = 60.0  # between two repetitions of the table, in forms that repeat it
REPEAT_MIN_S = 1.0  # likewise, if a router has requested one
_REPEAT_EVENTS = 64  # that are encoded at a time
_REPEAT_SHARE = 20  # a repetition may take this part of the time
PENDING_MAX = 1_000  # messages that a subscriber has not read; further ones are dropped for it

REPLAYS_MAX = 4  # that run at a time
REQUESTS_MAX = 256  # routers that wait for their replay
STALLED_S = 10.0  # a router that has accepted no message for so long loses its replay
TURN_S = 0.01  # of the replays, per turn of the events
_REPLAY_PENDING_MAX = 16  # messages of a replay that a router has not read, and its requests
_FRAME_MAX = 1 << 10  # bytes that a router may send at once; a request has 8
_CONNECT = "connect:"  # before an endpoint where a router listens
_HANDSHAKE_MS = 5_000
_HEARTBEAT_MS = 10_000
_HEARTBEAT_TIMEOUT_MS = 30_000
_BACKLOG = 1024
_END = (1 << 64) - 1  # the number of the last message of a replay
_PATH_MAX = 107  # bytes of a Unix socket's path
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks whether a peer may connect (RFC 27)

Messages = list[tuple[int, Message]]
Find = Callable[[int], Messages]
_NAME = re.compile(r"[^@:\s]{1,64}")  # a topic has the parts kv, pool:NAME and MODEL, joined by @


@dataclasses.dataclass(frozen=True, slots=True)
class EventSettings:
    """Where events are published: a PUB and a ROUTER endpoint of ZMQ, and their form. With a
    ``token`` routers need it as the password of ZMQ's PLAIN mechanism, with
    :data:`~beluga.conventions.EVENTS_USER`.

    Foreign forms have the pool's ``name`` and the ``model``, and need no ``replay``. A PUB endpoint
    ``connect:tcp://HOST:PORT`` is one where the router listens.
    """

    endpoint: str
    replay: str = ""
    form: str = "vllm"
    name: str = "beluga"
    model: str = ""
    token: Token | None = None
    journal_room: int = JOURNAL_ROOM
    batches_max: int = BATCHES_MAX
    repeat_s: float = REPEAT_S

    def __post_init__(self) -> None:
        """Check the endpoints, as far as that is possible before they are bound. Raises
        RouterError.
        """
        form = form_named(self.form)
        if not self.replay and not form.repeats:
            raise RouterError(f"events in the form {form.name} need a replay endpoint; give one")
        if not _NAME.fullmatch(self.name):
            raise RouterError(
                f"the pool's name in events is {self.name!r}; give 1 to 64 characters without "
                "@, colons and spaces"
            )
        if "@" in self.model:
            raise RouterError(f"the model's name in events is {self.model!r}; give one without @")
        own = self.endpoint.removeprefix(_CONNECT)
        if own != self.endpoint and self.token:
            raise RouterError(f"{self.endpoint} is a router's endpoint; leave the token out")
        if own != self.endpoint and not own.startswith("tcp://"):
            raise RouterError(
                f"{self.endpoint!r} is no router's endpoint; use {_CONNECT}tcp://HOST:PORT"
            )
        for endpoint in filter(None, (own, self.replay)):
            check_endpoint(endpoint)
            if endpoint is not own or own == self.endpoint:
                _check_path(endpoint)
        if self.endpoint == self.replay and not self.endpoint.endswith((":0", "*")):
            raise RouterError(
                f"events and their replay cannot both be at {self.endpoint}; give each its own"
            )


def _check_path(endpoint: str) -> None:
    """Raise RouterError if an endpoint's path cannot be a socket."""
    kind, _, address = endpoint.partition("://")
    if kind == "tcp" or address.startswith("@"):  # an abstract name
        return
    path, size = Path(address), len(os.fsencode(address))
    folder = path.absolute().parent
    if size > _PATH_MAX:
        raise RouterError(
            f"{endpoint} has a path of {size} bytes; give one of at most {_PATH_MAX} bytes"
        )
    if not folder.is_dir():
        raise RouterError(f"{endpoint} is in {folder}, which is not a folder; create it first")
    if path.exists() and not path.is_socket():
        raise RouterError(f"{endpoint} is a file with other data; give another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RouterError(
            f"{endpoint} is in {folder}, where this user cannot create files; give another path"
        )


class EventSockets:
    """The bound endpoints. One thread uses them, and nothing blocks it. Raises RouterError."""

    def __init__(self, settings: EventSettings) -> None:
        import zmq

        require_zmq_files("publishing events", sockets=3, error=RouterError)
        self._zmq, self._token = zmq, settings.token
        self._topics = form_named(settings.form).topics
        self._takes_tokens = form_named(settings.form).takes_tokens
        self._context = zmq.Context()
        try:
            if settings.token:
                self._zap: Any = self._context.socket(zmq.REP)
                self._zap.bind(_ZAP)
            # A PUB applies subscriptions; an XPUB would also queue them, without a bound.
            self._live = self._bound(zmq.PUB, settings.endpoint, PENDING_MAX)
            # A ROUTER without an endpoint never has requests.
            self._replay = self._bound(zmq.ROUTER, settings.replay, _REPLAY_PENDING_MAX)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._replay, zmq.POLLIN)
        if settings.token:
            self._poller.register(self._zap, zmq.POLLIN)

    def _bound(self, kind: int, endpoint: str, pending_max: int) -> Any:
        zmq = self._zmq
        zmq_socket = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, pending_max),
            (zmq.RCVHWM, _REPLAY_PENDING_MAX),
            (zmq.MAXMSGSIZE, self._frame_max(kind)),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.IPV6, int("[" in endpoint)),
        ):
            zmq_socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            zmq_socket.setsockopt(
                zmq.ROUTER_MANDATORY, 1
            )  # an error if a router is gone or does not read
        if self._token:
            zmq_socket.setsockopt(zmq.PLAIN_SERVER, 1)
        if not endpoint:
            return zmq_socket
        if endpoint.startswith(_CONNECT):
            zmq_socket.connect(endpoint.removeprefix(_CONNECT))
            return zmq_socket
        try:
            if _is_served(endpoint):  # libzmq would take the name of the other server
                raise RouterError(
                    f"no events can be published at {endpoint}: another process does; give another "
                    "endpoint"
                )
            zmq_socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise RouterError(
                f"no events can be published at {endpoint}: {error.strerror}; give another endpoint"
            ) from None
        return zmq_socket

    def _frame_max(self, kind: int) -> int:
        return TOKENS_FRAME_MAX if self._takes_tokens and kind == self._zmq.ROUTER else _FRAME_MAX

    def close(self) -> None:
        """Close the endpoints. Unread messages are dropped."""
        self._context.destroy(linger=0)

    def publish(self, frames: list[bytes]) -> None:
        """Send a message to the subscribers that have not too many unread ones."""
        self._live.send_multipart(frames)

    def requests(
        self, wait_s: float, tokens: Callable[[bytes], None] | None = None
    ) -> list[tuple[bytes, int]]:
        """Return requests that have arrived, after a wait for a first one: routers, and the first
        numbers of their replays. ``tokens`` is called with messages of tokens.
        """
        again, requests = self._zmq.Again, []
        ready = dict(self._poller.poll(round(wait_s * 1e3)))
        end_s = time.monotonic() + TURN_S
        if self._token and self._zap in ready:
            self._admit()
        while self._replay in ready and time.monotonic() < end_s:
            try:
                frames = self._replay.recv_multipart(self._zmq.DONTWAIT)
            except again:
                break
            if (
                len(frames) == 3 and not frames[1] and len(frames[2]) == 8
            ):  # a router, nothing, a number
                requests.append((frames[0], int.from_bytes(frames[2], "big")))
            elif self._takes_tokens and tokens and len(frames) == 3 and frames[1] == TOKENS_TAG:
                tokens(frames[2])
        return requests

    def reply(self, router: bytes, number: int, message: Message) -> bool | None:
        """Send a message of a replay. Returns False if the router has too many unread ones, None if
        it is gone.
        """
        try:
            topic, batch = message
            frames = [*([topic] if self._topics else []), number.to_bytes(8, "big"), batch]
            frames = [router, b"", *frames]
            self._replay.send_multipart(frames, self._zmq.DONTWAIT)
        except self._zmq.Again:
            return False
        except self._zmq.ZMQError as error:
            if error.errno != self._zmq.EHOSTUNREACH:
                raise
            return None
        return True

    def _admit(self) -> None:
        """Answer libzmq's question whether a peer may connect."""
        version, number, _, address, _, mechanism, *shown = self._zap.recv_multipart()
        is_reader = mechanism == b"PLAIN" and len(shown) == 2 and shown[0] == EVENTS_USER
        admitted = is_reader and self._token is not None and self._token.equals(shown[1])
        if not admitted:
            log.warning("a router at %s has not shown the token", address.decode(errors="replace"))
        status = (b"200", b"OK") if admitted else (b"400", b"wrong token")
        self._zap.send_multipart([version, number, *status, b"", b""])


def _is_served(endpoint: str) -> bool:
    """Return whether a process listens at the path of an ``ipc://`` endpoint."""
    kind, _, path = endpoint.partition("://")
    if kind != "ipc" or not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as peer:
        return peer.connect_ex(path) == 0


class Replays:
    """The replays that an endpoint serves: few at a time, while the other routers wait in a bounded
    queue. A later request of a router replaces its earlier one, and a router without an answer
    repeats its request.
    """

    def __init__(self, sockets: EventSockets) -> None:
        self._sockets = sockets
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # first numbers, by router
        self._running: dict[bytes, _Replay] = {}
        self.dropped = 0  # refused requests (the queue was full) and stalled replays

    def clear(self) -> None:
        """End all replays: their messages are of a stream that has begun anew."""
        self._running.clear()

    def serve(
        self, wait_s: float, find: Find, tokens: Callable[[bytes], None] | None = None
    ) -> None:
        """Serve requests and replays for a turn, after a wait for a first request. ``find`` returns
        the messages of a replay from a number on; ``tokens`` is called with messages of tokens.
        """
        busy = self._running or self._waiting
        for router, first in self._sockets.requests(0 if busy else wait_s, tokens):
            self._take(router, first)
        end_s = time.monotonic() + TURN_S
        while time.monotonic() < end_s and (self._begin(find) or self._running):
            moved = [self._advance(router) for router in list(self._running)]
            if not any(moved):
                time.sleep(min(max(end_s - time.monotonic(), 0), wait_s))  # all routers are slow
                break

    def _take(self, router: bytes, first: int) -> None:
        self._running.pop(router, None)
        if router not in self._waiting and len(self._waiting) >= REQUESTS_MAX:
            self.dropped += 1
            return
        self._waiting[router] = first

    def _begin(self, find: Find) -> bool:
        """Begin the next replay in the queue, if one may run."""
        if not self._waiting or len(self._running) >= REPLAYS_MAX:
            return False
        router, first = self._waiting.popitem(last=False)
        self._running[router] = _Replay(deque([*find(first), (_END, (b"", b""))]), time.monotonic())
        return True

    def _advance(self, router: bytes) -> bool:
        """Send the next message of a replay. Returns whether that was possible, or the replay is
        over.
        """
        replay, now_s = self._running[router], time.monotonic()
        sent = self._sockets.reply(router, *replay.messages[0])
        if sent:
            replay.messages.popleft()
            replay.moved_s = now_s
        elif sent is False:
            if now_s - replay.moved_s < STALLED_S:
                return False
            self.dropped += 1
        if not sent or not replay.messages:
            del self._running[router]
        return True


@dataclasses.dataclass(slots=True)
class _Replay:
    messages: deque[tuple[int, Message]]
    moved_s: float  # when the router accepted the last message


class EventService:
    """Publishes the events of ``server``. Make it before the server starts, and start it after."""

    def __init__(
        self, server: IndexServer, pool: Pool, settings: EventSettings, *, host: int | None = None
    ) -> None:
        self._server, self._pool, self._host = server, pool, host
        self._settings = settings
        self._form: Form = form_named(settings.form)
        self._source = EventSource(pool.id, settings.name, settings.model, TokenStore())
        self._taken: deque[NDArray[np.void]] = deque()  # changes taken while the table was repeated
        self._repeat_at_s = 0.0  # when the table is published again, in forms that repeat it
        self._table = NameTable(pool.geometry.block_count_max)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.overflows = 0  # how often the journal overflowed
        self._lost = 0  # changes that the journal had lost when the table was read
        self._whole: tuple[int, Message] | None = None  # the last replay of the whole table
        server.attach_journal(settings.journal_room)
        _warn_of_others(settings)

    def start(self) -> None:
        """Bind the endpoints and start. Raises RouterError if they cannot be bound."""
        self._epoch = self._server.stat().epoch
        self._batches = self._buffer(self._epoch << EPOCH_SHIFT)
        self._sockets = EventSockets(self._settings)
        self._replays = Replays(self._sockets)
        self._thread = Thread(target=self._publish, name="beluga-events", daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> TokenStore:
        """The token ids of blocks that connectors have sent."""
        return self._source.tokens

    def _buffer(self, first: int, table: Sequence[Message] = ()) -> ReplayBuffer[Message]:
        """Return a buffer of messages with room for a table."""
        return ReplayBuffer(
            first=first,
            ring=self._settings.batches_max + len(table),
            size=_size,
            size_max=BATCHES_SIZE_MAX + sum(map(_size, table)),
        )

    def stop(self) -> None:
        """Stop publishing. Unread messages are dropped."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._sockets.close()

    def _publish(self) -> None:
        try:
            with Client(self._pool, host=self._host) as client:
                self._begin(client)
                while not self._stopping.is_set():
                    self._turn(client)
        except BelugaError as error:  # the server has ended
            if not self._stopping.is_set():
                log.warning("events of the pool end: %s", error)

    def _begin(self, client: Client) -> None:
        """Read the table of names from the pool; see csrc/index/journal.c for the order."""
        while not self._stopping.is_set():
            changes, self._lost = self._server.take_changes(BATCH_CHANGES)
            while len(changes) == BATCH_CHANGES:
                changes, _ = self._server.take_changes(BATCH_CHANGES)
            try:
                client.ping()
            except RpcError as error:
                log.warning("events of the pool wait for its server: %s", error)
                continue
            self._taken.clear()
            self._table = NameTable(self._pool.geometry.block_count_max)
            self._table.begin(read_names(self._pool, self._epoch % 2))
            if self._form.repeats:
                self._repeat()
            else:
                self._send([])
            return

    def _turn(self, client: Client) -> None:
        if self._taken:
            changes, lost = self._taken.popleft(), self._lost
        else:
            changes, lost = self._server.take_changes(BATCH_CHANGES)
        if lost != self._lost:
            log.warning("%d changes of the pool were not published in time", lost - self._lost)
            self.overflows += 1
            self._batches.skip()
            self._begin(client)
            return
        events = self._table.apply(changes)
        if events or time.monotonic() - self._sent_s > IDLE_S:
            self._send(events)
        if self._form.repeats and time.monotonic() > self._repeat_at_s:
            self._repeat()
        wait_s = 0 if self._taken or len(changes) == BATCH_CHANGES else PERIOD_S
        self._replays.serve(wait_s, self._replay, self.tokens.add)

    def _send(self, events: list[PoolEvent]) -> None:
        number = self._batches.next_number
        messages = self._encode(events, number)
        for message in messages:
            self._batches.add(message)
        self._publish_all(messages, number)
        for event in events:
            if isinstance(event.data, Removed):
                self.tokens.remove(event.space, event.data.block_hashes)

    def _publish_all(self, messages: list[Message], first: int) -> None:
        for number, (topic, batch) in enumerate(messages, first):
            self._sockets.publish([topic, number.to_bytes(8, "big"), batch])
        self._sent_s = time.monotonic()

    def _repeat(self) -> None:
        """Publish the whole table, in one turn: no change of a block comes between. Changes that
        the journal has no room for meanwhile wait here.
        """
        self._repeated_s = time.monotonic()
        self._replays.clear()
        number = 0 if self._form.restarts else self._batches.next_number
        messages: list[Message] = []  # for replays
        everything = self._everything()
        for start in range(0, len(everything), _REPEAT_EVENTS):
            part = self._encode(everything[start : start + _REPEAT_EVENTS], number)
            self._publish_all(part, number)
            number += len(part)
            if self._settings.replay:
                messages += part
            changes, _ = self._server.take_changes(BATCH_CHANGES)
            if len(changes):
                self._taken.append(changes)
        self._batches = self._buffer(number - len(messages), messages)
        for message in messages:
            self._batches.add(message)
        took_s = time.monotonic() - self._repeated_s
        pause_s = max(self._settings.repeat_s, took_s * _REPEAT_SHARE)
        self._repeat_at_s = time.monotonic() + pause_s
        self._repeat_min_s = max(REPEAT_MIN_S, took_s * _REPEAT_SHARE)

    def _everything(self) -> list[PoolEvent]:
        return [PoolEvent(Cleared()), *self._table.snapshot()]

    def _encode(self, events: list[PoolEvent], number: int) -> list[Message]:
        return self._form.encode(self._source, time.time(), events, number)

    def _replay(self, first: int) -> Messages:
        """Return the numbered messages of a replay from number ``first`` on."""
        replay = self._batches.replay(first)
        last = self._batches.next_number - 1
        if not replay.missed and (first <= last or not self._form.repeats):
            return list(enumerate(replay.events, last + 1 - len(replay.events)))
        if self._form.repeats:  # the router has messages of another stream, or misses older ones
            soon_s = self._repeated_s + self._repeat_min_s
            self._repeat_at_s = min(self._repeat_at_s, soon_s)
            return []
        if self._whole is None or self._whole[0] != last:  # many routers request it at once
            (message,) = self._encode(self._everything(), last)
            self._whole = last, message
        return [self._whole]


def _size(message: Message) -> int:
    return len(message[0]) + len(message[1])


def _warn_of_others(settings: EventSettings) -> None:
    """Log that other machines can connect without a token."""
    for endpoint in filter(None, (settings.endpoint, settings.replay)):
        kind, _, address = endpoint.partition("://")
        host = address.rpartition(":")[0].strip("[]")
        if kind == "tcp" and not settings.token and not is_loopback(host):
            log.warning(
                "other machines reach the events at %s without a token; give --events-token FILE",
                endpoint,
            )
