# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Open pools, and their attachments."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulation import fewer, needs_a_cpu
from support.refusals import refused

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceForeignError,
    DeviceMismatchError,
    DeviceMissingError,
    DeviceTruncatedError,
    ForkedSessionError,
    FormatError,
    PoolError,
    SuperblockDamagedError,
)
from beluga.pool import Pool

MIB = 1 << 20
SIZE = 8 * MIB


@pytest.fixture
def pool(two: list[Path]) -> list[Path]:
    """Devices of a pool, closed."""
    Pool.create(two, device_size=SIZE, sparse=True).close()
    return two


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_devices_may_be_given_in_any_order(shm: Path) -> None:
    paths = [shm / str(index) for index in range(3)]
    with Pool.create(paths, device_size=SIZE, sparse=True) as made:
        identity = made.id
    for order in itertools.permutations(paths):
        with Pool.open(order) as opened:
            assert opened.id == identity
            assert [device.path for device in opened.devices] == paths
            assert [device.index for device in opened.devices] == [0, 1, 2]


def test_renamed_devices_are_recognized_by_their_superblock(pool: list[Path]) -> None:
    spare = pool[0].with_name("spare")
    pool[0].rename(spare)
    pool[1].rename(pool[0])
    with Pool.open([pool[0], spare]) as opened:
        assert [device.path for device in opened.devices] == [spare, pool[0]]


def test_a_missing_device_is_reported(pool: list[Path]) -> None:
    with refused(DeviceMismatchError, "2 devices", "device 1 "):
        Pool.open(pool[:1])


def test_missing_file_is_refused(pool: list[Path]) -> None:
    pool[1].unlink()
    with refused(DeviceMissingError, str(pool[1])):
        Pool.open(pool)


def test_device_of_another_pool_is_refused(pool: list[Path], shm: Path) -> None:
    others = [shm / "other.0", shm / "other.1"]
    with Pool.create(others, device_size=SIZE, sparse=True) as other:
        identity = other.id
    with refused(DeviceMismatchError, identity[:8], str(others[1])):
        Pool.open([pool[0], others[1]])


def test_device_named_twice_is_refused(pool: list[Path]) -> None:
    with refused(DeviceMismatchError, "same memory"):
        Pool.open([pool[0], pool[0]])


def test_copy_of_a_device_is_refused(pool: list[Path]) -> None:
    copy = pool[0].with_name("copy")
    shutil.copy(pool[0], copy)
    with refused(DeviceMismatchError, "copy"):
        Pool.open([*pool, copy])


def test_truncated_file_is_refused(pool: list[Path]) -> None:
    os.truncate(pool[1], SIZE - 4096)
    with refused(DeviceTruncatedError, str(pool[1]), str(SIZE)):
        Pool.open(pool)


def test_file_truncated_into_its_superblock_is_refused(pool: list[Path]) -> None:
    os.truncate(pool[1], 100)
    with refused(SuperblockDamagedError, str(pool[1])):
        Pool.open(pool)


def test_empty_file_is_refused(pool: list[Path]) -> None:
    os.truncate(pool[1], 0)
    with refused(DeviceForeignError, str(pool[1]), "--create"):
        Pool.open(pool)


def test_foreign_file_is_refused(pool: list[Path]) -> None:
    overwrite(pool[0], 0, os.urandom(4096))
    with refused(DeviceForeignError, "something other"):
        Pool.open(pool)


def test_damaged_superblock_is_refused(pool: list[Path]) -> None:
    overwrite(pool[0], 64, b"\xff\xff")
    with refused(SuperblockDamagedError, str(pool[0])):
        Pool.open(pool)


def test_other_version_is_refused(pool: list[Path]) -> None:
    overwrite(pool[0], 8, (99).to_bytes(4, "little"))
    with refused(FormatError, "99"):
        Pool.open(pool)


def test_no_device_is_refused() -> None:
    with refused(PoolError, "1 to 64 devices"):
        Pool.open([])


def test_a_larger_file_is_used_up_to_the_device_size(pool: list[Path]) -> None:
    os.truncate(pool[0], 2 * SIZE)
    with Pool.open(pool) as opened:
        assert opened.devices[0].size == SIZE


STRIPE = 2 * MIB


def position(
    offset: int, device_count: int, device_size: int, interleaved: bool
) -> tuple[int, int]:
    """Return the place of an offset: (device, offset in the device). This models
    format/interleave.h.
    """
    stripe, inside = divmod(offset, STRIPE)
    if interleaved:
        row, device = divmod(stripe, device_count)
    else:
        device, row = divmod(stripe, device_size // STRIPE - 1)
    return device, (1 + row) * STRIPE + inside


def write(pool: Pool, offset: int, data: bytes) -> None:
    ffi.memmove(lib.bl_pool_address(pool.handle, offset), data, len(data))


def read(pool: Pool, offset: int, size: int) -> bytes:
    return bytes(ffi.buffer(lib.bl_pool_address(pool.handle, offset), size))


def test_bytes_survive_close_and_open(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE) as pool:
        end = pool.geometry.size
        write(pool, pool.geometry.data_offset, b"first")
        write(pool, end - 4, b"last")
    with Pool.open(two[::-1]) as pool:
        assert read(pool, pool.geometry.data_offset, 5) == b"first"
        assert read(pool, end - 4, 4) == b"last"
        assert lib.bl_pool_address(pool.handle, end) == ffi.NULL


def test_one_device_needs_no_list(two: list[Path]) -> None:
    for path in (str(two[0]), two[0]):
        Pool.create(path, device_size=SIZE).close()
        with Pool.open(path) as pool:
            assert [device.path for device in pool.devices] == [two[0]]
        Pool.destroy(path)
        assert not two[0].exists()


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("device_count", [1, 2, 3, 4, 5, 7])
def test_every_stripe_is_at_the_models_offset(
    shm: Path, device_count: int, interleave: bool
) -> None:
    paths = [shm / str(index) for index in range(device_count)]
    with Pool.create(
        paths, device_size=4 * SIZE, interleave=interleave, sparse=True, bulk_size=4096
    ) as pool:
        offsets = [s * STRIPE + s * 64 for s in range(pool.geometry.size // STRIPE)]
        for offset in offsets:
            write(pool, offset, (offset + 1).to_bytes(8, "little"))
    files = [path.open("rb") for path in paths]
    for offset in offsets:
        device, at = position(offset, device_count, 4 * SIZE, interleave)
        assert os.pread(files[device].fileno(), 8, at) == (offset + 1).to_bytes(8, "little")
    for file in files:
        file.close()


@pytest.mark.parametrize(("device_count", "interleave"), [(3, True), (4, True), (3, False)])
def test_addresses_match_the_model(shm: Path, device_count: int, interleave: bool) -> None:
    paths = [shm / str(index) for index in range(device_count)]
    with Pool.create(paths, device_size=1 << 30, interleave=interleave, sparse=True) as pool:

        def address(offset: int) -> int:
            return int(ffi.cast("uintptr_t", lib.bl_pool_address(pool.handle, offset)))

        first = [0] * device_count
        for offset in range(0, pool.geometry.size, STRIPE):
            device, at = position(offset, device_count, 1 << 30, interleave)
            if at == STRIPE:
                first[device] = address(offset) - at

        @settings(max_examples=fewer(200))
        @given(st.integers(0, pool.geometry.size - 1))
        def compare(offset: int) -> None:
            device, at = position(offset, device_count, 1 << 30, interleave)
            assert address(offset) == first[device] + at

        compare()
        assert all(base % STRIPE == 0 for base in first)


def test_slices_of_one_file_are_pools_of_their_own(shm: Path) -> None:
    file = shm / "file"
    file.write_bytes(b"\xaa" * 2 * MIB + bytes(20 * MIB) + b"\xbb" * 2 * MIB)
    low, high = f"{file}@2MiB+8MiB", f"{file}@10MiB+8MiB"
    with Pool.create([low]) as first, Pool.create([high]) as second:
        for pool, byte in ((first, b"\x11"), (second, b"\x22")):
            for offset in range(0, pool.geometry.size, STRIPE):
                write(pool, offset, byte * STRIPE)
        assert first.id != second.id
        assert first.runtime_dir != second.runtime_dir
        assert first.devices[0].offset == 2 * MIB
    data = file.read_bytes()
    assert data[: 2 * MIB] == b"\xaa" * 2 * MIB
    assert data[4 * MIB : 10 * MIB] == b"\x11" * 6 * MIB
    assert data[12 * MIB : 18 * MIB] == b"\x22" * 6 * MIB
    assert data[18 * MIB : 22 * MIB] == bytes(4 * MIB)
    assert data[22 * MIB :] == b"\xbb" * 2 * MIB
    with refused(DeviceForeignError):
        Pool.open([file])


def test_each_device_may_have_its_own_coherence(two: list[Path]) -> None:
    named = ["software", "hardware"]
    Pool.create(two, device_size=SIZE, sparse=True, coherence=named).close()
    with Pool.open(two[::-1]) as pool:
        assert [device.coherence for device in pool.devices] == named


@pytest.mark.parametrize(
    ("named", "recorded"),
    [(None, "hardware"), ("hardware", "hardware"), ("software", "software")],
)
def test_coherence_is_recorded(two: list[Path], named: str | None, recorded: str) -> None:
    Pool.create(two, device_size=SIZE, sparse=True, coherence=named).close()
    with Pool.open(two) as pool:
        assert {device.coherence for device in pool.devices} == {recorded}


def test_concatenation_is_recorded(two: list[Path]) -> None:
    Pool.create(two, device_size=SIZE, sparse=True, interleave=False).close()
    with Pool.open(two) as pool:
        assert not pool.geometry.interleaved


def test_views_have_the_specified_values(two: list[Path]) -> None:
    Pool.create(two, device_size=SIZE, sparse=True).close()
    with Pool.open([f"{two[0]},link=cxl0,node=0", two[1]]) as pool:
        assert (pool.devices[0].link, pool.devices[0].node) == ("cxl0", 0)
        assert (pool.devices[1].link, pool.devices[1].node) == (None, None)
        assert pool.devices[1].stripe_count == 4
        assert pool.devices[1].kind == "file"


def test_closed_pool_has_no_handle(two: list[Path]) -> None:
    pool = Pool.create(two, device_size=SIZE, sparse=True)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        _ = pool.handle


def in_child(body: Callable[[], object]) -> int:
    """Return the wait status of a forked child that calls ``body``."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def test_a_forked_child_cannot_use_the_handle(two: list[Path]) -> None:
    def child() -> None:
        with refused(ForkedSessionError, "parent"):
            _ = pool.handle
        pool.close()

    with Pool.create(two, device_size=SIZE, sparse=True) as pool:
        assert in_child(child) == 0
        assert read(pool, 0, 1) == b"\0"


@needs_a_cpu("it leaves out MADV_DONTFORK")
def test_a_forked_child_has_no_mapping(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE, sparse=True) as pool:
        address = lib.bl_pool_address(pool.handle, 0)

        def child() -> None:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            bytes(ffi.buffer(address, 8))

        assert os.WTERMSIG(in_child(child)) == signal.SIGSEGV


def test_a_destroyed_pool_cannot_be_opened(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE, sparse=True) as pool:
        (pool.runtime_dir / "lock").touch()
    Pool.destroy(two)
    assert list(two[0].parent.iterdir()) == []
    with refused(DeviceMissingError):
        Pool.open(two)


def test_damaged_pool_can_be_destroyed(two: list[Path]) -> None:
    Pool.create(two, device_size=SIZE, sparse=True).close()
    with two[0].open("r+b") as file:
        file.seek(64)
        file.write(b"\xff")
    Pool.destroy(two)
    assert not two[0].exists()


def test_destroy_leaves_a_sliced_file(shm: Path) -> None:
    file = shm / "file"
    file.touch()
    os.truncate(file, 16 * MIB)
    Pool.create([f"{file}@0+8MiB"]).close()
    Pool.create([f"{file}@8MiB+8MiB"]).close()
    Pool.destroy([f"{file}@0+8MiB"])
    assert file.stat().st_size == 16 * MIB
    with refused(DeviceForeignError):
        Pool.open([f"{file}@0+8MiB"])
    Pool.open([f"{file}@8MiB+8MiB"]).close()


def test_destroy_changes_nothing_if_one_device_is_foreign(two: list[Path], shm: Path) -> None:
    Pool.create(two, device_size=SIZE, sparse=True).close()
    (shm / "thesis").write_text("call me Ishmael")
    with refused(DeviceForeignError, "nothing was destroyed"):
        Pool.destroy([*two, shm / "thesis"])
    assert (shm / "thesis").read_text() == "call me Ishmael"
    Pool.open(two).close()
