# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Launches: their tables go to the GPU, their result comes back, in stream order."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.engines.cuda import crc
from beluga.transfer.engines.cuda.buffers import Buffers
from beluga.transfer.engines.cuda.driver import Driver, Grid, Pinned
from beluga.transfer.engines.cuda.tables import SUM, TILE, VERDICT, Tables, pack, upload_size
from beluga.transfer.engines.cuda.windows import Bases

THREADS = 512  # of a block; with 8 words of 16 bytes in flight each, 64 KiB a block


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """What a launch, or several of the same tables, hold until they have ended, and where their
    result will be: ``result`` of the pinned buffer, and at ``found`` in GPU memory."""

    kernel: str
    job: NDArray[np.void]
    pinned: Pinned
    device: int
    result: slice
    found: int
    has_sums: bool

    def bad_chunks(self) -> tuple[int, int]:
        """How many chunks a scatter found bad, and the first of them."""
        if not self.has_sums:
            return 0, 0
        verdict = self._result()[: VERDICT.itemsize].view(VERDICT)[0]
        return int(verdict["bad_count"]), int(verdict["first_bad"])

    def sums(self) -> NDArray[np.uint32]:
        """The checksums that a gather computed."""
        found: NDArray[np.uint32] = self._result()[VERDICT.itemsize :].view(SUM)["crc"]
        return found

    def _result(self) -> NDArray[np.uint8]:
        return self.pinned.array[self.result]


class Launcher:
    """Launches kernels with tables of their own. ``blocks`` is how much of the GPU they may take:
    so many of its multiprocessors, whole."""

    def __init__(self, driver: Driver, buffers: Buffers, *, blocks: int) -> None:
        self.driver, self.buffers = driver, buffers
        self.grid = Grid(blocks, THREADS)
        self.count = 0
        self._crc = {lanes: self._upload(crc.tables(lanes)) for lanes in (16, 32)}

    def launch(self, tables: Tables, bases: Bases, *, write: bool, stream: int) -> Launched:
        """Gather or scatter: one launch, whatever the number of blocks."""
        launched = self.load(tables, bases, write=write, stream=stream)
        self.run(launched, 0, len(tables.tiles), stream=stream)
        self.fetch(launched, stream=stream)
        return launched

    def load(self, tables: Tables, bases: Bases, *, write: bool, stream: int) -> Launched:
        """The tables go to the GPU."""
        size = upload_size(tables, bases)
        pinned, device = self.buffers.take_pinned(2 * size), self.buffers.take(size)
        upload = pack(tables, bases, target=device, crc_tables=self._crc[tables.lanes])
        pinned.array[:size] = upload.content
        self.driver.copy(device, pinned.array.ctypes.data, size, stream)
        return Launched(
            f"bl_{'gather' if write else 'scatter'}{tables.kernel}",
            upload.job,
            pinned,
            device,
            # not over what a graph's replay uploads again
            slice(size + upload.result.start, size + upload.result.stop),
            device + upload.result.start,
            len(tables.sums) > 0,
        )

    def run(self, launched: Launched, first: int, last: int, *, stream: int) -> None:
        """A launch of the kernel for tiles ``first`` to ``last`` of the tables."""
        if first == last:
            return
        job = launched.job.copy()
        job["tiles"] += np.uint64(first * TILE.itemsize)
        job["tile_count"] = last - first
        self.driver.launch(launched.kernel, self.grid, job, stream)
        self.count += 1

    def fetch(self, launched: Launched, *, stream: int) -> None:
        """The result comes back, if there is one."""
        if launched.has_sums:
            target = launched.pinned.array.ctypes.data + launched.result.start
            size = launched.result.stop - launched.result.start
            self.driver.copy(target, launched.found, size, stream)

    def give_back(self, launched: Launched) -> None:
        """The launch has ended, and its result was looked at."""
        self.buffers.give_pinned(launched.pinned)
        self.buffers.give(launched.device)

    def close(self) -> None:
        for address in self._crc.values():
            self.buffers.give(address)

    def _upload(self, words: NDArray[np.uint32]) -> int:
        """Before any stream uses it: waited for."""
        pinned, device = self.buffers.take_pinned(words.nbytes), self.buffers.take(words.nbytes)
        pinned.array[: words.nbytes] = words.view(np.uint8)
        stream, event = self.driver.make_stream(urgent=True), self.driver.make_event()
        self.driver.copy(device, pinned.array.ctypes.data, words.nbytes, stream)
        self.driver.record(event, stream)
        self.driver.wait(event)
        self.driver.free_event(event)
        self.driver.end_stream(stream)
        self.buffers.give_pinned(pinned)
        return device
