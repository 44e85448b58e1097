# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of one operation at a time, 64 B to 16 MiB (the paper's Exp 2).

A read invalidates and loads out, a write streams and fences, at offsets in random order. The limit
loops measure the pool and, for comparison, this process's own memory, near and on another NUMA
node.
"""

from __future__ import annotations

from ..gpu.single import gpu_latency
from ..harness import drive
from ..harness.drive import Driver, Load
from ..harness.ground import coherence_of, ground
from ..harness.machine import cores, memory_of, node_cpus, nodes, pinned
from ..harness.options import SOFTWARE, Options
from ..harness.pace import paced
from ..harness.private import private
from ..harness.ratio import race
from ..harness.region import Region, region_of, uniform
from ..harness.row import Recorder, Row, copies, percentiles, speed
from .dsa import dsa_latency

VERBS = ("read", "write")
SIZES = tuple(64 << (2 * step) for step in range(10))
SMOKE_SIZES = (64, 16 << 10, 1 << 20)
PAPER = {
    ("read", 64): "about 750 ns",
    ("read", 16 << 10): "5.98 us",
    ("write", 16 << 10): "2.41 us",
}

_RUN_S = 0.02
_SMOKE_RUN_S = 0.001
_PRIVATE_SIZE = 64 << 20


def bench_latency(options: Options) -> list[Row]:
    """Return rows for the pool, private memory and another NUMA node's memory; when paced, only for
    the pool.
    """
    sizes = SMOKE_SIZES if options.smoke else SIZES
    with pinned(cores()[0]):
        with ground(options, devices=1) as pool, paced(options.pace, pool) as pace_file:
            region = region_of(pool, pace_file)
            recorder = Recorder(
                "latency",
                options,
                {
                    "memory": memory_of(pool) if pace_file is None else "paced",
                    "coherence": coherence_of(pool),
                    "depth": 1,
                    "threads": 1,
                },
            )
            rows = [_row(recorder, region, verb, size) for verb in VERBS for size in sizes]
            if options.pace is None:
                cpu = list(rows)
                rows += dsa_latency(recorder, region, sizes, cpu)
                rows += gpu_latency(recorder, region, sizes, cpu)
        if options.pace is None:
            rows += _private_rows(options, sizes)
    return rows


def count_of(size: int, smoke: bool) -> int:
    """Return about how many operations fill a run."""
    return max(3, int((_SMOKE_RUN_S if smoke else _RUN_S) * 1e9 / (300 + size / 10)))


def _row(recorder: Recorder, region: Region, verb: str, size: int) -> Row:
    options = recorder.options
    fixed: Row = {"bytes": size, "paper": PAPER.get((verb, size))}
    if size * 2 > region.size_for(size):
        return recorder.skipped(verb, "the pool is too small", **fixed)
    options.report(f"latency {verb}, {size} bytes")
    offsets = uniform(region.size_for(size), size, options.seed)
    ours, limit = region.ours(verb, offsets, size), region.limit(verb, offsets, size)
    count = count_of(size, options.smoke)
    if region.pace_file is not None:
        return recorder.row(verb, **fixed, **_alone(ours, count, size))
    ratio = race(
        lambda: limit.count(count),
        lambda: ours.count(count),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    return recorder.row(verb, **fixed, **copies(ratio, size), **percentiles(ours.sample(count)))


def _alone(driver: Driver, count: int, size: int) -> Row:
    """Measure a driver without a comparison."""
    driver.count(count)
    return {**speed(driver.count(count), size), **percentiles(driver.sample(count))}


def _private_rows(options: Options, sizes: tuple[int, ...]) -> list[Row]:
    local = next((node for node in nodes() if cores()[0] in node_cpus(node)), None)
    rows = _private(options, sizes, "DRAM (private)", None)
    remote = [node for node in nodes() if node != local]
    label = "DRAM (remote NUMA node)"
    if local is None or not remote:
        recorder = Recorder("latency", options, {"memory": label, "depth": 1, "threads": 1})
        return [*rows, *(recorder.skipped(verb, "one NUMA node only") for verb in VERBS)]
    return rows + _private(options, sizes, label, remote[0])


def _private(options: Options, sizes: tuple[int, ...], label: str, node: int | None) -> list[Row]:
    """Measure private memory by the limit loops, with software coherence."""
    fixed: Row = {"memory": label, "coherence": SOFTWARE, "depth": 1, "threads": 1}
    recorder = Recorder("latency", options, fixed)
    rows = []
    with private(_PRIVATE_SIZE, node) as base:
        for verb in VERBS:
            for size in sizes:
                options.report(f"latency {verb}, {size} bytes, {label}")
                offsets = uniform(_PRIVATE_SIZE, size, options.seed)
                driver = Driver(Load(drive.bare(verb, base), offsets, size))
                count = count_of(size, options.smoke)
                rows.append(recorder.row(verb, bytes=size, **_alone(driver, count, size)))
    return rows
