# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moves an engine's blocks to the pool and back::

    device = BlockPool("device", 512)
    with BlockManager(device, CacheTier(up, down, layout)) as manager:
        present = manager.onboard(keys, "request-1").result()   # the leading blocks of both tiers
        blocks = device.reserve("request-1", 4).result()
        ...                                                     # fill, commit, register
        manager.release("request-1")                            # the blocks move to the pool

*Offload* is best effort: the queue holds weak references. A block that is evicted meanwhile, or
does not fit below, is dropped and counted. *Onboard* has a waiting caller. It holds no block while
it waits for room, so no two of them can deadlock. Once there is room, it holds all its blocks, and
its future resolves with them or a TierError. Onboards have priority over prefetches, and both over
offloads, which have their own thread.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from beluga._shared import when_forked
from beluga.choices import ENGINE_OFFLOADS
from beluga.errors import TierError, UnsettledError
from beluga.index import BlockState
from beluga.kvbm.metrics import MoveMetrics
from beluga.kvbm.pool import WAIT_S, BlockPool, Key, MutableBlock, RegisteredBlock, WeakBlock
from beluga.kvcache import GetResult, PutResult, Run
from beluga.limit import LogLimit, and_more, kind_of
from beluga.metrics import Registry
from beluga.threads import Thread
from beluga.transfer import BlockLayout, TransferClass

if TYPE_CHECKING:
    from typing_extensions import Self

OFFLOAD_POLICIES = ENGINE_OFFLOADS
"""When blocks are offloaded: ``wait`` and ``drop`` when they are registered, ``watermark`` when the
device's usage is above its watermark. Only ``wait`` never evicts a block before the pool has it.
"""

BATCH = 16
"""Blocks per copy."""

_RETRY_S = 0.01
_ATTEMPTS_MAX = 3
"""Failures after which ``wait`` drops a block, so that a broken pool does not stall the engine."""

_Chain: TypeAlias = "list[tuple[Key, Key | None]]"
"""Keys of a chain in order, each with its parent."""

_logger = logging.getLogger(__name__)


class SharedTier(Protocol):
    """The tier below an engine's memory, where its manager saves blocks and loads them from.

    ``blocks`` are indices of device blocks. One thread saves and another one loads.
    """

    def save(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        """Save blocks, and return the state of each: GRANTED if this call stored it, HIT or PENDING
        if another call did or is doing so, REFUSED if the tier does not have it.
        """

    def load(self, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        """Load the leading blocks that the tier has, and return their number."""


class BlockCache(Protocol):
    """The methods of a :class:`~beluga.kvcache.KVCache` that a tier uses."""

    def get(self, digests: Any, targets: Any) -> GetResult:
        """Fetch the leading blocks."""

    def put(self, digests: Any, sources: Any) -> PutResult:
        """Store blocks."""


class CacheTier:
    """A pool as a tier, through two caches of one namespace: ``up`` loads blocks and ``down`` saves
    them, directly between device memory and the pool.

    ``layout`` describes the device memory. Keys are digests, as for a cache.
    """

    def __init__(self, up: BlockCache, down: BlockCache, layout: BlockLayout) -> None:
        self._up, self._down, self._layout = up, down, layout

    def save(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        """Save blocks, and return the state of each, as a put does."""
        result = self._down.put(_digests(keys), Run.of(self._layout, blocks))
        states: list[int] = result.states.tolist()
        return states

    def load(self, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        """Load the leading blocks that the pool or a lower tier has."""
        return self._up.get(_digests(keys), Run.of(self._layout, blocks)).hits


@dataclass(slots=True, eq=False)
class _OnboardCall:
    """One call of ``onboard``. Once there is room, ``present`` has the device's block for each key,
    or None, and ``room`` has a block for each None. ``until`` is the deadline for room
    (time.monotonic()).
    """

    keys: Sequence[Key]
    request: Hashable | None
    until: float
    present: list[RegisteredBlock | None] = field(default_factory=list)
    room: list[MutableBlock] = field(default_factory=list)
    future: Future[list[RegisteredBlock]] = field(default_factory=Future)
    reservation: Future[list[MutableBlock]] | None = None
    is_released: bool = False
    _begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Return True once, if the future was not cancelled; the caller then resolves it."""
        with self._lock:
            first, self._begun = not self._begun, True
        return first and self.future.set_running_or_notify_cancel()

    def fail(self, error: TierError) -> None:
        if self.begin():
            self.future.set_exception(error)

    def let_go(self) -> list[MutableBlock | RegisteredBlock]:
        """Drop all handles, and return them for their release."""
        held: list[MutableBlock | RegisteredBlock] = [*self.room, *_held(self.present)]
        self.room, self.present = [], []
        return held


class BlockManager:
    """Moves blocks between a ``device`` and the shared tier ``below``.

    ``offload`` is one of :data:`OFFLOAD_POLICIES`. Without ``threads``, blocks move only in
    :meth:`step`. Raises TierError.
    """

    def __init__(
        self,
        device: BlockPool,
        below: SharedTier,
        *,
        offload: str = "wait",
        threads: bool = True,
        registry: Registry | None = None,
    ) -> None:
        if offload not in OFFLOAD_POLICIES:
            raise TierError(
                f"there is no offload policy {offload!r}; give one of {', '.join(OFFLOAD_POLICIES)}"
            )
        self._device, self._below = device, below
        self._waits, self._on_watermark = offload == "wait", offload == "watermark"
        self._metrics = MoveMetrics(device.name, registry)
        self._changed = threading.Condition()
        self._pending: dict[Hashable, set[_OnboardCall]] = {}
        # Queues. An offload that was evicted is dropped, and dead ones are swept out, so at most
        # twice as many wait as the device has; at most as many prefetches as the device has.
        self._onboards: deque[_OnboardCall] = deque()  # those that have room
        self._prefetches: deque[_Chain] = deque()
        self._offloads: dict[Key, WeakBlock] = {}  # oldest first
        self._failures: dict[Key, int] = {}
        self._unsettled: list[object] = []  # keeps blocks alive that a copy may still write to
        self._busy = 0
        self._limit = LogLimit()
        self._closed = False
        device.on_registered = self._registered
        device.keep_unsaved(self._waits)
        self._threads: list[threading.Thread] = []
        when_forked(self)
        if threads:
            self._start("onboard", self._step_up, lambda: bool(self._onboards or self._prefetches))
            self._start("offload", self._step_down, lambda: bool(self._offloads))

    def onboard(
        self,
        keys: Sequence[Key],
        request: Hashable | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Future[list[RegisteredBlock]]:
        """Load the missing blocks of a chain into the device.

        The future resolves with the leading blocks that the device or the lower tier has, held for
        ``request``; immediately if the device has them all. It fails with TierError if there is no
        room within ``timeout_s`` (default: that of :meth:`BlockPool.reserve`), a copy fails, or the
        request is released. It can be cancelled until the copy starts.
        """
        until = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        call = _OnboardCall(keys, request, until)
        with self._changed:
            closed = self._closed
            if not closed:
                self._pending.setdefault(request, set()).add(call)
        call.future.add_done_callback(functools.partial(self._ended, call))
        if closed:
            call.fail(TierError("the block manager is closed"))
        else:
            self._prepare(call, [])
        return call.future

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Load the hot, missing blocks of a chain into the device, if no onboard waits and there is
        free room.
        """
        hot = set(self._device.hot_and_missing(keys))
        parents = zip(keys, (None, *keys), strict=False)
        chain = [(key, parent) for key, parent in parents if key in hot]
        dropped = 0
        with self._changed:
            self._prefetches.extend(
                chain[first : first + BATCH] for first in range(0, len(chain), BATCH)
            )
            count = sum(map(len, self._prefetches))
            while count - dropped > self._device.total_blocks:
                dropped += len(self._prefetches.popleft())
            self._changed.notify_all()
        self._metrics.drop(dropped, TransferClass.PREFETCH, "overflow")

    def release(self, request: Hashable) -> None:
        """Release all blocks of a request, and cancel its onboards."""
        with self._changed:
            pending = self._pending.pop(request, set())
            for call in pending:
                call.is_released = True
        for call in pending:
            call.future.cancel()  # a future whose copy has started fails when the copy ends
        self._device.release(request)

    def step(self) -> bool:
        """Do one step of work: an onboard, else a batch of prefetches, else a batch of offloads.
        Returns whether there was any. For managers without threads.
        """
        return self._step_up() or self._step_down()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all moves are done. Returns False if that takes longer than ``timeout_s``
        (default: :data:`WAIT_S`).
        """
        if not self._threads:
            while self.step():
                pass
            return not self._has_work()
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._busy or self._has_work()) or self._closed,
                WAIT_S if timeout_s is None else timeout_s,
            )

    def close(self) -> None:
        """Finish the running copy, fail waiting onboards, and drop offloads. The device stays open
        and may evict blocks that the pool does not have. Idempotent.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a future's callback may close
                thread.join()
        self._device.on_registered = None
        self._device.keep_unsaved(False)
        with self._changed:
            self._offloads.clear()
            self._onboards.clear()
            self._prefetches.clear()
            waiting = [call for pending in self._pending.values() for call in pending]
        for call in waiting:
            call.fail(TierError("the block manager was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Onboard and prefetch.

    def _prepare(self, call: _OnboardCall, room: list[MutableBlock]) -> None:
        """Start an onboard if ``room`` is enough for the blocks that the device lacks. Otherwise
        release everything, because another onboard may wait for it, and reserve enough.
        """
        present = [self._device.find(key) for key in call.keys]
        missing, had_room = present.count(None), bool(room)
        with self._changed:
            starts = missing <= len(room) and not call.future.done()
            if starts:
                call.present, call.room = present, room[:missing]
                if had_room:
                    self._onboards.append(call)
                    self._changed.notify_all()
        if starts:
            self._device.drop_all(room[missing:])
            if not had_room and call.begin():  # the device has all blocks
                self._resolve(call)
            return
        self._device.drop_all([*room, *_held(present)])
        if call.future.done():
            return
        # If blocks of the device were evicted meanwhile: enough, whatever else is evicted.
        count = len(call.keys) if had_room else missing
        remaining_s = max(call.until - time.monotonic(), 0.0)
        try:
            reservation = self._device.reserve(call, count, timeout_s=remaining_s)
        except TierError as error:
            call.fail(error)
            return
        call.reservation = reservation
        reservation.add_done_callback(functools.partial(self._reserved, call))
        if call.future.cancelled():  # was cancelled after the check
            reservation.cancel()

    def _reserved(self, call: _OnboardCall, reservation: Future[list[MutableBlock]]) -> None:
        try:
            room = reservation.result()
        except CancelledError:
            return
        except TierError as error:
            call.fail(error)
            return
        self._prepare(call, room)

    def _ended(self, call: _OnboardCall, _: Future[list[RegisteredBlock]]) -> None:
        """Release everything, however the onboard ended."""
        call.begin()
        with self._changed:
            pending = self._pending.get(call.request)
            if pending is not None:
                pending.discard(call)
                if not pending:
                    del self._pending[call.request]
            held = call.let_go()
        if call.reservation is not None:
            call.reservation.cancel()
        self._device.drop_all(held)

    def _step_up(self) -> bool:
        call, chain = None, None
        with self._changed:
            while self._onboards and call is None:
                call = self._onboards.popleft()
                call = None if call.future.cancelled() else call
            if call is None and self._prefetches:
                chain = self._prefetches.popleft()
        if call is not None and call.begin():
            self._resolve(call)
        elif chain is not None:
            self._prefetch(chain)
        return call is not None or chain is not None

    def _resolve(self, call: _OnboardCall) -> None:
        """Copy the missing blocks of an onboard that has begun, and resolve its future."""
        try:
            blocks = self._onboard(call)
        except UnsettledError as error:
            call.let_go()  # the manager retains what may still be written to
            call.future.set_exception(TierError(f"the end of an onboard is unknown: {error}"))
        except TierError as error:
            call.future.set_exception(error)
        except Exception as error:
            call.future.set_exception(TierError(f"an onboard failed: {error!r}"))
        else:
            call.future.set_result(blocks)

    def _onboard(self, call: _OnboardCall) -> list[RegisteredBlock]:
        missing = [index for index, block in enumerate(call.present) if block is None]
        parents = (None, *call.keys)
        chain: _Chain = [(call.keys[index], parents[index]) for index in missing]
        onboarded = self._load(TransferClass.ONBOARD, chain, call.room)
        end = missing[len(onboarded)] if len(onboarded) < len(missing) else len(call.keys)
        blocks = _held([self._device.find(key, call.request) for key in call.keys[:end]])
        self._device.drop_all(onboarded)
        if call.is_released:
            self._device.drop_all(blocks)
            raise TierError(f"request {call.request!r} was released")
        return blocks

    def _prefetch(self, chain: _Chain) -> None:
        present = self._device.contains([key for key, _ in chain])
        chain = [link for link, is_present in zip(chain, present, strict=True) if not is_present]
        ancestors = self._ancestors(chain)
        room = self._device.try_reserve(self, len(chain))
        self._device.drop_all(ancestors)
        if room is None:
            self._metrics.drop(len(chain), TransferClass.PREFETCH, "full")
            return
        try:
            onboarded = self._load(TransferClass.PREFETCH, chain, room)
        except Exception as error:
            self._warn("a prefetch to", error)
            self._metrics.drop(len(chain), TransferClass.PREFETCH, "failed")
            # Otherwise the manager retains what may still be written to
            if not isinstance(error, UnsettledError):
                self._device.drop_all(room)
            return
        self._metrics.drop(len(chain) - len(onboarded), TransferClass.PREFETCH, "gone")
        self._device.drop_all([*onboarded, *room])

    def _ancestors(self, chain: _Chain) -> list[RegisteredBlock]:
        """Hold the ancestors that the device has, so that making room for the end of a chain does
        not evict its start.
        """
        held: dict[Key, RegisteredBlock] = {}
        for _, parent in chain:
            above = parent
            while above is not None and above not in held:
                block = self._device.find(above, is_use=False)
                if block is None:
                    break
                held[above], above = block, block.parent
        return list(held.values())

    def _load(
        self, kind: TransferClass, chain: _Chain, room: Sequence[MutableBlock]
    ) -> list[RegisteredBlock]:
        """Load the leading blocks of a chain that the lower tier has into the blocks of ``room``,
        and register them. Raises the errors of the copies.
        """
        if not chain:
            return []
        try:
            count = self._below.load([key for key, _ in chain], [block.index for block in room])
        except UnsettledError:
            self._unsettled.append(room)
            raise
        for block, (key, parent) in zip(room, chain[:count], strict=False):
            block.fill(self._device.block_size)
            block.commit(key, parent=parent)
        self._metrics.move(count, kind)
        return self._device.register(room[:count], is_saved=True)

    # Offload.

    def _registered(self, blocks: list[RegisteredBlock]) -> None:
        if not self._on_watermark:
            self._offer([block.weak() for block in blocks])
        elif self._device.offload_due:
            self._offer(self._device.coldest(max(BATCH, len(blocks))))

    def _offer(self, blocks: Iterable[WeakBlock]) -> None:
        """Queue blocks. A key that waits keeps its position."""
        queued: dict[Key, WeakBlock] = {}
        with self._changed:
            self._offloads.update((block.key, block) for block in blocks)
            if len(self._offloads) > 2 * self._device.total_blocks:
                queued = self._offloads.copy()
            self._changed.notify_all()
        if not queued:
            return
        dropped = 0
        is_alive = self._device.contains(queued)
        with self._changed:
            for (key, block), alive in zip(queued.items(), is_alive, strict=True):
                # A block that was stored again meanwhile is another object
                if not alive and self._offloads.get(key) is block:
                    del self._offloads[key]
                    dropped += 1
        self._metrics.drop(dropped, TransferClass.OFFLOAD, "gone")

    def _step_down(self) -> bool:
        """Offload a batch. Returns False if there is none, or if all of it waits for a retry."""
        with self._changed:
            keys = list(itertools.islice(self._offloads, BATCH))
            blocks = [self._offloads.pop(key) for key in keys]
        if not blocks:
            return False
        try:
            unsaved = self._offload(blocks)
        except Exception as error:
            self._warn("an offload of", error)
            self._metrics.drop(len(blocks), TransferClass.OFFLOAD, "failed")
            unsaved = set(keys)
        if not self._waits:
            return True
        again = []
        for block in blocks:
            failures = self._failures.pop(block.key, 0) + 1
            if block.key not in unsaved:
                continue
            if failures < _ATTEMPTS_MAX:
                self._failures[block.key] = failures
                again.append(block)
            else:
                self._device.mark_saved([block.key])
                self._metrics.drop(1, TransferClass.OFFLOAD, "given_up")
        self._offer(again)
        return len(again) < len(blocks)

    def _offload(self, blocks: Sequence[WeakBlock]) -> set[Key]:
        """Save blocks in the lower tier. Returns the keys of those that it refused."""
        alive = _held([block.upgrade(is_use=False) for block in blocks])
        self._metrics.drop(len(blocks) - len(alive), TransferClass.OFFLOAD, "gone")
        if not alive:
            return set()
        keys = [block.key for block in alive]
        try:
            states = self._below.save(keys, [block.index for block in alive])
        except UnsettledError:
            self._unsettled.append(alive)
            raise
        except BaseException:
            self._device.drop_all(alive)
            raise
        refused = {
            key for key, state in zip(keys, states, strict=True) if state == BlockState.REFUSED
        }
        saved, moved = len(alive) - len(refused), states.count(BlockState.GRANTED)
        self._device.mark_saved(key for key in keys if key not in refused)
        self._device.drop_all(alive)
        self._metrics.move(moved, TransferClass.OFFLOAD)
        self._metrics.drop(saved - moved, TransferClass.OFFLOAD, "present")
        self._metrics.drop(len(refused), TransferClass.OFFLOAD, "refused")
        return refused

    def _warn(self, operation: str, error: Exception) -> None:
        """Log a failure, but not repeatedly for the same kind; the counters include all."""
        suppressed = self._limit.passes(operation, kind_of(error))
        if suppressed is not None:
            name = self._device.name
            _logger.warning(
                "beluga: %s tier %s failed: %s%s", operation, name, error, and_more(suppressed)
            )

    # Threads.

    def _after_fork(self) -> None:
        """Close in a forked child, which has none of the threads."""
        self._changed = threading.Condition()
        self._closed = True
        self._threads = []

    def _has_work(self) -> bool:
        return bool(self._onboards or self._prefetches or self._offloads)

    def _start(self, name: str, step: Callable[[], bool], has_work: Callable[[], bool]) -> None:
        thread = Thread(target=self._run, args=(step, has_work), name=f"beluga-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, step: Callable[[], bool], has_work: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or has_work())
                if self._closed:
                    return
                self._busy += 1
            moved = step()
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
                if not (moved or self._closed):
                    self._changed.wait(_RETRY_S)


def _held(blocks: Iterable[RegisteredBlock | None]) -> list[RegisteredBlock]:
    """Return the blocks that are not None."""
    return [block for block in blocks if block is not None]


def _digests(keys: Sequence[Key]) -> list[bytes]:
    for key in keys:
        if not isinstance(key, bytes):
            raise TierError(f"the key {key!r} is not a digest; give bytes")
    return [key for key in keys if isinstance(key, bytes)]
