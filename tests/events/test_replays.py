# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays for routers that do not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.blocks import eventually

from beluga.events import replays
from beluga.events.zmtp import ZmtpSockets

zmq = pytest.importorskip("zmq")


class Site:
    """The replays of one endpoint, and routers that request one each, with their numbers."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self._context, self._endpoint = context, endpoint
        self.sockets = ZmtpSockets()
        self.replays = replays.Replays(self.sockets, endpoint)
        self.begun: list[int] = []
        self.routers: list[Any] = []

    def request_replays(self, count: int) -> None:
        for _ in range(count):
            router = self._context.socket(zmq.DEALER)
            router.setsockopt(zmq.RCVHWM, 1)
            router.connect(self._endpoint)
            router.send_multipart([b"", len(self.routers).to_bytes(8, "big")])
            self.routers.append(router)

    def serve(self) -> None:
        self.replays.serve(0.01, self._find)

    def _find(self, first: int) -> replays.Messages:
        self.begun.append(first)
        return [(number, bytes(10_000)) for number in range(1000)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    context = zmq.Context()
    site = Site(context, f"ipc://{tmp_path}/replays")
    yield site
    context.destroy(linger=0)
    site.sockets.close()


def test_routers_that_do_not_read_lose_their_replays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "STALLED_S", 0.01)
    for number in range(replays.RUNNING_MAX + 1):
        site.request_replays(1)
        assert eventually(lambda: site.serve() or len(site.begun) == len(site.routers)), number
    assert site.replays.dropped > 0
    assert site.routers[-1].recv_multipart()[2] == bytes(10_000)


def test_the_queue_of_replays_is_bounded_and_rejections_are_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.request_replays(replays.RUNNING_MAX)
    assert eventually(lambda: site.serve() or len(site.begun) == replays.RUNNING_MAX)
    monkeypatch.setattr(replays, "WAITING_MAX", 2)
    site.request_replays(5)
    assert eventually(lambda: site.serve() or site.replays.dropped == 3)
    assert len(site.begun) == replays.RUNNING_MAX


def test_a_disconnected_router_leaves_the_replay_queue(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.request_replays(replays.RUNNING_MAX)
    assert eventually(lambda: site.serve() or len(site.begun) == replays.RUNNING_MAX)
    monkeypatch.setattr(replays, "WAITING_MAX", 2)
    site.request_replays(2)
    assert eventually(lambda: site.serve() or len(site.replays._waiting) == 2)
    for router in site.routers[-2:]:
        router.close(linger=0)
    assert eventually(
        lambda: site.serve() or all(router.closed for router in site.replays._waiting)
    )
    site.request_replays(1)
    assert eventually(lambda: site.serve() or len(site.replays._waiting) == 1)
    assert site.replays.dropped == 0
