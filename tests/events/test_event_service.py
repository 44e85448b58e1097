# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service publishes the pool's blocks over ZMQ, and routers follow them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually

from beluga import KVCache
from beluga.errors import RouterError
from beluga.events import EventService, EventSettings
from beluga.gateway.cache import Cache
from beluga.gateway.metrics import Metrics
from beluga.index import IndexServer, chain_names
from beluga.listening import Token
from beluga.pool import Pool
from beluga.router import RouterEvent, Stored, Tier, Worker
from tests.events.follower import Follower, endpoints, table

pytest.importorskip("zmq")
TOKENS = 16
LENGTH = 4096


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True, max_blocks=256) as pool:
        yield pool


@contextmanager
def serving(pool: Pool, path: Path, **more: Any) -> Iterator[EventService]:
    server = IndexServer(pool)
    service = EventService(server, pool, EventSettings(*endpoints(path), **more))
    with server:
        service.start()
        yield service
        service.stop()


def put(cache: KVCache, first: int, count: int, *, rank: int = 0, rank_count: int = 1) -> None:
    numbers = range(first, first + count)
    names: NDArray[np.void] = chain_names(
        [n + 1 for n in numbers],
        [n + 5000 for n in numbers],
        block_tokens=TOKENS,
        parent_hash=first if first else None,
        rank=rank,
        rank_count=rank_count,
    )
    digests = [hashlib.sha256(b"%d %d" % (n, rank)).digest() for n in numbers]
    cache.put(digests, np.zeros((count, LENGTH), np.uint8), names=names)


def remove(cache: KVCache, *numbers: int, rank: int = 0) -> None:
    cache.remove([hashlib.sha256(b"%d %d" % (n, rank)).digest() for n in numbers])


def follow(path: Path) -> Follower:
    return Follower(*endpoints(path), block_size=TOKENS)


def test_a_router_follows_stored_and_removed_blocks(pool: Pool, tmp_path: Path) -> None:
    with serving(pool, tmp_path), follow(tmp_path) as router, KVCache(pool, namespace="x") as cache:
        put(cache, 0, 10)
        assert eventually(lambda: len(router.blocks()) == 10)
        assert router.indexer.find_matches([n + 5000 for n in range(20)]).shared == 10
        remove(cache, 4)
        assert eventually(lambda: router.indexer.find_matches([*range(5000, 5010)]).shared == 4)
        assert router.blocks() == table(pool)


def test_a_router_with_the_token_follows(pool: Pool, tmp_path: Path) -> None:
    token = Token("-".join(["of", "all", "the", "routers"]))
    with (
        serving(pool, tmp_path, token=token),
        Follower(*endpoints(tmp_path), block_size=TOKENS, token=token) as router,
        KVCache(pool, namespace="x") as cache,
    ):
        put(cache, 0, 3)
        assert eventually(lambda: len(router.blocks()) == 3)


def test_a_late_subscriber_gets_the_table_first(pool: Pool, tmp_path: Path) -> None:
    with serving(pool, tmp_path), KVCache(pool, namespace="x") as cache:
        put(cache, 0, 20)
        remove(cache, 0, 7)
        with follow(tmp_path) as router:
            assert eventually(lambda: router.blocks() == table(pool))
            assert len(table(pool)) == 18
            put(cache, 0, 1)
            assert eventually(lambda: router.indexer.find_matches([*range(5000, 5020)]).shared == 7)
            assert router.blocks() == table(pool)


def test_blocks_from_before_the_server_are_in_the_table(pool: Pool, tmp_path: Path) -> None:
    with IndexServer(pool), KVCache(pool, namespace="x") as cache:
        put(cache, 0, 9)
    with serving(pool, tmp_path), follow(tmp_path) as router:
        assert eventually(lambda: len(router.blocks()) == 9)


def test_a_new_server_is_a_gap(pool: Pool, tmp_path: Path) -> None:
    with follow(tmp_path) as router:
        for first in range(0, 30, 10):
            with serving(pool, tmp_path), KVCache(pool, namespace="x") as cache:
                remove(cache, *range(first - 5, first))
                put(cache, first, 10)
                assert eventually(lambda: router.blocks() == table(pool), timeout_s=60)
        assert len(router.blocks()) == 20


def test_lost_changes_are_a_gap_and_the_table_is_sent_again(pool: Pool, tmp_path: Path) -> None:
    with (
        serving(pool, tmp_path, journal_room=4) as service,
        follow(tmp_path) as router,
        KVCache(pool, namespace="x") as cache,
    ):
        assert eventually(lambda: router.feed.wanted is None)
        before = router.feed.feed.next_number
        put(cache, 0, 100)  # one call makes more changes than there is room for
        assert eventually(lambda: router.blocks() == table(pool))
        remove(cache, *range(50))
        assert eventually(lambda: len(router.blocks()) == 50)
        assert service.overflows >= 1
        assert router.feed.feed.gaps >= 1 and router.feed.feed.next_number > before


def test_a_router_that_misses_more_than_is_kept_gets_the_table(pool: Pool, tmp_path: Path) -> None:
    with (
        serving(pool, tmp_path, batches_max=1),
        KVCache(pool, namespace="x") as cache,
        follow(tmp_path) as router,
    ):
        assert eventually(lambda: router.feed.wanted is None)
        for first in range(0, 40, 4):
            put(cache, first, 4)
        assert eventually(lambda: router.blocks() == table(pool))


def test_a_block_of_two_ranks_is_announced_when_both_have_stored_it(
    pool: Pool, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stack.enter_context(serving(pool, tmp_path))
        router = stack.enter_context(follow(tmp_path))
        caches = [stack.enter_context(KVCache(pool, namespace=f"rank {n}")) for n in range(2)]
        put(caches[0], 0, 6, rank=0, rank_count=2)
        put(caches[1], 0, 3, rank=1, rank_count=2)
        assert eventually(lambda: len(router.blocks()) == 3)
        remove(caches[1], 1, rank=1)
        assert eventually(lambda: router.indexer.find_matches([*range(5000, 5006)]).shared == 1)
        assert router.blocks() == table(pool)


def test_the_gateways_index_follows_the_pool(pool: Pool, tmp_path: Path) -> None:
    async def route() -> None:
        gateway = Cache(
            wanted=True,
            block_size=TOKENS,
            announced=False,
            is_adapter=lambda _: False,
            space_of=lambda _: None,
            metrics=Metrics(),
            pool_events=",".join(endpoints(tmp_path)),
        )
        assert gateway.index is not None
        indexer = gateway.index.indexer
        stranger = RouterEvent(Worker(1), Stored([77], [6000]), tier=Tier.SHARED)
        indexer.apply(stranger)  # an engine does not publish the pool's blocks
        for gone, left in ((None, 8), (5, 5)):
            if gone is not None:
                remove(cache, gone)
            while indexer.find_matches([*range(5000, 5008)]).shared != left:
                await asyncio.sleep(0.01)
        assert indexer.find_matches([6000]).shared == 0
        gateway.close()

    with serving(pool, tmp_path), KVCache(pool, namespace="x") as cache:
        put(cache, 0, 8)
        asyncio.run(asyncio.wait_for(route(), 60))


def test_events_have_the_format_of_dynamo(pool: Pool, tmp_path: Path) -> None:
    import msgspec
    import zmq

    live, _ = endpoints(tmp_path)
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(live)
        with serving(pool, tmp_path, dynamo=True), KVCache(pool, namespace="x") as cache:
            assert reader.poll(60_000)  # the reader is connected
            put(cache, 0, 2)
            forms: list[dict[str, Any]] = []
            while not forms and reader.poll(60_000):
                forms = msgspec.msgpack.decode(reader.recv_multipart()[2])[1]
    assert forms[0]["storage_tier"] == "shared"
    blocks = forms[0]["event"]["data"]["stored"]["blocks"]
    assert [block["block_hash"] for block in blocks] == [1, 2]


def test_an_endpoint_that_cannot_be_bound_is_reported(pool: Pool) -> None:
    server = IndexServer(pool)
    foreign = "tcp://203.0.113.9:5558"  # no address of this machine
    service = EventService(server, pool, EventSettings(foreign, "tcp://127.0.0.1:0"))
    with (
        server,
        pytest.raises(RouterError, match=r"no events can be published .*; give another endpoint"),
    ):
        service.start()


@pytest.mark.parametrize(
    "endpoints",
    [
        ("nonsense", "tcp://a:1"),
        ("tcp://a:1", "foo"),
        ("tcp://a", "tcp://a:1"),
        ("tcp://a:1",) * 2,
        ("ipc:///no/a", "tcp://a:1"),
    ],
)
def test_an_invalid_endpoint_is_rejected_before_the_start(endpoints: tuple[str, str]) -> None:
    with pytest.raises(RouterError, match=r"endpoint|both|not a folder"):
        EventSettings(*endpoints)
