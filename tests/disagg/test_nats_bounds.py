# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The settings of a queue in NATS, and what the server refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="nats-py is not installed")

import nats
from nats_server import NatsServer, need_nats_server

from beluga.disagg import PrefillTask
from beluga.disagg.nats_queue import CONSUMER, NatsQueue
from beluga.errors import QueueError, QueueFullError


@pytest.fixture
def server(shm: Path) -> Iterator[NatsServer]:
    need_nats_server()
    made = NatsServer(shm)
    yield made
    made.end()


def task(name: str) -> PrefillTask:
    return PrefillTask(request_id=name, model="m", tokens=[1])


def test_the_last_opener_sets_the_bounds(server: NatsServer) -> None:
    async def play() -> None:
        small = await NatsQueue.open(server.url, "q", tasks_max=1, visibility_s=7)
        await small.enqueue_task(task("a"))
        with pytest.raises(QueueFullError):
            await small.enqueue_task(task("b"))
        large = await NatsQueue.open(server.url, "q", tasks_max=2, visibility_s=9)
        await small.enqueue_task(task("b"))
        with pytest.raises(QueueFullError):
            await large.enqueue_task(task("c"))
        info = await large._jetstream.consumer_info("q", CONSUMER)
        assert info.config.ack_wait == 9
        for queue in (small, large):
            await queue.close()

    asyncio.run(play())


def test_subjects_of_another_stream_are_rejected(server: NatsServer) -> None:
    async def play() -> None:
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name="another", subjects=["q.>"])
        with pytest.raises(QueueError, match=r"refused: .*overlap"):
            await NatsQueue.open(server.url, "q")
        await client.close()

    asyncio.run(play())
