# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A hot standby takes over from a server that is killed or stopped under load. No committed block
is lost, clients reconnect, and a deposed server that still runs does no harm.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support import roles
from support.blocks import BLOCK_WORDS, content, eventually, keys
from support.emulation import long
from support.role import Process

from beluga.index import IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20
CHAINS = 60  # of 192 kB blocks: all of them fit
WORKERS = 2
TURN_S = 60.0  # limit of a takeover, on a busy machine


def stand_by(paths: list[Path], silent_s: float = 300.0) -> Process:
    standby = Process(roles.stand_by_index, paths)
    standby.send(str(silent_s))
    return standby


def start(paths: list[Path], seed: int) -> Process:
    worker = Process(roles.churn, paths)
    worker.send(f"go {seed} {CHAINS}")
    return worker


@pytest.fixture
def pool(paths: list[Path], coherence: str) -> Iterator[Pool]:
    with Pool.create(paths, device_size=96 * MIB, coherence=coherence, sparse=True) as pool:
        yield pool


def ends_well(pool: Pool, workers: list[Process]) -> None:
    """Check that the workers read only correct bytes, and that every block they stored is present
    and intact.
    """
    stored: set[int] = set()
    for worker in workers:
        result = json.loads(worker.request("enough"))
        assert worker.end() == 0
        assert result["wrong"] == 0
        stored.update(result["stored"])
    assert stored
    with KVCache(pool, namespace="churn", timeout_s=60) as cache:
        target = np.empty((1, BLOCK_WORDS), dtype=np.uint64)
        for number in stored:
            assert cache.get(keys([number]), target).hits == 1
            assert (target[0] == content(number)).all()
        assert eventually(lambda: cache.stat().held_bytes == 0)
        assert cache.stat().grant_count == cache.stat().pinned_count == 0


@pytest.mark.parametrize(
    "kills",
    [2, long(5), pytest.param(20, marks=pytest.mark.slow)],
    ids=["two", "few", "many"],
)
def test_a_standby_replaces_every_killed_server(pool: Pool, paths: list[Path], kills: int) -> None:
    dice = random.Random(kills)
    with ExitStack() as ends:
        server = ends.enter_context(Process(roles.serve_index, paths))
        workers = [ends.enter_context(start(paths, seed)) for seed in range(WORKERS)]
        for turn in range(kills):
            standby = ends.enter_context(stand_by(paths))
            time.sleep(dice.uniform(0.05, 0.3))
            server.kill()
            assert standby.receive(TURN_S) == str(turn + 2)
            server = standby
        time.sleep(0.2)
        ends_well(pool, workers)
        server.kill()


def test_a_standby_replaces_a_stalled_server_which_then_stops(
    pool: Pool, paths: list[Path]
) -> None:
    with ExitStack() as ends:
        first = ends.enter_context(stand_by(paths))
        assert first.receive(TURN_S) == "1"
        workers = [ends.enter_context(start(paths, seed)) for seed in range(WORKERS)]
        standby = ends.enter_context(stand_by(paths, silent_s=0.2))
        time.sleep(0.2)
        first.signal(signal.SIGSTOP)
        assert standby.receive(TURN_S) == "2"
        time.sleep(0.2)
        first.signal(signal.SIGCONT)
        assert eventually(lambda: "taken this pool over" in request_again(first))
        ends_well(pool, workers)
        standby.kill()


def test_a_standby_does_not_depose_a_slow_live_server_of_its_host(
    pool: Pool, paths: list[Path]
) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(Process(roles.serve_index, paths))
        standby = ends.enter_context(stand_by(paths, silent_s=0.4))
        for _ in range(2):
            server.signal(signal.SIGSTOP)
            time.sleep(1.2)  # three times as long as another machine's server may be silent
            server.signal(signal.SIGCONT)
            with KVCache(pool, namespace="slow", timeout_s=60) as cache:
                cache.put(keys([1]), np.zeros((1, BLOCK_WORDS), dtype=np.uint64))
            with Client(pool) as client:
                assert client.stat().epoch == 1
        server.kill()
        assert standby.receive(TURN_S) == "2"


def request_again(server: Process) -> str:
    server.send("still?")
    return server.receive(TURN_S)


def test_one_of_several_standbys_takes_over_and_the_others_wait(
    pool: Pool, paths: list[Path]
) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(Process(roles.serve_index, paths))
        standbys = [ends.enter_context(stand_by(paths)) for _ in range(3)]
        server.kill()
        for turn in range(3):
            follower, epoch = first_to_reply(standbys)
            assert epoch == str(turn + 2)
            standbys.remove(follower)
            follower.kill()


def first_to_reply(standbys: list[Process]) -> tuple[Process, str]:
    """Return the standby that took over, and its output."""
    end = time.monotonic() + TURN_S
    while time.monotonic() < end:
        for standby in standbys:
            if line := standby.receive(0.05):
                return standby, line
    raise AssertionError("nobody took over")


def test_a_standby_takes_over_a_pool_without_a_server_at_once(
    pool: Pool, paths: list[Path]
) -> None:
    with stand_by(paths) as standby:
        assert standby.receive(TURN_S) == "1"
    with IndexServer(pool) as server:
        assert server.stat().epoch == 2
