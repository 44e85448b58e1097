# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One direction of a link and its queues, without clock or lock (``csrc/iosched/admit.c``).

Times are passed in, in nanoseconds, so that tests run the real code in virtual time.
"""

from __future__ import annotations

import dataclasses

from beluga._ffi import core, ffi, lib
from beluga.errors import TransferError, raise_for_status
from beluga.transfer.iosched.bucket import TokenBucket

TAU_NS = 5_000_000  # Seastar's: a class that wakes may have the link alone for so long at most
GOAL_NS = 750_000  # Seastar's latency goal; the flow ratio looks every 100 of it
BURST = 10 << 20  # Seastar's: bytes that a class with a limited bandwidth may be ahead of it


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStat:
    """``csrc/api/iosched.h``: ``bl_queue_stat``."""

    queued: int
    in_flight: int
    pending: int
    polls: int
    yields: int
    lost: int
    stalls: int
    stalled_ns: int
    stall_ns: int
    flow_ratio: float


def queue_stat(stat: core.bl_queue_stat) -> QueueStat:
    """From the C struct."""
    return QueueStat(*(getattr(stat, field.name) for field in dataclasses.fields(QueueStat)))


class Way:
    """One direction: a bucket of picoseconds, a tree of classes, and a seat for every engine.

    It lies in ``memory`` (of a :class:`~beluga.transfer.Link`), or in memory of its own.
    ``limit`` is what its bucket holds, and ``forgiving`` the head start of a class that wakes,
    times its shares; both in picoseconds. Capped, ``limit`` is also the most that is in flight.
    """

    def __init__(
        self,
        memory: core.bl_way | None = None,
        *,
        limit: int,
        forgiving: int = TAU_NS * 1000,
        capped: bool = False,
        now_ns: int,
    ) -> None:
        self.handle = ffi.new("bl_way *") if memory is None else memory
        status = lib.bl_way_init(self.handle, limit, forgiving, capped, now_ns)
        raise_for_status(status, "making a link")

    @classmethod
    def at(cls, memory: core.bl_way) -> Way:
        """The one that lies there."""
        way = object.__new__(cls)
        way.handle = memory
        return way

    def add(self, shares: int, *, parent: int = 0) -> int:
        """A class; or a group, once it is another's ``parent``. Its number."""
        return raise_for_status(lib.bl_way_add(self.handle, parent, shares), "adding a class")

    def set_shares(self, node: int, shares: int) -> None:
        """From the next piece on."""
        raise_for_status(lib.bl_way_set_shares(self.handle, node, shares), "setting shares")

    def limit(
        self, node: int, bytes_per_s: int, *, burst: int = BURST, now_ns: int | None = None
    ) -> None:
        """Limit the bandwidth of a class or group; 0 lifts it."""
        now = lib.bl_port_now_ns() if now_ns is None else now_ns
        raise_for_status(
            lib.bl_way_limit(self.handle, node, bytes_per_s, burst, now), "limiting a class"
        )

    def reap(self, now_ns: int) -> int:
        """Give back what processes that are gone held; how many there were."""
        return int(lib.bl_way_reap(self.handle, now_ns))

    def bytes_of(self, node: int) -> int:
        """Admitted so far."""
        return int(self.handle.nodes[node].bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """A piece that may start: its id, its handle for :meth:`Queue.complete`, when it was pushed."""

    id: int
    handle: int
    queued_ns: int


class Queue:
    """The pieces of one engine that wait for a way. Used by one thread."""

    def __init__(self, way: Way, *, now_ns: int, goal_ns: int = GOAL_NS) -> None:
        made = ffi.new("bl_queue **")
        raise_for_status(lib.bl_queue_create(made, way.handle, goal_ns, now_ns), "making a queue")
        self.way, self.wait_ns = way, 0
        self._handle: core.bl_queue | core.Null = made[0]
        self._admission, self._wait = ffi.new("bl_admission *"), ffi.new("uint64_t *")
        self._devices: list[TokenBucket] = []

    def close(self) -> None:
        """Give back what it holds; its pieces are forgotten. Twice is fine."""
        lib.bl_queue_destroy(self._handle)
        self._handle = ffi.NULL

    @property
    def handle(self) -> core.bl_queue:
        """The ``bl_queue *``. Raises TransferError once this is closed."""
        if not self._handle:
            raise TransferError("the queue is closed")
        return self._handle

    def add_device(self, device: TokenBucket) -> None:
        """A memory device behind the link, whose tokens pieces take as well."""
        raise_for_status(lib.bl_queue_add_device(self.handle, device.handle), "adding a device")
        self._devices.append(device)

    def push(  # noqa: PLR0913  what a piece is
        self,
        node: int,
        tokens: int,
        piece: int,
        *,
        size: int = 0,
        device_tokens: list[int] | None = None,
        now_ns: int = 0,
    ) -> int:
        """Put a piece of ``size`` bytes behind the others of its class; its handle."""
        if device_tokens is not None and len(device_tokens) != len(self._devices):
            raise ValueError(f"tokens of {len(self._devices)} devices, have {len(device_tokens)}")
        own = ffi.NULL if device_tokens is None else device_tokens
        status = lib.bl_queue_push(self.handle, node, tokens, size, own, piece, now_ns)
        return raise_for_status(status, "queueing a piece")

    def cancel(self, handle: int) -> bool:
        """It costs nothing any more and will not come; False if it has been admitted."""
        return int(lib.bl_queue_cancel(self.handle, handle)) == 0

    def pop(self, *, now_ns: int = 0) -> Admission | None:
        """Who is next by fairness alone."""
        status = lib.bl_queue_pop(self.handle, now_ns, self._admission)
        return self._admitted() if status == 0 else None

    def plug(self, node: int, *, plugged: bool) -> None:
        """Stop a class, or let it go on."""
        raise_for_status(lib.bl_queue_plug(self.handle, node, plugged), "plugging a class")

    def poll(self, now_ns: int) -> Admission | None:
        """Who may start now; if nobody may, :attr:`wait_ns` says when to ask again."""
        status = lib.bl_queue_poll(self.handle, now_ns, self._admission, self._wait)
        self.wait_ns = int(self._wait[0])
        return self._admitted() if status == 0 else None

    def rest(self) -> None:
        """Its engine is busy: what waits here holds nobody back."""
        lib.bl_queue_rest(self.handle)

    def complete(self, handle: int, now_ns: int) -> None:
        """A piece has been copied, or will not be."""
        lib.bl_queue_complete(self.handle, handle, now_ns)

    def stat(self) -> QueueStat:
        """Counters."""
        found = ffi.new("bl_queue_stat *")
        lib.bl_queue_stat_read(self.handle, found)
        return queue_stat(found)

    def _admitted(self) -> Admission:
        found = self._admission
        return Admission(int(found.id), int(found.waiter), int(found.queued_ns))
