# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server that stands by with a lease; the test controls the leases and servers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from support.blocks import eventually

from beluga.errors import BelugaError, LeaseError, PoolError, ServerAliveError
from beluga.rpc import Server
from beluga.rpc.standby import LeaseKeeper, stand_by


class FakeLease:
    """A lease that is held, renewed or lost as the test specifies."""

    def __init__(self, *, acquires: list[bool | Exception] | None = None) -> None:
        self.acquires = acquires or [True]
        self.renewals: list[bool | Exception] = []
        self.calls: list[str] = []
        self.renewed = threading.Event()
        self.released = 0

    def acquire(self, timeout_s: float) -> bool:
        self.calls.append("acquire")
        return _result(self.acquires)

    def renew(self) -> bool:
        self.calls.append("renew")
        if not self.renewals:
            self.renewed.set()
            return True
        return _result(self.renewals)

    def release(self) -> None:
        self.calls.append("release")
        self.released += 1

    def taken_and_given(self) -> list[str]:
        """Return the calls without renewals, whose number depends on scheduling."""
        return [call for call in self.calls if call != "renew"]


def _result(answers: list[bool | Exception]) -> bool:
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


class FakeServer:
    """The part of a server that :func:`stand_by` and :class:`LeaseKeeper` use."""

    def __init__(
        self, *, watches: list[bool] | None = None, starts: list[Exception] | None = None
    ) -> None:
        self.watches = watches or [True]
        self.starts = starts or []
        self.start_until: Callable[[], object] = lambda: None  # a takeover lasts until it returns
        self.started = 0
        self.watched: list[tuple[float, float]] = []
        self.failure: BelugaError | None = None
        self.failed = threading.Event()
        self.stopped = 0

    def watch(self, timeout_s: float, *, silent_s: float) -> bool:
        self.watched.append((timeout_s, silent_s))
        return self.watches.pop(0) if len(self.watches) > 1 else self.watches[0]

    def start(self) -> None:
        self.start_until()
        if self.starts:
            raise self.starts.pop(0)
        self.started += 1

    def fail(self, failure: BelugaError) -> None:
        self.failure = failure
        self.failed.set()

    def stop(self) -> None:
        self.stopped += 1


def waits(server: FakeServer, lease: FakeLease | None = None, **options: Any) -> bool:
    return stand_by(cast("Server", server), threading.Event(), lease=lease, **options)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beluga.rpc.standby._RENEWALS_PER_S", 1000.0)
    monkeypatch.setattr("beluga.rpc.standby._RETRY_S", 0.001)


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


def test_without_the_lease_a_standby_continues_to_wait() -> None:
    server, lease = FakeServer(), FakeLease(acquires=[False, False, True])
    assert waits(server, lease)
    assert server.started == 1
    assert lease.taken_and_given() == ["acquire"] * 3  # a slow start renews the lease meanwhile


def test_before_it_is_due_no_lease_is_requested() -> None:
    server, lease = FakeServer(watches=[False, True]), FakeLease()
    assert waits(server, lease)
    assert lease.taken_and_given() == ["acquire"]


def test_a_lease_is_retried_if_its_server_does_not_reply(caplog: pytest.LogCaptureFixture) -> None:
    away = LeaseError("etcd does not answer")
    server, lease = FakeServer(), FakeLease(acquires=[away, away, LeaseError("no"), True])
    with caplog.at_level(logging.WARNING):
        assert waits(server, lease)
    assert lease.taken_and_given() == ["acquire", "release"] * 3 + ["acquire"]
    assert [record.getMessage() for record in caplog.records] == [
        # logged once, however often it occurs
        "the takeover failed, will retry: etcd does not answer",
        "the takeover failed, will retry: no",
    ]


def test_a_holder_that_finds_the_server_alive_releases_the_lease() -> None:
    server, lease = FakeServer(starts=[ServerAliveError("it lives")]), FakeLease()
    assert waits(server, lease)
    assert lease.taken_and_given() == ["acquire", "release", "acquire"]
    assert server.started == 1


def test_without_a_lease_a_live_server_is_still_watched() -> None:
    server = FakeServer(starts=[ServerAliveError("it lives")])
    assert waits(server)
    assert len(server.watched) == 2


@pytest.mark.parametrize("with_lease", [False, True])
def test_other_errors_release_the_lease_and_are_raised(with_lease: bool) -> None:
    server, lease = FakeServer(starts=[PoolError("no pool")]), FakeLease()
    with pytest.raises(PoolError, match="no pool"):
        waits(server, lease if with_lease else None)
    assert lease.released == int(with_lease)


def test_a_held_lease_is_renewed_and_released_after_the_server() -> None:
    server, lease = FakeServer(), FakeLease()
    with LeaseKeeper(cast("Server", server), lease):
        assert lease.renewed.wait(60)
        assert server.stopped == 0
    assert server.failure is None
    assert (server.stopped, lease.released) == (1, 1)
    assert lease.calls[-1] == "release"


def test_a_renewal_in_progress_ends_before_the_lease_is_released() -> None:
    requested, answer = threading.Event(), threading.Event()

    class Slow(FakeLease):
        def renew(self) -> bool:
            requested.set()
            assert answer.wait(60)
            return super().renew()

    server, lease = FakeServer(), Slow()
    with LeaseKeeper(cast("Server", server), lease):
        assert requested.wait(60)
        threading.Timer(0.05, answer.set).start()
    assert lease.calls == ["renew", "release"]


def test_a_rejected_takeover_waits_before_the_next_try() -> None:
    waited: list[float | None] = []

    class RecordedEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    server = FakeServer(starts=[ServerAliveError("it lives")])
    assert stand_by(cast("Server", server), RecordedEvent())
    assert waited == [0.001]


@pytest.mark.parametrize("how", [False, RuntimeError("broken"), LeaseError("away")])
def test_a_lost_lease_ends_the_server(how: bool | Exception) -> None:
    server, lease = FakeServer(), FakeLease()
    lease.renewals = [True, how]
    with LeaseKeeper(cast("Server", server), lease):
        assert server.failed.wait(60)
    assert isinstance(server.failure, LeaseError)
    assert "lost" in str(server.failure)
    requested = lease.calls.count("renew")
    assert requested == 2  # a keeper that has lost the lease does not try again


def test_the_lease_is_renewed_during_a_takeover() -> None:
    server, lease = FakeServer(), FakeLease()
    server.start_until = lambda: eventually(lambda: lease.calls.count("renew") > 1)
    assert waits(server, lease)
    assert server.failure is None
    assert lease.calls[0] == "acquire"
    assert lease.calls.count("renew") > 1
    assert lease.released == 0


@pytest.mark.parametrize("how", [False, LeaseError("away")])
def test_a_lease_that_is_lost_during_a_takeover_ends_the_server(how: bool | Exception) -> None:
    server, lease = FakeServer(), FakeLease()
    lease.renewals = [True, how]
    server.start_until = lambda: server.failed.wait(60)
    with pytest.raises(LeaseError, match="lost"):
        waits(server, lease)
    assert (server.started, server.stopped, lease.released) == (1, 1, 1)


def test_a_takeover_that_is_refused_ends_the_renewals() -> None:
    server, lease = FakeServer(starts=[ServerAliveError("it lives")]), FakeLease()
    server.start_until = lambda: lease.renewed.wait(60)
    assert waits(server, lease)
    released = lease.calls.index("release")
    assert lease.calls[released + 1] == "acquire"
    assert not [each for each in threading.enumerate() if each.name == "beluga-lease"]


def test_a_real_takeover_longer_than_the_lease_ends(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, take = FakeLease(), Server._take

    def slow(server: Server, handle: Any) -> None:
        assert lease.renewed.wait(60)
        take(server, handle)

    monkeypatch.setattr(Server, "_take", slow)
    server = Server(pool)
    assert stand_by(server, threading.Event(), lease=lease)
    with LeaseKeeper(server, lease):
        assert server.stat().epoch == 1
        assert server.failure is None


def test_the_lease_is_kept_until_the_server_has_stopped() -> None:
    server, lease = FakeServer(), FakeLease()

    def stop() -> None:
        lease.renewed.clear()
        assert lease.renewed.wait(60)

    server.stop = stop  # type: ignore[method-assign]
    with LeaseKeeper(cast("Server", server), lease):
        pass
    assert lease.calls[-1] == "release"


def test_a_real_server_stops_when_its_lease_is_lost(pool: Any) -> None:
    lease = FakeLease()
    with Server(pool) as server:
        lease.renewals = [True, True, False]
        with LeaseKeeper(server, lease):
            serving = [each for each in threading.enumerate() if each.name == "beluga-server"]
            for thread in serving:
                thread.join(60)
                assert not thread.is_alive()
            assert isinstance(server.failure, LeaseError)
