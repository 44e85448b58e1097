# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One run of a comparison: a policy on a memory with a seed."""

from __future__ import annotations

import dataclasses

from beluga.simulate.cluster import Cluster
from beluga.simulate.course import course_of
from beluga.simulate.options import Options
from beluga.simulate.result import Row, make_row
from beluga.simulate.trace import Trace


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
