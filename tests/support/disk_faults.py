# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A disk tier that fails on demand, and an engine that loses power."""

import ctypes
import errno
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.disk_tiers import MIB, is_block, keys_of, payload_of, records_of

from beluga.coherence import crc32c
from beluga.metrics import REGISTRY
from beluga.tiers.disk import DiskTier
from beluga.tiers.disk.health import DirectionHealth
from beluga.tiers.disk.store import CoreEngine, Requests

SIZE = 16 * MIB  # of a FaultyDisk
SECTOR = 512  # bytes that a disk writes atomically


def memory_of(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class FaultyEngine:
    """The engine by threads, with faults; set the attributes while a tier uses it."""

    def __init__(self, fd: int, depth: int) -> None:
        self.fd, self.inner = fd, CoreEngine(fd, depth, "threads")
        self.read_error = 0  # an errno
        self.write_error = 0
        self.sync_error = 0
        self.short = False  # half of each request is moved
        self.flip = 0  # how many of the next reads have a bit wrong
        self.drop = False  # writes are acknowledged but not executed
        self.misplace = 0  # writes are misplaced by that many bytes
        self.only: Callable[[int], bool] = lambda offset: True  # the offsets that faults touch
        self.reads = self.writes = 0
        self.hung: set[str] = set()  # the operations that hang before they do anything
        self.gate = threading.Event()  # those that hang continue once it is set

    def _pass(self, what: str) -> None:
        if what in self.hung:
            self.gate.wait()

    def read(self, requests: Requests) -> None:
        self.reads += len(requests)
        self._pass("read")
        lengths = requests["length"].copy()
        requests["length"] = 0
        self.inner.read(requests)
        requests["length"] = lengths
        for request in requests:
            self._spoil_read(request)

    def _spoil_read(self, request: np.void) -> None:
        data = memory_of(int(request["bytes"]), int(request["size"]))
        if self.only(int(request["offset"])):
            if self.read_error:
                request["result"] = -self.read_error
            elif self.short:
                request["result"] = -errno.ENODATA
            elif self.flip:
                self.flip -= 1
                data[int(request["length"]) // 2] ^= 4
        length = int(request["length"])
        if request["result"] == 0 and length:
            intact = crc32c(data[:length], int(request["seed"])) == request["crc"]
            request["result"] = 0 if intact else -errno.EBADMSG

    def write(self, requests: Requests) -> None:
        self.writes += len(requests)
        self._pass("write")
        touched = np.array([self.only(int(offset)) for offset in requests["offset"]])
        untouched = requests[~touched]
        self.inner.write(untouched)
        requests[~touched] = untouched
        faulty = requests[touched]
        if self.write_error:
            faulty["result"] = -self.write_error
        elif self.short:
            faulty["size"] //= 2
            self.inner.write(faulty)
            faulty["result"] = -errno.ENODATA
        elif not self.drop:
            faulty["offset"] += self.misplace
            self.inner.write(faulty)
        else:
            faulty["result"] = 0
        for request in faulty:
            if source := int(request["source"]):
                data = memory_of(source, int(request["length"]))
                request["crc"] = crc32c(data, int(request["seed"]))
        for name in ("crc", "result"):
            requests[name][touched] = faulty[name]

    def sync(self) -> int:
        self._pass("sync")
        return -self.sync_error if self.sync_error else self.inner.sync()

    def close(self) -> None:
        self.inner.close()


class PowerCut(Exception):  # noqa: N818  it is no error of the program
    """The power has failed."""


class VolatileEngine(FaultyEngine):
    """A disk with a cache: until a sync, any sector that was written may be lost in a power cut,
    which happens at the write or sync of that number.
    """

    def __init__(self, fd: int, depth: int, cut_at: int, seed: int) -> None:
        super().__init__(fd, depth)
        self.left, self.chance = cut_at, random.Random(seed)
        self.buffered = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        # previous content of each sector written since the last sync
        self.before: dict[int, bytes] = {}

    def write(self, requests: Requests) -> None:
        if self.left <= 0:
            raise PowerCut
        for request in requests:
            start = int(request["offset"])
            had = os.pread(self.buffered, int(request["size"]), start)
            for at in range(0, len(had), SECTOR):
                self.before.setdefault(start + at, had[at : at + SECTOR])
        super().write(requests)
        self._step()

    def sync(self) -> int:
        self._step()
        self.before.clear()
        return 0

    def _step(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self._lose(0.5)
            raise PowerCut

    def _lose(self, share: float) -> None:
        """Undo about that fraction of the writes since the last sync."""
        for offset, had in self.before.items():
            if self.chance.random() < share:
                os.pwrite(self.buffered, had, offset)
        self.before.clear()

    def close(self) -> None:
        os.close(self.buffered)
        super().close()


class LosingEngine(VolatileEngine):
    """A disk whose failed sync loses the written data."""

    def __init__(self, fd: int, depth: int) -> None:
        super().__init__(fd, depth, cut_at=sys.maxsize, seed=0)

    def sync(self) -> int:
        if self.sync_error:
            self._lose(1.0)
            return -self.sync_error
        return super().sync()


class FaultyDisk:
    """A tier over an engine that fails or hangs, and a clock for its pauses."""

    length = 40_000  # bytes of a block

    def __init__(self, path: Path, limit_s: float = 10.0) -> None:
        self.path, self.now, self._limit_s = path, 0.0, limit_s
        self.open()

    def open(self) -> None:
        """Open the tier, again if it was closed."""
        self.engines: list[FaultyEngine] = []
        self.tier = DiskTier(self.path, SIZE, io=self._make, limit_s=self._limit_s)
        self.tier.loads = DirectionHealth(self.tier.name, "load", lambda: self.now)
        self.tier.saves = DirectionHealth(self.tier.name, "save", lambda: self.now)

    def reopen(self) -> None:
        self.tier.close()
        self.open()

    def _make(self, fd: int, depth: int) -> FaultyEngine:
        self.engines.append(FaultyEngine(fd, depth))
        return self.engines[-1]

    @property
    def engine(self) -> FaultyEngine:
        """The newest engine."""
        return self.engines[-1]

    def save(self, numbers: range) -> list[bool]:
        records = records_of(numbers, self.length)
        return self.tier.save(records, payload_of(numbers, self.length)).tolist()

    def load(self, numbers: range) -> list[bool]:
        """Return which blocks are hits. None may have wrong bytes."""
        blocks = self.tier.load(keys_of(numbers))
        assert all(b is None or is_block(b, n) for n, b in zip(numbers, blocks, strict=True))
        return [block is not None for block in blocks]

    def failures(self, operation: str, kind: str) -> float:
        """Return how many failures were counted."""
        metric = REGISTRY.counter("beluga_tier_failures_total", "")
        return metric.value(tier=self.tier.name, operation=operation, kind=kind)
