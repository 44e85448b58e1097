# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The endpoints of events, and routers that are silent, slow, send too much or have no token."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.blocks import eventually

from beluga.errors import RouterError
from beluga.events import EventSettings, service
from beluga.events.service import EventSockets, Messages, Replays
from beluga.listening import Token

zmq = pytest.importorskip("zmq")
SECRET = "-".join(["of", "all", "the", "routers"])


class Site:
    """Both endpoints, and routers that request one replay each, with their numbers."""

    def __init__(self, folder: Path, token: Token | None = None) -> None:
        self.live, self.replay = f"ipc://{folder}/live", f"ipc://{folder}/again"
        self.sockets = EventSockets(EventSettings(self.live, self.replay, token=token))
        self.replays = Replays(self.sockets)
        self.context = zmq.Context()
        self.begun: list[int] = []
        self.routers: list[Any] = []

    def connected(self, kind: int, endpoint: str, **options: Any) -> Any:
        made = self.context.socket(kind)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.connect(endpoint)
        return made

    def request_replays(self, count: int) -> None:
        for _ in range(count):
            router = self.connected(zmq.DEALER, self.replay, RCVHWM=1)
            router.send_multipart([b"", len(self.routers).to_bytes(8, "big")])
            self.routers.append(router)

    def serve(self) -> None:
        self.replays.serve(0.01, self._find)

    def _find(self, first: int) -> Messages:
        self.begun.append(first)
        return [(number, bytes(10_000)) for number in range(1000)]

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.sockets.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def test_a_router_gets_all_messages_of_its_replay(site: Site) -> None:
    router = site.connected(zmq.DEALER, site.replay)
    for request in ([b"", bytes(7)], [bytes(8)], [b"", bytes(8), b""], [b"", bytes(8)]):
        router.send_multipart(request)
    numbers = []
    while len(numbers) < 1001:
        site.serve()
        while router.poll(0):
            numbers.append(int.from_bytes(router.recv_multipart()[1], "big"))
    assert numbers == [*range(1000), (1 << 64) - 1]
    assert site.begun == [0]  # the invalid requests are dropped


def test_routers_that_do_not_read_lose_their_replays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STALLED_S", 0.01)
    for number in range(service.REPLAYS_MAX + 1):
        site.request_replays(1)
        assert eventually(lambda: site.serve() or len(site.begun) == len(site.routers)), number
    assert site.replays.dropped > 0
    assert site.routers[-1].recv_multipart()[2] == bytes(10_000)


def test_the_queue_of_replays_is_bounded_and_refusals_are_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.request_replays(service.REPLAYS_MAX)
    assert eventually(lambda: site.serve() or len(site.begun) == service.REPLAYS_MAX)
    monkeypatch.setattr(service, "REQUESTS_MAX", 2)
    site.request_replays(5)
    assert eventually(lambda: site.serve() or site.replays.dropped == 3)
    assert len(site.begun) == service.REPLAYS_MAX


def test_a_disconnected_router_leaves_the_replays(site: Site) -> None:
    site.request_replays(service.REPLAYS_MAX)
    assert eventually(lambda: site.serve() or len(site.begun) == service.REPLAYS_MAX)
    site.request_replays(1)
    for router in site.routers[:-1]:
        router.close(linger=0)
    assert eventually(lambda: site.serve() or len(site.begun) == len(site.routers))
    assert site.replays.dropped == 0


def test_queued_messages_of_routers_that_do_not_read_are_bounded(site: Site) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    site.request_replays(50)
    for _ in range(300):
        site.replays.serve(0.001, lambda _: [(number, bytes(10_000)) for number in range(10_000)])
    assert len(site.replays._running) == service.REPLAYS_MAX
    assert all(len(replay.messages) > 8000 for replay in site.replays._running.values())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB


def test_a_subscriber_that_does_not_read_has_a_bounded_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PENDING_MAX", 10)
    site = Site(tmp_path)
    stuck = site.connected(zmq.SUB, site.live, SUBSCRIBE=b"", RCVHWM=1)
    reader = site.connected(zmq.SUB, site.live, SUBSCRIBE=b"", RCVHWM=0)
    try:
        for peer in (stuck, reader):
            assert eventually(lambda peer=peer: site.sockets.publish([b"t"]) or peer.poll(10))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(200):
            site.sockets.publish([b"t", bytes(1 << 20)])
            assert reader.poll(30_000)
            while reader.poll(0):
                reader.recv_multipart()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    finally:
        site.close()


def test_a_silent_handshake_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HANDSHAKE_MS", 50)
    site = Site(tmp_path)
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.settimeout(30)
            silent.connect(site.replay.removeprefix("ipc://"))
            while silent.recv(4096):
                pass
    finally:
        site.close()


@pytest.mark.parametrize("password", [SECRET, SECRET[:-1], None])
def test_routers_need_the_token(tmp_path: Path, password: str | None) -> None:
    site = Site(tmp_path, Token(SECRET))
    plain = {} if password is None else {
        "PLAIN_USERNAME": b"beluga", "PLAIN_PASSWORD": password.encode()
    }  # fmt: skip
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            site.serve()
            site.sockets.publish([b"t"])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        reader = site.connected(zmq.SUB, site.live, SUBSCRIBE=b"", **plain)
        router = site.connected(zmq.DEALER, site.replay, **plain)
        router.send_multipart([b"", bytes(8)])
        wait_ms = 30_000 if password == SECRET else 300
        assert [bool(peer.poll(wait_ms)) for peer in (reader, router)] == [password == SECRET] * 2
    finally:
        ending.set()
        thread.join()
        site.close()
    assert SECRET not in repr(EventSettings(site.live, site.replay, token=Token(SECRET)))


def test_a_path_that_another_process_serves_is_refused(site: Site) -> None:
    with pytest.raises(RouterError, match="another process does; give another endpoint"):
        EventSockets(EventSettings(site.live, site.replay))


def test_the_file_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "live"))
    Site(tmp_path).close()
    Site(tmp_path).close()


@pytest.mark.parametrize(
    ("endpoint", "token", "warned"),
    [
        *[("tcp://127.0.0.1:0", False, 0), ("tcp://[::1]:0", False, 0), ("ipc://@a", False, 0)],
        *[("tcp://*:0", False, 2), ("tcp://0.0.0.0:0", False, 2), ("tcp://*:0", True, 0)],
    ],
)
def test_events_that_other_machines_read_without_a_token_are_logged(
    endpoint: str, token: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EventSettings(endpoint, endpoint + "0", token=Token(SECRET) if token else None)
    service._warn_of_others(settings)
    assert caplog.text.count("give --events-token FILE") == warned
