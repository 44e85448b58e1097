# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of many concurrent operations (the paper's Exp 3, skewed access, and Exp
4, background load).

Threads on separate cores read or write in the whole region, or mostly in a hot set, which is on the
first device unless the pool is interleaved; then the same in private memory, by the limit loops.
Then one thread reads or writes lines while another process keeps a rate on the same device, from a
quarter to nine tenths of its bandwidth, in the same or the opposite direction. Then several GPUs,
if available, use one device and one NUMA node (Fig. 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from beluga.pool import Pool

from ..gpu.many import gpu_bandwidth
from ..harness import drive
from ..harness.drive import Driver, Load, Offsets, together
from ..harness.ground import coherence_of, ground
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import SOFTWARE, Options
from ..harness.pace import paced, parse_pace
from ..harness.peer import Peer
from ..harness.private import private
from ..harness.ratio import race
from ..harness.region import Region, dealt, region_of, skewed, uniform
from ..harness.row import Recorder, Row, copies, percentiles, speed
from .latency import VERBS

SIZES = (64, 16 << 10)
PATTERNS: dict[str, Callable[[int, int, int], Offsets]] = {"uniform": uniform, "skewed": skewed}

_RUN_S = 0.02
_SMOKE_RUN_S = 0.002
_PRESSED_RUN_S = 0.1  # long enough for the other process to reach its rate
_SAMPLES_PER_S = 10_000_000  # more operations than one thread can do
_LINE = 64
_OPPONENT_SIZE = 16 << 10
PRESSURES = (0.25, 0.5, 0.75, 0.9)  # of the device's bandwidth, which another process uses
_SMOKE_PRESSURES = (0.5,)
_OPPONENT_LEAD_S = 0.01
_REACHED = 0.9  # of the pressure; with less, a row is measured again
_LOCAL_SIZE = 64 << 20


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
        rows += _local(options)
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
    limit = options.threads or len(cores())
    return sorted({*(1 << step for step in range(limit.bit_length()) if 1 << step <= limit), limit})


def _row(setting: _Setting, verb: str, size: int, pattern: str, count: int) -> Row:
    options, region, run_s = setting.options, setting.region, setting.run_s
    case = f"{verb}, {pattern}, {setting.layout}"
    options.report(f"bandwidth {case}, {size} bytes, {count} threads")
    offsets = dealt(PATTERNS[pattern](region.span, size, options.seed), count)
    ours = [region.ours(verb, part, size) for part in offsets]
    fixed: Row = {"bytes": size, "threads": count}
    cpus = cores()
    if region.pace_file is not None:
        return setting.recorder.row(case, **fixed, **_sampled(ours, size, run_s))
    limit = [region.limit(verb, part, size) for part in offsets]
    ratio = race(
        lambda: together(limit, cpus, run_s),
        lambda: together(ours, cpus, run_s),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    return setting.recorder.row(
        case, **fixed, **{**_sampled(ours, size, run_s), **copies(ratio, size)}
    )


def _local(options: Options) -> list[Row]:
    """Return the rows of uniform and skewed access to this process's own memory."""
    fixed: Row = {"memory": "DRAM (private)", "coherence": SOFTWARE, "depth": 1}
    recorder = Recorder("bandwidth", options, fixed)
    rows = []
    with private(_LOCAL_SIZE) as base:
        for verb, size, pattern in product(VERBS, SIZES, PATTERNS):
            for count in thread_counts(options):
                case = f"{verb}, {pattern}, local DRAM"
                options.report(f"bandwidth {case}, {size} bytes, {count} threads")
                offsets = dealt(PATTERNS[pattern](_LOCAL_SIZE, size, options.seed), count)
                drivers = [Driver(Load(drive.bare(verb, base), part, size)) for part in offsets]
                run_s = _SMOKE_RUN_S if options.smoke else _RUN_S
                fields = _sampled(drivers, size, run_s)
                rows.append(recorder.row(case, bytes=size, threads=count, **fields))
    return rows


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
    """Measure single lines alone, and while another process reads or writes the same device."""
    cpus = cores()
    if len(cpus) < 2:
        return [setting.recorder.skipped("beside another process", "needs two cores")]
    options = setting.options
    lines = uniform(setting.region.piece // 2, _LINE, options.seed)
    fixed: Row = {"bytes": _LINE, "threads": 1}
    rows = []
    with pinned(cpus[0]), Peer(setting.region.pool, cpus[1]) as peer:
        bandwidths = {verb: _bandwidth(setting, verb) for verb in VERBS}
        for verb in VERBS:
            ours = setting.region.ours(verb, lines, _LINE)
            alone = _sampled([ours], _LINE, _pressed_s(options))
            rows.append(setting.recorder.row(f"{verb}, alone", **fixed, **alone))
            for other, share in product(VERBS, _SMOKE_PRESSURES if options.smoke else PRESSURES):
                options.report(f"bandwidth {verb}, beside another process's {other}s, {share:.0%}")
                rate = share * bandwidths[other]
                for _ in range(1 + options.retry_count):
                    _press(setting, peer, other, rate)
                    loaded = _sampled([ours], _LINE, _pressed_s(options))
                    reached = float(peer.result()["gb_per_s"]) * 1e9
                    if reached > _REACHED * rate:
                        break
                direction = "same" if verb == other else "opposite"
                rows.append(
                    setting.recorder.row(
                        f"{verb}, beside {other}s at {share:.0%} ({direction} direction)",
                        note=f"another process {other}s {reached / 1e9:.2f} GB/s, "
                        f"{rate / 1e9:.2f} wanted",
                        noisy=reached <= _REACHED * rate,
                        **fixed,
                        **loaded,
                    )
                )
    return rows


def _pressed_s(options: Options) -> float:
    return _SMOKE_RUN_S if options.smoke else _PRESSED_RUN_S


def _press(setting: _Setting, peer: Peer, verb: str, bytes_per_s: float) -> None:
    """Start another process's load on the other half of the device, which lasts a bit longer than
    a run.
    """
    region = setting.region
    half = region.piece // 2
    offsets = uniform(half, _OPPONENT_SIZE, setting.options.seed)[:256]
    peer.start(
        "load",
        verb=verb,
        offsets=(offsets + np.uint64(region.pool.geometry.data_offset + half)).tolist(),
        size=_OPPONENT_SIZE,
        period_ns=round(_OPPONENT_SIZE * 1e9 / bytes_per_s),
        duration_s=_pressed_s(setting.options) + 2 * _OPPONENT_LEAD_S,
        pace_file=None if region.pace_file is None else str(region.pace_file),
    )


def _bandwidth(setting: _Setting, verb: str) -> float:
    """Return the bytes per second of a device in one direction: the pace's, or what one thread
    reaches.
    """
    if setting.options.pace is not None:
        return float(parse_pace(setting.options.pace).bytes_per_s)
    region = setting.region
    offsets = uniform(region.piece // 2, _OPPONENT_SIZE, setting.options.seed)
    driver = region.ours(verb, offsets, _OPPONENT_SIZE)
    return _OPPONENT_SIZE * together([driver], cores(), setting.run_s)
