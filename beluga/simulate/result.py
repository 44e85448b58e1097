# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The results of runs: a row for each run, one row of means over all seeds, and the course of a
run. Also the load that a cluster sustains within an objective, and the hit rate of one cache by its
size, without a cluster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi
from beluga.simulate.cluster import Cluster
from beluga.simulate.memory import Request, SimulatedTier
from beluga.simulate.trace import Trace

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
    served = [request for request in cluster.requests if not math.isnan(request.first_token)]
    arrival = np.array([request.arrival for request in served])
    first = np.array([request.first_token for request in served])
    edges = np.linspace(0.0, cluster.end_s or 1.0, _INTERVALS + 1)
    # The seconds that all requests together have waited until each edge.
    waited = np.array(
        [float((np.minimum(first, at) - np.minimum(arrival, at)).sum()) for at in edges]
    )
    interval = np.clip(np.searchsorted(edges, arrival, side="right") - 1, 0, _INTERVALS - 1)

    def of_each(values: list[float]) -> list[float]:
        sums: list[float] = np.bincount(interval, np.array(values, np.float64), _INTERVALS).tolist()
        return sums

    count = of_each([1.0] * len(served))
    hits = of_each([float(request.device + request.far) for request in served])
    requested = of_each([float(-(-request.input // size)) for request in served])
    ttft = of_each([request.first_token - request.arrival for request in served])
    return Course(
        end_s=edges[1:].tolist(),
        waiting=(np.diff(waited) / np.diff(edges)).tolist(),
        hit_rate=[f / a if a else None for f, a in zip(hits, requested, strict=True)],
        ttft_mean_s=[t / n if n else None for t, n in zip(ttft, count, strict=True)],
    )


# Times to first token that are longer are due to a queue, not to a prompt.
QUEUE_S = 60.0
_SAME = ("seed", "speed", "requests", "workers", "capacity_bytes")  # in all runs of a mean


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The spread of one figure over the seeds."""

    min: float
    max: float
    std: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results of a policy on a memory. Rates are 0..1; hit rates count blocks, with each
    request's tail.

    If workers joined or left, ``*_before`` is for requests that arrived before that, and
    ``*_after`` for later ones. A figure without values is None.
    """

    policy: str
    memory: str
    seed: int | None  # None for the mean over the seeds
    speed: float  # arrival rate, as a multiple of the trace's
    requests: int
    rejects: float
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_mean_ms: float | None
    tpot_p99_ms: float | None
    hit_rate: float
    hit_rate_hbm: float
    hit_rate_pool: float
    hit_rate_local: float  # in workers' own DRAM
    hit_rate_tokens: float
    tokens_saved: float  # prompt tokens that were found and not computed
    prefill_saved_s: float  # the time that engines would have taken to compute these
    hit_rate_before: float | None
    hit_rate_after: float | None
    ttft_mean_before_s: float | None
    ttft_mean_after_s: float | None
    load_imbalance: float  # the busiest worker's time / the mean time
    throughput_per_s: float  # served requests per second
    link_read_utilisation: float  # a worker's link, on average
    link_write_utilisation: float
    onboard_ms: float  # per request that fetches blocks
    onboard_queue_ms: float  # the part of it that is due to sharing links
    workers: int  # at the beginning of the run
    workers_most: int  # the most at any time
    worker_hours: float
    capacity_bytes: int  # of the pool, or of all DRAM in its place, at the beginning of the run
    spread: dict[str, Spread] | None = None
    course: Course | None = None  # of the first seed, if it was requested

    @property
    def saturated(self) -> bool:
        """Whether requests queued for minutes: then the times grow with the length of the trace."""
        return (self.ttft_p99_s or 0.0) > QUEUE_S


def make_row(cluster: Cluster, *, policy: str, seed: int) -> Row:
    """Make the row of a run that has ended."""
    requests, size = cluster.requests, cluster.trace.block_tokens
    served = [request for request in requests if not math.isnan(request.first_token)]
    first = np.array([request.first_token - request.arrival for request in served])
    between = np.array(
        [
            1e3 * (request.done - request.first_token) / (request.output - 1)
            for request in served
            # without serial workers, and without answers of one token
            if request.done > request.first_token
        ]
    )
    busy = [engine.busy_s for engine in cluster.engines]
    network, options = cluster.network, cluster.options
    read, write = network.utilisation(cluster.end_s)
    copies = max(network.read.count, 1)
    scale = options.scale
    early = [r for r in served if scale and r.arrival < scale.at_s]
    late = [r for r in served if scale and r.arrival >= scale.at_s]
    far = _share(served, lambda r: r.far, size)
    local = options.local_bytes * options.workers
    saved = sum(_cached_tokens(r, size) for r in served)
    return Row(
        policy=policy,
        memory=cluster.memory,
        seed=seed,
        speed=options.speed,
        requests=len(requests),
        rejects=cluster.refused,
        ttft_mean_s=_figure(first, np.mean),
        ttft_p50_s=_percentile(first, 50),
        ttft_p90_s=_percentile(first, 90),
        ttft_p99_s=_percentile(first, 99),
        tpot_mean_ms=_figure(between, np.mean),
        tpot_p99_ms=_percentile(between, 99),
        hit_rate=_hit_rate(served, size),
        hit_rate_hbm=_share(served, lambda r: r.device, size),
        hit_rate_pool=far if cluster.memory == "pool" else 0.0,
        hit_rate_local=far if cluster.memory == "split" else 0.0,
        hit_rate_tokens=saved / max(1, sum(r.input for r in served)),
        tokens_saved=saved,
        prefill_saved_s=sum(
            options.model.prefill_ms(r.input)
            - options.model.prefill_ms(r.input - _cached_tokens(r, size), _cached_tokens(r, size))
            for r in served
        )
        / 1e3,
        hit_rate_before=_hit_rate(early, size) if early else None,
        hit_rate_after=_hit_rate(late, size) if late else None,
        ttft_mean_before_s=_mean_ttft(early),
        ttft_mean_after_s=_mean_ttft(late),
        load_imbalance=max(busy) / fmean(busy) if any(busy) else 1.0,
        throughput_per_s=len(served) / cluster.end_s if cluster.end_s else 0.0,
        link_read_utilisation=read,
        link_write_utilisation=write,
        onboard_ms=1e3 * network.read.busy_s / copies,
        onboard_queue_ms=1e3 * network.read.waited_s / copies,
        workers=options.workers,
        workers_most=len(cluster.engines),
        worker_hours=cluster.worker_s / 3600,
        capacity_bytes=options.pool_bytes if cluster.memory == "pool" else local,
    )


def mean_row(rows: Sequence[Row]) -> Row:
    """Make the row of means over the seeds. A figure's mean covers the runs that have it."""
    means: dict[str, Any] = {}
    spread = {}
    for field in dataclasses.fields(Row):
        column = [getattr(row, field.name) for row in rows]
        values = [value for value in column if isinstance(value, int | float)]
        if values and field.name not in _SAME:
            means[field.name] = fmean(values)
            spread[field.name] = Spread(min(values), max(values), pstdev(values))
    return dataclasses.replace(rows[0], **means, seed=None, spread=spread)


def _cached_tokens(request: Request, size: int) -> int:
    """Return the tokens of a prompt that did not have to be computed."""
    return (request.device + request.far) * size


def _share(requests: Sequence[Request], count: Callable[[Request], int], size: int) -> float:
    requested = sum(-(-request.input // size) for request in requests)
    return sum(count(request) for request in requests) / max(1, requested)


def _hit_rate(requests: Sequence[Request], size: int) -> float:
    return _share(requests, lambda request: request.device + request.far, size)


def _mean_ttft(requests: Sequence[Request]) -> float | None:
    return fmean(r.first_token - r.arrival for r in requests) if requests else None


def _figure(values: NDArray[np.float64], of: Callable[[Any], Any]) -> float | None:
    return float(of(values)) if len(values) else None


def _percentile(values: NDArray[np.float64], percent: int) -> float | None:
    return _figure(values, lambda numbers: np.percentile(numbers, percent))


def goodput(points: Sequence[tuple[float, float]], objective_s: float) -> float | None:
    """Return the highest load at which the time to first token meets the objective. The points are
    loads with the times at them; between these it is interpolated. None: not even the lowest load
    meets it.
    """
    held: tuple[float, float] | None = None
    for load, time_s in sorted(points):
        if time_s > objective_s:
            if held is None:
                return None
            part = (objective_s - held[1]) / (time_s - held[1])
            return held[0] + part * (load - held[0])
        held = (load, time_s)
    return held[0] if held else None


def found_shares(trace: Trace, capacities: Sequence[int]) -> list[float]:
    """Return the share of all blocks of the prompts, tails included, that a cache of each capacity
    (in blocks of the trace) finds. Requests run one after another, and the block that was used
    least recently is evicted first.
    """
    if not trace.id_count:
        return [0.0] * len(capacities)
    base = ffi.from_buffer("uint32_t[]", trace.ids)
    blocks = sum(-(-tokens // trace.block_tokens) for tokens in trace.input_tokens)
    shares = []
    for capacity in capacities:
        tier, hits = SimulatedTier(trace.id_count, capacity), 0
        for first, count in zip(trace.first, trace.count, strict=True):
            hits += tier.lead(base + first, count)
            tier.put(base + first, count)
        shares.append(hits / blocks)
    return shares
