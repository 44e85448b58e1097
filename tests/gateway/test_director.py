# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The director: placements, wait queue, limits; which engine made which response. It chooses as the
simulator does for the same trace and the same events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import numpy as np
from fake_engines import FakeEngine
from routed import ANY_PORT, Site, routed, until

from beluga.errors import AllWorkersBusyError, EventError, ObjectiveError, RouterError
from beluga.gateway import EngineSpec, Limits, Service, Settings
from beluga.gateway.attempts import Attempts
from beluga.gateway.cache import Cache
from beluga.gateway.director import RECOVERY_S, Director, Placement, Responses, WaitQueue
from beluga.gateway.engine import NOBODY, Engine, GatewayClient, Health
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Latency, Metrics
from beluga.gateway.parsed_request import ParsedRequest, response_of
from beluga.gateway.protocol import Refusal
from beluga.router import (
    BlockHasher,
    Choice,
    Constraints,
    Overlap,
    Query,
    Removed,
    Router,
    RouterEvent,
    Stored,
    Tier,
    Worker,
)
from beluga.simulate import Options, Trace, TraceEntry, make_trace
from beluga.simulate.cluster import Caches, Cluster

PARSED = ParsedRequest("/p", b"", "m", isl=40)
ANY = ParsedRequest("/p", b"", None, isl=40)


class FakeRouter:
    """Takes the allowed worker with the lowest number, or raises what is in ``raises``."""

    def __init__(self) -> None:
        self.raises: list[Exception] = []
        self.allowed: list[set[int]] = []
        self.workers: set[int] = set()
        self.freed: list[int] = []
        self.prefilled = True
        self.tracker = self

    def add_worker(self, worker: Worker) -> None:
        self.workers.add(worker.worker_id)

    def remove_worker(self, worker: Worker) -> None:
        self.workers.remove(worker.worker_id)

    def route(self, name: int, query: Query, constraints: Constraints, *, now: float) -> Choice:
        assert constraints.allowed is not None
        self.allowed.append(set(constraints.allowed))
        if self.raises:
            raise self.raises.pop(0)
        return Choice(Worker(min(constraints.allowed)), Overlap(), 0.25)

    def free(self, name: int, now: float) -> None:
        self.freed.append(name)

    def prefill_done(self, name: int, now: float) -> bool:
        return self.prefilled


def attempts(
    tried: Iterable[int], client: GatewayClient = NOBODY, delays: Mapping[int, float] | None = None
) -> Attempts:
    """Return the state of a request that these workers have failed."""
    made = Attempts(client)
    made.tried.update(tried)
    made.paused_until.update(delays or {})
    return made


class Desk:
    """A director with its parts, and three engines that are up and have the model m."""

    def __init__(self, *specs: EngineSpec, **limits: Any) -> None:
        self.router, self.metrics, self.fleet = FakeRouter(), Metrics(), Fleet()
        self.wait_queue: WaitQueue[Placement] = WaitQueue(9, order="fcfs", give_back=Placement.end)
        self.looks = 0
        self.looks_in: list[float] = []
        look = self.wait_queue.look

        def counted() -> None:
            self.looks += 1
            look()

        self.wait_queue.look = counted  # type: ignore[method-assign]
        self.wait_queue.look_in = self.looks_in.append  # type: ignore[method-assign]
        cache = Cache(
            wanted=False,
            block_size=16,
            announced=False,
            is_adapter=self.fleet.is_adapter,
            space_of=lambda model: None,
            metrics=self.metrics,
        )
        self.director = Director(
            fleet=self.fleet,
            router=cast("Router", self.router),
            cache=cache,
            metrics=self.metrics,
            limits=Limits(**limits),
            wait_queue=self.wait_queue,
        )
        for spec in specs or [EngineSpec(f"http://{name}", ("m",)) for name in "abc"]:
            self.fleet.add(spec).passed(0)

    @property
    def engines(self) -> list[Engine]:
        return list(self.fleet)

    async def place(
        self, parsed: ParsedRequest = PARSED, tried: frozenset[int] = frozenset()
    ) -> Placement:
        return await self.director.place(parsed, attempts(tried))

    async def refused(self, parsed: ParsedRequest = PARSED) -> tuple[int, str]:
        """Return status and text of a refusal, which must come at once."""
        with pytest.raises(Refusal) as caught:
            await asyncio.wait_for(self.place(parsed), 20)
        return caught.value.status, str(caught.value)


async def test_a_request_is_counted_from_its_placement_to_its_end() -> None:
    desk = Desk()
    placement = await desk.place()
    engine = desk.engines[0]
    assert placement.engine is engine
    assert (desk.director.placed, engine.inflight) == (1, 1)
    assert (engine.hit_tokens, engine.prompt_tokens) == (10, 40)
    async with placement:
        placement.answered(200)
        assert desk.router.freed == []
    assert (desk.director.placed, engine.inflight, desk.looks) == (0, 0, 1)
    assert desk.router.freed == [0]
    async with await desk.place():
        pass
    assert desk.router.freed == [0, 1]
    text = desk.metrics.text().decode()
    assert 'requests_total{model="m",status="200"} 1' in text
    assert 'requests_total{model="m",status="cancelled"} 1' in text
    assert "dynamo_router_overhead_scheduling_ms_count 2" in text


async def test_a_worker_that_just_failed_is_tried_only_as_the_last_one() -> None:
    desk = Desk()
    assert (await desk.place(tried=frozenset({1}))).engine is desk.engines[1]
    assert (await desk.place(tried=frozenset({1, 2, 3}))).engine is desk.engines[0]
    assert desk.router.allowed == [{2, 3}, {1, 2, 3}]


async def test_a_full_engine_gets_no_request_until_one_ends() -> None:
    desk = Desk(EngineSpec("http://a", ("m",)), inflight_max=2)
    first, _ = await desk.place(), await desk.place()
    third = asyncio.ensure_future(desk.place())
    await asyncio.sleep(0)
    assert len(desk.wait_queue) == 1
    fourth = asyncio.ensure_future(desk.place())  # queued after the waiting request
    await asyncio.sleep(0)
    first.end()
    await third
    assert len(desk.wait_queue) == 1
    fourth.cancel()


async def test_busy_workers_make_a_request_wait_until_a_prefill_is_done() -> None:
    desk = Desk()
    under_way = await desk.place()
    desk.router.raises = [AllWorkersBusyError("all are busy")]
    waits = asyncio.ensure_future(desk.place())
    await asyncio.sleep(0)
    desk.router.prefilled = False
    under_way.first_token()
    assert desk.looks == 0
    desk.router.prefilled = True
    under_way.first_token()
    assert (await waits).engine is desk.engines[0]


async def test_an_objective_that_cannot_be_met_is_a_429() -> None:
    desk = Desk()
    desk.router.raises = [ObjectiveError("too late already")]
    with pytest.raises(Refusal, match="too late") as refused:
        await desk.place()
    answer = refused.value.response()
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    assert desk.director.placed == 0


async def test_a_request_that_cannot_be_placed_is_rejected_with_the_reason() -> None:
    empty = Desk(EngineSpec("http://a"))
    assert await empty.refused() == (503, "no worker is up yet")
    empty.fleet.remove(empty.engines[0])
    assert await empty.refused() == (503, "no worker is up yet")
    desk = Desk()
    assert (await desk.refused(ParsedRequest("/p", b"", "other")))[0] == 404
    for engine, why in zip(desk.engines, ("late", "", "gone"), strict=True):
        engine.fail(why)
    assert await desk.refused() == (503, "none of 3 workers is up: gone; late")
    mixed = Desk(EngineSpec("http://a", ("m",)), EngineSpec("http://b", ("n",)))
    assert (await mixed.refused(ANY))[0] == 400
    named = Desk(EngineSpec("http://a", ("m",)), EngineSpec("http://b"))
    assert (await named.place(ANY)).engine is named.engines[0]


async def test_engines_are_checked_when_the_first_cooldown_ends() -> None:
    desk = Desk()
    for engine, seconds in zip(desk.engines, (50, 20, 0), strict=True):
        engine.cool_down(seconds)
    desk.engines[2].fail("gone")
    waits = asyncio.ensure_future(desk.place())
    await asyncio.sleep(0)
    assert len(desk.looks_in) == 1
    assert 15 < desk.looks_in[0] <= 20
    waits.cancel()


async def test_a_request_for_one_worker_does_not_block_others() -> None:
    desk = Desk(*(EngineSpec(f"http://{name}", ("m",)) for name in "ab"), inflight_max=1)
    desk.director.responses.made(b'{"id": "resp_1"}', 1)
    desk.engines[0].inflight = 1
    about = ParsedRequest("/v1/responses/resp_1", b"", None, response="resp_1", isl=40)
    waits = asyncio.ensure_future(desk.place(about))
    await asyncio.sleep(0)
    assert not waits.done()
    placed = await asyncio.wait_for(desk.place(ANY), 20)
    assert placed.engine is desk.engines[1]
    later = asyncio.ensure_future(desk.place(ANY))
    await asyncio.sleep(0)
    desk.director.end(99, desk.engines[0])  # either of them may get the place
    assert (await asyncio.wait_for(waits, 20)).engine is desk.engines[0]
    placed.end()
    assert (await asyncio.wait_for(later, 20)).engine is desk.engines[1]


async def test_workers_with_a_retry_after_are_skipped() -> None:
    desk = Desk()
    placed = await desk.director.place(PARSED, attempts({1, 2}, delays={1: 9.0, 2: 9.0}))
    assert placed.engine is desk.engines[2]
    assert desk.director.has_other(PARSED, {1, 2})
    assert not desk.director.has_other(PARSED, {1, 2, 3})
    desk.engines[2].fail("gone")
    assert not desk.director.has_other(PARSED, {1, 2})


async def test_a_client_avoids_a_worker_only_if_there_is_another() -> None:
    desk = Desk(*(EngineSpec(f"http://{name}", ("m",)) for name in "ab"))
    first, second = GatewayClient("one", "1"), GatewayClient("two", "2")
    desk.engines[0].busy(first, 60)
    for client, expected in ((first, {2}), (second, {1, 2})):
        await desk.director.place(PARSED, Attempts(client))
        assert desk.router.allowed[-1] == expected
    await desk.director.place(PARSED, attempts({2}, first))
    assert desk.router.allowed[-1] == {1}


@pytest.mark.parametrize(
    ("tried", "up", "patience_s"),
    [(frozenset({1}), False, RECOVERY_S), (frozenset({1}), True, 7.0), (frozenset(), True, 7.0)],
)
async def test_the_wait_for_a_failed_engine_is_short(
    tried: frozenset[int], up: bool, patience_s: float
) -> None:
    desk = Desk(EngineSpec("http://a", ("m",)), queue_s=7.0, inflight_max=1)
    desk.engines[0].inflight = 1
    if not up:
        desk.engines[0].fail("gone")
    patience: list[float] = []

    async def wait(*_: object, patience_s: float, **__: object) -> Placement:
        patience.append(patience_s)
        raise Refusal(503, "waited")

    desk.wait_queue.wait = wait  # type: ignore[assignment]
    with pytest.raises(Refusal, match="waited"):
        await desk.place(tried=tried)
    assert patience == [patience_s]


async def test_inter_token_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.perf_counter = clock.monotonic = lambda: clock.now
    monkeypatch.setattr("beluga.gateway.director.time", clock)
    desk = Desk()
    async with await desk.place() as placement:
        clock.now = 103.0
        placement.first_token()
        placement.tokens(1)
        clock.now = 104.0
        placement.tokens(2)
        placement.tokens(0)
        clock.now = 105.0
        placement.tokens(1)
    assert desk.metrics.latencies() == (Latency(3.0, 1.0), Latency(2.0, 3.0))
    assert 'output_sequence_tokens_sum{model="m"} 4' in desk.metrics.text().decode()


async def test_a_removed_engine_is_dropped_and_others_are_checked() -> None:
    desk = Desk()
    assert desk.router.workers == {1, 2, 3}
    await desk.place()
    assert "http://a" in desk.metrics.text().decode()
    desk.fleet.remove(desk.engines[0])
    assert desk.router.workers == {2, 3}
    assert "http://a" not in desk.metrics.text().decode()
    assert desk.looks == 1


ORIGIN = {"Origin": "http://a.example"}


def test_the_last_responses_are_stored() -> None:
    known = Responses(limit=2)
    for number in range(3):
        known.made(b'{"id":"resp_%d","object":"response"}' % number, number)
    known.made(b'data: {"type": "response.created", "response": {"id": "resp_1"}}\n\n', 7)
    known.made(b'{"id":"chatcmpl-1"}', 8)
    assert [known.worker_of(f"resp_{number}") for number in range(3)] == [None, 7, 2]
    assert known.worker_of(None) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses", None),
        ("/v1/responses/", None),
        ("/v1/completions", None),
    ],
)
def test_paths_name_a_response(path: str, name: str | None) -> None:
    assert response_of(path) == name


async def made(site: Site, *, stream: bool, **more: Any) -> tuple[str, str]:
    """Have a response made. Returns its name, and the engine that made it."""
    requested = {"model": "fake", "input": "hello", "stream": stream, **more}
    async with site.client.post(f"{site.base}/v1/responses", json=requested) as answer:
        assert answer.status == 200, await answer.text()
        text = await answer.text()
    response = json.loads(text.split("data: ", 1)[1])["response"] if stream else json.loads(text)
    return response["id"], response["at"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_for_a_response_goes_to_the_engine_that_made_it(stream: bool) -> None:
    async with routed(*(FakeEngine() for _ in range(3))) as site:
        names = [await made(site, stream=stream) for _ in range(6)]
        assert len({url for _, url in names}) == 3
        for name, url in names:
            for method, path in (("GET", name), ("POST", f"{name}/cancel")):
                target = f"{site.base}/v1/responses/{path}"
                async with site.client.request(method, target) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["at"] == url
            following = await made(site, stream=stream, previous_response_id=name)
            assert following[1] == url
        async with site.client.get(f"{site.base}/v1/responses/resp_unknown") as answer:
            assert answer.status == 404
            assert "resp_unknown not found" in await answer.text()
        assert site.inflight() == 0


async def test_a_request_for_a_response_of_a_dead_engine_is_not_rerouted() -> None:
    first, second = FakeEngine(), FakeEngine()
    async with routed(first, second) as site:
        at = {url: name for name, url in [await made(site, stream=False) for _ in range(2)]}
        name = at[first.url]
        first.faults.healthy = False
        await until(lambda: [e.serving for e in site.service.fleet].count(True) == 1)
        assert await site.status("GET", f"{site.base}/v1/responses/{name}") == 503


async def test_responses_of_the_router_have_cors_headers() -> None:
    async with routed(FakeEngine(), FakeEngine("other")) as site:
        for path, status in (("models", 200), ("models/fake", 200), ("models/none", 404)):
            async with site.client.get(f"{site.base}/v1/{path}", headers=ORIGIN) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == "*"
            async with site.client.get(f"{site.base}/v1/{path}") as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers
        requested = ORIGIN | {"Access-Control-Request-Method": "POST"}
        url = f"{site.base}/v1/completions"
        assert (
            await site.status("OPTIONS", url, headers=requested) == 405
        )  # the fake engine's own error: it supports no preflight


# ---- The wait queue.


class Waiting:
    """A wait queue whose requests are placed when their numbers are allowed."""

    def __init__(self, queued_max: int = 3) -> None:
        self.let_in: set[int] = set()
        self.room = -1  # for that many more; below 0 for any number
        self.tried: list[int] = []
        self.back: list[int] = []
        self.wait_queue: WaitQueue[int] = WaitQueue(
            queued_max, order="fcfs", give_back=self.back.append
        )

    def attempt(self, number: int) -> Callable[[], int | None]:
        def attempt() -> int | None:
            self.tried.append(number)
            if number not in self.let_in or self.room == 0:
                return None
            self.room -= 1
            return number

        return attempt

    async def enter(
        self,
        number: int,
        *,
        patience_s: float = 60.0,
        client: str = "",
        address: str | None = None,
        line: str = "m",
    ) -> asyncio.Task[int]:
        """Add a request that waits, of a client with an address of its own if there is none."""
        task = asyncio.ensure_future(
            self.wait_queue.wait(
                line,
                Query(16, 16),
                self.attempt(number),
                overlap=0,
                patience_s=patience_s,
                client=GatewayClient(client, client if address is None else address),
            )
        )
        await asyncio.sleep(0)
        return task


async def test_requests_leave_the_queue_in_order() -> None:
    waiting = Waiting()
    first, second = await waiting.enter(1), await waiting.enter(2)
    assert (len(waiting.wait_queue), waiting.wait_queue.waiting("m")) == (2, True)
    assert not waiting.wait_queue.waiting("other")
    waiting.let_in = {2}
    waiting.wait_queue.look()
    assert waiting.tried == [1]
    waiting.let_in = {1, 2}
    waiting.wait_queue.look()
    assert (await first, await second) == (1, 2)
    assert (len(waiting.wait_queue), waiting.wait_queue.waiting("m")) == (0, False)


async def test_lines_take_turns() -> None:
    """A worker has room for one request at a time; that of the line served before comes last."""
    waiting = Waiting(queued_max=9)
    tasks = {n: await waiting.enter(n, line=f"m{n % 2}") for n in (1, 3, 5, 2, 4, 6)}
    served: list[int] = []
    while len(served) < len(tasks):
        waiting.let_in, waiting.room = set(tasks), 1
        waiting.wait_queue.look()
        await asyncio.sleep(0)
        served += [n for n, task in tasks.items() if task.done() and n not in served]
    assert served == [1, 2, 3, 4, 5, 6]


async def test_clients_take_turns() -> None:
    """An address with many requests, or with many clients, has the turns of any other."""
    waiting = Waiting(queued_max=99)
    clients = {"a": "1", "b": "1", "c": "2", "d": "3"}  # and their addresses
    sent = "aaaabbccccd"
    tasks = {
        n: await waiting.enter(n, client=name, address=clients[name]) for n, name in enumerate(sent)
    }
    served = ""
    while len(served) < len(sent):
        waiting.let_in, waiting.room = set(tasks), 1
        waiting.wait_queue.look()
        await asyncio.sleep(0)
        for n in [n for n, task in tasks.items() if task.done()]:
            served += sent[n]
            del tasks[n]
    assert served == "acdbcacbcaa"
    assert len(waiting.wait_queue) == 0


async def test_no_client_fills_the_queue_alone() -> None:
    """The newest requests of the client with the most are refused, and those of a client that has
    as many are not.
    """
    waiting = Waiting(queued_max=6)
    flood = [await waiting.enter(n, client="a", line=f"m{n % 2}") for n in range(6)]
    others = [await waiting.enter(10 + n, client="b") for n in range(3)]
    third = await waiting.enter(20, client="c")
    assert len(waiting.wait_queue) == 6
    for refused in flood[2:]:
        with pytest.raises(Refusal, match="6 requests are waiting already"):
            await refused
    for client in ("a", "b"):
        with pytest.raises(Refusal, match="6 requests are waiting already"):
            await (await waiting.enter(30, client=client))
    waiting.let_in = {0, 1, 10, 11, 12, 20}
    waiting.wait_queue.look()
    assert [await task for task in (*flood[:2], *others, third)] == [0, 1, 10, 11, 12, 20]
    assert len(waiting.wait_queue) == 0
    assert not any(waiting.wait_queue.waiting(line) for line in ("m", "m0", "m1"))


async def ended(*tasks: asyncio.Task[int]) -> None:
    """Cancel tasks that still wait."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_flood_of_names_does_not_exclude_other_addresses() -> None:
    """Each request of the flood has a name of its own, as a client with many API keys has."""
    waiting = Waiting(queued_max=100)
    flood = [await waiting.enter(n, client=f"{n}", address="1") for n in range(1000)]
    others = [await waiting.enter(1000 + n, client="b", address="2") for n in range(50)]
    await asyncio.sleep(0)
    assert [n for n, task in enumerate(flood) if not task.done()] == list(range(50))
    assert not any(task.done() for task in others)
    for client, address in (("c", "1"), ("b", "2")):
        with pytest.raises(Refusal, match="100 requests are waiting already"):
            await (await waiting.enter(2000, client=client, address=address))
    third = await waiting.enter(2001, client="c", address="3")
    assert not third.done()
    await ended(*flood, *others, third)


async def test_clients_of_one_address_are_fair_to_each_other() -> None:
    """Many clients may come through one proxy."""
    waiting = Waiting(queued_max=6)
    flood = [await waiting.enter(n, client="a", address="1") for n in range(4)]
    direct = [await waiting.enter(10 + n, client="d", address="2") for n in range(2)]
    others = [await waiting.enter(20 + n, client=f"b{n}", address="1") for n in range(2)]
    await asyncio.sleep(0)
    assert [task.done() for task in flood] == [False, False, True, True]
    assert not any(task.done() for task in (*others, *direct))
    direct += [await waiting.enter(30, client="e", address="2")]
    await asyncio.sleep(0)
    assert [task.done() for task in flood] == [False, True, True, True]
    assert not any(task.done() for task in (*others, *direct))
    await ended(*flood, *others, *direct)


async def test_a_canceled_request_releases_its_queue_slot() -> None:
    waiting = Waiting()
    turn = await waiting.enter(1)
    waiting.let_in = {1}
    waiting.wait_queue.look()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert waiting.back == [1]
    two = await waiting.enter(2)
    two.cancel()
    with pytest.raises(asyncio.CancelledError):
        await two
    assert waiting.back == [1]
    assert len(waiting.wait_queue) == 0


async def test_the_error_is_that_of_the_tried_worker() -> None:
    waiting = Waiting()

    def fail() -> int | None:
        raise RouterError("no policy")

    failing = asyncio.ensure_future(
        waiting.wait_queue.wait("m", Query(16, 16), fail, overlap=0, patience_s=60)
    )
    await asyncio.sleep(0)
    turn = await waiting.enter(1)
    waiting.let_in = {1}
    waiting.wait_queue.look()
    with pytest.raises(RouterError, match="no policy"):
        await failing
    assert await turn == 1


async def test_the_earliest_check_wakes_the_queue() -> None:
    waiting = Waiting()
    waiting.let_in = {1, 2}
    turn = await waiting.enter(1)
    waiting.wait_queue.look_in(50)
    waiting.wait_queue.look_in(0.01)
    waiting.wait_queue.look_in(60)
    assert await asyncio.wait_for(turn, 20) == 1
    two = await waiting.enter(2)
    waiting.wait_queue.look_in(0.01)  # a timer that has fired does not prevent a new one
    assert await asyncio.wait_for(two, 20) == 2


# ---- The same choices as in a simulation

BLOCK = 512
GIB = 1 << 30
WORKERS = 3


def chats(seed: int) -> Trace:
    """Create growing chats that arrive faster than they are served."""
    random, prompts, fresh = Random(seed), [], 1
    for chat in range(40):
        blocks = [0]
        for turn in range(3):
            added = random.randint(1, 6)
            blocks = [*blocks, *range(fresh, fresh + added)]
            fresh += added
            size = len(blocks) * BLOCK + random.randint(1, BLOCK - 1)
            prompts.append(TraceEntry(chat * 0.5 + turn * 9.5, size, random.randint(1, 99), blocks))
    return make_trace("chats", BLOCK, prompts, 1.0)


class Clock:
    """Replaces the module ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic


class Recorded(Cluster):
    """A simulation that records the events and requests of its router, and its choices."""

    def __init__(self, trace: Trace, policy: str) -> None:
        options = Options(workers=WORKERS, pool=24 * GIB, hbm=6 * GIB)
        self.steps: list[tuple[str, Any]] = []
        super().__init__(trace, options, policy=policy, memory="pool")
        tracker, route = self.router.tracker, self.router.route
        for name in ("prefill_done", "free", "publish"):
            setattr(tracker, name, self._noting(name, getattr(tracker, name)))

        def routed(request: int, query: Query, *, now: float) -> Choice:
            matches = self._matches(query)
            choice = route(request, query, now=now)
            self.steps.append(("route", (request, query, matches, choice.worker, now)))
            return choice

        self.router.route = routed  # type: ignore[method-assign,assignment]

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self.steps.append((name, arguments))
            return call(*arguments)

        return noted


class Replayed:
    """A gateway that gets the same events, and the same requests from a client."""

    def __init__(self, service: Service, clock: Clock, events_clock: Clock) -> None:
        self.service, self.clock, self.events_clock = service, clock, events_clock
        self.hasher = BlockHasher(block_size=BLOCK)
        self.names: dict[int, int] = {}  # the gateway's loads, by the trace's request

    def prompt(self, query: Query) -> list[int]:
        """Return a prompt's tokens: each of the trace's blocks has its own."""
        whole = [token for block in query.hashes for token in [block % 2**32] * BLOCK]
        return (whole + [2**32 - 1] * query.isl)[: query.isl]

    def announce(self, tokens: list[int], caches: Caches) -> None:
        """Send the events after which the index has the hits of the simulator."""
        local = self.hasher.local(tokens)
        names = self.hasher.sequence(local)
        holders = [(Worker(n + 1), Tier.DEVICE, int(caches.device[n])) for n in range(WORKERS)]
        holders.append((Worker(1), Tier.SHARED, int(caches.far[0])))
        index = self.service.index().indexer
        for worker, tier, lead in holders:
            if lead < len(names):
                with contextlib.suppress(EventError):  # some are not there
                    index.apply(RouterEvent(worker, Removed(names[lead:]), tier=tier))
            if lead:
                index.apply(RouterEvent(worker, Stored(names[:lead], local[:lead]), tier=tier))

    def route(self, request: int, query: Query, caches: Caches, now: float) -> Worker:
        self.clock.now = now
        self.events_clock.now += 1e6  # the predicted blocks have been announced long before
        tokens = self.prompt(query)
        if self.service._router.policy.uses_overlap:
            self.announce(tokens, caches)
        ids = np.asarray(tokens, np.uint32)
        parsed = ParsedRequest("/v1/completions", b"", "m", query.isl, ids)
        placed = self.service._director._try(
            parsed, self.service._cache.query_of(parsed), Attempts()
        )
        assert placed is not None
        self.names[request] = placed._name
        return Worker(placed.choice.worker.worker_id - 1)


POLICIES = (
    *("linear:shared_credit=1", "linear", "linear:shared_credit=0.3,decay=0.5,temperature=0.2"),
    *("lmetric:credit=0.9", "cache-aware:balance_abs=2", "default"),
)


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_gateway_and_the_simulation_choose_the_same_workers(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = Recorded(chats(7), policy)
    simulated.run()
    clock, events_clock = Clock(), Clock()
    monkeypatch.setattr("beluga.gateway.director.time", clock)
    monkeypatch.setattr("beluga.gateway.cache.time", events_clock)

    def play(simulated: Recorded, replayed: Replayed) -> None:
        wanted, got = [], []
        tracker = replayed.service._router.tracker
        for kind, what in simulated.steps:
            if kind == "route":
                request, query, caches, worker, now = what
                wanted.append(worker)
                for engine in replayed.service.fleet:
                    engine.health = Health.UP  # no engine answers the checks here
                got.append(replayed.route(request, query, caches, now))
            elif kind == "publish":
                worker, metrics = what
                tracker.publish(Worker(worker.worker_id + 1), metrics)
            else:
                request, now = what
                getattr(tracker, kind)(replayed.names[request], now)
        assert got == wanted
        assert len(wanted) == 120 - simulated.refused
        assert len(set(wanted)) == WORKERS

    engines = tuple(EngineSpec(f"http://127.0.0.1:{9 + n}", ("m",)) for n in range(WORKERS))
    given = Settings(
        policy=policy, engines=engines, listen=ANY_PORT, admin=None,
        block_size=BLOCK, queue_threshold=0.0, advise_s=0.0, seed=0,
        limits=Limits(health_interval_s=3600, drain_s=0.0),
    )  # fmt: skip
    async with Service(given) as service:
        play(simulated, Replayed(service, clock, events_clock))
