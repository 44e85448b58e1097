# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Invalid plans never reach a GPU, and failures on the host are reported by their transfers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from support.cuda_capture import begin_capture
from support.cuda_gpu import PATIENCE_S, STRIPE, Blocks, FailingGpu, Gpu, engine_on
from support.emulation import long
from support.engines import poke

from beluga.errors import (
    DeviceFaultError,
    ForkedSessionError,
    LayoutError,
    TransferError,
    UnsettledError,
)
from beluga.pool import Pool
from beluga.transfer import CHUNK, PIECE, Plan, plan_blocks, plan_rows, settle
from beluga.transfer.cuda import CudaEngine, DriverError
from beluga.transfer.policy import CacheMaintenance, PolicyRow, Step

pytestmark = pytest.mark.usefixtures("compiled")


def test_an_empty_plan_completes_immediately(pool: Pool, gpu: Gpu) -> None:
    engine = engine_on(pool, gpu)
    nothing = Plan(np.empty(0, PIECE), np.empty(0, CHUNK))
    for start in (engine.gather_write, engine.scatter_read):
        transfer = start(nothing)
        transfer.wait(PATIENCE_S)
        assert transfer.done()
    assert gpu.launches == []
    stream = gpu.make_stream(urgent=False)
    begin_capture(gpu, stream)
    with pytest.raises(LayoutError, match="without pieces"):
        engine.capture(nothing, stream, write=True)


def of_another_chunk(plan: Plan) -> None:
    plan.pieces["chunk"][-1] = 10**6


def leaving_a_gap(plan: Plan) -> None:
    plan.pieces["offset"][3] += 64


def backwards(plan: Plan) -> None:
    plan.pieces[:] = plan.pieces[::-1].copy()


def wrong_first(plan: Plan) -> None:
    plan.chunks["first"][2] += 1


@pytest.mark.parametrize("spoil", [of_another_chunk, leaving_a_gap, backwards, wrong_first])
def test_a_plan_that_would_lead_a_kernel_outside_the_pool_is_refused(
    pool: Pool, gpu: Gpu, spoil: Callable[[Plan], None]
) -> None:
    engine, plan = engine_on(pool, gpu), Blocks.make(pool).plan
    spoil(plan)
    for start in (engine.gather_write, engine.scatter_read):
        with pytest.raises(LayoutError, match="pieces"):
            start(plan)
    assert gpu.launches == []


def test_a_piece_that_leaves_its_stripe_is_refused(pool: Pool, gpu: Gpu) -> None:
    """Such a piece would leave its window, which ends with a stripe."""
    engine, memory = engine_on(pool, gpu), np.zeros(8192, np.uint8)
    start = pool.geometry.data_offset + STRIPE - 4096
    plan = Plan(
        np.array([(memory.ctypes.data, start, 8192, 0)], PIECE),
        np.array([(start, 8192, 0)], CHUNK),
    )
    for begin in (engine.gather_write, engine.scatter_read):
        with pytest.raises(LayoutError, match="stripes"):
            begin(plan)
    assert gpu.launches == []


def test_a_closed_engine_raises_a_clear_error(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    engine.close()
    with pytest.raises(TransferError, match="closed"):
        engine.gather_write(blocks.plan)


def test_the_error_in_a_forked_child_is_to_open_the_pool_again(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                engine.gather_write(blocks.plan)
            except ForkedSessionError:
                code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class FailingOnce(CacheMaintenance):
    """Cache maintenance whose first flush meets a fault."""

    failed: ClassVar[bool]

    @classmethod
    def on(cls, pool: Pool) -> FailingOnce:
        cls.failed = False
        return cls(pool, PolicyRow(Step.FENCE, Step.FLUSH))

    def after_write(self, plan: Plan) -> None:
        if not self.failed:
            type(self).failed = True
            raise DeviceFaultError("made up")
        super().after_write(plan)


def test_every_wait_raises_the_error_of_a_failed_flush(pool: Pool, gpu: Gpu) -> None:
    engine = engine_on(pool, gpu, maintenance=FailingOnce.on(pool))
    assert engine.settle(PATIENCE_S)
    transfer = engine.gather_write(Blocks.make(pool).plan)
    for _ in range(2):  # unflushed blocks are never published
        with pytest.raises(DeviceFaultError):
            transfer.wait(PATIENCE_S)


def every_other_window() -> Callable[[int], None]:
    requests: list[int] = []

    def refuse(size: int) -> None:
        requests.append(size)
        if len(requests) % 2:
            raise DriverError("made up")

    return refuse


def test_a_fault_while_bouncing_leaves_no_copy_in_flight(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the error a caller may free the memory that the GPU was about to fill."""
    gpu = Gpu(before_register=every_other_window())
    engine = engine_on(pool, gpu, bounce_size=512 << 10)
    assert engine.settle(PATIENCE_S)
    blocks = Blocks.make(pool, 24)  # over more than three stripes
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert engine.stat.direct_bytes > 0 < engine.stat.bounced_bytes
    real, calls = engine._paths._between, []

    def fail_later(packed: Any, pinned: Any, *, write: bool) -> None:
        calls.append(write)
        if len(calls) > 2:
            raise DeviceFaultError("made up")
        real(packed, pinned, write=write)

    with monkeypatch.context() as patch:
        patch.setattr(engine._paths, "_between", fail_later)
        with pytest.raises(DeviceFaultError):
            engine.scatter_read(blocks.plan)
    assert nothing_under_way(engine)
    blocks.memory[:] = 0
    engine.scatter_read(blocks.plan).wait(PATIENCE_S)
    assert blocks.memory.any()
    assert blocks.stored(pool)
    assert nothing_under_way(engine)


def nothing_under_way(engine: CudaEngine) -> bool:
    return engine._buffers.sizes == {} and engine._registrar._holds.used() == set()


def test_rows_of_a_chunk_that_spans_stripes_are_read(pool: Pool) -> None:
    engine = engine_on(pool, Gpu())
    assert engine.settle(PATIENCE_S)
    length, random = (3 << 20) + 100, np.random.default_rng(1)
    whole = random.integers(0, 256, length, np.uint8)
    offsets = np.array([pool.geometry.data_offset + STRIPE - 4096], np.uint64)
    writing = plan_blocks(
        np.array([[whole.ctypes.data]], np.uint64),
        np.array([length]),
        offsets,
        chunk_size=3 << 20,
    )
    engine.gather_write(writing).wait(PATIENCE_S)
    sizes = random.integers(1, 9000, 200)
    places = random.integers(0, length - sizes)  # many of them overlap
    rows = np.zeros((200, 9000), np.uint8)
    assert writing.checksums is not None
    plan = plan_rows(
        (rows.ctypes.data + np.arange(200) * 9000).astype(np.uint64),
        *(np.zeros(200, np.int64), places, sizes),
        offsets=offsets,
        length=length,
        chunk_size=3 << 20,
        checksums=writing.checksums.reshape(1, -1),
    )
    engine.scatter_read(plan).wait(PATIENCE_S)
    for row, place, size in zip(rows, places, sizes, strict=True):
        assert (row[:size] == whole[place : place + size]).all()
        assert not row[size:].any()


def test_a_part_of_a_plan_is_a_plan(pool: Pool, gpu: Gpu) -> None:
    """Parts number pieces and chunks from the first one of the whole plan."""
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    parts = list(blocks.plan.cut(100_000))
    assert len(parts) > 3
    for part in parts[1:]:
        engine.gather_write(part).wait(PATIENCE_S)
    engine.gather_write(parts[0]).wait(PATIENCE_S)
    assert blocks.stored(pool)


def test_bounce_buffers_have_the_size_of_the_fetched_bytes(pool: Pool) -> None:
    """For rows with checksums, the bound applies to the size of their chunks."""

    def refuse(_: int) -> None:
        raise DriverError("made up")

    gpu = Gpu(before_register=refuse)
    engine, count, chunk = engine_on(pool, gpu, bounce_size=256 << 10), 64, 16384
    assert engine.settle(PATIENCE_S)
    whole = np.random.default_rng(2).integers(0, 256, count * chunk, np.uint8)
    offsets = np.array([pool.geometry.data_offset], np.uint64)
    place = np.array([[whole.ctypes.data]], np.uint64)
    writing = plan_blocks(place, np.array([len(whole)]), offsets, chunk_size=chunk)
    engine.gather_write(writing).wait(PATIENCE_S)
    rows = np.zeros((count, 64), np.uint8)
    assert writing.checksums is not None
    plan = plan_rows(
        (rows.ctypes.data + np.arange(count) * 64).astype(np.uint64),
        *(np.zeros(count, np.int64), np.arange(count) * chunk, np.full(count, 64)),
        offsets=offsets,
        length=len(whole),
        chunk_size=chunk,
        checksums=writing.checksums.reshape(1, -1),
    )
    gpu.launches.clear()
    engine.scatter_read(plan).wait(PATIENCE_S)
    assert (rows == whole.reshape(count, chunk)[:, :64]).all()
    assert len(gpu.launches) == count * chunk // (64 << 10)  # each a quarter of the bound


def test_a_bounced_write_is_pending_until_its_bytes_are_stored(pool: Pool) -> None:
    """After the end the caller may reuse the space, so later copies must not write it."""

    def refuse(_: int) -> None:
        raise DriverError("made up")

    engine = engine_on(pool, Gpu(before_register=refuse), bounce_size=1 << 20)
    assert engine.settle(PATIENCE_S)
    first, *others = [Blocks.make(pool, stripe=stripe) for stripe in (0, 4, 8)]
    transfer = engine.gather_write(first.plan)
    while not transfer.done():
        pass
    theirs = np.full(len(first.memory), 0x5A, np.uint8)
    poke(pool, int(first.plan.chunks["offset"][0]), theirs)
    for other in others:  # the others need the pool's buffers
        engine.gather_write(other.plan).wait(PATIENCE_S)
    first.memory[:] = theirs
    assert first.stored(pool)


@pytest.mark.parametrize("bounced", [False, True])
@pytest.mark.parametrize("ranges", [False, long(True)])
def test_a_failed_start_leaves_no_copy_in_flight(
    pool: Pool, bounced: bool, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any call of the driver may fail. When the start raises, the GPU has no work of it left."""
    if ranges:
        monkeypatch.setattr(CacheMaintenance, "range_size", lambda *_, **__: 300_000)
    for number in itertools.count(1):
        gpu = FailingGpu(bounced=bounced)
        engine = engine_on(pool, gpu, bounce_size=2 << 20)
        assert engine.settle(PATIENCE_S)
        blocks = Blocks.make(pool, 6)
        gpu.fail_at = number
        gpu.gate.clear()
        opener = threading.Timer(0.003, gpu.gate.set)
        opener.start()
        try:
            engine.gather_write(blocks.plan).wait(PATIENCE_S)
        except DriverError:
            assert nothing_under_way(engine)
            theirs = np.full(len(blocks.memory), 0x5A, np.uint8)
            poke(pool, int(blocks.plan.chunks["offset"][0]), theirs)
            opener.join()
            mine, blocks.memory = blocks.memory, theirs
            assert blocks.stored(pool)
            blocks.memory = mine
        opener.join()
        ended = gpu.fail_at > 0
        gpu.fail_at = 0
        engine.gather_write(blocks.plan).wait(PATIENCE_S)
        assert blocks.stored(pool)
        assert nothing_under_way(engine)
        engine.close()
        if ended:
            break
    assert number > 4


class Leaving(FailingGpu):
    """Records whether the gate was open when the GPU's memory was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bool] = []

    def unregister(self, address: int) -> None:
        self.taken.append(self.gate.is_set())
        super().unregister(address)

    def free(self, address: int) -> None:
        self.taken.append(self.gate.is_set())
        super().free(address)


def test_a_closed_engine_frees_no_memory_of_copies_in_flight(pool: Pool) -> None:
    gpu = Leaving()
    engine = engine_on(pool, gpu)
    assert engine.settle(PATIENCE_S)
    blocks = Blocks.make(pool)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    gpu.gate.clear()
    engine.gather_write(blocks.plan)
    opener = threading.Timer(0.05, gpu.gate.set)
    opener.start()
    engine.close()
    opener.join()
    assert gpu.taken
    assert all(gpu.taken)
    assert blocks.stored(pool)
    gpu.close()


def test_memory_stays_allocated_while_the_end_of_a_copy_is_unknown(pool: Pool) -> None:
    gpu = Leaving()
    engine = engine_on(pool, gpu)
    assert engine.settle(PATIENCE_S)
    blocks = Blocks.make(pool)
    plan = dataclasses.replace(blocks.plan, owners=(owner := threading.Event(),))
    memory = weakref.ref(owner)
    gpu.gate.clear()
    transfer = engine.gather_write(plan)
    gpu.silent = True
    with pytest.raises(UnsettledError, match="restart"):
        settle([transfer])
    engine.close()
    del transfer, plan, owner, engine
    gc.collect()
    assert gpu.taken == []
    assert memory() is not None
    gpu.gate.set()
    gpu.silent = False
    gpu.close()  # the copy ends before the pool does
