# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A child process of a simulation (beluga/simulate/processes.py): it reads the trace and then one
job after another on stdin, and writes the rows, or errors, on stdout.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import IO, Any

from beluga.errors import BelugaError
from beluga.simulate.job import SimulatedJob, run_job
from beluga.simulate.result import Row
from beluga.simulate.trace import Trace


def _main() -> None:
    jobs, rows = sys.stdin.buffer, sys.stdout.buffer
    trace: Trace | None = _receive(jobs)
    while trace is not None:
        job: SimulatedJob | None = _receive(jobs)
        if job is None:
            return
        answer: Row | BelugaError
        try:
            answer = run_job(trace, job)
        except BelugaError as error:
            answer = error
        try:
            pickle.dump(answer, rows)
            rows.flush()
        except BrokenPipeError:  # the parent has ended
            os._exit(1)


def _receive(jobs: IO[bytes]) -> Any:
    """Return what the parent sends next, or None if it has ended, even in the middle of it."""
    try:
        return pickle.load(jobs)  # noqa: S301  our own parent wrote it
    except (EOFError, pickle.UnpicklingError):
        return None


if __name__ == "__main__":
    _main()
