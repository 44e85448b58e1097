# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service that publishes the events of a pool, in the server's process and outside of its loop.

Messages are vLLM's: a topic, a number, and a batch of events. The number has the server's epoch in
the high bits and a counter below, so every server's messages come after those of its predecessors,
and missed messages are a gap for any server. A router requests all messages from a number on at the
replay endpoint. It gets the messages if all of them are still stored, or else one message with
AllBlocksCleared and the whole table, with the number of the last message. So a router that joins
late gets the table first.

When changes come faster than the service takes them, it skips a number, so that every router
detects a gap, and reads the table of names from the pool.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from beluga.errors import BelugaError, RouterError, RpcError
from beluga.events.replays import Replays
from beluga.events.table import NameTable
from beluga.events.zmtp import ZmtpSockets
from beluga.index import read_names
from beluga.router import Cleared, PoolEvent, ReplayBuffer, encode_dynamo, encode_pool
from beluga.rpc import Client
from beluga.threads import Thread

if TYPE_CHECKING:
    from beluga.index import IndexServer
    from beluga.pool import Pool

log = logging.getLogger(__name__)

TOPIC = b"kv-events"
EPOCH_SHIFT = 40  # of a message's number: the epoch above, a counter below
JOURNAL_ROOM = 1 << 16  # changes that wait for the service: 4 MiB
BATCH_CHANGES = 4096  # per message
PERIOD_S = 0.02  # between two polls of the changes: a poll costs as much as many changes
IDLE_S = 1.0  # an empty message after this time reveals missed messages
BATCHES_KEPT = 10_000
_PORT_MAX = 65535
_PATH_MAX = 107  # bytes of a Unix socket's path
_ENDPOINT = re.compile(r"tcp://.+:([0-9]+|\*|!)|ipc://.+")  # the endpoints that ZMQ accepts


@dataclasses.dataclass(frozen=True, slots=True)
class EventSettings:
    """Where events are published: a PUB and a ROUTER endpoint of ZMQ, and their form."""

    endpoint: str
    replay: str
    dynamo: bool = False
    journal_room: int = JOURNAL_ROOM
    batches_kept: int = BATCHES_KEPT

    def __post_init__(self) -> None:
        """Check the endpoints, as far as that is possible before they are bound. Raises
        RouterError.
        """
        for endpoint in (self.endpoint, self.replay):
            if not _ENDPOINT.fullmatch(endpoint):
                raise RouterError(
                    f"{endpoint!r} is not an endpoint; use tcp://HOST:PORT or ipc:///PATH"
                )
            _refuse_place(endpoint)
        if self.endpoint == self.replay and not self.endpoint.endswith((":0", "*")):
            raise RouterError(
                f"events and their replay cannot both be at {self.endpoint}; give each its own"
            )


def _refuse_place(endpoint: str) -> None:
    """Raise RouterError if an endpoint's port is out of range, or its path cannot be a socket."""
    kind, _, place = endpoint.partition("://")
    if kind == "tcp":
        port = place.rpartition(":")[2]
        if port.isdecimal() and int(port[:6]) > _PORT_MAX:
            raise RouterError(f"{endpoint} has a port above {_PORT_MAX}; give a smaller one")
        return
    if place.startswith("@"):  # an abstract name
        return
    path, size = Path(place), len(os.fsencode(place))
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


class EventService:
    """Publishes the events of ``server``. Make it before the server starts, and start it after."""

    def __init__(
        self, server: IndexServer, pool: Pool, settings: EventSettings, *, host: int | None = None
    ) -> None:
        self._server, self._pool, self._host = server, pool, host
        self._settings = settings
        self._table = NameTable(pool.geometry.block_count_max)
        self._unpublished_logged = threading.Event()
        self._thread: threading.Thread | None = None
        self.overflows = 0  # how often the journal overflowed
        self._lost = 0  # changes that the journal had lost when the table was read
        self._whole: tuple[int, bytes] | None = None  # time of the last replay of the whole table
        server.attach_journal(settings.journal_room)

    def start(self) -> None:
        """Bind the endpoints and start. Raises RouterError if they cannot be bound."""
        self._epoch = self._server.stat().epoch
        self._kept: ReplayBuffer[bytes] = ReplayBuffer(
            first=self._epoch << EPOCH_SHIFT, ring=self._settings.batches_kept
        )
        self._sockets = ZmtpSockets()
        try:
            self._sockets.bind(self._settings.endpoint, b"PUB")
            self._replays = Replays(self._sockets, self._settings.replay)
        except OSError as error:
            self._sockets.close()
            raise RouterError(
                f"no events can be published at {error.filename}: {error.strerror or error}; give "
                "another endpoint"
            ) from None
        self._thread = Thread(target=self._publish, name="beluga-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop publishing. Unread messages are dropped."""
        self._unpublished_logged.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._sockets.close()

    def _publish(self) -> None:
        try:
            with Client(self._pool, host=self._host) as client:
                self._begin(client)
                while not self._unpublished_logged.is_set():
                    self._turn(client)
        except BelugaError as error:  # the server has ended
            if not self._unpublished_logged.is_set():
                log.warning("events of the pool end: %s", error)

    def _begin(self, client: Client) -> None:
        """Read the table of names from the pool; see csrc/index/journal.c for the order."""
        while not self._unpublished_logged.is_set():
            taken, self._lost = self._server.take_changes(BATCH_CHANGES)
            while len(taken) == BATCH_CHANGES:
                taken, _ = self._server.take_changes(BATCH_CHANGES)
            try:
                client.ping()
            except RpcError as error:
                log.warning("events of the pool wait for its server: %s", error)
                continue
            self._table = NameTable(self._pool.geometry.block_count_max)
            self._table.begin(read_names(self._pool, self._epoch % 2))
            self._send([])
            return

    def _turn(self, client: Client) -> None:
        changes, lost = self._server.take_changes(BATCH_CHANGES)
        if lost != self._lost:
            log.warning("%d changes of the pool were not published in time", lost - self._lost)
            self.overflows += 1
            self._kept.skip()
            self._begin(client)
            return
        events = self._table.apply(changes)
        if events or time.monotonic() - self._sent_s > IDLE_S:
            self._send(events)
        self._replays.serve(0 if len(changes) == BATCH_CHANGES else PERIOD_S, self._replay)

    def _send(self, events: list[PoolEvent]) -> None:
        number = self._kept.next_number
        batch = self._encode(events, number)
        self._kept.add(batch)
        self._sockets.publish([TOPIC, number.to_bytes(8, "big"), batch])
        self._sent_s = time.monotonic()

    def _encode(self, events: list[PoolEvent], number: int) -> bytes:
        if self._settings.dynamo:
            return encode_dynamo(time.time(), events, number)
        return encode_pool(time.time(), events)

    def _replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return the numbered messages of a replay from number ``first`` on."""
        found = self._kept.replay(first)
        last = self._kept.next_number - 1
        if not found.missed:
            return list(enumerate(found.events, last + 1 - len(found.events)))
        if self._whole is None or self._whole[0] != last:  # many routers request it at once
            everything = [PoolEvent(Cleared()), *self._table.snapshot()]
            self._whole = last, self._encode(everything, last)
        return [self._whole]
