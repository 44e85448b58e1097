# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""All users of a namespace have the same generation, any can end it, and none is reused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually
from support.memory_tier import MemoryTier, served

from beluga import IndexServer, Namespace, Pool
from beluga.connectors import records
from beluga.connectors.connection import Attachment
from beluga.connectors.records import CacheGeneration
from beluga.connectors.settings import PoolSettings
from beluga.errors import CacheError
from beluga.index import IndexClient
from beluga.tiers import TierService

MODEL = Namespace.of("model")


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[Attachment]:
    session = Attachment(PoolSettings(pool=str(path), timeout_ms=5000))
    try:
        yield session
    finally:
        session.close()


@pytest.fixture
def sessions(server: IndexServer, pool_name: str) -> Iterator[list[Attachment]]:
    with opened(pool_name) as first, opened(pool_name) as second:
        yield [first, second]


def test_all_users_of_a_namespace_have_one_generation_until_a_clear_ends_it_once(
    sessions: list[Attachment],
) -> None:
    generation, other = CacheGeneration(MODEL), CacheGeneration(MODEL)
    first = generation.now(sessions[0])
    assert len(first) == records.SIZE
    assert other.now(sessions[1]) == first
    assert CacheGeneration(Namespace.of("other")).now(sessions[1]) != first
    generation.clear()
    assert generation.pending
    assert other.now(sessions[1]) == first  # the clear happens with the next call
    second = generation.now(sessions[0])
    assert not generation.pending
    assert second != first
    assert other.now(sessions[1]) == generation.now(sessions[0]) == second


def test_a_pool_without_space_for_a_record_still_ends_an_era(
    sessions: list[Attachment], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, other = CacheGeneration(MODEL), CacheGeneration(MODEL)
    first = generation.now(sessions[0])

    def full(*_: object) -> bytes:
        raise CacheError("the pool has no space")

    with monkeypatch.context() as patch:
        patch.setattr(records, "write", full)
        generation.clear()
        with pytest.raises(CacheError):
            generation.now(sessions[0])  # the next generation cannot start yet
    assert other.now(sessions[1]) != first


def test_a_record_that_is_lost_is_a_new_generation(sessions: list[Attachment]) -> None:
    generation = CacheGeneration(MODEL)
    first = generation.now(sessions[0])
    sessions[1].cache(generation._namespace).remove(records._RECORD)
    assert generation.now(sessions[0]) != first


def test_a_generation_lasts_as_long_as_a_session_that_has_read_it(
    server: IndexServer, pool: Pool, sessions: list[Attachment]
) -> None:
    """A block that the session pins would otherwise stay, and not be found any more."""
    generation, other = CacheGeneration(MODEL), sessions[1].cache(Namespace.of("blocks"))
    first, size = generation.now(sessions[0]), 1 << 20
    before = server.index_stat().evict_count
    for number in range(2 * sum(device.size for device in pool.devices) // size):
        other.put([b"%032d" % number], [bytes(size)])
    assert server.index_stat().evict_count > before
    assert generation.now(sessions[0]) == CacheGeneration(MODEL).now(sessions[1]) == first
    generation.clear()
    assert generation.now(sessions[0]) == CacheGeneration(MODEL).now(sessions[1]) != first
    for session in sessions:
        session.close()
    assert eventually(lambda: server.index_stat().pinned_count == 0)


def test_a_record_that_a_tier_cannot_read_now_is_not_absent(shm: Path) -> None:
    """The server answers a miss for a second after a load that failed."""
    tier = MemoryTier()
    with served(shm / "first", tier), opened(shm / "first") as session:
        assert records.write(session, MODEL, records._RECORD, b"first") == b"first"
        assert eventually(lambda: len(tier.blocks) == 1)
    with served(shm / "second", tier), opened(shm / "second") as session:
        tier.failing = True
        for _ in range(2):
            with pytest.raises(CacheError, match="a lower tier has not replied"):
                records.read(session, MODEL, records._RECORD, 5)
        tier.failing = False

        def again() -> bool:
            with contextlib.suppress(CacheError):
                return records.read(session, MODEL, records._RECORD, 5) == b"first"
            return False

        assert eventually(again)


class Stubborn(MemoryTier):
    """A store that rejects every deletion, or fails it."""

    fails = False

    def remove(self, keys: NDArray[np.uint64]) -> int:
        if self.fails:
            raise OSError("made up")
        return 0


def generations(
    path: Path, tier: MemoryTier, *, clear: bool = False, generation: CacheGeneration | None = None
) -> list[bytes]:
    """Return the generations in a new pool over the tier, before and after a clear, when it has
    them.
    """
    with served(path, tier), opened(path) as session:
        generation = generation or CacheGeneration(MODEL)
        names = [generation.now(session)]
        if clear:
            generation.clear()
            names.append(generation.now(session))
        assert eventually(lambda: len(tier.blocks) >= 1 + clear)
        return names


@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_a_generation_that_was_ended_does_not_return_from_a_store_that_refuses_deletes(
    shm: Path, remote: bool
) -> None:
    tier = Stubborn(remote=remote)
    (first,) = generations(shm / "first", tier)
    begun = dict(tier.blocks)
    assert generations(shm / "second", tier) == [first]  # as the tier has it
    again, second = generations(shm / "third", tier, clear=True)
    assert again == first
    assert second != first
    tier.blocks |= begun  # the old record, as if the new one had never replaced it
    (third,) = generations(shm / "fourth", tier)
    assert third != first


@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_an_ended_generation_stays_ended_when_a_server_follows_on_the_same_pool(
    shm: Path, remote: bool
) -> None:
    tier, names = Stubborn(remote=remote), list[bytes]()
    tier.fails = True
    with Pool.create([shm / "pool"], device_size=32 << 20, sparse=True) as pool:
        for clears in (0, 1, 0):
            server = IndexServer(pool)
            service = TierService(server, pool, [tier], wait=True)
            with server:
                service.start()
                with opened(shm / "pool") as session:
                    generation = CacheGeneration(MODEL)
                    names.append(generation.now(session))
                    for _ in range(clears):
                        generation.clear()
                        names.append(generation.now(session))
                service.stop()
    first, again, second, last = names
    assert first == again
    assert second == last != first


def test_a_process_that_has_ended_a_generation_does_not_accept_it_from_a_store(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the generation while it could not start another one, and the pool is recreated."""
    tier, generation = Stubborn(remote=True), CacheGeneration(MODEL)
    (first,) = generations(shm / "first", tier, generation=generation)
    write = records.write

    def full(attachment: Attachment, namespace: Namespace, key: object, content: bytes) -> bytes:
        if key is records._RECORD:
            raise CacheError("the pool has no space")
        return write(attachment, namespace, key, content)

    with monkeypatch.context() as patch, served(shm / "second", tier):
        patch.setattr(records, "write", full)
        generation.clear()
        with opened(shm / "second") as session, pytest.raises(CacheError, match="has no space"):
            generation.now(session)
        assert eventually(lambda: len(tier.blocks) == 2)
    assert generations(shm / "third", tier, generation=generation) != [first]


def test_concurrent_clears_end_the_generation_and_keep_blocks_of_the_next(
    sessions: list[Attachment],
) -> None:
    generation = CacheGeneration(MODEL)
    first = generation.now(sessions[0])
    generation.clear()
    together, names = threading.Barrier(2), list[bytes]()

    def now(session: Attachment) -> None:
        together.wait(60)
        with contextlib.suppress(CacheError):  # the other user starts it
            names.append(generation.now(session))

    threads = [threading.Thread(target=now, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first not in names
    assert {*names, generation.now(sessions[0])} == {generation.now(sessions[1])}


def test_a_record_that_is_being_written_raises_immediately(sessions: list[Attachment]) -> None:
    generation = CacheGeneration(MODEL)
    cache, writer = sessions[1].cache(generation._namespace), IndexClient(sessions[1].client)
    keys = cache.keys(records._RECORD)
    grants = writer.reserve(keys, length=records.SIZE, fingerprint=cache.fingerprint)
    with pytest.raises(CacheError, match="is being written"):
        generation.now(sessions[0])
    writer.abort(grants)
    assert len(generation.now(sessions[0])) == records.SIZE
