# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The check of a live pool finds nothing, whatever changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from beluga import IndexServer, KVCache, Pool
from beluga.errors import NoServerError
from beluga.index import check_pool
from beluga.rpc import Client

LOOKS = 200
LENGTHS = (9_000, 100_000, 700_000, 2_200_000)


@pytest.fixture(params=["hardware", "software"])
def pool(request: pytest.FixtureRequest, shm: Path) -> Iterator[Pool]:
    """A small pool: blocks are evicted soon, extents open and close."""
    paths = [shm / name for name in "ab"]
    with Pool.create(
        paths,
        device_size=20 << 20,
        sparse=True,
        max_blocks=128,
        lane_count=8,
        coherence=request.param,
    ) as pool:
        yield pool


def work(pool: Pool, seed: int, stop: threading.Event) -> int:
    """Put, get and remove blocks of many sizes in short sessions. Returns the number of rounds."""
    random = np.random.default_rng(seed)
    rounds = 0
    while not stop.is_set():
        try:
            client = Client(pool, timeout_s=60)
        except NoServerError:  # one server has stopped, and the next one has not started
            continue
        with client, KVCache(client, namespace="live", timeout_s=60) as cache:
            for _ in range(10):
                names = [bytes([n]) * 16 for n in random.integers(0, 60, 4)]
                names = list(dict.fromkeys(names))
                length = LENGTHS[random.integers(len(LENGTHS))]
                blocks = random.integers(0, 256, (len(names), length), dtype=np.uint8)
                with_room = cache.put(names, blocks)
                cache.get(names, blocks)
                if with_room.refused or random.integers(3) == 0:
                    cache.remove(names)
                rounds += 1
    return rounds


@contextmanager
def load(pool: Pool) -> Iterator[None]:
    stop = threading.Event()
    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work, pool, seed, stop) for seed in range(3)]
        try:
            yield
        finally:
            stop.set()
        assert all(each.result() for each in working)


def test_a_pool_under_load_has_no_findings(pool: Pool) -> None:
    found: list[str] = []
    looks = 0
    with IndexServer(pool), load(pool):
        while looks < LOOKS:
            report = check_pool(pool, payload=looks % 2 == 0)
            found.extend(report.findings)
            looks += report.block_count > 0
    assert found == []


def test_a_pool_whose_server_changes_has_no_findings(pool: Pool) -> None:
    found: list[str] = []
    stop = threading.Event()

    def look() -> int:
        looks = 0
        while not stop.is_set():
            found.extend(check_pool(pool, payload=True).findings)
            looks += 1
        return looks

    with ThreadPoolExecutor(1) as thread:
        server = IndexServer(pool)
        server.start()
        with load(pool):
            looking = thread.submit(look)
            try:
                for _ in range(5):
                    server.stop()
                    server = IndexServer(pool)
                    server.start()
                    threading.Event().wait(0.2)
            finally:
                stop.set()
            assert looking.result() > 0
        server.stop()
    assert found == []
    assert check_pool(pool, payload=True).findings == ()
