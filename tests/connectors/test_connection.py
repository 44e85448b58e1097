# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A connection: an attempt ends soon and never raises, whether the connection is attached or
not.
"""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from fakes import damage
from support.blocks import eventually

from beluga import IndexServer, Namespace, Pool
from beluga.connectors import connection as connection_module
from beluga.connectors.connection import HOST, Attachment, Connection
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
from beluga.kvcache import OpTicket
from beluga.kvcache import keys as keys_module
from beluga.transfer import ENGINES, DsaEngine, TransferClass, TransferStats
from tests.transfer import stand_in

NAMESPACE = Namespace.of("test")
DIGESTS = [bytes([i]) * 32 for i in range(4)]
LONG_S = 60.0  # timeout of events that take milliseconds on an idle machine

Connect: TypeAlias = "Callable[..., Connection]"
Open: TypeAlias = "Callable[..., Attachment]"


def put(attachment: Attachment) -> int:
    return attachment.cache(NAMESPACE).put(DIGESTS, np.ones((4, 4096), dtype=np.uint8)).stored


def lookup(attachment: Attachment) -> int:
    return attachment.cache(NAMESPACE).lookup(DIGESTS)


def remove(attachment: Attachment) -> int:
    return attachment.cache(NAMESPACE).remove(DIGESTS)


def failing(error: Exception) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise error

    return raises


@pytest.fixture
def connect(pool_name: str) -> Iterator[Connect]:
    """A function that makes a connection. It is closed afterwards."""
    made: list[Connection] = []

    def connect(*, prefault: bool = False, **settings: Any) -> Connection:
        given = PoolSettings(pool=pool_name, **{"timeout_ms": 5000} | settings)
        logger = logging.getLogger("test.link")
        made.append(Connection(given, name="test", logger=logger, prefault=prefault))
        return made[-1]

    yield connect
    for connection in made:
        connection.close()


@pytest.fixture
def connection(connect: Connect) -> Connection:
    return connect(timeout_ms=300, retry_s=0.05, prefault=True)


@pytest.fixture
def attached(server: IndexServer, connection: Connection) -> Connection:
    assert connection.wait(LONG_S)
    return connection


@pytest.fixture
def session(pool_name: str) -> Iterator[Open]:
    """A function that opens a session. It is closed afterwards."""
    made: list[Attachment] = []

    def session(**settings: Any) -> Attachment:
        made.append(Attachment(PoolSettings(**{"pool": pool_name, "timeout_ms": 5000} | settings)))
        return made[-1]

    yield session
    for attachment in made:
        attachment.close()


def test_a_later_or_restarted_server_is_found_and_a_lost_one_costs_one_wait(
    connection: Connection, pool: Pool
) -> None:
    assert not connection.wait(0.4)
    assert connection.attempt("looking up", lookup) is None
    with IndexServer(pool):
        assert eventually(lambda: connection.attached, LONG_S)
        assert connection.attempt("putting", put) == 4
        assert connection.attempt("looking up", lookup) == 4
        failures = connection.failure_count
    assert connection.attempt("looking up", lookup) is None
    assert connection.failure_count > failures
    assert not connection.attached
    with IndexServer(pool):
        assert eventually(lambda: connection.attached, LONG_S)
        assert connection.attempt("looking up", lookup) == 4


def test_a_start_waits_until_the_first_attempt_has_ended(
    pool: Pool, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = {"timeout_ms": 100, "retry_s": LONG_S}
    monkeypatch.setattr(connection_module, "SETTLE_S", LONG_S)
    assert not connect(**brief).settle()
    with IndexServer(pool):
        assert connect(**brief).settle()
    monkeypatch.setattr(connection_module, "SETTLE_S", 0.01)
    stuck, begun = threading.Event(), threading.Event()

    def attach(*_: Any, **__: Any) -> Attachment:
        begun.set()
        assert stuck.wait(LONG_S)
        raise PoolError("too late")

    monkeypatch.setattr(connection_module, "Attachment", attach)
    slow = connect(**brief)
    assert begun.wait(LONG_S)
    assert not slow.settle()
    stuck.set()


def test_each_failed_session_is_closed_once_before_the_next(
    server: IndexServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class RecordedAttachment(Attachment):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            events.append("attached")

        def close(self) -> None:
            super().close()
            events.append("closed")

    monkeypatch.setattr(connection_module, "Attachment", RecordedAttachment)
    connection = connect(retry_s=0.01)
    assert connection.wait(LONG_S)
    assert connection.attempt("failing", failing(PoolError("made up"))) is None
    assert eventually(lambda: events.count("attached") == 2, LONG_S)
    assert connection.wait(LONG_S)
    assert server.stat().live_count == 1
    connection.close()
    assert events == ["attached", "closed"] * 2
    assert server.stat().live_count == 0


@pytest.mark.parametrize(
    "kind", [NoSpaceError, QuotaError, BadValueError, LayoutError, ChecksumError]
)
def test_an_error_of_one_call_leaves_the_session(
    attached: Connection, kind: type[BelugaError]
) -> None:
    assert attached.attempt("putting", failing(kind("of this call"))) is None
    assert attached.failure_count == 1
    assert attached.attached


def test_warnings_are_logged_once_a_minute_with_the_number_of_the_suppressed_ones(
    attached: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = failing(NoSpaceError("no room"))
    for _ in range(3):
        attached.attempt("putting", full)
    attached.attempt("getting", full)  # another kind is logged at once
    monkeypatch.setattr(attached._limit, "_period_s", 0.0)
    attached.attempt("putting", full)
    attached.attempt("putting", full)
    first, other, later, last = (record.message for record in caplog.records)
    assert re.fullmatch(r"beluga test: putting: no room \(after \d+ ms\)", first)
    assert "getting" in other
    assert "ms) (2 more of this kind" in later
    assert "more of" not in last


def test_an_engine_outlives_an_error_of_another_library(
    attached: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("the accelerator has no memory left")
    assert attached.attempt("staging", failing(error)) is None
    assert attached.attached, "the pool is not at fault"
    assert attached.failure_count == 1
    (record,) = caplog.records
    assert f"staging: {error!r}" in record.message
    assert record.exc_info is not None, "the log has no place in the code"


def test_a_link_counts_bytes_copied_by_a_dsa_once(
    server: IndexServer, session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    small, large = np.ones((1, 1000), np.uint8), np.ones((3, 300_000), np.uint8)
    attachment = session()
    cache = attachment.cache(NAMESPACE)
    engine = cache._choice.engine
    assert isinstance(engine, DsaEngine)
    assert cache.put(DIGESTS[:1], small).stored == 1
    assert cache.put(DIGESTS[1:], large).stored == 3
    assert attachment.cache(Namespace.of("another")).lookup(DIGESTS) == 0
    assert attachment.transfer_stats()[TransferClass.OFFLOAD].bytes == small.nbytes + large.nbytes
    assert engine.stat.descriptors > 0


def test_settings_reach_the_session(
    server: IndexServer,
    pool: Pool,
    pool_name: str,
    session: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, target = np.arange(4096, dtype=np.uint8), np.zeros((1, 4096), dtype=np.uint8)
    careful, careless = session(), session(check_checksums=False, timeout_ms=7000)
    assert (careful.client.timeout_s, careless.client.timeout_s) == (5, 7)
    assert careful.cache(NAMESPACE).put(DIGESTS[:1], block[None]).stored == 1
    damage(pool, block)
    assert careless.cache(NAMESPACE).get(DIGESTS[:1], target).hits == 1
    assert (target[0] != block).sum() == 1
    assert careful.cache(NAMESPACE).get(DIGESTS[:1], target).hits == 0
    assert careful.cache(NAMESPACE) is careful.cache(Namespace.of("test"))
    monkeypatch.setenv("BELUGA_POOL", pool_name)
    assert session(pool=None).pool.id == pool.id
    with pytest.raises(SecondHostError):
        session(host=1)


def test_copies_are_unscheduled_without_a_usable_link(
    server: IndexServer,
    session: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert session().handle(HOST) is not None
    off = session(link="off")
    monkeypatch.setattr(connection_module, "host_link", failing(OSError("made up")))
    for attachment in (off, session()):
        assert put(attachment) in (0, 4)
        assert set(attachment.transfer_stats().values()) == {TransferStats()}
    assert [record.message for record in caplog.records] == [
        "beluga: copies are not throttled: made up"
    ]


def test_a_failed_session_leaves_no_pool_mapped(
    session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Pool] = []
    real = Pool.close
    monkeypatch.setattr(Pool, "close", lambda pool: (closed.append(pool), real(pool)))
    with pytest.raises(BelugaError):
        session(timeout_ms=50)  # there is no server
    assert len(closed) == 1


def test_a_stop_ends_copies_until_resume(server: IndexServer, connection: Connection) -> None:
    with connection.stopped(HOST):
        pass  # not attached yet: nothing to stop
    assert connection.wait(LONG_S)
    large = np.ones((4, 2 << 20), dtype=np.uint8)

    def put_large(attachment: Attachment) -> int:
        try:
            return attachment.cache(NAMESPACE).put(DIGESTS, large).stored
        except TransferCancelledError:
            return -1

    assert connection.attempt("putting", put) == 4
    assert connection.attempt("removing", remove) == 4
    with connection.stopped(HOST):
        assert connection.attempt("putting", put_large) == -1
    assert connection.attempt("putting", put_large) == 4


def test_transfer_stats_outlive_their_session_and_the_connection(
    pool: Pool, connection: Connection
) -> None:
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
        assert eventually(lambda: connection.attached, LONG_S)
        assert connection.attempt("removing", remove) == 4
        assert connection.attempt("putting", put) == 4
        connection.close()
        assert bytes_of() == 8 * 4096


def test_salts_that_clients_choose_grow_neither_memory_nor_files(
    server: IndexServer, session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CACHES_MAX", 16)
    monkeypatch.setattr(keys_module, "_FILES_MAX", 64)
    attachment = session()
    folder = attachment.pool.runtime_dir / "namespaces"

    def use(first: int, end: int) -> tuple[int, int]:
        """Use the caches of some salts. Returns the bytes of Python's objects and the files."""
        for salt in range(first, end):
            attachment.cache(Namespace({"name": "test"}, salt=str(salt))).lookup(DIGESTS[:1])
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(list(folder.iterdir()))

    tracemalloc.start()
    try:
        before, _ = use(0, 100)
        after, files = use(100, 1_000)
    finally:
        tracemalloc.stop()
    assert after - before < 100_000  # of 900 caches
    assert files == 32
    assert put(attachment) == 4 and len(list(folder.iterdir())) == files + 1  # others have room


@pytest.mark.parametrize("prefault", [True, False])
def test_connection_prefaults_the_pool_if_requested(
    server: IndexServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, prefault: bool
) -> None:
    touched = threading.Event()
    monkeypatch.setattr(Pool, "prefault", lambda *_: touched.set())
    connection = connect(prefault=prefault)
    assert connection.wait(LONG_S)
    connection.finish(lambda: None, urgent=False)
    assert touched.is_set() == prefault
    connection.close()
    assert not connection.attached
    assert connection.attempt("putting", put) is None


def test_after_a_failure_the_pool_is_not_accessed_and_close_does_not_wait(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise PoolError("made up")

    monkeypatch.setattr(connection_module, "Attachment", refuse)
    connection = connect(retry_s=LONG_S)
    assert not connection.wait(0.2)
    started_s = time.monotonic()
    connection.close()
    assert time.monotonic() - started_s < LONG_S / 2
    assert tried == [1]


def test_submitted_calls_are_executed_in_order_before_the_session_ends(
    attached: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    go, done = threading.Event(), list[tuple[int, bool]]()

    def first(_: OpTicket[None]) -> None:
        assert go.wait(LONG_S)
        done.append((1, attached.attached))
        raise ZeroDivisionError

    failed = attached.submit(first, urgent=False)
    attached.submit(lambda _: done.append((2, attached.attached)), urgent=False)
    assert attached.finish(lambda: 3, urgent=True) == 3  # waits for no call of the other worker
    assert not failed.done()
    threading.Timer(0.05, go.set).start()
    attached.close()
    assert done == [(1, True), (2, True)]
    assert not attached.attached
    assert "an operation of beluga's failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert attached.finish(lambda: 3, urgent=True) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tiemout_ms": 7}, "has no setting tiemout_ms"),
    ({"check_checksums": "yes"}, "check_checksums is 'yes'; it must be bool"),
    ({"timeout_ms": True}, "timeout_ms is True"),
    ({"timeout_ms": 0}, "greater than 0"),
    ({"timeout_ms": -1}, "must be greater than 0"),
    ({"retry_s": 0}, "retry_s must be greater than 0"),
    ({"retry_s": True}, "retry_s is True; it must be float"),
    ({"load_threads": 0}, "load_threads must be greater than 0"),
    ({"link": "fast"}, "beluga's setting link: "),
    ({"pool": 7}, "pool is 7; it must be str or NoneType"),
    ({"host": "a"}, "host is 'a'; it must be int or NoneType"),
    ({"engine": "gpu"}, "engine is 'gpu'; it must be auto or cpu or dsa"),
]


@pytest.mark.parametrize(("setting", "message"), REFUSED, ids=str)
def test_invalid_settings_are_rejected(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConnectorError, match=message):
        settings_of(PoolSettings, setting)


def test_an_unavailable_copy_engine_is_rejected_at_start() -> None:
    if ENGINES["dsa"].why_none() is None:
        pytest.skip("there is a DSA")
    with pytest.raises(ConnectorError, match=r"setting engine is dsa, but .*\Z"):  # one line
        settings_of(PoolSettings, {"engine": "dsa"})


def test_settings_at_their_limits_are_accepted() -> None:
    minima = {"timeout_ms": 1, "retry_s": 0.001, "load_threads": 1, "link": "off", "pool": None}
    settings = settings_of(PoolSettings, minima)
    assert (settings.timeout_ms, settings.load_threads, settings.link) == (1, 1, "off")
    settings = settings_of(PoolSettings, {"timeout_ms": 7, "retry_s": 2, "link": "46.2/33"})
    assert (settings.timeout_ms, settings.retry_s, settings.link) == (7, 2, "46.2/33")
    assert settings.check_checksums
