# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Storages of tiers, owned and brought, their views, and copies of blocks between any two."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beluga import Pool
from beluga.errors import LayoutError, TierError
from beluga.pool import STRIPE_SIZE
from beluga.tiers import MemoryType, Storage, TierBlocks, copy_blocks
from beluga.transfer import BlockLayout, CudaDriver, HostDriver, View, arrangements

LENGTH, COUNT = 4096, 6


@pytest.fixture(scope="module")
def driver(compiled: None) -> Iterator[CudaDriver]:
    driver = HostDriver()
    yield driver
    gc.collect()  # the storages of this module
    driver.close()


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=16 << 20, sparse=True) as pool:
        yield pool


def data(pool: Pool) -> int:
    """An offset in the pool's data, 8 KiB ahead of the end of a stripe."""
    return pool.geometry.size - STRIPE_SIZE - 2 * LENGTH


class Cuda:
    """Memory with CUDA's interface and no other."""

    def __init__(self, address: int, shape: tuple[int, ...], **more: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f2",
            "data": (address, False),
            "version": 3,
            **more,
        }


class Tensor:
    """The part of a torch tensor that beluga uses."""

    def __init__(self, array: np.ndarray[Any, Any], kind: str, *, pinned: bool = False) -> None:
        self.array, self.pinned = array, pinned
        self.device = type("Device", (), {"type": kind})
        self.shape = array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

    def is_pinned(self) -> bool:
        return self.pinned


class Dlpack:
    """An array that has nothing but DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> object:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> object:
        return self.array.__dlpack_device__()


def test_owned_memory_is_zeroed_and_has_its_type(driver: CudaDriver) -> None:
    plain, pinned = Storage.allocate(5000), Storage.pinned(5000, driver)
    assert (plain.type, pinned.type) == (MemoryType.SYSTEM, MemoryType.PINNED)
    for storage in (plain, pinned):
        assert storage.is_owned
        assert storage.array().shape == (5000,)
        assert not storage.array().any()


def test_pinned_memory_that_is_used_again_is_zeroed_again() -> None:
    class Reusing:
        """A driver that hands out dirty memory."""

        def pin(self, size: int) -> Any:
            return type("Pinned", (), {"array": np.full(size, 7, np.uint8), "address": 0})

        def unpin(self, pinned: Any) -> None:
            pass

    assert not Storage.pinned(100, Reusing()).array().any()  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_of_zero_is_an_error(size: int, driver: CudaDriver, pool: Pool) -> None:
    makers: tuple[Callable[[int], Storage], ...] = (
        Storage.allocate,
        lambda size: Storage.pinned(size, driver),
        lambda size: Storage.device(size, driver),
        lambda size: Storage.of_pool(pool, 0, size),
    )
    for make in makers:
        with pytest.raises(TierError, match=f"a storage of {size} bytes; it needs at least one"):
            make(size)
    with pytest.raises(TierError, match="finds no memory in a ndarray"):
        Storage.of(np.zeros(0, np.uint8))


def test_pinned_memory_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(TierError, match="pinned memory needs a GPU: the CUDA engine needs cupy"):
        Storage.pinned(4096)
    with pytest.raises(TierError, match="GPU memory needs a GPU"):
        Storage.device(4096)


def test_memory_is_freed_with_its_last_view(driver: HostDriver) -> None:
    storage = Storage.pinned(4096, driver)
    address, view = storage.address(), storage.view((4096,), "U8")
    bytes_ = storage.array()
    storage.close()
    storage.close()
    with pytest.raises(TierError, match="the storage is closed"):
        storage.address()
    gc.collect()
    bytes_[:] = 3
    assert address in driver._maps
    del bytes_
    gc.collect()
    assert address in driver._maps, "a view of it exists"
    del view
    gc.collect()
    assert address not in driver._maps


def test_memory_that_is_brought_is_used_in_place() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    anonymous = mmap.mmap(-1, 8192)
    brought = {
        "numpy": (Storage.of(array), array.ctypes.data, 96, MemoryType.SYSTEM),
        "torch": (Storage.of(Tensor(array, "cpu")), array.ctypes.data, 96, MemoryType.SYSTEM),
        "pinned": (
            Storage.of(Tensor(array, "cpu", pinned=True)),
            array.ctypes.data,
            96,
            MemoryType.PINNED,
        ),
        "torch on a GPU": (
            Storage.of(Tensor(array, "cuda")),
            array.ctypes.data,
            96,
            MemoryType.DEVICE,
        ),
        "CUDA": (Storage.of(Cuda(0x5000, (4, 8))), 0x5000, 64, MemoryType.DEVICE),
        "DLPack": (Storage.of(Dlpack(array)), array.ctypes.data, 96, MemoryType.SYSTEM),
        "mmap": (
            Storage.of(anonymous),
            np.frombuffer(anonymous, np.uint8).ctypes.data,
            8192,
            MemoryType.SYSTEM,
        ),
    }
    for name, (storage, address, size, kind) in brought.items():
        assert (storage.address(), storage.size, storage.type) == (address, size, kind), name
        assert not storage.is_owned, name
    brought["numpy"][0].array().view(np.float32)[0] = 99
    assert array[0, 0, 0] == 99


def test_what_is_brought_stays_alive() -> None:
    array = np.ones(100, np.uint8)
    seen = weakref.ref(array)
    storage = Storage.of(array)
    del array
    gc.collect()
    assert seen() is not None
    assert storage.array().sum() == 100
    storage.close()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros((4, 4), np.uint8)[:, ::2], "has gaps"),
        (Cuda(0x5000, (4, 8), strides=(32, 2)), "finds no memory in a Cuda"),
        (object(), "finds no memory in a object"),
        (7, "finds no memory in a int"),
        (np.array([object()]), "finds no memory in a ndarray"),
    ],
)
def test_memory_with_gaps_or_without_an_address_is_refused(wrong: object, message: str) -> None:
    with pytest.raises(TierError, match=message):
        Storage.of(wrong)


def test_read_only_memory_stays_so() -> None:
    storage = Storage.of(b"x" * LENGTH)
    assert storage.view((LENGTH,), "U8").read_only
    blocks, other = (
        TierBlocks.of_storage(storage, LENGTH),
        TierBlocks.of_storage(Storage.allocate(LENGTH), LENGTH),
    )
    with pytest.raises(ValueError, match="read-only"):
        storage.array()[0] = 1
    with pytest.raises(LayoutError, match="the target's memory is read-only"):
        copy_blocks(other, [0], blocks, [0])
    copy_blocks(blocks, [0], other, [0])


@pytest.mark.parametrize(
    ("dtype", "size"), [("F32", 4), ("F16", 2), ("BF16", 2), ("FP8", 1), ("U8", 1)]
)
def test_a_view_has_the_elements_of_its_type_and_stays_in_its_storage(
    dtype: str, size: int
) -> None:
    storage = Storage.allocate(24 * size)
    view = storage.view((4, 6), dtype)
    assert view.address(1, 2) == storage.address() + 8 * size
    assert view.slice(1, 2, 4).address(3) == storage.address() + 20 * size
    assert storage.view((2, 6), dtype, offset=12 * size).address() == storage.address(12 * size)
    columns = storage.view((6, 4), dtype, element_strides=(1, 6))
    assert columns.address(1, 2) == storage.address() + 13 * size
    for shape, offset in (((5, 5), 0), ((4, 6), size)):
        with pytest.raises(LayoutError, match="the memory has"):
            storage.view(shape, dtype, offset=offset)
    with pytest.raises(LayoutError, match="elements of type F99; known are F32"):
        storage.view((1,), "F99")


def test_a_range_of_a_pool_has_views_within_a_stripe(pool: Pool) -> None:
    storage = Storage.of_pool(pool, data(pool), COUNT * LENGTH)
    assert storage.view((2, LENGTH), "U8").address(1) == storage.address(LENGTH)
    with pytest.raises(LayoutError, match="the memory has 8192"):
        storage.view((3, LENGTH), "U8")
    assert storage.view((4, LENGTH), "U8", offset=2 * LENGTH).start == storage.address(2 * LENGTH)
    with pytest.raises(TierError, match="are not in a pool of"):
        Storage.of_pool(pool, pool.geometry.size - 1, 2)
    with pytest.raises(TierError, match="does not touch"):
        storage.array()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        storage.address()


def engine_blocks(rng_seed: int) -> tuple[TierBlocks, np.ndarray[Any, Any]]:
    """The tensors of an engine of two layers, whose blocks are of LENGTH bytes."""
    shape = (2, COUNT, 16, 4, LENGTH // 256)
    tensors = np.random.default_rng(rng_seed).integers(0, 256, (2, *shape), np.uint8)
    layout = arrangements.vllm([View.of(tensor) for tensor in tensors])
    assert layout.length == LENGTH
    return TierBlocks.of_layout(layout, MemoryType.SYSTEM), tensors


def block_bytes(tensors: np.ndarray[Any, Any], block: int) -> bytes:
    return b"".join(tensors[layer, kv, block].tobytes() for layer in (0, 1) for kv in (0, 1))


def test_blocks_are_copied_from_any_tier_to_any_other(driver: CudaDriver, pool: Pool) -> None:
    """Engine -> pinned -> GPU -> pool -> pool -> system -> engine: the bytes are those of the
    beginning, and the blocks beside them are as they were.
    """
    first, tensors = engine_blocks(1)
    last, others = engine_blocks(2)
    before = others.copy()
    size = COUNT * LENGTH
    tiers = [
        TierBlocks.of_storage(storage, LENGTH)
        for storage in (
            Storage.pinned(size, driver),
            Storage.device(size, driver),
            Storage.of_pool(pool, data(pool), size),
            Storage.of_pool(pool, data(pool) - STRIPE_SIZE, size),
            Storage.allocate(size),
        )
    ]
    places = [[1, 4], [0, 5], [3, 2], [1, 2], [5, 0], [2, 3], [4, 0]]
    hops = [first, *tiers, last]
    for hop in range(len(hops) - 1):
        copy_blocks(hops[hop], places[hop], hops[hop + 1], places[hop + 1])
    assert [block_bytes(others, block) for block in (4, 0)] == [
        block_bytes(tensors, block) for block in (1, 4)
    ]
    for block in (1, 2, 3, 5):
        assert block_bytes(others, block) == block_bytes(before, block)


def test_blocks_of_two_layouts_have_the_same_bytes_in_the_order_of_the_pool() -> None:
    first, tensors = engine_blocks(1)
    plain = Storage.allocate(COUNT * LENGTH)
    copy_blocks(first, [3], TierBlocks.of_storage(plain, LENGTH), [1])
    assert plain.array()[LENGTH : 2 * LENGTH].tobytes() == block_bytes(tensors, 3)
    uneven = BlockLayout(  # fragments that end elsewhere
        [View.of(np.zeros((COUNT, 64, 2 * LENGTH // 64), np.uint8)[:, :, : LENGTH // 64])],
        ("block", "token", "dim"),
    )
    third = TierBlocks.of_layout(uneven, MemoryType.SYSTEM)
    copy_blocks(first, [3], third, [2])
    copy_blocks(third, [2], TierBlocks.of_storage(plain, LENGTH), [4])
    assert plain.array()[4 * LENGTH : 5 * LENGTH].tobytes() == block_bytes(tensors, 3)


def test_copies_that_do_not_fit_are_refused_and_move_nothing(pool: Pool) -> None:
    blocks = TierBlocks.of_storage(Storage.allocate(COUNT * LENGTH), LENGTH)
    small = TierBlocks.of_storage(Storage.allocate(COUNT * LENGTH), LENGTH // 2)
    pooled = TierBlocks.of_storage(Storage.of_pool(pool, data(pool), COUNT * LENGTH), LENGTH)
    for target, source_blocks, chosen in (
        (small, [0], [0]),
        (blocks, [0, 1], [0]),
        (blocks, [COUNT], [0]),
        (blocks, [0], [-1]),
        (pooled, [0], [COUNT]),
    ):
        with pytest.raises(LayoutError):
            copy_blocks(blocks, source_blocks, target, chosen)
    copy_blocks(blocks, [], blocks, [])
    with pytest.raises(TierError, match="no block of 9999999 bytes fits"):
        TierBlocks.of_storage(Storage.allocate(4096), 9999999)
    with pytest.raises(TierError, match="begin with a line"):
        TierBlocks.of_storage(Storage.of_pool(pool, data(pool), 4096), 100)
    gpu = TierBlocks.of_storage(Storage.of(Cuda(0x5000, (LENGTH // 2,))), LENGTH)
    with pytest.raises(LayoutError, match="needs a driver"):
        copy_blocks(gpu, [0], blocks, [0])
