# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The lines of the block table and of the name table, read from the pool
(``csrc/check/entries.c``).

A router cannot derive anything from a key. So a block may have a name: the engine's hash of the
block, that of its parent, and the router's hash of the block's tokens, 64 bits each (``bl_name``).
The pool stores names in a separate table, and the server passes each change of a named block to a
thread of its process (``csrc/index/journal.c``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import ffi, lib, record_dtype
from beluga.errors import raise_for_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from beluga.pool import Pool


ENTRY = record_dtype("bl_entry")
"""A line of the block table (``bl_entry``). A free line still has the key of its last block."""

COMMITTED: int = lib.BL_ENTRY_COMMITTED
FREE: int = lib.BL_ENTRY_FREE
TORN: int = lib.BL_ENTRY_TORN
# Upper bits of a generation are the epoch, lower ones a counter (csrc/index/state.h)
EPOCH_SHIFT = 40
_ENTRY_LINES = 1 << 14  # read in one call: 1 MiB

NAME = record_dtype("bl_name")
"""An engine's name of a block (``bl_name``). A record with ``block_tokens`` 0 is not a name.

Names of one ``space`` form chains. If ``rank_count`` ranks each store a part of a block under their
own key, the block is present when all parts are. ``flags`` has :data:`NAME_PARENT` if there is a
parent.
"""

CHANGE = record_dtype("bl_change")
"""A change of the block index (``bl_change``): ``kind`` is :data:`STORED` or :data:`REMOVED`. A
generation is that of one block and never reused; ``block`` is its line of the block table. A
removal has no name.
"""

NAME_PARENT: int = lib.BL_NAME_PARENT
STORED: int = lib.BL_CHANGE_STORED
REMOVED: int = lib.BL_CHANGE_REMOVED
_U64 = (1 << 64) - 1
_NAME_LINES = 1 << 16  # lines of the name table that one call reads


def read_entries(pool: Pool, half: int) -> Iterator[NDArray[np.void]]:
    """Yield the lines of a half of the block table in order, in arrays of :data:`ENTRY`.

    A running server may change lines during the read; a torn line is returned as :data:`TORN`.
    """
    for first in range(0, pool.geometry.block_count_max, _ENTRY_LINES):
        lines = np.zeros(min(_ENTRY_LINES, pool.geometry.block_count_max - first), ENTRY)
        into = ffi.from_buffer("bl_entry[]", lines, require_writable=True)
        with pool.using() as handle:
            raise_for_status(
                lib.bl_entries_read(handle, half, first, len(lines), into), "reading the table"
            )
        yield lines


def chain_names(  # noqa: PLR0913  keyword-only but the first two
    block_hashes: Sequence[int],
    tokens_hashes: Sequence[int],
    *,
    block_tokens: int,
    parent_hash: int | None = None,
    space: int = 0,
    rank: int = 0,
    rank_count: int = 1,
) -> NDArray[np.void]:
    """Return names for consecutive blocks, each a child of the one before: an array of
    :data:`NAME`.

    ``parent_hash`` is the hash of the parent of the first block, if any. Raises ValueError for
    unequal lengths, and for a block without tokens.
    """
    if len(block_hashes) != len(tokens_hashes):
        raise ValueError(
            f"there are {len(block_hashes)} block hashes but {len(tokens_hashes)} token hashes"
        )
    if block_tokens < 1 or not 0 <= rank < rank_count:
        raise ValueError(
            "a name needs a positive number of tokens and a rank below the number of ranks, but "
            f"has {block_tokens} tokens and rank {rank} of {rank_count}"
        )
    names = np.zeros(len(block_hashes), NAME)
    if len(names):
        hashes = np.array([value & _U64 for value in block_hashes], np.uint64)
        names["block_hash"] = hashes
        names["parent_hash"][1:] = hashes[:-1]
        names["flags"] = NAME_PARENT
        names["flags"][0] = 0 if parent_hash is None else NAME_PARENT
        names["parent_hash"][0] = (parent_hash or 0) & _U64
        names["tokens_hash"] = np.array([value & _U64 for value in tokens_hashes], np.uint64)
    names["space"] = space & _U64
    names["block_tokens"] = block_tokens
    names["rank"], names["rank_count"] = rank, rank_count
    return names


def names_at(pool: Pool, half: int, records: NDArray[np.void]) -> NDArray[np.void]:
    """Return the names of the blocks of these records, which have fields ``block`` and
    ``generation``: an array of :data:`NAME`. Blocks that have no name or are no longer there have
    zeros.
    """
    names = np.zeros(len(records), NAME)
    row = np.zeros(1, CHANGE)
    out = ffi.from_buffer("bl_change[]", row, require_writable=True)
    first = ffi.new("uint32_t *")
    for row_number, (block, generation) in enumerate(
        zip(records["block"].tolist(), records["generation"].tolist(), strict=True)
    ):
        first[0] = block
        with pool.using() as handle:
            count = lib.bl_names_read(handle, half, first, 1, out)
        pool.raise_for_status(count, "reading the name of a block")
        if count and int(row["generation"][0]) == generation:
            names[row_number] = row["name"][0]
    return names


def read_names(pool: Pool, half: int) -> NDArray[np.void]:
    """Read the names of all committed, named blocks: an array of :data:`CHANGE`.

    ``half`` is the half of the serving epoch. Blocks that are stored or evicted during the read may
    be missing. Raises a PoolError if memory of the pool fails.
    """
    first = ffi.new("uint32_t *")
    batches = []
    rows = np.zeros(_NAME_LINES, CHANGE)
    out = ffi.from_buffer("bl_change[]", rows, require_writable=True)
    while first[0] < pool.geometry.block_count_max:
        with pool.using() as handle:
            count = lib.bl_names_read(handle, half, first, len(rows), out)
        pool.raise_for_status(count, "reading the names of blocks")
        batches.append(rows[:count].copy())
    return np.concatenate(batches) if batches else rows[:0]
