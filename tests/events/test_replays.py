# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays for routers that do not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.blocks import eventually

from beluga.events import replays

zmq = pytest.importorskip("zmq")


class Site:
    """The replays of one endpoint, and routers that request one each, with their numbers."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.replays = replays.Replays(context, "inproc://replays")
        self.begun: list[int] = []
        self.routers: list[Any] = []

    def ask(self, count: int) -> None:
        for _ in range(count):
            router = self._context.socket(zmq.DEALER)
            router.setsockopt(zmq.RCVHWM, 1)
            router.connect("inproc://replays")
            router.send_multipart([b"", len(self.routers).to_bytes(8, "big")])
            self.routers.append(router)

    def serve(self) -> None:
        self.replays.serve(0.01, self._find)

    def _find(self, first: int) -> replays.Messages:
        self.begun.append(first)
        return [(number, b"batch") for number in range(3 * replays.SENT_MAX)]


@pytest.fixture
def site() -> Iterator[Site]:
    context = zmq.Context()
    yield Site(context)
    context.destroy(linger=0)


def test_routers_that_do_not_read_lose_their_replays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "STALLED_S", 0.01)
    for number in range(replays.RUNNING_MAX + 1):
        site.ask(1)
        assert eventually(lambda: site.serve() or len(site.begun) == len(site.routers)), number
    assert site.replays.dropped > 0
    assert site.routers[-1].recv_multipart()[2] == b"batch"


def test_few_routers_wait_in_line_and_further_ones_are_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.ask(replays.RUNNING_MAX)
    assert eventually(lambda: site.serve() or len(site.begun) == replays.RUNNING_MAX)
    monkeypatch.setattr(replays, "WAITING_MAX", 2)
    site.ask(5)
    assert eventually(lambda: site.serve() or site.replays.dropped == 3)
    assert len(site.begun) == replays.RUNNING_MAX
