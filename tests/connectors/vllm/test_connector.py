# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines that save, load, announce and count through vLLM's hooks, with fakes of vLLM."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import BLOCK_TOKENS, adapter, config, request
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest
from scene import LONG_S, TOKENS, Engine, wait_for
from support.blocks import eventually
from support.prometheus_lint import complaints

from beluga import IndexServer, Namespace, Pool
from beluga.connectors import connection as connection_module
from beluga.connectors.connection import Attachment, Connection
from beluga.connectors.vllm import policy
from beluga.connectors.vllm.events import UNSENT_MAX, TokenFeed
from beluga.connectors.vllm.media import MARK
from beluga.connectors.vllm.steps import Loaded, Rank
from beluga.errors import ConnectorError
from beluga.index import check_pool, read_names
from beluga.router import (
    TOKENS_TAG,
    BlockHasher,
    Indexer,
    TokenStore,
    WireDecoder,
    Worker,
    hash_blocks_by,
)
from beluga.rpc import KINDS, report

Make = Callable[..., Engine]


def test_one_engine_loads_blocks_saved_by_another(
    server: IndexServer, pool: Pool, make: Make, vllm: list[str]
) -> None:
    engine, other = make(), make()
    assert engine.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert engine.scheduler.requires_kv_delivery is False
    assert engine.run(request("a", TOKENS), 3, fill=7) == 0
    made = request("b", TOKENS)
    assert other.start(made, 8) == (5 * BLOCK_TOKENS, False)
    other.step(made)
    assert (other.memory[:, 8:13] == 7).all()
    assert not other.memory[:, :8].any()
    assert not other.memory[:, 13:].any()
    assert other.worker.get_block_ids_with_load_errors() == set()
    assert other.report().report.loaded == {"b": Loaded(1, 5)}
    assert not other.finish(made)
    assert other.worker.build_connector_worker_meta() is None
    assert vllm == ["amx", "amx"]
    assert (server.stat().live_count, pool.geometry.lane_count) == (4, 32), "an eighth of the lanes"
    lines = Path("/proc/self/maps").read_text().splitlines()
    for device in pool.devices:  # the server runs in this process, too
        assert sum(line.endswith(f" {device.path}") for line in lines) == 1


@pytest.mark.parametrize("load", ["auto", "sync", "async"])
def test_a_hit_costs_two_calls_of_the_server(server: IndexServer, make: Make, load: str) -> None:
    """The scheduler's side looks up and releases; the worker makes no call."""
    make().run(request("a", TOKENS), 3, fill=7)
    other, made = make(load=load), request("b", TOKENS)
    before = server.stat().call_count
    assert other.start(made, 8) == (5 * BLOCK_TOKENS, load == "async")
    assert server.stat().call_count == before + 1
    other.step(made)
    if load == "async":
        wait_for(lambda: other.worker.get_finished(set()) == (None, {"b"}))
    assert server.stat().call_count == before + 1
    other.report()
    assert server.stat().call_count == before + 2
    assert (other.memory[:, 8:13] == 7).all()


def test_the_first_prompt_after_a_start_hits_the_pool(
    server: IndexServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().run(request("a", TOKENS), 3, fill=7)
    waits = threading.Event()
    settle = Connection.settle

    class Slow(Attachment):
        """An attachment that ends only when a caller waits for it."""

        def __init__(self, *given: Any, **named: Any) -> None:
            assert waits.wait(LONG_S)
            super().__init__(*given, **named)

    def settled(connection: Connection) -> bool:
        waits.set()
        return settle(connection)

    monkeypatch.setattr(connection_module, "Attachment", Slow)
    monkeypatch.setattr(Connection, "settle", settled)
    try:
        other, made = make(wait=False), request("b", TOKENS)
        assert other.start(made, 8) == (5 * BLOCK_TOKENS, False)
        other.step(made)
    finally:
        waits.set()
    assert other.worker.get_block_ids_with_load_errors() == set()
    assert (other.memory[:, 8:13] == 7).all()


def test_without_a_pool_an_engine_starts_and_computes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SETTLE_S", LONG_S)  # no caller waits that long
    engine = make(wait=False, timeout_ms=50, retry_s=LONG_S)
    made = request("a", TOKENS)
    assert engine.run(made, 0, fill=1) == 0
    assert engine.scheduler.get_kv_connector_stats().data["lookup_failures"] == 1


def test_a_load_that_fails_names_its_blocks(server: IndexServer, make: Make) -> None:
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=7)
    made = request("b", TOKENS)
    other.start(made, 8)
    other.scheduler._schedule._forget_lookup(other.scheduler._schedule._requests["b"])
    cache = other.worker._worker.connection._attachment.cache(other.scheduler._lookups.ranks[0])
    cache.remove(made.block_hashes[3:])
    other.step(made)
    assert other.worker.get_block_ids_with_load_errors() == {11, 12}
    other.report(invalid={11, 12})
    assert other.scheduler.get_kv_connector_stats().data["hit_tokens"] == 3 * BLOCK_TOKENS
    assert other.scheduler.get_num_new_matched_tokens(made, 0) == (0, False)


def test_after_a_reset_every_lookup_misses(server: IndexServer, make: Make) -> None:
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=7)
    assert other.scheduler.reset_cache() is True
    assert other.run(request("b", TOKENS), 0, fill=8) == 0
    assert other.run(request("c", TOKENS), 8, fill=9) == 5 * BLOCK_TOKENS
    assert (other.memory[:, 8:13] == 8).all()
    assert engine.run(request("d", TOKENS), 8, fill=9) == 5 * BLOCK_TOKENS
    assert (engine.memory[:, 8:13] == 7).all()


def test_blocks_are_announced_when_they_are_in_the_pool(server: IndexServer, make: Make) -> None:
    engine, silent = make(events=True), make()
    made = request("a", TOKENS, images=[(MARK + "cat", 5), (MARK + "dog", 6), (MARK + "cow", 15)])
    engine.run(made, 0, fill=1)
    announced = list(engine.scheduler.take_events())
    first, second, *others = announced
    assert (first.block_hashes, first.parent_block_hash) == ([made.block_hashes[0][:8]], None)
    assert (first.token_ids, first.block_size) == (TOKENS[:BLOCK_TOKENS], BLOCK_TOKENS)
    assert (first.medium, first.lora_id, first.lora_name) == ("SHARED", None, None)
    assert (first.group_idx, first.kv_cache_spec_kind) == (0, "full_attention")
    assert first.kv_cache_spec_sliding_window is None
    assert (first.locality, first.ownership) == ("REMOTE", "pool:beluga")
    assert second.parent_block_hash == made.block_hashes[0][:8]
    assert len(others) == 3
    assert [event.extra_keys for event in announced] == [
        *([None], [((MARK + "cat", 1), (MARK + "dog", 2))], [None], [((MARK + "cow", 3),)], [None])
    ]
    assert list(engine.scheduler.take_events()) == []
    for number, quiet in enumerate((silent, make(events=True, announce=False))):
        quiet.run(request("b", [9 + number] * 21), 0, fill=1)
        assert list(quiet.scheduler.take_events()) == []


def test_token_ids_of_saved_blocks_are_sent_to_the_server_unless_more_identifies_them(
    server: IndexServer, make: Make, tmp_path: Path
) -> None:
    zmq = pytest.importorskip("zmq")
    endpoint, store = f"ipc://{tmp_path}/again", TokenStore()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as replay:
        replay.bind(endpoint)
        engine = make(events_replay=endpoint)
        engine.scheduler._feed._model = "served"
        lookups = engine.scheduler._lookups
        image = request("i", TOKENS, images=[(MARK + "cat", 5)])
        for made in (request("s", TOKENS, salt="secret"), image, request("a", [7] * 33)):
            assert eventually(lambda made=made: lookups.begin(made) is not None, LONG_S)
            engine.run(made, 0, fill=1)
        assert replay.poll(30_000)
        _, tag, message = replay.recv_multipart()
        assert tag == TOKENS_TAG
        store.add(message)
        names = [int.from_bytes(digest[-8:], "big") for digest in made.block_hashes]
        count = 32 // BLOCK_TOKENS
        assert [store.of(lookups.space, name) for name in names[:count]] == (
            [[7] * BLOCK_TOKENS] * count
        )
        assert (len(store), store.model(lookups.space)) == (count, "served")
        assert not replay.poll(0)


def test_a_server_that_reads_no_token_ids_delays_no_request(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    feed = TokenFeed(f"ipc://{tmp_path}/again", model="m")
    for _ in range(3 * UNSENT_MAX):
        feed.send(1, 16, [1], [2] * 16)
    feed.close()
    with pytest.raises(ConnectorError, match="events_replay is 'nonsense'"):
        TokenFeed("nonsense", model="m")


@pytest.mark.parametrize("name", ["", "tuned", "secret"])
def test_announcements_distinguish_salted_blocks_from_others(
    server: IndexServer, pool: Pool, make: Make, tmp_path: Path, name: str
) -> None:
    msgspec = pytest.importorskip("msgspec")
    engine = make(events=True)
    lora = adapter(tmp_path, name) if name else None
    made = request("a", TOKENS, salt="secret", lora=lora)
    assert eventually(lambda: engine.scheduler._lookups.begin(made) is not None, LONG_S)
    engine.run(made, 0, fill=1)
    announced = [dataclasses.asdict(event) for event in engine.scheduler.take_events()]
    always = (name,) if name else ()
    expected = [[(*always, "secret")], *([[always or None]] * 4)]
    assert [event["extra_keys"] for event in announced] == expected
    plain = BlockHasher(block_size=BLOCK_TOKENS, lora_name=name)
    salted = dataclasses.replace(plain, salt="secret")
    decoder = WireDecoder(7, block_size=BLOCK_TOKENS, hash_blocks=hash_blocks_by(plain))
    index = Indexer(workers=2, blocks=100)
    own = {"type": "BlockStored", "medium": "GPU", "locality": None}
    events = [{**event, **own} for event in announced]
    for event in events:  # one message each
        batch = decoder.batch(msgspec.msgpack.encode([1.0, [event]]))
        assert not batch.failed
        for applied in batch.events:
            index.apply(applied)
    assert index.matches(salted.query(TOKENS)).of(Worker(7)).device == 5
    assert not index.matches(plain.query(TOKENS)).held
    names = read_names(pool, check_pool(pool).half)["name"]
    assert sorted(names["tokens_hash"].tolist()) == sorted(salted.local(TOKENS))


def test_seconds_and_blocks_are_counted_for_each_process_and_reported(
    monkeypatch: pytest.MonkeyPatch, server: IndexServer, pool: Pool, make: Make
) -> None:
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    engine, other = make(), make(prefill_b_ms=250.0)
    space = engine.scheduler.get_kv_connector_stats().data["space"]
    assert space == f"{engine.scheduler._lookups.space:016x}"
    assert engine.scheduler.get_kv_connector_stats() is None  # a single one is logged once
    engine.run(request("a", TOKENS), 0, fill=1)
    other.run(request("b", TOKENS), 0, fill=2)
    looked_up = engine.scheduler.get_kv_connector_stats().data
    assert (looked_up["lookups"], looked_up["space"]) == (1, space)
    assert "hit_tokens" not in looked_up
    saved = engine.worker.get_kv_connector_stats().data
    assert "space" not in saved
    assert (saved["save_blocks"], saved["link_unthrottled_pieces"]) == (5, 0)
    assert saved["link_offload_pieces"] >= 1
    assert saved["save_bytes"] == saved["link_offload_bytes"] == engine.memory[:, :5].nbytes
    for each in (looked_up, saved):
        assert each["hook_s"] > each["save_hook_s"] > 0
    assert other.scheduler.get_kv_connector_stats().data["hit_tokens"] == 5 * BLOCK_TOKENS
    loaded = other.worker.get_kv_connector_stats().data
    assert (loaded["loads"], loaded["load_blocks"], loaded["load_failed_blocks"]) == (1, 5, 0)
    assert loaded["load_bytes"] == loaded["link_onboard_bytes"] == saved["save_bytes"]
    seconds = loaded["load_s"], looked_up["lookup_s"], saved["save_s"], saved["save_cpu_s"]
    assert all(0 < each < LONG_S for each in seconds)
    assert engine.worker.get_kv_connector_stats() is None
    names = read_names(pool, check_pool(pool).half)
    assert {f"{number:016x}" for number in names["name"]["space"].tolist()} == {space}
    other.run(request("c", TOKENS), 8, fill=2)  # the lookup reports the first end
    figures = server.reported(KINDS.index("vllm"))
    assert figures[report.Figure.SAVED_TOKENS] == 5 * BLOCK_TOKENS
    assert figures[report.Figure.SAVED_NS] == 5 * BLOCK_TOKENS * 250_000_000
    assert not server.reported(0)


def test_a_preempted_request_is_no_longer_saved(
    server: IndexServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    cancelled: list[list[str]] = []
    monkeypatch.setattr(engine.worker._worker.saves, "cancel", cancelled.append)
    made = request("a", TOKENS)
    engine.start(made, 0)
    engine.step(made)
    assert cancelled == []
    engine.step(made, preempted={"z"})
    assert cancelled == [["z"]]


def test_reports_of_ranks_add_up_and_no_call_is_made_after_the_end(
    server: IndexServer, make: Make
) -> None:
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=1)
    reports = []
    for each in (engine, other):
        made = request("b", TOKENS)
        each.start(made, 8)
        each.step(made)
        reports.append(each.worker.build_connector_worker_meta())
    assert reports[0].aggregate(reports[1]) is reports[0]
    assert reports[0].report.loaded == {"b": Loaded(2, 5)}
    other.close()
    assert server.stat().live_count == 2  # the scheduler's and the worker's
    engine.close()
    assert server.stat().live_count == 0
    worker = engine.worker
    assert worker.get_finished({"a"}) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.start_load_kv(None)
    worker.wait_for_save()
    worker.handle_preemptions(SimpleNamespace(orders=None))


def test_engines_that_cannot_share_blocks_get_a_clear_error(
    server: IndexServer, make: Make
) -> None:
    unusual = config()
    unusual.cache_config.prefix_caching_hash_algo = "builtin"
    with pytest.raises(ConnectorError, match="prefix-caching-hash-algo"):
        make(vllm_config=unusual)
    engine, made = make(), request("a", TOKENS)
    engine.start(made, 0)
    engine.scheduler._kv_cache_manager = None
    engine.step(made)
    with pytest.raises(ConnectorError, match=r"older than 0\.32"):
        engine.step(made)


def test_the_handshake_is_logged_and_its_ranks_are_in_order(
    server: IndexServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = make()
    digest = engine.worker._namespace.digest.hex()[:8]
    size = engine.memory[:, 0].nbytes
    assert f"blocks of 4 tokens, {size} bytes on each of 1 ranks; namespace {digest}" in caplog.text
    kind = type(engine.worker.get_handshake_metadata())

    def rank(name: str) -> Any:
        return kind(Rank(Namespace({"name": name}), 1))

    engine.scheduler.set_xfer_handshake_metadata_pp_aware(
        {(1, 0): rank("c"), (0, 1): rank("b"), (0, 0): rank("a")}
    )
    ranks = engine.scheduler._lookups.ranks
    assert [rank.fields["name"] for rank in ranks] == ["a", "b", "c"]
    engine.scheduler._lookups.ranks = ()


def test_after_another_connectors_handshake_ranks_are_known_from_their_first_reports(
    server: IndexServer, make: Make
) -> None:
    """MultiConnector gives every connector the handshake of the first one that has any."""
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=1)
    other.scheduler._lookups.ranks = other.scheduler._lookups._bases = ()
    other.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(agent="x")})
    assert other.run(request("b", TOKENS), 0, fill=2) == 0
    assert other.run(request("c", TOKENS), 8, fill=2) == 5 * BLOCK_TOKENS


def test_the_namespace_is_that_of_the_rank_and_its_settings(
    server: IndexServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {make().worker._namespace.digest, make(salt="secret").worker._namespace.digest}
    state = sys.modules["vllm.distributed.parallel_state"]
    for name in ("get_tp_group", "get_pp_group"):
        with monkeypatch.context() as patch:
            patch.setattr(state, name, lambda: SimpleNamespace(rank_in_group=1))
            digests.add(make().worker._namespace.digest)
    for value in ("int8", "fp8"):
        monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", value)
        monkeypatch.setenv("VLLM_PORT", value)
        digests.add(make().worker._namespace.digest)
    assert len(digests) == 6
    monkeypatch.delenv("VLLM_MARLIN_INPUT_DTYPE")
    assert make().worker._namespace.digest in digests


def test_figures_of_another_process_are_merged(make: Make) -> None:
    kind = type(make(wait=False, timeout_ms=50).scheduler)
    assert kind.build_kv_connector_stats({"loads": 2}).data == {"loads": 2}
    assert kind.build_kv_connector_stats().data == {}
    given = object(), dict.fromkeys((Counter, Gauge), lambda **_: None), ["model_name"], {}
    metrics = kind.build_prom_metrics(*given)
    metrics.observe({"a name of a later version": 1})
    assert metrics.arguments == given


def test_the_connector_is_registered_once(make: Make) -> None:
    from beluga.connectors.vllm import plugin

    plugin.register()
    plugin.register()
    factory = sys.modules["vllm.distributed.kv_transfer.kv_connector.factory"].KVConnectorFactory
    ((name, (module, class_name)),) = factory._registry.items()
    package = importlib.import_module("beluga.connectors.vllm")
    assert name == "BelugaConnector"
    assert getattr(importlib.import_module(module), class_name) is package.BelugaConnector
    with pytest.raises(AttributeError, match="has no attribute Beluga"):
        _ = package.Beluga


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_failed_load_is_a_miss_even_through_wrapping_connectors(wrapped: bool) -> None:
    """vLLM's MultiConnector gives each child a copy of the configuration."""

    def transfer() -> Any:
        return SimpleNamespace(kv_load_failure_policy="fail")

    def made(config: Any) -> bool:
        return policy.recompute_failed_loads(config)

    def made_by_another(config: Any) -> bool:
        own = copy.copy(config)
        own.kv_transfer_config = transfer()
        return made(own)

    usual = config()
    usual.kv_transfer_config = transfer()
    assert (made_by_another if wrapped else made)(usual) is wrapped
    assert usual.kv_transfer_config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("cuda", 0)])
def test_amx_is_requested_where_the_engine_computes_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    calls: list[Any] = []
    cpu = SimpleNamespace(_init_amx=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=cpu))
    policy.permit_amx(device)
    assert len(calls) == count
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=SimpleNamespace()))
    policy.permit_amx(device)  # a torch without tiles


# ---- Counters, as vLLM adds them up, logs them and exports them to Prometheus.


@pytest.fixture
def stats(vllm: list[str]) -> Any:
    return importlib.import_module("beluga.connectors.vllm.stats")


def test_stats_are_summed_until_a_log_line_shows_and_resets_them(stats: Any) -> None:
    counted = stats.BelugaStats(data={"loads": 1, "load_s": 0.123456, "lookups": 0})
    other = stats.BelugaStats(data={"loads": 2, "save_blocks": 7})
    assert counted.aggregate(other) is counted
    assert counted.data == {"loads": 3, "load_s": 0.123456, "save_blocks": 7, "lookups": 0}
    assert counted.reduce() == {"load_s": 0.1235, "loads": 3, "save_blocks": 7}
    space = stats.BelugaStats(data={"space": "00ff"})
    assert not space.is_empty()
    assert counted.aggregate(space).aggregate(space).data["space"] == "00ff"
    assert "space" not in counted.reduce()
    assert not counted.is_empty()
    counted.reset()
    assert counted.is_empty()
    assert stats.BelugaStats(data={"loads": 0}).is_empty()


def metrics_of(stats: Any, registry: CollectorRegistry, engines: int = 1) -> Any:
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge)}
    labels = {number: ["model", str(number)] for number in range(engines)}
    return stats.BelugaMetrics(object(), kinds, ["model_name", "engine"], labels)


def test_each_engine_has_separate_counters(stats: Any) -> None:
    registry = CollectorRegistry()
    metrics = metrics_of(stats, registry, engines=2)
    metrics.observe({"load_blocks": 3, "load_s": 0.5, "unknown": 1, "loads": 0}, 1)
    metrics.observe({"load_blocks": 2})
    metrics.observe({"load_blocks": 2, "space": "00ff"}, 1)
    page = generate_latest(registry).decode()
    expected = {
        'load_blocks_total{engine="1",model_name="model"} 5.0',
        'load_blocks_total{engine="0",model_name="model"} 2.0',
        'load_seconds_total{engine="1",model_name="model"} 0.5',
        'space_info{engine="1",model_name="model",space="00ff"} 1.0',
    }
    lines = [line.removeprefix("beluga_vllm_") for line in page.splitlines()]
    assert expected <= set(lines)
    assert "# HELP beluga_vllm_load_blocks_total Beluga: blocks loaded." in lines


def test_promtool_reports_no_error(stats: Any) -> None:
    registry = CollectorRegistry()
    metrics_of(stats, registry).observe({**dict.fromkeys(stats.NAMES, 1), "space": "00ff"})
    assert complaints(generate_latest(registry)) == []


def test_a_second_engine_in_a_process_registers_its_metrics(stats: Any) -> None:
    for _ in range(2):
        metrics = stats.BelugaMetrics(object(), {Counter: Counter, Gauge: Gauge}, ["e"], {0: ["0"]})
        metrics.observe({"loads": 3, "space": "00ff"})
        assert REGISTRY.get_sample_value("beluga_vllm_loads_total", {"e": "0"}) == 3
    stats.forget_collectors()
    assert REGISTRY.get_sample_value("beluga_vllm_loads_total", {"e": "0"}) is None
