# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Commands in this process, with fakes for what they start: the arguments that they pass on, and
their output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from beluga import events, transfer
from beluga.cli import (
    bench,
    block,
    gateway,
    lanes,
    main,
    ping,
    prefill_worker,
    serve,
    stat,
)
from beluga.cli import doctor as verify_command
from beluga.cli import pool as pool_commands
from beluga.cli.app import app, cxl_rpc
from beluga.cli.replay import _moved
from beluga.errors import (
    BadValueError,
    BelugaError,
    DeposedError,
    PoolError,
    ReplayError,
    TierError,
)
from beluga.events import EventSettings
from beluga.gateway.settings import Address
from beluga.index import IndexStat, Sessions
from beluga.replay import Conversations, make_workload
from beluga.replay.run import ReplayOptions
from beluga.replay.run import Result as ReplayResult
from beluga.replay.trace import write_trace
from beluga.rpc import METHOD_USER, SILENT_S, Quota
from beluga.tiers import TierSettings


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class Opened(SimpleNamespace):
    """A pool, a client or a server, as a context manager."""

    runtime_dir = Path("/nowhere")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None: ...


# ---- serve


class Failing:
    """A server that fails after its start."""

    failure = DeposedError("deposed")

    def __init__(self) -> None:
        self.did: list[str] = []

    def start(self) -> None:
        self.did.append("start")

    def stop(self) -> None:
        self.did.append("stop")

    def stat(self) -> Any:
        return SimpleNamespace(epoch=7, housekeeping_count=1)


def test_a_fatal_error_is_raised_and_the_server_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    server: Any = Failing()
    with pytest.raises(DeposedError):
        serve.serve_until_stopped(server)
    assert server.did == ["start", "stop"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The pool that every command opens, with the paths of its devices."""
    pool = Opened(paths=[], geometry=SimpleNamespace(bulk_size=8, stripe_count=8))
    for module in (serve, ping, stat, block, lanes, verify_command):
        monkeypatch.setattr(module, "open_pool", lambda paths: pool.paths.append(paths) or pool)
    return pool


@dataclass
class Served:
    """The arguments that ``serve`` passed on."""

    server: dict[str, Any]
    how: dict[str, Any]


@pytest.fixture
def served(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    all_served: list[Served] = []
    monkeypatch.setattr("beluga.index.IndexServer", lambda pool, **options: options)
    monkeypatch.setattr("beluga.admin.server_routes", lambda *_: {})
    monkeypatch.setattr(
        serve,
        "serve_until_stopped",
        lambda server, stopping, admin, health, **how: all_served.append(Served(server, how)),
    )
    return all_served


def test_a_server_has_no_quotas_by_default(served: list[Served]) -> None:
    assert beluga("serve").exit_code == 0
    assert served == [
        Served({"host": None, "declared_gone": False, "quota": Quota(), "eviction": "lru",
                "shares": {}, "hint_budget": 0.25},
               {"services": [], "json": False, "silent_s": None})
    ]  # fmt: skip
    assert Quota() == Quota(grants=0, pins=0, bytes=0, calls_per_s=0)


def test_options_reach_the_server(served: list[Served], opened: Opened) -> None:
    beluga("serve", "--pool", "a", "--pool", "b", "--host", 3, "--declare-gone", "--quota-grants",
           1, "--quota-pins", 2, "--quota-bytes", 3, "--quota-calls", 4, "--share", "acme=30%",
           "--share", "a=b=12.5", "--hint-budget", "7.5 %", "--eviction", "s3fifo")  # fmt: skip
    assert opened.paths == [["a", "b"]]
    assert served[0].server == {
        "host": 3, "declared_gone": True,
        "quota": Quota(grants=1, pins=2, bytes=3, calls_per_s=4), "eviction": "s3fifo",
        "shares": {"acme": 0.3, "a=b": 0.125}, "hint_budget": 0.075,
    }  # fmt: skip


def test_a_budget_of_hints_may_be_0_and_100_percent(served: list[Served]) -> None:
    for text in "0%", "100":
        assert beluga("serve", "--hint-budget", text).exit_code == 0
    assert [each.server["hint_budget"] for each in served] == [0, 1]


def test_tiers_reach_their_service(
    served: list[Served], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.tiers.TierService", lambda *arguments, **more: (arguments[2], more))
    monkeypatch.setattr(TierSettings, "check_owner", lambda *_: None)
    beluga("serve", "--disk", "/a", "--disk", "/b", "--disk-bytes", "4G", "--remote", "file:///c",
           "--offload", "wait", "--admission", "sketch", "--host", 3)  # fmt: skip
    [(settings, more)] = served[0].how["services"]
    assert settings == TierSettings(
        disks=("/a", "/b"),
        disk_bytes=4 << 30,
        remotes=("file:///c",),
        offload="wait",
        admission="sketch",
    )
    assert more == {"host": 3, "patient": False}
    for more_words in (["--standby"],):
        beluga("serve", "--remote", "file:///c", *more_words)
        assert served[-1].how["services"][0][1]["patient"]  # a server that takes over


def test_a_disk_of_another_owner_ends_serve_before_it_serves(
    served: list[Served], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TierError("a disk of another server")

    monkeypatch.setattr("beluga.tiers.TierService", lambda *arguments, **more: (arguments[2], more))
    monkeypatch.setattr(TierSettings, "check_owner", refuse)
    assert beluga("serve", "--disk", "/a", "--disk-bytes", "4G").exit_code == 1
    assert not served


def test_event_options_reach_their_service(
    served: list[Served], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "EventService", lambda *arguments, **more: (arguments[2], more))
    beluga("serve", "--events", "tcp://a:1", "--events-replay", "tcp://a:2", "--events-form",
           "dynamo", "--host", 3)  # fmt: skip
    beluga("serve", "--events", "connect:tcp://a:1", "--events-form", "llm-d-v1", "--events-name",
           "rack", "--events-model", "org/m")  # fmt: skip
    assert [each.how["services"] for each in served] == [
        [(EventSettings("tcp://a:1", "tcp://a:2", form="dynamo"), {"host": 3})],
        [
            (
                EventSettings("connect:tcp://a:1", form="llm-d-v1", name="rack", model="org/m"),
                {"host": None},
            )
        ],
    ]


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        (["--standby"], {"silent_s": SILENT_S}),
        (["--standby", "--silent", 4], {"silent_s": 4}),
        (["--silent", 4], {"silent_s": None}),
    ],
)
def test_a_waiting_server_reports_standby(
    served: list[Served], arguments: list[Any], how: dict[str, Any]
) -> None:
    beluga("serve", *arguments)
    assert served[0].how == how | {"services": [], "json": False}


# ---- ping and stat


@pytest.fixture
def trips(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    requested: dict[str, Any] = {"pings": [5e-6, 1e-6, 4e-6, 2e-6] * 8}

    def client(pool: object, **options: Any) -> Opened:
        requested.update(options)
        return Opened(ping=requested["pings"].pop, stat=lambda: SimpleNamespace(epoch=9))

    monkeypatch.setattr("beluga.rpc.Client", client)
    return requested


def test_ping_shows_the_minimum_and_the_median(trips: dict[str, Any]) -> None:
    shown = json.loads(beluga("ping", "--json", "--count", 4, "--host", 2, "--timeout", 3).stdout)
    assert shown == {"epoch": 9, "count": 4, "min_us": pytest.approx(1), "p50_us": pytest.approx(4)}
    assert (trips["host"], trips["timeout_s"]) == (2, 3)


def test_ping_prints_one_line(trips: dict[str, Any]) -> None:
    shown = beluga("ping")
    assert shown.stderr == "epoch 9: 10 round trips, fastest 1.0 us, p50 4.0 us\n"
    assert (shown.stdout, trips["timeout_s"], len(trips["pings"])) == ("", 5, 22)


def test_stat_shows_all_counters(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    zero = {field.name: 0 for field in dataclasses.fields(IndexStat)}
    counters = IndexStat(**zero | {"block_count": 20, "grant_count": 2, "block_count_max": 22})
    own = SimpleNamespace(epoch=9, nonce=1)
    monkeypatch.setattr("beluga.rpc.Client", lambda *_, **__: Opened(stat=lambda: own))
    monkeypatch.setattr("beluga.index.IndexClient", lambda client: Opened(stat=lambda: counters))
    monkeypatch.setattr("beluga.index.fetch_counters", lambda client: None)
    monkeypatch.setattr(
        "beluga.index.fetch_sessions", lambda client: Sessions((), Quota(), draining=False)
    )
    opened.runtime_dir = Path("/nowhere")
    shown = json.loads(beluga("stat", "--json").stdout)
    assert (shown["block_count"], shown["table_full"], shown["epoch"]) == (20, True, 9)
    assert "no lookups yet" in beluga("stat").stdout
    counters = dataclasses.replace(counters, grant_count=1)
    assert json.loads(beluga("stat", "--json").stdout)["table_full"] is False
    assert re.search(r"quarantined +│ +nothing │", beluga("stat").stdout)
    counters = dataclasses.replace(
        counters,
        hit_count=3,
        lookup_count=4,
        used_bytes=1 << 20,
        data_bytes=8 << 20,
        held_bytes=4096,
    )
    shown = " ".join(beluga("stat").stdout.replace("│", " ").split())
    assert "hit rate 75.0% of 4 space full 12.5% of 8 MiB table full 95.5% of 22 blocks" in shown
    assert "quarantined 4 KiB" in shown


# ---- put, get and calls


def test_a_digest_is_16_to_64_bytes_in_hex() -> None:
    assert block.digest("0f" * 16) == b"\x0f" * 16
    assert block.digest("0F" * 64) == b"\x0f" * 64
    for text in ("0f" * 15, "0f" * 65, "0f" * 16 + "0", "key", "0g" * 16):
        assert len(block.digest(text)) == 16
        assert block.digest(text) != block.digest(text + "x")


@pytest.mark.parametrize(
    ("counts", "state"), [((1, 0), "stored"), ((0, 1), "present"), ((0, 0), "pending")]
)
def test_put_prints_the_outcome(
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    counts: tuple[int, int],
    state: str,
) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    looked: list[bool] = []
    result = SimpleNamespace(
        stored=counts[0], present=counts[1], raise_for_refused=lambda: looked.append(True)
    )
    cache = Opened(put=lambda keys, blocks: result)
    monkeypatch.setattr("beluga.kvcache.KVCache", lambda *_, **__: cache)
    monkeypatch.setattr(block, "_fetch", lambda cache, key: b"12345")
    assert beluga("put", "key", tmp_path / "file").stderr == f"{state}: 5 bytes\n"
    shown = json.loads(beluga("put", "key", tmp_path / "file", "--json").stdout)
    assert shown == {"key": block.digest("key").hex(), "bytes": 5, "state": state}
    assert len(looked) == 2


def test_a_block_evicted_during_its_fetch_is_a_miss(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = Opened(client=None, keys=list, get=lambda keys, into: SimpleNamespace(hits=0))
    evicted = SimpleNamespace(hits=[SimpleNamespace(length=5)])
    monkeypatch.setattr("beluga.kvcache.KVCache", lambda *_, **__: cache)
    monkeypatch.setattr(
        "beluga.index.IndexClient", lambda client: Opened(lookup=lambda keys, **_: evicted)
    )
    (tmp_path / "old").write_bytes(b"kept")
    ended = beluga("get", "key", tmp_path / "old")
    assert (
        str(ended.exception)
        == "there is no block 'key' in the namespace 'cli'; see 'beluga explain'"
    )
    assert (tmp_path / "old").read_bytes() == b"kept"


def test_a_call_by_number_has_one_request_that_may_come_from_stdin(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def client(pool: object, **options: Any) -> Opened:
        return Opened(call=lambda *what: calls.append((*what, options)) or b"reply")

    monkeypatch.setattr("beluga.rpc.Client", client)
    runner = CliRunner()
    shown = runner.invoke(cxl_rpc, ["call", "7", "-"], input="12345678")
    assert shown.stdout == "reply\n"
    runner.invoke(cxl_rpc, ["call", "64", "--host", "1", "--timeout", "2"])
    assert calls == [
        (7, b"12345678", {"host": None, "timeout_s": 5.0}),
        (METHOD_USER, b"", {"host": 1, "timeout_s": 2.0}),
    ]
    refused = runner.invoke(cxl_rpc, ["call", "7", "-"], input="123456789")
    assert "more than 8 bytes, the limit for an argument" in str(refused.exception)


# ---- replay


def replayed(monkeypatch: pytest.MonkeyPatch, **change: Any) -> list[tuple[int, ReplayOptions]]:
    requested: list[Any] = []
    figures: dict[str, Any] = dict.fromkeys(ReplayResult.__slots__, 0)
    figures |= {"requests": 3, "blocks_looked_up": 4000, "hit_rate": 0.25, "ideal_hit_rate": 0.5,
                "blocks_put": 3000, "bytes_put": 12 * 10**9, "put_gb_per_s": 1.25, "seconds": 2.0,
                "blocks_hit": 1000, "blocks_got": 1000, "bytes_got": 4 * 10**9, "get_gb_per_s": 2.5,
                "rpc_p50_us": 1.0, "rpc_p99_us": 9.0, "engines": None, **change}  # fmt: skip

    def run(requests: Any, options: ReplayOptions, **_: Any) -> ReplayResult:
        requested.append((len(requests), options))
        return ReplayResult(**figures)

    monkeypatch.setattr("beluga.replay.replay", run)
    return requested


def test_a_replay_follows_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested = replayed(monkeypatch)
    write_trace(make_workload(Conversations(conversation_count=1, turn_count=3)), tmp_path / "t")
    beluga("replay")
    beluga("replay", tmp_path / "t")
    beluga("replay", tmp_path / "t", "--clients", 5, "--block-bytes", "64K", "--pool-bytes", "1G",
           "--speed", 2, "--no-compare")  # fmt: skip
    assert requested == [
        (1200, ReplayOptions(client_count=2, block_size=128 << 10)),
        (3, ReplayOptions(client_count=2, block_size=4096, pool_size=None, compare=True)),
        (3, ReplayOptions(client_count=5, block_size=64 << 10, pool_size=1 << 30, speed=2.0,
                          compare=False)),
    ]  # fmt: skip


def test_replay_prints_its_result_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch)
    lines = [line.split("│")[1:3] for line in beluga("replay").stdout.splitlines()[1:-1]]
    assert {name.strip(): value.strip() for name, value in lines} == {
        "requests": "3",
        "client processes": "2",
        "seconds": "2.0",
        "hit rate": "25.0% of 4,000 blocks",
        "ideal hit rate": "50.0%",
        "blocks put": "3,000 (12.00 GB, 1.2 GB/s per client)",
        "blocks got": "1,000 (4.00 GB, 2.5 GB/s per client)",
        "RPC p50 / p99": "1.0 / 9.0 us",
        "put again": "0",
        "wrong blocks": "0",
    }
    assert "not compared" in beluga("replay", "--no-compare").stdout


@pytest.mark.parametrize(
    ("gb_per_s", "shown"), [(2.54, "2.5 GB/s"), (1.0, "1.0 GB/s"), (0.0346, "35 MB/s")]
)
def test_a_slow_replay_shows_no_rate_of_zero(gb_per_s: float, shown: str) -> None:
    assert _moved(3, 12_000_000_000, gb_per_s) == f"3 (12.00 GB, {shown} per client)"


def test_wrong_bytes_are_an_error_after_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch, verify_errors=2)
    shown = beluga("replay", "--json")
    assert isinstance(shown.exception, ReplayError)
    assert "2 blocks came back with wrong bytes" in str(shown.exception)
    assert json.loads(shown.stdout)["verify_errors"] == 2


# ---- bench


def test_benchmarks_get_their_options_and_show_all_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[Any] = []
    fields = dict.fromkeys([*bench._COLUMNS, "note"])
    row = {**fields, "bench": "a", "memory": "m", "coherence": None, "case": "c", "p50_ns": 5}
    rows = [row, {**row, "case": "d", "p50_ns": None, "note": "odd"}, {**row, "memory": "n"}]
    benches = {"a": lambda options: requests.append(options) or rows, "b": lambda options: []}
    monkeypatch.setattr("beluga_bench.BENCHES", benches)
    uses = {"a": ("pool", "coherence", "pace", "threads"), "b": ()}
    monkeypatch.setattr("beluga_bench.USES", uses)
    shown = beluga("bench", "all")
    assert [(o.smoke, o.pool, o.coherence, o.pace, o.threads) for o in requests] == [
        (False, None, None, None, None)
    ]
    assert shown.stdout.count("p50 ns") == 2 and "p99" not in shown.stdout
    assert "a, m\n" in shown.stdout.replace(" \n", "\n").replace("  ", "")
    assert shown.stderr == "  d: odd\n"
    monkeypatch.setattr(bench, "open_pool", lambda paths: SimpleNamespace(close=lambda: None))
    options = ["--pool", "p", "--coherence", "hardware", "--pace", "x", "--threads", 1]
    shown = beluga("bench", "a", "--smoke", *options, "--json")
    assert json.loads(shown.stdout) == rows
    assert [(o.smoke, o.pool, o.coherence, o.pace, o.threads) for o in requests[1:]] == [
        (True, ("p",), "hardware", "x", 1)
    ]
    lanes = CliRunner().invoke(cxl_rpc, ["bench", "--smoke"])
    assert "there is no benchmark 'rpc'; choose one of a, b, all" in lanes.stderr


# ---- gateway and prefill-worker


def test_a_router_follows_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    service_module = pytest.importorskip("beluga.gateway")
    made: list[Any] = []
    monkeypatch.setattr(service_module, "run", lambda what: None)
    monkeypatch.setattr(service_module, "serve", lambda settings, *_: made.append(settings))
    assert beluga("gateway", "--worker", "http://a:1").exit_code == 0
    plain = service_module.Settings(
        policy="least-cost",
        engines=service_module.read_engines(["http://a:1"]),
        listen=service_module.Address("127.0.0.1", 8080),
        admin=service_module.Address("127.0.0.1", 8081),
    )
    limits = made[0].limits
    assert (made[0].listen, made[0].admin) == (plain.listen, plain.admin)
    assert (made[0].engines, made[0].policy) == (plain.engines, "least-cost")
    assert made[0].block_size == 0  # the engines report
    assert (made[0].queue, made[0].queue_threshold, made[0].seed) == ("fcfs", 16, 0)
    assert (made[0].advise_s, made[0].prefill.rule, made[0].prefill.wait_s) == (
        180,
        "isl-bounding",
        60,
    )
    assert (limits.queue_s, limits.inflight_max, limits.retries, limits.stall_s) == (60, 0, 2, 600)
    assert (limits.health_interval_s, limits.drain_s, limits.body_size_max) == (2, 30, 64 << 20)
    assert (made[0].goals.ttft_s, made[0].goals.between_tokens_s) == (None, None)
    beluga("gateway", "--worker", "http://a:1", "--admin", "", "--ttft-goal", 1, "--token-goal", 2)
    assert made[1].admin is None
    assert (made[1].goals.ttft_s, made[1].goals.between_tokens_s) == (1, 2)


@pytest.mark.parametrize(
    ("admin", "text"),
    [
        (None, ""),
        (Address("b", 2), "; admin on http://b:2"),
        (Address("::1", 2), "; admin on http://[::1]:2"),
    ],
)
def test_a_router_prints_its_address(
    capsys: pytest.CaptureFixture[str], admin: Any, text: str
) -> None:
    service: Any = SimpleNamespace(
        address=Address("a", 1), admin_address=admin, url_of=lambda address: address.url
    )
    gateway._print_addresses(service, json=False)
    assert capsys.readouterr() == ("", f"routing on http://a:1{text}; stop with Ctrl-C\n")
    gateway._print_addresses(service, json=True)
    assert json.loads(capsys.readouterr().out) == {
        "event": "routing",
        "url": "http://a:1",
        "admin": text.partition(" on ")[2] or None,
    }


def test_a_prefill_worker_runs_until_a_signal_and_closes_its_queue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disagg = pytest.importorskip("beluga.disagg")
    did: list[Any] = []

    class Worker:
        stat = SimpleNamespace(done=1, refused=2, given_back=3)

        def __init__(self, *what: Any, **options: Any) -> None:
            did.append((what[1], options))
            self.stopped = asyncio.Event()

        def stop(self) -> None:
            self.stopped.set()

        async def run(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(self.stopped.wait(), 20)

    async def open_queue(url: str, name: str, **options: Any) -> Any:
        did.append((url, name, options))
        return SimpleNamespace(close=close)

    async def close() -> None:
        did.append("closed")

    monkeypatch.setattr(disagg, "open_queue", open_queue)
    monkeypatch.setattr(disagg, "PrefillWorker", Worker)
    prefill_worker.prefill_worker("http://a", "pool", "m")
    assert did == [
        ("pool", "m", {"visibility_s": 30.0}),
        ("http://a", {"visibility_s": 30.0, "concurrency": 2, "timeout_s": 120.0}),
        "closed",
    ]
    assert capsys.readouterr().err == (
        "prefilling on http://a; stop with Ctrl-C\nstopped: 1 done, 2 refused, 3 returned\n"
    )


# ---- The end of a command


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (BelugaError("why"), (1, "beluga: error: why\n")),
        (BadValueError("n is 0"), (2, "beluga: error: n is 0\n")),
        (OSError(2, "No such file", "x"), (2, "beluga: error: x: No such file; check the path\n")),
        (OSError(5, "Input/output error", "x"), (1, "beluga: error: x: Input/output error\n")),
        (OSError(24, "Too many open files"), (1, "beluga: error: Too many open files\n")),
        (None, (0, "")),
    ],
)
def test_a_command_fails_with_one_line_or_succeeds(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: Exception | None,
    status: tuple[int, str],
) -> None:
    handlers: dict[int, Callable[[int, Any], None]] = {}
    held = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}

    def run(prog_name: str) -> None:
        assert prog_name == "beluga"
        if raised:
            raise raised

    monkeypatch.setattr(main, "import_module", lambda name: SimpleNamespace(app=run))
    monkeypatch.setattr(main.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(main.signal, "getsignal", held.get)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, capsys.readouterr().err) == status
    assert list(handlers) == [signal.SIGTERM]  # nohup ignores SIGHUP
    with pytest.raises(SystemExit) as ended:
        handlers[signal.SIGTERM](15, None)
    assert ended.value.code == 143


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (BelugaError("no such CPU"), "beluga: error: no such CPU"),
        (KeyboardInterrupt(), 130),
    ],
)
def test_import_errors_are_reported(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: object
) -> None:
    def import_module(name: str) -> None:
        raise raised

    monkeypatch.setattr(main, "import_module", import_module)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == status


def test_an_internal_import_error_is_not_reported_as_a_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(name="beluga.nothing")

    monkeypatch.setattr(main, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError):
        main.main()


def test_scrubbing_without_a_link_needs_no_admission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def host_link(pool: object) -> None:
        raise PoolError("no link")

    monkeypatch.setattr("beluga.transfer.host_link", host_link)
    with pool_commands.scrub_admission(None) as admission:  # type: ignore[arg-type]
        assert admission is None


def test_scrubbing_unregisters_from_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    link = SimpleNamespace(close=lambda: closed.append("link"))
    handle = SimpleNamespace(using=lambda: nullcontext(5), close=lambda: closed.append("handle"))
    monkeypatch.setattr("beluga.transfer.host_link", lambda pool: link)
    monkeypatch.setattr("beluga.transfer.IoHandle", lambda _: handle)
    with pool_commands.scrub_admission(None) as admission:  # type: ignore[arg-type]
        assert admission == (5, transfer.TransferClass.SCRUB)
        assert closed == []
    assert closed == ["handle", "link"]


# ---- verify


@pytest.mark.parametrize(
    ("arguments", "requested", "message"),
    [
        ([], (None, 3.0, 60.0), ""),
        (["--peer", "--role", "a", "--seconds", 1, "--timeout", 2], ("a", 1.0, 2.0),
         "side a: waiting for side b\n"),
        (["--peer", "--role", "b"], ("b", 3.0, 60.0), "side b: waiting for side a\n"),
    ],
)  # fmt: skip
def test_one_side_of_verify_waits_for_the_other(
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[Any],
    requested: Any,
    message: str,
) -> None:
    calls: list[Any] = []

    def verify_pool(pool: object, *, role: str | None, seconds: float, patience: float) -> Any:
        calls.append((role, seconds, patience))
        raise click.exceptions.Exit(5)

    monkeypatch.setattr("beluga.verify.verify_pool", verify_pool)
    shown = beluga("verify", "--pool", "path", *arguments)
    assert (shown.exit_code, shown.stderr) == (5, message)
    assert calls == [requested]
    assert opened.paths == [["path"]]


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [(app, [], "replay"), (app, ["pool"], "destroy"), (cxl_rpc, [], "bench")],
)
def test_a_group_without_a_command_lists_its_commands(
    program: Any, words: list[str], named: str
) -> None:
    ended = CliRunner().invoke(program, words)
    assert (ended.exit_code, "Usage" in ended.output, named in ended.output) == (2, True, True)
