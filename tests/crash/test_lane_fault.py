# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Memory fails for a server only. A bad lane is retired, and a server that can no longer serve
stops its heartbeat, so that a standby takes over. Faults are made by mapping a page of an empty
file over the pool's page: access to it raises SIGBUS.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import forked, roles
from support.blocks import eventually, keys, states
from support.role import Process

from beluga._ffi import lib
from beluga.errors import DeviceFaultError
from beluga.index import IndexClient
from beluga.pool import Pool
from beluga.rpc import Client

TURN_S = 60.0

SERVER = """
import ctypes, json, os, sys, tempfile
from beluga import IndexServer, Pool
from beluga._ffi import ffi, lib

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
READ_WRITE, SHARED, FIXED, PAGE = 3, 1, 16, 4096

def fail(offset):
    address = int(ffi.cast("uintptr_t", lib.bl_pool_address(pool.handle, offset)))
    with tempfile.TemporaryFile() as nothing:
        libc.mmap(address & ~(PAGE - 1), PAGE, READ_WRITE, SHARED | FIXED, nothing.fileno(), 0)

pool = Pool.open(sys.argv[1:])
server = IndexServer(pool)
server.start()
print("ready", flush=True)
for line in sys.stdin:
    if line.strip():
        fail(int(line))
    stat, held = server.stat(), server.index_stat().held_bytes
    facts = {"live": stat.live_count, "held": held}
    print(json.dumps({**facts, "failure": type(server.failure).__name__}), flush=True)
os._exit(0)
"""


class Failing:
    """The server's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def fail_memory(self, offset: int | None = None) -> dict[str, Any]:
        """Make the memory at this offset fail. Returns the server's own report."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{'' if offset is None else offset}\n")
        facts: dict[str, Any] = json.loads(self.process.stdout.readline())
        return facts


@contextmanager
def failing(paths: list[Path]) -> Iterator[Failing]:
    process = forked.start(SERVER, *paths)
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield Failing(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=["hardware", "software"])  # a flush of memory that fails is a fault, too
def pool(request: pytest.FixtureRequest, paths: list[Path]) -> Iterator[Pool]:
    sizes = {"device_size": 32 << 20, "max_blocks": 64, "lane_count": 4}
    with Pool.create(paths, sparse=True, coherence=request.param, **sizes) as pool:
        yield pool


def lane_start(pool: Pool, lane: int) -> int:
    return pool.geometry.lane_offset + lane * pool.geometry.lane_stride


@pytest.mark.parametrize("page", ["heartbeat", "request", "reply"])
def test_a_memory_fault_in_one_lane_affects_only_that_lane(
    pool: Pool, paths: list[Path], page: str
) -> None:
    requests = 4096  # after the page of the heartbeat; then the replies of epoch 0, and of epoch 1
    size = pool.geometry.slot_count * 128
    pages = {"heartbeat": 0, "request": requests, "reply": requests + 2 * size}
    with failing(paths) as server, Client(pool) as bad, Client(pool) as good:
        assert (bad.stat().lane, good.stat().lane) == (0, 1)
        reserved = IndexClient(bad).reserve(keys([1, 2]), length=1 << 20)
        assert states(reserved) == ["GRANTED"] * 2
        server.fail_memory(lane_start(pool, 0) + pages[page])
        if page == "heartbeat":  # the server reads it although the lane is quiet
            assert eventually(lambda: server.fail_memory()["live"] == 1)
            assert server.fail_memory()["held"] >= 2 << 20  # the client may still write there
        bad.ping(timeout_s=TURN_S)  # a new session, which abandoned the grants
        for _ in range(50):
            good.ping()
        with Client(pool) as another:
            assert 0 not in {bad.stat().lane, another.stat().lane}
        assert eventually(lambda: server.fail_memory()["held"] == 0)
        assert server.fail_memory() == {"live": 2, "held": 0, "failure": "NoneType"}


def test_a_server_that_cannot_serve_is_replaced(pool: Pool, paths: list[Path]) -> None:
    with (
        failing(paths) as server,
        Process(roles.stand_by_index, paths) as standby,
        Client(pool, timeout_s=TURN_S) as client,
    ):
        standby.send("1.0")
        client.ping()
        server.fail_memory(lib.BL_LOBBY_OFFSET)
        assert standby.receive(TURN_S) == "2"
        assert server.fail_memory()["failure"] == DeviceFaultError.__name__
        client.ping()
        assert client.stat().epoch == 2
        standby.kill()
