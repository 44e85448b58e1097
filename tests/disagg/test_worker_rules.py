# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Rare cases of prefill workers and prefillers, one per test."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from prefill_engine import FakeEngine
from support.list_queue import ListQueue, ListTicket

from beluga.disagg import Prefiller, PrefillOutcome, PrefillTask, PrefillWorker, QueueSize
from beluga.disagg.worker import WorkerStat, prefill_request
from beluga.errors import QueueError, QueueFullError, WorkerError
from beluga.limit import LogLimit

LONG_S = 60.0


def task(name: str = "r", **fields: Any) -> PrefillTask:
    return PrefillTask(request_id=name, model="m", **({"tokens": [1, 2]} | fields))


async def worked(
    engine: FakeEngine, *tasks: tuple[PrefillTask, int], until: int, **options: Any
) -> tuple[WorkerStat, ListQueue]:
    """Return a worker's counters and its queue after ``until`` tasks that were each delivered
    before.
    """
    queue = ListQueue()
    queue.waiting = [(queued, ListTicket(queue), before) for queued, before in tasks]
    worker = PrefillWorker(queue, engine.url, **options)
    running = asyncio.create_task(worker.run())

    async def look() -> None:
        while sum(dataclasses.astuple(worker.stat)) < until:
            await asyncio.sleep(0.002)

    await asyncio.wait_for(look(), LONG_S)
    worker.stop()
    await asyncio.wait_for(running, LONG_S)
    return worker.stat, queue


@pytest.mark.parametrize(
    ("status", "counted"),
    [(200, "done"), (399, "done"), (400, "refused"), (404, "refused"), (429, "given_back"),
     (499, "refused"), (500, "given_back"), (503, "given_back")],
)  # fmt: skip
def test_each_engine_status_has_its_outcome(status: int, counted: str) -> None:
    async def play() -> None:
        async with FakeEngine().serving() as engine:
            engine.status = status
            stat, queue = await worked(engine, (task(), 0), until=1)
            tries = (
                stat.given_back or 1
            )  # a returned task may be tried again before the worker ends
            assert stat == WorkerStat(**{counted: tries})
            assert queue.acked == ([] if counted == "given_back" else ["r"])
            assert len(queue.waiting) == int(counted == "given_back")

    asyncio.run(play())


def paused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count a worker's pauses, without their length."""
    delays: list[int] = []

    async def pause(worker: PrefillWorker) -> None:
        delays.append(worker.stat.given_back)

    monkeypatch.setattr(PrefillWorker, "_pause", pause)
    return delays


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([200, 500], []),  # observed with this task only
        ([200, 500, 500], [2]),
        ([200, 500, 200, 500], []),
        ([500], [1]),
        ([200, 503], [1]),  # a proxy's or the engine's own status
        ([200, 429], [1]),
    ],
)
def test_a_prompt_that_fails_in_the_engine_does_not_affect_others(
    statuses: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        delays = paused(monkeypatch)
        async with FakeEngine().serving() as engine:
            engine.statuses = statuses
            tasks = [(task(str(number)), 0) for number in range(len(statuses))]
            queue = ListQueue()
            queue.waiting = [(queued, ListTicket(queue), before) for queued, before in tasks]
            queue.gives_back = False
            worker = PrefillWorker(queue, engine.url, concurrency=1)
            running = asyncio.create_task(worker.run())
            while sum(dataclasses.astuple(worker.stat)) < len(statuses) or len(delays) < len(
                expected
            ):
                await asyncio.sleep(0.002)
            worker.stop()
            await asyncio.wait_for(running, LONG_S)
            assert delays == expected

    asyncio.run(asyncio.wait_for(play(), LONG_S))


@pytest.mark.parametrize(("before", "counted"), [(2, "done"), (3, "dropped")])
def test_a_task_is_delivered_a_bounded_number_of_times(before: int, counted: str) -> None:
    async def play() -> None:
        async with FakeEngine().serving() as engine:
            stat, queue = await worked(engine, (task(), before), until=1, deliveries_max=3)
            assert stat == WorkerStat(**{counted: 1})
            assert queue.acked == ["r"]
            assert len(engine.requested) == int(counted == "done")

    asyncio.run(play())


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'),
        *(b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff", b'{"seed": ' + b"9" * 5000 + b"}"),
        *(b'{"prompt": %s1%s}' % (b"[" * depth, b"]" * depth) for depth in range(300, 1000, 7)),
    ],
    ids=lambda body: f"{body[:12]!r} {len(body)}",
)
def test_an_unreadable_body_does_not_stop_the_worker(body: bytes) -> None:
    """It would be delivered to the next worker, and to the one after it."""

    async def play() -> None:
        async with FakeEngine().serving() as engine:
            bad = task("bad", tokens=None, body=body)
            stat, queue = await worked(engine, (bad, 0), (task("good"), 0), until=2, concurrency=1)
            assert queue.acked == ["bad", "good"]
            assert stat.refused + stat.done == 2

    asyncio.run(play())


def test_an_unexpected_failure_of_a_task_does_not_stop_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        paused(monkeypatch)
        prefill = PrefillWorker._prefill

        async def failing(self: PrefillWorker, session: Any, task: PrefillTask) -> str | None:
            if task.request_id == "bad":
                raise KeyError("a defect")
            return await prefill(self, session, task)

        monkeypatch.setattr(PrefillWorker, "_prefill", failing)
        async with FakeEngine().serving() as engine:
            tasks = (task("bad"), 0), (task("good"), 0)
            stat, queue = await worked(engine, *tasks, until=1, concurrency=1)
            assert stat == WorkerStat(done=1)
            assert queue.acked == ["good"]

    asyncio.run(play())
    assert "a prefill has failed" in caplog.text


def test_an_unreachable_engine_returns_the_task() -> None:
    async def play() -> None:
        engine = FakeEngine()
        engine.url = "http://127.0.0.1:9"
        stat, queue = await worked(engine, (task(), 0), until=1)
        assert stat == WorkerStat(given_back=1)
        assert [queued.request_id for queued, _, _ in queue.waiting] == ["r"]

    asyncio.run(play())


def test_an_engine_timeout_returns_the_task() -> None:
    async def play() -> None:
        async with FakeEngine().serving() as engine:
            engine.gate.clear()
            stat, _ = await worked(engine, (task(), 0), until=1, timeout_s=0.05)
            assert stat.given_back >= 1  # the task may have begun again before the stop
            assert stat.done == 0
            engine.gate.set()

    asyncio.run(play())


def test_the_worker_runs_the_requested_number_of_prompts() -> None:
    async def play() -> None:
        async with FakeEngine().serving() as engine:
            engine.gate.clear()

            async def open_when_full() -> int:
                while len(engine.requested) < 3:
                    await asyncio.sleep(0.002)
                await asyncio.sleep(0.05)  # a fourth attempt would start now
                engine.gate.set()
                return len(engine.requested)

            full = asyncio.create_task(open_when_full())
            tasks = [(task(str(number)), 0) for number in range(5)]
            stat, _ = await worked(engine, *tasks, until=5, concurrency=3)
            assert await full == 3
            assert stat.done == 5

    asyncio.run(play())


def test_the_worker_waits_for_an_unreachable_queue(caplog: pytest.LogCaptureFixture) -> None:
    class Away(ListQueue):
        requested = 0

        async def dequeue_task(self, timeout: float = 1.0) -> Any:
            self.requested += 1
            if self.requested == 1:
                raise QueueError("away")
            return await super().dequeue_task(timeout)

    async def play() -> None:
        queue = Away()
        await queue.enqueue_task(task())
        async with FakeEngine().serving() as engine:
            worker = PrefillWorker(queue, engine.url + "/", concurrency=1)
            running = asyncio.create_task(worker.run())
            while not queue.acked:
                await asyncio.sleep(0.002)
            worker.stop()
            await running
            assert engine.requested[0][0] == "/v1/completions"

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(play(), LONG_S))
    assert "away" in caplog.text


def test_a_task_claimed_at_the_stop_is_returned() -> None:
    class Slow(ListQueue):
        """A queue that claims at once but reports it only when the call is cancelled."""

        async def dequeue_task(self, timeout: float = 1.0) -> Any:
            claim = await super().dequeue_task(timeout)
            try:
                await asyncio.sleep(LONG_S)
            except asyncio.CancelledError:
                if claim is None:
                    raise
            return claim

    async def play() -> None:
        queue = Slow()
        await queue.enqueue_task(task())
        worker = PrefillWorker(queue, "http://127.0.0.1:9", concurrency=1)
        running = asyncio.create_task(worker.run())
        while not queue.held:
            await asyncio.sleep(0.002)
        worker.stop()
        await running
        assert (queue.held, len(queue.waiting)) == ([], 1)

    asyncio.run(asyncio.wait_for(play(), LONG_S))


def test_sampling_and_text_reach_the_engine() -> None:
    path, body = prefill_request(
        task(tokens=None, text="hello", sampling={"temperature": 0.5, "logprobs": 3, "n": 9})
    )
    assert path == "/v1/completions"
    assert body == (
        b'{"temperature":0.5,"n":1,"model":"m","prompt":"hello","max_tokens":1,"stream":false}'
    )


@pytest.mark.parametrize("body", [b"{", b"[1]", b""])
def test_a_body_that_is_not_an_object_is_rejected(body: bytes) -> None:
    with pytest.raises(WorkerError, match="request r is not a JSON object"):
        prefill_request(task(tokens=None, body=body))


@pytest.mark.parametrize(("late_s", "expired"), [(0.5, False), (1.0, False), (1.5, True)])
def test_deadlines_tolerate_a_clock_skew_of_a_second(
    monkeypatch: pytest.MonkeyPatch, late_s: float, expired: bool
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0 + late_s)
    assert task(deadline=1000.0).expired is expired


def test_an_unreachable_queue_is_retried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    # it does not replace the event loop's clock
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("beluga.disagg.prefill.time", clock)

    async def play() -> None:
        queue = ListQueue()
        queue.fails = QueueError("away")
        prefiller = Prefiller(queue, timeout_s=0.01)

        async def course() -> PrefillOutcome:
            return await prefiller.prefill(
                lambda _: task(), lambda *_: True, tokens=1, local_s=LONG_S
            )

        assert await course() is PrefillOutcome.UNQUEUED
        queue.fails = None
        now[0] += 4.9
        assert await course() is PrefillOutcome.UNQUEUED
        assert queue.waiting == []
        now[0] += 0.2
        assert await course() is PrefillOutcome.UNTAKEN
        assert queue.waiting == []  # the engine was called, and the task was withdrawn

    asyncio.run(play())


def test_failures_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]

    class Full(ListQueue):
        async def enqueue_task(self, task: PrefillTask) -> Any:
            raise QueueFullError("it is full")

    async def play(count: int) -> None:
        for _ in range(count):
            now[0] += 25.0
            await prefiller.prefill(lambda _: task(), lambda *_: True, tokens=1, local_s=LONG_S)

    prefiller = Prefiller(Full())
    monkeypatch.setattr(prefiller, "_limit", LogLimit(clock=lambda: now[0]))
    with caplog.at_level(logging.WARNING):
        asyncio.run(play(4))  # at 125, 150, 175, 200 s
    assert [record.getMessage() for record in caplog.records] == [
        "prefilling locally: it is full",
        "prefilling locally: it is full (2 more of this kind since it was last logged)",
    ]


def test_a_late_prefill_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Taken(ListQueue):
        async def enqueue_task(self, task: PrefillTask) -> Any:
            ticket = await super().enqueue_task(task)
            await self.dequeue_task()
            return ticket

    async def play() -> None:
        prefiller = Prefiller(Taken(), timeout_s=0.01)
        await prefiller.prefill(lambda _: task(), lambda *_: True, tokens=1, local_s=LONG_S)

    with caplog.at_level(logging.WARNING):
        asyncio.run(play())
    assert "was not done in 0.01 s" in caplog.text


def test_the_deadline_of_a_task_is_the_end_of_its_wait() -> None:
    calls: list[float] = []

    def made(deadline: float) -> PrefillTask:
        calls.append(deadline)
        return task(deadline=deadline)

    async def play() -> None:
        before = time.time()
        await Prefiller(ListQueue(), timeout_s=0.05).prefill(
            made, lambda *_: True, tokens=1, local_s=LONG_S
        )
        assert before + 0.05 <= calls[0] <= time.time() + 0.05

    asyncio.run(play())


def test_the_queues_size_is_cached_for_a_while() -> None:
    class Counting(ListQueue):
        requested = 0

        async def get_queue_size(self) -> QueueSize:
            self.requested += 1
            return QueueSize(7, 2)

    async def play() -> None:
        queue, calls = Counting(), []
        prefiller = Prefiller(queue)
        # as if it had just been read
        prefiller._size_at = asyncio.get_running_loop().time() + LONG_S
        await prefiller.prefill(
            lambda _: task(), lambda *all: calls.append(all) or False, tokens=1, local_s=LONG_S
        )
        assert (queue.requested, calls) == (0, [(QueueSize(0, 0), 0)])
        prefiller._size_at = asyncio.get_running_loop().time() - 0.1
        await prefiller.prefill(
            lambda _: task(), lambda *all: calls.append(all) or False, tokens=1, local_s=LONG_S
        )
        assert (queue.requested, calls[1]) == (1, (QueueSize(7, 2), 0))
        assert QueueSize(7, 2).total == 9

    asyncio.run(play())
