# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks of several tiers behind one manager, which moves them down and up::

    device = OwnedTier(BlockPool("device", 512), device_blocks)
    host = OwnedTier(BlockPool("host", 4096), host_blocks)
    with BlockManager([device, host], [disk]) as manager:
        blocks = device.pool.reserve("request-1", 4).result()
        ...                                             # fill, commit, register
        manager.release("request-1")                    # the blocks sink to host and disk
        found = manager.match(keys, "request-2")        # the leading blocks in the device
        found = manager.onboard(keys, "request-2").result()   # those of any tier

*Offload* is best effort: blocks wait by weak references, and one that is evicted meanwhile, or
finds no room below, is dropped and counted. *Onboard* is waited for: once there is room, it holds
what it needs, and its future resolves with the blocks or a TierError. Whenever the manager chooses
what to do next, an onboard goes before a prefetch, and both before an offload; offloads have a
thread of their own.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Literal

from beluga._shared import when_forked
from beluga.errors import TierError, UnsettledError
from beluga.limit import LogLimit, and_more, kind_of
from beluga.metrics import REGISTRY, Registry
from beluga.threads import Thread
from beluga.tiers.blocks.handles import MutableBlock, RegisteredBlock, WeakBlock
from beluga.tiers.blocks.mover import Copy, CopyAdmission, Mover, OwnedTier, admit_all, pool_keys
from beluga.tiers.blocks.offload import BATCH, OffloadQueue
from beluga.tiers.blocks.onboard import OnboardCall, OnboardQueue, OnboardSource
from beluga.tiers.blocks.pool import WAIT_S
from beluga.tiers.blocks.state import Key
from beluga.tiers.tier import LowerTier
from beluga.tiers.tier_blocks import copy_blocks
from beluga.transfer import TransferClass

_logger = logging.getLogger(__name__)
_RETRY_S = 0.01
_ATTEMPTS_MAX = 3
"""Failures after which ``wait`` gives a block up, so that a broken lower tier stops nobody."""


class BlockManager:
    """Moves blocks between ``owned`` tiers, the highest first, and ``lower`` ones below them.

    With ``offload="drop"``, a tier evicts without waiting for a lower tier; with ``"wait"``, it
    evicts a block only once a lower tier has it. ``offload_on`` says when blocks are offered:
    at ``registration``, or, where evictions do not wait, when usage passes the tier's
    ``watermark``. ``copy`` moves the bytes; ``admission`` is asked before each copy. Blocks in
    lower tiers bear the ``fingerprint``, and those with another are not found.

    Without ``threads``, nothing moves but by :meth:`step`. Raises TierError.
    """

    def __init__(  # noqa: PLR0913  all but the first two named
        self,
        owned: Sequence[OwnedTier],
        lower: Sequence[LowerTier] = (),
        *,
        offload: Literal["drop", "wait"] = "drop",
        offload_on: Literal["registration", "watermark"] = "registration",
        copy: Copy = copy_blocks,
        admission: CopyAdmission = admit_all,
        fingerprint: int = 0,
        threads: bool = True,
        registry: Registry | None = None,
    ) -> None:
        if offload not in {"drop", "wait"} or offload_on not in {"registration", "watermark"}:
            raise TierError(f"offload={offload!r} on {offload_on!r}; it is drop or wait")
        if not owned:
            raise TierError("a block manager needs a tier")
        registry = REGISTRY if registry is None else registry
        self._mover = Mover(
            owned,
            lower,
            copy=copy,
            admission=admission,
            fingerprint=fingerprint,
            registry=registry,
        )
        self._pools = [tier.pool for tier in self._mover.owned]
        self._waits = offload == "wait"
        self._on_watermark = offload_on == "watermark" and not self._waits
        last = len(owned) if lower else len(owned) - 1
        self._offloads = [OffloadQueue(pool) for pool in self._pools[:last]]
        self._failures: dict[Key, int] = {}
        self._onboards = OnboardQueue(prefetch_max=self._pools[0].total_blocks)
        self._changed = threading.Condition()
        self._pending: dict[Hashable, set[OnboardCall]] = {}
        self._busy = 0
        self._limit = LogLimit()
        self._closed = False
        for tier in range(last):
            pool = self._pools[tier]
            pool.on_registered = functools.partial(self._registered, tier)
            if self._waits:
                pool.keep_unsaved(True)
        self._threads: list[threading.Thread] = []
        when_forked(self)
        if threads:
            self._start("onboard", self._step_up, lambda: self._onboards.has_work)
            self._start("offload", self._step_down, lambda: any(map(len, self._offloads)))

    def match(
        self, keys: Sequence[Key], request: Hashable | None = None, *, tier: int = 0
    ) -> list[RegisteredBlock]:
        """Return the blocks of the leading keys that are in a tier, as :meth:`BlockPool.match`.

        The keys after them that are hot are prefetched.
        """
        pool = self._pools[tier]
        found = pool.match(keys, request)
        hot = set(pool.wants_prefetch(keys[len(found) :]))
        if hot:
            self.prefetch(keys, tier=tier, only=hot)
        return found

    def where(self, keys: Sequence[Key]) -> list[str | None]:
        """Return the name of the highest tier that has each block; None if no tier has it."""
        names: list[str | None] = [None] * len(keys)
        for pool in self._pools:
            for place, there in enumerate(pool.contains(keys)):
                if there and names[place] is None:
                    names[place] = pool.name
        for lower in self._mover.lower:
            missing = [place for place, name in enumerate(names) if name is None]
            if missing:
                found = lower.contains(pool_keys([keys[place] for place in missing]))
                for place, has in zip(missing, found.tolist(), strict=True):
                    if has:
                        names[place] = lower.name
        return names

    def onboard(
        self,
        keys: Sequence[Key],
        request: Hashable | None = None,
        *,
        tier: int = 0,
        timeout_s: float | None = None,
    ) -> Future[list[RegisteredBlock]]:
        """Bring a chain of blocks to a tier, from wherever they are.

        The future resolves with the leading blocks that some tier had, held for ``request``; at
        once if the target has them all. Or it fails with TierError: no room within ``timeout_s``
        (by default that of :meth:`BlockPool.reserve`), a copy that failed or was not admitted, or
        the request was released. It may be cancelled at any moment until the copy starts.
        """
        until = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        wanted = OnboardCall(keys, tier, request, until)
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

    def prefetch(self, keys: Sequence[Key], *, tier: int = 0, only: set[Key] | None = None) -> None:
        """Bring blocks of a chain to a tier when no onboard waits, if there is room at once.

        ``only`` names those of ``keys`` that are wanted.
        """
        chosen = [place for place, key in enumerate(keys) if only is None or key in only]
        parents = [keys[place - 1] if place else None for place in chosen]
        forgotten = self._onboards.prefetch(tier, [keys[place] for place in chosen], parents)
        self._mover.drop(tier, forgotten, TransferClass.PREFETCH, "overflow")
        self._notify()

    def release(self, request: Hashable) -> None:
        """Release all that a request has in any owned tier, and cancel what it waits for."""
        with self._changed:
            pending = self._pending.pop(request, set())
            for wanted in pending:
                wanted.is_released = True
        for wanted in pending:
            wanted.future.cancel()  # one that is copied fails when the copy has ended
        for pool in self._pools:
            pool.release(request)

    def step(self) -> bool:
        """Do the next piece of work: an onboard, else a batch of prefetches, else one of offloads.
        Return whether there was any. This is for managers without threads.
        """
        return self._step_up() or self._step_down()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to move. Return False if that takes longer than ``timeout_s``,
        by default :data:`WAIT_S`.
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
        """End the copy that is under way, fail onboards that wait, and forget offloads. The tiers
        stay open, and evict what is in no lower tier. A second call does nothing.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a future's callback may close
                thread.join()
        for pool, queue in zip(self._pools, self._offloads, strict=False):
            pool.on_registered = None
            pool.keep_unsaved(False)
            queue.clear()
        self._onboards.clear()
        with self._changed:
            left = [wanted for pending in self._pending.values() for wanted in pending]
        for wanted in left:
            self._fail(wanted, TierError("the block manager was closed"))

    def __enter__(self) -> BlockManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Onboard and prefetch.

    def _find(self, key: Key, target: int) -> OnboardSource:
        """Hold a block in the target, else in the next tier below, else in one above."""
        count = len(self._pools)
        for tier in (*range(target, count), *range(target)):
            block = self._pools[tier].find(key)
            if block is not None:
                return OnboardSource(tier, block)
        return OnboardSource(count)

    def _sources(self, wanted: OnboardCall) -> list[OnboardSource]:
        """Find an onboard's blocks where they are now, and hold them."""
        sources = []
        for key in wanted.keys:
            source = self._find(key, wanted.target)
            if source.block is None and not self._mover.lower:
                break
            sources.append(source)
        return sources

    def _look(self, wanted: OnboardCall) -> None:
        """Answer an onboard whose blocks are all there, or reserve room for those that are not."""
        sources = self._sources(wanted)
        missing = sum(source.is_elsewhere(wanted.target) for source in sources)
        if not self._hold(wanted, sources, [], only_if=not missing):
            # While it waits it holds nothing that another one may wait for.
            _release(_held(sources))
            self._reserve(wanted, missing)
        elif wanted.begin():
            self._carry_out(wanted)

    def _hold(
        self,
        wanted: OnboardCall,
        sources: list[OnboardSource],
        room: list[MutableBlock],
        *,
        only_if: bool,
    ) -> bool:
        """Let an onboard that goes on have all that it needs. Return whether it does."""
        with self._changed:
            holds = only_if and not wanted.future.done()
            if holds:
                wanted.sources, wanted.room = sources, room
            return holds

    def _reserve(self, wanted: OnboardCall, count: int) -> None:
        left_s = max(wanted.until - time.monotonic(), 0.0)
        try:
            reservation = self._pools[wanted.target].reserve(wanted, count, timeout_s=left_s)
        except TierError as error:
            self._fail(wanted, error)
            return
        wanted.reservation = reservation
        reservation.add_done_callback(functools.partial(self._reserved, wanted))
        if wanted.future.cancelled():  # between the two
            reservation.cancel()

    def _reserved(self, wanted: OnboardCall, reservation: Future[list[MutableBlock]]) -> None:
        """Hold the sources of an onboard that has room, unless it needs more room by now."""
        try:
            room = reservation.result()
        except CancelledError:
            return
        except TierError as error:
            self._fail(wanted, error)
            return
        pool, sources = self._pools[wanted.target], self._sources(wanted)
        missing = sum(source.is_elsewhere(wanted.target) for source in sources)
        if self._hold(wanted, sources, room[:missing], only_if=missing <= len(room)):
            pool.drop_all(room[missing:])
            self._onboards.put(wanted)
            self._notify()
            return
        pool.drop_all(room)
        _release(_held(sources))
        if not wanted.future.done():
            # Blocks of the target were evicted meanwhile. This is enough, whatever else goes.
            self._reserve(wanted, len(wanted.keys))

    def _ended(self, wanted: OnboardCall, _: Future[list[RegisteredBlock]]) -> None:
        """Let go of everything, however the onboard has ended."""
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
        prefetch = self._onboards.take_prefetch()
        if prefetch is not None:
            self._prefetch(*prefetch)
        return prefetch is not None

    def _carry_out(self, wanted: OnboardCall) -> None:
        """Resolve the future of an onboard that has begun."""
        try:
            blocks = self._bring(wanted)
        except UnsettledError as error:
            wanted.let_go()  # the mover keeps what may still be written
            wanted.future.set_exception(TierError(f"an onboard has not ended: {error}"))
        except Exception as error:
            known = isinstance(error, TierError)
            failed = error if known else TierError(f"an onboard failed: {error!r}")
            wanted.future.set_exception(failed)
        else:
            wanted.future.set_result(blocks)

    def _bring(self, wanted: OnboardCall) -> list[RegisteredBlock]:
        pool = self._pools[wanted.target]
        missing = [
            place
            for place, source in enumerate(wanted.sources)
            if source.is_elsewhere(wanted.target)
        ]
        brought = self._mover.bring(
            kind=TransferClass.ONBOARD,
            target=wanted.target,
            keys=[wanted.keys[place] for place in missing],
            parents=[wanted.keys[place - 1] if place else None for place in missing],
            found=[wanted.sources[place].held() for place in missing],
            room=wanted.room,
        )
        if brought is None:
            raise TierError(f"a copy of {len(missing)} blocks was not admitted")
        ends = missing[len(brought)] if len(brought) < len(missing) else len(wanted.sources)
        blocks = [pool.find(key, wanted.request) for key in wanted.keys[:ends]]
        pool.drop_all(brought)
        if wanted.is_released:
            for block in blocks:
                if block is not None:
                    block.release()
            raise TierError(f"request {wanted.request!r} was released")
        return [block for block in blocks if block is not None]

    def _prefetch(self, target: int, wanted: list[tuple[Key, Key | None]]) -> None:
        pool = self._pools[target]
        there = pool.contains([key for key, _ in wanted])
        left = [one for one, has in zip(wanted, there, strict=True) if not has]
        sources = [(self._find(key, target).held(), key, parent) for key, parent in left]
        if not self._mover.lower:
            sources = [one for one in sources if one[0] is not None]
        sources.sort(key=lambda one: one[0] is None)
        room = pool.try_reserve(self, len(sources)) if sources else []
        held: list[MutableBlock | RegisteredBlock] = [one[0][1] for one in sources if one[0]]
        if room is None:
            self._mover.drop(target, len(sources), TransferClass.PREFETCH, "full")
        else:
            try:
                brought = self._mover.bring(
                    kind=TransferClass.PREFETCH,
                    target=target,
                    keys=[key for _, key, _ in sources],
                    parents=[parent for _, _, parent in sources],
                    found=[found for found, _, _ in sources],
                    room=room,
                )
            except Exception as error:
                self._warn("a prefetch to", pool.name, error)
                self._mover.drop(target, len(sources), TransferClass.PREFETCH, "failed")
                if isinstance(error, UnsettledError):
                    return  # the mover keeps what may still be written
            else:
                if brought is None:
                    self._mover.drop(target, len(sources), TransferClass.PREFETCH, "refused")
                held += brought or ()
            held += room
        _release(held)

    # Offload.

    def _registered(self, tier: int, blocks: list[RegisteredBlock]) -> None:
        pool = self._pools[tier]
        if not self._on_watermark:
            self._offer(tier, [block.weak() for block in blocks])
        elif pool.offload_due:
            self._offer(tier, pool.coldest(BATCH))

    def _offer(self, tier: int, blocks: list[WeakBlock]) -> None:
        dead = self._offloads[tier].put(blocks)
        self._mover.drop(tier, dead, TransferClass.OFFLOAD, "gone")
        self._notify()

    def _step_down(self) -> bool:
        """Offload a batch. Return False if there was none, or if it all waits for another try."""
        for tier, queue in enumerate(self._offloads):
            blocks = queue.take()
            if not blocks:
                continue
            try:
                left, reason = self._mover.offload(tier, blocks)
            except Exception as error:
                self._warn("an offload of", self._pools[tier].name, error)
                self._mover.drop(tier, len(blocks), TransferClass.OFFLOAD, "failed")
                left, reason = blocks, "failed"
            if not self._waits:
                return True
            for block in blocks:
                if block not in left:
                    self._failures.pop(block.key, None)
            again = [block for block in left if reason == "full" or self._try_again(tier, block)]
            queue.put(again)
            if len(again) < len(blocks):
                return True
        return False

    def _warn(self, what: str, tier: str, error: Exception) -> None:
        """Log a failure, unless one of its kind was logged a moment ago; counters have them all."""
        unsaid = self._limit.passes(what, tier, kind_of(error))
        if unsaid is not None:
            _logger.warning("beluga: %s tier %s failed: %s%s", what, tier, error, and_more(unsaid))

    def _try_again(self, tier: int, block: WeakBlock) -> bool:
        failures = self._failures.get(block.key, 0) + 1
        if failures < _ATTEMPTS_MAX:
            self._failures[block.key] = failures
            return True
        self._failures.pop(block.key, None)
        self._pools[tier].mark_saved([block.key])
        self._mover.drop(tier, 1, TransferClass.OFFLOAD, "given_up")
        return False

    # Threads.

    def _forget(self) -> None:
        """Be closed in a forked child, which has none of the threads."""
        self._changed = threading.Condition()
        self._closed = True
        self._threads = []

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._onboards.has_work or any(map(len, self._offloads))

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


def _held(sources: Sequence[OnboardSource]) -> list[RegisteredBlock]:
    return [source.block for source in sources if source.block is not None]


def _release(held: Sequence[MutableBlock | RegisteredBlock]) -> None:
    """Release handles, the last one first."""
    for block in reversed(held):
        block.release()
