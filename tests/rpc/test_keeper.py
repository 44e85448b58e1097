# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server that stands by; the test controls when it starts."""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import pytest

from beluga.errors import PoolError, ServerAliveError
from beluga.rpc import Server
from beluga.rpc.server import stand_by


class FakeServer:
    """The part of a server that :func:`stand_by` uses."""

    def __init__(
        self, *, watches: list[bool] | None = None, starts: list[Exception] | None = None
    ) -> None:
        self.watches = watches or [True]
        self.starts = starts or []
        self.started = 0
        self.watched: list[tuple[float, float]] = []

    def watch(self, timeout_s: float, *, silent_s: float) -> bool:
        self.watched.append((timeout_s, silent_s))
        return self.watches.pop(0) if len(self.watches) > 1 else self.watches[0]

    def start(self) -> None:
        if self.starts:
            raise self.starts.pop(0)
        self.started += 1


def waits(server: FakeServer, **options: Any) -> bool:
    return stand_by(cast("Server", server), threading.Event(), **options)


def test_a_server_starts_when_it_is_due() -> None:
    server = FakeServer(watches=[False, False, True])
    assert waits(server, silent_s=7.0)
    assert server.started == 1
    assert len(server.watched) == 3
    assert {silent for _, silent in server.watched} == {7.0}


def test_a_stop_before_the_start_prevents_the_start() -> None:
    server, called = FakeServer(), threading.Event()
    called.set()
    assert not stand_by(cast("Server", server), called)
    assert (server.started, server.watched) == (0, [])


def test_a_rejected_takeover_is_logged_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    waited: list[float | None] = []
    reasons: list[str] = []

    class RecordedEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    server = FakeServer(starts=[ServerAliveError("it lives"), ServerAliveError("it lives")])
    with caplog.at_level(logging.WARNING):
        assert stand_by(cast("Server", server), RecordedEvent(), waits=reasons.append)
    assert (server.started, len(server.watched), len(waited)) == (1, 3, 2)
    assert reasons == ["it lives"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "the takeover failed, will retry: it lives"
    ]


def test_other_errors_are_raised() -> None:
    with pytest.raises(PoolError, match="no pool"):
        waits(FakeServer(starts=[PoolError("no pool")]))
