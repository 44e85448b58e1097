# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines that copy piece by piece, as the link admits the pieces.

::

    handle = IoHandle(Link("cxl0", pool=pool))
    engine = ScheduledEngine(DsaEngine(pool), handle)
    engine.scatter_read(plan).wait()

A plan is prepared as a whole first. Then ranges of its chunks are started, each between an
``acquire`` and a ``release``. The waiting thread does this itself, so no other thread is needed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi
from beluga._shared import when_forked
from beluga.errors import (
    BelugaError,
    LayoutError,
    TransferError,
    TransferTimeoutError,
    UnsettledError,
)
from beluga.transfer.engine import Direction, Prepared, prepared, settle
from beluga.transfer.link import TransferClass
from beluga.transfer.plan import finer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from beluga.transfer.engine import CopyEngine, Transfer
    from beluga.transfer.io_handle import IoHandle
    from beluga.transfer.link import Link, LinkSettings
    from beluga.transfer.plan import Plan


DEPTH = 4
"""Pieces of one engine that may be in flight. One is being copied, and the others bridge the time
until a thread has woken and started another.
"""

_PIECE_PS = 100_000_000
"""The time of a piece on the link if the engine has no ``piece_size``. Starting a piece costs some
20 microseconds of Python.
"""

_SLICE_NS = 100_000_000  # of waiting in C, between which Python handles signals
_LOOK_NS = 50_000  # of waiting for an admission, between two polls of pieces in flight


class ScheduledEngine:
    """An engine whose copies wait for admission to a link, in the classes ``read`` and ``write``.

    See :class:`~beluga.transfer.engine.CopyEngine`. If the engine rejects a range at its start, the
    transfer's ``wait`` raises the error.
    """

    def __init__(
        self,
        engine: CopyEngine,
        handle: IoHandle,
        *,
        read: TransferClass = TransferClass.ONBOARD,
        write: TransferClass = TransferClass.OFFLOAD,
    ) -> None:
        self.name = f"{engine.name}-scheduled"
        self._engine, self._handle = engine, handle
        self._kinds = TransferClass(read), TransferClass(write)
        self._sizes = [
            piece_size(engine, handle.link.settings, direction) for direction in Direction
        ]
        self._open: deque[ScheduledTransfer] = deque()  # all but the first wait for it
        self._lock = threading.RLock()  # guards the transfers
        handle.widen(max(self._sizes), DEPTH + 1)  # one may be admitted while all are in flight
        when_forked(self)

    def _after_fork(self) -> None:
        """Drop the transfers in a forked child: they belong to the parent."""
        for transfer in self._open:
            transfer.abandon()
        self._open = deque()
        self._lock = threading.RLock()

    @property
    def fault(self) -> str | None:
        """The engine's fault, if it reports one."""
        found: str | None = getattr(self._engine, "fault", None)
        return found

    def gather_write(self, plan: Plan) -> ScheduledTransfer:
        """Write scattered engine memory to the pool, as the link admits it. Raises LayoutError."""
        if plan.sparse:
            raise LayoutError("a sparse plan can only be read")
        return self._start(plan, Direction.WRITE)

    def scatter_read(self, plan: Plan) -> ScheduledTransfer:
        """Read the pool to scattered engine memory, as the link admits it. Raises LayoutError."""
        return self._start(plan, Direction.READ)

    def close(self) -> None:
        """Close the engine; the handle stays open."""
        with self._lock:
            for transfer in self._open:
                transfer.cancel()
            settle(list(self._open))
        self._engine.close()

    def _start(self, plan: Plan, direction: Direction) -> ScheduledTransfer:
        if (pool := self._handle.link.pool) is not None:
            plan.refuse_beyond(pool.geometry.size)
        plan = finer(plan, self._sizes[direction])
        pieces = _Pieces(plan, self._sizes[direction], self._handle.link)
        work = prepared(self._engine, plan, direction)
        kind = self._kinds[direction]
        transfer = ScheduledTransfer(self, self._handle, work, pieces, (direction, kind))
        with self._lock:
            self._open.append(transfer)
        self.poll()
        return transfer

    def poll(self) -> None:
        """Start and complete pieces, without waiting."""
        with self._lock:
            self._advance(0, None)

    def wait_for(self, transfer: ScheduledTransfer, deadline: float | None) -> None:
        """Poll transfers in order until this one has ended. Raises TransferTimeoutError."""
        while not transfer.ended:
            remaining_s = _remaining_s(deadline)
            timeout_ns = (
                _SLICE_NS if remaining_s is None else min(_SLICE_NS, int(remaining_s * 1e9))
            )
            with self._lock:
                self._advance(timeout_ns, deadline)

    def _advance(self, timeout_ns: int, deadline: float | None) -> None:
        """Release pieces that have ended, and start others: those of the next transfer as soon as
        all pieces of one have started. With a timeout, wait for one of the two.
        """
        in_flight, has_next = 0, False
        for transfer in self._open:
            in_flight += transfer.reap()
            before = transfer.in_flight
            transfer.start_pieces(DEPTH - in_flight, timeout_ns, beside=in_flight > 0)
            in_flight += transfer.in_flight - before
            if has_next := transfer.has_next:
                break
        full = in_flight == DEPTH or not has_next
        if timeout_ns > 0 and self._open and self._open[0].in_flight and full:
            self._open[0].wait_first(_remaining_s(deadline))
        while self._open and self._open[0].finish():
            self._open.popleft()


class _Pieces:
    """The cuts of a plan: piece i has chunks from ``ends[i - 1]`` to ``ends[i]``.

    It is ``sizes`` bytes on the link, and ``devices`` of them lie on each memory device.
    """

    def __init__(self, plan: Plan, size: int, link: Link) -> None:
        self.ends, self.sizes = plan.ranges(size)
        self.devices: NDArray[np.uint64] | None = (
            link.device_bytes(plan, self.ends) if link.devices else None
        )

    def device_bytes(self, number: int) -> core.uint64_p | core.Null:
        """Return the device bytes of one piece, for C."""
        if self.devices is None:
            return ffi.NULL
        return ffi.from_buffer("uint64_t[]", self.devices[number])


class ScheduledTransfer:
    """A transfer that advances while a thread polls or waits. See
    :class:`~beluga.transfer.engine.Transfer`.
    """

    def __init__(
        self,
        engine: ScheduledEngine,
        handle: IoHandle,
        work: Prepared,
        pieces: _Pieces,
        kind: tuple[Direction, TransferClass],
    ) -> None:
        self._engine, self._handle, self._work, self._pieces = engine, handle, work, pieces
        requests = [ffi.new("bl_io_request *") for _ in range(DEPTH)]
        for request in requests:
            request.direction, request.node = kind
        self._idle = deque(requests)  # the first one may wait for admission
        self._flights: deque[tuple[core.bl_io_request, Transfer]] = deque()
        self._next = 0  # the next piece to start
        self._error: BelugaError | None = None
        self._unsettled: UnsettledError | None = None
        self.ended = False

    def done(self) -> bool:
        """Return whether it has ended, successfully or not, and start further pieces.

        Raises UnsettledError if the state of a piece is unknown.
        """
        if not self.ended:
            self._engine.poll()
        if self._unsettled is not None:
            raise self._unsettled
        return self.ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, as :meth:`beluga.transfer.engine.Transfer.wait` does.

        Raises the error of its first failed piece, and TransferCancelledError once the handle was
        stopped.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._engine.wait_for(self, deadline)
        if self._unsettled is not None:
            raise self._unsettled
        if self._error is not None:
            raise self._error

    # ---- for its engine

    def cancel(self) -> None:
        """Start no further pieces."""
        self._fail(TransferError("the engine was closed before the transfer had ended"))

    def abandon(self) -> None:
        """Drop the pieces in a forked child: they belong to the parent."""
        if not self.ended:
            self._error = TransferError(
                "the transfer belongs to the parent process; start another one"
            )
        self._flights.clear()
        self.ended = True

    @property
    def in_flight(self) -> int:
        """Return how many pieces are in flight."""
        return len(self._flights)

    @property
    def has_next(self) -> bool:
        """Return whether a piece has to be started."""
        return self._error is None and self._next < len(self._pieces.sizes)

    def reap(self) -> int:
        """Release the pieces that have ended, from the first on. Return how many are still in
        flight.
        """
        while self._flights and self._has_ended(self._flights[0][1]):
            self.wait_first(None)
        return len(self._flights)

    def start_pieces(self, most: int, timeout_ns: int, *, beside: bool) -> None:
        """Start as many pieces as the link admits now, at most ``most``.

        With a timeout, wait for the first one, and wait long if no other transfer has pieces in
        flight (``beside``).
        """
        while most > 0 and self._idle and self.has_next:
            number, request = self._next, self._idle[0]
            request.bytes = self._pieces.sizes[number]
            request.again = number + 1 < len(self._pieces.sizes)
            devices = self._pieces.device_bytes(number)
            wait_ns = min(timeout_ns, _LOOK_NS) if beside else timeout_ns
            try:
                admitted = self._handle.acquire(request, devices, wait_ns)
            except BelugaError as error:
                self._fail(error)
                return
            if not admitted:
                if timeout_ns == 0:  # otherwise the link could admit it while no thread waits
                    self._handle.release(request)
                return
            self._start(number, request)
            most, beside = most - 1, True

    def _start(self, number: int, request: core.bl_io_request) -> None:
        self._next += 1
        first = self._pieces.ends[number - 1] if number > 0 else 0
        try:
            transfer = self._work.start(first, self._pieces.ends[number])
        except BelugaError as error:
            self._handle.release(request)
            self._fail(error)
        except Exception as error:
            self._handle.release(request)
            self._fail(TransferError(f"{self._engine.name} failed: {error!r}"))
        else:
            self._idle.popleft()
            self._flights.append((request, transfer))

    @staticmethod
    def _has_ended(transfer: Transfer) -> bool:
        try:
            return transfer.done()
        except Exception:  # the transfer's wait raises the error
            return True

    def wait_first(self, timeout_s: float | None) -> None:
        """Wait for the piece that was started first, and release it."""
        request, transfer = self._flights[0]
        try:
            transfer.wait(timeout_s)
        except BelugaError as error:
            if isinstance(error, TransferTimeoutError) and timeout_s is not None:
                raise
            self._fail(error)
            self._settle(transfer)
        except Exception as error:
            self._fail(TransferError(f"{self._engine.name} failed: {error!r}"))
            self._settle(transfer)
        self._flights.popleft()
        self._handle.release(request)
        self._idle.append(request)

    def _settle(self, transfer: Transfer) -> None:
        """Handle a failed wait: the piece may still be in flight."""
        try:
            settle([transfer])
        except UnsettledError as error:
            self._unsettled = error

    def _fail(self, error: BelugaError) -> None:
        """Start no further pieces. The first error remains."""
        if self._error is None:
            self._error = error

    def finish(self) -> bool:
        """Return whether it has ended; if so, release its resources."""
        if self.ended or self.has_next or self._flights:
            return self.ended
        for request in self._idle:
            self._handle.release(request)
        self._work.close()
        self._handle.watch()
        self.ended = True
        return True


def _remaining_s(deadline: float | None) -> float | None:
    """Return the remaining seconds; None: forever. Raises TransferTimeoutError if none remain."""
    if deadline is None:
        return None
    if (remaining_s := deadline - time.monotonic()) <= 0:
        raise TransferTimeoutError("the transfer has not ended in time; it continues")
    return remaining_s


def piece_size(engine: CopyEngine, settings: LinkSettings, direction: Direction) -> int:
    """Return the bytes of an engine's pieces.

    That is the engine's ``piece_size``, or the bytes of 100 microseconds on the link, and never
    less than a piece of a copying thread.
    """
    speed = settings.write if direction is Direction.WRITE else settings.read
    own: int = getattr(engine, "piece_size", 0) or speed.longest(_PIECE_PS)
    return max(own, settings.piece_size)
