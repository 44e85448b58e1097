# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls during which a server dies: sent again they take effect once, and a get is a miss."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from support import roles
from support.blocks import CHAIN, content, eventually, held, keys, put, states
from support.emulation import PATIENCE
from support.role import Process

from beluga.errors import CallTimeoutError
from beluga.index import IndexClient, IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import Client

# ---- Calls that are sent again, to a successor or after a timeout, take effect once.


T = TypeVar("T")
NO_GRANT = -1016
UNANSWERED = ["serve.handled", "serve.fenced"]
ANSWERED = ["serve.replies_streamed", "serve.replied"]


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(
        paths, device_size=16 << 20, coherence="software", sparse=True, max_blocks=64
    ) as pool:
        yield pool


def armed(monkeypatch: pytest.MonkeyPatch, paths: list[Path], point: str) -> Process:
    """A server that dies, or stops, at a crash point."""
    with monkeypatch.context() as context:
        context.setenv("BELUGA_CRASH", point)
        return Process(roles.serve_index, paths)


class DeadServer:
    """A client whose server dies in the middle of its call; a successor answers."""

    def __init__(self, pool: Pool, first: Process) -> None:
        self.pool, self.first = pool, first
        self.client = Client(pool, timeout_s=60)
        self.index = IndexClient(self.client)

    def call(self, action: Callable[[], T]) -> tuple[T, IndexServer]:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(action)
            assert self.first.died() == -signal.SIGKILL
            successor = IndexServer(self.pool)
            successor.start()
            return answer.result(timeout=120 * PATIENCE), successor

    def __enter__(self) -> DeadServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


@pytest.mark.parametrize(
    "point", ["grant.space_taken", "grant.made", "reserve.checked", *UNANSWERED]
)
def test_a_resent_reserve_grants_once(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with armed(monkeypatch, paths, point) as first, DeadServer(pool, first) as dead:
        index = dead.index
        grants, successor = dead.call(lambda: index.reserve(keys([1]), length=4096))
        assert states(grants) == ["GRANTED"]
        assert (index.stat().grant_count, index.stat().refuse_count) == (1, 0)
        assert index.commit(grants) == [0]
        assert held(index, [1]) == {1}
        assert eventually(lambda: index.stat().held_bytes == 0)
        assert (index.stat().grant_count, index.stat().block_count) == (0, 1)
        assert index.remove(keys([1])) == 1
        assert index.stat().free_stripe_count == index.stat().stripe_count
        successor.stop()


@pytest.mark.parametrize(
    "point", ["commit.claimed", "commit.entered", "commit.counted", *UNANSWERED, *ANSWERED]
)
def test_a_resent_commit_counts_once(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    # The same applies to the reserve before its reply: the second reply is that of the commit.
    passage = 2 if point.startswith("serve") else 1
    armed_server = armed(monkeypatch, paths, f"{point}:{passage}")
    with armed_server as first, DeadServer(pool, first) as dead:
        index = dead.index
        grants = index.reserve(keys([1]), length=4096)
        statuses, successor = dead.call(lambda: index.commit(grants))
        entered = point != "commit.claimed"
        assert statuses == [0 if entered else NO_GRANT]
        assert held(index, [1]) == ({1} if entered else set())
        stat = index.stat()
        assert (stat.block_count, stat.commit_count) == (int(entered), 0)
        assert eventually(lambda: index.stat().held_bytes == 0)
        assert index.stat().grant_count == 0
        successor.stop()


@pytest.mark.parametrize(
    "point", ["remove.found", "evict.cleared", "space.given", "serve.fenced:3"]
)
def test_a_resent_remove_removes_once(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with armed(monkeypatch, paths, point) as first, DeadServer(pool, first) as dead:
        index = dead.index
        put(index, [1], length=4096)
        removed, successor = dead.call(lambda: index.remove(keys([1])))
        assert removed == (1 if point == "remove.found" else 0)
        stat = index.stat()
        assert (stat.block_count, stat.remove_count) == (0, removed)
        assert held(index, [1]) == set()
        assert eventually(lambda: index.stat().free_stripe_count == index.stat().stripe_count)
        successor.stop()


@pytest.mark.parametrize("point", ["release.counted", "release.unpinned", "serve.fenced:4"])
def test_a_resent_release_unpins_once(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with armed(monkeypatch, paths, point) as first, DeadServer(pool, first) as dead:
        index = dead.index
        put(index, [1], length=4096)
        pinned = index.lookup(keys([1]), pin=True).hits
        released, successor = dead.call(lambda: index.release(pinned))
        assert released == 0  # the successor had no record of a pin
        again = index.lookup(keys([1]), pin=True).hits
        assert index.stat().pinned_count == 1
        assert index.release(again) == 1
        assert index.release(again) == 0
        assert index.stat().pinned_count == 0
        successor.stop()


@pytest.mark.parametrize("point", ["grant.made", "commit.entered", "serve.fenced"])
def test_a_call_that_timed_out_is_applied_once(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(armed(monkeypatch, paths, f"{point}:stop"))
        client = ends.enter_context(Client(pool, timeout_s=60))
        look = IndexClient(ends.enter_context(Client(pool, timeout_s=60)))
        index, hasty = IndexClient(client), IndexClient(_Hasty(client, 0.5))
        with pytest.raises(CallTimeoutError):
            if point != "commit.entered":
                hasty.reserve(keys([1]), length=4096)
            grants = index.reserve(keys([1]), length=4096)
            hasty.commit(grants)
        assert server.stopped()
        server.signal(signal.SIGCONT)
        if point != "commit.entered":
            grants = index.reserve(keys([1]), length=4096)
            # the grant whose reply was lost ended with its session
            assert states(grants) == ["GRANTED"]
            assert look.stat().grant_count == 1
        statuses = index.commit(grants)
        assert statuses in ([0], [NO_GRANT])
        stat = look.stat()
        assert stat.block_count == stat.commit_count == (1 if statuses == [0] else 0)
        assert stat.grant_count == 0


class _Hasty:
    """A client's session, with another timeout."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.session, self.timeout_s = client.session, timeout_s


def test_an_abort_of_a_lost_grant_has_no_effect(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with armed(monkeypatch, paths, "abort.unindexed") as first, DeadServer(pool, first) as dead:
        index = dead.index
        grants = index.reserve(keys([1]), length=4096)
        aborted, successor = dead.call(lambda: index.abort(grants))
        assert aborted == 0
        assert eventually(lambda: index.stat().free_stripe_count == index.stat().stripe_count)
        successor.stop()


# ---- A get during which the server is replaced is a miss, and no block is reported as damaged.


NUMBERS = list(range(CHAIN))


@pytest.mark.parametrize("point", ["get.looked_up", "get.first_look", "get.copied"])
def test_a_get_that_outlives_its_server_misses_without_a_mismatch(
    paths: list[Path], coherence: str, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with (
        Pool.create(paths, device_size=16 << 20, coherence=coherence, sparse=True) as pool,
        Process(roles.serve_index, paths) as first,
        KVCache(pool, namespace="fetch", timeout_s=60) as cache,
    ):
        cache.put(keys(NUMBERS), [content(number) for number in NUMBERS]).raise_for_refused()
        with monkeypatch.context() as context:
            context.setenv("BELUGA_CRASH", f"{point}:stop")
            reader = Process(roles.fetch, paths)
        with reader:
            reader.send(json.dumps(NUMBERS))
            assert reader.stopped()
            first.kill()
            with IndexServer(pool):
                reader.signal(signal.SIGCONT)
                assert json.loads(reader.receive()) == [0, 0, 0]
                assert json.loads(reader.request(json.dumps(NUMBERS))) == [CHAIN, 0, 0]
                assert reader.end() == 0
