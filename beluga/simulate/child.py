# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A child process of a simulation (beluga/simulate/processes.py): it reads the trace and then one
job after another on stdin, and writes the rows, or errors, on stdout.
"""

from __future__ import annotations

import os
import pickle
import sys

from beluga.errors import BelugaError
from beluga.simulate.job import SimulatedJob, run_job
from beluga.simulate.result import Row
from beluga.simulate.trace import Trace


def _main() -> None:
    jobs, rows = sys.stdin.buffer, sys.stdout.buffer
    trace: Trace = pickle.load(jobs)  # noqa: S301  our own parent wrote it
    while True:
        try:
            job: SimulatedJob = pickle.load(jobs)  # noqa: S301
        except EOFError:
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


if __name__ == "__main__":
    _main()
