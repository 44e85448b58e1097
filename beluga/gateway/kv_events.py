# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Receives the KV events of engines and of a pool's server, so that the index follows their blocks,
and detects why it cannot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from beluga.conventions import EVENTS_USER
from beluga.errors import RouterError
from beluga.gateway.engine import Engine
from beluga.listening import Token, check_endpoint
from beluga.open_files import require_zmq_files
from beluga.router import HashBlocks, Indexer, PoolFeed, Subscription, WireDecoder

log = logging.getLogger(__name__)

REPLAY_S = 5.0  # a replay ends after this many silent seconds
ALONE_S = 2.0
"""Seconds without the publisher after which an engine's blocks no longer count. A broken connection
is restored sooner, and no engine restarts as fast.
"""
_HEARTBEAT_MS = 2000  # a publisher whose machine has died does not close connections
_HEARTBEAT_TIMEOUT_MS = 5000
_PENDING_MAX = 100_000  # messages; this is vLLM's own high-water mark
_SOCKETS = 2  # events, and replays


class _Follower:
    """The sockets that follow a publisher: one for its messages, and one that requests replays.

    Raises RouterError if pyzmq is missing, an endpoint is invalid, or too few files can be opened.
    """

    def __init__(
        self, what: str, endpoint: str, replay: str | None, *, token: Token | None = None
    ) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ModuleNotFoundError:
            raise RouterError(f"{what} need pyzmq; pip install 'beluga-kv[router]'") from None
        for each in filter(None, (endpoint, replay)):
            check_endpoint(each)
        require_zmq_files(f"following {endpoint}", sockets=_SOCKETS, error=RouterError)
        self.endpoint = endpoint
        self._zmq, self._replay_endpoint, self._token = zmq, replay, token
        self._context = zmq.asyncio.Context()
        try:
            self._live = self._socket(zmq.SUB)
            self._live.setsockopt(zmq.SUBSCRIBE, b"")
            self._prepare(self._live)
            self._live.connect(endpoint)
            self._replay = self._replay_requests()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            shown = ",".join(filter(None, (endpoint, replay)))
            raise RouterError(f"the endpoint of {what} {shown} is invalid: {error}") from None

    def _prepare(self, live: Any) -> None:
        """Set the options of the socket for messages."""

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        if self._token is not None:
            socket.setsockopt(self._zmq.PLAIN_USERNAME, EVENTS_USER)
            socket.setsockopt(self._zmq.PLAIN_PASSWORD, self._token.secret)
        return socket

    def _replay_requests(self) -> Any:
        """Return a new socket that requests replays, or None without a replay endpoint."""
        if self._replay_endpoint is None:
            return None
        replay = self._socket(self._zmq.DEALER)
        replay.connect(self._replay_endpoint)
        return replay

    async def _request_replay(
        self, wanted: list[bytes], feed: Subscription | PoolFeed, late: str
    ) -> None:
        """Request and receive a replay; ``late`` is logged if it does not come. Live messages stay
        in their socket meanwhile.
        """
        await self._replay.send_multipart(wanted)
        last = False
        while not last:
            try:
                frames = await asyncio.wait_for(self._replay.recv_multipart(), REPLAY_S)
            except asyncio.TimeoutError:
                log.warning("%s", late)
                feed.replay_failed()
                self._replay.close(linger=0)  # this drops a late reply
                self._replay = self._replay_requests()
                return
            last = feed.replayed(frames)


class Listener(_Follower):
    """Feeds an index from a PUB endpoint in its own task until closed. Raises RouterError."""

    def __init__(
        self, indexer: Indexer, decoder: WireDecoder, endpoint: str, replay: str | None
    ) -> None:
        super().__init__("KV events", endpoint, replay)
        self.received = 0  # received messages
        self.has_replay = replay is not None
        self._drop_timer: asyncio.TimerHandle | None = None  # set while the publisher is missing
        self.alone_since: float | None = time.monotonic()  # None while there is a publisher
        self.subscription = Subscription(indexer, decoder, replay=replay is not None)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._follow())]

    def _prepare(self, live: Any) -> None:
        zmq = self._zmq
        live.setsockopt(zmq.RCVHWM, _PENDING_MAX)
        live.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        live.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._monitor = live.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )

    def close(self) -> None:
        """Close the listener."""
        if self._drop_timer is not None:
            self._drop_timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._live.disable_monitor()
        self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            frames = await self._live.recv_multipart()
            self.received += 1
            self.subscription.received(frames)
            if (wanted := self.subscription.wanted) is not None:
                late = "KV events were missed, and no replay delivers them"
                await self._request_replay(wanted, self.subscription, late)

    async def _follow(self) -> None:
        """Monitor whether the endpoint's publisher is connected."""
        from zmq.utils.monitor import parse_monitor_message

        loop = asyncio.get_running_loop()
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            disconnected = event["event"] == self._zmq.EVENT_DISCONNECTED
            self.alone_since = time.monotonic() if disconnected else None
            if self._drop_timer is not None:
                self._drop_timer.cancel()
            self._drop_timer = loop.call_later(ALONE_S, self._drop_blocks) if disconnected else None

    def _drop_blocks(self) -> None:
        """Drop the engine's blocks, because its changes are no longer reported."""
        log.info(
            ("there is no publisher of KV events at %s; its blocks no longer count"), self.endpoint
        )
        self.subscription.gone()


UNREAD_S = 60.0  # how long a problem remains after the last unusable event
_LATE = (
    "the engine had blocks before this router started, or messages were missed. {} "
    "A cache that the engine clears (vLLM: POST /reset_prefix_cache) is followed again"
)
_REPLAY = "Name its replay endpoint (--kv-events URL=ENDPOINT,REPLAY)."
_SHORT = "Its replay (vLLM: buffer_steps) does not reach back so far."


class Following:
    """The listeners of one engine."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = listeners
        self._computing_since: float | None = None  # since when a silent engine has had prompts
        self._event_counts: dict[str, int] = {}  # number of events by kind
        self._until: dict[str, float] = {}  # end of the problem, by kind of event

    @property
    def lost(self) -> int:
        """The number of messages that were missed and not replayed."""
        return sum(listener.subscription.feed.lost for listener in self.listeners)

    @property
    def unread(self) -> int:
        """The number of malformed messages, and of malformed events in messages."""
        return sum(listener.subscription.unread for listener in self.listeners)

    def resize(self, block_size: int, hash_blocks: HashBlocks) -> None:
        """Set the router's new block size."""
        for listener in self.listeners:
            listener.subscription.resize(block_size, hash_blocks)

    def close(self) -> None:
        """Close the listeners."""
        for listener in self.listeners:
            listener.close()

    def problem(self, engine: Engine, block_size: int, *, now: float, silent_s: float) -> str:
        """Return why the index cannot follow the engine's events, or "". An engine that computes
        publishes blocks within ``silent_s``.
        """
        return (
            self._unusable(now)
            or self._alone(now, silent_s)
            or self._silence(engine, block_size, now, silent_s)
            or self._ranks(engine)
        )

    def _unusable(self, now: float) -> str:
        """Return the unusable events of the last :data:`UNREAD_S` seconds."""
        subscriptions = [listener.subscription for listener in self.listeners]
        misfits = sum(subscription.misfits for subscription in subscriptions)
        if self._recent("unread", self.unread, now):
            error = max(subscriptions, key=lambda subscription: subscription.unread).error
            return f"{self.unread} KV events are malformed; the last: {error}"
        why = _LATE.format(
            _SHORT if all(listener.has_replay for listener in self.listeners) else _REPLAY
        )
        if self._recent("misfit", misfits, now):
            error = max(subscriptions, key=lambda subscription: subscription.misfits).misfit
            more = ""
            if "parent block not found" in error:
                more = f": {why}"
            elif "exceeds the limit" in error:
                more = " (--index-ranks)"
            return f"{misfits} KV events could not be applied; the last: {error}{more}"
        if self._recent("lost", self.lost, now):
            return f"{self.lost} messages of KV events were missed: {why}"
        return ""

    def _recent(self, kind: str, count: int, now: float) -> bool:
        """Return whether a count has increased in the last :data:`UNREAD_S` seconds."""
        if count != self._event_counts.get(kind, 0):
            self._event_counts[kind] = count
            self._until[kind] = now + UNREAD_S
        return now < self._until.get(kind, now)

    def _alone(self, now: float, silent_s: float) -> str:
        for listener in self.listeners:
            if listener.alone_since is not None and now - listener.alone_since >= silent_s:
                return (
                    f"no process publishes KV events at {listener.endpoint}; the engine must "
                    "bind there (--kv-events-config)"
                )
        return ""

    def _silence(self, engine: Engine, block_size: int, now: float, silent_s: float) -> str:
        if any(listener.alone_since is not None for listener in self.listeners):
            return ""
        received = any(listener.received for listener in self.listeners)
        if received or engine.prompt_tokens < block_size:
            self._computing_since = None
            return ""
        if self._computing_since is None:
            self._computing_since = now
        if now - self._computing_since > silent_s:
            return "it has computed prompts but published no KV event"
        return ""

    def _ranks(self, engine: Engine) -> str:
        """Return whether an engine has data-parallel ranks without received events."""
        named = len(self.listeners)
        announced = sum(listener.subscription.ranks for listener in self.listeners)
        if engine.ranks <= max(named, announced):
            return ""
        return (
            f"it has {engine.ranks} data-parallel ranks, but KV events of {named} are configured; "
            "repeat --kv-events for each (vLLM adds the rank to the port)"
        )


LOOK_S = 1.0  # interval of checks for missing messages
BEHIND_S = 5.0  # time after which missing messages are a problem


class PoolListener(_Follower):
    """Feeds an index from the endpoints of ``beluga serve --events`` in its own task until closed.
    A server that is not running yet, or was replaced, is queried again. Raises RouterError.
    """

    def __init__(
        self, indexer: Indexer, endpoints: str, *, block_size: int, token: Token | None = None
    ) -> None:
        """``endpoints`` is ``ENDPOINT,REPLAY``; ``token`` is that of ``--events-token``."""
        endpoint, comma, replay = endpoints.partition(",")
        if not comma:
            raise RouterError(f"'{endpoints}' is not ENDPOINT,REPLAY; give those of beluga serve")
        super().__init__("pool events", endpoint, replay, token=token)
        self._endpoints = endpoints
        self._current_s = time.monotonic()  # last time the index was up to date
        self._block_size = block_size
        self._indexer = indexer
        self.feed = PoolFeed(indexer, block_size=block_size)
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def _prepare(self, live: Any) -> None:
        live.setsockopt(self._zmq.RCVHWM, 0)  # received messages are never dropped

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

    async def _listen(self) -> None:
        while True:
            if (wanted := self.feed.wanted) is None:
                self._current_s = time.monotonic()
            else:
                late = "the pool's server does not send its list of blocks; it is requested again"
                await self._request_replay(wanted, self.feed, late)
            try:
                frames = await asyncio.wait_for(self._live.recv_multipart(), LOOK_S)
            except asyncio.TimeoutError:
                continue
            self.feed.received(frames)
