# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that fork, die, stop and run out of descriptors: sessions end with their processes."""

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from support import roles
from support.blocks import eventually
from support.role import Process, lines, reply

from beluga.errors import BelugaError, LobbyBusyError
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server

# ---- A pidfd proves that a session's process has ended, even if another one holds its lock
# file.


# A client whose child was forked without any hook: it holds a copy of the lock file's descriptor
# and survives the client.
def keep_the_lock(paths: list[str]) -> None:
    reply("ready")
    with Pool.open(paths) as pool, Client(pool):
        child = ctypes.CDLL(None).fork()
        if child == 0:
            time.sleep(600)
        reply(child)
        time.sleep(600)


@pytest.fixture
def coherence() -> str:
    return "hardware"


@pytest.fixture
def kernel_with_pidfds() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        pytest.skip(f"this kernel gives no pidfd: {error}")


def new_pid_namespace() -> list[str]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a pid namespace takes root and unshare")
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --pid is not allowed here")
    return command


@pytest.mark.usefixtures("kernel_with_pidfds")
def test_a_killed_process_is_dead_although_its_child_holds_the_lock(
    pool: Pool, paths: list[Path]
) -> None:
    with Server(pool) as server:
        client = Process(keep_the_lock, paths)
        child = int(client.receive())
        try:
            assert (server.stat().live_count, server.stat().watched_count) == (1, 1)
            client.kill()
            assert eventually(lambda: server.stat().live_count == 0)
            assert server.stat().watched_count == 0
            os.kill(child, 0)  # the process lives, and the lock is held
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("kernel_with_pidfds")
def test_a_detached_session_is_no_longer_watched(pool: Pool) -> None:
    with Server(pool) as server:
        for _ in range(5):
            with Client(pool), Client(pool):
                assert server.stat().watched_count == 2
            assert server.stat().watched_count == 0


@pytest.mark.usefixtures("kernel_with_pidfds")
def test_a_process_of_another_pid_namespace_is_watched(pool: Pool, paths: list[Path]) -> None:
    before = new_pid_namespace()
    with Server(pool) as server, Process(keep_the_lock, paths, prefix=before) as client:
        # a pid in its own namespace; here it is that of another process
        assert int(client.receive()) < 20
        assert server.stat().watched_count == 1
        client.kill()
        assert eventually(lambda: server.stat().live_count == 0)


@pytest.mark.usefixtures("kernel_with_pidfds")
def test_a_server_of_another_pid_namespace_watches(pool: Pool, paths: list[Path]) -> None:
    with (
        Process(roles.serve, paths, prefix=new_pid_namespace()) as server,
        Process(roles.call, paths) as client,
    ):

        def counts() -> list[str]:
            return re.findall(r"(?:live|watched)_count=(\d+)", server.request("stat"))

        assert counts() == ["1", "1"]
        client.kill()
        assert eventually(lambda: counts() == ["0", "0"])


@pytest.mark.usefixtures("kernel_with_pidfds")
def test_a_stopped_process_that_attaches_delays_others_only_briefly(
    pool: Pool, paths: list[Path]
) -> None:
    crash = {"BELUGA_CRASH": "request.locked:stop"}
    with Server(pool), Process(keep_the_lock, paths, environment=crash) as client:
        assert client.stopped()
        with pytest.raises(LobbyBusyError, match="attaching and does not finish"):
            Client(pool, timeout_s=0.3)
        client.signal(signal.SIGCONT)
        child = int(client.receive())
        with Client(pool) as other:
            other.ping()
        client.kill()
        os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("kernel_with_pidfds")
@pytest.mark.parametrize(
    "point", ["request.out", "request.answered", "attach.liveness_held", "request.shown"]
)
def test_a_process_that_dies_while_it_attaches_leaves_no_lane_behind(
    pool: Pool, paths: list[Path], point: str
) -> None:
    with Server(pool) as server:
        for _ in range(2):
            client = Process(keep_the_lock, paths, environment={"BELUGA_CRASH": point})
            assert client.died() == -signal.SIGKILL
        assert eventually(lambda: server.stat().live_count == 0)
        with Client(pool) as other:
            other.ping()
            assert eventually(lambda: server.stat().watched_count == 1)


@pytest.mark.usefixtures("kernel_with_pidfds")
def test_the_lane_of_a_dead_requester_is_released_after_a_stop(
    pool: Pool, paths: list[Path]
) -> None:
    with Process(roles.serve, paths) as server:
        server.signal(signal.SIGSTOP)
        client = Process(keep_the_lock, paths)
        time.sleep(1.0)  # a request is sent; if that is slower, the test covers less
        client.kill()
        server.signal(signal.SIGCONT)
        assert eventually(lambda: "live_count=0" in server.request("stat"))
        with Client(pool) as other:
            other.ping()


# ---- Processes that run out of file descriptors continue to serve, and later catch up.


class Shortage:
    """The descriptors that a process lacks: commands "starve N", which leaves N, and "feed"."""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def lines(self) -> Iterator[str]:
        """Yield the test's lines, after their effect; replies to these two are the caller's."""
        for line in lines():
            word, _, number = line.partition(" ")
            if word == "starve":
                self._starve(int(number))
            elif word == "feed":
                self._feed()
            yield word

    def _starve(self, left: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit))
        try:
            while True:
                self._taken.append(os.dup(0))
        except OSError:
            for _ in range(left):
                os.close(self._taken.pop())

    def _feed(self) -> None:
        while self._taken:
            os.close(self._taken.pop())


def attempt(call_short: Callable[[], object]) -> None:
    try:
        call_short()
        reply("done")
    except (BelugaError, OSError) as error:
        reply(f"{type(error).__name__} {error}")


def serve_short(paths: list[str]) -> None:
    """Replies with its sessions, the inherited and the watched ones, and its CPU time in ms."""
    server = Server(Pool.open(paths))
    for word in Shortage().lines():
        if word == "start":
            attempt(server.start)
        else:
            stat = server.stat()
            used = int(1000 * time.process_time())
            reply(f"{stat.live_count} {stat.inherited_count} {stat.watched_count} {used}")


def call_short(paths: list[str]) -> None:
    pool, clients = Pool.open(paths), list[Client]()
    for word in Shortage().lines():
        if word == "attach":
            attempt(lambda: clients.append(Client(pool, timeout_s=5)))
        elif word == "ping":
            attempt(lambda: clients[-1].ping(timeout_s=5))
        else:
            reply("done")


def counts(server: Process, command: str = "stat") -> list[int]:
    return [int(number) for number in server.request(command).split()]


@pytest.fixture
def server(pool: Pool, paths: list[Path]) -> Iterator[Process]:
    """A server that is not started yet."""
    with Process(serve_short, paths) as process:
        yield process


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_server_without_descriptors_serves_and_detects_deaths_later(
    pool: Pool, paths: list[Path], server: Process, left: int
) -> None:
    assert server.request("start") == "done"
    server.request(f"starve {left}")
    with Client(pool) as client, Process(roles.call, paths) as other:
        assert counts(server)[0] == 2
        client.ping()
        other.kill()
        server.request("feed")
        assert eventually(lambda: counts(server)[0] == 1)
        client.ping()
        assert eventually(lambda: counts(server)[2] == 1)


def test_the_server_does_not_spin_on_clients_that_it_cannot_accept(
    pool: Pool, server: Process
) -> None:
    assert server.request("start") == "done"
    used = counts(server, "starve 0")[3]
    with Client(pool) as client:
        for _ in range(200):
            client.ping()
        assert counts(server)[3] - used < 5000  # the server responds again


def test_a_death_is_detected_while_others_wait_to_be_accepted(
    pool: Pool, paths: list[Path], server: Process
) -> None:
    assert server.request("start") == "done"
    with Process(roles.call, paths) as attached:
        assert counts(server)[2] == 1
        server.request("starve 0")
        with Client(pool):
            attached.kill()
            assert eventually(lambda: counts(server)[0] == 1)
            # Two descriptors are free now. If the other process's lock file takes one, its
            # connection takes the last, and none is left for its pidfd.
            server.request("feed")
            assert eventually(lambda: counts(server)[2] == 1)


@pytest.mark.parametrize("left", range(6))
def test_a_server_without_descriptors_raises_and_leaves_the_pool_unchanged(
    pool: Pool, server: Process, left: int
) -> None:
    server.request("starve 0")  # the reply has its counters, which are still 0
    server.request("feed")
    server.request(f"starve {left}")
    assert "Too many open files" in server.request("start")
    with Server(pool) as rightful:  # no epoch was taken
        assert rightful.stat().epoch == 1


def test_a_successor_detects_deaths_that_it_could_not_check_at_once(
    pool: Pool, paths: list[Path], server: Process
) -> None:
    with Process(roles.serve, paths) as first:
        clients = [Process(roles.call, paths) for _ in range(3)]
        first.kill()
        for client in clients:
            client.kill()
    server.request("starve 6")  # two descriptors are left for three sessions
    assert server.request("start") == "done"
    assert eventually(lambda: counts(server)[1] == 0)


def test_attach_fails_without_descriptors_and_succeeds_later(pool: Pool, paths: list[Path]) -> None:
    with Server(pool) as server:
        with Process(call_short, paths) as client:
            client.request("starve 0")
            assert "Too many open files" in client.request("attach")
            client.request("feed")
            client.request("starve 1")
            assert "Too many open files" in client.request("attach")
            assert server.stat().live_count == 0
            client.request("feed")
            assert client.request("attach") == "done"
            assert client.request("ping") == "done"
        assert eventually(lambda: server.stat().live_count == 0)


def test_a_standby_checks_again_without_more_descriptors(pool: Pool, paths: list[Path]) -> None:
    server = Process(roles.serve, paths)
    standby = Server(pool)
    counts = []
    for _ in range(2):
        assert not standby.watch(0.1, silent_s=60.0)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[0] == counts[1]
    standby.stop()
    server.kill()


# ---- A fork while another thread attaches: the child neither keeps the session alive nor ends
# it.


# This process forks once its session has a liveness lock that the server has not recorded yet. The
# child prints its descriptors of the lock, and ends on command; then the parent makes a call.
ATTACHES = """
import os, sys, threading
from beluga import Client, Pool
from beluga.errors import ForkedSessionError
reader, pool = int(sys.argv[1]), Pool.open(sys.argv[2:])
known = set(os.listdir(pool.runtime_dir))
made = []
thread = threading.Thread(target=lambda: made.append(Client(pool, timeout_s=60)))
thread.start()
while not any(name.startswith("alive-") for name in set(os.listdir(pool.runtime_dir)) - known):
    thread.join(0.001)
child = os.fork()
if child == 0:
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{fd}")]
    held = [link for link in links if os.path.basename(link).startswith(("alive-", "new-"))]
    try:
        with pool.using():
            held.append("the pool")
    except ForkedSessionError:
        pass
    print("child", held, flush=True)
    os.read(reader, 1)
    sys.exit(0)  # with a normal exit of the interpreter
sys.stdin.readline()  # the server continues
thread.join()
print("attached", made[0].stat().reattach_count, flush=True)
_, status = os.waitpid(child, 0)
print("status", status, flush=True)
made[0].ping()
print("lives", made[0].stat().reattach_count, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    return [shm / "a"]


@contextmanager
def held_still(pool: Pool) -> Iterator[threading.Event]:
    """Let the pool's server answer no client until the event is set."""
    go, busy = threading.Event(), threading.Event()

    def handler(_: bytes) -> bytes:
        busy.set()
        go.wait(60)
        return b""

    server = Server(pool)
    server.handle(METHOD_USER, handler)
    with server, Client(pool, timeout_s=60) as client:
        caller = threading.Thread(target=client.call, args=(METHOD_USER,))
        caller.start()
        try:
            assert busy.wait(60)
            yield go
        finally:
            go.set()
            caller.join()


@contextmanager
def attaching(paths: list[Path]) -> Iterator[tuple[subprocess.Popen[str], BinaryIO]]:
    """Yield a process that attaches, and an object whose close() ends its child."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ATTACHES, str(reader), *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        pass_fds=[reader],
    )
    os.close(reader)
    try:
        with os.fdopen(writer, "wb") as ending:
            yield process, ending
    finally:
        process.kill()
        process.wait()


def receive(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def liveness_locks(pool: Pool) -> list[str]:
    """Return the liveness locks of sessions; the test's server and its client have one each."""
    return [path.name for path in pool.runtime_dir.glob("alive-*")]


def eventually_locks(pool: Pool, count: int) -> bool:
    deadline = time.monotonic() + 60
    while len(liveness_locks(pool)) != count and time.monotonic() < deadline:
        time.sleep(0.002)
    return len(liveness_locks(pool)) == count


@contextmanager
def attached(
    pool: Pool, paths: list[Path]
) -> Iterator[tuple[subprocess.Popen[str], BinaryIO, int]]:
    """Yield a process that has forked a child and then attached, an object whose close() ends the
    child, and the number of liveness locks before.
    """
    with held_still(pool) as go:
        before = len(liveness_locks(pool))
        with attaching(paths) as (process, ending):
            assert receive(process) == "child []"
            go.set()
            send(process)
            assert receive(process) == "attached 0"
            yield process, ending, before


def test_a_child_forked_during_attach_does_not_own_the_session(
    pool: Pool, paths: list[Path]
) -> None:
    with attached(pool, paths) as (process, ending, before):
        assert len(liveness_locks(pool)) == before + 1
        ending.close()
        assert receive(process) == "status 0"
        assert receive(process) == "lives 0"
        assert len(liveness_locks(pool)) == before + 1


def test_a_session_ends_with_its_process_although_a_child_survives(
    pool: Pool, paths: list[Path]
) -> None:
    with attached(pool, paths) as (process, ending, before):
        process.kill()
        process.wait()
        assert eventually_locks(pool, before)
        ending.write(b"x")  # writing to a pipe without a reader fails
        ending.flush()
