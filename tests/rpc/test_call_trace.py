# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The trace of calls: its fields, the death of its server, and the checks of its file."""

import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually, keys, put
from support.role import Process, lines, run

from beluga._ffi import ffi, lib
from beluga.errors import BadValueError, NoTraceError, RpcError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, CallTrace, Client, read_trace

LENGTH = 4096


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(paths, device_size=32 << 20, sparse=True, max_blocks=64) as pool:
        yield pool


def read(pool: Pool) -> CallTrace:
    return read_trace(pool.runtime_dir)


def test_each_call_is_recorded_with_its_session_and_result(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.time()
    with IndexServer(pool) as server, Client(pool) as client:
        index = IndexClient(client)
        put(index, range(3), length=LENGTH)
        assert len(index.lookup(keys(range(3)), pin=False).hits) == 3
        with pytest.raises(RpcError):
            client.call(200, b"nobody")
        nonce, lane = f"{client.stat().nonce:016x}", client.stat().lane
        trace = read(pool)
        assert (trace.alive, trace.ended, trace.pid) == (True, False, os.getpid())
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: 0.0)  # the clock was set back
            assert trace.alive
        assert trace.epoch == server.stat().epoch
        calls = trace.calls()
    assert [call.sequence for call in calls] == list(range(1, 5))
    assert [call.method for call in calls] == ["reserve", "commit", "lookup", "200"]
    assert [call.keys for call in calls] == [3, 3, 3, 0]
    assert [call.status for call in calls] == ["ok", "ok", "ok", "NoMethod"]
    assert {(call.host, call.pid, call.lane, call.nonce) for call in calls} == {
        (0, os.getpid(), lane, nonce)
    }
    # request: 24 bytes and 16 for each key; reply: 8 bytes and 32 for each record
    assert calls[2].bytes == 24 + 3 * 16 + 8 + 3 * 32
    assert all(call.seconds is not None and 0 < call.seconds < 10 for call in calls)
    assert all(began - 1 < call.time_s < time.time() + 1 for call in calls)
    assert [call.time_s for call in calls] == sorted(call.time_s for call in calls)


def test_calls_are_filtered_by_time_method_and_session(pool: Pool) -> None:
    with IndexServer(pool) as server, Client(pool) as first, Client(pool) as other:
        server.handle(METHOD_USER, lambda request: time.sleep(0.02) or request)
        for _ in range(3):
            first.ping()
        other.ping()
        first.call(METHOD_USER, b"slow")
        trace, nonce = read(pool), f"{other.stat().nonce:016x}"
        lane = other.stat().lane
    assert [call.method for call in trace.calls(slow_s=0.015)] == ["64"]
    assert trace.slowest(2)[0].method == "64"
    assert len(trace.slowest(100)) == trace.count == 5
    assert len(trace.calls(method="ping")) == 4
    assert trace.calls(method="commit") == []
    assert [call.lane for call in trace.calls(session=nonce)] == [lane]
    assert trace.calls(session=f"lane:{lane}") == trace.calls(session=nonce)
    assert len(trace.calls(session=f"pid:{os.getpid()}")) == len(trace.calls(session="host:0")) == 5
    assert [call.sequence for call in trace.calls(last=2)] == [4, 5]
    assert [call.sequence for call in trace.calls(newer_than=3)] == [4, 5]
    for wrong in ("pid:x", "no hex", "user:1", ""):
        with pytest.raises(BadValueError, match="does not name a session"):
            trace.calls(session=wrong)


def test_the_ring_wraps_around(pool: Pool) -> None:
    count = lib.BL_TRACE_ENTRIES + 100
    with IndexServer(pool), Client(pool) as client:
        requests = ffi.new("uint8_t[]", count * 8)
        pump = ffi.new("bl_pump *", {"requests": requests, "count": count, "size": 8, "depth": 16})
        assert lib.bl_session_pump(client.session, pump, 60 * 10**9) == 0
        trace = read(pool)
    assert trace.count == lib.BL_TRACE_ENTRIES
    assert [call.sequence for call in trace.calls(last=1)] == [count]
    assert trace.calls()[0].sequence == 101


def test_calls_of_a_killed_server_are_kept_across_the_restart(
    pool: Pool, paths: list[Path]
) -> None:
    server = Process(roles.serve_index, paths)
    with Client(pool) as client:
        client.ping()
        server.kill()
        killed = read(pool)
        assert [call.method for call in killed.calls()] == ["ping"]
        assert not killed.ended
        assert eventually(lambda: not read(pool).alive)
        with IndexServer(pool):
            client.ping()
            before = read_trace(pool.runtime_dir, before=True)
            assert before.calls() == killed.calls()
            assert (before.epoch, read(pool).epoch) == (1, 2)
        assert read(pool).ended


def die_in_a_call(paths: list[str]) -> None:
    with Pool.open(paths) as pool, IndexServer(pool) as server:
        server.handle(64, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        list(lines())


def test_a_call_during_which_the_server_died_is_unfinished(pool: Pool, paths: list[Path]) -> None:
    with Process(die_in_a_call, paths) as server, Client(pool, timeout_s=20) as client:
        client.ping()
        with pytest.raises(RpcError):
            client.call(64, b"die", timeout_s=1.0)
        assert server.died() == -signal.SIGKILL
    last = read(pool).calls()[-1]
    assert (last.method, last.status, last.seconds) == ("64", "unfinished", None)
    assert read(pool).slowest(1) == [last]


def serve_with_small_files(paths: list[str]) -> None:
    with Pool.open(paths) as pool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with IndexServer(pool) as server, Client(pool) as client:
            client.ping()
            print(server.stat().trace_status)


def test_a_server_without_room_for_its_trace_serves_and_logs_it(
    pool: Pool, paths: list[Path]
) -> None:
    ended = run(serve_with_small_files, paths)
    assert int(ended.stdout) < 0
    assert "this server writes no trace of its calls: File too large" in ended.stderr
    assert not list(pool.runtime_dir.glob("trace*"))
    with pytest.raises(NoTraceError, match="does not exist"):
        read(pool)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20


@pytest.mark.parametrize("seed", range(8))
def test_arbitrary_contents_of_the_file_are_only_displayed(pool: Pool, seed: int) -> None:
    with IndexServer(pool), Client(pool) as client:
        for _ in range(20):
            client.ping()
    path, chance = pool.runtime_dir / "trace", random.Random(seed)
    data = bytearray(path.read_bytes())
    begin, end = (8, 4096) if seed < 2 else (16, 4096) if seed < 4 else (4096, 4096 + 64 * 32)
    for _ in range(4000):
        data[chance.randrange(begin, end)] = chance.randrange(256)
    path.write_bytes(data)
    try:
        trace = read(pool)
    except NoTraceError:
        return
    for call in [*trace.calls(), *trace.slowest(5), *trace.calls(slow_s=1e-9, session="0" * 16)]:
        assert call.sequence > 0
    assert trace.count <= lib.BL_TRACE_ENTRIES


@pytest.mark.parametrize("size", [0, 7, 4096, 4096 + 65, lib.BL_TRACE_HEAD_SIZE + 64])
def test_a_truncated_file_is_not_a_trace(pool: Pool, size: int) -> None:
    with IndexServer(pool):
        pass
    path = pool.runtime_dir / "trace"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(NoTraceError, match="not a trace of this version"):
        read(pool)


def test_a_torn_entry_is_left_out(pool: Pool) -> None:
    """An entry whose two sequences differ was overwritten while it was read; so was one that has no
    end and is not the last.
    """
    with IndexServer(pool), Client(pool) as client:
        for _ in range(4):
            client.ping()
    path = pool.runtime_dir / "trace"
    data = bytearray(path.read_bytes())
    for sequence, ended in ((2, 99), (3, 0)):
        at = lib.BL_TRACE_HEAD_SIZE + 64 * sequence
        data[at : at + 8] = ended.to_bytes(8, "little")
    path.write_bytes(data)
    assert [call.sequence for call in read(pool).calls()] == [1, 4]
