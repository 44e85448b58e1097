# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Foreign routers credit the pool, in the forms that they read: a prefix that one worker stored
counts for the other one, and no longer after the pool has removed it; also after a restart, a gap,
and for a router that starts late.
"""

import hashlib
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.blocks import eventually

from beluga import KVCache
from beluga.errors import RouterError
from beluga.events import EventService, EventSettings, form_named
from beluga.events.forms import FORMS, RUN_MAX, EventSource, object_prefix
from beluga.index import IndexServer, chain_names
from beluga.pool import Pool
from beluga.router import (
    TOKENS_FRAME_MAX,
    TOKENS_TAG,
    Cleared,
    PoolEvent,
    Removed,
    Stored,
    TokenStore,
    pack_tokens,
)

zmq = pytest.importorskip("zmq")
from foreign import DynamoStore, LlmdRouter  # noqa: E402  needs zmq

SIZE, COUNT, LENGTH, SPACE = 16, 8, 4096, 7
MODEL, WORKERS = "org/model", ("one", "two")
TOKENS = list(range(1000, 1000 + COUNT * SIZE))
NAMES = [(1 << 60) + number for number in range(COUNT)]
CONTENTS = [5000 + number for number in range(COUNT)]


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True, max_blocks=300) as pool:
        yield pool


@pytest.fixture
def context() -> Iterator[Any]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def endpoints(path: Path) -> tuple[str, str]:
    return f"ipc://{path}/live", f"ipc://{path}/again"


@contextmanager
def serving(pool: Pool, endpoint: str, replay: str, **more: Any) -> Iterator[EventService]:
    server = IndexServer(pool)
    service = EventService(server, pool, EventSettings(endpoint, replay, **more))
    with server:
        service.start()
        yield service
        service.stop()


def digests(numbers: range) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


def store(cache: KVCache, first: int = 0, stop: int = COUNT) -> None:
    names = chain_names(
        NAMES[first:stop],
        CONTENTS[first:stop],
        block_tokens=SIZE,
        parent_hash=NAMES[first - 1] if first else None,
        space=SPACE,
    )
    cache.put(digests(range(first, stop)), np.zeros((stop - first, LENGTH), np.uint8), names=names)


def remove(cache: KVCache, first: int) -> None:
    cache.remove(digests(range(first, COUNT)))


def of_worker(router: LlmdRouter, *, stored: bool) -> None:
    """Apply what vLLM's worker one publishes of its own cache."""
    event: list[Any] = ["BlockRemoved", NAMES, "GPU"]
    if stored:
        event = ["BlockStored", NAMES, None, TOKENS, SIZE, None, "GPU"]
    topic = f"kv@{WORKERS[0]}@{MODEL}".encode()
    router.index.apply(topic, msgspec.msgpack.encode([1.0, [event], None]))


def credited(router: LlmdRouter) -> list[int]:
    return list(router.poll().index.score(TOKENS, MODEL, WORKERS).values())


def send_tokens(context: Any, replay: str) -> None:
    sender = context.socket(zmq.DEALER)
    sender.connect(replay)
    for message in pack_tokens(SPACE, MODEL, SIZE, NAMES, TOKENS):
        sender.send_multipart([TOKENS_TAG, message])


# ---- llm-d


def test_llm_d_credits_the_pool_to_the_worker_that_did_not_store(
    pool: Pool, tmp_path: Path, context: Any
) -> None:
    live, replay = endpoints(tmp_path)
    with serving(pool, live, replay, form="llm-d"), KVCache(pool, namespace="x") as cache:
        router = LlmdRouter(context, live, replay, block_size=SIZE)
        of_worker(router, stored=True)
        assert credited(router) == [COUNT, 0]
        store(cache)
        assert eventually(lambda: credited(router) == [COUNT, COUNT])
        of_worker(router, stored=False)
        assert credited(router) == [COUNT, COUNT]
        remove(cache, 3)
        assert eventually(lambda: credited(router) == [3, 3])
        remove(cache, 0)
        assert eventually(lambda: credited(router) == [0, 0])
        assert eventually(lambda: not router.poll().index.keys)


@pytest.mark.parametrize("replayed", [True, False])
def test_a_late_llm_d_gets_the_table_with_token_ids(
    pool: Pool, tmp_path: Path, context: Any, replayed: bool
) -> None:
    live, replay = endpoints(tmp_path)
    with (
        serving(pool, live, replay, form="llm-d-v1", repeat_s=0.2) as service,
        KVCache(pool, namespace="x") as cache,
    ):
        send_tokens(context, replay)
        assert eventually(lambda: len(service.tokens) == COUNT)
        store(cache)
        router = LlmdRouter(context, live, replay if replayed else "", block_size=SIZE)
        assert eventually(lambda: credited(router) == [COUNT, COUNT])
        remove(cache, 2)
        assert eventually(lambda: credited(router) == [2, 2])
        assert eventually(lambda: len(service.tokens) == 2)


def test_a_gap_and_a_restart_leave_llm_d_with_the_pools_blocks(
    pool: Pool, tmp_path: Path, context: Any
) -> None:
    live, replay = endpoints(tmp_path)
    with serving(pool, live, replay, form="llm-d"), KVCache(pool, namespace="x") as cache:
        router = LlmdRouter(context, live, replay, block_size=SIZE)
        of_worker(router, stored=True)
        store(cache)
        assert eventually(lambda: credited(router) == [COUNT, COUNT])
        of_worker(router, stored=False)
        remove(cache, 5)
        router.miss(b"BlockRemoved")
        replays = router.replays
        assert eventually(lambda: credited(router) == [5, 5])
        assert router.replays > replays
    with (
        serving(pool, live, replay, form="llm-d", repeat_s=0.2),
        KVCache(pool, namespace="x") as cache,
    ):
        remove(cache, 4)
        assert eventually(lambda: credited(router) == [4, 4])
        assert eventually(lambda: router.poll().resets)


def test_llm_d_may_listen_itself(pool: Pool, tmp_path: Path, context: Any) -> None:
    router = LlmdRouter(context, "bind:tcp://127.0.0.1:*", block_size=SIZE)
    endpoint = router._live.getsockopt_string(zmq.LAST_ENDPOINT)
    with (
        serving(pool, f"connect:{endpoint}", "", form="llm-d", repeat_s=0.2),
        KVCache(pool, namespace="x") as cache,
    ):
        of_worker(router, stored=True)
        store(cache)
        assert eventually(lambda: credited(router) == [COUNT, COUNT])


def test_events_of_llm_d_are_vllms_arrays_with_the_pool_in_the_topic() -> None:
    tokens = TokenStore()
    for message in pack_tokens(SPACE, MODEL, 2, [11, 12], [1, 2, 3, 4]):
        tokens.add(message)
    source = EventSource("id", "rack", "fallback", tokens)
    events = [
        PoolEvent(Cleared()),
        PoolEvent(Stored([11, 12, 13], [1, 2, 3], 10), SPACE, 2),
        PoolEvent(Removed([12]), SPACE),
        PoolEvent(Removed([5]), 99),
    ]
    topics, batches = zip(*FORMS["llm-d-v1"].encode(source, 1.5, events, 0), strict=True)
    assert topics == (b"kv@pool:rack@fallback", b"kv@pool:rack@org/model", b"kv@pool:rack@fallback")
    name = {number: number.to_bytes(8, "big") for number in (5, 10, 11, 12, 13)}
    assert [msgspec.msgpack.decode(batch) for batch in batches] == [
        [1.5, [["AllBlocksCleared"]], None],
        [
            1.5,
            [
                ["BlockStored", [name[11], name[12]], name[10], [1, 2, 3, 4], 2, None, "SHARED"],
                ["BlockStored", [name[13]], None, [], 2, None, "SHARED"],
                ["BlockRemoved", [name[12]], "SHARED"],
            ],
            None,
        ],
        [1.5, [["BlockRemoved", [name[5]], "SHARED"]], None],
    ]


# ---- Mooncake


def test_dynamos_mooncake_store_finds_the_pools_blocks(
    pool: Pool, tmp_path: Path, context: Any
) -> None:
    live, _ = endpoints(tmp_path)
    prefix = "beluga@org/model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0"
    assert object_prefix("beluga", MODEL) == prefix
    settings: dict[str, Any] = {"form": "mooncake", "model": MODEL, "repeat_s": 0.2}
    router = DynamoStore(context, live, prefix)
    router.learn(None, CONTENTS, NAMES)
    with serving(pool, live, "", **settings), KVCache(pool, namespace="x") as cache:
        store(cache)
        assert eventually(lambda: router.poll().hits(CONTENTS) == COUNT)
        remove(cache, 5)
        assert eventually(lambda: router.poll().hits(CONTENTS) == 5)
        remove(cache, 4)
        router.miss(b"removed")
        assert eventually(lambda: router.poll().hits(CONTENTS) == 4)
    with serving(pool, live, "", **settings), KVCache(pool, namespace="x") as cache:
        late = DynamoStore(context, live, prefix)
        late.learn(None, CONTENTS, NAMES)
        assert eventually(lambda: late.poll().hits(CONTENTS) == 4)
        remove(cache, 0)
        assert eventually(lambda: late.poll().hits(CONTENTS) == 0)
        assert eventually(lambda: router.poll().hits(CONTENTS) == 0)


@pytest.mark.parametrize("repeat_s", [0.005, 60.0])
@pytest.mark.parametrize("form", ["llm-d", "mooncake"])
def test_routers_have_the_pools_blocks_after_changes_amid_repetitions(
    pool: Pool, tmp_path: Path, context: Any, form: str, repeat_s: float
) -> None:
    live, replay = endpoints(tmp_path)
    given = random.Random(f"{form} {repeat_s}")
    with (
        serving(pool, live, replay, form=form, model=MODEL, repeat_s=repeat_s),
        KVCache(pool, namespace="x") as cache,
    ):
        llm_d = LlmdRouter(context, live, replay, block_size=SIZE) if form == "llm-d" else None
        dynamo = DynamoStore(context, live, object_prefix("beluga", MODEL))
        dynamo.learn(None, CONTENTS, NAMES)
        last = NAMES[-1] + 1  # of a block that is stored after all changes
        if llm_d:
            of_worker(llm_d, stored=True)
            event = ["BlockStored", [last], None, [0] * SIZE, SIZE, None, "GPU"]
            llm_d.index.apply(b"kv@one@m", msgspec.msgpack.encode([1.0, [event], None]))
        else:
            assert eventually(lambda: dynamo.poll().sequence is not None)
        for _ in range(60):
            store(cache)
            left = given.randrange(COUNT + 1)
            remove(cache, left)
        name = chain_names([last], [1], block_tokens=SIZE, space=SPACE)
        cache.put([hashlib.sha256(b"last").digest()], np.zeros((1, LENGTH), np.uint8), names=name)
        if llm_d:
            key = llm_d.index.keys[last][0]
            assert eventually(lambda: len(llm_d.poll().index.pods[key]) == 2)
            assert eventually(lambda: credited(llm_d) == [COUNT, left])
        else:
            assert eventually(lambda: last in dynamo.poll().digests)
            assert eventually(lambda: dynamo.poll().hits(CONTENTS) == left)


@pytest.mark.parametrize("form", ["llm-d", "mooncake"])
def test_messages_of_a_large_table_are_bounded(form: str) -> None:
    count = 3 * RUN_MAX + 1
    events = [PoolEvent(Stored(range(count), range(count)), SPACE, SIZE)]
    source = EventSource("id", "n" * 64, "m" * 200)
    messages = form_named(form).encode(source, 1.0, events, 0)
    assert len(messages) == 4
    assert max(len(batch) for _, batch in messages) < 1 << 20
    assert len(form_named(form).encode(source, 1.0, [], 0)) == 1


# ---- Forms, settings and tokens


def test_a_bare_name_is_the_newest_version_and_others_are_refused() -> None:
    assert form_named("llm-d") is form_named("llm-d-v1")
    assert [form_named(name).name for name in FORMS] == list(FORMS)
    with pytest.raises(RouterError, match="form is llm-d-v9; give vllm, dynamo, llm-d, mooncake"):
        form_named("llm-d-v9")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "vllm", "replay": ""}, "vllm-v1 need a replay endpoint"),
        ({"form": "llm-d", "name": "a@b"}, "the pool's name in events is 'a@b'"),
        ({"form": "llm-d", "model": "a@b"}, "the model's name in events is 'a@b'"),
        ({"form": "llm-d", "endpoint": "connect:ipc:///a"}, "is no router's endpoint"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RouterError, match=message):
        EventSettings(**{"endpoint": "tcp://a:1", **settings})


def test_tokens_take_bounded_memory_and_the_oldest_are_dropped() -> None:
    store = TokenStore(size_max=2 << 20)
    tracemalloc.start()
    try:
        for first in range(0, 20_000, 100):
            names = range(first, first + 100)
            for message in pack_tokens(SPACE, MODEL, SIZE, names, [1] * (100 * SIZE)):
                store.add(message)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert store.size <= 2 << 20 and used < 3 << 20
    assert store.of(SPACE, 0) is None and store.of(SPACE, 19_999) == [1] * SIZE
    store.remove(SPACE, range(20_000))
    assert (len(store), store.size) == (0, 0)


def test_malformed_tokens_are_counted() -> None:
    store = TokenStore()
    (message,) = pack_tokens(SPACE, MODEL, SIZE, NAMES, TOKENS)
    for bad in (b"", message[:-1], message + b"x", message.replace(b"org/", b"org@"), bytes(18)):
        store.add(bad)
    assert (len(store), store.unread) == (0, 5)
    messages = list(pack_tokens(SPACE, MODEL, SIZE, range(2000), range(2000 * SIZE)))
    assert len(messages) > 1 and max(map(len, messages)) <= TOKENS_FRAME_MAX
    for message in messages:
        store.add(message)
    assert store.of(SPACE, 1999) == list(range(1999 * SIZE, 2000 * SIZE))
    assert store.model(SPACE) == MODEL
    assert list(pack_tokens(SPACE, MODEL, TOKENS_FRAME_MAX, [1], [0])) == []
