# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Remote prefill in a router: prefill engines compute prompts before the router sends them to
decode engines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from fake_engines import FakeEngine
from routed import routed, until
from support.list_queue import ListQueue

from beluga.disagg import PrefillWorker
from beluga.errors import BadValueError, NoWorkersError, QueueError, RouterError
from beluga.gateway import Prefill, read_thresholds
from beluga.gateway import remote as remote_module
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.gateway.remote import Remote
from beluga.router import Choice, CostEstimator, Decision, Load, Overlap, Worker
from beluga.router.costs import DEFAULT_MODEL, MODELS

LONG = "a long prompt " * 400


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> ListQueue:
    """The queue to which every address leads."""
    made = ListQueue()

    async def opened(url: str, name: str) -> ListQueue:
        assert (url, name) == ("pool", "fake")
        return made

    monkeypatch.setattr(remote_module, "open_queue", opened)
    return made


def apart(**settings: Any) -> Prefill:
    return Prefill((("fake", "pool"),), **settings)


@asynccontextmanager
async def working(queue: ListQueue, engine: FakeEngine) -> AsyncIterator[None]:
    """Run a prefill worker of an engine."""
    worker = PrefillWorker(queue, engine.url)
    running = asyncio.create_task(worker.run())
    yield
    worker.stop()
    await asyncio.wait_for(running, 60)


def courses(text: str) -> dict[str, float]:
    lines = [
        line for line in text.splitlines() if line.startswith("beluga_gateway_prefills_total{")
    ]
    return {line.split('course="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def test_a_prompt_is_prefilled_remotely_and_then_decoded(queue: ListQueue) -> None:
    decoding, prefilling = FakeEngine(), FakeEngine()
    async with (
        prefilling,
        routed(decoding, prefill=apart()) as site,
        working(queue, prefilling),
    ):
        status, body = await site.completed(prompt=LONG)
        assert status == 200
        assert b"[DONE]" in body
        assert [seen["max_tokens"] for seen in prefilling.seen] == [1]
        assert [seen["prompt"] for seen in prefilling.seen] == [LONG]
        assert [seen["prompt"] for seen in decoding.seen] == [LONG]
        assert courses(await site.text("/metrics")) == {"remote": 1}


async def test_a_prompt_that_was_sent_before_is_not_prefilled_remotely_again(
    queue: ListQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The rule uses cached blocks, also under a policy that ignores them."""
    caplog.set_level(logging.DEBUG, "beluga.gateway.remote")
    decoding, prefilling = FakeEngine(), FakeEngine()
    async with (
        prefilling,
        routed(decoding, prefill=apart(), policy="least-tokens") as site,
        working(queue, prefilling),
    ):
        for _ in range(2):
            assert (await site.completed(prompt=LONG))[0] == 200
        assert len(prefilling.seen) == 1
        assert courses(await site.text("/metrics")) == {"remote": 1, "local": 1}
    sent, cached = (r.getMessage() for r in caplog.records if r.name == "beluga.gateway.remote")
    assert re.match(r"[\w-]+: remote, Prompt\(tokens=\d+, cached=0,", sent)
    assert re.match(r"[\w-]+: local, Prompt\(tokens=\d+, cached=[1-9]", cached)


async def test_an_unclaimed_prefill_delays_its_request_without_failing_it(queue: ListQueue) -> None:
    async with routed(FakeEngine(), prefill=apart(wait_s=0.1)) as site:
        assert (await site.completed(prompt=LONG))[0] == 200
        queue.fails = QueueError("the queue is away")
        assert (await site.completed(prompt="other " + LONG))[0] == 200
        assert courses(await site.text("/metrics")) == {"untaken": 1, "unqueued": 1}


async def test_an_unclaimed_prefill_is_withdrawn_after_the_time_of_a_local_one(
    queue: ListQueue,
) -> None:
    """The request waits for the estimate of its prompt, here about 0.2 s, and not for 60 s."""
    decoding, prefilling = FakeEngine(), FakeEngine()
    async with prefilling, routed(decoding, prefill=apart(wait_s=3600)) as site:
        requested = asyncio.create_task(site.completed(prompt=LONG))
        await until(lambda: bool(queue.waiting))
        assert not decoding.seen
        assert (await requested)[0] == 200
        assert not queue.waiting
        assert courses(await site.text("/metrics")) == {"untaken": 1}
        async with working(queue, prefilling):
            assert (await site.completed(prompt="other " + LONG))[0] == 200
        assert [seen["prompt"] for seen in prefilling.seen] == ["other " + LONG]
        assert [seen["prompt"] for seen in decoding.seen] == [LONG, "other " + LONG]


async def test_a_claimed_prefill_has_a_longer_timeout(queue: ListQueue) -> None:
    decoding, prefilling = FakeEngine(), FakeEngine()
    hold = prefilling.faults.hold_first = asyncio.Event()
    async with (
        prefilling,
        routed(decoding, prefill=apart(wait_s=3600)) as site,
        working(queue, prefilling),
    ):
        requested = asyncio.create_task(site.completed(prompt=LONG))
        await until(lambda: prefilling.under_way == 1)
        await asyncio.sleep(0.5)  # more than twice what a local prefill of this prompt takes
        assert not decoding.seen
        hold.set()
        assert (await requested)[0] == 200
        assert courses(await site.text("/metrics")) == {"remote": 1}


ENGINE = Worker(1)


def choice(hit_rate: float = 0.0) -> Choice:
    return Choice(ENGINE, Overlap(), hit_rate)


def parsed_request(tokens: int) -> ParsedRequest:
    return ParsedRequest("/v1/completions", b"{}", model="fake", isl=tokens)


@asynccontextmanager
async def remote_by(rule: str, load: Load | None) -> AsyncIterator[tuple[Remote, list[str]]]:
    """Make a router's queues, and a list of the outcome of each prompt."""
    metrics, came = Metrics(), []
    metrics.prefilled = lambda parsed, course: came.append(course)  # type: ignore[method-assign]

    def load_of(worker: Worker) -> Load:
        assert worker == ENGINE
        if load is None:
            raise NoWorkersError("it has left")
        return load

    slow = CostEstimator(costs=dataclasses.replace(MODELS[DEFAULT_MODEL], a=1e6))
    remote = await Remote.open(apart(wait_s=60), Decision(rule), load_of, metrics, slow)
    yield remote, came
    await remote.close()


async def test_busy_prefill_workers_get_no_more_tasks(queue: ListQueue) -> None:
    """The limit is 16 batches of 8,192 tokens, as in Dynamo; cached tokens do not count."""
    async with remote_by("prefill-load", Load()) as (remote, came):
        sent = []
        for tokens, hit_rate in ((200_000, 0.5), (50_000, 0.0)):
            before = len(queue.waiting)
            sent.append(
                asyncio.create_task(remote.prefill(parsed_request(tokens), choice(hit_rate)))
            )
            while len(queue.waiting) == before:
                await asyncio.sleep(0.001)
        await remote.prefill(parsed_request(10), choice())
        assert came == ["local"]
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        assert not queue.waiting
        again = asyncio.create_task(remote.prefill(parsed_request(10), choice()))
        await until(lambda: len(queue.waiting) == 1)
        again.cancel()


@pytest.mark.parametrize(("blocks", "sent"), [(50, False), (51, True), (None, False)])
async def test_a_decode_engine_without_room_has_its_prompts_prefilled(
    queue: ListQueue, blocks: int | None, sent: bool
) -> None:
    load = None if blocks is None else Load(kv_total_blocks=100, active_decode_blocks=blocks)
    async with remote_by("roomy", load) as (remote, came):
        task = asyncio.create_task(remote.prefill(parsed_request(100), choice()))
        await until(lambda: bool(queue.waiting) or task.done())
        assert (len(queue.waiting), came) == ((1, []) if sent else (0, ["local"]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_other_models_and_calls_are_not_prefilled_remotely(queue: ListQueue) -> None:
    async with routed(FakeEngine("fake", "other"), prefill=apart(wait_s=60)) as site:
        assert (await site.completed(prompt=LONG, model="other"))[0] == 200
        requested = {"model": "fake", "input": LONG}
        assert await site.status("POST", f"{site.base}/v1/embeddings", json=requested) == 200
        assert not queue.waiting
        assert courses(await site.text("/metrics")) == {}


@pytest.mark.parametrize(
    ("prefill", "error", "message"),
    [
        (apart(rule="often"), RouterError, "there is no rule 'often'; choose one of"),
        (Prefill((("fake", "redis:x"),)), BadValueError, "'redis:x' is not a prefill queue"),
        (
            apart(thresholds=(("effective", 1.0),)),
            RouterError,
            "no setting 'effective'; it has decode_blocks_max",
        ),
    ],
)
async def test_wrong_settings_are_refused_at_the_start(
    prefill: Prefill, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        async with routed(FakeEngine(), prefill=prefill):
            pass


async def test_a_threshold_decides_and_changes_while_the_router_runs(queue: ListQueue) -> None:
    few = apart(thresholds=read_thresholds(["effective_max=100000", "ratio_max=2"]), wait_s=0.1)
    async with routed(FakeEngine(), prefill=few) as site:
        assert (await site.completed(prompt=LONG))[0] == 200
        assert courses(await site.text("/metrics")) == {"local": 1}
        rule = f"{site.admin}/prefill"
        async with site.client.put(rule, json={"effective_max": 100}) as answer:
            assert answer.status == 200
            thresholds = (await answer.json())["thresholds"]
            assert thresholds["effective_max"] == 100
            assert thresholds["ratio_max"] == 2  # as it was started
        assert (await site.completed(prompt="another " + LONG))[0] == 200
        assert courses(await site.text("/metrics")) == {"local": 1, "untaken": 1}
        for wrong in ({"effective": 1}, {"effective_max": "many"}, [1]):
            assert await site.status("PUT", rule, json=wrong) == 400
        async with site.client.get(rule) as answer:
            assert (await answer.json())["thresholds"]["effective_max"] == 100


@pytest.mark.parametrize("text", ["effective_max", "=3", "effective_max=many", "a=nan", "a=inf"])
def test_a_threshold_is_a_name_and_a_finite_number(text: str) -> None:
    with pytest.raises(RouterError, match="NAME=NUMBER"):
        read_thresholds([text])
