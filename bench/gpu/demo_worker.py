# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker of ``scripts/demo-gpu``: an engine's paged memory on a GPU, which a block manager fills
from the pool and offloads to it.

Instead of computed data the worker writes bytes derived from a block's id, so that each byte read
from the pool can be checked. Without a GPU, kernels compiled for this CPU move the blocks between
the pool and ordinary memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from beluga.errors import BelugaError, EngineUnavailableError
from beluga.index import BlockState
from beluga.kvbm import BlockManager, BlockPool, CacheTier
from beluga.kvcache import KVCache, PutResult, Run
from beluga.metrics import REGISTRY
from beluga.pool import Pool
from beluga.replay.blocks import Contents, digests
from beluga.rpc import Client
from beluga.transfer import BlockLayout, CudaDevice, CudaEngine, View

from .stub import StandIn

FRAGMENTS, FRAGMENT_SIZE = 32, 4096  # per block: K and V of sixteen layers
BLOCK_SIZE = FRAGMENTS * FRAGMENT_SIZE

_NAMESPACE = "beluga demo-gpu"
_GRANTED = BlockState.GRANTED  # stored by this call
_SETTLE_S = 120.0
_WINDOW_SIZE = 64 << 20

Ids = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One request: counts of blocks, and the ids of those that moved."""

    looked_up: int
    device_hits: int
    onboarded: list[int]
    wrong: int  # of the hits and the onboarded
    stored: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Closing:
    """The last message of a worker. ``reason`` is why there is no GPU, if there is none."""

    driver: str
    device: str
    reason: str
    launches: int
    moved_bytes: int  # by kernels, between GPU memory and the pool
    bounced_bytes: int  # by way of this process's memory
    evicted_blocks: int  # from GPU memory


def work(connection: Connection, devices: list[str], capacity: int) -> None:
    """Serve lists of block ids until None arrives; then send the last message. An error is a line
    of text.
    """
    try:
        with Pool.open(devices) as pool, Client(pool) as client:
            driver, reason = _driver()
            with contextlib.closing(CudaEngine(pool, driver, window_size=_WINDOW_SIZE)) as engine:
                engine.settle(_SETTLE_S)
                worker = _Worker(client, engine, driver, capacity)
                connection.send("ready")
                while (ids := connection.recv()) is not None:
                    connection.send(worker.serve(np.array(ids, np.uint64)))
                worker.close()
                stat = engine.stat
                connection.send(
                    Closing(
                        driver.name,
                        driver.identity,
                        reason,
                        stat.launch_count,
                        stat.direct_bytes,
                        stat.bounced_bytes,
                        worker.evicted_count(),
                    )
                )
    except EOFError:  # the demo was interrupted
        return
    except (BelugaError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):  # as above
            connection.send(str(error))


def _driver() -> tuple[CudaDevice, str]:
    try:
        return CudaDevice(), ""
    except EngineUnavailableError as error:
        return StandIn(0), str(error)


class _RecordedCache:
    """A cache that records the digests of the blocks that it stored."""

    def __init__(self, cache: KVCache) -> None:
        self.stored: list[bytes] = []
        self.get = cache.get
        self._cache = cache

    def put(self, digests: list[bytes], sources: Run) -> PutResult:
        result = self._cache.put(digests, sources)
        self.stored += itertools.compress(digests, result.states == _GRANTED)
        return result


class _Worker:
    """The memory for ``capacity`` blocks: a tensor for each fragment, with a page for each
    block.
    """

    def __init__(
        self, client: Client, engine: CudaEngine, driver: CudaDevice, capacity: int
    ) -> None:
        self._driver, self._engine = driver, engine
        self._cache = _RecordedCache(KVCache(client, namespace=_NAMESPACE, engine=engine))
        self._contents = Contents(BLOCK_SIZE)
        self._size = capacity * BLOCK_SIZE
        self._memory = driver.allocate(self._size)
        self._pinned = driver.pin(self._size)
        self._pinned.array[:] = 0
        self._pages = self._pinned.array[: self._size].reshape(FRAGMENTS, capacity, FRAGMENT_SIZE)
        self._stream, self._event = driver.make_stream(urgent=True), driver.make_event()
        self._copy(to_gpu=True)
        tensors = [
            View.foreign(
                self._memory + fragment * capacity * FRAGMENT_SIZE,
                capacity * FRAGMENT_SIZE,
                shape=(capacity, FRAGMENT_SIZE),
                dtype="U8",
            )
            for fragment in range(FRAGMENTS)
        ]
        below = CacheTier(self._cache, self._cache, BlockLayout(tensors, ("block", "dim")))
        self._device = BlockPool("device", capacity)
        self._manager = BlockManager(self._device, below, threads=False)
        self._count = 0

    def serve(self, ids: Ids) -> Served:
        """Onboard the leading blocks that the pool has, check them, and compute the others."""
        keys, self._count = [row.tobytes() for row in digests(ids)], self._count + 1
        matched = self._device.match(keys, self._count)
        onboard = self._manager.onboard(keys, self._count)
        self._manager.flush()
        pages = [block.index for block in onboard.result()]
        hits, device_hits = len(pages), len(matched)
        self._copy(to_gpu=False)
        contents = self._pages[:, pages].transpose(1, 0, 2).reshape(hits, BLOCK_SIZE)
        wrong = self._contents.wrong_count(ids[:hits], contents.view(np.uint64))
        room = self._device.reserve(self._count, len(keys) - hits).result()
        if room:
            missing = np.empty((len(room), BLOCK_SIZE // 8), np.uint64)
            self._contents.fill(ids[hits:], missing)
            shape = (len(room), FRAGMENTS, FRAGMENT_SIZE)
            computed = missing.view(np.uint8).reshape(shape).transpose(1, 0, 2)
            self._pages[:, [block.index for block in room]] = computed
            self._copy(to_gpu=True)
            for index, block in enumerate(room, hits):
                block.fill(self._device.block_size)
                block.commit(keys[index], parent=keys[index - 1] if index else None)
            self._device.register(room)
        del matched, onboard, room
        self._manager.release(self._count)
        self._manager.flush()
        names = dict(zip(keys, ids.tolist(), strict=True))
        stored = [names[digest] for digest in self._cache.stored]
        self._cache.stored.clear()
        return Served(len(keys), device_hits, ids[device_hits:hits].tolist(), wrong, stored)

    def evicted_count(self) -> int:
        """Return how many blocks were evicted from GPU memory."""
        counter = REGISTRY.counter("beluga_kvbm_evicted_blocks_total", "")
        return int(counter.value(tier=self._device.name))

    def close(self) -> None:
        self._manager.close()
        self._driver.free_event(self._event)
        self._driver.end_stream(self._stream)
        del self._pages
        self._driver.unpin(self._pinned)
        self._driver.free(self._memory)

    def _copy(self, *, to_gpu: bool) -> None:
        """Copy all pages between GPU memory and this process's."""
        host = self._pinned.array.ctypes.data
        pair = (self._memory, host) if to_gpu else (host, self._memory)
        self._driver.copy(*pair, self._size, self._stream)
        self._driver.record(self._event, self._stream)
        self._driver.wait(self._event)
