# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A device fails while processes use it: a call gets an error, the process survives, and the space
is retired. Access to the truncated part of a mapped file raises SIGBUS, like poisoned or unplugged
memory. All code that could die of it runs in separate processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import roles
from support.emulation import PATIENCE
from support.role import Process

from beluga.pool import Pool

SIZE = 32 << 20
ALIVE = "still alive"

COMMON = """
import os, struct, sys
import numpy as np
from beluga import KVCache, Pool
from beluga._ffi import lib
from beluga.errors import BadRequestError, DeviceFaultError
from beluga.index import IndexClient, check_pool
MIB = 1 << 20
STRIPE = 2 * MIB
LENGTH = MIB - 4096  # two and their checksums fill an extent of one stripe
paths = sys.argv[1:]
pool = Pool.open(paths)
names = [bytes([n]) * 16 for n in range(30)]
blocks = np.arange(30 * LENGTH, dtype=np.uint32).astype(np.uint8).reshape(30, LENGTH)
per_device = pool.geometry.device_size - STRIPE

def cut(path):
    os.truncate(path, 2 * MIB)

def faults(call):
    try:
        call()
    except DeviceFaultError:
        return True
    return False

def found(cache, names):
    return IndexClient(cache.client).lookup(cache.keys(names)).hits

def report_fault(cache, offset):
    "How many stripes the server retires if a client reports that memory failed there."
    reply = cache.client.call(lib.BL_METHOD_RETIRE, struct.pack("<Q", offset))
    return struct.unpack("<II", reply)[0]
"""

CLIENT = """
cache = KVCache(pool, namespace="fault")
assert cache.put(names, blocks).stored == 30
hits = found(cache, names)
here = [n for n, hit in enumerate(hits) if hit.offset < per_device]
gone = [n for n, hit in enumerate(hits) if hit.offset >= per_device]
lost = {hits[n].offset // STRIPE for n in gone}
assert here and len(gone) > len(lost)
cut(paths[1])
room, both = np.zeros((1, LENGTH), dtype=np.uint8), np.zeros((2, LENGTH), dtype=np.uint8)
assert faults(lambda: cache.get([names[here[0]], names[gone[0]]], both))
assert cache.get([names[here[0]], names[gone[0]]], both).hits == 1
assert sum(faults(lambda: cache.get([names[n]], room)) for n in gone) == len(lost) - 1
assert not any(cache.get([names[n]], room).hits for n in gone)
for n in here:
    assert cache.get([names[n]], room).hits == 1
    assert (room[0] == blocks[n]).all()
stat = cache.stat()
assert (stat.grant_count, stat.pinned_count) == (0, 0)
assert (stat.block_count, stat.retired_stripe_count) == (len(here), len(lost))
new = [bytes([100 + n]) * 16 for n in range(60)]
failed = sum(faults(lambda: cache.put([name], blocks[:1])) for name in new)
stat = cache.stat()
assert failed == per_device // STRIPE - len(lost)
assert stat.retired_stripe_count == per_device // STRIPE
assert stat.grant_count == 0
hits = found(cache, new[-4:])
assert len(hits) == 4 and all(hit.offset < per_device for hit in hits)
assert check_pool(pool).findings == ()
cache.close()
"""

# The memory works again, but stays retired.
LATER = """
cache = KVCache(pool, namespace="fault")
retired = per_device // STRIPE
assert cache.stat().retired_stripe_count == retired
assert cache.stat().damaged_count == 0
for n in range(30):
    cache.put(names[n : n + 1], blocks[n : n + 1]).raise_for_refused()
hits = found(cache, names[-20:])
assert len(hits) == 20 and all(hit.offset < per_device for hit in hits)
assert cache.stat().retired_stripe_count == retired
assert check_pool(pool, payload=True).findings == ()
cache.close()
"""

# A false report of failed memory by a client is ignored.
LIAR = """
cache = KVCache(pool, namespace="fault")
assert cache.put(names, blocks).stored == 30
for hit in found(cache, names):
    assert report_fault(cache, hit.offset) == 0
for offset in (0, pool.geometry.data_offset - 1, pool.geometry.size, (1 << 64) - 1):
    try:
        report_fault(cache, offset)
    except BadRequestError:
        continue
    raise AssertionError(offset)
assert report_fault(cache, pool.geometry.size - 1) == 0
assert len(found(cache, names)) == 30
assert cache.stat().retired_stripe_count == 0
cache.close()
"""

# Guarded reads and writes of single ranges, as tools make them: ranges on the other device succeed.
RANGES = """
from beluga._ffi import ffi
here, gone = pool.geometry.data_offset, pool.geometry.size - STRIPE
room = ffi.new("uint8_t[]", b"here".ljust(MIB, b"."))


def plan(offset):
    # A whole batch in one call: its struct, and the memory that it points to.
    piece = ffi.new("bl_piece *", [int(ffi.cast("uintptr_t", room)), offset, MIB, 0])
    chunk = ffi.new("bl_chunk *", [offset, MIB, 0])
    fields = {"pieces": piece, "chunks": chunk, "piece_count": 1, "chunk_count": 1}
    return ffi.new("bl_plan *", fields), piece, chunk


lost, kept = plan(gone), plan(here)
cut(paths[1])
for call in (lib.bl_pool_write, lib.bl_pool_read):
    assert call(pool.handle, gone, room, MIB) == -lib.BL_ERROR_DEVICE_FAULT
    assert call(pool.handle, here, room, MIB) == 0
for call in (lib.bl_plan_write, lib.bl_plan_read):
    assert call(pool.handle, lost[0], ffi.NULL, ffi.NULL, 0) == -lib.BL_ERROR_DEVICE_FAULT
    assert call(pool.handle, kept[0], ffi.NULL, ffi.NULL, 0) == 0
assert ffi.string(room, 5) == b"here."
"""

# A pump whose lane fails returns an error at each attempt.
PUMP = """
from beluga import Client
from beluga._ffi import ffi
client = Client(pool)
requests = ffi.new("uint8_t[]", 8 * 64)
pump = ffi.new("bl_pump *", {"requests": requests, "count": 64, "size": 8, "depth": 4,
                             "method": lib.BL_METHOD_PING})
with client.lock:
    session = client.session
    assert lib.bl_session_pump(session, pump, 60 * 10**9) == 0
    cut(paths[0])
    for _ in range(2):
        assert lib.bl_session_pump(session, pump, 60 * 10**9) == -lib.BL_ERROR_DEVICE_FAULT
"""

# A fault outside the pool goes to the previous handler: here to faulthandler, which reports it and
# ends the process.
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

# faulthandler replaces the handler after the process has used a pool.
LATE = CLIENT.replace(
    "cut(paths[1])\n", "import faulthandler\nfaulthandler.enable()\ncut(paths[1])\n", 1
)

# Threads are in their regions already when the handler is replaced: a client that waits for an
# answer, and the server whose handler runs.
MEANWHILE = """
import faulthandler, threading
from beluga import Client, Server
reached, go, results = threading.Event(), threading.Event(), []
server = Server(pool)
server.handle(64, lambda request: (reached.set(), go.wait(), b"")[2])
server.start()
client = Client(pool)
thread = threading.Thread(target=lambda: results.append(faults(lambda: client.call(64))))
thread.start()
reached.wait()
faulthandler.enable()
cut(paths[0])
thread.join()
go.set()
while server.failure is None:
    pass
assert results == [True]
assert isinstance(server.failure, DeviceFaultError), server.failure
"""

# Both sides of an acceptance test run here: the fault of one ends the other, too, at once.
VERIFY = """
import threading
from beluga.verify import verify_pool
timer = threading.Timer(0.3, lambda: cut(paths[1]))
timer.start()
assert faults(lambda: verify_pool(pool, seconds=60, patience=60))
assert faults(lambda: verify_pool(pool))
"""

SERVER = """
from beluga import IndexServer
server = IndexServer(pool)
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
        timeout=120 * PATIENCE,
        check=False,
    )


def with_engine(settings: str) -> str:
    """CLIENT with an engine: a batch handles failed memory like a single call."""
    made = 'KVCache(pool, namespace="fault"'
    code = CLIENT.replace(made, f"{made}, engine=CpuEngine(pool, threads=2){settings}")
    return f"from beluga.transfer import CpuEngine\n{code}"


@pytest.mark.parametrize(
    ("code", "options"),
    [
        pytest.param(CLIENT, (), id="plain"),
        pytest.param(CLIENT, ("-X", "faulthandler"), marks=pytest.mark.long, id="faulthandler"),
        pytest.param(LATE, (), id="replaced handler"),
        pytest.param(with_engine(""), (), id="engine"),
        pytest.param(
            with_engine(", check_checksums=False"), (), marks=pytest.mark.long, id="bare engine"
        ),
        pytest.param(LIAR, (), id="false report"),
        pytest.param(PUMP, (), id="pump"),
    ],
)
def test_a_client_survives_a_fault_of_the_pool(
    paths: list[Path], code: str, options: tuple[str, ...]
) -> None:
    with Process(roles.serve_index, paths):
        ended = run(code, paths, *options)
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr
    assert "Bus error" not in ended.stderr


@pytest.mark.parametrize(
    "code", [SERVER, VERIFY, RANGES, MEANWHILE], ids=["server", "verify", "ranges", "meanwhile"]
)
def test_a_process_ends_its_work_with_an_error(paths: list[Path], code: str) -> None:
    ended = run(code, paths)
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr


@pytest.mark.long
def test_failed_memory_stays_retired_under_the_next_server(paths: list[Path]) -> None:
    with Process(roles.serve_index, paths):
        ended = run(CLIENT, paths)
        assert ended.returncode == 0, ended.stderr
    for _ in range(2):  # copies between the halves of the table, in both directions
        os.truncate(paths[1], SIZE)
        with Process(roles.serve_index, paths):
            ended = run(LATER, paths)
            assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr


# faulthandler is installed under this handler, or over it.
ENABLE = "faulthandler.enable()\n"
USED = "cut(paths[1])\n"


@pytest.mark.parametrize(
    "code",
    [FOREIGN, FOREIGN.replace(ENABLE, "").replace(USED, ENABLE + USED)],
    ids=["under", "over"],
)
def test_a_fault_outside_the_pool_still_ends_the_process(paths: list[Path], code: str) -> None:
    with Process(roles.serve_index, paths):
        ended = run(code, paths)
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr
    assert ALIVE not in ended.stdout
