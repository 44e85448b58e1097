# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Opens the queue of a DSA, by the permitted kind of submission, or the software queue."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib
from beluga.errors import EngineUnavailableError, raise_for_status
from beluga.transfer.engines.dsa.sysfs import (
    DEVICES,
    SYSFS,
    WorkQueue,
    nearest,
    why_none,
    work_queues,
)

if TYPE_CHECKING:
    from beluga.pool import Pool

_PROBE_S = 2.0
_SIZE_MAX = 2 << 20  # the software queue's limit, like that of real queues
_BATCH_MAX = 32
_DEPTH = 32

_SUBMISSIONS = {
    "shared": (lib.BL_DSA_ENQCMD, "ENQCMD"),
    "dedicated": (lib.BL_DSA_MOVDIR64B, "MOVDIR64B"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Portal:
    """An open queue: ``handle`` is a ``bl_dsa_queue *``, ``limits`` a ``bl_dsa_limits *``."""

    handle: core.bl_dsa_queue
    limits: core.bl_dsa_limits
    is_device: bool
    text: str  # a description for display


def limits_of(
    *, size_max: int, batch_max: int, depth: int, block_on_fault: bool = False
) -> core.bl_dsa_limits:
    """Return a ``bl_dsa_limits *``."""
    return ffi.new(
        "bl_dsa_limits *",
        {
            "size_max": size_max,
            "batch_max": batch_max,
            "depth": depth,
            "block_on_fault": block_on_fault,
        },
    )


def open_software(
    pool: Pool,
    *,
    size_max: int = _SIZE_MAX,
    batch_max: int = _BATCH_MAX,
    depth: int = _DEPTH,
) -> Portal:
    """Open a software queue, served by a thread of this process."""
    limits = limits_of(size_max=size_max, batch_max=batch_max, depth=depth)
    out = ffi.new("bl_dsa_queue **")
    with pool.using() as handle:
        raise_for_status(lib.bl_dsa_soft_open(handle, limits, out), "opening the software queue")
    return Portal(out[0], limits, is_device=False, text="software queue")


def open_device(pool: Pool, *, sysfs: Path = SYSFS, devices: Path = DEVICES) -> Portal:
    """Open a work queue of a DSA, near the pool's devices if possible.

    Raises :class:`~beluga.errors.EngineUnavailableError` with the missing requirement.
    """
    queues = work_queues(sysfs)
    nodes = {device.node for device in pool.data_devices if device.node is not None}
    refusals = []
    for queue in nearest(queues, nodes):
        try:
            return _open(queue, devices / queue.name)
        except OSError as error:
            refusals.append(f"{devices / queue.name}: {error.strerror}")
    if refusals:
        raise EngineUnavailableError(
            f"{'; '.join(refusals)}; give this user the device file, and where the processor has "
            "INTEL-SA-01084 CAP_SYS_RAWIO or a kernel that lets its users write()"
        )
    raise EngineUnavailableError(why_none(queues, sysfs))


def _open(queue: WorkQueue, path: Path) -> Portal:
    """Map the portal. If that is forbidden, or the CPU lacks the instruction, use ``write()``."""
    limits = limits_of(
        size_max=min(queue.size_max, 1 << 31),
        batch_max=queue.batch_max,
        depth=queue.depth,
        block_on_fault=queue.block_on_fault,
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    out = ffi.new("bl_dsa_queue **")
    submission, text = _SUBMISSIONS[queue.mode]
    code = lib.bl_dsa_queue_open(descriptor, submission, limits, out)
    if code in (-errno.EPERM, -errno.EACCES, -errno.ENOTSUP):
        # The kernel checks one descriptor at a time, so there are no batches.
        limits.batch_max, text = 0, "write()"
        code = lib.bl_dsa_queue_open(descriptor, lib.BL_DSA_WRITE, limits, out)
    if code < 0:
        os.close(descriptor)
        raise OSError(-code, os.strerror(-code))
    try:
        _probe(out[0])
    except OSError:
        lib.bl_dsa_queue_close(out[0])
        raise
    return Portal(out[0], limits, is_device=True, text=f"{path.name}, by {text}")


def _probe(queue: core.bl_dsa_queue) -> None:
    """Submit a descriptor that does nothing, and wait for it. Raises OSError."""
    block = ffi.new("uint64_t[]", 8)
    address = int(ffi.cast("uintptr_t", block))
    address += -address % 32
    record = ffi.cast("volatile uint8_t *", address)
    descriptor = ffi.new("bl_dsa_descriptor *")
    descriptor.flags_opcode = lib.BL_DSA_CRAV | lib.BL_DSA_RCR | lib.BL_DSA_NOOP << 24
    descriptor.record = address
    deadline = time.monotonic() + _PROBE_S
    while (code := lib.bl_dsa_submit(queue, descriptor)) == -errno.EAGAIN:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    while record[0] == lib.BL_DSA_NONE:
        if time.monotonic() > deadline:
            _UNANSWERED.append(block)  # the device may still write it
            raise OSError(errno.ETIME, "the device does not respond")
        time.sleep(0.0001)
    lib.bl_dsa_queue_ended(queue)
    if record[0] != lib.BL_DSA_SUCCESS:
        raise OSError(errno.EIO, f"it completes a no-operation with status {record[0]:#x}")


_UNANSWERED: list[core.uint64_p] = []
