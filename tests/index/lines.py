# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Lines of a pool, for tests that plant damage: they are read, changed, given a valid check and
written back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beluga._ffi import ffi, lib
from beluga.pool import Pool

LINE = 64
MASK = (1 << 64) - 1

# A second implementation of csrc/format/line.h: a test must not use the code under test to check
# whether a line is whole.
_ADD = (
    *(0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
    *(0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917),
)
_TIMES = (
    *(0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93),
    *(0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3),
)


def line_hash(words: list[int], key: int) -> int:
    total = (key + 0x9E3779B97F4A7C15) * 0xDA942042E4DD58B5
    total += sum((word ^ a) * t for word, a, t in zip(words, _ADD, _TIMES, strict=True))
    total &= MASK
    total ^= total >> 29
    return (total * 0x9FB21C651E98DF25 & MASK) >> 32


def words_of(raw: bytes) -> list[int]:
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(0, LINE, 8)]


def seal_table(raw: bytes, key: int) -> bytes:
    """Set the check at the end of a line."""
    words = words_of(raw)
    words[7] &= 0xFFFFFFFF
    return raw[:60] + line_hash(words, key).to_bytes(4, "little")


def seal_message(raw: bytes, key: int) -> bytes:
    """Set the check of a line that ends in its check and its sequence."""
    raw = raw[:56] + bytes(4) + raw[:4]
    return raw[:56] + line_hash(words_of(raw), key).to_bytes(4, "little") + raw[60:]


class Lines:
    """The lines of a mapped pool; changes through it can be undone."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._before: dict[int, bytes] = {}

    def at(self, offset: int) -> memoryview:
        """Return the line itself, which may be overwritten."""
        address = lib.bl_pool_address(self.pool.handle, offset)
        view = memoryview(ffi.buffer(address, LINE))
        self._before.setdefault(offset, bytes(view))
        return view

    def read(self, kind: str, offset: int) -> Any:
        """Return a private copy as a struct of the pool format."""
        struct = ffi.new(f"{kind} *")
        ffi.memmove(struct, bytes(self.at(offset)), LINE)
        return struct

    def flip(self, offset: int, byte: int) -> None:
        self.at(offset)[byte] ^= 1

    def forge(
        self,
        kind: str,
        offset: int,
        key: int,
        seal: Callable[[bytes, int], bytes],
        /,
        **fields: Any,
    ) -> None:
        """Write other values into some fields, and correct the check."""
        struct = self.read(kind, offset)
        for name, value in fields.items():
            setattr(struct, name, value)
        self.at(offset)[:] = seal(bytes(ffi.buffer(struct)), key)

    def undo(self) -> None:
        for offset, before in self._before.items():
            self.at(offset)[:] = before
        self._before.clear()
