# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes the lines of a pool, with valid checks, as a hostile process does. Formats and offsets are
implemented a second time here, on purpose, without the code of the C core.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from beluga._ffi import ffi, lib
from beluga.errors import raise_for_status

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.rpc import Client

LINE = 64
PAGE = 4096
STRIDE = 128
DOORBELL = 16384 + 3 * STRIDE  # of host 0
MASK = (1 << 64) - 1

_PAIRS = (
    (0x243F6A8885A308D3, 0x9E3779B97F4A7C15),
    (0x13198A2E03707344, 0xBF58476D1CE4E5B9),
    (0xA4093822299F31D0, 0x94D049BB133111EB),
    (0x082EFA98EC4E6C89, 0xD6E8FEB86659FD93),
    (0x452821E638D01377, 0xA0761D6478BD642F),
    (0xBE5466CF34E90C6C, 0xE7037ED1A0B428DB),
    (0xC0AC29B7C97C50DD, 0x8EBC6AF09C88C6E3),
    (0x3F84D5B5B5470917, 0x589965CC75374CC3),
)


def line_hash(line: bytes, key: int) -> int:
    """``bl_line_hash`` of csrc/format/line.h."""
    words = [int.from_bytes(line[i : i + 8], "little") for i in range(0, LINE, 8)]
    total = (key + 0x9E3779B97F4A7C15) * 0xDA942042E4DD58B5
    for word, (mix, factor) in zip(words, _PAIRS, strict=True):
        total += (word ^ mix) * factor
    total &= MASK
    total ^= total >> 29
    return (total * 0x9FB21C651E98DF25 & MASK) >> 32


def message_key(nonce: int, epoch: int) -> int:
    return (nonce + epoch * 0xD6E8FEB86659FD93) & MASK


def sealed(struct: bytes, sequence: int, key: int) -> bytes:
    """A message line with its sequence at both ends and its check."""
    line = sequence.to_bytes(4, "little") + struct[4:56] + bytes(4)
    line += sequence.to_bytes(4, "little")
    return line[:56] + line_hash(line, key).to_bytes(4, "little") + line[60:]


def request_line(method: int, payload: bytes, sequence: int, key: int, **fields: int) -> bytes:
    """A request line; fields overrides those of ``bl_request`` (flags, size, epoch, reserved)."""
    struct = ffi.new("bl_request *", {"method": method, "size": len(payload), **fields})
    ffi.memmove(struct.payload, payload, len(payload))
    return sealed(bytes(ffi.buffer(struct)), sequence, key)


def bulk_payload(data: bytes) -> bytes:
    """Return the payload of a request whose bytes are in the bulk area."""
    return len(data).to_bytes(4, "little") + lib.bl_crc32c(0, data, len(data)).to_bytes(4, "little")


def write(pool: Pool, offset: int, data: bytes) -> None:
    """Write whole lines, streamed and fenced; the last one is padded with zeros."""
    data += bytes(-len(data) % LINE)
    raise_for_status(lib.bl_pool_write(pool.handle, offset, data, len(data)))


def read(pool: Pool, offset: int, size: int = LINE) -> bytes:
    out = ffi.new("uint8_t[]", size)
    raise_for_status(lib.bl_pool_read(pool.handle, offset, out, size))
    return bytes(ffi.buffer(out))


class Lane:
    """A session's lane in the pool."""

    def __init__(self, client: Client) -> None:
        stat = client.stat()
        geometry = client.pool.geometry
        self.pool = client.pool
        self.slots = geometry.slot_count
        self.half = stat.epoch % 2
        self.start = geometry.lane_offset + stat.lane * geometry.lane_stride
        self.bulk_size = geometry.bulk_size
        self.key = message_key(stat.nonce, stat.epoch)

    def request(self, sequence: int) -> int:
        return self.start + PAGE + sequence % self.slots * STRIDE

    def reply(self, sequence: int, half: int | None = None) -> int:
        half = self.half if half is None else half
        return self.request(sequence) + (1 + half) * self.slots * STRIDE

    @property
    def bulk_in(self) -> int:
        return self.start + PAGE + 3 * self.slots * STRIDE

    def bulk_out(self, half: int | None = None) -> int:
        half = self.half if half is None else half
        return self.bulk_in + (1 + half) * self.bulk_size

    def send(
        self, sequence: int, method: int, payload: bytes, *, key: int | None = None, **fields: int
    ) -> None:
        key = self.key if key is None else key
        write(
            self.pool,
            self.request(sequence),
            request_line(method, payload, sequence, key, **fields),
        )
        self.ring()

    def ring(self) -> None:
        """Ring the doorbell of host 0, after which the server polls its quiet lanes."""
        write(self.pool, DOORBELL, secrets.token_bytes(8) * 8)

    def answered(self, sequence: int) -> bool:
        """Whether the slot has the server's reply to this request."""
        return int.from_bytes(read(self.pool, self.reply(sequence))[:4], "little") == sequence


def scribble(pool: Pool, offset: int, data: bytes, piece: int) -> None:
    """Store ``data`` (within one stripe) ``piece`` bytes at a time, last piece first."""
    target = ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, offset))
    assert target != ffi.NULL
    for at in reversed(range(0, len(data), piece)):
        part = data[at : at + piece]
        ffi.memmove(target + at, part, len(part))


@contextmanager
def restless(pool: Pool, offset: int, values: Sequence[bytes], piece: int) -> Iterator[None]:
    """Store the values into the line in a loop, and the first value at the end."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            for value in values:
                scribble(pool, offset, value, piece)

    assert all(len(value) == LINE for value in values)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        scribble(pool, offset, values[0], LINE)
