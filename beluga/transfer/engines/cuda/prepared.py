# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A plan whose tables are in GPU memory before a link admits any of it.

Then ranges of its chunks are started, each a launch of the same kernel on a part of the tiles.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from beluga.errors import UnsettledError
from beluga.transfer.engine import keep_for_good
from beluga.transfer.engines.cuda.driver import DriverError
from beluga.transfer.engines.cuda.staged import drain
from beluga.transfer.engines.cuda.transfer import CudaTransfer, wait_event

if TYPE_CHECKING:
    from beluga.transfer.engines.cuda.driver import Driver
    from beluga.transfer.engines.cuda.holds import Hold
    from beluga.transfer.engines.cuda.launch import Launched
    from beluga.transfer.engines.cuda.paths import Paths
    from beluga.transfer.engines.cuda.staged import DirectedStream
    from beluga.transfer.engines.cuda.tables import Tables
    from beluga.transfer.engines.cuda.transfer import Part
    from beluga.transfer.plan.plan import Plan


class PreparedLaunch:
    """See :class:`~beluga.transfer.engine.Prepared`. It holds the windows until it is closed."""

    def __init__(
        self, paths: Paths, plan: Plan, tables: Tables, directed: DirectedStream, hold: Hold
    ) -> None:
        self._paths, self._launcher, self._plan = paths, paths.launcher, plan
        self._directed, self._hold = directed, hold
        self._chunks = tables.pieces["chunk"][tables.tiles["piece"]] - plan.chunk_base
        self._part: Part | None = None  # the end of all ranges, after the start of the last one
        self._launched: Launched = paths.load(plan, tables, directed, hold)

    def start(self, first: int, end: int) -> CudaTransfer | Range:
        """Launch the kernel for some chunks; with the last of them, fetch the result."""
        driver, stream = self._launcher.driver, self._directed.stream
        driver.use()  # the thread that waits for the link
        self._paths.begin()
        try:
            tiles = np.searchsorted(self._chunks, [first, end]).tolist()
            self._launcher.run(self._launched, *tiles, stream=stream)
            if end < len(self._plan.chunks):
                return Range(driver, stream)
            self._launcher.fetch(self._launched, stream=stream)
            self._part = self._paths.part(
                self._plan, self._directed.write, self._launched, stream, self._hold
            )
            return CudaTransfer(self._launcher, [self._part], lambda: None)
        except BaseException:  # only this call knows the work in progress
            self._part = None
            try:
                self._paths.undo(stream)
            except UnsettledError:
                keep_for_good((self, self._plan))
                raise
            raise

    def close(self) -> None:
        """Release the windows, and the tables unless the last range does that."""
        if self._part is None:
            driver = self._launcher.driver
            driver.use()
            try:
                drain(driver, self._directed.stream)
            except DriverError:  # work may still run
                keep_for_good((self, self._plan))
                return
            self._launcher.give_back(self._launched)
        self._hold.started()


class Range:
    """A launch that is not the last one: there is no work for the CPU."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._event = driver, driver.make_event()
        self._ended = False
        driver.record(self._event, stream)

    def done(self) -> bool:
        """See :meth:`beluga.transfer.engine.Transfer.done`."""
        if not self._ended and self._driver.ended(self._event):
            self._end()
        return self._ended

    def wait(self, timeout_s: float | None = None) -> None:
        """See :meth:`beluga.transfer.engine.Transfer.wait`."""
        if not self._ended:
            until = None if timeout_s is None else time.monotonic() + timeout_s
            wait_event(self._driver, self._event, until)
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._driver.free_event(self._event)
