# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A gateway of several processes behaves like one: limits, metrics, workers and their caches."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import aiohttp
from fake_engine import FakeEngine
from routed import run
from test_few_files import addresses

PROCESSES = 2
MANY = 40
"""Connections: the probability that the kernel gives all of them to one process is 2 ** -39."""
WAIT_S = 60.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.02)


def children(parent: int) -> list[int]:
    """Return the pids of a process's children."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in listed.split()]


def total(metrics: str, name: str) -> float:
    """Return the sum of a metric's series."""
    found = re.findall(rf"^{name}(?:{{.*}})? (.*)$", metrics, re.MULTILINE)
    return sum(map(float, found))


class Processes:
    """A gateway of two processes. Each of its requests has a connection of its own."""

    def __init__(self, client: aiohttp.ClientSession, child: Any, base: str, admin: str) -> None:
        self.client, self.child, self.base, self.admin = client, child, base, admin

    async def complete(self, **more: Any) -> int:
        """Return the status of a completion."""
        requested = {"model": "fake", "prompt": "a", **more}
        async with self.client.post(f"{self.base}/v1/completions", json=requested) as answer:
            await answer.read()
            return answer.status

    async def text(self, path: str) -> str:
        async with self.client.get(self.base + path) as answer:
            assert answer.status == 200, path
            return await answer.text()

    async def total(self, name: str) -> float:
        return total(await self.text("/metrics"), name)

    async def workers(self) -> list[dict[str, Any]]:
        async with self.client.get(f"{self.admin}/workers") as answer:
            found: list[dict[str, Any]] = await answer.json()
            return found

    async def change(self, method: str, path: str, body: object = None) -> Any:
        async with self.client.request(method, self.admin + path, json=body) as answer:
            return answer.status, await answer.json()

    async def up(self) -> None:
        """Wait until every process has found all engines up."""

        async def is_up() -> bool:
            return all(one["health"] == "up" for one in await self.workers())

        await until(is_up)


@asynccontextmanager
async def started(
    start: Callable[..., Any], *engines: FakeEngine, options: tuple[object, ...] = ()
) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        child = start(
            *("gateway", "--processes", PROCESSES, "--port", 0, "--admin", "127.0.0.1:0"),
            *("--health-interval", 0.1, "--drain", 30),
            *(word for engine in engines for word in ("--worker", engine.url)),
            *options,
        )
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        base, admin = await asyncio.to_thread(addresses, child)
        gateway = Processes(client, child, base, admin)
        await gateway.up()
        yield gateway


def test_metrics_are_those_of_all_processes(start: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with started(start, FakeEngine(), FakeEngine()) as gateway:
            assert len(children(gateway.child.pid)) == PROCESSES
            assert [await gateway.complete() for _ in range(MANY)] == [200] * MANY
            for _ in range(MANY):
                metrics = await gateway.text("/metrics")
                assert total(metrics, "dynamo_component_router_requests_total") == MANY
                assert total(metrics, "dynamo_routing_latency_seconds_count") == MANY
                assert total(metrics, "beluga_gateway_worker_up") == 2
                assert total(metrics, "beluga_gateway_process_restarts_total") == 0

    run(scenario)


def test_the_limit_of_a_worker_holds_for_all_processes_and_freed_slots_wake_all(
    start: Callable[..., Any],
) -> None:
    most = 4

    async def scenario() -> None:
        engine = FakeEngine()
        engine.faults.hold = asyncio.Event()
        options = ("--max-inflight", most, "--policy", "round-robin")
        async with started(start, engine, options=options) as gateway:
            requests = []
            pending = "dynamo_frontend_router_queue_pending_requests"
            for number in range(MANY):
                requests.append(asyncio.create_task(gateway.complete(stream=True)))

                async def is_there(sent: int = number + 1) -> bool:
                    return engine.under_way + await gateway.total(pending) == sent

                await until(is_there)
            assert engine.under_way == most
            (worker,) = await gateway.workers()
            assert worker["requests"] == most
            engine.faults.hold.set()
            assert await asyncio.gather(*requests) == [200] * MANY

    run(scenario)


def test_changes_of_operators_reach_all_processes(start: Callable[..., Any]) -> None:
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        async with second, started(start, first) as gateway:
            status, made = await gateway.change("POST", "/workers", {"url": second.url})
            assert (status, made["id"]) == (201, 2)
            assert (await gateway.change("POST", "/workers", {"url": second.url}))[0] == 400
            await gateway.up()
            assert (await gateway.change("POST", "/workers/1/drain"))[0] == 200
            assert [await gateway.complete() for _ in range(MANY)] == [200] * MANY
            assert not first.seen
            assert len(second.seen) == MANY

            async def is_gone() -> bool:
                return [one["id"] for one in await gateway.workers()] == [2]

            await until(is_gone)
            assert (await gateway.change("DELETE", "/workers/2"))[0] == 200
            assert await gateway.workers() == []
            assert {await gateway.complete() for _ in range(MANY)} == {503}

    run(scenario)


def test_a_drained_worker_leaves_after_the_last_request_of_any_process(
    start: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.faults.hold = asyncio.Event()
        async with started(start, engine) as gateway:
            requested = [asyncio.create_task(gateway.complete(stream=True)) for _ in range(MANY)]

            async def all_run() -> bool:
                return engine.under_way == MANY

            await until(all_run)
            status, worker = await gateway.change("POST", "/workers/1/drain")
            assert status == 200
            assert (worker["draining"], worker["requests"]) == (True, MANY)
            assert [one["draining"] for one in await gateway.workers()] == [True]
            engine.faults.hold.set()
            assert await asyncio.gather(*requested) == [200] * MANY

            async def is_gone() -> bool:
                return await gateway.workers() == []

            await until(is_gone)

    run(scenario)


def test_a_replaced_process_has_the_changes_of_operators(
    start: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        async with second, started(start, first) as gateway:
            assert [await gateway.complete() for _ in range(MANY)] == [200] * MANY
            assert (await gateway.change("POST", "/workers", {"url": second.url}))[0] == 201
            assert (await gateway.change("DELETE", "/workers/1"))[0] == 200
            await gateway.up()
            counted = "dynamo_component_router_requests_total"
            assert await gateway.total(counted) == MANY
            for restarts in (1, 2):
                before = children(gateway.child.pid)
                os.kill(before[0], signal.SIGKILL)

                async def is_replaced(old: list[int] = before, most: int = restarts) -> bool:
                    now = children(gateway.child.pid)
                    replaced = len(now) == PROCESSES and old[0] not in now
                    name = "beluga_gateway_process_restarts_total"
                    return replaced and await gateway.total(name) == most

                await until(is_replaced)
            await gateway.up()
            assert await gateway.total(counted) == MANY, "the counts of an ended process are lost"
            assert [await gateway.complete() for _ in range(MANY)] == [200] * MANY
            assert len(second.seen) == MANY

    run(scenario)


def test_connections_to_an_ended_process_wait_for_its_replacement(
    start: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        async with started(start, FakeEngine()) as gateway:
            os.kill(children(gateway.child.pid)[0], signal.SIGKILL)
            requested = [gateway.complete() for _ in range(MANY)]
            statuses = await asyncio.gather(*requested, return_exceptions=True)
            lost = [one for one in statuses if one not in (200, 503)]  # 503: not checked yet
            # Those that it had accepted before the kill end with it
            assert all(isinstance(one, aiohttp.ClientConnectionError) for one in lost)
            await gateway.up()
            assert [await gateway.complete() for _ in range(MANY)] == [200] * MANY

    run(scenario)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_end_before_the_processes_do(
    start: Callable[..., Any], number: signal.Signals
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.faults.hold = asyncio.Event()
        async with started(start, engine) as gateway:
            requested = [asyncio.create_task(gateway.complete(stream=True)) for _ in range(8)]

            async def all_run() -> bool:
                return engine.under_way == len(requested)

            await until(all_run)
            processes = children(gateway.child.pid)
            gateway.child.send_signal(number)

            async def all_refuse() -> bool:
                try:
                    return await gateway.complete() == 503
                except aiohttp.ClientConnectionError:
                    return True

            await until(all_refuse)
            engine.faults.hold.set()
            assert await asyncio.gather(*requested) == [200] * len(requested)
            _, log = await asyncio.to_thread(gateway.child.communicate, None, WAIT_S)
            assert gateway.child.returncode == 0, log
            assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]

    run(scenario)


def test_the_processes_end_with_their_supervisor(start: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with started(start, FakeEngine()) as gateway:
            processes = children(gateway.child.pid)
            gateway.child.send_signal(signal.SIGKILL)

            async def none_runs() -> bool:
                return not [pid for pid in processes if is_running(pid)]

            await until(none_runs)

    run(scenario)


def is_running(pid: int) -> bool:
    """Return whether a process exists, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_response_is_found_at_its_worker_by_all_processes(start: Callable[..., Any]) -> None:
    async def scenario() -> None:
        engines = [FakeEngine() for _ in range(4)]
        async with started(start, *engines, options=("--policy", "round-robin")) as gateway:
            url = f"{gateway.base}/v1/responses"
            for _ in range(MANY):
                async with gateway.client.post(url, json={"model": "fake"}) as answer:
                    made = await answer.json()
                async with gateway.client.get(f"{url}/{made['id']}") as answer:
                    assert answer.status == 200
                    assert (await answer.json())["at"] == made["at"]

    run(scenario)


@pytest.mark.parametrize("policy", ["cache-aware", "cache-aware-tree"])
def test_a_prefix_is_found_at_its_worker_by_all_processes(
    start: Callable[..., Any], policy: str
) -> None:
    """Without KV events, a process learns from the others where prompts were sent."""

    async def scenario() -> None:
        engines = [FakeEngine() for _ in range(4)]
        async with started(start, *engines, options=("--policy", policy)) as gateway:
            for number in range(4):
                for engine in engines:
                    engine.seen.clear()
                prompt = f"{number} " * 4000
                for _ in range(10):
                    assert await gateway.complete(prompt=prompt) == 200
                assert sorted(len(engine.seen) for engine in engines) == [0, 0, 0, 10]

    run(scenario)


def test_a_changed_remote_prefill_rule_applies_in_all_processes(start: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with started(start, FakeEngine()) as gateway:
            status, rule = await gateway.change("PUT", "/prefill", {"effective_max": 4096})
            assert status == 200
            assert rule["thresholds"]["effective_max"] == 4096
            assert (await gateway.change("PUT", "/prefill", {"none": 1}))[0] == 400
            assert (await gateway.change("GET", "/prefill"))[1] == rule
            assert (await gateway.change("GET", "/pool"))[0] == 404

    run(scenario)


def test_the_port_of_another_gateway_is_rejected(
    start: Callable[..., Any], run: Callable[..., Any]
) -> None:
    child = start("gateway", "--processes", 2, "--port", 0, "--admin", "127.0.0.1:0")
    port = addresses(child)[0].rpartition(":")[2]
    other = run("gateway", "--processes", 2, "--port", port, "--admin", "127.0.0.1:0")
    assert other.returncode == 1
    assert f"port {port} (Address already in use)" in other.stderr


def test_an_error_at_the_start_is_reported_once(run: Callable[..., Any]) -> None:
    found = run(
        *("gateway", "--processes", 2, "--port", 0, "--admin", ""),
        *("--worker", "http://127.0.0.1:9", "--prefill-queue", "m=nonsense://x"),
    )
    assert found.returncode == 1
    assert found.stderr.count("error:") == 1
    assert "'nonsense://x' is not a prefill queue" in found.stderr
    assert "Exception ignored" not in found.stderr  # in the processes


def test_workers_of_a_file_join_all_processes(start: Callable[..., Any], tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        file = tmp_path / "workers"
        async with first, second:
            file.write_text(f"{first.url}\n")
            async with started(start, options=("--workers-file", file)) as gateway:
                file.write_text(f"{second.url}\n")

                async def has_changed() -> bool:
                    return [(one["url"], one["health"]) for one in await gateway.workers()] == [
                        (second.url, "up")
                    ]

                await until(has_changed)
                first.seen.clear()
                assert [await gateway.complete() for _ in range(MANY)] == [200] * MANY
                assert not first.seen

    run(scenario)
