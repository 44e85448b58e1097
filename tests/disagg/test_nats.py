# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Queues in a real nats-server: their settings, and its faults, which have distinct errors;
recoverable ones are recovered.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="nats-py is not installed")

import nats
from nats_server import NatsServer

from beluga.disagg import PrefillTask
from beluga.disagg.nats_queue import CONSUMER, NatsQueue
from beluga.errors import QueueError, QueueFullError


@pytest.fixture
def server(shm: Path) -> Iterator[NatsServer]:
    made = NatsServer(shm)
    yield made
    made.end()


def task(name: str) -> PrefillTask:
    return PrefillTask(request_id=name, model="m", tokens=[1])


async def test_the_last_opener_sets_the_bounds(server: NatsServer) -> None:
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


async def test_subjects_of_another_stream_are_rejected(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(name="another", subjects=["q.>"])
    with pytest.raises(QueueError, match=r"refused: .*overlap"):
        await NatsQueue.open(server.url, "q")
    await client.close()


TASK = PrefillTask(request_id="r", model="m", text="a")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_server_without_jetstream_raises_a_specific_error(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, jetstream=False)
    try:
        with pytest.raises(QueueError, match="has no JetStream; start nats-server with -js"):
            asyncio.run(NatsQueue.open(server.url, "prefill"))
    finally:
        server.end()


@pytest.mark.slow
def test_an_unreachable_server_raises_a_specific_error() -> None:
    with pytest.raises(QueueError, match="does not answer"):
        asyncio.run(NatsQueue.open("nats://127.0.0.1:9", "prefill", timeout_s=2))


async def _lose_stream(queue: NatsQueue) -> None:
    await queue._jetstream.delete_stream(queue._stream)


async def _lose_consumer(queue: NatsQueue) -> None:
    await queue._jetstream.delete_consumer(queue._stream, CONSUMER)


@pytest.mark.slow
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
