# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of all routing policies: a request and its candidates go in, a choice comes out.

A policy has no state but its own random generator: it does no I/O, keeps no account of load and
reads no clock. The caller (the proxy or the simulator) gathers the candidates, and tells the load
tracker of the choice afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from beluga.router.worker import Load, Overlap, Worker


@dataclasses.dataclass(slots=True)
class Usual:
    """The means over the requests of the recent past. A policy compares a request with them."""

    blocks: float = 0.0  # of a prompt, with its tail; 0 before the first request
    on_device: float = 0.0  # those of them that its worker had on the device
    ended: int = 0  # how many requests the next means cover
    decode_s: float = 0.0  # from a request's first token to its end
    change: float = 0.0  # the square of how many blocks its worker held more, or less, at its end


@dataclasses.dataclass(slots=True)
class Query:
    """The properties of a request that a policy sees."""

    isl: int  # input sequence length, tokens
    block_size: int  # tokens
    hashes: Sequence[int] = ()  # local hashes of its full blocks, 64 bits each
    sequence: Sequence[int] = ()  # the hash of each of these blocks with all blocks before it
    priority_jump: float = 0.0  # how many seconds it moves ahead in a queue
    usual: Usual = dataclasses.field(default_factory=Usual)  # the router fills it in
    pool_hashes: Sequence[int] = ()  # local hashes of its blocks in the pool, if they differ


@dataclasses.dataclass(slots=True)
class Candidate:
    """A worker that may take the request, in its current state."""

    worker: Worker
    load: Load
    overlap: Overlap
    new_blocks: int = 0  # distinct blocks that the request would add to its active ones
    taint_weight: float = 0.0  # the sum of the preferred taints that match
    # of its blocks that are active, how many it would hold alone, in the mean over its time
    held_alone: float = 0.0


@dataclasses.dataclass(slots=True)
class Choice:
    """The worker for a request, and the expected cache hits there."""

    worker: Worker
    overlap: Overlap
    hit_rate: float  # the share of tokens that need not be computed, 0..1
    cost: float = 0.0  # the policy's own figure, of which the lowest wins
    # the seconds of prefill that the worker is expected to need; None if the policy does not know
    prefill_s: float | None = None
    costs: Sequence[float] = ()  # of all candidates, in their order, if the policy has costs


class Policy(Protocol):
    """A routing policy, which chooses among candidates."""

    @property
    def name(self) -> str:
        """The name on the command line: ``least-tokens``, ``linear``, ..."""
        ...

    @property
    def uses_overlap(self) -> bool:
        """False for policies that ignore caches: callers need not ask an index for them."""
        ...

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        """Return the choice of one candidate. Raises NoWorkersError if there are none, and
        AllWorkersBusyError if each of them is full by the policy's own rule.
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """A policy that estimates caches from the requests that it sent."""

    def forget(self, worker: Worker) -> None:
        """Forget a worker that has left. If it comes back, its cache is empty."""
        ...
