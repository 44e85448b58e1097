# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Receives a pool's events, so that the index follows the pool's blocks."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from beluga.errors import RouterError
from beluga.gateway.listener import REPLAY_S
from beluga.open_files import require_zmq_files
from beluga.router import PoolFeed

if TYPE_CHECKING:
    from beluga.router import Indexer

log = logging.getLogger(__name__)

LOOK_S = 1.0  # interval of checks for missing messages
BEHIND_S = 5.0  # time after which missing messages are a problem


class PoolListener:
    """Feeds an index from the endpoints of ``beluga serve --events`` in its own task until closed.
    A server that is not running yet, or was replaced, is queried again.

    Raises RouterError if pyzmq is missing, an endpoint is invalid, or too few files can be opened.
    """

    def __init__(self, indexer: Indexer, endpoints: str, *, block_size: int) -> None:
        """``endpoints`` is ``ENDPOINT,REPLAY``."""
        try:
            import zmq
            import zmq.asyncio
        except ModuleNotFoundError:
            raise RouterError("pool events need pyzmq; pip install 'beluga-kv[router]'") from None
        self._endpoints = endpoints
        self._current_s = time.monotonic()  # last time the index was up to date
        endpoint, comma, self._replay_endpoint = endpoints.partition(",")
        if not comma:
            raise RouterError(f"'{endpoints}' is not ENDPOINT,REPLAY for the pool's events")
        self._block_size = block_size
        self._indexer = indexer
        self.feed = PoolFeed(indexer, block_size=block_size)
        require_zmq_files(f"following {endpoint}", sockets=2, error=RouterError)
        self._zmq = zmq
        self._context = zmq.asyncio.Context()
        try:
            self._live = self._context.socket(zmq.SUB)
            self._live.setsockopt(zmq.RCVHWM, 0)  # received messages are never dropped
            self._live.setsockopt(zmq.SUBSCRIBE, b"")
            self._live.connect(endpoint)
            self._replay = self._replay_requests()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RouterError(
                f"the endpoints of pool events {endpoints} are invalid: {error}"
            ) from None
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def close(self) -> None:
        """Close the listener."""
        self._task.cancel()
        self._context.destroy(linger=0)

    @property
    def problem(self) -> str:
        """Why the index cannot follow the pool, or ""."""
        feed = self.feed
        if not feed.up_to_date and time.monotonic() - self._current_s > BEHIND_S:
            return f"no server at {self._endpoints} publishes the pool's blocks"
        if feed.other_sizes and not feed.spaces:
            return (
                f"the pool has {feed.other_sizes} blocks of another size than the router's "
                f"{self._block_size} tokens, and none of these"
            )
        return ""

    def figures(self) -> dict[str, float | None]:
        """Return the state of the subscription in numbers, by name."""
        feed, received_s = self.feed, self.feed.received_s
        return {
            "up_to_date": feed.up_to_date,
            "blocks": self._indexer.shared_count,
            "blocks_without_parent": feed.waiting,
            "blocks_of_other_sizes": feed.other_sizes,
            "messages_unread": feed.unread,
            "messages_lost": feed.feed.lost,
            "gaps": feed.feed.gaps,
            "restarts": feed.feed.restarts,
            "last_message_age_seconds": None
            if received_s is None
            else round(time.monotonic() - received_s, 3),
        }

    def _replay_requests(self) -> Any:
        replay = self._context.socket(self._zmq.DEALER)
        replay.connect(self._replay_endpoint)
        return replay

    async def _listen(self) -> None:
        while True:
            if (wanted := self.feed.wanted) is None:
                self._current_s = time.monotonic()
            else:
                await self._replay.send_multipart(wanted)
                await self._receive_replay()
            try:
                frames = await asyncio.wait_for(self._live.recv_multipart(), LOOK_S)
            except asyncio.TimeoutError:
                continue
            self.feed.received(frames)

    async def _receive_replay(self) -> None:
        """Receive a replay. Live messages stay in their socket meanwhile."""
        last = False
        while not last:
            try:
                frames = await asyncio.wait_for(self._replay.recv_multipart(), REPLAY_S)
            except asyncio.TimeoutError:
                log.warning(
                    "the pool's server does not send its list of blocks; it is requested again"
                )
                self.feed.replay_failed()
                self._replay.close(linger=0)  # this drops a late reply
                self._replay = self._replay_requests()
                return
            last = self.feed.replayed(frames)
