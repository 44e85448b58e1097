# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The table of named blocks in C (``csrc/index/events.c``), which turns changes of the block index
into events.

Each rank of an engine stores its part of a block under a key of its own. The block counts as stored
once the last rank has stored it, and as removed once the first rank has removed it. Changes may be
delivered twice, or be in the table already: their generations reveal that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.errors import raise_for_status
from beluga.index import NAME_PARENT, STORED
from beluga.router import PoolEvent, Removed, Stored

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EVENT = record_dtype("bl_event")
_EVENTS_OF_CHANGE = 2  # at most: a line may be reused before its removal is delivered


class NameTable:
    """The named blocks of a pool, for the ``line_count`` lines of its block table. One thread at a
    time may use it.
    """

    def __init__(self, line_count: int) -> None:
        out = ffi.new("bl_events **")
        raise_for_status(lib.bl_events_create(out, line_count), "making a table of names")
        self._handle = ffi.gc(out[0], lib.bl_events_destroy)

    def __len__(self) -> int:
        """Return the number of blocks, including those that some ranks lack."""
        return int(lib.bl_events_count(self._handle))

    def begin(self, changes: NDArray[np.void]) -> None:
        """Apply changes without events."""
        pointer = ffi.from_buffer("bl_change[]", changes)
        lib.bl_events_apply(self._handle, pointer, len(changes), ffi.NULL)

    def apply(self, changes: NDArray[np.void]) -> list[PoolEvent]:
        """Apply changes (:data:`beluga.index.CHANGE`) in their order. Returns the events."""
        if not len(changes):
            return []
        rows = np.empty(_EVENTS_OF_CHANGE * len(changes), _EVENT)
        pointer = ffi.from_buffer("bl_change[]", changes)
        count = lib.bl_events_apply(self._handle, pointer, len(changes), _pointer(rows))
        return _joined(rows[:count])

    def snapshot(self) -> list[PoolEvent]:
        """Return events that store everything, parents before their children if both are there."""
        rows = np.empty(max(len(self), 1), _EVENT)
        count = lib.bl_events_all(self._handle, _pointer(rows))
        raise_for_status(count, "listing the names of blocks")
        return _joined(rows[:count])


def _pointer(rows: NDArray[np.void]) -> core.bl_event:
    return ffi.from_buffer("bl_event[]", rows, require_writable=True)


def _joined(rows: NDArray[np.void]) -> list[PoolEvent]:
    """Return the events of rows, with one event for rows that join."""
    starts = np.flatnonzero(rows["joins"] == 0)
    name = rows["name"]
    hashes, contents = name["block_hash"].tolist(), name["tokens_hash"].tolist()
    first = name[starts]
    events = []
    for start, end, kind, parent, space, tokens, flags in zip(
        starts.tolist(),
        [*starts.tolist(), len(rows)][1:],
        rows["kind"][starts].tolist(),
        first["parent_hash"].tolist(),
        first["space"].tolist(),
        first["block_tokens"].tolist(),
        first["flags"].tolist(),
        strict=True,
    ):
        names = hashes[start:end]
        if kind == STORED:
            before = parent if flags & NAME_PARENT else None
            events.append(PoolEvent(Stored(names, contents[start:end], before), space, tokens))
        else:
            events.append(PoolEvent(Removed(names), space))
    return events
