# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service and its settings: options, workers files, start, end."""

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

from click.testing import CliRunner
from fake_engines import FakeEngine
from routed import QUICK, routed, until

from beluga.cli.app import app
from beluga.cli.gateway import gateway
from beluga.errors import RouterError
from beluga.gateway import Address, EngineSpec, Settings, read_engines
from beluga.gateway.cache import Cache
from beluga.gateway.fleet import read_workers, workers_text
from beluga.gateway.metrics import Metrics
from beluga.gateway.settings import read_url
from beluga.simulate import Options

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
    assert ended.returncode == (2 if "--policy" in words else 1)
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_engine_options_have_an_optional_model() -> None:
    assert read_engines(
        ["http://a:1/", "http://a:1/v1"],
        ["m=http://a:1,http://b:2", "n=http://b:2"],
        ["http://b:2=tcp://b:3,tcp://b:4"],
    ) == (
        EngineSpec("http://a:1", ("m",)),
        EngineSpec("http://b:2", ("m", "n"), "tcp://b:3", "tcp://b:4"),
    )


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:1", "ftp://a", "http://", "http://a:x", "http://a:0", "http://a?b"),
        *(
            "http://a:b@c:1",
            "http://a:99999",
            "http://[::1",
            "http://[a]:1",
            "http://\N{ACCOUNT OF}:1",
        ),
    ],
)
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(RouterError, match="URL"):
        read_url(url)


def test_invalid_choices_are_rejected() -> None:
    for workers, models, events in (
        ((), ("m",), ()),
        ((), ("=http://a",), ()),
        ((), ("m=",), ()),
        (("http://a",), (), ("http://a",)),
        (("http://a",), (), ("http://b=tcp://c",)),
        (("http://a",), (), ("http://a=tcp://c", "http://a/=tcp://c,tcp://d")),
    ):
        with pytest.raises(RouterError):
            read_engines(workers, models, events)


def test_each_rank_of_an_engine_may_have_an_endpoint(tmp_path: Path) -> None:
    [engine] = read_engines(
        ["http://a:1"], (), ["http://a:1=tcp://a:5,tcp://a:6", "http://a:1/=tcp://a:7"]
    )
    others = (("tcp://a:7", None),)
    assert engine == EngineSpec("http://a:1", (), "tcp://a:5", "tcp://a:6", others)
    assert engine.feeds == (("tcp://a:5", "tcp://a:6"), ("tcp://a:7", None))
    assert EngineSpec("http://a:1").feeds == ()
    path = tmp_path / "workers"
    path.write_text("http://a:1 events=tcp://a:5 replay=tcp://a:6 events=tcp://a:7")
    assert read_workers(workers_text(path), path) == (engine,)


def test_each_line_of_a_file_is_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text(
        "\n# all of ours\nhttp://a:1 model=m model=n # first\nhttp://b:2 events=ipc:///e\n"
    )
    assert read_workers(workers_text(path), path) == (
        EngineSpec("http://a:1", ("m", "n")),
        EngineSpec("http://b:2", (), "ipc:///e"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://a\nnonsense\n", "line 2: 'nonsense'"),
        ("http://a weight=3\n", "line 1: 'weight=3' is not one of"),
        ("http://a\nhttp://a/\n", "line 2: http://a occurs twice"),
        ("\x00", "line 1"),
        ("http://a replay=tcp://a:6", "line 1: 'replay=tcp://a:6' must follow the events="),
        ("http://a events=b replay=c replay=d", "'replay=d' must follow the events="),
        ("http://a events=b events=b", "the KV events of http://a at b are configured twice"),
    ],
)
def test_an_invalid_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "workers"
    path.write_text(text)
    with pytest.raises(RouterError, match=message):
        read_workers(workers_text(path), path)


def test_addresses_may_be_ipv6() -> None:
    assert Address.parse("[::1]:80") == Address("::1", 80)
    for text in ("80", ":80", "a:b", "a:70000"):
        with pytest.raises(RouterError):
            Address.parse(text)


def test_the_command_and_the_settings_have_the_same_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[Settings] = []

    async def serve(settings: Settings, started: Callable[..., None]) -> None:
        requests.append(settings)

    monkeypatch.setattr("beluga.gateway.serve", serve)
    gateway(worker=["http://a:1"])
    assert requests == [Settings(engines=(EngineSpec("http://a:1"),), seed=0)]


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[Settings], str]:
    """Run the command. Returns the settings that it starts with, and what it prints."""
    requests: list[Settings] = []

    async def serve(settings: Settings, started: Callable[..., None]) -> None:
        requests.append(settings)

    monkeypatch.setattr("beluga.gateway.serve", serve)
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["gateway", "--worker", "http://a:1", *arguments])
    return requests, done.output + str(done.exception or "")


def test_times_are_estimated_like_in_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Options()
    for arguments, options in (
        ((), usual),
        (("--gpu-path", "switch"), Options(gpu_path="switch")),
        (
            ("--bandwidth", "11", "--local-bandwidth", "22", "--step-tokens", "2048"),
            Options(bandwidth=11e9, local_bandwidth=22e9, step_tokens=2048),
        ),
    ):
        [requested], _ = started(monkeypatch, *arguments)
        estimator = requested.estimator
        assert estimator.bytes_per_s == options.path_speed
        assert estimator.host_bytes_per_s == options.local_bandwidth
        assert estimator.step_tokens == options.step_tokens
        assert estimator.costs == options.model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bandwidth", "0"), "--bandwidth is 0.0, but must be greater than 0"),
        (("--bandwidth", "inf"), "--bandwidth is inf; give a finite number"),
        (("--local-bandwidth", "-1"), "--local-bandwidth is -1"),
        (
            ("--policy", "round-robin:decay=1"),
            "policy round-robin has no setting 'decay'; it has no",
        ),
        (("--policy", "lmetric:credit=-1"), "credit of policy lmetric is -1; give 0 or more; its"),
        (("--gpu-path", "x"), "--gpu-path is 'x'; give one of root-complex, switch"),
        (("--step-tokens", "0"), "--step-tokens"),
        (("--block-size", "1000000000"), "--block-size"),
        (("--index-ranks", "1024"), "--index-ranks"),
        (("--body-wait", "0"), "--body-wait"),
        (("--allow-origin", "chat.example"), "--allow-origin chat.example is not an origin"),
        (("--allow-origin", "https://a/b"), "--allow-origin https://a/b is not an origin"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    requested, printed = started(monkeypatch, *arguments)
    assert requested == []
    assert message in printed


def test_a_policy_is_given_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    [requested], _ = started(monkeypatch, "--policy", "linear:shared_credit=1,decay=2")
    assert requested.policy == "linear:shared_credit=1,decay=2"
    [requested], _ = started(monkeypatch, "--policy", "default")
    assert requested.policy == "least-cost"


def test_an_unknown_block_size_is_rejected() -> None:
    def cache(size: int) -> Cache:
        return Cache(
            wanted=True,
            block_size=size,
            announced=False,
            is_adapter=lambda _: False,
            space_of=lambda _: None,
            metrics=Metrics(),
        )

    with pytest.raises(RouterError, match="block_size is 65537, but must be at most 65536"):
        cache(65537)
    learning = cache(0)
    assert learning.learn(10**15) is None
    assert learning.learn(32) is not None
    assert learning.learn(16) is None
