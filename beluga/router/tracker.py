# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The load tracker: the router's account of its unfinished requests.

A request is added, completes its prefill (its first token has arrived), and is freed. This
lifecycle and the quantities in :class:`~beluga.router.worker.Load` are Dynamo's. The time of a call
is proportional to the request's blocks. Times are seconds of one clock that never goes back; the
caller reads it.

A worker's account has the distinct blocks that its active requests hold; a shared block counts
once. Blocks are identified by sequence hashes, each of which stands for its whole prefix. So the
set of held blocks is closed under prefixes, and reference counts never grow along a request; binary
search suffices for both (csrc/routing/active.c).

It also has the prompts that the worker has not prefilled yet, and an estimate of their remaining
tokens. With predicted durations the count decreases while the worker computes, as in Dynamo's
modelled decay (``aic``). If every prefill has a duration, the sum decreases at the rate of the
oldest prefill, possibly below that prefill's share. If some prefill has none, at most the oldest
one's tokens are subtracted.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from bisect import bisect_left
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from beluga._ffi import core, ffi, lib
from beluga.errors import NoWorkersError, raise_for_status
from beluga.router.hashing import words
from beluga.router.policy import Candidates, Query, Usual
from beluga.router.worker import Load, Overlap, Worker, WorkerMetrics

# Holders of a block; above this number, a request holds it alone for less than 0.3 % of its time
_HOLDERS_MAX = 4


def alone(holders: int) -> float:
    """Return the share of its time in which one more request is the only holder of a block.

    Let all requests run for an exponentially distributed time T. After t seconds each of the k
    holders has ended with probability u = 1 - exp(-t / T). If requests for the block arrive as
    often as they end, k * u of the later ones are active, and with probability exp(-k * u) none is.
    So the share is the integral of u**k * exp(-k * u) over u from 0 to 1, which has a closed form:
    1, 0.26, 0.08 and 0.03 for 0 to 3 holders.
    """
    if not holders:
        return 1.0
    none = math.exp(-holders) * sum(
        float(holders) ** j / math.factorial(j) for j in range(holders + 1)
    )
    return (1 - none) * math.factorial(holders) / float(holders) ** (holders + 1)


ALONE = ffi.new("double[]", [alone(holders) for holders in range(_HOLDERS_MAX + 1)])
"""The values of ``alone`` for few holders, for C."""


def leading(chain: Sequence[int], held: Container[int]) -> int:
    """Return the number of leading elements of a chain in a set that is closed under prefixes."""
    if not chain or chain[0] not in held:
        return 0
    if chain[-1] in held:
        return len(chain)
    return bisect_left(range(len(chain)), True, key=lambda at: chain[at] not in held)


class ActiveBlocks:
    """The blocks of one worker's requests, as uint64 arrays."""

    def __init__(self) -> None:
        out = ffi.new("bl_active **")
        raise_for_status(lib.bl_active_create(out), "an account of blocks")
        self.handle: core.bl_active = ffi.gc(out[0], lib.bl_active_destroy)
        # For blocks with one holder: the difference of their weight from 1.
        self._faded: dict[int, float] = {}

    def __len__(self) -> int:
        """Return the number of distinct blocks, counting faded ones by their weight, rounded."""
        count = int(lib.bl_active_count(self.handle))
        return round(count - sum(self._faded.values())) if self._faded else count

    def add(self, sequence: array[int]) -> None:
        """Add a request's blocks."""
        blocks = ffi.from_buffer("uint64_t[]", sequence)
        raise_for_status(
            lib.bl_active_add(self.handle, blocks, len(sequence)), "a request's blocks"
        )
        if self._faded:
            for block in sequence:
                self._faded.pop(block, None)

    def remove(self, sequence: array[int]) -> None:
        """Remove a request's blocks."""
        lib.bl_active_remove(self.handle, ffi.from_buffer("uint64_t[]", sequence), len(sequence))
        if self._faded:
            for block in sequence:
                self._faded.pop(block, None)

    def fade(self, sequence: array[int], weight: float) -> None:
        """Set the weight (0 to 1) of the blocks that only this request holds, its exclusive
        suffix.
        """
        for block in reversed(sequence):
            if lib.bl_active_holders(self.handle, block) > 1:
                break
            self._faded[block] = 1 - weight


class _Prefill(NamedTuple):
    tokens: int
    duration_s: float | None


class ActivePrefills:
    """The prompts, oldest first. ``row`` has their sums and the oldest one for C
    (csrc/routing/cost.c), which updates the loads of all workers at once.

    Without a duration for the oldest prompt, all tokens remain. A prefill that takes longer than
    predicted is expected to take as much longer again. So the estimated wait grows if the oldest
    prompt cannot start, for example because HBM is full.
    """

    def __init__(self) -> None:
        self.row: core.bl_prefills = ffi.new("bl_prefills *")
        self._waiting: dict[Hashable, _Prefill] = {}

    def add(self, request: Hashable, tokens: int, duration_s: float | None, now: float) -> None:
        first = not self._waiting
        self._waiting[request] = _Prefill(tokens, duration_s)
        row = self.row
        row.count += 1
        row.unpredicted += duration_s is None
        row.seconds += duration_s or 0.0
        row.tokens += tokens
        if first:
            self._begin(now)

    def remove(self, request: Hashable, now: float) -> None:
        first = request == next(iter(self._waiting))
        tokens, duration_s = self._waiting.pop(request)
        row = self.row
        row.count -= 1
        row.unpredicted -= duration_s is None
        row.seconds -= duration_s or 0.0
        row.tokens -= tokens
        if first and self._waiting:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Assume that the worker starts to prefill the oldest prompt now."""
        row, (tokens, duration_s) = self.row, next(iter(self._waiting.values()))
        row.oldest_tokens = tokens
        row.oldest_predicted = duration_s is not None
        row.oldest_s = duration_s or 0.0
        row.oldest_since = now

    def seconds_left(self, now: float) -> float:
        """Return the predicted seconds until all prompts are prefilled."""
        return lib.bl_prefills_seconds(self.row, now)

    def left(self, now: float) -> int:
        """Return the estimated remaining tokens at that time, at least 0."""
        return lib.bl_prefills_tokens(self.row, now)


class Account(Protocol):
    """The account of one worker."""

    load: Load
    blocks: ActiveBlocks
    prefills: ActivePrefills


class AccountGroup:
    """Several workers with their accounts."""

    def __init__(self, workers: Sequence[Worker], accounts: Sequence[Account]) -> None:
        self.workers = list(workers)
        self._accounts = tuple(accounts)  # keeps the C structs alive
        self._loads = ffi.new("bl_load *[]", [account.load.row for account in accounts])
        self._blocks = ffi.new("bl_active *[]", [account.blocks.handle for account in accounts])
        self._prefills = ffi.new("bl_prefills *[]", [account.prefills.row for account in accounts])

    def refresh(self, now: float) -> None:
        """Update the estimates of remaining prefills."""
        lib.bl_loads_refresh(self._loads, self._prefills, len(self._accounts), now)

    def candidates(self, sequence: array[int]) -> Candidates:
        """Return the workers with their loads and with what a request would add to them."""
        candidates = Candidates(self.workers)
        lib.bl_candidates_fill(
            self._loads,
            self._blocks,
            len(self._accounts),
            ffi.from_buffer("uint64_t[]", sequence),
            len(sequence),
            ALONE,
            len(ALONE),
            candidates.rows,
        )
        return candidates


_RECENT = 1000  # requests in a running mean


@dataclasses.dataclass(slots=True)
class _Account:
    load: Load = dataclasses.field(default_factory=Load)
    blocks: ActiveBlocks = dataclasses.field(default_factory=ActiveBlocks)
    prefills: ActivePrefills = dataclasses.field(default_factory=ActivePrefills)
    published: bool = False


@dataclasses.dataclass(slots=True)
class _Request:
    account: _Account  # stays valid if the worker is removed and added again
    isl: int
    blocks: array[int]
    expected_output: int
    decoding_since: float | None = None  # None before the first token
    held_blocks: int = 0  # the worker's blocks, including this request's, when it was added


class LoadTracker:
    """The loads of workers from their unfinished requests."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self._accounts: dict[Worker, _Account] = {}
        self._requests: dict[Hashable, _Request] = {}
        self._all: AccountGroup | None = None  # all accounts; None: to be built
        self._last_group = AccountGroup((), ())  # the accounts of the last candidates
        self._fresh = 0  # unique ids of blocks are negative, unlike hashes
        self._predicted = False
        self._added = 0  # requests in the means of ``usual``
        self.usual = Usual()
        for worker in workers:
            self.add_worker(worker)

    def add_worker(self, worker: Worker) -> None:
        """Add an empty account, unless the worker already has one."""
        self._accounts.setdefault(worker, _Account())
        self._all, self._last_group = None, AccountGroup((), ())

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker. Freeing its requests later has no effect."""
        self._accounts.pop(worker, None)
        self._all, self._last_group = None, AccountGroup((), ())

    @property
    def loads(self) -> Mapping[Worker, Load]:
        """The current load of every worker. The objects are updated in place."""
        return {worker: account.load for worker, account in self._accounts.items()}

    def load(self, worker: Worker) -> Load:
        """Return a worker's load. Raises NoWorkersError for a worker that was not added."""
        return self._account(worker).load

    def new_blocks(self, worker: Worker, sequence: Sequence[int]) -> int:
        """Return how many distinct blocks a request would add to a worker's active ones."""
        return self.states([worker], sequence)[0].new_blocks

    def states(self, workers: Sequence[Worker], sequence: Sequence[int] = ()) -> Candidates:
        """Return each worker's load and what a request would add to it, as candidates without cache
        hits.

        Raises NoWorkersError for a worker that was not added.
        """
        if workers != self._last_group.workers:
            accounts = [self._account(worker) for worker in workers]
            self._last_group = AccountGroup(workers, accounts)
        return self._last_group.candidates(words(sequence))

    def add(  # noqa: PLR0913  keyword-only
        self,
        request: Hashable,
        worker: Worker,
        query: Query,
        overlap: Overlap,
        *,
        now: float = 0.0,
        expected_output: int = 0,
        prefill_s: float | None = None,
    ) -> None:
        """Add a request that was sent, under a name that the caller chooses.

        ``expected_output`` (tokens, 0 if unknown) makes its blocks fade as it nears its end.
        ``prefill_s`` is the expected duration of its prefill. Raises NoWorkersError, or ValueError
        for a name in use.
        """
        if request in self._requests:
            raise ValueError(f"the request {request!r} is tracked already; give another name")
        account = self._account(worker)
        size = query.block_size
        blocks = words(query.sequence)
        entry = self._requests[request] = _Request(account, query.isl, blocks, expected_output)
        self._predicted = self._predicted or prefill_s is not None
        cached = overlap.blocks
        account.blocks.add(entry.blocks)
        account.prefills.add(request, max(query.isl - cached * size, 0), prefill_s, now)
        load = account.load.row
        load.active_requests += 1
        load.outstanding_tokens += query.isl
        self._count_prefills(account, now)
        load.active_decode_blocks = len(account.blocks)
        self._added = min(self._added + 1, _RECENT)
        usual, prompt = self.usual, -(-query.isl // size)
        usual.blocks += (prompt - usual.blocks) / self._added
        usual.on_device += (overlap.device - usual.on_device) / self._added
        if account.published:  # the estimate applies until the worker's next metrics
            load.num_requests_waiting += 1
            load.request_active_slots += 1
            load.kv_active_blocks += max(prompt - cached, 0)
        entry.held_blocks = account.load.held_blocks

    def prefill_done(self, request: Hashable, now: float = 0.0) -> bool:
        """Record that the first token has arrived. Returns False if that was recorded already, or
        the request is unknown.
        """
        entry = self._requests.get(request)
        if entry is None or entry.decoding_since is not None:
            return False
        entry.decoding_since = now
        entry.account.prefills.remove(request, now)
        entry.account.load.row.outstanding_tokens -= entry.isl
        self._count_prefills(entry.account, now)
        return True

    def output(self, request: Hashable, generated: int) -> bool:
        """Record that a request's answer, now of ``generated`` tokens, fills one more block.

        Returns False if the request is unknown.
        """
        entry = self._requests.get(request)
        if entry is None:
            return False
        self._fresh -= 1
        own = words([self._fresh])
        blocks = entry.account.blocks
        entry.blocks = entry.blocks + own
        blocks.add(own)
        if entry.expected_output:
            blocks.fade(entry.blocks, max(1 - generated / entry.expected_output, 0.0))
        entry.account.load.active_decode_blocks = len(blocks)
        return True

    def free(self, request: Hashable, now: float = 0.0) -> bool:
        """Record that the request has ended, successfully or not. Returns False if it is
        unknown.
        """
        answered = not self.prefill_done(request, now)
        entry = self._requests.pop(request, None)
        if entry is None:
            return False
        load = entry.account.load
        if answered and entry.decoding_since is not None:
            usual = self.usual
            usual.ended = min(usual.ended + 1, _RECENT)
            usual.decode_s += (now - entry.decoding_since - usual.decode_s) / usual.ended
            change = load.held_blocks - entry.held_blocks
            usual.change += (change**2 - usual.change) / usual.ended
        entry.account.blocks.remove(entry.blocks)
        load.row.active_requests -= 1
        load.row.active_decode_blocks = len(entry.account.blocks)
        return True

    def publish(self, worker: Worker, metrics: WorkerMetrics | None) -> None:
        """Store the metrics that a worker published, or None if it has been silent for too long.

        Ignored for a worker that was not added.
        """
        account = self._accounts.get(worker)
        if account is not None:
            account.published = metrics is not None
            account.load.publish(metrics or WorkerMetrics())

    def refresh(self, now: float) -> None:
        """Update the prefills with predicted durations to time ``now``."""
        if not self._predicted:
            return
        if self._all is None:
            self._all = AccountGroup(tuple(self._accounts), tuple(self._accounts.values()))
        self._all.refresh(now)

    def _count_prefills(self, account: _Account, now: float) -> None:
        row = account.load.row
        row.active_prefill_tokens = account.prefills.left(now)
        if self._predicted:
            row.prefill_s = account.prefills.seconds_left(now)

    def _account(self, worker: Worker) -> _Account:
        try:
            return self._accounts[worker]
        except KeyError:
            raise NoWorkersError(
                f"the worker {worker} was not added to the router; add it first"
            ) from None
