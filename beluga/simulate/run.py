# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of policies: it runs every policy on every memory with every seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from beluga.errors import SimulateError
from beluga.router import POLICIES
from beluga.simulate.cluster import Cluster
from beluga.simulate.course import course_of
from beluga.simulate.options import MEMORIES, Options
from beluga.simulate.result import Row, make_row, mean_row
from beluga.simulate.trace import Trace


def simulate(  # noqa: PLR0913  what to compare, by name
    trace: Trace,
    options: Options,
    *,
    policies: Sequence[str],
    memories: Sequence[str] = MEMORIES,
    seeds: int = 1,
    courses: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Return a row per seed for each policy and memory, followed by their mean (seed None).
    With ``courses``, the row of the first seed and the mean say what happened over the run.

    Raises SimulateError for an unknown name, or if a worker has no space for a single block.
    """
    if unknown := [name for name in policies if name not in POLICIES]:
        raise SimulateError(f"no policy {unknown[0]!r}; choose of {', '.join(POLICIES)}, or all")
    if not policies or not memories or seeds < 1:
        raise SimulateError("nothing to simulate; name a policy and a memory, and at least 1 seed")
    block = trace.block_tokens * options.model.kv_bytes_per_token
    if options.hbm_bytes < block:
        raise SimulateError(f"HBM of {options.hbm_bytes} bytes has no room for a block of {block}")
    rows: list[Row] = []
    total, done = len(policies) * len(memories) * seeds, 0
    for policy in policies:
        for memory in memories:
            found = []
            for seed in range(seeds):
                cluster = Cluster(trace, options, policy=policy, memory=memory, seed=seed)
                cluster.run()
                row = make_row(cluster, policy=policy, seed=seed)
                if courses and not seed:
                    row = dataclasses.replace(row, course=course_of(cluster))
                found.append(row)
                done += 1
                advance(done, total)
            rows += [*found, mean_row(found)]
    return rows
