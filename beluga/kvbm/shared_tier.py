# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tier below an engine's device memory, shared by engines: a pool, through a cache.

The cache's copy engine moves blocks directly between device memory and the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from beluga.errors import TierError
from beluga.kvbm.state import Key
from beluga.kvcache import GetResult, PutResult, Run
from beluga.transfer import BlockLayout


class SharedTier(Protocol):
    """The tier where a block manager saves blocks and from which it loads them.

    ``blocks`` are indices of device blocks. One thread saves and another one loads.
    """

    @property
    def name(self) -> str:
        """The tier's name in metrics and messages."""

    def save(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        """Save blocks, and return the state of each: GRANTED if this call stored it, HIT or PENDING
        if another call did or is doing so, REFUSED if the tier does not have it.
        """

    def load(self, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        """Load the leading blocks that the tier has, and return their number."""


class BlockCache(Protocol):
    """The methods of a :class:`~beluga.kvcache.KVCache` that a tier uses."""

    def get(self, digests: Any, targets: Any) -> GetResult:
        """Fetch the leading blocks."""

    def put(self, digests: Any, sources: Any) -> PutResult:
        """Store blocks."""


class CacheTier:
    """A pool as a tier, through two caches of one namespace: ``up`` loads blocks and ``down`` saves
    them.

    ``layout`` describes the device memory. Keys are digests, as for a cache.
    """

    def __init__(self, up: BlockCache, down: BlockCache, layout: BlockLayout) -> None:
        self.name = "pool"
        self._up, self._down, self._layout = up, down, layout

    def save(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        """Save blocks, and return the state of each, as a put does."""
        states: list[int] = self._down.put(
            _digests(keys), Run.of(self._layout, blocks)
        ).states.tolist()
        return states

    def load(self, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        """Load the leading blocks that the pool or a lower tier has."""
        return self._up.get(_digests(keys), Run.of(self._layout, blocks)).hits


def _digests(keys: Sequence[Key]) -> list[bytes]:
    for key in keys:
        if not isinstance(key, bytes):
            raise TierError(f"the key {key!r} is not a digest; give bytes")
    return [key for key in keys if isinstance(key, bytes)]
