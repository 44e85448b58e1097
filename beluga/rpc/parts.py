# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Splits messages of any size into parts that fit a lane's bulk area.

A client sends each part of a request with one call. The reply to the last one is the first part of
the result; further calls fetch the rest. The server stores incomplete messages by session. If it
receives a part but not those before it (it has just taken over, or dropped them), it replies AGAIN,
and the client starts over.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from beluga.errors import BadReplyError, BadRequestError, CallTimeoutError, QuotaError

_HEAD = struct.Struct("<IIQQ")  # kind, message number, offset of the part, total bytes
SEND, MORE, NEXT, RESULT, AGAIN = range(1, 6)

MESSAGE_MAX = 1 << 30
"""The largest message in bytes."""

_HELD_MAX = 2 << 30  # bytes of incomplete messages that a server stores
_IDLE_S = 30.0  # a message idle for longer may be dropped to make room


@dataclass
class _Held:
    """An incomplete message of a session: its request until the handler runs, then its result."""

    nonce: int
    number: int
    data: bytearray
    done: bool
    used_s: float


class Assembly:
    """Server side: assembles requests from parts, and splits results into parts.

    Calls of one session arrive one at a time; calls of several sessions arrive on several threads.
    """

    def __init__(self, run: Callable[[bytearray], bytearray], room: int) -> None:
        self._run, self._room = run, room - _HEAD.size
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by lane

    def answer(self, lane: int, nonce: int, call: bytearray) -> bytes | bytearray:
        """Return the reply to a call. Raises BadRequestError for a malformed call, and QuotaError
        if incomplete messages take too much memory.
        """
        if len(call) < _HEAD.size:
            raise BadRequestError("the handler call is too short for its head")
        kind, number, at, total = _HEAD.unpack_from(call)
        part = memoryview(call)[_HEAD.size :]
        with self._lock:
            held = self._held.get(lane)
            if held is not None and (held.nonce != nonce or held.number != number):
                del self._held[lane]
                held = None
        if kind == MORE:
            return self._more(lane, held, number, at)
        if kind != SEND or total > MESSAGE_MAX or at + len(part) > total:
            raise BadRequestError(
                f"a part of {len(part)} bytes at offset {at} does not fit a message of {total} "
                f"bytes; a message has at most {MESSAGE_MAX} bytes"
            )
        if at == 0:
            held = _Held(nonce, number, bytearray(), done=False, used_s=0.0)
        elif held is None or held.done or len(held.data) != at:
            return _HEAD.pack(AGAIN, number, 0, 0)
        held.data += part
        if len(held.data) < total:
            self._keep(lane, held)
            return _HEAD.pack(NEXT, number, len(held.data), total)
        held.data, held.done = self._run(held.data), True
        return self._more(lane, held, number, 0)

    def _more(self, lane: int, held: _Held | None, number: int, at: int) -> bytes | bytearray:
        if held is None or not held.done or at > len(held.data):
            return _HEAD.pack(AGAIN, number, 0, 0)
        end = at + self._room
        if end < len(held.data):
            self._keep(lane, held)
        else:
            with self._lock:
                self._held.pop(lane, None)
        reply = bytearray(_HEAD.pack(RESULT, number, at, len(held.data)))
        reply += memoryview(held.data)[at:end]
        return reply

    def _keep(self, lane: int, held: _Held) -> None:
        """Store a message until its next part arrives, if there is room."""
        now = held.used_s = time.monotonic()
        with self._lock:
            self._held.pop(lane, None)
            if sum(len(one.data) for one in self._held.values()) + len(held.data) > _HELD_MAX:
                for number, one in list(self._held.items()):
                    if now - one.used_s > _IDLE_S:
                        del self._held[number]
            if sum(len(one.data) for one in self._held.values()) + len(held.data) > _HELD_MAX:
                raise QuotaError(
                    f"the server already stores {_HELD_MAX} bytes of incomplete messages; send "
                    "less at a time, or call again later"
                )
            self._held[lane] = held


def exchange(
    call: Callable[[bytes, float], bytes],
    message: bytearray,
    number: int,
    room: int,
    limit_s: float,
) -> bytearray:
    """Client side: send a message and return the result. ``call`` makes one call within a number of
    seconds; ``room`` is its largest size in bytes.

    Raises :class:`~beluga.errors.BadRequestError` for a message that is too large,
    :class:`~beluga.errors.CallTimeoutError` after ``limit_s`` seconds, and the errors of ``call``.
    """
    if len(message) > MESSAGE_MAX:
        raise BadRequestError(
            f"the message has {len(message)} bytes, but at most {MESSAGE_MAX} are allowed; send it "
            "in pieces"
        )
    until_s = time.monotonic() + limit_s

    def send_part(
        kind: int, at: int, total: int, part: memoryview
    ) -> tuple[int, int, int, memoryview]:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise CallTimeoutError(
                f"the server did not reply to a message of {len(message)} bytes within "
                f"{limit_s:g} s; raise timeout_s"
            )
        reply = memoryview(call(_HEAD.pack(kind, number, at, total) + bytes(part), left_s))
        if len(reply) < _HEAD.size:
            raise _invalid_reply("the head is missing")
        kind, named, at, total = _HEAD.unpack_from(reply)
        if named != number or total > MESSAGE_MAX:
            raise _invalid_reply("it belongs to another call")
        return kind, at, total, reply[_HEAD.size :]

    while True:
        result = _attempt(send_part, memoryview(message), room - _HEAD.size)
        if result is not None:
            return result


def _attempt(
    send_part: Callable[[int, int, int, memoryview], tuple[int, int, int, memoryview]],
    message: memoryview,
    room: int,
) -> bytearray | None:
    """Return the result, or None if the exchange must start over."""
    kind, at = NEXT, 0
    while kind == NEXT:
        part = message[at : at + room]
        kind, there, total, first = send_part(SEND, at, len(message), part)
        at += len(part)
        if kind == NEXT and there != at:
            raise _invalid_reply("it acknowledges other parts")
    if kind == AGAIN:
        return None
    result = bytearray(first)
    while kind == RESULT and len(result) < total:
        kind, there, total, first = send_part(MORE, len(result), 0, memoryview(b""))
        if kind == AGAIN:
            return None
        if there != len(result) or len(first) == 0:
            break
        result += first
    if kind != RESULT or len(result) != total:
        raise _invalid_reply("its parts do not fit together")
    return result


def _invalid_reply(why: str) -> BadReplyError:
    return BadReplyError(
        f"the reply of a handler is invalid, {why}; run one version of Beluga on both sides"
    )
