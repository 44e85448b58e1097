# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The drivers: they run operations on memory, Beluga's and the limit's, under one stopwatch
(``drive.c``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from beluga._ffi import core
from beluga._ffi import ffi as core_ffi
from beluga._ffi import lib as core_lib
from beluga.errors import raise_for_status
from beluga.pool import Pool
from beluga.transfer import DsaEngine

from .. import _limit
from .._limit import ffi, lib
from .pace import Paces
from .threads import run_together

Offsets = npt.NDArray[np.uint64]
_MANY = 1 << 62
_LEAD_NS = 200_000  # the time that a thread needs to start


@dataclass(frozen=True, slots=True)
class Operation:
    """A C function and its range of memory. Both are addresses."""

    function: int
    context: int


def ours(pool: Pool, verb: str) -> Operation:
    """Return the pool's "read" (invalidate, load out) or "write" (stream, fence)."""
    function = core_ffi.addressof(core_lib, f"bl_pool_{verb}")
    return Operation(_address(core_ffi, function), _address(core_ffi, pool.handle))


def by_dsa(engine: DsaEngine, verb: str) -> Operation:
    """Return a whole "read" or "write" by this engine, with the cache maintenance of its policy's
    row.
    """
    name = {"read": "bl_dsa_read_one", "write": "bl_dsa_write_one"}[verb]
    function = core_ffi.addressof(core_lib, name)
    return Operation(_address(core_ffi, function), _address(core_ffi, engine.handle))


def bare(name: str, base: int) -> Operation:
    """Return ``limit_<name>`` on the memory at address ``base``."""
    return Operation(_address(ffi, ffi.addressof(lib, f"limit_{name}")), base)


def address_of(pool: Pool, offset: int) -> int:
    """Return the address of a pool's offset in this process. It is valid to the end of its
    stripe.
    """
    return _address(core_ffi, core_lib.bl_pool_address(pool.handle, offset))


def _address(of: core.Ffi | _limit.Ffi, pointer: core.CData) -> int:
    return int(of.cast("uintptr_t", pointer))


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one thread: ``operation`` on ``size`` bytes at each of ``offsets`` in turn.

    ``period_ns`` between the starts of operations keeps a fixed rate. With ``overlaps`` they do not
    wait until a paced device has ended the one before, as if there were several threads.
    """

    operation: Operation
    offsets: Offsets
    size: int
    paces: Paces | None = None
    period_ns: int = 0
    overlaps: bool = False


class Driver:
    """Runs one thread's load. It has the buffer, and the plan that C fills in."""

    def __init__(self, load: Load) -> None:
        self._load = load
        # The buffer is touched, so that no page is missing later. It begins at a page like real
        # buffers.
        raw = np.ones(load.size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        self._buffer = raw[start : start + load.size]
        self._plan = ffi.new("drive_plan *")
        plan = self._plan
        plan.operation = ffi.cast("drive_operation", load.operation.function)
        plan.context = ffi.cast("void *", load.operation.context)
        plan.buffer = ffi.cast("void *", self._buffer.ctypes.data)
        plan.offsets = ffi.cast("uint64_t *", load.offsets.ctypes.data)
        plan.offset_count = len(load.offsets)
        plan.size = load.size
        plan.period_ns = load.period_ns
        plan.overlaps = load.overlaps
        plan.paces = ffi.NULL if load.paces is None else load.paces.pointers

    def count(self, count: int) -> float:
        """Run ``count`` operations. Returns operations per second."""
        return self._run(count)

    def sample(self, count: int) -> npt.NDArray[np.uint64]:
        """Run ``count`` operations. Returns the nanoseconds of each."""
        samples = np.zeros(count, np.uint64)
        self._run(count, samples=samples)
        return samples

    def hold(
        self, duration_s: float, start_ns: int = 0, samples: npt.NDArray[np.uint64] | None = None
    ) -> float:
        """Run for ``duration_s`` seconds from ``start_ns`` (:func:`now_ns`) on. Returns operations
        per second.

        It runs at least one operation and at most as many as ``samples`` has space for.
        """
        count = _MANY if samples is None else len(samples)
        return self._run(count, start_ns, int(duration_s * 1e9), samples)

    def stop(self) -> None:
        """End the current run after its current operation. Later runs do nothing."""
        lib.drive_stop(self._plan)

    @property
    def done(self) -> int:
        """The number of operations of the last run."""
        return int(self._plan.done)

    def _run(
        self,
        count: int,
        start_ns: int = 0,
        duration_ns: int = 0,
        samples: npt.NDArray[np.uint64] | None = None,
    ) -> float:
        plan = self._plan
        plan.count, plan.start_ns, plan.duration_ns = count, start_ns, duration_ns
        plan.samples_ns = (
            ffi.NULL if samples is None else ffi.cast("uint64_t *", samples.ctypes.data)
        )
        raise_for_status(lib.drive_run(plan), "running an operation")
        return float(plan.done * 1e9 / max(plan.elapsed_ns, 1))


class CallDriver(Driver):
    """A driver that makes one call of a session, again and again."""

    def __init__(self, session: core.bl_session, message: core.bl_message, timeout_ns: int) -> None:
        self._message = message  # C reads it
        self._session = ffi.new("drive_session *")
        call = core_ffi.addressof(core_lib, "bl_session_call")
        self._session.call = ffi.cast("drive_session_call", _address(core_ffi, call))
        self._session.session = ffi.cast("void *", _address(core_ffi, session))
        self._session.message = ffi.cast("void *", _address(core_ffi, message))
        self._session.timeout_ns = timeout_ns
        operation = Operation(
            _address(ffi, ffi.addressof(lib, "drive_call")), _address(ffi, self._session)
        )
        super().__init__(Load(operation, np.zeros(1, np.uint64), 0))


def now_ns() -> int:
    """Return the time of the stopwatch's clock."""
    return int(lib.drive_now_ns())


def together(
    drivers: Sequence[Driver],
    cpus: Sequence[int],
    duration_s: float,
    samples: Sequence[npt.NDArray[np.uint64]] | None = None,
) -> float:
    """Run the drivers concurrently, each on its own CPU. Returns operations per second of all.

    Ctrl-C stops them: when KeyboardInterrupt is raised, none of them accesses the memory any more.
    """
    start_ns = now_ns() + _LEAD_NS * (1 + len(drivers))
    speeds = [0.0] * len(drivers)

    def work(index: int) -> None:
        os.sched_setaffinity(0, {cpus[index % len(cpus)]})
        own = None if samples is None else samples[index]
        speeds[index] = drivers[index].hold(duration_s, start_ns, own)

    def stop() -> None:
        for driver in drivers:
            driver.stop()

    run_together([partial(work, index) for index in range(len(drivers))], stop)
    return sum(speeds)
