# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A DSA in Python at the other end of ``write()``.

It checks every descriptor, and completes descriptors as the test specifies.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import socket
import struct
import threading
from collections.abc import Callable

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.transfer.dsa import Portal, limits_of

COPIES = (lib.BL_DSA_MEMMOVE, lib.BL_DSA_COPY_CRC)
RECORD = lib.BL_DSA_CRAV | lib.BL_DSA_RCR
_MAY_CACHE = RECORD | lib.BL_DSA_CC
FLAGS = {
    lib.BL_DSA_MEMMOVE: _MAY_CACHE,
    lib.BL_DSA_COPY_CRC: _MAY_CACHE,
    lib.BL_DSA_FILL: _MAY_CACHE,
    lib.BL_DSA_CFLUSH: RECORD,
    lib.BL_DSA_BATCH: RECORD,
    lib.BL_DSA_NOOP: RECORD,
}


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a descriptor, after ``done`` bytes and with this record."""

    done: int
    status: int = lib.BL_DSA_SUCCESS
    fault: int = 0
    completed: int | None = None  # the record's value of ``done``


@dataclasses.dataclass(frozen=True)
class Sent:
    """A descriptor, read by hand from its 64 bytes."""

    opcode: int
    flags: int
    record: int
    source: int
    target: int
    size: int
    seed: int
    pattern: bytes

    @classmethod
    def of(cls, raw: bytes) -> Sent:
        """Read a descriptor. Raises AssertionError if a device would reject it."""
        pasid, word, record, source, target, size, interrupt, reserved, seed = struct.unpack(
            "<IIQQQIHHI", raw[:44]
        )
        opcode, flags = word >> 24, word & 0xFFFFFF
        assert pasid == interrupt == reserved == 0
        assert flags & RECORD == RECORD
        assert flags & ~FLAGS[opcode] == 0, f"flags {flags:#x} of {opcode:#x}"
        assert record % 32 == 0
        assert not any(raw[44 if opcode == lib.BL_DSA_COPY_CRC else 40 :])
        return cls(opcode, flags, record, source, target, size, seed, raw[16:24])


Fate = Callable[[random.Random, Sent], End]


class WriteDevice:
    """Takes descriptors of 64 bytes, and executes a few at a time in any order.

    ``fate`` is the result of each descriptor, and ``reach`` is how much of a batch is executed.
    """

    def __init__(
        self,
        fate: Fate,
        *,
        seed: int = 1,
        size_max: int = 4096,
        batch_max: int = 0,
        depth: int = 4,
        reach: Callable[[random.Random, int], int] = lambda _, count: count,
    ) -> None:
        self._random, self._fate, self._reach = random.Random(seed), fate, reach
        self.limits = limits_of(size_max=size_max, batch_max=batch_max, depth=depth)
        self.sent: list[Sent] = []
        self.wrong: list[str] = []
        self._in_hand: list[bytes] = []
        self._late: list[tuple[int, bytes]] = []
        ours, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = ours.detach()  # the opener of the queue closes it
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def portal(self) -> Portal:
        """Open the device's queue."""
        out = ffi.new("bl_dsa_queue **")
        assert lib.bl_dsa_queue_open(self.descriptor, lib.BL_DSA_WRITE, self.limits, out) == 0
        return Portal(out[0], self.limits, text="in Python")

    def close(self) -> None:
        """Close the device after the engine, and check that every descriptor was valid."""
        self._thread.join()
        self._socket.close()
        assert self.wrong == []

    def _serve(self) -> None:
        self._socket.settimeout(0.002)
        while True:
            try:
                raw = self._socket.recv(64)
            except TimeoutError:
                raw = None
            if raw == b"" and not self._in_hand and not self._late:
                return
            if raw:
                self._in_hand.append(raw)
            try:
                self._go_on(idle=not raw)
            except AssertionError as error:
                self.wrong.append(str(error))

    def _go_on(self, *, idle: bool) -> None:
        assert len(self._in_hand) <= self.limits.depth, "more than the queue holds"
        if self._in_hand and (idle or self._random.random() < 0.6):
            raw = self._in_hand.pop(self._random.randrange(len(self._in_hand)))
            sent = Sent.of(raw)
            record = self._batch(sent) if sent.opcode == lib.BL_DSA_BATCH else self._one(sent)
            self._late.append((sent.record, record))
        if self._late and (idle or self._random.random() < 0.5):
            self._show(*self._late.pop(self._random.randrange(len(self._late))))

    def _one(self, sent: Sent) -> bytes:
        moves = sent.opcode != lib.BL_DSA_NOOP
        assert int(moves) <= sent.size <= moves * self.limits.size_max, f"{sent.size} bytes at once"
        self.sent.append(sent)
        end, crc = self._fate(self._random, sent), sent.seed
        if sent.opcode in COPIES:
            moved = ctypes.string_at(sent.source, end.done)
            ctypes.memmove(sent.target, moved, end.done)
            crc = coherence.crc32c(moved, sent.seed)
        elif sent.opcode == lib.BL_DSA_FILL:
            ctypes.memmove(sent.target, sent.pattern * (end.done // 8 + 1), end.done)
        completed = end.done if end.completed is None else end.completed
        return struct.pack("<BxxxIQQQ", end.status, completed, end.fault, crc, 0)

    def _batch(self, sent: Sent) -> bytes:
        assert 2 <= sent.size <= self.limits.batch_max, f"a batch of {sent.size}"
        assert sent.source % 64 == sent.target == 0
        self.sent.append(sent)
        order = self._random.sample(range(sent.size), sent.size)
        reached, failed = self._reach(self._random, sent.size), False
        for place in order[:reached]:
            inner = Sent.of(ctypes.string_at(sent.source + 64 * place, 64))
            record = self._one(inner)
            failed |= record[0] != lib.BL_DSA_SUCCESS
            self._show(inner.record, record)
        status = lib.BL_DSA_BATCH_FAIL if failed else lib.BL_DSA_SUCCESS
        if reached < sent.size:
            status = lib.BL_DSA_BATCH_PAGE_FAULT
        return struct.pack("<BxxxIQQQ", status, reached, sent.source + 64 * reached, 0, 0)

    @staticmethod
    def _show(address: int, record: bytes) -> None:
        """Write a record: first its other bytes, then the 8 bytes with the status."""
        ctypes.memmove(address + 8, record[8:], 24)
        ctypes.memmove(address, record[:8], 8)
