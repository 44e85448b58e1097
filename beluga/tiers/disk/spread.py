# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One tier over several disks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.tiers.disk.tier import DiskTier
from beluga.tiers.hanging import DiskCall
from beluga.tiers.tier import StoredBlock, check_blocks

_T = TypeVar("_T")


class SpreadTier:
    """Spreads blocks over disk tiers, and searches all of them: a :class:`LowerTier`.

    New blocks go to the disks that have space and few pending writes. A failing disk is not used
    until it recovers; its blocks are misses meanwhile, and its failures are counted under its name.
    Each disk has its own threads. A hanging disk delays only the calls that use it first, for its
    ``limit_s``.

    This tier owns the disks: :meth:`close` closes them.
    """

    def __init__(self, tiers: Sequence[DiskTier]) -> None:
        if not tiers:
            raise TierError("a spread tier has no disks; give at least one")
        self.tiers = tuple(tiers)
        self.name = "+".join(tier.name for tier in tiers)
        self._lock = threading.Lock()
        self._waiting = [0] * len(tiers)  # bytes of pending saves of each disk

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks. Returns which of them are saved now, or were already."""
        records, payload = check_blocks(records, payload)
        saved = self._readable(np.ascontiguousarray(records["key"]))
        remaining = np.flatnonzero(~saved)
        disks = set(range(len(self.tiers)))
        # If one disk refuses a block, another may take it.
        while len(remaining) and (
            shares := self._share(records["length"][remaining], remaining, disks)
        ):
            calls = [
                self.tiers[disk].saving(records[rows], payload, rows)
                for disk, rows in shares.items()
            ]
            try:
                results = _results(calls)
            finally:
                with self._lock:
                    for disk, rows in shares.items():
                        self._waiting[disk] -= int(records["length"][rows].sum())
            for (disk, rows), result in zip(shares.items(), results, strict=True):
                saved[rows] = result
                if not result.all():
                    disks.discard(disk)
            remaining = remaining[~saved[remaining]]
        return saved

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        """Load blocks; a miss is None. :meth:`contains` returns which of the misses the tier still
        has.
        """
        blocks: list[StoredBlock | None] = [None] * len(keys)
        remaining, rows_of_disks, calls = np.arange(len(keys)), [], []
        # A block that was saved again while its disk failed is on two disks.
        for tier in sorted(self.tiers, key=lambda tier: not tier.loads.allows()):
            is_there = tier.contains(keys[remaining])
            if is_there.any():
                rows = remaining[is_there]
                rows_of_disks.append(rows)
                calls.append(tier.loading(keys[rows]))
                remaining = remaining[~is_there]
        for rows, loaded in zip(rows_of_disks, _results(calls), strict=True):
            for row, block in zip(rows.tolist(), loaded, strict=True):
                blocks[row] = block
        return blocks

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which blocks the tier has, readable now or not."""
        return self._held_by(self.tiers, keys)

    def _readable(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which blocks are on disks that may be read now. The others are saved again,
        because their disks may be lost for good.
        """
        return self._held_by([tier for tier in self.tiers if tier.loads.allows()], keys)

    @staticmethod
    def _held_by(tiers: Sequence[DiskTier], keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        held = np.zeros(len(keys), np.bool_)
        for tier in tiers:
            held |= tier.contains(keys)
        return held

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove blocks. Returns how many there were."""
        return sum(count for count, _ in _results([tier.removing(keys) for tier in self.tiers]))

    def remove_durably(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Remove blocks durably. Returns which keys have no block left: all of them, or none if one
        of the disks fails.
        """
        results = _results([tier.removing(keys) for tier in self.tiers])
        return np.full(len(keys), all(is_durable for _, is_durable in results))

    @property
    def block_count_max(self) -> int:
        """The largest number of blocks that the tier can have."""
        return sum(tier.block_count_max for tier in self.tiers)

    def keys(self) -> NDArray[np.uint64]:
        """Return the keys of all blocks that the tier has, shape (count, 2)."""
        return np.concatenate([tier.keys() for tier in self.tiers])

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Register ``lost(keys)``, which is called for evicted blocks and for blocks found to be
        damaged.
        """
        for tier in self.tiers:
            tier.on_lost(lost)

    def close(self) -> None:
        """Close all disks. Idempotent."""
        for tier in self.tiers:
            tier.close()

    def _share(
        self, lengths: NDArray[np.uint32], rows: NDArray[np.intp], disks: set[int]
    ) -> dict[int, NDArray[np.intp]]:
        """Distribute blocks over those of these disks that may be written and read. Each block goes
        to the disk with the most free space after its pending writes or, if all are full, to the
        one with the fewest pending bytes for its size.
        """
        stats = {
            disk: stat
            for disk in sorted(disks)
            if self.tiers[disk].saves.allows()
            and self.tiers[disk].loads.allows()
            and (stat := self.tiers[disk].stat())
        }
        if not stats:
            return {}
        shares: dict[int, list[int]] = {disk: [] for disk in stats}
        with self._lock:
            free = {disk: stat["data_bytes"] - stat["used_bytes"] for disk, stat in stats.items()}
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
                disk = max(
                    stats,
                    key=lambda disk: (
                        max(0, free[disk] - self._waiting[disk]) / stats[disk]["data_bytes"],
                        -self._waiting[disk] / stats[disk]["data_bytes"],
                    ),
                )
                shares[disk].append(row)
                self._waiting[disk] += length
        return {disk: np.array(mine, np.intp) for disk, mine in shares.items() if mine}


def _results(calls: Sequence[DiskCall[_T]]) -> list[_T]:
    """Run calls on several disks in parallel, and return their results. After an interrupt, none of
    them is waited for, and no save continues to use the caller's memory.
    """
    try:
        for call in calls:
            call.start()
        return [call.result() for call in calls]
    except BaseException:
        for call in calls:
            call.leave()
        raise
