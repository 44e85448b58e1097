# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks in the memory of a device: in a GPU's with the CUDA engine; staged in host memory without
NVRTC, on streams that run as late as they may; and in a buffer of torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_vllm import Tensor, layer_major
from scene import LOGGER, LONG_S, Rank, blocks
from support.cuda_gpu import Gpu, enqueue

from beluga import IndexServer, KVCache, Pool
from beluga.connectors.vllm import staging as device
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.staging import BlockSource, StagedSource
from beluga.errors import EngineUnavailableError
from beluga.transfer import CudaEngine

MakeRank = Callable[..., Rank]
LAYERS = 3
GPU_SHAPE = LAYERS, 40, 2048
IDS = list(range(5, 30))
STAGED = [7, 2, 5]
BLOCK_RANGE = blocks("r", IDS, start=1)


ENGINE_STREAM = 0  # the engine computes on this stream, which every driver has


# ---- The CUDA engine, with host-compiled kernels in place of the GPU.


class GpuMachine:
    """A machine where vLLM's tensors are CUDA tensors of the second GPU, a stand-in. A thread that
    has not made it current would use another one.
    """

    def __init__(self) -> None:
        self.gpu = Gpu(self._register)
        self.opened = 0
        self.engines: list[CudaEngine] = []
        self.before_register: Callable[[int], None] = lambda _: None
        self.registered: list[int] = []  # sizes

    def open(self, index: int) -> Gpu:
        assert index == 1
        self.opened += 1
        return self.gpu

    def _register(self, size: int) -> None:
        self.before_register(size)
        self.registered.append(size)

    def engine(self, pool: Any, *options: Any) -> CudaEngine:
        self.engines.append(CudaEngine(pool, *options, window_size=16 << 20))
        return self.engines[-1]


@pytest.fixture
def machine(compiled: None, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    machine = GpuMachine()
    monkeypatch.setattr(device, "CudaDevice", machine.open)
    monkeypatch.setattr(device, "CudaEngine", machine.engine)
    monkeypatch.setattr(device, "engine_stream", lambda _: ENGINE_STREAM)
    return machine


@pytest.fixture
def make_gpu(machine: GpuMachine, server: IndexServer, make_rank: MakeRank) -> MakeRank:
    return functools.partial(
        make_rank, shape=GPU_SHAPE, device=SimpleNamespace(type="cuda", index=1), load="sync"
    )


def saved(rank: Rank, ids: list[int] = IDS) -> None:
    rank.save("r", ids, start=1)


def loaded(rank: Rank, ids: list[int] = IDS) -> None:
    rank.load(blocks("s", ids, start=1))
    rank.loaded("s")


@pytest.mark.parametrize("load", ["sync", "async"])
def test_blocks_are_saved_and_loaded_between_a_gpu_and_other_engines(
    make_gpu: MakeRank, make_rank: MakeRank, machine: GpuMachine, load: str
) -> None:
    gpu, cpu = make_gpu(load=load), make_rank(shape=GPU_SHAPE)
    gpu.fill(1)
    saved(gpu)
    loaded(cpu)
    assert np.array_equal(cpu.memory[:, IDS], gpu.memory[:, IDS])
    before = gpu.memory.copy()
    gpu.memory[...] = 0
    loaded(gpu)
    assert np.array_equal(gpu.memory[:, IDS], before[:, IDS])
    assert not np.delete(gpu.memory, IDS, axis=1).any()
    stats = [engine.stat for engine in machine.engines]
    moved = [stat.direct_bytes + stat.bounced_bytes for stat in stats]
    assert moved == [len(IDS) * gpu.layout.block_size] * 2  # one engine saves and one loads
    assert machine.opened == len(machine.engines)
    assert all(engine.stat.launch_count > 0 for engine in machine.engines)
    assert all(engine.settle(LONG_S) for engine in machine.engines)
    assert [engine.stat.registered_bytes for engine in machine.engines] == [
        sum(machine.registered)  # each window is registered once for both
    ] * 2
    assert machine.registered


def test_a_save_waits_for_the_step_that_computes_the_blocks(
    make_gpu: MakeRank, machine: GpuMachine
) -> None:
    gpu = make_gpu()
    gate, ended = threading.Event(), threading.Event()

    def compute() -> None:
        gate.wait(LONG_S)
        gpu.fill(2)
        ended.set()

    enqueue(machine.gpu, ENGINE_STREAM, compute)
    gpu.begin_save(BLOCK_RANGE)
    time.sleep(0.1)
    gate.set()
    gpu.saved()
    assert ended.wait(LONG_S)
    computed = gpu.memory[:, IDS].copy()
    gpu.memory[...] = 0
    loaded(gpu)
    assert np.array_equal(gpu.memory[:, IDS], computed)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_load_waits_for_kernels_that_use_the_blocks(
    make_gpu: MakeRank, machine: GpuMachine, load: str
) -> None:
    gpu = make_gpu(load=load)
    gpu.fill(3)
    saved(gpu)
    before = gpu.memory[:, IDS].copy()
    gate, ended = threading.Event(), threading.Event()

    def compute() -> None:
        gate.wait(LONG_S)
        gpu.memory[...] = 7
        ended.set()

    enqueue(machine.gpu, ENGINE_STREAM, compute)
    threading.Timer(0.1, gate.set).start()
    loaded(gpu)
    assert ended.wait(LONG_S)
    assert np.array_equal(gpu.memory[:, IDS], before)


def test_no_request_waits_for_a_registration(make_gpu: MakeRank, machine: GpuMachine) -> None:
    let = threading.Event()
    machine.before_register = lambda _: let.wait(LONG_S) and None
    gpu = make_gpu()
    gpu.fill(4)
    saved(gpu)
    before = gpu.memory.copy()
    gpu.memory[...] = 0
    loaded(gpu)
    assert np.array_equal(gpu.memory[:, IDS], before[:, IDS])
    assert [engine.stat.bounced_bytes for engine in machine.engines] == [
        len(IDS) * gpu.layout.block_size
    ] * 2
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


def test_without_nvrtc_blocks_are_staged_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "CudaDevice", missing)
    monkeypatch.setattr(device, "StagedSource", lambda _, own_stream: ("staged", own_stream))
    tensor = Tensor(np.zeros((4, 64), np.uint16))
    tensor.device = SimpleNamespace(type="cuda", index=0)
    layout = GroupLayout({"layer.0": tensor}, block_count=4, page_sizes={})
    logger = logging.getLogger("beluga.test")
    source: Any = device.source_of(layout, urgent=True, own_stream=False, logger=logger)
    assert source == ("staged", False)
    assert "staged in host memory: the CUDA engine needs NVRTC" in caplog.text


# ---- A buffer of torch.

ARRANGEMENTS = {  # by name: the shape, the axis of blocks and that of layers
    "layer-major": ((LAYERS, 9, 2, 16, 32), 1, 0),
    "packed": ((9, LAYERS, 2, 16, 32), 0, 1),
    "keys apart": ((LAYERS, 2, 9, 16, 32), 2, 0),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_buffer_holds_the_same_bytes(name: str, pool: Pool, server: IndexServer) -> None:
    """A block is stored through a buffer and loaded without one, and vice versa."""
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    shape, axis, layers = ARRANGEMENTS[name]
    memory = torch.randn(shape).to(torch.bfloat16)
    tensors = {f"layer.{number}": memory.select(layers, number) for number in range(LAYERS)}
    layout = GroupLayout(tensors, block_count=9, page_sizes={})
    staged, direct = StagedSource(layout, own_stream=True), BlockSource(layout)
    ids, others = torch.tensor([8, 1, 5, 2]), torch.tensor([0, 3, 4, 6, 7])
    keys = [bytes([i]) * 32 for i in range(4)]
    with KVCache(pool, namespace="a") as first, KVCache(pool, namespace="b") as second:
        assert first.put(keys, staged.read(ids.tolist())).stored == 4
        assert second.put(keys, direct.read(ids.tolist())).stored == 4
        wanted = memory.clone()
        for cache, source in ((first, direct), (second, staged)):
            memory.zero_()
            with source.write(ids.tolist()) as run:
                assert cache.get(keys, run).hits == 4
            assert torch.equal(wanted.index_select(axis, ids), memory.index_select(axis, ids))
            assert not memory.index_select(axis, others).any()


def test_a_cpu_needs_no_buffer() -> None:
    tensors, _ = layer_major(LAYERS, 9, 64)
    layout = GroupLayout(tensors, block_count=9, page_sizes={})
    source = device.source_of(layout, urgent=True, own_stream=True, logger=LOGGER)
    assert type(source) is BlockSource
    assert source.read([1, 2]).fragment_count == LAYERS
    assert np.array_equal(
        source.read([0]).fragments[:, 0], [tensor.data_ptr() for tensor in tensors.values()]
    )


class Stream:
    """A queue of operations, which run when a caller waits for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._lock = machine, threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._before: list[Stream] = []
        self.put_count = self._done_count = 0

    def put(self, operation: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(operation)
            self.put_count += 1

    def run_until(self, count: int) -> None:
        with self._lock:
            while self._done_count < count:
                self._waiting.popleft()()
                self._done_count += 1

    def wait_event(self, event: Event) -> None:
        self.put(event.wait)

    def synchronize(self) -> None:
        self.run_until(self.put_count)

    def __enter__(self) -> None:
        self._before.append(self._machine.current)
        self._machine.local.stream = self

    def __exit__(self, *_: object) -> None:
        self._machine.local.stream = self._before.pop()


class Event:
    """A point that the current stream must reach."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def record(self) -> None:
        self._stream = self._machine.current
        self._count = self._stream.put_count

    def wait(self) -> None:
        self._stream.run_until(self._count)


class Bytes:
    """A tensor of bytes. Its changes are put on the current stream."""

    def __init__(self, machine: Machine, array: Any) -> None:
        self._machine, self.array = machine, array
        self.shape = array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, key: Any) -> Bytes:
        return Bytes(self._machine, self.array[key])

    def view(self, *shape: int) -> Bytes:
        return Bytes(self._machine, self.array.reshape(shape))

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def set_(self, storage: Any) -> Bytes:
        return Bytes(self._machine, storage.array.reshape(-1).view(np.uint8))

    def as_strided(self, shape: Any, strides: Any, offset: int) -> Bytes:
        strided = np.lib.stride_tricks.as_strided(self.array[offset:], shape, strides)
        return Bytes(self._machine, strided)

    def index_select(self, axis: int, ids: Bytes) -> Bytes:
        assert axis == 0
        selected = np.empty((len(ids), *self.shape[1:]), np.uint8)
        self._machine.current.put(lambda: np.copyto(selected, self.array[ids.array]))
        return Bytes(self._machine, selected)

    def index_copy_(self, axis: int, ids: Bytes, source: Bytes) -> None:
        assert axis == 0
        self._machine.current.put(lambda: self.array.__setitem__(ids.array, source.array))

    def copy_(self, source: Bytes, *, non_blocking: bool) -> None:
        assert non_blocking
        self._machine.current.put(lambda: np.copyto(self.array, source.array))

    def to(self, _device: Any, *, non_blocking: bool) -> Bytes:
        assert non_blocking
        copied = Bytes(self._machine, np.empty(self.shape, np.uint8))
        copied.copy_(self, non_blocking=True)
        return copied


class Machine:
    """An accelerator with one stream on which the engine computes, and more on demand."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.engine = Stream(self)

    @property
    def current(self) -> Stream:
        return getattr(self.local, "stream", self.engine)

    def module(self) -> Any:
        """Make the module that replaces ``torch``."""
        torch = types.ModuleType("torch")
        vars(torch).update(
            uint8=np.uint8,
            Stream=lambda _device: Stream(self),
            Event=lambda _device: Event(self),
            empty=lambda shape, **_: Bytes(self, np.zeros(shape, np.uint8)),
            as_tensor=lambda ids, **_: Bytes(self, np.array(ids)),
            accelerator=types.SimpleNamespace(current_stream=lambda _: self.current),
        )
        return torch


class Staged(Rank):
    """A worker whose blocks are on an accelerator that only torch can reach."""

    def __init__(self, pool_name: str, machine: Machine, how: str) -> None:
        cuda = SimpleNamespace(type="cuda", index=0)
        super().__init__(pool_name, shape=(LAYERS, 12, 256), device=cuda, load=how)
        self._stream = machine.engine

    def compute(self, value: int) -> None:
        """Queue a write of every block on the engine's stream."""
        self._stream.put(lambda: self.memory.fill(value))

    def computed(self) -> Any:
        """Return the bytes after everything on the engine's stream."""
        self._stream.synchronize()
        return self.memory[:, STAGED]


def missing(_: int) -> None:
    raise EngineUnavailableError("the CUDA engine needs NVRTC: made up")


@pytest.fixture(params=["sync", "async"])
def staged(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    server: IndexServer,
    pool_name: str,
) -> Iterator[Staged]:
    machine = Machine()
    monkeypatch.setitem(sys.modules, "torch", machine.module())
    monkeypatch.setattr(device, "CudaDevice", missing)
    with contextlib.closing(Staged(pool_name, machine, request.param)) as staged:
        yield staged


def test_a_load_waits_for_the_engines_work_on_the_blocks(staged: Staged) -> None:
    staged.compute(3)
    saved(staged, STAGED)
    staged.compute(7)  # a running step uses blocks that are given to another request
    loaded(staged, STAGED)
    assert (staged.computed() == 3).all()


def test_a_step_after_a_load_overwrites_its_bytes(staged: Staged) -> None:
    staged.compute(3)
    saved(staged, STAGED)
    loaded(staged, STAGED)
    staged.compute(9)
    assert (staged.computed() == 9).all()


def test_a_save_reads_the_results_of_the_previous_step_only(staged: Staged) -> None:
    staged.compute(4)
    saved(staged, STAGED)
    staged.compute(8)
    assert (staged.computed() == 8).all()
    loaded(staged, STAGED)
    assert np.array_equal(staged.computed(), np.full((LAYERS, len(STAGED), 256), 4))


def test_a_buffer_serves_batches_of_any_size_one_after_the_other(staged: Staged) -> None:
    staged.memory[:] = np.arange(12, dtype=np.uint16)[None, :, None]
    wanted = staged.memory.copy()
    for ids in ([1], [2, 3, 4, 5], [6, 7], [8, 9, 10, 11]):
        staged.save(str(ids), ids, start=100 + ids[0])
        staged.memory[:, ids] = 99
        staged.load(blocks(str(ids), ids, start=100 + ids[0]))
        staged.loaded(str(ids))
    assert np.array_equal(staged.memory[:, 1:], wanted[:, 1:])
    assert not staged.memory[:, 0].any()
