# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache's worker thread: it does all jobs in order, on a live session."""

from __future__ import annotations

import logging
import threading

import pytest

from beluga import IndexServer
from beluga.connectors.connection import Connection
from beluga.connectors.lmcache.worker import JobWorker
from beluga.connectors.settings import PoolSettings

LONG_S = 60.0


@pytest.fixture
def worker(server: IndexServer, pool_name: str) -> JobWorker:
    settings = PoolSettings(pool=pool_name, timeout_ms=5000)
    worker = JobWorker(settings, name="test", logger=logging.getLogger("test"))
    assert worker.connection.wait(LONG_S)
    return worker


def test_submitted_work_is_done_in_order_before_the_session_ends(worker: JobWorker) -> None:
    go, done = threading.Event(), list[tuple[int, bool]]()

    def first(connection: Connection) -> None:
        assert go.wait(LONG_S)
        done.append((1, connection.attached))

    worker.submit(first)
    worker.submit(lambda connection: done.append((2, connection.attached)))
    threading.Timer(0.05, go.set).start()
    worker.close()
    assert done == [(1, True), (2, True)]
    assert not worker.connection.attached


def test_a_job_that_raises_is_logged_and_the_next_is_done(
    worker: JobWorker, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def wrong(_: Connection) -> None:
        raise ZeroDivisionError

    worker.submit(wrong)
    worker.submit(lambda _: done.set())
    assert done.wait(LONG_S)
    worker.close()
    assert "a job of beluga's failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
