# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every engine copies the right bytes, on pools with several devices."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.emulation import FULL
from support.engines import ENGINES, Bytes, EngineCase, EngineMemory, peek, poke
from support.plans import cut

from beluga import coherence
from beluga.errors import ChecksumError, LayoutError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import CHUNK, PIECE, CopyEngine, Plan, Transfer, plan_blocks, plan_rows

CANARY = 253
SLACK = 256  # bytes watched on both sides of the blocks
TIMEOUT_S = 60.0


@pytest.fixture(
    scope="module", params=["software", pytest.param("hardware", marks=pytest.mark.long)]
)
def pool(request: pytest.FixtureRequest, memory_root: Path) -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    paths = [folder / "a", folder / "b", folder / "c"]
    size = 12 * STRIPE_SIZE
    try:
        with Pool.create(paths, device_size=size, coherence=request.param, sparse=True) as made:
            yield made
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module", params=ENGINES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> EngineCase:
    found: EngineCase = request.param
    if reason := found.missing():
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def engine(case: EngineCase, pool: Pool) -> Iterator[CopyEngine]:
    made = case.make(pool)
    yield made
    made.close()


@dataclasses.dataclass(frozen=True)
class Scene:
    """Blocks at ``offsets`` of the pool, each of fragments of these ``sizes``, which lie at
    ``places`` (blocks, fragments) of ``memory_size`` bytes, apart from each other and from its
    ends."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    chunk_size: int
    places: NDArray[np.int64]
    memory_size: int
    rng: np.random.Generator

    @classmethod
    def make(
        cls,
        rng: np.random.Generator,
        start: int,
        sizes: tuple[int, ...],
        count: int,
        chunk_size: int,
    ) -> Scene:
        """Make a scene with the first block at ``start``, and the others some lines apart."""
        room = -(-sum(sizes) // 64) * 64
        steps = room + 64 * rng.integers(0, 4, count)
        offsets = start + np.concatenate([[0], np.cumsum(steps)[:-1]])
        offsets = rng.permutation(offsets)
        lengths = np.tile(sizes, count)
        order = rng.permutation(len(lengths))
        gaps = rng.integers(1, 70, len(lengths) + 1)
        places = np.empty(len(lengths), np.int64)
        places[order] = np.cumsum(gaps[:-1]) + np.cumsum(lengths[order]) - lengths[order]
        total = int(gaps.sum() + lengths.sum())
        places = places.reshape(count, -1)
        return cls(sizes, tuple(offsets.tolist()), chunk_size, places, total, rng)

    @property
    def length(self) -> int:
        return sum(self.sizes)

    @property
    def area(self) -> tuple[int, int]:
        """Return the offset and size of the pool's bytes that are watched."""
        end = max(self.offsets) + -(-self.length // 64) * 64
        start = min(self.offsets) - SLACK
        return start, end + SLACK - start

    def noise(self, size: int) -> Bytes:
        return self.rng.integers(0, 256, size, dtype=np.uint8)

    def plan(self, memory: EngineMemory) -> Plan:
        return plan_blocks(
            (self.places + memory.address).astype(np.uint64),
            np.array(self.sizes),
            np.array(self.offsets, np.uint64),
            chunk_size=self.chunk_size,
        )

    def gathered(self, memory: Bytes) -> list[Bytes]:
        """Return the payload of each block."""
        return [
            np.concatenate(
                [memory[at : at + size] for at, size in zip(row, self.sizes, strict=True)]
            )
            for row in self.places.tolist()
        ]

    def scattered(self, payloads: list[Bytes]) -> Bytes:
        """Return memory with these payloads in it."""
        memory = np.full(self.memory_size, CANARY, np.uint8)
        for row, payload in zip(self.places.tolist(), payloads, strict=True):
            done = 0
            for at, size in zip(row, self.sizes, strict=True):
                memory[at : at + size] = payload[done : done + size]
                done += size
        return memory

    def stored(self, payloads: list[Bytes]) -> Bytes:
        """Return the compared area with these payloads; last lines are padded with zeros."""
        start, size = self.area
        area = np.full(size, CANARY, np.uint8)
        for offset, payload in zip(self.offsets, payloads, strict=True):
            at = offset - start
            area[at : at + -(-self.length // 64) * 64] = 0
            area[at : at + self.length] = payload
        return area

    def sums(self, payloads: list[Bytes]) -> NDArray[np.uint32]:
        """Return the checksums of each block: shape (blocks, chunks)."""
        chunk = self.chunk_size or self.length
        return np.array(
            [
                [
                    coherence.crc32c(payload[at : at + chunk].tobytes())
                    for at in range(0, self.length, chunk)
                ]
                for payload in payloads
            ],
            np.uint32,
        )


def run(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait(TIMEOUT_S)
        assert transfer.done()


def write(case: EngineCase, engine: CopyEngine, pool: Pool, scene: Scene, part: int = 0) -> None:
    """Write a scene, as a whole or in parallel parts, and compare pool, checksums and source."""
    content = scene.noise(scene.memory_size)
    memory = case.memory(content)
    poke(pool, scene.area[0], np.full(scene.area[1], CANARY, np.uint8))
    plan = scene.plan(memory)
    run([engine.gather_write(piece) for piece in (cut(plan, part) if part else [plan])])
    payloads = scene.gathered(content)
    assert np.array_equal(peek(pool, *scene.area), scene.stored(payloads))
    assert np.array_equal(memory.content(), content)
    if scene.chunk_size:
        assert plan.checksums is not None
        assert np.array_equal(plan.checksums, scene.sums(payloads).reshape(-1))


def read(case: EngineCase, engine: CopyEngine, pool: Pool, scene: Scene, part: int = 0) -> None:
    """Read a scene back, compare the bytes, and check that no others were changed."""
    payloads = [scene.noise(scene.length) for _ in scene.offsets]
    poke(pool, scene.area[0], scene.stored(payloads))
    memory = case.memory(np.full(scene.memory_size, CANARY, np.uint8))
    plan = scene.plan(memory)
    if plan.checksums is not None:
        plan.checksums[:] = scene.sums(payloads).reshape(-1)
    run([engine.scatter_read(piece) for piece in (cut(plan, part) if part else [plan])])
    assert np.array_equal(memory.content(), scene.scattered(payloads))
    assert np.array_equal(peek(pool, *scene.area), scene.stored(payloads))


def near_stripe_end(pool: Pool, before: int) -> int:
    return pool.geometry.data_offset + STRIPE_SIZE - before


SHAPES = {
    "one-byte": ((1,), 1, 0),
    "one-line": ((64,), 2, 64),
    "ragged": ((63, 65, 1, 255, 256, 257, 4095, 4097), 2, 4096),
    "single-bytes": ((1,) * 100, 3, 64),
    "odd-tail": ((20_000, 20_000, 77), 3, 16384),
    "rows-of-256": ((256,) * 64, 4, 16384),
    "many-blocks": ((1280, 1280, 1280, 1280), 64, 4096),
    "32B-model": ((20_480,) * 128, 1, 16384),
    "three-stripes": ((STRIPE_SIZE + 5, 11, STRIPE_SIZE + 100_000), 1, 16384),
    "no-sums": ((5000, 300, 12), 5, 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_written_and_read_whole(
    case: EngineCase, engine: CopyEngine, pool: Pool, shape: str
) -> None:
    sizes, count, chunk_size = SHAPES[shape]
    rng = np.random.default_rng(5)
    scene = Scene.make(rng, near_stripe_end(pool, 4096), sizes, count, chunk_size)
    write(case, engine, pool, scene)
    read(case, engine, pool, scene)


@pytest.mark.parametrize("seed", range(12 if FULL else 6))
def test_any_fragments_chunks_and_parts_are_copied(
    case: EngineCase, engine: CopyEngine, pool: Pool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        largest = int(rng.choice([3, 70, 700, 9000]))
        sizes = tuple(rng.integers(1, largest + 1, rng.integers(1, 20)).tolist())
        start = near_stripe_end(pool, 64 * int(rng.integers(1, 100)))
        chunk_size = 64 * int(rng.choice([0, 1, 3, 16, 256]))
        scene = Scene.make(rng, start, sizes, int(rng.integers(1, 9)), chunk_size)
        part = int(rng.choice([0, 1, 1000, 20_000]))
        write(case, engine, pool, scene, part)
        read(case, engine, pool, scene, part)


@pytest.mark.parametrize("place", [0, 16383, 16384, 39_999])
def test_one_wrong_byte_in_the_pool_is_found(
    case: EngineCase, engine: CopyEngine, pool: Pool, place: int
) -> None:
    rng = np.random.default_rng(place)
    scene = Scene.make(rng, near_stripe_end(pool, 20_480), (30_000, 10_000), 2, 16384)
    memory = case.memory(scene.noise(scene.memory_size))
    plan = scene.plan(memory)
    run([engine.gather_write(plan)])
    run([engine.scatter_read(plan)])
    at = scene.offsets[1] + place
    poke(pool, at, peek(pool, at, 1) ^ 16)
    with pytest.raises(ChecksumError):
        engine.scatter_read(plan).wait(TIMEOUT_S)
    run([engine.scatter_read(dataclasses.replace(plan, checksums=None))])
    poke(pool, at, peek(pool, at, 1) ^ 16)
    run([engine.scatter_read(plan)])


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some bytes of some blocks of a scene, and the expected result of reading them."""

    scene: Scene
    blocks: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def make(cls, scene: Scene, count: int, largest: int) -> Rows:
        rng = scene.rng
        sizes = rng.integers(1, min(largest, scene.length) + 1, count)
        starts = np.array([rng.integers(0, scene.length - size + 1) for size in sizes])
        return cls(scene, rng.integers(0, len(scene.offsets), count), starts, sizes)

    @property
    def places(self) -> NDArray[np.int64]:
        """Return the target of each row, a few bytes apart."""
        result: NDArray[np.int64] = np.cumsum(self.sizes + 3) - self.sizes
        return result

    def plan(self, memory: EngineMemory, checksums: NDArray[np.uint32] | None) -> Plan:
        return plan_rows(
            (self.places + memory.address).astype(np.uint64),
            self.blocks,
            self.starts,
            self.sizes,
            offsets=np.array(self.scene.offsets, np.uint64),
            length=self.scene.length,
            chunk_size=self.scene.chunk_size,
            checksums=checksums,
        )

    def blank(self) -> Bytes:
        return np.full(int(self.sizes.sum()) + 3 * len(self.sizes) + 3, CANARY, np.uint8)

    def wanted(self, payloads: list[Bytes]) -> Bytes:
        memory = self.blank()
        rows = zip(self.blocks, self.starts, self.sizes, self.places, strict=True)
        for block, start, size, place in rows:
            memory[place : place + size] = payloads[block][start : start + size]
        return memory


@pytest.mark.parametrize("check_checksums", [False, True], ids=["bare", "verified"])
@pytest.mark.parametrize("seed", range(8))
def test_only_the_requested_rows_are_read(
    case: EngineCase, engine: CopyEngine, pool: Pool, seed: int, *, check_checksums: bool
) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(3):
        length = int(rng.choice([100, 5000, 60_000]))
        start = near_stripe_end(pool, 64 * int(rng.integers(1, 900)))
        scene = Scene.make(rng, start, (length,), 5, 64 * int(rng.choice([1, 16, 256])))
        payloads = [scene.noise(length) for _ in scene.offsets]
        poke(pool, scene.area[0], scene.stored(payloads))
        rows = Rows.make(scene, int(rng.integers(1, 60)), int(rng.choice([8, 1280, 30_000])))
        memory = case.memory(rows.blank())
        plan = rows.plan(memory, scene.sums(payloads) if check_checksums else None)
        part = int(rng.choice([0, 1, 4000]))
        run([engine.scatter_read(piece) for piece in (cut(plan, part) if part else [plan])])
        assert np.array_equal(memory.content(), rows.wanted(payloads))


def test_only_chunks_that_rows_touch_are_verified(
    case: EngineCase, engine: CopyEngine, pool: Pool
) -> None:
    rng = np.random.default_rng(9)
    scene = Scene.make(rng, near_stripe_end(pool, 10_240), (20_000,), 2, 4096)
    payloads = [scene.noise(scene.length) for _ in scene.offsets]
    poke(pool, scene.area[0], scene.stored(payloads))
    ones = np.array([1, 1])
    rows = Rows(scene, ones, np.array([5000, 18_000]), np.array([100, 2000]))
    memory = case.memory(rows.blank())
    plan = rows.plan(memory, scene.sums(payloads))
    for place, noticed in (
        (4095, False),
        (4096, True),
        (8191, True),
        (8192, False),
        (19_999, True),
    ):
        at = scene.offsets[1] + place
        poke(pool, at, peek(pool, at, 1) ^ 1)
        if noticed:
            with pytest.raises(ChecksumError):
                engine.scatter_read(plan).wait(TIMEOUT_S)
        else:
            run([engine.scatter_read(plan)])
        poke(pool, at, peek(pool, at, 1) ^ 1)


def test_an_invalid_plan_is_rejected_and_copies_nothing(
    case: EngineCase, engine: CopyEngine, pool: Pool
) -> None:
    content = np.arange(4096).astype(np.uint8)
    memory = case.memory(content)
    address = np.array([memory.address], np.uint64)
    start = pool.geometry.data_offset
    poke(pool, start, np.full(8192, CANARY, np.uint8))
    sparse = plan_rows(
        address,
        np.array([0]),
        np.array([0]),
        np.array([64]),
        offsets=np.array([start], np.uint64),
        length=4096,
    )
    with pytest.raises(LayoutError):
        engine.gather_write(sparse)
    size = pool.geometry.size
    for offset in (size - 2048, size, size + STRIPE_SIZE, 2**64 - 2048):
        chunks = np.array([(start, 2048, 0), (offset, 4096, 1)], CHUNK)
        address_first = (memory.address, start, 2048, 0)
        pieces = np.array([address_first, (memory.address, offset, 4096, 1)], PIECE)
        beyond = Plan(pieces, chunks)
        for move in (engine.gather_write, engine.scatter_read):
            with pytest.raises(LayoutError):
                move(beyond)
    assert (peek(pool, start, 8192) == CANARY).all()
    assert np.array_equal(memory.content(), content)


def test_an_engine_reports_its_kind(case: EngineCase, engine: CopyEngine) -> None:
    kind = engine.name.split("-")[0]
    assert kind in ("reference", "cpu", "dsa", "cuda", "planned")
    assert case.name.startswith(kind)
