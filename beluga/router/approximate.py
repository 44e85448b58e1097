# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The approximate index: infers what workers may hold from the requests sent to them.

By itself it is Dynamo's approximate mode, for engines that send no events. Combined with an index
of events, it bridges the time between a choice and its event: n samples of one prompt that arrive
together all go to the worker of the first one (predict-on-route). Times are seconds of one clock of
the caller, which must not go back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from beluga._ffi import core, ffi, lib
from beluga.errors import EventError, RouterError, raise_for_status
from beluga.router.hashing import words
from beluga.router.indexer import WORKERS_MAX, Indexer, Tree
from beluga.router.policy import Matches
from beluga.router.worker import Overlap, Worker

# Source: Dynamo, lib/kv-router/src/indexer/pruning.rs 18bcdc90, and its advice for
# predict-on-route.
TTL_S = 120.0
PREDICTION_TTL_S = 5.0
BLOCKS_MAX = 1 << 20


class ApproximateIndexer:
    """An index in which a block counts for a worker until ``ttl_s`` after the last request with it.

    When it has more than ``blocks`` entries (one per block and worker), it drops those that would
    expire first until four fifths of the limit remain. Raises RouterError for invalid limits.
    """

    def __init__(
        self, *, ttl_s: float = TTL_S, blocks: int = BLOCKS_MAX, workers: int = WORKERS_MAX
    ) -> None:
        if ttl_s <= 0:
            raise RouterError(f"ttl_s is {ttl_s}, but must be a positive number of seconds")
        self._tree = Tree(rank_max=workers, block_max=blocks, name_max=blocks)
        out = ffi.new("bl_sent **")
        raise_for_status(
            lib.bl_sent_create(out, self._tree.handle, workers, blocks, ttl_s), "making an index"
        )
        self._account = ffi.gc(out[0], lib.bl_sent_destroy)
        self._lock = threading.Lock()
        self._ranks: dict[Worker, int] = {}
        self._workers: list[Worker | None] = [None] * (workers + 1)

    @property
    def _sent(self) -> core.bl_sent:
        """The ``bl_sent *``. Raises RouterError in a forked child."""
        assert self._tree.handle  # noqa: S101  the handle raises the error
        return self._account

    def __len__(self) -> int:
        """Return the number of entries, one per block and worker."""
        return int(lib.bl_sent_count(self._sent))

    def routed(self, worker: Worker, tokens_hashes: Sequence[int], now: float) -> None:
        """Record that a request was sent to a worker. Raises EventError if there are too many
        workers.
        """
        contents = words(tokens_hashes)
        with self._lock:
            rank = self._rank_of(worker)
            lib.bl_sent_add(
                self._sent, rank, ffi.from_buffer("uint64_t[]", contents), len(contents), now
            )

    def find_matches(self, tokens_hashes: Sequence[int], now: float) -> Matches:
        """Return how many of a request's leading blocks each worker may hold on its device."""
        with self._lock:
            lib.bl_sent_expire(self._sent, now)
        runs, _ = self._tree.find(words(tokens_hashes), False)
        workers = self._workers
        return Matches(
            {
                worker: Overlap(device)
                for rank, device, _, _, _ in runs
                if (worker := workers[rank]) is not None
            }
        )

    def remove_worker(self, worker_id: int) -> None:
        """Remove all ranks of a worker."""
        with self._lock:
            for worker in [worker for worker in self._ranks if worker.worker_id == worker_id]:
                rank = self._ranks.pop(worker)
                self._workers[rank] = None
                lib.bl_sent_clear(self._sent, rank)

    def _rank_of(self, worker: Worker) -> int:
        rank = self._ranks.get(worker)
        if rank is None:
            if None not in self._workers[1:]:
                raise EventError(
                    f"worker {worker.worker_id} exceeds the limit of {len(self._workers) - 1} "
                    "ranks; create a larger index"
                )
            rank = self._ranks[worker] = self._workers.index(None, 1)
            self._workers[rank] = worker
        return rank


class PredictiveIndexer:
    """An index of events, combined with the requests sent to workers in the last ``ttl_s`` seconds.
    A worker's match is the longer of the two.
    """

    def __init__(self, indexer: Indexer, *, ttl_s: float = PREDICTION_TTL_S) -> None:
        self.indexer = indexer
        self._sent = ApproximateIndexer(ttl_s=ttl_s, workers=indexer.workers_max)

    def routed(self, worker: Worker, tokens_hashes: Sequence[int], now: float) -> None:
        """Record that a request was sent to a worker. Raises EventError if there are too many
        workers.
        """
        self._sent.routed(worker, tokens_hashes, now)

    def find_matches(self, tokens_hashes: Sequence[int], now: float) -> Matches:
        """Return how many of a request's leading blocks each worker holds, or will hold soon."""
        contents = words(tokens_hashes)
        matches = self.indexer.find_matches(contents)
        sent = self._sent.find_matches(contents, now)
        if not (matches.held or matches.shared):
            return sent
        held = dict(matches.held)
        for worker, predicted in sent.held.items():
            own = matches.of(worker)
            held[worker] = _at_least(own, predicted.device)
        return Matches(held, matches.shared)

    def remove_worker(self, worker_id: int) -> None:
        """Remove all ranks of a worker."""
        self._sent.remove_worker(worker_id)
        self.indexer.remove_worker(worker_id)


def _at_least(own: Overlap, device: int) -> Overlap:
    """Return an overlap with at least ``device`` device blocks. Additional ones replace blocks of
    other tiers.
    """
    ends = [own.device, own.device + own.host, own.held, own.blocks]
    first, second, third, last = (max(end, device) for end in ends)
    return Overlap(first, second - first, third - second, last - third)
