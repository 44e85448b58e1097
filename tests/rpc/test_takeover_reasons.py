# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The reason of a takeover is in the server's statistics, in the trace and in the metrics."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from other_machine import rewrite
from support import roles
from support.elsewhere import imitate
from support.role import Process

from beluga._ffi import lib
from beluga.cli.trace import _headline
from beluga.exporter import Collector
from beluga.index import IndexServer
from beluga.pool import Pool
from beluga.rpc import REASONS, Server, read_trace

pytestmark = pytest.mark.parametrize("coherence", ["software"], indirect=True)

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
