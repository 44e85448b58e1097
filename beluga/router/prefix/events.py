# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""KV events from a router's perspective: what an engine stored and removed, and in which tier.

A block has two hashes. Its *tokens hash* (local hash) depends only on its contents and is the same
everywhere; indexes are searched by it. Its *block hash* (sequence hash) is the engine's own name
for the block. The router never computes it; it identifies parents and removed blocks. Both have 64
bits; signed values are reinterpreted as unsigned.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, TypeAlias

from beluga.errors import EventError
from beluga.router.worker import Worker


class Tier(enum.IntEnum):
    """The tiers of blocks, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3  # the pool: a store shared by all workers


# Engines' names of tiers (Dynamo's kv-events-custom-engines.md, and vLLM's STORAGE).
_MEDIUMS = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.SHARED,
    "NETWORK": Tier.SHARED,
    "REMOTE": Tier.SHARED,
    "SHARED": Tier.SHARED,
}


def tier_of(medium: str | None) -> Tier:
    """Return the tier for an engine's name; None means the device.

    Raises EventError for an unknown name.
    """
    if medium is None:
        return Tier.DEVICE
    tier = _MEDIUMS.get(medium.upper()) if isinstance(medium, str) else None
    if tier is None:
        raise EventError(f"a KV event has the tier {str(medium)[:40]!r}, which does not exist")
    return tier


@dataclasses.dataclass(slots=True)
class Stored:
    """Consecutive blocks, each the child of the one before. ``tokens_hashes`` is None if the engine
    sends no contents; the blocks were then announced earlier, in another tier.
    """

    block_hashes: Sequence[int]
    tokens_hashes: Sequence[int] | None
    parent_hash: int | None = None  # a block hash; None: the first block has no parent


@dataclasses.dataclass(slots=True)
class Removed:
    """Blocks that were removed from a tier."""

    block_hashes: Sequence[int]


@dataclasses.dataclass(slots=True)
class Cleared:
    """All blocks of one rank were removed from all of its tiers."""


Data: TypeAlias = Stored | Removed | Cleared


@dataclasses.dataclass(slots=True)
class RouterEvent:
    """An event with its sender. ``event_id`` increases by one for each event of a worker; None
    means that the event has no number.
    """

    worker: Worker
    data: Data
    event_id: int | None = None
    tier: Tier = Tier.DEVICE


def to_dynamo(event: RouterEvent) -> dict[str, Any]:
    """Convert an event to Dynamo's format, as in its "kv-events" subject."""
    data: str | dict[str, Any]
    if isinstance(event.data, Stored):
        stored = event.data
        contents: Sequence[int | None] = stored.tokens_hashes or [None] * len(stored.block_hashes)
        blocks = [
            {"block_hash": name, "tokens_hash": local}
            for name, local in zip(stored.block_hashes, contents, strict=True)
        ]
        data = {"stored": {"parent_hash": stored.parent_hash, "blocks": blocks}}
    elif isinstance(event.data, Removed):
        data = {"removed": {"block_hashes": list(event.data.block_hashes)}}
    else:
        data = "cleared"
    return {
        "worker_id": event.worker.worker_id,
        "storage_tier": event.tier.name.lower(),
        "event": {"event_id": event.event_id, "data": data, "dp_rank": event.worker.dp_rank},
    }
