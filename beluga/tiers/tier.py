# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lower tier: a store below the pool, on a disk or remote, that keeps blocks for later use.

A lower tier stores immutable blocks by key. A load returns the bytes that were saved under the key,
or a miss (D6), even if its medium fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.metrics import REGISTRY

SAVED_BLOCKS = REGISTRY.counter("beluga_tier_saved_blocks_total", "Blocks that a tier has stored.")
SAVED_BYTES = REGISTRY.counter("beluga_tier_saved_bytes_total", "Bytes that a tier has stored.")
LOADED_BLOCKS = REGISTRY.counter(
    "beluga_tier_loaded_blocks_total", "Blocks that a tier has returned."
)
LOADED_BYTES = REGISTRY.counter("beluga_tier_loaded_bytes_total", "Bytes that a tier has returned.")
MISSED_BLOCKS = REGISTRY.counter(
    "beluga_tier_missed_blocks_total", "Blocks that a tier did not find."
)
BREAKER_STATE = REGISTRY.gauge("beluga_tier_breaker_state", "0 is closed, 1 half-open, 2 open.")

_TABLE = 2  # dimensions of keys and payloads

BLOCK: np.dtype[np.void] = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("fingerprint", "<u8"),
        ("length", "<u4"),
        ("chunk_size", "<u4"),
    ]
)
"""The record of a block that the pool needs to take it back: 32 bytes. ``length`` counts payload
bytes, ``fingerprint`` is that of the namespace, ``chunk_size`` is the payload bytes per checksum.
"""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A loaded block: a record of :data:`BLOCK`, and ``length`` payload bytes. The service sets the
    ``name`` (``named.py``).
    """

    record: np.void
    payload: NDArray[np.uint8]
    name: np.void | None = None


class LowerTier(Protocol):
    """A store of blocks below the pool. Thread-safe.

    Calls block as long as the medium does. Loads have priority over saves on the same medium. A
    failure of the medium never raises: the block is a miss, or not saved, and a counter in
    :data:`beluga.metrics.REGISTRY` increases.
    """

    @property
    def name(self) -> str:
        """The tier's name in metrics and messages, for example ``disk:/mnt/nvme0``."""

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks. Returns which of them are saved now, or were already.

        ``records`` are of :data:`BLOCK`, shape (count,). ``payload`` has shape (count, stride); the
        first ``length`` bytes of each row are a block. A saved block survives the death of this
        process.
        """

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        """Load blocks; a miss is None. ``keys`` has shape (count, 2)."""

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which blocks the tier has. A disk uses its index, which includes blocks that are
        unreadable for a while; for a remote store, this is a round trip.
        """

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove blocks. Returns how many there were, if the tier can count them."""

    def remove_durably(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Remove blocks durably. Returns which keys have no block left, whatever happens to this
        process and its host. A key that had no block counts as removed.

        Other keys may still have a block, now or after a restart. A save of such a key replaces the
        block.
        """

    @property
    def block_count_max(self) -> int:
        """The largest number of blocks that the tier can have; 0 if there is no limit."""

    def keys(self) -> NDArray[np.uint64] | None:
        """Return the keys of all blocks of the tier, shape (count, 2); None for a remote store,
        which other pools may write to.
        """

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Register ``lost(keys)``, which is called for blocks that the tier drops: evicted blocks,
        and blocks found to be damaged. No lock of the tier is held during the call.
        """

    def close(self) -> None:
        """Finish running calls and release the medium. Idempotent."""


def remove_durably(tier: LowerTier, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Remove blocks durably. Returns which keys have no block left.

    A program's own tier may lack ``remove_durably``; then call ``remove``, and ``contains`` for the
    remaining ones.
    """
    if hasattr(tier, "remove_durably"):
        return tier.remove_durably(keys)
    tier.remove(keys)
    return ~np.asarray(tier.contains(keys), np.bool_)


def replaces(tier: LowerTier) -> bool:
    """Return whether a save replaces a block whose removal failed."""
    return hasattr(tier, "remove_durably")


def check_keys(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return contiguous keys. Raises TierError for other arrays."""
    keys = np.ascontiguousarray(keys)
    if keys.dtype != np.uint64 or keys.ndim != _TABLE or keys.shape[1] != 2:
        raise TierError(
            f"keys have type {keys.dtype} and shape {keys.shape}; give uint64 (count, 2)"
        )
    return keys


def check_blocks(
    records: NDArray[np.void], payload: NDArray[np.uint8]
) -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """Return contiguous records, and a payload with contiguous rows. Raises TierError if they do
    not match.
    """
    records, payload = np.ascontiguousarray(records), np.asarray(payload)
    if records.dtype != BLOCK or records.ndim != 1:
        raise TierError(f"records have type {records.dtype}; give tiers.BLOCK, shape (count,)")
    if payload.dtype != np.uint8 or payload.ndim != _TABLE:
        raise TierError(
            f"the payload has type {payload.dtype}, shape {payload.shape}; give uint8 rows"
        )
    if len(payload) != len(records):
        raise TierError(
            f"there are {len(records)} records and {len(payload)} rows of payload; give a row for "
            "each record"
        )
    if len(records) and int(records["length"].max()) > payload.shape[1]:
        raise TierError(
            f"a block has {records['length'].max()} bytes, but a row only {payload.shape[1]}; give "
            "longer rows"
        )
    if payload.strides[1] != 1 or payload.strides[0] < 0:
        payload = np.ascontiguousarray(payload)
    return records, payload
