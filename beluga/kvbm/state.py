# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The states of a block, and the transitions between them.

::

    RESET --fill--> PARTIAL --commit--> COMPLETE --register--> REGISTERED
      ^                |                    |                      |
      +----------------+------- reset ------+----------------------+

A reset block has no content. A partial block has some or all of its tokens, but no key. A complete
block has all tokens and a key. A registered block can be found by its key, and its content never
changes.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import TypeAlias

from beluga.errors import TierError

Key: TypeAlias = Hashable
"""Identifies a block's content. A :class:`~beluga.kvbm.CacheTier` requires digests in bytes."""


class BlockPhase(enum.Enum):
    """The state of a block of a :class:`~beluga.kvbm.BlockPool`."""

    RESET = "reset"
    PARTIAL = "partial"
    COMPLETE = "complete"
    REGISTERED = "registered"


class Block:
    """One block of a pool: its index and its content. Guarded by the pool's lock.

    ``tick`` is the time of the last return, or 0 if there was a use since. The lower tier has a
    ``saved`` block as well.
    """

    __slots__ = (
        "filled",
        "index",
        "key",
        "parent",
        "references",
        "saved",
        "state",
        "tick",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.references = 0
        self.reset()

    def reset(self) -> None:
        """Drop the content. Allowed in every state."""
        self.state = BlockPhase.RESET
        self.filled = 0
        self.key: Key | None = None
        self.parent: Key | None = None
        self.tick = 0
        self.saved = False

    def fill(self, tokens: int, block_size: int) -> None:
        """Add tokens. Raises TierError in a state that allows no tokens, or beyond the block's
        size.
        """
        if self.state not in {BlockPhase.RESET, BlockPhase.PARTIAL}:
            raise self._wrong("be filled")
        if tokens < 1 or self.filled + tokens > block_size:
            raise TierError(
                f"block {self.index} has {self.filled} of {block_size} tokens and cannot take "
                f"{tokens} more"
            )
        self.filled += tokens
        self.state = BlockPhase.PARTIAL

    def commit(self, key: Key, parent: Key | None, block_size: int) -> None:
        """Set the key. Raises TierError unless the block has all its tokens."""
        if self.state is not BlockPhase.PARTIAL:
            raise self._wrong("be committed")
        if self.filled != block_size:
            raise TierError(
                f"block {self.index} has {self.filled} of {block_size} tokens; it can be committed "
                "when it has all of them"
            )
        if key is None or key == parent:
            raise TierError(
                f"block {self.index} has the key {key}; give it a key other than its parent's"
            )
        self.key, self.parent = key, parent
        self.state = BlockPhase.COMPLETE

    def register(self) -> None:
        """Make the content immutable. Raises TierError unless the block is complete."""
        self.refuse_registration()
        self.state = BlockPhase.REGISTERED

    def refuse_registration(self) -> None:
        """Raise TierError unless the block is complete."""
        if self.state is not BlockPhase.COMPLETE:
            raise self._wrong("be registered")

    def _wrong(self, what: str) -> TierError:
        return TierError(f"block {self.index} is {self.state.value} and cannot {what}")
