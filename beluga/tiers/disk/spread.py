# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One tier over several disks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.tiers.disk.tier import DiskTier
from beluga.tiers.tier import StoredBlock


class SpreadTier:
    """Spreads blocks over disk tiers, and finds them on all: a :class:`LowerTier`.

    New blocks go to the disks that have space and little to do. A disk that fails is left out until
    it comes back; its blocks are misses meanwhile, and its failures are counted under its name.

    The tiers belong to this one: :meth:`close` closes them.
    """

    def __init__(self, tiers: Sequence[DiskTier]) -> None:
        if not tiers:
            raise TierError("a spread tier has no disks; give at least one")
        self.tiers = tuple(tiers)
        self.name = "+".join(tier.name for tier in tiers)
        self._lock = threading.Lock()
        self._waiting = [0] * len(tiers)  # bytes that saves of each disk wait for
        self._pool = ThreadPoolExecutor(4 * len(tiers), thread_name_prefix="disk-tier")

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks, and return which of them are saved now, or were before."""
        if len(records) != len(payload):
            raise TierError(f"there are {len(records)} records and {len(payload)} rows of payload")
        saved = self.contains(np.ascontiguousarray(records["key"]))
        left = np.flatnonzero(~saved)
        disks = set(range(len(self.tiers)))
        # What one disk refuses, another may take.
        while len(left) and (shares := self._share(records["length"][left], left, disks)):
            jobs = {
                disk: self._pool.submit(self._save_to, disk, records[rows], payload, rows)
                for disk, rows in shares.items()
            }
            for disk, job in jobs.items():
                saved[shares[disk]] = job.result()
                if not saved[shares[disk]].all():
                    disks.discard(disk)
            left = left[~saved[left]]
        return saved

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        """Load blocks; a miss is None."""
        blocks: list[StoredBlock | None] = [None] * len(keys)
        left, jobs = np.arange(len(keys)), []
        for tier in self.tiers:
            found = tier.contains(keys[left])
            if found.any():
                rows = left[found]
                jobs.append((rows, self._pool.submit(tier.load, keys[rows])))
                left = left[~found]
        for rows, job in jobs:
            for row, block in zip(rows.tolist(), job.result(), strict=True):
                blocks[row] = block
        return blocks

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which blocks the tier has."""
        found = np.zeros(len(keys), np.bool_)
        for tier in self.tiers:
            found |= tier.contains(keys)
        return found

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove blocks, and return how many there were."""
        return sum(tier.remove(keys) for tier in self.tiers)

    @property
    def block_count_max(self) -> int:
        """The most blocks that the tier can have."""
        return sum(tier.block_count_max for tier in self.tiers)

    def keys(self) -> NDArray[np.uint64]:
        """Return the keys of all blocks that the tier has, shape (count, 2)."""
        return np.concatenate([tier.keys() for tier in self.tiers])

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Have ``lost(keys)`` called with blocks that were evicted, or that turned out to be
        damaged.
        """
        for tier in self.tiers:
            tier.on_lost(lost)

    def close(self) -> None:
        """Close all disks. A second call does nothing."""
        self._pool.shutdown()
        for tier in self.tiers:
            tier.close()

    def _save_to(
        self,
        disk: int,
        records: NDArray[np.void],
        payload: NDArray[np.uint8],
        rows: NDArray[np.intp],
    ) -> NDArray[np.bool_]:
        size = int(records["length"].sum())
        try:
            return self.tiers[disk].save(records, payload[rows])
        finally:
            with self._lock:
                self._waiting[disk] -= size

    def _share(
        self, lengths: NDArray[np.uint32], rows: NDArray[np.intp], disks: set[int]
    ) -> dict[int, NDArray[np.intp]]:
        """Divide blocks over those of these disks that may be written. Each goes where the most
        space is free beside what waits, and where all are full, where the least waits for its size.
        """
        stats = {
            disk: stat
            for disk in sorted(disks)
            if self.tiers[disk].saves.allows() and (stat := self.tiers[disk].stat())
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
