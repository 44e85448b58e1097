# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The scheduler's side: it decides what is loaded into which blocks, and which blocks are saved.

*Loads.* A request is looked up when it is first considered, for blocks beyond those in the engine's
own prefix cache. Its hits stay pinned until every rank has loaded them. At least one token is left
to compute. A request with a failed load is neither looked up nor saved again, because the same hit
would fail again.

*Saves.* A block is offered with the step that completes it. But a step that loads may compute on
what a failed load leaves behind, also for other requests that share those blocks, and on other
ranks than the one where it fails. So no step with loads saves, nor does any later step until all
ranks have reported that they have loaded. A block that is not offered then is offered with the next
step that may save, or when the request ends. (Asynchronous loads end before their request is
scheduled, so they stop no saves.)
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

from beluga.connectors.vllm.onboarding import Onboarding, Worth
from beluga.connectors.vllm.steps import BlockRange, Loaded, Orders, add_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from beluga.connectors.vllm.counters import Counters
    from beluga.connectors.vllm.events import Announcements
    from beluga.connectors.vllm.lookups import Lookups
    from beluga.connectors.vllm.names import BlockNames
    from beluga.connectors.vllm.settings import VllmSettings
    from beluga.connectors.vllm.steps import Report
    from beluga.meta import Pins


ExtraKeys: TypeAlias = "Callable[[Any, int, int], Sequence[Sequence[Any] | None]]"
"""A function from blocks [start, stop) of a request to what their hashes cover beside tokens, in
the form of vLLM's BlockStored."""


@dataclasses.dataclass(slots=True)
class Tracked:
    """The state of one request. Numbers count blocks."""

    request: Any
    local: int = -1  # blocks in the engine's own cache at the lookup; -1 without a lookup
    hits: int = 0  # further blocks in the pool
    pins: Pins | None = None
    onboarding: Onboarding | None = None  # while blocks may come from below the pool
    loaded: range = range(0)  # blocks that were loaded, which the pool has
    loaded_ids: frozenset[int] = frozenset()
    saved: int = 0  # leading blocks that were offered or need no save
    ordered: bool = False  # a save was ordered; the workers report when it has ended
    spoiled: bool = False  # a load failed


class Schedule:
    """Tracks the engine's requests. Only the scheduler's thread calls it.

    ``block_ids_of(request id)`` returns the engine's blocks of a request. ``announcements`` is told
    of blocks that will be saved; ``names`` says what the engine calls them, with their extra keys.
    """

    def __init__(  # noqa: PLR0913  all but the first three named
        self,
        settings: VllmSettings,
        lookups: Lookups,
        counters: Counters,
        *,
        block_size: int,
        block_ids_of: Callable[[str], Sequence[int]],
        extra_keys_of: ExtraKeys,
        announcements: Announcements | None = None,
        names: BlockNames | None = None,
    ) -> None:
        self._asynchronous = settings.load == "async"
        self._onboard_s = settings.onboard_ms / 1000
        self._worth = Worth(settings, block_size)
        self._loads_at_all, self._saves_at_all = settings.loads, settings.saves
        self._lookups, self._counters = lookups, counters
        self._block_size = block_size
        self._block_ids_of, self._extra_keys_of = block_ids_of, extra_keys_of
        self._announcements, self._names = announcements, names
        self._requests: dict[str, Tracked] = {}
        self._loads: list[BlockRange] = []  # for the next step
        self._late: list[BlockRange] = []  # saves of ended requests, for the next step
        # requests loading before a forward without a report of success
        self._loading: set[str] = set()
        self._load_reports: dict[str, Loaded] = {}

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that the pool has for a request, and whether they load beside the
        forwards. None means that more are on their way to the pool: the engine asks again.
        """
        tracked = self._track(request)
        local = computed_tokens // self._block_size
        if tracked.spoiled or not self._loads_at_all:
            return 0, False
        if tracked.local != local and not self._look_up(tracked, local):
            return None, False
        tokens = tracked.hits * self._block_size
        return tokens, self._asynchronous and tokens > 0

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """Note that the engine has blocks for a request and wants ``tokens`` from the pool in
        them.
        """
        tracked = self._track(request)
        if tokens == 0:
            if not tracked.loaded_ids or not self._asynchronous:
                self._forget_lookup(tracked)
            return
        count = tokens // self._block_size
        first, last = tracked.local, tracked.local + count
        ids = list(block_ids[first:last])
        digests = self._lookups.digests(request, first, last)
        self._loads.append(BlockRange(request.request_id, b"".join(digests), ids))
        tracked.loaded, tracked.loaded_ids = range(first, last), frozenset(ids)
        tracked.local, tracked.hits = -1, 0
        if not self._asynchronous:
            self._loading.add(request.request_id)

    def orders(self, scheduled_tokens: dict[str, int], preempted: Sequence[str]) -> Orders:
        """Return the workers' orders for the next step."""
        orders = Orders(self._loads, self._late, list(preempted))
        self._loads, self._late = [], []
        if self._saves_at_all and not self._loading:
            for name, tokens in scheduled_tokens.items():
                tracked = self._requests.get(name)
                if tracked is not None:
                    known = tracked.request.num_computed_tokens + tokens
                    orders.saves += self._save(tracked, known, None)
        return orders

    def reported(self, report: Report | None, invalid_block_ids: set[int]) -> None:
        """Take what the workers reported after a step."""
        for name, part in report.loaded.items() if report else ():
            loaded = add_loaded(self._load_reports, name, part)
            if loaded.ranks < len(self._lookups.ranks):
                continue
            del self._load_reports[name]
            tracked = self._requests.get(name)
            first = tracked.loaded.start if tracked else 0
            tokens = loaded.blocks * self._block_size
            self._counters.add(hit_tokens=tokens)
            self._lookups.saved(tokens, self._worth.compute_s(first, loaded.blocks))
            self._loading.discard(name)
            if tracked:
                self._unpin(tracked)
        if invalid_block_ids:
            for name, tracked in self._requests.items():
                if not (tracked.loaded_ids | set(self._block_ids_of(name))) & invalid_block_ids:
                    continue
                tracked.spoiled = True

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """Note that a request has ended. Returns whether its blocks must stay until the workers
        have saved.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._unpin(tracked)
        if self._saves_at_all and not self._loading:
            in_flight = getattr(request, "num_in_flight_tokens", 0)
            known = min(
                max(0, request.num_computed_tokens - in_flight), len(block_ids) * self._block_size
            )
            self._late += self._save(tracked, known, block_ids)
        return tracked.ordered

    def reset(self) -> None:
        """Forget the pool. Its blocks, and what running requests have computed, may belong to
        weights that the engine no longer uses.
        """
        self._lookups.reset()
        for tracked in self._requests.values():
            tracked.spoiled = True
            self._forget_lookup(tracked)

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = Tracked(request)
        return tracked

    def _look_up(self, tracked: Tracked, local: int) -> bool:
        """Look up a request that starts, or that starts again after it was preempted. Returns False
        if blocks that a lower tier has are on their way.
        """
        self._forget_lookup(tracked)
        tracked.loaded, tracked.loaded_ids, tracked.saved = range(0), frozenset(), 0
        request = tracked.request
        last = (request.num_tokens - 1) // self._block_size
        digests = self._lookups.digests(request, local, last)
        tracked.hits, tracked.pins = self._lookups.pin(digests)
        if tracked.onboarding is None:
            tracked.onboarding = Onboarding(self._lookups, self._onboard_s, self._worth)
        cached = local + tracked.hits
        if tracked.onboarding.waits(tracked.pins, cached, lambda: digests[tracked.hits :]):
            return False
        tracked.onboarding = None
        tracked.local = local if tracked.pins is not None else -1
        return True

    def _forget_lookup(self, tracked: Tracked) -> None:
        self._unpin(tracked)
        tracked.local, tracked.hits = -1, 0

    def _unpin(self, tracked: Tracked) -> None:
        pins, tracked.pins = tracked.pins, None
        self._lookups.release(pins)

    def _save(
        self, tracked: Tracked, known_tokens: int, block_ids: Sequence[int] | None
    ) -> list[BlockRange]:
        """Return orders for the blocks of ``known_tokens`` leading tokens that were not offered
        yet.
        """
        request = tracked.request
        last = min(known_tokens // self._block_size, len(request.block_hashes))
        if last <= tracked.saved or tracked.spoiled:
            return []
        ids = self._block_ids_of(request.request_id) if block_ids is None else block_ids
        loaded = tracked.loaded
        parts = (
            (tracked.saved, min(last, loaded.start)) if loaded else (tracked.saved, last),
            (max(tracked.saved, loaded.stop), last) if loaded else (last, last),
        )
        tracked.saved = last
        orders = [
            self._save_range(request, start, list(ids[start:stop]))
            for start, stop in parts
            if start < stop
        ]
        tracked.ordered = tracked.ordered or bool(orders)
        return orders

    def _save_range(self, request: Any, start: int, ids: list[int]) -> BlockRange:
        stop = start + len(ids)
        digests = self._lookups.digests(request, start, stop)
        extra_keys = self._extra_keys_of(request, start, stop)
        if self._announcements is not None:
            for block, digest in enumerate(digests, start):
                self._announcements.ordered(digest, request, block, extra_keys[block - start])
        names = b""
        if self._names is not None:
            names = self._names.of(request, start, stop, extra_keys)
        return BlockRange(request.request_id, b"".join(digests), ids, names)
