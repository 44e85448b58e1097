# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One direction of a link, which the host's processes share (``csrc/iosched/link.c``)."""

from __future__ import annotations

import dataclasses

from beluga._ffi import core, ffi, lib
from beluga.errors import raise_for_status

TAU_NS = 5_000_000  # Seastar's: the longest time that a waking class has the link alone
GOAL_NS = 750_000  # Seastar's latency goal; the flow ratio is updated every 100 goals
BURST = 10 << 20  # Seastar's: bytes that a class with a limited bandwidth may be ahead of it


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStat:
    """The fields of ``bl_queue_stat`` in ``csrc/api/iosched.h``."""

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
    """Convert the C struct."""
    return QueueStat(*(getattr(stat, field.name) for field in dataclasses.fields(QueueStat)))


class LinkDirection:
    """One direction of a link: a bucket of picoseconds, a tree of classes, and a member for each
    engine.

    The direction lies in ``memory`` (of a :class:`~beluga.transfer.Link`), or in its own memory.
    ``limit`` is the capacity of its bucket, and ``forgiving`` is the head start of a waking class,
    times its shares; both are picoseconds. If the bucket is capped, ``limit`` also bounds the work
    in flight.
    """

    def __init__(
        self,
        memory: core.bl_direction | None = None,
        *,
        limit: int,
        forgiving: int = TAU_NS * 1000,
        capped: bool = False,
        now_ns: int,
    ) -> None:
        self.handle = ffi.new("bl_direction *") if memory is None else memory
        status = lib.bl_direction_init(self.handle, limit, forgiving, capped, now_ns)
        raise_for_status(status, "making a link")

    @classmethod
    def at(cls, memory: core.bl_direction) -> LinkDirection:
        """Return the existing direction in this memory."""
        direction = object.__new__(cls)
        direction.handle = memory
        return direction

    def add(self, shares: int, *, parent: int = 0) -> int:
        """Add a class, which becomes a group once it is another's ``parent``. Return its number."""
        return raise_for_status(lib.bl_direction_add(self.handle, parent, shares), "adding a class")

    def set_shares(self, node: int, shares: int) -> None:
        """Change a class's shares from the next piece on."""
        raise_for_status(lib.bl_direction_set_shares(self.handle, node, shares), "setting shares")

    def limit(
        self, node: int, bytes_per_s: int, *, burst: int = BURST, now_ns: int | None = None
    ) -> None:
        """Limit the bandwidth of a class or group; 0 lifts the limit."""
        now = lib.bl_io_queue_now_ns() if now_ns is None else now_ns
        raise_for_status(
            lib.bl_direction_limit(self.handle, node, bytes_per_s, burst, now), "limiting a class"
        )

    def reap(self, now_ns: int) -> int:
        """Release the tokens of dead processes. Return the number of their members."""
        return int(lib.bl_direction_reap(self.handle, now_ns))

    def bytes_of(self, node: int) -> int:
        """Return the bytes that were admitted so far."""
        return int(self.handle.nodes[node].bytes)
