# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The report of a comparison: one self-contained HTML page, with a load and the two runs that stand
for it, a sentence, and charts: policies side by side, the course of a run, and a sweep of loads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from beluga import page
from beluga.pool import show_size
from beluga.router import DEFAULT_POLICY
from beluga.simulate.options import MEMORIES, Options, unequal_memory
from beluga.simulate.result import Row, goodput
from beluga.simulate.trace import Trace

# The default objective of a report for the p90 of the time to first token.
OBJECTIVE_S = 5.0
_ALIKE = 1.05  # two times with a smaller ratio count as equal


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One load, with the run on the pool and the run on split DRAM that stand for it."""

    speed: float
    pool: Row | None
    split: Row | None

    @property
    def shown(self) -> Row | None:
        """The run whose figures are shown first."""
        return self.pool or self.split


def at_speed(rows: Sequence[Row], memory: str, speed: float) -> list[Row]:
    """Return the means on a memory at a load."""
    return [row for row in rows if row.seed is None and (row.memory, row.speed) == (memory, speed)]


def summarize(rows: Sequence[Row], objective_s: float) -> Summary:
    """Choose the highest load at which some run on a pool (or, without one, on split DRAM) meets
    the objective, else the lowest load. The pool is judged by the default policy, where it ran;
    split DRAM by its best, so that it is compared at its strongest.
    """
    means = [row for row in rows if row.seed is None]
    speeds = sorted({row.speed for row in means}) or [1.0]
    memory = "pool" if any(row.memory == "pool" for row in means) else "split"
    held = [
        row.speed
        for row in means
        if row.memory == memory and row.ttft_p90_s is not None and row.ttft_p90_s <= objective_s
    ]
    speed = max(held, default=speeds[0])
    pool = at_speed(means, "pool", speed)
    usual = [row for row in pool if row.policy == DEFAULT_POLICY]
    return Summary(speed, _best(usual or pool), _best(at_speed(means, "split", speed)))


def _best(rows: Sequence[Row]) -> Row | None:
    served = [row for row in rows if row.ttft_mean_s is not None]
    return min(served, key=lambda row: row.ttft_mean_s or 0.0, default=None)


def sustained_load(
    rows: Sequence[Row], memory: str, policy: str, objective_s: float
) -> float | None:
    """Return the load that a policy sustains within the objective, as a multiple of the trace's."""
    points = [
        (row.speed, row.ttft_p90_s)
        for row in rows
        if row.seed is None and (row.memory, row.policy) == (memory, policy)
        if row.ttft_p90_s is not None
    ]
    return goodput(points, objective_s)


def headline(summary: Summary, workers: int) -> str:
    """Return the main result of the comparison as a sentence."""
    engines = "one engine begins" if workers == 1 else f"{workers} engines begin"
    pool, split = summary.pool, summary.split
    if pool is None and split is None:
        return "No request was served."
    only = pool or split
    if pool is None or split is None:
        setting = "With a shared pool" if pool else "Without a shared pool"
        late = ", and cannot keep up" if only and only.saturated else ""
        return f"{setting} {engines} to answer after {_time(only)} on average at this load{late}."
    begins = "the same engine begins" if workers == 1 else f"the same {engines}"
    if pool.saturated and split.saturated:
        return (
            f"At this load {workers} engines cannot keep up: requests queue for minutes, "
            f"{_time(pool)} on average with a shared pool and {_time(split)} without."
        )
    ratio = (split.ttft_mean_s or 0.0) / (pool.ttft_mean_s or 1.0)
    if 1 / _ALIKE <= ratio <= _ALIKE:
        return (
            f"A shared pool makes no difference here: {begins} to answer after {_time(pool)} "
            f"with it and {_time(split)} without."
        )
    if ratio < 1:
        return (
            f"A shared pool does not help here: {begins} to answer after {_time(pool)} with it "
            f"and {_time(split)} without."
        )
    late = " Without it they cannot keep up." if split.saturated else ""
    return (
        f"With a shared pool {begins} to answer after {_time(pool)} instead of {_time(split)} "
        f"at this load.{late}"
    )


def _time(row: Row | None) -> str:
    return page.seconds((row and row.ttft_mean_s) or 0.0)


NAMES = {"pool": "shared pool", "split": "split DRAM"}
_COLOR = {"pool": 0, "split": 1}
# field, title, the axis's label, how a value is shown
_FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("ttft_mean_s", "Mean time to first token", "time", page.seconds),
    ("ttft_p90_s", "90th percentile of the time to first token", "time", page.seconds),
    ("ttft_p99_s", "99th percentile of the time to first token", "time", page.seconds),
    ("tpot_mean_ms", "Time per further token", "time", lambda ms: page.seconds(ms / 1e3)),
    ("hit_rate", "Prompt blocks that were found", "share of all blocks", page.percent),
    ("load_imbalance", "Busiest engine, compared with the mean", "ratio", page.plain),
)


def side_by_side(rows: Sequence[Row], speed: float) -> list[page.BarChart]:
    """Return bars for each policy, on the pool and on split DRAM, at one load."""
    memories = [memory for memory in MEMORIES if at_speed(rows, memory, speed)]
    shown = {(row.policy, row.memory): row for m in memories for row in at_speed(rows, m, speed)}
    policies = list(dict.fromkeys(policy for policy, _ in shown))
    seeds = {row.seed for row in rows} - {None}
    many = any(row.spread and len(seeds) > 1 for row in shown.values())
    return [
        page.BarChart(
            title=title,
            axis=page.Axis(label, show=show),
            series=[NAMES[memory] for memory in memories],
            groups=[
                page.BarGroup(
                    policy,
                    [
                        _bar(shown[policy, memory], field, at)
                        for at, memory in enumerate(memories)
                        if (policy, memory) in shown
                    ],
                )
                for policy in policies
            ],
            spread="from the least to the greatest of the seeds" if many else "",
        )
        for field, title, label, show in _FIGURES
        if any(getattr(row, field) for row in shown.values())
    ]


def _bar(row: Row, field: str, series: int) -> page.Bar:
    spread = (row.spread or {}).get(field)
    ends = (spread.min, spread.max) if spread else (None, None)
    return page.Bar(getattr(row, field), series, *ends)


def courses(summary: Summary) -> list[page.LineChart]:
    """Return curves over the simulated time of the two runs that are compared."""
    runs = [row for row in (summary.pool, summary.split) if row and row.course]
    longest = max((row.course.end_s[-1] for row in runs if row.course), default=0.0)
    minutes = longest > 600
    axis = page.Axis(f"simulated time, {'minutes' if minutes else 'seconds'}")
    shown: tuple[tuple[str, str, page.Axis, str], ...] = (
        ("waiting", "Requests that wait for their first token",
         page.Axis("requests"), "On average over each interval; these are queued or prefilled."),
        ("hit_rate", "Prompt blocks that were found", page.Axis("share", show=page.percent),
         "Of the requests that arrived in each interval."),
        ("ttft_mean_s", "Mean time to first token", page.Axis("", show=page.seconds),
         "Of the requests that arrived in each interval."),
    )  # fmt: skip
    return [
        page.LineChart(
            title=title,
            note=note,
            x=axis,
            y=y,
            lines=[
                page.Line(name_of(row), list(_points(row, field, minutes)), _COLOR[row.memory])
                for row in runs
            ],
        )
        for field, title, y, note in shown
        if runs
    ]


def _points(row: Row, field: str, minutes: bool) -> Iterator[tuple[float, float | None]]:
    course = row.course
    if course is None:
        return
    step = course.end_s[0]
    for end_s, value in zip(course.end_s, getattr(course, field), strict=True):
        yield (end_s - step / 2) / (60 if minutes else 1), value


def name_of(row: Row) -> str:
    """Return a name of a run for a key."""
    return f"{NAMES[row.memory]} ({row.policy})"


def rate_of(trace: Trace, speed: float) -> float:
    """Return the requests that arrive in a second."""
    return len(trace) * speed / trace.duration_s if trace.duration_s > 0 else math.nan


def sweep(
    rows: Sequence[Row], trace: Trace, summary: Summary, objective_s: float
) -> list[page.LineChart]:
    """Return curves over the load of the policies that are compared."""
    chosen = [row for row in (summary.pool, summary.split) if row]
    speeds = sorted({row.speed for row in rows})
    loads = {speed: rate_of(trace, speed) for speed in speeds}
    x = page.Axis("requests that arrive in a second", ticks=[loads[speed] for speed in speeds])
    charts = []
    for field, title, y in (
        ("ttft_mean_s", "Mean time to first token", page.Axis("", log=True, show=page.seconds)),
        ("ttft_p90_s", "90th percentile of the time to first token",
         page.Axis("", log=True, show=page.seconds)),
        ("throughput_per_s", "Requests served", page.Axis("requests per second")),
    ):  # fmt: skip
        lines = [_over_load(rows, row, field, loads) for row in chosen]
        ends = (loads[speeds[0]], loads[speeds[-1]])
        if field == "ttft_p90_s":
            aim = [(load, objective_s) for load in ends]
            lines.append(page.Line(f"objective, {page.seconds(objective_s)}", aim, 6, dashed=True))
        charts.append(page.LineChart(title=title, x=x, y=y, lines=lines))
    return charts


def _over_load(
    rows: Sequence[Row], chosen: Row, field: str, loads: dict[float, float]
) -> page.Line:
    points = [
        (load, getattr(row, field))
        for speed, load in loads.items()
        for row in at_speed(rows, chosen.memory, speed)
        if row.policy == chosen.policy
    ]
    return page.Line(name_of(chosen), points, _COLOR[chosen.memory])


_COLUMNS = {
    "TTFT mean, s": "ttft_mean_s",
    "p50, s": "ttft_p50_s",
    "p90, s": "ttft_p90_s",
    "p99, s": "ttft_p99_s",
    "per further token, ms": "tpot_mean_ms",
    "found": "hit_rate",
    "in HBM": "hit_rate_hbm",
    "in the pool": "hit_rate_pool",
    "in own DRAM": "hit_rate_local",
    "tokens saved": "tokens_saved",
    "GPU-s saved": "prefill_saved_s",
    "busiest / mean": "load_imbalance",
    "refused": "rejects",
    "served /s": "throughput_per_s",
    "link read": "link_read_utilisation",
    "onboarding, ms": "onboard_ms",
    "of it queued, ms": "onboard_queue_ms",
}
_SHARES = ("hit_rate", "hit_rate_hbm", "hit_rate_pool", "hit_rate_local", "link_read_utilisation")
_UNMODELED = (
    "The simulation has no blocks of answers (traces do not name them), no preemption, no index "
    "that lags behind, and no transfer that fails."
)


def make_report(
    trace: Trace,
    options: Options,
    rows: Sequence[Row],
    origin: Mapping[str, str] | None = None,
) -> bytes:
    """Return the page. ``origin`` has names and values that describe its origin, such as the
    command.
    """
    return _html(trace, options, rows, origin or {}).encode()


def _title(trace: Trace, options: Options, speed: float) -> str:
    return (
        f"{trace.name} at {speed:g}x: {options.workers} workers, {options.model.name}, "
        f"{options.engine} engines"
    )


def _html(trace: Trace, options: Options, rows: Sequence[Row], origin: Mapping[str, str]) -> str:
    objective_s = options.ttft_goal_s or OBJECTIVE_S
    means = [row for row in rows if row.seed is None]
    summary = summarize(rows, objective_s)
    several = len({row.speed for row in means}) > 1
    parts = [
        *map(page.warning, _warnings(means, options)),
        page.text(_compared(trace, summary)),
        page.cards(list(_cards(trace, means, summary, objective_s, several))),
    ]
    if curves := courses(summary):
        parts.append(page.section("Over time", *map(page.chart, curves)))
    parts.append(
        page.section(
            f"Policies side by side, at {summary.speed:g}x",
            *map(page.chart, side_by_side(rows, summary.speed)),
        )
    )
    if several:
        parts.append(_loads(trace, rows, means, summary, objective_s))
    parts += [
        page.section("All figures", _table(means, several)),
        page.section("What was simulated", page.facts(_facts(trace, options, rows, origin))),
        page.section("What to keep in mind", page.notes(list(_notes(rows, options)))),
    ]
    return page.page(
        _title(trace, options, summary.speed), headline(summary, options.workers), *parts
    )


def _warnings(means: Sequence[Row], options: Options) -> Iterator[str]:
    late = [row for row in means if row.saturated]
    if late:
        worst = max(late, key=lambda row: row.ttft_p99_s or 0)
        yield (
            f"Saturated: in {len(late)} of {len(means)} runs requests queue for minutes, up to "
            f"{page.seconds(worst.ttft_p99_s or 0)} (p99 of {worst.policy} on "
            f"{NAMES[worst.memory]} at {worst.speed:g}x). Such times grow with the length of the "
            "trace; they do not show how fast an engine responds."
        )
    if text := unequal_memory(options):
        yield f"The two memories are not equal: {text}."


def _compared(trace: Trace, summary: Summary) -> str:
    pace = "the trace's own speed"
    pace = pace if summary.speed == 1 else f"{summary.speed:g} times {pace}"
    rate = rate_of(trace, summary.speed)
    load = f"Requests arrive at {pace}"
    load += "" if math.isnan(rate) else f", {page.plain(rate)} in a second"
    runs = [name_of(row) for row in (summary.pool, summary.split) if row]
    compared = f"These figures compare {' with '.join(runs)}." if len(runs) > 1 else ""
    return f"Simulated. {load}. {compared}"


def _cards(
    trace: Trace, means: Sequence[Row], summary: Summary, objective_s: float, several: bool
) -> Iterator[page.Card]:
    row, other = summary.shown, summary.split if summary.pool else None
    if row is None:
        return

    def card(name: str, field: str, show: Callable[[float], str], more: str = "") -> page.Card:
        value = getattr(row, field)
        than = [more] if more else []
        if other is not None and getattr(other, field) is not None:
            than.append(f"{show(getattr(other, field))} without the pool")
        return page.Card(name, "-" if value is None else show(value), "; ".join(than))

    requested = sum(trace.input_tokens)
    yield card("Mean time to first token", "ttft_mean_s", page.seconds)
    yield card("90th percentile of it", "ttft_p90_s", page.seconds)
    rate = rate_of(trace, summary.speed)
    yield card(
        "Requests served", "throughput_per_s", _per_second,
        "" if math.isnan(rate) else f"{_per_second(rate)} arrive",
    )  # fmt: skip
    yield card(
        "Prompt blocks found", "hit_rate", page.percent,
        f"an unlimited cache would hit {page.percent(trace.ideal_hit_rate)}",
    )  # fmt: skip
    yield card(
        "Prompt tokens not computed", "tokens_saved", lambda count: page.quantity(count, ""),
        f"of {page.quantity(requested, '')}",
    )  # fmt: skip
    yield card(
        "GPU time saved", "prefill_saved_s", lambda saved: f"{page.plain(saved)} GPU-s",
        "of prefill, compared with no cache",
    )  # fmt: skip
    if several:
        yield _load_card(trace, means, summary, objective_s)
    if row.rejects:
        yield card("Requests refused", "rejects", page.plain)


def _per_second(rate: float) -> str:
    return f"{page.plain(rate)}/s"


def _load_card(
    trace: Trace, means: Sequence[Row], summary: Summary, objective_s: float
) -> page.Card:
    shown = [row for row in (summary.pool, summary.split) if row]
    loads = [_load_text(trace, means, row, objective_s) for row in shown]
    than = f"p90 within {page.seconds(objective_s)}"
    if len(loads) > 1:
        than += f"; {loads[1]} without the pool"
    return page.Card("Load within the objective", loads[0], than)


def _load_text(trace: Trace, means: Sequence[Row], row: Row, objective_s: float) -> str:
    """Return the load that a run's policy sustains; the highest that was run is a lower bound."""
    speed = sustained_load(means, row.memory, row.policy, objective_s)
    if speed is None:
        return "none that was run"
    rate = rate_of(trace, speed)
    text = f"{speed:.3g}x" if math.isnan(rate) else _per_second(rate)
    return f"≥ {text}" if speed == max(mean.speed for mean in means) else text


def _loads(
    trace: Trace, rows: Sequence[Row], means: Sequence[Row], summary: Summary, objective_s: float
) -> str:
    policies = list(dict.fromkeys((row.policy, row.memory) for row in means))
    speeds = sorted({row.speed for row in means})
    first = {(row.policy, row.memory, row.speed): row for row in means}
    body = []
    for policy, memory in policies:
        own = [first.get((policy, memory, speed)) for speed in speeds]
        cells = [
            "-" if row is None or row.ttft_p90_s is None else page.seconds(row.ttft_p90_s)
            for row in own
        ]
        seen = next(row for row in own if row)
        body.append([policy, NAMES[memory], *cells, _load_text(trace, means, seen, objective_s)])
    head = ["policy", "memory", *(f"p90 at {speed:g}x" for speed in speeds), "carries"]
    name = f"Loads sustained with a p90 of the time to first token in {page.seconds(objective_s)}"
    return page.section(
        "How much load it sustains",
        page.text(f"{name}; a load between two that were run is interpolated."),
        *map(page.chart, sweep([r for r in rows if r.seed is None], trace, summary, objective_s)),
        page.table(head, body, name),
    )


def _table(means: Sequence[Row], several: bool) -> str:
    head = ["policy", "memory", *(["load"] if several else []), *_COLUMNS]
    body = [
        [
            row.policy,
            NAMES[row.memory],
            *([f"{row.speed:g}x"] if several else []),
            *(_cell(field, getattr(row, field)) for field in _COLUMNS.values()),
        ]
        for row in means
    ]
    return page.table(head, body, "All figures")


def _cell(field: str, value: float | None) -> str:
    if value is None:
        return "-"
    return page.percent(value) if field in _SHARES else page.plain(value)


def _facts(
    trace: Trace, options: Options, rows: Sequence[Row], origin: Mapping[str, str]
) -> dict[str, str]:
    speeds = sorted({row.speed for row in rows}) or [options.speed]
    seeds = len({row.seed for row in rows} - {None}) or 1
    model, hbm = options.model, options.hbm_bytes / 1e9
    return {
        "Trace": f"{trace.name}: {len(trace):,} requests in {page.seconds(trace.duration_s)}, "
        f"{sum(trace.input_tokens):,} prompt tokens, {trace.block_tokens} tokens a block",
        **({} if trace.reading is None else {"Trace read as": str(trace.reading)}),
        "Load": ", ".join(f"{speed:g}x" for speed in speeds) + " the trace's own speed",
        "Engines": f"{options.workers} workers with {options.engine} engines, {model.name}, "
        f"{hbm:.0f} GB of HBM for KV data each",
        "Shared pool": f"{options.pool_bytes / 1e12:.2f} TB ({show_size(options.pool_bytes)}) at "
        f"{options.path_speed / 1e9:g} GB/s a worker, {options.adapter_count} adapters, "
        f"{options.device_count} devices",
        "Split DRAM": f"{options.local_bytes / 1e9:.0f} GB of each worker's own DRAM at "
        f"{options.local_bandwidth / 1e9:g} GB/s",
        "Eviction": options.eviction,
        "Seeds": f"0 to {seeds - 1}; figures are means" if seeds > 1 else "0",
        "Costs of the model": model.source,
        **origin,
    }


def _notes(rows: Sequence[Row], options: Options) -> Iterator[str]:
    yield (
        "Everything on this page is computed. No GPU, no engine and no CXL memory was used, and "
        "the machine that computed it does not matter for the figures."
    )
    yield (
        "Router, policies and eviction are the product's own code. Prefill, decode and copies take "
        "times that were fitted to measurements of others (see the costs of the model)."
    )
    yield _UNMODELED
    yield (
        "GPU time saved is the prefill time of the tokens that were found, if each prompt were "
        "computed alone; an engine counts as one GPU."
    )
    yield (
        "The shared pool is judged with the default policy where it ran, and split DRAM with its "
        "best policy."
    )
    if len({row.seed for row in rows} - {None}) < 2:
        yield (
            "There was one seed, so differences of a few per cent may be chance; --seeds 5 shows "
            "the spread."
        )
    if options.engine == "serial":
        yield "Serial engines only prefill: there is no time per further token."
