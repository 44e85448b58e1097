# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The listener for one engine's KV events over ZMQ, as vLLM publishes them, with replays."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from beluga.errors import RouterError
from beluga.router import HashBlocks, Indexer, Subscription, WireDecoder

log = logging.getLogger(__name__)

REPLAY_S = 5.0  # a replay ends after so many silent seconds
GONE_S = 2.0
"""After how many seconds without its publisher an engine's blocks no longer count. A connection
that only broke is there again at once, and no engine restarts as fast.
"""
_HEARTBEAT_MS = 2000  # a publisher whose machine has gone closes no connection
_HEARTBEAT_TIMEOUT_MS = 5000
_PENDING_MAX = 100_000  # messages; this is vLLM's own high-water mark


class Listener:
    """Feeds an index from a PUB endpoint in its own task, until it is closed.

    Raises RouterError if pyzmq is missing or the endpoint is invalid.
    """

    def __init__(
        self, indexer: Indexer, decoder: WireDecoder, endpoint: str, replay: str | None
    ) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ModuleNotFoundError:
            raise RouterError("KV events need pyzmq; pip install 'beluga-kv[router]'") from None
        self.heard = 0  # messages
        self.endpoint = endpoint
        self.has_replay = replay is not None
        self._gone: asyncio.TimerHandle | None = None  # set while the publisher is missing
        self.alone_since: float | None = time.monotonic()  # None while somebody publishes
        self._subscription = Subscription(indexer, decoder, replay=replay is not None)
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
            self._replay = self._asking()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RouterError(f"no KV events can come from {endpoint}: {error}") from None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._follow())]

    @property
    def unread(self) -> int:
        """The number of messages, and of events in messages, that could not be read."""
        return self._subscription.unread

    @property
    def error(self) -> str:
        """Why the last of them could not be read."""
        return self._subscription.error

    @property
    def lost(self) -> int:
        """The number of messages that were missed and not replayed."""
        return self._subscription.feed.lost

    @property
    def misfits(self) -> int:
        """The number of events whose blocks the index could not take."""
        return self._subscription.misfits

    @property
    def misfit(self) -> str:
        """Why the index could not take the last of them."""
        return self._subscription.misfit

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks that were heard."""
        return self._subscription.ranks

    def resize(self, block_size: int, hash_blocks: HashBlocks) -> None:
        """Take another block size, which the router has from now on."""
        self._subscription.resize(block_size, hash_blocks)

    def close(self) -> None:
        """Close the listener."""
        if self._gone is not None:
            self._gone.cancel()
        for task in self._tasks:
            task.cancel()
        self._live.disable_monitor()
        self._context.destroy(linger=0)

    def _asking(self) -> Any:
        """Return a new socket that asks for replays, or None without an endpoint for them."""
        if self._replay_endpoint is None:
            return None
        replay = self._context.socket(self._zmq.DEALER)
        replay.connect(self._replay_endpoint)
        return replay

    async def _listen(self) -> None:
        while True:
            frames = await self._live.recv_multipart()
            self.heard += 1
            self._subscription.received(frames)
            if (wanted := self._subscription.wanted) is not None:
                await self._replay.send_multipart(wanted)
                await self._hear_again()

    async def _follow(self) -> None:
        """Follow whether the endpoint's publisher is there."""
        from zmq.utils.monitor import parse_monitor_message

        loop = asyncio.get_running_loop()
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            gone = event["event"] == self._zmq.EVENT_DISCONNECTED
            self.alone_since = time.monotonic() if gone else None
            if self._gone is not None:
                self._gone.cancel()
            self._gone = loop.call_later(GONE_S, self._forget) if gone else None

    def _forget(self) -> None:
        """Forget what the engine held, because nobody tells it any longer."""
        log.info("nobody publishes KV events at %s; its blocks no longer count", self.endpoint)
        self._subscription.gone()

    async def _hear_again(self) -> None:
        """Receive a replay. Live messages wait in their socket meanwhile."""
        last = False
        while not last:
            try:
                frames = await asyncio.wait_for(self._replay.recv_multipart(), REPLAY_S)
            except asyncio.TimeoutError:
                log.warning("KV events were missed, and nobody sends them again")
                self._subscription.replay_failed()
                self._replay.close(linger=0)  # with it goes an answer that comes too late
                self._replay = self._asking()
                return
            last = self._subscription.replayed(frames)
