# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of all routing policies: from a request and its candidates to a choice.

A policy has no state except its random generator: it does no I/O, tracks no load and reads no
clock. The caller (the proxy or the simulator) gathers the candidates, and then updates the load
tracker. Candidates are a table with one row per worker (csrc/api/routing.h), so that policies
compute all costs at once, in C or by column; the matches of an index fill its overlaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, record_dtype
from beluga.router.worker import Load, Overlap, Worker


@dataclasses.dataclass(slots=True)
class Usual:
    """Means over recent requests, with which a policy compares a request."""

    blocks: float = 0.0  # of a prompt, with its partial last block; 0 before the first request
    on_device: float = 0.0  # of them, blocks that its worker had on the device
    ended: int = 0  # number of ended requests in the means below
    decode_s: float = 0.0  # from a request's first token to its end
    change: float = 0.0  # mean square of the change of its worker's held blocks until its end


@dataclasses.dataclass(slots=True)
class Query:
    """The properties of a request that a policy uses."""

    isl: int  # input sequence length in tokens
    block_size: int  # in tokens
    hashes: Sequence[int] = ()  # local hashes of its full blocks, 64 bits each
    sequence: Sequence[int] = ()  # the hash of each of these blocks with all blocks before it
    usual: Usual = dataclasses.field(default_factory=Usual)  # set by the router
    pool_hashes: Sequence[int] = ()  # local hashes of its blocks in the pool, if they differ


@dataclasses.dataclass(slots=True)
class Candidate:
    """A worker that may take the request, in its current state."""

    worker: Worker
    load: Load
    overlap: Overlap
    new_blocks: int = 0  # distinct blocks that the request would add to its active ones
    # of its blocks that are active, how many it would hold alone, in the mean over its time
    held_alone: float = 0.0


@dataclasses.dataclass(slots=True)
class Choice:
    """The chosen worker for a request, and the expected cache hits there."""

    worker: Worker
    overlap: Overlap
    hit_rate: float  # share of tokens that need not be computed, 0..1
    cost: float = 0.0  # the policy's value; the lowest wins
    # The expected seconds of prefill on the worker; None if the policy has no estimate.
    prefill_s: float | None = None
    costs: Sequence[float] = ()  # of all candidates in order, if the policy has costs


class Policy(Protocol):
    """Chooses a worker among candidates."""

    @property
    def name(self) -> str:
        """The name in logs; of the policies of Beluga, also on the command line."""
        ...

    @property
    def uses_overlap(self) -> bool:
        """False for policies that ignore caches: callers need not query an index for them."""
        ...

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        """Choose a candidate. Raises NoWorkersError if there are none, and AllWorkersBusyError if
        each of them is full by the policy's own rule.
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """A policy that estimates cache contents from the requests that it sent. It needs the hashes of
    their blocks, although it uses no index.
    """

    def forget(self, worker: Worker) -> None:
        """Drop a worker that was removed. If it returns, its cache is empty."""
        ...


_FIELDS: Any = {}  # of a row, and of the load at its beginning, each with its type and offset
for _struct in ("bl_load", "bl_candidate"):
    _FIELDS |= {name: field[:2] for name, field in (record_dtype(_struct).fields or {}).items()}
del _FIELDS["load"]
_ROW = np.dtype(_FIELDS)


class Candidates(Sequence[Candidate]):
    """Workers that may take a request, in their current state: a row for each.

    An element is a copy of a row, made on access.
    """

    __slots__ = ("_table", "rows", "workers")

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.rows: core.bl_candidate = ffi.new("bl_candidate[]", len(workers))
        self._table: NDArray[np.void] | None = None

    @property
    def table(self) -> NDArray[np.void]:
        """The memory of ``rows``, whose load figures and other fields are its columns."""
        if self._table is None:  # few requests need it, and numpy takes longer than C's work
            memory: Any = ffi.buffer(self.rows)
            self._table = np.frombuffer(memory, _ROW, len(self.workers))
        return self._table

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Candidates:
        """Convert candidates to a table."""
        if isinstance(candidates, Candidates):
            return candidates
        table = cls([candidate.worker for candidate in candidates])
        for index, candidate in enumerate(candidates):
            row, overlap = table.rows[index], candidate.overlap
            row.load = candidate.load.row[0]
            row.device, row.host = overlap.device, overlap.host
            row.disk, row.shared = overlap.disk, overlap.shared
            row.new_blocks = candidate.new_blocks
            row.held_alone = candidate.held_alone
        return table

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        worker, row = self.workers[index], self.rows[range(len(self))[index]]
        return Candidate(
            worker,
            Load.of(row.load),
            Overlap(row.device, row.host, row.disk, row.shared),
            row.new_blocks,
            row.held_alone,
        )

    def counts(self, name: str) -> list[int]:
        """Return a column of whole numbers: a load counter, or another field of the rows."""
        column: list[int] = self.table[name].tolist()
        return column

    def amounts(self, name: str) -> list[float]:
        """Return a column of floating-point numbers."""
        column: list[float] = self.table[name].tolist()
        return column

    def held(self) -> list[int]:
        """Return the number of leading blocks that each worker itself holds."""
        table = self.table
        held: list[int] = (table["device"] + table["host"] + table["disk"]).tolist()
        return held

    def hits(self) -> list[int]:
        """Return the number of leading blocks that each worker need not compute."""
        table = self.table
        hits_of_each: list[int] = (
            table["device"] + table["host"] + table["disk"] + table["shared"]
        ).tolist()
        return hits_of_each


class Overlaps(Protocol):
    """The result of an index for a request."""

    def fill(self, candidates: Candidates) -> None:
        """Write the overlap of each candidate into its row."""
        ...


@dataclasses.dataclass(slots=True)
class Matches:
    """Leading blocks that workers hold, and those in the pool, which all workers can use. An index
    with the number of the pool's blocks that continue a worker's own ones stores it in ``held``.
    """

    held: Mapping[Worker, Overlap] = dataclasses.field(default_factory=dict)
    shared: int = 0  # leading blocks in the pool, counted from the first

    def of(self, worker: Worker) -> Overlap:
        """Return the overlap of one worker, including the pool's blocks after its own."""
        own, shared = self.held.get(worker), self.shared
        if own is None:
            return Overlap(0, 0, 0, shared)
        if not own.shared and shared:
            return Overlap(own.device, own.host, own.disk, max(shared - own.held, 0))
        return own

    def fill(self, candidates: Candidates) -> None:
        """Write the overlap of each candidate into its row."""
        if self.shared:
            candidates.table["shared"] = self.shared
        if not self.held:
            return
        for index, worker in enumerate(candidates.workers):
            if worker in self.held:
                row, own = candidates.rows[index], self.of(worker)
                row.device, row.host = own.device, own.host
                row.disk, row.shared = own.disk, own.shared


FindMatches: TypeAlias = Callable[[Query], Overlaps]
