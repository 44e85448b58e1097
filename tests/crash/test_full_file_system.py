# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The file system of a sparse pool is full: calls that need a new page are refused, and no others
fail. The kernel reports this with the same signal as a truncated file. Each case runs in a mount
namespace with its own small tmpfs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.emulation import PATIENCE, long

ALIVE = "still alive"

COMMON = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
import numpy as np
from beluga import KVCache, IndexServer, Pool
from beluga.errors import DeviceFaultError, NoRoomError
from beluga.index import BlockState, check_pool
from beluga.transfer import CpuEngine
MIB = 1 << 20
LENGTH = MIB - 4096
folder = Path(sys.argv[1])
paths = [folder / "a", folder / "b"]
names = [bytes([n]) * 16 for n in range(40)]
blocks = np.arange(40 * LENGTH, dtype=np.uint32).astype(np.uint8).reshape(40, LENGTH)
room = np.zeros((1, LENGTH), dtype=np.uint8)

def make(size=64 * MIB):
    return Pool.create(paths, device_size=size, sparse=True, lane_count=16)

def fill(keep=0):
    "Take what the file system has left, except for some bytes."
    with open(folder / "other", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(MIB))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - keep))

def free():
    (folder / "other").unlink()

def refused(result):
    return [n for n, state in enumerate(result.states) if state == BlockState.REFUSED]

def no_room(call):
    try:
        call()
    except NoRoomError as error:
        return "no space" in str(error)
    return False

def holds(cache, stored):
    for n in stored:
        assert cache.get([names[n]], room).hits == 1
        assert (room[0] == blocks[n]).all()
    return True
"""

PUT = """
pool = make()
with IndexServer(pool) as server, KVCache(pool, namespace="full"ENGINE) as cache:
    assert cache.put(names[:4], blocks[:4]).stored == 4
    fill(keep=10 * MIB)
    result = cache.put(names, blocks)
    lost = refused(result)
    assert lost and not set(lost) & set(range(4))
    for n in lost:
        assert no_room(lambda: cache.put([names[n]], blocks[n : n + 1]).raise_for_refused())
    there = set(range(40)) - set(lost)
    assert holds(cache, there)
    stat = cache.stat()
    assert (stat.block_count, stat.grant_count, stat.retired_stripe_count) == (len(there), 0, 0)
    other = KVCache(pool, namespace="full")  # and a new client
    assert holds(other, range(4))
    other.close()
    free()
    cache.put(names, blocks).raise_for_refused()
    assert holds(cache, range(40))
    assert server.failure is None
assert check_pool(pool, payload=True).findings == ()
"""

# In one call, blocks whose pages are allocated are stored.
PARTS = """
pool = make()
with IndexServer(pool) as server, KVCache(pool, namespace="full") as cache:
    fill(keep=10 * MIB)
    lost = refused(cache.put(names, blocks))
    assert 0 < len(lost) < 40
    assert holds(cache, set(range(40)) - set(lost))
    assert cache.stat().grant_count == 0
"""

# The pages of the tables are allocated when the pool is created.
START = """
fill(keep=MIB)
assert no_room(make)
assert not any(path.exists() for path in paths)
free()
pool = make()
fill()
with IndexServer(pool) as server:
    fill()
    with KVCache(pool, namespace="full") as cache:
        assert refused(cache.put(names, blocks)) == list(range(40))
        assert cache.get(names[:1], room).hits == 0
        free()
        cache.put(names, blocks).raise_for_refused()
    fill()
with IndexServer(pool), KVCache(pool, namespace="full") as cache:  # writes its half again
    assert holds(cache, range(40))
"""

# A truncated file is a fault, even if the file system has free space.
CUT = """
pool = make()
with IndexServer(pool) as server, KVCache(pool, namespace="full") as cache:
    cache.put(names, blocks).raise_for_refused()
    fill()
    os.truncate(paths[1], 4 * MIB)
    try:
        for n in range(40):
            cache.get([names[n]], room)
    except DeviceFaultError:
        pass
    else:
        raise AssertionError
    assert cache.stat().retired_stripe_count > 0
"""

MAKE = """
fill()
assert no_room(make)
assert not paths[0].exists() and not paths[1].exists()
free()
pool = make()
pool.close()
fill()
Pool.destroy(paths)
assert not paths[0].exists()
"""

# Blocks in a lower tier are misses while there is no memory for them.
TIER = """
from support.blocks import eventually
from support.memory_tier import MemoryTier
from beluga.tiers import TierService

@contextmanager
def served(pool):
    with IndexServer(pool) as server:
        service = TierService(server, pool, [tier], wait=True)
        service.start()
        try:
            with KVCache(pool, namespace="full") as cache:
                yield server, cache
        finally:
            service.stop()

tier = MemoryTier()
pool = make(32 * MIB)
with served(pool) as (server, cache):
    cache.put(names[:20], blocks[:20]).raise_for_refused()
    assert eventually(lambda: server.lower_stat().dirty_count == 0)
pool.close()
Pool.destroy(paths)
pool = make(32 * MIB)
with served(pool) as (server, cache):
    fill()
    assert cache.get(names[:1], room).hits == 0
    assert cache.stat().retired_stripe_count == 0
    free()
    assert eventually(lambda: cache.get(names[:1], room).hits == 1)
    assert holds(cache, range(20))
    assert server.failure is None
"""


def run(code: str, tmp_path: Path) -> None:
    tools = [shutil.which(tool) for tool in ("unshare", "mount")]
    if None in tools:
        pytest.skip("unshare and mount are needed for a file system of the test's own")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    enter = ["unshare", "--mount", "--propagation", "private", *user]
    mount = f'mount -t tmpfs -o size=100m none {tmp_path} || exit 99; exec "$@"'
    program = [sys.executable, "-c", f"{COMMON}{code}\nprint('{ALIVE}')", str(tmp_path)]
    ended = subprocess.run(
        [*enter, "sh", "-c", mount, "sh", *program],
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    if ended.returncode == 99 or "unshare" in ended.stderr:
        pytest.skip(f"no mount namespace: {ended.stderr.strip()}")
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr


@pytest.mark.parametrize(
    "engine", ["", long(", engine=CpuEngine(pool, threads=2)")], ids=["call", "engine"]
)
def test_only_blocks_without_memory_are_refused(tmp_path: Path, engine: str) -> None:
    run(PUT.replace("ENGINE", engine), tmp_path)


@pytest.mark.parametrize(
    "code", [PARTS, START, CUT, MAKE, long(TIER)], ids=["parts", "start", "cut", "make", "tier"]
)
def test_a_full_file_system_is_not_reported_as_a_broken_device(tmp_path: Path, code: str) -> None:
    run(code, tmp_path)
