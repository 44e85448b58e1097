# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Each device is mapped once, as a whole: a pool of any size costs a mapping or two per device."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.emulation import needs_a_cpu

from beluga._ffi import ffi, lib
from beluga.errors import DeviceTruncatedError
from beluga.pool import Pool

TIB = 1 << 40


def mapping_count(path: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(f" {path}") for line in lines)


def directory_for_tebibytes(*candidates: Path) -> Path:
    for candidate in candidates:
        probe = candidate / "probe"
        try:
            probe.touch()
            os.truncate(probe, TIB)
        except OSError:
            continue
        finally:
            probe.unlink(missing_ok=True)
        return candidate
    pytest.skip("no filesystem here takes sparse files of 1 TiB")


@needs_a_cpu("it keeps a word for each page that is mapped: 8 GiB per device")
@pytest.mark.parametrize("interleave", [True, False])
def test_eight_tebibytes_are_at_most_two_mappings_per_device(
    shm: Path, tmp_path: Path, interleave: bool
) -> None:
    directory = directory_for_tebibytes(shm, tmp_path)
    paths = [directory / f"huge.{index}" for index in range(8)]
    with Pool.create(
        paths, device_size=TIB, interleave=interleave, sparse=True, max_blocks=4096
    ) as made:
        assert made.geometry.size > 7.99 * TIB
    with Pool.open(paths) as pool:
        for offset in range(0, pool.geometry.size, TIB // 4):
            assert ffi.buffer(lib.bl_pool_address(pool.handle, offset), 8)[:] == bytes(8)
        counts = [mapping_count(path) for path in paths]
        assert all(1 <= count <= 2 for count in counts)
    assert sum(mapping_count(path) for path in paths) == 0


def test_a_process_maps_a_pool_once_however_often_it_opens_it(shm: Path) -> None:
    paths = [shm / "a", shm / "b"]
    made = Pool.create(paths, device_size=16 << 20, sparse=True)
    pools = [made, *(Pool.open(order) for order in (paths[::-1], paths))]
    assert [mapping_count(path) for path in paths] == [1, 1]
    assert len({pool.handle for pool in pools}) == 1
    pools[0].close()
    with pytest.raises(ValueError, match="closed"):
        pools[0].using()
    assert ffi.buffer(lib.bl_pool_address(pools[1].handle, 0), 8)[:]  # the others still use it
    with pools[1].using():
        for pool in pools[1:]:
            pool.close()
        assert [mapping_count(path) for path in paths] == [1, 1]
    assert [mapping_count(path) for path in paths] == [0, 0]
    with Pool.open(paths):
        assert [mapping_count(path) for path in paths] == [1, 1]


def test_a_recreated_pool_can_be_mapped_together_with_the_old_one(shm: Path) -> None:
    paths = [shm / "a"]
    with Pool.create(paths, device_size=16 << 20, sparse=True) as old:
        with Pool.create(paths, sparse=True, force=True) as new:
            assert old.handle != new.handle
            assert old.id != new.id
        with Pool.open(paths) as new:
            assert new.id != old.id
            assert old.handle != new.handle


def test_a_truncated_pool_is_rejected_although_it_is_mapped(shm: Path) -> None:
    path = shm / "a"
    with Pool.create([path], device_size=16 << 20, sparse=True):
        pass
    with Pool.open([path]):
        os.truncate(path, 8 << 20)
        with pytest.raises(DeviceTruncatedError):
            Pool.open([path])
        os.truncate(path, 16 << 20)


@needs_a_cpu("it leaves out MADV_DONTFORK")
def test_a_forked_child_maps_a_pool_again(shm: Path) -> None:
    path = shm / "a"
    Pool.create([path], device_size=16 << 20, sparse=True).close()
    with Pool.open([path]) as pool:
        child = os.fork()
        if child == 0:
            wrong = 1
            try:
                with Pool.open([path]) as _:
                    wrong = int(mapping_count(path) != 1)
                wrong += int(mapping_count(path) != 0)
                pool.close()
            finally:
                os._exit(wrong)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert mapping_count(path) == 1


def test_threads_that_open_and_close_leave_nothing_mapped(shm: Path) -> None:
    path = shm / "a"
    Pool.create([path], device_size=16 << 20, sparse=True).close()

    def use(_: int) -> bytes:
        with Pool.open([path]) as pool, pool.using() as handle:
            return bytes(ffi.buffer(lib.bl_pool_address(handle, 0), 64))

    with ThreadPoolExecutor(8) as threads:
        superblocks = set(threads.map(use, range(400)))
    assert len(superblocks) == 1
    assert mapping_count(path) == 0
