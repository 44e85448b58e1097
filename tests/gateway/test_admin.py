# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The admin API: workers join, leave and drain while the router runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import routed, until


async def test_a_worker_joins_and_leaves() -> None:
    late = FakeEngine()
    async with late, routed(FakeEngine()) as site:
        workers = f"{site.admin}/workers"
        async with site.client.post(workers, json={"url": late.url + "/v1/"}) as answer:
            assert answer.status == 201
            number = (await answer.json())["id"]
        await site.up(2)
        for _ in range(4):
            assert (await site.completed())[0] == 200
        assert len(late.seen) == 2
        async with site.client.delete(f"{workers}/{number}") as answer:
            assert answer.status == 200
        for _ in range(2):
            assert (await site.completed())[0] == 200
        assert len(late.seen) == 2
        assert [worker["requests"] for worker in await site.workers()] == [0]
        assert late.url not in await site.text("/metrics")


async def test_a_drained_worker_completes_its_requests_and_gets_no_new_ones() -> None:
    a, b = FakeEngine(), FakeEngine()
    a.faults.hold = asyncio.Event()
    async with routed(a, b) as site:
        pending = asyncio.create_task(site.completed())
        await until(lambda: a.under_way == 1)
        number = (await site.workers())[0]["id"]
        async with site.client.post(f"{site.admin}/workers/{number}/drain") as answer:
            assert (await answer.json())["draining"] is True
        for _ in range(3):
            assert (await site.completed())[0] == 200
        assert site.counts() == [1, 3]
        assert len(await site.workers()) == 2
        a.faults.hold.set()
        assert (await pending)[1].endswith(b"[DONE]\n\n")
        await until(lambda: len(site.service.fleet) == 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_removed_worker_has_no_metrics_while_its_requests_continue(
    stream: bool,
) -> None:
    engine = FakeEngine()
    engine.faults.hold = engine.faults.hold_first = asyncio.Event()
    async with routed(engine) as site:
        (worker,) = site.service.fleet
        pending = asyncio.create_task(site.completed(stream=stream))
        await until(lambda: engine.under_way == 1)
        number = worker.worker.worker_id
        async with site.client.delete(f"{site.admin}/workers/{number}") as answer:
            assert answer.status == 200
        engine.faults.hold.set()
        assert (await pending)[0] == 200
        await until(lambda: worker.inflight == 0)
        assert engine.url not in await site.text("/metrics")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"url": "nonsense"}, 400),
        ({"url": "http://[::1:8000"}, 400),
        ({"url": "http://127.0.0.1:1", "more": 1}, 400),
        ({}, 400),
    ],
)
async def test_invalid_requests_are_rejected(body: dict[str, object], status: int) -> None:
    async with routed(FakeEngine()) as site:
        async with site.client.post(f"{site.admin}/workers", json=body) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"]
        async with site.client.post(
            f"{site.admin}/workers", data=b'{"url": "http://127.0.0.1:1"}'
        ) as answer:
            assert answer.status == 415  # a web page could cause a browser to send this
        async with site.client.delete(f"{site.admin}/workers/99") as answer:
            assert answer.status == 404
        assert len(await site.workers()) == 1
        async with site.client.get(f"{site.base}/workers") as answer:
            assert answer.status == 404  # clients cannot use it


async def test_a_workers_file_is_followed(tmp_path: Path) -> None:
    a, b = FakeEngine(), FakeEngine()
    path = tmp_path / "workers"
    async with a, b:
        path.write_text(f"# ours\n{a.url}  # the first\n")
        async with routed(engines=(), workers_file=path) as site:
            await site.up(1)
            assert (await site.completed())[0] == 200
            path.write_text(f"{b.url} model=fake\n")
            await until(lambda: [e.url for e in site.service.fleet] == [b.url])
            await site.up(1)
            assert (await site.completed())[0] == 200
            for wrong in ("not a url\n", "http://[::1:8000\n"):
                path.write_text(wrong)
                await asyncio.sleep(1.2)
                assert (await site.completed())[0] == 200
            assert (len(a.seen), len(b.seen)) == (1, 3)
            path.write_text(f"{a.url}\n")
            await until(lambda: [e.url for e in site.service.fleet] == [a.url])


async def test_a_worker_with_invalid_new_settings_keeps_the_old_ones(tmp_path: Path) -> None:
    a, b = FakeEngine(), FakeEngine()
    path = tmp_path / "workers"
    async with a, b:
        path.write_text(f"{a.url}\n")
        async with routed(engines=(), workers_file=path, policy="linear") as site:
            await site.up(1)
            [first] = site.service.fleet
            assert (await site.completed())[0] == 200
            sent = f'beluga_gateway_worker_prompt_tokens_total{{worker="{a.url}"}}'
            assert sent in await site.text("/metrics")
            path.write_text(f"{a.url} events=nonsense\n{b.url}\n")
            await site.up(2)
            assert first in list(site.service.fleet)
            assert sent in await site.text("/metrics")
            path.write_text(f"{a.url} model=fake\n{b.url}\n")
            await until(lambda: first not in list(site.service.fleet))
            await site.up(2)
            assert (await site.completed())[0] == 200
            path.write_text(f"{b.url}\n")
            await until(lambda: [e.url for e in site.service.fleet] == [b.url])


async def test_alert_rules_have_the_targets_of_the_article() -> None:
    async with (
        routed(FakeEngine()) as site,
        site.client.get(f"{site.admin}/alerts") as answer,
    ):
        text = await answer.text()
        for target in ("avg(dynamo_kv_hit_rate) < 0.30", "> 0.005", "> 0.2"):
            assert target in text
