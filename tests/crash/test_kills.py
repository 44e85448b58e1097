# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes are killed during puts and gets, again and again. The remaining ones read only correct
bytes, stored blocks stay stored, and no call hangs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import roles
from support.blocks import BLOCK_WORDS, CHAIN, content, eventually, keys
from support.role import Process

from beluga.index import IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool

MIB = 1 << 20
SMALL, LARGE = 16 * MIB, 96 * MIB  # per device: blocks are evicted all the time, or all of them fit
CHAINS = 60
WORKERS = 3

each_length = pytest.mark.parametrize(
    "rounds", [6, pytest.param(150, marks=pytest.mark.slow)], ids=["short", "long"]
)


def make(paths: list[Path], device_size: int, coherence: str) -> Pool:
    return Pool.create(paths, device_size=device_size, coherence=coherence, sparse=True)


def start(paths: list[Path], seed: int) -> Process:
    worker = Process(roles.churn, paths)
    worker.send(f"go {seed} {CHAINS}")
    return worker


def reports_of(workers: list[Process]) -> list[dict[str, Any]]:
    """End the workers, and return their reports; none has read wrong bytes."""
    reports = [json.loads(worker.request("enough")) for worker in workers]
    assert [worker.end() for worker in workers] == [0] * WORKERS
    assert [counted["wrong"] for counted in reports] == [0] * WORKERS
    return reports


def right(cache: KVCache, numbers: Iterable[int]) -> set[int]:
    """Return the numbers whose blocks are present; each must be intact."""
    target, there = np.empty((1, BLOCK_WORDS), dtype=np.uint64), set()
    for number in numbers:
        result = cache.get(keys([number]), target)
        assert result.mismatches == 0
        if result.hits:
            assert (target[0] == content(number)).all()
            there.add(number)
    return there


def nothing_is_stuck(cache: KVCache) -> bool:
    stat = cache.stat()
    return (stat.grant_count, stat.pinned_count, stat.held_bytes) == (0, 0, 0)


@pytest.mark.long
@each_length
def test_killed_clients_leave_nothing_behind(
    paths: list[Path], coherence: str, rounds: int
) -> None:
    dice = random.Random(rounds)
    with make(paths, SMALL, coherence) as pool, IndexServer(pool) as server, ExitStack() as ends:
        workers = [ends.enter_context(start(paths, i)) for i in range(WORKERS)]
        for turn in range(rounds):
            time.sleep(dice.uniform(0.05, 0.3))
            victim = dice.randrange(WORKERS)
            workers[victim].kill()
            workers[victim] = ends.enter_context(start(paths, WORKERS + turn))
        reports = reports_of(workers)
        assert sum(counted["got"] for counted in reports) > 0
        assert eventually(lambda: server.stat().live_count == 0)
        with KVCache(pool, namespace="churn") as cache:
            assert nothing_is_stuck(cache)
            there = right(cache, range(CHAINS * CHAIN))
            stat = cache.stat()
            assert stat.block_count == len(there) > 0
            assert stat.used_bytes < stat.block_bytes * 1.1
            cache.remove(keys(there))
            stat = cache.stat()
            assert stat.free_stripe_count == stat.stripe_count


@pytest.mark.long
@each_length
def test_killed_servers_lose_no_block(paths: list[Path], coherence: str, rounds: int) -> None:
    dice = random.Random(rounds)
    with make(paths, LARGE, coherence) as pool, ExitStack() as ends:
        server = ends.enter_context(Process(roles.serve_index, paths))
        workers = [ends.enter_context(start(paths, i)) for i in range(WORKERS)]
        for _ in range(rounds):
            time.sleep(dice.uniform(0.05, 0.3))
            server.kill()
            server = ends.enter_context(Process(roles.serve_index, paths))
        reports = reports_of(workers)
        stored = {number for counted in reports for number in counted["stored"]}
        assert stored
        server.kill()
        with IndexServer(pool) as last, KVCache(pool, namespace="churn") as cache:
            assert right(cache, range(CHAINS * CHAIN)) >= stored
            assert eventually(lambda: last.stat().inherited_count == 0)
            assert eventually(lambda: nothing_is_stuck(cache))
            assert cache.stat().evict_count == cache.stat().damaged_count == 0


@pytest.mark.long
@each_length
def test_clients_and_servers_are_killed_together(
    paths: list[Path], coherence: str, rounds: int
) -> None:
    dice = random.Random(rounds)
    with make(paths, SMALL, coherence) as pool, ExitStack() as ends:
        server = ends.enter_context(Process(roles.serve_index, paths))
        workers = [ends.enter_context(start(paths, i)) for i in range(WORKERS)]
        for turn in range(rounds):
            time.sleep(dice.uniform(0.05, 0.3))
            victim = dice.randrange(WORKERS)
            workers[victim].kill()
            server.kill()
            server = ends.enter_context(Process(roles.serve_index, paths))
            workers[victim] = ends.enter_context(start(paths, WORKERS + turn))
        reports_of(workers)
        server.kill()
        with IndexServer(pool), KVCache(pool, namespace="churn") as cache:
            assert eventually(lambda: nothing_is_stuck(cache))
            assert len(right(cache, range(CHAINS * CHAIN))) == cache.stat().block_count
