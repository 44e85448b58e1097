# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure copies of a model's blocks between a GPU and the pool: the GPU's rows of ``copy``.

The GPU's work is timed, between two events. The host's work (plans, and the CPU's cache
maintenance) is in ``coherence`` and ``latency``. The limit is one large copy of the same number of
bytes by a copy engine between pinned memory and the GPU, interleaved with ours. The speed of that
copy in the pool's own memory is also a row. The bytes are random, because a CRC of zeros is faster.
Without a GPU the rows have a note.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from beluga.errors import BelugaError, EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import CudaDevice, CudaEngine, Plan, plan_blocks, plan_rows
from beluga.transfer.policy import CacheMaintenance, Step
from beluga.transfer.policy import PolicyRow as Steps

from ..harness.row import Recorder, Row
from ..harness.tokens import MODELS, Model, selection
from .clock import StreamClock
from .peers import peer_rows
from .runs import runs_of

FRAGMENTS, FRAGMENT_SIZE = 128, 20 << 10  # per block of 16 tokens of a 32B model
BLOCK_SIZE = FRAGMENTS * FRAGMENT_SIZE
CHUNK_SIZE = 16 << 10
CASES = ("gather_write", "scatter_read")
BATCHES, SMOKE_BATCHES = (1, 16), (1, 2)  # blocks of one call
SHARES, SMOKE_SHARES = (1, 2, 8), (8,)  # multiprocessors, twice as many with checksums

_WINDOW_SIZE = 64 << 20
_SETTLE_S = 120.0
_SHARE = 4  # the engine's default
_APART = Steps(Step.FENCE, Step.FENCE)


def gpu_copy(
    recorder: Recorder, pool: Pool, make: Callable[[], CudaDevice] = CudaDevice
) -> list[Row]:
    """Return the rows of dense and sparse copies, and of the peers."""
    rows = []
    shares = SMOKE_SHARES if recorder.options.smoke else SHARES
    try:
        driver = make()
        for share in (_SHARE, *shares):
            rows += _by(recorder, pool, driver, share)
    except EngineUnavailableError as error:
        rows = _skipped(recorder, error)
    return rows


def _by(recorder: Recorder, pool: Pool, driver: CudaDevice, share: int) -> list[Row]:
    """Return all rows of the default share of the GPU, or those of the largest batch for another
    one. An error ends the rows of this share and of no other.
    """
    try:
        with (
            contextlib.closing(_engine(pool, driver, share)) as engine,
            contextlib.closing(_Bench(recorder, pool, driver, engine)) as bench,
        ):
            return bench.rows() if share == _SHARE else bench.large(share)
    except BelugaError as error:
        return _skipped(recorder, error)


def _skipped(recorder: Recorder, error: BelugaError) -> list[Row]:
    cases = (*CASES, "sparse_read")
    return [recorder.skipped(case, str(error), engine="cuda") for case in cases]


def _engine(pool: Pool, driver: CudaDevice, share: int) -> CudaEngine:
    engine = CudaEngine(
        pool,
        driver,
        blocks=share,
        window_size=_WINDOW_SIZE,
        maintenance=CacheMaintenance(pool, _APART),
    )
    if not engine.settle(_SETTLE_S) or engine.stat.fault is not None:
        fault = engine.stat.fault
        engine.close()
        raise EngineUnavailableError(f"the pool is not registered: {fault}")
    return engine


class _Bench:
    """One engine, with memory of the GPU and pinned memory for the largest batch."""

    def __init__(
        self, recorder: Recorder, pool: Pool, driver: CudaDevice, engine: CudaEngine
    ) -> None:
        self._recorder, self._pool, self._driver, self._engine = recorder, pool, driver, engine
        self._batches = SMOKE_BATCHES if recorder.options.smoke else BATCHES
        size = self._batches[-1] * BLOCK_SIZE
        self._memory, self._pinned = driver.allocate(size), driver.pin(size)
        self._clock = StreamClock(driver)
        random = np.random.default_rng(recorder.options.seed)
        self._pinned.array[:] = random.integers(0, 256, len(self._pinned.array), np.uint8)
        self._clock.seconds(self._ceiling(write=False, size=size))  # and its end

    def rows(self) -> list[Row]:
        rows = []
        for blocks in self._batches:
            for chunk_size in (0, CHUNK_SIZE):
                plan = self._dense(blocks, chunk_size)
                rows += [self._row(case, plan, "", FRAGMENTS * blocks) for case in CASES]
        for model in MODELS:
            plan = self._sparse(model)
            rows.append(
                self._row("sparse_read", plan, f"{model.name}, 16 tokens", len(plan.pieces))
            )
        rows += [self._of_pool(case) for case in CASES]
        for blocks in self._batches:
            plan = self._dense(blocks, 0)
            rows += peer_rows(self._recorder, self._driver, self._engine, self._pinned, plan)
        rows += peer_rows(
            self._recorder, self._driver, self._engine, self._pinned, self._sparse(MODELS[0])
        )
        return rows

    def large(self, share: int) -> list[Row]:
        """Return the rows of the largest batch alone."""
        blocks = self._batches[-1]
        rows = []
        for chunk_size in (0, CHUNK_SIZE):
            plan, count = self._dense(blocks, chunk_size), 2 * share if chunk_size else share
            note = f"{count} multiprocessors"
            rows += [self._row(case, plan, note, FRAGMENTS * blocks) for case in CASES]
        return rows

    def close(self) -> None:
        """Free the memory; no copy is in flight."""
        self._clock.close()
        self._driver.unpin(self._pinned)
        self._driver.free(self._memory)

    def _dense(self, blocks: int, chunk_size: int) -> Plan:
        at = np.arange(blocks * FRAGMENTS, dtype=np.uint64) * np.uint64(FRAGMENT_SIZE)
        return plan_blocks(
            (np.uint64(self._memory) + at).reshape(blocks, FRAGMENTS),
            np.full(FRAGMENTS, FRAGMENT_SIZE),
            self._offsets(blocks, BLOCK_SIZE),
            chunk_size=chunk_size,
        )

    def _sparse(self, model: Model) -> Plan:
        """Return a plan of 16 tokens' rows of as many blocks as a batch has; most rows have no
        neighbor.
        """
        blocks = self._batches[-1]
        tokens = selection(0, blocks * model.block_tokens)
        which = np.repeat(tokens // model.block_tokens, model.row_count)
        at = (tokens % model.block_tokens * model.row_size)[:, None]
        inside = (np.arange(model.row_count) * model.fragment_size + at).reshape(-1)
        targets = np.uint64(self._memory) + np.arange(len(inside), dtype=np.uint64) * np.uint64(
            model.row_size
        )
        return plan_rows(
            targets,
            which,
            inside,
            np.full(len(inside), model.row_size),
            offsets=self._offsets(blocks, model.block_size),
            length=model.block_size,
        )

    def _offsets(self, blocks: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        steps = np.arange(blocks, dtype=np.uint64)
        steps *= np.uint64(size)
        steps += np.uint64(self._pool.geometry.data_offset)
        return steps

    def _ceiling(self, write: bool, size: int) -> Callable[[int], None]:
        """Return one copy by a copy engine."""
        host = int(self._pinned.array.ctypes.data)
        pair = (host, self._memory) if write else (self._memory, host)
        return lambda stream: self._driver.copy(*pair, size, stream)

    def _of_pool(self, case: str) -> Row:
        """Measure the same copy in the pool's memory: the limit of its registered pages."""
        write, plan = case == "gather_write", self._dense(self._batches[-1], 0)
        runs = runs_of(self._engine, self._pool, plan)

        def enqueue(stream: int) -> None:
            for address, offset, length in runs:
                near = self._memory + offset
                pair = (address, near) if write else (near, address)
                self._driver.copy(*pair, length, stream)

        fields = self._clock.race(
            self._ceiling(write, plan.size), enqueue, plan.size, self._recorder.options
        )
        peer = "copy engine, the pool's memory"
        return self._recorder.row(case, peer=peer, crc=False, bytes=plan.size, **fields)

    def _row(self, case: str, plan: Plan, note: str, fragments: int) -> Row:
        options, write = self._recorder.options, case == "gather_write"
        crc = plan.checksums is not None
        options.report(
            f"copy {case}, cuda, {note}, {plan.size} bytes{', checksums' if crc else ''}"
        )
        start = self._engine.gather_write if write else self._engine.scatter_read
        fields = self._clock.race(
            self._ceiling(write, plan.size),
            lambda stream: start(plan, stream=stream),
            plan.size,
            options,
        )
        if self._clock.exposed:
            held = f"{self._clock.exposed} samples hold some of the host's time"
            note = f"{note}; {held}" if note else held
        return self._recorder.row(
            case,
            engine="cuda",
            crc=crc,
            bytes=plan.size,
            threads=1,
            fragment_bytes=plan.size // fragments,
            fragments=fragments,
            note=note or None,
            **fields,
        )
