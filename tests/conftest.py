# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fixtures for tests of several folders: directories in memory, commands run as a user runs
them.
"""

import collections
import gc
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from support import forked
from support.emulation import PATIENCE, lighten

from beluga import IndexServer, Pool
from beluga.errors import EngineUnavailableError

ROOT = Path(__file__).resolve().parent.parent

# A shell starts what it puts in the background with Ctrl-C ignored, nohup ignores SIGHUP, and
# children inherit that, but no handlers: the tested commands must get both signals nevertheless.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP, signal.SIGTERM))

# No beluga.toml of this user or machine applies; cli/test_settings.py has files of its own.
os.environ["BELUGA_CONFIG"] = os.devnull

lighten()


def pytest_configure(config: pytest.Config) -> None:
    """Start collection in each process of a run at another folder, so that in a fresh checkout the
    processes do not all compile the same modules.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    places = sorted(path for path in Path(__file__).parent.iterdir() if _is_collected(path))
    first = int(worker["workerid"][2:]) * len(places) // worker["workercount"]
    config.args[:] = map(str, places[first:] + places[:first])


def _is_collected(path: Path) -> bool:
    return path.match("test_*.py") or (path.is_dir() and any(path.rglob("test_*.py")))


_LONGEST = ("repo/test_shown.py", "sim/", "cli/", "replay/", "crash/", "bench/", "transfer/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move slow files to the front, so that no process still has one to run when the others end."""

    def place(item: pytest.Item) -> tuple[int, str]:
        name = item.nodeid.removeprefix("tests/")
        fits = [number for number, long in enumerate(_LONGEST) if name.startswith(long)]
        return fits[0] if fits else len(_LONGEST), name.partition("::")[0]

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the tests from garbage collections, which would traverse all of them and copy their
    pages in each forked child.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Report a run as failed if it was cut off after a test had failed.

    ``scripts/check`` counts a run that was merely cut off as no failure.
    """
    if exitstatus == pytest.ExitCode.INTERRUPTED and session.testsfailed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of skipped tests for each reason, on one line."""
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        each = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {each}")


ROOM = 512 << 20  # more than the pools of any single test need


@pytest.fixture(scope="session")
def memory_root() -> Path:
    """Return /dev/shm, or the directory of temporary files if a container's /dev/shm is too small
    for tests. A sparse file that outgrows its filesystem would be a SIGBUS.
    """
    shm = Path("/dev/shm")
    return shm if shutil.disk_usage(shm).free >= ROOM else Path(tempfile.gettempdir())


@pytest.fixture
def shm(memory_root: Path) -> Iterator[Path]:
    """A directory in memory that other users may enter."""
    path = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    """The devices of a pool."""
    return [shm / "a", shm / "b"]


@pytest.fixture
def server(pool: Pool) -> Iterator[IndexServer]:
    """A server of the pool that a folder or a module has."""
    with IndexServer(pool) as server:
        yield server


@pytest.fixture(scope="session")
def compiled() -> None:
    """The kernels can be compiled for this CPU, or the test is skipped."""
    from beluga_bench.gpu.stub import library

    try:
        library()
    except EngineUnavailableError as error:
        pytest.skip(str(error))


Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def start(shm: Path, tmp_path: Path) -> Iterator[Start]:
    """Start ``beluga ARGUMENTS...`` with its own home directory; processes that still run at the
    end are killed.

    It requires ``shm`` for the order: a server ends before the folder of its pool is removed.
    """
    started: list[subprocess.Popen[str]] = []
    environment = {key: value for key, value in os.environ.items() if key != "BELUGA_POOL"}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "200"}

    def start(*arguments: object, entry: str = "main", cwd: Path = ROOT) -> subprocess.Popen[str]:
        code = f"from beluga.cli.main import {entry}; {entry}()"
        child = forked.Fork(forked.server(), code, [*map(str, arguments)], environment, cwd=cwd)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def run(start: Start) -> Run:
    """Run ``beluga ARGUMENTS...`` to its end: returncode, stdout, stderr."""

    def run(
        *arguments: object, stdin: str = "", entry: str = "main", cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        child = start(*arguments, entry=entry, cwd=cwd)
        stdout, stderr = child.communicate(stdin, timeout=120 * PATIENCE)
        assert not re.search(r"^\S.*:\d+: (?!Resource)\w+Warning: ", stderr, re.MULTILINE), stderr
        return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)

    return run
