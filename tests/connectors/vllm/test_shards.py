# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines with different numbers of ranks share blocks, and no rank gets another one's heads."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from support.blocks import eventually
from vllm_parts import (
    BLOCK_TOKENS,
    Tensor,
    cache_config,
    config,
    no_extra_keys,
    request,
    spec,
)

from beluga import IndexServer, Pool
from beluga.connectors.connection import Connection
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.identity import namespace
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.parts import BlockPart, part_of
from beluga.connectors.vllm.schedule import Schedule
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.shards import head_shards
from beluga.connectors.vllm.worker import RankWorker

LAYERS, BLOCKS, HEADS, CONTENT = 2, 16, 4, 6
TOKENS = list(range(100, 100 + 5 * BLOCK_TOKENS + 1))  # five blocks and a token
LOGGER, LONG_S = logging.getLogger("test"), 60.0
ORDERS = {  # the axes of memory, from the slowest
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def memory_in(order: str, heads: int, blocks: int = BLOCKS) -> np.ndarray:
    """Return memory with the axes (layer, block, head, token, content), which lie in this order."""
    sizes = (LAYERS, blocks, heads, BLOCK_TOKENS, CONTENT)
    axes = ORDERS[order]
    made = np.zeros([sizes[axis] for axis in axes], np.uint16)
    return made.transpose(np.argsort(axes))


class Rank:
    """The worker of a rank, with its heads of every block."""

    def __init__(self, pool: str, size: int, rank: int, order: str, **settings: Any) -> None:
        self.heads = max(1, HEADS // size)
        self.memory = memory_in(order, self.heads)
        tensors = {f"layer.{n}": Tensor(self.memory[n]) for n in range(LAYERS)}
        page = self.memory[0, 0].nbytes
        pages = dict.fromkeys(tensors, page)
        self.layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes=pages)
        made = config(tensor_parallel_size=size)
        specs = [spec(num_kv_heads=self.heads, page_size_bytes=page)]
        self.part = part_of(made, specs, tp_rank=rank, pp_rank=0, model_heads=HEADS)
        shards = head_shards(self.layout, self.part, order, pages)
        assert shards is not None
        self.space = namespace(
            made,
            version="0.32.0",
            layout=self.layout,
            packing=order,
            layers={"layer.0": f"full of {HEADS}"},
            part=self.part.name,
            pp_rank=0,
            salt="",
            declared=shards.declared,
        )
        self.counters = ConnectorCounters()
        self.worker = RankWorker(
            VllmSettings(pool=pool, timeout_ms=5000, retry_s=0.05, **settings),
            self.layout,
            self.space,
            self.counters,
            LOGGER,
            part=self.part,
            shards=shards.all(),
        )
        assert all(connection.wait(LONG_S) for connection in self.worker._connections)

    def own(self, whole: np.ndarray) -> np.ndarray:
        """Return this rank's heads from memory with all heads."""
        return whole[:, :, self.part.first : self.part.first + self.part.count]


class Engine:
    """All ranks of an engine, and its scheduler's side."""

    def __init__(self, pool: str, size: int, order: str, **settings: Any) -> None:
        self.ranks = [Rank(pool, size, rank, order, **settings) for rank in range(size)]
        given = VllmSettings(pool=pool, timeout_ms=5000, retry_s=0.05, **settings)
        self._connection = Connection(given, name="lookups", logger=LOGGER)
        self.counters = ConnectorCounters()
        self.lookups = Lookups(self._connection, self.counters)
        self.schedule = Schedule(
            given,
            self.lookups,
            self.counters,
            block_size=BLOCK_TOKENS,
            block_count=BLOCKS,
            block_ids_of=lambda _: list(range(8)),
            extra_keys_of=no_extra_keys,
        )
        assert self._connection.wait(LONG_S)
        self.lookups.meet(
            [rank.space for rank in self.ranks],
            block_bytes=max(rank.layout.block_size for rank in self.ranks),
            heads=HEADS,
            splits=self.ranks[0].worker.splits,
        )
        self.lookups.identified("weights")

    def saves(self, whole: np.ndarray, count: int = 5) -> None:
        """Compute leading blocks of a prompt, and save them."""
        made = request(f"save {count}", TOKENS[: count * BLOCK_TOKENS + 1])
        for rank in self.ranks:
            rank.memory[:, :8] = rank.own(whole)[:, :8]
        tokens, _ = self.schedule.matched_tokens(made, 0)
        assert tokens is not None
        self.schedule.allocated(made, list(range(8)), 0)
        self.schedule.orders({made.request_id: made.num_tokens}, [])
        made.num_computed_tokens = made.num_tokens
        orders = self.schedule.orders({}, [])
        for rank in self.ranks:
            rank.worker.save(orders)
            names = {made.request_id}
            assert eventually(lambda: rank.worker.saves.ended(names) == names, LONG_S)  # noqa: B023
        self.schedule.finished(made, [])

    def loads(self) -> tuple[int, set[int]]:
        """Load a prompt into blocks from 8 on. Returns its tokens, and the blocks that failed."""
        made = request("load", TOKENS)
        for rank in self.ranks:
            rank.memory[...] = 9
        tokens, concurrent = self.schedule.matched_tokens(made, 0)
        assert tokens is not None
        self.schedule.allocated(made, list(range(8, 14)), tokens)
        orders = self.schedule.orders({}, [])
        failed: set[int] = set()
        for rank in self.ranks:
            rank.worker.load(orders)
            if concurrent:
                assert eventually(lambda: bool(rank.worker.loads.arrived()), LONG_S)  # noqa: B023
            failed |= rank.worker.loads.failed()
            self.schedule.reported(rank.worker.report(), failed)
        self.schedule.finished(made, [])
        return tokens, failed

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        self._connection.close()


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    """A pool with lanes for many ranks."""
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=64 << 20, sparse=True, lane_count=60) as pool:
        yield pool


@pytest.fixture
def make(server: IndexServer, pool_name: str) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(size: int, order: str = "LBHNC", **settings: Any) -> Engine:
        made.append(Engine(pool_name, size, order, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def whole() -> np.ndarray:
    """The KV of a prompt, of all heads."""
    memory = memory_in("LBHNC", HEADS)
    memory[...] = np.random.default_rng(3).integers(0, 1 << 16, memory.shape, dtype=np.uint16)
    return memory


def check(engine: Engine, whole: np.ndarray, count: int) -> None:
    """Check that each rank has its heads of these blocks, and that no other bytes were written."""
    for rank in engine.ranks:
        assert (rank.memory[:, 8 : 8 + count] == rank.own(whole)[:, :count]).all()
        assert (rank.memory[:, :8] == 9).all()
        assert (rank.memory[:, 8 + count :] == 9).all()


PAIRS = [(order, *pair) for order in ORDERS for pair in itertools.product((1, 2, 4), repeat=2)]
TWICE = [
    ("LBNHC", *pair) for pair in ((1, 8), (8, 1), (4, 8), (8, 2), (8, 8))
]  # heads on two ranks


@pytest.mark.parametrize(("order", "stores", "finds"), [*PAIRS, *TWICE])
def test_blocks_stored_by_some_ranks_are_hits_for_others(
    make: Callable[..., Engine], whole: np.ndarray, order: str, stores: int, finds: int
) -> None:
    make(stores, order).saves(whole)
    engine = make(finds, order)
    assert engine.loads() == (5 * BLOCK_TOKENS, set())
    check(engine, whole, 5)


def test_a_prompt_may_be_stored_by_two_engines_in_turn(
    server: IndexServer, make: Callable[..., Engine], whole: np.ndarray
) -> None:
    own, other = make(2), make(1)
    own.saves(whole, 2)
    other.saves(whole, 5)  # finds two blocks, and stores three
    before = server.stat().call_count
    assert own.loads() == (5 * BLOCK_TOKENS, set())
    check(own, whole, 5)
    # two lookups and a tier query between them, two releases, and no calls by the ranks
    assert server.stat().call_count - before == 5


def test_a_miss_costs_one_more_call(server: IndexServer, make: Callable[..., Engine]) -> None:
    engine = make(2)
    before = server.stat().call_count
    assert engine.loads() == (0, set())
    assert server.stat().call_count - before == 2
    assert engine.counters.take()["lookups"] == 1


def test_pipeline_stages_find_only_their_own_blocks(
    make: Callable[..., Engine], whole: np.ndarray
) -> None:
    make(1).saves(whole)
    engine = make(2)
    engine.lookups.meet([rank.space for rank in engine.ranks], heads=0, splits=(1, 4))
    assert engine.loads() == (0, set())


@pytest.mark.parametrize("load", ["sync", "async"])
def test_an_evicted_part_is_a_miss_for_all_ranks(
    make: Callable[..., Engine], whole: np.ndarray, load: str
) -> None:
    """The rank whose heads are stored fails no block; the engine computes those that the other one
    lacks.
    """
    other, own = make(4), make(2, load=load)
    other.saves(whole)
    cache = other.ranks[3].worker.load_connection._attachment.cache(  # type: ignore[union-attr]
        other.lookups.ranks[3]
    )
    made, schedule = request("load", TOKENS), own.schedule
    tokens, _ = schedule.matched_tokens(made, 0)
    assert tokens == 5 * BLOCK_TOKENS
    cache.remove(made.block_hashes[2:3])
    schedule.allocated(made, list(range(8, 14)), tokens)
    orders = schedule.orders({}, [])
    failed = []
    for rank in own.ranks:
        rank.memory[...] = 9
        rank.worker.load(orders)
        if load == "async":
            assert eventually(lambda: bool(rank.worker.loads.arrived()), LONG_S)  # noqa: B023
        failed.append(rank.worker.loads.failed())
    assert failed == [set(), {10, 11, 12}]
    check_first = own.ranks[1]
    assert (check_first.memory[:, 8:10] == check_first.own(whole)[:, :2]).all()


def test_after_a_failed_part_of_one_engine_those_of_others_are_not_loaded(
    make: Callable[..., Engine], whole: np.ndarray
) -> None:
    own, other = make(2), make(1)
    own.saves(whole, 2)
    other.saves(whole, 5)
    made = request("load", TOKENS)
    tokens, _ = own.schedule.matched_tokens(made, 0)
    assert tokens == 5 * BLOCK_TOKENS
    cache = own.ranks[0].worker.load_connection._attachment.cache(  # type: ignore[union-attr]
        own.lookups.ranks[0]
    )
    cache.remove(made.block_hashes[1:2])
    own.schedule.allocated(made, list(range(8, 14)), tokens)
    rank = own.ranks[0]
    rank.worker.load(own.schedule.orders({}, []))
    assert rank.worker.loads.failed() == {9, 10, 11, 12}


@pytest.mark.parametrize(
    "why", ["the order's name is unknown", "memory contradicts the name", "other heads", "a page"]
)
def test_a_layout_with_unknown_heads_is_not_cut(why: str) -> None:
    memory = memory_in("LBNHC" if why == "memory contradicts the name" else "LBHNC", 2)
    tensors = {f"layer.{n}": Tensor(memory[n]) for n in range(LAYERS)}
    layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
    part = BlockPart(0, "heads 0-2/4", heads=4, first=0, count=3 if why == "other heads" else 2)
    order = "NHD" if why == "the order's name is unknown" else "LBHNC"
    size = memory[0, 0].nbytes + (why == "a page")
    assert head_shards(layout, part, order, dict.fromkeys(tensors, size)) is None


def test_a_private_part_is_not_cut() -> None:
    memory = memory_in("LBHNC", 2)
    layout = GroupLayout({"layer": Tensor(memory[0])}, block_count=BLOCKS, page_sizes={})
    pages = {"layer": memory[0, 0].nbytes}
    assert head_shards(layout, BlockPart(0, "0/2"), "LBHNC", pages) is None


def test_blocks_of_a_kernel_are_cut_as_one_block() -> None:
    """Each block consists of two kernel blocks, with half of its tokens each."""
    memory = np.zeros((2 * BLOCKS, 2, BLOCK_TOKENS, CONTENT), np.uint16)
    size = 2 * memory[0].nbytes
    tensors = {"layer": Tensor(memory)}
    layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={"layer": size})
    part = BlockPart(0, "heads 0-2/4", heads=4, first=0, count=2)
    shards = head_shards(layout, part, "LBHNC", {"layer": size})
    assert shards is not None
    halves = [shard for shard in shards.all() if shard.split == 1]
    assert [shard.name for shard in halves] == ["heads 0-1/4", "heads 1-2/4"]
    addresses = halves[1].pieces.fragments([3])[:, 0] - memory.ctypes.data
    head = memory[0, 0].nbytes
    assert addresses.tolist() == [6 * 2 * head + head, 7 * 2 * head + head]


def test_scheduler_and_worker_agree_on_parts_and_shards(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reports which parts it has and can read, and the scheduler looks those up."""
    made: list[Any] = []

    def connector(role: str, rank: int = 0) -> Any:
        fake_vllm.installed(monkeypatch, tp_rank=rank)
        module = importlib.import_module("beluga.connectors.vllm.connector")
        engine = config(tensor_parallel_size=2)
        monkeypatch.setattr(
            type(engine.model_config), "get_total_num_kv_heads", lambda _: HEADS, raising=False
        )
        engine.kv_transfer_config = SimpleNamespace(
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"pool": pool_name, "timeout_ms": 5000},
        )
        engine.kv_events_config = None
        page = memory_in("LBHNC", HEADS // 2)[0, 0].nbytes
        caches = cache_config(spec(page_size_bytes=page), num_blocks=BLOCKS, layers=LAYERS)
        made.append(module.BelugaConnector(engine, getattr(fake_vllm.Role, role), caches))
        return made[-1]

    try:
        reported = {}
        for rank in range(2):
            memory = memory_in("LBHNC", HEADS // 2)
            worker = connector("WORKER", rank)
            worker.register_kv_caches({f"layer.{n}": Tensor(memory[n]) for n in range(LAYERS)})
            reported[0, rank] = worker.get_handshake_metadata()
            assert (
                reported[0, rank].rank.namespace.fields["tp"]
                == f"heads {2 * rank}-{2 * rank + 2}/4"
            )
            assert (reported[0, rank].rank.heads, reported[0, rank].rank.splits) == (4, (1, 4))
        scheduler = connector("SCHEDULER")
        scheduler._meet([reported[0, rank].rank for rank in range(2)])
        scheduler._lookups.identified("weights")
        assert len(scheduler._lookups.ranks) == scheduler._lookups.worker_count == 2
        others = {
            split: [space.fields["tp"] for space in spaces]
            for split, spaces in scheduler._lookups._others.items()
        }
        assert others == {1: [f"heads {n}-{n + 1}/4" for n in range(4)], 4: ["heads 0-4/4"]}
    finally:
        for each in made:
            each.shutdown()
        for name in fake_vllm.OURS:
            sys.modules.pop(f"beluga.connectors.vllm.{name}", None)
