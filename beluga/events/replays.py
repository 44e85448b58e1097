# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays: routers request missed messages at a ROUTER socket of ZMQ.

Events of the pool have priority, so replays have a bounded time per turn. A router has one replay
at a time, and a later request replaces an earlier one. Few replays run at a time; the others wait
in a bounded FIFO queue. A router that does not read its replay has at most SENT_MAX messages in
this process, and loses the replay when it has accepted no message for STALLED_S. A router without
an answer repeats its request.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

RUNNING_MAX = 4
WAITING_MAX = 256
SENT_MAX = 1000  # messages that a router has not read yet; ZMQ's default
STALLED_S = 10.0
TURN_S = 0.01  # of each turn of the events
_REQUEST_MAX = 1 << 10  # bytes of a frame; a request has 8
_END = (1 << 64) - 1  # the sequence number of the last message of a replay

Messages = list[tuple[int, bytes]]
Find = Callable[[int], Messages]


class Replays:
    """The replays that one endpoint serves. One thread uses it. Raises zmq.ZMQError."""

    def __init__(self, context: Any, endpoint: str) -> None:
        import zmq

        self._zmq = zmq
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, SENT_MAX)
        self._socket.setsockopt(zmq.RCVHWM, WAITING_MAX)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_MAX)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to an unknown peer raises
        self._socket.bind(endpoint)
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # first numbers, by router
        self._running: dict[bytes, _Replay] = {}
        self.dropped = 0  # requests that exceeded the queue's limit, and stalled replays

    def serve(self, wait_s: float, find: Find) -> None:
        """Serve replays for a turn, after a wait for a first request. ``find`` returns the messages
        of a replay from a number on.
        """
        if not self._running and not self._waiting:
            self._socket.poll(wait_s * 1000)
        end_s = time.monotonic() + TURN_S
        while time.monotonic() < end_s and self._take():
            pass
        stuck = 0.0
        while time.monotonic() < end_s and (self._begin(find) or self._running):
            moved = [self._advance(router) for router in list(self._running)]
            if not any(moved):
                stuck = end_s - time.monotonic()
                break
        if stuck > 0:  # all routers are slow
            self._socket.poll(min(stuck, wait_s) * 1000)

    def _take(self) -> bool:
        """Take a request. Returns False if there is none. An invalid one is dropped."""
        try:
            request = self._socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        if len(request) != 3 or len(request[2]) != 8:
            return True
        router, first = request[0], int.from_bytes(request[2], "big")
        self._running.pop(router, None)
        if router not in self._waiting and len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return True
        self._waiting[router] = first
        return True

    def _begin(self, find: Find) -> bool:
        """Begin the next replay in the queue, if one may run."""
        if not self._waiting or len(self._running) >= RUNNING_MAX:
            return False
        router, first = self._waiting.popitem(last=False)
        self._running[router] = _Replay(find(first))
        return True

    def _advance(self, router: bytes) -> bool:
        """Send the next message of a replay. Returns whether that was possible, or the replay is
        over.
        """
        replay = self._running[router]
        number, batch = replay.left[0]
        try:
            frames = [router, b"", number.to_bytes(8, "big"), batch]
            self._socket.send_multipart(frames, self._zmq.NOBLOCK)
        except self._zmq.Again:
            if time.monotonic() - replay.moved_s < STALLED_S:
                return False
            self.dropped += 1
            del self._running[router]
            return True
        except self._zmq.ZMQError:  # the router has disconnected
            del self._running[router]
            return True
        replay.left.popleft()
        replay.moved_s = time.monotonic()
        if not replay.left:
            del self._running[router]
        return True


class _Replay:
    def __init__(self, messages: Messages) -> None:
        self.left = deque([*messages, (_END, b"")])
        self.moved_s = time.monotonic()
