# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The offloading spec's two sides with fakes of vLLM, over a served pool."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from blocks import eventually
from fake_vllm import LookupResult, ReqContext, key_of
from prometheus_client import Counter
from vllm_parts import BLOCK_TOKENS, cache_config, config, layer_major, spec

from beluga import MetaServer, Namespace
from beluga.connectors.connection import Attachment
from beluga.connectors.vllm.rendezvous import Rendezvous
from beluga.connectors.vllm.settings import VllmSettings
from beluga.errors import ConnectorError

HASHES = [bytes([i]) * 32 for i in range(1, 9)]
KEYS = [key_of(one) for one in HASHES]
RANKS = [Namespace({"rank": i}, salt="s") for i in (0, 1)]
HIT, MISS = LookupResult.HIT, LookupResult.MISS
LAYERS, BLOCKS = 2, 16
LONG_S = 60.0


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_vllm.installed(monkeypatch)
    yield
    for name in fake_vllm.OURS:
        sys.modules.pop(f"beluga.connectors.vllm.{name}", None)


@pytest.fixture
def workers(server: MetaServer, pool_name: str) -> Iterator[Attachment]:
    """A session of two ranks that have left their cards."""
    attachment = Attachment(VllmSettings(pool=pool_name, timeout_ms=10000, salt="s"))
    for number, rank in enumerate(RANKS):
        assert Rendezvous("engine", "s").leave(attachment, number, rank)
    yield attachment
    attachment.close()


@pytest.fixture
def make(pool_name: str) -> Iterator[Callable[..., Any]]:
    """A function that makes the scheduler's side and waits until it knows its ranks."""
    made: list[Any] = []

    def make(*, events: bool = True, met: bool = True, **settings: Any) -> Any:
        module = importlib.import_module("beluga.connectors.vllm.manager")
        usual = {"pool": pool_name, "timeout_ms": 5000, "salt": "s"}
        parallel = SimpleNamespace(world_size=len(RANKS))
        engine = SimpleNamespace(
            engine_id="engine", enable_kv_cache_events=events, parallel=parallel
        )
        made.append(module.BelugaManager(VllmSettings(**(usual | settings)), engine))
        if met:
            assert eventually(lambda: made[-1].met and made[-1].attached, LONG_S)
        return made[-1]

    yield make
    for manager in made:
        manager.shutdown()


def put(attachment: Attachment, first: int, last: int, ranks: list[Namespace] = RANKS) -> None:
    for rank in ranks:
        blocks = np.ones((last - first, 4096), dtype=np.uint8)
        attachment.cache(rank).put(HASHES[first:last], blocks)


def pinned(attachment: Attachment) -> int:
    return attachment.cache(RANKS[0]).stat().pinned_count


def request(name: str, *, load: bool = True) -> ReqContext:
    context = ReqContext(name, load=load)
    for place, key in enumerate(KEYS):
        context.set_offload_key_position(key, (place + 1) * 16)
    return context


def test_what_all_ranks_have_is_a_hit_and_stays_while_it_is_loaded(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    put(workers, 0, 4)
    put(workers, 4, 5, RANKS[1:])
    manager, one = make(), request("one")
    manager.on_new_request(one)
    assert [manager.lookup(key, one) for key in KEYS[:6]] == [HIT] * 4 + [MISS] * 2
    assert manager.get_stats().data["beluga_vllm_offload_lookups"] == 1  # one call for all blocks
    assert pinned(workers) == 4 * len(RANKS)
    assert manager.prepare_load(KEYS[:4], one).digests == b"".join(HASHES[:4])
    manager.on_schedule_end(SimpleNamespace(new_req_ids=["one"], preempted_req_ids=()))
    assert pinned(workers) == 4 * len(RANKS)
    manager.complete_load(set(KEYS[:4]), one)
    assert pinned(workers) == 0
    assert manager.lookup(KEYS[0], one) == MISS  # the load may have failed
    manager.on_schedule_end(SimpleNamespace(new_req_ids=[], preempted_req_ids=["one"]))
    assert manager.lookup(KEYS[0], one) == HIT
    manager.on_request_finished(one)
    assert pinned(workers) == 0


def test_a_block_on_its_way_to_the_pool_is_asked_for_again(
    make: Callable[..., Any], server: MetaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, one = make(met=False), ReqContext("one")
    answers = [None, True, False]
    monkeypatch.setattr(manager._answers, "ask", lambda *_: answers.pop(0))
    assert [manager.lookup(KEYS[0], one) for _ in range(3)] == [LookupResult.RETRY, HIT, MISS]


def test_a_request_that_starts_without_a_load_lets_go(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    put(workers, 0, 4)
    manager, one = make(), request("one")
    assert manager.lookup(KEYS[0], one) == HIT  # vLLM may ask before it announces the request
    assert pinned(workers) > 0
    manager.on_schedule_end(SimpleNamespace(new_req_ids=["one"], preempted_req_ids=()))
    assert pinned(workers) == 0


def test_a_request_that_wants_nothing_loaded_is_not_looked_up(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    put(workers, 0, 4)
    manager, one = make(), request("one", load=False)
    manager.on_new_request(one)
    assert manager.lookup(KEYS[0], one) == MISS
    assert manager.get_stats() is None


def test_keys_whose_places_are_not_known_are_asked_for_alone(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    put(workers, 0, 4)
    manager, one = make(), ReqContext("one")
    assert [manager.lookup(key, one) for key in KEYS[:2]] == [HIT, HIT]
    assert manager.get_stats().data["beluga_vllm_offload_lookups"] == 2


def test_blocks_are_announced_as_far_as_all_ranks_have_stored_them(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    manager, one = make(), request("one")
    stored = manager.prepare_store(KEYS[4:], one)
    assert (stored.keys_to_store, stored.evicted_keys) == (KEYS[4:], [])
    assert stored.store_spec.digests == b"".join(HASHES[4:])
    put(workers, 4, 6)
    put(workers, 6, 7, RANKS[1:])
    manager.complete_store(set(KEYS[4:]), one)
    (event,) = manager.take_events()
    assert (event.keys, event.medium.value, event.removed) == (KEYS[4:6], "CPU", False)
    assert list(manager.take_events()) == []
    manager.complete_store({KEYS[7]}, one)
    assert list(manager.take_events()) == []  # nothing was stored
    assert pinned(workers) == 0


def test_without_listeners_nothing_is_looked_up_for_them(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    manager, one = make(events=False), request("one")
    put(workers, 0, 1)
    manager.complete_store({KEYS[0]}, one)
    assert manager.take_events() == ()
    assert manager.get_stats() is None


def test_an_engine_that_only_reads_stores_nothing(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    stored = make(save=False).prepare_store(KEYS, request("one"))
    assert (stored.keys_to_store, stored.store_spec.digests) == ([], b"")


def test_after_a_reset_nothing_from_before_is_found(
    workers: Attachment, make: Callable[..., Any]
) -> None:
    put(workers, 0, 4)
    manager, one = make(), request("one")
    assert manager.lookup(KEYS[0], one) == HIT
    manager.prepare_load(KEYS[:4], one)
    manager.reset_cache()
    assert pinned(workers) == 0
    two = request("two")
    assert manager.lookup(KEYS[0], two) == MISS
    assert manager.prepare_store(KEYS[:1], two).store_spec.digests != HASHES[0]


def test_before_it_has_met_its_workers_all_is_a_miss(
    server: MetaServer, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    manager = make(met=False, timeout_ms=200)
    assert not manager.met
    assert "no word of the workers in the pool yet" in caplog.text
    assert manager.lookup(KEYS[0], request("one")) == MISS


def test_without_a_pool_nothing_is_stored(make: Callable[..., Any], pool_name: str) -> None:
    manager = make(met=False, timeout_ms=100)
    assert not manager.attached
    assert manager.prepare_store(KEYS, request("one")).keys_to_store == []


def test_whom_it_has_met_is_logged(
    workers: Attachment, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make()
    assert f"met 2 of the engine's ranks; namespace {RANKS[0].digest.hex()[:8]}" in caplog.text


# ---- The spec.


def engine_config(extra: dict[str, Any], groups: int = 1) -> Any:
    return SimpleNamespace(
        extra_config=extra,
        enable_kv_cache_events=False,
        engine_id="engine",
        parallel=SimpleNamespace(world_size=1, rank=0),
        groups=[SimpleNamespace(tokens_per_block=BLOCK_TOKENS)] * groups,
    )


def vllm_config(**changes: Any) -> Any:
    made = config()
    made.cache_config.prefix_caching_hash_algo = changes.pop("hash", "sha256")
    made.kv_transfer_config = SimpleNamespace(
        kv_load_failure_policy=changes.pop("policy", "recompute")
    )
    made.lora_config = changes.pop("lora", None)
    assert not changes
    return made


@pytest.fixture
def module() -> Any:
    return importlib.import_module("beluga.connectors.vllm.offloading")


class Side:
    """A spec in vLLM's worker process, among its connectors."""

    def __init__(self, module: Any, pool_name: str, *, several: bool = False, **changes: Any):
        extra = {"pool": pool_name, "timeout_ms": 5000, "spec_name": "x", "load": "sync"}
        self.spec = module.BelugaOffloadingSpec(engine_config(extra))
        tensors, self.memory = layer_major(LAYERS, BLOCKS, BLOCK_TOKENS, 8)
        page = self.memory[0, 0].nbytes
        kinds = spec(page_size_bytes=page)
        worker_side = SimpleNamespace(
            spec=self.spec,
            vllm_config=vllm_config(**changes),
            kv_cache_config=cache_config(kinds, num_blocks=BLOCKS, layers=LAYERS),
        )
        self.connector = SimpleNamespace(connector_worker=worker_side)
        group = sys.modules["vllm.distributed.kv_transfer"].group  # type: ignore[attr-defined]
        if several:
            other = SimpleNamespace(connector_worker=None)
            group.sub_connectors = lambda: [other, self.connector]
        else:
            vars(group).update(vars(self.connector))
            self.connector = group
        parts = [SimpleNamespace(tensor=one, page_size_bytes=page) for one in tensors.values()]
        self.worker = self.spec.get_worker(SimpleNamespace(tensors=parts))

    def ended(self, count: int = 1) -> list[Any]:
        found: list[Any] = []
        assert eventually(
            lambda: len(found.extend(self.worker.get_finished()) or found) >= count, LONG_S
        )
        return found


def test_the_spec_is_refused_beside_other_connectors(
    server: MetaServer, module: Any, pool_name: str
) -> None:
    with pytest.raises(ConnectorError, match="use BelugaConnector inside MultiConnector"):
        Side(module, pool_name, several=True)


def test_jobs_save_and_load(server: MetaServer, module: Any, pool_name: str) -> None:
    side = Side(module, pool_name)
    connections = (
        side.worker._jobs._worker.load_connection,
        side.worker._jobs._worker.save_connection,
    )
    assert all(connection.wait(LONG_S) for connection in connections)
    side.memory[:, 2:4] = 9
    there = SimpleNamespace(digests=b"".join(HASHES[:2]))
    here = SimpleNamespace(block_ids=np.array([2, 3]))
    assert side.worker.submit_store(1, here, there)
    side.worker.wait({1})
    (stored,) = side.ended()
    assert (stored.job_id, stored.success) == (1, True)
    assert stored.transfer_size == side.memory[:, 2:4].nbytes
    assert stored.transfer_time > 0
    elsewhere = SimpleNamespace(block_ids=np.array([7, 5]))
    assert side.worker.submit_load(2, there, elsewhere, expedited=False)
    (loaded,) = side.ended()
    assert (loaded.job_id, loaded.success) == (2, True)
    assert (side.memory[:, [5, 7]] == 9).all()
    assert not side.memory[:, 6].any()
    missing = SimpleNamespace(digests=b"".join(HASHES[4:6]))
    side.worker.submit_load(3, missing, SimpleNamespace(block_ids=np.array([10, 11])))
    assert side.ended()[0].success  # a failure would kill vLLM
    assert side.connector.get_block_ids_with_load_errors() == {10, 11}
    counted = side.connector.get_kv_connector_stats().data
    assert counted["beluga_vllm_offload_save_blocks"] == 2
    assert counted["beluga_vllm_offload_load_failed_blocks"] == 2
    assert side.connector.get_kv_connector_stats() is None
    side.worker.shutdown()


def test_the_workers_card_is_found_by_the_manager(
    server: MetaServer, module: Any, pool_name: str
) -> None:
    side = Side(module, pool_name)
    manager = side.spec.get_manager()
    assert eventually(lambda: manager.met, LONG_S)
    manager.shutdown()
    side.worker.shutdown()


def test_a_spec_without_its_connector_is_told_so(
    server: MetaServer, module: Any, pool_name: str
) -> None:
    alone = module.BelugaOffloadingSpec(engine_config({"pool": pool_name}))
    with pytest.raises(ConnectorError, match="finds none around it"):
        alone.get_worker(SimpleNamespace(tensors=[]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"hash": "xxhash"}, "prefix_caching_hash_algo"),
        ({"lora": object()}, "use BelugaConnector with LoRA"),
    ],
    ids=lambda one: "",
)
def test_an_engine_that_could_get_wrong_blocks_is_refused(
    module: Any, pool_name: str, change: dict[str, Any], said: str
) -> None:
    module.check_engine(vllm_config())
    with pytest.raises(ConnectorError, match=said):
        Side(module, pool_name, **change)


@pytest.mark.parametrize(
    "setting", ["blocks_per_chunk", "block_size", "canonical_layout", "sync_load_budget_bytes"]
)
def test_settings_that_it_cannot_serve_are_refused(module: Any, setting: str) -> None:
    with pytest.raises(ConnectorError, match=f"with {setting}; leave it out"):
        module.BelugaOffloadingSpec(engine_config({setting: 2}))
    module.BelugaOffloadingSpec(engine_config({setting: 0}))


def test_settings_and_groups_that_are_not_known_are_refused(module: Any) -> None:
    with pytest.raises(ConnectorError, match="knows no setting polo"):
        module.BelugaOffloadingSpec(engine_config({"polo": "a"}))
    with pytest.raises(ConnectorError, match="has 2 groups; beluga serves one"):
        module.BelugaOffloadingSpec(engine_config({}, groups=2))
    for known in module.VLLM_SETTINGS:
        module.BelugaOffloadingSpec(engine_config({known: "x"}))


def test_each_counter_has_a_definition_under_its_name(module: Any) -> None:
    for _ in range(2):  # a second engine of the process defines and makes them again
        found = module.BelugaOffloadingSpec.build_metric_definitions({})
        made = [Counter(name, each.documentation) for name, each in found.items()]
    assert found["beluga_vllm_offload_load_blocks"].documentation == "Beluga: blocks loaded."
    assert "beluga_vllm_offload_load_seconds" in found
    assert len(found) == len(made) == len(module.NAMES)
    module.forget_collectors()
