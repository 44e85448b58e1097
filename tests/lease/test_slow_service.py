# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A service of leases that is slow or answers nonsense takes no more than a call's time, and no
lease from its holder before it has expired.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from beluga.errors import LeaseError
from beluga.lease.http import JsonService

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@contextmanager
def dripping(at_once: bytes) -> Iterator[str]:
    """Run a server that sends this, and then a byte now and then. Yields its URL."""
    ending = threading.Event()

    def answer(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.sendall(at_once)
            for _ in range(1000):
                if ending.wait(0.05):
                    return
                peer.sendall(b"1")

    def accept() -> None:
        while not ending.is_set():
            with suppress(TimeoutError):
                peer, _ = listening.accept()
                peer.settimeout(10)
                answers.append(threading.Thread(target=answer, args=(peer,)))
                answers[-1].start()

    answers: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        accepts = threading.Thread(target=accept)
        accepts.start()
        try:
            yield "http://127.0.0.1:{1}".format(*listening.getsockname())
        finally:
            ending.set()
            for thread in (accepts, *answers):
                thread.join()


@pytest.mark.parametrize(
    "at_once",
    [b"", b"HTTP/1.1 200 OK\r\nX-A: ", HEAD, b"HTTP/1.1 100 Continue\r\n\r\n" * 3],
    ids=["status", "headers", "body", "continue"],
)
def test_a_trickled_reply_does_not_extend_the_deadline(at_once: bytes) -> None:
    """It would take 50 s."""
    with dripping(at_once) as url:
        begin = time.monotonic()
        with pytest.raises(LeaseError, match=r"does not answer: .*timed out"):
            JsonService(url, timeout_s=0.3).request("POST", "/", {})
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b"<html>", b"[]", b"\xff", b""]
)
def test_a_reply_that_is_not_an_object_counts_as_empty(body: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    with dripping(head + body) as url:
        assert JsonService(url, timeout_s=20).request("GET", "/") == (200, {})
