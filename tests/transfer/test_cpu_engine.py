# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets of scattered blocks are compared with slices of bytes."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.blocks import keys
from support.emulation import fewer

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.index import IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

STRIPE_SIZE = lib.BL_STRIPE_SIZE
SLACK = 256  # bytes watched on both sides of a fragment
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


@pytest.fixture(params=["fastest", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    before = lib.bl_cpu_features()
    lib.bl_cpu_limit(0xFFFFFFFF if request.param == "fastest" else 0)
    yield
    lib.bl_cpu_limit(before)


class Scattered:
    """Separate fragments of these sizes, with slack around each."""

    def __init__(self, sizes: list[int], content: bytes | None = None) -> None:
        self.sizes = sizes
        self.length = sum(sizes)
        self.starts = [sum(sizes[:i]) + (i + 1) * (SLACK + 3) for i in range(len(sizes))]
        self.memory = np.full(self.length + (len(sizes) + 1) * (SLACK + 3), 253, dtype=np.uint8)
        self.fragments = ffi.new("bl_fragment[]", max(1, len(sizes)))
        done = 0
        for fragment, start, size in zip(self.fragments, self.starts, sizes, strict=False):
            fragment.address, fragment.size = self.memory.ctypes.data + start, size
            if content is not None:
                self.memory[start : start + size] = np.frombuffer(content, np.uint8)[
                    done : done + size
                ]
            done += size

    def content(self) -> bytes:
        pairs = zip(self.starts, self.sizes, strict=True)
        return b"".join(self.memory[start : start + size].tobytes() for start, size in pairs)

    def untouched(self) -> bool:
        """Return whether all bytes outside of the fragments are unchanged."""
        outside = np.ones(len(self.memory), dtype=bool)
        for start, size in zip(self.starts, self.sizes, strict=True):
            outside[start : start + size] = False
        return bool((self.memory[outside] == 253).all())


def stripe_view(pool: Pool, offset: int, size: int) -> Iterator[tuple[int, ffi.CData]]:
    done = 0
    while done < size:
        piece = min(size - done, STRIPE_SIZE - (offset + done) % STRIPE_SIZE)
        yield done, ffi.buffer(lib.bl_pool_address(pool.handle, offset + done), piece)
        done += piece


def peek(pool: Pool, offset: int, size: int) -> bytes:
    return b"".join(bytes(view) for _, view in stripe_view(pool, offset, size))


def poke(pool: Pool, offset: int, content: bytes) -> None:
    for done, view in stripe_view(pool, offset, len(content)):
        view[:] = content[done : done + len(view)]


def counting(size: int, first: int = 0) -> bytes:
    return ((np.arange(size) + first) % 251).astype(np.uint8).tobytes()


def sums(content: bytes, chunk_size: int) -> list[int]:
    return [
        coherence.crc32c(content[start : start + chunk_size])
        for start in range(0, len(content), chunk_size)
    ]


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

    def struct(
        self, blocks: list[Scattered], *, check_checksums: bool = True, **more: int
    ) -> ffi.CData:
        count = len(blocks[0].sizes)
        self._fragments = ffi.new("bl_fragment[]", COUNT * count)
        for i, block in enumerate(blocks):
            for j in range(count):
                self._fragments[i * count + j] = block.fragments[j]
        fields = {
            "keys": self.words,
            "fragments": self._fragments,
            "timeout_ns": TIMEOUT_NS,
            "count": COUNT,
            "fragment_count": count,
            "length": blocks[0].length,
            "chunk_size": self.chunk_size,
            "check_checksums": check_checksums,
        }
        return ffi.new("bl_kv_batch *", fields | more)

    def put(self, blocks: list[Scattered], **more: int) -> int:
        """Put blocks. Returns 0 if all are stored, or an error if none is."""
        states, statuses = ffi.new("uint8_t[]", COUNT), ffi.new("int32_t[]", COUNT)
        with self.scene.client.lock:
            session = self.scene.client.session
            status = lib.bl_kv_put(session, self.struct(blocks, **more), states, statuses)
        if status == 0:
            assert list(states) == [lib.BL_BLOCK_GRANTED] * COUNT
            assert list(statuses) == [0] * COUNT
        return int(status)

    def get(self, blocks: list[Scattered], *, check_checksums: bool = True) -> int:
        """Get blocks, and return how many leading blocks are right."""
        states, mismatches = ffi.new("uint8_t[]", COUNT), ffi.new("uint64_t *")
        struct = self.struct(blocks, check_checksums=check_checksums)
        with self.scene.client.lock:
            return int(lib.bl_kv_get(self.scene.client.session, struct, states, mismatches))

    def offsets(self) -> list[int]:
        """Return the offsets of the blocks in the pool."""
        records, pending = ffi.new("bl_block_record[]", COUNT), ffi.new("uint32_t *")
        with self.scene.client.lock:
            session = self.scene.client.session
            assert (
                lib.bl_lookup(session, self.words, COUNT, 0, records, pending, TIMEOUT_NS) == COUNT
            )
        return [record.offset for record in records]

    def remove(self) -> None:
        with self.scene.client.lock:
            session = self.scene.client.session
            assert lib.bl_remove_blocks(session, self.words, COUNT, TIMEOUT_NS) == COUNT


def round_trip(scene: Scene, sizes: list[int], chunk_size: int) -> None:
    """Put fragments of ``sizes``, compare the pool, and fetch them into other fragments."""
    contents = [counting(sum(sizes), 7 * i) for i in range(COUNT)]
    batch = Batch.fresh(scene, chunk_size)
    assert batch.put([Scattered(sizes, content) for content in contents]) == 0
    lines = -(-sum(sizes) // 64) * 64
    for content, offset in zip(contents, batch.offsets(), strict=True):
        assert peek(scene.pool, offset, lines) == content + bytes(lines - len(content))
        vector = sums(content, chunk_size) if chunk_size else []
        if len(vector) > 1:  # a single one is in the entry
            stored = peek(scene.pool, offset + lines, 4 * len(vector))
            assert np.frombuffer(stored, np.uint32).tolist() == vector
    targets = [Scattered(list(reversed(sizes))) for _ in contents]
    assert batch.get(targets) == COUNT
    assert [target.content() for target in targets] == contents
    assert all(target.untouched() for target in targets)
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


@pytest.mark.parametrize("chunk_size", [0, 1000, 16384, 20_000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_are_read_back_and_no_other_bytes_change(
    scene: Scene, sizes: list[int], chunk_size: int
) -> None:
    round_trip(scene, sizes, chunk_size)


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
    round_trip(scene, sizes, chunk_size)


@pytest.mark.parametrize("place", [0, 16383, 16384, 39_999])
def test_one_wrong_byte_in_the_pool_is_found(scene: Scene, place: int) -> None:
    batch = Batch.fresh(scene, 16384)
    assert batch.put([Scattered([40_000], counting(40_000)) for _ in range(COUNT)]) == 0
    targets = [Scattered([30_000, 10_000]) for _ in range(COUNT)]
    assert batch.get(targets) == COUNT
    poke(scene.pool, batch.offsets()[1] + place, b"\xff")
    assert batch.get(targets) == 1
    assert batch.get(targets, check_checksums=False) == COUNT
    batch.remove()


@pytest.mark.parametrize("length", [1023, 1025], ids=["the fragments hold more", "and less"])
def test_fragments_that_do_not_match_the_block_store_nothing(scene: Scene, length: int) -> None:
    batch = Batch.fresh(scene, 64)
    sources = [Scattered([1000, 24], counting(1024)) for _ in range(COUNT)]
    assert batch.put(sources, length=length) == -errno.EINVAL
    assert batch.get([Scattered([1000, 24]) for _ in range(COUNT)]) == 0
    assert [source.content() for source in sources] == [counting(1024)] * COUNT
