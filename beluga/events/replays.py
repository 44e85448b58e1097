# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays: routers request missed messages at a ROUTER endpoint.

Events of the pool have priority, so replays have a bounded time per turn. A router has one replay
at a time, and a later request replaces an earlier one. Few replays run at a time; the others wait
in a bounded FIFO queue. A router that does not read its replay has one message in this process, and
loses the replay when it has accepted no message for STALLED_S. A router without an answer repeats
its request.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from beluga.events.zmtp import ZmtpPeer, ZmtpSockets

RUNNING_MAX = 4
WAITING_MAX = 256
STALLED_S = 10.0
TURN_S = 0.01  # per turn of the events
_END = (1 << 64) - 1  # the sequence number of the last message of a replay

Messages = list[tuple[int, bytes]]
Find = Callable[[int], Messages]


class Replays:
    """The replays that one endpoint serves. One thread uses it. Raises OSError."""

    def __init__(self, sockets: ZmtpSockets, endpoint: str) -> None:
        self._sockets = sockets
        sockets.bind(endpoint, b"ROUTER", self._take)
        self._waiting: OrderedDict[ZmtpPeer, int] = OrderedDict()  # first numbers, by router
        self._running: dict[ZmtpPeer, _Replay] = {}
        self.dropped = 0  # rejected requests (the queue was full) and stalled replays

    def serve(self, wait_s: float, find: Find) -> None:
        """Serve the sockets and replays for a turn, after a wait for a first event. ``find``
        returns the messages of a replay from a number on.
        """
        self._sockets.poll(0 if self._running or self._waiting else wait_s)
        end_s = time.monotonic() + TURN_S
        stuck = 0.0
        while time.monotonic() < end_s and (self._begin(find) or self._running):
            moved = [self._advance(router) for router in list(self._running)]
            if not any(moved):
                stuck = end_s - time.monotonic()
                break
        if stuck > 0:  # all routers are slow
            self._sockets.poll(min(stuck, wait_s))

    def _take(self, router: ZmtpPeer, request: list[bytes]) -> None:
        """Take a request: an empty frame and a number. An invalid one is dropped."""
        if len(request) != 2 or len(request[1]) != 8:
            return
        self._running.pop(router, None)
        if router not in self._waiting and len(self._waiting) >= WAITING_MAX:
            gone = [one for one in self._waiting if one.closed]
            for one in gone:
                del self._waiting[one]
            if not gone:
                self.dropped += 1
                return
        self._waiting[router] = int.from_bytes(request[1], "big")

    def _begin(self, find: Find) -> bool:
        """Begin the next replay in the queue, if one may run."""
        if not self._waiting or len(self._running) >= RUNNING_MAX:
            return False
        router, first = self._waiting.popitem(last=False)
        if not router.closed:
            self._running[router] = _Replay(find(first))
        return True

    def _advance(self, router: ZmtpPeer) -> bool:
        """Send the next message of a replay. Returns whether that was possible, or the replay is
        over.
        """
        replay = self._running[router]
        if router.closed:
            del self._running[router]
            return True
        if router.pending:
            if time.monotonic() - replay.moved_s < STALLED_S:
                return False
            self.dropped += 1
            del self._running[router]
            return True
        number, batch = replay.left.popleft()
        router.send([b"", number.to_bytes(8, "big"), batch])
        replay.moved_s = time.monotonic()
        if not replay.left:
            del self._running[router]
        return True


class _Replay:
    def __init__(self, messages: Messages) -> None:
        self.left = deque([*messages, (_END, b"")])
        self.moved_s = time.monotonic()
