# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The messages between the scheduler's side and the workers' side. They are plain data and
pickled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from beluga.connectors.hints import RequestHint
from beluga.index import BLOCK_RECORD, NAME
from beluga.kvcache import Namespace


@dataclasses.dataclass(slots=True)
class BlockRange:
    """Blocks of one request in one group of layers: their digests, and their ids in the engine."""

    request: str
    digests: bytes  # the digests of all blocks, end to end
    block_ids: list[int]
    names: bytes = b""  # of a save: the engine's hashes of the blocks (``blocks``), or nothing
    group: int = 0  # whose layout the blocks have
    ticket: int = 0  # of a save whose blocks the scheduler's side has pinned, or 0
    concurrent: bool = False  # of a load: no forward waits for it
    records: bytes = b""  # of a load: the places of all parts of the blocks; or nothing
    split: int = 0  # of a load: the heads of each part, if other ranks than these stored them
    hint: RequestHint | None = None  # of a save: for the blocks that it stores

    def packed(self) -> NDArray[np.uint8]:
        """Return the digests in the shape that :func:`beluga.kvcache.fold` takes."""
        count = len(self.block_ids)
        return np.frombuffer(self.digests, dtype=np.uint8).reshape(count, -1)

    def subset(self, positions: NDArray[np.intp]) -> BlockRange:
        """Return a range with some of the blocks."""
        names = np.frombuffer(self.names, dtype=NAME)
        return dataclasses.replace(
            self,
            digests=self.packed()[positions].tobytes(),
            block_ids=[self.block_ids[position] for position in positions],
            names=names[positions].tobytes() if self.names else b"",
        )

    def located(self, part: int) -> NDArray[np.void] | None:
        """Return the place of one part of each block, if it is known."""
        if not self.records:
            return None
        rows: NDArray[np.void] = np.frombuffer(self.records, dtype=BLOCK_RECORD)
        return np.ascontiguousarray(rows.reshape(len(self.block_ids), -1)[:, part])

    def named(self, rank: int) -> NDArray[np.void] | None:
        """Return the names of a rank's part of the blocks, if they have names."""
        if not self.names:
            return None
        names: NDArray[np.void] = np.frombuffer(self.names, dtype=NAME).copy()
        names["rank"] = rank
        return names


@dataclasses.dataclass(slots=True)
class HintedBlocks:
    """A hint for blocks that the pool has: their digests, end to end, and their number."""

    hint: RequestHint
    digests: bytes
    count: int

    def packed(self) -> NDArray[np.uint8]:
        """Return the digests in the shape that :func:`beluga.kvcache.fold` takes."""
        return np.frombuffer(self.digests, dtype=np.uint8).reshape(self.count, -1)


@dataclasses.dataclass(slots=True)
class Orders:
    """Orders for the workers, sent with each step of the engine."""

    loads: list[BlockRange] = dataclasses.field(default_factory=list)
    saves: list[BlockRange] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)
    weights: str = ""  # the identity of the weights, for the namespace of each rank
    hints: list[HintedBlocks] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class StoredCounts:
    """Counts for one block: the ranks that have it in the pool now, and those that put it there."""

    ranks: int
    new: int


@dataclasses.dataclass(slots=True)
class Loaded:
    """The end of a request's load: the ranks whose load has ended, the leading blocks that each of
    them has loaded, and how long the slowest one took.
    """

    ranks: int
    blocks: int
    seconds: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """A worker's handshake: the namespace of its part of every block."""

    namespace: Namespace
    block_bytes: int
    heads: int = 0  # of the model, if parts are named by heads
    splits: tuple[int, ...] = ()  # heads per part of other engines that it can read


@dataclasses.dataclass(slots=True)
class StepReport:
    """The workers' report after a step: the results of loads and saves. Ranks are added up. The
    first one has the workers themselves, by their numbers.
    """

    loaded: dict[str, Loaded] = dataclasses.field(default_factory=dict)
    stored: dict[bytes, StoredCounts] = dataclasses.field(default_factory=dict)
    ranks: dict[int, Rank] = dataclasses.field(default_factory=dict)
    ended: Counter[int] = dataclasses.field(default_factory=Counter)  # saves' tickets: ranks

    def __bool__(self) -> bool:
        return bool(self.loaded or self.stored or self.ranks or self.ended)

    def add(self, other: StepReport) -> None:
        """Add another rank's report."""
        for name, loaded in other.loaded.items():
            add_loaded(self.loaded, name, loaded)
        for digest, stored in other.stored.items():
            mine = self.stored.setdefault(digest, StoredCounts(0, 0))
            mine.ranks += stored.ranks
            mine.new += stored.new
        self.ranks |= other.ranks
        self.ended += other.ended


def add_loaded(loads: dict[str, Loaded], name: str, loaded: Loaded) -> Loaded:
    """Add a rank's load to those of its request, and return the sum. A block that one rank lacks is
    computed on all.
    """
    total = loads.setdefault(name, Loaded(0, loaded.blocks))
    total.ranks += loaded.ranks
    total.blocks = min(total.blocks, loaded.blocks)
    total.seconds = max(total.seconds, loaded.seconds)
    return total
