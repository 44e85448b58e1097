# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of all routing policies: from a request and its candidates to a choice.

A policy has no state except its random generator: it does no I/O, tracks no load and reads no
clock. The caller (the proxy or the simulator) gathers the candidates, and then updates the load
tracker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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
    priority_jump: float = 0.0  # seconds that it moves ahead in a queue
    usual: Usual = dataclasses.field(default_factory=Usual)  # set by the router
    pool_hashes: Sequence[int] = ()  # local hashes of its blocks in the pool, if they differ


@dataclasses.dataclass(slots=True)
class Candidate:
    """A worker that may take the request, in its current state."""

    worker: Worker
    load: Load
    overlap: Overlap
    new_blocks: int = 0  # distinct blocks that the request would add to its active ones
    taint_weight: float = 0.0  # distinct blocks that the request would add to the active ones
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
