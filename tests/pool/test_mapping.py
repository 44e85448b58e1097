# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Each device is mapped once, as a whole: a pool of any size costs a mapping or two per device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from beluga._ffi import ffi, lib
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
