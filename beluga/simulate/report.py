# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The report of a comparison: one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from beluga import page
from beluga.pool import show_size
from beluga.simulate.charts import NAMES, courses, name_of, rate_of, side_by_side, sweep
from beluga.simulate.options import Options, unequal_memory
from beluga.simulate.result import Row
from beluga.simulate.summary import OBJECTIVE_S, Summary, headline, summarize, sustained_load
from beluga.simulate.trace import Trace

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
    found = [_load_text(trace, means, row, objective_s) for row in shown]
    than = f"p90 within {page.seconds(objective_s)}"
    if len(found) > 1:
        than += f"; {found[1]} without the pool"
    return page.Card("Load within the objective", found[0], than)


def _load_text(trace: Trace, means: Sequence[Row], row: Row, objective_s: float) -> str:
    """Return the load that a run's policy sustains; the highest that was run is a lower bound."""
    speed = sustained_load(means, row.memory, row.policy, objective_s)
    if speed is None:
        return "none that was run"
    rate = rate_of(trace, speed)
    text = f"{speed:.3g}x" if math.isnan(rate) else _per_second(rate)
    return f"≥ {text}" if speed == max(one.speed for one in means) else text


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
        some = next(row for row in own if row)
        body.append([policy, NAMES[memory], *cells, _load_text(trace, means, some, objective_s)])
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
