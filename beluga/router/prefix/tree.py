# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tree of blocks in C (csrc/api/prefix.h), by rank number: one call per event or request.

Calls release the GIL. Threads look up concurrently; changes wait for each other in C.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from beluga._ffi import core, ffi, lib
from beluga._shared import when_forked
from beluga.errors import RouterError, raise_for_status
from beluga.router.words import U64

SHARED_RANK: int = lib.BL_PREFIX_SHARED
RANKS_MAX: int = lib.BL_PREFIX_RANKS_MAX - 1
BLOCKS_MAX: int = lib.BL_PREFIX_BLOCKS_MAX

_MATCH_WORDS = ffi.sizeof("bl_prefix_match") // 4


class TreeStat(NamedTuple):
    """The fill level of the tree. ``evicted`` counts blocks that were dropped to make space."""

    blocks: int
    names: int
    block_max: int
    name_max: int
    evicted: int


def _pointer(values: array[int] | None) -> core.uint64_p | core.Null:
    return ffi.NULL if values is None else ffi.from_buffer("uint64_t[]", values)


class Tree:
    """A tree with ranks 1 to ``rank_max``; SHARED_RANK is the pool. Errors of C are returned as
    negative errno, with the outcome.
    """

    def __init__(self, *, rank_max: int, block_max: int, name_max: int) -> None:
        out = ffi.new("bl_prefix **")
        if not (
            1 <= rank_max <= RANKS_MAX
            and 1 <= block_max <= BLOCKS_MAX
            and 1 <= name_max <= BLOCKS_MAX
        ):
            raise RouterError(
                f"an index has 1 to {RANKS_MAX} workers and 1 to {BLOCKS_MAX} blocks and names"
            )
        raise_for_status(
            lib.bl_prefix_create(out, rank_max, block_max, name_max), "making an index"
        )
        self._rank_max = rank_max
        self._handle = ffi.gc(out[0], lib.bl_prefix_destroy)
        self._forked = False
        when_forked(self)

    @property
    def handle(self) -> core.bl_prefix:
        """The ``bl_prefix *``. Raises RouterError in a forked child, because a thread of the parent
        may have held its locks or have been changing it.
        """
        if self._forked:
            raise RouterError(
                "this index belongs to the parent process; create a new one after fork"
            )
        return self._handle

    def _after_fork(self) -> None:
        self._forked = True

    def store(  # noqa: PLR0913, PLR0917  a C call's arguments
        self,
        rank: int,
        tier: int,
        publisher: int,
        parent: int | None,
        names: array[int],
        locals_: array[int] | None,
        outcome: core.bl_prefix_outcome,
    ) -> int:
        """Store blocks after the parent that ``rank``, or else ``publisher``, calls ``parent``.
        Without ``locals_``, both must already have names for the blocks. Returns C's status.
        """
        if locals_ is None:
            return int(
                lib.bl_prefix_hold(
                    self.handle, rank, tier, publisher, _pointer(names), len(names), outcome
                )
            )
        if len(names) != len(locals_):
            return -errno.EINVAL
        before = ffi.NULL if parent is None else ffi.new("uint64_t *", parent & U64)
        return int(
            lib.bl_prefix_store(
                self.handle,
                rank,
                tier,
                publisher,
                before,
                _pointer(names),
                _pointer(locals_),
                len(names),
                outcome,
            )
        )

    def remove(
        self, rank: int, tier: int, names: array[int], outcome: core.bl_prefix_outcome
    ) -> int:
        """Remove blocks from one tier of a rank. Returns C's status."""
        return int(
            lib.bl_prefix_remove(self.handle, rank, tier, _pointer(names), len(names), outcome)
        )

    def clear(self, rank: int, outcome: core.bl_prefix_outcome) -> int:
        """Remove everything that a rank holds, in every tier. Returns C's status."""
        return int(lib.bl_prefix_clear(self.handle, rank, outcome))

    def find(
        self, locals_: array[int], early_exit: bool
    ) -> tuple[Iterable[tuple[int, int, int, int, int]], int]:
        """Return the ranks that hold the first block, each with the ends of its matches (device,
        host, disk, shared), all counted from the first block; and how many leading blocks the pool
        holds.
        """
        matches = ffi.new("uint32_t[]", _MATCH_WORDS * self._rank_max)
        shared = ffi.new("uint32_t *")
        count = lib.bl_prefix_find(
            self.handle,
            _pointer(locals_),
            len(locals_),
            early_exit,
            ffi.cast("bl_prefix_match *", matches),
            shared,
        )
        numbers = iter(ffi.unpack(matches, _MATCH_WORDS * count))
        return zip(numbers, numbers, numbers, numbers, numbers, strict=True), shared[0]

    def held(self, rank: int, tier: int) -> int:
        """Return the number of names that a rank has in a tier."""
        return int(lib.bl_prefix_held(self.handle, rank, tier))

    def paths(self, locals_: array[int]) -> array[int]:
        """Return a hash of each block's whole path. These serve as names of blocks that no engine
        announces.
        """
        paths = array("Q", bytes(8 * len(locals_)))
        lib.bl_prefix_paths(self.handle, _pointer(locals_), len(locals_), _pointer(paths))
        return paths

    def names(self, rank: int) -> dict[int, int]:
        """Return a rank's names for the blocks that it holds, with each block's local hash."""
        room = 0
        while True:
            rows = ffi.new("bl_prefix_row[]", room)
            count = lib.bl_prefix_dump(self.handle, rank, rows, room)
            if count <= room:
                return {row.name: row.local for row in rows[0:count]}
            room = count + count // 8  # other threads may store meanwhile

    def stat(self) -> TreeStat:
        """Return the fill level of the tree."""
        stat = ffi.new("bl_prefix_stat *")
        lib.bl_prefix_stat_read(self.handle, stat)
        return TreeStat(stat.blocks, stat.names, stat.block_max, stat.name_max, stat.evicted)
