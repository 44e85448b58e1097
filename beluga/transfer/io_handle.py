# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine's handle of a link: a member in each direction, and statistics of its admissions.

A thread that copies acquires each piece and releases it (``csrc/api/iosched.h``): those of the CPU
in ``csrc/iosched/throttle.c``, and for all other engines ``csrc/kvcache/engine.c``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib
from beluga._shared import SharedHandle, when_forked
from beluga.errors import (
    ForkedSessionError,
    raise_for_status,
)
from beluga.transfer.engine import Direction
from beluga.transfer.link import GOAL_NS, QueueStat, TransferClass, queue_stat

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from beluga.transfer.link import Link


_logger = logging.getLogger(__name__)
_FREE, _TAKEN, _NONE, _FORKED = range(4)
_NULL = contextlib.nullcontext(ffi.NULL)


@dataclasses.dataclass(frozen=True, slots=True)
class TransferStats:
    """The bytes and pieces of one class that a link admitted, and their waiting times.

    ``unthrottled`` counts pieces that were copied without tokens: the link had no free member, or
    did not admit them within a second.
    """

    pieces: int = 0
    bytes: int = 0
    waited_ns: int = 0
    longest_ns: int = 0
    unthrottled: int = 0

    def plus(self, other: TransferStats) -> TransferStats:
        """Return the sum of both."""
        return TransferStats(
            self.pieces + other.pieces,
            self.bytes + other.bytes,
            self.waited_ns + other.waited_ns,
            max(self.longest_ns, other.longest_ns),
            self.unthrottled + other.unthrottled,
        )


class IoHandle:
    """A handle of a link. Its members are taken on first use. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._handle: core.bl_io_queue | core.Null = ffi.NULL
        self._state = _FREE
        self._lock = threading.RLock()  # prevents closing while a thread uses it
        self._shared: SharedHandle[core.bl_io_queue] | None = None
        self._stalls = 0
        self._closed = False
        when_forked(self)

    @property
    def handle(self) -> core.bl_io_queue | core.Null:
        """The ``bl_io_queue *``; NULL once this is closed.

        Raises OSError (ENOSPC) if the link has no free member, and ForkedSessionError in a forked
        child.
        """
        if self._state == _FREE:
            with self._lock:
                if self._state == _FREE:
                    self._handle = _take_queues(self.link)
                    end = functools.partial(lib.bl_io_queue_destroy, self._handle)
                    self._shared = SharedHandle("I/O handle", self._handle, end)
                    self._state = _TAKEN
        if self._state == _FORKED:
            raise ForkedSessionError(
                "the I/O handle belongs to the parent process; make another one after fork"
            )
        return self._handle

    def using(self) -> AbstractContextManager[core.bl_io_queue | core.Null]:
        """Return the :attr:`io_queue`, which stays open meanwhile even if this handle is closed."""
        shared = self._shared
        if shared is None and self.io_queue:
            shared = self._shared
        return _NULL if shared is None else shared

    @property
    def io_queue(self) -> core.bl_io_queue | core.Null:
        """The handle for threads that acquire pieces in C.

        It is NULL if the link has no free member: they copy without tokens then.
        """
        try:
            return self.handle
        except OSError as error:
            if self._state == _FREE:
                _logger.warning("beluga: %s; copies are not throttled", error)
                self._state = _NONE
            return ffi.NULL

    def close(self) -> None:
        """Release the members as soon as no copy uses them. A second call has no effect."""
        with self._lock:
            self._closed = True
            shared, self._shared = self._shared, None
            self._handle = ffi.NULL
            if self._state != _FORKED:
                self._state = _NONE
        if shared is not None:
            shared.close()

    def _after_fork(self) -> None:
        """Drop the members in a forked child: they belong to the parent, and so does the thread
        that holds the lock.
        """
        self._lock = threading.RLock()
        if self._state == _TAKEN:
            self._handle, self._state, self._shared = ffi.NULL, _FORKED, None

    def widen(self, piece_size: int, count: int) -> None:
        """Make the link's buckets hold at least ``count`` pieces of ``piece_size`` bytes from now
        on."""
        with self.using() as handle:
            if handle:
                lib.bl_io_queue_widen(handle, piece_size, count)

    def transfer_stats(self, kind: TransferClass) -> TransferStats:
        """Return the statistics of this handle so far."""
        found = ffi.new("bl_transfer_stats *")
        with self._lock:
            if self._handle:
                lib.bl_io_queue_transfer_stats(self._handle, kind, found)
        names = (field.name for field in dataclasses.fields(TransferStats))
        return TransferStats(*(int(getattr(found, name)) for name in names))

    def stat(self, direction: Direction) -> QueueStat:
        """Return the counters of one of the queues."""
        found = ffi.new("bl_queue_stat *")
        with self._lock:
            if self.handle:
                lib.bl_io_queue_stat(self._handle, Direction(direction), found)
        return queue_stat(found)

    def stop(self) -> None:
        """Stop copies in C at their next piece, with TransferCancelledError."""
        self._stop(1)

    def resume(self) -> None:
        """Undo :meth:`stop`."""
        self._stop(0)

    def watch(self) -> None:
        """Warn if pieces were in flight for too long since the last call.

        This is Seastar's stall warning: the threshold begins at 100 ms, doubles with each stall,
        and falls with time.
        """
        with self._lock:
            stalls = int(lib.bl_io_queue_stalls(self._handle)) if self._handle else 0
        if stalls == self._stalls:
            return
        both = self.link.settings.duplex
        stats = [self.stat(direction) for direction in (Direction if both else [Direction.READ])]
        _logger.warning(
            "beluga: a piece took %.0f ms on link %s (%d wait here, %d are in flight); "
            "%d such so far",
            max(stat.stalled_ns for stat in stats) / 1e6,
            self.link.name,
            sum(stat.queued for stat in stats),
            sum(stat.in_flight for stat in stats),
            stalls,
        )
        self._stalls = stalls

    def _stop(self, stopped: int) -> None:
        with self._lock:
            if self._handle:
                lib.bl_io_queue_stop(self._handle, stopped)


def _take_queues(link: Link) -> core.bl_io_queue:
    made = ffi.new("bl_io_queue **")
    read, write = (direction.handle for direction in link.directions)
    using = _NULL if link.pool is None else link.pool.using()
    with using as pool:
        status = lib.bl_io_queue_create(made, read, write, GOAL_NS, link.price(), pool)
    raise_for_status(status, f"making an I/O handle of link {link.name}")
    for device in link.devices:
        raise_for_status(lib.bl_io_queue_add_device(made[0], device), "adding a device")
    return made[0]
