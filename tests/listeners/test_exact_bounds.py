# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server's HTTP listeners have exactly the bounds of docs/operate/listeners.md."""

from __future__ import annotations

import http.client

import pytest
from attacked import Site, status_of


def head_of(size: int) -> bytes:
    """Return a request for health whose head has that many bytes, in lines of a common length."""
    line = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    left = size - len(line) - len(b"\r\n")
    while left:
        # No line is shorter than a header, and none is too long by itself.
        more = left if left < 8_000 else 4_000
        line += b"X-A: " + b"b" * (more - len(b"X-A: \r\n")) + b"\r\n"
        left -= more
    return line + b"\r\n"


@pytest.mark.parametrize("name", ["admin port", "local socket"])
def test_a_head_has_32_kib_at_most(served: Site, name: str) -> None:
    listener, most = served.http[name], 32 << 10
    assert len(head_of(most)) == most
    assert status_of(listener.raw(head_of(most))) == 200
    assert status_of(listener.raw(head_of(most + 1))) == 431


@pytest.mark.parametrize("name", ["admin port", "local socket"])
def test_the_limits_apply_to_each_request_of_a_connection(served: Site, name: str) -> None:
    with served.http[name].connect() as peer:
        for _ in range(3):
            peer.sendall(head_of(20 << 10))
            answer = http.client.HTTPResponse(peer)
            answer.begin()
            assert answer.status == 200
            answer.read()


@pytest.mark.parametrize(
    ("method", "length", "status"),
    [
        ("POST", "65536", 400),  # the body is read, but is not JSON
        ("POST", "65537", 413),
        ("POST", "9" * 5000, 413),  # more digits than Python's limit for conversions
        ("GET", "0", 200),
        ("GET", "1", 413),
    ],
)
def test_a_body_has_64_kib_at_most(served: Site, method: str, length: str, status: int) -> None:
    path = "/quota" if method == "POST" else "/healthz"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    body = b"a" * int(length) if status == 400 else b""
    assert status_of(served.http["local socket"].raw(head.encode() + body)) == status
