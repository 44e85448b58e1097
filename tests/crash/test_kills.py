# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes are killed and stopped, at random and at crash points: the others read only correct
bytes, stored blocks stay stored, standbys take over, and no call hangs.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import role, roles
from support.blocks import BLOCK_WORDS, CHAIN, content, eventually, keys
from support.commands import captured
from support.emulation import PATIENCE, long
from support.role import Process, reply

from beluga._ffi import ffi, lib
from beluga.index import IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import Client, Server
from tests.crash import killloop

# ---- Processes are killed during puts and gets, again and again. The remaining ones read only
# correct bytes, stored blocks stay stored, and no call hangs.


MIB = 1 << 20
SMALL, LARGE = 16 * MIB, 96 * MIB  # per device: blocks are evicted all the time, or all of them fit
CHAINS = 60
KILL_WORKERS = 3

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
    assert [worker.end() for worker in workers] == [0] * KILL_WORKERS
    assert [counted["wrong"] for counted in reports] == [0] * KILL_WORKERS
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
        workers = [ends.enter_context(start(paths, i)) for i in range(KILL_WORKERS)]
        for turn in range(rounds):
            time.sleep(dice.uniform(0.05, 0.3))
            victim = dice.randrange(KILL_WORKERS)
            workers[victim].kill()
            workers[victim] = ends.enter_context(start(paths, KILL_WORKERS + turn))
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
        workers = [ends.enter_context(start(paths, i)) for i in range(KILL_WORKERS)]
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
        workers = [ends.enter_context(start(paths, i)) for i in range(KILL_WORKERS)]
        for turn in range(rounds):
            time.sleep(dice.uniform(0.05, 0.3))
            victim = dice.randrange(KILL_WORKERS)
            workers[victim].kill()
            server.kill()
            server = ends.enter_context(Process(roles.serve_index, paths))
            workers[victim] = ends.enter_context(start(paths, KILL_WORKERS + turn))
        reports_of(workers)
        server.kill()
        with IndexServer(pool), KVCache(pool, namespace="churn") as cache:
            assert eventually(lambda: nothing_is_stuck(cache))
            assert len(right(cache, range(CHAINS * CHAIN))) == cache.stat().block_count


# ---- A hot standby takes over from a server that is killed or stopped under load. No committed
# block is lost, clients reconnect, and a deposed server that still runs does no harm.


WORKERS = 2
TURN_S = 60.0  # limit of a takeover, on a busy machine


def stand_by(paths: list[Path], silent_s: float = 300.0) -> Process:
    standby = Process(roles.stand_by_index, paths)
    standby.send(str(silent_s))
    return standby


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


# ---- The kill loop in short; the slow tests are long enough to pass every crash point.


LOOP = Path(__file__).with_name("killloop.py")


def loop(rounds: int, seed: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(LOOP), "--json", f"--rounds={rounds}", f"--seed={seed}", *more]
    process = captured(command, timeout=280 * PATIENCE)
    assert process.stdout, process.stderr
    message: dict[str, Any] = json.loads(process.stdout)
    assert message["errors"] == []
    assert process.returncode == 0, process.stderr
    assert message["rounds"] >= rounds
    return message


def test_some_deaths_and_stops_do_no_harm() -> None:
    message = loop(24, seed=1)
    assert message["kills"] > 0
    assert message["stops"] > 0
    assert message["blocks_checked"] > 0


@pytest.mark.long
def test_a_death_in_the_middle_of_any_line_does_no_harm() -> None:
    message = loop(len(killloop.walk(lines=True)) + 10, 3, "--lines")
    assert message["missed"] == []
    assert message["kills"] >= message["points"]
    assert {spot.partition("+")[0] for spot in message["hit"]} == {
        *("request.line", "lobby.line", "session.line"),  # of the lobby, of sessions
        *("call.line", "serve.line"),  # of lanes
        *("entry.line", "entry.clear_line", "entry.tomb_line", "extent.line"),
        *("elect.line", "take.line", "register.second_line"),  # candidates, epochs
        *("recover.entry_line", "recover.name_line", "name.line"),
        *("heartbeat.line", "heartbeat.last_line"),
    }


@pytest.mark.slow
def test_every_crash_point_is_passed_and_survived() -> None:
    message = loop(len(killloop.walk()) + 30, seed=2)
    assert message["missed"] == []
    assert len(message["hit"]) == message["points"]
    assert message["takeovers"] > 0


# ---- Crash points have unique names, and are armed by the environment.


def heartbeats(paths: list[str]) -> None:
    reply("ready")
    with Pool.open(paths) as pool, Server(pool), Client(pool) as client:
        reply("attached")
        client.ping()
        reply("answered")


def run_at(paths: list[Path], point: str) -> subprocess.CompletedProcess[str]:
    return role.run(heartbeats, paths, env=os.environ | {"BELUGA_CRASH": point})


@pytest.fixture
def pool_on_disk(paths: list[Path]) -> None:
    Pool.create(paths, device_size=8 << 20, sparse=True).close()


@pytest.mark.usefixtures("pool_on_disk")
def test_the_build_lists_every_point_of_the_source_once() -> None:
    points, lines = killloop.named(), killloop.named("line")
    assert len(points) == len(set(points)) >= 60
    assert lines == [name for name in points if name.endswith("line")]
    assert len(lines) >= 12
    for name in points:
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", name)
        armed = lib.bl_crash_arm(name.encode(), 1 << 30, 0, 0)
        assert lib.bl_crash_arm(ffi.NULL, 0, 0, 0) == 0
        assert armed == 0, name


@pytest.mark.usefixtures("pool_on_disk")
def test_a_process_dies_at_the_requested_passage(paths: list[Path]) -> None:
    first = run_at(paths, "serve.fenced")
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, "ready\nattached\n")
    later = run_at(paths, "call.sent:2")
    assert (later.returncode, later.stdout) == (0, "ready\nattached\nanswered\n")


@pytest.mark.usefixtures("pool_on_disk")
def test_a_process_stops_at_the_requested_point_and_continues(paths: list[Path]) -> None:
    stop = {"BELUGA_CRASH": "call.sent:stop"}
    with role.Process(heartbeats, paths, environment=stop) as process:
        assert process.stopped()
        process.signal(signal.SIGCONT)
        assert [process.receive() for _ in range(2)] == ["attached", "answered"]
        assert process.end() == 0


@pytest.mark.usefixtures("pool_on_disk")
@pytest.mark.parametrize("point", ["no.such", "call.sent:x", "call.sent:0", "call.sent:1:2:kill"])
def test_a_point_that_is_not_there_is_refused(paths: list[Path], point: str) -> None:
    result = run_at(paths, point)
    assert result.returncode == 1
    assert f"BELUGA_CRASH={point}" in result.stderr
