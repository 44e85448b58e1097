# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine with PyTorch on a GPU (``scripts/gpu``): its streams, memory and graphs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engines import peek, poke

from beluga import IndexServer, KVCache
from beluga.errors import ChecksumError, EngineUnavailableError
from beluga.kvcache import Run
from beluga.pool import Pool
from beluga.threads import Thread
from beluga.transfer import CudaDevice, CudaEngine, Plan, plan_blocks

STRIPE = 2 << 20
FRAGMENT, FRAGMENTS, BLOCKS = 20480, 32, 4

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch() -> Any:
    try:
        CudaDevice()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("torch has no GPU")
    return found


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=32 * STRIPE, coherence="software") as made:
        yield made


@pytest.fixture
def engine(pool: Pool) -> Iterator[CudaEngine]:
    made = CudaEngine(pool, window_size=8 * STRIPE)
    assert made.settle(120)
    yield made
    made.close()


def fragments_of(memory: Any) -> NDArray[np.uint64]:
    """Return the addresses of the fragments: each block has one in each layer."""
    start = np.uint64(memory.data_ptr())
    layers = start + np.arange(FRAGMENTS, dtype=np.uint64) * np.uint64(BLOCKS * FRAGMENT)
    found: NDArray[np.uint64] = (
        layers[None, :] + (np.arange(BLOCKS, dtype=np.uint64) * np.uint64(FRAGMENT))[:, None]
    )
    return found


def plan_of(memory: Any, pool: Pool) -> Plan:
    offsets = pool.geometry.data_offset + np.arange(BLOCKS) * FRAGMENTS * FRAGMENT
    return plan_blocks(
        fragments_of(memory),
        np.full(FRAGMENTS, FRAGMENT),
        offsets.astype(np.uint64),
        chunk_size=16384,
    )


def in_the_pool(memory: Any, pool: Pool) -> bool:
    """Return whether the pool has the blocks of the memory."""
    by_block = memory.cpu().numpy().reshape(FRAGMENTS, BLOCKS, FRAGMENT).transpose(1, 0, 2)
    return bool((peek(pool, pool.geometry.data_offset, by_block.size) == by_block.ravel()).all())


def made(torch: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    size = FRAGMENTS * BLOCKS * FRAGMENT
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def test_a_copy_follows_the_kernels_on_its_stream(
    torch: Any, pool: Pool, engine: CudaEngine
) -> None:
    memory, factor = made(torch, 1), torch.randn(4096, 4096, device="cuda")
    plan = plan_of(memory, pool)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            factor = factor @ factor.T / 4096
        memory.add_(1)
        written = engine.gather_write(plan, stream=stream)
        memory.zero_()  # after the copy
    written.wait(60)
    torch.cuda.synchronize()
    assert in_the_pool(made(torch, 1).add_(1), pool)
    with torch.cuda.stream(stream):
        read = engine.scatter_read(plan, stream=stream)
        memory.add_(1)
    read.wait(60)
    torch.cuda.synchronize()
    assert torch.equal(memory, made(torch, 1).add_(2))


def test_tensors_of_a_gpu_go_through_a_cache(torch: Any, pool: Pool) -> None:
    memory = made(torch, 2)
    fragments = np.full((BLOCKS * FRAGMENTS, 2), FRAGMENT, np.uint64)
    fragments[:, 0] = fragments_of(memory).ravel()
    blocks = Run(BLOCKS, FRAGMENTS * FRAGMENT, FRAGMENTS, fragments, [memory])
    names = [bytes([i]) * 16 for i in range(BLOCKS)]
    torch.cuda.synchronize()
    with IndexServer(pool), KVCache(pool, namespace="test", engine="cuda") as cache:
        assert cache.put(names, blocks).stored == BLOCKS
        memory.zero_()
        torch.cuda.synchronize()
        assert cache.get(names, blocks).hits == BLOCKS
    assert torch.equal(memory, made(torch, 2))


def test_a_graph_replays_writes_and_reads(torch: Any, pool: Pool, engine: CudaEngine) -> None:
    memory, target = torch.zeros_like(made(torch, 3)), torch.zeros_like(made(torch, 3))
    out, back = plan_of(memory, pool), plan_of(target, pool)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    engine.gather_write(out, stream=stream).wait(60)
    assert out.checksums is not None
    assert back.checksums is not None
    back.checksums[:] = out.checksums
    engine.scatter_read(back, stream=stream).wait(60)
    writing, reading = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(writing, stream=stream):
        memory.add_(1)
        written = engine.capture(out, torch.cuda.current_stream(), write=True)
    with torch.cuda.graph(reading, stream=stream):
        read = engine.capture(back, torch.cuda.current_stream(), write=False)
        target.add_(1)
    for turn in range(3):
        writing.replay()
        torch.cuda.synchronize()
        written.wait()
        assert in_the_pool(memory, pool)
        back.checksums[:] = out.checksums
        read.prepare()
        reading.replay()
        torch.cuda.synchronize()
        read.wait()
        assert torch.equal(target, memory + 1), turn
    offset = int(out.chunks["offset"][5])
    poke(pool, offset, peek(pool, offset, 1) ^ 1)
    read.prepare()
    reading.replay()
    torch.cuda.synchronize()
    with pytest.raises(ChecksumError):
        read.wait()


def test_copies_and_a_capture_of_another_thread_do_not_disturb_each_other(
    torch: Any, pool: Pool
) -> None:
    """PyTorch captures in the global mode, in which CUDA rejects calls of other threads."""
    memory, result = made(torch, 4), torch.zeros(1 << 20, device="cuda")
    plan = plan_of(memory, pool)
    torch.cuda.synchronize()
    graph, captures, copied = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    errors: list[Exception] = []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph):
                captures.set()
                for _ in range(100):
                    result.add_(1)
                copied.wait(60)
        except Exception as error:
            errors.append(error)

    thread = Thread(target=capture, name="test-capture", daemon=True)
    thread.start()
    try:
        assert captures.wait(60)
        engine = CudaEngine(pool, window_size=8 * STRIPE)  # allocates, registers, compiles
        assert engine.settle(120)
        for _ in range(20):
            engine.gather_write(plan).wait(60)
            engine.scatter_read(plan).wait(60)
        engine.close()
    finally:
        copied.set()
        thread.join(60)
    assert errors == []
    assert in_the_pool(memory, pool)
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((result == 100).all())
