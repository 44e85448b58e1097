# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks that are wanted in a tier: onboards, which somebody waits for, and prefetches.

An onboard waits for room in the target and holds no block meanwhile, so no two of them can wait for
each other. Once it has room, it holds strong references of all that it needs: the blocks in the
tiers where they are, and the blocks in the target that they are copied to. Cancelling its future
lets go of both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from beluga.tiers.blocks.handles import MutableBlock, RegisteredBlock
from beluga.tiers.blocks.offload import BATCH
from beluga.tiers.blocks.state import Key


@dataclass(slots=True)
class OnboardSource:
    """Where a wanted block is: the number of its tier, and a strong handle of it there.

    Without a handle it is in a tier below, if it is anywhere.
    """

    tier: int
    block: RegisteredBlock | None = None

    def is_elsewhere(self, target: int) -> bool:
        """Whether the block must be copied to this tier."""
        return self.block is None or self.tier != target

    def held(self) -> tuple[int, RegisteredBlock] | None:
        """Return the tier and the handle, if there is one."""
        return None if self.block is None else (self.tier, self.block)


@dataclass(slots=True, eq=False)
class OnboardCall:
    """One call of ``onboard``. Once there is room, ``sources`` has an entry for each key, and
    ``room`` a block for each that is not in the target yet. It waits for room until ``until``, a
    time.monotonic().
    """

    keys: Sequence[Key]
    target: int
    request: Hashable | None
    until: float
    sources: list[OnboardSource] = field(default_factory=list)
    future: Future[list[RegisteredBlock]] = field(default_factory=Future)
    reservation: Future[list[MutableBlock]] | None = None
    room: list[MutableBlock] = field(default_factory=list)
    is_released: bool = False
    _begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Return True once, if the future was not cancelled: the caller resolves it."""
        with self._lock:
            first, self._begun = not self._begun, True
        return first and self.future.set_running_or_notify_cancel()

    def let_go(self) -> list[MutableBlock | RegisteredBlock]:
        """Give up all handles, and return them for release."""
        held: list[MutableBlock | RegisteredBlock] = [*self.room]
        held += [source.block for source in self.sources if source.block is not None]
        self.room, self.sources = [], []
        return held


class OnboardQueue:
    """Onboards that have their blocks in the target, first in, first out; and keys to prefetch.

    The queue holds at most ``prefetch_max`` keys to prefetch, and forgets the oldest beyond that.
    """

    def __init__(self, prefetch_max: int) -> None:
        self._lock = threading.Lock()
        self._ready: deque[OnboardCall] = deque()
        self._prefetch: OrderedDict[tuple[int, Key], Key | None] = OrderedDict()
        self._prefetch_max = prefetch_max

    def put(self, wanted: OnboardCall) -> None:
        """Enter an onboard that has all it needs."""
        with self._lock:
            self._ready.append(wanted)

    def take(self) -> OnboardCall | None:
        """Take the first onboard out that was not cancelled; its future is running then."""
        while True:
            with self._lock:
                if not self._ready:
                    return None
                wanted = self._ready.popleft()
            if wanted.begin():
                return wanted

    def prefetch(self, target: int, keys: Sequence[Key], parents: Sequence[Key | None]) -> int:
        """Enter keys to prefetch, and return how many were forgotten."""
        with self._lock:
            for key, parent in zip(keys, parents, strict=True):
                self._prefetch.setdefault((target, key), parent)
            over = max(len(self._prefetch) - self._prefetch_max, 0)
            for _ in range(over):
                self._prefetch.popitem(last=False)
            return over

    def take_prefetch(self) -> tuple[int, list[tuple[Key, Key | None]]] | None:
        """Take out up to a batch of keys for one target, each with its parent."""
        with self._lock:
            if not self._prefetch:
                return None
            target = next(iter(self._prefetch))[0]
            chosen = [place for place in self._prefetch if place[0] == target][:BATCH]
            return target, [(place[1], self._prefetch.pop(place)) for place in chosen]

    @property
    def has_work(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._ready or self._prefetch)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._ready.clear()
            self._prefetch.clear()
