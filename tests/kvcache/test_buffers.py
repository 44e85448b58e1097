# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The memory of blocks: buffers, arrays, tensors and runs of addresses that a cache accepts."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from beluga import KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.errors import CacheError, LayoutError
from beluga.index import BlockState, IndexClient, IndexServer
from beluga.kvcache import PutResult, Run, buffers
from tests.kvcache.conftest import digests, payload

MEMORY = np.zeros(64, dtype=np.uint8)
AT = MEMORY.ctypes.data


def runs(blocks: Any, *, writable: bool) -> list[Run]:
    return buffers.runs(blocks, len(blocks), writable=writable)


def test_an_array_is_a_batch_of_its_first_axis() -> None:
    array = np.zeros((4, 3, 8), dtype=np.float32)
    (run,) = runs(array[::2], writable=True)
    assert (run.start, run.count, run.length, run.fragment_count) == (0, 2, 96, 1)
    assert run.fragments[:, 0].tolist() == [array.ctypes.data, array.ctypes.data + 192]


def test_blocks_of_different_shapes_make_runs() -> None:
    found = runs([b"ab", b"cd", [b"a", b"b"], b"xyz"], writable=False)
    assert [(r.start, r.count, r.length, r.fragment_count) for r in found] == [
        (0, 2, 2, 1),
        (2, 1, 2, 2),
        (3, 1, 3, 1),
    ]


@pytest.mark.parametrize(
    "blocks",
    [
        [np.zeros((4, 4), dtype=np.uint8)[:, ::2]],
        np.zeros((4, 4), dtype=np.uint8).T,
        np.zeros(8, dtype=np.uint8),
        [b""],
        ["text"],
        [object()],
    ],
    ids=["strided", "transposed", "one axis", "empty", "text", "no buffer"],
)
def test_unusable_memory_is_refused_with_one_line(blocks: object) -> None:
    with pytest.raises(LayoutError) as caught:
        runs(blocks, writable=False)
    assert "\n" not in str(caught.value)


def test_read_only_targets_are_refused() -> None:
    array = np.zeros((2, 8), dtype=np.uint8)
    array.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        runs(array, writable=True)
    with pytest.raises(LayoutError, match="need a writable, contiguous buffer, but got bytes"):
        runs([b"bytes"], writable=True)
    with pytest.raises(LayoutError, match="need a contiguous buffer, but got memoryview"):
        runs([memoryview(b"bytes")[::2]], writable=False)


def test_targets_that_overlap_are_refused() -> None:
    """The second block would overwrite the first one, which counts as a hit."""
    whole, ids = np.zeros(96), np.array([[AT, 8], [AT + 8, 8]], np.uint64)
    apart = [whole[:32], [whole[64:], whole[40:48]], whole[32:40]]
    assert len(runs(apart, writable=True)) == 3
    for targets in (
        [whole[:64], whole[:64]],
        [whole[:64], whole[32:]],
        [whole[32:], whole[:33]],
        [whole[:8], [whole[64:], whole[7:9]]],
        np.lib.stride_tricks.as_strided(whole, (3, 64), (0, 8)),
        np.lib.stride_tricks.as_strided(whole, (3, 8), (56, 8)),
        list(np.lib.stride_tricks.as_strided(whole, (3, 64), (0, 8))),  # as torch's expand
        Run(2, 8, 1, ids[[0, 0]]),
    ):
        with pytest.raises(LayoutError, match="the target blocks overlap"):
            runs(targets, writable=True)
    assert len(runs([whole[:64], whole[:64]], writable=False)) == 1  # sources may
    assert len(runs(Run(2, 8, 1, ids[::-1].copy()), writable=True)) == 1


def test_bytes_bytearrays_and_memoryviews_go_through_a_cache(cache: KVCache) -> None:
    source = payload(1, 3000)[0].tobytes()
    names = digests(3)
    assert cache.put(names, [source, bytearray(source), memoryview(source)]).stored == 3
    targets = [bytearray(3000), bytearray(3000), memoryview(bytearray(3000))]
    assert cache.get(names, targets).hits == 3
    assert all(bytes(target) == source for target in targets)


def test_a_batch_of_mixed_lengths_stops_at_the_first_miss(cache: KVCache) -> None:
    cache.put(digests(2), [b"a" * 10, b"b" * 20])
    targets = [bytearray(10), bytearray(20), bytearray(10)]
    assert cache.get(digests(3), targets).hits == 2
    assert targets[1] == b"b" * 20


def run_of(*rows: tuple[int, int], **fields: Any) -> Run:
    usual = {"count": 1, "length": 16, "fragment_count": 2, "owners": [MEMORY]}
    return Run(**({"fragments": np.array(rows, dtype=np.uint64)} | usual | fields))


def test_a_run_at_the_limits_is_accepted() -> None:
    for run in (
        run_of((AT, 15), (AT + 15, 1)),
        run_of((AT, 16), (AT, 0)),
        run_of((1, 1), count=1, length=1, fragment_count=1),
        run_of(((1 << 64) - 17, 16), fragment_count=1),
    ):
        assert runs(run, writable=True) == [run]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of((AT, 8), (AT, 8), start=1), "run.start is 1, so the run is part of another batch"),
        (run_of((AT, 8), (AT, 8), count=-1), "at least one block"),
        (run_of((AT, 0), length=0, fragment_count=1), "at least one block"),
        (run_of(fragment_count=0), "at least one block"),
        (run_of(fragments=[(AT, 8), (AT, 8)]), "C-contiguous uint64"),
        (run_of(fragments=np.full((2, 2), 8, dtype=np.int64)), "C-contiguous uint64"),
        (run_of((AT, 16)), r"array of shape \(2, 2\)"),
        (run_of(fragments=np.full((2, 2), 8, np.uint64, order="F")), "C-contiguous uint64"),
        (run_of((AT, 8), (AT, 9)), "run.length is 16"),
        (run_of((AT, 32), (AT, (1 << 64) - 16)), "run.length is 16"),
        (run_of((0, 8), (AT, 8)), "address 0"),
        (run_of((AT, 8), ((1 << 64) - 4, 8)), "after the last address"),
    ],
)
def test_an_inconsistent_run_is_rejected(run: Run, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        run.refuse_wrong()


def test_a_read_only_run_of_memory_is_rejected_as_a_target() -> None:
    run = dataclasses.replace(run_of((AT, 8), (AT + 8, 8)), read_only=True)
    assert runs(run, writable=False) == [run]
    with pytest.raises(LayoutError, match="read-only"):
        runs(run, writable=True)


class Tensor:
    """The attributes of a torch tensor that describe its memory."""

    def __init__(self, device: str = "cpu", *, contiguous: bool = True) -> None:
        self.array = np.arange(12, dtype=np.uint16)
        self.device, self.contiguous = SimpleNamespace(type=device), contiguous

    def is_contiguous(self) -> bool:
        return self.contiguous

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return math.prod(self.array.shape)

    def element_size(self) -> int:
        return self.array.itemsize


def test_a_tensor_is_stored_as_bytes_and_kept_alive() -> None:
    tensor: Any = Tensor()
    (run,) = runs([tensor], writable=True)
    assert run.fragments.tolist() == [[tensor.data_ptr(), 24]]
    assert list(run.owners) == [tensor]


@pytest.mark.parametrize("tensor", [Tensor("cuda"), Tensor(contiguous=False)])
def test_a_tensor_on_a_device_or_not_contiguous_is_rejected(tensor: Any) -> None:
    with pytest.raises(LayoutError, match="contiguous and in CPU memory"):
        runs([tensor], writable=False)


def test_an_empty_batch_has_no_runs_and_empty_blocks_are_rejected() -> None:
    assert runs([], writable=False) == []
    assert runs(np.zeros((0, 8), dtype=np.uint8), writable=True) == []
    with pytest.raises(LayoutError, match="are empty"):
        runs(np.zeros((2, 0), dtype=np.uint8), writable=False)


def test_a_block_refused_without_a_reason_raises() -> None:
    states = np.array([BlockState.GRANTED, BlockState.REFUSED], dtype=np.uint8)
    result = PutResult(states, np.zeros(2, dtype=np.int32))
    with pytest.raises(CacheError, match="no error code"):
        result.raise_for_refused()
    PutResult(states[:1], np.zeros(1, dtype=np.int32)).raise_for_refused()


def test_keys_of_a_cache_are_contiguous_pairs(cache: KVCache) -> None:
    pairs = np.arange(8, dtype=np.uint64).reshape(2, 4)[:, ::2]
    assert cache.keys(pairs).tolist() == pairs.tolist()
    assert cache.keys(pairs).flags.c_contiguous


COUNT, PARTS, SIZE = 5, 3, 4096


def scattered(memory: np.ndarray) -> Run:
    """Return blocks whose fragments lie apart: memory has the axes (part, block, byte)."""
    fragments = np.empty((COUNT, PARTS, 2), dtype=np.uint64)
    for block in range(COUNT):
        for part in range(PARTS):
            fragments[block, part] = memory[part, block].ctypes.data, SIZE
    return Run(COUNT, PARTS * SIZE, PARTS, fragments.reshape(-1, 2), [memory])


def test_a_run_is_gathered_and_scattered(cache: KVCache) -> None:
    source = payload(PARTS * COUNT, SIZE).reshape(PARTS, COUNT, SIZE)
    target = np.zeros_like(source)
    assert cache.put(digests(COUNT), scattered(source)).stored == COUNT
    assert cache.get(digests(COUNT), scattered(target)).hits == COUNT
    assert (source == target).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_several_threads_read_and_detect_the_damaged_block(
    pool: Pool, server: IndexServer, threads: int
) -> None:
    count, size = 12, 100_000
    source = payload(count, size)
    target = np.zeros_like(source)
    with KVCache(pool, namespace="threads", threads=threads) as cache:
        assert cache.put(digests(count), source).stored == count
        assert cache.get(digests(count), target).hits == count
        assert (source == target).all()
        place = IndexClient(cache.client).lookup(cache.keys(digests(count))).hits[7].offset
        ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, place + 64))[0] ^= 1
        result = cache.get(digests(count), target)
        assert (result.hits, result.mismatches) == (7, 1)
        hit, miss = BlockState.HIT, BlockState.MISS
        assert result.states.tolist() == [hit] * 7 + [miss] + [hit] * 4


def test_a_run_must_have_a_key_for_each_block(cache: KVCache) -> None:
    with pytest.raises(LayoutError, match="4 keys but 5 blocks"):
        cache.put(digests(4), scattered(payload(PARTS * COUNT, SIZE).reshape(PARTS, COUNT, SIZE)))


def test_pins_hold_blocks_until_they_are_released_once(pool: Pool, cache: KVCache) -> None:
    cache.put(digests(3), payload(3, SIZE))
    pins = cache.pin(digests(5))
    assert pins.count == 3
    assert cache.stat().pinned_count == 3
    assert cache.release(pins) == 3
    assert cache.stat().pinned_count == 0
    assert cache.release(pins) == 0
    assert cache.pin(digests(2, start=10)).count == 0


def test_pins_end_with_the_session(pool: Pool, server: IndexServer, cache: KVCache) -> None:
    cache.put(digests(3), payload(3, SIZE))
    with KVCache(pool, namespace="test") as other:
        assert other.pin(digests(3)).count == 3
        assert cache.stat().pinned_count == 3
    assert cache.stat().pinned_count == 0
