# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks of a model between a GPU and the pool: the GPU's rows of ``copy``.

The limit is one large copy of as many bytes by a copy engine, between pinned memory and the GPU.
Peers, in the same run: cudaMemcpyAsync for each fragment, and all fragments in one
cudaMemcpyBatchAsync. Where there is no GPU the rows say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from beluga.errors import EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import Plan, plan_blocks, plan_rows
from beluga.transfer.cuda import CudaEngine, CupyDriver, Driver, DriverError

from .gpu_batch import MemcpyBatch
from .ratio import Once, race, rate
from .row import Recorder, Row, copies

FRAGMENTS, FRAGMENT_SIZE = 128, 20 << 10  # of a block of 16 tokens of a 32B model
ROW_SIZE = 1280
CHUNK_SIZE = 16 << 10

_WINDOW_SIZE = 64 << 20
_SETTLE_S = 120.0
_PATHS = ("direct", "staged")


def gpu_copy(recorder: Recorder, pool: Pool, make: Callable[[], Driver] = CupyDriver) -> list[Row]:
    """Rows of dense and sparse copies by either way, and of the peers."""
    try:
        driver = make()
    except EngineUnavailableError as error:
        cases = ("gather_write", "scatter_read", "sparse_read")
        return [recorder.skipped(case, str(error), engine="cuda") for case in cases]
    rows = []
    with contextlib.closing(driver):
        for path in _PATHS:
            engine = CudaEngine(pool, path=path, window_size=_WINDOW_SIZE, driver=driver)
            with contextlib.closing(engine):
                if not engine.settle(_SETTLE_S) or engine.stat.fault is not None:
                    return [recorder.skipped("gather_write", str(engine.stat.fault), engine="cuda")]
                rows += _Bench(recorder, pool, driver, engine).rows(path)
    return rows


class _Bench:
    """One engine, one block, and memory of the GPU and pinned memory of its size."""

    def __init__(self, recorder: Recorder, pool: Pool, driver: Driver, engine: CudaEngine) -> None:
        self._recorder, self._pool, self._driver, self._engine = recorder, pool, driver, engine
        self._size = FRAGMENTS * FRAGMENT_SIZE
        self._memory, self._pinned = driver.allocate(self._size), driver.pin(self._size)
        self._stream, self._event = driver.make_stream(urgent=True), driver.make_event()
        self._offset = np.array([pool.geometry.data_offset], np.uint64)

    def rows(self, path: str) -> list[Row]:
        rows = []
        for crc in (False, True):
            plan = self._dense(crc=crc)
            for case, start in (
                ("gather_write", self._engine.gather_write),
                ("scatter_read", self._engine.scatter_read),
            ):
                write = case == "gather_write"

                def once(start: Callable[..., object] = start, plan: Plan = plan) -> None:
                    start(plan, stream=self._stream).wait()  # type: ignore[attr-defined]

                rows.append(
                    self._row(case, once, plan.size, write, engine="cuda", crc=crc, note=path)
                )
        if path == "direct":
            sparse = self._sparse()
            rows.append(
                self._row(
                    "sparse_read",
                    lambda: self._engine.scatter_read(sparse, stream=self._stream).wait(),
                    sparse.size,
                    False,
                    engine="cuda",
                    crc=False,
                    note=path,
                )
            )
            rows += self._peers()
        self._driver.free_event(self._event)
        self._driver.end_stream(self._stream)
        self._driver.unpin(self._pinned)
        self._driver.free(self._memory)
        return rows

    def _dense(self, *, crc: bool) -> Plan:
        addresses = self._memory + np.arange(FRAGMENTS, dtype=np.uint64) * np.uint64(FRAGMENT_SIZE)
        sizes = np.full(FRAGMENTS, FRAGMENT_SIZE)
        return plan_blocks(
            addresses[None, :], sizes, self._offset, chunk_size=CHUNK_SIZE if crc else 0
        )

    def _sparse(self) -> Plan:
        """One token of a block: a row of each fragment."""
        places = np.arange(FRAGMENTS, dtype=np.int64) * FRAGMENT_SIZE
        return plan_rows(
            (self._memory + np.arange(FRAGMENTS) * ROW_SIZE).astype(np.uint64),
            np.zeros(FRAGMENTS, np.int64),
            places,
            np.full(FRAGMENTS, ROW_SIZE),
            offsets=self._offset,
            length=self._size,
        )

    def _peers(self) -> list[Row]:
        """Fragment by fragment, to and from pinned memory: no pool, no flush, no checksum."""
        rows = []
        for case, write in (("gather_write", True), ("scatter_read", False)):
            pairs = [
                (self._pinned.array.ctypes.data + at, self._memory + at)
                for at in range(0, self._size, FRAGMENT_SIZE)
            ]
            pairs = pairs if write else [(target, source) for source, target in pairs]

            def each(pairs: list[tuple[int, int]] = pairs) -> None:
                for target, source in pairs:
                    self._driver.copy(target, source, FRAGMENT_SIZE, self._stream)
                self._finish()

            name = "cudaMemcpyAsync per fragment"
            rows.append(self._row(case, each, self._size, write, peer=name, crc=False))
            name = "cudaMemcpyBatchAsync"
            try:
                if self._driver.name != "cuda":
                    raise DriverError("what stands in for the GPU has no such call")
                batch = MemcpyBatch(pairs, FRAGMENT_SIZE)

                def together(batch: MemcpyBatch = batch) -> None:
                    batch.start(self._stream)
                    self._finish()

                together()
                rows.append(self._row(case, together, self._size, write, peer=name, crc=False))
            except (OSError, DriverError) as error:
                rows.append(self._recorder.skipped(case, str(error), peer=name))
        return rows

    def _ceiling(self, size: int, *, write: bool) -> None:
        """One copy by a copy engine."""
        host = self._pinned.array.ctypes.data
        target, source = (host, self._memory) if write else (self._memory, host)
        self._driver.copy(target, source, size, self._stream)
        self._finish()

    def _finish(self) -> None:
        self._driver.record(self._event, self._stream)
        self._driver.wait(self._event)

    def _row(self, case: str, once: Once, size: int, write: bool, **fields: object) -> Row:
        options = self._recorder.options
        options.say(f"copy {case}, {fields}")
        count = 3 if options.smoke else 200
        found = race(
            lambda: rate(lambda: self._ceiling(size, write=write), count),
            lambda: rate(once, count),
            pair_count=options.pair_count,
            retry_count=options.retry_count,
        )
        return self._recorder.row(
            case,
            bytes=size,
            threads=1,
            fragment_bytes=size // FRAGMENTS,
            fragments=FRAGMENTS,
            **fields,
            **copies(found, size),
        )
