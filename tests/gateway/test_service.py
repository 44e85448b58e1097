# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service and its settings: options, start, end."""

from __future__ import annotations

import asyncio
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
from routed import routed, until

from beluga.cli.app import app
from beluga.errors import BelugaError, RouterError
from beluga.gateway import Address, EngineSpec, Settings, read_engines
from beluga.gateway.cache import Cache
from beluga.gateway.metrics import Metrics
from beluga.gateway.settings import read_queues, read_url
from beluga.simulate import Options
from beluga.tiers.remote import split_remote
from beluga.tiers.remote.objects import store_options


async def test_requests_wait_in_order_for_full_workers() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine, inflight_max=2, queued_max=3) as site:
        requests = []
        for number in range(5):
            requests.append(asyncio.create_task(site.completed(prompt=str(number))))
            await until(lambda: site.service.pending() + site.inflight() == len(requests))
        assert site.counts() == [2]
        assert "pending_requests 3" in await site.text("/metrics")
        status, body = await site.completed()
        assert status == 503
        assert "3 requests are waiting already" in json.loads(body)["error"]["message"]
        engine.faults.hold.set()
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 5
        assert [body["prompt"] for body in engine.seen] == list("01234")


async def test_a_request_that_waited_too_long_gets_retry_after() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine, inflight_max=1, queue_s=0.2) as site:
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
    async with routed(engine, inflight_max=1) as site:
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


async def test_shutdown_completes_requests_and_rejects_new_ones() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine) as site:
        pending = asyncio.create_task(site.completed())
        await until(lambda: site.inflight() == 1)
        leaving = asyncio.create_task(site.service.drain())
        await asyncio.sleep(0)
        assert (await site.completed())[0] == 503
        assert await site.status("GET", f"{site.base}/ready") == 503
        assert await site.text("/health") == ""
        assert not leaving.done()
        engine.faults.hold.set()
        assert (await pending)[1].endswith(b"[DONE]\n\n")
        await leaving


async def test_the_wait_at_shutdown_is_bounded() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine, drain_s=0.2) as site:
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
        assert await site.status("GET", f"{site.base}/ready") == 200
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
        assert 'beluga_gateway_refused_total{status="500"} 1' in text
        assert 'beluga_gateway_refused_total{status="503"} 1' in text


@pytest.mark.parametrize("retries", [0, 1])
async def test_retries_use_the_configured_number_of_other_workers(retries: int) -> None:
    engines = [FakeEngine() for _ in range(3)]
    async with routed(*engines, retries=retries, health_interval_s=60) as site:
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
    assert ended.returncode == 2
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
        *("", "a:1", "ftp://a", "http://", "http://a:x", "http://a:0", "http://a?x", "http://a#x"),
        *("http://a:b@c:1", "http://a:99999", "http://[::1", "http://[a]:1"),
        "http://\N{ACCOUNT OF}:1",
    ],
)
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(
        RouterError, match="query or fragment" if url[-2:] in {"?x", "#x"} else "URL"
    ):
        read_url(url)
    assert read_url(" https://a:1/base/v1/ ") == "https://a:1/base"


def test_addresses_are_a_host_and_a_port() -> None:
    for text, address in (("[::1]:80", ("::1", 80)), ("a:65535", ("a", 65535)), ("a:0", ("a", 0))):
        assert Address.parse(text) == Address(*address)
    for text in ("80", ":80", "a:b", "a:65536"):
        with pytest.raises(RouterError, match="HOST:PORT"):
            Address.parse(text)


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


def test_the_command_and_the_settings_have_the_same_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, _ = started(monkeypatch)
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
        (("--gpu-path", "x"), "--gpu-path is 'x'; give root-complex or switch"),
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


def test_a_model_has_one_queue() -> None:
    assert read_queues(["m=pool", "n=nats://h"]) == (("m", "pool"), ("n", "nats://h"))
    for wrong, message in (
        (["m"], "not MODEL=QUEUE"),
        (["=pool"], "not MODEL"),
        (["m="], "not MODEL"),
    ):
        with pytest.raises(RouterError, match=message):
            read_queues(wrong)
    with pytest.raises(RouterError, match="two prefill queues"):
        read_queues(["m=pool", "m=pool"])


WORD = "hunter2hunter2"


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://me:{WORD}@host", f"http://me:{WORD}@host:port", f"http://me:{WORD}/x@host:1"),
        *(f"http://me:{WORD}#x@host:1", f"http://host/?key={WORD}", f"me:{WORD}@host:80"),
        *(f"ftp://me:{WORD}@host", f"http://me:{WORD}@[::1", "http://a b", "http://a/\x07b"),
    ],
)
def test_no_error_of_an_address_has_its_password(url: str) -> None:
    with pytest.raises(BelugaError) as refused:
        read_url(url)
    text = str(refused.value)
    for read in (
        lambda text: read_engines([text]),
        lambda text: read_engines([], [f"m={text}"]),
        lambda text: read_engines([], [f"={text}"]),
        lambda text: read_engines(["http://a"], [], [text]),
        lambda text: read_queues([text]),
        split_remote,
    ):
        try:
            read(url)
        except BelugaError as error:
            text = f"{error}{error.__cause__}"
        assert WORD not in text


@pytest.mark.parametrize(
    "url",
    [
        *(f"redis://:{WORD}/x@host:1", f"redis://me:{WORD}#x@host:1", f"valkey://:{WORD}?x@host"),
        *(f"s3://me:{WORD}/b@host", f"redis://:a/{WORD}@host:1"),
    ],
)
def test_no_error_of_a_store_has_its_password(url: str) -> None:
    with pytest.raises(BelugaError) as error:
        split_remote(url)
    assert WORD not in f"{error.value}{error.value.__cause__}"


def test_no_error_of_a_stores_endpoint_has_its_password() -> None:
    url = split_remote(f"s3://bucket/?endpoint=ftp://me:{WORD}@host")
    with pytest.raises(ValueError, match="its endpoint is 'ftp://host'") as error:
        store_options(url)
    assert WORD not in str(error.value)
