# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The names of blocks that vLLM's connector announces to the pool: hashes, parents, tokens hashes
and ranks, by which the router finds them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from test_transfers import Side, digests
from vllm_parts import BLOCK_TOKENS, request

from beluga import IndexServer, Namespace, Pool
from beluga.connectors.vllm.media import MARK
from beluga.connectors.vllm.names import BlockNames
from beluga.connectors.vllm.parts import BlockPart
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
    found = np.frombuffer(named(made, start, 4), NAME)
    hashes = [short(one) for one in made.block_hashes]
    assert found["block_hash"].tolist() == hashes[start:4]
    parents = found["parent_hash"].tolist()
    assert parents == [hashes[start - 1] if start else 0, *hashes[start:3]]
    assert found["flags"].tolist()[0] == (NAME_PARENT if start else 0)
    local = BlockHasher(block_size=BLOCK_TOKENS).local(TOKENS)
    assert found["tokens_hash"].tolist() == local[start:4]
    assert set(found["rank_count"].tolist()) == {2}
    assert set(found["space"].tolist()) == {SPACE}


def test_salt_and_adapter_are_part_of_the_tokens_hash() -> None:
    made = request("r", TOKENS, salt="s", lora=SimpleNamespace(lora_name="a", lora_path="p"))
    found = np.frombuffer(named(made, 0, 5), NAME)
    hasher = BlockHasher(block_size=BLOCK_TOKENS, salt="s", lora_name="a")
    assert found["tokens_hash"].tolist() == hasher.local(TOKENS)


def test_an_image_is_part_of_the_tokens_hash_of_the_blocks_that_show_it() -> None:
    plain = BlockHasher(block_size=BLOCK_TOKENS).local(TOKENS)
    found = []
    for images in ([(CAT, 9)], [(MARK + "dog", 9)], [(CAT, 10)]):
        made = np.frombuffer(named(request("r", TOKENS, images=images), 0, 5), NAME)
        hashes = made["tokens_hash"].tolist()
        assert [one == other for one, other in zip(hashes, plain, strict=True)] == [
            *(True, True, False, True, True)
        ]
        found.append(hashes[2])
    assert len(set(found)) == 3
    again = np.frombuffer(named(request("s", TOKENS, images=[(CAT, 9)]), 2, 3), NAME)
    assert again["tokens_hash"].tolist() == found[:1]


def test_blocks_that_depend_on_a_client_chosen_name_have_no_hash() -> None:
    made = request("r", TOKENS, images=[("cat", 9)])
    assert len(named(made, 0, 2)) == 2 * NAME.itemsize
    assert named(made, 2, 3) == named(made, 0, 5) == b""


def test_blocks_that_routers_cannot_hash_have_no_name() -> None:
    lookups: Any = SimpleNamespace(ranks=())  # before the ranks' handshake
    unmet = BlockNames(lookups, block_size=BLOCK_TOKENS)
    assert named(request("r", TOKENS), 0, 3, of=unmet) == b""


def test_a_rank_stores_its_part_with_the_hashes(
    pool: Pool, server: IndexServer, pool_name: str
) -> None:
    side = Side(pool_name, part=BlockPart(1, "heads 1-2/2"))
    side.attached()
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
