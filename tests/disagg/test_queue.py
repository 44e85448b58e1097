# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill tasks on the wire, and names of queues.

The properties of every prefill queue, on any server: order, claims, and no lost task.

The queues are interchangeable: their calls have the parameters and defaults of the interface.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import role

from beluga.disagg import PrefillTask, open_queue, pool_queue
from beluga.disagg.pool_queue import PoolQueue, _packed, _unpacked
from beluga.disagg.queue import (
    TASK_SIZE_MAX,
    Claim,
    TaskQueue,
    decode_task,
    encode_task,
    queue_name,
)
from beluga.errors import BadValueError, QueueError, QueueFullError
from beluga.index import IndexClient, Lookup
from beluga.pool import Pool

if TYPE_CHECKING:
    from conftest import Backend
    from numpy.typing import NDArray


pytest.importorskip("msgspec", reason="msgspec is not installed")


def test_an_encoded_task_decodes_to_the_same_task() -> None:
    task = PrefillTask(
        request_id="r",
        model="m",
        tokens=[1, 2, 128_000],
        sampling={"temperature": 0.5, "seed": 7, "stop": "\n"},
        block_keys=[b"\0" * 16],
        deadline=12.5,
    )
    assert decode_task(encode_task(task)) == task


def test_a_request_is_stored_unchanged() -> None:
    body = '{"messages": [{"role":"user","content":"caf\u00e9"}]}'.encode()
    task = PrefillTask(request_id="r", model="m", body=body, path="/v1/chat/completions")
    assert decode_task(encode_task(task)) == task


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x80", b"not a task", b"\xc1", b"\x93\x01\x02\x03"),
        encode_task(PrefillTask(request_id="r", model="m", text="t")).replace(
            b"\xa1t", b"\xa1\xff"
        ),
        *(b"\x81\xa1a" * 200_000, b"\xdd\xff\xff\xff\xff"),
    ],
    ids=[
        *("nothing", "an empty map", "text", "no MessagePack", "a list", "no UTF-8", "depth"),
        "a long list",
    ],
)
def test_invalid_bytes_are_rejected_as_a_task(data: bytes) -> None:
    with pytest.raises(QueueError, match="not a prefill task"):
        decode_task(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give"),
        ({"tokens": [1], "text": "a"}, "give"),
        ({"request_id": "", "tokens": [1]}, "give"),
        ({"text": "a", "path": "@elsewhere/"}, "path"),
        ({"text": "a" * TASK_SIZE_MAX}, "prefill that prompt locally"),
    ],
    ids=["no prompt", "two prompts", "no name", "path", "size"],
)
def test_a_wrong_or_too_large_task_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QueueError, match=message):
        encode_task(PrefillTask(**{"request_id": "r", "model": "m", **fields}))


def test_model_names_are_valid_queue_names() -> None:
    assert queue_name("Qwen/Qwen3-0.6B") == "Qwen_Qwen3-0_6B"
    assert queue_name("a\\b c>*") == "a_b_c__"


@pytest.mark.parametrize(
    ("size", "block"),
    [(0, 4096), (4092, 4096), (4093, 8192), (8188, 8192), (8189, 16384), (TASK_SIZE_MAX, 1 << 20)],
)
def test_a_task_in_the_pool_is_rounded_up_to_a_power_of_two(size: int, block: int) -> None:
    """The pool has few classes of blocks, and the largest task has 1 MiB."""
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    packed = _packed(data)
    assert packed.size == block
    assert _unpacked(packed) == data


LONG_S = 60.0  # timeout of an event that must occur


def task(name: str, tokens: int = 3) -> PrefillTask:
    return PrefillTask(request_id=name, model="m", tokens=list(range(tokens)))


@asynccontextmanager
async def opened(backend: Backend, visibility_s: float = LONG_S) -> AsyncIterator[TaskQueue]:
    queue = await open_queue(backend.url, "org/model", visibility_s=visibility_s)
    try:
        yield queue
    finally:
        await queue.close()


async def claimed(queue: TaskQueue) -> Claim:
    claim = await queue.dequeue_task(timeout=LONG_S)
    assert claim is not None
    return claim


async def persistently(call: Callable[[], Coroutine[None, None, object]]) -> object:
    """Repeat a call until it succeeds, because a killed server comes back later."""
    for _ in range(600):
        try:
            if (answer := await call()) is not None:
                return answer
        except QueueError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("no answer for a minute")


async def test_tasks_are_served_in_order_of_arrival(backend: Backend) -> None:
    async with opened(backend) as sender, opened(backend) as worker:
        for name in "abc":
            await sender.enqueue_task(task(name))
        assert await sender.get_queue_size() == (3, 0)
        claims = [await claimed(worker) for _ in range(3)]
        assert [claim.task for claim in claims] == [task(name) for name in "abc"]
        assert [claim.deliveries for claim in claims] == [1, 1, 1]
        start = time.monotonic()
        assert await worker.dequeue_task(timeout=0.2) is None
        assert time.monotonic() - start >= 0.15
        assert await sender.get_queue_size() == (0, 3)
        for claim in claims:
            assert await claim.ack()
        assert await sender.get_queue_size() == (0, 0)


@pytest.mark.parametrize("tokens", [1, 700, 1000, 1500, 40_000])
async def test_a_task_of_any_length_is_decoded_whole(backend: Backend, tokens: int) -> None:
    async with opened(backend) as queue:
        await queue.enqueue_task(task("long", tokens))
        claim = await claimed(queue)
        assert claim.task.tokens == list(range(tokens))
        assert await claim.ack()


async def test_a_ticket_is_done_when_the_task_is(backend: Backend) -> None:
    async with opened(backend) as sender, opened(backend) as worker:
        first, second = [await sender.enqueue_task(task(name)) for name in "ab"]
        claim = await claimed(worker)
        waiting = asyncio.create_task(first.done(LONG_S))
        assert not await second.done(0.2)
        await claim.ack()
        assert await waiting


@pytest.mark.parametrize("backend", ["pool"], indirect=True)
async def test_one_poll_serves_all_waiting_senders(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number does not delay a claim, which needs the same thread."""
    looks: list[int] = []
    lookup = IndexClient.lookup

    def counted(self: IndexClient, keys: NDArray[np.uint64], *, pin: bool = False) -> Lookup:
        looks.append(len(keys))
        return lookup(self, keys, pin=pin)

    async with opened(backend) as queue:
        tickets = [await queue.enqueue_task(task(str(number))) for number in range(30)]
        claims = [await claimed(queue) for _ in tickets]
        monkeypatch.setattr(IndexClient, "lookup", counted)
        waiting = [asyncio.create_task(ticket.done(LONG_S)) for ticket in tickets]
        while looks[-2:] != [30, 30]:
            await asyncio.sleep(0)
        for number in (0, 7, 8, 29):
            await claims[number].ack()
        done = [waiting.pop(number) for number in (29, 8, 7, 0)]
        assert all(await asyncio.gather(*done))
        assert not any(receiver.done() for receiver in waiting)
        for receiver in waiting:
            receiver.cancel()


async def test_a_task_is_withdrawn_unless_a_worker_has_it(backend: Backend) -> None:
    async with opened(backend) as sender, opened(backend) as worker:
        tickets = [await sender.enqueue_task(task(name)) for name in "abc"]
        claim = await claimed(worker)
        assert claim.task == task("a")
        assert not await tickets[0].withdraw()
        assert await tickets[1].withdraw()
        assert (await claimed(worker)).task == task("c")
        assert await worker.dequeue_task(timeout=0.2) is None
        assert not await tickets[0].done(0.01)
        await claim.ack()
        assert await tickets[0].done(LONG_S)
        assert not await tickets[0].withdraw()


async def test_a_returned_task_is_delivered_to_another_worker(backend: Backend) -> None:
    async with opened(backend) as first, opened(backend) as second:
        await first.enqueue_task(task("a"))
        await (await claimed(first)).nack(0.0)
        again = await claimed(second)
        assert again.task == task("a")
        assert again.deliveries == 2
        await again.ack()


async def test_a_claim_runs_out_unless_it_is_extended(backend: Backend) -> None:
    visible_s = 2.0
    async with opened(backend, visible_s) as first, opened(backend, visible_s) as second:
        await first.enqueue_task(task("a"))
        extended = time.monotonic()
        claim = await claimed(first)
        again = None
        for _ in range(6):  # longer than the visibility in total, but not in one piece
            again = await second.dequeue_task(timeout=0.5)
            if again is not None:  # correct if this machine was too slow to extend it
                assert time.monotonic() - extended >= visible_s
                break
            extended = time.monotonic()
            await claim.extend()
        again = again or await claimed(second)
        assert again.deliveries == 2


def claim_and_hang(url: str) -> None:
    """Claim a task, and run until the test kills this process."""

    async def claim() -> None:
        queue = await open_queue(url, "org/model", visibility_s=2.0)
        assert await queue.dequeue_task(timeout=LONG_S)
        role.reply("ready")
        time.sleep(600)

    asyncio.run(claim())


async def test_a_task_of_a_killed_worker_is_done_by_another(backend: Backend) -> None:
    async with opened(backend, 2.0) as queue:
        ticket = await queue.enqueue_task(task("a"))
        victim = await asyncio.to_thread(role.Process, claim_and_hang, backend.url)
        victim.kill()
        claim = await claimed(queue)
        assert claim.task == task("a")
        assert claim.deliveries == 2
        await claim.ack()
        assert await ticket.done(LONG_S)
        assert (await queue.get_queue_size()).total == 0


async def test_a_killed_server_loses_no_task(backend: Backend) -> None:
    async with opened(backend, 2.0) as queue:
        for number in range(20):
            await queue.enqueue_task(task(str(number)))
        for _ in range(3):
            await (await claimed(queue)).ack()
        held = [await claimed(queue) for _ in range(4)]
        backend.kill()
        with pytest.raises(QueueError):
            await queue.enqueue_task(task("lost"))
        backend.start()
        # the claimed tasks are delivered again
        missing = {str(number) for number in range(3, 20)}
        while missing:  # more may come, because delivery is at least once
            claim = await persistently(lambda: queue.dequeue_task(timeout=1))
            assert isinstance(claim, type(held[0]))
            await claim.ack()
            missing.discard(claim.task.request_id)


async def test_a_task_returned_with_a_delay_is_hidden_until_then(backend: Backend) -> None:
    async with opened(backend) as queue:
        await queue.enqueue_task(task("one"))
        await (await claimed(queue)).nack(0.3)
        assert await queue.dequeue_task(timeout=0.01) is None
        again = await claimed(queue)
        assert again.deliveries == 2
        await again.ack()
        assert (await queue.get_queue_size()).total == 0


def test_a_waiting_task_is_dequeued_at_once(backend: Backend) -> None:
    """A worker soon gets the next task, and a sender soon gets the outcome of its task."""

    async def play() -> None:
        async with opened(backend) as sender, opened(backend) as worker:
            for number in range(12):
                claiming = asyncio.create_task(claimed(worker))
                await asyncio.sleep(0.005)  # the claim has found no task
                ticket = await sender.enqueue_task(task(str(number)))
                waiting = asyncio.create_task(ticket.done(LONG_S))
                claim = await claiming
                await asyncio.sleep(0.005)  # the task is not done yet
                await claim.ack()
                assert await waiting

    asyncio.run(asyncio.wait_for(play(), 10))  # a second per wait would be far too long


def test_a_closed_queue_leaves_no_asyncio_task(backend: Backend) -> None:
    faults: list[object] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: faults.append(what))
        async with opened(backend) as queue:
            ticket = await queue.enqueue_task(task("one"))
            waiting = asyncio.create_task(ticket.done(LONG_S))
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0.02)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())
    gc.collect()
    assert not faults  # no task failed silently


async def test_queues_with_different_names_are_separate(backend: Backend) -> None:
    async with opened(backend) as queue:
        other = await open_queue(backend.url, "other/model", visibility_s=LONG_S)
        try:
            await queue.enqueue_task(task("one"))
            assert await other.dequeue_task(timeout=0.05) is None
            assert (await other.get_queue_size()).total == 0
        finally:
            await other.close()


async def test_a_full_queue_raises_a_clear_error(backend: Backend) -> None:
    async with opened(backend) as queue:
        with pytest.raises(QueueFullError, match="full"):
            for number in range(1025):
                await queue.enqueue_task(task(str(number)))
        size = await queue.get_queue_size()
        assert 0 < size.waiting <= 1024
        await (await claimed(queue)).ack()
        await queue.enqueue_task(task("fits again"))


def test_opening_fails_without_a_server_and_closes_the_pool(shm: Path) -> None:
    paths = [shm / "alone"]
    Pool.create(paths, device_size=64 << 20, sparse=True).close()
    with pytest.raises(QueueError, match="the prefill queue in the pool"):
        asyncio.run(pool_queue.PoolQueue.open(str(paths[0]), "q", timeout_s=0.05))
    gc.collect()
    assert str(paths[0]) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("backend", ["pool"], indirect=True)
async def test_an_invalid_task_leaves_the_queue(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(backend) as queue:
        monkeypatch.setattr(pool_queue, "encode_task", lambda _: b"junk")
        await queue.enqueue_task(task("junk"))
        monkeypatch.undo()
        await queue.enqueue_task(task("one"))
        assert (await claimed(queue)).task == task("one")
        assert await queue.get_queue_size() == (0, 1)
    assert "not a prefill task" in caplog.text


@pytest.mark.parametrize("backend", ["pool"], indirect=True)
@pytest.mark.parametrize("failures", [2, 3])
async def test_an_unreadable_task_is_tried_three_times_at_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    async with opened(backend) as queue:
        assert isinstance(queue, pool_queue.PoolQueue)
        await queue.enqueue_task(task("one"))
        real, seen = queue._cache.get, 0

        def get(*arguments: object) -> object:
            nonlocal seen
            seen += 1
            return SimpleNamespace(hits=0) if seen <= failures else real(*arguments)

        monkeypatch.setattr(queue._cache, "get", get)
        claim = await queue.dequeue_task(timeout=0.6)
        if failures == 2:
            assert claim is not None
            assert claim.deliveries == 3
        else:
            assert claim is None
            assert await queue.get_queue_size() == (0, 0)


def test_a_missing_server_is_a_one_line_error() -> None:
    with pytest.raises(QueueError, match="is nats-server running"):
        asyncio.run(open_queue("nats://127.0.0.1:1", "q"))
    with pytest.raises(BadValueError, match="not a prefill queue"):
        asyncio.run(open_queue("amqp://there", "q"))


QUEUES: list[type] = [PoolQueue]
try:
    from beluga.disagg.nats_queue import NatsQueue
except ImportError:
    pass
else:
    QUEUES.append(NatsQueue)


def calls(kind: type) -> dict[str, list[tuple[str, object]]]:
    """Return the parameters and their defaults of each public call."""
    return {
        name: [
            (parameter.name, parameter.default)
            for parameter in inspect.signature(call).parameters.values()
        ]
        for name, call in vars(kind).items()
        if not name.startswith("_") and inspect.iscoroutinefunction(call)
    }


@pytest.mark.parametrize("kind", QUEUES)
def test_queues_implement_the_interface(kind: type) -> None:
    promised, made = calls(TaskQueue), calls(kind)
    assert promised
    assert {name: made[name] for name in promised} == promised
