# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The link scheduler's parts in isolation, in virtual time, and the previous generation.

The product uses the token bucket and the queues from C (``csrc/iosched/``). Here they are driven
from Python, and all times, in nanoseconds, are arguments.
"""

from __future__ import annotations

import dataclasses

from beluga._ffi import core, ffi, lib
from beluga.errors import TransferError, raise_for_status
from beluga.transfer.link import GOAL_NS, LinkDirection, QueueStat, queue_stat


class Rovers:
    """Generation 1 of Seastar's throttle: head and tail rovers over a capacity of (weight, size).

    The copies in flight never exceed the capacity in either, and tickets are served in order.
    """

    def __init__(self, weight: int, size: int) -> None:
        self._head, self._tail = (weight, size), (0, 0)

    def grab(self, weight: int, size: int) -> tuple[int, int]:
        """Return a ticket, which may start once it is :meth:`ready` and is completed later."""
        self._tail = self._tail[0] + weight, self._tail[1] + size
        return self._tail

    def ready(self, ticket: tuple[int, int]) -> bool:
        """Return whether a ticket may start."""
        return ticket[0] <= self._head[0] and ticket[1] <= self._head[1]

    def complete(self, weight: int, size: int) -> None:
        """Complete as much as this."""
        self._head = self._head[0] + weight, self._head[1] + size


class TokenBucket:
    """Generation 2: a token bucket that time fills; if capped, completed work returns tokens.

    ``rate`` is in tokens per second. ``limit`` and ``threshold`` are tokens: the maximum that may
    be unused (and, if capped, in use), and the minimum that is replenished. Raises OSError (EINVAL)
    for a rate of 0, or one that would overflow in an hour, and for a limit of 0.
    """

    def __init__(
        self, rate: int, limit: int, *, threshold: int = 1, capped: bool = False, now_ns: int
    ) -> None:
        self.handle = ffi.new("bl_tokens *")
        status = lib.bl_tokens_init(self.handle, rate, limit, threshold, capped, now_ns)
        raise_for_status(status, "making a token bucket")

    def grab(self, tokens: int) -> int:
        """Return a ticket: the tokens may be used once :meth:`lacks` returns 0 for it."""
        return int(lib.bl_tokens_grab(self.handle, tokens))

    def lacks(self, ticket: int) -> int:
        """Return the tokens that are still missing before the ticket may be used."""
        return int(lib.bl_tokens_lacks(self.handle, ticket))

    def replenish(self, now_ns: int) -> None:
        """Add the tokens of the time since the last call."""
        lib.bl_tokens_replenish(self.handle, now_ns)

    def refund(self, tokens: int) -> None:
        """Return unused tokens to the bucket."""
        lib.bl_tokens_refund(self.handle, tokens)

    def release(self, tokens: int) -> None:
        """Complete as much work as this, if the bucket is capped."""
        lib.bl_tokens_release(self.handle, tokens)

    def duration_ns(self, tokens: int) -> int:
        """Return how long the bucket takes to fill with these tokens."""
        return int(lib.bl_tokens_duration_ns(self.handle, tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """A piece that may start: its id, its handle for :meth:`Queue.complete`, when it was pushed."""

    id: int
    handle: int
    queued_ns: int


class Queue:
    """The pieces of one engine that wait for a direction of a link. It is used by one thread."""

    def __init__(self, direction: LinkDirection, *, now_ns: int, goal_ns: int = GOAL_NS) -> None:
        handle = ffi.new("bl_queue **")
        raise_for_status(
            lib.bl_queue_create(handle, direction.handle, goal_ns, now_ns), "making a queue"
        )
        self.direction, self.wait_ns = direction, 0
        self._handle: core.bl_queue | core.Null = handle[0]
        self._admission, self._wait = ffi.new("bl_admission *"), ffi.new("uint64_t *")
        self._devices: list[TokenBucket] = []

    def close(self) -> None:
        """Release the queue's tokens and its pieces. A second call does nothing."""
        lib.bl_queue_destroy(self._handle)
        self._handle = ffi.NULL

    @property
    def handle(self) -> core.bl_queue:
        """The ``bl_queue *``. Raises TransferError once this is closed."""
        if not self._handle:
            raise TransferError("the queue is closed")
        return self._handle

    def add_device(self, device: TokenBucket) -> None:
        """Add a memory device behind the link, whose tokens pieces also use."""
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
        """Append a piece of ``size`` bytes to its class; return its handle."""
        if device_tokens is not None and len(device_tokens) != len(self._devices):
            raise ValueError(
                f"expected the tokens of {len(self._devices)} devices, not {len(device_tokens)}"
            )
        own = ffi.NULL if device_tokens is None else device_tokens
        status = lib.bl_queue_push(self.handle, node, tokens, size, own, piece, now_ns)
        return raise_for_status(status, "queueing a piece")

    def cancel(self, handle: int) -> bool:
        """Cancel a piece, which then costs nothing; return False if it has been admitted."""
        return int(lib.bl_queue_cancel(self.handle, handle)) == 0

    def pop(self, *, now_ns: int = 0) -> Admission | None:
        """Return the next piece by fairness alone."""
        status = lib.bl_queue_pop(self.handle, now_ns, self._admission)
        return self._admitted() if status == 0 else None

    def plug(self, node: int, *, plugged: bool) -> None:
        """Stop a class, or resume it."""
        raise_for_status(lib.bl_queue_plug(self.handle, node, plugged), "plugging a class")

    def poll(self, now_ns: int) -> Admission | None:
        """Return the piece that may start now; if it is None, :attr:`wait_ns` is when to call
        again.
        """
        status = lib.bl_queue_poll(self.handle, now_ns, self._admission, self._wait)
        self.wait_ns = int(self._wait[0])
        return self._admitted() if status == 0 else None

    def rest(self) -> None:
        """Report that the engine is busy: its waiting pieces then do not delay other engines."""
        lib.bl_queue_rest(self.handle)

    def complete(self, handle: int, now_ns: int) -> None:
        """Complete a piece: it has been copied, or will not be."""
        lib.bl_queue_complete(self.handle, handle, now_ns)

    def stat(self) -> QueueStat:
        """Return the counters."""
        stat = ffi.new("bl_queue_stat *")
        lib.bl_queue_stat_read(self.handle, stat)
        return queue_stat(stat)

    def _admitted(self) -> Admission:
        admission = self._admission
        return Admission(int(admission.id), int(admission.waiter), int(admission.queued_ns))
