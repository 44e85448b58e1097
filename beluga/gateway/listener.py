# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The listener for one engine's KV events over ZMQ, as vLLM publishes them, with replays."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from beluga.errors import RouterError
from beluga.router import Indexer, Subscription, WireDecoder

log = logging.getLogger(__name__)

REPLAY_S = 5.0  # a replay ends after so many silent seconds
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
        self._subscription = Subscription(indexer, decoder, replay=replay is not None)
        self._context = zmq.asyncio.Context()
        try:
            self._live = self._context.socket(zmq.SUB)
            self._live.setsockopt(zmq.RCVHWM, _PENDING_MAX)
            self._live.setsockopt(zmq.SUBSCRIBE, b"")
            self._live.connect(endpoint)
            self._replay: Any = None
            if replay is not None:
                self._replay = self._context.socket(zmq.DEALER)
                self._replay.connect(replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RouterError(f"no KV events can come from {endpoint}: {error}") from None
        self._task = asyncio.get_running_loop().create_task(self._listen())

    @property
    def lost(self) -> int:
        """The number of messages that were missed and not replayed."""
        return self._subscription.feed.lost

    def close(self) -> None:
        """Close the listener."""
        self._task.cancel()
        self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            self._subscription.received(await self._live.recv_multipart())
            if (wanted := self._subscription.wanted) is not None:
                await self._replay.send_multipart(wanted)
                await self._hear_again()

    async def _hear_again(self) -> None:
        """Receive a replay. Live messages wait in their socket meanwhile."""
        last = False
        while not last:
            try:
                frames = await asyncio.wait_for(self._replay.recv_multipart(), REPLAY_S)
            except asyncio.TimeoutError:
                log.warning("KV events were missed, and nobody sends them again")
                self._subscription.replay_failed()
                return
            last = self._subscription.replayed(frames)
