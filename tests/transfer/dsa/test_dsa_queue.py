# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Work queues: found in sysfs, opened as configured or refused, and each way of submitting to one,
with a stand-in for the device.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsa_device import End, WriteDevice
from support.soft_dsa import soft_queue

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.errors import EngineUnavailableError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import DsaEngine, plan_blocks
from beluga.transfer import dsa as dsa_queue
from beluga.transfer.dsa import (
    Portal,
    WorkQueue,
    limits_of,
    nearest,
    open_device,
    why_none,
    work_queues,
)

# ---- Each way of submitting to a device's queue works, with a stand-in for the device.


LINE, PAGE = 64, 4096
TIMEOUT_S = 60.0

needs_movdir64b = pytest.mark.skipif(
    not lib.bl_cpu_features() & lib.BL_CPU_MOVDIR64B, reason="this CPU has no movdir64b"
)


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=8 * STRIPE_SIZE, coherence="software", sparse=True) as made:
        yield made


def round_trip(pool: Pool, engine: DsaEngine) -> None:
    rng = np.random.default_rng(2)
    source = rng.integers(0, 256, 300_000, np.uint8)
    sizes = np.array([100_000, 77, 199_923])
    starts = np.array([[0, 100_000, 100_077]], np.uint64)
    offset = pool.geometry.data_offset + STRIPE_SIZE - 6400

    def plan_of(memory: Any) -> Any:
        addresses = starts + np.uint64(memory.ctypes.data)
        return plan_blocks(addresses, sizes, np.array([offset], np.uint64), chunk_size=16384)

    plan, target = plan_of(source), np.zeros_like(source)
    engine.gather_write(plan).wait(TIMEOUT_S)
    assert plan.checksums[0] == coherence.crc32c(source[:16384].tobytes())
    back = plan_of(target)
    back.checksums[:] = plan.checksums
    engine.scatter_read(back).wait(TIMEOUT_S)
    assert np.array_equal(target, source)


class Soft:
    """The software queue behind a submission path."""

    def __init__(self, depth: int) -> None:
        self.limits = limits_of(size_max=STRIPE_SIZE, batch_max=8, depth=depth)
        self.queue = soft_queue(self.limits)
        self.taken: list[int] = []  # opcodes

    def hand_on(self, raw: bytes) -> None:
        descriptor = ffi.new("bl_dsa_descriptor *")
        ffi.memmove(descriptor, raw, LINE)
        self.taken.append(descriptor.flags_opcode >> 24)
        while lib.bl_dsa_submit(self.queue, descriptor) != 0:
            time.sleep(0.0002)

    def close(self) -> None:
        lib.bl_dsa_queue_close(self.queue)


@contextlib.contextmanager
def serving(serve: Any) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@needs_movdir64b
def test_a_dedicated_queue_is_sent_lines_in_turn_and_no_more_than_it_holds(pool: Pool) -> None:
    soft = Soft(depth=4)
    file = os.memfd_create("portal")
    os.ftruncate(file, PAGE)
    portal = mmap(file, PAGE)
    most, slot = 0, 0

    def serve(stop: threading.Event) -> None:
        nonlocal most, slot
        while not stop.is_set():
            waiting = sum(any(portal[at : at + LINE]) for at in range(0, PAGE, LINE))
            most = max(most, waiting)
            if not any(portal[slot : slot + LINE]):
                time.sleep(0.0002)
                continue
            raw = portal[slot : slot + LINE]  # all of it, once a part is present
            portal[slot : slot + LINE] = bytes(LINE)
            slot = (slot + LINE) % PAGE
            soft.hand_on(raw)

    with serving(serve):
        out = ffi.new("bl_dsa_queue **")
        code = lib.bl_dsa_queue_open(os.dup(file), lib.BL_DSA_MOVDIR64B, soft.limits, out)
        assert code == 0
        engine = DsaEngine(pool, Portal(out[0], soft.limits, text="stand-in"))
        assert engine.name == "dsa"
        round_trip(pool, engine)
        stat = engine.stat
        engine.close()
    soft.close()
    assert lib.BL_DSA_BATCH in soft.taken
    assert stat.by_cpu == 0
    assert len(soft.taken) > 1
    assert most <= 4
    portal.close()
    os.close(file)


def test_a_queue_is_written_to_where_its_portal_may_not_be_mapped(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapping fails as with INTEL-SA-01084; a no-op descriptor shows that writing works."""
    soft = Soft(depth=16)
    ours, devices = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    real_open, opened = lib.bl_dsa_queue_open, []

    def open_queue(descriptor: int, way: int, limits: Any, out: Any) -> int:
        opened.append(way)
        return real_open(descriptor, way, limits, out) if way == lib.BL_DSA_WRITE else -1

    class Lib:
        bl_dsa_queue_open = staticmethod(open_queue)

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

    def serve(stop: threading.Event) -> None:
        devices.settimeout(0.05)
        while not stop.is_set():
            try:
                raw = devices.recv(LINE)
            except TimeoutError:
                continue
            if len(raw) == LINE:
                soft.hand_on(raw)

    queue = dsa_queue.WorkQueue("wq0.0", "shared", "user", "enabled", 16, 1 << 20, 32, False, None)
    monkeypatch.setattr(dsa_queue, "lib", Lib())
    monkeypatch.setattr(dsa_queue.os, "open", lambda *_: os.dup(ours.fileno()))
    with serving(serve):
        portal = dsa_queue._open(queue, tmp_path / "wq0.0")
        monkeypatch.undo()
        assert opened == [lib.BL_DSA_ENQCMD, lib.BL_DSA_WRITE]
        assert portal.text == "wq0.0, by write()"
        engine = DsaEngine(pool, portal)
        round_trip(pool, engine)
        assert engine.stat.by_cpu == 0
        engine.close()
    soft.close()
    assert soft.taken[0] == lib.BL_DSA_NOOP
    assert lib.BL_DSA_BATCH not in soft.taken
    ours.close()
    devices.close()


def test_the_cpu_copies_if_a_queue_refuses(pool: Pool) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # every write fails
    limits = limits_of(size_max=STRIPE_SIZE, batch_max=0, depth=4)
    out = ffi.new("bl_dsa_queue **")
    assert lib.bl_dsa_queue_open(writing, lib.BL_DSA_WRITE, limits, out) == 0
    engine = DsaEngine(pool, Portal(out[0], limits, text="broken"))
    round_trip(pool, engine)
    assert engine.stat.descriptors == 0
    assert engine.stat.by_cpu > 0
    engine.close()


def test_instructions_missing_on_the_cpu_are_not_tried() -> None:
    limits = limits_of(size_max=STRIPE_SIZE, batch_max=0, depth=4)
    out = ffi.new("bl_dsa_queue **")
    before = lib.bl_cpu_features()
    lib.bl_cpu_limit(0)
    try:
        for way in (lib.BL_DSA_ENQCMD, lib.BL_DSA_MOVDIR64B):
            assert lib.bl_dsa_queue_open(-1, way, limits, out) == -95  # ENOTSUP
    finally:
        lib.bl_cpu_limit(before)
    assert lib.bl_dsa_queue_open(-1, 9, limits, out) == -22


# ---- A work queue is opened as configured, in the way that the machine permits, or refused.


WAYS = {"shared": lib.BL_DSA_ENQCMD, "dedicated": lib.BL_DSA_MOVDIR64B}


def queue(mode: str, *, size_max: int = 4096, batch_max: int = 24) -> WorkQueue:
    return WorkQueue("wq0.0", mode, "user", "enabled", 7, size_max, batch_max, True, None)


class Lib:
    """The core, in which mapping a portal ends with ``code``; 0: as if it were mapped."""

    def __init__(self, code: int) -> None:
        self._code = code
        self.ways: list[int] = []

    def bl_dsa_queue_open(self, descriptor: int, way: int, limits: Any, out: Any) -> int:
        self.ways.append(way)
        if way != lib.BL_DSA_WRITE and self._code:
            return -self._code
        return int(lib.bl_dsa_queue_open(descriptor, lib.BL_DSA_WRITE, limits, out))

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)


Opened = Callable[..., Portal]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Open a queue of this device."""

    def open_it(device: WriteDevice, core: Lib, found: WorkQueue) -> Portal:
        monkeypatch.setattr(dsa_queue, "lib", core)
        monkeypatch.setattr(dsa_queue.os, "open", lambda *_: device.descriptor)
        try:
            return dsa_queue._open(found, Path("wq0.0"))
        finally:
            monkeypatch.undo()

    return open_it


def limits(portal: Portal) -> tuple[int, ...]:
    found = portal.limits
    return found.size_max, found.batch_max, found.depth, found.block_on_fault


def well(*_: object) -> End:
    return End(0)


@pytest.mark.parametrize("mode", WAYS)
def test_a_portal_that_may_be_mapped_is_used_as_configured(opened: Opened, mode: str) -> None:
    device, core = WriteDevice(well), Lib(0)
    portal = opened(device, core, queue(mode))
    assert core.ways == [WAYS[mode]]
    assert limits(portal) == (4096, 24, 7, 1)
    lib.bl_dsa_queue_close(portal.handle)
    device.close()
    assert [sent.opcode for sent in device.sent] == [lib.BL_DSA_NOOP]


@pytest.mark.parametrize("mode", WAYS)
@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.ENOTSUP])
def test_a_portal_that_may_not_be_mapped_is_written_to(
    opened: Opened, code: int, mode: str
) -> None:
    device, core = WriteDevice(well), Lib(code)
    portal = opened(device, core, queue(mode, size_max=1 << 33))
    assert core.ways == [WAYS[mode], lib.BL_DSA_WRITE]
    assert limits(portal) == (1 << 31, 0, 7, 1)  # a descriptor has 32 bits for its size
    assert portal.text == "wq0.0, by write()"
    lib.bl_dsa_queue_close(portal.handle)
    device.close()


def test_any_other_refusal_is_an_error_and_closes_the_file(opened: Opened) -> None:
    device = WriteDevice(well)
    with pytest.raises(OSError) as caught:
        opened(device, Lib(errno.ENODEV), queue("shared"))
    assert caught.value.errno == errno.ENODEV
    assert not is_open(device.descriptor)
    device.close()


def test_a_queue_that_fails_a_noop_is_not_used(opened: Opened) -> None:
    device = WriteDevice(lambda *_: End(0, lib.BL_DSA_HW_ERR1))
    with pytest.raises(OSError, match="status 0x20"):
        opened(device, Lib(0), queue("shared"))
    assert not is_open(device.descriptor)
    device.close()


def test_a_queue_that_does_not_answer_is_not_waited_for(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dsa_queue, "_PROBE_S", 0.05)
    reading, writing = os.pipe()

    class Deaf:
        descriptor = writing

    with pytest.raises(OSError, match="does not respond"):
        opened(Deaf(), Lib(0), queue("shared"))
    assert not is_open(writing)
    os.close(reading)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# ---- Work queues are found in sysfs, and malformed trees raise no errors.


ENABLED = {
    "mode": "shared",
    "type": "user",
    "state": "enabled",
    "size": "16",
    "max_transfer_size": "2097152",
    "max_batch_size": "32",
    "block_on_fault": "1",
}


def sysfs_queue(root: Path, name: str, **changes: str) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in (ENABLED | changes).items():
        (folder / file).write_text(f"{text}\n")


def device(root: Path, name: str, node: int) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "numa_node").write_text(f"{node}\n")


def test_the_attributes_of_a_queue_are_read(tmp_path: Path) -> None:
    device(tmp_path, "dsa2", 1)
    sysfs_queue(tmp_path, "wq2.3")
    (found,) = work_queues(tmp_path)
    assert (found.name, found.mode, found.depth, found.node) == ("wq2.3", "shared", 16, 1)
    assert (found.size_max, found.batch_max, found.block_on_fault) == (2 << 20, 32, True)
    assert found.fault is None


def test_queues_are_ordered_by_node_then_mode_then_depth(tmp_path: Path) -> None:
    for number, node in enumerate((0, 1, -1)):
        device(tmp_path, f"dsa{number}", node)
    sysfs_queue(tmp_path, "wq0.0", mode="dedicated", size="64")
    sysfs_queue(tmp_path, "wq1.0", size="8")
    sysfs_queue(tmp_path, "wq1.1", size="32")
    sysfs_queue(tmp_path, "wq1.2", mode="dedicated", size="4")
    sysfs_queue(tmp_path, "wq2.0", size="128")
    sysfs_queue(tmp_path, "wq10.0", size="1", state="disabled")
    names = [found.name for found in nearest(work_queues(tmp_path), {1})]
    assert names == ["wq1.2", "wq1.1", "wq1.0", "wq0.0", "wq2.0"]
    assert [found.name for found in work_queues(tmp_path)][-1] == "wq10.0"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"type": "kernel"}, "wq0.0 is of type kernel, not user"),
        ({"type": "none"}, "wq0.0 is of type none, not user"),
        ({"state": "disabled"}, "wq0.0 is disabled"),
        ({"mode": "strange"}, "wq0.0 has no mode or no size"),
        ({"size": "0"}, "wq0.0 has no mode or no size"),
        ({"max_transfer_size": "much"}, "wq0.0 has no mode or no size"),
    ],
)
def test_an_unusable_queue_has_its_reason(
    tmp_path: Path, changes: dict[str, str], expected: str
) -> None:
    sysfs_queue(tmp_path, "wq0.0", **changes)
    found = work_queues(tmp_path)
    assert nearest(found, set()) == []
    assert expected in why_none(found, tmp_path)
    assert "accel-config enable-wq" in why_none(found, tmp_path)


def test_unusual_sysfs_trees_raise_no_error(tmp_path: Path) -> None:
    assert work_queues(tmp_path / "absent") == []
    assert "intel_iommu=on,sm_on" in why_none([], tmp_path / "absent")
    assert work_queues(tmp_path) == []
    assert "no DSA device has a work queue" in why_none([], tmp_path)
    (tmp_path / "wq0.0").mkdir()
    (tmp_path / "wq0.0" / "size").write_bytes(b"\xff\xfe")
    (tmp_path / "wq0.0" / "mode").mkdir()
    (tmp_path / "wqx.1").mkdir()
    (tmp_path / "engine0.0").mkdir()
    (tmp_path / "wq1.0").write_text("a file")
    assert [found.fault for found in work_queues(tmp_path)] == [
        "wq0.0 is of type none, not user",
        "wq1.0 is of type none, not user",
    ]


@pytest.fixture
def own_pool(shm: Path) -> Pool:
    return Pool.create([shm / "device"], device_size=8 * STRIPE_SIZE, sparse=True)


def test_a_device_file_that_does_not_open_is_named(own_pool: Pool, tmp_path: Path) -> None:
    sysfs_queue(tmp_path / "sys", "wq0.0")
    (tmp_path / "dev").mkdir()
    with (
        own_pool,
        pytest.raises(EngineUnavailableError, match=r"wq0\.0: No such file.*CAP_SYS_RAWIO"),
    ):
        open_device(own_pool, sysfs=tmp_path / "sys", devices=tmp_path / "dev")


def test_without_a_device_the_error_names_the_missing_requirement(own_pool: Pool) -> None:
    with own_pool:
        if nearest(work_queues(), set()):
            pytest.skip("there is a DSA")
        with pytest.raises(EngineUnavailableError) as refused:
            DsaEngine(own_pool)
        assert "\n" not in str(refused.value)
