# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One launch: its tables go to the GPU, its result comes back, in stream order."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.cuda import crc
from beluga.transfer.cuda.buffers import Buffers
from beluga.transfer.cuda.driver import Driver, Grid, Pinned
from beluga.transfer.cuda.tables import SUM, VERDICT, Tables, pack, upload_size
from beluga.transfer.cuda.windows import Bases

THREADS = 512  # of a block; with 8 words of 16 bytes in flight each, 64 KiB a block


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """What a launch holds until it has ended, and where its result will be."""

    pinned: Pinned
    device: int
    result: slice
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
        size = upload_size(tables, bases)
        pinned, device = self.buffers.take_pinned(2 * size), self.buffers.take(size)
        upload = pack(tables, bases, target=device, crc_tables=self._crc[tables.lanes])
        pinned.array[:size] = upload.content
        host, result = pinned.array.ctypes.data, upload.result
        self.driver.copy(device, host, size, stream)
        name = f"bl_{'gather' if write else 'scatter'}{tables.kernel}"
        self.driver.launch(name, self.grid, upload.job, stream)
        self.count += 1
        launched = Launched(
            pinned, device, slice(size + result.start, size + result.stop), len(tables.sums) > 0
        )
        if launched.has_sums:  # not over what a graph's replay uploads again
            self.driver.copy(
                host + launched.result.start,
                device + result.start,
                result.stop - result.start,
                stream,
            )
        return launched

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
