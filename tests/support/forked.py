# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that start as copies of one that has imported the libraries. Importing the modules of
the command line takes half a second of CPU time, and the tests start hundreds of commands. In a
full run (``TEST_EFFORT=full``) no module of ``beluga`` is imported before the copy is made: a
command imports them itself, as for a user. It finds modules where an installed command does, or, in
the folder of the checkout, there first. Variables that an interpreter reads once, when it starts
(PYTHON*, LC_*, LANG), are those of the tests' own process.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from support.emulation import FULL

_LIBRARIES = (
    *("concurrent.futures.thread", "csv", "email.message", "hashlib", "hmac", "http.server"),
    "json",
    *("secrets", "statistics", "sysconfig", "tempfile", "urllib.request", "zipfile", "zoneinfo"),
    *("asyncio", "importlib.metadata", "importlib.resources", "numpy", "numpy.typing"),
    *("msgspec", "rich.console", "rich.live", "rich.progress", "rich.table"),
    "click",
)
_OURS = (
    *("beluga.admin", "beluga.index", "beluga.kvcache", "beluga.tiers", "beluga.transfer"),
    "support.roles",
)
_READ_BY_IMPORTS = ("BELUGA_CRASH", "BELUGA_FLUSH", "BELUGA_ISA")
_REQUEST = 1 << 20  # bytes
_TESTS = Path(__file__).resolve().parents[1]
_ROOT = _TESTS.parent
_KILLED = int(signal.SIGKILL)  # the wait status of a process whose parent has ended


class Fork(subprocess.Popen[str]):
    """Python that executes ``code``, with pipes as its streams; ``stderr=None`` inherits the
    caller's.
    """

    def __init__(
        self,
        server: Server,
        code: str,
        arguments: list[str],
        environment: dict[str, str],
        *,
        cwd: Path,
        stderr: int | None = subprocess.PIPE,
    ) -> None:
        self._server, self._code, self._status = server, code, -1
        pipe = subprocess.PIPE
        super().__init__(
            [sys.executable, "-c", code, *arguments],
            cwd=cwd,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=stderr,
            text=True,
            bufsize=1,
        )

    def _execute_child(self, args: list[str], *more: Any) -> None:
        cwd, environment, pipes = more[4], more[5], more[9:15]
        self._status, child_end = os.pipe()
        request = {
            "code": self._code,
            "argv": ["-c", *args[3:]],
            "environment": environment,
            "cwd": str(cwd),
        }
        try:
            error = 2 if pipes[5] == -1 else pipes[5]
            self.pid = self._server.fork(request, [pipes[0], pipes[3], error, child_end])
        finally:
            os.close(child_end)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        timeout_s = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self._status], [], [], timeout_s)[0]:
            return 0, 0
        status = os.read(self._status, 4)
        os.close(self._status)
        return self.pid, int.from_bytes(status, "little") if status else _KILLED

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None and self._child_created:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


class Server:
    """The process that is copied."""

    def __init__(self) -> None:
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.PIPE,  # a command's streams are of this kind, too
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",  # no threads before a fork
                    "PYTHONPATH": str(_TESTS),  # as pytest's own
                },
            )

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self._socket.sendmsg([json.dumps(request).encode()], rights)
        return int(self._socket.recv(64))

    def close(self) -> None:
        self._socket.close()
        self._process.communicate(timeout=60)


@functools.cache
def server() -> Server:
    """Return the template of this process; it ends with the process."""
    made = Server()
    atexit.register(made.close)
    return made


def start(code: str, *arguments: object) -> Fork:
    """Start Python with the environment, the folder and the errors' stream of this process."""
    words = [*map(str, arguments)]
    return Fork(server(), code, words, dict(os.environ), cwd=Path.cwd(), stderr=None)


# ---- The process that is copied.


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Make copies until the other end closes. Returns a copy's request in that copy."""
    woken, wakes = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    children: dict[int, int] = {}  # the pipe that takes the status, by process
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children)
        if control not in ready:
            continue
        data, rights, _, _ = control.recvmsg(_REQUEST, socket.CMSG_SPACE(4 * 4))
        if not data:
            return None
        descriptors = array.array("i", rights[0][2])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, number)
            os.closerange(3, max(*descriptors, *children.values(), control.fileno(), wakes) + 1)
            control.detach()
            return dict(json.loads(data))
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        children[pid] = descriptors[3]
        control.send(str(pid).encode())


def _reap(children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            descriptor = children.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, status.to_bytes(4, "little"))
            os.close(descriptor)


def _import_ours() -> None:
    """Import what most commands do, and roles.py."""
    cli = importlib.import_module("beluga.cli")
    names = [f"beluga.cli.{each.name}" for each in pkgutil.iter_modules(cli.__path__)]
    sys.path.insert(0, str(_TESTS))
    for name in (*names, *_OURS):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.path[0]


def _forget_ours() -> None:
    """Drop modules of ``beluga`` whose import depends on the environment, so that the copy imports
    them again.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in ("beluga", "support") and name != "beluga._core":
            del sys.modules[name]


def _main() -> dict[str, Any] | None:
    sys.path[:2] = [""]  # neither this folder nor that of the tests
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("pydantic").TypeAdapter(int)  # this imports most of its modules
    if not FULL:
        _import_ours()
    gc.collect()
    # the last garbage collection of a copy would traverse these objects and copy their pages
    gc.freeze()
    warnings.simplefilter("ignore", DeprecationWarning)  # of fork() in a process with threads
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    warnings.resetwarnings()
    if request:
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(request["environment"])
        if any(os.environ.get(name) != before.get(name) for name in _READ_BY_IMPORTS):
            _forget_ours()
        os.chdir(request["cwd"])
        sys.argv[:] = request["argv"]
        if Path(request["cwd"]) != _ROOT:
            del sys.path[0]
    return request


if __name__ == "__main__":
    if job := _main():
        # As with python -c: without a file that children of multiprocessing would import.
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(job["code"], vars(main))  # noqa: S102
