# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs in processes. Each child (beluga/simulate/child.py) gets the trace and then one job after
another, and returns rows, all as pickles. The children are programs of their own and not forks,
because the caller may have threads.
"""

from __future__ import annotations

import pickle
import selectors
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import IO, cast

from beluga.child import start
from beluga.errors import BelugaError, SimulateError
from beluga.simulate.job import SimulatedJob
from beluga.simulate.result import Row
from beluga.simulate.trace import Trace

_PROGRAM = "beluga.simulate.child"


class _Child:
    """A child process with the job that it runs. Ctrl-C does not reach it."""

    def __init__(self) -> None:
        self.place = -1  # index of its job
        self._process = start(_PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.rows = cast("IO[bytes]", self._process.stdout)

    def send(self, what: object) -> None:
        """Send the trace, or a job. Raises SimulateError if the child has ended."""
        jobs = cast("IO[bytes]", self._process.stdin)
        try:
            pickle.dump(what, jobs)
            jobs.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def row(self) -> Row:
        """Return the row of its job. Raises the error of the run, or SimulateError if the child has
        ended.
        """
        try:
            row = pickle.load(self.rows)  # noqa: S301  our own child wrote it
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        if isinstance(row, BelugaError):
            raise row
        return cast("Row", row)

    def end(self) -> None:
        """End the child, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def _ended(self) -> SimulateError:
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return SimulateError(
            f"a process of the simulation ended before its run was done: {how}; use fewer processes"
        )


def run_in_processes(
    trace: Trace, jobs: Sequence[SimulatedJob], processes: int, advance: Callable[[int, int], None]
) -> list[Row]:
    """Run jobs in that many processes, and return their rows in the order of the jobs. On the first
    error, and on Ctrl-C, all processes end.
    """
    rows: dict[int, Row] = {}
    waiting = iter(enumerate(jobs))
    with selectors.DefaultSelector() as ready, ExitStack() as ends:
        children = []
        for _ in range(processes):
            children.append(child := _Child())
            ends.callback(child.end)

        def next_job(child: _Child) -> None:
            child.place, job = next(waiting, (-1, None))
            if job is not None:
                child.send(job)

        for child in children:
            ready.register(child.rows, selectors.EVENT_READ, child)
            child.send(trace)
            next_job(child)
        while len(rows) < len(jobs):
            for key, _ in ready.select():
                child = cast("_Child", key.data)
                rows[child.place] = child.row()
                advance(len(rows), len(jobs))
                next_job(child)
    return [rows[place] for place in range(len(jobs))]
