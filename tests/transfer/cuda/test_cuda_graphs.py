# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine together with other work: graphs, streams, failures."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.cuda_capture import begin_capture, end_capture, replay
from support.cuda_gpu import PATIENCE_S, Blocks, Gpu, engine_on
from support.engines import poke

from beluga import coherence
from beluga.errors import ChecksumError, TransferError
from beluga.pool import Pool

pytestmark = pytest.mark.usefixtures("compiled")


class TestGraphs:
    def test_a_captured_copy_runs_at_each_replay(self, pool: Pool, gpu: Gpu) -> None:
        engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
        assert engine.settle(PATIENCE_S)
        stream, event = gpu.make_stream(urgent=True), gpu.make_event()
        engine.gather_write(blocks.plan, stream=stream).wait(PATIENCE_S)
        begin_capture(gpu, stream)
        transfer = engine.capture(blocks.plan, stream, write=True)
        graph = end_capture(gpu, stream)
        for value in (1, 2):
            blocks.memory[:] = value
            transfer.prepare()
            replay(gpu, graph, stream)
            gpu.record(event, stream)
            gpu.wait(event)
            transfer.wait()
            assert blocks.stored(pool)
            assert blocks.plan.checksums is not None
            assert blocks.plan.checksums[0] == coherence.crc32c(bytes([value]) * 16384)
        engine.scatter_read(blocks.plan, stream=stream).wait(PATIENCE_S)
        begin_capture(gpu, stream)
        reading = engine.capture(blocks.plan, stream, write=False)
        graph = end_capture(gpu, stream)
        for spoilt in (False, True):
            if spoilt:
                poke(pool, int(blocks.plan.chunks["offset"][1]), np.zeros(1, np.uint8))
            reading.prepare()
            replay(gpu, graph, stream)
            gpu.record(event, stream)
            gpu.wait(event)
            if spoilt:
                with pytest.raises(ChecksumError):
                    reading.wait()
            else:
                reading.wait()

    def test_no_other_work_is_enqueued_on_a_captured_stream(self, pool: Pool, gpu: Gpu) -> None:
        engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
        assert engine.settle(PATIENCE_S)
        stream = gpu.make_stream(urgent=True)
        with pytest.raises(TransferError, match="not being captured"):
            engine.capture(blocks.plan, stream, write=True)
        begin_capture(gpu, stream)
        for start in (engine.gather_write, engine.scatter_read):
            with pytest.raises(TransferError, match="captured"):
                start(blocks.plan, stream=stream)
        assert end_capture(gpu, stream) == []

    def test_unregistered_memory_is_not_captured(self, pool: Pool) -> None:
        let = threading.Event()
        gpu = Gpu(before_register=lambda _: let.wait(PATIENCE_S) and None)
        engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
        stream = gpu.make_stream(urgent=True)
        begin_capture(gpu, stream)
        with pytest.raises(TransferError, match="not registered yet"):
            engine.capture(blocks.plan, stream, write=True)
        let.set()


def test_streams_of_torch_and_cupy_are_accepted(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    handle = gpu.make_stream(urgent=False)
    foreign = type("Foreign", (), {"__cuda_stream__": lambda self: (0, handle)})()
    for stream in (SimpleNamespace(cuda_stream=handle), SimpleNamespace(ptr=handle), foreign):
        engine.gather_write(blocks.plan, stream=stream).wait(PATIENCE_S)
    with pytest.raises(TransferError, match="not a CUDA stream"):
        engine.gather_write(blocks.plan, stream="0")  # type: ignore[arg-type]


def test_a_failed_kernel_is_the_transfers_error(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    stream = gpu.make_stream(urgent=True)
    gpu._streams[stream].put(lambda: 1 // 0 and None)
    transfer = engine.gather_write(blocks.plan, stream=stream)
    with pytest.raises(TransferError, match="failed"):
        transfer.wait(PATIENCE_S)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)  # other streams continue
    assert blocks.stored(pool)
