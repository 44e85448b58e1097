# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Remote prefill: the router's side and the worker's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from prefill_engine import FakeEngine
from support.list_queue import ListQueue, ListTicket
from support.virtual_clock import run_virtually

from beluga.disagg import (
    TASK_SIZE_MAX,
    Prefiller,
    PrefillOutcome,
    PrefillTask,
    PrefillWorker,
    QueueSize,
    encode_task,
)
from beluga.errors import QueueError, QueueFullError

LONG_S = 60.0


def task(name: str = "r", deadline: float = 0.0) -> PrefillTask:
    return PrefillTask(request_id=name, model="m", tokens=[1, 2], deadline=deadline)


def made(deadline: float) -> PrefillTask:
    return task(deadline=deadline)


async def eventually(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), LONG_S)


@asynccontextmanager
async def working(
    queue: ListQueue, engine: FakeEngine, **options: float
) -> AsyncIterator[PrefillWorker]:
    worker = PrefillWorker(queue, engine.url, **options)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(running, LONG_S)


def remotely(size: QueueSize, sent: int) -> bool:
    return size.waiting < 2 and sent < 1000


def locally(size: QueueSize, sent: int) -> bool:
    return False


def test_a_long_prompt_is_prefilled_by_a_worker() -> None:
    async def play() -> None:
        queue = ListQueue()
        prefiller = Prefiller(queue, timeout_s=LONG_S)
        async with FakeEngine().serving() as engine, working(queue, engine) as worker:
            course = await prefiller.prefill(made, remotely, tokens=400, local_s=LONG_S)
            assert course is PrefillOutcome.REMOTE
            await eventually(lambda: worker.stat.done == 1)
            path, body = engine.requested[0]
            assert path == "/v1/completions"
            assert body == {
                "model": "m", "prompt": [1, 2], "max_tokens": 1, "n": 1, "stream": False,
            }  # fmt: skip
            local = await prefiller.prefill(made, locally, tokens=100, local_s=LONG_S)
            assert local is PrefillOutcome.LOCAL
            assert len(engine.requested) == 1

    asyncio.run(play())


def test_the_engine_gets_the_clients_request_with_one_output_token() -> None:
    async def play() -> None:
        queue = ListQueue()
        sent = {
            "model": "m",
            "messages": [{"role": "user", "content": "caf\u00e9"}],
            "tools": [{"type": "function"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 500,
            "min_tokens": 20,
        }
        await queue.enqueue_task(
            PrefillTask(
                request_id="r",
                model="m",
                body=json.dumps(sent).encode(),
                path="/v1/chat/completions",
            )
        )
        async with FakeEngine().serving() as engine, working(queue, engine) as worker:
            await eventually(lambda: worker.stat.done == 1)
            path, body = engine.requested[0]
            assert path == "/v1/chat/completions"
            assert body == {
                "model": "m",
                "messages": sent["messages"],
                "tools": sent["tools"],
                "max_tokens": 1,
                "n": 1,
                "stream": False,
            }

    asyncio.run(play())


class Played:
    """One prefill on a virtual clock: a worker claims it at one time and finishes it at another."""

    def __init__(self, *, taken_s: float, done_s: float, local_s: float, timeout_s: float) -> None:
        self.queue = ListQueue()
        self.computed = 0
        self._taken_s, self._done_s = taken_s, done_s
        self._local_s, self._timeout_s = local_s, timeout_s
        self.course, self.after_s = run_virtually(self._play)

    async def _play(self) -> tuple[PrefillOutcome, float]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        worker = asyncio.create_task(self._work())
        course = await Prefiller(self.queue, timeout_s=self._timeout_s).prefill(
            made, remotely, tokens=1, local_s=self._local_s
        )
        after_s = loop.time() - started
        await worker
        return course, after_s

    async def _work(self) -> None:
        await asyncio.sleep(self._taken_s)
        if (claim := await self.queue.dequeue_task(0)) is not None:
            self.computed += 1
            await asyncio.sleep(max(self._done_s - self._taken_s, 0.0))
            await claim.ack()


@given(
    st.integers(0, 4000).map(lambda ms: ms / 1000 + 0.0005),
    st.integers(0, 9000),
    st.integers(0, 3000),
    st.integers(0, 5000),
)
def test_an_unclaimed_prompt_waits_as_long_as_a_local_prefill(
    taken_s: float, takes_ms: int, local_ms: int, more_ms: int
) -> None:
    """Whatever the times are: a prompt waits no longer than a local prefill takes unless a worker
    has it, a worker that has it gets its time, and a withdrawn prompt is not computed.
    """
    local_s, timeout_s = local_ms / 1000, (local_ms + more_ms) / 1000
    done_s = taken_s + takes_ms / 1000
    played = Played(taken_s=taken_s, done_s=done_s, local_s=local_s, timeout_s=timeout_s)
    if taken_s > local_s:
        outcome, after_s = PrefillOutcome.UNTAKEN, local_s
    elif done_s > timeout_s:
        outcome, after_s = PrefillOutcome.LATE, timeout_s
    else:
        outcome, after_s = PrefillOutcome.REMOTE, done_s
    assert abs(done_s - timeout_s) < 1e-6 or played.course is outcome
    assert abs(played.after_s - after_s) < 1e-6
    assert played.computed == (outcome is not PrefillOutcome.UNTAKEN)
    assert not played.queue.waiting


def test_a_prefill_longer_than_the_remote_limit_is_not_awaited() -> None:
    played = Played(taken_s=60.0, done_s=60.0, local_s=50.0, timeout_s=5.0)
    assert (played.course, played.after_s) == (PrefillOutcome.UNTAKEN, 5.0)


def test_tasks_of_a_disconnected_client_are_withdrawn() -> None:
    async def play() -> None:
        queue = ListQueue()
        prefiller = Prefiller(queue, timeout_s=LONG_S)
        waiting = asyncio.create_task(prefiller.prefill(made, remotely, tokens=500, local_s=LONG_S))
        await eventually(lambda: bool(queue.waiting))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not queue.waiting

    asyncio.run(play())


def test_the_decision_uses_the_tokens_in_progress() -> None:
    async def play() -> None:
        queue, reports = ListQueue(), []

        def noted(size: QueueSize, sent: int) -> bool:
            reports.append((size, sent))
            return len(reports) < 3

        prefiller = Prefiller(queue, timeout_s=0.2)
        calls = [prefiller.prefill(made, noted, tokens=tokens, local_s=0.2) for tokens in (500, 70)]
        assert await asyncio.gather(*calls) == [PrefillOutcome.UNTAKEN, PrefillOutcome.UNTAKEN]
        assert await prefiller.prefill(made, noted, tokens=1, local_s=0.2) is PrefillOutcome.LOCAL
        assert [sent for _, sent in reports] == [0, 500, 0]

    asyncio.run(play())


def test_an_unreachable_queue_fails_no_request_and_is_not_used() -> None:
    class Counting(ListQueue):
        requested = 0

        async def get_queue_size(self) -> QueueSize:
            self.requested += 1
            raise QueueError("away")

    async def play() -> None:
        queue = Counting()
        prefiller = Prefiller(queue)
        for _ in range(3):
            course = await prefiller.prefill(made, remotely, tokens=500, local_s=LONG_S)
            assert course is PrefillOutcome.UNQUEUED
        assert queue.requested == 1

    asyncio.run(play())


@pytest.mark.parametrize(
    "refused",
    [
        {"body": b"x" * TASK_SIZE_MAX},
        {"request_id": ""},
        {"path": "/metrics"},
        {"text": "two prompts"},
    ],
    ids=["too large", "no name", "path", "prompts"],
)
def test_a_rejected_task_does_not_block_others(refused: dict[str, Any]) -> None:
    class Encoding(ListQueue):
        async def enqueue_task(self, task: PrefillTask) -> ListTicket:
            encode_task(task)
            return await super().enqueue_task(task)

    async def play() -> None:
        queue = Encoding()
        prefiller = Prefiller(queue, timeout_s=LONG_S)
        fields: dict[str, Any] = {"request_id": "r", "model": "m", "tokens": [1]} | refused
        if "body" in refused:
            del fields["tokens"]

        def wrong(deadline: float) -> PrefillTask:
            return PrefillTask(**fields, deadline=deadline)

        async with FakeEngine().serving() as engine, working(queue, engine):
            course = await prefiller.prefill(wrong, remotely, tokens=5, local_s=LONG_S)
            assert course is PrefillOutcome.UNQUEUED
            course = await prefiller.prefill(made, remotely, tokens=5, local_s=LONG_S)
            assert course is PrefillOutcome.REMOTE

    asyncio.run(play())


def test_a_full_queue_is_retried() -> None:
    class Full(ListQueue):
        requested = 0

        async def enqueue_task(self, task: PrefillTask) -> object:  # type: ignore[override]
            self.requested += 1
            raise QueueFullError("full")

    async def play() -> None:
        queue = Full()
        prefiller = Prefiller(queue)
        for _ in range(3):
            course = await prefiller.prefill(made, remotely, tokens=500, local_s=LONG_S)
            assert course is PrefillOutcome.UNQUEUED
        assert queue.requested == 3

    asyncio.run(play())


def test_a_failed_engine_returns_the_task() -> None:
    async def play() -> None:
        queue = ListQueue()
        await queue.enqueue_task(task())
        async with FakeEngine().serving() as engine:
            engine.status = 503

            def restore() -> None:
                assert queue.acked == []
                engine.status = 200

            queue.given_back = restore
            async with working(queue, engine) as worker:
                await eventually(lambda: worker.stat.done == 1)
                assert worker.stat.given_back == 1
        assert queue.acked == ["r"]

    asyncio.run(play())


def test_a_task_that_every_engine_rejects_leaves_the_queue() -> None:
    async def play() -> None:
        queue = ListQueue()
        for name, deadline in (("refused", 0.0), ("expired", 1.0)):
            await queue.enqueue_task(task(name, deadline))
        await queue.enqueue_task(PrefillTask(request_id="odd", model="m", body=b"{"))
        queue.waiting.append((task("deadly"), (await queue.enqueue_task(task("x"))), 9))
        async with FakeEngine().serving() as engine:
            engine.status = 400
            async with working(queue, engine) as worker:
                await eventually(lambda: len(queue.acked) == 5)
            assert (worker.stat.refused, worker.stat.expired, worker.stat.dropped) == (3, 1, 1)
            assert len(engine.requested) == 2

    asyncio.run(play())


def test_a_claim_is_extended_while_the_engine_works() -> None:
    async def play() -> None:
        queue = ListQueue()
        await queue.enqueue_task(task())
        async with FakeEngine().serving() as engine:
            engine.gate.clear()
            async with working(queue, engine, visibility_s=0.03):
                await eventually(lambda: bool(queue.held) and queue.held[0].extended >= 3)
                engine.gate.set()

    asyncio.run(play())


def test_a_stopped_worker_completes_its_tasks() -> None:
    async def play() -> None:
        queue = ListQueue()
        await queue.enqueue_task(task())
        async with FakeEngine().serving() as engine:
            engine.gate.clear()
            async with working(queue, engine) as worker:
                await eventually(lambda: len(engine.requested) == 1)
                worker.stop()
                await asyncio.sleep(0.1)  # a pending claim would happen now
                await queue.enqueue_task(task("later"))
                await asyncio.sleep(0.1)
                engine.gate.set()
        assert queue.acked == ["r"]
        assert worker.stat.done == 1

    asyncio.run(play())
