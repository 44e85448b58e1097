# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of policies: it runs every policy on every memory with every seed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from beluga.errors import RouterError, SimulateError
from beluga.router import read_policy
from beluga.simulate.cluster import Cluster
from beluga.simulate.options import COUNT_MAX, MEMORIES, Options
from beluga.simulate.result import Row, course_of, make_row, mean_row
from beluga.simulate.trace import Trace
from beluga.threads import Thread


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedJob:
    options: Options
    policy: str
    memory: str
    seed: int
    course: bool  # whether its row has the course of the run


def run_job(trace: Trace, job: SimulatedJob) -> Row:
    """Run a job. Returns its row."""
    cluster = Cluster(trace, job.options, policy=job.policy, memory=job.memory, seed=job.seed)
    cluster.run()
    row = make_row(cluster, policy=job.policy, seed=job.seed)
    return dataclasses.replace(row, course=course_of(cluster)) if job.course else row


Advance = Callable[[int, int], None]


def simulate(  # noqa: PLR0913  what to compare, by name
    trace: Trace,
    options: Options | Sequence[Options],
    *,
    policies: Sequence[str],
    memories: Sequence[str] = MEMORIES,
    seeds: int = 1,
    courses: bool = False,
    processes: int = 1,
    advance: Advance = lambda done, total: None,
) -> list[Row]:
    """Return a row per seed for each policy and memory, followed by their mean (seed None); of
    several clusters one after another. ``policies`` are those of ``make_policy``: names, with
    settings or without. ``memories`` are pool (shared by all workers) and split (each worker's own
    DRAM). With ``courses``, the row of the first seed and the mean have the course of the run.

    Up to ``processes`` runs run at once, each in a process of its own; the rows are the same.
    Raises SimulateError for an unknown name or setting, if a worker has no space for a single
    block, or if a process ends before its run does.
    """
    cases = [options] if isinstance(options, Options) else options
    try:
        policies = [read_policy(policy) for policy in policies]
    except RouterError as error:
        raise SimulateError(str(error)) from None
    if not policies or not memories or seeds < 1:
        raise SimulateError("nothing to simulate; name a policy and a memory, and at least 1 seed")
    if not 1 <= processes <= COUNT_MAX:
        raise SimulateError(f"processes is from 1 to {COUNT_MAX}, not {processes}")
    for case in cases:
        block = trace.block_tokens * case.model.kv_bytes_per_token
        if case.hbm_bytes < block:
            raise SimulateError(
                f"--hbm (hbm_bytes) is {case.hbm_bytes}, less than a block of {block} bytes; give "
                "more"
            )
    jobs = [
        SimulatedJob(case, policy, memory, seed, course=courses and not seed)
        for case in cases
        for policy in policies
        for memory in memories
        for seed in range(seeds)
    ]
    at_once = min(processes, len(jobs))
    results: list[Row] = []
    if at_once > 1:
        results = _run_in_processes(trace, jobs, at_once, advance)
    else:
        for job in jobs:
            results.append(run_job(trace, job))
            advance(len(results), len(jobs))
    rows: list[Row] = []
    ordered = iter(results)
    while group := list(islice(ordered, seeds)):
        rows += [*group, mean_row(group)]
    return rows


def _run_in_processes(
    trace: Trace, jobs: Sequence[SimulatedJob], processes: int, advance: Advance
) -> list[Row]:
    """Run jobs in that many processes, and return their rows in the order of the jobs. On the first
    error, and on Ctrl-C, all processes end.
    """
    before = set(multiprocessing.active_children())
    # Programs of their own and not forks, because the caller may have threads.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, _begin, (trace,)) as pool:
        try:
            # A Ctrl-C reaches the whole group; children inherit the mask, and the parent ends them.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                futures: list[Future[Row]] = [pool.submit(_run, job) for job in jobs]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                advance(done, len(jobs))
        except BrokenProcessPool:
            raise SimulateError(
                "a process of the simulation ended before its run was done; use fewer processes"
            ) from None
        finally:  # all are idle, unless there is an error
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
    return [future.result() for future in futures]


_traces: list[Trace] = []  # the trace of a child process


def _begin(trace: Trace) -> None:
    """Prepare a child process."""
    _traces.append(trace)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Otherwise a child of a killed parent would wait for a job without an end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _run(job: SimulatedJob) -> Row:
    return run_job(_traces[0], job)
