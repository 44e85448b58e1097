# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fairness is measured in the server's work and not in time: one quantum of every other session."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI
from support import roles
from support.blocks import eventually, keys
from support.emulation import PATIENCE
from support.forge import Lane, bulk_payload, write
from support.role import Process

from beluga._ffi import ffi, lib
from beluga.index import IndexServer
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server, ServerStat

# ---- Fairness is measured in the server's work and not in time: one quantum of every other
# session. A handler blocks the server while rings are filled, so that the waiting requests are
# known exactly when it continues. The simulator's oracle
# (``tests/sim/native/scenarios/turns.c``) covers every interleaving.


HOLD, VICTIM = METHOD_USER, METHOD_USER + 1
QUANTUM_REQUESTS, QUANTUM_KEYS = 64, 256
AGGRESSORS = 3


@pytest.fixture
def wide_pool(shm: Path, coherence: str) -> Iterator[Pool]:
    with Pool.create(
        [shm / "a"], device_size=64 << 20, coherence=coherence, sparse=True, slot_count=256
    ) as wide_pool:
        yield wide_pool


class Crowd:
    """A server that can be blocked, and its work before it served the victim."""

    def __init__(self, wide_pool: Pool, stack: ExitStack) -> None:
        self.pool = wide_pool
        self.server = IndexServer(wide_pool)
        self.served: list[ServerStat] = []
        self._held, self._go = threading.Event(), threading.Event()
        self.server.handle(HOLD, self._hold)
        self.server.handle(VICTIM, self._note)
        stack.enter_context(self.server)
        self.clients = [stack.enter_context(Client(wide_pool)) for _ in range(AGGRESSORS + 2)]

    def _hold(self, _: bytes) -> bytes:
        self._held.set()
        self._go.wait(60)
        return b""

    def _note(self, _: bytes) -> bytes:
        self.served.append(self.server.stat())
        return b""

    @contextmanager
    def held(self, client: Client) -> Iterator[ServerStat]:
        """Yield its counters while the server waits in a handler."""
        self._held.clear()
        self._go.clear()
        call = threading.Thread(target=client.call, args=(HOLD,), kwargs={"timeout_s": 60})
        call.start()
        try:
            assert self._held.wait(60)
            yield self.server.stat()
        finally:
            self._go.set()
            call.join()


def long_call() -> bytes:
    head = ffi.new("bl_block_request *", {"count": QUANTUM_KEYS})
    return bytes(ffi.buffer(head)) + keys(range(QUANTUM_KEYS)).tobytes()


@pytest.fixture
def crowd(wide_pool: Pool) -> Iterator[Crowd]:
    with ExitStack() as stack:
        yield Crowd(wide_pool, stack)


@pytest.mark.parametrize("long", [False, True], ids=["short calls", "calls of 256 keys"])
@pytest.mark.parametrize("position", range(AGGRESSORS + 1))
def test_a_victim_waits_for_one_quantum_of_each_other(
    crowd: Crowd, position: int, long: bool
) -> None:
    holder, *others = crowd.clients
    victim = others.pop(position)  # before, between and after the others in the server's order
    lanes = [Lane(client) for client in others]
    data = long_call()
    with crowd.held(holder) as before:
        for lane in lanes:
            write(crowd.pool, lane.bulk_in, data)
            for sequence in range(1, lane.slots + 1):
                if long:
                    flags = lib.BL_MESSAGE_BULK
                    lane.send(sequence, lib.BL_METHOD_LOOKUP, bulk_payload(data), flags=flags)
                else:
                    lane.send(sequence, lib.BL_METHOD_PING, b"")
        Lane(victim).send(1, VICTIM, b"")
    assert eventually(lambda: all(lane.answered(lane.slots) for lane in lanes))
    (then,) = crowd.served
    assert then.call_count - before.call_count - 1 <= AGGRESSORS * QUANTUM_REQUESTS  # 1: the hold
    assert then.key_count - before.key_count - 1 <= AGGRESSORS * QUANTUM_KEYS
    after = crowd.server.stat()
    assert after.call_count - before.call_count == AGGRESSORS * lanes[0].slots + 2
    assert after.error_count == 0
    assert after.quantum_request_max <= QUANTUM_REQUESTS
    assert after.quantum_key_max == (QUANTUM_KEYS if long else after.quantum_request_max)
    assert after.wait_request_max <= (AGGRESSORS + 1) * QUANTUM_REQUESTS
    assert after.wait_key_max <= (AGGRESSORS + 1) * QUANTUM_KEYS


def test_a_call_of_more_keys_than_a_quantum_is_refused(crowd: Crowd) -> None:
    lane = Lane(crowd.clients[0])
    head = ffi.new("bl_block_request *", {"count": QUANTUM_KEYS + 1})
    data = bytes(ffi.buffer(head)) + keys(range(QUANTUM_KEYS + 1)).tobytes()
    write(crowd.pool, lane.bulk_in, data)
    lane.send(1, lib.BL_METHOD_LOOKUP, bulk_payload(data), flags=lib.BL_MESSAGE_BULK)
    assert eventually(lambda: lane.answered(1))
    assert crowd.server.stat().error_count == 1


# ---- The call quota's token bucket (csrc/rpc/quota.h) on a virtual clock: its limit, its rate
# and its credit.


CSRC = Path(__file__).resolve().parents[2] / "csrc"
RATE = 4  # calls per second
SECOND = 1_000_000_000

SOURCE = """
#include "rpc/quota.h"
void fill(bl_allowance *a, uint32_t rate, uint64_t now_ns) { bl_allowance_fill(a, rate, now_ns); }
int take(bl_allowance *a, uint32_t rate, uint32_t method)
{
    return bl_allowance_take(a, rate, method);
}
"""
DECLARED = """
typedef struct { int64_t tokens; uint64_t filled_ns; } bl_allowance;
void fill(bl_allowance *, uint32_t, uint64_t);
int take(bl_allowance *, uint32_t, uint32_t);
"""
LOOKUP = 1
GIVERS = (3, 4, 5)  # commit, abort, release


class Bucket:
    """One session's bucket, empty at time 0."""

    def __init__(self, ffi: FFI, library: Any) -> None:
        self._library = library
        self._bucket = ffi.new("bl_allowance *")

    def at(self, now_ns: int) -> Bucket:
        self._library.fill(self._bucket, RATE, now_ns)
        return self

    def taken(self, method: int = LOOKUP) -> int:
        """Return how many consecutive calls are admitted."""
        count = 0
        while self._library.take(self._bucket, RATE, method):
            count += 1
        return count


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FFI, Any]:
    folder = tmp_path_factory.mktemp("allowance")
    (folder / "allowance.c").write_text(SOURCE)
    target = folder / "allowance.so"
    command = ["cc", "-std=gnu11", "-shared", "-fPIC", f"-I{CSRC}", "-o", str(target)]
    subprocess.run([*command, str(folder / "allowance.c")], check=True)
    ffi = FFI()
    ffi.cdef(DECLARED)
    return ffi, ffi.dlopen(str(target))


@pytest.fixture
def bucket(made: tuple[FFI, Any]) -> Bucket:
    return Bucket(*made)


def test_the_bucket_refills_at_the_rate_in_whole_calls(bucket: Bucket) -> None:
    assert bucket.taken() == 0
    assert bucket.at(SECOND // RATE - 1).taken() == 0
    assert bucket.at(SECOND // RATE).taken() == 1  # earlier tokens count, too
    assert bucket.at(SECOND // RATE).taken() == 0  # no tokens are added twice for the same time
    assert bucket.at(SECOND).taken() == RATE - 1


def test_a_bucket_holds_the_tokens_of_one_second(bucket: Bucket) -> None:
    assert bucket.at(1000 * SECOND).taken() == RATE
    assert bucket.at(1001 * SECOND).taken() == RATE
    assert bucket.at(1001 * SECOND + SECOND // 2).taken() == RATE // 2


@pytest.mark.parametrize("method", GIVERS)
def test_calls_that_release_space_have_a_credit_of_one_bucket(bucket: Bucket, method: int) -> None:
    assert bucket.at(SECOND).taken() == RATE
    assert bucket.taken(method) == RATE
    assert bucket.at(2 * SECOND).taken() == 0  # first the credit is repaid
    assert bucket.at(2 * SECOND).taken(method) == RATE
    assert bucket.at(4 * SECOND).taken() == RATE


@pytest.mark.parametrize("method", [0, 1, 2, 6, 7, 8, 9, 10, 11, 64])
def test_other_calls_have_no_credit(bucket: Bucket, method: int) -> None:
    assert bucket.taken(method) == 0
    assert bucket.at(SECOND).taken(method) == RATE


# ---- An idle server


IDLE_CPU_MAX = 0.01  # fraction of a core
IDLE_ROUNDS_MAX_S = 100  # 10 on a quiet machine
FIRST_CALL_MAX_S = 0.001 * PATIENCE
CALL_CPU_MAX_S = 25e-6 * PATIENCE  # both spin for 70 us before they yield
OTHERS_CPU_MAX_S = 0.001  # a time slice is 3 ms
TRIES = 8


@contextmanager
def one_core() -> Iterator[None]:
    """Run this thread, and what it starts, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def user_s(pid: int) -> float:
    """Return the CPU time that a process spent in its own code."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def cpu_share(server: Process, seconds: float) -> float:
    """Return the CPU time that a server process used in the meantime, as a fraction of one core."""
    before, start = int(server.request("cpu")), time.monotonic_ns()
    time.sleep(seconds)
    after, end = int(server.request("cpu")), time.monotonic_ns()
    return (after - before) / (end - start)


def test_an_idle_server_uses_little_of_a_core(pool: Pool, paths: list[Path]) -> None:
    with Process(roles.serve, paths) as server, Client(pool) as client:
        client.ping()
        shares: list[float] = []
        while len(shares) < TRIES and min(shares, default=1) >= IDLE_CPU_MAX:
            time.sleep(1.0)
            shares.append(cpu_share(server, 1.0))
        assert min(shares) < IDLE_CPU_MAX, shares


def test_the_first_call_after_a_pause_is_served_soon(pool: Pool, paths: list[Path]) -> None:
    with Process(roles.serve, paths) as server, Client(pool) as client:
        client.ping()
        excess: list[float] = []
        while len(excess) < TRIES and min(excess, default=1) >= FIRST_CALL_MAX_S:
            time.sleep(1.0)
            call = client.ping()
            start = time.perf_counter()
            server.request("cpu")
            excess.append(call - 10 * (time.perf_counter() - start))
        assert min(excess) < FIRST_CALL_MAX_S, excess


def test_server_and_client_on_one_core_yield_to_each_other(pool: Pool, paths: list[Path]) -> None:
    with one_core(), Process(roles.serve, paths) as server, Client(pool) as client:
        spent: list[float] = []
        while len(spent) < 10 * TRIES and min(spent, default=1) >= CALL_CPU_MAX_S:
            before = int(server.request("cpu")) + time.thread_time_ns()
            for _ in range(500):
                client.ping()
            after = int(server.request("cpu")) + time.thread_time_ns()
            spent.append((after - before) / 500e9)
        assert min(spent) < CALL_CPU_MAX_S, spent


def test_a_call_on_a_core_that_others_use_costs_less_than_their_time_slices(
    pool: Pool, paths: list[Path]
) -> None:
    """Linux counts a yield as a used time slice, so each yield gives one to each other process."""
    with ExitStack() as stack:
        stack.enter_context(one_core())
        server = stack.enter_context(Process(roles.serve, paths))
        client = stack.enter_context(Client(pool))
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        for other in others:
            stack.callback(other.wait)
            stack.callback(other.kill)
        spent: list[float] = []
        while len(spent) < TRIES and min(spent, default=1) >= OTHERS_CPU_MAX_S:
            before = sum(user_s(other.pid) for other in others)
            for _ in range(300):
                client.ping()
            spent.append((sum(user_s(other.pid) for other in others) - before) / 300)
        assert min(spent) < OTHERS_CPU_MAX_S, spent
        assert server.request("cpu")


def test_an_idle_server_does_its_housekeeping_rarely(pool: Pool) -> None:
    with Server(pool) as server, Client(pool) as client:
        client.ping()
        rates: list[float] = []
        while len(rates) < TRIES and min(rates, default=IDLE_ROUNDS_MAX_S) >= IDLE_ROUNDS_MAX_S:
            time.sleep(1.0)
            before, start = server.stat().housekeeping_count, time.monotonic()
            time.sleep(1.0)
            counted = server.stat().housekeeping_count - before
            rates.append(counted / (time.monotonic() - start))
        assert min(rates) < IDLE_ROUNDS_MAX_S, rates


def test_clients_may_wake_the_server_with_any_umask(pool: Pool) -> None:
    before = os.umask(0o077)
    try:
        with Server(pool), Client(pool) as client:
            client.ping()
            (word,) = pool.runtime_dir.glob("asleep-*")
            (bell,) = pool.runtime_dir.glob("bell-*")
            # only the server writes this line
            assert stat.filemode(word.stat().st_mode) == "-rw-r-----"
            assert stat.filemode(bell.stat().st_mode) == "prw-rw----"
    finally:
        os.umask(before)
    assert not [*pool.runtime_dir.glob("asleep-*"), *pool.runtime_dir.glob("bell-*")]


def test_a_server_without_a_wakeup_replies_at_its_next_poll(pool: Pool) -> None:
    with Server(pool), Client(pool) as client:
        for name in ("asleep-*", "bell-*"):
            for path in pool.runtime_dir.glob(name):
                path.unlink()
        time.sleep(0.3)
        client.ping()
        with Client(pool) as another:  # there is no word file
            time.sleep(0.3)
            another.ping()
