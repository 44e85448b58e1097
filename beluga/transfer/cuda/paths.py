# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The three ways over which a plan's bytes go: direct, staged in GPU memory, and bounced.

direct  a kernel reads or writes the registered pool
staged  a kernel gathers into, or scatters from, one buffer in GPU memory; between it and the pool
        a copy engine moves whole runs. None is short: the driver copies short ones to the GPU
        by the CPU, slowly, and fills its cache with lines of the pool
bounced while a window is not registered: by a pinned buffer, between which and the pool the CPU
        copies, by the rules of a CPU
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi, lib
from beluga.errors import check
from beluga.pool import Pool
from beluga.transfer.cuda.launch import Launched, Launcher
from beluga.transfer.cuda.parts import Packed, cut_at_stripes, pack_chunks
from beluga.transfer.cuda.registrar import Registrar
from beluga.transfer.cuda.tables import Tables, make_tables
from beluga.transfer.cuda.transfer import Part
from beluga.transfer.cuda.windows import Bases, Windows
from beluga.transfer.plan import Plan
from beluga.transfer.policy import Care

STAGED_RUN_MIN = 32 << 10  # above the cliff at 24 to 28 KiB of host-to-device copies


@dataclasses.dataclass(slots=True)
class CudaStat:
    """Bytes by the way they went, and launches. ``fault``: why not all is registered, if so."""

    direct_bytes: int = 0
    staged_bytes: int = 0
    bounced_bytes: int = 0
    bounce_count: int = 0  # transfers that had to
    launch_count: int = 0
    registered_bytes: int = 0
    fault: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Where a part of a plan goes: ``write`` gathers, else it scatters; on a stream."""

    write: bool
    stream: int


class Paths:
    """Starts parts of plans; used by one thread. ``limit`` bounds the bytes that lie in buffers of
    each kind: a part that would exceed it waits for the oldest."""

    def __init__(  # noqa: PLR0913, PLR0917  an engine's own
        self,
        pool: Pool,
        launcher: Launcher,
        registrar: Registrar,
        windows: Windows,
        care: Care,
        limit: int,
    ) -> None:
        self._pool, self._launcher, self._registrar = pool, launcher, registrar
        self._windows, self._care, self._limit = windows, care, limit
        self._driver, self._buffers = launcher.driver, launcher.buffers
        self._waiting: collections.deque[tuple[Part, int]] = collections.deque()
        self._held = 0  # bytes of those
        self.stat = CudaStat()

    def bases(self, tables: Tables) -> Bases:
        """Of the windows that a launch touches, all of which are ready."""
        touched = self._windows.touched(tables.pieces["offset"])
        return Bases.of(self._windows, {place: self._registrar.ready[place] for place in touched})

    def direct(self, plan: Plan, tables: Tables, way: Way) -> list[Part]:
        """One launch."""
        if not way.write:
            self._care.before_read(plan)
        self.stat.direct_bytes += plan.size
        launched = self._launcher.launch(
            tables, self.bases(tables), write=way.write, stream=way.stream
        )
        return [self._part(plan, way, launched)]

    def gpu_runs(self, plan: Plan) -> NDArray[Any]:
        """What copy engines would move, of type RUN; ``offset`` is a GPU address."""
        return self._gpu_runs(pack_chunks(plan))

    def can_stage(self, plan: Plan) -> bool:
        """Is no run too short for a copy engine?"""
        return bool((self.gpu_runs(plan)["size"] >= STAGED_RUN_MIN).all())

    def staged(self, plan: Plan, way: Way) -> list[Part]:
        """A launch and a few copies, for each part that fits."""
        if not way.write:
            self._care.before_read(plan)
        self.stat.staged_bytes += plan.size
        return list(self._staged(plan, way))

    def bounced(self, plan: Plan, way: Way) -> list[Part]:
        """A launch for each part that fits, and copies by the CPU."""
        self.stat.bounced_bytes += plan.size
        self.stat.bounce_count += 1
        return list(self._bounced(plan, way))

    def _staged(self, plan: Plan, way: Way) -> Iterator[Part]:
        for piece in plan.cut(self._limit // 4):
            packed = pack_chunks(piece)
            self._make_room(packed.size)
            buffer = self._buffers.take(packed.size)
            runs = self._gpu_runs(packed)
            if not way.write:
                for at, place, size in runs.tolist():
                    self._driver.copy(buffer + place, at, size, way.stream)
            launched = self._launch(packed, buffer, way)
            if way.write:
                for at, place, size in runs.tolist():
                    self._driver.copy(at, buffer + place, size, way.stream)
            part = self._part(piece, way, launched)
            part.give_back = functools.partial(self._buffers.give, buffer)
            self._waiting.append((part, packed.size))
            yield part

    def _bounced(self, plan: Plan, way: Way) -> Iterator[Part]:
        for piece in plan.cut(self._limit // 4):
            packed = pack_chunks(piece)
            self._make_room(packed.size)
            pinned = self._buffers.take_pinned(packed.size)
            if not way.write:
                self._between(packed, pinned.array, write=False)
            launched = self._launch(packed, pinned.address, way)
            part = self._part(piece, way, launched)
            part.settle = _nothing
            if way.write:
                part.settle = functools.partial(self._between, packed, pinned.array, write=True)
            part.give_back = functools.partial(self._buffers.give_pinned, pinned)
            self._waiting.append((part, packed.size))
            yield part

    def _launch(self, packed: Packed, address: int, way: Way) -> Launched:
        tables = make_tables(packed.plan, write=way.write)
        return self._launcher.launch(
            tables, Bases.flat(address), write=way.write, stream=way.stream
        )

    def _part(self, plan: Plan, way: Way, launched: Launched) -> Part:
        """Of what the GPU reads or writes itself."""
        event = self._driver.make_event()
        self._driver.record(event, way.stream)
        settle = functools.partial(self._care.after_write, plan) if way.write else _nothing
        return Part(plan, way.write, launched, event, settle, _nothing)

    def _between(self, packed: Packed, array: NDArray[np.uint8], *, write: bool) -> None:
        """Copy between a pinned buffer and the pool."""
        move = lib.bl_pool_write if write else lib.bl_pool_read
        buffer = ffi.from_buffer("uint8_t[]", array)
        for offset, place, size in packed.runs.tolist():
            check(move(self._pool.handle, offset, buffer + place, size), "bouncing a copy")

    def _gpu_runs(self, packed: Packed) -> NDArray[Any]:
        """The runs by GPU addresses, none over the end of a window."""
        runs = cut_at_stripes(packed.runs)
        touched = self._windows.touched(runs["offset"])
        bases = Bases.of(self._windows, {place: self._registrar.ready[place] for place in touched})
        device, window, _ = self._windows.places(runs["offset"])
        runs["offset"] = bases.addresses(runs["offset"])
        follows = runs["offset"][1:] == (runs["offset"] + runs["size"])[:-1]
        follows &= runs["place"][1:] == (runs["place"] + runs["size"])[:-1]
        follows &= (np.diff(device) == 0) & (np.diff(window) == 0)
        starts = np.flatnonzero(np.concatenate([[True], ~follows]))
        joined: NDArray[Any] = runs[starts].copy()
        joined["size"] = np.add.reduceat(runs["size"], starts)
        return joined

    def _make_room(self, size: int) -> None:
        """See to it that so many more bytes may lie in buffers."""
        self._held += size
        while self._waiting and (self._waiting[0][0].settled or self._held > self._limit):
            part, held = self._waiting.popleft()
            self._held -= held
            if not part.settled:
                self._driver.wait(part.event)
                part.finish(self._launcher)


def _nothing() -> None:
    """What is left to be done after a part, mostly."""
