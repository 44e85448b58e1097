# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Launches kernels: describes a plan's bytes to the GPU, and gets the checksums that it computed.

Both lie in pinned memory, which the kernels access: a launch copies no tables in either direction.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.errors import TransferError
from beluga.transfer.engines.cuda import crc
from beluga.transfer.engines.cuda.buffers import Buffers
from beluga.transfer.engines.cuda.driver import Driver, Grid, Pinned
from beluga.transfer.engines.cuda.rows import runs_of
from beluga.transfer.plan.plan import Plan

THREADS = 512  # threads of a block; 8 words of 16 bytes each are in flight: 64 KiB
HALF_BELOW = 2048  # half a warp copies spans of plans whose pieces are shorter, in bytes
SPAN = record_dtype("bl_span")
JOB = np.dtype([("spans", "<u8"), ("sums", "<u8"), ("tables", "<u8"), ("count", "<u8")])


class Launch:
    """The spans of a plan, and room for a checksum of each, in pinned memory.

    ``users`` counts the ranges that were launched and not yet finished, and the launch's maker.
    """

    def __init__(self, plan: Plan, write: bool, pinned: Pinned, count: int, room: int) -> None:
        self.plan, self.write, self.pinned, self._room = plan, write, pinned, room
        self.spans: NDArray[np.void] = pinned.array[: count * SPAN.itemsize].view(SPAN)
        self.sums = pinned.array[room : room + count * 4].view(np.uint32)
        self.lanes = 16 if plan.size < HALF_BELOW * len(plan.pieces) else 32
        self.users = 1

    def job(self, first: int, end: int, tables: int) -> NDArray[np.void]:
        """Return the kernel's argument for the spans from ``first`` to ``end``: a JOB, shape ()."""
        address = self.pinned.address
        spans, sums = address + first * SPAN.itemsize, address + self._room + first * 4
        return np.array((spans, sums, tables, end - first), JOB)

    @property
    def kernel(self) -> str:
        """The name of the kernel."""
        half, summed = self.lanes == 16, self.plan.checksums is not None
        verb = "gather" if self.write else "scatter"
        return f"bl_{verb}{'_half' if half else ''}{'_sum' if summed else ''}"

    def range(self, part: Plan) -> tuple[int, int]:
        """Return the first span of a part of the plan, and the span after its last one."""
        first = part.chunk_base
        if len(part.chunks) == len(self.plan.chunks):
            return 0, len(self.spans)
        found = np.searchsorted(self.spans["chunk"], [first, first + len(part.chunks)])
        return int(found[0]), int(found[1])

    def finish(self, part: Plan, first: int, end: int) -> int:
        """Store the checksums that the GPU computed in a part of the plan, whose spans are those
        from ``first`` to ``end``, or compare them. Return how many chunks of a read differ.
        """
        if part.checksums is None:
            return 0
        bad_count: int = lib.bl_spans_sum(
            ffi.from_buffer("bl_span[]", self.spans[first:end]),
            ffi.from_buffer("uint32_t[]", self.sums[first:end]),
            *(end - first, part.struct(), self.write),
        )
        return bad_count


class Launcher:
    """Launches kernels on at most ``blocks`` whole multiprocessors, or twice as many for checksums.

    Four multiprocessors of an H200 saturate its link. With checksums, eight write 0.90 and read
    0.80 of what a copy engine does, sixteen 0.92 and 0.89 (``bench/results/gpu-h200.json``).
    """

    def __init__(self, driver: Driver, buffers: Buffers, *, blocks: int) -> None:
        self.driver, self.buffers = driver, buffers
        self._blocks = blocks
        self.count = 0
        self._tables = {lanes: self._upload(crc.tables(lanes)) for lanes in (16, 32)}

    def make(self, plan: Plan, windows: core.bl_windows, *, write: bool) -> Launch:
        """Describe a valid plan to the GPU; the caller releases the launch.

        ``windows`` is a ``bl_windows *``. Raises :class:`~beluga.errors.TransferError` if a window
        of the plan has no GPU address.
        """
        described, shared = plan, None
        if plan.sparse and plan.checksums is not None:
            runs = runs_of(plan)
            described = dataclasses.replace(plan, pieces=runs.pieces)
            shared = ffi.from_buffer("int64_t[]", runs.extra)
        most = len(described.pieces) + described.size // lib.BL_SPAN_SIZE
        room = most * SPAN.itemsize
        pinned = self.buffers.take(room + most * 4)
        count = lib.bl_spans_make(
            *(windows, described.struct(), shared or ffi.NULL, write),
            ffi.from_buffer("bl_span[]", pinned.array[:room], require_writable=True),
        )
        if count < 0:
            self.buffers.give(pinned)
            raise TransferError("a window of the plan is not registered; call settle() before")
        return Launch(plan, write, pinned, count, room)

    def run(self, launch: Launch, first: int, end: int, *, stream: int) -> None:
        """Launch the kernel for the spans from ``first`` to ``end``."""
        job = launch.job(first, end, self._tables[launch.lanes])
        blocks = self._blocks if launch.plan.checksums is None else 2 * self._blocks
        self.driver.launch(launch.kernel, Grid(blocks, THREADS), job, stream)
        self.count += 1

    def release(self, launch: Launch) -> None:
        """End one use of a launch; the last one frees its buffer."""
        launch.users -= 1
        if launch.users == 0:
            self.buffers.give(launch.pinned)

    def close(self) -> None:
        """Free the tables. No kernel is running."""
        for address in self._tables.values():
            self.driver.free(address)

    def _upload(self, words: NDArray[np.uint32]) -> int:
        """Upload words synchronously. Return the GPU address."""
        pinned, device = self.buffers.take(words.nbytes), self.driver.allocate(words.nbytes)
        pinned.array[: words.nbytes] = words.view(np.uint8)
        stream, event = self.driver.make_stream(urgent=True), self.driver.make_event()
        self.driver.copy(device, pinned.array.ctypes.data, words.nbytes, stream)
        self.driver.record(event, stream)
        self.driver.wait(event)
        self.driver.free_event(event)
        self.driver.end_stream(stream)
        self.buffers.give(pinned)
        return device
