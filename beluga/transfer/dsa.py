# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Intel DSA as a copy engine (``csrc/dsa/engine.c``).

Plans become descriptors for a work queue. The kernel shows every work queue under
``/sys/bus/dsa/devices``, enabled or not, with its configuration by ``accel-config`` (kernel
documentation, ``ABI/stable/sysfs-driver-dma-idxd``). A transfer makes progress when it is polled. A
device's work for a process ends with the process, so that no incomplete block is published.

The row of the policy table has the cache maintenance of each range at the start and end of its
copy. To compare the checksums of a *sparse* read, its chunks are fetched whole into a buffer, and
the rows are copied from there.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib
from beluga.arguments import StrPath, path_of
from beluga.errors import (
    BelugaError,
    ChecksumError,
    EngineUnavailableError,
    ForkedSessionError,
    LayoutError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    raise_for_status,
)
from beluga.transfer.policy import PolicyRow, Step, probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from beluga.pool import Pool
    from beluga.transfer.engine import CopyEngine
    from beluga.transfer.plan import Plan


SYSFS = Path("/sys/bus/dsa/devices")
DEVICES = Path("/dev/dsa")

CONFIGURE = (
    "accel-config config-wq dsa0/wq0.0 --mode=shared --type=user --driver-name=user "
    "--name=beluga --group-id=0 --wq-size=32 --threshold=32 --max-batch-size=32 --priority=10 "
    "&& accel-config config-engine dsa0/engine0.0 --group-id=0 "
    "&& accel-config enable-device dsa0 && accel-config enable-wq dsa0/wq0.0"
)
"""The commands by which root makes a queue, once per boot."""

_QUEUE_NAME = re.compile(r"wq(\d+)\.(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkQueue:
    """The configuration of a work queue."""

    name: str  # wq0.1
    mode: str  # shared or dedicated
    type: str  # user, kernel, mdev or none
    state: str  # enabled, disabled
    depth: int  # descriptors that it holds
    size_max: int  # bytes of one transfer
    batch_max: int  # descriptors of one batch
    block_on_fault: bool
    node: int | None  # the NUMA node of its device

    @property
    def fault(self) -> str | None:
        """The reason why a program cannot submit to it, or None."""
        if self.type != "user":
            return f"{self.name} is of type {self.type or 'none'}, not user"
        if self.state != "enabled":
            return f"{self.name} is {self.state or 'not enabled'}"
        if self.mode not in ("shared", "dedicated") or self.depth < 1 or self.size_max < 1:
            return f"{self.name} has no mode or no size"
        return None


def work_queues(root: StrPath = SYSFS) -> list[WorkQueue]:
    """Return every work queue under ``root``, by name; unreadable numbers are zero."""
    root = path_of("root", root)
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if match := _QUEUE_NAME.fullmatch(path.name):
            found.append((int(match[1]), int(match[2]), _read(path, root / f"dsa{match[1]}")))
    return [queue for _, _, queue in sorted(found, key=lambda entry: entry[:2])]


def nearest(queues: list[WorkQueue], nodes: set[int]) -> list[WorkQueue]:
    """Return the usable queues: near ``nodes`` first, then dedicated, then deep ones."""
    usable = [queue for queue in queues if queue.fault is None]
    return sorted(
        usable,
        key=lambda queue: (queue.node not in nodes, queue.mode != "dedicated", -queue.depth),
    )


def why_no_queue(root: StrPath = SYSFS) -> str | None:
    """Return in one line why no work queue of this machine can be used, as far as known without
    opening one."""
    root = path_of("root", root)
    queues = work_queues(root)
    return None if nearest(queues, set()) else why_none(queues, root)


def why_none(queues: list[WorkQueue], root: Path = SYSFS) -> str:
    """Return in one line why there is no queue, and how to make one."""
    if not root.is_dir():
        return (
            f"there is no {root}: DSA needs a CPU that has it (Sapphire Rapids or later), "
            "intel_iommu=on,sm_on on the kernel's command line and the idxd driver"
        )
    if not queues:
        return f"no DSA device has a work queue under {root}; as root: {CONFIGURE}"
    faults = "; ".join(queue.fault for queue in queues if queue.fault is not None)
    return f"no DSA work queue can be used ({faults}); as root: {CONFIGURE}"


def _read(path: Path, device: Path) -> WorkQueue:
    node = _number(device / "numa_node", default=-1)
    return WorkQueue(
        name=path.name,
        mode=_text(path / "mode"),
        type=_text(path / "type"),
        state=_text(path / "state"),
        depth=_number(path / "size"),
        size_max=_number(path / "max_transfer_size"),
        batch_max=_number(path / "max_batch_size"),
        block_on_fault=_number(path / "block_on_fault") == 1,
        node=None if node < 0 else node,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, default: int = 0) -> int:
    try:
        return int(_text(path), 0)
    except ValueError:
        return default


_PROBE_S = 2.0

_SUBMISSIONS = {
    "shared": (lib.BL_DSA_ENQCMD, "ENQCMD"),
    "dedicated": (lib.BL_DSA_MOVDIR64B, "MOVDIR64B"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Portal:
    """An open queue: ``handle`` is a ``bl_dsa_queue *``, ``limits`` a ``bl_dsa_limits *``."""

    handle: core.bl_dsa_queue
    limits: core.bl_dsa_limits
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
    return Portal(out[0], limits, text=f"{path.name}, by {text}")


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


_EXIT_WAIT_S = 1.0
_SLICE_S = 0.1  # Python handles signals between waits of this length in C
_STALL_S = 5.0  # a device without completions; its queue holds less than a second's work
_WINDOW = 64  # descriptors; enough to distinguish a failing device from a single failure


@dataclasses.dataclass(frozen=True, slots=True)
class DsaStat:
    """Counters of an engine's work."""

    descriptors: int  # submitted, including those in batches
    batches: int
    full: int  # times that the queue was full
    faults: int  # page faults, resumed
    by_cpu: int  # descriptors that the CPU executed because the device failed


class DsaTransfer:
    """A plan that is being executed; it makes progress in :meth:`done` and :meth:`wait`."""

    def __init__(self, engine: DsaEngine, plan: Plan, doing: str) -> None:
        self._engine = engine
        self._plan, self.struct = plan, plan.struct()  # their memory is in use until it has ended
        self.out = ffi.new("bl_dsa_transfer **")  # NULL before its start and after its end
        self._doing = doing
        self._error: BelugaError | OSError | None = None

    def done(self) -> bool:
        """Return whether it has ended. Submits more if possible. Raises ForkedSessionError in a
        child."""
        if self._ended:
            return True
        self._engine.poll()
        return self._ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended; see :class:`~beluga.transfer.Transfer`.

        Raises ChecksumError, TransferTimeoutError after ``timeout_s``, DeviceFaultError if a device
        of the pool failed, TransferCancelledError if the engine was closed before, TransferError
        for other failures, and ForkedSessionError in a forked child. If a device completes nothing
        for 5 seconds, its queue is closed, and the kernel stops all copies.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended:
            left = _SLICE_S if deadline is None else deadline - time.monotonic()
            self._engine.wait_for(self, min(max(left, 0.0), _SLICE_S))
            if not self._ended and left <= _SLICE_S and deadline is not None:
                raise TransferTimeoutError(
                    f"{self._doing}: not ended after {timeout_s} s; it continues"
                )
            self._engine.close_if_stalled()
        if self._error is not None:
            raise self._error

    @property
    def _ended(self) -> bool:
        return not self.out[0]

    def settle(self) -> bool:
        """Release the memory if the transfer has ended (for the engine). Return whether it has."""
        if self._ended or not lib.bl_dsa_ended(self.out[0]):
            return self._ended
        self._error = _error_of(lib.bl_dsa_status(self.out[0]), self._doing, self._engine.fault)
        handle, self.out[0] = self.out[0], ffi.NULL  # first, so that it is not freed twice
        lib.bl_dsa_free(handle)
        return True


class DsaEngine:
    """Moves blocks by a DSA work queue.

    With ``queue`` None it opens a device's queue. With ``device_flushes`` the device flushes the
    host's cache by descriptors, where the policy requires it; else the CPU does. With
    ``cache_control`` writes to the pool go to this host's cache first and are flushed afterwards
    (for measurements). ``row`` replaces the row of the policy. Raises EngineUnavailableError.
    """

    name = "dsa"

    def __init__(
        self,
        pool: Pool,
        queue: Portal | None = None,
        *,
        device_flushes: bool = False,
        cache_control: bool = False,
        row: PolicyRow | None = None,
    ) -> None:
        self._handle: core.bl_dsa_engine | None = None
        self._process = os.getpid()
        self._open: list[DsaTransfer] = []
        self._fault: str | None = None
        self._last_change_s = 0.0
        self._pool = pool
        out = ffi.new("bl_dsa_engine **")
        self._end = functools.partial(_close, out, self._open)
        self._lock = threading.RLock()  # guards C's state; a transfer that waits releases it
        self._finalizer = weakref.finalize(self, _close_at_exit, self._lock, self._end)
        with self._lock:  # a thread that closes the pool waits for this lock
            pool.before_close(self.close)
            self._make(queue, out, device_flushes, cache_control, row)
        self._judged = self._last_stat = self.stat

    def _make(
        self,
        queue: Portal | None,
        out: core.CPointer[core.bl_dsa_engine],
        device_flushes: bool,
        cache_control: bool,
        row: PolicyRow | None,
    ) -> None:
        pool = self._pool
        portal = open_device(pool) if queue is None else queue
        row = probe().row("dsa") if row is None else row
        flush = lib.BL_DSA_FLUSH_DEVICE if device_flushes else lib.BL_DSA_FLUSH_CPU
        rules = ffi.new("bl_dsa_rules *", {"write_to_cache": cache_control})
        if cache_control or row.after_write is not Step.FENCE:
            rules.after_write = flush
        if row.before_read is not Step.FENCE:
            rules.before_read = flush
        with pool.using() as handle:
            code = lib.bl_dsa_engine_open(handle, portal.handle, portal.limits, rules, out)
        if code < 0:
            lib.bl_dsa_queue_close(portal.handle)
            raise_for_status(code, "opening the DSA engine")
        self._handle = out[0]
        self.queue_text = portal.text

    @property
    def handle(self) -> core.bl_dsa_engine:
        """The ``bl_dsa_engine *``.

        Raises TransferError if it is closed, ForkedSessionError in a forked child.
        """
        if self._handle is None:
            raise TransferError("the DSA engine is closed")
        self._refuse_forked()
        return self._handle

    @property
    def stat(self) -> DsaStat:
        """The work done so far."""
        out = ffi.new("bl_dsa_stat *")
        self._refuse_forked()
        with self._lock:
            lib.bl_dsa_engine_stat(self.handle, out)
        return DsaStat(out.descriptors, out.batches, out.full, out.faults, out.by_cpu)

    @property
    def fault(self) -> str | None:
        """The reason not to use it: the device does not respond, or the CPU does most of its
        work."""
        if self._fault is None and self._handle is not None:
            stat, judged = self.stat, self._judged
            by_device, by_cpu = stat.descriptors - judged.descriptors, stat.by_cpu - judged.by_cpu
            if by_device + by_cpu >= _WINDOW:
                self._judged = stat
                if 2 * by_cpu >= by_device:
                    self._fault = "the device fails most descriptors, which the CPU then executes"
        return self._fault

    def gather_write(self, plan: Plan) -> DsaTransfer:
        """Start a copy to the pool; this returns when the first descriptors are submitted.

        Raises LayoutError for a sparse plan, or one that leaves the pool.
        """
        return self._start(plan, is_read=False)

    def scatter_read(self, plan: Plan) -> DsaTransfer:
        """Start a copy from the pool, in the same way."""
        plan.refuse_direction(write=False)
        return self._start(plan, is_read=True)

    def poll(self) -> None:
        """Advance all transfers, without waiting."""
        self._refuse_forked()
        with self._lock:
            lib.bl_dsa_poll(self.handle)
            self._settle()

    def wait_for(self, transfer: DsaTransfer, timeout_s: float) -> None:
        """Wait for a transfer, and release transfers that have ended."""
        self._refuse_forked()
        with self._lock:
            if not transfer.out[0]:
                return
            code = lib.bl_dsa_wait(self.handle, transfer.out[0], int(timeout_s * 1e9))
            if code != -lib.BL_ERROR_TIMEOUT:
                raise_for_status(code, "waiting for a DSA transfer")
            self._settle()

    def close_if_stalled(self) -> None:
        """Close the queue of a device that has completed nothing for ``_STALL_S`` in a wait."""
        stat, now_s = self.stat, time.monotonic()
        if stat != self._last_stat:
            self._last_stat, self._last_change_s = stat, now_s
        elif now_s - self._last_change_s > _STALL_S:
            self._fault = f"the device has completed nothing for {_STALL_S:g} s"
            self.close()

    def close(self) -> None:
        """Wait for submitted descriptors and close the queue. Unfinished transfers fail.

        A second call does nothing.
        """
        self._handle = None
        if os.getpid() == self._process:
            with self._lock:
                self._end()
        else:  # a thread of the parent process may hold the lock
            self._end()
        self._finalizer.detach()

    def _start(self, plan: Plan, *, is_read: bool) -> DsaTransfer:
        doing = "reading by DSA" if is_read else "writing by DSA"
        transfer = DsaTransfer(self, plan, doing)
        self._last_change_s = time.monotonic()
        self._refuse_forked()
        with self._lock:
            self._open.append(transfer)  # before the call: it is referenced until its end
            code = lib.bl_dsa_start(self.handle, transfer.struct, is_read, transfer.out)
            self._settle()
        if code == -errno.EINVAL:
            if plan.sparse and not is_read:
                raise LayoutError("a sparse plan can only be read")
            plan.refuse_beyond(self._pool.geometry.size)
            raise LayoutError(f"{doing}: the plan's pieces do not tile its chunks")
        raise_for_status(code, doing)
        return transfer

    def _refuse_forked(self) -> None:
        """Reject a forked child before it takes the lock, which the parent may have held."""
        if os.getpid() != self._process:
            raise ForkedSessionError(
                "the DSA engine belongs to the parent process; open another one"
            )

    def _settle(self) -> None:
        self._open[:] = [transfer for transfer in self._open if not transfer.settle()]


def _close_at_exit(lock: threading.RLock, end: Callable[[], None]) -> None:
    """Close the engine at exit, unless a daemon thread, which stops then, holds the lock."""
    if lock.acquire(timeout=_EXIT_WAIT_S):
        end()
        lock.release()


def _close(out: core.CPointer[core.bl_dsa_engine], transfers: list[DsaTransfer]) -> None:
    if not out[0]:
        return
    handle, out[0] = out[0], ffi.NULL
    lib.bl_dsa_engine_close(handle)
    for transfer in transfers:
        transfer.settle()
    transfers.clear()


def _error_of(status: int, doing: str, fault: str | None) -> BelugaError | OSError | None:
    """Return the error of a transfer that ended with ``status``, or None."""
    if status == 0:
        return None
    if status == -errno.EBADMSG:
        return ChecksumError(f"{doing}: bytes are not those that were written")
    if status == -errno.ECANCELED:
        closed = TransferCancelledError(f"{doing}: the engine was closed before it had ended")
        return closed if fault is None else TransferError(f"{doing}: {fault}")
    try:
        raise_for_status(status, doing)
    except BelugaError as error:
        return error
    except OSError as error:
        return TransferError(str(error))
    return None


def queue_of(engine: CopyEngine) -> str:
    """The work queue by which an engine copies."""
    return engine.queue_text if isinstance(engine, DsaEngine) else engine.name
