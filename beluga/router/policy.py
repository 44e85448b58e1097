# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The one interface of all routing policies: a request and its candidates in, a choice out.

A policy is pure but for its own random generator: it does no I/O, keeps no account of load and
reads no clock. Whoever calls it (the proxy, the simulator) gathers the candidates, and afterwards
tells the load tracker of the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from beluga.router.worker import Load, Overlap, Worker


@dataclasses.dataclass(slots=True)
class Query:
    """What a policy knows of a request."""

    isl: int  # input sequence length, tokens
    block_size: int  # tokens
    hashes: Sequence[int] = ()  # local hashes of its full blocks, 64 bits each
    sequence: Sequence[int] = ()  # hashes of each of them with all before it
    priority_jump: float = 0.0  # seconds that it goes ahead in a queue


@dataclasses.dataclass(slots=True)
class Candidate:
    """A worker that may take the request, as it stands at this moment."""

    worker: Worker
    load: Load
    overlap: Overlap
    new_blocks: int = 0  # distinct blocks that the request would add to its active ones
    taint_weight: float = 0.0  # sum of the preferred taints that match


@dataclasses.dataclass(slots=True)
class Choice:
    """Where a request goes, and what is expected of the cache there."""

    worker: Worker
    overlap: Overlap
    hit_rate: float  # tokens that need not be computed / isl, 0..1
    cost: float = 0.0  # the policy's own figure; lowest wins


class Policy(Protocol):
    """Chooses among candidates."""

    @property
    def name(self) -> str:
        """As on the command line: ``least-tokens``, ``linear``, ..."""
        ...

    @property
    def uses_overlap(self) -> bool:
        """False for cache-oblivious policies: callers need not ask an index for them."""
        ...

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        """One of the candidates. Raises NoWorkersError if there are none, AllWorkersBusyError if
        each of them is full by the policy's own rule.
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """A policy that guesses at caches by what it sent where."""

    def forget(self, worker: Worker) -> None:
        """The worker has gone; should it come back, its cache is empty."""
        ...
