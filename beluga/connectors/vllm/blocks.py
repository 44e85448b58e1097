# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface between the schedule and the blocks of a prefix, and its implementation for models
with one group of layers.

The schedule counts the blocks of a prefix. In a model with one group of full attention, such a
block is one block of the engine, and its hits are those of the leading digests. In a hybrid model
it has parts in several groups; see ``groups``.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from beluga.connectors.vllm.media import private_from
from beluga.connectors.vllm.steps import BlockRange
from beluga.index import chain_names
from beluga.router import BlockHasher, with_extra_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from beluga.connectors.vllm.events import Announcements, TokenFeed
    from beluga.connectors.vllm.lookups import Lookups


class BlockNames:
    """The names of a request's blocks, for subscribers of the pool's events, with the router's
    hashes. The scheduler's side builds them, because only it has hashes, parents and tokens. Each
    rank adds its number when it stores its part of the blocks. ``feed`` gets the token ids of the
    blocks that nothing but tokens identifies.
    """

    def __init__(self, lookups: Lookups, *, block_size: int, feed: TokenFeed | None = None) -> None:
        self._lookups, self._block_size, self._feed = lookups, block_size, feed

    def of(
        self, request: Any, start: int, stop: int, extra_keys: Sequence[Sequence[Any] | None]
    ) -> bytes:
        """Return the names of blocks [start, stop) of a request, in the form of
        :data:`beluga.index.NAME`, or b"". ``extra_keys`` are those of these blocks.
        """
        ranks, private = self._lookups.ranks, private_from(request, self._block_size)
        if not ranks or (private is not None and stop > private):
            return b""
        size = self._block_size
        adapter = request.lora_request.lora_name if request.lora_request else ""
        salt = getattr(request, "cache_salt", None) or ""
        tokens = request.all_token_ids[start * size : stop * size]
        local = _hasher(size, salt, adapter).local(tokens)
        hashes: Sequence[bytes] = request.block_hashes
        names = chain_names(
            [_short(digest) for digest in hashes[start:stop]],
            with_extra_keys(local, extra_keys, salt=salt, lora_name=adapter),
            parent_hash=_short(hashes[start - 1]) if start else None,
            block_tokens=size,
            space=self._lookups.space,
            rank_count=len(ranks),
        )
        if self._feed is not None and not (salt or adapter or any(extra_keys)):
            self._feed.send(self._lookups.space, size, names["block_hash"].tolist(), tokens)
        return names.tobytes()


def _short(block_hash: bytes) -> int:
    """Return the 64 bits that vLLM's own events use for a block."""
    return int.from_bytes(bytes(block_hash)[-8:], "big")


@lru_cache(maxsize=1024)
def _hasher(block_size: int, salt: str, adapter: str) -> BlockHasher:
    return BlockHasher(block_size=block_size, salt=salt, lora_name=adapter)


ExtraKeys: TypeAlias = "Callable[[Any, int, int], Sequence[Sequence[Any] | None]]"
"""A function from blocks [start, stop) of a request to what their hashes cover in addition to
tokens, in the form of vLLM's BlockStored.
"""

Offer: TypeAlias = "tuple[int, int, int]"
"""A state that a step produces: its group, the engine's block, and the tokens that it covers."""


@dataclasses.dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """What a lookup pins: digests in order, and how many blocks of the prefix they serve. With
    ``whole`` they serve all of these or none. ``otherwise`` is the fallback if they serve none.
    """

    digests: list[bytes]
    blocks: int
    whole: bool = False
    otherwise: PinnedPrefix | None = None

    def reach(self, count: int) -> int:
        """Return how many blocks of the prefix this many leading digests serve."""
        if self.whole:
            return self.blocks if count == len(self.digests) else 0
        return count


class Blocks(Protocol):
    """The blocks of a prefix. ``table`` is the engine's record of a request's blocks: their ids,
    or with several groups the ids in each.
    """

    @property
    def whole(self) -> bool:
        """Whether a request's load can only succeed or fail as a whole."""

    @property
    def saving(self) -> bool:
        """Whether blocks are pinned for unfinished saves."""

    def find(self, request: Any, local: int) -> PinnedPrefix | None:
        """Return what serves the prefix beyond ``local`` blocks, or None."""

    def digests(self, request: Any, first: int, last: int) -> list[bytes]:
        """Return the digests within blocks [first, last) that a request needs to resume after block
        ``last``.
        """

    def loads(self, request: Any, first: int, last: int, table: Any) -> list[BlockRange]:
        """Return what to load where, so that a request can resume after block ``last``."""

    def hold(self, request: Any, tokens: int, loaded: range, offers: Sequence[Offer]) -> int:
        """Pin the blocks that a step of ``tokens`` tokens completes until they are saved, except
        the ``loaded`` ones, which the pool has. Returns the lowest end of a new block, in tokens,
        or 0.
        """

    def saves(self, request: Any, first: int, last: int, table: Any) -> list[BlockRange]:
        """Return what to save of blocks [first, last)."""

    def drop(self, request: Any) -> None:
        """Stop keeping blocks of a request, except for ordered saves."""

    def ended(self, tickets: Mapping[int, int]) -> None:
        """Record on how many ranks saves have ended."""

    def hashed(self, request: Any) -> int:
        """Return how many blocks have a hash."""

    def room(self, table: Any) -> int:
        """Return the capacity of a table in tokens."""

    def ids(self, table: Any, first: int, last: int | None) -> Sequence[int]:
        """Return the engine's block ids for blocks of the prefix."""

    def first_block(
        self, table: Any, last: int | None, find: Callable[[Sequence[int]], int | None]
    ) -> int | None:
        """Return the first block before ``last`` for which ``find`` finds a part."""

    def copied(self, table: Any) -> Any:
        """Return a copy of a table, which the engine cannot change."""


class OneGroup:
    """One group of full attention. Its blocks stay in the table until the request ends."""

    whole = saving = False

    def __init__(
        self,
        lookups: Lookups,
        *,
        block_size: int,
        extra_keys_of: ExtraKeys,
        announcements: Announcements | None = None,
        names: BlockNames | None = None,
    ) -> None:
        self._lookups, self._size = lookups, block_size
        self._extra_keys_of = extra_keys_of
        self._announcements, self._names = announcements, names

    def find(self, request: Any, local: int) -> PinnedPrefix:
        """Return all blocks except that of the last token."""
        last = (request.num_tokens - 1) // self._size
        digests = self._lookups.digests(request, local, last)
        return PinnedPrefix(digests, len(digests))

    def digests(self, request: Any, first: int, last: int) -> list[bytes]:
        """Return the digests of all blocks."""
        return self._lookups.digests(request, first, last)

    def loads(self, request: Any, first: int, last: int, table: Sequence[int]) -> list[BlockRange]:
        """Return all loads as one range."""
        digests = self._lookups.digests(request, first, last)
        return [BlockRange(request.request_id, b"".join(digests), list(table[first:last]))]

    def hold(self, request: Any, tokens: int, loaded: range, offers: Sequence[Offer]) -> int:
        """Do nothing: the table keeps the blocks."""
        return 0

    def saves(self, request: Any, first: int, last: int, table: Sequence[int]) -> list[BlockRange]:
        """Return all saves as one range, and announce its blocks."""
        ids = list(table[first:last])
        stop = first + len(ids)
        digests = self._lookups.digests(request, first, stop)
        extra_keys = self._extra_keys_of(request, first, stop)
        private = self._lookups.private_from(request)
        if self._announcements is not None:
            shared = digests if private is None else digests[: max(0, private - first)]
            for block, digest in enumerate(shared, first):
                self._announcements.ordered(digest, request, block, extra_keys[block - first])
        names = b""
        if self._names is not None:
            names = self._names.of(request, first, stop, extra_keys)
        return [BlockRange(request.request_id, b"".join(digests), ids, names)]

    def drop(self, request: Any) -> None:
        """Do nothing: nothing is kept."""

    def ended(self, tickets: Mapping[int, int]) -> None:
        """Do nothing: nothing is kept."""

    def hashed(self, request: Any) -> int:
        """Return how many blocks are full and hashed."""
        return len(request.block_hashes)

    def room(self, table: Sequence[int]) -> int:
        """Return the tokens of the blocks."""
        return len(table) * self._size

    def ids(self, table: Sequence[int], first: int, last: int | None) -> Sequence[int]:
        """Return a part of the table."""
        return table[first:last]

    def first_block(
        self,
        table: Sequence[int],
        last: int | None,
        find: Callable[[Sequence[int]], int | None],
    ) -> int | None:
        """Return a place in the table."""
        return find(table[:last])

    def copied(self, table: Sequence[int]) -> list[int]:
        """Return a copy as a list."""
        return list(table)
