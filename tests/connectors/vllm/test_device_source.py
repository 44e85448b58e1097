# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks in a GPU's memory with the CUDA engine, with host-compiled kernels in place of the GPU."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from beluga_bench.gpu.host_driver import HostDriver
from vllm_parts import Tensor, layer_major

from beluga import IndexServer, Namespace
from beluga.connectors.vllm import staging as device
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.steps import BlockRange, Orders
from beluga.connectors.vllm.worker import RankWorker
from beluga.errors import EngineUnavailableError
from beluga.transfer import CudaEngine

BLOCKS, LAYERS, ITEMS = 40, 3, 2048
LONG_S = 60.0
ENGINE_STREAM = 0  # the engine computes on this stream, which every driver has
IDS = list(range(5, 30))
DIGESTS = b"".join(bytes([i + 1]) * 32 for i in range(len(IDS)))


class SecondGpu(HostDriver):
    """The driver of another GPU than the first: a thread that has not made it current would use the
    first GPU.
    """

    def __init__(self, before_register: Callable[[int], None]) -> None:
        self._threads = threading.local()
        super().__init__(before_register=before_register)
        self.use()

    def use(self) -> None:
        self._threads.current = True

    def _check(self) -> None:
        assert getattr(self._threads, "current", False), threading.current_thread().name

    def make_event(self) -> int:
        self._check()
        return super().make_event()

    def record(self, event: int, stream: int) -> None:
        self._check()
        super().record(event, stream)

    def follow(self, stream: int, event: int) -> None:
        self._check()
        super().follow(stream, event)

    def launch(self, kernel: str, grid: Any, job: Any, stream: int) -> None:
        self._check()
        super().launch(kernel, grid, job, stream)


class Machine:
    """A machine where vLLM's tensors are CUDA tensors, and a driver's calls run the host's
    kernels.
    """

    def __init__(self) -> None:
        self.drivers: list[HostDriver] = []
        self.engines: list[CudaEngine] = []
        self.before_register: Callable[[int], None] = lambda _: None
        self.registered: list[int] = []  # sizes

    def driver(self, index: int) -> HostDriver:
        assert index == 1
        self.drivers.append(SecondGpu(self._register))
        return self.drivers[-1]

    def _register(self, size: int) -> None:
        self.before_register(size)
        self.registered.append(size)

    def engine(self, pool: Any, **options: Any) -> CudaEngine:
        self.engines.append(CudaEngine(pool, window_size=16 << 20, **options))
        return self.engines[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    try:
        HostDriver().close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    machine = Machine()
    monkeypatch.setattr(device, "CupyDriver", machine.driver)
    monkeypatch.setattr(device, "CudaEngine", machine.engine)
    monkeypatch.setattr(device, "engine_stream", lambda _: ENGINE_STREAM)
    return machine


class Side:
    """A worker over three layers, on a GPU or not."""

    def __init__(self, pool_name: str, *, gpu: bool, load: str = "sync") -> None:
        tensors, self.memory = layer_major(LAYERS, BLOCKS, ITEMS)
        for tensor in tensors.values() if gpu else ():
            tensor.device = SimpleNamespace(type="cuda", index=1)
        layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
        self.size = layout.block_size
        settings = VllmSettings(pool=pool_name, timeout_ms=5000, retry_s=0.05, load=load)
        logger = logging.getLogger("test")
        self.worker = RankWorker(settings, layout, Namespace.of("gpu"), ConnectorCounters(), logger)
        assert self.worker.load_connection.wait(LONG_S)
        assert self.worker.save_connection.wait(LONG_S)

    def fill(self, seed: int) -> None:
        shape = self.memory.shape
        self.memory[...] = np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)

    def save(self) -> None:
        self.worker.save(Orders(saves=[BlockRange("r", DIGESTS, IDS)]))

    def saved(self) -> None:
        _wait_until(lambda: "r" in self.worker.saves.ended({"r"}))

    def load(self) -> None:
        self.worker.load(Orders(loads=[BlockRange("s", DIGESTS, IDS)]))

    def loaded(self) -> None:
        _wait_until(lambda: "s" in self.worker.loads.loaded())
        assert self.worker.loads.failed() == set()

    def blocks(self) -> Any:
        return self.memory[:, IDS]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def make_side(
    machine: Machine, server: IndexServer, pool_name: str
) -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(**options: Any) -> Side:
        made.append(Side(pool_name, **options))
        return made[-1]

    yield make
    for side in made:
        side.worker.close()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_blocks_are_saved_and_loaded_between_a_gpu_and_other_engines(
    make_side: Callable[..., Side], machine: Machine, load: str
) -> None:
    gpu, cpu = make_side(gpu=True, load=load), make_side(gpu=False)
    gpu.fill(1)
    gpu.save()
    gpu.saved()
    cpu.load()
    cpu.loaded()
    assert np.array_equal(cpu.blocks(), gpu.blocks())
    before = gpu.memory.copy()
    gpu.memory[...] = 0
    gpu.load()
    gpu.loaded()
    assert np.array_equal(gpu.blocks(), before[:, IDS])
    assert not np.delete(gpu.memory, IDS, axis=1).any()
    stats = [engine.stat for engine in machine.engines]
    moved = [stat.direct_bytes + stat.bounced_bytes for stat in stats]
    assert moved == [len(IDS) * gpu.size] * 2  # one engine saves and one loads
    assert [len(driver.launches) > 0 for driver in machine.drivers] == [True, True]
    assert all(engine.settle(LONG_S) for engine in machine.engines)
    assert [engine.stat.registered_bytes for engine in machine.engines] == [
        sum(machine.registered)  # each window is registered once for both
    ] * 2
    assert machine.registered


def test_a_save_waits_for_the_step_that_computes_the_blocks(
    make_side: Callable[..., Side], machine: Machine
) -> None:
    gpu = make_side(gpu=True)
    gate, ended = threading.Event(), threading.Event()
    _, saving = machine.drivers

    def compute() -> None:
        gate.wait(LONG_S)
        gpu.fill(2)
        ended.set()

    saving._streams[ENGINE_STREAM].put(compute)
    gpu.save()
    time.sleep(0.1)
    gate.set()
    gpu.saved()
    assert ended.wait(LONG_S)
    computed = gpu.blocks().copy()
    gpu.memory[...] = 0
    gpu.load()
    gpu.loaded()
    assert np.array_equal(gpu.blocks(), computed)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_load_waits_for_kernels_that_use_the_blocks(
    make_side: Callable[..., Side], machine: Machine, load: str
) -> None:
    gpu = make_side(gpu=True, load=load)
    gpu.fill(3)
    gpu.save()
    gpu.saved()
    before = gpu.blocks().copy()
    gate, ended = threading.Event(), threading.Event()
    loading, _ = machine.drivers

    def compute() -> None:
        gate.wait(LONG_S)
        gpu.memory[...] = 7
        ended.set()

    loading._streams[ENGINE_STREAM].put(compute)
    threading.Timer(0.1, gate.set).start()
    gpu.load()
    gpu.loaded()
    assert ended.wait(LONG_S)
    assert np.array_equal(gpu.blocks(), before)


def test_no_request_waits_for_a_registration(
    make_side: Callable[..., Side], machine: Machine
) -> None:
    let = threading.Event()
    machine.before_register = lambda _: let.wait(LONG_S) and None
    gpu = make_side(gpu=True)
    gpu.fill(4)
    gpu.save()
    gpu.saved()
    before = gpu.memory.copy()
    gpu.memory[...] = 0
    gpu.load()
    gpu.loaded()
    assert np.array_equal(gpu.blocks(), before[:, IDS])
    assert [engine.stat.bounced_bytes for engine in machine.engines] == [len(IDS) * gpu.size] * 2
    let.set()


def test_the_engines_stream_is_torchs_current_one_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = ModuleType("torch.cuda")
    streams = {"cuda:0": 7, "cuda:1": 9}
    vars(cuda)["current_stream"] = lambda device: SimpleNamespace(cuda_stream=streams[device])
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    assert [device.engine_stream(name) for name in streams] == [7, 9]


def test_without_cupy_blocks_are_staged_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(_: int) -> None:
        raise EngineUnavailableError("the CUDA engine needs cupy: made up")

    monkeypatch.setattr(device, "CupyDriver", missing)
    monkeypatch.setattr(device, "StagedSource", lambda _, own_stream: ("staged", own_stream))
    tensor = Tensor(np.zeros((4, 64), np.uint16))
    tensor.device = SimpleNamespace(type="cuda", index=0)
    layout = GroupLayout({"layer.0": tensor}, block_count=4, page_sizes={})
    logger = logging.getLogger("beluga.test")
    source: Any = device.source_of(layout, urgent=True, own_stream=False, logger=logger)
    assert source == ("staged", False)
    assert "staged in host memory: the CUDA engine needs cupy" in caplog.text
