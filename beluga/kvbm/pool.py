# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks of a device: their states, allocation, lookup by key, and eviction.

::

    RESET --fill--> PARTIAL --commit--> COMPLETE --register--> REGISTERED
      ^                |                    |                      |
      +----------------+------- reset ------+----------------------+

A reset block has no content. A partial block has some or all of its tokens, but no key. A complete
block has all tokens and a key. A registered block can be found by its key, and its content never
changes.

A strong handle keeps its block active, a weak one does not. A strong handle is released by its
``release``, at the end of its ``with``, by garbage collection, or by :meth:`BlockPool.release` of
its request, whichever comes first. A released handle raises TierError when it is used.
"""

from __future__ import annotations

import enum
import functools
import heapq
import itertools
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from beluga._shared import when_forked
from beluga.errors import TierError
from beluga.kvbm.metrics import PREFETCH_ABOVE, MissedTarget, PoolMetrics, Targets
from beluga.threads import Thread

if TYPE_CHECKING:
    from beluga.metrics import Registry

Key: TypeAlias = Hashable
"""Identifies a block's content. A :class:`~beluga.kvbm.CacheTier` requires digests in bytes."""

WATERMARK = 0.85
"""The default share of blocks with content above which blocks are offloaded."""
WAIT_S = 60.0
"""The default timeout of a reservation. Requests may wait for each other's blocks."""
WAITING_MAX = 1024
"""Reservations that may wait for one pool."""

_STALE_LEAVES = 64  # stale entries of the heap that do not cause a sweep

_Handle = TypeVar("_Handle", bound="_StrongHandle")
_Work: TypeAlias = Callable[[], None]


class BlockPhase(enum.Enum):
    """The state of a block of a :class:`BlockPool`."""

    RESET = "reset"
    PARTIAL = "partial"
    COMPLETE = "complete"
    REGISTERED = "registered"


class Block:
    """One block of a pool: its index and its content. Guarded by the pool's lock.

    ``tick`` is the time of the last return, or 0 if there was a use since. The lower tier has a
    ``saved`` block as well.
    """

    __slots__ = ("filled", "index", "key", "parent", "references", "saved", "state", "tick")

    def __init__(self, index: int) -> None:
        self.index = index
        self.references = 0
        self.reset()

    def reset(self) -> None:
        """Drop the content. Allowed in every state."""
        self.state = BlockPhase.RESET
        self.filled = 0
        self.key: Key | None = None
        self.parent: Key | None = None
        self.tick = 0
        self.saved = False

    def require(self, action: str, *states: BlockPhase) -> None:
        """Raise TierError unless the block is in one of the states that allow an action."""
        if self.state not in states:
            raise TierError(f"block {self.index} is {self.state.value} and cannot {action}")


class BlockClaim:
    """The reference of one strong handle, which outlives it. ``block`` is None after the
    release.
    """

    __slots__ = ("block", "request")

    def __init__(self, block: Block, request: Hashable | None) -> None:
        self.block: Block | None = block
        self.request = request

    def held(self) -> Block:
        """Return the block. Raises TierError after the release."""
        if self.block is None:
            raise TierError("this handle was released; reserve or match the block again")
        return self.block


class _StrongHandle:
    __slots__ = ("__weakref__", "claim", "pool")

    def __init__(self, pool: BlockPool, claim: BlockClaim) -> None:
        self.pool, self.claim = pool, claim

    @property
    def index(self) -> int:
        """The index of the block in device memory."""
        return self.claim.held().index

    def release(self) -> None:
        """Release the block. Idempotent."""
        self.pool.drop(self.claim)

    def __enter__(self: _Handle) -> _Handle:
        self.claim.held()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self.claim.block is not None:
            self.pool.drop(self.claim)


class MutableBlock(_StrongHandle):
    """The only handle of a block that is not yet registered."""

    __slots__ = ()

    @property
    def state(self) -> BlockPhase:
        """The state of the block."""
        return self.claim.held().state

    def fill(self, tokens: int) -> None:
        """Count tokens that were written to the block. Raises TierError beyond the block's size."""
        size = self.pool.block_size
        with self.pool.lock:
            block = self.claim.held()
            block.require("be filled", BlockPhase.RESET, BlockPhase.PARTIAL)
            if tokens < 1 or block.filled + tokens > size:
                raise TierError(
                    f"block {block.index} has {block.filled} of {size} tokens and cannot take "
                    f"{tokens} more; reserve another block"
                )
            block.filled += tokens
            block.state = BlockPhase.PARTIAL

    def commit(self, key: Key, *, parent: Key | None = None) -> None:
        """Set the key of a full block. ``parent`` is the key of the previous block in its chain.
        Raises TierError for a block that is not full.
        """
        size = self.pool.block_size
        with self.pool.lock:
            block = self.claim.held()
            block.require("be committed", BlockPhase.PARTIAL)
            if block.filled != size:
                raise TierError(
                    f"block {block.index} has {block.filled} of {size} tokens; fill it before you "
                    "commit it"
                )
            if key is None or key == parent:
                raise TierError(
                    f"block {block.index} has the key {key}; give it a key other than its parent's"
                )
            block.key, block.parent = key, parent
            block.state = BlockPhase.COMPLETE

    def __repr__(self) -> str:
        block = self.claim.block
        return f"<{block.state.value} block {block.index}>" if block else "<released block>"


class RegisteredBlock(_StrongHandle):
    """A strong handle of a registered block, whose content does not change meanwhile."""

    __slots__ = ("key",)

    def __init__(self, pool: BlockPool, claim: BlockClaim, key: Key) -> None:
        self.pool, self.claim, self.key = pool, claim, key

    @property
    def parent(self) -> Key | None:
        """The key of the previous block in its chain."""
        return self.claim.held().parent

    def weak(self) -> WeakBlock:
        """Return a weak reference to the block."""
        return WeakBlock(self.pool, self.key)

    def __repr__(self) -> str:
        block = self.claim.block
        return f"<block {block.index} of {self.key!r}>" if block else "<released block>"


class WeakBlock:
    """A weak reference to a registered block: it does not prevent eviction."""

    __slots__ = ("key", "pool")

    def __init__(self, pool: BlockPool, key: Key) -> None:
        self.pool, self.key = pool, key

    def upgrade(
        self, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """Return a strong handle, or None if the block was evicted.

        Without ``is_use``, the block keeps its position in the order of eviction.
        """
        return self.pool.find(self.key, request, is_use=is_use)


class BlockPool:
    """The blocks of a device, numbered as in its memory.

    A block is free, active (it has strong handles), or inactive (registered, without strong
    handles). ``reserve`` takes free blocks in the order in which they became free, then evicts
    inactive ones, leaves first. Any thread may call any method::

        pool = BlockPool("device", 1024, block_size=16)
        (block,) = pool.reserve("request-1", 1).result()
        block.fill(16)
        block.commit(key)
        (registered,) = pool.register([block])
        pool.release("request-1")
        assert pool.match([key])[0].key == key

    ``block_size`` counts tokens. ``watermark`` is the share of blocks with content above which
    :attr:`offload_due` is true. The pool remembers the keys of ``ghosts`` evicted blocks (default:
    ``total_blocks``): a request for one would have been a hit in a larger pool. ``half_life_s`` is
    the half-life of the heat.
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
        self.lock = PoolLock()
        self._free = deque(Block(index) for index in range(total_blocks))
        self._inactive = _Inactive()
        self._registered: dict[Key, Block] = {}
        self._claims: dict[Hashable, dict[BlockClaim, None]] = {}
        self._waiting: deque[_Reservation] = deque()  # first in, first out
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._ghosts_max = total_blocks if ghosts is None else ghosts
        self._heat = _Heat(2 * total_blocks, half_life_s=half_life_s, clock=clock)
        self._metrics = PoolMetrics(self, registry)
        self._closed = False

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or inactive."""
        return len(self._free) + len(self._inactive)

    @property
    def inflight_blocks(self) -> int:
        """Blocks in use."""
        return self.total_blocks - self.available_blocks

    @property
    def usage(self) -> float:
        """The share of blocks that are in use or have content."""
        return 1 - len(self._free) / self.total_blocks

    @property
    def offload_due(self) -> bool:
        """Whether the usage is above the watermark."""
        return self.usage > self.watermark

    def keep_unsaved(self, keep: bool) -> None:
        """Set whether a block may be evicted only after :meth:`mark_saved`."""
        with self.lock:
            self._inactive.keep_unsaved(keep)
            self._grant()

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
        reservation = _Reservation(request, count)
        future = reservation.future
        with self.lock:
            if self._closed or len(self._waiting) >= WAITING_MAX:
                raise TierError(
                    f"tier {self.name} is closed"
                    if self._closed
                    else f"{WAITING_MAX} reservations wait for tier {self.name} already; try later"
                )
            self._waiting.append(reservation)
            self._grant()
            waits = not reservation.ended
        if waits:
            future.add_done_callback(self._forget_if_cancelled)
            # Weak, because the result, which holds handles, may be dropped earlier.
            seen = weakref.ref(reservation)
            wait_s = WAIT_S if timeout_s is None else timeout_s
            _DEADLINES.after(wait_s, functools.partial(self._expire, seen))
        return future

    def try_reserve(self, request: Hashable, count: int) -> list[MutableBlock] | None:
        """Reserve blocks if they are available at once and no reservation waits; else return
        None.
        """
        with self.lock:
            if self._closed or self._waiting or not self._has_room(count):
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
        with self.lock:
            if any(block.pool is not self for block in blocks):
                raise TierError("a block of another tier cannot be registered here")
            claims = [block.claim for block in blocks]
            for claim in claims:
                claim.held().require("be registered", BlockPhase.COMPLETE)
            if len({*claims}) < len(claims):
                raise TierError("a block is registered twice in one call")
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
        with self.lock:
            self._metrics.heat.observe_all(self._heat.touch(keys), tier=self.name)
            matches = []
            for key in keys:
                block = self._registered.get(key)
                if block is None:
                    if key in self._ghosts:
                        self._metrics.ghost_hits.add(tier=self.name)
                    break
                matches.append(self._share(block, request))
            self._metrics.hits.add(len(matches), tier=self.name)
            return matches

    def release(self, request: Hashable) -> int:
        """Release all blocks of a request, and fail its reservations. Returns how many handles
        ended. The last block of a chain is released first, so that it is evicted first.
        """
        start = time.perf_counter()
        with self.lock:
            waiting = [waits for waits in self._waiting if waits.request == request]
            self._fail(waiting, f"request {request!r} was released")
            claims = list(self._claims.get(request, ()))
            for claim in reversed(claims):
                self._drop(claim)
            self._grant()
        self._metrics.release.observe(time.perf_counter() - start, tier=self.name)
        return len(claims)

    def drop_all(self, blocks: Sequence[MutableBlock | RegisteredBlock]) -> None:
        """Release handles, last to first."""
        with self.lock:
            for block in reversed(blocks):
                self._drop(block.claim)
            self._grant()

    def drop(self, claim: BlockClaim) -> None:
        """Release a handle's claim, now or as soon as the lock is free. Never blocks."""
        self.lock.later(functools.partial(self._drop_and_grant, claim))

    def find(
        self, key: Key, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """See :meth:`WeakBlock.upgrade`."""
        with self.lock:
            block = self._registered.get(key)
            return None if block is None else self._share(block, request, is_use=is_use)

    def contains(self, keys: Iterable[Key]) -> list[bool]:
        """Return which keys are registered, without touching them."""
        with self.lock:
            return [key in self._registered for key in keys]

    def mark_saved(self, keys: Iterable[Key]) -> None:
        """Mark blocks as stored in the lower tier, so that they may be evicted."""
        with self.lock:
            self._mark_saved(keys)
            self._grant()

    def coldest(self, count: int) -> list[WeakBlock]:
        """Return the least recently returned inactive blocks that the lower tier does not have."""
        with self.lock:
            return [WeakBlock(self, block.key) for block in self._inactive.coldest(count)]

    def hot_and_missing(self, keys: Iterable[Key]) -> list[Key]:
        """Return the keys that are hot and missing."""
        with self.lock:
            absent = (key for key in keys if key not in self._registered)
            return [key for key in absent if self._heat.of(key) > PREFETCH_ABOVE]

    def close(self) -> None:
        """Fail waiting reservations and refuse new ones. Handles may still be released.
        Idempotent.
        """
        with self.lock:
            self._closed = True
            self._fail(list(self._waiting), f"tier {self.name} was closed")
        self._metrics.close()

    def _expire(self, seen: weakref.ref[_Reservation]) -> None:
        reservation = seen()
        if reservation is None:
            return
        with self.lock:
            waited = time.perf_counter() - reservation.since_s
            self._fail(
                [reservation],
                f"tier {self.name} could not free {reservation.count} blocks within {waited:.3g} s",
            )
            self._grant()

    def _forget_if_cancelled(self, future: Future[list[MutableBlock]]) -> None:
        if future.cancelled():
            self.lock.later(self._forget_cancelled)

    # Everything below is called with the lock held.

    def _claim(self, block: Block, request: Hashable | None) -> BlockClaim:
        claim = BlockClaim(block, request)
        block.references += 1
        if request is not None:
            self._claims.setdefault(request, {})[claim] = None
        return claim

    def _end(self, claim: BlockClaim) -> Block | None:
        """End a claim and return its block, or None if it had already ended."""
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

    def _drop(self, claim: BlockClaim) -> None:
        block = self._end(claim)
        if block is None or block.references:
            return
        if block.state is BlockPhase.REGISTERED:
            self._inactive.add(block)
        else:
            self._set_free(block)

    def _drop_and_grant(self, claim: BlockClaim) -> None:
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
        return RegisteredBlock(self, self._claim(block, request), block.key)

    def _register(self, claim: BlockClaim) -> tuple[RegisteredBlock, bool]:
        block = claim.held()
        known = self._registered.get(block.key)
        if known is not None:
            handle = self._share(known, claim.request)
            self._drop(claim)
            self._metrics.duplicates.add(tier=self.name)
            return handle, False
        block.state = BlockPhase.REGISTERED
        self._registered[block.key] = block
        self._ghosts.pop(block.key, None)
        shared = self._claim(block, claim.request)
        self._end(claim)
        return RegisteredBlock(self, shared, block.key), True

    def _mark_saved(self, keys: Iterable[Key]) -> None:
        for key in keys:
            block = self._registered.get(key)
            if block is not None:
                block.saved = True
                if block in self._inactive:
                    self._inactive.offer(block)

    def _has_room(self, count: int) -> bool:
        """Free ``count`` blocks by eviction, if possible. Returns whether there are as many."""
        free, evicted = self._free, 0
        if self.available_blocks < count:
            return False
        while len(free) < count and (victim := self._inactive.evict()) is not None:
            del self._registered[victim.key]
            self._ghosts[victim.key] = None
            self._ghosts.move_to_end(victim.key)
            if len(self._ghosts) > self._ghosts_max:
                self._ghosts.popitem(last=False)
            self._set_free(victim)
            evicted += 1
        if evicted:
            self._metrics.evictions.add(evicted, tier=self.name)
        return len(free) >= count

    def _take(self, request: Hashable, count: int) -> list[MutableBlock]:
        blocks = [self._free.popleft() for _ in range(count)]
        return [MutableBlock(self, self._claim(block, request)) for block in blocks]

    def _grant(self) -> None:
        """Grant reservations in their order. A later one never overtakes, even if it needs fewer
        blocks.
        """
        while self._waiting:
            head = self._waiting[0]
            if not (head.future.cancelled() or self._has_room(head.count)):
                return
            if self._end_waiting(head):
                blocks = self._take(head.request, head.count)
                self._metrics.allocation.observe(time.perf_counter() - head.since_s, tier=self.name)
                self.lock.answers.append(functools.partial(head.future.set_result, blocks))

    def _end_waiting(self, reservation: _Reservation) -> bool:
        """Remove a reservation from the queue. Returns True if its future must be resolved now: it
        had not ended and is not cancelled.
        """
        if reservation.ended:
            return False
        reservation.ended = True
        self._waiting.remove(reservation)
        return reservation.future.set_running_or_notify_cancel()

    def _fail(self, reservations: Sequence[_Reservation], reason: str) -> None:
        for reservation in reservations:
            if self._end_waiting(reservation):
                fail = functools.partial(reservation.future.set_exception, TierError(reason))
                self.lock.answers.append(fail)

    def _forget_cancelled(self) -> None:
        for reservation in [waits for waits in self._waiting if waits.future.cancelled()]:
            self._end_waiting(reservation)
        self._grant()


class _Reservation:
    """One call of ``reserve``. It has ended once its future is resolved, failed or cancelled."""

    __slots__ = ("__weakref__", "count", "ended", "future", "request", "since_s")

    def __init__(self, request: Hashable, count: int) -> None:
        self.request, self.count = request, count
        self.future: Future[list[MutableBlock]] = Future()
        self.since_s = time.perf_counter()
        self.ended = False


class _Inactive:
    """The registered but unused blocks, in their order of eviction. Guarded by the pool's lock.

    The next block to evict is the *leaf* with the lowest tick. A leaf has no inactive children, so
    the end of a chain is evicted before its beginning. For example, after chains A-B-C and A-D were
    returned in the order C, B, D, A, the order of eviction is C, B, D, A; had A been returned
    first, it would still be the last.

    The children of a key are counted whether or not a block of that key is inactive, so blocks may
    be returned before or after their parents. A heap holds an entry for each leaf; stale entries
    are dropped when they reach the top.
    """

    def __init__(self) -> None:
        self._keep_unsaved = False
        self._blocks: dict[Key, Block] = {}
        self._children: dict[Key, int] = {}
        self._leaves: list[tuple[int, Block]] = []
        self._tick = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Block) -> bool:
        return self._blocks.get(block.key) is block

    def keep_unsaved(self, keep: bool) -> None:
        """Set whether only blocks that the lower tier has may be evicted."""
        self._keep_unsaved = keep
        for block in self._blocks.values():
            self.offer(block)

    def add(self, block: Block) -> None:
        """Add a block that has just lost its last user. If it was only held and not used, it keeps
        its position in the order.
        """
        if not block.tick:
            self._tick += 1
            block.tick = self._tick
        self._blocks[block.key] = block
        if block.parent is not None:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
        self.offer(block)

    def remove(self, block: Block) -> None:
        """Remove a block that has a user again or is evicted."""
        del self._blocks[block.key]
        parent = block.parent
        if parent is None:
            return
        remaining = self._children[parent] - 1
        if remaining:
            self._children[parent] = remaining
            return
        del self._children[parent]
        above = self._blocks.get(parent)
        if above is not None:
            self.offer(above)

    def offer(self, block: Block) -> None:
        """Add a block to the heap if it is an evictable leaf, for example after it was saved."""
        if self._is_candidate(block):
            if len(self._leaves) > 2 * len(self._blocks) + _STALE_LEAVES:
                self._leaves = [entry for entry in set(self._leaves) if self._is_current(*entry)]
                heapq.heapify(self._leaves)
            heapq.heappush(self._leaves, (block.tick, block))

    def evict(self) -> Block | None:
        """Remove and return the next block to evict, or None if none may be evicted."""
        while self._leaves:
            tick, block = heapq.heappop(self._leaves)
            if self._is_current(tick, block):
                break
        else:
            if not self._blocks or self._keep_unsaved:
                return None
            # Parents that form a cycle have no leaf.
            block = min(self._blocks.values(), key=_tick_of)
        self.remove(block)
        return block

    def coldest(self, count: int) -> list[Block]:
        """Return the blocks with the lowest ticks that the lower tier does not have."""
        unsaved = (block for block in self._blocks.values() if not block.saved)
        return heapq.nsmallest(count, unsaved, key=_tick_of)

    def _is_current(self, tick: int, block: Block) -> bool:
        return block.tick == tick and block in self and self._is_candidate(block)

    def _is_candidate(self, block: Block) -> bool:
        return block.key not in self._children and (block.saved or not self._keep_unsaved)


def _tick_of(block: Block) -> int:
    return block.tick


class _Heat:
    """Touch counts that halve every ``half_life_s`` seconds, for at most ``limit`` keys.

    The heat of a key is count / (count + 1): 0.5 after one touch, 0.75 after three in a short time.
    The least recently touched key is dropped first.
    """

    def __init__(self, limit: int, *, half_life_s: float, clock: Callable[[], float]) -> None:
        self._limit, self._half_life_s, self._clock = limit, half_life_s, clock
        self._touches: OrderedDict[Key, tuple[float, float]] = OrderedDict()

    def touch(self, keys: Iterable[Key]) -> list[float]:
        """Count one touch of each key. Returns their heat after it."""
        now, touches, half_life_s = self._clock(), self._touches, self._half_life_s
        heat = []
        for key in keys:
            last = touches.pop(key, None)
            count = 1.0 if last is None else last[0] * 0.5 ** ((now - last[1]) / half_life_s) + 1
            touches[key] = (count, now)
            heat.append(count / (count + 1))
        while len(touches) > self._limit:
            touches.popitem(last=False)
        return heat

    def of(self, key: Key) -> float:
        """Return the heat of a key, from 0 to below 1."""
        touches, since_s = self._touches.get(key, (0.0, 0.0))
        count: float = touches * 0.5 ** ((self._clock() - since_s) / self._half_life_s)
        return count / (count + 1)


class PoolLock:
    """A lock whose holder also does the work of finalizers, and makes ``answers`` after the
    release. It is not reentrant.

    Python may finalize a handle at any moment, even while its own thread holds the lock. Such work
    is queued, and whichever thread holds the lock does it. Futures are resolved without the lock,
    because their callbacks may use the pool.
    """

    def __init__(self) -> None:
        self.answers: list[_Work] = []
        """Calls to make after the lock is released."""
        self._lock = threading.Lock()
        self._queued: deque[_Work] = deque()
        when_forked(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._do_queued()

    def __exit__(self, *_: object) -> None:
        while True:
            self._do_queued()
            answers, self.answers = self.answers, []
            self._lock.release()
            for answer in answers:
                answer()
            # Work that was queued after _do_queued() found the lock held.
            if not self._queued or not self._lock.acquire(blocking=False):
                return

    def later(self, work: _Work) -> None:
        """Run work under the lock: now if it is free, otherwise by its holder. Never blocks."""
        self._queued.append(work)
        if self._lock.acquire(blocking=False):
            self.__exit__()

    def _do_queued(self) -> None:
        while self._queued:
            self._queued.popleft()()

    def _after_fork(self) -> None:
        """Replace the lock in a forked child, where a thread of the parent may hold it forever."""
        self._lock = threading.Lock()


class _Deadlines:
    """Delayed calls, made by one thread for the whole process, which starts with the first call."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calls: list[tuple[float, int, _Work]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        when_forked(self)

    def after(self, delay_s: float, call: _Work) -> None:
        """Call ``call()`` after ``delay_s`` seconds."""
        with self._changed:
            heapq.heappush(self._calls, (time.monotonic() + delay_s, next(self._numbers), call))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="beluga-deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls or self._calls[0][0] > time.monotonic():
                    wait_s = self._calls[0][0] - time.monotonic() if self._calls else None
                    self._changed.wait(None if wait_s is None else max(wait_s, 0))
                call = heapq.heappop(self._calls)[2]
            call()
            del call

    def _after_fork(self) -> None:
        """Reset in a forked child, which does not have the thread."""
        self._calls = []
        self._changed = threading.Condition()
        self._thread = None


_DEADLINES = _Deadlines()
