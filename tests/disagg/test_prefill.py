# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Remote prefill: the router's side, the worker's, and rare cases of both."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.list_queue import ListQueue, ListTicket
from support.virtual_clock import run_virtually

from beluga.disagg import Prefiller, PrefillOutcome, PrefillTask, PrefillWorker, QueueSize
from beluga.disagg.queue import TASK_SIZE_MAX, encode_task
from beluga.disagg.worker import WorkerStat, prefill_request
from beluga.errors import QueueError, QueueFullError, WorkerError
from beluga.limit import LogLimit

LONG_S = 60.0


def task(name: str = "r", **fields: Any) -> PrefillTask:
    return PrefillTask(request_id=name, model="m", **({"tokens": [1, 2]} | fields))


class FakeEngine:
    """Responds with ``status`` once ``gate`` is open; ``requested`` has what was sent to it."""

    def __init__(self) -> None:
        self.url = ""
        self.requested: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        self.statuses: list[int] = []  # statuses of the next responses, before ``status`` applies
        self.gate = asyncio.Event()
        self.gate.set()

    async def _answer(self, request: web.Request) -> web.Response:
        self.requested.append((request.path, json.loads(await request.read())))
        await self.gate.wait()
        status = self.statuses.pop(0) if self.statuses else self.status
        return web.json_response({"choices": [{"text": "x"}]}, status=status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeEngine]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


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


async def test_a_long_prompt_is_prefilled_by_a_worker() -> None:
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


async def test_the_engine_gets_the_clients_request_with_one_output_token() -> None:
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


async def test_tasks_of_a_disconnected_client_are_withdrawn() -> None:
    queue = ListQueue()
    prefiller = Prefiller(queue, timeout_s=LONG_S)
    waiting = asyncio.create_task(prefiller.prefill(made, remotely, tokens=500, local_s=LONG_S))
    await eventually(lambda: bool(queue.waiting))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not queue.waiting


async def test_the_decision_uses_the_tokens_in_progress() -> None:
    queue, reports = ListQueue(), []

    def noted(size: QueueSize, sent: int) -> bool:
        reports.append((size, sent))
        return len(reports) < 3

    prefiller = Prefiller(queue, timeout_s=0.2)
    calls = [prefiller.prefill(made, noted, tokens=tokens, local_s=0.2) for tokens in (500, 70)]
    assert await asyncio.gather(*calls) == [PrefillOutcome.UNTAKEN, PrefillOutcome.UNTAKEN]
    assert await prefiller.prefill(made, noted, tokens=1, local_s=0.2) is PrefillOutcome.LOCAL
    assert [sent for _, sent in reports] == [0, 500, 0]


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
async def test_a_rejected_task_does_not_block_others(refused: dict[str, Any]) -> None:
    class Encoding(ListQueue):
        async def enqueue_task(self, task: PrefillTask) -> ListTicket:
            encode_task(task)
            return await super().enqueue_task(task)

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


async def test_a_full_queue_is_retried() -> None:
    class Full(ListQueue):
        requested = 0

        async def enqueue_task(self, task: PrefillTask) -> object:  # type: ignore[override]
            self.requested += 1
            raise QueueFullError("full")

    queue = Full()
    prefiller = Prefiller(queue)
    for _ in range(3):
        course = await prefiller.prefill(made, remotely, tokens=500, local_s=LONG_S)
        assert course is PrefillOutcome.UNQUEUED
    assert queue.requested == 3


async def test_a_task_that_every_engine_rejects_leaves_the_queue() -> None:
    queue = ListQueue()
    for name, deadline in (("refused", 0.0), ("expired", 1.0)):
        await queue.enqueue_task(task(name, deadline=deadline))
    await queue.enqueue_task(PrefillTask(request_id="odd", model="m", body=b"{"))
    queue.waiting.append((task("deadly"), (await queue.enqueue_task(task("x"))), 9))
    async with FakeEngine().serving() as engine:
        engine.status = 400
        async with working(queue, engine) as worker:
            await eventually(lambda: len(queue.acked) == 5)
        assert (worker.stat.refused, worker.stat.expired, worker.stat.dropped) == (3, 1, 1)
        assert len(engine.requested) == 2


async def test_a_claim_is_extended_while_the_engine_works() -> None:
    queue = ListQueue()
    await queue.enqueue_task(task())
    async with FakeEngine().serving() as engine:
        engine.gate.clear()
        async with working(queue, engine, visibility_s=0.03):
            await eventually(lambda: bool(queue.held) and queue.held[0].extended >= 3)
            engine.gate.set()


async def test_a_stopped_worker_completes_its_tasks() -> None:
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


# ---- Rare cases


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
async def test_each_engine_status_has_its_outcome(status: int, counted: str) -> None:
    async with FakeEngine().serving() as engine:
        engine.status = status
        stat, queue = await worked(engine, (task(), 0), until=1)
        tries = stat.given_back or 1  # a returned task may be tried again before the worker ends
        assert stat == WorkerStat(**{counted: tries})
        assert queue.acked == ([] if counted == "given_back" else ["r"])
        assert len(queue.waiting) == int(counted == "given_back")


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
async def test_a_prompt_that_fails_in_the_engine_does_not_affect_others(
    statuses: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = paused(monkeypatch)
    async with FakeEngine().serving() as engine:
        engine.statuses = statuses
        tasks = [(task(str(number)), 0) for number in range(len(statuses))]
        queue = ListQueue()
        queue.waiting = [(queued, ListTicket(queue), before) for queued, before in tasks]
        queue.gives_back = False
        worker = PrefillWorker(queue, engine.url, concurrency=1)
        running = asyncio.create_task(worker.run())
        while sum(dataclasses.astuple(worker.stat)) < len(statuses) or len(delays) < len(expected):
            await asyncio.sleep(0.002)
        worker.stop()
        await asyncio.wait_for(running, LONG_S)
        assert delays == expected


@pytest.mark.parametrize(("before", "counted"), [(2, "done"), (3, "dropped")])
async def test_a_task_is_delivered_a_bounded_number_of_times(before: int, counted: str) -> None:
    async with FakeEngine().serving() as engine:
        stat, queue = await worked(engine, (task(), before), until=1, deliveries_max=3)
        assert stat == WorkerStat(**{counted: 1})
        assert queue.acked == ["r"]
        assert len(engine.requested) == int(counted == "done")


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'),
        *(b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff", b'{"seed": ' + b"9" * 5000 + b"}"),
        *(b'{"prompt": %s1%s}' % (b"[" * depth, b"]" * depth) for depth in range(300, 1000, 7)),
    ],
    ids=lambda body: f"{body[:12]!r} {len(body)}",
)
async def test_an_unreadable_body_does_not_stop_the_worker(body: bytes) -> None:
    """It would be delivered to the next worker, and to the one after it."""
    async with FakeEngine().serving() as engine:
        bad = task("bad", tokens=None, body=body)
        stat, queue = await worked(engine, (bad, 0), (task("good"), 0), until=2, concurrency=1)
        assert queue.acked == ["bad", "good"]
        assert stat.refused + stat.done == 2


async def test_an_unexpected_failure_of_a_task_does_not_stop_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "a prefill has failed" in caplog.text


async def test_an_unreachable_engine_returns_the_task() -> None:
    engine = FakeEngine()
    engine.url = "http://127.0.0.1:9"
    stat, queue = await worked(engine, (task(), 0), until=1)
    assert stat == WorkerStat(given_back=1)
    assert [queued.request_id for queued, _, _ in queue.waiting] == ["r"]


async def test_an_engine_timeout_returns_the_task() -> None:
    async with FakeEngine().serving() as engine:
        engine.gate.clear()
        stat, _ = await worked(engine, (task(), 0), until=1, timeout_s=0.05)
        assert stat.given_back >= 1  # the task may have begun again before the stop
        assert stat.done == 0
        engine.gate.set()


async def test_the_worker_runs_the_requested_number_of_prompts() -> None:
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


async def test_the_worker_waits_for_an_unreachable_queue(caplog: pytest.LogCaptureFixture) -> None:
    class Away(ListQueue):
        requested = 0

        async def dequeue_task(self, timeout: float = 1.0) -> Any:
            self.requested += 1
            if self.requested == 1:
                raise QueueError("away")
            return await super().dequeue_task(timeout)

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
    assert "away" in caplog.text


async def test_a_task_claimed_at_the_stop_is_returned() -> None:
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

    queue = Slow()
    await queue.enqueue_task(task())
    worker = PrefillWorker(queue, "http://127.0.0.1:9", concurrency=1)
    running = asyncio.create_task(worker.run())
    while not queue.held:
        await asyncio.sleep(0.002)
    worker.stop()
    await running
    assert (queue.held, len(queue.waiting)) == ([], 1)


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
    assert not task(deadline=0).expired  # it has none


async def test_an_unreachable_queue_is_retried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    # it does not replace the event loop's clock
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("beluga.disagg.prefill.time", clock)
    queue = ListQueue()
    queue.fails = QueueError("away")
    prefiller = Prefiller(queue, timeout_s=0.01)

    async def course() -> PrefillOutcome:
        return await prefiller.prefill(lambda _: task(), lambda *_: True, tokens=1, local_s=LONG_S)

    assert await course() is PrefillOutcome.UNQUEUED
    queue.fails = None
    now[0] += 4.9
    assert await course() is PrefillOutcome.UNQUEUED
    assert queue.waiting == []
    now[0] += 0.2
    assert await course() is PrefillOutcome.UNTAKEN
    assert queue.waiting == []  # the engine was called, and the task was withdrawn


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


async def test_a_late_prefill_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Taken(ListQueue):
        async def enqueue_task(self, task: PrefillTask) -> Any:
            ticket = await super().enqueue_task(task)
            await self.dequeue_task()
            return ticket

    prefiller = Prefiller(Taken(), timeout_s=0.01)
    await prefiller.prefill(lambda _: task(), lambda *_: True, tokens=1, local_s=LONG_S)
    assert "was not done in 0.01 s" in caplog.text


async def test_the_deadline_of_a_task_is_the_end_of_its_wait() -> None:
    calls: list[float] = []

    def made(deadline: float) -> PrefillTask:
        calls.append(deadline)
        return task(deadline=deadline)

    before = time.time()
    await Prefiller(ListQueue(), timeout_s=0.05).prefill(
        made, lambda *_: True, tokens=1, local_s=LONG_S
    )
    assert before + 0.05 <= calls[0] <= time.time() + 0.05


async def test_the_queues_size_is_cached_for_a_while() -> None:
    class Counting(ListQueue):
        requested = 0

        async def get_queue_size(self) -> QueueSize:
            self.requested += 1
            return QueueSize(7, 2)

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
