# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lower tier in a dict, for tests: it can be slow, fail, lose blocks, or be a remote store."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beluga import IndexServer, Pool
from beluga.tiers import StoredBlock, TierService


class MemoryTier:
    """Keeps copies of blocks. ``remote`` hides its keys from the server. While ``open`` is not set,
    loads and saves wait. While ``failing``, every load fails.
    """

    def __init__(self, name: str = "memory", *, remote: bool = False) -> None:
        self.name, self._remote = name, remote
        self.blocks: dict[tuple[int, int], tuple[np.void, bytes]] = {}
        self.open = threading.Event()
        self.open.set()
        self.full = self.failing = False
        self.error: Exception | None = None  # of each call
        self.waiting = 0  # saves and loads that wait, or waited
        self.saves: list[int] = []
        self.loads: list[int] = []
        self._lost: Callable[[NDArray[np.uint64]], None] = lambda _: None

    @property
    def block_count_max(self) -> int:
        return 0 if self._remote else 100_000

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self._wait()
        self.saves.append(len(records))
        if self.full:
            return np.zeros(len(records), np.bool_)
        for record, row in zip(records, payload, strict=True):
            self.blocks[name(record["key"])] = (record.copy(), row[: record["length"]].tobytes())
        return np.ones(len(records), np.bool_)

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        self._wait()
        self.loads.append(len(keys))
        blocks = [None if self.failing else self.blocks.get(name(key)) for key in keys]
        return [
            None if block is None else StoredBlock(block[0], np.frombuffer(block[1], np.uint8))
            for block in blocks
        ]

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return np.array([name(key) in self.blocks for key in keys])

    def remove(self, keys: NDArray[np.uint64]) -> int:
        return sum(self.blocks.pop(name(key), None) is not None for key in keys)

    def keys(self) -> NDArray[np.uint64] | None:
        if self._remote:
            return None
        return np.array(list(self.blocks), np.uint64).reshape(-1, 2)

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        self._lost = lost

    def lose(self, keys: NDArray[np.uint64]) -> None:
        """Drop blocks, as eviction does."""
        self.remove(keys)
        self._lost(keys)

    def close(self) -> None:
        pass

    def _wait(self) -> None:
        self.waiting += 1
        self.open.wait()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def served(path: Path, tier: MemoryTier) -> Iterator[Pool]:
    """A new, served pool over the tier, which may have blocks from another one."""
    with (
        Pool.create([path], device_size=32 << 20, sparse=True) as pool,
        contextlib.ExitStack() as e,
    ):
        server = IndexServer(pool)
        service = TierService(server, pool, [tier], wait=True)
        e.enter_context(server)
        e.callback(service.stop)
        service.start()
        yield pool


def name(key: NDArray[np.uint64]) -> tuple[int, int]:
    return int(key[0]), int(key[1])
