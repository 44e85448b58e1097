# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The scheduler's side: it decides what is loaded into which blocks, and which blocks are saved.

*Loads.* A request is looked up when it is first considered, for blocks beyond those in the engine's
own prefix cache. Its hits stay pinned until every rank has loaded them, and the orders say where
they lie. A forward waits only for short loads (``load_timing``). At least one token is left to
compute. A request with a failed load is not looked up again, because the same hit would fail again.

*Hints.* A request's hint is for the blocks that it finds when it starts, and for those that it
saves. The workers give it concurrently with the engine (``hints``).

*Saves.* A step may compute on what a failed load leaves behind: a load of ours or of another
connector (under ``MultiConnector``), on any rank, for any request that shares the blocks. vLLM
reports what a step failed to load with that step's output. So a block is saved only after vLLM has
taken the output of the step that completed it; the workers get the order with the next step. A
request that ends keeps its blocks until then. Tokens of steps whose output is still to come do not
count, nor do speculative tokens, before they are accepted.

Blocks that depend on a failed load are not saved until they are computed again. Such blocks stay in
vLLM's prefix cache, where other requests find them: :class:`Unverified` has them. The same holds
for a request whose logits have NaN, if vLLM counts them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.connectors.hints import NO_HINT, RequestHint
from beluga.connectors.vllm.blocks import ExtraKeys, OneGroup
from beluga.connectors.vllm.load_timing import LoadTiming
from beluga.connectors.vllm.lookups import LookupWait, Worth
from beluga.connectors.vllm.steps import BlockRange, HintedBlocks, Loaded, Orders, add_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from beluga.connectors.vllm.blocks import BlockNames, Blocks, Offer
    from beluga.connectors.vllm.counters import ConnectorCounters
    from beluga.connectors.vllm.events import Announcements
    from beluga.connectors.vllm.hints import Requests
    from beluga.connectors.vllm.lookups import Elsewhere, Lookups
    from beluga.connectors.vllm.settings import VllmSettings
    from beluga.connectors.vllm.steps import StepReport
    from beluga.index import Pins


class Unverified:
    """The engine's blocks, by ids below ``block_count``, that may hold wrong KV: blocks based on a
    failed load, or computed before a reset.

    vLLM leaves such blocks in its own prefix cache while the request that loads them computes them
    again. Another request that finds them meanwhile, or after the first one was aborted, computes
    on wrong KV. None of that may be saved. A block leaves this set when a request has computed it
    from valid ones.
    """

    def __init__(self, block_count: int) -> None:
        self._marked = np.zeros(block_count, dtype=bool)
        self._any = False

    def __bool__(self) -> bool:
        return self._any

    def mark(self, block_ids: Sequence[int]) -> None:
        """Add blocks."""
        if block_ids:
            self._marked[block_ids] = self._any = True

    def mark_all(self) -> None:
        """Add every block."""
        self._marked[:] = self._any = True

    def clear(self, block_ids: Sequence[int]) -> None:
        """Remove blocks that hold valid KV."""
        if self._any and block_ids:
            self._marked[block_ids] = False
            self._any = bool(self._marked.any())

    def first(self, block_ids: Sequence[int]) -> int | None:
        """Return the position of the first of these blocks in the set."""
        if not self._any or not block_ids:
            return None
        positions = np.flatnonzero(self._marked[block_ids])
        return int(positions[0]) if len(positions) else None


@dataclasses.dataclass(slots=True)
class Tracked:
    """The state of one request. Numbers are counts of blocks."""

    request: Any
    hint: RequestHint = NO_HINT
    local: int = -1  # blocks in the engine's own cache at the lookup; -1 without a lookup
    hits: int = 0  # further blocks in the pool
    pins: Pins | None = None
    elsewhere: Elsewhere | None = None  # the last of the hits, if other ranks stored them
    concurrent: bool = False  # loads run concurrently with forwards
    onboarding: LookupWait | None = None  # while blocks may arrive from lower tiers
    failed: bool = False  # a load from the pool failed
    starting: bool = False  # looked up; blocks are assigned next
    held: bool = False  # has blocks with which no step has computed
    cached: int = 0  # leading blocks that the engine's own cache had at the start
    scheduled: int = 0  # tokens (not blocks) of the steps since the start
    loaded: range = range(0)  # blocks that were loaded, which the pool has
    loaded_ids: frozenset[int] = frozenset()
    saved: int = 0  # leading blocks that were offered or need no save
    sound: int | None = None  # leading blocks that depend on nothing in doubt; None: all
    begun: bool = False  # whether it is known what the request computes with
    first_attempt_s: float = 0.0  # time of the first attempt to determine that
    shared: bool = True  # the blocks have names that other processes can find
    ordered: bool = False  # a save was ordered; the workers report its end
    hinted: bool = False  # the blocks that it found have its hint

    def start(self) -> None:
        """Forget the blocks that it had before it was preempted."""
        self.starting, self.held, self.scheduled = False, True, 0
        self.loaded, self.loaded_ids = range(0), frozenset()
        self.saved, self.sound = 0, None

    def settled_tokens(self) -> int:
        """Return the leading tokens that were computed by steps whose output vLLM has taken."""
        in_flight: int = self.request.num_in_flight_tokens
        if in_flight >= self.scheduled:  # loads that began with the first step are not reported
            return 0
        computed: int = self.request.num_computed_tokens
        return max(0, computed - in_flight)


@dataclasses.dataclass(slots=True)
class FinishedRequest:
    """A request that has ended, with blocks that are saved unless a load proves to have failed."""

    tracked: Tracked
    tokens: int
    block_ids: Any  # as Blocks takes them


class Schedule:
    """Tracks the engine's requests. Only the scheduler's thread calls it.

    ``block_ids_of(request id)`` returns the blocks that a request has, of the engine's
    ``block_count``. ``announcements`` receives the blocks that will be saved; ``names`` returns the
    engine's names for them, with their extra keys. ``blocks`` serves a hybrid model, whose blocks
    of ``block_size`` tokens have parts in several groups of layers. ``hints`` reads the hints of
    requests.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first three
        self,
        settings: VllmSettings,
        lookups: Lookups,
        counters: ConnectorCounters,
        *,
        block_size: int,
        block_count: int,
        block_ids_of: Callable[[str], Any],
        extra_keys_of: ExtraKeys,
        announcements: Announcements | None = None,
        names: BlockNames | None = None,
        blocks: Blocks | None = None,
        hints: Requests | None = None,
    ) -> None:
        self._hints = hints
        self._hinted: list[HintedBlocks] = []  # for the next step
        self._timing = LoadTiming(settings.load, lambda: lookups.block_bytes)
        self._onboard_s = settings.onboard_ms / 1000
        self._worth = Worth(settings, block_size)
        self._loads_at_all, self._saves_at_all = settings.loads, settings.saves
        self._lookups, self._counters = lookups, counters
        self._block_size = block_size
        self._block_ids_of = block_ids_of
        self._blocks: Blocks = blocks or OneGroup(
            lookups,
            block_size=block_size,
            extra_keys_of=extra_keys_of,
            announcements=announcements,
            names=names,
        )
        self._requests: dict[str, Tracked] = {}
        self._computing: set[str] = set()  # the requests of the last step that have not ended
        self._loads: list[BlockRange] = []  # for the next step
        self._due: dict[str, Tracked] = {}  # scheduled, and not yet checked for saves
        self._ended: list[FinishedRequest] = []
        self._unverified = Unverified(block_count)
        self._load_reports: dict[str, Loaded] = {}

    @property
    def pending(self) -> bool:
        """Whether the next orders may have saves, so that the engine must run one more step."""
        return bool(self._due or self._ended or self._blocks.saving)

    @property
    def saving(self) -> bool:
        """Whether blocks are pinned for saves that end soon."""
        return self._blocks.saving

    def queued(self, request: Any) -> None:
        """Prefetch a waiting request's blocks from lower tiers, if its hints request that or it
        continues a session.
        """
        hint = self._track(request).hint
        if not (self._loads_at_all and self._onboard_s > 0):
            return
        if not hint.prefetch and not (self._hints is not None and self._hints.begun(request)):
            return
        if self._lookups.begin(request) and (prefix := self._blocks.find(request, 0)) is not None:
            self._lookups.prefetch(prefix.digests)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that the pool has for a request, and whether they load concurrently
        with forwards. None means that more are on their way to the pool: the engine calls again.
        """
        tracked = self._track(request)
        local = computed_tokens // self._block_size
        if tracked.held:
            # vLLM takes unused blocks back only after a load that failed, ours or another
            # connector's. It then reserves the request's blocks, and would wait forever for a
            # second load concurrently with forwards if it has not twice as many.
            tracked.failed, tracked.held = True, False
        tracked.starting, tracked.cached = True, local
        if not tracked.begun and not self._begin(tracked):
            return None, False
        if tracked.failed or not tracked.shared or not self._loads_at_all:
            return 0, False
        if tracked.local != local and not self._look_up(tracked, local):
            return None, False
        idle = self._computing <= {request.request_id}
        tracked.concurrent = tracked.hits > 0 and self._timing.concurrent(tracked.hits, idle=idle)
        return tracked.hits * self._block_size, tracked.concurrent

    def allocated(self, request: Any, block_ids: Any, tokens: int) -> None:
        """Record that the engine has allocated blocks for a request, with ``tokens`` to load from
        the pool.
        """
        tracked = self._track(request)
        if tracked.starting:
            tracked.start()
            self._blocks.drop(request)
            if self._hints is not None and not tracked.hinted:
                hits = tracked.cached + tokens // self._block_size
                self._hint_hits(self._hints, tracked, hits)
        if tokens == 0:
            if not tracked.loaded_ids or not tracked.concurrent:
                self._forget_lookup(tracked)
            return
        count = tokens // self._block_size
        first, last = tracked.local, tracked.local + count
        loads = self._ordered(tracked, first, last, block_ids)
        for load in loads:
            load.concurrent = tracked.concurrent
        if not tracked.concurrent:
            self._timing.planned(count)
        self._loads += loads
        ids = frozenset(block for load in loads for block in load.block_ids)
        tracked.loaded, tracked.loaded_ids = range(first, last), ids
        tracked.local, tracked.hits = -1, 0

    def _hint_hits(self, hints: Requests, tracked: Tracked, hits: int) -> None:
        """Hint the leading blocks that were hits when a request started."""
        request, hint = tracked.request, tracked.hint
        tracked.hinted = True
        own = hints.own_from(request, hits)
        if not (tracked.begun and tracked.shared and self._lookups.ready):
            return
        ranges = (hint.for_hits(), 0, own), (hint.for_own(), own, hits)
        for given, first, last in ranges:
            if given is not None and first < last:
                digests = self._blocks.digests(request, first, last)
                self._hinted.append(HintedBlocks(given, b"".join(digests), len(digests)))

    def orders(
        self,
        scheduled_tokens: dict[str, int],
        preempted: Sequence[str],
        offers: Mapping[str, Sequence[Offer]] | None = None,
    ) -> Orders:
        """Return the workers' orders for the next step. ``offers`` are states that it makes."""
        orders = Orders(self._loads, [], list(preempted), self._lookups.weights, self._hinted)
        self._loads, self._hinted = [], []
        self._timing.began()
        self._computing = set(scheduled_tokens)
        for name in (*scheduled_tokens, *preempted):
            if name in self._requests:
                self._requests[name].held = False
        if not self._saves_at_all:
            return orders
        for finished in self._ended:
            orders.saves += self._last_save(finished)
        self._ended = []
        for name, tracked in list(self._due.items()):
            if tracked.request.num_computed_tokens == 0:  # preempted: it computes again
                self._blocks.drop(tracked.request)
            orders.saves += self._save(tracked, tracked.settled_tokens(), None)
            if tracked.request.num_in_flight_tokens == 0:
                del self._due[name]
        # In the order in which vLLM allocated their blocks
        for name, tokens in scheduled_tokens.items():
            started = self._requests.get(name)
            if started is not None:
                self._due[name] = started
                self._inspect(started)
                started.scheduled += tokens
                self._hold(started, tokens, offers.get(name, ()) if offers else ())
        return orders

    def reported(self, report: StepReport | None, invalid_block_ids: set[int]) -> None:
        """Take what the workers reported after a step: how loads from the pool ended, and blocks
        that any connector failed to load.
        """
        for name, part in report.loaded.items() if report else ():
            loaded = add_loaded(self._load_reports, name, part)
            if loaded.ranks < self._lookups.worker_count:
                continue
            del self._load_reports[name]
            tracked = self._requests.get(name)
            first = tracked.loaded.start if tracked else 0
            count = loaded.blocks
            if self._blocks.whole:
                count = self._loaded_whole(tracked, loaded)
            else:
                self._timing.took(count, loaded.seconds)
            tokens = count * self._block_size
            self._counters.add(hit_tokens=tokens)
            self._lookups.saved(tokens, self._worth.compute_s(first, count))
            if tracked:
                self._unpin(tracked)
        if report is not None and report.ended:
            self._blocks.ended(report.ended)
        if invalid_block_ids:
            self._failed_loads(invalid_block_ids)

    def _loaded_whole(self, tracked: Tracked | None, loaded: Loaded) -> int:
        """Return how many blocks a request got, which are all or none. With none it computes them,
        and is not looked up again.
        """
        if tracked is None:
            return 0
        if 0 < len(tracked.loaded_ids) == loaded.blocks:
            return len(tracked.loaded)
        tracked.failed = True
        tracked.loaded, tracked.loaded_ids = range(0), frozenset()
        return 0

    def offered(self, request: Any, offers: Sequence[Offer]) -> None:
        """Record the states of a request that ends now."""
        tracked = self._requests.get(request.request_id)
        if self._saves_at_all and tracked is not None:
            self._hold(tracked, 0, offers)

    def finished(self, request: Any, block_ids: Any) -> bool:
        """Note that a request has ended. Returns whether its blocks must stay until the workers
        have saved.
        """
        self._computing.discard(request.request_id)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._due.pop(request.request_id, None)
        self._unpin(tracked)
        tokens = min(tracked.settled_tokens(), self._blocks.room(block_ids))
        if self._saves_at_all and self._unsaved(tracked, tokens):
            # vLLM calls this before it passes on what the same step failed to load.
            self._ended.append(FinishedRequest(tracked, tokens, self._blocks.copied(block_ids)))
            return True
        self._blocks.drop(request)
        self._lookups.end(request)
        return tracked.ordered

    def reset(self) -> None:
        """Drop all state of the pool. Its blocks, and what the engine has computed, may belong to
        weights that are no longer in use.
        """
        self._lookups.reset()
        self.invalidate_all()

    def invalidate_all(self) -> None:
        """Neither load nor save what the engine has computed, because it may belong to weights that
        are no longer in use.
        """
        self._unverified.mark_all()
        for tracked in self._requests.values():
            tracked.sound = tracked.saved = 0
            self._forget_lookup(tracked)
        for finished in self._ended:
            finished.tracked.sound = 0

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            hint = self._hints.hint(request) if self._hints is not None else NO_HINT
            tracked = self._requests[request.request_id] = Tracked(request, hint)
        return tracked

    def _begin(self, tracked: Tracked) -> bool:
        """Determine what a new request computes with. Returns False while that is still in
        progress; the request then waits as for blocks from a lower tier.
        """
        shared = self._lookups.begin(tracked.request)
        if shared is None:
            now_s = time.monotonic()
            tracked.first_attempt_s = tracked.first_attempt_s or now_s
            if now_s - tracked.first_attempt_s < self._onboard_s:
                return False
        tracked.begun, tracked.shared = True, bool(shared)
        return True

    def _look_up(self, tracked: Tracked, local: int) -> bool:
        """Look up a request that starts, or that starts again after it was preempted. Returns False
        if blocks that a lower tier has are on their way.
        """
        self._forget_lookup(tracked)
        prefix = self._blocks.find(tracked.request, local)
        while prefix is not None:
            count, tracked.pins = self._lookups.pin(prefix.digests)
            tracked.hits = prefix.reach(count)
            if tracked.onboarding is None:
                tracked.onboarding = LookupWait(self._lookups, self._onboard_s, self._worth)
            cached, missing = local + tracked.hits, prefix.digests[count:]
            if tracked.onboarding.waits(tracked.pins, cached, lambda: missing):  # noqa: B023
                return False
            if tracked.pins is not None and not self._blocks.whole:
                tracked.elsewhere = self._lookups.elsewhere(missing)
                tracked.hits += tracked.elsewhere.blocks if tracked.elsewhere else 0
            if tracked.hits or prefix.otherwise is None:
                break
            self._unpin(tracked)
            prefix = prefix.otherwise
        tracked.onboarding = None
        tracked.local = local if prefix is None or tracked.pins is not None else -1
        return True

    def _ordered(self, tracked: Tracked, first: int, last: int, table: Any) -> list[BlockRange]:
        """Return the loads of blocks [first, last), with the places of the blocks."""
        other = tracked.elsewhere
        stop = min(last, first + tracked.hits - (other.blocks if other else 0))
        loads = self._blocks.loads(tracked.request, first, stop, table) if stop > first else []
        if stop - first == tracked.hits or not self._blocks.whole:
            self._lookups.locate(loads, tracked.pins)
        if other is not None and last > stop:
            more = self._blocks.loads(tracked.request, stop, last, table)
            self._lookups.locate(more, other.pins, other.part_count)
            for load in more:
                load.split = other.split
            loads += more
        return loads

    def _forget_lookup(self, tracked: Tracked) -> None:
        self._unpin(tracked)
        tracked.local, tracked.hits = -1, 0

    def _unpin(self, tracked: Tracked) -> None:
        pins, tracked.pins = tracked.pins, None
        other, tracked.elsewhere = tracked.elsewhere, None
        self._lookups.release(pins)
        self._lookups.release(other.pins if other else None)

    def _failed_loads(self, invalid_block_ids: set[int]) -> None:
        """Mark blocks that were not loaded, and everything based on them, as wrong."""
        holders = [(request, self._block_ids_of(name)) for name, request in self._requests.items()]
        holders += [(finished.tracked, finished.block_ids) for finished in self._ended]
        for tracked, ids in holders:
            block = self._blocks.first_block(
                ids, None, lambda held: _first(held, invalid_block_ids)
            )
            if block is not None:
                self._mark_wrong(tracked, ids, block)
            if tracked.loaded_ids & invalid_block_ids:
                tracked.failed = True
                stop = tracked.loaded.start if block is None else block
                tracked.loaded = range(tracked.loaded.start, min(tracked.loaded.stop, stop))
        # A request may have found a block of another one that depends on an invalid block, and the
        # blocks before it elsewhere.
        while any(self._inherits(tracked, ids) for tracked, ids in holders):
            pass

    def _mark_wrong(self, tracked: Tracked, ids: Any, block: int) -> None:
        """Mark a request's blocks from ``place`` on as wrong."""
        tracked.sound = block if tracked.sound is None else min(block, tracked.sound)
        tracked.saved = min(tracked.saved, block)
        self._unverified.mark(self._blocks.ids(ids, block, None))

    def _inherits(self, tracked: Tracked, ids: Any) -> bool:
        """Check the blocks that a request found in the engine's own cache. Returns whether more of
        its blocks are now in doubt.
        """
        block = self._blocks.first_block(ids, tracked.cached, self._unverified.first)
        if block is None or (tracked.sound is not None and tracked.sound <= block):
            return False
        self._mark_wrong(tracked, ids, block)
        return True

    def _inspect(self, tracked: Tracked) -> None:
        """Record what a request computes on in the next step."""
        if tracked.sound is None and not self._unverified:
            return
        ids = self._block_ids_of(tracked.request.request_id)
        if tracked.scheduled == 0:
            self._inherits(tracked, ids)
        if tracked.sound is None:
            return
        if tracked.request.num_computed_tokens <= tracked.sound * self._block_size:
            tracked.sound = None  # vLLM has returned to valid blocks: the rest is computed again
        else:
            self._unverified.mark(self._blocks.ids(ids, tracked.sound, None))

    def _hold(self, tracked: Tracked, tokens: int, offers: Sequence[Offer]) -> None:
        """Keep what a step computes until it is saved. A state may be offered after the blocks
        beside it were.
        """
        if not (tracked.begun and tracked.shared and self._lookups.ready):
            return
        end = self._blocks.hold(tracked.request, tokens, tracked.loaded, offers)
        if end:
            tracked.saved = min(tracked.saved, (end - 1) // self._block_size)

    def _last_save(self, finished: FinishedRequest) -> list[BlockRange]:
        """Return the last orders of a request. The workers report its end after at least one."""
        tracked = finished.tracked
        orders = self._save(tracked, finished.tokens, finished.block_ids)
        self._blocks.drop(tracked.request)
        self._lookups.end(tracked.request)
        return orders if tracked.ordered else [BlockRange(tracked.request.request_id, b"", [])]

    def _save(self, tracked: Tracked, tokens: int, block_ids: Any) -> list[BlockRange]:
        """Return orders for those blocks of this many leading tokens that were not yet offered."""
        request = tracked.request
        if not (tracked.begun and tracked.shared and self._lookups.ready):
            return []
        if not self._lookups.unchanged(request):
            tracked.shared = False
            return []
        has_nans = getattr(request, "num_nans_in_logits", 0) > 0
        if self._last(tracked, tokens) <= tracked.saved and not has_nans:
            return []
        ids = self._block_ids_of(request.request_id) if block_ids is None else block_ids
        if has_nans:
            self._mark_wrong(tracked, ids, tracked.saved)
        unsaved, last = self._unsaved(tracked, tokens), self._last(tracked, tokens)
        self._unverified.clear(self._blocks.ids(ids, tracked.saved, last))
        tracked.saved = max(tracked.saved, last)
        orders = [
            order
            for part in unsaved
            for order in self._blocks.saves(request, part.start, part.stop, ids)
        ]
        if tracked.hint != NO_HINT:
            for order in orders:
                order.hint = tracked.hint
        tracked.ordered = tracked.ordered or bool(orders)
        return orders

    def _unsaved(self, tracked: Tracked, tokens: int) -> list[slice]:
        """Return which blocks of this many leading tokens are valid and not in the pool."""
        first, last, loaded = tracked.saved, self._last(tracked, tokens), tracked.loaded
        before, after = (loaded.start, loaded.stop) if loaded else (last, last)
        ranges = slice(first, min(last, before)), slice(max(first, after), last)
        return [part for part in ranges if part.start < part.stop]

    def _last(self, tracked: Tracked, tokens: int) -> int:
        """Return how many blocks this many leading tokens fill with valid KV."""
        full = min(tokens // self._block_size, self._blocks.hashed(tracked.request))
        return full if tracked.sound is None else min(full, tracked.sound)


def _first(ids: Sequence[int], wanted: set[int]) -> int | None:
    return next((index for index, block in enumerate(ids) if block in wanted), None)
