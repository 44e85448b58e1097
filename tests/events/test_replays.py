# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays for routers that do not read."""

from __future__ import annotations

import pytest
from blocks import eventually

from beluga.events import replays

zmq = pytest.importorskip("zmq")


def test_routers_that_do_not_read_lose_their_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "STALLED_S", 0.01)
    begun: list[int] = []

    def find(first: int) -> replays.Messages:
        begun.append(first)
        return [(number, b"batch") for number in range(3 * replays.SENT_MAX)]

    context = zmq.Context()
    try:
        served = replays.Replays(context, "inproc://replays")
        routers = []
        for number in range(replays.RUNNING_MAX + 1):
            routers.append(context.socket(zmq.DEALER))
            routers[-1].setsockopt(zmq.RCVHWM, 1)
            routers[-1].connect("inproc://replays")
            routers[-1].send_multipart([b"", number.to_bytes(8, "big")])
            assert eventually(lambda: served.serve(0.01, find) or begun == [*range(len(routers))])
        assert served.dropped > 0
        assert routers[-1].recv_multipart()[2] == b"batch"
    finally:
        context.destroy(linger=0)
