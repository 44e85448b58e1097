# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Handles of blocks: strong ones keep a block active, weak ones only remember it.

A strong handle is released by its ``release``, at the end of its ``with``, by garbage collection,
or by :meth:`~beluga.kvbm.BlockPool.release` of its request, whichever comes first. A handle
that was released raises TierError when it is used.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeVar

from beluga.errors import TierError
from beluga.kvbm.state import Block, BlockPhase, Key

_Self = TypeVar("_Self", bound="_StrongHandle")


class StrongReference:
    """One strong handle's share of a block. Its ``block`` is None once it was released."""

    __slots__ = ("block", "request")

    def __init__(self, block: Block, request: Hashable | None) -> None:
        self.block: Block | None = block
        self.request = request

    def held(self) -> Block:
        """Return the block. Raises TierError once the claim was released."""
        if self.block is None:
            raise TierError("this handle was released; reserve or match the block again")
        return self.block


class HandleOwner(Protocol):
    """What a handle needs of its pool."""

    def fill(self, claim: StrongReference, tokens: int) -> None:
        """Add tokens to the claim's block."""

    def commit(self, claim: StrongReference, key: Key, parent: Key | None) -> None:
        """Name the content of the claim's block."""

    def drop(self, claim: StrongReference) -> None:
        """Release a claim, now or as soon as the pool's lock is free. Never blocks."""

    def find(
        self, key: Key, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """Return a strong handle of the block with this key, if there is one."""


class _StrongHandle:
    __slots__ = ("__weakref__", "claim", "owner")

    def __init__(self, owner: HandleOwner, claim: StrongReference) -> None:
        self.owner, self.claim = owner, claim

    @property
    def index(self) -> int:
        """The number of the block in the device's memory."""
        return self.claim.held().index

    def release(self) -> None:
        """Release the block. A second call does nothing."""
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
    """The only handle of a block that is not registered yet."""

    __slots__ = ()

    @property
    def state(self) -> BlockPhase:
        """The state of the block."""
        return self.claim.held().state

    def fill(self, tokens: int) -> None:
        """Say that so many more tokens are there. Raises TierError beyond the block's size."""
        self.owner.fill(self.claim, tokens)

    def commit(self, key: Key, *, parent: Key | None = None) -> None:
        """Name the content of a full block. ``parent`` is the key of the block before it in its
        chain. Raises TierError for a block that is not full.
        """
        self.owner.commit(self.claim, key, parent)

    def __repr__(self) -> str:
        block = self.claim.block
        return f"<{block.state.value} block {block.index}>" if block else "<released block>"


class RegisteredBlock(_StrongHandle):
    """A strong handle of a registered block. Its content does not change while this is held."""

    __slots__ = ("key",)

    def __init__(self, owner: HandleOwner, claim: StrongReference, block: Block) -> None:
        super().__init__(owner, claim)
        self.key = block.key

    @property
    def parent(self) -> Key | None:
        """The key of the block before it in its chain."""
        return self.claim.held().parent

    def weak(self) -> WeakBlock:
        """Return a weak reference to the block."""
        return WeakBlock(self.owner, self.key)

    def __repr__(self) -> str:
        block = self.claim.block
        return f"<block {block.index} of {self.key!r}>" if block else "<released block>"


class WeakBlock:
    """A weak reference: it remembers a registered block, and does not keep it from eviction."""

    __slots__ = ("key", "owner")

    def __init__(self, owner: HandleOwner, key: Key) -> None:
        self.owner, self.key = owner, key

    def upgrade(
        self, request: Hashable | None = None, *, is_use: bool = True
    ) -> RegisteredBlock | None:
        """Return a strong handle, or None if the block was evicted and its content is gone.

        Without ``is_use`` the block keeps its place in the order of eviction.
        """
        return self.owner.find(self.key, request, is_use=is_use)
