# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool as a secondary tier of vLLM's own offloading, with fakes of vLLM, and below vLLM's own
scheduler.
"""

from __future__ import annotations

import dataclasses
import importlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_vllm import Connector, LookupResult, Role, config
from real_engines import in_vllm
from support.blocks import eventually

from beluga import IndexServer, KVCache, Pool
from beluga.errors import ConnectorError
from beluga.index import BlockState

SIZE, CHUNKS = 4096, 8
KEYS = [bytes([i]) * 32 + bytes(4) for i in range(CHUNKS)]
CONTEXT = SimpleNamespace(req_id="a")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """vLLM's OffloadingParallelConfig."""

    rank: int = 0
    tp_size: int = 1
    data_parallel_index: int = 0
    is_parallelism_agnostic: bool = False


@dataclasses.dataclass(frozen=True)
class Offloading:
    """vLLM's OffloadingConfig."""

    groups: tuple[str, ...] = ("0",)
    worker_kv_bytes_per_block: int = SIZE
    enable_kv_cache_events: bool = False
    extra_config: Any = None
    engine_id: str = "a"
    parallel: Ranks = dataclasses.field(default_factory=Ranks)
    replicated_layout: bool = False


class Engine:
    """vLLM's memory with a tier below it."""

    def __init__(self, pool_name: str, *, offloading: Any = None, **settings: Any) -> None:
        tier = importlib.import_module("beluga.connectors.vllm.tier")
        changes = settings.pop("config", {})
        self._memory = mmap.mmap(-1, SIZE * CHUNKS)
        self.view = memoryview(self._memory).cast("B", (CHUNKS, SIZE))
        self.rows = np.frombuffer(self._memory, np.uint8).reshape(CHUNKS, SIZE)
        given = {"pool": pool_name, "timeout_ms": 5000, "retry_s": 0.05, "identity": "a test"}
        spec = SimpleNamespace(config=offloading or Offloading())

        class Offloader(Connector):
            """vLLM's OffloadingConnector."""

            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.tier = tier.beluga(spec, self_view, "beluga", **(given | settings))

        self_view = self.view
        self.tier = Offloader(config(**changes), Role.SCHEDULER, None).tier
        self._job = 0

    def fill(self, seed: int) -> None:
        self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape)

    def move(self, submit: Callable[[Any], None], keys: list[bytes], chunks: Any) -> Any:
        """Run a job and return its result."""
        self._job += 1
        submit(SimpleNamespace(job_id=self._job, keys=keys, chunk_ids=np.array(chunks)))
        results: list[Any] = []
        assert eventually(lambda: results.extend(self.tier.get_finished_jobs()) or bool(results))
        assert [result.job_id for result in results] == [self._job]
        return results[0]

    def store(self, keys: list[bytes] = KEYS, chunks: Any = range(CHUNKS)) -> Any:
        return self.move(self.tier.submit_store, keys, chunks)

    def load(self, keys: list[bytes] = KEYS, chunks: Any = range(CHUNKS)) -> Any:
        return self.move(self.tier.submit_load, keys, chunks)

    def hits(self, keys: list[bytes] = KEYS) -> list[bool]:
        """Look chunks up in two steps."""
        self.tier.on_request_finished(CONTEXT)
        first = {self.tier.lookup(key, CONTEXT) for key in keys}
        assert first == {LookupResult.RETRY}
        self.tier.on_schedule_end(None)
        answers = [self.tier.lookup(key, CONTEXT) for key in keys]
        assert LookupResult.RETRY not in answers
        return [answer is LookupResult.HIT for answer in answers]


Make = Callable[..., Engine]


@pytest.fixture
def make(vllm: list[str], pool_name: str) -> Iterator[Make]:
    made: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        made.append(Engine(pool_name, **settings))
        return made[-1]

    yield engine
    for each in made:
        each.tier.shutdown()
        each.view.release()  # as vLLM does: nothing else may hold the memory


def test_chunks_of_one_engine_are_loaded_by_another(server: IndexServer, make: Make) -> None:
    a, b = make(), make()
    assert a.hits() == [False] * CHUNKS
    a.fill(1)
    stored = a.store()
    assert (stored.success, stored.transfer_bytes) == (True, SIZE * CHUNKS)
    assert b.hits() == [True] * CHUNKS
    back = list(reversed(range(CHUNKS)))
    loaded = b.load(chunks=back)
    assert (loaded.success, loaded.transfer_bytes) == (True, SIZE * CHUNKS)
    assert (b.rows[back] == a.rows).all()
    assert a.store().success, "what the pool has is stored"


def test_a_chunk_that_is_gone_misses_from_then_on(
    server: IndexServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    a.fill(2)
    a.store()
    assert a.hits() == [True] * CHUNKS
    namespace = a.tier._identified()
    a.tier._connection.attempt(
        "removing", lambda attachment: attachment.cache(namespace).remove(KEYS[3:4])
    )
    result = a.load()
    assert not result.success
    assert result.successful_keys == KEYS[:3]
    answers = [a.tier.lookup(key, CONTEXT) for key in KEYS]
    assert answers == [LookupResult.HIT] * 3 + [LookupResult.MISS] * 5
    assert a.hits() == [True] * 3 + [False] + [True] * 4, "of the next request"


AGNOSTIC = Ranks(is_parallelism_agnostic=True)
OTHERS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"offloading": Offloading(engine_id="b", extra_config={"cpu_bytes_to_use": 7})}, True),
    ({"offloading": Offloading(parallel=Ranks(data_parallel_index=1))}, True),
    ({"offloading": Offloading(groups=("0", "1"))}, False),
    ({"offloading": Offloading(parallel=Ranks(tp_size=2))}, False),
    ({"config": {"dtype": "torch.float16"}}, False),
    ({"config": {"hf": {"rope_theta": 7}}}, False),
    ({"salt": "another tenant's"}, False),
    ({"tenant": "b"}, False),
    ({"identity": "other weights"}, False),
]


@pytest.mark.parametrize(("changes", "shared"), OTHERS, ids=str)
def test_engines_share_chunks_only_if_their_bytes_are_equal(
    server: IndexServer, make: Make, changes: dict[str, Any], shared: bool
) -> None:
    a, b = make(), make(**changes)
    a.store()
    assert b.hits() == [shared] * CHUNKS


def test_chunks_with_a_canonical_layout_are_shared_by_any_number_of_ranks(
    server: IndexServer, make: Make
) -> None:
    two = dataclasses.replace(AGNOSTIC, tp_size=2)
    a = make(offloading=Offloading(parallel=AGNOSTIC))
    b = make(offloading=Offloading(parallel=two, worker_kv_bytes_per_block=SIZE // 2))
    a.store()
    assert b.hits() == [True] * CHUNKS


def test_after_a_reset_an_engine_shares_no_chunks(
    server: IndexServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make(), make()
    a.store()
    a.tier.drain_jobs()
    assert "restart it to share them again" in caplog.text
    assert a.hits() == [False] * CHUNKS
    a.fill(3)
    assert a.store().success
    assert (a.hits(), b.hits()) == ([True] * CHUNKS, [True] * CHUNKS)
    assert b.load().success
    assert not (b.rows == a.rows).all(), "those of before the reset"


def test_without_a_server_chunks_miss_until_it_is_back(pool: Pool, make: Make) -> None:
    a = make()
    assert a.hits() == [False] * CHUNKS
    assert not a.store().success
    assert not a.load().success
    with IndexServer(pool):
        assert eventually(lambda: a.store().success)
        assert a.hits() == [True] * CHUNKS
    assert a.hits() == [False] * CHUNKS


def test_chunks_that_the_pool_refuses_are_reported(
    server: IndexServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    states = np.array([BlockState.GRANTED, BlockState.REFUSED] * (CHUNKS // 2))
    monkeypatch.setattr(KVCache, "put", lambda *_: SimpleNamespace(states=states))
    assert not a.store().success


def test_jobs_that_wait_at_the_end_are_finished(server: IndexServer, make: Make) -> None:
    a = make()
    for job in range(20):
        keys = [bytes([job, i]) * 18 for i in range(CHUNKS)]
        a.tier.submit_store(SimpleNamespace(job_id=job, keys=keys, chunk_ids=np.arange(CHUNKS)))
    a.tier.shutdown()
    results = {result.job_id: result.success for result in a.tier.get_finished_jobs()}
    assert results == dict.fromkeys(range(20), True)
    assert not a.store().success, "after the end"


def test_a_tier_without_a_configuration_or_with_wrong_settings_is_refused(
    vllm: list[str], pool_name: str
) -> None:
    tier = importlib.import_module("beluga.connectors.vllm.tier")
    view = memoryview(bytearray(SIZE)).cast("B", (1, SIZE))
    spec = SimpleNamespace(config=Offloading())
    with pytest.raises(ConnectorError, match="no KV connector makes this tier"):
        tier.beluga(spec, view, "beluga", pool=pool_name)
    with pytest.raises(ConnectorError, match="beluga has no setting root_dir"):
        tier.beluga(spec, view, "beluga", root_dir="/x")


@pytest.mark.slow
def test_vllm_makes_the_tier_and_another_process_loads_its_chunks(
    vllm_python: str, tiny_model: Path, server: IndexServer, pool_name: str
) -> None:
    stored = in_vllm(vllm_python, "tier", str(tiny_model), pool_name, "store")
    assert stored == {"hits": [False] * 16, "done": [True], "equal": True}
    loaded = in_vllm(vllm_python, "tier", str(tiny_model), pool_name, "load")
    assert loaded == {"hits": [True] * 16, "done": [True], "equal": True}
