# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tier below an engine's device memory, which engines share: a pool, by way of a cache.

Blocks move between the device's memory and the pool in one copy, by whichever engine the cache has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from beluga.errors import TierError
from beluga.kvbm.state import Key
from beluga.kvcache import GetResult, PutResult, Run
from beluga.transfer import BlockLayout


class SharedTier(Protocol):
    """Where a block manager saves blocks, and from where it loads them.

    ``blocks`` are numbers of blocks of the device. One thread saves and another one loads.
    """

    @property
    def name(self) -> str:
        """The tier's name in metrics and messages."""

    def save(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        """Save blocks, and return the state of each: GRANTED if this call stored it, HIT or PENDING
        if another one did or does, REFUSED if the tier does not have it.
        """

    def load(self, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        """Load the leading blocks that the tier has, and return their number."""


class BlockCache(Protocol):
    """What a tier needs of a :class:`~beluga.kvcache.KVCache`."""

    def get(self, digests: Any, targets: Any) -> GetResult:
        """Fetch the leading blocks."""

    def put(self, digests: Any, sources: Any) -> PutResult:
        """Store blocks."""


class CacheTier:
    """The pool of two caches of one namespace: ``up`` loads blocks and ``down`` saves them.

    ``layout`` has the device's memory. Keys are digests, as a cache takes them.
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
        """Load the leading blocks that the pool or a tier below it has."""
        return self._up.get(_digests(keys), Run.of(self._layout, blocks)).hits


def _digests(keys: Sequence[Key]) -> list[bytes]:
    for key in keys:
        if not isinstance(key, bytes):
            raise TierError(f"a pool needs keys that are digests in bytes; give no {key!r}")
    return [key for key in keys if isinstance(key, bytes)]
