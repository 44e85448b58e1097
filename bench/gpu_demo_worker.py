# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker of ``scripts/demo-gpu``: an engine's paged memory on a GPU, filled from the pool.

In place of computed data the worker writes bytes that follow from a block's id, so that each byte
that comes out of the pool can be checked. Without a GPU, the kernels compiled for this CPU move the
blocks between the pool and memory that stands in for a GPU's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from beluga.errors import BelugaError, EngineUnavailableError
from beluga.index import BlockState
from beluga.kvcache import KVCache, Run
from beluga.pool import Pool
from beluga.replay.contents import Contents, digests
from beluga.rpc import Client
from beluga.transfer import CudaDriver, CudaEngine, CupyDriver, HostDriver

FRAGMENTS, FRAGMENT_SIZE = 32, 4096  # of a block: K and V of sixteen layers
BLOCK_SIZE = FRAGMENTS * FRAGMENT_SIZE

_NAMESPACE = "beluga demo-gpu"
_GRANTED = BlockState.GRANTED  # stored by this call
_SETTLE_S = 120.0
_WINDOW_SIZE = 64 << 20

Ids = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One request: counts of blocks; ``stored`` are ids."""

    looked_up: int
    hits: int
    wrong: int  # of the hits
    stored: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Closing:
    """The last message of a worker. ``reason`` says why there is no GPU, if there is none."""

    driver: str
    device: str
    reason: str
    launches: int
    moved_bytes: int  # by kernels and copy engines, between GPU memory and the pool
    bounced_bytes: int  # by way of this process's memory


def work(connection: Connection, devices: list[str], capacity: int) -> None:
    """Serve lists of block ids until None comes; then send the closing. An error is a line of
    text.
    """
    try:
        with Pool.open(devices) as pool, Client(pool) as client:
            driver, reason = _driver()
            with (
                contextlib.closing(driver),
                contextlib.closing(
                    CudaEngine(pool, driver=driver, window_size=_WINDOW_SIZE)
                ) as engine,
            ):
                engine.settle(_SETTLE_S)
                worker = _Worker(client, engine, driver, capacity)
                connection.send("ready")
                while (ids := connection.recv()) is not None:
                    connection.send(worker.serve(np.array(ids, np.uint64)))
                worker.close()
                stat = engine.stat
                moved = stat.direct_bytes + stat.staged_bytes
                connection.send(
                    Closing(
                        driver.name,
                        driver.identity,
                        reason,
                        stat.launch_count,
                        moved,
                        stat.bounced_bytes,
                    )
                )
    except (BelugaError, OSError) as error:
        connection.send(str(error))


def _driver() -> tuple[CudaDriver, str]:
    try:
        return CupyDriver(), ""
    except EngineUnavailableError as error:
        return HostDriver(), str(error)


class _Worker:
    """The memory for ``capacity`` blocks: a tensor for each fragment, with a page for each
    block.
    """

    def __init__(
        self, client: Client, engine: CudaEngine, driver: CudaDriver, capacity: int
    ) -> None:
        self._driver, self._engine = driver, engine
        self._cache = KVCache(client, namespace=_NAMESPACE, engine=engine)
        self._capacity = capacity
        self._contents = Contents(BLOCK_SIZE)
        self._size = capacity * BLOCK_SIZE
        self._memory = driver.allocate(self._size)
        self._pinned = driver.pin(self._size)
        self._pages = self._pinned.array[: self._size].reshape(FRAGMENTS, capacity, FRAGMENT_SIZE)
        self._stream, self._event = driver.make_stream(urgent=True), driver.make_event()
        self._random = np.random.default_rng(1)

    def serve(self, ids: Ids) -> Served:
        """Fetch the leading blocks that the pool has, check them, and store the others."""
        keys, count = digests(ids), len(ids)
        pages = self._random.permutation(self._capacity)[:count]
        self._pages[:] = 0
        self._copy(to_gpu=True)
        hits = self._cache.get(keys, self._run(pages)).hits
        self._copy(to_gpu=False)
        found = self._pages[:, pages[:hits]].transpose(1, 0, 2).reshape(hits, BLOCK_SIZE)
        wrong = self._contents.wrong_count(ids[:hits], found.view(np.uint64))
        stored: list[int] = []
        if hits < count:
            rest = np.empty((count - hits, BLOCK_SIZE // 8), np.uint64)
            self._contents.fill(ids[hits:], rest)
            shape = (count - hits, FRAGMENTS, FRAGMENT_SIZE)
            self._pages[:, pages[hits:]] = rest.view(np.uint8).reshape(shape).transpose(1, 0, 2)
            self._copy(to_gpu=True)
            result = self._cache.put(keys[hits:], self._run(pages[hits:]))
            stored = ids[hits:][result.states == _GRANTED].tolist()
        return Served(count, hits, wrong, stored)

    def close(self) -> None:
        self._driver.free_event(self._event)
        self._driver.end_stream(self._stream)
        del self._pages
        self._driver.unpin(self._pinned)
        self._driver.free(self._memory)

    def _run(self, pages: npt.NDArray[np.int64]) -> Run:
        """Return the blocks on these pages, by their GPU addresses."""
        fragments = np.empty((len(pages), FRAGMENTS, 2), np.uint64)
        at = np.arange(FRAGMENTS)[None, :] * self._capacity + pages[:, None]
        fragments[:, :, 0] = self._memory + at * FRAGMENT_SIZE
        fragments[:, :, 1] = FRAGMENT_SIZE
        return Run(len(pages), BLOCK_SIZE, FRAGMENTS, fragments.reshape(-1, 2))

    def _copy(self, *, to_gpu: bool) -> None:
        """Copy all pages between GPU memory and this process's."""
        host = self._pinned.array.ctypes.data
        pair = (self._memory, host) if to_gpu else (host, self._memory)
        self._driver.copy(*pair, self._size, self._stream)
        self._driver.record(self._event, self._stream)
        self._driver.wait(self._event)
