# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Each way of submitting to a device's queue works, with a stand-in for the device.

A mapped portal is a file in memory whose lines a thread polls; ``write()`` uses a socket. Both
forward the same 64 bytes to a software queue, which does the work.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.soft_dsa import soft_queue

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import DsaEngine, plan_blocks
from beluga.transfer import dsa as dsa_queue
from beluga.transfer.dsa import Portal, limits_of

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
