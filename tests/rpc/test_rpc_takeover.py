# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The reason of a takeover, and what a successor makes of a torn session line."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from other_machine import rewrite, session_offset
from support import roles
from support.blocks import eventually, keys
from support.elsewhere import imitate
from support.forge import line_hash, read, write
from support.role import Process

from beluga._ffi import ffi, lib
from beluga.cli.trace import _headline
from beluga.exporter import Collector
from beluga.index import IndexClient, IndexServer, check_pool
from beluga.pool import Pool
from beluga.rpc import REASONS, Client, Server, read_trace

# ---- The reason of a takeover is in the server's statistics, in the trace and in the metrics.


@pytest.fixture
def coherence(request: pytest.FixtureRequest) -> Any:
    """Hardware coherence admits no second machine, whatever its number is."""
    return getattr(request, "param", "software")


OTHER = (1, 2)
TURN_S = 60.0


def reason(server: Server) -> str:
    """Return the reason, after a check that all places show the same one."""
    takeover = server.stat().takeover
    trace = read_trace(server.pool.runtime_dir)
    assert trace.takeover == takeover
    assert str(takeover) in _headline(trace)
    return takeover.reason


def test_the_first_server_has_no_predecessor_and_the_next_a_stopped_one(pool: Pool) -> None:
    first = Server(pool)
    assert first.stat().takeover.reason == "none"
    with first:
        assert reason(first) == "first"
    with Server(pool) as second:
        assert reason(second) == "stopped"
        assert second.stat().takeover.epoch == 1


def test_a_server_replaces_a_killed_one(pool: Pool, paths: list[Path]) -> None:
    Process(roles.serve_index, paths).kill()
    with Server(pool) as server:
        assert reason(server) == "gone"
        assert str(server.stat().takeover) == (
            "the server of epoch 1 on host 0 ended without stopping cleanly"
        )


def test_a_standby_replaces_a_live_server_that_is_stalled(pool: Pool, paths: list[Path]) -> None:
    with Process(roles.serve_index, paths) as first:
        standby = Server(pool)
        first.signal(signal.SIGSTOP)
        while not standby.watch(TURN_S, silent_s=0.05):
            pass
        with standby:
            assert reason(standby) == "stuck"
            assert standby.stat().takeover.silent_s > 15 * 0.05
        first.kill()


def serve_as_other_host(pool: Pool) -> None:
    """Change the stopped server of epoch 1 to one of another host that was switched off."""
    half = 1 * lib.BL_SERVER_STRIDE
    for copy in (0, lib.BL_LINE_SIZE):
        rewrite(
            pool,
            "bl_epoch_line",
            half + copy,
            1,
            host=7,
            boot_id=OTHER,
            state=lib.BL_SERVER_SERVING,
        )


def test_a_standby_replaces_the_server_of_a_silent_host(pool: Pool, tmp_path: Path) -> None:
    Server(pool).__enter__().stop()
    serve_as_other_host(pool)
    imitate(pool.runtime_dir, tmp_path / "elsewhere")
    standby = Server(pool)
    while not standby.watch(TURN_S, silent_s=0.1):
        pass
    with standby:
        assert reason(standby) == "silent"
        assert standby.stat().takeover.silent_s > 0.1
        assert "host 7 stood still for" in str(standby.stat().takeover)


def test_a_server_replaces_one_declared_gone(pool: Pool) -> None:
    Server(pool).__enter__().stop()
    serve_as_other_host(pool)
    with Server(pool, declared_gone=True) as server:
        assert reason(server) == "declared"


def test_metrics_count_takeovers_by_reason_from_zero(pool: Pool, paths: list[Path]) -> None:
    server = IndexServer(pool)
    collector = Collector(server, pool)

    def taken() -> dict[str, float]:
        series = collector.collect()["beluga_takeovers_total"].series
        return {labels[0][1]: float(str(value)) for labels, value in series.items()}

    before = taken()
    assert set(before) == set(REASONS)  # a rate needs the zero before the first one
    Process(roles.serve_index, paths).kill()
    with server:
        after = taken()
    assert {name: after[name] - before[name] for name in REASONS} == {
        name: float(name == "gone") for name in REASONS
    }


# ---- A server dies between the stores of a session's line: its successor assigns the lane and
# the space only to clients that may have them.


def changed(line: bytes, **fields: int) -> bytes:
    """Return the whole line that the server was about to write."""
    struct = ffi.new("bl_session_line *")
    ffi.memmove(struct, line, len(line))
    for name, value in fields.items():
        setattr(struct, name, value)
    raw = bytes(ffi.buffer(struct))
    return raw[:60] + line_hash(raw[:60] + bytes(4), 0).to_bytes(4, "little")


def mixed(before: bytes, after: bytes, stores: set[int]) -> bytes:
    """Mix two lines: only these 8-byte stores of the new line are in memory."""
    return b"".join(
        (after if store in stores else before)[8 * store : 8 * store + 8] for store in range(8)
    )


@pytest.mark.parametrize("stores", [{3}, {7}], ids=["state", "check"])
@pytest.mark.parametrize("state", ["FREE", "SUSPECT"])
def test_a_session_whose_line_is_torn_keeps_its_grants(
    pool: Pool, state: str, stores: set[int]
) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = read(pool, offset)
    after = changed(line, state=getattr(lib, f"BL_SESSION_{state}"))
    write(pool, offset, mixed(line, after, stores))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        assert second.index_stat().held_bytes >= 1 << 20
        with Client(pool) as other:
            assert other.stat().lane == 1
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)
        assert second.index_stat().held_bytes == 0


@pytest.mark.parametrize("byte", [8, 24, 28, 32, 60])
def test_a_damaged_line_keeps_the_lane_until_its_process_is_gone(pool: Pool, byte: int) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = bytearray(read(pool, offset))
    line[byte] ^= 1
    write(pool, offset, bytes(line))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)


@pytest.mark.parametrize("epoch", [0, 2, 1 << 40], ids=["none", "the successor's", "a late one"])
def test_a_line_with_a_damaged_epoch_is_of_an_earlier_session(pool: Pool, epoch: int) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = bytearray(read(pool, offset))
    line[32:40] = epoch.to_bytes(8, "little")
    write(pool, offset, bytes(line))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        assert not check_pool(pool).findings  # the line that it has written
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)
        assert second.index_stat().held_bytes == 0


def test_a_client_without_a_reply_has_no_lane(pool: Pool) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        given = read(pool, session_offset(pool, 0, epoch=1))
        client.close()
        free = read(pool, session_offset(pool, 0, epoch=1))
        assert free[:8] == bytes(8)  # not the name of a session
        first.stop()
    write(pool, session_offset(pool, 0, epoch=1), mixed(free, given, {1, 2, 3, 4, 7}))
    with IndexServer(pool) as second, Client(pool) as client:
        assert second.stat().inherited_count == 0
        assert client.stat().lane == 0
