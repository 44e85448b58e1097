# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A plan's bytes take one of three paths: direct, staged in GPU memory, or bounced.

direct  a kernel reads or writes the registered pool
staged  kernels gather into, or scatter from, a buffer in GPU memory (staged.py), and a copy
        engine moves whole runs between the buffer and the pool. No run is short: the driver
        copies short ones by the CPU, which is slow and fills its cache with lines of the pool
bounced while a window is not registered, a kernel uses a pinned buffer, and the CPU copies between
        the buffer and the pool with its own cache maintenance
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi, lib
from beluga.errors import TransferCancelledError, UnsettledError, raise_for_status
from beluga.pool import Pool
from beluga.transfer.engines.cuda.holds import Hold, WindowId
from beluga.transfer.engines.cuda.launch import Launched, Launcher
from beluga.transfer.engines.cuda.parts import Packed, cut_at_stripes, pack_chunks
from beluga.transfer.engines.cuda.staged import DirectedStream, Staging, after, drain
from beluga.transfer.engines.cuda.tables import Tables, make_tables
from beluga.transfer.engines.cuda.transfer import Part
from beluga.transfer.engines.cuda.windows import Bases, Windows
from beluga.transfer.engines.policy import CacheMaintenance
from beluga.transfer.plan.plan import Plan

_BUFFERS = 2  # buffers of a staged plan
STAGED_RUN_MIN = 32 << 10  # above the cliff at 24 to 28 KiB of host-to-device copies


@dataclasses.dataclass(slots=True)
class CudaStat:
    """Bytes by path, and launches. ``fault`` is the reason if a registration failed."""

    direct_bytes: int = 0
    staged_bytes: int = 0
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
        self._pool, self.launcher, self._staging = pool, launcher, Staging(launcher)
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

        This drops the CPU's part of the work, and waits for the work on the streams, which may have
        no event for its end. If that fails, it raises :class:`~beluga.errors.UnsettledError` and
        keeps the buffers.
        """
        for part in self._started:
            part.settle = _nothing
        try:
            for one in {stream, *self.streams}:
                drain(self._driver, one)
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

    @property
    def streams(self) -> list[int]:
        """Return this object's own streams."""
        return self._staging.streams

    def bases(self, offsets: NDArray[np.uint64], addresses: Mapping[WindowId, int]) -> Bases:
        """Return the bases of the windows of these offsets, all of which are ready."""
        touched = self._windows.touched(offsets)
        return Bases.of(self._windows, {place: addresses[place] for place in touched})

    def direct(
        self, plan: Plan, tables: Tables, directed: DirectedStream, hold: Hold
    ) -> list[Part]:
        """Copy by one launch."""
        launched = self.load(plan, tables, directed, hold)
        self.launcher.run(launched, 0, len(tables.tiles), stream=directed.stream)
        self.launcher.fetch(launched, stream=directed.stream)
        return [self.part(plan, directed.write, launched, directed.stream, hold)]

    def load(self, plan: Plan, tables: Tables, directed: DirectedStream, hold: Hold) -> Launched:
        """Upload the tables of one launch or several."""
        if not directed.write:
            self._maintenance.before_read(plan)
        self.stat.direct_bytes += plan.size
        bases = self.bases(tables.pieces["offset"], hold.addresses)
        return self.launcher.load(tables, bases, write=directed.write, stream=directed.stream)

    def gpu_runs(self, plan: Plan, addresses: Mapping[WindowId, int]) -> NDArray[np.void]:
        """Return the runs for copy engines, of type RUN; ``offset`` is a GPU address."""
        return self._gpu_runs(pack_chunks(plan), addresses)

    def can_stage(self, plan: Plan, addresses: Mapping[WindowId, int]) -> bool:
        """Return whether all runs are long enough for a copy engine."""
        return bool((self.gpu_runs(plan, addresses)["size"] >= STAGED_RUN_MIN).all())

    def staged(self, plan: Plan, directed: DirectedStream, hold: Hold) -> list[Part]:
        """Copy by concurrent launches and copy engines, through at most two buffers."""
        if not directed.write:
            self._maintenance.before_read(plan)
        self.stat.staged_bytes += plan.size
        packs = [(piece, pack_chunks(piece)) for piece in plan.cut(self._limit // 4)]
        size = max(packed.size for _, packed in packs)
        buffers = []
        for _ in packs[:_BUFFERS]:
            self._make_room(size)
            buffers.append(self._buffers.take(size))
        copies = self._staging.copies(write=directed.write)
        if not directed.write:
            after(self._driver, directed.stream, copies)
        parts: list[Part] = []
        for number, (piece, packed) in enumerate(packs):
            buffer = buffers[number % len(buffers)]
            if number >= len(buffers):  # the filling stream waits for the buffer's last use
                filling = directed.stream if directed.write else copies
                self._driver.follow(filling, parts[number - len(buffers)].event)
            runs = self._gpu_runs(packed, hold.addresses)
            launched = self._staging.move(packed, runs, buffer, directed)
            parts.append(
                self.part(
                    piece,
                    directed.write,
                    launched,
                    copies if directed.write else directed.stream,
                    hold,
                )
            )
        for number in range(len(parts) - len(buffers), len(parts)):  # the last users of the buffers
            buffer = buffers[number % len(buffers)]
            parts[number].give_back = functools.partial(self._buffers.give, buffer)
            self._waiting.append((parts[number], size))
        if directed.write:
            self._driver.follow(directed.stream, parts[-1].event)
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
            pinned = self._buffers.take_pinned(packed.size)
            if not directed.write:
                self._between(packed, pinned.array, write=False)
            tables = make_tables(packed.plan, write=directed.write)
            launched = self.launcher.launch(
                tables, Bases.flat(pinned.address), write=directed.write, stream=directed.stream
            )
            part = self.part(piece, directed.write, launched, directed.stream, None)
            part.settle = _nothing
            if directed.write:
                part.settle = functools.partial(self._between, packed, pinned.array, write=True)
            part.give_back = functools.partial(self._buffers.give_pinned, pinned)
            self._waiting.append((part, packed.size))
            yield part

    def part(
        self, plan: Plan, write: bool, launched: Launched, stream: int, hold: Hold | None
    ) -> Part:
        """Return the part of a launch on the stream. It ends when the stream has executed it; then
        the GPU's writes are flushed to memory.
        """
        event = self._driver.make_event()
        self._driver.record(event, stream)
        settle = functools.partial(self._maintenance.after_write, plan) if write else _nothing
        part = Part(plan, write, launched, event, settle, _nothing, hold)
        self._started.append(part)
        if hold is not None:
            hold.until(event)
        return part

    def _between(self, packed: Packed, array: NDArray[np.uint8], *, write: bool) -> None:
        """Copy between a pinned buffer and the pool."""
        move = lib.bl_pool_write if write else lib.bl_pool_read
        buffer = ffi.from_buffer("uint8_t[]", array)
        with self._pool.using() as pool:
            for offset, place, size in packed.runs.tolist():
                raise_for_status(move(pool, offset, buffer + place, size), "bouncing a copy")

    def _gpu_runs(self, packed: Packed, addresses: Mapping[WindowId, int]) -> NDArray[np.void]:
        """Return the runs with GPU addresses, cut where windows end."""
        runs = cut_at_stripes(packed.runs)
        bases = self.bases(runs["offset"], addresses)
        device, window, _ = self._windows.places(runs["offset"])
        runs["offset"] = bases.addresses(runs["offset"])
        follows = runs["offset"][1:] == (runs["offset"] + runs["size"])[:-1]
        follows &= runs["place"][1:] == (runs["place"] + runs["size"])[:-1]
        follows &= (np.diff(device) == 0) & (np.diff(window) == 0)
        starts = np.flatnonzero(np.concatenate([[True], ~follows]))
        joined: NDArray[np.void] = runs[starts].copy()
        joined["size"] = np.add.reduceat(runs["size"], starts)
        return joined

    def close(self) -> None:
        self._staging.close()

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
