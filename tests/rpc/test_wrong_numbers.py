# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Host numbers and times out of range: one line states the valid range, before the pool is
touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from beluga import Client, IndexServer, KVCache, Pool
from beluga.errors import BadValueError
from beluga.rpc import Server

HOSTS: tuple[Any, ...] = (1 << 20, 64, -1, 1 << 64, True, False, 1.0, "1")
TIMES = (-1.0, float("nan"), float("inf"), 1e12)


@pytest.fixture
def pool(shm: Path) -> Pool:
    return Pool.create([shm / "a"], device_size=16 << 20, sparse=True, max_blocks=64)


@pytest.mark.parametrize("host", HOSTS)
def test_an_invalid_host_number_is_rejected(pool: Pool, host: Any) -> None:
    assert issubclass(BadValueError, ValueError)
    with pool, Server(pool):
        for kind in (Client, Server, IndexServer):
            with pytest.raises(BadValueError, match=r"from 0 to 63; .* is not"):
                kind(pool, host=host)
        with pytest.raises(BadValueError, match=r"from 0 to 63; .* is not"):
            KVCache(pool, namespace="hosts", host=host)


def test_the_last_host_number_is_accepted(pool: Pool) -> None:
    assert pool.host_number(63) == 63
    assert pool.host_number(None) == 0
    pool.close()


@pytest.mark.parametrize("seconds", TIMES)
def test_an_invalid_time_is_rejected(pool: Pool, seconds: float) -> None:
    with pool, IndexServer(pool) as server, Client(pool) as client:
        calls = (
            lambda: Client(pool, timeout_s=seconds),
            lambda: client.call(0, timeout_s=seconds),
            lambda: client.ping(timeout_s=seconds),
            lambda: KVCache(pool, namespace="times", timeout_s=seconds),
            lambda: KVCache(client, namespace="times", timeout_s=seconds),
            lambda: Server(pool, heartbeat_lost_s=seconds),
            lambda: server.watch(seconds, silent_s=1),
            lambda: server.watch(0, silent_s=seconds),
        )
        for call in calls:
            with pytest.raises(BadValueError, match="seconds"):
                call()
        client.ping()
