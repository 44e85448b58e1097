# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks between scattered memory and a pool, against what slices of bytes would do."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beluga import primitives
from beluga._ffi import ffi, lib
from beluga.pool import Pool

STRIPE_SIZE = lib.BL_STRIPE_SIZE
SLACK = 256  # bytes watched on both sides of a block and of a fragment


@pytest.fixture(scope="module", params=["coherent", "non-coherent"])
def pool(request: pytest.FixtureRequest, memory_root: Path) -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    paths = [folder / "a", folder / "b", folder / "c"]
    size = 16 * STRIPE_SIZE
    try:
        with Pool.create(paths, device_size=size, discipline=request.param, sparse=True) as made:
            yield made
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["fastest", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    before = lib.bl_cpu_features()
    lib.bl_cpu_limit(0xFFFFFFFF if request.param == "fastest" else 0)
    yield
    lib.bl_cpu_limit(before)


class Scattered:
    """Fragments of these sizes, apart from each other, each with slack around it."""

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
        """No byte outside the fragments was written."""
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


def counting(size: int) -> bytes:
    return (np.arange(size) % 251).astype(np.uint8).tobytes()


def sums(content: bytes, chunk_size: int) -> list[int]:
    return [
        primitives.crc32c(content[start : start + chunk_size])
        for start in range(0, len(content), chunk_size)
    ]


def write(pool: Pool, offset: int, source: Scattered, chunk_size: int) -> list[int]:
    chunk_count = -(-source.length // chunk_size) if chunk_size else 0
    vector = ffi.new("uint32_t[]", chunk_count + 1)
    vector[chunk_count] = 77
    arguments = (source.fragments, len(source.sizes), source.length, chunk_size, vector)
    assert lib.bl_transfer_write(pool.handle, offset, *arguments) == 0
    assert vector[chunk_count] == 77
    return list(vector)[:chunk_count]


def read(pool: Pool, offset: int, target: Scattered, chunk_size: int, vector: list[int]) -> int:
    given_vector = ffi.new("uint32_t[]", vector) if vector else ffi.NULL
    arguments = (target.fragments, len(target.sizes), target.length, chunk_size, given_vector)
    return int(lib.bl_transfer_read(pool.handle, offset, *arguments))


def round_trip(pool: Pool, offset: int, sizes: list[int], chunk_size: int) -> None:
    content = counting(sum(sizes))
    lines = -(-len(content) // 64) * 64
    poke(pool, offset - SLACK, b"\xfd" * (lines + 2 * SLACK))
    source = Scattered(sizes, content)
    vector = write(pool, offset, source, chunk_size)
    assert vector == (sums(content, chunk_size) if chunk_size else [])
    stored = peek(pool, offset - SLACK, lines + 2 * SLACK)
    padding = bytes(lines - len(content))
    assert stored == b"\xfd" * SLACK + content + padding + b"\xfd" * SLACK
    target = Scattered(list(reversed(sizes)))
    assert read(pool, offset, target, chunk_size, vector) == 0
    assert target.content() == content
    assert target.untouched()


SIZES = [
    [],
    [1],
    [64],
    [4096],
    [100_000],
    [20_000] * 8,
    [0, 10, 0, 0, 300, 0],
    [63, 65, 1, 255, 256, 257, 4095, 4097],
    [1] * 200,
    [128] * 100,
    [3 << 20],
    [(2 << 20) + 5, 11, 70_000],
]


@pytest.mark.parametrize("chunk_size", [0, 1000, 16384, 20_000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_block_comes_back_and_nothing_else_moves(
    pool: Pool, sizes: list[int], chunk_size: int
) -> None:
    data = pool.geometry.data_offset
    for offset in (data + 4096, data + STRIPE_SIZE - 4096):  # the second crosses devices
        round_trip(pool, offset, sizes, chunk_size)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.integers(0, 700), max_size=12), st.integers(0, 900))
def test_any_cut_into_fragments_and_chunks(pool: Pool, sizes: list[int], chunk_size: int) -> None:
    round_trip(pool, pool.geometry.data_offset + STRIPE_SIZE - 4096, sizes, chunk_size)


@pytest.mark.parametrize("place", [0, 16383, 16384, 39_999])
def test_one_wrong_byte_in_the_pool_is_found(pool: Pool, place: int) -> None:
    offset = pool.geometry.data_offset
    vector = write(pool, offset, Scattered([40_000], counting(40_000)), 16384)
    target = Scattered([30_000, 10_000])
    assert read(pool, offset, target, 16384, vector) == 0
    poke(pool, offset + place, b"\xff")
    assert read(pool, offset, target, 16384, vector) == -errno.EBADMSG
    assert read(pool, offset, target, 16384, []) == 0


def test_arguments_that_contradict_each_other_touch_nothing(pool: Pool) -> None:
    data, end = pool.geometry.data_offset, pool.geometry.size
    poke(pool, data, b"\xfd" * 8192)
    source = Scattered([1000, 24], counting(1024))
    for offset, count, length in (
        (data, 2, 1023),  # the fragments hold more
        (data, 2, 1025),  # and less
        (data, 1, 1024),
        (data + 1, 2, 1024),  # not a line
        (end - 960, 2, 1024),  # over the end
        (end + 64, 2, 1024),
        (2**64 - 64, 2, 1024),
    ):
        for transfer in (lib.bl_transfer_write, lib.bl_transfer_read):
            arguments = (offset, source.fragments, count, length, 0, ffi.NULL)
            assert transfer(pool.handle, *arguments) == -errno.EINVAL
    assert peek(pool, data, 8192) == b"\xfd" * 8192
    assert source.content() == counting(1024)
