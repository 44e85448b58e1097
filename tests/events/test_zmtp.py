# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Our side of ZMTP with libzmq on the other side, and with peers that do not follow it."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.blocks import eventually
from support.zmtp_peers import GREETING, connected, handshaken, is_cut, ready

from beluga.events import zmtp
from beluga.events.zmtp import ZmtpPeer, ZmtpSockets

zmq = pytest.importorskip("zmq")


class Running:
    """Both endpoints, with a ROUTER that answers each request with itself."""

    def __init__(self, live: str, again: str) -> None:
        self.live, self.again = live, again
        self.sockets = ZmtpSockets()
        self.sockets.bind(live, b"PUB")
        self.sockets.bind(again, b"ROUTER", self._answer)
        self.requested: list[list[bytes]] = []
        self._over = threading.Event()
        self.to_publish: list[list[bytes]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _answer(self, peer: ZmtpPeer, message: list[bytes]) -> None:
        self.requested.append(message)
        peer.send(message)

    def _run(self) -> None:
        while not self._over.is_set():
            self.sockets.poll(0.005)
            while self.to_publish:
                self.sockets.publish(self.to_publish.pop(0))

    def count(self, number: int) -> int:
        return len(self.sockets._endpoints[number].slots)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.sockets.close()


@pytest.fixture(params=["tcp", "ipc"])
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    names = [f"ipc://{tmp_path}/{name}" for name in ("live", "again")]
    if request.param == "tcp":
        with socket.socket() as one, socket.socket() as two:
            for each in (one, two):
                each.bind(("127.0.0.1", 0))
            names = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, two)]
    made = Running(*names)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["REQ", "DEALER", "ROUTER"])
def test_a_libzmq_dealer_gets_a_reply(running: Running, kind: str) -> None:
    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as one:
        one.setsockopt(zmq.IDENTITY, b"name")
        if kind == "ROUTER":
            one.setsockopt(zmq.PROBE_ROUTER, 1)
        one.connect(running.again)
        for size in (8, 255, 256, 1024):
            body = bytes(size)
            if kind == "ROUTER":
                continue
            one.send_multipart([body] if kind == "REQ" else [b"", body])
            assert one.poll(30_000)
            assert one.recv_multipart()[-1] == body


@pytest.mark.parametrize("kind", ["SUB", "XSUB"])
def test_a_libzmq_subscriber_gets_its_topics(running: Running, kind: str) -> None:
    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as one:
        one.setsockopt(zmq.HEARTBEAT_IVL, 20)
        one.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        one.connect(running.live)
        if kind == "SUB":
            one.setsockopt(zmq.SUBSCRIBE, b"want")
        else:
            one.send(b"\1want")
        large = b"b" * 3_000_000
        assert eventually(lambda: running.to_publish.append([b"wanted", b"n"]) or one.poll(50), 30)
        running.to_publish += [[b"other", b"n"], [b"want", b"n", large]]
        seen = one.recv_multipart()
        while seen != [b"want", b"n", large]:
            assert seen == [b"wanted", b"n"]
            assert one.poll(30_000)
            seen = one.recv_multipart()
        if kind == "SUB":
            one.setsockopt(zmq.UNSUBSCRIBE, b"want")
        else:
            one.send(b"\0want")
        slot = next(iter(running.sockets._endpoints[0].slots))
        assert eventually(lambda: not slot.connection.topics, 30)


def test_pings_are_answered(running: Running) -> None:
    with handshaken(running.live, b"SUB") as peer:
        for context in (b"", b"0123456789abcdef"):
            body = b"\4PING\0\x0a" + context
            peer.sendall(b"\4" + bytes([len(body)]) + body)
            pong = b"\4PONG" + context
            assert peer.recv(100) == b"\4" + bytes([len(pong)]) + pong


ATTACKS = {
    "endless parts of a message": b"\1\x08" + bytes(8),
    "empty parts": b"\1\0",
    "a long frame": b"\2" + struct.pack(">Q", 1 << 40),
    "subscriptions": b"\0\x09\1" + bytes(8),
    "unknown flags": b"\x80\0",
    "a second greeting": GREETING,
}


@pytest.mark.parametrize("endless", list(ATTACKS))
@pytest.mark.parametrize("number", [0, 1])
def test_a_peer_that_exceeds_a_bound_is_cut_off(
    running: Running, endless: str, number: int
) -> None:
    if endless == "subscriptions" and number == 1:
        pytest.skip("a ROUTER has none")
    kind, endpoint = ((b"SUB", running.live), (b"DEALER", running.again))[number]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with handshaken(endpoint, kind) as peer:
        assert is_cut(peer, ATTACKS[endless], 64 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB
    assert eventually(lambda: running.count(number) == 0, 30)


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(8) + b"\x7f\1",
        GREETING[:12] + b"PLAIN".ljust(20, b"\0") + GREETING[32:],
        GREETING + ready(b"PUSH"),
        GREETING + b"\0\1a",
        GREETING + b"\4\0",
        GREETING + b"\4\x08\5READY\xff\xff",
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_peer_with_another_handshake_is_cut_off(
    running: Running, start: bytes, number: int
) -> None:
    with connected((running.live, running.again)[number]) as peer:
        peer.sendall(start)
        while peer.recv(4096):
            pass


def test_a_handshake_in_single_bytes_is_complete(running: Running) -> None:
    with connected(running.again) as peer:
        for byte in GREETING + ready(b"DEALER") + b"\1\0\0\1x":
            peer.sendall(bytes([byte]))
        head = b""
        while not head.endswith(b"\1\0\0\1x"):
            head += peer.recv(4096)


def test_silent_connections_do_not_block_routers(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp, "CONNECTIONS_MAX", 8)
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(connected(running.again))
        with handshaken(running.again, b"DEALER") as peer:
            peer.sendall(b"\1\0\0\1x")
            assert peer.recv(100) == b"\1\0\0\1x"
        assert running.count(1) <= 8


def test_idle_routers_do_not_block_others(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp, "CONNECTIONS_MAX", 8)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(handshaken(running.live, b"SUB"))
        with handshaken(running.live, b"SUB") as peer:
            peer.sendall(b"\0\1\1")
            slots = running.sockets._endpoints[0].slots
            assert eventually(lambda: any(slot.connection.topics for slot in slots), 30)
            running.to_publish.append([b"t"])
            assert peer.recv(3) == b"\0\1t"
            assert running.count(0) == 8


def test_a_silent_handshake_ends(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = running.sockets._endpoints[1].slots
    monkeypatch.setattr(slots, "_patience_s", 0.05)
    with connected(running.again) as peer, handshaken(running.again, b"DEALER") as idle:
        while peer.recv(4096):
            pass
        idle.sendall(b"\1\0\0\1x")
        assert idle.recv(100) == b"\1\0\0\1x"


def test_a_subscriber_that_does_not_read_holds_few_messages_and_is_closed(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp, "PENDING_MAX", 10)
    with handshaken(running.live, b"SUB") as peer, handshaken(running.live, b"SUB") as reader:
        for one in (peer, reader):
            one.sendall(b"\0\1\1")
        slots = running.sockets._endpoints[0].slots
        assert eventually(lambda: all(slot.connection.topics for slot in slots), 30)
        stuck = next(iter(slots)).connection

        def read() -> None:
            with contextlib.suppress(OSError):
                while reader.recv(1 << 20):
                    pass

        thread = threading.Thread(target=read)
        thread.start()
        running.to_publish += [[b"t", bytes(1 << 20)] for _ in range(100)]
        assert eventually(lambda: not running.to_publish, 30)
        assert 0 < stuck.pending <= 2 * 10 + 2
        monkeypatch.setattr(slots, "_patience_s", 0.05)
        assert eventually(lambda: stuck.closed, 30)
        reader.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_flood_is_read_in_turns(running: Running) -> None:
    """Many peers send as fast as they can, and another one gets its answer."""
    over = threading.Event()

    def flood() -> None:
        with contextlib.suppress(OSError), handshaken(running.again, b"DEALER") as peer:
            while not over.is_set():
                peer.sendall(b"\1\0\0\x08" * 100)
                peer.setblocking(True)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        with handshaken(running.again, b"REQ") as peer:
            for _ in range(5):
                peer.sendall(b"\1\0\0\1x")
                assert peer.recv(100) == b"\1\0\0\1x"
    finally:
        over.set()
        running.close()
        for thread in threads:
            thread.join()


def test_an_address_in_use_is_an_error(running: Running) -> None:
    other = ZmtpSockets()
    with pytest.raises(OSError, match="in use") as raised:
        other.bind(running.live, b"PUB")
    assert raised.value.filename == running.live
    other.close()


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:0", "tcp://[::1]:*", "tcp://lo:!", "tcp://localhost:0"]
)
def test_endpoints_are_parsed(endpoint: str) -> None:
    if "::" in endpoint and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    sockets = ZmtpSockets()
    try:
        sockets.bind(endpoint, b"PUB")
        assert sockets._endpoints[0].socket.getsockname()[1] > 0
    finally:
        sockets.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:x", "tcp://127.0.0.1:99999", "ipc:///no/a"])
def test_an_endpoint_that_cannot_be_bound_is_an_error(endpoint: str) -> None:
    sockets = ZmtpSockets()
    with pytest.raises(OSError) as raised:
        sockets.bind(endpoint, b"PUB")
    assert raised.value.filename == endpoint
    sockets.close()


def test_the_file_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "live"))
    sockets = ZmtpSockets()
    sockets.bind(f"ipc://{tmp_path}/live", b"PUB")
    sockets.close()
    assert not (tmp_path / "live").exists()
