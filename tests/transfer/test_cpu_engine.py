# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CPU engine: plans, blocks that C puts and gets, and settings, compared with slices."""

from __future__ import annotations

import dataclasses
import errno
import itertools
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
from support.blocks import keys
from support.emulation import fewer
from support.plans import cut

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.errors import ChecksumError, DeviceFaultError, LayoutError
from beluga.index import IndexServer
from beluga.pool import STRIPE_SIZE, Pool
from beluga.rpc import Client
from beluga.transfer import CHUNK, PIECE, CopySettings, CpuEngine, Plan, plan_blocks

# ---- Plans of the CPU engine, with one thread and with several, are compared with slices.


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
    for part in cut(back, 3 * sum(sizes) // 2):
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
    for part in cut(summed, 60_000):
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
    """The rules of plans themselves are those of test_plan.py."""
    engine, data = CpuEngine(pool, threads=1), pool.geometry.data_offset
    source = Scattered(1, [64, 100]).fill(1)
    poke(pool, data, bytes([FILL]) * 256)
    good = plan_blocks(source.addresses, source.sizes, np.array([data]), chunk_size=128)
    short = good.pieces.copy()
    short["length"][1] = 63
    for wrong in (
        Plan(short, good.chunks, good.checksums),
        Plan(good.pieces[::2], good.chunks),
        Plan(good.pieces, good.chunks, np.zeros(1, np.uint32)),
    ):
        for function in (engine.gather_write, engine.scatter_read):
            with pytest.raises(LayoutError):
                function(wrong)
    with pytest.raises(LayoutError):
        engine.gather_write(Plan(good.pieces, good.chunks, good.checksums, sparse=True))
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


def test_a_fault_in_a_worker_thread_is_an_error_of_the_call(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=8 * STRIPE_SIZE, sparse=True) as pool:
        engine = CpuEngine(pool, threads=4)
        source = Scattered(1, [STRIPE_SIZE]).fill(1)
        offset = pool.geometry.data_offset + 2 * STRIPE_SIZE
        plan = plan_blocks(source.addresses, source.sizes, np.array([offset]), chunk_size=16384)
        engine.gather_write(plan).wait()
        os.truncate(shm / "a", 3 * STRIPE_SIZE)  # the superblock, and the regions before the data
        for function in (engine.gather_write, engine.scatter_read):
            transfer = function(plan)
            with pytest.raises(DeviceFaultError):
                transfer.wait()


def test_a_forked_child_has_a_new_thread_pool(shm: Path) -> None:
    def copy() -> bool:
        with Pool.open([shm / "a"]) as pool:
            engine, source = CpuEngine(pool, threads=3), Scattered(1, [20480] * 60).fill(2)
            plan = plan_blocks(
                source.addresses, source.sizes, np.array([pool.geometry.data_offset])
            )
            engine.gather_write(plan).wait()
            return peek(pool, pool.geometry.data_offset, plan.size) == source.blocks()[0]

    Pool.create([shm / "a"], device_size=8 * STRIPE_SIZE, sparse=True).close()
    assert copy()
    child = os.fork()
    if child == 0:
        os._exit(0 if copy() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert copy()


# ---- Puts and gets of scattered blocks are compared with slices of bytes.


COUNT = 2  # blocks of a batch: bytes written past the end of one may be in the other
TIMEOUT_NS = 60_000_000_000


@dataclasses.dataclass
class Scene:
    """A served pool, and a client of it."""

    pool: Pool
    client: Client
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))


@pytest.fixture(scope="module", params=["hardware", "software"])
def scene(request: pytest.FixtureRequest, memory_root: Path) -> Iterator[Scene]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    paths = [folder / "a", folder / "b", folder / "c"]
    size = 16 * STRIPE_SIZE
    try:
        with (
            Pool.create(paths, device_size=size, coherence=request.param, sparse=True) as pool,
            IndexServer(pool),
            Client(pool) as client,
        ):
            yield Scene(pool, client)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["fastest", "plain"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    before = lib.bl_cpu_features()
    lib.bl_cpu_limit(0xFFFFFFFF if request.param == "fastest" else 0)
    yield
    lib.bl_cpu_limit(before)


@dataclasses.dataclass
class Batch:
    """Blocks of one length with their keys, and the arguments of C for them."""

    scene: Scene
    chunk_size: int
    words: ffi.CData

    @classmethod
    def fresh(cls, scene: Scene, chunk_size: int) -> Batch:
        names = keys([next(scene.numbers) for _ in range(COUNT)])
        return cls(scene, chunk_size, ffi.new("uint64_t[]", names.reshape(-1).tolist()))

    def struct(self, blocks: Scattered, *, check_checksums: bool = True, **more: int) -> ffi.CData:
        fragments = zip(blocks.addresses.reshape(-1), np.tile(blocks.sizes, COUNT), strict=True)
        pairs = [(int(address), int(size)) for address, size in fragments]
        self._fragments = ffi.new("bl_fragment[]", pairs)
        fields = {
            "keys": self.words,
            "fragments": self._fragments,
            "timeout_ns": TIMEOUT_NS,
            "count": COUNT,
            "fragment_count": len(blocks.sizes),
            "length": int(blocks.sizes.sum()),
            "chunk_size": self.chunk_size,
            "check_checksums": check_checksums,
        }
        return ffi.new("bl_kv_batch *", fields | more)

    def put(self, blocks: Scattered, **more: int) -> int:
        """Put blocks. Returns 0 if all are stored, or an error if none is."""
        states, statuses = ffi.new("uint8_t[]", COUNT), ffi.new("int32_t[]", COUNT)
        session = self.scene.client.session
        status = lib.bl_kv_put(session, self.struct(blocks, **more), states, statuses)
        if status == 0:
            assert list(states) == [lib.BL_BLOCK_GRANTED] * COUNT
            assert list(statuses) == [0] * COUNT
        return int(status)

    def get(self, blocks: Scattered, *, check_checksums: bool = True) -> int:
        """Get blocks, and return how many leading blocks are right."""
        states, mismatches = ffi.new("uint8_t[]", COUNT), ffi.new("uint64_t *")
        struct = self.struct(blocks, check_checksums=check_checksums)
        return int(lib.bl_kv_get(self.scene.client.session, struct, states, mismatches))

    def offsets(self) -> list[int]:
        """Return the offsets of the blocks in the pool."""
        records, pending = ffi.new("bl_block_record[]", COUNT), ffi.new("uint32_t *")
        session = self.scene.client.session
        assert lib.bl_lookup(session, self.words, COUNT, 0, records, pending, TIMEOUT_NS) == COUNT
        return [record.offset for record in records]

    def remove(self) -> None:
        session = self.scene.client.session
        assert lib.bl_remove_blocks(session, self.words, COUNT, TIMEOUT_NS) == COUNT


def put_and_get(scene: Scene, sizes: list[int], chunk_size: int) -> None:
    """Put fragments of ``sizes``, compare the pool, and fetch them into other fragments."""
    source, target = Scattered(COUNT, sizes).fill(7), Scattered(COUNT, sizes[::-1])
    batch = Batch.fresh(scene, chunk_size)
    assert batch.put(source) == 0
    lines = -(-sum(sizes) // 64) * 64
    for content, offset in zip(source.blocks(), batch.offsets(), strict=True):
        assert peek(scene.pool, offset, lines) == content + bytes(lines - len(content))
        vector = sums(content, chunk_size) if chunk_size else []
        if len(vector) > 1:  # a single one is in the entry
            stored = peek(scene.pool, offset + lines, 4 * len(vector))
            assert np.frombuffer(stored, np.uint32).tolist() == vector
    assert batch.get(target) == COUNT
    assert target.blocks() == source.blocks()
    assert target.untouched()
    batch.remove()


SIZES = [
    [1],
    [64],
    [4096],
    [100_000],
    [20_000] * 8,
    [0, 10, 0, 0, 300, 0],
    [63, 65, 1, 255, 256, 257, 4095, 4097],
    [1] * 200,
    [128] * 100,
    [3 << 20],  # across the end of a stripe, to another device
    [(2 << 20) + 5, 11, 70_000],
]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("chunk_size", [0, 1000, 16384, 20_000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_are_read_back_and_no_other_bytes_change(
    scene: Scene, sizes: list[int], chunk_size: int
) -> None:
    put_and_get(scene, sizes, chunk_size)


@pytest.mark.usefixtures("path")
@settings(
    max_examples=fewer(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=12).filter(any),
    st.just(0) | st.integers(64, 900),
)
def test_any_split_into_fragments_and_chunks_is_copied(
    scene: Scene, sizes: list[int], chunk_size: int
) -> None:
    put_and_get(scene, sizes, chunk_size)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("place", [0, 16383, 16384, 39_999])
def test_one_wrong_byte_in_the_pool_is_found(scene: Scene, place: int) -> None:
    batch = Batch.fresh(scene, 16384)
    assert batch.put(Scattered(COUNT, [40_000]).fill(1)) == 0
    target = Scattered(COUNT, [30_000, 10_000])
    assert batch.get(target) == COUNT
    at = batch.offsets()[1] + place
    poke(scene.pool, at, bytes([peek(scene.pool, at, 1)[0] ^ 0xFF]))
    assert batch.get(target) == 1
    assert batch.get(target, check_checksums=False) == COUNT
    batch.remove()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("length", [1023, 1025], ids=["the fragments hold more", "and less"])
def test_fragments_that_do_not_match_the_block_store_nothing(scene: Scene, length: int) -> None:
    batch, source = Batch.fresh(scene, 64), Scattered(COUNT, [1000, 24]).fill(1)
    before = source.blocks()
    assert batch.put(source, length=length) == -errno.EINVAL
    assert batch.get(Scattered(COUNT, [1000, 24])) == 0
    assert source.blocks() == before


# ---- Settings of the CPU's copies reach C, and give the same bytes.


DEFAULT = CopySettings.default()
SETTINGS = st.sampled_from([0, 1, 63, 64, 100, 1280, 4096, 65536, 1 << 20, 0xFFFFFFFF])
ANY = st.builds(
    CopySettings, **{field.name: SETTINGS for field in dataclasses.fields(CopySettings)}
)


@settings(max_examples=fewer(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    given=ANY,
    threads=st.sampled_from([1, 3]),
    sizes=st.lists(st.sampled_from([1, 63, 64, 300, 1280, 20480, 300_000]), min_size=1, max_size=9),
    chunk=st.sampled_from([0, 64, 4096, 16384]),
)
def test_all_settings_give_the_same_bytes_and_checksums(
    pool: Pool, given: CopySettings, threads: int, sizes: list[int], chunk: int
) -> None:
    engine, offset = (
        CpuEngine(pool, threads, settings=given),
        pool.geometry.data_offset + (2 << 20) - 4096,
    )
    source = np.random.default_rng(7).integers(0, 256, sum(sizes) + 5 * len(sizes), np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum([0, *sizes[:-1]]) + 5 * np.arange(len(sizes))
    written, read = (
        plan_blocks(
            np.array([memory.ctypes.data + starts], np.uint64),
            np.array(sizes),
            np.array([offset]),
            chunk_size=chunk,
        )
        for memory in (source, target)
    )
    content = b"".join(
        source[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True)
    )
    engine.gather_write(written).wait()
    if written.checksums is not None and read.checksums is not None:
        wanted = [
            coherence.crc32c(content[at : at + chunk]) for at in range(0, len(content), chunk)
        ]
        assert written.checksums.tolist() == wanted
        read.checksums[:] = written.checksums
    engine.scatter_read(read).wait()
    found = b"".join(
        target[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True)
    )
    assert found == content
    assert target.sum(dtype=np.int64) == np.frombuffer(found, np.uint8).sum(dtype=np.int64)
    if read.checksums is not None:
        read.checksums[-1] ^= 1
        with pytest.raises(ChecksumError):
            engine.scatter_read(read).wait()


def test_rows_of_a_block_are_read_with_any_settings(pool: Pool) -> None:
    content = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8)
    offset = np.array([pool.geometry.data_offset])
    plan = plan_blocks(
        np.array([[content.ctypes.data]], np.uint64), np.array([200_000]), offset, chunk_size=4096
    )
    CpuEngine(pool, 1).gather_write(plan).wait()
    target = np.zeros(50 * 500, np.uint8)
    pieces = np.zeros(50, plan.pieces.dtype)
    pieces["address"] = target.ctypes.data + 500 * np.arange(50)
    pieces["offset"] = offset + 4096 * np.arange(50) + 700 % 4096
    pieces["length"], pieces["chunk"] = 500, np.arange(50)
    pieces = pieces[:48]
    chunks = plan.chunks[:48].copy()
    chunks["first"] = np.arange(48)
    assert plan.checksums is not None
    wanted = b"".join(content[at : at + 500].tobytes() for at in 4096 * np.arange(48) + 700)
    for odd in (0, 64, 8192, 0xFFFFFFFF):
        given = CopySettings(*[odd] * len(dataclasses.fields(CopySettings)))
        for sums in (None, plan.checksums[:48].copy()):
            target[:] = 0
            CpuEngine(pool, 3, settings=given).scatter_read(
                Plan(pieces, chunks, sums, sparse=True)
            ).wait()
            assert target[: 48 * 500].tobytes() == wanted


def test_settings_reach_c() -> None:
    given = CopySettings(*range(1, 1 + len(dataclasses.fields(CopySettings))))
    struct = given.struct(9)
    for field in dataclasses.fields(CopySettings):
        assert getattr(struct, field.name) == getattr(given, field.name)
    assert struct.threads == 9


def test_settings_of_the_file_reach_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "beluga.toml"
    monkeypatch.setenv("BELUGA_CONFIG", str(path))
    for text, window, past in (
        ("[copy]\nwindow = 12345", 12345, DEFAULT.past),
        ("[copy]\nwindow = -1\npast = 99_999_999_999\nunknown = 3", DEFAULT.window, 0xFFFFFFFF),
        ("copy = 3", DEFAULT.window, DEFAULT.past),
        ("copy = [", DEFAULT.window, DEFAULT.past),
    ):
        path.write_text(text)
        found = CopySettings.default()
        assert found == dataclasses.replace(DEFAULT, window=window, past=past)
        assert found.struct(3).window == window
