# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Queues of blocks to load into the device: onboards, which have a waiting request, and prefetches.

An onboard holds no block while it waits for room, so no two of them can deadlock. Once it has room,
it holds strong references to all its blocks: those that the device has, and the targets of the
copies. Cancelling its future releases both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from beluga.kvbm.handles import MutableBlock, RegisteredBlock
from beluga.kvbm.offload import BATCH
from beluga.kvbm.state import Key

ChainPart = list[tuple[Key, "Key | None"]]
"""Keys of a chain in order, each with its parent."""


@dataclass(slots=True, eq=False)
class OnboardCall:
    """One call of ``onboard``. Once there is room, ``present`` has the device's block for each key,
    or None, and ``room`` has a block for each None. ``until`` is the deadline for room
    (time.monotonic()).
    """

    keys: Sequence[Key]
    request: Hashable | None
    until: float
    present: list[RegisteredBlock | None] = field(default_factory=list)
    future: Future[list[RegisteredBlock]] = field(default_factory=Future)
    reservation: Future[list[MutableBlock]] | None = None
    room: list[MutableBlock] = field(default_factory=list)
    is_released: bool = False
    _begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Return True once, if the future was not cancelled; the caller then resolves it."""
        with self._lock:
            first, self._begun = not self._begun, True
        return first and self.future.set_running_or_notify_cancel()

    def let_go(self) -> list[MutableBlock | RegisteredBlock]:
        """Drop all handles, and return them for their release."""
        held = [*self.room, *held_of(self.present)]
        self.room, self.present = [], []
        return held


class OnboardQueue:
    """Onboards that have room in the device, first in, first out; and chains to prefetch.

    The queue holds at most ``prefetch_max`` keys to prefetch, and drops the oldest beyond that.
    """

    def __init__(self, prefetch_max: int) -> None:
        self._lock = threading.Lock()
        self._ready: deque[OnboardCall] = deque()
        self._prefetch: deque[ChainPart] = deque()
        self._prefetch_max = prefetch_max

    def put(self, wanted: OnboardCall) -> None:
        """Append an onboard that has room."""
        with self._lock:
            self._ready.append(wanted)

    def take(self) -> OnboardCall | None:
        """Remove and return the first onboard that was not cancelled. Its future is then
        running.
        """
        while True:
            with self._lock:
                if not self._ready:
                    return None
                wanted = self._ready.popleft()
            if wanted.begin():
                return wanted

    def prefetch(self, chain: ChainPart) -> int:
        """Append a chain to prefetch, and return how many keys were dropped."""
        with self._lock:
            parts = (chain[first : first + BATCH] for first in range(0, len(chain), BATCH))
            self._prefetch.extend(parts)
            count, forgotten = sum(map(len, self._prefetch)), 0
            while count - forgotten > self._prefetch_max:
                forgotten += len(self._prefetch.popleft())
            return forgotten

    def take_prefetch(self) -> ChainPart | None:
        """Remove and return up to a batch of keys of one chain."""
        with self._lock:
            return self._prefetch.popleft() if self._prefetch else None

    @property
    def has_work(self) -> bool:
        """Whether the queue has any work."""
        return bool(self._ready or self._prefetch)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._ready.clear()
            self._prefetch.clear()


def held_of(blocks: Sequence[RegisteredBlock | None]) -> list[MutableBlock | RegisteredBlock]:
    """Return the blocks that are not None."""
    return [block for block in blocks if block is not None]
