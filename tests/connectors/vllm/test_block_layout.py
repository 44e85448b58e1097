# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Layouts of blocks: every known arrangement gives the same bytes in the same order, others are
refused, and the heads of one rank are found in what other numbers of ranks have stored.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import numpy as np
import pytest
from fake_vllm import (
    BLOCK_TOKENS,
    Tensor,
    cache_config,
    config,
    layer_major,
    request,
    spec,
)
from numpy.lib.stride_tricks import as_strided
from scene import LOGGER, LONG_S, Scheduler, set_connector, wait_for
from scene import TOKENS as PROMPT

from beluga import IndexServer, KVCache, Namespace, Pool
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.identity import namespace
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.parts import BlockPart, part_of
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.shards import head_shards
from beluga.connectors.vllm.steps import Orders
from beluga.connectors.vllm.worker import RankWorker
from beluga.errors import ConnectorError

MODEL_HEADS = 4


LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 3, 7, 2, 16, 32


def fill(memory: np.ndarray) -> None:
    memory[...] = np.random.default_rng(7).integers(0, 1 << 16, memory.shape, dtype=np.uint16)


def layout_of(tensors: dict[str, Tensor]) -> GroupLayout:
    return GroupLayout(tensors, block_count=BLOCKS, page_sizes={})


# By name: the shape of memory, what a layer has of it, and the separate fragments of a block.
KNOWN: dict[str, tuple[tuple[int, ...], Callable[[Any, int], Any], int]] = {
    "layer-major": ((LAYERS, BLOCKS, HEADS, TOKENS, 2 * SIZE), operator.getitem, LAYERS),
    # all layers of a block are adjacent
    "block-outermost": ((BLOCKS, LAYERS, HEADS, TOKENS, 2 * SIZE), lambda all_, i: all_[:, i], 1),
    # K of all blocks is followed by V of all blocks
    "keys apart": ((LAYERS, 2, BLOCKS, TOKENS, HEADS, SIZE), operator.getitem, 2 * LAYERS),
    # heads come after tokens in memory but before them in the shape (NHD seen as HND)
    "tokens first": (
        (LAYERS, BLOCKS, TOKENS, HEADS, SIZE),
        lambda all_, i: all_[i].transpose(0, 2, 1, 3),
        LAYERS,
    ),
    # MLA has one latent vector per token and no heads
    "latent": ((LAYERS, BLOCKS, TOKENS, 576), operator.getitem, LAYERS),
}


def known(name: str) -> tuple[dict[str, Tensor], np.ndarray]:
    shape, layer_of, _ = KNOWN[name]
    memory = np.zeros(shape, np.uint16)
    return {f"layer.{i}": Tensor(layer_of(memory, i)) for i in range(LAYERS)}, memory


@pytest.mark.parametrize("name", KNOWN)
def test_blocks_are_written_to_the_pool_and_read_back(
    name: str, pool: Pool, server: IndexServer
) -> None:
    source_tensors, source = known(name)
    target_tensors, _ = known(name)
    fill(source)
    source_layout, target_layout = layout_of(source_tensors), layout_of(target_tensors)
    assert len(source_layout.pieces) == KNOWN[name][2]
    assert source_layout.block_size == source.nbytes // BLOCKS
    digests = [bytes([i]) * 32 for i in range(3)]
    with KVCache(pool, namespace=name) as cache:
        assert cache.put(digests, source_layout.run([5, 0, 3])).stored == 3
        assert cache.get(digests, target_layout.run([1, 6, 2])).hits == 3
    for tensor, other in zip(source_tensors.values(), target_tensors.values(), strict=True):
        axis = 1 if name == "keys apart" else 0
        assert np.array_equal(
            tensor.array.take([5, 0, 3], axis=axis), other.array.take([1, 6, 2], axis=axis)
        )
        assert not other.array.take([0, 3, 4, 5], axis=axis).any()


def test_the_same_shape_in_another_order_is_another_layout() -> None:
    heads_first, _ = layer_major(LAYERS, BLOCKS, HEADS, TOKENS, SIZE)
    swapped, _ = known("tokens first")
    first, second = layout_of(heads_first), layout_of(swapped)
    assert [t.shape for t in heads_first.values()] == [t.shape for t in swapped.values()]
    assert first.block_size == second.block_size
    assert first.declared != second.declared


def test_shared_layers_padding_and_axes_of_length_one_add_no_bytes() -> None:
    tensors, _ = layer_major(LAYERS, BLOCKS, HEADS, TOKENS, SIZE)
    alone = layout_of(dict(tensors))
    tensors["layer.9"] = tensors["layer.1"]
    assert layout_of(tensors).block_size == alone.block_size
    memory = np.zeros((BLOCKS, HEADS * TOKENS * SIZE + 64), dtype=np.uint16)
    page = memory[:, :-64].reshape(BLOCKS, HEADS, TOKENS, SIZE)
    assert np.shares_memory(page, memory)
    assert layout_of({"layer": Tensor(page)}).block_size == HEADS * TOKENS * SIZE * 2
    array = np.zeros((BLOCKS, TOKENS, SIZE, 1), dtype=np.uint16)
    layout = layout_of({"layer": Tensor(array)})
    assert (layout.block_size, len(layout.pieces)) == (TOKENS * SIZE * 2, 1)


OTHERS: list[tuple[np.ndarray, int, dict[str, int], str]] = [
    (np.zeros((TOKENS, BLOCKS, 8)), BLOCKS, {}, "is not supported"),
    (np.zeros((BLOCKS + 1, 8, 8)), BLOCKS, {}, "is not supported"),
    (np.zeros((BLOCKS, 200, 8))[:, ::2, :4], BLOCKS, {}, "100 separate runs"),
    (as_strided(np.zeros(99), (BLOCKS, 4, 4), (64, 8, 8)), BLOCKS, {}, "overlap"),
    (as_strided(np.zeros(99), (BLOCKS, 4, 4), (8, 32, 8)), BLOCKS, {}, "blocks overlap"),
    (np.zeros((2, 2, 8)), 2, {}, "is not supported"),  # keys and values of 2 blocks, or 2 blocks
    (np.zeros((BLOCKS, 8)), BLOCKS, {"layer": 99}, "but the engine declares 99"),
    # several kernel blocks of one block, but no field declares these as parts
    (np.zeros((4 * BLOCKS, 8)), BLOCKS, {}, "is not supported"),
    (np.zeros((4 * BLOCKS, 8)), BLOCKS, {"layer": 64}, "is not supported"),
]


@pytest.mark.parametrize(("array", "blocks", "pages", "message"), OTHERS)
def test_an_unknown_layout_is_rejected(
    array: np.ndarray, blocks: int, pages: dict[str, int], message: str
) -> None:
    with pytest.raises(ConnectorError, match=message):
        GroupLayout({"layer": Tensor(array)}, block_count=blocks, page_sizes=pages)


def test_addresses_are_inside_the_blocks_of_the_engine() -> None:
    tensors, _ = layer_major(1, BLOCKS, HEADS, TOKENS, SIZE)
    for block in (-1, BLOCKS):
        with pytest.raises(ConnectorError, match="has 7 blocks"):
            layout_of(tensors).run([0, block])
    with pytest.raises(ConnectorError, match="no KV cache"):
        layout_of({})


def test_several_kernel_blocks_form_one_block() -> None:
    memory = np.arange(BLOCKS * 4 * 8, dtype=np.uint16).reshape(BLOCKS * 4, 8)
    tensors = {"layer": Tensor(memory)}
    layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={"layer": 4 * 16})
    assert layout.block_size == 4 * 16
    assert layout.fragments([2]).tolist() == [[memory.ctypes.data + 2 * 4 * 16, 4 * 16]]
    whole = layout_of({"layer": Tensor(memory.reshape(BLOCKS, 4, 8))})
    assert layout.declared == whole.declared  # the same block


ORDERS = {  # the axes of memory, from the slowest
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def memory_in(order: str, heads: int) -> np.ndarray:
    """Return memory with the axes (layer, block, head, token, content), which lie in this order."""
    sizes = (2, 16, heads, BLOCK_TOKENS, 6)
    axes = ORDERS[order]
    made = np.zeros([sizes[axis] for axis in axes], np.uint16)
    return made.transpose(np.argsort(axes))


# ---- Heads: engines with different numbers of ranks share blocks, and no rank gets the heads of
# another one.


class HeadRank:
    """The worker of a rank, with its heads of every block."""

    def __init__(self, settings: VllmSettings, size: int, rank: int, order: str) -> None:
        heads = max(1, MODEL_HEADS // size)
        self.memory = memory_in(order, heads)
        tensors = {f"layer.{n}": Tensor(self.memory[n]) for n in range(2)}
        page = self.memory[0, 0].nbytes
        pages = dict.fromkeys(tensors, page)
        self.layout = GroupLayout(tensors, block_count=16, page_sizes=pages)
        made = config(tensor_parallel_size=size)
        specs = [spec(num_kv_heads=heads, page_size_bytes=page)]
        self.part = part_of(made, specs, tp_rank=rank, pp_rank=0, model_heads=MODEL_HEADS)
        shards = head_shards(self.layout, self.part, order, pages)
        assert shards is not None
        self.space = namespace(
            made,
            version="0.32.0",
            layout=self.layout,
            packing=order,
            layers={"layer.0": f"full of {MODEL_HEADS}"},
            part=self.part.name,
            pp_rank=0,
            salt="",
            declared=shards.declared,
        )
        self.worker = RankWorker(
            settings,
            self.layout,
            self.space,
            ConnectorCounters(),
            LOGGER,
            part=self.part,
            shards=shards.all(),
        )
        assert self.worker.connection.wait(LONG_S)

    def own(self, whole: np.ndarray) -> np.ndarray:
        """Return this rank's heads from memory with all heads."""
        return whole[:, :, self.part.first : self.part.first + self.part.count]

    def load(self, orders: Orders) -> set[int]:
        """Load into memory with other bytes. Returns the blocks that fail."""
        self.memory[...] = 9
        self.worker.load(orders)
        if any(load.concurrent for load in orders.loads):
            wait_for(lambda: bool(self.worker.loads.arrived()))
        return self.worker.loads.failed()

    def remove(self, space: Namespace, keys: list[bytes]) -> None:
        """Remove blocks of a namespace from the pool."""
        attachment: Any = self.worker.connection._attachment
        attachment.cache(space).remove(keys)


class Engine(Scheduler):
    """All ranks of an engine, and its scheduler's side."""

    def __init__(self, pool: str, size: int, order: str = "LBHNC", **settings: Any) -> None:
        super().__init__(pool, block_count=16, timeout_ms=5000, **settings)
        self.ranks = [HeadRank(self.settings, size, rank, order) for rank in range(size)]
        assert self.connection.wait(LONG_S)
        self.lookups.meet(
            [rank.space for rank in self.ranks],
            block_bytes=max(rank.layout.block_size for rank in self.ranks),
            heads=MODEL_HEADS,
            splits=self.ranks[0].worker.splits,
        )
        self.lookups.identified("weights")

    def compute(self, whole: np.ndarray, count: int = 5) -> None:
        """Compute leading blocks of a prompt, and save them."""
        made = request(f"save {count}", PROMPT[: count * BLOCK_TOKENS + 1])
        for rank in self.ranks:
            rank.memory[:, :8] = rank.own(whole)[:, :8]
        self.schedule.matched_tokens(made, 0)
        self.blocks[made.request_id] = list(range(8))
        self.schedule.allocated(made, list(range(8)), 0)
        self.step(made, made.num_tokens)
        orders = self.schedule.orders({}, [])
        for rank in self.ranks:
            rank.worker.save(orders)
            names = {made.request_id}
            wait_for(lambda: rank.worker.saves.ended(names) == names)  # noqa: B023
        self.schedule.finished(made, [])

    def order(self, lose: Callable[[Any], None] = lambda _: None) -> tuple[int, Orders]:
        """Look a prompt up, then lose some of it. Returns the tokens of the hit, and the loads into
        blocks from 8 on.
        """
        made = request("load", PROMPT)
        tokens, _ = self.schedule.matched_tokens(made, 0)
        assert tokens is not None
        lose(made)
        self.schedule.allocated(made, list(range(8, 14)), tokens)
        return tokens, self.schedule.orders({}, [])

    def loads(self) -> tuple[int, set[int]]:
        """Load a prompt. Returns its tokens, and the blocks that failed."""
        tokens, orders = self.order()
        failed: set[int] = set()
        for rank in self.ranks:
            failed |= rank.load(orders)
            self.schedule.reported(rank.worker.report(), failed)
        self.schedule.finished(request("load", PROMPT), [])
        return tokens, failed

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        super().close()


@pytest.fixture
def many_lanes(shm: Path) -> Iterator[IndexServer]:
    """The server of a pool with lanes for many ranks."""
    paths = [shm / "a", shm / "b"]
    with (
        Pool.create(paths, device_size=64 << 20, sparse=True, lane_count=60) as pool,
        IndexServer(pool) as server,
    ):
        yield server


@pytest.fixture
def make(many_lanes: IndexServer) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []
    pool_name = ":".join(str(device.path) for device in many_lanes.pool.devices)

    def make(size: int, order: str = "LBHNC", **settings: Any) -> Engine:
        made.append(Engine(pool_name, size, order, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def whole() -> np.ndarray:
    """The KV of a prompt, of all heads."""
    memory = memory_in("LBHNC", MODEL_HEADS)
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
    make(stores, order).compute(whole)
    engine = make(finds, order)
    assert engine.loads() == (5 * BLOCK_TOKENS, set())
    check(engine, whole, 5)


def test_a_prompt_may_be_stored_by_two_engines_in_turn(
    many_lanes: IndexServer, make: Callable[..., Engine], whole: np.ndarray
) -> None:
    own, other = make(2), make(1)
    own.compute(whole, 2)
    other.compute(whole, 5)  # finds two blocks, and stores three
    before = many_lanes.stat().call_count
    assert own.loads() == (5 * BLOCK_TOKENS, set())
    check(own, whole, 5)
    # two lookups and a tier query between them, two releases, and no calls by the ranks
    assert many_lanes.stat().call_count - before == 5


def test_a_miss_costs_one_more_call(many_lanes: IndexServer, make: Callable[..., Engine]) -> None:
    engine = make(2)
    before = many_lanes.stat().call_count
    assert engine.loads() == (0, set())
    assert many_lanes.stat().call_count - before == 2
    assert engine.counters.take()["lookups"] == 1


def test_pipeline_stages_find_only_their_own_blocks(
    make: Callable[..., Engine], whole: np.ndarray
) -> None:
    make(1).compute(whole)
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
    other.compute(whole)

    def lose(made: Any) -> None:
        other.ranks[3].remove(other.lookups.ranks[3], made.block_hashes[2:3])

    tokens, orders = own.order(lose)
    assert tokens == 5 * BLOCK_TOKENS
    assert [rank.load(orders) for rank in own.ranks] == [set(), {10, 11, 12}]
    second = own.ranks[1]
    assert (second.memory[:, 8:10] == second.own(whole)[:, :2]).all()


def test_after_a_failed_part_of_one_engine_those_of_others_are_not_loaded(
    make: Callable[..., Engine], whole: np.ndarray
) -> None:
    own, other = make(2), make(1)
    own.compute(whole, 2)
    other.compute(whole, 5)

    def lose(made: Any) -> None:
        own.ranks[0].remove(own.lookups.ranks[0], made.block_hashes[1:2])

    tokens, orders = own.order(lose)
    assert tokens == 5 * BLOCK_TOKENS
    assert own.ranks[0].load(orders) == {9, 10, 11, 12}


@pytest.mark.parametrize(
    "why",
    ["an unknown order", "memory contradicts the order", "other heads", "a page", "a private part"],
)
def test_a_layout_with_unknown_heads_is_not_cut(why: str) -> None:
    memory = memory_in("LBNHC" if why == "memory contradicts the order" else "LBHNC", 2)
    tensors = {f"layer.{n}": Tensor(memory[n]) for n in range(2)}
    layout = GroupLayout(tensors, block_count=16, page_sizes={})
    part = BlockPart(0, "heads 0-2/4", heads=4, first=0, count=3 if why == "other heads" else 2)
    if why == "a private part":
        part = BlockPart(0, "0/2")
    order = "NHD" if why == "an unknown order" else "LBHNC"
    size = memory[0, 0].nbytes + (why == "a page")
    assert head_shards(layout, part, order, dict.fromkeys(tensors, size)) is None


def test_blocks_of_a_kernel_are_cut_as_one_block() -> None:
    """Each block consists of two kernel blocks, with half of its tokens each."""
    memory = np.zeros((2 * 16, 2, BLOCK_TOKENS, 6), np.uint16)
    size = 2 * memory[0].nbytes
    tensors = {"layer": Tensor(memory)}
    layout = GroupLayout(tensors, block_count=16, page_sizes={"layer": size})
    part = BlockPart(0, "heads 0-2/4", heads=4, first=0, count=2)
    shards = head_shards(layout, part, "LBHNC", {"layer": size})
    assert shards is not None
    halves = [shard for shard in shards.all() if shard.split == 1]
    assert [shard.name for shard in halves] == ["heads 0-1/4", "heads 1-2/4"]
    addresses = halves[1].pieces.fragments([3])[:, 0] - memory.ctypes.data
    head = memory[0, 0].nbytes
    assert addresses.tolist() == [6 * 2 * head + head, 7 * 2 * head + head]


def test_scheduler_and_worker_agree_on_parts_and_shards(
    server: IndexServer, pool_name: str, vllm: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reports which parts it has and can read, and the scheduler looks those up."""
    page = memory_in("LBHNC", MODEL_HEADS // 2)[0, 0].nbytes
    caches = cache_config(spec(page_size_bytes=page), num_blocks=16, layers=2)

    def connector(role: str, rank: int = 0) -> Any:
        fake_vllm.installed(monkeypatch, tp_rank=rank)
        module = importlib.import_module("beluga.connectors.vllm.connector")
        engine = set_connector(config(tensor_parallel_size=2), pool_name)
        heads = type(engine.model_config), "get_total_num_kv_heads"
        monkeypatch.setattr(*heads, lambda _: MODEL_HEADS, raising=False)
        made = module.BelugaConnector(engine, getattr(fake_vllm.Role, role), caches)
        stack.callback(made.shutdown)
        return made

    with contextlib.ExitStack() as stack:
        reported = []
        for rank in range(2):
            memory = memory_in("LBHNC", MODEL_HEADS // 2)
            worker = connector("WORKER", rank)
            worker.register_kv_caches({f"layer.{n}": Tensor(memory[n]) for n in range(2)})
            reported.append(worker.get_handshake_metadata().rank)
            part = reported[rank].namespace.fields["tp"]
            assert part == f"heads {2 * rank}-{2 * rank + 2}/4"
            assert (reported[rank].heads, reported[rank].splits) == (4, (1, 4))
        scheduler = connector("SCHEDULER")
        scheduler._meet(reported)
        scheduler._lookups.identified("weights")
        assert len(scheduler._lookups.ranks) == scheduler._lookups.worker_count == 2
        others = {
            split: [space.fields["tp"] for space in spaces]
            for split, spaces in scheduler._lookups._others.items()
        }
        assert others == {1: [f"heads {n}-{n + 1}/4" for n in range(4)], 4: ["heads 0-4/4"]}
