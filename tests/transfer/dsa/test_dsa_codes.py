# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The bytes and checksums are right for every status of a device and any schedule of faults; bugs
planted in how copies are resumed are detected.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsa_device import End, Sent, WriteDevice
from dsa_schedule import (
    GCC,
    PRODUCT,
    Library,
    Schedule,
    WrongBytesError,
    built,
    opened,
    opened_pool,
    play,
    run,
    schedules,
)
from dsa_schedule import Scene as DsaScene
from hypothesis import HealthCheck, given, settings
from support.emulation import fewer
from support.engines import Bytes, peek, poke

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.errors import ChecksumError, TransferError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import DsaEngine, Plan, plan_blocks

# ---- The bytes and checksums are right for every status of a device, faults at every offset,
# any fault address, and batches that end early. A device in Python checks that every descriptor
# is within the limits of its queue.


TIMEOUT_S = 60.0
SIZES = np.array([1500, 1, 2999])
LENGTH = 4500
CHUNK = 1024

# enum dsa_completion_status of <linux/idxd.h>: all but success and the page fault that is resumed.
STATUSES = (0x02, *range(0x04, 0x0C), *range(0x10, 0x1E), *range(0x20, 0x25), 0x7F)


@contextmanager
def engine_on(pool: Pool, device: WriteDevice, **rules: bool) -> Iterator[DsaEngine]:
    engine = DsaEngine(pool, device.portal(), **rules)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()
        device.close()


def plan_of(pool: Pool, memory: Bytes) -> Plan:
    """Two blocks across the end of a stripe."""
    start = pool.geometry.data_offset + STRIPE_SIZE - 2048
    starts = np.array([0, 1503, 1507]) + np.array([[0], [LENGTH + 20]])
    return plan_blocks(
        (starts + memory.ctypes.data).astype(np.uint64),
        SIZES,
        np.array([start, start + 4544], np.uint64),
        chunk_size=CHUNK,
        owners=(memory,),
    )


def there_and_back(pool: Pool, engine: DsaEngine, seed: int = 1) -> None:
    source = np.random.default_rng(seed).integers(0, 256, 2 * LENGTH + 40, np.uint8)
    before, plan = source.copy(), plan_of(pool, source)
    engine.gather_write(plan).wait(TIMEOUT_S)
    sums, start = [], int(plan.chunks["offset"][0])
    for block in range(2):
        at = block * (LENGTH + 20)
        payload = np.concatenate(
            [source[at : at + 1500], source[at + 1503 : at + 1504], source[at + 1507 : at + 4506]]
        )
        found = peek(pool, start + block * 4544, 4544)
        assert np.array_equal(found[:LENGTH], payload)
        assert not found[LENGTH:].any()
        sums += [coherence.crc32c(payload[i : i + CHUNK].tobytes()) for i in range(0, 4500, CHUNK)]
    assert plan.checksums is not None
    assert plan.checksums.tolist() == sums
    target = np.zeros_like(source)
    back = plan_of(pool, target)
    assert back.checksums is not None
    back.checksums[:] = sums
    engine.scatter_read(back).wait(TIMEOUT_S)
    for row in (0, LENGTH + 20):
        for start, size in ((0, 1500), (1503, 1), (1507, 2999)):
            at = slice(row + start, row + start + size)
            assert np.array_equal(target[at], source[at])
    assert np.array_equal(source, before)


def well(_: random.Random, sent: Sent) -> End:
    return End(sent.size)


@pytest.mark.parametrize("device_flushes", [False, True])
@pytest.mark.parametrize(
    ("size_max", "batch_max", "depth"), [(64, 2, 1), (1000, 5, 3), (1 << 31, 0, 2), (4096, 64, 1)]
)
def test_a_queue_gets_at_most_its_configured_number_of_descriptors(
    pool: Pool, size_max: int, batch_max: int, depth: int, *, device_flushes: bool
) -> None:
    device = WriteDevice(well, size_max=size_max, batch_max=batch_max, depth=depth)
    with engine_on(pool, device, device_flushes=device_flushes) as engine:
        there_and_back(pool, engine)
        assert engine.stat.by_cpu == 0
        assert bool(engine.stat.batches) == (batch_max > 1)
    writes = [sent for sent in device.sent if sent.opcode == lib.BL_DSA_FILL]
    assert writes
    assert not any(sent.flags & lib.BL_DSA_CC for sent in writes)
    flushes = [sent for sent in device.sent if sent.opcode == lib.BL_DSA_CFLUSH]
    assert bool(flushes) == device_flushes


@pytest.mark.parametrize("batch_max", [0, 8], ids=["single", "batches"])
@pytest.mark.parametrize("moved", ["nothing", "some", "all"])
def test_the_cpu_executes_failed_descriptors(pool: Pool, moved: str, batch_max: int) -> None:
    """Each status occurs in turn; the other fields of such a record are invalid."""
    codes = iter([code | bit for code in STATUSES for bit in (0, lib.BL_DSA_STATUS_WRITE)] * 50)

    def fate(dice: random.Random, sent: Sent) -> End:
        done = {"nothing": 0, "some": dice.randrange(sent.size), "all": sent.size}[moved]
        lies = dice.choice([0, done, sent.size, 2**32 - 1])
        return End(done, next(codes), dice.getrandbits(64), lies)

    device = WriteDevice(fate, batch_max=batch_max)
    with engine_on(pool, device) as engine:
        for seed in range(4):
            there_and_back(pool, engine, seed)
        assert engine.stat.by_cpu >= 2 * len(STATUSES)
        assert engine.stat.faults == 0


def fault_addresses(sent: Sent, done: int, dice: random.Random) -> list[int]:
    ends = [sent.source, sent.target]
    return [
        *(end + done for end in ends),
        *((end + done) & ~4095 for end in ends),
        *(end + sent.size for end in ends),
        *(0, 4096, 2**64 - 1, 2**64 - 4096, dice.getrandbits(64)),
    ]


@pytest.mark.parametrize("device_flushes", [False, True])
@pytest.mark.parametrize("batch_max", [0, 8], ids=["single", "batches"])
def test_page_faults_at_every_offset_are_resolved(
    pool: Pool, batch_max: int, *, device_flushes: bool
) -> None:
    """An address outside the descriptor's ranges is ignored: a fill and a flush have no source, so
    a fault near zero has no address.
    """

    def fate(dice: random.Random, sent: Sent) -> End:
        if dice.random() < 0.3:
            return End(sent.size)
        done = dice.choice([0, 1, sent.size - 1, sent.size, dice.randrange(sent.size + 1)])
        status = lib.BL_DSA_PAGE_FAULT | dice.choice([0, lib.BL_DSA_STATUS_WRITE])
        reported = 2**32 - 1 if done == sent.size else min(done, sent.size)
        done = min(done, sent.size)
        return End(done, status, dice.choice(fault_addresses(sent, done, dice)), reported)

    device = WriteDevice(fate, size_max=777, batch_max=batch_max)
    with engine_on(pool, device, device_flushes=device_flushes) as engine:
        for seed in range(6):
            there_and_back(pool, engine, seed)
        assert engine.stat.faults > 0
        assert engine.stat.by_cpu > 0


def test_a_fault_at_a_reported_address_is_resolved_and_the_copy_continues(pool: Pool) -> None:
    def fate(dice: random.Random, sent: Sent) -> End:
        if sent.size < 2 or dice.random() < 0.3:
            return End(sent.size)
        done = dice.randrange(1, sent.size)
        is_write = sent.source == 0 or dice.random() < 0.5
        status = lib.BL_DSA_PAGE_FAULT | (lib.BL_DSA_STATUS_WRITE if is_write else 0)
        return End(done, status, (sent.target if is_write else sent.source) + done)

    device = WriteDevice(fate, batch_max=8)
    with engine_on(pool, device) as engine:
        there_and_back(pool, engine)
        assert engine.stat.faults > 0
        assert engine.stat.by_cpu == 0


def test_a_flush_that_faults_is_resumed_by_the_device(pool: Pool) -> None:
    """The record of a flush reports a read, but the fault is one of its target."""

    def fate(_: random.Random, sent: Sent) -> End:
        if sent.opcode == lib.BL_DSA_CFLUSH and sent.size > 64:
            return End(64, lib.BL_DSA_PAGE_FAULT, sent.target + 64)
        return End(sent.size)

    device = WriteDevice(fate)
    with engine_on(pool, device, device_flushes=True) as engine:
        there_and_back(pool, engine)
        assert engine.stat.faults > 0
        assert engine.stat.by_cpu == 0


PAGE = 4096
LIBC = ctypes.CDLL(None, use_errno=True)


def is_resident(address: int) -> bool:
    found = ctypes.create_string_buffer(1)
    page = ctypes.c_void_p(address & -PAGE)
    assert LIBC.mincore(page, ctypes.c_size_t(PAGE), found) == 0
    return bool(found.raw[0] & 1)


def test_a_missing_page_is_faulted_in_by_the_kernel(pool: Pool) -> None:
    """The device continues once the page is present: no other code has accessed it."""
    area = mmap.mmap(-1, 16 * PAGE)
    target = np.frombuffer(area, np.uint8)
    if LIBC.madvise(ctypes.c_void_p(target.ctypes.data), ctypes.c_size_t(PAGE), 22) != 0:
        pytest.skip("this kernel has no MADV_POPULATE_READ (Linux 5.14)")

    def fate(_: random.Random, sent: Sent) -> End:
        ends = [sent.target, *range((sent.target | (PAGE - 1)) + 1, sent.target + sent.size, PAGE)]
        missing = next((at for at in ends if not is_resident(at)), None)
        if missing is None:
            return End(sent.size)
        status = lib.BL_DSA_PAGE_FAULT | lib.BL_DSA_STATUS_WRITE
        return End(missing - sent.target, status, missing)

    source = np.random.default_rng(5).integers(0, 256, len(target), np.uint8)
    offsets = np.array([pool.geometry.data_offset], np.uint64)
    sizes = np.array([len(target)])
    poke(pool, pool.geometry.data_offset, source)
    device = WriteDevice(fate, size_max=3 * PAGE)
    with engine_on(pool, device) as engine:
        place = np.array([[target.ctypes.data]], np.uint64)
        engine.scatter_read(plan_blocks(place, sizes, offsets, chunk_size=0)).wait(TIMEOUT_S)
        assert np.array_equal(target, source)
        assert engine.stat.faults > 0
        assert engine.stat.by_cpu == 0


REACHES: dict[str, Callable[[random.Random, int], int]] = {
    "none": lambda _dice, _count: 0,
    "some": lambda dice, count: dice.randrange(count + 1),
    "all-but-one": lambda _dice, count: count - 1,
}


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("fails", [False, True])
def test_descriptors_omitted_from_a_batch_are_submitted_again(
    pool: Pool, reach: str, *, fails: bool
) -> None:
    def fate(dice: random.Random, sent: Sent) -> End:
        if fails and dice.random() < 0.4:
            return End(dice.randrange(sent.size + 1), lib.BL_DSA_HW_ERR1)
        return End(sent.size)

    device = WriteDevice(fate, batch_max=8, reach=REACHES[reach])
    with engine_on(pool, device) as engine:
        there_and_back(pool, engine)
        assert engine.stat.batches > 0
        if reach == "none":
            assert engine.stat.by_cpu > 0


def test_closing_waits_for_submitted_descriptors(pool: Pool) -> None:
    """Otherwise the device would later write its records into reused memory."""
    ended = []

    def fate(_: random.Random, sent: Sent) -> End:
        time.sleep(0.05)
        ended.append(sent)
        return End(sent.size)

    device = WriteDevice(fate)
    engine = DsaEngine(pool, device.portal())
    source = np.zeros(2 * LENGTH + 40, np.uint8)
    transfer = engine.gather_write(plan_of(pool, source))
    out = engine.stat.descriptors
    engine.close()
    assert out > 1
    assert len(ended) == out
    with pytest.raises(TransferError, match="closed before"):
        transfer.wait(TIMEOUT_S)
    device.close()


def test_a_failed_read_submits_no_more_descriptors(pool: Pool) -> None:
    device = WriteDevice(well, depth=1)
    with engine_on(pool, device) as engine:
        plan = plan_of(pool, np.zeros(2 * LENGTH + 40, np.uint8))
        engine.gather_write(plan).wait(TIMEOUT_S)
        before = len(device.sent)
        assert plan.checksums is not None
        plan.checksums[0] ^= 1
        with pytest.raises(ChecksumError):
            engine.scatter_read(plan).wait(TIMEOUT_S)
        assert len(device.sent) == before + 1


# ---- Faults of a DSA queue change neither bytes nor checksums.


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


# ---- The schedules of ``dsa_schedule.py`` detect bugs planted in the DSA engine's resumption.


TRIES = 40

# Each entry is a file, a line, and its replacement.
MUTANTS = {
    "none": ("", "", ""),
    "a resumed copy starts its sum anew": (
        "dsa/work.c",
        "work->crc = (uint32_t)record->crc;",
        "work->crc = bytes < descriptor->size ? 0 : (uint32_t)record->crc;",
    ),
    "a resumed copy keeps the seed it began with": (
        "dsa/work.c",
        "if (bl_dsa_opcode(descriptor) == BL_DSA_COPY_CRC)",
        "if (bl_dsa_opcode(descriptor) == BL_DSA_COPY_CRC && bytes == descriptor->size)",
    ),
    "a resumed copy skips a byte": (
        "dsa/work.c",
        "work->done += bytes;",
        "work->done += bytes + (bytes > 0 && bytes < descriptor->size);",
    ),
    "a resumed copy repeats a byte": (
        "dsa/work.c",
        "work->done += bytes;",
        "work->done += bytes - (bytes > 1 && bytes < descriptor->size);",
    ),
    "only the target moves on": (
        "dsa/work.c",
        "uint64_t memory = piece->address + work->done;",
        "uint64_t memory = piece->address;",
    ),
    "a fault counts as done": (
        "dsa/work.c",
        "if (status == BL_DSA_SUCCESS) {",
        "if (status == BL_DSA_SUCCESS || status == BL_DSA_PAGE_FAULT) {",
    ),
    "what a batch did not reach counts as done": (
        "dsa/work.c",
        "if (status == BL_DSA_SUCCESS) {",
        "if (status == BL_DSA_SUCCESS || status == BL_DSA_NONE) {",
    ),
    "a record answers for its neighbour's work": (
        "dsa/engine.c",
        "bl_dsa_record record = bl_dsa_record_look(&group->records[i]);",
        "bl_dsa_record record = bl_dsa_record_look(&group->records[i ^ (group->count > 1 && "
        "i + 1 < group->count)]);",
    ),
    "the last line is not blanked": (
        "dsa/work.c",
        "return transfer->is_read ? 0 : bl_dsa_work_blank(work);",
        "return 0;",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.skipif(not GCC, reason="needs gcc")
def test_a_planted_bug_is_detected(long_pool: Pool, tmp_path: Path, name: str) -> None:
    library = built(tmp_path, [MUTANTS[name]] if name != "none" else [])
    with opened_pool(library, long_pool) as handle:
        if name == "none":
            play_all(library, handle, long_pool)
        else:
            with pytest.raises(WrongBytesError):
                play_all(library, handle, long_pool)


def play_all(library: Library, handle: Any, pool: Pool) -> None:
    """Schedules with page faults and batches that end early, with one descriptor and with many."""
    rng = np.random.default_rng(3)
    for seed in range(TRIES):
        schedule = Schedule(
            seed=seed,
            sizes=tuple(rng.integers(1, 3000, rng.integers(2, 9)).tolist()),
            block_count=3,
            chunk_size=1024,
            part=10**6,
            size_max=4096,
            batch_max=(0, 32)[seed % 2],
            depth=8,
            flush=1,
            faults={"fault": 20_000, "list_fault": 20_000, "reorder": 30_000, "late": 10_000},
        )
        play(library, handle, pool, schedule)
