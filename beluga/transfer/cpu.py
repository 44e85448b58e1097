# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CPU as a copy engine: plans executed in C (``csrc/transfer/cpu.c``), by threads."""

from __future__ import annotations

import dataclasses
import errno
import os
from typing import TYPE_CHECKING

from beluga import config
from beluga._ffi import core, ffi, lib
from beluga.errors import (
    BelugaError,
    ChecksumError,
    LayoutError,
    TransferCancelledError,
    raise_for_status,
)
from beluga.transfer.link import TransferClass

if TYPE_CHECKING:
    from collections.abc import Callable

    from beluga.pool import Pool
    from beluga.transfer.io_handle import IoHandle
    from beluga.transfer.plan import Plan

    _Function = Callable[
        [core.bl_pool, core.bl_plan, core.bl_copy_settings, core.bl_io_queue | core.Null, int], int
    ]


_SIZE_MAX = 0xFFFFFFFF


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
    def default(cls, pool: Pool | None = None) -> CopySettings:
        """Return the C core's settings, with those of the table ``[copy]`` in beluga.toml. They
        differ for a pool whose blocks all have hardware coherence.
        """
        found = ffi.new("bl_copy_settings *")
        software = pool is None or any(d.coherence == "software" for d in pool.data_devices)
        lib.bl_copy_defaults(found, software)
        saved = config.copy_settings()
        names = (field.name for field in dataclasses.fields(cls))
        return cls(*(min(saved.get(name, getattr(found, name)), _SIZE_MAX) for name in names))

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


_THREADS_DEFAULT = 4
"""Enough to saturate a memory link; more threads would only take cores from the inference
engine."""


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
    ``settings`` has the sizes at which the engine changes its method.

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
            self._struct = (self._settings or CopySettings.default(self._pool)).struct(self.threads)
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
