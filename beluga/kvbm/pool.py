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

A handle keeps its block active. It is released by its ``release``, at the end of its ``with``, or
by :meth:`BlockPool.release` of its request, whichever comes first. A released handle raises
TierError when it is used.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import heapq
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from beluga._shared import when_forked
from beluga.errors import TierError
from beluga.kvbm.metrics import PREFETCH_ABOVE, BlockMetrics, MissedTarget
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

_AnyHandle = TypeVar("_AnyHandle", bound="_Handle")


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


class _Handle:
    """A reference to a block by its pool's user, perhaps for a request. ``block`` is None after
    the release.
    """

    __slots__ = ("block", "pool", "request")

    def __init__(self, pool: BlockPool, block: Block, request: Hashable | None) -> None:
        self.pool, self.request = pool, request
        self.block: Block | None = block

    def held(self) -> Block:
        """Return the block. Raises TierError after the release."""
        if self.block is None:
            raise TierError("this handle was released; reserve or match the block again")
        return self.block

    @property
    def index(self) -> int:
        """The index of the block in device memory."""
        return self.held().index

    def release(self) -> None:
        """Release the block. Idempotent."""
        self.pool.drop_all([self])

    def __enter__(self: _AnyHandle) -> _AnyHandle:
        self.held()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MutableBlock(_Handle):
    """The only handle of a block that is not yet registered."""

    __slots__ = ()

    @property
    def state(self) -> BlockPhase:
        """The state of the block."""
        return self.held().state

    def fill(self, tokens: int) -> None:
        """Count tokens that were written to the block. Raises TierError beyond the block's size."""
        size = self.pool.block_size
        with self.pool.lock:
            block = self.held()
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
            block = self.held()
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
        block = self.block
        return f"<{block.state.value} block {block.index}>" if block else "<released block>"


class RegisteredBlock(_Handle):
    """A strong handle of a registered block, whose content does not change meanwhile."""

    __slots__ = ("key",)

    def __init__(self, pool: BlockPool, block: Block, request: Hashable | None) -> None:
        super().__init__(pool, block, request)
        self.key = block.key

    @property
    def parent(self) -> Key | None:
        """The key of the previous block in its chain."""
        return self.held().parent

    def __repr__(self) -> str:
        block = self.block
        return f"<block {block.index} of {self.key!r}>" if block else "<released block>"


class BlockPool:
    """The blocks of a device, numbered as in its memory.

    A block is free, active (it has handles), or inactive (registered, without handles).
    ``reserve`` takes free blocks in the order in which they became free, then evicts inactive ones,
    leaves first. Any thread may call any method::

        pool = BlockPool("device", 1024, block_size=16)
        (block,) = pool.reserve("request-1", 1).result()
        block.fill(16)
        block.commit(key)
        (registered,) = pool.register([block])
        pool.release("request-1")
        assert pool.match([key], "request-2")[0].key == key

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
        self.on_registered: Callable[[list[Key]], None] | None = None
        """Called without the lock, after blocks were registered that the lower tier may not have.
        """
        self.lock = threading.Lock()
        self._free = deque(Block(index) for index in range(total_blocks))
        self._inactive = _Inactive()
        self._registered: dict[Key, Block] = {}
        self._claims: dict[Hashable, dict[_Handle, None]] = {}  # by request
        self._waiting: dict[_Reservation, None] = {}  # first in, first out
        self._answers: list[Callable[[], None]] = []
        self._watcher: threading.Thread | None = None  # while a reservation waits
        self._woken = threading.Event()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._ghosts_max = total_blocks if ghosts is None else ghosts
        self._heat = _Heat(2 * total_blocks, half_life_s=half_life_s, clock=clock)
        self.metrics = BlockMetrics(self, registry)
        self._closed = False
        when_forked(self)

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
        with self._granting():
            self._inactive.keep_unsaved(keep)

    def missed_targets(self) -> list[MissedTarget]:
        """Return the missed targets."""
        return self.metrics.missed(self)

    def reserve(
        self, request: Hashable, count: int, *, timeout_s: float | None = None
    ) -> Future[list[MutableBlock]]:
        """Reserve ``count`` blocks for a request: all or none, in the order of the calls.

        The future resolves as soon as there is room, on the thread that frees it. It can be
        cancelled at any moment. After ``timeout_s`` (default: :data:`WAIT_S`) it fails with
        TierError. Raises TierError for more blocks than the tier has.
        """
        if not 0 <= count <= self.total_blocks:
            raise TierError(
                f"tier {self.name} has {self.total_blocks} blocks, but {count} were requested"
            )
        reservation = _Reservation(request, count, WAIT_S if timeout_s is None else timeout_s)
        with self._granting():
            if self._closed or len(self._waiting) >= WAITING_MAX:
                raise TierError(
                    f"tier {self.name} is closed"
                    if self._closed
                    else f"{WAITING_MAX} reservations wait for tier {self.name} already; try later"
                )
            self._waiting[reservation] = None
        if reservation in self._waiting:
            forget = functools.partial(self._forget_if_cancelled, reservation)
            reservation.future.add_done_callback(forget)
            self._watch()
        return reservation.future

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
        with self._granting():
            if any(block.pool is not self for block in blocks):
                raise TierError("a block of another tier cannot be registered here")
            for block in blocks:
                block.held().require("be registered", BlockPhase.COMPLETE)
            if len({*blocks}) < len(blocks):
                raise TierError("a block is registered twice in one call")
            keys = [block.held().key for block in blocks]
            new = [key for key in keys if key not in self._registered]
            handles = [self._register(block) for block in blocks]
            if is_saved:
                self._mark_saved(block.key for block in handles)
        if new and not is_saved and self.on_registered is not None:
            self.on_registered(new)
        return handles

    def match(self, keys: Sequence[Key], request: Hashable) -> list[RegisteredBlock]:
        """Return the blocks of the leading keys, up to the first that is missing. They are active
        until they are released, or until ``request`` is.
        """
        with self.lock:
            self.metrics.heat.observe_all(self._heat.touch(keys), tier=self.name)
            matches = []
            for key in keys:
                block = self._registered.get(key)
                if block is None:
                    if key in self._ghosts:
                        self.metrics.ghost_hits.add(tier=self.name)
                    break
                matches.append(self._share(block, request))
            self.metrics.hits.add(len(matches), tier=self.name)
            return matches

    def release(self, request: Hashable) -> int:
        """Release all blocks of a request, and fail its reservations. Returns how many handles
        ended. The last block of a chain is released first, so that it is evicted first.
        """
        start_s = time.perf_counter()
        count = self.end(request)
        self.metrics.release.observe(time.perf_counter() - start_s, tier=self.name)
        return count

    def end(self, request: Hashable) -> int:
        """Do what :meth:`release` does, for a request of the manager itself: without its metric."""
        with self._granting():
            for reservation in [*self._waiting]:
                if reservation.request == request:
                    self._fail(reservation, f"request {request!r} was released")
            handles = [*self._claims.get(request, ())]
            for handle in reversed(handles):
                self._drop(handle)
        return len(handles)

    def drop_all(self, handles: Sequence[_Handle]) -> None:
        """Release handles, last to first."""
        with self._granting():
            for handle in reversed(handles):
                self._drop(handle)

    def find(
        self, key: Key, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """Return the block of a key, or None if the device has none. Without ``is_use``, the block
        keeps its position in the order of eviction.
        """
        with self.lock:
            block = self._registered.get(key)
            return None if block is None else self._share(block, request, is_use=is_use)

    def contains(self, keys: Iterable[Key]) -> list[bool]:
        """Return which keys are registered, without touching them."""
        with self.lock:
            return [key in self._registered for key in keys]

    def mark_saved(self, keys: Iterable[Key]) -> None:
        """Mark blocks as stored in the lower tier, so that they may be evicted."""
        with self._granting():
            self._mark_saved(keys)

    def coldest(self, count: int) -> list[Key]:
        """Return the keys of the least recently returned inactive blocks that the lower tier does
        not have.
        """
        with self.lock:
            return [block.key for block in self._inactive.coldest(count)]

    def hot_and_missing(self, keys: Iterable[Key]) -> list[Key]:
        """Return the keys that are hot and missing."""
        with self.lock:
            absent = (key for key in keys if key not in self._registered)
            return [key for key in absent if self._heat.of(key) > PREFETCH_ABOVE]

    def close(self) -> None:
        """Fail waiting reservations and refuse new ones. Handles may still be released.
        Idempotent.
        """
        with self._granting():
            self._closed = True
            for reservation in [*self._waiting]:
                self._fail(reservation, f"tier {self.name} was closed")
        self.metrics.close()

    @contextlib.contextmanager
    def _granting(self) -> Iterator[None]:
        """Hold the lock for a change that may make room, then grant reservations. Futures are
        resolved without the lock, because their callbacks may use the pool. A body that raises has
        changed nothing.
        """
        with self.lock:
            yield
            self._grant()
            answers, self._answers = self._answers, []
            if self._watcher is not None and not self._waiting:
                self._woken.set()
        for answer in answers:
            answer()

    def _forget_if_cancelled(self, reservation: _Reservation, future: Future[Any]) -> None:
        if future.cancelled():
            with self._granting():
                self._waiting.pop(reservation, None)

    def _watch(self) -> None:
        """Have a thread that fails late reservations, as long as any waits."""
        with self.lock:
            self._woken.set()  # the new deadline may be the first
            if self._watcher is None:
                watcher = Thread(target=self._fail_late, name="beluga-deadlines", daemon=True)
                self._watcher = watcher
                watcher.start()

    def _fail_late(self) -> None:
        while True:
            self._woken.clear()
            with self._granting():
                now_s = time.perf_counter()
                for late in [waits for waits in self._waiting if waits.until_s <= now_s]:
                    wait = f"{now_s - late.since_s:.3g} s"
                    blocks = f"{late.count} blocks"
                    self._fail(late, f"tier {self.name} could not free {blocks} within {wait}")
                if not self._waiting:
                    self._watcher = None
                    return
                until_s = min(waits.until_s for waits in self._waiting)
            self._woken.wait(until_s - now_s)

    def _after_fork(self) -> None:
        """Replace the lock in a forked child, where a thread of the parent may hold it forever, and
        forget the thread.
        """
        self.lock, self._woken, self._watcher = threading.Lock(), threading.Event(), None

    # Everything below is called with the lock held.

    def _claim(self, handle: _AnyHandle) -> _AnyHandle:
        handle.held().references += 1
        if handle.request is not None:
            self._claims.setdefault(handle.request, {})[handle] = None
        return handle

    def _drop(self, handle: _Handle) -> None:
        block, handle.block = handle.block, None
        if block is None:
            return
        if handle.request is not None:
            claims = self._claims[handle.request]
            del claims[handle]
            if not claims:
                del self._claims[handle.request]
        block.references -= 1
        if block.references:
            return
        if block.state is BlockPhase.REGISTERED:
            self._inactive.add(block)
        else:
            self._set_free(block)

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
        return self._claim(RegisteredBlock(self, block, request))

    def _register(self, mutable: MutableBlock) -> RegisteredBlock:
        block = mutable.held()
        known = self._registered.get(block.key)
        if known is not None:
            handle = self._share(known, mutable.request)
            self.metrics.duplicates.add(tier=self.name)
        else:
            block.state = BlockPhase.REGISTERED
            self._registered[block.key] = block
            self._ghosts.pop(block.key, None)
            handle = self._claim(RegisteredBlock(self, block, mutable.request))
        self._drop(mutable)
        return handle

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
            self.metrics.evictions.add(evicted, tier=self.name)
        return len(free) >= count

    def _take(self, request: Hashable, count: int) -> list[MutableBlock]:
        blocks = [self._free.popleft() for _ in range(count)]
        return [self._claim(MutableBlock(self, block, request)) for block in blocks]

    def _grant(self) -> None:
        """Grant reservations in their order. A later one never overtakes, even if it needs fewer
        blocks.
        """
        while self._waiting:
            head = next(iter(self._waiting))
            if not (head.future.cancelled() or self._has_room(head.count)):
                return
            if self._end_waiting(head):
                blocks = self._take(head.request, head.count)
                self.metrics.allocation.observe(time.perf_counter() - head.since_s, tier=self.name)
                self._answers.append(functools.partial(head.future.set_result, blocks))

    def _fail(self, reservation: _Reservation, reason: str) -> None:
        if self._end_waiting(reservation):
            fail = functools.partial(reservation.future.set_exception, TierError(reason))
            self._answers.append(fail)

    def _end_waiting(self, reservation: _Reservation) -> bool:
        """Remove a reservation. Returns whether its future has to be resolved."""
        del self._waiting[reservation]
        return reservation.future.set_running_or_notify_cancel()


class _Reservation:
    """One call of ``reserve``. Times are of ``time.perf_counter``."""

    __slots__ = ("count", "future", "request", "since_s", "until_s")

    def __init__(self, request: Hashable, count: int, wait_s: float) -> None:
        self.request, self.count = request, count
        self.future: Future[list[MutableBlock]] = Future()
        self.since_s = time.perf_counter()
        self.until_s = self.since_s + wait_s


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
