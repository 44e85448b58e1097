# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The publishing side of ZMTP 3, ZMQ's protocol (https://rfc.zeromq.org/spec/23): PUB and ROUTER
endpoints for routers with ZMQ's SUB, DEALER or REQ sockets.

libzmq bounds the size of a frame, but not the number of frames of a message, nor the subscriptions
and connections of a socket, so one peer could take all memory of the pool's server. Here all of
them are bounded, and a peer that exceeds a bound is disconnected. One thread uses the sockets, and
nothing blocks it.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from beluga.listening import ConnectionSlot, ConnectionSlots

CONNECTIONS_MAX = 256  # per endpoint
FRAME_MAX = 1 << 10  # bytes; a request has 8
FRAMES_MAX = 4  # per message; a request has 2
TOPICS_MAX = 64  # subscriptions of a peer
PENDING_MAX = 10_000  # messages that a peer has not accepted
TURN_S = 0.01  # the longest turn at the sockets in a call of poll()

_READ = 1 << 12  # bytes of one read; a peer with more is read again after the others
_SENT_PARTS = 64  # per system call
_BACKLOG = 1024
_PORT_MAX = 65535
_LAG_MIN_S = 0.25  # a new connection's handshake may be under way
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = (_SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0")).ljust(64, b"\0")
_MECHANISM = slice(12, 32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_PEERS = {b"PUB": (b"SUB", b"XSUB"), b"ROUTER": (b"DEALER", b"REQ", b"ROUTER")}
_SIOCGIFADDR = 0x8915

Received = Callable[["ZmtpPeer", list[bytes]], None]


class _ViolationError(Exception):
    """The peer does not follow the protocol, or exceeds a bound."""


class ZmtpPeer:
    """A connection to a router. :attr:`topics` are those to which it has subscribed."""

    def __init__(self, connection: socket.socket, endpoint: _Endpoint) -> None:
        self.connection, self.endpoint = connection, endpoint
        self.topics: list[bytes] = []
        self.closed = False
        self.read_turn = 0  # of the last read, so that all peers are read in turns
        self._input = bytearray()
        self._message: list[bytes] = []
        self._greeted = self._ready = False
        self._output: deque[memoryview] = deque()
        self._events = selectors.EVENT_READ
        self._slot: ConnectionSlot[ZmtpPeer] | None = None

    @property
    def pending(self) -> int:
        """The number of frames that the peer has not accepted."""
        return len(self._output)

    def begin(self, slot: ConnectionSlot[ZmtpPeer]) -> None:
        """Send the greeting, and wait for the peer's."""
        self._slot = slot
        self._write([_GREETING])

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message, or as much of it as the peer accepts now. The rest waits. Returns False
        if too many messages wait.
        """
        if len(self._output) >= 2 * PENDING_MAX:  # a message has two parts
            return False
        self._write(message_parts(frames))
        return True

    def send_parts(self, parts: Sequence[bytes]) -> bool:
        """Send a message as :func:`message_parts` returned it."""
        if len(self._output) >= 2 * PENDING_MAX:
            return False
        self._write(parts)
        return True

    def read(self) -> list[list[bytes]]:
        """Read once. Returns the received messages. Raises OSError or _ViolationError."""
        data = self.connection.recv(_READ)
        if not data:
            raise ConnectionResetError
        self._input += data
        if not self._greeted and not self._take_greeting():
            return []
        found, at = [], 0
        while (frame := self._frame_at(at)) is not None:
            flags, start, end = frame
            body, at = bytes(self._input[start:end]), end
            if flags & _COMMAND:
                self._command(body)
            elif not self._ready:
                raise _ViolationError
            else:
                self._message.append(body)
                if not flags & _MORE:
                    found.append(self._message)
                    self._message = []
                elif len(self._message) == FRAMES_MAX:
                    raise _ViolationError
        del self._input[:at]
        return found

    def subscribe(self, message: bytes) -> None:
        """Take a subscription, or the end of one, as a message. Raises _ViolationError."""
        kind, topic = message[:1], message[1:]
        if kind == b"\1":
            if len(self.topics) == TOPICS_MAX:
                raise _ViolationError
            self.topics.append(topic)
        elif kind == b"\0":
            with contextlib.suppress(ValueError):
                self.topics.remove(topic)

    def flush(self) -> None:
        """Send what waits, as far as the peer accepts it. Raises OSError."""
        while self._output:
            parts = [self._output[n] for n in range(min(_SENT_PARTS, len(self._output)))]
            try:
                sent = self.connection.sendmsg(parts)
            except BlockingIOError:
                break
            if self._slot is not None:
                self._slot.move(sent)
            while sent:
                part = self._output[0]
                if sent < len(part):
                    self._output[0] = part[sent:]
                    break
                sent -= len(part)
                self._output.popleft()
        self._wait()

    def _write(self, parts: Sequence[bytes]) -> None:
        waited = bool(self._output)
        self._output.extend(memoryview(part) for part in parts if part)
        if not waited:
            if self._ready and self._slot is not None:
                self._slot.wait()
            try:
                self.flush()
            except OSError:
                self._wait()  # the next poll closes the connection

    def _wait(self) -> None:
        """Wait for what the connection needs next."""
        if self._slot is not None and self._ready and not self._output:
            self._slot.work()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._output else 0)
        if events != self._events and not self.closed:
            self._events = events
            self.endpoint.selector.modify(self.connection, events, self)

    def _take_greeting(self) -> bool:
        """Check the peer's greeting. Returns whether it is complete."""
        known = self._input[: len(_SIGNATURE)]
        if known[:1] != _SIGNATURE[:1] or (len(known) == len(_SIGNATURE) and known[9] != 0x7F):
            raise _ViolationError
        if len(self._input) > len(_SIGNATURE) and self._input[len(_SIGNATURE)] < 3:
            raise _ViolationError
        if len(self._input) < len(_GREETING):
            return False
        if self._input[_MECHANISM] != _GREETING[_MECHANISM]:
            raise _ViolationError
        del self._input[: len(_GREETING)]
        self._greeted = True
        kind = self.endpoint.kind
        body = b"\5READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self._write([bytes([_COMMAND, len(body)]) + body])
        return True

    def _frame_at(self, at: int) -> tuple[int, int, int] | None:
        """Return the flags, the start and the end of the frame there, or None if it is not
        complete. Raises _ViolationError for one that is too long.
        """
        if len(self._input) < at + 2:
            return None
        flags = self._input[at]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise _ViolationError
        start = at + 9 if flags & _LONG else at + 2
        if len(self._input) < start:
            return None
        size = int.from_bytes(self._input[at + 1 : start], "big")
        if size > FRAME_MAX:
            raise _ViolationError
        return (flags, start, start + size) if len(self._input) >= start + size else None

    def _command(self, body: bytes) -> None:
        name, data = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if not self._ready:
            if name != b"READY" or _socket_type(data) not in _PEERS[self.endpoint.kind]:
                raise _ViolationError
            self._ready = True
            self._wait()
        elif name == b"PING":  # two bytes of a timeout, and what is sent back
            pong = b"\4PONG" + data[2:18]
            if len(self._output) < 2 * PENDING_MAX:
                self._write([bytes([_COMMAND, len(pong)]) + pong])
        elif name in (b"SUBSCRIBE", b"CANCEL"):
            self.subscribe((b"\1" if name == b"SUBSCRIBE" else b"\0") + data)


class _Endpoint:
    """A bound endpoint."""

    def __init__(
        self, name: str, kind: bytes, received: Received | None, selector: selectors.BaseSelector
    ) -> None:
        self.kind, self.received, self.selector = kind, received, selector
        self.slots: ConnectionSlots[ZmtpPeer] = ConnectionSlots()
        self.path = ""
        self.socket = _bound(name)
        where = self.socket.getsockname()
        if isinstance(where, str):  # not a TCP address, and not an abstract one
            self.path = where
        self.socket.setblocking(False)


class ZmtpSockets:
    """Endpoints and their connections."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._endpoints: list[_Endpoint] = []
        self._turn = 0

    def bind(self, endpoint: str, kind: bytes, received: Received | None = None) -> None:
        """Bind an endpoint of a kind (``PUB`` or ``ROUTER``). ``received`` gets the messages of a
        ROUTER's peers. Raises OSError.
        """
        made = _Endpoint(endpoint, kind, received, self._selector)
        self._selector.register(made.socket, selectors.EVENT_READ, made)
        self._endpoints.append(made)

    def close(self) -> None:
        """Close all connections and endpoints."""
        for endpoint in self._endpoints:
            for slot in list(endpoint.slots):
                self.drop(slot.connection)
            endpoint.socket.close()
            if endpoint.path:
                with contextlib.suppress(OSError):
                    Path(endpoint.path).unlink()
        self._endpoints.clear()
        self._selector.close()

    def publish(self, frames: Sequence[bytes]) -> None:
        """Send a message to the peers of PUB endpoints that have subscribed to it. It is dropped
        for those with too many unread messages.
        """
        parts = message_parts(frames)
        for endpoint in self._endpoints:
            for slot in endpoint.slots if endpoint.kind == b"PUB" else ():
                if any(map(frames[0].startswith, slot.connection.topics)):
                    slot.connection.send_parts(parts)

    def poll(self, wait_s: float) -> None:
        """Accept, read and send for a turn, after a wait for the first event."""
        ready = self._selector.select(wait_s)
        end_s = time.monotonic() + TURN_S
        self._turn += 1
        for key, events in sorted(ready, key=_last_turn):
            if isinstance(key.data, _Endpoint):
                self._accept(key.data)
            elif time.monotonic() > end_s:
                break
            else:
                self._serve(key.data, events)
        for endpoint in self._endpoints:
            for slot in endpoint.slots.overdue():
                self.drop(slot.connection)

    def drop(self, peer: ZmtpPeer) -> None:
        """Close a connection."""
        if peer.closed:
            return
        peer.closed = True
        peer.endpoint.slots.leave(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _serve(self, peer: ZmtpPeer, events: int) -> None:
        if peer.closed:
            return
        peer.read_turn = self._turn
        try:
            if events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                for message in peer.read():
                    if peer.endpoint.received is not None:
                        peer.endpoint.received(peer, message)
                    elif len(message) == 1:
                        peer.subscribe(message[0])
        except BlockingIOError:
            return
        except (OSError, _ViolationError):
            self.drop(peer)

    def _accept(self, endpoint: _Endpoint) -> None:
        try:
            connection, address = endpoint.socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room(endpoint)
            return
        if len(endpoint.slots) >= CONNECTIONS_MAX:
            self._make_room(endpoint)
        connection.setblocking(False)
        if endpoint.socket.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer = ZmtpPeer(connection, endpoint)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        peer.begin(endpoint.slots.take(peer, str(address[:1])))

    def _make_room(self, endpoint: _Endpoint) -> None:
        """Close the slowest connection; if all are in order, the oldest one of the address with
        the most.
        """
        slowest = endpoint.slots.slowest(lag_min_s=_LAG_MIN_S) or endpoint.slots.slowest()
        if slowest:
            self.drop(slowest[0].connection)
            return
        counts = Counter(slot.peer for slot in endpoint.slots)
        if counts:
            most, _ = counts.most_common(1)[0]
            self.drop(next(slot for slot in endpoint.slots if slot.peer == most).connection)


def message_parts(frames: Sequence[bytes]) -> list[bytes]:
    """Return a message as two parts of bytes: all but the content of its last frame, and this. So
    messages of several peers share the content.
    """
    head = bytearray()
    for number, frame in enumerate(frames):
        more = _MORE if number < len(frames) - 1 else 0
        size = len(frame)
        head += (
            struct.pack(">BB", more, size) if size < 256 else struct.pack(">BQ", more | _LONG, size)
        )
        if more:
            head += frame
    return [bytes(head), frames[-1]]


def _last_turn(event: tuple[selectors.SelectorKey, int]) -> int:
    """Return when a connection was read last; endpoints come first."""
    data: Any = event[0].data
    return data.read_turn if isinstance(data, ZmtpPeer) else -1


def _socket_type(properties: bytes) -> bytes:
    """Return the Socket-Type of a READY command's properties, or b""."""
    at = 0
    while at < len(properties):
        name = properties[at + 1 : at + 1 + properties[at]]
        at += 1 + properties[at]
        size = int.from_bytes(properties[at : at + 4], "big")
        value = properties[at + 4 : at + 4 + size]
        at += 4 + size
        if name.lower() == b"socket-type":
            return value
    return b""


def _bound(endpoint: str) -> socket.socket:
    """Return a listening socket of a ``tcp://`` or ``ipc://`` endpoint. Raises OSError."""
    kind, _, place = endpoint.partition("://")
    try:
        if kind == "ipc":
            return _bound_path(place)
        host, _, port = place.rpartition(":")
        number = 0 if port in ("*", "!") else int(port)
        if number > _PORT_MAX:
            raise ValueError(f"invalid port {number}: at most {_PORT_MAX}")
        return _bound_address(host.strip("[]"), number)
    except (ValueError, OverflowError, UnicodeError) as error:
        raise OSError(errno.EINVAL, f"{error}", endpoint) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, endpoint) from None


def _bound_path(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        if path.startswith("@"):
            made.bind("\0" + path[1:])
        else:
            with contextlib.suppress(FileNotFoundError):
                if Path(path).is_socket() and made.connect_ex(path) != 0:
                    Path(path).unlink()  # of a server that has ended
            made.close()
            made = socket.socket(socket.AF_UNIX)
            made.bind(path)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _bound_address(host: str, port: int) -> socket.socket:
    wanted = None if host == "*" else _address_of_interface(host) or host
    family, _, _, _, address = socket.getaddrinfo(
        wanted, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _address_of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface; "" if there is none of this name."""
    import fcntl

    if name not in {known for _, known in socket.if_nameindex()}:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
