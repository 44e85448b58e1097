# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An operator's settings of the tiers below a pool: directories, remote stores, and policies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from beluga.choices import OFFLOADS
from beluga.errors import TierError
from beluga.tiers.admission import ADMISSIONS, REMEMBERED, REMEMBERED_MAX, Adaptive, Always
from beluga.tiers.disk import DiskTier, SpreadTier
from beluga.tiers.disk.file import (
    DiskSet,
    check_owner,
    check_room,
    owner_of,
    plan_layout,
    refuse_foreign,
    set_of,
)
from beluga.tiers.remote import check_remote, open_remote, split_remote, store_name
from beluga.tiers.tier import BREAKER_STATE, LowerTier, StoredBlock

if TYPE_CHECKING:
    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.tiers.admission import Admission
    from beluga.tiers.disk.store import Keys


_PAGE_SIZE = 4096

_logger = logging.getLogger(__name__)

_BREAKER_OPEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """The tiers below a pool, fastest first: a disk tier, then remote stores.

    ``disks`` are directories, files or block devices, one for each disk; ``disk_bytes`` is their
    total size. ``remotes`` are URLs (:func:`beluga.tiers.open_remote`). With ``offload`` wait, a
    block is evicted from the pool only after it was offered to the tiers; with drop it may be lost
    first. ``admission`` is the policy for saving blocks, and ``eviction`` the disk's policy for
    dropping them. ``block_bytes`` is the approximate size of the smallest block (default: that of
    the pool's table). ``owner`` is the owner of a disk's blocks, by default the pool's location: a
    new pool there takes the disk over with its blocks. The disk of another owner and another pool
    is refused.

    Raises :class:`~beluga.errors.TierError` for settings that contradict each other.
    """

    disks: tuple[str, ...] = ()
    disk_bytes: int = 0
    remotes: tuple[str, ...] = ()
    offload: str = "drop"
    admission: str = "adaptive"
    eviction: str = "lru"
    block_bytes: int | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        """Check everything that can be checked without opening a tier."""
        if bool(self.disks) != (self.disk_bytes > 0):
            raise TierError("a disk tier needs a path and a size; give --disk and --disk-bytes")
        if self.offload not in OFFLOADS:
            raise TierError(f"--offload is {self.offload!r}; give {' or '.join(OFFLOADS)}")
        if self.admission not in ADMISSIONS:
            raise TierError(f"--admission is {self.admission!r}; give {', '.join(ADMISSIONS)}")
        if self.disks:
            try:
                plan_layout(self.disk_bytes // len(self.disks), _PAGE_SIZE, "")
            except TierError as error:
                raise TierError(f"--disk-bytes: {error}") from None
        for url in self.remotes:
            if self.remotes.count(url) > 1:
                raise TierError("--remote names a store twice; give each store once")
            try:
                split_remote(url)
            except TierError as error:
                raise TierError(f"--remote: {error}") from None  # the URL may have a password

    def check(self) -> None:
        """Check the disks and the stores as far as possible before a pool is taken over.

        Creates nothing and contacts no store. Raises :class:`~beluga.errors.TierError`.
        """
        files = [os.path.realpath(path) for path in self.disks]
        for path, file in zip(self.disks, files, strict=True):
            if files.count(file) > 1:
                raise TierError(f"--disk names {path} twice; give each disk once")
            _check_disk(path)
            refuse_foreign(Path(path))
            try:
                check_room(Path(path), self.disk_bytes // len(self.disks))
            except TierError as error:
                raise TierError(f"--disk-bytes: {error}") from None
        for url in self.remotes:
            check_remote(url)

    def check_owner(self, pool: Pool) -> None:
        """Raise :class:`~beluga.errors.TierError` if a disk has blocks of another owner."""
        owner = owner_of(pool, self.owner)
        for path in self.disks:
            check_owner(Path(path), owner)

    def __bool__(self) -> bool:
        """Return whether there is any tier."""
        return bool(self.disks or self.remotes)

    @property
    def count(self) -> int:
        """The number of tiers."""
        return bool(self.disks) + len(self.remotes)

    @property
    def names(self) -> list[str]:
        """The tiers' names in remembered removals: one for all disks, which are one tier, and each
        store's (:func:`beluga.tiers.remote.store_name`).
        """
        return [*["disk"] * bool(self.disks), *map(store_name, self.remotes)]

    def disk_set(self) -> DiskSet:
        """Return the set of these disks, which their files have, or a new one."""
        return set_of([Path(path) for path in self.disks])

    def others(self, names: Sequence[str]) -> list[str]:
        """Convert names of tiers to those in remembered removals: "disk" means all disks but these,
        and a URL all stores there but the one that these settings reach. Raises
        :class:`~beluga.errors.TierError`.
        """
        try:
            return [name if name == "disk" else store_name(name) for name in names]
        except TierError as error:
            raise TierError(f"--forget-tier: {error}, or disk") from None

    @property
    def waits(self) -> bool:
        """Whether the pool's eviction waits for these tiers."""
        return self.offload == "wait"

    def smallest_block(self, pool: Pool) -> int:
        """Return the approximate size of the smallest block, for sizing tables."""
        geometry = pool.geometry
        size = (geometry.size - geometry.data_offset) // geometry.block_count_max
        given = size if self.block_bytes is None else self.block_bytes
        return max(given // _PAGE_SIZE * _PAGE_SIZE, _PAGE_SIZE)

    def block_count_max(self, pool: Pool) -> int:
        """Return the largest number of blocks that the disks can have."""
        return self.disk_bytes // self.smallest_block(pool)

    def policy(self, server: IndexServer, pool: Pool) -> Admission:
        """Return the admission policy. ``server`` is the pool's server."""
        remembered = min(self.block_count_max(pool), REMEMBERED_MAX) or REMEMBERED
        kind = ADMISSIONS[self.admission]
        if issubclass(kind, Adaptive):
            return kind(
                remembered,
                warm_up=2 * pool.geometry.block_count_max,
                pool_hits=lambda: server.index_stat().hit_count,
            )
        return kind() if issubclass(kind, Always) else kind(remembered)

    def open(
        self,
        pool: Pool,
        *,
        patient: bool = False,
        disk_set: DiskSet | None = None,
        missed: Callable[[], Keys] | None = None,
    ) -> list[LowerTier]:
        """Open the tiers, with the disks of a set. ``missed`` returns the keys to remove from disks
        that leave the former set. Raises :class:`~beluga.errors.TierError`.

        With ``patient``, the disk is a :class:`LateTier`, which the caller opens as soon as
        possible.
        """
        tiers: list[LowerTier] = []
        try:
            if self.disks:
                opens = partial(self._open_disks, pool, disk_set, missed)
                tiers.append(self._late_disks(pool, opens) if patient else opens())
            tiers.extend(open_remote(url) for url in self.remotes)
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
        return tiers

    def _late_disks(self, pool: Pool, opens: Callable[[], LowerTier]) -> LateTier:
        return LateTier(
            opens,
            names=[f"disk:{path}" for path in self.disks],
            block_count_max=self.block_count_max(pool),
        )

    def _open_disks(
        self, pool: Pool, disk_set: DiskSet | None, missed: Callable[[], Keys] | None
    ) -> LowerTier:
        part, owner = self.disk_bytes // len(self.disks), owner_of(pool, self.owner)
        opened: list[DiskTier] = []
        try:
            opened.extend(
                DiskTier(
                    Path(path),
                    part,
                    server=owner.name,
                    pool=owner.pool,
                    eviction=self.eviction,
                    smallest_block=self.smallest_block(pool),
                    disk_set=disk_set,
                    missed=missed,
                )
                for path in self.disks
            )
            return opened[0] if len(opened) == 1 else SpreadTier(opened)
        except BaseException:
            for disk in opened:
                disk.close()
            raise


def _check_disk(name: str) -> None:
    """Raise TierError for a path that cannot be a disk tier."""
    if not name:
        raise TierError("the path of a disk tier is empty; give a folder, file or block device")
    path = Path(name)
    try:
        exists = path.exists()
        is_usable = path.is_dir() or path.is_file() or path.is_block_device()
        parent = path.absolute().parent
        if not exists and not parent.is_dir():
            raise TierError(
                f"{path} cannot be created: there is no folder {parent}; create it first"
            )
    except OSError as error:
        raise TierError(f"{path}: {error.strerror}") from error
    if exists and not is_usable:
        raise TierError(f"{path} is not a folder, file or block device; give one of these")
    used = path if exists else parent
    if not os.access(used, os.R_OK | os.W_OK | (os.X_OK if used.is_dir() else 0)):
        raise TierError(f"{used} cannot be written by this user; give another path")


class LateTier:
    """A :class:`LowerTier` in the place of one that cannot be opened yet: it has no blocks, saves
    none and removes none. A standby takes over from a server whose heartbeat has stopped. The old
    process still has the disk open, so the standby cannot open it before that process has ended.

    ``opens`` returns the tier, or raises TierError. ``names`` are its disks' names in metrics,
    where each counts as a tier with an open circuit breaker; the real tiers replace these series.
    ``block_count_max`` is the most blocks that the tier will have.
    """

    def __init__(
        self, opens: Callable[[], LowerTier], *, names: Sequence[str], block_count_max: int
    ) -> None:
        self.name = "+".join(names)
        self.block_count_max = block_count_max
        self._opens, self._names = opens, tuple(names)
        self._why = ""

    def open(self) -> LowerTier | None:
        """Try to open the tier. Returns it, or None if that is not possible yet."""
        try:
            tier = self._opens()
        except TierError as error:
            for name in self._names:
                BREAKER_STATE.set(_BREAKER_OPEN, tier=name)
            if str(error) != self._why:
                _logger.warning("the pool is served without a tier until it opens: %s", error)
                self._why = str(error)
            return None
        if self._why:
            _logger.warning("%s is open now", self.name)
        return tier

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save nothing."""
        return np.zeros(len(records), np.bool_)

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        """Return only misses."""
        return [None] * len(keys)

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return True for all keys: the tier may have them."""
        return np.ones(len(keys), np.bool_)

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove nothing."""
        return 0

    def remove_durably(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return that no key is removed, so that the caller tries again."""
        return np.zeros(len(keys), np.bool_)

    def keys(self) -> None:
        """Return None: the keys are not known."""

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Do nothing: there are no blocks to lose."""

    def close(self) -> None:
        """Stop trying to open the tier. Idempotent."""
        for name in self._names:
            BREAKER_STATE.remove(tier=name)
