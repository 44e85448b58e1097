# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server with nothing to do uses little processor time, and answers soon when it is called.

Both are figures of a machine that others use too: the best of several tries counts, and a call is
compared with a line that the same process answers through a pipe.
"""

from __future__ import annotations

import time
from pathlib import Path

from support.emulation import PATIENCE
from support.processes import Process

from beluga.pool import Pool
from beluga.rpc import Client

IDLE_CPU_MAX = 0.05  # of a core
FIRST_CALL_MAX_S = 0.001 * PATIENCE
TRIES = 8


def cpu_share(server: Process, seconds: float) -> float:
    """Return the processor time that a server process used meanwhile, as a share of one core."""
    before, start = int(server.ask("cpu")), time.monotonic_ns()
    time.sleep(seconds)
    after, end = int(server.ask("cpu")), time.monotonic_ns()
    return (after - before) / (end - start)


def test_an_idle_server_uses_little_of_a_core(pool: Pool, paths: list[Path]) -> None:
    with Process("serve", paths) as server, Client(pool) as client:
        client.ping()
        shares: list[float] = []
        while len(shares) < TRIES and min(shares, default=1) >= IDLE_CPU_MAX:
            time.sleep(0.05)
            shares.append(cpu_share(server, 1.0))
        assert min(shares) < IDLE_CPU_MAX, shares


def test_the_first_call_after_a_pause_is_served_soon(pool: Pool, paths: list[Path]) -> None:
    with Process("serve", paths) as server, Client(pool) as client:
        client.ping()
        excess: list[float] = []
        while len(excess) < TRIES and min(excess, default=1) >= FIRST_CALL_MAX_S:
            time.sleep(0.2)
            call = client.ping()
            start = time.perf_counter()
            server.ask("cpu")
            excess.append(call - 10 * (time.perf_counter() - start))
        assert min(excess) < FIRST_CALL_MAX_S, excess
