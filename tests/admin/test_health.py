# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server is live while its poll loop makes progress, and ready while it serves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import stuck_server
from support.blocks import eventually

from beluga import Client, Pool
from beluga.admin import AdminRequest, ServerHealth
from beluga.errors import CallTimeoutError
from beluga.rpc import METHOD_USER
from tests.exporter.scraped import status_of

WAIT_S = 60.0


def statuses(health: ServerHealth) -> list[int]:
    """Return what both routes answer."""
    routes = health.routes()
    return [routes["GET", path](AdminRequest(path)).status for path in ("/healthz", "/readyz")]


def test_a_server_without_progress_is_not_alive() -> None:
    now = [100.0]
    health = ServerHealth(still_s=10.0, clock=lambda: now[0])
    assert statuses(health) == [200, 503]  # the server begins
    now[0] += 1000.0
    assert statuses(health) == [200, 503]
    health.record_progress(serves=False)  # the server stands by
    assert statuses(health) == [200, 503]
    health.record_start()
    now[0] += 1000.0
    assert statuses(health) == [200, 503]
    health.record_progress(serves=True)
    now[0] += 9.0
    assert statuses(health) == [200, 200]
    now[0] += 1.0
    assert statuses(health) == [503, 503]
    assert b"no progress for 10 s" in health.routes()["GET", "/healthz"](AdminRequest("")).body
    health.record_progress(serves=True)
    assert statuses(health) == [200, 200]


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "stuck"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_a_hanging_poll_loop_is_detected_while_the_process_responds(shm: Path, stuck: Path) -> None:
    device = str(shm / "device")
    Pool.create([device], device_size=16 << 20).close()
    with subprocess.Popen(
        [sys.executable, stuck_server.__file__, device], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert eventually(lambda: status_of(f"{url}readyz") == 200, WAIT_S)
            assert status_of(f"{url}healthz") == 200
            with Pool.open([device]) as pool, Client(pool, timeout_s=WAIT_S) as client:
                with pytest.raises(CallTimeoutError):
                    client.call(METHOD_USER, str(stuck).encode(), timeout_s=0.3)
                assert eventually(lambda: status_of(f"{url}healthz") == 503, WAIT_S)
                assert status_of(f"{url}readyz") == 503
                stuck.unlink()
                assert eventually(lambda: status_of(f"{url}healthz") == 200, WAIT_S)
        finally:
            stuck.unlink(missing_ok=True)
            server.terminate()
