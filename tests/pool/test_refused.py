# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Errors that must not be ignored, and space that must not be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from beluga.errors import NoRoomError, PoolError
from beluga.pool import Pool

SIZE = 16 << 20


def test_a_device_smaller_than_a_pool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(2 << 20))
    with pytest.raises(NoRoomError, match="at least 4 MiB"):
        Pool.create([path], force=True)


def test_prefault_allocates_no_space_in_sparse_files(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=SIZE, sparse=True) as pool:
        before = (shm / "a").stat().st_blocks
        pool.prefault()
        assert (shm / "a").stat().st_blocks == before


def test_a_file_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pool.create([tmp_path / "a"], device_size=SIZE, sparse=True).close()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PoolError):
        Pool.destroy([tmp_path / "a"])
