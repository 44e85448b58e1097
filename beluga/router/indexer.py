# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The index of KV events: which worker holds which leading blocks of a request.

The rules of the index:

- A rank holds a block, in a tier, from a ``stored`` event until the ``removed`` event of the same
  name and tier or the rank's ``cleared`` event. A name identifies one block at a time: when it is
  stored for another block, the rank no longer holds the first one by this name. Other names of the
  same block still hold it.
- A block counts for a rank only if all blocks before it do. A block after a gap is remembered and
  counts again when the gap is filled, as in the engine: when a block in the middle of a path is
  evicted and computed again, the blocks after it are hits again.
- Matches are device blocks from the first block on, then host blocks, then disk blocks, then blocks
  of the pool.
- Events of one rank apply in the order in which they are given. Lookups run concurrently, in any
  thread, and see either all of an event's blocks or none (beluga/router/indexer.py).
- Memory is limited: beyond the limits, the blocks that were stored longest ago are dropped and
  counted.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from beluga._ffi import core, ffi, lib
from beluga._shared import when_forked
from beluga.errors import EventError, RouterError, raise_for_status
from beluga.router.events import Cleared, Removed, RouterEvent, Stored, Tier
from beluga.router.hashing import U64, words
from beluga.router.policy import Matches, Query
from beluga.router.worker import Overlap, Worker

SHARED_RANK: int = lib.BL_PREFIX_SHARED
RANKS_MAX: int = lib.BL_PREFIX_RANKS_MAX - 1
_TREE_BLOCKS_MAX: int = lib.BL_PREFIX_BLOCKS_MAX

_MATCH_WORDS = ffi.sizeof("bl_prefix_match") // 4


class TreeStat(NamedTuple):
    """The fill level of the tree. ``evicted`` counts blocks that were dropped to make space."""

    blocks: int
    names: int
    block_max: int
    name_max: int
    evicted: int


def _pointer(values: array[int] | None) -> core.uint64_p | core.Null:
    return ffi.NULL if values is None else ffi.from_buffer("uint64_t[]", values)


class Tree:
    """A tree with ranks 1 to ``rank_max``; SHARED_RANK is the pool. Errors of C are returned as
    negative errno, with the outcome.
    """

    def __init__(self, *, rank_max: int, block_max: int, name_max: int) -> None:
        out = ffi.new("bl_prefix **")
        if not (
            1 <= rank_max <= RANKS_MAX
            and 1 <= block_max <= _TREE_BLOCKS_MAX
            and 1 <= name_max <= _TREE_BLOCKS_MAX
        ):
            raise RouterError(
                f"an index has 1 to {RANKS_MAX} workers, and 1 to {_TREE_BLOCKS_MAX} blocks and "
                "names"
            )
        raise_for_status(
            lib.bl_prefix_create(out, rank_max, block_max, name_max), "making an index"
        )
        self._rank_max = rank_max
        self._handle = ffi.gc(out[0], lib.bl_prefix_destroy)
        self._forked = False
        when_forked(self)

    @property
    def handle(self) -> core.bl_prefix:
        """The ``bl_prefix *``. Raises RouterError in a forked child, because a thread of the parent
        may have held its locks or have been changing it.
        """
        if self._forked:
            raise RouterError(
                "this index belongs to the parent process; create a new one after fork"
            )
        return self._handle

    def _after_fork(self) -> None:
        self._forked = True

    def store(  # noqa: PLR0913, PLR0917  a C call's arguments
        self,
        rank: int,
        tier: int,
        publisher: int,
        parent: int | None,
        names: array[int],
        locals_: array[int] | None,
        outcome: core.bl_prefix_outcome,
    ) -> int:
        """Store blocks after the parent that ``rank``, or else ``publisher``, calls ``parent``.
        Without ``locals_``, both must already have names for the blocks. Returns C's status.
        """
        if locals_ is None:
            return int(
                lib.bl_prefix_hold(
                    self.handle, rank, tier, publisher, _pointer(names), len(names), outcome
                )
            )
        if len(names) != len(locals_):
            return -errno.EINVAL
        before = ffi.NULL if parent is None else ffi.new("uint64_t *", parent & U64)
        return int(
            lib.bl_prefix_store(
                self.handle,
                rank,
                tier,
                publisher,
                before,
                _pointer(names),
                _pointer(locals_),
                len(names),
                outcome,
            )
        )

    def remove(
        self, rank: int, tier: int, names: array[int], outcome: core.bl_prefix_outcome
    ) -> int:
        """Remove blocks from one tier of a rank. Returns C's status."""
        return int(
            lib.bl_prefix_remove(self.handle, rank, tier, _pointer(names), len(names), outcome)
        )

    def clear(self, rank: int, outcome: core.bl_prefix_outcome) -> int:
        """Remove everything that a rank holds, in every tier. Returns C's status."""
        return int(lib.bl_prefix_clear(self.handle, rank, outcome))

    def find(
        self, locals_: array[int], early_exit: bool
    ) -> tuple[Iterable[tuple[int, int, int, int, int]], int]:
        """Return the ranks that hold the first block, each with the ends of its matches (device,
        host, disk, shared), all counted from the first block; and how many leading blocks the pool
        holds.
        """
        matches = ffi.new("uint32_t[]", _MATCH_WORDS * self._rank_max)
        shared = ffi.new("uint32_t *")
        count = lib.bl_prefix_find(
            self.handle,
            _pointer(locals_),
            len(locals_),
            early_exit,
            ffi.cast("bl_prefix_match *", matches),
            shared,
        )
        numbers = iter(ffi.unpack(matches, _MATCH_WORDS * count))
        return zip(numbers, numbers, numbers, numbers, numbers, strict=True), shared[0]

    def held(self, rank: int, tier: int) -> int:
        """Return the number of names that a rank has in a tier."""
        return int(lib.bl_prefix_held(self.handle, rank, tier))

    def paths(self, locals_: array[int]) -> array[int]:
        """Return a hash of each block's whole path. These serve as names of blocks that no engine
        announces.
        """
        paths = array("Q", bytes(8 * len(locals_)))
        lib.bl_prefix_paths(self.handle, _pointer(locals_), len(locals_), _pointer(paths))
        return paths

    def names(self, rank: int) -> dict[int, int]:
        """Return a rank's names for the blocks that it holds, with each block's local hash."""
        room = 0
        while True:
            rows = ffi.new("bl_prefix_row[]", room)
            count = lib.bl_prefix_dump(self.handle, rank, rows, room)
            if count <= room:
                return {row.name: row.local for row in rows[0:count]}
            room = count + count // 8  # other threads may store meanwhile

    def stat(self) -> TreeStat:
        """Return the fill level of the tree."""
        stat = ffi.new("bl_prefix_stat *")
        lib.bl_prefix_stat_read(self.handle, stat)
        return TreeStat(stat.blocks, stat.names, stat.block_max, stat.name_max, stat.evicted)


WORKERS_MAX = 63  # the bits of one word per tier and block
BLOCKS_MAX = 1 << 21
NAMES_PER_BLOCK = 2  # engines with their own hashes need one name each

# The fields of a C call's result (csrc/api/prefix.h), which are also fields of Counts.
_OUTCOMES = ("stored", "repeated", "moved", "removed", "unknown", "evicted", "refused")


@dataclasses.dataclass(slots=True)
class Counts:
    """Counts of events, and of their blocks by outcome."""

    events: int = 0  # applied at least in part
    stored: int = 0  # blocks that were held already
    repeated: int = 0  # names that identified another block before
    moved: int = 0  # names that stood for another block before
    removed: int = 0
    unknown: int = 0  # blocks removed, or stored without contents, that the index does not have
    evicted: int = 0  # dropped to make space
    refused: int = 0  # blocks without space
    parent_not_found: int = 0  # events dropped as a whole
    invalid: int = 0  # events dropped as a whole: no sequence, or too many workers
    stale: int = 0  # events whose number had already passed
    gaps: int = 0
    missed: int = 0  # events in the gaps


class Indexer:
    """An index of at most ``workers`` ranks and ``blocks`` distinct blocks with ``names`` names in
    total. Engines that seed their hashes equally share names.

    Raises RouterError for invalid limits.
    """

    WORKERS: ClassVar[int] = WORKERS_MAX
    """The default limit of ranks."""
    WORKERS_MOST: ClassVar[int] = RANKS_MAX
    """The largest possible limit of ranks."""

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
        self._after_fork()  # creates the lock
        when_forked(self)
        self._ranks: dict[Worker, int] = {}
        self._workers: list[Worker | None] = [None] * (workers + 1)  # by rank; rank 0 is the pool
        self._last: dict[Worker, int] = {}
        self.follows_pool = False  # engines' events about the pool are then ignored

    def _after_fork(self) -> None:
        """Create a new lock. In a forked child a thread of the parent may hold the old one."""
        self._lock = threading.Lock()  # guards the tables of workers, numbers and counts

    def apply(self, event: RouterEvent) -> None:
        """Apply one event.

        Raises EventError, and counts it, for an event with a problem. If its parent is unknown, its
        sequence is invalid, or there are too many workers, nothing is applied. If some of its
        blocks are unknown or have no space, the other blocks are applied.
        """
        with self._lock:
            if self._in_order(event.worker, event.event_id):
                try:
                    status = self._put(event)
                except EventError:
                    self.counts.invalid += 1
                    raise
                self._conclude(event, status)

    def find_matches(self, tokens_hashes: Sequence[int], *, early_exit: bool = False) -> Matches:
        """Return how many of a request's leading blocks each worker holds. A worker without the
        first block has no entry. ``early_exit`` stops where only one worker continues; counts are
        then lower bounds.
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
        """Return the matches of a query, in the form that Router takes."""
        return self.find_matches(query.hashes)

    def remove_worker(self, worker_id: int) -> None:
        """Remove all ranks of a worker, with their blocks."""
        with self._lock:
            for worker in [worker for worker in self._ranks if worker.worker_id == worker_id]:
                rank = self._ranks.pop(worker)
                self._workers[rank] = None
                self._last.pop(worker, None)
                self._tree.clear(rank, self._outcome)
                self._count()

    def clear_shared(self) -> None:
        """Drop the pool's blocks, because the pool was created again."""
        with self._lock:
            self._tree.clear(SHARED_RANK, self._outcome)
            self._count()

    def shared_stored(
        self, names: Sequence[int], contents: Sequence[int], parent: int | None
    ) -> bool:
        """Store blocks that the pool's server announces. Returns False, without any change, if
        their parent was never announced.
        """
        with self._lock:
            held, locals_ = words(names), words(contents)
            status = self._tree.store(
                SHARED_RANK, 0, SHARED_RANK, parent, held, locals_, self._outcome
            )
            self._count()
            self.counts.events += status == 0
            self.counts.invalid += status == -errno.EINVAL
        return status != -errno.ENOENT

    def shared_removed(self, names: Sequence[int]) -> None:
        """Remove blocks that were evicted or removed from the pool."""
        with self._lock:
            self._tree.remove(SHARED_RANK, 0, words(names), self._outcome)
            self._count()
            self.counts.events += 1

    @property
    def shared_count(self) -> int:
        """The number of blocks in the pool."""
        return self._tree.held(SHARED_RANK, 0)

    def shared_names(self) -> dict[int, int]:
        """Return the pool's names for blocks, with each block's tokens hash."""
        return self._tree.names(SHARED_RANK)

    def held(self, worker: Worker, tier: Tier) -> int:
        """Return how many names hold blocks in a tier of a worker, or of all workers for SHARED."""
        if tier is Tier.SHARED:
            return self._tree.held(SHARED_RANK, 0)
        rank = self._ranks.get(worker)
        return 0 if rank is None else self._tree.held(rank, tier)

    def workers(self) -> list[Worker]:
        """Return all workers that sent events and were not removed."""
        with self._lock:
            return list(self._ranks)

    @property
    def handle(self) -> core.bl_prefix:
        """The C tree, for benchmarks."""
        return self._tree.handle

    def stat(self) -> TreeStat:
        """Return the fill level of the index."""
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
        self._last[worker] = number
        return True

    def _put(self, event: RouterEvent) -> int:
        """Apply the event to the tree. Returns C's status."""
        rank = self._rank_of(event.worker)
        data = event.data
        if isinstance(data, Cleared):
            return self._tree.clear(rank, self._outcome)
        if event.tier is Tier.SHARED and self.follows_pool:
            return 0
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
        raise EventError(f"{type(data).__name__} is not a KV event")

    def _conclude(self, event: RouterEvent, status: int) -> None:
        """Count the outcome, and raise the error of a bad status."""
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
            raise EventError(
                f"{who}: the index has no room for {refused} blocks; create a larger one"
            )
        if unknown:
            raise EventError(f"{who}: {unknown} blocks of an event are not in the index")

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
                    f"worker {worker.worker_id} exceeds the limit of {len(self._workers) - 1} "
                    "ranks; create a larger index"
                ) from None
            self._ranks[worker] = rank
            self._workers[rank] = worker
        return rank
