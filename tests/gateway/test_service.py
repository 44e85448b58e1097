# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway as a process: its queue, its metrics, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import QUICK, routed, until

NAMES = (
    "dynamo_component_router_requests_total",
    "dynamo_component_router_time_to_first_token_seconds_bucket",
    "dynamo_component_router_inter_token_latency_seconds_bucket",
    "dynamo_component_router_input_sequence_tokens_bucket",
    "dynamo_component_router_output_sequence_tokens_bucket",
    "dynamo_component_router_kv_hit_rate_bucket",
    "dynamo_component_router_cached_tokens_bucket",
    "dynamo_router_overhead_block_hashing_ms_bucket",
    "dynamo_router_overhead_indexer_find_matches_ms_bucket",
    "dynamo_router_overhead_seq_hashing_ms_bucket",
    "dynamo_router_overhead_scheduling_ms_bucket",
    "dynamo_router_overhead_total_ms_bucket",
    "dynamo_frontend_worker_active_decode_blocks",
    "dynamo_frontend_worker_active_prefill_tokens",
    "dynamo_frontend_worker_last_time_to_first_token_seconds",
    "dynamo_frontend_worker_last_inter_token_latency_seconds",
    "dynamo_frontend_router_queue_pending_requests",
    "dynamo_kv_hit_rate",
    "dynamo_routing_latency_seconds_bucket",
    "beluga_gateway_worker_kv_usage_ratio",
    "beluga_gateway_worker_kv_blocks",
)


async def test_requests_wait_in_order_for_full_workers() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    limits = dataclasses.replace(QUICK, inflight_max=2, queued_max=3)
    async with routed(engine, limits=limits) as site:
        requests = []
        for number in range(5):
            requests.append(asyncio.create_task(site.completed(prompt=str(number))))
            await until(lambda: site.service.pending() + site.inflight() == len(requests))
        assert site.counts() == [2]
        assert "pending_requests 3.0" in await site.text("/metrics")
        status, body = await site.completed()
        assert status == 503
        assert "3 requests are waiting already" in json.loads(body)["error"]["message"]
        engine.faults.hold.set()
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 5
        assert [body["prompt"] for body in engine.seen] == list("01234")


async def test_a_request_that_waited_too_long_gets_retry_after() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    limits = dataclasses.replace(QUICK, inflight_max=1, queue_s=0.2)
    async with routed(engine, limits=limits) as site:
        first = asyncio.create_task(site.completed())
        await until(lambda: site.inflight() == 1)
        async with site.complete() as answer:
            assert answer.status == 503
            assert "Retry-After" in answer.headers
        engine.faults.hold.set()
        assert (await first)[0] == 200
        assert site.service.pending() == 0


async def test_a_client_that_disconnects_while_waiting_leaves_no_state() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine, limits=dataclasses.replace(QUICK, inflight_max=1)) as site:
        first = asyncio.create_task(site.completed())
        await until(lambda: site.inflight() == 1)
        waiting = asyncio.create_task(site.completed())
        await until(lambda: site.service.pending() == 1)
        waiting.cancel()
        await until(lambda: site.service.pending() == 0)
        engine.faults.hold.set()
        assert (await first)[0] == 200
        assert (await site.completed())[0] == 200
        assert site.counts() == [2]


async def test_metrics_have_dynamos_names() -> None:
    engine = FakeEngine()
    engine.faults.pause_s = 0.02
    engine.metrics = (
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0\n'
        'vllm:prefix_cache_queries_total{engine="0"} 1000.0\n'
        'vllm:prefix_cache_hits_total{engine="0"} 300.0\n'
        'vllm:external_prefix_cache_hits_total{engine="0"} 200.0\n'
    )
    async with routed(engine) as site:
        assert (await site.completed())[0] == 200
        await until(lambda: [e.num_requests_waiting for e in site.service.loads().values()] == [2])
        text = await site.text("/metrics")
        assert [name for name in NAMES if f"\n{name}" not in text] == []
        worker = f'{{worker="{engine.url}"}}'
        assert f"dynamo_kv_hit_rate{worker} 0.5" in text
        assert f"beluga_gateway_worker_kv_usage_ratio{worker} 0.25" in text
        assert f"beluga_gateway_worker_kv_blocks{worker} 400.0" in text
        assert 'dynamo_component_router_requests_total{model="fake",status="200"} 1.0' in text
        assert 'router_output_sequence_tokens_sum{model="fake"} 5.0' in text
        assert "dynamo_routing_latency_seconds_count 1.0" in text


async def test_shutdown_completes_requests_and_rejects_new_ones() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine) as site:
        pending = asyncio.create_task(site.completed())
        await until(lambda: site.inflight() == 1)
        leaving = asyncio.create_task(site.service.drain())
        await asyncio.sleep(0)
        assert (await site.completed())[0] == 503
        async with site.client.get(f"{site.base}/ready") as answer:
            assert answer.status == 503
        assert await site.text("/health") == ""
        assert not leaving.done()
        engine.faults.hold.set()
        assert (await pending)[1].endswith(b"[DONE]\n\n")
        await leaving


async def test_the_wait_at_shutdown_is_bounded() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine, limits=dataclasses.replace(QUICK, drain_s=0.2)) as site:
        pending = asyncio.create_task(site.completed())
        await until(lambda: site.inflight() == 1)
        await site.service.drain()
        assert not pending.done()
        pending.cancel()


async def test_a_router_without_workers_is_not_ready_and_counts_rejections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    async with routed(engine) as site:
        async with site.client.get(f"{site.base}/ready") as answer:
            assert answer.status == 200
        async with site.client.get(f"{site.base}/v1/models/none") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["param"] == "model"
        engine.faults.healthy = False
        await until(lambda: not any(e.serving for e in site.service.fleet))
        async with site.client.get(f"{site.base}/ready") as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert "none of 1 workers is up" in await answer.text()
        monkeypatch.setattr(site.service.fleet, "models", lambda: 1 / 0)
        async with site.client.get(f"{site.base}/v1/models") as answer:
            assert answer.status == 500
            assert "see its log" in await answer.text()
        text = await site.text("/metrics")
        assert 'beluga_gateway_refused_total{status="500"} 1.0' in text
        assert 'beluga_gateway_refused_total{status="503"} 1.0' in text


@pytest.mark.parametrize("retries", [0, 1])
async def test_retries_use_the_configured_number_of_other_workers(retries: int) -> None:
    engines = [FakeEngine() for _ in range(3)]
    limits = dataclasses.replace(QUICK, retries=retries, health_interval_s=60)
    async with routed(*engines, limits=limits) as site:
        for engine in engines:
            await engine.__aexit__()
        status, body = await site.completed()
        assert status == 502
        assert "no worker responds" in json.loads(body)["error"]["message"]
        tried = re.findall(r"worker_retries_total{.*} (.*)", await site.text("/metrics"))
        assert sum(map(float, tried)) == retries + 1


def listening(child: Any) -> str:
    """Return the address at which a started ``beluga gateway`` reports that it listens."""
    for line in child.stderr:
        if line.startswith("routing on "):
            return str(line.split()[2].rstrip(";"))
    raise AssertionError("it ended")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_command_serves_until_sigterm(start: Callable[..., Any], host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    child = start(
        *("gateway", "--worker", "http://127.0.0.1:9", "--host", host, "--port", 0),
        *("--admin", "127.0.0.1:0"),
    )
    base = listening(child)
    with urllib.request.urlopen(f"{base}/health", timeout=60) as answer:  # noqa: S310
        assert answer.status == 200
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--worker", "ftp://x"],
            "'ftp://x' is not an engine's URL; give http://HOST:PORT",
        ),
        (["--policy", "best"], "there is no policy 'best'"),
        (["--worker", "http://h:1", "--tokenizer", "/nowhere"], "/nowhere"),
        (
            ["--worker", "http://h:1", "--host", "192.0.2.1"],
            "cannot listen on 192.0.2.1 port 0 (Cannot assign requested address); give another",
        ),
    ],
)
def test_a_usage_error_is_one_line(run: Callable[..., Any], words: list[str], message: str) -> None:
    ended = run("gateway", "--port", 0, *words)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
