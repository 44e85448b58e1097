# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks for tests of the remote tier, and stores that fail as a test sets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from beluga.tiers.tier import BLOCK, StoredBlock


def blocks(lengths: Sequence[int], seed: int = 0) -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """Return records and payloads of random blocks; equal seeds make equal blocks."""
    random = np.random.default_rng(seed)
    records = np.zeros(len(lengths), BLOCK)
    records["key"] = random.integers(0, 1 << 64, (len(lengths), 2), np.uint64)
    records["fingerprint"] = random.integers(0, 1 << 64, len(lengths), np.uint64)
    records["length"], records["chunk_size"] = lengths, 16384
    payload = random.integers(0, 256, (len(lengths), max(lengths, default=0)), np.uint8)
    return records, payload


def same(
    found: Sequence[StoredBlock | None], records: NDArray[np.void], payload: NDArray[np.uint8]
) -> list[bool]:
    """Return which of the blocks were hits; one with other bytes than the saved ones fails the
    test.
    """
    for each, record, row in zip(found, records, payload, strict=True):
        if each is not None:
            assert each.record == record
            assert np.array_equal(each.payload, row[: record["length"]])
    return [each is not None for each in found]


class DictStore:
    """A store in a dict. ``before`` runs before each operation, and may raise or wait."""

    batch = 4
    threads = 8

    def __init__(self, before: Callable[[str], None] = lambda operation: None) -> None:
        self.objects: dict[str, bytes] = {}
        self.before = before
        self.calls: list[str] = []
        self.running = self.most_running = 0
        self.ended = False
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        self._begin("get")
        return self.objects.get(name)

    def put(self, name: str, data: memoryview) -> None:
        self._begin("put")
        self.objects[name] = bytes(data)

    def exists(self, names: Sequence[str]) -> list[bool]:
        assert len(names) <= self.batch
        self._begin("exists")
        return [name in self.objects for name in names]

    def delete(self, names: Sequence[str]) -> int:
        self._begin("delete")
        return sum(self.objects.pop(name, None) is not None for name in names)

    def close(self) -> None:
        assert not self.ended
        self.ended = True

    def _begin(self, operation: str) -> None:
        with self._lock:
            self.calls.append(operation)
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        try:
            self.before(operation)
        finally:
            with self._lock:
                self.running -= 1
