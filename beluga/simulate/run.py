# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of policies: it runs every policy on every memory with every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from beluga.errors import RouterError, SimulateError
from beluga.router import read_policy
from beluga.simulate.job import SimulatedJob, run_job
from beluga.simulate.options import COUNT_MAX, MEMORIES, Options
from beluga.simulate.processes import run_in_processes
from beluga.simulate.result import Row, mean_row
from beluga.simulate.trace import Trace

Advance = Callable[[int, int], None]


def _ignore(done: int, total: int) -> None:
    pass


def simulate(  # noqa: PLR0913  what to compare, by name
    trace: Trace,
    options: Options,
    *,
    policies: Sequence[str],
    memories: Sequence[str] = MEMORIES,
    seeds: int = 1,
    courses: bool = False,
    processes: int = 1,
    advance: Advance = _ignore,
) -> list[Row]:
    """Return a row per seed for each policy and memory, followed by their mean (seed None).
    ``policies`` are those of ``make_policy``: names, with settings or without. ``memories`` are
    pool (shared by all workers) and split (each worker's own DRAM). With ``courses``, the row of
    the first seed and the mean have the course of the run.

    Up to ``processes`` runs run at once, each in a process of its own; the rows are the same.
    Raises SimulateError for an unknown name or setting, if a worker has no space for a single
    block, or if a process ends before its run does.
    """
    return sweep(
        trace,
        [options],
        policies=policies,
        memories=memories,
        seeds=seeds,
        courses=courses,
        processes=processes,
        advance=advance,
    )


def sweep(  # noqa: PLR0913  what to compare, by name
    trace: Trace,
    cases: Sequence[Options],
    *,
    policies: Sequence[str],
    memories: Sequence[str] = MEMORIES,
    seeds: int = 1,
    courses: bool = False,
    processes: int = 1,
    advance: Advance = _ignore,
) -> list[Row]:
    """Return the rows of :func:`simulate` for one cluster after another."""
    try:
        policies = [read_policy(policy) for policy in policies]
    except RouterError as error:
        raise SimulateError(str(error)) from None
    if not policies or not memories or seeds < 1:
        raise SimulateError("nothing to simulate; name a policy and a memory, and at least 1 seed")
    if not 1 <= processes <= COUNT_MAX:
        raise SimulateError(f"processes is from 1 to {COUNT_MAX}, not {processes}")
    for options in cases:
        block = trace.block_tokens * options.model.kv_bytes_per_token
        if options.hbm_bytes < block:
            raise SimulateError(
                f"HBM of {options.hbm_bytes} bytes has no room for a block of {block}"
            )
    jobs = [
        SimulatedJob(options, policy, memory, seed, course=courses and not seed)
        for options in cases
        for policy in policies
        for memory in memories
        for seed in range(seeds)
    ]
    at_once = min(processes, len(jobs))
    found: list[Row] = []
    if at_once > 1:
        found = run_in_processes(trace, jobs, at_once, advance)
    else:
        for job in jobs:
            found.append(run_job(trace, job))
            advance(len(found), len(jobs))
    rows: list[Row] = []
    each = iter(found)
    while group := list(islice(each, seeds)):
        rows += [*group, mean_row(group)]
    return rows
