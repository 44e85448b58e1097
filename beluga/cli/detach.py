# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server in the background: ``beluga serve --detach`` or ``cxl-rpc serve --detach`` starts it,
``beluga stop`` stops it. What more a service needs, systemd has: other users, restarts, limits.

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
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from beluga import config
from beluga.child import command
from beluga.cli import logs
from beluga.cli.options import Json, PoolPaths, open_pool, runtime_dir_of
from beluga.cli.output import print_json, print_note
from beluga.errors import BelugaError, NoServerError, RpcError, ServerAliveError

if TYPE_CHECKING:
    from beluga.rpc import CallTrace

_NAMES = ("serve", "standby")  # file names of a background process
_ERROR = re.compile(r"^(beluga|cxl-rpc)( serve)?: error: ")
_LOOK_S = 0.2
_STOP_S = 60.0


def detached(
    paths: list[str] | None, json: bool, *, stands_by: bool = False, module: str = "main"
) -> None:
    """Run this command in the background without ``--detach``. Returns once it serves or stands
    by. If it ends earlier, raises RpcError with its last message.
    """
    with open_pool(paths) as pool:
        directory = pool.runtime_dir
    serves = _holder(directory / "serve.pid") is not None
    name = "standby" if stands_by and serves else "serve"
    log = directory / f"{name}.log"
    with (
        tempfile.TemporaryDirectory(prefix="beluga-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
        log.open("ab") as output,
        log.with_suffix(".pid").open("ab") as lock,
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            others = "server and a standby" if stands_by else "server"
            pids = [pid for each in _NAMES if (pid := _holder(directory / f"{each}.pid"))]
            shown = ", ".join(f"process {pid}" for pid in pids) or "starting"
            raise ServerAliveError(
                f"this host already runs a {others} of this pool in the background ({shown}); give "
                f"'{_stop_command(paths)}' first, or --standby for one standby"
            ) from None
        lock.truncate(0)  # may have the pid of a killed process, which may be reused
        begin = output.tell()
        ready.bind(f"{folder}/ready")
        ready.settimeout(_LOOK_S)
        child = subprocess.Popen(
            command(f"beluga.cli.{module}", *(word for word in sys.argv[1:] if word != "--detach")),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=config.with_notify_socket(f"{folder}/ready"),
            pass_fds=[lock.fileno()],  # the child keeps the lock
            start_new_session=True,
        )
        lock.write(b"%d\n" % child.pid)
        lock.flush()
        status = _wait(child, ready, log, begin)
    if json:
        print_json({"pid": child.pid, "status": status, "log": str(log)})
    else:
        stop = _stop_command(paths)
        print_note(f"{status}, in the background as process {child.pid}; stop it with '{stop}'")


def _stop_command(paths: list[str] | None) -> str:
    return " ".join(["beluga stop", *(f"--pool {shlex.quote(path)}" for path in paths or ())])


def _wait(child: subprocess.Popen[bytes], ready: socket.socket, log: Path, begin: int) -> str:
    """Return the status with which the child reports that it is ready."""
    while True:
        try:
            notice = ready.recv(4096).decode()
            if notice.startswith("READY=1\n"):
                return notice.rpartition("STATUS=")[2]
        except TimeoutError:
            if child.poll() is not None:
                lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
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
    trace = _trace(directory)
    locks = [directory / f"{name}.pid" for name in reversed(_NAMES)]
    holders = [(lock, pid) for lock in locks if (pid := _holder(lock))]
    if not holders:
        raise NoServerError("no server was started here with --detach; " + _how_to_stop(trace))
    # The server comes last, so that no standby takes over
    holders.sort(key=lambda holder: trace is not None and holder[1] == trace.pid)
    for lock, pid in holders:
        _end(lock, pid)
        if not json:
            print_note(f"stopped: process {pid}")
    if json:
        pids = [pid for _, pid in holders]
        print_json({"stopped": pids[-1], **({"standby": pids[0]} if len(pids) > 1 else {})})


def _trace(directory: Path) -> CallTrace | None:
    """Return the trace of the last server, which has its pid."""
    from beluga.rpc import read_trace

    with suppress(BelugaError, OSError):
        return read_trace(directory)
    return None


def _how_to_stop(trace: CallTrace | None) -> str:
    """Return how to stop a server that was not started with ``--detach``: the cgroup of its process
    has its systemd unit.
    """
    if trace is None or not trace.alive:
        return "stop another one where it runs"
    how = _stopping(trace.pid)
    return f"process {trace.pid} serves; {how}, and stop its standby, which would take over"


def _stopping(pid: int) -> str:
    """Return the command that stops a server: kill, or that of its systemd unit."""
    groups = ""
    with suppress(OSError):
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    unit = re.search(r"/([\w@.-]+\.service)$", groups, re.MULTILINE)
    return f"systemctl stop {unit[1]}" if unit else f"kill {pid}"


def serving_process(directory: Path) -> tuple[int, str] | None:
    """Return the pid of the server that uses a pool's runtime directory, and the command that stops
    it; None if no process of this host serves the pool.
    """
    trace = _trace(directory)
    return (trace.pid, _stopping(trace.pid)) if trace is not None and trace.alive else None


def _end(lock: Path, pid: int) -> None:
    """Terminate the process that holds the lock, and resume it if it is suspended. Wait until it
    has ended.

    The pid is checked right before each signal: while the lock is held, it is the server's.
    """
    try:
        for number in (signal.SIGTERM, signal.SIGCONT):
            if _holder(lock) == pid:
                os.kill(pid, number)
    except ProcessLookupError:  # it has just ended
        pass
    except PermissionError:
        raise RpcError(
            f"process {pid} belongs to another user; stop it as that user or as root"
        ) from None
    until = time.monotonic() + _STOP_S
    while _holder(lock) == pid:
        if time.monotonic() > until:
            raise RpcError(f"process {pid} does not end; see {lock.with_suffix('.log')}")
        time.sleep(0.02)


def _holder(lock: Path) -> int | None:
    """Return the pid of the lock's holder, 0 if it has not written it yet, or None if the lock is
    free.
    """
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = lock.read_text().strip()
        return int(text) if text.isdecimal() else 0
    return None
