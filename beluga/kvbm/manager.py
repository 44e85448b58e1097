# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moves an engine's blocks to the pool and back::

    device = BlockPool("device", 512)
    with BlockManager(device, CacheTier(up, down, layout)) as manager:
        present = manager.onboard(keys, "request-1").result()   # the leading blocks of both tiers
        blocks = device.reserve("request-1", 4).result()
        ...                                                     # fill, commit, register
        manager.release("request-1")                            # the blocks move to the pool

*Offload* is best effort: the queue holds keys. A block that is evicted meanwhile, or does not fit
below, is dropped and counted. *Onboard* has a waiting caller. It holds no block while
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
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from beluga._shared import when_forked
from beluga.choices import ENGINE_OFFLOADS
from beluga.errors import TierError, UnsettledError
from beluga.index import BlockState
from beluga.kvbm.pool import WAIT_S, BlockPool, Key, MutableBlock, RegisteredBlock
from beluga.kvcache import GetResult, PutResult, Run
from beluga.limit import LogLimit, and_more, kind_of
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
    """One call of ``onboard``. Room is reserved for the call and not for its ``request``, whose
    release must not free the target of a copy. ``until_s`` is the deadline for room
    (time.monotonic()).
    """

    keys: Sequence[Key]
    request: Hashable | None
    until_s: float
    future: Future[list[RegisteredBlock]] = field(default_factory=Future)
    is_released: bool = False


class BlockManager:
    """Moves blocks between a ``device`` and the shared tier ``below``.

    ``offload`` is one of :data:`OFFLOAD_POLICIES`. Without ``threads``, blocks move only in
    :meth:`step`. Raises TierError.
    """

    def __init__(
        self, device: BlockPool, below: SharedTier, *, offload: str = "wait", threads: bool = True
    ) -> None:
        if offload not in OFFLOAD_POLICIES:
            raise TierError(
                f"there is no offload policy {offload!r}; give one of {', '.join(OFFLOAD_POLICIES)}"
            )
        self._device, self._below, self._metrics = device, below, device.metrics
        self._waits, self._on_watermark = offload == "wait", offload == "watermark"
        # The pool's lock may be taken under this one, never the other way round.
        self._changed = threading.Condition()
        self._pending: set[_OnboardCall] = set()
        # Queues. At most twice as many offloads wait as the device has blocks, because those of
        # evicted blocks are swept out; and at most as many prefetches.
        self._onboards: deque[tuple[_OnboardCall, list[MutableBlock]]] = deque()  # with their room
        self._prefetches: deque[tuple[Sequence[Key], _Chain]] = deque()  # with their whole chain
        self._offloads: dict[Key, None] = {}  # oldest first
        self._failures: dict[Key, int] = {}
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
        until_s = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        call = _OnboardCall(keys, request, until_s)
        with self._changed:
            closed = self._closed
            if not closed:
                self._pending.add(call)
        call.future.add_done_callback(functools.partial(self._ended, call))
        if closed:
            self._fail(call, TierError("the block manager is closed"))
        else:
            self._advance(call, [])
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
                (keys, chain[first : first + BATCH]) for first in range(0, len(chain), BATCH)
            )
            count = sum(len(batch) for _, batch in self._prefetches)
            while count - dropped > self._device.total_blocks:
                dropped += len(self._prefetches.popleft()[1])
            self._changed.notify_all()
        self._metrics.drop(dropped, TransferClass.PREFETCH, "overflow")

    def release(self, request: Hashable) -> None:
        """Release all blocks of a request, and cancel its onboards."""
        with self._changed:
            calls = [call for call in self._pending if call.request == request]
            for call in calls:
                call.is_released = True
        for call in calls:
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
            self._prefetches.clear()
            ready = [call for call, _ in self._onboards]
            self._onboards.clear()
            waiting = [call for call in self._pending if not call.future.running()]
        for call in ready:
            self._fail(call, TierError("the block manager was closed"))
        for call in waiting:
            self._device.end(call)  # fails its reservation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Onboard and prefetch. An onboard that waits belongs to its reservation, one that has room to
    # its queue, and then to the step that takes it: each has one owner, which resolves its future.

    def _advance(self, call: _OnboardCall, room: list[MutableBlock]) -> None:
        """Resolve an onboard if ``room`` is enough for the blocks that the device lacks. Otherwise
        release everything, because another onboard may wait for it, and reserve enough.
        """
        blocks = [self._device.find(key) for key in call.keys]
        missing = [index for index, block in enumerate(blocks) if block is None]
        if len(missing) <= len(room):
            self._resolve(call, missing, _present(blocks), room)
            return
        self._device.drop_all([*room, *_present(blocks)])
        # If blocks of the device were evicted meanwhile: enough, whatever else is evicted.
        count = len(call.keys) if room else len(missing)
        remaining_s = max(call.until_s - time.monotonic(), 0.0)
        try:
            reservation = self._device.reserve(call, count, timeout_s=remaining_s)
        except TierError as error:
            self._fail(call, error)
            return
        reservation.add_done_callback(functools.partial(self._reserved, call))
        if call.future.cancelled() or self._closed:
            self._device.end(call)

    def _reserved(self, call: _OnboardCall, reservation: Future[list[MutableBlock]]) -> None:
        error = reservation.exception()
        with self._changed:
            if error is None and not self._closed:
                self._onboards.append((call, reservation.result()))
                self._changed.notify_all()
                return
        closed = TierError("the block manager was closed")
        self._fail(call, closed if self._closed or error is None else error)

    def _fail(self, call: _OnboardCall, error: BaseException) -> None:
        self._device.end(call)
        if call.future.set_running_or_notify_cancel():
            call.future.set_exception(error)

    def _ended(self, call: _OnboardCall, future: Future[list[RegisteredBlock]]) -> None:
        with self._changed:
            self._pending.discard(call)
        if future.cancelled():
            self._device.end(call)

    def _step_up(self) -> bool:
        with self._changed:
            onboard = self._onboards.popleft() if self._onboards else None
            waits = onboard is None and self._prefetches
            prefetch = self._prefetches.popleft() if waits else None
        if onboard is not None:
            self._advance(*onboard)
        elif prefetch is not None:
            self._prefetch(*prefetch)
        return onboard is not None or prefetch is not None

    def _resolve(
        self,
        call: _OnboardCall,
        missing: list[int],
        present: list[RegisteredBlock],
        room: list[MutableBlock],
    ) -> None:
        """Copy the missing blocks of an onboard, and resolve its future."""
        is_wanted = call.future.set_running_or_notify_cancel()
        error: TierError | None = None
        blocks: list[RegisteredBlock] = []
        try:
            if is_wanted:
                blocks = self._onboard(call, missing, room)
        except UnsettledError as unsettled:
            error = TierError(f"the end of an onboard is unknown: {unsettled}")
            room = room[len(missing) :]  # the copy may still write to the others: they stay taken
        except TierError as failure:
            error = failure
        except Exception as failure:
            error = TierError(f"an onboard failed: {failure!r}")
        self._device.drop_all([*room, *present])
        if error is not None:
            call.future.set_exception(error)
        elif is_wanted:
            call.future.set_result(blocks)

    def _onboard(
        self, call: _OnboardCall, missing: list[int], room: list[MutableBlock]
    ) -> list[RegisteredBlock]:
        keys, parents = call.keys, (None, *call.keys)
        chain: _Chain = [(keys[index], parents[index]) for index in missing]
        onboarded = self._load(TransferClass.ONBOARD, chain, room)
        end = missing[len(onboarded)] if len(onboarded) < len(missing) else len(keys)
        blocks = _present(self._device.find(key, call.request) for key in keys[:end])
        self._device.drop_all(onboarded)
        if call.is_released:
            self._device.drop_all(blocks)
            raise TierError(f"request {call.request!r} was released")
        return blocks

    def _prefetch(self, keys: Sequence[Key], chain: _Chain) -> None:
        end = chain[-1][0]
        present = self._device.contains([key for key, _ in chain])
        chain = [link for link, is_present in zip(chain, present, strict=True) if not is_present]
        # Room for the end of a chain must not be made of its start.
        start = itertools.takewhile(lambda key: key != end, keys)
        held = _present(self._device.find(key, is_use=False) for key in start)
        room = self._device.try_reserve(self, len(chain))
        self._device.drop_all(held)
        if room is None:
            self._metrics.drop(len(chain), TransferClass.PREFETCH, "full")
            return
        try:
            onboarded = self._load(TransferClass.PREFETCH, chain, room)
        except Exception as error:
            self._warn("a prefetch to", error)
            self._metrics.drop(len(chain), TransferClass.PREFETCH, "failed")
            if not isinstance(error, UnsettledError):  # as in _resolve
                self._device.drop_all(room)
            return
        self._metrics.drop(len(chain) - len(onboarded), TransferClass.PREFETCH, "gone")
        self._device.drop_all([*onboarded, *room])

    def _load(
        self, kind: TransferClass, chain: _Chain, room: Sequence[MutableBlock]
    ) -> list[RegisteredBlock]:
        """Load the leading blocks of a chain that the lower tier has into the blocks of ``room``,
        and register them. Raises the errors of the copies.
        """
        if not chain:
            return []
        indices = [block.index for block in room[: len(chain)]]
        count = self._below.load([key for key, _ in chain], indices)
        for block, (key, parent) in zip(room, chain[:count], strict=False):
            block.fill(self._device.block_size)
            block.commit(key, parent=parent)
        self._metrics.move(count, kind)
        return self._device.register(room[:count], is_saved=True)

    # Offload.

    def _registered(self, keys: list[Key]) -> None:
        if not self._on_watermark:
            self._offer(keys)
        elif self._device.offload_due:
            self._offer(self._device.coldest(max(BATCH, len(keys))))

    def _offer(self, keys: Iterable[Key]) -> None:
        """Queue blocks. A key that waits keeps its position."""
        evicted: list[Key] = []
        with self._changed:
            self._offloads.update(dict.fromkeys(keys))
            if len(self._offloads) > 2 * self._device.total_blocks:
                present = self._device.contains(self._offloads)
                queued = zip(self._offloads, present, strict=True)
                evicted = [key for key, is_present in queued if not is_present]
                for key in evicted:
                    del self._offloads[key]
            self._changed.notify_all()
        self._metrics.drop(len(evicted), TransferClass.OFFLOAD, "gone")

    def _step_down(self) -> bool:
        """Offload a batch. Returns False if there is none, or if all of it waits for a retry."""
        with self._changed:
            keys = list(itertools.islice(self._offloads, BATCH))
            for key in keys:
                del self._offloads[key]
        if not keys:
            return False
        try:
            unsaved = self._offload(keys)
        except Exception as error:
            self._warn("an offload of", error)
            self._metrics.drop(len(keys), TransferClass.OFFLOAD, "failed")
            unsaved = set(keys)
        if not self._waits:
            return True
        again = []
        for key in keys:
            failures = self._failures.pop(key, 0) + 1
            if key not in unsaved:
                continue
            if failures < _ATTEMPTS_MAX:
                self._failures[key] = failures
                again.append(key)
            else:
                self._device.mark_saved([key])
                self._metrics.drop(1, TransferClass.OFFLOAD, "given_up")
        self._offer(again)
        return len(again) < len(keys)

    def _offload(self, keys: Sequence[Key]) -> set[Key]:
        """Save blocks in the lower tier. Returns the keys of those that it refused."""
        blocks = _present(self._device.find(key, is_use=False) for key in keys)
        self._metrics.drop(len(keys) - len(blocks), TransferClass.OFFLOAD, "gone")
        if not blocks:
            return set()
        keys = [block.key for block in blocks]
        try:
            states = self._below.save(keys, [block.index for block in blocks])
        except BaseException as error:
            if not isinstance(error, UnsettledError):  # the copy may still read
                self._device.drop_all(blocks)
            raise
        refused = {
            key for key, state in zip(keys, states, strict=True) if state == BlockState.REFUSED
        }
        saved, moved = len(keys) - len(refused), states.count(BlockState.GRANTED)
        self._device.mark_saved(key for key in keys if key not in refused)
        self._device.drop_all(blocks)
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


def _present(blocks: Iterable[RegisteredBlock | None]) -> list[RegisteredBlock]:
    return [block for block in blocks if block is not None]


def _digests(keys: Sequence[Key]) -> list[bytes]:
    for key in keys:
        if not isinstance(key, bytes):
            raise TierError(f"the key {key!r} is not a digest; give bytes")
    return [key for key in keys if isinstance(key, bytes)]
