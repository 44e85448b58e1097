# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of many concurrent operations (the paper's Exp 3, skewed access, and Exp
4, background load).

Threads on separate cores read or write in the whole region, or mostly in a hot set, which is on the
first device unless the pool is interleaved. Then one thread works while another process keeps a
fixed rate on the same device, in the same or the opposite direction. Then several GPUs, if
available, use one device and one NUMA node (Fig. 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from beluga.pool import Pool

from ..gpu.many import gpu_bandwidth
from ..harness.drive import Driver, Offsets, together
from ..harness.ground import coherence_of, ground
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import Options
from ..harness.pace import paced
from ..harness.peer import Peer
from ..harness.ratio import race
from ..harness.region import Region, dealt, region_of, skewed, uniform
from ..harness.row import Recorder, Row, copies, percentiles, speed
from .latency import VERBS

SIZES = (64, 16 << 10)
PATTERNS: dict[str, Callable[[int, int, int], Offsets]] = {"uniform": uniform, "skewed": skewed}

_RUN_S = 0.02
_SMOKE_RUN_S = 0.002
_SAMPLES_PER_S = 10_000_000  # more operations than one thread can do
_OPPONENT_SIZE = 16 << 10
_OPPONENT_SHARE = 0.5  # of what one thread reaches alone
_OPPONENT_LEAD_S = 0.01


@dataclass(frozen=True, slots=True)
class _Setting:
    """The fields that all rows of one pool share."""

    region: Region
    recorder: Recorder
    layout: str  # "interleaved" or "not interleaved"

    @property
    def options(self) -> Options:
        return self.recorder.options

    @property
    def run_s(self) -> float:
        return _SMOKE_RUN_S if self.options.smoke else _RUN_S


def bench_bandwidth(options: Options) -> list[Row]:
    """Return rows with and without interleaving, or for the user's pool; then those with another
    process.
    """
    rows: list[Row] = []
    layouts = (True,) if options.pool else (True, False)
    for interleave in layouts:
        with ground(options, interleave=interleave) as pool, paced(options.pace, pool) as clocks:
            setting = _setting(options, pool, region_of(pool, clocks))
            for verb, size, pattern in product(VERBS, SIZES, PATTERNS):
                for count in thread_counts(options):
                    rows.append(_row(setting, verb, size, pattern, count))
            if interleave is layouts[-1]:
                rows += _opposed(setting)
    if options.pace is None:
        with ground(options, devices=1) as pool:
            rows += gpu_bandwidth(Recorder("bandwidth", options, _fixed(pool)), pool)
    return rows


def _fixed(pool: Pool) -> Row:
    return {"memory": memory_of(pool), "coherence": coherence_of(pool), "depth": 1}


def _setting(options: Options, pool: Pool, region: Region) -> _Setting:
    fixed = _fixed(pool) | ({} if region.pace_file is None else {"memory": "paced"})
    layout = "interleaved" if pool.geometry.interleaved else "not interleaved"
    return _Setting(region, Recorder("bandwidth", options, fixed), layout)


def thread_counts(options: Options) -> list[int]:
    """Return 1, 2, 4, ... and the maximum: one thread per core, or the number in the options."""
    most = options.threads or len(cores())
    return sorted({*(1 << step for step in range(most.bit_length()) if 1 << step <= most), most})


def _row(setting: _Setting, verb: str, size: int, pattern: str, count: int) -> Row:
    options, region, run_s = setting.options, setting.region, setting.run_s
    case = f"{verb}, {pattern}, {setting.layout}"
    options.say(f"bandwidth {case}, {size} bytes, {count} threads")
    places = dealt(PATTERNS[pattern](region.span, size, options.seed), count)
    ours = [region.ours(verb, part, size) for part in places]
    fixed: Row = {"bytes": size, "threads": count}
    cpus = cores()
    if region.pace_file is not None:
        return setting.recorder.row(case, **fixed, **_sampled(ours, size, run_s))
    limit = [region.limit(verb, part, size) for part in places]
    found = race(
        lambda: together(limit, cpus, run_s),
        lambda: together(ours, cpus, run_s),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    return setting.recorder.row(
        case, **fixed, **{**_sampled(ours, size, run_s), **copies(found, size)}
    )


def _sampled(drivers: list[Driver], size: int, run_s: float) -> Row:
    """Return speed and percentiles of a run in which every operation is timed."""
    room = int(_SAMPLES_PER_S * run_s)
    samples = [np.zeros(room, np.uint64) for _ in drivers]
    ops_per_s = together(drivers, cores(), run_s, samples)
    times = np.concatenate(
        [part[: driver.done] for part, driver in zip(samples, drivers, strict=True)]
    )
    return {**speed(ops_per_s, size), **percentiles(times)}


def _opposed(setting: _Setting) -> list[Row]:
    """Measure one thread alone, and while another process reads or writes the same device."""
    cpus = cores()
    if len(cpus) < 2:
        return [setting.recorder.skipped("beside another process", "needs two cores")]
    region, options, run_s = setting.region, setting.options, setting.run_s
    pool = region.pool
    half = setting.region.piece // 2
    places = uniform(half, _OPPONENT_SIZE, options.seed)
    theirs = places[:256] + np.uint64(pool.geometry.data_offset + half)
    rows = []
    with pinned(cpus[0]), Peer(pool, cpus[1]) as peer:
        for verb in VERBS:
            ours = region.ours(verb, places, _OPPONENT_SIZE)
            alone = _sampled([ours], _OPPONENT_SIZE, run_s)
            fixed: Row = {"bytes": _OPPONENT_SIZE, "threads": 1}
            rows.append(setting.recorder.row(f"{verb}, alone", **fixed, **alone))
            for other in VERBS:
                options.say(f"bandwidth {verb}, beside another process's {other}s")
                period_ns = _period_ns(region, other, places, run_s)
                peer.start(
                    "load",
                    verb=other,
                    offsets=theirs.tolist(),
                    size=_OPPONENT_SIZE,
                    period_ns=period_ns,
                    duration_s=run_s + 2 * _OPPONENT_LEAD_S,
                    pace_file=None if region.pace_file is None else str(region.pace_file),
                )
                beside = _sampled([ours], _OPPONENT_SIZE, run_s)
                reached = peer.result()["gb_per_s"]
                direction = "same" if verb == other else "opposite"
                rows.append(
                    setting.recorder.row(
                        f"{verb}, beside {other}s ({direction} direction)",
                        note=f"another process {other}s {reached:.2f} GB/s, "
                        f"{_OPPONENT_SIZE / period_ns:.2f} wanted",
                        **fixed,
                        **beside,
                    )
                )
    return rows


def _period_ns(region: Region, verb: str, places: Offsets, run_s: float) -> int:
    """Return the time between the other process's operations for its share of the bandwidth."""
    driver = region.ours(verb, places, _OPPONENT_SIZE)
    return int(1e9 / (_OPPONENT_SHARE * together([driver], cores(), run_s)))
