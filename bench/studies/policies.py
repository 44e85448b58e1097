# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""All routing policies at every load.

``python -m beluga_bench.studies.policies TRACES OUT.json PAGE.md``.

Results are computed, not measured. The command writes the results, the tables of the page (between
its two markers) and a plot for each trace in ``images/`` beside it. ``--smoke`` instead of TRACES
runs a small generated trace. A load is a multiple of the trace's own speed. With ``--again`` before
TRACES, the rows of OUT.json are kept, and only the default policy and what is missing are run. This
is enough after a change of only the default policy, because simulations are deterministic.

Generated traces have properties that the recorded ones lack. One of them, long answers, showed that
least-cost has to count decode steps, so it is no longer a held-out trace. The last three are from
an audit of least-cost. They showed that space that is free now is not free for later requests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

from beluga import page as page_charts
from beluga.child import run_program
from beluga.router import DEFAULT_POLICY, POLICIES
from beluga.simulate import (
    MEMORIES,
    Options,
    Trace,
    TraceEntry,
    goodput,
    load_trace,
    make_trace,
    simulate,
)

from ..harness.recorded import computed, read_record, write_record
from .picture import picture

CHECK_SEEDS = 5
_SEEDS = 1  # of policies and memories that the check does not need
_CLOSE = 1.03  # policies within this ratio of the best are run with all seeds
# Above saturation the best mean TTFT is this many times the one at the lowest load.
_SATURATED = 10.0
BEGIN, END = "<!-- policies: begin -->", "<!-- policies: end -->"


class Case(NamedTuple):
    """A trace, its loads, and its objective for the p90 TTFT in seconds."""

    trace: Trace
    loads: Sequence[float]
    objective_s: float


class Result(NamedTuple):
    """The means over the seeds of one policy at one load."""

    trace: str
    load: float
    memory: str
    policy: str
    seeds: int
    ttft_mean_s: float
    ttft_mean_error_s: float  # the standard error; 0 of one seed
    ttft_p90_s: float
    hit_rate: float
    hit_rate_hbm: float
    rejects: float


# Results that need no run, by trace, load, memory and policy.
Known = Mapping[tuple[str, float, str, str], Result]


def cases(folder: Path) -> Iterator[Case]:
    """Yield the recorded traces, then the generated ones."""
    loads = (0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5)
    yield Case(load_trace(folder / "mooncake/conversation_trace.jsonl"), loads, 5.0)
    yield Case(load_trace(folder / "weka"), (*loads, 5.0, 8.0, 12.0), 5.0)
    [sharegpt] = (folder / "llmservingsim").glob("*.jsonl")
    yield Case(load_trace(sharegpt), (*loads, 5.0, 10.0, 20.0), 0.5)
    few = (0.6, 1.0, 1.5, 2.5)
    for trace in (long_sessions(), without_reuse(), hot_prefix(), bursts(), long_answers()):
        yield Case(trace, few, 5.0)
    yield Case(tenant_prefixes(), (1.5, 2.0, 2.5, 3.0, 4.0), 5.0)
    yield Case(documents(), (6.0, 8.0, 10.0, 12.0, 16.0), 5.0)
    yield Case(long_and_short(), (2.0, 3.0, 4.0, 5.0, 7.0), 5.0)


def long_sessions(sessions: int = 60, turns: int = 25) -> Trace:
    """Make a trace of sessions whose prompts grow to 40,000 tokens, with pauses between turns."""
    chance = _chance(1)
    prompts = []
    for session in range(sessions):
        now, length, base = chance.uniform(0, 150), chance.randint(4, 40), session * 10_000
        for _ in range(turns):
            now += chance.expovariate(1 / 8)
            length = min(length + chance.randint(1, 4), 80)
            blocks = range(base, base + length)
            prompts.append(TraceEntry(now, 512 * length + 100, chance.randint(50, 600), blocks))
    return make_trace("long sessions", 512, prompts, 1.0)


def without_reuse(requests: int = 2000) -> Trace:
    """Make a trace without reuse, with prompts of 1 to 60 blocks."""
    return _arriving("without reuse", requests, 3.0, shared=0, own=(1, 60), answer=(20, 600))


def hot_prefix(requests: int = 3000) -> Trace:
    """Make a trace in which all requests share 32 blocks, without other reuse."""
    return _arriving("one hot prefix", requests, 9.0, shared=32, own=(1, 8), answer=(50, 350))


def bursts(requests: int = 2000) -> Trace:
    """Make a trace of prompts that arrive up to 40 at once; half of them share 8 blocks."""
    chance = _chance(2)
    now, number = 0.0, 0
    prompts: list[TraceEntry] = []
    while len(prompts) < requests:
        now += chance.expovariate(1 / 8)
        for _ in range(chance.randint(1, 40)):
            number += 100
            common = range(8) if chance.random() < 0.5 else range(0)
            own = range(number, number + chance.randint(1, 30))
            blocks = [*common, *own]
            prompts.append(TraceEntry(now, 512 * len(blocks) + 60, chance.randint(20, 500), blocks))
    return make_trace("bursts", 512, prompts, 1.0)


def long_answers(requests: int = 2000) -> Trace:
    """Make a trace of prompts of at most 4 blocks with answers of up to 3,000 tokens."""
    return _arriving("long answers", requests, 3.0, shared=1, own=(0, 3), answer=(500, 3000))


def tenant_prefixes(requests: int = 700, tenants: int = 12, seed: int = 13) -> Trace:
    """Make a trace of tenants with a prefix each, of 30 to 85 blocks. The first ones are the most
    active.
    """
    chance = _chance(seed)
    now, prompts = 0.0, []
    for number in range(requests):
        now += chance.expovariate(2.2)
        tenant = int(chance.triangular(0, tenants, 0))
        prefix = range(1000 * tenant, 1000 * tenant + 30 + 5 * tenant)
        first = 1_000_000 + 100 * number
        blocks = [*prefix, *range(first, first + chance.randint(1, 10))]
        prompts.append(TraceEntry(now, 512 * len(blocks) + 50, chance.randint(50, 800), blocks))
    return make_trace("tenant prefixes", 512, prompts, 1.0)


def documents(requests: int = 700, seed: int = 11) -> Trace:
    """Make a trace of prompts with 1 to 4 documents of 6 blocks, some much more popular than
    others. A document has other blocks where other documents come before it.
    """
    chance = _chance(seed)
    now, prompts = 0.0, []
    numbers: dict[tuple[int, ...], int] = {}  # of each sequence of documents
    for _ in range(requests):
        now += chance.expovariate(3.0)
        documents = [min(int(chance.paretovariate(1.1)), 400) for _ in range(chance.randint(1, 4))]
        blocks: list[int] = []
        for end in range(1, len(documents) + 1):
            first = 6 * numbers.setdefault(tuple(documents[:end]), len(numbers))
            blocks += range(first, first + 6)
        tokens = 512 * len(blocks) + chance.randint(20, 400)
        prompts.append(TraceEntry(now, tokens, chance.randint(20, 300), blocks))
    return make_trace("documents", 512, prompts, 1.0)


def long_and_short(requests: int = 700, seed: int = 12) -> Trace:
    """Make a trace without reuse: a tenth of the prompts have 60 to 150 blocks and
    short answers, the others at most 3 blocks and long answers.
    """
    chance = _chance(seed)
    now, prompts = 0.0, []
    for number in range(requests):
        now += chance.expovariate(2.5)
        if chance.random() < 0.1:
            length, answer = chance.randint(60, 150), chance.randint(20, 100)
        else:
            length, answer = chance.randint(0, 3), chance.randint(200, 1500)
        blocks = range(1000 * number, 1000 * number + length)
        tokens = 512 * length + chance.randint(10, 500)
        prompts.append(TraceEntry(now, tokens, answer, blocks))
    return make_trace("long and short", 512, prompts, 1.0)


def _arriving(  # noqa: PLR0913  a trace's particulars, by name
    name: str,
    requests: int,
    rate: float,
    *,
    shared: int,
    own: tuple[int, int],
    answer: tuple[int, int],
) -> Trace:
    chance = _chance(3)
    now, prompts = 0.0, []
    for number in range(requests):
        now += chance.expovariate(rate)
        first = 1000 + 100 * number
        blocks = [*range(shared), *range(first, first + chance.randint(*own))]
        tokens = 512 * len(blocks) + chance.randint(1, 500)
        prompts.append(TraceEntry(now, tokens, chance.randint(*answer), blocks))
    return make_trace(name, 512, prompts, 1.0)


def _chance(seed: int) -> Random:
    return Random(seed)  # noqa: S311  a synthetic trace, not secrets


def run(
    case: Case, load: float, memory: str, policies: Sequence[str], known: Known
) -> dict[str, Result]:
    """Run policies at one load, except those with known results. On the pool, those near the best
    run with more seeds, for the check.
    """

    def result(policy: str, seeds: int) -> Result:
        earlier = known.get((_name(case.trace), load, memory, policy))
        if earlier is not None and earlier.seeds >= seeds:
            return earlier
        return _result(case, load, memory, policy, seeds)

    by_policy = {policy: result(policy, _SEEDS) for policy in policies}
    if memory == "pool":
        limit = _CLOSE * min(result.ttft_mean_s for result in by_policy.values())
        for policy, mean in by_policy.items():
            if mean.ttft_mean_s <= limit or policy == DEFAULT_POLICY:
                by_policy[policy] = result(policy, CHECK_SEEDS)
    return by_policy


def _name(trace: Trace) -> str:
    return trace.name.removesuffix(".jsonl").removesuffix(".csv")


def _result(case: Case, load: float, memory: str, policy: str, seeds: int) -> Result:
    options = Options(speed=load)
    rows = simulate(case.trace, options, policies=[policy], memories=[memory], seeds=seeds)
    mean = rows.pop()
    first = [row.ttft_mean_s or 0.0 for row in rows]
    return Result(
        _name(case.trace), load, memory, policy, seeds,
        round(fmean(first), 4), round(stdev(first) / seeds**0.5, 4) if seeds > 1 else 0.0,
        round(mean.ttft_p90_s or 0.0, 4), round(mean.hit_rate, 4), round(mean.hit_rate_hbm, 4),
        mean.rejects,
    )  # fmt: skip


def check(results: Sequence[Result]) -> list[dict[str, object]]:
    """Compare the default with the best policy on the pool, at each load of each trace.

    It holds if the default's mean is within 2 % of the best, 5 % above saturation, or within two
    standard errors of the difference. The best p90 may be another policy's; it has no bound.
    """
    rows: list[dict[str, object]] = []
    lowest: dict[str, float] = {}
    for (trace, load), by_policy in _cells(results, "pool").items():
        mine = by_policy[DEFAULT_POLICY]
        best = min(by_policy.values(), key=lambda result: result.ttft_mean_s)
        best_p90 = min(by_policy.values(), key=lambda result: result.ttft_p90_s)
        lowest.setdefault(trace, best.ttft_mean_s)
        saturated = best.ttft_mean_s > _SATURATED * lowest[trace]
        ratio = mine.ttft_mean_s / best.ttft_mean_s
        error = (mine.ttft_mean_error_s**2 + best.ttft_mean_error_s**2) ** 0.5
        near = mine.ttft_mean_s - best.ttft_mean_s <= 2 * error
        rows.append(
            {
                "trace": trace,
                "load": load,
                "saturated": saturated,
                "default_s": mine.ttft_mean_s,
                "default_error_s": mine.ttft_mean_error_s,
                "best": best.policy,
                "best_s": best.ttft_mean_s,
                "best_error_s": best.ttft_mean_error_s,
                "ratio": round(ratio, 4),
                "holds": near or ratio <= (1.05 if saturated else 1.02),
                "default_p90_s": mine.ttft_p90_s,
                "best_p90": best_p90.policy,
                "best_p90_s": best_p90.ttft_p90_s,
            }
        )
    return rows


def check_goodput(
    results: Sequence[Result], objectives: dict[str, float]
) -> list[dict[str, object]]:
    """Compare the default's goodput with the best one on the pool. None: below the lowest load."""
    rows: list[dict[str, object]] = []
    for trace, objective_s in objectives.items():
        loads: dict[str, list[tuple[float, float]]] = {}
        for result in results:
            if (result.trace, result.memory) == (trace, "pool"):
                points = loads.setdefault(result.policy, [])
                points.append((result.load, result.ttft_p90_s))
        limits = {policy: goodput(points, objective_s) for policy, points in loads.items()}
        best = max(limits, key=lambda policy: (limits[policy] or 0.0, policy == DEFAULT_POLICY))
        rows.append(
            {
                "trace": trace,
                "objective_s": objective_s,
                "most": max(load for load, _ in loads[DEFAULT_POLICY]),
                "default": _rounded(limits[DEFAULT_POLICY]),
                "best_policy": best,
                "best": _rounded(limits[best]),
            }
        )
    return rows


def _rounded(limit: float | None) -> float | None:
    return None if limit is None else round(limit, 4)


def _cells(results: Sequence[Result], memory: str) -> dict[tuple[str, float], dict[str, Result]]:
    cells: dict[tuple[str, float], dict[str, Result]] = {}
    for result in results:
        if result.memory == memory:
            cells.setdefault((result.trace, result.load), {})[result.policy] = result
    return cells


def page(results: Sequence[Result], objectives: dict[str, float]) -> str:
    """Return the tables in Markdown: the checks, and for each trace TTFT and goodput."""
    lines = [
        "### The default against the best policy on the pool",
        "",
        "| trace | load | default, s | best policy | best, s | ratio | holds | p90 | best p90 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in check(results):
        load = f"{row['load']:g}x" + (" (saturated)" if row["saturated"] else "")
        default = f"{row['default_s']:.4g} ± {row['default_error_s']:.2g}"
        best = f"{row['best_s']:.4g} ± {row['best_error_s']:.2g}"
        holds = "yes" if row["holds"] else "**no**"
        p90, best_p90 = f"{row['default_p90_s']:.3g}", f"{row['best_p90_s']:.3g}"
        if row["best_p90"] != DEFAULT_POLICY:
            best_p90 += f" ({row['best_p90']})"
        means = (row["trace"], load, default, row["best"], best, f"{row['ratio']:.3f}")
        lines.append(f"| {' | '.join(map(str, (*means, holds, p90, best_p90)))} |")
    lines += [
        "",
        "### The default's goodput against the best one on the pool",
        "",
        "| trace | objective | default | best policy | best |",
        "|---|---|---|---|---|",
    ]
    for row in check_goodput(results, objectives):
        load_max = row["most"]
        default, best = _shown_load(row["default"], load_max), _shown_load(row["best"], load_max)
        objective = f"{row['objective_s']:g} s"
        cells = (row["trace"], objective, default, row["best_policy"], best)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for trace, objective_s in objectives.items():
        for memory in MEMORIES:
            mine = [r for r in results if r.trace == trace and r.memory == memory]
            lines += ["", *_table(trace, memory, mine, objective_s)]
    return "\n".join(lines) + "\n"


def _table(trace: str, memory: str, results: Sequence[Result], objective_s: float) -> Iterator[str]:
    loads = sorted({result.load for result in results})
    best = {load: min(r.ttft_mean_s for r in results if r.load == load) for load in loads}
    yield f"### {trace}, {'pool' if memory == 'pool' else 'split DRAM'}"
    yield ""
    yield f"| policy | {' | '.join(f'{load:g}x' for load in loads)} | goodput, {objective_s:g} s |"
    yield "|---" * (len(loads) + 2) + "|"
    for policy in dict.fromkeys(result.policy for result in results):
        mine = {result.load: result for result in results if result.policy == policy}
        cells = []
        for load in loads:
            mean, p90 = mine[load].ttft_mean_s, mine[load].ttft_p90_s
            text = f"{mean:.3g}"
            cells.append(f"{f'**{text}**' if mean == best[load] else text} ({p90:.3g})")
        limit = goodput([(r.load, r.ttft_p90_s) for r in mine.values()], objective_s)
        yield f"| {policy} | {' | '.join(cells)} | {_shown_load(limit, loads[-1])} |"


def _shown_load(limit: object, load_max: object) -> str:
    """Show a goodput. Loads above ``most`` were not run."""
    return "-" if limit is None else f"{'≥ ' if limit == load_max else ''}{limit:.2f}x"


def plot(path: Path, trace: str, results: Sequence[Result]) -> None:
    """Draw the mean TTFT over the load, pool and split DRAM side by side."""
    loads = sorted({result.load for result in results})
    x = page_charts.Axis("load, as a multiple of the trace's own speed", ticks=loads)
    y = page_charts.Axis("mean TTFT", log=True, show=page_charts.seconds)
    charts = []
    for memory in MEMORIES:
        lines = []
        for color, policy in enumerate(POLICIES):
            mine = [r for r in results if (r.memory, r.policy) == (memory, policy)]
            points = [(r.load, r.ttft_mean_s) for r in mine]
            lines.append(page_charts.Line(policy, points, color))
        title = "shared pool" if memory == "pool" else "split DRAM"
        charts.append(page_charts.LineChart(title=title, x=x, y=y, lines=lines))
    title = f"{trace} (simulated)"
    drawn = picture(title, charts)
    path.write_bytes(drawn)


def write_page(path: Path, text: str) -> None:
    """Replace what is between the page's markers."""
    before, _, after = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after.partition(END)[2]}")


def _earlier_results(path: Path) -> tuple[Known, str]:
    """Return the recorded results except the default's, and their commit."""
    recorded = read_record(path)
    rows = [Result(**row) for row in recorded["rows"] if row["policy"] != DEFAULT_POLICY]
    commit = recorded.get("kept_from") or recorded["commit"]
    return {(row.trace, row.load, row.memory, row.policy): row for row in rows}, commit


def main(*arguments: str) -> None:
    """Run all, and write the results and the page after each trace."""
    again = arguments[0] == "--again"
    source, target, page_path = arguments[again:]
    known, kept_from = _earlier_results(Path(target)) if again else ({}, "")
    smoke = source == "--smoke"
    chosen = [Case(without_reuse(60), (1.0, 4.0), 5.0)] if smoke else cases(Path(source))
    command = f"python -m beluga_bench.studies.policies {'--again ' if again else ''}"
    report = {
        **computed(f"{command}{Path(source).name} {Path(target).name} {Path(page_path).name}"),
        **({"kept_from": kept_from} if again else {}),
    }
    results: list[Result] = []
    objectives = {}
    images = Path(page_path).parent / "images"
    for case in chosen:
        mine: list[Result] = []
        for load in case.loads:
            for memory in MEMORIES:
                mine += run(case, load, memory, POLICIES, known).values()
        results += mine
        name = mine[0].trace
        objectives[name] = case.objective_s
        rows = [result._asdict() for result in results]
        checks = {"check": check(results), "goodput": check_goodput(results, objectives)}
        write_record(Path(target), {**report, **checks, "rows": rows})
        write_page(Path(page_path), page(results, objectives))
        images.mkdir(exist_ok=True)
        plot(images / f"policies-{name.replace(' ', '-')}.svg", name, mine)
        print(f"{name}: {len(results)} results", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(partial(main, *sys.argv[1:]))
