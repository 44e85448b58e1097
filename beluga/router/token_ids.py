# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Token ids of blocks, for routers that index tokens: the pool's names have only hashes.

vLLM's connector sends them to the endpoint of replays when it orders a save. They are kept in
memory: after a restart of the server, blocks are announced without tokens until they are stored
again.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

TOKENS_TAG = b"tokens"  # the first frame of a message with tokens
TOKENS_FRAME_MAX = 64 << 10  # bytes of such a message
TOKENS_SIZE_MAX = 512 << 20  # 1.2 million blocks of 16 tokens
MODELS_MAX = 1024
_ENTRY_SIZE = 350  # of a block without its tokens, in bytes
_HEAD = struct.Struct("<QIIH")  # space, tokens of a block, blocks, bytes of the model's name
_MODEL_SIZE_MAX = 512


def pack_tokens(
    space: int, model: str, block_tokens: int, names: Sequence[int], tokens: Sequence[int]
) -> Iterator[bytes]:
    """Yield messages with the tokens of consecutive blocks; ``names`` are their block hashes, and
    ``tokens`` has ``block_tokens`` for each. Blocks that are too large for a message are left out.
    """
    named = model.encode()[:_MODEL_SIZE_MAX]
    room = TOKENS_FRAME_MAX - _HEAD.size - len(named)
    count_max = room // (8 + 4 * block_tokens)
    if not count_max:
        return
    for first in range(0, len(names), count_max):
        part = names[first : first + count_max]
        ids = tokens[first * block_tokens : (first + len(part)) * block_tokens]
        yield b"".join(
            (
                _HEAD.pack(space, block_tokens, len(part), len(named)),
                named,
                np.array(part, "<u8").tobytes(),
                np.array(ids, "<u4").tobytes(),
            )
        )


class TokenStore:
    """The tokens of blocks by space and block hash, at most ``size_max`` bytes: the oldest are
    dropped.
    """

    def __init__(self, size_max: int = TOKENS_SIZE_MAX) -> None:
        self._size_max = size_max
        self._tokens: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._models: OrderedDict[int, str] = OrderedDict()
        self.size = 0  # bytes
        self.unread = 0  # malformed messages

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._tokens)

    def add(self, message: bytes) -> None:
        """Add the tokens of a message (:func:`pack_tokens`)."""
        try:
            space, block_tokens, count, named = _HEAD.unpack_from(message)
            model = message[_HEAD.size : _HEAD.size + named].decode()
        except (struct.error, UnicodeDecodeError):
            self.unread += 1
            return
        start = _HEAD.size + named
        size = 4 * block_tokens
        if not size or len(message) != start + count * (8 + size) or "@" in model:
            self.unread += 1
            return
        names = np.frombuffer(message, "<u8", count, start).tolist()
        start += 8 * count
        for name in names:
            self._drop((space, name))
            self._tokens[space, name] = message[start : start + size]
            self.size += size + _ENTRY_SIZE
            start += size
        while self.size > self._size_max:
            _, tokens = self._tokens.popitem(last=False)
            self.size -= len(tokens) + _ENTRY_SIZE
        if model:
            self._models[space] = model
            self._models.move_to_end(space)
            if len(self._models) > MODELS_MAX:
                self._models.popitem(last=False)

    def of(self, space: int, name: int) -> list[int] | None:
        """Return the tokens of a block, or None."""
        tokens = self._tokens.get((space, name))
        return None if tokens is None else np.frombuffer(tokens, "<u4").tolist()

    def model(self, space: int) -> str | None:
        """Return the name of a space's model as its engines report it, or None."""
        return self._models.get(space)

    def remove(self, space: int, names: Sequence[int]) -> None:
        """Drop the tokens of blocks."""
        for name in names:
            self._drop((space, name))

    def _drop(self, key: tuple[int, int]) -> None:
        tokens = self._tokens.pop(key, None)
        if tokens is not None:
            self.size -= len(tokens) + _ENTRY_SIZE
