# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure single copies by Intel DSA: rows of ``coherence`` and of ``latency``.

The time is from submission until the completion is observed and the case's work is done. Without a
device the rows have a note that gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from beluga.errors import EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import DsaEngine
from beluga.transfer.dsa import Portal, open_device
from beluga.transfer.policy import PolicyRow as CacheMaintenance
from beluga.transfer.policy import Step

from ..harness import drive
from ..harness.drive import Driver, Load
from ..harness.region import Region, uniform
from ..harness.row import Recorder, Row, percentiles, speed

# The case; the verb; what the CPU runs around it; cache control.
CASES = {
    "dsa write, cache control off": ("write", CacheMaintenance(Step.FENCE, Step.FENCE), False),
    "dsa write, cache control on + flush": (
        "write",
        CacheMaintenance(Step.FENCE, Step.FLUSH),
        True,
    ),
    "dsa read after invalidation": ("read", CacheMaintenance(Step.INVALIDATE, Step.FENCE), False),
}
Queue = Callable[[Pool], Portal]
_SAFE = CacheMaintenance(Step.INVALIDATE, Step.FLUSH)
_RUN_S = 0.02
_SMOKE_RUN_S = 0.001


def dsa_coherence(
    recorder: Recorder, region: Region, size: int, queue: Queue = open_device
) -> list[Row]:
    """Return the rows of the paper's Table 4, one per case, or why there are none."""
    rows = []
    for case, (verb, maintenance, cached) in CASES.items():
        try:
            with _engine(region, queue, maintenance, cached=cached) as engine:
                rows.append(_measured(recorder, region, engine, (case, verb), size))
        except EngineUnavailableError as error:
            rows.append(recorder.skipped(case, str(error)))
    return rows


def dsa_latency(
    recorder: Recorder,
    region: Region,
    sizes: tuple[int, ...],
    cpu: list[Row],
    queue: Queue = open_device,
) -> list[Row]:
    """Return the rows of the paper's Exp 2: one per verb and size, with the safe row of the policy
    around each copy.

    The note of the first of each verb has the size from which it is faster than ``cpu``, the rows
    of the CPU.
    """
    rows = []
    try:
        with _engine(region, queue, _SAFE) as engine:
            for verb in ("read", "write"):
                own = [
                    _measured(recorder, region, engine, (f"dsa {verb}", verb), size)
                    for size in sizes
                    if size * 2 <= region.size_for(size)
                ]
                own[0]["note"] = f"{own[0]['note']}; {crossover(costs(cpu, verb), costs(own))}"
                rows += own
    except EngineUnavailableError as error:
        return [recorder.skipped(f"dsa {verb}", str(error)) for verb in ("read", "write")]
    return rows


def crossover(cpu: dict[int, float], device: dict[int, float]) -> str:
    """Return the size from which the device is faster at every size measured; costs are by size."""
    ahead: int | None = None
    for size in sorted(cpu.keys() & device.keys(), reverse=True):
        if device[size] >= cpu[size]:
            break
        ahead = size
    if ahead is None:
        return "never ahead of the CPU"
    return f"ahead of the CPU from {ahead} bytes on"


@contextmanager
def _engine(
    region: Region, queue: Queue, maintenance: CacheMaintenance, *, cached: bool = False
) -> Iterator[DsaEngine]:
    engine = DsaEngine(region.pool, queue(region.pool), row=maintenance, cache_control=cached)
    try:
        yield engine
    finally:
        engine.close()


def _measured(
    recorder: Recorder, region: Region, engine: DsaEngine, names: tuple[str, str], size: int
) -> Row:
    """Return one ``(case, verb)`` of one size."""
    (case, verb), options = names, recorder.options
    options.report(f"{recorder.bench} {case}, {size} bytes")
    offsets = uniform(region.size_for(size), size, options.seed)
    offsets = offsets + region.pool.geometry.data_offset
    driver = Driver(Load(drive.by_dsa(engine, verb), offsets.astype("u8"), size))
    run_s = _SMOKE_RUN_S if options.smoke else _RUN_S
    count = max(3, int(run_s * 1e9 / (3000 + size / 10)))
    driver.count(count)
    ops_per_s = driver.count(count)
    return recorder.row(
        case,
        bytes=size,
        note=engine.queue_text,
        **speed(ops_per_s, size),
        **percentiles(driver.sample(count)),
    )


def costs(rows: list[Row], case: str | None = None) -> dict[int, float]:
    """Return p50 by size, of the rows that were measured."""
    return {
        int(str(row["bytes"])): float(str(row["p50_ns"]))
        for row in rows
        if row["p50_ns"] is not None and case in (None, row["case"])
    }
