# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The default routing policy on random traces.

``python -m beluga_bench.studies.families FIRST END OUT``.

A family of traces has random properties derived from its number: one to three classes of requests,
each with its lengths, reuse and answers, and bursts. Two traces of each family are run with all
policies on the pool, at loads around the family's knee. So the results show how good the default is
on traces that it was not tuned for. Results are computed, not measured, and deterministic.
``--smoke`` as OUT runs two small families and prints the summary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from beluga.child import run_program
from beluga.router import DEFAULT_POLICY, POLICIES
from beluga.simulate import Options, Trace, TraceEntry, make_trace, simulate

from ..harness.recorded import computed, write_record

BLOCK = 512  # tokens, as in the recorded traces
REQUESTS = 2000
SEEDS = 2  # traces per family
SHARES = (0.5, 0.75, 0.9, 1.0, 1.1, 1.3)  # loads, as shares of the knee
_KNEE = 4.0  # at the knee, the best mean TTFT of some policies is this many times that without load
_AT_KNEE = ("linear", "lmetric", "min-ttft", "least-cost")
_AT_ONCE = 1000.0  # a load at which all requests arrive at once; a small trace may have no knee
_SATURATED = 10.0  # above saturation it is this many times that of the first load
_BOUND, _BOUND_SATURATED = 1.02, 1.05
_LONGEST = 440  # blocks of a prompt; a worker's HBM has 470
_CLASS_IDS = 100_000_000  # ids of blocks in each class

# A class of requests returns the blocks of its next prompt at a given time.
Blocks = Callable[[float], list[int]]


class Cell(NamedTuple):
    """A family at one load. The mean TTFT is in seconds, of each policy on each of its traces."""

    family: int
    share: float  # fraction of the load at the knee
    load: float
    saturated: bool
    ttft_s: Mapping[str, Sequence[float]]

    @property
    def means(self) -> dict[str, float]:
        """The means over the traces, by policy."""
        return {policy: fmean(ttft_s) for policy, ttft_s in self.ttft_s.items()}

    @property
    def ratio(self) -> float:
        """The default's mean over that of the best other policy."""
        means = self.means
        return means.pop(DEFAULT_POLICY) / min(means.values())

    def near_best(self, means: Mapping[str, float], policy: str) -> bool:
        """Return whether a policy's mean TTFT is within the bounds of the best."""
        bound = _BOUND_SATURATED if self.saturated else _BOUND
        return means[policy] <= bound * min(means.values())


@dataclasses.dataclass
class _Ids:
    """Numbers of blocks that no other class uses."""

    next: int

    def take(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))


def family_trace(family: int, seed: int, requests: int = REQUESTS) -> Trace:
    """Make a trace with a family's properties and with requests that derive from the seed."""
    traits, chance = _random(f"family {family}"), _random(f"family {family} seed {seed}")
    burst = traits.choice((1, 1, 1, 4, 15))
    kinds = (_tenants, _tenants, _sessions, _unique, _documents)
    classes: list[tuple[Blocks, Callable[[], int]]] = []
    weights = []
    for number in range(traits.choice((1, 1, 1, 2, 2, 3))):
        ids = _Ids(number * _CLASS_IDS)
        weights.append(traits.uniform(0.2, 1))
        classes.append((traits.choice(kinds)(traits, chance, ids), _answers(traits, chance)))
    now = 0.0
    prompts: list[TraceEntry] = []
    while len(prompts) < requests:
        now += chance.expovariate(1 / burst)
        for _ in range(chance.randint(1, 2 * burst - 1)):
            blocks_of, answer = chance.choices(classes, weights)[0]
            blocks = blocks_of(now)[:_LONGEST]
            tokens = BLOCK * len(blocks) + chance.randint(10, 500)
            prompts.append(TraceEntry(now, tokens, answer(), blocks))
    return make_trace(f"family {family}, seed {seed}", BLOCK, prompts[:requests], 1.0)


def _random(name: str) -> Random:
    return Random(name)  # noqa: S311  a synthetic trace, not secrets


def _answers(traits: Random, chance: Random) -> Callable[[], int]:
    low = traits.choice((10, 30, 50, 200))
    high = max(traits.choice((100, 300, 800, 1500)), low + 20)
    even = traits.random() < 0.5
    return lambda: (
        chance.randint(low, high)
        if even
        else min(low + int(chance.expovariate(3 / (high - low))), high)
    )


def _tenants(traits: Random, chance: Random, ids: _Ids) -> Blocks:
    """Prompts of tenants with a prefix each; some tenants send more requests than others."""
    shortest, longest = traits.choice((2, 10, 30)), traits.choice((40, 60, 90))
    count = traits.choice((1, 4, 8, 12, 20, 40, 100))
    prefixes = [ids.take(chance.randint(shortest, longest)) for _ in range(count)]
    skew = traits.choice((0.0, 0.5, 1.0, 1.5))
    weights = [1 / (rank + 1) ** skew for rank in range(count)]
    low, high = traits.choice((0, 1, 3)), traits.choice((4, 10, 25))
    return lambda _: [
        *chance.choices(prefixes, weights)[0],
        *ids.take(chance.randint(low, high)),
    ]


def _sessions(traits: Random, chance: Random, ids: _Ids) -> Blocks:
    """Prompts of sessions, which grow with each turn, with a common prefix."""
    system = ids.take(traits.choice((0, 0, 4, 16)))
    shortest, longest = traits.choice((1, 4, 20)), traits.choice((21, 40, 80))
    growth, top = traits.choice((1, 2, 4, 8)), traits.choice((40, 80, 120, 200))
    turns, pause = traits.choice((5, 15, 40)), traits.choice((12, 32, 120))
    waiting: list[tuple[float, list[int]]] = []  # when a session continues, and its last prompt

    def blocks(now: float) -> list[int]:
        ready = [session for session in waiting if session[0] <= now]
        if ready and chance.random() < 1 - 1 / turns:
            session = chance.choice(ready)
            waiting.remove(session)
            prompt = session[1] + ids.take(chance.randint(1, growth))
        else:
            prompt = system + ids.take(chance.randint(shortest, longest))
        if len(prompt) < top:
            waiting.append((now + chance.expovariate(1 / pause), prompt))
        return prompt

    return blocks


def _unique(traits: Random, chance: Random, ids: _Ids) -> Blocks:
    """Prompts without reuse. Most are short in some families."""
    low, high = traits.choice((0, 1, 4, 20)), traits.choice((21, 60, 150))
    long = traits.choice((1.0, 0.2))  # the share of prompts that are not of the least length
    return lambda _: ids.take(chance.randint(low, high) if chance.random() < long else low)


def _documents(traits: Random, chance: Random, ids: _Ids) -> Blocks:
    """Prompts with documents, some more popular. A document's blocks depend on those before it."""
    size, number_max = traits.choice((3, 6, 12)), traits.choice((2, 4, 6))
    alpha, count = traits.choice((0.8, 1.1, 1.5)), traits.choice((50, 400))
    known: dict[tuple[int, ...], list[int]] = {}

    def blocks(_: float) -> list[int]:
        number = chance.randint(1, number_max)
        documents = tuple(min(int(chance.paretovariate(alpha)), count) for _ in range(number))
        prompt: list[int] = []
        for end in range(1, number + 1):
            if documents[:end] not in known:
                known[documents[:end]] = ids.take(size)
            prompt += known[documents[:end]]
        return prompt

    return blocks


def ttft_s(trace: Trace, load: float, policy: str) -> float:
    [row] = simulate(trace, Options(speed=load), policies=[policy], memories=["pool"], seeds=1)[:1]
    return row.ttft_mean_s or 0.0


def knee(trace: Trace) -> float:
    """Return the load at which the best mean TTFT is 4 times that of single requests, +- 5 %."""

    def best(load: float) -> float:
        return min(ttft_s(trace, load, policy) for policy in _AT_KNEE)

    limit = _KNEE * best(0.01)
    high = 0.02
    while best(high) < limit and high < _AT_ONCE:
        high *= 2
    low = high / 2
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if best(middle) < limit else (low, middle)
    return high


def run(family: int, requests: int = REQUESTS) -> list[Cell]:
    """Run all policies on a family's traces, at each load."""
    traces = [family_trace(family, seed, requests) for seed in range(SEEDS)]
    at_knee = knee(traces[0])
    cells: list[Cell] = []
    lowest = math.inf
    for share in SHARES:
        load = at_knee * share
        by_policy = {
            policy: [round(ttft_s(trace, load, policy), 4) for trace in traces]
            for policy in POLICIES
        }
        best = min(fmean(means) for means in by_policy.values())
        lowest = min(lowest, best)
        cells.append(Cell(family, share, round(load, 4), best > _SATURATED**lowest, by_policy))
    return cells


def summary(cells: Sequence[Cell]) -> dict[str, Mapping[str, object]]:
    """Return the summary: the default's ratios at each load and overall, in how many cells each
    policy is within the bounds (2 % of the best mean TTFT, 5 % above saturation), and how much of
    that is due to chance.

    For the last, the traces of a cell are compared one by one. An oracle uses the policy, other
    than the default, that is the best on the next trace of the same family at the same load.
    """
    return {
        "loads": {
            **{f"{share:g}": _ratios([c for c in cells if c.share == share]) for share in SHARES},
            "all": _ratios(cells),
        },
        "within_bounds": {
            policy: sum(cell.near_best(cell.means, policy) for cell in cells) for policy in POLICIES
        },
        "one_trace": _one_trace(cells),
    }


def _ratios(cells: Sequence[Cell]) -> Mapping[str, object]:
    ratios = sorted(cell.ratio for cell in cells)
    return {
        "within_bounds": sum(cell.near_best(cell.means, DEFAULT_POLICY) for cell in cells),
        "cells": len(cells),
        "geometric_mean": round(math.exp(fmean(map(math.log, ratios))), 4),
        "median": round(median(ratios), 4),
        "p90": round(ratios[len(ratios) * 9 // 10], 4),
        "worst": round(ratios[-1], 4),
    }


def _one_trace(cells: Sequence[Cell]) -> Mapping[str, int]:
    default = oracle = count = 0
    for cell in cells:
        for seed in range(SEEDS):
            measured = {policy: times[seed] for policy, times in cell.ttft_s.items()}
            default += cell.near_best(measured, DEFAULT_POLICY)
            others = {policy: times[seed - 1] for policy, times in cell.ttft_s.items()}
            del measured[DEFAULT_POLICY], others[DEFAULT_POLICY]
            oracle += cell.near_best(measured, min(others, key=lambda policy: others[policy]))
            count += 1
    return {"traces": count, "default": default, "oracle": oracle}


def _row(cell: Cell) -> dict[str, object]:
    """Return a row with a column of each policy: the mean TTFT in seconds and its error."""
    row = cell._asdict()
    return {**row, **row.pop("ttft_s"), "ratio": round(cell.ratio, 4)}


def report(cells: Iterable[Cell], command: str) -> dict[str, object]:
    ordered = sorted(cells, key=lambda cell: (cell.family, cell.share))
    return {
        **computed(command),
        "summary": summary(ordered),
        "rows": [_row(cell) for cell in ordered],
    }


def main(first: str, end: str, target: str) -> None:
    """Run families ``first`` to ``end`` - 1, and write the results after each."""
    smoke = target == "--smoke"
    job = functools.partial(run, requests=100 if smoke else REQUESTS)
    cells: list[Cell] = []
    command = f"python -m beluga_bench.studies.families {first} {end} {Path(target).name}"
    with multiprocessing.Pool() as pool:
        for of_family in pool.imap_unordered(job, range(int(first), int(end))):
            cells += of_family
            if not smoke:
                write_record(Path(target), report(cells, command))
            print(f"family {of_family[0].family}", file=sys.stderr, flush=True)
    print(msgspec.json.format(msgspec.json.encode(summary(cells)), indent=1).decode())


if __name__ == "__main__":
    run_program(partial(main, *sys.argv[1:]))
