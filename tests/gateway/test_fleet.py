# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The fleet: workers join, leave and drain, at an operator's request or by a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engines import FakeEngine
from routed import routed, until

from beluga.errors import NoWorkersError, RouterError
from beluga.gateway import EngineSpec, read_engines
from beluga.gateway.engine import Engine
from beluga.gateway.fleet import (
    SETTLED_LOOKS,
    WORKERS_SIZE_MAX,
    Fleet,
    WorkersFile,
    read_workers,
    workers_text,
)


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
        assert await site.status("DELETE", f"{workers}/{number}") == 200
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
        assert await site.status("DELETE", f"{site.admin}/workers/{number}") == 200
        engine.faults.hold.set()
        assert (await pending)[0] == 200
        await until(lambda: worker.inflight == 0)
        assert engine.url not in await site.text("/metrics")


NESTED = (b"[" * 50_000, b'{"url":' * 5000, b'{"url": "\xff"}', b'{"url\xff": 1}', b"", b"nul")


async def test_invalid_requests_of_operators_are_refused_with_the_reason() -> None:
    async with routed(FakeEngine(), policy="linear") as site:

        async def refused(method: str, path: str, body: bytes, kind: str = "json") -> str:
            headers = {"Content-Type": f"application/{kind}"}
            url = site.admin + path
            async with site.client.request(method, url, data=body, headers=headers) as answer:
                message = (await answer.json())["error"]["message"]
                return f"{answer.status} {message}"

        for body, why in (
            (b'{"url": "nonsense"}', "'nonsense' is not an engine's URL"),
            (b'{"url": "http://[::1:8000"}', "is not an engine's URL"),
            (b'{"url": "http://127.0.0.1:1", "more": 1}', "more"),
            (b'{"url": "http://127.0.0.1:9", "events": "nonsense"}', "nonsense"),
            (b"{}", "url"),
            *((body, "") for body in NESTED),
        ):
            message = await refused("POST", "/workers", body)
            assert message.startswith("400 ") and why in message
        for body in NESTED:
            assert (await refused("PUT", "/prefill", body)).startswith("400 ")
        # A web page could cause a browser to send this.
        sound = b'{"url": "http://127.0.0.1:1"}'
        assert (await refused("POST", "/workers", sound, "octet-stream")).startswith("415 ")
        assert (await refused("DELETE", "/workers/99", b"")).startswith("404 ")
        assert len(await site.workers()) == 1
        assert await site.status("GET", f"{site.base}/workers") == 404  # clients cannot use it


async def test_the_operators_port_lists_its_routes_and_has_alert_rules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routed() as site:
        assert "no worker is configured" in caplog.text
        async with site.client.get(f"{site.admin}/") as answer:
            lines = (await answer.text()).splitlines()
        assert {"GET /workers", "POST /workers/{id}/drain", "PUT /prefill"} <= set(lines)
        async with site.client.get(f"{site.admin}/alerts") as answer:
            text = await answer.text()
        for target in ("avg(dynamo_kv_hit_rate) < 0.30", "> 0.005", "> 0.2"):
            assert target in text


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
            assert (len(a.seen), len(b.seen)) == (1, 1)
            path.write_text(f"{a.url}\n")
            await until(lambda: [e.url for e in site.service.fleet] == [a.url])


def fleet_of(*specs: EngineSpec) -> Fleet:
    fleet = Fleet()
    for spec in specs:
        fleet.add(spec).passed(0)
    return fleet


def urls(fleet: Fleet) -> list[str]:
    return [engine.url for engine in fleet if not engine.draining]


A, B, C = (EngineSpec(f"http://{name}") for name in "abc")


def test_a_fleet_lists_an_engine_once_and_reuses_no_number() -> None:
    fleet = fleet_of(A, B)
    with pytest.raises(RouterError, match="already"):
        fleet.add(A)
    first = fleet[1]
    fleet.remove(first)
    fleet.remove(first)
    assert fleet.add(A).worker.worker_id == 3
    assert len(fleet) == 2
    with pytest.raises(NoWorkersError, match="no worker 1"):
        fleet[1]


def test_a_fleets_listener_is_called_once_per_change() -> None:
    fleet, received = Fleet(), []

    def joined(engine: Engine) -> None:
        received.append(f"+{engine.url}")
        if engine.spec == C:
            raise RouterError("no room")

    fleet.on_change(joined=joined, left=lambda engine: received.append(f"-{engine.url}"))
    engine = fleet.add(A)
    with pytest.raises(RouterError, match="no room"):
        fleet.add(C)
    assert urls(fleet) == ["http://a"]
    fleet.remove(engine)
    fleet.remove(engine)
    assert received == ["+http://a", "+http://c", "-http://c", "-http://a"]


def test_a_drained_engine_leaves_with_its_last_request() -> None:
    fleet = fleet_of(A, B)
    busy, idle = fleet
    busy.inflight = 1
    fleet.drain(busy)
    fleet.drain(idle)
    assert list(fleet) == [busy]
    busy.inflight = 0
    fleet.settle(busy)
    assert len(fleet) == 0


def test_a_fleet_is_updated_from_a_list() -> None:
    fleet = fleet_of(A, B)
    by_hand = fleet.add(C)
    fleet.follow([B], [A, B])
    assert urls(fleet) == ["http://b", "http://c"]
    fleet.follow([A, B, C], [B])  # an engine that is already there is not added again
    assert by_hand in list(fleet) and urls(fleet) == ["http://b", "http://c", "http://a"]
    renamed = EngineSpec("http://b", ("m",))
    busy = next(engine for engine in fleet if engine.spec == B)
    busy.inflight = 1
    fleet.follow([A, renamed, C], [A, B, C])
    assert busy not in list(fleet)
    assert {engine.spec for engine in fleet} == {A, renamed, C}


def test_an_engine_with_invalid_new_settings_keeps_the_old_ones() -> None:
    wrong, left = EngineSpec("http://a", events="nonsense"), []

    def joined(engine: Engine) -> None:
        if engine.spec.events is not None:
            raise RouterError("no such endpoint")

    fleet = Fleet()
    fleet.on_change(joined=joined, left=lambda engine: left.append(engine.spec))
    for spec in (A, B):
        fleet.add(spec)
    first = next(iter(fleet))
    assert list(fleet.follow([wrong, C], [A, B])) == [wrong]
    assert [engine.spec for engine in fleet] == [A, C]
    assert next(iter(fleet)) is first
    assert not first.removed and left == [B, wrong]
    assert fleet.follow([A, C], [A, C]) == {}
    assert fleet.follow([C], [A, C]) == {}
    assert [engine.spec for engine in fleet] == [C]


def test_models_are_those_of_available_engines() -> None:
    fleet = fleet_of(EngineSpec("http://a", ("m",)), B)
    named, unnamed = fleet
    unnamed.cards = [{"id": "base"}, {"id": "tuned", "parent": "base"}]
    assert unnamed.models == ("base", "tuned")
    assert fleet.models() == {
        "m": {"id": "m", "object": "model", "owned_by": "beluga"},
        "base": {"id": "base", "object": "model", "owned_by": "beluga"},
        "tuned": {"id": "tuned", "object": "model", "owned_by": "beluga", "parent": "base"},
    }
    assert [fleet.is_adapter(name) for name in ("base", "tuned", "m")] == [False, True, False]
    assert unnamed.models is unnamed.models  # not recreated for each request
    unnamed.cards = [{"id": "base"}]
    assert list(unnamed.models) == ["base"]
    assert not fleet.is_adapter("tuned")
    assert fleet.serving("base") == [unnamed]
    assert fleet.serving(None) == [named, unnamed]
    unnamed.fail("gone")
    assert list(fleet.models()) == ["m"]
    assert fleet.serving("base") == [unnamed]
    unnamed.draining = True
    assert (fleet.serving("base"), fleet.serving(None)) == ([], [named])


def follow(path: Path, *texts: str | None) -> tuple[WorkersFile, list[list[str]]]:
    """Check a workers file after each change; None: no change. Also returns the engines that could
    get requests after each check.
    """
    fleet = Fleet()
    watched, left = WorkersFile(path, fleet), []
    for text in texts:
        if text is not None:
            path.write_text(text)
        with contextlib.suppress(RouterError):
            watched.read()
        left.append([engine.url for engine in fleet if not engine.draining])
    return watched, left


TWO = "http://a:8000\nhttp://b:8000\n"
BOTH = ["http://a:8000", "http://b:8000"]


@pytest.mark.parametrize("size", range(len(TWO)))
def test_rewriting_a_workers_file_in_place_drains_no_worker(tmp_path: Path, size: int) -> None:
    slow = [TWO[:size], *[None] * (SETTLED_LOOKS - 1)]
    _, left = follow(tmp_path / "workers", TWO, *slow, TWO, *[None] * SETTLED_LOOKS)
    assert left == [BOTH] * len(left)


C_LINE = "http://c:8000\n"


@pytest.mark.parametrize(
    ("text", "soon", "settled"),
    [
        ("http://b:8000\n", BOTH, ["http://b:8000"]),
        (TWO + C_LINE, [*BOTH, "http://c:8000"], [*BOTH, "http://c:8000"]),
        (TWO + C_LINE.strip(), BOTH, [*BOTH, "http://c:8000"]),
        ("# for the night\nnone\n", BOTH, []),
    ],
    ids=["removed", "added", "unterminated", "none"],
)
def test_workers_are_added_at_once_and_dropped_once_the_file_is_stable(
    tmp_path: Path, text: str, soon: list[str], settled: list[str]
) -> None:
    _, left = follow(tmp_path / "workers", TWO, text, *[None] * SETTLED_LOOKS)
    assert left == [BOTH, *[soon] * SETTLED_LOOKS, settled]


@pytest.mark.parametrize("text", ["", "\n", "# all are gone\n", "http://a:8000\nhtt"])
def test_a_workers_file_without_a_valid_worker_keeps_the_former_ones(
    tmp_path: Path, text: str
) -> None:
    watched, left = follow(tmp_path / "workers", TWO, text, *[None] * 5)
    assert left == [BOTH] * len(left)
    with pytest.raises(RouterError, match=r"write the line 'none'|htt"):
        watched.read()


def test_an_unreadable_workers_file_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    texts = ["nonsense\n", "nonsense\n", "http://a\n", "nonsense\n"]

    async def sleep(_: float) -> None:
        if not texts:
            raise asyncio.CancelledError
        path.write_text(texts.pop(0))

    monkeypatch.setattr("beluga.gateway.fleet.asyncio", SimpleNamespace(sleep=sleep))
    fleet = Fleet()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(WorkersFile(path, fleet).watch())
    assert len([record for record in caplog.records if "nonsense" in record.message]) == 2
    assert urls(fleet) == ["http://a"]


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
        ("none\nhttp://a:8000\n", "line 1: 'none' cannot be combined with workers"),
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


def test_an_endless_workers_file_is_rejected(tmp_path: Path) -> None:
    """A read that waits would stop all requests."""
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"#" * (WORKERS_SIZE_MAX + 1))
    for path, why in (
        (pipe, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "directory|not a regular file"),
        (large, "more than 4194304 bytes"),
    ):
        with pytest.raises(RouterError, match=why):
            workers_text(path)
    large.write_bytes(b"\xef\xbb\xbfnone\n")
    (tmp_path / "link").symlink_to(large)
    assert workers_text(tmp_path / "link") == "none\n"
