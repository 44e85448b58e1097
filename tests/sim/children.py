# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs the simulator in child processes, several at a time. A crash or hang of the simulator is a
result, too.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # blocked in children, which are killed
RUN_CPU_S = 60.0  # CPU seconds of a run in which no process makes progress

Job = TypeVar("Job")


@dataclass(frozen=True)
class Death:
    """A child ended without a result."""

    signal: int

    def __str__(self) -> str:
        return f"the simulator died of signal {self.signal}"


def still_alive() -> None:
    """Record the start of a run: its child is killed after ``RUN_CPU_S`` seconds of CPU time."""
    signal.setitimer(signal.ITIMER_VIRTUAL, RUN_CPU_S)


def _child(answer: Connection, body: Callable[[Any], Any], job: object) -> None:
    # a mutant that corrupts the heap causes long messages
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        answer.send(body(job))
    except RuntimeError as error:
        answer.send(error)


def answers(
    jobs: Iterable[Job], body: Callable[[Job], Any], *, processes: int
) -> Iterator[tuple[Job, Any]]:
    """Yield (job, ``body(job)`` or a ``Death``) for every job, in the order in which they end.
    The next item of ``jobs`` is read only when a process is free. A ``RuntimeError`` of ``body`` is
    raised here.
    """
    context = multiprocessing.get_context("fork")
    waiting = iter(jobs)
    running: dict[Any, tuple[Job, Any]] = {}
    try:
        yield from _answers(context, waiting, running, body, processes)
    finally:  # after an interrupt, some still run
        for _, process in running.values():
            if process.pid is not None:  # the process has started
                process.kill()
                process.join()


def _answers(
    context: Any,
    waiting: Iterator[Job],
    running: dict[Any, tuple[Job, Any]],
    body: Callable[[Job], Any],
    processes: int,
) -> Iterator[tuple[Job, Any]]:
    while True:
        while len(running) < processes and (job := next(waiting, None)) is not None:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, body, job))
            running[mine] = (job, process)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
            process.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        if not running:
            return
        for ready in wait(list(running)):
            job, process = running.pop(ready)
            try:
                answer = ready.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                answer = Death(-(process.exitcode or 0))
            if isinstance(answer, RuntimeError):
                raise answer
            ready.close()  # type: ignore[union-attr]
            process.join()
            yield job, answer
