# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What happened in the course of a run: figures over the simulated time."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from beluga.simulate.cluster import Cluster

_INTERVALS = 48


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """Figures of equal intervals; ``end_s`` has the end of each. A figure of an interval in which
    no request arrived is None.
    """

    end_s: list[float]
    waiting: list[float]  # requests that wait for their first token, on average over the interval
    hit_rate: list[float | None]  # of the requests that arrived in the interval
    ttft_mean_s: list[float | None]


def course_of(cluster: Cluster) -> Course:
    """Return the course of a run that has ended. Requests that were refused are left out."""
    size = cluster.trace.block_tokens
    served = [one for one in cluster.requests if not math.isnan(one.first_token)]
    arrival = np.array([one.arrival for one in served])
    first = np.array([one.first_token for one in served])
    edges = np.linspace(0.0, cluster.end_s or 1.0, _INTERVALS + 1)
    # The seconds that all requests together have waited until each edge.
    waited = np.array(
        [float((np.minimum(first, at) - np.minimum(arrival, at)).sum()) for at in edges]
    )
    place = np.clip(np.searchsorted(edges, arrival, side="right") - 1, 0, _INTERVALS - 1)

    def of_each(values: list[float]) -> list[float]:
        total = np.bincount(place, np.array(values, np.float64), _INTERVALS)
        return [float(one) for one in total]

    count = of_each([1.0] * len(served))
    found = of_each([float(one.device + one.far) for one in served])
    requested = of_each([float(-(-one.input // size)) for one in served])
    ttft = of_each([one.first_token - one.arrival for one in served])
    return Course(
        end_s=edges[1:].tolist(),
        waiting=(np.diff(waited) / np.diff(edges)).tolist(),
        hit_rate=[f / a if a else None for f, a in zip(found, requested, strict=True)],
        ttft_mean_s=[t / n if n else None for t, n in zip(ttft, count, strict=True)],
    )
