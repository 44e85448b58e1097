# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clients that are silent, slow or do not read do not block other clients of a listener, however
many they are. Each attack runs while a harmless client sends requests.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from attacked import Listener, Site

COUNT = 150
PLACES_MAX = 70  # limit of a listener's connections
JSON = "Content-Type: application/json"


@contextmanager
def many(listener: Listener, sent: bytes, count: int = COUNT) -> Iterator[list[socket.socket]]:
    """Keep connections open that have sent this and wait. Those that the listener closes are opened
    again.
    """
    ending = threading.Event()
    peers: list[socket.socket] = []
    opened: list[float] = []  # time of the last opening; a listener may close each one at once

    def open_again() -> None:
        while not ending.wait(0.002):
            for peer in [one for one in list(peers) if is_ended(one)]:
                peers.remove(peer)
                peer.close()
            with suppress(OSError):
                if len(peers) < count:
                    peers.append(listener.connect())
                    opened.append(time.monotonic())
                    peers[-1].sendall(sent)

    thread = threading.Thread(target=open_again)
    with ExitStack() as stack:
        thread.start()
        try:
            while len(opened) < min(count, PLACES_MAX):
                time.sleep(0.01)
            yield peers
        finally:
            ending.set()
            thread.join()
            for peer in peers:
                stack.enter_context(peer)


def is_ended(peer: socket.socket) -> bool:
    """Return whether the listener has ended a connection, whatever it has sent before."""
    look = select.poll()
    look.register(peer, select.POLLRDHUP)
    return bool(look.poll(0))


def answers_meanwhile(listener: Listener) -> None:
    """A client sends a few requests. A connection that is closed without an answer is retried once,
    as clients do.
    """
    for _ in range(5):
        status = 0
        for _ in range(3):
            with suppress(ConnectionError, EOFError):
                status = listener.request("GET", listener.health)[0]
                break
        assert status == 200


def half_body(listener: Listener) -> bytes:
    kind = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000"
    path = "/workers" if listener.name == "operators" else "/quota"
    path = "/v1/completions" if listener.name == "clients" else path
    return f'POST {path} HTTP/1.1\r\n{kind}\r\n\r\n{{"a":'.encode()


SLOW: dict[str, Callable[[Listener], bytes]] = {
    "silent": lambda _: b"",
    "half a head": lambda _: b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
    "half a body": half_body,
}


@pytest.mark.parametrize("how", SLOW)
def test_stalled_clients_do_not_block_others(listener: Listener, how: str) -> None:
    with many(listener, SLOW[how](listener)):
        answers_meanwhile(listener)


def test_slow_clients_do_not_block_others(listener: Listener) -> None:
    ending = threading.Event()

    def drip(peers: list[socket.socket]) -> None:
        while not ending.wait(0.2):
            for peer in list(peers):
                with suppress(OSError):
                    peer.send(b"X")

    with many(listener, b"GET / HTTP/1.1\r\nX-A: ", 60) as peers:
        thread = threading.Thread(target=drip, args=(peers,))
        thread.start()
        try:
            answers_meanwhile(listener)
        finally:
            ending.set()
            thread.join()


@pytest.mark.long
def test_clients_that_do_not_read_do_not_block_others(served: Site, listener: Listener) -> None:
    served.engine.chunks = 1 << 20
    head = f"GET {listener.large} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with many(listener, head * 200):
        answers_meanwhile(listener)


def test_incomplete_bodies_do_not_block_requests(served: Site) -> None:
    """The process has few descriptors, and --body-wait gives these clients 120 s to continue."""
    clients = served.http["clients"]
    with many(clients, half_body(clients)):
        for _ in range(5):
            status, _, _ = clients.request(
                *("POST", "/v1/completions", b'{"model": "m", "prompt": "a"}'),
                Content_Type="application/json",
            )
            assert status == 200
