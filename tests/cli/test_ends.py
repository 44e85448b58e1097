# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How commands begin and end: outputs are checked first, and nothing is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from support.commands import captured
from support.emulation import PATIENCE, long
from support.leftovers import SHM

from beluga import child
from beluga.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60 * PATIENCE  # each takes less than 2 s on an idle machine
Launch = Callable[..., "Command"]


class Case(NamedTuple):
    """A command. ``POOL`` among its arguments stands for a pool with a server, ``IDLE`` for one
    without, ``QUEUE`` for a queue in the first, ``FILE`` for a new file. It has begun when its
    output has the text ``begun``. A signal is the usual end of one that ``serves``, with the
    status 0.
    """

    words: tuple[str, ...]
    begun: str
    serves: bool = False
    program: str = "main"


GATEWAY = ("gateway", "--worker", "http://127.0.0.1:9", "--port", "0", "--admin", "")
PEER = ("verify", "IDLE", "--peer", "--role", "a", "--timeout", "600")
CASES = {
    "serve": Case(("serve", "IDLE"), "serving, epoch 1", serves=True),
    "standby": Case(("serve", "POOL", "--standby"), "standing by", serves=True),
    "cxl-rpc-serve": Case(("serve", "IDLE"), "serving, epoch 1", serves=True, program="cxl_rpc"),
    "gateway": Case(GATEWAY, "is down", serves=True),
    "prefill-worker": Case(
        ("prefill-worker", "--engine", "http://127.0.0.1:9", "--queue", "QUEUE", "--name", "m"),
        "prefilling on",
        serves=True,
    ),
    "bench-report": Case(("bench", "report", "rpc", "--smoke", "--out", "PAGE"), ""),
    "dashboard": Case(("dashboard", "POOL"), "http://", serves=True),
    "bench": Case(("bench", "rpc", "--smoke"), "rpc c"),
    "cxl-rpc-bench": Case(("bench", "--smoke"), "rpc c", program="cxl_rpc"),
    "simulate": Case(("simulate", "--seeds", "1000", "--processes", "2"), "read "),
    "replay": Case(("replay", "--speed", "0.05"), "read "),
    "top": Case(("top", "POOL", "--interval", "0.1"), "serving, epoch 1"),
    "top-json": Case(("top", "POOL", "--json", "--interval", "0.1"), '"epoch":1'),
    "top-without-server": Case(("top", "IDLE", "--json"), "retrying"),
    "trace": Case(("trace", "POOL", "--follow"), ""),
    "verify": Case(PEER, "waiting"),
    "killloop": Case(("--rounds", "2000"), "seed", program="tests/crash/killloop.py"),
    "soak": Case(("--seconds", "600"), "", program="tests/sim/soak.py"),
    "demo-gpu": Case((), "", program="beluga_bench.gpu.demo"),
}


class Command:
    """A running command in a session of its own, as a shell starts it on a terminal. Like ``head``,
    ``first_line_only`` closes its output after the first line.
    """

    def __init__(
        self, words: list[str], environment: dict[str, str], *, first_line_only: bool
    ) -> None:
        self._first_line_only = first_line_only
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._grown = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            with self._grown:
                self._lines[name].append(line)
                self._grown.notify_all()
            if self._first_line_only and name == "out":
                stream.close()
                return

    def has(self, text: str) -> bool:
        """Wait until a line has this text. Returns False if the command ends before."""

        def seen() -> bool:
            return any(text in line for lines in self._lines.values() for line in lines)

        with self._grown:
            while not seen() and any(reader.is_alive() for reader in self._readers):
                self._grown.wait(0.1)
            return seen()

    def end(self) -> tuple[int, str]:
        """Wait for the end of the command, and return its status and stderr."""
        status = self.process.wait(timeout=LIMIT_S)
        for reader in self._readers:
            reader.join(LIMIT_S)
        return status, "".join(self._lines["err"])

    def count(self) -> int:
        """Return how many lines it has written to stderr."""
        return len(self._lines["err"])

    def running(self) -> list[str]:
        """Return the command lines of the processes of its session."""
        command_lines = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    command_lines.append(
                        (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:  # the process has ended
                continue
        return command_lines

    def kill(self) -> None:
        if self.running():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def idle(shm: Path) -> list[str]:
    """The options that name a pool without a server."""
    Pool.create([shm / "idle"], device_size=24 << 20).close()
    return ["--pool", str(shm / "idle")]


@pytest.fixture
def launch(tmp_path: Path, idle: list[str], request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Starts a case; what still runs at the end of the test is killed."""
    launched: list[Command] = []
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}

    def launch(case: Case, *more: str, first_line_only: bool = False) -> Command:
        words: list[str] = []
        for word in (*case.words, *more):
            if word == "POOL":
                request.getfixturevalue("server")
                words += request.getfixturevalue("pool")
            elif word == "QUEUE":
                request.getfixturevalue("server")
                words.append(":".join(["pool", *request.getfixturevalue("pool")[1::2]]))
            elif word == "PAGE":
                words.append(str(tmp_path / "page.html"))
            else:
                words += idle if word == "IDLE" else [word]
        if case.program.endswith(".py"):
            program = [sys.executable, case.program]
        elif "." in case.program:
            program = child.command(case.program)
        else:
            code = f"from beluga.cli.main import {case.program}; {case.program}()"
            program = [sys.executable, "-c", code]
        launched.append(Command([*program, *words], environment, first_line_only=first_line_only))
        return launched[-1]

    yield launch
    for command in launched:
        command.kill()


def left_by(command: Command) -> list[str]:
    """Return what the command has left: processes, and files in memory that have its pid."""
    until = time.monotonic() + LIMIT_S
    while (running := command.running()) and time.monotonic() < until:
        time.sleep(0.02)  # a helper of multiprocessing ends after its parent
    return [*running, *(path.name for path in SHM.glob(f"*-{command.process.pid}-*"))]


def cases(number: signal.Signals, *quick: str) -> list[object]:
    """The cases for a signal; a quick run has those that are named, or all."""
    return [
        pytest.param(name, number, id=f"{name}-{number.name}")
        if not quick or name in quick
        else pytest.param(name, number, id=f"{name}-{number.name}", marks=pytest.mark.long)
        for name in CASES
    ]


@pytest.mark.parametrize(
    ("name", "number"),
    [*cases(signal.SIGINT), *cases(signal.SIGTERM, "serve", "gateway", "replay", "soak")],
)
def test_a_signal_ends_the_command_and_nothing_is_left(
    launch: Launch, name: str, number: signal.Signals
) -> None:
    """Ctrl-C reaches every process of a terminal's group, SIGTERM only the command itself."""
    case = CASES[name]
    command = launch(case)
    if case.begun:
        assert command.has(case.begun)
    else:
        time.sleep(1)  # anywhere, also while it starts
    before = command.count()
    if number == signal.SIGINT:
        os.killpg(command.process.pid, number)
    else:
        command.process.send_signal(number)
    status, errors = command.end()
    starting = not case.begun and status == -number  # the interpreter had not started
    assert starting or status == (0 if case.serves else 128 + number)
    assert "Traceback" not in errors
    assert len(errors.splitlines()) - before <= 1
    assert left_by(command) == []


@pytest.mark.parametrize("name", ["top", "top-json"])
def test_a_closed_output_ends_the_command_without_a_message(launch: Launch, name: str) -> None:
    command = launch(CASES[name], first_line_only=True)
    assert command.end() == (1, "")
    assert left_by(command) == []


@pytest.mark.parametrize("name", ["stat", "ls"])
def test_a_closed_output_after_the_result_is_not_an_error(launch: Launch, name: str) -> None:
    command = launch(Case((name, "POOL"), ""), first_line_only=True)
    status, errors = command.end()
    assert status in (0, 1)  # 0: it had written everything before
    assert "Traceback" not in errors
    assert left_by(command) == []


def test_a_standby_serves_although_the_reader_of_its_events_has_ended(
    launch: Launch, server: subprocess.Popen[str]
) -> None:
    """It ended with status 1 at the moment at which it took over."""
    standby = launch(CASES["standby"], "--json", first_line_only=True)
    assert standby.has("standing by")
    server.send_signal(signal.SIGTERM)
    assert standby.has("took over, epoch 2")
    standby.process.send_signal(signal.SIGTERM)
    status, errors = standby.end()
    assert status == 0
    assert "events are only logged" in errors
    assert "Traceback" not in errors


Run = Callable[..., "subprocess.CompletedProcess[str]"]
# No command may start its work, which is replaced by a failure here.
BEGUN = """
import sys
import beluga.cli.simulate, beluga.cli.prefill_worker
def begun(*arguments, **options):
    sys.exit("it has begun")
beluga.cli.simulate.read_named = beluga.cli.simulate.run_all = begun
import beluga_bench
beluga_bench.BENCHES = {"rpc": begun}
beluga.cli.prefill_worker.asyncio.run = begun  # replaces asyncio.run in all modules
sys.modules["uvloop"] = None  # the gateway runs on asyncio without it
"""
SIMULATE = ["simulate", "nothing"]
BENCH = ["bench", "rpc"]
ROUTER = ["gateway", "--worker", "http://127.0.0.1:1"]
PREFILL = ["prefill-worker", "--engine", "http://127.0.0.1:1", "--queue", "pool", "--name", "a"]


def beluga(*arguments: str, without: str | None = None) -> subprocess.CompletedProcess[str]:
    lacks = f"sys.modules[{without!r}] = None\n" if without else ""
    code = BEGUN + lacks + "from beluga.cli.main import main; main()"
    return captured([sys.executable, "-c", code, *arguments], cwd=ROOT)


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        ([*ROUTER, "--kv-events", "http://127.0.0.1:1=tcp://127.0.0.1:2"], "zmq", "router"),
    ],
)
def test_missing_packages_are_reported_before_the_work(
    arguments: list[str], package: str, extra: str
) -> None:
    refused = beluga(*arguments, without=package)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"beluga: error: this command needs {package}; pip install 'beluga-kv[{extra}]'\n"
    )


@pytest.mark.parametrize("arguments", [long(SIMULATE), long(BENCH), ROUTER, long(PREFILL)])
def test_a_command_starts_if_its_packages_are_installed(arguments: list[str]) -> None:
    assert "it has begun" in beluga(*arguments).stderr


@pytest.mark.parametrize("closed", [long("<&-"), long(">&-"), long("2>&-"), "<&- >&- 2>&-"])
def test_closed_streams_cause_no_failure(pool: list[str], closed: str) -> None:
    """The next file that is opened must not get a stream's number, or it would be written to."""
    code = "from beluga.cli.main import main; main()"
    command = f'exec "$0" -c "$1" pool info --json {" ".join(pool)} {closed}'
    ended = captured(["/bin/sh", "-c", command, sys.executable, code], cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (
        subprocess.run(
            [sys.executable, "-c", code, "pool", "check", *pool],
            cwd=ROOT,
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
