# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The software queue behaves like a DSA: it accepts descriptors and writes completion records."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.emulation import PATIENCE
from support.soft_dsa import soft_queue

from beluga import coherence
from beluga._ffi import ffi, lib

TESTS = Path(__file__).resolve().parents[2]

SIZE = 1 << 16
RECORD = lib.BL_DSA_CRAV | lib.BL_DSA_RCR
TIMEOUT_S = 60.0


class Device:
    """A software queue, and memory for it: a source, two targets, records, a descriptor list."""

    def __init__(self, **faults: int) -> None:
        self.limits = ffi.new("bl_dsa_limits *", [SIZE // 4, 8, 16, 0, 0])
        self.queue = soft_queue(self.limits, faults)
        self._raw = np.zeros(8 * SIZE, np.uint8)
        base = self._raw.ctypes.data + -self._raw.ctypes.data % 4096
        self.source, self.target, self.target2, self._records, self.list = (
            base + at * SIZE for at in range(5)
        )
        self._next = itertools.count()
        self.bytes(self.source, SIZE)[:] = np.random.default_rng(1).bytes(SIZE)

    def bytes(self, address: int, size: int) -> Any:
        return ffi.buffer(ffi.cast("uint8_t *", address), size)

    def make(self, opcode: int, flags: int = 0, **fields: int) -> Any:
        """A descriptor with its own completion record."""
        descriptor = ffi.new("bl_dsa_descriptor *", {})
        descriptor.flags_opcode = flags | RECORD | opcode << 24
        descriptor.record = self._records + 32 * next(self._next)
        for name, value in fields.items():
            setattr(descriptor, name, value)
        return descriptor

    def submit(self, descriptor: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while (code := lib.bl_dsa_submit(self.queue, descriptor)) != 0:
            assert code == -11
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def record_of(self, descriptor: Any) -> Any:
        """The completion record, once it is written."""
        record = ffi.cast("bl_dsa_record *", descriptor.record)
        deadline = time.monotonic() + TIMEOUT_S
        while record.status == lib.BL_DSA_NONE:
            assert time.monotonic() < deadline
            time.sleep(0.0001)
        return record

    def run(self, opcode: int, flags: int = 0, **fields: int) -> Any:
        descriptor = self.make(opcode, flags, **fields)
        self.submit(descriptor)
        return self.record_of(descriptor)

    def batch(self, descriptors: list[Any], **fields: int) -> Any:
        for index, descriptor in enumerate(descriptors):
            ffi.memmove(ffi.cast("void *", self.list + 64 * index), descriptor, 64)
        fields = {"list": self.list, "count": len(descriptors), **fields}
        return self.run(lib.BL_DSA_BATCH, **fields)

    def close(self) -> None:
        lib.bl_dsa_queue_close(self.queue)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


@pytest.mark.parametrize("cached", [0, lib.BL_DSA_CC], ids=["to-memory", "to-cache"])
@pytest.mark.parametrize(("skew", "size"), [(0, 4096), (1, 1), (63, 200), (5, 10_001)])
def test_bytes_are_copied(device: Device, skew: int, size: int, cached: int) -> None:
    record = device.run(
        lib.BL_DSA_MEMMOVE, cached, source=device.source, target=device.target + skew, size=size
    )
    assert record.status == lib.BL_DSA_SUCCESS
    moved = bytes(device.bytes(device.target, SIZE))
    wanted = bytes(skew) + bytes(device.bytes(device.source, size)) + bytes(SIZE - skew - size)
    assert moved == wanted


def test_overlapping_copies_are_correct(device: Device) -> None:
    before = bytes(device.bytes(device.source, 6000))
    record = device.run(
        lib.BL_DSA_MEMMOVE, source=device.source, target=device.source + 100, size=5900
    )
    assert record.status == lib.BL_DSA_SUCCESS
    assert bytes(device.bytes(device.source, 6000)) == before[:100] + before[:5900]


def test_checksums_are_crc32c_and_continue_from_a_seed(device: Device) -> None:
    content = bytes(device.bytes(device.source, 9000))
    first = device.run(lib.BL_DSA_COPY_CRC, source=device.source, target=device.target, size=5000)
    assert first.crc == coherence.crc32c(content[:5000])
    second = device.run(
        lib.BL_DSA_CRCGEN, source=device.source + 5000, size=4000, seed=int(first.crc)
    )
    assert second.crc == coherence.crc32c(content)
    assert bytes(device.bytes(device.target, 5000)) == content[:5000]
    device.bytes(device.target2, 4)[:] = int(first.crc).to_bytes(4, "little")
    third = device.run(
        lib.BL_DSA_CRCGEN,
        lib.BL_DSA_SEED_READ,
        source=device.source + 5000,
        size=4000,
        seed_address=device.target2,
    )
    assert third.crc == second.crc
    device.bytes(device.source, 9)[:] = b"123456789"
    assert device.run(lib.BL_DSA_CRCGEN, source=device.source, size=9).crc == 0xE3069283


def test_fill_compare_dualcast_and_flush_work(device: Device) -> None:
    fill = device.run(
        lib.BL_DSA_FILL, pattern=0x0807060504030201, target=device.target + 3, size=21
    )
    assert fill.status == lib.BL_DSA_SUCCESS
    pattern = (bytes(range(1, 9)) * 3)[:21]
    assert bytes(device.bytes(device.target, 26)) == bytes(3) + pattern + bytes(2)
    cast = device.run(
        lib.BL_DSA_DUALCAST,
        source=device.source,
        target=device.target,
        target2=device.target2,
        size=5000,
    )
    assert cast.status == lib.BL_DSA_SUCCESS
    assert bytes(device.bytes(device.target2, 5000)) == bytes(device.bytes(device.source, 5000))
    same = {"source": device.target, "source2": device.target2, "size": 5000}
    equal = device.run(lib.BL_DSA_COMPARE, **same)
    assert (equal.status, equal.result) == (lib.BL_DSA_SUCCESS, 0)
    device.bytes(device.target2, SIZE)[4321:4322] = bytes(
        [255 - device.bytes(device.target2, SIZE)[4321][0]]
    )
    differ = device.run(lib.BL_DSA_COMPARE, **same)
    assert (differ.status, differ.result, differ.completed) == (lib.BL_DSA_SUCCESS, 1, 4321)
    expected = device.run(lib.BL_DSA_COMPARE, lib.BL_DSA_CR, expected=1, **same)
    assert expected.status == lib.BL_DSA_SUCCESS
    other = device.run(lib.BL_DSA_COMPARE, lib.BL_DSA_CR, **same)
    assert other.status == lib.BL_DSA_SUCCESS_PRED
    for flags in (0, lib.BL_DSA_CC):
        flush = device.run(lib.BL_DSA_CFLUSH, flags, target=device.target, size=4096)
        assert flush.status == lib.BL_DSA_SUCCESS
    assert device.run(lib.BL_DSA_NOOP).status == lib.BL_DSA_SUCCESS


Fields = Callable[[Device], dict[str, int]]


def move(device: Device, **changes: int) -> dict[str, int]:
    return {"source": device.source, "target": device.target, "size": 100, **changes}


REFUSALS: dict[str, tuple[int, int, Fields, int]] = {
    "opcode": (0x55, 0, move, lib.BL_DSA_BAD_OPCODE),
    "flag": (lib.BL_DSA_MEMMOVE, lib.BL_DSA_CR, move, lib.BL_DSA_INVALID_FLAGS),
    "fence": (lib.BL_DSA_MEMMOVE, lib.BL_DSA_FENCE, move, lib.BL_DSA_INVALID_FLAGS),
    "block": (lib.BL_DSA_MEMMOVE, lib.BL_DSA_BOF, move, lib.BL_DSA_INVALID_FLAGS),
    "reserved": (
        lib.BL_DSA_MEMMOVE,
        0,
        lambda d: move(d, reserved=1),
        lib.BL_DSA_NOZERO_RESERVE,
    ),
    "specific": (
        lib.BL_DSA_MEMMOVE,
        0,
        lambda d: move(d, seed=1),
        lib.BL_DSA_NOZERO_RESERVE,
    ),
    "nothing": (lib.BL_DSA_MEMMOVE, 0, lambda d: move(d, size=0), lib.BL_DSA_XFER_ERANGE),
    "much": (
        lib.BL_DSA_MEMMOVE,
        0,
        lambda d: move(d, size=SIZE // 4 + 1),
        lib.BL_DSA_XFER_ERANGE,
    ),
    "overlap": (
        lib.BL_DSA_COPY_CRC,
        0,
        lambda d: move(d, target=d.source + 99),
        lib.BL_DSA_OVERLAP_BUFFERS,
    ),
    "dualcast": (
        lib.BL_DSA_DUALCAST,
        0,
        lambda d: move(d, target2=d.target2 + 1),
        lib.BL_DSA_DCAST_ERR,
    ),
    "seed": (
        lib.BL_DSA_CRCGEN,
        lib.BL_DSA_SEED_READ,
        lambda d: {"source": d.source, "size": 8, "seed_address": d.target2 + 1},
        lib.BL_DSA_ADDR_ALIGN,
    ),
    "one-of-a-batch": (
        lib.BL_DSA_BATCH,
        0,
        lambda d: {"list": d.list, "count": 1},
        lib.BL_DSA_DESC_CNT_ERANGE,
    ),
    "many-of-a-batch": (
        lib.BL_DSA_BATCH,
        0,
        lambda d: {"list": d.list, "count": 9},
        lib.BL_DSA_DESC_CNT_ERANGE,
    ),
    "list": (
        lib.BL_DSA_BATCH,
        0,
        lambda d: {"list": d.list + 32, "count": 2},
        lib.BL_DSA_DESCLIST_ALIGN,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_invalid_descriptors_are_rejected_as_by_hardware(device: Device, name: str) -> None:
    opcode, flags, fields, status = REFUSALS[name]
    record = device.run(opcode, flags, **fields(device))
    assert record.status == status
    assert bytes(device.bytes(device.target, SIZE)) == bytes(SIZE)
    if status == lib.BL_DSA_INVALID_FLAGS:
        assert record.invalid_flags == flags


def test_a_record_is_written_to_its_address_or_not_at_all(device: Device) -> None:
    crooked = device.make(lib.BL_DSA_NOOP)
    crooked.record += 8
    silent = device.make(lib.BL_DSA_NOOP)
    silent.flags_opcode = lib.BL_DSA_NOOP << 24 | lib.BL_DSA_CRAV
    for descriptor in (crooked, silent):
        device.submit(descriptor)
    assert device.run(lib.BL_DSA_DRAIN).status == lib.BL_DSA_SUCCESS
    for descriptor in (crooked, silent):
        assert ffi.cast("bl_dsa_record *", descriptor.record).status == lib.BL_DSA_NONE


def test_a_fence_in_a_batch_orders_its_descriptors(device: Device) -> None:
    """Descriptors after the fence start after all others, or not at all if one failed."""
    stormy = Device(seed=3, reorder=65_536)
    try:
        for _ in range(30):
            steps = [
                stormy.make(
                    lib.BL_DSA_MEMMOVE,
                    lib.BL_DSA_FENCE if step else 0,
                    source=stormy.source + 64 * step,
                    target=stormy.target,
                    size=64,
                )
                for step in range(6)
            ]
            assert stormy.batch(steps).status == lib.BL_DSA_SUCCESS
            last = bytes(stormy.bytes(stormy.source + 64 * 5, 64))
            assert bytes(stormy.bytes(stormy.target, 64)) == last
    finally:
        stormy.close()
    bad = device.make(lib.BL_DSA_MEMMOVE, source=device.source, target=device.target, size=0)
    fine = device.make(lib.BL_DSA_NOOP)
    fenced = device.make(lib.BL_DSA_NOOP, lib.BL_DSA_FENCE)
    record = device.batch([bad, fine, fenced])
    assert (record.status, record.completed) == (lib.BL_DSA_BATCH_FAIL, 2)
    assert device.record_of(bad).status == lib.BL_DSA_XFER_ERANGE
    assert device.record_of(fine).status == lib.BL_DSA_SUCCESS
    assert ffi.cast("bl_dsa_record *", fenced.record).status == lib.BL_DSA_NONE


def test_batches_and_drains_are_rejected_inside_a_batch(device: Device) -> None:
    inner = [device.make(lib.BL_DSA_DRAIN), device.make(lib.BL_DSA_BATCH)]
    assert device.batch(inner).status == lib.BL_DSA_BATCH_FAIL
    assert {device.record_of(each).status for each in inner} == {lib.BL_DSA_BAD_OPCODE}


def test_a_drain_ends_after_all_before_it() -> None:
    device = Device(seed=5, reorder=60_000, late=60_000)
    try:
        for _ in range(20):
            before = [device.make(lib.BL_DSA_NOOP) for _ in range(8)]
            drain = device.make(lib.BL_DSA_DRAIN)
            for descriptor in (*before, drain):
                device.submit(descriptor)
            device.record_of(drain)
            records = [ffi.cast("bl_dsa_record *", each.record) for each in before]
            assert all(record.status == lib.BL_DSA_SUCCESS for record in records)
    finally:
        device.close()


def test_a_full_queue_raises_a_clear_error() -> None:
    delay_s = 0.05
    device = Device(delay_us=int(delay_s * 1e6))
    try:
        start = time.monotonic()
        codes = [lib.bl_dsa_submit(device.queue, device.make(lib.BL_DSA_NOOP)) for _ in range(40)]
        # its depth, and the descriptors that it has started
        room = 17 + (time.monotonic() - start) / delay_s
    finally:
        device.close()
    assert set(codes) <= {0, -11}
    assert 16 <= codes.count(0) <= room


def test_no_descriptor_completes_during_its_submission() -> None:
    """The caller sees the record later, as with a device."""
    delay_s = 0.2
    device = Device(delay_us=int(delay_s * 1e6))
    try:
        for _ in range(10):
            descriptor = device.make(lib.BL_DSA_NOOP)
            start = time.monotonic()
            device.submit(descriptor)
            status = ffi.cast("bl_dsa_record *", descriptor.record).status
            if time.monotonic() - start < delay_s:  # otherwise this thread had slept and missed it
                assert status == lib.BL_DSA_NONE
                break
        assert device.record_of(descriptor).status == lib.BL_DSA_SUCCESS
    finally:
        device.close()


FAULT = """
import faulthandler
import sys
sys.path.insert(0, sys.argv[1])
from beluga._ffi import ffi, lib
from support.soft_dsa import soft_queue
faulthandler.enable()
queue = soft_queue(ffi.new("bl_dsa_limits *", [4096, 8, 16, 0, 0]))
descriptor = ffi.new("bl_dsa_descriptor *", {"source": 64, "target": 64, "size": 64})
descriptor.flags_opcode = lib.BL_DSA_MEMMOVE << 24
assert lib.bl_dsa_submit(queue, descriptor) == 0
lib.bl_dsa_queue_close(queue)
"""


def test_a_fault_in_the_thread_of_the_queue_is_reported() -> None:
    """A signal that an instruction raises is not blocked: a handler of the application sees it."""
    ended = subprocess.run(
        [sys.executable, "-c", FAULT, str(TESTS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120 * PATIENCE,
    )
    assert ended.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.stderr
