# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The two generations of throttler alone (``csrc/iosched/throttle.c``); time is passed in."""

from __future__ import annotations

from beluga._ffi import ffi, lib
from beluga.errors import raise_for_status


class Rovers:
    """Generation 1: head and tail rovers over a capacity of (weight, size).

    What is in flight never exceeds the capacity in either, and tickets are served in order.
    """

    def __init__(self, weight: int, size: int) -> None:
        self._rovers = ffi.new("bl_rovers *")
        lib.bl_rovers_init(self._rovers, weight, size)

    def grab(self, weight: int, size: int) -> int:
        """A ticket, which may go once it is :meth:`ready` and is then to be completed."""
        return int(lib.bl_rovers_grab(self._rovers, weight, size))

    def ready(self, ticket: int) -> bool:
        """May it go?"""
        return bool(lib.bl_rovers_ready(self._rovers, ticket))

    def complete(self, weight: int, size: int) -> None:
        """As much as this ended."""
        lib.bl_rovers_complete(self._rovers, weight, size)


class TokenBucket:
    """Generation 2: a token bucket that time fills; capped, completed work makes room in it.

    ``rate`` is in tokens per second, ``limit`` and ``threshold`` are tokens: how many may lie
    unused (and capped be in use), and how few are not worth replenishing. Raises OSError (EINVAL)
    for a rate of 0, or one that would overflow in an hour, and for a limit of 0.
    """

    def __init__(
        self, rate: int, limit: int, *, threshold: int = 1, capped: bool = False, now_ns: int
    ) -> None:
        self.handle = ffi.new("bl_tokens *")
        status = lib.bl_tokens_init(self.handle, rate, limit, threshold, capped, now_ns)
        raise_for_status(status, "making a token bucket")

    def grab(self, tokens: int) -> int:
        """A ticket: the tokens may be used once :meth:`lacks` says 0 of it."""
        return int(lib.bl_tokens_grab(self.handle, tokens))

    def lacks(self, ticket: int) -> int:
        """Tokens that are still to come before the ticket may be used."""
        return int(lib.bl_tokens_lacks(self.handle, ticket))

    def replenish(self, now_ns: int) -> None:
        """Fill in what time has given since the last time."""
        lib.bl_tokens_replenish(self.handle, now_ns)

    def refund(self, tokens: int) -> None:
        """Give back tokens that were not used."""
        lib.bl_tokens_refund(self.handle, tokens)

    def release(self, tokens: int) -> None:
        """Capped: as much work as this completed."""
        lib.bl_tokens_release(self.handle, tokens)

    def duration_ns(self, tokens: int) -> int:
        """How long the bucket takes to give so many."""
        return int(lib.bl_tokens_duration_ns(self.handle, tokens))
