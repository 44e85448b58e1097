# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The software queue behaves like a DSA, and csrc/format/dsa.h equals the kernel's header."""

from __future__ import annotations

import itertools
import os
import shutil
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

from beluga import _build, _core, coherence
from beluga._ffi import ffi, lib

# ---- The software queue behaves like a DSA: it accepts descriptors and writes completion
# records.


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


# ---- ``csrc/format/dsa.h`` equals the kernel's ``<linux/idxd.h>``, byte for byte.


GCC, OBJDUMP = shutil.which("gcc") or "", shutil.which("objdump") or ""
HEADER = Path("/usr/include/linux/idxd.h")

# Ours, theirs.
FIELDS = {
    ("bl_dsa_descriptor", "struct dsa_hw_desc"): {
        "record": "completion_addr",
        "source": "src_addr",
        "pattern": "pattern",
        "list": "desc_list_addr",
        "target": "dst_addr",
        "source2": "src2_addr",
        "size": "xfer_size",
        "count": "desc_count",
        "interrupt": "int_handle",
        "reserved": "rsvd1",
        "expected": "expected_res",
        "target2": "dest2",
        "seed": "crc_seed",
        "seed_reserved": "crc_rsvd",
        "seed_address": "seed_addr",
        "specific": "op_specific",
    },
    ("bl_dsa_record", "struct dsa_completion_record"): {
        "status": "status",
        "result": "result",
        "reserved": "rsvd",
        "completed": "bytes_completed",
        "fault_address": "fault_addr",
        "crc": "crc_val",
        "specific": "op_specific",
    },
}

CONSTANTS = {
    "BL_DSA_NOOP": "DSA_OPCODE_NOOP",
    "BL_DSA_BATCH": "DSA_OPCODE_BATCH",
    "BL_DSA_DRAIN": "DSA_OPCODE_DRAIN",
    "BL_DSA_MEMMOVE": "DSA_OPCODE_MEMMOVE",
    "BL_DSA_FILL": "DSA_OPCODE_MEMFILL",
    "BL_DSA_COMPARE": "DSA_OPCODE_COMPARE",
    "BL_DSA_DUALCAST": "DSA_OPCODE_DUALCAST",
    "BL_DSA_CRCGEN": "DSA_OPCODE_CRCGEN",
    "BL_DSA_COPY_CRC": "DSA_OPCODE_COPY_CRC",
    "BL_DSA_CFLUSH": "DSA_OPCODE_CFLUSH",
    **{
        f"BL_DSA_{name}": f"IDXD_OP_FLAG_{name}"
        for name in ("FENCE", "BOF", "CRAV", "RCR", "CR", "CC", "STORD", "DRDBK", "DSTS")
    },
    "BL_DSA_NONE": "DSA_COMP_NONE",
    "BL_DSA_SUCCESS": "DSA_COMP_SUCCESS",
    "BL_DSA_SUCCESS_PRED": "DSA_COMP_SUCCESS_PRED",
    "BL_DSA_PAGE_FAULT": "DSA_COMP_PAGE_FAULT_NOBOF",
    **{
        f"BL_DSA_{name}": f"DSA_COMP_{name}"
        for name in (
            *("BATCH_FAIL", "BATCH_PAGE_FAULT", "BAD_OPCODE", "INVALID_FLAGS", "NOZERO_RESERVE"),
            *("XFER_ERANGE", "DESC_CNT_ERANGE", "OVERLAP_BUFFERS", "DCAST_ERR", "DESCLIST_ALIGN"),
            *("CRA_ALIGN", "ADDR_ALIGN", "HW_ERR1", "STATUS_MASK", "STATUS_WRITE"),
        )
    },
}
OURS_ALONE = {"BL_DSA_SEED_READ"}  # the header has the bit for another device only

PROGRAM = """
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <linux/idxd.h>
#include "format/dsa.h"
#define SAME(what, ours, theirs) \\
    if ((ours) != (theirs)) printf("%s: %ld, not %ld\\n", what, (long)(ours), (long)(theirs))
int main(void)
{
@CHECKS@
    bl_dsa_descriptor ours = {.pasid_privilege = 0x12345 | 1u << 31,
                              .flags_opcode = 0xabcdef | 0x11u << 24};
    struct dsa_hw_desc theirs;
    memcpy(&theirs, &ours, sizeof theirs);
    SAME("pasid", 0x12345, theirs.pasid);
    SAME("priv", 1, theirs.priv);
    SAME("flags", 0xabcdef, theirs.flags);
    SAME("opcode", 0x11, theirs.opcode);
    bl_dsa_record record = {.invalid_flags = 0xabcdef};
    struct dsa_completion_record completion;
    memcpy(&completion, &record, sizeof completion);
    SAME("invalid_flags", 0xabcdef, completion.invalid_flags);
    return 0;
}
"""


def checks() -> str:
    lines = []
    for (ours, theirs), fields in FIELDS.items():
        lines.append(f'SAME("{ours}", sizeof({ours}), sizeof({theirs}));')
        for mine, its in fields.items():
            for what in (
                "offsetof({0}, {1})",
                "sizeof((({0} *)0)->{1})",
            ):
                pair = what.format(ours, mine), what.format(theirs, its)
                lines.append(f'SAME("{mine}", {pair[0]}, {pair[1]});')
    lines += [f'SAME("{ours}", {ours}, {theirs});' for ours, theirs in CONSTANTS.items()]
    return "\n".join(lines)


def test_every_constant_is_compared() -> None:
    kinds = ("bl_dsa_opcode", "bl_dsa_flag", "bl_dsa_status")
    names = {name for kind in kinds for name in _core.ffi.typeof(f"enum {kind}").relements}
    assert names == CONSTANTS.keys() | OURS_ALONE


def test_every_field_is_compared() -> None:
    for (ours, _), fields in FIELDS.items():
        names = {name for name, _kind in flat(_core.ffi.typeof(ours))}
        tested_apart = {"pasid_privilege", "flags_opcode", "invalid_flags"}
        assert names - tested_apart == fields.keys() - tested_apart


def flat(kind: object) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, field in kind.fields:  # type: ignore[attr-defined]
        found += [(name, field)] if name else flat(field.type)
    return found


@pytest.mark.skipif(not HEADER.exists(), reason=f"needs {HEADER} (linux-libc-dev)")
@pytest.mark.skipif(not GCC, reason="needs gcc")
@pytest.mark.parametrize("planted", [False, True], ids=["as-it-is", "wrong"])
def test_layout_and_constants_are_the_kernels(tmp_path: Path, *, planted: bool) -> None:
    source, program = tmp_path / "compare.c", tmp_path / "compare"
    source.write_text(PROGRAM.replace("@CHECKS@", checks()))
    (tmp_path / "format").mkdir()
    shutil.copy(_build.CSRC / "format/dsa.h", tmp_path / "format")
    if planted:
        copy = tmp_path / "format/dsa.h"
        copy.write_text(copy.read_text().replace("BL_DSA_CC = 0x0100", "BL_DSA_CC = 0x0200"))
    command = [GCC, "-Wall", f"-I{tmp_path}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, env={**os.environ, "LC_ALL": "C"})
    differences = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert differences == ("BL_DSA_CC: 512, not 256\n" if planted else "")


def test_the_instructions_match_a_disassembler(tmp_path: Path) -> None:
    """Their bytes stand in ``csrc/coherence/x86.h``, for assemblers without them."""
    if not GCC or not OBJDUMP:
        pytest.skip("needs gcc and objdump")
    source, program = tmp_path / "portal.c", tmp_path / "portal.o"
    source.write_text(
        '#define BL_FORMAT_HASH 0\n#include "coherence/coherence.h"\n'
        "int enqueue(void *p, void *d) { return bl_portal_enqueue(p, d); }\n"
        "void move(void *p, void *d) { bl_portal_move(p, d); }\n"
        "void sleep_light(uint64_t *w) { bl_monitor(w, 0, 1000); }\n"
    )
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-w", "-c", f"-I{_build.CSRC}"]
    subprocess.run([GCC, *flags, str(source), "-o", str(program)], check=True)
    listing = subprocess.run(
        [OBJDUMP, "-d", str(program)], check=True, capture_output=True, text=True
    ).stdout
    if "(bad)" in listing:
        pytest.skip("this objdump does not know them")
    assert "enqcmd (%rdx),%rax" in listing
    assert "movdir64b (%rdx),%rax" in listing
    assert "umonitor %rax" in listing
    assert "umwait %ecx" in listing
