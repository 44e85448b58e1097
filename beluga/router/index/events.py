# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""KV events as a router knows them: what an engine stored and removed, and in which tier.

Two hashes stand for a block. Its *tokens hash* (local hash) is made of its contents alone, the same
way by everybody; indexes are walked by it. Its *block hash* (sequence hash) is the engine's own
name for it: opaque, never computed again here, a key for parents and removals. Both have 64 bits;
what comes with a sign is read as bits without one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from beluga.errors import EventError
from beluga.router.worker import Worker


class Tier(enum.IntEnum):
    """Where a block lies, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3  # a store that no worker owns: the pool


# What engines call a tier (Dynamo's kv-events-custom-engines.md, and vLLM's STORAGE).
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
    """The tier that an engine's word stands for; without one it is the device.

    Raises EventError for a word that nobody uses.
    """
    if medium is None:
        return Tier.DEVICE
    tier = _MEDIUMS.get(medium.upper()) if isinstance(medium, str) else None
    if tier is None:
        raise EventError(f"a KV event names the tier {str(medium)[:40]!r}; there is no such one")
    return tier


@dataclasses.dataclass(slots=True)
class Stored:
    """Blocks in a row, each the child of the one before. ``tokens_hashes`` None: the engine says no
    contents, so these are blocks that it (or the pool) has told of before, in another tier.
    """

    block_hashes: Sequence[int]
    tokens_hashes: Sequence[int] | None
    parent_hash: int | None = None  # block hash; None: the first one has no parent


@dataclasses.dataclass(slots=True)
class Removed:
    """Blocks that are gone from a tier."""

    block_hashes: Sequence[int]


@dataclasses.dataclass(slots=True)
class Cleared:
    """All blocks of one rank are gone, from all its tiers."""


Data: TypeAlias = Stored | Removed | Cleared


@dataclasses.dataclass(slots=True)
class RouterEvent:
    """An event and who says it. ``event_id`` counts up by one for each worker; None: it is not
    numbered here.
    """

    worker: Worker
    data: Data
    event_id: int | None = None
    tier: Tier = Tier.DEVICE


def to_dynamo(event: RouterEvent) -> dict[str, Any]:
    """An event in Dynamo's form, as its "kv-events" subject carries it."""
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


_DYNAMO_TIERS = {
    "device": Tier.DEVICE,
    "host": Tier.HOST,
    "host_pinned": Tier.HOST,
    "disk": Tier.DISK,
    "external": Tier.SHARED,
    "shared": Tier.SHARED,
}


def from_dynamo(form: Mapping[str, Any]) -> RouterEvent:
    """The event of a decoded message in Dynamo's form.

    Raises EventError if it has not that form.
    """
    try:
        inner = form["event"]
        word = form.get("storage_tier") or "device"
        return RouterEvent(
            Worker(int(form["worker_id"]), int(inner.get("dp_rank") or 0)),
            _dynamo_data(inner["data"]),
            None if inner.get("event_id") is None else int(inner["event_id"]),
            _DYNAMO_TIERS[str(word).lower()],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EventError(f"an event is not in Dynamo's form: {error!r:.80}") from None


def _dynamo_data(data: Any) -> Data:
    if data == "cleared" or (isinstance(data, dict) and "cleared" in data):
        return Cleared()
    if "removed" in data:
        return Removed([int(name) for name in data["removed"]["block_hashes"]])
    stored = data["stored"]
    blocks = stored["blocks"]
    contents = [block["tokens_hash"] for block in blocks]
    parent = stored.get("parent_hash")
    return Stored(
        [int(block["block_hash"]) for block in blocks],
        None if None in contents else [int(local) for local in contents],
        None if parent is None else int(parent),
    )
