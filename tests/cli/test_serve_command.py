# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``beluga serve`` and ``stop``, and what a server reports to its service manager."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import stuck_server
from support.blocks import eventually
from support.emulation import long

from beluga.cli import serve
from beluga.errors import CallTimeoutError, DeposedError
from beluga.index import IndexServer
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client
from tests.exporter.scraped import scrape, status_of

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
Server = "subprocess.Popen[str]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_stops_cleanly(
    run: Run, start: Start, pool: list[str], server: subprocess.Popen[str], number: signal.Signals
) -> None:
    server.send_signal(number)
    assert server.wait(timeout=20) == 0
    successor = start("serve", *pool)
    assert successor.stderr
    assert successor.stderr.readline().startswith("serving, epoch 2")


def test_stat_counts_blocks(run: Run, pool: list[str], server: Server) -> None:
    run("put", "key", "-", *pool, stdin="some bytes")
    counters = json.loads(run("stat", *pool, "--json").stdout)
    assert (counters["block_count"], counters["commit_count"]) == (1, 1)


def test_stat_shows_the_tiers_below_a_running_server(
    start: Start, run: Run, pool: list[str], tmp_path: Path
) -> None:
    def lower() -> dict[str, Any]:
        shown = json.loads(run("stat", *pool, "--json").stdout)
        return shown["lower_tiers"]

    name = f"disk:{tmp_path}/disk"
    below = ["--disk", f"{tmp_path}/disk", "--disk-bytes", "16M", "--admission", "always"]
    server = start("serve", *pool, *below)
    assert server.stderr
    assert server.stderr.readline().startswith("serving")
    run("put", "key", "-", *pool, stdin="some bytes")
    assert eventually(lambda: lower()["tiers"].get(name, {}).get("blocks") == 1)
    shown = lower()
    tier = shown["tiers"][name]
    assert (tier["saved_blocks"], tier["saved_bytes"]) == (1, len("some bytes"))
    assert tier["breaker_state"] == "closed"
    assert tier["written_bytes"] >= 2 * 4096
    assert tier["written_per_hit_byte"] is None
    assert shown["work"]["dirty_count"] == 0
    text = run("stat", *pool).stdout
    assert "1 blocks, " in text and "1 saved, 0 loaded, " in text
    assert "0 blocks wait to be offered, 0 are being fetched" in text


@pytest.mark.parametrize("folder", ["disk", "."])
def test_a_disk_that_is_too_large_is_refused_before_the_pool_is_served(
    run: Run, pool: list[str], tmp_path: Path, folder: str
) -> None:
    ended = run("serve", *pool, "--disk", tmp_path / folder, "--disk-bytes", "900T")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "bytes free, but" in ended.stderr
    assert not list(tmp_path.rglob("blocks"))
    assert "no server" in run("ping", *pool, "--timeout", "1").stderr


def test_cxl_rpc_serves_calls_without_the_index(start: Start, pool: list[str]) -> None:
    server = start("serve", *pool, entry="cxl_rpc")
    assert server.stderr
    assert server.stderr.readline().startswith("serving")
    assert (
        start("call", "64", "hello", *pool, entry="cxl_rpc").communicate(timeout=60)[0] == "hello\n"
    )
    wrong = start("call", "200", *pool, entry="cxl_rpc")
    assert "the server has no handler for this method" in wrong.communicate(timeout=60)[1]
    assert wrong.returncode == 1


def test_serve_bounds_sessions(start: Start, run: Run, pool: list[str]) -> None:
    server = start("serve", *pool, "--quota-bytes", "4", "--quota-calls", "1000")
    assert server.stderr
    assert server.stderr.readline().startswith("serving")
    assert run("put", "small", "-", *pool, stdin="four").returncode == 0
    refused = run("put", "large", "-", *pool, stdin="a block of more bytes")
    assert refused.returncode == 1
    assert "quota" in refused.stderr


@pytest.mark.parametrize("watch", [False, True])
def test_a_deposed_server_stands_by_again_only_with_watch(
    pool: list[str],
    watch: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = []

    def serve_until_stopped(server: IndexServer, **_: object) -> None:
        served.append(server)
        if len(served) == 1:
            raise DeposedError("another server has taken over")

    monkeypatch.setattr(serve, "serve_until_stopped", serve_until_stopped)
    endpoint = serve.admin_endpoint()
    if watch:
        serve.serve(pool=pool[1::2], standby=True, watch=True, endpoint=endpoint)
        assert len(served) == 2 and served[0] is not served[1]
        assert "taken over; standing by again" in capsys.readouterr().err
    else:
        with pytest.raises(DeposedError):
            serve.serve(pool=pool[1::2], endpoint=endpoint)
        assert len(served) == 1


def test_metrics_are_served_from_standby_to_stop(
    start: Start, pool: list[str], server: subprocess.Popen[str]
) -> None:
    standby = start("serve", *pool, "--standby", "--admin", "0")
    assert standby.stderr
    output = standby.stderr.readline()
    assert output.startswith("page at http://127.0.0.1:")
    url = output.split()[-1]
    assert scrape(url).value("beluga_server_serving") == 0
    server.kill()
    assert eventually(lambda: scrape(url).value("beluga_server_serving") == 1)
    assert scrape(url).value("beluga_server_epoch") == 2
    standby.send_signal(signal.SIGTERM)
    assert standby.wait(timeout=20) == 0


def test_a_standby_is_alive_and_not_ready(
    start: Start, pool: list[str], server: subprocess.Popen[str]
) -> None:
    standby = start("serve", *pool, "--standby", "--admin", "0")
    assert standby.stderr
    url = standby.stderr.readline().split()[2].rstrip(",")
    served = f"standing by for process {server.pid}, which serves ('kill {server.pid}' ends it);"
    assert standby.stderr.readline().startswith(served)
    assert eventually(lambda: status_of(f"{url}healthz") == 200)
    assert status_of(f"{url}readyz") == 503
    server.kill()
    assert eventually(lambda: status_of(f"{url}readyz") == 200)
    assert status_of(f"{url}healthz") == 200


def test_a_port_in_use_is_a_one_line_error_before_the_pool_is_served(
    run: Run, pool: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("serve", *pool, "--admin", str(port))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.count("\n") == 1
    assert f"127.0.0.1 port {port} (Address already in use)" in refused.stderr
    assert "--admin" in refused.stderr


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_service_that_cannot_start_ends_the_server_before_it_reports_that_it_serves(
    run: Run, pool: list[str], detach: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        events = ["--events", endpoint, "--events-replay", "tcp://127.0.0.1:0"]
        refused = run("serve", *pool, *events, *detach)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.count("\n") == 1
    assert f"no events can be published at {endpoint}: Address already in use" in refused.stderr
    assert run("serve", *pool, *events, "--detach").returncode == 0  # nothing is left behind
    assert run("stop", *pool).returncode == 0


def test_a_server_in_the_background_serves_when_the_command_returns(
    run: Run, pool: list[str]
) -> None:
    started = json.loads(run("serve", *pool, "--detach", "--json").stdout)
    try:
        assert started["status"] == "serving, epoch 1"
        assert run("ping", *pool).returncode == 0
        second = run("serve", *pool, "--detach")
        assert (second.returncode, second.stderr.count("\n")) == (1, 1)
        assert "beluga stop" in second.stderr
        assert "serving, epoch 1" in Path(started["log"]).read_text()
    finally:
        stopped = run("stop", *pool, "--json")
    assert json.loads(stopped.stdout) == {"stopped": started["pid"]}
    assert "no server answers" in run("ping", *pool).stderr
    assert "no server was started here" in run("stop", *pool).stderr


def test_a_background_standby_takes_over_and_both_servers_can_be_stopped(
    run: Run, pool: list[str]
) -> None:
    first = json.loads(run("serve", *pool, "--detach", "--json").stdout)
    try:
        shown = run("serve", *pool, "--standby", "--detach", "--json")
        assert shown.returncode == 0, shown.stderr
        second = json.loads(shown.stdout)
        assert second["status"].startswith("standing by")
        third = run("serve", *pool, "--standby", "--detach")
        assert (third.returncode, third.stderr.count("\n")) == (1, 1)
        of_both = f"(process {first['pid']}, process {second['pid']}); give 'beluga stop --pool "
        assert of_both in third.stderr
        beside = run("serve", *pool, "--detach").stderr
        assert f"in the background (process {first['pid']}, process" in beside
        os.kill(first["pid"], signal.SIGKILL)
        log = Path(second["log"])
        assert eventually(lambda: "epoch 2" in log.read_text())
        again = json.loads(run("serve", *pool, "--standby", "--detach", "--json").stdout)
        assert again["log"] == first["log"]
    finally:
        stopped = run("stop", *pool, "--json")
    assert json.loads(stopped.stdout) == {"stopped": second["pid"], "standby": again["pid"]}
    assert "epoch 3" not in Path(again["log"]).read_text()
    assert "no server was started here" in run("stop", *pool).stderr


def test_a_server_that_cannot_start_in_the_background_reports_the_reason(
    run: Run, pool: list[str]
) -> None:
    refused = run("serve", *pool, "--detach", "--eviction", "none-such")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert run("stop", *pool).returncode == 1
    refused = run("serve", *pool, "--detach", "--disk", "/dev/null/none", "--disk-bytes", "16M")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "/dev/null/none" in refused.stderr


def test_ping_of_a_killed_server_advises_another_command(
    run: Run, pool: list[str], server: Server
) -> None:
    server.kill()
    server.wait(timeout=60)
    ended = run("ping", *pool, "--timeout", "0.5")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "beluga ping" not in ended.stderr
    assert "'beluga serve'" in ended.stderr
    assert eventually(lambda: "was killed" in run("trace", *pool).stderr)


def test_only_the_server_started_in_the_background_is_stopped(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, pool: list[str]
) -> None:
    """The pid of a killed server may belong to another process now. The starting server is stopped
    meanwhile, too.
    """
    monkeypatch.setenv("BELUGA_CRASH", "elect.written:stop")
    start, run = request.getfixturevalue("start"), request.getfixturevalue("run")
    with Pool.open(pool[1::2]) as opened:
        lock = opened.runtime_dir / "serve.pid"
    with subprocess.Popen(["/bin/sleep", "600"]) as other:
        try:
            lock.write_text(f"{other.pid}\n")
            start("serve", *pool, "--detach")
            assert eventually(lambda: lock.read_text() not in ("", f"{other.pid}\n"))
            pid = int(lock.read_text())
            assert eventually(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
            assert json.loads(run("stop", *pool, "--json").stdout) == {"stopped": pid}
            assert other.poll() is None
        finally:
            other.kill()


def replaced(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"no pool " * 1024)


SPOILT: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "cut short": lambda path: os.truncate(path, 0),
    "another's": replaced,
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("root", [None, long("given")])
def test_a_server_whose_device_cannot_be_opened_is_stopped(
    request: pytest.FixtureRequest, pool: list[str], how: str, root: str | None
) -> None:
    if root is not None:
        directory = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").setenv("BELUGA_RUNTIME_DIR", str(directory))
    run: Run = request.getfixturevalue("run")
    pid = json.loads(run("serve", *pool, "--detach", "--json").stdout)["pid"]
    try:
        os.kill(pid, signal.SIGSTOP)  # a running process would end without a signal
        SPOILT[how](Path(pool[1]))
        assert run("ping", *pool).returncode == 2
        stopped = run("stop", *pool, "--json")
        assert stopped.returncode == 0, stopped.stderr
        assert json.loads(stopped.stdout) == {"stopped": pid}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    again = run("stop", *pool)  # nothing runs: the device's error
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert pool[1] in again.stderr


def test_a_lock_acquired_during_a_stop_is_not_released(run: Run, pool: list[str]) -> None:
    """One operator may start a server while the command `stop` of another is still waiting."""
    started = json.loads(run("serve", *pool, "--detach", "--json").stdout)
    with Path(started["log"]).with_name("serve.pid").open("rb") as lock:
        assert run("stop", *pool).returncode == 0
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused = run("serve", *pool, "--detach")
    run("stop", *pool)
    assert refused.returncode == 1


def test_each_program_names_its_own_server(start: Start, run: Run, pool: list[str]) -> None:
    output = start("ping", *pool, entry="cxl_rpc").communicate(timeout=60)[1]
    assert "start one with 'cxl-rpc serve'" in output
    assert "start one with 'beluga serve'" in run("ping", *pool).stderr


WAIT_S = 60.0


class NotifySocket:
    """The datagrams that reach a socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def next(self, timeout_s: float = WAIT_S) -> str:
        """Return the next one; "" if none comes in time."""
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return ""

    def until(self, words: str) -> list[str]:
        """Return the datagrams up to the one that has these words."""
        end, datagrams = time.monotonic() + WAIT_S, [""]
        while words not in datagrams[-1]:
            assert time.monotonic() < end, f"{words} is not among {datagrams}"
            datagrams.append(self.next(1.0))
        return datagrams

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[NotifySocket]:
    notified = NotifySocket(tmp_path / "notify")
    yield notified
    notified.close()


@pytest.fixture
def launch(pool: list[str], notified: NotifySocket, tmp_path: Path) -> Iterator[Start]:
    """Start ``beluga serve`` on the pool, or a program of the tests, as a manager would."""
    launched = []

    def launch(*options: str, program: str = "", **watchdog: str) -> subprocess.Popen[str]:
        serve = ["-c", "from beluga.cli.main import main; main()", "serve", *pool, *options]
        words = [program, *pool[1::2]] if program else serve
        child = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | watchdog | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
            text=True,
        )
        launched.append(child)
        return child

    yield launch
    for child in launched:
        child.kill()
        child.wait(timeout=WAIT_S)


def test_a_server_notifies_its_manager_of_ready_alive_and_stopping(
    launch: Start, notified: NotifySocket
) -> None:
    server = launch(WATCHDOG_USEC="200000")
    assert notified.next() == f"READY=1\nMAINPID={server.pid}\nSTATUS=serving, epoch 1"
    assert [notified.next() for _ in range(3)] == ["WATCHDOG=1"] * 3
    server.send_signal(signal.SIGTERM)
    assert set(notified.until("STOPPING=1")[1:-1]) <= {"WATCHDOG=1"}
    assert server.wait(timeout=WAIT_S) == 0


def test_a_standby_is_ready_after_its_first_check_of_the_server(
    launch: Start, server: subprocess.Popen[str], notified: NotifySocket
) -> None:
    standby = launch("--standby", WATCHDOG_USEC="1000000")
    assert notified.next() == f"READY=1\nMAINPID={standby.pid}\nSTATUS=standing by"
    assert [notified.next() for _ in range(2)] == ["WATCHDOG=1"] * 2
    server.kill()
    ready = f"READY=1\nMAINPID={standby.pid}\nSTATUS=serving, epoch 2"
    assert notified.until("READY=1")[-1] == ready
    standby.send_signal(signal.SIGTERM)
    assert notified.until("STOPPING=1")


def test_a_standby_that_finds_no_server_is_ready_when_it_serves(
    launch: Start, notified: NotifySocket
) -> None:
    launch("--standby", "--watch")
    assert notified.next().endswith("STATUS=serving, epoch 1")


def test_a_watchdog_for_another_process_is_not_notified(
    launch: Start, notified: NotifySocket
) -> None:
    server = launch(WATCHDOG_USEC="50000", WATCHDOG_PID="1")
    assert notified.next().startswith("READY=1")
    assert notified.next(1.0) == ""
    server.send_signal(signal.SIGTERM)
    assert notified.next().startswith("STOPPING=1")


def test_a_server_with_a_hanging_poll_loop_is_not_reported_alive(
    launch: Start, pool: list[str], notified: NotifySocket, tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    stuck.touch()
    launch(program=stuck_server.__file__, WATCHDOG_USEC="100000")
    try:
        notified.until("WATCHDOG=1")
        with Pool.open(pool[1::2]) as opened, Client(opened, timeout_s=WAIT_S) as client:
            with pytest.raises(CallTimeoutError):
                client.call(METHOD_USER, str(stuck).encode(), timeout_s=0.3)
            for _ in range(20):  # earlier messages
                notified.next(0.1)
            assert notified.next(1.0) == "", "its main thread does not hang"
            stuck.unlink()
            assert notified.next() == "WATCHDOG=1"
    finally:
        stuck.unlink(missing_ok=True)
