# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The names of blocks that vLLM's connector announces to the pool: hashes, parents, tokens hashes
and ranks, by which the router finds them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from fake_vllm import BLOCK_TOKENS, config, request, spec
from scene import LONG_S, Gate, Rank, blocks, digests

from beluga import IndexServer, KVCache, Namespace, Pool
from beluga.connectors.connection import Connection
from beluga.connectors.vllm.blocks import BlockNames
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.media import MARK
from beluga.connectors.vllm.parts import BlockPart, part_of
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.steps import BlockRange, Orders
from beluga.index import NAME, NAME_PARENT, check_pool, read_names
from beluga.router import BlockHasher

pytest.importorskip("msgspec")
TOKENS = list(range(5 * BLOCK_TOKENS))
RANKS = (Namespace.of("one"), Namespace.of("two"))
SPACE = 0x1234
CAT = MARK + "cat"  # a hash of contents


def names(**more: Any) -> BlockNames:
    lookups: Any = SimpleNamespace(ranks=RANKS, space=SPACE, **more)
    return BlockNames(lookups, block_size=BLOCK_TOKENS)


def named(made: Any, start: int, stop: int, *, of: BlockNames | None = None) -> bytes:
    """Name blocks of a request, with the extra keys that vLLM has for them."""
    keys, size = [], BLOCK_TOKENS
    for first in range(start * size, stop * size, size):
        keys.append(fake_vllm.tagged_keys(made, first, first + size, 0)[0])
    return (of or names()).of(made, start, stop, fake_vllm.event_keys(keys) or [])


def short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


@pytest.mark.parametrize("start", [0, 2])
def test_blocks_of_a_request_have_the_hashes_that_routers_use(start: int) -> None:
    made = request("r", TOKENS)
    names = np.frombuffer(named(made, start, 4), NAME)
    hashes = [short(digest) for digest in made.block_hashes]
    assert names["block_hash"].tolist() == hashes[start:4]
    parents = names["parent_hash"].tolist()
    assert parents == [hashes[start - 1] if start else 0, *hashes[start:3]]
    assert names["flags"].tolist()[0] == (NAME_PARENT if start else 0)
    local = BlockHasher(block_size=BLOCK_TOKENS).local(TOKENS)
    assert names["tokens_hash"].tolist() == local[start:4]
    assert set(names["rank_count"].tolist()) == {2}
    assert set(names["space"].tolist()) == {SPACE}


def test_salt_and_adapter_are_part_of_the_tokens_hash() -> None:
    made = request("r", TOKENS, salt="s", lora=SimpleNamespace(lora_name="a", lora_path="p"))
    names = np.frombuffer(named(made, 0, 5), NAME)
    hasher = BlockHasher(block_size=BLOCK_TOKENS, salt="s", lora_name="a")
    assert names["tokens_hash"].tolist() == hasher.local(TOKENS)


def test_an_image_is_part_of_the_tokens_hash_of_the_blocks_that_show_it() -> None:
    plain = BlockHasher(block_size=BLOCK_TOKENS).local(TOKENS)
    image_hashes = []
    for images in ([(CAT, 9)], [(MARK + "dog", 9)], [(CAT, 10)]):
        made = np.frombuffer(named(request("r", TOKENS, images=images), 0, 5), NAME)
        hashes = made["tokens_hash"].tolist()
        assert [shown == usual for shown, usual in zip(hashes, plain, strict=True)] == [
            *(True, True, False, True, True)
        ]
        image_hashes.append(hashes[2])
    assert len(set(image_hashes)) == 3
    again = np.frombuffer(named(request("s", TOKENS, images=[(CAT, 9)]), 2, 3), NAME)
    assert again["tokens_hash"].tolist() == image_hashes[:1]


def test_blocks_that_routers_cannot_hash_have_no_name() -> None:
    made = request("r", TOKENS, images=[("cat", 9)])  # by a name that the client chose
    assert len(named(made, 0, 2)) == 2 * NAME.itemsize
    assert named(made, 2, 3) == named(made, 0, 5) == b""
    lookups: Any = SimpleNamespace(ranks=())  # before the ranks' handshake
    unmet = BlockNames(lookups, block_size=BLOCK_TOKENS)
    assert named(request("r", TOKENS), 0, 3, of=unmet) == b""


def test_a_rank_stores_its_part_with_the_hashes(
    pool: Pool, server: IndexServer, pool_name: str
) -> None:
    side = Rank(pool_name, part=BlockPart(1, "heads 1-2/2"))
    announced = named(request("r", TOKENS), 0, 5)
    side.worker.save(Orders(saves=[BlockRange("r", digests(0, 5), [3, 4, 5, 6, 7], announced)]))
    side.saved("r")
    side.worker.close()
    rows = read_names(pool, check_pool(pool).half)
    assert len(rows) == 5
    assert set(rows["name"]["rank"].tolist()) == {1}
    assert sorted(rows["name"]["tokens_hash"].tolist()) == sorted(
        BlockHasher(block_size=BLOCK_TOKENS).local(TOKENS)
    )


def rank_parts(
    size: int, *specs: Any, heads: int = 0, stages: int = 1, **changes: Any
) -> list[tuple[int, str, int, int]]:
    """Return number, name, copies and copy of the part of each rank."""
    made = config(tensor_parallel_size=size, pipeline_parallel_size=stages, **changes)
    parts = [
        part_of(made, specs, tp_rank=rank, pp_rank=stage, model_heads=heads)
        for stage in range(stages)
        for rank in range(size)
    ]
    return [(part.number, part.name, part.copies, part.copy) for part in parts]


LATENT = spec("MLAAttentionSpec", num_kv_heads=1, max_tp_shards=1)
SHARED: list[tuple[int, list[Any], int, list[tuple[int, str, int, int]]]] = [
    (1, [spec(num_kv_heads=4)], 4, [(0, "heads 0-4/4", 1, 0)]),
    (2, [spec(num_kv_heads=2)], 4, [(0, "heads 0-2/4", 1, 0), (1, "heads 2-4/4", 1, 0)]),
    (  # beyond the heads, as vLLM divides them: ranks with one head follow each other
        4,
        [spec(num_kv_heads=1)],
        2,
        [
            *((0, "heads 0-1/2", 2, 0), (0, "heads 0-1/2", 2, 1)),
            *((1, "heads 1-2/2", 2, 0), (1, "heads 1-2/2", 2, 1)),
        ],
    ),
    (2, [LATENT, LATENT], 16, [(0, "heads 0-1/1", 2, 0), (0, "heads 0-1/1", 2, 1)]),
    (1, [LATENT], 16, [(0, "heads 0-1/1", 1, 0)]),
]


def test_heads_are_divided_among_ranks() -> None:
    for size, specs, heads, expected in SHARED:
        assert rank_parts(size, *specs, heads=heads) == expected


def test_pipeline_stages_have_separate_parts() -> None:
    of_ranks = rank_parts(4, spec(num_kv_heads=1), heads=2, stages=2)
    assert [number for number, *_ in of_ranks] == [0, 0, 1, 1, 2, 2, 3, 3]


PRIVATE: dict[str, tuple[list[Any], int, dict[str, Any]]] = {
    "the model does not define it": ([spec(num_kv_heads=2)], 0, {}),
    "a layer with other heads": ([spec(num_kv_heads=2), spec(num_kv_heads=4)], 4, {}),
    "heads that ranks cannot divide": ([spec(num_kv_heads=1)], 3, {}),
    "a latent layer that is divided": ([spec("MLAAttentionSpec", num_kv_heads=1)], 2, {}),
    "latent layers beside heads": ([LATENT, spec(num_kv_heads=2)], 4, {}),
    "a state": ([spec("MambaSpec", num_kv_heads=0)], 4, {}),
    "tokens are divided, too": ([spec(num_kv_heads=2)], 4, {"decode_context_parallel_size": 2}),
    "prefills are divided": ([spec(num_kv_heads=2)], 4, {"prefill_context_parallel_size": 2}),
}


def test_a_part_with_unknown_heads_is_private_to_its_rank() -> None:
    for why, (specs, heads, changes) in PRIVATE.items():
        parts = rank_parts(2, *specs, heads=heads, **changes)
        assert parts == [(0, "0/2", 1, 0), (1, "1/2", 1, 0)], why
    made = config(tensor_parallel_size=2)
    made.speculative_config = SimpleNamespace(draft_model_config=object())  # its layers are private
    part = part_of(made, [spec(num_kv_heads=2)], tp_rank=1, pp_rank=0, model_heads=4)
    assert part == BlockPart(1, "1/2")


@pytest.fixture
def ranks(server: IndexServer, pool_name: str) -> Iterator[list[Rank]]:
    """Two ranks with the same part, and the same bytes."""
    made = [Rank(pool_name, part=BlockPart(0, "heads 0-1/1", copies=2, copy=n)) for n in range(2)]
    for side in made:
        side.fill(3)
    yield made
    for side in made:
        side.worker.close()


def random_blocks(name: str, ids: list[int], ticket: int = 0) -> BlockRange:
    digests = np.random.default_rng(7).integers(0, 256, (len(ids), 32), np.uint8)
    return BlockRange(name, digests.tobytes(), ids, ticket=ticket)


def test_each_block_is_stored_by_one_of_the_ranks_that_have_it(ranks: list[Rank]) -> None:
    ids = list(range(40))
    order = random_blocks("r", ids)
    for side in ranks:
        side.worker.save(Orders(saves=[order]))
        side.saved("r")
    counted = [side.counters.take() for side in ranks]
    assert sum(each["save_blocks"] for each in counted) == len(ids)
    assert sum(each["save_bytes"] for each in counted) == len(ids) * ranks[0].layout.block_size
    for each in counted:
        assert each["save_blocks"] >= len(ids) // 4  # the ranks divide the work
        assert not each.get("save_present_blocks")
    stored = [side.worker.report().stored for side in ranks]
    assert not stored[0].keys() & stored[1].keys()
    saved = ranks[0].memory.copy()
    for side in ranks:
        side.memory[...] = 0
        side.worker.load(Orders(loads=[random_blocks("s", ids)]))
        assert side.worker.loads.failed() == set()
        assert (side.memory[:, ids] == saved[:, ids]).all()


def test_a_rank_without_own_blocks_returns_tickets_and_requests(
    ranks: list[Rank],
) -> None:
    order = random_blocks("r", [5], ticket=9)
    ended: Counter[int] = Counter()
    for side in ranks:
        side.worker.save(Orders(saves=[order]))
        side.saved("r")
        ended += side.worker.report().ended
    assert ended == {9: 2}
    assert sum(side.counters.take().get("save_blocks", 0) for side in ranks) == 1


def test_a_preemption_stops_what_a_rank_stores_for_others(ranks: list[Rank]) -> None:
    side = ranks[0]
    gate = Gate(side.layout)
    side.worker.saves._source = gate
    side.worker.save(Orders(saves=[blocks("a", [0, 2]), random_blocks("r", list(range(8)))]))
    assert gate.reading.wait(LONG_S)
    side.worker.preempt(Orders(preempted=["r"]))
    assert side.worker.saves.ended({"r"}) == {"r"}
    gate.go.set()
    side.saved("a")


def test_the_scheduler_looks_up_each_part_once_and_waits_for_all_ranks(
    server: IndexServer, pool: Pool, pool_name: str
) -> None:
    connection = Connection(
        VllmSettings(pool=pool_name), name="lookups", logger=logging.getLogger("test")
    )
    lookups = Lookups(connection, ConnectorCounters())
    heads = [Namespace({"tp": f"heads {n}-{n + 1}/2"}) for n in (0, 0, 1, 1)]
    try:
        assert connection.wait(LONG_S)
        lookups.meet(heads, block_bytes=4096)
        lookups.identified("weights")
        assert (len(lookups.ranks), lookups.worker_count, lookups.block_bytes) == (2, 4, 4096)
        digests = [bytes([n]) * 32 for n in range(3)]
        for space in lookups.ranks:
            with KVCache(pool, namespace=space) as cache:
                cache.put(digests, np.ones((3, 4096), np.uint8))
        before = server.stat().key_count
        count, pins = lookups.pin(digests)
        assert count == 3
        assert server.stat().key_count - before == 6
        lookups.release(pins)
    finally:
        connection.close()


def test_no_rank_reads_the_heads_of_another(server: IndexServer, pool_name: str) -> None:
    """The name of the part is in the namespace, whose digest is in every key and every entry."""
    sides = []
    for number in range(2):
        part = BlockPart(number, f"heads {number}-{number + 1}/2", heads=2)
        side = Rank(pool_name, part=part)
        side.worker._namespace = Namespace({"tp": part.name})
        side.worker.identify("weights")
        side.fill(number)
        sides.append(side)
    sides[0].worker.save(Orders(saves=[blocks("r", [0, 1])]))
    sides[0].saved("r")
    assert server.index_stat().block_count == 2
    sides[1].worker.load(Orders(loads=[blocks("s", [2, 3])]))
    assert sides[1].worker.loads.failed() == {2, 3}
    for side in sides:
        side.worker.close()
