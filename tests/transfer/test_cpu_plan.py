# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans of the CPU engine, with one thread and with several, are compared with slices."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulation import fewer

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.errors import ChecksumError, DeviceFaultError, LayoutError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import CHUNK, PIECE, CpuEngine, Plan, plan_blocks

FILL = 253


@pytest.fixture(scope="module", params=["hardware", "software"])
def pool(request: pytest.FixtureRequest, memory_root: Path) -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    paths = [folder / "a", folder / "b", folder / "c"]
    size = 8 * STRIPE_SIZE
    try:
        with Pool.create(paths, device_size=size, coherence=request.param, sparse=True) as made:
            yield made
    finally:
        shutil.rmtree(folder)


def peek(pool: Pool, offset: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        at = offset + len(found)
        piece = min(size - len(found), STRIPE_SIZE - at % STRIPE_SIZE)
        found += bytes(ffi.buffer(lib.bl_pool_address(pool.handle, at), piece))
    return found


def poke(pool: Pool, offset: int, content: bytes) -> None:
    for at, byte in enumerate(content, offset):
        ffi.buffer(lib.bl_pool_address(pool.handle, at), 1)[:] = bytes([byte])


class Scattered:
    """Blocks of fragments of these sizes, with slack around each fragment."""

    def __init__(self, blocks: int, sizes: list[int]) -> None:
        self.sizes = np.array(sizes)
        self.step = max(sizes) + 77
        self.memory = np.full((blocks * len(sizes), self.step), FILL, np.uint8)
        starts = self.memory.ctypes.data + 38 + np.arange(blocks * len(sizes)) * self.step
        self.addresses = starts.astype(np.uint64).reshape(blocks, -1)

    def fill(self, seed: int) -> Scattered:
        random = np.random.default_rng(seed)
        for row, size in zip(self.memory, np.resize(self.sizes, len(self.memory)), strict=True):
            row[38 : 38 + size] = random.integers(0, 256, size, np.uint8)
        return self

    def blocks(self) -> list[bytes]:
        rows = [
            row[38 : 38 + size].tobytes()
            for row, size in zip(self.memory, np.resize(self.sizes, len(self.memory)), strict=True)
        ]
        count = len(self.sizes)
        return [b"".join(rows[i : i + count]) for i in range(0, len(rows), count)]

    def untouched(self) -> bool:
        return all(
            (row[:38] == FILL).all() and (row[38 + size :] == FILL).all()
            for row, size in zip(self.memory, np.resize(self.sizes, len(self.memory)), strict=True)
        )


def places(pool: Pool, blocks: int, length: int) -> np.ndarray:
    """Return unsorted offsets of blocks, one of them across the end of a stripe."""
    room = -(-length // 64) * 64 + 128
    start = pool.geometry.data_offset + STRIPE_SIZE - room // 2 // 64 * 64
    return (start + room * np.random.default_rng(1).permutation(blocks)).astype(np.uint64)


def sums(block: bytes, chunk_size: int) -> list[int]:
    return [coherence.crc32c(block[i : i + chunk_size]) for i in range(0, len(block), chunk_size)]


def round_trip(pool: Pool, blocks: int, sizes: list[int], chunk: int, threads: int) -> None:
    engine = CpuEngine(pool, threads=threads)
    source, target = Scattered(blocks, sizes).fill(7), Scattered(blocks, sizes[::-1])
    offsets = places(pool, blocks, sum(sizes))
    lines = -(-sum(sizes) // 64) * 64
    for offset in offsets.tolist():
        lib.bl_pool_write(pool.handle, offset, bytes([FILL]) * (lines + 64), lines + 64)
    plan = plan_blocks(source.addresses, source.sizes, offsets, chunk_size=chunk)
    engine.gather_write(plan).wait()
    for offset, block in zip(offsets.tolist(), source.blocks(), strict=True):
        stored = peek(pool, offset, lines + 64)
        assert stored == block + bytes(lines - len(block)) + bytes([FILL]) * 64
    if chunk:
        assert plan.checksums is not None
        assert plan.checksums.tolist() == [
            s for block in source.blocks() for s in sums(block, chunk)
        ]
    back = plan_blocks(target.addresses, target.sizes, offsets, chunk_size=chunk)
    if chunk:
        assert back.checksums is not None
        back.checksums[:] = plan.checksums
    for part in back.cut(3 * sum(sizes) // 2):
        engine.scatter_read(part).wait()
    assert target.blocks() == source.blocks()
    assert target.untouched()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk", [0, 16384, 20480])
@pytest.mark.parametrize(
    ("blocks", "sizes"),
    [
        (1, [20480] * 128),
        (5, [20480] * 16 + [100]),
        (40, [1280] * 20),
        (3, [1, 63, 65, 4095, 300_000]),
        (2, [700_001]),
    ],
)
def test_blocks_are_read_back_by_every_method(
    pool: Pool, blocks: int, sizes: list[int], chunk: int, threads: int
) -> None:
    round_trip(pool, blocks, sizes, chunk, threads)


@settings(
    max_examples=fewer(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    blocks=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=9),
    chunk=st.integers(0, 12),
)
def test_any_blocks_are_copied(pool: Pool, blocks: int, sizes: list[int], chunk: int) -> None:
    round_trip(pool, blocks, sizes, chunk * 64, 2)


def sparse_plan(
    pool: Pool, length: int, chunk: int, rows: list[tuple[int, int]], target: np.ndarray
) -> Plan:
    """Rows (start, size), in order, of a block at the pool's data, adjacent in ``target``; each in
    a chunk of that size.
    """
    data = pool.geometry.data_offset
    pieces, chunks, at = [], [], target.ctypes.data
    for start, size in rows:
        first = start // chunk * chunk
        if not chunks or chunks[-1][0] != data + first:
            chunks.append((data + first, min(chunk, length - first), len(pieces)))
        pieces.append((at, data + start, size, len(chunks) - 1))
        at += size
    return Plan(np.array(pieces, PIECE), np.array(chunks, CHUNK), sparse=True)


@pytest.mark.parametrize("threads", [1, 4])
def test_some_rows_are_read_and_their_chunks_verified(pool: Pool, threads: int) -> None:
    engine = CpuEngine(pool, threads=threads)
    length, chunk, row = 40 * 16384, 16384, 1280
    source = Scattered(1, [length]).fill(3)
    plan = plan_blocks(
        source.addresses, source.sizes, np.array([pool.geometry.data_offset]), chunk_size=chunk
    )
    engine.gather_write(plan).wait()
    assert plan.checksums is not None
    rows = [(i * 3 * row, row) for i in range(150) if i * 3 * row % chunk <= chunk - row]
    target = np.full(len(rows) * row + 9, FILL, np.uint8)
    wanted = b"".join(source.blocks()[0][start : start + size] for start, size in rows)
    sparse = sparse_plan(pool, length, chunk, rows, target)
    engine.scatter_read(sparse).wait()  # without checksums
    assert target.tobytes() == wanted + bytes([FILL] * 9)
    touched = (sparse.chunks["offset"] - pool.geometry.data_offset) // chunk
    summed = Plan(sparse.pieces, sparse.chunks, plan.checksums[touched], sparse=True)
    target[:] = FILL
    for part in summed.cut(60_000):
        engine.scatter_read(part).wait()
    assert target.tobytes() == wanted + bytes([FILL] * 9)
    gap = rows[10][0] + row  # no row covers this byte, but its chunk's checksum does
    poke(pool, pool.geometry.data_offset + gap, bytes([source.memory[0, 38 + gap] ^ 1]))
    transfer = engine.scatter_read(summed)
    assert transfer.done()
    with pytest.raises(ChecksumError):
        transfer.wait()
    engine.scatter_read(sparse).wait()


@pytest.mark.parametrize("threads", [1, 2])
def test_one_wrong_byte_is_detected_by_every_method(pool: Pool, threads: int) -> None:
    engine = CpuEngine(pool, threads=threads)
    source = Scattered(1, [20480] * 64).fill(5)
    offset = pool.geometry.data_offset
    plan = plan_blocks(source.addresses, source.sizes, np.array([offset]), chunk_size=16384)
    engine.gather_write(plan).wait()
    engine.scatter_read(plan).wait()
    for place in (0, 1_000_000, 64 * 20480 - 1):
        was = peek(pool, offset + place, 1)
        poke(pool, offset + place, bytes([was[0] ^ 0x80]))
        with pytest.raises(ChecksumError):
            engine.scatter_read(plan).wait()
        poke(pool, offset + place, was)


def test_an_invalid_plan_copies_no_bytes(pool: Pool) -> None:
    engine = CpuEngine(pool, threads=1)
    data, end = pool.geometry.data_offset, pool.geometry.size
    source = Scattered(1, [64, 100]).fill(1)
    poke(pool, data, bytes([FILL]) * 256)
    good = plan_blocks(source.addresses, source.sizes, np.array([data]), chunk_size=128)
    for field, array, index, value in (
        ("offset", "pieces", 0, data + 1),
        ("offset", "pieces", 1, data + 128),
        ("length", "pieces", 1, 63),
        ("length", "pieces", 1, 65),
        ("chunk", "pieces", 2, 0),
        ("chunk", "pieces", 2, 2),
        ("chunk", "pieces", 0, 1),
        ("first", "chunks", 1, 1),
        ("offset", "chunks", 1, data + 64),
        ("offset", "chunks", 0, end - 64),
        ("offset", "chunks", 0, 2**64 - 64),
        ("length", "chunks", 1, 37),
    ):
        plan = Plan(good.pieces.copy(), good.chunks.copy(), good.checksums)
        getattr(plan, array)[field][index] = value
        for function in (engine.gather_write, engine.scatter_read):
            with pytest.raises(LayoutError):
                function(plan)
    at = source.memory.ctypes.data
    skips = Plan(  # chunk 1 has no piece, so its checksum would not be compared
        np.array([(at, data, 128, 0), (at, data + 256, 64, 2)], PIECE),
        np.array([(data, 128, 0), (data + 128, 128, 1), (data + 256, 64, 1)], CHUNK),
        np.zeros(3, np.uint32),
    )
    begins = Plan(np.array([(at, data + 32, 96, 0)], PIECE), np.array([(data + 32, 96, 0)], CHUNK))
    apart = Plan(  # a chunk may start within a line only at the end of the previous chunk
        np.array([(at, data, 64, 0), (at, data + 96, 32, 1)], PIECE),
        np.array([(data, 64, 0), (data + 96, 32, 1)], CHUNK),
    )
    for wrong in (skips, begins, apart):
        for function in (engine.gather_write, engine.scatter_read):
            with pytest.raises(LayoutError):
                function(wrong)
    sparse = Plan(good.pieces, good.chunks, good.checksums, sparse=True)
    with pytest.raises(LayoutError):
        engine.gather_write(sparse)
    with pytest.raises(LayoutError):
        engine.gather_write(Plan(good.pieces[::2], good.chunks))
    with pytest.raises(LayoutError):
        engine.gather_write(Plan(good.pieces, good.chunks, np.zeros(1, np.uint32)))
    with pytest.raises(LayoutError):
        CpuEngine(pool, threads=0)
    assert peek(pool, data, 256) == bytes([FILL]) * 256


def test_threads_of_one_process_copy_at_once(pool: Pool) -> None:
    """The thread pool has one job at a time. A thread that finds it busy copies without it."""
    engine, errors = CpuEngine(pool, threads=3), list[BaseException]()
    length = 48 * 20480

    def work(index: int) -> None:
        try:
            offset = pool.geometry.data_offset + index * STRIPE_SIZE
            for turn in range(8):
                source = Scattered(1, [20480] * 48).fill(index * 100 + turn)
                target = Scattered(1, [20480] * 48)
                plan = plan_blocks(source.addresses, source.sizes, np.array([offset]))
                engine.gather_write(plan).wait()
                assert peek(pool, offset, length) == source.blocks()[0]
                back = plan_blocks(target.addresses, target.sizes, np.array([offset]))
                engine.scatter_read(back).wait()
                assert target.blocks() == source.blocks()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_fault_in_a_worker_thread_is_an_error_of_the_call(memory_root: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    try:
        with Pool.create([folder / "a"], device_size=8 * STRIPE_SIZE, sparse=True) as pool:
            engine = CpuEngine(pool, threads=4)
            source = Scattered(1, [STRIPE_SIZE]).fill(1)
            offset = pool.geometry.data_offset + 2 * STRIPE_SIZE
            plan = plan_blocks(source.addresses, source.sizes, np.array([offset]), chunk_size=16384)
            engine.gather_write(plan).wait()
            # the superblock, and the regions before the data
            os.truncate(folder / "a", 3 * STRIPE_SIZE)
            for function in (engine.gather_write, engine.scatter_read):
                transfer = function(plan)
                with pytest.raises(DeviceFaultError):
                    transfer.wait()
    finally:
        shutil.rmtree(folder)


def test_a_forked_child_has_a_new_thread_pool(memory_root: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))

    def copy() -> bool:
        with Pool.open([folder / "a"]) as pool:
            engine, source = CpuEngine(pool, threads=3), Scattered(1, [20480] * 60).fill(2)
            plan = plan_blocks(
                source.addresses, source.sizes, np.array([pool.geometry.data_offset])
            )
            engine.gather_write(plan).wait()
            return peek(pool, pool.geometry.data_offset, plan.size) == source.blocks()[0]

    try:
        Pool.create([folder / "a"], device_size=8 * STRIPE_SIZE, sparse=True).close()
        assert copy()
        child = os.fork()
        if child == 0:
            os._exit(0 if copy() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert copy()
    finally:
        shutil.rmtree(folder)
