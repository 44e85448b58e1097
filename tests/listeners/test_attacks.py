# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Bodies, headers, floods and slow clients cost each listener bounded memory, and others still get
responses in time. Each attack runs while a harmless client sends requests.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from attacked import Listener, Site, status_of

MIB = 1 << 20


@contextmanager
def sending(listener: Listener, count: int, head: bytes, size: int) -> Iterator[list[bytes]]:
    """Send that many requests, each with ``size`` bytes behind its head, as far as they are taken.
    Yields their answers so far.
    """
    answers: list[bytes] = []
    with ExitStack() as stack:
        peers = [stack.enter_context(listener.connect()) for _ in range(count)]

        def send(peer: socket.socket) -> None:
            with suppress(OSError):
                peer.sendall(head)
                for _ in range(size // MIB):
                    peer.sendall(b"a" * MIB)
            with suppress(OSError):
                answers.append(peer.recv(4096))

        threads = [threading.Thread(target=send, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 / count + 2)  # those without a response so far continue
        yield answers
        for peer in peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def test_the_sum_of_bodies_is_bounded(listener: Listener) -> None:
    """None of them is whole."""
    before = listener.rss()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {60 * MIB}\r\n\r\n"
    )
    with sending(listener, 12, head.encode(), 59 * MIB) as answers:
        assert listener.request("GET", listener.health)[0] == 200
        assert listener.rss() - before < 400 * MIB
        statuses = {status_of(answer) for answer in answers} - {0}
    assert statuses <= {403, 404, 413, 503}
    if listener.name == "clients":
        assert 503 in statuses


def test_a_body_that_is_too_large_is_refused(listener: Listener) -> None:
    path = {"operators": "/workers", "clients": "/v1/completions"}.get(listener.name, "/quota")
    refused = 403 if listener.name == "admin port" else 413
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 99999999999\r\n\r\n"
    )
    sent = head.encode() + b"a" * MIB * (listener.name == "operators")
    assert status_of(listener.raw(sent)) in (
        refused,
        0 if listener.name == "operators" else refused,
    )


def test_heads_are_bounded(listener: Listener) -> None:
    before = listener.rss()
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"b" * 60_000 + b"\r\n"
    with sending(
        listener, 20, head + b"".join(b"X-%d: %s\r\n" % (n, b"c" * 60_000) for n in range(200)), 0
    ) as answers:
        assert listener.request("GET", listener.health)[0] == 200
        assert listener.rss() - before < 100 * MIB
        assert {status_of(answer) for answer in answers} <= {0, 400, 431}


def test_health_is_answered_during_a_flood_of_requests(listener: Listener) -> None:
    ending = threading.Event()

    def request() -> None:
        while not ending.is_set():
            with suppress(OSError, EOFError):
                listener.request(
                    "GET", listener.large if listener.name != "clients" else "/metrics"
                )

    threads = [threading.Thread(target=request) for _ in range(8)]
    before = listener.rss()
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert listener.request("GET", listener.health)[0] == 200
        assert listener.rss() - before < 100 * MIB
    finally:
        ending.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("routers", [1, 50])
def test_a_flood_of_replays_delays_no_event(served: Site, routers: int) -> None:
    """6,000 requests of 8 bytes each, whose answers are not read."""
    import zmq

    server = served.http["admin port"]
    before = server.rss()
    context = zmq.Context()
    try:
        live = context.socket(zmq.SUB)
        live.setsockopt(zmq.SUBSCRIBE, b"")
        live.connect(served.events)
        assert live.poll(30_000)
        flood = []
        for _ in range(routers):
            router = context.socket(zmq.DEALER)
            router.setsockopt(zmq.RCVHWM, 1)
            router.connect(served.replay)
            flood.append(router)
        for number in range(6000):
            flood[number % routers].send_multipart([b"", bytes(8)])
        while live.poll(0):
            live.recv_multipart()
        for _ in range(3):
            assert live.poll(5_000)  # one arrives each second
            live.recv_multipart()
        requested = context.socket(zmq.DEALER)
        requested.connect(served.replay)
        requested.send_multipart([b"", bytes(8)])
        assert requested.poll(30_000)
        assert server.rss() - before < 100 * MIB
    finally:
        context.destroy(linger=0)


def test_a_router_that_sends_too_much_is_disconnected(served: Site) -> None:
    import zmq

    context = zmq.Context()
    try:
        router = context.socket(zmq.DEALER)
        ended = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        router.connect(served.replay)
        router.send_multipart([b"", bytes(MIB)])
        assert ended.poll(30_000)
        requested = context.socket(zmq.DEALER)
        requested.connect(served.replay)
        requested.send_multipart([b"", bytes(8)])
        assert requested.poll(30_000)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("method", "length", "status"),
    [
        ("POST", "65536", 400),  # the body is read, but is not JSON
        ("POST", "65537", 413),
        ("POST", "9" * 5000, 400),  # more digits than Python's limit for conversions
        ("GET", "0", 200),
        ("GET", "1", 413),
    ],
)
def test_a_body_of_the_server_has_64_kib_at_most(
    served: Site, method: str, length: str, status: int
) -> None:
    path = "/quota" if method == "POST" else "/healthz"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    body = b"a" * (1 << 16) if length == "65536" else b""
    assert status_of(served.http["local socket"].raw(head.encode() + body)) == status


COUNT = 150
CONNECTIONS_MAX = 70  # limit of a listener's connections
JSON = "Content-Type: application/json"


@contextmanager
def crowd(listener: Listener, sent: bytes, count: int = COUNT) -> Iterator[list[socket.socket]]:
    """Keep connections open that have sent this and wait. Those that the listener closes are opened
    again.
    """
    ending = threading.Event()
    peers: list[socket.socket] = []
    opened: list[float] = []  # time of the last opening; a listener may close each one at once

    def open_again() -> None:
        while not ending.wait(0.002):
            for peer in [each for each in list(peers) if is_ended(each)]:
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
            while len(opened) < min(count, CONNECTIONS_MAX):
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
    with crowd(listener, SLOW[how](listener)):
        answers_meanwhile(listener)


def test_slow_clients_do_not_block_others(listener: Listener) -> None:
    ending = threading.Event()

    def drip(peers: list[socket.socket]) -> None:
        while not ending.wait(0.2):
            for peer in list(peers):
                with suppress(OSError):
                    peer.send(b"X")

    with crowd(listener, b"GET / HTTP/1.1\r\nX-A: ", 60) as peers:
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
    with crowd(listener, head * 200):
        answers_meanwhile(listener)


def test_incomplete_bodies_do_not_block_requests(served: Site) -> None:
    """The process has few descriptors, and --body-wait gives these clients 120 s to continue."""
    clients = served.http["clients"]
    with crowd(clients, half_body(clients)):
        for _ in range(5):
            status, _, _ = clients.request(
                *("POST", "/v1/completions", b'{"model": "m", "prompt": "a"}'),
                Content_Type="application/json",
            )
            assert status == 200
