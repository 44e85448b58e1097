# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A work queue is opened as configured, in the way that the machine permits, or refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dsa_device import End, WriteDevice

from beluga._ffi import lib
from beluga.transfer import dsa as dsa_queue
from beluga.transfer.dsa import Portal, WorkQueue

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
