# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What memory a cache takes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from beluga import KVCache
from beluga.errors import LayoutError
from beluga.kvcache.buffers import runs
from tests.kvcache.conftest import digests, payload


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
        runs(blocks, writable=False)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_read_only_targets_are_refused() -> None:
    array = np.zeros((2, 8), dtype=np.uint8)
    array.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        runs(array, writable=True)
    with pytest.raises(LayoutError, match="writable"):
        runs([b"bytes"], writable=True)


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


def test_torch_tensors_in_cpu_memory_go_through_a_cache(cache: KVCache) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source = torch.arange(6000, dtype=torch.float16).reshape(2, 3000)
    target = torch.zeros_like(source)
    assert cache.put(digests(2), list(source)).stored == 2
    assert cache.get(digests(2), list(target)).hits == 2
    assert torch.equal(source, target)
    with pytest.raises(LayoutError, match="contiguous"):
        cache.put(digests(1), [source.T])
