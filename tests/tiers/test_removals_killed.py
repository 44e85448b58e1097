# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Removed blocks stay removed when the server is killed, even if its store cannot delete."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import removal_server
from removal_scene import LENGTH, POOL_BYTES, content, digest
from support.blocks import eventually

from beluga import KVCache, Pool

COUNT = 8


@contextlib.contextmanager
def serving(path: Path, *folders: Path | str, parked: int = 0) -> Iterator[KVCache]:
    """A cache with a server that is killed at the end, and that starts with that many removals in
    absent stores.
    """
    command = [sys.executable, removal_server.__file__, str(path), *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"serving %d\n" % parked
            with Pool.open([path]) as pool, KVCache(pool, namespace="test", timeout_s=60) as cache:
                yield cache
                process.kill()
        finally:
            process.kill()


def test_a_killed_server_loses_no_removal(shm: Path, tmp_path: Path) -> None:
    path = shm / "pool"
    Pool.create([path], device_size=POOL_BYTES, sparse=True).close()
    names = [digest(number) for number in range(COUNT)]
    target = np.zeros((COUNT, LENGTH), np.uint8)
    with serving(path, tmp_path) as cache:
        cache.put(names, np.concatenate([content(number, 0) for number in range(COUNT)]))
        assert eventually(lambda: len(list(tmp_path.glob("beluga-1*"))) == COUNT)
        assert cache.remove(names[:4]) == 4
    for _ in range(2):
        with serving(path, tmp_path) as cache:
            assert [cache.get([name], target[:1]).hits for name in names[:4]] == [0] * 4
            assert cache.get(names[4:], target[4:]).hits == 4
    with serving(path, tmp_path) as cache:
        assert cache.put(names[:1], content(0, 1)).stored == 1
        assert cache.get(names[:1], target[:1]).hits == 1
        assert np.array_equal(target[:1], content(0, 1))


@pytest.mark.long
def test_a_removal_waits_through_kills_for_a_store_that_the_servers_lack(
    shm: Path, tmp_path: Path
) -> None:
    path, away, here = shm / "pool", tmp_path / "away", tmp_path / "here"
    away.mkdir()
    here.mkdir()
    Pool.create([path], device_size=POOL_BYTES, sparse=True).close()
    names = [digest(number) for number in range(COUNT)]
    target = np.zeros((COUNT, LENGTH), np.uint8)
    with serving(path, away) as cache:
        cache.put(names, np.concatenate([content(number, 0) for number in range(COUNT)]))
        assert eventually(lambda: len(list(away.glob("beluga-1*"))) == COUNT)
    with serving(path, here):  # the only record is that there was a store
        pass
    for gone in range(4):
        with serving(path, here, parked=gone) as cache:
            assert cache.remove(names[gone : gone + 1]) == 1
    with serving(path, here, away) as cache:  # now under another number
        assert [cache.get([name], target[:1]).hits for name in names[:4]] == [0] * 4
        assert cache.get(names[4:], target[4:]).hits == 4
    with serving(path, here, f"-{away}") as cache:
        assert cache.remove(names[4:5]) == 1
    with serving(path, here):  # and it stays dropped
        pass
