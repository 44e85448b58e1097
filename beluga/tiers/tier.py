# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lower tier: a store below the pool, from which blocks come back. A disk or a remote store.

A lower tier keeps immutable blocks by key. Whatever becomes of its medium, a load returns the bytes
that were saved under the key, or a miss (D6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK: np.dtype[np.void] = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("fingerprint", "<u8"),
        ("length", "<u4"),
        ("chunk_size", "<u4"),
    ]
)
"""What the pool must know of a block to take it back: 32 bytes. ``length`` counts payload bytes,
``fingerprint`` names the namespace, ``chunk_size`` is the payload bytes of each checksum."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that a tier has loaded: a record of :data:`BLOCK`, and ``length`` payload bytes. The
    service sets the ``name`` (``named.py``).
    """

    record: np.void
    payload: NDArray[np.uint8]
    name: np.void | None = None


class LowerTier(Protocol):
    """A store of blocks below the pool. Any thread may call any method, also at the same time.

    Calls block as long as the medium does. Where loads and saves wait for the same medium, loads go
    first. No failure of the medium is an exception: it is a miss, or a block that was not saved,
    and a counter in :data:`beluga.metrics.REGISTRY`.
    """

    @property
    def name(self) -> str:
        """The tier's name in metrics and messages, for example ``disk:/mnt/nvme0``."""

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks, and return which of them are saved now, or were before.

        ``records`` are of :data:`BLOCK`, shape (count,). ``payload`` has shape (count, stride),
        and the first ``length`` bytes of each row are a block. A block that is saved is found after
        the death of this process.
        """

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        """Load blocks; a miss is None. ``keys`` has shape (count, 2)."""

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which blocks the tier has. A disk answers from its index, also for blocks that it
        cannot read for a while; for a remote store, this is a round trip.
        """

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove blocks, and return how many there were, as far as that is known."""

    def forget(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Remove blocks for good, and return which keys have none any more, whatever becomes of
        this process and its host. A key that had none counts.

        Others may be there still, now or after a restart. A save of such a key replaces its block.
        """

    @property
    def block_count_max(self) -> int:
        """The most blocks that the tier can have; 0 if it sets no bound."""

    def keys(self) -> NDArray[np.uint64] | None:
        """Return the keys of all blocks that the tier has, shape (count, 2); None if it would have
        to ask a remote store, which others may write, too.
        """

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Have ``lost(keys)`` called with blocks that the tier drops by itself: evicted blocks, and
        blocks that turned out to be damaged. It is called without locks of the tier held.
        """

    def close(self) -> None:
        """Finish what is under way, and release the medium. A second call does nothing."""
