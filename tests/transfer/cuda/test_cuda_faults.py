# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Invalid plans never reach a GPU, and failures on the host are reported by their transfers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from support.cuda_gpu import (
    PATIENCE_S,
    STRIPE,
    Blocks,
    Gpu,
    engine_on,
    nothing_under_way,
    refuse,
)
from support.emulation import long
from support.engines import poke
from support.plans import cut

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceFaultError,
    ForkedSessionError,
    LayoutError,
    TransferError,
    UnsettledError,
)
from beluga.pool import Pool
from beluga.transfer import CHUNK, PIECE, Plan, plan_blocks, plan_rows, settle
from beluga.transfer.cuda import DriverError
from beluga.transfer.policy import CacheMaintenance

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
    gpu.begin_capture(stream)
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
    gpu.gate.clear()
    transfer = engine.gather_write(blocks.plan)  # in flight, in the parent alone
    child = os.fork()
    if child == 0:
        refused = 0
        with contextlib.suppress(BaseException):
            for call in (lambda: engine.gather_write(blocks.plan), transfer.wait, transfer.done):
                try:
                    call()
                except ForkedSessionError:
                    refused += 1
            engine.close()  # without a wait for the GPU
            refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    gpu.gate.set()
    transfer.wait(PATIENCE_S)
    assert blocks.stored(pool)


def every_other_window() -> Callable[[int], None]:
    requests: list[int] = []

    def some(size: int) -> None:
        requests.append(size)
        if len(requests) % 2:
            refuse(size)

    return some


def test_a_fault_while_bouncing_leaves_no_copy_in_flight(pool: Pool) -> None:
    """After the error a caller may free the memory that the GPU was about to fill."""
    gpu = Gpu(every_other_window())
    engine = engine_on(pool, gpu, bounce_size=512 << 10)
    assert engine.settle(PATIENCE_S)
    blocks = Blocks.make(pool, 24)  # over more than three stripes
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert engine.stat.direct_bytes > 0 < engine.stat.bounced_bytes
    before = len(gpu.launches)
    where = int(blocks.plan.chunks["offset"][-1]) // STRIPE // len(pool.devices) + 1
    sizes = [device.path.stat().st_size for device in pool.devices]
    for device in pool.devices:
        os.truncate(device.path, where * STRIPE)  # only the last bytes are missing
    with pytest.raises(DeviceFaultError):
        engine.scatter_read(blocks.plan)
    assert len(gpu.launches) > before
    assert nothing_under_way(engine)
    for device, size in zip(pool.devices, sizes, strict=True):
        os.truncate(device.path, size)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    blocks.memory[:] = 0
    engine.scatter_read(blocks.plan).wait(PATIENCE_S)
    assert blocks.memory.any()
    assert blocks.stored(pool)
    assert nothing_under_way(engine)


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
    parts = list(cut(blocks.plan, 100_000))
    assert len(parts) > 3
    for part in parts[1:]:
        engine.gather_write(part).wait(PATIENCE_S)
    engine.gather_write(parts[0]).wait(PATIENCE_S)
    assert blocks.stored(pool)


def test_bounce_buffers_have_the_size_of_the_fetched_bytes(pool: Pool) -> None:
    """For rows with checksums, the bound applies to the size of their chunks."""

    gpu = Gpu(bounced=True)
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
    before = len(gpu.launches)
    engine.scatter_read(plan).wait(PATIENCE_S)
    assert (rows == whole.reshape(count, chunk)[:, :64]).all()
    assert len(gpu.launches) - before == count * chunk // (64 << 10)  # each a quarter of the bound


def test_a_bounced_write_is_pending_until_its_bytes_are_stored(pool: Pool) -> None:
    """After the end the caller may reuse the space, so later copies must not write it."""

    engine = engine_on(pool, Gpu(bounced=True), bounce_size=1 << 20)
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
        gpu = Gpu(bounced=bounced)
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


def leaving(gpu: Gpu) -> list[bool]:
    """Record whether the gate was open when memory was freed."""
    taken: list[bool] = []

    def note(function: str, _: int) -> None:
        if function in ("cuMemHostUnregister", "cuMemFreeHost", "cuMemFree"):
            taken.append(gpu.gate.is_set())

    gpu.seen = note
    return taken


def test_a_closed_engine_frees_no_memory_of_copies_in_flight(pool: Pool) -> None:
    gpu = Gpu()
    taken = leaving(gpu)
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
    assert taken
    assert all(taken)
    assert blocks.stored(pool)


def test_memory_stays_allocated_while_the_end_of_a_copy_is_unknown(pool: Pool) -> None:
    gpu = Gpu()
    taken = leaving(gpu)
    engine = engine_on(pool, gpu)
    assert engine.settle(PATIENCE_S)
    blocks = Blocks.make(pool)
    plan = dataclasses.replace(blocks.plan, owners=(owner := threading.Event(),))
    memory = weakref.ref(owner)
    gpu.gate.clear()
    stream = gpu.make_stream(urgent=False)
    transfer = engine.gather_write(plan, stream=stream)
    gpu.silent = True
    with pytest.raises(UnsettledError, match="restart"):
        settle([transfer])
    engine.close()
    del transfer, plan, owner, engine
    gc.collect()
    assert taken == []
    assert memory() is not None
    gpu.gate.set()
    gpu.silent = False
    gpu.drain(stream)  # the copy ends before the pool does


def test_a_failed_start_whose_end_is_unknown_keeps_everything(pool: Pool) -> None:
    gpu = Gpu()
    engine = engine_on(pool, gpu)
    assert engine.settle(PATIENCE_S)
    taken, blocks = leaving(gpu), Blocks.make(pool)
    plan = dataclasses.replace(blocks.plan, owners=(owner := threading.Event(),))
    memory, stream = weakref.ref(owner), gpu.make_stream(urgent=False)
    gpu.gate.clear()
    gpu.silent = True
    failing = {"cuEventRecord"}
    note = gpu.seen
    gpu.seen = lambda function, first: 999 if function in failing else note(function, first)
    with pytest.raises(UnsettledError, match="restart"):
        engine.gather_write(plan, stream=stream)
    failing.clear()
    gpu.silent = False
    other = Blocks.make(pool, stripe=4)
    gpu.gate.set()
    engine.gather_write(other.plan).wait(PATIENCE_S)  # with other buffers
    assert other.stored(pool)
    engine.close()
    del plan, owner, engine
    gc.collect()
    assert taken == []
    assert memory() is not None
    gpu.drain(stream)


def test_a_transfer_that_nobody_keeps_frees_its_buffers_when_it_has_ended(
    pool: Pool, gpu: Gpu
) -> None:
    engine, stream = engine_on(pool, gpu), gpu.make_stream(urgent=False)
    assert engine.settle(PATIENCE_S)
    gpu.gate.clear()
    blocks, other = Blocks.make(pool), Blocks.make(pool, stripe=4)
    engine.gather_write(blocks.plan, stream=stream)
    gc.collect()
    running = engine.gather_write(other.plan, stream=stream)
    assert not nothing_under_way(engine)
    gpu.gate.set()
    running.wait(PATIENCE_S)
    engine.gather_write(other.plan).wait(PATIENCE_S)
    assert nothing_under_way(engine)
    assert blocks.stored(pool)


@pytest.mark.parametrize("bounced", [False, True])
def test_callers_in_c_start_and_wait(pool: Pool, bounced: bool) -> None:
    gpu = Gpu(bounced=bounced)
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    copy, plan = ffi.new("void **"), blocks.plan.struct()
    table = lib.bl_cuda_engine_table(engine._handle)

    def move(*, write: bool) -> int:
        code = table.start(table.context, plan, write, copy)
        return code or table.wait(table.context, copy[0])

    assert move(write=True) == 0
    assert blocks.stored(pool)
    blocks.memory[:] = 0
    assert move(write=False) == 0
    assert blocks.stored(pool)
    poke(pool, int(blocks.plan.chunks["offset"][2]), np.zeros(1, np.uint8))
    assert move(write=False) == -errno.EBADMSG
    gpu.fail_at = 1
    assert move(write=True) <= -lib.BL_CUDA_STATUS
    gpu.seen = lambda function, _: 719 if function == "cuEventQuery" else None
    assert move(write=True) == -errno.EINPROGRESS
    gpu.seen = lambda function, _: None
    assert move(write=True) == 0
    plan.chunk_count -= 1
    assert move(write=True) == -errno.EINVAL
    plan.chunk_count += 1
    engine.close()
    assert move(write=True) == -errno.ESHUTDOWN
