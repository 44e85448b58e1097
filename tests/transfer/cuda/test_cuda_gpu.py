# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine on a GPU (``scripts/gpu``) and on the stand-in: caches, staleness, kernels.

On the stand-in these tests show that the calls are right, but nothing about a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from beluga_bench.gpu.stub import StandIn, library
from support.cuda_gpu import Gpu
from support.engines import GpuMemory, peek, poke

from beluga import IndexServer, KVCache
from beluga.errors import ChecksumError, EngineUnavailableError
from beluga.kvcache import Run
from beluga.pool import Pool
from beluga.transfer import ENGINES, Plan, plan_blocks
from beluga.transfer.cuda import CudaDevice, CudaEngine, DriverError, device
from beluga.transfer.cuda import nvrtc as compiler

STRIPE = 2 << 20
FRAGMENT = 20480


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "stand-in"])
def gpu(request: pytest.FixtureRequest) -> CudaDevice:
    try:
        return CudaDevice() if request.param == "gpu" else StandIn()
    except EngineUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=32 * STRIPE, coherence="software") as made:
        yield made


def plan_of(memory: GpuMemory, pool: Pool, fragments: int, blocks: int = 4) -> Plan:
    at = memory.address + np.arange(blocks * fragments, dtype=np.uint64) * FRAGMENT
    offsets = pool.geometry.data_offset + np.arange(blocks) * fragments * FRAGMENT
    return plan_blocks(
        at.reshape(blocks, fragments),
        np.full(fragments, FRAGMENT),
        offsets.astype(np.uint64),
        chunk_size=16384,
    )


def test_saved_blocks_are_loaded_and_damage_is_detected(gpu: CudaDevice, pool: Pool) -> None:
    engine = CudaEngine(pool, gpu, window_size=8 * STRIPE)
    assert engine.settle(120)
    assert engine.stat.fault is None, engine.stat.fault
    before = np.random.default_rng(3).integers(0, 256, 4 * 128 * FRAGMENT, np.uint8)
    memory = GpuMemory(before, gpu)
    plan, stream = plan_of(memory, pool, 128), gpu.make_stream(urgent=False)
    engine.gather_write(plan, stream=stream).wait(60)
    assert (peek(pool, int(plan.chunks["offset"][0]), len(before)) == before).all()
    memory.fill(np.zeros_like(before))
    engine.scatter_read(plan, stream=stream).wait(60)
    assert (memory.content() == before).all()
    assert engine.stat.bounced_bytes == 0
    offset = int(plan.chunks["offset"][5])
    poke(pool, offset, peek(pool, offset, 1) ^ 1)
    with pytest.raises(ChecksumError):
        engine.scatter_read(plan, stream=stream).wait(60)


@pytest.mark.gpu
def test_a_cache_finds_the_engine_by_its_name(pool: Pool) -> None:
    if (missing := ENGINES["cuda"].why_none()) is not None:
        pytest.skip(missing)
    before = np.arange(4 * FRAGMENT, dtype=np.uint8)
    memory = GpuMemory(before)
    fragments = np.full((4, 2), FRAGMENT, np.uint64)
    fragments[:, 0] = memory.address + np.arange(4) * FRAGMENT
    blocks = Run(2, 2 * FRAGMENT, 2, fragments, [memory])
    digests = [bytes([i]) * 16 for i in range(2)]
    with IndexServer(pool), KVCache(pool, namespace="test", host=0, engine="cuda") as cache:
        assert isinstance(cache.engine, CudaEngine)
        assert cache.put(digests, blocks).stored == 2
        memory.fill(np.zeros_like(before))
        assert cache.get(digests, blocks).hits == 2
    assert (memory.content() == before).all()


def test_a_block_that_the_cpu_rewrites_is_never_read_stale(gpu: CudaDevice, pool: Pool) -> None:
    """The kernel reads no stale bytes from a cache of the CPU or the GPU."""
    engine = CudaEngine(pool, gpu, window_size=8 * STRIPE)
    assert engine.settle(120)
    size = 128 * FRAGMENT
    memory, other = (GpuMemory(np.zeros(size, np.uint8), gpu) for _ in range(2))
    plan = dataclasses.replace(plan_of(memory, pool, 128, 1), checksums=None)
    offset, stream = int(plan.chunks["offset"][0]), gpu.make_stream(urgent=False)
    for value in range(1, 100):
        poke(pool, offset, np.full(size, value, np.uint8))
        other.fill(np.full(size, value, np.uint8))  # on another stream
        engine.scatter_read(plan, stream=stream).wait(60)
        assert (memory.content() == value).all()
    engine.close()


def test_a_refused_registration_leaves_no_error_behind(gpu: CudaDevice) -> None:
    with pytest.raises(DriverError):
        gpu.register(1 << 40, STRIPE)  # unmapped memory
    content = np.arange(100, dtype=np.uint8)
    assert (GpuMemory(content, gpu).content() == content).all()


def test_the_digest_covers_the_included_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiler.digest()
    shutil.copytree(compiler.ROOT, tmp_path / "csrc")
    monkeypatch.setattr(compiler, "ROOT", tmp_path / "csrc")
    assert compiler.digest() == before
    for name in ("cuda/crc32c.cuh", "api/transfer.h", "cuda/nvrtc/stdint.h"):
        (tmp_path / "csrc" / name).write_text("changed")
        assert compiler.digest() != before
        before = compiler.digest()


@pytest.fixture
def cache(compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of compiled kernels."""
    library()  # which is kept in the user's
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "beluga"


def failing(text: str) -> Callable[[], None]:
    """Let the compiler fail. Return the function that ends this."""
    library().stub_compile_error(text.encode())
    return lambda: library().stub_compile_error(b"")


def test_kernels_are_compiled_once_for_a_gpu(cache: Path) -> None:
    StandIn()
    (kept,) = cache.glob("kernels-sm_90-*.cubin")
    end = failing("kv_copy.cu(1): error: made up\nmore")
    try:
        StandIn()  # from the cache
        kept.write_bytes(b"damaged")
        with pytest.raises(
            EngineUnavailableError,
            match=r"for sm_90 by NVRTC 0.1: kv_copy.cu\(1\): error: made up$",
        ):
            StandIn()
    finally:
        end()
    StandIn()
    assert kept.read_bytes() != b"damaged"


def test_a_cache_folder_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.joinpath("beluga").write_text("no folder")
    StandIn()


@pytest.mark.usefixtures("compiled")
def test_the_missing_part_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = library()._name
    with pytest.raises(EngineUnavailableError, match=r"no GPU 60000 here; there are \d+$"):
        CudaDevice(60000, library=path)
    with pytest.raises(EngineUnavailableError, match=r"needs NVIDIA's driver: .*nothing.so"):
        CudaDevice(library="/nothing.so")
    with pytest.raises(EngineUnavailableError, match=r"needs NVIDIA's driver: .* has no cuInit"):
        CudaDevice(library="libm.so.6")
    index = library().stub_device()
    with pytest.raises(EngineUnavailableError, match=r"needs NVRTC; pip install 'beluga-kv\[cuda"):
        CudaDevice(index, library=path, nvrtc="/nothing.so")
    monkeypatch.setattr(device, "_LIBRARY", path)
    monkeypatch.setattr(compiler, "installed", lambda: iter([str(tmp_path)]))
    monkeypatch.setattr(compiler, "_SONAMES", ())
    assert device.why_no_cuda() is None
    monkeypatch.setattr(compiler, "installed", lambda: iter([]))
    assert device.why_no_cuda() == compiler.MISSING


def test_a_capture_of_another_thread_does_not_affect_copies(compiled: None, pool: Pool) -> None:
    gpu = Gpu()
    gpu.library.stub_capture_elsewhere(gpu.index, 1)
    memory = np.arange(4 * 16 * FRAGMENT, dtype=np.uint8)
    at = memory.ctypes.data + np.arange(64, dtype=np.uint64) * FRAGMENT
    plan = plan_blocks(
        at.reshape(1, 64), np.full(64, FRAGMENT), np.array([pool.geometry.data_offset], np.uint64)
    )
    engine = CudaEngine(pool, gpu, window_size=8 * STRIPE)
    assert engine.settle(120)
    assert engine.stat.fault is None, engine.stat.fault
    for start in (engine.gather_write, engine.scatter_read):
        start(plan).wait(60)
        start(plan).wait()
    gpu.library.cuCtxPushCurrent_v2(ctypes.c_uint64(gpu.index + 1))
    address = ctypes.c_uint64()
    assert gpu.library.cuMemAlloc_v2(ctypes.byref(address), 1) == 900  # like any other user
    gpu.library.cuCtxPopCurrent_v2(ctypes.byref(address))
    assert engine.stat.bounced_bytes == 0
    engine.close()


def test_the_context_of_a_thread_is_restored(compiled: None, pool: Pool) -> None:
    first, second = StandIn(), StandIn()
    stack = first.library.cuCtxPushCurrent_v2, first.library.cuCtxPopCurrent_v2
    stack[0](ctypes.c_uint64(first.index + 1))
    second.free_event(second.make_event())
    engine = CudaEngine(pool, second, window_size=8 * STRIPE)
    memory = np.zeros(FRAGMENT, np.uint8)
    plan = plan_blocks(
        np.array([[memory.ctypes.data]], np.uint64),
        np.array([FRAGMENT]),
        np.array([pool.geometry.data_offset], np.uint64),
    )
    engine.gather_write(plan).wait(60)
    current = ctypes.c_uint64()
    assert stack[1](ctypes.byref(current)) == 0
    assert current.value == first.index + 1
    assert stack[1](ctypes.byref(current)) != 0
