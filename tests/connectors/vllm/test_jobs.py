# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The parts of the offloading spec's sides that work without vLLM: cards, answers and jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest
from blocks import eventually
from vllm_parts import layer_major

from beluga import KVCache, MetaServer, Namespace, Pool
from beluga.connectors.connection import Connection
from beluga.connectors.process import process_start_s
from beluga.connectors.settings import PoolSettings
from beluga.connectors.vllm.answers import Answers
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.jobs import Jobs
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.rendezvous import Rendezvous
from beluga.connectors.vllm.retry import RetryTask
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.worker import RankWorker

BLOCKS, PAGE_ITEMS = 64, 512
LONG_S = 60.0
RANKS = [Namespace({"rank": rank, "of": "two"}, salt="s") for rank in range(2)]
HASHES = [bytes([i]) * 32 for i in range(BLOCKS)]
LOGGER = logging.getLogger("test.offloading")


@pytest.fixture
def connection(server: MetaServer, pool_name: str) -> Iterator[Connection]:
    connection = Connection(
        PoolSettings(pool=pool_name, timeout_ms=5000), name="test", logger=LOGGER
    )
    assert connection.wait(LONG_S)
    yield connection
    connection.close()


def test_a_process_began_before_now_and_after_its_machine() -> None:
    age_s = time.time() - process_start_s()
    assert 0 < age_s < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_scheduler_meets_all_ranks_of_its_engine_and_nobody_else(connection: Connection) -> None:
    rendezvous = Rendezvous("engine", "s")

    def look(at: Rendezvous = rendezvous, since_s: float = 0.0) -> list[Namespace] | None:
        return connection.attempt("looking", lambda a: at.look(a, 2, since_s))

    assert connection.attempt("leaving", lambda a: rendezvous.leave(a, 0, RANKS[0]))
    assert look() == []
    assert connection.attempt("leaving", lambda a: rendezvous.leave(a, 1, RANKS[1]))
    assert look() == RANKS
    assert look(Rendezvous("other", "s")) == []
    assert look(Rendezvous("engine", "t")) == []


def test_a_card_of_an_earlier_engine_of_the_same_name_is_not_believed(
    connection: Connection,
) -> None:
    rendezvous = Rendezvous("engine", "s")
    for rank in range(2):
        assert connection.attempt(
            "leaving", lambda a, rank=rank: rendezvous.leave(a, rank, RANKS[rank])
        )
    later_s = time.time() + 100
    assert connection.attempt("looking", lambda a: rendezvous.look(a, 2, later_s)) == []
    other = Namespace({"rank": 0, "of": "two", "model": "other"}, salt="s")
    assert connection.attempt("leaving", lambda a: rendezvous.leave(a, 0, other))
    found = connection.attempt("looking", lambda a: rendezvous.look(a, 2, 0.0))
    assert found == [other, RANKS[1]]


def test_a_retry_task_is_done_when_the_pool_comes(pool: Pool, pool_name: str) -> None:
    settings = PoolSettings(pool=pool_name, timeout_ms=300, retry_s=0.05)
    calls: list[int] = []

    def second_time(_: object) -> bool:
        calls.append(1)
        return len(calls) == 2

    retry_task = RetryTask(settings, name="test", doing="testing", call=second_time, logger=LOGGER)
    assert not retry_task.wait(0.3)
    with MetaServer(pool) as server:
        assert retry_task.wait(LONG_S)
        assert eventually(lambda: server.stat().live_count == 0)  # its session has ended
    assert len(calls) == 2
    retry_task.close()


def test_a_retry_task_can_be_given_up(pool: Pool, pool_name: str) -> None:
    settings = PoolSettings(pool=pool_name, timeout_ms=300, retry_s=0.05)
    retry_task = RetryTask(
        settings, name="test", doing="testing", call=lambda _: True, logger=LOGGER
    )
    retry_task.close()
    assert not retry_task.wait(0)


class Scheduler:
    """Answers over a pool that has the first four blocks on both ranks, and two more on one."""

    def __init__(self, connection: Connection, pool: Pool) -> None:
        self.counters = ConnectorCounters()
        self.lookups = Lookups(connection, self.counters)
        self.lookups.ranks = tuple(RANKS)
        self.answers = Answers(self.lookups)
        self.caches = [KVCache(pool, namespace=rank) for rank in RANKS]
        for cache, count in zip(self.caches, (6, 4), strict=True):
            cache.put(HASHES[:count], np.ones((count, 4096), dtype=np.uint8))

    def calls(self) -> float:
        return self.counters.take().get("lookups", 0)

    def pinned(self) -> int:
        return self.caches[0].stat().pinned_count

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


@pytest.fixture
def scheduler(connection: Connection, pool: Pool) -> Iterator[Scheduler]:
    scheduler = Scheduler(connection, pool)
    yield scheduler
    scheduler.close()


def test_one_call_answers_for_a_request_and_pins_what_it_finds(scheduler: Scheduler) -> None:
    answers = scheduler.answers
    asker = answers.begin("r")
    found = [answers.ask(asker, one, HASHES[at + 1 : 8]) for at, one in enumerate(HASHES[:8])]
    assert found == [True] * 4 + [False] * 4
    assert scheduler.calls() == 1
    assert scheduler.pinned() > 0
    answers.end("r")
    assert scheduler.pinned() == 0


def test_pins_stay_until_a_load_has_ended_even_if_its_request_has(scheduler: Scheduler) -> None:
    answers = scheduler.answers
    asker = answers.begin("r")
    assert answers.ask(asker, HASHES[0], HASHES[1:4])
    answers.loading(asker)
    answers.started(["r"])
    answers.end("r")
    assert scheduler.pinned() > 0
    answers.loaded(asker)
    assert scheduler.pinned() == 0


def test_a_request_that_starts_without_loading_lets_go(scheduler: Scheduler) -> None:
    asker = scheduler.answers.begin("r")
    assert scheduler.answers.ask(asker, HASHES[0], [])
    scheduler.answers.started(["r", "unheard of"])
    assert scheduler.pinned() == 0


def test_a_request_loads_once_until_it_is_preempted(scheduler: Scheduler) -> None:
    answers = scheduler.answers
    asker = answers.begin("r")
    assert answers.ask(asker, HASHES[0], [])
    answers.loading(asker)
    answers.loaded(asker)
    assert not answers.ask(asker, HASHES[0], [])
    answers.preempted(["r"])
    assert answers.ask(asker, HASHES[0], [])
    answers.end("r")


def test_after_a_reset_nothing_from_before_is_found(scheduler: Scheduler) -> None:
    answers = scheduler.answers
    assert answers.digest(HASHES[0]) == HASHES[0]
    asker = answers.begin("r")
    assert answers.ask(asker, HASHES[0], HASHES[1:4])
    answers.reset()
    assert scheduler.pinned() == 0
    assert not answers.ask(asker, HASHES[0], HASHES[1:4])
    assert answers.digest(HASHES[0]) != HASHES[0]


class Side:
    """A worker's jobs over two layers."""

    def __init__(self, pool_name: str) -> None:
        tensors, self.memory = layer_major(2, BLOCKS, PAGE_ITEMS)
        layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
        settings = VllmSettings(pool=pool_name, timeout_ms=5000, retry_s=0.05, load="async")
        self.worker = RankWorker(settings, layout, RANKS[0], ConnectorCounters(), LOGGER)
        self.jobs = Jobs(self.worker, block_size=layout.block_size, timeout_s=LONG_S)
        assert self.worker.load_connection.wait(LONG_S)
        assert self.worker.save_connection.wait(LONG_S)

    def fill(self, seed: int) -> None:
        self.memory[...] = np.random.default_rng(seed).integers(
            0, 1 << 16, self.memory.shape, dtype=np.uint16
        )


@pytest.fixture
def side(server: MetaServer, pool_name: str) -> Iterator[Side]:
    side = Side(pool_name)
    yield side
    side.jobs.close()


def joined(first: int, count: int) -> bytes:
    return b"".join(HASHES[first : first + count])


def test_a_job_saves_and_another_loads(side: Side) -> None:
    side.fill(1)
    before = side.memory.copy()
    side.jobs.save(7, list(range(20)), joined(0, 20))
    side.jobs.wait([7])
    side.memory[...] = 0
    side.jobs.load(8, list(range(20, 40)), joined(0, 20))
    side.jobs.wait([8])
    ended = {one.job: one for one in side.jobs.ended()}
    assert set(ended) == {7, 8}
    assert ended[8].size == 20 * 2 * PAGE_ITEMS * 2
    assert side.jobs.failed() == set()
    assert np.array_equal(side.memory[:, 20:40], before[:, :20])
    assert side.jobs.ended() == []


def test_a_load_that_fails_ends_and_names_its_blocks(side: Side) -> None:
    side.fill(1)
    side.jobs.save(1, [0, 1], joined(0, 2))
    side.jobs.wait([1])
    side.jobs.load(2, [10, 11, 12, 13], joined(0, 4))
    side.jobs.wait([2])
    assert [one.job for one in side.jobs.ended()] == [1, 2]
    assert side.jobs.failed() == {12, 13}
    assert side.jobs.failed() == set()


def test_without_a_server_jobs_end_all_the_same(pool: Pool, pool_name: str) -> None:
    with MetaServer(pool):
        side = Side(pool_name)
    side.jobs.save(1, [0], joined(0, 1))
    side.jobs.load(2, [1, 2], joined(0, 2))
    side.jobs.wait([1, 2, 3])
    assert {one.job for one in side.jobs.ended()} == {1, 2}
    assert side.jobs.failed() == {1, 2}
    side.jobs.close()


def test_a_wait_that_takes_too_long_drops_saves_that_have_not_begun(side: Side) -> None:
    side.fill(1)
    jobs = Jobs(side.worker, block_size=1, timeout_s=0.0)
    for job in range(30):
        jobs.save(job, list(range(BLOCKS)), joined(0, BLOCKS))
    jobs.wait(range(30))
    assert {one.job for one in jobs.ended()} == set(range(30))


def test_a_job_of_no_blocks_ends(side: Side) -> None:
    side.jobs.load(1, [], b"")
    side.jobs.save(2, [], b"")
    assert [one.job for one in side.jobs.ended()] == [1, 2]
