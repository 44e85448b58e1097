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
does not fit below, is dropped and counted. *Onboard* has a waiting caller: once there is room, it
holds all its blocks, and its future resolves with them or a TierError. Onboards have priority over
prefetches, and both over offloads, which have their own thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from beluga._shared import when_forked
from beluga.errors import TierError, UnsettledError
from beluga.index import BlockState
from beluga.kvbm.handles import MutableBlock, RegisteredBlock, WeakBlock
from beluga.kvbm.metrics import MoveMetrics
from beluga.kvbm.offload import BATCH, OFFLOAD_POLICIES, OffloadQueue
from beluga.kvbm.onboard import ChainPart, OnboardCall, OnboardQueue, held_of
from beluga.kvbm.pool import WAIT_S, BlockPool
from beluga.kvbm.shared_tier import SharedTier
from beluga.kvbm.state import Key
from beluga.limit import LogLimit, and_more, kind_of
from beluga.metrics import Registry
from beluga.threads import Thread
from beluga.transfer import TransferClass

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger(__name__)
_RETRY_S = 0.01
_ATTEMPTS_MAX = 3
"""Failures after which ``wait`` drops a block, so that a broken pool does not stall the engine."""


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
        self._offloads = OffloadQueue(device)
        self._failures: dict[Key, int] = {}
        self._onboards = OnboardQueue(prefetch_max=device.total_blocks)
        self._unsettled: list[object] = []  # keeps blocks alive that a copy may still write to
        self._changed = threading.Condition()
        self._pending: dict[Hashable, set[OnboardCall]] = {}
        self._busy = 0
        self._limit = LogLimit()
        self._closed = False
        device.on_registered = self._registered
        device.keep_unsaved(self._waits)
        self._threads: list[threading.Thread] = []
        when_forked(self)
        if threads:
            self._start("onboard", self._step_up, lambda: self._onboards.has_work)
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
        wanted = OnboardCall(keys, request, until)
        with self._changed:
            closed = self._closed
            if not closed:
                self._pending.setdefault(request, set()).add(wanted)
        wanted.future.add_done_callback(functools.partial(self._ended, wanted))
        if closed:
            self._fail(wanted, TierError("the block manager is closed"))
        else:
            self._look(wanted)
        return wanted.future

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Load the hot, missing blocks of a chain into the device, if no onboard waits and there is
        free room.
        """
        hot = set(self._device.hot_and_missing(keys))
        parents = zip(keys, (None, *keys), strict=False)
        forgotten = self._onboards.prefetch([(key, above) for key, above in parents if key in hot])
        self._metrics.drop(forgotten, TransferClass.PREFETCH, "overflow")
        self._notify()

    def release(self, request: Hashable) -> None:
        """Release all blocks of a request, and cancel its onboards."""
        with self._changed:
            pending = self._pending.pop(request, set())
            for wanted in pending:
                wanted.is_released = True
        for wanted in pending:
            wanted.future.cancel()  # a future whose copy has started fails when the copy ends
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
        self._offloads.clear()
        self._onboards.clear()
        with self._changed:
            left = [wanted for pending in self._pending.values() for wanted in pending]
        for wanted in left:
            self._fail(wanted, TierError("the block manager was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Onboard and prefetch.

    def _look(self, wanted: OnboardCall) -> None:
        """Resolve an onboard whose blocks are all present, or reserve room for the missing ones."""
        present = [self._device.find(key) for key in wanted.keys]
        missing = present.count(None)
        if not self._hold(wanted, present, [], only_if=not missing):
            # While it waits, it must not hold anything that another onboard may wait for.
            _release(held_of(present))
            self._reserve(wanted, missing)
        elif wanted.begin():
            self._carry_out(wanted)

    def _hold(
        self,
        wanted: OnboardCall,
        present: list[RegisteredBlock | None],
        room: list[MutableBlock],
        *,
        only_if: bool,
    ) -> bool:
        """Give an onboard that can start all that it needs. Returns whether it can."""
        with self._changed:
            holds = only_if and not wanted.future.done()
            if holds:
                wanted.present, wanted.room = present, room
            return holds

    def _reserve(self, wanted: OnboardCall, count: int) -> None:
        left_s = max(wanted.until - time.monotonic(), 0.0)
        try:
            reservation = self._device.reserve(wanted, count, timeout_s=left_s)
        except TierError as error:
            self._fail(wanted, error)
            return
        wanted.reservation = reservation
        reservation.add_done_callback(functools.partial(self._reserved, wanted))
        if wanted.future.cancelled():  # was cancelled after the check
            reservation.cancel()

    def _reserved(self, wanted: OnboardCall, reservation: Future[list[MutableBlock]]) -> None:
        """Hold the blocks of an onboard that has room, unless it needs more room by now."""
        try:
            room = reservation.result()
        except CancelledError:
            return
        except TierError as error:
            self._fail(wanted, error)
            return
        present = [self._device.find(key) for key in wanted.keys]
        missing = present.count(None)
        if self._hold(wanted, present, room[:missing], only_if=missing <= len(room)):
            self._device.drop_all(room[missing:])
            self._onboards.put(wanted)
            self._notify()
            return
        self._device.drop_all(room)
        _release(held_of(present))
        if not wanted.future.done():
            # Blocks of the device were evicted meanwhile. This is enough, whatever else is evicted.
            self._reserve(wanted, len(wanted.keys))

    def _ended(self, wanted: OnboardCall, _: Future[list[RegisteredBlock]]) -> None:
        """Release everything, however the onboard ended."""
        wanted.begin()
        with self._changed:
            pending = self._pending.get(wanted.request)
            if pending is not None:
                pending.discard(wanted)
                if not pending:
                    del self._pending[wanted.request]
            held = wanted.let_go()
        if wanted.reservation is not None:
            wanted.reservation.cancel()
        _release(held)

    def _fail(self, wanted: OnboardCall, error: TierError) -> None:
        if wanted.begin():
            wanted.future.set_exception(error)

    def _step_up(self) -> bool:
        wanted = self._onboards.take()
        if wanted is not None:
            self._carry_out(wanted)
            return True
        chain = self._onboards.take_prefetch()
        if chain is not None:
            self._prefetch(chain)
        return chain is not None

    def _carry_out(self, wanted: OnboardCall) -> None:
        """Resolve the future of an onboard that has started."""
        try:
            blocks = self._onboarded(wanted)
        except UnsettledError as error:
            wanted.let_go()  # the manager keeps what may still be written to
            wanted.future.set_exception(TierError(f"the end of an onboard is unknown: {error}"))
        except Exception as error:
            typed = isinstance(error, TierError)
            failed = error if typed else TierError(f"an onboard failed: {error!r}")
            wanted.future.set_exception(failed)
        else:
            wanted.future.set_result(blocks)

    def _onboarded(self, wanted: OnboardCall) -> list[RegisteredBlock]:
        missing = [place for place, block in enumerate(wanted.present) if block is None]
        chain: ChainPart = [
            (wanted.keys[place], wanted.keys[place - 1] if place else None) for place in missing
        ]
        brought = self._bring(TransferClass.ONBOARD, chain, wanted.room)
        end = missing[len(brought)] if len(brought) < len(missing) else len(wanted.keys)
        blocks = [self._device.find(key, wanted.request) for key in wanted.keys[:end]]
        self._device.drop_all(brought)
        if wanted.is_released:
            _release(held_of(blocks))
            raise TierError(f"request {wanted.request!r} was released")
        return [block for block in blocks if block is not None]

    def _prefetch(self, chain: ChainPart) -> None:
        there = self._device.contains([key for key, _ in chain])
        chain = [one for one, has in zip(chain, there, strict=True) if not has]
        beginnings = self._beginnings(chain)
        room = self._device.try_reserve(self, len(chain))
        self._device.drop_all(beginnings)
        if room is None:
            self._metrics.drop(len(chain), TransferClass.PREFETCH, "full")
            return
        try:
            brought = self._bring(TransferClass.PREFETCH, chain, room)
        except Exception as error:
            self._warn("a prefetch to", error)
            self._metrics.drop(len(chain), TransferClass.PREFETCH, "failed")
            # Otherwise the manager keeps what may still be written to
            if not isinstance(error, UnsettledError):
                self._device.drop_all(room)
            return
        self._metrics.drop(len(chain) - len(brought), TransferClass.PREFETCH, "gone")
        self._device.drop_all([*brought, *room])

    def _beginnings(self, chain: ChainPart) -> list[RegisteredBlock]:
        """Hold the parents that the device has, so that making room for the end of a chain does not
        evict its start.
        """
        held: dict[Key, RegisteredBlock] = {}
        for _, key in chain:
            above = key
            while above is not None and above not in held:
                block = self._device.find(above, is_use=False)
                if block is None:
                    break
                held[above], above = block, block.parent
        return list(held.values())

    def _bring(
        self, kind: TransferClass, chain: ChainPart, room: Sequence[MutableBlock]
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

    def _offer(self, blocks: list[WeakBlock]) -> None:
        self._metrics.drop(self._offloads.put(blocks), TransferClass.OFFLOAD, "gone")
        self._notify()

    def _step_down(self) -> bool:
        """Offload a batch. Returns False if there is none, or if all of it waits for a retry."""
        blocks = self._offloads.take()
        if not blocks:
            return False
        try:
            left = self._offload(blocks)
        except Exception as error:
            self._warn("an offload of", error)
            self._metrics.drop(len(blocks), TransferClass.OFFLOAD, "failed")
            left = blocks
        if not self._waits:
            return True
        for block in blocks:
            if block not in left:
                self._failures.pop(block.key, None)
        again = [block for block in left if self._try_again(block)]
        self._offloads.put(again)
        return len(again) < len(blocks)

    def _offload(self, blocks: Sequence[WeakBlock]) -> list[WeakBlock]:
        """Save blocks in the lower tier. Returns those that it refused."""
        held = [block.upgrade(is_use=False) for block in blocks]
        alive = [block for block in held if block is not None]
        self._metrics.drop(len(held) - len(alive), TransferClass.OFFLOAD, "gone")
        if not alive:
            return []
        try:
            states = self._below.save([one.key for one in alive], [one.index for one in alive])
        except UnsettledError:
            self._unsettled.append(alive)
            raise
        except BaseException:
            self._device.drop_all(alive)
            raise
        refused = {
            block.key
            for block, state in zip(alive, states, strict=True)
            if state == BlockState.REFUSED
        }
        saved, moved = len(alive) - len(refused), states.count(BlockState.GRANTED)
        self._device.mark_saved(block.key for block in alive if block.key not in refused)
        self._device.drop_all(alive)
        self._metrics.move(moved, TransferClass.OFFLOAD)
        self._metrics.drop(saved - moved, TransferClass.OFFLOAD, "present")
        self._metrics.drop(len(refused), TransferClass.OFFLOAD, "refused")
        return [block for block in blocks if block.key in refused]

    def _warn(self, what: str, error: Exception) -> None:
        """Log a failure, but not repeatedly for the same kind; the counters include all."""
        suppressed = self._limit.passes(what, kind_of(error))
        if suppressed is not None:
            name = self._device.name
            _logger.warning(
                "beluga: %s tier %s failed: %s%s", what, name, error, and_more(suppressed)
            )

    def _try_again(self, block: WeakBlock) -> bool:
        failures = self._failures.get(block.key, 0) + 1
        if failures < _ATTEMPTS_MAX:
            self._failures[block.key] = failures
            return True
        self._failures.pop(block.key, None)
        self._device.mark_saved([block.key])
        self._metrics.drop(1, TransferClass.OFFLOAD, "given_up")
        return False

    # Threads.

    def _after_fork(self) -> None:
        """Close in a forked child, which has none of the threads."""
        self._changed = threading.Condition()
        self._closed = True
        self._threads = []

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._onboards.has_work or bool(self._offloads)

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


def _release(held: Sequence[MutableBlock | RegisteredBlock]) -> None:
    """Release handles, last to first."""
    for block in reversed(held):
        block.release()
