# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Faults of a real nats-server have distinct errors: a refused user, no JetStream, a lost stream;
and recoverable ones are recovered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from nats_server import NatsServer, need_nats_server

from beluga.disagg import PrefillTask
from beluga.disagg.nats_queue import CONSUMER, NatsQueue
from beluga.errors import QueueError

pytestmark = pytest.mark.slow

TASK = PrefillTask(request_id="r", model="m", text="a")


@pytest.fixture(autouse=True)
def installed() -> None:
    need_nats_server()


def test_a_rejected_user_is_not_reported_as_an_unreachable_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, "--user=beluga", "--pass=secret")
    try:
        for who in ("", "beluga:wrong@", "token@"):
            url = f"nats://{who}127.0.0.1:{server.port}"
            with pytest.raises(QueueError, match="refuses this user") as refused:
                asyncio.run(NatsQueue.open(url, "prefill"))
            assert "wrong" not in str(refused.value)

        async def opens() -> None:
            url = f"nats://beluga:secret@127.0.0.1:{server.port}"
            await (await NatsQueue.open(url, "prefill")).close()

        asyncio.run(opens())
    finally:
        server.end()


def test_a_server_without_jetstream_raises_a_specific_error(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, jetstream=False)
    try:
        with pytest.raises(QueueError, match="has no JetStream; start nats-server with -js"):
            asyncio.run(NatsQueue.open(server.url, "prefill"))
    finally:
        server.end()


def test_an_unreachable_server_raises_a_specific_error() -> None:
    with pytest.raises(QueueError, match="does not answer"):
        asyncio.run(NatsQueue.open("nats://127.0.0.1:9", "prefill", timeout_s=2))


async def _lose_stream(queue: NatsQueue) -> None:
    await queue._jetstream.delete_stream(queue._stream)


async def _lose_consumer(queue: NatsQueue) -> None:
    await queue._jetstream.delete_consumer(queue._stream, CONSUMER)


@pytest.mark.parametrize("lose", [_lose_stream, _lose_consumer])
@pytest.mark.parametrize("first", ["enqueue", "dequeue", "size"])
def test_a_lost_queue_is_created_again(
    tmp_path: Path, lose: Callable[[NatsQueue], Awaitable[None]], first: str
) -> None:
    server = NatsServer(tmp_path)

    async def work() -> PrefillTask:
        sender = await NatsQueue.open(server.url, "prefill")
        worker = await NatsQueue.open(server.url, "prefill")
        assert await worker.dequeue_task(timeout=0.5) is None  # makes the subscription
        await lose(sender)
        if first == "dequeue":
            assert await worker.dequeue_task(timeout=0.5) is None
        elif first == "size":
            assert (await sender.get_queue_size()).waiting == 0
        ticket = await sender.enqueue_task(TASK)
        for _ in range(20):
            if claim := await worker.dequeue_task(timeout=1.0):
                break
        assert claim is not None
        assert await claim.ack()
        assert await ticket.done(20)
        await sender.close()
        await worker.close()
        return claim.task

    try:
        assert asyncio.run(work()).request_id == TASK.request_id
    finally:
        server.end()
