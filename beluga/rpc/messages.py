# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Messages of handler calls: their bytes, and their parts in a lane's bulk area.

A message is its values in MessagePack, and the raw bytes of its buffers::

    size of the values (4 bytes) | values | zeros | buffer 0 | zeros | buffer 1 ...

Each buffer begins at a multiple of 64. The values refer to it by an extension type, which has its
start, from the first one's, and its size. Nothing in a message can name code (D14): its values are
None, booleans, numbers, text, bytes, arrays of numbers, lists, and dictionaries; dataclasses are
dictionaries of their fields.

A client sends each part of a request with one call. The reply to the last one is the first part of
the result; further calls fetch the rest. The server stores incomplete messages by session. If it
receives a part but not those before it (it has just taken over, or dropped them), it replies AGAIN,
and the client starts over.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from beluga.arguments import short
from beluga.errors import (
    BadReplyError,
    BadRequestError,
    BadTypeError,
    BelugaError,
    CallTimeoutError,
    HandlerError,
    NoMethodError,
    QuotaError,
)

if TYPE_CHECKING:
    import numpy as np
else:
    from beluga._numpy import np

_ALIGN = 64
_SIZE = struct.Struct("<I")
_BYTES, _ARRAY, _INTEGER = 1, 2, 3  # extension types
DTYPE_KINDS = "?biufc"
_DEPTH_MAX = 64  # nesting of lists
_INTEGER_MIN, _INTEGER_MAX = -(1 << 63), (1 << 64) - 1  # of MessagePack; others are extensions

_RAISED: dict[str, type[BelugaError]] = {
    error.__name__: error
    for error in (BadRequestError, BadTypeError, HandlerError, NoMethodError, QuotaError)
}


def pack(fields: Mapping[str, object]) -> bytearray:
    """Encode a message with these fields. Raises BadTypeError for a value of another type."""
    import msgspec  # importing beluga needs cffi alone

    buffers = bytearray()
    try:
        values = msgspec.msgpack.encode(_plain(fields, buffers, 0))
    except UnicodeEncodeError:
        raise BadTypeError("a text has lone surrogates; give valid Unicode") from None
    message = bytearray(_SIZE.pack(len(values)) + values)
    message += bytes(-len(message) % _ALIGN)
    message += buffers
    return message


def unpack(message: bytearray) -> dict[str, object]:
    """Decode a message, which is untrusted input. Arrays in the result share its memory. Raises
    BadRequestError if it is malformed.
    """
    import msgspec

    try:
        (size,) = _SIZE.unpack_from(message)
        end = _SIZE.size + size
        buffers = memoryview(message)[end + -end % _ALIGN :]

        def extension(code: int, data: memoryview) -> object:
            return _extension(code, bytes(data), buffers)

        decode = msgspec.msgpack.decode
        values = memoryview(message)[_SIZE.size : end]
        fields: dict[str, object] = decode(values, type=dict[str, Any], ext_hook=extension)
    except (ValueError, TypeError, RecursionError, MemoryError, struct.error,
            msgspec.MsgspecError) as error:  # fmt: skip
        raise BadRequestError(
            f"a message cannot be read: {error or type(error).__name__}"
        ) from None
    return fields


def request(name: str, arguments: tuple[object, ...], named: dict[str, Any]) -> bytearray:
    """Encode a handler call. Raises BadTypeError for a value that cannot be sent."""
    return pack({"handler": name, "arguments": list(arguments), "named": named})


def request_of(message: bytearray) -> tuple[str, list[object], dict[str, object]]:
    """Return the name, the arguments and the named arguments of a call. Raises BadRequestError."""
    fields = unpack(message)
    name, arguments = fields.get("handler"), fields.get("arguments")
    named = fields.get("named")
    if not (isinstance(name, str) and isinstance(arguments, list) and isinstance(named, dict)):
        raise BadRequestError("a call has no handler name or no list of arguments")
    return name, arguments, named


def failure(error: BelugaError) -> bytearray:
    """Encode the error of a call."""
    return pack({"error": [type(error).__name__, str(error)]})


def result_of(message: bytearray) -> object:
    """Return a handler's result. Raises the error in the reply."""
    fields = unpack(message)
    if "result" in fields:
        return fields["result"]
    error = fields.get("error")
    if (
        not isinstance(error, list)
        or len(error) != 2
        or not all(isinstance(text, str) for text in error)
    ):
        raise BadRequestError("a reply has neither a result nor an error")
    name, text = error
    raise _RAISED.get(name, HandlerError)(text)


def _plain(value: object, buffers: bytearray, depth: int) -> object:  # noqa: PLR0911, PLR0912
    """Return a value as MessagePack has it, and append its bytes and arrays to ``buffers``."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # also of a subclass, such as an enumeration's
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        number = int(value)
        fits = _INTEGER_MIN <= number <= _INTEGER_MAX
        return number if fits else _extended(_INTEGER, str(number))
    if depth > _DEPTH_MAX:
        raise BadTypeError(f"a value nests lists more than {_DEPTH_MAX} deep; give a flatter one")
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in DTYPE_KINDS:
            raise BadTypeError(
                f"an array of {value.dtype} cannot be sent; give numbers or booleans"
            )
        where = _appended(value.tobytes(), buffers)
        return _extended(_ARRAY, (*where, value.dtype.str, value.shape))
    if isinstance(value, bytes | bytearray | memoryview):
        return _extended(_BYTES, _appended(bytes(value), buffers))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise BadTypeError(f"the keys of {short(value)} are not all text; give a dict of str")
        return {str.__str__(key): _plain(item, buffers, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, buffers, depth + 1) for item in value]
    raise BadTypeError(
        f"{short(value)} has a type that cannot be sent; give None, a bool, int, float, str, "
        "bytes, numpy array, list, tuple, dict or dataclass"
    )


def _appended(data: bytes, buffers: bytearray) -> tuple[int, int]:
    """Append a buffer. Return its start and its size in bytes."""
    buffers += bytes(-len(buffers) % _ALIGN)
    start = len(buffers)
    buffers += data
    return start, len(data)


def _extended(code: int, content: object) -> object:
    import msgspec

    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


def _extension(code: int, data: bytes, buffers: memoryview) -> object:
    """Decode a value of an extension type. Raises ValueError."""
    import msgspec

    decode = msgspec.msgpack.decode
    if code == _INTEGER:
        return int(decode(data, type=str))
    if code == _BYTES:
        start, size = decode(data, type=tuple[int, int])
        return bytes(_buffer(buffers, start, size))
    if code != _ARRAY:
        raise ValueError(f"{code} is not an extension type")
    start, size, name, shape = decode(data, type=tuple[int, int, str, list[int]])
    buffer, dtype = _buffer(buffers, start, size), np.dtype(name)
    whole = min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == size
    if dtype.kind not in DTYPE_KINDS or not whole:
        raise ValueError(f"{size} bytes do not fit an array of {dtype} with the shape {shape}")
    return np.frombuffer(buffer, dtype).reshape(shape)


def _buffer(buffers: memoryview, start: int, size: int) -> memoryview:
    if not 0 <= start <= start + size <= len(buffers):
        raise ValueError("a buffer ends after the message")
    return buffers[start : start + size]


_HEAD = struct.Struct("<IIQQ")  # kind, message number, offset of the part, total bytes
SEND, MORE, NEXT, RESULT, AGAIN = range(1, 6)

MESSAGE_MAX = 1 << 30
"""The largest message in bytes."""

_HELD_MAX = 2 << 30  # bytes of incomplete messages that a server stores
_SHARE = 256 << 20  # bytes that each session may store, while there is room
_IDLE_S = 30.0  # a message idle for longer may be dropped to make room


@dataclasses.dataclass
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
        self._ended: dict[int, int] = {}  # by lane: the nonce of its last session that ended

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

    def forget(self, lane: int, nonce: int) -> None:
        """Drop what an ended session left."""
        with self._lock:
            self._ended[lane] = nonce
            held = self._held.get(lane)
            if held is not None and held.nonce == nonce:
                del self._held[lane]

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
        """Store a message until its next part arrives, if there is room: a session may use half of
        what others leave, and its share, so that none can refuse all others.
        """
        now = held.used_s = time.monotonic()
        with self._lock:
            self._held.pop(lane, None)
            if self._ended.get(lane) == held.nonce:
                return  # nobody fetches it
            if len(held.data) > self._room_of_session():
                for number, other in list(self._held.items()):
                    if now - other.used_s > _IDLE_S:
                        del self._held[number]
            if len(held.data) > self._room_of_session():
                raise QuotaError(
                    "the incomplete messages of this server's sessions leave "
                    f"{self._room_of_session()} bytes to this one; send less at a time, or call "
                    "again later"
                )
            self._held[lane] = held

    def _room_of_session(self) -> int:
        free = max(0, _HELD_MAX - sum(len(held.data) for held in self._held.values()))
        return min(free, max(_SHARE, free // 2))


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
