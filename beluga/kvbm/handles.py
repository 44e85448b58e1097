# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Handles of blocks: a strong handle keeps its block active, a weak one does not.

A strong handle is released by its ``release``, at the end of its ``with``, by garbage collection,
or by :meth:`~beluga.kvbm.BlockPool.release` of its request, whichever comes first. A released
handle raises TierError when it is used.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeVar

from beluga.errors import TierError
from beluga.kvbm.state import Block, BlockPhase, Key

_Self = TypeVar("_Self", bound="_StrongHandle")


class StrongReference:
    """The reference of one strong handle. Its ``block`` is None after the release."""

    __slots__ = ("block", "request")

    def __init__(self, block: Block, request: Hashable | None) -> None:
        self.block: Block | None = block
        self.request = request

    def held(self) -> Block:
        """Return the block. Raises TierError after the release."""
        if self.block is None:
            raise TierError("this handle was released; reserve or match the block again")
        return self.block


class HandleOwner(Protocol):
    """The methods of a pool that handles call."""

    def fill(self, claim: StrongReference, tokens: int) -> None:
        """Add tokens to a block."""

    def commit(self, claim: StrongReference, key: Key, parent: Key | None) -> None:
        """Set the key of a block's content."""

    def drop(self, claim: StrongReference) -> None:
        """Release a reference, now or as soon as the pool's lock is free. Never blocks."""

    def find(
        self, key: Key, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """Return a strong handle of the block with this key, or None."""


class _StrongHandle:
    __slots__ = ("__weakref__", "claim", "owner")

    def __init__(self, owner: HandleOwner, claim: StrongReference) -> None:
        self.owner, self.claim = owner, claim

    @property
    def index(self) -> int:
        """The index of the block in device memory."""
        return self.claim.held().index

    def release(self) -> None:
        """Release the block. Idempotent."""
        self.owner.drop(self.claim)

    def __enter__(self: _Self) -> _Self:
        self.claim.held()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self.claim.block is not None:
            self.owner.drop(self.claim)


class MutableBlock(_StrongHandle):
    """The only handle of a block that is not yet registered."""

    __slots__ = ()

    @property
    def state(self) -> BlockPhase:
        """The state of the block."""
        return self.claim.held().state

    def fill(self, tokens: int) -> None:
        """Count tokens that were written to the block. Raises TierError beyond the block's size."""
        self.owner.fill(self.claim, tokens)

    def commit(self, key: Key, *, parent: Key | None = None) -> None:
        """Set the key of a full block. ``parent`` is the key of the previous block in its chain.
        Raises TierError for a block that is not full.
        """
        self.owner.commit(self.claim, key, parent)

    def __repr__(self) -> str:
        block = self.claim.block
        return f"<{block.state.value} block {block.index}>" if block else "<released block>"


class RegisteredBlock(_StrongHandle):
    """A strong handle of a registered block, whose content does not change meanwhile."""

    __slots__ = ("key",)

    def __init__(self, owner: HandleOwner, claim: StrongReference, block: Block) -> None:
        super().__init__(owner, claim)
        self.key = block.key

    @property
    def parent(self) -> Key | None:
        """The key of the previous block in its chain."""
        return self.claim.held().parent

    def weak(self) -> WeakBlock:
        """Return a weak reference to the block."""
        return WeakBlock(self.owner, self.key)

    def __repr__(self) -> str:
        block = self.claim.block
        return f"<block {block.index} of {self.key!r}>" if block else "<released block>"


class WeakBlock:
    """A weak reference to a registered block: it does not prevent eviction."""

    __slots__ = ("key", "owner")

    def __init__(self, owner: HandleOwner, key: Key) -> None:
        self.owner, self.key = owner, key

    def upgrade(
        self, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """Return a strong handle, or None if the block was evicted.

        Without ``is_use``, the block keeps its place in the order of eviction.
        """
        return self.owner.find(self.key, request, is_use=is_use)
