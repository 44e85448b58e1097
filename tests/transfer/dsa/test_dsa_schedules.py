# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Faults of a DSA queue change neither bytes nor checksums."""

from __future__ import annotations

from dsa_schedule import PRODUCT, Schedule, opened, play, run, schedules
from dsa_schedule import Scene as DsaScene
from hypothesis import HealthCheck, given, settings
from support.emulation import fewer

from beluga._ffi import ffi, lib
from beluga.pool import Pool


@settings(max_examples=fewer(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules())
def test_any_schedule_yields_the_same_bytes_and_checksums(
    long_pool: Pool, schedule: Schedule
) -> None:
    play(PRODUCT, long_pool.handle, long_pool, schedule)


def storm(**faults: int) -> Schedule:
    return Schedule(
        seed=7,
        sizes=(3000, 20_000, 77),
        block_count=6,
        chunk_size=4096,
        part=10**9,
        size_max=4096,
        batch_max=faults.pop("batch_max", 32),
        depth=8,
        flush=1,
        faults=faults,
    )


def stat_of(pool: Pool, schedule: Schedule) -> dict[str, int]:
    """Return an engine's counters after one write by this schedule."""
    scene = DsaScene.make(schedule, pool)
    with opened(PRODUCT, pool.handle, schedule) as engine:
        assert not any(run(PRODUCT, engine, scene.plan(scene.content), 10**9, is_read=False))
        out = ffi.new("bl_dsa_stat *")
        lib.bl_dsa_engine_stat(engine, out)
        return {name: int(getattr(out, name)) for name in dir(out)}


def test_each_kind_of_fault_occurs(long_pool: Pool) -> None:
    """A schedule without faults would prove nothing."""
    calm = stat_of(long_pool, storm())
    assert calm["batches"] > 0
    assert calm["descriptors"] > calm["batches"]
    assert calm["full"] == calm["faults"] == calm["by_cpu"] == 0
    assert stat_of(long_pool, storm(full=20_000, full_run=3))["full"] > 0
    assert stat_of(long_pool, storm(fault=20_000))["faults"] > 0
    assert stat_of(long_pool, storm(error=20_000))["by_cpu"] > 0
    faulty = stat_of(long_pool, storm(list_fault=40_000))
    assert faulty["descriptors"] > calm["descriptors"]  # some descriptors were resubmitted
    assert stat_of(long_pool, storm(batch_max=0))["batches"] == 0


def test_the_cpu_copies_if_a_queue_stays_full(long_pool: Pool) -> None:
    full = storm(full=65_536, full_run=1000)
    stat = stat_of(long_pool, full)
    assert stat["descriptors"] == 0
    assert stat["by_cpu"] > 0
    play(PRODUCT, long_pool.handle, long_pool, full)


def test_the_cpu_copies_if_a_page_never_arrives(long_pool: Pool) -> None:
    """Nearly every descriptor faults, after a few bytes or none."""
    play(PRODUCT, long_pool.handle, long_pool, storm(fault=65_000, error=100))
