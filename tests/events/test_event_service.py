# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service publishes the pool's blocks over ZMQ, and routers follow them, also through a replay
with `beluga serve --events`: blocks come, go and are evicted, servers are killed, a standby takes
over, and routers miss messages or come late. At the end, all of them have the pool's table. Routers
that are silent, slow, send too much or have no token do not disturb others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import resource
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually

from beluga import KVCache
from beluga.errors import RouterError, RpcError
from beluga.events import EventService, EventSettings, service
from beluga.events.service import EventSockets, Messages, Replays
from beluga.gateway.cache import Cache
from beluga.gateway.kv_events import PoolListener
from beluga.gateway.metrics import Metrics
from beluga.index import IndexServer, chain_names, check_pool, read_names
from beluga.listening import Token
from beluga.pool import Pool
from beluga.router import Indexer, RouterEvent, Stored, Tier, Worker
from tests.conftest import Run, Start

zmq = pytest.importorskip("zmq")

TOKENS, LENGTH, CHAIN, RANKS = 16, 4096, 12, 2
BLOCKS = 300  # lines of the block table
ROUNDS = 40
T = TypeVar("T")


def endpoints(path: Path) -> tuple[str, str]:
    """Return two endpoints in a directory, for events and their replay."""
    return f"ipc://{path}/live", f"ipc://{path}/again"


def free_endpoints() -> tuple[str, str]:
    """Return two unused endpoints of this machine."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return (
            f"tcp://127.0.0.1:{first.getsockname()[1]}",
            f"tcp://127.0.0.1:{second.getsockname()[1]}",
        )


def table(pool: Pool) -> dict[int, int]:
    """Return the output of `beluga pool check --names`: the blocks that all their ranks have, with
    hashes as the index has them for their space.
    """
    report = check_pool(pool)
    assert not report.findings
    ranks: dict[tuple[int, int], set[int]] = {}
    contents: dict[tuple[int, int], tuple[int, int]] = {}
    for _, _, _, name in read_names(pool, report.half).tolist():
        block_hash, _, tokens_hash, space, _, rank, rank_count, _, _ = name
        ranks.setdefault((space, block_hash), set()).add(rank)
        contents[space, block_hash] = (tokens_hash ^ space, rank_count)
    return {
        space ^ block_hash: contents[space, block_hash][0]
        for (space, block_hash), have in ranks.items()
        if len(have) == contents[space, block_hash][1]
    }


class Follower:
    """Follows two endpoints until it is closed."""

    def __init__(
        self, live: str, replay: str, *, block_size: int, token: Token | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.indexer = Indexer()
        self._listener = self._run(self._make(f"{live},{replay}", block_size, token))

    @property
    def feed(self) -> Any:
        return self._listener.feed

    def blocks(self) -> dict[int, int]:
        async def read() -> dict[int, int]:
            return self._listener.feed.blocks()

        return self._run(read())

    def close(self) -> None:
        async def end() -> None:
            self._listener.close()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _make(self, endpoint: str, block_size: int, token: Token | None) -> PoolListener:
        return PoolListener(self.indexer, endpoint, block_size=block_size, token=token)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True, max_blocks=BLOCKS) as pool:
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
        for evicted, left in ((None, 8), (5, 5)):
            if evicted is not None:
                remove(cache, evicted)
            while indexer.find_matches([*range(5000, 5008)]).shared != left:
                await asyncio.sleep(0.01)
        assert indexer.find_matches([6000]).shared == 0
        gateway.close()

    with serving(pool, tmp_path), KVCache(pool, namespace="x") as cache:
        put(cache, 0, 8)
        asyncio.run(asyncio.wait_for(route(), 60))


def test_events_have_the_format_of_dynamo(pool: Pool, tmp_path: Path) -> None:
    import msgspec

    live, _ = endpoints(tmp_path)
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(live)
        with serving(pool, tmp_path, form="dynamo"), KVCache(pool, namespace="x") as cache:
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


class Engine:
    """Replays prompts of a few conversations: each rank stores its part of the blocks."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self._random = random.Random(seed)
        self.caches = [
            KVCache(pool, namespace=f"rank {rank}", timeout_s=30) for rank in range(RANKS)
        ]

    def step(self) -> None:
        """Store the blocks of one prompt, which grows a shared prefix, or remove a few."""
        talk = self._random.randrange(60)
        count = self._random.randrange(1, CHAIN)
        path = [1 + talk // 10, *(100 * (1 + talk) + depth for depth in range(count))]
        if self._random.random() < 0.1:
            digests = [self.digest(rank, path[-1]) for rank in range(RANKS)]
            for rank, digest in enumerate(digests):
                self.caches[rank].remove([digest])
            return
        for rank, cache in enumerate(self.caches):
            names = chain_names(
                path,
                [number ^ 0xABCDEF for number in path],
                block_tokens=TOKENS,
                space=77,
                rank=rank,
                rank_count=RANKS,
            )
            digests = [self.digest(rank, number) for number in path]
            cache.put(digests, np.zeros((len(path), LENGTH), np.uint8), names=names)

    def try_steps(self, count: int) -> None:
        for _ in range(count):
            try:
                self.step()
            except RpcError:  # a server died meanwhile
                return

    @staticmethod
    def digest(rank: int, number: int) -> bytes:
        return hashlib.sha256(b"%d %d" % (rank, number)).digest()

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


def test_routers_have_the_pools_table_after_random_operations(
    pool: Pool, shm: Path, start: Start, run: Run
) -> None:
    live, replay = free_endpoints()
    serve = ["serve", "--pool", str(shm / "a"), "--events", live, "--events-replay", replay]
    with ExitStack() as stack:
        first = start(*serve)
        assert first.stderr is not None and "epoch 1" in first.stderr.readline()
        early = stack.enter_context(Follower(live, replay, block_size=TOKENS))
        engine = Engine(pool, seed=5)
        stack.callback(engine.close)
        routers = {"early": early}

        def settled() -> bool:
            expected = table(pool)
            return all(router.blocks() == expected for router in routers.values())

        engine.try_steps(ROUNDS)
        assert eventually(settled)
        first.send_signal(signal.SIGSTOP)  # a router that connects now waits for the table
        routers["late"] = stack.enter_context(Follower(live, replay, block_size=TOKENS))
        first.send_signal(signal.SIGCONT)
        engine.try_steps(ROUNDS)
        assert eventually(settled)

        standby = start(*serve, "--standby", "--silent", "0.5")
        assert standby.stderr is not None and "standing by" in standby.stderr.readline()
        engine.try_steps(3)
        first.kill()
        first.wait()
        assert "epoch 2" in standby.stderr.readline()
        engine.try_steps(ROUNDS)
        assert eventually(settled, timeout_s=60)

        standby.kill()
        standby.wait()
        third = start(*serve)
        assert third.stderr is not None and "epoch 3" in third.stderr.readline()
        routers["third"] = stack.enter_context(Follower(live, replay, block_size=TOKENS))
        engine.try_steps(ROUNDS)
        assert eventually(settled, timeout_s=60)

        stat = engine.caches[0].stat()
        assert stat.evict_count > 0 and len(table(pool)) > BLOCKS / RANKS / 4
        assert all(router.feed.unread == 0 for router in routers.values())
        shown = json.loads(
            run("pool", "check", "--pool", str(shm / "a"), "--names", "--json").stdout
        )
        named = {int(block["hash"], 16) ^ int(block["space"], 16) for block in shown["names"]}
        assert set(early.blocks()) <= named


# ---- Sockets
SECRET = "-".join(["of", "all", "the", "routers"])


class Site:
    """Both endpoints, and routers that request one replay each, with their numbers."""

    def __init__(self, folder: Path, token: Token | None = None) -> None:
        self.live, self.replay = f"ipc://{folder}/live", f"ipc://{folder}/again"
        self.sockets = EventSockets(EventSettings(self.live, self.replay, token=token))
        self.replays = Replays(self.sockets)
        self.context = zmq.Context()
        self.begun: list[int] = []
        self.routers: list[Any] = []

    def connected(self, kind: int, endpoint: str, **options: Any) -> Any:
        made = self.context.socket(kind)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.connect(endpoint)
        return made

    def request_replays(self, count: int) -> None:
        for _ in range(count):
            router = self.connected(zmq.DEALER, self.replay, RCVHWM=1)
            router.send_multipart([b"", len(self.routers).to_bytes(8, "big")])
            self.routers.append(router)

    def serve(self) -> None:
        self.replays.serve(0.01, self._find)

    def _find(self, first: int) -> Messages:
        self.begun.append(first)
        return [(number, (b"", bytes(10_000))) for number in range(1000)]

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.sockets.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def test_a_router_gets_all_messages_of_its_replay(site: Site) -> None:
    router = site.connected(zmq.DEALER, site.replay)
    for request in ([b"", bytes(7)], [bytes(8)], [b"", bytes(8), b""], [b"", bytes(8)]):
        router.send_multipart(request)
    numbers = []
    while len(numbers) < 1001:
        site.serve()
        while router.poll(0):
            numbers.append(int.from_bytes(router.recv_multipart()[1], "big"))
    assert numbers == [*range(1000), (1 << 64) - 1]
    assert site.begun == [0]  # the invalid requests are dropped


def test_routers_that_do_not_read_lose_their_replays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STALLED_S", 0.01)
    for number in range(service.REPLAYS_MAX + 1):
        site.request_replays(1)
        assert eventually(lambda: site.serve() or len(site.begun) == len(site.routers)), number
    assert site.replays.dropped > 0
    assert site.routers[-1].recv_multipart()[2] == bytes(10_000)


def test_the_queue_of_replays_is_bounded_and_refusals_are_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.request_replays(service.REPLAYS_MAX)
    assert eventually(lambda: site.serve() or len(site.begun) == service.REPLAYS_MAX)
    monkeypatch.setattr(service, "REQUESTS_MAX", 2)
    site.request_replays(5)
    assert eventually(lambda: site.serve() or site.replays.dropped == 3)
    assert len(site.begun) == service.REPLAYS_MAX


def test_a_disconnected_router_leaves_the_replays(site: Site) -> None:
    site.request_replays(service.REPLAYS_MAX)
    assert eventually(lambda: site.serve() or len(site.begun) == service.REPLAYS_MAX)
    site.request_replays(1)
    for router in site.routers[:-1]:
        router.close(linger=0)
    assert eventually(lambda: site.serve() or len(site.begun) == len(site.routers))
    assert site.replays.dropped == 0


def test_queued_messages_of_routers_that_do_not_read_are_bounded(site: Site) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    site.request_replays(50)
    for _ in range(300):
        site.replays.serve(
            0.001, lambda _: [(number, (b"", bytes(10_000))) for number in range(10_000)]
        )
    assert len(site.replays._running) == service.REPLAYS_MAX
    assert all(len(replay.messages) > 8000 for replay in site.replays._running.values())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB


def test_a_subscriber_that_does_not_read_has_a_bounded_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PENDING_MAX", 10)
    site = Site(tmp_path)
    stuck = site.connected(zmq.SUB, site.live, SUBSCRIBE=b"", RCVHWM=1)
    reader = site.connected(zmq.SUB, site.live, SUBSCRIBE=b"", RCVHWM=0)
    try:
        for peer in (stuck, reader):
            assert eventually(lambda peer=peer: site.sockets.publish([b"t"]) or peer.poll(10))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(200):
            site.sockets.publish([b"t", bytes(1 << 20)])
            assert reader.poll(30_000)
            while reader.poll(0):
                reader.recv_multipart()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    finally:
        site.close()


def test_a_silent_handshake_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HANDSHAKE_MS", 50)
    site = Site(tmp_path)
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.settimeout(30)
            silent.connect(site.replay.removeprefix("ipc://"))
            while silent.recv(4096):
                pass
    finally:
        site.close()


@pytest.mark.parametrize("password", [SECRET, SECRET[:-1], None])
def test_routers_need_the_token(tmp_path: Path, password: str | None) -> None:
    site = Site(tmp_path, Token(SECRET))
    plain = {} if password is None else {
        "PLAIN_USERNAME": b"beluga", "PLAIN_PASSWORD": password.encode()
    }  # fmt: skip
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            site.serve()
            site.sockets.publish([b"t"])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        reader = site.connected(zmq.SUB, site.live, SUBSCRIBE=b"", **plain)
        router = site.connected(zmq.DEALER, site.replay, **plain)
        router.send_multipart([b"", bytes(8)])
        wait_ms = 30_000 if password == SECRET else 300
        assert [bool(peer.poll(wait_ms)) for peer in (reader, router)] == [password == SECRET] * 2
    finally:
        ending.set()
        thread.join()
        site.close()
    assert SECRET not in repr(EventSettings(site.live, site.replay, token=Token(SECRET)))


def test_a_path_that_another_process_serves_is_refused(site: Site) -> None:
    with pytest.raises(RouterError, match="another process does; give another endpoint"):
        EventSockets(EventSettings(site.live, site.replay))


def test_the_file_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "live"))
    Site(tmp_path).close()
    Site(tmp_path).close()


@pytest.mark.parametrize(
    ("endpoint", "token", "warned"),
    [
        *[("tcp://127.0.0.1:0", False, 0), ("tcp://[::1]:0", False, 0), ("ipc://@a", False, 0)],
        *[("tcp://*:0", False, 2), ("tcp://0.0.0.0:0", False, 2), ("tcp://*:0", True, 0)],
    ],
)
def test_events_that_other_machines_read_without_a_token_are_logged(
    endpoint: str, token: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EventSettings(endpoint, endpoint + "0", token=Token(SECRET) if token else None)
    service._warn_of_others(settings)
    assert caplog.text.count("give --events-token FILE") == warned
