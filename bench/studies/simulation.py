# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The recorded runs of the simulator.

``python -m beluga_bench.studies.simulation TRACE OUT [PROCESSES]``.

Results are computed, not measured; the machine only determines how long that takes. Each case has
the means over its seeds, with their spread.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from beluga.child import run_program
from beluga.router import POLICIES
from beluga.simulate import (
    MEMORIES,
    PRESETS,
    Options,
    Row,
    Scale,
    Trace,
    TraceEntry,
    load_trace,
    make_trace,
    simulate,
)

from ..harness.recorded import computed, write_record

_FEW = ("round-robin", "least-tokens", "linear", "cache-aware", "min-ttft")
_REFERENCE = ("round-robin", "least-tokens", "linear", "min-ttft")


class Case(NamedTuple):
    """Runs that are compared with each other."""

    name: str
    trace: Trace
    options: Options
    policies: Sequence[str] = _FEW
    memories: Sequence[str] = MEMORIES
    seeds: int = 1


def cases(trace: Trace) -> Iterator[Case]:
    """Yield the cases that test the claim, and those in which it is expected to fail."""
    yield Case("judged 2x", trace, Options(speed=2.0), POLICIES, MEMORIES, 5)
    yield Case("judged 2.5x", trace, Options(speed=2.5), (*_FEW, "lmetric"), MEMORIES, 5)
    for speed, seeds in ((2.0, 3), (2.5, 3), (1.0, 1)):
        options = PRESETS["feasibility"](Options(speed=speed))
        yield Case(f"reference {speed:g}x", trace, options, _REFERENCE, MEMORIES, seeds)
    slow = PRESETS["feasibility"](Options(speed=2.0, bandwidth=5e9))
    yield Case("reference 2x, 5 GB/s", trace, slow, _REFERENCE, ("pool",))
    yield Case("1x", trace, Options())
    yield Case("one hot prefix", hot_prefix(), Options())
    for scale in (None, Scale(1200.0, 4)):
        name = "1x, 6 workers" + (", 4 more from 1200 s on" if scale else "")
        yield Case(name, trace, Options(workers=6, scale=scale), ("least-tokens", "linear"))
    for speed in (5e9, 2e9):
        name = f"1x, {speed / 1e9:g} GB/s"
        yield Case(name, trace, Options(bandwidth=speed), ("least-tokens", "linear"), ("pool",))
    for path in ("root-complex", "switch"):
        for adapters in (1, 8):
            options = Options(gpu_path=path, adapters=adapters)
            name = f"1x, {path}, {adapters} adapters"
            yield Case(name, trace, options, ("least-tokens",), ("pool",))


def hot_prefix() -> Trace:
    """Make a trace in which all requests share 32 blocks and have few others, so each worker's HBM
    soon has them.
    """
    chance = Random(0)  # noqa: S311  arrivals, not secrets
    now, prompts = 0.0, []
    for number in range(4000):
        now += chance.expovariate(8.0)
        own = range(1000 + 4 * number, 1004 + 4 * number)
        prompts.append(TraceEntry(now, 36 * 512 + 100, 200, [*range(32), *own]))
    return make_trace("hot prefix", 512, prompts, 1.0)


def _run(task: tuple[Case, str]) -> tuple[list[Row], float]:
    """Run one policy of a case. Returns the means, and the CPU seconds that the runs took."""
    case, policy = task
    begun = time.process_time()
    rows = simulate(
        case.trace, case.options, policies=[policy], memories=case.memories, seeds=case.seeds
    )
    return [row for row in rows if row.seed is None], time.process_time() - begun


def _flat(case: str, row: Row) -> dict[str, object]:
    """Return a row to record: of the spreads over seeds, that of the mean TTFT."""
    values = {name: value for name, value in dataclasses.asdict(row).items() if name != "spread"}
    numbers = {name: round(value, 6) for name, value in values.items() if isinstance(value, float)}
    std = row.spread["ttft_mean_s"].std if row.spread else None
    return {"case": case, **values, **numbers, "ttft_mean_std_s": std}


def main(source: str, target: str, processes: str = "1") -> None:
    """Run all cases, several at once, and write the results after each."""
    report = computed(
        f"python -m beluga_bench.studies.simulation {Path(source).name} {Path(target).name}"
    )
    described: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    with multiprocessing.get_context("fork").Pool(int(processes)) as pool:
        for case in cases(load_trace(Path(source))):
            done = pool.map(_run, [(case, policy) for policy in case.policies], chunksize=1)
            seconds = sum(run_s for _, run_s in done)
            runs = len(case.policies) * len(case.memories) * case.seeds
            described.append(
                {
                    "case": case.name,
                    "trace": case.trace.name,
                    **dataclasses.asdict(case.options),
                    "model": case.options.model.name,
                    "seeds": case.seeds,
                    "requests_per_cpu_minute": round(60 * runs * len(case.trace) / seconds),
                }
            )
            rows += [_flat(case.name, row) for seeds, _ in done for row in seeds]
            print(f"{case.name}: {runs} runs in {seconds:.0f} s of CPU", file=sys.stderr)
            write_record(Path(target), {**report, "cases": described, "rows": rows})


if __name__ == "__main__":
    run_program(partial(main, *sys.argv[1:]))
