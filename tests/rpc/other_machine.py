# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Another machine that uses a host number: it implements the pool's format without Beluga's code.

It sends a lobby request under its own boot id and reads the reply, as a host with a mapping of
the same devices would. It has no lock files here, so nothing about it can be proven.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from support.forge import line_hash, read, write

from beluga._ffi import ffi, lib
from beluga.pool import Pool

LANES, SLOTS, BULK = 4, 8, 8192  # of the pools of these tests
MASK = (1 << 64) - 1
Elsewhere = Callable[[], AbstractContextManager[None]]
# A second implementation of csrc/format/line.h: a change there must be made twice, on purpose.
ODD = (
    0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93,
    0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3,
)  # fmt: skip
PI = (
    0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89,
    0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917,
)  # fmt: skip


def message_check(line: bytes) -> int:
    words = [int.from_bytes(line[at : at + 8], "little") for at in range(0, 64, 8)]
    words[7] &= 0xFFFFFFFF00000000
    total = ODD[0] * 0xDA942042E4DD58B5
    for word, odd, pi in zip(words, ODD, PI, strict=True):
        total += (word ^ pi) * odd
    total &= MASK
    total ^= total >> 29
    return (total * 0x9FB21C651E98DF25 & MASK) >> 32


@dataclass
class OtherMachine:
    """A process of that machine without a session; ``boot_id`` differs from this machine's."""

    pool: Pool
    host: int
    boot_id: tuple[int, int]

    def attach(self, nonce: int) -> int:
        """Request a lane, and return the status of the reply."""
        at = lib.BL_LOBBY_OFFSET + self.host * lib.BL_LOBBY_STRIDE
        line = ffi.cast("bl_lobby_request *", self._address(at))
        request = ffi.new("bl_lobby_request *")
        request.sequence = request.sequence_end = line.sequence + 1
        request.operation = lib.BL_LOBBY_ATTACH
        request.nonce, request.boot_id, request.host = nonce, self.boot_id, self.host
        request.epoch = max(self._epoch(half) for half in range(lib.BL_HALF_COUNT))
        request.check = message_check(bytes(ffi.buffer(request)))
        lib.bl_ntstore_copy(line, request, lib.BL_LINE_SIZE)
        return self._answer(at, nonce)

    def _answer(self, at: int, nonce: int) -> int:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for half in range(lib.BL_HALF_COUNT):
                address = self._address(at + (1 + half) * lib.BL_POLL_STRIDE)
                reply = ffi.cast("bl_lobby_reply *", address)
                if reply.nonce == nonce:
                    return int(reply.status)
            time.sleep(0.001)
        raise AssertionError("no server looked into the lobby")

    def _epoch(self, half: int) -> int:
        line = ffi.cast("bl_epoch_line *", self._address(half * lib.BL_SERVER_STRIDE))
        return int(line.epoch)

    def _address(self, offset: int) -> Any:
        return lib.bl_pool_address(self.pool.handle, offset)


def rewrite(pool: Pool, kind: str, offset: int, key: int, **fields: object) -> None:
    """Change some fields of a line that ends in its check, and correct the check."""
    line = ffi.new(f"{kind} *")
    ffi.memmove(line, read(pool, offset), lib.BL_LINE_SIZE)
    for name, value in fields.items():
        setattr(line, name, value)
    raw = bytes(ffi.buffer(line))
    write(pool, offset, raw[:60] + line_hash(raw[:60] + bytes(4), key).to_bytes(4, "little"))


def session_offset(pool: Pool, lane: int, epoch: int) -> int:
    geometry = pool.geometry
    half = epoch % lib.BL_HALF_COUNT
    return geometry.session_offset + (half * geometry.lane_count + lane) * lib.BL_LINE_SIZE


def serve_as(pool: Pool, epoch: int, boot_id: tuple[int, int]) -> None:
    """Change the server of this epoch to one of another machine."""
    half = epoch % lib.BL_HALF_COUNT
    for copy in (0, lib.BL_LINE_SIZE):
        offset = half * lib.BL_SERVER_STRIDE + copy
        rewrite(pool, "bl_epoch_line", offset, half, boot_id=boot_id)


@contextmanager
def beating(pool: Pool, lane: int, nonce: int) -> Iterator[None]:
    """Advance the heartbeat of a session in the meantime."""
    offset = pool.geometry.lane_offset + lane * pool.geometry.lane_stride
    over = threading.Event()

    def move() -> None:
        rewrite(pool, "bl_heartbeat_line", offset, nonce, count=time.monotonic_ns(), nonce=nonce)

    def keep() -> None:
        while not over.wait(0.02):
            move()

    thread = threading.Thread(target=keep)
    move()
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
