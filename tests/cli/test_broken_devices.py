# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every command of both programs on a pool that it cannot use: it ends soon with one line that
names the device or the remedy, and an exit status other than 0. A command that needs the server
alone works although a device cannot be opened.

Commands run in forked children, which takes a tenth of a process's start.
"""

import ctypes
import gc
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.emulation import PATIENCE, share

import beluga.pool
from beluga import IndexServer, Pool
from beluga.cli import app, main
from beluga.pool import runtime

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SIZE = 16 << 20
LIMIT_S = 30 * PATIENCE

# What a command is given besides the pool. {file} is a file with a block.
ARGUMENTS = {
    "beluga put": ["key", "{file}"],
    "beluga get": ["key"],
    "beluga explain": ["key"],
    "beluga rm": ["key"],
    "beluga bench": ["rpc", "--smoke"],
    "beluga top": ["--once"],
    "beluga pool create": ["--size", "16M"],
    "beluga pool destroy": ["--yes"],
    "beluga quota": ["--set", "pins=4"],
    "cxl-rpc call": ["0"],
}
# These use no pool, or create their own memory.
WITHOUT = {
    f"beluga {name}"
    for name in ("umount", "config", "size", "simulate", "gateway", "prefill-worker", "replay")
} | {"beluga disk adopt"}
# These report what they find of a pool, on stdout or stderr, before the last line.
REPORTS = {"beluga doctor", "beluga pool check"}
# These create a pool themselves or work without one.
MAKES = {"beluga pool create", "beluga bench", "cxl-rpc bench", "beluga doctor"}
PROGRAMS = {"beluga": app.app, "cxl-rpc": app.cxl_rpc}


class Taken(NamedTuple):
    """How a command line names a pool: with --pool, or as arguments."""

    option: bool

    def words(self, paths: list[Path]) -> list[str]:
        return [word for path in paths for word in (["--pool"] * self.option + [str(path)])]


def commands() -> Iterator[tuple[str, Taken | None]]:
    for program, group in PROGRAMS.items():
        for words in group.leaves():
            command: Any = group.at(words)
            options = {option for param in command.params for option in param.opts}
            operands = {param.name for param in command.params} & {"paths"}
            name = " ".join([program, *words])
            yield name, Taken("--pool" in options) if "--pool" in options or operands else None


ALL = dict(commands())
WITH = {name: taken for name, taken in ALL.items() if taken is not None}


class Ended(NamedTuple):
    """How a command ended; the status is 255 after a traceback, and negative after a signal."""

    status: int
    stdout: str
    stderr: str


def ran(name: str, arguments: list[str], home: Path, *, without: tuple[int, ...] = ()) -> Ended:
    """Run a command in a forked child, without these capabilities."""
    program, *words = name.split()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (child := os.fork()) == 0:
            status = 255
            gc.freeze()  # a garbage collection would copy the pages of all of pytest's objects
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdin, sys.stdout, sys.stderr = (
                    os.fdopen(fd, mode) for fd, mode in enumerate("rww")
                )
                os.environ |= {"HOME": str(home), "XDG_STATE_HOME": str(home)}
                drop(without)
                signal.alarm(int(LIMIT_S))
                sys.argv = [program, *words, *arguments]
                {"beluga": main.main, "cxl-rpc": main.cxl_rpc}[program]()
            except SystemExit as error:
                if isinstance(error.code, str):
                    print(error.code, file=sys.stderr)
                status = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return Ended(status, out.read().decode(), err.read().decode())


def drop(capabilities: tuple[int, ...]) -> None:
    """Drop these capabilities, with which root bypasses permissions."""
    if os.geteuid() != 0 or not capabilities:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: two words of each
    assert libc.capget(header, sets) == 0
    for capability in capabilities:
        sets[0] &= ~(1 << capability)
        sets[1] &= ~(1 << capability)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What happens to one of the devices while no process uses the pool.
SPOILT: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
    "cut short": lambda path: os.truncate(path, SIZE // 2),
    "unreadable": lambda path: path.chmod(0),
    "a directory": directory,
    "a pipe": pipe,
    "a loop of links": loop,
    "of another program": lambda path: path.write_bytes(os.urandom(SIZE)),
}


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    paths = [shm / "a", shm / "b"]
    Pool.create(paths, device_size=SIZE, sparse=True).close()
    return paths


def given(name: str, folder: Path) -> list[str]:
    file = folder / "file"
    file.write_bytes(bytes(100))
    return [word.format(file=file) for word in ARGUMENTS.get(name, ())]


def refused(name: str, ended: Ended, *named: str) -> None:
    """Check that a command has ended with one line that has one of these words."""
    lines = ended.stderr.splitlines()
    assert ended.status in (1, 2), ended
    assert "Traceback" not in ended.stderr
    assert name in REPORTS or len(lines) == 1, ended
    output = ended.stdout + ended.stderr if name in REPORTS else ended.stderr
    assert any(word in output for word in named), ended


def test_each_command_is_tested_or_needs_no_pool() -> None:
    assert set(ALL) - set(WITH) == WITHOUT
    assert set(ARGUMENTS) | REPORTS | MAKES <= set(WITH)


@pytest.mark.parametrize(("number", "how"), list(enumerate(SPOILT)))
def test_a_damaged_device_is_a_one_line_error(
    paths: list[Path], tmp_path: Path, how: str, number: int
) -> None:
    index = number % 2
    inodes = {path: path.stat().st_ino for path in paths}
    SPOILT[how](paths[index])
    for name, taken in share(WITH.items(), number):
        if name == "beluga pool destroy" and how == "cut short":
            continue  # works: the remaining file is a device of the pool
        arguments = [*given(name, tmp_path), *taken.words(paths)]
        ended = ran(name, arguments, tmp_path, without=(DAC_OVERRIDE, DAC_READ_SEARCH))
        # Creating a pool may fail at the other device, which already has one.
        refused(name, ended, *map(str, paths if name == "beluga pool create" else [paths[index]]))
        whole = paths[1 - index]
        assert whole.stat().st_ino == inodes[whole], name


def test_a_missing_pool_is_a_one_line_error_that_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runtime, beluga.pool):  # this user may have mounted one
        monkeypatch.setattr(module, "emulated_paths", lambda: [str(tmp_path / "none")])
    for name in WITH:
        if name not in MAKES:
            ended = ran(name, given(name, tmp_path), tmp_path)
            refused(name, ended, "--pool PATH", "beluga mount")


@pytest.mark.parametrize(
    ("number", "path"), list(enumerate(["", "x" * 300, "/proc/self/mem", "file/a"]))
)
def test_an_unusable_device_path_is_a_one_line_error(
    tmp_path: Path, number: int, path: str
) -> None:
    named = path.replace("file", str(tmp_path / "file"))
    for name, taken in share(WITH.items(), number):
        arguments = given(name, tmp_path)
        arguments += ["--pool", named] if taken.option else [named]
        refused(name, ran(name, arguments, tmp_path), named or "a device needs a path", "device")


# Commands that would change a pool, or need it to be idle.
EXCLUSIVE = {
    "beluga mount": ["--create", "--force", "--size", "16M"],
    "beluga serve": [],
    "cxl-rpc serve": [],
    "beluga verify": ["--seconds", "0.01"],
    "beluga bench": ["rpc", "--smoke"],
    "cxl-rpc bench": ["--smoke"],
    "beluga pool create": ["--force", "--size", "16M"],
    "beluga pool check": ["--repair"],
    "beluga pool destroy": ["--yes"],
}


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_a_busy_pool_is_a_one_line_error(paths: list[Path], tmp_path: Path, name: str) -> None:
    with Pool.open(paths) as pool, IndexServer(pool) as server:
        ended = ran(name, [*EXCLUSIVE[name], *WITH[name].words(paths)], tmp_path)
        refused(name, ended, "server", "process")
        assert server.failure is None


def test_commands_that_only_need_the_server_work_with_a_truncated_device(
    run: Run, paths: list[Path]
) -> None:
    pool = Taken(option=True).words(paths)
    assert run("serve", *pool, "--detach").returncode == 0
    try:
        os.truncate(paths[1], SIZE // 2)  # after the part that the server itself needs
        assert run("ping", *pool).returncode == 1
        assert json.loads(run("top", "--once", "--json", *pool).stdout)
        assert json.loads(run("trace", "--json", *pool).stdout)["alive"]
        changed = run("quota", "--set", "pins=4", "--json", *pool)
        assert json.loads(changed.stdout)["quota"]["pins"] == 4
        assert run("drain", *pool).returncode == 0
        assert run("drain", "--undo", *pool).returncode == 0
        assert run("doctor", *pool).returncode == 1
    finally:
        stopped = run("stop", *pool)
    assert stopped.returncode == 0, stopped.stderr


# ---- An upgrade from a pool and a disk tier of the former release


FORMER = Path(__file__).with_name("former")
STORED = "what the former release stored\n" * 400


def test_a_pool_of_an_earlier_format_is_rejected_and_its_disk_tier_adopted(
    run: Run, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    devices = [tmp_path / "a", tmp_path / "b"]
    for device in devices:
        device.write_bytes(gzip.decompress((FORMER / f"{device.name}.gz").read_bytes()))
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "blocks").write_bytes(gzip.decompress((FORMER / "disk-blocks.gz").read_bytes()))
    pool = [word for device in devices for word in ("--pool", str(device))]

    # Every command rejects the pool, and prints the remedy.
    before = [device.read_bytes() for device in devices]
    for words in (("serve", *pool), ("stat", *pool), ("pool", "info", *pool)):
        refused = run(*words)
        assert refused.returncode == 1
        assert "beluga pool create --force" in refused.stderr
        assert refused.stderr.count("beluga: error:") == 1
    assert [device.read_bytes() for device in devices] == before

    # A new pool has no blocks, and the disk belongs to another server until it is adopted.
    ended = run("pool", "create", "--force", "--size", "24M", *map(str, devices))
    assert ended.returncode == 0, ended.stderr
    tier = ("--disk", str(disk), "--disk-bytes", "16M")
    refused = run("serve", *pool, *tier)
    assert refused.returncode == 1
    assert f"beluga disk adopt {disk / 'blocks'}" in refused.stderr.replace("\n", " ")
    assert run("disk", "adopt", str(disk / "blocks")).returncode == 0
    server = start("serve", *pool, *tier)
    assert server.stderr
    assert "now belongs to the server" in server.stderr.readline()
    assert server.stderr.readline().startswith("serving, epoch 1")
    assert run("get", "key", *pool).stdout == STORED
