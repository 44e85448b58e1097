# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A TCP proxy on loopback that corrupts the server's responses."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable

Spoil = Callable[[bytes, int], "bytes | None"]
"""Takes some bytes of a response and the number of previous ones, and returns the bytes to forward.
Fewer of them, or None, cuts the connection.
"""


def intact(data: bytes, before: int) -> bytes:
    return data


def cut_after(limit: int) -> Spoil:
    """Forward that many bytes of each connection, then cut it."""

    def spoil(data: bytes, before: int) -> bytes | None:
        return data[: limit - before] if before < limit else None

    return spoil


def flip_every(period: int, seed: int) -> Spoil:
    """Flip a bit in every that many bytes."""
    chance = random.Random(seed)

    def spoil(data: bytes, before: int) -> bytes:
        changed = bytearray(data)
        for place in range(-before % period, len(data), period):
            changed[place] ^= 1 << chance.randrange(8)
        return bytes(changed)

    return spoil


class ByteProxy:
    """Accepts connections and forwards them to a port. ``spoil`` may be replaced at any time. While
    ``flowing`` is not set, responses are delayed.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.spoil: Spoil = intact
        self.flowing = threading.Event()
        self.flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        self.flowing.set()

    def drop(self) -> None:
        """Cut all connections."""
        while self._lines:
            _cut(self._lines.pop())

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._lines += [near, far]
            for source, target, spoils in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pump, args=(source, target, spoils), daemon=True
                ).start()

    def _pump(self, source: socket.socket, target: socket.socket, spoils: bool) -> None:
        before = 0
        try:
            while data := source.recv(65536):
                answer: bytes | None = data
                if spoils:
                    self.flowing.wait()
                    answer = self.spoil(data, before)
                    before += len(data)
                if answer is None:
                    break
                target.sendall(answer)
                if len(answer) < len(data):
                    break
        except OSError:
            pass
        _cut(source)
        _cut(target)


def _cut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
