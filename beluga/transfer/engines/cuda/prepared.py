# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A plan that is described to the GPU before a link admits any of it.

Then ranges of its chunks are started, each a launch of the same kernel for a part of the spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from beluga.errors import TransferCancelledError, UnsettledError
from beluga.transfer.engine import keep_for_good
from beluga.transfer.engines.cuda.driver import DriverError
from beluga.transfer.engines.cuda.paths import drain
from beluga.transfer.engines.cuda.transfer import CudaTransfer

if TYPE_CHECKING:
    from beluga.transfer.engines.cuda.holds import Hold
    from beluga.transfer.engines.cuda.paths import DirectedStream, Paths
    from beluga.transfer.engines.cuda.transfer import Part
    from beluga.transfer.plan.plan import Plan


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
