# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A plan's bytes take one of two paths: direct, or bounced.

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
from collections.abc import Iterator

from beluga._ffi import ffi, lib
from beluga.errors import TransferCancelledError, UnsettledError, raise_for_status
from beluga.pool import Pool
from beluga.transfer.engines.cuda.driver import Driver, Pinned
from beluga.transfer.engines.cuda.holds import Hold
from beluga.transfer.engines.cuda.launch import Launch, Launcher
from beluga.transfer.engines.cuda.parts import Packed, pack_chunks
from beluga.transfer.engines.cuda.transfer import Part
from beluga.transfer.engines.cuda.windows import BufferWindows, Windows
from beluga.transfer.engines.policy import CacheMaintenance
from beluga.transfer.plan.plan import Plan


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
