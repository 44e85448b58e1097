# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""In staged copies kernels and copy engines work at the same time, and neither runs too early."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cuda_gpu import PATIENCE_S, Blocks, Gpu, engine_on

from beluga import coherence
from beluga.pool import Pool
from beluga.transfer.engines.cuda import CudaEngine, staged

pytestmark = pytest.mark.usefixtures("compiled")

GROUP = 256 << 10


class Observed(Gpu):
    """Records the ends of launches, and of copies on a watched stream, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = -1
        self.pause_s = 0.0  # before tables go to the GPU, and what it found comes back
        self.ended_work: list[tuple[str, int]] = []

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        if stream != self.watched:
            self._streams[stream].put(lambda: time.sleep(self.pause_s))
        super().copy(target, source, size, stream)
        if stream == self.watched:
            self._note(stream, "copy", size)

    def launch(self, kernel: str, grid: Any, job: Any, stream: int) -> None:
        super().launch(kernel, grid, job, stream)
        self._note(stream, "launch", int(job["tile_count"]))

    def done(self, what: str) -> int:
        """Bytes that were copied, or tiles that were launched."""
        return sum(size for kind, size in list(self.ended_work) if kind == what)

    def stand_still(self, stream: int) -> threading.Event:
        """Until the event is set."""
        gate = threading.Event()
        self._streams[stream].put(lambda: gate.wait(PATIENCE_S) and None)
        return gate

    def _note(self, stream: int, what: str, size: int) -> None:
        self._streams[stream].put(lambda: self.ended_work.append((what, size)))


@pytest.fixture
def watched(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An engine that stages in small groups, and its GPU; its copies one way are watched."""
    monkeypatch.setattr(staged, "GROUP_SIZE", GROUP)

    def make(*, write: bool, **options: Any) -> tuple[CudaEngine, Observed]:
        gpu = Observed()
        engine = engine_on(pool, gpu, path="staged", **options)
        assert engine.settle(PATIENCE_S)
        gpu.watched = engine._paths._staging.copies(write=write)
        return engine, gpu

    return make


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_gathers_go_on_while_copies_stand_still(pool: Pool, watched: Callable[..., Any]) -> None:
    engine, gpu = watched(write=True)
    blocks = Blocks.make(pool, 8)
    gate = gpu.stand_still(gpu.watched)
    transfer = engine.gather_write(blocks.plan)
    wait_until(lambda: len(gpu.ended_work) == len(gpu.launches))  # all is gathered
    assert len(gpu.launches) >= len(blocks.memory) // (2 * GROUP)
    assert gpu.done("copy") == 0
    assert not transfer.done()
    gate.set()
    transfer.wait(PATIENCE_S)
    assert gpu.done("copy") == len(blocks.memory)
    assert blocks.stored(pool)


def test_nothing_is_copied_that_is_not_gathered(pool: Pool, watched: Callable[..., Any]) -> None:
    engine, gpu = watched(write=True)
    blocks = Blocks.make(pool, 8)
    gpu.gate.clear()  # launches stand still
    transfer = engine.gather_write(blocks.plan)
    time.sleep(0.05)
    assert gpu.ended_work == []
    gpu.gate.set()
    transfer.wait(PATIENCE_S)
    assert blocks.stored(pool)


def test_copies_go_on_while_scatters_stand_still(pool: Pool, watched: Callable[..., Any]) -> None:
    engine, gpu = watched(write=False)
    blocks = Blocks.make(pool, 8)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    gpu.ended_work.clear()
    blocks.memory[:] = 0
    gpu.gate.clear()
    transfer = engine.scatter_read(blocks.plan)
    wait_until(lambda: gpu.done("copy") == len(blocks.memory))
    assert gpu.done("launch") == 0
    gpu.gate.set()
    transfer.wait(PATIENCE_S)
    assert blocks.stored(pool)
    assert blocks.memory.any()


def test_nothing_is_scattered_that_is_not_there(pool: Pool, watched: Callable[..., Any]) -> None:
    engine, gpu = watched(write=False)
    blocks = Blocks.make(pool, 8)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    gpu.ended_work.clear()
    gate = gpu.stand_still(gpu.watched)
    transfer = engine.scatter_read(blocks.plan)
    time.sleep(0.05)
    assert gpu.ended_work == []
    gate.set()
    transfer.wait(PATIENCE_S)


@pytest.mark.parametrize("write", [True, False])
def test_a_long_plan_takes_two_buffers_in_turn_and_the_cpu_waits_for_none(
    pool: Pool, watched: Callable[..., Any], write: bool
) -> None:
    engine, gpu = watched(write=write, bounce_size=4 * GROUP)
    blocks = Blocks.make(pool, 8)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    tiles = gpu.done("launch")
    gpu.ended_work.clear()
    allocated = set(engine._buffers._device.sizes)
    if write:
        blocks.memory[:] = np.random.default_rng(9).integers(0, 256, len(blocks.memory), np.uint8)
        gate = gpu.stand_still(gpu.watched)
        transfer = engine.gather_write(blocks.plan)
    else:
        gate = gpu.gate
        gate.clear()
        blocks.memory[:] = 0
        transfer = engine.scatter_read(blocks.plan)
    kind = "launch" if write else "copy"
    wait_until(lambda: len(gpu.ended_work) >= 2)  # what fits into two buffers has gone ahead
    time.sleep(0.05)
    whole = tiles if write else len(blocks.memory)
    assert 0 < gpu.done(kind) <= whole // 3
    taken = [
        size
        for address, size in engine._buffers._device.sizes.items()
        if address not in allocated and size >= GROUP
    ]
    assert len(taken) == 2
    gate.set()
    transfer.wait(PATIENCE_S)
    assert gpu.done("launch") == tiles
    assert blocks.stored(pool)
    assert blocks.memory.any()


def test_a_stream_goes_on_when_its_copies_have_ended(
    pool: Pool, watched: Callable[..., Any]
) -> None:
    """Later work of the caller on the stream runs after the copies."""
    engine, gpu = watched(write=True)
    blocks = Blocks.make(pool, 8)
    blocks.plan = dataclasses.replace(blocks.plan, checksums=None)  # told only after a wait
    stream = gpu.make_stream(urgent=False)
    before = blocks.memory.copy()
    gate = gpu.stand_still(gpu.watched)
    writing = engine.gather_write(blocks.plan, stream=stream)
    gpu._streams[stream].put(lambda: blocks.memory.fill(0))
    reading = engine.scatter_read(blocks.plan, stream=stream)
    time.sleep(0.05)
    gate.set()
    writing.wait(PATIENCE_S)
    reading.wait(PATIENCE_S)
    assert (blocks.memory == before).all()


def test_a_write_has_ended_when_its_checksums_are_there(
    pool: Pool, watched: Callable[..., Any]
) -> None:
    engine, gpu = watched(write=True)
    blocks = Blocks.make(pool, 8)
    gpu.pause_s = 0.05
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert blocks.plan.checksums is not None
    assert blocks.plan.checksums[-1] == coherence.crc32c(blocks.memory[-16384:].tobytes())


def test_long_runs_are_cut_alike_and_short_ones_go_together() -> None:
    size = staged.GROUP_SIZE
    runs = np.array([(0, 0, 5 * size // 2), (10 * size, 5 * size // 2, size // 4)] * 1)
    found = list(staged.groups(runs))
    lengths = [[length for _, _, length in group] for group in found]
    assert lengths == [[5 * size // 4], [5 * size // 4], [size // 4]]
    assert [group[0][:2] for group in found] == [
        (0, 0),
        (5 * size // 4, 5 * size // 4),
        (10 * size, 5 * size // 2),
    ]
    small = np.array([(i << 20, i * 64 << 10, 64 << 10) for i in range(20)])
    assert [len(group) for group in staged.groups(small)] == [16, 4]
