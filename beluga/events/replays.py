# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays: routers ask for what they have missed, at a ROUTER socket of ZMQ.

Events of the pool come first, so a turn gives replays a bounded time. A router has one replay at a
time, and a later request takes the place of an earlier one. Few replays run at a time, and the
others wait in a bounded line. The line is left in the order of arrival. A router that does not read
its replay has at most SENT_MAX messages in this process, and loses the replay when it has taken no
message for STALLED_S. A router that gets no answer asks again.
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
_END = (1 << 64) - 1  # the number of the message that ends a replay

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
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send that cannot be raises an error
        self._socket.bind(endpoint)
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # first numbers, by router
        self._running: dict[bytes, _Replay] = {}
        self.dropped = 0  # requests for which the line had no place, and replays that stalled

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
        """Take a request. Returns False if there is none. One that cannot be read is dropped."""
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
        """Begin the next replay of the line, if one may run."""
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
        except self._zmq.ZMQError:  # the router has gone
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
