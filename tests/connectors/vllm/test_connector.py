# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""vLLM's connector interface with fakes of vLLM: engines that save and load through its hooks."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from prometheus_client import Counter, Gauge
from support.blocks import eventually
from vllm_parts import BLOCK_TOKENS, adapter, cache_config, config, layer_major, request, spec

from beluga import IndexServer, Namespace, Pool
from beluga.connectors import connection as connection_module
from beluga.connectors.connection import Attachment, Connection
from beluga.connectors.vllm.media import MARK
from beluga.connectors.vllm.steps import Loaded, Rank
from beluga.errors import ConnectorError
from beluga.index import check_pool, read_names
from beluga.router import BlockHasher, Indexer, WireDecoder, Worker, hash_blocks_by
from beluga.rpc import KINDS, report

LAYERS, BLOCKS = 2, 16
TOKENS = list(range(100, 100 + 5 * BLOCK_TOKENS + 1))  # five blocks and a token
LONG_S = 60.0
NUMBERS = itertools.count()


class Engine:
    """Two connectors, as vLLM has them: one in its scheduler and one in its worker."""

    def __init__(
        self, pool_name: str, *, events: bool = False, wait: bool = True, **extra: Any
    ) -> None:
        module = importlib.import_module("beluga.connectors.vllm.connector")
        vllm_config = config()
        vllm_config.instance_id = f"engine {next(NUMBERS)}"
        vllm_config.kv_transfer_config = SimpleNamespace(
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"pool": pool_name, "timeout_ms": 5000} | extra,
        )
        vllm_config.kv_events_config = SimpleNamespace(enable_kv_cache_events=events)
        self.config = vllm_config
        tensors, self.memory = layer_major(LAYERS, BLOCKS, BLOCK_TOKENS, 8)
        caches = cache_config(spec(page_size_bytes=64), num_blocks=BLOCKS, layers=LAYERS)
        make, role = module.BelugaConnector, fake_vllm.Role
        self.scheduler: Any = make(vllm_config, role.SCHEDULER, caches)
        self.worker: Any = make(vllm_config, role.WORKER, caches)
        self.manager = fake_vllm.KVCacheManager()
        self.block_ids = self.manager.block_ids
        self.scheduler._kv_cache_manager = self.manager
        assert self.worker.get_handshake_metadata() is None
        self.worker.register_kv_caches(tensors)
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )
        if wait:
            connections = self.worker._worker.load_connection, self.worker._worker.save_connection
            assert all(
                connection.wait(LONG_S) for connection in (self.scheduler._connection, *connections)
            )

    def start(self, made: Any, first: int) -> tuple[int, bool]:
        """Start a request in blocks from ``first`` on. Returns what the pool should provide."""
        matched: tuple[int, bool] = self.scheduler.get_num_new_matched_tokens(made, 0)
        ids = list(range(first, first + made.num_tokens // BLOCK_TOKENS + 1))
        self.block_ids[made.request_id] = ids
        blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
        self.scheduler.update_state_after_alloc(made, blocks, matched[0])
        made.num_computed_tokens = matched[0]
        return matched

    def step(self, made: Any, *, fill: int | None = None, preempted: Any = None) -> None:
        """Run a forward pass for all remaining tokens of a request. It writes ``fill`` into the
        blocks.
        """
        tokens = made.num_tokens - made.num_computed_tokens
        output = SimpleNamespace(
            num_scheduled_tokens={made.request_id: tokens}, preempted_req_ids=preempted
        )
        metadata = self.scheduler.build_connector_meta(output)
        made.num_computed_tokens += tokens
        made.num_in_flight_tokens += tokens
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_layer_load("layer.0")
        if fill is not None:
            self.memory[:, self.block_ids[made.request_id]] = fill
        self.worker.save_kv_layer("layer.0", None, None)
        self.worker.wait_for_save()
        made.num_in_flight_tokens -= tokens

    def report(self, *, invalid: set[int] | None = None) -> Any:
        """Pass the worker's report after a step to the scheduler."""
        meta = self.worker.build_connector_worker_meta()
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=meta, invalid_block_ids=invalid or set())
        )
        return meta

    def finish(self, made: Any) -> bool:
        """End a request. If its blocks are held, wait until they are saved. Returns whether they
        were.
        """
        held, parameters = self.scheduler.request_finished(made, self.block_ids[made.request_id])
        assert parameters is None
        self.report()
        self.worker.bind_connector_metadata(
            self.scheduler.build_connector_meta(
                SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=())
            )
        )
        assert not self.scheduler.has_pending_push_work()
        if held:
            sent: set[str] = set()
            finished = {made.request_id}

            def ended() -> bool:
                sent.update(self.worker.get_finished(finished)[0] or ())
                return sent == {made.request_id}

            assert eventually(ended, LONG_S)
        return bool(held)

    def run(self, made: Any, first: int, fill: int) -> int:
        """Run a whole request. Returns the tokens that the pool provided."""
        tokens, _ = self.start(made, first)
        self.step(made, fill=fill if tokens == 0 else None)
        self.finish(made)
        self.report()
        return tokens

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    """A small pool, with the lanes that it has by default."""
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=64 << 20, sparse=True) as pool:
        yield pool


@pytest.fixture
def requested() -> list[str]:
    return []


@pytest.fixture
def make(
    monkeypatch: pytest.MonkeyPatch, pool_name: str, requested: list[str]
) -> Iterator[Callable[..., Engine]]:
    fake_vllm.installed(monkeypatch, requested)
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(pool_name, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    for name in fake_vllm.OURS:
        sys.modules.pop(f"beluga.connectors.vllm.{name}", None)


def test_one_engine_loads_blocks_saved_by_another(
    server: IndexServer, make: Callable[..., Engine], requested: list[str]
) -> None:
    engine, other = make(), make()
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
    assert requested == ["amx", "amx"]


def test_two_engines_use_a_quarter_of_a_small_pools_lanes(
    server: IndexServer, pool: Pool, make: Callable[..., Engine]
) -> None:
    for engine in (make(), make()):
        engine.run(request("a", TOKENS), 3, fill=7)
    assert server.stat().live_count == 8
    assert pool.geometry.lane_count == 32


@pytest.mark.parametrize("load", ["auto", "sync", "async"])
def test_a_hit_costs_two_calls_of_the_server(
    server: IndexServer, make: Callable[..., Engine], load: str
) -> None:
    """The scheduler's side looks up and releases; the worker makes no call."""
    make().run(request("a", TOKENS), 3, fill=7)
    other, made = make(load=load), request("b", TOKENS)
    before = server.stat().call_count
    assert other.start(made, 8) == (5 * BLOCK_TOKENS, load == "async")
    assert server.stat().call_count == before + 1
    other.step(made)
    if load == "async":
        assert eventually(lambda: other.worker.get_finished(set()) == (None, {"b"}), LONG_S)
    assert server.stat().call_count == before + 1
    other.report()
    assert server.stat().call_count == before + 2
    assert (other.memory[:, 8:13] == 7).all()


def test_the_first_prompt_after_a_start_hits_the_pool(
    server: IndexServer, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
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
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SETTLE_S", LONG_S)  # no caller waits that long
    engine = make(wait=False, timeout_ms=50, retry_s=LONG_S)
    made = request("a", TOKENS)
    assert engine.run(made, 0, fill=1) == 0
    assert engine.scheduler.get_kv_connector_stats().data["lookup_failures"] == 1


def test_asynchronous_loads_complete(server: IndexServer, make: Callable[..., Engine]) -> None:
    engine, other = make(), make(load="async")
    engine.run(request("a", TOKENS), 0, fill=7)
    made = request("b", TOKENS)
    assert other.start(made, 8) == (5 * BLOCK_TOKENS, True)
    other.step(made)
    assert eventually(lambda: other.worker.get_finished(set()) == (None, {"b"}), LONG_S)
    assert (other.memory[:, 8:13] == 7).all()


def test_a_load_that_fails_names_its_blocks(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=7)
    made = request("b", TOKENS)
    other.start(made, 8)
    other.scheduler._schedule._forget_lookup(other.scheduler._schedule._requests["b"])
    cache = other.worker._worker.load_connection._attachment.cache(
        other.scheduler._lookups.ranks[0]
    )
    cache.remove(made.block_hashes[3:])
    other.step(made)
    assert other.worker.get_block_ids_with_load_errors() == {11, 12}
    other.report(invalid={11, 12})
    assert other.scheduler.get_kv_connector_stats().data["hit_tokens"] == 3 * BLOCK_TOKENS
    assert other.scheduler.get_num_new_matched_tokens(made, 0) == (0, False)


def test_after_a_reset_every_lookup_misses(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=7)
    assert other.scheduler.reset_cache() is True
    assert other.run(request("b", TOKENS), 0, fill=8) == 0
    assert other.run(request("c", TOKENS), 8, fill=9) == 5 * BLOCK_TOKENS
    assert (other.memory[:, 8:13] == 8).all()
    assert engine.run(request("d", TOKENS), 8, fill=9) == 5 * BLOCK_TOKENS
    assert (engine.memory[:, 8:13] == 7).all()


def test_blocks_are_announced_when_they_are_in_the_pool(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine, silent = make(events=True), make()
    made = request("a", TOKENS, lora=None)
    engine.run(made, 0, fill=1)
    first, second, *others = list(engine.scheduler.take_events())
    assert (first.block_hashes, first.parent_block_hash) == ([made.block_hashes[0][:8]], None)
    assert (first.token_ids, first.block_size) == (TOKENS[:BLOCK_TOKENS], BLOCK_TOKENS)
    assert (first.medium, first.lora_id, first.lora_name) == ("SHARED", None, None)
    assert (first.group_idx, first.kv_cache_spec_kind) == (0, "full_attention")
    assert first.kv_cache_spec_sliding_window is None
    assert second.parent_block_hash == made.block_hashes[0][:8]
    assert len(others) == 3
    assert list(engine.scheduler.take_events()) == []
    silent.run(request("b", [9] * 21), 0, fill=1)
    assert list(silent.scheduler.take_events()) == []


def test_an_engine_maps_the_pool_once(
    server: IndexServer, pool: Pool, make: Callable[..., Engine]
) -> None:
    engine = make()
    engine.run(request("a", TOKENS), 0, fill=1)
    lines = Path("/proc/self/maps").read_text().splitlines()
    for device in pool.devices:  # the server runs in this process, too
        assert sum(line.endswith(f" {device.path}") for line in lines) == 1


@pytest.mark.parametrize("name", ["", "tuned", "secret"])
def test_announcements_distinguish_salted_blocks_from_others(
    server: IndexServer, pool: Pool, make: Callable[..., Engine], tmp_path: Path, name: str
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
    events = [{**event, "type": "BlockStored", "medium": "GPU"} for event in announced]
    for event in events:  # one message each
        batch = decoder.batch(msgspec.msgpack.encode([1.0, [event]]))
        assert not batch.failed
        assert index.apply_all(batch.events) == 0
    assert index.matches(salted.query(TOKENS)).of(Worker(7)).device == 5
    assert not index.matches(plain.query(TOKENS)).held
    names = read_names(pool, check_pool(pool).half)["name"]
    assert sorted(names["tokens_hash"].tolist()) == sorted(salted.local(TOKENS))


def test_images_are_announced_with_the_blocks_that_show_them(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine = make(events=True)
    engine.run(
        request("a", TOKENS, images=[(MARK + "cat", 5), (MARK + "dog", 6), (MARK + "cow", 15)]),
        0,
        fill=1,
    )
    assert [event.extra_keys for event in engine.scheduler.take_events()] == [
        *([None], [((MARK + "cat", 1), (MARK + "dog", 2))], [None], [((MARK + "cow", 3),)], [None])
    ]


def test_loaded_tokens_and_seconds_are_reported_to_the_server(
    monkeypatch: pytest.MonkeyPatch, server: IndexServer, make: Callable[..., Engine]
) -> None:
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    engine, other = make(), make(prefill_b_ms=250.0)
    engine.run(request("a", TOKENS), 0, fill=1)
    other.run(request("b", TOKENS), 0, fill=2)
    other.run(request("c", TOKENS), 8, fill=2)  # the lookup reports the first end
    figures = server.reported(KINDS.index("vllm"))
    assert figures[report.Figure.SAVED_TOKENS] == 5 * BLOCK_TOKENS
    assert figures[report.Figure.SAVED_NS] == 5 * BLOCK_TOKENS * 250_000_000
    assert not server.reported(0)


def test_a_preempted_request_is_no_longer_saved(
    server: IndexServer, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
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


def test_seconds_and_blocks_are_counted_for_each_process(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=1)
    other.run(request("a", TOKENS), 0, fill=2)
    looked_up = engine.scheduler.get_kv_connector_stats().data
    assert looked_up["lookups"] == 1
    assert "hit_tokens" not in looked_up
    saved = engine.worker.get_kv_connector_stats().data
    assert (saved["save_blocks"], saved["link_unthrottled_pieces"]) == (5, 0)
    assert saved["link_offload_pieces"] >= 1
    assert saved["save_bytes"] == saved["link_offload_bytes"] == engine.memory[:, :5].nbytes
    for each in (looked_up, saved):
        assert each["hook_s"] > each["save_hook_s"] > 0
    assert other.scheduler.get_kv_connector_stats().data["hit_tokens"] == 5 * BLOCK_TOKENS
    loaded = other.worker.get_kv_connector_stats().data
    assert (loaded["loads"], loaded["load_blocks"], loaded["load_failed_blocks"]) == (1, 5, 0)
    assert loaded["load_bytes"] == loaded["link_onboard_bytes"] == saved["save_bytes"]
    assert 0 < loaded["load_s"] < LONG_S
    assert 0 < looked_up["lookup_s"] < LONG_S
    assert 0 < saved["save_s"] < LONG_S
    assert 0 < saved["save_cpu_s"] < LONG_S
    assert engine.worker.get_kv_connector_stats() is None


def test_a_scheduler_reports_the_space_of_its_blocks(
    pool: Pool, server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine = make()
    space = engine.scheduler.get_kv_connector_stats().data["space"]
    assert space == f"{engine.scheduler._lookups.space:016x}"
    assert engine.scheduler.get_kv_connector_stats() is None  # a single one is logged once
    engine.run(request("a", TOKENS), 0, fill=1)
    assert engine.scheduler.get_kv_connector_stats().data["space"] == space
    assert "space" not in engine.worker.get_kv_connector_stats().data
    names = read_names(pool, check_pool(pool).half)
    assert {f"{number:016x}" for number in names["name"]["space"].tolist()} == {space}


def test_the_engine_computes_blocks_that_cannot_be_loaded(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine = make()
    assert engine.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert engine.scheduler.requires_kv_delivery is False


def test_reports_of_two_ranks_add_up(server: IndexServer, make: Callable[..., Engine]) -> None:
    first, other = make(), make()
    first.run(request("a", TOKENS), 0, fill=1)
    reports = []
    for engine in (first, other):
        made = request("b", TOKENS)
        engine.start(made, 8)
        engine.step(made)
        reports.append(engine.worker.build_connector_worker_meta())
    assert reports[0].aggregate(reports[1]) is reports[0]
    assert reports[0].report.loaded == {"b": Loaded(2, 5)}


def test_no_call_is_made_after_the_end(server: IndexServer, make: Callable[..., Engine]) -> None:
    engine = make()
    engine.run(request("a", TOKENS), 0, fill=1)
    assert server.stat().live_count == 4  # lookups, saves, and two for loads
    engine.close()
    assert server.stat().live_count == 0
    worker = engine.worker
    assert worker.get_finished({"a"}) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.start_load_kv(None)
    worker.wait_for_save()
    worker.handle_preemptions(SimpleNamespace(orders=None))


def test_a_hash_that_is_not_reproducible_is_rejected(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = config()
    usual.cache_config.prefix_caching_hash_algo = "builtin"
    monkeypatch.setattr(sys.modules[__name__], "config", lambda: usual)
    with pytest.raises(ConnectorError, match="prefix-caching-hash-algo"):
        make()


def test_a_vllm_without_a_bound_cache_manager_gets_a_clear_error(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine = make()
    made = request("a", TOKENS)
    engine.start(made, 0)
    engine.scheduler._kv_cache_manager = None
    engine.step(made)
    with pytest.raises(ConnectorError, match=r"older than 0\.32"):
        engine.step(made)


def test_the_handshake_is_logged_with_its_result(
    server: IndexServer, make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = make()
    digest = engine.worker._namespace.digest.hex()[:8]
    size = engine.memory[:, 0].nbytes
    assert f"blocks of 4 tokens, {size} bytes on each of 1 ranks; namespace {digest}" in caplog.text


def test_parts_of_ranks_are_requested_in_rank_order(
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    engine = make()

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
    server: IndexServer, make: Callable[..., Engine]
) -> None:
    """MultiConnector gives every connector the handshake of the first one that has any."""
    engine, other = make(), make()
    engine.run(request("a", TOKENS), 0, fill=1)
    other.scheduler._lookups.ranks = other.scheduler._lookups._bases = ()
    other.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(agent="x")})
    assert other.run(request("b", TOKENS), 0, fill=2) == 0
    assert other.run(request("c", TOKENS), 8, fill=2) == 5 * BLOCK_TOKENS


def test_the_namespace_is_that_of_the_rank_and_its_settings(
    server: IndexServer, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
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


def test_figures_of_another_process_are_merged(make: Callable[..., Engine]) -> None:
    kind = type(make(wait=False, timeout_ms=50).scheduler)
    assert kind.build_kv_connector_stats({"loads": 2}).data == {"loads": 2}
    assert kind.build_kv_connector_stats().data == {}
    given = object(), dict.fromkeys((Counter, Gauge), lambda **_: None), ["model_name"], {}
    metrics = kind.build_prom_metrics(*given)
    metrics.observe({"a name of a later version": 1})
    assert metrics.arguments == given


def test_the_connector_is_registered_once(make: Callable[..., Engine]) -> None:
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
