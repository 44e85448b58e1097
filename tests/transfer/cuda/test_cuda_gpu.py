# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine through cupy: streams, graphs and CUDA's errors.

The tests run on a GPU (``scripts/gpu``) or are skipped with the reason. They also run on a stand-in
for cupy, which shows that the calls are right, but nothing about a GPU.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import peek, poke
from support.fake_cupy import FakeCuda

from beluga import IndexServer, KVCache
from beluga.errors import ChecksumError, EngineUnavailableError
from beluga.kvcache import Run
from beluga.pool import Pool
from beluga.transfer import ENGINES, Plan, plan_blocks
from beluga.transfer.cuda import CudaEngine, CupyDriver, DriverError
from beluga.transfer.cuda import driver as source

STRIPE = 2 << 20
FRAGMENT = 20480


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "fake"])
def cupy(request: pytest.FixtureRequest) -> Any:
    if request.param == "fake":
        request.getfixturevalue("fake_cuda")
    try:
        CupyDriver().close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    return pytest.importorskip("cupy")


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=32 * STRIPE, coherence="software") as made:
        yield made


def plan_of(memory: Any, pool: Pool, blocks: int = 4) -> Plan:
    fragments = memory.nbytes // FRAGMENT // blocks
    at = int(memory.data.ptr) + np.arange(blocks * fragments, dtype=np.uint64) * FRAGMENT
    offsets = pool.geometry.data_offset + np.arange(blocks) * fragments * FRAGMENT
    return plan_blocks(
        at.reshape(blocks, fragments),
        np.full(fragments, FRAGMENT),
        offsets.astype(np.uint64),
        chunk_size=16384,
    )


def test_saved_blocks_are_loaded_and_damage_is_detected(cupy: Any, pool: Pool) -> None:
    engine = CudaEngine(pool, window_size=8 * STRIPE)
    assert engine.settle(120)
    assert engine.stat.fault is None, engine.stat.fault
    content = np.random.default_rng(3).integers(0, 256, 4 * 128 * FRAGMENT, np.uint8)
    memory = cupy.asarray(content)
    before, plan = memory.get(), plan_of(memory, pool)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    engine.gather_write(plan, stream=stream).wait(60)
    assert (peek(pool, int(plan.chunks["offset"][0]), len(before)) == before).all()
    memory[:] = 0
    cupy.cuda.runtime.deviceSynchronize()
    engine.scatter_read(plan, stream=stream).wait(60)
    assert (memory.get() == before).all()
    assert engine.stat.bounced_bytes == 0
    offset = int(plan.chunks["offset"][5])
    poke(pool, offset, peek(pool, offset, 1) ^ 1)
    with pytest.raises(ChecksumError):
        engine.scatter_read(plan, stream=stream).wait(60)


def test_a_cache_finds_the_engine_by_its_name(cupy: Any, pool: Pool) -> None:
    assert ENGINES["cuda"].why_none() is None
    memory = cupy.asarray(np.arange(4 * FRAGMENT, dtype=np.uint8))
    before = memory.get()
    fragments = np.full((4, 2), FRAGMENT, np.uint64)
    fragments[:, 0] = int(memory.data.ptr) + np.arange(4) * FRAGMENT
    blocks = Run(2, 2 * FRAGMENT, 2, fragments, [memory])
    digests = [bytes([i]) * 16 for i in range(2)]
    cupy.cuda.runtime.deviceSynchronize()
    with IndexServer(pool), KVCache(pool, namespace="test", host=0, engine="cuda") as cache:
        assert isinstance(cache.engine, CudaEngine)
        assert cache.put(digests, blocks).stored == 2
        memory[:] = 0
        cupy.cuda.runtime.deviceSynchronize()
        assert cache.get(digests, blocks).hits == 2
    assert (memory.get() == before).all()


def test_a_block_that_the_cpu_rewrites_is_never_read_stale(cupy: Any, pool: Pool) -> None:
    """The kernel reads no stale bytes from a cache of the CPU or the GPU."""
    engine = CudaEngine(pool, window_size=8 * STRIPE)
    assert engine.settle(120)
    memory, other = cupy.zeros(128 * FRAGMENT, cupy.uint8), cupy.zeros(1 << 22, cupy.uint8)
    plan = dataclasses.replace(plan_of(memory, pool, 1), checksums=None)
    offset, stream = int(plan.chunks["offset"][0]), cupy.cuda.Stream(non_blocking=True)
    for value in range(1, 100):
        poke(pool, offset, np.full(memory.nbytes, value, np.uint8))
        other[:] = value  # a kernel on another stream
        engine.scatter_read(plan, stream=stream).wait(60)
        assert (memory.get() == value).all()
    engine.close()


def test_a_graph_replays_a_copy(cupy: Any, pool: Pool) -> None:
    engine = CudaEngine(pool, window_size=8 * STRIPE)
    assert engine.settle(120)
    memory = cupy.zeros(4 * 16 * FRAGMENT, cupy.uint8)
    plan, stream = plan_of(memory, pool), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    engine.gather_write(plan, stream=stream).wait(60)
    stream.begin_capture()
    transfer = engine.capture(plan, stream, write=True)
    graph = stream.end_capture()
    for value in (3, 4):
        memory[:] = value
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        transfer.wait()
        assert (peek(pool, int(plan.chunks["offset"][0]), memory.nbytes) == value).all()


def test_a_refused_registration_leaves_no_error_behind(cupy: Any) -> None:
    driver = CupyDriver()
    with pytest.raises(DriverError):
        driver.register(1 << 40, STRIPE)  # unmapped memory
    assert int(cupy.arange(10).sum()) == 45


def test_the_compiled_source_lists_its_includes(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    CupyDriver().close()
    assert not any(
        "default" in option for option in fake_cuda.options
    )  # cupy raises this; one check is enough
    text = source.kernel_text()
    shutil.copytree(source.ROOT / "cuda", tmp_path / "cuda")
    (tmp_path / "cuda" / "crc32c.cuh").write_text("changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "ROOT", tmp_path)
        assert source.kernel_text() != text


def test_the_engine_is_unavailable_if_its_kernels_do_not_compile(fake_cuda: FakeCuda) -> None:
    fake_cuda.compile_error = "kv_copy.cu(1): error: made up\nmore"
    with pytest.raises(EngineUnavailableError, match=r"compiled: kv_copy.cu\(1\): error: made up$"):
        CupyDriver()


@pytest.mark.usefixtures("fake_cuda")
def test_an_old_cupy_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["cupy_backends.cuda.api.runtime"], "streamCreateWithPriority")
    with pytest.raises(EngineUnavailableError, match=r"cupy 14.2.0 is too old.*14 or later$"):
        CupyDriver()


def test_a_capture_of_another_thread_does_not_affect_copies(
    fake_cuda: FakeCuda, pool: Pool
) -> None:
    fake_cuda.capturing_elsewhere = True
    memory = np.arange(4 * 16 * FRAGMENT, dtype=np.uint8)
    at = memory.ctypes.data + np.arange(64, dtype=np.uint64) * FRAGMENT
    plan = plan_blocks(
        at.reshape(1, 64), np.full(64, FRAGMENT), np.array([pool.geometry.data_offset], np.uint64)
    )
    engine = CudaEngine(pool, window_size=8 * STRIPE)
    assert engine.settle(120)
    assert engine.stat.fault is None, engine.stat.fault
    for start in (engine.gather_write, engine.scatter_read):
        start(plan).wait(60)
        start(plan).wait()
    with pytest.raises(RuntimeError):  # like any other user of the GPU
        fake_cuda.runtime.malloc(1)
    assert engine.stat.bounced_bytes == 0
    engine.close()
