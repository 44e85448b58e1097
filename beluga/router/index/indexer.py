# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which worker holds which leading blocks of a request, as KV events tell it.

What holds for an index, in one place:

* A rank holds a block, in a tier, from a ``stored`` until the ``removed`` of the same name and tier
  or the rank's ``cleared``. A name stands for one block at a time: storing it again elsewhere lets
  go of the block that it stood for. Other names of the same block go on holding it.
* A block counts for a rank only if all blocks before it do. One that lies behind a gap is
  remembered, and counts again when the gap is filled: so it is in the engine, where a block that
  was evicted in mid-path and computed anew makes those behind it hits again.
* Runs: device blocks from the first on, then host blocks from there, then disk, then the pool's.
* Events of one rank apply in the order in which they are given; lookups run beside them, from any
  thread, and see an event's blocks all or none (beluga/router/index/tree.py).
* Memory is bounded: beyond the limits, what was stored longest ago is forgotten, and counted.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

from beluga._ffi import core, ffi
from beluga._shared import when_forked
from beluga.errors import EventError
from beluga.router.index.dump import Dump
from beluga.router.index.events import Cleared, Removed, RouterEvent, Stored, Tier
from beluga.router.index.matches import Matches
from beluga.router.index.tree import SHARED_RANK, Tree, TreeStat, words
from beluga.router.policy import Query
from beluga.router.worker import Overlap, Worker

log = logging.getLogger(__name__)

WORKERS_MAX = 63  # one word of bits per tier and block
BLOCKS_MAX = 1 << 21
NAMES_PER_BLOCK = 2  # engines with hashes of their own need one for each of them

# What one C call counts (csrc/api/router.h), and what Counts calls it.
_OUTCOMES = ("stored", "repeated", "moved", "removed", "unknown", "evicted", "refused")


@dataclasses.dataclass(slots=True)
class Counts:
    """What became of events, and of the blocks in them."""

    events: int = 0  # applied, in part at least
    stored: int = 0  # blocks held now and not before
    repeated: int = 0  # blocks stored again
    moved: int = 0  # names that stood for another block before
    removed: int = 0
    unknown: int = 0  # removed, or stored without contents, and not known
    evicted: int = 0  # forgotten to make room
    refused: int = 0  # no room
    parent_not_found: int = 0  # events dropped whole
    invalid: int = 0  # events dropped whole: no sequence, no worker's place left
    stale: int = 0  # events whose number was passed already
    gaps: int = 0
    missed: int = 0  # events in those gaps


class Indexer:
    """An index of at most ``workers`` ranks and ``blocks`` distinct blocks under ``names`` names
    (of engines; those that seed their hashes alike share one).

    Raises RouterError for limits that it cannot have.
    """

    def __init__(
        self,
        *,
        workers: int = WORKERS_MAX,
        blocks: int = BLOCKS_MAX,
        names: int | None = None,
    ) -> None:
        self._tree = Tree(
            rank_max=workers,
            block_max=blocks,
            name_max=NAMES_PER_BLOCK * blocks if names is None else names,
        )
        self.workers_max = workers
        self.counts = Counts()
        self._outcome = ffi.new("bl_prefix_outcome *")
        self._forget()  # has the lock
        when_forked(self)
        self._ranks: dict[Worker, int] = {}
        self._workers: list[Worker | None] = [None] * (workers + 1)  # by rank; 0 is the pool
        self._last: dict[Worker, int] = {}
        self._missing: dict[Worker, tuple[int, int]] = {}

    def _forget(self) -> None:
        """In a forked child: the lock's holder is one of the parent's threads."""
        self._lock = threading.Lock()  # changes: the tables of workers, numbers and counts

    def apply(self, event: RouterEvent) -> None:
        """Apply one event. Raises EventError, counted, for one that cannot be: nothing of it is
        applied if its parent is unknown or one of its blocks, or there is no place for its worker;
        all that can be is if some of its blocks are unknown, or have no room.
        """
        with self._lock:
            if self._in_order(event.worker, event.event_id):
                try:
                    status = self._put(event)
                except EventError:
                    self.counts.invalid += 1
                    raise
                self._conclude(event, status)

    def apply_all(self, events: Iterable[RouterEvent]) -> int:
        """Apply events; those that cannot be are logged. How many those were."""
        failed = 0
        for event in events:
            try:
                self.apply(event)
            except EventError as error:
                failed += 1
                log.warning("%s", error)
        return failed

    def find_matches(self, tokens_hashes: Sequence[int], *, early_exit: bool = False) -> Matches:
        """What each worker holds of a request's leading blocks. Workers without the first one have
        no entry. ``early_exit`` stops where one worker alone goes on: counts are lower bounds then.
        """
        runs, shared = self._tree.find(words(tokens_hashes), early_exit)
        held: dict[Worker, Overlap] = {}
        workers = self._workers
        for rank, device, host, disk, pool in runs:
            worker = workers[rank]
            if worker is not None:
                held[worker] = Overlap(device, host - device, disk - host, pool - disk)
        return Matches(held, shared)

    def matches(self, query: Query) -> Matches:
        """find_matches for Router."""
        return self.find_matches(query.hashes)

    def remove_worker(self, worker_id: int) -> None:
        """Forget all ranks of a worker, and what they held."""
        with self._lock:
            for worker in [worker for worker in self._ranks if worker.worker_id == worker_id]:
                rank = self._ranks.pop(worker)
                self._workers[rank] = None
                self._last.pop(worker, None)
                self._missing.pop(worker, None)
                self._tree.clear(rank, self._outcome)
                self._count()

    def clear_shared(self) -> None:
        """Forget what the pool holds: it was made anew."""
        with self._lock:
            self._tree.clear(SHARED_RANK, self._outcome)
            self._count()

    def missing(self) -> dict[Worker, tuple[int, int]]:
        """Take the gaps found since the last call: the first and last number of the events that
        each worker should send again, or else be dumped and restored.
        """
        with self._lock:
            missing, self._missing = self._missing, {}
            return missing

    def restore(self, worker: Worker, events: Iterable[RouterEvent], last_id: int | None) -> int:
        """Build one worker's blocks anew from a dump of it, which stands at event ``last_id``.
        How many events could not be applied.
        """
        with self._lock:
            if (rank := self._ranks.get(worker)) is not None:
                self._tree.clear(rank, self._outcome)
                self._count()
            self._last.pop(worker, None)
            self._missing.pop(worker, None)
        failed = self.apply_all(
            dataclasses.replace(event, event_id=None) for event in events if event.worker == worker
        )
        if last_id is not None:
            with self._lock:
                self._last[worker] = max(last_id, self._last.get(worker, last_id))
        return failed

    def dump(self) -> Iterator[RouterEvent]:
        """Stored events, parents first, that make an equal index of an empty one: all blocks that
        count for somebody. Blocks behind a gap are left out.
        """
        with self._lock:
            ranks = dict(self._ranks)
        dump = Dump()
        for worker, rank in ranks.items():
            yield from dump.of_worker(self._tree.rows(rank), worker)
        yield from dump.of_pool(self._tree.rows(SHARED_RANK))

    def held(self, worker: Worker, tier: Tier) -> int:
        """Names that a worker, or whoever for SHARED, holds blocks by in a tier."""
        if tier is Tier.SHARED:
            return self._tree.held(SHARED_RANK, 0)
        rank = self._ranks.get(worker)
        return 0 if rank is None else self._tree.held(rank, tier)

    def workers(self) -> list[Worker]:
        """All that were heard of and not removed."""
        with self._lock:
            return list(self._ranks)

    @property
    def handle(self) -> core.bl_prefix:
        """The tree as C knows it, for benchmarks."""
        return self._tree.handle

    def stat(self) -> TreeStat:
        """How full the index is."""
        return self._tree.stat()

    def _in_order(self, worker: Worker, number: int | None) -> bool:
        if number is None:
            return True
        last = self._last.get(worker)
        if last is not None and number <= last:
            self.counts.stale += 1
            return False
        if last is not None and number > last + 1:
            self.counts.gaps += 1
            self.counts.missed += number - last - 1
            first, _ = self._missing.get(worker, (last + 1, 0))
            self._missing[worker] = (first, number - 1)
        self._last[worker] = number
        return True

    def _put(self, event: RouterEvent) -> int:
        """Tell the tree. Returns C's status."""
        rank = self._rank_of(event.worker)
        data = event.data
        if isinstance(data, Cleared):
            return self._tree.clear(rank, self._outcome)
        owner, tier = (SHARED_RANK, 0) if event.tier is Tier.SHARED else (rank, int(event.tier))
        if isinstance(data, Removed):
            return self._tree.remove(owner, tier, words(data.block_hashes), self._outcome)
        if isinstance(data, Stored):
            contents = None if data.tokens_hashes is None else words(data.tokens_hashes)
            return self._tree.store(
                owner,
                tier,
                rank,
                data.parent_hash,
                words(data.block_hashes),
                contents,
                self._outcome,
            )
        raise EventError(f"{type(data).__name__} is no KV event")

    def _conclude(self, event: RouterEvent, status: int) -> None:
        """Count, and raise what the status stands for."""
        unknown, refused = self._outcome.unknown, self._outcome.refused
        self._count()
        who = f"worker {event.worker.worker_id}, rank {event.worker.dp_rank}"
        if status == -errno.ENOENT:
            self.counts.parent_not_found += 1
            raise EventError(f"{who}: parent block not found; its stored event is dropped")
        if status == -errno.EINVAL:
            self.counts.invalid += 1
            raise EventError(f"{who}: invalid block sequence; its event is dropped")
        self.counts.events += 1
        if refused:
            raise EventError(f"{who}: the index has no room for {refused} blocks; give it more")
        if unknown:
            raise EventError(f"{who}: block not found, {unknown} of an event's")

    def _count(self) -> None:
        for name in _OUTCOMES:
            if more := getattr(self._outcome, name):
                setattr(self.counts, name, getattr(self.counts, name) + more)
                setattr(self._outcome, name, 0)

    def _rank_of(self, worker: Worker) -> int:
        rank = self._ranks.get(worker)
        if rank is None:
            try:
                rank = self._workers.index(None, 1)
            except ValueError:
                raise EventError(
                    f"worker {worker.worker_id} is one too many: the index was made for "
                    f"{len(self._workers) - 1} ranks"
                ) from None
            self._ranks[worker] = rank
            self._workers[rank] = worker
        return rank
