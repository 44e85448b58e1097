# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server in the background: ``beluga serve --detach`` or ``cxl-rpc serve --detach`` starts it,
``beluga stop`` stops it.

A child process runs the same command without ``--detach`` in its own session. It reports that it is
ready, like a systemd service (:mod:`beluga.cli.services`). It logs to ``serve.log`` in the pool's
runtime directory, and writes its pid to ``serve.pid``, which it keeps locked: only the process with
the lock is the server, even if a pid was reused. A standby on the same host has ``standby.log`` and
``standby.pid``; the names do not change when it takes over.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from beluga import config
from beluga.child import command
from beluga.cli import logs
from beluga.cli.options import Json, PoolPaths, open_pool, runtime_dir_of
from beluga.cli.output import print_json, print_note
from beluga.errors import BelugaError, NoServerError, RpcError, ServerAliveError

_NAMES = ("serve", "standby")  # file names of a background process
_MODULES = {"beluga": "beluga.cli.main", "cxl-rpc": "beluga.cli.cxl_rpc"}
_ERROR = re.compile(r"^(beluga|cxl-rpc): error: ")
_LOOK_S = 0.2
_STOP_S = 60.0


def detached(
    paths: list[str] | None, json: bool, *, stands_by: bool = False, program: str = "beluga"
) -> None:
    """Run this command of ``program`` in the background without ``--detach``. Returns once it
    serves or stands by. If it ends earlier, raises RpcError with its last message.
    """
    with open_pool(paths) as pool:
        directory = pool.runtime_dir
        stop = "" if paths is None else "".join(f" --pool {shlex.quote(path)}" for path in paths)
    name = _free(directory) if stands_by else _NAMES[0]
    log, lock = directory / f"{name}.log", directory / f"{name}.pid"
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    with tempfile.TemporaryDirectory(prefix="beluga-") as folder, _open(log) as output:
        address = f"{folder}/ready"
        begin = output.tell()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, _open(lock) as lock_file:
            _take(lock_file, stands_by=stands_by)
            lock_file.truncate(0)  # may have the pid of a killed process, which may be reused
            ready.bind(address)
            ready.settimeout(_LOOK_S)
            child = subprocess.Popen(
                command(_MODULES[program], *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=config.with_notify_socket(address),
                pass_fds=[lock_file.fileno()],
                start_new_session=True,
            )
            lock_file.write(b"%d\n" % child.pid)
            lock_file.flush()
            status = _wait(child, ready, log, begin)
    if json:
        print_json({"pid": child.pid, "status": status, "log": str(log)})
    else:
        print_note(
            f"{status}, in the background as process {child.pid}; stop it with 'beluga stop{stop}'"
        )


def _open(path: Path) -> IO[bytes]:
    """Open a file of the runtime directory for appending. If the directory belongs to a group, the
    file is group-writable regardless of the umask. Another user's private file is replaced, unless
    a server keeps it locked.
    """
    shared = path.parent.stat().st_mode & stat.S_IWGRP
    try:
        file = path.open("ab")
    except PermissionError:
        if not shared or _holder(path) is not None:
            raise
        path.unlink()
        file = path.open("ab")
    if shared and os.fstat(file.fileno()).st_uid == os.geteuid():
        os.fchmod(file.fileno(), 0o660)
    return file


def _free(directory: Path) -> str:
    """Return the first unlocked name, or the last one."""
    free = (name for name in _NAMES if not _is_held(directory / f"{name}.pid"))
    return next(free, _NAMES[-1])


def _take(lock: IO[bytes], *, stands_by: bool) -> None:
    """Lock the file, for this process and for the child that inherits its descriptor."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if stands_by:
            raise ServerAliveError(
                "this host already runs a server and a standby of this pool in the background; "
                "stop both with 'beluga stop'"
            ) from None
        raise ServerAliveError(
            "this host already runs a server of this pool in the background; stop it with 'beluga "
            "stop', or add a standby with --standby"
        ) from None


def _wait(child: subprocess.Popen[bytes], ready: socket.socket, log: Path, begin: int) -> str:
    while True:
        try:
            notice = ready.recv(4096).decode()
            if notice.startswith("READY=1\n"):
                return notice.rpartition("STATUS=")[2]
        except TimeoutError:
            if child.poll() is not None:
                with log.open("rb") as file:
                    file.seek(begin)
                    lines = file.read().decode(errors="replace").splitlines()
                last = lines[-1] if lines else f"it ended with status {child.returncode}"
                raise RpcError(_ERROR.sub("", logs.message_of(last))) from None
        except BaseException:
            child.terminate()
            raise


def stop(pool: PoolPaths = None, json: Json = False) -> None:
    """Stop the processes that `beluga serve --detach` or `cxl-rpc serve --detach` started on this
    host, standbys first.
    """
    directory = runtime_dir_of(pool)
    serving = _serving(directory)
    locks = [directory / f"{name}.pid" for name in reversed(_NAMES)]  # the standby's first
    holders = [(lock, pid) for lock in locks if (pid := _holder(lock)) is not None]
    if not holders:
        raise NoServerError("no server was started here with --detach; " + _how_to_stop(directory))
    # The server comes last, so that no standby takes over
    holders.sort(key=lambda holder: holder[1] == serving)
    for lock, pid in holders:
        _stop_process(lock, pid)
        if not json:
            print_note(f"stopped: process {pid}")
    if json:
        pids = [pid for _, pid in holders]
        print_json({"stopped": pids[-1], **({"standby": pids[0]} if len(pids) > 1 else {})})


def _serving(directory: Path) -> int | None:
    """Return the pid of the active server, from its trace."""
    from beluga.rpc import read_trace

    try:
        return read_trace(directory).pid
    except (BelugaError, OSError):
        return None


def _stop_process(lock: Path, pid: int) -> None:
    with suppress(ProcessLookupError):  # the process has just ended
        _end(lock, pid)
    until = time.monotonic() + _STOP_S
    while _holder(lock) == pid:
        if time.monotonic() > until:
            raise RpcError(f"process {pid} does not end; see {lock.with_suffix('.log')}")
        time.sleep(0.02)


def _how_to_stop(directory: Path) -> str:
    """Return how to stop a server that was not started with ``--detach``: its trace has its pid,
    and the process's cgroup has its systemd unit.
    """
    from beluga.rpc import read_trace

    try:
        trace = read_trace(directory)
        if not trace.alive:
            return "stop another one where it runs"
        groups = Path(f"/proc/{trace.pid}/cgroup").read_text()
    except (BelugaError, OSError):
        return "stop another one where it runs"
    if unit := re.search(r"/([\w@.-]+\.service)$", groups, re.MULTILINE):
        return (
            f"systemd runs it: systemctl stop {unit[1]}, and stop its standby, which would take "
            "over"
        )
    return (
        f"process {trace.pid} serves: kill {trace.pid}, and stop its standby, which would take over"
    )


def _end(lock: Path, pid: int) -> None:
    """Terminate the process that holds the lock, and resume it if it is suspended.

    The pid is checked right before each signal: while the lock is held, it is the server's.
    """
    for number in (signal.SIGTERM, signal.SIGCONT):
        if _holder(lock) == pid:
            try:
                os.kill(pid, number)
            except PermissionError:
                owner = Path(f"/proc/{pid}").stat().st_uid
                raise RpcError(
                    f"process {pid} belongs to user {owner}; stop it as that user or as root"
                ) from None


def _is_held(lock: Path) -> bool:
    """Return whether a process holds the lock, even before it has written its pid."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _holder(lock: Path) -> int | None:
    """Return the pid of the lock's holder, or None if the lock is free."""
    try:
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0) or None
    except (FileNotFoundError, ValueError):
        pass
    return None
