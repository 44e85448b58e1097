# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool over a disk and a remote store that fail on demand, for tests of removals."""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from remote_stores import DictStore
from support.blocks import eventually
from support.disk_faults import SIZE, FaultyEngine

from beluga import IndexServer, KVCache, Pool
from beluga.tiers import LowerTier, TierService
from beluga.tiers.disk import DiskTier
from beluga.tiers.remote import RefusedError, RemoteSettings, RemoteTier
from beluga.tiers.remote.tier import name_of

LENGTH = 200_000
POOL_BYTES = 16 << 20  # blocks of the pool: about 60
FILL = 90
SETTINGS = RemoteSettings(
    operation_s=0.2, load_s=0.5, save_s=0.5, threads=4, open_s=0.02, open_limit_s=0.05
)


def digest(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def content(name: object, version: int) -> NDArray[np.uint8]:
    """The bytes of a block: no version of any name has those of another one."""
    seed = int.from_bytes(digest((name, version))[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, (1, LENGTH), np.uint8)


class FaultyStore(DictStore):
    """Objects that outlive the tier. ``refused`` operations raise, ``lost`` ones time out, ``hung``
    ones wait for ``gate``.
    """

    batch = 64

    def __init__(self) -> None:
        super().__init__(self._fail)
        self.refused: set[str] = set()
        self.lost: set[str] = set()
        self.hung: set[str] = set()
        self.gate = threading.Event()

    def _fail(self, operation: str) -> None:
        if operation in self.hung:
            self.gate.wait()
        if operation in self.refused:
            raise RefusedError(f"{operation} is not allowed")
        if operation in self.lost:
            raise ConnectionError("no answer")

    def heal(self) -> None:
        for faults in (self.refused, self.lost, self.hung):
            faults.clear()
        self.gate.set()
        self.gate = threading.Event()

    def close(self) -> None:
        """Keep the objects for the next tier."""


class Scene:
    """A served pool; :meth:`restart` serves it with new tiers over the same disk and store."""

    def __init__(
        self,
        directory: Path,
        *,
        disk: bool = True,
        store: bool = True,
        make_store: Callable[[], FaultyStore] = FaultyStore,
        timeout_s: float = 5.0,
    ) -> None:
        self._timeout_s = timeout_s
        self.path, self._directory = directory / "pool", directory
        self.store = make_store() if store else None
        self.disk = disk
        self.away = False  # the store is open; the next server has none
        self.given_up: tuple[str, ...] = ()
        self.engines: list[FaultyEngine] = []
        self._fillers = 0
        self.pool = Pool.create([self.path], device_size=POOL_BYTES, sparse=True)
        self._serve()

    def _engine(self, fd: int, depth: int) -> FaultyEngine:
        self.engines.append(FaultyEngine(fd, depth))
        return self.engines[-1]

    @property
    def engine(self) -> FaultyEngine:
        return self.engines[-1]

    def _serve(self) -> None:
        self.tiers: list[LowerTier] = []
        if self.disk:
            self.tiers.append(
                DiskTier(
                    self._directory / "disk", 4 * SIZE, io=self._engine, limit_s=1, server="test"
                )
            )
        if self.store is not None and not self.away:
            self.tiers.append(RemoteTier(self.store, name="test://store", settings=SETTINGS))
        self.server = IndexServer(self.pool)
        for name in self.given_up:
            self.server.give_up_tier(name)
        self.service = TierService(self.server, self.pool, self.tiers, wait=True)
        self.server.start()
        self.service.start()
        self.cache = KVCache(self.pool, namespace="test", timeout_s=self._timeout_s)

    def _end(self) -> None:
        self.cache.close()
        self.service.stop()
        self.server.stop()
        for tier in self.tiers:
            tier.close()

    def restart(self) -> None:
        self._end()
        self._serve()

    def anew(self) -> None:
        """Recreate the pool, as a reboot does with volatile memory."""
        self._end()
        self.pool.close()
        self.pool = Pool.create([self.path], device_size=POOL_BYTES, sparse=True, force=True)
        self._serve()

    def close(self) -> None:
        if self.store is not None:
            self.store.heal()
        self._end()
        self.pool.close()

    def put(self, name: object, version: int) -> bool:
        result = self.cache.put([digest(name)], content(name, version))
        return result.stored + result.present == 1

    def put_surely(self, name: object, version: int) -> None:
        assert eventually(lambda: self.put(name, version))

    @property
    def faulty(self) -> FaultyStore:
        assert self.store is not None
        return self.store

    def stored(self, name: object) -> FaultyStore:
        """Put a block, and return the store once it has the block."""
        self.put_surely(name, 0)
        self.offered()
        assert eventually(lambda: self.in_store(name))
        return self.faulty

    def in_store(self, name: object) -> bool:
        (key,) = self.cache.keys([digest(name)])
        return name_of(key) in self.faulty.objects

    def get(self, name: object) -> NDArray[np.uint8] | None:
        target = np.zeros((1, LENGTH), np.uint8)
        return target if self.cache.get([digest(name)], target).hits else None

    def has(self, name: object, version: int) -> bool:
        """Whether a get returns this version; another one fails the test."""
        value = self.get(name)
        assert value is None or np.array_equal(value, content(name, version)), f"stale: {name}"
        return value is not None

    def remove(self, *names: object) -> int:
        return self.cache.remove([digest(name) for name in names])

    def offered(self) -> None:
        assert eventually(lambda: self.server.lower_stat().dirty_count == 0)

    def evict(self) -> None:
        """Put blocks until all earlier blocks were evicted from the pool."""
        for _ in range(FILL):
            self._fillers += 1
            self.put_surely(("filler", self._fillers), 0)

    def pending(self) -> int:
        return self.server.lower_stat().removal_count

    def settle(self) -> None:
        """Wait until all removals are executed."""
        assert eventually(lambda: self.pending() == 0)
