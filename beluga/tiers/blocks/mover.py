# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moves batches of blocks between tiers: the copies, and what they mean for the pools.

Every copy is admitted before it starts. The blocks that it reads and writes are held by strong
handles of the mover, so no request's release gives them to anybody else meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from beluga.errors import TierError, UnsettledError
from beluga.metrics import Registry
from beluga.tiers.blocks.handles import MutableBlock, RegisteredBlock, WeakBlock
from beluga.tiers.blocks.pool import WATERMARK, BlockPool
from beluga.tiers.blocks.state import Key
from beluga.tiers.storage import MemoryType, Storage
from beluga.tiers.tier import BLOCK, LowerTier
from beluga.tiers.tier_blocks import TierBlocks
from beluga.transfer import TransferClass

Copy: TypeAlias = Callable[[TierBlocks, Sequence[int], TierBlocks, Sequence[int]], None]
"""Copies blocks of the first tier to blocks of the second, and returns when they are there."""

CopyAdmission: TypeAlias = Callable[[TransferClass, int], AbstractContextManager[bool]]
"""Admits a copy of so many bytes: the copy runs within the context, unless that yields False."""

_CHUNK_SIZE = 16 << 10
_WATERMARKS = {
    MemoryType.DEVICE: 0.85,
    MemoryType.PINNED: WATERMARK,
    MemoryType.SYSTEM: WATERMARK,
}


@dataclass(frozen=True, slots=True)
class OwnedTier:
    """A tier of a :class:`~beluga.tiers.BlockManager`: its blocks, and where they lie.

    Unless the pool has a watermark of its own, offload is due above 85 % of a GPU's blocks, and
    above 90 % of a host's.
    """

    pool: BlockPool
    blocks: TierBlocks

    def __post_init__(self) -> None:
        if self.pool.total_blocks > self.blocks.count:
            raise TierError(
                f"tier {self.pool.name} has {self.pool.total_blocks} blocks, its memory "
                f"{self.blocks.count}"
            )
        if self.pool.watermark is None:
            self.pool.watermark = _WATERMARKS[self.blocks.type]


@contextlib.contextmanager
def admit_all(kind: TransferClass, size: int) -> Iterator[bool]:
    """Admit every copy at once."""
    del kind, size
    yield True


class Mover:
    """Copies blocks between ``owned`` tiers, the highest first, and the ``lower`` ones below."""

    def __init__(  # noqa: PLR0913  a manager's parts
        self,
        owned: Sequence[OwnedTier],
        lower: Sequence[LowerTier],
        *,
        copy: Copy,
        admission: CopyAdmission,
        fingerprint: int,
        registry: Registry,
    ) -> None:
        lengths = {tier.blocks.length for tier in owned}
        if len(lengths) != 1 or len({tier.pool.block_size for tier in owned}) != 1:
            raise TierError("a block manager needs tiers whose blocks have one size")
        self.owned, self.lower = tuple(owned), tuple(lower)
        self.length = lengths.pop()
        self._copy, self._admission, self._fingerprint = copy, admission, fingerprint
        self._unsettled: list[object] = []  # blocks that a copy may still write to
        self._moved = registry.counter(
            "beluga_tier_moved_blocks_total", "Blocks that were copied to another tier."
        )
        self._dropped = registry.counter(
            "beluga_tier_dropped_blocks_total", "Blocks that were not copied, by reason."
        )

    def drop(self, tier: int, count: int, kind: TransferClass, reason: str) -> None:
        """Count blocks that are not copied after all."""
        if count:
            name = self.owned[tier].pool.name
            self._dropped.add(count, tier=name, kind=kind.name.lower(), reason=reason)

    def offload(self, tier: int, blocks: Sequence[WeakBlock]) -> tuple[list[WeakBlock], str]:
        """Copy blocks of a tier to the next one below. Return those that it has not got, although
        they exist, and why: ``refused`` by the admission, ``full``, or ``failed``.
        """
        with self._admission(TransferClass.OFFLOAD, len(blocks) * self.length) as admitted:
            if not admitted:
                self.drop(tier, len(blocks), TransferClass.OFFLOAD, "refused")
                return list(blocks), "refused"
            held = [block.upgrade(is_use=False) for block in blocks]
            alive = [block for block in held if block is not None]
            self.drop(tier, len(held) - len(alive), TransferClass.OFFLOAD, "gone")
            to_pool, pool = tier + 1 < len(self.owned), self.owned[tier].pool
            try:
                save = self._offload_to_pool if to_pool else self._offload_to_lower
                saved = save(tier, alive)
            except UnsettledError:
                self._unsettled.append(held)
                raise
            except BaseException:
                pool.drop_all(alive)
                raise
            unsaved = {block.key for block in alive} - saved
            left = [block for block in blocks if block.key in unsaved]
            pool.mark_saved(saved)
            pool.drop_all(alive)
            return left, "full" if to_pool else "failed"

    def bring(  # noqa: PLR0913  all of them named
        self,
        *,
        kind: TransferClass,
        target: int,
        keys: Sequence[Key],
        parents: Sequence[Key | None],
        found: Sequence[tuple[int, RegisteredBlock] | None],
        room: Sequence[MutableBlock],
    ) -> list[RegisteredBlock] | None:
        """Copy blocks to the target, from where each was ``found`` or from a lower tier.

        Return handles of the leading ones that could be had; ``room`` has a block for each. None
        says that the copies were not admitted. Raises what the copies raise.
        """
        if not keys:
            return []
        with self._admission(kind, len(keys) * self.length) as admitted:
            if not admitted:
                return None
            try:
                count = self._copy_up(target, keys, found, room)
            except UnsettledError:
                self._unsettled.append((room, found))
                raise
        for block, key, parent, source in zip(room, keys[:count], parents, found, strict=False):
            block.fill(self.owned[target].pool.block_size)
            if source is None:
                block.commit(key, parent=parent)
            else:
                block.commit(key, parent=source[1].parent, priority=source[1].priority)
        return self.owned[target].pool.register(room[:count], is_saved=True)

    def _copy_up(
        self,
        target: int,
        keys: Sequence[Key],
        found: Sequence[tuple[int, RegisteredBlock] | None],
        room: Sequence[MutableBlock],
    ) -> int:
        """Return how many leading blocks were copied."""
        to = self.owned[target].blocks
        absent = [place for place, one in enumerate(found) if one is None]
        loaded = self._load([keys[place] for place in absent], target)
        misses = [place for place, one in zip(absent, loaded, strict=True) if one is None]
        count = misses[0] if misses else len(keys)
        for place, storage in zip(absent, loaded, strict=True):
            if storage is not None and place < count:
                blocks = TierBlocks.of_storage(storage, self.length)
                self._copy(blocks, [0], to, [room[place].index])
        for tier, owned in enumerate(self.owned):
            pairs = [
                (one[1].index, block.index)
                for one, block in zip(found[:count], room, strict=False)
                if one is not None and one[0] == tier
            ]
            if pairs:
                self._copy(owned.blocks, [a for a, _ in pairs], to, [b for _, b in pairs])
                self._count(owned.pool.name, target, len(pairs))
        return count

    def _load(self, keys: Sequence[Key], target: int) -> list[Storage | None]:
        """Load blocks from the first lower tier that has them."""
        found: list[Storage | None] = [None] * len(keys)
        for tier in self.lower:
            missing = [place for place, storage in enumerate(found) if storage is None]
            if not missing:
                break
            wanted = pool_keys([keys[place] for place in missing])
            for place, block in zip(missing, tier.load(wanted), strict=True):
                if block is not None and self._is_ours(block.record):
                    found[place] = Storage.of(block.payload)
                    self._count(tier.name, target, 1)
        return found

    def _is_ours(self, record: np.void) -> bool:
        return bool(record["length"] == self.length and record["fingerprint"] == self._fingerprint)

    def _offload_to_pool(self, tier: int, blocks: list[RegisteredBlock]) -> set[Key]:
        source, target = self.owned[tier], self.owned[tier + 1]
        present = target.pool.contains([block.key for block in blocks])
        saved = {block.key for block, there in zip(blocks, present, strict=True) if there}
        self.drop(tier, len(saved), TransferClass.OFFLOAD, "present")
        missing = [block for block in blocks if block.key not in saved]
        room = self._room(target.pool, len(missing))
        self.drop(tier, len(missing) - len(room), TransferClass.OFFLOAD, "full")
        moved = missing[: len(room)]
        if not moved:
            return saved
        try:
            self._copy(
                source.blocks,
                [block.index for block in moved],
                target.blocks,
                [block.index for block in room],
            )
        except UnsettledError:
            self._unsettled.append(room)
            raise
        except BaseException:
            target.pool.drop_all(room)
            raise
        for block, place in zip(moved, room, strict=True):
            place.fill(target.pool.block_size)
            place.commit(block.key, parent=block.parent, priority=block.priority)
        target.pool.drop_all(target.pool.register(room))
        self._count(source.pool.name, tier + 1, len(moved))
        return saved | {block.key for block in moved}

    def _offload_to_lower(self, tier: int, blocks: list[RegisteredBlock]) -> set[Key]:
        """Save blocks in the first lower tier that takes them."""
        if not blocks:
            return set()
        staging = Storage.allocate(len(blocks) * self.length)
        target = TierBlocks.of_storage(staging, self.length)
        self._copy(
            self.owned[tier].blocks,
            [block.index for block in blocks],
            target,
            range(len(blocks)),
        )
        records = np.zeros(len(blocks), BLOCK)
        records["key"] = pool_keys([block.key for block in blocks])
        records["fingerprint"], records["length"] = self._fingerprint, self.length
        records["chunk_size"] = _CHUNK_SIZE
        payload = staging.array().reshape(len(blocks), self.length)
        left = np.arange(len(blocks))
        for lower in self.lower:
            done = lower.save(records[left], payload[left] if len(left) < len(blocks) else payload)
            left = left[~done]
            if not len(left):
                break
        self.drop(tier, len(left), TransferClass.OFFLOAD, "failed")
        saved = {block.key for block in blocks} - {blocks[place].key for place in left}
        self._moved.add(len(saved), source=self.owned[tier].pool.name, target=self.lower[0].name)
        return saved

    def _room(self, pool: BlockPool, count: int) -> list[MutableBlock]:
        """Reserve as many blocks as there are, up to ``count``."""
        while count:
            found = pool.try_reserve(self, count)
            if found is not None:
                return found
            count = min(count - 1, pool.available_blocks)
        return []

    def _count(self, source: str, target: int, count: int) -> None:
        self._moved.add(count, source=source, target=self.owned[target].pool.name)


def pool_keys(keys: Sequence[Key]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Return keys as a pool has them: pairs of 64 bits. Raises TierError for others."""
    try:
        found = np.array(keys, np.uint64).reshape(len(keys), 2)
    except (TypeError, ValueError, OverflowError):
        raise TierError("a lower tier needs keys that are pairs of 64-bit integers") from None
    return found
