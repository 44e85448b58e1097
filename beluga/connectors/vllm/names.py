# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The names of a request's blocks, for subscribers of the pool's events (beluga/events).

The scheduler's side builds them, because only it has hashes, parents and tokens. Each rank adds its
number when it stores its part of the blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from beluga.connectors.vllm.media import private_from
from beluga.index import chain_names
from beluga.router import BlockHasher, with_extra_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from beluga.connectors.vllm.lookups import Lookups


class BlockNames:
    """Builds block names with the router's hashes."""

    def __init__(self, lookups: Lookups, *, block_size: int) -> None:
        self._lookups, self._block_size = lookups, block_size

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
            [_short(one) for one in hashes[start:stop]],
            with_extra_keys(local, extra_keys, salt=salt, lora_name=adapter),
            parent_hash=_short(hashes[start - 1]) if start else None,
            block_tokens=size,
            space=self._lookups.space,
            rank_count=len(ranks),
        )
        return names.tobytes()


def _short(block_hash: bytes) -> int:
    """Return the 64 bits that vLLM's own events use for a block."""
    return int.from_bytes(bytes(block_hash)[-8:], "big")


@lru_cache(maxsize=1024)
def _hasher(block_size: int, salt: str, adapter: str) -> BlockHasher:
    return BlockHasher(block_size=block_size, salt=salt, lora_name=adapter)
