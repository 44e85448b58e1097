# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A device fails under those who use it: an error for the call, and the process lives.

A file that is cut short under its mapping answers with SIGBUS, as poisoned or unplugged memory
does. All that could die of it runs in processes of its own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Process

from beluga.pool import Pool

SIZE = 32 << 20
ALIVE = "still alive"

COMMON = """
import os, sys
import numpy as np
from beluga import KVCache, Pool
from beluga.errors import DeviceFaultError
from beluga.meta import MetaClient
MIB = 1 << 20
paths = sys.argv[1:]
pool = Pool.open(paths)
names = [bytes([n]) * 16 for n in range(30)]
blocks = np.arange(30 * MIB, dtype=np.uint32).astype(np.uint8).reshape(30, MIB)

def cut(path):
    os.truncate(path, 2 * MIB)

def faults(call):
    try:
        call()
    except DeviceFaultError:
        return True
    return False
"""

CLIENT = """
cache = KVCache(pool, namespace="fault")
assert cache.put(names, blocks).stored == 30
hits = MetaClient(cache.client).lookup(cache.keys(names)).hits
per_device = pool.geometry.device_size - 2 * MIB
here = [n for n, hit in enumerate(hits) if hit.offset + MIB <= per_device]
gone = [n for n, hit in enumerate(hits) if hit.offset >= per_device]
assert here and gone
cut(paths[1])
room = np.zeros((1, MIB), dtype=np.uint8)
for n in gone + gone:
    assert faults(lambda: cache.get([names[n]], room))
for n in here:
    assert cache.get([names[n]], room).hits == 1
    assert (room[0] == blocks[n]).all()
both = np.zeros((2, MIB), dtype=np.uint8)
assert faults(lambda: cache.get([names[here[0]], names[gone[0]]], both))
stat = cache.stat()
assert (stat.grant_count, stat.pinned_count) == (0, 0)
new = [bytes([100 + n]) * 16 for n in range(30)]
failed = sum(faults(lambda: cache.put([name], blocks[:1])) for name in new)
assert failed > 0
assert cache.stat().grant_count == 0
cache.close()
"""

# What is not the pool's goes where it went before: here to faulthandler, which reports and dies.
FOREIGN = """
import mmap, faulthandler
faulthandler.enable()
cache = KVCache(pool, namespace="fault")
assert cache.put(names[:1], blocks[:1]).stored == 1
cut(paths[1])
faults(lambda: cache.get(names[:1], blocks[:1].copy()))
with open(paths[1], "r+b") as file:
    view = mmap.mmap(file.fileno(), 2 * MIB)
    os.truncate(paths[1], 0)
    print(view[4096])
"""

SERVER = """
from beluga import MetaServer
server = MetaServer(pool)
server.start()
cut(paths[0])
while server.failure is None:
    pass
assert isinstance(server.failure, DeviceFaultError), server.failure
server.stop()
pool.close()
"""


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    paths = [shm / "a", shm / "b"]
    Pool.create(paths, device_size=SIZE, sparse=True, interleave=False, lane_count=4).close()
    return paths


def run(code: str, paths: list[Path], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", COMMON + code + f"\nprint('{ALIVE}')", *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")], ids=["plain", "faulthandler"])
def test_a_client_lives_and_reads_what_is_left(paths: list[Path], options: tuple[str, ...]) -> None:
    with Process("serve_index", paths):
        ended = run(CLIENT, paths, *options)
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr
    assert "Bus error" not in ended.stderr


def test_what_is_not_the_pools_still_ends_the_process(paths: list[Path]) -> None:
    with Process("serve_index", paths):
        ended = run(FOREIGN, paths)
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr
    assert ALIVE not in ended.stdout


def test_a_server_ends_and_says_why(paths: list[Path]) -> None:
    ended = run(SERVER, paths)
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr
