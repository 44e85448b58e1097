# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A plan that runs on a stream in parts, and the CPU's work after each part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from beluga.errors import ChecksumError, TransferCancelledError, TransferTimeoutError
from beluga.transfer.engines.cuda.driver import Driver
from beluga.transfer.engines.cuda.holds import Hold
from beluga.transfer.engines.cuda.launch import Launch, Launcher
from beluga.transfer.plan.plan import Plan

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
