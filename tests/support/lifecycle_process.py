# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Uses every closable object in one phase of its life: ``lifecycle_process FOLDER PHASE``. Each
kind has its own process, forked from one that has only imported Beluga. Prints a line of JSON for
each: its name and its error.
"""

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.lifecycle_scenes import CLOSED, ENDS, FORKED, MAKERS, ORPHANED, Kind, Scene, methods

from beluga.errors import BelugaError

REFUSALS = (BelugaError, ValueError)
ENDING = {*ENDS, "request_stop", "fail", "release_all"}
BLOCKING = {"serve_forever"}
LIMIT_S = 10  # timeout of one kind, after which its threads are printed
CONCURRENT_S = 0.02
PAUSE_S = 0.0002


class Case:
    """One object in one scene, and its errors."""

    def __init__(self, name: str, kind: Kind, folder: Path) -> None:
        self.name, self.kind = name, kind
        self.scene = Scene(folder)
        self.owner = kind.make(self.scene)
        self.scene.prepared = self.scene.arguments(self.owner)
        self.names = methods(self.owner, kind.skip)
        self.wrong: list[str] = []

    def tried(self, name: str) -> BaseException | None:
        """Return the exception of a method. Any exception other than a rejection is an error."""
        try:
            self.scene.call(self.owner, name)
        except REFUSALS as error:
            return error
        except BaseException as error:
            self.wrong.append(f"{name}: {error!r}")
        return None

    def used(self, refused_as: str | None = None) -> None:
        """Check that it works, or is rejected with the right error."""
        use, refused = self.kind.use, self.kind.refused
        if use is None:
            return
        try:
            use(self.scene, self.owner)
        except REFUSALS as error:
            if refused_as not in refused:
                self.wrong.append(f"use, {refused_as}: {error!r}")
        except BaseException as error:
            self.wrong.append(f"use, {refused_as}: {error!r}")
        else:
            if refused_as in refused:
                self.wrong.append(f"use, {refused_as}: it was not refused")

    def end(self) -> None:
        """Close or stop it."""
        for name in ENDS:
            if name in self.names:
                self.tried(name)

    def call_concurrently(self, over: threading.Event, *, blocking: bool) -> list[threading.Thread]:
        """Call each method that does not end it from threads, until the context ends."""
        left_out = ENDING if blocking else ENDING | BLOCKING

        def call(name: str) -> None:
            while not over.wait(PAUSE_S):
                self.tried(name)

        threads = [
            threading.Thread(target=call, args=(name,), name=name, daemon=True)
            for name in self.names
            if name not in left_out
        ]
        for thread in threads:
            thread.start()
        return threads


def after_close(case: Case) -> None:
    """Call every method after close, and close twice."""
    case.used()
    case.end()
    if any(end in case.names for end in ENDS):
        case.used(CLOSED)
        for name in case.names * 2:
            case.tried(name)
        case.end()
        case.used(CLOSED)
    case.scene.pool.close()


def after_the_pool(case: Case) -> None:
    """Call it after the pool was closed."""
    case.used()
    case.scene.pool.close()
    case.used(ORPHANED)
    for name in case.names * 2:
        case.tried(name)
    case.end()
    case.scene.pool.close()


def _end_concurrently(case: Case, end: Callable[[], object]) -> None:
    if case.kind.one_thread:
        return
    over = threading.Event()
    threads = case.call_concurrently(over, blocking=True)
    time.sleep(CONCURRENT_S)
    end()
    over.set()
    for thread in threads:
        thread.join()
    case.end()
    case.scene.pool.close()


def during_close(case: Case) -> None:
    """Call every method from threads while it is closed."""
    _end_concurrently(case, case.end)


def during_the_pools_close(case: Case) -> None:
    """Call every method from threads while the pool is closed."""
    _end_concurrently(case, case.scene.pool.close)


def forked(case: Case) -> None:
    """Fork a child while threads of this process are in every method; it must not affect the
    parent's objects.
    """
    case.used()
    over = threading.Event()
    threads = [] if case.kind.one_thread else case.call_concurrently(over, blocking=False)
    time.sleep(CONCURRENT_S)
    children = [_child(case) for _ in range(2)]
    over.set()
    for thread in threads:
        thread.join()
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            case.wrong.append(f"a forked child: {_ended(status)}")
    case.used()
    case.end()
    case.scene.pool.close()


def _child(case: Case) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(LIMIT_S // 2)  # prints all threads, and ends the process
    case.wrong.clear()
    case.used(FORKED)
    for name in case.names:
        case.tried(name)
    case.end()
    case.scene.pool.close()
    if FORKED in case.kind.refused:
        case.used(FORKED)
    print(*case.wrong, sep="\n", file=sys.stderr)
    sys.exit(bool(case.wrong))  # with a normal exit of the interpreter


PHASES = {
    phase.__name__: phase
    for phase in (after_close, after_the_pool, during_close, during_the_pools_close, forked)
}


def _ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _run(name: str, kind: Kind, folder: Path, phase: str) -> Iterator[str]:
    """Run a case in a child. Returns its errors."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(LIMIT_S)
        case = Case(name, kind, folder)
        PHASES[phase](case)
        os.write(write, json.dumps(sorted(set(case.wrong))).encode())
        sys.exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        output = stream.read()
    _, status = os.waitpid(child, 0)
    if status:
        yield _ended(status)
    elif not output:
        yield "it did not come to its end"
    yield from json.loads(output or b"[]")


def main(folder: str, phase: str, *only: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    gc.freeze()  # the last garbage collection of a child would copy the pages of all modules
    for name, kind in MAKERS.items():
        if only and name not in only:
            continue
        own = Path(folder) / name
        with contextlib.suppress(FileExistsError):
            own.mkdir()
        outcome = {"name": name, "wrong": list(_run(name, kind, own, phase))}
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    main(*arguments)
