# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine moves blocks between GPU memory and the pool, on the caller's stream
(``csrc/cuda/engine.c``).

A plan is one launch, or one for each few MiB if the CPU has to maintain cache lines or to bounce
bytes. The CPU does not wait. There is no further path, copies through GPU memory by a copy engine:
they were slower in every case that was measured on an H100, and need a second pass
(``docs/understand/copy-engines.md``).
"""

from __future__ import annotations

import dataclasses
import errno
from typing import TYPE_CHECKING

from beluga import config
from beluga._ffi import core, ffi, lib
from beluga._shared import when_forked
from beluga.errors import (
    ChecksumError,
    ForkedSessionError,
    LayoutError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UnsettledError,
)
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer.cuda.device import CudaDevice, DriverError, StreamLike, stream_handle
from beluga.transfer.cuda.registration import Claims, Registrar, join, leave
from beluga.transfer.engine import Direction, keep_for_good, settle
from beluga.transfer.policy import MAINTENANCE, CacheMaintenance, flush_threads, probe

if TYPE_CHECKING:
    from beluga.transfer.plan import Plan

_UNLIMITED = (1 << 64) - 1  # UINT64_MAX: no stream is given, or a wait has no limit

_ERRORS: dict[int, tuple[type[Exception], str]] = {
    -errno.EINVAL: (LayoutError, "the plan's pieces are not of its chunks, or do not tile them"),
    -errno.EXDEV: (
        LayoutError,
        "a piece of the plan lies in two stripes; cut it where they end",
    ),
    -errno.EAGAIN: (
        TransferError,
        "that part of the pool is not registered yet; call settle() before",
    ),
    -errno.ETIMEDOUT: (
        TransferTimeoutError,
        "the GPU has not finished in time; the copy continues",
    ),
    -errno.ECANCELED: (TransferCancelledError, "the copy was stopped before its end"),
    -errno.EINPROGRESS: (
        UnsettledError,
        "a copy could not be started, and parts of it may still run; its space stays taken until "
        "this process ends: restart it",
    ),
    -errno.ESHUTDOWN: (TransferError, "the CUDA engine is closed"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class CudaStat:
    """Bytes by path, and launches. ``fault`` is the reason if a registration failed."""

    direct_bytes: int = 0
    bounced_bytes: int = 0
    bounce_count: int = 0  # bounced transfers
    launch_count: int = 0
    registered_bytes: int = 0
    unregistered_count: int = 0  # windows that were replaced by others
    refused_count: int = 0  # requested windows beyond the cap
    fault: str | None = None


class CudaTransfer:
    """A :class:`~beluga.transfer.engine.Transfer`: some parts of a copy, whose plan it keeps."""

    def __init__(
        self, engine: CudaEngine, plan: Plan, copy: core.bl_cuda_copy, parts: core.uint32_p
    ) -> None:
        self._engine, self._plan, self._copy, self._parts = engine, plan, copy, parts

    def done(self) -> bool:
        """Return whether it has ended. This finishes the parts that the GPU has completed.

        Until a part is finished, any thread that needs its buffers may still write.
        """
        self._engine.refuse_forked()
        first, end = self._parts
        return self._engine.check(lib.bl_cuda_done(self._copy, first, end)) == 1

    def wait(self, timeout_s: float | None = None) -> None:
        """See :meth:`beluga.transfer.engine.Transfer.wait`. While the CPU finishes a part, the GPU
        copies the next one."""
        self._engine.refuse_forked()
        first, end = self._parts
        timeout_ns = _UNLIMITED if timeout_s is None else max(int(timeout_s * 1e9), 0)
        bad_count = lib.bl_cuda_finish(self._copy, first, end, timeout_ns)
        if bad_count:
            refuse_bad(self._engine.check(bad_count))


def refuse_bad(count: int) -> None:
    """Raise :class:`~beluga.errors.ChecksumError` if chunks of a read differ."""
    if count:
        raise ChecksumError(f"{count} chunks are not those that were written")


class CapturedTransfer:
    """A captured copy of a plan.

    The owner of the graph calls :meth:`prepare` before each replay, and :meth:`wait` when the
    replay has ended (after the owner has waited for the stream or an event).

    The plan's description exists until the engine is closed, so the graph must not be replayed
    after that. Each replay moves the same plan.
    """

    def __init__(self, engine: CudaEngine, plan: Plan, copy: core.bl_cuda_copy) -> None:
        self._engine, self._plan, self._copy = engine, plan, copy

    def prepare(self) -> None:
        """Drop this host's cached lines of the pool's bytes, before a replay of a read."""
        self._engine.check(lib.bl_cuda_replay(self._copy))

    def done(self) -> bool:
        """Return True: only the owner can determine whether a replay has ended."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Flush the bytes of a replayed write, or check the checksums of a replayed read.

        Raises :class:`~beluga.errors.ChecksumError`.
        """
        del timeout_s  # the owner has waited already
        refuse_bad(self._engine.check(lib.bl_cuda_replayed(self._copy)))


class CudaEngine:
    """An :class:`~beluga.transfer.engine.CopyEngine` for the memory of a GPU.

    ``device`` is the number of a GPU, or an open one. Work goes to ``stream`` (a handle, or a
    stream of torch or cupy), or to the stream of a call. Without either it goes to the engine's own
    streams, where reads have the higher priority; they wait for no other stream, so source and
    target must not be in use.

    * ``blocks``: the number of the GPU's multiprocessors that a copy uses, twice as many with
      checksums. Four of an H200 saturate its link (``bench/results/gpu-h200.json``).
    * ``window_size``: bytes per registration, a power of two of 2 MiB stripes.
    * ``cap``: bytes that all processes of this host may have registered together.
    * ``bounce_size``: bytes of buffers.

    Engines of one process for one pool and GPU share registered memory; the first of them sets
    ``window_size`` and ``cap``.

    Raises :class:`~beluga.errors.EngineUnavailableError` if there is no GPU, driver or NVRTC.
    """

    def __init__(  # noqa: PLR0913  all but two named
        self,
        pool: Pool,
        device: int | CudaDevice = 0,
        stream: StreamLike | None = None,
        *,
        blocks: int = 4,
        window_size: int = 1 << 30,
        cap: int = 512 << 30,
        bounce_size: int = 64 << 20,
        maintenance: CacheMaintenance | None = None,
    ) -> None:
        while window_size > STRIPE_SIZE and window_size // 2 >= pool.data_devices[0].size:
            window_size //= 2
        self._pool, self._closed, self._forked = pool, False, False
        self._gpu = device if isinstance(device, CudaDevice) else CudaDevice(device)
        kept = maintenance or probe().maintenance("gpu", pool, flush_threads())

        def register() -> Registrar:
            claims = Claims(config.runtime_root() / "cuda-registered", cap)
            return Registrar(self._gpu, pool, window_size, claims)

        self._registrar = join(self._gpu, pool, self, register)
        settings = ffi.new(
            "bl_cuda_settings *",
            {
                "stream": _UNLIMITED if stream is None else stream_handle(stream),
                "bounce_size": bounce_size,
                "range_size": [kept.range_size(write=write) for write in (False, True)],
                "blocks": blocks,
                "before_read": MAINTENANCE[kept.row.before_read],
                "after_write": MAINTENANCE[kept.row.after_write],
                "threads": kept.threads,
            },
        )
        made = ffi.new("bl_cuda_engine **")
        try:
            with pool.using() as mapped:
                given = self._gpu.handle, self._registrar.handle, mapped
                self.check(lib.bl_cuda_engine_open(*given, settings, made))
        except BaseException:
            leave(self._registrar, self)
            raise
        self._handle = ffi.gc(made[0], lib.bl_cuda_engine_free)
        self._captured: list[CapturedTransfer] = []
        pool.before_close(self.close)
        when_forked(self)

    def _after_fork(self) -> None:
        """Leave all in a forked child to the parent: CUDA does not work there."""
        self._closed = self._forked = True

    piece_size = 16 << 20
    """The least bytes that a link should admit at once: fewer take as long to start as to copy."""

    @property
    def name(self) -> str:
        return self._gpu.name

    @property
    def stat(self) -> CudaStat:
        """The work so far; counts of windows include all engines that share them."""
        found = ffi.new("bl_cuda_stat *")
        lib.bl_cuda_engine_stat(self._handle, found)
        return CudaStat(
            found.direct_bytes,
            found.bounced_bytes,
            found.bounced_copies,
            found.launches,
            self._registrar.size,
            self._registrar.unregistered_count,
            self._registrar.refused_count,
            self._registrar.fault,
        )

    @property
    def registrar(self) -> Registrar:
        """The windows, which all engines of this process for the pool and the GPU share."""
        return self._registrar

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until the pool is registered as far as possible; return False after the timeout."""
        return self._registrar.settle(timeout_s)

    def gather_write(self, plan: Plan, *, stream: StreamLike | None = None) -> CudaTransfer:
        """See :meth:`beluga.transfer.engine.CopyEngine.gather_write`."""
        return self._copy(plan, stream, Direction.WRITE)

    def scatter_read(self, plan: Plan, *, stream: StreamLike | None = None) -> CudaTransfer:
        """See :meth:`beluga.transfer.engine.CopyEngine.scatter_read`."""
        return self._copy(plan, stream, Direction.READ)

    def capture(self, plan: Plan, stream: StreamLike, *, write: bool) -> CapturedTransfer:
        """Put a copy into the graph that ``stream`` is being captured into.

        Raises :class:`~beluga.errors.TransferError` unless the stream is being captured and the
        pool's part is registered (:meth:`settle`).
        """
        plan.refuse_direction(write=write)
        if len(plan.pieces) == 0:
            raise LayoutError(
                "a plan without pieces cannot be captured; give it at least one piece"
            )
        copy = ffi.new("bl_cuda_copy **")
        handle = stream_handle(stream)
        with self._pool.using():
            code = lib.bl_cuda_capture(self._handle, plan.struct(), write, handle, copy)
        if code == -errno.EBUSY:
            raise TransferError("the stream is not being captured; do not use capture()")
        self.check(code, plan)
        transfer = CapturedTransfer(self, plan, ffi.gc(copy[0], lib.bl_cuda_drop))
        self._captured.append(transfer)
        return transfer

    def close(self) -> None:
        """See :meth:`beluga.transfer.engine.CopyEngine.close`. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if lib.bl_cuda_engine_close(self._handle) < 0:
            keep_for_good(self)  # copies may still run: keep windows and buffers
        else:
            leave(self._registrar, self)

    # ---- for puts and gets in C, and for transfers

    def table(self, piece_sizes: list[int]) -> core.bl_engine:
        """Return the engine as C calls it, with the bytes that a link admits at once of a read and
        a write. It is valid while this engine is.
        """
        made = ffi.new("bl_engine *", lib.bl_cuda_engine_table(self._handle))
        made.piece_size[0], made.piece_size[1] = piece_sizes
        return made

    def raise_for_copy(self, code: int) -> None:
        """Raise the error of a copy that C called, if the code is one of this engine's."""
        if code == -errno.EBUSY:
            raise TransferError("the stream is being captured; use capture()")
        if code in _ERRORS or code <= -lib.BL_CUDA_STATUS:
            self.check(code)

    def refuse_forked(self) -> None:
        """Raise ForkedSessionError in a forked child."""
        if self._forked:
            raise ForkedSessionError("the copy belongs to the parent process; start another one")

    def start(
        self, plan: Plan, copy: core.bl_cuda_copy, chunks: range, *, last: bool
    ) -> CudaTransfer:
        """Start chunks of a prepared plan."""
        parts = ffi.new("uint32_t[]", 2)
        transfer = CudaTransfer(self, plan, copy, parts)
        try:
            with self._pool.using():
                code = lib.bl_cuda_start(copy, chunks.start, chunks.stop, last, parts)
            self.check(code, plan)
        except UnsettledError:
            keep_for_good(transfer)
            raise
        except BaseException:  # an interrupt, too, leaves no part in progress
            settle([transfer])
            raise
        return transfer

    def check(self, code: int, plan: Plan | None = None) -> int:
        """Return a result of C, or raise its error, which concerns ``plan``."""
        if code >= 0:
            return code
        if code == -errno.EINVAL and plan is not None:
            plan.refuse_beyond(self._pool.geometry.size)
        kind, text = _ERRORS.get(code, (None, ""))
        if kind is not None:
            raise kind(text)
        try:
            return self._gpu.check(code)
        except DriverError as error:
            raise DriverError(f"a kernel or a copy failed: {error}") from None

    def _prepare(
        self, plan: Plan, stream: StreamLike | None, direction: Direction
    ) -> core.bl_cuda_copy:
        plan.refuse_direction(write=direction is Direction.WRITE)
        handle = _UNLIMITED if stream is None else stream_handle(stream)
        copy = ffi.new("bl_cuda_copy **")
        with self._pool.using():
            code = lib.bl_cuda_prepare(self._handle, plan.struct(), direction, handle, copy)
        if code == -errno.EBUSY:
            raise TransferError("the stream is being captured; use capture()")
        self.check(code, plan)
        return ffi.gc(copy[0], lib.bl_cuda_drop)

    def _copy(self, plan: Plan, stream: StreamLike | None, direction: Direction) -> CudaTransfer:
        copy = self._prepare(plan, stream, direction)
        return self.start(plan, copy, range(len(plan.chunks)), last=True)
