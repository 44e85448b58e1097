# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Launches kernels: uploads their tables and fetches their results, in stream order."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.engines.cuda import crc
from beluga.transfer.engines.cuda.buffers import Buffers
from beluga.transfer.engines.cuda.driver import Driver, Grid, Pinned
from beluga.transfer.engines.cuda.tables import SUM, TILE, VERDICT, Tables, pack, upload_size
from beluga.transfer.engines.cuda.windows import Bases

THREADS = 512  # threads of a block; 8 words of 16 bytes each are in flight: 64 KiB


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """The buffers of one launch, or of several with the same tables, until they have ended.

    The result goes to ``result`` in the pinned buffer and to ``found`` in GPU memory.
    """

    kernel: str
    job: NDArray[np.void]
    pinned: Pinned
    device: int
    result: slice
    found: int
    has_sums: bool

    def bad_chunks(self) -> tuple[int, int]:
        """Return how many chunks a scatter found bad, and the first of them."""
        if not self.has_sums:
            return 0, 0
        verdict = self._result()[: VERDICT.itemsize].view(VERDICT)[0]
        return int(verdict["bad_count"]), int(verdict["first_bad"])

    def sums(self) -> NDArray[np.uint32]:
        """Return the checksums that a gather computed: uint32 of shape (chunks,)."""
        found: NDArray[np.uint32] = self._result()[VERDICT.itemsize :].view(SUM)["crc"]
        return found

    def _result(self) -> NDArray[np.uint8]:
        return self.pinned.array[self.result]


class Launcher:
    """Launches kernels, each with its tables, on at most ``blocks`` whole multiprocessors."""

    def __init__(self, driver: Driver, buffers: Buffers, *, blocks: int) -> None:
        self.driver, self.buffers = driver, buffers
        self.grid = Grid(blocks, THREADS)
        self.count = 0
        self._crc = {lanes: self._upload(crc.tables(lanes)) for lanes in (16, 32)}

    def launch(self, tables: Tables, bases: Bases, *, write: bool, stream: int) -> Launched:
        """Gather or scatter by one launch, for any number of KV blocks."""
        launched = self.load(tables, bases, write=write, stream=stream)
        self.run(launched, 0, len(tables.tiles), stream=stream)
        self.fetch(launched, stream=stream)
        return launched

    def load(self, tables: Tables, bases: Bases, *, write: bool, stream: int) -> Launched:
        """Upload the tables to the GPU."""
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
            # a graph's replay uploads the tables again, so the result is in another buffer
            slice(size + upload.result.start, size + upload.result.stop),
            device + upload.result.start,
            len(tables.sums) > 0,
        )

    def run(self, launched: Launched, first: int, last: int, *, stream: int) -> None:
        """Launch the kernel for tiles ``first`` to ``last`` of the tables."""
        if first == last:
            return
        job = launched.job.copy()
        job["tiles"] += np.uint64(first * TILE.itemsize)
        job["tile_count"] = last - first
        self.driver.launch(launched.kernel, self.grid, job, stream)
        self.count += 1

    def fetch(self, launched: Launched, *, stream: int) -> None:
        """Fetch the result, if any."""
        if launched.has_sums:
            target = launched.pinned.array.ctypes.data + launched.result.start
            size = launched.result.stop - launched.result.start
            self.driver.copy(target, launched.found, size, stream)

    def give_back(self, launched: Launched) -> None:
        """Free the buffers of a completed launch whose result was read."""
        self.buffers.give_pinned(launched.pinned)
        self.buffers.give(launched.device)

    def close(self) -> None:
        for address in self._crc.values():
            self.buffers.give(address)

    def _upload(self, words: NDArray[np.uint32]) -> int:
        """Upload words synchronously. Return the GPU address."""
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
