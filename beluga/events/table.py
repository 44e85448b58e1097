# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The table of named blocks, which turns changes of the block index into events.

Each rank of an engine stores its part of a block under a key of its own. The block is stored when
the last rank has it, and removed when the first one does not. Changes may be told twice, or be in
the table already: their generations tell.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from beluga.meta import NAME_PARENT, STORED
from beluga.router import PoolEvent, Removed, Stored

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Name: TypeAlias = "tuple[int, int]"
"""A space and a block hash."""


@dataclasses.dataclass(slots=True)
class _Block:
    parent: int | None
    contents: int
    tokens: int
    rank_count: int
    ranks: dict[int, int] = dataclasses.field(default_factory=dict)  # rank -> entries

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.rank_count


class NameTable:
    """What the pool has, by its entries."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, Name, int]] = {}  # line -> generation, name, rank
        self._blocks: dict[Name, _Block] = {}

    def __len__(self) -> int:
        """Return the number of entries with a name."""
        return len(self._entries)

    def apply(self, changes: NDArray[np.void]) -> list[PoolEvent]:
        """Apply changes (:data:`beluga.meta.CHANGE`) in their order. Returns the events."""
        events = _Events()
        for generation, line, kind, name in changes.tolist():
            held = self._entries.get(line)
            if kind != STORED:
                if held is not None and held[0] == generation:
                    self._remove(line, events)
            elif held is None or held[0] < generation:
                if held is not None:
                    self._remove(line, events)
                self._store(line, generation, name, events)
        return events.take()

    def snapshot(self) -> list[PoolEvent]:
        """Return events that store everything, parents before their children if both are there."""
        events = _Events()
        children: dict[Name, list[Name]] = {}
        begin = []
        for name, block in self._blocks.items():
            if not block.complete:
                continue
            before = None if block.parent is None else self._blocks.get((name[0], block.parent))
            if block.parent is None or before is None or not before.complete:
                begin.append(name)
            else:
                children.setdefault((name[0], block.parent), []).append(name)
        told = set()
        while begin:
            name = begin.pop()
            if name in told:
                continue
            told.add(name)
            events.stored(name, self._blocks[name])
            begin.extend(children.get(name, ()))
        return events.take()

    def names(self) -> dict[Name, int]:
        """Return the blocks that all their ranks have, with their tokens hashes."""
        return {name: block.contents for name, block in self._blocks.items() if block.complete}

    def _store(self, line: int, generation: int, name: tuple[int, ...], events: _Events) -> None:
        block_hash, parent, contents, space, tokens, rank, rank_count, flags, _ = name
        if not rank < rank_count:
            return
        called = (space, block_hash)
        block = self._blocks.get(called)
        if block is None:
            before = parent if flags & NAME_PARENT else None
            block = self._blocks[called] = _Block(before, contents, tokens, rank_count)
        complete = block.complete
        block.ranks[rank] = block.ranks.get(rank, 0) + 1
        self._entries[line] = (generation, called, rank)
        if block.complete and not complete:
            events.stored(called, block)
        elif complete and not block.complete:
            events.removed(called)

    def _remove(self, line: int, events: _Events) -> None:
        _, called, rank = self._entries.pop(line)
        block = self._blocks[called]
        complete = block.complete
        block.ranks[rank] -= 1
        if not block.ranks[rank]:
            del block.ranks[rank]
        if complete and not block.complete:
            events.removed(called)
        if not block.ranks:
            del self._blocks[called]


class _Events:
    """Events in the making: a block that continues the last event joins it."""

    def __init__(self) -> None:
        self._events: list[PoolEvent] = []
        self._names: list[int] = []  # of the last event
        self._contents: list[int] = []

    def stored(self, called: Name, block: _Block) -> None:
        space, name = called
        last = self._events[-1] if self._events else None
        if not (
            last is not None
            and isinstance(last.data, Stored)
            and (last.space, last.block_size) == (space, block.tokens)
            and block.parent is not None
            and block.parent == self._names[-1]
        ):
            self._names, self._contents = [], []
            stored = Stored(self._names, self._contents, block.parent)
            self._events.append(PoolEvent(stored, space, block.tokens))
        self._names.append(name)
        self._contents.append(block.contents)

    def removed(self, called: Name) -> None:
        space, name = called
        last = self._events[-1] if self._events else None
        if last is None or not isinstance(last.data, Removed) or last.space != space:
            self._names = []
            self._events.append(PoolEvent(Removed(self._names), space))
        self._names.append(name)

    def take(self) -> list[PoolEvent]:
        return self._events
