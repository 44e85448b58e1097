# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks of a device: allocation, lookup by key, and eviction."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from beluga.errors import TierError
from beluga.kvbm.deadlines import DEADLINES
from beluga.kvbm.exclusive import Exclusive
from beluga.kvbm.ghosts import Ghosts
from beluga.kvbm.handles import MutableBlock, RegisteredBlock, StrongReference, WeakBlock
from beluga.kvbm.heat import Heat
from beluga.kvbm.inactive import Inactive
from beluga.kvbm.metrics import PREFETCH_ABOVE, MissedTarget, PoolMetrics, Targets
from beluga.kvbm.reservations import Reservation, Reservations
from beluga.kvbm.state import Block, BlockPhase, Key

if TYPE_CHECKING:
    from beluga.metrics import Registry

WATERMARK = 0.85
"""The default share of blocks with content above which blocks are offloaded."""
WAIT_S = 60.0
"""The default timeout of a reservation. Requests may wait for each other's blocks."""
WAITING_MAX = 1024
"""Reservations that may wait for one pool."""


class BlockPool:
    """The blocks of a device, numbered as in its memory.

    A block is free, active (it has strong handles), or inactive (registered, without strong
    handles). ``reserve`` takes free blocks in the order in which they became free, then evicts
    inactive ones, leaves first. Any thread may call any method::

        pool = BlockPool("device", 1024, block_size=16)
        (block,) = pool.reserve("request-1", 1).result()
        block.fill(16)
        block.commit(key)
        (found,) = pool.register([block])
        pool.release("request-1")
        assert pool.match([key])[0].key == key

    ``block_size`` counts tokens. ``watermark`` is the share of blocks with content above which
    :attr:`offload_due` is true. The pool remembers the keys of ``ghosts`` evicted blocks (default:
    ``total_blocks``). ``half_life_s`` is the half-life of the heat.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first two
        self,
        name: str,
        total_blocks: int,
        *,
        block_size: int = 16,
        watermark: float = WATERMARK,
        ghosts: int | None = None,
        half_life_s: float = 60.0,
        registry: Registry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total_blocks < 1 or block_size < 1 or not 0 < watermark <= 1:
            raise TierError(
                f"tier {name} has {total_blocks} blocks of {block_size} tokens and a watermark of "
                f"{watermark}; give at least one block and one token, and a watermark between 0 "
                "and 1"
            )
        self.name, self.total_blocks, self.block_size = name, total_blocks, block_size
        self.watermark = watermark
        self.on_registered: Callable[[list[RegisteredBlock]], None] | None = None
        """Called without the lock, after blocks were registered that the lower tier may not have.
        """
        self._exclusive = Exclusive()
        self._free = deque(Block(index) for index in range(total_blocks))
        self._inactive = Inactive()
        self._registered: dict[Key, Block] = {}
        self._claims: dict[Hashable, dict[StrongReference, None]] = {}
        self._waiting = Reservations()
        self._ghosts = Ghosts(total_blocks if ghosts is None else ghosts)
        self._heat = Heat(2 * total_blocks, half_life_s=half_life_s, clock=clock)
        self._metrics = PoolMetrics(name, self, registry)
        self._closed = False

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or inactive."""
        return len(self._free) + len(self._inactive)

    @property
    def inflight_blocks(self) -> int:
        """Blocks in use."""
        return self.total_blocks - self.available_blocks

    def keep_unsaved(self, keep: bool) -> None:
        """Set whether a block may be evicted only after :meth:`mark_saved`."""
        with self._exclusive:
            self._inactive.keep_unsaved(keep)
            self._grant()

    @property
    def usage(self) -> float:
        """The share of blocks that are in use or have content."""
        return 1 - len(self._free) / self.total_blocks

    @property
    def offload_due(self) -> bool:
        """Whether the usage is above the watermark."""
        return self.usage > self.watermark

    def missed_targets(self, targets: Targets | None = None) -> list[MissedTarget]:
        """Return the missed targets (default: those of :class:`Targets`)."""
        return self._metrics.missed(self, targets or Targets())

    def reserve(
        self, request: Hashable, count: int, *, timeout_s: float | None = None
    ) -> Future[list[MutableBlock]]:
        """Reserve ``count`` blocks for a request: all or none, in the order of the calls.

        The future resolves as soon as there is room, on the thread that frees it. It can be
        cancelled at any moment. After ``timeout_s`` (default: :data:`WAIT_S`) it fails with
        TierError. If the result is dropped, the blocks become free again. Raises TierError for more
        blocks than the tier has.
        """
        if not 0 <= count <= self.total_blocks:
            raise TierError(
                f"tier {self.name} has {self.total_blocks} blocks, but {count} were requested"
            )
        reservation = Reservation(request, count)
        future = reservation.future
        with self._exclusive:
            if self._closed or len(self._waiting) >= WAITING_MAX:
                raise TierError(
                    f"tier {self.name} is closed"
                    if self._closed
                    else f"{WAITING_MAX} reservations wait for tier {self.name} already; try later"
                )
            self._waiting.add(reservation)
            self._grant()
            waits = not reservation.ended
        if waits:
            future.add_done_callback(self._ended)
            # Weak, because the result, which holds handles, may be dropped earlier.
            seen = weakref.ref(reservation)
            wait_s = WAIT_S if timeout_s is None else timeout_s
            DEADLINES.after(wait_s, functools.partial(self._expire, seen))
        return future

    def try_reserve(self, request: Hashable, count: int) -> list[MutableBlock] | None:
        """Reserve blocks if they are available at once and no reservation waits; else return
        None.
        """
        with self._exclusive:
            if self._closed or len(self._waiting) or not self._has_room(count):
                return None
            return self._take(request, count)

    def register(
        self, blocks: Sequence[MutableBlock], *, is_saved: bool = False
    ) -> list[RegisteredBlock]:
        """Register complete blocks, and return a handle for each key. The mutable handles end.

        If a key is already registered, the new block is reset and the existing one is returned.
        ``is_saved`` marks blocks that were loaded from the lower tier. Raises TierError, without
        any change, if a block is not complete.
        """
        with self._exclusive:
            claims = [self._own(block) for block in blocks]
            if len({*claims}) < len(claims):
                raise TierError("a block is registered twice in one call")
            for block in blocks:
                block.claim.held().refuse_registration()
            handles, new = [], []
            for claim in claims:
                handle, is_new = self._register(claim)
                handles.append(handle)
                if is_new:
                    new.append(handle)
            if is_saved:
                self._mark_saved(block.key for block in handles)
            self._grant()
        if new and not is_saved and self.on_registered is not None:
            self.on_registered(new)
        return handles

    def match(self, keys: Sequence[Key], request: Hashable | None = None) -> list[RegisteredBlock]:
        """Return the blocks of the leading keys, up to the first that is missing.

        They are active until they are released, or until ``request`` is.
        """
        with self._exclusive:
            self._metrics.heat.observe_all(self._heat.touch(keys), tier=self.name)
            found = []
            for key in keys:
                block = self._registered.get(key)
                if block is None:
                    if key in self._ghosts:
                        self._metrics.ghost_hits.add(tier=self.name)
                    break
                found.append(self._share(block, request))
            self._metrics.hits.add(len(found), tier=self.name)
            return found

    def release(self, request: Hashable) -> int:
        """Release all blocks of a request, and fail its reservations. Returns how many handles
        ended. The last block of a chain is released first, so that it is evicted first.
        """
        start = time.perf_counter()
        with self._exclusive:
            for one in self._waiting.of(request):
                if self._waiting.remove(one):
                    self._answer(one, TierError(f"request {request!r} was released"))
            claims = list(self._claims.get(request, ()))
            for claim in reversed(claims):
                self._drop(claim)
            self._grant()
        self._metrics.release.observe(time.perf_counter() - start, tier=self.name)
        return len(claims)

    def drop_all(self, blocks: Sequence[MutableBlock | RegisteredBlock]) -> None:
        """Release handles, last to first."""
        with self._exclusive:
            for block in reversed(blocks):
                self._drop(block.claim)
            self._grant()

    def contains(self, keys: Iterable[Key]) -> list[bool]:
        """Return which keys are registered, without touching them."""
        with self._exclusive:
            return [key in self._registered for key in keys]

    def mark_saved(self, keys: Iterable[Key]) -> None:
        """Mark blocks as stored in the lower tier, so that they may be evicted."""
        with self._exclusive:
            self._mark_saved(keys)
            self._grant()

    def coldest(self, count: int) -> list[WeakBlock]:
        """Return the least recently returned inactive blocks that the lower tier does not have."""
        with self._exclusive:
            return [WeakBlock(self, block.key) for block in self._inactive.coldest(count)]

    def hot_and_missing(self, keys: Iterable[Key]) -> list[Key]:
        """Return the keys that are hot and missing."""
        with self._exclusive:
            absent = (key for key in keys if key not in self._registered)
            return [key for key in absent if self._heat.of(key) > PREFETCH_ABOVE]

    def close(self) -> None:
        """Fail waiting reservations and refuse new ones. Handles may still be released.
        Idempotent.
        """
        with self._exclusive:
            self._closed = True
            for one in self._waiting.clear():
                self._answer(one, TierError(f"tier {self.name} was closed"))
        self._metrics.close()

    def fill(self, claim: StrongReference, tokens: int) -> None:
        """See :meth:`MutableBlock.fill`."""
        with self._exclusive:
            claim.held().fill(tokens, self.block_size)

    def commit(self, claim: StrongReference, key: Key, parent: Key | None) -> None:
        """See :meth:`MutableBlock.commit`."""
        with self._exclusive:
            claim.held().commit(key, parent, self.block_size)

    def drop(self, claim: StrongReference) -> None:
        """Release a reference, now or as soon as the lock is free. Never blocks."""
        self._exclusive.later(functools.partial(self._drop_and_grant, claim))

    def find(
        self, key: Key, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """See :meth:`WeakBlock.upgrade`."""
        with self._exclusive:
            block = self._registered.get(key)
            return None if block is None else self._share(block, request, is_use=is_use)

    def _expire(self, seen: weakref.ref[Reservation]) -> None:
        reservation = seen()
        if reservation is None:
            return
        with self._exclusive:
            if self._waiting.remove(reservation):
                waited = time.perf_counter() - reservation.since_s
                error = TierError(
                    f"tier {self.name} could not free {reservation.count} blocks within "
                    f"{waited:.3g} s"
                )
                self._answer(reservation, error)
            self._grant()

    def _ended(self, future: Future[list[MutableBlock]]) -> None:
        if future.cancelled():
            self._exclusive.later(self._forget_cancelled)

    # Everything below is called with the lock held.

    def _own(self, block: MutableBlock) -> StrongReference:
        if block.owner is not self:
            raise TierError("a block of another tier cannot be registered here")
        block.claim.held()
        return block.claim

    def _claim(self, block: Block, request: Hashable | None) -> StrongReference:
        claim = StrongReference(block, request)
        block.references += 1
        if request is not None:
            self._claims.setdefault(request, {})[claim] = None
        return claim

    def _end(self, claim: StrongReference) -> Block | None:
        """End a reference and return its block, or None if it had already ended."""
        block, claim.block = claim.block, None
        if block is None:
            return None
        block.references -= 1
        if claim.request is not None:
            claims = self._claims[claim.request]
            del claims[claim]
            if not claims:
                del self._claims[claim.request]
        return block

    def _drop(self, claim: StrongReference) -> None:
        block = self._end(claim)
        if block is None or block.references:
            return
        if block.state is BlockPhase.REGISTERED:
            self._inactive.add(block)
        else:
            self._set_free(block)

    def _drop_and_grant(self, claim: StrongReference) -> None:
        self._drop(claim)
        self._grant()

    def _set_free(self, block: Block) -> None:
        block.reset()
        self._free.append(block)

    def _share(
        self, block: Block, request: Hashable | None, *, is_use: bool = True
    ) -> RegisteredBlock:
        if not block.references:
            self._inactive.remove(block)
        if is_use:
            block.tick = 0
        return RegisteredBlock(self, self._claim(block, request), block)

    def _register(self, claim: StrongReference) -> tuple[RegisteredBlock, bool]:
        block = claim.held()
        known = self._registered.get(block.key)
        if known is not None:
            handle = self._share(known, claim.request)
            self._drop(claim)
            self._metrics.duplicates.add(tier=self.name)
            return handle, False
        block.register()
        self._registered[block.key] = block
        self._ghosts.remove(block.key)
        shared = self._claim(block, claim.request)
        self._end(claim)
        return RegisteredBlock(self, shared, block), True

    def _mark_saved(self, keys: Iterable[Key]) -> None:
        for key in keys:
            block = self._registered.get(key)
            if block is not None:
                block.saved = True
                if block in self._inactive:
                    self._inactive.offer(block)

    def _has_room(self, count: int) -> bool:
        """Free ``count`` blocks by eviction, if possible. Returns whether there are as many."""
        free = self._free
        if len(free) + len(self._inactive) < count:
            return False
        missing = count - len(free)
        while len(free) < count:
            victim = self._inactive.evict()
            if victim is None:
                break
            del self._registered[victim.key]
            self._ghosts.add(victim.key)
            self._set_free(victim)
        left = max(count - len(free), 0)
        if missing > left:
            self._metrics.evictions.add(missing - left, tier=self.name)
        return not left

    def _take(self, request: Hashable, count: int) -> list[MutableBlock]:
        blocks = [self._free.popleft() for _ in range(count)]
        return [MutableBlock(self, self._claim(block, request)) for block in blocks]

    def _grant(self) -> None:
        while (granted := self._waiting.grant(self._has_room)) is not None:
            blocks = self._take(granted.request, granted.count)
            self._metrics.allocation.observe(time.perf_counter() - granted.since_s, tier=self.name)
            self._answer(granted, blocks)

    def _answer(self, reservation: Reservation, result: list[MutableBlock] | TierError) -> None:
        """Resolve a future after the lock is released."""
        future = reservation.future
        resolve = (
            functools.partial(future.set_exception, result)
            if isinstance(result, TierError)
            else functools.partial(future.set_result, result)
        )
        self._exclusive.answers.append(resolve)

    def _forget_cancelled(self) -> None:
        for one in self._waiting.cancelled():
            self._waiting.remove(one)
        self._grant()
