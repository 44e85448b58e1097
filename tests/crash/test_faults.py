# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Memory fails while processes use it: a call gets an error, the process survives, and the space is
retired; a full file system refuses only what needs a page.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulting
import pytest
from support import roles
from support.blocks import eventually, keys, states
from support.commands import captured
from support.emulation import EMULATED, PATIENCE, long
from support.role import Process, lines, reply

from beluga._ffi import ffi, lib
from beluga.errors import DeviceFaultError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

# ---- A device fails while processes use it: a call gets an error, the process survives, and the
# space is retired. Access to the truncated part of a mapped file raises SIGBUS, like poisoned or
# unplugged memory. All code that could die of it runs in separate processes.


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
def made_paths(paths: list[Path]) -> list[Path]:
    Pool.create(paths, device_size=SIZE, sparse=True, interleave=False, lane_count=4).close()
    return paths


def run(code: str, made_paths: list[Path], *options: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [
            sys.executable,
            *options,
            "-c",
            COMMON + code + f"\nprint('{ALIVE}')",
            *map(str, made_paths),
        ],
        timeout=120 * PATIENCE,
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
    made_paths: list[Path], code: str, options: tuple[str, ...]
) -> None:
    with Process(roles.serve_index, made_paths):
        ended = run(code, made_paths, *options)
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr
    assert "Bus error" not in ended.stderr


@pytest.mark.parametrize(
    "code", [SERVER, VERIFY, RANGES, MEANWHILE], ids=["server", "verify", "ranges", "meanwhile"]
)
def test_a_process_ends_its_work_with_an_error(made_paths: list[Path], code: str) -> None:
    ended = run(code, made_paths)
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr


@pytest.mark.long
def test_failed_memory_stays_retired_under_the_next_server(made_paths: list[Path]) -> None:
    with Process(roles.serve_index, made_paths):
        ended = run(CLIENT, made_paths)
        assert ended.returncode == 0, ended.stderr
    for _ in range(2):  # copies between the halves of the table, in both directions
        os.truncate(made_paths[1], SIZE)
        with Process(roles.serve_index, made_paths):
            ended = run(LATER, made_paths)
            assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr


# faulthandler is installed under this handler, or over it.
ENABLE = "faulthandler.enable()\n"
USED = "cut(paths[1])\n"


@pytest.mark.parametrize(
    "code",
    [FOREIGN, FOREIGN.replace(ENABLE, "").replace(USED, ENABLE + USED)],
    ids=["under", "over"],
)
def test_a_fault_outside_the_pool_still_ends_the_process(made_paths: list[Path], code: str) -> None:
    with Process(roles.serve_index, made_paths):
        ended = run(code, made_paths)
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr
    assert ALIVE not in ended.stdout


# ---- Every C function that is given a pool returns an error if its devices fail; none ends the
# process.


def test_every_function_with_a_pool_parameter_is_covered() -> None:
    called = set(faulting.FAULTS) | set(faulting.SURVIVES) | faulting.APART
    assert faulting.functions() == called & faulting.functions()
    assert not set(faulting.FAULTS) & set(faulting.SURVIVES)


def test_a_failed_device_is_an_error_of_every_function(shm: Path) -> None:
    ended = captured([sys.executable, faulting.__file__, str(shm)], timeout=120 * PATIENCE)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, (lines[-1:], ended.stderr[-2000:])
    statuses = {line["name"]: line["status"] for line in lines if "name" in line}
    fault = -lib.BL_ERROR_DEVICE_FAULT
    expected = dict.fromkeys(faulting.FAULTS, fault)
    if EMULATED:  # only a flush, and qemu-user's dc instruction accesses no memory
        expected["bl_plan_maintenance"] = 0
    assert statuses == expected | {name: statuses[name] for name in faulting.SURVIVES}
    assert {statuses[name] for name in faulting.SURVIVES} <= {None, 0}


# ---- Memory fails for a server only. A bad lane is retired, and a server that can no longer
# serve stops its heartbeat, so that a standby takes over. Faults are made by mapping a page of
# an empty file over the pool's page: access to it raises SIGBUS.


TURN_S = 60.0
READ_WRITE, SHARED, FIXED, PAGE = 3, 1, 16, 4096


def map_nothing(pool: Pool, offset: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = int(ffi.cast("uintptr_t", lib.bl_pool_address(pool.handle, offset)))
    with tempfile.TemporaryFile() as nothing:
        libc.mmap(address & ~(PAGE - 1), PAGE, READ_WRITE, SHARED | FIXED, nothing.fileno(), 0)


def failing(paths: list[str]) -> None:
    """A server whose memory fails at the offset that a line names."""
    pool = Pool.open(paths)
    server = IndexServer(pool)
    server.start()
    for line in lines():
        if line:
            map_nothing(pool, int(line))
        facts = {"live": server.stat().live_count, "held": server.index_stat().held_bytes}
        reply(json.dumps({**facts, "failure": type(server.failure).__name__}))
    os._exit(0)


def fail_memory(server: Process, offset: int | str = "") -> dict[str, Any]:
    """Make the memory at this offset fail. Returns the server's own report."""
    facts: dict[str, Any] = json.loads(server.request(str(offset)))
    return facts


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
    with Process(failing, paths) as server, Client(pool) as bad, Client(pool) as good:
        assert (bad.stat().lane, good.stat().lane) == (0, 1)
        reserved = IndexClient(bad).reserve(keys([1, 2]), length=1 << 20)
        assert states(reserved) == ["GRANTED"] * 2
        fail_memory(server, lane_start(pool, 0) + pages[page])
        if page == "heartbeat":  # the server reads it although the lane is quiet
            assert eventually(lambda: fail_memory(server)["live"] == 1)
            assert fail_memory(server)["held"] >= 2 << 20  # the client may still write there
        bad.ping(timeout_s=TURN_S)  # a new session, which abandoned the grants
        for _ in range(50):
            good.ping()
        with Client(pool) as another:
            assert 0 not in {bad.stat().lane, another.stat().lane}
        assert eventually(lambda: fail_memory(server)["held"] == 0)
        assert fail_memory(server) == {"live": 2, "held": 0, "failure": "NoneType"}


def test_a_server_that_cannot_serve_is_replaced(pool: Pool, paths: list[Path]) -> None:
    with (
        Process(failing, paths) as server,
        Process(roles.stand_by_index, paths) as standby,
        Client(pool, timeout_s=TURN_S) as client,
    ):
        standby.send("1.0")
        client.ping()
        fail_memory(server, lib.BL_LOBBY_OFFSET)
        assert standby.receive(TURN_S) == "2"
        assert fail_memory(server)["failure"] == DeviceFaultError.__name__
        client.ping()
        assert client.stat().epoch == 2
        standby.kill()


# ---- The file system of a sparse pool is full: calls that need a new page are refused, and no
# others fail. The kernel reports this with the same signal as a truncated file. Each case runs
# in a mount namespace with its own small tmpfs.


FULL_COMMON = """
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


def run_full(code: str, tmp_path: Path) -> None:
    tools = [shutil.which(tool) for tool in ("unshare", "mount")]
    if None in tools:
        pytest.skip("unshare and mount are needed for a file system of the test's own")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    enter = ["unshare", "--mount", "--propagation", "private", *user]
    mount = f'mount -t tmpfs -o size=100m none {tmp_path} || exit 99; exec "$@"'
    program = [sys.executable, "-c", f"{FULL_COMMON}{code}\nprint('{ALIVE}')", str(tmp_path)]
    ended = captured(
        [*enter, "sh", "-c", mount, "sh", *program],
        timeout=120 * PATIENCE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    if ended.returncode == 99 or "unshare" in ended.stderr:
        pytest.skip(f"no mount namespace: {ended.stderr.strip()}")
    assert (ended.returncode, ended.stdout.strip()) == (0, ALIVE), ended.stderr


@pytest.mark.parametrize(
    "engine", ["", long(", engine=CpuEngine(pool, threads=2)")], ids=["call", "engine"]
)
def test_only_blocks_without_memory_are_refused(tmp_path: Path, engine: str) -> None:
    run_full(PUT.replace("ENGINE", engine), tmp_path)


@pytest.mark.parametrize(
    "code", [PARTS, START, CUT, MAKE, long(TIER)], ids=["parts", "start", "cut", "make", "tier"]
)
def test_a_full_file_system_is_not_reported_as_a_broken_device(tmp_path: Path, code: str) -> None:
    run_full(code, tmp_path)
