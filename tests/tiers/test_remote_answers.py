# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Responses of Redis that the remote tier parses: strings, complete or not, from a faulty
server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from beluga.tiers.arena import Arena
from beluga.tiers.remote import RefusedError
from beluga.tiers.remote.valkey import _read_string

ARENA = Arena()


@pytest.fixture
def lines() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.settimeout(20)
    yield near, far
    near.close()
    far.close()


Lines = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("size", [1, 2, 4088, 4089, 4090, 4091, 4092, 4093, 4094, 4096, 1 << 20])
def test_a_string_is_read_whole(lines: Lines, size: int) -> None:
    near, far = lines
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    sender = threading.Thread(target=far.sendall, args=(b"$%d\r\n%s\r\n" % (size, data),))
    sender.start()
    assert bytes(_read_string(near, size, ARENA) or b"") == data
    sender.join()
    far.sendall(b"$1\r\nx\r\n")
    assert bytes(_read_string(near, 1, ARENA) or b"") == b"x", "the next answer is the next"


def test_a_string_that_arrives_byte_by_byte_is_read_completely(lines: Lines) -> None:
    near, far = lines
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    def send() -> None:
        for byte in b"$5\r\na\r\nb\r\r\n":
            far.sendall(bytes([byte]))

    sender = threading.Thread(target=send)
    sender.start()
    assert bytes(_read_string(near, 5, ARENA) or b"") == b"a\r\nb\r"
    sender.join()


def test_a_null_string_is_none(lines: Lines) -> None:
    near, far = lines
    far.sendall(b"$0\r\n\r\n")
    assert _read_string(near, 10, ARENA) is None


def test_an_error_reply_is_a_refusal_with_its_text(lines: Lines) -> None:
    near, far = lines
    far.sendall(b"-NOAUTH Authentication required.\r\n")
    with pytest.raises(RefusedError, match="NOAUTH Authentication required"):
        _read_string(near, 10, ARENA)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"$5",
        b"$5\r\nabc",
        b"$-1\r\n",
        b"$\r\n\r\n",
        b"$1e3\r\n",
        b"$11\r\nabcdefghijk\r\n",
        b"$99999999999999999999\r\n",
        b"$" + b"9" * 5000 + b"\r\n",
        b"$2\r\nabc\r\n",
        b"$2\r\nabcd",
        b"$2\r\nab\r\n$2\r\nab\r\n",
        b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"\r\n",
        b"x" * 20_000,
    ],
)
def test_any_other_reply_closes_the_connection(lines: Lines, answer: bytes) -> None:
    near, far = lines
    sender = threading.Thread(target=far.sendall, args=(answer,))
    sender.start()
    sender.join()
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        _read_string(near, 10, ARENA)


def test_the_buffer_is_reused_but_never_shared(lines: Lines) -> None:
    near, far = lines
    arena, size = Arena(), 1 << 20

    def read_one(byte: bytes) -> memoryview:
        sender = threading.Thread(
            target=far.sendall, args=(b"$%d\r\n%s\r\n" % (size, byte * size),)
        )
        sender.start()
        found = _read_string(near, size, arena)
        sender.join()
        assert found is not None
        return found

    def address(found: memoryview) -> int:
        return int(np.frombuffer(found, np.uint8).__array_interface__["data"][0])

    first = read_one(b"a")
    second = read_one(b"b")
    assert bytes(first) == b"a" * size
    place = address(first)
    assert address(second) != place
    del first
    assert address(read_one(b"c")) == place
    assert bytes(second) == b"b" * size
