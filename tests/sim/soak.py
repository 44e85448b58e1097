# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs fresh seeds of every scenario for a while, and prints how to replay failures."""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from children import Death, answers, still_alive
from regressions import Case, keep, parse
from simulator import KINDS, describe, play, scenarios

from beluga.child import run_program

BATCH = 4  # seeds of one scenario and kind for one child: a pass takes 15 s
# times as many seeds, because their failures are rare
OFTEN = {"late": 4, "rivals": 2, "system": 2}

# The counters of bl_sim_stat, and their printed names; one that a build lacks is 0.
COUNTERS = {
    "accesses": "steps",
    "calls": "results",
    "deaths": "deaths",
    "host crashes": "host_crashes",
    "takeovers": "takeovers",
}


@dataclass(frozen=True)
class Batch:
    """Consecutive seeds of one scenario on one kind of memory."""

    scenario: str
    kind: str
    first: int
    count: int


def batches(first: int, until_s: float) -> Iterator[Batch]:
    """Yield every scenario and kind, over and over, until ``until_s`` (``time.monotonic``); at
    least once.
    """
    while True:
        for scenario in scenarios():
            for kind in KINDS:
                yield Batch(scenario, kind, first, BATCH * OFTEN.get(scenario, 1))
        first += BATCH * max(OFTEN.values())
        if time.monotonic() > until_s:
            return


def play_batch(batch: Batch) -> tuple[Counter[str], list[Case]]:
    """Return the sums of the counters of the batch, and the failed runs."""
    counters: Counter[str] = Counter()
    wrong = []
    for seed in range(batch.first, batch.first + batch.count):
        still_alive()
        run = play(batch.scenario, seed, kind=batch.kind)
        counters["runs"] += 1
        for name, field in COUNTERS.items():
            counters[name] += run.stat.get(field, 0)
        if run.result != 0:
            wrong.append(Case(batch.scenario, seed, batch.kind, describe(run.result)))
    return counters, wrong


def soak(tasks: Iterator[Batch], processes: int) -> tuple[Counter[str], list[Case]]:
    """Run all batches; if a batch's child died, run each of its seeds alone."""
    counters: Counter[str] = Counter()
    wrong: list[Case] = []
    again: list[Batch] = []
    for batch, answer in answers(tasks, play_batch, processes=processes):
        if not isinstance(answer, Death):
            counters.update(answer[0])
            wrong.extend(answer[1])
        elif batch.count == 1:
            wrong.append(Case(batch.scenario, batch.first, batch.kind, str(answer)))
        else:
            seeds = range(batch.first, batch.first + batch.count)
            again.extend(replace(batch, first=seed, count=1) for seed in seeds)
    if again:
        more, bad = soak(iter(again), processes)
        counters.update(more)
        wrong.extend(bad)
    return counters, wrong


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0 if no run failed."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="the first one (from the clock)")
    parser.add_argument("--replay", default="", metavar="SCENARIO:SEED[:KIND]", help="one run")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="one object, the last line")
    options = parser.parse_args(arguments)
    if options.replay:
        case = parse(options.replay)
        tasks = iter([Batch(case.scenario, case.kind, case.seed, 1)])
        first = case.seed
    else:
        # seeds have 64 bits; a soak uses far fewer than the thousand million of each second
        first = time.time_ns() if options.seed is None else options.seed * 1_000_000_007
        tasks = batches(first, time.monotonic() + options.seconds)
    counters, wrong = soak(tasks, options.processes)
    for case in wrong:
        print(f"{case.wrong}: scripts/soak --replay {case}", flush=True)
        if not options.replay:
            print(f"  kept in {keep(case)}", flush=True)
    counted = {name: counters[name] for name in ("runs", *COUNTERS)}
    counted["errors"] = len(wrong)
    if options.json:
        print(json.dumps({"first seed": first, **counted}))
    else:
        print(f"first seed {first}: " + ", ".join(f"{counted[name]} {name}" for name in counted))
    return 1 if wrong else 0


if __name__ == "__main__":
    run_program(main)
