# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Peers that write ZMTP themselves, and need not follow it."""

from __future__ import annotations

import socket
import struct

GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0")).ljust(64, b"\0")


def ready(kind: bytes) -> bytes:
    body = b"\5READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\4" + bytes([len(body)]) + body


def connected(endpoint: str) -> socket.socket:
    kind, _, place = endpoint.partition("://")
    if kind == "ipc":
        made = socket.socket(socket.AF_UNIX)
        made.connect(place)
    else:
        host, _, port = place.rpartition(":")
        made = socket.create_connection((host, int(port)))
    made.settimeout(30)
    return made


def handshaken(endpoint: str, kind: bytes) -> socket.socket:
    """Return a connection behind its handshake."""
    peer = connected(endpoint)
    peer.sendall(GREETING + ready(kind))
    head = b""
    while len(head) < 64 + 2 or len(head) < 66 + head[65]:
        data = peer.recv(4096)
        assert data
        head += data
    return peer


def is_cut(peer: socket.socket, endless: bytes, most: int) -> bool:
    """Return whether the connection is ended before it has accepted that many bytes."""
    part = endless * (1 + (1 << 16) // len(endless))
    try:
        for _ in range(most // len(part)):
            peer.sendall(part)
        return peer.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False
