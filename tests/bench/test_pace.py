# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Paced devices in virtual time, on a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beluga_bench._limit import ffi, lib
from beluga_bench.harness import drive
from beluga_bench.harness.drive import Driver, Load
from beluga_bench.harness.pace import Pace, Paces, make_paces, parse_pace, shared_paces

from beluga.errors import BelugaError
from beluga.pool import STRIPE_SIZE, Pool


def clock(bytes_per_s: int, latency_ns: int = 0) -> Any:
    return ffi.new("drive_pace *", {"bytes_per_s": bytes_per_s, "latency_ns": latency_ns})


def test_a_pace_is_parsed_with_its_units() -> None:
    assert parse_pace("device=22.5GB/s,latency=650ns") == Pace(22_500_000_000, 650)
    assert parse_pace("device=500MB/s") == Pace(500_000_000, 0)
    assert parse_pace("latency=2us,device=1GB/s") == Pace(10**9, 2000)


@pytest.mark.parametrize(
    "text", ["", "device=0GB/s", "latency=650ns", "device=22.5", "device=3ns", "device=1GB/s,x=2ns"]
)
def test_an_invalid_pace_is_rejected(text: str) -> None:
    with pytest.raises(BelugaError, match="no pace"):
        parse_pace(text)


def test_an_idle_device_takes_its_transfer_time_and_latency() -> None:
    assert lib.drive_pace_take(clock(10**9, 650), 5_000, 1000) == 5_000 + 1000 + 650


def test_operations_queue_for_bandwidth_and_latencies_overlap() -> None:
    device = clock(10**9, 650)
    ends = [lib.drive_pace_take(device, 0, 1000) for _ in range(4)]
    assert ends == [1650, 2650, 3650, 4650]


def test_idle_time_accumulates_no_credit() -> None:
    device = clock(10**9)
    lib.drive_pace_take(device, 0, 1000)
    assert lib.drive_pace_take(device, 10_000, 1000) == 11_000


def test_every_offset_uses_the_clock_of_its_device(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    clocks = tmp_path / "clocks"
    make_paces(clocks, 2, Pace(10**9, 7))
    for interleave in (True, False):
        with Pool.create(paths, device_size=16 << 20, interleave=interleave, sparse=True) as pool:
            offsets = [stripe * STRIPE_SIZE for stripe in range(14)]
            for first, verb in enumerate(("read", "write")):
                paces = shared_paces(pool, clocks, verb, offsets)
                numbers = [paces.pointers[i] - paces.clocks for i in range(len(offsets))]
                devices = [0, 1] * 7 if interleave else [0] * 7 + [1] * 7
                assert numbers == [2 * device + first for device in devices]
                assert paces.pointers[0].latency_ns == 7
        Pool.destroy(paths)


def test_clocks_are_shared_by_all_processes_that_open_the_file(tmp_path: Path) -> None:
    clocks = tmp_path / "clocks"
    make_paces(clocks, 1, Pace(10**9))
    with Pool.create([tmp_path / "a"], device_size=16 << 20, sparse=True) as pool:
        mine, theirs = (shared_paces(pool, clocks, "read", [0]) for _ in range(2))
        lib.drive_pace_take(mine.pointers[0], 0, 5000)
        assert lib.drive_pace_take(theirs.pointers[0], 0, 1000) == 6000


def test_reads_and_writes_do_not_queue_behind_each_other(tmp_path: Path) -> None:
    clocks = tmp_path / "clocks"
    make_paces(clocks, 1, Pace(10**9))
    with Pool.create([tmp_path / "a"], device_size=16 << 20, sparse=True) as pool:
        reads, writes = (shared_paces(pool, clocks, verb, [0]) for verb in ("read", "write"))
        lib.drive_pace_take(writes.pointers[0], 0, 5000)
        assert lib.drive_pace_take(reads.pointers[0], 0, 1000) == 1000
        assert lib.drive_pace_take(writes.pointers[0], 0, 1000) == 6000


def test_a_load_that_overlaps_does_not_wait_for_its_own_latencies() -> None:
    """Its operations queue for the bandwidth, but the next one starts during a latency."""
    memory = np.zeros(4096, np.uint8)
    for overlaps in (False, True):
        pace = clock(10**12, 5_000_000_000 if overlaps else 50_000_000)
        pointers = ffi.new("drive_pace *[]", [pace] * 4)
        load = Load(
            drive.bare("load", memory.ctypes.data),
            np.zeros(4, np.uint64),
            64,
            Paces(pointers, pace),
            overlaps=overlaps,
        )
        start_ns = drive.now_ns()
        assert Driver(load).count(4) > 0
        taken_ns = drive.now_ns() - start_ns
        assert taken_ns < 5_000_000_000 if overlaps else taken_ns >= 200_000_000
