# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A plan that waits for its turn, piece by piece: a transfer that can be dropped."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from beluga._shared import when_forked
from beluga.errors import (
    BelugaError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UnsettledError,
)
from beluga.transfer.engine import Direction
from beluga.transfer.iosched.link import TransferClass
from beluga.transfer.plan.finer import finer

if TYPE_CHECKING:
    from beluga.transfer.plan.plan import Plan


class JobPort(Protocol):
    """Where a job's pieces wait."""

    def withdraw(self, job: Job) -> int:
        """Take back those that wait; how many there were."""
        ...

    def drop(self, job: Job) -> None:
        """Cancel it soon."""
        ...

    def forget(self, job: Job) -> None:
        """It has ended."""
        ...


class Job:
    """Made by :meth:`~beluga.transfer.iosched.scheduler.Scheduler.submit`."""

    def __init__(
        self, plan: Plan, direction: Direction, kind: TransferClass, piece_size: int, blocks: object
    ) -> None:
        if any(blocks is owner for owner in plan.owners):
            raise TransferError("blocks that the plan owns cannot go before it has ended")
        self.direction, self.kind = Direction(direction), TransferClass(kind)
        self.parts: list[Plan] = list(finer(plan, piece_size).cut(piece_size))
        self.handles: list[int] = []
        self.number = 0
        self._blocks = None if blocks is None else weakref.ref(blocks, lambda _: self._gone())
        self._lock = threading.Lock()
        self._left = len(self.parts)
        self._ended = threading.Event()
        self._error: BelugaError | None = None
        self._unsettled: UnsettledError | None = None
        self._port: JobPort | None = None
        if not self.parts:
            self._ended.set()
        when_forked(self)

    def _forget(self) -> None:
        """In a forked child: the parent goes on with it."""
        over = self._ended.is_set()
        self._lock, self._ended, self._port = threading.Lock(), threading.Event(), None
        self._ended.set()
        if not over:
            self._error = TransferError("the transfer is the parent process's; start another")

    def done(self) -> bool:
        """Has it ended, well or not? Raises :class:`~beluga.errors.UnsettledError` where nobody can
        say that of one of its pieces."""
        if self._unsettled is not None:
            raise self._unsettled
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, as :meth:`beluga.transfer.engine.Transfer.wait` does.

        Raises what a piece of it raised,
        :class:`~beluga.errors.TransferCancelledError` if it was dropped before its end, and
        :class:`~beluga.errors.TransferTimeoutError` after ``timeout_s`` (it goes on).
        """
        if not self._ended.wait(timeout_s):
            raise TransferTimeoutError(f"the transfer has not ended after {timeout_s} s")
        if self._unsettled is not None:
            raise self._unsettled
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Drop what has not started; pieces that have will end. Nothing if it has ended.

        What was written so far is a part of a block: it must not be published.
        """
        self.fail(TransferCancelledError("the transfer was dropped before it had ended"))

    # ---- for its port

    def attach(self, port: JobPort) -> None:
        """Its pieces wait there. Something may have ended it already."""
        self._port = port
        if not self.wanted():
            self.cancel()
            self.finish(port.withdraw(self))
        if self._ended.is_set():
            port.forget(self)

    def wanted(self) -> bool:
        """Are its blocks still there, and has nothing gone wrong?"""
        return self._error is None and (self._blocks is None or self._blocks() is not None)

    def fail(self, error: BelugaError) -> None:
        """End it, once what is under way has ended. The first error stays."""
        with self._lock:
            if isinstance(error, UnsettledError):
                self._unsettled = error
            if self._error is not None or self._ended.is_set():
                return
            self._error = error
        self.finish(0 if self._port is None else self._port.withdraw(self))

    def finish(self, count: int) -> None:
        """So many pieces have been copied, or will not be."""
        with self._lock:
            self._left -= count
            ended = self._left == 0
        if ended:
            self._ended.set()
            if self._port is not None:
                self._port.forget(self)

    def _gone(self) -> None:
        """Its blocks are no more. This may be called while anything else is going on in the very
        thread that runs it, so what must be done is left to the port's."""
        if self._port is not None:
            self._port.drop(self)
