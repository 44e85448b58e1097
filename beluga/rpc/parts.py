# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Messages of any size, in parts that fit a lane's bulk area.

A client sends the parts of a request one after the other, each with one call; the last call is
answered with the first part of the result, and further calls fetch the rest. A server keeps what is
incomplete by session. A call that comes to a server which does not know what came before (it has
taken over, or has dropped it) is answered AGAIN: the client begins anew.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from beluga.errors import BadReplyError, BadRequestError, CallTimeoutError, QuotaError

_HEAD = struct.Struct("<IIQQ")  # kind, number of the message, where the part begins, bytes in all
SEND, MORE, NEXT, RESULT, AGAIN = range(1, 6)

MESSAGE_MAX = 1 << 30
"""The most bytes of a message."""

_HELD_MAX = 2 << 30  # bytes of incomplete messages that a server keeps
_IDLE_S = 30.0  # after so long without a further part a message may be dropped for others


@dataclass
class _Held:
    """A message of a session that is incomplete: its request until it runs, then its result."""

    nonce: int
    number: int
    data: bytearray
    done: bool
    used_s: float


class Assembly:
    """The server's side: it makes whole requests of parts, and parts of results.

    The calls of one session come one after the other; those of several come on several threads.
    """

    def __init__(self, run: Callable[[bytearray], bytearray], room: int) -> None:
        self._run, self._room = run, room - _HEAD.size
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by lane

    def answer(self, lane: int, nonce: int, call: bytearray) -> bytes | bytearray:
        """Return the reply to a call. Raises BadRequestError for one that is none, and QuotaError
        if too much is incomplete already.
        """
        if len(call) < _HEAD.size:
            raise BadRequestError("a call of a handler has no head")
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
                f"a part of {len(part)} bytes at {at} of {total} is none of a message; a message "
                f"has at most {MESSAGE_MAX} bytes"
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
        """Keep a message until its next part, if there is room."""
        now = held.used_s = time.monotonic()
        with self._lock:
            self._held.pop(lane, None)
            if sum(len(one.data) for one in self._held.values()) + len(held.data) > _HELD_MAX:
                for number, one in list(self._held.items()):
                    if now - one.used_s > _IDLE_S:
                        del self._held[number]
            if sum(len(one.data) for one in self._held.values()) + len(held.data) > _HELD_MAX:
                raise QuotaError(
                    f"the server keeps {_HELD_MAX} bytes of messages that are under way; send less "
                    "at a time, or call again later"
                )
            self._held[lane] = held


def exchange(
    call: Callable[[bytes, float], bytes],
    message: bytearray,
    number: int,
    room: int,
    limit_s: float,
) -> bytearray:
    """The client's side: send a message and return the result. ``call`` makes one call within so
    many seconds, and ``room`` is the most bytes of one.

    Raises :class:`~beluga.errors.BadRequestError` for a message that is too large,
    :class:`~beluga.errors.CallTimeoutError` after ``limit_s`` seconds, and what ``call`` raises.
    """
    if len(message) > MESSAGE_MAX:
        raise BadRequestError(
            f"a message has {len(message)} bytes, {MESSAGE_MAX} is the most; send it in pieces"
        )
    until_s = time.monotonic() + limit_s

    def ask(kind: int, at: int, total: int, part: memoryview) -> tuple[int, int, int, memoryview]:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise CallTimeoutError(
                f"a message of {len(message)} bytes was not answered in {limit_s:g} s; give the "
                "call more time (timeout_s)"
            )
        reply = memoryview(call(_HEAD.pack(kind, number, at, total) + bytes(part), left_s))
        if len(reply) < _HEAD.size:
            raise _senseless("it has no head")
        kind, named, at, total = _HEAD.unpack_from(reply)
        if named != number or total > MESSAGE_MAX:
            raise _senseless("it is of another call")
        return kind, at, total, reply[_HEAD.size :]

    while True:
        result = _attempt(ask, memoryview(message), room - _HEAD.size)
        if result is not None:
            return result


def _attempt(
    ask: Callable[[int, int, int, memoryview], tuple[int, int, int, memoryview]],
    message: memoryview,
    room: int,
) -> bytearray | None:
    """Return the result, or None: begin again."""
    kind, at = NEXT, 0
    while kind == NEXT:
        part = message[at : at + room]
        kind, there, total, first = ask(SEND, at, len(message), part)
        at += len(part)
        if kind == NEXT and there != at:
            raise _senseless("other parts were sent")
    if kind == AGAIN:
        return None
    result = bytearray(first)
    while kind == RESULT and len(result) < total:
        kind, there, total, first = ask(MORE, len(result), 0, memoryview(b""))
        if kind == AGAIN:
            return None
        if there != len(result) or len(first) == 0:
            break
        result += first
    if kind != RESULT or len(result) != total:
        raise _senseless("its parts do not fit together")
    return result


def _senseless(why: str) -> BadReplyError:
    return BadReplyError(
        f"the reply of a handler is invalid, {why}; run one version of Beluga on both sides"
    )
