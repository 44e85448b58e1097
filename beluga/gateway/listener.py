# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Receives one engine's KV events over ZMQ, in vLLM's format, with replays."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from beluga.errors import RouterError
from beluga.open_files import require_zmq_files
from beluga.router import HashBlocks, Indexer, Subscription, WireDecoder

log = logging.getLogger(__name__)

REPLAY_S = 5.0  # a replay ends after this many silent seconds
GONE_S = 2.0
"""Seconds without the publisher after which an engine's blocks no longer count. A broken connection
is restored sooner, and no engine restarts as fast.
"""
_HEARTBEAT_MS = 2000  # a publisher whose machine has died does not close connections
_HEARTBEAT_TIMEOUT_MS = 5000
_PENDING_MAX = 100_000  # messages; this is vLLM's own high-water mark
_SOCKETS = 2  # events, and replays


class Listener:
    """Feeds an index from a PUB endpoint in its own task until closed.

    Raises RouterError if pyzmq is missing, an endpoint is invalid, or too few files can be opened.
    """

    def __init__(
        self, indexer: Indexer, decoder: WireDecoder, endpoint: str, replay: str | None
    ) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ModuleNotFoundError:
            raise RouterError("KV events need pyzmq; pip install 'beluga-kv[router]'") from None
        self.received = 0  # received messages
        self.endpoint = endpoint
        self.has_replay = replay is not None
        self._gone: asyncio.TimerHandle | None = None  # set while the publisher is missing
        self.alone_since: float | None = time.monotonic()  # None while there is a publisher
        self._subscription = Subscription(indexer, decoder, replay=replay is not None)
        require_zmq_files(f"following {endpoint}", sockets=_SOCKETS, error=RouterError)
        self._zmq = zmq
        self._context = zmq.asyncio.Context()
        try:
            self._live = self._context.socket(zmq.SUB)
            self._live.setsockopt(zmq.RCVHWM, _PENDING_MAX)
            self._live.setsockopt(zmq.SUBSCRIBE, b"")
            self._live.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            self._live.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            self._monitor = self._live.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            self._live.connect(endpoint)
            self._replay_endpoint = replay
            self._replay = self._replay_requests()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RouterError(f"the endpoint of KV events {endpoint} is invalid: {error}") from None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._follow())]

    @property
    def unread(self) -> int:
        """The number of malformed messages, and of malformed events in messages."""
        return self._subscription.unread

    @property
    def error(self) -> str:
        """The reason for the last of them."""
        return self._subscription.error

    @property
    def lost(self) -> int:
        """The number of messages that were missed and not replayed."""
        return self._subscription.feed.lost

    @property
    def misfits(self) -> int:
        """The number of events whose blocks could not be added to the index."""
        return self._subscription.misfits

    @property
    def misfit(self) -> str:
        """The reason for the last of them."""
        return self._subscription.misfit

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks that have sent messages."""
        return self._subscription.ranks

    def resize(self, block_size: int, hash_blocks: HashBlocks) -> None:
        """Set the router's new block size."""
        self._subscription.resize(block_size, hash_blocks)

    def close(self) -> None:
        """Close the listener."""
        if self._gone is not None:
            self._gone.cancel()
        for task in self._tasks:
            task.cancel()
        self._live.disable_monitor()
        self._context.destroy(linger=0)

    def _replay_requests(self) -> Any:
        """Return a new socket that requests replays, or None without a replay endpoint."""
        if self._replay_endpoint is None:
            return None
        replay = self._context.socket(self._zmq.DEALER)
        replay.connect(self._replay_endpoint)
        return replay

    async def _listen(self) -> None:
        while True:
            frames = await self._live.recv_multipart()
            self.received += 1
            self._subscription.received(frames)
            if (wanted := self._subscription.wanted) is not None:
                await self._replay.send_multipart(wanted)
                await self._receive_replay()

    async def _follow(self) -> None:
        """Monitor whether the endpoint's publisher is connected."""
        from zmq.utils.monitor import parse_monitor_message

        loop = asyncio.get_running_loop()
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            gone = event["event"] == self._zmq.EVENT_DISCONNECTED
            self.alone_since = time.monotonic() if gone else None
            if self._gone is not None:
                self._gone.cancel()
            self._gone = loop.call_later(GONE_S, self._after_fork) if gone else None

    def _after_fork(self) -> None:
        """Drop the engine's blocks, because its changes are no longer reported."""
        log.info(
            ("there is no publisher of KV events at %s; its blocks no longer count"), self.endpoint
        )
        self._subscription.gone()

    async def _receive_replay(self) -> None:
        """Receive a replay. Live messages stay in their socket meanwhile."""
        last = False
        while not last:
            try:
                frames = await asyncio.wait_for(self._replay.recv_multipart(), REPLAY_S)
            except asyncio.TimeoutError:
                log.warning("KV events were missed, and no replay delivers them")
                self._subscription.replay_failed()
                self._replay.close(linger=0)  # this drops a late reply
                self._replay = self._replay_requests()
                return
            last = self._subscription.replayed(frames)
