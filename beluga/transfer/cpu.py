# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure once how this machine's CPU copies runs of each size fastest, and store the result.

A process measures before its first copy if no result is stored, in a scratch pool (``scratch.py``);
that takes a few tenths of a second. With ``BELUGA_TUNING=off``, or if the result cannot be stored,
nothing is measured and the defaults apply.

The CPU as a copy engine: plans executed in C (``csrc/transfer/cpu.c``), by threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga.errors import (
    BelugaError,
    ChecksumError,
    LayoutError,
    TransferCancelledError,
    raise_for_status,
)
from beluga.transfer.calibrate.calibration_cache import CalibrationCache, may_measure
from beluga.transfer.calibrate.cost import Cost
from beluga.transfer.calibrate.scratch import scratch_pool
from beluga.transfer.engine import Direction
from beluga.transfer.link import TransferClass
from beluga.transfer.plan import Plan, plan_blocks, plan_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from beluga.pool import Pool
    from beluga.transfer.io_handle import IoHandle
    from beluga.transfer.plan import Plan

    _Function = Callable[
        [core.bl_pool, core.bl_plan, core.bl_copy_settings, core.bl_io_queue | core.Null, int], int
    ]


_KIB = 1024
_SPAN = 1 << 20  # bytes of the largest copy that is timed
_ROUNDS = 7
_BUDGET_S = 0.5  # settings that are not measured by then keep their defaults
_GAIN = 0.95  # a value replaces the default if it takes less than this share of the time
_ALWAYS, _NEVER = 0, 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, slots=True)
class CopySettings:
    """Sizes in bytes (``bl_copy_settings``). Any numbers give the same bytes and checksums.

    A read drops lines ``window`` bytes ahead, ``step`` bytes at a time between copies, and
    prefetches them ``ahead`` bytes before it copies them; a dense plan of ``past`` bytes or more
    bypasses the cache. A write prefetches ``head`` bytes of the next piece, and streams runs of
    ``direct`` bytes or more from their own memory; it gathers shorter ones first. In both
    directions a thread's part has at least ``part`` bytes.
    """

    part: int
    window: int
    step: int
    ahead: int
    past: int
    head: int
    direct: int

    @classmethod
    def default(cls) -> CopySettings:
        """Return the settings of an uncalibrated machine."""
        found = ffi.new("bl_copy_settings *")
        lib.bl_copy_defaults(found)
        return cls(**{field.name: getattr(found, field.name) for field in dataclasses.fields(cls)})

    @classmethod
    def of(cls, content: object) -> CopySettings | None:
        """Return the settings that a file contains, or None if it contains something else."""
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(content, dict) or sorted(content) != sorted(names):
            return None
        if any(type(size) is not int or not 0 <= size <= _NEVER for size in content.values()):
            return None
        return cls(**content)

    def struct(self, threads: int) -> core.bl_copy_settings:
        """Return the ``bl_copy_settings *`` for this number of threads."""
        return ffi.new(
            "bl_copy_settings *",
            {
                "threads": threads,
                "part": self.part,
                "window": self.window,
                "step": self.step,
                "ahead": self.ahead,
                "past": self.past,
                "head": self.head,
                "direct": self.direct,
            },
        )


_FOUND: dict[Path, CopySettings] = {}
"""The settings by calibration file, read or measured once per process."""


def tuned(pool: Pool) -> CopySettings:
    """Return the settings of this machine for a pool's kind of memory.

    They are read from the cache, or measured now and stored.

    Raises :class:`~beluga.errors.EngineUnavailableError` for a BELUGA_TUNING that is neither on nor
    off.
    """
    if not may_measure():
        return CopySettings.default()
    cache = CalibrationCache(pool)
    if cache.path not in _FOUND:
        found = CopySettings.of(cache.read("settings"))
        _FOUND[cache.path] = found or _measured(cache, pool)
    return _FOUND[cache.path]


def _measured(cache: CalibrationCache, pool: Pool) -> CopySettings:
    if not cache.can_write():
        return CopySettings.default()
    try:
        with scratch_pool(like=pool) as scratch:
            found = measure(scratch, scratch.geometry.data_offset)
    except (BelugaError, OSError):  # no space, for example; the defaults are correct, too
        return CopySettings.default()
    with contextlib.suppress(OSError):
        cache.write("settings", dataclasses.asdict(found))
    return found


def measure(pool: Pool, offset: int, budget_s: float = _BUDGET_S) -> CopySettings:
    """Measure the fastest settings. This overwrites 1 MiB of the pool from ``offset`` on.

    The settings are measured one after the other, by copies with all values of a setting
    alternately. A setting that was not measured within ``budget_s`` keeps its default. Raises a
    :class:`~beluga.errors.BelugaError` if a copy fails.
    """
    trial = Trial(pool, offset, time.monotonic() + budget_s)
    found = CopySettings.default()
    found = trial.crossing(found, "past", [size * _KIB for size in (128, 256, 512, 1024)])
    rows, some_rows = Shape(1280, _SPAN // 1280), Shape(1280, _SPAN // 2560, sparse=True)
    pages = Shape(16 * _KIB, 64)
    found = trial.best(found, "ahead", [0, *(size * _KIB for size in (2, 4, 8))], rows, some_rows)
    found = trial.best(found, "window", [size * _KIB for size in (16, 32, 64, 128, 256)], pages)
    found = trial.best(found, "step", [size * _KIB for size in (1, 2, 4)], pages)
    found = trial.best(found, "head", [0, *(size * _KIB for size in (1, 2, 4))], pages, write=True)
    found = trial.crossing(found, "direct", [64, 128, 256, 512, 1024, 4096], write=True)
    return trial.parts(found, [size * _KIB for size in (32, 64, 128, 256, 512)])


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A timed copy: ``count`` fragments of ``size`` bytes, with gaps of the same size in private
    memory.

    The fragments of a ``sparse`` one have the same gaps in the pool, and are only read.
    """

    size: int
    count: int
    sparse: bool = False


class Trial:
    """Times copies with different settings, up to a deadline (monotonic seconds)."""

    def __init__(self, pool: Pool, offset: int, deadline: float) -> None:
        self._pool, self._offset, self._deadline = pool, offset, deadline
        self._memory = np.ones(2 * _SPAN + 4096, np.uint8)
        self._start = self._memory.ctypes.data + -self._memory.ctypes.data % 4096
        self._plans: dict[Shape, Plan] = {}

    def best(
        self,
        settings: CopySettings,
        name: str,
        values: Sequence[int],
        *shapes: Shape,
        write: bool = False,
    ) -> CopySettings:
        """Return the settings with the value that copies the shapes fastest, by the product of
        their times.

        The settings do not change if the gain is within noise.
        """
        variants = {value: (dataclasses.replace(settings, **{name: value}), 1) for value in values}
        product = dict.fromkeys(values, 1.0)
        for shape in shapes:
            times = self._times(variants, shape, write=write)
            if not times:
                return settings
            product = {value: product[value] * times[value] for value in values}
        fastest = min(product, key=product.__getitem__)
        before = product[getattr(settings, name)]
        return variants[fastest][0] if product[fastest] < _GAIN * before else settings

    def crossing(
        self, settings: CopySettings, name: str, sizes: Sequence[int], *, write: bool = False
    ) -> CopySettings:
        """Return the settings with the least of ``sizes`` from which on the other method is faster.

        For a write a size is that of a fragment, for a read that of a plan.
        """
        variants = {
            value: (dataclasses.replace(settings, **{name: value}), 1)
            for value in (_ALWAYS, _NEVER)
        }
        from_here = _NEVER
        for size in reversed(sizes):
            shape = (
                Shape(size, _SPAN // 4 // size) if write else Shape(4 * _KIB, size // (4 * _KIB))
            )
            times = self._times(variants, shape, write=write)
            if not times:
                return settings
            if times[_ALWAYS] > times[_NEVER]:
                break
            from_here = size
        return dataclasses.replace(settings, **{name: from_here})

    def parts(self, settings: CopySettings, sizes: Sequence[int]) -> CopySettings:
        """Return the settings with the least part of a plan for which two threads beat one."""
        if len(os.sched_getaffinity(0)) < 2:
            return settings
        for size in sizes:
            both = dataclasses.replace(settings, part=size)
            pages = Shape(4 * _KIB, 2 * size // (4 * _KIB))
            times = self._times({1: (both, 1), 2: (both, 2)}, pages)
            if not times:
                break
            if times[2] < _GAIN * times[1]:
                return both
        return settings

    def _times(
        self,
        variants: dict[int, tuple[CopySettings, int]],
        shape: Shape,
        *,
        write: bool = False,
    ) -> dict[int, float]:
        """Time a copy with each variant (settings, threads), in nanoseconds; none after the
        deadline."""
        structs = {name: settings.struct(threads) for name, (settings, threads) in variants.items()}
        times: dict[int, list[int]] = {name: [] for name in variants}
        for _ in range(_ROUNDS):
            for name, struct in structs.items():
                times[name].append(self._time(struct, shape, write=write))
                if time.monotonic() > self._deadline:
                    return {}
        return {name: statistics.median(several) for name, several in times.items()}

    def _time(self, struct: core.bl_copy_settings, shape: Shape, *, write: bool) -> int:
        """Time one copy of private memory that is in no cache, in nanoseconds."""
        if shape not in self._plans:
            self._plans[shape] = self._plan(shape)
        plan = self._plans[shape].struct()
        lib.bl_flush(ffi.cast("void *", self._start), 2 * _SPAN)
        lib.bl_fence()
        copy = lib.bl_plan_write if write else lib.bl_plan_read
        with self._pool.using() as pool:
            start = time.perf_counter_ns()
            code = copy(pool, plan, struct, ffi.NULL, 0)
            taken = time.perf_counter_ns() - start
        raise_for_status(code, "timing a copy")
        return taken

    def _plan(self, shape: Shape) -> Plan:
        """Return the plan of a shape. A dense one has checksums, like caches by default, and its
        bytes are written once.

        All bytes of the memory are equal, so the plans that share the pool's range keep their
        checksums.
        """
        places = 2 * shape.size * np.arange(shape.count)
        sizes, offsets = np.full(shape.count, shape.size), np.array([self._offset])
        addresses = (self._start + places).astype(np.uint64)
        if shape.sparse:
            self._plan(Shape(2 * shape.size * shape.count, 1))  # so all bytes in the pool are equal
            rows = addresses, np.zeros_like(places), places, sizes
            return plan_rows(*rows, offsets=offsets, length=2 * shape.size * shape.count)
        plan = plan_blocks(addresses[None], sizes, offsets, chunk_size=lib.BL_CHUNK_SIZE)
        with self._pool.using() as pool:
            code = lib.bl_plan_write(pool, plan.struct(), ffi.NULL, ffi.NULL, 0)
        raise_for_status(code, "writing what is timed")
        return plan


_THREADS_DEFAULT = 4
"""Enough to saturate a memory link; more threads would only take cores from the inference
engine."""


# From the Beluga paper (Exp 1, 2): 16 KiB written in 2.41 us, flushed and read in 5.98 us.
COSTS = {
    Direction.WRITE: Cost(200, 20, 2200 / (16 << 10)),
    Direction.READ: Cost(500, 20, 5400 / (16 << 10)),
}
"""Default costs of copies without measurements."""

_CORES = len(os.sched_getaffinity(0))
"""The set at process start: an engine may pin the copying thread to one of them later."""


def default_threads() -> int:
    """Return the default number of threads: one for each core, at most 4."""
    return min(_THREADS_DEFAULT, _CORES)


@dataclasses.dataclass(frozen=True, slots=True)
class CpuTransfer:
    """A plan that the CPU has executed, or an error."""

    error: BelugaError | None

    def done(self) -> bool:
        """Return True, because the engine returns when the bytes have moved."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Raise the error of the copy, if there is one: :class:`~beluga.errors.ChecksumError` or
        :class:`~beluga.errors.DeviceFaultError`."""
        if self.error is not None:
            raise self.error


_MOVED = CpuTransfer(None)


class CpuEngine:
    """Copies in the caller's thread, without the GIL, with up to ``threads - 1`` helping threads.

    A write uses non-temporal stores; a read invalidates lines before it loads them. Both compute
    checksums during the copy. All engines of the process share the helping threads, which sleep
    between plans. The caller copies alone if a thread's share of a plan would be too small.
    ``settings`` has the sizes at which the engine changes its method; None takes the settings of
    this machine, which are measured before the first copy if necessary (``tuning.py``).

    With a ``handle``, the link scheduler admits 256 KiB at a time, in the classes ``read`` and
    ``write``.
    """

    name = "cpu"

    def __init__(  # noqa: PLR0913  all but the first two named
        self,
        pool: Pool,
        threads: int | None = None,
        *,
        settings: CopySettings | None = None,
        handle: IoHandle | None = None,
        read: TransferClass = TransferClass.ONBOARD,
        write: TransferClass = TransferClass.OFFLOAD,
    ) -> None:
        self._pool, self._handle = pool, handle
        self._read, self._write = read, write
        self._settings = settings
        self._struct: core.bl_copy_settings | None = None
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise LayoutError(f"an engine cannot have {threads} threads; use at least 1")

    def gather_write(self, plan: Plan) -> CpuTransfer:
        """Copy scattered memory to the pool; the copy has ended on return. Raises LayoutError."""
        plan.refuse_direction(write=True)
        return self._execute(lib.bl_plan_write, plan, self._write, "writing a plan")

    def scatter_read(self, plan: Plan) -> CpuTransfer:
        """Copy the pool to scattered memory; the copy has ended on return. Raises LayoutError."""
        plan.refuse_direction(write=False)
        return self._execute(lib.bl_plan_read, plan, self._read, "reading a plan")

    def close(self) -> None:
        """Do nothing, because the engine has no resources."""

    def _execute(
        self, function: _Function, plan: Plan, kind: TransferClass, doing: str
    ) -> CpuTransfer:
        if self._struct is None:
            self._struct = (self._settings or tuned(self._pool)).struct(self.threads)
        if self._handle is None:
            with self._pool.using() as pool:
                code = function(pool, plan.struct(), self._struct, ffi.NULL, kind)
        else:
            with self._pool.using() as pool, self._handle.using() as io_queue:
                code = function(pool, plan.struct(), self._struct, io_queue, kind)
            self._handle.watch()
        if code == 0:
            return _MOVED
        if code == -errno.EINVAL:
            raise LayoutError(f"{doing}: its pieces leave the pool, or do not tile their chunks")
        if code == -errno.EBADMSG:
            return CpuTransfer(ChecksumError(f"{doing}: bytes are not those that were written"))
        if code == -errno.ECANCELED:
            return CpuTransfer(TransferCancelledError(f"{doing}: it was stopped"))
        try:
            raise_for_status(code, doing)
        except BelugaError as error:
            return CpuTransfer(error)
        return _MOVED
