# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A plan that runs on a stream in parts, and the CPU's work after each part.

A plan's bytes take one of two paths:

direct  a kernel reads or writes the registered pool
bounced while a window is not registered, a kernel uses a pinned buffer, and the CPU copies between
        the buffer and the pool with its own cache maintenance

There is no third path, copies through GPU memory by a copy engine: they were slower in every case
that was measured on an H100, and need a second pass (``docs/understand/copy-engines.md``).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from beluga._ffi import ffi, lib
from beluga.errors import (
    ChecksumError,
    TransferCancelledError,
    TransferTimeoutError,
    UnsettledError,
    raise_for_status,
)
from beluga.pool import Pool
from beluga.transfer.cuda.driver import Driver, DriverError, Pinned
from beluga.transfer.cuda.launch import Launch, Launcher, Packed, pack_chunks
from beluga.transfer.cuda.registration import BufferWindows, Hold, Windows
from beluga.transfer.engine import keep_for_good
from beluga.transfer.plan import Plan
from beluga.transfer.policy import CacheMaintenance

_NAP_S = 20e-6  # a kernel takes tens of microseconds; the application needs the CPU
_NAP_MAX_S = 1e-3


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """A part of a plan that was launched; ``event`` ends it on its stream.

    ``settle`` does the CPU's part of the work: it copies bytes from a pinned buffer to the pool, or
    flushes the GPU's writes. ``give_back`` frees buffers.
    """

    plan: Plan
    launch: Launch
    spans: tuple[int, int]  # of the launch: first, and after the last
    event: int
    settle: Callable[[], None]
    give_back: Callable[[], None]
    hold: Hold | None = None  # a hold on windows, which the event ends
    settled: bool = False
    bad_count: int = 0  # chunks of a read whose checksum differs
    error: Exception | None = None

    def finish(self, launcher: Launcher) -> None:
        """Finish a part whose event has ended, and free its buffers in any case.

        An error is stored for the transfer of this part, because another transfer that needs the
        buffers may call this.
        """
        if self.settled:
            return
        self.error = TransferCancelledError("the copy was stopped before its end")
        try:
            self.settle()
            self.bad_count = self.launch.finish(self.plan, *self.spans)
            self.error = None
        except Exception as error:
            self.error = error
        finally:
            self.drop(launcher)

    def drop(self, launcher: Launcher) -> None:
        """Free the buffers of a part whose event has ended."""
        self.settled = True
        if self.hold is not None:
            self.hold.end(self.event)
        launcher.release(self.launch)
        self.give_back()
        launcher.driver.free_event(self.event)


class CudaTransfer:
    """A :class:`~beluga.transfer.engine.Transfer` in parts.

    ``gather`` merges the results of the parts when all have ended.
    """

    def __init__(
        self, launcher: Launcher, parts: Sequence[Part], gather: Callable[[], None]
    ) -> None:
        self._launcher, self._parts, self._gather = launcher, list(parts), gather
        self._finished = False

    def done(self) -> bool:
        """Return whether it has ended. This finishes the parts that the GPU has completed.

        Until a part is finished, any thread that needs its buffers may still write.
        """
        for part in self._parts:
            if not part.settled and self._launcher.driver.ended(part.event):
                part.finish(self._launcher)
        return all(part.settled for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> None:
        """See :meth:`beluga.transfer.engine.Transfer.wait`. While the CPU finishes a part, the GPU
        copies the next one."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for part in self._parts:
            if not part.settled:
                wait_event(self._launcher.driver, part.event, until)
                part.finish(self._launcher)
        for part in self._parts:
            if part.error is not None:
                raise part.error
        if not self._finished:
            self._finished = True
            self._gather()
        refuse_bad(sum(part.bad_count for part in self._parts))


def refuse_bad(count: int) -> None:
    """Raise :class:`~beluga.errors.ChecksumError` if chunks of a read differ."""
    if count:
        raise ChecksumError(f"{count} chunks are not those that were written")


def wait_event(driver: Driver, event: int, until: float | None) -> None:
    """Wait for an event until a time of the monotonic clock, or without a limit.

    Raises :class:`~beluga.errors.TransferTimeoutError` at that time.
    """
    if until is None:
        driver.wait(event)
        return
    nap_s = _NAP_S
    while not driver.ended(event):
        if time.monotonic() >= until:
            raise TransferTimeoutError("the GPU has not finished in time; the copy continues")
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _NAP_MAX_S)


@dataclasses.dataclass(frozen=True, slots=True)
class DirectedStream:
    """A stream and the direction of its copies: ``write`` gathers, otherwise they scatter."""

    write: bool
    stream: int


@dataclasses.dataclass(slots=True)
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


class Paths:
    """Starts the parts of a plan, for one thread.

    A transfer starts with :meth:`begin`; if its start fails, :meth:`undo` follows. ``limit`` bounds
    the bytes in buffers of each kind; a part that would exceed it waits for the oldest part.
    """

    def __init__(
        self,
        pool: Pool,
        launcher: Launcher,
        windows: Windows,
        maintenance: CacheMaintenance,
        limit: int,
    ) -> None:
        self._pool, self.launcher = pool, launcher
        self._windows, self._maintenance, self._limit = windows, maintenance, limit
        self._driver, self._buffers = launcher.driver, launcher.buffers
        self._waiting: collections.deque[tuple[Part, int]] = collections.deque()
        self._held = 0  # bytes in their buffers
        self._started: list[Part] = []  # since begin()
        self.stat = CudaStat()

    def begin(self) -> None:
        """Begin a transfer: later work on streams belongs to it."""
        self._started = []
        self._buffers.begin()

    def undo(self, stream: int) -> None:
        """Undo a failed start, so that no part of it is in progress.

        This drops the CPU's part of the work, and waits for the work on the stream, which may have
        no event for its end. If that fails, it raises :class:`~beluga.errors.UnsettledError` and
        keeps the buffers.
        """
        for part in self._started:
            part.settle = _nothing
        try:
            drain(self._driver, stream)
        except BaseException as error:
            raise UnsettledError(
                f"a copy could not be started, and parts of it may still run: {error}; "
                "its space stays taken until this process ends: restart it"
            ) from error
        for part in self._started:
            if not part.settled:
                part.settled, part.error = True, TransferCancelledError("the copy was not started")
                if part.hold is not None:
                    part.hold.end(part.event)
                self._driver.free_event(part.event)
        self._buffers.undo()
        self._held = sum(held for _, held in self._waiting)

    def make(self, plan: Plan, *, write: bool) -> Launch:
        """Describe a plan to the GPU; its windows are held. The caller releases the launch."""
        self.stat.direct_bytes += plan.size
        with self._pool.using() as pool:
            return self.launcher.make(plan, self._windows.struct(pool), write=write)

    def start(self, launch: Launch, part: Plan, stream: int, hold: Hold) -> Part:
        """Launch a part of a plan, after the CPU's maintenance of its lines."""
        if not launch.write:
            self._maintenance.before_read(part)
        return self._part(part, launch, stream, hold)

    def direct(self, plan: Plan, directed: DirectedStream, hold: Hold) -> list[Part]:
        """Copy by a launch for each range, so that the CPU maintains the lines of one range while
        the GPU copies another."""
        launch = self.make(plan, write=directed.write)
        size = self._maintenance.range_size(write=directed.write)
        ranges = [plan] if plan.size <= size else plan.cut(size)
        parts = [self.start(launch, part, directed.stream, hold) for part in ranges]
        self.launcher.release(launch)
        return parts

    def bounced(self, plan: Plan, directed: DirectedStream) -> Iterator[Part]:
        """Copy by the CPU and one launch for each part that fits into the buffers.

        Raises :class:`~beluga.errors.DeviceFaultError`.
        """
        self.stat.bounced_bytes += plan.size
        self.stat.bounce_count += 1
        for piece in plan.cut(self._limit // 4):
            packed = pack_chunks(piece)
            self._make_room(packed.size)
            pinned = self._buffers.take(packed.size)
            if not directed.write:
                self._between(packed, pinned, write=False)
            windows = BufferWindows(pinned.address)
            launch = self.launcher.make(packed.plan, windows.struct, write=directed.write)
            part = self._part(packed.plan, launch, directed.stream, None)
            self.launcher.release(launch)
            part.settle = _nothing
            if directed.write:
                part.settle = functools.partial(self._between, packed, pinned, write=True)
            part.give_back = functools.partial(self._buffers.give, pinned)
            self._waiting.append((part, packed.size))
            yield part

    def _part(self, plan: Plan, launch: Launch, stream: int, hold: Hold | None) -> Part:
        """Launch a part on the stream. It ends when the stream has executed it; then the GPU's
        writes are flushed to memory.
        """
        spans = launch.range(plan)
        self.launcher.run(launch, *spans, stream=stream)
        event = self._driver.make_event()
        self._driver.record(event, stream)
        settle = _nothing
        if launch.write:
            settle = functools.partial(self._maintenance.after_write, plan)
        launch.users += 1
        part = Part(plan, launch, spans, event, settle, _nothing, hold)
        self._started.append(part)
        if hold is not None:
            hold.until(event)
        return part

    def _between(self, packed: Packed, pinned: Pinned, *, write: bool) -> None:
        """Copy between a pinned buffer and the pool."""
        move = lib.bl_pool_write if write else lib.bl_pool_read
        buffer = ffi.from_buffer("uint8_t[]", pinned.array)
        with self._pool.using() as pool:
            for offset, place, size in packed.runs.tolist():
                raise_for_status(move(pool, offset, buffer + place, size), "bouncing a copy")

    def _make_room(self, size: int) -> None:
        """Wait for old parts until ``size`` more bytes may lie in buffers."""
        self._held += size
        while self._waiting and (self._waiting[0][0].settled or self._held > self._limit):
            part, held = self._waiting.popleft()
            self._held -= held
            if not part.settled:
                self._driver.wait(part.event)
                part.finish(self.launcher)


def _nothing() -> None:
    """Do nothing after a part; most parts need nothing."""


def drain(driver: Driver, stream: int) -> None:
    """Wait until all work on the stream has ended."""
    event = driver.make_event()
    driver.record(event, stream)
    driver.wait(event)
    driver.free_event(event)


class PreparedLaunch:
    """See :class:`~beluga.transfer.engine.Prepared`. It holds the windows until it is closed."""

    def __init__(self, paths: Paths, plan: Plan, directed: DirectedStream, hold: Hold) -> None:
        self._paths, self._launcher, self._plan = paths, paths.launcher, plan
        self._stream, self._hold = directed.stream, hold
        self._parts: list[Part] = []
        self._launch = paths.make(plan, write=directed.write)

    def start(self, first: int, end: int) -> CudaTransfer:
        """Launch the kernel for some chunks, after the CPU's maintenance of their lines."""
        self._launcher.driver.use()  # this may be another thread, which waits for the link
        self._paths.begin()
        try:
            part = self._paths.start(
                self._launch, self._plan.part(first, end), self._stream, self._hold
            )
        except BaseException:  # only this call has the work in progress
            try:
                self._paths.undo(self._stream)
            except UnsettledError:
                keep_for_good((self, self._plan))
                raise
            raise
        self._parts.append(part)
        return CudaTransfer(self._launcher, [part], lambda: None)

    def close(self) -> None:
        """Release the windows and the buffer, and drop unfinished ranges."""
        left = [part for part in self._parts if not part.settled]
        if left:
            driver = self._launcher.driver
            driver.use()
            try:
                drain(driver, self._stream)
            except DriverError:  # work may still run
                keep_for_good((self, self._plan))
                return
            for part in left:
                part.error = TransferCancelledError("the copy was closed before its end")
                part.drop(self._launcher)
        self._launcher.release(self._launch)
        self._hold.started()


class CapturedTransfer:
    """A captured copy of a plan.

    The owner of the graph calls :meth:`prepare` before each replay, and :meth:`wait` when the
    replay has ended (after the owner has waited for the stream or an event).

    The plan's description exists until the engine is closed, so the graph must not be replayed
    after that. Each replay moves the same plan.
    """

    def __init__(self, maintenance: CacheMaintenance, launch: Launch) -> None:
        self._maintenance, self.launch = maintenance, launch

    def prepare(self) -> None:
        """Drop this host's cached lines of the pool's bytes, before a replay of a read."""
        if not self.launch.write:
            self._maintenance.before_read(self.launch.plan)

    def done(self) -> bool:
        """Return True: only the owner can determine whether a replay has ended."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Flush the bytes of a replayed write, or check the checksums of a replayed read.

        Raises :class:`~beluga.errors.ChecksumError`.
        """
        del timeout_s  # the owner has waited already
        if self.launch.write:
            self._maintenance.after_write(self.launch.plan)
        refuse_bad(self.launch.finish(self.launch.plan, 0, len(self.launch.spans)))
