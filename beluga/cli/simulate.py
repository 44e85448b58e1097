# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga simulate``: compares routing policies on a trace."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from beluga.choices import (
    COST_MODELS,
    DEFAULT_COST_MODEL,
    MEMORIES,
    PRESETS,
    SIMULATED_COUNT_MAX,
    SIMULATED_ENGINES,
    TIER_ORDERS,
)
from beluga.cli.frame import Argument, BadParameter, Legend, Option, OptionGroup, explains
from beluga.cli.options import (
    Json,
    Wide,
    as_bad_value,
    check_output,
    size,
    write_whole,
)
from beluga.cli.output import origin, print_json, print_note, print_table, progress
from beluga.cli.routing_options import (
    LIST,
    as_bad_policy,
    complete_policy,
    link_options,
    list_policies,
)
from beluga.cli.trace_options import TraceOptions, read_named, trace_options
from beluga.errors import RouterError, SimulateError

if TYPE_CHECKING:  # slow to import
    from beluga.simulate import Options, Row, Scale, Trace

_SIZE_END = 1 << 63  # as in other commands
_DECIMAL = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])B", re.IGNORECASE)
_SCALE = re.compile(r"([0-9]{1,12}(?:\.[0-9]+)?):([+-][1-9][0-9]{0,11})")
_NAMED = {"pool": "--pool-bytes"}  # options whose name differs from their field
_RUN = {
    "policy": ("policy", "the routing policy"),
    "memory": ("memory", "pool: all workers share it; split: each worker has its own part"),
    "speed": ("speed", "the rate of requests relative to the trace"),
}
_COLUMNS = {
    "ttft_mean_s": ("TTFT s", "the mean time to the first token, in seconds"),
    "ttft_p50_s": ("p50", "its median"),
    "ttft_p90_s": ("p90", "its 90th percentile"),
    "ttft_p99_s": ("p99", "its 99th percentile"),
    "tpot_mean_ms": ("TPOT ms", "the mean time per later token, in milliseconds"),
    "hit_rate": ("hits", "the share of the prompts' blocks that hit, 0 to 1"),
    "hit_rate_hbm": ("HBM", "the share that hit in the worker's own HBM"),
    "hit_rate_pool": ("pool", "the share that hit in the pool"),
    "hit_rate_local": ("DRAM", "the share that hit in the worker's own DRAM"),
    "load_imbalance": ("imbalance", "the busiest worker's time relative to the mean; 1 is even"),
    "rejects": ("rejects", "the number of refused requests"),
    "link_read_utilisation": ("link", "the utilization of a worker's read bandwidth"),
    "onboard_queue_ms": (
        "queue ms",
        "the time that a request's fetch waits for others on the links",
    ),
}
_SCALED = {
    "hit_rate_before": ("hits before", "hits of requests before workers were added or removed"),
    "hit_rate_after": ("hits after", "hits of later requests"),
    "ttft_mean_before_s": (
        "TTFT before",
        "TTFT s of requests before workers were added or removed",
    ),
    "ttft_mean_after_s": ("TTFT after", "TTFT s of later requests"),
}
_PLANNED = {
    "workers_most": ("workers", "the largest number of workers"),
    "worker_hours": ("worker hours", "the total time of all workers, in hours"),
}
_LEGEND = Legend((_RUN | _COLUMNS | _SCALED | _PLANNED).values())
# The columns that a narrow table drops, in this order.
_SPARE = (
    *("queue ms", "link", "imbalance", "DRAM", "pool", "HBM", "rejects", "p50", "TPOT ms", "p99"),
    *("p90", "hits", "worker hours"),
)


def _capacity(text: str | int) -> int:
    """Parse a size. Unlike in other commands, decimal units such as 2TB and 1.5GB are also
    valid.
    """
    if match := _DECIMAL.fullmatch(str(text).strip()):
        value = float(match[1]) * 1000.0 ** ("KMGT".index(match[2].upper()) + 1)
        if value >= _SIZE_END:
            raise BadParameter(f"'{text}' is too much; a size is less than 8388608T")
        return int(value)
    return size(text)


def _policies(text: str) -> list[str]:
    """Parse policies: all, or some separated by commas."""
    if text == LIST:
        list_policies()
    from beluga.router import POLICIES, read_policies

    if text == "all":
        return list(POLICIES)
    with as_bad_policy():
        return read_policies(text)


def _cluster(
    workers: Annotated[int, Option(min=1, max=SIMULATED_COUNT_MAX)] = 8,
    pool: Annotated[int | None, Option("--pool-bytes", parser=_capacity)] = None,
    local: Annotated[int | None, Option(parser=_capacity)] = None,
    hbm: Annotated[int | None, Option(parser=_capacity)] = None,
    adapters: Annotated[int | None, Option(min=1, max=SIMULATED_COUNT_MAX)] = None,
    devices: Annotated[int | None, Option(min=1, max=SIMULATED_COUNT_MAX)] = None,
    model: Annotated[str, Option(words=COST_MODELS)] = DEFAULT_COST_MODEL,
    engine: Annotated[str, Option(words=SIMULATED_ENGINES)] = "chunked",
    eviction: Annotated[str, Option(words=TIER_ORDERS)] = "lru",
) -> dict[str, Any]:
    """Return the cluster and its model: arguments of Options.

    --workers: The number of workers (engines).
    --pool-bytes BYTES: The size of the shared pool. Default: 1950 GiB.
    --local BYTES: Each worker's own DRAM in runs without a pool. Default: its part of the pool's
        size.
    --hbm BYTES: Each worker's HBM for the KV cache.
    --adapters: The number of CXL adapters (O8). Default: one per two workers.
    --devices: The number of the pool's memory devices. Default: one per 256 GiB.
    --model NAME: The model and its GPU: {words}.
    --engine: The batching of engines: {words}. Serial engines only prefill.
    --eviction: The eviction order: {words}.
    """
    return dict(locals())


@explains(_LEGEND)
def simulate(
    trace: Annotated[Path | None, Argument()] = None,
    policy: Annotated[str, Option(completes=complete_policy)] = "all",
    memory: Annotated[str, Option(words=(*MEMORIES, "both"))] = "both",
    *,
    cluster: Annotated[dict[str, Any], OptionGroup(_cluster)],
    links: Annotated[dict[str, Any], OptionGroup(link_options)],
    speed: str = "1",
    seeds: Annotated[int, Option(min=1, max=1000)] = 1,
    processes: Annotated[int | None, Option(min=1, max=SIMULATED_COUNT_MAX)] = None,
    scale_at: str | None = None,
    planner: Annotated[int | None, Option(min=1, max=SIMULATED_COUNT_MAX)] = None,
    ttft_goal: Annotated[float | None, Option(min=0.001)] = None,
    reading: Annotated[TraceOptions, OptionGroup(trace_options)],
    preset: Annotated[str | None, Option(words=PRESETS)] = None,
    report: Path | None = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Simulate a cluster that serves a trace, under every policy, with a pool and without.

    TRACE: The trace: a file, or a directory of weka's sessions. Default: generated, synthetic
        conversations.
    --policy NAME[:KEY=VALUE,...],...: The policies to run, such as
        least-cost,linear:shared_credit=1; default (the gateway's), or all. `--policy list` prints
        all policies with their settings.
    --memory: Simulate a shared pool (pool), split DRAM (split), or both.
    --speed X[,X...]: The rate of requests relative to the trace. Give several, separated by commas,
        to run one after another.
    --seeds: The number of runs of each case; --json has their spread.
    --processes: The number of parallel runs, each in its own process. Default: one per CPU. The
        results do not depend on it.
    --scale-at T:+N: Add N workers (or remove them, -N) at second T.
    --planner: Let the planner add and stop workers, up to N.
    --ttft-goal SECONDS: The objective of the planner and the report: seconds to the first token.
    --preset: feasibility is the setup of the reference replay; it overrides other options.
    --report FILE: Write a page that compares all policies to this file (.html).
    """
    from beluga.router import Goals
    from beluga.simulate import PRESETS as KNOWN
    from beluga.simulate import make_report, unequal_memory
    from beluga.simulate import simulate as run_all

    speeds = _speeds(speed)
    policies, memories = _policies(policy), MEMORIES if memory == "both" else (memory,)
    options_at = partial(
        _options,
        **cluster,
        **links,
        scale=_scale(scale_at),
        goals=None if planner is None else Goals(ttft_s=ttft_goal, workers_max=planner),
        ttft_goal_s=ttft_goal,
    )
    cases = [options_at(speed=each) for each in speeds]
    if preset is not None:
        cases = [KNOWN[preset](case) for case in cases]
    if report is not None:
        if report.suffix != ".html":
            raise BadParameter(f"--report {str(report)!r} is not .html; give such a name")
        check_output(report)
    if text := unequal_memory(cases[0]):
        print_note(f"memory is not equal: {text}")
    loaded = read_named(trace, reading)
    run_count = len(cases) * len(policies) * len(memories) * seeds
    what = f"simulating {run_count} runs of {len(loaded):,} requests"
    with progress(what, shown=not json) as advance:
        rows = run_all(
            loaded,
            cases,
            policies=policies,
            memories=memories,
            seeds=seeds,
            courses=report is not None,
            processes=processes or os.cpu_count() or 1,
            advance=advance,
        )
    if report is not None:
        write_whole(report, make_report(loaded, cases[0], rows, origin()))
    if json:
        read = None if loaded.reading is None else loaded.reading.facts()
        print_json([dataclasses.asdict(row) | {"read": read} for row in rows])
    else:
        _show(loaded, rows, cases[0], speeds, seeds, wide=wide)


def _options(*, model: str, **values: Any) -> Options:
    """Return the options of the simulation. Field names in its errors are replaced by options."""
    from beluga.router import costs
    from beluga.simulate import Options

    with as_bad_value(RouterError):
        costs_of = costs.model_costs(model)
    try:
        return Options(model=costs_of, **values)
    except SimulateError as error:
        name, space, problem = str(error).partition(" ")
        option = _NAMED.get(name, f"--{name.replace('_', '-')}") if name in values else name
        raise BadParameter(f"{option}{space}{problem}") from None


def _speeds(text: str) -> list[float]:
    """Parse speeds: 1,1.5,2."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise BadParameter(
            f"--speed is {text!r}; give a number, or several as in 1,1.5,2"
        ) from None


def _show(
    trace: Trace,
    rows: Sequence[Row],
    options: Options,
    speeds: Sequence[float],
    seeds: int,
    *,
    wide: bool,
) -> None:
    rows = [row for row in rows if row.seed is None]
    loads = ", ".join(f"{speed:g}x" for speed in speeds)
    runs = "1 seed" if seeds == 1 else f"{seeds} seeds"
    title = f"{trace.name}: {len(trace):,} requests at {loads}, {runs}"
    shown = {
        **{name: _RUN[name] for name in _RUN if name != "speed" or len(speeds) > 1},
        **_COLUMNS,
        **(_SCALED if options.scale else {}),
        **(_PLANNED if options.goals else {}),
    }
    print_table(
        _LEGEND,
        [[getattr(row, name) for name in shown] for row in rows],
        columns=[heading for heading, _ in shown.values()],
        title=title,
        spare=_SPARE,
        wide=wide,
    )
    _warn_of_queues(trace, rows)


def _scale(text: str | None) -> Scale | None:
    if text is None:
        return None
    match = _SCALE.fullmatch(text)
    if match is None:
        raise BadParameter(f"--scale-at {text!r} is not T:+N; write 600:+2 or 600:-1")
    from beluga.simulate import Scale

    return Scale(float(match[1]), int(match[2]))


def _warn_of_queues(trace: Trace, rows: Sequence[Row]) -> None:
    """Report saturated runs, in which the time to first token depends on the length of the
    trace.
    """
    late = [row for row in rows if row.saturated]
    if not late or trace.duration_s <= 0:
        return
    worst = max(late, key=lambda row: row.ttft_p99_s or 0)
    print_note(
        f"saturated: in {len(late)} of {len(rows)} runs requests queue for minutes, up to "
        f"{(worst.ttft_p99_s or 0) / 60:.1f} (p99 of {worst.policy}, {worst.memory}): "
        f"{worst.speed * len(trace) / trace.duration_s:.3g} requests arrive in a second, and "
        f"{worst.throughput_per_s:.3g} are served; try a smaller --speed or more --workers"
    )
