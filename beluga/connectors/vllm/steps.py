# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the scheduler's side and the workers' side tell each other. Plain data: it is pickled."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from beluga.kvcache import Namespace


@dataclasses.dataclass(slots=True)
class BlockRange:
    """Consecutive blocks of one request: what they hold, and where the engine keeps them."""

    request: str
    digests: bytes  # of all blocks, end to end
    block_ids: list[int]

    def packed(self) -> NDArray[np.uint8]:
        """The digests, as :func:`beluga.kvcache.fold` takes them."""
        count = len(self.block_ids)
        return np.frombuffer(self.digests, dtype=np.uint8).reshape(count, -1)


@dataclasses.dataclass(slots=True)
class Orders:
    """For the workers, with each step of the engine."""

    loads: list[BlockRange] = dataclasses.field(default_factory=list)
    saves: list[BlockRange] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Stored:
    """Of one block: how many ranks have it in the pool now, and how many of them put it there."""

    ranks: int
    new: int


@dataclasses.dataclass(slots=True)
class Report:
    """From the workers, after a step: what became of loads and saves. Ranks are added up."""

    loaded: Counter[str] = dataclasses.field(default_factory=Counter)
    stored: dict[bytes, Stored] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.loaded or self.stored)

    def add(self, other: Report) -> None:
        """Add another rank's."""
        self.loaded += other.loaded
        for digest, stored in other.stored.items():
            mine = self.stored.setdefault(digest, Stored(0, 0))
            mine.ranks += stored.ranks
            mine.new += stored.new


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """A worker's handshake: under which namespace it keeps its part of every block."""

    namespace: Namespace
    block_bytes: int
