# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A connection: an attempt ends soon and never raises, whether the connection is attached or
not.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes import damage

from beluga import IndexServer, Namespace, Pool
from beluga.connectors import connection as connection_module
from beluga.connectors.connection import Attachment, Connection
from beluga.connectors.settings import PoolSettings, settings_of
from beluga.errors import (
    BadValueError,
    BelugaError,
    ChecksumError,
    ConnectorError,
    LayoutError,
    NoSpaceError,
    PoolError,
    QuotaError,
    SecondHostError,
    TransferCancelledError,
)
from beluga.transfer import ENGINES, DsaEngine, TransferClass
from tests.transfer import stand_in

NAMESPACE = Namespace.of("test")
DIGESTS = [bytes([i]) * 32 for i in range(4)]
LONG_S = 60.0  # timeout of events that take milliseconds on an idle machine


def put(attachment: Attachment) -> int:
    return attachment.cache(NAMESPACE).put(DIGESTS, np.ones((4, 4096), dtype=np.uint8)).stored


def lookup(attachment: Attachment) -> int:
    return attachment.cache(NAMESPACE).lookup(DIGESTS)


@pytest.fixture
def connection(pool_name: str) -> Iterator[Connection]:
    settings = PoolSettings(pool=pool_name, timeout_ms=300, retry_s=0.05)
    connection = Connection(
        settings, name="test", logger=logging.getLogger("test.link"), prefault=True
    )
    yield connection
    connection.close()


def until_attached(connection: Connection) -> None:
    deadline = time.monotonic() + LONG_S
    while not connection.attached:
        assert time.monotonic() < deadline, "the connection does not attach"
        time.sleep(0.01)


def test_attempt_calls_the_pool_once_attached(server: IndexServer, connection: Connection) -> None:
    assert connection.wait(LONG_S)
    assert connection.attempt("putting", put) == 4
    assert connection.attempt("looking up", lookup) == 4
    assert connection.failure_count == 0


def test_an_attempt_without_a_server_fails_at_once_and_a_later_server_is_found(
    connection: Connection, pool: Pool
) -> None:
    assert not connection.wait(0.4)
    assert connection.attempt("looking up", lookup) is None
    with IndexServer(pool):
        until_attached(connection)
        assert connection.attempt("looking up", lookup) == 0


def test_a_start_waits_until_the_first_attempt_has_ended(
    pool: Pool, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PoolSettings(pool=pool_name, timeout_ms=100, retry_s=LONG_S)
    logger = logging.getLogger("test.link")
    monkeypatch.setattr(connection_module, "SETTLE_S", LONG_S)
    lost = Connection(settings, name="lost", logger=logger)
    assert not lost.settle()
    lost.close()
    with IndexServer(pool):
        connection = Connection(settings, name="found", logger=logger)
        assert connection.settle()
        connection.close()
    monkeypatch.setattr(connection_module, "SETTLE_S", 0.01)
    stuck, begun = threading.Event(), threading.Event()

    def attach(*_: Any, **__: Any) -> Attachment:
        begun.set()
        assert stuck.wait(LONG_S)
        raise PoolError("too late")

    monkeypatch.setattr(connection_module, "Attachment", attach)
    slow = Connection(settings, name="slow", logger=logger)
    assert begun.wait(LONG_S)
    assert not slow.settle()
    stuck.set()
    slow.close()


def test_a_lost_server_costs_one_wait_and_is_reattached(connection: Connection, pool: Pool) -> None:
    with IndexServer(pool):
        assert connection.wait(LONG_S)
        assert connection.attempt("putting", put) == 4
    assert connection.attempt("looking up", lookup) is None
    assert connection.failure_count >= 1
    assert not connection.attached
    with IndexServer(pool):
        until_attached(connection)
        assert connection.attempt("looking up", lookup) == 4


def test_each_failed_session_is_closed_once_before_the_next(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    again = threading.Event()

    class RecordedAttachment(Attachment):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            events.append("attached")
            if len(events) > 1:
                again.set()

        def close(self) -> None:
            super().close()
            events.append("closed")

    def failed(_: Attachment) -> None:
        raise PoolError("made up")

    monkeypatch.setattr(connection_module, "Attachment", RecordedAttachment)
    settings = PoolSettings(pool=pool_name, timeout_ms=5000, retry_s=0.01)
    connection = Connection(settings, name="test", logger=logging.getLogger("test"))
    assert connection.wait(LONG_S)
    assert connection.attempt("failing", failed) is None
    assert again.wait(LONG_S)
    assert connection.wait(LONG_S)
    assert server.stat().live_count == 1
    connection.close()
    assert events == ["attached", "closed"] * 2
    assert server.stat().live_count == 0


@pytest.mark.parametrize(
    "kind", [NoSpaceError, QuotaError, BadValueError, LayoutError, ChecksumError]
)
def test_an_error_of_one_call_leaves_the_session(
    server: IndexServer, connection: Connection, kind: type[BelugaError]
) -> None:
    def wrong(_: Attachment) -> int:
        raise kind("of this call")

    assert connection.wait(LONG_S)
    assert connection.attempt("putting", wrong) is None
    assert connection.failure_count == 1
    assert connection.attached


def test_warnings_are_logged_once_a_minute(
    server: IndexServer, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Attachment) -> int:
        raise NoSpaceError("no room")

    assert connection.wait(LONG_S)
    for _ in range(5):
        connection.attempt("putting", full)
    (record,) = caplog.records
    assert re.fullmatch(r"beluga test: putting: no room \(after \d+ ms\)", record.message)


def test_an_engine_outlives_an_error_of_another_library(
    server: IndexServer, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(_: Attachment) -> int:
        raise RuntimeError("the accelerator has no memory left")

    assert connection.wait(LONG_S)
    assert connection.attempt("staging", out_of_memory) is None
    assert connection.attached, "the pool is not at fault"
    assert connection.failure_count == 1
    (record,) = caplog.records
    assert "staging: RuntimeError('the accelerator has no memory left')" in record.message
    assert record.exc_info is not None, "the log has no place in the code"


def test_settings_are_checked() -> None:
    assert settings_of(PoolSettings, {"timeout_ms": 7, "retry_s": 2}).timeout_ms == 7
    with pytest.raises(ConnectorError, match="has no setting tiemout_ms"):
        settings_of(PoolSettings, {"tiemout_ms": 7})
    with pytest.raises(ConnectorError, match="check_checksums is 'yes'; it must be bool"):
        settings_of(PoolSettings, {"check_checksums": "yes"})
    with pytest.raises(ConnectorError, match="timeout_ms is True"):
        settings_of(PoolSettings, {"timeout_ms": True})
    with pytest.raises(ConnectorError, match="greater than 0"):
        settings_of(PoolSettings, {"timeout_ms": 0})
    with pytest.raises(ConnectorError, match="engine is 'gpu'; it must be auto or cpu or dsa"):
        settings_of(PoolSettings, {"engine": "gpu"})


def test_an_unavailable_copy_engine_is_rejected_at_start() -> None:
    if ENGINES["dsa"].why_none() is None:
        pytest.skip("there is a DSA")
    with pytest.raises(ConnectorError, match="setting engine is dsa, but ") as caught:
        settings_of(PoolSettings, {"engine": "dsa"})
    assert "\n" not in str(caught.value)


def test_a_link_counts_bytes_copied_by_a_dsa_once(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    small, large = np.ones((1, 1000), np.uint8), np.ones((3, 300_000), np.uint8)
    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    cache = attachment.cache(NAMESPACE)
    engine = cache._choice.engine
    assert isinstance(engine, DsaEngine)
    assert cache.put(DIGESTS[:1], small).stored == 1
    assert cache.put(DIGESTS[1:], large).stored == 3
    assert attachment.cache(Namespace.of("another")).lookup(DIGESTS) == 0
    assert attachment.transfer_stats()[TransferClass.OFFLOAD].bytes == small.nbytes + large.nbytes
    assert engine.stat.descriptors > 0
    attachment.close()


def session(pool_name: str | None, **changes: Any) -> Attachment:
    return Attachment(PoolSettings(pool=pool_name, **({"timeout_ms": 5000} | changes)))


def test_settings_reach_the_session(server: IndexServer, pool: Pool, pool_name: str) -> None:
    block, target = np.arange(4096, dtype=np.uint8), np.zeros((1, 4096), dtype=np.uint8)
    careful, careless = (
        session(pool_name),
        session(pool_name, check_checksums=False, timeout_ms=7000),
    )
    try:
        assert (careful.client.timeout_s, careless.client.timeout_s) == (5, 7)
        assert careful.cache(NAMESPACE).put(DIGESTS[:1], block[None]).stored == 1
        damage(pool, block)
        assert careless.cache(NAMESPACE).get(DIGESTS[:1], target).hits == 1
        assert (target[0] != block).sum() == 1
        assert careful.cache(NAMESPACE).get(DIGESTS[:1], target).hits == 0
        assert careful.cache(NAMESPACE) is careful.cache(Namespace.of("test"))
    finally:
        careful.close()
        careless.close()


def test_without_a_pool_setting_the_default_pool_is_used(
    server: IndexServer, pool: Pool, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELUGA_POOL", pool_name)
    attachment = session(None)
    assert attachment.pool.id == pool.id
    attachment.close()


def test_the_session_uses_the_configured_host_number(server: IndexServer, pool_name: str) -> None:
    with pytest.raises(SecondHostError):
        session(pool_name, host=1)


def test_copies_are_unscheduled_without_a_usable_link(
    server: IndexServer,
    pool_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise OSError("made up")

    usual = session(pool_name)
    assert usual.io_handle is not None
    usual.close()
    off = session(pool_name, link="off")
    monkeypatch.setattr(connection_module, "host_link", broken)
    unusable = session(pool_name)
    for attachment in (off, unusable):
        assert put(attachment) in (0, 4)
        assert attachment.transfer_stats() == {}
        attachment.close()
    assert [record.message for record in caplog.records] == [
        "beluga: copies are not throttled: made up"
    ]


def test_a_failed_session_leaves_no_pool_mapped(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Pool] = []
    real = Pool.close
    monkeypatch.setattr(Pool, "close", lambda pool: (closed.append(pool), real(pool)))
    with pytest.raises(BelugaError):
        session(pool_name, timeout_ms=50)  # there is no server
    assert len(closed) == 1


def test_suppressed_messages_are_counted_in_the_next_warning(
    server: IndexServer,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: Attachment) -> int:
        raise NoSpaceError("no room")

    assert connection.wait(LONG_S)
    for _ in range(3):
        connection.attempt("putting", full)
    connection.attempt("getting", full)  # another kind is logged at once
    monkeypatch.setattr(connection._limit, "_period_s", 0.0)
    connection.attempt("putting", full)
    connection.attempt("putting", full)
    assert len(caplog.records) == 4
    assert "getting" in caplog.records[1].message
    assert "ms) (2 more of this kind" in caplog.records[2].message
    assert "more of" not in caplog.records[3].message


def test_a_stop_ends_copies_until_resume(server: IndexServer, connection: Connection) -> None:
    with connection.stopped():
        pass  # not attached yet: nothing to stop
    assert connection.wait(LONG_S)
    large = np.ones((4, 2 << 20), dtype=np.uint8)

    def put_large(attachment: Attachment) -> int:
        try:
            return attachment.cache(NAMESPACE).put(DIGESTS, large).stored
        except TransferCancelledError:
            return -1

    assert connection.attempt("putting", put) == 4
    assert connection.attempt("removing", lambda a: a.cache(NAMESPACE).remove(DIGESTS)) == 4
    with connection.stopped():
        assert connection.attempt("putting", put_large) == -1
    assert connection.attempt("putting", put_large) == 4


def test_transfer_stats_outlive_their_session(pool: Pool, connection: Connection) -> None:
    def bytes_of() -> int:
        return connection.transfer_stats()[TransferClass.OFFLOAD].bytes

    with IndexServer(pool):
        assert connection.wait(LONG_S)
        assert bytes_of() == 0
        assert connection.attempt("putting", put) == 4
        assert bytes_of() == 4 * 4096
    assert connection.attempt("looking up", lookup) is None
    assert bytes_of() == 4 * 4096
    with IndexServer(pool):
        until_attached(connection)
        assert connection.attempt("removing", lambda a: a.cache(NAMESPACE).remove(DIGESTS)) == 4
        assert connection.attempt("putting", put) == 4
        assert bytes_of() == 8 * 4096


def test_copied_bytes_are_reported_after_the_end(
    server: IndexServer, connection: Connection
) -> None:
    assert connection.wait(LONG_S)
    assert connection.attempt("putting", put) == 4
    connection.close()
    assert connection.transfer_stats()[TransferClass.OFFLOAD].bytes == 4 * 4096


@pytest.mark.parametrize("prefault", [True, False])
def test_connection_prefaults_the_pool_if_requested(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch, prefault: bool
) -> None:
    touched = threading.Event()
    monkeypatch.setattr(Pool, "prefault", lambda _: touched.set())
    settings = PoolSettings(pool=pool_name, timeout_ms=5000)
    connection = Connection(
        settings, name="test", logger=logging.getLogger("test"), prefault=prefault
    )
    assert connection.wait(LONG_S)
    connection.close()
    assert touched.is_set() == prefault
    assert not connection.attached
    assert connection.attempt("putting", put) is None


def test_after_a_failure_the_pool_is_not_accessed_and_close_does_not_wait(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise PoolError("made up")

    monkeypatch.setattr(connection_module, "Attachment", refuse)
    settings = PoolSettings(pool=pool_name, retry_s=LONG_S)
    connection = Connection(settings, name="test", logger=logging.getLogger("test"))
    assert not connection.wait(0.2)
    started_s = time.monotonic()
    connection.close()
    assert time.monotonic() - started_s < LONG_S / 2
    assert tried == [1]


def test_closed_sessions_free_their_lanes(server: IndexServer, pool_name: str) -> None:
    for _ in range(20):  # more than there are lanes
        attachment = session(pool_name)
        assert attachment.cache(NAMESPACE).lookup(DIGESTS) == 0
        attachment.close()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"retry_s": 0}, "retry_s must be greater than 0"),
        ({"timeout_ms": -1}, "must be greater than 0"),
        ({"load_threads": 0}, "load_threads must be greater than 0"),
        ({"link": "fast"}, "beluga's setting link: "),
        ({"pool": 7}, "pool is 7; it must be str or NoneType"),
        ({"host": "a"}, "host is 'a'; it must be int or NoneType"),
        ({"retry_s": True}, "retry_s is True; it must be float"),
    ],
    ids=str,
)
def test_invalid_settings_are_rejected(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConnectorError, match=message):
        settings_of(PoolSettings, setting)


def test_settings_at_their_limits_are_accepted() -> None:
    minima = {"timeout_ms": 1, "retry_s": 0.001, "load_threads": 1, "link": "off", "pool": None}
    settings = settings_of(PoolSettings, minima)
    assert (settings.timeout_ms, settings.load_threads, settings.link) == (1, 1, "off")
    assert settings_of(PoolSettings, {"link": "46.2/33"}).link == "46.2/33"
    assert (PoolSettings().timeout_ms, PoolSettings().retry_s) == (500, 1.0)
    assert PoolSettings().check_checksums
